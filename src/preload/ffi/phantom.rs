//! The functions of the phantom device, when it is preloaded.

use std::ffi::{CStr, c_char};

use crate::ffi::symbols::{Home, RealFn, Symbol, find_anywhere};

const LIBRARY: &str = "libmemtrace_phantom.so";

// SAFETY: the type is the one in the phantom device's `nccl_buffers.rs`.
static STANDS_FOR: RealFn<unsafe extern "C" fn() -> *const c_char> =
    unsafe { RealFn::new(c"memtrace_phantom_stands_for", LIBRARY) };

// SAFETY: the type is the one in the phantom device: it writes at most that many bytes of JSON and returns
// their number.
static DESCRIBE: Symbol<unsafe extern "C" fn(*mut c_char, usize) -> usize> =
    unsafe { Symbol::new(c"memtrace_phantom_describe", Home::Loaded(LIBRARY)) };

/// Returns true if the device of this process is a phantom.
pub(crate) fn is_present() -> bool {
    !find_anywhere(LIBRARY, c"memtrace_phantom_describe").is_null()
}

/// The library that the phantom device stands for in the thread's current call; `None` for itself.
pub(crate) fn library_of_call() -> Option<&'static CStr> {
    // SAFETY: it takes nothing.
    let name = unsafe { STANDS_FOR.get()?() };
    // SAFETY: not null, so one of the phantom device's own C strings, which are constants.
    (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) })
}

/// The phantom device's description of itself, in JSON; null without one.
pub(crate) fn describe() -> serde_json::Value {
    let _ = DESCRIBE.get();
    describe_at_end()
}

/// Same as [`describe`], which must have been called before. Looks no symbol up: another thread may hold the
/// loader's lock.
pub(crate) fn describe_at_end() -> serde_json::Value {
    let Some(write) = DESCRIBE.cached() else { return serde_json::Value::Null };
    let mut text = vec![0u8; 16 << 10];
    // SAFETY: the buffer has the length that is passed. The library was preloaded, so it stays loaded.
    let length = unsafe { write(text.as_mut_ptr().cast(), text.len()) };
    text.truncate(length);
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    serde_json::from_slice(&text[..end]).unwrap_or(serde_json::Value::Null)
}
