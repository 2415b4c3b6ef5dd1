//! The trait of an export, and the job that an export works on.

use std::path::{Path, PathBuf};

use super::out::Out;
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::state::replay_trace::Replayed;

/// The kind of output that an export writes, with the suffix of the file names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OutputKind {
    /// One file for all processes.
    OneFile(&'static str),
    /// One file for each process. If there are several processes, each file name contains the rank or, if
    /// ranks are not unique, the name of the trace.
    FileEach(&'static str),
    /// One file per process, named after the process's trace, so that one folder can hold the files of all
    /// machines of a job.
    FilePerTrace(&'static str),
    /// A folder, because the export may write several files for a process.
    Folder(&'static str),
}

/// A conversion of a trace for another tool.
pub trait Export: Sync {
    /// Returns the name for `--to`.
    fn name(&self) -> &'static str;

    /// Returns one line for the help.
    fn about(&self) -> &'static str;

    /// Returns the options of this export, in addition to the shared ones. If several exports have an option
    /// of the same name, the option must be the same in all of them.
    fn flags(&self) -> &'static [Flag] {
        &[]
    }

    /// Returns true if the export includes host memory, so that `--device cpu` and `--device -1`
    /// select something.
    fn takes_host(&self) -> bool {
        false
    }

    /// Returns whether the export writes one file, one file for each process, or a folder, and with which
    /// suffix.
    fn output_kind(&self, options: &Options) -> OutputKind;

    /// Returns the command that opens the result, in one line, in which `FILE` and `FOLDER` are placeholders
    /// for the written paths.
    fn open_with(&self) -> &'static str;

    /// Reads the traces of `job` and writes the output to [`Job::place`].
    ///
    /// # Errors
    /// When a trace cannot be read, the output cannot be written, or the request is invalid.
    fn write(&self, job: &mut Job<'_>) -> Result<()>;
}

/// The option that limits the number of events in the exports that list events.
pub(super) const MAX_EVENTS: Flag = Flag {
    name: "max-events",
    value: Some("N"),
    default: "100000",
    choices: &[],
    help: "Write at most N events; 0 for all",
};

/// Returns the value of [`MAX_EVENTS`], or `usize::MAX` if the value is 0.
///
/// # Errors
/// When the value is not a number.
pub(super) fn max_events(options: &Options) -> Result<usize> {
    Ok(match options.number(MAX_EVENTS.name)? {
        Some(0) => usize::MAX,
        Some(most) => most,
        None => 100_000,
    })
}

/// The input of an export, and its results.
pub struct Job<'a> {
    /// The processes to export.
    pub input: &'a Input,
    /// The processes of the whole command, whose files no output may replace.
    pub whole: &'a Input,
    /// The options of the command line.
    pub options: &'a Options,
    /// The file or folder to write.
    pub place: &'a Path,
    /// Notes on the completeness of the data. Includes the notes of earlier jobs of the same command.
    pub footer: Footer,
    /// The files that the command has written so far: path, size in bytes, and a description of the content.
    pub written: Vec<(PathBuf, u64, String)>,
}

impl<'a> Job<'a> {
    /// Returns the process to export. An export that writes one file per process gets one job for each
    /// process.
    ///
    /// # Errors
    /// When the job has no process.
    pub(super) fn trace(&self) -> Result<&'a TraceFile> {
        let none = || Error::usage(format!("{}: no trace", self.input.path.display()));
        self.input.traces.first().ok_or_else(none)
    }

    /// Opens the file [`Job::place`].
    ///
    /// # Errors
    /// When the file cannot be created, or when it is a trace that the command reads.
    pub(super) fn create(&self) -> Result<Out> {
        self.create_at(self.place)
    }

    /// Opens a file of the folder [`Job::place`].
    ///
    /// # Errors
    /// When the file cannot be created, or when it is a trace that the command reads.
    pub(super) fn create_at(&self, path: &Path) -> Result<Out> {
        Out::beside(path, self.whole.files())
    }

    /// Adds the notes on a trace to the footer.
    pub(super) fn add_to_footer(&mut self, trace: &TraceFile, replayed: &Replayed) {
        self.footer.add(trace, replayed, self.options);
    }

    /// Closes a file and adds it to the written files, with a description of its content.
    ///
    /// # Errors
    /// When a write failed.
    pub(super) fn finish_file(&mut self, out: Out, content: impl Into<String>) -> Result<()> {
        let path = out.path().to_owned();
        let bytes = out.finish()?;
        self.written.push((path, bytes, content.into()));
        Ok(())
    }
}

/// Returns the error of an export without content. `has_host` is true if the program has pinned memory.
pub(super) fn no_gpu(path: &Path, has_host: bool) -> Error {
    let host = if has_host { "; --device -1 selects its pinned memory" } else { "" };
    Error::usage(format!("{}: the traced program used no GPU{host}", path.display()))
}

/// Returns the name of a trace without its suffixes, such as `run` for `run.csv.gz`.
pub(super) fn trace_stem(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = whole.file_name().map_or_else(|| "trace".into(), |name| name.to_string_lossy().into_owned());
    memtrace_trace::files::stem(&name).to_owned()
}
