//! The files of the machine tables in shared memory, one per machine.
//!
//! A file is named `/dev/shm/memtrace-phantom-UID-ID-HASH`, and only its user can open it. `HASH` is a hash
//! of the PID namespace, the identifier and the request. So processes that request other cards are on another
//! machine, and so are the processes of another container, whose process ids mean other processes. Each process
//! holds a shared lock on the file, which the kernel releases when the process ends. The next machine removes a
//! file that has neither a lock nor a living process.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use memtrace_cards::Spec;

use crate::DEFAULT_CUDA_VERSION;
use crate::process::Process;
use crate::table::{self, ProcessUse, Table, WORDS};

/// The folder of all tables, in memory that processes share.
const FOLDER: &str = "/dev/shm";
/// `O_NOFOLLOW` and `O_NONBLOCK` on Linux. With them, a link of another user is rejected, and opening a FIFO
/// does not block.
const NO_LINK: i32 = 0o400_000 | 0o4000;
/// The maximum number of characters of an identifier in a file name.
const MAX_ID: usize = 80;

/// A snapshot of a machine's state.
#[derive(Debug, Clone)]
pub struct Machine {
    /// The identifier of the machine, which its processes have in the variable `MEMTRACE_PHANTOM_MACHINE`.
    pub id: String,
    /// The cards of the machine.
    pub spec: Spec,
    /// The processes that have not ended.
    pub processes: Vec<ProcessUse>,
    /// The state of each card.
    pub cards: Vec<CardState>,
}

/// The state of one card.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CardState {
    /// True if the card has fallen off the bus.
    pub lost: bool,
    /// The number of uncorrectable ECC errors.
    pub ecc_errors: u64,
}

impl Machine {
    /// Creates a machine without processes.
    #[must_use]
    pub fn empty(id: &str, spec: Spec) -> Self {
        let cards = vec![CardState::default(); spec.count as usize];
        Self { id: id.to_owned(), spec, processes: Vec::new(), cards }
    }

    /// Reads the state of a machine from its table.
    #[must_use]
    pub fn from_table(table: &Table<'_>, id: &str, spec: Spec) -> Self {
        let cards = spec.count as usize;
        let state = |card| CardState { lost: table.is_lost(card), ecc_errors: table.ecc_errors(card) };
        let (processes, cards) = (table.processes(cards), (0..cards).map(state).collect());
        Self { id: id.to_owned(), spec, processes, cards }
    }

    /// Returns the ids of the processes with a context on a card, and the bytes that each uses there.
    pub fn processes_on(&self, card: usize) -> impl Iterator<Item = (u32, u64)> {
        let on_card = self.processes.iter().filter_map(move |each| Some((each, each.cards.get(card)?)));
        on_card.filter(|(_, at)| at.context.is_some()).map(|(each, at)| (each.process.pid, at.bytes()))
    }

    /// Returns the total time that a card has worked for its processes, in nanoseconds of simulated time.
    #[must_use]
    pub fn busy_ns(&self, card: usize) -> u64 {
        let times = self.processes.iter().filter_map(|each| Some(each.cards.get(card)?.busy_ns));
        times.fold(0, u64::saturating_add)
    }

    /// Returns the bytes in use on a card, including the bytes of simulated other processes (`others=`).
    #[must_use]
    pub fn used(&self, card: usize) -> u64 {
        let bytes = self.processes.iter().filter_map(|process| process.cards.get(card)).map(|at| at.bytes());
        bytes.fold(self.spec.others, u64::saturating_add).min(self.spec.memory)
    }

    /// Returns the CUDA version of the driver: the newest runtime version of the processes.
    #[must_use]
    pub fn cuda_version(&self) -> u32 {
        let newest = self.processes.iter().map(|process| process.cuda_version).max();
        newest.filter(|&version| (1_000..1_000_000).contains(&version)).unwrap_or(DEFAULT_CUDA_VERSION)
    }
}

/// Returns the user id of this process.
fn user() -> u32 {
    fs::metadata("/proc/self").map_or(u32::MAX, |about| about.uid())
}

/// Returns the FNV-1a hash of `bytes` for a file name. It is the same in every build.
pub(crate) fn hash(bytes: &[u8]) -> u32 {
    bytes.iter().fold(0x811c_9dc5, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193))
}

fn beginning() -> String {
    format!("memtrace-phantom-{}-", user())
}

/// Returns the path of the file for a machine identifier and a request for cards, in this process's PID namespace.
#[must_use]
pub fn path_of(id: &str, request: &str) -> PathBuf {
    // The link's text has the namespace's inode.
    path_in(&fs::read_link("/proc/self/ns/pid").unwrap_or_default(), id, request)
}

