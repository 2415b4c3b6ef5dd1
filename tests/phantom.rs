//! The phantom device under real PyTorch, without the tracer.
//!
//! Each script of the table runs on every torch of [`TORCHES`] and asserts what must hold. A torch
//! that `scripts/torch-env` has not installed skips its tests and says so; with `CI=true` it fails them.

#[path = "common/installed.rs"]
mod installed;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use installed::python;
const TORCHES: [&str; 2] = ["2.11.0", "2.6.0"];

/// One test per script and torch: its name, the script, the card, and what else the environment has.
macro_rules! scripts {
    ($($name:ident: $script:literal on $card:literal $(with $($key:literal = $value:literal)+)?;)*) => {
        mod torch_2_11_0 {
            $(#[test] fn $name() { super::script("2.11.0", $script, $card, &[$($(($key, $value)),+)?]); })*
        }
        mod torch_2_6_0 {
            $(#[test] fn $name() { super::script("2.6.0", $script, $card, &[$($(($key, $value)),+)?]); })*
        }
    };
}

scripts! {
    a_gpt_takes_what_arithmetic_says: "phantom/gpt.py" on "h100-80g";
    a_conv_net_runs_in_every_way: "phantom/conv.py" on "a100-80g";
    an_oom_is_torchs_own_at_the_capacity_given: "phantom/oom.py" on "mem=8g,cc=8.0,context=512m";
    sizes_that_depend_on_values_are_as_full_as_can_be: "phantom/dynamic_sizes.py" on "h100-80g";
    sizes_that_depend_on_values_can_be_half: "phantom/dynamic_sizes.py" on "h100-80g" with "MEMTRACE_PHANTOM_DYNAMIC" = "half";
    sizes_that_depend_on_values_can_be_nothing: "phantom/dynamic_sizes.py" on "h100-80g" with "MEMTRACE_PHANTOM_DYNAMIC" = "empty";
    everything_that_pytorch_does_on_a_device_runs: "phantom/features.py" on "h100-80g";
    activations_and_states_are_what_formulas_say: "phantom/formulas.py" on "h100-80g";
    workspaces_follow_the_capability: "phantom/formulas.py" on "rtx4090";
    a_llama_of_seven_billion_parameters_trains_on_an_h200: "phantom/llama.py" on "h200";
    a_card_runs_what_was_compiled_for_an_older_one: "phantom/older_architecture.py" on "l40s";
    what_people_train_with_runs: "phantom/zoo.py" on "h100-80g";
    expandable_segments_grow_in_place: "phantom/allocator_settings.py" on "a100-40g"
        with "PYTORCH_CUDA_ALLOC_CONF" = "expandable_segments:True";
    large_blocks_stay_whole: "phantom/allocator_settings.py" on "a100-40g" with "PYTORCH_CUDA_ALLOC_CONF" = "max_split_size_mb:100";
    sizes_are_rounded_as_asked: "phantom/allocator_settings.py" on "a100-40g" with "PYTORCH_CUDA_ALLOC_CONF" = "roundup_power2_divisions:8";
    the_drivers_own_pool_has_right_statistics: "phantom/allocator_settings.py" on "a100-40g"
        with "PYTORCH_CUDA_ALLOC_CONF" = "backend:cudaMallocAsync";
    without_caching_the_driver_gives_pages: "phantom/allocator_settings.py" on "a100-40g" with "PYTORCH_NO_CUDA_MEMORY_CACHING" = "1";
    loops_over_values_that_do_not_exist_end: "phantom/endless_loops.py" on "h100-80g";
    several_devices_stand_apart: "phantom/devices.py" on "4xt4";
    the_program_sees_the_devices_that_it_may_see: "phantom/devices.py" on "4xt4" with "CUDA_VISIBLE_DEVICES" = "3,1";
    no_visible_device_is_no_device: "phantom/devices.py" on "4xt4" with "CUDA_VISIBLE_DEVICES" = "";
    copies_streams_events_threads_and_pinned_memory_behave: "phantom/basics.py" on "h100-80g";
}

/// Runs a script and gives what it printed.
fn script(version: &str, script: &str, card: &str, environment: &[(&str, &str)]) -> String {
    let Some(python) = python(version) else { return String::new() };
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts").join(script);
    let output = on_phantom(&python, card, environment).arg(file).output().unwrap();
    succeeded(script, &output)
}

fn succeeded(what: &str, output: &Output) -> String {
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{what}: {}\n{stdout}\n{stderr}", output.status);
    stdout.into_owned()
}

/// A command whose process sees the phantom and no real device.
fn on_phantom(program: &Path, card: &str, environment: &[(&str, &str)]) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        let name = name.to_string_lossy();
        if ["MEMTRACE_", "PYTORCH_", "CUDA_", "NCCL_"].iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(name.as_ref());
        }
    }
    command.env("LD_PRELOAD", library()).env("MEMTRACE_PHANTOM", card).env("PYTHONDONTWRITEBYTECODE", "1");
    command.envs(environment.iter().copied());
    command
}

/// The library under test, beside the command, where `cargo build` leaves it.
fn library() -> PathBuf {
    let path = Path::new(env!("CARGO_BIN_EXE_memtrace")).with_file_name("libmemtrace_phantom.so");
    assert!(path.exists(), "{} is missing: cargo build first, as scripts/test does", path.display());
    path
}

