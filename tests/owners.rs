//! Every byte has an owner: scripts of every common kind, with no mark in them, on the phantom device,
//! held against what torch itself knows of their tensors.
//!
//! Each test runs once for every torch of [`on_every_torch`]; one that `scripts/torch-env` has not installed
//! skips its tests and says so, and fails them with `CI=true`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

const CARD: &str = "h100-80g";
const SMALL_WORKSPACES: &[(&str, &str)] =
    &[("CUBLAS_WORKSPACE_CONFIG", ":16:8"), ("CUBLASLT_WORKSPACE_SIZE", "0")];

macro_rules! on_every_torch {
    ($($name:ident),* $(,)?) => {
        mod torch_2_11_0 {
            $(#[test] fn $name() { super::Torch::run("2.11.0", super::$name); })*
        }
        mod torch_2_6_0 {
            $(#[test] fn $name() { super::Torch::run("2.6.0", super::$name); })*
        }
    };
}

on_every_torch![
    eight_models_own_every_byte_and_agree_with_torch_per_module,
    hard_cases_keep_their_owners_and_print_what_they_print_without_us,
    wrappers_are_stripped_or_kept_and_compiled_models_keep_their_graphs,
    a_model_that_dies_while_loading_shows_its_parameters,
    isolated_spawned_and_bare_interpreters_have_modules_too,
    modules_can_be_left_alone,
    category_totals_are_those_of_mem_tracker,
];

fn eight_models_own_every_byte_and_agree_with_torch_per_module(torch: &Torch) {
    let models = ["gpt", "resnet", "llama", "bert", "lstm", "tied", "gan", "unet"];
    // Workspaces of libraries would outweigh models of this size, and hide what they leave open.
    let run = torch.trace("owner_models.py", &models, SMALL_WORKSPACES);
    assert!(run.output.status.success(), "{}", text(&run.output.stderr));
    let told = text(&run.output.stdout);
    assert_eq!(told.lines().count(), models.len(), "{told}");
    for line in told.lines() {
        let (model, pid) = line.split_once(' ').unwrap();
        let told = run.folder.path().join(format!("{model}.jsonl"));
        eprint!("{model}: ");
        torch.check("owner_check.py", &[&run.trace_of(pid), &told]);
    }
}

fn hard_cases_keep_their_owners_and_print_what_they_print_without_us(torch: &Torch) {
    let cases = [
        "exception",
        "outside_root",
        "shared",
        "roots",
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
    ];
    torch.same_with_and_without(&cases, &[]);
}

fn wrappers_are_stripped_or_kept_and_compiled_models_keep_their_graphs(torch: &Torch) {
    torch.same_with_and_without(&["compiled", "distributed"], &[]);
    let run = torch.trace("owner_cases.py", &["distributed"], &[("MEMTRACE_WRAPPERS", "1")]);
    torch.check("owner_expected.py", &[run.folder.path()]);
}

fn a_model_that_dies_while_loading_shows_its_parameters(torch: &Torch) {
    let run = torch.same_with_and_without(&["alone", "loading"], &[]);
    assert_eq!(run.output.status.code(), Some(1));
    assert!(text(&run.output.stderr).contains("OutOfMemoryError"));
}

fn isolated_spawned_and_bare_interpreters_have_modules_too(torch: &Torch) {
    for options in [&["-I"][..], &["-S", "-E"], &["-W", "error"]] {
        let run = torch.traced(options, "owner_cases.py", &["alone", "plain"], &[]);
        assert_eq!(text(&run.output.stdout), "plain\n", "{options:?}: {}", text(&run.output.stderr));
        torch.check("owner_expected.py", &[run.folder.path()]);
    }
    let run = torch.trace("owner_cases.py", &["spawn"], &[]);
    assert_eq!(text(&run.output.stdout), "plain\n", "{}", text(&run.output.stderr));
    torch.check("owner_expected.py", &[run.folder.path()]);
}

fn modules_can_be_left_alone(torch: &Torch) {
    let run = torch.trace("owner_cases.py", &["alone", "plain"], &[("MEMTRACE_MODULES", "0")]);
    assert_eq!(text(&run.output.stdout), "plain\n", "{}", text(&run.output.stderr));
    let mut reader = csv::Reader::from_path(run.only_trace()).unwrap();
    let columns = reader.headers().unwrap().clone();
    let column = |name| columns.iter().position(|column| column == name).unwrap();
    let (event, module) = (column("event"), column("module"));
    for row in reader.records().map(Result::unwrap) {
        assert_ne!(&row[event], "tag");
        assert_eq!(&row[module], "(none)");
    }
}

fn category_totals_are_those_of_mem_tracker(torch: &Torch) {
    // Workspaces are allocated below torch's ops, where MemTracker sees nothing.
    let run = torch.trace("owner_tracker.py", &[], SMALL_WORKSPACES);
    assert!(run.output.status.success(), "{}", text(&run.output.stderr));
    torch.check("owner_tracker_check.py", &[&run.only_trace(), &run.folder.path().join("tracker.jsonl")]);
}

/// One installed torch.
struct Torch {
    python: PathBuf,
}

impl Torch {
    /// Runs a test on an installed torch.
    fn run(version: &str, test: fn(&Torch)) {
        let folder = cache().join(format!("torch-{version}"));
        if folder.join(".complete").exists() {
            return test(&Torch { python: folder.join("bin/python") });
        }
        let why = format!("torch {version} is not installed: run scripts/torch-env {version}");
        assert!(std::env::var_os("CI").is_none_or(|ci| ci != "true"), "{why}");
        eprintln!("skipped: {why}");
    }

    /// A script of tests/scripts under memtrace on the phantom device.
    fn trace(&self, script: &str, args: &[&str], variables: &[(&str, &str)]) -> Run {
        self.traced(&[], script, args, variables)
    }

    /// The same with options for python.
    fn traced(&self, options: &[&str], script: &str, args: &[&str], variables: &[(&str, &str)]) -> Run {
        let folder = TempDir::new().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_memtrace"));
        command.args(["run", "--quiet", "--phantom", CARD, "-o"]).arg(folder.path().join("trace")).arg("--");
        command.arg(&self.python).args(options);
        if options.contains(&"-S") {
            // No site, so no installed packages: the script finds them by hand.
            command.args(["-c", BARE]).arg(self.packages());
        }
        self.finish(command, script, args, variables, folder)
    }

    /// A script on the phantom device alone.
    fn untraced(&self, script: &str, args: &[&str], variables: &[(&str, &str)]) -> Run {
        let mut command = Command::new(&self.python);
        let phantom = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name("libmemtrace_phantom.so");
        assert!(phantom.exists(), "{} is missing: cargo build first", phantom.display());
        command.env("LD_PRELOAD", phantom);
        self.finish(command, script, args, variables, TempDir::new().unwrap())
    }

    fn finish(
        &self,
        mut command: Command,
        script: &str,
        args: &[&str],
        variables: &[(&str, &str)],
        folder: TempDir,
    ) -> Run {
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy().into_owned();
            if name.starts_with("MEMTRACE_") && name != "MEMTRACE_CACHE" {
                command.env_remove(name);
            }
        }
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("MEMTRACE_PHANTOM", CARD);
        command.env("OWNER_OUT", folder.path()).envs(variables.iter().copied());
        let output = command.arg(scripts().join(script)).args(args).output().unwrap();
        Run { output, folder }
    }

    /// Runs cases of `owner_cases.py` with and without memtrace: they print the same and fail alike, and
    /// their blocks have the owners that they expect.
    fn same_with_and_without(&self, cases: &[&str], variables: &[(&str, &str)]) -> Run {
        let untraced = self.untraced("owner_cases.py", cases, variables).output;
        let run = self.trace("owner_cases.py", cases, variables);
        assert_eq!(text(&run.output.stdout), text(&untraced.stdout));
        assert_eq!(said(&run.output), said(&untraced));
        assert_eq!(run.output.status.code(), untraced.status.code());
        self.check("owner_expected.py", &[run.folder.path()]);
        run
    }

    /// Runs a script that holds what another left against what it should be.
    fn check(&self, script: &str, args: &[&Path]) {
        let mut command = Command::new(&self.python);
        command.env("PYTHONDONTWRITEBYTECODE", "1").arg(scripts().join(script)).args(args);
        let output = command.output().unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{command:?}: {}\n{stdout}\n{stderr}", output.status);
        eprintln!("{}", stdout.trim_end());
    }

    /// Where its packages are.
    fn packages(&self) -> PathBuf {
        let lib = self.python.parent().and_then(Path::parent).unwrap().join("lib");
        let mut versions = std::fs::read_dir(lib).unwrap().map(|entry| entry.unwrap().path());
        versions.find(|path| path.join("site-packages").exists()).unwrap().join("site-packages")
    }
}

/// Runs the script that its arguments name, with packages from the first.
const BARE: &str = "import sys, os, runpy; packages, script = sys.argv[1:3]; sys.argv = sys.argv[2:]; \
                    sys.path += [packages, os.path.dirname(script)]; runpy.run_path(script, run_name='__main__')";

/// What a script left.
struct Run {
    output: Output,
    folder: TempDir,
}

impl Run {
    fn traces(&self) -> Vec<PathBuf> {
        let files = std::fs::read_dir(self.folder.path().join("trace")).unwrap();
        let mut files: Vec<PathBuf> = files.map(|entry| entry.unwrap().path()).collect();
        files.retain(|file| {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            name.ends_with(".csv") && !name.ends_with(".stacks.csv")
        });
        files
    }

    fn only_trace(&self) -> PathBuf {
        let files = self.traces();
        assert_eq!(files.len(), 1, "{files:?}\n{}", text(&self.output.stderr));
        files.into_iter().next().unwrap()
    }

    /// The trace of a process.
    fn trace_of(&self, pid: &str) -> PathBuf {
        let ending = format!(".{pid}.csv");
        let mut files = self.traces().into_iter();
        files.find(|file| file.to_string_lossy().ends_with(&ending)).unwrap()
    }
}

/// What a program said on stderr, without our own lines and those that name what differs in each run.
fn said(output: &Output) -> Vec<String> {
    let lines = text(&output.stderr);
    let differs =
        |line: &&str| line.starts_with("memtrace:") || line.contains("/tmp/") || line.contains("[rank0]");
    lines.lines().filter(|line| !differs(line)).map(str::to_owned).collect()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn scripts() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts")
}

/// Where scripts/torch-env installs.
fn cache() -> PathBuf {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("MEMTRACE_CACHE").unwrap_or_else(|| {
        let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
        base.expect("HOME is set").join("memtrace")
    })
}
