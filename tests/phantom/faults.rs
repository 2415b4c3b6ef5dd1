//! `memtrace run --phantom-fault`: errors that the simulated GPU injects.

use serde_json::Value;
use tempfile::TempDir;

use crate::common::torch::{self, Torch, exit_of, scripts, text};

/// A run of `recovers.py` with faults: its status, stdout, stderr, and the folder of its trace.
struct Faulty {
    status: i32,
    stdout: String,
    stderr: String,
    out: TempDir,
}

impl Faulty {
    fn run(torch: &Torch, card: &str, faults: &[&str], arguments: &[&str]) -> Self {
        let out = TempDir::new().unwrap();
        let trace = out.path().join("trace");
        let mut command = torch::memtrace();
        command.args(["run", "--phantom", card, "-o"]).arg(&trace);
        for fault in faults {
            command.args(["--phantom-fault", fault]);
        }
        command.arg("--").arg(&torch.python).arg(scripts().join("phantom/recovers.py")).args(arguments);
        let output = command.output().unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        Self { status: exit_of(&output), stdout, stderr, out }
    }

    fn json(&self, report: &str) -> Value {
        let mut command = torch::memtrace();
        let output = command.arg(report).arg(self.out.path().join("trace")).arg("--json").output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{}", text(&output.stderr)))
    }
}

#[test]
fn phantom_fault_oom_is_recovered_from_by_a_smaller_batch_and_named_in_the_trace() {
    Torch::on_main(|torch| {
        let run = Faulty::run(torch, "a10", &["oom@step:3"], &["--recover"]);
        assert_eq!(run.status, 0, "{}", run.stderr);
        assert!(run.stdout.starts_with("[4096, 4096, 4096, 2048, 2048, 2048]"), "{}", run.stdout);
        assert_eq!(run.stderr.matches("injected fault oom@step:3").count(), 1, "{}", run.stderr);
        let oom = &run.json("oom")["ooms"][0];
        assert_eq!((&oom["verdict"], &oom["injected"]), (&"injected".into(), &true.into()), "{oom:#}");
        assert_eq!(oom["step"], 3);
        let summary = run.json("summary");
        assert_eq!(summary["phantom"]["injected_faults"], serde_json::json!(["oom@step:3"]));
        assert!(run.stderr.contains("injected faults: oom@step:3"), "{}", run.stderr);
    });
}

#[test]
fn phantom_fault_oom_ends_a_script_that_does_not_recover() {
    Torch::on_main(|torch| {
        let run = Faulty::run(torch, "a10", &["oom@alloc:3"], &[]);
        assert_eq!(run.status, 1, "{}", run.stderr);
        assert!(
            run.stderr.contains("OutOfMemoryError: CUDA out of memory. Tried to allocate"),
            "{}",
            run.stderr
        );
        // A limit in bytes: the first request beyond 150 MiB must fail, and smaller requests after it must
        // succeed.
        let run = Faulty::run(torch, "a10", &["oom@bytes:150m"], &["--recover"]);
        assert_eq!(run.status, 0, "{}", run.stderr);
        assert!(run.stdout.contains("2048, 2048"), "{}", run.stdout);
    });
}

#[test]
fn phantom_fault_oom_of_one_call_is_healed_by_the_allocators_own_retry() {
    Torch::on_main(|torch| {
        let run = Faulty::run(torch, "a10", &["oom*1@alloc:4"], &[]);
        assert_eq!(run.status, 0, "{}", run.stderr);
        assert!(run.stdout.contains("[4096, 4096, 4096, 4096, 4096, 4096] retries 1"), "{}", run.stdout);
    });
}

