//! PyTorch's memory snapshots as input: memtrace traces a run while PyTorch records it, and both files must
//! give the same answers.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::clean;
use crate::common::pages;
use crate::common::torch::{Run, Torch, on_every_torch};

/// Runs `memtrace ARGUMENTS` with little memory and little time.
fn memtrace(arguments: &[&str], place: &Path) -> Output {
    // Limits the address space to 768 MiB, which must be enough for the stacks of the threads, the program,
    // and the data that it reads.
    let script = "ulimit -v 786432; exec timeout -s KILL 60 \"$0\" \"$@\"";
    let mut command = clean(Path::new("sh"));
    command.args(["-c", script, env!("CARGO_BIN_EXE_memtrace")]).args(arguments).arg(place).output().unwrap()
}

/// Returns the answer of a report that must succeed.
fn json(arguments: &[&str], place: &Path) -> Value {
    let output = memtrace(&[arguments, &["--json"]].concat(), place);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Runs a script that leaves `rank0.pickle` in a folder. Returns the run, this file, and its folder.
fn recorded(torch: &Torch, script: &str, entries: &str, settings: &str) -> (Run, PathBuf, TempDir) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("rank0.pickle");
    let env = [("PYTORCH_CUDA_ALLOC_CONF", settings)];
    let run = torch.trace_with(
        &format!("snapshots/{script}.py"),
        &[file.to_str().unwrap(), entries],
        if settings.is_empty() { &[] } else { &env },
    );
    (run.expect_success(), file, folder)
}

/// Returns the memory figures that a snapshot and a trace both have.
fn figures(summary: &Value, frag: &Value) -> Vec<(String, Value)> {
    let mut figures = Vec::new();
    let device = &summary["processes"][0]["devices"][0];
    for key in ["peak_allocated", "peak_active", "peak_reserved"] {
        figures.push((key.to_owned(), device[key]["bytes"].clone()));
    }
    for key in ["at_end_allocated_bytes", "at_end_reserved_bytes"] {
        figures.push((key.to_owned(), device[key].clone()));
    }
    for key in ["alloc", "segment_free", "oom"] {
        figures.push((key.to_owned(), summary["processes"][0]["events"][key].clone()));
    }
    let is_memory = |key: &str, value: &Value| value.is_i64() && key != "ts_ns";
    for (key, value) in
        frag["devices"][0].as_object().unwrap().iter().filter(|(key, value)| is_memory(key, value))
    {
        figures.push((format!("frag {key}"), value.clone()));
    }
    for segment in frag["devices"][0]["pinned_segments"].as_array().unwrap() {
        for key in ["addr", "bytes", "free_bytes", "holes"] {
            figures.push((format!("pinned segment {key}"), segment[key].clone()));
        }
        for block in segment["blocks"].as_array().unwrap() {
            figures.push(("block".to_owned(), block["bytes"].clone()));
        }
    }
    assert!(figures.len() > 12, "{figures:?}");
    figures
}

/// Checks that the snapshot and the trace of one run have the same memory, to the byte.
fn agree(torch: &Torch, script: &str, settings: &str) {
    let (run, file, _folder) = recorded(torch, script, "1000000", settings);
    let of =
        |place: &Path, at: &str| figures(&json(&["summary"], place), &json(&["frag", "--at", at], place));
    for at in ["peak", "end"] {
        assert_same(&of(&file, at), &of(&run.dir(), at));
    }
    agrees_with_python(torch, &file);
    let check = memtrace(&["check"], &file);
    assert!(check.status.success(), "{}", String::from_utf8_lossy(&check.stdout));
}

fn assert_same(ours: &[(String, Value)], trace: &[(String, Value)]) {
    for (ours, trace) in ours.iter().zip(trace) {
        assert_eq!(ours, trace, "the snapshot has the first figure, the trace the second");
    }
    assert_eq!(ours.len(), trace.len());
}

fn a_snapshot_of_a_cnn_has_the_memory_of_its_trace(torch: &Torch) {
    agree(torch, "cnn", "");
}

fn a_snapshot_of_a_transformer_has_the_memory_of_its_trace(torch: &Torch) {
    agree(torch, "amp", "");
}

fn a_snapshot_of_expandable_segments_has_the_memory_of_its_trace(torch: &Torch) {
    agree(torch, "amp", "expandable_segments:True");
}

