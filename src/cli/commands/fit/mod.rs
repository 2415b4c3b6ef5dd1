//! `memtrace fit`: finds the largest value, or the smallest number of GPUs, with which a program fits in memory.
//!
//! It runs the program, traced, for some values, several of them side by side. A value fits when the program ends with
//! status 0 and no request ran out of memory. A trial that fails for another reason ends the search without an answer,
//! and the end of its stderr is shown. In a search for the number of GPUs, such a trial only removes its number of GPUs
//! from the search.
//!
//! | question | file |
//! | --- | --- |
//! | Which options are there? | this file, [`recipe::options`] |
//! | What does the user ask for: which searches, cards and values? | [`request::plan`] |
//! | Where does a number go in the command line and in `--phantom`? | [`request::placeholders`] |
//! | Do the program and the cards of the command line match? | [`request::command_line`] |
//! | What is wanted, and which options then go together? | [`request::mode`] |
//! | Which values can be tried, and in which order of memory? | [`request::candidates`] |
//! | What is the largest input of a trace (`--worst`)? | [`request::largest_input`] |
//! | What does a card cost (`--prices`)? | [`request::prices`] |
//! | Which recipes are there, and how is a script made of its template? | [`recipe::catalog`], `recipe/scripts/` |
//! | Which values does a setting take (`--set`)? | [`recipe::settings`] |
//! | Which model is meant, and can the user's packages build it? | [`recipe::model`], [`recipe::model_check`] |
//! | Which combinations of options does a recipe refuse? | [`recipe::checks`] |
//! | Which command does a recipe run, and what does `--write` write? | [`recipe::prepared`] |
//! | Which value of one search is tried next? | [`search::limit_search`], by the estimate of [`search::estimate`] |
//! | When does one search end? | [`search::row_search`] |
//! | In which order do the searches of a table run? What do they learn from one another? | [`search::scheduler`] |
//! | How does a trial start, and what decides whether it fits? | [`trial::launch`], [`trial::outcome`] |
//! | How much memory did a trial need? | [`trial::peak`] |
//! | How many trials run at once? When is one repeated? | [`trial::runner`] |
//! | Which processes belong to a trial, and how do they end? | [`trial::process_tree`] |
//! | What is printed while the trials run? | `trial::progress` |
//! | What is printed for one search? | [`answer::single_search`] |
//! | What is printed for several searches, and as JSON? | [`answer::table`], [`answer::json`] |
//! | How does `--ask` differ? It searches nothing. | [`ask`] |

mod answer;
mod ask;
mod recipe;
mod request;
mod search;
mod trial;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use memtrace_trace::units::parse_bytes;

use crate::{args, terminal};
use answer::single_search::{Answer, vllm_options};
use answer::{json, table};
use recipe::prepared::PreparedRecipe;
use request::command_line::CommandLine;
use request::largest_input::LargestInput;
use request::mode::Mode;
use request::plan::Plan;
use request::{largest_input, prices};
use search::row_search::RowSearch;
use search::scheduler::SearchScheduler;
use trial::launch::check_folder;
use trial::runner::TrialRunner;

/// Returns the definition of the command `memtrace fit`.
pub(crate) fn command() -> Command {
    let number = |name: &'static str, help: &'static str| {
        Arg::new(name)
            .long(name)
            .value_name("N")
            .value_parser(value_parser!(u64).range(1..=1 << 40))
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
             largest number of GPUs, does not fit; a table gives 1 when a row has no answer, otherwise 0 when \
             one row fits.",
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
                    "Run N trials in parallel, at most two of one search [default: after a first trial alone, \
                     as many as this machine's cores and memory allow]",
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
                .help("Stop when the value that fits and the one that does not are this close, in percent of the \
                     value; 0 finds the exact limit"),
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
                .help(
                    "Find the smallest value that fits, for a value that saves memory: blocks to swap, layers to \
                     offload, steps of accumulation. Needs --max or --values",
                ),
        )
        .arg(
            Arg::new("ask")
                .long("ask")
                .value_name("REGEX")
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
        .arg(largest_input::argument())
        .arg(prices::argument())
        .args(recipe::options::arguments())
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

/// Searches for what fits, or prints a figure of the program for each card and value.
///
/// # Errors
/// When the request is invalid, or the program cannot be run.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    args::end_with_parent(matches)?;
    let mut line = CommandLine::new(matches)?;
    let mode = Mode::new(matches, &line)?;
    check_folder(matches)?;
    let worst = LargestInput::new(matches)?;
    let recipe = PreparedRecipe::new(matches, worst.as_ref())?;
    match (&recipe, worst) {
        (Some(recipe), _) => line.words.clone_from(&recipe.words),
        (None, Some(worst)) => line.words = worst.fill(&line.words)?,
        (None, None) => {}
    }
    match mode {
        Mode::Figure => ask::run(matches, line, recipe),
        Mode::Search(goal) => {
            make_searches(matches, &Plan::new(matches, line, goal, recipe.as_ref())?, recipe)
        }
    }
}

/// Makes the searches of a plan, and prints the answer.
fn make_searches(matches: &ArgMatches, plan: &Plan, recipe: Option<PreparedRecipe>) -> Result<ExitCode> {
    for line in &plan.left_out {
        terminal::say(line);
    }
    let mut scheduler = SearchScheduler::new(plan);
    let mut trials = TrialRunner::new(matches, plan.most_gpus())?;
    scheduler.run(&mut trials, |value| recipe.as_ref().map_or(Ok(()), |recipe| recipe.prepare(value)))?;
    let ended = trials.stop();
    scheduler.remove_unnamed();
    let as_json = matches.get_flag("json");
    let (text, status) = match scheduler.searches.as_slice() {
        [search] => {
            let answer = Answer { search, plan };
            let json = || terminal::json_text(&json::of_one(&answer, recipe.as_ref()));
            (if as_json { json() } else { answer.text() }, answer.status())
        }
        searches => {
            let json = || terminal::json_text(&json::of_several(plan, searches, recipe.as_ref()));
            (if as_json { json() } else { table::text(plan, searches) }, table::status(plan, searches))
        }
    };
    let rows = table::shown(plan, &scheduler.searches);
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    if let Some(recipe) = recipe.as_ref().filter(|recipe| recipe.is_server() && !as_json) {
        for search in &rows {
            if let Some(flags) = vllm_options(search, recipe) {
                writeln!(stdout, "{}: {flags}", Answer { search, plan }.card())?;
            }
        }
    }
    stdout.flush()?;
    if let Some((recipe, file)) = recipe.as_ref().zip(matches.get_one::<PathBuf>("write")) {
        write_script(recipe, file, &rows)?;
    }
    // A signal ends the process in `status`, so remove the recipe's temporary files before.
    drop(recipe);
    Ok(ended.status(ExitCode::from(status)))
}

/// Writes the script of a recipe. Its batch is from the first search that found one; the searches are in the order of
/// the table. Writes nothing if no batch fits.
fn write_script(recipe: &PreparedRecipe, file: &Path, searches: &[&RowSearch<'_>]) -> Result<()> {
    let fitting = searches.iter().find_map(|search| Some((search.fits()?, search.row.length?)));
    let Some((trial, length)) = fitting else {
        terminal::say("--write: nothing was written, because no batch fits");
        return Ok(());
    };
    let about = recipe.write(file, &trial.value, length)?;
    terminal::say(&format!("wrote {}: {about}, as on {}", file.display(), trial.peak.device));
    Ok(())
}
