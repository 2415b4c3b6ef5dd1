//! Downsampling for pictures and viewers: keeps the largest of many events, and the local extrema of a curve.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// Keeps the entries with the largest weights, up to a limit.
pub(super) struct Largest<T> {
    most: usize,
    entries: BinaryHeap<Reverse<HeapEntry<T>>>,
    /// The number of entries that were dropped.
    pub(super) dropped: u64,
}

struct HeapEntry<T> {
    weight: i64,
    /// Among equal weights, the entry with the highest number is dropped first.
    number: Reverse<i64>,
    item: T,
}

impl<T> HeapEntry<T> {
    fn key(&self) -> (i64, Reverse<i64>) {
        (self.weight, self.number)
    }
}

impl<T> PartialEq for HeapEntry<T> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<T> Eq for HeapEntry<T> {}

impl<T> PartialOrd for HeapEntry<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T> Ord for HeapEntry<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

impl<T> Largest<T> {
    /// Keeps up to `most` entries.
    pub(super) fn new(most: usize) -> Largest<T> {
        Largest { most, entries: BinaryHeap::new(), dropped: 0 }
    }

    /// Adds an entry. Two entries with the same `number` and `weight`, such as an allocation and its free,
    /// are both kept or both dropped. Only one pair, at the limit, may be split.
    pub(super) fn add(&mut self, weight: i64, number: i64, entry: T) {
        self.entries.push(Reverse(HeapEntry { weight, number: Reverse(number), item: entry }));
        if self.entries.len() > self.most {
            self.entries.pop();
            self.dropped += 1;
        }
    }

    /// Returns the kept entries in any order.
    pub(super) fn into_entries(self) -> impl Iterator<Item = T> {
        self.entries.into_iter().map(|Reverse(entry)| entry.item)
    }
}

/// A point of a curve with two lines: the time `at`, and the values `low` and `high` of the lines at that
/// time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Point {
    pub(super) at: i64,
    pub(super) low: i64,
    pub(super) high: i64,
}

/// A curve that is reduced to at most `most` stretches. A stretch is a run of consecutive points, and all
/// stretches except the last have the same number of points. Of each stretch, the curve keeps the first and
/// the last point, the points with the lowest and the highest `low`, and the point with the highest `high`. A
/// curve of few points keeps them all.
pub(super) struct DownsampledCurve {
    most: usize,
    /// The number of points per stretch. It doubles whenever there are more than `most` stretches.
    every: usize,
    /// The number of points in the last stretch.
    filled: usize,
    stretches: Vec<Stretch>,
}

#[derive(Clone, Copy)]
struct Stretch {
    first: Point,
    lowest: Point,
    highest: Point,
    highest_of_high: Point,
    last: Point,
}

impl Stretch {
    fn from_point(point: Point) -> Stretch {
        Stretch { first: point, lowest: point, highest: point, highest_of_high: point, last: point }
    }

    fn join(&mut self, later: &Stretch) {
        if later.lowest.low < self.lowest.low {
            self.lowest = later.lowest;
        }
        if later.highest.low > self.highest.low {
            self.highest = later.highest;
        }
        if later.highest_of_high.high > self.highest_of_high.high {
            self.highest_of_high = later.highest_of_high;
        }
        self.last = later.last;
    }
}

impl DownsampledCurve {
    /// Returns a curve of at most `most` stretches.
    pub(super) fn new(most: usize) -> DownsampledCurve {
        DownsampledCurve { most: most.max(2), every: 1, filled: 0, stretches: Vec::new() }
    }

    /// Adds the next point.
    pub(super) fn add(&mut self, point: Point) {
        match self.stretches.last_mut() {
            Some(last) if self.filled < self.every => {
                last.join(&Stretch::from_point(point));
                self.filled += 1;
            }
            _ => {
                if self.stretches.len() == self.most {
                    let pairs = self.stretches.chunks(2).map(|pair| {
                        let mut joined = pair[0];
                        pair[1..].iter().for_each(|later| joined.join(later));
                        joined
                    });
                    self.stretches = pairs.collect();
                    self.every = self.every.saturating_mul(2);
                }
                self.stretches.push(Stretch::from_point(point));
                self.filled = 1;
            }
        }
    }

    /// Returns the kept points in order.
    pub(super) fn points(&self) -> Vec<Point> {
        let mut points = Vec::new();
        for stretch in &self.stretches {
            let Stretch { first, lowest, highest, highest_of_high, last } = *stretch;
            let mut turns = [first, lowest, highest, highest_of_high, last];
            turns[1..4].sort_by_key(|point| point.at);
            for point in turns {
                if points.last() != Some(&point) {
                    points.push(point);
                }
            }
        }
        points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(at: i64, low: i64, high: i64) -> Point {
        Point { at, low, high }
    }

    #[test]
    fn downsampling_keeps_few_points_whole_and_the_peaks_of_many() {
        let mut curve = DownsampledCurve::new(100);
        (0..100).for_each(|at| curve.add(point(at, at % 7, at % 5)));
        assert_eq!(curve.points(), (0..100).map(|at| point(at, at % 7, at % 5)).collect::<Vec<_>>());
        for at in 100..100_000 {
            let (low, high) = match at {
                777 => (1000, 0),
                7_777 => (-1000, 0),
                77_777 => (0, 2000),
                _ => (at % 7, at % 5),
            };
            curve.add(point(at, low, high));
        }
        let points = curve.points();
        assert!(points.len() <= 500, "{}", points.len());
        for turn in [point(777, 1000, 0), point(7_777, -1000, 0), point(77_777, 0, 2000)] {
            assert!(points.contains(&turn), "{turn:?}");
        }
        assert!(points.is_sorted_by_key(|point| point.at));
        assert_eq!(points.last().unwrap().at, 99_999);
    }

    #[test]
    fn downsampling_keeps_the_largest_entries() {
        let mut largest = Largest::new(3);
        for (number, weight) in [5, 1, 9, 1, 7].into_iter().enumerate() {
            largest.add(weight, number as i64, weight);
        }
        assert_eq!(largest.dropped, 2);
        let mut kept: Vec<i64> = largest.into_entries().collect();
        kept.sort_unstable();
        assert_eq!(kept, [5, 7, 9]);
    }
}
