//! Hostile traces against every command: no panic, bounded memory, an end within seconds, nothing deleted, and no
//! control sequence on the terminal.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_analysis::exports::EXPORTS;
use memtrace_analysis::reports::REPORTS;
use memtrace_analysis::testing::TraceBuilder;
use memtrace_recover::testing::{Checkpoints, journal, of_trace};
use memtrace_trace::journal::Run;
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Category, EventName, Row};
use tempfile::TempDir;

/// The address space that a command may use, in KiB: the stacks of its threads, the program itself, and what it reads.
const MOST_KIB: u64 = 1 << 20;

/// A command that may use little memory and little time.
fn bounded(arguments: &[&str]) -> Output {
    let script = format!("ulimit -v {MOST_KIB}; exec timeout -s KILL 60 \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_memtrace")]).args(arguments);
    command.env_remove("LD_PRELOAD").env("RUST_BACKTRACE", "0").output().unwrap()
}

/// The arguments of every command that reads a trace, with each of them at `path`. Files go to `folder`.
fn commands(path: &str, folder: &Path) -> Vec<Vec<String>> {
    let mut all: Vec<Vec<&str>> = Vec::new();
    for report in REPORTS {
        let inputs = vec![path; report.inputs().len()];
        let whatif = &["--without=op=aten::mm", "--checkpoint=**", "--chunk-loss=8"];
        let asked: &[&str] = if report.name() == "whatif" { whatif } else { &[] };
        all.push([&[report.name()], asked, &inputs[..]].concat());
        all.push([&[report.name(), "--lenient", "--json"], asked, &inputs[..]].concat());
    }
    let page = folder.join("page.html");
    let page = page.to_str().unwrap();
    all.push(vec!["report", path, "-o", page]);
    all.push(vec!["live", "--once", path]);
    for by in ["stack", "line", "op"] {
        all.push(vec!["peak", "--by", by, path]);
    }
    let out: Vec<String> =
        EXPORTS.iter().map(|export| folder.join(export.name()).to_str().unwrap().to_owned()).collect();
    for (export, out) in EXPORTS.iter().zip(&out) {
        let image: &[&str] = if export.name() == "plots" { &["--image", "svg"] } else { &[] };
        all.push([&["export", "--to", export.name(), "-o", out, path], image].concat());
    }
    let digest = folder.join("digest.parquet");
    all.push(vec!["digest", "-o", digest.to_str().unwrap(), path]);
    all.into_iter().map(|words| words.into_iter().map(str::to_owned).collect()).collect()
}

/// Runs every command on the trace at `path` and gives what they printed.
fn every_command(path: &Path) -> Vec<(String, Output)> {
    let folder = TempDir::new().unwrap();
    let run = |words: &Vec<String>| {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let output = bounded(&words);
        let said = format!("{words:?}: {:?}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
        assert!(matches!(output.status.code(), Some(0..=3)), "{said}");
        assert!(!said.contains("panicked"), "{said}");
        assert!(output.stderr.len() < 20_000, "{} bytes on stderr: {words:?}", output.stderr.len());
        (said, output)
    };
    commands(path.to_str().unwrap(), folder.path()).iter().map(run).collect()
}

/// A trace of a process that was killed; its meta row names `journal`.
fn killed(journal: &Path) -> Vec<u8> {
    let mut trace = TraceBuilder::new(Meta { journal: journal.display().to_string(), ..Meta::default() });
    trace.segment(2 << 20);
    trace.alloc(512, Row { module: "Net", op: "aten::mm", ..Row::default() });
    trace.unfinished()
}

fn with_trace(bytes: &[u8]) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("host.r0.1.csv");
    fs::write(&path, bytes).unwrap();
    (folder, path)
}

/// A journal of no running process, for the trace at `trace`.
fn write_journal(path: &Path, trace: &Path) {
    let run = Run { pid: u32::MAX, process_start: 1, ..Run::default() };
    fs::write(path, of_trace(journal(&run, &Checkpoints::default(), &[]), trace)).unwrap();
}

