//! `memtrace export`: runs the entry of [`EXPORTS`] that `--to` names.

use std::fmt::Write as _;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::builder::PossibleValuesParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use memtrace_analysis::exports::{self, EXPORTS};

use crate::args;
use crate::terminal;
use crate::trace_input;

/// Returns the definition of the command `memtrace export`.
pub(crate) fn command() -> Command {
    let mut help = args::examples(&[
        ("export --to snapshot out", "for pytorch.org/memory_viz"),
        ("export --to parquet out -o rows/", "for DuckDB and pandas"),
        ("export --to digest out -o digests/", "a small file of each rank, for jobs of thousands"),
    ]);
    let _ = write!(help, "\n\nExports:\n{}", list());
    help.push_str(
        "\nThe timeline exports and plots, like `memtrace ops --actions`, keep every block of the trace in\n\
         memory: about 60 MB for a million rows. The memory that the others need does not grow with the\n\
         trace.\n",
    );
    let to = Arg::new("to")
        .long("to")
        .short('t')
        .value_name("EXPORT")
        .hide_possible_values(true)
        .value_parser(PossibleValuesParser::new(EXPORTS.iter().map(|export| export.name())))
        .help("The format; see the list below");
    let mut flags: Vec<Arg> = Vec::new();
    for flag in EXPORTS.iter().flat_map(|export| export.flags()) {
        if flags.iter().all(|known| known.get_id() != flag.name) {
            let takers: Vec<&str> = EXPORTS
                .iter()
                .filter(|export| export.flags().iter().any(|own| own.name == flag.name))
                .map(|export| export.name())
                .collect();
            flags.push(args::flag_arg(flag).help(format!("{} ({})", flag.help, takers.join(", "))));
        }
    }
    Command::new("export")
        .about("Convert the trace for other tools: memory_viz, Perfetto, DuckDB, speedscope, pictures")
        .override_usage("memtrace export --to <EXPORT> [OPTIONS] [TRACE]")
        .after_help(help)
        .arg(to)
        .arg(args::trace_arg("TRACE"))
        .args(flags)
        .args(args::shared_args().into_iter().filter(|arg| arg.get_id() != "format"))
        .mut_arg("output", |arg| {
            arg.value_name("PATH").help(
                "Write to this path; - is standard output, and a name in .gz is compressed [default: TRACE.EXPORT \
                 in this folder]",
            )
        })
}

/// Returns a list of the exports, one per line.
fn list() -> String {
    let width = EXPORTS.iter().map(|export| export.name().len()).max().unwrap_or(0);
    EXPORTS.iter().map(|export| format!("  {:width$}  {}\n", export.name(), export.about())).collect()
}

/// Writes the export that `--to` names.
///
/// # Errors
/// When the request is invalid, the trace cannot be read, or the export cannot be written.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let Some(name) = matches.get_one::<String>("to") else {
        bail!("--to EXPORT is missing; EXPORT is one of\n{}", list().trim_end());
    };
    let export = exports::find(name).ok_or_else(|| anyhow!("there is no export {name}"))?;
    // Options of other exports are rejected here, because they would be ignored silently.
    for flag in EXPORTS.iter().flat_map(|export| export.flags()) {
        let given = matches.value_source(flag.name) == Some(ValueSource::CommandLine);
        if given && export.flags().iter().all(|own| own.name != flag.name) {
            bail!(
                "--to {name} does not take --{}; see memtrace export --help for the options of each export",
                flag.name
            );
        }
    }
    let place = matches.get_one::<PathBuf>("output").map(PathBuf::as_path);
    let to_stdout = place.is_some_and(exports::is_stdout);
    let options = args::options(export.flags(), matches, !to_stdout)?;
    let input = trace_input::open_arg("TRACE", matches, true)?;
    let progress = terminal::Progress::start(std::slice::from_ref(&input));
    let answer = exports::run(export, &input, &options, place)?;
    drop(progress);
    if !to_stdout {
        let text = if matches.get_flag("json") {
            terminal::json_text(&answer.to_json("export"))
        } else {
            answer.text()
        };
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}
