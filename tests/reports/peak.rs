//! `memtrace peak` and `memtrace ops`, also against MemTracker and MemoryTracker.

use super::*;

#[test]
fn peak_blocks_equal_those_computed_with_pandas() {
    for (name, expected) in expected().as_object().unwrap() {
        for by in ["module", "op", "phase", "category", "step"] {
            let peak = json_of("peak", name, &[("by", by), ("as-of", "")]);
            let found: BTreeMap<&str, i64> = peak["groups"]
                .as_array()
                .unwrap()
                .iter()
                .map(|group| {
                    let key = match group["key"].as_str().unwrap() {
                        "(no module)" | "(no op)" | "(no phase)" | "(no category)" => "(none)",
                        "before the first" => "-1",
                        key => key,
                    };
                    (key, group["bytes"].as_i64().unwrap())
                })
                .collect();
            let wanted: BTreeMap<&str, i64> = expected["live"][by]
                .as_object()
                .unwrap()
                .iter()
                .map(|(key, bytes)| (key.as_str(), bytes.as_i64().unwrap()))
                .collect();
            assert_eq!(found, wanted, "{name} by {by}");
        }
    }
}

#[test]
fn ops_equal_the_ops_of_memory_tracker() {
    for (name, expected) in expected().as_object().unwrap() {
        // Skips this fixture: its nested ops ran under a dispatch mode, and have their own test.
        if name == "memory-tracker" {
            continue;
        }
        let found = &json_of("ops", name, &[])["processes"][0];
        assert_eq!(found["op_calls"], expected["top_ops"]["op_calls"], "{name}");
        let top: Vec<Value> = found["top"]
            .as_array()
            .unwrap()
            .iter()
            .map(|op| json!([op["index"], op["op"], op["delta_bytes"]]))
            .collect();
        assert_eq!(Value::from(top), expected["top_ops"]["top"], "{name}");
    }
}

#[test]
fn peak_at_end_is_the_sum_of_the_deltas() {
    const TYPES: &[(&str, &[&str])] = &[
        ("Parameter", &["parameter"]),
        ("Activation", &["activation"]),
        ("Temp", &["temporary"]),
        ("Optstate", &["optimizer_state"]),
    ];
    for (name, expected) in expected().as_object().unwrap() {
        let found = json_of("peak --mem-tracker", name, &[("at", "end"), ("as-of", "")]);
        let found = found["devices"].as_array().unwrap().iter().find(|device| device["device"] == 0).unwrap();
        let at_end = expected["at_end"].as_object().unwrap();
        let sum = |keys: &[&str]| keys.iter().filter_map(|key| at_end.get(*key)?.as_i64()).sum::<i64>();
        for (ours, theirs) in TYPES {
            assert_eq!(found[ours], sum(theirs), "{name} {ours}");
        }
        let total: i64 = at_end.values().filter_map(Value::as_i64).sum();
        assert_eq!(found["Total"], total, "{name}");
        let by_owner = json_of("peak --at end", name, &[("at", "end"), ("by", "category"), ("as-of", "")]);
        assert_eq!(by_owner["allocated_bytes"], total, "{name}");
        let groups = by_owner["groups"].as_array().unwrap();
        for (category, bytes) in at_end {
            let group = groups.iter().find(|group| group["key"] == *category);
            assert_eq!(group.map(|group| &group["bytes"]), Some(bytes), "{name} {category}: {groups:?}");
        }
    }
}

#[test]
fn peak_infers_categories_of_plain_tensors_without_tags_and_without_a_forward_phase() {
    let answer = answer_on(plain_tensors(), "peak", &[("by", "category")]);
    let bytes = |key: &str| {
        let groups = answer.json["groups"].as_array().unwrap();
        groups.iter().find(|group| group["key"] == key).map_or(0, |group| group["bytes"].as_i64().unwrap())
    };
    assert_eq!(bytes("parameter"), 16 << 10);
    assert_eq!(bytes("gradient"), 16 << 10);
    // Activations include the loss, which is kept until the next iteration, and the workspace of the
    // forward's first product. The batch of the first step was there before its first activation, so it has
    // no category.
    assert_eq!(bytes("activation"), (7 << 10) + 512 + (8 << 10));
    assert_eq!(bytes("temporary"), 8 << 10);
    assert_eq!(bytes("(no category)"), 1 << 10);
    assert!(answer.text().contains("neither tags nor a forward phase"), "{}", answer.text());
}

#[test]
fn peak_names_memory_without_a_module_and_memory_without_any_owner_apart() {
    let text = answer_on(plain_tensors(), "peak", &[("by", "module")]).text();
    assert!(text.contains("(no module)"), "{text}");
    let footer = "0 events lost; without a module: 100.0 % of the peak; without any owner: 0.0 % of the peak, \
                  0.0 % of all bytes allocated";
    assert!(text.contains(footer), "{text}");
    let text = answer_on(plain_tensors(), "peak", &[("by", "op")]).text();
    assert!(text.contains("; without an op: 0.0 % of the peak; "), "{text}");
}

