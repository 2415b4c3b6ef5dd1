//! Runs the steps of `action.yml`, which compares the memory of a pull request with the memory of its base.
//! git and torch are real. Only `gh`, which posts the comment, is a stand-in that records its arguments.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::common::torch::{Torch, on_every_torch};
use crate::common::venv;

on_every_torch![
    action_comments_the_difference_and_fails_over_the_limit,
    action_reports_a_base_that_fails_a_base_that_is_missing_and_a_change_that_fails,
    action_sees_growth_though_the_package_is_installed_from_the_checkout,
    action_sees_growth_of_an_installed_copy_of_a_path_in_the_environment_and_of_hidden_imports,
];

const TRAIN: &str = "import torch\nmodel = torch.nn.Linear(1024, WIDTH).cuda()\n\
                     model(torch.zeros(256, 1024, device='cuda')).sum().backward()\n";

/// A checkout with a base commit and a head, and a `gh` on the PATH.
struct PullRequest<'a> {
    folder: tempfile::TempDir,
    torch: &'a Torch,
    /// The Python that runs the command.
    python: PathBuf,
}

impl PullRequest<'_> {
    fn new<'a>(torch: &'a Torch, base: &str, head: &str) -> PullRequest<'a> {
        let pull = PullRequest { folder: tempfile::tempdir().unwrap(), torch, python: torch.python.clone() };
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
        command.arg(format!("command={} train.py", self.python.display()));
        command.env("GITHUB_WORKSPACE", self.checkout());
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

#[test]
fn action_installs_its_own_source_and_no_name_from_an_index() {
    let folder = tempfile::tempdir().unwrap();
    let python = folder.path().join("python3");
    fs::write(&python, "#!/bin/sh\necho \"$@\"\n").unwrap();
    assert!(Command::new("chmod").arg("+x").arg(&python).status().unwrap().success());
    let action = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("action.yml")).unwrap();
    assert!(action.contains("    default: own\n"), "the default of `package`");
    let step = action.split("- name: Install memtrace").nth(1).unwrap();
    let script = step.split("run: |\n").nth(1).unwrap().split("    - name:").next().unwrap();
    let path = format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap());
    for (package, installed) in [("own", "/the/action"), ("a.whl", "a.whl")] {
        let mut shell = Command::new("bash");
        shell.args(["-euc", script]).env("PATH", &path);
        shell.env("GITHUB_ACTION_PATH", "/the/action").env("PACKAGE", package);
        let said = text(&shell.output().unwrap().stdout);
        assert!(said.trim_end().ends_with(installed) && said.starts_with("-m pip install"), "{said}");
    }
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

fn action_reports_a_base_that_fails_a_base_that_is_missing_and_a_change_that_fails(torch: &Torch) {
    let pull = PullRequest::new(torch, "raise SystemExit(5)", &wide(64));
    let ran = pull.run(&["base=HEAD~1"]);
    assert_eq!(ran.status.code(), Some(0), "{}", text(&ran.stderr));
    assert!(
        pull.comment().contains("Nothing was compared: the command failed in HEAD~1"),
        "{}",
        pull.comment()
    );
    assert_eq!(pull.run(&["base=HEAD~1", "fail-over=2%"]).status.code(), Some(2), "a limit was not checked");
    let ran = pull.run(&["base=no-such-commit", "comment=false"]);
    assert_eq!(ran.status.code(), Some(2));
    assert!(text(&ran.stderr).contains("fetch-depth: 0"), "{}", text(&ran.stderr));
    fs::write(pull.checkout().join("train.py"), "raise SystemExit(6)").unwrap();
    let ran = pull.run(&["base=HEAD~1"]);
    assert_eq!(ran.status.code(), Some(6));
    assert!(pull.comment().contains("failed with status 6"), "{}", pull.comment());
}

fn action_sees_growth_though_the_package_is_installed_from_the_checkout(torch: &Torch) {
    let mut pull = PullRequest::new(torch, "import grown", "import grown  # and more");
    pull.python = venv::venv(&pull.folder.path().join("env"), &[&torch.python]);
    let checkout = pull.checkout().display().to_string();
    let package = pull.checkout().join("src/grown/__init__.py");
    fs::create_dir_all(package.parent().unwrap()).unwrap();
    for width in [1024, 4096] {
        fs::write(&package, wide(width)).unwrap();
        pull.git(&["add", "."]);
        pull.git(&["-c", "user.name=a", "-c", "user.email=a@a", "commit", "--quiet", "-m", "package"]);
    }
    // Installs the package by a path file in site-packages, as `pip install -e .` does for a src layout.
    let site = venv::packages(&pull.python);
    fs::write(site.join("editable.pth"), format!("{checkout}/src\n")).unwrap();
    let ran = pull.run(&["base=HEAD~1", "fail-over=1m"]);
    assert_eq!(ran.status.code(), Some(3), "{}", text(&ran.stdout) + &text(&ran.stderr));

    // An import finder, as setuptools may install, leads both runs to this checkout, so the action refuses.
    let finder = format!(
        "import sys\nfrom importlib.machinery import PathFinder\nclass Finder:\n    @staticmethod\n    \
         def find_spec(name, path=None, target=None):\n        \
         return PathFinder.find_spec(name, ['{checkout}/src']) if name == 'grown' else None\n\
         sys.meta_path.insert(0, Finder)\n"
    );
    fs::write(site.join("finder.py"), finder).unwrap();
    fs::write(site.join("editable.pth"), "import finder\n").unwrap();
    let ran = pull.run(&["base=HEAD~1", "fail-over=1m"]);
    assert_eq!(ran.status.code(), Some(2), "{}", text(&ran.stdout) + &text(&ran.stderr));
    assert!(
        text(&ran.stderr).contains("imported src/grown/__init__.py of this checkout"),
        "{}",
        text(&ran.stderr)
    );
}