/// Same as [`path_of`], in a given PID namespace. The hash tells identifiers apart that the name shortens to the
/// same text.
fn path_in(namespace: &Path, id: &str, request: &str) -> PathBuf {
    let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    // No part contains a NUL, so each triple has its own text.
    let hash = hash(format!("{}\0{id}\0{request}", namespace.display()).as_bytes());
    let id: String = id.chars().take(MAX_ID).map(safe).collect();
    Path::new(FOLDER).join(format!("{}{id}-{hash:08x}", beginning()))
}

/// Rejects a file that is not a private file of this user, because another user may have created a file with
/// this name.
fn check(file: &File) -> io::Result<()> {
    let about = file.metadata()?;
    if about.is_file() && about.uid() == user() && about.mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "the file is not private to this user"))
}

/// Opens the table of a machine for mapping, and creates it if it does not exist. The file has a shared lock
/// until it is closed.
///
/// # Errors
/// Returns an error if the file cannot be opened or filled, if it is not a private file of this user, or if
/// it is not a table.
pub fn open_or_create(path: &Path, request: &str) -> io::Result<File> {
    let no_table = || io::Error::new(io::ErrorKind::InvalidData, "the file is not a table");
    let file = open_locked(path, |file| {
        let words = table::new_words(request).ok_or_else(no_table)?;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        // The bytes are written, because setting the size alone would reserve no space: on a full file
        // system, a later store into the mapping would end the program.
        if let Err(error) = file.write_all(&bytes) {
            fs::remove_file(path).ok();
            return Err(error);
        }
        sweep();
        Ok(())
    })?;
    if file.metadata()?.len() == (WORDS * 8) as u64 { Ok(file) } else { Err(no_table()) }
}

/// Opens a file that processes of this user share, and creates it if it does not exist. The file has a shared
/// lock until it is closed, so that [`sweep`] does not remove it. If the file is empty, the first process
/// calls `fill` before any other process gets its lock.
///
/// # Errors
/// Returns an error if the file cannot be opened or filled, or if it is not a private file of this user.
pub fn open_locked(path: &Path, fill: impl Fn(&mut File) -> io::Result<()>) -> io::Result<File> {
    // Another process may remove the file between the open and the lock, and create it again. In that case,
    // the next iteration opens the new file.
    for _ in 0..100 {
        let mut options = OpenOptions::new();
        let mut file =
            options.read(true).write(true).create(true).mode(0o600).custom_flags(NO_LINK).open(path)?;
        check(&file)?;
        // Only the first process gets the exclusive lock, and fills the file. The others wait for their
        // shared lock until the file is filled.
        let is_first = file.try_lock().is_ok();
        if is_first && file.metadata()?.len() == 0 {
            fill(&mut file)?;
        }
        file.lock_shared()?;
        if file.metadata()?.nlink() > 0 {
            return Ok(file);
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "other processes remove the file again and again"))
}

/// Reads the state of the machine with the table in this file. Returns `None` if the file is not a valid
/// table.
#[must_use]
pub fn read(path: &Path) -> Option<Machine> {
    let mut file = OpenOptions::new().read(true).custom_flags(NO_LINK).open(path).ok()?;
    check(&file).ok()?;
    if file.metadata().ok()?.len() != (WORDS * 8) as u64 {
        return None;
    }
    let mut bytes = vec![0; WORDS * 8];
    file.read_exact(&mut bytes).ok()?;
    let (words, _) = bytes.as_chunks::<8>();
    let words: Vec<AtomicU64> = words.iter().map(|word| AtomicU64::new(u64::from_le_bytes(*word))).collect();
    let table = Table::new(&words)?;
    let spec = table.spec()?;
    let name = path.file_name()?.to_str()?;
    let id = name.strip_prefix(&beginning())?.rsplit_once('-')?.0.to_owned();
    Some(Machine::from_table(&table, &id, spec))
}

/// Returns the path of the memory through which the ranks of an NCCL communicator exchange messages. It is
/// removed by [`sweep`] like a table, so each rank holds a shared lock on it.
#[must_use]
pub fn path_of_mailbox(communicator: u64) -> PathBuf {
    Path::new(FOLDER).join(format!("{}nccl-{communicator:016x}", beginning()))
}

