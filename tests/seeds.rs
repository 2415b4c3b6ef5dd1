//! Answers that PyTorch's own tools also give: memory at marks, and the ops that allocate.

use std::fs;
use std::path::{Path, PathBuf};

use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::{EventName, Row};
use serde_json::Value;
use tempfile::TempDir;

use crate::common::torch::{self, Torch, json, missing, output, printed, scripts, succeeded, text};

/// Returns the error of arguments that the command refuses.
fn refused(arguments: &[&str], trace: &Path) -> String {
    let output = output(arguments, trace);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    text(&output.stderr)
}

fn written(folder: &TempDir, bytes: &[u8]) -> PathBuf {
    let path = folder.path().join("a.csv");
    fs::write(&path, bytes).unwrap();
    path
}

const MIB: i64 = 1 << 20;

/// Returns a trace of four steps. Each has a mark `loaded`: at 1, 3, 6 and 11 MiB. In the third step, the
/// range `epoch` begins before the mark and ends 1 MiB later.
fn marked() -> Vec<u8> {
    let mut trace = TraceBuilder::default();
    for step in 0..4 {
        let row = Row { phase: "forward", step, ..Row::default() };
        let range = Row { api: "nvtx", name: "epoch", ..row };
        if step == 2 {
            trace.raw(Row { event: EventName::RangeBegin, ..range });
        }
        trace.alloc((step + 1) * MIB, Row { op: "aten::mm", module: "N", ..row });
        trace.raw(Row { event: EventName::Mark, api: "memtrace", name: "loaded", ..row });
        if step == 2 {
            trace.alloc(MIB, Row { op: "aten::mm", module: "N", ..row });
            trace.raw(Row { event: EventName::RangeEnd, ..range });
        }
        // Adds a mark and a range of memtrace itself, which must not count as the program's.
        trace.raw(Row { event: EventName::Mark, api: "detail", name: "detail off", ..row });
        trace.raw(Row { event: EventName::RangeEnd, api: "module", name: "N", ..row });
    }
    trace.finish()
}

#[test]
fn peak_at_a_mark_is_the_memory_then() {
    let folder = TempDir::new().unwrap();
    let path = written(&folder, &marked());
    let bytes = |arguments: &[&str]| {
        json(&[&["peak"], arguments].concat(), &path)["allocated_bytes"].as_i64().unwrap() / MIB
    };
    assert_eq!(bytes(&["--at", "mark:loaded"]), 11, "the last");
    assert_eq!(bytes(&["--at", "mark:loaded#1"]), 1);
    assert_eq!(bytes(&["--at", "mark:loaded#3"]), 6);
    assert_eq!(bytes(&["--at", "mark:epoch"]), 7, "a range: its end");
    assert_eq!(bytes(&["--at", "mark:loaded", "--step", ":1"]), 3, "the last in these steps");
    let total = json(&["peak", "--mem-tracker", "--at", "mark:loaded#3"], &path);
    assert_eq!(total["devices"][0]["Total"].as_i64().unwrap() / MIB, 6, "{total}");

    let each = printed(&["peak", "--each", "mark", "--format", "csv"], &path);
    let names: Vec<&str> = each.lines().map(|line| line.split(',').next().unwrap()).collect();
    assert_eq!(names, ["mark", "loaded#1", "loaded#2", "loaded#3", "epoch#1", "loaded#4"]);
    assert!(each.contains("epoch#1,7340032,"), "{each}");
    let each = printed(&["peak", "--each", "mark", "--step", "3", "--format", "csv"], &path);
    assert!(each.lines().count() == 2 && each.contains("loaded#4,11534336,"), "{each}");
}

#[test]
fn every_command_with_a_moment_takes_a_mark() {
    let folder = TempDir::new().unwrap();
    let path = written(&folder, &marked());
    for command in [
        &["peak"][..],
        &["peak", "--mem-tracker"],
        &["frag"],
        &["ledger"],
        &["ledger", "--host"],
        &["serving"],
    ] {
        printed(&[command, &["--at", "mark:loaded#2"]].concat(), &path);
        let why = refused(&[command, &["--at", "mark:loadd"]].concat(), &path);
        assert!(why.contains("its marks and ranges: loaded, epoch"), "{why}");
        assert!(!why.contains("detail off"), "{why}");
    }
}

