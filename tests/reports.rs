//! Compares each report on real traces with numbers that pandas computed
//! (`tests/scripts/fixtures/expected.py`), and with what the recorded scripts are known to do.
//!
//! `tests/fixtures/record` made the traces. `tests/fixtures/expected.json` is the output of the pandas
//! script; one test runs it again if a torch environment with pandas is installed.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports::{self, Answer, Verdict};
use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Category, EventName, Row};
use serde_json::{Value, json};

use crate::common::torch::{Torch, memtrace, scripts, succeeded};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

fn expected() -> Value {
    let text = std::fs::read_to_string(fixtures().join("expected.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// Returns the names of the recorded traces.
fn names() -> Vec<String> {
    expected().as_object().unwrap().keys().cloned().collect()
}

fn options(values: &[(&'static str, &str)]) -> Options {
    Options {
        top: Some(20),
        values: values.iter().map(|(name, value)| (*name, (*value).to_owned())).collect(),
        ..Options::default()
    }
}

fn answer(report: &str, traces: &[&str], options: &Options) -> Answer {
    let inputs: Vec<Input> = traces.iter().map(|name| Input::open(&fixtures().join(name)).unwrap()).collect();
    let report = reports::find(report).unwrap();
    let mut options = options.clone();
    for flag in report.flags() {
        if flag.value.is_some() && !flag.default.is_empty() {
            options.values.entry(flag.name).or_insert_with(|| flag.default.to_owned());
        }
    }
    report.run(&inputs, &options).unwrap()
}

/// Returns the JSON of the answer for rank 0.
fn json_of(report: &str, trace: &str, values: &[(&'static str, &str)]) -> Value {
    let rank0 = |mut input: Input| {
        input.only_rank(0);
        input
    };
    let input = rank0(Input::open(&fixtures().join(trace)).unwrap());
    let report = reports::find(report).unwrap();
    let mut options = options(values);
    for flag in report.flags() {
        if flag.value.is_some() && !flag.default.is_empty() {
            options.values.entry(flag.name).or_insert_with(|| flag.default.to_owned());
        }
    }
    report.run(&[input], &options).unwrap().json
}

#[test]
fn check_passes_on_every_fixture() {
    for name in names() {
        let answer = answer("check", &[&name], &options(&[]));
        assert_eq!(answer.verdict, Verdict::Fine, "{name}: {}", answer.text());
    }
}

#[test]
fn every_report_answers_on_every_fixture_and_suggests_a_command_that_exists() {
    for name in names() {
        for report in reports::with_views() {
            let traces = vec![name.as_str(); report.inputs().len()];
            if report.name() == "budget" {
                continue;
            }
            let asked = if report.name() == "advise --batch x2" {
                vec![("without", "op=aten::mm")]
            } else {
                Vec::new()
            };
            let answer = answer(report.name(), &traces, &options(&asked));
            if answer.is_list {
                continue;
            }
            let text = answer.text();
            assert!(!answer.next.is_empty(), "{}", report.name());
            for next in &answer.next {
                let command = next.split(' ').nth(1).unwrap();
                // `memtrace report`, which writes the page, is a command and not in the list of reports.
                let known = command == "report" || reports::find(command).is_some();
                assert!(known, "{}: {next}", report.name());
            }
            assert!(text.contains("events lost"), "{text}");
            // All fixtures were recorded on a simulated GPU, and every report names it.
            assert!(text.contains("note: simulated GPU "), "{}: {text}", report.name());
            assert!(answer.to_json(report.name())["phantom"]["cards"].is_array(), "{}", report.name());
            let lines = text.lines().filter(|line| !line.starts_with("note: ")).count();
            // At most one screen for each process, notes aside.
            let processes = Input::open(&fixtures().join(&name)).unwrap().traces.len();
            assert!(lines <= 50 * processes, "{} on {name} has {lines} lines:\n{text}", report.name());
        }
    }
}

#[test]
fn summary_peaks_equal_the_maxima_of_the_columns() {
    for (name, expected) in expected().as_object().unwrap() {
        let summary = json_of("summary", name, &[]);
        let process = &summary["processes"][0];
        let device = &process["devices"][0];
        assert_eq!(process["rows"], expected["rows"], "{name}");
        for key in ["bytes", "seq", "step", "op", "phase"] {
            assert_eq!(device["peak_allocated"][key], expected["peak_allocated"][key], "{name} {key}");
        }
        assert_eq!(device["peak_reserved"]["bytes"], expected["peak_reserved"], "{name}");
        assert_eq!(device["peak_used"]["bytes"], expected["peak_used"], "{name}");
    }
}

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

/// Writes a trace in which every third block has no owner. Returns the bytes of those blocks and of all
/// blocks, at the peak and over the whole trace.
fn without_some_owners(from: &Path, to: &Path) -> [(i64, i64); 2] {
    let file = std::fs::File::open(from).unwrap();
    let mut reader = csv::Reader::from_reader(flate2::read::MultiGzDecoder::new(file));
    let columns = reader.headers().unwrap().clone();
    let mut writer = csv::Writer::from_path(to).unwrap();
    writer.write_record(&columns).unwrap();
    let at = |name: &str| columns.iter().position(|column| column == name).unwrap();
    let number = |row: &csv::StringRecord, name: &str| row[at(name)].parse::<i64>().unwrap();
    let mut live: BTreeMap<i64, i64> = BTreeMap::new();
    let (mut peak, mut shares, mut ever) = (-1, (0, 0), (0, 0));
    for row in reader.records().map(Result::unwrap) {
        let (block, delta) = (number(&row, "alloc_id"), number(&row, "delta_bytes"));
        let is_unowned = block % 3 == 0 && ["alloc", "free", "tag"].contains(&&row[at("event")]);
        let written = row.iter().enumerate().map(|(index, text)| {
            let owns = ["op", "module", "phase", "category"].iter().any(|name| index == at(name));
            if is_unowned && owns { "(none)" } else { text }
        });
        writer.write_record(written).unwrap();
        match &row[at("event")] {
            "alloc" => {
                live.insert(block, delta);
                ever = (ever.0 + if is_unowned { delta } else { 0 }, ever.1 + delta);
            }
            "free" => drop(live.remove(&block)),
            _ => {}
        }
        if number(&row, "device") == 0 && number(&row, "allocated_bytes") > peak {
            peak = number(&row, "allocated_bytes");
            let unowned = live.iter().filter(|(block, _)| *block % 3 == 0).map(|(_, bytes)| bytes).sum();
            shares = (unowned, live.values().sum());
        }
    }
    [shares, ever]
}

#[test]
fn footer_share_of_unattributed_bytes_equals_that_computed_with_pandas() {
    for (name, expected) in expected().as_object().unwrap() {
        let mut input = Input::open(&fixtures().join(name)).unwrap();
        input.only_rank(0);
        let options = options(&[]);
        for report in ["summary", "summary --stats", "check"] {
            let found = reports::find(report).unwrap().run(std::slice::from_ref(&input), &options).unwrap();
            let (nobody, all) = found.footer.unattributed_ever;
            assert_eq!(json!([nobody, all]), expected["ever"], "{report} on {name}");
        }
    }
}

#[test]
fn footer_has_the_unattributed_shares() {
    let folder = tempfile::TempDir::new().unwrap();
    for name in ["gpt", "conv", "sharded"] {
        let from = fixtures().join(name).join("host.r0.1.csv.gz");
        let to = folder.path().join(format!("{name}.csv"));
        let shares = without_some_owners(&from, &to);
        let percent = shares.map(|(unowned, all)| {
            assert!(unowned > 0 && unowned < all, "{name}: {unowned} of {all}");
            format!("{:.1} %", 100.0 * unowned as f64 / all as f64)
        });
        assert_ne!(percent[0], percent[1], "{name}");
        for report in ["summary", "peak"] {
            let report = reports::find(report).unwrap();
            let found = report.run(&[Input::open(&to).unwrap()], &options(&[("by", "module")])).unwrap();
            let footer = &found.footer;
            assert_eq!([footer.unattributed, footer.unattributed_ever], shares, "{name}");
            let line = format!(
                "without any owner: {} of the peak, {} of all bytes allocated",
                percent[0], percent[1]
            );
            assert!(found.text().contains(&line), "{name}: {line}: {}", found.text());
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
fn leaks_names_three_mib_per_step_with_op_and_module() {
    for (name, expected) in expected().as_object().unwrap() {
        let found = &json_of("leaks", name, &[])["processes"][0]["leaks"];
        let wanted = expected["leaks"].as_array().unwrap();
        assert_eq!(found.as_array().unwrap().len(), wanted.len(), "{name}");
        for (found, wanted) in found.as_array().unwrap().iter().zip(wanted) {
            assert_eq!((&found["op"], &found["module"]), (&wanted["op"], &wanted["module"]));
            assert_eq!(found["bytes"], wanted["bytes"]);
            let slope = |value: &Value| value.as_f64().unwrap();
            assert!((slope(&found["bytes_per_step"]) / slope(&wanted["slope"]) - 1.0).abs() < 1e-9);
        }
    }
    let leak = &json_of("leaks", "leaks", &[])["processes"][0]["leaks"][0];
    assert_eq!((&leak["module"], &leak["op"]), (&json!("Encoder.cache"), &json!("aten::empty")));
    let slope = leak["bytes_per_step"].as_f64().unwrap();
    assert!((slope / f64::from(3 << 20) - 1.0).abs() < 0.01, "{slope}");
}

#[test]
fn frag_holes_and_pins_follow_from_the_addresses() {
    for (name, expected) in expected().as_object().unwrap() {
        let found = &json_of("frag", name, &[])["devices"][0];
        let expected = &expected["frag"];
        for (ours, theirs) in [
            ("reserved_bytes", "reserved"),
            ("allocated_bytes", "allocated"),
            ("requested_bytes", "requested"),
            ("hole_bytes", "holes"),
            ("empty_segment_bytes", "empty"),
            ("largest_free_bytes", "largest"),
        ] {
            assert_eq!(found[ours], expected[theirs], "{name} {ours}");
        }
        let pinned: Vec<Value> = found["pinned_segments"]
            .as_array()
            .unwrap()
            .iter()
            .map(|segment| segment["free_bytes"].clone())
            .collect();
        assert_eq!(Value::from(pinned), expected["pinned"], "{name}");
    }
    let segments = json_of("frag", "fragments", &[])["devices"][0]["pinned_segments"].clone();
    let segments = segments.as_array().unwrap();
    assert_eq!(segments.len(), 8);
    for segment in segments {
        assert_eq!(segment["blocks"][0]["module"], "Pins.small");
        assert_eq!(segment["blocks"][0]["bytes"], 2 << 20);
    }
}

#[test]
fn oom_has_a_verdict_for_each_cause() {
    for (kind, verdict) in [
        ("oom-big", "too big"),
        ("oom-fragments", "fragmentation"),
        ("oom-outside", "outside torch"),
        ("oom-limit", "a limit"),
    ] {
        let found = &json_of("oom", kind, &[])["ooms"][0];
        assert_eq!(found["verdict"], verdict, "{kind}");
        assert_eq!((&found["module"], &found["step"]), (&json!("Net.wide"), &json!(3)));
        let expected = &expected()[kind]["oom"];
        for (ours, theirs) in [
            ("rounded_bytes", "rounded"),
            ("allocated_bytes", "allocated"),
            ("reserved_bytes", "reserved"),
            ("largest_hole_bytes", "largest"),
            ("holes", "pieces"),
            ("outside_bytes", "outside"),
        ] {
            assert_eq!(found[ours], expected[theirs], "{kind} {ours}");
        }
        // The traces of the fixtures lack the free memory of the device, so the report must have null, not 0.
        assert_eq!(found["device_free_bytes"], Value::Null, "{kind}");
        let text = answer("oom", &[kind], &options(&[])).text();
        assert!(text.contains("unknown  free on the device: at most "), "{text}");
    }
    assert_eq!(json_of("oom", "gpt", &[])["ooms"], json!([]));
}

#[test]
fn oom_subtracts_memory_of_other_processes_from_the_free_memory() {
    const MIB: i64 = 1 << 20;
    let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 1000 * MIB }];
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
    trace.segment(500 * MIB);
    // The samples: other processes hold 200 MiB of the first device; the second device is full, but nothing
    // says by which process.
    for (device, device_free_bytes) in [(0, 300 * MIB), (1, 0)] {
        let row = Row { event: EventName::Sample, device, device_free_bytes, ..Row::default() };
        trace.change(row, [0; 3]);
    }
    trace.segment(100 * MIB);
    let asked = 450 * MIB;
    let oom = Row {
        event: EventName::Oom,
        device: 0,
        requested_bytes: asked,
        rounded_bytes: asked,
        ..Row::default()
    };
    trace.change(oom, [0; 3]);
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    let input = Input::open(folder.path()).unwrap();
    let report = reports::find("oom").unwrap();
    let found = &report.run(&[input], &options(&[])).unwrap().json["ooms"][0].clone();
    assert_eq!(found["device_free_bytes"], 200 * MIB);
    assert_eq!(found["unaccounted_bytes"], 200 * MIB);
    assert_eq!(found["reserved_bytes"], 600 * MIB);
}

#[test]
fn oom_has_the_host_memory_that_a_sample_after_it_shows_on_a_shared_memory() {
    const MIB: i64 = 1 << 20;
    let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 1000 * MIB }];
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
    trace.segment(500 * MIB);
    let asked = 250 * MIB;
    let oom = Row {
        event: EventName::Oom,
        device: 0,
        requested_bytes: asked,
        rounded_bytes: asked,
        ..Row::default()
    };
    // The program's memory on the host grows from 100 to 180 MiB before the request. The second sample is
    // taken after it.
    for (free, host) in [(300, 100), (220, 180)] {
        let [free, host] = [free, host].map(|mib| mib * MIB);
        let name = format!("total={} free={free} others={} cache=0 host={host}", 1000 * MIB, 100 * MIB);
        let row = Row {
            event: EventName::Sample,
            device: 0,
            device_free_bytes: free,
            name: &name,
            ..Row::default()
        };
        trace.change(row, [0; 3]);
        if host == 100 * MIB {
            trace.change(oom, [0; 3]);
        }
    }
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    let input = Input::open(folder.path()).unwrap();
    let report = reports::find("oom").unwrap();
    let found = &report.run(&[input], &options(&[])).unwrap().json["ooms"][0].clone();
    let [free, host, others] = ["device_free_bytes", "host_bytes", "others_bytes"].map(|key| &found[key]);
    assert_eq!((free, host, others), (&json!(220 * MIB), &json!(180 * MIB), &json!(100 * MIB)), "{found:#}");
}

/// A block is `temporary` when it is allocated and tagged as optimizer state after the OOM. The report must
/// show it as optimizer state.
#[test]
fn oom_has_the_categories_that_later_rows_give_the_blocks() {
    const MIB: i64 = 1 << 20;
    let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
    let mut trace = TraceBuilder::new(Meta { devices, ..Meta::default() });
    trace.segment(20 * MIB);
    let row = Row { module: "(script)", phase: "optimizer", op: "aten::zeros", step: 0, ..Row::default() };
    let temporary = Row { category: Category::Temporary, ..row };
    let state = trace.alloc(8 * MIB, temporary);
    trace.alloc(4 * MIB, temporary);
    trace.change(
        Row { event: EventName::Oom, device: 0, requested_bytes: 90 * MIB, rounded_bytes: 90 * MIB, ..row },
        [0; 3],
    );
    trace.tag(state, 8 * MIB, temporary, Row { category: Category::OptimizerState, ..row });
    let trace = trace.finish();
    let text = answer_on(trace.clone(), "oom", &[]).text();
    assert!(text.contains("8.00 MiB  66.7 %") && text.contains("optimizer_state"), "{text}");
    let summary = answer_on(trace, "summary", &[]).text();
    let of = |text: &str| {
        text.lines().find(|line| line.contains("optimizer_state")).map(|line| line.contains("8.00 MiB"))
    };
    assert_eq!((of(&text), of(&summary)), (Some(true), Some(true)), "{summary}");
}

/// If vLLM finds no room for its KV cache in its share of the card, no request fails. The report must
/// recognize this from the mark that records the share.
#[test]
fn oom_explains_a_server_that_found_no_room_in_its_part_of_the_card() {
    const MIB: i64 = 1 << 20;
    let asked = |mark: &str, free: i64| {
        let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 8000 * MIB }];
        let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
        let sample =
            Row { event: EventName::Sample, device: 0, device_free_bytes: free * MIB, ..Row::default() };
        trace.change(sample, [0; 3]);
        trace.segment(1600 * MIB);
        trace.alloc(1500 * MIB, Row { category: Category::Parameter, ..Row::default() });
        trace.change(Row { event: EventName::Mark, api: "script", name: mark, ..Row::default() }, [0; 3]);
        answer_on(trace.finish(), "oom", &[])
    };
    let small = asked("vllm: gpu_memory_utilization=0.15 blocks=0 ended", 7800);
    let found = &small.json["refused"][0];
    assert_eq!((&found["verdict"], &found["needed_bytes"]), (&json!("a limit"), &json!(1500 * MIB)));
    let text = small.text();
    for part in [
        "verdict: a limit: 300.00 MiB missing. vLLM's gpu_memory_utilization=0.15 is 1.17 GiB of 7.81 GiB; weights",
        "  try: gpu_memory_utilization above 0.19, at most 0.97 here: each 0.01 more is 80.00 MiB of KV cache",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Marks of a server that is still running, or that has a cache: the report must not find a problem.
    for mark in [
        "vllm: gpu_memory_utilization=0.5 blocks=0",
        "vllm: gpu_memory_utilization=0.15 blocks=7 ended",
        "kv_cache: blocks=7 tokens=112",
    ] {
        let fine = asked(mark, 7800);
        assert_eq!((fine.json["refused"].as_array().unwrap().len(), mark), (0, mark));
        assert!(fine.text().contains("No request ran out of memory."), "{}", fine.text());
    }
    let large = asked("vllm: gpu_memory_utilization=0.9 blocks=0 ended", 5000).text();
    assert!(large.contains("  try: gpu_memory_utilization=0.62 or less"), "{large}");
}

#[test]
fn oom_of_a_process_says_nothing_of_a_killed_child() {
    const MIB: i64 = 1 << 20;
    let answer = |has_oom: bool| {
        let mut trace = host_trace(true);
        if has_oom {
            trace.segment(100 * MIB);
            let (requested_bytes, rounded_bytes) = (450 * MIB, 450 * MIB);
            let oom =
                Row { event: EventName::Oom, device: 0, requested_bytes, rounded_bytes, ..Row::default() };
            trace.change(oom, [0; 3]);
        }
        let name = format!("current={} limit={} file=0 swap=0 kills=2", 300 * MIB, 320 * MIB);
        let (event, ts_ns) = (EventName::Sample, 9_500_000_000);
        trace.raw(Row { event, api: "cgroup", device: -1, step: -1, ts_ns, name: &name, ..Row::default() });
        let name = format!("rss={} anon={} file=0 shmem=0 swap=0", 280 * MIB, 240 * MIB);
        trace.raw(Row {
            event,
            api: "proc_status",
            device: -1,
            step: -1,
            ts_ns,
            name: &name,
            ..Row::default()
        });
        answer_on(trace.finish(), "oom", &[])
    };
    let (with, without) = (answer(true), answer(false));
    assert_eq!(without.json["killed"].as_array().unwrap().len(), 1, "{:#}", without.json);
    assert!(without.text().contains("the kernel killed"), "{}", without.text());
    assert_eq!(with.json["killed"].as_array().unwrap().len(), 1);
    assert!(
        with.text().contains("verdict: ") && !with.text().contains("the kernel killed"),
        "{}",
        with.text()
    );
}

#[test]
fn summary_stats_counts_and_quantiles_follow_from_the_rows() {
    for (name, expected) in expected().as_object().unwrap() {
        let found = &json_of("summary --stats", name, &[])["processes"][0];
        let expected = &expected["stats"];
        assert_eq!(found["block_bytes"]["count"], expected["blocks"], "{name}");
        assert_eq!(found["allocated_bytes"], expected["bytes"], "{name}");
        assert_eq!(found["rounding_bytes"], expected["rounding"], "{name}");
        assert_eq!(found["lifetime_ns"]["count"], expected["lifetimes"], "{name}");
        assert_eq!(
            json!([found["temporary_blocks"], found["temporary_bytes"]]),
            expected["temporaries"],
            "{name}"
        );
        assert_eq!(found["block_bytes"]["quantile_error"], 0.0, "{name}");
        assert_eq!(found["block_bytes"]["p50"], expected["block_p50"], "{name}");
        assert_eq!(found["block_bytes"]["max"], expected["block_max"], "{name}");
        assert_eq!(found["lifetime_ns"]["p50"], expected["lifetime_p50"], "{name}");
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
fn ranks_finds_the_rank_with_the_larger_batch() {
    let found = answer("ranks", &["sharded"], &options(&[])).json;
    let expected = &expected()["sharded"]["ranks"];
    let peaks: Vec<Value> =
        found["ranks"].as_array().unwrap().iter().map(|rank| rank["peak_allocated_bytes"].clone()).collect();
    assert_eq!(Value::from(peaks), expected["peaks"]);
    assert_eq!(found["first_difference"]["ranks"], expected["ranks"]);
    let at = |key: &str| {
        found["first_difference"][key].as_str().unwrap().replace(&format!("(no {key})"), "(none)")
    };
    assert_eq!(json!([at("phase"), at("module")]), expected["at"]);
}

#[test]
fn ranks_and_ledger_name_the_processes_that_fill_another_ranks_gpu() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    // Rank 1 works on GPU 1; with `foreign`, it has also loaded a checkpoint to GPU 0.
    let run = |foreign: bool, extra: i64| {
        let trace = |rank: i32| {
            let device =
                |ordinal| memtrace_trace::meta::Device { ordinal, total_bytes: TOTAL, ..Default::default() };
            let mut trace = TraceBuilder::new(Meta {
                rank,
                world_size: 2,
                host: "host".to_owned(),
                devices: vec![device(0), device(1)],
                ..Meta::default()
            });
            let used: [&[(i32, i64)]; 2] = [&[(0, 300)], &[(0, 100), (1, 300)]];
            for (device, mib) in used[rank as usize] {
                if rank == 1 && *device == 0 && !foreign {
                    continue;
                }
                let row = Row { device: *device, op: "aten::copy_", phase: "init", ..Row::default() };
                let segment =
                    Row { event: EventName::SegmentAlloc, api: "cudaMalloc", delta_bytes: mib * MIB, ..row };
                trace.change(segment, [0, 0, mib * MIB]);
                trace.alloc(mib * MIB, row);
                let others = if *device == 0 && foreign { 600 - mib } else { extra } * MIB;
                let own = (mib + 100) * MIB;
                let name =
                    format!("total={TOTAL} free={} process={own} others={others}", TOTAL - own - others);
                trace.raw(Row {
                    event: EventName::Sample,
                    api: "nvml",
                    name: &name,
                    device: *device,
                    ..Row::default()
                });
            }
            trace.finish()
        };
        [trace(0), trace(1)]
    };
    let answer = answer_on_ranks(&run(true, 0), "ranks", &[]);
    let shared = answer.json["shared_devices"].as_array().unwrap();
    let found: Vec<_> =
        shared.iter().map(|user| (&user["rank"], &user["works_here"], &user["bytes"])).collect();
    let (own, other) = (json!(400 * MIB), json!(200 * MIB));
    assert_eq!(found, [(&json!(0), &json!(true), &own), (&json!(1), &json!(false), &other)]);
    assert_eq!(
        (&shared[1]["context_bytes"], &shared[1]["first_op"]),
        (&json!(100 * MIB), &json!("aten::copy_"))
    );
    let text = answer.text();
    assert!(text.contains("200.00 MiB on GPUs that their processes do not work on"), "{text}");
    assert!(text.contains("map_location"), "{text}");
    let ledger = answer_on_ranks(&run(true, 0), "ledger", &[]).text();
    assert!(
        ledger.contains("other processes: rank 1 of this run (pid 2), 200.00 MiB by aten::copy_"),
        "{ledger}"
    );
    // Rank 0 sees 300 MiB in other processes, and rank 1 has 200 MiB of it. The remaining 100 MiB are not
    // reported, because they are less than a context.
    assert_eq!(answer.json["unnamed_others"], json!([]), "less than a context");
    let alone = answer_on_ranks(&run(false, 0), "ranks", &[]);
    assert_eq!(alone.json["shared_devices"], json!([]));
    assert!(!alone.text().contains("do not work"), "{}", alone.text());
    let contexts = answer_on_ranks(&run(false, 600), "ranks", &[]);
    assert_eq!(
        contexts.json["unnamed_others"][0],
        json!({ "host": "host", "device": 0, "bytes": 600 * MIB })
    );
}

#[test]
fn ledger_oom_and_ranks_name_processes_without_a_trace_by_user_and_command() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    let run = |marks: &[&str]| {
        let device = memtrace_trace::meta::Device { ordinal: 0, total_bytes: TOTAL, ..Default::default() };
        let mut trace =
            TraceBuilder::new(Meta { host: "host".to_owned(), devices: vec![device], ..Meta::default() });
        for name in marks {
            trace.raw(Row { event: EventName::Mark, api: "gpu_process", name, device: -1, ..Row::default() });
        }
        let segment = Row {
            event: EventName::SegmentAlloc,
            api: "cudaMalloc",
            delta_bytes: MIB,
            device: 0,
            ..Row::default()
        };
        trace.change(segment, [0, 0, MIB]);
        trace.alloc(MIB, Row { op: "aten::empty", device: 0, ..Row::default() });
        let others = 7000 * MIB;
        let free = TOTAL - others - 501 * MIB;
        let name = format!("total={TOTAL} free={free} process={} others={others}", 501 * MIB);
        let sample = Row { event: EventName::Sample, api: "nvml", name: &name, device: 0, ..Row::default() };
        trace.raw(Row { device_free_bytes: free, ..sample });
        let oom = Row { event: EventName::Oom, rounded_bytes: 2000 * MIB, device: 0, ..Row::default() };
        trace.change(oom, [0; 3]);
        trace.finish()
    };
    let known =
        format!("device=0 pid=4711 bytes={} user=alice container=0123456789ab command=serve.py", 4000 * MIB);
    let hidden = format!("device=0 pid=12 bytes={}", 2000 * MIB);
    // Process 9 has left the GPU, process 10 is on another one, and process 1 is this program.
    let (gone, left) = ("device=0 pid=9 bytes=77 command=old.py", "device=0 pid=9 bytes=0 command=old.py");
    let (elsewhere, own) =
        ("device=1 pid=10 bytes=5 command=far.py", "device=0 pid=1 bytes=5 command=self.py");
    let run = run(&[&known, gone, left, elsewhere, own, "device=x pid=3 bytes=4", &hidden]);
    let alice = "process 4711 (user alice, serve.py, container 0123456789ab), 3.91 GiB";
    let nobody = "process 12 (user and command unknown: /proc does not show it here), 1.95 GiB";
    let rest = "1000.00 MiB of processes without a trace in this run";
    let wanted = format!("{alice}; {nobody}; {rest}");
    let ledger = answer_on_ranks(std::slice::from_ref(&run), "ledger", &[("at", "end")]).text();
    assert!(ledger.contains(&format!("other processes: {wanted}")), "{ledger}");
    assert!(ledger.contains("end them if they are yours"), "{ledger}");
    let oom = answer_on_ranks(std::slice::from_ref(&run), "oom", &[]).text();
    assert!(oom.contains(&wanted) && oom.contains("end them if they are yours"), "{oom}");
    let ranks = answer_on_ranks(&[run], "ranks", &[]);
    assert!(ranks.text().contains(&format!("GPU 0 of host: {alice} at most")), "{}", ranks.text());
    assert!(!ranks.text().contains("self.py"), "{}", ranks.text());
    let pids: Vec<_> =
        ranks.json["other_processes"].as_array().unwrap().iter().map(|it| it["pid"].as_i64()).collect();
    assert_eq!(pids, [Some(9), Some(12), Some(4711), Some(10)]);
    let [_, hidden, alice, _] = &ranks.json["other_processes"].as_array().unwrap()[..] else { panic!() };
    assert_eq!((&hidden["user"], &alice["user"]), (&Value::Null, &json!("alice")));
    assert_eq!((&alice["bytes"], &alice["command"]), (&json!(4000 * MIB), &json!("serve.py")));
}

#[test]
fn ranks_says_how_many_processes_without_a_trace_it_leaves_out() {
    let mut trace = TraceBuilder::default();
    for pid in 100..124 {
        let name = format!("device=0 pid={pid} bytes=4096 command=serve.py");
        let row = Row { event: EventName::Mark, api: "gpu_process", device: -1, ..Row::default() };
        trace.raw(Row { name: &name, ..row });
    }
    trace.alloc(4096, Row { op: "aten::empty", device: 0, ..Row::default() });
    // The options of these tests have `--top 20`.
    let text = answer_on_ranks(&[trace.finish()], "ranks", &[]).text();
    assert_eq!(text.matches("has no trace in this run").count(), 20, "{text}");
    assert!(text.contains("4 more without a trace in this run; --top N lists them"), "{text}");
}

#[test]
fn ranks_shows_gpus_that_differ_and_names_what_the_fullest_rank_holds() {
    const MIB: i64 = 1 << 20;
    let run = |gathered: i64| {
        let trace = |rank: i32| {
            let device = |ordinal| memtrace_trace::meta::Device {
                ordinal,
                total_bytes: 8000 * MIB,
                ..Default::default()
            };
            let devices = vec![device(0), device(1)];
            let mut trace = TraceBuilder::new(Meta {
                rank,
                world_size: 2,
                host: "host".to_owned(),
                devices,
                ..Meta::default()
            });
            let row =
                Row { device: rank, op: "aten::mm", module: "Net.layer", phase: "forward", ..Row::default() };
            let nccl = Row { event: EventName::ExtAlloc, api: "cudaMalloc", source: "libnccl.so.2", ..row };
            trace.raw(Row { delta_bytes: 50 * MIB, alloc_id: 1, addr: 1 << 40, ..nccl });
            let segment = |mib: i64| Row {
                event: EventName::SegmentAlloc,
                api: "cudaMalloc",
                delta_bytes: mib * MIB,
                ..row
            };
            trace.change(segment(1000), [0, 0, 1000 * MIB]);
            trace.alloc(900 * MIB, row);
            if rank == 0 && gathered > 0 {
                trace.change(segment(gathered), [0, 0, gathered * MIB]);
                let gather = Row { op: "aten::cat", module: "(script)", phase: "save", ..row };
                trace.alloc(gathered * MIB, gather);
            }
            trace.finish()
        };
        [trace(0), trace(1)]
    };
    let answer = answer_on_ranks(&run(300), "ranks", &[]);
    let text = answer.text();
    for wanted in [
        "rank 0 has 300.00 MiB more than rank 1",
        "300.00 MiB more of aten::cat in (script): 300.00 MiB, rank 1 has nothing",
        "the fullest GPU has 300.00 MiB more of this run than the emptiest (22.2 % of the fullest)",
    ] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
    assert!(!text.contains("do not work") && !text.contains("works elsewhere"), "{text}");
    let users: Vec<_> = answer.json["shared_devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|user| json!([user["device"], user["nccl_bytes"], user["bytes"], user["works_here"]]))
        .collect();
    assert_eq!(users, [json!([0, 50 * MIB, 1350 * MIB, true]), json!([1, 50 * MIB, 1050 * MIB, true])]);
    assert_eq!(
        answer.json["owner_difference"],
        json!({ "ranks": [0, 1], "peak_bytes": [1200 * MIB, 900 * MIB],
                "owners": [{ "what": "aten::cat in (script)", "bytes": [300 * MIB, 0] }] })
    );
    // 40 MiB are less than 5 % of 1090 MiB.
    let even = answer_on_ranks(&run(40), "ranks", &[]);
    assert_eq!((&even.json["shared_devices"], &even.json["owner_difference"]), (&json!([]), &Value::Null));
    assert!(!even.text().contains("the fullest GPU"), "{}", even.text());
}

/// Rank 1 has asked GPU 0 for its free memory: a context without memory, which only the samples show. A worker
/// process of rank 1 has memory on GPU 0.
#[test]
fn ranks_and_oom_name_contexts_and_worker_processes_on_another_ranks_gpu() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    let trace = |(rank, pid): (i32, i32),
                 ancestors: &[u32],
                 used: &[(i32, i64)],
                 others: i64,
                 fails: bool| {
        let device =
            |ordinal| memtrace_trace::meta::Device { ordinal, total_bytes: TOTAL, ..Default::default() };
        let about = Meta {
            rank,
            world_size: 2,
            host: "host".to_owned(),
            argv: ["python", "-u", "jobs/train.py", "--lr", "1"].map(str::to_owned).to_vec(),
            devices: vec![device(0), device(1)],
            ancestors: ancestors.to_vec(),
            ..Meta::default()
        };
        let mut trace = TraceBuilder::of_process(pid, about);
        for &(device, mib) in used {
            let row = Row { device, op: "aten::copy_", ..Row::default() };
            if mib > 0 {
                let segment =
                    Row { event: EventName::SegmentAlloc, api: "cudaMalloc", delta_bytes: mib * MIB, ..row };
                trace.change(segment, [0, 0, mib * MIB]);
                trace.alloc(mib * MIB, row);
            }
            let (own, others) = ((mib + 500) * MIB, if device == 0 { others * MIB } else { 0 });
            let free = TOTAL - own - others;
            let name = format!("total={TOTAL} free={free} process={own} others={others}");
            let sample = Row { event: EventName::Sample, api: "nvml", name: &name, device, ..Row::default() };
            trace.raw(Row { device_free_bytes: free, ..sample });
            if fails {
                let mark = Row { event: EventName::Oom, rounded_bytes: 1000 * MIB, device, ..Row::default() };
                trace.change(mark, [0; 3]);
            }
        }
        trace.finish()
    };
    // Rank 0 uses 6000 MiB of GPU 0. Others hold 1200 MiB there: the context of rank 1 (500), and the context
    // and memory of its worker (500 + 200).
    let run = [
        trace((0, 1), &[7], &[(0, 6000)], 1200, true),
        trace((1, 2), &[7], &[(0, 0), (1, 300)], 7200, false),
        trace((1, 3), &[2, 7], &[(0, 200)], 7000, false),
    ];
    let answer = answer_on_ranks(&run, "ranks", &[]);
    let found: Vec<_> = answer.json["shared_devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|user| json!([user["process"], user["works_here"], user["context_bytes"], user["bytes"]]))
        .collect();
    let context = 500 * MIB;
    assert_eq!(
        found,
        [
            json!(["rank 0 of this run (pid 1)", true, context, 6500 * MIB]),
            json!(["rank 1 of this run (pid 2)", false, context, context]),
            json!(["worker process of rank 1, train.py (pid 3)", false, context, 700 * MIB]),
        ]
    );
    assert_eq!(answer.json["unnamed_others"], json!([]));
    let oom = answer_on_ranks(&run, "oom", &[]);
    assert_eq!(oom.json["ooms"][0]["verdict"], "another process", "{}", oom.text());
    for wanted in
        ["rank 1 of this run (pid 2), 500.00 MiB", "worker process of rank 1, train.py (pid 3), 700.00 MiB"]
    {
        assert!(oom.text().contains(wanted), "{wanted}\n{}", oom.text());
    }
    assert!(oom.text().contains("torch.cuda.set_device(local_rank)"), "{}", oom.text());
}

#[test]
fn budget_holds_or_breaks_at_the_exact_byte() {
    let highest = &expected()["gpt"]["highest"];
    let folder = tempfile::tempdir().unwrap();
    let limits = folder.path().join("budget.toml");
    for (less, verdict) in [(0, Verdict::Fine), (1, Verdict::OverLimit)] {
        let limit = |key: &str| highest[key].as_i64().unwrap() - less;
        let peak = expected()["gpt"]["peak_allocated"]["bytes"].as_i64().unwrap();
        let text = format!(
            "[total]\nallocated = {peak}\n[modules]\n\"GPT.h\" = {}\n[categories]\nactivation = {}\n[phases]\nbackward = {}\n",
            limit("module GPT.h"),
            limit("category activation"),
            limit("phase backward"),
        );
        std::fs::write(&limits, text).unwrap();
        let answer = answer("budget", &["gpt"], &options(&[("limits", limits.to_str().unwrap())]));
        assert_eq!(answer.verdict, verdict, "{}", answer.text());
        assert_eq!(answer.json["broken"], 3 * less, "{}", answer.text());
    }
}

#[test]
fn budget_refuses_a_limit_that_matches_nothing_unless_it_is_optional_and_takes_patterns() {
    let folder = tempfile::tempdir().unwrap();
    let limits = folder.path().join("budget.toml");
    let input = [Input::open(&fixtures().join("gpt")).unwrap()];
    let ask = |text: &str| {
        std::fs::write(&limits, text).unwrap();
        let options = options(&[("limits", limits.to_str().unwrap())]);
        reports::answer(reports::find("budget").unwrap(), &input, &options)
    };
    let refused =
        ask("[modules]\n\"GPT.layers\" = \"9g\"\n[phases]\nback = \"9g\"\n[categories]\nbuffer = 1\n");
    let why = refused.unwrap_err().to_string();
    for part in [
        "[modules] \"GPT.layers\": no match in ",
        "; its modules: GPT.tokens, ",
        ", GPT.h, GPT.h.0, ",
        "[phases] \"back\": no match in ",
        "; its phases: backward, ",
        "[categories] \"buffer\": no match in ",
        "optional = true",
    ] {
        assert!(why.contains(part), "{part}: {why}");
    }
    let many: String = (0..1000).map(|number| format!("m{number} = 1\n")).collect();
    let many = ask(&format!("[modules]\n{many}")).unwrap_err().to_string();
    assert!(many.len() < 5000 && many.contains("990 more limits match nothing"), "{many}");
    let optional = ask("[modules]\n\"GPT.layers\" = { limit = \"9g\", optional = true }\n").unwrap();
    assert_eq!(optional.verdict, Verdict::Fine);
    // `GPT.h.*` limits each layer by itself, so its highest value is the highest layer's.
    let each = ask("[modules]\n\"GPT.h.*\" = 1\n\"GPT.h.0\" = 1\n\"GPT.h.1\" = 1\n\"GPT.h\" = 1\n").unwrap();
    let highest = |name: &str| {
        let limits = each.json["limits"].as_array().unwrap();
        limits.iter().find(|limit| limit["name"] == name).unwrap()["highest_bytes"].as_i64().unwrap()
    };
    assert_eq!(highest("GPT.h.*"), highest("GPT.h.0").max(highest("GPT.h.1")));
    assert!(highest("GPT.h.*") < highest("GPT.h"));
    assert_eq!(each.verdict, Verdict::OverLimit);
}

/// Returns the answer of a report on a trace made for the test.
fn answer_on(trace: Vec<u8>, report: &str, values: &[(&'static str, &str)]) -> Answer {
    answer_on_ranks(&[trace], report, values)
}

/// Answers a report on a folder with one trace for each rank. Their names have no process id, because it must
/// come from the rows: a name may also end in a part or a compression.
fn answer_on_ranks(traces: &[Vec<u8>], report: &str, values: &[(&'static str, &str)]) -> Answer {
    let folder = tempfile::tempdir().unwrap();
    for (rank, trace) in traces.iter().enumerate() {
        std::fs::write(folder.path().join(format!("rank{rank}.csv")), trace).unwrap();
    }
    let input = [Input::open(folder.path()).unwrap()];
    let report = reports::find(report).unwrap();
    let mut options = options(values);
    for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
        options.values.entry(flag.name).or_insert_with(|| flag.default.to_owned());
    }
    reports::answer(report, &input, &options).unwrap()
}

/// Returns five steps without tags and modules: two parameters, and in each step a batch, two activations, a
/// loss and two gradients. After each optimizer the program allocates once more, as `loss.item()` does. The
/// first matrix products of forward and backward leave workspaces of a parameter's size.
fn plain_tensors() -> Vec<u8> {
    const KIB: i64 = 1024;
    let mut trace = TraceBuilder::default();
    trace.segment(64 << 20);
    let script = |step| Row { op: "aten::empty", step, ..Row::default() };
    let [first, second] = [0, 1].map(|_| trace.alloc(8 * KIB, script(-1)));
    for step in 0..5 {
        // Nothing shows yet that the program trains, so the first forward has no step.
        let forward = script(if step == 0 { -1 } else { step });
        let backward = Row { phase: "backward", category: Category::Temporary, ..script(step) };
        let batch = trace.alloc(KIB, forward);
        if step == 0 {
            trace.alloc(8 * KIB, Row { op: "aten::addmm", ..forward });
        }
        let activations = [trace.alloc(3 * KIB, forward), trace.alloc(4 * KIB, forward)];
        let loss = trace.alloc(512, forward);
        if step == 0 {
            trace.alloc(8 * KIB, Row { op: "aten::mm", ..backward });
        }
        let gradients = [trace.alloc(8 * KIB, backward), trace.alloc(8 * KIB, backward)];
        for (block, bytes) in activations.into_iter().zip([3 * KIB, 4 * KIB]) {
            trace.free(block, bytes, forward);
        }
        trace.raw(Row { event: EventName::Op, phase: "optimizer", ..script(step) });
        for block in gradients {
            trace.free(block, 8 * KIB, backward);
        }
        let item = trace.alloc(512, script(step + 1));
        trace.free(item, 512, script(step + 1));
        trace.free(loss, 512, forward);
        trace.free(batch, KIB, forward);
    }
    for parameter in [first, second] {
        trace.free(parameter, 8 * KIB, script(-1));
    }
    trace.finish()
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

#[test]
fn summary_and_timeline_count_a_step_by_its_work_and_not_by_what_follows_the_last_optimizer() {
    let summary = answer_on(plain_tensors(), "summary", &[]);
    assert_eq!(summary.json["processes"][0]["steps"], 5);
    let timeline = answer_on(plain_tensors(), "timeline", &[]);
    let steps = timeline.json["steps"].as_array().unwrap();
    assert_eq!(steps.last().unwrap()["last_step"], 4, "{steps:?}");
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.csv");
    std::fs::write(&path, plain_tensors()).unwrap();
    let inputs = [Input::open(&path).unwrap(), Input::open(&path).unwrap()];
    let diff =
        reports::answer(reports::find("diff").unwrap(), &inputs, &options(&[("by", "module")])).unwrap();
    let by_step = diff.json["before"]["peak_allocated_bytes_by_step"].as_object().unwrap();
    assert_eq!(by_step.keys().collect::<Vec<_>>(), ["0", "1", "2", "3", "4"]);
}

#[test]
fn ledger_and_summary_mean_the_same_by_device_used_and_name_it_apart_without_samples() {
    const MIB: i64 = 1 << 20;
    let meta = Meta {
        devices: vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 100 * MIB }],
        ..Meta::default()
    };
    let sample = |trace: &mut TraceBuilder, context: i64, reserved: i64| {
        let (process, others) = (reserved + context * MIB, 5 * MIB);
        let name =
            format!("total={} free={} process={process} others={others}", 100 * MIB, 95 * MIB - process);
        trace.raw(Row { event: EventName::Sample, device: 0, name: &name, ..Row::default() });
    };
    // Writes the trace with 0 to 3 samples. The peak is between the first sample, after the first segment,
    // and the second one, which has a larger context.
    for samples in [0, 1, 2, 3] {
        let mut trace = TraceBuilder::new(meta.clone());
        trace.segment(20 * MIB);
        if samples > 0 {
            sample(&mut trace, 7, 20 * MIB);
        }
        let more = trace.segment(10 * MIB);
        trace.alloc(4 * MIB, Row { op: "aten::mm", step: 0, ..Row::default() });
        if samples > 1 {
            sample(&mut trace, 9, 30 * MIB);
        }
        trace.segment(-10 * MIB);
        if samples > 2 {
            sample(&mut trace, 9, 20 * MIB);
        }
        let trace = trace.finish();
        let summary = answer_on(trace.clone(), "summary", &[]);
        let used = &summary.json["processes"][0]["devices"][0]["peak_used"];
        let rest = [0, 12, 14, 14][samples];
        assert_eq!(used["bytes"], (30 + rest) * MIB, "{samples} samples");
        assert_eq!(used["seq"], more, "{samples} samples");
        let name = if samples > 0 { "device used" } else { "torch and libraries" };
        assert!(summary.text().contains(name), "{}", summary.text());
        assert_eq!(summary.text().contains("torch and libraries"), samples == 0);
        let ledger = answer_on(trace.clone(), "ledger", &[]);
        assert_eq!(ledger.json["devices"][0]["used_bytes"], used["bytes"], "{}", ledger.text());
        let peak = answer_on(trace, "peak", &[("of", "used")]);
        let groups = peak.json["groups"].as_array().unwrap();
        let sum: i64 = groups.iter().map(|group| group["bytes"].as_i64().unwrap()).sum();
        assert_eq!((sum, &peak.json["peak"]["bytes"]), ((30 + rest) * MIB, &used["bytes"]));
    }
}

/// Returns a trace with host samples: the process grows from 100 MiB to 280 MiB, in a container of 320 MiB.
/// Without `parts` it has no full sample, as if `/proc/self/smaps` could not be read.
fn host_trace(parts: bool) -> TraceBuilder {
    host_trace_of(Meta::default(), parts, 240)
}

/// Like [`host_trace`], for a process with this `meta` and with `anon` MiB of anonymous memory at the end.
fn host_trace_of(meta: Meta, parts: bool, anon: i64) -> TraceBuilder {
    const MIB: i64 = 1 << 20;
    let mut trace = TraceBuilder::new(meta);
    let mut sample = |api: &'static str, seconds: i64, name: String| {
        let (event, ts_ns) = (EventName::Sample, seconds * 1_000_000_000);
        trace.raw(Row { event, api, device: -1, step: -1, ts_ns, name: &name, ..Row::default() });
    };
    for (seconds, anon) in [(1, 60), (9, anon)] {
        let (rss, anon) = ((anon + 40) * MIB, anon * MIB);
        sample("proc_status", seconds, format!("rss={rss} anon={anon} file={} shmem=0 swap=0", 40 * MIB));
        let current = rss + 90 * MIB;
        let cgroup = format!("current={current} limit={} file={} swap=0 kills=1", 320 * MIB, 60 * MIB);
        sample("cgroup", seconds, cgroup);
        sample("meminfo", seconds, format!("total={} available={} kills=4", 9000 * MIB, 5000 * MIB));
        if seconds == 1 && parts {
            let part = |pss: i64, rss: i64, name: &str| {
                format!("pss={} rss={} dirty=0 swap=0 what={name}", pss * MIB, rss * MIB)
            };
            sample("smaps", 2, part(95, 100, "(total)"));
            sample("smaps", 2, part(35, 40, "libraries"));
            sample("smaps", 2, part(60, 60, "anonymous"));
            sample("child", 2, format!("pss={} rss={} processes=1 what=(total)", 5 * MIB, 7 * MIB));
            sample(
                "child",
                2,
                format!("pss={} rss={} pid=77 processes=1 what=pt_data_worker", 5 * MIB, 7 * MIB),
            );
        }
    }
    trace
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

#[test]
fn peak_of_a_program_without_a_gpu_is_that_of_its_cpu_tensors() {
    const MIB: i64 = 1 << 20;
    let mut trace = host_trace(true);
    let row =
        Row { event: EventName::HostAlloc, device: -2, api: "cpu_allocator", alloc_id: 9, ..Row::default() };
    let row = Row { module: "Net.fc", delta_bytes: 5 * MIB, requested_bytes: 5 * MIB, ..row };
    trace.change(row, [5 * MIB, 5 * MIB, 0]);
    let by_itself = answer_on(trace.finish(), "peak", &[]);
    assert_eq!((&by_itself.json["device"], &by_itself.json["peak"]["bytes"]), (&json!(-2), &json!(5 * MIB)));
    assert!(by_itself.text().contains("Net.fc"), "{}", by_itself.text());
    // Without rows of CPU tensors, `peak` has nothing to list for the host.
    let nothing = answer_on(host_trace(true).finish(), "peak", &[]).text();
    assert!(nothing.contains("No memory tracked."), "{nothing}");
}

#[test]
fn ledger_of_the_host_sums_to_the_process_and_says_what_is_unknown() {
    const MIB: i64 = 1 << 20;
    let trace = host_trace(true).finish();
    let at = |at: &str| answer_on(trace.clone(), "ledger", &[("host", ""), ("at", at)]);
    let first = at("1.5s");
    let host = &first.json["host"][0];
    assert_eq!((&host["pss_bytes"], &host["rss_bytes"]), (&json!(95 * MIB), &json!(100 * MIB)));
    // At the peak there is no full sample. The rows come from the last full sample, and an additional row
    // `change` must hold the difference.
    let peak = at("used-peak");
    let host = &peak.json["host"][0];
    assert_eq!((&host["pss_bytes"], &host["rss_bytes"]), (&json!(275 * MIB), &json!(280 * MIB)));
    let rows = host["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["pss_bytes"].as_i64().unwrap()).sum::<i64>(), 275 * MIB);
    assert!(rows.iter().any(|row| row["group"] == "change" && row["rss_bytes"] == 180 * MIB), "{rows:?}");
    assert_eq!(host["children"]["largest"][0]["pid"], 77);
    assert_eq!(host["container"]["limit_bytes"], 320 * MIB);
    let text = peak.text();
    for part in
        ["anonymous", "pt_data_worker (pid 77)", "limit 320.00 MiB, 10.00 MiB left", "machine: 4.88 GiB"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Without `/proc/self/smaps` the ledger must say that it has no rows, and without `/proc` that it has no
    // sample.
    let hidden = answer_on(host_trace(false).finish(), "ledger", &[("host", "")]);
    assert!(hidden.text().contains("No full sample of the host"), "{}", hidden.text());
    let none = answer_on(TraceBuilder::default().finish(), "ledger", &[("host", "")]);
    assert!(none.text().contains("No sample of the host"), "{}", none.text());
}

/// A trace with CPU tensors: 40 MiB in the full sample at 2 s, 100 MiB from 5 s on, and, if `is_replaced`, as many
/// that are freed. Anonymous memory rises by 150 MiB after the full sample.
fn trace_of_cpu_tensors(is_replaced: bool) -> Vec<u8> {
    const MIB: i64 = 1 << 20;
    let second = 1_000_000_000;
    let mut trace = TraceBuilder::default();
    let tensor = |trace: &mut TraceBuilder, mib: i64, op: &'static str, ts_ns: i64| {
        let row = Row {
            event: EventName::HostAlloc,
            device: -2,
            api: "cpu_allocator",
            op,
            ts_ns,
            ..Row::default()
        };
        let bytes = mib * MIB;
        trace.change(
            Row { alloc_id: ts_ns, delta_bytes: bytes, requested_bytes: bytes, ..row },
            [bytes, bytes, 0],
        );
    };
    let sample = |trace: &mut TraceBuilder, api: &'static str, ts_ns: i64, name: &str| {
        trace.raw(Row { event: EventName::Sample, api, device: -1, step: -1, ts_ns, name, ..Row::default() });
    };
    let quick = |trace: &mut TraceBuilder, ts_ns: i64, anon: i64| {
        sample(trace, "proc_status", ts_ns, &format!("rss={0} anon={0} file=0 shmem=0 swap=0", anon * MIB));
        sample(trace, "cgroup", ts_ns, &format!("current={} limit={} file=0 kills=1", anon * MIB, 300 * MIB));
    };
    tensor(&mut trace, 40, "aten::empty", second);
    quick(&mut trace, 2 * second, 100);
    for (name, mib) in [("(total)", 100), ("CPU tensors", 40), ("anonymous", 60)] {
        let text = format!("pss={0} rss={0} dirty=0 swap=0 what={name}", mib * MIB);
        sample(&mut trace, "smaps", 2 * second, &text);
    }
    tensor(&mut trace, 100, "aten::randn", 5 * second);
    if is_replaced {
        let (event, api, bytes) = (EventName::HostFree, "cpu_allocator", 100 * MIB);
        let row = Row { event, device: -2, api, ts_ns: 6 * second, alloc_id: 5 * second, ..Row::default() };
        trace.change(Row { delta_bytes: -bytes, ..row }, [-bytes, -bytes, 0]);
    }
    quick(&mut trace, 9 * second, 250);
    let name = "killed signal=9 kills=2 lost=0";
    trace.raw(Row { event: EventName::End, ts_ns: 10 * second, name, ..Row::default() });
    trace.unfinished()
}

#[test]
fn host_memory_of_tensors_has_the_code_that_allocated_it() {
    let killed = answer_on(trace_of_cpu_tensors(false), "oom", &[]).text();
    for part in [
        "anonymous: change since 2.00 s: up to 100.00 MiB are CPU tensors, allocated at aten::randn (100.00 MiB)",
        "CPU tensors: allocated at aten::empty (40.00 MiB)",
        "try: CPU tensors: ",
    ] {
        assert!(killed.contains(part), "{part}: {killed}");
    }
    let ledger = answer_on(trace_of_cpu_tensors(false), "ledger", &[("host", ""), ("at", "2s")]);
    let rows = ledger.json["host"][0]["rows"].as_array().unwrap();
    let of = |name: &str| &rows.iter().find(|row| row["held_by"] == name).unwrap()["allocated_at"];
    assert_eq!(
        (of("CPU tensors"), of("anonymous")),
        (&json!([{ "at": "aten::empty", "bytes": 40 << 20 }]), &json!([]))
    );
    // Tensors that were freed again are not what grew.
    let replaced = answer_on(trace_of_cpu_tensors(true), "oom", &[]).text();
    assert!(!replaced.contains("aten::randn") && replaced.contains("try: anonymous: "), "{replaced}");
}

#[test]
fn budget_limits_the_memory_of_the_host_and_refuses_a_trace_without_samples() {
    let folder = tempfile::tempdir().unwrap();
    let limits = folder.path().join("limits.toml");
    let check = |rss: &str, trace: Vec<u8>| {
        std::fs::write(&limits, format!("[host]\nrss = \"{rss}\"\n")).unwrap();
        let file = folder.path().join("vm.r0.1.csv");
        std::fs::write(&file, trace).unwrap();
        let input = Input::open(&file).unwrap();
        let values = [("limits", limits.to_str().unwrap())];
        reports::find("budget").unwrap().run(&[input], &options(&values))
    };
    let verdict = |rss: &str| check(rss, host_trace(true).finish()).unwrap();
    assert_eq!(verdict("280 MiB").verdict, Verdict::Fine);
    let over = verdict("279 MiB");
    assert_eq!((over.verdict, &over.json["limits"][0]["on"]), (Verdict::OverLimit, &json!("host")));
    assert_eq!(over.json["limits"][0]["highest_bytes"], 280_i64 << 20);
    let why = check("1g", TraceBuilder::default().finish()).unwrap_err().to_string();
    assert!(why.contains("no samples of the host"), "{why}");
}

/// Reads a later part of a rotated trace. Its first sample comes after some steps, but the context is as old
/// as the process.
#[test]
fn leaks_see_no_growth_where_the_first_sample_comes_late() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    let mut trace = TraceBuilder::default();
    trace.segment(40 * MIB);
    for step in 0..10 {
        let row = Row { step, op: "aten::mm", ..Row::default() };
        let block = trace.alloc(10 * MIB, row);
        if step >= 4 {
            let name = format!("total={TOTAL} free={} process={} others=0", TOTAL - 640 * MIB, 640 * MIB);
            trace.raw(Row {
                event: EventName::Sample,
                api: "nvml",
                name: &name,
                device: 0,
                ..Row::default()
            });
        }
        trace.free(block, 10 * MIB, row);
    }
    let answer = answer_on(trace.finish(), "leaks", &[]);
    let growth = &answer.json["processes"][0]["growth"][0];
    assert_eq!((&growth["cause"], &growth["growth_bytes"]), (&Value::Null, &json!(0)), "{growth}");
    assert_eq!(growth["from"]["parts_bytes"]["outside"], 600 * MIB, "{growth}");
}

#[test]
fn leaks_split_the_growth_of_what_nvidia_smi_shows() {
    const MIB: i64 = 1 << 20;
    // Each step keeps 1 MiB. Step 6 has an input and temporaries that are `large` times as large; nothing
    // else changes.
    let run = |steps: i64, large: i64| {
        let mut trace = TraceBuilder::default();
        trace.segment(40 * MIB);
        for step in 0..steps {
            let row = |op, category| Row {
                step,
                op,
                module: "Net.fc",
                phase: "forward",
                category,
                ..Row::default()
            };
            let times = if step == 6 { large } else { 1 };
            let input = trace.alloc(times * 2 * MIB, row("aten::randn", Category::Input));
            if times > 1 {
                trace.segment(40 * MIB);
            }
            let work = trace.alloc(times * 10 * MIB, row("aten::mm", Category::Activation));
            trace.alloc(MIB, row("aten::clone", Category::Script));
            trace.free(work, times * 10 * MIB, row("aten::mm", Category::Activation));
            trace.free(input, times * 2 * MIB, row("aten::randn", Category::Input));
        }
        trace.finish()
    };
    let summary = answer_on(run(12, 5), "summary", &[]);
    let line = "GPU 0: memory in use grew from 40.00 MiB (step 1) to 80.00 MiB (step 10): larger steps 44.00 MiB, kept 9.00 MiB";
    assert_eq!(summary.json["processes"][0]["growth"], json!([line]));
    assert!(summary.text().contains(line), "{}", summary.text());
    let run = |steps, large| answer_on(run(steps, large), "leaks", &[]);
    let answer = run(12, 5);
    let growth = &answer.json["processes"][0]["growth"][0];
    let parts = &growth["growth_parts_bytes"];
    // Steps 1 and 10 are compared, because the last step has no successor. In between, 9 steps keep 1 MiB
    // each.
    assert_eq!(growth["from"]["step"], 1, "{growth}");
    assert_eq!(growth["to"]["step"], 10, "{growth}");
    assert_eq!(parts["kept"], 9 * MIB, "{growth}");
    assert_eq!(growth["cause"], "larger_steps", "{growth}");
    assert_eq!(growth["growth_bytes"], 40 * MIB, "{growth}");
    assert_eq!(parts.as_object().unwrap().values().filter_map(Value::as_i64).sum::<i64>(), 40 * MIB);
    assert_eq!(growth["forecast"]["kind"], "jumped", "{growth}");
    let text = answer.text();
    for wanted in [
        "GPU 0: 40.00 MiB more in use after step 10 than after step 1: 80.00 MiB, before 40.00 MiB",
        "Its inputs are 5.0 times as large (10.00 MiB, before 2.00 MiB).",
        "aten::mm in Net.fc: 10.00 MiB before, now 50.00 MiB",
        "The growth came in one jump, with step 6",
        "1.00 MiB per step",
    ] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
    // The kept memory fits into segments that exist already: the memory in use must not grow, but the report
    // must still name the cause.
    let answer = run(12, 1);
    let growth = &answer.json["processes"][0]["growth"][0];
    assert_eq!((&growth["growth_bytes"], &growth["cause"]), (&json!(0), &json!("kept")), "{growth}");
    assert_eq!(growth["forecast"]["kind"], "within_cache", "{growth}");
    assert!(
        answer.text().contains("GPU 0: kept memory grew by 9.00 MiB, with 0 B more in use"),
        "{}",
        answer.text()
    );
    // Two steps are too few to compare.
    assert_eq!(run(2, 1).json["processes"][0]["growth"], json!([]));
}

#[test]
fn leaks_show_growth_of_the_host_by_part() {
    const MIB: i64 = 1 << 20;
    let mut trace = TraceBuilder::default();
    for second in 1..=12_i64 {
        let heap = (50 + 10 * second) * MIB;
        for (api, name) in [
            ("proc_status", format!("rss={} anon={heap} file={MIB} shmem=0 swap=0", heap + MIB)),
            ("cgroup", format!("current={} file={} kills=0", heap + 900 * MIB, second * 64 * MIB)),
            ("smaps", format!("pss={} rss={} dirty=0 swap=0 what=(total)", heap + MIB, heap + MIB)),
            ("smaps", format!("pss={heap} rss={heap} dirty=0 swap=0 what=heap")),
            ("smaps", format!("pss={MIB} rss={MIB} dirty=0 swap=0 what=libraries")),
        ] {
            let (event, ts_ns) = (EventName::Sample, second * 1_000_000_000);
            trace.raw(Row { event, api, device: -1, step: -1, ts_ns, name: &name, ..Row::default() });
        }
    }
    // The last two samples: the program ends, and gives its memory back.
    for (second, rss) in [(13, 40), (14, 20)] {
        let name = format!("rss={} anon={} file=0 shmem=0 swap=0", rss * MIB, rss * MIB);
        let (event, ts_ns) = (EventName::Sample, second * 1_000_000_000);
        trace.raw(Row {
            event,
            api: "proc_status",
            device: -1,
            step: -1,
            ts_ns,
            name: &name,
            ..Row::default()
        });
    }
    let answer = answer_on(trace.finish(), "leaks", &[]);
    let host = &answer.json["processes"][0]["host"];
    assert_eq!(host["growth"].as_array().unwrap().len(), 1, "{host}");
    assert_eq!(host["growth"][0]["held_by"], "heap");
    assert_eq!(host["growth"][0]["bytes_per_second"].as_f64().unwrap() as i64, 10 * MIB);
    assert!(answer.text().contains("page cache grew by"), "{}", answer.text());
}

#[test]
fn summary_and_oom_name_the_rank_that_the_kernel_killed_and_no_other() {
    let killed = |ranks: &[(i64, &str, &str)], report: &str| -> Vec<String> {
        let trace = |at: usize| {
            let (anon, boot, end) = ranks[at];
            let meta = Meta { rank: at as i32, boot: boot.to_owned(), cgroup_id: 5, ..Meta::default() };
            let mut trace = host_trace_of(meta, true, anon);
            trace.raw(Row { event: EventName::End, ts_ns: 10_000_000_000, name: end, ..Row::default() });
            trace.unfinished()
        };
        let traces: Vec<_> = (0..ranks.len()).map(trace).collect();
        let json = answer_on_ranks(&traces, report, &[]).json;
        let verdicts = match report {
            "oom" => json["killed"].as_array().unwrap().iter().collect::<Vec<_>>(),
            _ => json["processes"].as_array().unwrap().iter().map(|process| &process["killed"]).collect(),
        };
        verdicts.iter().map(|one| one["by"].as_str().unwrap_or("-").to_owned()).collect()
    };
    // The count of kills (`kills=`) rose by one, so only the largest of the killed ranks is the kernel's
    // victim. If it rose by two, both are.
    let (once, twice) = ("killed kills=2 machine_kills=5 lost=0", "killed kills=3 machine_kills=6 lost=0");
    for report in ["summary", "oom"] {
        let of = |ranks: &[(i64, &str, &str)]| killed(ranks, report);
        assert_eq!(of(&[(200, "a", once), (260, "a", once)]), ["after_rank", "container_oom"]);
        assert_eq!(of(&[(200, "a", twice), (260, "a", twice)]), ["container_oom", "container_oom"]);
        // On different machines (`a`, `b`) the counts are separate, so both ranks are victims.
        assert_eq!(of(&[(200, "a", once), (260, "b", once)]), ["container_oom", "container_oom"]);
        assert_eq!(
            of(&[(200, "a", once), (260, "a", "killed signal=15 kills=2 lost=0")]),
            ["container_oom", "signal"]
        );
        let machine = "killed machine_kills=5 lost=0";
        assert_eq!(of(&[(260, "a", machine), (200, "a", machine)]), ["machine_oom", "after_rank"]);
        // The last sample of the larger rank already had the final count, so this rank lived after the kill.
        let alive = "killed kills=1 lost=0";
        assert_eq!(of(&[(200, "a", once), (260, "a", alive)]), ["container_oom", "after_rank"]);
        assert_eq!(of(&[(260, "a", alive), (200, "a", alive)]), ["unknown", "unknown"]);
    }
    assert_eq!(killed(&[(200, "a", once), (260, "a", "exit lost=0")], "summary"), ["container_oom", "-"]);
}

#[test]
fn summary_and_oom_say_who_killed_a_process() {
    let ended = |text: &str| {
        let mut trace = host_trace(true);
        trace.raw(Row { event: EventName::End, ts_ns: 10_000_000_000, name: text, ..Row::default() });
        trace.unfinished()
    };
    for (text, by, part) in [
        ("killed signal=9 kills=2 machine_kills=5 lost=0", "container_oom", "by the kernel"),
        ("killed signal=9 kills=1 machine_kills=5 lost=0", "sent", "Somebody sent it"),
        ("killed signal=9 asked=15 kills=1 lost=0", "sent", "after SIGTERM had asked it to end"),
        ("killed signal=9 machine_kills=5 lost=0", "machine_oom", "the machine's memory"),
        ("killed signal=15 kills=1 lost=0", "signal", "SIGTERM"),
        ("killed lost=0", "probably_oom", "probably by the kernel"),
        ("killed kills=1 lost=0", "unknown", "by whom is unknown"),
    ] {
        let summary = answer_on(ended(text), "summary", &[]);
        let killed = &summary.json["processes"][0]["killed"];
        assert_eq!(killed["by"], by, "{text}: {killed}");
        assert!(summary.text().contains(part), "{text}: {}", summary.text());
        assert_eq!(answer_on(ended(text), "oom", &[]).json["killed"][0]["by"], by);
    }
    let text = answer_on(ended("killed signal=9 kills=2 lost=0"), "oom", &[]).text();
    for part in [
        "limit of the container 320.00 MiB; 10.00 MiB left",
        "180.00 MiB anonymous",
        "without a file by 180.00 MiB",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Another process of the container holds less or more than this process and its child. An old list and a
    // refusal by the system are no reason to end it.
    for (held, seconds, refused, is_to_end) in
        [(240, 9, false, false), (250, 9, false, true), (250, -2, false, false), (250, 9, true, false)]
    {
        let mut trace = host_trace(true);
        let row = Row { event: EventName::Sample, device: -1, ..Row::default() };
        for name in [
            format!("held={} processes=2 what=(total)", held << 20),
            format!("held={} pid=5 processes=1 what=a server", held << 20),
        ] {
            trace.raw(Row { api: "other_process", ts_ns: seconds * 1_000_000_000, name: &name, ..row });
        }
        let trace = if refused {
            trace.raw(Row { api: "refused", ts_ns: 9_500_000_000, name: "what=MemoryError", ..row });
            trace.finish()
        } else {
            let name = "killed signal=9 kills=2 lost=0";
            trace.raw(Row { event: EventName::End, ts_ns: 10_000_000_000, name, ..Row::default() });
            trace.unfinished()
        };
        let text = answer_on(trace, "oom", &[]).text();
        let others =
            format!("{held}.00 MiB in 2 other processes of the container at 9.00 s: {held}.00 MiB a server");
        assert_eq!(text.contains(&others), seconds == 9, "{text}");
        assert_eq!(text.contains("end the other processes"), is_to_end, "{text}");
    }
    for text in ["exit lost=0", "exec lost=0", "stopped lost=0"] {
        let summary = answer_on(ended(text), "summary", &[]);
        assert!(summary.json["processes"][0]["killed"].is_null(), "{text}");
    }
    // Ends after a refused request for memory: the answer must not say that the program was killed.
    for (name, part) in [
        (
            "limit=3000000000 size=2900000000 peak=2990000000 what=MemoryError",
            "limited to 2.79 GiB (ulimit -v, RLIMIT_AS), and its size was 2.78 GiB",
        ),
        ("size=2900000000 what=RuntimeError", "no limit of its address space is set"),
        ("what=MemoryError", "has a limit is unknown"),
    ] {
        let mut trace = host_trace(true);
        let (event, ts_ns) = (EventName::Sample, 9_500_000_000);
        trace.raw(Row { event, api: "refused", device: -1, ts_ns, name, ..Row::default() });
        let answer = answer_on(trace.finish(), "oom", &[]);
        assert_eq!(answer.json["killed"][0]["by"], "refused", "{name}");
        assert!(answer.text().contains(part), "{name}: {}", answer.text());
    }
}

#[test]
fn diff_compares_owners_and_its_gate_can_fail() {
    let gate = |limit: &str, traces: &[&str]| answer("diff", traces, &options(&[("fail-over", limit)]));
    assert_eq!(gate("0%", &["gpt", "gpt"]).verdict, Verdict::Fine);
    let worse = gate("2%", &["leaks", "gpt"]);
    assert_eq!(worse.verdict, Verdict::OverLimit);
    let sum = |side: &str| -> i64 {
        worse.json["changes"].as_array().unwrap().iter().filter_map(|change| change[side].as_i64()).sum()
    };
    let (before, after) = (&expected()["leaks"], &expected()["gpt"]);
    assert_eq!(sum("before_bytes"), before["peak_allocated"]["bytes"]);
    assert_eq!(sum("after_bytes"), after["peak_allocated"]["bytes"]);
}

#[test]
fn serving_adds_the_processes_of_each_host_and_says_when_they_exceed_a_card() {
    const MIB: i64 = 1 << 20;
    let process = |host: &str, rank: i32, cache: i64| {
        let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
        let meta = Meta {
            host: host.to_owned(),
            rank,
            world_size: 4,
            devices,
            run_id: "one".to_owned(),
            ..Meta::default()
        };
        let mut trace = TraceBuilder::new(meta);
        trace.segment((10 + cache) * MIB);
        trace.alloc(10 * MIB, Row { category: Category::Parameter, ..Row::default() });
        trace.alloc(cache * MIB, Row { category: Category::KvCache, ..Row::default() });
        let own = 15 + cache;
        let name = format!(
            "total={} free={} process={} others={}",
            100 * MIB,
            (100 - own).max(0) * MIB,
            own * MIB,
            0
        );
        trace.raw(Row { event: EventName::Sample, device: 0, name: &name, ..Row::default() });
        trace.finish()
    };
    let folder = tempfile::TempDir::new().unwrap();
    // The two processes of the first host fit on its card together; the two of the second host do not.
    let processes = [("alpha", 0, 20), ("alpha", 1, 25), ("be\x1bta", 2, 60), ("be\x1bta", 3, 50)];
    for (host, rank, cache) in processes {
        std::fs::write(
            folder.path().join(format!("host.r{rank}.{}.csv", rank + 1)),
            process(host, rank, cache),
        )
        .unwrap();
    }
    let serving = |path: &Path| {
        let input = Input::open(path).unwrap();
        let options = options(&[("at", "peak"), ("tokens", "1024")]);
        reports::find("serving").unwrap().run(&[input], &options).unwrap()
    };
    let answer = serving(folder.path());
    let devices = answer.json["devices"].as_array().unwrap();
    let about = |device: &Value| {
        let held = |name: &str| {
            let row = device["rows"].as_array().unwrap().iter().find(|row| row["held_by"] == name).unwrap();
            row["bytes"].as_i64().unwrap() / MIB
        };
        let sum: i64 =
            device["rows"].as_array().unwrap().iter().map(|row| row["bytes"].as_i64().unwrap()).sum();
        assert_eq!(Some(sum), device["used_bytes"].as_i64(), "{device:#}");
        (
            device["host"].as_str().unwrap().to_owned(),
            device["processes"].as_i64(),
            held("weights"),
            held("KV cache"),
        )
    };
    let found: Vec<_> = devices.iter().map(about).collect();
    let expected =
        [("alpha", 45), ("be\x1bta", 110)].map(|(host, cache)| (host.to_owned(), Some(2), 20, cache));
    assert_eq!(found, expected, "{}", answer.text());
    let text = answer.text();
    assert!(text.contains("device 0 of alpha") && text.contains("by 2 processes"), "{text}");
    // The host's name is printed on a terminal, so its control character must go.
    assert!(!text.contains('\x1b'), "{text}");
    let warning = "This is more than the device has";
    assert_eq!(text.matches(warning).count(), 1, "{text}");
    assert!(text.find("of alpha").unwrap() < text.find(warning).unwrap());
    // For one process alone, the report must omit the name of the host, and must not warn, because the
    // process fits on its card.
    let one = serving(&folder.path().join("host.r2.3.csv"));
    assert!(!one.text().contains(" of be") && !one.text().contains(warning), "{}", one.text());
    assert_eq!(one.json["devices"][0]["processes"], 1);
}

#[test]
fn ranks_that_ran_among_stand_ins_are_in_one_list() {
    let folder = tempfile::TempDir::new().unwrap();
    // Ranks from separate starts: each trace names only the ranks of its own start.
    for (rank, ran) in [(0, "0"), (10, "10"), (2, "2,4-6")] {
        let phantom = json!({ "card": "t4", "ranks": ran, "ranks_of": 512 });
        let trace = TraceBuilder::new(Meta { rank, run_id: "a".to_owned(), phantom, ..Meta::default() });
        std::fs::write(folder.path().join(format!("host.r{rank}.1.csv")), trace.finish()).unwrap();
    }
    let input = Input::open(folder.path()).unwrap();
    let answer = reports::find("summary").unwrap().run(&[input], &options(&[])).unwrap();
    let text = answer.text();
    assert!(text.contains("ranks 0,2,4-6,10 of 512 ran, each with stand-ins"), "{text}");
    assert_eq!(answer.to_json("summary")["phantom"]["ranks"], json!([{ "ran": "0,2,4-6,10", "of": 512 }]));
}

#[test]
fn diff_names_the_ranks_that_it_compares_and_signs_each_change() {
    let text = answer("diff", &["sharded", "gpt"], &options(&[])).text();
    assert!(text.contains("compared: rank 2 before, rank 0 after"), "{text}");
    let same = answer("diff", &["gpt", "gpt"], &options(&[])).text();
    assert!(!same.contains("compared:"), "{same}");
    assert!(same.contains("0 B  0.0 %") && !same.contains("+0.0 %") && !same.contains("-0.0 %"), "{same}");
}

#[test]
fn ranks_call_another_first_batch_no_part_of_the_init() {
    const MIB: i64 = 1 << 20;
    let rank = |rank: i32, batch: i64| {
        let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
        let mut trace = TraceBuilder::new(Meta { rank, world_size: 2, devices, ..Meta::default() });
        trace.segment(40 * MIB);
        let row = Row { rank, module: "(script)", phase: "init", step: -1, ..Row::default() };
        trace.alloc(8 * MIB, Row { category: Category::Parameter, ..row });
        let made = Row { category: Category::Script, ..row };
        let id = trace.alloc(batch, made);
        trace.tag(id, batch, made, Row { category: Category::Input, ..row });
        trace.finish()
    };
    let text = answer_on_ranks(&[rank(0, MIB), rank(1, 2 * MIB)], "ranks", &[]).text();
    let line = "first difference: (script), dataloader: rank 0 allocates 1.00 MiB in 1 block, rank 1 allocates 2.00 MiB in 1 block";
    assert!(text.contains(line), "{text}");
}

#[test]
fn ranks_have_the_peak_of_their_host_memory_and_its_skew() {
    const MIB: i64 = 1 << 20;
    let rank = |rank: i32, samples: &[i64]| {
        let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
        let mut trace = TraceBuilder::new(Meta { rank, world_size: 2, devices, ..Meta::default() });
        trace.segment(40 * MIB);
        trace.alloc(8 * MIB, Row { rank, ..Row::default() });
        let mut sample = |api: &'static str, seconds: i64, name: String| {
            let (event, ts_ns) = (EventName::Sample, seconds * 1_000_000_000);
            trace.raw(Row { event, api, rank, device: -1, step: -1, ts_ns, name: &name, ..Row::default() });
        };
        for (seconds, rss) in (1..).zip(samples) {
            sample("proc_status", seconds, format!("rss={} anon={} file=0 shmem=0", rss * MIB, rss * MIB));
            sample("child", seconds, format!("pss={} rss={} processes=1 what=(total)", 5 * MIB, 7 * MIB));
        }
        trace.finish()
    };
    let answer = answer_on_ranks(&[rank(0, &[100, 400, 300]), rank(1, &[100])], "ranks", &[]);
    let of = |key: &str| [0, 1].map(|rank| answer.json["ranks"][rank][key].as_i64().unwrap() / MIB);
    assert_eq!((of("host_peak_rss_bytes"), of("host_peak_bytes")), ([400, 100], [405, 105]));
    assert_eq!(answer.json["host_skew_bytes"], 300 * MIB);
    let text = answer.text();
    assert!(
        text.contains("host memory: 300.00 MiB between the highest and the lowest peak (74.1 % of"),
        "{text}"
    );
    // A trace without samples has no peak, and a single peak has no skew.
    let answer = answer_on_ranks(&[rank(0, &[400]), rank(1, &[])], "ranks", &[]);
    assert_eq!(
        (&answer.json["ranks"][1]["host_peak_bytes"], &answer.json["host_skew_bytes"]),
        (&json!(-1), &json!(0))
    );
    assert!(!answer.text().contains("host memory:"), "{}", answer.text());
}

#[test]
fn diff_compares_two_steps_of_one_run() {
    let peaks =
        answer("diff", &["leaks", "leaks"], &options(&[])).json["before"]["peak_allocated_bytes_by_step"]
            .clone();
    let found = answer("diff", &["leaks"], &options(&[("steps", "1:3")]));
    let (before, after) = (&found.json["before"]["peak_allocated"], &found.json["after"]["peak_allocated"]);
    assert_eq!((&before["bytes"], &after["bytes"]), (&peaks["1"], &peaks["3"]));
    assert_eq!((&before["step"], &after["step"]), (&json!(1), &json!(3)));
    assert!(peaks["3"].as_i64() > peaks["1"].as_i64(), "{peaks}");
    let changes = found.json["changes"].as_array().unwrap();
    let grown: i64 = changes.iter().map(|change| change["delta_bytes"].as_i64().unwrap()).sum();
    assert_eq!(grown, peaks["3"].as_i64().unwrap() - peaks["1"].as_i64().unwrap());
    assert!(found.text().contains("compared: step 1 before, step 3 after"), "{}", found.text());
    let input = [Input::open(&fixtures().join("leaks")).unwrap()];
    let why = |steps: &str| {
        let report = reports::find("diff").unwrap();
        let mut options = options(&[("steps", steps)]);
        for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
            options.values.entry(flag.name).or_insert_with(|| flag.default.to_owned());
        }
        reports::answer(report, &input, &options).unwrap_err().to_string()
    };
    assert!(why("1:99").contains("--step 99"), "{}", why("1:99"));
    assert!(why("1").contains("expected two steps"), "{}", why("1"));
}

#[test]
fn json_fields_of_every_report_are_documented() {
    let page = std::fs::read_to_string(fixtures().join("../../docs/json.md")).unwrap();
    let documented = |report: &str, field: &str| {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{report}` ")));
        row.is_some_and(|row| row.contains(&format!("`{field}`")))
    };
    for report in reports::with_views().filter(|report| report.name() != "budget") {
        let traces = vec!["sharded"; report.inputs().len()];
        let json =
            answer(report.name(), &traces, &options(&[("series", ""), ("without", "op=aten::mm")])).json;
        for (field, value) in json.as_object().unwrap() {
            assert!(documented(report.name(), field), "{}: {field}", report.name());
            let first = value.as_array().and_then(|list| list.first()).and_then(Value::as_object);
            for field in first.into_iter().flat_map(|object| object.keys()) {
                let is_type = field.starts_with(char::is_uppercase);
                assert!(is_type || documented(report.name(), field), "{}: {field}", report.name());
            }
        }
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

#[test]
fn expected_json_still_equals_the_answer_computed_with_pandas() {
    Torch::run("2.11.0", |torch| {
        let output =
            torch.command().arg(scripts().join("fixtures/expected.py")).arg(fixtures()).output().unwrap();
        let now: Value = serde_json::from_str(&succeeded("expected.py", &output)).unwrap();
        assert_eq!(now, expected());
    });
}
