//! `memtrace export`: the same way for each entry of the table.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::builder::PossibleValuesParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgMatches, Command};
use memtrace_analysis::exports::{self, EXPORTS, STDOUT};

use crate::args;
use crate::terminal;
use crate::trace_input;

/// The arguments of `memtrace export`.
pub(crate) fn command() -> Command {
    let mut list = String::from("Exports:\n");
    let width = EXPORTS.iter().map(|export| export.name().len()).max().unwrap_or(0);
    for export in EXPORTS {
        list.push_str(&format!("  {:width$}  {}\n", export.name(), export.about()));
    }
    list.push_str(
        "\nThose of the timeline and the plots, like `memtrace actions`, hold every block of the trace: some 60 MB\nof memory for a million rows. The memory of the others does not grow with the trace.\n",
    );
    let to = Arg::new("to")
        .long("to")
        .short('t')
        .value_name("EXPORT")
        .required(true)
        .hide_possible_values(true)
        .value_parser(PossibleValuesParser::new(EXPORTS.iter().map(|export| export.name())))
        .help("What to make of it; see below");
    let mut flags: Vec<Arg> = Vec::new();
    for flag in EXPORTS.iter().flat_map(|export| export.flags()) {
        if flags.iter().all(|known| known.get_id() != flag.name) {
            let of: Vec<&str> = EXPORTS
                .iter()
                .filter(|export| export.flags().iter().any(|own| own.name == flag.name))
                .map(|export| export.name())
                .collect();
            flags.push(args::flag_arg(flag).help(format!("{} ({})", flag.help, of.join(", "))));
        }
    }
    Command::new("export")
        .about("The trace as what other tools open: memory_viz, Perfetto, DuckDB, speedscope, pictures")
        .after_help(list)
        .arg(to)
        .arg(args::trace_arg("TRACE"))
        .args(flags)
        .args(args::shared_args().into_iter().map(|arg| match arg.get_id().as_str() {
            "output" => {
                arg.value_name("PATH").help(
                    "Where it goes; - is standard output, and .gz packs it [default: TRACE.EXPORT here]",
                )
            }
            _ => arg,
        }))
}

/// Writes the export that `--to` names.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let name = matches.get_one::<String>("to").map_or("", String::as_str);
    let export = exports::find(name).ok_or_else(|| anyhow!("no export {name}"))?;
    // A flag of another export would be passed over in silence.
    for flag in EXPORTS.iter().flat_map(|export| export.flags()) {
        let given = matches.value_source(flag.name) == Some(ValueSource::CommandLine);
        if given && export.flags().iter().all(|own| own.name != flag.name) {
            bail!("--{} is no option of --to {name}: see memtrace export --help", flag.name);
        }
    }
    let place = matches.get_one::<PathBuf>("output").map(PathBuf::as_path);
    let to_stdout = place == Some(Path::new(STDOUT));
    let options = args::options(export.flags(), matches, !to_stdout)?;
    let input = trace_input::input("TRACE", matches, true)?;
    let progress = terminal::Progress::of(std::slice::from_ref(&input));
    let answer = exports::run(export, &input, &options, place)?;
    drop(progress);
    if !to_stdout {
        let text = if matches.get_flag("json") {
            format!("{:#}\n", answer.to_json("export"))
        } else {
            answer.text()
        };
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
    }
    Ok(ExitCode::SUCCESS)
}
