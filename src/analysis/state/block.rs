//! A block of memory and its owner.

use memtrace_trace::Category;
use memtrace_trace::memory::MemoryKind;

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};

/// The owner of a block of memory: the code that allocated it, and the role of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The innermost op at the allocation.
    pub op: Symbol,
    /// The path of the module in which the memory was allocated, such as `GPT.h.0`.
    pub module: Symbol,
    /// The phase.
    pub phase: Symbol,
    /// The role of the memory, such as a parameter or an activation.
    pub category: Category,
    /// The training step of the allocation; -1 before the first.
    pub step: i64,
}

impl Owner {
    /// Returns the owner that `row` names.
    pub(crate) fn from_row(row: &Record) -> Owner {
        Owner { op: row.op, module: row.module, phase: row.phase, category: row.category, step: row.step }
    }

    /// Returns the step, unless it is before the first one, and those of `names` that are known, each after a
    /// comma: `, step 3, forward`.
    #[must_use]
    pub fn place(&self, names: &[Symbol], symbols: &SymbolTable) -> String {
        let step = (self.step >= 0).then(|| format!(", step {}", self.step));
        let known = names.iter().filter(|name| **name != Symbol::NONE);
        step.into_iter().chain(known.map(|name| format!(", {}", symbols.get(*name)))).collect()
    }

    /// Returns true if the owner has no op, no module and no category. An op or a module that was recorded
    /// without detail counts as missing.
    #[must_use]
    pub fn is_nobody(&self) -> bool {
        let is_unknown = |symbol| matches!(symbol, Symbol::NONE | Symbol::WITHOUT_DETAIL);
        is_unknown(self.op) && is_unknown(self.module) && self.category == Category::None
    }
}

/// A block of memory, live or freed.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// The kind. Segments are not blocks, so their kinds do not occur here.
    pub kind: MemoryKind,
    /// The CUDA ordinal of the device.
    pub device: i32,
    /// The `seq` of the block's allocation, which identifies the block.
    pub id: i64,
    /// The time of the allocation, in ns since the start of the trace.
    pub born_ns: i64,
    /// The size, in bytes.
    pub bytes: i64,
    /// The requested size, in bytes; -1 if unknown.
    pub requested: i64,
    /// The requested size rounded by the allocator's rule, in bytes.
    pub rounded: i64,
    /// The address. Like `stream` and `pool`, it is 0 if the column was not read.
    pub addr: i64,
    /// The stream of the allocation.
    pub stream: i64,
    /// The id of the block's private pool; 0 for the default pool.
    pub pool: i64,
    /// The `stack_id` of the allocation; 0 if there is no stack or the column was not read.
    pub stack: i64,
    /// The type of its tensor; unknown if [`is_unknown_form`] says so.
    pub dtype: Symbol,
    /// The shape of its tensor; unknown if [`is_unknown_form`] says so.
    pub shape: Symbol,
    /// The owner according to the rows so far.
    pub owner: Owner,
    /// The owner at the peak, and the `seq` of the peak's row. Set only if the block was live at the peak and
    /// a later row changed its owner.
    pub(super) then: Option<(Owner, i64)>,
    /// The number of backward passes that had begun at the allocation.
    pub(super) pass: u32,
    /// The moment of the free, or `None` while the block is live.
    pub died: Option<Death>,
    /// True if the block is managed memory, which moves between host and device.
    pub(super) managed: bool,
    /// True if the block's category is inferred.
    pub inferred: bool,
    /// True if the block is older than the history of a PyTorch snapshot, so that its owner is unknown.
    pub(super) predates: bool,
    /// True if the block was allocated in the window and so counts in the device's `total_allocated`.
    pub(super) in_window: bool,
}

/// Returns true if a type or a shape is unknown: the row does not have it, or the column was not read.
#[must_use]
pub fn is_unknown_form(form: Symbol) -> bool {
    matches!(form, Symbol::UNKNOWN | Symbol::NONE)
}

/// The moment of a block's free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The `seq` of the row that freed the block.
    pub(super) seq: i64,
    /// The step at the free.
    pub step: i64,
    /// The phase at the free.
    pub phase: Symbol,
    /// The number of backward passes that had begun at the free.
    pub(super) pass: u32,
}
