//! Host memory from end to end: a figure that is hidden from the writer thread is reported as unknown.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::Stdio;

use serde_json::Value;
use tempfile::TempDir;

use crate::common::command::{json, memtrace, printed};
use crate::common::parts::parts_program;
use crate::common::{library, untraced};

/// Runs a shell command as root of a new mount namespace, for example to hide files. Then the same process
/// becomes the program, which is traced and waits.
fn hidden(prepare: &str, out: &Path) {
    let script = format!("{prepare} && exec \"$0\" \"$@\"");
    let mut command = untraced(Path::new("unshare"), &["--map-root-user", "--mount", "bash", "-c"]);
    command.arg(script).arg(parts_program("host_memory")).args(["wait", "200"]);
    command
        .env("MEMTRACE_OUT", out)
        .env("MEMTRACE_SAMPLE_MS", "10")
        .env("PRELOAD", library("libmemtrace.so"));
    // `$ORIGIN` needs `/proc`, which the command may hide.
    command.env("LD_LIBRARY_PATH", parts_program("host_memory").parent().unwrap());
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "ready\n", "{prepare}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success(), "{prepare}");
}

const PRELOAD: &str = "export LD_PRELOAD=$PRELOAD";

#[test]
fn host_memory_without_proc_is_called_unknown() {
    let folder = TempDir::new().unwrap();
    hidden(&format!("mount -t tmpfs none /proc && {PRELOAD}"), folder.path());
    let ledger = printed(&["ledger", "--host"], folder.path());
    assert!(ledger.contains("No sample of the host"), "{ledger}");
    let process = &json(&["summary"], folder.path())["processes"][0];
    assert_eq!((&process["host_peak_rss_bytes"], &process["killed"]), (&(-1).into(), &Value::Null));
    let summary = printed(&["summary"], folder.path());
    assert!(!summary.lines().any(|line| line.starts_with("host memory: peak")), "{summary}");
    let limits = folder.path().join("limits.toml");
    fs::write(&limits, "[host]\nrss = \"64g\"\n").unwrap();
    let mut budget = memtrace();
    let output = budget.args(["budget", "--limits"]).arg(&limits).arg(folder.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("no samples of the host"));
}

#[test]
fn host_memory_with_hidden_mappings_has_no_parts_and_is_known_in_sum() {
    let folder = TempDir::new().unwrap();
    let hide = |file: &str| format!("mount --bind /dev/null /proc/$$/{file}");
    hidden(&format!("{} && {} && {PRELOAD}", hide("smaps"), hide("smaps_rollup")), folder.path());
    let ledger = printed(&["ledger", "--host"], folder.path());
    assert!(ledger.contains("No full sample of the host: /proc/self/smaps could not be read"), "{ledger}");
    let process = &json(&["summary"], folder.path())["processes"][0];
    assert!(process["host_peak_rss_bytes"].as_i64().unwrap() > 1 << 20, "{process}");
}

#[test]
fn host_memory_outside_a_control_group_has_no_container() {
    let folder = TempDir::new().unwrap();
    hidden(&format!("mount -t tmpfs none /sys/fs/cgroup && {PRELOAD}"), folder.path());
    let host = &json(&["ledger", "--host"], folder.path())["host"][0];
    for figure in ["current_bytes", "limit_bytes", "page_cache_bytes", "kills"] {
        assert_eq!(host["container"][figure], -1, "{host}");
    }
    assert!(host["machine"]["total_bytes"].as_i64().unwrap() > 0, "{host}");
    let text = printed(&["ledger", "--host"], folder.path());
    assert!(text.contains("container: unknown"), "{text}");
}

