//! The simulated host: its devices, and the state that CUDA keeps for each thread.
//!
//! [`HostState`] is created at the first CUDA call and then never replaced or dropped. Each thread has its
//! own current device and last error. The constructor of the library only checks the request and prepares the
//! environment, because a preloaded library is also loaded into shells and compilers.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;

use memtrace_cards::{
    CARD_VARIABLE, DYNAMIC_VARIABLE, FAULT_VARIABLE, HOST_VALUES_VARIABLE, LOADING_VARIABLE,
    PAST_OOM_VARIABLE, Spec, SpecError,
};
use memtrace_machine::identity;
use memtrace_util::phantom_variables::{READS_VARIABLE, STEP_MS_VARIABLE};

use crate::core::device::Device;
use crate::core::dynamic_sizes::DynamicSizes;
use crate::core::faults;
use crate::core::ffi::{INVALID_DEVICE, OK, Status};
use crate::core::host_pages;
use crate::core::loop_guard;
use crate::core::past_oom;
use crate::core::triton;
use crate::core::vram;
use crate::core::watchdog;

/// The simulated machine: its configuration and its devices.
pub(crate) struct HostState {
    pub(crate) spec: Spec,
    pub(crate) dynamic: DynamicSizes,
    /// The devices that `CUDA_VISIBLE_DEVICES` leaves visible, in its order.
    pub(crate) devices: Vec<Device>,
}

/// Returns the host, which the first call creates.
pub(crate) fn host_state() -> &'static HostState {
    static HOST: OnceLock<HostState> = OnceLock::new();
    HOST.get_or_init(|| {
        triton::report_failure();
        let spec = requested_spec().unwrap_or_default();
        vram::set_address_bits(spec.address_bits());
        let visible = visible_cards(spec.count, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
        let devices = visible.into_iter().enumerate();
        let devices = devices.map(|(index, card)| Device::new(index, card, &spec)).collect();
        HostState { spec, dynamic: requested_dynamic().unwrap_or(DynamicSizes::Full), devices }
    })
}

/// Parses the card that `MEMTRACE_PHANTOM` names.
fn requested_spec() -> Result<Spec, SpecError> {
    let spec = Spec::parse(&std::env::var(CARD_VARIABLE).unwrap_or_default())?;
    let loading = std::env::var(LOADING_VARIABLE).unwrap_or_default();
    Ok(if loading == "EAGER" { spec.with_eager_loading() } else { spec })
}

/// Returns the assumption about data-dependent sizes that the environment requests,
/// or `None` if it is invalid.
fn requested_dynamic() -> Option<DynamicSizes> {
    DynamicSizes::parse(&std::env::var(DYNAMIC_VARIABLE).unwrap_or_default())
}

/// Returns the value of a variable that is 0 or 1, and `default` if it is unset or empty. Returns `None` for any
/// other value.
fn switch(variable: &str, default: bool) -> Option<bool> {
    match std::env::var_os(variable).unwrap_or_default().to_str() {
        Some("") => Some(default),
        Some("0") => Some(false),
        Some("1") => Some(true),
        _ => None,
    }
}

/// Ends the process with status 2 when the request is invalid, before the program could run on the wrong
/// device.
#[ctor::ctor(unsafe)]
fn check_request() {
    let (past_oom, keeps_values) = (switch(PAST_OOM_VARIABLE, false), switch(HOST_VALUES_VARIABLE, true));
    let error = match (requested_spec(), requested_dynamic(), faults::requested()) {
        (Err(error), _, _) => Some(format!("{CARD_VARIABLE}: {error}")),
        (_, None, _) => Some(format!("{DYNAMIC_VARIABLE}: it must be full, half or empty")),
        (_, _, Err(error)) => Some(format!("{FAULT_VARIABLE}: {error}")),
        _ if loop_guard::requested_reads().is_none() => {
            Some(format!("{READS_VARIABLE}: it must be a number of reads, or 0 for no limit"))
        }
        _ if watchdog::requested_step_ms().is_none() => {
            Some(format!("{STEP_MS_VARIABLE}: it must be a number of milliseconds, or 0 for the wall clock"))
        }
        _ if past_oom.is_none() => Some(format!("{PAST_OOM_VARIABLE}: it must be 0 or 1")),
        _ if keeps_values.is_none() => Some(format!("{HOST_VALUES_VARIABLE}: it must be 0 or 1")),
        (_, _, Ok(requested)) => {
            faults::arm(requested);
            if past_oom == Some(true) {
                past_oom::turn_on();
            }
            if keeps_values == Some(false) {
                host_pages::turn_on();
            }
            triton::find_libcuda();
            None
        }
    };
    if let Some(error) = error {
        eprintln!("memtrace: {error}");
        // SAFETY: ends the process before any code of the program ran, so no handler is skipped.
        unsafe { libc::_exit(2) }
    }
}

