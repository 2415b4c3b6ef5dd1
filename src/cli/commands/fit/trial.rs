//! One run of the program with one value, and its outcome.

use std::fs::{self, File};
use std::ops::ControlFlow;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports;
use memtrace_trace::units::Unit;
use serde_json::Value;

use super::Plan;
use crate::child_env::{Scratch, run_id, traced};
use crate::out_folder::OutFolder;
use crate::{recovery, signals};

/// The end of what a failed program said.
const TAIL_LINES: usize = 12;

/// How a run with one value ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Status 0, and no request ran out of memory.
    Fits,
    /// It ran out of memory; the text says what was asked and by whom, as far as it is known.
    TooBig(String),
    /// It failed for another reason: how it ended, and the last that it said.
    Failed(String, Vec<String>),
}

/// A run with one value.
pub(super) struct Trial {
    pub(super) value: String,
    pub(super) outcome: Outcome,
    pub(super) took: Duration,
    /// The folder of its traces.
    pub(super) folder: PathBuf,
    /// What the fullest device took; zeros when there is no trace.
    pub(super) taken: Taken,
}

/// The peaks of the fullest device of the fullest process.
#[derive(Clone, Debug, Default)]
pub(super) struct Taken {
    pub(super) allocated: i64,
    pub(super) reserved: i64,
    pub(super) used: i64,
    /// The device's memory; 0 when unknown.
    pub(super) capacity: i64,
    /// Its name.
    pub(super) device: String,
    /// Is it one that is not there?
    pub(super) phantom: bool,
    /// Calls that failed and were tried again after the allocator's cache was emptied.
    pub(super) retries: i64,
    /// Processes with a trace.
    pub(super) processes: usize,
    /// Bytes by category at the peak of allocated memory, largest first.
    pub(super) held: Vec<(String, i64)>,
}

/// An outcome in a word.
pub(super) fn outcome_word(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Fits => "fits",
        Outcome::TooBig(_) => "out of memory",
        Outcome::Failed(..) => "failed",
    }
}

/// Runs the program with one value; breaks off with its end when somebody ended it, and us with it.
pub(super) fn attempt(
    plan: &Plan<'_>,
    value: &str,
    out: &OutFolder,
) -> Result<ControlFlow<ExitStatus, Trial>> {
    let name: String =
        value.chars().map(|c| if c.is_alphanumeric() || "-_.".contains(c) { c } else { '_' }).collect();
    let folder = out.folder.join(&name);
    if folder.exists() {
        bail!("{} is there already; name another folder with -o", folder.display());
    }
    fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
    let run_id = run_id();
    let scratch = Scratch::new(&run_id)?;
    let command = plan.command(value);
    let mut child = traced(&scratch, &command, &folder, &run_id, plan.phantom.as_ref())?;
    let said = |name: &str| -> Result<File> {
        let path = folder.join(name);
        File::create_new(&path).with_context(|| path.display().to_string())
    };
    child.stdin(Stdio::null()).stdout(said("stdout.txt")?).stderr(said("stderr.txt")?);
    let passing = signals::Passing::start()?;
    let started = Instant::now();
    let mut child = match child.spawn() {
        Ok(child) => child,
        Err(error) => {
            fs::remove_dir_all(&folder).ok();
            out.remove_if_empty();
            bail!("cannot run {}: {error}", Path::new(&command[0]).display());
        }
    };
    passing.to(child.id());
    let status = child.wait().context("cannot wait for the program")?;
    let took = started.elapsed();
    if passing.stop() {
        fs::remove_dir_all(&folder).ok();
        out.remove_if_empty();
        return Ok(ControlFlow::Break(status));
    }
    let shown = out.shown.join(&name);
    let (taken, asked) = look(&folder, &run_id)?;
    let text = fs::read_to_string(folder.join("stderr.txt")).unwrap_or_default();
    let outcome = match (asked, status.success()) {
        (Some(asked), _) => Outcome::TooBig(asked),
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
    Ok(ControlFlow::Continue(Trial { value: value.to_owned(), outcome, took, folder: shown, taken }))
}

/// Device memory can run out past torch's allocator, which then reports nothing: in a library's own
/// allocation, or with the backend of the driver.
fn says_out_of_memory(text: &str) -> bool {
    [
        "CUDA out of memory",
        "CUDA error: out of memory",
        "OutOfMemoryError",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
    ]
    .iter()
    .any(|words| text.contains(words))
}

/// What a run took, and what the request that ran out of memory asked for, if one did.
fn look(folder: &Path, run_id: &str) -> Result<(Taken, Option<String>)> {
    let open = || {
        Input::open(folder).map(|mut input| {
            input.only_run(run_id);
            input
        })
    };
    let Ok(mut input) = open() else { return Ok((Taken::default(), None)) };
    if recovery::finish_quietly(&input)? {
        input = open()?;
    }
    let inputs = [input];
    let ask = |name: &str| -> Result<Value> {
        let report = reports::find(name).with_context(|| format!("no report {name}"))?;
        Ok(report.run(&inputs, &Options::default())?.to_json(name))
    };
    let summary = ask("summary")?;
    let number = |value: &Value| value.as_i64().unwrap_or(0);
    let mut taken = Taken::default();
    let mut ran_out = false;
    for (process, trace) in summary["processes"].as_array().into_iter().flatten().zip(&inputs[0].traces) {
        taken.processes += 1;
        ran_out |= number(&process["events"]["oom"]) > 0;
        taken.retries += number(&process["failed_calls"]);
        taken.phantom |= process["phantom"] == true;
        for device in process["devices"].as_array().into_iter().flatten() {
            let used = number(&device["peak_used"]["bytes"]);
            let ordinal = i32::try_from(number(&device["device"])).unwrap_or(-1);
            if used >= taken.used {
                taken.used = used;
                taken.allocated = number(&device["peak_allocated"]["bytes"]);
                taken.reserved = number(&device["peak_reserved"]["bytes"]);
                taken.capacity = trace.meta.total_bytes(ordinal);
                taken.device = trace.meta.device(ordinal).map_or(String::new(), |card| card.name.clone());
                let held = device["at_peak_by_category_bytes"].as_object();
                taken.held =
                    held.into_iter().flatten().map(|(name, bytes)| (name.clone(), number(bytes))).collect();
                taken.held.sort_by_key(|(_, bytes)| -bytes);
            }
        }
    }
    if !ran_out {
        return Ok((taken, None));
    }
    let oom = &ask("oom")?["ooms"][0];
    let bytes = number(&oom["requested_bytes"]).max(number(&oom["rounded_bytes"]));
    let mut asked = format!("asked for {}", Unit::Auto.show(bytes));
    for (before, name) in [("by", "op"), ("in", "module"), ("in", "phase")] {
        if let Some(text) = oom[name].as_str().filter(|text| !text.is_empty() && *text != "(none)") {
            asked.push_str(&format!(" {before} {text}"));
        }
    }
    Ok((taken, Some(asked)))
}
