//! The reports: every command of [`REPORTS`](memtrace_analysis::reports::REPORTS), run in the same way.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::{ArgMatches, Command};
use memtrace_analysis::exports::Out;
use memtrace_analysis::render::formats::Form;
use memtrace_analysis::reports::{self, Report, Verdict};

use super::retained;
use crate::args::{self};
use crate::terminal;
use crate::trace_input;

/// The arguments of `report`.
pub(crate) fn command(report: &'static dyn Report) -> Command {
    let many = report.inputs().len() > 1;
    let mut command = Command::new(report.name()).about(report.about());
    for name in report.inputs() {
        command = command.arg(if many {
            args::trace_arg(name).required(true).help("A trace: a file, or the folder of a run")
        } else {
            args::trace_arg(name)
        });
    }
    command.args(report.flags().iter().map(args::flag_arg)).args(args::shared_args())
}

/// Runs the report `name` and prints its answer.
///
/// # Errors
/// When the request is invalid, or a trace cannot be read.
pub(crate) fn run(name: &str, matches: &ArgMatches) -> Result<ExitCode> {
    let report = reports::find(name).ok_or_else(|| anyhow!("there is no command {name}"))?;
    let output: Option<&PathBuf> = matches.get_one("output");
    let options = args::options(report.flags(), matches, output.is_none())?;
    let mut inputs = Vec::new();
    for name in report.inputs() {
        // `check` judges the file as it is; other reports read the completed trace.
        let recover = report.name() != "check" || matches.get_flag("repair");
        let process = matches.get_one::<PathBuf>(name).and_then(|place| retained::process_of(place));
        match process.filter(|_| report.name() == "retained") {
            Some(pid) => {
                let trace = retained::ask(pid, options.text("wait"))?;
                inputs.push(trace_input::open(&trace, matches, recover)?);
            }
            None => inputs.push(trace_input::open_arg(name, matches, recover)?),
        }
    }
    let progress = terminal::Progress::start(&inputs);
    let mut answer = reports::answer(report, &inputs, &options)?;
    if name == "whatif" && matches.get_flag("reserved") {
        super::tune::reserved::add(&mut answer, &inputs[0], &options)?;
    }
    drop(progress);
    let is_json =
        matches.get_flag("json") || matches.get_one::<String>("format").is_some_and(|form| form == "json");
    let text = if is_json { terminal::json_text(&answer.to_json(report.name())) } else { answer.text() };
    if options.form == Form::Csv && !is_json && text.trim().is_empty() {
        bail!("--format csv: this answer of memtrace {name} has no rows; --json has its figures");
    }
    match output {
        Some(path) => {
            let mut out = Out::create(path)?;
            out.write_all(text.as_bytes())?;
            out.finish()?;
        }
        None => {
            let mut stdout = std::io::stdout().lock();
            stdout.write_all(text.as_bytes())?;
            stdout.flush()?;
        }
    }
    Ok(match answer.verdict {
        Verdict::Fine => ExitCode::SUCCESS,
        Verdict::Problem => ExitCode::from(1),
        Verdict::OverLimit => ExitCode::from(3),
    })
}
