//! Repair: the rows that a trace lacks, from the journal of its process.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use memtrace_encode::stacks::write_stacks;
use memtrace_encode::{Encoder, RowSink};
use memtrace_trace::Row;
use memtrace_trace::csv::{RowReader, RowWriter, is_end_row};
use memtrace_trace::end_row::{Ending, refused_names_word};
use memtrace_trace::files;
use memtrace_trace::stacks::{self, StackWriter};

use crate::journal::{Journal, is_running};
use crate::named::{self, Named};

/// The result of [`repair`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repaired {
    /// The trace is complete: nothing was done.
    Complete,
    /// The process that writes the trace still runs.
    Running,
    /// The trace ends early, and its journal is gone (the host was restarted, for example).
    NoJournal,
    /// The trace ends early, and the file that it names is not its journal: nothing was done. The text says why.
    Refused(&'static str),
    /// The trace was finished.
    Finished {
        /// Rows that came from the journal.
        rows: u64,
        /// Events of the process that no row has, over the whole run.
        lost: u64,
        /// Bytes at the end of the file that were cut off: incomplete rows, or rows of events that the journal has too.
        cut: u64,
    },
}

/// Finishes the trace at `csv` from the journal of its process, and removes the journal if it was made for this file.
///
/// # Errors
/// When the trace cannot be read or written; the journal stays then.
pub fn repair(csv: &Path) -> io::Result<Repaired> {
    let Some((journal_path, part)) = journal_of(csv)? else { return Ok(Repaired::Complete) };
    let found = match named::find(&journal_path, csv)? {
        Named::Found(found) => found,
        Named::Gone => return Ok(Repaired::NoJournal),
        Named::Refused(why) => return Ok(Repaired::Refused(why)),
    };
    let bytes = found.bytes()?;
    let journal = Journal::read(&bytes)
        .ok_or_else(|| io::Error::other(format!("{}: not a journal", journal_path.display())))?;
    if is_running(&found.file, &journal.run) {
        return Ok(Repaired::Running);
    }
    if journal.part != part {
        // The process was killed between two parts: the other part is the one to finish.
        return Ok(Repaired::Complete);
    }
    let length = fs::metadata(csv)?.len();
    // A process that was killed before its first checkpoint wrote the meta row only: other rows are those of a repair
    // that was killed. And on a disk that lost its power the trace may be shorter than it was.
    let csv_len = match journal.csv_len {
        0 => meta_row_end(csv)?,
        csv_len => whole_lines(csv, csv_len)?,
    };
    let mut trace = OpenOptions::new().read(true).write(true).open(csv)?;
    let mut encoder = journal.encoder();
    journal.define(&found.names(), &mut encoder);
    encoder.set_stacks_written(cut_stacks(csv)?);
    let prefix = File::open(csv)?.take(csv_len);
    let mut reader = RowReader::new(csv, prefix).map_err(io::Error::other)?;
    while let Some(row) = reader.next_row().map_err(io::Error::other)? {
        encoder.restore_row(&row);
    }
    journal.restore_reported_lost(&mut encoder);
    // The end row says that the trace is complete, so the stacks come first.
    append_stacks(csv, &mut encoder)?;
    trace.set_len(csv_len)?;
    trace.seek(SeekFrom::End(0))?;
    let mut sink = FileRows { writer: RowWriter::without_header(trace), rows: 0 };
    let mut last_ns = journal.run.start_ns;
    for (tid, event) in journal.events() {
        last_ns = last_ns.max(event.clock_ns);
        encoder.encode(tid, &event, &mut sink)?;
    }
    let more = refused_names_word(journal.refused_names);
    encoder.end(last_ns, journal.lost, Ending::Killed, more.trim_end(), &mut sink)?;
    sink.writer.flush()?;
    // The journal is removed only once the trace is on the disk.
    sink.writer.get_ref().sync_all()?;
    // The next part, if the process was opening one, has opening rows only.
    let next = files::part(csv, part + 1);
    if journal_of(&next).is_ok_and(|found| found == Some((journal_path.clone(), part + 1))) {
        fs::remove_file(next)?;
    }
    remove_unfinished(csv);
    found.remove()?;
    let (rows, lost) = (sink.rows, encoder.reported_lost());
    Ok(Repaired::Finished { rows, lost, cut: length.saturating_sub(csv_len) })
}

