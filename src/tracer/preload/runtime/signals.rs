//! Runs memtrace's writes without the signals that a failed write raises.
//!
//! A write to a pipe without a reader raises SIGPIPE; a write beyond the file size limit raises SIGXFSZ.
//! Either signal ends a program that does not handle it, and no program expects these signals from memtrace's
//! writes. The writer thread blocks all signals anyway. This module is for the writes that any thread makes,
//! such as log messages.

use std::mem::zeroed;
use std::ptr::null_mut;

/// Runs `work` with SIGPIPE and SIGXFSZ blocked on this thread, then discards the signals that `work` raised.
/// Restores `errno`.
pub(crate) fn without_write_signals<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: signal sets and a duration are plain structs, for which all zero is valid; all pointers are
    // valid.
    unsafe {
        let errno = *libc::__errno_location();
        let (mut ours, mut before, mut pending): (libc::sigset_t, libc::sigset_t, libc::sigset_t) = zeroed();
        libc::sigemptyset(&raw mut ours);
        libc::sigpending(&raw mut pending);
        for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
            // A signal that is already pending belongs to the program.
            if libc::sigismember(&raw const pending, signal) == 0 {
                libc::sigaddset(&raw mut ours, signal);
            }
        }
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const ours, &raw mut before);
        let result = work();
        let now: libc::timespec = zeroed();
        while libc::sigtimedwait(&raw const ours, null_mut(), &raw const now) > 0 {}
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, null_mut());
        *libc::__errno_location() = errno;
        result
    }
}
