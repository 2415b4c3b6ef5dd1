//! Reads a trace file as a stream of records.
//!
//! Blocks of whole lines are scanned on all cores, and the calling thread visits their records in the order
//! of the file. Only a few blocks are in flight at a time, so memory is bounded.

use std::io::Read;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use memtrace_trace::EventName;
use memtrace_trace::csv;
use memtrace_trace::end_row;
use memtrace_trace::meta::Meta;

use crate::error::Result;
use crate::read::blocks::{BLOCK, BlockJob, Blocks, Lines};
use crate::read::ordered_pool::in_order;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::removed_parts::{self, LivePieces, OpeningRows};
use crate::read::scan::{Fault, MOST_FAULTS, Scanner};
use crate::read::snapshot;
use crate::read::source::{self, Source};
use crate::read::symbols::{Symbol, SymbolTable};

/// The advice in the error message for the first line that is not a row.
const LENIENT: &str = "; --lenient skips and counts such lines";
/// The advice in the error message for a file that cannot be read to its end.
const LENIENT_END: &str = "; --lenient reads the rows before it";

/// A trace file whose header and meta row were checked. For a rotated trace, it includes the later parts.
#[derive(Clone, Debug)]
pub struct TraceFile {
    /// The path of the file.
    pub path: PathBuf,
    /// The meta row.
    pub meta: Meta,
    /// The process id in the meta row; 0 if the trace was made without one.
    pub(crate) pid: i32,
    /// The size on disk in bytes, later parts included.
    pub size: u64,
    /// The bytes on disk read so far, over all readings, for a progress bar.
    pub progress: Arc<AtomicU64>,
    /// The number of columns in the file's header.
    width: usize,
    /// The later parts of a rotated trace, in order.
    later: Vec<TraceFile>,
    /// The maximum number of bytes of the file that are read. See [`TraceFile::continue_with`].
    limit: u64,
    /// The text of the `end` row of this file, once a reading has found it.
    ending: Arc<OnceLock<String>>,
}

/// The result of a reading, without the records.
#[derive(Clone, Debug, Default)]
pub struct ReadSummary {
    /// The number of lines that are not rows. Only a lenient reading continues after the first such line.
    pub skipped: u64,
    /// Descriptions of the first few skipped lines, each with its file and line number.
    pub skipped_lines: Vec<String>,
    /// The read errors at which a lenient reading left a file, with its path: a truncated or damaged compressed
    /// file, for example. The rows after the error are missing.
    pub read_errors: Vec<String>,
    /// True if the last line is unterminated, because the writer was killed while it wrote the line.
    pub cut: bool,
    /// True if a file became shorter while it was read, so that its last rows may be missing.
    pub shortened: bool,
    /// Each gap in the sequence of parts, as the numbers of the first and the last missing part. A part may
    /// be read alone, so parts missing at the start or at the end are not reported.
    pub removed: Vec<(u32, u32)>,
    /// The problems with the opening rows of the later parts, one line each.
    pub wrong_openings: Vec<String>,
    /// True if the visitor ended the reading.
    stopped: bool,
}

impl ReadSummary {
    /// Adds descriptions of skipped lines, up to [`MOST_FAULTS`] in total.
    fn keep(&mut self, lines: impl IntoIterator<Item = String>) {
        let room = MOST_FAULTS.saturating_sub(self.skipped_lines.len());
        self.skipped_lines.extend(lines.into_iter().take(room));
    }
}

impl TraceFile {
    /// Returns the process id, or `-` if the file does not have it.
    #[must_use]
    pub fn pid(&self) -> String {
        if self.pid > 0 { self.pid.to_string() } else { "-".to_owned() }
    }

    /// Opens the trace at `path` and checks its header and meta row.
    ///
    /// # Errors
    /// When the file cannot be read or is not a trace of a schema that this version knows.
    pub fn open(path: &Path) -> Result<TraceFile> {
        let io = |source| memtrace_trace::Error::Io { path: path.to_owned(), source };
        let (source, path) = source::open(path).map_err(io)?;
        let (source, size): (Box<dyn Read + Send>, _) = match source {
            Source::Plain(file) => {
                let size = file.metadata().map_err(io)?.len();
                (Box::new(file), size)
            }
            // If the compressed file was removed meanwhile, its size is shown as 0.
            Source::Packed(bytes, _) => (bytes, std::fs::metadata(&path).map_or(0, |about| about.len())),
        };
        let mut blocks = Lines::new(source);
        // Read the header and the meta row, which may be of any length.
        let mut head = Vec::new();
        let mut block = Vec::new();
        while newlines(&head) < 2 && blocks.next(&mut block).map_err(io)? {
            head.extend_from_slice(&block);
        }
        let mut reader = memtrace_trace::csv::RowReader::new(&path, head.as_slice())?;
        let meta = reader.meta().clone();
        // The first row is the meta row.
        let pid = reader.next_row()?.map_or(0, |row| row.pid);
        let width =
            head.split(|byte| *byte == b'\n').next().map_or(0, |line| line.split(|b| *b == b',').count());
        let (progress, later) = (Arc::default(), Vec::new());
        Ok(TraceFile {
            path,
            meta,
            pid,
            size,
            progress,
            width,
            later,
            limit: u64::MAX,
            ending: Arc::default(),
        })
    }

