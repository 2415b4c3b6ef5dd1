//! Tests that write rows to a file with repeats and read them back.

use std::path::Path;

use super::*;
use crate::columns::index_of;
use crate::csv::{RowReader, RowWriter};
use crate::meta::Meta;
use crate::{Category, SCHEMA_VERSION};

/// The rows of a program, with numbers and totals as the recorder writes them.
#[derive(Default)]
struct Program {
    rows: Vec<StoredRow>,
    clock: i64,
    step: i64,
    totals: [i64; 3],
    live: Vec<(i64, i64, i64, i64)>,
}

impl Program {
    fn row(&mut self, row: &Row<'_>) {
        self.clock += 100 + self.rows.len() as i64 % 7;
        let seq = self.rows.len() as i64 + 2;
        let [allocated_bytes, active_bytes, reserved_bytes] = self.totals;
        let row = Row {
            seq,
            ts_ns: self.clock,
            pid: 1,
            alloc_id: if row.alloc_id < 0 { seq } else { row.alloc_id },
            allocated_bytes,
            active_bytes,
            reserved_bytes,
            ..*row
        };
        self.rows.push(StoredRow::new(&row, self.rows.last()));
    }

    fn alloc(&mut self, addr: i64, bytes: i64) {
        let [allocated, active, _] = &mut self.totals;
        (*allocated, *active) = (*allocated + bytes, *active + bytes);
        self.live.push((addr, bytes, self.rows.len() as i64 + 2, self.step));
        self.row(&Row {
            event: EventName::Alloc,
            device: 0,
            alloc_id: -1,
            addr,
            delta_bytes: bytes,
            requested_bytes: bytes - 3,
            step: self.step,
            phase: "forward",
            category: Category::Activation,
            ..Row::default()
        });
    }

    fn free(&mut self, addr: i64) {
        let at = self.live.iter().position(|live| live.0 == addr).unwrap();
        let (_, bytes, alloc_id, step) = self.live.remove(at);
        let [allocated, active, _] = &mut self.totals;
        (*allocated, *active) = (*allocated - bytes, *active - bytes);
        self.row(&Row {
            event: EventName::Free,
            device: 0,
            alloc_id,
            addr,
            delta_bytes: -bytes,
            requested_bytes: bytes - 3,
            step,
            phase: "forward",
            category: Category::Activation,
            ..Row::default()
        });
    }

    fn named(&mut self, event: EventName, name: &str) {
        self.row(&Row { event, api: "nvtx", name, step: self.step, ..Row::default() });
    }

    /// Adds a step. Its last block lives until the next step and is at one of two addresses, so that two
    /// patterns alternate.
    fn step(&mut self, blocks: i64) {
        self.step += 1;
        self.named(EventName::RangeBegin, "step");
        for block in 0..blocks {
            self.alloc(1 << 20 | block << 10, 512 << (block % 5));
        }
        let loss = |step: i64| 1 << 30 | (step % 2) << 10;
        self.alloc(loss(self.step), 512);
        if self.step > 1 {
            self.free(loss(self.step - 1));
        }
        for block in (0..blocks).rev() {
            self.free(1 << 20 | block << 10);
        }
        self.named(EventName::RangeEnd, "step");
    }
}

fn meta(repeats: bool) -> String {
    Meta { schema: SCHEMA_VERSION.to_owned(), repeats, ..Meta::default() }.to_json().unwrap()
}

/// Writes these rows to a file. A run ends after every `flush_each` rows, as in a flush; 0 means never.
fn written(rows: &[StoredRow], flush_each: usize) -> String {
    let mut writer = RowWriter::new(Vec::new());
    let mut finder = RepeatFinder::new(false);
    let meta = meta(true);
    let first = Row { seq: 1, event: EventName::Meta, name: &meta, ..Row::default() };
    finder.note(&first);
    writer.write(&first).unwrap();
    for (index, row) in rows.iter().enumerate() {
        finder.row(&row.row(), &mut |row| writer.write(row)).unwrap();
        if flush_each > 0 && index % flush_each == 0 {
            finder.end_run(&mut |row| writer.write(row)).unwrap();
        }
    }
    finder.end_run(&mut |row| writer.write(row)).unwrap();
    String::from_utf8(writer.into_inner().unwrap()).unwrap()
}

/// Returns the rows after the meta row, or the first error.
fn read(text: &str) -> Result<Vec<StoredRow>, String> {
    let mut reader =
        RowReader::new(Path::new("t.csv"), text.as_bytes()).map_err(|error| error.to_string())?;
    let mut rows = Vec::new();
    while let Some(row) = reader.next_row().map_err(|error| error.to_string())? {
        rows.push(StoredRow::new(&row, rows.last()));
    }
    rows.remove(0);
    Ok(rows)
}