fn a_snapshot_of_an_oom_observer_has_the_memory_of_its_trace_and_a_verdict(torch: &Torch) {
    agree(torch, "oom", "");
    let (_run, file, _folder) = recorded(torch, "oom", "1000000", "");
    let text = String::from_utf8(memtrace(&["oom"], &file).stdout).unwrap();
    assert!(text.contains("verdict: too big. 2.00 GiB does not fit in addition to 78.00 GiB"), "{text}");
    // The page shows a script with other lines, whose OOM came at another time.
    let printed = pages::without_numbers(&text);
    for line in pages::first_block("docs/guide.md", "```text\n").lines().filter(|line| !line.starts_with(' '))
    {
        let line = pages::without_numbers(line.rsplit(" µs, ").next().unwrap());
        assert!(printed.contains(&line), "docs/guide.md has {line:?}; memtrace oom printed\n{text}");
    }
    assert!(text.contains("oom.py:18 fill\n"), "{text}");
}

/// Keeps only the last events in a snapshot, so that its history begins with memory that already exists. The
/// memory at its end must equal the memory of the trace.
fn a_snapshot_whose_history_begins_in_the_middle_ends_with_the_memory_of_its_trace(torch: &Torch) {
    for settings in ["", "expandable_segments:True"] {
        for entries in ["7", "300"] {
            let (run, file, _folder) = recorded(torch, "amp", entries, settings);
            let of = |place: &Path| {
                let summary = json(&["summary"], place);
                let figures = figures(&summary, &json(&["frag", "--at", "end"], place));
                let is_at_end = |key: &str| {
                    let of_peak = ["peak_", "frag peak_"].iter().any(|start| key.starts_with(start));
                    !of_peak && !["alloc", "segment_free", "oom"].contains(&key)
                };
                figures.into_iter().filter(|(key, _)| is_at_end(key)).collect::<Vec<_>>()
            };
            assert_same(&of(&file), &of(&run.dir()));
            let notes = json(&["summary"], &file)["notes"].to_string();
            assert!(notes.contains("were already allocated"), "{notes}");
            agrees_with_python(torch, &file);
            assert!(memtrace(&["check"], &file).status.success());
        }
    }
}

/// From a snapshot, lines, ops and phases must follow from the stacks, and steps from the annotations.
fn a_snapshot_has_the_lines_ops_phases_and_steps_of_its_stacks(torch: &Torch) {
    let (run, file, _folder) = recorded(torch, "amp", "1000000", "");
    let of = |place: &Path| {
        let summary = json(&["summary"], place);
        let process = &summary["processes"][0];
        let peak = &process["devices"][0]["peak_allocated"];
        [&process["steps"], &peak["phase"], &peak["step"], &peak["op"]].map(Value::clone)
    };
    assert_eq!(of(&file), of(&run.dir()));
    let lines = String::from_utf8(memtrace(&["peak", "--by", "line"], &file).stdout).unwrap();
    assert!(lines.contains("amp.py:"), "{lines}");
    let modules = String::from_utf8(memtrace(&["peak", "--by", "module"], &file).stdout).unwrap();
    assert!(modules.contains(" transformer.transformer@"), "{modules}");
    let categories = String::from_utf8(memtrace(&["peak", "--by", "category"], &file).stdout).unwrap();
    for category in ["parameter *", "activation *", "optimizer_state *", "workspace *"] {
        assert!(categories.contains(category), "{category}: {categories}");
    }
    // The bytes of these categories follow from the stacks and lives as they do from the tags of the trace.
    let of = |place: &Path, category: &str| {
        let summary = json(&["summary"], place);
        summary["processes"][0]["devices"][0]["at_peak_by_category_bytes"][category].clone()
    };
    for category in ["parameter", "optimizer_state"] {
        assert_eq!(of(&file, category), of(&run.dir(), category), "{category}");
    }
}

/// Compares the answers with a computation of the same figures in Python.
fn agrees_with_python(torch: &Torch, file: &Path) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/checkers/snapshots.py");
    let output = Command::new(&torch.python)
        .arg(script)
        .arg(env!("CARGO_BIN_EXE_memtrace"))
        .arg(file)
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(String::from_utf8_lossy(&output.stdout).ends_with("1 snapshots agree\n"));
}