#[test]
fn no_command_deletes_or_waits_for_the_file_that_a_trace_names_as_its_journal() {
    let folder = TempDir::new().unwrap();
    let victim = folder.path().join("thesis.txt");
    fs::write(&victim, "years of work").unwrap();
    let named = folder.path().join("memtrace-1-2.journal");
    fs::write(&named, "years of work").unwrap();
    let fifo = folder.path().join("memtrace-3-4.journal");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let link = folder.path().join("memtrace-5-6.journal");
    std::os::unix::fs::symlink(&victim, &link).unwrap();
    let inside = folder.path().join("memtrace-7-8.journal");
    fs::create_dir(&inside).unwrap();
    let other = folder.path().join("memtrace-9-10.journal");
    write_journal(&other, Path::new("/somewhere/else.csv"));
    let journals = [&victim, &named, &fifo, &link, &inside, &other, Path::new("/dev/zero")];
    for path in journals {
        let bytes = killed(path);
        let (_folder, trace) = with_trace(&bytes);
        let answer = bounded(&["summary", trace.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&answer.stderr).into_owned();
        assert!(answer.status.success() && said.contains("was not used, because"), "{path:?}: {said}");
        for words in [["check", "--repair"], ["peak", "--json"]] {
            bounded(&[words[0], words[1], trace.to_str().unwrap()]);
        }
        assert_eq!(fs::read(&trace).unwrap(), bytes, "{path:?}");
        assert!(fs::symlink_metadata(path).is_ok(), "{path:?} is gone");
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "years of work");
    assert_eq!(fs::read_to_string(&named).unwrap(), "years of work");
    assert!(other.exists());
}

#[test]
fn a_journal_is_removed_only_by_the_trace_that_it_was_made_for() {
    let folder = TempDir::new().unwrap();
    let own = folder.path().join("memtrace-1-2.journal");
    let (_folder, trace) = with_trace(&killed(&own));
    write_journal(&own, &trace);
    // A copy is completed as far as the journal goes, and the original can still be.
    let copies = TempDir::new().unwrap();
    let copy = copies.path().join(trace.file_name().unwrap());
    fs::copy(&trace, &copy).unwrap();
    for (path, leaves) in [(&copy, true), (&trace, false)] {
        let answer = bounded(&["summary", path.to_str().unwrap()]);
        assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
        assert!(String::from_utf8_lossy(&fs::read(path).unwrap()).contains("killed lost=0"));
        assert_eq!(own.exists(), leaves, "{path:?}");
    }
}

/// A member of a gzip file that unpacks to 16 MiB of one letter.
fn packed_letters() -> Vec<u8> {
    let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    packer.write_all(&vec![b'a'; 16 << 20]).unwrap();
    packer.finish().unwrap()
}

#[test]
fn a_file_without_a_line_end_exhausts_no_memory() {
    let mut good = TraceBuilder::default();
    let stack_id = 2;
    good.segment(2 << 20);
    good.alloc(512, Row { module: "Net", stack_id, ..Row::default() });
    let good = good.finish();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(&good).unwrap();
    let gz = gz.finish().unwrap();
    let folder = TempDir::new().unwrap();
    let place = |name: &str| folder.path().join(name);
    // 2 GiB of one line: packed, in a hole of a file, and behind an open quote.
    fs::write(place("packed.csv.gz"), [gz, packed_letters().repeat(128)].concat()).unwrap();
    for (name, end) in [("hole.csv", &b""[..]), ("quote.csv", b"9,\"")] {
        fs::write(place(name), [&good[..], end].concat()).unwrap();
        fs::OpenOptions::new().write(true).open(place(name)).unwrap().set_len(2 << 30).unwrap();
    }
    for name in ["packed.csv.gz", "hole.csv", "quote.csv"] {
        every_command(&place(name));
        fs::remove_file(place(name)).unwrap();
    }
    // The same as stacks, beside a good trace.
    let header = b"stack_id,parent_id,depth,frame,stack,kind\n1,0,1,a,a,op\n2,1,2,b,a / b,op\n3,1,2,";
    fs::write(place("good.csv"), &good).unwrap();
    fs::write(place("good.stacks"), header).unwrap();
    fs::OpenOptions::new().write(true).open(place("good.stacks")).unwrap().set_len(2 << 30).unwrap();
    for (said, output) in every_command(&place("good.csv")) {
        let reasons =
            ["--limits FILE is missing", "no OOM", "no out of memory", "has no ops", "no calls of modules"];
        let has_reason = reasons.iter().any(|reason| said.contains(reason));
        assert!(output.status.success() || has_reason || said.contains("[\"oom\""), "{said}");
    }
    let answer = bounded(&["peak", "--by", "stack", place("good.csv").to_str().unwrap()]);
    assert!(String::from_utf8_lossy(&answer.stdout).contains("b < a"));
}

#[test]
fn the_message_about_a_bad_file_is_short() {
    let name = "x".repeat(1_900_000);
    let good = String::from_utf8(TraceBuilder::default().finish()).unwrap();
    let (_, behind) = good.split_once(',').unwrap();
    let end = good.trim_end().len();
    let cases = [
        format!("{name},{behind}"),
        format!("{name}\n"),
        format!("{}\n{name}{}", good.split_once('\n').unwrap().0, &good[good.len() / 2..]),
        format!("{}\n{name}\n", &good[..end]),
        format!("{}\n3,{name}{}\n", &good[..end], ",1".repeat(27)),
        good.replace("memtrace/1", &name),
    ];
    for text in cases {
        let (_folder, trace) = with_trace(text.as_bytes());
        let answer = bounded(&["check", trace.to_str().unwrap()]);
        // The file cannot be read, or `check` found the line.
        assert!(matches!(answer.status.code(), Some(1 | 2)), "{:?}", answer.status);
        let said = [answer.stderr, answer.stdout].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.len() < 6000 && said.contains("host.r0.1.csv"), "{} bytes: {:.300}", said.len(), said);
    }
}

