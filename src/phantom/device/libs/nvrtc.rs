//! NVRTC, the compiler that cuDNN calls when it finalizes a plan whose engine is compiled at run time.
//!
//! No kernel runs here, and neither the workspace of a plan nor its order among the plans depends on the
//! code. A search for the fastest plan (`torch.backends.cudnn.benchmark`) finalizes hundreds of plans, and
//! would spend all its time in the compiler. So the programs of cuDNN are not compiled, and each gets a file
//! without code. The real library compiles all other programs.

use std::cell::Cell;
use std::collections::HashSet;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{Out, Word};
use crate::core::lock::lock;

/// The code `NVRTC_SUCCESS`. [`INTERNAL_ERROR`] is `NVRTC_ERROR_INTERNAL_ERROR`.
const SUCCESS: c_int = 0;
const INTERNAL_ERROR: c_int = 11;

/// The compiled file of a program that was not compiled: an ELF header without sections.
const EMPTY_FILE: [u8; 64] = {
    let mut file = [0; 64];
    [file[0], file[1], file[2], file[3]] = *b"\x7fELF";
    file
};

thread_local! {
    static IS_SKIPPED: Cell<bool> = const { Cell::new(false) };
}

/// The number of programs that the real library has compiled. [`NOT_COMPILED`] counts
/// those that were not compiled.
static COMPILED: AtomicU64 = AtomicU64::new(0);
static NOT_COMPILED: AtomicU64 = AtomicU64::new(0);

/// Returns the number of programs that the real library has compiled, and the number of
/// those that were not compiled.
pub(crate) fn programs() -> (u64, u64) {
    (COMPILED.load(Ordering::Relaxed), NOT_COMPILED.load(Ordering::Relaxed))
}

/// The handles of the programs that were not compiled, until they are destroyed.
static SKIPPED: LazyLock<Mutex<HashSet<usize>>> = LazyLock::new(Mutex::default);

/// Calls a function. Programs that this thread compiles during the call are not really compiled.
pub(crate) fn without_compiling<T>(function: impl FnOnce() -> T) -> T {
    let before = IS_SKIPPED.try_with(|cell| cell.replace(true)).unwrap_or(false);
    let result = function();
    let _ = IS_SKIPPED.try_with(|cell| cell.set(before));
    result
}

fn is_skipped(program: usize) -> bool {
    lock(&SKIPPED).contains(&program)
}

/// Returns a function of the real library, which is loaded because the program called the
/// function of the same name here.
fn real(name: &CStr) -> Option<*mut c_void> {
    [c"libnvrtc.so.13", c"libnvrtc.so.12", c"libnvrtc.so.11.2"].into_iter().find_map(|library| {
        // SAFETY: a search by name that loads nothing; a handle that is never closed.
        unsafe {
            let library = libc::dlopen(library.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
            let found = if library.is_null() { library } else { libc::dlsym(library, name.as_ptr()) };
            (!found.is_null()).then_some(found)
        }
    })
}

/// Calls the real function of one of these types.
macro_rules! pass {
    ($name:literal, $($argument:ident: $type:ty),+) => {
        match real($name) {
            // SAFETY: the header gives the function of that name this signature, and the caller keeps its
            // contract.
            Some(function) => unsafe {
                transmute::<*mut c_void, unsafe extern "C" fn($($type),+) -> c_int>(function)($($argument),+)
            },
            None => INTERNAL_ERROR,
        }
    };
}

/// Writes the file of a program that was not compiled.
///
/// # Safety
/// `out` is null or good for the bytes of the file.
unsafe fn give_file(out: usize) -> c_int {
    if out != 0 {
        // SAFETY: the caller's promise.
        unsafe { (out as *mut [u8; EMPTY_FILE.len()]).write_unaligned(EMPTY_FILE) };
    }
    SUCCESS
}

answers! {
    Success fn nvrtcCompileProgram(program: Word, count: c_int, options: Word) -> c_int {
        if IS_SKIPPED.try_with(Cell::get).unwrap_or(false) {
            lock(&SKIPPED).insert(program);
            NOT_COMPILED.fetch_add(1, Ordering::Relaxed);
            return SUCCESS;
        }
        COMPILED.fetch_add(1, Ordering::Relaxed);
        pass!(c"nvrtcCompileProgram", program: Word, count: c_int, options: Word)
    }
    Real fn nvrtcDestroyProgram(program: Word) -> c_int {
        if let Some(&program) = by_contract!((program as *const usize).as_ref()) {
            lock(&SKIPPED).remove(&program);
        }
        pass!(c"nvrtcDestroyProgram", program: Word)
    }
    Real fn nvrtcGetCUBINSize(program: Word, size: Out<usize>) -> c_int {
        if is_skipped(program) {
            return size.give(EMPTY_FILE.len());
        }
        pass!(c"nvrtcGetCUBINSize", program: Word, size: Out<usize>)
    }
    Real fn nvrtcGetCUBIN(program: Word, out: Word) -> c_int {
        if is_skipped(program) {
            return by_contract!(give_file(out));
        }
        pass!(c"nvrtcGetCUBIN", program: Word, out: Word)
    }
    Real fn nvrtcGetPTXSize(program: Word, size: Out<usize>) -> c_int {
        if is_skipped(program) {
            return size.give(EMPTY_FILE.len());
        }
        pass!(c"nvrtcGetPTXSize", program: Word, size: Out<usize>)
    }
    Real fn nvrtcGetPTX(program: Word, out: Word) -> c_int {
        if is_skipped(program) {
            return by_contract!(give_file(out));
        }
        pass!(c"nvrtcGetPTX", program: Word, out: Word)
    }
    /// Returns the name of a kernel in the file. For a file without code, the name is the expression itself.
    Real fn nvrtcGetLoweredName(program: Word, expression: Word, out: Out<*const c_char>) -> c_int {
        if is_skipped(program) {
            return out.give(expression as *const c_char);
        }
        pass!(c"nvrtcGetLoweredName", program: Word, expression: Word, out: Out<*const c_char>)
    }
}
