//! `memtrace help`: the tables of variables, columns and events, and the help of a command.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Arg, ArgMatches, Command};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_trace::columns::{COLUMNS, ColumnType};
use memtrace_trace::{EventName, config};

use crate::terminal;

/// The arguments of `memtrace help`.
pub(crate) fn command() -> Command {
    Command::new("help").about("Explain the variables, the columns and events of a trace, or a command").arg(
        Arg::new("topic")
            .value_name("variables|columns|events|COMMAND")
            .help("The MEMTRACE_ variables, the columns or events of a trace, or one command"),
    )
}

/// Prints the help on a topic.
///
/// # Errors
/// When there is no such topic.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let mut stdout = std::io::stdout().lock();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    match matches.get_one::<String>("topic").map(String::as_str) {
        None => super::command().print_long_help()?,
        Some("variables") => {
            let mut table =
                Table::new(&[("variable", Side::Left), ("default", Side::Left), ("", Side::Left)]);
            for variable in config::variables() {
                let default = if variable.default.is_empty() { "-" } else { variable.default };
                table.row([Cell::new(variable.name, Style::Strong), default.into(), variable.help.into()]);
            }
            page.table(&table);
        }
        Some("columns") => {
            let mut table = Table::new(&[("column", Side::Left), ("type", Side::Left), ("", Side::Left)]);
            for column in COLUMNS {
                let kind = if column.kind == ColumnType::Int { "int" } else { "text" };
                table.row([Cell::new(column.name, Style::Strong), kind.into(), column.doc.into()]);
            }
            page.table(&table);
        }
        Some("events") => {
            let mut table = Table::new(&[("event", Side::Left), ("", Side::Left)]);
            for event in EventName::ALL {
                table.row([Cell::new(event.as_str(), Style::Strong), event.about().into()]);
            }
            page.table(&table);
        }
        Some(name) => {
            let mut command = super::command();
            let Some(command) = command.find_subcommand_mut(name) else {
                bail!(
                    "no help on {name:?}; the topics are variables, columns, events, and each command of \
                     memtrace --help"
                );
            };
            command.print_long_help()?;
        }
    }
    stdout.write_all(page.text().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}
