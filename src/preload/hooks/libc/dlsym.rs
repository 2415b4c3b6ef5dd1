//! `dlsym`, for programs that load the CUDA runtime or the driver themselves and look functions up.
//!
//! A stand-in is returned only for an exact name of our own tables, and only if the library that was asked
//! has the function. Every other call continues with a jump, so that glibc sees the program's return address:
//! the meaning of `RTLD_NEXT` and `RTLD_DEFAULT` depends on the caller.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;

use crate::ffi::symbols;
use crate::hooks::cuda;
use crate::runtime::guard::shielded;

// Without the hook under AddressSanitizer (scripts/asan): its runtime looks functions up before instrumented code can run.
#[cfg_attr(not(memtrace_asan), unsafe(no_mangle))]
#[unsafe(naked)]
unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        // rax: our function or null; rdx: glibc's own dlsym.
        "test rax, rax",
        "jne 2f",
        "jmp rdx",
        "2: ret",
        answer = sym answer
    )
}

/// The result in `rax` and `rdx`.
#[repr(C)]
struct Answer {
    ours: *mut c_void,
    real: *mut c_void,
}

unsafe extern "C" fn answer(handle: *mut c_void, name: *const c_char) -> Answer {
    let Some(real) = symbols::real_dlsym() else {
        // Never with a known glibc: without its own function there is nothing to jump to.
        return Answer { ours: null_mut(), real: nothing as *mut c_void };
    };
    let ours = shielded(|| {
        // SAFETY: the program's own name, a C string by the contract of dlsym.
        unsafe { ours(handle, name, real) }
    });
    Answer { ours: ours.unwrap_or(null_mut()), real: real as *mut c_void }
}

unsafe extern "C" fn nothing(_: *mut c_void, _: *const c_char) -> *mut c_void {
    null_mut()
}

/// Our function for this look-up; null to leave the look-up alone.
///
/// # Safety
/// `name` is null or a C string.
unsafe fn ours(handle: *mut c_void, name: *const c_char, real: symbols::Dlsym) -> *mut c_void {
    // Our hooks are first in the global scope already, and "next" depends on the caller.
    if name.is_null() || handle == libc::RTLD_DEFAULT || handle == libc::RTLD_NEXT {
        return null_mut();
    }
    // SAFETY: by the contract above.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    if !text.starts_with(b"cu") {
        return null_mut();
    }
    let Some(stand_in) = cuda::exported(text) else { return null_mut() };
    // SAFETY: the program's own arguments.
    let found = unsafe { real(handle, name) };
    // SAFETY: the library's own function of that name.
    if found.is_null() { null_mut() } else { unsafe { stand_in(found) } }
}
