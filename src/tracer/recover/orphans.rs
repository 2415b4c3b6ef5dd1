//! The journals of processes that have ended: orphans, and journals that a trace still needs.
//!
//! A journal is orphaned if its process has ended and nothing can be repaired: its trace is gone, or the
//! process was killed before it named a trace. Without a sweep, an orphan would use memory until the host
//! restarts.

use std::ffi::OsStr;
use std::fs::{self, Metadata, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use memtrace_trace::files;
use memtrace_trace::journal::{JournalName, mount_namespace, names_path, process_start};
use memtrace_trace::private_file;

use crate::journal::{Header, is_locked, is_running};
use crate::repair::ends_with_end_row;

/// A recorder needs less than this time to start. Until then, a journal may have no trace name, and a
/// definitions file may have no journal.
const START: Duration = Duration::from_secs(60);
/// If the folder of its trace is not visible, a journal is kept for this time. It may belong to another
/// container, which shares `/dev/shm` but not the folder.
const OUT_OF_SIGHT: Duration = Duration::from_secs(24 * 60 * 60);

/// If the trace is gone, its journal is kept for this time after the recorder last marked it as alive. The
/// user may have moved the folder before any command has finished the trace, or the process was killed before
/// it wrote a row and `begin` creates the trace.
const MOVED: Duration = Duration::from_secs(60 * 60);
/// A journal that is kept because its process was killed and its trace cannot be completed without it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Leftover {
    /// The path of the journal.
    pub journal: PathBuf,
    /// The size of the journal and its definitions file in bytes.
    pub bytes: u64,
    /// The path of the first file of the trace.
    pub trace: PathBuf,
    /// True if the trace is visible to this process.
    pub in_sight: bool,
}

/// The result of a sweep.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The removed journals, each with the size of its files in bytes.
    pub removed: Vec<(PathBuf, u64)>,
    /// The journals that are kept.
    pub left: Vec<Leftover>,
}

/// The state of a journal.
enum JournalState {
    /// A process records, or may record, into the journal.
    InUse,
    /// Nobody can use the journal any longer.
    Orphan,
    /// The trace at this path needs the journal. The flag is true if the trace is visible.
    Needed(PathBuf, bool),
}

/// Removes the orphaned journals of this user from `folders`. `own` is the journal of the calling recorder,
/// which is skipped.
pub fn sweep(folders: &[PathBuf], own: Option<&Path>) -> Swept {
    let mut swept = Swept::default();
    for entry in folders.iter().flat_map(fs::read_dir).flatten().flatten() {
        let path = entry.path();
        if own.is_some_and(|own| own == path || names_path(own) == path) {
            continue;
        }
        let name = entry.file_name();
        match JournalName::parse(&name) {
            Some(JournalName::Journal(pid)) => sweep_journal(path, pid, &mut swept),
            Some(JournalName::Definitions) => {
                let is_alone = !path.with_extension("journal").exists();
                if is_alone && own_file(&path).is_some_and(|data| is_older(&data, START)) {
                    let _ = fs::remove_file(&path);
                }
            }
            None => {}
        }
    }
    swept.left.sort_by(|a, b| a.journal.cmp(&b.journal));
    swept
}

fn sweep_journal(path: PathBuf, pid: u32, swept: &mut Swept) {
    let Some(data) = own_file(&path) else { return };
    let names = names_path(&path);
    let bytes = occupied(&data) + own_file(&names).map_or(0, |data| occupied(&data));
    match state(&path, pid, &data) {
        JournalState::InUse => {}
        JournalState::Needed(trace, in_sight) => {
            swept.left.push(Leftover { journal: path, bytes, trace, in_sight })
        }
        JournalState::Orphan => {
            // The journal is removed last, because its definitions file is not orphaned while the journal
            // exists.
            let _ = fs::remove_file(names);
            if fs::remove_file(&path).is_ok() {
                swept.removed.push((path, bytes));
            }
        }
    }
}

/// Returns the metadata of the file at `path` if it is a regular file of this user. Does not follow a link.
fn own_file(path: &Path) -> Option<Metadata> {
    let data = fs::symlink_metadata(path).ok()?;
    (data.is_file() && data.uid() == rustix::process::geteuid().as_raw()).then_some(data)
}

