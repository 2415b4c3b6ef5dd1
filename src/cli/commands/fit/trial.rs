//! Runs the program with one value, and measures its peak.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::render::phantom_run::PhantomRun;
use memtrace_analysis::reports;
use memtrace_trace::meta::Meta;
use memtrace_trace::units::Unit;
use serde_json::Value;

use super::process_tree::ProcessTree;
use crate::child_env::{PhantomArgs, Scratch, run_id, traced_command};
use crate::out_folder::OutFolder;
use crate::recovery;

/// The name of the file in the output folder with a line for each trial.
pub(super) const TRIALS_FILE: &str = "trials.txt";
/// The number of last lines of a failed program's stderr that are shown.
const TAIL_LINES: usize = 12;
/// The maximum number of bytes of an output that are read: a program may print gigabytes.
const MOST_OUTPUT: u64 = 16 << 20;

/// The outcome of a trial with one value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TrialOutcome {
    /// The status is 0, and no request ran out of memory.
    Fits,
    /// The trial ran out of memory. The text describes the request that failed, or is empty if the request is
    /// unknown.
    TooBig(String),
    /// The trial failed for another reason. The fields are its status or signal, and the last lines of its
    /// stderr.
    Failed(String, Vec<String>),
}

impl TrialOutcome {
    /// Returns the outcome in one or a few words, for tables and `--json`.
    pub(super) fn word(&self) -> &'static str {
        match self {
            TrialOutcome::Fits => "fits",
            TrialOutcome::TooBig(_) => "out of memory",
            TrialOutcome::Failed(..) => "failed",
        }
    }
}

/// A trial with one value.
pub(super) struct Trial {
    /// The name of the trial: whatever differs between the trials of the request, such as the value, the card and
    /// the sequence length.
    pub(super) label: String,
    /// The value of the search, as text; empty if no value is searched for.
    pub(super) value: String,
    pub(super) outcome: TrialOutcome,
    pub(super) took: Duration,
    /// The folder of the trial's traces, as the user would type it.
    pub(super) folder: PathBuf,
    /// `folder` as an absolute path.
    pub(super) files: PathBuf,
    /// The peaks; all zero if there is no trace.
    pub(super) peak: PeakUse,
}

/// The peaks, in bytes, of the device with the most memory in use, over all processes.
#[derive(Clone, Debug, Default)]
pub(super) struct PeakUse {
    pub(super) allocated: i64,
    pub(super) reserved: i64,
    pub(super) used: i64,
    /// The memory of the device, in bytes; 0 if unknown.
    pub(super) capacity: i64,
    /// The name of the device; empty if unknown.
    pub(super) device: String,
    /// True if the device is simulated.
    pub(super) phantom: bool,
    /// The number of allocations that failed at first. They succeeded after the allocator had emptied its
    /// cache.
    pub(super) retries: i64,
    /// True if the outcome may differ on a real card, because the context of a real card may be larger or
    /// smaller.
    pub(super) inside_range: bool,
    /// True if the device shares the machine's memory, and device and host together used all of it.
    pub(super) fills_machine: bool,
    /// The number of processes with a trace.
    pub(super) processes: usize,
    /// The number of ranks that ran.
    pub(super) ranks: usize,
    /// The sum of the processes' peaks of host memory in bytes; 0 if unknown. A rank of the node that did not
    /// run is counted like the smallest rank that ran.
    pub(super) host: i64,
    /// Bytes of pinned memory that `host` lacks, because they did not become resident.
    pub(super) pinned_absent: i64,
    /// The lines at which the program acted on values that the simulated GPU made up.
    pub(super) acted_at: BTreeSet<String>,
    /// True if `host` is more than `--host-mem`.
    pub(super) exceeds_host: bool,
    /// The number of ranks of one node that did not run.
    pub(super) absent_ranks: i64,
    /// Bytes by category at the peak of allocated memory, largest first.
    pub(super) by_category: Vec<(String, i64)>,
}

