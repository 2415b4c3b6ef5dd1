//! The torch ops that run on a thread, innermost last.

use std::ffi::{CStr, c_char, c_void};

use memtrace_record::intern::{Context, ContextId, Frame, StackId, TextId};

use crate::attribution::backward_calls::BackwardCalls;
use crate::runtime::cache::Cache;

/// The source of a callback: `at::RecordScope`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// An operator, or autograd's evaluation of one.
    Function,
    /// A backward function.
    Backward,
    /// `torch.profiler.record_function`, `Optimizer.step#...`.
    User,
}

/// `at::RecordFunction::name`.
pub(crate) type NameOf = unsafe extern "C" fn(*const c_void) -> *const c_char;

/// The origin of a node of autograd's graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The module whose forward made it; 0 for none.
    pub(crate) module: TextId,
    /// The number of the module's call; 0 for none.
    pub(crate) call: u32,
    /// The Python stack that called the op; 0 for none.
    pub(crate) python: StackId,
}

/// An op that is running.
pub(crate) struct RunningOp {
    /// torch's `RecordFunction`, alive while the op runs.
    record: *const c_void,
    name_of: NameOf,
    pub(crate) scope: Scope,
    /// The phase that this op or one around it implies; 0 for none.
    pub(crate) phase: TextId,
    /// The origin of the backward function that runs.
    pub(crate) origin: Origin,
    /// The module whose sharded parameters FSDP gathers in this op or one around it, 0 for an unknown module;
    /// `None` when it gathers nothing.
    pub(crate) gathers: Option<TextId>,
    /// The id of its name; 0 until the first query.
    pub(crate) name: TextId,
    /// The stack up to this op; 0 until the first query.
    pub(crate) stack: StackId,
    /// The part of `stack` below the ops: the module, and the Python stack.
    pub(crate) root: StackId,
    /// The context of an allocation in this op; 0 until the first query.
    pub(crate) context: ContextId,
    /// The thread's epoch and Python stack that `context` was computed from.
    pub(crate) epoch: u64,
    pub(crate) python: StackId,
    /// True if it is nested in another op, not counting user scopes.
    pub(crate) inside: bool,
    /// True if it is an outermost op, which may get a row.
    pub(crate) outermost: bool,
    /// The start of its row; 0 when it gets none.
    pub(crate) start_ns: u64,
    /// The thread's count of reported bytes at its start.
    pub(crate) bytes: i64,
}

impl RunningOp {
    /// An op that begins inside `around`; `None` outside every op.
    ///
    /// # Safety
    /// `record` is torch's `RecordFunction`, and `name_of` is its `name`. The record is alive while the op
    /// runs. A user scope may end on another thread, so its name is read when it begins, and not later.
    #[inline]
    pub(crate) unsafe fn new(
        scope: Scope,
        record: *const c_void,
        name_of: NameOf,
        around: Option<&RunningOp>,
    ) -> RunningOp {
        let inside = around.is_some_and(|op| op.inside || op.scope != Scope::User);
        RunningOp {
            record,
            name_of,
            scope,
            phase: around.map_or(0, |op| op.phase),
            origin: around.map_or(Origin::default(), |op| op.origin),
            gathers: around.and_then(|op| op.gathers),
            name: 0,
            stack: 0,
            root: 0,
            context: 0,
            epoch: 0,
            python: 0,
            inside,
            outermost: !inside && scope != Scope::User,
            start_ns: 0,
            bytes: 0,
        }
    }

    /// torch's `RecordFunction`, which is alive.
    #[inline]
    pub(crate) fn record(&self) -> *const c_void {
        self.record
    }

    /// The name of the op; `None` for one without.
    pub(crate) fn name_text(&self) -> Option<&CStr> {
        // SAFETY: the record is alive and has this name, by the contract of `new`.
        let text = unsafe { (self.name_of)(self.record) };
        // SAFETY: not null, so a C string that lives as long as the record.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    }
}

/// The running ops of a thread, with caches of their names, stacks and contexts.
pub(crate) struct RunningOps {
    pub(crate) running: Vec<RunningOp>,
    /// The module that made the last backward function of this thread; 0 for unknown.
    pub(crate) near: TextId,
    pub(crate) calls: BackwardCalls,
    pub(crate) names: Cache<Vec<u8>, TextId>,
    pub(crate) stacks: Cache<Frame, StackId>,
    /// The Python stack around the running ops, and its key: the innermost Python frame, and the stack below
    /// it.
    pub(crate) python: StackId,
    pub(crate) python_key: Option<((usize, usize), StackId)>,
    pub(crate) contexts: Cache<Context, ContextId>,
}

impl RunningOps {
    /// No ops.
    pub(crate) const fn new() -> RunningOps {
        RunningOps {
            running: Vec::new(),
            near: 0,
            calls: BackwardCalls::new(),
            names: Cache::new(),
            stacks: Cache::new(),
            python: 0,
            python_key: None,
            contexts: Cache::new(),
        }
    }
}
