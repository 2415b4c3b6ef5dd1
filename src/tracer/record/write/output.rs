//! Creates the files of a trace, and selects the folders for its journal.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use memtrace_trace::{files, private_file};

/// Returns the folders that can hold a journal of `bytes`, best first: memory, then a local disk. A journal
/// takes at most a quarter of the free space, because `/dev/shm` belongs to the program and may have only 64
/// MiB in a container.
pub(crate) fn journal_folders(bytes: usize) -> Vec<PathBuf> {
    let mut folders = memtrace_trace::journal::folders();
    let is_safe = |folder: &PathBuf| stat(folder).is_some_and(|stat| keeps_reservations(stat.f_type));
    folders.retain(|folder| is_safe(folder) && free_bytes(folder) / 4 >= bytes as u64);
    folders
}

fn stat(folder: &Path) -> Option<libc::statfs> {
    use std::os::unix::ffi::OsStrExt;
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes()).ok()?;
    // SAFETY: all zero is valid for this plain struct.
    let mut stat: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the path ends in 0 and `stat` is valid for the answer.
    (unsafe { libc::statfs(path.as_ptr(), &raw mut stat) } == 0).then_some(stat)
}

fn free_bytes(folder: &Path) -> u64 {
    stat(folder).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_bsize as u64))
}

/// Returns true if no store to a mapped file can fault once its room is reserved: the file system is in
/// memory, or on a disk of this host and writes in place.
///
/// A mapping of a network file can fault. A file system that copies on write (btrfs, ZFS, F2FS) needs new
/// room for each store, in spite of the reservation. On a full disk, such a store raises SIGBUS. An overlay
/// passes the reservation on to the file system below it, which is mostly ext4 or xfs; no system call returns
/// which file system that is.
fn keeps_reservations(file_system: i64) -> bool {
    const EXT: i64 = 0xEF53;
    const TMPFS: i64 = 0x0102_1994;
    const XFS: i64 = 0x5846_5342;
    const OVERLAY: i64 = 0x794C_7630;
    [EXT, TMPFS, XFS, OVERLAY].contains(&file_system)
}

/// Creates the trace `<name>.csv` in `folder`, private and new, never through a link. Adds a number if files
/// of an earlier trace have the name. Calls `announce` with each path before the file at this path is created.
pub(crate) fn create_trace(
    folder: &Path,
    name: &str,
    announce: impl Fn(&Path),
) -> io::Result<(File, PathBuf)> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
    create_numbered(|suffix| {
        let path = folder.join(files::trace_name(name, suffix));
        if files::is_taken(&path) {
            return None;
        }
        announce(&path);
        Some(path)
    })
}

/// Creates the file of a later part in the folder of the first. Until its opening rows are complete, the file
/// has a name that is not recognized as a trace.
pub(crate) fn create_part(first: &Path, part: u32) -> io::Result<(File, PathBuf)> {
    create_numbered(|suffix| {
        let path = files::unfinished_part(first, part, suffix);
        (!files::is_taken(&files::finished_part(&path))).then_some(path)
    })
}

/// Gives a finished file its final name `to`, which must be free. A hard link fails if another file has the
/// name, so that no file is replaced.
pub(super) fn publish(from: &Path, to: &Path) -> io::Result<()> {
    if fs::hard_link(from, to).is_ok() {
        fs::remove_file(from)
    } else if to.symlink_metadata().is_ok() {
        Err(io::Error::new(io::ErrorKind::AlreadyExists, to.display().to_string()))
    } else {
        // The file system has no hard links.
        fs::rename(from, to)
    }
}

/// Creates the first of `name("")`, `name("-2")`, ... that does not exist. `name` returns `None` if the name
/// is taken.
fn create_numbered(name: impl Fn(&str) -> Option<PathBuf>) -> io::Result<(File, PathBuf)> {
    for attempt in 1..1000 {
        let suffix = if attempt == 1 { String::new() } else { format!("-{attempt}") };
        let Some(path) = name(&suffix) else { continue };
        match create_private(&path) {
            Ok(file) => return Ok((file, path)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other("every name is taken"))
}

/// Creates a file that only its owner can read: new, never through a link. Its descriptor gets a high number.
/// Programs that close unknown descriptors, such as daemons, usually stop before such a number, and would
/// soon reuse a low number for another file.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    let file = private_file::create(path)?;
    const HIGH: libc::c_int = 900;
    // SAFETY: duplicates an open descriptor; on success nothing else owns the new one.
    let high = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH) };
    if high < 0 {
        // The process's limit may not allow descriptors with such high numbers.
        return Ok(file);
    }
    // SAFETY: see above.
    Ok(unsafe { File::from_raw_fd(high) })
}

/// Checks that the open `file` is still the file at `path`, and returns an error otherwise. The folder of the
/// trace may be removed, and a descriptor that the program closed may refer to another file by now.
pub(crate) fn still_ours(file: &File, path: &Path) -> io::Result<()> {
    let gone = |_| io::Error::other("the file was removed");
    let (open, there) = (file.metadata()?, fs::symlink_metadata(path).map_err(gone)?);
    if (open.dev(), open.ino()) == (there.dev(), there.ino()) {
        Ok(())
    } else {
        Err(io::Error::other("the file was replaced, or the program closed its descriptor"))
    }
}

/// Cuts the incomplete last line that a failed write left.
///
/// # Errors
/// Returns an error, and changes nothing, if the file is no longer the trace.
pub(crate) fn cut_to_whole_lines(file: &File, path: &Path) -> io::Result<()> {
    still_ours(file, path)?;
    file.set_len(memtrace_recover::whole_lines(path, u64::MAX)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_takes_no_name_of_which_a_file_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for left in
            ["run.csv", "run.csv.gz", "run.csv.zst", "run.csv.unfinished", "run.stacks", "run.stacks.csv"]
        {
            fs::write(at(left), "").unwrap();
            let (_, trace) =
                create_trace(folder.path(), "run", |path| assert_eq!(path, at("run-2.csv"))).unwrap();
            assert_eq!(trace, at("run-2.csv"), "{left}");
            fs::remove_file(trace).unwrap();
            fs::remove_file(at(left)).unwrap();
        }
        let first = create_trace(folder.path(), "run", |_| {}).unwrap().1;
        assert_eq!(first, at("run.csv"));
        for left in ["run.part2.csv", "run.part2.csv.zst", "run.part2.csv.unfinished", "run.part2.stacks"] {
            fs::write(at(left), "").unwrap();
            let part = create_part(&first, 2).unwrap().1;
            let finished = files::finished_part(&part);
            publish(&part, &finished).unwrap();
            assert!(finished == at("run.part2-2.csv") && !part.exists(), "{left}");
            fs::remove_file(at("run.part2-2.csv")).unwrap();
            fs::remove_file(at(left)).unwrap();
        }
    }

    #[test]
    fn a_journal_is_never_on_a_file_system_that_copies_on_write_or_is_remote() {
        // Names of file systems, their magic numbers (statfs(2)), and whether they keep reservations.
        for (name, file_system, is_safe) in [
            ("tmpfs", 0x0102_1994, true),
            ("ext4", 0xEF53, true),
            ("xfs", 0x5846_5342, true),
            ("overlay", 0x794C_7630, true),
            ("btrfs", 0x9123_683E, false),
            ("zfs", 0x2FC1_2FC1, false),
            ("f2fs", 0xF2F5_2010, false),
            ("nfs", 0x6969, false),
            ("fuse", 0x6573_5546, false),
        ] {
            assert_eq!(keeps_reservations(file_system), is_safe, "{name}");
        }
    }
}
