//! The machine that is pretended: its devices, and what each thread knows of them.
//!
//! Set up at the first CUDA call and never changed or torn down after it; the constructor only
//! checks the request, because a preloaded library also gets into shells and compilers.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use memtrace_cards::{CARD_VARIABLE, Spec};

use crate::core::ffi::{INVALID_DEVICE, OK, Status};
use crate::core::values::{DYNAMIC_VARIABLE, Dynamic, Values};
use crate::core::vram::Vram;
use crate::cuda::pool::Pool;
use crate::cuda::stream::Stream;

/// Everything that lives as long as the process.
pub(crate) struct Machine {
    pub(crate) spec: Spec,
    pub(crate) dynamic: Dynamic,
    pub(crate) devices: Vec<Device>,
}

/// One device.
pub(crate) struct Device {
    pub(crate) index: usize,
    /// Device time in nanoseconds: only work moves it, so it is the same in every run.
    clock: AtomicU64,
    /// Counts the work after which nobody knows what memory holds.
    epoch: AtomicU64,
    /// The legacy default stream.
    pub(crate) stream: Stream,
    vram: Mutex<Vram>,
    values: Mutex<Values>,
    pool: Mutex<Pool>,
}

/// A lock that a panic elsewhere cannot take away from the program.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Device {
    fn new(index: usize, spec: &Spec) -> Self {
        Self {
            index,
            clock: AtomicU64::new(0),
            epoch: AtomicU64::new(0),
            stream: Stream::new(index, 0, 0),
            vram: Mutex::new(Vram::new(index, spec.memory - spec.context - spec.others)),
            values: Mutex::default(),
            pool: Mutex::new(Pool::new(index)),
        }
    }

    pub(crate) fn vram(&self) -> MutexGuard<'_, Vram> {
        lock(&self.vram)
    }

    pub(crate) fn values(&self) -> MutexGuard<'_, Values> {
        lock(&self.values)
    }

    /// The default pool. Take it before [`vram`](Self::vram), never after.
    pub(crate) fn pool(&self) -> MutexGuard<'_, Pool> {
        lock(&self.pool)
    }

    /// Device time now.
    pub(crate) fn now(&self) -> u64 {
        self.clock.load(Ordering::Relaxed)
    }

    /// Stays the same while what is known of memory stays true.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Work was done that may have written anything anywhere.
    pub(crate) fn disturb(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// Lets the device have worked for so long.
    pub(crate) fn work(&self, nanoseconds: u64) {
        self.clock.fetch_add(nanoseconds, Ordering::Relaxed);
    }
}

/// The machine.
pub(crate) fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let spec = requested().unwrap_or_default();
        let visible = visible(spec.count, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
        let devices = (0..visible).map(|index| Device::new(index, &spec)).collect();
        Machine { spec, dynamic: dynamic().unwrap_or(Dynamic::Full), devices }
    })
}

/// What the environment asks for.
fn requested() -> Result<Spec, memtrace_cards::SpecError> {
    Spec::parse(&std::env::var(CARD_VARIABLE).unwrap_or_default())
}

/// How large results are taken to be whose size nobody can know.
fn dynamic() -> Option<Dynamic> {
    Dynamic::parse(&std::env::var(DYNAMIC_VARIABLE).unwrap_or_default())
}

/// Refuses a request that cannot be met before the program runs as something else.
#[ctor::ctor(unsafe)]
fn check_request() {
    let wrong = match (requested(), dynamic()) {
        (Err(error), _) => Some(format!("{CARD_VARIABLE}: {error}")),
        (_, None) => Some(format!("{DYNAMIC_VARIABLE}: it must be full, half or empty")),
        _ => None,
    };
    if let Some(wrong) = wrong {
        eprintln!("memtrace: {wrong}");
        // SAFETY: ends the process before any of its own code ran, so no handler is skipped.
        unsafe { libc::_exit(2) }
    }
}

/// How many devices the program may see: as the real driver reads its variable, the list counts up
/// to the first entry that is no device.
fn visible(count: u32, variable: Option<&str>) -> usize {
    let Some(list) = variable else { return count as usize };
    let mut seen = Vec::new();
    for entry in list.split(',') {
        let entry = entry.trim();
        let index = match entry.strip_prefix("GPU-") {
            // Our identifiers end in the index.
            Some(uuid) => {
                uuid.get(uuid.len().saturating_sub(2)..).and_then(|hex| u32::from_str_radix(hex, 16).ok())
            }
            None => entry.parse().ok(),
        };
        match index.filter(|&index| index < count && !seen.contains(&index)) {
            Some(index) => seen.push(index),
            None => break,
        }
    }
    seen.len()
}

thread_local! {
    static DEVICE: Cell<usize> = const { Cell::new(0) };
    static LAST_ERROR: Cell<Status> = const { Cell::new(OK) };
}

/// The calling thread's device.
pub(crate) fn current() -> &'static Device {
    let machine = machine();
    let index = DEVICE.try_with(Cell::get).unwrap_or(0);
    // With no device visible every call that could come here has been refused with that reason;
    // the spare one keeps a careless caller alive.
    machine.devices.get(index).unwrap_or_else(|| spare())
}

fn spare() -> &'static Device {
    static SPARE: OnceLock<Device> = OnceLock::new();
    SPARE.get_or_init(|| Device::new(0, &machine().spec))
}

/// The index of the calling thread's device.
pub(crate) fn current_index() -> c_int {
    DEVICE.try_with(Cell::get).unwrap_or(0) as c_int
}

/// Makes a device the calling thread's.
pub(crate) fn set_current(index: c_int) -> Status {
    match device(index) {
        Some(device) => {
            let _ = DEVICE.try_with(|cell| cell.set(device.index));
            OK
        }
        None => fail(INVALID_DEVICE),
    }
}

/// The device of that index.
pub(crate) fn device(index: c_int) -> Option<&'static Device> {
    machine().devices.get(usize::try_from(index).ok()?)
}

/// Keeps a failure for `cudaGetLastError` and hands it back.
pub(crate) fn fail(status: Status) -> Status {
    if status != OK {
        let _ = LAST_ERROR.try_with(|cell| cell.set(status));
    }
    status
}

/// The last failure of the calling thread, forgotten by this call when `clear`.
pub(crate) fn last_error(clear: bool) -> Status {
    LAST_ERROR.try_with(|cell| if clear { cell.replace(OK) } else { cell.get() }).unwrap_or(OK)
}

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn the_visible_devices_are_counted_as_the_driver_does() {
        for (list, seen) in [
            (None, 8),
            (Some(""), 0),
            (Some("-1"), 0),
            (Some("0"), 1),
            (Some("3,1"), 2),
            (Some("0,9,1"), 1),
            (Some("0,0"), 1),
        ] {
            assert_eq!(visible(8, list), seen, "{list:?}");
        }
    }
}
