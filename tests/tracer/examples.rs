//! Runs the programs of `examples/` on the simulated GPU, and compares their traces with torch's figures.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::common::pages::assert_shown;
use crate::common::torch::{Torch, json, memtrace, succeeded};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples")
}

/// Runs an example on `ranks` simulated GPUs. The peak that it prints must be the peak of rank 0 in the
/// trace.
fn runs(example: &str, ranks: usize) {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let out = folder.path().join("out");
    let mut command = torch.traced_command_on(&format!("{ranks}xh100-80g"), &out);
    if ranks > 1 {
        // `--standalone` chooses a free port, because tests run in parallel.
        command.args(["-m", "torch.distributed.run", "--standalone", &format!("--nproc-per-node={ranks}")]);
    }
    command.arg(examples().join(example)).current_dir(folder.path());
    command.env("PYTHONPATH", examples().with_file_name("python"));
    let stdout = succeeded(example, &command.output().unwrap());
    let line = stdout.lines().find_map(|line| line.split_once("peak ")).expect("the peak is printed").1;
    let printed: f64 = line.trim_end_matches(" MiB").parse().unwrap();

    let output = memtrace().args(["summary", "--json", "--rank", "0"]).arg(&out).output().unwrap();
    let summary: serde_json::Value = serde_json::from_str(&succeeded("summary", &output)).unwrap();
    let peak = &summary["processes"][0]["devices"][0]["peak_allocated"]["bytes"];
    let traced = peak.as_f64().unwrap() / f64::from(1 << 20);
    assert!((printed - traced).abs() <= 0.05, "{example} printed {printed} MiB, its trace has {traced} MiB");
    let output = memtrace().args(["ranks", "--json"]).arg(&out).output().unwrap();
    let table: serde_json::Value = serde_json::from_str(&succeeded("ranks", &output)).unwrap();
    assert_eq!(table["ranks"].as_array().unwrap().len(), ranks);
}

#[test]
fn example_of_ddp_runs_on_two_ranks() {
    runs("ddp.py", 2);
}

#[test]
fn example_of_fsdp2_runs_on_two_ranks() {
    runs("fsdp2.py", 2);
}

#[test]
fn example_of_generation_runs() {
    runs("generate.py", 1);
}

#[test]
fn example_of_the_trainer_runs() {
    runs("trainer.py", 1);
}

#[test]
fn example_of_lightning_runs() {
    runs("lightning_fit.py", 1);
}

/// Runs programs of `tests/growth` with different causes. The parts of the growth are compared with PyTorch's
/// own figures after each step, and the remedy is applied.
#[test]
fn leaks_explains_why_memory_of_programs_grows() {
    growth_corpus(&["losses", "driver_memory"]);
}

#[test]
#[ignore = "scripts/check --deep runs it"]
fn leaks_explains_larger_steps_and_finds_nothing_in_a_program_that_does_not_grow() {
    growth_corpus(&["lengths", "flat"]);
}

/// Worker processes take memory of another rank's GPU, and the remedy is applied. `scripts/check --deep` runs
/// the other ways, such as a call that only creates a context.
#[test]
fn ranks_and_ledger_name_what_put_other_ranks_on_a_gpu() {
    growth_corpus(&["crowded/worker"]);
}

fn growth_corpus(programs: &[&str]) {
    if Torch::installed("2.11.0").is_none() {
        return;
    }
    let mut corpus = std::process::Command::new("python3");
    corpus.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/growth-corpus"));
    corpus.args(programs);
    succeeded("growth-corpus", &corpus.output().unwrap());
}

#[test]
fn example_of_a_cluster_runs_one_rank_of_512() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let mut command = memtrace();
    command.args(["run", "-q", "--phantom", "512xh100-80g", "--ranks", "0", "-o", "out", "--"]);
    command.arg(&torch.python).args([
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "64",
        "--nproc-per-node",
        "8",
    ]);
    command.arg(examples().join("llama_cluster.py")).args(["tiny", "--sequence", "512"]);
    let stdout = succeeded("llama_cluster.py", &command.current_dir(folder.path()).output().unwrap());
    let printed = stdout.lines().find_map(|line| line.strip_prefix("peak ")).expect("the peak is printed");
    let printed: f64 = printed.trim_end_matches(" MiB").parse().unwrap();
    let output = memtrace().args(["summary", "--json", "out"]).current_dir(folder.path()).output().unwrap();
    let summary: serde_json::Value = serde_json::from_str(&succeeded("summary", &output)).unwrap();
    let peak = summary["processes"][0]["devices"][0]["peak_allocated"]["bytes"].as_f64().unwrap();
    assert!((printed - peak / f64::from(1 << 20)).abs() <= 0.05, "{printed} MiB, {peak} bytes");
}

