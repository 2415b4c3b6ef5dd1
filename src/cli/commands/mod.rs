//! The commands, with a file or a folder for each. Each contains the command's arguments and the function
//! that runs the command. All reports share one file.

use std::fmt::Write as _;
use std::process::ExitCode;

use anyhow::Result;
use clap::{ArgMatches, Command};
use memtrace_analysis::reports::REPORTS;

mod doctor;
mod export;
mod fit;
mod help;
mod html_report;
mod library_path;
mod live;
mod mcp;
pub(crate) mod nvidia_smi;
mod process_request;
mod reports;
mod run;
mod search_request;
mod terms;
mod tune;

/// Commands that the help shows together.
struct Group {
    title: &'static str,
    /// The commands, the most used first.
    commands: &'static [&'static str],
    /// The command line of one of the commands, as an example.
    example: &'static str,
}

/// Every command, in the order of the help.
const GROUPS: &[Group] = &[
    Group {
        title: "Record",
        commands: &["run", "live", "doctor"],
        example: "memtrace run -o out -- python train.py",
    },
    Group {
        title: "Explain",
        commands: &[
            "summary", "peak", "oom", "leaks", "frag", "ledger", "serving", "timeline", "modules", "ops",
        ],
        example: "memtrace peak --by module out",
    },
    Group {
        title: "Improve",
        commands: &["fit", "advise", "tune"],
        example: "memtrace advise --fit 24g out",
    },
    Group { title: "Compare", commands: &["diff", "budget", "ranks"], example: "memtrace diff before after" },
    Group {
        title: "Share",
        commands: &["report", "export", "mcp"],
        example: "memtrace report out -o report.html",
    },
    Group { title: "Plumbing", commands: &["check", "lib", "help"], example: "memtrace check out" },
];

/// Returns the command line of `memtrace`, with all its commands.
pub(crate) fn command() -> Command {
    let mut all: Vec<Command> = REPORTS.iter().map(|report| reports::command(*report)).collect();
    all.extend([
        run::command(),
        live::command(),
        doctor::command(),
        fit::command(),
        tune::command(),
        html_report::command(),
        export::command(),
        mcp::command(),
        library_path::command(),
        help::command(),
    ]);
    let place = |command: &Command| {
        let names = GROUPS.iter().flat_map(|group| group.commands);
        names.into_iter().position(|name| *name == command.get_name())
    };
    all.sort_by_key(place);
    Command::new("memtrace")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Trace the GPU memory of a PyTorch program, with no change to the script")
        .help_template(format!(
            "{{about}}\n\n{{usage-heading}} {{usage}}\n\n{}Options:\n{{options}}{{after-help}}",
            groups(&all)
        ))
        .after_help("memtrace help COMMAND explains a command, and memtrace help WORD a word of the reports.")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .infer_subcommands(true)
        .subcommands(all.into_iter().map(with_word))
}

/// Returns the list of `commands` by group, for the help.
fn groups(commands: &[Command]) -> String {
    let width = commands.iter().map(|command| command.get_name().len()).max().unwrap_or(0);
    let mut text = String::new();
    for group in GROUPS {
        let _ = writeln!(text, "{}, such as: {}", group.title, group.example);
        for name in group.commands {
            let command = commands.iter().find(|command| command.get_name() == *name);
            let about = command.and_then(Command::get_about).map(ToString::to_string).unwrap_or_default();
            let _ = writeln!(text, "  {name:width$}  {about}");
        }
        text.push('\n');
    }
    text
}

/// Adds the meaning of the command's name to the command's help, if the reports also use the name as a word.
fn with_word(command: Command) -> Command {
    let Some(term) = help::term(command.get_name()) else { return command };
    let examples = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    command.after_help(format!("{}\n\nAs a word of the reports: {}", examples.trim_end(), term.meaning))
}

/// Runs the command that the user typed.
///
/// # Errors
/// When the request is invalid, or a trace cannot be read.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    match matches.subcommand() {
        Some(("run", matches)) => run::run(matches),
        Some(("fit", matches)) => fit::run(matches),
        Some(("tune", matches)) => tune::run(matches),
        Some(("lib", matches)) => library_path::run(matches),
        Some(("doctor", matches)) => doctor::run(matches),
        Some(("export", matches)) => export::run(matches),
        Some(("report", matches)) => html_report::run(matches),
        Some(("live", matches)) => live::run(matches),
        Some(("mcp", matches)) => mcp::run(matches, command()),
        Some(("help", matches)) => help::run(matches),
        Some((name, matches)) => reports::run(name, matches),
        None => unreachable!("clap requires a subcommand"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }

    #[test]
    fn the_help_has_every_command_in_one_group_and_at_most_24_beside_mcp() {
        let mut listed: Vec<&str> = GROUPS.iter().flat_map(|group| group.commands).copied().collect();
        let command = command();
        let mut all: Vec<&str> = command.get_subcommands().map(Command::get_name).collect();
        listed.sort_unstable();
        all.sort_unstable();
        assert_eq!(listed, all);
        // `mcp` is for agents; a person has at most 24 commands to choose from.
        let by_hand = all.iter().filter(|name| **name != "mcp").count();
        assert!(by_hand <= 24, "{by_hand}");
    }

    /// Splits a command line into words. A part in single quotes is one word.
    fn words(line: &str) -> Vec<String> {
        let parts = line.split('\'').enumerate();
        let words = parts.flat_map(|(index, part)| match index % 2 {
            0 => part.split_whitespace().map(str::to_owned).collect(),
            _ => vec![part.to_owned()],
        });
        words.collect()
    }

    #[test]
    fn the_help_of_every_command_has_examples_that_are_valid() {
        for name in command().get_subcommands().map(Command::get_name) {
            let mut own = command();
            let help = own.find_subcommand_mut(name).unwrap().render_long_help().to_string();
            let (_, examples) =
                help.split_once("Examples:\n").unwrap_or_else(|| panic!("{name} has no example"));
            let lines = examples.lines().take_while(|line| line.starts_with("  "));
            let lines: Vec<&str> = lines.filter(|line| line.starts_with("  memtrace ")).collect();
            assert!(!lines.is_empty(), "{name}: {help}");
            for line in lines.into_iter().chain(GROUPS.iter().map(|group| group.example)) {
                let line = line.trim_start().split("  ").next().unwrap_or_default();
                let parsed = command().try_get_matches_from(words(line));
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
            }
        }
    }
}
