//! `memtrace run --phantom`: the tracer and the simulated GPU together.

use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;
use tempfile::TempDir;

use super::memory_events;
use crate::common::torch::{self, Torch, built, on_phantom, scripts, succeeded, text, traces};

/// Returns the script that trains a small model and prints torch's statistics.
fn stats() -> PathBuf {
    scripts().join("phantom/stats.py")
}

/// Runs `memtrace ARGUMENTS` in the folder.
fn memtrace(folder: &TempDir, arguments: &[&str]) -> Output {
    torch::memtrace().args(arguments).current_dir(folder.path()).output().unwrap()
}

/// Returns the memory events of the only trace in a folder, without times.
fn sizes(folder: &Path) -> String {
    let files = traces(folder);
    assert_eq!(files.len(), 1, "{files:?}");
    memory_events(&files[0], true).1.join("\n")
}

#[test]
fn phantom_runs_repeat_byte_for_byte_and_match_the_statistics_of_an_untraced_run() {
    Torch::on_main(|torch| {
        let (version, stats) = (&torch.version, stats());
        let (python, stats) = (torch.python.to_str().unwrap(), stats.to_str().unwrap());
        let folder = TempDir::new().unwrap();
        let run = |out: &str| {
            let ran = memtrace(&folder, &["run", "-q", "--phantom", "a10", "-o", out, "--", python, stats]);
            assert!(ran.status.success(), "{}", text(&ran.stderr));
            (text(&ran.stdout), sizes(&folder.path().join(out)))
        };
        let (first, second) = (run("first"), run("second"));
        assert!(first.1.lines().count() > 500, "{}", first.1);
        for (a, b) in first.1.lines().zip(second.1.lines()) {
            assert_eq!(a, b, "torch {version}");
        }
        assert_eq!(first, second, "torch {version}");

        let untraced = torch.untraced_on("a10", &[], "phantom/stats.py", &[], &[]).expect_success();
        assert_eq!(untraced.stdout(), first.0, "torch {version}");

        // The reports must name the simulated GPU, and the number of reads of values that no kernel computed.
        let summary = memtrace(&folder, &["summary", "--json", "first"]);
        let json: Value = serde_json::from_slice(&summary.stdout).unwrap();
        assert_eq!(json["phantom"]["invented_reads"], 3, "{json:#}");
        assert_eq!(json["phantom"]["cards"][0], "a10");
        let peak = text(&memtrace(&folder, &["peak", "first"]).stdout);
        assert!(
            peak.contains("note: simulated GPU a10: kernels did not run")
                && peak.contains("3 values that no kernel computed"),
            "{peak}"
        );
    });
}

/// A report names the line at which a value that no kernel computed decided a loop or a size. A value that the
/// program only prints, checks or counts is no reason to doubt the peak.
#[test]
fn phantom_runs_that_act_on_uncomputed_values_name_the_line() {
    Torch::on_main(|torch| {
        let folder = TempDir::new().unwrap();
        for (kind, line) in [("print", None), ("loop", Some(19)), ("size", Some(22))] {
            let mut run = torch::memtrace();
            run.args(["run", "--phantom", "a10", "-o"]).arg(folder.path().join(kind)).arg("--");
            run.arg(&torch.python).arg(scripts().join("phantom/acted_on.py")).arg(kind);
            let output = run.output().unwrap();
            assert!(output.status.success(), "{kind}: {}", text(&output.stderr));
            let places: Vec<String> = line.iter().map(|line| format!("acted_on.py:{line}")).collect();
            for report in ["summary", "peak", "oom"] {
                let shown = text(&memtrace(&folder, &[report, kind]).stdout);
                let note = "decide a branch, a loop or a size at ";
                assert_eq!(shown.contains(note), line.is_some(), "{kind}: {shown}");
                assert!(places.iter().all(|place| shown.contains(&format!("{note}{place}"))), "{shown}");
            }
            let summary = memtrace(&folder, &["summary", "--json", kind]);
            let json: Value = serde_json::from_slice(&summary.stdout).unwrap();
            assert_eq!(json["phantom"]["acted_at"], serde_json::json!(places), "{kind}: {json:#}");
        }
    });
}

