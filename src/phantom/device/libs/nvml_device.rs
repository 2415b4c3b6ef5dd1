//! NVML's calls for the state of a card: its utilization, its clocks, its ECC errors and
//! its position in the machine.
//!
//! A simulated card has no temperature, power, fan or current clock. The calls for these are not
//! supported, as on many real cards.

use std::ffi::{c_char, c_int};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use memtrace_machine::identity;

use crate::core::call_table::answers;
use crate::core::ffi::{Out, Status, Word};
use crate::core::host_state::host_state;
use crate::core::lock::lock;
use crate::core::{machine, machine_state};
use crate::libs::nvml::{INVALID_ARGUMENT, NOT_SUPPORTED, card_of, give};

/// `nvmlUtilization_t`, in percent.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Utilization {
    gpu: u32,
    memory: u32,
}

/// The shortest time over which utilization is measured. NVML measures it over a sixth of a second to a
/// second, "depending on the product" (`nvml.h`).
const SHORTEST: Duration = Duration::from_millis(160);

/// Returns the share of a recent interval in which the card worked, in percent. Kernels do not run, so their
/// time is simulated, and it passes faster or slower than wall-clock time.
fn utilization(card: usize) -> Utilization {
    /// The last measurement of each card: its time, the card's work time until then, and the answer.
    type Last = Vec<Option<(Instant, u64, Utilization)>>;
    static LAST: Mutex<Last> = Mutex::new(Vec::new());
    let busy = machine_state::state().busy_ns(card);
    let mut last = lock(&LAST);
    if last.len() <= card {
        last.resize(card + 1, None);
    }
    let answer = match last[card] {
        Some((since, _, answer)) if since.elapsed() < SHORTEST => return answer,
        Some((since, before, _)) => {
            let (worked, passed) = (u128::from(busy.saturating_sub(before)), since.elapsed().as_nanos());
            Utilization { gpu: (worked * 100 / passed.max(1)).min(100) as u32, memory: 0 }
        }
        None => Utilization { gpu: if busy > 0 { 100 } else { 0 }, memory: 0 },
    };
    last[card] = Some((Instant::now(), busy, answer));
    answer
}

/// `nvmlPciInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: u32,
    bus: u32,
    device: u32,
    device_id: u32,
    subsystem_id: u32,
    bus_id: [c_char; 32],
}

const _: () = assert!(size_of::<PciInfo>() == 68);

fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut chars = [0; N];
    for (to, byte) in chars.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = byte as c_char;
    }
    chars
}

fn pci_info(card: usize) -> PciInfo {
    PciInfo {
        bus_id_legacy: chars(&identity::bus_id(card)),
        domain: 0,
        bus: identity::bus(card),
        device: 0,
        // Only NVIDIA's vendor id is filled in, because the descriptions of the cards do not contain their
        // device ids.
        device_id: 0x10de,
        subsystem_id: 0,
        bus_id: chars(&identity::long_bus_id(card)),
    }
}

/// Returns the `nvmlDeviceArchitecture_t` of the simulated card.
fn architecture() -> u32 {
    match host_state().spec.cc {
        (..=3, _) => 2,
        (..=5, _) => 3,
        (6, _) => 4,
        (7, 5) => 6,
        (7, _) => 5,
        (8, 9) => 8,
        (8, _) => 7,
        (9, _) => 9,
        _ => 10,
    }
}

/// Writes the highest clock in MHz of graphics or SM (kinds 0 and 1), memory (2) or video (3).
fn max_clock(handle: usize, kind: c_int, out: Out<u32>) -> Status {
    let (sm, memory) = host_state().spec.base.clocks_mhz;
    match kind {
        0 | 1 => give(handle, out, |_| sm),
        2 => give(handle, out, |_| memory),
        3 => NOT_SUPPORTED,
        _ => INVALID_ARGUMENT,
    }
}

/// Writes the same value to two out-parameters, for the card of a handle.
fn give_two<T: Copy>(handle: usize, first: Out<T>, second: Out<T>, value: T) -> Status {
    if second.is_null() {
        return INVALID_ARGUMENT;
    }
    second.put(value);
    give(handle, first, |_| value)
}

/// Writes whether ECC is on now and after the next reboot. Not supported if the card has no ECC.
fn ecc_mode(handle: usize, current: Out<c_int>, pending: Out<c_int>) -> Status {
    match host_state().spec.base.ecc() {
        Some(is_on) => give_two(handle, current, pending, c_int::from(is_on)),
        None => unsupported(handle),
    }
}

