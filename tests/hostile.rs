//! Runs every command on hostile traces: no panic, bounded memory, an end within seconds, nothing deleted,
//! and no control sequence on the terminal.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_analysis::exports::EXPORTS;
use memtrace_analysis::reports::with_views;
use memtrace_analysis::testing::TraceBuilder;
use memtrace_recover::testing::{Checkpoints, journal, of_trace};
use memtrace_trace::journal::Run;
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Category, EventName, Row};
use tempfile::TempDir;

/// The address space that a command may use, in KiB: the stacks of its threads, the program itself, and what it reads.
const MOST_KIB: u64 = 1 << 20;

/// Runs a command that may use little memory and little time.
fn bounded(arguments: &[&str]) -> Output {
    bounded_by(MOST_KIB, arguments)
}

/// Runs a command that may use `kib` KiB of address space and 60 s.
fn bounded_by(kib: u64, arguments: &[&str]) -> Output {
    let script = format!("ulimit -v {kib}; exec timeout -s KILL 60 \"$0\" \"$@\"");
    let mut command = Command::new("sh");
    command.args(["-c", &script, env!("CARGO_BIN_EXE_memtrace")]).args(arguments);
    command.env_remove("LD_PRELOAD").env("RUST_BACKTRACE", "0").output().unwrap()
}

/// Returns the arguments of every command that reads a trace, with the trace at `path` and output in
/// `folder`.
fn commands(path: &str, folder: &Path) -> Vec<Vec<String>> {
    let mut all: Vec<Vec<&str>> = Vec::new();
    for report in with_views() {
        let words: Vec<&str> = report.name().split(' ').collect();
        let inputs = vec![path; report.inputs().len()];
        let changes = &["--without=op=aten::mm", "--checkpoint=**", "--chunk-loss=8"];
        let asked: &[&str] = if words[0] == "advise" && words.len() > 1 { changes } else { &[] };
        all.push([&words[..], asked, &inputs[..]].concat());
        all.push([&words[..], &["--lenient", "--json"], asked, &inputs[..]].concat());
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
    all.into_iter().map(|words| words.into_iter().map(str::to_owned).collect()).collect()
}

/// Runs every command on the trace at `path` and returns what each printed.
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

/// Returns a trace of a process that was killed; its meta row names `journal`.
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

/// Writes a journal of a process that does not run, for the trace at `trace`.
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
    // Completes a copy of the trace first: the journal must stay, so that the original can be completed, too.
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

#[test]
fn no_command_changes_the_file_behind_a_link_beside_a_killed_trace() {
    let folder = TempDir::new().unwrap();
    let own = folder.path().join("memtrace-1-2.journal");
    let victim = folder.path().join("thesis.txt");
    fs::write(&victim, "years of work\nand its last line").unwrap();
    let (_folder, trace) = with_trace(&killed(&own));
    write_journal(&own, &trace);
    let stacks = trace.with_extension("stacks");
    std::os::unix::fs::symlink(&victim, &stacks).unwrap();
    for words in [&["summary"][..], &["check", "--repair"], &["peak", "--by", "stack"]] {
        bounded(&[words, &[trace.to_str().unwrap()]].concat());
    }
    assert_eq!(fs::read_to_string(&victim).unwrap(), "years of work\nand its last line");

    // A trace that is a link itself is answered, and the file behind it stays.
    fs::remove_file(&stacks).unwrap();
    let bytes = fs::read(&trace).unwrap();
    let target = folder.path().join("target.csv");
    fs::rename(&trace, &target).unwrap();
    std::os::unix::fs::symlink(&target, &trace).unwrap();
    let answer = bounded(&["peak", "--json", trace.to_str().unwrap()]);
    assert!(answer.status.success(), "{}", String::from_utf8_lossy(&answer.stderr));
    assert_eq!(fs::read(&target).unwrap(), bytes);
}

/// Returns a gzip member that unpacks to 16 MiB of one letter.
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
    // Three files with a line of 2 GiB: in compressed data, in a hole of the file, and after a quote that
    // never closes.
    fs::write(place("packed.csv.gz"), [gz, packed_letters().repeat(128)].concat()).unwrap();
    for (name, end) in [("hole.csv", &b""[..]), ("quote.csv", b"9,\"")] {
        fs::write(place(name), [&good[..], end].concat()).unwrap();
        fs::OpenOptions::new().write(true).open(place(name)).unwrap().set_len(2 << 30).unwrap();
    }
    for name in ["packed.csv.gz", "hole.csv", "quote.csv"] {
        every_command(&place(name));
        fs::remove_file(place(name)).unwrap();
    }
    // A good trace whose stacks file has a line of 2 GiB.
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
        // The status is 2 if the file cannot be read, and 1 if `check` found the bad line.
        assert!(matches!(answer.status.code(), Some(1 | 2)), "{:?}", answer.status);
        let said = [answer.stderr, answer.stdout].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        assert!(said.len() < 6000 && said.contains("host.r0.1.csv"), "{} bytes: {:.300}", said.len(), said);
    }
}