/// Returns the paths of the files of this user: tables, and mailboxes of ranks.
fn paths() -> Vec<PathBuf> {
    let beginning = beginning();
    let entries = fs::read_dir(FOLDER).into_iter().flatten().flatten();
    let of_user = entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&beginning));
    let mut paths: Vec<PathBuf> = of_user.map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Returns the machines of this user on which a process runs.
#[must_use]
pub fn running() -> Vec<Machine> {
    let machines = paths().into_iter().filter_map(|path| read(&path));
    machines.filter(|machine| !machine.processes.is_empty()).collect()
}

/// Removes the tables of machines on which no process runs any longer, and mailboxes without ranks.
pub fn sweep() {
    for path in paths() {
        let Ok(file) = OpenOptions::new().read(true).write(true).custom_flags(NO_LINK).open(&path) else {
            continue;
        };
        if check(&file).is_err() {
            continue;
        }
        match file.try_lock() {
            // A process loses its lock when it closes all its files, but it may still run. So the file is
            // removed only if the table has no running process, either.
            Ok(()) if read(&path).is_none_or(|machine| machine.processes.is_empty()) => {
                fs::remove_file(&path).ok();
            }
            Ok(()) | Err(TryLockError::WouldBlock | TryLockError::Error(_)) => {}
        }
    }
}

/// Returns an identifier for a new machine that starts with the calling process.
#[must_use]
pub fn new_id() -> String {
    let process = Process::current();
    format!("{}-{}", process.pid, process.start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_is_private_shared_and_swept() {
        let id = format!("test-{}", std::process::id());
        let path = path_of(&id, "t4");
        let first = open_or_create(&path, "t4").unwrap();
        let second = open_or_create(&path, "t4").unwrap();
        assert_eq!(first.metadata().unwrap().mode() & 0o777, 0o600);
        assert_eq!(first.metadata().unwrap().ino(), second.metadata().unwrap().ino());
        let machine = read(&path).unwrap();
        assert_eq!((machine.id.as_str(), machine.spec.base.id, machine.used(0)), (id.as_str(), "t4", 0));
        // Setup: no process has a slot, and the file is locked -> the machine does not count as running, and
        // its file stays.
        assert!(running().iter().all(|machine| machine.id != id));
        sweep();
        assert!(path.exists());
        drop((first, second));
        // Another test may start a process. Until it runs its program, it has inherited the two open files,
        // so the file may stay locked for a moment.
        for _ in 0..1_000 {
            sweep();
            if !path.exists() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("{} was not swept", path.display());
    }

    #[test]
    fn hostile_files_are_refused_and_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("elsewhere"), "precious").unwrap();
        std::os::unix::fs::symlink(at("elsewhere"), at("link")).unwrap();
        assert!(open_or_create(&at("link"), "t4").is_err() && read(&at("link")).is_none());
        // Setup: other users can read the file -> it is rejected.
        fs::write(at("public"), "").unwrap();
        assert!(open_or_create(&at("public"), "t4").is_err());
        for (name, bytes) in [("short", 100), ("zeros", WORDS * 8), ("long", WORDS * 9)] {
            let mut options = OpenOptions::new();
            let mut file =
                options.write(true).create(true).truncate(true).mode(0o600).open(at(name)).unwrap();
            file.write_all(&vec![0; bytes]).unwrap();
            assert!(read(&at(name)).is_none(), "{name}");
        }
        assert!(open_or_create(&at("short"), "t4").is_err());
        let fifo = std::process::Command::new("mkfifo").args(["-m", "600"]).arg(at("fifo")).status().unwrap();
        assert!(fifo.success() && open_or_create(&at("fifo"), "t4").is_err() && read(&at("fifo")).is_none());
        assert_eq!(fs::read_to_string(at("elsewhere")).unwrap(), "precious");
        assert!(path_of("../../etc/passwd", "t4").starts_with(FOLDER));
        assert!(!path_of("../x", "t4").to_string_lossy().contains("/../"));
    }

    #[test]
    fn other_cards_and_other_identifiers_are_another_machine() {
        assert_ne!(path_of("a", "t4"), path_of("a", "l4"));
        let namespace = |inode: &str| path_in(Path::new(inode), "a", "t4");
        assert_ne!(namespace("pid:[4026531836]"), namespace("pid:[4026532200]"));
        let long = "x".repeat(MAX_ID);
        assert_ne!(path_of("a/b", "t4"), path_of("a_b", "t4"));
        assert_ne!(path_of(&format!("{long}1"), "t4"), path_of(&format!("{long}2"), "t4"));
        assert_eq!(Machine::empty("a", Spec::parse("2xt4,others=1g").unwrap()).used(1), 1 << 30);
    }
}
