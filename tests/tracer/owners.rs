//! The owner of every byte. Scripts of every common kind run without marks on the simulated GPU, and their
//! traces are compared with torch's own knowledge of their tensors.
//!
//! Each test runs once for every torch of [`on_every_torch`]. If `scripts/env torch` has not installed a
//! version, the tests on it are skipped with a message; with `CI=true` they fail.

use std::path::PathBuf;
use std::process::Output;

const CASES: &str = "owners/owner_cases.py";
const MODELS: [&str; 8] = ["gpt", "resnet", "llama", "bert", "lstm", "tied", "gan", "unet"];
const FRAMEWORKS: &str = "owners/owner_frameworks.py";
/// `accelerate launch` of one process.
const ACCELERATE: &[&str] = &[
    "-m",
    "accelerate.commands.launch",
    "--num_processes=1",
    "--num_machines=1",
    "--mixed_precision=bf16",
    "--dynamo_backend=no",
];
/// `torchrun` of two ranks.
const TORCHRUN: &[&str] = &["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"];
const SMALL_WORKSPACES: &[(&str, &str)] =
    &[("CUBLAS_WORKSPACE_CONFIG", ":16:8"), ("CUBLASLT_WORKSPACE_SIZE", "0")];

use crate::common::pages;
use crate::common::torch::{CARD, Run, Torch, TorchRow, is_deep, memtrace, on_every_torch, read, text};

on_every_torch![
    owners_of_eight_models_cover_every_byte_and_agree_with_torch_per_module: "the hooks of autograd and optimizers",
    owners_and_stacks_hold_in_hard_cases_and_leave_the_output_unchanged,
    wrappers_are_stripped_or_kept_and_compiled_models_keep_their_graphs: "the classes of wrappers and of compiled models",
    owners_of_parameters_are_shown_when_loading_the_model_runs_out_of_memory,
    modules_are_recorded_in_isolated_spawned_and_bare_interpreters,
    python_errors_of_the_tracer_are_logged_at_debug_and_counted_in_the_end_row,
    owners_hold_under_fsdp_peft_and_lightning_and_leave_the_output_unchanged: "the scopes and classes of FSDP",
    modules_are_recorded_under_launchers_notebooks_and_fork_servers,
    track_external_tensors_have_categories_and_the_errors_of_mem_tracker,
    modules_0_records_no_modules_and_no_tags,
    owners_category_totals_equal_mem_trackers,
    owners_of_caches_attributes_workspaces_and_graphs_have_their_categories,
    owners_of_buckets_and_of_a_scripts_own_tensors_have_their_categories,
    owners_of_an_optimizers_step_are_temporary_unless_they_outlive_it,
    owners_of_what_an_optimizer_holds_are_known_from_its_first_step,
    leaks_of_a_server_are_found_by_its_forwards,
    steps_follow_one_optimizer_object_or_updates_without_an_optimizer,
    serving_adds_up_to_what_the_device_has_in_use,
    serving_leaves_sleeping_memory_out_of_its_sum,
];

fn owners_of_eight_models_cover_every_byte_and_agree_with_torch_per_module(torch: &Torch) {
    // Uses small cuBLAS workspaces: the default ones are larger than these models, and would hide errors.
    let models = if torch.is_tested_in_brief() { &MODELS[..4] } else { &MODELS[..] };
    let run = torch.trace_with("owners/owner_models.py", models, SMALL_WORKSPACES);
    assert!(run.output.status.success(), "{}", text(&run.output.stderr));
    let printed = text(&run.output.stdout);
    assert_eq!(printed.lines().count(), models.len(), "{printed}");
    for line in printed.lines() {
        let (model, pid) = line.split_once(' ').unwrap();
        let tracker = run.folder().join(format!("{model}.jsonl"));
        eprint!("{model}: ");
        torch.checker("owner_totals", &[&run.trace_of(pid), &tracker]);
    }
}

