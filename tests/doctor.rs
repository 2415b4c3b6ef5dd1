//! `memtrace doctor` for a Python without torch, and for every installed torch.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::common::running::ends_with_its_pythons;
use crate::common::torch::{Torch, memtrace};

fn doctor(arguments: &[&str]) -> Output {
    memtrace().arg("doctor").args(arguments).current_dir(env!("CARGO_TARGET_TMPDIR")).output().unwrap()
}

/// Parses the output of `--json`. Returns the subject, the state and the text of each finding, in order.
fn findings(output: &Output) -> Vec<(String, String, String)> {
    let json: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!(
            "{error}: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )
    });
    assert_eq!(json["works"].as_bool().unwrap(), output.status.success());
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let findings = json["findings"].as_array().unwrap();
    findings.iter().map(|line| (text(&line["what"]), text(&line["state"]), text(&line["says"]))).collect()
}

#[test]
fn doctor_sees_every_hook_work_on_the_phantom() {
    Torch::on_each(|torch| {
        let output = doctor(&["--json", "--phantom", "--", torch.python.to_str().unwrap()]);
        let found = findings(&output);
        assert!(output.status.success(), "{found:#?}");
        for (what, state, says) in &found {
            assert!(["ok", "note"].contains(&state.as_str()), "{what}: {says}: {found:#?}");
        }
        for what in
            ["blocks", "segments", "requested", "ops", "modules", "phases", "tags", "streams", "pinned"]
        {
            assert!(found.iter().any(|line| line.0 == what), "{what} is not judged");
        }
        assert!(found.iter().any(|line| line.0 == "phantom" && line.2.contains("h100-80g")));
        // The JSON lists the simulated GPU's functions by the kind of their answers, such as `real` or
        // `guess`.
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        let answers = |kind: &str, name: &str| {
            json["phantom_answers"][kind].as_array().unwrap().iter().any(|answer| answer == name)
        };
        assert!(answers("real", "cudaMalloc") && answers("guess", "cudaFuncGetAttributes"));
        assert!(answers("unsupported", "cuGetExportTable") && answers("passed", "nvrtc.*"));
        assert!(answers("wanted", "cudaMalloc") && answers("success", "cublasSgemm_v2"), "{json:#}");
        assert_eq!(json["phantom_answers"]["missing"], Value::Array(Vec::new()));
        assert!(found.iter().any(|line| line.0 == "answers"
            && line.2.ends_with("that this torch imports are simulated; --json lists them")));
    });
}

#[test]
fn doctor_ends_with_its_python_when_a_signal_ends_it() {
    let folder = tempfile::TempDir::new().unwrap();
    let pids = folder.path().join("pids");
    let script = format!("echo $$ >> '{}'; exec sleep 600", pids.display());
    ends_with_its_pythons(memtrace().args(["doctor", "--", "sh", "-c", &script]), &pids);
}

#[test]
fn doctor_says_why_a_python_without_torch_cannot_be_traced() {
    let empty = tempfile::TempDir::new().unwrap();
    for (python, what, says) in [
        (&["/nowhere/python"][..], "python", "cannot run /nowhere/python"),
        (&["/bin/false"], "python", "not a Python"),
        (&["python3", "-S", "-I"], "torch", "No module named 'torch'"),
    ] {
        let mut arguments = vec!["--json", "-o", empty.path().to_str().unwrap(), "--"];
        arguments.extend(python);
        let output = doctor(&arguments);
        assert_eq!(output.status.code(), Some(1));
        let found = findings(&output);
        let line = found.iter().find(|line| line.0 == what && line.1 == "missing");
        assert!(line.is_some_and(|line| line.2.contains(says)), "{python:?}: {found:#?}");
    }
    // doctor creates no folder, not even the parents of the given one.
    let inner = empty.path().join("a/b/c");
    let output = doctor(&["-o", inner.to_str().unwrap(), "--", "python3", "-S", "-I"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("can be written to"), "{text}");
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
    let output = doctor(&["-o", "/proc/nowhere", "--", "python3"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("cannot be written to /proc/nowhere"), "{text}");
    assert!(!Path::new(env!("CARGO_TARGET_TMPDIR")).join("memtrace-out").exists());
}
