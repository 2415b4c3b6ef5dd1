//! `action.yml`, which compares the memory of a pull request with its base: its steps run as shell, with git and torch.
//! Only `gh`, which comments, is a stand-in that keeps its arguments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

#[path = "common/torch.rs"]
#[expect(dead_code, reason = "each test crate uses its own part")]
mod harness;
use harness::{Torch, on_every_torch};

on_every_torch![
    action_comments_the_difference_and_fails_over_the_limit,
    action_tells_a_base_that_fails_a_base_that_is_missing_and_a_change_that_fails,
];

const TRAIN: &str = "import torch\nmodel = torch.nn.Linear(1024, WIDTH).cuda()\n\
                     model(torch.zeros(256, 1024, device='cuda')).sum().backward()\n";

/// A checkout with a base commit and a head, and a `gh` on the PATH.
struct PullRequest<'a> {
    folder: tempfile::TempDir,
    torch: &'a Torch,
}

impl PullRequest<'_> {
    fn new<'a>(torch: &'a Torch, base: &str, head: &str) -> PullRequest<'a> {
        let pull = PullRequest { folder: tempfile::tempdir().unwrap(), torch };
        fs::create_dir_all(pull.checkout()).unwrap();
        pull.git(&["init", "--quiet"]);
        for (message, script) in [("base", base), ("head", head)] {
            fs::write(pull.checkout().join("train.py"), script).unwrap();
            pull.git(&["add", "."]);
            pull.git(&["-c", "user.name=a", "-c", "user.email=a@a", "commit", "--quiet", "-m", message]);
        }
        let bin = pull.folder.path().join("bin");
        fs::create_dir(&bin).unwrap();
        let gh = format!("#!/bin/sh\necho \"$@\" > '{}'\n", pull.folder.path().join("gh").display());
        fs::write(bin.join("gh"), gh).unwrap();
        let chmod = Command::new("chmod").arg("+x").arg(bin.join("gh")).status().unwrap();
        assert!(chmod.success());
        pull
    }

    fn checkout(&self) -> PathBuf {
        self.folder.path().join("checkout")
    }

    fn git(&self, arguments: &[&str]) {
        assert!(Command::new("git").current_dir(self.checkout()).args(arguments).status().unwrap().success());
    }

    fn comment(&self) -> String {
        fs::read_to_string(self.checkout().join("memtrace-comparison.md")).unwrap()
    }

    /// Runs the steps of the action with these inputs.
    fn run(&self, inputs: &[&str]) -> Output {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let memtrace = Path::new(env!("CARGO_BIN_EXE_memtrace")).parent().unwrap();
        let path = std::env::var("PATH").unwrap();
        let mut command = Command::new(&self.torch.python);
        command.arg(root.join("tests/scripts/ci/action_steps.py")).arg(root.join("action.yml"));
        command.arg(self.checkout()).args(["package=", "card=l4"]).args(inputs);
        command.arg(format!("command={} train.py", self.torch.python.display()));
        command.env(
            "PATH",
            format!("{}:{}:{path}", self.folder.path().join("bin").display(), memtrace.display()),
        );
        command.output().unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn wide(width: usize) -> String {
    TRAIN.replace("WIDTH", &width.to_string())
}

fn action_comments_the_difference_and_fails_over_the_limit(torch: &Torch) {
    let pull = PullRequest::new(torch, &wide(1024), &wide(4096));
    let ran = pull.run(&["base=HEAD~1", "fail-over=100m"]);
    let said = text(&ran.stdout) + &text(&ran.stderr);
    assert_eq!(ran.status.code(), Some(0), "{said}");
    let comment = pull.comment();
    assert!(comment.contains("on l4") && comment.contains("| peak | before | after | change |"), "{comment}");
    assert!(comment.contains("(simulated GPU)") && comment.contains("Linear"), "{comment}");
    let told = fs::read_to_string(pull.folder.path().join("gh")).unwrap();
    assert!(told.starts_with("pr comment 7 --body-file memtrace-comparison.md"), "{told}");
    assert!(fs::read_to_string(pull.folder.path().join("summary.md")).unwrap().contains("| peak |"));
    let ran = pull.run(&["base=HEAD~1", "fail-over=1m"]);
    assert_eq!(ran.status.code(), Some(3), "{}", text(&ran.stdout) + &text(&ran.stderr));
    assert!(text(&ran.stdout).contains("Comment 0\nVerdict 3"), "the comment comes before the verdict");
    let worktrees =
        Command::new("git").current_dir(pull.checkout()).args(["worktree", "list"]).output().unwrap();
    assert_eq!(text(&worktrees.stdout).lines().count(), 1);
}

fn action_tells_a_base_that_fails_a_base_that_is_missing_and_a_change_that_fails(torch: &Torch) {
    let pull = PullRequest::new(torch, "raise SystemExit(5)", &wide(64));
    let ran = pull.run(&["base=HEAD~1"]);
    assert_eq!(ran.status.code(), Some(0), "{}", text(&ran.stderr));
    assert!(pull.comment().contains("The base could not be run"), "{}", pull.comment());
    let ran = pull.run(&["base=no-such-commit", "comment=false"]);
    assert_eq!(ran.status.code(), Some(2));
    assert!(text(&ran.stderr).contains("fetch-depth: 0"), "{}", text(&ran.stderr));
    fs::write(pull.checkout().join("train.py"), "raise SystemExit(6)").unwrap();
    let ran = pull.run(&["base=HEAD~1"]);
    assert_eq!(ran.status.code(), Some(6));
    assert!(pull.comment().contains("failed with status 6"), "{}", pull.comment());
}
