//! Looks programs up on the PATH.

use std::ffi::OsStr;
use std::path::PathBuf;

/// Returns the path of `program`: `program` itself if it has a `/`, without a check that the file exists; otherwise the
/// first regular file of that name in the folders of the PATH.
pub(crate) fn find_program(program: &OsStr) -> Option<PathBuf> {
    if program.as_encoded_bytes().contains(&b'/') {
        return Some(PathBuf::from(program));
    }
    let folders = std::env::var_os("PATH")?;
    std::env::split_paths(&folders).map(|folder| folder.join(program)).find(|file| file.is_file())
}
