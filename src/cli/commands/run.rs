//! `memtrace run`: starts the program with the library preloaded, waits, and shows what came out.
//!
//! The program keeps its standard streams, its signals and its exit status; the launcher writes to
//! stderr only, and only before the program starts or after it has ended.

use std::ffi::{OsStr, OsString};
use std::fs::{self};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command};
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::render::printer::{Printer, Side, Table};
use memtrace_analysis::reports;
use memtrace_cards::CARDS;

use crate::args::{self};
use crate::child_env::{Phantom, Scratch, TRACER, run_id, traced};
use crate::load_failure;
use crate::out_folder::OutFolder;
use crate::{recovery, signals, terminal};

/// The arguments of `memtrace run`.
pub(crate) fn command() -> Command {
    Command::new("run")
        .about("Run a program, trace it, and show the summary")
        .arg(args::out_arg("Where the traces go [default: a new folder in memtrace-out]"))
        .args(args::phantom_args())
        .arg(
            Arg::new("quiet")
                .short('q')
                .long("quiet")
                .action(ArgAction::SetTrue)
                .help("No summary at the end"),
        )
        .arg(args::program_arg().help("The program and its arguments"))
}

/// Runs the program.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    if matches.get_one::<String>("phantom").is_some_and(|card| card == "list") {
        return list_cards();
    }
    let command: Vec<&OsString> = matches.get_many("command").into_iter().flatten().collect();
    let Some(program) = command.first() else {
        bail!("what is to run? memtrace run -- python train.py");
    };
    let phantom = Phantom::wanted(matches)?;
    let run_id = run_id();
    let scratch = Scratch::new(&run_id)?;
    let out = OutFolder::new(matches.get_one::<PathBuf>("out"))?;
    let mut child = traced(&scratch, &command, &out.folder, &run_id, phantom.as_ref())?;
    let passing = signals::Passing::start()?;
    let mut child = match child.spawn() {
        Ok(child) => child,
        Err(error) => {
            eprintln!("memtrace: cannot run {}: {error}", Path::new(program).display());
            out.remove_if_empty();
            // As the shell has it: not found, or found and not runnable.
            return Ok(ExitCode::from(if error.kind() == io::ErrorKind::NotFound { 127 } else { 126 }));
        }
    };
    passing.to(child.id());
    let status = child.wait().context("cannot wait for the program")?;
    passing.stop();

    if let Err(error) = conclude(program, &scratch, &out, &run_id, matches.get_flag("quiet")) {
        eprintln!("memtrace: {error:#}");
    }
    out.remove_if_empty();
    drop(scratch);
    Ok(signals::end_like(status))
}

/// Says what came out, or why nothing did.
fn conclude(program: &OsStr, scratch: &Scratch, out: &OutFolder, run_id: &str, quiet: bool) -> Result<()> {
    let loaded = fs::metadata(scratch.hello()).is_ok_and(|file| file.len() > 0);
    let open = || {
        Input::open(&out.folder).map(|mut input| {
            input.only_run(run_id);
            input
        })
    };
    let traces = open();
    let input = match traces {
        Ok(input) if !input.traces.is_empty() => {
            if recovery::finish(&input)? {
                open()?
            } else {
                input
            }
        }
        Err(memtrace_analysis::Error::Trace(error))
            if !matches!(error, memtrace_trace::Error::NoTrace { .. }) =>
        {
            return Err(error.into());
        }
        _ if loaded => {
            eprintln!(
                "memtrace: no trace: the program took no GPU memory, or tracing was off (MEMTRACE_ENABLED=0). \
                 With no GPU here, try: memtrace run --phantom h100-80g -- ..."
            );
            return Ok(());
        }
        _ => {
            eprintln!(
                "memtrace: no trace: {TRACER} was not loaded into the program: {}",
                load_failure::why_not(program)
            );
            return Ok(());
        }
    };
    if quiet {
        return Ok(());
    }
    let report = reports::find("summary").context("no summary")?;
    let stderr = io::stderr();
    let options = Options {
        paint: terminal::paints("auto", &stderr),
        width: terminal::width(&stderr),
        ..Options::default()
    };
    let input = Input { path: out.shown.clone(), ..input };
    let answer = report.run(&[input], &options)?;
    let text = format!("\nmemtrace: traced into {}\n{}", out.shown.display(), answer.text());
    // Nobody reads it any more when this fails.
    stderr.lock().write_all(text.as_bytes()).ok();
    Ok(())
}

fn list_cards() -> Result<ExitCode> {
    let mut stdout = io::stdout().lock();
    let mut page = Printer::new(stdout.is_terminal() && terminal::paints("auto", &stdout), None);
    let mut table = Table::new(&[
        ("card", Side::Left),
        ("memory", Side::Right),
        ("free at start", Side::Right),
        ("capability", Side::Right),
        ("SMs", Side::Right),
        ("name", Side::Left),
    ]);
    for card in CARDS {
        table.row([
            card.id.into(),
            format!("{:.2} GiB", card.memory_mib as f64 / 1024.0).into(),
            format!("{:.2} GiB", (card.memory_mib - card.context_mib) as f64 / 1024.0).into(),
            format!("{}.{}", card.cc.0, card.cc.1).into(),
            card.sms.to_string().into(),
            card.name.into(),
        ]);
    }
    page.table(&table);
    page.gap();
    page.plain("several: 8xh100-80g    another size: h100-80g,mem=40g    any other card: mem=48g,cc=8.9");
    page.plain(
        "the context takes the rest before the first allocation: a round guess; yours: h100-80g,context=600m",
    );
    stdout.write_all(page.text().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