/// Texts that a terminal would obey.
const ORDERS: &str = "\u{1b}]0;owned\u{7}\u{1b}[2J\u{9b}31m\u{202e}\r\u{8}\u{7f}";

#[test]
fn no_control_sequence_of_a_trace_reaches_the_terminal() {
    let text = format!("Net{ORDERS}");
    let devices = vec![Device { ordinal: 0, name: text.clone(), total_bytes: 1 << 30 }];
    let meta = Meta {
        argv: vec![text.clone(), text.clone(), text.clone()],
        devices,
        run_id: text.clone(),
        host: text.clone(),
        degraded: vec![text.clone()],
        world_size: 1,
        phantom: serde_json::json!({ "name": text, "card": text, "values": text }),
        versions: [("torch".to_owned(), text.clone())].into(),
        ..Meta::default()
    };
    let mut trace = TraceBuilder::new(meta);
    trace.segment(2 << 20);
    let row =
        Row { module: &text, op: &text, phase: &text, source: &text, stack_id: 1, step: 1, ..Row::default() };
    trace.alloc(512, row);
    let oom = Row { event: EventName::Oom, device: 0, requested_bytes: 1 << 40, ..row };
    trace.raw(oom);
    trace.raw(Row { event: EventName::Op, latency_ns: 5, device: 0, api: "op", ..row });
    let name = format!("{ORDERS}host.csv");
    let folder = TempDir::new().unwrap();
    let path = folder.path().join(&name);
    fs::write(&path, trace.finish()).unwrap();
    let stacks = format!("stack_id,parent_id,depth,frame,stack,kind\n1,0,1,\"{text}\",x,python\n");
    fs::write(folder.path().join(format!("{ORDERS}host.stacks")), stacks).unwrap();
    let is_order = |char: char| (char.is_control() && !matches!(char, '\n' | '\t')) || char == '\u{202e}';
    let mut answers = every_command(&path);
    // Errors that quote the trace, and a file that is not there.
    let mut bad = fs::read(&path).unwrap();
    bad.extend_from_slice(format!("5,{text}{}\n", ",1".repeat(27)).as_bytes());
    bad.extend_from_slice(format!("{text}\n").as_bytes());
    fs::write(&path, &bad).unwrap();
    answers.extend(every_command(&path));
    fs::remove_file(&path).unwrap();
    answers.extend(every_command(&path));
    for (said, output) in answers {
        for stream in [&output.stdout, &output.stderr] {
            let text = String::from_utf8_lossy(stream);
            assert!(!text.contains(is_order), "{said}\n{text:?}");
        }
    }
}

