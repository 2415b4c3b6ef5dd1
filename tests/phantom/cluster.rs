//! `memtrace run --phantom 512xh100-80g --ranks 0`: runs one rank of a job; the other ranks are stand-ins.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use memtrace_trace::EventName;
use serde_json::Value;
use tempfile::TempDir;

use super::memory_events;
use crate::common::compiled;
use crate::common::torch::{Torch, is_deep, memtrace, on_every_torch, scripts, text, traces};

/// Runs of `phantom/cluster.py` on `world` ranks, as torchrun starts them, under `memtrace run --ranks
/// RANKS`.
struct Cluster<'a> {
    torch: &'a Torch,
    world: u32,
    ranks: &'a str,
    /// True to hold back NCCL's watchdog: see [`same_as_among_real_ranks`].
    is_held: bool,
}

impl Cluster<'_> {
    /// Runs the script with these arguments. Returns the folder of the traces, and the output.
    fn run(&self, arguments: &[&str]) -> (TempDir, Output) {
        let out = TempDir::new().unwrap();
        let per_node = self.world.min(8);
        let card = format!("{}xh100-80g", self.world);
        let options: [&dyn AsRef<std::ffi::OsStr>; 7] =
            [&"-q", &"-o", &out.path(), &"--phantom", &card, &"--ranks", &self.ranks];
        let mut command = self.torch.run_command(&options);
        command.args(["-m", "torch.distributed.run", "--nnodes", &(self.world / per_node).to_string()]);
        command.args(["--nproc-per-node", &per_node.to_string()]);
        command.arg(scripts().join("phantom/cluster.py")).args(arguments);
        command.env("CLUSTER_STORE", out.path().join("store"));
        if self.is_held {
            command.env("LD_PRELOAD", compiled("phantom/held_watchdog.c", "held_watchdog.so", &[]));
        }
        let output = command.output().unwrap();
        (out, output)
    }

    /// Returns the memory events of each rank that ran. The run must succeed.
    fn events(&self, arguments: &[&str]) -> BTreeMap<i32, Vec<String>> {
        let (out, output) = self.run(arguments);
        assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
        let events: BTreeMap<_, _> = traces(out.path()).iter().map(|path| events(path)).collect();
        for (rank, events) in &events {
            assert!(events.len() > 10, "{arguments:?} rank {rank}: {events:?}");
        }
        events
    }

    /// Returns the memory events of each rank and kind. Each rank runs several kinds in forked children.
    fn events_of_kinds(&self, kinds: &[&str]) -> BTreeMap<(String, i32), Vec<String>> {
        if let [kind] = kinds {
            let by_rank = self.events(&[kind]).into_iter();
            return by_rank.map(|(rank, events)| (((*kind).to_owned(), rank), events)).collect();
        }
        let (out, output) = self.run(&[&kinds.join(",")]);
        let stdout = text(&output.stdout);
        assert!(output.status.success(), "{kinds:?}: {}", text(&output.stderr));
        // Each child first prints `== KIND PID`. Another rank may have printed before it on the same line.
        let words: Vec<&str> = stdout.split_whitespace().collect();
        let heads = words.windows(3).filter(|words| words[0].ends_with("=="));
        let kinds: BTreeMap<&str, &str> = heads.map(|words| (words[2], words[1])).collect();
        let of = |path: &PathBuf| {
            let name = path.file_stem().unwrap().to_str().unwrap();
            let process = name.rsplit('.').next().unwrap();
            let (rank, events) = events(path);
            let kind = kinds.get(process).unwrap_or_else(|| panic!("{name}: {stdout}"));
            (((*kind).to_owned(), rank), events)
        };
        traces(out.path()).iter().map(of).collect()
    }
}

/// Returns the rank of a trace, and its memory events without times and addresses.
fn events(trace: &Path) -> (i32, Vec<String>) {
    memory_events(trace, false)
}

/// Returns the requests among events: size, op and module of each allocated block.
fn requests(events: &[String]) -> Vec<String> {
    let request = |line: &String| -> Option<String> {
        let words: Vec<&str> = line.split(' ').collect();
        (words[0] == EventName::Alloc.as_str()).then(|| [&words[1..4], &words[8..]].concat().join(" "))
    };
    events.iter().filter_map(request).collect()
}