fn owners_and_stacks_hold_in_hard_cases_and_leave_the_output_unchanged(torch: &Torch) {
    let cases = [
        "exception",
        "outside_root",
        "shared",
        "roots",
        "uncalled",
        "late",
        "checkpoint_reentrant",
        "checkpoint_free",
        "custom_function",
        "double_backward",
        "accumulation",
        "optimizer_in_backward",
        "manual_sgd",
        "inference",
        "threads",
        "modes",
        "odd_modules",
        "own_calls",
        "profilers",
    ];
    same_with_and_without(torch, CASES, &cases, &[("MEMTRACE_STACKS", "python")]);
}

fn wrappers_are_stripped_or_kept_and_compiled_models_keep_their_graphs(torch: &Torch) {
    same_with_and_without(torch, CASES, &["compiled", "somebody_elses_calls", "distributed"], &[]);
    if !torch.is_tested_in_brief() {
        let run = torch.trace_with("owners/owner_cases.py", &["distributed"], &[("MEMTRACE_WRAPPERS", "1")]);
        torch.checker("expected_owners", &[run.folder()]);
    }
}

fn owners_of_parameters_are_shown_when_loading_the_model_runs_out_of_memory(torch: &Torch) {
    let run = same_with_and_without(torch, CASES, &["alone", "loading"], &[]);
    assert_eq!(run.output.status.code(), Some(1));
    let messages = text(&run.output.stderr);
    assert!(messages.contains("OutOfMemoryError"));
    // memtrace's own messages at the OOM must name the largest owners, too: parameters of the model.
    let ours: Vec<&str> = messages.lines().filter(|line| line.starts_with("memtrace:")).collect();
    assert!(ours.iter().any(|line| line.contains("for: parameter")), "{ours:?}");
    assert!(ours.iter().any(|line| line.contains("Sequential.")), "{ours:?}");
}

fn modules_are_recorded_in_isolated_spawned_and_bare_interpreters(torch: &Torch) {
    for options in [&["-I"][..], &["-S", "-E"], &["-W", "error"]] {
        let run = torch.trace_on(CARD, options, "owners/owner_cases.py", &["alone", "plain"], &[]);
        assert_eq!(text(&run.output.stdout), "plain\n", "{options:?}: {}", text(&run.output.stderr));
        torch.checker("expected_owners", &[run.folder()]);
    }
    let run = torch.trace("owners/owner_cases.py", &["spawn"]);
    assert_eq!(text(&run.output.stdout), "plain\n", "{}", text(&run.output.stderr));
    torch.checker("expected_owners", &[run.folder()]);
}

fn python_errors_of_the_tracer_are_logged_at_debug_and_counted_in_the_end_row(torch: &Torch) {
    let run = |log| {
        let run =
            torch.trace_with("owners/failing_modules.py", &[], &[("MEMTRACE_LOG", log)]).expect_success();
        assert_eq!(text(&run.output.stdout), "True\n", "{}", text(&run.output.stderr));
        let trace = std::fs::read_to_string(run.file()).unwrap();
        let end = trace.lines().last().unwrap();
        let errors =
            end.split(' ').find_map(|word| word.strip_prefix("python_errors=")).map(str::parse::<u32>);
        assert!(errors.is_some_and(|errors| errors.unwrap() >= 3), "{end}");
        text(&run.output.stderr)
    };
    let logged = run("debug");
    let lines = |what: &str| logged.lines().filter(|line| line.contains(what)).count();
    assert_eq!(lines("Refusal: parameters are not listed today ("), 1, "{logged}");
    assert_eq!(lines("Unformattable: (no text: ValueError)"), 1, "{logged}");
    assert!(!run("warn").contains("Refusal"));
    // The trace of a run without errors must not mention errors.
    let run = torch.trace("owners/owner_cases.py", &["alone", "plain"]);
    assert!(!std::fs::read_to_string(run.file()).unwrap().contains("python_errors"));
}

fn owners_hold_under_fsdp_peft_and_lightning_and_leave_the_output_unchanged(torch: &Torch) {
    same_with_and_without(
        torch,
        FRAMEWORKS,
        &["fsdp1", "peft", "lightning", "fabric"],
        &[("MEMTRACE_STACKS", "python")],
    );
    if is_deep() {
        let run = torch.trace_with(FRAMEWORKS, &["peft"], &[("MEMTRACE_WRAPPERS", "1")]);
        torch.checker("expected_owners", &[run.folder()]);
    }
}