#[test]
fn phantom_oom_is_torchs_own_error_and_is_explained() {
    Torch::on_main(|torch| {
        let (version, python) = (&torch.version, torch.python.to_str().unwrap());
        let folder = TempDir::new().unwrap();
        let code = "import torch\nkept = [torch.nn.Linear(16384, 16384, device='cuda') for _ in range(20)]";
        let ran = memtrace(&folder, &["run", "--phantom", "t4", "-o", "out", "--", python, "-c", code]);
        let stderr = text(&ran.stderr);
        assert_eq!(ran.status.code(), Some(1), "{stderr}");
        // torch's message must have NVML's figures, as on a machine with a driver.
        for words in [
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 14.74 GiB",
            "this process has 14.",
            "memtrace oom out",
        ] {
            assert!(stderr.contains(words), "torch {version}: {words}: {stderr}");
        }
        let oom = text(&memtrace(&folder, &["oom", "out"]).stdout);
        assert!(oom.contains("verdict: too big") && oom.contains("simulated GPU"), "{oom}");
    });
}

#[test]
fn oom_marks_advice_that_may_not_be_enough_where_the_rest_of_the_step_is_unknown() {
    let code = "import torch\n\
        from torch import nn\n\
        parts = [part for i in range(5) for part in (nn.Conv2d(3 if i == 0 else 64, 64, 3), nn.ReLU(), nn.BatchNorm2d(64))]\n\
        net = nn.Sequential(*parts).cuda()\n\
        net(torch.randn(64, 3, 256, 256, device='cuda')).sum().backward()";
    Torch::on_main(|torch| {
        let (version, python) = (&torch.version, torch.python.to_str().unwrap());
        let folder = TempDir::new().unwrap();
        let card = "t4,mem=6g";
        memtrace(&folder, &["run", "--phantom", card, "-o", "out", "--", python, "-c", code]);
        let oom = text(&memtrace(&folder, &["oom", "out"]).stdout);
        // The modules have different classes, so they are not repeated layers, and the report must not
        // estimate the rest of the step.
        assert!(
            oom.contains("verdict: too big") && !oom.contains("The request was in the"),
            "torch {version}: {oom}"
        );
        assert!(!oom.contains("uncertain:"), "torch {version}: {oom}");
        let tries: Vec<&str> = oom.lines().filter(|line| line.starts_with("  try: ")).collect();
        let (changes, last) = tries.split_at(tries.len() - 2);
        assert!(last[0].contains("if this is an evaluation"), "torch {version}: {oom}");
        assert!(last[1].contains("memtrace run --past-oom"), "torch {version}: {oom}");
        let is_marked = |line: &&str| line.contains("may not be enough alone");
        assert!(!changes.is_empty() && changes.iter().all(is_marked), "torch {version}: {oom}");
        // Follows the advice: with `--past-oom` the whole need is measured, and `advise` must find changes
        // with which the program fits.
        memtrace(&folder, &["run", "--phantom", card, "--past-oom", "-o", "past", "--", python, "-c", code]);
        let past = text(&memtrace(&folder, &["oom", "past"]).stdout);
        assert!(past.contains("The run needs ") && !past.contains("--past-oom"), "torch {version}: {past}");
        let advice = text(&memtrace(&folder, &["advise", "--fit", "6g", "past"]).stdout);
        assert!(advice.contains("Fits in 6.00 GiB with "), "torch {version}: {advice}");
    });
}

/// Runs a program out of memory on a simulated card, and returns what `memtrace oom` says.
fn oom_of(torch: &Torch, card: &str, code: &str) -> String {
    let folder = TempDir::new().unwrap();
    let python = torch.python.to_str().unwrap();
    memtrace(&folder, &["run", "--phantom", card, "-o", "out", "--", python, "-c", code]);
    text(&memtrace(&folder, &["oom", "out"]).stdout)
}

#[test]
fn oom_advises_neither_16_bits_again_nor_half_of_one_sample_and_names_an_idle_model() {
    let code = "import torch\n\
        from torch import nn\n\
        class Teacher(nn.Sequential): pass\n\
        class Student(nn.Sequential): pass\n\
        teacher = Teacher(nn.Linear(8192, 8192)).cuda().eval()\n\
        with torch.no_grad(): target = teacher(torch.randn(1, 8192, device='cuda')).bfloat16()\n\
        student = Student(*(nn.Linear(4096, 4096) for _ in range(8))).cuda().bfloat16()\n\
        optimizer = torch.optim.AdamW(student.parameters())\n\
        for _ in range(3):\n\
        \x20   loss = student(torch.randn(1, 4096, device='cuda').bfloat16()).sum()\n\
        \x20   loss.backward()\n\
        \x20   optimizer.step()";
    Torch::on_main(|torch| {
        let oom = oom_of(torch, "t4,mem=1300m", code);
        assert!(oom.contains("verdict: too big"), "torch {}: {oom}", torch.version);
        assert!(
            oom.contains("try: Teacher.bfloat16(), because it is not trained"),
            "torch {}: {oom}",
            torch.version
        );
        assert!(oom.contains("its parameters take 256.0"), "torch {}: {oom}", torch.version);
        for wrong in ["--dtype bf16", "--autocast", "half the batch", "uncertain:"] {
            assert!(!oom.contains(wrong), "torch {}: {wrong}: {oom}", torch.version);
        }
        // The same student in float32, with several samples.
        let plain = code.replace(".bfloat16()", "").replace("randn(1, 4096", "randn(4096, 4096");
        let oom = oom_of(torch, "t4,mem=1300m", &plain);
        assert!(
            oom.contains("--dtype bf16") && oom.contains("half the batch"),
            "torch {}: {oom}",
            torch.version
        );
    });
}

