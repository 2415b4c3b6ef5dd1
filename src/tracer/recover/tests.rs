//! Tests the repair of traces from generated journals.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::csv::{RowReader, RowWriter};
use memtrace_trace::event::{AllocCall, Block, Call};
use memtrace_trace::journal::{Run, journal_name};
use memtrace_trace::{Api, Event, EventName, Header, Meta, Payload, Row, SCHEMA_VERSION};

use crate::testing::{Checkpoints, Head, Left, journal_with, of_trace};
use crate::{Repaired, Rest, begin, repair};

/// No process has this id.
const NOBODY: u32 = u32::MAX - 1;

/// A folder with a trace and its journal.
struct Killed {
    folder: PathBuf,
    csv: PathBuf,
    journal: PathBuf,
    json: String,
    run: Run,
}

impl Killed {
    fn new(name: &str) -> Killed {
        let folder = std::env::temp_dir().join(format!("memtrace-recover-{name}-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let run = Run { pid: NOBODY, start_ns: 1000, process_start: 1, ..Run::default() };
        // Each test has its own journal.
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let journal = std::env::temp_dir().join(journal_name(std::process::id(), number));
        let meta = Meta {
            schema: SCHEMA_VERSION.to_owned(),
            journal: journal.display().to_string(),
            part: 1,
            ..Meta::default()
        };
        let json = meta.to_json().unwrap();
        Killed { csv: folder.join("vm.r0.1.csv"), folder, journal, json, run }
    }

    /// Writes a trace with only a meta row.
    fn with_meta_row(self) -> Killed {
        let mut writer = RowWriter::new(Vec::new());
        writer.write(&Row { seq: 1, event: EventName::Meta, name: &self.json, ..Row::default() }).unwrap();
        writer.flush().unwrap();
        fs::write(&self.csv, writer.get_ref()).unwrap();
        self
    }

    /// Writes the journal that the process leaves.
    fn with_journal(self, at: &Checkpoints, losses: [u64; 2], events: Vec<Event>) -> Killed {
        self.write_journal(at, losses, events);
        self
    }

    fn write_journal(&self, at: &Checkpoints, losses: [u64; 2], events: Vec<Event>) {
        self.write_lanes(at, losses, vec![(0, events)]);
    }

    /// Writes a journal with one chunk in each lane. The first events of a chunk, of the given number, are in
    /// the trace.
    fn write_lanes(&self, at: &Checkpoints, losses: [u64; 2], lanes: Vec<(u32, Vec<Event>)>) {
        let head = Head { losses, meta: &self.json };
        let chunks = lanes.into_iter().enumerate().map(|(lane, (consumed, events))| Left {
            owner: [7, lane as u32, 0],
            in_use: true,
            committed: events.len() as u32,
            consumed: [consumed; 2],
            slots: events,
        });
        let bytes = journal_with(&head, &self.run, at, &chunks.collect::<Vec<_>>());
        fs::write(&self.journal, of_trace(bytes, &self.csv)).unwrap();
    }

    fn rows(&self) -> Vec<(EventName, i64, String)> {
        let mut reader = RowReader::open(&self.csv).unwrap();
        let mut rows = Vec::new();
        while let Some(row) = reader.next_row().unwrap() {
            rows.push((row.event, row.requested_bytes, row.name.to_owned()));
        }
        rows
    }
}

/// Returns the number of traces at `path` that begin, none of which fails.
fn begun(path: &Path) -> u64 {
    let begun = begin(path);
    assert!(begun.failed.is_empty(), "{begun:?}");
    begun.traces
}

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.folder);
        let _ = fs::remove_file(&self.journal);
    }
}

fn alloc(clock_ns: u64) -> Event {
    let call = Call {
        address: clock_ns << 9,
        bytes: 512,
        status: 0,
        latency_ns: 1,
        library: 0,
        user: 0,
        pool: 0,
        from_torch_allocator: false,
        unreported: false,
    };
    let alloc = AllocCall { call, requested: 512, handle: 0 };
    Payload::DeviceAlloc(alloc).pack(Header::new(clock_ns, Api::CudaMalloc, 0))
}

