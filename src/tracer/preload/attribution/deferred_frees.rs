//! Deferred frees: a block that is freed while streams still use it (`record_stream`) becomes free later.
//!
//! Just before it reports such a free, the allocator records a CUDA event on each of those streams. When the
//! allocator sees that the last of these events has completed, it may reuse the block, but reports nothing.
//! So memtrace uses the last successful query of the block's events as the end of the block.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memtrace_record::Recorder;
use memtrace_trace::{Api, Header, Payload};
use rustc_hash::FxHashMap;

use crate::ffi::callers::library_at;
use crate::ffi::symbols::find_in_loaded;
use crate::ffi::vtables::functions_from;
use crate::runtime::fork::ForkSafe;
use crate::runtime::thread;

/// Blocks that wait for events.
#[derive(Default)]
struct Waiting {
    /// For each event that a block waits for, by its handle: the address of the block.
    blocks: FxHashMap<usize, u64>,
    /// For each block: its device, and the number of events that it still waits for.
    left: FxHashMap<u64, (i8, usize)>,
}

/// The maximum number of events that a thread keeps between two reports. If there are more, the older events
/// are dropped, because no block is used by so many streams.
const MAX_EVENTS: usize = 1024;

static WAITING: ForkSafe<Option<Waiting>> = ForkSafe::new(None);
/// The number of events that blocks wait for. It is 0 in most programs, and then a query of an event needs no
/// lock.
static EVENTS: AtomicUsize = AtomicUsize::new(0);
/// True if the allocator has ever recorded an event. Most programs never call `record_stream`, so reports
/// check this flag first.
static ANY: AtomicBool = AtomicBool::new(false);

/// Returns true if the free that the allocator reports now is deferred. If so, the events recorded before it
/// become events of the block.
#[inline]
pub(crate) fn is_deferred(addr: u64, device: i8) -> bool {
    ANY.load(Ordering::Relaxed) && wait_for_recorded(addr, device)
}

fn wait_for_recorded(addr: u64, device: i8) -> bool {
    let events = thread::with(|state| {
        state.recorded_events.try_borrow_mut().map(|mut events| std::mem::take(&mut *events))
    });
    let Some(Ok(events)) = events else { return false };
    if events.is_empty() {
        return false;
    }
    EVENTS.fetch_add(events.len(), Ordering::Relaxed);
    let dropped =
        WAITING.with(|waiting| waiting.get_or_insert_with(Waiting::default).add(addr, device, events));
    EVENTS.fetch_sub(dropped, Ordering::Relaxed);
    true
}

impl Waiting {
    /// Adds a block and its events. Returns the number of events that no block waits for any longer: those of
    /// an older block at this address, whose end was missed, and events that are in the list twice.
    fn add(&mut self, addr: u64, device: i8, events: Vec<usize>) -> usize {
        let before = self.blocks.len() + events.len();
        if self.left.contains_key(&addr) {
            self.blocks.retain(|_, block| *block != addr);
        }
        let added = events.into_iter().filter(|&event| self.blocks.insert(event, addr) != Some(addr));
        let left = added.count();
        self.left.insert(addr, (device, left));
        before - self.blocks.len()
    }
}

/// Drops the events that this thread has recorded so far. Called when an allocation is reported, because
/// events before an allocation belong to no free.
#[inline]
pub(crate) fn forget_recorded() {
    if !ANY.load(Ordering::Relaxed) {
        return;
    }
    thread::with(|state| {
        if let Ok(mut events) = state.recorded_events.try_borrow_mut() {
            events.clear();
        }
    });
}

/// Stores an event that the code at `caller` recorded, if that code is torch's allocator.
pub(crate) fn event_recorded(event: *mut c_void, caller: *const c_void) {
    if library_at(caller).is_torch_allocator && !is_device_guard(caller) {
        ANY.store(true, Ordering::Relaxed);
        thread::with(|state| {
            if let Ok(mut events) = state.recorded_events.try_borrow_mut() {
                if events.len() >= MAX_EVENTS {
                    events.clear();
                }
                events.push(event as usize);
            }
        });
    }
}