/// Returns the line with single spaces, and with `T` in place of times and numbers of events, which differ
/// between runs.
fn comparable(line: &str) -> String {
    let words: Vec<&str> = line.split_whitespace().collect();
    let differs = |at: usize| words.get(at + 1) == Some(&"events");
    let is_time = |at: usize| {
        words[at].parse::<f64>().is_ok()
            && words.get(at + 1).is_some_and(|unit| ["s", "ms"].contains(&unit.trim_end_matches([':', ','])))
    };
    let is_unit = |at: usize| at > 0 && is_time(at - 1);
    let word = |at: usize| match at {
        _ if is_time(at) || differs(at) => "T",
        // Removes the `m` of `ms`, because a time may be shown in seconds in one run, and in milliseconds in
        // another.
        _ if is_unit(at) => words[at].trim_start_matches('m'),
        _ => words[at],
    };
    (0..words.len()).map(word).collect::<Vec<_>>().join(" ")
}

/// The first console block of README must show what its commands print.
#[test]
fn the_readme_shows_what_its_commands_print() {
    let Some(folder) = shows_what_its_commands_print("README.md", 1) else { return };
    let summary = json(&["summary"], &folder.path().join("out"));
    let device = &summary["processes"][0]["devices"][0];
    let peak = |name: &str| device[name]["bytes"].as_i64().unwrap();
    let outside = (peak("peak_used") - peak("peak_reserved")) >> 20;
    let page = std::fs::read_to_string(examples().with_file_name("README.md")).unwrap();
    assert!(page.contains(&format!("| measured: {outside} MiB of ")), "README.md: {outside} MiB are outside");
}

#[test]
fn the_tutorial_shows_what_its_commands_print() {
    shows_what_its_commands_print("docs/tutorial.md", usize::MAX);
}

#[test]
fn the_page_of_predictions_shows_what_its_commands_print() {
    shows_what_its_commands_print("docs/whatif.md", 1);
}

/// Runs the commands of a page's first console blocks in one folder. Each command must print every line that
/// the page shows, in this order; `...` stands for the rest of a line. Returns the folder, or `None` without torch.
fn shows_what_its_commands_print(page: &str, blocks: usize) -> Option<TempDir> {
    let torch = Torch::installed("2.11.0")?;
    let folder = TempDir::new().unwrap();
    std::os::unix::fs::symlink(examples(), folder.path().join("examples")).unwrap();
    let text = std::fs::read_to_string(examples().with_file_name(page)).unwrap();
    let shown =
        text.split("```console\n").skip(1).take(blocks).map(|block| block.split("```").next().unwrap());
    for text in shown.flat_map(|block| block.split("$ memtrace ").skip(1)) {
        let (command, shown) = text.split_once('\n').unwrap();
        let arguments = command.replace("-- python", &format!("-- {}", torch.python.display()));
        let mut run = memtrace();
        // A shell would remove the quotes.
        run.args(arguments.split_whitespace().map(|word| word.trim_matches('\'')))
            .current_dir(folder.path())
            .env_remove("MEMTRACE_OUT");
        let output = run.output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert_shown(shown, &format!("$ memtrace {command}\n{printed}"), comparable);
    }
    Some(folder)
}

#[test]
fn every_example_has_at_most_100_lines() {
    let mut count = 0;
    for folder in ["", "ci", "pytest", "notebook"] {
        for entry in std::fs::read_dir(examples().join(folder)).unwrap() {
            let path = entry.unwrap().path();
            let Some(kind) = path.extension().and_then(|kind| kind.to_str()) else { continue };
            let text = std::fs::read_to_string(&path).unwrap();
            let program = text.lines().count();
            assert!(kind == "ipynb" || program <= 100, "{}: {program} lines", path.display());
            count += 1;
        }
    }
    assert!(count >= 8, "{count} examples");
}
