//! The CSV format: files that a reader must accept, and files that it must refuse without a panic.

use std::io::Write;
use std::path::Path;

use memtrace_analysis::exports;
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports;
use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::columns::{MAX_BYTES, MAX_NUMBER};
use memtrace_trace::{EventName, Row};

/// Returns a trace with more rows than a block.
fn long() -> Vec<u8> {
    let mut trace = TraceBuilder::default();
    trace.segment(20 << 20);
    for step in 0..12_000 {
        let row = Row { step, module: "GPT.h.0.mlp", op: "aten::mm", phase: "forward", ..Row::default() };
        let id = trace.alloc(512 * (step % 7 + 1), row);
        trace.free(id, 512 * (step % 7 + 1), row);
    }
    trace.finish()
}

fn summary(path: &Path, lenient: bool) -> Result<serde_json::Value, String> {
    let options = Options { lenient, ..Options::default() };
    let input = Input::open(path).map_err(|error| error.to_string())?;
    let answer = reports::find("summary").unwrap().run(&[input], &options);
    answer.map(|answer| answer.json).map_err(|error| error.to_string())
}

fn write(folder: &tempfile::TempDir, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::encode_all(bytes, 3).unwrap()
}

#[test]
fn compressed_traces_give_the_answers_of_plain_traces() {
    let folder = tempfile::tempdir().unwrap();
    let bytes = long();
    assert!(bytes.len() > 3 << 20, "the test must cross blocks: {}", bytes.len());
    let (head, tail) = bytes.split_at(bytes.len() / 3);
    let plain = summary(&write(&folder, "a.csv", &bytes), false).unwrap();
    let without_path = |mut value: serde_json::Value| {
        value["processes"][0]["file"].take();
        value
    };
    let plain = without_path(plain);
    assert_eq!(plain["processes"][0]["rows"], 24_003);
    for (name, bytes) in [
        ("b.csv.gz", gzip(&bytes)),
        ("b2.csv.gz", [gzip(head), gzip(tail)].concat()),
        ("c.csv.zst", zstd(&bytes)),
        ("c2.csv.zst", [zstd(head), zstd(tail)].concat()),
    ] {
        let packed = summary(&write(&folder, name, &bytes), false).unwrap();
        assert_eq!(without_path(packed), plain, "{name}");
    }
}

#[test]
fn the_error_of_a_damaged_trace_names_the_line() {
    let folder = tempfile::tempdir().unwrap();
    let text = String::from_utf8(long()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    for at in [2, 5, 5000, 24_000] {
        let mut damaged = lines.clone();
        let broken = format!("x{}", damaged[at]);
        damaged[at] = &broken;
        let path = write(&folder, "a.csv", (damaged.join("\n") + "\n").as_bytes());
        let error = summary(&path, false).unwrap_err();
        assert!(error.contains(&format!("a.csv:{}: column", at + 1)), "{error}");
        let answer = summary(&path, true).unwrap();
        assert_eq!(answer["processes"][0]["rows"], 24_002);
    }
}

#[test]
fn hostile_trace_files_give_an_error_and_no_panic() {
    let folder = tempfile::tempdir().unwrap();
    let good = long();
    let head: Vec<u8> = good.split_inclusive(|byte| *byte == b'\n').take(2).flatten().copied().collect();
    let with = |tail: &[u8]| [head.as_slice(), tail].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("nothing", Vec::new()),
        ("one byte", vec![b'\n']),
        ("zeros", vec![0; 5 << 20]),
        ("one line without an end", vec![b'a'; 40 << 20]),
        ("commas", with(&vec![b','; 3 << 20])),
        ("an open quote", with(b"2,\"open\n3,4\n")),
        ("quotes", with(&vec![b'"'; 3 << 20])),
        ("not text", with(b"\xff\xfe,\xff\n")),
        ("a number too long", with(format!("{},0\n", "9".repeat(4000)).as_bytes())),
        ("cut gzip", gzip(&good)[..2000].to_vec()),
        ("cut zstd", zstd(&good)[..2000].to_vec()),
        ("gzip of nothing", gzip(b"")),
        ("zstd magic alone", vec![0x28, 0xB5, 0x2F, 0xFD]),
    ];
    for (what, bytes) in cases {
        let path = write(&folder, "a.csv", &bytes);
        let error = summary(&path, false).expect_err(what);
        assert!(error.contains("a.csv"), "{what}: {error}");
        // Reads the file leniently, too: it must not panic, whether it succeeds or not.
        let _ = summary(&path, true);
    }
}

