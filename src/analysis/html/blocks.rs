//! Which allocations the page keeps whole: the largest, and what was live when it mattered.

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::state::replay::Block;

/// How many allocations a page keeps.
pub(super) const MOST: usize = 15_000;

/// How many allocations there are of each size: a bin is an eighth of a power of two.
#[derive(Clone)]
pub(super) struct SizeHistogram {
    bins: Vec<u64>,
    /// All of them.
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

    /// The lowest bin of which some can be kept, and how many of it, when `room` are kept in all.
    fn border(&self, mut room: u64) -> (usize, u64) {
        for (bin, count) in self.bins.iter().enumerate().rev() {
            if *count > room {
                return (bin, room);
            }
            room -= count;
        }
        (0, u64::MAX)
    }
}

/// An allocation that is kept.
#[derive(Clone, Copy)]
pub(super) struct KeptBlock {
    /// With the owner that it had last.
    pub(super) block: Block,
    /// When it went back, ns; `None` when it never did.
    pub(super) died_ns: Option<i64>,
}

/// Chooses as the rows come.
pub(super) struct BlockSelection {
    border: usize,
    room_at_border: u64,
    wanted: FxHashSet<i64>,
    inferred: FxHashMap<i64, Category>,
    room: usize,
    /// The chosen.
    pub(super) kept: Vec<KeptBlock>,
}

impl BlockSelection {
    /// Keeps up to `most`: of what was live at the peak first.
    pub(super) fn new(sizes: &SizeHistogram, at_peak: &[Block], most: usize) -> BlockSelection {
        let mut largest: Vec<&Block> = at_peak.iter().collect();
        largest.sort_by_key(|block| (-block.bytes, block.id));
        let wanted: FxHashSet<i64> = largest.iter().take(most * 2 / 3).map(|block| block.id).collect();
        let inferred =
            at_peak.iter().filter(|block| block.inferred).map(|block| (block.id, block.owner.category));
        let room = if sizes.count as usize <= most { most } else { most - wanted.len() };
        let (border, room_at_border) = sizes.border(room as u64);
        BlockSelection {
            border,
            room_at_border,
            inferred: inferred.collect(),
            wanted,
            room: most,
            kept: Vec::new(),
        }
    }

    /// The category that inference gave a block of the peak.
    pub(super) fn inferred(&self, id: i64) -> Option<Category> {
        self.inferred.get(&id).copied()
    }

    /// Wants what is live now too, the largest up to a sixth of the page.
    pub(super) fn want(&mut self, live: &[Block]) {
        let mut largest: Vec<&Block> = live.iter().collect();
        largest.sort_by_key(|block| (-block.bytes, block.id));
        self.wanted.extend(largest.iter().take(MOST / 6).map(|block| block.id));
    }

    /// Takes a block that went back, or that is still there at the end.
    pub(super) fn take(&mut self, block: &Block, died_ns: Option<i64>) {
        if !self.wanted.contains(&block.id) {
            let bin = bin(block.bytes);
            if bin < self.border || self.kept.len() >= self.room {
                return;
            }
            if bin == self.border {
                if self.room_at_border == 0 {
                    return;
                }
                self.room_at_border -= 1;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_border_leaves_room_for_the_largest() {
        let mut sizes = SizeHistogram::default();
        for _ in 0..10 {
            sizes.add(512);
        }
        for bytes in [1 << 20, 2 << 20, 1 << 40] {
            sizes.add(bytes);
        }
        assert_eq!(sizes.border(5), (bin(512), 2));
        assert_eq!(sizes.border(2), (bin(1 << 20), 0));
        assert_eq!(sizes.border(13), (0, u64::MAX));
        assert!(bin(1) == 0 && bin(i64::MAX) < 64 * 8);
        assert!(bin(1 << 20) < bin((1 << 20) + (1 << 18)));
    }
}