/// An OOM in a later step returns segments of this step. Their rows have the step in which they were
/// allocated, and must not count for the peak of that step.
#[test]
fn peak_of_a_step_leaves_out_frees_of_its_segments_in_later_steps() {
    const MIB: i64 = 1 << 20;
    let mut trace = TraceBuilder::default();
    let mut block_in_step = |step: i64, bytes: i64| {
        let row = Row { device: 0, op: "aten::mm", phase: "forward", step, ..Row::default() };
        let segment = Row { event: EventName::SegmentAlloc, api: "cudaMalloc", delta_bytes: bytes, ..row };
        trace.change(segment, [0, 0, bytes]);
        trace.alloc(bytes, row)
    };
    block_in_step(0, 100 * MIB);
    block_in_step(1, 700 * MIB);
    let row = Row { device: 0, event: EventName::SegmentFree, step: 0, ..Row::default() };
    trace.change(Row { api: "cudaFree", delta_bytes: -20 * MIB, ..row }, [0, 0, -20 * MIB]);
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    for (step, peak) in [("0", "100.00 MiB"), ("1", "800.00 MiB")] {
        let answer = memtrace().args(["peak", "--step", step]).arg(folder.path()).output().unwrap();
        let answer = String::from_utf8(answer.stdout).unwrap();
        assert!(answer.contains(&format!("peak of allocated memory {peak}")), "{answer}");
    }
}

/// Returns what one of PyTorch's own trackers printed when the fixture `name` was recorded.
fn tracker(name: &str) -> Value {
    let text = std::fs::read_to_string(fixtures().join(name).join("tracker.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// cuBLAS's workspaces, which torch allocates in C++ where `MemTracker` does not see them: 33 MiB in the
/// first forward and 32 MiB in the first backward, both kept.
const WORKSPACES: [(&str, i64); 2] = [("Activation", 34_603_008), ("Temp", 33_554_432)];

fn assert_mem_trackers(found: &Value, wanted: &Value, what: &str) {
    let bytes = |value: &Value, key: &str| value[key].as_i64().unwrap();
    for key in ["Parameter", "Buffer", "Gradient", "Activation", "Temp", "Optstate", "Other"] {
        let unseen = WORKSPACES.iter().find(|(name, _)| *name == key).map_or(0, |(_, bytes)| *bytes);
        assert_eq!(bytes(found, key) - unseen, bytes(wanted, key), "{what}: {key}");
    }
}

#[test]
fn peak_mem_tracker_and_modules_have_the_numbers_of_mem_tracker_in_the_same_process() {
    let wanted = tracker("mem-tracker");
    let on_gpu = |json: &Value| {
        json["devices"].as_array().unwrap().iter().find(|device| device["device"] == 0).unwrap().clone()
    };
    let peak = on_gpu(&json_of("peak --mem-tracker", "mem-tracker", &[("rounded", "")]));
    assert_mem_trackers(&peak, &wanted["peak"]["cuda:0"], "peak");
    let modules = json_of("modules", "mem-tracker", &[("rounded", ""), ("op-boundary", "")]);
    let modules = &modules["processes"][0]["modules"];
    let mut compared = 0;
    for (module, states) in wanted["modules"].as_object().unwrap() {
        let ours = modules.as_array().unwrap().iter().find(|ours| ours["module"] == module.as_str()).unwrap();
        for (state, calls) in states.as_object().unwrap() {
            let Some(found) = ours["states"][state].as_array() else {
                // Only states of the backward may be missing: under a dispatch mode, memtrace cannot link
                // backward ops to the modules of the forward.
                assert!(state.ends_with("Backward"), "{module} {state}");
                continue;
            };
            // Compares the last call, because the tracker recorded only the second step.
            let last = &found.last().unwrap()["cuda:0"];
            assert_mem_trackers(last, &calls[0]["cuda:0"], &format!("{module} {state}"));
            compared += 1;
        }
    }
    assert!(compared >= 12, "{compared}");
}

#[test]
fn ops_series_equals_memory_trackers_in_the_same_process() {
    let wanted = tracker("memory-tracker");
    let found = &json_of("ops", "memory-tracker", &[("series", "")])["processes"][0];
    let allocated: Vec<f64> = found["series"]["allocated_bytes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|bytes| bytes.as_f64().unwrap() / 1_048_576.0)
        .collect();
    let theirs: Vec<f64> = (0..wanted["allocated"].as_object().unwrap().len())
        .map(|index| wanted["allocated"][index.to_string()][1].as_f64().unwrap())
        .collect();
    assert_eq!(allocated, theirs);
    for marker in ["fw_start", "fw_bw_boundary"] {
        // Compares the last value of each marker, because the tracker keeps only that one.
        assert_eq!(found["series"][marker].as_array().unwrap().last(), Some(&wanted["markers"][marker]));
    }
    assert_eq!(found["num_alloc_retries"], wanted["retries"]);
    // The tracker calls an op `mm.default_3`, and memtrace `aten::mm_3`. The number counts the earlier calls
    // of the same name.
    for op in found["top"].as_array().unwrap() {
        let index = op["index"].as_u64().unwrap();
        let name = wanted["allocated"][index.to_string()][0].as_str().unwrap();
        let (theirs, number) = name.rsplit_once('_').unwrap();
        let ours = op["name"].as_str().unwrap();
        assert!(ours.ends_with(&format!("_{number}")), "{ours} for {name}");
        let op = op["op"].as_str().unwrap().rsplit("::").next().unwrap().to_owned();
        assert!(theirs.contains(&format!("forward.{op}.")), "{ours} for {name}");
    }
}
