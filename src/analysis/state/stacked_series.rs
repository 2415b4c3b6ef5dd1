//! Memory by owner over time. For each bucket of a grid, this stores the bytes of each owner at the bucket's
//! highest total.
//!
//! The owners of a bucket therefore add up to the peak of the curve in that bucket. As in every report, a
//! block counts under its final owner from its allocation on, so a `tag` row moves the block's bytes in all
//! buckets since the allocation.

use crate::state::series::TimeGrid;

/// The bytes of a fixed number of owners on a grid.
pub(crate) struct StackedSeries {
    grid: TimeGrid,
    owners: usize,
    /// The current bytes of each owner.
    current: Vec<i64>,
    /// For each bucket, one value per owner: the bytes of the owner at the bucket's highest total.
    at_high: Vec<i64>,
    /// The highest total of each bucket, and the `seq` of the row that reached it.
    high: Vec<(i64, i64)>,
    total: i64,
    /// For each bucket and owner, the change of the bytes that later rows moved to the owner, compared with
    /// the bucket before. A correction of many buckets thus changes only two entries.
    moved: Vec<i64>,
}

impl StackedSeries {
    pub(crate) fn new(grid: TimeGrid, owners: usize) -> StackedSeries {
        StackedSeries {
            grid,
            owners,
            current: vec![0; owners],
            at_high: Vec::with_capacity(grid.buckets * owners),
            high: Vec::with_capacity(grid.buckets),
            total: 0,
            moved: vec![0; (grid.buckets + 1) * owners],
        }
    }

    /// Opens the buckets up to the bucket of `ts_ns`, before the row `seq` is processed.
    fn advance(&mut self, ts_ns: i64, seq: i64) {
        if !self.grid.has(ts_ns) {
            return;
        }
        let wanted = self.grid.index(ts_ns) + 1;
        while self.high.len() < wanted {
            self.high.push((self.total, seq - 1));
            self.at_high.extend_from_slice(&self.current);
        }
    }

    /// Adds `delta` bytes to each owner in `owners` at row `seq`. `total` is the total after the row, in
    /// bytes.
    pub(crate) fn add(&mut self, ts_ns: i64, seq: i64, owners: &[usize], delta: i64, total: i64) {
        if ts_ns > self.grid.start_ns && !self.grid.has(ts_ns) {
            return;
        }
        self.advance(ts_ns, seq);
        for owner in owners {
            self.current[*owner] += delta;
        }
        self.total = total;
        if let Some(high) = self.high.last_mut()
            && total > high.0
        {
            *high = (total, seq);
            let start = self.at_high.len() - self.owners;
            self.at_high[start..].copy_from_slice(&self.current);
        }
    }

    /// Corrects the owner of a block that row `born` allocated: adds `delta` bytes to each owner in `owners`
    /// in all buckets since then. `ts_ns` and `seq` are the time and the number of the row that makes the
    /// correction.
    pub(crate) fn correct(&mut self, ts_ns: i64, seq: i64, born: i64, owners: &[usize], delta: i64) {
        if ts_ns > self.grid.start_ns && !self.grid.has(ts_ns) {
            return;
        }
        self.advance(ts_ns, seq);
        // The rows in `high` are in ascending order, so a binary search finds the first bucket whose highest
        // total includes the block.
        let first = self.high.partition_point(|(_, at)| *at < born);
        let last = self.high.len();
        for owner in owners {
            self.current[*owner] += delta;
            if first < last {
                // The last bucket may still get a higher total, which overwrites its values. So correct these
                // values directly and exclude the bucket from `moved`.
                self.moved[first * self.owners + owner] += delta;
                self.moved[(last - 1) * self.owners + owner] -= delta;
                self.at_high[(last - 1) * self.owners + owner] += delta;
            }
        }
    }

    /// Returns the bytes of each owner in every bucket.
    pub(crate) fn finish(mut self) -> Vec<Vec<i64>> {
        while self.high.len() < self.grid.buckets {
            self.high.push((self.total, 0));
            self.at_high.extend_from_slice(&self.current);
        }
        let mut all = vec![Vec::with_capacity(self.grid.buckets); self.owners];
        for (owner, values) in all.iter_mut().enumerate() {
            let mut moved = 0;
            for bucket in 0..self.grid.buckets {
                moved += self.moved[bucket * self.owners + owner];
                values.push(self.at_high[bucket * self.owners + owner] + moved);
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bucket_holds_the_owners_at_its_highest_total() {
        let mut stack = StackedSeries::new(TimeGrid::new(0, 39, 4), 2);
        stack.add(1, 1, &[0], 10, 10);
        stack.add(2, 2, &[1], 5, 15);
        stack.add(3, 3, &[0], -10, 5);
        stack.add(35, 4, &[0], 1, 6);
        assert_eq!(stack.finish(), [[10, 0, 0, 1], [5, 5, 5, 5]]);
    }

    #[test]
    fn a_tag_moves_a_block_since_its_allocation() {
        let mut stack = StackedSeries::new(TimeGrid::new(0, 39, 4), 2);
        stack.add(1, 1, &[0], 10, 10);
        stack.add(11, 2, &[0], 7, 17);
        stack.add(21, 3, &[0], 3, 20);
        // Row 4 moves the block of row 2 from owner 0 to owner 1.
        stack.correct(22, 4, 2, &[0], -7);
        stack.correct(22, 5, 2, &[1], 7);
        stack.add(23, 6, &[0], 1, 21);
        assert_eq!(stack.finish(), [[10, 10, 14, 14], [0, 7, 7, 7]]);
    }

    #[test]
    fn memory_from_before_the_grid_is_in_its_first_bucket() {
        let mut stack = StackedSeries::new(TimeGrid::new(100, 139, 2), 1);
        stack.add(1, 1, &[0], 10, 10);
        stack.correct(2, 2, 1, &[0], 2);
        stack.add(110, 3, &[0], -4, 8);
        stack.add(500, 4, &[0], 50, 58);
        assert_eq!(stack.finish(), [[12, 8]]);
    }
}
