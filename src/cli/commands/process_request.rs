//! A request to a running process: for the detail of its next steps, or for a search for the holders of
//! memory.
//!
//! The request is a word in the journal that the process has mapped, which only its user can write. The
//! process reads the word when a step begins, so no port is open and no signal is sent.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use memtrace_trace::journal::{
    DetailAnswer, DetailRequest, HEADER_BYTES, JournalName, MAGIC, MAX_PATH, layout, process_start,
};
use memtrace_trace::private_file;

/// A request to a process. Until the request is dropped, its lock keeps other commands from sending requests
/// to the process.
pub(super) struct Request {
    pub(super) pid: u32,
    /// The start time of the process, which shows whether another process has its id now.
    start: u64,
    steps: u32,
    journal: File,
    word: u64,
    /// True if this request replaced an earlier request that the process had not taken.
    pub(super) replaces: bool,
}

impl Request {
    /// Asks process `pid` for the detail of its next `steps` steps.
    ///
    /// # Errors
    /// When the process cannot be asked.
    pub(super) fn to_process(pid: u32, steps: u32) -> Result<Request> {
        Request::prepare(pid, steps, None)?.send()
    }

    /// Same as [`to_process`](Request::to_process), for the process that owns the journal. `journal` is its
    /// path from the meta row of a trace.
    ///
    /// # Errors
    /// When the process cannot be asked, runs on another machine or has ended.
    pub(super) fn to_writer(journal: &str, steps: u32) -> Result<Request> {
        let journal = Path::new(journal);
        let Some(JournalName::Journal(pid)) = journal.file_name().and_then(JournalName::parse) else {
            bail!("the process of this trace has no journal, so it cannot receive requests")
        };
        Request::prepare(pid, steps, Some(journal))?.send()
    }

    /// Asks process `pid` for a search for the holders of memory. Calls `before` with the path of its trace before
    /// the process can see the request.
    ///
    /// # Errors
    /// When the process cannot be asked.
    pub(super) fn to_search(pid: u32, before: impl FnOnce(&Path)) -> Result<Request> {
        let request = Request::prepare(pid, DetailRequest::SEARCH, None)?;
        before(&request.trace()?);
        request.send()
    }

    /// Returns true once the process has taken the request.
    ///
    /// # Errors
    /// When the process ended before that.
    pub(super) fn is_taken(&self) -> Result<bool> {
        Ok(self.answer()?.is_some())
    }

    /// Returns the path of the trace that the process writes.
    ///
    /// # Errors
    /// When the journal does not name one yet.
    pub(super) fn trace(&self) -> Result<PathBuf> {
        let length = word(&self.journal, layout::TRACE_LEN)? as usize;
        let mut path = vec![0; length.min(MAX_PATH)];
        self.journal.read_exact_at(&mut path, layout::TRACE as u64).context("cannot read the journal")?;
        if path.is_empty() {
            bail!("process {} has not written its trace yet; try again later", self.pid);
        }
        Ok(PathBuf::from(OsString::from_vec(path)))
    }

    /// Returns a request that was not sent yet.
    fn prepare(pid: u32, steps: u32, named: Option<&Path>) -> Result<Request> {
        let Some(start) = process_start(pid) else { bail!("no process {pid} is running") };
        let journal = match journal_of(pid, named) {
            Err(_) if process_start(pid) != Some(start) => {
                bail!("process {pid} ended before it could be asked")
            }
            journal => journal?,
        };
        // The lock prevents a second request before this one is answered: both commands would wait for the
        // same answer.
        match journal.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => bail!(
                "another request to process {pid} is pending; try again when the other `memtrace live` or \
                 `memtrace leaks` has its answer"
            ),
            Err(TryLockError::Error(error)) => return Err(error).context("cannot lock the journal"),
        }
        let taken = word(&journal, layout::DETAIL_TAKEN)?;
        let asked = word(&journal, layout::DETAIL_ASKED)?;
        let number = DetailRequest::unpack(asked).number.wrapping_add(1);
        let word = DetailRequest { number, steps }.pack();
        Ok(Request { pid, start, steps, journal, word, replaces: asked != taken })
    }

    fn send(self) -> Result<Request> {
        let place = layout::DETAIL_ASKED as u64;
        self.journal.write_all_at(&self.word.to_ne_bytes(), place).context("cannot write the request")?;
        Ok(self)
    }

    /// Returns the answer of the process, or `None` until the process has begun a step.
    ///
    /// # Errors
    /// When the process ended before that.
    pub(super) fn answer(&self) -> Result<Option<String>> {
        let Request { pid, steps, .. } = *self;
        if word(&self.journal, layout::DETAIL_TAKEN)? != self.word {
            if process_start(pid) != Some(self.start) {
                bail!("process {pid} ended before its next step began");
            }
            return Ok(None);
        }
        let answer = DetailAnswer::unpack(word(&self.journal, layout::DETAIL_ANSWER)?);
        let first = i64::from(answer.step);
        let which = if answer.is_full {
            "every step in full already".to_owned()
        } else if steps == 1 {
            format!("step {first} in full")
        } else {
            format!("steps {first} to {} in full", first + i64::from(steps) - 1)
        };
        Ok(Some(format!("process {pid} records {which}")))
    }
}

