//! Selects the allocations that the page keeps: the largest ones, and the ones that are live at the peak and
//! at the OOM.

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::replay::Block;

/// The maximum number of allocations on a page.
pub(super) const MOST: usize = 15_000;

/// The number of allocations by size. The width of a bin is an eighth of a power of two.
#[derive(Clone)]
pub(super) struct SizeHistogram {
    bins: Vec<u64>,
    /// The number of all allocations.
    pub(super) count: u64,
}

impl Default for SizeHistogram {
    fn default() -> Self {
        SizeHistogram { bins: vec![0; 64 * 8], count: 0 }
    }
}

fn bin(bytes: i64) -> usize {
    let bytes = bytes.max(1).cast_unsigned();
    let power = bytes.ilog2() as usize;
    let eighth = if power >= 3 { bytes >> (power - 3) & 7 } else { 0 };
    power * 8 + eighth as usize
}

impl SizeHistogram {
    pub(super) fn add(&mut self, bytes: i64) {
        self.bins[bin(bytes)] += 1;
        self.count += 1;
    }

    /// Returns the lowest bin with kept allocations, and how many of that bin are kept, if `room` allocations
    /// are kept in total.
    fn threshold(&self, mut room: u64) -> (usize, u64) {
        for (bin, count) in self.bins.iter().enumerate().rev() {
            if *count > room {
                return (bin, room);
            }
            room -= count;
        }
        (0, u64::MAX)
    }
}

/// A kept allocation.
#[derive(Clone, Copy)]
pub(super) struct KeptBlock {
    /// The block, with its last known owner.
    pub(super) block: Block,
    /// The time of its free in ns; `None` if it was never freed.
    pub(super) died_ns: Option<i64>,
}

/// Selects allocations while the rows are read.
pub(super) struct BlockSelection {
    threshold: usize,
    room_at_threshold: u64,
    wanted: FxHashSet<i64>,
    inferred: FxHashMap<i64, Category>,
    room: usize,
    /// The kept allocations.
    pub(super) kept: Vec<KeptBlock>,
}

impl BlockSelection {
    /// Returns a selection of about `most` allocations: the largest blocks at the peak (up to two thirds of
    /// `most`) and the largest allocations of the trace. Up to `MOST / 6` blocks that are live at an OOM are
    /// kept in addition.
    pub(super) fn new(
        sizes: &SizeHistogram,
        at_peak: &[Block],
        at_oom: &[Block],
        most: usize,
    ) -> BlockSelection {
        let mut wanted = FxHashSet::default();
        wanted.extend(largest(at_peak, most * 2 / 3));
        let room = if sizes.count as usize <= most { most } else { most - wanted.len() };
        wanted.extend(largest(at_oom, MOST / 6));
        let inferred = at_oom.iter().chain(at_peak).filter(|block| block.inferred);
        let inferred = inferred.map(|block| (block.id, block.owner.category));
        let (threshold, room_at_threshold) = sizes.threshold(room as u64);
        BlockSelection {
            threshold,
            room_at_threshold,
            inferred: inferred.collect(),
            wanted,
            room: most,
            kept: Vec::new(),
        }
    }

    /// Returns the category of a block that is live at the peak or at an OOM, if the category is inferred.
    pub(super) fn inferred(&self, id: i64) -> Option<Category> {
        self.inferred.get(&id).copied()
    }

    /// Adds a block that was freed, or is live at the end.
    pub(super) fn add(&mut self, block: &Block, died_ns: Option<i64>) {
        if !self.wanted.contains(&block.id) {
            let bin = bin(block.bytes);
            if bin < self.threshold || self.kept.len() >= self.room {
                return;
            }
            if bin == self.threshold {
                if self.room_at_threshold == 0 {
                    return;
                }
                self.room_at_threshold -= 1;
            }
        }
        let mut block = *block;
        if let Some(category) = self.inferred(block.id) {
            block.owner.category = category;
            block.inferred = true;
        }
        self.kept.push(KeptBlock { block, died_ns });
    }
}

/// Returns the ids of the largest `most` blocks.
fn largest(blocks: &[Block], most: usize) -> impl Iterator<Item = i64> + use<'_> {
    let mut blocks: Vec<&Block> = blocks.iter().collect();
    blocks.sort_by_key(|block| (-block.bytes, block.id));
    blocks.into_iter().take(most).map(|block| block.id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_keeps_the_largest_allocations() {
        let mut sizes = SizeHistogram::default();
        for _ in 0..10 {
            sizes.add(512);
        }
        for bytes in [1 << 20, 2 << 20, 1 << 40] {
            sizes.add(bytes);
        }
        assert_eq!(sizes.threshold(5), (bin(512), 2));
        assert_eq!(sizes.threshold(2), (bin(1 << 20), 0));
        assert_eq!(sizes.threshold(13), (0, u64::MAX));
        assert!(bin(1) == 0 && bin(i64::MAX) < 64 * 8);
        assert!(bin(1 << 20) < bin((1 << 20) + (1 << 18)));
    }
}
