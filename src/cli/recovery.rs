//! Completes the traces of killed processes from their journals, before a command reads them.
//!
//! If a trace cannot be written (a read-only mount, a full disk), the trace is completed for this command
//! only. Its last rows are written to a temporary file, and the footer reports this.

use std::fs;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result};
use memtrace_analysis::read::input::Input;
use memtrace_analysis::read::stream::TraceFile;
use memtrace_recover::{Fate, Repaired, Rest, repair, repair_beside, sweep};
use memtrace_trace::Meta;
use memtrace_trace::counts::counted;
use memtrace_trace::end_row::Ending;
use memtrace_trace::journal::folders;

use crate::child_env::{Scratch, run_id};
use crate::terminal;

/// The folder of the temporary files of this command; `None` until the first file is needed.
static FOLDER: Mutex<Option<Scratch>> = Mutex::new(None);

/// The last rows of a trace that could not be written to its file. They are in the temporary file `file`
/// instead.
struct Beside {
    trace: PathBuf,
    rest: Rest,
    file: PathBuf,
    note: String,
}

/// Opens an input with `open`, completes its traces whose processes were killed, and reports each on stderr.
/// Traces of other runs in the same folder are completed too. `fate` describes the end of the program that
/// this command started, if the program was killed.
///
/// # Errors
/// When the input cannot be opened, a journal cannot be read, or its rows cannot be written anywhere.
pub(crate) fn complete(open: impl Fn() -> Result<Input>, fate: Option<Fate>) -> Result<Input> {
    complete_each(open, fate, |line| terminal::say(&line))
}

/// Same as [`complete`], but without messages, for programs that are expected to be killed.
///
/// # Errors
/// Same as [`complete`].
pub(crate) fn complete_quietly(open: impl Fn() -> Result<Input>) -> Result<Input> {
    complete_each(open, None, |_| {})
}

/// Returns the reason why a trace without an end row cannot be completed here. The process was not
/// necessarily killed, because an incomplete copy of a complete trace has no end row, either.
fn without_journal(meta: &Meta) -> String {
    let here = rustix::system::uname().nodename().to_string_lossy().into_owned();
    if meta.host.is_empty() || meta.host == here {
        return "no end row and no journal: its process was killed, or the file is an incomplete copy; the last \
                rows are missing"
            .to_owned();
    }
    format!(
        "no end row: the trace was copied from {} before its process ended, or the process was killed there; on that \
         host, memtrace check --repair completes it from its journal",
        meta.host
    )
}

/// Writes the meta row of the traces at `path` whose processes were killed before the first row, from their
/// journals. Must be called before [`Input::open`], which leaves out empty files.
pub(crate) fn begin(path: &Path) {
    for (trace, error) in memtrace_recover::begin(path).failed {
        terminal::say(&format!("{}: a trace without rows is left unchanged: {error}", trace.display()));
    }
}

/// Removes the temporary files of this command. Must be called last.
pub(crate) fn remove_temporary_files() {
    if let Some(folder) = FOLDER.lock().unwrap_or_else(PoisonError::into_inner).take() {
        drop(folder);
    }
}

fn complete_each(
    open: impl Fn() -> Result<Input>,
    fate: Option<Fate>,
    report: impl Fn(String),
) -> Result<Input> {
    sweep(&folders(), None);
    let mut input = open()?;
    let mut changed = false;
    let mut rests = Vec::new();
    let files = input.traces.iter().flat_map(|trace| trace.files().map(move |path| (trace, path)));
    for (trace, path) in files {
        // The file may be gone: completing a part of a rotated trace removes the next part if it is empty.
        changed |= !path.exists();
        if let Some(rest) = complete_file(path, &trace.meta, fate, &mut changed, &report)? {
            rests.push(rest);
        }
    }
    for path in &input.others {
        let result = if is_plain(path) { repair(path, None) } else { Ok(Repaired::Complete) };
        match result {
            Ok(Repaired::Finished { rest, .. }) => report(finished(path, rest)),
            Ok(_) => {}
            Err(error) => report(format!("{}: {CANNOT}: {error}", path.display())),
        }
    }
    if changed {
        input = open()?;
    }
    for Beside { trace, rest, file, note } in rests {
        let part = TraceFile::open(&file)?;
        if input.traces.iter_mut().any(|other| other.continue_with(&trace, rest.whole, part.clone())) {
            input.notes.push(note);
        }
    }
    Ok(input)
}

