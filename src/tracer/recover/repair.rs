//! Repair: completes a trace from the journal of its process.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use memtrace_encode::stacks::write_stacks;
use memtrace_encode::{Encoder, RowSink};
use memtrace_trace::csv::{RowReader, RowWriter, is_end_row, last_line};
use memtrace_trace::end_row::Ending;
use memtrace_trace::files;
use memtrace_trace::private_file;
use memtrace_trace::stacks::{self, StackWriter};
use memtrace_trace::{Meta, Row};
use rustix::fs::{FlockOperation, flock};

use crate::fate::{self, Fate};
use crate::journal::Journal;
use crate::named::{self, JournalLookup, OwnJournal, open_trace};

/// The result of [`repair`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repaired {
    /// The trace was already complete; nothing was done.
    Complete,
    /// Another command has finished the trace in the meantime.
    ByAnother,
    /// The process that writes the trace is still running.
    Running,
    /// The trace is incomplete, and its journal is gone, for example after a restart of the host.
    NoJournal,
    /// The trace is incomplete, and the file that it names is not its journal; nothing was done. The text is
    /// the reason.
    Refused(&'static str),
    /// The trace was finished.
    Finished {
        /// The added rows.
        rest: Rest,
        /// The number of bytes removed from the end of the file: incomplete rows, or rows of events that are
        /// also in the journal.
        cut: u64,
    },
}

/// The missing rows of a trace, from the journal of its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rest {
    /// The length in bytes of the valid part of the file. The added rows follow it.
    pub whole: u64,
    /// The number of added rows.
    pub rows: u64,
    /// The number of events without a row, over the whole run.
    pub lost: u64,
    /// The way the trace ended.
    pub ending: Ending,
}

/// Finishes the trace at `csv` from the journal of its process. Removes the journal if it was created for
/// this file. If several commands do this at once, one works and the others wait. `fate` is the parent's
/// observation, for the end row.
///
/// # Errors
/// Returns an error if the trace cannot be read or written. The journal then stays, and no valid row is lost.
pub fn repair(csv: &Path, fate: Option<Fate>) -> io::Result<Repaired> {
    let unfinished = match Unfinished::find(csv)? {
        Ok(unfinished) => unfinished,
        Err(instead) => return Ok(instead),
    };
    // Leftover files are removed before the end row is written, because no repair runs once the trace has its
    // end row. If the process was killed while it opened the next part, that part has only opening rows.
    let is_its_own = |(path, meta): &(PathBuf, Meta)| {
        *path == unfinished.journal_path && u64::from(meta.part) == unfinished.part + 1
    };
    for next in files::parts_numbered(csv, unfinished.part + 1) {
        if journal_of(&next).is_ok_and(|found| found.as_ref().is_some_and(is_its_own)) {
            fs::remove_file(next)?;
        }
    }
    remove_unfinished(csv);
    unfinished.end_part_before(csv)?;
    let length = fs::metadata(csv)?.len();
    let mut trace = private_file::reopen(csv, OpenOptions::new().read(true).write(true))?;
    let (mut encoder, _) = unfinished.encoder(csv, unfinished.whole)?;
    encoder.definitions_mut().set_stacks_written(cut_stacks(csv)?);
    // The end row marks the trace as complete, so the stacks are written before it.
    append_stacks(csv, &mut encoder)?;
    trace.set_len(unfinished.whole)?;
    trace.seek(SeekFrom::End(0))?;
    let mut sink = FileRows { writer: RowWriter::without_header(trace), rows: 0 };
    let rest = unfinished.encode(&mut encoder, &mut sink, fate)?;
    // The journal is removed only after the trace is on disk.
    sink.writer.get_ref().sync_all()?;
    unfinished.found.remove()?;
    Ok(Repaired::Finished { rest, cut: length.saturating_sub(rest.whole) })
}

/// Writes the missing rows of the trace at `csv` into the new file `part`, the trace's next part, and changes
/// nothing else. Used for traces that cannot be written. The inner `Err` is the reason why nothing was
/// written.
///
/// # Errors
/// Returns an error if the trace cannot be read or the part cannot be written.
pub fn repair_beside(csv: &Path, part: &Path, fate: Option<Fate>) -> io::Result<Result<Rest, Repaired>> {
    let unfinished = match Unfinished::find(csv)? {
        Ok(unfinished) => unfinished,
        Err(instead) => return Ok(Err(instead)),
    };
    let (mut encoder, _) = unfinished.encoder(csv, unfinished.whole)?;
    let mut sink = FileRows { writer: RowWriter::new(private_file::create(part)?), rows: 0 };
    let mut meta = unfinished.meta.clone();
    meta.part = unfinished.part as u32 + 1;
    let text = |opening_rows| {
        meta.opening_rows = opening_rows;
        meta.to_json().unwrap_or_default()
    };
    encoder.open_part(unfinished.journal.run.start_ns, text, &mut sink)?;
    sink.rows = 0;
    let rest = unfinished.encode(&mut encoder, &mut sink, fate)?;
    append_stacks(part, &mut encoder)?;
    Ok(Ok(rest))
}

