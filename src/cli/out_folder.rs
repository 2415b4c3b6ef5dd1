//! The folder that receives the traces of a launched program.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::args::DEFAULT_FOLDER;

/// The folder that receives the traces.
pub(crate) struct OutFolder {
    /// The folder as an absolute path, because the program may change its working directory.
    pub(crate) folder: PathBuf,
    /// The path as the user would type it.
    pub(crate) shown: PathBuf,
    /// True if this run created the folder.
    created: bool,
}

impl OutFolder {
    /// Returns the folder `wanted`, which is created if it does not exist, or by default a new folder in
    /// [`DEFAULT_FOLDER`].
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub(crate) fn new(wanted: Option<&PathBuf>) -> Result<OutFolder> {
        let (shown, created) = match wanted {
            Some(folder) => {
                let created = !folder.exists();
                fs::create_dir_all(folder).with_context(|| cannot_create(folder))?;
                (folder.clone(), created)
            }
            None => (new_default_folder()?, true),
        };
        let folder = shown.canonicalize().with_context(|| shown.display().to_string())?;
        Ok(OutFolder { folder, shown, created })
    }

    /// Removes the folder if this run created it and no trace was written, so that a program that uses no GPU
    /// leaves no folder.
    pub(crate) fn remove_if_empty(&self) {
        if self.created && fs::remove_dir(&self.folder).is_ok() && self.shown.starts_with(DEFAULT_FOLDER) {
            fs::remove_dir(DEFAULT_FOLDER).ok();
        }
    }
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
