//! Repeated layers: `GPT.h.*` in the tables of modules, and the classes of modules.

use std::fs;

use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::{EventName, Row};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::torch::{self, Torch, json, output, printed, scripts, succeeded, text};

/// Returns a trace of a model with `layers` blocks. Each is of class `class` and has 2 MiB of its own and 1
/// MiB in its `fc`; `head` has 4 MiB.
fn model(layers: usize, class: &str) -> Vec<u8> {
    let mut trace = TraceBuilder::default();
    let mut call = |path: &str, class: &str, bytes: i64| {
        let row = Row { phase: "forward", step: 0, ..Row::default() };
        let range = Row { api: "module", name: path, source: class, ..row };
        trace.raw(Row { event: EventName::RangeBegin, ..range });
        trace.alloc(bytes, Row { op: "aten::mm", module: path, ..row });
        trace.raw(Row { event: EventName::RangeEnd, ..range });
    };
    for layer in 0..layers {
        call(&format!("N.h.{layer}"), class, 2 << 20);
        call(&format!("N.h.{layer}.fc"), "Linear", 1 << 20);
    }
    call("N.head", "Linear", 4 << 20);
    trace.finish()
}

fn written(folder: &TempDir, name: &str, bytes: &[u8]) -> std::path::PathBuf {
    let path = folder.path().join(name);
    fs::write(&path, bytes).unwrap();
    path
}

fn keys(answer: &Value, list: &str) -> Vec<String> {
    answer[list].as_array().unwrap().iter().map(|each| each["key"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn layers_join_in_peak_and_modules_and_an_option_shows_each() {
    let folder = TempDir::new().unwrap();
    let path = written(&folder, "a.csv", &model(3, "Block"));
    let found = json(&["peak"], &path);
    assert_eq!(keys(&found, "groups"), ["N.h.*", "N.head", "N.h.*.fc"]);
    let first = &found["groups"][0];
    let mib = |name: &str| first[name].as_i64().unwrap() >> 20;
    assert_eq!((mib("bytes"), mib("total_bytes"), mib("largest_bytes")), (6, 9, 2));
    assert_eq!(first["modules"], 3);
    let said = printed(&["peak"], &path);
    assert!(said.contains("own") && said.contains("sorted by own"), "{said}");
    assert_eq!(keys(&json(&["peak", "--apart"], &path), "groups").len(), 7);
    assert_eq!(keys(&json(&["peak", "--depth", "2"], &path), "groups"), ["N.h", "N.head"]);

    let said = printed(&["modules"], &path);
    assert!(said.contains("N.h.*.fc") && !said.contains("N.h.1"), "{said}");
    let said = printed(&["modules", "--apart"], &path);
    assert!(said.contains("N.h.1.fc"), "{said}");
    // The table must say how many modules `--depth` leaves out.
    let said = printed(&["modules", "--depth", "2"], &path);
    assert!(said.contains("6 modules at deeper levels of their path left out"), "{said}");
    let said = printed(&["modules", "--full"], &path);
    assert!(said.contains("6 modules at deeper levels of their path left out"), "{said}");
}

#[test]
fn layers_of_unknown_or_different_classes_stay_apart_unless_they_are_many() {
    let folder = TempDir::new().unwrap();
    // In traces of older versions, the name of memtrace's library is in the column of the class.
    let old = written(&folder, "old.csv", &model(8, "libmemtrace.so"));
    assert_eq!(keys(&json(&["peak", "--depth=3"], &old), "groups").len(), 9);
    let many = written(&folder, "many.csv", &model(9, "libmemtrace.so"));
    assert_eq!(keys(&json(&["peak", "--depth=3"], &many), "groups"), ["N.h.*", "N.head"]);
    let said = printed(&["peak", "--by", "type"], &old);
    assert!(said.contains("(unknown type)") && said.contains("Linear"), "{said}");
}

#[test]
fn peak_each_layer_phase_and_step_has_its_own() {
    let folder = TempDir::new().unwrap();
    let mut trace = TraceBuilder::default();
    // Phase, step, module and MiB of each block, which is freed before the next one is allocated.
    for (phase, step, module, mib) in [
        ("forward", 0, "N.h.0", 4),
        ("backward", 0, "N.h.1.fc", 7),
        ("forward", 1, "N.h.1", 5),
        ("optimizer", 1, "(none)", 6),
    ] {
        let row = Row { phase, step, module, op: "aten::mm", ..Row::default() };
        let block = trace.alloc(mib << 20, row);
        trace.free(block, mib << 20, row);
    }
    let path = written(&folder, "a.csv", &trace.finish());
    let peaks = |each: &str| -> Vec<(String, i64)> {
        let found = json(&["peak", "--each", each], &path);
        let peaks = found["processes"][0]["peaks"].as_array().unwrap().clone();
        let one = |peak: &Value| {
            (peak["key"].as_str().unwrap().to_owned(), peak["peak"]["bytes"].as_i64().unwrap() >> 20)
        };
        peaks.iter().map(one).collect()
    };
    let of =
        |rows: &[(&str, i64)]| rows.iter().map(|(name, mib)| ((*name).to_owned(), *mib)).collect::<Vec<_>>();
    assert_eq!(peaks("phase"), of(&[("backward", 7), ("optimizer", 6), ("forward", 5)]));
    assert_eq!(peaks("step"), of(&[("0", 7), ("1", 6)]));
    let modules = peaks("module");
    assert_eq!(modules[..2], of(&[("N", 7), ("N.h", 7)])[..]);
    assert!(modules.contains(&("N.h.0".to_owned(), 4)) && modules.contains(&("N.h.1".to_owned(), 7)));
    let said = printed(&["peak", "--each", "phase", "--format", "csv"], &path);
    assert!(said.starts_with("phase,peak,at,step,op,module\nbackward,7340032,"), "{said}");
    let wrong = output(&["peak", "--each", "step", "--of", "used"], &path);
    assert_eq!(wrong.status.code(), Some(2));
}

#[test]
fn layers_of_two_runs_have_the_same_names_in_a_diff() {
    let folder = TempDir::new().unwrap();
    let before = written(&folder, "before.csv", &model(8, "libmemtrace.so"));
    let after = written(&folder, "after.csv", &model(9, "libmemtrace.so"));
    let output = torch::memtrace().args(["diff", "--json"]).arg(&before).arg(&after).output().unwrap();
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(keys(&found, "changes"), ["N.h.*", "N.h.*.fc", "N.head"], "{}", text(&output.stderr));
}

#[test]
fn layers_and_types_of_a_model_follow_from_its_classes() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let out = folder.path().join("out");
        let mut command = torch.traced_command(&out);
        let script = scripts().join("whatif/train.py");
        succeeded("train", &command.arg(script).args(["vit", "--steps=2"]).output().unwrap());
        let types = keys(&json(&["peak", "--by", "type"], &out), "groups");
        for class in ["Linear", "Dropout", "LayerNorm", "TransformerEncoderLayer", "ViT", "Conv2d"] {
            assert!(types.iter().any(|name| name == class), "{class}: {types:?}");
        }
        let modules = keys(&json(&["peak"], &out), "groups");
        assert!(modules.iter().any(|name| name == "ViT.blocks.*.linear1"), "{modules:?}");
        assert!(!modules.iter().any(|name| name.contains(".blocks.1")), "{modules:?}");
    });
}
