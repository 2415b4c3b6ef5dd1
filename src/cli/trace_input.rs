//! Opens the trace that a command names. Most commands first complete the traces of killed processes.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::ArgMatches;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::selection;

use crate::args::DEFAULT_FOLDER;
use crate::recovery;

/// Opens the trace given by the argument `name`, or by default the newest trace in [`DEFAULT_FOLDER`]. See
/// [`open()`].
///
/// # Errors
/// Same as [`open()`].
pub(crate) fn open_arg(name: &str, matches: &ArgMatches, recover: bool) -> Result<Input> {
    let path = matches.get_one::<PathBuf>(name).map_or(Path::new(DEFAULT_FOLDER), PathBuf::as_path);
    open(path, matches, recover)
}

/// Opens the trace at `path` without completing it.
///
/// # Errors
/// When there is no trace, or it cannot be read.
pub(crate) fn open_plain(path: &Path) -> Result<Input> {
    Ok(Input::open(path)?)
}

/// Opens the trace at `path` and keeps only the rank that `--rank` names, if it is given. With `recover`, the
/// traces of killed processes are completed from their journals first.
///
/// # Errors
/// When there is no trace, it cannot be read or completed, or it has no such rank.
pub(crate) fn open(path: &Path, matches: &ArgMatches, recover: bool) -> Result<Input> {
    let mut input = open_all(path, recover)?;
    if let Some(rank) = matches.get_one::<i32>("rank") {
        selection::only_rank(&mut input, *rank)?;
    }
    Ok(input)
}

/// Opens the trace at `path` with all its ranks, for a command without `--rank`. See [`open()`].
///
/// # Errors
/// When there is no trace, or it cannot be read or completed.
pub(crate) fn open_all(path: &Path, recover: bool) -> Result<Input> {
    if recover {
        recovery::begin(path);
    }
    if !path.try_exists().unwrap_or(true) {
        bail!(missing(path));
    }
    let open = || Ok(Input::open(path)?);
    if recover { recovery::complete(open, None) } else { open() }
}

fn missing(path: &Path) -> String {
    if path == Path::new(DEFAULT_FOLDER) {
        return format!(
            "no trace was named, and there is no folder {DEFAULT_FOLDER} here; name a trace, or write one \
             with: memtrace run -- python train.py"
        );
    }
    format!("{}: no such file or folder", path.display())
}

/// Returns the traces in `folder` that the launch `run_id` wrote, without completing them.
///
/// # Errors
/// When there is no trace in the folder, or a trace cannot be read.
pub(crate) fn open_run(folder: &Path, run_id: &str) -> memtrace_analysis::error::Result<Input> {
    let mut input = Input::open(folder)?;
    input.only_run(run_id);
    Ok(input)
}
