//! Finds the two libraries that belong to this command.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The file name of the library that traces.
pub(crate) const TRACER: &str = "libmemtrace.so";
/// The file name of the library that simulates a GPU.
pub(crate) const PHANTOM: &str = "libmemtrace_phantom.so";

/// The folder in a wheel's package that holds the libraries.
const IN_PACKAGE: &str = "memtrace/lib";

/// Returns the path of the library `name`: in the folder of this command, in a `lib` folder next to that
/// folder, or in the Python package that was installed with this command.
///
/// # Errors
/// When the library is in none of these places.
pub(crate) fn library(name: &str) -> Result<PathBuf> {
    let command = std::env::current_exe().context("cannot find the folder of the command memtrace")?;
    let folder = command.parent().unwrap_or(Path::new("/"));
    let places = places(folder);
    let Some(found) = places.iter().find_map(|place| place.join(name).canonicalize().ok()) else {
        bail!(
            "cannot find {name} beside the memtrace command in {}, or in ../lib. Install memtrace with `pip \
             install .`, or run target/release/memtrace after `cargo build --release`; `cargo install` \
             installs the command without this library",
            folder.display()
        );
    };
    Ok(found)
}

/// Returns the folders that may hold the libraries of a command in `folder`, the most likely first.
fn places(folder: &Path) -> Vec<PathBuf> {
    let lib = folder.join("../lib");
    let mut places = vec![folder.to_owned(), lib.clone(), lib.join("memtrace")];
    let mut packages = Vec::new();
    for python in subfolders(&lib, "python3") {
        // On Debian, the folder is called `dist-packages`, elsewhere `site-packages`.
        packages.extend(["site-packages", "dist-packages"].map(|name| python.join(name)));
    }
    // `pip install --target` puts the packages next to `bin`.
    packages.push(folder.join(".."));
    // Several Pythons may share this command and have different versions of the package. Put the matching
    // version first.
    let info = concat!("gpu_memtrace-", env!("CARGO_PKG_VERSION"), ".dist-info");
    packages.sort_by_key(|packages| !packages.join(info).exists());
    places.extend(packages.iter().map(|packages| packages.join(IN_PACKAGE)));
    places
}

/// Returns the folders in `folder` whose names begin with `prefix`, sorted.
fn subfolders(folder: &Path, prefix: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path())
        .collect();
    folders.sort();
    folders
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_of_this_version_comes_before_that_of_another_python() {
        let root = std::env::temp_dir().join(format!("memtrace-places-{}", std::process::id()));
        for (python, version) in [("python3.10", "0.0.1"), ("python3.9", env!("CARGO_PKG_VERSION"))] {
            let packages = root.join("lib").join(python).join("site-packages");
            std::fs::create_dir_all(packages.join(format!("gpu_memtrace-{version}.dist-info"))).unwrap();
        }
        let bin = root.join("bin");
        std::fs::create_dir(&bin).unwrap();
        let places = places(&bin);
        assert_eq!(places[0], bin);
        assert!(places[3].to_string_lossy().contains("python3.9/site-packages/memtrace/lib"), "{places:?}");
        assert!(places.contains(&bin.join("../memtrace/lib")));
        std::fs::remove_dir_all(&root).unwrap();
    }
}