fn modules_are_recorded_under_launchers_notebooks_and_fork_servers(torch: &Torch) {
    same_when_launched(torch, CARD, ACCELERATE, FRAMEWORKS, &["alone", "accelerated"], &[]);
    let run = same_when_launched(torch, "2xh100-80g", TORCHRUN, FRAMEWORKS, &["alone", "ranks"], &[]);
    // Each rank has half of the weight and of the bias that are trained.
    let half = 4 * (192 * 192 + 192) / 2;
    let rows = run.files().iter().flat_map(|file| read(file)).collect::<Vec<_>>();
    let trained = rows.iter().filter(|row| row.name.starts_with("trained="));
    let trained: Vec<&str> = trained.map(|row| row.name.as_str()).collect();
    let expected = format!("trained={half} Halves");
    assert_eq!(trained, [&*expected, &*expected]);
    // Other tests fork, too.
    for how in ["notebook", "forkserver", "fork"].into_iter().filter(|how| *how != "fork" || is_deep()) {
        let run = torch.trace_with(FRAMEWORKS, &[how], &[("MEMTRACE_STACKS", "python")]).expect_success();
        assert_eq!(text(&run.output.stdout).trim(), "a cell ran");
        torch.checker("expected_owners", &[run.folder()]);
    }
}

fn track_external_tensors_have_categories_and_the_errors_of_mem_tracker(torch: &Torch) {
    same_with_and_without(torch, CASES, &["registered"], &[]);
}

fn modules_0_records_no_modules_and_no_tags(torch: &Torch) {
    let run = torch.trace_with("owners/owner_cases.py", &["alone", "plain"], &[("MEMTRACE_MODULES", "0")]);
    assert_eq!(text(&run.output.stdout), "plain\n", "{}", text(&run.output.stderr));
    let mut reader = csv::Reader::from_path(run.file()).unwrap();
    let columns = reader.headers().unwrap().clone();
    let column = |name| columns.iter().position(|column| column == name).unwrap();
    let (event, module) = (column("event"), column("module"));
    for row in reader.records().map(Result::unwrap) {
        assert_ne!(&row[event], "tag");
        assert_eq!(&row[module], "(none)");
    }
}

fn owners_category_totals_equal_mem_trackers(torch: &Torch) {
    let cases = [
        "checkpoint_free",
        "checkpoint_reentrant",
        "accumulation",
        "two_optimizers",
        "optimizer_in_backward",
        "double_backward",
    ];
    // Use small workspaces, because MemTracker does not see them: they are allocated below torch's ops.
    let models = if is_deep() { &MODELS[..] } else { &MODELS[..4] };
    let run = torch.trace_with("owners/owner_tracker.py", &[&cases[..], models].concat(), SMALL_WORKSPACES);
    assert!(run.output.status.success(), "{}", text(&run.output.stderr));
    let printed = text(&run.output.stdout);
    assert_eq!(printed.lines().count(), cases.len() + models.len(), "{printed}");
    for line in printed.lines() {
        let (name, pid) = line.split_once(' ').unwrap();
        let (trace, report) = (run.trace_of(pid), run.folder().join(format!("{name}.json")));
        let modules =
            memtrace().args(["modules", "--json", "--rounded", "--depth=9"]).arg(&trace).output().unwrap();
        std::fs::write(&report, modules.stdout).unwrap();
        eprint!("{name}: ");
        torch.checker("mem_tracker", &[&trace, &run.folder().join(format!("{name}.jsonl")), &report]);
    }
}

/// Runs a case of `held.py`, and compares its bytes by category. Returns the run.
fn held(torch: &Torch, case: &str) -> Run {
    let run = torch.trace("owners/held.py", &[case]).expect_success();
    let expected = text(&run.output.stdout);
    eprint!("{case}: ");
    torch.checker("held", &[&run.file(), &PathBuf::from(expected.trim())]);
    run
}

