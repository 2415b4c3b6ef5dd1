//! Every feature has a test with the feature in its name: `cargo test leaks` finds the tests of `leaks`.
//!
//! The features are the commands (with the reports), the exports and the variables. A name counts if it has
//! the words of the feature in sequence: `peak-at` is in `peak_at_end_is_the_sum_of_the_deltas`.

use std::collections::BTreeSet;
use std::path::Path;

use crate::common::command::root;
use crate::common::commands;
use memtrace_analysis::exports::EXPORTS;
use memtrace_analysis::reports::with_views;
use memtrace_trace::config;

/// Returns the names of all tests in the sources of the workspace.
fn test_names() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    collect(&root().join("src"), &mut names);
    collect(&root().join("tests"), &mut names);
    names
}

fn collect(folder: &Path, names: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, names);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            names.extend(tests_of(&text));
        }
    }
}

/// Returns the functions under `#[test]`, and the names in the tables `on_every_torch!` and `scripts!`.
fn tests_of(text: &str) -> Vec<String> {
    let mut names = Vec::new();
    let (mut is_test, mut table) = (false, false);
    for line in text.lines().map(str::trim) {
        if line == "#[test]" {
            is_test = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            if is_test {
                names.push(rest.split('(').next().unwrap().to_owned());
            }
            is_test = false;
        } else if line.starts_with("on_every_torch![") || line == "scripts! {" {
            table = true;
        } else if line == "];" || line == "}" {
            table = false;
        } else if table {
            let end = line.find([',', ':']).unwrap_or(0);
            names.extend(Some(line[..end].to_owned()).filter(|name| !name.is_empty()));
        }
    }
    names
}

/// Returns true if the test's name has the words of the feature in sequence.
fn is_named_in(feature: &str, test: &str) -> bool {
    let feature = feature.to_lowercase().replace('-', "_");
    format!("_{test}_").contains(&format!("_{feature}_"))
}

/// Returns the name of a report without the value of a view's option: `peak-at` for `peak --at end`.
fn named(report: &str) -> String {
    let words: Vec<&str> = report.split(' ').take(2).collect();
    words.join("-").replace("---", "-")
}

/// Fails for each feature that no test names.
fn each_is_named(kind: &str, features: impl IntoIterator<Item = String>) {
    let tests = test_names();
    assert!(tests.len() > 300, "only {} tests were found", tests.len());
    let unnamed: Vec<String> =
        features.into_iter().filter(|feature| !tests.iter().any(|test| is_named_in(feature, test))).collect();
    assert!(unnamed.is_empty(), "no test has the name of {kind}: {unnamed:?}");
}

#[test]
fn every_command_is_in_the_name_of_a_test() {
    each_is_named("a command", commands::listed().into_iter().map(|command| command.name));
}

#[test]
fn every_report_is_in_the_name_of_a_test() {
    each_is_named("a report", with_views().map(|report| named(report.name())));
}

#[test]
fn every_export_is_in_the_name_of_a_test() {
    each_is_named("an export", EXPORTS.iter().map(|export| export.name().to_owned()));
}

#[test]
fn every_variable_is_in_the_name_of_a_test() {
    let names = config::variables().map(|variable| variable.name.trim_start_matches("MEMTRACE_").to_owned());
    each_is_named("a variable", names);
}

#[test]
fn the_readme_of_the_tests_lists_every_module() {
    let read = |name: &str| std::fs::read_to_string(root().join("tests").join(name)).unwrap();
    let (main, readme) = (read("main.rs"), read("README.md"));
    let modules = main.lines().filter_map(|line| line.strip_prefix("mod ")?.strip_suffix(';'));
    let missing: Vec<&str> = modules
        .filter(|name| !readme.contains(&format!("`{name}.rs`")) && !readme.contains(&format!("`{name}/`")))
        .collect();
    assert!(missing.is_empty(), "tests/README.md does not list {missing:?}");
}

#[test]
fn the_names_of_tests_are_found_in_sources() {
    let text = "#[test]\nfn peak_adds_up() {}\nfn helper() {}\non_every_torch![\n    a_case,\n];\nscripts! {\n    b: \"c.py\" on \"t4\";\n}\n";
    assert_eq!(tests_of(text), ["peak_adds_up", "a_case", "b"]);
    assert!(is_named_in("peak-at", "the_peak_at_end") && !is_named_in("peak", "peaks_agree"));
}
