//! Runs real scripts on PyTorch's CUDA builds and the simulated GPU, and compares their traces with torch's
//! own memory statistics.
//!
//! Each test runs once for every torch of [`on_every_torch`]. If `scripts/env torch` has not installed a
//! version, the tests on it are skipped with a message; with `CI=true` they fail.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::common::torch::{
    CARD, NEWEST, Torch, TorchRow, exit_of, is_deep, memtrace, on_every_torch, preloads, read, scripts, text,
    traces,
};

on_every_torch![and_of_the_matrix:
    trace_of_a_gpt_agrees_with_torch_to_the_byte: "the hooks of the allocator and of modules",
    trace_of_a_convolutional_net_agrees_with_torch_to_the_byte,
    trace_of_odd_sizes_threads_and_ooms_agrees_with_torch_to_the_byte: "the allocator's rules, and its error",
    trace_of_blocks_held_by_other_streams_agrees_with_torch_to_the_byte,
    trace_of_graphs_and_pools_agrees_with_torch_to_the_byte: "the pools of graphs",
    sample_of_the_devices_follows_the_first_graph: "the call that makes graphs executable",
    trace_with_allocator_settings_agrees_with_torch_to_the_byte,
    trace_of_expandable_segments_agrees_with_torch_to_the_byte: "the calls that map segments",
    trace_of_the_cuda_malloc_async_pool_agrees_with_torchs_statistics: "CUDA 12's pool",
    trace_of_a_pluggable_allocator_has_its_blocks,
    trace_of_a_pool_with_a_pluggable_allocator_agrees_with_torch_to_the_byte: "the arguments of MemPool",
    ledger_adds_up_to_the_devices_own_figure: "CUDA 12's driver and libraries",
    ledger_of_the_host_tells_pinned_requests_from_rounding_and_cache: "the allocator of pinned memory",
    trace_without_caching_has_the_exact_request,
    verify_rejects_a_doctored_trace,
    nvtx_ranges_give_phase_module_and_step,
    nvtx_package_ranges_mean_the_same,
    ops_of_blocks_equal_the_profilers: "the layout of torch's callbacks",
    exit_of_every_kind_equals_that_of_the_untraced_program,
    out_folder_stays_empty_for_a_process_that_never_uses_cuda,
    csv_has_the_same_typed_columns_in_pandas_polars_and_duckdb,
    children_trace_into_files_of_their_own_or_leave_none,
    ranks_of_torchrun_have_traces_of_their_own: "NCCL 2.21",
    ipc_tensors_of_another_process_have_rows_and_no_bytes,
    sigkill_loses_no_event,
    faults_of_the_file_system_cost_the_trace_and_not_the_program,
    out_file_never_overwrites_a_file_of_somebody_else,
    profilers_debuggers_and_coverage_see_the_same_events_as_without_memtrace,
    state_of_torch_python_and_process_is_the_same_as_without_memtrace,
    collector_that_another_thread_turns_off_stays_off,
    thread_that_the_main_thread_waits_for_has_owners_and_steps,
    what_is_new_since_torch_2_11_agrees_with_torch_to_the_byte,
];

