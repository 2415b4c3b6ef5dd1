//! The simulated GPU (the phantom) under real PyTorch, without the tracer.
//!
//! Each script of the table runs on every version of torch and asserts the expected results. If `scripts/env
//! torch` has not installed a version, the tests on it are skipped with a message; with `CI=true` they fail.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::torch::{Torch, built, on_every_torch, on_phantom, succeeded, text};

/// One test per script and torch: its name, the script, the simulated GPU, further variables, and the reason to run it
/// on the older torch too (see [`on_every_torch`]).
macro_rules! scripts {
    ($($name:ident: $script:literal on $card:literal $(with $($key:literal = $value:literal)+)?
        $(older $reason:literal)?;)*) => {
        $(fn $name(torch: &Torch) { stdout_of(torch, $script, $card, &[$($(($key, $value)),+)?]); })*
        on_every_torch![$($name $(: $reason)?),*];
    };
}

scripts! {
    phantom_gpt_takes_the_memory_that_arithmetic_predicts: "gpt.py" on "h100-80g" older "the sizes of its workspaces";
    phantom_conv_net_runs_in_every_mode: "conv.py" on "a100-80g" older "cuDNN 9.1";
    phantom_cudnn_autotuning_compiles_no_program: "autotuning.py" on "a100-80g";
    phantom_oom_comes_from_torch_at_the_given_capacity: "oom.py" on "mem=8g,cc=8.0,context=512m";
    phantom_dynamic_full_gives_data_dependent_sizes_their_maximum: "dynamic_sizes.py" on "h100-80g" older "the arguments of its kernels";
    phantom_dynamic_half_halves_data_dependent_sizes: "dynamic_sizes.py" on "h100-80g" with "MEMTRACE_PHANTOM_DYNAMIC" = "half";
    phantom_dynamic_empty_makes_data_dependent_sizes_zero: "dynamic_sizes.py" on "h100-80g" with "MEMTRACE_PHANTOM_DYNAMIC" = "empty";
    phantom_runs_every_feature_of_pytorch: "features.py" on "h100-80g" older "every function that it imports";
    phantom_activations_and_states_follow_published_formulas: "formulas.py" on "h100-80g";
    phantom_workspaces_follow_the_compute_capability: "formulas.py" on "rtx4090";
    phantom_h200_trains_a_llama_of_seven_billion_parameters: "llama.py" on "h200";
    phantom_card_runs_kernels_compiled_for_an_older_one: "older_architecture.py" on "l40s";
    phantom_runs_models_of_transformers_torchvision_and_lightning: "zoo.py" on "h100-80g";
    phantom_expandable_segments_grow_in_place: "allocator_settings.py" on "a100-40g"
        with "PYTORCH_CUDA_ALLOC_CONF" = "expandable_segments:True";
    phantom_max_split_size_keeps_large_blocks_whole: "allocator_settings.py" on "a100-40g" with "PYTORCH_CUDA_ALLOC_CONF" = "max_split_size_mb:100";
    phantom_roundup_power2_divisions_rounds_sizes: "allocator_settings.py" on "a100-40g" with "PYTORCH_CUDA_ALLOC_CONF" = "roundup_power2_divisions:8";
    phantom_cuda_malloc_async_pool_has_right_statistics: "allocator_settings.py" on "a100-40g"
        with "PYTORCH_CUDA_ALLOC_CONF" = "backend:cudaMallocAsync";
    phantom_without_caching_gives_whole_pages: "allocator_settings.py" on "a100-40g" with "PYTORCH_NO_CUDA_MEMORY_CACHING" = "1";
    phantom_loops_over_uncomputed_values_end: "endless_loops.py" on "h100-80g";
    phantom_reads_of_one_place_without_new_input_are_bounded: "repeated_reads.py" on "t4" with "MEMTRACE_PHANTOM_READS" = "100";
    phantom_reads_of_copied_answers_are_bounded: "copied_answers.py" on "t4" with "MEMTRACE_PHANTOM_READS" = "100";
    phantom_reads_of_one_place_have_no_bound_at_zero: "repeated_reads.py" on "t4" with "MEMTRACE_PHANTOM_READS" = "0";
    phantom_devices_are_independent: "devices.py" on "4xt4";
    phantom_devices_follow_cuda_visible_devices: "devices.py" on "4xt4" with "CUDA_VISIBLE_DEVICES" = "3,1";
    phantom_without_visible_devices_has_no_device: "devices.py" on "4xt4" with "CUDA_VISIBLE_DEVICES" = "";
    phantom_copies_streams_events_threads_and_pinned_memory_work: "basics.py" on "h100-80g" older "CUDA 12's runtime";
    phantom_destroyed_events_and_descriptors_take_no_more_memory: "destroyed.py" on "h100-80g";
    phantom_captures_refuse_what_a_card_refuses: "captures.py" on "h100-80g" older "CUDA 12's graphs";
    phantom_launches_reach_their_arguments_and_nothing_else: "launch_reach.py" on "h100-80g" older "the arguments of its kernels";
    phantom_launches_reach_the_tensors_of_their_lists: "tensor_lists.py" on "h100-80g" older "the arguments of its kernels";
    phantom_answers_about_unknown_values_fit_one_another: "answers.py" on "h100-80g";
    phantom_answers_follow_the_assumption_about_sizes: "answers.py" on "h100-80g" with "MEMTRACE_PHANTOM_DYNAMIC" = "half";
    phantom_solvers_codes_are_known_in_long_loops: "solver_loops.py" on "h100-80g";
    phantom_ops_compute_known_values_of_known_values: "computed_values.py" on "h100-80g" older "the layout of its dispatcher";
    phantom_values_that_no_kernel_computed_are_ordinary: "ordinary_values.py" on "h100-80g";
    phantom_known_values_outlive_kernels_without_pointers_and_compare: "known_values.py" on "h100-80g";
}

