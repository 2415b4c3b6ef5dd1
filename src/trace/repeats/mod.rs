//! Repeats: one row replaces rows that equal earlier rows.
//!
//! Outside the detailed steps of `MEMTRACE_DETAIL`, the steps of a training loop usually have the same rows:
//! the same blocks at the same addresses. A `repeat` row replaces such rows. [`RepeatFinder`] creates
//! `repeat` rows when a trace is written. [`Window`] expands them when a trace is read, so no code above a
//! reader sees them. Both apply the rules of [`Born`] and [`Shift`], so the reader restores exactly what the
//! writer compared.
//!
//! A repeated row equals the row that it repeats, except in these columns:
//!
//! - `seq` continues;
//! - `ts_ns`: the first and the last row have their own times; the times in between are scaled from the
//!   repeated rows;
//! - `alloc_id` and `step` of a `free`, a `free_completed` and a `tag` come from the last allocation at that
//!   address. In other rows, an `alloc_id` that was the row's own `seq` becomes the new row's `seq`, and a
//!   nonnegative `step` becomes the step of the `repeat` row;
//! - the totals of the `repeat` row's device are shifted so that the last ones equal the totals in the
//!   `repeat` row.

mod find;
mod stored;
mod window;

pub use find::RepeatFinder;
pub use stored::StoredRow;
pub use window::{Expansion, Window};

use rustc_hash::FxHashMap;

use crate::columns::{MAX_BYTES, Row};
use crate::memory::{Effect, MemoryKind};
use crate::{Api, EventName};

/// How many rows back a `repeat` row may refer, and the maximum number of rows that it replaces. The writer
/// and the reader keep this many rows.
pub const WINDOW: usize = 1 << 16;

/// The error for a `repeat` row in a file whose meta row excludes them.
pub const NO_REPEATS: &str = "repeat: the meta row says that this file has no such rows";

/// The maximum number of addresses whose last allocation is remembered. At the next address, both sides
/// forget all of them.
const MOST_ADDRESSES: usize = 1 << 20;

/// The columns that a repeat changes, and those on which the changes depend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Numbers {
    /// The column `seq`.
    pub seq: i64,
    /// The column `ts_ns`.
    pub ts_ns: i64,
    /// The column `device`.
    pub device: i32,
    /// The column `event`.
    pub event: EventName,
    /// The column `alloc_id`.
    pub alloc_id: i64,
    /// The column `addr`.
    pub addr: i64,
    /// The columns `allocated_bytes`, `active_bytes` and `reserved_bytes`.
    pub totals: [i64; 3],
    /// The column `step`.
    pub step: i64,
}

/// A row in the representation of one of the readers.
pub trait Repeatable: Clone {
    /// Returns the numbers that a repeat changes or depends on.
    fn numbers(&self) -> Numbers;

    /// Replaces the numbers that a repeat changes.
    fn set_numbers(&mut self, numbers: &Numbers);
}

/// The names of the columns in [`Numbers`].
pub const NUMBERS: [&str; 10] = [
    "seq",
    "ts_ns",
    "device",
    "event",
    "alloc_id",
    "addr",
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
    "step",
];

/// The contents of a `repeat` row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Repeat {
    /// The `seq` of the first replaced row.
    pub seq: i64,
    /// The time of the first replaced row.
    pub ts_ns: i64,
    /// The time from the first to the last replaced row (`latency_ns`).
    pub duration_ns: i64,
    /// The `seq` of the first repeated row (`alloc_id`).
    pub of: i64,
    /// The number of replaced rows (`requested_bytes`).
    pub rows: i64,
    /// The device whose totals the row contains.
    pub device: i32,
    /// The totals of the device after the last replaced row.
    pub totals: [i64; 3],
    /// The step of the replaced rows; -1 if they belong to no step.
    pub step: i64,
}

