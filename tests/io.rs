//! `MEMTRACE_OPS=io` on the phantom device: what ops read and write, held against torch's own profiler and
//! trackers in the same process.
//!
//! Each test runs once for every torch of [`on_every_torch`]; one that `scripts/torch-env` has not installed
//! skips its tests and says so, and fails them with `CI=true`.

#[path = "common/installed.rs"]
mod installed;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use installed::python;
use memtrace_trace::EventName;
use serde_json::Value;
use tempfile::TempDir;

const CARD: &str = "h100-80g";

macro_rules! on_every_torch {
    ($($name:ident),* $(,)?) => {
        mod torch_2_11_0 {
            $(#[test] fn $name() { super::Torch::run("2.11.0", super::$name); })*
        }
        mod torch_2_6_0 {
            $(#[test] fn $name() { super::Torch::run("2.6.0", super::$name); })*
        }
    };
}

on_every_torch![
    actions_and_categories_are_those_of_the_profiler,
    without_tags_the_flow_of_data_alone_tells_them,
    the_memory_of_modules_is_that_of_mem_tracker,
    the_names_of_ops_are_those_of_memory_tracker,
    odd_tensors_are_read_past_and_the_program_says_what_it_says_without_us,
    a_torch_that_cannot_be_learned_is_said_in_one_line_and_the_trace_goes_on,
];

fn actions_and_categories_are_those_of_the_profiler(torch: &Torch) {
    let run = torch.trace("io/profiled_timeline.py", &[], &[]);
    let theirs = run.write("theirs.json", &run.output.stdout);
    let ours = run.report("actions", &["--step", "3:3", "--json", "--each"]);
    let ours = run.write("ours.json", &ours.stdout);
    torch.check("checkers/profiled_timeline.py", &[&ours, &theirs]);
}

/// The passes need the gradients of `AccumulateGrad` and one step of the optimizer; then parameters,
/// inputs, activations and gradients follow from the flow of data, and say that they were inferred.
fn without_tags_the_flow_of_data_alone_tells_them(torch: &Torch) {
    let run = torch.trace("io/profiled_timeline.py", &[], &[("MEMTRACE_MODULES", "0")]);
    let told = run.json("actions", &["--step", "3:3", "--json"]);
    let device = &told["processes"][0]["devices"][0];
    let with_tags = torch.trace("io/profiled_timeline.py", &[], &[]);
    let expected = with_tags.json("actions", &["--step", "3:3", "--json"]);
    let expected = &expected["processes"][0]["devices"][0];
    for category in ["PARAMETER", "GRADIENT"] {
        let (found, expected) = (&device["categories"][category], &expected["categories"][category]);
        assert_eq!(found["inferred"], true, "{category}");
        assert_eq!(expected["inferred"], false, "{category}");
        assert_eq!(found["CREATE"], expected["CREATE"], "{category}");
    }
    let parameters = &device["categories"]["PARAMETER"]["PREEXISTING"];
    assert_eq!(parameters, &expected["categories"]["PARAMETER"]["PREEXISTING"]);
    assert!(device["categories"]["ACTIVATION"]["CREATE"]["count"].as_i64().unwrap() > 5);
    // The other reports go by the same flow, and say so.
    let peak = text(&run.report("peak", &["--by", "category"]).stdout);
    assert!(peak.contains("parameter *") || peak.contains("parameter*"), "{peak}");
    assert!(peak.contains("torch.profiler's passes"), "{peak}");
}

fn the_memory_of_modules_is_that_of_mem_tracker(torch: &Torch) {
    let run = torch.trace("io/module_memory.py", &[], &[]);
    let theirs: Value = serde_json::from_slice(&run.output.stdout).unwrap();
    let ours = run.json("modules", &["--json", "--depth", "9"]);
    let ours = ours["processes"][0]["modules"].as_array().unwrap();
    let theirs = theirs.as_object().unwrap();
    assert_eq!((ours.len(), theirs.len()), (6, 6));
    for (path, numbers) in theirs {
        let found = ours.iter().find(|module| module["module"] == path.as_str()).unwrap();
        let last = |key: &str| found[key].as_array().unwrap().last().unwrap().clone();
        let found = [
            found["parameter_bytes"].clone(),
            found["buffer_bytes"].clone(),
            last("input_bytes"),
            last("output_bytes"),
        ];
        assert_eq!(Value::from(found.to_vec()), *numbers, "{path}");
    }
    // Without io records, what tags tell is there, and what is missing is said.
    let plain = torch.trace("io/module_memory.py", &[], &[("MEMTRACE_OPS", "all")]);
    let text = text(&plain.report("modules", &["--depth", "9"]).stdout);
    assert!(text.contains("MEMTRACE_OPS=io records them"), "{text}");
    let told = plain.json("modules", &["--json", "--depth", "9"]);
    let root = &told["processes"][0]["modules"][0];
    assert_eq!((&root["parameter_bytes"], &root["buffer_bytes"]), (&theirs["Net"][0], &theirs["Net"][1]));
    assert_eq!(root["input_bytes"], Value::Null);
}

/// `{module}.forward.{op}.{overload}_{n}`, all that have a name.
fn the_names_of_ops_are_those_of_memory_tracker(torch: &Torch) {
    // In 2.6 callbacks are not told of the dispatch mode, so of nested ops nothing says which one it saw:
    // `top-ops` counts every op there.
    if torch.version == "2.6.0" {
        return;
    }
    let run = torch.trace("fixtures/trackers.py", &["memory"], &[]);
    let theirs: Value = serde_json::from_slice(&run.output.stdout).unwrap();
    let ours = run.json("top-ops", &["--json", "--series", "--top", "1000"]);
    let ours = &ours["processes"][0];
    assert_eq!(
        ours["series"]["allocated_bytes"].as_array().unwrap().len(),
        theirs["allocated"].as_object().unwrap().len()
    );
    let top = ours["top"].as_array().unwrap();
    assert!(top.len() > 20, "{}", top.len());
    for op in top {
        let name = theirs["allocated"][op["index"].to_string()][0].as_str().unwrap();
        let ours = op["name"].as_str().unwrap();
        // Of `record_function`'s own ops torch tells callbacks no name.
        if !name.contains("._record_function_") {
            assert_eq!(ours, name);
        }
    }
}

fn odd_tensors_are_read_past_and_the_program_says_what_it_says_without_us(torch: &Torch) {
    let host = [("MEMTRACE_HOST_TENSORS", "1")];
    let run = torch.trace("io/odd_tensors.py", &[], &host);
    let untraced = torch.untraced("io/odd_tensors.py", &host);
    assert_eq!(text(&run.output.stdout), text(&untraced.stdout));
    assert_eq!(run.output.status.code(), untraced.status.code());
    torch.check("checkers/odd_tensors.py", &[&run.only_trace()]);
}

fn a_torch_that_cannot_be_learned_is_said_in_one_line_and_the_trace_goes_on(torch: &Torch) {
    let run = torch.trace("io/unknown_layout.py", &[], &[]);
    assert_eq!(text(&run.output.stdout), text(&torch.untraced("io/unknown_layout.py", &[]).stdout));
    assert_eq!(
        text(&run.output.stderr),
        "memtrace: MEMTRACE_OPS=io could not learn torch's layout: what ops read and write has no rows, ops have \
         those of MEMTRACE_OPS=all\n"
    );
    run.report("check", &[]);
    let mut reader = memtrace_trace::csv::RowReader::open(&run.only_trace()).unwrap();
    let (mut ops, mut io, mut peak) = (0, 0, 0);
    while let Some(row) = reader.next_row().unwrap() {
        ops += i64::from(row.event == EventName::Op);
        io += i64::from(row.event == EventName::Io && !row.api.starts_with("module_"));
        peak = peak.max(if row.device == 0 { row.allocated_bytes } else { 0 });
    }
    assert!(ops > 1000, "{ops}");
    assert_eq!(io, 0);
    assert_eq!(peak.to_string(), text(&run.output.stdout).trim());
}

/// One installed torch.
struct Torch {
    version: String,
    python: PathBuf,
}

impl Torch {
    fn run(version: &str, test: fn(&Torch)) {
        if let Some(python) = python(version) {
            test(&Torch { version: version.to_owned(), python });
        }
    }

    /// A script of tests/scripts with `MEMTRACE_OPS=io`, unless `variables` say otherwise.
    fn trace(&self, script: &str, args: &[&str], variables: &[(&str, &str)]) -> Run {
        let folder = TempDir::new().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_memtrace"));
        command.args(["run", "--quiet", "--phantom", CARD, "-o"]).arg(folder.path().join("trace")).arg("--");
        command.arg(&self.python).arg(scripts().join(script)).args(args);
        let output = clean(&mut command).env("MEMTRACE_OPS", "io").envs(variables.iter().copied()).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{script}: {}\n{}", output.status, text(&output.stderr));
        Run { output, folder }
    }

    /// The same on the phantom device alone.
    fn untraced(&self, script: &str, variables: &[(&str, &str)]) -> Output {
        let phantom = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name("libmemtrace_phantom.so");
        assert!(phantom.exists(), "{} is missing: cargo build first", phantom.display());
        let mut command = Command::new(&self.python);
        command.arg(scripts().join(script));
        clean(&mut command)
            .env("MEMTRACE_PHANTOM", CARD)
            .env("LD_PRELOAD", phantom)
            .envs(variables.iter().copied())
            .output()
            .unwrap()
    }

    /// Runs a script that holds what another left against what it should be.
    fn check(&self, script: &str, args: &[&Path]) {
        let output = Command::new(&self.python)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg(scripts().join(script))
            .args(args)
            .output()
            .unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{script}: {}\n{stdout}\n{stderr}", output.status);
        eprintln!("{}", stdout.trim_end());
    }
}

/// A command without the variables of whoever runs the tests.
fn clean(command: &mut Command) -> &mut Command {
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy().into_owned();
        if name.starts_with("MEMTRACE_") && name != "MEMTRACE_CACHE" {
            command.env_remove(name);
        }
    }
    command.env("PYTHONDONTWRITEBYTECODE", "1")
}

/// What a script left.
struct Run {
    output: Output,
    folder: TempDir,
}

impl Run {
    fn report(&self, report: &str, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_memtrace"));
        let output = command.arg(report).args(args).arg(self.folder.path().join("trace")).output().unwrap();
        assert!(output.status.success(), "{report}: {}", text(&output.stderr));
        output
    }

    fn json(&self, report: &str, args: &[&str]) -> Value {
        serde_json::from_slice(&self.report(report, args).stdout).unwrap()
    }

    fn write(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn only_trace(&self) -> PathBuf {
        let files = std::fs::read_dir(self.folder.path().join("trace")).unwrap();
        let files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
        let is_trace = |file: &&PathBuf| {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            name.ends_with(".csv") && !name.ends_with(".stacks.csv")
        };
        let traces: Vec<&PathBuf> = files.iter().filter(is_trace).collect();
        assert_eq!(traces.len(), 1, "{files:?}");
        traces[0].clone()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}
