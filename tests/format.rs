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

/// A trace with more rows than a block has.
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
    ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
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
        // A lenient reading may find an answer in the rest of the file, or return the same error.
        let _ = summary(&path, true);
    }
}

#[test]
fn extreme_numbers_in_a_trace_overflow_nothing() {
    let folder = tempfile::tempdir().unwrap();
    const LARGE: i64 = MAX_BYTES.cast_signed();
    const MOST: i64 = MAX_NUMBER.cast_signed();
    let mut trace = TraceBuilder::default();
    for delta_bytes in [LARGE, LARGE, -LARGE, -LARGE] {
        let row = Row {
            device: i32::MAX,
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
    for report in reports::REPORTS {
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
