//! Starts the program with one value, and decides when it has ended whether the value fits.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use memtrace_trace::units::Unit;

use super::outcome::{STDERR, STDOUT, Trial, TrialOutcome, output, says_out_of_memory, unwritten_bytes};
use super::peak::{Measured, measure};
use super::process_tree::ProcessTree;
use crate::child_env::{PhantomArgs, Scratch, run_id, traced_command};
use crate::out_folder::OutFolder;

/// The name of the file in the output folder with a line for each trial.
pub(crate) const TRIALS_FILE: &str = "trials.txt";
/// The number of last lines of a failed program's stderr that are shown.
const TAIL_LINES: usize = 12;

/// A trial to make.
#[derive(Clone, Debug)]
pub(crate) struct PlannedTrial {
    /// The program and its arguments.
    pub(crate) command: Vec<OsString>,
    /// The name of the trial; see [`Trial::label`].
    pub(crate) label: String,
    /// The value of the search; see [`Trial::value`].
    pub(crate) value: String,
    /// The simulated card; `None` for the machine's own GPU.
    pub(crate) card: Option<String>,
}

/// Returns the name of the folder of a trial: the name of the trial, with `_` in place of each character other
/// than letters, digits, `-`, `_` and `.`.
fn folder_name(trial: &str) -> String {
    trial.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect()
}

/// Checks that the folders of these trials have different names, and do not have a name that the output folder
/// uses itself.
///
/// # Errors
/// When two trials have the same folder name, or a name cannot be used for a folder.
pub(crate) fn check_names(trials: impl IntoIterator<Item = String>) -> Result<()> {
    let mut names: HashMap<String, String> = HashMap::new();
    for trial in trials {
        let name = folder_name(&trial);
        // A file name on Linux has at most 255 bytes. The other names have a meaning in the output folder.
        if [".", "..", TRIALS_FILE].contains(&name.as_str()) || name.len() > 255 {
            bail!("the value `{trial}` cannot be the name of a folder; choose another value");
        }
        if let Some(other) = names.insert(name.clone(), trial.clone()) {
            bail!(
                "the trials of `{other}` and `{trial}` would have the same folder, {name}; try them one at a \
                 time"
            );
        }
    }
    Ok(())
}

/// Checks that the folder of `-o` has no trial of an earlier search, which would have the folder of a new trial with
/// the same value.
///
/// # Errors
/// When the folder has such a trial.
pub(crate) fn check_folder(matches: &ArgMatches) -> Result<()> {
    let Some(out) = matches.get_one::<PathBuf>("out") else { return Ok(()) };
    // A search writes no list through a link, nor into a pipe. A killed search may have left a trial without a list.
    let is_file = |path: &Path| path.symlink_metadata().is_ok_and(|about| about.is_file());
    let mut entries = fs::read_dir(out).into_iter().flatten().flatten();
    if is_file(&out.join(TRIALS_FILE)) || entries.any(|entry| is_file(&entry.path().join(STDERR))) {
        bail!("-o {}: this folder has the trials of an earlier search; name a new folder", out.display());
    }
    Ok(())
}

/// The data that all trials of this command share.
pub(crate) struct TrialSetup<'a> {
    pub(crate) matches: &'a ArgMatches,
    pub(crate) out: &'a OutFolder,
}

