//! Continues the reading of a trace after parts that were removed (`MEMTRACE_KEEP`).
//!
//! The first part after the removed parts begins with opening rows, one for each piece of memory that is live
//! at its start. This module compares these rows with the state before the gap and makes rows for the memory
//! that was freed and allocated meanwhile, so that a report continues from the right state. Memory that was
//! both allocated and freed in the removed parts stays unknown.

use std::path::Path;

use memtrace_trace::EventName;
use memtrace_trace::counts::counted;
use memtrace_trace::memory::{Effect, Extent, MemoryKind, Totals};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::{Symbol, SymbolTable};

/// The columns that reading across removed parts needs of every row.
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

/// Returns `wanted` with the columns that [`LivePieces`] needs.
pub(super) fn with_pieces(wanted: Wanted) -> Wanted {
    wanted.and(COLUMNS)
}

/// The maximum number of opening rows that are kept. The limit is needed because the meta row of a damaged
/// trace may announce any number.
const MOST_OPENING: usize = if cfg!(test) { 8 } else { 1 << 20 };

/// The meta row and the opening rows of a later part. The meta row announces the number of opening rows.
pub(super) struct OpeningRows {
    /// The number of rows that are still to come.
    left: u64,
    /// The rows so far, or `None` if they are not needed, because no part was removed before this one.
    rows: Option<Vec<Record>>,
    /// The number of rows beyond [`MOST_OPENING`], which were not kept.
    beyond: u64,
}

impl OpeningRows {
    /// Expects the meta row of a part, then the `opening_rows` rows that the meta row announces. With
    /// `is_needed`, the rows are kept for [`OpeningRows::add`] to return.
    pub(super) fn new(opening_rows: u64, is_needed: bool) -> OpeningRows {
        OpeningRows { left: opening_rows.saturating_add(1), rows: is_needed.then(Vec::new), beyond: 0 }
    }

    /// Returns true if the meta row and all opening rows were processed.
    pub(super) fn is_read(&self) -> bool {
        self.left == 0
    }

    /// Processes the next row, which is the meta row or an opening row. Returns all of these rows after the
    /// last one if they are needed, and otherwise `None`.
    pub(super) fn add(&mut self, row: &Record) -> Option<Vec<Record>> {
        self.left -= 1;
        let rows = self.rows.as_mut()?;
        if rows.len() <= MOST_OPENING {
            rows.push(*row);
        } else {
            self.beyond += 1;
        }
        if self.left == 0 { self.rows.take() } else { None }
    }

    /// Describes the problem with the opening rows, if there is one. Called at the end of the part at `path`.
    pub(super) fn problem(&self, path: &Path) -> Option<String> {
        let name = path.file_name().unwrap_or(path.as_os_str()).display();
        if self.left > 0 {
            let rows = counted(self.left, "opening row");
            return Some(format!("{name}: {rows} missing, by the count in its meta row"));
        }
        let rows = counted(self.beyond, "opening row");
        (self.beyond > 0).then(|| {
            format!("{name}: {rows} after the first {MOST_OPENING} were not read, so the live memory is incomplete")
        })
    }
}

/// The memory that is live after the rows processed so far, for comparison with the opening rows of a part.
pub(super) struct LivePieces {
    /// The rows of the live allocations, by `alloc_id`.
    live: FxHashMap<i64, Record>,
    /// The last totals of each device.
    totals: FxHashMap<i32, Totals>,
    /// The reserved bytes of each device that have no allocation row, because the recorder did not see the
    /// calls that allocated these segments.
    unseen: FxHashMap<i32, i64>,
    /// The last row, and the last row with a phase. New rows get the step and the phase of the second one.
    last: (Record, Record),
    caching_allocator: Symbol,
}

impl LivePieces {
    /// Creates an empty state. `symbols` is the symbol table of the rows that [`Self::feed`] will get.
    pub(super) fn new(symbols: &SymbolTable) -> LivePieces {
        LivePieces {
            live: FxHashMap::default(),
            totals: FxHashMap::default(),
            unseen: FxHashMap::default(),
            last: Default::default(),
            caching_allocator: symbols.intern("caching_allocator"),
        }
    }

