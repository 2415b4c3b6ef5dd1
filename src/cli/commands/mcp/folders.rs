//! The folders whose files an agent may read.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};
use memtrace_trace::files::is_trace;
use memtrace_trace::units::Unit;

/// The maximum number of files and folders that [`Folders::list_runs`] looks at.
const MOST_ENTRIES: usize = 20_000;

/// How many folders below an allowed one the runs are searched.
const MOST_LEVELS: usize = 6;

/// The allowed folders, with symbolic links resolved. There is at least one.
pub(super) struct Folders(Vec<PathBuf>);

/// A folder with traces, or a snapshot of PyTorch.
struct Run {
    path: PathBuf,
    changed: SystemTime,
    bytes: u64,
    files: u64,
}

impl Folders {
    /// Creates the folders of the command line.
    ///
    /// # Errors
    /// When one is not a folder.
    pub(super) fn new<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<Folders> {
        let mut all = Vec::new();
        for path in paths {
            let real = path.canonicalize().with_context(|| format!("{}", path.display()))?;
            if !real.is_dir() {
                bail!("{} is not a folder; memtrace mcp takes the folders of the traces", path.display());
            }
            all.push(real);
        }
        Ok(Folders(all))
    }

    /// Returns the folder at which relative paths start.
    pub(super) fn first(&self) -> &Path {
        &self.0[0]
    }

    /// Returns the real path of `text`, which the agent gave. A file to write need not exist.
    ///
    /// # Errors
    /// When the path, or a link in a folder that it names, is outside the allowed folders, or does not exist.
    pub(super) fn allowed(&self, text: &str, to_write: bool) -> Result<PathBuf, String> {
        let path = self.first().join(text);
        let real = match path.canonicalize() {
            Err(_) if to_write => path.parent().zip(path.file_name()).and_then(|(folder, name)| {
                let folder = folder.canonicalize().ok()?;
                Some(folder.join(name))
            }),
            real => real.ok(),
        };
        let Some(real) = real else { return Err(format!("{text}: no such file or folder")) };
        // If a folder has no trace, memtrace opens the newest of its subfolders that have one.
        let leads_out = |folder: &Path| {
            self.has_link_out(folder)
                || entries(folder).any(|entry| has_trace(&entry.path()) && self.has_link_out(&entry.path()))
        };
        if !self.contains(&real) || leads_out(&real) {
            let all: Vec<String> = self.0.iter().map(|folder| folder.display().to_string()).collect();
            return Err(format!(
                "{text} is outside the folders that this server may read: {}",
                all.join(", ")
            ));
        }
        Ok(real)
    }

    /// Returns true if `folder` has a symbolic link whose target is outside the allowed folders or absent.
    fn has_link_out(&self, folder: &Path) -> bool {
        let mut links = entries(folder).filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_symlink()));
        links.any(|link| !link.path().canonicalize().is_ok_and(|path| self.contains(&path)))
    }

    fn contains(&self, real: &Path) -> bool {
        self.0.iter().any(|folder| real.starts_with(folder))
    }

    /// Lists the runs below the folders, the newest first.
    ///
    /// # Errors
    /// When there is no run.
    pub(super) fn list_runs(&self) -> Result<String, String> {
        let mut runs = Vec::new();
        let mut left = MOST_ENTRIES;
        for folder in &self.0 {
            find_runs(folder, MOST_LEVELS, &mut left, &mut runs);
        }
        if runs.is_empty() {
            return Err(
                "no trace and no snapshot (.pickle) in the folders of this server; a trace comes from: \
                        memtrace run -o out -- python train.py"
                    .to_owned(),
            );
        }
        runs.sort_by_key(|run| std::cmp::Reverse(run.changed));
        let mut text = String::from("trace, files, size, seconds since its last change:\n");
        for run in &runs {
            let path = run.path.strip_prefix(self.first()).unwrap_or(&run.path);
            let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
            let age = run.changed.elapsed().unwrap_or_default().as_secs();
            let size = Unit::Auto.show(run.bytes.cast_signed());
            // Debug output escapes control characters in a name.
            let _ = writeln!(text, "{path:?}  {}  {size}  {age}", run.files);
        }
        if left == 0 {
            text.push_str("(not all folders were searched)\n");
        }
        Ok(text)
    }
}

/// Returns the entries of `folder`; none if it is not a folder that can be read.
fn entries(folder: &Path) -> impl Iterator<Item = fs::DirEntry> {
    fs::read_dir(folder).into_iter().flatten().flatten()
}

