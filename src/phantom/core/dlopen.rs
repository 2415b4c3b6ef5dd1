//! An interposed `dlopen`, which loads this library under the names of the driver's libraries.
//!
//! `libcuda.so.1` is the soname of this library, so the loader finds it by itself. NVML is this library too,
//! but the loader does not know it by that name. PyTorch asks NVML for the text of an out-of-memory error,
//! and 2.1 cannot do without it. A second library could only come from a file in a searched folder, and
//! `LD_LIBRARY_PATH` belongs to the user. Every other call continues by a jump, so that glibc sees the return
//! address of the program and uses the `RUNPATH` of the right library.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// The names of this library beside its soname.
const NAMES: [&[u8]; 3] = [b"libnvidia-ml.so.1", b"libnvidia-ml.so", b"libcuda.so"];

#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {redirect}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        // rax: our handle or null; rdx: the dlopen of glibc.
        "test rax, rax",
        "jne 2f",
        "jmp rdx",
        "2: ret",
        redirect = sym redirect
    )
}

/// Returned in `rax` and `rdx`.
#[repr(C)]
struct Redirect {
    /// The handle of this library, or null for any other name.
    ours: *mut c_void,
    /// The address of glibc's `dlopen`.
    real: *mut c_void,
}

type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

unsafe extern "C" fn redirect(name: *const c_char, flags: c_int) -> Redirect {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: a constant C string.
    let found = *REAL.get_or_init(|| unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) } as usize);
    if found == 0 {
        return Redirect { ours: null_mut(), real: fail as *mut c_void };
    }
    let real = found as *mut c_void;
    // SAFETY: by the contract of dlopen the name is null, which means the program itself, or a C string.
    let ours = !name.is_null() && NAMES.contains(&unsafe { CStr::from_ptr(name) }.to_bytes());
    if !ours {
        return Redirect { ours: null_mut(), real };
    }
    // SAFETY: glibc's dlopen has this type.
    let dlopen: Dlopen = unsafe { std::mem::transmute(real) };
    // SAFETY: the soname of this library, which is already loaded: no constructor runs.
    Redirect { ours: unsafe { dlopen(c"libcuda.so.1".as_ptr(), flags) }, real }
}

unsafe extern "C" fn fail(_: *const c_char, _: c_int) -> *mut c_void {
    null_mut()
}