/// Returns the number of bytes that a file occupies on the disk.
fn occupied(data: &Metadata) -> u64 {
    data.blocks() * 512
}

fn is_older(data: &Metadata, age: Duration) -> bool {
    data.modified().ok().and_then(|time| time.elapsed().ok()).is_some_and(|elapsed| elapsed > age)
}

fn state(path: &Path, pid: u32, data: &Metadata) -> JournalState {
    let Ok(file) = private_file::reopen(path, OpenOptions::new().read(true)) else {
        return JournalState::InUse;
    };
    let Ok(header) = Header::read(&file) else { return JournalState::InUse };
    let Some(header) = header else {
        // The process was killed before it wrote the header, or is about to write the header.
        let is_starting = !is_older(data, START) || process_start(pid).is_some() || is_locked(&file);
        return if is_starting { JournalState::InUse } else { JournalState::Orphan };
    };
    if is_running(&file, &header.run()) {
        return JournalState::InUse;
    }
    // The process may have changed the header before it ended.
    let Ok(Some(header)) = Header::read(&file) else { return JournalState::InUse };
    match header.trace().map(Path::to_owned) {
        Some(first) => {
            let is_same_view = header.mount_namespace() == mount_namespace();
            let keep = if is_same_view { MOVED } else { OUT_OF_SIGHT };
            match look_for(&first) {
                Sight::There if is_complete(&first, &header) => JournalState::Orphan,
                Sight::There => JournalState::Needed(first, true),
                Sight::Gone | Sight::NoFolder if is_older(data, keep) => JournalState::Orphan,
                Sight::Gone | Sight::NoFolder | Sight::Unknown => JournalState::Needed(first, false),
            }
        }
        None if is_older(data, START) => JournalState::Orphan,
        None => JournalState::InUse,
    }
}

/// Returns true if the trace that starts with `first` has its end row. This happens if a repair was killed
/// before it removed the journal. If an earlier trace left a part of the same number, both must have their end
/// row.
fn is_complete(first: &Path, header: &Header) -> bool {
    let last = files::parts_numbered(first, header.part());
    !last.is_empty() && last.iter().all(|part| ends_with_end_row(part).unwrap_or(false))
}

/// The visibility of a trace's files to this process.
enum Sight {
    There,
    Gone,
    /// The folder does not exist, or is in another container.
    NoFolder,
    /// The folder cannot be read.
    Unknown,
}