fn action_sees_growth_of_an_installed_copy_of_a_path_in_the_environment_and_of_hidden_imports(torch: &Torch) {
    let mut pull = PullRequest::new(torch, "import grown", "import grown  # and more");
    let plain = venv::venv(&pull.folder.path().join("env"), &[&torch.python]);
    pull.python = plain.clone();
    let checkout = pull.checkout();
    let package = checkout.join("src/grown/__init__.py");
    fs::create_dir_all(package.parent().unwrap()).unwrap();
    for width in [1024, 4096] {
        fs::write(&package, wide(width)).unwrap();
        fs::write(checkout.join("alone.py"), wide(width)).unwrap();
        pull.git(&["add", "."]);
        pull.git(&["-c", "user.name=a", "-c", "user.email=a@a", "commit", "--quiet", "-m", "package"]);
    }
    // Installs the package by a copy in site-packages, as `pip install .` does.
    let copy = venv::packages(&plain).join("grown");
    fs::create_dir(&copy).unwrap();
    fs::copy(&package, copy.join("__init__.py")).unwrap();
    let verdict = |pull: &PullRequest<'_>, inputs: &[&str]| {
        let ran = pull.run(&[&["base=HEAD~1", "fail-over=1m", "comment=false"], inputs].concat());
        (ran.status.code(), text(&ran.stdout) + &text(&ran.stderr))
    };
    let (status, said) = verdict(&pull, &[]);
    assert_eq!(status, Some(3), "{said}");

    // A path through a link or the working folder is refused. A path in the environment leads each run to its
    // own checkout.
    let link = pull.folder.path().join("link");
    std::os::unix::fs::symlink(&checkout, &link).unwrap();
    for (before, expected) in [
        (format!("export PROJECT={}; ", link.display()), Some(2)),
        (format!("cd {}; PROJECT=.; ", link.display()), Some(2)),
        ("PROJECT=$THE_PROJECT; ".to_owned(), Some(3)),
    ] {
        let inside = format!("#!/bin/bash\n{before}exec {} $PROJECT/alone.py\n", plain.display());
        let program = pull.folder.path().join("program");
        fs::write(&program, inside).unwrap();
        assert!(Command::new("chmod").arg("+x").arg(&program).status().unwrap().success());
        pull.python = PathBuf::from(format!("THE_PROJECT=$GITHUB_WORKSPACE {}", program.display()));
        let (status, said) = verdict(&pull, &[]);
        assert_eq!(status, expected, "{before}: {said}");
        if status == Some(2) {
            assert!(said.contains("ran or imported alone.py of this checkout"), "{before}: {said}");
        }
    }

    pull.python = PathBuf::from(format!("{} -B", plain.display()));
    let (status, said) = verdict(&pull, &[]);
    assert_eq!(status, Some(2), "{said}");
    assert!(said.contains("it is not known which modules the command imported"), "{said}");
}

/// Runs scripts/comment-comparison with a stand-in for `gh`. Returns the calls of `gh`, and the output. With
/// `knows` the pull request already has such a comment; with `refuses` each call of `gh` fails.
fn comment(knows: bool, refuses: bool) -> (String, String) {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let url = if knows { "https://github.com/o/r/pull/7#issuecomment-42" } else { "" };
    let gh = format!(
        "#!/bin/sh\necho \"$@\" >>{}\n[ $1-$2 != pr-view ] || echo {url}\nexit {}\n",
        at("log").display(),
        u8::from(refuses)
    );
    fs::write(at("gh"), gh).unwrap();
    assert!(Command::new("chmod").arg("+x").arg(at("gh")).status().unwrap().success());
    fs::write(at("comparison.md"), "<!-- memtrace compare-with-base: 1 -->\n").unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/comment-comparison");
    let mut run = Command::new(script);
    run.args(["7", "comparison.md"]).current_dir(folder.path());
    run.env("PATH", format!("{}:{}", folder.path().display(), std::env::var("PATH").unwrap()));
    let output = venv::succeeds(&mut run);
    (fs::read_to_string(at("log")).unwrap(), text(&output.stdout))
}

#[test]
fn a_comparison_replaces_its_own_comment_alone_and_a_token_that_may_not_write_fails_nothing() {
    let (calls, _) = comment(false, false);
    assert!(
        calls.contains("pr comment 7 --body-file comparison.md") && !calls.contains("edit-last"),
        "{calls}"
    );
    let (calls, _) = comment(true, false);
    assert!(calls.contains("PATCH repos/{owner}/{repo}/issues/comments/42"), "{calls}");
    assert!(!calls.contains("pr comment"), "{calls}");
    let (_, printed) = comment(false, true);
    assert!(printed.starts_with("::warning::"), "{printed}");
}