/// Asserts that reading the file returns all rows in order. Inside runs, times are scaled, so only their
/// order and the last time are checked.
fn assert_same(text: &str, rows: &[StoredRow]) {
    let found = read(text).unwrap();
    assert_eq!(found.len(), rows.len());
    for (found, row) in found.iter().zip(rows) {
        assert_eq!(Row { ts_ns: 0, ..found.row() }, Row { ts_ns: 0, ..row.row() });
    }
    assert!(found.windows(2).all(|pair| pair[0].row().ts_ns <= pair[1].row().ts_ns));
    assert_eq!(found.last().unwrap().row().ts_ns, rows.last().unwrap().row().ts_ns);
}

fn repeats_in(text: &str) -> usize {
    text.lines().filter(|line| line.contains(",repeat,")).count()
}

#[test]
fn repeats_of_a_loop_are_one_row_for_each_step_and_come_back_as_its_rows() {
    let mut program = Program::default();
    (0..200).for_each(|_| program.step(40));
    let text = written(&program.rows, 0);
    assert_same(&text, &program.rows);
    // Two patterns alternate, and the first step of each is written in full. The very first step is in full,
    // too, because it has no earlier block to free -> fewer than three steps of 90 plain rows.
    let plain = text.lines().count() - 2 - repeats_in(&text);
    assert!(plain < 3 * 90 && repeats_in(&text) < 210, "{plain} rows, {} repeats", repeats_in(&text));
    for flush_each in [1, 2, 3, 7, 50, 1000] {
        assert_same(&written(&program.rows, flush_each), &program.rows);
    }
}

#[test]
fn repeats_go_on_where_blocks_stay_for_good_and_rows_come_in_between() {
    let mut program = Program::default();
    for step in 0..300_i64 {
        if step % 7 == 3 {
            // A block that is never freed -> all later rows have different totals.
            program.alloc(1 << 40 | step << 12, 4096);
        }
        if step % 11 == 5 {
            program.row(&Row { event: EventName::Sample, device: 0, name: "total=1", ..Row::default() });
        }
        if step == 150 {
            program.row(&Row { event: EventName::Oom, device: 0, status: 2, ..Row::default() });
        }
        program.step(if step % 100 == 99 { 25 } else { 30 });
    }
    let text = written(&program.rows, 0);
    assert_same(&text, &program.rows);
    assert!(text.len() * 10 < written_plain(&program.rows).len());
    assert_eq!(text.lines().filter(|line| line.contains(",oom,")).count(), 1);
}

fn written_plain(rows: &[StoredRow]) -> String {
    let mut writer = RowWriter::new(Vec::new());
    rows.iter().for_each(|row| writer.write(&row.row()).unwrap());
    String::from_utf8(writer.into_inner().unwrap()).unwrap()
}

/// Writes random rows, with a few different events, addresses, sizes and texts, and reads them back -> the
/// same rows.
#[test]
fn repeats_change_no_row_of_any_program() {
    let mut state = 7_u64;
    let mut random = |most: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    for round in 0..60 {
        let mut program = Program { step: -1, ..Program::default() };
        for _ in 0..400 {
            let kinds =
                [EventName::Tag, EventName::FreeCompleted, EventName::HostAlloc, EventName::SegmentAlloc];
            match random(8) {
                0..3 => program.alloc(random(4) as i64 + 1, 512),
                3..5 if !program.live.is_empty() => {
                    let addr = program.live[random(program.live.len() as u64) as usize].0;
                    program.free(addr);
                }
                5 => program.step += random(3) as i64 - i64::from(program.step > 2),
                6 => program.named(EventName::Mark, ["a", "b"][random(2) as usize]),
                _ => {
                    let row = Row {
                        event: kinds[random(4) as usize],
                        device: random(2) as i32 - 1,
                        addr: random(4) as i64 + 1,
                        alloc_id: random(6) as i64 - 1,
                        step: random(3) as i64 - 1,
                        delta_bytes: if round % 2 == 0 { 512 } else { i64::MAX - random(2) as i64 },
                        ..Row::default()
                    };
                    program.row(&row);
                }
            }
        }
        for flush_each in [0, 5] {
            let text = written(&program.rows, flush_each);
            let bounded: Vec<StoredRow> =
                program.rows.iter().map(|row| StoredRow::new(&row.row().bounded(), None)).collect();
            assert_same(&text, &bounded);
        }
    }
}

