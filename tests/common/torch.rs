//! The harness of all tests that run PyTorch: an installed torch, the scripts of `tests/scripts` under it,
//! and their traces. Programs run on the simulated GPU, with memtrace or without it.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde::Deserialize;
use tempfile::TempDir;

use crate::common::command::root;
pub(crate) use crate::common::command::{clean, exit_of, json, memtrace, output, printed, succeeded, text};
use crate::common::installed;
pub(crate) use crate::common::installed::{cache, missing};
use crate::common::venv::packages;

/// The simulated GPU of a test that names no other.
pub(crate) const CARD: &str = "h100-80g";
/// The versions of torch on which tests run, the main version first.
pub(crate) const VERSIONS: [&str; 2] = ["2.11.0", "2.6.0"];
/// The newest version, on which a few tests run (`scripts/test` installs it, too).
pub(crate) const NEWEST: &str = "2.15.0";

/// Defines one test per function and version of torch; each function takes the [`Torch`] to run on. The
/// reason after a function's name states why its result depends on the version. On the older version,
/// `scripts/test` runs only the functions with a reason; `--include-ignored`, which `scripts/check --deep`
/// passes, runs all. With `and_of_the_matrix`, each function is also an ignored test on the version that
/// `scripts/test-matrix` names.
macro_rules! on_every_torch {
    ($($name:ident $(: $reason:literal)?),* $(,)?) => {
        mod torch_2_11_0 {
            $(#[test] fn $name() { super::Torch::run("2.11.0", super::$name); })*
        }
        mod torch_2_6_0 {
            $(super::on_every_torch! { @older $name $($reason)? })*
        }
    };
    (@older $name:ident) => {
        #[test]
        #[ignore = "scripts/check --deep runs it"]
        fn $name() { super::Torch::run("2.6.0", super::$name); }
    };
    (@older $name:ident $reason:literal) => {
        #[test] fn $name() { super::Torch::run("2.6.0", super::$name); }
    };
    (and_of_the_matrix: $($name:ident $(: $reason:literal)?),* $(,)?) => {
        on_every_torch![$($name $(: $reason)?),*];
        /// The version that `scripts/test-matrix` names.
        mod torch_of_the_matrix {
            $(
                #[test]
                #[ignore = "scripts/test-matrix runs it"]
                fn $name() {
                    super::Torch::run(&std::env::var("MEMTRACE_TEST_TORCH").unwrap(), super::$name);
                }
            )*
        }
    };
}
pub(crate) use on_every_torch;

/// Whether the ignored tests run, too, as in `scripts/check --deep`.
pub(crate) fn is_deep() -> bool {
    std::env::args().any(|argument| argument == "--include-ignored")
}

/// One installed torch.
pub(crate) struct Torch {
    /// The version, one of [`VERSIONS`].
    pub(crate) version: String,
    /// The Python interpreter.
    pub(crate) python: PathBuf,
}

impl Torch {
    /// Returns the torch of this version, or `None` if it is not installed: then the caller must skip its
    /// test. With `CI=true` a missing torch fails the test.
    pub(crate) fn installed(version: &str) -> Option<Torch> {
        installed::python(version).map(|python| Torch { version: version.to_owned(), python })
    }

    /// Runs a test on this version of torch, or skips it if that version is not installed.
    pub(crate) fn run(version: &str, test: impl FnOnce(&Torch)) {
        if let Some(torch) = Torch::installed(version) {
            test(&torch);
        }
    }

    /// Runs a test on the main version, and with `--include-ignored`, as `scripts/check --deep` does, then on the older
    /// one. Prefer [`on_every_torch`], which makes them separate tests.
    pub(crate) fn on_main(mut test: impl FnMut(&Torch)) {
        for version in VERSIONS.into_iter().filter(|version| is_deep() || *version == VERSIONS[0]) {
            Torch::run(version, &mut test);
        }
    }

    /// Runs a test on every version in turn, for behavior that depends on the version.
    pub(crate) fn on_each(mut test: impl FnMut(&Torch)) {
        for version in VERSIONS {
            Torch::run(version, &mut test);
        }
    }

    /// Returns true for an older version in an ordinary run. A test then leaves out what it proves on the main
    /// version. `scripts/check --deep` (`--include-ignored`) leaves nothing out.
    pub(crate) fn is_tested_in_brief(&self) -> bool {
        self.version != VERSIONS[0] && !is_deep()
    }

    /// Returns a command for this Python, without inherited settings; see [`clean`].
    pub(crate) fn command(&self) -> Command {
        clean(&self.python)
    }

    /// Returns the command `memtrace run OPTIONS -- PYTHON`.
    pub(crate) fn run_command(&self, options: &[&dyn AsRef<OsStr>]) -> Command {
        let mut command = memtrace();
        command.arg("run").args(options.iter().map(AsRef::as_ref)).arg("--").arg(&self.python);
        command
    }

    /// Returns a command that runs this Python under `memtrace run` on [`CARD`], with traces in `out`.
    pub(crate) fn traced_command(&self, out: &Path) -> Command {
        self.traced_command_on(CARD, out)
    }

    /// Returns a command that runs this Python under `memtrace run` on a simulated GPU, with traces in `out`.
    pub(crate) fn traced_command_on(&self, card: &str, out: &Path) -> Command {
        self.run_command(&[&"--quiet", &"--phantom", &card, &"-o", &out])
    }

    /// Traces a script of `tests/scripts` on [`CARD`].
    pub(crate) fn trace(&self, script: &str, args: &[&str]) -> Run {
        self.trace_with(script, args, &[])
    }

    /// Traces a script on [`CARD`], with further environment variables.
    pub(crate) fn trace_with(&self, script: &str, args: &[&str], env: &[(&str, &str)]) -> Run {
        self.trace_on(CARD, &[], script, args, env)
    }

    /// Traces a script on `card`, with environment variables and options for Python: `-I`, or a module that
    /// launches the script.
    pub(crate) fn trace_on(
        &self,
        card: &str,
        options: &[&str],
        script: &str,
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Run {
        let out = TempDir::new().unwrap();
        let mut command = self.traced_command_on(card, &out.path().join("trace"));
        command.args(options);
        if options.contains(&"-S") {
            // Without `site`, Python does not find installed packages: pass the script their folder.
            command.args(["-c", BARE]).arg(self.packages());
        }
        command.arg(scripts().join(script)).args(args).envs(env.iter().copied());
        Run::execute(command, out)
    }

    /// Runs a script without memtrace, on a simulated GPU.
    pub(crate) fn untraced_on(
        &self,
        card: &str,
        options: &[&str],
        script: &str,
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Run {
        let mut command = on_phantom(&self.python, card);
        command.args(options).arg(scripts().join(script)).args(args).envs(env.iter().copied());
        Run::execute(command, TempDir::new().unwrap())
    }

    /// Runs a script without memtrace, on [`CARD`].
    pub(crate) fn untraced(&self, script: &str, args: &[&str]) -> Output {
        self.untraced_on(CARD, &[], script, args, &[]).output
    }

    /// Returns `PATH` with the folder of this Python first.
    pub(crate) fn path(&self) -> String {
        format!("{}:{}", self.python.parent().unwrap().display(), std::env::var("PATH").unwrap())
    }

    /// Returns the folder of installed packages.
    pub(crate) fn packages(&self) -> PathBuf {
        packages(&self.python)
    }

    /// Returns a command for this Python with the libraries in `LD_PRELOAD`, without `memtrace run`.
    pub(crate) fn preloaded_command(&self, out: &Path) -> Command {
        let mut command = self.command();
        command.env("LD_PRELOAD", preloads()).env("MEMTRACE_PHANTOM", CARD).env("MEMTRACE_OUT", out);
        command
    }

    /// Traces a script, and compares the trace with the statistics of torch that the script recorded.
    pub(crate) fn verify(&self, script: &str) {
        let run = self.trace(script, &[]).expect_success();
        self.verify_file(&run.file(), &run.checkpoints);
        self.check(memtrace().arg("check").arg(run.file()));
    }

    /// Compares a trace with the statistics of torch that the traced program recorded.
    pub(crate) fn verify_file(&self, trace: &Path, checkpoints: &Path) {
        self.checker("verify", &[trace, checkpoints]);
    }

    /// Runs `tests/scripts/checkers/<name>.py`, which must succeed.
    pub(crate) fn checker(&self, name: &str, args: &[&Path]) {
        let script = scripts().join(format!("checkers/{name}.py"));
        self.check(self.command().arg(script).args(args));
    }

    /// Runs a command, which must succeed.
    pub(crate) fn check(&self, command: &mut Command) {
        let output = command.output().unwrap();
        eprintln!("{}", succeeded(&format!("{command:?}"), &output).trim_end());
    }
}

/// The result of a run.
pub(crate) struct Run {
    /// Exit status, stdout and stderr.
    pub(crate) output: Output,
    /// The file of `checkers/checkpoints.py`: torch's statistics.
    pub(crate) checkpoints: PathBuf,
    out: TempDir,
}

impl Run {
    /// Runs a command, which may leave files for a checker in the folder.
    fn execute(mut command: Command, out: TempDir) -> Run {
        let checkpoints = out.path().join("checkpoints.jsonl");
        command.env("MEMTRACE_TEST_CHECKPOINTS", &checkpoints).env("OWNER_OUT", out.path());
        Run { output: command.output().unwrap(), checkpoints, out }
    }

    /// Returns the folder with the script's own files and the folder `trace`.
    pub(crate) fn folder(&self) -> &Path {
        self.out.path()
    }

    /// Returns this run; panics if it failed.
    pub(crate) fn expect_success(self) -> Run {
        succeeded("the script", &self.output);
        self
    }

    pub(crate) fn stdout(&self) -> String {
        text(&self.output.stdout)
    }

    pub(crate) fn stderr(&self) -> String {
        text(&self.output.stderr)
    }

    /// Returns the output of `memtrace REPORT ARGS` on the run's traces; panics if it fails.
    pub(crate) fn report(&self, report: &str, args: &[&str]) -> String {
        let output = memtrace().args(report.split(' ')).args(args).arg(self.dir()).output().unwrap();
        succeeded(report, &output)
    }

    /// Returns the answer of `memtrace REPORT --json ARGS`. A `report` such as `ops --actions` has several
    /// words.
    pub(crate) fn json(&self, report: &str, args: &[&str]) -> serde_json::Value {
        serde_json::from_str(&self.report(report, &[&["--json"], args].concat())).unwrap()
    }

    /// Returns the folder of the traces.
    pub(crate) fn dir(&self) -> PathBuf {
        self.out.path().join("trace")
    }

    /// Returns the traces, sorted by name.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        traces(&self.dir())
    }

    /// Returns the only trace.
    pub(crate) fn file(&self) -> PathBuf {
        let files = self.files();
        assert_eq!(files.len(), 1, "expected one trace, found {files:?}\n{}", text(&self.output.stderr));
        files.into_iter().next().unwrap()
    }

    /// Returns the cases of a script that runs them with `forked.py`, in their order.
    pub(crate) fn cases(&self) -> Vec<Case> {
        let stdout = self.stdout();
        let blocks = stdout.split("== ").skip(1).map(|block| block.split_once('\n').unwrap());
        let case = |(head, stdout): (&str, &str)| {
            let (name, process) = head.rsplit_once(' ').unwrap();
            let checkpoints = self.out.path().join(format!("checkpoints.jsonl.{name}"));
            let trace = self.trace_of(process);
            Case { name: name.to_owned(), trace, stdout: stdout.to_owned(), checkpoints }
        };
        blocks.map(case).collect()
    }

    /// Returns the trace of the process with this id.
    pub(crate) fn trace_of(&self, process: &str) -> PathBuf {
        let ending = format!(".{process}.csv");
        let mut files = self.files().into_iter();
        files.find(|file| file.to_string_lossy().ends_with(&ending)).expect("the process has a trace")
    }

    /// Returns the rows of the only trace.
    pub(crate) fn rows(&self) -> Vec<TorchRow> {
        read(&self.file())
    }
}

/// A case of a script that runs its cases in forked children.
pub(crate) struct Case {
    pub(crate) name: String,
    /// The trace of the child.
    pub(crate) trace: PathBuf,
    /// What the child printed.
    pub(crate) stdout: String,
    /// The child's file of `checkers/checkpoints.py`.
    pub(crate) checkpoints: PathBuf,
}

/// The columns of a row that the tests use.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct TorchRow {
    pub(crate) ts_ns: i64,
    pub(crate) rank: i64,
    pub(crate) tid: i64,
    pub(crate) device: i64,
    pub(crate) event: String,
    pub(crate) api: String,
    pub(crate) source: String,
    pub(crate) addr: i64,
    pub(crate) requested_bytes: i64,
    pub(crate) delta_bytes: i64,
    pub(crate) allocated_bytes: i64,
    pub(crate) reserved_bytes: i64,
    pub(crate) op: String,
    pub(crate) module: String,
    pub(crate) phase: String,
    pub(crate) category: String,
    pub(crate) step: i64,
    pub(crate) name: String,
}

/// Reads the rows of a trace.
pub(crate) fn read(path: &Path) -> Vec<TorchRow> {
    csv::Reader::from_path(path).unwrap().into_deserialize().map(Result::unwrap).collect()
}

/// Returns the traces in a folder, without the files of stacks and the journals.
pub(crate) fn traces(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(dir) else { return Vec::new() };
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| {
        let name = file.file_name().and_then(OsStr::to_str).unwrap_or_default();
        name.ends_with(".csv")
    });
    files.sort();
    files
}