/// Compares ranks that ran alone with the same ranks among four real processes.
///
/// NCCL's watchdog is a thread that checks every 100 ms which collectives have ended, and releases their
/// tensors. The position of such a free among the allocations depends on the clock, even between two runs of
/// real ranks. So the watchdog is held back, and whole sequences are compared. For DDP, and in a deep run for the
/// first of any kinds, the requests are compared with a running watchdog, too.
fn same_as_among_real_ranks(torch: &Torch, kinds: &[&str], ranks: &str) {
    let of = |ranks, is_held| Cluster { torch, world: 4, ranks, is_held };
    let real = of("all", true).events_of_kinds(kinds);
    assert_eq!(real.len(), 4 * kinds.len(), "{:?}", real.keys());
    let mut differing = Vec::new();
    let mut compare = |what: &str, kind: &str, rank: i32, real: &[String], alone: &[String]| {
        assert!(real.len() > 100, "{kind}: {real:?}");
        let first = real.iter().zip(alone).position(|(real, alone)| real != alone);
        if first.is_some() || real.len() != alone.len() {
            let at = first.unwrap_or(real.len().min(alone.len()));
            differing.push(format!(
                "{kind} rank {rank}: {} and {} {what}, first difference at {at}:\n  {:?}\n  {:?}",
                real.len(),
                alone.len(),
                real.get(at),
                alone.get(at)
            ));
        }
    };
    let alone = of(ranks, true).events_of_kinds(kinds);
    assert_eq!(alone.len(), ranks.split(',').count() * kinds.len(), "{:?}", alone.keys());
    for (which, alone) in &alone {
        compare("events", &which.0, which.1, &real[which], alone);
    }
    if kinds[0] == "ddp" || is_deep() {
        for (rank, alone) in of(ranks, false).events(&[kinds[0]]) {
            let real = &real[&(kinds[0].to_owned(), rank)];
            compare("requests", kinds[0], rank, &requests(real), &requests(&alone));
        }
    }
    assert!(differing.is_empty(), "torch {}: {}", torch.version, differing.join("\n"));
}

fn ranks_alone_have_the_events_of_data_parallel_ranks(torch: &Torch) {
    same_as_among_real_ranks(torch, &["ddp", "fsdp2"], "0,3");
}

/// All kinds in one job, because each of its seven processes imports torch and its distributed packages.
fn ranks_alone_have_the_events_of_data_sharded_pipeline_and_expert_parallel_ranks(torch: &Torch) {
    // Torch 2.11 only: on torch 2.6 four real pipeline stages never end, for an unknown reason.
    same_as_among_real_ranks(torch, &["ddp", "fsdp2", "fsdp1", "fsdp2_tp", "zero1", "pp", "ep"], "0,2,3");
}

fn ranks_that_run_alone_have_the_same_events_as_all_ranks_of_tensors_and_replicas(torch: &Torch) {
    same_as_among_real_ranks(torch, &["hsdp", "tp", "sp"], "0,3");
}

fn ranks_that_run_alone_have_the_same_events_as_all_context_parallel_ranks(torch: &Torch) {
    // Not in a forked child, where the first collective in a backward of a rank among stand-ins fails.
    same_as_among_real_ranks(torch, &["cp"], "0");
}

fn ranks_one_per_stage_come_from_the_pipeline_of_rank_0(torch: &Torch) {
    let (out, output) = Cluster { torch, world: 8, ranks: "one-per-stage", is_held: false }.run(&["pp"]);
    let stderr = text(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(
        stderr.contains("running one rank of each other stage of rank 0's pipeline: 2, 4, 6\n"),
        "{stderr}"
    );
    let mut ranks: Vec<i32> = traces(out.path()).iter().map(|path| events(path).0).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, [0, 2, 4, 6]);
}