/// Reads the 8-byte word at the offset `place` of the journal's header. The process writes this word
/// atomically, through its mapping of the file.
fn word(journal: &File, place: usize) -> Result<u64> {
    let mut bytes = [0; 8];
    journal.read_exact_at(&mut bytes, place as u64).context("cannot read the journal")?;
    Ok(u64::from_ne_bytes(bytes))
}

/// Opens the journal that a process has mapped. Fails if this is not the journal `named`.
fn journal_of(pid: u32, named: Option<&Path>) -> Result<File> {
    // A process may map files whose names are not UTF-8. The name of a journal is.
    let maps = match fs::read(format!("/proc/{pid}/maps")) {
        Ok(maps) => String::from_utf8_lossy(&maps).into_owned(),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            bail!(
                "process {pid} belongs to another user, or access to it is not permitted: run this as its \
                   user"
            )
        }
        Err(error) => return Err(error).context(format!("cannot read the mappings of process {pid}")),
    };
    let Some(mapped) = maps.lines().find_map(Mapped::parse) else {
        bail!(
            "process {pid} has no memtrace journal: it is not traced, has not used the GPU yet, or found no local place \
             for a journal (memtrace doctor)"
        );
    };
    if named.is_some_and(|named| named != mapped.path) {
        bail!(
            "the process of this trace has ended or runs elsewhere: process {pid} here writes another trace"
        );
    }
    let journal = mapped.open(pid).with_context(|| format!("cannot open the journal of process {pid}"))?;
    let mut magic = [0; MAGIC.len()];
    journal.read_exact_at(&mut magic, 0).context("cannot read the journal")?;
    if magic != MAGIC || journal.metadata()?.len() < HEADER_BYTES as u64 {
        bail!("process {pid} is traced by another version of memtrace");
    }
    Ok(journal)
}

/// A journal among the mappings of a process.
struct Mapped {
    path: PathBuf,
    inode: u64,
}

impl Mapped {
    /// Parses a line of `/proc/PID/maps`. Returns `None` if its file is not a journal.
    fn parse(line: &str) -> Option<Mapped> {
        // The fields of a line are: addresses, permissions, offset, device, inode, path.
        let path = Path::new(&line[line.find('/')?..]);
        let name = JournalName::parse(path.file_name()?)?;
        let inode = line.split_ascii_whitespace().nth(4)?.parse().ok()?;
        matches!(name, JournalName::Journal(_)).then(|| Mapped { path: path.to_owned(), inode })
    }

    /// Opens the file through the root folder of the process, which may be in a container. Fails if the path
    /// now leads to a file other than the mapped one.
    fn open(&self, pid: u32) -> io::Result<File> {
        let seen = Path::new("/proc").join(pid.to_string()).join("root");
        let path = seen.join(self.path.strip_prefix("/").unwrap_or(&self.path));
        let file = private_file::reopen(&path, OpenOptions::new().read(true).write(true))?;
        if file.metadata()?.ino() != self.inode {
            return Err(io::Error::other("another file now has its name"));
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_find_the_journal_among_the_mappings_of_a_process() {
        let line = "7f0-7f1 rw-s 00000000 00:1a 4711                     /dev/shm/memtrace-12-34.journal";
        let found = Mapped::parse(line).unwrap();
        assert_eq!((found.path.to_str().unwrap(), found.inode), ("/dev/shm/memtrace-12-34.journal", 4711));
        for other in [
            "",
            "7f0-7f1 rw-p 00000000 00:00 0 ",
            "7f0-7f1 r-xp 00000000 08:01 12 /usr/lib/libc.so.6",
            "7f0-7f1 rw-s 00000000 00:1a 4711 /dev/shm/memtrace-12-34.journal (deleted)",
            "7f0-7f1 rw-s 00000000 00:1a 4711 /dev/shm/memtrace-12-34.names",
            "/",
        ] {
            assert!(Mapped::parse(other).is_none(), "{other}");
        }
    }
}
