//! Every byte has an owner: scripts of every common kind, with no mark in them, on the phantom device,
//! held against what torch itself knows of their tensors.
//!
//! Each test runs once for every torch of [`on_every_torch`]; one that `scripts/torch-env` has not installed
//! skips its tests and says so, and fails them with `CI=true`.

use std::path::{Path, PathBuf};
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

#[path = "common/torch.rs"]
#[expect(dead_code, reason = "each test crate uses its own part")]
mod harness;
use harness::{CARD, Run, Torch, memtrace, on_every_torch, scripts, text};

on_every_torch![
    eight_models_own_every_byte_and_agree_with_torch_per_module,
    hard_cases_keep_their_owners_and_print_what_they_print_without_us,
    wrappers_are_stripped_or_kept_and_compiled_models_keep_their_graphs,
    a_model_that_dies_while_loading_shows_its_parameters,
    isolated_spawned_and_bare_interpreters_have_modules_too,
    errors_of_the_tracers_python_are_logged_at_debug_and_counted_in_the_end_row,
    frameworks_train_as_without_us_and_keep_their_owners,
    launchers_notebooks_and_servers_of_forks_have_modules_too,
    what_is_registered_is_other_and_errors_are_those_of_mem_tracker,
    modules_can_be_left_alone,
    category_totals_are_those_of_mem_tracker,
];

fn eight_models_own_every_byte_and_agree_with_torch_per_module(torch: &Torch) {
    // Workspaces of libraries would outweigh models of this size, and hide what they leave open.
    let run = torch.trace_with("owners/owner_models.py", &MODELS, SMALL_WORKSPACES);
    assert!(run.output.status.success(), "{}", text(&run.output.stderr));
    let told = text(&run.output.stdout);
    assert_eq!(told.lines().count(), MODELS.len(), "{told}");
    for line in told.lines() {
        let (model, pid) = line.split_once(' ').unwrap();
        let told = run.folder().join(format!("{model}.jsonl"));
        eprint!("{model}: ");
        check(torch, "checkers/owner_totals.py", &[&trace_of(&run, pid), &told]);
    }
}

fn hard_cases_keep_their_owners_and_print_what_they_print_without_us(torch: &Torch) {
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
        "profilers",
    ];
    same_with_and_without(torch, CASES, &cases, &[("MEMTRACE_STACKS", "python")]);
}

fn wrappers_are_stripped_or_kept_and_compiled_models_keep_their_graphs(torch: &Torch) {
    same_with_and_without(torch, CASES, &["compiled", "somebody_elses_calls", "distributed"], &[]);
    let run = torch.trace_with("owners/owner_cases.py", &["distributed"], &[("MEMTRACE_WRAPPERS", "1")]);
    check(torch, "checkers/expected_owners.py", &[run.folder()]);
}

fn a_model_that_dies_while_loading_shows_its_parameters(torch: &Torch) {
    let run = same_with_and_without(torch, CASES, &["alone", "loading"], &[]);
    assert_eq!(run.output.status.code(), Some(1));
    let said = text(&run.output.stderr);
    assert!(said.contains("OutOfMemoryError"));
    // Our own lines name what the model holds, too.
    let ours: Vec<&str> = said.lines().filter(|line| line.starts_with("memtrace:")).collect();
    assert!(ours.iter().any(|line| line.contains("for: parameter")), "{ours:?}");
    assert!(ours.iter().any(|line| line.contains("Sequential.")), "{ours:?}");
}

fn isolated_spawned_and_bare_interpreters_have_modules_too(torch: &Torch) {
    for options in [&["-I"][..], &["-S", "-E"], &["-W", "error"]] {
        let run = torch.trace_on(CARD, options, "owners/owner_cases.py", &["alone", "plain"], &[]);
        assert_eq!(text(&run.output.stdout), "plain\n", "{options:?}: {}", text(&run.output.stderr));
        check(torch, "checkers/expected_owners.py", &[run.folder()]);
    }
    let run = torch.trace("owners/owner_cases.py", &["spawn"]);
    assert_eq!(text(&run.output.stdout), "plain\n", "{}", text(&run.output.stderr));
    check(torch, "checkers/expected_owners.py", &[run.folder()]);
}

fn errors_of_the_tracers_python_are_logged_at_debug_and_counted_in_the_end_row(torch: &Torch) {
    let run = |log| {
        let run =
            torch.trace_with("owners/failing_modules.py", &[], &[("MEMTRACE_LOG", log)]).expect_success();
        assert_eq!(text(&run.output.stdout), "True\n", "{}", text(&run.output.stderr));
        let trace = std::fs::read_to_string(run.file()).unwrap();
        let end = trace.lines().last().unwrap();
        let errors =
            end.split(' ').find_map(|word| word.strip_prefix("python_errors=")).map(str::parse::<u32>);
        assert!(errors.is_some_and(|errors| errors.unwrap() >= 4), "{end}");
        text(&run.output.stderr)
    };
    let logged = run("debug");
    let lines = |what: &str| logged.lines().filter(|line| line.contains(what)).count();
    assert_eq!(lines("Refusal: parameters are not listed today (<memtrace"), 1, "{logged}");
    assert_eq!(lines("Unformattable: (no text: ValueError)"), 1, "{logged}");
    assert!(!run("warn").contains("Refusal"));
    // A run without errors says nothing of them.
    let run = torch.trace("owners/owner_cases.py", &["alone", "plain"]);
    assert!(!std::fs::read_to_string(run.file()).unwrap().contains("python_errors"));
}

