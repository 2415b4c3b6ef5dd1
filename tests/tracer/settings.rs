//! The effect of settings on the files: names, parts, compression, and where messages go.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::read::record::Columns;
use memtrace_analysis::state::categories::KnownCategories;
use memtrace_analysis::state::replay::{Block, Metric};
use memtrace_analysis::state::replay_trace::replay_trace;
use memtrace_trace::Meta;
use memtrace_trace::csv::RowReader;
use memtrace_trace::{EventName, Row};

use crate::common::command::{memtrace, printed};
use crate::common::parts::{parts_program, parts_program_with};
use crate::common::running::Running;
use crate::common::{self, Traced, TracedRun};

fn traced(how: &str, rounds: &str) -> Traced {
    Traced::new(&parts_program("parts"), &[how, rounds])
}

/// The live blocks by id, with the columns that identify a block and its owner.
type Live = BTreeMap<i64, (String, i64, i64, i64, String, String, i64, i64)>;

/// A part: its meta row, the number and event of each later row, and the live memory after the last row.
struct Part {
    meta: Meta,
    first_seq: i64,
    rows: Vec<(i64, EventName)>,
    live: Live,
}

fn bytes(path: &Path) -> Vec<u8> {
    let bytes = std::fs::read(path).unwrap();
    let mut text = Vec::new();
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("gz") => {
            flate2::read::GzDecoder::new(bytes.as_slice()).read_to_end(&mut text).unwrap();
        }
        Some("zst") => {
            zstd::stream::read::Decoder::new(bytes.as_slice()).unwrap().read_to_end(&mut text).unwrap();
        }
        _ => return bytes,
    }
    text
}

fn take(live: &mut Live, row: &Row<'_>) {
    use EventName::{Alloc, ExtAlloc, ExtFree, Free, HostAlloc, HostFree, SegmentAlloc, SegmentFree};
    match row.event {
        Alloc | EventName::Live | SegmentAlloc | ExtAlloc | HostAlloc => {
            let owner = format!("{} {} {} {}", row.op, row.module, row.phase, row.category);
            let what = (row.api.to_owned(), row.addr, row.requested_bytes, row.rounded_bytes);
            let before = live.insert(
                row.alloc_id,
                (what.0, what.1, what.2, what.3, owner, row.source.to_owned(), row.step, row.delta_bytes),
            );
            assert_eq!(before, None, "{row:?}");
        }
        Free | SegmentFree | ExtFree | HostFree => {
            let gone = live.remove(&row.alloc_id).unwrap_or_else(|| panic!("not live: {row:?}"));
            assert_eq!(gone.7, -row.delta_bytes, "{row:?}");
        }
        _ => {}
    }
}

/// Reads one part on its own.
fn part(path: &Path) -> Part {
    let bytes = bytes(path);
    let mut reader = RowReader::new(path, bytes.as_slice()).unwrap();
    let meta = reader.meta().clone();
    let (mut rows, mut live, mut sum, mut first_seq, mut seq) = (Vec::new(), Live::new(), (0, 0), 0, 0);
    let mut index = 0;
    while let Some(row) = reader.next_row().unwrap() {
        if index == 0 {
            first_seq = row.seq;
        } else {
            assert_eq!(row.seq, seq + 1, "{}", path.display());
            rows.push((row.seq, row.event));
            let opening = index <= meta.opening_rows;
            assert_eq!(row.name == "live", opening, "{row:?}");
            take(&mut live, &row);
            if row.device >= 0 {
                let is_segment = row.event.as_str().starts_with("segment_");
                sum.0 += if row.event.is_block() { row.delta_bytes } else { 0 };
                sum.1 += if is_segment { row.delta_bytes } else { 0 };
                let totals = (row.allocated_bytes, row.reserved_bytes);
                assert_eq!(totals, sum, "{}: {row:?}", path.display());
            }
        }
        seq = row.seq;
        index += 1;
    }
    Part { meta, first_seq, rows, live }
}

fn parts(ran: &TracedRun) -> Vec<Part> {
    let mut parts: Vec<Part> = ran
        .files()
        .iter()
        .filter(|file| !file.to_string_lossy().ends_with(".stacks"))
        .map(|file| part(file))
        .collect();
    parts.sort_by_key(|part| part.meta.part);
    parts
}

