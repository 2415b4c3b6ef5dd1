//! The command line: output, exit status and the files that it leaves.

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use memtrace_analysis::exports;
use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::config;
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Category, EventName, Row};

use crate::common::copied::copy_program;
use crate::common::installed::missing;
use crate::common::running::end;
use crate::common::{LOADER, command, commands};

fn memtrace(arguments: &[&str]) -> Command {
    let mut command = command::memtrace();
    // A wide terminal, so that help prints each command and option on one line.
    command.args(arguments).env("COLUMNS", "500");
    command
}

fn output(arguments: &[&str]) -> Output {
    memtrace(arguments).output().unwrap()
}

fn stdout(output: &Output) -> String {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Two steps of a model with one layer. At the peak its parameter, an activation and a gradient are live.
fn training(rank: i32) -> Vec<u8> {
    let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 80 << 30 }];
    let argv = vec!["python".to_owned(), "train.py".to_owned()];
    let mut trace = TraceBuilder::new(Meta { rank, world_size: 2, devices, argv, ..Meta::default() });
    trace.segment(20 << 20);
    let row = Row { rank, module: "Net.fc", op: "aten::mm", ..Row::default() };
    let parameter = Row { category: Category::Parameter, op: "aten::empty", ..row };
    trace.alloc(4 << 20, parameter);
    for step in 0..2 {
        let forward = Row { step, phase: "forward", category: Category::Activation, ..row };
        let backward = Row { step, phase: "backward", category: Category::Temporary, ..row };
        let gradient = Row { category: Category::Gradient, ..backward };
        let activation = trace.alloc(3 << 20, forward);
        let grad = trace.alloc(4 << 20, backward);
        trace.tag(grad, 4 << 20, backward, gradient);
        trace.free(activation, 3 << 20, forward);
        trace.free(grad, 4 << 20, gradient);
    }
    trace.finish()
}