#[test]
fn phantom_reads_of_one_place_are_named_long_before_they_are_bounded() {
    Torch::on_main(|torch| {
        for (bound, expected) in [("5000", Some("has read the same 64 bytes")), ("0", None)] {
            let script =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/phantom/repeated_reads.py");
            let mut command = on_phantom(&torch.python, "t4");
            let output = command.arg(script).env("MEMTRACE_PHANTOM_READS", bound).output().unwrap();
            let stderr = text(&output.stderr);
            assert!(output.status.success(), "{stderr}");
            let lines: Vec<&str> = stderr.lines().filter(|line| line.contains("no new input")).collect();
            assert_eq!(lines.len(), usize::from(expected.is_some()), "{stderr}");
            assert!(expected.is_none_or(|words| lines[0].contains(words)), "{stderr}");
        }
    });
}

/// Runs a script of `tests/scripts/phantom`, which must succeed; returns its stdout.
fn stdout_of(torch: &Torch, script: &str, card: &str, variables: &[(&str, &str)]) -> String {
    torch.untraced_on(card, &[], &format!("phantom/{script}"), &[], variables).expect_success().stdout()
}

/// Returns the library under test.
fn library() -> PathBuf {
    built("libmemtrace_phantom.so")
}

#[test]
fn phantom_runs_compiled_models_and_triton_kernels() {
    Torch::on_main(|torch| {
        let folder = tempfile::TempDir::new().unwrap();
        let caches = folder.path().join("caches");
        let variables = [
            // This folder has no libcuda, so Triton finds libcuda only if the phantom itself tells it the
            // path.
            ("TRITON_LIBCUDA_PATH", "/nonexistent"),
            ("TRITON_CACHE_DIR", caches.to_str().unwrap()),
            ("TORCHINDUCTOR_CACHE_DIR", caches.to_str().unwrap()),
        ];
        let stdout = stdout_of(torch, "compile.py", "h100-80g", &variables);
        assert!(stdout.ends_with("ok\n"), "torch {}: {stdout}", torch.version);
    });
}

