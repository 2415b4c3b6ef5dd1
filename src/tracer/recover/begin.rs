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

/// Writes the missing meta rows of the traces at `path`, a file or a folder. A process that was killed early
/// may not have written this row; the trace's journal has it. Returns the number of these traces;
/// [`crate::repair()`] finishes them.
///
/// # Errors
/// Returns an error if a trace cannot be written.
pub fn begin(path: &Path) -> io::Result<u64> {
    // A trace with a meta row needs no new one, so the journals are not searched.
    if path.is_file() && has_meta_row(path) {
        return Ok(0);
    }
    // If the trace was never created, its folder may not exist either.
    let wanted = fs::canonicalize(path).or_else(|_| absolute(path))?;
    let mut begun = 0;
    for folder in folders() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            if let Some(JournalName::Journal(_)) = JournalName::parse(&entry.file_name()) {
                begun += u64::from(begin_from(&entry.path(), &wanted)?);
            }
        }
    }
    Ok(begun)
}

/// Writes the header and the meta row of the trace that a journal names. Does so only if the trace has no
/// meta row, and is `wanted` or in the folder `wanted`. Returns true if it wrote the rows.
fn begin_from(journal: &Path, wanted: &Path) -> io::Result<bool> {
    let Ok(Some((file, _))) = open_own(journal) else { return Ok(false) };
    let Ok(Some(header)) = Header::read(&file) else { return Ok(false) };
    let (Some(trace), Some(json)) = (header.trace().and_then(at_its_place), header.meta()) else {
        return Ok(false);
    };
    if header.checkpoints() > 0
        || !trace.starts_with(wanted)
        || has_meta_row(&trace)
        || is_running(&file, &header.run())
    {
        return Ok(false);
    }
    // In another mount namespace, the path of the trace refers to another file.
    let namespace = header.mount_namespace();
    if namespace != 0 && namespace != mount_namespace() {
        return Ok(false);
    }
    let bytes = first_rows(&header.run(), json)?;
    let row = RowReader::new(&trace, bytes.as_slice());
    if !row.is_ok_and(|row| Path::new(&row.meta().journal) == journal) {
        return Ok(false);
    }
    write_first_rows(&trace, &bytes)
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
