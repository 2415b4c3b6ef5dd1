//! An interposed `dlopen`, which loads this library under the names of the driver's libraries, and lets the
//! answers come first in the runtime and in NCCL.
//!
//! `libcuda.so.1` is the soname of this library, so the loader finds it by itself. NVML is this library too,
//! but the loader does not know it by that name. PyTorch asks NVML for the text of an out-of-memory error,
//! and 2.1 cannot do without it. A second library could only come from a file in a searched folder, and
//! `LD_LIBRARY_PATH` belongs to the user. Every other call continues by a jump, so that glibc sees the return
//! address of the program and uses the `RUNPATH` of the right library.
//!
//! A program that loads `libcudart.so.13`, `libnccl.so.2` or `libnvrtc.so.13` by itself (`ctypes`, vLLM, cuDNN) looks its functions up
//! in the handle, where NVIDIA's own come first: they need undocumented tables of the driver. So it gets the
//! handle of the global scope instead, to which the library is added. There the tracer's hooks come first,
//! then the answers here, then the library with its remaining functions. A call with `RTLD_NOLOAD` asks for
//! the library itself, as the tracer does.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// The names of this library beside its soname.
const NAMES: [&[u8]; 3] = [b"libnvidia-ml.so.1", b"libnvidia-ml.so", b"libcuda.so"];

/// Beginnings of the file names of libraries whose functions are answered here, and which a program may load
/// by name or by path.
const ANSWERED: [&[u8]; 3] = [b"libcudart.so", b"libnccl.so", b"libnvrtc.so"];

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
    // SAFETY: glibc's dlopen has this type.
    let dlopen: Dlopen = unsafe { std::mem::transmute(real) };
    let bytes = match name.is_null() {
        true => b"".as_slice(),
        // SAFETY: by the contract of dlopen a name that is not null is a C string.
        false => unsafe { CStr::from_ptr(name) }.to_bytes(),
    };
    let ours = if NAMES.contains(&bytes) {
        // SAFETY: the soname of this library, which is already loaded: no constructor runs.
        unsafe { dlopen(c"libcuda.so.1".as_ptr(), flags) }
    } else if flags & libc::RTLD_NOLOAD == 0 && is_answered(bytes) {
        // SAFETY: the arguments of the program; only the scope is wider. When the library is not found from
        // here, the call continues with the search path of the caller.
        match unsafe { dlopen(name, flags & !libc::RTLD_LOCAL | libc::RTLD_GLOBAL) } {
            library if library.is_null() => null_mut(),
            // SAFETY: null means the global scope.
            _ => unsafe { dlopen(std::ptr::null(), libc::RTLD_LAZY) },
        }
    } else {
        null_mut()
    };
    Redirect { ours, real }
}

/// Returns true if a name or a path is that of a library whose functions are answered here.
fn is_answered(name: &[u8]) -> bool {
    let file = name.rsplit(|&byte| byte == b'/').next().unwrap_or(name);
    ANSWERED.iter().any(|start| file.strip_prefix(*start).is_some_and(|rest| matches!(rest, [] | [b'.', ..])))
}

unsafe extern "C" fn fail(_: *const c_char, _: c_int) -> *mut c_void {
    null_mut()
}