/// Returns the report of a block at the MiB `place`, with the total after it.
fn report(clock_ns: u64, place: u64, bytes: i64, allocated: usize) -> Event {
    let block = Block {
        address: place << 20,
        bytes,
        allocated,
        reserved: 1 << 20,
        requested: bytes.abs(),
        pool: 0,
        deferred: false,
        form: 0,
    };
    Payload::Block(block).pack(Header::new(clock_ns, Api::CachingAllocator, 0))
}

fn lost(clock_ns: u64, events: u64) -> Event {
    Payload::Lost { events }.pack(Header::new(clock_ns, Api::Memtrace, 0))
}

#[test]
fn repair_reports_events_that_were_dropped_or_died_with_the_overflow_list() {
    let at = Checkpoints { count: 2, overflow_written: [40, 0], parts: [1, 1], ..Checkpoints::default() };
    let killed = Killed::new("lost").with_meta_row();
    let at = Checkpoints { csv: [fs::metadata(&killed.csv).unwrap().len(); 2], ..at };
    // Setup: 30 events were dropped; a row in the journal reports 10 of them. 45 events were on the overflow
    // list; 40 of them are in the trace -> 35 lost events, 25 of them in a new row.
    let killed = killed.with_journal(&at, [30, 45], vec![alloc(2000), lost(2001, 10)]);
    let Ok(Repaired::Finished { rest: Rest { rows: 4, lost: 35, .. }, .. }) = repair(&killed.csv, None)
    else {
        panic!()
    };
    let rows = killed.rows();
    let lost: Vec<i64> = rows.iter().filter(|row| row.0 == EventName::Lost).map(|row| row.1).collect();
    assert_eq!(lost, [10, 25]);
    let (event, _, end) = rows.last().unwrap();
    assert_eq!(*event, EventName::End);
    assert!(end.starts_with("killed lost=35 "), "{end}");
    assert!(rows[3].2.contains("MEMTRACE_BUFFER=1m"), "{}", rows[3].2);
}

#[test]
fn repair_does_not_report_again_what_earlier_parts_report() {
    let at = Checkpoints { count: 1, reported_lost: [0, 12], parts: [1, 1], ..Checkpoints::default() };
    let killed = Killed::new("earlier parts").with_meta_row();
    let at = Checkpoints { csv: [fs::metadata(&killed.csv).unwrap().len(); 2], ..at };
    let killed = killed.with_journal(&at, [12, 0], vec![alloc(2000)]);
    assert!(matches!(repair(&killed.csv, None), Ok(Repaired::Finished { rest: Rest { lost: 12, .. }, .. })));
    let rows = killed.rows();
    assert!(rows.iter().all(|row| row.0 != EventName::Lost), "{rows:?}");
    assert!(rows.last().unwrap().2.starts_with("killed lost=12 "));
}

/// Setup: the last row before the kill is a `brief` row, for three blocks of 512 bytes without rows of their
/// own. The journal has the frees of two of them. Expected: each free becomes a `brief` row, and the totals
/// are those of the allocator.
#[test]
fn blocks_without_rows_are_freed_by_the_events_of_the_journal() {
    let killed = Killed::new("brief").with_meta_row();
    let mut writer = RowWriter::without_header(fs::read(&killed.csv).unwrap());
    let row = Row {
        seq: 2,
        ts_ns: 2,
        device: 0,
        event: EventName::Brief,
        api: "caching_allocator",
        delta_bytes: 1536,
        allocated_bytes: 1536,
        active_bytes: 1536,
        reserved_bytes: 1 << 20,
        ..Row::default()
    };
    writer.write(&row).unwrap();
    let text = writer.into_inner().unwrap();
    fs::write(&killed.csv, &text).unwrap();
    let frees = [1024, 512].into_iter().enumerate();
    let frees = frees.map(|(index, left)| report(2000 + index as u64, index as u64 + 1, -512, left));
    let at = Checkpoints { count: 1, parts: [1, 1], csv: [text.len() as u64; 2], ..Checkpoints::default() };
    let killed = killed.with_journal(&at, [0, 0], frees.collect());
    assert!(matches!(
        repair(&killed.csv, None),
        Ok(Repaired::Finished { rest: Rest { rows: 3, lost: 0, .. }, .. })
    ));
    let mut reader = RowReader::open(&killed.csv).unwrap();
    let mut freed = Vec::new();
    while let Some(row) = reader.next_row().unwrap() {
        if row.seq > 2 && row.event != EventName::End {
            freed.push((row.event, row.alloc_id, row.delta_bytes, row.allocated_bytes));
        }
    }
    assert_eq!(freed, [(EventName::Brief, 0, -512, 1024), (EventName::Brief, 0, -512, 512)]);
}