/// A trace of a killed process, without its end row. The value holds the lock of the journal, so that no
/// other command repairs the trace at the same time.
struct Unfinished {
    journal_path: PathBuf,
    /// The journal file, which holds the lock while it is open.
    found: OwnJournal,
    journal: Journal,
    meta: Meta,
    /// The part number of the trace.
    part: u64,
    /// The length of the valid part of the file in bytes.
    whole: u64,
}

impl Unfinished {
    /// Finds the journal of the trace at `csv` and takes its lock. The inner `Err` is the reason why no
    /// repair is needed or possible.
    fn find(csv: &Path) -> io::Result<Result<Unfinished, Repaired>> {
        let Some((journal_path, meta)) = journal_of(csv)? else { return Ok(Err(Repaired::Complete)) };
        let found = match named::find(&journal_path, csv)? {
            JournalLookup::Found(found) => found,
            // Another command may have finished the trace and removed the journal.
            JournalLookup::Gone if journal_of(csv)?.is_none() => return Ok(Err(Repaired::ByAnother)),
            JournalLookup::Gone => return Ok(Err(Repaired::NoJournal)),
            JournalLookup::Refused(why) => return Ok(Err(Repaired::Refused(why))),
        };
        flock(&found.file, FlockOperation::LockExclusive)?;
        if journal_of(csv)?.is_none() {
            return Ok(Err(Repaired::ByAnother));
        }
        // Before the bytes are read, because a running process changes them during the read.
        if found.is_running() {
            return Ok(Err(Repaired::Running));
        }
        let bytes = found.bytes()?;
        let journal = Journal::read(&bytes)
            .ok_or_else(|| io::Error::other(format!("{}: not a journal", journal_path.display())))?;
        let part = u64::from(meta.part.max(1));
        if journal.part != part {
            // The process was killed while it switched parts, so the other part is the part to finish.
            return Ok(Err(Repaired::Complete));
        }
        let whole = match journal.csv_len {
            // A process that was killed before its first checkpoint wrote only the header and the meta row.
            // Any further rows are from a command that was killed while it repaired the trace.
            0 => meta_row_end(csv)?,
            // After a power failure, the file may be shorter than the checkpoint recorded.
            length => whole_lines(csv, length)?,
        };
        Ok(Ok(Unfinished { journal_path, found, journal, meta, part, whole }))
    }

    /// Writes the end row of the part before `csv`, if it is missing. A process writes this row after it has
    /// begun the new part. If the process was killed in between, the row is missing, and the row numbers have
    /// a gap.
    fn end_part_before(&self, csv: &Path) -> io::Result<()> {
        if self.part < 2 {
            return Ok(());
        }
        let is_of_this_run = |(journal, meta): &(PathBuf, Meta)| {
            *journal == self.journal_path && u64::from(meta.part.max(1)) == self.part - 1
        };
        let has_no_end =
            |part: &PathBuf| journal_of(part).is_ok_and(|found| found.as_ref().is_some_and(is_of_this_run));
        // A part that was compressed or removed already had its end row.
        let Some(before) = files::parts_numbered(csv, self.part - 1).into_iter().find(has_no_end) else {
            return Ok(());
        };
        let whole = whole_lines(&before, u64::MAX)?;
        let (mut encoder, last_ns) = self.encoder(&before, whole)?;
        let mut part = private_file::reopen(&before, OpenOptions::new().write(true))?;
        part.set_len(whole)?;
        part.seek(SeekFrom::End(0))?;
        let mut sink = FileRows { writer: RowWriter::without_header(part), rows: 0 };
        encoder.end(last_ns, 0, Ending::Rotated, "", &mut sink)?;
        sink.writer.flush()?;
        sink.writer.get_ref().sync_all()
    }

