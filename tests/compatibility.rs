//! Runs `scripts/programs`, which compares untraced and traced runs of programs of popular libraries. The
//! default tests run two of the programs. `scripts/test --deep` also runs a fixed third of them, and two more.
//! `scripts/check --deep` runs all: it calls the script itself.

use std::process::{Command, Output};

use crate::common::command::root;
use crate::common::installed::{cache, missing};

/// Runs `scripts/programs` with these arguments.
fn programs(arguments: &[&str]) -> Output {
    Command::new("python3").arg(root().join("scripts/programs")).args(arguments).output().unwrap()
}

/// Runs programs, which print the same traced and untraced.
fn print_the_same(chosen: &[&str]) {
    if !cache().join("programs-base/.list").exists() {
        return missing("the libraries are not installed: run scripts/env programs");
    }
    let output = programs(&[chosen, &["--jobs", "2"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn programs_of_two_libraries_print_the_same_traced_and_have_torchs_peaks() {
    print_the_same(&["bitsandbytes, LLM.int8", "timm, EfficientNet"]);
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn programs_of_two_trainers_print_the_same_traced_and_have_torchs_peaks() {
    print_the_same(&["Transformers, Trainer", "accelerate launch, own loop, 2 ranks"]);
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn programs_of_the_fixed_third_print_the_same_traced_and_have_torchs_peaks() {
    print_the_same(&["--ci"]);
}

#[test]
fn programs_of_the_list_are_all_on_the_page_of_the_docs() {
    let page = std::fs::read_to_string(root().join("docs/contributors/programs.md")).unwrap();
    let mut reader = csv::Reader::from_path(root().join("tests/compatibility/programs.csv")).unwrap();
    let rows: Vec<_> = reader.records().map(Result::unwrap).collect();
    assert!(rows.len() >= 35, "only {} programs", rows.len());
    for row in rows {
        let found = page.lines().find(|line| line.starts_with(&format!("| {} | ", &row[0])));
        let found = found.unwrap_or_else(|| panic!("{} is missing: run scripts/programs --write", &row[0]));
        assert!(found.contains(&row[6]), "the page does not say {:?} of {}", &row[6], &row[0]);
    }
}

#[test]
fn programs_refuses_options_that_choose_nothing() {
    for (arguments, message) in [
        (&["no such program"][..], "no program has no such program in its name"),
        (&["--ci", "ZeRO"], "no program has ZeRO in its name"),
        (&["--jobs", "0"], "--jobs: at least 1"),
    ] {
        let output = programs(arguments);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(message) && !stderr.contains("Traceback"), "{stderr}");
    }
}