/// With `MEMTRACE_PHANTOM_STEP_MS` the watchdog looks at the ends of the same steps in every run. With 250 ms that is
/// each step, with 50 ms every second one. Up to its collective, a step also has the gradients since the last
/// look. With 1 ms, the run of 12 steps ends before the first look.
fn phantom_step_ms_sets_the_steps_at_which_the_watchdog_frees(torch: &Torch) {
    for (step_ms, gradients) in [("250", 2), ("50", 3), ("30", 5), ("1", 12)] {
        let out = TempDir::new().unwrap();
        let mut command =
            torch.run_command(&[&"-q", &"-o", &out.path(), &"--phantom", &"8xh100-80g", &"--ranks", &"0"]);
        command.arg(scripts().join("phantom/step_ms.py")).arg("12").env("MEMTRACE_PHANTOM_STEP_MS", step_ms);
        let output = command.output().unwrap();
        let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
        assert!(output.status.success(), "{step_ms}: {stderr}");
        assert!(stdout.contains(&format!("peak {gradients}\n")), "{step_ms}: {stdout}{stderr}");
    }
}

fn ranks_of_a_large_cluster_start_alone(torch: &Torch) {
    for (world, ranks, kind) in [(512, "first,last", "fsdp2"), (512, "7", "ddp"), (4096, "4095", "ep")] {
        let events = Cluster { torch, world, ranks, is_held: false }.events(&[kind]);
        assert_eq!(events.len(), ranks.split(',').count());
    }
}

fn ranks_alone_join_groups_splits_stores_and_object_collectives(torch: &Torch) {
    let kinds = ["groups", "groups:gloo", "groups:eager"];
    // On an older torch, only ranks among stand-ins: they and its store must understand each other.
    let jobs = [(4, "0,3", 2), (4, "all", 4), (512, "9", 1)];
    for (world, ranks, count) in jobs.into_iter().take(if torch.is_tested_in_brief() { 1 } else { 3 }) {
        let events = Cluster { torch, world, ranks, is_held: false }.events_of_kinds(&kinds);
        assert_eq!(events.len(), count * kinds.len(), "{ranks} of {world}: {:?}", events.keys());
        for (kind, events) in &events {
            assert!(events.len() > 10, "{kind:?}: {events:?}");
        }
    }
    let file = TempDir::new().unwrap();
    let file = format!("file://{}/store", file.path().display());
    for method in [file.as_str(), "tcp://host.of.the.plan:29400"] {
        Cluster { torch, world: 16, ranks: "15", is_held: false }.events(&["groups", method]);
    }
}