/// Like `held` for several cases: each runs in a forked child of one process, which imports torch once.
fn held_each(torch: &Torch, cases: &[&str]) {
    let run = torch.trace("owners/held.py", cases).expect_success();
    let printed = run.stdout();
    // A block of lines begins with a case's name and process id; its other lines are JSON and begin with a
    // brace.
    let blocks: Vec<&str> = printed.split_inclusive('\n').collect();
    let blocks: Vec<&[&str]> = blocks.chunk_by(|_, next| next.starts_with('{')).collect();
    assert_eq!(blocks.len(), cases.len(), "{printed}");
    for (block, case) in blocks.into_iter().zip(cases) {
        let (name, pid) = block[0].trim().split_once(' ').unwrap();
        assert_eq!(name, *case, "{printed}");
        eprint!("{case}: ");
        torch.checker("held", &[&run.trace_of(pid), &PathBuf::from(block[1..].concat().trim())]);
    }
}

fn owners_of_caches_attributes_workspaces_and_graphs_have_their_categories(torch: &Torch) {
    let cases = [
        "dynamic",
        "static",
        "offloaded",
        "failed_call",
        "two_threads",
        "graph",
        "offloaded_static",
        "quantized",
    ];
    held_each(torch, &cases);
    let run = held(torch, "own_pool");
    let serving = memtrace().args(["serving", "--json", "--at", "end"]).arg(run.file()).output().unwrap();
    let serving: serde_json::Value = serde_json::from_slice(&serving.stdout).unwrap();
    // CUDA graphs hold one block and the rest of its 20 MiB segment. The other pool's 24 MiB count as cache.
    let rows = serving["devices"][0]["rows"].as_array().unwrap();
    let of = |name: &str| rows.iter().find(|row| row["held_by"] == name).unwrap()["bytes"].as_i64().unwrap();
    assert!((3 << 20..=20 << 20).contains(&of("CUDA graphs")), "{serving:#}");
    assert!(of("torch's cache and rounding") >= 24 << 20, "{serving:#}");
    let run = held(torch, "attributes");
    let peak = memtrace().args(["peak", "--by", "category", "--json"]).arg(run.file()).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&peak.stdout).unwrap();
    assert_eq!(json["unattributed_share"], 0.0, "{json:#}");
}

fn owners_of_buckets_and_of_a_scripts_own_tensors_have_their_categories(torch: &Torch) {
    let run = held(torch, "buckets");
    let tags: Vec<_> =
        run.rows().into_iter().filter(|row| row.event == "tag" && row.name == "bucket").collect();
    // Each model has one bucket for all its weights in the first iteration, and two buckets from the second
    // forward on.
    let bytes = |module: &str| -> i64 {
        tags.iter().filter(|row| row.module == module).map(|row| row.delta_bytes.max(0)).sum()
    };
    assert_eq!((bytes("Net"), bytes("Net#2")), (8 << 20, 8 << 20));
}

fn owners_of_an_optimizers_step_are_temporary_unless_they_outlive_it(torch: &Torch) {
    held(torch, "own_optimizer");
    let flat = held(torch, "flat_buffers");
    // Two weights of 512 KiB share a storage. Its block must belong to the module that has both weights, and
    // must never move to another owner.
    let size = 2 * 512 * 512 * 2;
    let rows = flat.rows();
    let is_tag = |row: &&TorchRow| row.event == "tag" && row.delta_bytes.abs() == size;
    let of_both = rows.iter().filter(is_tag).filter(|row| row.module == "Sequential.0");
    let shared: Vec<i64> = of_both.map(|row| row.addr).collect();
    let tags: Vec<(String, i64)> = rows
        .iter()
        .filter(is_tag)
        .filter(|row| shared.contains(&row.addr) && row.module.starts_with("Sequential"))
        .map(|row| (row.module.clone(), row.delta_bytes.signum()))
        .collect();
    // The copies in float32 that the optimizer steps have the size of the shared blocks, too. They are state of
    // the model.
    let copies = rows.iter().filter(is_tag).filter(|row| row.module == "Sequential" && row.name == "master");
    assert_eq!(copies.map(|row| row.category.as_str()).collect::<Vec<_>>(), ["optimizer_state"; 2]);
    let expected = [("Sequential.0".to_owned(), 1), ("Sequential.0".to_owned(), 1)];
    assert_eq!(tags, expected, "the parameters, and the gradients");
    let run = held(torch, "optimizer");
    // At the peak, which is inside an optimizer step, the tensors of that step must be temporary and not
    // state.
    let summary = memtrace().args(["summary", "--json"]).arg(run.file()).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&summary.stdout).unwrap();
    let held = &json["processes"][0]["devices"][0]["at_peak_by_category_bytes"];
    assert_eq!(
        (held["optimizer_state"].as_i64(), held["parameter"].as_i64()),
        (Some(128 << 20), Some(64 << 20))
    );
    assert!(held["temporary"].as_i64().is_some_and(|bytes| bytes >= 64 << 20), "{held:#}");
}