impl TrialSetup<'_> {
    /// Starts a trial.
    ///
    /// # Errors
    /// When the program cannot be run, or the folder of the trial already exists.
    pub(crate) fn start(&self, planned: PlannedTrial) -> Result<RunningTrial> {
        let PlannedTrial { command, label, card, .. } = &planned;
        let name = folder_name(label);
        let folder = self.out.folder.join(&name);
        if folder.exists() {
            bail!("{} exists already; name a new folder with -o", folder.display());
        }
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        let run_id = run_id();
        let scratch = Scratch::new(&run_id)?;
        let mut child = match (self.matches.get_one::<String>("ranks"), card) {
            (Some(ranks), Some(card)) => self.cluster_command(ranks, card, command, &folder)?,
            (_, card) => {
                let phantom =
                    card.as_deref().map(|card| PhantomArgs::of_card(self.matches, card)).transpose()?;
                traced_command(&scratch, command, &folder, &run_id, phantom.as_ref())?
            }
        };
        let stream = |name: &str| -> Result<File> {
            let path = folder.join(name);
            File::create_new(&path).with_context(|| path.display().to_string())
        };
        child.stdin(Stdio::null()).stdout(stream(STDOUT)?).stderr(stream(STDERR)?);
        let shown = self.out.shown.join(&name);
        match ProcessTree::spawn(child) {
            Ok(tree) => {
                let host_limit = self.matches.get_one::<i64>("host-mem").copied();
                let started = Instant::now();
                Ok(RunningTrial { planned, folder, shown, host_limit, _scratch: scratch, tree, started })
            }
            Err(error) => {
                fs::remove_dir_all(&folder).ok();
                bail!("cannot run {}: {error}", Path::new(&command[0]).display());
            }
        }
    }

    /// Returns the command that starts some ranks of a job: `memtrace run --ranks` with the executable of
    /// this command.
    fn cluster_command(
        &self,
        ranks: &str,
        card: &str,
        command: &[OsString],
        folder: &Path,
    ) -> Result<Command> {
        let own = std::env::current_exe().context("cannot find the command memtrace")?;
        let mut child = Command::new(own);
        child.args(["run", "--quiet", "--phantom", card, "--ranks", ranks, "-o"]).arg(folder);
        if let Some(how) = self.matches.get_one::<String>("phantom-dynamic") {
            child.args(["--phantom-dynamic", how]);
        }
        for fault in self.matches.get_many::<String>("phantom-fault").into_iter().flatten() {
            child.args(["--phantom-fault", fault]);
        }
        child.arg("--").args(command);
        Ok(child)
    }
}

/// A trial in progress.
pub(crate) struct RunningTrial {
    pub(crate) planned: PlannedTrial,
    /// The folder of the trial's traces.
    folder: PathBuf,
    /// `folder` as the user would type it.
    shown: PathBuf,
    /// The limit of host memory, in bytes (`--host-mem`); `None` without a limit.
    host_limit: Option<i64>,
    /// The processes of the trial. This field is before `_scratch`, because fields are dropped in order and the
    /// processes must end before the folder is removed.
    pub(crate) tree: ProcessTree,
    /// The folder with the libraries that the trial loads.
    _scratch: Scratch,
    started: Instant,
}

impl RunningTrial {
    /// Returns the result of the trial, which has ended with `status`.
    ///
    /// # Errors
    /// When the trace of the trial cannot be read.
    pub(crate) fn finish(self, status: ExitStatus) -> Result<Trial> {
        let took = self.started.elapsed();
        let Measured { mut peak, request, was_killed_for_memory } = measure(&self.folder)?;
        let text = output(&self.folder, STDERR);
        peak.host = peak.host.saturating_add(unwritten_bytes(&self.folder));
        let exceeded = self.host_limit.filter(|limit| peak.host > *limit);
        let outcome = match (request, status.success(), exceeded) {
            (Some(request), ..) => TrialOutcome::TooBig(request),
            (None, true, Some(limit)) => TrialOutcome::TooBigForHost(format!(
                "had {} of host memory, more than --host-mem {}",
                Unit::Auto.show(peak.host),
                Unit::Auto.show(limit)
            )),
            (None, true, None) if peak.fills_machine => TrialOutcome::TooBig(format!(
                "and the host together used all {} of the memory that they share",
                Unit::Auto.show(peak.capacity)
            )),
            (None, true, None) => TrialOutcome::Fits,
            (None, false, _) if says_out_of_memory(&text) => TrialOutcome::TooBig(String::new()),
            (None, false, _) => {
                let ended = match status.signal() {
                    Some(9) if was_killed_for_memory => {
                        "killed by the kernel, because the host's memory ran out".to_owned()
                    }
                    Some(signal) => format!("signal {signal}"),
                    None => format!("status {}", status.code().unwrap_or(1)),
                };
                let lines: Vec<String> = text.lines().map(str::to_owned).collect();
                TrialOutcome::Failed(ended, lines[lines.len().saturating_sub(TAIL_LINES)..].to_vec())
            }
        };
        let PlannedTrial { label, value, .. } = self.planned;
        Ok(Trial { label, value, outcome, took, folder: self.shown, files: self.folder, peak })
    }

    /// Removes the files of a trial that has ended and whose peak is not needed.
    pub(crate) fn discard(self) {
        fs::remove_dir_all(&self.folder).ok();
    }
}