/// Returns the cards that `CUDA_VISIBLE_DEVICES` leaves visible, in its order. The list ends at the first
/// invalid entry (CUDA Programming Guide, CUDA Environment Variables). NVIDIA documents neither a repeated
/// entry, nor text after a number, nor a list of numbers and UUIDs. There this function follows PyTorch
/// (`_parse_visible_devices` in `torch/cuda/__init__.py`): no card is visible if an entry is repeated, `1gpu2` is
/// 1, and the list ends at the first entry of the other kind.
fn visible_cards(count: u32, variable: Option<&str>) -> Vec<usize> {
    let count = count as usize;
    let Some(list) = variable else { return (0..count).collect() };
    let has_uuids = list.trim_start().starts_with("GPU-");
    let number = |entry: &str| {
        let digits = entry.strip_prefix('+').unwrap_or(entry);
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        digits[..end].parse::<usize>().ok()
    };
    // The numbers, or the UUIDs with 0 as their number.
    let mut entries: Vec<(usize, &str)> = Vec::new();
    for text in list.split(',').map(str::trim) {
        let entry = match has_uuids {
            true => text.starts_with("GPU-").then_some((0, text)),
            false => number(text).map(|number| (number, "")),
        };
        match entry {
            Some(entry) if entries.contains(&entry) => return Vec::new(),
            Some(entry) => entries.push(entry),
            None => break,
        }
    }
    let card = |&(number, uuid): &(usize, &str)| match has_uuids {
        true => identity::index_of_uuid(uuid, count),
        false => Some(number).filter(|&number| number < count),
    };
    entries.iter().map_while(card).collect()
}

/// Returns the position of a visible device in the machine.
pub(crate) fn card_of(index: usize) -> usize {
    host_state().devices.get(index).map_or(index, |device| device.card)
}

thread_local! {
    static CURRENT_DEVICE: Cell<usize> = const { Cell::new(0) };
    static LAST_ERROR: Cell<Status> = const { Cell::new(OK) };
}

/// Returns the calling thread's device.
pub(crate) fn current() -> &'static Device {
    let index = CURRENT_DEVICE.try_with(Cell::get).unwrap_or(0);
    // Without a visible device, calls that need one fail before this point. The spare device keeps alive a
    // program that ignores those failures.
    host_state().devices.get(index).unwrap_or_else(|| spare_device())
}

fn spare_device() -> &'static Device {
    static SPARE: OnceLock<Device> = OnceLock::new();
    SPARE.get_or_init(|| Device::new(0, 0, &host_state().spec))
}

/// Returns the index of the calling thread's device.
pub(crate) fn current_index() -> c_int {
    CURRENT_DEVICE.try_with(Cell::get).unwrap_or(0) as c_int
}

/// Makes a device the calling thread's current device.
pub(crate) fn set_current(index: c_int) -> Status {
    match device(index) {
        Some(device) => {
            // Since CUDA 12, `cudaSetDevice` creates the context (its documentation, release 12.0).
            device.share().enter();
            let _ = CURRENT_DEVICE.try_with(|cell| cell.set(device.index));
            OK
        }
        None => fail(INVALID_DEVICE),
    }
}

/// Returns the visible device with this index, or `None` if the index is out of range.
pub(crate) fn device(index: c_int) -> Option<&'static Device> {
    host_state().devices.get(usize::try_from(index).ok()?)
}

/// Stores an error for `cudaGetLastError` and returns it.
pub(crate) fn fail(status: Status) -> Status {
    if status != OK {
        set_last_error(status);
    }
    status
}

/// Sets the last error of the calling thread.
pub(crate) fn set_last_error(status: Status) {
    let _ = LAST_ERROR.try_with(|cell| cell.set(status));
}

/// Returns the last error of the calling thread. If `clear` is true, the next call returns success.
pub(crate) fn last_error(clear: bool) -> Status {
    LAST_ERROR.try_with(|cell| if clear { cell.replace(OK) } else { cell.get() }).unwrap_or(OK)
}

#[cfg(test)]
mod tests {
    use super::visible_cards;

    #[test]
    fn cuda_visible_devices_is_read_as_cuda_and_torch_read_it() {
        for (list, seen) in [
            (None, vec![0, 1, 2, 3, 4, 5, 6, 7]),
            (Some(""), vec![]),
            (Some("-1"), vec![]),
            (Some("0"), vec![0]),
            (Some("3,1"), vec![3, 1]),
            (Some("0,9,1"), vec![0]),
            (Some("0,2,-1,1"), vec![0, 2]),
            (Some("0,0"), vec![]),
            (Some("2,0,+2"), vec![]),
            (Some("1gpu2, 2ampere,+3"), vec![1, 2, 3]),
            (Some("1,gpu2"), vec![1]),
            (Some("0,99999999999999999999"), vec![0]),
            (Some("0,9,0"), vec![]),
            (Some("0,9,1"), vec![0]),
            (Some("5,GPU-5048414e-544f-4d2d-4445-564943452d05"), vec![5]),
            (Some("GPU-5048414e-544f-4d2d-4445-564943452d05,2"), vec![5]),
            (Some("GPU-5048414e,GPU-5048414e"), vec![]),
        ] {
            assert_eq!(visible_cards(8, list), seen, "{list:?}");
        }
    }
}
