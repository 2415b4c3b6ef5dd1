//! The pytest plugin, installed from a wheel of this build: limits of GPU memory on a simulated GPU, with real pytest
//! and torch.

use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

use crate::common::torch::{built, cache, clean, text};
use crate::common::venv::{self, Installed, installed};

/// Returns a folder with one file of tests.
fn suite(code: &str) -> TempDir {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("test_it.py"), code).unwrap();
    folder
}

/// Returns a folder with the suite of `examples/pytest`.
fn example() -> TempDir {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/pytest/test_memory.py");
    suite(&std::fs::read_to_string(path).unwrap())
}

/// Runs `python -m pytest` in a folder. Returns its exit status, and its output.
fn pytest(installed: &Installed, folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = python(installed, folder);
    command.args(["-m", "pytest", "-p", "no:cacheprovider"]).args(arguments);
    said(&command.output().unwrap())
}

fn python(installed: &Installed, folder: &Path) -> Command {
    let mut command = clean(&installed.python);
    command.current_dir(folder).env("PATH", venv::NO_CARGO);
    for variable in ["PYTEST_ADDOPTS", "COLUMNS"] {
        command.env_remove(variable);
    }
    command
}

fn said(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

/// Checks that a text has each of the words.
fn has(said: &str, words: &[&str]) {
    for word in words {
        assert!(said.contains(word), "no {word:?} in\n{said}");
    }
}

#[test]
fn the_page_shows_what_pytest_prints() {
    let Some(installed) = installed() else { return };
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/pytest.md");
    let page = std::fs::read_to_string(page).unwrap();
    let block = page.split("```console\n").nth(1).unwrap().split("```").next().unwrap();
    let (_, printed) = pytest(installed, example().path(), &["--memtrace=h100-80g", "-q"]);
    let mut lines = printed.lines().map(str::trim_end);
    // Skips the command and the path, which differ. pytest must print every other line that the page shows,
    // in this order.
    for shown in block.lines().skip(2).filter(|line| !line.is_empty() && *line != "...") {
        assert!(lines.any(|line| line == shown), "docs/pytest.md has {shown:?}; pytest printed\n{printed}");
    }
}

#[test]
fn the_suite_of_five_fails_over_its_limit_and_for_its_leak_and_names_the_modules() {
    let Some(installed) = installed() else { return };
    let folder = example();
    let (status, said) = pytest(installed, folder.path(), &["--memtrace=h100-80g", "-v"]);
    assert_eq!(status, Some(1), "{said}");
    has(
        &said,
        &[
            "2 failed, 3 passed",
            "memtrace: simulated GPU h100-80g, traced into memtrace-out",
            "test_large_batch_is_over_its_limit FAILED",
            "more than its limit of 16.00 MiB (device 0, simulated GPU h100-80g)",
            "MLP.up ",
            "test_outputs_are_kept_by_mistake FAILED",
            "of GPU memory behind, more than its limit of 1.00 MiB",
        ],
    );
    // The kept output also keeps its graph: activations of 4096 rows of 1024 floats (16 MiB) and of 256
    // floats.
    let kept = said.split("behind, more than its limit").nth(1).unwrap();
    has(kept, &["16.00 MiB", "MLP.down", "activation"]);
}

#[test]
fn the_same_suite_untraced_passes_and_says_that_limits_were_not_checked() {
    let Some(installed) = installed() else { return };
    let folder = example();
    let (status, said) = pytest(installed, folder.path(), &[]);
    assert_eq!(status, Some(0), "{said}");
    has(&said, &["5 passed", "the limits of 4 tests were not checked, because this run is not traced"]);
    assert!(!folder.path().join("memtrace-out").exists());
    // Without the plugin, the tests must run, and pytest must warn of the unknown marks.
    let (status, said) = pytest(installed, folder.path(), &["-p", "no:memtrace", "-k", "shape"]);
    assert_eq!(status, Some(0), "{said}");
    has(&said, &["1 passed", "Unknown pytest.mark.limit_gpu_memory"]);
}

#[test]
fn a_limit_of_host_memory_needs_no_trace_and_names_the_test_that_took_it() {
    let Some(installed) = installed() else { return };
    let folder = TempDir::new().unwrap();
    let code = "import pytest
@pytest.mark.limit_host_memory('40 GiB')
def test_small(): pass
@pytest.mark.limit_host_memory('190 MiB')
def test_large(): bytearray(b'1') * (200 << 20)
@pytest.mark.limit_host_memory('190 MiB')
def test_after(): pass
@pytest.mark.limit_host_memory
def test_wrong(): pass
@pytest.fixture
def late(request): request.node.add_marker(pytest.mark.limit_host_memory('40 GiB'))
def test_late(late): pass
";
    std::fs::write(folder.path().join("test_it.py"), code).unwrap();
    let (status, said) = pytest(installed, folder.path(), &[]);
    assert_eq!(status, Some(1), "{said}");
    has(
        &said,
        &["3 failed, 2 passed", "more than its limit of 190.00 MiB", "limit_host_memory takes one size"],
    );
    has(&said, &["the mark limit_host_memory was added after the test had begun"]);
    // The figure is only near 200 MiB: memory that the interpreter had free before the test does not count,
    // and memory that the interpreter itself takes during the test does.
    let took = said.split("the test took ").nth(1).and_then(|rest| rest.split(' ').next()).unwrap();
    assert!((199.0..202.0).contains(&took.parse::<f64>().unwrap()), "{took} MiB: {said}");
    has(&said, &["FAILED test_it.py::test_large", "FAILED test_it.py::test_wrong"]);
}

#[test]
fn budget_and_oom_name_the_test_that_took_host_memory_or_was_killed() {
    let Some(installed) = installed() else { return };
    let folder = TempDir::new().unwrap();
    let code = "import os, signal
import memtrace, torch
def test_small(): torch.zeros(1, device='cuda')
def test_large():
    taken = bytearray(b'1') * (200 << 20)
    memtrace.flush()
def test_last():
    if 'KILL' in os.environ: os.kill(os.getpid(), signal.SIGKILL)
";
    std::fs::write(folder.path().join("test_it.py"), code).unwrap();
    std::fs::write(folder.path().join("limits.toml"), "[host]\nrss = '1m'\n").unwrap();
    let ask = |words: &[&str]| {
        let output = Command::new(built("memtrace")).args(words).current_dir(folder.path()).output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    let (status, said) = pytest(installed, folder.path(), &["--memtrace=h100-80g", "--memtrace-out=whole"]);
    assert_eq!(status, Some(0), "{said}");
    has(&ask(&["budget", "--limits", "limits.toml", "whole"]), &["in the test test_it.py::test_large"]);
    let mut killed = python(installed, folder.path());
    killed.args(["-m", "pytest", "--memtrace=h100-80g", "--memtrace-out=killed"]).env("KILL", "1");
    assert!(!killed.output().unwrap().status.success());
    has(&ask(&["oom", "killed"]), &[", in the test test_it.py::test_last: by SIGKILL"]);
}

#[test]
fn limits_do_not_depend_on_the_order_of_tests_nor_on_the_xdist_worker() {
    let Some(installed) = installed() else { return };
    let folder = example();
    let peaks = |arguments: &[&str]| {
        let (_, said) = pytest(installed, folder.path(), arguments);
        has(&said, &["2 failed, 3 passed"]);
        let mut peaks: Vec<String> = said
            .lines()
            .filter(|line| line.contains("iB  test_it.py::") && !line.contains("test_shape"))
            .map(|line| line.trim().to_owned())
            .collect();
        peaks.sort();
        assert_eq!(peaks.len(), 4, "{said}");
        peaks
    };
    let one_process = peaks(&["--memtrace=h100-80g"]);
    assert_eq!(peaks(&["--memtrace=h100-80g", "-n", "2"]), one_process);
    // Names the tests in another order on the command line: the peaks must stay the same.
    let tests = ["shape", "kept_by_mistake", "leaves_nothing_behind", "over_its_limit", "step_fits"];
    let code = std::fs::read_to_string(folder.path().join("test_it.py")).unwrap();
    let names: Vec<String> = tests
        .iter()
        .map(|test| {
            let line =
                code.lines().find(|line| line.starts_with("def test_") && line.contains(test)).unwrap();
            let name = line.trim_start_matches("def ").split('(').next().unwrap();
            format!("test_it.py::{name}")
        })
        .collect();
    let mut arguments = vec!["--memtrace=h100-80g"];
    arguments.extend(names.iter().map(String::as_str));
    assert_eq!(peaks(&arguments), one_process);
}

#[test]
fn a_phantom_mark_runs_the_test_on_its_card_and_passes_its_reports_on() {
    let Some(installed) = installed() else { return };
    let folder = suite(
        r#"
import os, pytest, torch

@pytest.mark.phantom("t4")
@pytest.mark.limit_gpu_leaks
def test_name():
    assert "T4" in torch.cuda.get_device_name()

@pytest.mark.phantom("h100-80g")
@pytest.mark.limit_gpu_memory("1 MiB")
def test_over():
    torch.zeros(1 << 20, device="cuda")

@pytest.mark.phantom("h100-80g")
def test_crash():
    os.abort()

@pytest.mark.phantom("h100-80g")
@pytest.mark.parametrize("n", [1, "a b::c"])
def test_after_the_crash(n):
    assert torch.cuda.is_available()

@pytest.mark.phantom("h100-80g")
@pytest.mark.xfail
def test_xfail():
    raise ValueError

@pytest.mark.phantom("nocard")
def test_nocard():
    pass

def test_without_a_card():
    assert "MEMTRACE_PHANTOM" not in os.environ
"#,
    );
    let (status, said) = pytest(installed, folder.path(), &["-rA"]);
    assert_eq!(status, Some(1), "{said}");
    has(
        &said,
        &[
            "3 failed, 4 passed, 1 xfailed",
            "FAILED test_it.py::test_over",
            "The test used 4.00 MiB of GPU memory, more than its limit of 1.00 MiB",
            "on the simulated GPU h100-80g ended with status -6",
            "no card is called `nocard`; similar names",
            "PASSED test_it.py::test_after_the_crash[a b::c]",
        ],
    );
    // Without `--memtrace`, pytest must suggest no report and leave no traces.
    assert!(!said.contains("memtrace report") && !folder.path().join("memtrace-out").exists(), "{said}");
}

/// Whatever the value of an option is called, the inner pytest gets it.
#[test]
fn a_phantom_test_runs_if_a_value_of_an_option_is_called_like_the_folder_of_the_tests() {
    let Some(installed) = installed() else { return };
    let folder = TempDir::new().unwrap();
    std::fs::create_dir(folder.path().join("gpu")).unwrap();
    let code = "import os, pytest
@pytest.mark.phantom('t4')
def test_gpu(): assert os.environ['MEMTRACE_PHANTOM'] == 't4'
def test_without_a_card(): pass
";
    std::fs::write(folder.path().join("gpu/test_it.py"), code).unwrap();
    let file = "gpu/test_it.py";
    for (settings, arguments) in [
        ("testpaths = gpu", &["-k", "gpu"][..]),
        ("", &["gpu", "-k", "gpu"]),
        ("", &["-k", "gpu", "gpu"]),
        ("addopts = gpu", &["--rootdir", "."]),
        ("", &[file, "--junitxml", "gpu/report.xml"]),
    ] {
        std::fs::write(folder.path().join("pytest.ini"), format!("[pytest]\n{settings}\n")).unwrap();
        let (status, said) = pytest(installed, folder.path(), &[arguments, &["-rA"]].concat());
        assert_eq!(status, Some(0), "{settings} {arguments:?}: {said}");
        has(&said, &["PASSED gpu/test_it.py::test_gpu"]);
    }
}

#[test]
fn limits_hold_on_classes_parameters_and_unittest_and_in_a_changed_environment() {
    let Some(installed) = installed() else { return };
    // Exactly the tests whose names end in `fails` must fail.
    let folder = suite(
        r#"
import os, threading, unittest, pytest, torch
from pytest import mark

kept = []

def mib():
    return torch.zeros(1 << 18, device="cuda")

@pytest.fixture
def emptied(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("MEMTRACE")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)

@mark.limit_gpu_memory("1k")
def test_in_an_emptied_environment_fails(emptied):
    mib()

@mark.limit_gpu_memory("1k")
class TestOfAClass:
    def test_fails(self):
        mib()

    @mark.limit_gpu_memory("1m")
    def test_with_its_own_limit(self):
        mib()

@mark.parametrize("n", [1 << 18, pytest.param(1 << 19, marks=mark.limit_gpu_memory("1m"), id="fails")])
def test_parameter(n):
    torch.zeros(n, device="cuda")

@mark.limit_gpu_memory("1m")
def test_out_of_memory_on_purpose():
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, device="cuda")

@mark.limit_gpu_leaks
@mark.xfail
def test_expected():
    raise ValueError

@mark.limit_gpu_leaks
@mark.skip
def test_skipped():
    pass

class TestCase(unittest.TestCase):
    @mark.limit_gpu_memory("1k")
    def test_case_fails(self):
        mib()

    @mark.limit_gpu_leaks
    def test_case_that_leaks_fails(self):
        kept.append(mib())

@mark.limit_gpu_memory("1k")
def test_thread_fails():
    thread = threading.Thread(target=mib)
    thread.start()
    thread.join()

@mark.limit_gpu_memory(0)
def test_nothing():
    pass
"#,
    );
    let (status, said) = pytest(installed, folder.path(), &["--memtrace=h100-80g", "-v"]);
    assert_eq!(status, Some(1), "{said}");
    let mut outcomes = 0;
    for line in said.lines().filter(|line| line.starts_with("test_it.py::")) {
        let (name, outcome) = line.split_once(' ').unwrap();
        let must_fail = name.trim_end_matches(']').ends_with("fails");
        assert_eq!(outcome.starts_with("FAILED"), must_fail, "{line}\n{said}");
        outcomes += 1;
    }
    assert_eq!(outcomes, 12, "{said}");

    // A test that kills its process: pytest must end with the signal, too, as without memtrace.
    let code = "import ctypes, pytest, torch\n@pytest.mark.limit_gpu_memory('1m')\ndef test_dies():\n    \
                torch.zeros(9, device='cuda')\n    ctypes.string_at(0)\n";
    let (status, said) = pytest(installed, suite(code).path(), &["--memtrace=t4"]);
    assert_eq!(status, None, "{said}");
    has(&said, &["Segmentation fault", "test_dies"]);
}

#[test]
fn marks_that_are_written_wrongly_are_usage_errors() {
    let Some(installed) = installed() else { return };
    let wrong = [
        (r#"limit_gpu_memory("2 XB")"#, "'2 XB' is not a size"),
        ("limit_gpu_memory", "takes one size"),
        ("limit_gpu_memory(-1)", "-1 is not a size"),
        (r#"limit_gpu_memory("9" * 400 + "g")"#, "is not a size"),
        (r#"limit_gpu_memory(most="2g")"#, "takes one size"),
        (r#"limit_gpu_leaks("1k", "2k")"#, "takes one size"),
        ("phantom", "takes the name of a card"),
        ("phantom(3)", "takes the name of a card"),
    ];
    for (mark, words) in wrong {
        let folder = suite(&format!("import pytest\n@pytest.mark.{mark}\ndef test_x(): pass\n"));
        let (status, said) = pytest(installed, folder.path(), &[]);
        assert_eq!(status, Some(4), "{mark}: {said}");
        has(&said, &["test_it.py::test_x", words]);
    }
    let folder = suite("def test_x(): pass\n");
    let mut started = python(installed, folder.path());
    started.args(["-m", "pytest", "--memtrace=t4"]).env("GPU_MEMTRACE_PYTEST", "1");
    let (status, words) = self::said(&started.output().unwrap());
    assert_eq!(status, Some(4), "{words}");
    has(&words, &["was started to be traced"]);
    let (status, said) = pytest(installed, folder.path(), &["--memtrace=nocard"]);
    assert_eq!(status, Some(2), "{said}");
    has(&said, &["no card is called `nocard`"]);
    let (status, said) = pytest(installed, folder.path(), &["--memtrace-out=kept"]);
    assert_eq!(status, Some(4), "{said}");
    has(&said, &["--memtrace-out has no effect without --memtrace"]);
    let folder = suite(
        "import pytest\n@pytest.mark.limit_gpu_leaks\n@pytest.fixture\ndef f(): pass\ndef test_x(f): pass\n",
    );
    let (status, said) = pytest(installed, folder.path(), &[]);
    assert_eq!(status, Some(2), "{said}");
    has(&said, &["Marks cannot be applied to fixtures"]);
}

#[test]
fn the_restart_happens_once_and_takes_no_test_for_a_card() {
    let Some(installed) = installed() else { return };
    // A test that asks for another traced pytest, first in its own process, then in a child.
    let folder = suite(
        r#"
import os, subprocess, sys, pytest
pytest_plugins = ["pytester"]

def test_outer(pytester):
    pytester.makepyfile("def test_inner(): pass")
    result = pytester.runpytest_inprocess("--memtrace=t4")
    result.stderr.fnmatch_lines(["*another pytest session runs in this one*"])
    result = pytester.runpytest_subprocess("--memtrace=t4")
    result.assert_outcomes(passed=1)
    print("parent", os.getppid())
"#,
    );
    let (status, said) = pytest(installed, folder.path(), &["--memtrace", "test_it.py", "-q"]);
    assert_eq!(status, Some(1), "traced, so the inner one runs as it is: {said}");
    let (status, said) = pytest(installed, folder.path(), &["test_it.py", "-q"]);
    assert_eq!(status, Some(0), "{said}");

    let folder = suite("import memtrace\ndef test_x(): assert memtrace.is_traced()\n");
    for arguments in
        [&["--memtrace", "test_it.py"][..], &["test_it.py", "--memtrace"], &["--memtrace=t4", "-n1"]]
    {
        let (status, said) = pytest(installed, folder.path(), arguments);
        assert_eq!(status, Some(0), "{arguments:?}: {said}");
        assert_eq!(said.matches("test session starts").count(), 1, "{said}");
    }
    // In a process that is traced already, `--memtrace` would take the test for the card.
    let mut traced = python(installed, folder.path());
    traced.args(["-m", "memtrace", "run", "--quiet", "--"]).arg(&installed.python);
    traced.args(["-m", "pytest", "--memtrace", "test_it.py"]);
    let (status, words) = self::said(&traced.output().unwrap());
    assert_eq!(status, Some(4), "{words}");
    has(&words, &["--memtrace read test_it.py as the name of a card; write --memtrace="]);
    // In a configuration, `--memtrace` would take the next word of the command line for the card.
    let config = folder.path().join("pytest.ini");
    std::fs::write(&config, "[pytest]\naddopts = --memtrace\n").unwrap();
    let (status, said) = pytest(installed, folder.path(), &["-p", "no:randomly", "test_it.py"]);
    assert_eq!(status, Some(0), "{said}");
    let mut command = python(installed, folder.path());
    let (status, words) = self::said(&command.args(["-m", "pytest", "test_it.py"]).output().unwrap());
    assert_eq!(status, Some(4), "{words}");
    has(&words, &["--memtrace read test_it.py as the name of a card; write --memtrace="]);
    std::fs::write(&config, "[pytest]\naddopts = --memtrace=\n").unwrap();
    let mut command = python(installed, folder.path());
    let (status, words) = self::said(&command.args(["-m", "pytest", "test_it.py"]).output().unwrap());
    assert_eq!(status, Some(0), "{words}");

    // The package can be imported, but the command `memtrace` is not on the PATH.
    let alone = suite("def test_x(): pass\n");
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/memtrace");
    venv::succeeds(Command::new("cp").arg("-r").arg(package).arg(alone.path()));
    let mut command = clean(&cache().join("users/bin/python"));
    command.args(["-m", "pytest", "-p", "memtrace.pytest_plugin", "--memtrace"]).current_dir(alone.path());
    let (status, words) = self::said(&command.env("PATH", venv::NO_CARGO).output().unwrap());
    assert_eq!(status, Some(4), "{words}");
    has(&words, &["the command memtrace is missing", "pip install gpu-memtrace"]);
}

#[test]
fn a_limit_that_cannot_be_checked_fails_and_says_why() {
    let Some(installed) = installed() else { return };
    let folder = suite(
        "import pytest, torch\n\
         def test_free(): torch.zeros(9, device='cuda')\n\
         @pytest.mark.limit_gpu_memory('1g')\n\
         def test_memory(): torch.zeros(9, device='cuda')\n\
         @pytest.mark.limit_gpu_leaks('1g')\n\
         def test_leaks(): torch.zeros(9, device='cuda')\n",
    );
    let mut run = python(installed, folder.path());
    run.args(["-m", "memtrace", "run", "--quiet", "--phantom", "t4", "-o", "out", "--"]);
    run.arg(&installed.python).args(["-m", "pytest"]).env("MEMTRACE_ROTATE", "64k");
    let (status, said) = said(&run.output().unwrap());
    assert_eq!(status, Some(1), "{said}");
    has(&said, &["2 failed, 1 passed", "the trace has several files, because MEMTRACE_ROTATE is set"]);
}

#[test]
fn limits_of_a_run_without_a_gpu_fail_it_and_say_that_nothing_was_checked() {
    let Some(installed) = installed() else { return };
    let folder = suite(
        "import pytest, torch\n\
         @pytest.mark.skipif(not torch.cuda.is_available(), reason='no GPU')\n\
         @pytest.mark.limit_gpu_memory('1g')\n\
         def test_memory(): torch.zeros(9, device='cuda')\n\
         def test_free(): pass\n",
    );
    let mut run = python(installed, folder.path());
    run.args(["-m", "pytest", "--memtrace"]).env("CUDA_VISIBLE_DEVICES", "");
    let (status, words) = self::said(&run.output().unwrap());
    assert_eq!(status, Some(1), "{words}");
    has(&words, &["1 passed, 1 skipped", "the limit of 1 test was not checked", "allocated no GPU memory"]);
    let mut workers = python(installed, folder.path());
    workers.args(["-m", "pytest", "--memtrace", "-n", "2"]).env("CUDA_VISIBLE_DEVICES", "");
    let (status, words) = self::said(&workers.output().unwrap());
    assert_eq!(status, Some(1), "{words}");
    has(&words, &["1 passed, 1 skipped", "the limit of 1 test was not checked"]);
    let (status, words) = pytest(installed, folder.path(), &["--memtrace=t4"]);
    assert_eq!(status, Some(0), "{words}");
}

#[test]
fn a_test_whose_trace_ends_early_or_is_cut_fails_its_limits() {
    let Some(installed) = installed() else { return };
    let spoilers = [
        // Lets writes fail, as on a full disk.
        "resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(trace), resource.RLIM_INFINITY))",
        "os.close(descriptor)",
        "os.truncate(trace, 0)",
        "os.remove(trace)",
    ];
    for spoiler in spoilers {
        let folder = suite(&format!(
            r#"
import os, resource, pytest, torch
kept = []

def spoil():
    torch.zeros(1, device="cuda")
    memtrace.flush()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            trace = os.readlink(f"/proc/self/fd/{{descriptor}}")
        except OSError:
            continue
        if trace.endswith(".csv"):
            {spoiler}
            return
    raise AssertionError("no trace")

import memtrace

@pytest.mark.limit_gpu_memory("1 MiB")
@pytest.mark.limit_gpu_leaks("1 MiB")
def test_grows():
    spoil()
    kept.append(torch.zeros(1 << 28, device="cuda"))
    for _ in range(2000):
        torch.zeros(9, device="cuda")

@pytest.mark.limit_gpu_leaks("1 MiB")
def test_leaks():
    kept.append(torch.zeros(1 << 28, device="cuda"))
"#
        ));
        let (status, words) = pytest(installed, folder.path(), &["--memtrace=h100-80g"]);
        assert_eq!(status, Some(1), "{spoiler}: {words}");
        has(&words, &["2 failed", "cannot be checked: "]);
    }
}

#[test]
fn memory_that_a_fixture_allocates_at_its_end_counts_for_its_test() {
    let Some(installed) = installed() else { return };
    let folder = suite(
        r#"
import pytest, torch

@pytest.fixture
def late():
    yield
    torch.zeros(1 << 20, device="cuda")

@pytest.fixture(scope="module")
def of_module():
    yield
    torch.zeros(1 << 20, device="cuda")

@pytest.mark.limit_gpu_memory("1 MiB")
def test_yield(late):
    pass

@pytest.mark.limit_gpu_memory("1 MiB")
def test_finalizer(request):
    request.addfinalizer(lambda: torch.zeros(1 << 20, device="cuda"))

@pytest.mark.limit_gpu_memory("1 MiB")
def test_last_of_the_module(of_module):
    torch.zeros(9, device="cuda")
"#,
    );
    let (status, words) = pytest(installed, folder.path(), &["--memtrace=h100-80g"]);
    assert_eq!(status, Some(1), "{words}");
    has(
        &words,
        &[
            "3 passed, 2 errors",
            "ERROR at teardown of test_yield",
            "ERROR at teardown of test_finalizer",
            "The test used 4.00 MiB of GPU memory, more than its limit of 1.00 MiB",
        ],
    );
}

#[test]
fn memory_of_child_processes_and_of_extensions_counts_for_its_test() {
    let Some(installed) = installed() else { return };
    // Exactly the tests whose names end in `passes` must pass.
    let folder = suite(
        r#"
import ctypes, multiprocessing, os, signal, subprocess, sys, time
import pytest, torch
limited = pytest.mark.limit_gpu_memory("100 MiB")
CHILD = "import sys, torch; x = torch.empty(int(sys.argv[1]) << 18, device='cuda')"
# Takes as much memory without torch, whose import takes two seconds.
SMALL_CHILD = """
import ctypes, sys, time
cuda, context, address = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(), ctypes.c_void_p()
size = ctypes.c_size_t(int(sys.argv[1]) << 20)
assert cuda.cuInit(0) == 0 and cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0 and cuda.cuMemAlloc_v2(ctypes.byref(address), size) == 0
"""

def program(mib, then="", **options):
    return subprocess.Popen([sys.executable, "-c", SMALL_CHILD + then, str(mib)], **options)

def fill(mib):
    torch.empty(mib << 18, device="cuda")

@limited
def test_fork():
    child = os.fork()
    if child == 0:
        fill(200)
        os._exit(0)
    os.waitpid(child, 0)

@limited
def test_program():
    subprocess.run([sys.executable, "-c", CHILD, "200"], check=True)

@limited
def test_grandchild():
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], '200'])"
    subprocess.run([sys.executable, "-c", code, CHILD], check=True)

@limited
def test_two_at_once():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [program(70, "print(1, flush=True); sys.stdin.read()", **pipes) for _ in range(2)]
    # Both have their memory before one of them ends.
    for child in children:
        child.stdout.read(1)
    for child in children:
        child.communicate()

@limited
def test_one_after_the_other_passes():
    fill(20)
    for _ in range(2):
        program(70).wait()

@limited
def test_compressed():
    program(200, env={**os.environ, "MEMTRACE_COMPRESS": "gz"}).wait()

@limited
def test_trace_without_a_first_row():
    # As on a full disk: the trace ends in its second block of 1 KiB.
    code = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); import os, sys\n"
    code += "os.execv(sys.executable, [sys.executable, '-c', sys.argv[1], '200'])"
    subprocess.run([sys.executable, "-c", code, CHILD], env=os.environ, check=True)

def kill(mib):
    child = program(mib, "print(1, flush=True); time.sleep(60)", stdout=subprocess.PIPE)
    child.stdout.read(1)
    child.kill()
    child.wait()

@limited
def test_killed():
    kill(200)

@limited
def test_small_and_killed_passes():
    kill(20)

@limited
def test_still_runs(request):
    child = program(200, "print(1, flush=True); time.sleep(60)", stdout=subprocess.PIPE)
    request.addfinalizer(child.kill)
    child.stdout.read(1)
    time.sleep(1)

@pytest.fixture(scope="module")
def server():
    child = program(200, "print(1, flush=True); time.sleep(60)", stdout=subprocess.PIPE)
    child.stdout.read(1)
    time.sleep(1)
    yield
    child.kill()

@limited
def test_with_a_server_passes(server):
    pass

def runtime():
    return ctypes.CDLL("libcudart.so.13")

@limited
def test_extension():
    address = ctypes.c_void_p()
    assert runtime().cudaMalloc(ctypes.byref(address), ctypes.c_size_t(200 << 20)) == 0
    runtime().cudaFree(address)

@pytest.mark.limit_gpu_leaks("1 MiB")
def test_extension_that_leaks():
    assert runtime().cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(2 << 20)) == 0

@pytest.mark.limit_gpu_leaks
def test_program_that_ended_passes():
    program(200).wait()
"#,
    );
    let apart = "--deselect=test_it.py::test_trace_without_a_first_row";
    for (workers, count) in [
        (&[][..], "10 failed, 4 passed"),
        // With xdist, a trace without a first row fails every test that runs at the same time, because it
        // does not show which process wrote it. So that test is left out.
        (&["-n", "2", apart], "9 failed, 4 passed"),
    ] {
        let arguments = [&["--memtrace=h100-80g", "-v"], workers].concat();
        let (status, said) = pytest(installed, folder.path(), &arguments);
        assert_eq!(status, Some(1), "{said}");
        has(&said, &[count, "(1 child process)", "has not ended"]);
        assert!(!said.contains("passes - "), "{said}");
    }
}

