//! What every export shares: the trait, and the job that it works on.

use std::path::{Path, PathBuf};

use super::out::Out;
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::state::replay::Metric;
use crate::state::replay_trace::Replayed;

/// What an export leaves behind, with the ending that its name gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaves {
    /// One file for all processes.
    OneFile(&'static str),
    /// A file for each process.
    FileEach(&'static str),
    /// A folder.
    Folder(&'static str),
}

/// One form that a trace can take.
pub trait Export: Sync {
    /// What the user types behind `--to`.
    fn name(&self) -> &'static str;

    /// One line for the help.
    fn about(&self) -> &'static str;

    /// The options that it has beside the shared ones. One that several exports have is the same in each.
    fn flags(&self) -> &'static [Flag] {
        &[]
    }

    /// What it leaves behind.
    fn leaves(&self, options: &Options) -> Leaves;

    /// How to look at it, in a line; `FILE` and `FOLDER` stand for what was written.
    fn open_with(&self) -> &'static str;

    /// Reads the traces of `job` and writes to its place.
    ///
    /// # Errors
    /// When a trace cannot be read, the place cannot be written, or the request makes no sense.
    fn write(&self, job: &mut Job<'_>) -> Result<()>;
}

/// The option of exports that list events.
pub(super) const MAX_EVENTS: Flag = Flag {
    name: "max-events",
    value: Some("N"),
    default: "100000",
    choices: &[],
    help: "How many events it may hold; 0 for all",
};

/// The most events, as [`MAX_EVENTS`] says it.
pub(super) fn max_events(options: &Options) -> Result<usize> {
    Ok(match options.number(MAX_EVENTS.name)? {
        Some(0) => usize::MAX,
        Some(most) => most,
        None => 100_000,
    })
}

/// What an export works on, and what it tells of its work.
pub struct Job<'a> {
    /// The processes.
    pub input: &'a Input,
    /// What was asked for.
    pub options: &'a Options,
    /// The file or folder to write.
    pub place: &'a Path,
    /// How far it can be trusted.
    pub footer: Footer,
    /// What was written: the path, its size in bytes, and what is in it.
    pub wrote: Vec<(PathBuf, u64, String)>,
}

impl<'a> Job<'a> {
    /// The only process, of an export with a file for each.
    pub(super) fn trace(&self) -> Result<&'a TraceFile> {
        let none = || Error::usage(format!("{}: no trace", self.input.path.display()));
        self.input.traces.first().ok_or_else(none)
    }

    /// Takes in what was learned of a trace: how far it can be trusted.
    pub(super) fn learn(&mut self, trace: &TraceFile, replayed: &Replayed) {
        let fullest = replayed.fullest(Metric::Allocated, self.options).map(|device| device.ordinal);
        self.footer.add(trace, replayed, fullest);
    }

    /// Closes a file and notes what is in it.
    pub(super) fn done(&mut self, out: Out, what: impl Into<String>) -> Result<()> {
        let path = out.path().to_owned();
        let bytes = out.finish()?;
        self.wrote.push((path, bytes, what.into()));
        Ok(())
    }
}

/// The name of a trace without the endings that mark it as one: `run.csv.gz` is `run`.
pub(super) fn trace_stem(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = whole.file_name().map_or_else(|| "trace".into(), |name| name.to_string_lossy().into_owned());
    memtrace_trace::files::stem(&name).to_owned()
}