fn ledger_names_the_communicators_of_a_rank_and_what_each_takes(torch: &Torch) {
    let (out, output) = Cluster { torch, world: 16, ranks: "0", is_held: false }.run(&["fsdp2_tp"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let ledger = memtrace().args(["ledger", "--json"]).arg(out.path()).output().unwrap();
    let ledger: Value = serde_json::from_slice(&ledger.stdout).unwrap();
    let mut held = BTreeMap::new();
    for row in ledger["devices"][0]["rows"].as_array().unwrap() {
        let holder = row["held_by"].as_str().unwrap();
        if let Some((number, group)) = holder.strip_prefix("NCCL ").and_then(|holder| holder.split_once(": "))
        {
            assert!(
                number.parse::<u32>().is_ok() && row["advice"].as_str().unwrap().contains("NCCL"),
                "{row}"
            );
            held.insert(group.to_owned(), row["bytes"].as_i64().unwrap() >> 20);
        }
        assert_ne!(holder, "NCCL", "all of it belongs to a communicator");
    }
    // The expected NCCL memory of each group in MiB, on two nodes of eight ranks. A group has 16 channels if
    // it spans both machines, and 24 inside one machine. `nccl_memory.rs` names the sources of the numbers.
    let expected = [
        ("default_pg, 16 ranks, 8 on this node", 134 + 16 * 10 + 14 * 2 + 2 * 10),
        ("mesh_dp, 8 ranks, 4 on this node", 134 + 16 * 10 + 12 * 2 + 4 * 10),
        // `scatter` sends point to point, which adds 32 channels to the other rank.
        ("mesh_tp, 2 ranks, 2 on this node", 230 + 24 * 12 + 32 * 2),
    ];
    assert_eq!(held, expected.map(|(group, mib)| (group.to_owned(), mib)).into());
}

/// A rank that accelerate or deepspeed starts has that launcher's variables and arguments, and the memory of
/// a rank that torchrun starts.
fn launchers_accelerate_and_deepspeed_start_ranks_as_torchrun_does(torch: &Torch) {
    let run = |card: &str, launcher: &[&str], script: &str, arguments: &[&str]| {
        let out = TempDir::new().unwrap();
        let rank = if card.starts_with("512") { "511" } else { "7" };
        let mut command =
            torch.run_command(&[&"-q", &"-o", &out.path(), &"--phantom", &card, &"--ranks", &rank]);
        command.args(launcher).arg(scripts().join(script)).args(arguments);
        command.env_remove("OMP_NUM_THREADS");
        let output = command.output().unwrap();
        assert!(output.status.success(), "{launcher:?}: {}", text(&output.stderr));
        (out, output)
    };
    let given = |card: &str, launcher: &[&str]| -> (Value, Value) {
        let (_, output) = run(card, launcher, "phantom/launched.py", &["--x", "1"]);
        let mut given: Value = serde_json::from_slice(&output.stdout).unwrap();
        (given["argv"].take(), given["variables"].take())
    };
    let all = "512xh100-80g";
    let accelerate = ["-m", "accelerate.commands.launch"];
    let nodes = ["--multi_gpu", "--num_machines", "64", "--num_processes", "512"];
    let options =
        [&accelerate[..], &nodes, &["--mixed_precision", "bf16", "--num_cpu_threads_per_process", "3"]];
    let (argv, variables) = given(all, &options.concat());
    assert_eq!(argv, serde_json::json!(["--x", "1"]));
    let expected = [
        ("ACCELERATE_MIXED_PRECISION", "bf16"),
        ("OMP_NUM_THREADS", "3"),
        ("RANK", "511"),
        ("LOCAL_RANK", "7"),
        ("GROUP_RANK", "63"),
        ("WORLD_SIZE", "512"),
    ];
    for (name, value) in expected {
        assert_eq!(variables[name], value, "{name}");
    }
    // First 64 nodes from a settings file, then one node of 8 cards without settings.
    let folder = TempDir::new().unwrap();
    let file = folder.path().join("fsdp.yaml");
    let settings = "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmachine_rank: 0\nnum_machines: 64\n\
         num_processes: 512\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n";
    std::fs::write(&file, settings).unwrap();
    let (_, variables) = given(all, &[&accelerate[..], &["--config_file", file.to_str().unwrap()]].concat());
    let names = ["ACCELERATE_USE_FSDP", "FSDP_VERSION", "WORLD_SIZE", "RANK"];
    assert_eq!(names.map(|name| variables[name].as_str().unwrap()), ["true", "2", "512", "511"]);
    let (_, variables) = given("8xh100-80g", &accelerate);
    assert_eq!((&variables["WORLD_SIZE"], &variables["RANK"]), (&"8".into(), &"7".into()));
    // memtrace runs in place of deepspeed's launcher: none of the launcher's own code runs.
    let deepspeed = ["-m", "deepspeed.launcher.runner", "--num_nodes", "64", "--num_gpus", "8"];
    let (argv, variables) = given(all, &deepspeed);
    assert_eq!(argv, serde_json::json!(["--local_rank=7", "--x", "1"]));
    assert_eq!((&variables["CROSS_RANK"], &variables["LOCAL_SIZE"]), (&"63".into(), &"8".into()));
    let of = |launcher: &[&str]| {
        let (out, _) = run(all, launcher, "phantom/cluster.py", &["ddp"]);
        traces(out.path()).iter().map(|path| requests(&events(path).1)).collect::<Vec<_>>()
    };
    let torchrun = of(&["-m", "torch.distributed.run", "--nnodes", "64", "--nproc-per-node", "8"]);
    assert!(torchrun.len() == 1 && torchrun[0].len() > 100, "{torchrun:?}");
    assert_eq!(of(&options.concat()), torchrun);
    assert_eq!(of(&[&deepspeed[..], &["--no_local_rank"]].concat()), torchrun);
    // Arguments that accelerate refuses, or that ask for other processes than torchrun's ranks, are errors.
    for (launcher, part) in [
        (&["--nonsense"][..], "unrecognized arguments: --nonsense"),
        (&["--num_processes", "1"], "would start other processes than the ranks of torchrun"),
        (&["--config_file", "/no/such.yaml"], "/no/such.yaml"),
    ] {
        let mut command = torch.run_command(&[&"-q", &"--phantom", &all, &"--ranks", &"0"]);
        command.args(accelerate).args(launcher).arg("train.py");
        let output = command.output().unwrap();
        let told = text(&output.stderr);
        assert!(!output.status.success() && output.stdout.is_empty(), "{launcher:?}: {told}");
        assert!(
            told.contains(part) && told.contains("accelerate launch did not list"),
            "{launcher:?}: {told}"
        );
    }
}

on_every_torch![
    launchers_accelerate_and_deepspeed_start_ranks_as_torchrun_does,
    ranks_alone_join_groups_splits_stores_and_object_collectives: "the protocol of its store",
];

#[test]
#[ignore = "scripts/check --deep runs it"]
fn ranks_alone_have_the_events_of_data_parallel_ranks_on_an_older_torch() {
    Torch::run("2.6.0", ranks_alone_have_the_events_of_data_parallel_ranks);
}

/// Runs on one torch only, because four real ranks of each kind take a minute.
mod torch_2_11_0_alone {
    use super::Torch;

    #[test]
    fn phantom_step_ms_sets_the_steps_at_which_the_watchdog_frees() {
        Torch::run("2.11.0", super::phantom_step_ms_sets_the_steps_at_which_the_watchdog_frees);
    }

    #[test]
    fn ledger_names_the_communicators_of_a_rank_and_what_each_takes() {
        Torch::run("2.11.0", super::ledger_names_the_communicators_of_a_rank_and_what_each_takes);
    }

    #[test]
    fn ranks_alone_have_the_events_of_data_sharded_pipeline_and_expert_parallel_ranks() {
        Torch::run(
            "2.11.0",
            super::ranks_alone_have_the_events_of_data_sharded_pipeline_and_expert_parallel_ranks,
        );
    }

    #[test]
    #[ignore = "scripts/check --deep runs it"]
    fn ranks_that_run_alone_have_the_same_events_as_all_ranks_of_tensors_and_replicas() {
        Torch::run(
            "2.11.0",
            super::ranks_that_run_alone_have_the_same_events_as_all_ranks_of_tensors_and_replicas,
        );
    }

    #[test]
    #[ignore = "scripts/check --deep runs it"]
    fn ranks_that_run_alone_have_the_same_events_as_all_context_parallel_ranks() {
        Torch::run("2.11.0", super::ranks_that_run_alone_have_the_same_events_as_all_context_parallel_ranks);
    }

    #[test]
    fn ranks_one_per_stage_come_from_the_pipeline_of_rank_0() {
        Torch::run("2.11.0", super::ranks_one_per_stage_come_from_the_pipeline_of_rank_0);
    }

    #[test]
    fn ranks_of_a_large_cluster_start_alone() {
        Torch::run("2.11.0", super::ranks_of_a_large_cluster_start_alone);
    }
}

/// Returns the line of the script that ends with this comment, as the messages name it: `<module>
/// (FILE:LINE)`.
fn line_of(script: &Path, comment: &str) -> String {
    let text = std::fs::read_to_string(script).unwrap();
    let line = text.lines().position(|line| line.contains(&format!("  # {comment}"))).unwrap() + 1;
    format!("<module> ({}:{line})", script.display())
}

#[test]
fn ranks_that_wait_for_a_stand_in_end_after_phantom_patience_with_the_line() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let script = scripts().join("phantom/waits.py");
    // All of them start before the first one is waited for, because they are idle most of the time.
    let ranks = [
        ("get", "`store.get('ready')`"),
        ("check", "`store.check(['ready'])`"),
        ("recv", "`recv`"),
        ("blocked", "`barrier`"),
        ("served", ""),
    ]
    .map(|(kind, wait)| {
        let out = TempDir::new().unwrap();
        let options: [&dyn AsRef<std::ffi::OsStr>; 7] =
            [&"-q", &"-o", &out.path(), &"--phantom", &"4xh100-80g", &"--ranks", &"0"];
        let mut command = torch.run_command(&options);
        command.arg(&script).arg(kind).env("MEMTRACE_PHANTOM_PATIENCE", "5");
        let rank = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        (kind, wait, out, rank)
    });
    for (kind, wait, out, rank) in ranks {
        let run = rank.wait_with_output().unwrap();
        let (stderr, line) = (text(&run.stderr), line_of(&script, kind));
        let expected = if kind == "served" {
            format!(
                "got an empty value: /default_pg/0//ready at {line}, /default_pg/0//then/nobody/listens\n"
            )
        } else {
            format!("memtrace: deadlock: rank 0 of 4 waits in {wait} at {line}, ")
        };
        assert!(stderr.contains(&expected), "{kind}: {stderr}");
        assert_eq!(run.status.code(), Some(i32::from(kind != "served")), "{kind}: {stderr}");
        assert_eq!(traces(out.path()).len(), 1, "{kind}: what was traced stays");
    }
}

#[test]
fn ranks_are_watched_without_keeping_their_memory_or_ending_stopped_ones() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let waits = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cli/cluster/python/waits.py");
    torch.check(torch.command().arg(scripts().join("phantom/watcher.py")).arg(waits));
}

