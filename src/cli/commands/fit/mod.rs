//! `memtrace fit`: finds the largest value with which a program fits in memory.
//!
//! It runs the program, traced, once for each value that [`Search`] chooses. A value fits when the program
//! ends with status 0 and no request ran out of memory. A run that fails for another reason ends the search
//! without an answer, and the end of its stderr is shown.

mod answer;
mod ask;
mod search;
mod trial;

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Arg, ArgMatches, Command, value_parser};
use memtrace_analysis::render::numbers::duration;
use memtrace_trace::text::printable;
use memtrace_trace::units::Unit;

use crate::child_env::PhantomArgs;
use crate::out_folder::OutFolder;
use crate::{args, signals, terminal};
use search::Search;
use trial::{Attempt, Outcome, PeakUse, Trial, run_trial};

/// Stands for the value in the command.
const PLACEHOLDER: &[u8] = b"{}";
/// The largest number to try without `--max`.
const LARGEST: usize = 1 << 20;
/// After so many values with the same peak, the value is taken to have no effect on memory.
const UNCHANGED: usize = 5;

/// The arguments of `memtrace fit`.
pub(crate) fn command() -> Command {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("N")
            .value_parser(value_parser!(u64).range(1..=1 << 40))
            .conflicts_with("values")
            .help(help)
    };
    Command::new("fit")
        .about("Find the largest value, such as a batch size, with which a program fits in memory")
        .after_help(
            "Example:  memtrace fit --phantom h100-80g -- python train.py --batch {}

\
             The program runs once for each value, so keep it short: one or two steps show the peak. A value \
             fits when the program ends with status 0 and never ran out of memory. Exit status: 0; 1 when \
             the program fails for another reason or --ask finds no figure; 3 when even the first value does not fit.",
        )
        .arg(args::out_arg(
            "Keep the traces of the largest value that fits and of the smallest that does not \
                in this folder [default: a new folder in memtrace-out]",
        ))
        .args(args::phantom_args())
        .arg(number("min", "The smallest value to try [default: 1]"))
        .arg(number("max", "The largest value to try"))
        .arg(number("multiple-of", "Try only multiples of N"))
        .arg(
            Arg::new("within")
                .long("within")
                .value_name("PERCENT")
                .default_value("1%")
                .value_parser(percent)
                .conflicts_with("values")
                .help("Stop when the value that fits and the one that does not are this close, in percent of the value; 0 \
                     finds the exact limit"),
        )
        .arg(
            Arg::new("values")
                .long("values")
                .value_name("LIST")
                .help("Try only these values, in the order of the memory that they need: 512,1024,2048"),
        )
        .arg(
            Arg::new("ask")
                .long("ask")
                .value_name("REGEX")
                .conflicts_with_all(["min", "max", "multiple-of", "within"])
                .help(
                    "Search nothing: run once for each of --cards and --values, and print the text that the group \
                     in REGEX matches in the output: 'KV cache size: ([0-9,]+) tokens'. The program must end \
                     by itself",
                ),
        )
        .arg(
            Arg::new("cards")
                .long("cards")
                .value_name("LIST")
                .requires("ask")
                .conflicts_with("phantom")
                .help("Run on each of these simulated cards: l4,2xl4,a100-40g"),
        )
        .arg(args::json_arg())
        .arg(args::program_arg().help("The program and its arguments, with {} in the place of the value"))
}

/// The share that a text such as `2%` or `0.5` tells in percent.
fn percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim().trim_end_matches('%').trim_end().parse().ok();
    let number = number.filter(|number| (0.0..=50.0).contains(number));
    number.map(|number| number / 100.0).ok_or_else(|| "give a number from 0 to 50, in percent: 2%".to_owned())
}

/// The values to try, by index.
enum Values {
    /// `first`, `first + step`, ...
    Numbers { first: usize, step: usize },
    /// Those of `--values`.
    List(Vec<String>),
}

impl Values {
    /// The first value, in steps between two values.
    fn first_in_steps(&self) -> f64 {
        match self {
            Values::Numbers { first, step } => *first as f64 / *step as f64,
            Values::List(_) => 0.0,
        }
    }

    fn text(&self, index: usize) -> String {
        match self {
            Values::Numbers { first, step } => (first + step * index).to_string(),
            Values::List(list) => list.get(index).cloned().unwrap_or_default(),
        }
    }
}

/// The request, from the command line.
struct Plan<'a> {
    /// The program and its arguments.
    words: Vec<&'a OsString>,
    values: Values,
    /// The index of the last value.
    last: usize,
    /// How close the values at the limit are in the end, as a share of the value.
    within: f64,
    phantom: Option<PhantomArgs<'a>>,
}

