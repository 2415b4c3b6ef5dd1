//! Functions that open a file, such as a trace, a journal or a log, at a path that cannot be trusted.
//!
//! The path may come from an environment variable that another user has set, and other users may have access
//! to the folder. Therefore, a link is never followed, opening a FIFO never blocks, and an existing file is
//! used only if it belongs to this user.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, OFlags, Timespec, Timestamps, UTIME_NOW, utimensat};

/// Creates a file that does not exist yet. Only its owner can read it.
///
/// # Errors
/// Returns an error if the file exists or cannot be created.
pub fn create(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().read(true).write(true).create_new(true))
}

/// Opens an existing file that this process has created, or whose owner the caller checks. The owner is not checked
/// here, because a file system may change the owner of all files (NFS with `root_squash`).
///
/// # Errors
/// Returns an error if the file cannot be opened, is a link, or is not a regular file.
pub fn reopen(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    open(path, options)
}

/// Opens an existing file for appending. Another user may have created the file.
///
/// # Errors
/// Returns an error if the file cannot be opened, is a link, is not a regular file, or belongs to another
/// user. A file with several names is rejected, too: one of them may be a hard link to an unrelated file.
pub fn append(path: &Path) -> io::Result<File> {
    let file = open(path, OpenOptions::new().append(true))?;
    let found = file.metadata()?;
    if found.uid() != rustix::process::geteuid().as_raw() {
        return Err(refused("it belongs to another user"));
    }
    if found.nlink() > 1 {
        return Err(refused("it has a second name (a hard link)"));
    }
    Ok(file)
}

/// Same as [`append`], but creates the file if it does not exist.
///
/// # Errors
/// Same as [`append`].
pub fn append_or_create(path: &Path) -> io::Result<File> {
    match open(path, OpenOptions::new().append(true).create_new(true)) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => append(path),
        result => result,
    }
}

/// Sets the time of the last change of a file to now. Opens no file, because closing a descriptor of a locked
/// file may release the lock.
///
/// # Errors
/// Returns an error if the file does not exist or belongs to another user.
pub fn touch(path: &Path) -> io::Result<()> {
    let now = Timespec { tv_sec: 0, tv_nsec: UTIME_NOW };
    let times = Timestamps { last_access: now, last_modification: now };
    Ok(utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    // `NONBLOCK`, because opening a FIFO would otherwise wait for a reader or a writer.
    let flags = OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = options.mode(0o600).custom_flags(flags.bits() as i32).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(refused("it is not a regular file")) }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    /// A temporary folder, removed at the end.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let path = std::env::temp_dir().join(format!("memtrace-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn a_touched_file_was_changed_just_now_and_a_link_is_not_followed() {
        let folder = Folder::new("touched-file");
        let path = folder.0.join("own");
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        create(&path).unwrap().set_modified(long_ago).unwrap();
        let changed = || fs::metadata(&path).unwrap().modified().unwrap();
        symlink(&path, folder.0.join("link")).unwrap();
        touch(&folder.0.join("link")).unwrap();
        assert_eq!(changed(), long_ago);
        touch(&path).unwrap();
        assert!(changed() > long_ago);
        touch(&folder.0.join("absent")).unwrap_err();
    }

    #[test]
    fn a_file_for_writing_is_never_a_link_a_fifo_or_a_file_with_two_names() {
        let folder = Folder::new("private-file");
        let path = |name: &str| folder.0.join(name);
        append(&path("own")).unwrap_err();
        append_or_create(&path("own")).unwrap();
        append_or_create(&path("own")).unwrap();
        assert_eq!(create(&path("own")).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
        assert_eq!(fs::metadata(path("own")).unwrap().mode() & 0o777, 0o600);
        symlink(path("own"), path("link")).unwrap();
        append(&path("link")).unwrap_err();
        symlink(path("nothing"), path("dangling")).unwrap();
        append_or_create(&path("dangling")).unwrap_err();
        reopen(&path("link"), OpenOptions::new().write(true)).unwrap_err();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("fifo"),
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RWXU,
            0,
        )
        .unwrap();
        append(&path("fifo")).unwrap_err();
        reopen(&path("fifo"), OpenOptions::new().read(true).write(true)).unwrap_err();
        fs::hard_link(path("own"), path("second")).unwrap();
        assert_eq!(append(&path("own")).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn a_file_for_writing_is_never_one_of_another_user() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let folder = Folder::new("private-file-user");
        let path = folder.0.join("theirs");
        create(&path).unwrap();
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        let refused = append(&path).unwrap_err();
        assert_eq!(refused.to_string(), "it belongs to another user");
    }
}