fn folder_with(traces: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in traces {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn path(folder: &tempfile::TempDir) -> &str {
    folder.path().to_str().unwrap()
}

#[test]
fn peak_by_module_adds_up() {
    let folder = folder_with(&[("host.r0.1.csv", training(0))]);
    let text = stdout(&output(&["peak", path(&folder), "--by", "category"]));
    for line in ["parameter", "gradient", "activation"] {
        assert!(text.contains(line), "{text}");
    }
    let json = stdout(&output(&["peak", path(&folder), "--json"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["peak"]["bytes"], 11 << 20);
    assert_eq!(json["peak"]["step"], 0);
    assert_eq!(json["groups"][0]["key"], "Net.fc");
    assert_eq!(json["groups"][0]["bytes"], 11 << 20);
}

#[test]
fn summary_fits_one_screen_and_ends_with_the_next_command() {
    let folder = folder_with(&[("host.r0.1.csv", training(0)), ("host.r1.2.csv", training(1))]);
    let text = stdout(&output(&["summary", path(&folder)]));
    assert!(text.lines().count() <= 30, "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    assert!(text.contains("11.00 MiB"), "{text}");
    assert!(text.contains("0 events lost"), "{text}");
    let last = text.lines().last().unwrap();
    assert_eq!(last, format!("next: memtrace peak {} --by module", path(&folder)));
    assert!(!text.contains('\x1b'), "colour is for terminals");
}

#[test]
fn check_exits_with_1_when_the_totals_are_wrong() {
    let good = training(0);
    let folder = folder_with(&[("a.csv", good.clone())]);
    assert!(stdout(&output(&["check", path(&folder)])).contains("ok"));
    let text = String::from_utf8(good).unwrap().replace("3145728,7340032", "3145728,7340033");
    let folder = folder_with(&[("a.csv", text.into_bytes())]);
    let bad = output(&["check", path(&folder)]);
    assert_eq!(bad.status.code(), Some(1));
    let text = String::from_utf8(bad.stdout).unwrap();
    assert!(text.contains("totals that differ from the replay: 2"), "{text}");
}

#[test]
fn input_that_cannot_be_read_exits_with_2_and_a_reason() {
    let folder = folder_with(&[("a.csv", b"a,b\n1,2\n".to_vec())]);
    let bad = output(&["summary", path(&folder)]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(stderr(&bad).contains("not a memtrace trace"), "{}", stderr(&bad));
    let empty = folder_with(&[]);
    let bad = output(&["summary", path(&empty)]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(stderr(&bad).contains("no trace here"), "{}", stderr(&bad));
    let bad = output(&["summary", path(&folder), "--units", "MB"]);
    assert_eq!(bad.status.code(), Some(2));
    let mut damaged = training(0);
    damaged.truncate(damaged.len() - 10);
    let folder = folder_with(&[("a.csv", damaged)]);
    let bad = output(&["summary", path(&folder)]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(stderr(&bad).contains("a.csv:17:"), "{}", stderr(&bad));
    assert!(stderr(&bad).contains("--lenient skips and counts such lines"), "{}", stderr(&bad));
    let lenient = stdout(&output(&["summary", path(&folder), "--lenient"]));
    assert!(lenient.contains("skipped 1 invalid line; the first: "), "{lenient}");
}

#[test]
fn truncated_gzip_file_is_read_up_to_its_end_with_lenient() {
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::none());
    gzip.write_all(&training(0)).unwrap();
    let mut cut = gzip.finish().unwrap();
    cut.truncate(cut.len() - 200);
    let folder = folder_with(&[("a.csv.gz", cut)]);
    let bad = output(&["summary", path(&folder)]);
    assert_eq!(bad.status.code(), Some(2));
    assert!(stderr(&bad).contains("; --lenient reads the rows before it"), "{}", stderr(&bad));
    let json = stdout(&output(&["peak", path(&folder), "--lenient", "--json"]));
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["peak"]["bytes"], 11 << 20);
    let note = "the rows after this point are missing";
    assert!(
        json["notes"].as_array().unwrap().iter().any(|text| text.as_str().unwrap().contains(note)),
        "{json}"
    );
    let checked = String::from_utf8(output(&["check", path(&folder)]).stdout).unwrap();
    assert!(
        checked.contains("the rest of the file cannot be read: 1") && checked.contains("a.csv.gz: "),
        "{checked}"
    );
}

/// Root may list every folder, so root runs the command as another user.
#[test]
fn subfolder_that_cannot_be_listed_does_not_hide_a_run() {
    let folder = folder_with(&[]);
    let program = folder.path().join("memtrace");
    copy_program(Path::new(env!("CARGO_BIN_EXE_memtrace")), &program);
    for name in ["a", "b"] {
        fs::create_dir(folder.path().join(name)).unwrap();
        fs::write(folder.path().join(name).join("host.r0.1.csv"), training(0)).unwrap();
    }
    let mode = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    mode(folder.path(), 0o755);
    mode(&folder.path().join("b"), 0o000);
    let mut command = if rustix::process::geteuid().is_root() {
        let mut other = Command::new("setpriv");
        other.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&program);
        other
    } else {
        Command::new(&program)
    };
    let answer = command.args(["summary", path(&folder)]).env_remove("LD_PRELOAD").output().unwrap();
    mode(&folder.path().join("b"), 0o755);
    assert!(stdout(&answer).contains("11.00 MiB"));
}

/// Selectors with a value that matches nothing in the test's trace, and the error with the values that exist.
const SELECTORS: [(&str, &str, &str); 12] = [
    ("rank", "7", "--rank 7: no match in TRACE; its ranks: 0-1"),
    ("rank", "-1", "--rank -1: no match in TRACE; its ranks: 0-1"),
    ("device", "7", "--device 7: no match in TRACE; its devices: 0"),
    ("device", "-1", "--device -1: no match in TRACE; its devices: 0"),
    ("step", "99", "--step 99: no match in TRACE; its steps: -1, 0-1"),
    ("step", "99:", "--step 99:: no match in TRACE; its steps: -1, 0-1"),
    ("window", "90s:99s", "--window 90s:99s: no match in TRACE; its time: 0 ns to 15.0 µs"),
    ("window", "1500ns:1600ns", "no match in TRACE; its nearest rows are at: 1us and 2us"),
    ("at", "step:99", "--at step:99: no match in TRACE; its steps: -1, 0-1"),
    ("at", "99s", "--at 99s: no match in TRACE; its time: 0 ns to 15.0 µs"),
    ("at", "oom", "--at oom: no match in TRACE; its moments: peak, "),
    ("limits", "LIMITS", "[modules] \"Net.fd\": no match in TRACE; its modules: Net.fc, Net"),
];

/// Options whose number must be at least 1.
const COUNTS: [&str; 6] = ["top", "depth", "calls", "width", "height", "tokens"];

/// Further options with a value. They neither select a part of a trace nor have a minimum of 1.
const OTHER_OPTIONS: &[&str] = &[
    "against",
    "allow-run",
    "as",
    "ask",
    "autocast",
    "batch",
    "by",
    "checkpoint",
    "chunk-loss",
    "color",
    "completions",
    "conf",
    "detail",
    "dtype",
    "each",
    "end-with-parent",
    "fail-over",
    "fit",
    "format",
    "gpus",
    "gpus-per-node",
    "host",
    "host-mem",
    "image",
    "interval",
    "jobs",
    "man",
    "max",
    "max-events",
    "min",
    "model",
    "multiple-of",
    "nvidia-smi",
    "of",
    "offload",
    "openmetrics",
    "optimizer",
    "out",
    "output",
    "phantom",
    "phantom-dynamic",
    "phantom-fault",
    "pid",
    "prices",
    "python",
    "ranks",
    "recipe",
    "reserved",
    "seq",
    "set",
    "shard",
    "size",
    "smallest",
    "steps",
    "title",
    "to",
    "trust-remote-code",
    "units",
    "values",
    "wait",
    "within",
    "without",
    "worst",
    "write",
];

/// Returns the options that take a value, from the help of a command.
fn options_of(command: &str) -> Vec<String> {
    let help = stdout(&output(&[command, "--help"]));
    let names = help.lines().filter_map(|line| {
        let (_, option) = line.trim_start().strip_prefix('-').map(|_| line.split_once("--"))??;
        let end = option.find([' ', '['])?;
        option[end..].trim_start_matches([' ', '[', '=']).starts_with('<').then(|| option[..end].to_owned())
    });
    names.collect()
}

/// Returns the ways to give `command` the trace `TRACE`; empty for a command that reads no trace.
fn ways_to_read(command: &str) -> Vec<Vec<&str>> {
    match command {
        "run" | "fit" | "doctor" | "help" | "lib" | "mcp" => Vec::new(),
        "diff" => vec![vec!["diff", "TRACE", "TRACE"]],
        "tune" => vec![vec!["tune", "TRACE"]],
        "advise" => vec![vec!["advise", "TRACE"], vec!["advise", "TRACE", "--batch=x2"]],
        "live" => vec![vec!["live", "TRACE", "--once"]],
        "report" => vec![vec!["report", "TRACE"], vec!["report", "TRACE", "--against", "TRACE"]],
        "export" => {
            exports::EXPORTS.iter().map(|export| vec!["export", "TRACE", "--to", export.name()]).collect()
        }
        command => vec![vec![find_report(command), "TRACE"]],
    }
}

/// Returns the `'static` name of a report.
fn find_report(name: &str) -> &'static str {
    memtrace_analysis::reports::find(name)
        .unwrap_or_else(|| panic!("{name}: a command that no test knows"))
        .name()
}

#[test]
fn selectors_that_match_nothing_are_errors_in_every_command_and_list_the_possible_values() {
    let folder = folder_with(&[("host.r0.1.csv", training(0)), ("host.r1.2.csv", training(1))]);
    let here = tempfile::tempdir().unwrap();
    let limits = here.path().join("limits.toml");
    fs::write(&limits, "[modules]\n\"Net.fd\" = \"1g\"\n").unwrap();
    let real = |text: &str| text.replace("TRACE", path(&folder)).replace("LIMITS", limits.to_str().unwrap());
    let mut tried = 0;
    for command in commands::listed() {
        let command = command.name.as_str();
        let options = options_of(command);
        for option in &options {
            let is_known = SELECTORS.iter().any(|(name, ..)| name == option)
                || COUNTS.contains(&option.as_str())
                || OTHER_OPTIONS.contains(&option.as_str())
                || config::options().any(|variable| variable.option() == *option);
            assert!(is_known, "{command} --{option} is new: list it in SELECTORS, COUNTS or OTHER_OPTIONS");
        }
        let counts = COUNTS.map(|name| (name, "0", "1"));
        for way in ways_to_read(command) {
            for (name, value, error) in SELECTORS.iter().copied().chain(counts) {
                let is_taken = options.iter().any(|option| option == name);
                if !is_taken {
                    continue;
                }
                let mut arguments: Vec<String> = way.iter().map(|word| real(word)).collect();
                if command == "budget" && name != "limits" {
                    arguments.push(format!("--limits={}", limits.display()));
                }
                arguments.push(format!("--{name}={}", real(value)));
                let bad = memtrace(&[]).args(&arguments).current_dir(here.path()).output().unwrap();
                let said = stderr(&bad);
                assert_eq!(bad.status.code(), Some(2), "{arguments:?}: {said}");
                assert!(said.contains(&real(error)), "{arguments:?}: {said}");
                assert!(bad.stdout.is_empty(), "{arguments:?}");
                tried += 1;
            }
        }
    }
    assert!(tried > 150, "{tried}");
    assert_eq!(fs::read_dir(here.path()).unwrap().count(), 1, "a refused request wrote a file");
    let both = output(&["peak", path(&folder), "--device", "7", "--step", "99"]);
    assert_eq!(stderr(&both).lines().count(), 2, "two faults are two lines: {}", stderr(&both));
}

#[test]
fn a_path_in_the_place_of_a_command_is_answered_with_the_command() {
    let folder = folder_with(&[("vm.r0.1.csv", training(0))]);
    let refused = output(&[path(&folder)]);
    assert_eq!(refused.status.code(), Some(2));
    let expected = format!("show its trace with: memtrace summary {}", path(&folder));
    assert!(stderr(&refused).contains(&expected), "{}", stderr(&refused));
    let unknown = output(&["nothing-of-this-name"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(stderr(&unknown).starts_with("memtrace: unrecognized subcommand"), "{}", stderr(&unknown));
    let bare = output(&[]);
    assert_eq!(bare.status.code(), Some(2));
    assert!(stderr(&bare).starts_with("Trace the GPU memory"), "{}", stderr(&bare));
}

#[test]
fn diff_of_two_steps_takes_one_trace() {
    let folder = folder_with(&[("vm.r0.1.csv", training(0))]);
    let one = output(&["diff", "--steps", "0:1", path(&folder)]);
    assert!(
        one.status.success() && stdout(&one).contains("compared: step 0 before, step 1 after"),
        "{}",
        stderr(&one)
    );
    for wrong in [&["diff", path(&folder)][..], &["diff", "--steps", "0:1", path(&folder), path(&folder)]] {
        assert_eq!(output(wrong).status.code(), Some(2), "{wrong:?}");
    }
}

#[test]
fn values_that_would_be_misread_are_refused() {
    let folder = folder_with(&[("vm.r0.1.csv", training(0))]);
    for (arguments, reason) in [
        (["advise", "--batch=128"], "expected a factor that starts with x"),
        (["advise", "--fit=24"], "add a unit, such as 24g"),
        (["summary", "--units=MB"], "possible values: auto, B, KiB, MiB, GiB"),
    ] {
        let refused = output(&[arguments[0], arguments[1], path(&folder)]);
        assert_eq!(refused.status.code(), Some(2), "{arguments:?}");
        assert!(stderr(&refused).contains(reason), "{}", stderr(&refused));
    }
}

#[test]
fn csv_has_no_row_for_the_groups_that_top_leaves_out() {
    let folder = folder_with(&[("vm.r0.1.csv", training(0))]);
    let arguments = ["peak", "--by", "op", "--top", "1", path(&folder)];
    assert!(stdout(&output(&arguments)).contains("more; --top N lists them"));
    let csv = stdout(&output(&[&arguments[..], &["--format", "csv"]].concat()));
    assert!(!csv.contains("--top N"), "{csv}");
}

#[test]
fn report_writes_its_page_into_a_folder() {
    let folder = folder_with(&[("vm.r0.1.csv", training(0))]);
    let written = output(&["report", path(&folder), "-o", path(&folder)]);
    assert!(written.status.success(), "{}", stderr(&written));
    assert!(folder.path().join("report.html").is_file());
}

#[test]
fn broken_pipe_is_no_error() {
    let folder = folder_with(&[("a.csv", training(0))]);
    let mut child = memtrace(&["peak", path(&folder), "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(stderr(&output), "");
}

#[test]
fn summary_says_that_a_trace_is_unfinished() {
    let mut trace = TraceBuilder::default();
    trace.segment(2 << 20);
    trace.raw(Row { event: EventName::Lost, name: "3 dropped", requested_bytes: 3, ..Row::default() });
    let folder = folder_with(&[("a.csv", trace.unfinished())]);
    let text = stdout(&output(&["summary", path(&folder)]));
    assert!(text.contains("no end row") && text.contains("3 events lost"), "{text}");
}

#[test]
fn summary_says_that_the_process_of_a_trace_still_runs() {
    let folder = tempfile::TempDir::new().unwrap();
    let journal = folder.path().join("journal");
    std::fs::write(&journal, "").unwrap();
    let meta = Meta { journal: journal.display().to_string(), world_size: 1, ..Meta::default() };
    let mut trace = TraceBuilder::new(meta);
    trace.segment(2 << 20);
    let name = format!("vm.r0.{}.csv", std::process::id());
    std::fs::write(folder.path().join(name), trace.unfinished()).unwrap();
    let text = || stdout(&output(&["summary", path(&folder)]));
    assert!(text().contains("its process still runs"), "{}", text());
    // Without the journal, summary cannot distinguish a killed process from a running one.
    std::fs::remove_file(journal).unwrap();
    assert!(text().contains("was killed or still runs"), "{}", text());
}

#[test]
fn summary_names_the_rows_that_a_trace_lacks() {
    let whole = String::from_utf8(training(0)).unwrap();
    let mut lines: Vec<&str> = whole.lines().collect();
    lines.drain(6..8);
    let folder = folder_with(&[("a.csv", format!("{}\n", lines.join("\n")).into_bytes())]);
    let told = "damaged: a.csv: 2 rows are missing, first after seq 5: totals and peaks may be wrong";
    // By default frag and ledger describe a moment before the gap in the rows, so ask for the end.
    let at_end = ["--at", "end"];
    for report in ["summary", "peak", "frag", "ledger", "peak --mem-tracker", "ranks"] {
        let mut arguments: Vec<&str> = report.split(' ').chain([path(&folder)]).collect();
        arguments.extend(at_end.iter().filter(|_| matches!(report, "frag" | "ledger")));
        let text = stdout(&output(&arguments));
        assert!(text.contains(told), "{report}: {text}");
        arguments.push("--json");
        let json = stdout(&output(&arguments));
        assert!(json.contains(told), "{report}: {json}");
    }
    let check = output(&["check", path(&folder)]);
    let text = String::from_utf8_lossy(&check.stdout);
    assert_eq!(check.status.code(), Some(1), "{text}");
    assert!(text.contains("gaps in seq: 1") && text.contains("rows missing in the gaps of seq: 2"), "{text}");
}

#[test]
fn check_counts_all_problems_of_all_files_in_one_run() {
    let whole = String::from_utf8(training(0)).unwrap();
    let mut lines: Vec<String> = whole.lines().map(str::to_owned).collect();
    for place in [5, 8, 11] {
        lines[place] = lines[place].replacen(',', ";", 1);
    }
    let damaged = format!("{}\n", lines.join("\n"));
    let cut = whole[..whole.len() - 40].to_owned();
    let folder = folder_with(&[
        ("a.r0.1.csv", damaged.into_bytes()),
        ("b.r1.2.csv", cut.into_bytes()),
        ("c.r2.3.csv", training(2)),
    ]);
    let check = output(&["check", path(&folder)]);
    let text = String::from_utf8(check.stdout).unwrap();
    assert_eq!(check.status.code(), Some(1), "{text}");
    assert!(text.contains("invalid lines: 3") && text.contains("invalid lines: 1"), "{text}");
    for line in [
        "a.r0.1.csv:6: ",
        "a.r0.1.csv:9: ",
        "a.r0.1.csv:12: ",
        "last line cut off, or the rest of the file cannot be read: 1",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(text.contains("no end row: killed, still running, or an incomplete copy: 1"), "{text}");
    assert!(text.contains("c.r2.3.csv: 1"), "{text}");
}

#[test]
fn a_cut_copy_is_not_called_a_killed_process() {
    let mut trace =
        TraceBuilder::new(Meta { journal: "/dev/shm/memtrace-1-2.journal".to_owned(), ..Meta::default() });
    trace.segment(2 << 20);
    let folder = folder_with(&[("a.csv", trace.unfinished())]);
    let told = stderr(&output(&["summary", path(&folder)]));
    assert!(told.contains("its process was killed, or the file is an incomplete copy"), "{told}");
    let meta = Meta {
        journal: "/dev/shm/memtrace-1-2.journal".to_owned(),
        host: "elsewhere".to_owned(),
        ..Meta::default()
    };
    let folder = folder_with(&[("a.csv", TraceBuilder::new(meta).unfinished())]);
    let told = stderr(&output(&["summary", path(&folder)]));
    assert!(told.contains("the trace was copied from elsewhere before its process ended"), "{told}");
}

#[test]
fn counts_of_one_are_in_the_singular() {
    let mut trace = TraceBuilder::new(Meta::default());
    trace.segment(2 << 20);
    trace.alloc(1 << 20, Row { step: 0, ..Row::default() });
    let folder = folder_with(&[("a.csv", trace.finish())]);
    for report in memtrace_analysis::reports::with_views().filter(|report| report.inputs().len() == 1) {
        let words: Vec<&str> = report.name().split(' ').chain([path(&folder)]).collect();
        let run = output(&words);
        let text = String::from_utf8(run.stdout).unwrap();
        let mut words = text.split([' ', '\n', '(']).peekable();
        while let Some(word) = words.next() {
            let next = words.peek().copied().unwrap_or("").trim_end_matches([',', ';', ':', ')', '.']);
            let plural = ["blocks", "events", "rows", "frees", "steps", "segments", "ranks", "holes", "OOMs"];
            assert!(word != "1" || !plural.contains(&next), "{}: 1 {next}\n{text}", report.name());
        }
    }
    let text = stdout(&output(&["summary", path(&folder)]));
    assert!(text.contains("1 allocation, 0 frees, 1 segment, 1 step"), "{text}");
}

#[test]
fn help_describes_every_variable_every_column_and_every_event() {
    let events = stdout(&output(&["help", "events"]));
    for event in EventName::ALL {
        assert!(events.contains(event.as_str()) && events.contains(event.about()), "{event}");
    }
    let told = stderr(&output(&["help", "evnts"]));
    assert!(told.contains("the nearest topics are events"), "{told}");
    for command in ["oom", "peak", "run", "help"] {
        let by_option = stdout(&output(&[command, "--help"]));
        assert!(by_option.contains("Usage: memtrace"), "{by_option}");
        assert_eq!(stdout(&output(&["help", command])), by_option, "{command}");
    }
    // An abbreviation works as on the command line; `o` begins two commands.
    assert_eq!(stdout(&output(&["help", "summ"])), stdout(&output(&["summary", "--help"])));
    assert!(stderr(&output(&["help", "o"])).contains("the nearest topics are o"));
    let variables = stdout(&output(&["help", "variables"]));
    for variable in memtrace_trace::config::variables() {
        assert!(variables.contains(variable.name), "{}", variable.name);
    }
    let columns = stdout(&output(&["help", "columns"]));
    for column in memtrace_trace::columns::COLUMNS {
        assert!(columns.contains(column.name), "{}", column.name);
    }
    let help = stdout(&output(&["--help"]));
    for report in memtrace_analysis::reports::REPORTS {
        assert!(help.contains(report.name()) && help.contains(report.about()), "{}", report.name());
    }
}

/// A copy of the command next to a stand-in for the library. The stand-in only proves that it was loaded, so
/// these tests cover the launcher alone.
struct Installed {
    folder: tempfile::TempDir,
    command: PathBuf,
}

impl Installed {
    fn new() -> Option<Installed> {
        let folder = tempfile::tempdir().unwrap();
        let command = folder.path().join("memtrace");
        copy_program(env!("CARGO_BIN_EXE_memtrace").as_ref(), &command);
        let source = folder.path().join("hello.c");
        fs::write(
            &source,
            r#"#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void hello(void) {
    const char *path = getenv("MEMTRACE_HELLO");
    int fd = path ? open(path, O_WRONLY | O_APPEND) : -1;
    if (fd >= 0) { if (write(fd, ".", 1) != 1) abort(); close(fd); }
}
"#,
        )
        .unwrap();
        for name in ["libmemtrace.so", "libmemtrace_phantom.so"] {
            let built = Command::new("cc")
                .args(["-shared", "-fPIC", "-o"])
                .arg(folder.path().join(name))
                .arg(&source)
                .status();
            if !built.is_ok_and(|status| status.success()) {
                missing("no C compiler");
                return None;
            }
        }
        Some(Installed { folder, command })
    }

    fn run(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.command);
        command.arg("run").args(arguments).current_dir(self.folder.path()).env_remove("LD_PRELOAD");
        command
    }
}

#[test]
fn run_passes_on_streams_status_and_environment() {
    let Some(installed) = Installed::new() else { return };
    let script = "cat; echo \"$LD_PRELOAD\"; echo \"$MEMTRACE_OUT\"; echo \"$MEMTRACE_RUN_ID\" >&2; exit 7";
    let mut child = installed
        .run(&["-o", "out", "--phantom", "h100-80g", "--", "sh", "-c", script])
        .env("LD_PRELOAD", "/nowhere/other.so")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"in\n").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(7));
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let folder = installed.folder.path().canonicalize().unwrap();
    let at = |name: &str| folder.join(name).display().to_string();
    let preload = format!("{}:{}:/nowhere/other.so", at("libmemtrace.so"), at("libmemtrace_phantom.so"));
    assert_eq!(lines, ["in", &preload, &at("out")]);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("failed (exit status: 7) before it allocated GPU memory"), "{error}");
    assert!(!Path::new(&at("out")).exists(), "an empty folder was left behind");
}

#[test]
fn run_gives_the_hint_that_fits_when_there_is_no_trace() {
    let Some(installed) = Installed::new() else { return };
    let told = |arguments: &[&str]| stderr(&installed.run(arguments).output().unwrap());
    let failed = told(&["--", "sh", "-c", "exit 2"]);
    assert!(failed.contains("before it allocated GPU memory") && !failed.contains("--phantom"), "{failed}");
    let simulated = told(&["--phantom", "h100-80g", "--", "true"]);
    assert!(simulated.contains("allocated no GPU memory") && !simulated.contains("--phantom"), "{simulated}");
    let plain = told(&["--", "true"]);
    assert_eq!(plain.contains("--phantom"), !Path::new("/dev/nvidiactl").exists(), "{plain}");
    let off = installed.run(&["--", "true"]).env("MEMTRACE_ENABLED", "0").output().unwrap();
    assert!(stderr(&off).contains("MEMTRACE_ENABLED=0"), "{}", stderr(&off));
}

#[test]
fn run_dies_of_the_same_signal_as_its_program() {
    let Some(installed) = Installed::new() else { return };
    for signal in [9, 15, 11] {
        let output = installed.run(&["--", "sh", "-c", &format!("kill -{signal} $$")]).output().unwrap();
        assert_eq!(output.status.signal(), Some(signal));
        let error = stderr(&output);
        assert!(error.contains(&format!("the program was killed (signal: {signal} ")), "{error}");
    }
    let mut run = installed.run(&["--", "sh", "-c", "echo ready; exec sleep 60"]);
    let mut child = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::io::Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0; 6]).unwrap();
    end(child.id());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.signal(), Some(15));
    let error = stderr(&output);
    assert!(error.contains("memtrace was asked to end (signal: 15 (SIGTERM))"), "{error}");
    assert!(!error.contains("above"), "{error}");
}

/// With SIGCHLD ignored, the kernel would drop the status of each child.
#[test]
fn run_has_the_status_of_its_program_even_if_sigchld_was_ignored() {
    let Some(installed) = Installed::new() else { return };
    for options in [&[][..], &["--phantom", "2xh100-80g", "--ranks", "0,1"]] {
        let run = installed.run(&[options, &["--", "sh", "-c", "exit 3"]].concat());
        let mut ignoring = Command::new("env");
        ignoring.arg("--ignore-signal=CHLD").arg(run.get_program()).args(run.get_args());
        let output = ignoring.current_dir(installed.folder.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(3), "{}", stderr(&output));
    }
}

#[test]
fn run_that_writes_no_trace_leaves_no_folder_that_it_created() {
    let Some(installed) = Installed::new() else { return };
    let here = installed.folder.path();
    let exists = |name: &str| here.join(name).exists();
    fs::create_dir(here.join("kept")).unwrap();
    let run = |arguments: &[&str]| installed.run(arguments).output().unwrap().status.code();
    assert_eq!(run(&["-o", "a/b/c", "--", "true"]), Some(0));
    assert_eq!(run(&["-o", "kept/d/e", "--", "true"]), Some(0));
    // An empty folder of the user stays, whatever its name.
    assert_eq!(run(&["--", "true"]), Some(0));
    assert!(!exists("memtrace-out"));
    fs::create_dir(here.join("memtrace-out")).unwrap();
    assert_eq!(run(&["--", "true"]), Some(0));
    assert_eq!(fs::read_dir(here.join("memtrace-out")).unwrap().count(), 0);
    fs::remove_dir(here.join("memtrace-out")).unwrap();
    assert!(!exists("a") && exists("kept") && !exists("kept/d"));
    fs::remove_file(here.join("libmemtrace.so")).unwrap();
    assert_eq!(run(&["--", "true"]), Some(2));
    assert_eq!(run(&["-o", "a/b", "--", "true"]), Some(2));
    assert_eq!(run(&["-o", "kept", "--", "true"]), Some(2));
    assert!(!exists("memtrace-out") && !exists("a") && exists("kept"));
}

#[test]
fn run_forwards_a_signal_once() {
    let Some(installed) = Installed::new() else { return };
    let script =
        "n=0; trap 'n=$((n+1))' USR1; trap 'echo $n; exit 3' TERM; echo ready; while :; do sleep 0.05; done";
    let mut child = installed.run(&["--", "sh", "-c", script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    for signal in ["USR1", "TERM"] {
        let status =
            Command::new("sh").args(["-c", &format!("kill -{signal} {}", child.id())]).status().unwrap();
        assert!(status.success());
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    assert_eq!(lines.next().unwrap().unwrap(), "1");
    assert_eq!(child.wait().unwrap().code(), Some(3));
}

#[test]
fn run_of_a_missing_program_exits_with_127_as_a_shell_does() {
    let Some(installed) = Installed::new() else { return };
    let output = installed.run(&["--", "no-such-program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(127));
    assert!(stderr(&output).contains("cannot run no-such-program"), "{}", stderr(&output));
    assert!(!installed.folder.path().join("memtrace-out").exists());
}

#[test]
fn run_reports_a_program_that_did_not_load_the_library() {
    let Some(installed) = Installed::new() else { return };
    // With a damaged library the loader warns and continues, and the file that proves the load stays empty.
    fs::write(installed.folder.path().join("libmemtrace.so"), b"not a library").unwrap();
    let output = installed.run(&["--", "true"]).output().unwrap();
    assert!(output.status.success());
    assert!(stderr(&output).contains("was not loaded"), "{}", stderr(&output));
}

#[test]
fn run_leaves_a_program_under_the_loader_of_musl_as_it_is_and_says_so() {
    let Some(installed) = Installed::new() else { return };
    let place = |name: &str| installed.folder.path().join(name);
    // The program's ELF interpreter has the name of musl's loader, but is a link to glibc's.
    fs::write(place("program.c"), "int main(void) { return 3; }").unwrap();
    let loader = [LOADER, "/lib/ld-linux-x86-64.so.2"];
    let loader = loader.into_iter().find(|path| Path::new(path).exists()).expect("glibc's loader");
    std::os::unix::fs::symlink(loader, place("ld-musl-x86_64.so.1")).unwrap();
    let named = format!("-Wl,--dynamic-linker={}", place("ld-musl-x86_64.so.1").display());
    let mut compiler = Command::new("cc");
    compiler.arg(named).arg("-o").arg(place("program")).arg(place("program.c"));
    assert!(compiler.status().unwrap().success());
    let output = installed.run(&["--", "./program"]).output().unwrap();
    assert_eq!(output.status.code(), Some(3));
    let told = stderr(&output);
    assert!(told.contains("not built for 64-bit glibc") && told.contains("it runs untraced"), "{told}");
    assert!(told.contains("was not loaded into the program"), "{told}");
}

#[test]
fn run_refuses_an_unknown_phantom_card_before_it_starts_the_program() {
    let Some(installed) = Installed::new() else { return };
    let output = installed.run(&["--phantom", "h900", "--", "touch", "ran"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("h100-80g"), "{}", stderr(&output));
    assert!(!installed.folder.path().join("ran").exists());
    let list = stdout(&installed.run(&["--phantom", "list"]).output().unwrap());
    assert!(list.contains("h100-80g"), "{list}");
}

#[test]
fn run_says_how_much_of_a_phantom_card_is_free_at_the_start() {
    let Some(installed) = Installed::new() else { return };
    let told = |card: &str, quiet: &[&str]| {
        let arguments = [quiet, &["--phantom", card, "--", "true"]].concat();
        stderr(&installed.run(&arguments).output().unwrap())
    };
    let text = told("h100-80g", &[]);
    assert!(
        text.contains("simulated GPU h100-80g: free at the start: 78.51 GiB (78.51 to 78.60)\n"),
        "{text}"
    );
    let text = told("h100-80g,context=0,others=79g", &[]);
    assert!(text.contains("free at the start: 0.11 GiB\n"), "{text}");
    assert!(!told("h100-80g", &["--quiet"]).contains("free at the start"));
}

#[test]
fn run_prints_the_summary_of_its_trace_on_stderr() {
    let Some(installed) = Installed::new() else { return };
    // The program of this run writes a trace: `training` with the run's id in its meta row.
    let trace = String::from_utf8(training(0)).unwrap();
    fs::write(installed.folder.path().join("template.csv"), trace).unwrap();
    let script = r#"sed "s/\"\"run_id\"\":\"\"/\"\"run_id\"\":\"\"$MEMTRACE_RUN_ID/" template.csv > "$MEMTRACE_OUT/h.r0.1.csv"; echo done"#;
    let output = installed.run(&["--", "sh", "-c", script]).output().unwrap();
    assert_eq!(output.stdout, b"done\n");
    let error = stderr(&output);
    assert!(error.contains("11.00 MiB") && error.contains("next: memtrace peak memtrace-out/"), "{error}");
    let newest = Command::new(&installed.command)
        .arg("summary")
        .current_dir(installed.folder.path())
        .output()
        .unwrap();
    assert!(stdout(&newest).contains("11.00 MiB"), "the newest run is the default trace");
}
