//! `memtrace fit --ask`: a figure that the program prints, for each card and value, as a table.

use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::ArgMatches;
use memtrace_analysis::render::numbers::{duration, percent, share};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_trace::units::Unit;
use regex_lite::Regex;
use serde_json::{Value, json};

use super::trial::{Attempt, Outcome, Trial, run_trial};
use super::{Progress, with_value};
use crate::child_env::PhantomArgs;
use crate::out_folder::OutFolder;
use crate::{signals, terminal};

/// A run, and the figure that it printed.
struct Answered {
    /// The card as it was typed; empty for the machine's own GPU.
    card: String,
    trial: Trial,
    figure: Option<String>,
}

/// The figure in a run's output: the groups of the last match, or the whole match without groups.
fn figure(pattern: &Regex, trial: &Trial) -> Option<String> {
    let read = |name: &str| fs::read(trial.files.join(name)).unwrap_or_default();
    ["stderr.txt", "stdout.txt"].iter().find_map(|name| {
        let text = String::from_utf8_lossy(&read(name)).into_owned();
        let found = pattern.captures_iter(&text).last()?;
        let groups: Vec<&str> = found.iter().skip(1).flatten().map(|group| group.as_str()).collect();
        Some(if groups.is_empty() { found[0].to_owned() } else { groups.join(" ") })
    })
}

/// Runs the program once for each card and value, and prints the figures.
///
/// # Errors
/// When the request is invalid, or the program cannot be run.
pub(super) fn run(matches: &ArgMatches, pattern: &str) -> Result<ExitCode> {
    let pattern = Regex::new(pattern).map_err(|error| anyhow!("--ask {pattern}: {error}"))?;
    let words: Vec<&OsString> = matches.get_many("command").into_iter().flatten().collect();
    let values: Vec<&str> = match matches.get_one::<String>("values") {
        Some(list) => list.split(',').map(str::trim).collect(),
        None => vec![""],
    };
    let has_place = words.iter().any(|word| with_value(word, "0") != with_value(word, "1"));
    if has_place != matches.contains_id("values") {
        bail!("--ask tries the values of --values in the place of {{}}: give both or neither");
    }
    let cards: Vec<Option<&str>> = match matches.get_one::<String>("cards") {
        Some(list) => list.split(',').map(|card| Some(card.trim())).collect(),
        None => vec![matches.get_one::<String>("phantom").map(String::as_str)],
    };
    let phantoms: Result<Vec<Option<PhantomArgs<'_>>>> =
        cards.iter().map(|card| card.map(|card| PhantomArgs::of_card(matches, card)).transpose()).collect();
    let out = OutFolder::new(matches.get_one::<PathBuf>("out"))?;
    let progress = Progress::new(&out);
    let forwarder = signals::Forwarder::start()?;
    let mut answers: Vec<Answered> = Vec::new();
    let mut ended_by = None;
    'runs: for phantom in phantoms? {
        for value in &values {
            let card = phantom.as_ref().map_or("", |phantom| phantom.card);
            let label =
                [card, value].into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ");
            progress.trying(&label, answers.len() + 1);
            let command = words.iter().map(|word| with_value(word, value)).collect();
            let attempt = Attempt { command, value: &label, phantom: phantom.as_ref() };
            ended_by = forwarder.asked_to_end();
            let run = match ended_by {
                Some(signal) => ControlFlow::Break(signal),
                None => run_trial(&attempt, &out, &forwarder)?,
            };
            match run {
                ControlFlow::Break(signal) => {
                    ended_by = Some(signal);
                    break 'runs;
                }
                ControlFlow::Continue(mut trial) => {
                    progress.tried(&trial);
                    trial.value = (*value).to_owned();
                    let figure = figure(&pattern, &trial);
                    answers.push(Answered { card: card.to_owned(), figure, trial });
                }
            }
        }
    }
    forwarder.stop();
    for answer in answers.iter().filter(|answer| answer.figure.is_some() && !matches.contains_id("out")) {
        fs::remove_dir_all(&answer.trial.files).ok();
    }
    let mut stdout = std::io::stdout().lock();
    if matches.get_flag("json") {
        let rows: Vec<Value> = answers.iter().map(json_of).collect();
        let answer = json!({ "report": "fit", "asked": pattern.as_str(), "runs": rows });
        stdout.write_all(terminal::json_text(&answer).as_bytes())?;
    } else {
        stdout.write_all(text_of(&answers).as_bytes())?;
    }
    stdout.flush()?;
    if let Some(signal) = ended_by {
        return Ok(signals::end_by(signal));
    }
    let all = answers.iter().all(|answer| answer.figure.is_some());
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

fn text_of(answers: &[Answered]) -> String {
    let stdout = std::io::stdout();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    let mut table = Table::new(&[
        ("card", Side::Left),
        ("value", Side::Right),
        ("figure", Side::Right),
        ("", Side::Left),
        ("device used", Side::Right),
        ("of device", Side::Right),
        ("took", Side::Right),
    ]);
    for Answered { card, trial, figure } in answers {
        let peak = &trial.peak;
        let missing = if trial.outcome == Outcome::Fits { "not printed" } else { trial.outcome.word() };
        table.row([
            if card.is_empty() { peak.device.as_str() } else { card.as_str() }.into(),
            trial.value.as_str().into(),
            Cell::new(figure.as_deref().unwrap_or("-"), Style::Strong),
            Cell::new(if figure.is_some() { "" } else { missing }, Style::Alarm),
            Unit::Auto.show(peak.used).to_string().into(),
            percent(share(peak.used, peak.capacity)).into(),
            duration(trial.took.as_nanos() as i64).into(),
        ]);
    }
    page.table(&table);
    for Answered { trial, .. } in answers.iter().filter(|answer| answer.figure.is_none()) {
        page.gap();
        page.plain(format!("the output of this run is in {}", trial.folder.display()));
        if let Outcome::Failed(ended, tail) = &trial.outcome {
            page.plain(format!("{ended}; the last lines of its stderr:"));
            for line in tail {
                page.line([Cell::new(format!("    {line}"), Style::Faint)]);
            }
        }
    }
    page.text().to_owned()
}

fn json_of(answer: &Answered) -> Value {
    let Answered { card, trial, figure } = answer;
    let peak = &trial.peak;
    json!({
        "card": card,
        "value": trial.value,
        "figure": figure,
        "outcome": trial.outcome.word(),
        "device": peak.device,
        "capacity_bytes": peak.capacity,
        "peak_allocated_bytes": peak.allocated,
        "peak_reserved_bytes": peak.reserved,
        "peak_used_bytes": peak.used,
        "processes": peak.processes,
        "seconds": trial.took.as_secs_f64(),
        "folder": trial.folder.display().to_string(),
    })
}
