//! Sets up the environment so that a program loads the tracer, and the simulated GPU if one is requested.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};
use clap::ArgMatches;
use memtrace_cards::{
    CARD_VARIABLE, DYNAMIC_VARIABLE, FAULT_VARIABLE, HOST_VALUES_VARIABLE, LOADING_VARIABLE,
    PAST_OOM_VARIABLE, Spec, parse_faults,
};
use memtrace_machine::{MACHINE_VARIABLE, libcuda};
use memtrace_trace::counts::counted;
use memtrace_trace::hello::{self, HELLO};

use crate::libraries::{PHANTOM, TRACER, library};
use crate::{abandoned, load_failure, terminal};

/// The folders that a shell searches if `PATH` is unset.
const DEFAULT_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// The simulated GPU that the command line requests.
pub(crate) struct PhantomArgs<'a> {
    /// The card, such as `h100-80g`.
    pub(crate) card: &'a str,
    dynamic: Option<&'a str>,
    spec: Spec,
    /// The faults to inject, separated by commas.
    faults: String,
    /// True if the program continues when the card is full.
    goes_past_oom: bool,
    /// True if large CPU tensors keep their values.
    keeps_host_values: bool,
}

impl<'a> PhantomArgs<'a> {
    /// Returns the values of `--phantom` and its options, or `None` without `--phantom`.
    ///
    /// # Errors
    /// When there is no such card; the message lists the cards.
    pub(crate) fn from_matches(matches: &'a ArgMatches) -> Result<Option<PhantomArgs<'a>>> {
        let card = matches.get_one::<String>("phantom");
        card.map(|card| PhantomArgs::of_card(matches, card)).transpose()
    }

    /// Returns the values for the card `card`, and the values of the other options for simulated GPUs.
    ///
    /// # Errors
    /// Same as [`PhantomArgs::from_matches`].
    pub(crate) fn of_card(matches: &'a ArgMatches, card: &'a str) -> Result<PhantomArgs<'a>> {
        let text = |name: &str| matches.get_one::<String>(name).map(String::as_str);
        let spec = Spec::parse(card).map_err(|error| anyhow!("--phantom {card}: {error}"))?;
        let eager = std::env::var_os(LOADING_VARIABLE).is_some_and(|value| value == "EAGER");
        let spec = if eager { spec.with_eager_loading() } else { spec };
        let faults: Vec<&str> =
            matches.get_many::<String>("phantom-fault").into_iter().flatten().map(String::as_str).collect();
        let faults = faults.join(",");
        let parsed = parse_faults(&faults).map_err(|error| anyhow!("--phantom-fault {error}"))?;
        let beyond = parsed.iter().find(|fault| fault.card.is_some_and(|number| number >= spec.count));
        if let Some(fault) = beyond {
            let (text, count) = (&fault.text, counted(u64::from(spec.count), "card"));
            bail!("--phantom-fault `{text}`: --phantom {card} has {count}; their numbers start at 0");
        }
        // Only `run` has these two options, so a missing option is not an error here.
        let is_set = |name| matches.try_get_one(name).ok().flatten().is_some_and(|is_set| *is_set);
        Ok(PhantomArgs {
            card,
            dynamic: text("phantom-dynamic"),
            spec,
            faults,
            goes_past_oom: is_set("past-oom"),
            keeps_host_values: !is_set("no-host-values"),
        })
    }

    /// Returns the number of cards in the request, such as 8 for `8xh100-80g`.
    pub(crate) fn count(&self) -> u64 {
        u64::from(self.spec.count)
    }

    /// Returns the total memory of the card in bytes.
    pub(crate) fn capacity(&self) -> u64 {
        self.spec.memory
    }

    /// Returns the free memory at the start, and the range that is expected on a real card.
    pub(crate) fn free_at_start(&self) -> FreeAtStart {
        let [here, least, most] = self.spec.free_at_start();
        FreeAtStart { here, least, most }
    }
}

/// The free memory at the start of a run, in bytes: `here` on this simulated GPU, and the range on a real
/// card.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeAtStart {
    pub(crate) here: u64,
    /// The lower end of the range that is expected on a real card.
    pub(crate) least: u64,
    /// The upper end of the range that is expected on a real card.
    pub(crate) most: u64,
}

impl std::fmt::Display for FreeAtStart {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "free at the start: {} GiB", gib(self.here))?;
        if self.least == self.most {
            return Ok(());
        }
        write!(f, " ({} to {})", gib(self.least), gib(self.most))
    }
}

/// Formats bytes as GiB, without the unit.
pub(crate) fn gib(bytes: u64) -> String {
    format!("{:.2}", bytes as f64 / f64::from(1 << 30))
}

/// Checks the card of `--phantom`.
///
/// # Errors
/// When there is no such card; the message lists the cards.
pub(crate) fn check_card(card: &str) -> Result<()> {
    Spec::parse(card).map(|_| ()).map_err(|error| anyhow!("--phantom {card}: {error}"))
}

