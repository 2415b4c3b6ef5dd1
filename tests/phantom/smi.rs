//! The simulated GPUs as `nvidia-smi` and NVML show them.

use std::process::Output;

use memtrace_trace::EventName;
use memtrace_trace::csv::RowReader;
use serde_json::Value;

use crate::common::pages;
use crate::common::torch::{self, Torch, text};

fn nvidia_smi(arguments: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = torch::memtrace();
    command.args(["live", "--nvidia-smi"]).args(arguments).envs(env.iter().copied()).output().unwrap()
}

#[test]
fn nvidia_smi_and_pynvml_agree_with_torch_with_other_processes_and_with_the_trace() {
    Torch::on_main(|torch| {
        let env = [("MEMTRACE_SAMPLE_MS", "50")];
        let run = torch.trace_on("2xa10", &[], "phantom/smi.py", &[], &env).expect_success();
        let printed = run.stdout();
        let used: i64 = printed.lines().next().unwrap().parse().unwrap();
        // A sample of device 0 in the trace must have the number that the program printed.
        let total = 22592 << 20;
        let mut samples = Vec::new();
        for file in torch::traces(&run.folder().join("trace")) {
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
    let mut command = torch::on_phantom(&torch.python, "3xt4,context=120m");
    let code = "import time, torch\nx = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda:2')\n\
                print('ready', flush=True)\ntime.sleep(60)";
    command.args(["-c", code]).stdout(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    let mut line = String::new();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.as_mut().unwrap()), &mut line)
        .unwrap();
    assert_eq!(line, "ready\n");
    // Other tests run on simulated machines of their own, so the only process here is this one.
    let query = ["--query-compute-apps=pid,gpu_bus_id,used_memory", "--format=csv,noheader,nounits"];
    let pid = child.id();
    let of_child = || {
        let printed = text(&nvidia_smi(&query, &[]).stdout);
        printed.lines().find(|line| line.starts_with(&format!("{pid}, "))).map(str::to_owned)
    };
    assert_eq!(of_child(), Some(format!("{pid}, 00000000:12:00.0, {}", 1024 + 120)));
    let (command, shown) = pages::first_command("docs/phantom.md");
    assert_eq!(command[..2], ["live", "--nvidia-smi"]);
    let query: Vec<&str> = command[2..].iter().map(String::as_str).collect();
    let printed = text(&nvidia_smi(&query, &[]).stdout).replace(torch.python.to_str().unwrap(), "python");
    let (head, row) = shown.trim_end().split_once('\n').unwrap();
    assert_eq!(printed.lines().next(), Some(head));
    let own = printed.lines().find(|line| line.starts_with(&format!("{pid}, "))).unwrap();
    assert_eq!(pages::without_numbers(own), pages::without_numbers(row));
    let screen = text(&nvidia_smi(&[], &[]).stdout);
    assert!(screen.contains("Tesla T4") && screen.contains(&pid.to_string()), "{screen}");
    child.kill().unwrap();
    // nvidia-smi must no longer list the killed child, although nobody has waited for it yet.
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
    // A request without an answer leaves the file as it is, and so does a card that does not exist.
    for ids in ["99", "0,99"] {
        let refused = nvidia_smi(&[&query[..], &["-i", ids]].concat(), &machine);
        assert_eq!(refused.status.code(), Some(6), "{ids}");
        assert_eq!(text(&refused.stdout), "No devices were found\n", "{ids}");
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "0\n", "{ids}");
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

    // Two processes with the same MEMTRACE_PHANTOM_MACHINE share a card; without the variable each has its
    // own.
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let code = "import torch\nfree, total = torch.cuda.mem_get_info()\nprint(total - free)";
    let used = |machine: Option<&str>| {
        let mut command = torch::on_phantom(&torch.python, "t4,context=120m");
        let holder = "import time, torch\nx = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda')\n\
                      print('ready', flush=True)\ntime.sleep(60)";
        command.args(["-c", holder]).stdout(std::process::Stdio::piped());
        let mut asker = torch::on_phantom(&torch.python, "t4,context=120m");
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

#[test]
fn nvidia_smi_shows_ecc_as_the_card_has_it() {
    let fields = "--query-gpu=ecc.mode.current,ecc.errors.uncorrected.volatile.total";
    for (card, on_screen, row, mode) in [
        ("l4", "0", "Enabled, 0", "Enabled"),
        ("rtx6000-ada", "Off", "Disabled, [N/A]", "Disabled"),
        ("rtx4080", "N/A", "[N/A], [N/A]", "N/A"),
    ] {
        let machine = [("MEMTRACE_PHANTOM_MACHINE", "test-ecc"), ("MEMTRACE_PHANTOM", card)];
        let screen = text(&nvidia_smi(&[], &machine).stdout);
        assert!(screen.contains(&format!(" Off | {on_screen:>20} |\n")), "{card}: {screen}");
        let query = nvidia_smi(&[fields, "--format=csv,noheader"], &machine);
        assert_eq!(text(&query.stdout), format!("{row}\n"), "{card}");
        let log = text(&nvidia_smi(&["-q", "-d", "ECC"], &machine).stdout);
        assert!(log.contains(&format!("{:<50}: {mode}\n", "        Current")), "{card}: {log}");
    }
}

#[test]
fn a_card_without_memory_of_its_own_shares_the_memory_of_the_machine() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    for (card, lists_processes) in [("gb10", true), ("orin", false)] {
        let run = torch.trace_on(card, &[], "phantom/unified.py", &[], &[("MEMTRACE_SAMPLE_MS", "50")]);
        let run = run.expect_success();
        let told: Value = serde_json::from_str(run.stdout().lines().last().unwrap()).unwrap();
        let mib = |name: &str| told[name].as_i64().unwrap_or_else(|| panic!("{told}")) >> 20;
        assert_eq!(told["integrated"], 1);
        // Allows a difference of 128 MiB, because the page cache is read a moment later.
        let near = |found: i64, expected: i64| (found - expected).abs() < 128;
        assert!(
            near(mib("device"), 4096) && near(mib("host"), 1024) && near(mib("file"), 0),
            "{card}: {told}"
        );
        assert_eq!(told["memory"], "Not Supported");
        assert_eq!(told["processes"] == "Not Supported", !lists_processes, "{told}");
        // To report an OOM, PyTorch asks NVML for the processes. Where NVML cannot list them, an assertion of
        // PyTorch must fail.
        let error = told["error"].as_str().unwrap();
        assert_eq!(error.contains("INTERNAL ASSERT FAILED"), !lists_processes, "{error}");
        assert_eq!(error.contains("CUDA out of memory"), lists_processes, "{error}");
        // The trace must have the OOM, whether PyTorch could report it or not.
        let oom = run.json("oom", &[]);
        let oom = oom["ooms"].as_array().unwrap();
        assert_eq!((oom.len(), &oom[0]["device"]), (1, &Value::from(0)), "{card}: {oom:?}");
        assert_eq!(oom[0]["requested_bytes"], told["total"], "{card}: {oom:?}");
        // The rows of the one ledger and the free memory add up to the machine's memory. The host's part is
        // what the kernel counts.
        let ledger = run.json("ledger", &["--at", "end"]);
        let device = &ledger["devices"][0];
        let rows = device["rows"].as_array().unwrap();
        let of = |group: &str| -> i64 {
            let rows = rows.iter().filter(|row| row["group"] == group);
            rows.map(|row| row["bytes"].as_i64().unwrap()).sum()
        };
        let sum: i64 = rows.iter().map(|row| row["bytes"].as_i64().unwrap()).sum();
        assert_eq!(sum + device["free_bytes"].as_i64().unwrap(), device["total_bytes"].as_i64().unwrap());
        assert_eq!(device["total_bytes"], told["total"]);
        assert!(of("page_cache") >= 0 && of("host") >> 20 >= 1024, "{ledger}");
        assert!((of("torch") + of("cache")) >> 20 >= 4096, "{ledger}");
        let summary = run.json("summary", &[]);
        assert!(summary["processes"][0]["devices"][0]["host_peak_bytes"].as_i64().unwrap() >> 20 >= 1024);
    }
    // nvidia-smi on a machine without a process.
    let machine = [("MEMTRACE_PHANTOM_MACHINE", "test-unified"), ("MEMTRACE_PHANTOM", "gb10")];
    let screen = text(&nvidia_smi(&[], &machine).stdout);
    assert!(screen.contains("NVIDIA GB10") && screen.contains("| Not Supported          |"), "{screen}");
    let query = ["--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader"];
    assert_eq!(text(&nvidia_smi(&query, &machine).stdout), "[N/A], [N/A], [N/A]\n");
}
