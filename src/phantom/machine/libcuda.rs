//! The folder in which Triton finds the simulated GPU as the driver's library.
//!
//! Triton links the code that it compiles against `libcuda`. It searches for this library in the first folder
//! in [`FOLDER_VARIABLE`], or else the folders that `ldconfig` lists. On a machine without a GPU, `ldconfig`
//! lists none.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

/// The environment variable that names the folder for Triton.
pub const FOLDER_VARIABLE: &str = "TRITON_LIBCUDA_PATH";

/// The names under which Triton links the library: version 3.2 with `-lcuda`, later versions with the full
/// name.
const NAMES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// Creates links to the library in a folder, under the driver's names. Existing links to the same library
/// stay.
///
/// # Errors
/// Returns an error if the folder cannot be written.
pub fn link(folder: &Path, library: &Path) -> io::Result<()> {
    for name in NAMES {
        let name = folder.join(name);
        if fs::read_link(&name).is_ok_and(|target| target == library) {
            continue;
        }
        // Another process may create the links at the same time. The rename replaces its link atomically.
        let new = name.with_extension(format!("{}.new", std::process::id()));
        symlink(library, &new)?;
        fs::rename(&new, &name)?;
    }
    Ok(())
}

/// Returns this user's folder with the links to a library, and creates it if necessary. It is in the folder
/// of temporary files and the same for every process.
///
/// # Errors
/// Returns an error if the folder cannot be created, or if other users can write to it.
pub fn folder(library: &Path, user: u32) -> io::Result<PathBuf> {
    let folder = std::env::temp_dir().join(format!("memtrace-libcuda-{user}-{:08x}", hash(library)));
    match DirBuilder::new().mode(0o700).create(&folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    // Another user may have created the folder, so that this user's programs load a library of that user.
    // Such a folder is rejected.
    let about = fs::symlink_metadata(&folder)?;
    if !about.is_dir() || about.uid() != user || about.mode() & 0o022 != 0 {
        return Err(io::Error::other(format!("other users can write to {}", folder.display())));
    }
    link(&folder, library)?;
    Ok(folder)
}

/// Returns the hash of a path.
fn hash(path: &Path) -> u32 {
    crate::files::hash(path.as_os_str().as_encoded_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_links_lead_to_the_library_and_are_made_once() {
        let folder = tempfile::TempDir::new().unwrap();
        for library in ["/a/one.so", "/a/one.so", "/b/two with a space.so"] {
            link(folder.path(), Path::new(library)).unwrap();
            for name in NAMES {
                assert_eq!(fs::read_link(folder.path().join(name)).unwrap(), Path::new(library));
            }
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), NAMES.len());
        assert!(link(&folder.path().join("absent"), Path::new("/a")).is_err());
    }

    #[test]
    fn the_folder_of_another_user_is_refused() {
        let user = fs::metadata("/proc/self").unwrap().uid();
        let library = PathBuf::from(format!("/libcuda-test-{}.so", std::process::id()));
        let made = folder(&library, user).unwrap();
        assert_eq!(folder(&library, user).unwrap(), made);
        // Setup: the folder of another user's id belongs to this user -> it is rejected.
        let theirs = folder(&library, user + 1).unwrap_err().to_string();
        assert!(theirs.contains("other users can write to"), "{theirs}");
        for user in [user, user + 1] {
            let name = format!("memtrace-libcuda-{user}-{:08x}", hash(&library));
            fs::remove_dir_all(std::env::temp_dir().join(name)).unwrap();
        }
    }
}
