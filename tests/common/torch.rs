//! One installed torch, and the scripts of tests/scripts that run on it: what the tests that need torch share.

#[path = "installed.rs"]
mod installed;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde::Deserialize;
use tempfile::TempDir;

/// The card of a test that asks for no other.
pub(crate) const CARD: &str = "h100-80g";

/// A test per function and torch; a function takes the torch that it runs on. With `and_of_the_matrix`, also the
/// torch that `scripts/test-matrix` names.
macro_rules! on_every_torch {
    ($($name:ident),* $(,)?) => {
        mod torch_2_11_0 {
            $(#[test] fn $name() { super::Torch::run("2.11.0", super::$name); })*
        }
        mod torch_2_6_0 {
            $(#[test] fn $name() { super::Torch::run("2.6.0", super::$name); })*
        }
    };
    (and_of_the_matrix: $($name:ident),* $(,)?) => {
        on_every_torch![$($name),*];
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

/// One installed torch.
pub(crate) struct Torch {
    /// Its interpreter.
    pub(crate) python: PathBuf,
}

impl Torch {
    /// Runs a test on an installed torch.
    pub(crate) fn run(version: &str, test: fn(&Torch)) {
        if let Some(python) = installed::python(version) {
            test(&Torch { python });
        }
    }

    /// This python, with nothing of ours in its environment.
    pub(crate) fn command(&self) -> Command {
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
    pub(crate) fn traced_command(&self, out: &Path) -> Command {
        self.traced_command_on(CARD, out)
    }

    pub(crate) fn traced_command_on(&self, card: &str, out: &Path) -> Command {
        let mut command = memtrace();
        command.args(["run", "--quiet", "--phantom", card, "-o"]).arg(out).arg("--").arg(&self.python);
        for (name, value) in self.command().get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
    }

    /// A script of tests/scripts under memtrace on the phantom device.
    pub(crate) fn trace(&self, script: &str, args: &[&str]) -> Run {
        self.trace_with(script, args, &[])
    }

    /// The same with variables.
    pub(crate) fn trace_with(&self, script: &str, args: &[&str], env: &[(&str, &str)]) -> Run {
        self.trace_on(CARD, &[], script, args, env)
    }

    /// The same on another card, with options for python: `-I`, or a module that launches the script.
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
            // No site, so no installed packages: the script finds them by hand.
            command.args(["-c", BARE]).arg(self.packages());
        }
        command.arg(scripts().join(script)).args(args).envs(env.iter().copied());
        Run::of(command, out)
    }

    /// The same without memtrace, on the phantom device alone.
    pub(crate) fn untraced_on(
        &self,
        card: &str,
        options: &[&str],
        script: &str,
        args: &[&str],
        env: &[(&str, &str)],
    ) -> Run {
        let mut command = self.command();
        command.args(options).arg(scripts().join(script)).args(args).envs(env.iter().copied());
        command.env("LD_PRELOAD", built("libmemtrace_phantom.so")).env("MEMTRACE_PHANTOM", card);
        Run::of(command, TempDir::new().unwrap())
    }

    /// Where its packages are.
    fn packages(&self) -> PathBuf {
        let lib = self.python.parent().and_then(Path::parent).unwrap().join("lib");
        let mut versions = std::fs::read_dir(lib).unwrap().map(|entry| entry.unwrap().path());
        versions.find(|path| path.join("site-packages").exists()).unwrap().join("site-packages")
    }

    /// The user's own way: the libraries preloaded by hand, and no launcher.
    pub(crate) fn preloaded_command(&self, out: &Path) -> Command {
        let mut command = self.command();
        command.env("LD_PRELOAD", preloads()).env("MEMTRACE_PHANTOM", CARD).env("MEMTRACE_OUT", out);
        command
    }

    /// A script without memtrace, on the phantom device alone.
    pub(crate) fn untraced(&self, script: &str, args: &[&str]) -> Output {
        self.untraced_on(CARD, &[], script, args, &[]).output
    }

    /// Runs a script under memtrace and holds its trace against the checkpoints that it wrote.
    pub(crate) fn verify(&self, script: &str) {
        let run = self.trace(script, &[]).expect_success();
        self.verify_file(&run.file(), &run.checkpoints);
        self.check(memtrace().arg("check").arg(run.file()));
    }

    pub(crate) fn verify_file(&self, trace: &Path, checkpoints: &Path) {
        self.check(self.command().arg(scripts().join("checkers/verify.py")).arg(trace).arg(checkpoints));
    }

    /// Runs a command that must succeed.
    pub(crate) fn check(&self, command: &mut Command) {
        let output = command.output().unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
        eprintln!("{}", stdout.trim_end());
    }
}

/// What a traced script left.
pub(crate) struct Run {
    /// Its streams and its exit.
    pub(crate) output: Output,
    /// What `checkpoints.py` wrote.
    pub(crate) checkpoints: PathBuf,
    out: TempDir,
}

impl Run {
    /// Runs a command whose scripts leave what they know in the folder.
    fn of(mut command: Command, out: TempDir) -> Run {
        let checkpoints = out.path().join("checkpoints.jsonl");
        command.env("MEMTRACE_TEST_CHECKPOINTS", &checkpoints).env("OWNER_OUT", out.path());
        Run { output: command.output().unwrap(), checkpoints, out }
    }

    /// The folder that the traces' folder is in.
    pub(crate) fn folder(&self) -> &Path {
        self.out.path()
    }

    pub(crate) fn expect_success(self) -> Run {
        let (stdout, stderr) = (text(&self.output.stdout), text(&self.output.stderr));
        assert!(self.output.status.success(), "{}\n{stdout}\n{stderr}", self.output.status);
        self
    }

    pub(crate) fn dir(&self) -> PathBuf {
        self.out.path().join("trace")
    }

    pub(crate) fn files(&self) -> Vec<PathBuf> {
        traces(&self.dir())
    }

    /// The one trace.
    pub(crate) fn file(&self) -> PathBuf {
        let files = self.files();
        assert_eq!(files.len(), 1, "expected one trace, found {files:?}\n{}", text(&self.output.stderr));
        files.into_iter().next().unwrap()
    }

    pub(crate) fn rows(&self) -> Vec<Rec> {
        read(&self.file())
    }
}

/// The columns of a row that the tests look at.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Rec {
    pub(crate) ts_ns: i64,
    pub(crate) rank: i64,
    pub(crate) tid: i64,
    pub(crate) device: i64,
    pub(crate) event: String,
    pub(crate) source: String,
    pub(crate) addr: i64,
    pub(crate) requested_bytes: i64,
    pub(crate) delta_bytes: i64,
    pub(crate) op: String,
    pub(crate) module: String,
    pub(crate) phase: String,
    pub(crate) step: i64,
    pub(crate) name: String,
}

pub(crate) fn read(path: &Path) -> Vec<Rec> {
    csv::Reader::from_path(path).unwrap().deserialize().map(Result::unwrap).collect()
}

/// The trace files of a folder, without what lies beside them (stacks, journals).
pub(crate) fn traces(dir: &Path) -> Vec<PathBuf> {
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
pub(crate) fn exit_of(output: &Output) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    output.status.code().or(output.status.signal().map(|signal| 128 + signal)).unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

pub(crate) fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}

pub(crate) fn memtrace() -> Command {
    Command::new(env!("CARGO_BIN_EXE_memtrace"))
}

/// What `memtrace run --phantom` preloads.
pub(crate) fn preloads() -> String {
    let [tracer, phantom] = ["libmemtrace.so", "libmemtrace_phantom.so"].map(built);
    format!("{}:{}", tracer.display(), phantom.display())
}

/// A library beside the command, where `cargo build` leaves it.
pub(crate) fn built(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name(name);
    assert!(path.exists(), "{} is missing: cargo build first, as scripts/test does", path.display());
    path
}

/// Runs the script that its arguments name, with packages from the first.
const BARE: &str = "import sys, os, runpy; packages, script = sys.argv[1:3]; sys.argv = sys.argv[2:]; \
                    sys.path += [packages, os.path.dirname(script)]; runpy.run_path(script, run_name='__main__')";
