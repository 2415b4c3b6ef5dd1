//! What memory is for, where no `tag` row says it.
//!
//! The traced process types a block when it is born; what it cannot know then (that a block is a
//! parameter, or a gradient) comes as a `tag` row when the Python part ran. In a trace without one,
//! phase and lifetime tell it, by the rules of [`RULE`], and reports mark what was inferred with `*`.

use memtrace_trace::Category;

use crate::replay::{Block, Replay};
use crate::texts::Symbol;

/// The rules, for the reader.
pub const RULE: &str = "* inferred, as the trace has no tags: parameter = there before the first forward, and stayed; \
                        gradient = born in backward, and outlived it";

/// The phases that the rules are about.
#[derive(Clone, Copy, Debug)]
pub struct Phases {
    /// `forward`
    pub forward: Symbol,
    /// `backward`
    pub backward: Symbol,
}

/// How a block ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Death {
    /// The step that ran.
    pub step: i64,
    /// The phase that ran.
    pub phase: Symbol,
}

/// The category of a block in a trace without tags, when the rules give it another than its rows.
#[must_use]
pub fn infer(block: &Block, replay: &Replay) -> Option<Category> {
    let backward = replay.phases.backward;
    match block.owner.category {
        Category::None => {
            let first_forward = replay.first_forward?;
            // The first batch is there before the first forward too, and goes with its step or the next.
            let stayed = block.died.is_none_or(|death| death.step > first_forward.1 + 1);
            (block.id < first_forward.0 && stayed).then_some(Category::Parameter)
        }
        Category::Temporary if block.owner.phase == backward => {
            let outlived = match block.died {
                Some(death) => death.phase != backward || death.step > block.owner.step,
                None => replay.phase != backward || replay.step > block.owner.step,
            };
            outlived.then_some(Category::Gradient)
        }
        _ => None,
    }
}