impl Repeat {
    /// Parses a `repeat` row.
    #[must_use]
    pub fn of(row: &Row<'_>) -> Repeat {
        Repeat {
            seq: row.seq,
            ts_ns: row.ts_ns,
            duration_ns: row.latency_ns,
            of: row.alloc_id,
            rows: row.requested_bytes,
            device: row.device,
            totals: [row.allocated_bytes, row.active_bytes, row.reserved_bytes],
            step: row.step,
        }
    }

    /// Returns the row, for the process with this `rank` and `pid`.
    #[must_use]
    pub fn row(&self, rank: i32, pid: i32) -> Row<'static> {
        let [allocated_bytes, active_bytes, reserved_bytes] = self.totals;
        Row {
            seq: self.seq,
            ts_ns: self.ts_ns,
            rank,
            pid,
            tid: pid,
            device: self.device,
            event: EventName::Repeat,
            api: Api::Memtrace.as_str(),
            alloc_id: self.of,
            requested_bytes: self.rows,
            allocated_bytes,
            active_bytes,
            reserved_bytes,
            step: self.step,
            latency_ns: self.duration_ns,
            ..Row::default()
        }
    }
}

impl Numbers {
    /// Returns the numbers of a row.
    #[must_use]
    pub fn of(row: &Row<'_>) -> Numbers {
        Numbers {
            seq: row.seq,
            ts_ns: row.ts_ns,
            device: row.device,
            event: row.event,
            alloc_id: row.alloc_id,
            addr: row.addr,
            totals: [row.allocated_bytes, row.active_bytes, row.reserved_bytes],
            step: row.step,
        }
    }
}

/// Returns true if rows of this event can be repeated, because a loop produces them again.
#[must_use]
pub const fn is_repeatable(event: EventName) -> bool {
    MemoryKind::of(event).is_some() && !matches!(event, EventName::Live)
        || matches!(event, EventName::RangeBegin | EventName::RangeEnd | EventName::Mark)
}

/// The `alloc_id` and the step of the last allocation at each address.
#[derive(Default)]
struct Born(FxHashMap<(u8, i64), (i64, i64)>);

impl Born {
    /// Records the allocation or the tag in the row, if any.
    fn note(&mut self, row: &Numbers) {
        let Some((kind, Effect::Alloc | Effect::Tag)) = MemoryKind::of(row.event) else { return };
        if row.alloc_id <= 0 {
            return;
        }
        let key = (kind as u8, row.addr);
        if self.0.len() >= MOST_ADDRESSES && !self.0.contains_key(&key) {
            self.0.clear();
        }
        self.0.insert(key, (row.alloc_id, row.step));
    }

    /// Returns the `alloc_id` and the step for a row about an earlier allocation. Returns `None` for other
    /// rows.
    fn find(&self, row: &Numbers) -> Option<(i64, i64)> {
        match MemoryKind::of(row.event)? {
            (kind, Effect::Free | Effect::Complete | Effect::Tag) => {
                self.0.get(&(kind as u8, row.addr)).copied()
            }
            (_, Effect::Alloc) => None,
        }
    }
}

/// The changes that a repeat makes to the repeated rows.
#[derive(Clone, Copy, Debug)]
struct Shift {
    device: i32,
    totals: [i64; 3],
    step: i64,
}

impl Shift {
    /// Returns the [`Numbers`] of row `seq`, which repeats the row `of`. The time in the result is still the
    /// time of row `of`. `born` is the result of [`Born::find`].
    fn apply(&self, of: &Numbers, seq: i64, born: Option<(i64, i64)>) -> Numbers {
        let (alloc_id, step) = born.unwrap_or((
            if of.alloc_id == of.seq { seq } else { of.alloc_id },
            if of.step < 0 { of.step } else { self.step },
        ));
        let mut totals = of.totals;
        if of.device == self.device {
            let most = MAX_BYTES.cast_signed();
            for (total, by) in totals.iter_mut().zip(self.totals) {
                *total = total.saturating_add(by).clamp(-most, most);
            }
        }
        Numbers { seq, alloc_id, totals, step, ..*of }
    }
}

#[cfg(test)]
mod tests;
