//! An output file: written under a temporary name until it is complete, and compressed when its name ends in
//! `.gz`.

use std::fs::File;
use std::io::{self, BufWriter, Stdout, Write};
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::error::{Error, Result};

/// The path that stands for standard output.
pub const STDOUT: &str = "-";

/// The output of one export. The first failure is kept until [`Out::finish`], because the callbacks that
/// visit rows cannot return an error.
pub struct Out {
    path: PathBuf,
    /// The temporary name; `None` for standard output.
    partial: Option<PathBuf>,
    sink: Sink,
    failed: Option<io::Error>,
}

enum Sink {
    Plain(BufWriter<File>),
    Packed(GzEncoder<BufWriter<File>>),
    Stdout(BufWriter<Stdout>),
}

impl Out {
    /// Creates the file, and the folders of its path.
    ///
    /// # Errors
    /// When a file or folder cannot be created.
    pub fn create(path: &Path) -> Result<Out> {
        if path == Path::new(STDOUT) {
            let sink = Sink::Stdout(BufWriter::with_capacity(1 << 16, io::stdout()));
            return Ok(Out { path: path.to_owned(), partial: None, sink, failed: None });
        }
        let error = |source| memtrace_trace::Error::Io { path: path.to_owned(), source };
        let Some(name) = path.file_name() else {
            return Err(Error::usage(format!("{} is not the name of a file", path.display())));
        };
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder).map_err(error)?;
        }
        let partial = path.with_file_name(format!(".{}.partial", name.to_string_lossy()));
        let file = BufWriter::with_capacity(1 << 18, File::create(&partial).map_err(error)?);
        let sink = if path.extension().is_some_and(|ending| ending == "gz") {
            Sink::Packed(GzEncoder::new(file, Compression::default()))
        } else {
            Sink::Plain(file)
        };
        Ok(Out { path: path.to_owned(), partial: Some(partial), sink, failed: None })
    }

    /// The final path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Closes the file, renames it to its final path and returns its size in bytes.
    ///
    /// # Errors
    /// The first failure of any write.
    pub fn finish(mut self) -> Result<u64> {
        let result = match self.failed.take() {
            Some(error) => Err(error),
            None => self.close(),
        };
        result.map_err(|source| memtrace_trace::Error::Io { path: self.path.clone(), source }.into())
    }

    fn close(&mut self) -> io::Result<u64> {
        match &mut self.sink {
            Sink::Plain(file) => file.flush()?,
            Sink::Packed(file) => {
                file.try_finish()?;
                file.get_mut().flush()?;
            }
            Sink::Stdout(stdout) => stdout.flush()?,
        }
        let Some(partial) = self.partial.take() else { return Ok(0) };
        std::fs::rename(&partial, &self.path)?;
        Ok(std::fs::metadata(&self.path)?.len())
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    /// Never fails: [`Out::finish`] returns the first failure, after which nothing more is written.
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.failed.is_none() {
            let result = match &mut self.sink {
                Sink::Plain(file) => file.write_all(bytes),
                Sink::Packed(file) => file.write_all(bytes),
                Sink::Stdout(stdout) => stdout.write_all(bytes),
            };
            self.failed = result.err();
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Out {
    /// Removes an unfinished file.
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            std::fs::remove_file(partial).ok();
        }
    }
}