fn frameworks_train_as_without_us_and_keep_their_owners(torch: &Torch) {
    same_with_and_without(
        torch,
        FRAMEWORKS,
        &["fsdp1", "peft", "lightning"],
        &[("MEMTRACE_STACKS", "python")],
    );
    let run = torch.trace_with(FRAMEWORKS, &["peft"], &[("MEMTRACE_WRAPPERS", "1")]);
    check(torch, "checkers/expected_owners.py", &[run.folder()]);
}

fn launchers_notebooks_and_servers_of_forks_have_modules_too(torch: &Torch) {
    same_when_launched(torch, CARD, ACCELERATE, FRAMEWORKS, &["alone", "accelerated"], &[]);
    same_when_launched(torch, "2xh100-80g", TORCHRUN, FRAMEWORKS, &["alone", "ranks"], &[]);
    for how in ["notebook", "forkserver", "fork"] {
        let run = torch.trace_with(FRAMEWORKS, &[how], &[("MEMTRACE_STACKS", "python")]).expect_success();
        assert_eq!(text(&run.output.stdout).trim(), "a cell ran");
        check(torch, "checkers/expected_owners.py", &[run.folder()]);
    }
}

fn what_is_registered_is_other_and_errors_are_those_of_mem_tracker(torch: &Torch) {
    same_with_and_without(torch, CASES, &["registered"], &[]);
}

fn modules_can_be_left_alone(torch: &Torch) {
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

fn category_totals_are_those_of_mem_tracker(torch: &Torch) {
    let cases = [
        "checkpoint_free",
        "checkpoint_reentrant",
        "accumulation",
        "two_optimizers",
        "optimizer_in_backward",
        "double_backward",
    ];
    // Workspaces are allocated below torch's ops, where MemTracker sees nothing.
    let run = torch.trace_with("owners/owner_tracker.py", &[&cases[..], &MODELS].concat(), SMALL_WORKSPACES);
    assert!(run.output.status.success(), "{}", text(&run.output.stderr));
    let told = text(&run.output.stdout);
    assert_eq!(told.lines().count(), cases.len() + MODELS.len(), "{told}");
    for line in told.lines() {
        let (name, pid) = line.split_once(' ').unwrap();
        let (trace, report) = (trace_of(&run, pid), run.folder().join(format!("{name}.json")));
        let modules = memtrace().args(["modules", "--json", "--depth=9"]).arg(&trace).output().unwrap();
        std::fs::write(&report, modules.stdout).unwrap();
        eprint!("{name}: ");
        check(
            torch,
            "checkers/mem_tracker.py",
            &[&trace, &run.folder().join(format!("{name}.jsonl")), &report],
        );
    }
}

/// Runs cases of `script` with and without memtrace: they print the same and fail alike, and their blocks have the
/// owners that they expect.
fn same_with_and_without(torch: &Torch, script: &str, cases: &[&str], variables: &[(&str, &str)]) -> Run {
    same_when_launched(torch, CARD, &[], script, cases, variables)
}

/// The same on a card, with options for python.
fn same_when_launched(
    torch: &Torch,
    card: &str,
    options: &[&str],
    script: &str,
    cases: &[&str],
    variables: &[(&str, &str)],
) -> Run {
    let untraced = torch.untraced_on(card, options, script, cases, variables).output;
    let run = torch.trace_on(card, options, script, cases, variables);
    let (ours, theirs) = (text(&run.output.stderr), text(&untraced.stderr));
    assert_eq!(text(&run.output.stdout), text(&untraced.stdout), "{ours}\n{theirs}");
    assert_eq!(said(&run.output), said(&untraced));
    assert_eq!(run.output.status.code(), untraced.status.code(), "{ours}");
    check(torch, "checkers/expected_owners.py", &[run.folder()]);
    run
}

/// Runs a script that holds what another left against what it should be.
fn check(torch: &Torch, script: &str, args: &[&Path]) {
    torch.check(torch.command().arg(scripts().join(script)).args(args));
}

/// The trace of a process.
fn trace_of(run: &Run, pid: &str) -> PathBuf {
    let ending = format!(".{pid}.csv");
    let mut files = run.files().into_iter();
    files.find(|file| file.to_string_lossy().ends_with(&ending)).unwrap()
}

/// What a program said on stderr, without our own lines and those that name what differs in each run.
fn said(output: &Output) -> Vec<String> {
    let lines = text(&output.stderr);
    let differs = |line: &&str| {
        ["memtrace:", "W1", "["].iter().any(|start| line.starts_with(start))
            || ["/tmp/", "[rank0]", "IPKernelApp", "init.cpp:"].iter().any(|word| line.contains(word))
    };
    lines.lines().filter(|line| !differs(line)).map(str::to_owned).collect()
}
