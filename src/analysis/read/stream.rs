//! A trace file as a stream of records: bounded memory, and a core for each block in flight.
//!
//! Blocks of whole lines are scanned on all cores; the calling thread visits their records in the order of
//! the file. No more than a few blocks are in flight.

use std::fs::File;
use std::io::{self, BufRead, Read, Seek, SeekFrom};
use std::ops::{ControlFlow, Range};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::meta::Meta;

use crate::error::Result;
use crate::read::ordered_pool::in_order;
use crate::read::record::{Record, Wanted};
use crate::read::scan::{Chunk, Scanner};
use crate::read::symbols::SymbolTable;

/// The bytes of one block: with its records it fits a core's cache, and handing it over costs little beside it.
const BLOCK: usize = 256 << 10;
/// How much is read behind a block for the end of its last line.
const TAIL: usize = 4 << 10;
/// A line longer than this is not a row of any trace.
const LONGEST_LINE: usize = 16 << 20;

/// One file of a trace, its header and meta row checked.
#[derive(Clone, Debug)]
pub struct TraceFile {
    /// Where it is.
    pub path: PathBuf,
    /// What its first row says.
    pub meta: Meta,
    /// Its size on disk, in bytes, with the parts that follow it.
    pub size: u64,
    /// The bytes on disk that were read so far, over all readings: for whoever shows progress.
    pub progress: Arc<AtomicU64>,
    /// How many columns its header has.
    width: usize,
    /// The parts that follow this one in a rotated trace.
    later: Vec<TraceFile>,
}

/// What reading a file told beside its records.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Lines that were not rows; only a lenient reading gets past the first.
    pub skipped: u64,
    /// The first of them, with file and line.
    pub first_skipped: Option<String>,
    /// The last byte of the file is not a line end: the writer was stopped within a line.
    pub cut: bool,
    /// The visitor broke off.
    stopped: bool,
}

impl TraceFile {
    /// Opens the trace at `path` and checks its header and meta row.
    ///
    /// # Errors
    /// When the file cannot be read or is not a trace of a schema that this version knows.
    pub fn open(path: &Path) -> Result<TraceFile> {
        let io = |source| memtrace_trace::Error::Io { path: path.to_owned(), source };
        let size = std::fs::metadata(path).map_err(io)?.len();
        let source: Box<dyn Read + Send> = match open(path).map_err(io)? {
            Source::Plain(file) => Box::new(file),
            Source::Packed(bytes, _) => bytes,
        };
        let mut blocks = Lines::new(source);
        // The header and the meta row, however long the latter is.
        let mut head = Vec::new();
        let mut block = Vec::new();
        while newlines(&head) < 2 && blocks.next(&mut block).map_err(io)? {
            head.extend_from_slice(&block);
        }
        let meta = memtrace_trace::csv::RowReader::new(path, head.as_slice())?.meta().clone();
        let width =
            head.split(|byte| *byte == b'\n').next().map_or(0, |line| line.split(|b| *b == b',').count());
        let (progress, later) = (Arc::default(), Vec::new());
        Ok(TraceFile { path: path.to_owned(), meta, size, progress, width, later })
    }

    /// How many columns its header has.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Takes `part` as the next one of this trace; gives it back when it is not.
    pub(crate) fn join(&mut self, mut part: TraceFile) -> Option<TraceFile> {
        let last = self.later.last().map_or(&self.meta, |part| &part.meta);
        if !same_process(last, &part.meta) || part.meta.part < 2 || part.meta.part != last.part + 1 {
            return Some(part);
        }
        part.progress = Arc::clone(&self.progress);
        self.size += part.size;
        self.later.push(part);
        None
    }