/// Looks for the files of the trace that started with `first`. That file may have been compressed, or deleted
/// while later parts remain.
fn look_for(first: &Path) -> Sight {
    let (Some(folder), Some(stem)) = (first.parent(), first.file_stem()) else { return Sight::Gone };
    let is_of_trace = |name: &OsStr| {
        name.as_bytes().strip_prefix(stem.as_bytes()).is_some_and(|rest| rest.first() == Some(&b'.'))
    };
    match fs::read_dir(folder) {
        Ok(entries) => {
            let is_there = entries.flatten().any(|entry| is_of_trace(&entry.file_name()));
            if is_there { Sight::There } else { Sight::Gone }
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Sight::NoFolder,
        Err(_) => Sight::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Checkpoints, Left, journal};
    use memtrace_trace::journal::{Run, journal_name, layout};
    use std::fs::File;
    use std::time::SystemTime;

    /// No process has this id, because it exceeds the kernel's limit.
    const NOBODY: u32 = 1 << 23;

    /// The end row of a complete trace.
    const COMPLETE: &str = "2,0,0,1,1,-1,end,0,memtrace,libmemtrace.so,0,0,-1,0,0,0,0,0,-1,(none),(none),(none),(none),\
                            -1,0,0,0,0,killed lost=0\n";

    #[test]
    fn a_sweep_removes_old_journals_without_a_trace_and_nothing_else() {
        let folder = std::env::temp_dir().join(format!("memtrace-sweep-test-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let place = |start_ns| folder.join(journal_name(NOBODY, start_ns));
        let make = |path: &Path, bytes: &[u8], age: u64| {
            fs::write(path, bytes).unwrap();
            let then = SystemTime::now() - Duration::from_secs(age);
            File::options().write(true).open(path).unwrap().set_modified(then).unwrap();
        };
        let run = Run { pid: NOBODY, process_start: 1, ..Run::default() };
        let nameless = journal(&run, &Checkpoints::default(), &[Left::default()]);
        let of_trace = |trace: &Path| {
            let (mut bytes, path) = (nameless.clone(), trace.as_os_str().as_bytes());
            bytes[layout::TRACE..layout::TRACE + path.len()].copy_from_slice(path);
            bytes[layout::TRACE_LEN..layout::TRACE_LEN + 8]
                .copy_from_slice(&(path.len() as u64).to_le_bytes());
            bytes[layout::MOUNT_NAMESPACE..layout::MOUNT_NAMESPACE + 8]
                .copy_from_slice(&mount_namespace().to_le_bytes());
            bytes[layout::CHECKPOINTS] = 1;
            bytes
        };
        let trace = folder.join("trace.csv");
        fs::write(&trace, "").unwrap();

        // Nobody can use these journals -> removed.
        let orphans = [place(1), place(2), place(3), place(4), place(6), place(7)];
        let moved = MOVED.as_secs();
        make(&orphans[0], &nameless, 100);
        make(&names_path(&orphans[0]), b"names", 100);
        make(&orphans[1], b"", 100);
        make(&orphans[2], &of_trace(&folder.join("deleted.csv")), moved + 60);
        make(&orphans[3], &of_trace(Path::new("/nowhere/deleted.csv")), moved + 60);
        let alone = names_path(&place(5));
        make(&alone, b"names", 100);

        // These journals are too recent, needed, possibly from another container, or not journals at all ->
        // kept.
        let needed = place(10);
        make(&needed, &of_trace(&trace), 100);
        let mut elsewhere = of_trace(Path::new("/nowhere/there.csv"));
        elsewhere[layout::MOUNT_NAMESPACE] ^= 1;
        make(&place(11), &elsewhere, moved + 60);
        // The traces may have been moved just now -> kept.
        make(&place(18), &of_trace(&folder.join("moved.csv")), moved - 60);
        make(&place(19), &of_trace(Path::new("/nowhere/moved.csv")), 0);
        let kept =
            [place(12), place(13), names_path(&place(14)), folder.join("memtrace-1.journal"), place(15)];
        make(&kept[0], &nameless, 0);
        make(&kept[1], b"", 0);
        make(&kept[2], b"names", 0);
        make(&kept[3], b"", 100);
        std::os::unix::fs::symlink(&trace, &kept[4]).unwrap();
        // The trace does not exist yet -> the journal is kept.
        let mut unwritten = of_trace(&folder.join("missing.csv"));
        unwritten[layout::CHECKPOINTS] = 0;
        make(&place(17), &unwritten, 300);
        // A repair was killed after it had written the end row -> the trace is complete, so the journal is
        // removed.
        let complete = folder.join("complete.csv");
        fs::write(&complete, COMPLETE).unwrap();
        make(&orphans[5], &of_trace(&complete), 0);
        make(&orphans[4], &unwritten, moved + 60);
        // The journal of the calling recorder -> skipped.
        let own = place(16);
        make(&own, &nameless, 100);

        let swept = sweep(std::slice::from_ref(&folder), Some(&own));
        let mut removed: Vec<_> = swept.removed.iter().map(|(path, _)| path.clone()).collect();
        removed.sort();
        assert_eq!(removed, orphans);
        assert!(!alone.exists() && !names_path(&orphans[0]).exists());
        let left: Vec<_> = swept.left.iter().map(|left| (left.journal.clone(), left.in_sight)).collect();
        assert_eq!(
            left,
            [(needed, true), (place(11), false), (place(17), false), (place(18), false), (place(19), false)]
        );
        assert!(kept.iter().chain([&own]).all(|path| fs::symlink_metadata(path).is_ok()));
        fs::remove_dir_all(&folder).unwrap();
    }
}
