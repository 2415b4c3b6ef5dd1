//! Compares each report on real traces with numbers that pandas computed
//! (`tests/scripts/fixtures/expected.py`), and with what the recorded scripts are known to do.
//!
//! `tests/fixtures/record` made the traces. `tests/fixtures/expected.json` is the output of the pandas
//! script; one test runs it again if a torch environment with pandas is installed.

mod host;
mod leaks;
mod oom;
mod peak;
mod ranks;

use std::collections::BTreeMap;
use std::path::Path;

use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports::{self, Answer, Verdict};
use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::meta::{Device, Meta};
use memtrace_trace::{Category, EventName, Row};
use serde_json::{Value, json};

use crate::common::command::fixtures;
use crate::common::torch::{Torch, memtrace, scripts, succeeded};

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

/// Returns a trace with host samples: the process grows from 100 MiB to 280 MiB, in a container of 320 MiB.
/// Without `parts` it has no full sample, as if `/proc/self/smaps` could not be read.
fn host_trace(parts: bool) -> TraceBuilder {
    host_trace_of(Meta::default(), parts, 240)
}

/// Returns a sample of the host's memory, such as `rss=1 anon=1` by `proc_status`.
fn host_sample<'a>(api: &'a str, ts_ns: i64, name: &'a str) -> Row<'a> {
    Row { event: EventName::Sample, api, device: -1, step: -1, ts_ns, name, ..Row::default() }
}

/// Like [`host_trace`], for a process with this `meta` and with `anon` MiB of anonymous memory at the end.
fn host_trace_of(meta: Meta, parts: bool, anon: i64) -> TraceBuilder {
    const MIB: i64 = 1 << 20;
    let mut trace = TraceBuilder::new(meta);
    let mut sample = |api: &'static str, seconds: i64, name: String| {
        trace.raw(host_sample(api, seconds * 1_000_000_000, &name));
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

#[test]
fn expected_json_still_equals_the_answer_computed_with_pandas() {
    Torch::run("2.11.0", |torch| {
        let output =
            torch.command().arg(scripts().join("fixtures/expected.py")).arg(fixtures()).output().unwrap();
        let now: Value = serde_json::from_str(&succeeded("expected.py", &output)).unwrap();
        assert_eq!(now, expected());
    });
}
