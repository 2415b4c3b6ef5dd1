//! Opens trace files, PyTorch's memory snapshots, and the Chrome traces of its profiler: plain, or compressed
//! with gzip or zstd.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::config::Compression;
use memtrace_trace::files;

use super::packed_file::{file_key, open_file, start, unpacked};
use super::{foreign, profiler, snapshot};

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
