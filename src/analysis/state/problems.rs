//! Counts of the rows of a trace, and contradictions between them.

use memtrace_trace::EventName;

use crate::read::record::Record;

/// Counts of rows, failed calls and lost events.
#[derive(Clone, Debug, Default)]
pub struct Counts {
    /// The number of rows, including the meta row.
    pub rows: u64,
    /// The number of rows of each event, in the order of [`EventName::ALL`].
    pub(super) events: [u64; EventName::ALL.len()],
    /// The number of failed calls. The `oom` row of a request is no call.
    pub failed: u64,
    /// The retries of PyTorch's allocator.
    pub retries: Retries,
    /// The number of events that the traced process dropped.
    pub lost: u64,
}

impl Counts {
    /// Returns the number of rows of `event`.
    #[must_use]
    pub fn of(&self, event: EventName) -> u64 {
        self.events[event as usize]
    }

    /// Counts the next row.
    pub(super) fn feed(&mut self, row: &Record) {
        self.rows += 1;
        self.events[row.event as usize] += 1;
        self.failed += u64::from(row.status != 0 && row.event != EventName::Oom);
        self.retries.feed(row);
    }
}

/// Counts the retries of PyTorch's allocator, which its `num_alloc_retries` counts: after a failed allocation
/// of a segment, the allocator frees its cache and asks again. A request that ends with an out-of-memory error
/// fails twice and is one retry.
#[derive(Clone, Copy, Debug, Default)]
pub struct Retries {
    /// The number of failed allocations of segments on a GPU.
    failed: u64,
    /// The number of requests that ended with an out-of-memory error.
    pub ooms: u64,
}

impl Retries {
    /// Counts the next row, of the columns `event` and `status`.
    pub fn feed(&mut self, row: &Record) {
        match row.event {
            EventName::SegmentAlloc | EventName::SegmentMap => self.failed += u64::from(row.status != 0),
            EventName::Oom => self.ooms += 1,
            _ => {}
        }
    }

    /// Returns the number of retries.
    #[must_use]
    pub fn count(self) -> u64 {
        self.failed.saturating_sub(self.ooms)
    }
}

impl std::ops::Add for Retries {
    type Output = Retries;

    fn add(self, other: Retries) -> Retries {
        Retries { failed: self.failed + other.failed, ooms: self.ooms + other.ooms }
    }
}

/// Counts of contradictions between rows.
#[derive(Clone, Debug, Default)]
pub struct Problems {
    /// The number of gaps in `seq`.
    pub seq_gaps: u64,
    /// The number of rows missing in these gaps.
    pub missing_rows: u64,
    /// The `seq` of the row before the first gap.
    pub first_gap: Option<i64>,
    /// The number of rows at which the difference between the totals and the sum of the deltas changes. A
    /// constant difference counts once.
    pub totals: u64,
    /// The number of frees of blocks that are not live.
    pub unmatched_frees: u64,
    /// The number of allocations with the id of a live block.
    pub double_allocs: u64,
    /// The number of frees whose size differs from the block's size.
    pub wrong_sizes: u64,
    /// The number of allocations at addresses where another block is live.
    pub overlaps: u64,
    /// The number of block allocations at which the allocated bytes start to exceed the reserved bytes.
    pub above_reserved: u64,
    /// True if the last row is not an `end` row.
    pub unfinished: bool,
    /// Descriptions of the first few problems.
    pub examples: Vec<String>,
}

/// The maximum number of descriptions that are kept.
const MOST_EXAMPLES: usize = 8;

impl Problems {
    /// Counts a gap between two adjacent rows. A `seq` that decreases counts as a gap without missing rows.
    pub(super) fn gap(&mut self, last: i64, next: i64) {
        self.seq_gaps += 1;
        self.first_gap.get_or_insert(last);
        let missing = next.checked_sub(last).map_or(0, |step| step.saturating_sub(1)).max(0);
        self.missing_rows = self.missing_rows.saturating_add(missing.cast_unsigned());
    }

    /// Keeps a description if fewer than [`MOST_EXAMPLES`] are kept.
    pub(super) fn example(&mut self, text: impl FnOnce() -> String) {
        if self.examples.len() < MOST_EXAMPLES {
            self.examples.push(text());
        }
    }
}
