//! `memtrace doctor`: would a program of this Python be traced here, and what of it would be seen?
//!
//! It runs that Python with the library preloaded, asks it what there is, has it train for one step
//! where there is a device, and reads the trace. So each line tells what happened, not what should.

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow};
use clap::ArgMatches;
use memtrace_analysis::page::{Cell, Page, Side, Style, Table};
use memtrace_cards::Spec;
use memtrace_trace::config::Settings;
use serde_json::json;

use crate::terminal;
use crate::traced::{TRACER, library};
use findings::{Findings, State};
use machine::{out_folder, system};
use probe::probe;

mod captured;
mod findings;
mod machine;
mod probe;
mod torch;

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
        let mut page = Page::new(terminal::paints("auto", &stdout), None);
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
