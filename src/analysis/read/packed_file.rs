//! Regular files that may be compressed with gzip or zstd: their first bytes, and all of them, decompressed.

use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use memtrace_trace::config::Compression;

/// The size in bytes of the buffer for compressed data.
const BUFFER: usize = 256 << 10;

/// The identity of a file's content: device, inode, size, and the time of the last change in seconds and
/// nanoseconds.
pub(super) type FileKey = (u64, u64, u64, i64, i64);

/// Returns the identity of a file's content.
pub(super) fn file_key(about: &Metadata) -> FileKey {
    (about.dev(), about.ino(), about.size(), about.mtime(), about.mtime_nsec())
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

/// Returns the decompressed bytes of a file.
pub(super) fn unpacked(
    file: impl Read + Send + 'static,
    compression: Compression,
) -> io::Result<Box<dyn Read + Send>> {
    let buffered = |file| io::BufReader::with_capacity(BUFFER, file);
    Ok(match compression {
        Compression::Off => Box::new(file),
        // This decoder reads all frames in sequence, and rejects a frame that needs more than 128 MiB of
        // memory.
        Compression::Zst => Box::new(zstd::stream::read::Decoder::with_buffer(buffered(file))?),
        Compression::Gz => Box::new(flate2::bufread::MultiGzDecoder::new(buffered(file))),
    })
}

/// Returns the compression of a file, and its first decompressed bytes. Leaves the position in the file
/// unchanged.
pub(super) fn start(file: &File) -> io::Result<(Compression, Vec<u8>)> {
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