/// Characters that control a terminal.
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
    // Also runs every command on a damaged trace, because errors quote it, and on a missing file.
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
fn autocast_is_predicted_for_a_step_of_many_ops_in_seconds() {
    let mut trace = TraceBuilder::default();
    let owner = Row { module: "Net", op: "aten::add", phase: "forward", ..Row::default() };
    let parameter = Row { category: Category::Parameter, ..owner };
    let weight = trace.alloc(1 << 20, owner);
    trace.tag(weight, 1 << 20, owner, parameter);
    for _ in 0..100_000 {
        let range = Row { api: "module", name: "Net.relu", step: 0, phase: "forward", ..Row::default() };
        trace.raw(Row { event: EventName::RangeBegin, ..range });
        let row = Row { module: "Net.relu", step: 0, category: Category::Activation, ..owner };
        let block = trace.alloc(1 << 16, row);
        trace.raw(Row { event: EventName::Op, api: "record_function", latency_ns: 1500, ..row });
        trace.free(block, 1 << 16, row);
        trace.raw(Row { event: EventName::RangeEnd, ..range });
    }
    let (_folder, path) = with_trace(&trace.finish());
    // The limit is in seconds of processor time, which does not grow on a busy machine.
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -t 6; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_memtrace")]);
    let answer = command.args(["advise", "--autocast", "bf16"]).arg(path).output().unwrap();
    assert!(answer.status.success(), "{:?} {}", answer.status, String::from_utf8_lossy(&answer.stderr));
}