/// torch 2.6 and 2.7 give some fake tensors the dispatch keys of plain ones. If their memory is asked for,
/// PyTorch logs an error.
#[test]
fn phantom_reads_no_fake_tensor_of_a_compilation() {
    Torch::run("2.6.0", |torch| {
        let run = torch.untraced_on("h100-80g", &[], "phantom/fake_tensors.py", &[], &[]).expect_success();
        assert_eq!(run.stdout(), "torch.Size([1, 1, 2])\n");
        assert!(!run.stderr().contains("aoti_torch"), "{}", run.stderr());
    });
}

#[test]
fn phantom_ranks_under_torchrun_communicate_and_never_hang() {
    let torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"];
    Torch::on_main(|torch| {
        let variables = [("OMP_NUM_THREADS", "1")];
        let run = torch.untraced_on("4xh100-80g", &torchrun, "phantom/ranks.py", &[], &variables);
        let stdout = run.expect_success().stdout();
        assert_eq!(stdout.matches(" ok").count(), 4, "torch {}: {stdout}", torch.version);
    });
}

#[test]
fn phantom_gives_the_same_addresses_in_two_runs() {
    Torch::on_main(|torch| {
        for name in ["gpt.py", "basics.py"] {
            let runs: BTreeSet<String> = (0..2).map(|_| stdout_of(torch, name, "h100-80g", &[])).collect();
            assert_eq!(runs.len(), 1, "torch {}: {runs:#?}", torch.version);
        }
    });
}

/// Returns the dynamic symbols of a library. `which` is an option of `nm`: `--defined-only` or
/// `--undefined-only`.
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

/// Returns true if the phantom passes this function on to the real library: `passthrough.txt` lists its name,
/// or a prefix that ends in `.*`.
fn left_to_the_real_library(name: &str) -> bool {
    let list = include_str!("../../src/phantom/device/table/passthrough.txt");
    list.lines()
        .map(str::trim)
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .any(|pattern| pattern.strip_suffix(".*").map_or(pattern == name, |prefix| name.starts_with(prefix)))
}

#[test]
fn phantom_answers_every_cuda_function_that_torch_imports() {
    let answered = names(&library(), "--defined-only");
    Torch::on_each(|torch| {
        let mut missing: BTreeMap<String, String> = BTreeMap::new();
        let mut imported = 0;
        for entry in torch.packages().join("torch/lib").read_dir().unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_none_or(|extension| extension != "so") || path.is_dir() {
                continue;
            }
            for name in names(&path, "--undefined-only").into_iter().filter(|name| of_cuda(name)) {
                imported += 1;
                if !answered.contains(&name) && !left_to_the_real_library(&name) {
                    missing.insert(name, path.file_name().unwrap().to_string_lossy().into_owned());
                }
            }
        }
        let version = &torch.version;
        assert!(imported > 500, "torch {version}: only {imported} names were found in its libraries");
        assert!(
            missing.is_empty(),
            "torch {version}: run src/phantom/device/table/generate.py, or answer by hand: {missing:#?}"
        );
    });
}

#[test]
fn phantom_library_replaces_libcuda_and_binds_its_own_calls() {
    let output = Command::new("readelf").arg("-d").arg(library()).output().expect("readelf is installed");
    let text = succeeded("readelf", &output);
    assert!(text.contains("soname: [libcuda.so.1]"), "{text}");
    assert!(text.contains("SYMBOLIC"), "{text}");
    for line in text.lines().filter(|line| line.contains("NEEDED")) {
        assert!(!line.contains("cu") && !line.contains("torch"), "{line}");
    }
}

