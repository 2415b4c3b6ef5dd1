//! Opens trace files, PyTorch's memory snapshots, and the Chrome traces of its profiler: plain, or compressed
//! with gzip or zstd.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::config::Compression;
use memtrace_trace::files;

use super::{foreign, profiler, snapshot};

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

/// The identity of a file's content: device, inode, size, and the time of the last change in seconds and
/// nanoseconds.
pub(super) type FileKey = (u64, u64, u64, i64, i64);

/// Returns the identity of a file's content.
pub(super) fn file_key(about: &Metadata) -> FileKey {
    (about.dev(), about.ino(), about.size(), about.mtime(), about.mtime_nsec())
}

/// An open trace file.
pub(super) enum Source {
    /// An uncompressed file.
    Plain(File),
    /// A compressed file, a snapshot or a Chrome trace: the bytes of the CSV, and the number of bytes read
    /// from the file.
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
/// compressed copy, the returned path is the path of the copy. The first bytes determine what the file is.
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
    let (compression, start) = start(&file)?;
    let size = file.metadata()?.len();
    if snapshot::is_pickle(&start) {
        return Ok(Source::Packed(Box::new(snapshot::rows(file, path)?), Arc::new(AtomicU64::new(size))));
    }
    foreign::refuse(&start, path)?;
    if profiler::is_chrome_trace(&start) {
        let key = file_key(&file.metadata()?);
        let rows = profiler::rows(key, unpacked(file, compression)?)?;
        return Ok(Source::Packed(Box::new(rows), Arc::new(AtomicU64::new(size))));
    }
    if compression == Compression::Off {
        return Ok(Source::Plain(file));
    }
    let count = Arc::new(AtomicU64::new(0));
    let bytes = unpacked(Counted { file, count: Arc::clone(&count) }, compression)?;
    Ok(Source::Packed(bytes, count))
}

/// Returns the decompressed bytes of a file.
fn unpacked(file: impl Read + Send + 'static, compression: Compression) -> io::Result<Box<dyn Read + Send>> {
    let buffered = |file| io::BufReader::with_capacity(BUFFER, file);
    Ok(match compression {
        Compression::Off => Box::new(file),
        // This decoder reads all frames in sequence, and rejects a frame that needs more than 128 MiB of
        // memory.
        Compression::Zst => Box::new(zstd::stream::read::Decoder::with_buffer(buffered(file))?),
        Compression::Gz => Box::new(flate2::bufread::MultiGzDecoder::new(buffered(file))),
    })
}

/// Opens a snapshot, plain or compressed, and returns its bytes, or `None` if the file is not a pickle.
///
/// # Errors
/// When the file cannot be read.
pub(super) fn pickle(file: File) -> io::Result<Option<Box<dyn Read + Send>>> {
    let (compression, start) = start(&file)?;
    snapshot::is_pickle(&start).then(|| unpacked(file, compression)).transpose()
}

/// Returns the compression of a file, and its first decompressed bytes. Leaves the position in the file
/// unchanged.
fn start(file: &File) -> io::Result<(Compression, Vec<u8>)> {
    const ENOUGH: u64 = 64;
    let from_start = FromStart { file, at: 0 };
    let mut start = Vec::new();
    from_start.take(ENOUGH).read_to_end(&mut start)?;
    let compression = match start[..] {
        [0x28, 0xB5, 0x2F, 0xFD, ..] => Compression::Zst,
        [0x1F, 0x8B, ..] => Compression::Gz,
        _ => return Ok((Compression::Off, start)),
    };
    start.clear();
    let unpacked: io::Result<Box<dyn Read>> = match compression {
        Compression::Zst => {
            zstd::stream::read::Decoder::new(from_start).map(|bytes| Box::new(bytes) as Box<dyn Read>)
        }
        _ => Ok(Box::new(flate2::read::MultiGzDecoder::new(from_start))),
    };
    // A damaged file fails where it is read as a whole.
    let _ = unpacked.and_then(|bytes| bytes.take(ENOUGH).read_to_end(&mut start));
    Ok((compression, start))
}

/// Reads a file from its start, without the file's own position.
#[derive(Clone, Copy)]
struct FromStart<'a> {
    file: &'a File,
    at: u64,
}

impl Read for FromStart<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.file.read_at(buffer, self.at)?;
        self.at += got as u64;
        Ok(got)
    }
}
