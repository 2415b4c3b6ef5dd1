//! The blocks of a moment, with their recorded or inferred categories.

use memtrace_trace::EventName;
use memtrace_trace::memory::MemoryKind;

use super::Replay;
use crate::read::record::is_counted;
use crate::state::block::{Block, is_unknown_form};
use crate::state::categories::{self, InferenceState};

impl Replay {
    /// Returns two sums over all blocks that were allocated on a device in the window. The first is the bytes
    /// of the blocks that still had no owner when they were freed, or at the end of the trace. The second is
    /// the bytes of all blocks.
    #[must_use]
    pub fn unowned_and_total(&self, ordinal: i32) -> (i64, i64) {
        let Some(device) = self.find(ordinal) else { return (0, 0) };
        let blocks = self.memory.live.values().filter(|block| block.device == ordinal && block.in_window);
        let live = self.with_inferred(blocks.filter(|block| block.owner.is_nobody()).copied().collect());
        let live = live.iter().filter(|block| block.owner.is_nobody()).map(|block| block.bytes);
        let inferred = if self.infers() { device.unowned.inferred } else { 0 };
        (live.fold(device.unowned.all.wrapping_sub(inferred), i64::wrapping_add), device.total_allocated)
    }

    /// Returns true if categories are inferred. The trace must have no tags so far. If `known` has a map of
    /// categories, the map must not be empty. Without a map, a forward pass must have begun, or the first
    /// backward pass must have freed a block from outside backward.
    #[must_use]
    pub fn infers(&self) -> bool {
        let by_phase = self.first_forward.is_some() || self.passes.first_activation.is_some();
        let any = if self.known.is_none() { by_phase } else { !self.known.is_empty() };
        self.counts.of(EventName::Tag) == 0 && any
    }

    /// Returns the rule of the inferred categories, as a note for the reader.
    #[must_use]
    pub fn rule(&self) -> &'static str {
        match self.first_forward {
            _ if !self.known.is_none() => self.known.rule(),
            Some(_) => categories::RULE,
            None => categories::RULE_WITHOUT_FORWARD,
        }
    }

    /// Returns `blocks` with inferred categories, if the trace needs inference.
    fn with_inferred(&self, mut blocks: Vec<Block>) -> Vec<Block> {
        if self.infers() {
            self.infer_categories(&mut blocks, self.last_alloc);
        }
        blocks
    }

    /// Returns the state that the rules of inference depend on.
    fn inference_state(&self, last_alloc: i64) -> InferenceState {
        let Replay { phases, first_forward, step, phase, passes, .. } = *self;
        InferenceState { phases, first_forward, step, phase, passes, last_alloc }
    }

    /// Sets the inferred categories of `blocks`. `last_alloc` is the `seq` of the last allocation: a block
    /// that was freed after it counts as never freed. With `i64::MAX`, every free counts.
    pub(super) fn infer_categories(&self, blocks: &mut [Block], last_alloc: i64) {
        if self.known.is_none() {
            categories::infer(blocks, &self.inference_state(last_alloc));
        } else {
            self.known.apply(blocks);
        }
    }

    /// Copies the categories, types and shapes of `blocks`, which come from later `tag` rows, to the live blocks
    /// with the same ids.
    pub(in crate::state) fn copy_tags(&mut self, blocks: &[Block]) {
        for tagged in blocks {
            if let Some(block) = self.memory.live.get_mut(tagged.id) {
                block.owner.category = tagged.owner.category;
                if !is_unknown_form(tagged.shape) {
                    (block.dtype, block.shape) = (tagged.dtype, tagged.shape);
                }
            }
        }
    }

    /// Returns true if blocks of `kind` count as blocks of the device `ordinal`. Memory outside torch's
    /// allocator counts only if the memory in use is tracked.
    pub(super) fn is_of(&self, kind: MemoryKind, ordinal: i32) -> bool {
        is_counted(kind, ordinal, self.tracked)
    }

    /// Returns the live blocks of a device: blocks of torch's allocator, CPU tensors, or
    /// pinned host memory. With
    /// `as_of`, the blocks have no inferred categories.
    #[must_use]
    pub fn live_on(&self, ordinal: i32, as_of: bool) -> Vec<Block> {
        let here = |block: &&Block| block.device == ordinal && block.kind != MemoryKind::External;
        let blocks = self.memory.live.values().filter(here).copied().collect();
        if as_of { blocks } else { self.with_inferred(blocks) }
    }

    /// Returns the blocks that were live on a device at its peak of the tracked metric. With `as_of`, each
    /// block has its owner at that moment; otherwise, its last owner and an inferred category.
    #[must_use]
    pub fn at_peak(&self, ordinal: i32, as_of: bool) -> Vec<Block> {
        let Some(device) = self.find(ordinal) else { return Vec::new() };
        let peak = device.peak(self.tracked).seq;
        if !as_of {
            return self.at(ordinal, peak, &device.gone);
        }
        let owned_then = |mut block: Block| {
            block.owner = block.then.filter(|then| then.1 == peak).map_or(block.owner, |then| then.0);
            block
        };
        self.live_since(ordinal, peak, &device.gone).map(owned_then).collect()
    }

    /// Returns the blocks that were live on a device at the row `seq`, with their last owners and inferred
    /// categories. `gone` has the blocks that were freed since.
    #[must_use]
    pub fn at(&self, ordinal: i32, seq: i64, gone: &[Block]) -> Vec<Block> {
        self.with_inferred(self.live_since(ordinal, seq, gone).collect())
    }

    fn live_since<'a>(
        &'a self,
        ordinal: i32,
        seq: i64,
        gone: &'a [Block],
    ) -> impl Iterator<Item = Block> + use<'a> {
        let live = self.memory.live.values().filter(move |block| block.id <= seq);
        let here = move |block: &&Block| block.device == ordinal && self.is_of(block.kind, ordinal);
        live.chain(gone).filter(here).copied()
    }
}