fn owners_of_what_an_optimizer_holds_are_known_from_its_first_step(torch: &Torch) {
    held_each(torch, &["no_module", "no_module_no_memory", "other_optimizer", "sparse_ids"]);
    let names = |case: &str| -> Vec<String> {
        let is_wanted = |row: &TorchRow| row.event == "tag" && row.delta_bytes > 0 && row.category != "input";
        let tags = held(torch, case).rows().into_iter().filter(is_wanted);
        tags.map(|row| format!("{}.{}", row.module, row.name)).collect()
    };
    let found = names("other_method");
    for name in ["weight", "scale", "weight.exp_avg", "weight.exp_avg_sq"] {
        assert!(found.contains(&format!("Encodes.{name}")), "{name}: {found:?}");
    }
    let found = names("replaced_weight");
    let state = found.iter().filter(|name| *name == "Sequential.1.weight.exp_avg").count();
    assert!(state == 3 && found.iter().all(|name| !name.ends_with(".(none)")), "{found:?}");
}

fn steps_follow_one_optimizer_object_or_updates_without_an_optimizer(torch: &Torch) {
    let run = torch.trace("steps/counted.py", &[]).expect_success();
    // docs/ranges.md explains why the last iteration of `critic` and of the second stages counts.
    let expected = [6, 6, 6, 11, 18, 6, 6];
    for (line, steps) in run.stdout().lines().zip(expected) {
        let (pid, case) = line.split_once(' ').unwrap();
        assert!(case.ends_with(" 0"), "{case}: {}", run.stderr());
        let output = memtrace().args(["summary", "--json"]).arg(run.trace_of(pid)).output().unwrap();
        let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(summary["processes"][0]["steps"], steps, "{case}");
        if case.starts_with("own") {
            let rows = read(&run.trace_of(pid));
            let is_state = |row: &&TorchRow| row.event == "alloc" && row.phase == "optimizer";
            let state: i64 = rows.iter().filter(is_state).map(|row| row.requested_bytes).sum();
            assert_eq!(state, 4 * (128 * 256 + 256 + 256 * 128 + 128), "the batches are elsewhere");
        }
    }
    assert_eq!(run.stdout().lines().count(), expected.len());
}