#[test]
fn model_facts_of_odd_inputs_raise_no_error_in_the_tracer() {
    let code = "import torch\n\
        net = torch.nn.Linear(8, 8).cuda()\n\
        parts = [torch.randn(2, 8), torch.randn(3, 8)]\n\
        for layout in (torch.strided, torch.jagged):\n\
        \x20   net(torch.nested.nested_tensor(parts, device='cuda', layout=layout))\n\
        net(torch.empty(0, 8, device='cuda'))\n\
        net(torch.randn(8, device='cuda'))\n\
        net(torch.randn(1, 8, device='cuda'))";
    Torch::on_main(|torch| {
        let folder = TempDir::new().unwrap();
        let python = torch.python.to_str().unwrap();
        memtrace(&folder, &["run", "--phantom", "t4", "-o", "out", "--", python, "-c", code]);
        let out = std::fs::read_dir(folder.path().join("out")).unwrap().map(|entry| entry.unwrap().path());
        let [trace] = &out.filter(|path| path.extension() == Some("csv".as_ref())).collect::<Vec<_>>()[..]
        else {
            panic!("torch {}: not one trace", torch.version)
        };
        let trace = std::fs::read_to_string(trace).unwrap();
        let end = trace.lines().last().unwrap();
        assert!(end.contains("exit ") && !end.contains("python_errors"), "torch {}: {end}", torch.version);
        assert!(trace.contains(",batch=one Linear"), "torch {}", torch.version);
    });
}

#[test]
fn oom_in_a_first_step_counts_the_optimizer_before_it_calls_advice_enough() {
    let code = "import torch\n\
        from torch import nn\n\
        net = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(16))).cuda()\n\
        optimizer = torch.optim.AdamW(net.parameters())\n\
        for _ in range(3):\n\
        \x20   net(torch.randn(64, 2048, device='cuda')).sum().backward()\n\
        \x20   optimizer.step()\n\
        \x20   optimizer.zero_grad()";
    Torch::on_main(|torch| {
        // Out of memory in the optimizer's first step: half of its state and all temporary results are missing.
        let oom = oom_of(torch, "t4,mem=900m", code);
        let version = &torch.version;
        assert!(oom.contains("until this step ends"), "torch {version}: {oom}");
        let line = |option: &str| oom.lines().find(|line| line.contains(option)).unwrap_or_default();
        for (option, how_far) in
            [("--dtype bf16", "likely enough"), ("--optimizer in-backward", "may not be enough alone")]
        {
            let is_marked = line(option).contains(&format!("of what is allocated now), {how_far}"));
            assert!(is_marked && line(option).contains(": saves about "), "torch {version}: {oom}");
        }
        let halved = code
            .replace(".cuda()", ".cuda().bfloat16()")
            .replace("device='cuda'", "device='cuda', dtype=torch.bfloat16");
        let (folder, python) = (TempDir::new().unwrap(), torch.python.to_str().unwrap());
        let run =
            memtrace(&folder, &["run", "--phantom", "t4,mem=900m", "-o", "out", "--", python, "-c", &halved]);
        assert!(run.status.success(), "torch {version}: {}", String::from_utf8_lossy(&run.stderr));
        // Out of memory in the first forward: Adam's state, two times the parameters, comes after it.
        let large = code.replace("randn(64", "randn(8192");
        let oom = oom_of(torch, "t4,mem=900m", &large);
        assert!(
            oom.contains(" forward, step ") && oom.contains("in a whole step with AdamW"),
            "torch {version}: {oom}"
        );
        assert!(oom.contains("The state of AdamW is still to come: 512.25 MiB"), "torch {version}: {oom}");
        assert!(!oom.contains("likely enough"), "torch {version}: {oom}");
        // SGD has no state, and with momentum one block per parameter. If no optimizer exists yet, it is unknown.
        let other = |new: &str| oom_of(torch, "t4,mem=900m", &large.replace("AdamW(net.parameters())", new));
        let oom = other("SGD(net.parameters(), lr=1e-3)");
        assert!(!oom.contains("still to come") && !oom.contains(" with Adam"), "torch {version}: {oom}");
        let oom = other("SGD(net.parameters(), lr=1e-3, momentum=0.9)");
        assert!(oom.contains("The state of SGD is still to come: 256.12 MiB"), "torch {version}: {oom}");
        let oom = other("AdamW if False else None");
        assert!(oom.contains("the optimizer is unknown: Adam needs 512.25 MiB"), "torch {version}: {oom}");
    });
}