/// Writes the number of uncorrectable (kind 1) or corrected (0) errors of a card. "Requires ECC Mode to be
/// enabled" (`nvml.h`).
fn ecc_errors(handle: usize, kind: c_int, out: Out<u64>) -> Status {
    if host_state().spec.base.ecc() != Some(true) {
        return unsupported(handle);
    }
    let errors = |card| machine::table().map_or(0, |table| table.ecc_errors(card));
    match kind {
        0 => give(handle, out, |_| 0),
        1 => give(handle, out, errors),
        _ => INVALID_ARGUMENT,
    }
}

/// Returns the code for "not supported", or an error if the handle is not a card.
fn unsupported(handle: usize) -> Status {
    card_of(handle).err().unwrap_or(NOT_SUPPORTED)
}

answers! {
    Guess fn nvmlDeviceGetUtilizationRates(handle: Word, out: Out<Utilization>) {
        give(handle, out, utilization)
    }
    Real fn {nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v2, nvmlDeviceGetPciInfo_v3}(
        handle: Word, out: Out<PciInfo>,
    ) {
        give(handle, out, pci_info)
    }
    Real fn nvmlDeviceGetCudaComputeCapability(handle: Word, major: Out<c_int>, minor: Out<c_int>) {
        let (a, b) = host_state().spec.cc;
        minor.put(b as c_int);
        give(handle, major, |_| a as c_int)
    }
    Real fn nvmlDeviceGetArchitecture(handle: Word, out: Out<u32>) { give(handle, out, |_| architecture()) }
    Real fn nvmlDeviceGetMemoryBusWidth(handle: Word, out: Out<u32>) {
        give(handle, out, |_| host_state().spec.base.bus_bits)
    }
    Real fn nvmlDeviceGetMaxClockInfo(handle: Word, kind: c_int, out: Out<u32>) {
        max_clock(handle, kind, out)
    }
    Real fn {
        nvmlDeviceGetComputeMode, nvmlDeviceGetDisplayMode, nvmlDeviceGetDisplayActive,
        nvmlDeviceGetPerformanceState,
    }(handle: Word, out: Out<c_int>) { give(handle, out, |_| 0) }
    Real fn nvmlDeviceGetPersistenceMode(handle: Word, out: Out<c_int>) { give(handle, out, |_| 1) }
    Real fn nvmlDeviceGetEccMode(handle: Word, current: Out<c_int>, pending: Out<c_int>) {
        ecc_mode(handle, current, pending)
    }
    Real fn nvmlDeviceGetTotalEccErrors(handle: Word, kind: c_int, _counter: c_int, out: Out<u64>) {
        ecc_errors(handle, kind, out)
    }
    Real fn nvmlDeviceGetP2PStatus(_from: Word, _to: Word, _kind: c_int, out: Out<c_int>) { out.give(0) }
    Unsupported fn nvmlDeviceGetMigMode(handle: Word, _current: Word, _pending: Word) { unsupported(handle) }
    Unsupported fn {nvmlDeviceGetSerial, nvmlDeviceGetVbiosVersion}(handle: Word, _out: Word, _length: u32) {
        unsupported(handle)
    }
    Unsupported fn {
        nvmlDeviceGetBrand, nvmlDeviceGetGpuFabricInfoV, nvmlDeviceGetFanSpeed, nvmlDeviceGetPowerUsage,
        nvmlDeviceGetTotalEnergyConsumption, nvmlDeviceGetPowerManagementLimit,
        nvmlDeviceGetEnforcedPowerLimit,
    }(handle: Word, _out: Word) { unsupported(handle) }
    Unsupported fn {
        nvmlDeviceGetNvLinkState, nvmlDeviceGetNvLinkRemoteDeviceType, nvmlDeviceGetNvLinkRemotePciInfo_v2,
    }(handle: Word, _link: u32, _out: Word) { unsupported(handle) }
    Unsupported fn nvmlDeviceGetTemperature(handle: Word, _sensor: c_int, _out: Word) { unsupported(handle) }
    Unsupported fn {nvmlDeviceGetClockInfo, nvmlDeviceGetPcieThroughput}(
        handle: Word, _kind: c_int, _out: Word,
    ) {
        unsupported(handle)
    }
}
