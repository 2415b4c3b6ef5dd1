//! Fuzzes `memtrace check --repair` with the journal of a killed process. Whatever the journal contains, the result is a
//! complete trace or an unchanged file.
#![no_main]

use std::fs;
use std::path::{Path, PathBuf};

use libfuzzer_sys::fuzz_target;
use memtrace_recover::testing::{Checkpoints, Head, Left, bytes, event, journal_with, of_trace};
use memtrace_recover::{Repaired, repair};
use memtrace_trace::csv::{RowReader, RowWriter};
use memtrace_trace::journal::{Run, journal_name, names_path};
use memtrace_trace::{Event, Meta, SCHEMA_VERSION};
use memtrace_trace::{EventName, Row};

/// Reads the input byte by byte; after its end every byte is 0.
struct Words<'a>(&'a [u8]);

impl Words<'_> {
    fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Returns a number: mostly small, sometimes any `u64`.
    fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=199 => u64::from(small),
            200..=230 => u64::from(self.byte()) << (self.byte() % 64),
            _ => u64::from_le_bytes(std::array::from_fn(|_| self.byte())),
        }
    }

    fn event(&mut self) -> Event {
        let raw = self.byte();
        if raw > 250 {
            return event(&std::array::from_fn::<u8, 64, _>(|_| self.byte()));
        }
        let mut bytes = [0; 64];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &self.number().to_le_bytes());
        // Kind, call, device, flags, status, pool.
        put(8, &[raw % 24, self.byte() % 80, (self.byte() as i8 % 4 - 1) as u8, self.byte()]);
        put(12, &[self.byte() / 128, 0, self.byte() % 4, 0]);
        // Address, bytes, allocated, reserved, context and step, extra.
        for at in (16..64).step_by(8) {
            put(at, &self.number().to_le_bytes());
        }
        event(&bytes)
    }
}

/// Returns the trace up to the kill: a meta row that names the journal, and some rows.
fn trace(words: &mut Words<'_>, left: &str) -> Vec<u8> {
    let meta = Meta {
        schema: SCHEMA_VERSION.to_owned(),
        journal: left.to_owned(),
        part: u32::from(words.byte() % 3),
        ..Meta::default()
    };
    let json = serde_json::to_string(&meta).unwrap();
    let mut writer = RowWriter::new(Vec::new());
    writer.write(&Row { seq: 1, event: EventName::Meta, name: &json, ..Row::default() }).unwrap();
    for seq in 2..2 + i64::from(words.byte() % 6) {
        let event = EventName::ALL[usize::from(words.byte()) % EventName::ALL.len()];
        let row = Row {
            seq,
            event,
            device: i32::from(words.byte() % 4) - 1,
            alloc_id: words.number() as i64,
            addr: words.number() as i64,
            delta_bytes: words.number() as i64,
            allocated_bytes: words.number() as i64,
            active_bytes: words.number() as i64,
            reserved_bytes: words.number() as i64,
            op: "aten::mm",
            ..Row::default()
        };
        writer.write(&row).unwrap();
    }
    writer.flush().unwrap();
    let mut file = writer.get_ref().clone();
    // The process was killed within a row.
    let torn = usize::from(words.byte() % 32);
    file.truncate(file.len() - torn.min(file.len() / 4));
    file
}

/// Returns a path for a file of this process, in memory if possible.
fn place() -> PathBuf {
    let shm = Path::new("/dev/shm");
    let folder = if shm.is_dir() { shm.to_owned() } else { std::env::temp_dir() };
    folder.join(format!("memtrace-fuzz-{}.csv", std::process::id()))
}

fuzz_target!(|input: &[u8]| {
    let csv = place();
    let left = csv.with_file_name(journal_name(u32::MAX, std::process::id().into()));
    let mut words = Words(input);
    let file = trace(&mut words, &left.display().to_string());
    fs::write(&csv, &file).unwrap();
    let mut lengths = |all: usize| match words.byte() {
        0..=199 => all as u64,
        _ => words.number(),
    };
    let csv_lengths = [lengths(file.len()), lengths(file.len())];
    let (count, parts) =
        (u64::from(words.byte() % 4), [u64::from(words.byte() % 3), u64::from(words.byte() % 3)]);
    let names: Vec<u8> = (0..words.byte() % 8).flat_map(|_| bytes(&words.event())).collect();
    let names_lengths = [words.number().wrapping_mul(64), words.number().wrapping_mul(64)];
    let at = Checkpoints { count, parts, csv: csv_lengths, names: names_lengths, ..Checkpoints::default() };
    let mut chunks = Vec::new();
    for _ in 0..words.byte() % 4 {
        let owner = [u32::from(words.byte()), u32::from(words.byte() % 3), u32::from(words.byte() % 3)];
        let (in_use, consumed) = (words.byte() < 230, [words.number() as u32, words.number() as u32]);
        let slots: Vec<Event> = (0..words.byte() % 64).map(|_| words.event()).collect();
        let committed = if words.byte() < 200 { slots.len() as u32 } else { words.number() as u32 };
        chunks.push(Left { owner, in_use, committed, consumed, slots });
    }
    // No process has this id, so the journal's process counts as ended.
    let run = Run {
        pid: u32::MAX,
        rank: u32::from(words.byte()),
        start_ns: words.number(),
        process_start: 1,
        power2_divisions: words.number(),
        rules: u64::from(words.byte() % 4),
    };
    let head = Head { losses: [words.number(), words.number()], ..Head::default() };
    let mut whole = of_trace(journal_with(&head, &run, &at, &chunks), &csv);
    if words.byte() > 240 {
        // Cut the journal at an arbitrary length, as on a full disk.
        whole.truncate((words.number() as usize).wrapping_mul(61));
    }
    fs::write(&left, &whole).unwrap();
    fs::write(names_path(&left), &names).unwrap();
    let before = fs::read(&csv).unwrap();
    let outcome = repair(&csv);
    if let Ok(Repaired::Finished { .. }) = outcome {
        let mut reader = RowReader::open(&csv).unwrap();
        let mut last = (0, EventName::Meta);
        while let Some(row) = reader.next_row().expect("a row that cannot be read again") {
            assert_eq!(row.seq, last.0 + 1);
            last = (row.seq, row.event);
        }
        assert_eq!(last.1, EventName::End);
        assert!(matches!(repair(&csv), Ok(Repaired::Complete)));
        assert!(!left.exists());
    } else {
        assert_eq!(fs::read(&csv).unwrap(), before, "touched: {outcome:?}");
    }
});