/// Setup: two threads report a block in the same nanosecond, and the totals say that the second lane's report
/// is the first. A third lane announced a report before one that is in the trace. Expected: the order of the
/// writer thread, which follows the totals and never goes back in a lane.
#[test]
fn events_with_equal_clocks_are_repaired_in_the_order_of_the_writer() {
    let killed = Killed::new("ties").with_meta_row();
    let at = Checkpoints { count: 1, parts: [1, 1], ..Checkpoints::default() };
    let at = Checkpoints { csv: [fs::metadata(&killed.csv).unwrap().len(); 2], ..at };
    let lanes = vec![
        (0, vec![report(2000, 1, 512, 1024), report(2000, 2, 512, 1536)]),
        (0, vec![report(2000, 3, 512, 512)]),
        (1, vec![report(2500, 4, 0, 0), report(1500, 5, 512, 2048)]),
    ];
    killed.write_lanes(&at, [0, 0], lanes);
    assert!(matches!(repair(&killed.csv, None), Ok(Repaired::Finished { rest: Rest { lost: 0, .. }, .. })));
    let mut reader = RowReader::open(&killed.csv).unwrap();
    let mut rows = Vec::new();
    while let Some(row) = reader.next_row().unwrap() {
        if row.event == EventName::Alloc {
            rows.push((row.ts_ns, row.allocated_bytes));
        }
    }
    assert_eq!(rows, [(1000, 512), (1000, 1024), (1000, 1536), (1500, 2048)]);
}

#[test]
fn journal_of_another_version_is_left_alone() {
    let killed = Killed::new("another version").with_meta_row();
    fs::write(&killed.journal, b"MEMTRJ02 and so on").unwrap();
    let before = fs::read(&killed.csv).unwrap();
    assert!(matches!(repair(&killed.csv, None), Ok(Repaired::Refused(_))));
    assert_eq!(fs::read(&killed.csv).unwrap(), before);
    assert!(killed.journal.exists());
}

#[test]
fn a_file_that_is_no_journal_is_refused_with_the_reason() {
    for reason in ["regular file", "larger than any journal"] {
        let killed = Killed::new("refused").with_meta_row();
        match reason {
            "regular file" => fs::create_dir(&killed.journal).unwrap(),
            _ => fs::File::create(&killed.journal).unwrap().set_len(u64::from(u32::MAX) * 4).unwrap(),
        }
        let repaired = repair(&killed.csv, None).unwrap();
        assert!(matches!(repaired, Repaired::Refused(why) if why.contains(reason)), "{repaired:?}");
        let _ = fs::remove_dir(&killed.journal);
    }
}

#[test]
fn trace_without_rows_begins_with_the_meta_row_of_its_journal() {
    for (name, left) in [("empty", Some("")), ("cut header row", Some("seq,ts_")), ("not yet there", None)] {
        let killed = Killed::new(name).with_journal(&Checkpoints::default(), [3, 0], vec![alloc(2000)]);
        if let Some(left) = left {
            fs::write(&killed.csv, left).unwrap();
        }
        assert_eq!(begun(&killed.folder), 1, "{name}");
        // The trace has its meta row now -> the second call begins no trace.
        assert_eq!(begun(&killed.folder), 0, "{name}");
        assert!(
            matches!(repair(&killed.csv, None), Ok(Repaired::Finished { rest: Rest { lost: 3, .. }, .. })),
            "{name}"
        );
        let events: Vec<EventName> = killed.rows().iter().map(|row| row.0).collect();
        let expected = [EventName::Meta, EventName::ExtAlloc, EventName::Lost, EventName::End];
        assert_eq!(events, expected, "{name}");
        assert!(!killed.journal.exists());
    }
}

