//! Driver calls that this library makes on behalf of another library, such as NCCL.

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::ptr::null;

thread_local! {
    static STANDS_FOR: Cell<Option<&'static CStr>> = const { Cell::new(None) };
}

/// The library for which the calling thread calls the driver now, or null. The tracer attributes the memory
/// to it.
// SAFETY: only this library defines the name.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_stands_for() -> *const c_char {
    STANDS_FOR.try_with(Cell::get).ok().flatten().map_or(null(), CStr::as_ptr)
}

/// Returns true if the calling thread calls the driver on behalf of a library.
pub(crate) fn is_on_behalf() -> bool {
    STANDS_FOR.try_with(Cell::get).ok().flatten().is_some()
}

/// Runs driver calls on behalf of a library.
pub(crate) fn on_behalf_of<T>(library: &'static CStr, calls: impl FnOnce() -> T) -> T {
    let _ = STANDS_FOR.try_with(|cell| cell.set(Some(library)));
    let result = calls();
    let _ = STANDS_FOR.try_with(|cell| cell.set(None));
    result
}