#[test]
fn extreme_numbers_in_a_trace_overflow_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let mut trace = TraceBuilder::default();
    for delta_bytes in [LARGE, LARGE, -LARGE, -LARGE] {
        let row = Row {
            device: 127,
            event: EventName::Alloc,
            alloc_id: MOST,
            addr: MOST,
            delta_bytes,
            allocated_bytes: delta_bytes,
            active_bytes: -LARGE,
            reserved_bytes: LARGE,
            requested_bytes: -LARGE,
            step: MOST,
            ts_ns: -MOST,
            ..Row::default()
        };
        trace.raw(row);
        trace.raw(Row { event: EventName::SegmentMap, ..row });
        trace.raw(Row { event: EventName::SegmentUnmap, ..row });
        trace.raw(Row { event: EventName::ExtAlloc, ..row });
        trace.raw(Row { event: EventName::Free, ..row });
        trace.raw(Row { event: EventName::Tag, ..row });
        trace.raw(Row { event: EventName::Oom, ..row });
        trace.raw(Row { event: EventName::Op, ..row });
        trace.raw(Row { event: EventName::Lost, requested_bytes: LARGE, ..row });
    }
    let bytes = trace.finish();
    let path = write(&folder, "a.csv", &bytes);
    let more = String::from_utf8(bytes).unwrap().replace(&LARGE.to_string(), &i64::MAX.to_string());
    let error = summary(&write(&folder, "b.csv", more.as_bytes()), false).unwrap_err();
    assert!(error.contains("expected an integer"), "{error}");
    for export in exports::EXPORTS {
        let mut options = Options::default();
        for flag in export.flags() {
            options.values.insert(flag.name, flag.default.to_owned());
        }
        let place = folder.path().join("exports").join(export.name());
        let answer = exports::run(*export, &Input::open(&path).unwrap(), &options, Some(&place));
        assert!(answer.is_err() || place.exists(), "{}", export.name());
    }
    for report in reports::with_views() {
        let inputs = vec![Input::open(&path).unwrap(); report.inputs().len()];
        let mut options = Options::default();
        for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
            options.values.insert(flag.name, flag.default.to_owned());
        }
        if let Ok(answer) = report.run(&inputs, &options) {
            assert!(!answer.text().is_empty());
        }
    }
}

/// A pseudo-random generator, with the same numbers in every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number near an extreme: near 0, near a size or address, or near the bound of a column or of
    /// its type; at most 2 away from it, and with either sign.
    fn extreme(&mut self) -> i64 {
        let bound = [0, 1 << 20, 1 << 47, LARGE, MOST, i64::MAX][self.next() as usize % 6];
        let near = bound.saturating_add(self.next() as i64 % 3);
        if self.next().is_multiple_of(2) { near } else { near.saturating_neg() }
    }
}

const LARGE: i64 = MAX_BYTES.cast_signed();
const MOST: i64 = MAX_NUMBER.cast_signed();

/// Writes rows as the writer of a traced process does.
struct Sink(memtrace_trace::csv::RowWriter<Vec<u8>>);

impl memtrace_encode::RowSink for Sink {
    type Error = std::io::Error;
    fn row(&mut self, row: &Row<'_>) -> std::io::Result<()> {
        self.0.write(row)
    }
}

