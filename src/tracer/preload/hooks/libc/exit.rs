//! The functions that end a process without running destructors.

use std::ffi::c_int;

use crate::ffi::symbols::RealFn;
use crate::runtime::guard::shielded;
use crate::runtime::session;

type Exit = unsafe extern "C" fn(c_int) -> !;

// SAFETY: the signature is the one in unistd.h.
static EXIT_NOW: RealFn<Exit> = unsafe { RealFn::new(c"_exit", "libc.so") };
// SAFETY: the signature is the one in stdlib.h.
static EXIT_NOW_C99: RealFn<Exit> = unsafe { RealFn::new(c"_Exit", "libc.so") };
// SAFETY: the signature is the one in stdlib.h.
static QUICK_EXIT: RealFn<Exit> = unsafe { RealFn::new(c"quick_exit", "libc.so") };

/// Finds the real functions. `_exit` is safe in a signal handler and in the child of any fork; a look-up is not.
pub(crate) fn install() {
    let _ = (EXIT_NOW.get(), EXIT_NOW_C99.get(), QUICK_EXIT.get());
}

/// Ends the trace, then leaves by `real`. The child of a `vfork` borrows its parent's memory: its recorder is
/// the parent's and stays untouched, since the recorder compares the process ids.
fn leave(real: &RealFn<Exit>, status: c_int) -> ! {
    shielded(session::finish);
    match real.get() {
        // SAFETY: the caller's own argument.
        Some(real) => unsafe { real(status) },
        None => std::process::abort(),
    }
}

#[unsafe(no_mangle)]
extern "C" fn _exit(status: c_int) -> ! {
    leave(&EXIT_NOW, status)
}

#[unsafe(no_mangle)]
extern "C" fn _Exit(status: c_int) -> ! {
    leave(&EXIT_NOW_C99, status)
}

#[unsafe(no_mangle)]
extern "C" fn quick_exit(status: c_int) -> ! {
    leave(&QUICK_EXIT, status)
}
