//! An allocator of address ranges.
//!
//! The allocator uses the lowest hole that fits. So freed addresses are reused as by a driver, and two runs
//! of one program get the same addresses.

use std::collections::BTreeMap;

/// Removes the free ranges that touch `start..end` from a table of lengths by start. Returns the range that they
/// make with it.
pub(crate) fn take_neighbours(
    free: &mut BTreeMap<usize, usize>,
    mut start: usize,
    mut end: usize,
) -> (usize, usize) {
    if let Some((&before, &len)) = free.range(..start).next_back()
        && before + len == start
    {
        free.remove(&before);
        start = before;
    }
    if let Some(len) = free.remove(&end) {
        end += len;
    }
    (start, end)
}

/// One region of the address space.
#[derive(Debug)]
pub(crate) struct RangeAllocator {
    start: usize,
    end: usize,
    /// The length of each free range below `top`, by its start.
    holes: BTreeMap<usize, usize>,
    /// The start of the last free range, which extends to `end`.
    top: usize,
}

impl RangeAllocator {
    /// Creates the allocator of a region in which everything is free.
    pub(crate) const fn new(start: usize, end: usize) -> Self {
        Self { start, end, holes: BTreeMap::new(), top: start }
    }

    /// Allocates `size` bytes at a multiple of `align`, which is a power of two. Returns `None` if no free
    /// range is large enough.
    pub(crate) fn alloc(&mut self, size: usize, align: usize) -> Option<usize> {
        let up = |address: usize| address.checked_add(align - 1).map(|a| a & !(align - 1));
        let found = self.holes.iter().find_map(|(&start, &len)| {
            let at = up(start)?;
            (at.checked_add(size)? <= start + len).then_some((start, len, at))
        });
        if let Some((start, len, at)) = found {
            self.holes.remove(&start);
            if at > start {
                self.holes.insert(start, at - start);
            }
            if at + size < start + len {
                self.holes.insert(at + size, start + len - at - size);
            }
            return Some(at);
        }
        let at = up(self.top)?;
        let end = at.checked_add(size).filter(|&end| end <= self.end)?;
        if at > self.top {
            self.holes.insert(self.top, at - self.top);
        }
        self.top = end;
        Some(at)
    }

    /// Allocates the `size` bytes at `at` if they are free. Returns true if they were.
    pub(crate) fn alloc_at(&mut self, at: usize, size: usize) -> bool {
        if at < self.start || at.checked_add(size).is_none_or(|end| end > self.end) {
            return false;
        }
        if at >= self.top {
            if at > self.top {
                self.holes.insert(self.top, at - self.top);
            }
            self.top = at + size;
            return true;
        }
        let hole = self.holes.range(..=at).next_back().map(|(&start, &len)| (start, len));
        let Some((start, len)) = hole.filter(|&(start, len)| at + size <= start + len) else { return false };
        self.holes.remove(&start);
        if at > start {
            self.holes.insert(start, at - start);
        }
        if at + size < start + len {
            self.holes.insert(at + size, start + len - at - size);
        }
        true
    }

    /// Frees a range and merges it with adjacent holes.
    pub(crate) fn free(&mut self, at: usize, size: usize) {
        let (start, end) = take_neighbours(&mut self.holes, at, at + size);
        if end == self.top {
            self.top = start;
        } else {
            self.holes.insert(start, end - start);
        }
    }

    /// Returns true if the whole region is free.
    pub(crate) fn is_empty(&self) -> bool {
        self.top == self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_hole_that_fits_is_reused() {
        let mut ranges = RangeAllocator::new(0x1000, 0x9000);
        let a = ranges.alloc(0x1000, 1).unwrap();
        let b = ranges.alloc(0x2000, 1).unwrap();
        let c = ranges.alloc(0x1000, 1).unwrap();
        assert_eq!((a, b, c), (0x1000, 0x2000, 0x4000));
        ranges.free(a, 0x1000);
        ranges.free(b, 0x2000);
        assert_eq!(ranges.alloc(0x3000, 1), Some(0x1000));
        ranges.free(0x1000, 0x3000);
        assert_eq!(ranges.alloc(0x800, 0x1000), Some(0x1000));
        assert_eq!(ranges.alloc(0x800, 0x1000), Some(0x2000));
    }

    #[test]
    fn a_full_region_refuses_and_is_whole_again_after_all_frees() {
        let mut ranges = RangeAllocator::new(0, 0x4000);
        let taken: Vec<_> = (0..4).map(|_| ranges.alloc(0x1000, 0x1000).unwrap()).collect();
        assert_eq!(ranges.alloc(1, 1), None);
        for &at in taken.iter().rev() {
            ranges.free(at, 0x1000);
        }
        assert!(ranges.is_empty());
        assert_eq!(ranges.alloc(0x4000, 1), Some(0));
    }

    #[test]
    fn a_fixed_range_is_allocated_once() {
        let mut ranges = RangeAllocator::new(0, 0x8000);
        assert!(ranges.alloc_at(0x2000, 0x1000));
        assert!(!ranges.alloc_at(0x2800, 0x100));
        assert!(ranges.alloc_at(0x1000, 0x1000));
        assert!(!ranges.alloc_at(0x7fff, 2));
        assert_eq!(ranges.alloc(0x1000, 1), Some(0));
        assert_eq!(ranges.alloc(0x1000, 1), Some(0x3000));
    }

    #[test]
    fn random_allocations_never_overlap() {
        let mut ranges = RangeAllocator::new(0x10_0000, 0x100_0000);
        let mut live: Vec<(usize, usize)> = Vec::new();
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        for _ in 0..4000 {
            if next() % 3 == 0 && !live.is_empty() {
                let (at, size) = live.swap_remove(next() % live.len());
                ranges.free(at, size);
            } else {
                let (size, align) = (1 + next() % 5000, 1 << (next() % 10));
                if let Some(at) = ranges.alloc(size, align) {
                    assert_eq!(at % align, 0);
                    assert!(live.iter().all(|&(other, len)| at + size <= other || other + len <= at));
                    live.push((at, size));
                }
            }
        }
        for (at, size) in live {
            ranges.free(at, size);
        }
        assert!(ranges.is_empty());
    }
}
