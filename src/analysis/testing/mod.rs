//! Small traces for tests, written with the row writer of `memtrace-trace`.

pub mod pickled;

use memtrace_trace::csv::RowWriter;
use memtrace_trace::meta::Meta;
use memtrace_trace::{EventName, Row};

/// Builds the bytes of a trace row by row. The builder numbers the rows and tracks the totals of each device,
/// so that a test sets only the fields that matter to it.
pub struct TraceBuilder {
    writer: RowWriter<Vec<u8>>,
    seq: i64,
    pid: i32,
    totals: Vec<(i32, [i64; 3])>,
}

impl Default for TraceBuilder {
    fn default() -> Self {
        TraceBuilder::new(Meta { world_size: 1, argv: vec!["train.py".to_owned()], ..Meta::default() })
    }
}

impl TraceBuilder {
    /// Returns a trace that begins with this meta row. The schema version is set here. The process id is 1 for
    /// rank 0, 2 for rank 1, and so on.
    #[must_use]
    pub fn new(meta: Meta) -> Self {
        Self::of_process(meta.rank + 1, meta)
    }

    /// Returns a trace of the process `pid`. Rows with another process id keep it.
    #[must_use]
    pub fn of_process(pid: i32, meta: Meta) -> Self {
        let meta = Meta { schema: memtrace_trace::SCHEMA_VERSION.to_owned(), ..meta };
        let json = serde_json::to_string(&meta).unwrap_or_default();
        let mut builder =
            TraceBuilder { writer: RowWriter::new(Vec::new()), seq: 0, pid, totals: Vec::new() };
        builder.raw(Row { event: EventName::Meta, api: "memtrace", name: &json, ..Row::default() });
        builder
    }

    /// Writes a row after setting its `seq` and, if its `ts_ns` is 0, also its `ts_ns` (1 µs per row).
    /// Returns the `seq`.
    pub fn raw(&mut self, row: Row<'_>) -> i64 {
        self.seq += 1;
        let ts_ns = if row.ts_ns == 0 { (self.seq - 1) * 1000 } else { row.ts_ns };
        let pid = if row.pid == 0 { self.pid } else { row.pid };
        let row = Row { seq: self.seq, ts_ns, pid, ..row };
        if let Err(error) = self.writer.write(&row) {
            unreachable!("writing to a vector failed: {error}");
        }
        self.seq
    }

    fn totals(&mut self, device: i32) -> &mut [i64; 3] {
        let at = match self.totals.iter().position(|(ordinal, _)| *ordinal == device) {
            Some(at) => at,
            None => {
                self.totals.push((device, [0; 3]));
                self.totals.len() - 1
            }
        };
        &mut self.totals[at].1
    }

    /// Writes a row. Its totals are the previous totals of its device plus `change`, which has the allocated,
    /// active and reserved bytes. Returns the `seq`.
    pub fn change(&mut self, row: Row<'_>, change: [i64; 3]) -> i64 {
        let totals = self.totals(row.device);
        for (total, by) in totals.iter_mut().zip(change) {
            *total += by;
        }
        let [allocated_bytes, active_bytes, reserved_bytes] = *totals;
        self.raw(Row { allocated_bytes, active_bytes, reserved_bytes, ..row })
    }

    /// Writes the allocation of a segment of `bytes` on device 0, or a segment's free if `bytes` is negative.
    pub fn segment(&mut self, bytes: i64) -> i64 {
        let event = if bytes >= 0 { EventName::SegmentAlloc } else { EventName::SegmentFree };
        let row = Row { device: 0, event, api: "cudaMalloc", delta_bytes: bytes, ..Row::default() };
        self.change(row, [0, 0, bytes])
    }

    /// Writes the allocation of a block of `bytes` with the owner of `row`. Returns the block's `alloc_id`.
    pub fn alloc(&mut self, bytes: i64, row: Row<'_>) -> i64 {
        let alloc_id = self.seq + 1;
        let row = Row {
            device: row.device.max(0),
            event: EventName::Alloc,
            api: "caching_allocator",
            alloc_id,
            addr: alloc_id << 40,
            requested_bytes: bytes,
            rounded_bytes: bytes,
            delta_bytes: bytes,
            ..row
        };
        self.change(row, [bytes, bytes, 0])
    }

    /// Writes the free of the block `alloc_id` of `bytes`, with the owner of `row`.
    pub fn free(&mut self, alloc_id: i64, bytes: i64, row: Row<'_>) -> i64 {
        let row = Row {
            device: row.device.max(0),
            event: EventName::Free,
            api: "caching_allocator",
            alloc_id,
            addr: alloc_id << 40,
            requested_bytes: bytes,
            rounded_bytes: bytes,
            delta_bytes: -bytes,
            ..row
        };
        self.change(row, [-bytes, -bytes, 0])
    }

    /// Writes the pair of `tag` rows that moves a block from the owner of `old` to the owner of `new`.
    pub fn tag(&mut self, alloc_id: i64, bytes: i64, old: Row<'_>, new: Row<'_>) {
        for (row, delta_bytes) in [(old, -bytes), (new, bytes)] {
            let row = Row { device: row.device.max(0), event: EventName::Tag, alloc_id, delta_bytes, ..row };
            self.change(Row { api: "caching_allocator", ..row }, [0; 3]);
        }
    }

    /// Writes the `end` row and returns the bytes of the trace.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.raw(Row { event: EventName::End, api: "memtrace", ..Row::default() });
        self.unfinished()
    }

    /// Returns the bytes of the trace without an `end` row, as a killed process would leave the trace.
    #[must_use]
    pub fn unfinished(mut self) -> Vec<u8> {
        if let Err(error) = self.writer.flush() {
            unreachable!("writing to a vector failed: {error}");
        }
        self.writer.get_ref().clone()
    }
}