/// Checks that the parts form one trace: the numbers of parts and rows have no gap, each part ends with an
/// end row, and each has live memory at its end.
fn assert_one_trace(parts: &[Part]) {
    let mut seq = 1;
    for (index, part) in parts.iter().enumerate() {
        assert_eq!(part.meta.part as usize, index + 1);
        let opening = part.meta.opening_rows as usize;
        assert_eq!(part.first_seq + opening as i64, seq, "part {}", part.meta.part);
        for (number, _) in &part.rows[opening..] {
            seq += 1;
            assert_eq!(*number, seq);
        }
        assert_eq!(part.rows.last().map(|row| row.1), Some(EventName::End));
    }
    let live = |part: &Part| part.live.len();
    assert!(parts.iter().all(|part| live(part) > 0));
}

#[test]
fn rotate_writes_parts_that_replay_alone_and_read_as_one() {
    let ran =
        traced("exit", "6000").env("MEMTRACE_ROTATE", "128k").env("MEMTRACE_NAME", "r{rank}-{host}").run();
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
    let [taken, given] = ran.numbers()[..] else { panic!("{}", ran.stdout()) };
    let names: Vec<String> =
        ran.files().iter().map(|file| file.file_name().unwrap().to_string_lossy().into_owned()).collect();
    assert!(names.iter().all(|name| name.starts_with("r0-")), "{names:?}");
    assert!(names.iter().any(|name| name.ends_with(".part2.csv")), "{names:?}");
    let parts = parts(&ran);
    assert!(parts.len() > 3, "{names:?}");
    assert_one_trace(&parts);
    let new: Vec<EventName> = parts
        .iter()
        .flat_map(|part| part.rows[part.meta.opening_rows as usize..].iter().map(|row| row.1))
        .collect();
    let count = |events: &[EventName]| new.iter().filter(|event| events.contains(event)).count() as i64;
    assert_eq!(count(&[EventName::Alloc, EventName::ExtAlloc, EventName::HostAlloc]), taken);
    assert_eq!(count(&[EventName::Free, EventName::ExtFree, EventName::HostFree]), given);
    // `check` must accept each part by itself, and the whole trace.
    for file in ran.files() {
        printed(&["check"], &file);
    }
    let folder = ran.files()[0].parent().unwrap().to_owned();
    let whole = printed(&["check", "--json"], &folder);
    let whole: serde_json::Value = serde_json::from_str(&whole).unwrap();
    let files = whole["files"].as_array().unwrap();
    assert_eq!(files.len(), 1, "{whole}");
    assert_eq!(files[0]["rows"].as_u64().unwrap() as usize, new.len() + 1, "{whole}");
}

#[test]
fn compress_packs_finished_parts_and_they_read_the_same() {
    let parts_without_links = parts_program_with("parts-no-links", &["-DNO_HARD_LINKS"]);
    for (program, how, ending) in [
        (parts_program("parts"), "gz", ".csv.gz"),
        (parts_program("parts"), "zst", ".csv.zst"),
        (parts_without_links, "zst", ".csv.zst"),
    ] {
        let traced = Traced::new(&program, &["exit", "4000"]);
        let traced = traced.env("MEMTRACE_ROTATE", "128k").env("MEMTRACE_COMPRESS", how);
        let ran = traced.run();
        assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
        let files = ran.files();
        assert!(files.len() > 2, "{files:?}");
        assert!(files.iter().all(|file| file.to_string_lossy().ends_with(ending)), "{files:?}");
        assert_one_trace(&parts(&ran));
        printed(&["check"], files[0].parent().unwrap());
        printed(&["check"], &files[1]);
    }
}

fn traced_by_others() {
    assert_eq!(traced("exit", "10").run().status(), 0);
}

