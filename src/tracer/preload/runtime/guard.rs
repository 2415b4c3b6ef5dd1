//! The guard around memtrace's part of a hook: a panic never reaches the program, and a call is recorded only
//! once.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memtrace_record::fast_tls::fast_tls;

/// Returns true if the calling thread is inside a hook.
#[inline(always)]
fn inside<'a>() -> &'a Cell<bool> {
    // SAFETY: the thread's own words, which live as long as the thread.
    unsafe { &(*fast_tls()).inside }
}

/// Marks the outermost hook of a thread. Hooks that the real function calls in turn are part of the outermost
/// call.
pub(crate) struct Outermost;

impl Outermost {
    /// Returns `None` inside another hook of this thread.
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

/// Runs memtrace's part of a hook. A panic loses the event and never reaches the program.
#[inline]
pub(crate) fn shielded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
