//! Opens the trace that a command names, after finishing what a killed process left of it.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::ArgMatches;
use memtrace_analysis::read::input::Input;

use crate::args::DEFAULT_FOLDER;
use crate::recovery;

/// Opens the trace of the argument `name`, as [`open`] does.
pub(crate) fn input(name: &str, matches: &ArgMatches, repair: bool) -> Result<Input> {
    let path = matches.get_one::<PathBuf>(name).map_or(Path::new(DEFAULT_FOLDER), PathBuf::as_path);
    open(path, matches, repair)
}

/// Opens the trace at `path`, of the rank that was asked for; with `repair`, what a kill left of it is finished
/// first.
pub(crate) fn open(path: &Path, matches: &ArgMatches, repair: bool) -> Result<Input> {
    let mut input = Input::open(path)?;
    if repair && recovery::finish(&input)? {
        input = Input::open(path)?;
    }
    if let Some(rank) = matches.get_one::<i32>("rank") {
        input.only_rank(*rank)?;
    }
    Ok(input)
}
