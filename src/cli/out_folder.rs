//! The folder that receives the traces of a launched program.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::args::DEFAULT_FOLDER;

/// The folder that receives the traces. When dropped, removes the folders that this run created and that are
/// empty, so that a program that uses no GPU leaves no folder.
pub(crate) struct OutFolder {
    /// The folder as an absolute path, because the program may change its working directory.
    pub(crate) folder: PathBuf,
    /// The path as the user would type it.
    pub(crate) shown: PathBuf,
    /// The folders that this run created, the innermost first.
    created: Vec<PathBuf>,
}

impl OutFolder {
    /// Returns the folder `wanted`, which is created if it does not exist, or by default a new folder in
    /// [`DEFAULT_FOLDER`].
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub(crate) fn new(wanted: Option<&PathBuf>) -> Result<OutFolder> {
        let parent = Path::new(DEFAULT_FOLDER);
        let created = missing_folders(wanted.map_or(parent, PathBuf::as_path));
        let mut out = OutFolder { folder: PathBuf::new(), shown: PathBuf::new(), created };
        out.shown = match wanted {
            Some(folder) => {
                fs::create_dir_all(folder).with_context(|| cannot_create(folder))?;
                folder.clone()
            }
            None => {
                let folder = new_default_folder()?;
                out.created.insert(0, folder.clone());
                folder
            }
        };
        out.folder = out.shown.canonicalize().with_context(|| out.shown.display().to_string())?;
        Ok(out)
    }
}

impl Drop for OutFolder {
    fn drop(&mut self) {
        for folder in &self.created {
            // An error means that the folder is not empty, or was never created.
            fs::remove_dir(folder).ok();
        }
    }
}

/// Returns `folder` and the folders above it that do not exist, the innermost first.
fn missing_folders(folder: &Path) -> Vec<PathBuf> {
    let missing = folder.ancestors().take_while(|folder| !folder.exists());
    missing.filter(|folder| !folder.as_os_str().is_empty()).map(Path::to_owned).collect()
}

fn cannot_create(folder: &Path) -> String {
    format!("cannot create the folder {}", folder.display())
}

/// Creates `memtrace-out/DATE-TIME`, with a number appended if that folder exists.
fn new_default_folder() -> Result<PathBuf> {
    let now = jiff::Zoned::now().strftime("%Y%m%d-%H%M%S").to_string();
    fs::create_dir_all(DEFAULT_FOLDER).with_context(|| cannot_create(Path::new(DEFAULT_FOLDER)))?;
    for number in 1.. {
        let name = if number == 1 { now.clone() } else { format!("{now}-{number}") };
        let folder = Path::new(DEFAULT_FOLDER).join(name);
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| cannot_create(&folder)),
        }
    }
    unreachable!("the numbers do not end")
}
