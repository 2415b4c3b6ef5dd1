//! Writes that raise no signal in the program.
//!
//! A write to a pipe without a reader raises SIGPIPE, one beyond the limit of file sizes SIGXFSZ. Both end a
//! program that does not expect them, and it cannot expect them of our writes. The writer thread has all
//! signals blocked; this is for messages, which any thread writes.

use std::mem::zeroed;
use std::ptr::null_mut;

/// Runs `work` with the signals of failed writes blocked on this thread, and removes those that it raised.
pub(crate) fn without_write_signals<R>(work: impl FnOnce() -> R) -> R {
    // SAFETY: signal sets and a duration are plain structs, for which all zero is valid; all pointers are
    // valid.
    unsafe {
        let errno = *libc::__errno_location();
        let (mut ours, mut before, mut pending): (libc::sigset_t, libc::sigset_t, libc::sigset_t) = zeroed();
        libc::sigemptyset(&raw mut ours);
        libc::sigpending(&raw mut pending);
        for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
            // One that waits already is the program's.
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
