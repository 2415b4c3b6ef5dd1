//! Sets of address ranges.

use std::collections::BTreeMap;

/// Ranges that never overlap: the end of each, by its start.
#[derive(Debug, Default)]
pub(crate) struct AddressRanges(BTreeMap<usize, usize>);

impl AddressRanges {
    /// Adds a range. It replaces the ranges that it overlaps, and adjacent ranges are merged.
    pub(crate) fn add(&mut self, mut start: usize, mut end: usize) {
        self.remove(start, end);
        if let Some((&first, _)) = self.0.range(..start).next_back().filter(|&(_, &stop)| stop == start) {
            start = first;
        }
        if let Some(stop) = self.0.remove(&end) {
            end = stop;
        }
        self.0.insert(start, end);
    }

    /// Removes a range. The rest of a range that crosses its bounds stays.
    pub(crate) fn remove(&mut self, start: usize, end: usize) {
        while let Some((&first, &stop)) = self.0.range(..end).next_back() {
            if stop <= start {
                break;
            }
            self.0.remove(&first);
            if first < start {
                self.0.insert(first, start);
            }
            if end < stop {
                self.0.insert(end, stop);
            }
        }
    }

    /// Removes all ranges.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns true if these ranges cover the whole of a range.
    pub(crate) fn contains(&self, start: usize, end: usize) -> bool {
        let mut at = start;
        while at < end {
            match self.0.range(..=at).next_back() {
                Some((_, &stop)) if stop > at => at = stop,
                _ => return false,
            }
        }
        true
    }

    /// Returns the start and the end of each part of a range that these ranges cover.
    pub(crate) fn parts(&self, start: usize, end: usize) -> Vec<(usize, usize)> {
        let (mut at, mut parts) = (start, Vec::new());
        if let Some((_, &stop)) = self.0.range(..=at).next_back()
            && stop > at
        {
            parts.push((at, stop.min(end)));
            at = stop;
        }
        if at < end {
            parts.extend(self.0.range(at..end).map(|(&first, &stop)| (first, stop.min(end))));
        }
        parts
    }
}
