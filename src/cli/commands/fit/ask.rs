//! `memtrace fit --ask`: prints a table of a figure that the program prints, for each card and value.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::ArgMatches;
use memtrace_analysis::render::numbers::{duration, percent, share};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_trace::units::Unit;
use regex_lite::Regex;
use serde_json::{Value, json};

use super::answer::single_search::print_failure;
use super::recipe::prepared::{self, PreparedRecipe};
use super::request::candidates::listed;
use super::request::command_line::CommandLine;
use super::request::placeholders::Filling;
use super::request::plan::card_of_node;
use super::trial::launch::{PlannedTrial, check_names};
use super::trial::outcome::{STDERR, STDOUT, Trial, TrialOutcome, output};
use super::trial::peak::card_name;
use super::trial::runner::TrialRunner;
use crate::child_env::PhantomArgs;
use crate::terminal;

/// A trial and the figure that the program printed in it.
struct Answered {
    /// The card as it was typed; empty for the machine's own GPU.
    card: String,
    trial: Trial,
    figure: Option<String>,
}

/// Returns the figure in a trial's output: the groups of the pattern's last match, or the whole match if the
/// pattern has no groups. Searches stderr first, then stdout. Returns `None` without a match.
fn figure(pattern: &Regex, trial: &Trial) -> Option<String> {
    [STDERR, STDOUT].iter().find_map(|name| {
        let text = output(&trial.files, name);
        let found = pattern.captures_iter(&text).last()?;
        let groups: Vec<&str> = found.iter().skip(1).flatten().map(|group| group.as_str()).collect();
        Some(if groups.is_empty() { found[0].to_owned() } else { groups.join(" ") })
    })
}

/// The line that the recipe `serve` prints.
const KV_CACHE: &str = "KV cache: ([0-9]+) tokens";

/// Returns the tokens of a server's cache, which the trial printed; `None` if it did not.
pub(super) fn cache_tokens(trial: &Trial) -> Option<u64> {
    figure(&Regex::new(KV_CACHE).ok()?, trial)?.parse().ok()
}

/// Returns the name of a trial. It is not empty, because it is also the name of the trial's folder.
fn label(card: &str, value: &str) -> String {
    match (card, value) {
        ("", "") => "run".to_owned(),
        ("", one) | (one, "") => one.to_owned(),
        (card, value) => format!("{card} {value}"),
    }
}

/// Returns a trial for each card and value.
fn planned_trials(words: &[OsString], cards: &[Option<String>], values: &[String]) -> Vec<PlannedTrial> {
    let trial = |card: &Option<String>, value: &String| {
        let filling = Filling::of_value(value);
        PlannedTrial {
            command: words.iter().map(|word| filling.fill(word)).collect(),
            label: label(card.as_deref().unwrap_or_default(), value),
            value: value.clone(),
            card: card.clone(),
        }
    };
    cards.iter().flat_map(|card| values.iter().map(move |value| trial(card, value))).collect()
}

/// Returns the maximum number of GPUs in a trial.
///
/// # Errors
/// When a trial is not possible on its card.
fn most_gpus(matches: &ArgMatches, planned: &[PlannedTrial]) -> Result<u64> {
    let mut most = 1;
    for PlannedTrial { command, card, .. } in planned {
        if let Some(card) = card {
            let card = card_of_node(matches, card.clone(), command)?;
            most = PhantomArgs::of_card(matches, &card)?.count().max(most);
        }
    }
    Ok(most)
}

