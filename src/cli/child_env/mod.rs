//! Sets up the environment so that a program loads the tracer, and the simulated GPU if one is requested.

mod phantom_args;
mod scratch;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use memtrace_cards::{
    CARD_VARIABLE, DYNAMIC_VARIABLE, FAULT_VARIABLE, HOST_VALUES_VARIABLE, PAST_OOM_VARIABLE,
};
use memtrace_machine::{MACHINE_VARIABLE, libcuda};
use memtrace_trace::hello::HELLO;

use crate::libraries::{PHANTOM, TRACER, library};
use crate::{load_failure, terminal};

pub(crate) use phantom_args::{FreeAtStart, PhantomArgs, check_card, gib};
pub(crate) use scratch::{Scratch, TracerFacts, run_id};

/// The folders that a shell searches if `PATH` is unset.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Returns `command` with the environment that traces it. Its traces go to the folder `out`, an absolute
/// path.
///
/// # Errors
/// When a library is missing, or `LD_PRELOAD` cannot name it.
pub(crate) fn traced_command(
    scratch: &Scratch,
    command: &[impl AsRef<OsStr>],
    out: &Path,
    run_id: &str,
    phantom: Option<&PhantomArgs<'_>>,
) -> Result<Command> {
    let [program, arguments @ ..] = command else { bail!("no program was given") };
    let mut libraries = vec![library(TRACER)?];
    let mut child = Command::new(program);
    child.args(arguments);
    if let Some(phantom) = phantom {
        let library = library(PHANTOM)?;
        libcuda::link(&scratch.folder, &library)
            .context("cannot link libcuda.so.1, which Triton needs, to the simulated GPU")?;
        libraries.push(library);
        // A program that calls nvidia-smi must find this link first in its PATH.
        let commands = scratch.folder.join("bin");
        fs::create_dir(&commands).with_context(|| commands.display().to_string())?;
        let own = std::env::current_exe().context("cannot find the command memtrace")?;
        symlink(own, commands.join("nvidia-smi"))
            .with_context(|| format!("cannot link nvidia-smi in {}", commands.display()))?;
        let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
        let paths = std::iter::once(commands).chain(std::env::split_paths(&path));
        // PATH cannot contain a folder with a colon in its name. The program then has no `nvidia-smi`, but
        // `memtrace live --nvidia-smi` still shows the run.
        if let Ok(path) = std::env::join_paths(paths) {
            child.env("PATH", path);
        }
        child.env(MACHINE_VARIABLE, run_id);
        child.env(CARD_VARIABLE, phantom.card).env(libcuda::FOLDER_VARIABLE, &scratch.folder);
        if !phantom.faults.is_empty() {
            child.env(FAULT_VARIABLE, &phantom.faults);
        }
        if phantom.goes_past_oom {
            child.env(PAST_OOM_VARIABLE, "1");
        }
        if !phantom.keeps_host_values {
            child.env(HOST_VALUES_VARIABLE, "0");
        }
        if let Some(how) = phantom.dynamic {
            child.env(DYNAMIC_VARIABLE, how);
        }
    }
    preload(&mut child, scratch, &libraries)?;
    child.env("MEMTRACE_OUT", out).env("MEMTRACE_RUN_ID", run_id).env(HELLO, scratch.hello());
    Ok(child)
}

/// Returns the command of a Python interpreter that runs a script of memtrace with `libraries` preloaded, but without
/// the user's settings of memtrace, because they could disable tracing or change the simulated GPU.
///
/// # Errors
/// When `LD_PRELOAD` cannot name a library.
pub(crate) fn python_command(scratch: &Scratch, python: &OsStr, libraries: &[PathBuf]) -> Result<Command> {
    let mut command = Command::new(python);
    command.stdin(Stdio::null()).env("PYTHONDONTWRITEBYTECODE", "1");
    for (name, _) in std::env::vars_os() {
        if name.as_bytes().starts_with(b"MEMTRACE_") {
            command.env_remove(name);
        }
    }
    preload(&mut command, scratch, libraries)?;
    Ok(command)
}

/// Preloads `libraries` into the program of `command`, before the libraries that `LD_PRELOAD` names already.
fn preload(command: &mut Command, scratch: &Scratch, libraries: &[PathBuf]) -> Result<()> {
    let paths =
        libraries.iter().map(|library| scratch.loadable(library)).collect::<Result<Vec<PathBuf>>>()?;
    command.env("LD_PRELOAD", preload_list(&paths, std::env::var_os("LD_PRELOAD").as_deref()));
    Ok(())
}

/// Removes our libraries from the environment of a program that could not start with them, and prints a
/// message.
pub(crate) fn spare_foreign_program(child: &mut Command, program: &OsStr) {
    if !load_failure::refuses_preload(program) {
        return;
    }
    terminal::say(&format!(
        "{} is not built for 64-bit glibc (musl, or 32 bits), so it cannot load {TRACER}; it runs untraced",
        Path::new(program).display()
    ));
    match std::env::var_os("LD_PRELOAD") {
        Some(existing) => child.env("LD_PRELOAD", existing),
        None => child.env_remove("LD_PRELOAD"),
    };
}

/// Returns true if this machine may have a GPU: a device of the driver, of WSL, or of a Jetson.
pub(crate) fn has_gpu() -> bool {
    ["/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvmap"]
        .iter()
        .any(|device| Path::new(device).exists())
}

/// Returns the value of `LD_PRELOAD`: our libraries first, then the libraries that `existing` names, each
/// once.
fn preload_list(ours: &[PathBuf], existing: Option<&OsStr>) -> OsString {
    let mut list: Vec<&[u8]> = ours.iter().map(|path| path.as_os_str().as_bytes()).collect();
    // The loader splits `LD_PRELOAD` at colons and at spaces.
    let existing =
        existing.map(OsStr::as_bytes).unwrap_or_default().split(|byte| matches!(byte, b' ' | b':'));
    for path in existing.filter(|path| !path.is_empty()) {
        if !list.contains(&path) {
            list.push(path);
        }
    }
    OsStr::from_bytes(&list.join(&b':')).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ld_preload_names_the_tracer_first_and_each_library_once() {
        let ours = [PathBuf::from("/a/libmemtrace.so")];
        let list = preload_list(&ours, Some(OsStr::new("/b/x.so /a/libmemtrace.so:/c/y.so")));
        assert_eq!(list, "/a/libmemtrace.so:/b/x.so:/c/y.so");
        assert_eq!(preload_list(&ours, None), "/a/libmemtrace.so");
    }
}
