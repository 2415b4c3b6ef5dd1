//! The rows that open a later part of a rotated trace: what is live, said again, so that the part
//! replays by itself.
//!
//! They are numbered backward from the part's first new row, so the new rows of all parts have the
//! numbers that they would have in one file, and `alloc_id` stays the number of the allocation's own row.
//! Their totals are the sums of what was said so far, as everywhere; behind the last of them the totals
//! are the device's again.

use memtrace_trace::memory::{DeviceTotals, MemoryKind, Totals};
use memtrace_trace::{Api, EventName, Header, Row};

use crate::encoder::{Encoder, RowSink, TORCH_ALLOCATOR};
use crate::keys::address;
use crate::live::Live;

/// The text of the column `name` of these rows.
const LIVE: &str = "live";

/// What one live piece of memory becomes.
struct Piece {
    addr: u64,
    live: Live,
    /// Freed by the program, and still in use by a stream.
    deferred: bool,
}

impl Encoder {
    /// Opens a part: the meta row, whose text `meta` makes of the number of rows that follow it, then those
    /// rows.
    ///
    /// # Errors
    /// The sink's.
    pub fn open_part<S: RowSink>(
        &mut self,
        clock_ns: u64,
        meta: impl FnOnce(u64) -> String,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let pieces = self.pieces();
        let devices = std::mem::take(&mut self.memory.devices);
        let unseen = unseen(&pieces, &devices.gpus);
        let rows =
            pieces.iter().map(|piece| if piece.deferred { 2 } else { 1 }).sum::<usize>() + unseen.len();
        let last = self.rows();
        self.seq.set(last - rows as i64 - 1);
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
            self.emit(&Row { tid: self.pid, ..row }, sink)?;
        }
        for Piece { addr, live, deferred } in pieces {
            self.memory.count(&live.extent());
            let event = match live.kind {
                MemoryKind::Block => EventName::Live,
                kind => kind.alloc_event(),
            };
            self.say_again(clock_ns, event, addr, &live, live.bytes, sink)?;
            if deferred {
                let extent = live.extent();
                self.memory.devices.totals_mut(extent.device).defer(&extent);
                self.say_again(clock_ns, EventName::Free, addr, &live, -live.bytes, sink)?;
            }
        }
        self.memory.devices = devices;
        self.seq.set(last);
        Ok(())
    }

    /// What is live, in the order of its allocation.
    fn pieces(&self) -> Vec<Piece> {
        let of = |deferred| move |(addr, live): (&u64, &Live)| Piece { addr: *addr, live: *live, deferred };
        let mut pieces: Vec<Piece> = self.memory.live.regions.iter().map(of(false)).collect();
        pieces.extend(self.memory.live.blocks.iter().map(of(false)));
        pieces.extend(self.memory.live.deferred.iter().map(of(true)));
        pieces.sort_by_key(|piece| piece.live.alloc_id);
        pieces
    }

    fn say_again<S: RowSink>(
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
        let source = if live.is_reported() { TORCH_ALLOCATOR } else { self.text(live.library) };
        let row = self.of_live(0, &header, address(addr), live);
        let row = Row { event, delta_bytes: bytes, name: LIVE, source, ..row };
        self.emit(&Row { tid: self.pid, ..row }, sink)
    }
}

/// The bytes of segments without a call, by device; see [`Encoder::reconcile`].
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