#[test]
fn rotate_and_compress_lose_nothing_when_the_process_is_killed() {
    for compress in ["off", "gz", "zst"] {
        let traced = traced("kill", "3017").env("MEMTRACE_ROTATE", "64k").env("MEMTRACE_COMPRESS", compress);
        let ran = traced.run();
        assert_eq!(ran.status(), 128 + 9);
        let [taken, given] = ran.numbers()[..] else { panic!("{}", ran.stdout()) };
        let folder = ran.files()[0].parent().unwrap().to_owned();
        // Another process removes orphaned journals. It must leave the journal of this trace, although the
        // first part is compressed already.
        traced_by_others();
        printed(&["check", "--repair"], &folder);
        let parts = parts(&ran);
        assert!(parts.len() > 2);
        assert_one_trace(&parts);
        let left = |file: &PathBuf| file.to_string_lossy().ends_with(".unfinished");
        assert!(!ran.files().iter().any(left), "{:?}", ran.files());
        let count = |events: [EventName; 3]| {
            let new = parts.iter().flat_map(|part| &part.rows[part.meta.opening_rows as usize..]);
            new.filter(|row| events.contains(&row.1)).count() as i64
        };
        assert_eq!(count([EventName::Alloc, EventName::ExtAlloc, EventName::HostAlloc]), taken);
        assert_eq!(count([EventName::Free, EventName::ExtFree, EventName::HostFree]), given);
    }
}

/// The live blocks of a trace by id (bytes, address and module), the totals of each device, and the highest
/// bytes of a GPU.
type End = (BTreeMap<i64, (i64, i64, String)>, Vec<[i64; 4]>, i64);

/// Returns the state at the end of the only trace in a folder.
fn replayed(folder: &Path) -> End {
    let input = Input::open(folder).unwrap();
    let [trace] = &input.traces[..] else { panic!("{:?}", input.traces) };
    let options = Options::default();
    let (columns, known) = (Columns::of(&["addr"]), KnownCategories::default());
    let replayed = replay_trace(trace, columns, &options, Metric::Allocated, known, |_, _| {}).unwrap();
    let problems = &replayed.replay.problems;
    assert_eq!((problems.examples.as_slice(), problems.unfinished), (&[][..], false));
    let module = |block: &Block| replayed.symbols.get(block.owner.module).to_string();
    let live = replayed.replay.live().values();
    let live = live.map(|block| (block.id, (block.bytes, block.addr, module(block)))).collect();
    let devices = replayed.replay.devices().iter();
    let totals = devices.clone().map(|device| Metric::ALL.map(|metric| device.totals.get(metric))).collect();
    let peaks =
        devices.filter(|device| device.ordinal >= 0).map(|device| device.peak(Metric::Allocated).bytes);
    (live, totals, peaks.max().unwrap())
}

#[test]
fn trace_replays_over_removed_parts_to_the_same_end() {
    let ran = traced("exit", "9000").env("MEMTRACE_ROTATE", "64k").run();
    let folder = ran.files()[0].parent().unwrap().to_owned();
    let whole = replayed(&folder);
    let count =
        ran.files().iter().filter(|file| file.extension().is_some_and(|end| end == "csv")).count() as u64;
    assert!(count > 8, "{:?}", ran.files());
    let name = |part: u64| {
        let first = ran.files()[0].clone();
        if part == 1 { first } else { first.with_extension(format!("part{part}.csv")) }
    };
    // Copies the trace without some parts: without the first one, one in the middle, several, or all but the
    // first and the last.
    for gone in [vec![1], vec![4], vec![2, 3, 6], (2..count).collect()] {
        let copy = tempfile::tempdir().unwrap();
        for part in (1..=count).filter(|part| !gone.contains(part)) {
            std::fs::copy(name(part), copy.path().join(name(part).file_name().unwrap())).unwrap();
        }
        let (live, totals, _) = replayed(copy.path());
        assert_eq!((&live, &totals), (&whole.0, &whole.1), "{gone:?}");
        // `check` must report the parts that are missing after the first one that is there. It must not
        // report missing parts before that, because a file may be read alone.
        let missing = gone.iter().filter(|part| **part > 1).count() as u64;
        let mut check = memtrace();
        let checked = check.args(["check", "--json"]).arg(copy.path()).output().unwrap();
        let answer: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
        let file = &answer["files"][0];
        let found = file["found"].as_object().unwrap();
        assert_eq!(
            (checked.status.code(), found["missing_parts"].as_u64()),
            (Some(i32::from(missing > 0)), Some(missing))
        );
        assert!(found.iter().all(|(what, count)| what == "missing_parts" || *count == 0), "{file}");
        let said = printed(&["summary"], copy.path()).replace("\n ", "");
        assert_eq!(said.contains("damaged: "), missing > 0, "{said}");
        assert_eq!(said.contains(" not found: counts, ops and steps"), missing > 0, "{said}");
    }
}