    /// Returns the number of columns in the file's header. An older trace may lack the last columns.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Adds `part` if it is a later part of this trace, and otherwise returns it. Parts in between may have
    /// been removed.
    pub(crate) fn join(&mut self, mut part: TraceFile) -> Option<TraceFile> {
        let last = self.later.last().map_or(&self.meta, |part| &part.meta);
        if !same_process(last, &part.meta) || part.meta.part < 2 || part.meta.part <= last.part {
            return Some(part);
        }
        part.progress = Arc::clone(&self.progress);
        self.size += part.size;
        self.later.push(part);
        None
    }

    /// Continues the trace with `part` after the first `whole` bytes of its file `at`. `part` replaces the
    /// parts after `at`. Returns false if `part` belongs to another trace, or `at` is not a file of this
    /// trace.
    pub fn continue_with(&mut self, at: &Path, whole: u64, part: TraceFile) -> bool {
        let Some(index) = self.files().position(|file| file == at) else { return false };
        self.later.truncate(index);
        let last = if index == 0 { &mut *self } else { &mut self.later[index - 1] };
        last.limit = whole;
        self.join(part).is_none()
    }

    /// Returns all parts in order. A trace that was not rotated has one part: itself.
    pub fn parts(&self) -> impl Iterator<Item = &TraceFile> {
        std::iter::once(self).chain(&self.later)
    }