#[test]
fn ranks_of_a_launcher_inside_the_program_are_reported_once() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let script = "for rank in 0 2 1; do RANK=$rank \"$PYTHON\" -c 'import torch.distributed' || exit 1; done";
    let run = shell_ranks("0", script).env("PYTHON", &torch.python).output().unwrap();
    let stderr = text(&run.stderr);
    assert!(run.status.success(), "{stderr}");
    assert_eq!(stderr.matches("a launcher inside the program").count(), 1, "{stderr}");
    assert!(stderr.contains("RANK is 2 and WORLD_SIZE is 4 here, and rank 0 of 4 runs"), "{stderr}");
}

#[test]
fn ranks_take_their_number_from_the_environment_without_a_launcher() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let out = TempDir::new().unwrap();
    let options: [&dyn AsRef<std::ffi::OsStr>; 6] =
        [&"-o", &out.path(), &"--phantom", &"24xh100-80g", &"--ranks", &"9"];
    let mut command = torch.run_command(&options);
    command.arg(scripts().join("phantom/cluster.py")).arg("ddp");
    let ran = command.output().unwrap();
    let stderr = text(&ran.stderr);
    assert!(ran.status.success(), "{stderr}");
    assert!(text(&ran.stdout).starts_with("rank 9 of 24 ddp"), "{}", text(&ran.stdout));
    assert!(
        stderr.contains("rank 9 of 24 runs, 23 stand-ins for the others (3 nodes of 8 ranks)"),
        "{stderr}"
    );
    assert!(stderr.contains("only rank 9 of 24 ran, the others were stand-ins ("), "{stderr}");

    let summary = memtrace().args(["summary", "--json"]).arg(out.path()).output().unwrap();
    let json: Value = serde_json::from_slice(&summary.stdout).unwrap();
    assert_eq!(json["phantom"]["ranks"], serde_json::json!([{"ran": "9", "of": 24}]));
    assert!(json["phantom"]["stand_in_answers"].as_u64() > Some(0), "{}", json["phantom"]);
}

