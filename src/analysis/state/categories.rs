//! Infers the category of a block where no `tag` row gives it.
//!
//! The traced process categorizes a block at its allocation, when it cannot know yet that the block is a
//! parameter or a gradient. The Python side therefore writes a `tag` row later. In a trace without `tag`
//! rows, the category follows from the phase and the lifetime of a block, by the rules of [`RULE`], and
//! reports mark inferred categories with `*`. If a trace without `tag` rows has io records, the category
//! follows from the flow of data between ops instead ([`crate::profile`]), which is more precise.

use std::sync::Arc;

use memtrace_trace::memory::MemoryKind;
use memtrace_trace::{Category, EventName, end_row};
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::{Block, Death};

/// The rules of inference for a trace with a forward phase, as a note that reports print.
pub const RULE: &str = "* inferred, because the trace has no tags: parameter = allocated before the first forward pass and not by a \
                        matrix product, never freed; gradient = of a parameter's size, allocated in a backward pass, \
                        live after it";

/// The rules for a trace that has no forward phase either, because no module ran or modules are not traced.
pub const RULE_WITHOUT_FORWARD: &str = "* inferred, as the trace has neither tags nor a forward phase. \
                                        activation: allocated outside backward, and freed before the second \
                                        backward after it, or a result of a matrix product that stays; \
                                        parameter: allocated before the first activation, never freed; \
                                        gradient: of a parameter's size, allocated in backward, live after \
                                        it";

/// The ops that call cuBLAS. A block that they leave behind outside backward is a result or a workspace of
/// cuBLAS. Torch allocates the workspace in the first product of a thread and a stream
/// (`at::cuda::getCurrentCUDABlasHandle`) and never frees it, so it looks like a parameter if the program's
/// first product comes before its first activation.
const PRODUCTS: [&str; 12] = [
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::baddbmm",
    "aten::baddbmm_",
    "aten::mv",
    "aten::addmv",
    "aten::dot",
    "aten::_addmm_activation",
    "aten::_scaled_mm",
    "aten::_int_mm",
];

/// The symbols of the phases and ops that the rules depend on.
#[derive(Clone, Copy, Debug)]
pub struct Phases {
    /// The symbol of the phase `forward`.
    pub forward: Symbol,
    /// The symbol of the phase `backward`.
    pub backward: Symbol,
    /// The symbol of the phase `optimizer`.
    pub optimizer: Symbol,
    products: [Symbol; PRODUCTS.len()],
}

impl Phases {
    /// Looks up the symbols in a table.
    #[must_use]
    pub fn new(symbols: &SymbolTable) -> Phases {
        Phases {
            forward: symbols.intern("forward"),
            backward: symbols.intern("backward"),
            optimizer: symbols.intern("optimizer"),
            products: PRODUCTS.map(|op| symbols.intern(op)),
        }
    }
}

/// The highest steps with work so far.
#[derive(Clone, Copy, Debug, Default)]
pub struct WorkedSteps {
    /// The highest step with a row in a forward pass.
    forward: Option<i64>,
    /// The highest step with a row in a backward pass or in an optimizer.
    trained: Option<i64>,
    /// The highest step with an OOM.
    failed: Option<i64>,
    /// The last step that the process completed, according to the end row.
    ended: Option<i64>,
}

impl WorkedSteps {
    /// Updates the highest steps with a row.
    pub(super) fn feed(&mut self, phases: &Phases, row: &Record) {
        if row.step < 0 {
            return;
        }
        if row.phase == phases.forward {
            self.forward = self.forward.max(Some(row.step));
        }
        if row.phase == phases.backward || row.phase == phases.optimizer {
            self.trained = self.trained.max(Some(row.step));
        }
        if row.event == EventName::Oom {
            self.failed = self.failed.max(Some(row.step));
        }
    }

    /// Records the last completed step. The text of the end row has the number of completed steps.
    pub(super) fn end(&mut self, text: &str) {
        self.ended = end_row::number::<i64>(text, end_row::STEPS).and_then(|steps| steps.checked_sub(1));
    }

