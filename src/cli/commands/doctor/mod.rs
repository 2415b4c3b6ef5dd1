//! `memtrace doctor`: would a program of this Python be traced here, and what of it would be seen?
//!
//! It runs that Python with the library preloaded, asks it what there is, has it train for one step
//! where there is a device, and reads the trace. So each line tells what happened, not what should.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::{Arg, ArgMatches, Command, value_parser};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_cards::Spec;
use memtrace_trace::config::Settings;
use serde_json::json;

use crate::args;
use crate::child_env::{TRACER, library};
use crate::terminal;
use findings::{Findings, State};
use host::{out_folder, system};
use probe::probe;

mod findings;
mod host;
mod probe;
mod torch;
mod trace_check;

/// The arguments of `memtrace doctor`.
pub(crate) fn command() -> Command {
    Command::new("doctor")
        .about("Would programs of this Python be traced here, and what of them would be seen?")
        .arg(args::json_arg())
        .arg(args::out_arg("Where traces would go [default: MEMTRACE_OUT, or memtrace-out]"))
        .arg(
            Arg::new("phantom")
                .long("phantom")
                .value_name("CARD")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("h100-80g")
                .help("Try it on a device that is not there: --phantom, --phantom=a100-80g"),
        )
        .arg(
            Arg::new("command")
                .value_name("PYTHON")
                .num_args(1..)
                .last(true)
                .value_parser(value_parser!(std::ffi::OsString))
                .help("The Python, and what comes before a script [default: python3]"),
        )
}

/// Looks, and says what it found.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let mut found = Findings::default();
    let card = matches.get_one::<String>("phantom");
    if let Some(card) = card {
        Spec::parse(card).map_err(|error| anyhow!("--phantom {card}: {error}"))?;
    }
    let python: Vec<OsString> = match matches.get_many::<OsString>("command") {
        Some(words) => words.cloned().collect(),
        None => vec!["python3".into()],
    };
    system(&mut found);
    let out = matches.get_one::<PathBuf>("out").cloned();
    out_folder(&mut found, &out.unwrap_or_else(|| Settings::from_env().0.out));
    for warning in Settings::from_env().1 {
        found.add("settings", State::Degraded, warning, "");
    }
    match library(TRACER) {
        Ok(tracer) => probe(&mut found, &tracer, &python, card)?,
        Err(error) => found.add("library", State::Missing, format!("{error:#}"), ""),
    }
    let works = found.lines.iter().all(|line| line.state != State::Missing);
    let mut stdout = std::io::stdout().lock();
    if matches.get_flag("json") {
        let lines = found.lines.iter().map(|line| {
            json!({ "what": line.what, "state": line.state.word().0, "says": line.says, "todo": line.todo })
        });
        writeln!(
            stdout,
            "{:#}",
            json!({ "works": works, "findings": lines.collect::<Vec<_>>(), "phantom_answers": found.answers })
        )?;
    } else {
        let mut page = Printer::new(terminal::paints("auto", &stdout), None);
        let mut table = Table::new(&[("", Side::Left), ("", Side::Left), ("", Side::Left)]);
        for line in &found.lines {
            let (word, style) = line.state.word();
            table.row([Cell::new(word, style), line.what.into(), line.says.as_str().into()]);
            if !line.todo.is_empty() {
                table.row(["".into(), "".into(), Cell::new(format!("-> {}", line.todo), Style::Command)]);
            }
        }
        page.table(&table);
        page.gap();
        let tried = found.lines.iter().any(|line| line.what == "blocks" && line.state == State::Ok);
        page.plain(match (works, tried) {
            (true, true) => "Programs of this Python are traced here.",
            (true, false) => "Programs of this Python would be traced, as far as can be told.",
            (false, _) => "Tracing would not work.",
        });
        stdout.write_all(page.text().as_bytes())?;
    }
    Ok(ExitCode::from(u8::from(!works)))
}