/// Returns true if `folder` has a file or a link with the name of a trace.
fn has_trace(folder: &Path) -> bool {
    entries(folder).any(|entry| is_trace(&entry.file_name().to_string_lossy()))
}

/// Adds the runs in `folder` and, for `levels` more levels, below it. Symbolic links are not followed.
fn find_runs(folder: &Path, levels: usize, left: &mut usize, runs: &mut Vec<Run>) {
    let mut run = Run { path: folder.to_owned(), changed: SystemTime::UNIX_EPOCH, bytes: 0, files: 0 };
    for entry in entries(folder) {
        if *left == 0 {
            break;
        }
        *left -= 1;
        let Ok(kind) = entry.file_type() else { continue };
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if kind.is_dir() && levels > 0 && !name.starts_with('.') {
            find_runs(&entry.path(), levels - 1, left, runs);
        }
        let is_snapshot = Path::new(&*name).extension().is_some_and(|kind| kind == "pickle");
        let Ok(file) = entry.metadata() else { continue };
        if !kind.is_file() || !is_snapshot && !is_trace(&name) {
            continue;
        }
        let changed = file.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        if is_snapshot {
            runs.push(Run { path: entry.path(), changed, bytes: file.len(), files: 1 });
        } else {
            run.changed = run.changed.max(changed);
            run.bytes += file.len();
            run.files += 1;
        }
    }
    if run.files > 0 {
        runs.push(run);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_links_that_leave_the_folders_are_refused() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret.csv"), "").unwrap();
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("run")).unwrap();
        fs::create_dir(folder.path().join("linked")).unwrap();
        std::os::unix::fs::symlink(outside.path(), folder.path().join("out")).unwrap();
        let secret = outside.path().join("secret.csv");
        std::os::unix::fs::symlink(&secret, folder.path().join("linked/a.csv")).unwrap();
        // A link one folder below the one that the agent names.
        fs::create_dir_all(folder.path().join("runs/old")).unwrap();
        fs::create_dir_all(folder.path().join("below/new")).unwrap();
        fs::create_dir_all(folder.path().join("code/src")).unwrap();
        fs::write(folder.path().join("runs/old/h.r0.1.csv"), "").unwrap();
        std::os::unix::fs::symlink("h.r0.1.csv", folder.path().join("runs/old/h.r1.2.csv")).unwrap();
        std::os::unix::fs::symlink(&secret, folder.path().join("below/new/h.r0.1.csv")).unwrap();
        std::os::unix::fs::symlink(&secret, folder.path().join("code/src/data")).unwrap();
        let folders = Folders::new([folder.path()].into_iter()).unwrap();
        folders.allowed("runs", false).unwrap();
        folders.allowed("code", false).unwrap();
        assert_eq!(folders.allowed("run", false).unwrap(), folder.path().canonicalize().unwrap().join("run"));
        folders.allowed("run/page.html", true).unwrap();
        for (text, to_write) in [
            ("..", false),
            ("/etc/passwd", false),
            ("out", false),
            ("out/secret.csv", false),
            ("linked", false),
            ("linked/a.csv", false),
            ("below", false),
            ("below/new", false),
            ("run/page.html", false),
            ("../page.html", true),
            ("out/page.html", true),
            ("absent/page.html", true),
            ("linked/a.csv", true),
            ("a\0b", false),
        ] {
            let allowed = folders.allowed(text, to_write);
            assert!(allowed.is_err(), "{text:?}: {allowed:?}");
        }
    }

    #[test]
    fn runs_are_listed_by_folder_and_snapshots_by_file() {
        let folder = tempfile::tempdir().unwrap();
        let folders = Folders::new([folder.path()].into_iter()).unwrap();
        assert!(folders.list_runs().unwrap_err().contains("memtrace run"));
        fs::create_dir_all(folder.path().join("a/b")).unwrap();
        fs::write(folder.path().join("a/b/h.r0.1.csv"), "12345").unwrap();
        fs::write(folder.path().join("a/b/h.r1.2.csv"), "12345").unwrap();
        fs::write(folder.path().join("snapshot.pickle"), "123").unwrap();
        let text = folders.list_runs().unwrap();
        assert!(text.contains("\"a/b\"  2  10 B"), "{text}");
        assert!(text.contains("\"snapshot.pickle\"  1  3 B"), "{text}");
        assert_eq!(text.lines().count(), 3, "{text}");
    }
}