#[test]
fn keep_bounds_the_disk_and_leaves_the_highest_peak() {
    let whole = traced("exit", "30000").run();
    let highest = replayed(whole.files()[0].parent().unwrap()).2;
    for compress in ["off", "zst"] {
        let traced = traced("exit", "30000").env("MEMTRACE_KEEP", "1m").env("MEMTRACE_COMPRESS", compress);
        let ran = traced.run();
        assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
        let folder = ran.files()[0].parent().unwrap().to_owned();
        let bytes = disk(&ran.files());
        let parts = kept(&folder);
        if compress == "off" {
            assert!(bytes <= 1 << 20, "{bytes}");
            assert!(parts.len() > 8 && (parts.len() as u32) < *parts.last().unwrap(), "{parts:?}");
            let said = printed(&["summary"], &folder);
            assert!(said.contains("removed (MEMTRACE_KEEP=1m): counts"), "{said}");
        }
        assert_eq!(replayed(&folder).2, highest);
        printed(&["check"], &folder);
        for file in ran.files().iter().filter(|file| file.extension().is_none_or(|end| end != "stacks")) {
            printed(&["check"], file);
        }
    }
}

/// Returns the bytes of the files of a run.
fn disk(files: &[PathBuf]) -> u64 {
    files.iter().map(|file| file.metadata().unwrap().len()).sum()
}

#[test]
fn keep_counts_the_rows_that_every_part_repeats() {
    // The program holds 2,500 blocks, whose rows take 0.5 MB at the start of each part. They must count for
    // MEMTRACE_KEEP.
    for rotate in ["64k", "0"] {
        let traced = traced("hold", "60000").env("MEMTRACE_KEEP", "8m").env("MEMTRACE_ROTATE", rotate);
        let ran = traced.run();
        assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
        let folder = ran.files()[0].parent().unwrap().to_owned();
        let opening = |part: &Path| RowReader::open(part).unwrap().meta().opening_rows;
        let csv = |file: &&PathBuf| file.extension().is_some_and(|end| end == "csv");
        assert!(ran.files().iter().filter(csv).any(|file| opening(file) >= 2500));
        let bytes = disk(&ran.files());
        assert!(bytes <= 8 << 20, "{bytes} with {rotate}");
        assert!(*kept(&folder).last().unwrap() > 8);
        printed(&["check"], &folder);
    }
}

#[test]
fn keep_bounds_what_is_left_when_the_program_ends() {
    // The program is faster than the writer, so most of its 5 MB of rows are written at its end. The bound of
    // 1 MiB must hold for them, too.
    let ran = traced("burst", "30000").env("MEMTRACE_KEEP", "1m").run();
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
    let bytes = disk(&ran.files());
    assert!(bytes <= 1 << 20, "{bytes}");
    printed(&["check"], ran.files()[0].parent().unwrap());
    let unbounded = traced("burst", "30000").env("MEMTRACE_ROTATE", "64k").run();
    assert!(disk(&unbounded.files()) > 2 << 20);
}

#[test]
fn reports_go_on_while_keep_removes_the_parts_that_they_read() {
    for compress in ["off", "zst"] {
        let variables = [("MEMTRACE_KEEP", "1m"), ("MEMTRACE_COMPRESS", compress)];
        let mut running =
            Running::start(&parts_program("parts"), &["exit", "100000000", Running::END], &variables);
        let out = running.out();
        let first = || kept(&out)[1..].to_vec();
        let begun = std::time::Instant::now();
        while first().first().is_none_or(|part| *part == 2) {
            assert!(begun.elapsed().as_secs() < 300, "no part is removed");
        }
        let before = first();
        // The rounds test something only if parts are removed meanwhile, which takes longer on a busy machine.
        let are_removed =
            || first().iter().all(|part| !before.contains(part) || *part < before[before.len() / 2]);
        let mut round = 0;
        while round < 60 || !are_removed() {
            assert!(round < 2000, "no part is removed");
            let report = ["summary", "peak", "leaks", "summary --stats"][round % 4];
            let mut command = memtrace();
            let output = command.args(report.split(' ')).arg("--json").arg(&out).output().unwrap();
            assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
            let said = String::from_utf8(output.stdout).unwrap();
            assert!(!said.contains("damaged: "), "{said}");
            round += 1;
        }
        running.end();
        printed(&["check"], &out);
    }
}

