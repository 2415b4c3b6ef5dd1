//! Writes rows to their destination: numbers them, and fills in the fields that do not depend on an event.

use std::cell::Cell;

use memtrace_trace::memory::Totals;
use memtrace_trace::{Api, EventName, Row};

/// The column `source` in rows that come from neither a call nor a report.
pub(crate) const LIBRARY: &str = "libmemtrace.so";

/// Returns the [`TextKeys::call`](memtrace_trace::columns::TextKeys::call) of a row of `event` with status 0, for a call
/// that succeeded. `is_torchs` is true if the source is torch's allocator, and false if it is this library.
#[inline(always)]
pub(crate) fn call_key(event: EventName, api: Option<Api>, is_torchs: bool) -> u64 {
    let api = api.map_or(0, |api| u64::from(api.id()) + 1);
    const EVENTS: u64 = EventName::ALL.len() as u64;
    1 + u64::from(is_torchs) + 2 * (u64::from(event.id()) + EVENTS * api)
}

/// A destination for rows.
pub trait RowSink {
    /// The error if a row cannot be written.
    type Error;
    /// Writes a row.
    ///
    /// # Errors
    /// Returns the sink's error.
    fn row(&mut self, row: &Row<'_>) -> Result<(), Self::Error>;

    /// Writes a row whose texts have keys ([`memtrace_trace::columns::TextKeys`]). `with_texts` fills in the texts. A sink
    /// that has them already need not call it.
    ///
    /// # Errors
    /// Returns the sink's error.
    #[inline(always)]
    fn keyed_row<'a>(
        &mut self,
        row: Row<'a>,
        with_texts: impl Fn(Row<'a>) -> Row<'a>,
    ) -> Result<(), Self::Error> {
        self.row(&with_texts(row))
    }
}

/// The process that the rows belong to, and the number of the last row.
pub(crate) struct Emitter {
    start_ns: u64,
    rank: i32,
    pid: i32,
    /// The `seq` of the last row.
    seq: Cell<i64>,
}

impl Emitter {
    /// Creates the emitter of a process whose row times count from `start_ns`.
    pub(crate) fn new(start_ns: u64, rank: i32, pid: u32) -> Emitter {
        Emitter { start_ns, rank, pid: pid as i32, seq: Cell::new(0) }
    }

    /// Writes a row and advances the row number, so that [`Emitter::blank`] returns the next number for the
    /// next row.
    pub(crate) fn emit<S: RowSink>(&self, row: &Row<'_>, sink: &mut S) -> Result<(), S::Error> {
        sink.row(row)?;
        self.seq.set(row.seq);
        Ok(())
    }

    /// Same as [`Emitter::emit`], for a row whose texts have keys; see [`RowSink::keyed_row`].
    #[inline(always)]
    pub(crate) fn emit_keyed<'a, S: RowSink>(
        &self,
        row: Row<'a>,
        with_texts: impl Fn(Row<'a>) -> Row<'a>,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        sink.keyed_row(row, with_texts)?;
        self.seq.set(row.seq);
        Ok(())
    }

    /// Returns the `seq` of the last row.
    pub(crate) fn last_seq(&self) -> i64 {
        self.seq.get()
    }

    /// Sets the `seq` of the last row.
    pub(crate) fn set_last_seq(&mut self, seq: i64) {
        self.seq.set(seq);
    }

    /// Returns the id of the process.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Returns the time that is 0 in the rows.
    pub(crate) fn start_ns(&self) -> u64 {
        self.start_ns
    }

    /// Returns the fields of a row that belongs to no particular thread and to no device. `host` are the totals
    /// of the host.
    #[inline(always)]
    pub(crate) fn blank(&self, clock_ns: u64, host: &Totals) -> Row<'static> {
        Row {
            seq: self.seq.get() + 1,
            ts_ns: clock_ns.saturating_sub(self.start_ns) as i64,
            rank: self.rank,
            pid: self.pid,
            tid: self.pid,
            api: Api::Memtrace.as_str(),
            source: LIBRARY,
            allocated_bytes: host.allocated,
            active_bytes: host.active,
            reserved_bytes: host.reserved,
            ..Row::default()
        }
    }
}
