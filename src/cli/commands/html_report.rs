//! `memtrace report`: writes the HTML page.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use memtrace_analysis::exports::{self, Out};
use memtrace_analysis::html::Page;
use memtrace_analysis::read::input::Input;

use crate::args::{self, DEFAULT_FOLDER};
use crate::terminal;
use crate::trace_input;

/// Returns the definition of the command `memtrace report`.
pub(crate) fn command() -> Command {
    let trace =
        |id: &'static str| Arg::new(id).value_parser(value_parser!(PathBuf)).value_hint(ValueHint::AnyPath);
    Command::new("report")
        .about("Write an HTML page to explore: memory over time, owners, segments, steps, ranks")
        .after_help(args::examples(&[
            ("report out -o report.html", "one page that opens from disk"),
            ("report out --against before", "two runs, peak against peak and step against step"),
        ]))
        .arg(trace("trace").value_name("TRACE").num_args(0..=2).help(format!(
            "A trace: a file, or the folder of a run; two are compared [default: the newest run in \
             {DEFAULT_FOLDER}]"
        )))
        .arg(
            trace("against")
                .long("against")
                .value_name("TRACE")
                .help("A run to compare with: peak against peak, step against step"),
        )
        .arg(Arg::new("open").long("open").action(ArgAction::SetTrue).help("Open the page in the browser"))
        .args(
            args::shared_args()
                .into_iter()
                .filter(|arg| !matches!(arg.get_id().as_str(), "json" | "format" | "top" | "color"))
                .map(|arg| match arg.get_id().as_str() {
                    "output" => arg
                        .help("Write the page to this file, or as report.html into this folder; - is standard output [default: report.html]")
                        .value_hint(ValueHint::FilePath),
                    _ => arg,
                }),
        )
}

/// Writes the page of one run, or a page that compares two runs.
///
/// # Errors
/// When a trace cannot be read, or the page cannot be written.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let mut paths: Vec<PathBuf> = matches.get_many("trace").into_iter().flatten().cloned().collect();
    if paths.is_empty() {
        paths.push(DEFAULT_FOLDER.into());
    }
    paths.extend(matches.get_one::<PathBuf>("against").cloned());
    if paths.len() > 2 {
        bail!("a page shows one run or compares two, but {} were given", paths.len());
    }
    let options = args::options(&[], matches, false)?;
    let inputs =
        paths.iter().map(|path| trace_input::open(path, matches, true)).collect::<Result<Vec<_>>>()?;
    let default = Path::new("report.html");
    let output = match matches.get_one::<PathBuf>("output") {
        Some(folder) if folder.is_dir() => folder.join(default),
        Some(file) => file.clone(),
        None => default.to_owned(),
    };
    let output = output.as_path();
    let progress = terminal::Progress::start(&inputs);
    let page = Page::read(&inputs, &options)?;
    drop(progress);
    let opens = matches.get_flag("open");
    let to_stdout = exports::is_stdout(output);
    if to_stdout && opens {
        bail!("--open needs a page in a file, but -o - writes it to standard output");
    }
    let mut out = Out::beside(output, inputs.iter().flat_map(Input::files))?;
    page.write(&mut out)?;
    let size = out.finish()?;
    if to_stdout {
        return Ok(ExitCode::SUCCESS);
    }
    let name = output.display();
    terminal::print_line(page.headline())?;
    terminal::print_line(&format!(
        "wrote {name}, {:.2} MB{}",
        size as f64 / 1e6,
        if opens { "" } else { "; open it in any browser" }
    ))?;
    if opens && let Err(error) = open::that_detached(output) {
        terminal::say(&format!("cannot start a browser ({error}); open {name} yourself"));
    }
    Ok(ExitCode::SUCCESS)
}