/// The memory timeline of `torch.profiler` must have the peak that PyTorch counted and the allocations that
/// the trace of the same run has in that time.
fn a_memory_timeline_of_the_profiler_has_the_peak_of_pytorch(torch: &Torch) {
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("profile.json");
    let run = torch.trace_with("snapshots/profiler.py", &[file.to_str().unwrap()], &[]).expect_success();
    let printed = String::from_utf8(run.output.stdout.clone()).unwrap();
    let numbers: Vec<i64> = printed.split_whitespace().map(|number| number.parse().unwrap()).collect();
    let compressed = folder.path().join("profile.json.gz");
    let mut gzip =
        flate2::write::GzEncoder::new(fs::File::create(&compressed).unwrap(), flate2::Compression::fast());
    gzip.write_all(&fs::read(&file).unwrap()).unwrap();
    gzip.finish().unwrap();
    for file in [&file, &compressed] {
        let summary = json(&["summary"], file);
        let device = &summary["processes"][0]["devices"][0];
        assert_eq!(device["peak_allocated"]["bytes"], numbers[0], "{device}");
        assert_eq!(device["at_end_allocated_bytes"], numbers[1], "{device}");
        assert_eq!(summary["processes"][0]["steps"], 3, "{summary}");
        assert!(memtrace(&["check"], file).status.success());
        let modules = String::from_utf8(memtrace(&["peak", "--by", "module"], file).stdout).unwrap();
        assert!(modules.contains("Sequential_0.Linear_0"), "{modules}");
    }
}

/// `advise` must predict the same peak from a snapshot as from the trace, for each change that it tries.
fn advise_on_a_snapshot_predicts_what_it_predicts_from_the_trace(torch: &Torch) {
    let (run, file, _folder) = recorded(torch, "amp", "1000000", "");
    for change in
        ["--optimizer=8bit", "--optimizer=sgd", "--offload=optimizer", "--shard=8:optimizer", "--batch=x2"]
    {
        let of = |place: &Path| {
            let device = &json(&["advise", change], place)["devices"][0];
            [&device["before"]["bytes"], &device["after"]["bytes"]].map(Value::clone)
        };
        assert_eq!(of(&file), of(&run.dir()), "{change}");
    }
    let listed = json(&["advise"], &file);
    let changes = listed["devices"][0]["changes"].as_array().unwrap();
    let words: Vec<&str> = changes.iter().map(|change| change["change"].as_str().unwrap()).collect();
    assert!(words.contains(&"--optimizer 8bit"), "{words:?}");
    assert!(changes.iter().all(|change| change["sure"] != "high"), "{changes:?}");
    for change in [
        "--checkpoint=**",
        "--dtype=bf16",
        "--autocast=bf16",
        "--chunk-loss=8",
        "--optimizer=in-backward",
        "--shard=8",
    ] {
        let output = memtrace(&["advise", change], &file);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{change}: {said}");
        assert!(
            said.contains("a PyTorch snapshot, which has no calls of ops and modules and no types"),
            "{change}: {said}"
        );
    }
}

on_every_torch![
    a_memory_timeline_of_the_profiler_has_the_peak_of_pytorch: "the format of the profiler's trace",
    advise_on_a_snapshot_predicts_what_it_predicts_from_the_trace,
    a_snapshot_of_a_cnn_has_the_memory_of_its_trace,
    a_snapshot_of_a_transformer_has_the_memory_of_its_trace,
    a_snapshot_of_expandable_segments_has_the_memory_of_its_trace: "the format of snapshots",
    a_snapshot_of_an_oom_observer_has_the_memory_of_its_trace_and_a_verdict,
    a_snapshot_whose_history_begins_in_the_middle_ends_with_the_memory_of_its_trace,
    a_snapshot_has_the_lines_ops_phases_and_steps_of_its_stacks: "the format of snapshots and their stacks",
];

