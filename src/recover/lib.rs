//! What a killed process left behind: its journal, read as the tail of its trace.
//!
//! The journal's last checkpoint says how much of the trace is whole and which events are in it; the
//! rest is encoded by the same [`Encoder`] that the process used, continued from the trace's rows. Only
//! bytes are read here: a journal may be cut off, or not one at all.

#![forbid(unsafe_code)]

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use memtrace_encode::Encoder;
use memtrace_encode::RowSink;
use memtrace_encode::stacks::write_stacks;
use memtrace_trace::csv::{RowReader, RowWriter, is_end_row};
use memtrace_trace::end_row::Ending;
use memtrace_trace::event::bytes::{event_of, text_slots};
use memtrace_trace::files;
use memtrace_trace::journal::{CHUNK_BYTES, MAGIC, Run, SLOTS, layout, names_path, process_start};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::stacks::{self, StackWriter};
use memtrace_trace::{Event, Row};
use rustix::process::{Flock, FlockType, fcntl_getlk};

#[doc(hidden)]
pub mod testing;

const SLOT: usize = size_of::<Event>();

/// What [`repair`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repaired {
    /// The trace is complete: there was nothing to do.
    Complete,
    /// The process that writes it is still there.
    Running,
    /// The trace ends early and nothing else is left of the process (its host was restarted, say).
    NoJournal,
    /// The trace was finished.
    Finished {
        /// Rows that the journal gave.
        rows: u64,
        /// Bytes at the end of the file that were cut off: rows that were not whole, or that the
        /// journal has too.
        cut: u64,
    },
}

/// A journal, read.
struct Journal {
    run: Run,
    csv_len: u64,
    names_len: u64,
    /// The part of the trace that they belong to.
    part: u64,
    /// Events that the trace does not have, by lane: each with its thread, in order.
    lanes: Vec<Vec<(u32, Event)>>,
    /// Definitions in chunks, each with the slots behind it.
    definitions: Vec<(Event, Vec<u8>)>,
}

/// Does another process hold the lock of this journal? Containers may share `/dev/shm` and have process ids of
/// their own, so that an id says nothing. This process must not ask of its own journal: closing any descriptor
/// of a file gives its locks back.
fn is_locked(journal: &File) -> bool {
    matches!(fcntl_getlk(journal, &Flock::from(FlockType::WriteLock)), Ok(Some(_)))
}