    /// Processes the next row.
    pub(super) fn feed(&mut self, row: &Record) {
        self.last.0 = *row;
        if row.event != EventName::Live && row.phase != Symbol::NONE {
            self.last.1 = *row;
        }
        let memory = MemoryKind::changed_by(row.event);
        if memory.is_some() || row.event == EventName::Brief {
            self.totals.entry(row.device).or_default().adopt(
                row.allocated_bytes,
                row.active_bytes,
                row.reserved_bytes,
            );
        }
        let Some((kind, effect)) = memory else { return };
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

    /// Returns the rows for the changes in the removed parts before a part: the part's meta row, then a row
    /// for each free and each allocation. `opening` has the part's meta row and its opening rows. Like the
    /// opening rows, the new rows are numbered backward from the first other row of the part.
    pub(super) fn changes(&self, opening: &[Record]) -> Vec<Record> {
        let Some((meta, opening)) = opening.split_first() else { return Vec::new() };
        let effect = |row: &Record| MemoryKind::changed_by(row.event).map(|(_, effect)| effect);
        // If a stream still uses a freed block, the block has two opening rows: an allocation and its free.
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
        rows.insert(0, Record { seq, follows_removed_parts: true, ..*meta });
        rows
    }

    /// Returns a row for each device whose unseen reserved bytes have changed: a `segment_map` or a
    /// `segment_unmap` row with the difference.
    fn unseen_changes(&self, opening: &[Record]) -> Vec<Record> {
        let mut now: FxHashMap<i32, i64> = FxHashMap::default();
        let is_unseen = |row: &&Record| {
            let kind = MemoryKind::changed_by(row.event).map(|(kind, _)| kind);
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

    /// Returns the memory that a row adds or, with negative bytes, frees. Returns `None` if the row is not
    /// about memory.
    fn extent(&self, row: &Record) -> Option<Extent> {
        let (kind, _) = MemoryKind::changed_by(row.event)?;
        let in_segment = row.api == self.caching_allocator;
        Some(Extent { device: row.device, kind, in_segment, bytes: row.delta_bytes })
    }
}

/// Returns the row that frees the memory of the allocation row `alloc`.
fn free_of(alloc: &Record) -> Option<Record> {
    let (kind, _) = MemoryKind::changed_by(alloc.event)?;
    Some(Record { event: kind.free_event(), delta_bytes: alloc.delta_bytes.wrapping_neg(), ..*alloc })
}

#[cfg(test)]
mod tests {
    use std::ops::ControlFlow;

    use memtrace_trace::config::Compression;
    use memtrace_trace::meta::Meta;
    use memtrace_trace::{Row, files};

    use super::*;
    use crate::error::Result;
    use crate::read::stream::{ReadSummary, TraceFile};
    use crate::testing::TraceBuilder;

    /// Returns a part with `live` opening rows and one more allocation. Its meta row announces `named`
    /// opening rows.
    fn part(number: u32, live: i64, named: u64, keep: &str) -> Vec<u8> {
        let meta = Meta { part: number, opening_rows: named, keep: keep.to_owned(), ..Meta::default() };
        let mut trace = TraceBuilder::new(meta);
        for _ in 0..live + 1 {
            trace.alloc(512, Row::default());
        }
        trace.finish()
    }

    /// Reads the first part of a trace and part 5 as one trace. Returns the event of each row, and the
    /// summary.
    fn read(name: &str, live: i64, named: u64) -> (Vec<EventName>, Result<ReadSummary>) {
        read_and(name, live, named, "1m", |_| {})
    }

    /// Same as [`read`], but calls `meanwhile` after part 5 is opened and before it is read.
    fn read_and(
        name: &str,
        live: i64,
        named: u64,
        keep: &str,
        meanwhile: fn(&Path),
    ) -> (Vec<EventName>, Result<ReadSummary>) {
        let folder = std::env::temp_dir().join(format!("memtrace-opening-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let place = |number: u32| folder.join(format!("h.r0.1.part{number}.csv"));
        std::fs::write(place(1), part(1, 0, 0, keep)).unwrap();
        std::fs::write(place(5), part(5, live, named, keep)).unwrap();
        let mut trace = TraceFile::open(&place(1)).unwrap();
        assert!(trace.join(TraceFile::open(&place(5)).unwrap()).is_none());
        meanwhile(&place(5));
        let mut events = Vec::new();
        let wanted = Wanted::all_events(Columns::ALL);
        let summary = trace.read(wanted, false, &SymbolTable::default(), |row| {
            events.push(row.event);
            ControlFlow::Continue(())
        });
        std::fs::remove_dir_all(&folder).unwrap();
        (events, summary)
    }

    fn allocs(events: &[EventName]) -> usize {
        events.iter().filter(|event| **event == EventName::Alloc).count()
    }

    #[test]
    fn more_opening_rows_than_are_kept_are_counted_once_and_noted() {
        // Part 1 allocates one block. Part 5 opens with this block and seven new ones, and then allocates one
        // more: the reading has 9 allocations and no wrong opening.
        let (events, summary) = read("few", 8, 8);
        let summary = summary.unwrap();
        assert_eq!((allocs(&events), &summary.wrong_openings[..]), (1 + 7 + 1, &[][..]));
        assert_eq!(summary.removed, [(2, 4)]);
        let (events, summary) = read("many", 20, 20);
        assert_eq!(allocs(&events), 1 + 7 + 1);
        let note = "h.r0.1.part5.csv: 12 opening rows after the first 8 were not read, so the live memory is incomplete";
        assert_eq!(summary.unwrap().wrong_openings, [note]);
    }

    #[test]
    fn opening_rows_that_are_missing_are_noted() {
        let (events, summary) = read("lies", 3, u64::MAX);
        assert_eq!(allocs(&events), 1);
        let [note] = &summary.unwrap().wrong_openings[..] else { panic!("no note") };
        assert!(note.ends_with("missing, by the count in its meta row"), "{note}");
    }

    #[test]
    fn a_part_that_is_removed_before_its_turn_is_left_out_only_with_keep() {
        let remove = |part: &Path| std::fs::remove_file(part).unwrap();
        let (events, summary) = read_and("gone", 3, 3, "1m", remove);
        assert_eq!((allocs(&events), summary.unwrap().removed), (1, vec![]));
        let (_, summary) = read_and("lost", 3, 3, "", remove);
        assert!(summary.unwrap_err().is_no_file());
        // Part 5 is compressed after it is opened: the reader opens the compressed copy.
        let compress = |part: &Path| {
            let copy = std::fs::File::create(files::compressed(part, Compression::Zst)).unwrap();
            zstd::stream::copy_encode(std::fs::File::open(part).unwrap(), copy, 1).unwrap();
            std::fs::remove_file(part).unwrap();
        };
        let (events, summary) = read_and("packed", 3, 3, "", compress);
        assert_eq!((allocs(&events), summary.unwrap().removed), (4, vec![(2, 4)]));
    }
}