#[test]
fn a_model_that_calls_a_part_of_itself_while_it_is_built_has_steps() {
    let code = "import torch\n\
        from torch import nn\n\
        layers = [nn.utils.parametrizations.weight_norm(nn.Linear(2048, 2048, device='cuda')) for _ in range(4)]\n\
        net = nn.Sequential(*layers).eval()\n\
        found = []\n\
        for _ in range(40):\n\
        \x20   found.append(net(torch.randn(2048, 2048, device='cuda')))";
    Torch::on_main(|torch| {
        let oom = oom_of(torch, "t4,mem=900m", code);
        let version = &torch.version;
        assert!(oom.contains("verdict: memory grows"), "torch {version}: {oom}");
        let (verdict, _) = oom.split_once("  try: ").unwrap();
        assert!(verdict.contains("`found`"), "torch {version}: {oom}");
    });
}

#[test]
fn oom_calls_a_buffer_that_each_step_extends_growth() {
    let code = "import torch\n\
        from torch import nn\n\
        class Net(nn.Module):\n\
        \x20   def __init__(self):\n\
        \x20       super().__init__()\n\
        \x20       self.layer = nn.Linear(2048, 2048)\n\
        \x20       self.register_buffer('bank', torch.zeros(256, 2048))\n\
        \x20   def forward(self, x):\n\
        \x20       return self.layer(x)\n\
        net = Net().cuda()\n\
        optimizer = torch.optim.SGD(net.parameters())\n\
        for _ in range(40):\n\
        \x20   found = net(torch.randn(2048, 2048, device='cuda'))\n\
        \x20   torch.logsumexp(found @ net.bank.T, 1).mean().backward()\n\
        \x20   optimizer.step()\n\
        \x20   optimizer.zero_grad()\n\
        \x20   net.bank = torch.cat([net.bank, found.detach()])";
    Torch::on_main(|torch| {
        let oom = oom_of(torch, "t4,mem=1000m,context=200m", code);
        let version = &torch.version;
        assert!(oom.contains("verdict: memory grows"), "torch {version}: {oom}");
        assert!(
            oom.contains("A buffer has ") && oom.contains("a fixed size for the buffer"),
            "torch {version}: {oom}"
        );
        assert!(!oom.contains("uncertain:"), "torch {version}: {oom}");
    });
}

#[test]
fn phantom_counts_of_a_killed_process_are_in_its_trace() {
    Torch::on_main(|torch| {
        let folder = TempDir::new().unwrap();
        let (python, script) = (torch.python.to_str().unwrap(), scripts().join("phantom/killed.py"));
        let about = |out: &str, arguments: &[&str], ends: bool| {
            let run = ["run", "-o", out, "--phantom", "h100-80g", "--", python, script.to_str().unwrap()];
            let ended = memtrace(&folder, &[&run, arguments].concat());
            assert_eq!(ended.status.success(), ends, "{}", text(&ended.stderr));
            let summary = succeeded("summary", &memtrace(&folder, &["summary", "--json", out]));
            serde_json::from_str::<Value>(&summary).unwrap()["phantom"].take()
        };
        let killed = about("killed", &[], false);
        assert!(killed["invented_reads"].as_u64().unwrap() >= 7, "torch {}: {killed}", torch.version);
        assert_eq!(killed["guessed_calls"][0], "cusolverDnSgesvdj_bufferSize", "{killed}");
        assert_eq!(killed, about("ended", &["end"], true), "torch {}", torch.version);
    });
}