/// `MEMTRACE_PHANTOM_RANKS` and `MEMTRACE_PHANTOM_STORE` are set only for a rank among stand-ins.
#[test]
fn ranks_phantom_ranks_and_phantom_store_are_set_for_a_rank_among_stand_ins() {
    let print = r#"printf '%s ' "${MEMTRACE_PHANTOM_RANKS-none}" "${MEMTRACE_PHANTOM_STORE:+port}" $RANK $LOCAL_RANK $WORLD_SIZE"#;
    for (ranks, expected) in [("5", "5/8 port 5 5 8 "), ("all", "none  0 0 8 none  1 1 8")] {
        let out = TempDir::new().unwrap();
        let run = memtrace()
            .args(["run", "-q", "--phantom", "8xh100-80g", "--ranks", ranks, "-o"])
            .arg(out.path())
            .args(["--", "sh", "-c", print])
            .output()
            .unwrap();
        let mut words: Vec<&str> = Vec::new();
        let stdout = text(&run.stdout);
        words.extend(stdout.split_inclusive("8 "));
        words.sort_unstable();
        assert!(words.concat().starts_with(expected), "{ranks}: {stdout} {}", text(&run.stderr));
    }
}

#[test]
fn ranks_that_a_job_does_not_have_are_refused_before_anything_starts() {
    for (card, ranks, command, part) in [
        ("8xh100-80g", "8", &["true"][..], "no rank 8; the job has 8 ranks, 0 to 7"),
        ("8xh100-80g", "", &["true"], "--ranks is empty"),
        ("8xh100-80g", "0-", &["true"], "the range `0-` has no end; write 0-7 or all"),
        ("512xh100", "0", &["true"], "no card is called"),
        ("h100-80g", "0", &["true"], "the number of ranks is not known"),
        ("4xh100-80g", "0", &["mpirun", "-n", "4", "x"], "the options of `mpirun` are not understood"),
        (
            "4xh100-80g",
            "0",
            &["python", "-m", "torch.distributed.run", "--nproc-per-node", "8", "x.py"],
            "4 cards and torchrun for 8 ranks (1 x 8): make it 8x",
        ),
        (
            "64xh100-80g",
            "0",
            &["python", "-m", "torch.distributed.run", "--nproc-per-node", "64", "x.py"],
            "from 1 to 32",
        ),
    ] {
        let run = memtrace()
            .args(["run", "--phantom", card, "--ranks", ranks, "--"])
            .args(command)
            .env_remove("WORLD_SIZE")
            .output()
            .unwrap();
        let stderr = text(&run.stderr);
        assert_eq!(run.status.code(), Some(2), "{card} {ranks} {command:?}: {stderr}");
        assert!(stderr.replace('\n', " ").contains(part), "{card} {ranks} {command:?}: {stderr}");
    }
    let run = memtrace().args(["run", "--ranks", "0", "--", "true"]).output().unwrap();
    assert_eq!(run.status.code(), Some(2));
    assert!(text(&run.stderr).contains("--phantom"), "{}", text(&run.stderr));
    let run = memtrace()
        .args(["run", "--phantom", "8xh100-80g", "--ranks", "0,1", "--", "/no/such/program"])
        .output()
        .unwrap();
    assert_eq!(run.status.code(), Some(127), "{}", text(&run.stderr));
}

