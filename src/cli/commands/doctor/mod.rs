//! `memtrace doctor`: checks whether the programs of a Python interpreter can be traced here, and which of
//! their events are recorded.
//!
//! The command runs that Python with the tracer preloaded, queries its torch, trains one step if there is a
//! device, and reads the trace. So each line reports an observation, not an expectation.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command, value_parser};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_trace::config::Settings;
use serde_json::{Value, json};

use crate::args;
use crate::child_env::check_card;
use crate::libraries::{TRACER, library};
use crate::{signals, terminal};
use findings::{Finding, Findings, State};
use host::{check_journals, check_out_folder, check_system};
use probe::run_probe;

mod findings;
mod host;
mod probe;
mod torch;
mod trace_check;

/// Returns the definition of the command `memtrace doctor`.
pub(crate) fn command() -> Command {
    Command::new("doctor")
        .about(
            "Check that programs of a Python can be traced here, and list the events that would be recorded",
        )
        .after_help(args::examples(&[
            ("doctor", "the python3 on the PATH"),
            ("doctor --phantom=h100-80g -- .venv/bin/python", "another Python, on a simulated GPU"),
        ]))
        .arg(args::json_arg())
        .arg(args::out_arg(
            "The folder that would receive the traces [default: MEMTRACE_OUT, or memtrace-out]",
        ))
        .arg(
            Arg::new("phantom")
                .long("phantom")
                .value_name("CARD")
                .num_args(0..=1)
                .require_equals(true)
                .default_missing_value("h100-80g")
                .help("Check on a simulated GPU, no device needed: --phantom, --phantom=a100-80g"),
        )
        .arg(
            Arg::new("command")
                .value_name("PYTHON")
                .num_args(1..)
                .last(true)
                .value_parser(value_parser!(std::ffi::OsString))
                .help("The Python to check, with the arguments that precede a script [default: python3]"),
        )
}

/// Runs all checks and prints the findings.
///
/// # Errors
/// When the card is invalid, the temporary folder cannot be created, or the trace of the training step cannot
/// be read.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let mut findings = Findings::default();
    let card = matches.get_one::<String>("phantom");
    if let Some(card) = card {
        check_card(card)?;
    }
    let python: Vec<OsString> = match matches.get_many::<OsString>("command") {
        Some(words) => words.cloned().collect(),
        None => vec!["python3".into()],
    };
    check_system(&mut findings);
    check_journals(&mut findings);
    let out = matches.get_one::<PathBuf>("out").cloned();
    check_out_folder(&mut findings, &out.unwrap_or_else(|| Settings::from_env().0.out));
    for warning in Settings::from_env().1 {
        findings.add("settings", State::Degraded, warning, "");
    }
    match library(TRACER) {
        Ok(tracer) => {
            let forwarder = signals::Forwarder::start()?;
            let probed = run_probe(&mut findings, &tracer, &python, card, &forwarder);
            let asked = forwarder.asked_to_end();
            forwarder.stop();
            if let Some(signal) = asked {
                return Ok(signals::end_by(signal));
            }
            probed?;
        }
        Err(error) => findings.add("library", State::Missing, format!("{error:#}"), ""),
    }
    let works = findings.list.iter().all(|finding| finding.state != State::Missing);
    let mut stdout = std::io::stdout().lock();
    if matches.get_flag("json") {
        let list: Vec<Value> = findings.list.iter().map(Finding::json).collect();
        let answers = &findings.phantom_answers;
        let answer = json!({ "works": works, "findings": list, "phantom_answers": answers });
        stdout.write_all(terminal::json_text(&answer).as_bytes())?;
    } else {
        let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
        let mut table = Table::new(&[("", Side::Left), ("", Side::Left), ("", Side::Left)]);
        for finding in &findings.list {
            table.row([
                Cell::new(finding.state.word(), finding.state.style()),
                finding.subject.into(),
                finding.message.as_str().into(),
            ]);
            if !finding.advice.is_empty() {
                table.row([
                    "".into(),
                    "".into(),
                    Cell::new(format!("-> {}", finding.advice), Style::Command),
                ]);
            }
        }
        page.table(&table);
        page.gap();
        let traced =
            findings.list.iter().any(|finding| finding.subject == "blocks" && finding.state == State::Ok);
        page.plain(match (works, traced) {
            (true, true) => "Programs of this Python are traced here.",
            (true, false) => {
                "Programs of this Python can be traced here, as far as can be checked without a GPU."
            }
            (false, _) => "Programs of this Python cannot be traced here; see the lines marked missing.",
        });
        stdout.write_all(page.text().as_bytes())?;
    }
    Ok(ExitCode::from(u8::from(!works)))
}
