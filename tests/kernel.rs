//! `python -m memtrace.kernel`, installed from a wheel of this build: notebooks that are traced on a simulated GPU.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

use crate::common::pages;
use crate::common::torch::{clean, succeeded, text};
use crate::common::venv::{self, Installed, installed};

/// Returns a command for a program of the environment, for a user whose home is `home`.
fn program(installed: &Installed, name: &str, home: &Path) -> Command {
    let mut command = clean(&installed.python.with_file_name(name));
    command.current_dir(home).env("HOME", home).env("PATH", venv::NO_CARGO);
    for variable in ["JUPYTER_DATA_DIR", "JUPYTER_PATH", "XDG_DATA_HOME", "VIRTUAL_ENV"] {
        command.env_remove(variable);
    }
    command
}

fn kernel(installed: &Installed, arguments: &[&str], home: &Path) -> Output {
    program(installed, "python", home).args(["-m", "memtrace.kernel"]).args(arguments).output().unwrap()
}

/// Returns the text that an invalid request prints on stderr.
fn refused(installed: &Installed, arguments: &[&str], home: &Path) -> String {
    let output = kernel(installed, arguments, home);
    assert_eq!(output.status.code(), Some(2), "{arguments:?}: {}", text(&output.stdout));
    text(&output.stderr)
}

/// Returns the outputs of a notebook's cells: the texts of each, and its HTML.
fn outputs(notebook: &Path) -> Vec<String> {
    let notebook: Value = serde_json::from_slice(&std::fs::read(notebook).unwrap()).unwrap();
    let text_of = |value: &Value| match value {
        Value::Array(lines) => lines.iter().filter_map(Value::as_str).collect(),
        other => other.as_str().unwrap_or_default().to_owned(),
    };
    let of_cell = |cell: &Value| -> String {
        let outputs = cell["outputs"].as_array().cloned().unwrap_or_default();
        let texts = outputs.iter().flat_map(|output| {
            [&output["text"], &output["data"]["text/plain"], &output["data"]["text/html"]].map(text_of)
        });
        texts.collect()
    };
    notebook["cells"].as_array().unwrap().iter().map(of_cell).collect()
}

#[test]
fn kernel_runs_the_notebook_of_the_examples_with_its_magics_and_the_page() {
    let Some(installed) = installed() else { return };
    let home = TempDir::new().unwrap();
    let said = succeeded("install", &kernel(installed, &["install", "--phantom", "h100-80g"], home.path()));
    assert!(said.contains("installed the kernel memtrace-h100-80g in"), "{said}");
    assert!(said.contains("JupyterLab shows it as Python (memtrace, h100-80g)"), "{said}");

    // Copy the notebook, because its traces are written next to it.
    let notebook = home.path().join("memory.ipynb");
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/notebook/memory.ipynb");
    std::fs::copy(example, &notebook).unwrap();
    let mut convert = program(installed, "python", home.path());
    convert.args(["-m", "nbconvert", "--to", "notebook", "--execute", "--inplace"]).arg(&notebook);
    succeeded("nbconvert", &convert.output().unwrap());
    let cells = outputs(&notebook);
    // The cell's two Linear layers keep activations: 4096 rows of 1024 floats and of 4096 floats, each twice.
    let added = &cells[2];
    assert!(added.starts_with("The cell added ") && added.contains("activation"), "{added}");
    assert_eq!(added.trim(), pages::first_block("docs/python.md", "```text\n").trim());
    let peak = cells.iter().find(|cell| cell.contains("peak of allocated memory")).expect("a report");
    assert!(peak.contains("Sequential.0") && peak.contains("Sequential.2"), "{peak}");
    assert!(cells.last().unwrap().contains("<iframe srcdoc="), "{cells:?}");
    // The kernel wrote its traces next to the notebook.
    let files = std::fs::read_dir(home.path().join("memtrace-out")).unwrap().count();
    assert!(files > 0);

    let said = succeeded("remove", &kernel(installed, &["remove", "memtrace-h100-80g"], home.path()));
    assert!(said.starts_with("removed "), "{said}");
    let said = refused(installed, &["remove", "memtrace-h100-80g"], home.path());
    assert!(said.contains("no kernel is called memtrace-h100-80g"), "{said}");
}

#[test]
fn kernel_that_cannot_run_is_not_installed_and_says_why() {
    let Some(installed) = installed() else { return };
    let home = TempDir::new().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&["install", "--phantom", "h100-80gb"], "no card is called `h100-80gb`"),
        (&["install", "--phantom", "list"], "--phantom list names no card"),
        (&["install", "--name", "a/b"], "Invalid kernel name"),
        (&["install", "--prefix", "/proc/none"], "cannot be installed"),
        (&["install", "--prefix", "x", "--sys-prefix"], "not allowed with"),
        (&["remove", "memtrace"], "no kernel is called memtrace"),
    ];
    for (arguments, words) in cases {
        let said = refused(installed, arguments, home.path()).replace('\n', " ");
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
    // In a Python without Jupyter, the error must name the missing package.
    let bare = home.path().join("bare");
    venv::succeeds(Command::new(&installed.python).args(["-m", "venv", "--without-pip"]).arg(&bare));
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("python");
    let mut command = clean(&bare.join("bin/python"));
    command.args(["-m", "memtrace.kernel", "install"]).env("PYTHONPATH", package);
    let said = text(&command.output().unwrap().stderr);
    assert!(said.contains("lacks ipykernel") && said.contains("pip install ipykernel"), "{said}");
    // A kernel that memtrace did not install is not removed.
    let kernels = home.path().join(".local/share/jupyter/kernels/other");
    std::fs::create_dir_all(&kernels).unwrap();
    let spec = r#"{"argv": ["python3", "{connection_file}"], "display_name": "Other", "language": "python"}"#;
    std::fs::write(kernels.join("kernel.json"), spec).unwrap();
    let said = refused(installed, &["remove", "other"], home.path());
    assert!(said.contains("the kernel other is not one of memtrace's"), "{said}");
    assert!(kernels.join("kernel.json").exists());
}

#[test]
fn kernel_measures_a_cell_that_maps_memory_of_another_process_or_uses_two_gpus() {
    let mut command = Command::new("python3");
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    command.arg(root.join("tests/scripts/package/mapped_cell.py")).env("PYTHONPATH", root.join("python"));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    succeeded("the memory of a cell", &command.output().unwrap());
}