impl<'a> Plan<'a> {
    fn from_matches(matches: &'a ArgMatches) -> Result<Plan<'a>> {
        let words: Vec<&OsString> = matches.get_many("command").into_iter().flatten().collect();
        if !words.iter().any(|word| word.as_bytes().windows(2).any(|two| two == PLACEHOLDER)) {
            bail!(
                "the command has no place for the value; write {{}} in its place: \
                 memtrace fit -- python train.py --batch {{}}"
            );
        }
        let phantom = PhantomArgs::from_matches(matches)?;
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
                bail!("--max {most} is smaller than the first value, {first}");
            }
            (Values::Numbers { first, step }, (most - first) / step)
        };
        let within = if matches!(values, Values::List(_)) {
            0.0
        } else {
            matches.get_one("within").copied().unwrap_or_default()
        };
        Ok(Plan { words, values, last, within, phantom })
    }

    /// The run with `value` in the place of each [`PLACEHOLDER`].
    fn attempt<'b>(&'b self, value: &'b str) -> Attempt<'b> {
        let command = self.words.iter().map(|word| with_value(word, value)).collect();
        Attempt { command, value, phantom: self.phantom.as_ref() }
    }
}

fn with_value(word: &OsStr, value: &str) -> OsString {
    let mut rest = word.as_bytes();
    let mut text = Vec::with_capacity(rest.len());
    while let Some(at) = rest.windows(2).position(|two| two == PLACEHOLDER) {
        text.extend_from_slice(&rest[..at]);
        text.extend_from_slice(value.as_bytes());
        rest = &rest[at + 2..];
    }
    text.extend_from_slice(rest);
    OsString::from_vec(text)
}

/// Searches for the largest value that fits, and prints the answer.
///
/// # Errors
/// When the request is invalid, or the program cannot be run.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    if let Some(pattern) = matches.get_one::<String>("ask") {
        return ask::run(matches, pattern);
    }
    let plan = Plan::from_matches(matches)?;
    let out = OutFolder::new(matches.get_one::<PathBuf>("out"))?;
    let mut search = Search::new(plan.last, plan.values.first_in_steps(), plan.within);
    let mut trials: Vec<(usize, Trial)> = Vec::new();
    let progress = Progress::new(&out);
    let forwarder = signals::Forwarder::start()?;
    let mut stopped = None;
    let mut ended_by = None;
    while let Some(index) = search.next(guess(&trials)) {
        let value = plan.values.text(index);
        progress.trying(&value, trials.len() + 1);
        // A signal may also arrive while a trace is read.
        ended_by = forwarder.asked_to_end();
        if ended_by.is_none() {
            match run_trial(&plan.attempt(&value), &out, &forwarder)? {
                ControlFlow::Continue(trial) => trials.push((index, trial)),
                ControlFlow::Break(signal) => ended_by = Some(signal),
            }
        }
        if let Some(signal) = ended_by {
            progress.clear();
            stopped = Some(interrupted(signal, &search, &plan));
            break;
        }
        let Some((_, trial)) = trials.last() else { break };
        progress.tried(trial);
        match trial.outcome {
            Outcome::Fits if trial.peak.processes == 0 => {
                let hint =
                    if plan.phantom.is_some() { "" } else { "; without a GPU, add --phantom h100-80g" };
                stopped = Some(format!("with value {value} the program allocated no GPU memory{hint}"));
            }
            Outcome::Fits => search.record(index, true),
            Outcome::TooBig(_) => search.record(index, false),
            Outcome::Failed(..) => {
                stopped =
                    Some(format!("with value {value} the program failed for a reason other than memory"));
            }
        }
        if stopped.is_none() && search.too_big.is_none() && unchanged(&trials) {
            stopped = Some(format!(
                "the last {UNCHANGED} values have the same peak: the program does not use the value of {{}}"
            ));
        }
        if stopped.is_some() {
            break;
        }
    }
    forwarder.stop();
    // Keep only the traces that the answer names.
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
    let answer = answer::Answer {
        command: plan.words.iter().map(|word| word.to_string_lossy().into_owned()).collect(),
        fits: find(search.fits),
        too_big: find(search.too_big),
        trials: trials.iter().map(|(_, trial)| trial).collect(),
        has_gap: search.fits.zip(search.too_big).is_some_and(|(fits, too_big)| too_big - fits > 1),
        last_is_given: matches.get_one::<u64>("max").is_some()
            || matches.get_one::<String>("values").is_some(),
        free_at_start: plan.phantom.as_ref().map(PhantomArgs::free_at_start),
        stopped,
    };
    let mut stdout = std::io::stdout().lock();
    if matches.get_flag("json") {
        stdout.write_all(terminal::json_text(&answer.json()).as_bytes())?;
    } else {
        stdout.write_all(answer.text().as_bytes())?;
    }
    stdout.flush()?;
    if let Some(signal) = ended_by {
        out.remove_if_empty();
        return Ok(signals::end_by(signal));
    }
    Ok(match (&answer.stopped, answer.fits) {
        (Some(_), _) => ExitCode::from(1),
        (None, Some(_)) => ExitCode::SUCCESS,
        (None, None) => ExitCode::from(3),
    })
}

