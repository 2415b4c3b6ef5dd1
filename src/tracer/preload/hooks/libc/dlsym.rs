//! `dlsym`, for programs that load the CUDA runtime or the driver themselves and look functions up.
//!
//! A stand-in is returned only for an exact name of our own tables, and only if the library that was asked
//! has the function. If the program would find a hook of ours but no library has the real function, null is
//! returned; otherwise the program would believe that NCCL or CUDA is present. Every other call continues
//! with a jump to glibc's own `dlsym`. glibc then sees the program's return address, which it needs because
//! the meaning of `RTLD_NEXT` and `RTLD_DEFAULT` depends on the caller.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

use crate::ffi::by_caller::is_hook_of_nothing;
use crate::ffi::symbols;
use crate::guard::shielded;
use crate::hooks::cuda;

// A build with AddressSanitizer (scripts/asan) has no hook of `dlsym`, because the sanitizer's runtime looks
// functions up before instrumented code can run.
#[cfg_attr(not(memtrace_asan), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    memtrace_util::return_or_jump!(answer)
}

/// The result of [`answer`], which the ABI returns in two registers.
#[repr(C)]
struct Answer {
    ours: *mut c_void,
    real: *mut c_void,
}

unsafe extern "C" fn answer(handle: *mut c_void, name: *const c_char) -> Answer {
    let Some(real) = symbols::real_dlsym() else {
        // Does not happen with any known glibc. Without glibc's own function there is nothing to jump to.
        return Answer { ours: null_mut(), real: nothing as *mut c_void };
    };
    let found = shielded(|| {
        // SAFETY: the program's name is a C string by the contract of dlsym.
        unsafe { found(handle, name, real) }
    });
    match found.unwrap_or(Found::Other) {
        Found::Ours(ours) => Answer { ours, real: real as *mut c_void },
        Found::Nothing => Answer { ours: null_mut(), real: nothing as *mut c_void },
        Found::Other => Answer { ours: null_mut(), real: real as *mut c_void },
    }
}

/// The result of a lookup.
enum Found {
    /// Our function that replaces the real one.
    Ours(*mut c_void),
    /// No library has the real function.
    Nothing,
    /// The lookup continues in glibc, whose result the program gets.
    Other,
}

/// The prefixes of the names that this hook examines: functions of CUDA and its libraries, of NCCL and of
/// NVTX.
const HOOKED: [&[u8]; 3] = [b"cu", b"nccl", b"nvtx"];

unsafe extern "C" fn nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    null_mut()
}

/// Decides whether this lookup returns a stand-in, null, or the result of glibc's own `dlsym`.
unsafe fn found(handle: *mut c_void, name: *const c_char, real: symbols::Dlsym) -> Found {
    if name.is_null() {
        return Found::Other;
    }
    // SAFETY: by the contract above.
    let name = unsafe { CStr::from_ptr(name) };
    let text = name.to_bytes();
    if !HOOKED.iter().any(|prefix| text.starts_with(prefix)) {
        return Found::Other;
    }
    // The result of `RTLD_NEXT` depends on the caller, so it cannot be computed here. A lookup in the global
    // scope returns our hook, if a hook has this name.
    let is_next = handle == libc::RTLD_NEXT;
    // SAFETY: these are the program's own arguments.
    let found = unsafe { real(if is_next { libc::RTLD_DEFAULT } else { handle }, name.as_ptr()) };
    if is_hook_of_nothing(found, name) {
        return Found::Nothing;
    }
    // In the global scope, our hooks come first, so glibc's own lookup returns them.
    if handle == libc::RTLD_DEFAULT || is_next || found.is_null() {
        return Found::Other;
    }
    let Some(stand_in) = cuda::exported(text) else { return Found::Other };
    // SAFETY: `found` is the library's own function of that name.
    let ours = unsafe { stand_in(found) };
    if ours.is_null() { Found::Other } else { Found::Ours(ours) }
}
