//! The functions of the phantom device, if it is preloaded.

use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::end_row::NEEDED_BYTES;

use crate::ffi::symbols::{Home, RealFn, Symbol, find_anywhere};

const LIBRARY: &str = "libmemtrace_phantom.so";

// SAFETY: the type is the one in the phantom device's `nccl_buffers.rs`.
static STANDS_FOR: RealFn<unsafe extern "C" fn() -> *const c_char> =
    unsafe { RealFn::new(c"memtrace_phantom_stands_for", LIBRARY) };

// SAFETY: the type is the one in the phantom device. The function writes at most the given number of bytes of
// JSON and returns the length of the whole JSON.
static DESCRIBE: Symbol<unsafe extern "C" fn(*mut c_char, usize) -> usize> =
    unsafe { Symbol::new(c"memtrace_phantom_describe", Home::Loaded(LIBRARY)) };

// SAFETY: here and below, the types are the ones in the phantom device's `describe.rs`.
static STEP: Symbol<unsafe extern "C" fn(i64)> =
    unsafe { Symbol::new(c"memtrace_phantom_step", Home::Loaded(LIBRARY)) };
static FAULT_AT: Symbol<unsafe extern "C" fn(i64) -> bool> =
    // SAFETY: as above.
    unsafe { Symbol::new(c"memtrace_phantom_fault_at", Home::Loaded(LIBRARY)) };
static TAKE_FAULT: Symbol<unsafe extern "C" fn() -> bool> =
    // SAFETY: as above.
    unsafe { Symbol::new(c"memtrace_phantom_take_fault", Home::Loaded(LIBRARY)) };
static TAKE_GRANT: Symbol<unsafe extern "C" fn() -> bool> =
    // SAFETY: as above.
    unsafe { Symbol::new(c"memtrace_phantom_take_grant", Home::Loaded(LIBRARY)) };
static PAGE_CACHE: Symbol<unsafe extern "C" fn() -> u64> =
    // SAFETY: the type is the one in the phantom device's `unified.rs`.
    unsafe { Symbol::new(c"memtrace_phantom_page_cache", Home::Loaded(LIBRARY)) };
static ACTED_READS: Symbol<unsafe extern "C" fn() -> u64> =
    // SAFETY: the type is the one in the phantom device's `values.rs`.
    unsafe { Symbol::new(c"memtrace_phantom_acted_reads", Home::Loaded(LIBRARY)) };
/// True if the phantom device grants requests past its capacity. Set by [`describe`].
static GOES_PAST_OOM: AtomicBool = AtomicBool::new(false);

/// Notifies the phantom device that a training step begins.
pub(crate) fn step_begins(step: i32) {
    if let Some(tell) = STEP.cached() {
        // SAFETY: here and below, the functions have no preconditions, and a preloaded library stays loaded.
        unsafe { tell(i64::from(step)) }
    }
}

/// Returns true if the phantom device has an out-of-memory error still to inject for this step or an earlier
/// one.
pub(crate) fn has_fault_at(step: i32) -> bool {
    // SAFETY: as above.
    FAULT_AT.cached().is_some_and(|ask| unsafe { ask(i64::from(step)) })
}

/// Returns true once after an allocation that failed because of an injected fault.
pub(crate) fn take_fault() -> bool {
    // SAFETY: as above.
    TAKE_FAULT.cached().is_some_and(|take| unsafe { take() })
}

/// Returns true once, after the process's first granted request past the card's capacity.
pub(crate) fn take_grant() -> bool {
    // SAFETY: as above.
    goes_past_oom() && TAKE_GRANT.cached().is_some_and(|take| unsafe { take() })
}

/// Returns true if the phantom device grants requests past its capacity.
pub(crate) fn goes_past_oom() -> bool {
    GOES_PAST_OOM.load(Ordering::Relaxed)
}

/// Returns the size in bytes of the page cache that the phantom device included when it last reported free
/// memory. Returns `None` without a phantom device.
pub(crate) fn page_cache() -> Option<i64> {
    // SAFETY: it takes no arguments.
    PAGE_CACHE.cached().and_then(|ask| i64::try_from(unsafe { ask() }).ok())
}

/// Returns the number of reads so far in which the program acted on a value that the phantom device made up.
/// Returns `None` without a phantom device.
#[inline]
pub(crate) fn acted_reads() -> Option<u64> {
    // SAFETY: it takes no arguments.
    ACTED_READS.cached().map(|ask| unsafe { ask() })
}

/// Returns true if this process runs on a phantom device.
pub(crate) fn is_present() -> bool {
    !find_anywhere(LIBRARY, c"memtrace_phantom_describe").is_null()
}

/// Returns the library on whose behalf the phantom device handles the thread's current call, or `None` for a
/// call of its own.
pub(crate) fn library_of_call() -> Option<&'static CStr> {
    // SAFETY: it takes no arguments.
    let name = unsafe { STANDS_FOR.get()?() };
    // SAFETY: the pointer is not null, so it points to one of the phantom device's constant C strings.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })
}

/// Returns the phantom device's description of itself as JSON, or null without a phantom device. Also looks
/// up the other functions, so that `Symbol::cached` finds them later.
pub(crate) fn describe() -> serde_json::Value {
    let _ = (DESCRIBE.get(), STEP.get(), FAULT_AT.get(), TAKE_FAULT.get(), TAKE_GRANT.get());
    let _ = (PAGE_CACHE.get(), ACTED_READS.get());
    let about = describe_at_end();
    GOES_PAST_OOM.store(!about[NEEDED_BYTES].is_null(), Ordering::Relaxed);
    about
}

/// Same as [`describe`], which must have been called before. Does not look up symbols, because another thread
/// may hold the loader's lock when the process ends.
pub(crate) fn describe_at_end() -> serde_json::Value {
    let Some(write) = DESCRIBE.cached() else { return serde_json::Value::Null };
    let mut text = vec![0u8; 16 << 10];
    loop {
        // SAFETY: the passed length is the buffer's. The library was preloaded, so it stays loaded.
        let length = unsafe { write(text.as_mut_ptr().cast(), text.len()) };
        // A zero follows the text. A longer text may have grown until the next call.
        if length < text.len() {
            return serde_json::from_slice(&text[..length]).unwrap_or(serde_json::Value::Null);
        }
        text.resize(2 * length, 0);
    }
}