/// Returns the numbers of the parts in a folder.
fn kept(folder: &Path) -> Vec<u32> {
    let files = printed(&["check", "--files", "--json"], folder);
    let files: serde_json::Value = serde_json::from_str(&files).unwrap();
    let files = files["files"].as_array().unwrap();
    files.iter().map(|file| file["part"].as_u64().unwrap() as u32).collect()
}

#[test]
fn recovery_leaves_a_live_process_of_another_container_alone() {
    use std::process::Stdio;
    let folder = tempfile::TempDir::new().unwrap();
    // Starts a process in a PID namespace of its own, which shares the folder of journals with this one.
    let mut container =
        common::untraced(Path::new("unshare"), &["--map-root-user", "--pid", "--fork", "env"]);
    container.arg(format!("LD_PRELOAD={}", common::library("libmemtrace.so").display()));
    container.arg(parts_program("parts")).args(["wait", "10"]).env("MEMTRACE_OUT", folder.path());
    // Prevents flushes while the test moves the trace.
    container.env("MEMTRACE_FLUSH_MS", "60000");
    let mut child = container.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    assert_eq!(&ready, b"ready\n");
    let traces = || std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let trace = traces().find(|path| path.extension().is_some_and(|extension| extension == "csv")).unwrap();
    let before = std::fs::read(&trace).unwrap();
    let journal = RowReader::open(&trace).unwrap().meta().journal.clone();
    assert!(Path::new(&journal).exists(), "{journal}");
    // `check --repair` must report the trace as incomplete, and must not complete it.
    let mut check = memtrace();
    let status = check.args(["check", "--repair"]).arg(folder.path()).output().unwrap().status;
    assert_eq!(status.code(), Some(1));
    assert_eq!(std::fs::read(&trace).unwrap(), before);
    // Moves the trace away while another process removes orphaned journals.
    let moved = tempfile::TempDir::new_in(folder.path()).unwrap();
    let elsewhere = moved.path().join("trace.csv");
    std::fs::rename(&trace, &elsewhere).unwrap();
    traced_by_others();
    assert!(Path::new(&journal).exists(), "{journal}");
    std::fs::rename(&elsewhere, &trace).unwrap();
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    common::Trace::read(&trace);
    assert!(!Path::new(&journal).exists(), "{journal}");
}

#[test]
fn name_and_run_id_are_in_the_file_name_and_the_meta_row() {
    let ran =
        traced("exit", "10").env("MEMTRACE_RUN_ID", "launch7").env("MEMTRACE_NAME", "{run}-{pid}").run();
    let [file] = &ran.files()[..] else { panic!("{:?}", ran.files()) };
    let name = file.file_name().unwrap().to_string_lossy().into_owned();
    assert!(name.starts_with("launch7-") && name.ends_with(".csv"), "{name}");
    assert_eq!(RowReader::open(file).unwrap().meta().run_id, "launch7");
    // No run id may give a hidden file, another folder, or a name that is too long.
    for run in ["", ".hidden", "../up", &"x".repeat(4000)] {
        let ran = traced("exit", "10").env("MEMTRACE_RUN_ID", run).env("MEMTRACE_NAME", "{run}.{pid}").run();
        let [file] = &ran.files()[..] else { panic!("{run}: {:?}{}", ran.files(), ran.stderr()) };
        assert!(!file.file_name().unwrap().to_string_lossy().starts_with('.'), "{}", file.display());
    }
}

