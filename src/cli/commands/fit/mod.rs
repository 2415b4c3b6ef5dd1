//! `memtrace fit`: finds the largest value, or the smallest number of GPUs, with which a program fits in memory.
//!
//! It runs the program, traced, for each value that [`search`] chooses, some of them side by side. A value
//! fits when the program ends with status 0 and no request ran out of memory. A trial that fails for another
//! reason ends the search without an answer, and the end of its stderr is shown. In a search for the number
//! of GPUs, such a trial only removes its number of GPUs from the search.
//!
//! - [`places`]: where a number goes in the command line and in `--phantom`.
//! - [`plan`]: the request: its searches and their trials; [`values`]: the candidates of a search.
//! - [`search`] and [`guess`]: the next candidates; [`searches`]: the candidates of all cards and numbers of GPUs.
//! - [`trial`], [`process_tree`], [`trials`]: a trial, its processes, and trials side by side.
//! - [`recipe`]: `--recipe`, a script for a model that the user names; [`recipes`]: the scripts; [`settings`]: `--set`;
//!   [`models`]: the models that memtrace has; [`check`]: the check in the user's Python.
//! - [`prices`]: `--prices`, the price of each card, by which rows are sorted.
//! - [`worst`]: `--worst`, the largest input of a trace as the case to plan for.
//! - [`answer`], [`table`]: what is printed for one search and for several; [`ask`]: `--ask`.

mod answer;
mod ask;
mod check;
mod guess;
mod models;
mod places;
mod plan;
mod prices;
mod process_tree;
mod recipe;
mod recipes;
mod search;
mod searches;
mod settings;
mod table;
mod trial;
mod trials;
mod values;
mod worst;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use memtrace_trace::units::parse_bytes;

use crate::{args, terminal};
use answer::Answer;
use plan::Plan;
use searches::{Lane, Searches};
use trials::Trials;

/// Returns the definition of the command `memtrace fit`.
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
        .about("Find the largest batch size, or another value, or the fewest GPUs with which a program fits")
        .after_help(
            "Examples:
  memtrace fit --phantom h100-80g -- python train.py --batch {}
  memtrace fit --phantom {}xh100-80g -- torchrun --nproc-per-node {} train.py
  memtrace fit --recipe qlora --model Qwen/Qwen3-8B --phantom rtx4090,l4 --seq 2048,4096
  memtrace fit --phantom rtx4090 --worst memtrace-out -- python train.py --batch {} --seq {dim1}
  memtrace fit --phantom rtx4090 --smallest --min 0 --max 40 -- python train.py --blocks-to-swap {}
  memtrace fit --phantom {gpus}xh100-80g --gpus 16,32,64 --ranks 0 -- torchrun --nnodes {nodes} \
             --nproc-per-node {per-node} train.py --batch {}

\
             The program runs once for each value, so keep it short: one or two steps show the peak. A value \
             fits when the program ends with status 0 and never ran out of memory. Exit status: 0; 1 when \
             the program fails for another reason or --ask finds no figure; 3 when even the first value, or the \
             largest number of GPUs, does not fit; a table gives 1 when a row has no answer, otherwise 0 when one row fits.",
        )
        .arg(args::out_arg(
            "Folder for the traces of the largest value that fits and the smallest that does not [default: \
             a new folder in memtrace-out]",
        ))
        .args(args::phantom_args().map(|arg| match arg.get_id().as_str() {
            "phantom" => arg.value_name("CARDS").help(
                "Simulate the GPU, no device needed: h100-80g. Several cards, a100-40g,h100-80g, give a row each; \
                 {}xh100-80g finds the fewest GPUs; {gpus}xh100-80g makes a table by the numbers of --gpus",
            ),
            _ => arg,
        }))
        .arg(args::ranks_arg())
        .arg(
            Arg::new("gpus").long("gpus").value_name("LIST").requires("phantom").help(
                "Try these numbers of GPUs: 8,16,32 [default: powers of 2 up to 8; up to 1024 with --ranks]",
            ),
        )
        .arg(
            Arg::new("gpus-per-node")
                .long("gpus-per-node")
                .value_name("N")
                .value_parser(value_parser!(u64).range(1..=1024))
                .help("The maximum number of GPUs per node, for {nodes} and {per-node} in the command \
                       [default: 8]"),
        )
        .arg(
            Arg::new("jobs")
                .long("jobs")
                .value_name("N")
                .requires("phantom")
                .value_parser(value_parser!(u64).range(1..=256))
                .help(
                    "Run N trials in parallel [default: after a first trial alone, as many as this machine's \
                     cores and memory allow]",
                ),
        )
        .arg(
            number("min", "The smallest value, or number of GPUs, to try [default: 1]")
                .value_parser(value_parser!(u64).range(0..=1 << 40)),
        )
        .arg(number("max", "The largest value, or number of GPUs, to try"))
        .arg(number("multiple-of", "Try only multiples of N; for GPUs, N times powers of two"))
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
                .help("Try only these values; list them from least to most memory: 512,1024,2048"),
        )
        .arg(
            Arg::new("smallest")
                .long("smallest")
                .action(ArgAction::SetTrue)
                .conflicts_with_all(["ask", "gpus"])
                .help(
                    "Find the smallest value that fits, for a value that saves memory: blocks to swap, layers to \
                     offload, steps of accumulation. Needs --max or --values",
                ),
        )
        .arg(
            Arg::new("ask")
                .long("ask")
                .value_name("REGEX")
                .conflicts_with_all(["min", "max", "multiple-of", "within", "gpus"])
                .help(
                    "Do not search: run once for each card of --phantom and value of --values, and print \
                     the text that the group in REGEX matches in the output: 'KV cache size: ([0-9,]+) \
                     tokens'. The program must end by itself",
                ),
        )
        .arg(
            Arg::new("host-mem")
                .long("host-mem")
                .value_name("SIZE")
                .value_parser(parse_bytes)
                .help(
                    "The limit of host memory, such as 64g: a value does not fit if its processes together \
                     have more resident memory. The limit is measured, not enforced. With --ranks, a rank of \
                     the node that does not run counts as much as the smallest rank that runs",
                ),
        )
        .arg(worst::argument())
        .arg(prices::argument())
        .args(recipe::arguments())
        .arg(args::json_arg())
        .arg(args::end_with_parent_arg())
        .arg(args::program_arg().help("The program and its arguments, with {} in place of the value; \
                                       {gpus}, {nodes} and {per-node} stand for the numbers of GPUs, of \
                                       nodes, and of GPUs per node"))
}

