//! The state of the simulated machine, which NVML's answers report.

use memtrace_machine::files::Machine;
use memtrace_machine::process::Process;
use memtrace_machine::table::{CardUse, ProcessUse};

use crate::core::host_state::{HostState, host_state};
use crate::core::machine::table;

/// Returns the state of the machine at this moment.
pub(crate) fn state() -> Machine {
    let host = host_state();
    let mut machine = match table() {
        Some(table) => Machine::from_table(&table, "", host.spec.clone()),
        None => Machine::empty("", host.spec.clone()),
    };
    if table().is_none() {
        machine.processes.push(alone(host));
    }
    machine
}

/// Returns the use of the cards by this process, for a process that has its cards for itself.
fn alone(host: &HostState) -> ProcessUse {
    let mut cards = vec![CardUse::default(); host.spec.count as usize];
    for device in &host.devices {
        if device.share().is_entered() {
            let (allocated, busy_ns) = (device.vram().used(), device.clock().now());
            cards[device.card] = CardUse { context: Some(host.spec.context), allocated, busy_ns };
        }
    }
    ProcessUse { process: Process::current(), cuda_version: 0, cards }
}