    /// Returns the last step with work, or `None` before the first.
    ///
    /// Without training, this is the last step with a forward pass. In a program that trains, it is the last
    /// completed step with a backward pass or an optimizer: in later steps, only other optimizers worked. A
    /// later step that ran out of memory counts, too.
    pub(super) fn last(self) -> Option<i64> {
        let Some(trained) = self.trained else { return self.forward };
        let ended = self.ended.filter(|ended| *ended >= 0).unwrap_or(trained);
        Some(trained.min(ended)).max(self.failed)
    }
}

/// The backward passes of a trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct Passes {
    /// The number of passes that have begun.
    pub(super) begun: u32,
    /// True if memory of a GPU was allocated outside backward since the last row in backward.
    outside: bool,
    in_backward: bool,
    /// The lowest `alloc_id` of the blocks that were allocated outside backward and freed in the first
    /// backward pass. The first forward begins at this block or earlier.
    pub(super) first_activation: Option<i64>,
}

impl Passes {
    /// Processes a row. `in_backward` is true if the phase of the row is a backward pass.
    pub(super) fn feed(&mut self, row: &Record, in_backward: bool) {
        if in_backward {
            // This row begins a pass if it is in the first pass, or if memory was allocated outside backward
            // since the last row in backward. Otherwise, rows of other threads have only interrupted the
            // pass.
            self.begun += u32::from(self.begun == 0 || self.outside && !self.in_backward);
            self.outside = false;
        } else if row.event == EventName::Alloc {
            self.outside = true;
        }
        self.in_backward = in_backward;
    }

    /// Records a block that was allocated outside backward and freed in backward. Only such blocks of the
    /// first pass set `first_activation`.
    pub(super) fn add_activation(&mut self, block: &Block) {
        if self.begun == 1 && block.pass == 0 {
            self.first_activation = Some(self.first_activation.map_or(block.id, |first| first.min(block.id)));
        }
    }
}

/// Returns true if a block was allocated outside backward and the use of its memory is unknown.
pub(super) fn is_from_outside(block: &Block, phases: &Phases) -> bool {
    block.kind == MemoryKind::Block
        && block.owner.category.is_unclaimed()
        && block.owner.phase != phases.backward
}

/// Categories that an earlier reading of the trace inferred, by `alloc_id`. They come from the flow of data
/// between ops or, for the blocks of one moment, from the lives of these blocks up to the end. Clones share
/// one map.
#[derive(Clone, Debug, Default)]
pub struct KnownCategories {
    /// The categories, or `None` if no earlier reading inferred any. An empty map disables the rules.
    by_id: Option<Arc<FxHashMap<i64, Category>>>,
    rule: &'static str,
}

impl KnownCategories {
    /// Creates the categories in `by_id`, which `rule` explains to the reader of a report.
    #[must_use]
    pub fn new(by_id: FxHashMap<i64, Category>, rule: &'static str) -> KnownCategories {
        KnownCategories { by_id: Some(Arc::new(by_id)), rule }
    }

    /// Creates the map of the inferred categories in `blocks`. [`Self::apply`] leaves every other block
    /// unchanged.
    #[must_use]
    pub fn of_blocks(blocks: &[Block], rule: &'static str) -> KnownCategories {
        let inferred = blocks.iter().filter(|block| block.inferred);
        KnownCategories::new(inferred.map(|block| (block.id, block.owner.category)).collect(), rule)
    }

    /// Returns true if there is no map of categories, so that the rules infer them. With an empty map,
    /// categories are not inferred at all.
    #[must_use]
    pub fn is_none(&self) -> bool {
        self.by_id.is_none()
    }

    /// Returns true if no category is stored.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.by_id.as_ref().is_none_or(|by_id| by_id.is_empty())
    }

    /// Returns the category of a block, if it is stored.
    #[must_use]
    pub fn category_of(&self, alloc_id: i64) -> Option<Category> {
        self.by_id.as_ref()?.get(&alloc_id).copied()
    }

    /// Returns the note that explains the categories to the reader of a report; empty if they need no note.
    #[must_use]
    pub fn rule(&self) -> &'static str {
        self.rule
    }

    /// Sets the category of each block in `blocks` for which a category is stored, and marks it as inferred
    /// if it differs from the block's own category.
    pub fn apply(&self, blocks: &mut [Block]) {
        for block in blocks {
            if let Some(category) = self.category_of(block.id) {
                block.inferred = block.owner.category != category;
                block.owner.category = category;
            }
        }
    }
}

