//! The README says what the code says: its tables of columns and variables are generated.
//!
//! `MEMTRACE_BLESS=1 cargo test --test docs` writes them anew.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::sync::Mutex;

use memtrace_trace::EventName;
use memtrace_trace::columns::{COLUMNS, ColumnType};
use memtrace_trace::config;

#[test]
fn the_readme_lists_every_column() {
    let mut table = String::from("| column | type | meaning |\n| --- | --- | --- |\n");
    for column in COLUMNS {
        let kind = match column.kind {
            ColumnType::Int => "integer",
            ColumnType::Text => "text",
        };
        writeln!(table, "| `{}` | {kind} | {} |", column.name, escaped(column.doc)).unwrap();
    }
    holds("columns", &table);
}

#[test]
fn the_readme_lists_every_event() {
    let names: Vec<String> = EventName::ALL.iter().map(|event| format!("`{event}`")).collect();
    holds("events", &format!("{}\n", names.join(" ")));
}

#[test]
fn the_readme_lists_every_variable() {
    let mut table = String::from("| variable | default | what it does |\n| --- | --- | --- |\n");
    for variable in config::variables() {
        let default = if variable.default.is_empty() {
            "(empty)".to_owned()
        } else {
            format!("`{}`", variable.default)
        };
        writeln!(table, "| `{}` | {default} | {} |", variable.name, escaped(variable.help)).unwrap();
    }
    holds("variables", &table);
}

#[test]
fn the_readme_lists_every_command() {
    let help = Command::new(env!("CARGO_BIN_EXE_memtrace")).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, commands) = help.split_once("\nCommands:\n").unwrap();
    let mut table = String::from("| command | what it tells |\n| --- | --- |\n");
    for line in commands.lines().take_while(|line| !line.is_empty()) {
        let (name, about) = line.trim().split_once(' ').unwrap();
        writeln!(table, "| `memtrace {name}` | {} |", escaped(about.trim())).unwrap();
    }
    holds("commands", &table);
}

#[test]
fn the_readme_lists_every_export() {
    let mut table = String::from("| `--to` | what it is | opened by |\n| --- | --- | --- |\n");
    for export in memtrace_analysis::exports::EXPORTS {
        let open_with = export.open_with().replace("drop the file on ", "");
        writeln!(table, "| `{}` | {} | {} |", export.name(), escaped(export.about()), escaped(&open_with))
            .unwrap();
    }
    holds("exports", &table);
}

fn escaped(text: &str) -> String {
    text.replace('|', "\\|")
}

/// Checks that the part of the README between the markers `NAME` and `/NAME` is `expected`.
fn holds(name: &str, expected: &str) {
    // The tests run at once, and each may write its own part.
    static README: Mutex<()> = Mutex::new(());
    let _guard = README.lock();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let readme = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = readme.split_once(&format!("<!-- {name} -->\n")).expect("the opening marker");
    let (found, after) = rest.split_once(&format!("<!-- /{name} -->")).expect("the closing marker");
    if std::env::var_os("MEMTRACE_BLESS").is_some() {
        let new = format!("{before}<!-- {name} -->\n{expected}<!-- /{name} -->{after}");
        std::fs::write(&path, new).unwrap();
        return;
    }
    assert_eq!(
        found, expected,
        "README.md's {name} are old: MEMTRACE_BLESS=1 cargo test --test docs writes them anew"
    );
}