fn serving_adds_up_to_what_the_device_has_in_use(torch: &Torch) {
    let run = held(torch, "static");
    let output = memtrace().args(["serving", "--json", "--tokens", "128"]).arg(run.file()).output().unwrap();
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let device = &json["devices"][0];
    let bytes = |held_by: &str| {
        let rows = device["rows"].as_array().unwrap();
        rows.iter().find(|row| row["held_by"] == held_by).unwrap()["bytes"].as_i64().unwrap()
    };
    let sum: i64 = device["rows"].as_array().unwrap().iter().map(|row| row["bytes"].as_i64().unwrap()).sum();
    assert_eq!(Some(sum), device["used_bytes"].as_i64(), "{device:#}");
    // The KV cache has two tensors of 2 x 4 x 64 x 64 floats (4 bytes) for each of three layers.
    assert_eq!(
        (bytes("KV cache"), device["kv_bytes_per_token"].as_i64()),
        (786_432, Some(6144)),
        "{device:#}"
    );
    assert!(bytes("weights") > 9 << 20 && bytes("workspaces") >= 32 << 20 && bytes("CUDA context") > 0);
    let ledger = memtrace().args(["ledger", "--json", "--at", "peak"]).arg(run.file()).output().unwrap();
    let ledger: serde_json::Value = serde_json::from_slice(&ledger.stdout).unwrap();
    assert_eq!(ledger["devices"][0]["used_bytes"], device["used_bytes"]);
    let text = memtrace().args(["serving", "--tokens", "128"]).arg(run.file()).output().unwrap();
    assert!(
        String::from_utf8_lossy(&text.stdout).contains("a sequence of 8,192 tokens takes 48.00 MiB"),
        "{text:?}"
    );
    // The report must also succeed for 0 s, before the cache exists.
    let early = memtrace().args(["serving", "--at", "0s", "--json"]).arg(run.file()).output().unwrap();
    assert!(early.status.success(), "{early:?}");
    // The report also succeeds for a program that is no server.
    let fixture = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gpt");
    let other = memtrace().args(["serving", "--json"]).arg(fixture).output().unwrap();
    assert!(other.status.success(), "{other:?}");
}

/// Compares the ledger and the serving report with the memory in use, at the marks of a server that gives its
/// memory up for a while.
fn serving_leaves_sleeping_memory_out_of_its_sum(torch: &Torch) {
    let run = torch.trace("allocators/sleeping_pool.py", &[]).expect_success();
    torch.check(memtrace().arg("check").arg(run.file()));
    let used: Vec<i64> = text(&run.output.stdout).lines().map(|line| line.parse().unwrap()).collect();
    let rows = run.rows();
    let marks = rows
        .iter()
        .filter(|row| row.event == "mark" && !["script", "model_fact"].contains(&row.api.as_str()));
    let marks: Vec<i64> = marks.map(|row| row.ts_ns).collect();
    assert_eq!((used.len(), marks.len()), (3, 3), "{used:?}");
    let at = |report: &str, ts_ns: i64| -> serde_json::Value {
        let moment = format!("{ts_ns}ns");
        let output = memtrace().args([report, "--json", "--at", &moment]).arg(run.file()).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
    };
    let (weights, cache) = (2048 * 2049 * 4, 30 << 22);
    for ((ts_ns, used), is_asleep) in marks.iter().zip(&used).zip([false, true, false]) {
        for report in ["ledger", "serving"] {
            let device = &at(report, *ts_ns)["devices"][0];
            assert_eq!(device["used_bytes"].as_i64(), Some(*used), "{report} at {ts_ns}: {device:#}");
        }
        let device = &at("serving", *ts_ns)["devices"][0];
        let held = |name: &str, field: &str| {
            let rows = device["rows"].as_array().unwrap();
            rows.iter().find(|row| row["held_by"] == name).unwrap()[field].as_i64().unwrap()
        };
        let (here, elsewhere) = if is_asleep { ("asleep_bytes", "bytes") } else { ("bytes", "asleep_bytes") };
        assert_eq!((held("weights", here), held("KV cache", here)), (weights, cache), "{device:#}");
        assert_eq!((held("weights", elsewhere), held("KV cache", elsewhere)), (0, 0), "{device:#}");
    }
    // The output must have the words of the example in docs/serving.md, where vLLM sleeps. The figures
    // differ.
    let (command, shown) = pages::first_command("docs/serving.md");
    assert_eq!(command[..2], ["serving", "--at"]);
    let asleep_at = format!("{}ns", marks[1]);
    let output = memtrace().args(["serving", "--at", &asleep_at]).arg(run.file()).output().unwrap();
    let words = |line: &str| {
        let line = pages::without_numbers(line).replace("GiB", "MiB");
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    };
    let printed = text(&output.stdout);
    for line in shown
        .lines()
        .filter(|line| [" used on ", "held by", "asleep:"].iter().any(|part| line.contains(part)))
    {
        assert!(printed.lines().any(|each| words(each) == words(line)), "{line:?} is not in\n{printed}");
    }
    // memtrace must write no row that corrects the reserved total: torch's total and the mapped memory differ
    // only by the memory that sleeps.
    assert!(rows.iter().all(|row| row.api != "reconciled"), "{rows:?}");
    // The handle of cuBLAS calls cuMemAlloc, and keeps its memory.
    let is_mapped = |api: &str| api.starts_with("cuMem") && api != "cuMemAlloc";
    let outside = rows.iter().filter(|row| row.event.starts_with("ext_") && is_mapped(&row.api));
    assert_eq!(outside.map(|row| row.delta_bytes).sum::<i64>(), 0);
}

