//! Python versions that memtrace was not tested with, free-threaded builds, and lazy imports.

use std::path::{Path, PathBuf};

use memtrace_trace::csv::RowReader;

use crate::common::pythons::pythons;
use crate::common::{self, Trace, Traced, compiled, untraced};

/// Compiles the stand-in for torch's caching allocator, and its libraries.
fn stand_in_for_torch() -> PathBuf {
    let runtime = "libcudart.so.12";
    compiled("fakes/cudart.c", runtime, &[]);
    compiled("fakes/c10.c", "libc10.so", &[]);
    compiled("fakes/c10_cuda.c", "libc10_cuda.so", &["libc10.so", runtime])
}

#[test]
fn degraded_names_a_python_that_was_never_tried_and_a_free_threaded_one() {
    let torch = stand_in_for_torch();
    let fake = compiled("other_tools/python_version.c", "libpython_version.so", &[]);
    let preload = format!("{}:{}", fake.display(), common::library("libmemtrace.so").display());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/owners/any_python.py");
    // Asks each Python for its version. A Python without a shared library defines this function itself,
    // before any preloaded library, and cannot be faked.
    let query = "import ctypes; f = ctypes.CDLL(None).Py_GetVersion; f.restype = ctypes.c_char_p; print(f())";
    let is_faked = |python: &PathBuf| {
        let mut command = untraced(python, &["-c", query]);
        let output = command.env("LD_PRELOAD", &fake).env("FAKE_PYTHON_VERSION", "fake").output().unwrap();
        String::from_utf8(output.stdout).unwrap().trim() == "b'fake'"
    };
    let Some(python) = pythons().into_values().rev().find(is_faked) else {
        return eprintln!("SKIPPED: no Python of this machine has a shared library");
    };
    for (version, degraded, warning) in [
        ("3.15.0 (main, Oct 7 2026)", vec![], ""),
        ("3.16.0 (main, Oct 7 2027)", vec!["Python 3.16 is untested (tested: 3.9 to 3.15)"], ""),
        (
            "3.14.2 free-threading build (main, Dec 5 2025)",
            vec![
                "Python 3.14 is a free-threaded build: no Python lines in stacks, no search for holders \
                 (leaks --holders)",
            ],
            "MEMTRACE_STACKS=python: this Python is a free-threaded build; stacks contain only ops and \
             modules",
        ),
    ] {
        let traced = Traced::new(&python, &[script.to_str().unwrap(), torch.to_str().unwrap(), "calls"]);
        let traced = traced.env("MEMTRACE_STACKS", "python").env("LD_PRELOAD", &preload);
        let ran = traced.env("FAKE_PYTHON_VERSION", version).run();
        assert_eq!(ran.status(), 0, "{version}: {}", ran.stderr());
        assert!(ran.stderr().contains(warning), "{version}: {}", ran.stderr());
        assert_eq!(
            ran.stderr().contains("MEMTRACE_STACKS"),
            !warning.is_empty(),
            "{version}: {}",
            ran.stderr()
        );
        let trace = &ran.files()[0];
        let found = RowReader::open(trace).unwrap().meta().degraded.clone();
        let of_python = found.into_iter().filter(|line| line.starts_with("Python "));
        assert_eq!(of_python.collect::<Vec<_>>(), degraded, "{version}");
        // On every version, blocks must have the names of their modules.
        let rows = Trace::read(trace).rows;
        assert!(rows.iter().any(|row| row.module.starts_with("Net.inner")), "{version}");
    }
}

/// Each name is found where a function sets it, even if an instruction of this Python sets two names.
#[test]
fn every_python_gives_the_line_that_sets_a_variable() {
    let script = r#"
def kept(make):
    first, second = make(), make()
    third = make(); third.append(1)
    return first, second, third

def aliases(owner, table):
    kept = owner.kept
    first = table["first"]
    total = 0; total += first
    return kept, first, total

lines = frames.Lines(time.monotonic() + 60)
found = [lines.setting(kept.__code__, name, frames.LOCAL_SETS) for name in ("first", "second", "third")]
found += lines.filling([kept.__code__], "third")[1]
print(*(line - kept.__code__.co_firstlineno for line in found))
filled = {name: lines.filling([aliases.__code__], name)[1] for name in ("kept", "first", "total")}
print(*(line - aliases.__code__.co_firstlineno for line in sum(filled.values(), [])))
"#;
    // A line that gives an object another name does not put anything into it.
    expect_of_frames(script, "1 1 2 2\n3\n");
}

/// A traceback begins at the outermost frame.
#[test]
fn the_innermost_frames_of_a_deep_traceback_are_kept() {
    let script = r#"
def down(depth):
    if depth == frames.MAX_FRAMES + 100:
        raise MemoryError
    down(depth + 1)

try:
    down(1)
except MemoryError:
    found = frames.left_frames()
depths = [frame.f_locals["depth"] for frame in found]
print(depths == [*range(frames.MAX_FRAMES + 100, 100, -1)])
"#;
    expect_of_frames(script, "True\n");
}

/// Runs a script with the tracer's module `frames` in every Python, and compares what it prints.
fn expect_of_frames(script: &str, expected: &str) {
    let frames = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tracer/preload/python/tracer/frames.py");
    let load = r#"
import dis, sys, time, types
for name in ("tracer", "tracer.native", "tracer.frames"):
    sys.modules[name] = types.ModuleType(name)
native, frames = sys.modules["tracer.native"], sys.modules["tracer.frames"]
native.frame_values = native.learn_frame_values = None
frames.__package__ = "tracer"
exec(open(sys.argv[1]).read(), vars(frames))
"#;
    let script = format!("{load}{script}");
    for (version, python) in pythons() {
        let output = untraced(&python, &["-c", &script]).arg(&frames).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{version:?}: {said}");
    }
}

/// Compares the tracer's imports with the list in its loader. If a program makes all imports lazy, Python
/// 3.15 imports through another built-in function, which needs the name that the loader deletes.
#[test]
fn lazy_imports_of_the_tracer_equal_the_list_of_its_loader() {
    let loader = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tracer/preload/python/tracer/loader.py");
    let script = r#"
import builtins, sys, types
space = {}
exec(open(sys.argv[1]).read(), space)
def run_module(name, namespace):
    if hasattr(sys, "set_lazy_imports"):
        sys.set_lazy_imports("all")
    own = namespace["__builtins__"]
    assert own["__lazy_import__"] is own["__import__"] is not builtins.__import__
    text = "import json\nfrom .native import value" if name == "start" else "value = 3"
    exec(compile(text, name, "exec"), namespace)
native = types.ModuleType("native")
native.value = 5
start = space["load"](native, run_module, vars(builtins))("start")
print(start.value, start.json.__name__)
"#;
    for (version, python) in pythons() {
        let output = untraced(&python, &["-c", script]).arg(&loader).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "5 json\n", "{version:?}: {said}");
    }
}
