//! `memtrace help`: explains a command or a word of the reports, and prints the tables of variables, columns
//! and events. It also writes the completions for a shell, and the manual pages.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgMatches, Command, value_parser};
use clap_complete::Shell;
use memtrace_analysis::exports::digest::{ColumnType as DigestType, DigestColumn};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_analysis::selection::nearest_names;
use memtrace_trace::columns::{COLUMNS, ColumnType};
use memtrace_trace::{EventName, config};

use super::terms::{TERMS, Term};
use crate::args;
use crate::terminal;

/// A table that the command prints.
struct Topic {
    name: &'static str,
    table: fn() -> Table,
}

const TOPICS: &[Topic] = &[
    Topic { name: "variables", table: variables },
    Topic { name: "columns", table: columns },
    Topic { name: "events", table: events },
    Topic { name: "digest", table: digest },
    Topic { name: "words", table: words },
];

/// Returns the definition of the command `memtrace help`.
pub(crate) fn command() -> Command {
    Command::new("help")
        .about("Explain a command, a word of the reports, or the variables and columns")
        .arg(Arg::new("topic").value_name("TOPIC").num_args(0..).help(
            "A command; a word of a report, such as reserved; or variables, columns, events, digest (its columns) or words \
             (all of them)",
        ))
        .arg(
            Arg::new("completions")
                .long("completions")
                .value_name("SHELL")
                .value_parser(value_parser!(Shell))
                .conflicts_with_all(["topic", "man"])
                .help("Print the completions of commands and options for this shell"),
        )
        .arg(
            Arg::new("man")
                .long("man")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .conflicts_with("topic")
                .help("Write a manual page for each command into this folder, such as ~/.local/share/man/man1"),
        )
        .after_help(args::examples(&[
            ("help oom", "the options of memtrace oom, as memtrace oom --help prints them"),
            ("help device used", "what a report means by these words"),
            ("help variables", "every MEMTRACE_ variable with its default"),
            ("help --completions bash", "for ~/.local/share/bash-completion/completions/memtrace"),
        ]))
}

/// Prints the help on a topic or the completions, or writes the manual pages.
///
/// # Errors
/// When there is no such topic, or the pages cannot be written.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    if let Some(shell) = matches.get_one::<Shell>("completions") {
        let mut text = Vec::new();
        clap_complete::generate(*shell, &mut super::command(), "memtrace", &mut text);
        std::io::stdout().write_all(&text)?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(folder) = matches.get_one::<PathBuf>("man") {
        write_pages(folder).with_context(|| format!("cannot write the pages to {}", folder.display()))?;
        return Ok(ExitCode::SUCCESS);
    }
    let words: Vec<&str> =
        matches.get_many::<String>("topic").into_iter().flatten().map(String::as_str).collect();
    let wanted = words.join(" ").trim().to_lowercase();
    let mut command = super::command();
    if wanted.is_empty() {
        command.print_long_help()?;
        return Ok(ExitCode::SUCCESS);
    }
    if is_command(&command, &wanted) {
        if let Err(help) = command.try_get_matches_from(["memtrace", &wanted, "--help"]) {
            help.print()?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut stdout = std::io::stdout().lock();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    if let Some(topic) = TOPICS.iter().find(|topic| topic.name == wanted) {
        page.table(&(topic.table)());
    } else if let Some(term) = term(&wanted) {
        let also = &term.names[1..];
        let also = if also.is_empty() { String::new() } else { format!("  (also {})", also.join(", ")) };
        page.line([Cell::new(term.names[0], Style::Strong), also.into()]);
        page.plain(term.meaning);
    } else {
        let commands = command.get_subcommands().map(Command::get_name);
        let names = TERMS.iter().flat_map(|term| term.names).copied();
        let all = names.chain(commands).chain(TOPICS.iter().map(|topic| topic.name));
        bail!("no help on {wanted:?}; the nearest topics are {}", nearest_names(all, &wanted));
    }
    stdout.write_all(page.text().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns true if `wanted` is a command, or the beginning of only one command and no other topic.
fn is_command(command: &Command, wanted: &str) -> bool {
    let other = TOPICS.iter().any(|topic| topic.name == wanted) || term(wanted).is_some();
    let begun = command.get_subcommands().filter(|command| command.get_name().starts_with(wanted)).count();
    command.find_subcommand(wanted).is_some() || begun == 1 && !other
}

/// Returns the word with this name, or `None` if the reports do not use it. `name` must be in lower case.
pub(super) fn term(name: &str) -> Option<&'static Term> {
    TERMS.iter().find(|term| term.names.contains(&name))
}

fn write_pages(folder: &Path) -> std::io::Result<()> {
    fs::create_dir_all(folder)?;
    clap_mangen::generate_to(super::command(), folder)
}

fn variables() -> Table {
    let mut table = Table::new(&[("variable", Side::Left), ("default", Side::Left), ("", Side::Left)]);
    for variable in config::variables() {
        let default = if variable.default.is_empty() { "-" } else { variable.default };
        table.row([Cell::new(variable.name, Style::Strong), default.into(), variable.help.into()]);
    }
    table
}

fn columns() -> Table {
    let mut table = Table::new(&[("column", Side::Left), ("type", Side::Left), ("", Side::Left)]);
    for column in COLUMNS {
        let kind = if column.kind == ColumnType::Int { "int" } else { "text" };
        table.row([Cell::new(column.name, Style::Strong), kind.into(), column.doc.into()]);
    }
    table
}

fn events() -> Table {
    let mut table = Table::new(&[("event", Side::Left), ("", Side::Left)]);
    for event in EventName::ALL {
        table.row([Cell::new(event.as_str(), Style::Strong), event.about().into()]);
    }
    table
}

/// Returns the columns of `memtrace export --to digest`.
fn digest() -> Table {
    let mut table = Table::new(&[("column", Side::Left), ("type", Side::Left), ("", Side::Left)]);
    for (_, name, kind, about) in DigestColumn::ALL {
        let kind = match kind {
            DigestType::Int => "integer",
            DigestType::Float => "double",
            DigestType::Text => "text",
        };
        table.row([Cell::new(*name, Style::Strong), kind.into(), about.trim().into()]);
    }
    table
}

/// Returns every word with the first sentence of its meaning.
fn words() -> Table {
    let mut table = Table::new(&[("", Side::Left), ("", Side::Left)]);
    for Term { names, meaning } in TERMS {
        let first = meaning.split_inclusive(". ").next().unwrap_or(meaning);
        table.row([Cell::new(names[0], Style::Strong), first.trim_end().into()]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_has_each_word_once_in_small_letters() {
        let mut names: Vec<&str> = TERMS.iter().flat_map(|term| term.names).copied().collect();
        assert!(names.iter().all(|name| *name == name.to_lowercase() && !name.is_empty()));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(TERMS.iter().all(|term| term.meaning.ends_with('.')));
    }
}