fn leaks_of_a_server_are_found_by_its_forwards(torch: &Torch) {
    let leaks = |case: &str| -> serde_json::Value {
        let run = torch.trace("owners/held.py", &[case]).expect_success();
        let output = memtrace().args(["leaks", "--json"]).arg(run.file()).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let leaking = &leaks("leak")["processes"][0];
    // Eight requests of three tokens are 24 steps, the last of which is not finished.
    assert_eq!(leaking["finished_steps"], 23, "{leaking:#}");
    let found = leaking["leaks"].as_array().unwrap();
    assert!(found.iter().any(|leak| leak["category"] == "kv_cache"), "{leaking:#}");
    let clean = &leaks("clean")["processes"][0];
    assert_eq!(
        (&clean["finished_steps"], clean["leaks"].as_array().map(Vec::len)),
        (&23.into(), Some(0)),
        "{clean:#}"
    );
}

/// Runs cases of `script` with and without memtrace. The output and the failures must be the same, and the
/// blocks must have the owners that the cases expect. On the older torch only `scripts/check --deep` runs them
/// without memtrace.
fn same_with_and_without(torch: &Torch, script: &str, cases: &[&str], variables: &[(&str, &str)]) -> Run {
    same_when_launched(torch, CARD, &[], script, cases, variables)
}

/// Like `same_with_and_without`, on a card and with options for Python. With a launcher, only
/// `scripts/check --deep` runs the cases without memtrace.
fn same_when_launched(
    torch: &Torch,
    card: &str,
    options: &[&str],
    script: &str,
    cases: &[&str],
    variables: &[(&str, &str)],
) -> Run {
    // Without memtrace, torch may abort at exit: autograd's thread waits for the interpreter, to release a
    // callback that Python queued. memtrace lets it run once more; see src/tracer/preload/python/tracer/install.py.
    let aborted_at_its_end =
        |output: &Output| text(&output.stderr).contains("terminate called without an active exception");
    let run = torch.trace_on(card, options, script, cases, variables);
    if torch.is_tested_in_brief() || !options.is_empty() && !is_deep() {
        let is_good = run.output.status.success() && !run.stdout().contains(": status ");
        assert!(is_good, "{}{}", run.stdout(), run.stderr());
        torch.checker("expected_owners", &[run.folder()]);
        return run;
    }
    let untraced = (0..3)
        .map(|_| torch.untraced_on(card, options, script, cases, variables).output)
        .find(|output| !aborted_at_its_end(output))
        .expect("one of three untraced runs that ends");
    let (ours, theirs) = (text(&run.output.stderr), text(&untraced.stderr));
    assert_eq!(text(&run.output.stdout), text(&untraced.stdout), "{ours}\n{theirs}");
    assert_eq!(messages(&run.output), messages(&untraced));
    assert_eq!(run.output.status.code(), untraced.status.code(), "{ours}");
    torch.checker("expected_owners", &[run.folder()]);
    run
}

/// Returns the program's lines on stderr, without memtrace's lines and those that differ between runs.
fn messages(output: &Output) -> Vec<String> {
    let lines = text(&output.stderr);
    let differs = |line: &&str| {
        ["memtrace:", "W1", "["].iter().any(|start| line.starts_with(start))
            || ["/tmp/", "[rank0]", "IPKernelApp", "init.cpp:"].iter().any(|word| line.contains(word))
    };
    lines.lines().filter(|line| !differs(line)).map(str::to_owned).collect()
}
