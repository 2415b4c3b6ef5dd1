//! Opens trace files, plain or compressed with gzip or zstd.

use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The buffer of compressed bytes.
const BUFFER: usize = 256 << 10;

/// The decompressed bytes of a file from its start.
///
/// # Errors
/// When the file cannot be opened.
pub(crate) fn bytes(path: &Path) -> io::Result<Box<dyn Read + Send>> {
    Ok(match open(path)? {
        Source::Plain(file) => Box::new(file),
        Source::Packed(bytes, _) => bytes,
    })
}

/// An open trace file.
pub(super) enum Source {
    /// Uncompressed.
    Plain(File),
    /// Compressed: the decompressed bytes, and the count of compressed bytes read from the file.
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

/// Opens a trace. Its first bytes decide whether it is plain, gzip or zstd.
///
/// # Errors
/// When the file cannot be opened or read.
pub(super) fn open(path: &Path) -> io::Result<Source> {
    let file = File::open(path)?;
    let mut magic = [0; 4];
    let mut got = 0;
    // A pipe cannot be read at an offset; it is taken as plain.
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
    let source = io::BufReader::with_capacity(BUFFER, Counted { file, count: Arc::clone(&count) });
    let bytes: Box<dyn Read + Send> = if zstd {
        Box::new(Frames { source: Some(source), decoder: None })
    } else {
        Box::new(flate2::bufread::MultiGzDecoder::new(source))
    };
    Ok(Source::Packed(bytes, count))
}

/// The bytes of a zstd file, which may have several frames.
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
            // The frame has ended: read the next one, if there is one.
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
