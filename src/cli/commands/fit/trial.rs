//! Runs the program with one value, and measures its peak.

use std::ffi::OsString;
use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use memtrace_analysis::options::Options;
use memtrace_analysis::reports;
use memtrace_trace::units::Unit;
use serde_json::Value;

use crate::child_env::{PhantomArgs, Scratch, run_id, traced_command};
use crate::out_folder::OutFolder;
use crate::signals::Forwarder;
use crate::{recovery, trace_input};

/// The last lines of a failed program's stderr that are shown.
const TAIL_LINES: usize = 12;

/// The outcome of a run with one value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Status 0, and no request ran out of memory.
    Fits,
    /// It ran out of memory. The text names the request that failed, or is empty when it is unknown.
    TooBig(String),
    /// It failed for another reason: its status or signal, and the last lines of its stderr.
    Failed(String, Vec<String>),
}

impl Outcome {
    /// One or a few words, for tables and `--json`.
    pub(super) fn word(&self) -> &'static str {
        match self {
            Outcome::Fits => "fits",
            Outcome::TooBig(_) => "out of memory",
            Outcome::Failed(..) => "failed",
        }
    }
}

/// A run with one value.
pub(super) struct Trial {
    pub(super) value: String,
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
    /// The folder of its traces, as the user would type it.
    pub(super) folder: PathBuf,
    /// The same, absolute.
    pub(super) files: PathBuf,
    /// Zeros when there is no trace.
    pub(super) peak: PeakUse,
}

/// The peaks, in bytes, of the device with the most memory in use, over all processes.
#[derive(Clone, Debug, Default)]
pub(super) struct PeakUse {
    pub(super) allocated: i64,
    pub(super) reserved: i64,
    pub(super) used: i64,
    /// The memory of the device, in bytes; 0 when unknown.
    pub(super) capacity: i64,
    /// The name of the device.
    pub(super) device: String,
    /// True if the device is simulated.
    pub(super) phantom: bool,
    /// Allocations that failed at first and succeeded after the allocator had emptied its cache.
    pub(super) retries: i64,
    /// True if a real card may answer otherwise, because its context may take more or less.
    pub(super) inside_range: bool,
    /// Processes with a trace.
    pub(super) processes: usize,
    /// Bytes by category at the peak of allocated memory, largest first.
    pub(super) by_category: Vec<(String, i64)>,
}

/// A run to make.
pub(super) struct Attempt<'a> {
    /// The program and its arguments.
    pub(super) command: Vec<OsString>,
    /// The value, which names the run.
    pub(super) value: &'a str,
    pub(super) phantom: Option<&'a PhantomArgs<'a>>,
}

