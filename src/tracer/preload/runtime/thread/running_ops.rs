//! The torch ops that run on a thread, the innermost one last.

use std::ffi::{CStr, c_char, c_void};

use memtrace_record::intern::{Context, ContextId, Frame, StackId, TextId};
use memtrace_trace::Category;
use rustc_hash::{FxBuildHasher, FxHashMap};

use crate::runtime::cache::Cache;

/// The kind of code that a callback reports, as in `at::RecordScope`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// An operator, or its autograd kernel.
    Function,
    /// A backward function.
    Backward,
    /// A scope of the program or of torch: `torch.profiler.record_function`, `Optimizer.step#...`.
    User,
}

/// The signature of `at::RecordFunction::name`.
pub(crate) type NameOf = unsafe extern "C" fn(*const c_void) -> *const c_char;

/// The origin of an autograd graph node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Origin {
    /// The module whose forward created the node; 0 if no module is known.
    pub(crate) module: TextId,
    /// The number of the module's call (see `backward_calls`); 0 outside every module.
    pub(crate) call: u32,
    /// The Python stack that called the op; 0 if it was not recorded.
    pub(crate) python: StackId,
}

/// A scope in which FSDP gathers parameters or reduces gradients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FsdpScope {
    /// The category of what FSDP allocates in the scope.
    pub(crate) category: Category,
    /// The module whose parameters or gradients these are; 0 if it is unknown.
    pub(crate) module: TextId,
    /// True if only memory that no op of the scope allocates has this category. FSDP1 resizes the storages of
    /// its parameters without an op, and casts the inputs of the module in the same scope.
    pub(crate) is_outside_ops: bool,
}

/// A running op.
pub(crate) struct RunningOp {
    /// torch's `RecordFunction`, alive while the op runs.
    record: *const c_void,
    name_of: NameOf,
    pub(crate) scope: Scope,
    /// The phase that this op or an enclosing op implies; 0 if no op implies a phase.
    pub(crate) phase: TextId,
    /// The origin of the backward function to which this op belongs; all 0 outside backward functions.
    pub(crate) origin: Origin,
    /// The innermost scope of FSDP that contains this op; `None` outside FSDP's scopes.
    pub(crate) fsdp: Option<FsdpScope>,
    /// The text id of the op's name; 0 until the first query.
    pub(crate) name: TextId,
    /// The stack including this op; 0 until the first query.
    pub(crate) stack: StackId,
    /// The frames of `stack` below the ops: the Python stack with the module on top.
    pub(crate) root: StackId,
    /// The context of an allocation in this op; 0 until the first query.
    pub(crate) context: ContextId,
    /// The value of `OpenRanges::epoch` for which `context` was computed.
    pub(crate) epoch: u64,
    pub(crate) python: StackId,
    /// True if another op encloses this op. Enclosing user scopes do not count.
    pub(crate) inside: bool,
    /// True if this is an outermost op, which may get a row.
    pub(crate) outermost: bool,
    /// The start time of the op's row; 0 if the op gets no row.
    pub(crate) start_ns: u64,
    /// The thread's sum of reported bytes when the op began. The op's row has the difference at its end.
    pub(crate) bytes: i64,
}

impl RunningOp {
    /// Creates an op that begins inside `around`, or outside every op if `around` is `None`.
    ///
    /// # Safety
    /// `record` is torch's `RecordFunction`, and `name_of` is its `name` method. The record is alive while
    /// the op runs. A user scope may end on another thread, so its name is read only when it begins.
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
            fsdp: around.and_then(|op| op.fsdp),
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

    /// Returns torch's `RecordFunction`, which is alive.
    #[inline]
    pub(crate) fn record(&self) -> *const c_void {
        self.record
    }

    /// Returns the name of the op, or `None` if it has no name.
    pub(crate) fn name_text(&self) -> Option<&CStr> {
        // SAFETY: the record is alive and `name_of` is its method, by the contract of `new`.
        let text = unsafe { (self.name_of)(self.record) };
        // SAFETY: the pointer is not null, so it is a C string that lives as long as the record.
        (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) })
    }
}

/// The module calls to which the backward functions of a thread belong; see
/// [`backward_calls`](crate::attribution::backward_calls).
pub(crate) struct BackwardCalls {
    /// The number of the module call to which the last backward function belonged; 0 before the first one.
    pub(crate) last: u32,
    /// The number of outermost calls when the last new call was entered.
    pub(crate) outermost: u64,
    /// For each module path, the number of the call whose backward ran last.
    pub(crate) open: FxHashMap<TextId, u32>,
}

/// The running ops of a thread, with caches of names, stacks and contexts.
pub(crate) struct RunningOps {
    pub(crate) running: Vec<RunningOp>,
    /// The module whose forward created the last backward function that ran on this thread; 0 if unknown.
    pub(crate) near: TextId,
    /// The module that FSDP1's scopes in a backward belong to, and the module that they prefetch; 0 if unknown.
    pub(crate) sharded: [TextId; 2],
    pub(crate) calls: BackwardCalls,
    pub(crate) names: Cache<Vec<u8>, TextId>,
    pub(crate) stacks: Cache<Frame, StackId>,
    /// The cached Python stack of the running ops; valid for `python_key`.
    pub(crate) python: StackId,
    /// The key for which `python` was computed: the innermost Python frame with its position in the code, and
    /// the stack of the forward op (0 outside backward functions).
    pub(crate) python_key: Option<((usize, usize), StackId)>,
    pub(crate) contexts: Cache<Context, ContextId>,
}

impl RunningOps {
    /// Creates a state without ops.
    pub(crate) const fn new() -> RunningOps {
        RunningOps {
            running: Vec::new(),
            near: 0,
            sharded: [0; 2],
            calls: BackwardCalls { last: 0, outermost: 0, open: FxHashMap::with_hasher(FxBuildHasher) },
            names: Cache::new(),
            stacks: Cache::new(),
            python: 0,
            python_key: None,
            contexts: Cache::new(),
        }
    }
}
