//! An output file, which is compressed if its name ends in `.gz`. A regular file is replaced as a whole once
//! the output is complete, and keeps its owner and mode. Any other existing path, such as a device or a pipe,
//! is written in place.

use std::fs::{self, File};
use std::io::{self, BufWriter, Stdout, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, fchown};
use std::path::{Path, PathBuf};
use std::process;

use flate2::Compression;
use flate2::write::GzEncoder;

use crate::error::{Error, Result};

/// The path that means standard output.
pub const STDOUT: &str = "-";

/// Returns true if `path` is standard output: [`STDOUT`], or another name of the same file, such as
/// `/dev/stdout`.
#[must_use]
pub fn is_stdout(path: &Path) -> bool {
    let stdout = || File::from(io::stdout().as_fd().try_clone_to_owned()?).metadata();
    path == Path::new(STDOUT)
        || matches!((fs::metadata(path), stdout()), (Ok(a), Ok(b)) if (a.dev(), a.ino()) == (b.dev(), b.ino()))
}

/// Returns true if `path` can receive only one output: standard output, a pipe, a socket or a device.
pub(super) fn is_stream(path: &Path) -> bool {
    is_stdout(path)
        || fs::metadata(path).is_ok_and(|found| {
            let kind = found.file_type();
            kind.is_fifo() || kind.is_char_device() || kind.is_block_device() || kind.is_socket()
        })
}

/// An output file or stream. The first failure is kept until [`Out::finish`], because the callbacks that
/// visit rows cannot return an error.
pub struct Out {
    path: PathBuf,
    /// `None` if the output is written to `path` itself.
    replacement: Option<Replacement>,
    sink: Sink,
    failed: Option<io::Error>,
}

enum Sink {
    Plain(BufWriter<File>),
    Packed(GzEncoder<BufWriter<File>>),
    Stdout(BufWriter<Stdout>),
}

/// A file with a temporary name, which is removed on drop.
struct Replacement {
    partial: PathBuf,
    /// The file to be replaced, with the symbolic links of its path resolved.
    target: PathBuf,
}

/// The ending of a temporary file, which replaces its target when it is complete. Its name begins with a dot.
pub(super) const PARTIAL: &str = ".partial";

impl Replacement {
    /// Creates the temporary file in the folder of its target. Returns `None` if `path` must be written in
    /// place, because it is not a regular file, or because no file can be created in its folder or, with
    /// `keeps_owner`, given to its owner.
    fn create(path: &Path, keeps_owner: bool) -> Option<(File, Replacement)> {
        let target = match fs::symlink_metadata(path) {
            Ok(_) => path.canonicalize().ok()?,
            Err(_) => path.to_owned(),
        };
        let old = fs::metadata(&target).ok();
        if old.as_ref().is_some_and(|old| !old.is_file()) {
            return None;
        }
        let name = target.file_name()?.to_string_lossy();
        let partial = target.with_file_name(format!(".{name}.{}{PARTIAL}", process::id()));
        let file = File::create_new(&partial).ok()?;
        let replacement = Replacement { partial, target };
        if let Some(old) = old.filter(|_| keeps_owner) {
            // Set the mode last, because a change of the owner clears parts of the mode.
            fchown(&file, Some(old.uid()), Some(old.gid())).ok()?;
            file.set_permissions(old.permissions()).ok()?;
        }
        Some((file, replacement))
    }
}

impl Drop for Replacement {
    fn drop(&mut self) {
        fs::remove_file(&self.partial).ok();
    }
}

impl Out {
    /// Opens the output of a command that reads the files `inputs`, and creates the folders of its path.
    ///
    /// # Errors
    /// When a file or folder cannot be created or written to, or when `path` is one of the inputs.
    pub fn beside<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Out> {
        refuse_input(path, inputs)?;
        Out::open(path, true)
    }

    /// Same as [`Out::beside`], but never writes in place: an earlier file stays as it is until
    /// [`Complete::publish`], and the new one belongs to this user.
    ///
    /// # Errors
    /// When a file or folder cannot be created or written to, or when `path` is one of the inputs.
    pub(super) fn new_beside<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<Out> {
        refuse_input(path, inputs)?;
        Out::open(path, false)
    }