    /// Returns the process's encoder in its state after the first `whole` bytes of the file at `csv`, a trace
    /// or a part. Also returns the timestamp of the last row in these bytes.
    fn encoder(&self, csv: &Path, whole: u64) -> io::Result<(Encoder, u64)> {
        let mut encoder = self.journal.encoder();
        encoder.set_tags(self.meta.modules);
        self.journal.define(&self.found.names(), &mut encoder);
        let prefix = open_trace(csv)?.take(whole);
        let mut reader = RowReader::new(csv, prefix).map_err(io::Error::other)?;
        let mut last = 0;
        while let Some(row) = reader.next_row().map_err(io::Error::other)? {
            encoder.restore_row(&row);
            last = last.max(row.ts_ns);
        }
        self.journal.restore_reported_lost(&mut encoder);
        Ok((encoder, self.journal.run.start_ns.saturating_add_signed(last)))
    }

    /// Writes the rows of the journal's events, and the end row.
    fn encode(
        &self,
        encoder: &mut Encoder,
        sink: &mut FileRows<File>,
        fate: Option<Fate>,
    ) -> io::Result<Rest> {
        let mut last_ns = self.journal.run.start_ns;
        for (tid, event) in self.journal.events() {
            last_ns = last_ns.max(event.clock_ns);
            encoder.encode(tid, &event, sink)?;
        }
        let ending = if self.journal.is_stopped { Ending::Stopped } else { Ending::Killed };
        let mut words = self.journal.words.clone();
        if ending == Ending::Killed {
            words =
                format!("{words} {}", fate::words(&self.meta, self.journal.run.pid, fate)).trim().to_owned();
        }
        encoder.end(last_ns, self.journal.lost, ending, &words, sink)?;
        sink.writer.flush()?;
        Ok(Rest { whole: self.whole, rows: sink.rows, lost: encoder.reported_lost(), ending })
    }
}

/// Removes the files with unfinished names: incomplete compressed copies of parts that still exist, and a new
/// part whose opening rows are incomplete.
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

/// Returns the journal that an incomplete trace names, and its meta row. Returns `None` if the trace is
/// complete or names no journal.
fn journal_of(csv: &Path) -> io::Result<Option<(PathBuf, Meta)>> {
    let reader = RowReader::new(csv, open_trace(csv)?).map_err(io::Error::other)?;
    let journal = PathBuf::from(&reader.meta().journal);
    if journal.as_os_str().is_empty() || ends_with_end_row(csv)? {
        return Ok(None);
    }
    Ok(Some((journal, reader.meta().clone())))
}

/// Returns the length of the complete lines in the first `most` bytes of a file.
///
/// # Errors
/// Returns an error if the file cannot be read.
pub fn whole_lines(path: &Path, most: u64) -> io::Result<u64> {
    let mut file = open_trace(path)?;
    let end = file.metadata()?.len().min(most);
    let start = end.saturating_sub(1 << 20);
    file.seek(SeekFrom::Start(start))?;
    let mut tail = Vec::new();
    file.take(end - start).read_to_end(&mut tail)?;
    Ok(tail.iter().rposition(|byte| *byte == b'\n').map_or(0, |last| start + last as u64 + 1))
}

/// Returns the length of the header and the meta row of a trace that contains both.
fn meta_row_end(csv: &Path) -> io::Result<u64> {
    let mut lines = BufReader::new(open_trace(csv)?);
    let mut line = Vec::new();
    Ok((lines.read_until(b'\n', &mut line)? + lines.read_until(b'\n', &mut line)?) as u64)
}

/// Returns true if the last line of a trace is a complete `end` row.
pub(crate) fn ends_with_end_row(csv: &Path) -> io::Result<bool> {
    Ok(last_line(&mut open_trace(csv)?)?.is_some_and(|line| is_end_row(&line)))
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

/// Cuts the stacks file after its last complete line, and returns the number of stacks in it.
fn cut_stacks(csv: &Path) -> io::Result<usize> {
    let path = files::written_stacks(csv);
    let mut text = Vec::new();
    if open_trace(&path).and_then(|mut file| file.read_to_end(&mut text)).is_err() {
        return Ok(0);
    }
    let (count, whole) = stacks::complete(&text);
    private_file::reopen(&path, OpenOptions::new().write(true))?.set_len(whole as u64)?;
    Ok(count)
}

fn append_stacks(csv: &Path, encoder: &mut Encoder) -> io::Result<()> {
    let path = files::written_stacks(csv);
    let is_new = !path.exists();
    let mut writer = if is_new {
        StackWriter::new(private_file::create(&path)?)?
    } else {
        StackWriter::append(private_file::reopen(&path, OpenOptions::new().append(true))?)
    };
    let rows = write_stacks(&mut writer, encoder)?;
    if is_new && rows == 0 {
        fs::remove_file(&path)?;
    }
    Ok(())
}
