//! What every hook keeps: it never panics into the program, and it never counts a call twice.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// The outermost hook of a thread: calls that the real function makes in turn belong to it.
pub(crate) struct Outermost;

impl Outermost {
    /// `None` inside another hook of this thread, or when the thread's locals are gone.
    #[inline]
    pub(crate) fn enter() -> Option<Outermost> {
        INSIDE.try_with(|inside| !inside.replace(true)).ok().filter(|outermost| *outermost).map(|_| Outermost)
    }
}

impl Drop for Outermost {
    #[inline]
    fn drop(&mut self) {
        let _ = INSIDE.try_with(|inside| inside.set(false));
    }
}

/// Runs our part of a hook; a panic in it costs the event, never the program.
#[inline]
pub(crate) fn shielded<T>(work: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(work)).ok()
}
