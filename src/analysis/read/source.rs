//! Opens trace files, plain or compressed with gzip or zstd, PyTorch's memory snapshots, and the Chrome traces of
//! its profiler.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::config::Compression;
use memtrace_trace::files;

use super::{profiler, snapshot};

/// The size in bytes of the buffer for compressed data.
const BUFFER: usize = 256 << 10;

/// Opens a file for reading its decompressed bytes from the start.
///
/// # Errors
/// When the file cannot be opened.
pub(crate) fn bytes(path: &Path) -> io::Result<Box<dyn Read + Send>> {
    Ok(match open(path)?.0 {
        Source::Plain(file) => Box::new(file),
        Source::Packed(bytes, _) => bytes,
    })
}

/// An open trace file.
pub(super) enum Source {
    /// An uncompressed file.
    Plain(File),
    /// A compressed file, a snapshot or a Chrome trace: the bytes of the CSV, and the number of bytes read from the file.
    Packed(Box<dyn Read + Send>, Arc<AtomicU64>),
}

/// A file that counts the bytes read from it.
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

/// Opens a regular file. Other files are refused, because opening a pipe may block forever and a device may
/// have no end.
///
/// # Errors
/// When the file cannot be opened or is not a regular file.
pub(crate) fn open_file(path: &Path) -> io::Result<File> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    File::open(path)
}

/// Opens a trace and returns it with its path. If the recorder has replaced the file at `path` by a
/// compressed copy, the returned path is the path of the copy. The first bytes determine whether the file is
/// plain, gzip, zstd, a snapshot or a Chrome trace.
///
/// # Errors
/// When the file cannot be opened or read.
pub(super) fn open(path: &Path) -> io::Result<(Source, PathBuf)> {
    let is_gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
    match open_file(path) {
        Err(error) if is_gone(&error) => {
            let copies = [Compression::Zst, Compression::Gz].map(|how| files::compressed(path, how));
            let copy = copies.into_iter().find_map(|copy| Some((open_file(&copy).ok()?, copy)));
            let (file, path) = copy.ok_or(error)?;
            Ok((recognized(file, &path)?, path))
        }
        file => Ok((recognized(file?, path)?, path.to_owned())),
    }
}

fn recognized(file: File, path: &Path) -> io::Result<Source> {
    let mut magic = [0; 64];
    let mut got = 0;
    while got < magic.len() {
        match file.read_at(&mut magic[got..], got as u64)? {
            0 => break,
            n => got += n,
        }
    }
    if snapshot::is_pickle(&magic) {
        let size = file.metadata()?.len();
        return Ok(Source::Packed(Box::new(snapshot::rows(file, path)?), Arc::new(AtomicU64::new(size))));
    }
    if profiler::is_chrome_trace(&magic[..got]) {
        let size = file.metadata()?.len();
        return Ok(Source::Packed(Box::new(profiler::rows(file)?), Arc::new(AtomicU64::new(size))));
    }
    let zstd = magic.starts_with(&[0x28, 0xB5, 0x2F, 0xFD]);
    if !zstd && !magic.starts_with(&[0x1F, 0x8B]) {
        return Ok(Source::Plain(file));
    }
    if !zstd && profiler::is_chrome_trace(&unpacked_start(&file)) {
        let size = file.metadata()?.len();
        let rows = profiler::rows(flate2::read::MultiGzDecoder::new(file))?;
        return Ok(Source::Packed(Box::new(rows), Arc::new(AtomicU64::new(size))));
    }
    let count = Arc::new(AtomicU64::new(0));
    let source = io::BufReader::with_capacity(BUFFER, Counted { file, count: Arc::clone(&count) });
    let bytes: Box<dyn Read + Send> = if zstd {
        // This decoder reads all frames in sequence, and rejects a frame that needs more than 128 MiB of
        // memory.
        Box::new(zstd::stream::read::Decoder::with_buffer(source)?)
    } else {
        Box::new(flate2::bufread::MultiGzDecoder::new(source))
    };
    Ok(Source::Packed(bytes, count))
}

/// Returns the first decompressed bytes of a gzip file; empty if they cannot be read.
fn unpacked_start(file: &File) -> Vec<u8> {
    let (mut packed, mut start) = ([0; 4096], vec![0; 64]);
    let got = file.read_at(&mut packed, 0).unwrap_or(0);
    let got = flate2::read::GzDecoder::new(&packed[..got]).read(&mut start).unwrap_or(0);
    start.truncate(got);
    start
}
