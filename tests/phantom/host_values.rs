//! `memtrace run --phantom CARD --no-host-values`: large CPU tensors without values.

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

use crate::common::torch::{self, Torch, exit_of, on_every_torch, scripts, text};

const OPTION: &str = "--no-host-values";

on_every_torch![
    no_host_values_plans_a_model_larger_than_the_host: "the functions that are replaced",
    no_host_values_keeps_every_other_value,
    no_host_values_needs_no_memory_and_loses_no_error: "the layout of its iterators",
];

/// Runs a part of `host_values.py`. Returns its output, and the summary of its trace, or null if the part uses no
/// GPU and leaves no trace.
fn run(torch: &Torch, options: &[&str], part: &str) -> (Output, Value) {
    let out = TempDir::new().unwrap();
    let trace = out.path().join("trace");
    let mut command = torch::memtrace();
    command.args(["run", "--phantom", "h200", "-o"]).arg(&trace).args(options);
    command.arg("--").arg(&torch.python).arg(scripts().join("phantom/host_values.py")).arg(part);
    // Without cuBLAS's workspaces: on torch 2.6 only the model that is built on the GPU would take one.
    command.env("CUBLAS_WORKSPACE_CONFIG", ":0:0");
    let output = command.output().unwrap();
    assert_eq!(exit_of(&output), 0, "{part}: {}", text(&output.stderr));
    let summary = torch::memtrace().arg("summary").arg(&trace).arg("--json").output().unwrap();
    (output, serde_json::from_slice(&summary.stdout).unwrap_or_default())
}

/// Returns the numbers that a program printed, in order.
fn numbers(output: &Output) -> Vec<u64> {
    text(&output.stdout).split_whitespace().map(|word| word.parse().unwrap()).collect()
}

const NOTE: &str = "values of CPU tensors of 1 MiB or more were not kept";

fn no_host_values_plans_a_model_larger_than_the_host(torch: &Torch) {
    let (plan, summary) = run(torch, &[OPTION], "plan");
    let (on_gpu, other) = run(torch, &[], "on_gpu");
    let (planned, built) = (numbers(&plan), numbers(&on_gpu));
    assert_eq!(planned[0], 70_553_706_496);
    // The first three numbers are the parameters, the peak of allocated bytes and the peak of reserved bytes.
    assert_eq!(planned[..3], built[..3]);
    assert!(planned[3] < 4 << 20, "{} KiB of host memory", planned[3]);
    assert_eq!(summary["phantom"]["host_values_kept"], false, "{summary:#}");
    assert!(text(&plan.stderr).contains(NOTE), "{}", text(&plan.stderr));
    assert_eq!(other["phantom"]["host_values_kept"], true);
    assert!(!text(&on_gpu.stderr).contains("not kept"), "{}", text(&on_gpu.stderr));
}

/// The driver of a real GPU locks pinned memory, so it is resident before the program touches it.
#[test]
fn pinned_memory_of_the_phantom_is_resident_if_the_machine_has_room() {
    Torch::on_main(|torch| {
        let out = TempDir::new().unwrap();
        let trace = out.path().join("trace");
        let mut command = torch::memtrace();
        command.args(["run", "--phantom", "t4", "-o"]).arg(&trace).arg("--").arg(&torch.python);
        let output = command.arg(scripts().join("phantom/pinned_pages.py")).output().unwrap();
        assert_eq!(exit_of(&output), 0, "{}", text(&output.stderr));
        let [small, large] = numbers(&output)[..] else { panic!("{}", text(&output.stdout)) };
        assert!((64..72).contains(&small) && large < 8, "{small} MiB of 64, {large} MiB of 1 TiB");
        let summary = torch::memtrace().arg("summary").arg(&trace).arg("--json").output().unwrap();
        let summary: Value = serde_json::from_slice(&summary.stdout).unwrap();
        assert_eq!(summary["phantom"]["pinned_not_resident_bytes"], 1i64 << 40, "{summary:#}");
        let note = "of pinned memory was not made resident";
        assert!(text(&output.stderr).contains(note), "{}", text(&output.stderr));
    });
}

fn no_host_values_keeps_every_other_value(torch: &Torch) {
    let (with, _) = run(torch, &[OPTION], "true");
    let (without, _) = run(torch, &[], "true");
    assert_eq!(text(&with.stdout), text(&without.stdout));
    let lines = text(&with.stdout);
    let lines: BTreeMap<_, _> = lines.lines().filter_map(|line| line.split_once(' ')).collect();
    assert_eq!(lines["integers"], "8796090925056 4194203");
    assert_eq!(lines["small"], "262143.0");
}

fn no_host_values_needs_no_memory_and_loses_no_error(torch: &Torch) {
    let (lost, _) = run(torch, &[OPTION], "lost");
    assert_eq!(text(&lost.stdout), "lost\n");
    // The program writes 8 GiB with NumPy into tensors that share 128 MiB, and must not need 2 GiB of host
    // memory.
    let (memory, _) = run(torch, &[OPTION], "memory");
    let kib = numbers(&memory)[0];
    assert!(kib < 2 << 20, "{kib} KiB");
}

#[test]
fn no_host_values_of_two_runs_at_once_are_apart() {
    Torch::on_main(|torch| {
        let code = "import sys, torch; numbers = torch.empty(1 << 22).numpy(); numbers[0] = float(sys.argv[1]); \
                    print('ready', flush=True); sys.stdin.read(); print(numbers[0])";
        let start = |value: &str| {
            let mut command = torch::on_phantom(&torch.python, "a10");
            command.env("MEMTRACE_PHANTOM_HOST_VALUES", "0").args(["-c", code, value]);
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut line = [0; 6];
            child.stdout.as_mut().unwrap().read_exact(&mut line).unwrap();
            child
        };
        let children = [start("5"), start("6")];
        let printed = children.map(|child| text(&child.wait_with_output().unwrap().stdout));
        assert_eq!(printed, ["5.0\n", "6.0\n"]);
    });
}

#[test]
fn no_host_values_without_address_space_keeps_them_and_says_so() {
    Torch::on_main(|torch| {
        let code = "import torch; print(float(torch.ones(1 << 22).sum()), float(torch.ones(1 << 22)[5]))";
        let mut command = torch::on_phantom(Path::new("sh"), "a10");
        command.args(["-c", "ulimit -v 100000000; exec \"$0\" -c \"$1\""]).arg(&torch.python).arg(code);
        let output = command.env("MEMTRACE_PHANTOM_HOST_VALUES", "0").output().unwrap();
        assert_eq!(text(&output.stdout), "4194304.0 1.0\n");
        let stderr = text(&output.stderr);
        assert_eq!(
            stderr.matches("no address space is left for CPU tensors without values").count(),
            1,
            "{stderr}"
        );
    });
}

#[test]
fn memtrace_phantom_host_values_needs_a_simulated_gpu_and_a_valid_value() {
    let refused = torch::memtrace().args(["run", OPTION, "--", "true"]).output().unwrap();
    assert_eq!(exit_of(&refused), 2);
    assert!(text(&refused.stderr).contains("--phantom"), "{}", text(&refused.stderr));
    for value in ["no", "2", "-1", " 0"] {
        let mut run = torch::memtrace();
        run.args(["run", "--phantom", "a10", "--", "true"]).env("MEMTRACE_PHANTOM_HOST_VALUES", value);
        let output = run.output().unwrap();
        assert_eq!(exit_of(&output), 2, "{value}");
        let why = "MEMTRACE_PHANTOM_HOST_VALUES: it must be 0 or 1";
        assert!(text(&output.stderr).contains(why), "{value}: {}", text(&output.stderr));
    }
}
