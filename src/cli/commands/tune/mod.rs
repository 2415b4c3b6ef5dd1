//! `memtrace tune`: finds the settings of PyTorch's caching allocator with which a run needs the least
//! memory.
//!
//! The requests of a trace are repeated with the real allocator of the installed torch, on a simulated GPU
//! with the same memory: once for each of several settings. The replay with the run's own settings shows how
//! reliable the replays are.

mod answer;
mod candidates;
mod replays;
pub(super) mod reserved;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use memtrace_analysis::read::stream::TraceFile;
use memtrace_analysis::requests::Requests;
use memtrace_analysis::selection::select;

use crate::{args, terminal, trace_input};
use replays::Capacity;

/// Returns the definition of the command `memtrace tune`.
pub(crate) fn command() -> Command {
    let shared = args::shared_args().into_iter().filter(|arg| {
        ["json", "device", "rank", "units", "color", "lenient"].contains(&arg.get_id().as_str())
    });
    Command::new("tune")
        .about("Find the allocator settings with which the run needs the least memory")
        .after_help(
            "Examples:\n  memtrace tune out\n  memtrace tune --conf expandable_segments:True out\n\nThe \
             trace's requests are replayed with PyTorch's own allocator on a simulated GPU: no device is \
             needed, and the trace may come from another machine. Exit status: 0; 3 when the run does not \
             fit with any settings.",
        )
        .arg(args::trace_arg("TRACE"))
        .arg(
            Arg::new("conf")
                .long("conf")
                .value_name("SETTINGS")
                .action(ArgAction::Append)
                .help("Settings to try, in the syntax of PYTORCH_CUDA_ALLOC_CONF (repeatable)"),
        )
        .arg(
            Arg::new("python")
                .long("python")
                .value_name("PATH")
                .value_parser(value_parser!(OsString))
                .default_value("python3")
                .help("The Python whose PyTorch replays the requests"),
        )
        .args(shared)
}

/// Replays the requests of the process that reserved the most memory, and prints the settings, best first.
///
/// # Errors
/// When the trace cannot be read, the run did not use PyTorch's caching allocator, or the Python has no
/// torch.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let options = args::options(&[], matches, true)?;
    let input = select(&trace_input::open_arg("TRACE", matches, true)?, &options, false)?;
    let progress = terminal::Progress::start(std::slice::from_ref(&input));
    let (mut fullest, mut unusable) = (None, None);
    for trace in &input.traces {
        if !uses_caching_allocator(trace) {
            bail!(
                "{}: this run did not use PyTorch's caching allocator, so its settings have no effect",
                trace.path.display()
            );
        }
        let requests = match Requests::read(trace, &options) {
            Ok(requests) => requests,
            Err(error) => {
                unusable.get_or_insert(error);
                continue;
            }
        };
        let peak = requests.peak_reserved;
        if fullest.as_ref().is_none_or(|(_, other): &(_, Requests)| other.peak_reserved < peak) {
            fullest = Some((trace, requests));
        }
    }
    drop(progress);
    let Some((trace, requests)) = fullest else {
        match unusable {
            Some(error) => return Err(error.into()),
            None => bail!("{}: no trace in it", input.path.display()),
        }
    };
    let own = &trace.meta.allocator.conf;
    let settings = match matches.get_many::<String>("conf") {
        Some(given) => std::iter::once(own.clone()).chain(given.cloned()).collect(),
        None => candidates::candidates(own, &requests),
    };
    let capacity = Capacity::from_trace(trace, &requests);
    let python = matches.get_one::<OsString>("python").cloned().unwrap_or_default();
    let is_terminal = std::io::stderr().is_terminal();
    let show = |done: usize| {
        if is_terminal {
            terminal::show_progress(&format!("{done} of {} settings tried ", settings.len()));
        }
    };
    show(0);
    let replays = replays::run(&python, &requests, &settings, capacity, show);
    if is_terminal {
        terminal::show_progress("");
    }
    let answer = answer::TuneAnswer::new(&input, trace, &requests, &settings, replays?);
    let text = if matches.get_flag("json") {
        terminal::json_text(&answer.json())
    } else {
        answer.text(options.printer(), options.units)
    };
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    Ok(ExitCode::from(match answer.fits() {
        Some(true) => 0,
        Some(false) => 3,
        None => 1,
    }))
}

/// Returns true if the blocks of a run come from PyTorch's caching allocator.
fn uses_caching_allocator(trace: &TraceFile) -> bool {
    let allocator = &trace.meta.allocator;
    allocator.caching && matches!(allocator.backend.as_str(), "" | "native")
}
