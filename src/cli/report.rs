//! Every command that reads a trace: the same way for each entry of the table.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow};
use clap::ArgMatches;
use memtrace_analysis::input::Input;
use memtrace_analysis::options::{Flag, Options, parse_steps, parse_window};
use memtrace_analysis::replay::Window;
use memtrace_analysis::reports::{self, Verdict};

use crate::args::DEFAULT_FOLDER;
use crate::{leftover, terminal};

/// Answers the question called `name`.
pub(crate) fn run(name: &str, matches: &ArgMatches) -> Result<ExitCode> {
    let report = reports::find(name).ok_or_else(|| anyhow!("no command {name}"))?;
    let output: Option<&PathBuf> = matches.get_one("output");
    let options = options(report.flags(), matches, output.is_none())?;
    let mut inputs = Vec::new();
    for name in report.inputs() {
        // `check` tells what is there; everyone else reads what the process meant to write.
        let repair = report.name() != "check" || matches.get_flag("repair");
        inputs.push(input(name, matches, repair)?);
    }
    let progress = terminal::Progress::of(&inputs);
    let answer = report.run(&inputs, &options)?;
    drop(progress);
    let text = if matches.get_flag("json") {
        format!("{:#}\n", answer.to_json(report.name()))
    } else {
        answer.text()
    };
    match output {
        Some(path) => std::fs::write(path, text).with_context(|| path.display().to_string())?,
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

/// Opens the trace of the argument `name`, as [`open`] does.
pub(crate) fn input(name: &str, matches: &ArgMatches, repair: bool) -> Result<Input> {
    let path = matches.get_one::<PathBuf>(name).map_or(Path::new(DEFAULT_FOLDER), PathBuf::as_path);
    open(path, matches, repair)
}

/// Opens the trace at `path`, of the rank that was asked for; with `repair`, what a kill left of it is finished
/// first.
pub(crate) fn open(path: &Path, matches: &ArgMatches, repair: bool) -> Result<Input> {
    let mut input = Input::open(path)?;
    if repair && leftover::finish(&input)? {
        input = Input::open(path)?;
    }
    if let Some(rank) = matches.get_one::<i32>("rank") {
        input.only_rank(*rank)?;
    }
    Ok(input)
}

/// The shared options, and those of `flags`.
pub(crate) fn options(flags: &[Flag], matches: &ArgMatches, to_stdout: bool) -> Result<Options> {
    let text = |name: &str| matches.try_get_one::<String>(name).ok().flatten().map(String::as_str);
    let mut window = Window::default();
    if let Some(range) = text("window") {
        (window.from_ns, window.to_ns) = parse_window(range)?;
    }
    if let Some(range) = text("step") {
        (window.from_step, window.to_step) = parse_steps(range)?;
    }
    let mut options = Options {
        device: matches.get_one("device").copied(),
        // The page has no lists.
        top: matches.try_get_one("top").ok().flatten().copied(),
        units: text("units").unwrap_or("auto").parse().map_err(|why: String| anyhow!(why))?,
        window,
        lenient: matches.get_flag("lenient"),
        ..Options::default()
    };
    if to_stdout {
        let stdout = std::io::stdout();
        options.paint = terminal::paints(text("color").unwrap_or("auto"), &stdout);
        options.width = terminal::width(&stdout);
    }
    for flag in flags {
        if flag.value.is_none() {
            if matches.get_flag(flag.name) {
                options.values.insert(flag.name, String::new());
            }
        } else if let Some(value) = text(flag.name) {
            options.values.insert(flag.name, value.to_owned());
        }
    }
    Ok(options)
}
