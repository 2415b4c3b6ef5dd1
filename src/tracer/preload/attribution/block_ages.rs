//! Stores the allocation step and the size of each live block, for `memtrace leaks --holders`.
//!
//! The table is small and lock-free. If too many live blocks map to one set, the entry with the lowest step
//! is overwritten, and the age of the overwritten block becomes unknown.

use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of entries in a set. An address can be in any entry of its set.
const WAYS: usize = 4;
const SETS: usize = 1 << 15;
/// The number of low bits that are 0 in every address, because torch's allocator aligns to 512 bytes.
const ALIGNED_BITS: u32 = 9;
/// The number of low bits of an entry that hold the step plus 2. The 2 is added because 0 marks an empty
/// entry and step -1 is the time before training.
const STEP_BITS: u32 = 24;
const MAX_STEP: i32 = (1 << STEP_BITS) - 3;

static TABLE: [AtomicU64; WAYS * SETS] = [const { AtomicU64::new(0) }; WAYS * SETS];

/// The sizes in bytes of the blocks in [`TABLE`].
static BYTES: [AtomicU64; WAYS * SETS] = [const { AtomicU64::new(0) }; WAYS * SETS];

fn first_of(key: u64) -> usize {
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % SETS * WAYS
}

fn set_of(address: u64) -> (&'static [AtomicU64], u64) {
    let key = address >> ALIGNED_BITS;
    (&TABLE[first_of(key)..][..WAYS], key)
}

/// Adds a block that was allocated in `step`.
#[inline]
pub(crate) fn allocated(address: u64, bytes: u64, step: i32) {
    let (set, key) = set_of(address);
    let entry = key << STEP_BITS | (step.clamp(-1, MAX_STEP) + 2) as u64;
    let value = |way: &AtomicU64| way.load(Ordering::Relaxed);
    let step_of = |way: usize| value(&set[way]) & ((1 << STEP_BITS) - 1);
    let own = (0..WAYS).find(|way| value(&set[*way]) >> STEP_BITS == key);
    if let Some(way) = own.or_else(|| (0..WAYS).min_by_key(|way| step_of(*way))) {
        BYTES[first_of(key) + way].store(bytes, Ordering::Relaxed);
        set[way].store(entry, Ordering::Release);
    }
}

/// Removes a block that was freed.
#[inline]
pub(crate) fn freed(address: u64) {
    let (set, key) = set_of(address);
    for way in set {
        if way.load(Ordering::Relaxed) >> STEP_BITS == key {
            way.store(0, Ordering::Relaxed);
        }
    }
}

/// The step in which a live block was allocated, and the size of the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Birth {
    /// The step in which the block was allocated; -1 before training.
    pub(crate) step: i32,
    /// The size in bytes.
    pub(crate) bytes: u64,
}

/// Returns the live block at this address, or `None` if torch's allocator has no block there or the age of
/// the block is unknown.
pub(crate) fn birth_of(address: u64) -> Option<Birth> {
    let (set, key) = set_of(address);
    let value = |way: usize| set[way].load(Ordering::Acquire);
    let way = (0..WAYS).find(|way| key != 0 && value(*way) >> STEP_BITS == key)?;
    let step = (value(way) & ((1 << STEP_BITS) - 1)) as i32 - 2;
    Some(Birth { step, bytes: BYTES[first_of(key) + way].load(Ordering::Relaxed) })
}

/// Returns the bytes of the live blocks that were allocated in these steps.
pub(crate) fn bytes_of(steps: RangeInclusive<i32>) -> u64 {
    let has_step = |entry: u64| entry != 0 && steps.contains(&((entry & ((1 << STEP_BITS) - 1)) as i32 - 2));
    let sizes = TABLE.iter().zip(&BYTES).filter(|(entry, _)| has_step(entry.load(Ordering::Acquire)));
    sizes.map(|(_, bytes)| bytes.load(Ordering::Relaxed)).fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_birth_of_a_live_block_is_known_until_it_is_freed() {
        let address = |number: u64| 0x7f00_0000_0000 + number * 512;
        for number in 0..10_000 {
            allocated(address(number), number, number as i32 - 1);
        }
        let is_known = |number: &u64| {
            birth_of(address(*number)) == Some(Birth { step: *number as i32 - 1, bytes: *number })
        };
        let known = (0..10_000).filter(is_known).count();
        assert!(known > 9_900, "{known}");
        allocated(address(7), 512, 500);
        assert_eq!(
            birth_of(address(7)),
            Some(Birth { step: 500, bytes: 512 }),
            "another block at this address"
        );
        freed(address(7));
        assert_eq!((birth_of(address(7)), birth_of(0)), (None, None));
        assert_eq!(bytes_of(3..=5), 4 + 5 + 6);
        assert_eq!((bytes_of(6..=6), bytes_of(20_000..=30_000)), (0, 0), "freed; no such step");
        allocated(address(7), 512, i32::MAX);
        assert_eq!(birth_of(address(7)).map(|birth| birth.step), Some(MAX_STEP));
        (0..10_000).for_each(|number| freed(address(number)));
        assert!((0..10_000).all(|number| birth_of(address(number)).is_none()));
    }
}
