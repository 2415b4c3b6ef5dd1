//! Events that the caching allocator records and asks for: when a block that was freed while streams
//! still used it (`record_stream`) is really free.
//!
//! Just before it reports such a free the allocator records an event on each of those streams; when it
//! sees the last of them done it hands the block out again, and tells nobody. So the last successful
//! query is the end of the block.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use memtrace_record::Recorder;
use memtrace_record::fork_lock::ForkLock;
use memtrace_trace::{Api, Event, Kind};
use rustc_hash::FxHashMap;

use super::NO_RUNTIME;
use crate::attribution::requested_sizes::readable_words;
use crate::ffi::callers::library_at;
use crate::ffi::symbols::find_in_loaded;
use crate::runtime::guard::shielded;
use crate::runtime::thread;

super::caller_hooks! {
    cudaEventRecord(event: *mut c_void, stream: *mut c_void) caller "rdx" => record, CUDA_EVENT_RECORD;
    cudaEventRecordWithFlags(event: *mut c_void, stream: *mut c_void, flags: c_uint) caller "rcx" => record_with_flags, CUDA_EVENT_RECORD_WITH_FLAGS;
    cudaEventQuery(event: *mut c_void) caller "rsi" => query, CUDA_EVENT_QUERY;
    cudaEventSynchronize(event: *mut c_void) caller "rsi" => synchronize, CUDA_EVENT_SYNCHRONIZE;
}

/// Blocks that wait for events.
#[derive(Default)]
struct Waiting {
    /// The block of an event.
    blocks: FxHashMap<usize, u64>,
    /// The device and the number of events of a block.
    left: FxHashMap<u64, (i8, usize)>,
}

/// More streams than use one block.
const MOST_STREAMS: usize = 1024;

static WAITING: ForkLock<Option<Waiting>> = ForkLock::new(None);
/// How many events are waited for: almost always none, and then a query costs nothing.
static EVENTS: AtomicUsize = AtomicUsize::new(0);

/// Did the allocator ever record an event? Most programs have no `record_stream`, and reports ask often.
static ANY: AtomicBool = AtomicBool::new(false);

/// A report of a free: do streams still use the block? Then its events are waited for.
#[inline]
pub(in crate::hooks) fn free_is_deferred(addr: u64, device: i8) -> bool {
    ANY.load(Ordering::Relaxed) && wait_for_recorded(addr, device)
}

fn wait_for_recorded(addr: u64, device: i8) -> bool {
    let events =
        thread::with(|own| own.recorded.try_borrow_mut().map(|mut events| std::mem::take(&mut *events)));
    let Some(Ok(events)) = events else { return false };
    if events.is_empty() {
        return false;
    }
    EVENTS.fetch_add(events.len(), Ordering::Relaxed);
    WAITING.with(|waiting| {
        let waiting = waiting.get_or_insert_with(Waiting::default);
        waiting.left.insert(addr, (device, events.len()));
        for event in events {
            waiting.blocks.insert(event, addr);
        }
    });
    true
}

/// A report of an allocation: what was recorded before it belongs to no free.
#[inline]
pub(in crate::hooks) fn forget_recorded() {
    if !ANY.load(Ordering::Relaxed) {
        return;
    }
    thread::with(|own| {
        if let Ok(mut events) = own.recorded.try_borrow_mut() {
            events.clear();
        }
    });
}

fn recorded(event: *mut c_void, caller: *const c_void) {
    if library_at(caller).is_torch_allocator && !is_of_device_guard(caller) {
        ANY.store(true, Ordering::Relaxed);
        thread::with(|own| {
            if let Ok(mut events) = own.recorded.try_borrow_mut() {
                if events.len() >= MOST_STREAMS {
                    events.clear();
                }
                events.push(event as usize);
            }
        });
    }
}

fn done(event: *mut c_void, caller: *const c_void) {
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
        recorder.record(|clock_ns| Event {
            clock_ns,
            kind: Kind::FreeCompleted as u8,
            api: Api::CachingAllocator as u8,
            device,
            addr,
            ..Event::default()
        });
    }
}