/// Makes a run. Breaks off with the signal that asked this command to end.
///
/// # Errors
/// When the program cannot be run, or its folder exists already.
pub(super) fn run_trial(
    attempt: &Attempt<'_>,
    out: &OutFolder,
    forwarder: &Forwarder,
) -> Result<ControlFlow<i32, Trial>> {
    let Attempt { command, value, phantom } = attempt;
    let name: String =
        value.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    let folder = out.folder.join(&name);
    if folder.exists() {
        bail!("{} exists already; choose another folder with -o", folder.display());
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let run_id = run_id();
    let scratch = Scratch::new(&run_id)?;
    let mut child = traced_command(&scratch, command, &folder, &run_id, *phantom)?;
    let stream = |name: &str| -> Result<File> {
        let path = folder.join(name);
        File::create_new(&path).with_context(|| path.display().to_string())
    };
    child.stdin(Stdio::null()).stdout(stream("stdout.txt")?).stderr(stream("stderr.txt")?);
    forwarder.expect_child();
    let started = Instant::now();
    let mut child = match child.spawn() {
        Ok(child) => child,
        Err(error) => {
            forwarder.no_child();
            fs::remove_dir_all(&folder).ok();
            out.remove_if_empty();
            bail!("cannot run {}: {error}", Path::new(&command[0]).display());
        }
    };
    forwarder.set_child(child.id());
    let status = child.wait().context("cannot wait for the program")?;
    let took = started.elapsed();
    forwarder.no_child();
    if let Some(signal) = forwarder.asked_to_end() {
        // Its peak is not the program's.
        fs::remove_dir_all(&folder).ok();
        return Ok(ControlFlow::Break(signal));
    }
    let shown = out.shown.join(&name);
    let (peak, request) = measure(&folder, &run_id)?;
    let text = fs::read_to_string(folder.join("stderr.txt")).unwrap_or_default();
    let outcome = match (request, status.success()) {
        (Some(request), _) => Outcome::TooBig(request),
        (None, true) => Outcome::Fits,
        (None, false) if says_out_of_memory(&text) => Outcome::TooBig(String::new()),
        (None, false) => {
            let ended = match status.signal() {
                Some(signal) => format!("signal {signal}"),
                None => format!("status {}", status.code().unwrap_or(1)),
            };
            let lines: Vec<String> = text.lines().map(str::to_owned).collect();
            Outcome::Failed(ended, lines[lines.len().saturating_sub(TAIL_LINES)..].to_vec())
        }
    };
    Ok(ControlFlow::Continue(Trial {
        value: (*value).to_owned(),
        outcome,
        took,
        folder: shown,
        files: folder,
        peak,
    }))
}

/// Returns true if a program's stderr reports that memory ran out. The trace has no OOM when an allocation
/// outside torch's allocator failed: one of a library, or of the cudaMallocAsync backend.
fn says_out_of_memory(text: &str) -> bool {
    [
        "CUDA out of memory",
        "CUDA error: out of memory",
        "OutOfMemoryError",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ]
    .iter()
    .any(|phrase| text.contains(phrase))
}

/// Reads the peaks of a run from its traces, and describes the request that ran out of memory, if any.
fn measure(folder: &Path, run_id: &str) -> Result<(PeakUse, Option<String>)> {
    recovery::begin(folder);
    if trace_input::open_run(folder, run_id).is_err() {
        return Ok((PeakUse::default(), None));
    }
    let input = recovery::complete_quietly(|| Ok(trace_input::open_run(folder, run_id)?))?;
    let inputs = [input];
    let ask = |name: &str| -> Result<Value> {
        let report = reports::find(name).with_context(|| format!("there is no report {name}"))?;
        Ok(report.run(&inputs, &Options::default())?.to_json(name))
    };
    let summary = ask("summary")?;
    let number = |value: &Value| value.as_i64().unwrap_or(0);
    let mut peak = PeakUse::default();
    let mut ran_out = false;
    for (process, trace) in summary["processes"].as_array().into_iter().flatten().zip(&inputs[0].traces) {
        peak.processes += 1;
        ran_out |= number(&process["events"]["oom"]) > 0;
        peak.retries += number(&process["failed_calls"]);
        peak.phantom |= process["phantom"] == true;
        for device in process["devices"].as_array().into_iter().flatten() {
            let used = number(&device["peak_used"]["bytes"]);
            let ordinal = i32::try_from(number(&device["device"])).unwrap_or(-1);
            if used >= peak.used {
                peak.used = used;
                peak.allocated = number(&device["peak_allocated"]["bytes"]);
                peak.reserved = number(&device["peak_reserved"]["bytes"]);
                peak.capacity = trace.meta.total_bytes(ordinal);
                let context = |name: &str| trace.meta.phantom[name].as_i64();
                let more = context("context_high_bytes").zip(context("context_bytes"));
                peak.inside_range = more.is_some_and(|(most, here)| peak.capacity - used < most - here);
                peak.device = trace.meta.device(ordinal).map_or(String::new(), |card| card.name.clone());
                let by_category = device["at_peak_by_category_bytes"].as_object();
                peak.by_category = by_category
                    .into_iter()
                    .flatten()
                    .map(|(name, bytes)| (name.clone(), number(bytes)))
                    .collect();
                peak.by_category.sort_by_key(|(_, bytes)| -bytes);
            }
        }
    }
    if !ran_out {
        return Ok((peak, None));
    }
    let oom = &ask("oom")?["ooms"][0];
    peak.inside_range = oom["inside_range"] == true;
    let bytes = number(&oom["requested_bytes"]).max(number(&oom["rounded_bytes"]));
    let mut request = format!("asked for {}", Unit::Auto.show(bytes));
    for (before, name) in [("by", "op"), ("in", "module"), ("in", "phase")] {
        if let Some(text) = oom[name].as_str().filter(|text| !text.is_empty() && *text != "(none)") {
            request.push_str(&format!(" {before} {text}"));
        }
    }
    Ok((peak, Some(request)))
}
