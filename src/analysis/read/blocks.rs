//! Divides a trace file into blocks of whole lines, which threads read and scan in parallel.

use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use memtrace_trace::csv::{LONGEST_LINE, too_long};

use super::scan::{Chunk, Scanner};
use super::source::{self, Source};

/// The size of a block in bytes. A block and its records fit a core's cache, and a block is large enough to
/// keep the cost of passing it between threads low.
pub(super) const BLOCK: usize = 256 << 10;
/// The number of bytes that are first read past the end of a block, to find the end of its last line.
const TAIL: usize = 4 << 10;

/// A block of a trace, from reading to scanned records. Jobs are reused for later blocks.
#[derive(Default)]
pub(super) struct BlockJob {
    bytes: Vec<u8>,
    /// The range of the file to read into `bytes`, or `None` once the bytes are read.
    range: Option<FileRange>,
    /// True if the block begins with the header.
    pub(super) header: bool,
    /// True if the block ends with an unterminated last line of the file.
    pub(super) cut: bool,
    /// True if the file became shorter after it was opened, and the block ends at its new end.
    pub(super) shortened: bool,
    /// The bytes on disk that the block covers.
    pub(super) size: u64,
    /// The records of the block.
    pub(super) chunk: Chunk,
    /// The error that ended the reading of the block.
    pub(super) error: Option<io::Error>,
}

/// A range of bytes of a plain file. A line belongs to the range in which it begins.
#[derive(Clone)]
struct FileRange {
    file: Arc<File>,
    start: u64,
    end: u64,
    file_end: u64,
}

impl BlockJob {
    /// Ends the job with a read error. Returns true, because the job must still be delivered.
    pub(super) fn fail(&mut self, error: io::Error) -> bool {
        (self.error, self.range, self.header) = (Some(error), None, false);
        self.bytes.clear();
        true
    }