#[test]
fn the_reader_reads_everything_that_the_writer_writes() {
    let folder = tempfile::tempdir().unwrap();
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    for round in 0..8 {
        // Feeds arbitrary bytes to the encoder as events, because a journal may contain such bytes.
        let mut encoder = memtrace_encode::Encoder::new(
            random.next() >> (random.next() % 64),
            0,
            1,
            memtrace_trace::rounding::Rounding {
                caching: round % 2 == 0,
                power2_divisions: random.next() % 9,
            },
            round % 3 == 0,
        );
        let mut sink = Sink(memtrace_trace::csv::RowWriter::new(Vec::new()));
        let json = format!("{{\"schema\":\"{}\"}}", memtrace_trace::SCHEMA_VERSION);
        encoder.meta(&json, &mut sink).unwrap();
        for _ in 0..2000 {
            let mut bytes: [u8; 64] = std::array::from_fn(|_| random.next() as u8);
            for at in (16..64).step_by(8) {
                bytes[at..at + 8].copy_from_slice(&random.extreme().to_le_bytes());
            }
            bytes[8] = random.next() as u8 % 20;
            let event = memtrace_trace::event::bytes::event_of(&bytes);
            if event.is_definition() {
                let text = ["=1+1", "", "\u{9b}", "-1", "a,\"b\"", "\r\n"][random.next() as usize % 6];
                encoder.definitions_mut().define_text(random.next() as u32 % 9, text);
            } else {
                encoder.encode(1, &event, &mut sink).unwrap();
            }
        }
        encoder.end(u64::MAX, 0, memtrace_trace::end_row::Ending::Exit, "", &mut sink).unwrap();
        sink.0.flush().unwrap();
        let path = write(&folder, "events.csv", sink.0.get_ref());
        summary(&path, false).unwrap();
        let check = reports::find("check").unwrap();
        check.run(&[Input::open(&path).unwrap()], &Options::default()).unwrap();
        let mut reader = memtrace_trace::csv::RowReader::open(&path).unwrap();
        while reader.next_row().unwrap().is_some() {}

        // Passes arbitrary rows to the writer, without the encoder.
        let mut trace = TraceBuilder::default();
        for _ in 0..2000 {
            trace.raw(Row {
                ts_ns: random.extreme(),
                event: EventName::ALL[random.next() as usize % EventName::ALL.len()],
                device: random.next() as i32 % 3,
                alloc_id: random.extreme(),
                addr: random.extreme(),
                requested_bytes: random.extreme(),
                rounded_bytes: random.extreme(),
                delta_bytes: random.extreme(),
                allocated_bytes: random.extreme(),
                active_bytes: random.extreme(),
                reserved_bytes: random.extreme(),
                device_free_bytes: random.extreme(),
                step: random.extreme(),
                stream: random.extreme(),
                pool: random.extreme(),
                latency_ns: random.extreme(),
                stack_id: random.extreme(),
                ..Row::default()
            });
        }
        let path = write(&folder, "rows.csv", &trace.finish());
        for report in reports::with_views().filter(|report| report.inputs().len() == 1) {
            let mut options = Options::default();
            for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
                options.values.insert(flag.name, flag.default.to_owned());
            }
            if let Err(error) = report.run(&[Input::open(&path).unwrap()], &options) {
                let said = error.to_string();
                assert!(!said.contains("expected an integer"), "{}: {said}", report.name());
            }
        }
    }
}

#[test]
fn an_absurd_request_is_reported_with_its_size() {
    let folder = tempfile::tempdir().unwrap();
    let absurd = 858_993_459_200_000_000;
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    trace.alloc(512, Row::default());
    trace.raw(Row {
        event: EventName::Oom,
        device: 0,
        status: 2,
        requested_bytes: absurd,
        rounded_bytes: absurd,
        allocated_bytes: 512,
        active_bytes: 512,
        reserved_bytes: 2 << 20,
        ..Row::default()
    });
    let input = Input::open(&write(&folder, "a.csv", &trace.finish())).unwrap();
    for name in ["check", "summary --stats", "oom", "summary"] {
        let mut options = Options::default();
        let report = reports::find(name).unwrap();
        for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
            options.values.insert(flag.name, flag.default.to_owned());
        }
        let answer = report.run(std::slice::from_ref(&input), &options).unwrap();
        if name == "oom" {
            assert!(answer.json.to_string().contains(&absurd.to_string()), "{}", answer.json);
        }
    }
}
