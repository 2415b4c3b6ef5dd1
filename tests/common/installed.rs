//! The cache into which scripts such as `scripts/env torch` install programs for the tests.

use std::path::PathBuf;

/// Returns the folder into which the scripts install.
pub(crate) fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("MEMTRACE_CACHE").unwrap_or_else(|| {
        let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        base.expect("HOME is set").join("memtrace")
    })
}

/// Returns the Python of an installed torch, or `None` if it is missing: then the caller must skip its test.
/// With `CI=true` a missing torch fails the test.
pub(crate) fn python(version: &str) -> Option<PathBuf> {
    let folder = cache().join(format!("torch-{version}"));
    if folder.join(".complete").exists() {
        return Some(folder.join("bin/python"));
    }
    missing(&format!("torch {version} is not installed: run scripts/env torch {version}"));
    None
}

/// Skips a test that needs a missing program, with a message; with `CI=true` fails it.
pub(crate) fn missing(why: &str) {
    assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{why}");
    eprintln!("skipped: {why}");
}
