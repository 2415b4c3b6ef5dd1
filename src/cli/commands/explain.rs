//! `memtrace explain`: the words that the reports use.

use std::io::Write;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Arg, ArgMatches, Command};
use memtrace_analysis::render::printer::{Cell, Printer, Side, Style, Table};
use memtrace_analysis::selection::nearest_names;

use super::terms::{TERMS, Term};
use crate::terminal;

/// The arguments of `memtrace explain`.
pub(crate) fn command() -> Command {
    Command::new("explain").about("Explain a word that the reports use: reserved, segment, device used").arg(
        Arg::new("term").value_name("TERM").num_args(0..).help("The word or words [default: a list of all]"),
    )
}

/// Prints the meaning of one word, or the list of all.
///
/// # Errors
/// When there is no such word; the message lists the nearest.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let words: Vec<&str> =
        matches.get_many::<String>("term").into_iter().flatten().map(String::as_str).collect();
    let wanted = words.join(" ").trim().to_lowercase();
    let mut stdout = std::io::stdout().lock();
    let mut page = Printer::new(terminal::use_colour("auto", &stdout), terminal::width(&stdout));
    if wanted.is_empty() {
        let mut table = Table::new(&[("", Side::Left), ("", Side::Left)]);
        for Term { names, meaning } in TERMS {
            let first = meaning.split_inclusive(". ").next().unwrap_or(meaning);
            table.row([Cell::new(names[0], Style::Strong), first.trim_end().into()]);
        }
        page.table(&table);
    } else {
        let Some(term) = TERMS.iter().find(|term| term.names.contains(&wanted.as_str())) else {
            let names = TERMS.iter().flat_map(|term| term.names).copied();
            bail!("no report uses {wanted:?}; the nearest words are {}", nearest_names(names, &wanted));
        };
        let also = &term.names[1..];
        page.line([Cell::new(term.names[0], Style::Strong), also_text(also).into()]);
        page.plain(term.meaning);
    }
    stdout.write_all(page.text().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

fn also_text(names: &[&str]) -> String {
    if names.is_empty() { String::new() } else { format!("  (also {})", names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn explain_has_each_word_once_in_small_letters() {
        let mut names: Vec<&str> = TERMS.iter().flat_map(|term| term.names).copied().collect();
        assert!(names.iter().all(|name| *name == name.to_lowercase() && !name.is_empty()));
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
        assert!(TERMS.iter().all(|term| term.meaning.ends_with('.')));
    }
}
