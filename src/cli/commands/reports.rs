//! The reports: the commands in [`REPORTS`](memtrace_analysis::reports::REPORTS), which all run in the same
//! way.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::{ArgGroup, ArgMatches, Command};
use memtrace_analysis::exports::Out;
use memtrace_analysis::options::Flag;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::render::formats::Form;
use memtrace_analysis::reports::{self, Report, Verdict, View};

use super::search_request;
use crate::args::{self};
use crate::terminal;
use crate::trace_input;

const TRACE_HELP: &str = "A trace: a file, or the folder of a run";

/// Returns the definition of the command of `report`.
pub(crate) fn command(report: &'static dyn Report) -> Command {
    let many = report.inputs().len() > 1;
    let mut command =
        Command::new(report.name()).about(report.about()).after_help(args::examples(report.examples()));
    for (at, name) in report.inputs().iter().enumerate() {
        let arg = args::trace_arg(name);
        command = command.arg(match report.only_first_with().filter(|_| at > 0) {
            Some(flag) => arg.required_unless_present(flag).conflicts_with(flag).help(TRACE_HELP),
            None if many => arg.required(true).help(TRACE_HELP),
            None => arg,
        });
    }
    for flag in reports::all_flags(report) {
        command = with_flag(command, &flag, report);
    }
    command.args(args::shared_args())
}

/// Adds the option `flag` of `report` to `command`, with its relation to the options that select a view.
///
/// If only some views take the option, it needs an option that selects one of these views. Otherwise (the
/// report itself takes it, or it selects a view) it conflicts with the options that select a view without it.
fn with_flag(command: Command, flag: &Flag, report: &dyn Report) -> Command {
    let names = |view: &View| view.asked_by.iter().map(|flag| flag.name).collect::<Vec<_>>();
    let takes = |flags: &[Flag]| flags.iter().any(|own| own.name == flag.name);
    let (takers, others): (Vec<&View>, Vec<&View>) =
        report.views().iter().partition(|view| takes(view.asked_by) || takes(view.report.flags()));
    let arg = args::flag_arg(flag);
    if takes(report.flags()) || takers.iter().any(|view| takes(view.asked_by)) {
        let together =
            |name: &&str| takers.iter().any(|view| view.report.flags().iter().any(|own| own.name == *name));
        return command
            .arg(arg.conflicts_with_all(others.into_iter().flat_map(names).filter(|name| !together(name))));
    }
    let group = format!("answers with --{}", flag.name);
    command
        .arg(arg.requires(group.clone()))
        .group(ArgGroup::new(group).args(takers.into_iter().flat_map(names)).multiple(true))
}

/// Runs the report `name` and prints its answer.
///
/// # Errors
/// When the request is invalid, or a trace cannot be read.
pub(crate) fn run(name: &str, matches: &ArgMatches) -> Result<ExitCode> {
    let report = reports::find(name).ok_or_else(|| anyhow!("there is no command {name}"))?;
    let output: Option<&PathBuf> = matches.get_one("output");
    let options = args::options(&reports::all_flags(report), matches, output.is_none())?;
    let mut inputs = Vec::new();
    let needs = reports::asked(report, &options).needs(&options)?;
    let is_alone = report.only_first_with().is_some_and(|flag| options.is_set(flag));
    let names = report.inputs().iter().take(if is_alone { 1 } else { usize::MAX });
    for name in names {
        inputs.push(match needs.search {
            Some(request) if matches.contains_id(name) => {
                bail!("--pid {} names the process that writes the trace; leave out {name}", request.pid)
            }
            Some(request) => trace_input::open(&search_request::ask(request)?, matches, true)?,
            None => trace_input::open_arg(name, matches, !needs.as_it_is)?,
        });
    }
    let progress = terminal::Progress::start(&inputs);
    let mut answer = reports::answer(report, &inputs, &options)?;
    if needs.reserved {
        super::tune::reserved::add(&mut answer, &inputs[0], &options)?;
    }
    drop(progress);
    let is_json = matches.get_flag("json");
    let text = if is_json { terminal::json_text(&answer.to_json(report.name())) } else { answer.text() };
    if options.form == Form::Csv && !is_json && text.trim().is_empty() {
        bail!("--format csv: this answer of memtrace {name} has no table; --json has its figures");
    }
    if answer.is_list && !is_json {
        answer.footer.all_notes().for_each(|note| terminal::say(&note));
    }
    match output {
        Some(path) => {
            let mut out = Out::beside(path, inputs.iter().flat_map(Input::files))?;
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