#[test]
fn a_trace_with_a_long_end_row_is_complete() {
    let killed = Killed::new("long end row").with_meta_row();
    let words = format!("exit lost=0 guessed_calls={}", "cublasFunction|".repeat(400));
    assert!(words.len() > 4096, "longer than the rows of other events");
    let mut writer = RowWriter::without_header(Vec::new());
    writer.write(&Row { seq: 2, event: EventName::End, name: &words, ..Row::default() }).unwrap();
    writer.flush().unwrap();
    let mut trace = fs::read(&killed.csv).unwrap();
    trace.extend_from_slice(writer.get_ref());
    fs::write(&killed.csv, &trace).unwrap();
    // The process was killed before it removed its journal.
    let at = Checkpoints { count: 1, parts: [1, 1], csv: [0; 2], ..Checkpoints::default() };
    let killed = killed.with_journal(&at, [0, 0], vec![alloc(2000)]);
    assert_eq!(repair(&killed.csv, None).unwrap(), Repaired::Complete);
    assert_eq!(fs::read(&killed.csv).unwrap(), trace);
    // The same row without its line end is not complete.
    fs::write(&killed.csv, &trace[..trace.len() - 1]).unwrap();
    assert!(matches!(repair(&killed.csv, None), Ok(Repaired::Finished { .. })));
}

#[test]
fn a_part_beside_a_part_of_an_earlier_trace_is_repaired() {
    let killed = Killed::new("numbered part").with_meta_row();
    let part_of = |journal: &Path| {
        let schema = SCHEMA_VERSION.to_owned();
        let meta = Meta { schema, journal: journal.display().to_string(), part: 2, ..Meta::default() };
        let json = meta.to_json().unwrap();
        let mut writer = RowWriter::new(Vec::new());
        writer.write(&Row { seq: 1, event: EventName::Meta, name: &json, ..Row::default() }).unwrap();
        writer.flush().unwrap();
        writer.get_ref().clone()
    };
    let live = killed.folder.join("vm.r0.1.part2-2.csv");
    fs::write(&live, part_of(&killed.journal)).unwrap();
    let csv = [fs::metadata(&live).unwrap().len(); 2];
    // The earlier trace has its end row.
    let mut old = part_of(Path::new(""));
    let mut writer = RowWriter::without_header(Vec::new());
    writer.write(&Row { seq: 2, event: EventName::End, name: "rotated", ..Row::default() }).unwrap();
    writer.flush().unwrap();
    old.extend_from_slice(writer.get_ref());
    fs::write(killed.folder.join("vm.r0.1.part2.csv"), &old).unwrap();
    let at = Checkpoints { count: 1, parts: [2, 2], csv, ..Checkpoints::default() };
    let journals = killed.folder.join("journals");
    fs::create_dir_all(&journals).unwrap();
    let killed = killed.with_journal(&at, [0, 0], vec![alloc(2000)]);
    // No sweep takes the journal for an orphan.
    let journal = journals.join(journal_name(NOBODY, 1));
    fs::copy(&killed.journal, &journal).unwrap();
    let swept = crate::sweep(std::slice::from_ref(&journals), None);
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1), "{swept:?}");
    assert!(matches!(repair(&live, None), Ok(Repaired::Finished { rest: Rest { rows: 2, .. }, .. })));
    // The first part had no end row, either.
    assert_eq!(killed.rows().last().unwrap().0, EventName::End);
    assert_eq!(fs::read(killed.folder.join("vm.r0.1.part2.csv")).unwrap(), old);
    assert!(!killed.journal.exists());
    assert!(crate::sweep(std::slice::from_ref(&journals), None).left.is_empty());
}

#[test]
fn rows_of_a_killed_repair_are_not_there_twice() {
    let events = || vec![alloc(2000), alloc(3000)];
    // Setup: the process was killed before its first checkpoint (`count` 0), or after one checkpoint (1).
    for count in [0, 1] {
        let killed = Killed::new("killed repair").with_meta_row();
        let meta_row = fs::read(&killed.csv).unwrap();
        let at = Checkpoints { count, parts: [1, 1], ..Checkpoints::default() };
        let csv = [if count == 0 { 0 } else { meta_row.len() as u64 }; 2];
        let killed = killed.with_journal(&Checkpoints { csv, ..at }, [0, 0], events());
        repair(&killed.csv, None).unwrap();
        let whole = fs::read(&killed.csv).unwrap();
        for length in [meta_row.len() + 1, (meta_row.len() + whole.len()) / 2, whole.len() - 1] {
            fs::write(&killed.csv, &whole[..length]).unwrap();
            killed.write_journal(&Checkpoints { csv, ..at }, [0, 0], events());
            assert!(
                matches!(
                    repair(&killed.csv, None),
                    Ok(Repaired::Finished { rest: Rest { rows: 3, .. }, .. })
                ),
                "{count} {length}"
            );
            assert_eq!(fs::read(&killed.csv).unwrap(), whole, "{count} {length}");
        }
    }
}