/// Reads files of control groups as the kernel writes them, in version 2 and in version 1. Only a parent of
/// the process's own group has a limit.
#[test]
fn host_memory_of_a_control_group_has_the_lowest_limit_in_both_versions() {
    let v2 = "mkdir -p G/pod/box && echo 900000000 >G/pod/memory.current && echo 1000000000 >G/pod/memory.max && \
              printf 'low 0\\nhigh 0\\nmax 4\\noom 1\\noom_kill 3\\n' >G/pod/memory.events && \
              printf 'anon 500000000\\nfile 350000000\\nshmem 50000000\\n' >G/pod/memory.stat && echo 5 >G/pod/memory.swap.current && \
              echo 800000000 >G/pod/box/memory.current && echo max >G/pod/box/memory.max && echo 0::/pod/box >G/own";
    let v1 = "mkdir -p G/memory/pod/box && echo 900000000 >G/memory/pod/memory.usage_in_bytes && \
              echo 1000000000 >G/memory/pod/memory.limit_in_bytes && \
              printf 'oom_kill_disable 0\\nunder_oom 0\\noom_kill 3\\n' >G/memory/pod/memory.oom_control && \
              printf 'cache 1\\ntotal_cache 350000000\\ntotal_shmem 50000000\\ntotal_swap 5\\n' >G/memory/pod/memory.stat && \
              echo 800000000 >G/memory/pod/box/memory.usage_in_bytes && \
              echo 9223372036854771712 >G/memory/pod/box/memory.limit_in_bytes && echo 4:memory:/pod/box >G/own";
    for files in [v2, v1] {
        let (folder, group) = (TempDir::new().unwrap(), TempDir::new().unwrap());
        let files = files.replace('G', &group.path().display().to_string());
        let shown = group.path().display();
        let bind = format!("mount --bind {shown}/own /proc/$$/cgroup && mount --bind {shown} /sys/fs/cgroup");
        hidden(&format!("{files} && {bind} && {PRELOAD}"), folder.path());
        let container = json(&["ledger", "--host"], folder.path())["host"][0]["container"].clone();
        let figures = ["current_bytes", "limit_bytes", "page_cache_bytes", "swap_bytes", "kills"];
        let expected = [900_000_000, 1_000_000_000, 300_000_000, 5, 3];
        for (figure, expected) in figures.into_iter().zip(expected) {
            assert_eq!(container[figure], expected, "{figure}: {container}");
        }
    }
}

/// Starts 500 children, 100 of which end while memtrace reads them. A child that ends counts at most once.
/// The PSS of so many children must be unknown, because the kernel reads all pages of a child for it; the PSS
/// of 25 children must be known.
#[test]
fn host_memory_of_500_children_is_read_though_some_end_meanwhile() {
    for (children, brief, shares_known) in [(400, 100, false), (20, 5, true)] {
        let folder = TempDir::new().unwrap();
        let start = format!(
            "for i in $(seq {children}); do sleep 20 & done; for i in $(seq {brief}); do sleep 0.$((i % 9)) & done"
        );
        // `exec` keeps the process id of the shell, so the shell's children become the program's children.
        hidden(&format!("{{ {start}; }} >/dev/null && {PRELOAD}"), folder.path());
        let host = &json(&["ledger", "--host"], folder.path())["host"][0];
        let all = &host["children"];
        let number = all["processes"].as_i64().unwrap();
        assert!((children..=children + brief).contains(&number), "{all}");
        // Looks for the PSS in all samples, not only the last: PSS is read less often than the rest, as its
        // cost allows.
        let files: Vec<_> =
            std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
        let trace = files.iter().find(|path| path.extension().is_some_and(|ending| ending == "csv")).unwrap();
        let rows = std::fs::read_to_string(trace).unwrap();
        let has_share =
            |row: &str| row.contains(",child,") && row.contains("pss=") && row.contains("(total)");
        assert_eq!(rows.lines().any(has_share), shares_known, "{all}");
        assert!(all["rss_bytes"].as_i64().unwrap() > number * 100_000, "{all}");
        assert_eq!(all["largest"].as_array().unwrap().len(), 8);
        assert!(all["largest"].as_array().unwrap().iter().all(|child| child["name"] == "sleep"), "{all}");
    }
}