/// Runs the program of `line` once for each card and value, and prints the figures: those of `--ask`, or the tokens
/// of the cache of `server` at each length, and its options.
///
/// # Errors
/// When the request is invalid, or the program cannot be run.
pub(super) fn run(
    matches: &ArgMatches,
    line: CommandLine,
    server: Option<PreparedRecipe>,
) -> Result<ExitCode> {
    let CommandLine { words, cards, .. } = line;
    let (pattern, mut values) = match &server {
        Some(server) => (KV_CACHE, server.lengths.iter().map(u64::to_string).collect()),
        None => (matches.get_one::<String>("ask").map_or("", String::as_str), listed(matches)?),
    };
    let pattern = Regex::new(pattern).map_err(|error| anyhow!("--ask {pattern}: {error}"))?;
    if values.is_empty() {
        values.push(String::new());
    }
    let cards: Vec<Option<String>> =
        if cards.is_empty() { vec![None] } else { cards.into_iter().map(Some).collect() };
    let planned = planned_trials(&words, &cards, &values);
    let most_gpus = most_gpus(matches, &planned)?;
    check_names(planned.iter().map(|planned| planned.label.clone()))?;
    if let Some(server) = &server {
        server.prepare("")?;
    }
    let mut trials = TrialRunner::new(matches, most_gpus)?;
    let answers = make_trials(&mut trials, planned, &pattern)?;
    let ended = trials.stop();
    for answer in answers.iter().filter(|answer| answer.figure.is_some() && !matches.contains_id("out")) {
        fs::remove_dir_all(&answer.trial.files).ok();
    }
    print(matches.get_flag("json"), &pattern, &answers, server.as_ref())?;
    if let Some((server, file)) = server.as_ref().zip(matches.get_one::<PathBuf>("write")) {
        write_script(server, file, &answers)?;
    }
    let all = answers.iter().all(|answer| answer.figure.is_some());
    // A signal ends the process in `status`, so remove the recipe's temporary files before.
    drop(server);
    Ok(ended.status(if all { ExitCode::SUCCESS } else { ExitCode::from(1) }))
}

/// Makes the trials, and returns those that ended, in the order of `planned`. A signal ends the others.
fn make_trials(
    trials: &mut TrialRunner<'_, usize>,
    planned: Vec<PlannedTrial>,
    pattern: &Regex,
) -> Result<Vec<Answered>> {
    let cards: Vec<String> = planned.iter().map(|planned| planned.card.clone().unwrap_or_default()).collect();
    let mut waiting: VecDeque<(usize, PlannedTrial)> = planned.into_iter().enumerate().collect();
    let mut ended: Vec<(usize, Answered)> = Vec::new();
    loop {
        while trials.room() > 0
            && let Some((index, planned)) = waiting.pop_front()
        {
            trials.start(index, planned)?;
        }
        let Some((index, trial)) = trials.next_ended()? else { break };
        let figure = figure(pattern, &trial);
        ended.push((index, Answered { card: cards[index].clone(), figure, trial }));
    }
    ended.sort_by_key(|(index, _)| *index);
    Ok(ended.into_iter().map(|(_, answered)| answered).collect())
}