    /// The files of all parts.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        std::iter::once(self).chain(&self.later).map(|part| part.path.as_path())
    }

    /// The text of the last row when that is the `end` row, which only a process that came to its end leaves.
    #[must_use]
    pub fn ending(&self) -> Option<String> {
        let last = self.later.last().unwrap_or(self);
        let tail = last.tail().ok()?;
        let lines = tail.strip_suffix(b"\n")?;
        let start = lines.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        memtrace_trace::csv::end_text(&lines[start..])
    }

    /// The last bytes of the file, more than any end row has.
    fn tail(&self) -> io::Result<Vec<u8>> {
        const ENOUGH: usize = 64 << 10;
        let mut tail = Vec::new();
        match open(&self.path)? {
            Source::Plain(mut file) => {
                let size = file.metadata()?.len();
                file.seek(SeekFrom::Start(size.saturating_sub(ENOUGH as u64)))?;
                file.read_to_end(&mut tail)?;
            }
            Source::Packed(mut bytes, _) => {
                let mut part = vec![0; ENOUGH];
                loop {
                    let got = bytes.read(&mut part)?;
                    if got == 0 {
                        break;
                    }
                    tail.extend_from_slice(&part[..got]);
                    let extra = tail.len().saturating_sub(ENOUGH);
                    tail.drain(..extra);
                }
            }
        }
        Ok(tail)
    }

    /// Visits every row in the order of the file, the meta row first, with the `wanted` columns parsed,
    /// until the visitor breaks off. The rows that open a later part are left out: they only say again
    /// what was said before.
    ///
    /// # Errors
    /// The file's, and the first line that is not a row, unless `lenient`.
    pub fn read(
        &self,
        wanted: Wanted,
        lenient: bool,
        texts: &SymbolTable,
        mut visit: impl FnMut(&Record) -> ControlFlow<()>,
    ) -> Result<Told> {
        let mut told = self.read_part(wanted, lenient, texts, &mut visit)?;
        for part in &self.later {
            if told.stopped {
                break;
            }
            let mut again = part.meta.opening_rows.saturating_add(1);
            let more = part.read_part(wanted, lenient, texts, |record| {
                if again > 0 {
                    again -= 1;
                    return ControlFlow::Continue(());
                }
                visit(record)
            })?;
            told.stopped = more.stopped;
            told.skipped += more.skipped;
            told.cut |= more.cut;
            told.first_skipped = told.first_skipped.or(more.first_skipped);
        }
        Ok(told)
    }

    fn read_part(
        &self,
        wanted: Wanted,
        lenient: bool,
        texts: &SymbolTable,
        mut visit: impl FnMut(&Record) -> ControlFlow<()>,
    ) -> Result<Told> {
        let io = |source| memtrace_trace::Error::Io { path: self.path.clone(), source };
        let mut told = Told::default();
        let mut line = 1;
        let mut take = |job: &mut Job| -> Result<ControlFlow<()>> {
            if let Some(source) = job.error.take() {
                return Err(io(source).into());
            }
            self.progress.fetch_add(job.size, Ordering::Relaxed);
            let chunk = &mut job.chunk;
            for record in &chunk.records {
                if visit(record).is_break() {
                    told.stopped = true;
                    return Ok(ControlFlow::Break(()));
                }
            }
            told.skipped += chunk.skipped;
            told.cut |= job.cut;
            if let Some(fault) = chunk.fault.take() {
                let fault = memtrace_trace::Error::Row {
                    path: self.path.clone(),
                    line: line + fault.line,
                    what: fault.what,
                };
                if !lenient {
                    return Err(fault.into());
                }
                told.first_skipped.get_or_insert_with(|| fault.to_string());
            }
            line += chunk.lines;
            Ok(ControlFlow::Continue(()))
        };
        let mut blocks = Blocks::open(&self.path).map_err(io)?;
        let mut failed = false;
        let next = move |job: &mut Job| {
            // What was read before counts before the error does.
            let more = !failed && blocks.next(job).unwrap_or_else(|error| job.fail(error));
            failed = job.error.is_some();
            more
        };
        let worker = || {
            let mut scanner = Scanner::new(wanted, self.width, lenient, texts.clone());
            move |job: &mut Job| job.run(&mut scanner)
        };
        let take = |job: &mut Job| match take(job) {
            Ok(ControlFlow::Continue(())) => ControlFlow::Continue(()),
            Ok(ControlFlow::Break(())) => ControlFlow::Break(Ok(())),
            Err(error) => ControlFlow::Break(Err(error)),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        let threads = if self.size <= 4 * BLOCK as u64 { 1 } else { cores };
        if let ControlFlow::Break(result) = in_order(threads, next, worker, take) {
            result?;
        }
        Ok(told)
    }
}

/// Do two parts come from one process?
pub(crate) fn same_process(a: &Meta, b: &Meta) -> bool {
    let process = |meta: &Meta| (meta.start_unix_ns, meta.rank, meta.host.clone(), meta.journal.clone());
    process(a) == process(b)
}

/// The bytes of a file that may still grow, plain or compressed, with its header.
pub(crate) fn bytes(path: &Path) -> io::Result<Box<dyn Read + Send>> {
    Ok(match open(path)? {
        Source::Plain(file) => Box::new(file),
        Source::Packed(bytes, _) => bytes,
    })
}

