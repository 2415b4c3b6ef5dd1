//! What memory is for, where no `tag` row says it.
//!
//! The traced process types a block when it is born; what it cannot know then (that a block is a
//! parameter, or a gradient) comes as a `tag` row when the Python part ran. In a trace without one,
//! phase and lifetime tell it, by the rules of [`RULE`], and reports mark what was inferred with `*`. When
//! it has io records, the flow of data between ops tells more ([`crate::profile`]).

use std::sync::Arc;

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::read::symbols::Symbol;
use crate::state::replay::{Block, Replay};

/// The rules, for the reader.
pub const RULE: &str = "* inferred, as the trace has no tags: parameter = there before the first forward, and stayed; \
                        gradient = of a parameter's size, born in backward, and outlived it";

/// The phases that the rules are about.
#[derive(Clone, Copy, Debug)]
pub struct Phases {
    /// `forward`
    pub forward: Symbol,
    /// `backward`
    pub backward: Symbol,
}

/// The categories that the flow of data between ops gives to blocks, by `alloc_id`. Clones share them.
///
/// Empty for a trace that has tags, or no io records.
#[derive(Clone, Debug, Default)]
pub struct FlowCategories(Arc<FxHashMap<i64, Category>>);

impl FlowCategories {
    /// The categories in `by_id`.
    #[must_use]
    pub fn new(by_id: FxHashMap<i64, Category>) -> FlowCategories {
        FlowCategories(Arc::new(by_id))
    }

    /// Whether no block has one.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Gives the blocks of one moment their categories.
    pub fn apply(&self, blocks: &mut [Block]) {
        for block in blocks {
            if let Some(category) = self.0.get(&block.id) {
                block.inferred = block.owner.category != *category;
                block.owner.category = *category;
            }
        }
    }
}

/// How a block ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The step that ran.
    pub step: i64,
    /// The phase that ran.
    pub phase: Symbol,
}

/// Types the blocks of one moment, in a trace without tags, where the rules give them another category
/// than their rows.
pub fn infer(blocks: &mut [Block], replay: &Replay) {
    let mut sizes = FxHashSet::default();
    for block in blocks.iter_mut().filter(|block| is_parameter(block, replay)) {
        sizes.insert(block.bytes);
        block.owner.category = Category::Parameter;
        block.inferred = true;
    }
    // What outlives backward and is no parameter's size is a library's workspace.
    let fits = |block: &Block| sizes.contains(&block.bytes);
    for block in blocks.iter_mut().filter(|block| fits(block) && outlived_backward(block, replay)) {
        block.owner.category = Category::Gradient;
        block.inferred = true;
    }
}

fn is_parameter(block: &Block, replay: &Replay) -> bool {
    let Some((first_forward, step)) = replay.first_forward else { return false };
    // The first batch is there before the first forward too, and goes with its step or the next.
    let stayed = block.died.is_none_or(|death| death.step > step + 1);
    block.owner.category == Category::None && block.id < first_forward && stayed
}

fn outlived_backward(block: &Block, replay: &Replay) -> bool {
    let backward = replay.phases.backward;
    let (step, phase) = block.died.map_or((replay.step, replay.phase), |death| (death.step, death.phase));
    block.owner.category == Category::Temporary
        && block.owner.phase == backward
        && (phase != backward || step > block.owner.step)
}
