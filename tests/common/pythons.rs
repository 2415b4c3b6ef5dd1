//! The Python interpreters of this machine.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the interpreters by version: those on the path, and pyenv's.
/// `MEMTRACE_STACKS=python` supports 3.9 to 3.15.
pub(crate) fn pythons() -> BTreeMap<(u32, u32), PathBuf> {
    let mut candidates: Vec<PathBuf> = (9..=15).map(|minor| format!("python3.{minor}").into()).collect();
    candidates.push("python3".into());
    let versions = std::env::var_os("PYENV_ROOT").map(|root| Path::new(&root).join("versions"));
    if let Some(folders) = versions.and_then(|versions| fs::read_dir(versions).ok()) {
        candidates.extend(folders.map(|folder| folder.unwrap().path().join("bin/python3")));
    }
    let version_query = "import sys; print(*sys.version_info[:2], sys.executable)";
    let mut found = BTreeMap::new();
    for candidate in candidates {
        let Ok(output) = Command::new(candidate).args(["-c", version_query]).output() else { continue };
        let line = String::from_utf8(output.stdout).unwrap();
        let [major, minor, path] = line.trim().splitn(3, ' ').collect::<Vec<_>>()[..] else { continue };
        found.insert((major.parse().unwrap(), minor.parse().unwrap()), path.into());
    }
    found.retain(|version, _| ((3, 9)..=(3, 15)).contains(version));
    found
}
