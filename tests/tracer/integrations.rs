//! Callbacks in the Trainer and in Lightning: phases and peaks under memtrace, and no effect without it.

use std::path::Path;
use std::process::Output;

use tempfile::TempDir;

use crate::common::torch::{self, CARD, Torch, memtrace, on_phantom, scripts, succeeded, text};

/// Runs a script on the simulated GPU, traced into `folder/out` or untraced.
fn run(torch: &Torch, script: &str, folder: &Path, traced: bool) -> Output {
    let mut command =
        if traced { torch.traced_command(&folder.join("out")) } else { on_phantom(&torch.python, CARD) };
    command.arg(scripts().join("integrations").join(script)).arg(folder).current_dir(folder);
    command.env("PYTHONPATH", Path::new(env!("CARGO_MANIFEST_DIR")).join("python"));
    command.env("CUDA_VISIBLE_DEVICES", "0").output().unwrap()
}

/// Returns the phases of a run's rows.
fn phases(folder: &Path) -> Vec<String> {
    let output = memtrace().args(["check", "--files"]).arg(folder.join("out")).output().unwrap();
    let file = succeeded("files", &output);
    let mut phases: Vec<String> =
        torch::read(Path::new(file.trim_end())).into_iter().map(|row| row.phase).collect();
    phases.sort();
    phases.dedup();
    phases
}

#[test]
fn the_trainer_has_phases_and_logs_its_peaks_only_when_it_is_traced() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let output = run(&torch, "trainer.py", folder.path(), true);
    let said = succeeded("trainer.py", &output);
    // The Trainer writes five entries into its log: two with the loss, two of the evaluation, and one at the
    // end.
    assert!(said.contains("logged 5 callbacks 1"), "{said}");
    let phases = phases(folder.path());
    for phase in ["backward", "checkpoint", "eval", "forward", "generate", "optimizer"] {
        assert!(phases.iter().any(|name| name == phase), "no {phase} in {phases:?}");
    }
    let untraced = run(&torch, "trainer.py", &folder.path().join("."), false);
    assert!(text(&untraced.stdout).contains("logged 0 callbacks 0"), "{}", text(&untraced.stderr));
}

#[test]
fn lightning_has_phases_and_logs_its_peaks_only_when_it_is_traced() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let said = succeeded("lightning_fit.py", &run(&torch, "lightning_fit.py", folder.path(), true));
    assert!(said.contains("logged 1 steps 4"), "{said}");
    let phases = phases(folder.path());
    for phase in ["backward", "checkpoint", "eval", "forward"] {
        assert!(phases.iter().any(|name| name == phase), "no {phase} in {phases:?}");
    }
    let untraced = run(&torch, "lightning_fit.py", folder.path(), false);
    assert!(text(&untraced.stdout).contains("logged 0 steps 4"), "{}", text(&untraced.stderr));
}