/// The rows of the first part of the program do not repeat -> the search pauses, and the file is hardly
/// larger than without repeats. After the pause, the rows of a loop are written as repeats.
#[test]
fn repeats_are_not_looked_for_while_there_are_few() {
    let mut program = Program::default();
    for block in 0..60_000 {
        program.alloc(block << 9, 512);
    }
    (0..400).for_each(|_| program.step(100));
    let text = written(&program.rows, 0);
    assert_same(&text, &program.rows);
    let repeats: Vec<usize> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| line.contains(",repeat,"))
        .map(|(line, _)| line)
        .collect();
    // The first 16,384 rows are a trial that fails, and the next 65,536 rows are written without a search. So
    // no repeat comes before row 81,920.
    assert!(repeats[0] > 81_920 && repeats.len() > 250, "{} repeats from line {}", repeats.len(), repeats[0]);
}

#[test]
fn repeats_stop_where_a_step_has_detail() {
    let mut program = Program::default();
    for step in 0..20 {
        if step == 10 || step == 12 {
            let mark = if step == 10 { "detail on: schedule" } else { "detail off" };
            program.row(&Row { event: EventName::Mark, api: "detail", name: mark, ..Row::default() });
        }
        program.step(30);
    }
    let text = written(&program.rows, 0);
    assert_same(&text, &program.rows);
    let steps: Vec<&str> = text
        .lines()
        .filter(|line| line.contains(",repeat,"))
        .map(|line| line.split(',').nth(index_of("step")).unwrap())
        .collect();
    assert!(steps.contains(&"10") && steps.contains(&"13"), "{steps:?}");
    assert!(!steps.contains(&"11") && !steps.contains(&"12"), "{steps:?}");
}

/// Reads `text` with `value` in a column of its first `repeat` row.
fn damaged(text: &str, column: &str, value: &str) -> Result<Vec<StoredRow>, String> {
    let mut done = false;
    let lines = text.lines().map(|line| {
        if done || !line.contains(",repeat,") {
            return line.to_owned();
        }
        done = true;
        let mut fields: Vec<&str> = line.split(',').collect();
        fields[index_of(column)] = value;
        fields.join(",")
    });
    let text = lines.collect::<Vec<_>>().join("\n") + "\n";
    read(&text)
}

#[test]
fn repeats_that_name_nothing_that_is_there_are_refused() {
    let mut program = Program::default();
    (0..20).for_each(|_| program.step(30));
    let text = written(&program.rows, 0);
    for (column, values) in [
        ("requested_bytes", &["0", "-1", "65537", "4611686018427387904", "9223372036854775807", "600"][..]),
        ("alloc_id", &["0", "-5", "1", "4611686018427387904", "9223372036854775807", "-9223372036854775808"]),
        ("device", &["5", "-7"]),
        ("latency_ns", &["-1"]),
    ] {
        for value in values {
            let error = damaged(&text, column, value).unwrap_err();
            assert!(error.contains("repeat: "), "{column} {value}: {error}");
        }
    }
    // Numbers at their bounds -> no overflow and no error.
    for (column, value) in [("allocated_bytes", "72057594037927936"), ("latency_ns", "4611686018427387904")] {
        damaged(&text, column, value).unwrap();
    }
    // The meta row excludes repeats, but the file has a `repeat` row -> an error.
    let error = read(&text.replace(r#"""repeats"":true"#, r#"""repeats"":false"#)).unwrap_err();
    assert!(error.contains(NO_REPEATS), "{error}");
    // A file that has only the `repeat` rows -> an error, because the repeated rows are missing.
    let start = text.lines().take(2).chain(text.lines().filter(|line| line.contains(",repeat,")));
    let error = read(&(start.collect::<Vec<_>>().join("\n") + "\n")).unwrap_err();
    assert!(error.contains("are missing"), "{error}");
}

#[test]
fn repeats_take_no_more_memory_than_the_rows_that_they_may_reach() {
    let mut window = Window::default();
    let row = |seq| {
        let row = Row { seq, event: EventName::Mark, device: 0, ts_ns: seq, ..Row::default() };
        StoredRow::new(&row, None)
    };
    (1..=100).for_each(|seq| window.add(row(seq)));
    let mut seq = 101;
    while seq < 3 * WINDOW as i64 {
        let repeat = Repeat {
            seq,
            ts_ns: seq,
            duration_ns: 99,
            of: seq - 100,
            rows: 100,
            device: 0,
            totals: [0; 3],
            step: 0,
        };
        let mut expansion = window.begin(repeat).unwrap();
        while let Some(made) = window.next_row(&mut expansion) {
            assert_eq!((made.numbers.seq, made.numbers.ts_ns), (seq, seq));
            seq += 1;
        }
    }
    assert_eq!(window.rows.len(), WINDOW);
    let far = Repeat { seq, ts_ns: seq, duration_ns: 0, of: 1, rows: 1, device: 0, totals: [0; 3], step: 0 };
    assert!(window.begin(far).unwrap_err().contains("further back"));
}