/// Removes the copies that the process was compressing when it was killed; the parts themselves are still there.
fn remove_unfinished(csv: &Path) {
    let (folder, stem) = (csv.parent().unwrap_or(Path::new(".")), files::first_stem(csv));
    let Some(stem) = stem.file_name().and_then(|name| name.to_str()) else { return };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| files::is_unfinished_of(name, stem)) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// The journal of a trace without an end, and the number of the trace's part; `None` when the trace is complete.
fn journal_of(csv: &Path) -> io::Result<Option<(PathBuf, u64)>> {
    let reader = RowReader::open(csv).map_err(io::Error::other)?;
    let journal = PathBuf::from(&reader.meta().journal);
    if journal.as_os_str().is_empty() || ends_with_end_row(csv)? {
        return Ok(None);
    }
    Ok(Some((journal, u64::from(reader.meta().part.max(1)))))
}

/// The length of the whole lines in the first `most` bytes of a file.
///
/// # Errors
/// When the file cannot be read.
pub fn whole_lines(path: &Path, most: u64) -> io::Result<u64> {
    let mut file = File::open(path)?;
    let end = file.metadata()?.len().min(most);
    let start = end.saturating_sub(1 << 20);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.take(end - start).read_to_end(&mut tail)?;
    Ok(tail.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| start + last as u64 + 1))
}

/// The length of the header and the meta row of a trace that has both.
fn meta_row_end(csv: &Path) -> io::Result<u64> {
    let mut lines = BufReader::new(File::open(csv)?);
    let mut line = Vec::new();
    Ok((lines.read_until(b'\n', &mut line)? + lines.read_until(b'\n', &mut line)?) as u64)
}

/// Returns true if the last line of a trace is whole and an `end` row.
pub(crate) fn ends_with_end_row(csv: &Path) -> io::Result<bool> {
    let mut file = File::open(csv)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(4096)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    let Some(b'\n') = tail.pop() else { return Ok(false) };
    let last = tail.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(is_end_row(last))
}

/// Writes rows and counts them.
pub(crate) struct FileRows<W: Write> {
    pub(crate) writer: RowWriter<W>,
    pub(crate) rows: u64,
}

impl<W: Write> RowSink for FileRows<W> {
    type Error = io::Error;
    fn row(&mut self, row: &Row<'_>) -> io::Result<()> {
        self.rows += 1;
        self.writer.write(row)
    }
}

/// Cuts the file of stacks to its whole lines and returns the number of its stacks.
fn cut_stacks(csv: &Path) -> io::Result<usize> {
    let path = files::written_stacks(csv);
    let Ok(text) = fs::read(&path) else { return Ok(0) };
    let (count, whole) = stacks::complete(&text);
    OpenOptions::new().write(true).open(&path)?.set_len(whole as u64)?;
    Ok(count)
}

fn append_stacks(csv: &Path, encoder: &mut Encoder) -> io::Result<()> {
    let path = files::written_stacks(csv);
    let is_new = !path.exists();
    let mut writer = if is_new {
        StackWriter::new(create_private(&path)?)?
    } else {
        StackWriter::append(OpenOptions::new().append(true).open(&path)?)
    };
    let rows = write_stacks(&mut writer, encoder)?;
    if is_new && rows == 0 {
        fs::remove_file(&path)?;
    }
    Ok(())
}

/// Creates a file that only its owner can read. It never follows a link, because it never opens an existing file.
fn create_private(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}
