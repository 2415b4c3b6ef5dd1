//! What this library keeps of a thread, in one place: a report looks at most of it, and finds it by one word
//! ([`memtrace_record::fast_tls`]).
//!
//! It lives as long as the thread; the child of a fork has that of the thread that forked.

use std::cell::{Cell, RefCell};
use std::ptr::null_mut;

use memtrace_record::fast_tls::words;

use crate::attribution::context;
use crate::attribution::op_stack;

/// Everything of one thread; each part belongs to the module that it is named after.
pub(crate) struct Own {
    /// The ranges, and the context that follows from them.
    pub(crate) context: context::Thread,
    /// The ops that run.
    pub(crate) ops: RefCell<op_stack::Ops>,
    /// Are they our own?
    pub(crate) ours: Cell<bool>,
    /// What the thread asks torch's allocator for; -1 when it does not.
    pub(crate) requested: Cell<i64>,
    /// Is the thread inside an allocator that reports nothing?
    pub(crate) unreported: Cell<bool>,
    /// The private pool of the allocation that the thread is in; 0 for the default.
    pub(crate) pool: Cell<u16>,
    /// Torch's number of the thread; 0 until it is asked.
    pub(crate) torch_id: Cell<u64>,
    /// Events that torch's allocator recorded here since its last report.
    pub(crate) recorded: RefCell<Vec<usize>>,
}

thread_local! {
    static OWN: Own = const {
        Own {
            context: context::Thread::new(),
            ops: RefCell::new(op_stack::Ops::new()),
            ours: Cell::new(false),
            requested: Cell::new(-1),
            unreported: Cell::new(false),
            pool: Cell::new(0),
            torch_id: Cell::new(0),
            recorded: RefCell::new(Vec::new()),
        }
    };
}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: the thread's own words.
        unsafe { (*words()).user.set(null_mut()) };
    }
}

/// Works with what is kept of the calling thread; `None` when that is gone: the thread is ending.
#[inline(always)]
pub(crate) fn with<R>(work: impl FnOnce(&Own) -> R) -> Option<R> {
    // SAFETY: the thread's own words; only `find` sets this one, to the thread's `OWN`, and that one's end makes
    // it null.
    let own = unsafe { (*words()).user.get().cast::<Own>().as_ref() };
    Some(work(match own {
        Some(own) => own,
        // SAFETY: the thread's `OWN`, which does not end while the thread works with it.
        None => unsafe { &*find()? },
    }))
}

#[cold]
#[inline(never)]
fn find() -> Option<*const Own> {
    let own = OWN.try_with(std::ptr::from_ref).ok()?;
    // SAFETY: the thread's own words.
    unsafe { (*words()).user.set(own.cast_mut().cast()) };
    Some(own)
}