#[test]
fn a_mark_that_is_not_in_the_trace_is_refused_with_those_that_are() {
    let folder = TempDir::new().unwrap();
    let path = written(&folder, &marked());
    let why = refused(&["peak", "--at", "mark:loaded#5"], &path);
    assert!(why.contains("loaded#1 to loaded#4"), "{why}");
    assert!(refused(&["peak", "--at", "mark:loaded#0"], &path).contains("loaded#1 to loaded#4"));
    assert!(refused(&["peak", "--at", "mark:epoch#2"], &path).contains("its marks and ranges: epoch"));
    assert!(refused(&["peak", "--at", "mark:"], &path).contains("mark:NAME"));
    assert!(refused(&["peak", "--at", "mark:epoch", "--step", "3"], &path).contains("--at mark:epoch"));
    // The range of a module must not be accepted as a mark.
    assert!(refused(&["peak", "--at", "mark:N"], &path).contains("no match"));
    let none = written(&folder, &TraceBuilder::default().finish());
    assert!(refused(&["peak", "--at", "mark:x"], &none).contains("its marks and ranges: none"));
    assert!(printed(&["peak", "--each", "mark"], &none).contains("no mark"));
}

#[test]
fn a_mark_whose_name_ends_like_a_number_is_found_by_its_name() {
    let folder = TempDir::new().unwrap();
    let mut trace = TraceBuilder::default();
    trace.alloc(MIB, Row::default());
    trace.raw(Row { event: EventName::Mark, api: "nvtx", name: "epoch#7", ..Row::default() });
    trace.alloc(MIB, Row::default());
    let path = written(&folder, &trace.finish());
    assert_eq!(json(&["peak", "--at", "mark:epoch#7"], &path)["allocated_bytes"], MIB);
}