/// Returns the path of `tests/scripts`.
pub(crate) fn scripts() -> PathBuf {
    root().join("tests/scripts")
}

/// Returns a command for a program on a simulated GPU, without memtrace.
pub(crate) fn on_phantom(program: &Path, card: &str) -> Command {
    let mut command = clean(program);
    command.env("LD_PRELOAD", built("libmemtrace_phantom.so")).env("MEMTRACE_PHANTOM", card);
    command
}

/// Returns the value of `LD_PRELOAD` that `memtrace run --phantom` sets.
pub(crate) fn preloads() -> String {
    let [tracer, phantom] = ["libmemtrace.so", "libmemtrace_phantom.so"].map(built);
    format!("{}:{}", tracer.display(), phantom.display())
}

/// Returns the path of a library that `cargo build` left next to the command.
pub(crate) fn built(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name(name);
    let written = |path: &Path| std::fs::metadata(path).and_then(|file| file.modified()).ok();
    // `cargo test` builds a library anew among the dependencies only, where `common::library` finds it.
    let other = path.with_file_name("deps").join(name);
    let is_fresh = path.exists() && written(&path) >= written(&other);
    assert!(is_fresh, "{} is missing or stale: run cargo build first, as scripts/test does", path.display());
    path
}

/// Python code that runs a script with a folder of packages on its path: `-c BARE PACKAGES SCRIPT ARGS`.
const BARE: &str = "import sys, os, runpy; packages, script = sys.argv[1:3]; sys.argv = sys.argv[2:]; \
                    sys.path += [packages, os.path.dirname(script)]; runpy.run_path(script, run_name='__main__')";
