//! Opens the journal that a trace names.
//!
//! Anybody may have written the name in the trace, so it is only a hint. A journal is opened only if it is a
//! file of this user that memtrace created for a trace of the same name. The journal is removed only if it
//! was created for this very file.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use memtrace_trace::config::LARGEST_BUFFER;
use memtrace_trace::files;
use memtrace_trace::journal::{JournalName, Run, names_path};
use memtrace_trace::private_file;
use rustix::fs::OFlags;

use crate::journal::{Header, is_running};

/// The maximum size of a journal or a definitions file in bytes.
const MOST_BYTES: u64 = 2 * LARGEST_BUFFER;

/// The result of [`find`].
pub(crate) enum JournalLookup {
    /// No file has this name.
    Gone,
    /// The file is not a journal of this trace. The text is the reason.
    Refused(&'static str),
    /// The journal of this trace.
    Found(OwnJournal),
}

/// A journal of this user that names this trace.
pub(crate) struct OwnJournal {
    path: PathBuf,
    /// The open file.
    pub(crate) file: File,
    length: u64,
    /// The process of the journal.
    run: Run,
    /// True if the journal was created for this very file. False if the trace was copied or moved.
    is_own: bool,
}

/// Opens the journal at `path`, which the trace `csv` names.
///
/// # Errors
/// Returns an error if a journal of this user cannot be read.
pub(crate) fn find(path: &Path, csv: &Path) -> io::Result<JournalLookup> {
    let kind = path.file_name().and_then(JournalName::parse);
    if !path.is_absolute() || !matches!(kind, Some(JournalName::Journal(_))) {
        return Ok(JournalLookup::Refused("the file does not have the name of a journal"));
    }
    let (file, length) = match open_own(path) {
        Ok(Ok(found)) => found,
        Ok(Err(why)) => return Ok(JournalLookup::Refused(why)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(JournalLookup::Gone),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            return Ok(JournalLookup::Refused("this user may not read it"));
        }
        Err(error) => return Err(error),
    };
    let Some(header) = Header::read(&file)? else {
        return Ok(JournalLookup::Refused("the file is not a journal of this version"));
    };
    let first = header.trace().unwrap_or(Path::new(""));
    // The journal contains the name of the first part.
    let (theirs, ours) = (files::first_stem(first), files::first_stem(csv));
    if theirs.file_name().is_none() || theirs.file_name() != ours.file_name() {
        return Ok(JournalLookup::Refused("it is the journal of another trace"));
    }
    let folder = |stem: &Path| folder_of(stem).canonicalize().ok();
    let is_own = first.is_absolute() && folder(&theirs).is_some_and(|theirs| Some(theirs) == folder(&ours));
    Ok(JournalLookup::Found(OwnJournal { path: path.to_owned(), file, length, run: header.run(), is_own }))
}

impl OwnJournal {
    /// Returns true if the process of the journal still runs.
    pub(crate) fn is_running(&self) -> bool {
        is_running(&self.file, &self.run)
    }

    /// Returns the bytes of the journal. They belong together only if the process has ended before the call.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read.
    pub(crate) fn bytes(&self) -> io::Result<Vec<u8>> {
        use std::io::Seek;
        let mut bytes = Vec::new();
        (&self.file).rewind()?;
        (&self.file).take(self.length).read_to_end(&mut bytes)?;
        Ok(bytes)
    }

    /// Returns the bytes of the definitions file. Returns no bytes if this user has no such file.
    pub(crate) fn names(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        if let Ok(Ok((file, length))) = open_own(&names_path(&self.path)) {
            // After a read error, the bytes up to the error are used.
            let _ = file.take(length).read_to_end(&mut bytes);
        }
        bytes
    }

    /// Removes the journal and its definitions file, if it was created for this very trace. The journal of a
    /// copied or moved trace is kept, because the original may need it.
    ///
    /// # Errors
    /// Returns an error if the journal cannot be removed.
    pub(crate) fn remove(&self) -> io::Result<()> {
        if !self.is_own {
            return Ok(());
        }
        let _ = fs::remove_file(names_path(&self.path));
        match fs::remove_file(&self.path) {
            // A sweep at the same time has removed the journal, because the trace is complete.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}

/// Opens a trace for reading, of any user and through a link, too. Never blocks, because another user may have
/// replaced the trace that a journal names by a FIFO.
///
/// # Errors
/// Returns an error if the file cannot be opened or is not a regular file.
pub(crate) fn open_trace(path: &Path) -> io::Result<File> {
    let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits() as i32;
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// Opens a regular file of this user and returns it with its length. Never blocks, and never follows a link.
/// The inner `Err` is the reason why the file is not used: it is no regular file, belongs to another user, or is
/// larger than [`MOST_BYTES`].
///
/// # Errors
/// Returns an error if the file cannot be opened.
pub(crate) fn open_own(path: &Path) -> io::Result<Result<(File, u64), &'static str>> {
    // Checked before the open, because opening some devices has side effects.
    if !fs::symlink_metadata(path)?.is_file() {
        return Ok(Err("it is not a regular file"));
    }
    let file = private_file::reopen(path, OpenOptions::new().read(true))?;
    let data = file.metadata()?;
    Ok(match is_own(&data) {
        false => Err("it belongs to another user"),
        true if data.len() > MOST_BYTES => Err("it is larger than any journal"),
        true => Ok((file, data.len())),
    })
}

/// Returns true for a regular file of this user.
pub(crate) fn is_own(data: &fs::Metadata) -> bool {
    data.is_file() && data.uid() == rustix::process::geteuid().as_raw()
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
