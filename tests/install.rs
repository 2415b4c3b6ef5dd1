//! Installs a wheel of this build as a user would, in each layout, with a `PATH` without cargo.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::common::command::root;
use crate::common::copied::copy_program;
use crate::common::torch::{self, Torch, clean, text};
use crate::common::venv::{self, NO_CARGO, pip_install, succeeds, wheel, wheel_python};

/// Returns a command for the installed `memtrace`, on a machine without Rust.
fn installed(command: &Path) -> Command {
    let mut command = clean(command);
    command.env("PATH", NO_CARGO);
    command
}

/// Returns the path that `memtrace lib` prints.
fn lib(command: &Path) -> PathBuf {
    let output = succeeds(installed(command).arg("lib"));
    PathBuf::from(text(&output.stdout).trim_end())
}

#[test]
fn a_wheel_in_a_fresh_environment_runs_the_main_job_without_cargo() {
    let (Some(tools), Some(torch)) = (wheel_python(), Torch::installed("2.11.0")) else { return };
    let folder = TempDir::new().unwrap();
    let Some(wheel) = wheel(folder.path()) else { return };
    let python = venv::venv(&folder.path().join("env"), &[&tools, &torch.python]);
    pip_install(&python, &[&wheel]);
    let command = python.with_file_name("memtrace");
    let memtrace = |arguments: &[&str]| {
        let mut command = installed(&command);
        text(&succeeds(command.args(arguments).current_dir(folder.path())).stdout)
    };

    let script = root().join("examples/train_gpt.py").display().to_string();
    let interpreter = python.display().to_string();
    let run = ["run", "--phantom", "h100-80g", "-o", "out", "--", &interpreter, &script, "--steps", "2"];
    assert!(memtrace(&run).contains("step 1: peak"));
    assert!(memtrace(&["summary", "out"]).contains("simulated GPU"));
    assert!(memtrace(&["peak", "--by", "module", "--depth", "3", "--top", "4", "out"]).contains("GPT.h.*"));
    assert!(memtrace(&["oom", "out"]).contains("out of memory"));
    assert!(memtrace(&["report", "out", "-o", "report.html"]).contains("wrote report.html"));
    assert!(memtrace(&["doctor", "--phantom", "--", &interpreter]).contains("blocks"));

    // Run the same script without the launcher.
    let shell = "LD_PRELOAD=$(memtrace lib):$(memtrace lib --phantom) python \"$0\" --steps 1";
    let path = format!("{}:{NO_CARGO}", python.parent().unwrap().display());
    let mut preloaded = clean(Path::new("sh"));
    preloaded.args(["-c", shell, &script]).env("PATH", path).env("MEMTRACE_PHANTOM", "h100-80g");
    succeeds(preloaded.env("MEMTRACE_OUT", folder.path().join("preloaded")));
    assert!(memtrace(&["summary", "preloaded"]).contains("simulated GPU"));
}

#[test]
fn the_lib_command_finds_the_libraries_in_every_layout() {
    let Some(tools) = wheel_python() else { return };
    // Installs into a folder with a space in its name, and into one without.
    for prefix in ["memtrace ", "memtrace-"] {
        let folder = TempDir::with_prefix(prefix).unwrap();
        let Some(wheel) = wheel(folder.path()) else { return };
        let python = venv::venv(&folder.path().join("env"), &[&tools]);
        pip_install(&python, &[&wheel]);
        let command = python.with_file_name("memtrace");
        assert_eq!(lib(&command), venv::packages(&python).join("memtrace/lib/libmemtrace.so"));
        let said = text(&succeeds(installed(&command).arg("lib")).stderr);
        assert_eq!(said.contains("LD_PRELOAD cannot name this path"), prefix.contains(' '), "{said}");
        let phantom = text(&succeeds(installed(&command).args(["lib", "--phantom"])).stdout);
        assert!(phantom.ends_with("memtrace/lib/libmemtrace_phantom.so\n"), "{phantom}");

        // With `pip install --target` the packages are next to `bin`, and Python finds them through
        // PYTHONPATH.
        let target = folder.path().join("target");
        pip_install(&python, &[Path::new("--target"), &target, &wheel]);
        assert_eq!(lib(&target.join("bin/memtrace")), target.join("memtrace/lib/libmemtrace.so"));
        let mut module = installed(&tools);
        module.args(["-m", "memtrace", "lib"]).env("PYTHONPATH", &target);
        let path = text(&succeeds(&mut module).stdout);
        assert_eq!(Path::new(path.trim_end()), target.join("memtrace/lib/libmemtrace.so"));
    }
}

#[test]
fn an_editable_install_uses_the_package_of_the_tree() {
    let Some(tools) = wheel_python() else { return };
    let folder = TempDir::new().unwrap();
    let python = venv::venv(&folder.path().join("env"), &[&tools]);
    let mut pip = clean(&python);
    pip.args(["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation", "--quiet", "-e"]);
    pip.arg(root()).env("GPU_MEMTRACE_BUILT", torch::built("libmemtrace.so").parent().unwrap());
    succeeds(&mut pip);
    let command = python.with_file_name("memtrace");
    assert_eq!(lib(&command), venv::packages(&python).join("memtrace/lib/libmemtrace.so"));
    let mut import = installed(&python);
    let output = succeeds(import.args(["-c", "import memtrace; print(memtrace.__file__)"]));
    assert_eq!(
        text(&output.stdout).trim_end(),
        root().join("python/memtrace/__init__.py").display().to_string()
    );
}