#[test]
fn limits_are_checked_where_tracing_is_switched_off_or_another_plugin_runs_the_test() {
    let Some(installed) = installed() else { return };
    let folder = suite(
        "import pytest, torch\nkept = []\n\
         @pytest.mark.limit_gpu_leaks\n\
         def test_leaks(): kept.append(torch.zeros(9, device='cuda'))\n",
    );
    let mut off = python(installed, folder.path());
    off.args(["-m", "pytest", "--memtrace=t4"]).env("MEMTRACE_ENABLED", "0");
    let (status, words) = said(&off.output().unwrap());
    assert_eq!(status, Some(4), "{words}");
    has(&words, &["was started to be traced", "MEMTRACE_ENABLED is 0"]);
    // Adds a plugin that runs each test itself, as plugins do that repeat a test or run it in another
    // process.
    let conftest = "import pytest\nfrom _pytest.runner import runtestprotocol\n\
                    class Runner:\n    @pytest.hookimpl(tryfirst=True)\n    \
                    def pytest_runtest_protocol(self, item, nextitem):\n        \
                    runtestprotocol(item, nextitem=nextitem)\n        return True\n\
                    @pytest.hookimpl(trylast=True)\n\
                    def pytest_configure(config): config.pluginmanager.register(Runner())\n";
    std::fs::write(folder.path().join("conftest.py"), conftest).unwrap();
    let (status, words) = pytest(installed, folder.path(), &["--memtrace=t4"]);
    assert_eq!(status, Some(1), "{words}");
    has(&words, &["ERROR at teardown of test_leaks", "of GPU memory behind"]);
}