/// Makes a file that only its owner reads, and never through a link.
fn create_private(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

/// Is the process that writes the trace of this journal still there? It has a lock on it, which tells of processes
/// of other containers too, and an id, which tells of those that closed every file.
fn is_running(journal: &File, run: &Run) -> bool {
    is_locked(journal) || process_start(run.pid).is_some_and(|start| start == run.process_start)
}

/// Finishes the trace at `csv` from what its process left behind, and removes the journal.
///
/// # Errors
/// When the trace cannot be read or written; the journal stays then.
pub fn repair(csv: &Path) -> io::Result<Repaired> {
    let Some((journal_path, part)) = journal_of(csv)? else { return Ok(Repaired::Complete) };
    let mut left = match File::open(&journal_path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Repaired::NoJournal),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::new();
    left.read_to_end(&mut bytes)?;
    let journal = Journal::read(&bytes)
        .ok_or_else(|| io::Error::other(format!("{}: not a journal", journal_path.display())))?;
    if is_running(&left, &journal.run) {
        return Ok(Repaired::Running);
    }
    if journal.part != part {
        // Killed while it went from one part to the next: the other part is the one to finish.
        return Ok(Repaired::Complete);
    }
    let whole = fs::metadata(csv)?.len();
    // 0: killed before the first checkpoint, which comes after the meta row. And a trace on a disk that lost
    // its power may be shorter than it was.
    let csv_len = whole_lines(csv, if journal.csv_len == 0 { whole } else { journal.csv_len })?;
    // The trace first, and the journal only when it is on the disk.
    let mut file = OpenOptions::new().read(true).write(true).open(csv)?;
    let mut encoder = journal.encoder();
    journal.define(&names_path(&journal_path), &mut encoder);
    encoder.stacks_are_told(last_stack(csv)?);
    let prefix = File::open(csv)?.take(csv_len);
    let mut reader = RowReader::new(csv, prefix).map_err(io::Error::other)?;
    while let Some(row) = reader.next_row().map_err(io::Error::other)? {
        encoder.restore_row(&row);
    }
    file.set_len(csv_len)?;
    file.seek(SeekFrom::End(0))?;
    let mut sink = Tail { writer: RowWriter::without_header(file), rows: 0 };
    let mut last_ns = journal.run.start_ns;
    for (tid, event) in journal.events() {
        last_ns = last_ns.max(event.clock_ns);
        encoder.encode(tid, &event, &mut sink)?;
    }
    encoder.end(last_ns, 0, Ending::Killed, "", &mut sink)?;
    sink.writer.flush()?;
    sink.writer.get_ref().sync_all()?;
    append_stacks(csv, &mut encoder)?;
    // A next part that was being opened has nothing of its own.
    let next = files::part(csv, part + 1);
    if journal_of(&next).is_ok_and(|found| found == Some((journal_path.clone(), part + 1))) {
        fs::remove_file(next)?;
    }
    remove_unfinished(csv);
    let _ = fs::remove_file(names_path(&journal_path));
    fs::remove_file(&journal_path)?;
    Ok(Repaired::Finished { rows: sink.rows, cut: whole.saturating_sub(csv_len) })
}

/// Removes journals beside `own` that nobody can want: of processes that are gone and whose traces were
/// deleted. The others wait for `memtrace check --repair`.
pub fn sweep(own: &Path) {
    let Some(folder) = own.parent() else { return };
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("memtrace-")
            && name.ends_with(".journal")
            && entry.path() != own
            && is_orphan(&entry.path()).unwrap_or(false)
        {
            let _ = fs::remove_file(names_path(&entry.path()));
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn is_orphan(journal: &Path) -> Option<bool> {
    use std::os::unix::ffi::OsStrExt;
    let mut header = Vec::new();
    // Another user's cannot be opened.
    let file = File::open(journal).ok()?;
    (&file).take(CHUNK_BYTES as u64).read_to_end(&mut header).ok()?;
    if !header.starts_with(&MAGIC) || is_running(&file, &run_of(&header)) {
        return None;
    }
    let length = word(&header, layout::TRACE_LEN) as usize;
    let path = header.get(layout::TRACE..layout::TRACE + length).filter(|path| !path.is_empty())?;
    let first = Path::new(std::ffi::OsStr::from_bytes(path));
    // It may be compressed by now, or deleted while later parts stay.
    let (folder, stem) = (first.parent()?, first.file_stem()?.as_bytes());
    let Ok(entries) = fs::read_dir(folder) else { return Some(!first.exists()) };
    let of_trace = |name: &[u8]| name.strip_prefix(stem).is_some_and(|rest| rest.first() == Some(&b'.'));
    Some(!entries.flatten().any(|entry| of_trace(entry.file_name().as_bytes())))
}

/// Removes what the process was compressing when it was killed: the part itself is still there.
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

/// The journal of a trace that has no end, and the trace's part; `None` when it is complete.
fn journal_of(csv: &Path) -> io::Result<Option<(PathBuf, u64)>> {
    let reader = RowReader::open(csv).map_err(io::Error::other)?;
    let journal = PathBuf::from(&reader.meta().journal);
    if journal.as_os_str().is_empty() || ends_with_end_row(csv)? {
        return Ok(None);
    }
    Ok(Some((journal, u64::from(reader.meta().part.max(1)))))
}

/// The length of the whole lines in the first `most` bytes of the file.
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

/// Is the last line of the file whole, and an `end` row?
fn ends_with_end_row(csv: &Path) -> io::Result<bool> {
    let mut file = File::open(csv)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(4096)))?;
    let mut tail = Vec::new();
    file.read_to_end(&mut tail)?;
    let Some(b'\n') = tail.pop() else { return Ok(false) };
    let last = tail.rsplit(|byte| *byte == b'\n').next().unwrap_or_default();
    Ok(is_end_row(last))
}

/// Rows behind those that are there.
struct Tail {
    writer: RowWriter<File>,
    rows: u64,
}

impl RowSink for Tail {
    type Error = io::Error;
    fn row(&mut self, row: &Row<'_>) -> io::Result<()> {
        self.rows += 1;
        self.writer.write(row)
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).map_or(0, |word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |half| u32::from_le_bytes(half.try_into().unwrap_or_default()))
}

fn run_of(header: &[u8]) -> Run {
    Run {
        pid: half(header, layout::PID),
        rank: half(header, layout::RANK),
        start_ns: word(header, layout::START_NS),
        process_start: word(header, layout::PROCESS_START),
        power2_divisions: word(header, layout::POWER2_DIVISIONS),
        rules: word(header, layout::RULES),
    }
}

impl Journal {
    fn read(bytes: &[u8]) -> Option<Journal> {
        if !bytes.starts_with(&MAGIC) {
            return None;
        }
        let place = (word(bytes, layout::CHECKPOINTS) & 1) as usize;
        let mut journal = Journal {
            run: run_of(bytes),
            csv_len: word(bytes, layout::CSV_LEN + 8 * place),
            names_len: word(bytes, layout::NAMES_LEN + 8 * place),
            part: word(bytes, layout::PART + 8 * place).max(1),
            lanes: Vec::new(),
            definitions: Vec::new(),
        };
        let mut chunks: Vec<&[u8]> = bytes
            .chunks_exact(CHUNK_BYTES)
            .skip(1)
            .take(usize::try_from(word(bytes, layout::CHUNKS)).unwrap_or(0))
            .filter(|chunk| half(chunk, layout::IN_USE) == 1)
            .collect();
        chunks.sort_by_key(|chunk| (half(chunk, layout::LANE), half(chunk, layout::INDEX)));
        let mut lane = None;
        for chunk in chunks {
            if lane.replace(half(chunk, layout::LANE)) != Some(half(chunk, layout::LANE)) {
                journal.lanes.push(Vec::new());
            }
            journal.read_chunk(chunk, place);
        }
        Some(journal)
    }

    fn read_chunk(&mut self, chunk: &[u8], place: usize) {
        let tid = half(chunk, layout::TID);
        let committed = (half(chunk, layout::COMMITTED) as usize).min(SLOTS);
        let consumed = half(chunk, layout::CONSUMED + 4 * place) as usize;
        let slots = &chunk[SLOT..];
        let mut index = 0;
        while index < committed {
            let event = event_of(&slots[index * SLOT..(index + 1) * SLOT]);
            let behind = text_slots(&event).min(committed - index - 1);
            if event.is_definition() {
                let text = &slots[(index + 1) * SLOT..(index + 1 + behind) * SLOT];
                self.definitions.push((event, text.to_vec()));
            } else if index >= consumed
                && !event.is_empty()
                && let Some(lane) = self.lanes.last_mut()
            {
                lane.push((tid, event));
            }
            index += 1 + behind;
        }
    }

    fn encoder(&self) -> Encoder {
        let Run { pid, rank, start_ns, power2_divisions, rules, .. } = self.run;
        let rounding = Rounding { caching: rules & 1 != 0, power2_divisions };
        Encoder::new(start_ns, rank as i32, pid, rounding, rules & 2 != 0)
    }

    /// The definitions of chunks that were filled again since, then those of the chunks.
    fn define(&self, names: &Path, encoder: &mut Encoder) {
        let written = fs::read(names).unwrap_or_default();
        let whole = written.len().min(self.names_len as usize) / SLOT * SLOT;
        let mut at = 0;
        while at < whole {
            let event = event_of(&written[at..at + SLOT]);
            let end = (at + SLOT + text_slots(&event).saturating_mul(SLOT)).min(whole);
            encoder.define(&event, &written[at + SLOT..end]);
            at = end;
        }
        for (event, text) in &self.definitions {
            encoder.define(event, text);
        }
    }

    /// The events in the order of their clocks; those of a lane stay in theirs.
    fn events(&self) -> Vec<(u32, Event)> {
        let mut events = Vec::new();
        for lane in &self.lanes {
            let mut last = 0;
            for (tid, event) in lane {
                last = event.clock_ns.max(last);
                let mut event = *event;
                event.clock_ns = last;
                events.push((*tid, event));
            }
        }
        events.sort_by_key(|(_, event)| event.clock_ns);
        events
    }
}

/// How many stacks the file beside the trace has; what is behind its last whole line is cut off.
fn last_stack(csv: &Path) -> io::Result<usize> {
    let path = files::stacks(csv);
    let Ok(text) = fs::read(&path) else { return Ok(0) };
    let (count, whole) = stacks::complete(&text);
    OpenOptions::new().write(true).open(&path)?.set_len(whole as u64)?;
    Ok(count)
}

fn append_stacks(csv: &Path, encoder: &mut Encoder) -> io::Result<()> {
    let path = files::stacks(csv);
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