const CANNOT: &str = "cannot complete the trace of a killed process";

/// Returns true if a file may be incomplete. A compressed file is always complete.
fn is_plain(path: &Path) -> bool {
    path.exists() && path.extension().is_some_and(|extension| extension == "csv")
}

fn finished(path: &Path, rest: Rest) -> String {
    let Rest { rows, lost, ending, .. } = rest;
    let lost = match (lost, ending) {
        (0, _) => String::new(),
        (lost, Ending::Stopped) => format!("; {} lost after that", counted(lost, "event")),
        (lost, _) => format!("; {} lost, because the buffer was full", counted(lost, "event")),
    };
    let end = end_of(ending);
    format!("{}: {end}; recovered {} from its journal{lost}", path.display(), counted(rows, "row"))
}

/// Returns the words for how the process left its trace, for the message.
fn end_of(ending: Ending) -> &'static str {
    match ending {
        Ending::Stopped => "its process could not finish writing it",
        _ => "its process was killed",
    }
}

/// Completes one file of a trace. If the trace cannot be written, returns its last rows, which are in a
/// temporary file.
fn complete_file(
    path: &Path,
    meta: &Meta,
    fate: Option<Fate>,
    changed: &mut bool,
    report: impl Fn(String),
) -> Result<Option<Beside>> {
    if !is_plain(path) {
        return Ok(None);
    }
    let name = path.display();
    let repaired = match repair(path, fate) {
        Ok(repaired) => repaired,
        Err(error) => {
            let beside = complete_beside(path, fate, &error);
            // If the file is gone, the recorder has removed or compressed the part in the meantime, so this
            // is no error.
            if !path.exists() {
                *changed = true;
                return Ok(None);
            }
            match beside.with_context(|| format!("{name}: {CANNOT}: {error}"))? {
                Ok(beside) => return Ok(Some(beside)),
                Err(instead) => {
                    // Another command has completed the trace since `repair` failed.
                    *changed |= instead == Repaired::Complete;
                    instead
                }
            }
        }
    };
    match repaired {
        Repaired::Finished { rest, .. } => {
            *changed = true;
            report(finished(path, rest));
        }
        Repaired::ByAnother => *changed = true,
        Repaired::NoJournal => report(format!("{name}: {}", without_journal(meta))),
        Repaired::Refused(why) => report(format!(
            "{name}: no end row, and the last rows are missing: its journal was not used, because {why}"
        )),
        Repaired::Complete | Repaired::Running => {}
    }
    Ok(None)
}

/// Writes the last rows of a trace into a temporary file, because they could not be written in place
/// (`error`). The inner `Err` is the reason why nothing was written.
fn complete_beside(path: &Path, fate: Option<Fate>, error: &io::Error) -> Result<Result<Beside, Repaired>> {
    let folder = temporary_folder()?;
    let name = path.file_name().context("a trace has a name")?;
    // The number in the path separates traces with the same name.
    let file = folder.join(fs::read_dir(&folder)?.count().to_string()).join(name);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(file.parent().unwrap_or(&folder))?;
    Ok(repair_beside(path, &file, fate)?.map(|rest| Beside {
        trace: path.to_owned(),
        rest,
        file,
        note: format!(
            "{}: {}, and it cannot be written now ({error}): its last {} are read from its journal, which stays; once \
             the file can be written, the next command adds them",
            name.display(),
            end_of(rest.ending),
            counted(rest.rows, "row")
        ),
    }))
}

/// Returns a private folder of this command, created at the first call.
fn temporary_folder() -> Result<PathBuf> {
    let mut folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(scratch) = &*folder {
        return Ok(scratch.folder.clone());
    }
    Ok(folder.insert(Scratch::new(&run_id())?).folder.clone())
}
