//! A trace file as a stream of records: bounded memory, and a core for each block in flight.
//!
//! The calling thread reads blocks of whole lines and hands them to scanning threads; it takes the
//! records back in the order of the file and visits them. No more than a few blocks are in flight.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufRead, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, PoisonError};

use memtrace_trace::meta::Meta;

use crate::error::Result;
use crate::record::{Columns, Record};
use crate::scan::{Chunk, Scanner};
use crate::texts::Texts;

/// The bytes of one block; with its records it fits a core's cache.
const BLOCK: usize = 1 << 20;
/// A line longer than this is not a row of any trace.
const LONGEST_LINE: usize = 16 << 20;

/// One file of a trace, its header and meta row checked.
#[derive(Clone, Debug)]
pub struct TraceFile {
    /// Where it is.
    pub path: PathBuf,
    /// What its first row says.
    pub meta: Meta,
    /// Its size on disk, in bytes.
    pub size: u64,
    /// How many columns its header has.
    width: usize,
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
}

impl TraceFile {
    /// Opens the trace at `path` and checks its header and meta row.
    ///
    /// # Errors
    /// When the file cannot be read or is not a trace of a schema that this version knows.
    pub fn open(path: &Path) -> Result<TraceFile> {
        let io = |source| memtrace_trace::Error::Io { path: path.to_owned(), source };
        let size = std::fs::metadata(path).map_err(io)?.len();
        let mut blocks = Blocks::new(open(path).map_err(io)?);
        // The header and the meta row, however long the latter is.
        let mut head = Vec::new();
        let mut block = Vec::new();
        while newlines(&head) < 2 && blocks.next(&mut block).map_err(io)? {
            head.extend_from_slice(&block);
        }
        let meta = memtrace_trace::reader::Reader::new(path, head.as_slice())?.meta().clone();
        let width =
            head.split(|byte| *byte == b'\n').next().map_or(0, |line| line.split(|b| *b == b',').count());
        Ok(TraceFile { path: path.to_owned(), meta, size, width })
    }

    /// Visits every row in the order of the file, the meta row first, with `columns` parsed, until the
    /// visitor breaks off.
    ///
    /// # Errors
    /// The file's, and the first line that is not a row, unless `lenient`.
    pub fn read(
        &self,
        columns: Columns,
        lenient: bool,
        texts: &Texts,
        mut visit: impl FnMut(&Record) -> ControlFlow<()>,
    ) -> Result<Told> {
        let io = |source| memtrace_trace::Error::Io { path: self.path.clone(), source };
        let mut blocks = Blocks::new(open(&self.path).map_err(io)?);
        let mut told = Told::default();
        let mut line = 1;
        let mut header = true;
        let mut take = |chunk: &mut Chunk| -> Result<ControlFlow<()>> {
            for record in &chunk.records {
                if visit(record).is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            told.skipped += chunk.skipped;
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
        let scanner = || Scanner::new(columns, self.width, lenient, texts.clone());
        let workers = std::thread::available_parallelism().map_or(1, usize::from).min(8);
        if workers == 1 || self.size <= 2 * BLOCK as u64 {
            let mut scanner = scanner();
            let mut job = Job::default();
            while blocks.next(&mut job.bytes).map_err(io)? {
                job.run(&mut scanner, std::mem::take(&mut header));
                if take(&mut job.chunk)?.is_break() {
                    break;
                }
            }
        } else {
            let (jobs, queue) = channel::<(Job, Sender<Job>)>();
            let queue = Mutex::new(queue);
            std::thread::scope(|scope| -> Result<()> {
                // Dropped when this closure returns, which ends the workers.
                let jobs = jobs;
                for _ in 0..workers {
                    scope.spawn(|| work(&queue, scanner()));
                }
                let mut in_flight: VecDeque<Receiver<Job>> = VecDeque::new();
                let mut spare: Vec<Job> = Vec::new();
                let mut more = true;
                loop {
                    while more && in_flight.len() < workers + 2 {
                        let mut job = spare.pop().unwrap_or_default();
                        more = blocks.next(&mut job.bytes).map_err(io)?;
                        if more {
                            job.header = std::mem::take(&mut header);
                            let (done, receiver) = channel();
                            jobs.send((job, done)).ok();
                            in_flight.push_back(receiver);
                        }
                    }
                    let Some(job) = in_flight.pop_front() else { return Ok(()) };
                    // A worker ends only when `jobs` does.
                    let Ok(mut job) = job.recv() else { return Ok(()) };
                    if take(&mut job.chunk)?.is_break() {
                        return Ok(());
                    }
                    spare.push(job);
                }
            })?;
        }
        told.cut = blocks.cut;
        Ok(told)
    }
}

/// The bytes of a trace, plain or compressed: what they start with tells which.
fn open(path: &Path) -> io::Result<Box<dyn Read>> {
    let mut file = File::open(path)?;
    let mut magic = [0; 4];
    let mut got = 0;
    while got < magic.len() {
        match file.read(&mut magic[got..])? {
            0 => break,
            n => got += n,
        }
    }
    let bytes = io::Cursor::new(magic[..got].to_vec()).chain(file);
    if magic.starts_with(&[0x1F, 0x8B]) {
        return Ok(Box::new(flate2::read::MultiGzDecoder::new(bytes)));
    }
    if magic == [0x28, 0xB5, 0x2F, 0xFD] {
        let frames =
            Frames { source: Some(io::BufReader::with_capacity(BLOCK, Box::new(bytes))), decoder: None };
        return Ok(Box::new(frames));
    }
    Ok(Box::new(bytes))
}

/// A zstd file: one frame behind another.
struct Frames {
    source: Option<io::BufReader<Box<dyn Read>>>,
    decoder: Option<Decoder>,
}

type Decoder =
    ruzstd::decoding::StreamingDecoder<io::BufReader<Box<dyn Read>>, ruzstd::decoding::FrameDecoder>;

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
    header: bool,
    chunk: Chunk,
}

impl Job {
    fn run(&mut self, scanner: &mut Scanner, header: bool) {
        let skip = if header { self.bytes.iter().position(|byte| *byte == b'\n') } else { None };
        let rows = skip.map_or(0, |end| end + 1);
        self.chunk.records.clear();
        self.chunk.lines = u64::from(header);
        self.chunk.fault = None;
        self.chunk.skipped = 0;
        scanner.scan(&self.bytes[rows..], &mut self.chunk);
    }
}

fn work(queue: &Mutex<Receiver<(Job, Sender<Job>)>>, mut scanner: Scanner) {
    loop {
        let next = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok((mut job, done)) = next else { return };
        let header = std::mem::take(&mut job.header);
        job.run(&mut scanner, header);
        done.send(job).ok();
    }
}

/// Blocks of whole lines out of a byte stream.
struct Blocks<R> {
    source: R,
    /// The start of a line whose end was not read yet.
    rest: Vec<u8>,
    ended: bool,
    cut: bool,
}

impl<R: Read> Blocks<R> {
    fn new(source: R) -> Self {
        Blocks { source, rest: Vec::new(), ended: false, cut: false }
    }

    /// Fills `block` with the next whole lines; false at the end.
    fn next(&mut self, block: &mut Vec<u8>) -> io::Result<bool> {
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
                return Err(io::Error::new(
                    io::ErrorKind::InvalidData,
                    format!("a line of more than {} MiB: not a trace", LONGEST_LINE >> 20),
                ));
            }
        }
        Ok(!block.is_empty())
    }
}

fn newlines(bytes: &[u8]) -> usize {
    bytes.iter().filter(|byte| **byte == b'\n').take(2).count()
}
