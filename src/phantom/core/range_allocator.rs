//! Address ranges: who owns which, and where the next one goes.
//!
//! The lowest hole that fits is taken, so that freed addresses come back as a driver's do and two
//! runs of one program give the same addresses.

use std::collections::BTreeMap;

/// One region of the address space.
#[derive(Debug)]
pub(crate) struct Space {
    start: usize,
    end: usize,
    /// Start and length of every hole below `top`.
    holes: BTreeMap<usize, usize>,
    /// Everything from here to `end` was never taken or has come back.
    top: usize,
}

impl Space {
    pub(crate) const fn new(start: usize, end: usize) -> Self {
        Self { start, end, holes: BTreeMap::new(), top: start }
    }

    /// Takes `size` bytes at a multiple of `align` (a power of two).
    pub(crate) fn take(&mut self, size: usize, align: usize) -> Option<usize> {
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

    /// Takes exactly `size` bytes at `at`, if they are free.
    pub(crate) fn take_at(&mut self, at: usize, size: usize) -> bool {
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

    /// Gives a range back and joins it with the holes beside it.
    pub(crate) fn give(&mut self, at: usize, size: usize) {
        let (mut start, mut end) = (at, at + size);
        if let Some((&before, &len)) = self.holes.range(..at).next_back()
            && before + len == at
        {
            self.holes.remove(&before);
            start = before;
        }
        if let Some(len) = self.holes.remove(&end) {
            end += len;
        }
        if end == self.top {
            self.top = start;
        } else {
            self.holes.insert(start, end - start);
        }
    }

    /// Whether nothing is taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.top == self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_hole_that_fits_is_taken_again() {
        let mut space = Space::new(0x1000, 0x9000);
        let a = space.take(0x1000, 1).unwrap();
        let b = space.take(0x2000, 1).unwrap();
        let c = space.take(0x1000, 1).unwrap();
        assert_eq!((a, b, c), (0x1000, 0x2000, 0x4000));
        space.give(a, 0x1000);
        space.give(b, 0x2000);
        assert_eq!(space.take(0x3000, 1), Some(0x1000));
        space.give(0x1000, 0x3000);
        assert_eq!(space.take(0x800, 0x1000), Some(0x1000));
        assert_eq!(space.take(0x800, 0x1000), Some(0x2000));
    }

    #[test]
    fn a_full_region_says_so_and_comes_back_whole() {
        let mut space = Space::new(0, 0x4000);
        let taken: Vec<_> = (0..4).map(|_| space.take(0x1000, 0x1000).unwrap()).collect();
        assert_eq!(space.take(1, 1), None);
        for &at in taken.iter().rev() {
            space.give(at, 0x1000);
        }
        assert!(space.is_empty());
        assert_eq!(space.take(0x4000, 1), Some(0));
    }

    #[test]
    fn a_fixed_place_is_given_once() {
        let mut space = Space::new(0, 0x8000);
        assert!(space.take_at(0x2000, 0x1000));
        assert!(!space.take_at(0x2800, 0x100));
        assert!(space.take_at(0x1000, 0x1000));
        assert!(!space.take_at(0x7fff, 2));
        assert_eq!(space.take(0x1000, 1), Some(0));
        assert_eq!(space.take(0x1000, 1), Some(0x3000));
    }

    #[test]
    fn random_takes_and_gives_never_overlap() {
        let mut space = Space::new(0x10_0000, 0x100_0000);
        let mut live: Vec<(usize, usize)> = Vec::new();
        let mut state = 7u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        for _ in 0..4000 {
            if next() % 3 == 0 && !live.is_empty() {
                let (at, size) = live.swap_remove(next() % live.len());
                space.give(at, size);
            } else {
                let (size, align) = (1 + next() % 5000, 1 << (next() % 10));
                if let Some(at) = space.take(size, align) {
                    assert_eq!(at % align, 0);
                    assert!(live.iter().all(|&(other, len)| at + size <= other || other + len <= at));
                    live.push((at, size));
                }
            }
        }
        for (at, size) in live {
            space.give(at, size);
        }
        assert!(space.is_empty());
    }
}