#[test]
fn phantom_with_an_unknown_card_ends_the_program_with_one_line_of_advice() {
    let shell = Path::new("/bin/sh");
    for (card, part) in [("h100", "h100-80g"), ("mem=48x", "mem=48x"), ("h100-80g,speed=9", "speed=")] {
        let output = on_phantom(shell, card).args(["-c", "echo ran"]).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{card}");
        assert!(stderr.starts_with("memtrace: MEMTRACE_PHANTOM: ") && stderr.contains(part), "{stderr}");
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
    // With a valid card, a program that does not use CUDA must run as usual, without a message.
    let output = on_phantom(shell, "8xh100-80g").args(["-c", "echo ran"]).output().unwrap();
    assert_eq!(
        (output.status.code(), output.stdout.as_slice(), output.stderr.len()),
        (Some(0), b"ran\n".as_slice(), 0)
    );
}

/// Returns the JSON line of `scripts/calibrate`, and its whole output.
fn calibration(torch: &Torch, card: &str) -> (serde_json::Value, String) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/calibrate");
    let output = on_phantom(&torch.python, card).arg(script).output().unwrap();
    let shown = succeeded("calibrate", &output);
    let line = shown.lines().find(|line| line.starts_with('{')).unwrap_or_else(|| panic!("{shown}"));
    (serde_json::from_str(line).unwrap(), shown)
}

#[test]
fn phantom_calibrate_prints_the_figures_that_the_phantom_was_given() {
    Torch::run("2.11.0", |torch| {
        let (json, shown) = calibration(torch, "2xh100-80g");
        let mib = |value: &serde_json::Value| value.as_i64().unwrap_or_else(|| panic!("{json:#}")) >> 20;
        assert_eq!((mib(&json["total_bytes"]), mib(&json["steps"]["context"])), (81008, 612));
        assert_eq!(mib(&json["eager_context_bytes"]), 612 + 362);
        for (step, bytes) in json["steps"].as_object().unwrap().iter().filter(|(step, _)| *step != "context")
        {
            // The MiB that an H200 took. The graph's are 68 for the first graph and a page of 2 for its nodes.
            let expected = match step.as_str() {
                "cublas" => 66,
                "cudnn" | "cufft" => 8,
                "cusolver" => 98,
                "graph of 100 kernels" => 70,
                _ => 0,
            };
            assert_eq!(mib(bytes), expected, "{step}: {json:#}");
        }
        // NCCL 2.28.9 with one rank, and with two. Only the first communicator of a process includes the
        // loaded code.
        let nccl: Vec<_> = json["nccl"].as_array().unwrap().iter().collect();
        let both = |name: &str| (mib(&nccl[0][name]), mib(&nccl[1][name]));
        assert_eq!(both("communicator_bytes"), (388 + 172, 518 + 172 + 206), "{json:#}");
        assert_eq!(both("second_communicator_bytes"), (388, 518), "{json:#}");
        assert!(shown.contains("cc 9 0, 132 SMs, context {612 in 612..612},"), "{shown}");
        assert!(shown.contains("L2 51200, bus 5120, MHz 1980 2619;"), "{shown}");

        let (json, _) = calibration(torch, "a100-40g,context=333m");
        assert_eq!(json["steps"]["context"].as_i64(), Some(333 << 20), "{json:#}");
        assert_eq!(json["eager_context_bytes"].as_i64(), Some(333 << 20), "{json:#}");
        // Handles take nothing on this card, and the graph takes one page.
        for (step, bytes) in json["steps"].as_object().unwrap().iter().filter(|(step, _)| *step != "context")
        {
            let expected = if step.starts_with("graph") { 2 } else { 0 };
            assert_eq!(mib(bytes), expected, "{step}: {json:#}");
        }
    });
}

#[test]
fn calibrate_without_a_gpu_says_so() {
    Torch::run("2.11.0", |torch| {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/calibrate");
        let output =
            Command::new(&torch.python).arg(script).env("CUDA_VISIBLE_DEVICES", "").output().unwrap();
        let told = text(&output.stderr);
        assert!(!output.status.success() && told.contains("calibrate: torch finds no GPU"), "{told}");
        assert!(!told.contains("Traceback"), "{told}");
    });
}