/// The newest PyTorch, on which `scripts/test` runs the tests of memtrace's hooks and of the allocator's rules. The
/// other tests have figures of the versions above.
mod torch_2_15_0 {
    macro_rules! on_newest {
        ($($name:ident),* $(,)?) => { $(#[test] fn $name() { super::Torch::run(super::NEWEST, super::$name); })* };
    }
    on_newest![
        trace_of_a_gpt_agrees_with_torch_to_the_byte,
        trace_of_odd_sizes_threads_and_ooms_agrees_with_torch_to_the_byte,
        trace_of_graphs_and_pools_agrees_with_torch_to_the_byte,
        trace_of_expandable_segments_agrees_with_torch_to_the_byte,
        what_is_new_since_torch_2_11_agrees_with_torch_to_the_byte,
        profilers_debuggers_and_coverage_see_the_same_events_as_without_memtrace,
    ];
}

/// The arguments of `observers/observers.py`: the program and the tools.
const OBSERVERS: [&str; 7] =
    ["training", "profile", "trace", "cprofile", "coverage", "debugger", "torch_profiler"];

fn profilers_debuggers_and_coverage_see_the_same_events_as_without_memtrace(torch: &Torch) {
    const SCRIPT: &str = "observers/observers.py";
    // Fixes the hash seed, so that sets have the same order in all runs.
    let fixed = ("PYTHONHASHSEED", "0");
    let expected = torch.untraced_on(CARD, &[], SCRIPT, &OBSERVERS, &[fixed]).expect_success().stdout();
    let mut all = vec![[fixed; 2], [fixed, ("MEMTRACE_OPS", "io")]];
    if is_deep() {
        all.push([fixed, ("MEMTRACE_STACKS", "python")]);
    }
    for settings in all {
        let run = torch.trace_on(CARD, &[], SCRIPT, &OBSERVERS, &settings).expect_success();
        assert_eq!(run.files().len(), OBSERVERS.len() - 1, "each tool has a trace: {}", run.stderr());
        for file in run.files() {
            let rows = read(&file);
            for event in ["tag", "io"] {
                let is_wanted = event == "tag" || settings[1].1 == "io";
                let has = rows.iter().any(|row| row.event == event);
                assert!(has || !is_wanted, "{settings:?}: no {event} row in {}", file.display());
            }
        }
        let (ours, expected) = (run.stdout(), expected.clone());
        let difference = ours.lines().zip(expected.lines()).find(|(ours, expected)| ours != expected);
        assert_eq!(difference, None, "{settings:?}: the first event that differs");
        assert_eq!(ours.lines().count(), expected.lines().count(), "{settings:?}");
    }
}

fn state_of_torch_python_and_process_is_the_same_as_without_memtrace(torch: &Torch) {
    const SCRIPT: &str = "observers/state.py";
    let fixed = ("PYTHONHASHSEED", "0");
    let expected = torch.untraced_on(CARD, &[], SCRIPT, &[], &[fixed]).expect_success().stdout();
    assert!(expected.lines().count() > 120 && expected.contains("start: sequence: 0\n"), "{expected}");
    for settings in [[fixed; 2], [fixed, ("MEMTRACE_OPS", "io")]] {
        let ours = torch.trace_on(CARD, &[], SCRIPT, &[], &settings).expect_success().stdout();
        let differences: Vec<_> = ours.lines().zip(expected.lines()).filter(|(a, b)| a != b).collect();
        assert!(differences.is_empty(), "{settings:?}: {differences:#?}");
        assert_eq!(ours.lines().count(), expected.lines().count(), "{settings:?}");
    }
}

fn collector_that_another_thread_turns_off_stays_off(torch: &Torch) {
    let run = torch.trace("threads/collector.py", &[]).expect_success();
    assert_eq!(run.stdout(), "enabled: False\n", "{}", run.stderr());
}

fn thread_that_the_main_thread_waits_for_has_owners_and_steps(torch: &Torch) {
    let run = torch.trace("threads/joined.py", &[]).expect_success();
    let summary = run.json("summary", &[]);
    assert_eq!(summary["processes"][0]["steps"], 5, "{summary:#}");
    let at_peak = &summary["processes"][0]["devices"][0]["at_peak_by_category_bytes"];
    for category in ["parameter", "gradient", "optimizer_state"] {
        assert!(at_peak[category].as_i64() > Some(2_000_000), "{category}: {at_peak}");
    }
    let run = torch.trace("threads/joined.py", &["oom"]).expect_success();
    assert!(run.stdout().contains("out of memory"), "{}", run.stderr());
    let rows = read(&run.file());
    let is_owned =
        |row: &TorchRow| row.event == "alloc" && row.module == "Sequential.2" && row.phase == "forward";
    assert!(rows.iter().any(is_owned));
}

fn trace_of_a_gpt_agrees_with_torch_to_the_byte(torch: &Torch) {
    torch.verify("truth/gpt.py");
}

fn trace_of_a_convolutional_net_agrees_with_torch_to_the_byte(torch: &Torch) {
    torch.verify("truth/conv.py");
}

fn trace_of_odd_sizes_threads_and_ooms_agrees_with_torch_to_the_byte(torch: &Torch) {
    torch.verify("truth/odd.py");
}

fn trace_of_blocks_held_by_other_streams_agrees_with_torch_to_the_byte(torch: &Torch) {
    torch.verify("truth/streams.py");
}

fn trace_of_graphs_and_pools_agrees_with_torch_to_the_byte(torch: &Torch) {
    let run = torch.trace("truth/graph.py", &[]).expect_success();
    torch.verify_file(&run.file(), &run.checkpoints);
    torch.check(memtrace().arg("check").arg(run.file()));
    // The trace must have pool ids, because without them the checker does not compare the pools.
    let meta = run.rows().into_iter().find(|row| row.event == "meta").unwrap();
    assert!(!meta.name.contains("pools are not distinguished"), "{}", meta.name);
}

/// Uses pools, settings and snapshots of torch 2.12 to 2.15 (docs/versions.md). An older torch skips what it lacks.
fn what_is_new_since_torch_2_11_agrees_with_torch_to_the_byte(torch: &Torch) {
    for conf in ["", "expandable_segments:True"] {
        let run = torch.trace_with("truth/newest.py", &[], &[("PYTORCH_ALLOC_CONF", conf)]).expect_success();
        torch.verify_file(&run.file(), &run.checkpoints);
        torch.check(memtrace().arg("check").arg(run.file()));
        // The annotated snapshot must have the same bytes as torch counted.
        let snapshot = run.folder().join("snapshot.pickle");
        let answer = crate::common::torch::json(&["summary"], &snapshot);
        let device = &answer["processes"][0]["devices"][0];
        let expected: i64 = run.stdout().lines().last().unwrap().parse().unwrap();
        assert_eq!(device["at_end_allocated_bytes"], expected, "{answer:#}");
    }
}

fn trace_with_allocator_settings_agrees_with_torch_to_the_byte(torch: &Torch) {
    for conf in ["roundup_power2_divisions:8", "max_split_size_mb:32,garbage_collection_threshold:0.5"] {
        let run =
            torch.trace_with("truth/odd.py", &[], &[("PYTORCH_CUDA_ALLOC_CONF", conf)]).expect_success();
        torch.verify_file(&run.file(), &run.checkpoints);
    }
}

fn trace_of_expandable_segments_agrees_with_torch_to_the_byte(torch: &Torch) {
    for script in ["truth/gpt.py", "truth/odd.py"] {
        let conf = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")];
        let run = torch.trace_with(script, &[], &conf).expect_success();
        torch.verify_file(&run.file(), &run.checkpoints);
        torch.check(memtrace().arg("check").arg(run.file()));
        let maps = run.rows().iter().filter(|row| row.event == "segment_map").count();
        assert!(maps > 0, "{script}: no segment was mapped");
    }
}

/// The driver takes memory for all graphs when the first one becomes executable, and no other call shows it.
fn sample_of_the_devices_follows_the_first_graph(torch: &Torch) {
    let rarely = [("MEMTRACE_SAMPLE_MS", "60000")];
    let run = torch.trace_with("truth/first_graph.py", &[], &rarely).expect_success();
    let rows = run.rows();
    let after = rows.iter().position(|row| row.name == "after the graph").unwrap();
    let samples = rows[..after].iter().filter(|row| row.event == "sample" && row.device == 0);
    let free = |row: &TorchRow| row.name.split(' ').find_map(|part| part.strip_prefix("free=")?.parse().ok());
    let free: Vec<i64> = samples.filter_map(free).collect();
    assert!(free[0] - free[free.len() - 1] >= 60 << 20, "{free:?}");
}

/// Compares the device samples with torch's statistics of its pool, and the sum of the blocks with the
/// tensors that the script holds.
fn trace_of_the_cuda_malloc_async_pool_agrees_with_torchs_statistics(torch: &Torch) {
    let conf = [("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")];
    let run = torch.trace_with("allocators/async_backend.py", &[], &conf).expect_success();
    torch.check(memtrace().arg("check").arg(run.file()));
    let (mut live, mut pool, mut points) = (0, String::new(), Vec::new());
    for row in run.rows() {
        match row.event.as_str() {
            "alloc" | "free" => live += row.delta_bytes,
            "sample" if row.name.starts_with("pool_reserved") => pool = row.name.clone(),
            "mark" if row.name.starts_with("point") => points.push(format!("{pool} {live}")),
            _ => {}
        }
    }
    let expected: Vec<String> = text(&run.output.stdout)
        .lines()
        .map(|line| {
            let [reserved, used, held] = line.split(' ').collect::<Vec<_>>()[..] else { panic!("{line}") };
            format!("pool_reserved={reserved} pool_used={used} {held}")
        })
        .collect();
    assert_eq!(expected.len(), 12);
    assert_eq!(points, expected);
    // Allocations during a capture must have 0 bytes: the graph owns the memory, and torch's statistics do
    // not include it.
    let rows = run.rows();
    let captured: Vec<(i64, i64)> = rows
        .iter()
        .filter(|row| row.event == "alloc" && row.requested_bytes >= 3 << 20 && row.delta_bytes == 0)
        .map(|row| (row.requested_bytes, row.delta_bytes))
        .collect();
    assert_eq!(captured, [(5 << 20, 0), (3 << 20, 0)]);
    let samples: Vec<&str> = rows
        .iter()
        .skip_while(|row| row.name != "captured")
        .filter(|row| row.event == "sample")
        .filter_map(|row| row.name.split("graphs=").nth(1))
        .collect();
    assert_eq!(samples.first(), Some(&"8388608"), "{samples:?}");
}

fn trace_of_a_pluggable_allocator_has_its_blocks(torch: &Torch) {
    let run = torch.trace("allocators/pluggable.py", &["current"]).expect_success();
    torch.check(memtrace().arg("check").arg(run.file()));
    let rows = run.rows();
    let blocks: Vec<&TorchRow> =
        rows.iter().filter(|row| row.event == "alloc" || row.event == "free").collect();
    let sizes: Vec<i64> =
        blocks.iter().filter(|row| row.delta_bytes > 0).map(|row| row.delta_bytes).collect();
    assert_eq!(sizes, (1..=20).map(|i| 1000 * i).collect::<Vec<_>>());
    assert!(blocks.iter().all(|row| row.op.starts_with("aten::empty") || row.delta_bytes < 0), "{blocks:?}");
    assert!(rows.iter().all(|row| row.event != "ext_alloc" && row.event != "segment_alloc"));
    // The script prints its own count of live bytes after ten of its frees.
    let after_ten: i64 = blocks.iter().take(30).map(|row| row.delta_bytes).sum();
    assert_eq!(text(&run.output.stdout), format!("{after_ten} 20010\n"));
    assert_eq!(blocks.iter().map(|row| row.delta_bytes).sum::<i64>(), 0);
}

fn trace_of_a_pool_with_a_pluggable_allocator_agrees_with_torch_to_the_byte(torch: &Torch) {
    let run = torch.trace("allocators/pluggable.py", &["pool"]).expect_success();
    // torch 2.1, which `scripts/test-matrix` tests, has no `MemPool`.
    if text(&run.output.stdout) == "no MemPool\n" {
        return;
    }
    torch.verify_file(&run.file(), &run.checkpoints);
    let rows = run.rows();
    let mine: i64 = rows
        .iter()
        .filter(|row| row.event == "segment_alloc" && row.source == "libmine.so")
        .map(|row| row.delta_bytes)
        .sum();
    assert!(text(&run.output.stdout).starts_with(&format!("{mine} ")), "{mine}");
}

fn ledger_of_the_host_tells_pinned_requests_from_rounding_and_cache(torch: &Torch) {
    const MIB: i64 = 1 << 20;
    let out = TempDir::new().unwrap();
    let output = torch.traced_command(out.path()).arg(scripts().join("ledger/pinned.py")).output().unwrap();
    assert_eq!(exit_of(&output), 0, "{}", text(&output.stderr));
    let rows = read(&traces(out.path())[0]);
    // Each of the eight blocks has 64 MiB for a request of 33.
    let sizes = |row: &TorchRow| (row.requested_bytes, row.delta_bytes);
    let taken: Vec<_> = rows.iter().filter(|row| row.event == "host_alloc").map(sizes).collect();
    assert_eq!(taken, [(33 * MIB, 64 * MIB); 8]);
    let at = format!("{}ns", rows.iter().find(|row| row.name == "flushed").unwrap().ts_ns);
    let answer = memtrace().arg("ledger").arg(out.path()).args(["--host", "--json", "--at", &at]).output();
    let answer: serde_json::Value = serde_json::from_slice(&answer.unwrap().stdout).unwrap();
    let rows = answer["host"][0]["rows"].as_array().unwrap();
    let held =
        |name: &str| rows.iter().find(|row| row["held_by"] == name).map(|row| row["rss_bytes"].clone());
    assert_eq!(held("pinned"), Some((4 * 33 * MIB + 40 * MIB).into()), "{answer:#}");
    assert_eq!(held("pinned: rounding"), Some((4 * 31 * MIB + 24 * MIB).into()));
    assert_eq!(held("pinned: cached"), Some((3 * 64 * MIB).into()));
}

fn ledger_adds_up_to_the_devices_own_figure(torch: &Torch) {
    const GIB: i64 = 1 << 30;
    let out = TempDir::new().unwrap();
    let mut command = torch.traced_command_on("h100-80g,others=2g", out.path());
    let output = command.arg(scripts().join("ledger/whole_device.py")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let figures: Vec<i64> =
        text(&output.stdout).lines().next().unwrap().split(' ').map(|n| n.parse().unwrap()).collect();
    let [total, free, allocated, reserved] = figures[..] else { panic!("{figures:?}") };
    let mark = read(&traces(out.path())[0]).into_iter().find(|row| row.name == "counted").unwrap();
    let at = format!("{}ns", mark.ts_ns);
    let answer = memtrace().arg("ledger").arg(out.path()).args(["--json", "--at", &at]).output().unwrap();
    let answer: serde_json::Value = serde_json::from_slice(&answer.stdout).unwrap();
    let device = &answer["devices"][0];
    assert_eq!(device["total_bytes"], total);
    assert_eq!(device["used_bytes"], total - free, "{device:#}");
    let rows = device["rows"].as_array().unwrap();
    let of = |group: &str| -> i64 {
        rows.iter().filter(|row| row["group"] == group).map(|row| row["bytes"].as_i64().unwrap()).sum()
    };
    let held = |name: &str| {
        rows.iter().find(|row| row["held_by"] == name).map_or(0, |row| row["bytes"].as_i64().unwrap())
    };
    assert_eq!(
        (of("torch"), of("torch") + of("cache") - held("the driver's pool: cached and free")),
        (allocated, reserved)
    );
    assert_eq!(of("others"), 2 * GIB);
    // On Hopper, each of the two handles of cuBLAS takes 64 MiB, and 129 KiB of one page of 2 MiB.
    let small = 2 * (129 << 10);
    assert_eq!(of("library"), ((300 + 40 + 10 + 64 + 8 + 2 * 64) << 20) + small);
    assert_eq!(held("CUDA graphs' own memory"), 8 << 20);
    assert_eq!(held("the driver's pool: cached and free"), 22 << 20);
    // The context is the card's figure, a page of 2 MiB for the instantiated graph, what the first graph takes
    // on Hopper, and the rest of the handles' page. Nothing may be unexplained.
    let context = ((612 + 2 + 68 + 2) << 20) - small;
    assert_eq!((of("context"), of("unexplained")), (context, 0), "{device:#}");
    for category in ["parameter", "gradient"] {
        assert_eq!(held(&format!("torch: {category}")), (2048 * 2048 + 2048) * 4, "{device:#}");
    }
    // The report as text must name other processes.
    let shown = memtrace().arg("ledger").arg(out.path()).output().unwrap();
    assert!(text(&shown.stdout).contains("other processes"), "{}", text(&shown.stdout));
}

fn trace_without_caching_has_the_exact_request(torch: &Torch) {
    // Neither allocator reports blocks, so the rows come from its CUDA calls.
    for (name, value) in
        [("PYTORCH_NO_CUDA_MEMORY_CACHING", "1"), ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")]
    {
        let run = torch.trace_with("processes/ends.py", &["normal"], &[(name, value)]).expect_success();
        let rows = run.rows();
        let taken: Vec<&TorchRow> = rows.iter().filter(|row| row.event == "alloc").collect();
        assert_eq!(taken.len(), 50, "{name}");
        for (index, row) in taken.iter().enumerate() {
            let asked = 1000 * (index as i64 + 1);
            assert_eq!((row.requested_bytes, row.delta_bytes), (asked, asked), "{name}: {row:?}");
        }
    }
}

/// Changes a trace slightly in several ways. `verify` must notice each change: a checker that cannot fail
/// proves nothing.
fn verify_rejects_a_doctored_trace(torch: &Torch) {
    let run = torch.trace("truth/gpt.py", &[]).expect_success();
    let text = std::fs::read_to_string(run.file()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let header: Vec<&str> = lines[0].split(',').collect();
    let column = |name| header.iter().position(|column| *column == name).unwrap();
    let last = |event: &str| lines.iter().rposition(|line| line.contains(&format!(",{event},"))).unwrap();
    // Adds to a column of a line, which must have no quotes.
    let plus = |line: usize, name, more: i64| {
        let mut fields: Vec<String> = lines[line].split(',').map(str::to_owned).collect();
        let field = &mut fields[column(name)];
        *field = (field.parse::<i64>().unwrap() + more).to_string();
        (line, fields.join(","))
    };
    let lies = [
        plus(last("alloc"), "delta_bytes", 512),
        plus(last("alloc"), "requested_bytes", -1),
        plus(last("free"), "alloc_id", 1),
        plus(last("free"), "allocated_bytes", 512),
        plus(last("segment_alloc"), "reserved_bytes", 512),
        plus(last("segment_free"), "addr", 512),
        plus(last("op"), "active_bytes", 512),
        plus(last("free"), "ts_ns", -1_000_000_000),
        plus(last("mark"), "seq", 1),
        (last("free"), lines[0].to_owned()),
    ];
    let doctored = run.dir().join("doctored.txt");
    for (line, lie) in lies {
        let mut lines = lines.clone();
        lines[line] = &lie;
        std::fs::write(&doctored, lines.join("\n") + "\n").unwrap();
        let verify = scripts().join("checkers/verify.py");
        let output = torch.command().arg(verify).arg(&doctored).arg(&run.checkpoints).output().unwrap();
        assert!(!output.status.success(), "not seen: {lie}");
    }
}

fn nvtx_ranges_give_phase_module_and_step(torch: &Torch) {
    let run = torch.trace("ranges/torch_nvtx.py", &[]).expect_success();
    let rows = run.rows();

    let owner = |count| owner(&rows, count);
    // Only the step of 101 is checked: other tests check the op and the module of a block outside of all
    // ranges.
    assert_eq!(owner(101).3, -1);
    assert_eq!(owner(102).0, "forward");
    assert_eq!((owner(103).0, owner(103).1), ("forward", "encoder.layer.0"));
    assert_eq!((owner(104).0, owner(104).1), ("forward", "encoder"));
    assert_eq!((owner(105).0, owner(105).1), ("forward", "GPT.h.3.mlp"));
    assert_ne!(owner(106).0, "forward");
    assert_eq!(owner(107).0, "optimizer");
    let (phase, _, op, step) = owner(108);
    assert_eq!((phase, op, step), ("warm up", "fused_thing", 7));
    assert_ne!(owner(109).0, "warm up");

    // Each range must open and close, and the text of a mark must keep its comma and its quotes.
    let mut open: BTreeMap<&str, i64> = BTreeMap::new();
    for row in &rows {
        match row.event.as_str() {
            "range_begin" => *open.entry(&row.name).or_default() += 1,
            "range_end" => *open.entry(&row.name).or_default() -= 1,
            _ => {}
        }
    }
    assert!(open.contains_key("layer.0") && open.contains_key("optimizer"), "{open:?}");
    assert!(open.values().all(|count| *count == 0), "{open:?}");
    let marks: Vec<&str> =
        rows.iter().filter(|row| row.event == "mark").map(|row| row.name.as_str()).collect();
    assert!(marks.contains(&"here: a mark, with a comma and \"quotes\""), "{marks:?}");

    // Blocks that autograd's own thread allocates must have the phase and the step of the backward range.
    let main_thread = rows.iter().find(|row| row.event == "mark").unwrap().tid;
    let backward: Vec<&TorchRow> =
        rows.iter().filter(|row| row.event == "alloc" && row.tid != main_thread).collect();
    assert!(!backward.is_empty(), "autograd allocated on no thread of its own");
    for row in backward {
        assert_eq!((row.phase.as_str(), row.step), ("backward", 8), "{row:?}");
    }
}

fn nvtx_package_ranges_mean_the_same(torch: &Torch) {
    let run = torch.trace("ranges/nvtx_package.py", &[]).expect_success();
    let rows = run.rows();
    let owner = |count| owner(&rows, count);
    assert_eq!(owner(201).0, "forward");
    assert_eq!(owner(202).1, "GPT.h.1");
    assert_eq!(owner(203).3, 12);
    assert_eq!(owner(204).0, "backward");
    assert_eq!(owner(205).1, "outer.inner");
    assert_eq!(owner(206).0, "évaluation");
    assert!(owner(207).2.starts_with("aten::empty"), "{:?}", owner(207));
    assert!(rows.iter().any(|row| row.event == "mark" && row.name == "a mark of the package"));
}

fn ops_of_blocks_equal_the_profilers(torch: &Torch) {
    let run = torch.trace("owners/profiled_ops.py", &[]).expect_success();
    let rows = run.rows();
    let at = |name| rows.iter().position(|row| row.event == "mark" && row.name == name).unwrap();
    let ours: Vec<String> = rows[at("profiled:begin")..at("profiled:end")]
        .iter()
        .filter(|row| row.event == "alloc" && row.device >= 0)
        .map(|row| format!("{} {} {}", row.addr, row.delta_bytes, row.op))
        .collect();
    let profiled = text(&run.output.stdout);
    let profiled: Vec<&str> = profiled.lines().collect();
    assert!(profiled.len() > 100, "the profiler named {} blocks", profiled.len());
    let differ: Vec<_> =
        ours.iter().zip(&profiled).filter(|(ours, profiled)| ours != profiled).take(10).collect();
    assert!(differ.is_empty(), "ours, the profiler's: {differ:#?}");
    assert_eq!(ours.len(), profiled.len());
}

/// Returns the phase, module, op and step of the block of `count` * 512 bytes.
fn owner(rows: &[TorchRow], count: i64) -> (&str, &str, &str, i64) {
    let row = rows
        .iter()
        .find(|row| row.event == "alloc" && row.delta_bytes == count * 512)
        .unwrap_or_else(|| panic!("no block of {count} * 512 bytes"));
    (&row.phase, &row.module, &row.op, row.step)
}

fn exit_of_every_kind_equals_that_of_the_untraced_program(torch: &Torch) {
    const WAYS: [&str; 9] = [
        "normal",
        "exit 3",
        "exception",
        "caught oom",
        "killing oom",
        "_exit",
        "abort",
        "terminated",
        "thread",
    ];
    let folder = TempDir::new().unwrap();
    let arguments = [&["--each", folder.path().to_str().unwrap()], &WAYS[..]].concat();
    let untraced = text(&torch.untraced("processes/ends.py", &arguments).stdout);
    assert_eq!(untraced.lines().count(), WAYS.len(), "{untraced}");
    for (how, line) in WAYS.into_iter().zip(untraced.lines()) {
        let status = line.strip_prefix(how).and_then(|rest| rest.strip_prefix('=')?.parse().ok());
        let printed =
            |ending: &str| std::fs::read_to_string(folder.path().join(format!("{how}.{ending}"))).unwrap();
        let run = torch.trace("processes/ends.py", &[how]);
        assert_eq!(Some(exit_of(&run.output)), status, "{how}: {}", text(&run.output.stderr));
        assert_eq!(text(&run.output.stdout), printed("out"), "{how}");
        // Checks only that stderr has every line of the untraced run, because memtrace may add lines (the
        // owners at an OOM).
        let messages = text(&run.output.stderr);
        for line in printed("err").lines() {
            assert!(messages.lines().any(|other| other == line), "{how}: stderr lacks {line:?}:\n{messages}");
        }
        assert_eq!(run.files().len(), 1, "{how}: {messages}");
        let ooms = run.rows().iter().filter(|row| row.event == "oom").count();
        assert_eq!(ooms, usize::from(how.ends_with("oom")), "{how}");
    }
}

fn out_folder_stays_empty_for_a_process_that_never_uses_cuda(torch: &Torch) {
    let out = TempDir::new().unwrap();
    let mut command = torch.traced_command(out.path());
    command.args(["-c", "import torch; print(torch.ones(3).sum().item())"]);
    let output = command.output().unwrap();
    assert_eq!(text(&output.stdout), "3.0\n", "{}", text(&output.stderr));
    assert_eq!(traces(out.path()), Vec::<PathBuf>::new());
}

fn csv_has_the_same_typed_columns_in_pandas_polars_and_duckdb(torch: &Torch) {
    let run = torch.trace("ranges/torch_nvtx.py", &[]).expect_success();
    let peak =
        memtrace().args(["peak", "--by", "phase", "--as-of", "--json"]).arg(run.file()).output().unwrap();
    let answer = TempDir::new().unwrap();
    let answer = answer.path().join("peak.json");
    std::fs::write(&answer, peak.stdout).unwrap();
    torch.checker("csv_loaders", &[&run.file(), &answer]);
}

fn children_trace_into_files_of_their_own_or_leave_none(torch: &Torch) {
    for (how, files, stdout) in [
        ("fork", 1, "0\n"),
        ("fork first", 2, "child 15360\n0\n"),
        ("fork while threads allocate", 1, "{0}\n"),
        ("spawn", 3, "child 15360\nchild 15360\n[0, 0]\n"),
        ("forkserver", 3, "child 15360\nchild 15360\n[0, 0]\n"),
        ("subprocess", 2, "b'child 15360\\n'\n"),
        ("shell", 1, "0\n"),
        ("loader", 1, "64\n"),
    ] {
        let run = torch.trace("processes/children.py", &[how]).expect_success();
        assert_eq!(text(&run.output.stdout), stdout, "{how}");
        let found = run.files();
        assert_eq!(found.len(), files, "{how}: {found:?}\n{}", text(&run.output.stderr));
        let mark = found.iter().filter(|file| {
            read(file).iter().any(|row| {
                row.event == "mark"
                    && !["script", "first_use", "gpu_process", "model_fact"].contains(&row.api.as_str())
            })
        });
        let [parent] = mark.collect::<Vec<_>>()[..] else { panic!("{how}: one trace has the mark") };
        torch.verify_file(parent, &run.checkpoints);
        for file in &found {
            torch.check(memtrace().arg("check").arg(file));
        }
    }
}

fn ranks_of_torchrun_have_traces_of_their_own(torch: &Torch) {
    let out = TempDir::new().unwrap();
    let mut command = torch.traced_command_on("2xh100-80g", out.path());
    command.args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]);
    let output = command.arg(scripts().join("processes/ranks.py")).output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    let files = traces(out.path());
    assert_eq!(files.len(), 2, "{files:?}");
    for (rank, file) in files.iter().enumerate() {
        assert!(file.to_string_lossy().contains(&format!(".r{rank}.")), "{files:?}");
        let rows = read(file);
        let taken: Vec<_> = rows.iter().filter(|row| row.event == "alloc").collect();
        assert_eq!(taken.len(), 1);
        assert_eq!((taken[0].device, taken[0].rank), (rank as i64, rank as i64));
        assert_eq!(taken[0].delta_bytes, 512 * (rank as i64 + 1));
        assert!(rows[0].name.contains(r#""world_size":2"#), "{}", rows[0].name);
        // Until the communicator is destroyed, NCCL keeps a ring of 24 channels with 10 and 2 MiB each, three
        // allocations for each of 32 channels, and two for the communicator. NCCL 2.28 adds allocations for
        // multicast, and NCCL 2.21 (torch 2.6) a shared buffer of 256 MiB, but one allocation less for the
        // communicator.
        let (count, mib) = if torch.version == "2.6.0" { (146, 738) } else { (163, 518) };
        let nccl: Vec<&TorchRow> = rows.iter().filter(|row| row.source == "libnccl.so.2").collect();
        let taken: Vec<i64> = nccl.iter().map(|row| row.delta_bytes).filter(|bytes| *bytes > 0).collect();
        assert_eq!((taken.len(), taken.iter().sum::<i64>()), (count, mib << 20));
        assert_eq!(nccl.iter().map(|row| row.delta_bytes).sum::<i64>(), 0);
        let mark = rows.iter().find(|row| row.name == "connected").unwrap();
        let at = format!("{}ns", mark.ts_ns);
        let answer = memtrace().arg("ledger").arg(file).args(["--json", "--at", &at]).output().unwrap();
        let answer: serde_json::Value = serde_json::from_slice(&answer.stdout).unwrap();
        let lines = answer["devices"][0]["rows"].as_array().unwrap();
        let communicator = format!("NCCL 1: rank {rank} of 2");
        let line = lines.iter().find(|row| row["held_by"] == communicator.as_str()).unwrap();
        assert_eq!((line["bytes"].as_i64(), line["blocks"].as_i64()), (Some(mib << 20), Some(count as i64)));
    }
}

fn ipc_tensors_of_another_process_have_rows_and_no_bytes(torch: &Torch) {
    let run = torch.trace("processes/ipc_tensors.py", &[]).expect_success();
    torch.check(memtrace().arg("check").arg(run.dir()));
    let figures: Vec<i64> =
        text(&run.output.stdout).split_whitespace().map(|word| word.parse().unwrap()).collect();
    let [allocated, reserved, kept, kept_reserved] = figures[..] else { panic!("{figures:?}") };
    let mut seen = Vec::new();
    for file in run.files() {
        let rows = read(&file);
        let opened: Vec<&TorchRow> =
            rows.iter().filter(|row| row.event == "ext_alloc" && row.source == "libc10_cuda.so").collect();
        assert!(opened.iter().all(|row| (row.delta_bytes, row.requested_bytes) == (0, 0)), "{opened:?}");
        // The peaks of the process's own memory, without the opened tensors, must equal torch's figures.
        let most = |events: [&str; 2]| {
            let own = rows.iter().filter(|row| events.contains(&row.event.as_str()));
            let totals = own.scan(0, |total, row| {
                *total += row.delta_bytes;
                Some(*total)
            });
            totals.max().unwrap()
        };
        seen.push((opened.len(), most(["alloc", "free"]), most(["segment_alloc", "segment_free"])));
    }
    seen.sort_unstable();
    // One process sent two tensors and received one; the other received two.
    assert_eq!(seen, [(1, kept, kept_reserved), (2, allocated, reserved)]);
}

fn sigkill_loses_no_event(torch: &Torch) {
    const ROUNDS: usize = 20; // `scripts/check --deep` runs `scripts/kill-rounds` with a thousand
    let run = torch.trace("processes/kill_rounds.py", &[&ROUNDS.to_string()]).expect_success();
    torch.check(memtrace().arg("check").arg("--repair").arg(run.dir()));
    let files = run.files();
    let printed = text(&run.output.stdout);
    assert_eq!(printed.lines().count(), ROUNDS);
    for line in printed.lines() {
        let (pid, count) = line.split_once(' ').unwrap();
        let count: usize = count.parse().unwrap();
        let file = files.iter().find(|file| file.to_string_lossy().ends_with(&format!(".{pid}.csv")));
        let rows = read(file.unwrap_or_else(|| panic!("process {pid} left no trace: {files:?}")));
        let taken: Vec<i64> =
            rows.iter().filter(|row| row.event == "alloc").map(|row| row.delta_bytes).collect();
        // The process may have been killed between an allocation and its report, so the trace may have one
        // block more.
        assert!((count..=count + 1).contains(&taken.len()), "process {pid}: {count}, {}", taken.len());
        for (index, bytes) in taken.iter().enumerate() {
            assert_eq!(*bytes, 512 * (index as i64 % 1000 + 1), "process {pid}, block {index}");
        }
    }
}

fn faults_of_the_file_system_cost_the_trace_and_not_the_program(torch: &Torch) {
    let untraced = text(&torch.untraced("processes/faults.py", &["none"]).stdout);
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "not a folder").unwrap();
    let check = |out: &Path| {
        let output = memtrace().arg("check").arg(out).output().unwrap();
        assert!(output.status.success(), "{}: {}", out.display(), text(&output.stdout));
    };
    let unharmed = |what: &str, output: &Output| {
        let stderr = text(&output.stderr);
        assert!(output.status.success(), "{what}: {}\n{stderr}", output.status);
        assert!(text(&output.stdout).contains(&untraced), "{what}:\n{}", text(&output.stdout));
        assert!(stderr.lines().any(|line| line.starts_with("memtrace:")), "{what}: not a word:\n{stderr}");
    };
    // Two paths where no folder can be created, and a file system that accepts no files.
    for out in [file.join("below"), PathBuf::from("/proc/memtrace"), PathBuf::from("/sys")] {
        let mut command = torch.preloaded_command(&out);
        let output = command.arg(scripts().join("processes/faults.py")).arg("none").output().unwrap();
        unharmed(&out.display().to_string(), &output);
    }
    for how in ["file size limit", "vanished folder"] {
        let mut command = torch.preloaded_command(&dir.path().join(how));
        unharmed(how, &command.arg(scripts().join("processes/faults.py")).arg(how).output().unwrap());
    }
    // Simulates a full disk: a tmpfs of 256 KiB in a new mount namespace. With a full /dev/shm, the journal needs another place.
    let full_disk = "mount -t tmpfs -o size=256k tmpfs \"$MEMTRACE_OUT\"";
    let full_memory = "mount -t tmpfs -o size=64k tmpfs /dev/shm && head -c 65536 /dev/zero >/dev/shm/all";
    for (name, fault) in [("full disk", full_disk), ("full shared memory", full_memory)] {
        let out = dir.path().join(name);
        std::fs::create_dir(&out).unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "--map-root-user", "sh", "-c"]);
        command.arg(format!("{fault} && exec \"$@\"")).arg("sh");
        let program = torch.preloaded_command(&out);
        command.arg("env").arg(format!("LD_PRELOAD={}", preloads())).arg(program.get_program());
        command.arg(scripts().join("processes/faults.py")).arg("none");
        for (name, value) in program.get_envs().filter(|(name, _)| *name != "LD_PRELOAD") {
            command.env(name, value.unwrap_or_default());
        }
        unharmed(name, &command.output().unwrap());
        if fault == full_memory {
            check(&out);
        }
    }
    // New files take the names of the libraries while they are in use.
    let out = dir.path().join("replaced");
    let copies: Vec<PathBuf> = preloads()
        .split([' ', ':'])
        .map(|library| {
            let copy = dir.path().join(Path::new(library).file_name().unwrap());
            std::fs::copy(library, &copy).unwrap();
            copy
        })
        .collect();
    let names: Vec<String> = copies.iter().map(|copy| copy.display().to_string()).collect();
    let mut command = torch.preloaded_command(&out);
    command.env("LD_PRELOAD", names.join(" ")).arg(scripts().join("processes/faults.py"));
    let output = command.arg("replaced libraries").args(&copies).output().unwrap();
    assert!(output.status.success(), "{}\n{}", output.status, text(&output.stderr));
    assert_eq!(text(&output.stdout), untraced);
    assert!(copies.iter().all(|copy| std::fs::read(copy).unwrap() == b"not a library"));
    check(&out);
}

fn out_file_never_overwrites_a_file_of_somebody_else(torch: &Torch) {
    use std::os::unix::fs::PermissionsExt;
    let dir = TempDir::new().unwrap();
    let victim = dir.path().join("victim");
    std::fs::write(&victim, "precious\n").unwrap();
    for how in ["planted link", "planted file"] {
        let out = dir.path().join(how);
        let mut command = torch.preloaded_command(&out);
        let output =
            command.arg(scripts().join("processes/faults.py")).arg(how).arg(&victim).output().unwrap();
        assert!(output.status.success(), "{how}: {}", text(&output.stderr));
        assert_eq!(std::fs::read_to_string(&victim).unwrap(), "precious\n");
        // The planted file must be unchanged, and the trace next to it must be readable by the user alone.
        let (planted, ours): (Vec<_>, Vec<_>) = traces(&out).into_iter().partition(|file| {
            file.is_symlink() || std::fs::read_to_string(file).unwrap() == "somebody else's\n"
        });
        assert_eq!(planted.len(), 1, "{how}: {ours:?}");
        for file in ours {
            let mode = std::fs::metadata(&file).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", file.display());
        }
    }
}