/// `c10::impl::device_guard_impl_registry`: an object for each type of device.
const GUARDS: &CStr = c"_ZN3c104impl26device_guard_impl_registryE";
/// CUDA's place in it (`c10/core/DeviceType.h`).
const CUDA: usize = 1;
/// More virtual functions than a guard has; behind its table lies other data of the library.
const GUARD_FUNCTIONS: usize = 32;

unsafe extern "C" {
    /// The start of the function that the code before `pc` belongs to; null when nobody knows. libgcc's.
    fn _Unwind_FindEnclosingFunction(pc: *const c_void) -> *const c_void;
}

/// Does the call come from torch's device guard? It lives in the allocator's library and records the events of
/// `torch.Event` and of autograd's streams, which belong to no block. Call sites are few, and each is asked once.
fn is_of_device_guard(caller: *const c_void) -> bool {
    /// Call sites: an even number for one of the allocator, an odd one for one of the guard.
    static KNOWN: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];
    // The lowest bit says what it is: of two call sites, which are no byte apart, none is another's.
    let site = (caller as usize) << 1;
    for known in &KNOWN {
        match known.load(Ordering::Relaxed) {
            0 => {
                let answer = usize::from(asks_device_guard(caller));
                let _ = known.compare_exchange(0, site | answer, Ordering::Relaxed, Ordering::Relaxed);
                return answer == 1;
            }
            told if told & !1 == site => return told & 1 == 1,
            _ => {}
        }
    }
    asks_device_guard(caller)
}

fn asks_device_guard(caller: *const c_void) -> bool {
    let registry = find_in_loaded("libc10.so", GUARDS).cast::<*const *const *const c_void>();
    // SAFETY: an address of code, which is only compared with tables.
    let function = unsafe { _Unwind_FindEnclosingFunction(caller) };
    if registry.is_null() || function.is_null() {
        return false;
    }
    // SAFETY: the registry has a place for each type of device, null for one without a guard.
    let guard = unsafe { *registry.add(CUDA) };
    if guard.is_null() {
        return false;
    }
    // SAFETY: a C++ object with virtual functions begins with the address of their table.
    let table = unsafe { *guard };
    let words = readable_words(table.cast()).min(GUARD_FUNCTIONS);
    // SAFETY: this many words are readable.
    (0..words).any(|index| unsafe { *table.add(index) } == function)
}

unsafe extern "C" fn record(event: *mut c_void, stream: *mut c_void, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_EVENT_RECORD.get() else { return NO_RUNTIME };
    shielded(|| recorded(event, caller));
    // SAFETY: the caller's own arguments, passed on unchanged.
    unsafe { real(event, stream) }
}

unsafe extern "C" fn record_with_flags(
    event: *mut c_void,
    stream: *mut c_void,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_EVENT_RECORD_WITH_FLAGS.get() else { return NO_RUNTIME };
    shielded(|| recorded(event, caller));
    // SAFETY: the caller's own arguments, passed on unchanged.
    unsafe { real(event, stream, flags) }
}

unsafe extern "C" fn query(event: *mut c_void, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_EVENT_QUERY.get() else { return NO_RUNTIME };
    // SAFETY: the caller's own argument, passed on unchanged.
    let status = unsafe { real(event) };
    if status == 0 {
        shielded(|| done(event, caller));
    }
    status
}

unsafe extern "C" fn synchronize(event: *mut c_void, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_EVENT_SYNCHRONIZE.get() else { return NO_RUNTIME };
    // SAFETY: the caller's own argument, passed on unchanged.
    let status = unsafe { real(event) };
    if status == 0 {
        shielded(|| done(event, caller));
    }
    status
}

/// Before a fork; see [`ForkLock`].
pub(in crate::hooks) fn lock_for_fork() {
    WAITING.lock_for_fork();
}

/// After a fork, on both sides.
pub(in crate::hooks) fn unlock_after_fork() {
    WAITING.unlock_after_fork();
}