/// A trial to make.
#[derive(Clone, Debug)]
pub(super) struct PlannedTrial {
    /// The program and its arguments.
    pub(super) command: Vec<OsString>,
    /// The name of the trial; see [`Trial::label`].
    pub(super) label: String,
    /// The value of the search; see [`Trial::value`].
    pub(super) value: String,
    /// The simulated card; `None` for the machine's own GPU.
    pub(super) card: Option<String>,
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
pub(super) fn check_names(trials: impl IntoIterator<Item = String>) -> Result<()> {
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

/// The data that all trials of this command share.
pub(super) struct TrialSetup<'a> {
    pub(super) matches: &'a ArgMatches,
    pub(super) out: &'a OutFolder,
}

impl TrialSetup<'_> {
    /// Starts a trial.
    ///
    /// # Errors
    /// When the program cannot be run, or the folder of the trial already exists.
    pub(super) fn start(&self, planned: PlannedTrial) -> Result<RunningTrial> {
        let PlannedTrial { command, label, card, .. } = &planned;
        let name = folder_name(label);
        let folder = self.out.folder.join(&name);
        if folder.exists() {
            bail!("{} exists already; choose another folder with -o", folder.display());
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
        child.stdin(Stdio::null()).stdout(stream("stdout.txt")?).stderr(stream("stderr.txt")?);
        let shown = self.out.shown.join(&name);
        match ProcessTree::spawn(child) {
            Ok(tree) => {
                let host_limit = self.matches.get_one::<i64>("host-mem").copied();
                let started = Instant::now();
                Ok(RunningTrial { planned, folder, shown, host_limit, _scratch: scratch, tree, started })
            }
            Err(error) => {
                fs::remove_dir_all(&folder).ok();
                self.out.remove_if_empty();
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
pub(super) struct RunningTrial {
    pub(super) planned: PlannedTrial,
    /// The folder of the trial's traces.
    folder: PathBuf,
    /// `folder` as the user would type it.
    shown: PathBuf,
    /// The limit of host memory, in bytes (`--host-mem`); `None` without a limit.
    host_limit: Option<i64>,
    /// The processes of the trial. This field is before `_scratch`, because fields are dropped in order and the
    /// processes must end before the folder is removed.
    pub(super) tree: ProcessTree,
    /// The folder with the libraries that the trial loads.
    _scratch: Scratch,
    started: Instant,
}

impl RunningTrial {
    /// Returns the result of the trial, which has ended with `status`.
    ///
    /// # Errors
    /// When the trace of the trial cannot be read.
    pub(super) fn finish(self, status: ExitStatus) -> Result<Trial> {
        let took = self.started.elapsed();
        let Measured { mut peak, request, was_killed_for_memory } = measure(&self.folder)?;
        let text = output(&self.folder, "stderr.txt");
        peak.host = peak.host.saturating_add(unwritten_bytes(&self.folder));
        let over_host = self.host_limit.filter(|limit| peak.host > *limit);
        peak.exceeds_host = over_host.is_some() && request.is_none() && status.success();
        let outcome = match (request, status.success()) {
            (Some(request), _) => TrialOutcome::TooBig(request),
            (None, true) if over_host.is_some() => TrialOutcome::TooBig(format!(
                "had {} of host memory, more than --host-mem {}",
                Unit::Auto.show(peak.host),
                Unit::Auto.show(over_host.unwrap_or(0))
            )),
            (None, true) if peak.fills_machine => TrialOutcome::TooBig(format!(
                "and the host together used all {} of the memory that they share",
                Unit::Auto.show(peak.capacity)
            )),
            (None, true) => TrialOutcome::Fits,
            (None, false) if says_out_of_memory(&text) => TrialOutcome::TooBig(String::new()),
            (None, false) => {
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
    pub(super) fn discard(self) {
        fs::remove_dir_all(&self.folder).ok();
    }
}

/// Returns the end of a file with the output of a trial, at most [`MOST_OUTPUT`] bytes; empty if there is no such file.
pub(super) fn output(folder: &Path, name: &str) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(folder.join(name))?;
        let size = file.metadata()?.len();
        file.seek(SeekFrom::Start(size.saturating_sub(MOST_OUTPUT)))?;
        let mut bytes = Vec::new();
        file.take(MOST_OUTPUT).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
}

/// Returns the bytes of weights that the script of a recipe left unwritten on the host, as it prints. They are not
/// resident, and would be if the script had loaded them.
fn unwritten_bytes(folder: &Path) -> i64 {
    let text = output(folder, "stdout.txt");
    let number = |line: &str| {
        let rest = line.strip_prefix("unwritten weights on the host: ")?;
        rest.strip_suffix(" bytes")?.parse().ok().filter(|bytes: &i64| *bytes >= 0)
    };
    text.lines().find_map(number).unwrap_or(0)
}

/// Returns true if a program's stderr reports that GPU memory ran out. This is needed where the trace has no
/// OOM, because the failed allocation was not made by torch's caching allocator but by a library or the
/// cudaMallocAsync backend.
fn says_out_of_memory(text: &str) -> bool {
    [
        "CUDA out of memory",
        "CUDA error: out of memory",
        "OutOfMemoryError",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        // vLLM refuses to start when its KV cache is too small.
        "No available memory for the cache blocks",
        "larger than the available KV cache",
        // To print an OOM, PyTorch queries NVML. On a Jetson, NVML cannot list processes, so this assertion
        // fails.
        "NVML_SUCCESS == r INTERNAL ASSERT FAILED",
    ]
    .iter()
    .any(|phrase| text.contains(phrase))
}

/// What the traces of a trial show.
#[derive(Default)]
struct Measured {
    peak: PeakUse,
    /// The request that ran out of memory, if there was one.
    request: Option<String>,
    /// True if the kernel killed a process because the host's memory ran out.
    was_killed_for_memory: bool,
}

/// Reads the traces of a trial.
fn measure(folder: &Path) -> Result<Measured> {
    recovery::begin(folder);
    // The folder is new, so a failure to open it means that the trial left no trace.
    if Input::open(folder).is_err() {
        return Ok(Measured::default());
    }
    let inputs = [recovery::complete_quietly(|| Ok(Input::open(folder)?))?];
    let ask = |name: &str| -> Result<Value> {
        let report = reports::find(name).with_context(|| format!("there is no report {name}"))?;
        Ok(report.run(&inputs, &Options::default())?.to_json(name))
    };
    let summary = ask("summary")?;
    let processes = summary["processes"].as_array().map_or(&[][..], Vec::as_slice);
    let mut peak = PeakUse::default();
    for (process, trace) in processes.iter().zip(&inputs[0].traces) {
        peak.add(process, &trace.meta);
    }
    let lines = summary["phantom"]["acted_at"].as_array().into_iter().flatten();
    peak.acted_at = lines.filter_map(|line| line.as_str().map(str::to_owned)).collect();
    peak.pinned_absent = number(&summary["phantom"]["pinned_not_resident_bytes"]);
    if let Some(last) = inputs[0].traces.last() {
        // With `--ranks`, only some ranks run. A node has one rank for each of its cards.
        let about = &last.meta.phantom;
        peak.add_absent_ranks(processes, number(&about["ranks_of"]).min(number(&about["count"]).max(1)));
    }
    let is_killed =
        |process: &Value| ["container_oom", "machine_oom"].iter().any(|by| process["killed"]["by"] == **by);
    let was_killed_for_memory = processes.iter().any(is_killed);
    let mut request = None;
    if processes.iter().any(|process| number(&process["events"]["oom"]) > 0) {
        let oom = &ask("oom")?["ooms"][0];
        peak.inside_range = oom["inside_range"] == true;
        request = Some(request_of(oom));
    }
    Ok(Measured { peak, request, was_killed_for_memory })
}

impl PeakUse {
    /// Adds a process, as `summary --json` shows it, whose trace has this `meta` row.
    fn add(&mut self, process: &Value, meta: &Meta) {
        self.processes += 1;
        self.retries += number(&process["failed_calls"]);
        self.host += host_peak(process);
        self.phantom |= process["phantom"] == true;
        for device in process["devices"].as_array().into_iter().flatten() {
            if number(&device["peak_used"]["bytes"]) >= self.used {
                self.set_device(device, meta);
            }
        }
    }

    /// Adds the ranks of the node that did not run, each with as much host memory as the smallest rank of `processes`.
    /// A rank may have several processes.
    fn add_absent_ranks(&mut self, processes: &[Value], ranks_of_node: i64) {
        let mut by_rank: BTreeMap<i64, i64> = BTreeMap::new();
        for process in processes {
            *by_rank.entry(number(&process["rank"])).or_default() += host_peak(process);
        }
        self.ranks = by_rank.len();
        self.absent_ranks = (ranks_of_node - self.ranks as i64).max(0);
        let smallest = by_rank.into_values().min().unwrap_or(0);
        self.host = self.host.saturating_add(self.absent_ranks.saturating_mul(smallest));
    }

    /// Replaces the device by one with more memory in use.
    fn set_device(&mut self, device: &Value, meta: &Meta) {
        let ordinal = i32::try_from(number(&device["device"])).unwrap_or(-1);
        self.used = number(&device["peak_used"]["bytes"]);
        self.allocated = number(&device["peak_allocated"]["bytes"]);
        self.reserved = number(&device["peak_reserved"]["bytes"]);
        self.capacity = meta.total_bytes(ordinal);
        let is_shared = !device["host_peak_bytes"].is_null();
        self.fills_machine = is_shared && self.capacity > 0 && self.used >= self.capacity;
        let context = |name: &str| meta.phantom[name].as_i64();
        let more = context("context_high_bytes").zip(context("context_bytes"));
        self.inside_range = more.is_some_and(|(most, here)| self.capacity - self.used < most - here);
        self.device = meta.device(ordinal).map_or(String::new(), |card| card.name.clone());
        let by_category = device["at_peak_by_category_bytes"].as_object().into_iter().flatten();
        self.by_category = by_category.map(|(name, bytes)| (name.clone(), number(bytes))).collect();
        self.by_category.sort_by_key(|(_, bytes)| -bytes);
    }
}

fn number(value: &Value) -> i64 {
    value.as_i64().unwrap_or(0)
}

/// Returns the peak of a process's host memory, as `summary --json` shows it; 0 if unknown.
fn host_peak(process: &Value) -> i64 {
    number(&process["host_peak_bytes"]).max(0)
}

/// Describes the request that ran out of memory, as `oom --json` shows it.
fn request_of(oom: &Value) -> String {
    let bytes = number(&oom["requested_bytes"]).max(number(&oom["rounded_bytes"]));
    let mut request = format!("asked for {}", Unit::Auto.show(bytes));
    for (before, name) in [("by", "op"), ("in", "module"), ("in", "phase")] {
        if let Some(text) = oom[name].as_str().filter(|text| !text.is_empty() && *text != "(none)") {
            request.push_str(&format!(" {before} {text}"));
        }
    }
    request
}

/// Returns the note on the figures of trials on simulated `gpus`.
pub(super) fn note<'t>(trials: impl Iterator<Item = &'t Trial>, gpus: &str) -> String {
    let acted_at = trials.flat_map(|trial| trial.peak.acted_at.iter().cloned()).collect();
    let run = PhantomRun { acted_at, ..PhantomRun::default() };
    let doubt = run.warning().unwrap_or_else(|| {
        format!("simulated {gpus}: allocated memory is exact, because PyTorch computes it")
    });
    format!("note: {doubt}; reserved memory is an estimate")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_huge_output_only_the_end_is_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = File::create(folder.path().join("stderr.txt")).unwrap();
        file.set_len(MOST_OUTPUT + 100).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, b"CUDA out of memory", MOST_OUTPUT + 82).unwrap();
        let text = output(folder.path(), "stderr.txt");
        assert_eq!(text.len() as u64, MOST_OUTPUT);
        assert!(says_out_of_memory(&text) && text.ends_with("memory"));
        assert_eq!(output(folder.path(), "stdout.txt"), "");
    }

    #[test]
    fn the_figures_that_recipes_print_are_read() {
        let files = tempfile::tempdir().unwrap();
        for (template, start) in [
            (include_str!("recipes/infer.py"), "unwritten weights"),
            (include_str!("recipes/serve.py"), "KV cache"),
        ] {
            // The line as the script prints it, with 42 as the figure.
            let (_, rest) = template.split_once(&format!("print(f\"{start}")).unwrap();
            let (before, rest) = rest.split_once('{').unwrap();
            let (_, rest) = rest.split_once('}').unwrap();
            let (after, _) = rest.split_once('"').unwrap();
            fs::write(files.path().join("stdout.txt"), format!("{start}{before}42{after}\n")).unwrap();
            let trial = Trial {
                label: String::new(),
                value: String::new(),
                outcome: TrialOutcome::Fits,
                took: Duration::ZERO,
                folder: PathBuf::new(),
                files: files.path().to_owned(),
                peak: PeakUse::default(),
            };
            let read = match start {
                "KV cache" => super::super::ask::cache_tokens(&trial).map(|tokens| tokens as i64),
                _ => Some(unwritten_bytes(files.path())),
            };
            assert_eq!(read, Some(42), "{start}");
        }
    }

    #[test]
    fn a_rank_that_did_not_run_counts_like_all_processes_of_the_smallest_rank() {
        let process = |rank: i32, bytes: i64| serde_json::json!({ "rank": rank, "host_peak_bytes": bytes });
        for (processes, host, ranks, absent) in [
            (vec![process(0, 60), process(0, 1)], 8 * 61, 1, 7),
            (vec![process(0, 60), process(1, 50), process(1, 5)], 60 + 7 * 55, 2, 6),
            (vec![], 0, 0, 8),
        ] {
            let mut peak = PeakUse { host: processes.iter().map(host_peak).sum(), ..PeakUse::default() };
            peak.add_absent_ranks(&processes, 8);
            assert_eq!((peak.host, peak.ranks, peak.absent_ranks), (host, ranks, absent));
        }
    }
}
