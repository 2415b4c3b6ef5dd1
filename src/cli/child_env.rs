//! What a program needs to be traced: the libraries in its environment, on a real device or on one that
//! is not there.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use clap::ArgMatches;
use memtrace_cards::{CARD_VARIABLE, Spec};

/// The library that traces.
pub(crate) const TRACER: &str = "libmemtrace.so";
/// The device that is not there.
pub(crate) const PHANTOM: &str = "libmemtrace_phantom.so";
/// Names the file that the library's constructor appends one byte to: that it was loaded at all.
pub(crate) const HELLO: &str = "MEMTRACE_HELLO";

/// A device that is not there, as the command line asks for it.
pub(crate) struct Phantom<'a> {
    /// The card: `h100-80g`.
    pub(crate) card: &'a str,
    dynamic: Option<&'a str>,
}

impl<'a> Phantom<'a> {
    /// What `--phantom` and `--phantom-dynamic` say.
    pub(crate) fn wanted(matches: &'a ArgMatches) -> Result<Option<Phantom<'a>>> {
        let text = |name: &str| matches.get_one::<String>(name).map(String::as_str);
        let Some(card) = text("phantom") else { return Ok(None) };
        Spec::parse(card).map_err(|error| anyhow!("--phantom {card}: {error}"))?;
        Ok(Some(Phantom { card, dynamic: text("phantom-dynamic") }))
    }
}

/// `command`, its traces going to the folder `out`, which is an absolute path.
pub(crate) fn traced(
    scratch: &Scratch,
    command: &[impl AsRef<OsStr>],
    out: &Path,
    run_id: &str,
    phantom: Option<&Phantom<'_>>,
) -> Result<Command> {
    let [program, arguments @ ..] = command else { bail!("what is to run?") };
    let mut preload = vec![scratch.loadable(&library(TRACER)?)?];
    let mut child = Command::new(program);
    child.args(arguments);
    if let Some(phantom) = phantom {
        let library = library(PHANTOM)?;
        preload.push(scratch.loadable(&library)?);
        // Triton links what it compiles against the libcuda of this folder.
        for name in ["libcuda.so.1", "libcuda.so"] {
            symlink(&library, scratch.folder.join(name)).context("cannot prepare for Triton")?;
        }
        child.env(CARD_VARIABLE, phantom.card).env("TRITON_LIBCUDA_PATH", &scratch.folder);
        if let Some(how) = phantom.dynamic {
            child.env("MEMTRACE_PHANTOM_DYNAMIC", how);
        }
    }
    child.env("LD_PRELOAD", preload_list(&preload, std::env::var_os("LD_PRELOAD").as_deref()));
    child.env("MEMTRACE_OUT", out).env("MEMTRACE_RUN_ID", run_id).env(HELLO, scratch.hello());
    Ok(child)
}

/// The same for every process of this launch, and for no other's.
pub(crate) fn run_id() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", now.as_nanos(), std::process::id())
}

/// The library of that name, beside this command or in the `lib` folder beside its own.
pub(crate) fn library(name: &str) -> Result<PathBuf> {
    let command = std::env::current_exe().context("cannot tell where this command is")?;
    let beside = command.parent().unwrap_or(Path::new("/"));
    let places =
        [beside.join(name), beside.join("../lib").join(name), beside.join("../lib/memtrace").join(name)];
    places.iter().find_map(|place| place.canonicalize().ok()).ok_or_else(|| {
        anyhow!(
            "{name} is not beside this command, in {}; build both with: cargo build --release",
            beside.display()
        )
    })
}

/// The value of `LD_PRELOAD`: ours first, then what was there, once each.
pub(crate) fn preload_list(ours: &[PathBuf], there: Option<&OsStr>) -> OsString {
    let mut list: Vec<&[u8]> = ours.iter().map(|path| path.as_os_str().as_bytes()).collect();
    // The loader takes spaces and colons alike.
    let there = there.map(OsStr::as_bytes).unwrap_or_default().split(|byte| matches!(byte, b' ' | b':'));
    for path in there.filter(|path| !path.is_empty()) {
        if !list.contains(&path) {
            list.push(path);
        }
    }
    OsStr::from_bytes(&list.join(&b':')).to_owned()
}

/// A folder of our own for the time of the run, removed with it.
pub(crate) struct Scratch {
    pub(crate) folder: PathBuf,
}

impl Scratch {
    pub(crate) fn new(run_id: &str) -> Result<Scratch> {
        let folder = std::env::temp_dir().join(format!("memtrace-{run_id}"));
        // `create_dir` fails on what is there already: nobody can have laid a link in our way.
        fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700))?;
        let scratch = Scratch { folder };
        File::create_new(scratch.hello()).with_context(|| scratch.hello().display().to_string())?;
        Ok(scratch)
    }

    pub(crate) fn hello(&self) -> PathBuf {
        self.folder.join("hello")
    }

    /// A path to `library` that `LD_PRELOAD` can hold, which splits at spaces and colons.
    pub(crate) fn loadable(&self, library: &Path) -> Result<PathBuf> {
        let splits = |path: &Path| path.as_os_str().as_bytes().iter().any(|byte| matches!(byte, b' ' | b':'));
        if !splits(library) {
            return Ok(library.to_owned());
        }
        let link = self.folder.join(library.file_name().unwrap_or_default());
        if splits(&link) {
            bail!("LD_PRELOAD cannot name {}: a path with a space or a colon", library.display());
        }
        symlink(library, &link).with_context(|| link.display().to_string())?;
        Ok(link)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.folder).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_comes_first_and_nothing_is_lost_or_doubled() {
        let ours = [PathBuf::from("/a/libmemtrace.so")];
        let list = preload_list(&ours, Some(OsStr::new("/b/x.so /a/libmemtrace.so:/c/y.so")));
        assert_eq!(list, "/a/libmemtrace.so:/b/x.so:/c/y.so");
        assert_eq!(preload_list(&ours, None), "/a/libmemtrace.so");
    }
}
