//! The folder that receives the traces of a launched program.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::args::DEFAULT_FOLDER;

/// Where the traces go.
pub(crate) struct OutFolder {
    /// Absolute: the program may change its working directory.
    pub(crate) folder: PathBuf,
    /// As the user would type it.
    pub(crate) shown: PathBuf,
    made: bool,
}

impl OutFolder {
    pub(crate) fn new(wanted: Option<&PathBuf>) -> Result<OutFolder> {
        let (shown, made) = match wanted {
            Some(folder) => {
                let made = !folder.exists();
                fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
                (folder.clone(), made)
            }
            None => (new_folder()?, true),
        };
        let folder = shown.canonicalize().with_context(|| shown.display().to_string())?;
        Ok(OutFolder { folder, shown, made })
    }

    /// A program without a GPU must leave nothing.
    pub(crate) fn remove_if_empty(&self) {
        if self.made && fs::remove_dir(&self.folder).is_ok() && self.shown.starts_with(DEFAULT_FOLDER) {
            fs::remove_dir(DEFAULT_FOLDER).ok();
        }
    }
}

/// `memtrace-out/<date>-<time>`, with a number behind it when it is taken.
fn new_folder() -> Result<PathBuf> {
    let now = jiff::Zoned::now().strftime("%Y%m%d-%H%M%S").to_string();
    fs::create_dir_all(DEFAULT_FOLDER).context(DEFAULT_FOLDER)?;
    for number in 1.. {
        let name = if number == 1 { now.clone() } else { format!("{now}-{number}") };
        let folder = Path::new(DEFAULT_FOLDER).join(name);
        match fs::create_dir(&folder) {
            Ok(()) => return Ok(folder),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error).with_context(|| folder.display().to_string()),
        }
    }
    unreachable!("there is no last number")
}
