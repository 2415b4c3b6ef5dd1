//! `memtrace tune`: compares its replays with runs of the same script under the same settings.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use crate::common::copied::copy_program;
use crate::common::running::ends_with_its_pythons;
use crate::common::torch::{self, Torch, scripts, succeeded, text};

/// Runs `tests/scripts/allocators/odd_requests.py` with these allocator settings on a simulated card, with
/// its trace in `out`. Returns the highest reserved bytes.
fn reserved_with(torch: &Torch, settings: &str, out: &Path) -> i64 {
    let script = scripts().join("allocators/odd_requests.py");
    let output = torch::memtrace()
        .args(["run", "--phantom", "mem=3g,context=400m", "-o"])
        .arg(out)
        .arg("--")
        .arg(&torch.python)
        .arg(script)
        .env("PYTORCH_CUDA_ALLOC_CONF", settings)
        .output()
        .unwrap();
    let said = succeeded(settings, &output);
    said.lines().last().unwrap().parse().unwrap()
}

fn tune(folder: &Path, arguments: &[&str]) -> Output {
    torch::memtrace().arg("tune").args(arguments).current_dir(folder).output().unwrap()
}

#[test]
fn tune_predicts_the_reserved_bytes_of_runs_with_other_settings() {
    Torch::on_main(|torch| {
        let folder = TempDir::new().unwrap();
        let here = folder.path();
        let reserved = reserved_with(torch, "", &here.join("out"));
        let python = torch.python.to_str().unwrap();
        let output = tune(here, &["out", "--json", "--python", python]);
        // The script requests more than the card has, once, so no settings can make it fit.
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(answer["replay_differences"], 0, "{answer:#}");
        assert!(answer["replay_checks"].as_i64().unwrap() > 20, "{answer:#}");
        assert_eq!(answer["failed_requests"], 1);
        let trials = answer["trials"].as_array().unwrap();
        assert!(trials.len() >= 7, "{answer:#}");
        let of = |settings: &str| trials.iter().find(|trial| trial["settings"] == settings).unwrap();
        assert_eq!(of("")["peak_reserved_bytes"], reserved);
        let splits =
            trials.iter().find(|trial| trial["settings"].as_str().unwrap().starts_with("max_split_size_mb"));
        for settings in ["expandable_segments:True", splits.unwrap()["settings"].as_str().unwrap()] {
            let real = reserved_with(torch, settings, &here.join("other"));
            assert_eq!(of(settings)["peak_reserved_bytes"], real, "{settings} on {}", torch.version);
            fs::remove_dir_all(here.join("other")).unwrap();
        }
    });
}

#[test]
fn tune_ends_with_its_replays_when_a_signal_ends_it() {
    let folder = TempDir::new().unwrap();
    let [pids, script, python] = ["pids", "script", "python"].map(|name| folder.path().join(name));
    fs::write(&script, format!("#!/bin/sh\necho $$ >> '{}'\nexec sleep 600\n", pids.display())).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    copy_program(&script, &python);
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oom-big");
    ends_with_its_pythons(torch::memtrace().arg("tune").arg(fixture).arg("--python").arg(&python), &pids);
}

/// A library may print JSON of its own before the replays. If all replays fail, nothing is known, not even that
/// the run does not fit.
#[test]
fn tune_whose_replays_all_fail_has_no_answer() {
    let folder = TempDir::new().unwrap();
    let [script, python] = ["script", "python"].map(|name| folder.path().join(name));
    let lines = r#"7 {"x":7} {"torch":"2.11.0"} {"settings":"","failed":"no"}"#.replace(' ', "\n");
    fs::write(&script, format!("#!/bin/sh\nprintf '{lines}\\n'\n")).unwrap();
    fs::set_permissions(&script, fs::Permissions::from_mode(0o700)).unwrap();
    copy_program(&script, &python);
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oom-big");
    let python = python.to_str().unwrap();
    let output =
        tune(folder.path(), &[fixture.to_str().unwrap(), "--python", python, "--conf", "a:1", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("\"fits\": null"), "{}", text(&output.stdout));
}

#[test]
fn tune_names_the_python_or_library_that_it_lacks() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let here = folder.path();
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/oom-big");
        let fixture = fixture.to_str().unwrap();
        let python = torch.python.to_str().unwrap();
        let refused = |arguments: &[&str], error: &str| {
            let output = tune(here, arguments);
            assert_eq!(output.status.code(), Some(2), "{arguments:?}");
            assert!(text(&output.stderr).contains(error), "{arguments:?}: {}", text(&output.stderr));
            assert!(output.stdout.is_empty());
        };
        refused(&[fixture, "--python", "/no/such/python"], "--python PATH");
        refused(&[fixture, "--python", "/usr/bin/python3"], "has no PyTorch for CUDA");
        refused(&[fixture, "--device", "7", "--python", python], "device");
        refused(&["nothing-here", "--python", python], "no such file");
        // The fixture requests more than the card has, so no settings help. A setting that torch refuses must
        // be listed without an answer.
        let output = tune(here, &[fixture, "--python", python, "--conf", "no_such_setting:1"]);
        assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
        let said = text(&output.stdout);
        assert!(said.contains("no_such_setting") && said.contains("no answer"), "{said}");
        assert!(said.contains("No settings make it fit"), "{said}");
    });
}