#[test]
fn a_trace_of_any_number_of_devices_takes_no_longer_than_another() {
    let mut trace = TraceBuilder::default();
    for device in 0..100_000 {
        trace.raw(Row { event: EventName::Alloc, device, alloc_id: 9, delta_bytes: 512, ..Row::default() });
    }
    let (_folder, path) = with_trace(&trace.finish());
    for words in [&["summary"][..], &["leaks"], &["summary", "--lenient"], &["live", "--once"]] {
        let answer = bounded(&[words, &[path.to_str().unwrap()]].concat());
        let said = String::from_utf8_lossy(&answer.stderr);
        assert!(answer.status.success() || said.contains("column device: expected an integer"), "{said}");
    }
}

#[test]
fn one_file_of_the_command_prints_lines() {
    fn check(folder: &Path) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                check(&path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.ends_with("terminal.rs")
            {
                let text = fs::read_to_string(&path).unwrap();
                // A line without a text ends one that was printed before.
                let prints = |line: &str| {
                    let line = line.trim_start();
                    ["print!(", "println!(", "eprint!(", "eprintln!("]
                        .iter()
                        .any(|word| line.starts_with(word))
                        && !line.ends_with("!();")
                };
                assert_eq!(
                    text.lines().find(|line| prints(line)),
                    None,
                    "{}: use terminal::say",
                    path.display()
                );
            }
        }
    }
    check(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli"));
}

/// A generator of numbers, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % most.max(1) as u64) as usize
    }
}

/// A copy of `text` with a few bytes, fields or lines changed.
fn mutated(text: &[u8], random: &mut Random) -> Vec<u8> {
    let mut lines: Vec<Vec<u8>> = text.split_inclusive(|byte| *byte == b'\n').map(<[u8]>::to_vec).collect();
    const VALUES: &[&str] = &[
        "",
        "-1",
        "0",
        "1",
        "9223372036854775807",
        "-9223372036854775808",
        "4611686018427387904",
        "72057594037927936",
        "-72057594037927936",
        "free",
        "alloc",
        "oom",
        "live",
        "tag",
        "end",
        "meta",
        "segment_map",
        "\"",
        "(none)",
        "\0",
        "é",
        "=1",
        "1e9",
        "step:7",
        "module:Net",
        "gradient",
    ];
    for _ in 0..=random.below(12) {
        // Mostly behind the header and the meta row, or every mutant would fail at once.
        let line = if random.below(20) == 0 { random.below(2) } else { 2 + random.below(lines.len() - 2) };
        let Some(bytes) = lines.get_mut(line) else { continue };
        match random.below(8) {
            0 if !bytes.is_empty() => {
                let at = random.below(bytes.len());
                bytes[at] = random.below(256) as u8;
            }
            1 => bytes.truncate(random.below(bytes.len())),
            2 => bytes.clear(),
            3 => {
                let again = bytes.clone();
                let place = random.below(lines.len());
                lines.insert(place, again);
            }
            _ => {
                let mut fields: Vec<&[u8]> = bytes.split(|byte| *byte == b',').collect();
                let at = random.below(fields.len());
                fields[at] = VALUES[random.below(VALUES.len())].as_bytes();
                let line_end: &[u8] = if at + 1 == fields.len() { b"\n" } else { b"" };
                *bytes = [&fields.join(&b','), line_end].concat();
            }
        }
    }
    lines.concat()
}

#[test]
fn mutated_traces_make_no_command_panic() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let mut random = Random(0x9E37_79B9_7F4A_7C15);
    for name in ["leaks", "oom-fragments", "fragments", "oom-outside"] {
        let bytes = fs::read(fixtures.join(name).join("host.r0.1.csv.gz")).unwrap();
        let mut text = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&bytes[..]), &mut text).unwrap();
        for _ in 0..3 {
            let (_folder, path) = with_trace(&mutated(&text, &mut random));
            every_command(&path);
        }
    }
}

