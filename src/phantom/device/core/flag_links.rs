//! Links between unknown flags that are copies or opposites of each other.
//!
//! A program that reads both a mask and its opposite must get consistent answers. So the first answer about
//! one of the linked ranges decides all of them.

use std::collections::BTreeMap;

/// Ranges of unknown flags, a byte each, that depend on one another.
#[derive(Debug, Default)]
pub(crate) struct FlagLinks {
    /// The linked ranges, by their start.
    ranges: BTreeMap<usize, Linked>,
    /// The number of groups that were created so far.
    groups: u64,
}

/// A range of flags that is a copy or the opposite of each other range of its group.
#[derive(Debug, Clone, Copy)]
struct Linked {
    end: usize,
    group: u64,
    is_opposite: bool,
}

impl FlagLinks {
    /// Records that the flags at `to` became a copy of the flags at `from`, or their opposite.
    pub(crate) fn add(&mut self, from: usize, to: usize, size: usize, is_opposite: bool) {
        if from < to + size && to < from + size {
            // The flags were changed in place, so all other ranges of the group would have to get the inverse
            // relation. The range leaves its group instead.
            return self.forget(to, to + size);
        }
        let source = match self.ranges.get(&from).filter(|source| source.end == from + size) {
            Some(&source) => source,
            None => {
                self.forget(from, from + size);
                self.groups += 1;
                let source = Linked { end: from + size, group: self.groups, is_opposite: false };
                self.ranges.insert(from, source);
                source
            }
        };
        self.forget(to, to + size);
        let is_opposite = source.is_opposite != is_opposite;
        self.ranges.insert(to, Linked { end: to + size, is_opposite, ..source });
    }

    /// Removes the links of a range whose flags have changed.
    pub(crate) fn forget(&mut self, start: usize, end: usize) {
        while let Some((&first, _)) =
            self.ranges.range(..end).next_back().filter(|(_, range)| range.end > start)
        {
            self.ranges.remove(&first);
        }
    }

    /// Removes all links.
    pub(crate) fn clear(&mut self) {
        self.ranges.clear();
    }

    /// Returns the addresses of the flags that depend on a range's flags, and whether they are the opposite.
    pub(crate) fn linked(&self, start: usize, size: usize) -> Vec<(usize, bool)> {
        let Some((&first, range)) =
            self.ranges.range(..=start).next_back().filter(|(_, range)| range.end >= start + size)
        else {
            return Vec::new();
        };
        let group = self.ranges.iter().filter(|(at, other)| other.group == range.group && **at != first);
        group.map(|(at, other)| (at + start - first, other.is_opposite != range.is_opposite)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_and_opposites_of_flags_are_found_until_either_is_overwritten() {
        let mut links = FlagLinks::default();
        assert_eq!(links.linked(0, 10), []);
        links.add(0, 100, 10, true);
        links.add(100, 200, 10, true);
        links.add(100, 300, 10, false);
        assert_eq!(links.linked(0, 10), [(100, true), (200, false), (300, true)]);
        assert_eq!(links.linked(203, 2), [(3, false), (103, true), (303, true)]);
        assert_eq!(links.linked(203, 8), [], "beyond the range");
        links.forget(105, 106);
        assert_eq!(links.linked(0, 10), [(200, false), (300, true)]);
        assert_eq!(links.linked(100, 10), []);
        // Setup: only a part of the range is linked -> the older link is removed.
        links.add(202, 400, 4, false);
        assert_eq!(links.linked(0, 10), [(300, true)]);
        assert_eq!(links.linked(202, 4), [(400, false)]);
        // Setup: flags are inverted in place -> their link is removed.
        links.add(300, 300, 10, true);
        assert_eq!(links.linked(0, 10), []);
        links.clear();
        assert_eq!(links.linked(202, 4), []);
    }
}
