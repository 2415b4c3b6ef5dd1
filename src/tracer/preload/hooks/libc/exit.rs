//! The functions that end a process without running destructors.

use std::ffi::c_int;

use crate::ffi::symbols::RealFn;
use crate::guard::shielded;
use crate::runtime::session;

type Exit = unsafe extern "C" fn(c_int) -> !;

// SAFETY: the signature is the one in unistd.h.
static EXIT_NOW: RealFn<Exit> = unsafe { RealFn::new(c"_exit", "libc.so") };
// SAFETY: the signature is the one in stdlib.h.
static EXIT_NOW_C99: RealFn<Exit> = unsafe { RealFn::new(c"_Exit", "libc.so") };
// SAFETY: the signature is the one in stdlib.h.
static QUICK_EXIT: RealFn<Exit> = unsafe { RealFn::new(c"quick_exit", "libc.so") };

/// Looks up the real functions, at load. Later lookups are not safe: a program may call `_exit` in a signal
/// handler or in the child of a fork.
pub(crate) fn install() {
    let _ = (EXIT_NOW.get(), EXIT_NOW_C99.get(), QUICK_EXIT.get());
}

/// Ends the trace, then exits through `real`. The child of a `vfork` shares its parent's memory and thus its
/// parent's recorder. The recorder compares process ids, so such a child does not end the parent's trace.
fn leave(real: &RealFn<Exit>, status: c_int) -> ! {
    shielded(session::finish);
    match real.get() {
        // SAFETY: this is the caller's own argument.
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
