//! Compares PyTorch's own tools with memtrace on the programs of `tests/scripts/seeds/programs.py`.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::common::torch::{Torch, scripts, succeeded};

/// Returns the page that shows the results.
fn page() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/coming-from.md")
}

/// Lets a checker write the page anew if `MEMTRACE_BLESS` is set for this test.
fn blessed(check: &mut Command) -> &mut Command {
    std::env::var("MEMTRACE_BLESS").into_iter().fold(check, |check, bless| check.env("MEMTRACE_BLESS", bless))
}

#[test]
fn peaks_modules_and_ops_equal_torchs_own_tools_where_those_are_right() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let traces = folder.path().join("trace");
        let mut run = torch.traced_command_on("2xh100-80g", &traces);
        run.arg(scripts().join("seeds/side_by_side.py")).env("MEMTRACE_OPS", "io");
        let answers = folder.path().join("answers");
        fs::write(&answers, succeeded("side_by_side.py", &run.output().unwrap())).unwrap();

        let mut check = torch.command();
        check.arg(scripts().join("checkers/side_by_side.py")).arg(env!("CARGO_BIN_EXE_memtrace"));
        check.args([&traces, &answers, &page()]);
        torch.check(blessed(&mut check));
    });
}

#[test]
fn host_tensors_of_the_cpu_equal_mem_tracker_on_four_programs() {
    Torch::run("2.11.0", host_tensors_equal_mem_tracker);
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn host_tensors_of_the_cpu_equal_mem_tracker_on_an_older_torch() {
    Torch::run("2.6.0", host_tensors_equal_mem_tracker);
}

fn host_tensors_equal_mem_tracker(torch: &Torch) {
    let folder = TempDir::new().unwrap();
    let traces = folder.path().join("trace");
    let mut run = torch.traced_command_on("2xh100-80g", &traces);
    run.arg(scripts().join("seeds/side_by_side.py"));
    run.args(["cpu_only", "two_gpus", "offloaded", "loader"]);
    run.env("MEMTRACE_OPS", "io").env("MEMTRACE_HOST_TENSORS", "1");
    let answers = folder.path().join("answers");
    fs::write(&answers, succeeded("side_by_side.py", &run.output().unwrap())).unwrap();
    let mut check = torch.command();
    check.arg(scripts().join("checkers/cpu_tensors.py")).arg(env!("CARGO_BIN_EXE_memtrace"));
    torch.check(check.args([&traces, &answers]));
}

/// Compares a program with `FSDPMemTracker` at each of its snapshots. Of the ranks, only rank 0 runs.
#[test]
fn fsdp_memory_equals_fsdp_mem_tracker_on_three_models_and_two_and_eight_ranks() {
    Torch::run("2.11.0", |torch| {
        let folder = TempDir::new().unwrap();
        let mut check = torch.command();
        check.arg(scripts().join("checkers/sharded.py")).arg(env!("CARGO_BIN_EXE_memtrace")).arg(page());
        for ranks in ["2", "8"] {
            let run = folder.path().join(ranks);
            let traces = run.join("trace");
            fs::create_dir(&run).unwrap();
            let card = format!("{ranks}xh100-80g");
            let options: [&dyn AsRef<OsStr>; 7] =
                [&"-q", &"-o", &traces, &"--phantom", &card, &"--ranks", &"0"];
            let mut command = torch.run_command(&options);
            command.args(["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", ranks]);
            let output = command.arg(scripts().join("seeds/sharded.py")).output().unwrap();
            fs::write(run.join("answers"), succeeded("sharded.py", &output)).unwrap();
            check.arg(run);
        }
        torch.check(blessed(&mut check));
    });
}
