//! Compression of finished parts (`MEMTRACE_COMPRESS`).

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use memtrace_trace::config::{Compression, Level};
use memtrace_trace::files;

use super::output;
use super::thread::start_thread;
use crate::session::Session;

/// Compresses finished parts on threads of its own, one part after the other.
pub(crate) struct Compressor {
    session: &'static Session,
    /// The thread of the newest part; it first waits for the one before it.
    newest: Option<JoinHandle<()>>,
}

impl Compressor {
    pub(crate) fn new(session: &'static Session) -> Compressor {
        Compressor { session, newest: None }
    }

    /// Compresses a finished part, if the settings ask for it.
    pub(crate) fn add(&mut self, part: PathBuf) {
        let how = self.session.settings.compress;
        if how == Compression::Off {
            return;
        }
        let (say, log) = (self.session.say, self.session.settings.log);
        let earlier = self.newest.take();
        let newest = start_thread("memtrace-pack", 2 << 20, move || {
            if let Some(earlier) = earlier {
                let _ = earlier.join();
            }
            if let Err(error) = compress(&part, how)
                && log >= Level::Warn
            {
                say(&format!("{}: stays uncompressed: {error}", part.display()));
            }
        });
        self.newest = newest.ok();
    }

    /// Waits until every part is compressed; calls `while_waiting` repeatedly.
    pub(crate) fn finish(&mut self, while_waiting: impl Fn()) {
        while self.newest.as_ref().is_some_and(|newest| !newest.is_finished()) {
            while_waiting();
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// A reader or writer for a library that panics at an error: it stores the error and continues as if there
/// were none.
struct Kept<T> {
    inner: T,
    error: Option<io::Error>,
}

impl<T> Kept<T> {
    fn new(inner: T) -> Self {
        Kept { inner, error: None }
    }

    fn end(self) -> io::Result<T> {
        self.error.map_or(Ok(self.inner), Err)
    }
}

impl<T: Read> Read for Kept<T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(self.inner.read(buffer).unwrap_or_else(|error| {
            self.error = Some(error);
            0
        }))
    }
}

impl<T: Write> Write for Kept<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.error.is_none()
            && let Err(error) = self.inner.write_all(bytes)
        {
            self.error = Some(error);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Replaces a finished part by a compressed copy. The copy gets its name when it is complete, and the part is
/// removed only then, so a kill loses nothing.
pub(crate) fn compress(part: &Path, how: Compression) -> io::Result<()> {
    let (whole, unfinished) = (files::compressed(part, how), files::unfinished_copy(part));
    let done = (|| {
        let mut source = io::BufReader::with_capacity(256 << 10, File::open(part)?);
        let target = io::BufWriter::with_capacity(256 << 10, output::create_private(&unfinished)?);
        let target = match how {
            Compression::Off => return Ok(()),
            Compression::Gz => {
                let mut encoder = flate2::write::GzEncoder::new(target, flate2::Compression::fast());
                io::copy(&mut source, &mut encoder)?;
                encoder.finish()?
            }
            Compression::Zst => {
                let (mut source, mut target) = (Kept::new(source), Kept::new(target));
                // One frame: some readers stop at the end of the first.
                let level = ruzstd::encoding::CompressionLevel::Fastest;
                ruzstd::encoding::compress(&mut source, &mut target, level);
                source.end()?;
                target.end()?
            }
        };
        target.into_inner()?.sync_all()?;
        // Fails when another file has the name.
        fs::hard_link(&unfinished, &whole)?;
        fs::remove_file(part)
    })();
    let _ = fs::remove_file(&unfinished);
    done
}
