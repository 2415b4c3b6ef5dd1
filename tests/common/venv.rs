//! Virtual environments into which a wheel of this build is installed, as a user would.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use tempfile::TempDir;

use crate::common::torch::{Torch, built, cache, clean, missing};

/// The `PATH` of a machine without Rust.
pub(crate) const NO_CARGO: &str = "/usr/local/bin:/usr/bin:/bin";

/// Returns the Python of `scripts/env wheel`, with hatchling and pip, or `None` if it is missing: then the
/// caller must skip its test. With `CI=true` a missing Python fails the test.
pub(crate) fn wheel_python() -> Option<PathBuf> {
    let python = cache().join("wheel/bin/python");
    if !python.exists() {
        missing("hatchling is not installed: run scripts/env wheel");
        return None;
    }
    Some(python)
}

/// Returns the Python of `scripts/env users`, with pytest, nbconvert, JupyterLab and the SDK of MCP.
pub(crate) fn users_python() -> Option<PathBuf> {
    let python = cache().join("users/bin/python");
    if !python.exists() {
        missing("pytest and JupyterLab are not installed: run scripts/env users");
        return None;
    }
    Some(python)
}

/// An environment with torch, the packages that users run with it, and the wheel.
pub(crate) struct Installed {
    pub(crate) python: PathBuf,
    _folder: TempDir,
}

/// Returns the environment that all tests of a file share; the first call builds it. Returns `None` if
/// something that it needs is not installed.
pub(crate) fn installed() -> Option<&'static Installed> {
    static INSTALLED: OnceLock<Option<Installed>> = OnceLock::new();
    INSTALLED.get_or_init(install).as_ref()
}

fn install() -> Option<Installed> {
    let (tools, torch, users) = (wheel_python()?, Torch::installed("2.11.0")?, users_python()?);
    let folder = TempDir::new().unwrap();
    let wheel = wheel(folder.path())?;
    let python = venv(&folder.path().join("env"), &[&tools, &users, &torch.python]);
    pip_install(&python, &[&wheel]);
    Some(Installed { python, _folder: folder })
}

/// Returns the folder of the packages of a virtual environment.
pub(crate) fn packages(python: &Path) -> PathBuf {
    let lib = python.parent().and_then(Path::parent).unwrap().join("lib");
    let mut versions = std::fs::read_dir(lib).unwrap().map(|entry| entry.unwrap().path());
    versions.find(|path| path.join("site-packages").exists()).unwrap().join("site-packages")
}

/// Builds a wheel of this build into `folder`, without cargo. Returns its path.
pub(crate) fn wheel(folder: &Path) -> Option<PathBuf> {
    let python = wheel_python()?;
    let built = built("libmemtrace.so");
    let mut build = Command::new(&python);
    build.args(["-m", "hatchling", "build", "-t", "wheel", "-d"]).arg(folder);
    build.current_dir(env!("CARGO_MANIFEST_DIR")).env("GPU_MEMTRACE_BUILT", built.parent().unwrap());
    succeeds(&mut build);
    let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.extension().is_some_and(|extension| extension == "whl"))
}

/// Creates a virtual environment at `folder`, which also sees the packages of the Pythons in `others`. The
/// first of them is its base. Returns its interpreter.
pub(crate) fn venv(folder: &Path, others: &[&Path]) -> PathBuf {
    let base = others[0];
    succeeds(Command::new(base).args(["-m", "venv", "--without-pip"]).arg(folder));
    let python = folder.join("bin/python");
    let lines: String = others.iter().map(|other| format!("{}\n", packages(other).display())).collect();
    std::fs::write(packages(&python).join("others.pth"), lines).unwrap();
    python
}

/// Runs `pip install ARGUMENTS` in the environment of `python`, without a network.
pub(crate) fn pip_install(python: &Path, arguments: &[&Path]) -> Output {
    let mut pip = clean(python);
    pip.args(["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--quiet"]);
    pip.args(arguments).env("PIP_DISABLE_PIP_VERSION_CHECK", "1").env_remove("PYTHONPATH");
    succeeds(&mut pip)
}

/// Runs a command, which must succeed.
pub(crate) fn succeeds(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
    output
}