/// Prints the figures as text or as JSON.
fn print(
    as_json: bool,
    pattern: &Regex,
    answers: &[Answered],
    server: Option<&PreparedRecipe>,
) -> Result<()> {
    let text = if as_json {
        let rows: Vec<Value> = answers.iter().map(|answer| json_of(answer, server)).collect();
        terminal::json_text(&json!({ "report": "fit", "asked": pattern.as_str(), "runs": rows }))
    } else {
        text_of(answers, server)
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(())
}

/// Writes the script of a server with the length of the first trial that printed its cache's tokens, and the
/// requests that fill the cache. Writes nothing if no trial did.
fn write_script(server: &PreparedRecipe, file: &Path, answers: &[Answered]) -> Result<()> {
    let number = |text: &str| text.parse::<u64>().ok();
    let first = answers.iter().find_map(|answer| {
        Some((&answer.trial, number(&answer.trial.value)?, number(answer.figure.as_ref()?)?))
    });
    let Some((trial, length, tokens)) = first else {
        terminal::say("--write: nothing was written, because no trial printed its KV cache");
        return Ok(());
    };
    let requests = prepared::requests(tokens, length);
    server.write(file, &requests.to_string(), length)?;
    let device = &trial.peak.device;
    terminal::say(&format!("wrote {}: {requests} requests, {length} tokens, as on {device}", file.display()));
    Ok(())
}

/// Returns the options of a server for the length of a trial, if the trial printed its cache's tokens, or the
/// largest length that vLLM says would fit.
fn flags(answer: &Answered, server: &PreparedRecipe) -> Option<String> {
    let length = answer.trial.value.parse().ok()?;
    if let Some(tokens) = answer.figure.as_ref().and_then(|figure| figure.parse().ok()) {
        return Some(server.flags(length, tokens, ""));
    }
    let pattern = Regex::new("estimated maximum model length is ([0-9]+)").ok()?;
    let longest = figure(&pattern, &answer.trial)?;
    Some(format!("{length} tokens do not fit: --max-model-len {longest} does, says vLLM"))
}

fn text_of(answers: &[Answered], server: Option<&PreparedRecipe>) -> String {
    let stdout = std::io::stdout();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    let mut table = Table::new(&[
        ("card", Side::Left),
        (if server.is_some() { "tokens" } else { "value" }, Side::Right),
        (if server.is_some() { "KV cache tokens" } else { "figure" }, Side::Right),
        ("", Side::Left),
        ("device used", Side::Right),
        ("of device", Side::Right),
        ("took", Side::Right),
    ]);
    for Answered { card, trial, figure } in answers {
        let peak = &trial.peak;
        let missing = if trial.outcome == TrialOutcome::Fits { "not printed" } else { trial.outcome.word() };
        table.row([
            card_name(card, &peak.device).into(),
            trial.value.as_str().into(),
            Cell::new(figure.as_deref().unwrap_or("-"), Style::Strong),
            Cell::new(if figure.is_some() { "" } else { missing }, Style::Alarm),
            Unit::Auto.show(peak.used).to_string().into(),
            percent(share(peak.used, peak.capacity)).into(),
            duration(trial.took.as_nanos() as i64).into(),
        ]);
    }
    page.table(&table);
    if let Some(server) = server {
        page.gap();
        for answer in answers {
            if let Some(flags) = flags(answer, server) {
                page.plain(format!("{}: {flags}", card_name(&answer.card, &answer.trial.peak.device)));
            }
        }
    }
    for Answered { trial, .. } in answers.iter().filter(|answer| answer.figure.is_none()) {
        page.gap();
        page.plain(format!("the output of this trial is in {}", trial.folder.display()));
        print_failure(&mut page, "", trial);
    }
    page.text().to_owned()
}

fn json_of(answer: &Answered, server: Option<&PreparedRecipe>) -> Value {
    let Answered { card, trial, figure } = answer;
    let peak = &trial.peak;
    let mut row = json!({
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
        "folder": trial.existing_folder(),
    });
    if let Some((fields, server)) = row.as_object_mut().zip(server) {
        fields.insert("flags".to_owned(), flags(answer, server).into());
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_of_many_gpus_is_checked_by_the_gpus_of_a_node() {
        for (words, most, expected) in [
            ("fit --phantom 512xh100-80g --ranks 0 --ask x -- python t.py", 8, ""),
            ("fit --phantom l4,4xl4 --ask x -- python t.py", 4, ""),
            ("fit --phantom 512xh100-80g --ask x -- python t.py", 0, "more with --ranks"),
            ("fit --phantom 8xh100-80g --ranks 9 --ask x -- python t.py", 0, "there is no rank 9"),
        ] {
            let matches = crate::commands::fit::command().try_get_matches_from(words.split(' ')).unwrap();
            let line = CommandLine::new(&matches).unwrap();
            let cards: Vec<Option<String>> = line.cards.into_iter().map(Some).collect();
            let planned = planned_trials(&line.words, &cards, &[String::new()]);
            match most_gpus(&matches, &planned) {
                Ok(number) => assert_eq!(number, most, "{words}"),
                Err(error) => {
                    assert!(!expected.is_empty() && error.to_string().contains(expected), "{words}: {error}")
                }
            }
        }
    }
}