#[test]
fn only_one_source_file_of_the_command_prints_lines() {
    fn check(folder: &Path) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                check(&path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.ends_with("terminal.rs")
            {
                let text = fs::read_to_string(&path).unwrap();
                // `println!();` is left out, because it prints no text: it only ends a line that was printed
                // before.
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

/// A pseudo-random generator, with the same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, most: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % most.max(1) as u64) as usize
    }
}

/// Returns a copy of `text` with a few bytes, fields or lines changed.
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
        // Most changes are made after the header and the meta row, because a change there makes most commands
        // fail at once.
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

/// `brief` rows that free more than there is, of devices that do not exist, and with any text -> every command
/// answers, and `check` reports the totals that the deltas do not give.
#[test]
fn brief_rows_with_any_values_end_no_command() {
    let mut trace = TraceBuilder::new(Meta { brief: true, ..Meta::default() });
    trace.segment(2 << 20);
    trace.alloc(512, Row { module: "Net", ..Row::default() });
    for (device, delta) in
        [(0, 1024), (0, -1 << 40), (0, i64::MAX), (-1, 512), (-2, 512), (7, i64::MIN), (0, 0)]
    {
        trace.raw(Row {
            event: EventName::Brief,
            device,
            api: "caching_allocator",
            delta_bytes: delta,
            name: "allocations=x bytes=",
            ..Row::default()
        });
    }
    let (_folder, path) = with_trace(&trace.finish());
    let answers = every_command(&path);
    let check = &answers.iter().find(|(said, _)| said.contains("\"check\"")).unwrap().1;
    let said = String::from_utf8_lossy(&check.stdout);
    assert!(said.contains("totals that differ from the replay"), "{said}");
}

#[test]
fn a_trace_in_a_pipe_or_a_device_gives_an_error_and_waits_for_nothing() {
    let folder = TempDir::new().unwrap();
    let fifo = folder.path().join("a.csv");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    // A folder in which the only trace is a pipe has no trace.
    let answer = bounded(&["summary", folder.path().to_str().unwrap()]);
    assert_eq!(answer.status.code(), Some(2), "{}", String::from_utf8_lossy(&answer.stderr));
    for path in ["/dev/zero", "/dev/null"] {
        let answer = bounded(&["summary", path]);
        assert_eq!(answer.status.code(), Some(2), "{path}");
    }
    // Opens a writer for the pipe: without a writer, a reader would wait forever.
    let _writer = fs::OpenOptions::new().read(true).write(true).open(&fifo).unwrap();
    let answer = bounded(&["summary", fifo.to_str().unwrap()]);
    assert_eq!(answer.status.code(), Some(2), "{}", String::from_utf8_lossy(&answer.stderr));
}

/// Returns a folder with the traces of `ranks` ranks.
fn with_ranks(ranks: i32) -> TempDir {
    let folder = TempDir::new().unwrap();
    for rank in 0..ranks {
        let meta = Meta { rank, world_size: ranks, start_unix_ns: 1, ..Meta::default() };
        let mut trace = TraceBuilder::new(meta);
        trace.segment(2 << 20);
        trace.alloc(512, Row::default());
        fs::write(folder.path().join(format!("h.r{rank}.1.csv")), trace.finish()).unwrap();
    }
    folder
}

#[test]
fn thousands_of_traces_exhaust_neither_memory_nor_time() {
    let (many, fewer) = (with_ranks(6000), with_ranks(2500));
    let [many, fewer] = [&many, &fewer].map(|folder| folder.path().to_str().unwrap());
    for words in [&["summary"][..], &["ranks"], &["leaks", "--holders"], &["live", "--once"]] {
        let output = bounded_by(MOST_KIB / 2, &[words, &[many]].concat());
        assert!(output.status.success(), "{words:?}: {:?}", output.status);
        if words[0] != "live" {
            let lines = String::from_utf8_lossy(&output.stdout).lines().count();
            assert!((64..300).contains(&lines), "{words:?}: {lines} lines");
            let few = bounded(&[words, &["--top", "3", fewer]].concat());
            let lines = String::from_utf8_lossy(&few.stdout).lines().count();
            assert!(few.status.success() && lines < 60, "{words:?} --top 3: {lines} lines");
        }
    }
    let digests = TempDir::new().unwrap();
    let place = digests.path().to_str().unwrap();
    assert!(bounded(&["export", "--to", "digest", "-o", place, fewer]).status.success());
    assert_eq!(fs::read_dir(digests.path()).unwrap().count(), 2500);
}

#[test]
fn a_command_that_runs_out_of_memory_ends_with_one_line() {
    let mut trace = TraceBuilder::default();
    trace.segment(1 << 40);
    for _ in 0..400_000 {
        trace.alloc(512, Row::default());
    }
    let (_folder, path) = with_trace(&trace.finish());
    assert!(bounded(&["summary", path.to_str().unwrap()]).status.success());
    // Lower the limit until the file does not fit: the command's own needs differ between machines.
    let mut ended = None;
    for mib in [400, 300, 200, 150, 100, 70] {
        let output = bounded_by(mib << 10, &["summary", path.to_str().unwrap()]);
        if !output.status.success() {
            ended = Some(output);
            break;
        }
    }
    let ended = ended.unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(2), "{:?}: {said}", ended.status);
    assert!(said.starts_with("memtrace: out of memory: ") && said.lines().count() == 1, "{said}");
}

