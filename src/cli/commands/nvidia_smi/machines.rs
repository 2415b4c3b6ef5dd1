//! Finds the simulated machines and cards that `nvidia-smi` shows, and measures the cards' utilization.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use memtrace_cards::{CARD_VARIABLE, Spec};
use memtrace_machine::files::{self, Machine};
use memtrace_machine::{MACHINE_VARIABLE, identity};

use super::refusal::{INVALID, NO_DRIVER, Refusal};

/// A machine and the utilization of its cards, in percent.
pub(super) struct Measured {
    pub(super) machine: Machine,
    pub(super) utilization: Vec<u32>,
}

/// The time over which utilization is measured.
const SAMPLE: Duration = Duration::from_millis(100);

/// Returns the machine of this run, or every machine on which a process of this user runs. Measures the
/// utilization of the cards.
pub(super) fn selected() -> Result<Vec<Measured>, Refusal> {
    let before = busy(&look()?);
    let since = Instant::now();
    if before.values().flatten().any(|&busy| busy > 0) {
        std::thread::sleep(SAMPLE);
    }
    let machines = look()?;
    let now = busy(&machines);
    let passed = since.elapsed().as_nanos().max(1);
    let measured = machines.into_iter().map(|machine| {
        let percent = |card: usize| {
            let of = |times: &BTreeMap<String, Vec<u64>>| {
                times.get(&machine.id).and_then(|all| all.get(card)).copied()
            };
            let worked = of(&now).unwrap_or(0).saturating_sub(of(&before).unwrap_or(0));
            (u128::from(worked) * 100 / passed).min(100) as u32
        };
        let utilization = (0..machine.spec.count as usize).map(percent).collect();
        Measured { machine, utilization }
    });
    Ok(measured.collect())
}

/// Returns for each machine, by its id, how long each of its cards has worked so far, in nanoseconds.
fn busy(machines: &[Machine]) -> BTreeMap<String, Vec<u64>> {
    let times =
        |machine: &Machine| (0..machine.spec.count as usize).map(|card| machine.busy_ns(card)).collect();
    machines.iter().map(|machine| (machine.id.clone(), times(machine))).collect()
}

fn look() -> Result<Vec<Machine>, Refusal> {
    let variable = |name: &str| std::env::var(name).ok();
    if let (Some(id), Some(request)) = (variable(MACHINE_VARIABLE), variable(CARD_VARIABLE)) {
        let spec = Spec::parse(&request)
            .map_err(|error| Refusal::new(format!("memtrace: {CARD_VARIABLE}: {error}"), INVALID))?;
        let machine = files::read(&files::path_of(&id, &request));
        return Ok(vec![machine.unwrap_or_else(|| Machine::empty(&id, spec))]);
    }
    let machines = files::running();
    if machines.is_empty() {
        return Err(Refusal::new(
            "memtrace: no program of this user runs on a simulated GPU; start one with memtrace run --phantom \
             h100-80g -- python train.py",
            NO_DRIVER,
        ));
    }
    Ok(machines)
}

/// Returns the index of the card that a value of `-i` names by its index, UUID or PCI address, or `None` if
/// it names none of the `count` cards.
pub(super) fn card_of_id(id: &str, count: usize) -> Option<usize> {
    let by_index = id.parse().ok().filter(|&card: &usize| card < count);
    by_index.or_else(|| identity::index_of_uuid(id, count)).or_else(|| identity::index_of_bus_id(id, count))
}
