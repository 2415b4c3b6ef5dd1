//! The simulated GPUs as `nvidia-smi` and NVML show them.

use std::process::Output;

use memtrace_trace::EventName;
use memtrace_trace::csv::RowReader;

#[path = "common/torch.rs"]
#[expect(dead_code, unused_macros, unused_imports, reason = "each test crate uses its own part")]
mod harness;
use harness::{Torch, text};

fn nvidia_smi(arguments: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = harness::memtrace();
    command.args(["live", "--nvidia-smi"]).args(arguments).envs(env.iter().copied()).output().unwrap()
}

#[test]
fn nvidia_smi_and_pynvml_agree_with_torch_with_other_processes_and_with_the_trace() {
    Torch::on_each(|torch| {
        let env = [("MEMTRACE_SAMPLE_MS", "50")];
        let run = torch.trace_on("2xa10", &[], "phantom/smi.py", &[], &env).expect_success();
        let printed = run.stdout();
        let used: i64 = printed.lines().next().unwrap().parse().unwrap();
        // The trace's samples at that moment have the same number.
        let total = 22592 << 20;
        let mut samples = Vec::new();
        for file in harness::traces(&run.folder().join("trace")) {
            let mut reader = RowReader::open(&file).unwrap();
            while let Some(row) = reader.next_row().unwrap() {
                if row.event == EventName::Sample && row.device == 0 {
                    samples.push(total - row.device_free_bytes);
                }
            }
        }
        assert!(samples.contains(&used), "{used}: {samples:?}");
    });
}

#[test]
fn nvidia_smi_shows_a_running_program_to_another_terminal_until_it_is_killed() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let mut command = harness::on_phantom(&torch.python, "3xt4,context=120m");
    let code = "import time, torch\nx = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda:2')\n\
                print('ready', flush=True)\ntime.sleep(60)";
    command.args(["-c", code]).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "ready\n");
    // Other tests run on machines of their own, so only this process counts.
    let query = ["--query-compute-apps=pid,gpu_bus_id,used_memory", "--format=csv,noheader,nounits"];
    let pid = child.id();
    let of_child = || {
        let printed = text(&nvidia_smi(&query, &[]).stdout);
        printed.lines().find(|line| line.starts_with(&format!("{pid}, "))).map(str::to_owned)
    };
    assert_eq!(of_child(), Some(format!("{pid}, 00000000:12:00.0, {}", 1024 + 120)));
    let screen = text(&nvidia_smi(&[], &[]).stdout);
    assert!(screen.contains("Tesla T4") && screen.contains(&pid.to_string()), "{screen}");
    child.kill().unwrap();
    // Killed, and its parent has not waited for it.
    let is_gone = (0..500).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(10));
        of_child().is_none()
    });
    assert!(is_gone);
    child.wait().unwrap();
}

#[test]
fn memtrace_phantom_machine_names_the_machine_and_nvidia_smi_shows_one_without_processes() {
    let id = format!("test-{}", std::process::id());
    let machine = [("MEMTRACE_PHANTOM_MACHINE", id.as_str()), ("MEMTRACE_PHANTOM", "2xl4,others=3g")];
    let screen = text(&nvidia_smi(&[], &machine).stdout);
    assert!(screen.contains("NVIDIA L4") && screen.contains("[Not Found]"), "{screen}");
    let rows = nvidia_smi(&["--query-gpu=index,memory.used", "--format=csv,noheader"], &machine);
    assert_eq!(text(&rows.stdout), "0, 3072 MiB\n1, 3072 MiB\n");
    let machine = [("MEMTRACE_PHANTOM_MACHINE", id.as_str()), ("MEMTRACE_PHANTOM", "l4")];
    assert!(text(&nvidia_smi(&[], &machine).stdout).contains("No running processes found"));
    let versions = text(&nvidia_smi(&["--version"], &machine).stdout);
    let names: Vec<_> = versions.lines().filter_map(|line| line.split(" : ").next()).map(str::trim).collect();
    assert_eq!(names, ["NVIDIA-SMI version", "NVML version", "DRIVER version", "CUDA Version"], "{versions}");
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("gpus.csv");
    let query = ["--query-gpu=index", "--format=csv,noheader", "-f", file.to_str().unwrap()];
    for _ in 0..2 {
        assert_eq!(text(&nvidia_smi(&query, &machine).stdout), "");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "0\n", "the second run replaces the first");
    }
    let refused = nvidia_smi(&["-L", "-f", "/nonexistent/gpus"], &machine);
    assert_eq!(refused.status.code(), Some(2));
    assert!(text(&refused.stdout).contains("/nonexistent/gpus cannot be written"));
    let unknown = nvidia_smi(&["--query-gpu=speed", "--format=csv"], &machine);
    assert_eq!(unknown.status.code(), Some(2));
    assert_eq!(text(&unknown.stdout).trim_end(), "Field \"speed\" is not a valid field to query.");
    let wrong = [("MEMTRACE_PHANTOM_MACHINE", id.as_str()), ("MEMTRACE_PHANTOM", "h1000")];
    let refused = nvidia_smi(&[], &wrong);
    assert!(refused.status.code() == Some(2) && text(&refused.stdout).contains("no card is called"));

    // Two processes of one machine share a card; without the variable each has its own.
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let code = "import torch\nfree, total = torch.cuda.mem_get_info()\nprint(total - free)";
    let used = |machine: Option<&str>| {
        let mut command = harness::on_phantom(&torch.python, "t4,context=120m");
        let holder = "import time, torch\nx = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda')\n\
                      print('ready', flush=True)\ntime.sleep(60)";
        command.args(["-c", holder]).stdout(std::process::Stdio::piped());
        let mut asker = harness::on_phantom(&torch.python, "t4,context=120m");
        asker.args(["-c", code]);
        for command in [&mut command, &mut asker] {
            command
                .env_remove("MEMTRACE_PHANTOM_MACHINE")
                .envs(machine.map(|id| ("MEMTRACE_PHANTOM_MACHINE", id)));
        }
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line)
            .unwrap();
        let used: i64 = text(&asker.output().unwrap().stdout).trim().parse().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        used >> 20
    };
    assert_eq!(used(Some(&id)), 1024 + 120 + 120);
    assert_eq!(used(None), 120);
}
