//! Finds the outermost op of each row in a sequence.
//!
//! An op's row comes at its end, after the rows of the ops inside it, so an outer op takes over the rows of
//! the ops inside it. Each row is examined once and each claim removed once, however the ops overlap.

/// The rows that belong to one op: `from` is the first row, and `to` is the row after the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) from: u32,
    pub(super) to: u32,
    /// The op, as the caller of [`Claims::claim`] numbers it.
    pub(super) call: u32,
}

/// Rows with times, and the ops that claim them.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// The number of rows.
    rows: u32,
    /// The rows that are earlier than all rows after them, as time and index. Both increase along the list.
    lowest: Vec<(i64, u32)>,
    /// The claims in the order of their rows. No two claims share a row.
    claims: Vec<Claim>,
}

impl Claims {
    /// Adds a row with this time.
    pub(super) fn push(&mut self, ts_ns: i64) {
        while self.lowest.pop_if(|(lowest, _)| *lowest >= ts_ns).is_some() {}
        self.lowest.push((ts_ns, self.rows));
        self.rows += 1;
    }

    /// Ends the op `call`, which began at `start`. The op claims all rows after the last row that is earlier
    /// than `start`. Returns the first of these rows, or the number of rows if there is no such row.
    pub(super) fn claim(&mut self, start: i64, call: u32) -> u32 {
        let earlier = self.lowest.partition_point(|(ts_ns, _)| *ts_ns < start);
        let from = earlier.checked_sub(1).map_or(0, |last| self.lowest[last].1 + 1);
        if from == self.rows {
            return from;
        }
        while self.claims.pop_if(|claim| claim.from >= from).is_some() {}
        if let Some(before) = self.claims.last_mut() {
            before.to = before.to.min(from);
        }
        self.claims.push(Claim { from, to: self.rows, call });
        from
    }

    /// Returns the claims of the outermost ops.
    pub(super) fn all(&self) -> &[Claim] {
        &self.claims
    }

    /// Returns the claimed rows, each with its outermost op.
    pub(super) fn rows(&self) -> impl Iterator<Item = (usize, u32)> {
        self.claims
            .iter()
            .flat_map(|claim| (claim.from as usize..claim.to as usize).map(|row| (row, claim.call)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatif_gives_rows_to_the_outermost_op() {
        let mut claims = Claims::default();
        for ts_ns in [10, 20, 30, 40, 50] {
            claims.push(ts_ns);
        }
        // Two ops, then an op that encloses both, then an op of another thread that began before the
        // enclosing op ended: the last op takes only the rows from its start.
        assert_eq!(claims.claim(45, 0), 4);
        assert_eq!(claims.claim(60, 1), 5);
        assert_eq!(claims.claim(30, 2), 2);
        assert_eq!(claims.all(), [Claim { from: 2, to: 5, call: 2 }]);
        claims.push(60);
        assert_eq!(claims.claim(50, 3), 4);
        assert_eq!(claims.all(), [Claim { from: 2, to: 4, call: 2 }, Claim { from: 4, to: 6, call: 3 }]);
        // Row 6 has the time 5. An op that starts at 10 claims only rows after the last row before its start:
        // row 7 and no earlier one.
        claims.push(5);
        claims.push(70);
        assert_eq!(claims.claim(10, 4), 7);
        assert_eq!(claims.all().last(), Some(&Claim { from: 7, to: 8, call: 4 }));
        assert_eq!(claims.claim(i64::MIN, 5), 0);
        assert_eq!(claims.all(), [Claim { from: 0, to: 8, call: 5 }]);
    }
}
