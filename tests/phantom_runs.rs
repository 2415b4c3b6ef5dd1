//! `memtrace run --phantom` as its users run it: the tracer and the device that is not there together.

#[path = "common/installed.rs"]
mod installed;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use installed::python;
use memtrace_trace::EventName;
use memtrace_trace::csv::RowReader;
use serde_json::Value;
use tempfile::TempDir;

const TORCHES: [&str; 2] = ["2.11.0", "2.6.0"];

fn script(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts").join(name)
}

/// A command with nothing of the caller's settings.
fn clean(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if ["MEMTRACE_", "PYTORCH_", "CUDA_"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name.as_ref());
        }
    }
    command
}

/// `memtrace ARGUMENTS`, in the folder.
fn memtrace(folder: &TempDir, arguments: &[&str]) -> Output {
    clean(env!("CARGO_BIN_EXE_memtrace")).args(arguments).current_dir(folder.path()).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Everything of a trace that is about memory, in the order of the file.
fn sizes(folder: &Path) -> String {
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|file| {
        file.to_str().unwrap().ends_with(".csv") && !file.to_str().unwrap().ends_with(".stacks.csv")
    });
    assert_eq!(files.len(), 1, "{files:?}");
    let mut reader = RowReader::open(&files[0]).unwrap();
    let mut lines = String::new();
    while let Some(row) = reader.next_row().unwrap() {
        let memory =
            !matches!(row.event, EventName::Op | EventName::Sample | EventName::Meta | EventName::End);
        if memory {
            lines.push_str(&format!(
                "{} {} {} {} {} {} {} {} {} {} {}\n",
                row.event.as_str(),
                row.device,
                row.addr,
                row.requested_bytes,
                row.rounded_bytes,
                row.delta_bytes,
                row.allocated_bytes,
                row.active_bytes,
                row.reserved_bytes,
                row.op,
                row.module,
            ));
        }
    }
    lines
}

#[test]
fn two_runs_have_the_same_sizes_byte_for_byte_and_the_statistics_of_an_untraced_one() {
    for version in TORCHES {
        let Some(python) = python(version) else { continue };
        let (python, stats) = (python.to_str().unwrap().to_owned(), script("phantom/stats.py"));
        let stats = stats.to_str().unwrap();
        let folder = TempDir::new().unwrap();
        let run = |out: &str| {
            let ran = memtrace(&folder, &["run", "-q", "--phantom", "a10", "-o", out, "--", &python, stats]);
            assert!(ran.status.success(), "{}", text(&ran.stderr));
            (text(&ran.stdout), sizes(&folder.path().join(out)))
        };
        let (first, second) = (run("first"), run("second"));
        assert!(first.1.lines().count() > 500, "{}", first.1);
        for (a, b) in first.1.lines().zip(second.1.lines()) {
            assert_eq!(a, b, "torch {version}");
        }
        assert_eq!(first, second, "torch {version}");

        let library = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name("libmemtrace_phantom.so");
        let mut untraced = clean(&python);
        untraced.env("LD_PRELOAD", library).env("MEMTRACE_PHANTOM", "a10").arg(stats);
        assert_eq!(text(&untraced.output().unwrap().stdout), first.0, "torch {version}");

        // Its reports say what it was, and how many values were invented.
        let summary = memtrace(&folder, &["summary", "--json", "first"]);
        let json: Value = serde_json::from_slice(&summary.stdout).unwrap();
        assert_eq!(json["phantom"]["invented_reads"], 3, "{json:#}");
        assert_eq!(json["phantom"]["cards"][0], "a10");
        let peak = text(&memtrace(&folder, &["peak", "first"]).stdout);
        assert!(
            peak.contains("note: simulated GPU a10: kernels did not run")
                && peak.contains("3 values that no kernel computed"),
            "{peak}"
        );
    }
}

#[test]
fn a_model_that_is_too_large_for_a_t4_ends_in_torchs_own_error_and_its_explanation() {
    for version in TORCHES {
        let Some(python) = python(version) else { continue };
        let folder = TempDir::new().unwrap();
        let code = "import torch\nkept = [torch.nn.Linear(16384, 16384, device='cuda') for _ in range(20)]";
        let ran = memtrace(
            &folder,
            &["run", "--phantom", "t4", "-o", "out", "--", python.to_str().unwrap(), "-c", code],
        );
        let stderr = text(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{stderr}");
        // NVML's words are there, as on a machine with a driver.
        for words in [
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 14.74 GiB",
            "this process has 14.",
            "memtrace oom out",
        ] {
            assert!(stderr.contains(words), "torch {version}: {words}: {stderr}");
        }
        let oom = text(&memtrace(&folder, &["oom", "out"]).stdout);
        assert!(oom.contains("verdict: too big") && oom.contains("phantom"), "{oom}");
    }
}

#[test]
fn a_call_that_is_not_answered_fails_and_is_named() {
    let library = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name("libmemtrace_phantom.so");
    let code = "import ctypes\nd = ctypes.CDLL('libcuda.so.1')\nprint([d.cuGraphicsMapResources() for _ in range(3)])";
    let output =
        clean("python3").env("LD_PRELOAD", library).env("MEMTRACE_PHANTOM", "t4").args(["-c", code]).output();
    let output = output.unwrap();
    assert_eq!(text(&output.stdout), "[801, 801, 801]\n", "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stderr),
        "memtrace: the phantom device has no cuGraphicsMapResources: it fails with \"operation not supported\"\n"
    );
}

/// `scripts/gpu-compare` with one card in the part of the real one; what it said.
fn compared(real: &str, phantom: &str) -> Option<String> {
    let python = python("2.11.0")?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = Path::new(env!("CARGO_BIN_EXE_memtrace")).parent().unwrap();
    let mut command = clean(&python);
    command.arg(root.join("scripts/gpu-compare")).arg("--target").arg(target);
    let output = command
        .args(["--real", real, "--phantom", phantom])
        .arg(script("phantom/stats.py"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}{}", text(&output.stdout), text(&output.stderr));
    Some(text(&output.stdout))
}

#[test]
fn two_cards_are_compared_event_by_event() {
    let Some(same) = compared("a100-80g", "a100-80g") else { return };
    assert!(same.contains("events of the allocator") && same.contains("0 failed, 0 parted"), "{same}");
    assert_eq!(same.matches("the same\n").count(), 3, "{same}");
    // PyTorch gives cuBLAS 8 MiB and 128 KiB of workspace, and 32 MiB on Hopper
    // (`parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp).
    let other = compared("a100-80g", "h100-80g").unwrap();
    assert!(other.contains("1 parted") && other.contains("they part at event"), "{other}");
    // There is no segment yet that either fits into.
    for words in
        ["real     seq", "segment_alloc of asked 20971520", "phantom  seq", "segment_alloc of asked 33554432"]
    {
        assert!(other.contains(words), "{words}: {other}");
    }
}