#[test]
fn phantom_names_a_call_that_it_does_not_answer() {
    let code = "import ctypes\nd = ctypes.CDLL('libcuda.so.1')\nd.cuInit(0)\nprint([d.cuGraphicsMapResources() for _ in range(3)])";
    let output = on_phantom(Path::new("python3"), "t4").args(["-c", code]).output().unwrap();
    assert_eq!(text(&output.stdout), "[801, 801, 801]\n", "{}", text(&output.stderr));
    assert_eq!(
        text(&output.stderr),
        "memtrace: the phantom device has no cuGraphicsMapResources: it fails with \"operation not supported\"\n"
    );
}

#[test]
fn phantom_runtime_that_a_program_loads_itself_gives_memory_and_rows() {
    Torch::on_each(|torch| {
        let (version, python) = (&torch.version, torch.python.to_str().unwrap());
        let library = runtime_library(&torch.packages());
        let (folder, path) = (TempDir::new().unwrap(), library.parent().unwrap());
        let name = library.file_name().unwrap().to_str().unwrap();
        let code = "import ctypes, sys\n\
                    for name in sys.argv[1:]:\n\
                    \x20   runtime, address = ctypes.CDLL(name), ctypes.c_void_p()\n\
                    \x20   runtime.cudaGetErrorString.restype = ctypes.c_char_p\n\
                    \x20   print(runtime.cudaMalloc(ctypes.byref(address), 12345), address.value is not None)\n\
                    \x20   print(runtime.cudaFree(address), runtime.cudaGetErrorString(2).decode())\n";
        let arguments = ["run", "-q", "--phantom", "t4", "-o", "out", "--", python, "-c", code, name];
        let mut command = torch::memtrace();
        command.args(arguments).arg(&library).current_dir(folder.path()).env("LD_LIBRARY_PATH", path);
        let stdout = succeeded("the program", &command.output().unwrap());
        assert_eq!(stdout, "0 True\n0 out of memory\n".repeat(2), "torch {version}");
        let rows = torch::read(&traces(&folder.path().join("out"))[0]);
        let calls: Vec<_> = rows
            .iter()
            .filter(|row| row.requested_bytes == 12345)
            .map(|row| (row.event.as_str(), row.source != "(unknown)" && !row.source.is_empty()))
            .collect();
        let both = [("ext_alloc", true), ("ext_free", true)];
        assert_eq!(calls, [both, both].concat(), "torch {version}: {rows:?}");
    });
}

/// Returns the `libcudart.so.MAJOR` among the packages of a torch.
fn runtime_library(packages: &Path) -> PathBuf {
    let folders = packages.join("nvidia").read_dir().unwrap();
    let files = folders.filter_map(|folder| folder.unwrap().path().join("lib").read_dir().ok()).flatten();
    let is_runtime =
        |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("libcudart.so.");
    files.map(|file| file.unwrap().path()).find(is_runtime).expect("torch comes with the runtime")
}

/// Returns the output of `scripts/gpu-compare`, with one simulated GPU in place of the real one.
fn compared(torch: &Torch, real: &str, phantom: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = built("libmemtrace.so");
    let mut command = torch.command();
    command.arg(root.join("scripts/gpu-compare")).arg("--target").arg(target.parent().unwrap());
    let output = command.args(["--real", real, "--phantom", phantom]).arg(stats()).output().unwrap();
    succeeded("gpu-compare", &output)
}

#[test]
fn gpu_compare_finds_the_first_event_where_two_cards_differ() {
    Torch::run("2.11.0", gpu_compare_on);
}

fn gpu_compare_on(torch: &Torch) {
    let same = compared(torch, "a100-80g", "a100-80g");
    assert!(same.contains("events of the allocator") && same.contains("0 failed, 0 differ"), "{same}");
    assert_eq!(same.matches("the same\n").count(), 3, "{same}");
    // The two cards differ in cuBLAS's workspace: PyTorch takes 8 MiB and 128 KiB, but 32 MiB on Hopper
    // (`parseChosenWorkspaceSize` in ATen/cuda/CublasHandlePool.cpp).
    let other = compared(torch, "a100-80g", "h100-80g");
    assert!(other.contains("1 differ") && other.contains("they differ at event"), "{other}");
    // When the workspace is requested, no segment has room for it, so each card allocates a segment of
    // another size.
    for words in
        ["real     seq", "segment_alloc of asked 20971520", "phantom  seq", "segment_alloc of asked 33554432"]
    {
        assert!(other.contains(words), "{words}: {other}");
    }
}
