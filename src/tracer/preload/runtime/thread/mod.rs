//! The state of one thread. The state is in one struct, because a block report reads most of its fields and
//! needs only one thread-local word ([`memtrace_record::fast_tls`]) to find the struct.
//!
//! This module holds only data; the modules of [`crate::attribution`] work on it. The state lives as long as
//! the thread. In the child of a fork, the only thread keeps the state of the thread that forked.

pub(crate) mod known_forms;
pub(crate) mod open_ranges;
pub(crate) mod running_ops;

use std::cell::{Cell, RefCell};
use std::ptr::null_mut;

use memtrace_record::fast_tls::fast_tls;
use memtrace_record::intern::TextId;
use memtrace_record::per_thread::PerThread;

use known_forms::KnownForms;
use open_ranges::OpenRanges;
use running_ops::RunningOps;

/// The state of one thread.
pub(crate) struct ThreadState {
    /// Open ranges, and the context that follows from them.
    pub(crate) ranges: OpenRanges,
    /// Running torch ops.
    pub(crate) ops: RefCell<RunningOps>,
    /// True while memtrace's own Python code runs on this thread. The ops of this code get no rows.
    pub(crate) is_own_python: Cell<bool>,
    /// True while memtrace's Python code runs ops on its own tensors to learn torch's memory layout.
    pub(crate) is_learning: Cell<bool>,
    /// The size in bytes of the request that the thread is making to torch's allocator; -1 outside the
    /// allocator.
    pub(crate) requested: Cell<i64>,
    /// The text id of the type and shape of the tensor whose memory is requested; 0 if unknown.
    pub(crate) form: Cell<TextId>,
    /// The forms that this thread has used.
    pub(crate) forms: RefCell<KnownForms>,
    /// True inside an allocator that reports no blocks.
    pub(crate) unreported: Cell<bool>,
    /// The number of bytes of pinned memory that the thread is requesting from torch's allocator; -1 outside
    /// this allocator.
    pub(crate) requested_pinned: Cell<i64>,
    /// The private pool of the current allocation; 0 for the default pool.
    pub(crate) pool: Cell<u16>,
    /// The address of the block that torch's allocator returned last on this thread. It is 0 before the first
    /// block, and after the block was tagged as a workspace.
    pub(crate) last_block: Cell<usize>,
    /// The address of the module after whose outermost call on this thread the tracer has asked to be called;
    /// 0 if there is no such request.
    pub(crate) awaited_module: Cell<usize>,
    /// The address of the optimizer whose step has returned on this thread while torch's scope of the step is
    /// still open; otherwise 0.
    pub(crate) stepped_optimizer: Cell<usize>,
    /// The text id of the communicator of the NCCL call that the thread is in; 0 outside NCCL calls and for
    /// an unknown communicator.
    pub(crate) communicator: Cell<u32>,
    /// The nesting depth of NCCL calls on this thread.
    pub(crate) open_nccl_calls: Cell<u32>,
    /// The text id of the communicator of the operations in the thread's open NCCL group. 0 if the group has
    /// no operation yet; a sentinel if its operations have several communicators.
    pub(crate) group_communicator: Cell<u32>,
    /// The nesting depth of open NCCL groups on this thread.
    pub(crate) group_depth: Cell<u32>,
    /// Torch's id of this thread; 0 until the first lookup.
    pub(crate) torch_id: Cell<u64>,
    /// The CUDA events that torch's allocator has recorded on this thread since its last report.
    pub(crate) recorded_events: RefCell<Vec<usize>>,
}

static STATE: PerThread<ThreadState> = PerThread::new(ThreadState::new);

impl ThreadState {
    fn new() -> ThreadState {
        ThreadState {
            ranges: OpenRanges::new(),
            ops: RefCell::new(RunningOps::new()),
            is_own_python: Cell::new(false),
            is_learning: Cell::new(false),
            requested: Cell::new(-1),
            form: Cell::new(0),
            forms: RefCell::new(KnownForms::new()),
            unreported: Cell::new(false),
            requested_pinned: Cell::new(-1),
            pool: Cell::new(0),
            last_block: Cell::new(0),
            awaited_module: Cell::new(0),
            stepped_optimizer: Cell::new(0),
            communicator: Cell::new(0),
            open_nccl_calls: Cell::new(0),
            group_communicator: Cell::new(0),
            group_depth: Cell::new(0),
            torch_id: Cell::new(0),
            recorded_events: RefCell::new(Vec::new()),
        }
    }
}

impl Drop for ThreadState {
    fn drop(&mut self) {
        // SAFETY: these are the thread's own TLS words.
        unsafe { (*fast_tls()).user.set(null_mut()) };
    }
}

/// Runs `work` on the calling thread's state. Returns `None` if the thread is ending and its state is gone.
#[inline(always)]
pub(crate) fn with<R>(work: impl FnOnce(&ThreadState) -> R) -> Option<R> {
    // SAFETY: these are the thread's own TLS words. Only `find` sets the word `user`, to the thread's
    // `STATE`, whose destructor resets it to null.
    let state = unsafe { (*fast_tls()).user.get().cast::<ThreadState>().as_ref() };
    Some(work(match state {
        Some(state) => state,
        // SAFETY: this is the thread's `STATE`, which lives while the thread works with it.
        None => unsafe { &*find()? },
    }))
}

#[cold]
#[inline(never)]
fn find() -> Option<*const ThreadState> {
    let state = STATE.with(std::ptr::from_ref)?;
    // SAFETY: these are the thread's own TLS words.
    unsafe { (*fast_tls()).user.set(state.cast_mut().cast()) };
    Some(state)
}

/// Returns true if the calling thread runs a backward function, or is one of autograd's threads. Returns
/// false while the thread is ending.
pub(crate) fn runs_backward() -> bool {
    with(|state| state.ranges.runs_backward()).unwrap_or(false)
}

/// Returns true if the calling thread is one of autograd's threads. Returns false while the thread is ending.
pub(crate) fn is_autograd() -> bool {
    with(|state| state.ranges.is_autograd()).unwrap_or(false)
}
