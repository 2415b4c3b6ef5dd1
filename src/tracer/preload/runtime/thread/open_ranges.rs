//! The ranges that are open on a thread, and the context that follows from them.

use std::cell::{Cell, RefCell};

use memtrace_record::intern::{Context, ContextId, TextId};
use memtrace_trace::Api;

use crate::runtime::cache::Cache;

/// The domain of ranges that the C API opens: its pops close no NVTX range.
pub(crate) const C_DOMAIN: usize = usize::MAX - 1;
/// The domain of ranges that are modules: no pop of the program closes one.
pub(crate) const MODULE_DOMAIN: usize = usize::MAX;

/// The meaning of an open range, its text interned.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    /// A phase.
    Phase(TextId),
    /// A whole module path.
    ModulePath(TextId),
    /// One more level of the module path.
    Level(TextId),
    /// An op.
    Op(TextId),
    /// A training step, or a library's mark of its own work: no owner.
    Unowned,
    /// The forward of a module.
    Module {
        /// The path of the module.
        path: TextId,
        /// The address of the module object.
        key: usize,
    },
}

/// An open range.
#[derive(Clone, Copy)]
pub(crate) struct OpenRange {
    pub(crate) role: Role,
    /// The whole name, for the rows.
    pub(crate) name: TextId,
    /// The class of a module; 0 for other ranges.
    pub(crate) class: TextId,
    /// The id of a start/end range; 0 for push/pop.
    pub(crate) id: u64,
    /// The id of its phase in the process-wide list; 0 for none.
    pub(crate) phase: u64,
    /// The NVTX domain. A pop closes the last range of its own domain.
    pub(crate) domain: usize,
    /// For a start/end range: whether the thread that started it has ended.
    pub(crate) is_orphan: bool,
    /// True if its `range_begin` row is written. A range that opened before the trace gets it later.
    pub(crate) has_row: bool,
    /// For a module: the number of this call.
    pub(crate) call: u32,
    /// For a module: the state around it, which its end restores.
    pub(crate) around: Around,
}

impl OpenRange {
    /// A range with no id and no phase, whose begin has no row.
    pub(crate) fn new(role: Role, name: TextId, domain: usize) -> OpenRange {
        OpenRange {
            role,
            name,
            class: 0,
            id: 0,
            phase: 0,
            domain,
            is_orphan: false,
            has_row: false,
            call: 0,
            around: Around::default(),
        }
    }

    /// The API that opened it, as its rows say.
    pub(crate) fn api(&self) -> Api {
        match self.domain {
            C_DOMAIN => Api::Memtrace,
            MODULE_DOMAIN => Api::Module,
            _ => Api::Nvtx,
        }
    }

    /// Returns true if this range is the forward of the module object at `key`.
    pub(crate) fn is_module(&self, key: usize) -> bool {
        matches!(self.role, Role::Module { key: of, .. } if of == key)
    }
}

/// A thread's context at some moment.
#[derive(Clone, Copy, Default)]
pub(crate) struct Around {
    pub(crate) base: Context,
    pub(crate) context: ContextId,
    pub(crate) version: u64,
    pub(crate) call: u32,
}

/// A thread's ranges and the context that follows from them.
pub(crate) struct OpenRanges {
    pub(crate) open: RefCell<Vec<OpenRange>>,
    /// The context that the open ranges and the phase give, without the running op.
    pub(crate) base: Cell<Context>,
    /// The id of `base`.
    pub(crate) context: Cell<ContextId>,
    /// Counts the changes of `base`.
    pub(crate) epoch: Cell<u64>,
    /// The version of the process-wide state that `base` was computed from; 0 forces a recomputation.
    pub(crate) version: Cell<u64>,
    /// The answer to "is this one of autograd's threads": 0 before the first query, 1 no, 2 yes.
    autograd: Cell<u8>,
    /// True inside the outermost call of a module that began outside the detailed steps.
    pub(crate) in_unseen_forward: Cell<bool>,
    /// The number of the innermost module call; 0 for none.
    pub(crate) call: Cell<u32>,
    /// Bytes that the thread's block reports added.
    pub(crate) bytes: Cell<i64>,
    /// The device of the last block report.
    pub(crate) device: Cell<i8>,
    /// Ids of contexts and of joined paths: the same modules are entered again and again.
    pub(crate) context_ids: RefCell<Cache<Context, ContextId>>,
    pub(crate) joined_paths: RefCell<Cache<(TextId, TextId), TextId>>,
}

impl OpenRanges {
    /// No ranges.
    pub(crate) const fn new() -> OpenRanges {
        OpenRanges {
            open: RefCell::new(Vec::new()),
            base: Cell::new(Context { op: 0, module: 0, phase: 0, stack: 0, stream: 0, flags: 0 }),
            context: Cell::new(0),
            epoch: Cell::new(0),
            version: Cell::new(0),
            autograd: Cell::new(0),
            in_unseen_forward: Cell::new(false),
            call: Cell::new(0),
            bytes: Cell::new(0),
            device: Cell::new(0),
            context_ids: RefCell::new(Cache::new()),
            joined_paths: RefCell::new(Cache::new()),
        }
    }

    /// Makes the next query recompute the context.
    #[inline]
    pub(crate) fn invalidate(&self) {
        self.version.set(0);
    }

    /// Returns true if this is one of autograd's threads.
    #[inline]
    pub(crate) fn is_autograd(&self) -> bool {
        if self.autograd.get() == 0 {
            self.autograd.set(if thread_name_starts_with(b"pt_autograd") { 2 } else { 1 });
        }
        self.autograd.get() == 2
    }
}

/// torch names its autograd threads `pt_autograd_<device>` before they do anything.
fn thread_name_starts_with(prefix: &[u8]) -> bool {
    let mut name = [0u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes, and there is room for them.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(prefix)
}
