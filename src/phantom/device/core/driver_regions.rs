//! The addresses of a device, in the order in which NVIDIA's driver gives them.
//!
//! PyTorch's allocator takes the lowest address among free blocks of the same size, so the order of the
//! segments' addresses decides which block is reused, and with it the peaks. No document describes the
//! driver's order. The rules here are read off the addresses of 33 programs on an H200 with driver 580:
//! - the driver reserves regions, whose size and start are multiples of 32 MiB;
//! - a request takes the lowest hole that fits in any region;
//! - if no hole fits, a new region takes the highest free addresses, as `mmap` does: newer regions are lower;
//! - a region whose last block was freed is given back.

use std::collections::BTreeMap;

use crate::core::range_allocator::{RangeAllocator, take_neighbours};

/// The unit of a region's size and start, in bytes.
const REGION: usize = 32 << 20;

/// The address space of one device.
#[derive(Debug)]
pub(crate) struct DriverRegions {
    /// The length of each range that belongs to no region, by its start.
    unreserved: BTreeMap<usize, usize>,
    /// The end and the free ranges of each region, by its start.
    regions: BTreeMap<usize, (usize, RangeAllocator)>,
}

impl DriverRegions {
    /// Creates the address space `start..end`, whose bounds are multiples of 32 MiB. Nothing is allocated.
    pub(crate) fn new(start: usize, end: usize) -> Self {
        debug_assert!(start.is_multiple_of(REGION) && end.is_multiple_of(REGION));
        Self { unreserved: BTreeMap::from([(start, end - start)]), regions: BTreeMap::new() }
    }

    /// Allocates `size` bytes at a multiple of `align`, a power of two that divides 32 MiB. Returns `None` if
    /// no free range is large enough.
    pub(crate) fn alloc(&mut self, size: usize, align: usize) -> Option<usize> {
        let in_a_region = self.regions.values_mut().find_map(|(_, free)| free.alloc(size, align));
        if in_a_region.is_some() {
            return in_a_region;
        }
        let whole = size.checked_next_multiple_of(REGION)?;
        let (&start, &len) = self.unreserved.iter().rev().find(|&(_, &len)| len >= whole)?;
        self.unreserved.remove(&start);
        if len > whole {
            self.unreserved.insert(start, len - whole);
        }
        let region = start + len - whole;
        let mut free = RangeAllocator::new(region, region + whole);
        let address = free.alloc(size, align);
        self.regions.insert(region, (region + whole, free));
        address
    }

    /// Frees a range, and its region if the rest of it is free.
    pub(crate) fn free(&mut self, at: usize, size: usize) {
        let Some((&region, (end, free))) = self.regions.range_mut(..=at).next_back() else { return };
        let end = *end;
        free.free(at, size);
        if !free.is_empty() {
            return;
        }
        self.regions.remove(&region);
        let (start, end) = take_neighbours(&mut self.unreserved, region, end);
        self.unreserved.insert(start, end - start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;
    const TOP: usize = 1 << 40;

    fn empty() -> DriverRegions {
        DriverRegions::new(0, TOP)
    }

    /// The order of addresses in the first step of a GPT on an H200, driver 580.
    #[test]
    fn new_regions_are_lower_and_their_ends_are_filled_from_below() {
        let mut space = empty();
        let mut at = |mib: usize| (TOP - space.alloc(mib * MIB, 2 * MIB).unwrap()) / MIB;
        assert_eq!([at(48), at(48), at(12)], [64, 128, 128 - 48]);
        assert_eq!([at(36), at(12), at(12)], [192, 192 - 36, 192 - 48]);
        assert_eq!([at(12), at(2)], [64 - 48, 192 - 60]);
        assert_eq!(at(48), 256);
    }

    #[test]
    fn a_free_region_is_given_back_and_its_addresses_are_the_highest() {
        let mut space = empty();
        let a = space.alloc(20 * MIB, 2 * MIB).unwrap();
        let b = space.alloc(100 * MIB, 2 * MIB).unwrap();
        assert_eq!((a, b), (TOP - 32 * MIB, TOP - 160 * MIB));
        space.free(a, 20 * MIB);
        assert_eq!(space.alloc(30 * MIB, 2 * MIB), Some(TOP - 32 * MIB));
        space.free(b, 100 * MIB);
        assert_eq!(space.alloc(200 * MIB, 2 * MIB), Some(TOP - 256 * MIB));
    }

    #[test]
    fn more_than_the_address_space_is_refused() {
        let mut space = DriverRegions::new(0, 64 * MIB);
        assert_eq!(space.alloc(65 * MIB, 2 * MIB), None);
        assert_eq!(space.alloc(usize::MAX, 2 * MIB), None);
        let a = space.alloc(40 * MIB, 2 * MIB).unwrap();
        assert_eq!(space.alloc(32 * MIB, 2 * MIB), None);
        assert_eq!(space.alloc(24 * MIB, 2 * MIB), Some(40 * MIB));
        space.free(a, 40 * MIB);
        space.free(40 * MIB, 24 * MIB);
        assert_eq!(space.alloc(64 * MIB, 2 * MIB), Some(0));
    }
}
