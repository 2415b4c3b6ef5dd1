//! `memtrace export`: the same way for each entry of the table.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use clap::ArgMatches;
use clap::parser::ValueSource;
use memtrace_analysis::exports::{self, EXPORTS, STDOUT};

use crate::{report, terminal};

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
    let options = report::options(export.flags(), matches, !to_stdout)?;
    let input = report::input("TRACE", matches, true)?;
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