#[test]
fn summary_on_prints_the_summary_at_exit() {
    let summary = |value: &str| traced("exit", "10").env("MEMTRACE_SUMMARY", value).run().stderr();
    let on = summary("on");
    assert!(on.contains(" rows in ") && on.contains("next: memtrace summary "), "{on}");
    // `auto` prints only on a terminal, and this stderr is a pipe.
    assert_eq!((summary("off"), summary("auto")), (String::new(), String::new()));
}

#[test]
fn flush_ms_brings_the_trace_up_to_date_while_the_program_runs() {
    use std::process::Stdio;
    let folder = tempfile::TempDir::new().unwrap();
    let mut command = common::untraced(&parts_program("parts"), &["wait", "10"]);
    command.env("LD_PRELOAD", common::library("libmemtrace.so")).env("MEMTRACE_OUT", folder.path());
    command.env("MEMTRACE_FLUSH_MS", "10").env("MEMTRACE_SAMPLE_MS", "0");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = [0; 6];
    child.stdout.as_mut().unwrap().read_exact(&mut ready).unwrap();
    let trace = || std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let rows = || {
        let trace =
            trace().find(|path| path.extension().is_some_and(|extension| extension == "csv")).unwrap();
        std::fs::read_to_string(trace).unwrap().lines().count()
    };
    // More than the header, the meta row and ten rounds of allocations must be in the file before the program
    // ends.
    assert!(rows() > 12, "{} rows", rows());
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
fn rotate_secs_ends_a_part_by_time() {
    let ran = traced("slow", "10").env("MEMTRACE_ROTATE_SECS", "1").run();
    let parts = parts(&ran);
    assert_eq!(parts.len(), 2);
    assert_one_trace(&parts);
}

#[test]
fn host_tensors_records_cpu_tensors() {
    let of_cpu = |ran: &TracedRun| -> Vec<(EventName, i64)> {
        let trace = ran.trace();
        let rows = trace.rows.iter().filter(|row| row.api == "cpu_allocator");
        rows.inspect(|row| assert_eq!(row.device, -2)).map(|row| (row.event, row.delta)).collect()
    };
    let ran = traced("exit", "1000").env("MEMTRACE_HOST_TENSORS", "1").run();
    // The program also frees a tensor of 79 bytes whose allocation it never reported: that free must have no
    // row.
    let expected = [(EventName::HostAlloc, 77), (EventName::HostAlloc, 78), (EventName::HostFree, -77)];
    assert_eq!(of_cpu(&ran), expected);
    assert_eq!(of_cpu(&traced("exit", "1000").run()), []);
}

#[test]
fn log_file_has_each_line_with_its_time_and_process() {
    let folder = tempfile::TempDir::new().unwrap();
    let pattern = folder.path().join("logs/r{rank}.log");
    let ran = traced("exit", "10")
        .env("MEMTRACE_LOG_FILE", &pattern)
        .env("MEMTRACE_LOG", "20")
        .env("MEMTRACE_BUFFER", "lots")
        .run();
    assert_eq!(ran.stderr(), "");
    let text = std::fs::read_to_string(folder.path().join("logs/r0.log")).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2, "{text}");
    assert!(lines[0].contains("MEMTRACE_BUFFER=\"lots\"") && lines[0].contains("Z "), "{text}");
    assert!(lines[1].contains("tracing to "), "{text}");
    // If the file cannot be opened, messages go to stderr.
    let ran =
        traced("exit", "10").env("MEMTRACE_LOG_FILE", "/proc/nowhere/x").env("MEMTRACE_LOG", "info").run();
    assert!(ran.stderr().contains("memtrace: tracing to "), "{}", ran.stderr());
}

#[test]
fn meta_row_names_the_capabilities_that_this_torch_lacks() {
    let ran = traced("exit", "10").run();
    let file = &ran.files()[0];
    let degraded = RowReader::open(file).unwrap().meta().degraded.clone();
    // The stand-ins for torch's libraries export only reports of blocks and of OOMs, so the trace must note
    // what is missing.
    let expected = ["this torch: no streams: stream is 0", "this torch: requested sizes are unknown"];
    for what in expected {
        assert!(degraded.iter().any(|line| line == what), "{degraded:#?}");
    }
    assert!(degraded.iter().all(|line| !line.contains("report")), "{degraded:#?}");
}
