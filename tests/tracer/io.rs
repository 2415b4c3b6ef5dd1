//! `MEMTRACE_OPS=io` on the simulated GPU: the tensors that ops read and write, compared with torch's own
//! profiler and trackers in the same process.
//!
//! Each test runs once for every torch of [`on_every_torch`]. If `scripts/env torch` has not installed a
//! version, the tests on it are skipped with a message; with `CI=true` they fail.

use std::path::PathBuf;

use memtrace_trace::EventName;
use serde_json::Value;

use crate::common::torch::{CARD, Run, Torch, on_every_torch, text};

on_every_torch![
    ops_actions_and_categories_equal_the_profilers: "the layout of torch's callbacks and tensors",
    ops_actions_without_tags_follow_from_the_data_flow_alone,
    modules_memory_equals_mem_trackers,
    ops_names_equal_memory_trackers,
    ops_io_reads_past_odd_tensors_and_leaves_the_output_unchanged: "the layout of torch's tensors",
    ops_io_on_an_unknown_tensor_layout_prints_one_line_and_traces_ops_all,
];

fn ops_actions_and_categories_equal_the_profilers(torch: &Torch) {
    let run = traced(torch, "io/profiled_timeline.py", &[], &[]);
    let theirs = write(&run, "theirs.json", &run.stdout());
    let ours = run.report("ops --actions", &["--step", "3:3", "--json", "--each"]);
    let ours = write(&run, "ours.json", &ours);
    torch.checker("profiled_timeline", &[&ours, &theirs]);
}

/// Runs without tags. The categories must be inferred from the flow of data alone, which needs the gradients
/// of `AccumulateGrad` and one step of the optimizer, and must be marked as inferred.
fn ops_actions_without_tags_follow_from_the_data_flow_alone(torch: &Torch) {
    let run = traced(torch, "io/profiled_timeline.py", &[], &[("MEMTRACE_MODULES", "0")]);
    let answer = run.json("ops --actions", &["--step", "3:3"]);
    let device = &answer["processes"][0]["devices"][0];
    let with_tags = traced(torch, "io/profiled_timeline.py", &[], &[]);
    let expected = with_tags.json("ops --actions", &["--step", "3:3"]);
    let expected = &expected["processes"][0]["devices"][0];
    for category in ["PARAMETER", "GRADIENT"] {
        let (found, expected) = (&device["categories"][category], &expected["categories"][category]);
        assert_eq!(found["inferred"], true, "{category}");
        assert_eq!(expected["inferred"], false, "{category}");
        assert_eq!(found["CREATE"], expected["CREATE"], "{category}");
    }
    let parameters = &device["categories"]["PARAMETER"]["PREEXISTING"];
    assert_eq!(parameters, &expected["categories"]["PARAMETER"]["PREEXISTING"]);
    assert!(device["categories"]["ACTIVATION"]["CREATE"]["count"].as_i64().unwrap() > 5);
    // The other reports must use the same inferred categories, and mark them as inferred.
    let peak = run.report("peak", &["--by", "category"]);
    assert!(peak.contains("parameter *") || peak.contains("parameter*"), "{peak}");
    assert!(peak.contains("torch.profiler's passes"), "{peak}");
}

fn modules_memory_equals_mem_trackers(torch: &Torch) {
    let run = traced(torch, "io/module_memory.py", &[], &[]);
    let theirs: Value = serde_json::from_slice(&run.output.stdout).unwrap();
    let ours = run.json("modules", &["--depth", "9"]);
    let ours = ours["processes"][0]["modules"].as_array().unwrap();
    let theirs = theirs.as_object().unwrap();
    assert_eq!((ours.len(), theirs.len()), (6, 6));
    for (path, numbers) in theirs {
        let found = ours.iter().find(|module| module["module"] == path.as_str()).unwrap();
        let last = |key: &str| found[key].as_array().unwrap().last().unwrap().clone();
        let found = [
            found["parameter_bytes"].clone(),
            found["buffer_bytes"].clone(),
            last("input_bytes"),
            last("output_bytes"),
        ];
        assert_eq!(Value::from(found.to_vec()), *numbers, "{path}");
    }
    // Without io records, parameters and buffers are still known from tags, and a note must say what is
    // missing.
    let plain = traced(torch, "io/module_memory.py", &[], &[("MEMTRACE_OPS", "all")]);
    let text = plain.report("modules", &["--depth", "9"]);
    assert!(text.contains("MEMTRACE_OPS=io records them"), "{text}");
    let answer = plain.json("modules", &["--depth", "9"]);
    let root = &answer["processes"][0]["modules"][0];
    assert_eq!((&root["parameter_bytes"], &root["buffer_bytes"]), (&theirs["Net"][0], &theirs["Net"][1]));
    assert_eq!(root["input_bytes"], Value::Null);
}