/// A trace with a block, marks, and rows `repeat` with these values: the first row that is repeated and the number.
fn with_repeats(repeats: &[(i64, i64)]) -> Vec<u8> {
    let mut trace = TraceBuilder::new(Meta { repeats: true, ..Meta::default() });
    trace.segment(2 << 20);
    let mut seq = trace.alloc(512, Row { module: "Net", ..Row::default() });
    for _ in 0..64 {
        seq = trace.raw(Row { event: EventName::Mark, api: "user", name: "again", ..Row::default() });
    }
    let mut writer = memtrace_trace::csv::RowWriter::without_header(trace.unfinished());
    for &(of, rows) in repeats {
        seq = seq.saturating_add(1);
        let row = Row {
            seq,
            ts_ns: seq.saturating_mul(1000),
            event: EventName::Repeat,
            alloc_id: of,
            requested_bytes: rows,
            latency_ns: rows,
            ..Row::default()
        };
        writer.write(&row).unwrap();
        seq = seq.saturating_add(rows.clamp(1, 1 << 17) - 1);
    }
    let end = Row {
        seq: seq.saturating_add(1),
        event: EventName::End,
        api: "memtrace",
        name: "exit lost=0",
        ..Row::default()
    };
    writer.write(&Row { ts_ns: end.seq.saturating_mul(1000), ..end }).unwrap();
    writer.into_inner().unwrap()
}

#[test]
fn repeats_of_repeats_exhaust_neither_memory_nor_time() {
    // The marks are rows 4 to 67. Each repeat doubles them, and more follow.
    let mut repeats: Vec<(i64, i64)> = (6..15).map(|power| (4, 1 << power)).collect();
    repeats.extend((0..8).map(|_| (4, 1 << 15)));
    let (_folder, path) = with_trace(&with_repeats(&repeats));
    let answers = every_command(&path);
    let check = &answers.iter().find(|(said, _)| said.contains("\"check\"")).unwrap().1;
    let said = String::from_utf8_lossy(&check.stdout);
    // The last of them reach further back than they may: those are damage, which is told.
    assert!(said.contains("further back") && said.contains("rows"), "{said}");
}

#[test]
fn repeats_that_are_damaged_are_told_by_every_command() {
    for repeat in
        [(4, 0), (4, i64::MAX), (4, -3), (1, 4), (60, 20), (0, 4), (-9, 4), (i64::MIN, 1), (1 << 62, 9)]
    {
        let (_folder, path) = with_trace(&with_repeats(&[(4, 10), repeat, (4, 10)]));
        let answer = bounded(&["check", path.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&answer.stdout);
        assert!(answer.status.code() == Some(1) && said.contains("repeat: "), "{repeat:?}: {said}");
        every_command(&path);
    }
}

#[test]
fn a_trace_in_a_pipe_or_a_device_gives_an_error_and_waits_for_nothing() {
    let folder = TempDir::new().unwrap();
    let fifo = folder.path().join("a.csv");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // A folder with a pipe named as a trace has no trace.
    let answer = bounded(&["summary", folder.path().to_str().unwrap()]);
    assert_eq!(answer.status.code(), Some(2), "{}", String::from_utf8_lossy(&answer.stderr));
    for path in ["/dev/zero", "/dev/null"] {
        let answer = bounded(&["summary", path]);
        assert_eq!(answer.status.code(), Some(2), "{path}");
    }
    // Without a writer, opening the pipe would wait for ever.
    let _writer = fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    let answer = bounded(&["summary", fifo.to_str().unwrap()]);
    assert_eq!(answer.status.code(), Some(2), "{}", String::from_utf8_lossy(&answer.stderr));
}

/// Runs the reports that predict changes on a trace and gives what each printed. All must end within [`bounded`].
fn predictions(trace: Vec<u8>) -> Vec<String> {
    let (_folder, path) = with_trace(&trace);
    drop(trace);
    let all = ["--checkpoint=**", "--chunk-loss=8", "--optimizer=in-backward", "--batch=x2"];
    let whatif = [&["whatif"][..], &all].concat();
    let run = |words: &[&str]| {
        let answer = bounded(&[words, &[path.to_str().unwrap()]].concat());
        let said =
            format!("{}{}", String::from_utf8_lossy(&answer.stdout), String::from_utf8_lossy(&answer.stderr));
        assert!(
            matches!(answer.status.code(), Some(0..=2)) && !said.contains("panicked"),
            "{words:?}: {:?} {said:.2000}",
            answer.status
        );
        said
    };
    run(&["whatif", "--shard=8", "--checkpoint=**", "--optimizer=8bit"]);
    [&whatif[..], &["advise"], &["oom"]].into_iter().map(run).collect()
}

/// A trace of a device of 1 GiB.
fn of_small_card() -> TraceBuilder {
    let devices = vec![Device { ordinal: 0, name: "card".to_owned(), total_bytes: 1 << 30 }];
    TraceBuilder::new(Meta { devices, ..Meta::default() })
}

/// A row of a forward pass of a module.
fn of_module() -> Row<'static> {
    Row { device: 0, module: "Net", name: "Net", api: "module", phase: "forward", ..Row::default() }
}

