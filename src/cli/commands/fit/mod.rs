//! `memtrace fit`: the largest value with which a program still fits, and what holds the memory there.
//!
//! It runs the program, traced, once for each value that [`Search`] asks for. A value fits when the
//! program ends with status 0 and no request ran out of memory. What fails for another reason is no
//! answer: it ends the search and is shown.

mod answer;
mod bisect;
mod trial;

use std::ffi::{OsStr, OsString};
use std::fs::{self};
use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Arg, ArgMatches, Command, value_parser};
use memtrace_analysis::render::numbers::duration;
use memtrace_trace::units::Unit;

use crate::args;
use crate::child_env::Phantom;
use crate::out_folder::OutFolder;
use crate::signals;
use bisect::Search;
use trial::{Outcome, Taken, Trial, attempt};

/// What stands for the value.
const PLACE: &[u8] = b"{}";
/// The largest number tried when nobody says one.
const LARGEST: usize = 1 << 20;
/// So many doublings that leave the peak as it is, and the value has nothing to do with memory.
const UNCHANGED: usize = 5;

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
        .about("The largest value with which a program fits, and what holds the memory there")
        .after_help(
            "Example:  memtrace fit --phantom h100-80g -- python train.py --batch {}\n\n\
             The program runs once for each value tried, as short as it can be: a step or two show the peak. A value fits \
             when it ends with status 0 and nothing ran out of memory. Exit status: 0, 1 when the program fails for another \
             reason, 3 when not even the first value fits.",
        )
        .arg(
            args::out_arg("Where the traces at the two ends go [default: a new folder in memtrace-out]"),
        )
        .args(args::phantom_args())
        .arg(number("min", "The first value [default: 1]"))
        .arg(number("max", "The last value to try"))
        .arg(number("multiple-of", "Only multiples of this"))
        .arg(
            Arg::new("values")
                .long("values")
                .value_name("LIST")
                .help("These values and no others, each needing more than the one before: 512,1024,2048"),
        )
        .arg(args::json_arg())
        .arg(args::program_arg().help("The program and its arguments, {} where the value goes"))
}

/// Searches.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let plan = Plan::of(matches)?;
    let out = OutFolder::new(matches.get_one::<PathBuf>("out"))?;
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
    let answer = answer::Answer {
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
            let how = trial::outcome_word(&trial.outcome);
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