/// The names have MemoryTracker's form: `{module}.forward.{op}.{overload}_{n}`.
fn ops_names_equal_memory_trackers(torch: &Torch) {
    // torch 2.6 does not show the dispatch mode to callbacks. For nested ops it is unknown which one the mode
    // saw, so `ops` counts all of them there.
    if torch.version == "2.6.0" {
        return;
    }
    let run = traced(torch, "fixtures/trackers.py", &["memory"], &[]);
    let theirs: Value = serde_json::from_slice(&run.output.stdout).unwrap();
    let ours = run.json("ops", &["--series", "--top", "1000"]);
    let ours = &ours["processes"][0];
    assert_eq!(
        ours["series"]["allocated_bytes"].as_array().unwrap().len(),
        theirs["allocated"].as_object().unwrap().len()
    );
    let top = ours["top"].as_array().unwrap();
    assert!(top.len() > 20, "{}", top.len());
    for op in top {
        let name = theirs["allocated"][op["index"].to_string()][0].as_str().unwrap();
        let ours = op["name"].as_str().unwrap();
        // Skips the ops of `record_function` itself, for which torch gives callbacks no name.
        if !name.contains("._record_function_") {
            assert_eq!(ours, name);
        }
    }
}

fn ops_io_reads_past_odd_tensors_and_leaves_the_output_unchanged(torch: &Torch) {
    let host = [("MEMTRACE_HOST_TENSORS", "1")];
    let run = traced(torch, "io/odd_tensors.py", &[], &host);
    let untraced = torch.untraced_on(CARD, &[], "io/odd_tensors.py", &[], &host).output;
    assert_eq!(text(&run.output.stdout), text(&untraced.stdout));
    assert_eq!(run.output.status.code(), untraced.status.code());
    torch.checker("odd_tensors", &[&run.file()]);
}

fn ops_io_on_an_unknown_tensor_layout_prints_one_line_and_traces_ops_all(torch: &Torch) {
    let run = traced(torch, "io/unknown_layout.py", &[], &[]);
    assert_eq!(text(&run.output.stdout), text(&torch.untraced("io/unknown_layout.py", &[]).stdout));
    assert_eq!(
        text(&run.output.stderr),
        "memtrace: MEMTRACE_OPS=io could not learn torch's layout: reads and writes of ops are not \
         recorded, as with MEMTRACE_OPS=all\n"
    );
    run.report("check", &[]);
    let mut reader = memtrace_trace::csv::RowReader::open(&run.file()).unwrap();
    let (mut ops, mut io, mut peak) = (0, 0, 0);
    while let Some(row) = reader.next_row().unwrap() {
        ops += i64::from(row.event == EventName::Op);
        io += i64::from(row.event == EventName::Io && !row.api.starts_with("module_"));
        peak = peak.max(if row.device == 0 { row.allocated_bytes } else { 0 });
    }
    assert!(ops > 1000, "{ops}");
    assert_eq!(io, 0);
    assert_eq!(peak.to_string(), text(&run.output.stdout).trim());
}

/// Traces a script with `MEMTRACE_OPS=io`, unless `variables` set another value; it must succeed.
fn traced(torch: &Torch, script: &str, args: &[&str], variables: &[(&str, &str)]) -> Run {
    torch.trace_with(script, args, &[&[("MEMTRACE_OPS", "io")], variables].concat()).expect_success()
}

/// Writes a file for a checker.
fn write(run: &Run, name: &str, contents: &str) -> PathBuf {
    let path = run.folder().join(name);
    std::fs::write(&path, contents).unwrap();
    path
}