#[test]
fn a_gate_refuses_a_trace_that_lacks_rows_and_sees_growth_of_any_device() {
    let block = |trace: &mut TraceBuilder, device: i32, bytes: i64| {
        trace.change(
            Row {
                device,
                event: EventName::SegmentAlloc,
                api: "cudaMalloc",
                delta_bytes: bytes,
                ..Row::default()
            },
            [0, 0, bytes],
        );
        trace.alloc(bytes, Row { device, ..Row::default() });
    };
    let made = |devices: &[i64], lost: bool, ends: bool| {
        let mut trace = TraceBuilder::new(Meta { world_size: 1, ..Meta::default() });
        for (device, bytes) in devices.iter().enumerate() {
            block(&mut trace, device as i32, *bytes);
        }
        if lost {
            trace.raw(Row { event: EventName::Lost, api: "memtrace", requested_bytes: 7, ..Row::default() });
        }
        with_trace(&if ends { trace.finish() } else { trace.unfinished() })
    };
    let (_before, before) = made(&[10 << 20, 1 << 20], false, true);
    let limits = TempDir::new().unwrap();
    let file = limits.path().join("limits.toml");
    fs::write(&file, "[total]\nallocated = \"1g\"\n").unwrap();
    for (devices, lost, ends, diff, budget, said) in [
        (&[10 << 20, 1 << 20][..], false, true, Some(0), Some(0), ""),
        (&[10 << 20, 9 << 20], false, true, Some(3), Some(0), "of rank 0, device 1"),
        (&[10 << 20, 1 << 20, 9 << 20], false, true, Some(3), Some(0), "of rank 0, device 2"),
        (&[10 << 20, 1 << 20], true, true, Some(2), Some(2), "events were lost"),
        (&[10 << 20, 1 << 20], false, false, Some(2), Some(2), "no end row"),
    ] {
        let (_after, after) = made(devices, lost, ends);
        let after = after.to_str().unwrap();
        let ran = bounded(&["diff", "--fail-over", "2%", before.to_str().unwrap(), after]);
        let text = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert_eq!((ran.status.code(), text.contains(said)), (diff, true), "{devices:?}: {text}");
        let ran = bounded(&["budget", "--limits", file.to_str().unwrap(), after]);
        assert_eq!(ran.status.code(), budget, "{devices:?}: {}", String::from_utf8_lossy(&ran.stderr));
    }
    // Adds a second process to the run after: on the same device it counts as growth (status 3); with a rank
    // that the run before does not have, it is an error (status 2).
    for (rank, status, said) in
        [(0, Some(3), "of rank 0, device 0"), (1, Some(2), "only the second run has rank 1")]
    {
        let folder = TempDir::new().unwrap();
        fs::copy(&before, folder.path().join("h.r0.1.csv")).unwrap();
        let mut other = TraceBuilder::new(Meta { world_size: 1, rank, start_unix_ns: 7, ..Meta::default() });
        block(&mut other, 0, 9 << 20);
        fs::write(folder.path().join("h.r0.2.csv"), other.finish()).unwrap();
        let after = folder.path().to_str().unwrap();
        let ran = bounded(&["diff", "--fail-over", "2%", before.to_str().unwrap(), after]);
        let text = String::from_utf8_lossy(&ran.stdout).into_owned() + &String::from_utf8_lossy(&ran.stderr);
        assert_eq!((ran.status.code(), text.contains(said)), (status, true), "{text}");
    }
    // Growth of memory outside PyTorch's allocator must count, too.
    let mut trace = TraceBuilder::new(Meta { world_size: 1, ..Meta::default() });
    block(&mut trace, 0, 10 << 20);
    trace.change(
        Row {
            device: 0,
            event: EventName::ExtAlloc,
            api: "cudaMalloc",
            alloc_id: 99,
            delta_bytes: 9 << 20,
            ..Row::default()
        },
        [0; 3],
    );
    let (_after, after) = with_trace(&trace.finish());
    let ran = bounded(&["diff", "--fail-over", "2%", before.to_str().unwrap(), after.to_str().unwrap()]);
    let text = String::from_utf8_lossy(&ran.stdout);
    assert!(
        ran.status.code() == Some(3) && text.contains("torch and libraries of rank 0, device 0"),
        "{text}"
    );
}