    fn open(path: &Path, may_be_in_place: bool) -> Result<Out> {
        if is_stdout(path) {
            let sink = Sink::Stdout(BufWriter::with_capacity(1 << 16, io::stdout()));
            return Ok(Out { path: path.to_owned(), replacement: None, sink, failed: None });
        }
        let error = |source| memtrace_trace::Error::Io { path: path.to_owned(), source };
        if path.file_name().is_none() {
            return Err(Error::usage(format!("{} is not the name of a file", path.display())));
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder).map_err(error)?;
        }
        let (file, replacement) = match Replacement::create(path, may_be_in_place) {
            Some((file, replacement)) => (file, Some(replacement)),
            None if !may_be_in_place => {
                return Err(error(io::Error::other("no file can be created beside it")).into());
            }
            None => (File::create(path).map_err(error)?, None),
        };
        let file = BufWriter::with_capacity(1 << 18, file);
        let sink = if path.extension().is_some_and(|ending| ending == "gz") {
            Sink::Packed(GzEncoder::new(file, Compression::default()))
        } else {
            Sink::Plain(file)
        };
        Ok(Out { path: path.to_owned(), replacement, sink, failed: None })
    }

    /// Returns the path that was passed to [`Out::beside`].
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Completes the output and gives it its final name. Returns the size of the file in bytes, or 0 for a
    /// pipe or device.
    ///
    /// # Errors
    /// The first failure of any write.
    pub fn finish(self) -> Result<u64> {
        self.complete()?.publish()
    }

    /// Completes the output under its temporary name. An earlier file stays until [`Complete::publish`].
    ///
    /// # Errors
    /// The first failure of any write.
    pub(super) fn complete(self) -> Result<Complete> {
        let Out { path, replacement, sink, failed } = self;
        match failed.map_or_else(|| close(sink), Err) {
            Ok(bytes) => Ok(Complete { path, replacement, bytes }),
            Err(source) => Err(memtrace_trace::Error::Io { path, source }.into()),
        }
    }
}

/// Returns an error if `path` is one of `inputs`, which the output would destroy.
fn refuse_input<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path>) -> Result<()> {
    // Compare inodes instead of paths, because a hard link to the trace is the trace.
    let id = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let Some(place) = id(path) else { return Ok(()) };
    match inputs.into_iter().find(|input| id(input) == Some(place)) {
        Some(input) => {
            Err(Error::usage(format!("{} is the trace itself; name another file", input.display())))
        }
        None => Ok(()),
    }
}

/// Closes the output. Returns its size in bytes, or 0 for a pipe or device.
fn close(mut sink: Sink) -> io::Result<u64> {
    let file = match &mut sink {
        Sink::Plain(file) => file,
        Sink::Packed(file) => {
            file.try_finish()?;
            file.get_mut()
        }
        Sink::Stdout(stdout) => return stdout.flush().map(|()| 0),
    };
    file.flush()?;
    Ok(file.get_ref().metadata()?.len())
}

/// A complete output that may not have its final name yet. It is then removed on drop, unless it was written in place.
pub(super) struct Complete {
    path: PathBuf,
    replacement: Option<Replacement>,
    bytes: u64,
}

impl Complete {
    /// Returns the path that was passed to [`Out::beside`].
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives the output its final name. Returns the size of the file in bytes, or 0 for a pipe or device.
    ///
    /// # Errors
    /// When the file cannot be renamed.
    pub(super) fn publish(self) -> Result<u64> {
        if let Some(Replacement { partial, target }) = &self.replacement {
            let failed = |source| memtrace_trace::Error::Io { path: self.path.clone(), source };
            fs::rename(partial, target).map_err(failed)?;
        }
        Ok(self.bytes)
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_all(bytes)?;
        Ok(bytes.len())
    }

    /// Always returns `Ok`. The first failure is stored for [`Out::finish`], and nothing is written after it.
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