/// Returns `command` with the environment that traces it. Its traces go to the folder `out`, an absolute
/// path.
///
/// # Errors
/// When a library is missing, or `LD_PRELOAD` cannot name it.
pub(crate) fn traced_command(
    scratch: &Scratch,
    command: &[impl AsRef<OsStr>],
    out: &Path,
    run_id: &str,
    phantom: Option<&PhantomArgs<'_>>,
) -> Result<Command> {
    let [program, arguments @ ..] = command else { bail!("no program was given") };
    let mut preload = vec![scratch.loadable(&library(TRACER)?)?];
    let mut child = Command::new(program);
    child.args(arguments);
    if let Some(phantom) = phantom {
        let library = library(PHANTOM)?;
        preload.push(scratch.loadable(&library)?);
        libcuda::link(&scratch.folder, &library)
            .context("cannot link libcuda.so.1, which Triton needs, to the simulated GPU")?;
        // A program that calls nvidia-smi must find this link first in its PATH.
        let commands = scratch.folder.join("bin");
        fs::create_dir(&commands).with_context(|| commands.display().to_string())?;
        let own = std::env::current_exe().context("cannot find the command memtrace")?;
        symlink(own, commands.join("nvidia-smi"))
            .with_context(|| format!("cannot link nvidia-smi in {}", commands.display()))?;
        let path = std::env::var_os("PATH").unwrap_or_else(|| DEFAULT_PATH.into());
        let paths = std::iter::once(commands).chain(std::env::split_paths(&path));
        // PATH cannot contain a folder with a colon in its name. The program then has no `nvidia-smi`, but
        // `memtrace live --nvidia-smi` still shows the run.
        if let Ok(path) = std::env::join_paths(paths) {
            child.env("PATH", path);
        }
        child.env(MACHINE_VARIABLE, run_id);
        child.env(CARD_VARIABLE, phantom.card).env(libcuda::FOLDER_VARIABLE, &scratch.folder);
        if !phantom.faults.is_empty() {
            child.env(FAULT_VARIABLE, &phantom.faults);
        }
        if phantom.goes_past_oom {
            child.env(PAST_OOM_VARIABLE, "1");
        }
        if !phantom.keeps_host_values {
            child.env(HOST_VALUES_VARIABLE, "0");
        }
        if let Some(how) = phantom.dynamic {
            child.env(DYNAMIC_VARIABLE, how);
        }
    }
    child.env("LD_PRELOAD", preload_list(&preload, std::env::var_os("LD_PRELOAD").as_deref()));
    child.env("MEMTRACE_OUT", out).env("MEMTRACE_RUN_ID", run_id).env(HELLO, scratch.hello());
    Ok(child)
}

/// Removes our libraries from the environment of a program that could not start with them, and prints a
/// message.
pub(crate) fn spare_foreign_program(child: &mut Command, program: &OsStr) {
    if !load_failure::refuses_preload(program) {
        return;
    }
    terminal::say(&format!(
        "{} is not built for 64-bit glibc (musl, or 32 bits), so it cannot load {TRACER}; it runs untraced",
        Path::new(program).display()
    ));
    match std::env::var_os("LD_PRELOAD") {
        Some(existing) => child.env("LD_PRELOAD", existing),
        None => child.env_remove("LD_PRELOAD"),
    };
}

/// Returns true if this machine may have a GPU: a device of the driver, of WSL, or of a Jetson.
pub(crate) fn has_gpu() -> bool {
    ["/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl", "/dev/nvmap"]
        .iter()
        .any(|device| Path::new(device).exists())
}

/// Returns a new identifier that all processes of one launch share, and no other launch has.
pub(crate) fn run_id() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    format!("{:x}-{:x}", now.as_nanos(), std::process::id())
}

/// Returns the value of `LD_PRELOAD`: our libraries first, then the libraries that `existing` names, each
/// once.
pub(crate) fn preload_list(ours: &[PathBuf], existing: Option<&OsStr>) -> OsString {
    let mut list: Vec<&[u8]> = ours.iter().map(|path| path.as_os_str().as_bytes()).collect();
    // The loader splits `LD_PRELOAD` at colons and at spaces.
    let existing =
        existing.map(OsStr::as_bytes).unwrap_or_default().split(|byte| matches!(byte, b' ' | b':'));
    for path in existing.filter(|path| !path.is_empty()) {
        if !list.contains(&path) {
            list.push(path);
        }
    }
    OsStr::from_bytes(&list.join(&b':')).to_owned()
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
pub(crate) fn run_id_of(name: &str) -> Option<(&str, u64)> {
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

    /// Returns the path of the file to which the tracers append their reports. The variable [`HELLO`] passes
    /// the path to them; see [`memtrace_trace::hello`].
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
    fn ld_preload_names_the_tracer_first_and_each_library_once() {
        let ours = [PathBuf::from("/a/libmemtrace.so")];
        let list = preload_list(&ours, Some(OsStr::new("/b/x.so /a/libmemtrace.so:/c/y.so")));
        assert_eq!(list, "/a/libmemtrace.so:/b/x.so:/c/y.so");
        assert_eq!(preload_list(&ours, None), "/a/libmemtrace.so");
    }

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