#[test]
fn a_command_alone_says_how_to_get_its_libraries() {
    // `cargo install` installs only the command, without libraries.
    let folder = TempDir::new().unwrap();
    let alone = folder.path().join("memtrace");
    copy_program(env!("CARGO_BIN_EXE_memtrace").as_ref(), &alone);
    for arguments in [&["lib"][..], &["lib", "--phantom"], &["run", "--", "true"]] {
        let output = installed(&alone).args(arguments).current_dir(folder.path()).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        let said = text(&output.stderr).replace('\n', " ");
        assert!(said.contains("cannot find libmemtrace") && said.contains("pip install ."), "{said}");
    }
}

/// Changes a command of the documentation so that it also preloads the simulated GPU.
fn on_a_phantom(shell: &str) -> String {
    assert!(shell.contains("$(memtrace lib)"), "{shell}");
    shell.replace("$(memtrace lib)", "$(memtrace lib):$(memtrace lib --phantom)")
}

#[test]
fn the_shell_of_the_docker_slurm_and_kubernetes_examples_traces_each_process() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    let work = folder.path();
    std::fs::write(work.join("train.py"), "import torch\ntorch.zeros(1 << 20, device='cuda')\n").unwrap();
    // A stand-in for srun that starts two ranks, one after the other.
    let srun = "#!/bin/sh\nfor rank in 0 1; do SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_NTASKS=2 \"$@\" || \
                exit 1; done\n";
    let bin = work.join("bin");
    std::fs::create_dir(&bin).unwrap();
    std::fs::write(bin.join("srun"), srun).unwrap();
    succeeds(Command::new("chmod").arg("+x").arg(bin.join("srun")));
    let built = Path::new(env!("CARGO_BIN_EXE_memtrace")).parent().unwrap();
    let folders = [bin.as_path(), built, torch.python.parent().unwrap(), Path::new(NO_CARGO)];
    let path = folders.map(|folder| folder.display().to_string()).join(":");
    let run = |arguments: &[String], out: &str| {
        let [program, arguments @ ..] = arguments else { panic!("no program") };
        let mut command = clean(Path::new(program));
        command.args(arguments).current_dir(work).env("PATH", &path).env("MEMTRACE_PHANTOM", "2xt4");
        text(&succeeds(command.env("SLURM_JOB_ID", "7").env("MEMTRACE_OUT", out)).stdout)
    };

    let page = std::fs::read_to_string(root().join("docs/install.md")).unwrap();
    let list_after = |start: &str| -> Vec<String> {
        let line = page.lines().find_map(|line| line.trim().strip_prefix(start)).expect(start);
        let words: Vec<String> = serde_json::from_str(line).unwrap();
        words
            .into_iter()
            .map(|word| if word.contains("LD_PRELOAD") { on_a_phantom(&word) } else { word })
            .collect()
    };
    for (start, out) in [("CMD ", "docker"), ("command: ", "kubernetes")] {
        run(&list_after(start), out);
        assert_eq!(torch::traces(&work.join(out)).len(), 1, "{out}");
    }
    let slurm = page.split("```").find(|block| block.contains("#SBATCH")).unwrap();
    let slurm = on_a_phantom(slurm.trim_start_matches("sh\n")).replace("source /shared/env/bin/activate", "");
    let printed = run(&["bash".into(), "-c".into(), slurm], "unused");
    assert_eq!(torch::traces(&work.join("traces/7")).len(), 2);
    assert!(printed.contains("rank") && printed.contains("4.00 MiB"), "{printed}");
}

#[test]
fn a_build_without_cargo_says_so() {
    let Some(tools) = wheel_python() else { return };
    let folder = TempDir::new().unwrap();
    let build = |variable: &str, value: &Path| {
        let mut build = clean(&tools);
        build.args(["-m", "hatchling", "build", "-t", "wheel", "-d"]).arg(folder.path());
        // HOME is an empty folder, because cargo is often in the home folder.
        build.current_dir(root()).env("PATH", NO_CARGO).env("HOME", folder.path()).env(variable, value);
        let output = build.output().unwrap();
        assert!(!output.status.success());
        text(&output.stderr)
    };
    let said = build("LANG", Path::new("C"));
    assert!(said.contains("needs Rust") && said.contains("scripts/wheel"), "{said}");
    let said = build("GPU_MEMTRACE_BUILT", folder.path());
    assert!(said.contains("lacks memtrace, libmemtrace.so, libmemtrace_phantom.so"), "{said}");
}

#[test]
fn pip_learns_the_metadata_without_a_build() {
    let Some(tools) = wheel_python() else { return };
    let folder = TempDir::new().unwrap();
    let mut asks = clean(&tools);
    asks.args([
        "-c",
        "import build_backend, sys; build_backend.prepare_metadata_for_build_wheel(sys.argv[1])",
    ]);
    // PIP_BUILD_TRACKER makes the call look like a call from pip, which sets this variable. PYTHONPATH
    // replaces the `backend-path` of pyproject.toml.
    asks.arg(folder.path()).env("PIP_BUILD_TRACKER", folder.path()).env("PYTHONPATH", root().join("python"));
    succeeds(asks.current_dir(root()).env("PATH", NO_CARGO).env("HOME", folder.path()));
    let version = env!("CARGO_PKG_VERSION");
    let metadata = folder.path().join(format!("gpu_memtrace-{version}.dist-info/METADATA"));
    assert!(fs::read_to_string(metadata).unwrap().contains("Name: gpu-memtrace"));
}