/// Exports a fixture as a snapshot.
fn exported(fixture: &str, place: &Path) {
    let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    let output =
        memtrace(&["export", "--to", "snapshot", "--max-events", "0", "-o", place.to_str().unwrap()], &trace);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_snapshot_that_memtrace_wrote_has_the_memory_of_its_trace() {
    let folder = TempDir::new().unwrap();
    for fixture in ["conv", "gpt", "leaks", "fragments", "oom-fragments"] {
        let file = folder.path().join(format!("{fixture}.pickle"));
        exported(fixture, &file);
        let trace = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
        let of = |place: &Path| {
            let summary = json(&["summary"], place);
            let device = &summary["processes"][0]["devices"][0];
            [
                &device["peak_allocated"]["bytes"],
                &device["at_end_allocated_bytes"],
                &device["at_end_reserved_bytes"],
            ]
            .map(Value::clone)
        };
        assert_eq!(of(&file), of(&trace), "{fixture}");
        assert!(memtrace(&["check"], &file).status.success(), "{fixture}");
    }
}

#[test]
fn a_folder_of_snapshots_has_a_rank_for_each_file() {
    let folder = TempDir::new().unwrap();
    for rank in 0..8 {
        exported("gpt", &folder.path().join(format!("snapshot_rank_{rank}.pickle")));
    }
    let ranks = json(&["ranks"], folder.path());
    let text = ranks.to_string();
    for rank in 0..8 {
        assert!(text.contains(&format!("\"rank\":{rank}")), "{text}");
    }
    let notes: Vec<&str> =
        ranks["notes"].as_array().unwrap().iter().map(|note| note.as_str().unwrap()).collect();
    let about = notes.iter().filter(|note| note.starts_with("PyTorch snapshot")).count();
    assert_eq!(about, 1, "{notes:?}");
}

#[test]
fn a_compressed_snapshot_has_the_answers_of_the_plain_one() {
    let folder = TempDir::new().unwrap();
    let plain = folder.path().join("rank3.pickle");
    exported("gpt", &plain);
    let bytes = fs::read(&plain).unwrap();
    let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&bytes).unwrap();
    let packed = [("gz", gzip.finish().unwrap()), ("zst", zstd::encode_all(&bytes[..], 1).unwrap())];
    let answers = |place: &Path| {
        [&["summary"][..], &["peak", "--by", "op"]].map(|report| {
            let mut answer = json(report, place);
            answer.as_object_mut().unwrap().remove("next");
            answer.to_string().replace(place.to_str().unwrap(), "FILE")
        })
    };
    let wanted = answers(&plain);
    for (ending, bytes) in packed {
        let file = folder.path().join(format!("rank3.pickle.{ending}"));
        fs::write(&file, &bytes).unwrap();
        assert_eq!(answers(&file), wanted, "{ending}");
        // A folder has the plain file once.
        let ranks = json(&["ranks"], folder.path());
        assert_eq!(ranks.to_string().matches("\"rank\":3").count(), 1, "{ranks}");
        fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
        let output = memtrace(&["summary"], &file);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{said}");
        // Half of a short zstd file has no complete block, so nothing shows that it is a snapshot.
        assert!(said.contains("it is cut off") || said.contains("incomplete frame"), "{said}");
        fs::remove_file(&file).unwrap();
    }
}

/// Each line must say what the file is and what to use in its place.
#[test]
fn a_file_of_another_program_is_refused_in_one_line() {
    let folder = TempDir::new().unwrap();
    let mut sqlite = b"SQLite format 3\0\x10\0\x01\x01\0@  ".to_vec();
    sqlite.resize(8192, 0);
    let files: [(&str, &[u8], &str); 6] = [
        ("nsys.sqlite", &sqlite, "an export of Nsight Systems"),
        ("report.nsys-rep", &[7; 4096], "a report of Nsight Systems"),
        ("saved.pt", b"PK\x03\x04\0\0\x08\x08", "torch.cuda.memory._dump_snapshot()"),
        ("viz.html", b"<!DOCTYPE html>\n<html>", "the pickle that it was made from"),
        ("snapshot.json", b"{\"segments\": [], \"device_traces\": []}", "memtrace reads the pickle"),
        ("old.pickle", b"(dp0\nVsegments\np1\n", "protocol 0 or 1"),
    ];
    for (name, bytes, wanted) in files {
        let file = folder.path().join(name);
        fs::write(&file, bytes).unwrap();
        for report in ["summary", "peak", "oom", "check", "report"] {
            let output = memtrace(&[report], &file);
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{name} {report}: {said}");
            assert!(said.contains(wanted), "{name} {report}: {said}");
        }
    }
}

#[test]
fn a_snapshot_that_is_cut_off_anywhere_is_refused() {
    let folder = TempDir::new().unwrap();
    let whole = folder.path().join("whole.pickle");
    exported("leaks", &whole);
    let bytes = fs::read(&whole).unwrap();
    let file = folder.path().join("cut.pickle");
    for length in (0..bytes.len()).step_by(1000).chain([1, 2, 3, 11, bytes.len() - 1]) {
        fs::write(&file, &bytes[..length]).unwrap();
        let output = memtrace(&["summary"], &file);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code().is_some_and(|code| code > 0 && code < 4), "{length}: {said}");
        assert_eq!(said.lines().count(), 1, "{length}: {said}");
    }
}