#[test]
fn compiled_models_and_triton_kernels_run() {
    for version in TORCHES {
        let Some(python) = python(version) else { continue };
        let folder = tempfile::TempDir::new().unwrap();
        // Triton 3.2 links with -lcuda, later ones by the full name.
        for name in ["libcuda.so.1", "libcuda.so"] {
            std::os::unix::fs::symlink(library(), folder.path().join(name)).unwrap();
        }
        let (links, caches) = (folder.path().to_str().unwrap(), folder.path().join("caches"));
        let environment = [
            ("TRITON_LIBCUDA_PATH", links),
            ("TRITON_CACHE_DIR", caches.to_str().unwrap()),
            ("TORCHINDUCTOR_CACHE_DIR", caches.to_str().unwrap()),
        ];
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/phantom/compile.py");
        let output = on_phantom(&python, "h100-80g", &environment).arg(file).output().unwrap();
        assert!(succeeded("phantom/compile.py", &output).ends_with("ok\n"), "torch {version}");
    }
}

#[test]
fn ranks_under_torchrun_hear_each_other_and_never_hang() {
    for version in TORCHES {
        let Some(python) = python(version) else { continue };
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/phantom/ranks.py");
        let output = on_phantom(&python, "4xh100-80g", &[("OMP_NUM_THREADS", "1")])
            .args(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"])
            .arg(file)
            .output()
            .unwrap();
        let text = succeeded("phantom/ranks.py", &output);
        assert_eq!(text.matches(" ok").count(), 4, "torch {version}: {text}");
    }
}

#[test]
fn two_runs_are_alike_to_the_address() {
    for version in TORCHES {
        for name in ["phantom/gpt.py", "phantom/basics.py"] {
            let runs: BTreeSet<String> = (0..2).map(|_| script(version, name, "h100-80g", &[])).collect();
            assert_eq!(runs.len(), 1, "torch {version}: {runs:#?}");
        }
    }
}

/// Names that a library defines or leaves undefined.
fn names(library: &Path, which: &str) -> BTreeSet<String> {
    let output = Command::new("nm").args(["-D", which]).arg(library).output().expect("nm is installed");
    let text = succeeded(&format!("nm {}", library.display()), &output);
    text.lines()
        .filter_map(|line| line.split_whitespace().last())
        .map(|name| name.split('@').next().unwrap_or(name).to_owned())
        .collect()
}

fn of_cuda(name: &str) -> bool {
    let families =
        ["__cuda", "cuda", "cublas", "cudnn", "cusparse", "cusolver", "cufft", "curand", "nccl", "nvml"];
    let driver =
        name.strip_prefix("cu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_uppercase()));
    driver || families.iter().any(|family| name.starts_with(family))
}

/// The names left to the real libraries: a list of patterns that are names or end in `.*`.
fn left_to_the_real_library(name: &str) -> bool {
    let list = include_str!("../src/phantom/table/passthrough.txt");
    list.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .any(|pattern| pattern.strip_suffix(".*").map_or(pattern == name, |prefix| name.starts_with(prefix)))
}

#[test]
fn every_cuda_name_that_torch_wants_has_an_answer() {
    let answered = names(&library(), "--defined-only");
    for version in TORCHES {
        let Some(python) = python(version) else { continue };
        let code = "import sysconfig; print(sysconfig.get_paths()['purelib'])";
        let site = succeeded("sysconfig", &Command::new(&python).args(["-c", code]).output().unwrap());
        let folder = Path::new(site.trim()).join("torch/lib");
        let mut missing: BTreeMap<String, String> = BTreeMap::new();
        let mut wanted = 0;
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "so") || path.is_dir() {
                continue;
            }
            for name in names(&path, "--undefined-only").into_iter().filter(|name| of_cuda(name)) {
                wanted += 1;
                if !answered.contains(&name) && !left_to_the_real_library(&name) {
                    missing.insert(name, path.file_name().unwrap().to_string_lossy().into_owned());
                }
            }
        }
        assert!(wanted > 500, "torch {version}: only {wanted} names: the look into its libraries went wrong");
        assert!(
            missing.is_empty(),
            "torch {version}: run src/phantom/table/generate.py, or answer by hand: {missing:#?}"
        );
    }
}

#[test]
fn the_library_stands_for_the_driver_and_keeps_its_own_calls_to_itself() {
    let output = Command::new("readelf").arg("-d").arg(library()).output().expect("readelf is installed");
    let text = succeeded("readelf", &output);
    assert!(text.contains("soname: [libcuda.so.1]"), "{text}");
    assert!(text.contains("SYMBOLIC"), "{text}");
    for line in text.lines().filter(|line| line.contains("NEEDED")) {
        assert!(!line.contains("cu") && !line.contains("torch"), "{line}");
    }
}

#[test]
fn a_bad_card_ends_the_program_with_one_line_that_says_what_is_right() {
    let shell = Path::new("/bin/sh");
    for (card, part) in [("h100", "a100-80g"), ("mem=48x", "mem=48x"), ("h100-80g,speed=9", "speed=")] {
        let output = on_phantom(shell, card, &[]).args(["-c", "echo ran"]).output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{card}");
        assert!(stderr.starts_with("memtrace: MEMTRACE_PHANTOM: ") && stderr.contains(part), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    // And a good one costs a program that has nothing to do with CUDA nothing.
    let output = on_phantom(shell, "8xh100-80g", &[]).args(["-c", "echo ran"]).output().unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.as_slice(), output.stderr.len()),
        (Some(0), b"ran\n".as_slice(), 0)
    );
}
