//! Expands `repeat` rows into the rows that they replace ([`memtrace_trace::repeats`]).
//!
//! Both file readers pass their rows through here, so no report sees a `repeat` row.

use std::ops::ControlFlow;

use memtrace_trace::EventName;
use memtrace_trace::repeats::{NO_REPEATS, NUMBERS, Numbers, Repeat, Repeatable, Window};

use crate::read::record::{Columns, Record, Wanted};

/// The columns that the rules for repeats depend on.
const COLUMNS: Columns = Columns::of(&NUMBERS);
/// The additional columns of a `repeat` row.
const REPEAT: Columns = Columns::of(&["requested_bytes", "latency_ns"]);

/// Expands the rows of one file, in order.
#[derive(Default)]
pub(super) struct Rows {
    /// The rows that a `repeat` row may refer to, or `None` for a file without `repeat` rows.
    window: Option<Window<Record>>,
}

impl Rows {
    /// Starts a file, whose meta row states in `has_repeats` whether it has `repeat` rows.
    pub(super) fn new(has_repeats: bool) -> Rows {
        Rows { window: has_repeats.then(Window::default) }
    }

    /// Returns the columns to parse: `wanted`, and the columns that repeats need.
    pub(super) fn wanted(&self, wanted: Wanted) -> Wanted {
        match self.window {
            Some(_) => wanted.and(COLUMNS).plus(EventName::Repeat, REPEAT),
            None => wanted,
        }
    }

    /// Passes a row of the file or, for a `repeat` row, the rows that it replaces to `visit`, until `visit`
    /// breaks.
    ///
    /// # Errors
    /// When a `repeat` row cannot be expanded.
    #[inline]
    pub(super) fn each(
        &mut self,
        record: &Record,
        visit: &mut impl FnMut(&Record) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, String> {
        let Some(window) = &mut self.window else {
            return if record.event == EventName::Repeat {
                Err(NO_REPEATS.to_owned())
            } else {
                Ok(visit(record))
            };
        };
        if record.event != EventName::Repeat {
            window.add(*record);
            return Ok(visit(record));
        }
        let mut expansion = window.begin(Repeat {
            seq: record.seq,
            ts_ns: record.ts_ns,
            duration_ns: record.latency_ns,
            of: record.alloc_id,
            rows: record.requested_bytes,
            device: record.device,
            totals: [record.allocated_bytes, record.active_bytes, record.reserved_bytes],
            step: record.step,
        })?;
        while let Some(made) = window.next_row(&mut expansion) {
            if visit(made).is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

impl Repeatable for Record {
    fn numbers(&self) -> Numbers {
        Numbers {
            seq: self.seq,
            ts_ns: self.ts_ns,
            device: self.device,
            event: self.event,
            alloc_id: self.alloc_id,
            addr: self.addr,
            totals: [self.allocated_bytes, self.active_bytes, self.reserved_bytes],
            step: self.step,
        }
    }

    fn set_numbers(&mut self, numbers: &Numbers) {
        (self.seq, self.ts_ns) = (numbers.seq, numbers.ts_ns);
        (self.alloc_id, self.step) = (numbers.alloc_id, numbers.step);
        [self.allocated_bytes, self.active_bytes, self.reserved_bytes] = numbers.totals;
    }
}
