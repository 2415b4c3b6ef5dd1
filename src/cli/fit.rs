//! `memtrace fit`: the largest value with which a program still fits, and what holds the memory there.
//!
//! It runs the program, traced, once for each value that [`Search`] asks for. A value fits when the
//! program ends with status 0 and no request ran out of memory. What fails for another reason is no
//! answer: it ends the search and is shown.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use memtrace_analysis::input::Input;
use memtrace_analysis::options::Options;
use memtrace_analysis::page::duration;
use memtrace_analysis::reports;
use memtrace_trace::units::Unit;
use serde_json::Value;

use crate::fit_page;
use crate::launch::Out;
use crate::search::Search;
use crate::traced::{Phantom, Scratch, run_id, traced};
use crate::{leftover, signals};

/// What stands for the value.
const PLACE: &[u8] = b"{}";
/// The largest number tried when nobody says one.
const LARGEST: usize = 1 << 20;
/// So many doublings that leave the peak as it is, and the value has nothing to do with memory.
const UNCHANGED: usize = 5;
/// The end of what a failed program said.
const TAIL_LINES: usize = 12;

/// How a run with one value ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Status 0, and no request ran out of memory.
    Fits,
    /// It ran out of memory; the text says what was asked and by whom, as far as it is known.
    TooBig(String),
    /// It failed for another reason: how it ended, and the last that it said.
    Failed(String, Vec<String>),
}

/// A run with one value.
pub(crate) struct Trial {
    pub(crate) value: String,
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
    /// The folder of its traces.
    pub(crate) folder: PathBuf,
    /// What the fullest device took; zeros when there is no trace.
    pub(crate) taken: Taken,
}

/// The peaks of the fullest device of the fullest process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Taken {
    pub(crate) allocated: i64,
    pub(crate) reserved: i64,
    pub(crate) used: i64,
    /// The device's memory; 0 when unknown.
    pub(crate) capacity: i64,
    /// Its name.
    pub(crate) device: String,
    /// Is it one that is not there?
    pub(crate) phantom: bool,
    /// Calls that failed and were tried again after the allocator's cache was emptied.
    pub(crate) retries: i64,
    /// Processes with a trace.
    pub(crate) processes: usize,
    /// Bytes by category at the peak of allocated memory, largest first.
    pub(crate) held: Vec<(String, i64)>,
}

/// The values to try.
enum Values {
    Numbers { first: usize, step: usize },
    List(Vec<String>),
}

impl Values {
    fn text(&self, index: usize) -> String {
        match self {
            Values::Numbers { first, step } => (first + step * index).to_string(),
            Values::List(list) => list.get(index).cloned().unwrap_or_default(),
        }
    }
}

/// What was asked for.
struct Plan<'a> {
    words: Vec<&'a OsString>,
    values: Values,
    last: usize,
    phantom: Option<Phantom<'a>>,
}