/// The bytes of a trace.
enum Source {
    Plain(File),
    /// With the count of the bytes that were taken from the file.
    Packed(Box<dyn Read + Send>, Arc<AtomicU64>),
}

/// Counts what is read through it.
struct Counted {
    file: File,
    count: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.file.read(buffer)?;
        self.count.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    }
}

/// Opens a trace, plain or compressed: what its bytes start with tells which.
fn open(path: &Path) -> io::Result<Source> {
    let file = File::open(path)?;
    let mut magic = [0; 4];
    let mut got = 0;
    // A pipe has no places to read at; it can only be plain.
    while got < magic.len() {
        match file.read_at(&mut magic[got..], got as u64)? {
            0 => break,
            n => got += n,
        }
    }
    let zstd = magic == [0x28, 0xB5, 0x2F, 0xFD];
    if !zstd && !magic.starts_with(&[0x1F, 0x8B]) {
        return Ok(Source::Plain(file));
    }
    let count = Arc::new(AtomicU64::new(0));
    let source = io::BufReader::with_capacity(BLOCK, Counted { file, count: Arc::clone(&count) });
    let bytes: Box<dyn Read + Send> = if zstd {
        Box::new(Frames { source: Some(source), decoder: None })
    } else {
        Box::new(flate2::bufread::MultiGzDecoder::new(source))
    };
    Ok(Source::Packed(bytes, count))
}

/// A zstd file: one frame behind another.
struct Frames {
    source: Option<io::BufReader<Counted>>,
    decoder: Option<Decoder>,
}

type Decoder = ruzstd::decoding::StreamingDecoder<io::BufReader<Counted>, ruzstd::decoding::FrameDecoder>;

impl Read for Frames {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(decoder) = &mut self.decoder {
                let got = decoder.read(buffer)?;
                if got > 0 || buffer.is_empty() {
                    return Ok(got);
                }
            }
            // This frame is at its end; is there another?
            if let Some(decoder) = self.decoder.take() {
                self.source = Some(decoder.into_inner());
            }
            let Some(mut source) = self.source.take() else { return Ok(0) };
            if source.fill_buf()?.is_empty() {
                self.source = Some(source);
                return Ok(0);
            }
            self.decoder = Some(Decoder::new(source).map_err(io::Error::other)?);
        }
    }
}

/// A block on its way through a scanning thread and back.
#[derive(Default)]
struct Job {
    bytes: Vec<u8>,
    /// Where the bytes are when nobody has read them yet.
    place: Option<Place>,
    /// It begins with the header.
    header: bool,
    /// The last line of the file has no end.
    cut: bool,
    /// How much of the file it is, in bytes.
    size: u64,
    chunk: Chunk,
    error: Option<io::Error>,
}

/// A part of a plain file: the lines that begin in it.
#[derive(Clone)]
struct Place {
    file: Arc<File>,
    start: u64,
    end: u64,
    file_end: u64,
}

impl Job {
    /// Says that it could not be read.
    fn fail(&mut self, error: io::Error) -> bool {
        (self.error, self.place, self.header) = (Some(error), None, false);
        self.bytes.clear();
        true
    }

    fn run(&mut self, scanner: &mut Scanner) {
        self.chunk.records.clear();
        self.chunk.lines = 0;
        self.chunk.fault = None;
        self.chunk.skipped = 0;
        if let Some(place) = self.place.take() {
            match place.read(&mut self.bytes) {
                Ok(lines) => self.scan(scanner, lines),
                Err(error) => self.error = Some(error),
            }
        } else {
            self.scan(scanner, 0..self.bytes.len());
        }
    }

    fn scan(&mut self, scanner: &mut Scanner, lines: Range<usize>) {
        let mut lines = &self.bytes[lines];
        if self.header {
            let end = lines.iter().position(|byte| *byte == b'\n').map_or(lines.len(), |end| end + 1);
            lines = &lines[end..];
            self.chunk.lines = 1;
        }
        scanner.scan(lines, &mut self.chunk);
    }
}