#[test]
fn limits_count_daemons_marks_of_fixtures_and_libraries_whose_names_begin_like_cudas() {
    let Some(installed) = installed() else { return };
    let folder = suite(
        r#"
import ctypes, pathlib, subprocess, sys, time
import pytest, torch
limited = pytest.mark.limit_gpu_memory("100 MiB")
CHILD = "import torch; x = torch.empty(200 << 18, device='cuda')"

@limited
def test_daemon():
    # The shell ends before the program has its first memory.
    code = "import time; time.sleep(1); " + CHILD + "; open('done', 'w').close()"
    subprocess.run(["sh", "-c", '"$0" -c "$1" &', sys.executable, code], check=True)
    while not pathlib.Path("done").exists():
        time.sleep(0.05)

def allocate():
    address = ctypes.c_void_p()
    assert ctypes.CDLL("./libcustom.so").take(ctypes.byref(address), ctypes.c_size_t(200 << 20)) == 0

@limited
def test_library():
    allocate()

@pytest.fixture
def mark(request):
    request.node.add_marker(limited)

def test_mark_of_a_fixture(mark):
    subprocess.run([sys.executable, "-c", CHILD], check=True)

def test_without_a_limit_passes():
    allocate()
"#,
    );
    let code = "#include <stddef.h>\nint cudaMalloc(void **, size_t);\n\
                int take(void **p, size_t n) { return cudaMalloc(p, n); }\n";
    std::fs::write(folder.path().join("custom.c"), code).unwrap();
    let mut gcc = Command::new("gcc");
    gcc.args(["-shared", "-fPIC", "-o", "libcustom.so", "custom.c"]).current_dir(folder.path());
    assert!(gcc.status().unwrap().success());
    let (status, said) = pytest(installed, folder.path(), &["--memtrace=h100-80g", "-v"]);
    assert_eq!(status, Some(1), "{said}");
    has(&said, &["3 failed, 1 passed", "(1 child process)"]);
}