#[test]
fn ranks_that_contact_no_stand_in_report_it_and_one_per_stage_needs_a_pipeline() {
    let run = shell_ranks("one-per-stage", "true").output().unwrap();
    let stderr = text(&run.stderr);
    assert!(run.status.success(), "{stderr}");
    assert!(stderr.contains("rank 0 never contacted a stand-in, so it ran as if it were alone"), "{stderr}");
    assert!(stderr.contains("rank 0 reported no pipeline, so it ran alone"), "{stderr}");
    let run = shell_ranks("one-per-stage", "exit 3").output().unwrap();
    let stderr = text(&run.stderr);
    assert_eq!(run.status.code(), Some(3), "{stderr}");
    assert!(
        !stderr.contains("never contacted a stand-in") && !stderr.contains("reported no pipeline"),
        "{stderr}"
    );
}

#[test]
fn ranks_that_fail_give_their_status() {
    let out = TempDir::new().unwrap();
    let run = memtrace()
        .args(["run", "-q", "--phantom", "4xh100-80g", "--ranks", "0-2", "-o"])
        .arg(out.path())
        .args(["--", "sh", "-c", "test $RANK != 1 || exit 7"])
        .output()
        .unwrap();
    assert_eq!(run.status.code(), Some(7));
    assert!(text(&run.stderr).contains("rank 1 failed (exit status: 7)"), "{}", text(&run.stderr));
}

