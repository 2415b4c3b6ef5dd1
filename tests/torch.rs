//! PyTorch's CUDA builds, running real scripts on the phantom device, held against what torch itself
//! says of its memory.
//!
//! Each test runs once for every torch of [`on_every_torch`]. A torch that `scripts/torch-env` has not
//! installed skips its tests and says so; with `CI=true` it fails them.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde::Deserialize;
use tempfile::TempDir;

const CARD: &str = "h100-80g";

/// One test per function and torch; a function takes the torch that it runs on.
macro_rules! on_every_torch {
    ($($name:ident),* $(,)?) => {
        on_every_torch!(@module torch_2_11_0, "2.11.0", $($name),*);
        on_every_torch!(@module torch_2_6_0, "2.6.0", $($name),*);
    };
    (@module $module:ident, $version:literal, $($name:ident),*) => {
        mod $module {
            $(#[test] fn $name() {
                if let Some(torch) = super::Torch::find($version) {
                    super::$name(&torch);
                }
            })*
        }
    };
}

on_every_torch![
    a_gpt_agrees_with_torch_to_the_byte,
    a_convolutional_net_agrees_with_torch_to_the_byte,
    odd_sizes_threads_and_ooms_agree_with_torch_to_the_byte,
    ranges_give_phase_module_and_step,
    every_end_of_a_program_is_the_untraced_one,
    a_process_that_never_uses_cuda_leaves_no_file,
    pandas_polars_and_duckdb_read_the_same_typed_columns,
];

fn a_gpt_agrees_with_torch_to_the_byte(torch: &Torch) {
    torch.verify("truth_gpt.py");
}

fn a_convolutional_net_agrees_with_torch_to_the_byte(torch: &Torch) {
    torch.verify("truth_conv.py");
}

fn odd_sizes_threads_and_ooms_agree_with_torch_to_the_byte(torch: &Torch) {
    torch.verify("truth_odd.py");
}

fn ranges_give_phase_module_and_step(torch: &Torch) {
    let run = torch.trace("nvtx_ranges.py", &[]).expect_success();
    let rows = run.rows();

    let owner = |count: i64| {
        let row = rows
            .iter()
            .find(|row| row.event == "alloc" && row.delta_bytes == count * 512)
            .unwrap_or_else(|| panic!("no block of {count} * 512 bytes"));
        (row.phase.as_str(), row.module.as_str(), row.op.as_str(), row.step)
    };
    // Which op and module a block has outside every range is for others to say (issues 3 and 5).
    assert_eq!(owner(101).3, -1);
    assert_eq!(owner(102).0, "forward");
    assert_eq!((owner(103).0, owner(103).1), ("forward", "encoder.layer.0"));
    assert_eq!((owner(104).0, owner(104).1), ("forward", "encoder"));
    assert_eq!((owner(105).0, owner(105).1), ("forward", "GPT.h.3.mlp"));
    assert_ne!(owner(106).0, "forward");
    assert_eq!(owner(107).0, "optimizer");
    let (phase, _, op, step) = owner(108);
    assert_eq!((phase, op, step), ("warm up", "fused_thing", 7));
    assert_ne!(owner(109).0, "warm up");

    // Each range opens and closes; a mark's text survives its comma and quotes.
    let mut open: BTreeMap<&str, i64> = BTreeMap::new();
    for row in &rows {
        match row.event.as_str() {
            "range_begin" => *open.entry(&row.name).or_default() += 1,
            "range_end" => *open.entry(&row.name).or_default() -= 1,
            _ => {}
        }
    }
    assert!(open.contains_key("layer.0") && open.contains_key("optimizer"), "{open:?}");
    assert!(open.values().all(|count| *count == 0), "{open:?}");
    let marks: Vec<&str> =
        rows.iter().filter(|row| row.event == "mark").map(|row| row.name.as_str()).collect();
    assert!(marks.contains(&"here: a mark, with a comma and \"quotes\""), "{marks:?}");

    // What autograd's own thread allocates in the backward range is `backward`, of step 8.
    let main_thread = rows.iter().find(|row| row.event == "mark").unwrap().tid;
    let backward: Vec<&Rec> =
        rows.iter().filter(|row| row.event == "alloc" && row.tid != main_thread).collect();
    assert!(!backward.is_empty(), "autograd allocated on no thread of its own");
    for row in backward {
        assert_eq!((row.phase.as_str(), row.step), ("backward", 8), "{row:?}");
    }
}

fn every_end_of_a_program_is_the_untraced_one(torch: &Torch) {
    for how in [
        "normal",
        "exit 3",
        "exception",
        "caught oom",
        "killing oom",
        "_exit",
        "abort",
        "terminated",
        "thread",
    ] {
        let untraced = torch.untraced("ends.py", &[how]);
        let run = torch.trace("ends.py", &[how]);
        assert_eq!(exit_of(&run.output), exit_of(&untraced), "{how}: {}", text(&run.output.stderr));
        assert_eq!(text(&run.output.stdout), text(&untraced.stdout), "{how}");
        // stderr may say more (an OOM's holders), never less and nothing in between lines.
        let said = text(&run.output.stderr);
        for line in text(&untraced.stderr).lines() {
            assert!(said.lines().any(|other| other == line), "{how}: stderr lacks {line:?}:\n{said}");
        }
        let ooms = run.rows().iter().filter(|row| row.event == "oom").count();
        assert_eq!(ooms, usize::from(how.ends_with("oom")), "{how}");
    }
}