impl<'a> Plan<'a> {
    fn of(matches: &'a ArgMatches) -> Result<Plan<'a>> {
        let words: Vec<&OsString> = matches.get_many("command").into_iter().flatten().collect();
        if !words.iter().any(|word| word.as_bytes().windows(2).any(|two| two == PLACE)) {
            bail!(
                "where does the value go? Write {{}} in its place: memtrace fit -- python train.py --batch {{}}"
            );
        }
        let phantom = Phantom::wanted(matches)?;
        let (values, last) = if let Some(list) = matches.get_one::<String>("values") {
            let list: Vec<String> = list.split(',').map(|value| value.trim().to_owned()).collect();
            let last = list.len() - 1;
            (Values::List(list), last)
        } else {
            let number = |name| matches.get_one::<u64>(name).map(|number| *number as usize);
            let step = number("multiple-of").unwrap_or(1).max(1);
            let first = number("min").unwrap_or(step).next_multiple_of(step);
            let most = number("max").unwrap_or(LARGEST.max(first));
            if most < first {
                bail!("--max {most} is less than the first value, {first}");
            }
            (Values::Numbers { first, step }, (most - first) / step)
        };
        Ok(Plan { words, values, last, phantom })
    }

    /// The command with the value in its place.
    fn command(&self, value: &str) -> Vec<OsString> {
        self.words.iter().map(|word| placed(word, value)).collect()
    }
}

fn placed(word: &OsStr, value: &str) -> OsString {
    let mut rest = word.as_bytes();
    let mut text = Vec::with_capacity(rest.len());
    while let Some(at) = rest.windows(2).position(|two| two == PLACE) {
        text.extend_from_slice(&rest[..at]);
        text.extend_from_slice(value.as_bytes());
        rest = &rest[at + 2..];
    }
    text.extend_from_slice(rest);
    OsString::from_vec(text)
}

/// Searches.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let plan = Plan::of(matches)?;
    let out = Out::new(matches.get_one::<PathBuf>("out"))?;
    let mut search = Search::new(plan.last);
    let mut trials: Vec<(usize, Trial)> = Vec::new();
    let progress = Progress { on: std::io::stderr().is_terminal() };
    let mut stopped = None;
    while let Some(index) = search.next(guess(&trials)) {
        let value = plan.values.text(index);
        progress.trying(&value, trials.len() + 1);
        let trial = match attempt(&plan, &value, &out)? {
            ControlFlow::Continue(trial) => trial,
            ControlFlow::Break(status) => {
                progress.clear();
                return Ok(signals::end_like(status));
            }
        };
        progress.tried(&trial);
        match trial.outcome {
            Outcome::Fits if trial.taken.processes == 0 => {
                stopped = Some(format!(
                    "{value}: the program took no GPU memory, so there is nothing to fit; \
                     with no GPU here, add --phantom h100-80g"
                ));
            }
            Outcome::Fits => search.tried(index, true),
            Outcome::TooBig(_) => search.tried(index, false),
            Outcome::Failed(..) => {
                stopped = Some(format!("{value}: the program failed, and not for want of memory"));
            }
        }
        trials.push((index, trial));
        if stopped.is_none() && search.too_big.is_none() && unchanged(&trials) {
            stopped = Some(format!(
                "the peak is the same for the last {UNCHANGED} values: does the program use what stands for {{}}?"
            ));
        }
        if stopped.is_some() {
            break;
        }
    }
    // What the answer does not speak of goes.
    let named = [search.fits, search.too_big];
    for (index, trial) in &trials {
        let failed = matches!(trial.outcome, Outcome::Failed(..));
        if !named.contains(&Some(*index)) && !failed {
            fs::remove_dir_all(&trial.folder).ok();
        }
    }
    let find = |wanted: Option<usize>| {
        trials.iter().find(|(index, _)| Some(*index) == wanted).map(|(_, trial)| trial)
    };
    let answer = fit_page::Answer {
        command: plan.words.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        fits: find(search.fits),
        too_big: find(search.too_big),
        trials: trials.iter().map(|(_, trial)| trial).collect(),
        asked_for_more: matches.get_one::<u64>("max").is_some()
            || matches.get_one::<String>("values").is_some(),
        stopped,
    };
    let mut stdout = std::io::stdout().lock();
    if matches.get_flag("json") {
        writeln!(stdout, "{:#}", answer.json())?;
    } else {
        stdout.write_all(answer.text().as_bytes())?;
    }
    stdout.flush()?;
    Ok(match (&answer.stopped, answer.fits) {
        (Some(_), _) => ExitCode::from(1),
        (None, Some(_)) => ExitCode::SUCCESS,
        (None, None) => ExitCode::from(3),
    })
}

/// Where the memory would end by the line through the two largest values that fit.
fn guess(trials: &[(usize, Trial)]) -> Option<usize> {
    let mut fit: Vec<(usize, &Taken)> = trials
        .iter()
        .filter(|(_, trial)| trial.outcome == Outcome::Fits)
        .map(|(index, trial)| (*index, &trial.taken))
        .collect();
    fit.sort_by_key(|(index, _)| *index);
    let [.., (a, less), (b, more)] = fit.as_slice() else { return None };
    // A program without torch has nothing but calls.
    let bytes = |taken: &Taken| if more.allocated > 0 { taken.allocated } else { taken.used };
    let slope = (bytes(more) - bytes(less)) as f64 / (b - a) as f64;
    // What the context takes is not torch's to allocate, and large pieces do not fill the rest whole.
    let room = (more.capacity - bytes(more)) as f64 * 0.97;
    (slope > 0.0 && room >= 0.0).then(|| b + (room / slope) as usize)
}

fn unchanged(trials: &[(usize, Trial)]) -> bool {
    let last = trials.len().saturating_sub(UNCHANGED);
    let peaks: Vec<_> =
        trials[last..].iter().map(|(_, trial)| (trial.taken.allocated, trial.taken.used)).collect();
    peaks.len() == UNCHANGED && peaks.iter().all(|peak| *peak == peaks[0])
}

/// Runs the program with one value; breaks off with its end when somebody ended it, and us with it.
fn attempt(plan: &Plan<'_>, value: &str, out: &Out) -> Result<ControlFlow<ExitStatus, Trial>> {
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
    if leftover::finish_quietly(&input)? {
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

/// Lines on stderr as the search goes on, on a terminal.
struct Progress {
    on: bool,
}

impl Progress {
    fn trying(&self, value: &str, number: usize) {
        if self.on {
            eprint!("\r\x1b[Krun {number}: trying {value} ...");
        }
    }

    fn clear(&self) {
        if self.on {
            eprint!("\r\x1b[K");
        }
    }

    fn tried(&self, trial: &Trial) {
        if self.on {
            let took = duration(trial.took.as_nanos() as i64);
            let peak = Unit::Auto.show(trial.taken.allocated);
            let how = fit_page::word(&trial.outcome);
            eprintln!("\r\x1b[K{}: {how}, peak {peak}, {took}", trial.value);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_goes_where_its_place_is() {
        assert_eq!(placed(OsStr::new("--batch={}"), "12"), "--batch=12");
        assert_eq!(placed(OsStr::new("{}x{}"), "3"), "3x3");
        assert_eq!(placed(OsStr::new("{"), "3"), "{");
    }
}
