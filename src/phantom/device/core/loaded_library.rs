//! Finds the loaded library to which an address belongs.

use std::ffi::CStr;

/// Returns the file of the library that contains an address.
pub(crate) fn library_of(address: *mut libc::c_void) -> Option<String> {
    // SAFETY: zero is a value of this plain struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: takes any address, and `info` is good for a write.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: not null, so the loader's name of a loaded library.
    Some(unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}