/// Records that the code at `caller` saw a completed event. If no other event of the block remains, records
/// the end of the block.
pub(crate) fn event_completed(event: *mut c_void, caller: *const c_void) {
    if EVENTS.load(Ordering::Relaxed) == 0 || !library_at(caller).is_torch_allocator {
        return;
    }
    let free = WAITING.with(|waiting| {
        let waiting = waiting.as_mut()?;
        let addr = waiting.blocks.remove(&(event as usize))?;
        EVENTS.fetch_sub(1, Ordering::Relaxed);
        let (device, left) = waiting.left.get_mut(&addr)?;
        *left -= 1;
        let free = (*left == 0).then_some((addr, *device));
        if free.is_some() {
            waiting.left.remove(&addr);
        }
        free
    });
    if let (Some((addr, device)), Some(recorder)) = (free, Recorder::active()) {
        recorder.record(|clock_ns| {
            Payload::FreeCompleted { address: addr }.pack(Header::new(
                clock_ns,
                Api::CachingAllocator,
                device,
            ))
        });
    }
}

/// `c10::impl::device_guard_impl_registry`: an array with the guard of each device type.
const GUARDS: &CStr = c"_ZN3c104impl26device_guard_impl_registryE";
/// The index of CUDA in the registry (`c10/core/DeviceType.h`).
const CUDA: usize = 1;
/// The maximum number of words to compare, from the first function of a guard's vtable on. A guard has fewer
/// virtual functions; the words after them are other data of the library.
const GUARD_FUNCTIONS: usize = 32;

unsafe extern "C" {
    /// Returns the start of the function that contains `pc`, or null if it is unknown. Part of libgcc.
    fn _Unwind_FindEnclosingFunction(pc: *const c_void) -> *const c_void;
}

/// Returns true if `caller` is in torch's device guard. The guard is in the same library as the allocator,
/// but the events that it records (for `torch.Event` and for autograd's streams) belong to no block. The
/// results for the first 8 call sites are cached, because torch has only a few call sites.
fn is_device_guard(caller: *const c_void) -> bool {
    /// Call sites, shifted left by one bit. The lowest bit is set if the site is in the guard.
    static KNOWN: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];
    let site = (caller as usize) << 1;
    for known in &KNOWN {
        match known.load(Ordering::Relaxed) {
            0 => {
                let answer = usize::from(is_in_device_guard(caller));
                let _ = known.compare_exchange(0, site | answer, Ordering::Relaxed, Ordering::Relaxed);
                return answer == 1;
            }
            known if known & !1 == site => return known & 1 == 1,
            _ => {}
        }
    }
    is_in_device_guard(caller)
}

fn is_in_device_guard(caller: *const c_void) -> bool {
    let registry = find_in_loaded("libc10.so", GUARDS).cast::<*const *const *mut c_void>();
    // SAFETY: the function only looks up `caller`, an address of code, in the unwind tables.
    let function = unsafe { _Unwind_FindEnclosingFunction(caller) };
    if registry.is_null() || function.is_null() {
        return false;
    }
    // SAFETY: the registry has an entry for each type of device, which is null if that type has no guard.
    let guard = unsafe { *registry.add(CUDA) };
    if guard.is_null() {
        return false;
    }
    // SAFETY: a C++ object with virtual functions begins with the address of their table.
    let table = unsafe { *guard };
    functions_from(table, GUARD_FUNCTIONS).iter().any(|of| of.cast_const() == function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_at_an_address_that_still_waits_replaces_the_older_block_and_its_events() {
        let mut waiting = Waiting::default();
        assert_eq!(waiting.add(0x100, 0, vec![1, 2]), 0);
        assert_eq!(waiting.add(0x200, 0, vec![3]), 0);
        assert_eq!(waiting.add(0x100, 1, vec![4, 4]), 3, "1, 2 and the second 4");
        let mut events: Vec<_> = waiting.blocks.into_iter().collect();
        events.sort_unstable();
        assert_eq!(events, [(3, 0x200), (4, 0x100)]);
        assert_eq!((waiting.left[&0x100], waiting.left[&0x200]), ((1, 1), (0, 1)));
    }
}
