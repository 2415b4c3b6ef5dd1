//! `dlopen`: the driver's libraries under the names by which programs ask for them.
//!
//! `libcuda.so.1` is this library's own name, so the loader finds it by itself. NVML, which PyTorch asks
//! for the words of an out-of-memory error (and 2.1 cannot do without), is this library too, but the
//! loader does not know it by that name: a second one can only come from a file in a searched folder, and
//! `LD_LIBRARY_PATH` belongs to the user. Every other call goes on by a jump, so that glibc sees the
//! program's return address: whose `RUNPATH` counts depends on it.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::OnceLock;

/// What stands for this library beside its own name.
const NAMES: [&[u8]; 3] = [b"libnvidia-ml.so.1", b"libnvidia-ml.so", b"libcuda.so"];

#[unsafe(no_mangle)]
#[unsafe(naked)]
unsafe extern "C" fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {answer}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        // rax: our handle or null; rdx: glibc's own dlopen.
        "test rax, rax",
        "jne 2f",
        "jmp rdx",
        "2: ret",
        answer = sym answer
    )
}

/// What goes back in `rax` and `rdx`.
#[repr(C)]
struct Answer {
    ours: *mut c_void,
    real: *mut c_void,
}

type Dlopen = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;

unsafe extern "C" fn answer(name: *const c_char, flags: c_int) -> Answer {
    static REAL: OnceLock<usize> = OnceLock::new();
    // SAFETY: a constant C string.
    let found = *REAL.get_or_init(|| unsafe { libc::dlsym(libc::RTLD_NEXT, c"dlopen".as_ptr()) } as usize);
    if found == 0 {
        return Answer { ours: null_mut(), real: nothing as *mut c_void };
    }
    let real = found as *mut c_void;
    // SAFETY: a null name is the program itself, any other is a C string by the contract of dlopen.
    let ours = !name.is_null() && NAMES.contains(&unsafe { CStr::from_ptr(name) }.to_bytes());
    if !ours {
        return Answer { ours: null_mut(), real };
    }
    // SAFETY: glibc's dlopen has this type.
    let dlopen: Dlopen = unsafe { std::mem::transmute(real) };
    // SAFETY: the name that the loader knows this library by; it is loaded, so nothing new is.
    Answer { ours: unsafe { dlopen(c"libcuda.so.1".as_ptr(), flags) }, real }
}

unsafe extern "C" fn nothing(_: *const c_char, _: c_int) -> *mut c_void {
    null_mut()
}
