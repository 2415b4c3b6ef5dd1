//! Writes the opening rows of a later part of a rotated trace. These rows list the live memory, so that the
//! part can be replayed by itself.
//!
//! Opening rows are numbered backward from the first new row of the part. So new rows have the same numbers
//! as in a single file, and `alloc_id` remains the row number of the allocation. The totals in the opening
//! rows are running sums; after the last opening row, they equal the totals of the device again.

use memtrace_trace::memory::{DeviceTotals, MemoryKind, Totals};
use memtrace_trace::text::TORCH_ALLOCATOR;
use memtrace_trace::{Api, EventName, Header, Row};

use crate::emitter::RowSink;
use crate::encoder::Encoder;
use crate::keys::address;
use crate::live::Live;

/// The column `name` in the rows of blocks that are live when they get their row.
pub(crate) const LIVE: &str = "live";

/// Live memory that gets an opening row.
struct Piece {
    addr: u64,
    live: Live,
    /// True if the program has freed the memory while a stream still uses it.
    deferred: bool,
}

impl Encoder {
    /// Writes the meta row and the opening rows. `meta` returns the text of the meta row for a given number
    /// of opening rows.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn open_part<S: RowSink>(
        &mut self,
        clock_ns: u64,
        meta: impl FnOnce(u64) -> String,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let pieces = self.pieces();
        let devices = std::mem::take(&mut self.memory.devices);
        let unseen = unseen(&pieces, devices.gpus());
        let rows =
            pieces.iter().map(|piece| if piece.deferred { 2 } else { 1 }).sum::<usize>() + unseen.len();
        let last = self.rows();
        self.emitter.set_last_seq(last - rows as i64 - 1);
        self.emit(&Row { event: EventName::Meta, name: &meta(rows as u64), ..self.blank(clock_ns) }, sink)?;
        for (device, bytes) in unseen {
            self.memory.correct_reserved(device.into(), bytes);
            let header = Header { step: -1, ..Header::new(clock_ns, Api::Reconciled, device) };
            let what = if bytes > 0 { EventName::SegmentMap } else { EventName::SegmentUnmap };
            let row = Row {
                event: what,
                source: TORCH_ALLOCATOR,
                delta_bytes: bytes,
                name: LIVE,
                ..self.base(0, &header)
            };
            self.emit(&Row { tid: self.emitter.pid(), ..row }, sink)?;
        }
        for Piece { addr, live, deferred } in pieces {
            self.memory.count(&live.extent());
            let event = match live.kind {
                MemoryKind::Block => EventName::Live,
                kind => kind.alloc_event(),
            };
            self.write_opening_row(clock_ns, event, addr, &live, live.bytes, sink)?;
            if deferred {
                let extent = live.extent();
                self.memory.devices.totals_mut(extent.device).defer(&extent);
                self.write_opening_row(clock_ns, EventName::Free, addr, &live, -live.bytes, sink)?;
            }
        }
        self.memory.devices = devices;
        self.emitter.set_last_seq(last);
        Ok(())
    }

    /// Returns the live memory in the order of allocation: regions, blocks and deferred blocks.
    fn pieces(&self) -> Vec<Piece> {
        let piece = |deferred| move |(addr, live): (u64, &Live)| Piece { addr, live: *live, deferred };
        let live = &self.memory.live;
        let mut pieces: Vec<Piece> = live.regions().map(piece(false)).collect();
        pieces.extend(live.blocks().map(piece(false)));
        pieces.extend(live.deferred().map(piece(true)));
        pieces.sort_by_key(|piece| piece.live.alloc_id);
        pieces
    }

    fn write_opening_row<S: RowSink>(
        &mut self,
        clock_ns: u64,
        event: EventName,
        addr: u64,
        live: &Live,
        bytes: i64,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let header =
            Header { clock_ns, api: live.api, device: live.device, context: live.context, step: live.step };
        let source = if live.is_reported() { TORCH_ALLOCATOR } else { self.definitions.text(live.library) };
        let row = self.live_row(0, &header, address(addr), live);
        let row = Row { event, delta_bytes: bytes, name: LIVE, source, ..row };
        self.emit(&Row { tid: self.emitter.pid(), ..row }, sink)
    }
}

/// Returns the reserved bytes of each device that no recorded call explains; see [`Encoder::reconcile`].
fn unseen(pieces: &[Piece], devices: &[Totals]) -> Vec<(i8, i64)> {
    let mut unseen: Vec<i64> = devices.iter().map(|totals| totals.reserved).collect();
    for extent in pieces.iter().map(|piece| piece.live.extent()) {
        if let Some(bytes) = usize::try_from(extent.device).ok().and_then(|device| unseen.get_mut(device))
            && extent.is_reserved()
        {
            *bytes -= extent.bytes;
        }
    }
    let devices = unseen.into_iter().enumerate().filter(|(_, bytes)| *bytes != 0);
    devices.map(|(device, bytes)| (device as i8, bytes)).collect()
}