fn a_process_that_never_uses_cuda_leaves_no_file(torch: &Torch) {
    let out = TempDir::new().unwrap();
    let mut command = torch.traced_command(out.path());
    command.args(["-c", "import torch; print(torch.ones(3).sum().item())"]);
    let output = command.output().unwrap();
    assert_eq!(text(&output.stdout), "3.0\n", "{}", text(&output.stderr));
    assert_eq!(traces(out.path()), Vec::<PathBuf>::new());
}

fn pandas_polars_and_duckdb_read_the_same_typed_columns(torch: &Torch) {
    let run = torch.trace("nvtx_ranges.py", &[]).expect_success();
    torch.check(torch.command().arg(scripts().join("loaders.py")).arg(run.file()));
}

/// One installed torch.
struct Torch {
    python: PathBuf,
}

impl Torch {
    /// The python of an installed torch; `None` skips the test.
    fn find(version: &str) -> Option<Torch> {
        let python = cache().join(format!("torch-{version}"));
        if python.join(".complete").exists() {
            return Some(Torch { python: python.join("bin/python") });
        }
        let why = format!("torch {version} is not installed: run scripts/torch-env {version}");
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{why}");
        eprintln!("skipped: {why}");
        None
    }

    /// This python, with nothing of ours in its environment.
    fn command(&self) -> Command {
        let mut command = Command::new(&self.python);
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("MEMTRACE_") && name != "MEMTRACE_CACHE" {
                command.env_remove(name);
            }
        }
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command
    }

    /// `memtrace run` of this python on the phantom device, tracing into `out`.
    fn traced_command(&self, out: &Path) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_memtrace"));
        command.args(["run", "--phantom", CARD, "-o"]).arg(out).arg("--").arg(&self.python);
        for (name, value) in self.command().get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// A script of tests/scripts under memtrace on the phantom device.
    fn trace(&self, script: &str, args: &[&str]) -> Run {
        let out = TempDir::new().unwrap();
        let checkpoints = out.path().join("checkpoints.jsonl");
        let mut command = self.traced_command(&out.path().join("trace"));
        command.arg(scripts().join(script)).args(args).env("MEMTRACE_TEST_CHECKPOINTS", &checkpoints);
        Run { output: command.output().unwrap(), checkpoints, out }
    }

    /// The same without memtrace: the phantom device alone.
    fn untraced(&self, script: &str, args: &[&str]) -> Output {
        let phantom = built("libmemtrace_phantom.so");
        let mut command = self.command();
        command.arg(scripts().join(script)).args(args);
        command.env("LD_PRELOAD", phantom).env("MEMTRACE_PHANTOM", CARD).output().unwrap()
    }

    /// Runs a script under memtrace and holds its trace against the checkpoints that it wrote.
    fn verify(&self, script: &str) {
        let run = self.trace(script, &[]).expect_success();
        self.check(self.command().arg(scripts().join("verify.py")).arg(run.file()).arg(&run.checkpoints));
        let mut check = Command::new(env!("CARGO_BIN_EXE_memtrace"));
        self.check(check.arg("check").arg(run.file()));
    }

    /// Runs a command that must succeed.
    fn check(&self, command: &mut Command) {
        let output = command.output().unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
        eprintln!("{}", stdout.trim_end());
    }
}

/// What a traced script left.
struct Run {
    output: Output,
    checkpoints: PathBuf,
    out: TempDir,
}

impl Run {
    fn expect_success(self) -> Run {
        let (stdout, stderr) = (text(&self.output.stdout), text(&self.output.stderr));
        assert!(self.output.status.success(), "{}\n{stdout}\n{stderr}", self.output.status);
        self
    }

    /// The one trace.
    fn file(&self) -> PathBuf {
        let files = traces(&self.out.path().join("trace"));
        assert_eq!(files.len(), 1, "expected one trace, found {files:?}\n{}", text(&self.output.stderr));
        files.into_iter().next().unwrap()
    }

    fn rows(&self) -> Vec<Rec> {
        read(&self.file())
    }
}

/// The columns of a row that the tests look at.
#[derive(Clone, Debug, Deserialize)]
struct Rec {
    tid: i64,
    event: String,
    delta_bytes: i64,
    op: String,
    module: String,
    phase: String,
    step: i64,
    name: String,
}

fn read(path: &Path) -> Vec<Rec> {
    csv::Reader::from_path(path).unwrap().deserialize().map(Result::unwrap).collect()
}

/// The trace files of a folder, without what lies beside them (stacks, journals).
fn traces(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| {
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.ends_with(".csv") && !name.ends_with(".stacks.csv")
    });
    files.sort();
    files
}

/// Exit code and signal. `memtrace run` passes a signal on as a shell does, 128 + its number.
fn exit_of(output: &Output) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    output.status.code().or(output.status.signal().map(|signal| 128 + signal)).unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}

/// A library beside the command, where `cargo build` leaves it.
fn built(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name(name);
    assert!(path.exists(), "{} is missing: cargo build first, as scripts/test does", path.display());
    path
}

/// Where scripts/torch-env installs.
fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("MEMTRACE_CACHE").unwrap_or_else(|| {
        let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        base.expect("HOME is set").join("memtrace")
    })
}
