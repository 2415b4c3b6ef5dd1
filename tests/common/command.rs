//! A run of the command `memtrace`, and the folders of this repository.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Prefixes of variables that change how memtrace or torch behaves; a test sets its own.
const OUTSIDE_SETTINGS: [&str; 4] = ["MEMTRACE_", "PYTORCH_", "CUDA_", "NCCL_"];

/// Returns the project's folder.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the folder of the recorded traces.
pub(crate) fn fixtures() -> PathBuf {
    root().join("tests/fixtures")
}

/// Returns a command for `memtrace`, without inherited settings; see [`clean`].
pub(crate) fn memtrace() -> Command {
    clean(Path::new(env!("CARGO_BIN_EXE_memtrace")))
}

/// Runs `memtrace ARGUMENTS TRACE`.
pub(crate) fn output(arguments: &[&str], trace: &Path) -> Output {
    memtrace().args(arguments).arg(trace).output().unwrap()
}

/// Returns the stdout of `memtrace ARGUMENTS TRACE`; panics if it fails.
pub(crate) fn printed(arguments: &[&str], trace: &Path) -> String {
    succeeded(&arguments.join(" "), &output(arguments, trace))
}

/// Returns the answer of `memtrace ARGUMENTS --json TRACE`.
pub(crate) fn json(arguments: &[&str], trace: &Path) -> serde_json::Value {
    serde_json::from_str(&printed(&[arguments, &["--json"]].concat(), trace)).unwrap()
}

/// Returns a command for a program, without `LD_PRELOAD`, `NO_COLOR` and the inherited variables whose prefixes
/// [`OUTSIDE_SETTINGS`] lists. `MEMTRACE_CACHE` stays, because it says where torch is installed.
pub(crate) fn clean(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if name != "MEMTRACE_CACHE" && OUTSIDE_SETTINGS.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name.as_ref());
        }
    }
    command.env_remove("LD_PRELOAD").env_remove("NO_COLOR").env("PYTHONDONTWRITEBYTECODE", "1");
    command
}

/// Checks that a program succeeded, and returns its stdout.
pub(crate) fn succeeded(name: &str, output: &Output) -> String {
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{name}: {}\n{stdout}\n{stderr}", output.status);
    stdout
}

/// Returns the exit status. A signal is 128 + its number, as a shell and `memtrace run` report it.
pub(crate) fn exit_of(output: &Output) -> i32 {
    use std::os::unix::process::ExitStatusExt;
    output.status.code().or(output.status.signal().map(|signal| 128 + signal)).unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