/// Returns the row of an op on `tid` that began `latency_ns` before its row.
fn op(name: &'static str, tid: i32, latency_ns: i64) -> Row<'static> {
    let row =
        Row { event: EventName::Op, api: "record_function", device: 0, tid, latency_ns, ..Row::default() };
    Row { op: name, module: "N", phase: "forward", step: 0, ..row }
}

/// Returns a trace with rows 1 µs apart. The first op of the process has no row.
fn ops() -> Vec<u8> {
    let mut trace = TraceBuilder::default();
    let row = Row { tid: 1, module: "N", phase: "forward", step: 0, ..Row::default() };
    let owner = |op: &'static str| Row { op, ..row };
    let first = trace.alloc(MIB, owner("aten::empty"));
    trace.free(first, MIB, row);
    // The op allocates 3 MiB and frees them before its end. The bytes must count.
    let block = trace.alloc(3 * MIB, owner("aten::empty"));
    trace.free(block, 3 * MIB, row);
    trace.raw(op("aten::zeros", 1, 2500));
    // A nested op with a row of its own allocates 4 MiB, then its outer op 5 MiB; meanwhile an op of another
    // thread allocates 2 MiB.
    trace.alloc(4 * MIB, owner("aten::mm"));
    trace.alloc(2 * MIB, Row { tid: 2, ..owner("aten::relu") });
    trace.raw(op("aten::mm", 1, 2500));
    trace.alloc(5 * MIB, owner("aten::add"));
    trace.raw(op("aten::relu", 2, 4500));
    trace.raw(op("autograd::engine::evaluate_function: AddmmBackward0", 1, 6500));
    // A block outside every op.
    trace.alloc(7 * MIB, Row { op: "(none)", ..row });
    // An op that allocates nothing.
    trace.raw(op("aten::view", 1, 500));
    trace.finish()
}

/// Returns the op, MiB and blocks of each listed call.
fn calls(found: &Value) -> Vec<(&str, i64, u64)> {
    let calls = found["processes"][0]["calls"].as_array().unwrap();
    calls
        .iter()
        .map(|call| {
            let bytes = call["allocated_bytes"].as_i64().unwrap();
            (call["op"].as_str().unwrap(), bytes / MIB, call["blocks"].as_u64().unwrap())
        })
        .collect()
}

#[test]
fn ops_count_what_each_op_allocated_itself() {
    let folder = TempDir::new().unwrap();
    let path = written(&folder, &ops());
    let found = json(&["ops"], &path);
    let expected = [
        ("AddmmBackward0", 9, 2),
        ("(none)", 7, 1),
        ("aten::zeros", 3, 1),
        ("aten::relu", 2, 1),
        ("aten::empty", 1, 1),
    ];
    assert_eq!(calls(&found), expected);
    let nested = json(&["ops", "--nested"], &path);
    let expected = [
        ("(none)", 7, 1),
        ("aten::add", 5, 1),
        ("aten::mm", 4, 1),
        ("aten::empty", 3, 1),
        ("aten::relu", 2, 1),
        ("aten::empty", 1, 1),
    ];
    assert_eq!(calls(&nested), expected);
    let sums = &nested["processes"][0]["sums"];
    assert_eq!(
        (&sums[2]["op"], &sums[2]["calls"], &sums[2]["largest_bytes"]),
        (&"aten::empty".into(), &2.into(), &(3 * MIB).into()),
        "{sums}"
    );
    let said = printed(&["ops", "--top", "1"], &path);
    assert!(said.contains("4 more; --top N lists them") && said.contains("AddmmBackward0"), "{said}");
    assert!(!said.contains("evaluate_function"), "{said}");
    // With `--legacy`, an op counts the growth from the end of one op to the end of the next, as in
    // MemoryTracker.
    let said = printed(&["ops", "--legacy"], &path);
    assert!(said.contains("aten::mm_0: 6.0MB") && !said.contains("aten::zeros_0: 3"), "{said}");
    // Selects one device; then reads a trace without blocks.
    assert_eq!(calls(&json(&["ops", "--device", "0"], &path)).len(), 5);
    let none = written(&folder, &TraceBuilder::default().finish());
    assert!(printed(&["ops"], &none).contains("No memory tracked."));
}

#[test]
fn ops_join_repeated_layers_without_the_option_apart() {
    let folder = TempDir::new().unwrap();
    let mut trace = TraceBuilder::default();
    for layer in ["N.h.0", "N.h.1", "N.h.2"] {
        let row = Row { tid: 1, module: layer, phase: "forward", step: 0, ..Row::default() };
        trace.raw(Row { event: EventName::RangeBegin, api: "module", name: layer, source: "Block", ..row });
        trace.alloc(MIB, Row { op: "aten::mm", ..row });
        trace.raw(Row { module: layer, ..op("aten::mm", 1, 1500) });
        trace.raw(Row { event: EventName::RangeEnd, api: "module", name: layer, source: "Block", ..row });
    }
    let path = written(&folder, &trace.finish());
    let sums = |arguments: &[&str]| json(arguments, &path)["processes"][0]["sums"].clone();
    let joined = sums(&["ops"]);
    assert_eq!((&joined[0]["module"], &joined[0]["calls"]), (&"N.h.*".into(), &3.into()), "{joined}");
    assert_eq!(sums(&["ops", "--apart"]).as_array().unwrap().len(), 3);
}

#[test]
fn ops_of_a_program_allocate_the_same_whatever_is_recorded() {
    Torch::run("2.11.0", |torch| {
        let of = |ops: &str| {
            let run = torch.trace_with("seeds/ops.py", &[], &[("MEMTRACE_OPS", ops)]).expect_success();
            let found = run.json("ops", &[]);
            let calls = calls(&found);
            let gib = |(op, mib, _): &(&str, i64, u64)| ((*op).to_owned(), mib / 1024);
            assert_eq!(
                calls[..4].iter().map(gib).collect::<Vec<_>>(),
                [
                    ("aten::empty".to_owned(), 4),
                    ("aten::empty".to_owned(), 4),
                    ("aten::empty".to_owned(), 3),
                    ("aten::empty".to_owned(), 1)
                ]
            );
            let pool = |op: &str| calls.iter().find(|call| call.0 == op).map(|call| (call.1, call.2));
            assert_eq!(pool("aten::max_pool2d"), Some((18, 2)), "{found}");
            assert_eq!(pool("MaxPool2DWithIndicesBackward0").map(|call| call.0), Some(30), "{found}");
            calls.iter().map(|call| (call.0.to_owned(), call.1)).collect::<Vec<_>>()
        };
        let top = of("top");
        assert_eq!(top, of("all"));
        assert_eq!(top, of("io"));
    });
}

#[test]
fn peak_at_the_end_is_before_python_frees_its_objects() {
    Torch::run("2.11.0", |torch| {
        for arguments in [&[][..], &["uncollected"]] {
            let run = torch.trace("seeds/last_line.py", arguments).expect_success();
            let printed: Vec<i64> = run.stdout().lines().map(|line| line.parse().unwrap()).collect();
            let at = |moment: &str| run.json("peak", &["--at", moment])["allocated_bytes"].as_i64().unwrap();
            assert_eq!([at("step:0"), at("step:1")], printed[..2], "{arguments:?}");
            assert_eq!((at("end"), at("step:3")), (printed[3], printed[3]), "{arguments:?}");
            assert!(at("exit") < at("end"), "{arguments:?}: Python frees the model");
            let end = run.json("peak", &["--at", "end", "--by", "category"]);
            let has = |name: &str| end["groups"].as_array().unwrap().iter().any(|group| group["key"] == name);
            assert!(has("parameter") && has("optimizer_state"), "{end:#}");
        }
    });
}

#[test]
fn workspaces_have_their_category_with_every_setting() {
    Torch::run("2.11.0", |torch| {
        let no_caching = ("PYTORCH_NO_CUDA_MEMORY_CACHING", "1");
        for settings in [&[("MEMTRACE_OPS", "top")][..], &[("MEMTRACE_OPS", "io")], &[no_caching]] {
            let run = torch.trace_with("seeds/workspaces.py", &[], settings).expect_success();
            let freed: i64 = run.stdout().trim().parse().unwrap();
            let rows = run.rows();
            let is_workspace = |row: &&torch::TorchRow| row.category == "workspace";
            let tagged: i64 = rows
                .iter()
                .filter(|row| row.event == "tag")
                .filter(is_workspace)
                .map(|row| row.delta_bytes)
                .sum();
            // Without caching, `freed` is not compared, because torch has no statistics then.
            assert!(tagged == freed || settings == [no_caching], "{settings:?}: {tagged}, {freed}");
            assert!(tagged >= 33 << 20, "{settings:?}: {tagged}: of cuBLAS and of cuBLASLt");
            if settings[0].1 == "io" {
                let actions = run.json("ops", &["--actions"]);
                let categories = &actions["processes"][0]["devices"][0]["categories"];
                let highest = |name: &str| categories[name]["highest_bytes"].as_i64().unwrap_or(0);
                assert_eq!(highest("Unknown"), freed, "{categories:#}");
                assert!(highest("ACTIVATION").max(highest("AUTOGRAD_DETAIL")) < 4 << 20, "{categories:#}");
            }
        }
    });
}

#[test]
fn what_is_loaded_without_an_op_has_its_line_and_a_category() {
    Torch::run("2.11.0", |torch| {
        let run = torch.trace("seeds/load.py", &[]).expect_success();
        let printed = run.stdout();
        let printed: Vec<i64> = printed.split_whitespace().map(|number| number.parse().unwrap()).collect();
        let end = run.json("peak", &["--at", "step:1", "--by", "category"]);
        let of = |name: &str| {
            let groups = end["groups"].as_array().unwrap();
            let found = groups.iter().find(|group| group["key"] == name);
            found.map_or(0, |group| group["bytes"].as_i64().unwrap())
        };
        assert_eq!([of("parameter"), of("optimizer_state"), of("loaded")], printed[..], "{end:#}");
        assert_eq!(of("(none)"), 0, "{end:#}");

        let rows = run.rows();
        let loaded: Vec<_> = rows.iter().filter(|row| row.event == "alloc" && row.phase == "load").collect();
        assert!(loaded.iter().all(|row| row.category == "loaded" && row.module == "(script)"));
        // 18 blocks: four parameters, three state tensors of each parameter, and two storages.
        assert_eq!(loaded.len(), 18);
        let lines = run.report("peak", &["--at", "step:1", "--by", "line"]);
        for line in ["load.py:25 resume", "load.py:29 copy_storage", "load.py:46 main"] {
            assert!(lines.contains(line), "{line}: {lines}");
        }
    });
}

#[test]
fn modules_have_a_backward_for_each_call_of_a_block_in_a_row() {
    Torch::run("2.11.0", |torch| {
        const MODES: [&str; 3] = ["plain", "reentrant", "kept"];
        let run = torch.trace("seeds/shared.py", &MODES).expect_success();
        let cases = run.cases();
        assert_eq!(cases.iter().map(|case| case.name.as_str()).collect::<Vec<_>>(), MODES);
        for case in &cases {
            let mode = &case.name;
            let found = json(&["modules", "--depth", "3"], &case.trace);
            let modules = found["processes"][0]["modules"].as_array().unwrap();
            let states = |name: &str| {
                &modules.iter().find(|module| module["module"] == name).unwrap_or_else(|| panic!("{found:#}"))
                    ["states"]
            };
            for (name, calls) in
                [("Shared", 2), ("Shared.block", 6), ("Shared.block.0", 6), ("Shared.line", 4)]
            {
                for state in ["Pre-Forward", "Pre-Backward", "Peak-Backward", "Post-Backward"] {
                    let count = states(name)[state].as_array().map_or(0, Vec::len);
                    assert_eq!(count, calls, "{mode}: {name}, {state}");
                }
            }
            // In the backward, each call frees its activations, so each later call of the step must begin
            // with less.
            let activations: Vec<i64> = states("Shared.block")["Pre-Backward"]
                .as_array()
                .unwrap()
                .iter()
                .map(|call| call["cuda:0"]["Activation"].as_i64().unwrap())
                .collect();
            assert!(
                activations[0] > activations[1] && activations[1] > activations[2],
                "{mode}: {activations:?}"
            );
        }
    });
}

/// Runs cases of `seeds/partitions.py` on two ranks, and checks their categories.
fn partitions_add_up(torch: &Torch, cases: &[&str]) {
    let folder = TempDir::new().unwrap();
    let traces = folder.path().join("trace");
    let mut run = torch.traced_command_on("2xh100-80g", &traces);
    run.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]);
    let output = run.arg(scripts().join("seeds/partitions.py")).args(cases).output().unwrap();
    let answers = folder.path().join("answers");
    let printed = succeeded("partitions.py", &output);
    for case in cases {
        let is_of_case =
            |line: &&str| line.starts_with('{') && line.contains(&format!(r#""case": "{case}","#));
        let lines: Vec<&str> = printed.lines().filter(is_of_case).collect();
        fs::write(&answers, lines.join("\n")).unwrap();
        let mut check = torch.command();
        torch.check(check.arg(scripts().join("checkers/partitions.py")).args([&traces, &answers]));
    }
}

#[test]
fn partitions_of_ddp_and_zero_have_the_categories_and_bytes_of_arithmetic() {
    Torch::run("2.11.0", |torch| {
        partitions_add_up(torch, &["ddp", "ddp_views", "zero", "zero_buckets", "zero_overlap"]);
    });
}

/// Is skipped unless `scripts/env programs more` has installed DeepSpeed.
#[test]
#[ignore = "scripts/check --deep runs it"]
fn partitions_of_deepspeed_have_the_categories_and_bytes_of_arithmetic() {
    Torch::run("2.11.0", |torch| {
        let environment = torch.python.ancestors().nth(3).unwrap().join("programs-more");
        if !environment.join(".list").exists() {
            return missing("DeepSpeed is not installed: scripts/env programs more");
        }
        let torch = Torch { version: torch.version.clone(), python: environment.join("bin/python") };
        for case in ["deepspeed1", "deepspeed2", "deepspeed3"] {
            partitions_add_up(&torch, &[case]);
        }
    });
}
