//! The guard around our part of a hook: it never panics into the program, and it never records a call twice.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memtrace_record::fast_tls::fast_tls;

/// Returns true if the calling thread is inside a hook.
#[inline(always)]
fn inside<'a>() -> &'a Cell<bool> {
    // SAFETY: the thread's own words, which live as long as the thread.
    unsafe { &(*fast_tls()).inside }
}

/// The outermost hook of a thread. The calls that the real function makes in turn belong to it.
pub(crate) struct Outermost;

impl Outermost {
    /// `None` inside another hook of this thread.
    #[inline]
    pub(crate) fn enter() -> Option<Outermost> {
        // Not `then_some`: it would construct an `Outermost` and drop it, which ends the outer hook.
        if inside().replace(true) { None } else { Some(Outermost) }
    }
}

impl Drop for Outermost {
    #[inline]
    fn drop(&mut self) {
        inside().set(false);
    }
}

/// Runs our part of a hook. A panic in it costs the event, never the program.
#[inline]
pub(crate) fn shielded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
