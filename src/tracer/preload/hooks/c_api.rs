//! The C API: the functions of `include/memtrace.h`, exported for C and for ctypes.
//!
//! The ranges mean the same as NVTX ranges, but their push and pop use a separate stack.

use std::borrow::Cow;
use std::ffi::{CStr, c_char, c_int};
use std::time::Duration;

use memtrace_record::Recorder;
use memtrace_trace::Api;

use crate::attribution::{detail, ranges};
use crate::guard::shielded;
use crate::runtime::pause;
use crate::runtime::session;
use crate::runtime::thread::open_ranges::C_DOMAIN;

/// The maximum time for which `memtrace_flush` waits for the writer thread.
const FLUSH: Duration = Duration::from_secs(10);

/// Returns a C string of the program as text; empty for null.
///
/// # Safety
/// `text` is null or a C string that lives for the call.
unsafe fn text<'a>(text: *const c_char) -> Cow<'a, str> {
    if text.is_null() {
        return Cow::Borrowed("");
    }
    // SAFETY: the pointer is not null, so it is a C string by the contract.
    unsafe { CStr::from_ptr(text) }.to_string_lossy()
}

/// Runs `work` if the process is traced. Returns `otherwise` if the process is not traced or `work` panics.
fn traced<T>(otherwise: T, work: impl FnOnce() -> T) -> T {
    if session::session().is_none() {
        return otherwise;
    }
    shielded(work).unwrap_or(otherwise)
}

/// Returns 1 if the process is traced, otherwise 0.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn memtrace_is_traced() -> c_int {
    traced(0, || 1)
}

/// Pauses the rows of ops and ranges until [`memtrace_resume`]. Memory is still recorded.
#[unsafe(no_mangle)]
extern "C" fn memtrace_pause() {
    traced((), || pause::set_paused(true));
}

/// Ends the pause that [`memtrace_pause`] began.
#[unsafe(no_mangle)]
extern "C" fn memtrace_resume() {
    traced((), || pause::set_paused(false));
}

/// Returns 1 while the rows of ops and ranges are paused.
#[unsafe(no_mangle)]
extern "C" fn memtrace_is_paused() -> c_int {
    traced(0, || c_int::from(pause::is_paused()))
}

/// Records a mark in the trace, with the context of the calling thread. Starts the trace if necessary.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_mark(name: *const c_char) {
    // SAFETY: by the contract.
    traced((), || ranges::mark(Api::Memtrace, &unsafe { text(name) }));
}

/// Opens a range on this thread and returns the number of ranges that were open before.
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

/// Closes the innermost open range of this thread and returns the number of ranges that are left, or -1 if no
/// range was open.
#[unsafe(no_mangle)]
extern "C" fn memtrace_range_pop() -> c_int {
    traced(-1, || {
        let before = ranges::depth(C_DOMAIN);
        ranges::pop(C_DOMAIN);
        before - 1
    })
}

/// Opens a range that any thread may close, and returns its id, or 0 if the process is not traced.
///
/// # Safety
/// `name` is null or a C string.
#[unsafe(no_mangle)]
unsafe extern "C" fn memtrace_range_start(name: *const c_char) -> u64 {
    // SAFETY: by the contract.
    traced(0, || ranges::start(&unsafe { text(name) }, C_DOMAIN, None))
}

/// Closes the range with this id, on any thread. Ignores an id that is not open.
#[unsafe(no_mangle)]
extern "C" fn memtrace_range_end(range: u64) {
    traced((), || ranges::end(range));
}

/// Begins the training step `step`. From then on, memtrace does not count steps itself.
#[unsafe(no_mangle)]
extern "C" fn memtrace_step(step: i64) {
    traced((), || ranges::begin_step(step));
}

/// Requests detail for the next `steps` steps. A negative number counts as 0.
#[unsafe(no_mangle)]
extern "C" fn memtrace_detail(steps: c_int) {
    traced((), || detail::ask(u32::try_from(steps).unwrap_or(0)));
}

/// Waits until all recorded events are in the file. Returns 0, or -1 after a timeout or if the trace ended
/// early.
#[unsafe(no_mangle)]
extern "C" fn memtrace_flush() -> c_int {
    traced(0, || match Recorder::active() {
        Some(recorder) if !recorder.flush(FLUSH) => -1,
        _ => 0,
    })
}
