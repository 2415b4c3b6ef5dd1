//! Finds the loaded library to which an address belongs, and functions by name.

use std::ffi::{CStr, c_int};
use std::ptr::{null, null_mut};

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

/// Returns the file name, without its folder, of the library that called this library; `None` if only this
/// library and unknown code are on the stack.
pub(crate) fn calling_library() -> Option<String> {
    let mut frames = [null_mut(); 16];
    // SAFETY: writes at most as many addresses as there is room for.
    let found = unsafe { libc::backtrace(frames.as_mut_ptr(), frames.len() as c_int) };
    let own = library_of(calling_library as *mut libc::c_void);
    let mut callers = frames.iter().take(found.max(0) as usize).filter_map(|&frame| library_of(frame));
    let caller = callers.find(|library| Some(library) != own.as_ref())?;
    Some(caller.rsplit('/').next().unwrap_or(&caller).to_owned())
}

/// Finds a function of the driver in the way in which other libraries find it. So a tracer that was loaded
/// before this library sees the call. (`RTLD_DEFAULT` would find this library's own function, because this
/// library is linked to bind its own names first.)
///
/// # Safety
/// `F` is the type of a function pointer, with the signature that `cuda.h` gives the function of this name.
pub(crate) unsafe fn find_in_program<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) };
    // SAFETY: a null name is the program itself, which stays open.
    let program = unsafe { libc::dlopen(null(), libc::RTLD_LAZY) };
    // SAFETY: an open handle and a C string.
    let found = unsafe { libc::dlsym(program, name.as_ptr()) };
    // SAFETY: the caller's promise.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut libc::c_void, F>(&found) })
}