/// The index at which memory would be full, by the two largest values that fit.
fn guess(trials: &[(usize, Trial)]) -> Option<usize> {
    let mut fit: Vec<(usize, &PeakUse)> = trials
        .iter()
        .filter(|(_, trial)| trial.outcome == Outcome::Fits)
        .map(|(index, trial)| (*index, &trial.peak))
        .collect();
    fit.sort_by_key(|(index, _)| *index);
    let [.., (a, less), (b, more)] = fit.as_slice() else { return None };
    // A program without torch has no allocated memory, only calls of CUDA.
    let bytes = |peak: &PeakUse| if more.allocated > 0 { peak.allocated } else { peak.used };
    search::full_at([(*a, bytes(less)), (*b, bytes(more))], more.capacity - bytes(more))
}

/// Returns true if the last [`UNCHANGED`] runs have the same peak.
fn unchanged(trials: &[(usize, Trial)]) -> bool {
    let last = trials.len().saturating_sub(UNCHANGED);
    let peaks: Vec<_> =
        trials[last..].iter().map(|(_, trial)| (trial.peak.allocated, trial.peak.used)).collect();
    peaks.len() == UNCHANGED && peaks.iter().all(|peak| *peak == peaks[0])
}

/// What is known when a signal ends the search.
fn interrupted(signal: i32, search: &Search, plan: &Plan<'_>) -> String {
    let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
    let text = |index: usize| plan.values.text(index);
    let known = match (search.fits.map(text), search.too_big.map(text)) {
        (Some(fits), Some(too_big)) => {
            format!("{fits} fits and {too_big} does not, the values between are not tried")
        }
        (Some(fits), None) => format!("{fits} fits, no value was too large yet"),
        (None, Some(too_big)) => format!("{too_big} does not fit, no value fitted yet"),
        (None, None) => "no run had ended".to_owned(),
    };
    format!("ended by {name}; so far {known}")
}

/// The name of the file in the output folder that has a line for each run.
const TRIALS_FILE: &str = "trials.txt";

/// Prints a line for each run as it ends, and keeps it in [`TRIALS_FILE`]. A terminal also shows the run in
/// progress.
struct Progress {
    on_terminal: bool,
    file: PathBuf,
}

impl Progress {
    fn new(out: &OutFolder) -> Progress {
        Progress { on_terminal: std::io::stderr().is_terminal(), file: out.folder.join(TRIALS_FILE) }
    }

    fn trying(&self, value: &str, number: usize) {
        if self.on_terminal {
            terminal::show_progress(&format!("run {number}: trying {value} ..."));
        }
    }

    fn clear(&self) {
        if self.on_terminal {
            terminal::show_progress("");
        }
    }

    fn tried(&self, trial: &Trial) {
        let took = duration(trial.took.as_nanos() as i64);
        // A program without torch has no allocated memory, only calls of CUDA.
        let PeakUse { allocated, used, .. } = trial.peak;
        let peak = Unit::Auto.show(if allocated > 0 { allocated } else { used });
        let line = format!("{}: {}, peak {peak}, {took}", trial.value, trial.outcome.word());
        self.clear();
        let line = printable(&line);
        writeln!(std::io::stderr(), "{line}").ok();
        // The lines are on stderr too: a full disk does not end the search.
        let file = fs::OpenOptions::new().create(true).append(true).open(&self.file);
        file.and_then(|mut file| writeln!(file, "{line}")).ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_puts_the_value_in_the_place_of_each_placeholder() {
        assert_eq!(with_value(OsStr::new("--batch={}"), "12"), "--batch=12");
        assert_eq!(with_value(OsStr::new("{}x{}"), "3"), "3x3");
        assert_eq!(with_value(OsStr::new("{"), "3"), "{");
    }
}