/// Runs this shell script as the ranks `ranks` of four.
fn shell_ranks(ranks: &str, script: &str) -> Command {
    let out = TempDir::new().unwrap().keep();
    let mut run = memtrace();
    run.args(["run", "-q", "--phantom", "4xh100-80g", "--ranks", ranks, "-o"]).arg(out);
    run.args(["--", "sh", "-c", script]);
    run
}

/// Returns the number of processes whose command line has this word.
fn processes_with(word: &str) -> usize {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|process| std::fs::read(process.path().join("cmdline")).ok());
    lines.filter(|line| String::from_utf8_lossy(line).replace('\0', " ").contains(word)).count()
}

#[test]
fn ranks_that_are_real_end_when_one_fails_and_its_status_counts() {
    // The seconds identify this test's processes: `exec` replaces the shell by `sleep` with this number.
    let word = format!("sleep 600.{}", std::process::id());
    let run = shell_ranks("all", &format!("test $RANK != 1 || exit 7; exec {word}")).output().unwrap();
    let stderr = text(&run.stderr);
    assert_eq!(run.status.code(), Some(7), "{stderr}");
    assert_eq!(stderr.matches("memtrace: rank ").count(), 1, "only the cause is printed: {stderr}");
    assert_eq!(processes_with(&word), 0, "no rank is left");
}

#[test]
fn ranks_end_by_the_signal_that_memtrace_gets() {
    use std::os::unix::process::ExitStatusExt;
    for ranks in ["all", "0,1,2"] {
        let word = format!("sleep 60{}.{}", ranks.len(), std::process::id());
        let mut run = shell_ranks(ranks, &format!("exec {word}")).spawn().unwrap();
        // Wait for two processes: memtrace itself, whose command line has the word, too, and at least one
        // rank.
        while processes_with(&word) < 2 {
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
        let pid = rustix::process::Pid::from_child(&run);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert_eq!(run.wait().unwrap().signal(), Some(15), "{ranks}");
        assert_eq!(processes_with(&word), 0, "{ranks}: no rank is left");
    }
}

#[test]
fn ranks_keep_the_current_folder_in_pythonpath_and_import_under_strict_warnings() {
    let Some(torch) = Torch::installed("2.11.0") else { return };
    let folder = TempDir::new().unwrap();
    std::fs::create_dir(folder.path().join("sub")).unwrap();
    std::fs::write(folder.path().join("mine.py"), "here = 'found'").unwrap();
    let script = "import warnings\nwarnings.simplefilter('error', DeprecationWarning)\n\
                  import mine, torch.distributed\nprint(mine.here)\n";
    std::fs::write(folder.path().join("sub/train.py"), script).unwrap();
    let mut run = memtrace();
    run.args(["run", "-q", "--phantom", "4xh100-80g", "--ranks", "2", "--"]).arg(&torch.python);
    run.arg("sub/train.py").env("PYTHONPATH", ":/no/such/folder").current_dir(folder.path());
    let output = run.output().unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stdout).trim(), "found");
}

#[test]
fn a_rank_ends_when_memtrace_run_is_killed() {
    use std::io::BufRead;
    Torch::run("2.11.0", |torch| {
        let out = TempDir::new().unwrap();
        let mut command =
            torch.run_command(&[&"-q", &"-o", &out.path(), &"--phantom", &"8xh100-80g", &"--ranks", &"0"]);
        command.args(["-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]);
        command.env("TMPDIR", out.path()).stdout(std::process::Stdio::piped());
        let mut run = command.spawn().unwrap();
        let mut line = String::new();
        std::io::BufReader::new(run.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let rank = format!("/proc/{}", line.trim());
        assert!(Path::new(&rank).exists(), "{line}");
        run.kill().unwrap();
        run.wait().unwrap();
        for _ in 0..600 {
            let stat = std::fs::read_to_string(format!("{rank}/stat")).unwrap_or_default();
            // A zombie has ended and only waits for init to reap it.
            if stat.is_empty() || stat.contains(") Z") {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(50));
        }
        panic!("the rank still runs");
    });
}
