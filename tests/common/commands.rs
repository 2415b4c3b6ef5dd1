//! The commands as `memtrace --help` lists them.

use super::command::memtrace;

/// A command as the help shows it.
pub(crate) struct Listed {
    pub(crate) group: String,
    pub(crate) name: String,
    pub(crate) about: String,
}

/// Returns every command, in the order of the help.
pub(crate) fn listed() -> Vec<Listed> {
    let help = memtrace().arg("--help").env("COLUMNS", "500").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (commands, _) = help.split_once("\nOptions:\n").unwrap();
    let mut group = String::new();
    let mut all = Vec::new();
    for line in commands.lines() {
        if let Some((title, _)) = line.split_once(", such as: ") {
            group = title.to_owned();
        } else if let Some((name, about)) = line.strip_prefix("  ").and_then(|line| line.split_once(' ')) {
            all.push(Listed { group: group.clone(), name: name.to_owned(), about: about.trim().to_owned() });
        }
    }
    assert!(all.len() > 20, "only {} commands are listed: {help}", all.len());
    all
}