    /// Returns the paths of all parts.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.parts().map(|part| part.path.as_path())
    }

    /// Returns the text of the `end` row if that is the last row. A killed process leaves no `end` row.
    #[must_use]
    pub fn ending(&self) -> Option<String> {
        let last = self.later.last().unwrap_or(self);
        if let Some(known) = last.ending.get() {
            return Some(known.clone());
        }
        // The rows of a snapshot would have to be made again.
        if let Some(known) = snapshot::ending(&last.path) {
            return Some(known);
        }
        let line = match source::open(&last.path).ok()?.0 {
            Source::Plain(mut file) => csv::last_line(&mut file),
            Source::Packed(bytes, _) => csv::last_line_of_stream(bytes),
        };
        let text = csv::end_text(&line.ok()??)?;
        Some(last.ending.get_or_init(|| text).clone())
    }

    /// Returns the bytes that the fullest GPU needed, if the run used `--past-oom` and its process was not
    /// killed.
    #[must_use]
    pub fn needed_bytes(&self) -> Option<i64> {
        end_row::needed_bytes(&self.ending()?)
    }

    /// Visits every row in the order of the file, the meta row first, with the `wanted` columns parsed, until
    /// `visit` breaks.
    ///
    /// The opening rows of a later part are skipped, because they repeat the part before. After removed
    /// parts, the part's meta row is visited, followed by a row for each change of live memory
    /// ([`removed_parts`]). If the recorder removes a later part before it is read (`MEMTRACE_KEEP`), the
    /// reading continues with the next part. The end row of a part is written after the next part has begun,
    /// so it may be missing if the process was killed; the reader then visits an end row that it makes
    /// itself.
    ///
    /// The live memory of the phase `forward` at the end of a trace, by the sum rule of the trace format:
    ///
    /// ```
    /// use std::ops::ControlFlow;
    ///
    /// use memtrace_analysis::read::input::Input;
    /// use memtrace_analysis::read::record::{Columns, Wanted};
    /// use memtrace_analysis::read::symbols::SymbolTable;
    /// use memtrace_trace::EventName;
    ///
    /// # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt");
    /// let trace = &Input::open(&folder)?.traces[0];
    /// let columns = Wanted::all_events(Columns::of(&["event", "phase", "delta_bytes"]));
    /// let symbols = SymbolTable::default();
    /// let forward = symbols.intern("forward");
    /// let mut live = 0;
    /// trace.read(columns, false, &symbols, |row| {
    ///     let is_block =
    ///         matches!(row.event, EventName::Alloc | EventName::Free | EventName::Tag | EventName::Live);
    ///     if is_block && row.phase == forward {
    ///         live += row.delta_bytes;
    ///     }
    ///     ControlFlow::Continue(())
    /// })?;
    /// assert_eq!(live, 34_603_008);
    /// # Ok::<(), memtrace_analysis::Error>(())
    /// ```
    ///
    /// # Errors
    /// When the file cannot be read, and at the first line that is not a row, unless `lenient`.
    pub fn read(
        &self,
        wanted: Wanted,
        lenient: bool,
        symbols: &SymbolTable,
        mut visit: impl FnMut(&Record) -> ControlFlow<()>,
    ) -> Result<ReadSummary> {
        self.read_slices(wanted, lenient, symbols, &mut |rows| rows.iter().try_for_each(&mut visit))
    }

    /// Same as [`TraceFile::read`], but `visit` gets many rows at once. `visit` is not generic, so this function is
    /// compiled once, not for each caller: copies of it would be a quarter of this crate's code.
    ///
    /// # Errors
    /// As for [`TraceFile::read`].
    pub(crate) fn read_slices(
        &self,
        wanted: Wanted,
        lenient: bool,
        symbols: &SymbolTable,
        visit: &mut dyn FnMut(&[Record]) -> ControlFlow<()>,
    ) -> Result<ReadSummary> {
        let keeps = !self.meta.keep.is_empty();
        let may_jump = (keeps && !self.later.is_empty())
            || self.parts().zip(&self.later).any(|(part, next)| !follows(part.number(), next));
        let wanted = if may_jump { removed_parts::with_pieces(wanted) } else { wanted };
        let wanted = wanted.plus(EventName::End, Columns::of(&["name"]));
        let mut pieces = may_jump.then(|| LivePieces::new(symbols));
        let mut end = Record { event: EventName::End, seq: 1, ..Record::default() };
        let mut after_end = false;
        let mut visit = |rows: &[Record], begins_part: bool, pieces: &mut Option<LivePieces>| {
            let (Some(first), Some(last)) = (rows.first(), rows.last()) else {
                return ControlFlow::Continue(());
            };
            if let Some(pieces) = pieces {
                rows.iter().for_each(|row| pieces.feed(row));
            }
            if begins_part && !after_end && end.seq.checked_add(1) == Some(first.seq) {
                visit(std::slice::from_ref(&end))?;
            }
            after_end = last.event == EventName::End;
            (end.seq, end.ts_ns) = (last.seq.saturating_add(1), last.ts_ns);
            visit(rows)
        };
        let mut summary =
            self.read_part(wanted, lenient, symbols, &mut |rows| visit(rows, false, &mut pieces))?;
        let mut before = self.number();
        let mut gone = Vec::new();
        for part in &self.later {
            if summary.stopped {
                break;
            }
            let is_next = follows(before, part);
            let mut opening = OpeningRows::new(part.meta.opening_rows, !is_next);
            let mut begins_part = is_next;
            let more = part.read_part(wanted, lenient, symbols, &mut |mut rows| {
                while !opening.is_read()
                    && let Some((row, after)) = rows.split_first()
                {
                    rows = after;
                    if let Some(opening) = opening.add(row) {
                        let changes = pieces.as_ref().map(|pieces| pieces.changes(&opening));
                        visit(&changes.unwrap_or_default(), false, &mut pieces)?;
                    }
                }
                let begins_part = !rows.is_empty() && std::mem::take(&mut begins_part);
                visit(rows, begins_part, &mut pieces)
            });
            let more = match more {
                Err(error) if keeps && error.is_no_file() => {
                    gone.push(part.number());
                    continue;
                }
                more => more?,
            };
            before = part.number();
            summary.stopped = more.stopped;
            summary.skipped += more.skipped;
            summary.read_errors.extend(more.read_errors);
            summary.cut |= more.cut;
            summary.shortened |= more.shortened;
            summary.keep(more.skipped_lines);
            summary.wrong_openings.extend(opening.problem(&part.path));
        }
        let there: Vec<u32> =
            self.parts().map(TraceFile::number).filter(|part| !gone.contains(part)).collect();
        let gaps = there.windows(2).filter(|pair| pair[1] > pair[0] + 1);
        summary.removed = gaps.map(|pair| (pair[0] + 1, pair[1] - 1)).collect();
        Ok(summary)
    }

    /// Returns the number of the part, from 1.
    fn number(&self) -> u32 {
        self.meta.part.max(1)
    }

    fn read_part(
        &self,
        wanted: Wanted,
        lenient: bool,
        symbols: &SymbolTable,
        visit: &mut dyn FnMut(&[Record]) -> ControlFlow<()>,
    ) -> Result<ReadSummary> {
        let io = |source| memtrace_trace::Error::Io { path: self.path.clone(), source };
        let mut summary = ReadSummary::default();
        let mut line = 1;
        let mut last = None;
        let mut take = |job: &mut BlockJob| -> Result<ControlFlow<()>> {
            match job.error.take() {
                Some(source) if lenient => {
                    summary.read_errors.push(io(source).to_string());
                    return Ok(ControlFlow::Break(()));
                }
                Some(source) => {
                    let what = format!("{source}{LENIENT_END}");
                    return Err(io(std::io::Error::new(source.kind(), what)).into());
                }
                None => {}
            }
            self.progress.fetch_add(job.size, Ordering::Relaxed);
            let chunk = &mut job.chunk;
            let place = |fault: Fault, advice: &str| memtrace_trace::Error::Row {
                path: self.path.clone(),
                line: line + fault.line,
                what: format!("{}{advice}", fault.what),
            };
            if visit(&chunk.records).is_break() {
                summary.stopped = true;
                return Ok(ControlFlow::Break(()));
            }
            last = chunk.records.last().map(|record| (record.event, record.name)).or(last);
            summary.skipped += chunk.skipped;
            summary.cut |= job.cut;
            summary.shortened |= job.shortened;
            let mut faults = chunk.faults.drain(..);
            if !lenient && let Some(fault) = faults.next() {
                return Err(place(fault, LENIENT).into());
            }
            summary.keep(faults.map(|fault| place(fault, "").to_string()));
            line += chunk.lines;
            Ok(ControlFlow::Continue(()))
        };
        // The recorder may still be writing the last lines of this part, even if the next part exists.
        let may_grow = !self.meta.keep.is_empty();
        let mut blocks = Blocks::open(&self.path, self.limit, may_grow).map_err(io)?;
        let mut failed = false;
        let next = move |job: &mut BlockJob| {
            // Deliver a read error as a separate job, so that the rows before the error are visited first.
            let more = !failed && blocks.next(job).unwrap_or_else(|error| job.fail(error));
            failed = job.error.is_some();
            more
        };
        let worker = || {
            let mut scanner = Scanner::new(wanted, self.width, lenient, symbols.clone());
            move |job: &mut BlockJob| job.run(&mut scanner)
        };
        let take = |job: &mut BlockJob| match take(job) {
            Ok(ControlFlow::Continue(())) => ControlFlow::Continue(()),
            Ok(ControlFlow::Break(())) => ControlFlow::Break(Ok(())),
            Err(error) => ControlFlow::Break(Err(error)),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let threads = if self.size <= 4 * BLOCK as u64 { 1 } else { cores };
        if let ControlFlow::Break(result) = in_order(threads, next, worker, take) {
            result?;
        }
        let is_damaged = summary.skipped > 0 || !summary.read_errors.is_empty();
        let is_whole = !(summary.stopped || summary.cut || summary.shortened || is_damaged);
        if let Some((EventName::End, text)) = last.filter(|(_, text)| is_whole && *text != Symbol::REST) {
            self.ending.get_or_init(|| symbols.get(text).to_string());
        }
        Ok(summary)
    }
}