/// The state of a replay that the rules depend on.
#[derive(Clone, Copy, Debug)]
pub struct InferenceState {
    /// The symbols of the phases and ops.
    pub phases: Phases,
    /// The `seq` and step of the first row in a forward pass.
    pub first_forward: Option<(i64, i64)>,
    /// The current step.
    pub step: i64,
    /// The current phase.
    pub phase: Symbol,
    /// The backward passes so far.
    pub passes: Passes,
    /// The `seq` of the last allocation.
    pub last_alloc: i64,
}

impl InferenceState {
    /// Returns the free of a block if the program allocated anything after it. A program that ends, normally
    /// or by an exception, frees all its memory and allocates nothing more, so a block that is freed only
    /// then counts as never freed.
    fn death(&self, block: &Block) -> Option<Death> {
        block.died.filter(|death| death.seq < self.last_alloc)
    }

    fn is_of_product(&self, block: &Block) -> bool {
        self.phases.products.contains(&block.owner.op)
    }

    /// Returns true if a block outlived the first backward pass that ended after the block's allocation.
    fn stayed(&self, block: &Block) -> bool {
        self.death(block).is_none_or(|death| death.pass > block.pass + 1)
    }
}

/// Infers the categories of the blocks of one moment by [`RULE`], or by [`RULE_WITHOUT_FORWARD`] if the trace
/// has no forward phase. A block to which no rule applies keeps the category of its rows.
pub fn infer(blocks: &mut [Block], state: &InferenceState) {
    let mut of_size = FxHashMap::<i64, u32>::default();
    for block in blocks.iter_mut().filter(|block| is_parameter(block, state)) {
        *of_size.entry(block.bytes).or_default() += 1;
        block.owner.category = Category::Parameter;
        block.inferred = true;
    }
    for block in blocks.iter_mut().filter(|block| is_activation(block, state)) {
        block.owner.category = Category::Activation;
        block.inferred = true;
    }
    // A block that outlives backward is a gradient only if it has the size of a parameter; otherwise it is a
    // workspace of a library. There are at most as many gradients of a size as parameters. The newest blocks
    // come first, because a workspace of a parameter's size is older than any gradient.
    let mut survivors: Vec<_> = blocks.iter_mut().filter(|block| outlived_backward(block, state)).collect();
    survivors.sort_unstable_by_key(|block| std::cmp::Reverse(block.id));
    for block in survivors {
        if let Some(left @ 1..) = of_size.get_mut(&block.bytes) {
            *left -= 1;
            block.owner.category = Category::Gradient;
            block.inferred = true;
        }
    }
}

fn is_parameter(block: &Block, state: &InferenceState) -> bool {
    if state.is_of_product(block) {
        return false;
    }
    let Some((first_forward, step)) = state.first_forward else {
        let Some(first) = state.passes.first_activation else { return false };
        let is_known = is_from_outside(block, &state.phases) && !block.predates;
        return is_known && block.id < first && state.stayed(block);
    };
    // The first batch is also allocated before the first forward, but it is freed in its step or in the next
    // one. So a parameter must live longer.
    let stayed = state.death(block).is_none_or(|death| death.step > step + 1);
    block.owner.category.is_unclaimed() && !block.predates && block.id < first_forward && stayed
}

/// Returns true for an activation in a trace without a forward phase. With a forward phase, the rows already
/// give activations their category.
fn is_activation(block: &Block, state: &InferenceState) -> bool {
    let Some(first) = state.passes.first_activation.filter(|_| state.first_forward.is_none()) else {
        return false;
    };
    let ended = state.death(block).map_or(state.passes.begun, |death| death.pass);
    let is_short = block.id >= first && ended - block.pass <= 1;
    is_from_outside(block, &state.phases) && (is_short || state.is_of_product(block) && state.stayed(block))
}

fn outlived_backward(block: &Block, state: &InferenceState) -> bool {
    let backward = state.phases.backward;
    let (step, phase) = block.died.map_or((state.step, state.phase), |death| (death.step, death.phase));
    block.owner.category == Category::Temporary
        && block.owner.phase == backward
        && (phase != backward || step > block.owner.step)
}
