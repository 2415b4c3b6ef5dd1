//! The open ranges of a thread, and the context that results from them.

use std::cell::{Cell, RefCell};

use memtrace_record::intern::{Context, ContextId, TextId};
use memtrace_trace::{Api, Category};

use crate::runtime::cache::Cache;

/// The domain of ranges opened through the C API, which a pop of NVTX does not close.
pub(crate) const C_DOMAIN: usize = usize::MAX - 1;
/// The domain of module ranges, which no pop by the program closes.
pub(crate) const MODULE_DOMAIN: usize = usize::MAX;

/// The meaning of an open range, with its text interned.
#[derive(Clone, Copy)]
pub(crate) enum Role {
    /// A training phase.
    Phase(TextId),
    /// A complete module path.
    ModulePath(TextId),
    /// One level that is appended to the module path.
    Level(TextId),
    /// The name of an op.
    Op(TextId),
    /// A training step, or a marker that a library sets for its own work. It names no owner.
    Unowned,
    /// The range in which a library gathers parameters or reduces gradients. It names no owner.
    Sharding(Category),
    /// The forward call of a module.
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
    /// The full name, as written to the rows.
    pub(crate) name: TextId,
    /// The class name of a module; 0 for other ranges.
    pub(crate) class: TextId,
    /// The id of a start/end range; 0 for push/pop.
    pub(crate) id: u64,
    /// The id in the process-wide list of phases; 0 if the range is not a phase.
    pub(crate) phase: u64,
    /// The NVTX domain. A pop closes the last range of its own domain.
    pub(crate) domain: usize,
    /// True if this is a start/end range and the thread that started it has ended.
    pub(crate) is_orphan: bool,
    /// True if the `range_begin` row of the range is written. A range that opened before the trace began, or
    /// during a pause, gets the row later.
    pub(crate) has_row: bool,
    /// For a module, the number of the call (see `backward_calls`); 0 for other ranges.
    pub(crate) call: u32,
    /// For a module, the thread's state before the range began. The end of the range restores this state.
    pub(crate) around: Around,
}

impl OpenRange {
    /// Creates a range without an id or a phase, whose begin row is not written.
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

    /// Returns the API that opened the range, for its rows.
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

/// The values of [`OpenRanges`] when a module range begins. They are restored when the range ends.
#[derive(Clone, Copy, Default)]
pub(crate) struct Around {
    pub(crate) base: Context,
    pub(crate) context: ContextId,
    pub(crate) version: u64,
    pub(crate) call: u32,
}

/// The ranges of a thread and the context that results from them. When the thread ends,
/// [`ranges`](crate::attribution::ranges) closes them.
pub(crate) struct OpenRanges {
    pub(crate) open: RefCell<Vec<OpenRange>>,
    /// The context that results from the open ranges and the phase. It excludes the running op.
    pub(crate) base: Cell<Context>,
    /// The id of `base`.
    pub(crate) context: Cell<ContextId>,
    /// The number of times that `base` was recomputed or restored so far.
    pub(crate) epoch: Cell<u64>,
    /// The version of the process-wide state that `base` was computed from; 0 forces a recomputation.
    pub(crate) version: Cell<u64>,
    /// The cached result of [`OpenRanges::is_autograd`]: 0 before the first call, 1 for false, 2 for true.
    autograd: Cell<u8>,
    /// True while a backward function runs on this thread. The backward functions of CPU tensors run on the
    /// thread that called `backward`.
    pub(crate) in_backward: Cell<bool>,
    /// True inside an outermost module call that began outside the detailed steps.
    pub(crate) in_unseen_forward: Cell<bool>,
    /// The number of the innermost open module call; 0 outside every module call.
    pub(crate) call: Cell<u32>,
    /// The sum of the bytes in the block reports of this thread.
    pub(crate) bytes: Cell<i64>,
    /// The device of the thread's last block report; 0 before the first one.
    pub(crate) device: Cell<i8>,
    /// The ids of base contexts. They are cached, because the same modules are entered again and again.
    pub(crate) context_ids: RefCell<Cache<Context, ContextId>>,
    pub(crate) joined_paths: RefCell<Cache<(TextId, TextId), TextId>>,
}

impl OpenRanges {
    /// Creates the state of a new thread, which has no open ranges.
    pub(crate) const fn new() -> OpenRanges {
        OpenRanges {
            open: RefCell::new(Vec::new()),
            base: Cell::new(Context {
                op: 0,
                module: 0,
                phase: 0,
                stack: 0,
                stream: 0,
                flags: 0,
                category: Category::None,
            }),
            context: Cell::new(0),
            epoch: Cell::new(0),
            version: Cell::new(0),
            autograd: Cell::new(0),
            in_backward: Cell::new(false),
            in_unseen_forward: Cell::new(false),
            call: Cell::new(0),
            bytes: Cell::new(0),
            device: Cell::new(0),
            context_ids: RefCell::new(Cache::new()),
            joined_paths: RefCell::new(Cache::new()),
        }
    }

    /// Invalidates the cached context, so that the next query recomputes it.
    #[inline]
    pub(crate) fn invalidate(&self) {
        self.version.set(0);
    }

    /// Returns true if the calling thread runs a backward function, or is one of autograd's threads.
    #[inline]
    pub(crate) fn runs_backward(&self) -> bool {
        self.in_backward.get() || self.is_autograd()
    }

    /// Returns true if the calling thread is one of autograd's threads. Reads the name of the thread once.
    #[inline]
    pub(crate) fn is_autograd(&self) -> bool {
        if self.autograd.get() == 0 {
            self.autograd.set(if thread_name_starts_with(b"pt_autograd") { 2 } else { 1 });
        }
        self.autograd.get() == 2
    }
}

/// Returns true if the thread's name starts with `prefix`. torch names its autograd threads
/// `pt_autograd_<device>` before they do anything.
fn thread_name_starts_with(prefix: &[u8]) -> bool {
    let mut name = [0u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes, and there is room for them.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(prefix)
}
