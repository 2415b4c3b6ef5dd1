//! Where `scripts/torch-env` and its like install what tests need.

use std::path::PathBuf;

/// The folder that the project's scripts install into, as they find it.
pub(crate) fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("MEMTRACE_CACHE").unwrap_or_else(|| {
        let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        base.expect("HOME is set").join("memtrace")
    })
}

/// The python of an installed torch; one that is missing skips its test, and with `CI=true` fails it.
pub(crate) fn python(version: &str) -> Option<PathBuf> {
    let folder = cache().join(format!("torch-{version}"));
    if folder.join(".complete").exists() {
        return Some(folder.join("bin/python"));
    }
    let why = format!("torch {version} is not installed: run scripts/torch-env {version}");
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{why}");
    eprintln!("skipped: {why}");
    None
}
