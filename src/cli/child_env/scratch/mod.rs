//! The temporary folder of a launch.

mod abandoned;

use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use memtrace_trace::hello;

/// Returns a new identifier that all processes of one launch share, and no other launch has.
pub(crate) fn run_id() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", now.as_nanos(), std::process::id())
}

/// The facts that the tracers of a launch reported in the file [`Scratch::hello`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct TracerFacts {
    /// True if a tracer was loaded into a program.
    pub(crate) was_loaded: bool,
    /// True if a tracer could not write a trace. That tracer has printed the reason.
    pub(crate) failed: bool,
}

impl TracerFacts {
    /// Returns the facts of two programs together: each is true if it is true for at least one program.
    pub(crate) fn and(self, other: TracerFacts) -> TracerFacts {
        TracerFacts { was_loaded: self.was_loaded || other.was_loaded, failed: self.failed || other.failed }
    }
}

/// Returns the run id in the name of a [`Scratch`] folder, and the time at which that run started, in
/// nanoseconds since 1970. Returns `None` for any other name.
fn run_id_of(name: &str) -> Option<(&str, u64)> {
    let rest = name.strip_prefix("memtrace-")?;
    let run_id = match rest.rsplit_once("-r") {
        Some((run_id, rank)) => rank.parse::<u32>().map(|_| run_id).ok()?,
        None => rest,
    };
    let (started, process) = run_id.split_once('-')?;
    u32::from_str_radix(process, 16).ok()?;
    Some((run_id, u64::from_str_radix(started, 16).ok()?))
}

/// A private temporary folder for one launch, removed when dropped. If this command is killed first, later
/// launches remove it ([`abandoned`]).
pub(crate) struct Scratch {
    pub(crate) folder: PathBuf,
    /// The file [`Scratch::hello`], which is locked while this command runs.
    _lock: File,
}

impl Scratch {
    /// Creates the folder, readable by this user only, with an empty [`Scratch::hello`] in it.
    ///
    /// # Errors
    /// When the folder cannot be created.
    pub(crate) fn new(run_id: &str) -> Result<Scratch> {
        let place = std::env::temp_dir();
        abandoned::sweep(&place);
        let folder = place.join(format!("memtrace-{run_id}"));
        // Creating the folder fails if its name exists, so another user cannot have placed a link there.
        fs::DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .with_context(|| format!("cannot create the temporary folder {}", folder.display()))?;
        let hello = Scratch::hello_in(&folder);
        let lock = File::create_new(&hello).with_context(|| hello.display().to_string())?;
        // The lock is optional: on a file system without locks, the folder remains if this command is killed.
        if lock.try_lock().is_ok()
            && let Some(visible) = abandoned::visible_processes()
        {
            symlink(visible, folder.join(abandoned::VISIBLE)).ok();
        }
        Ok(Scratch { folder, _lock: lock })
    }

    /// Returns the path of the file to which the tracers append their reports. The variable
    /// [`HELLO`](memtrace_trace::hello::HELLO) passes the path to them.
    pub(crate) fn hello(&self) -> PathBuf {
        Scratch::hello_in(&self.folder)
    }

    /// Returns the path of [`Scratch::hello`] in the folder of a launch.
    pub(crate) fn hello_in(folder: &Path) -> PathBuf {
        folder.join("hello")
    }

    /// Returns true if a tracer was loaded into a program of this launch.
    pub(crate) fn tracer_was_loaded(&self) -> bool {
        self.has_report(hello::LOADED)
    }

    /// Returns the facts that the tracers of this launch have reported so far.
    pub(crate) fn tracer(&self) -> TracerFacts {
        TracerFacts { was_loaded: self.tracer_was_loaded(), failed: self.trace_failed() }
    }

    /// Returns true if a tracer could not write its trace. That tracer has printed the reason.
    fn trace_failed(&self) -> bool {
        self.has_report(hello::TRACE_FAILED)
    }

    fn has_report(&self, fact: u8) -> bool {
        fs::read(self.hello()).is_ok_and(|facts| facts.contains(&fact))
    }

    /// Returns a path of `library` without spaces and colons, at which the loader splits `LD_PRELOAD`: its
    /// own path, or a link in this folder.
    ///
    /// # Errors
    /// When the link cannot be created, or the path of the link has a space or a colon, too.
    pub(crate) fn loadable(&self, library: &Path) -> Result<PathBuf> {
        let splits = |path: &Path| path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':'));
        if !splits(library) {
            return Ok(library.to_owned());
        }
        let link = self.folder.join(library.file_name().unwrap_or_default());
        if splits(&link) {
            bail!(
                "LD_PRELOAD cannot name {}, because the path has a space or a colon; install memtrace in \
                 another folder, or set TMPDIR to one without",
                library.display()
            );
        }
        // The link may exist already, because a command may start several processes.
        if fs::read_link(&link).ok().as_deref() != Some(library) {
            symlink(library, &link).with_context(|| link.display().to_string())?;
        }
        Ok(link)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        memtrace_machine::files::sweep();
        fs::remove_dir_all(&self.folder).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_in_a_folder_with_a_space_gets_one_link_however_often_it_is_requested() {
        let scratch = Scratch::new(&run_id()).unwrap();
        let library = Path::new("/a b/libmemtrace.so");
        let link = scratch.folder.join("libmemtrace.so");
        for _ in 0..2 {
            assert_eq!(scratch.loadable(library).unwrap(), link);
        }
        assert_eq!(fs::read_link(&link).unwrap(), library);
        assert!(scratch.loadable(Path::new("/c d/libmemtrace.so")).is_err(), "the name is taken");
    }
}
