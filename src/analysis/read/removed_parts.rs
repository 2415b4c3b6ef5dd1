//! Reads on behind parts that were removed (`MEMTRACE_KEEP`).
//!
//! The part behind the removed ones opens with a row for everything that is live then. From these rows and what was
//! live before, this makes rows for what was freed and allocated meanwhile. A report that takes them goes on from the
//! right state; what came and went in the removed parts is unknown.

use memtrace_trace::EventName;
use memtrace_trace::memory::{Effect, Extent, MemoryKind, Totals};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::{Symbol, SymbolTable};

/// The columns that a reading over removed parts needs of every row.
const COLUMNS: Columns = Columns::of(&[
    "seq",
    "ts_ns",
    "step",
    "phase",
    "device",
    "alloc_id",
    "delta_bytes",
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
    "api",
    "addr",
]);

/// `wanted`, and what [`LivePieces`] need.
pub(super) fn with_pieces(wanted: Wanted) -> Wanted {
    wanted.and(COLUMNS)
}

/// What is live at a row of a trace.
pub(super) struct LivePieces {
    /// The rows of the live allocations, by `alloc_id`.
    live: FxHashMap<i64, Record>,
    /// The totals of each device.
    totals: FxHashMap<i32, Totals>,
    /// The reserved bytes of each device without an allocation: of segments whose calls nobody saw.
    unseen: FxHashMap<i32, i64>,
    /// The last row, and the last one with the current step and phase.
    last: (Record, Record),
    caching_allocator: Symbol,
}

impl LivePieces {
    /// Nothing yet; `symbols` is the table of the rows to come.
    pub(super) fn new(symbols: &SymbolTable) -> LivePieces {
        LivePieces {
            live: FxHashMap::default(),
            totals: FxHashMap::default(),
            unseen: FxHashMap::default(),
            last: Default::default(),
            caching_allocator: symbols.intern("caching_allocator"),
        }
    }

    /// Takes the next row.
    pub(super) fn feed(&mut self, row: &Record) {
        self.last.0 = *row;
        if row.event != EventName::Live && row.phase != Symbol::NONE {
            self.last.1 = *row;
        }
        let Some((kind, effect)) = MemoryKind::of(row.event) else { return };
        self.totals.entry(row.device).or_default().adopt(
            row.allocated_bytes,
            row.active_bytes,
            row.reserved_bytes,
        );
        let is_known = match effect {
            Effect::Alloc if row.alloc_id != 0 => {
                self.live.insert(row.alloc_id, *row);
                true
            }
            Effect::Free if row.alloc_id != 0 => self.live.remove(&row.alloc_id).is_some(),
            Effect::Alloc | Effect::Free => false,
            Effect::Complete | Effect::Tag => true,
        };
        if !is_known && matches!(kind, MemoryKind::Segment | MemoryKind::Mapped) {
            let unseen = self.unseen.entry(row.device).or_default();
            *unseen = unseen.wrapping_add(row.delta_bytes);
        }
    }

    /// The rows for what the removed parts before a part changed: its meta row, and a row for each free and each
    /// allocation. `opening` has the part's meta row and its opening rows. The new rows are numbered backward from the
    /// first other row of the part, as the opening rows are.
    pub(super) fn changes(&self, opening: &[Record]) -> Vec<Record> {
        let Some((meta, opening)) = opening.split_first() else { return Vec::new() };
        let effect = |row: &Record| MemoryKind::of(row.event).map(|(_, effect)| effect);
        // A block that a stream still uses has a row of its free, too.
        let freed: FxHashSet<i64> =
            opening.iter().filter(|row| effect(row) == Some(Effect::Free)).map(|row| row.alloc_id).collect();
        let is_live = |row: &&Record| {
            effect(row) == Some(Effect::Alloc) && row.alloc_id != 0 && !freed.contains(&row.alloc_id)
        };
        let now: FxHashSet<i64> = opening.iter().filter(is_live).map(|row| row.alloc_id).collect();

        let mut gone: Vec<&Record> = self.live.values().filter(|row| !now.contains(&row.alloc_id)).collect();
        gone.sort_unstable_by_key(|row| row.alloc_id);
        let mut rows: Vec<Record> = gone.into_iter().filter_map(free_of).collect();
        rows.extend(self.unseen_changes(opening));
        let new = opening.iter().filter(is_live).filter(|row| !self.live.contains_key(&row.alloc_id));
        rows.extend(new.copied());

        let after = meta.seq.saturating_add(opening.len() as i64 + 1);
        let first = after.saturating_sub(rows.len() as i64);
        let mut totals = self.totals.clone();
        for (row, seq) in rows.iter_mut().zip(first..) {
            let totals = totals.entry(row.device).or_default();
            if let Some(extent) = self.extent(row) {
                totals.add(&extent);
            }
            (row.seq, row.ts_ns) = (seq, meta.ts_ns);
            (row.allocated_bytes, row.active_bytes, row.reserved_bytes) =
                (totals.allocated, totals.active, totals.reserved);
            if row.event != EventName::Live && row.event != EventName::Free {
                (row.step, row.phase) = (self.last.1.step, self.last.1.phase);
            }
        }
        let seq = first.saturating_sub(1).max(self.last.0.seq.saturating_add(1));
        rows.insert(0, Record { seq, ..*meta });
        rows
    }

    /// A row for each device whose unseen segments changed.
    fn unseen_changes(&self, opening: &[Record]) -> Vec<Record> {
        let mut now: FxHashMap<i32, i64> = FxHashMap::default();
        let is_unseen = |row: &&Record| {
            let kind = MemoryKind::of(row.event).map(|(kind, _)| kind);
            row.alloc_id == 0 && matches!(kind, Some(MemoryKind::Segment | MemoryKind::Mapped))
        };
        for row in opening.iter().filter(is_unseen) {
            let sum = now.entry(row.device).or_default();
            *sum = sum.wrapping_add(row.delta_bytes);
        }
        let mut devices: Vec<i32> = now.keys().chain(self.unseen.keys()).copied().collect();
        devices.sort_unstable();
        devices.dedup();
        let of = |sums: &FxHashMap<i32, i64>, device| sums.get(&device).copied().unwrap_or(0);
        let changes = devices.into_iter().map(|device| {
            let delta_bytes = of(&now, device).wrapping_sub(of(&self.unseen, device));
            let event = if delta_bytes > 0 { EventName::SegmentMap } else { EventName::SegmentUnmap };
            Record { event, device, delta_bytes, ..Record::default() }
        });
        changes.filter(|row| row.delta_bytes != 0).collect()
    }

    /// The memory that a row is about; the bytes of a free are negative.
    fn extent(&self, row: &Record) -> Option<Extent> {
        let (kind, _) = MemoryKind::of(row.event)?;
        let in_segment = row.api == self.caching_allocator;
        Some(Extent { device: row.device, kind, in_segment, bytes: row.delta_bytes })
    }
}

/// The row of the free of an allocation.
fn free_of(alloc: &Record) -> Option<Record> {
    let (kind, _) = MemoryKind::of(alloc.event)?;
    Some(Record { event: kind.free_event(), delta_bytes: alloc.delta_bytes.wrapping_neg(), ..*alloc })
}