#[test]
fn check_refuses_blocks_at_one_address_and_more_allocated_than_reserved() {
    let block = |id: i64, addr: i64| Row {
        device: 0,
        event: EventName::Alloc,
        api: "caching_allocator",
        alloc_id: id,
        addr,
        delta_bytes: 512,
        ..Row::default()
    };
    let found = |segment: i64, addresses: &[i64]| {
        let mut trace = TraceBuilder::default();
        trace.segment(segment);
        for (n, address) in addresses.iter().enumerate() {
            trace.change(block(3 + n as i64, *address), [512, 512, 0]);
        }
        let (_folder, path) = with_trace(&trace.finish());
        let output = bounded(&["check", "--json", path.to_str().unwrap()]);
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        let found = &answer["files"][0]["found"];
        let count = |name: &str| found[name].as_u64().unwrap();
        (output.status.code(), count("blocks_at_a_live_address"), count("allocated_above_reserved"))
    };
    assert_eq!(found(2 << 20, &[512, 1024, 4096]), (Some(0), 0, 0));
    assert_eq!(found(2 << 20, &[512, 512, 512]), (Some(1), 2, 0));
    assert_eq!(found(2 << 20, &[512, 768]), (Some(1), 1, 0));
    assert_eq!(found(1024, &[512, 1024, 4096]), (Some(1), 0, 1));
}

/// The arguments of each way to write a file: a report, the page, an export, a digest, the metrics.
const WRITERS: [&[&str]; 5] = [
    &["summary"],
    &["report"],
    &["export", "--to", "collapsed"],
    &["export", "--to", "digest"],
    &["live", "--once", "--openmetrics"],
];

