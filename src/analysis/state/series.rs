//! A total over time, as the lowest and highest value of each bucket of a grid.
//!
//! No peak is lost, however few buckets there are. The HTML page and the terminal's curve draw these series.

/// Time divided into buckets of equal width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimeGrid {
    /// The start of the first bucket, in ns since the start of the trace.
    pub start_ns: i64,
    /// The width of a bucket, in ns.
    pub width_ns: i64,
    /// The number of buckets.
    pub buckets: usize,
}

impl TimeGrid {
    /// Creates at most `most` buckets from `start_ns` through `end_ns`.
    #[must_use]
    pub fn new(start_ns: i64, end_ns: i64, most: usize) -> TimeGrid {
        let span = end_ns.saturating_sub(start_ns).max(0).saturating_add(1);
        let most = i64::try_from(most.max(1)).unwrap_or(i64::MAX);
        let width_ns = span.saturating_add(most - 1) / most;
        let buckets = usize::try_from((span + width_ns - 1) / width_ns).unwrap_or(1);
        TimeGrid { start_ns, width_ns, buckets }
    }

    /// Returns the index of the bucket of a time. Times outside the grid belong to the first or the last
    /// bucket.
    #[must_use]
    pub fn index(&self, ts_ns: i64) -> usize {
        let place = (ts_ns.saturating_sub(self.start_ns)).max(0) / self.width_ns;
        usize::try_from(place).unwrap_or(usize::MAX).min(self.buckets - 1)
    }

    /// Returns true if a time is within the grid.
    #[must_use]
    pub fn has(&self, ts_ns: i64) -> bool {
        ts_ns >= self.start_ns && ts_ns - self.start_ns < self.width_ns * self.buckets as i64
    }
}

/// A total on a [`TimeGrid`].
#[derive(Clone, Debug)]
pub struct Series {
    grid: TimeGrid,
    /// The lowest value of each bucket.
    pub low: Vec<i64>,
    /// The highest value of each bucket.
    pub high: Vec<i64>,
    last: i64,
}

impl Series {
    /// Creates a series that begins with 0.
    #[must_use]
    pub fn new(grid: TimeGrid) -> Series {
        let values = || Vec::with_capacity(grid.buckets);
        Series { grid, low: values(), high: values(), last: 0 }
    }

    /// Sets the total from `ts_ns` on, which must not be earlier than in the previous call. A value before
    /// the grid becomes the initial value of the grid, and a value after the grid is ignored.
    pub fn set(&mut self, ts_ns: i64, value: i64) {
        if self.grid.has(ts_ns) {
            self.fill(self.grid.index(ts_ns) + 1);
            if let (Some(low), Some(high)) = (self.low.last_mut(), self.high.last_mut()) {
                *low = value.min(*low);
                *high = value.max(*high);
            }
        } else if ts_ns >= self.grid.start_ns {
            return;
        }
        self.last = value;
    }

    /// Extends the series to `buckets` buckets. Buckets without a change hold the last value.
    fn fill(&mut self, buckets: usize) {
        if self.low.len() < buckets {
            self.low.resize(buckets, self.last);
            self.high.resize(buckets, self.last);
        }
    }

    /// Returns the series, extended to the end of the grid.
    #[must_use]
    pub fn finish(mut self) -> Series {
        self.fill(self.grid.buckets);
        self
    }

    /// Returns true if every value is 0.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.last == 0 && self.high.iter().chain(&self.low).all(|value| *value == 0)
    }
}

/// A total of a running program. The width of the buckets doubles when there are too many.
#[derive(Clone, Debug)]
pub struct GrowingSeries {
    /// The buckets so far.
    pub grid: TimeGrid,
    /// The highest value of each bucket.
    pub high: Vec<i64>,
    last: i64,
}

impl GrowingSeries {
    /// The maximum number of buckets.
    pub const MOST: usize = 512;

    /// Sets the total from `ts_ns` on, which must not be earlier than in the previous call.
    pub fn set(&mut self, ts_ns: i64, value: i64) {
        loop {
            let place = usize::try_from(ts_ns.max(0) / self.grid.width_ns).unwrap_or(usize::MAX);
            if place < GrowingSeries::MOST {
                if self.high.len() <= place {
                    self.high.resize(place + 1, self.last);
                }
                self.high[place] = self.high[place].max(value);
                self.grid.buckets = self.high.len();
                self.last = value;
                return;
            }
            self.grid.width_ns *= 2;
            self.high = self.high.chunks(2).map(|pair| pair[0].max(pair[pair.len() - 1])).collect();
        }
    }

    /// Returns the highest values in at most `buckets` buckets up to `end_ns`.
    #[must_use]
    pub fn resampled(&self, end_ns: i64, buckets: usize) -> (TimeGrid, Vec<i64>) {
        let grid = TimeGrid::new(0, end_ns.max(1), buckets);
        let mut high = vec![0; grid.buckets];
        for (place, value) in high.iter_mut().enumerate() {
            let from = place as i64 * grid.width_ns / self.grid.width_ns;
            let to = ((place as i64 + 1) * grid.width_ns - 1) / self.grid.width_ns;
            let last = self.high.len().saturating_sub(1);
            let (from, to) = ((from as usize).min(last), (to as usize).min(last));
            *value = self.high.get(from..=to).and_then(|part| part.iter().max()).copied().unwrap_or(0);
            if place as i64 * grid.width_ns / self.grid.width_ns > last as i64 {
                *value = self.last;
            }
        }
        (grid, high)
    }
}

impl Default for GrowingSeries {
    fn default() -> Self {
        GrowingSeries {
            grid: TimeGrid { start_ns: 0, width_ns: 1_000_000, buckets: 0 },
            high: Vec::new(),
            last: 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_keeps_every_peak_in_few_buckets() {
        let grid = TimeGrid::new(0, 99, 4);
        assert_eq!((grid.width_ns, grid.buckets), (25, 4));
        let mut series = Series::new(grid);
        series.set(-5, 7);
        series.set(26, 100);
        series.set(27, 3);
        series.set(80, 5);
        series.set(200, 900);
        let series = series.finish();
        assert_eq!(series.low, [7, 3, 3, 3]);
        assert_eq!(series.high, [7, 100, 3, 5]);
    }

    #[test]
    fn a_grid_covers_the_shortest_and_the_longest_trace() {
        assert_eq!(TimeGrid::new(5, 5, 1000), TimeGrid { start_ns: 5, width_ns: 1, buckets: 1 });
        let week = TimeGrid::new(0, 604_800_000_000_000, 131_072);
        assert!(week.buckets <= 131_072 && week.has(604_800_000_000_000));
        assert_eq!(week.index(604_800_000_000_000), week.buckets - 1);
    }

    #[test]
    fn a_growing_run_keeps_its_peaks() {
        let mut growing = GrowingSeries::default();
        for second in 0..7200 {
            growing.set(second * 1_000_000_000, if second == 1234 { 99 } else { 5 });
        }
        assert!(growing.high.len() <= GrowingSeries::MOST);
        let (grid, high) = growing.resampled(7_200_000_000_000, 100);
        assert!(grid.buckets <= 100);
        assert_eq!(high[17], 99);
        assert_eq!(high.iter().filter(|value| **value == 5).count(), high.len() - 1);
    }
}