/// Returns true if no part was removed between part number `part` and `next`.
fn follows(part: u32, next: &TraceFile) -> bool {
    part.checked_add(1) == Some(next.meta.part)
}

/// Returns true if two parts belong to one process.
pub(crate) fn same_process(a: &Meta, b: &Meta) -> bool {
    process_key(a) == process_key(b)
}

/// The values that identify a process: its start time, rank, host and journal.
pub(crate) type ProcessKey = (i64, i32, String, String);

/// Returns the key of the process that wrote a meta row.
pub(crate) fn process_key(meta: &Meta) -> ProcessKey {
    (meta.start_unix_ns, meta.rank, meta.host.clone(), meta.journal.clone())
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').take(2).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn a_reading_keeps_the_text_of_the_end_row() {
        let path = std::env::temp_dir().join(format!("memtrace-ending-{}.csv", std::process::id()));
        let read = |bytes: Vec<u8>| {
            std::fs::write(&path, bytes).unwrap();
            let trace = TraceFile::open(&path).unwrap();
            let wanted = Wanted::all_events(Columns::of(&[]));
            trace.read(wanted, true, &SymbolTable::default(), |_| ControlFlow::Continue(())).unwrap();
            (trace.ending.get().cloned(), trace.ending())
        };
        let mut trace = TraceBuilder::default();
        let name = "exit steps=2 x=\"a, b\"";
        trace.raw(memtrace_trace::Row { event: EventName::End, name, ..memtrace_trace::Row::default() });
        let whole = trace.unfinished();
        let cut = whole[..whole.len() - 1].to_vec();
        let damaged = [&whole[..], b"no row\n"].concat();
        let (whole, others) = (read(whole), [cut, damaged].map(read));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(whole, (Some(name.to_owned()), Some(name.to_owned())));
        assert_eq!(others, [(None, None), (None, None)]);
    }
}