/// Runs a command of [`WRITERS`] on the fixture `conv`, with its output at `place`.
fn write_to(writer: &[&str], place: &Path) -> Output {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/conv");
    let place = place.to_str().unwrap();
    let output = if writer.ends_with(&["--openmetrics"]) {
        bounded(&[writer, &[place, trace]].concat())
    } else {
        bounded(&[writer, &["-o", place, trace]].concat())
    };
    assert!(output.status.success(), "{writer:?} {place}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

#[test]
fn an_output_replaces_no_device_pipe_or_link_and_keeps_the_owner_and_mode_of_a_file() {
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, chown, symlink};

    let is_root = rustix::process::geteuid().is_root();
    for writer in WRITERS {
        let folder = TempDir::new().unwrap();
        let at = |name: &str| folder.path().join(name);
        let kind = |name: &str| fs::symlink_metadata(at(name)).unwrap().file_type();

        // A pipe: its reader gets the whole output.
        mknodat(CWD, at("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let reader = std::thread::spawn({
            let pipe = at("pipe");
            move || fs::read(pipe).unwrap()
        });
        write_to(writer, &at("pipe"));
        assert!(kind("pipe").is_fifo(), "{writer:?}");
        assert!(reader.join().unwrap().len() > 50, "{writer:?}");

        // Writes to a device like /dev/null, if this user may create one; the device must stay a device.
        let null =
            mknodat(CWD, at("null"), FileType::CharacterDevice, Mode::RUSR | Mode::WUSR, makedev(1, 3));
        if null.is_ok() && fs::File::options().write(true).open(at("null")).is_ok() {
            write_to(writer, &at("null"));
            assert!(kind("null").is_char_device(), "{writer:?}");
        }

        // A link must be followed, whether its target exists or not. A file must keep its owner and its mode.
        fs::write(at("file"), "old").unwrap();
        fs::set_permissions(at("file"), fs::Permissions::from_mode(0o640)).unwrap();
        if is_root {
            chown(at("file"), Some(12_345), Some(23_456)).unwrap();
        }
        let before = fs::metadata(at("file")).unwrap();
        fs::create_dir(at("links")).unwrap();
        symlink("../file", at("links/link")).unwrap();
        symlink("../new", at("links/dangling")).unwrap();
        for (link, file) in [("links/link", "file"), ("links/dangling", "new")] {
            write_to(writer, &at(link));
            assert!(kind(link).is_symlink(), "{writer:?} {link}");
            assert!(fs::read(at(file)).unwrap().len() > 50, "{writer:?} {link}");
        }
        let after = fs::metadata(at("file")).unwrap();
        assert_eq!(
            (after.uid(), after.gid(), after.mode()),
            (before.uid(), before.gid(), before.mode()),
            "{writer:?}"
        );
        // Only the test's four files are in the folder: no temporary file is left.
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        names.retain(|name| name != "null");
        assert_eq!(names.len(), 4, "{writer:?}: {names:?}");
    }
}

#[test]
fn another_name_of_standard_output_gets_the_output_alone() {
    for writer in WRITERS.iter().filter(|writer| !writer.contains(&"live")) {
        let direct = write_to(writer, Path::new("-")).stdout;
        assert!(!direct.is_empty(), "{writer:?}");
        for name in ["/dev/stdout", "/proc/self/fd/1"] {
            assert_eq!(write_to(writer, Path::new(name)).stdout.len(), direct.len(), "{writer:?} {name}");
        }
    }
}

#[test]
fn an_export_of_several_files_creates_none_next_to_a_device_file() {
    let folder = TempDir::new().unwrap();
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/conv");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        folder.path().join("pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    let pipe = folder.path().join("pipe");
    let output = bounded(&["export", "--to", "plots", "-o", pipe.to_str().unwrap(), trace]);
    assert!(!output.status.success());
    assert!(
        String::from_utf8_lossy(&output.stderr).contains("this export writes several files; name a folder")
    );
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn an_export_into_a_folder_follows_no_link_when_it_removes_files() {
    let folder = TempDir::new().unwrap();
    let at = |name: &str| folder.path().join(name);
    fs::create_dir(at("precious")).unwrap();
    fs::create_dir(at("out")).unwrap();
    fs::write(at("precious/file.parquet"), "").unwrap();
    std::os::unix::fs::symlink("../precious", at("out/rank=0")).unwrap();
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/conv");
    let output = bounded(&["export", "--to", "parquet", "-o", at("out").to_str().unwrap(), trace]);
    assert!(!output.status.success());
    assert!(at("precious/file.parquet").exists());
    // A folder that another tool has partitioned by rank is refused.
    fs::create_dir_all(at("data/rank=0")).unwrap();
    fs::write(at("data/rank=0/part.parquet"), "PAR1").unwrap();
    let export = || bounded(&["export", "--to", "parquet", "-o", at("data").to_str().unwrap(), trace]);
    let output = export();
    assert_eq!(output.status.code(), Some(2), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(at("data/rank=0/part.parquet").exists());
    // An export replaces an earlier export.
    fs::remove_dir_all(at("data")).unwrap();
    assert!(export().status.success());
    let output = export();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs the reports that predict changes on a trace and returns what each printed. All must end within
/// [`bounded`].
fn predictions(trace: Vec<u8>) -> Vec<String> {
    let (_folder, path) = with_trace(&trace);
    drop(trace);
    let all = ["--checkpoint=**", "--chunk-loss=8", "--optimizer=in-backward", "--batch=x2"];
    let change = [&["advise"][..], &all].concat();
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
    run(&["advise", "--shard=8", "--checkpoint=**", "--optimizer=8bit"]);
    [&change[..], &["advise"], &["oom"]].into_iter().map(run).collect()
}

/// Returns an empty trace of a device of 1 GiB.
fn of_small_card() -> TraceBuilder {
    let devices = vec![Device { ordinal: 0, name: "card".to_owned(), total_bytes: 1 << 30 }];
    TraceBuilder::new(Meta { devices, ..Meta::default() })
}

/// Returns a row of a module's forward pass.
fn of_module() -> Row<'static> {
    Row { device: 0, module: "Net", name: "Net", api: "module", phase: "forward", ..Row::default() }
}

/// Returns the row of a request that is too large for any card.
fn too_big() -> Row<'static> {
    Row { event: EventName::Oom, requested_bytes: 1 << 40, rounded_bytes: 1 << 40, ..of_module() }
}

#[test]
fn predictions_take_a_time_that_grows_with_the_rows_of_a_step() {
    const MANY: usize = 100_000;
    let backward = Row { phase: "backward", op: "MmBackward0", ..of_module() };
    // A trace with many losses, and with as many ops that each began before all allocations.
    let mut trace = of_small_card();
    for _ in 0..MANY {
        trace.alloc(512, Row { op: "aten::_log_softmax", ..of_module() });
        let loss = Row { event: EventName::Op, op: "aten::cross_entropy_loss", api: "op", ..of_module() };
        trace.raw(Row { latency_ns: i64::MAX, ..loss });
    }
    trace.raw(too_big());
    predictions(trace.finish());
    // A trace with many calls of a module, each of which keeps two blocks. A single backward function frees
    // the blocks of all calls, and makes a gradient for each.
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
    // A trace with many steps, each of which leaves a block.
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
