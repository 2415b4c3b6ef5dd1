//! The four parts of the memory in use.

use crate::state::levels::Level;

/// A part of the growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrowthPart {
    /// Live at the ends of steps.
    Kept,
    /// Needed only within a step, by the largest step so far.
    LargerSteps,
    /// Reserved, and needed by no step.
    Cached,
    /// Outside torch's allocator.
    Outside,
}

impl GrowthPart {
    pub(super) const ALL: [GrowthPart; 4] =
        [GrowthPart::Kept, GrowthPart::LargerSteps, GrowthPart::Cached, GrowthPart::Outside];

    pub(super) fn name(self) -> &'static str {
        match self {
            GrowthPart::Kept => "kept",
            GrowthPart::LargerSteps => "larger steps",
            GrowthPart::Cached => "cached",
            GrowthPart::Outside => "outside PyTorch",
        }
    }

    pub(super) fn key(self) -> &'static str {
        match self {
            GrowthPart::Kept => "kept",
            GrowthPart::LargerSteps => "larger_steps",
            GrowthPart::Cached => "cached",
            GrowthPart::Outside => "outside",
        }
    }

    pub(super) fn about(self) -> &'static str {
        match self {
            GrowthPart::Kept => "live when a step ends",
            GrowthPart::LargerSteps => "what the largest step so far needed beyond the kept memory",
            GrowthPart::Cached => "reserved by PyTorch's allocator, and needed by no step",
            GrowthPart::Outside => "context, kernels, libraries, other processes",
        }
    }
}

/// Returns the parts of the memory in use at each level, in the order of [`GrowthPart::ALL`].
pub(super) fn parts_of(levels: &[Level]) -> Vec<[i64; 4]> {
    let mut highest = 0;
    levels
        .iter()
        .map(|level| {
            highest = level.peak.max(highest).min(level.reserved).max(level.allocated);
            [level.allocated, highest - level.allocated, level.reserved - highest, level.outside]
        })
        .collect()
}