/// Parses a percentage such as `2%` or `0.5` into a share.
fn percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim().trim_end_matches('%').trim_end().parse().ok();
    let number = number.filter(|number| (0.0..=50.0).contains(number));
    number.map(|number| number / 100.0).ok_or_else(|| "give a number from 0 to 50, in percent: 2%".to_owned())
}

/// Searches for the largest value or the smallest number of GPUs that fits, and prints the answer.
///
/// # Errors
/// When the request is invalid, or the program cannot be run.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    args::end_with_parent(matches)?;
    let worst = worst::Worst::new(matches)?;
    if let Some(pattern) = matches.get_one::<String>("ask") {
        return ask::run(matches, ask::Question::new(matches, worst.as_ref(), pattern)?);
    }
    let recipe = recipe::Request::new(matches, worst.as_ref())?;
    let recipe = match recipe {
        Some(recipe) if recipe.is_asked() => return ask::run(matches, ask::Question::of_server(recipe)),
        other => other,
    };
    let plan = Plan::new(matches, recipe.as_ref(), worst.as_ref())?;
    for line in &plan.left_out {
        terminal::say(line);
    }
    let mut searches = Searches::new(&plan);
    let mut trials = Trials::new(matches, plan.most_gpus())?;
    searches.run(&mut trials, |value| recipe.as_ref().map_or(Ok(()), |recipe| recipe.prepare(value)))?;
    let ended = trials.stop();
    searches.remove_unnamed();
    let as_json = matches.get_flag("json");
    let (text, status) = match searches.lanes.as_slice() {
        [lane] => {
            let answer = Answer::of_lane(lane, &plan);
            let json = || terminal::json_text(&answer.json(lane, recipe.as_ref()));
            let text = if as_json { json() } else { answer.text() };
            (text, answer.status())
        }
        lanes => {
            let json = || terminal::json_text(&table::json(&plan, lanes, recipe.as_ref()));
            (if as_json { json() } else { table::text(&plan, lanes) }, table::status(&plan, lanes))
        }
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    if let Some(recipe) = recipe.as_ref().filter(|recipe| recipe.is_server() && !as_json) {
        for lane in table::shown(&plan, &searches.lanes) {
            if let Some(flags) = answer::flags(lane, recipe) {
                writeln!(stdout, "{}: {flags}", plan.card_of(lane.row))?;
            }
        }
    }
    stdout.flush()?;
    if let Some((recipe, file)) = recipe.as_ref().zip(matches.get_one::<PathBuf>("write")) {
        write_script(recipe, file, &table::shown(&plan, &searches.lanes))?;
    }
    // A signal ends the process in `status`, so remove the recipe's temporary files before.
    drop(recipe);
    Ok(ended.status(ExitCode::from(status)))
}

/// Writes the script of a recipe with the batch that the first successful search found. The searches are in the order
/// of the table. Writes nothing if no batch fits.
fn write_script(recipe: &recipe::Request, file: &Path, lanes: &[&Lane<'_>]) -> Result<()> {
    let fitting = lanes.iter().find_map(|lane| Some((lane.fits()?, lane.row.length?)));
    let Some((trial, length)) = fitting else {
        terminal::say("--write: nothing was written, because no batch fits");
        return Ok(());
    };
    let about = recipe.write(file, &trial.value, length)?;
    terminal::say(&format!("wrote {}: {about}, as on {}", file.display(), trial.peak.device));
    Ok(())
}
