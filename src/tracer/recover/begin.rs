//! Starts the traces of processes that were killed before they wrote a meta row, which the journal also
//! contains.

use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf, absolute};

use memtrace_encode::Encoder;
use memtrace_trace::csv::{RowReader, RowWriter};
use memtrace_trace::files;
use memtrace_trace::journal::{JournalName, Run, folders, mount_namespace};
use memtrace_trace::private_file;
use memtrace_trace::rounding::Rounding;
use rustix::fs::FlockOperation;

use crate::journal::{Header, is_running};
use crate::named::{is_own, open_own, open_trace};
use crate::repair::FileRows;

/// The result of [`begin`].
#[derive(Debug, Default)]
pub struct Begun {
    /// The number of traces that got their meta row. [`crate::repair()`] finishes them.
    pub traces: u64,
    /// The traces that could not be written, with the reasons.
    pub failed: Vec<(PathBuf, io::Error)>,
}

/// Writes the missing meta rows of the traces at `path`, a file or a folder. A process that was killed early
/// may not have written this row; the trace's journal has it.
#[must_use]
pub fn begin(path: &Path) -> Begun {
    let mut begun = Begun::default();
    // A trace with a meta row needs no new one, so the journals are not searched.
    if path.is_file() && has_meta_row(path) {
        return begun;
    }
    // If the trace was never created, its folder may not exist either.
    let wanted = match fs::canonicalize(path).or_else(|_| absolute(path)) {
        Ok(wanted) => wanted,
        Err(error) => return Begun { failed: vec![(path.to_owned(), error)], ..begun },
    };
    for entry in folders().iter().flat_map(fs::read_dir).flatten().flatten() {
        if let Some(JournalName::Journal(_)) = JournalName::parse(&entry.file_name())
            && let Some((trace, run, json)) = unbegun(&entry.path(), &wanted)
        {
            match begin_trace(&trace, &entry.path(), &run, &json) {
                Ok(has_begun) => begun.traces += u64::from(has_begun),
                Err(error) => begun.failed.push((trace, error)),
            }
        }
    }
    begun
}

/// Returns the trace that a journal names, with its process and its meta row. Does so only if the process has
/// ended, and the trace has no meta row and is `wanted` or in the folder `wanted`.
fn unbegun(journal: &Path, wanted: &Path) -> Option<(PathBuf, Run, String)> {
    let (file, _) = open_own(journal).ok()?.ok()?;
    let header = Header::read(&file).ok()??;
    let trace = at_its_place(header.trace()?)?;
    // In another mount namespace, the path of the trace refers to another file.
    let is_in_sight = header.mount_namespace() == 0 || header.mount_namespace() == mount_namespace();
    let is_unbegun = header.checkpoints() == 0
        && trace.starts_with(wanted)
        && !has_meta_row(&trace)
        && !is_running(&file, &header.run())
        && is_in_sight;
    is_unbegun.then_some((trace, header.run(), header.meta()?.to_owned()))
}

/// Writes the header and the meta row `json` of a trace. Returns false if it wrote nothing.
fn begin_trace(trace: &Path, journal: &Path, run: &Run, json: &str) -> io::Result<bool> {
    let bytes = first_rows(run, json)?;
    let row = RowReader::new(trace, bytes.as_slice());
    if !row.is_ok_and(|row| Path::new(&row.meta().journal) == journal) {
        return Ok(false);
    }
    write_first_rows(trace, &bytes)
}

/// Writes `bytes` as the only content of a trace, which may not exist yet. Returns false and changes nothing
/// if the file belongs to another user, or if another command has written its rows.
fn write_first_rows(trace: &Path, bytes: &[u8]) -> io::Result<bool> {
    if let Some(folder) = trace.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    }
    let file = private_file::reopen(trace, OpenOptions::new().read(true).write(true).create(true))?;
    if !is_own(&file.metadata()?) {
        return Ok(false);
    }
    // Another command may start the trace at the same time, or even have finished it. Only the first command
    // may truncate the file.
    rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
    if has_meta_row(trace) {
        return Ok(false);
    }
    file.set_len(0)?;
    (&file).write_all(bytes)?;
    Ok(true)
}

/// Returns the CSV header and the meta row.
fn first_rows(run: &Run, json: &str) -> io::Result<Vec<u8>> {
    let &Run { start_ns, rank, pid, .. } = run;
    let mut encoder = Encoder::new(start_ns, rank as i32, pid, Rounding::default(), false);
    let mut rows = FileRows { writer: RowWriter::new(Vec::new()), rows: 0 };
    encoder.meta(json, &mut rows)?;
    rows.writer.flush()?;
    Ok(rows.writer.get_ref().clone())
}

/// Returns the path of a trace, with its folder canonicalized if it exists. Returns `None` if the name is not
/// the name of a trace, or if the path is relative.
fn at_its_place(path: &Path) -> Option<PathBuf> {
    let name = path.file_name().filter(|name| files::is_trace(&name.to_string_lossy()))?;
    let folder = path.parent().filter(|folder| folder.is_absolute())?;
    Some(fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned()).join(name))
}

/// Returns true if a trace has a header and a complete meta row.
fn has_meta_row(trace: &Path) -> bool {
    let mut start = Vec::new();
    let Ok(file) = open_trace(trace) else { return false };
    // The first MiB holds the header and the longest meta row. A compressed trace is complete, because it was
    // closed in order.
    let is_plain = trace.extension().is_some_and(|extension| extension == "csv");
    let read = file.take(1 << 20).read_to_end(&mut start).is_ok();
    !is_plain
        || !read
        || start.iter().filter(|byte| **byte == b'\n').nth(1).is_some()
        || start.len() == 1 << 20
}
