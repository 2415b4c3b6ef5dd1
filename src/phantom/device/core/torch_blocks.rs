//! The live blocks of PyTorch's caching allocator, which the allocator reports.
//!
//! The allocator cuts the memory that it gets from `cudaMalloc` into blocks. A kernel that is given an
//! address of a block may write the whole block, and writes no other one. Without these reports the smallest
//! unit would be an allocation of the driver, which holds hundreds of small tensors.

use std::collections::{BTreeMap, HashMap};
use std::sync::Mutex;

use rustc_hash::FxBuildHasher;

use crate::core::lock::lock;

/// The end and the number of each live block, by its start. Kernels mostly get the start of a block, which
/// the hash table finds several times faster.
struct Blocks {
    sorted: BTreeMap<usize, usize>,
    hashed: HashMap<usize, (usize, u64), FxBuildHasher>,
    /// The number of blocks that were handed out so far.
    count: u64,
}

impl Blocks {
    fn insert(&mut self, start: usize, end: usize) {
        self.sorted.insert(start, end);
        self.hashed.insert(start, (end, self.count));
        self.count += 1;
    }

    fn remove(&mut self, start: usize) {
        self.sorted.remove(&start);
        self.hashed.remove(&start);
    }
}

static BLOCKS: Mutex<Blocks> =
    Mutex::new(Blocks { sorted: BTreeMap::new(), hashed: HashMap::with_hasher(FxBuildHasher), count: 0 });

/// Records that a block was allocated (`size` > 0) or freed (`size` < 0).
pub(crate) fn report(address: usize, size: i64) {
    let mut blocks = lock(&BLOCKS);
    if size <= 0 {
        blocks.remove(address);
        return;
    }
    let end = address.saturating_add(size as usize);
    // An older block that overlaps the new one must have been freed, although its free was not reported.
    while let Some((&start, _)) = blocks.sorted.range(..end).next_back().filter(|&(_, &stop)| stop > address)
    {
        blocks.remove(start);
    }
    blocks.insert(address, end);
}

/// Returns the start and the end of the block that contains an address.
pub(crate) fn find(address: usize) -> Option<(usize, usize)> {
    let blocks = lock(&BLOCKS);
    if let Some(&(end, _)) = blocks.hashed.get(&address) {
        return Some((address, end));
    }
    let (&start, &end) = blocks.sorted.range(..=address).next_back()?;
    (address < end).then_some((start, end))
}

/// Returns the number of blocks that were handed out so far.
pub(crate) fn count() -> u64 {
    lock(&BLOCKS).count
}

/// Returns the number of the live block that begins at an address. The first block that was handed out has
/// the number 0, the next one 1, and so on. Returns `None` if no live block begins at the address.
pub(crate) fn number(start: usize) -> Option<u64> {
    lock(&BLOCKS).hashed.get(&start).map(|&(_, number)| number)
}

/// Returns the range around an address that no block covers, within the driver's allocation from `start` to
/// `end`. If the allocation has no block, this is the whole allocation.
pub(crate) fn gap(address: usize, start: usize, end: usize) -> (usize, usize) {
    let blocks = lock(&BLOCKS);
    let before = blocks.sorted.range(start..=address).next_back().map_or(start, |(_, &stop)| stop);
    let after = blocks.sorted.range(address..end).next().map_or(end, |(&first, _)| first);
    (before.min(address), after)
}

/// Forgets the blocks in a range that was returned to the driver.
pub(crate) fn forget(address: usize, size: usize) {
    let mut blocks = lock(&BLOCKS);
    let range = address..address.saturating_add(size);
    let gone: Vec<_> = blocks.sorted.range(range).map(|(&start, _)| start).collect();
    for start in gone {
        blocks.remove(start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_found_by_any_of_its_addresses_until_it_is_taken_back() {
        report(0x7000_0000, 512);
        report(0x7000_0200, 1024);
        assert_eq!(find(0x7000_01ff), Some((0x7000_0000, 0x7000_0200)));
        assert_eq!(find(0x7000_05ff), Some((0x7000_0200, 0x7000_0600)));
        assert_eq!(find(0x7000_0600), None);
        assert_eq!(gap(0x7000_0700, 0x7000_0000, 0x7000_1000), (0x7000_0600, 0x7000_1000));
        report(0x7000_0000, -512);
        assert_eq!(find(0x7000_0000), None);
        assert_eq!(gap(0x7000_0010, 0x7000_0000, 0x7000_1000), (0x7000_0000, 0x7000_0200));
        assert_eq!(gap(0x6000_0010, 0x6000_0000, 0x6000_1000), (0x6000_0000, 0x6000_1000));
        // Setup: the block overlaps an older block whose free was not reported -> the older block is removed.
        report(0x7000_0100, 4096);
        assert_eq!(find(0x7000_0200), Some((0x7000_0100, 0x7000_1100)));
        forget(0x7000_0000, 0x10000);
        assert_eq!(find(0x7000_0200), None);
    }
}