impl Place {
    /// Fills `bytes` and gives the part of them that is the lines which begin in this place.
    fn read(&self, bytes: &mut Vec<u8>) -> io::Result<Range<usize>> {
        // From the byte before: a line begins here when that one is a line end.
        let from = self.start.saturating_sub(1);
        let own = (self.end - from) as usize;
        let mut filled: usize = 0;
        loop {
            // Twice as much behind the block each time, for a line that does not end.
            let behind = filled.saturating_sub(own) * 2 + TAIL;
            let wanted = ((self.file_end - from) as usize).min(own + behind);
            if bytes.len() < wanted {
                bytes.resize(wanted, 0);
            }
            while filled < wanted {
                match self.file.read_at(&mut bytes[filled..wanted], from + filled as u64) {
                    // The file has shrunk under us.
                    Ok(0) => return Ok(0..0),
                    Ok(got) => filled += got,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            let first = if self.start == 0 {
                Some(0)
            } else {
                bytes[..own.min(filled)].iter().position(|byte| *byte == b'\n').map(|end| end + 1)
            };
            // None of this place's bytes begins a line, or the last byte begins the next place's.
            let Some(first) = first.filter(|first| *first < own) else { return Ok(0..0) };
            if let Some(end) = bytes[own - 1..filled].iter().position(|byte| *byte == b'\n') {
                return Ok(first..own + end);
            }
            if from + filled as u64 == self.file_end {
                return Ok(first..filled);
            }
            if filled > own + LONGEST_LINE {
                return Err(too_long());
            }
        }
    }
}

/// The blocks of a trace file, in order.
enum Blocks {
    /// A plain file: whoever scans a block reads it, so that it is in that core's cache.
    Plain { file: Arc<File>, at: u64, size: u64, cut: bool },
    /// A compressed one: it can only be read from its start.
    Packed { lines: Lines<Box<dyn Read + Send>>, taken: Arc<AtomicU64>, told: u64 },
}

impl Blocks {
    fn open(path: &Path) -> io::Result<Blocks> {
        match open(path)? {
            Source::Plain(file) => {
                let size = file.metadata()?.len();
                let mut last = [b'\n'];
                file.read_at(&mut last, size.saturating_sub(1))?;
                Ok(Blocks::Plain { file: Arc::new(file), at: 0, size, cut: last[0] != b'\n' })
            }
            Source::Packed(bytes, taken) => Ok(Blocks::Packed { lines: Lines::new(bytes), taken, told: 0 }),
        }
    }

    /// Makes `job` the next one; false at the end.
    fn next(&mut self, job: &mut Job) -> io::Result<bool> {
        match self {
            Blocks::Plain { file, at, size, cut } => {
                if at == size {
                    return Ok(false);
                }
                let end = (*at + BLOCK as u64).min(*size);
                job.header = *at == 0;
                job.cut = *cut && end == *size;
                job.size = end - *at;
                job.place = Some(Place { file: Arc::clone(file), start: *at, end, file_end: *size });
                *at = end;
                Ok(true)
            }
            Blocks::Packed { lines, taken, told } => {
                job.header = !lines.started;
                let more = lines.next(&mut job.bytes)?;
                job.cut = lines.cut;
                let now = taken.load(Ordering::Relaxed);
                job.size = now - std::mem::replace(told, now);
                Ok(more)
            }
        }
    }
}

/// Blocks of whole lines out of a byte stream.
struct Lines<R> {
    source: R,
    /// The start of a line whose end was not read yet.
    rest: Vec<u8>,
    started: bool,
    ended: bool,
    cut: bool,
}

impl<R: Read> Lines<R> {
    fn new(source: R) -> Self {
        Lines { source, rest: Vec::new(), started: false, ended: false, cut: false }
    }

    /// Fills `block` with the next whole lines; false at the end.
    fn next(&mut self, block: &mut Vec<u8>) -> io::Result<bool> {
        self.started = true;
        block.clear();
        block.append(&mut self.rest);
        while !self.ended {
            let old = block.len();
            let got = self.source.by_ref().take(BLOCK as u64).read_to_end(block)?;
            if got == 0 {
                self.ended = true;
                self.cut = block.last().is_some_and(|byte| *byte != b'\n');
                break;
            }
            if let Some(last) = block[old..].iter().rposition(|byte| *byte == b'\n') {
                self.rest.extend_from_slice(&block[old + last + 1..]);
                block.truncate(old + last + 1);
                break;
            }
            if block.len() > LONGEST_LINE {
                return Err(too_long());
            }
        }
        Ok(!block.is_empty())
    }
}

fn too_long() -> io::Error {
    let what = format!("a line of more than {} MiB: not a trace", LONGEST_LINE >> 20);
    io::Error::new(io::ErrorKind::InvalidData, what)
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').take(2).count()
}
