//! What a program may tell us of itself: the functions of `include/memtrace.h`, exported for C and for
//! ctypes.
//!
//! They mean what NVTX ranges mean, and their push and pop have a stack of their own.

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use memtrace_record::Recorder;
use memtrace_trace::Api;

use crate::attribution::ranges;
use crate::runtime::guard::shielded;
use crate::runtime::pause;
use crate::runtime::session;
use crate::runtime::thread::open_ranges::C_DOMAIN;

/// How long a flush waits for the writer thread.
const FLUSH: Duration = Duration::from_secs(10);

/// # Safety
/// `text` is null or a C string that lives for the call.
unsafe fn text<'a>(text: *const c_char) -> Cow<'a, str> {
    if text.is_null() {
        return Cow::Borrowed("");
    }
    // SAFETY: not null, so a C string by the contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy()
}

/// Runs `work` when the library is not told to stay out.
fn traced<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    if session::session().is_none() {
        return otherwise;
    }
    shielded(work).unwrap_or(otherwise)
}

/// Is the program traced?
#[unsafe(no_mangle)]
pub(crate) extern "C" fn memtrace_is_traced() -> c_int {
    traced(0, || 1)
}

/// Leaves out the rows of ops and ranges.
#[unsafe(no_mangle)]
extern "C" fn memtrace_pause() {
    traced((), || pause::set_paused(true));
}

/// Writes them again.
#[unsafe(no_mangle)]
extern "C" fn memtrace_resume() {
    traced((), || pause::set_paused(false));
}

/// Are they left out?
#[unsafe(no_mangle)]
extern "C" fn memtrace_is_paused() -> c_int {
    traced(0, || c_int::from(pause::is_paused()))
}

/// A mark.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_mark(name: *const c_char) {
    // SAFETY: by the contract.
    traced((), || ranges::mark(Api::Memtrace, &unsafe { text(name) }));
}

/// Opens a range on this thread; gives how many were open.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_range_push(name: *const c_char) -> c_int {
    traced(0, || {
        let before = ranges::depth(C_DOMAIN);
        // SAFETY: by the contract.
        ranges::push(&unsafe { text(name) }, C_DOMAIN, None);
        before
    })
}

/// Closes the last range of this thread; gives how many are left, -1 when there was none.
#[unsafe(no_mangle)]
extern "C" fn memtrace_range_pop() -> c_int {
    traced(-1, || {
        let before = ranges::depth(C_DOMAIN);
        ranges::pop(C_DOMAIN);
        before - 1
    })
}

/// Opens a range that any thread may close; gives its number.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_range_start(name: *const c_char) -> u64 {
    // SAFETY: by the contract.
    traced(0, || ranges::start(&unsafe { text(name) }, C_DOMAIN, None))
}

/// Closes the range of this number.
#[unsafe(no_mangle)]
extern "C" fn memtrace_range_end(range: u64) {
    traced((), || ranges::end(range));
}

/// The training step `step` begins.
#[unsafe(no_mangle)]
extern "C" fn memtrace_step(step: i64) {
    traced((), || ranges::begin_step(step));
}

/// Waits until what was recorded is in the file; 0 when it is.
#[unsafe(no_mangle)]
extern "C" fn memtrace_flush() -> c_int {
    traced(0, || match Recorder::active() {
        Some(recorder) if !recorder.flush(FLUSH) => -1,
        _ => 0,
    })
}