    /// Reads the bytes of the block, unless they are already read, and scans them.
    pub(super) fn run(&mut self, scanner: &mut Scanner) {
        self.chunk.records.clear();
        self.chunk.lines = 0;
        self.chunk.faults.clear();
        self.chunk.skipped = 0;
        self.shortened = false;
        if let Some(range) = self.range.take() {
            match range.read(&mut self.bytes, &mut self.shortened) {
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

impl FileRange {
    /// Reads into `bytes`. Returns the range of `bytes` that holds the lines that begin in this file range. If
    /// the file has become shorter, sets `shortened` and returns the whole lines that are left.
    fn read(&self, bytes: &mut Vec<u8>, shortened: &mut bool) -> io::Result<Range<usize>> {
        // Read from the byte before `start`: a line begins at `start` if that byte ends a line.
        let from = self.start.saturating_sub(1);
        let own = (self.end - from) as usize;
        let mut filled: usize = 0;
        loop {
            // Read past the range to find the end of its last line. Each try reads more than twice as far.
            let behind = filled.saturating_sub(own) * 2 + TAIL;
            let wanted = ((self.file_end - from) as usize).min(own + behind);
            if bytes.len() < wanted {
                bytes.resize(wanted, 0);
            }
            while filled < wanted && !*shortened {
                match self.file.read_at(&mut bytes[filled..wanted], from + filled as u64) {
                    Ok(0) => *shortened = true,
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
            // No line begins in this range, or the first one begins at the first byte of the next range.
            let Some(first) = first.filter(|first| *first < own) else { return Ok(0..0) };
            let line_end = |byte: &u8| *byte == b'\n';
            if let Some(end) =
                bytes[..filled].get(own - 1..).and_then(|bytes| bytes.iter().position(line_end))
            {
                return Ok(first..own + end);
            }
            if *shortened {
                let end =
                    bytes[first..filled].iter().rposition(line_end).map_or(first, |end| first + end + 1);
                return Ok(first..end);
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
pub(super) enum Blocks {
    /// A plain file. The thread that scans a block also reads it, so that the block is in that core's cache.
    Plain { file: Arc<File>, at: u64, size: u64, cut: bool },
    /// A compressed file, which can be read only from its start.
    Packed { lines: Lines<Box<dyn Read + Send>>, read: Arc<AtomicU64>, counted: u64 },
}

impl Blocks {
    /// Opens the file at `path`. Of a plain file, this reads at most the first `limit` bytes. With
    /// `may_grow`, an incomplete last line is left out if the plain file is still growing.
    pub(super) fn open(path: &Path, limit: u64, may_grow: bool) -> io::Result<Blocks> {
        match source::open(path)?.0 {
            Source::Plain(file) => {
                let mut size = file.metadata()?.len().min(limit);
                let mut last = [b'\n'];
                file.read_at(&mut last, size.saturating_sub(1))?;
                let mut cut = last[0] != b'\n';
                if cut && may_grow && grows(&file, size)? {
                    (size, cut) = (whole_lines(&file, size)?, false);
                }
                Ok(Blocks::Plain { file: Arc::new(file), at: 0, size, cut })
            }
            Source::Packed(bytes, read) => Ok(Blocks::Packed { lines: Lines::new(bytes), read, counted: 0 }),
        }
    }

    /// Fills `job` with the next block. Returns false at the end of the file.
    pub(super) fn next(&mut self, job: &mut BlockJob) -> io::Result<bool> {
        match self {
            Blocks::Plain { file, at, size, cut } => {
                if at == size {
                    return Ok(false);
                }
                let end = (*at + BLOCK as u64).min(*size);
                job.header = *at == 0;
                job.cut = *cut && end == *size;
                job.size = end - *at;
                job.range = Some(FileRange { file: Arc::clone(file), start: *at, end, file_end: *size });
                *at = end;
                Ok(true)
            }
            Blocks::Packed { lines, read, counted } => {
                job.header = !lines.started;
                let more = lines.next(&mut job.bytes)?;
                job.cut = lines.cut;
                let now = read.load(Ordering::Relaxed);
                job.size = now - std::mem::replace(counted, now);
                Ok(more)
            }
        }
    }
}

/// Waits up to 100 ms for a file to grow beyond `size`. Returns true if it does.
fn grows(file: &File, size: u64) -> io::Result<bool> {
    for _ in 0..20 {
        if file.metadata()?.len() > size {
            return Ok(true);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(false)
}

/// Returns the total length of the whole lines in the first `size` bytes of the file, or `size` if the last
/// `LONGEST_LINE` of these bytes contain no line end.
fn whole_lines(file: &File, size: u64) -> io::Result<u64> {
    let start = size.saturating_sub(LONGEST_LINE as u64);
    let mut tail = vec![0; (size - start) as usize];
    file.read_exact_at(&mut tail, start)?;
    Ok(tail.iter().rposition(|byte| *byte == b'\n').map_or(size, |end| start + end as u64 + 1))
}

/// Divides a byte stream into blocks of whole lines.
pub(super) struct Lines<R> {
    source: R,
    /// The start of a line whose end is not read yet.
    rest: Vec<u8>,
    started: bool,
    ended: bool,
    cut: bool,
    /// The read error after the bytes so far.
    error: Option<io::Error>,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(source: R) -> Self {
        Lines { source, rest: Vec::new(), started: false, ended: false, cut: false, error: None }
    }

    /// Fills `block` with the next whole lines. Returns false at the end.
    ///
    /// # Errors
    /// After a read error, all whole lines before it come first.
    pub(super) fn next(&mut self, block: &mut Vec<u8>) -> io::Result<bool> {
        self.started = true;
        block.clear();
        block.append(&mut self.rest);
        while !self.ended {
            if let Some(error) = self.error.take() {
                return Err(error);
            }
            let old = block.len();
            self.error = self.source.by_ref().take(BLOCK as u64).read_to_end(block).err();
            if block.len() == old && self.error.is_none() {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_became_shorter_keeps_its_whole_lines() {
        let path = std::env::temp_dir().join(format!("memtrace-shorter-{}", std::process::id()));
        let line = [&[b'x'; 99][..], b"\n"].concat();
        let lines = |left: u64| {
            std::fs::write(&path, line.repeat(2 * BLOCK / 100)).unwrap();
            let mut blocks = Blocks::open(&path, u64::MAX, false).unwrap();
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(left).unwrap();
            let (mut job, mut found) = (BlockJob::default(), Vec::new());
            while blocks.next(&mut job).unwrap() {
                let mut shortened = false;
                let lines = job.range.take().unwrap().read(&mut job.bytes, &mut shortened).unwrap();
                found.push((lines.len() / line.len(), shortened));
            }
            found
        };
        let all = BLOCK / 100;
        assert_eq!(lines(2 * BLOCK as u64), [(all + 1, false), (all - 1, false)]);
        // The second line is cut.
        assert_eq!(lines(150), [(1, true), (0, true)]);
        assert_eq!(lines(BLOCK as u64 + 50), [(all, true), (0, true)]);
        assert_eq!(lines(0), [(0, true), (0, true)]);
        std::fs::remove_file(&path).unwrap();
    }

    #[test]
    fn the_lines_before_a_read_error_come_before_the_error() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::ErrorKind::UnexpectedEof.into())
            }
        }
        let mut lines = Lines::new((&b"head\nwhole\npar"[..]).chain(Broken));
        let mut block = Vec::new();
        assert!(lines.next(&mut block).unwrap());
        assert_eq!(block, b"head\nwhole\n");
        assert!(lines.next(&mut block).is_err());
    }

    #[test]
    fn a_line_that_is_being_written_is_left_out_and_a_cut_one_is_not() {
        let path = std::env::temp_dir().join(format!("memtrace-blocks-{}", std::process::id()));
        let size = |may_grow: bool| match Blocks::open(&path, u64::MAX, may_grow).unwrap() {
            Blocks::Plain { size, cut, .. } => (size, cut),
            Blocks::Packed { .. } => panic!("a plain file"),
        };
        std::fs::write(&path, b"head\nwhole\npar").unwrap();
        assert_eq!((size(false), size(true)), ((14, true), (14, true)));
        std::fs::write(&path, b"head\nwhole\npart\n").unwrap();
        let file = File::open(&path).unwrap();
        assert_eq!((grows(&file, 14).unwrap(), grows(&file, 16).unwrap()), (true, false));
        assert_eq!((whole_lines(&file, 14).unwrap(), whole_lines(&file, 3).unwrap()), (11, 3));
        assert_eq!(size(true), (16, false));
        std::fs::remove_file(&path).unwrap();
    }
}