/// The row of a request that no card has room for.
fn too_big() -> Row<'static> {
    Row { event: EventName::Oom, requested_bytes: 1 << 40, rounded_bytes: 1 << 40, ..of_module() }
}

#[test]
fn predictions_take_a_time_that_grows_with_the_rows_of_a_step() {
    const MANY: usize = 100_000;
    let backward = Row { phase: "backward", op: "MmBackward0", ..of_module() };
    // Ops that began before every allocation, and losses.
    let mut trace = of_small_card();
    for _ in 0..MANY {
        trace.alloc(512, Row { op: "aten::_log_softmax", ..of_module() });
        let loss = Row { event: EventName::Op, op: "aten::cross_entropy_loss", api: "op", ..of_module() };
        trace.raw(Row { latency_ns: i64::MAX, ..loss });
    }
    trace.raw(too_big());
    predictions(trace.finish());
    // Calls of a module with one block each; one backward function frees all, and gradients are tagged.
    let mut trace = of_small_card();
    let mut blocks = Vec::new();
    for _ in 0..MANY {
        trace.raw(Row { event: EventName::RangeBegin, ..of_module() });
        blocks.push(trace.alloc(512, of_module()));
        blocks.push(trace.alloc(512, Row { op: "aten::_log_softmax", ..of_module() }));
        let loss = Row { event: EventName::Op, op: "aten::cross_entropy_loss", api: "op", ..of_module() };
        trace.raw(Row { latency_ns: 1500, ..loss });
        trace.raw(Row { event: EventName::RangeEnd, ..of_module() });
    }
    for block in blocks {
        let gradient = trace.alloc(512, backward);
        trace.tag(gradient, 512, backward, Row { category: Category::Gradient, ..backward });
        trace.free(block, 512, backward);
        trace.raw(Row { event: EventName::Op, latency_ns: 4500, api: "op", ..backward });
    }
    trace.raw(too_big());
    predictions(trace.finish());
    // A step for each of many blocks that stay.
    let mut trace = of_small_card();
    for step in 0..MANY {
        trace.alloc(512, Row { step: step as i64, ..of_module() });
    }
    trace.raw(too_big());
    predictions(trace.finish());
}

#[test]
fn predictions_refuse_a_step_that_they_cannot_keep() {
    let mut trace = of_small_card();
    trace.alloc(512, of_module());
    for _ in 0..2_000_001 {
        trace.raw(Row { event: EventName::Op, latency_ns: 1, ..Row::default() });
    }
    trace.raw(too_big());
    let said = predictions(trace.finish());
    for said in &said {
        assert!(said.contains("has more than 2,000,000 rows"), "{said}");
        assert!(said.contains("choose a part of it by --window or --step"), "{said}");
    }
    assert!(said[2].contains("memtrace advise finds nothing for this peak: step"), "{}", said[2]);
}
