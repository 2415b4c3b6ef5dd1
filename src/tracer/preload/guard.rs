//! The guard around memtrace's part of a hook: a panic does not reach the program, and nested calls are not
//! recorded twice.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use memtrace_record::fast_tls::fast_tls;

/// Returns the calling thread's flag, which is true while the thread is inside a hook.
#[inline(always)]
fn inside<'a>() -> &'a Cell<bool> {
    // SAFETY: these are the thread's own words, which live as long as the thread.
    unsafe { &(*fast_tls()).inside }
}

/// Marks the outermost hook of a thread. Hooks that the real function calls in turn are part of the outermost
/// call.
pub(crate) struct Outermost;

impl Outermost {
    /// Marks the thread as inside a hook until the result is dropped. Returns `None` inside another hook of
    /// this thread.
    #[inline]
    pub(crate) fn enter() -> Option<Outermost> {
        // `then_some` would construct and drop an `Outermost` also inside another hook, and the drop would
        // clear the flag of that hook.
        if inside().replace(true) { None } else { Some(Outermost) }
    }
}

impl Drop for Outermost {
    #[inline]
    fn drop(&mut self) {
        inside().set(false);
    }
}

/// Runs memtrace's part of a hook. If `work` panics, the event is lost and `None` is returned; the panic does
/// not reach the program.
#[inline]
pub(crate) fn shielded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