#[test]
fn begin_changes_no_trace_that_has_rows_and_no_other_folder() {
    let killed = Killed::new("has rows").with_meta_row();
    let killed = killed.with_journal(&Checkpoints::default(), [0, 0], vec![alloc(2000)]);
    let before = fs::read(&killed.csv).unwrap();
    assert_eq!(begun(&killed.folder), 0);
    fs::write(&killed.csv, "").unwrap();
    assert_eq!(begun(Path::new("/proc")), 0);
    assert_eq!(fs::read(&killed.csv).unwrap(), b"");
    // Setup: a link at the path of the trace -> an error, and the target of the link is unchanged.
    let victim = killed.folder.join("victim");
    fs::write(&victim, "").unwrap();
    fs::remove_file(&killed.csv).unwrap();
    std::os::unix::fs::symlink(&victim, &killed.csv).unwrap();
    // Setup: more traces in this folder, whose journals are found before or after this one -> all of them begin.
    let others = [2, 3, 4, 5, 6].map(|number| {
        let mut other = Killed::new("has rows");
        other.csv = other.folder.join(format!("vm.r0.{number}.csv"));
        other.with_journal(&Checkpoints::default(), [0, 0], vec![alloc(2000)])
    });
    let all = begin(&killed.folder);
    assert_eq!((all.traces, all.failed.len()), (5, 1), "{all:?}");
    assert_eq!(all.failed[0].0, killed.csv);
    assert!(others.iter().all(|other| other.rows()[0].0 == EventName::Meta));
    assert_eq!(fs::read(&victim).unwrap(), b"");
    assert!(!before.is_empty());
}

#[test]
fn begin_takes_nothing_from_a_journal_whose_meta_row_is_another_ones() {
    for json in ["", "{", "{\"journal\": \"/dev/zero\"}", "null"] {
        let mut killed = Killed::new("meta of another");
        killed.json = json.to_owned();
        let killed = killed.with_journal(&Checkpoints::default(), [0, 0], vec![alloc(2000)]);
        fs::write(&killed.csv, "").unwrap();
        assert_eq!(begun(&killed.folder), 0, "{json}");
        assert_eq!(fs::read(&killed.csv).unwrap(), b"", "{json}");
    }
}

#[test]
fn begin_and_repair_by_many_at_once_make_one_complete_trace() {
    let killed = Killed::new("many at once");
    let killed = killed.with_journal(&Checkpoints::default(), [3, 0], vec![alloc(2000)]);
    fs::write(&killed.csv, "").unwrap();
    let begun: u64 = std::thread::scope(|scope| {
        let begins: Vec<_> = (0..8).map(|_| scope.spawn(|| begun(&killed.folder))).collect();
        begins.into_iter().map(|begin| begin.join().unwrap()).sum()
    });
    assert_eq!(begun, 1);
    assert!(matches!(repair(&killed.csv, None), Ok(Repaired::Finished { rest: Rest { lost: 3, .. }, .. })));
}

#[test]
fn a_fifo_in_place_of_a_trace_is_refused_and_nobody_waits_for_it() {
    let killed = Killed::new("fifo");
    let killed = killed.with_journal(&Checkpoints { count: 1, ..Checkpoints::default() }, [0, 0], Vec::new());
    let journals = killed.folder.join("journals");
    fs::create_dir_all(&journals).unwrap();
    fs::copy(&killed.journal, journals.join(journal_name(NOBODY, 1))).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &killed.csv, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0)
        .unwrap();
    let swept = crate::sweep(std::slice::from_ref(&journals), None);
    assert_eq!((swept.removed.len(), swept.left.len()), (0, 1), "{swept:?}");
    assert!(repair(&killed.csv, None).is_err());
    killed.write_journal(&Checkpoints::default(), [0, 0], Vec::new());
    assert_eq!(begin(&killed.folder).failed.len(), 1);
}