#[test]
fn phantom_fault_ecc_is_sticky_and_says_what_cuda_says() {
    Torch::on_each(|torch| {
        let run = Faulty::run(torch, "a10", &["ecc@call:cudaLaunchKernel:30"], &["--recover"]);
        let said = "CUDA error: uncorrectable ECC error encountered";
        assert!(run.stdout.contains(said), "{}\n{}", run.stdout, run.stderr);
        assert_eq!(run.stdout.matches(&format!("again: {said}")).count(), 3, "{}", run.stdout);
        let kind = if torch.version == "2.6.0" { "RuntimeError" } else { "AcceleratorError" };
        assert!(run.stdout.starts_with(&format!("{kind} {said}")), "{}", run.stdout);
        assert!(run.stderr.contains("Xid (PCI:0000:10:00): 48"), "{}", run.stderr);
    });
}

#[test]
fn phantom_fault_lost_takes_the_card_from_cuda_nvml_and_nvidia_smi() {
    Torch::on_main(|torch| {
        let run = Faulty::run(torch, "a10", &["lost@step:2"], &["--recover"]);
        let said = "CUDA error: unknown error";
        assert_eq!(
            run.stdout.matches(&format!("again: {said}")).count(),
            3,
            "{}\n{}",
            run.stdout,
            run.stderr
        );
        assert!(run.stderr.contains("GPU has fallen off the bus"), "{}", run.stderr);

        let code = "import subprocess, pynvml, torch\n\
                    try:\n    torch.zeros(1, device='cuda')\nexcept RuntimeError as error:\n    print(error)\n\
                    pynvml.nvmlInit()\n\
                    try:\n    pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))\n\
                    except pynvml.NVMLError_GpuIsLost as error:\n    print(error)\n\
                    smi = subprocess.run(['nvidia-smi'], capture_output=True, text=True)\n\
                    print(smi.returncode, smi.stdout)\n\
                    print(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(1)))\n";
        let mut command = torch::memtrace();
        let out = TempDir::new().unwrap();
        command.args(["run", "-q", "--phantom", "2xa10", "--phantom-fault", "lost@alloc:1@card:0", "-o"]);
        let output =
            command.arg(out.path()).arg("--").arg(&torch.python).args(["-c", code]).output().unwrap();
        let printed = text(&output.stdout);
        for part in [
            said,
            "GPU is lost",
            "15 Unable to determine the device handle for GPU0: 0000:10:00.0: Unknown Error",
            "NVIDIA A10",
        ] {
            assert!(printed.contains(part), "{part}: {printed}{}", text(&output.stderr));
        }
    });
}

#[test]
fn memtrace_phantom_fault_is_checked_before_the_program_starts() {
    let run = |fault: &str, command: &str| {
        let mut run = torch::memtrace();
        run.args(["run", "--phantom", "a10", "--phantom-fault", fault, "--", command]);
        run.output().unwrap()
    };
    for (fault, part) in [
        ("oom@soon", "is not a moment"),
        ("fire@step:1", "oom, ecc or lost"),
        ("oom@call:cudaLaunchKernel:1", "allocates no memory"),
        ("lost@step:1@card:1", "--phantom a10 has 1 card; their numbers start at 0"),
        ("", ""),
    ] {
        let output = run(fault, "true");
        let refused = !part.is_empty();
        assert_eq!(output.status.code(), Some(if refused { 2 } else { 0 }), "{fault}");
        assert!(text(&output.stderr).contains(part), "{fault}: {}", text(&output.stderr));
    }
    // The launcher accepts this fault, because it does not know the names of calls; the simulated GPU must
    // refuse it.
    let output = run("ecc@call:cudaLaunchRocket:1", "true");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        text(&output.stderr)
            .contains("MEMTRACE_PHANTOM_FAULT: `ecc@call:cudaLaunchRocket:1`: no call is named")
    );
    assert!(!text(&output.stderr).contains("removes LD_PRELOAD"), "{}", text(&output.stderr));
    // The summary must name the faults that did not happen.
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let run = Faulty::run(&torch, "a10", &["lost@step:99", "oom@bytes:20g"], &[]);
    assert_eq!(run.status, 0);
    assert!(run.stderr.contains("faults that did not happen: lost@step:99, oom@bytes:20g"), "{}", run.stderr);
}
