//! Runs small C programs under the preloaded library. A stand-in for the CUDA runtime hands out addresses,
//! and each program exercises one feature.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use memtrace_trace::EventName;
use memtrace_trace::text::NONE;

use crate::common::pythons::pythons;
use crate::common::{self, LOADER, Trace, TraceRow, Traced, compiled, untraced};

const RUNTIME: &str = "libcudart.so.12";

fn runtime() -> PathBuf {
    compiled("fakes/cudart.c", RUNTIME, &[])
}

/// Compiles `tests/programs/<source>.c` and links it against the stand-in for the CUDA runtime.
fn program(source: &str) -> PathBuf {
    runtime();
    compiled(&format!("{source}.c"), file_name(source), &[RUNTIME])
}

/// Like [`program`], but also links the stand-in for torch's caching allocator.
fn torch_program(source: &str) -> PathBuf {
    runtime();
    compiled("fakes/c10.c", "libc10.so", &[]);
    compiled("fakes/c10_cuda.c", "libc10_cuda.so", &["libc10.so", RUNTIME]);
    compiled(&format!("{source}.c"), file_name(source), &["libc10_cuda.so", "libc10.so", RUNTIME])
}

/// Returns the name after the last `/`.
fn file_name(source: &str) -> &str {
    source.rsplit('/').next().unwrap()
}

/// Formats a row as `calls.c` prints it: event, api, status, address, requested, delta.
fn row_line(row: &TraceRow) -> String {
    let TraceRow { event, api, status, addr, requested, delta, .. } = row;
    format!("{event} {api} {status} {addr} {requested} {delta}")
}

#[test]
fn each_runtime_call_has_a_row_with_the_values_that_the_program_got() {
    let ran = Traced::new(&program("calls/calls"), &[]).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    let trace = ran.trace();
    let rows: Vec<String> = trace.rows.iter().map(row_line).collect();
    let expected: Vec<String> = ran.stdout().lines().map(str::to_owned).collect();
    assert_eq!(rows, expected);
    assert_eq!(trace.live(), 0);
    assert!(trace.rows.iter().all(|row| row.source == "calls"), "the program made every call");
    assert_eq!(ran.stderr(), "");
}

#[test]
fn dlopen_a_plugin_with_rtld_local_is_traced_and_named() {
    runtime();
    let plugin = compiled("lookups/plugin.c", "libplugin.so", &[RUNTIME]);
    let loads = compiled("lookups/loads.c", "loads", &[]);
    let ran = Traced::new(&loads, &["plugin", plugin.to_str().unwrap()]).run();
    assert_eq!(ran.stdout(), "0 0\n", "{}", ran.stderr());
    let trace = ran.trace();
    let sources: Vec<_> = trace.rows.iter().map(|row| (row.source.as_str(), row.delta)).collect();
    assert_eq!(sources, [("libplugin.so", 3000), ("libplugin.so", -3000)]);
}

#[test]
fn dlsym_of_the_runtime_is_traced_unless_dlsym_is_off() {
    let library = runtime();
    let loads = compiled("lookups/loads.c", "loads", &[]);
    let arguments = ["lookup", library.to_str().unwrap()];
    let ran = Traced::new(&loads, &arguments).run();
    assert_eq!(ran.stdout(), "0 0\n1\n2\n", "{}", ran.stderr());
    let deltas: Vec<i64> = ran.trace().rows.iter().map(|row| row.delta).collect();
    assert_eq!(deltas, [3000, -3000]);

    let ran = Traced::new(&loads, &arguments).env("MEMTRACE_DLSYM", "0").run();
    assert_eq!(ran.stdout(), "0 0\n1\n2\n", "{}", ran.stderr());
    assert!(ran.files().is_empty());
}

#[test]
fn dlsym_in_two_runtimes_calls_each_runtime_itself() {
    let first = runtime();
    let second = compiled("fakes/cudart.c", "libcudart.so.13", &[]);
    let loads = compiled("lookups/loads.c", "loads", &[]);
    let arguments = ["twice", first.to_str().unwrap(), second.to_str().unwrap()];
    let alone = untraced(&loads, &arguments).output().unwrap();
    let ran = Traced::new(&loads, &arguments).run();
    assert_eq!(ran.stdout(), String::from_utf8(alone.stdout).unwrap());
}

#[test]
fn dlsym_resolves_by_caller_as_in_an_untraced_program() {
    compiled("lookups/who.c", "libfirst.so", &["-DNAME=first"]);
    compiled("lookups/who.c", "libsecond.so", &["-DNAME=second"]);
    compiled("lookups/who.c", "libbelow.so", &["-DNAME=below"]);
    let hidden =
        compiled("lookups/who.c", "libhidden.so", &["-DNAME=hidden", "-Wl,--no-as-needed", "libbelow.so"]);
    let scopes = compiled("lookups/scopes.c", "scopes", &["libfirst.so", "libsecond.so"]);
    let arguments = [hidden.to_str().unwrap()];
    let alone = untraced(&scopes, &arguments).output().unwrap();
    let alone = String::from_utf8(alone.stdout).unwrap();
    for line in ["first's next second", "hidden's next below", "hidden's default for its own hidden's own"] {
        assert!(alone.contains(line), "{alone}");
    }
    for dlsym in ["0", "1"] {
        let ran = Traced::new(&scopes, &arguments).env("MEMTRACE_DLSYM", dlsym).run();
        assert_eq!(ran.stdout(), alone, "MEMTRACE_DLSYM={dlsym}");
    }
}

#[test]
fn threads_that_reuse_each_others_addresses_replay_in_order() {
    for round in 0..3 {
        let ran = Traced::new(&program("threads/threads"), &["8", "4000"]).run();
        assert_eq!(ran.status(), 0, "round {round}: {}", ran.stderr());
        let trace = ran.trace();
        let [taken, given, live] = ran.numbers()[..] else { panic!("{}", ran.stdout()) };
        assert_eq!((trace.allocations() as i64, trace.frees() as i64, trace.live()), (taken, given, live));
        let threads: BTreeSet<i32> = trace.rows.iter().map(|row| row.tid).collect();
        assert_eq!(threads.len(), 8);
    }
}

#[test]
fn threads_of_the_caching_allocator_agree_with_its_own_totals() {
    for round in 0..3 {
        let ran = Traced::new(&torch_program("threads/trains"), &["8", "4000"]).run();
        assert_eq!(ran.status(), 0, "round {round}: {}", ran.stderr());
        let [allocated, reserved, given, taken, reports] = ran.numbers()[..] else {
            panic!("{}", ran.stdout())
        };
        let trace = ran.trace();
        let count = |event| trace.of(event).len() as i64;
        assert_eq!((count(EventName::Alloc), count(EventName::Free)), (given, taken));
        assert_eq!(count(EventName::SegmentAlloc), reserved / (2 << 20) + 1, "one of them failed");
        // The hook passed every report on to the real function: the allocations, the frees and one more, the
        // OOM.
        assert_eq!(reports, given + taken + 1);
        let oom = trace.of(EventName::Oom)[0];
        assert_eq!((oom.allocated, oom.reserved), (allocated, reserved));
        assert!(trace.rows.iter().all(|row| row.source == "libc10_cuda.so"));
        // The traced process prints the owners at the OOM, and the command to run next.
        let messages = ran.stderr();
        assert!(
            messages.starts_with("memtrace: out of memory on GPU 0: 1.00 MiB were requested"),
            "{messages}"
        );
        assert!(messages.lines().last().unwrap().starts_with("memtrace: next: memtrace "), "{messages}");
    }
    // With MEMTRACE_COMPRESS the CSV file is gone when the user reads the message, so it names the folder.
    let traced = Traced::new(&torch_program("threads/trains"), &["1", "10"]).env("MEMTRACE_COMPRESS", "gz");
    let folder = traced.out();
    let messages = traced.run().stderr();
    assert!(messages.contains(&format!("memtrace oom {}", folder.display())), "{messages}");
    assert!(!messages.contains(".csv"), "{messages}");
}

#[test]
fn allocator_without_caching_has_blocks_of_the_requested_size() {
    let ran = Traced::new(&torch_program("calls/calls_as_torch"), &[])
        .env("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
        .run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    let rows = ran.trace().rows;
    let blocks: Vec<_> =
        rows.iter().map(|row| (row.event, row.requested, row.delta, row.allocated)).collect();
    assert_eq!(blocks, [(EventName::Alloc, 1001, 1001, 1001), (EventName::Free, 1001, -1001, 0)]);
}

#[test]
fn exit_of_every_kind_leaves_a_complete_trace_and_the_same_status() {
    let ends = program("processes/ends");
    // Each row: a way to end, and the allocations and frees that it adds to the usual two allocations and one
    // free.
    let ways = [
        ("return", 0, 0),
        ("exit", 0, 0),
        ("_exit", 0, 0),
        ("_Exit", 0, 0),
        ("quick_exit", 0, 0),
        ("exit in thread", 0, 0),
        ("pthread_exit", 1, 0),
        ("atexit", 0, 1),
        ("destructor", 0, 1),
        ("threads that end early", 300, 300),
        ("thread-local destructors", 160, 160),
        ("exec that fails", 0, 1),
        ("exec that fails late", 0, 1),
    ];
    for (how, taken, given) in ways {
        let alone = untraced(&ends, &[how]).output().unwrap();
        let ran = Traced::new(&ends, &[how]).run();
        assert_eq!(ran.output.status, alone.status, "{how}: {}", ran.stderr());
        assert_eq!(ran.stdout(), "to stdout\n", "{how}");
        assert_eq!(ran.stderr(), "", "{how}");
        let trace = ran.trace();
        assert_eq!((trace.allocations(), trace.frees()), (2 + taken, 1 + given), "{how}");
    }
}

#[test]
fn exit_of_the_main_thread_ends_a_program_whose_name_is_cut_inside_a_character() {
    runtime();
    let ends = compiled("processes/ends.c", "ääääääääx", &[RUNTIME]);
    // A process that does not end is killed.
    let command = ["--signal=KILL", "60", ends.to_str().unwrap(), "pthread_exit"];
    let ran = Traced::new(Path::new("timeout"), &command).run();
    assert_eq!((ran.status(), ran.stdout().as_str()), (0, "to stdout\n"), "{}", ran.stderr());
    assert_eq!(ran.trace().allocations(), 3);
}

#[test]
fn exec_ends_the_trace() {
    let ends = program("processes/ends");
    for how in ["exec", "execle", "execlp", "execv", "execvp", "execve", "execvpe", "fexecve"] {
        let alone = untraced(&ends, &[how]).output().unwrap();
        let ran = Traced::new(&ends, &[how]).run();
        assert_eq!(
            (ran.output.status, ran.stdout()),
            (alone.status, String::from_utf8(alone.stdout).unwrap()),
            "{how}"
        );
        assert!(ran.stdout().contains("another program"), "{how}: {}", ran.stdout());
        assert_eq!(ran.stderr(), "", "{how}");
        let trace = ran.trace();
        assert_eq!((trace.allocations(), trace.frees()), (2, 1), "{how}");
        assert!(trace.end.starts_with("exec "), "{how}: {}", trace.end);
        let journal = format!("memtrace-{}-", trace.pid);
        let left = fs::read_dir("/dev/shm").unwrap().flatten();
        let left: Vec<_> =
            left.filter(|file| file.file_name().to_string_lossy().starts_with(&journal)).collect();
        assert!(left.is_empty(), "{how}: {left:?}");
    }
}

#[test]
fn exec_of_a_program_for_musl_starts_it_without_the_library() {
    let starter = program("processes/foreign");
    // The program's ELF interpreter is named like musl's loader, but is a link to glibc's, so that it can
    // start here.
    let link = starter.with_file_name("ld-musl-x86_64.so.1");
    let _ = fs::remove_file(&link);
    symlink(LOADER, &link).unwrap();
    let named = format!("-Wl,--dynamic-linker={}", link.display());
    let foreign = compiled("processes/foreign.c", "foreign-musl", &[&named]);
    let ran = Traced::new(&starter, &[foreign.to_str().unwrap()]).run();
    assert_eq!((ran.status(), ran.stdout()), (0, "unset\n".repeat(8)), "{}", ran.stderr());
    let ran = Traced::new(&starter, &[starter.to_str().unwrap()]).run();
    assert_eq!(ran.stdout().lines().filter(|line| line.ends_with("libmemtrace.so")).count(), 8);
}

#[test]
fn exec_that_fails_before_a_kill_leaves_the_flushed_rows() {
    let ran = Traced::new(&program("processes/ends"), &["exec that fails late", "kill"]).run();
    assert_eq!(ran.status(), 128 + 9, "{}", ran.stderr());
    let mut reader = memtrace_trace::csv::RowReader::open(&ran.files()[0]).unwrap();
    let mut deltas = Vec::new();
    while let Some(row) = reader.next_row().unwrap() {
        assert_ne!(row.event, EventName::End, "the end before the exec was taken back");
        if row.event != EventName::Sample {
            deltas.push(row.delta_bytes);
        }
    }
    assert_eq!(deltas, [0, 1000, 2000, -1000, 3000]);
}

#[test]
fn meta_row_has_the_devices_even_if_the_first_call_starts_cuda() {
    compiled("fakes/lazy.c", "liblazy.so", &[]);
    let ran = Traced::new(&compiled("fakes/lazy.c", "lazy", &["-DMAIN", "liblazy.so"]), &[]).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert_eq!(ran.trace().allocation(1000).device, 1);
    let mut reader = memtrace_trace::csv::RowReader::open(&ran.files()[0]).unwrap();
    let meta: memtrace_trace::Meta = serde_json::from_str(reader.next_row().unwrap().unwrap().name).unwrap();
    let devices: Vec<_> = meta
        .devices
        .iter()
        .map(|device| (device.ordinal, device.name.as_str(), device.total_bytes))
        .collect();
    assert_eq!(devices, [(0, "First", 1 << 30), (1, "Second", 2 << 30)]);
}

#[test]
fn flush_during_a_blocked_cuda_free_fails_and_returns() {
    let include = format!("-I{}", Path::new(env!("CARGO_MANIFEST_DIR")).join("include").display());
    runtime();
    let ran = Traced::new(&compiled("api/blocked.c", "blocked", &[&include, RUNTIME]), &[]).run();
    assert_eq!(ran.numbers(), [0, -1, 0], "{}", ran.stderr());
    let trace = ran.trace();
    let deltas: Vec<i64> = trace.rows.iter().map(|row| row.delta).collect();
    assert_eq!(deltas, [1000, -1000, 2000], "the free began before the second allocation");
}

#[test]
fn buffer_with_more_threads_than_chunks_loses_no_event() {
    for (threads, buffer) in [("1200", "16m"), ("300", "1m")] {
        let ran =
            Traced::new(&program("threads/crowd"), &[threads, "5"]).env("MEMTRACE_BUFFER", buffer).run();
        assert_eq!(ran.status(), 0, "{threads}: {}", ran.stderr());
        let trace = ran.trace();
        assert_eq!(trace.rows.len() as i64, ran.numbers()[0]);
        assert_eq!(trace.live(), 0);
        let seen: BTreeSet<i32> = trace.rows.iter().map(|row| row.tid).collect();
        assert_eq!(seen.len().to_string(), threads);
    }
}

#[test]
fn fork_and_spawn_of_every_kind_leave_the_parents_trace_complete() {
    let children = program("processes/children");
    // Each row: a way to start a child, and the expected number of traces. A child that allocates writes its
    // own.
    let kinds = [
        ("fork", 1),
        ("fork and leave", 1),
        ("fork and use", 2),
        ("fork first", 2),
        ("fork among threads", 1),
        ("vfork", 1),
        ("vfork and exec", 2),
        ("posix_spawn", 1),
        ("system", 1),
        // The remaining calls run no handler of `pthread_atfork`.
        ("_Fork", 2),
        ("_Fork first", 2),
        ("_Fork among threads", 1),
        ("SYS_fork", 2),
        ("SYS_fork first", 2),
        ("SYS_clone", 2),
        ("SYS_clone first", 2),
        ("clone", 2),
        ("clone first", 2),
    ];
    for (how, traces) in kinds {
        let words: Vec<&str> = match how.strip_suffix(" first").filter(|way| *way != "fork") {
            Some(way) => vec![way, "first"],
            None => vec![how],
        };
        let ran = Traced::new(&children, &words).run();
        assert_eq!(ran.status(), 0, "{how}: {}{}", ran.stdout(), ran.stderr());
        assert_eq!(ran.stderr(), "", "{how}");
        let files = ran.files();
        assert_eq!(files.len(), traces, "{how}: {files:?}");
        let taken = ran.numbers()[0];
        let found: Vec<Trace> = files.iter().map(|file| Trace::read(file)).collect();
        let pids: BTreeSet<i64> = found.iter().map(|trace| trace.pid).collect();
        assert_eq!(pids.len(), traces, "{how}");
        for trace in &found {
            if trace.rows.iter().any(|row| row.delta == 6000) {
                assert_eq!((trace.allocations(), trace.live()), (1, 0), "{how}: the child's own");
            } else {
                assert_eq!((trace.allocations() as i64, trace.live()), (taken, 3000), "{how}");
            }
        }
    }
}

#[test]
fn out_folder_stays_empty_for_a_process_that_never_allocates() {
    let ran = Traced::new(&program("processes/nothing"), &[]).run();
    assert_eq!((ran.status(), ran.stdout().as_str(), ran.stderr().as_str()), (0, "0 0\n", ""));
    let out = Traced::new(Path::new("/bin/true"), &[]);
    let folder = out.out();
    assert_eq!(out.run().status(), 0);
    assert!(ran.files().is_empty() && !folder.exists());
}

#[test]
fn enabled_0_traces_nothing() {
    let ran = Traced::new(&program("calls/calls"), &[]).env("MEMTRACE_ENABLED", "0").run();
    assert_eq!((ran.status(), ran.stderr().as_str()), (0, ""));
    assert!(ran.files().is_empty());
    // With MEMTRACE_ENABLED=0, NVTX must still load the tool that `NVTX_INJECTION64_PATH` names.
    let log = tempfile::NamedTempFile::new().unwrap();
    let tool = compiled("other_tools/tool.c", "libtool.so", &[]);
    let ran = Traced::new(&program("ranges/ranges"), &[])
        .env("MEMTRACE_ENABLED", "0")
        .env("NVTX_INJECTION64_PATH", &tool)
        .env("TOOL_LOG", log.path())
        .run();
    assert_eq!(ran.status(), 0);
    assert!(ran.files().is_empty());
    assert!(fs::read_to_string(log.path()).unwrap().starts_with("forward 0\n"));
}

/// Returns the phase, module, op and step of the allocation of `bytes`.
fn owner(trace: &Trace, bytes: i64) -> (&str, &str, &str, i64) {
    let row = trace.allocation(bytes);
    (&row.phase, &row.module, &row.op, row.step)
}

fn assert_owners_of_ranges(trace: &Trace) {
    let owner = |bytes| owner(trace, bytes);
    assert_eq!(owner(101), ("forward", NONE, NONE, -1));
    assert_eq!(owner(102), ("forward", "encöder", NONE, -1));
    assert_eq!(owner(103), ("forward", "encöder.layer.0", NONE, -1));
    assert_eq!(owner(104), ("forward", "encöder", NONE, -1));
    assert_eq!(owner(105), (NONE, NONE, NONE, -1));
    assert_eq!(owner(106), ("optimizer", "GPT.h.3", NONE, 12));
    assert_eq!(owner(107), (NONE, "GPT.h.3", NONE, 12));
    assert_eq!(owner(108), (NONE, NONE, NONE, 12));
    assert_eq!(owner(109), ("backward", NONE, NONE, 12));
    // Another thread ended this range, so no allocation belongs to it.
    assert_eq!(owner(110), (NONE, NONE, NONE, 12));
    assert_eq!(owner(111), (NONE, NONE, NONE, 12));
    assert_eq!(owner(112), ("warm up", "Net.fc.not a phase", "fused", 13));
    assert_eq!(owner(113), ("warm up", "Net.fc", "fused", 13));
    assert_eq!(owner(114), (NONE, NONE, NONE, 13));
    assert_eq!(owner(115), (NONE, NONE, NONE, 13));
    let marks: Vec<&str> = trace.of(EventName::Mark).iter().map(|row| row.name.as_str()).collect();
    assert_eq!(marks, ["a mark, with \"quotes\"", "wide €", "by attributes", "by attributes"]);
    assert_ranges_close(trace, 13);
}

#[test]
fn phases_adds_range_names_that_are_phases() {
    let ran = Traced::new(&program("ranges/ranges"), &[]).env("MEMTRACE_PHASES", "warm up,layer.0").run();
    let trace = ran.trace();
    assert_eq!(owner(&trace, 103), ("layer.0", "encöder", NONE, -1));
    assert_eq!(owner(&trace, 102), ("forward", "encöder", NONE, -1));
}

/// Checks that `count` ranges open once and close once each.
fn assert_ranges_close(trace: &Trace, count: usize) {
    let names = |event| {
        let mut names: Vec<&str> = trace.of(event).iter().map(|row| row.name.as_str()).collect();
        names.sort_unstable();
        names
    };
    assert_eq!(names(EventName::RangeBegin), names(EventName::RangeEnd));
    assert_eq!(names(EventName::RangeBegin).len(), count);
}

#[test]
fn nvtx_ranges_of_every_kind_follow_the_rules() {
    let ranges = program("ranges/ranges");
    let ran = Traced::new(&ranges, &[]).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert_owners_of_ranges(&ran.trace());
}

#[test]
fn phases_end_with_their_thread_and_are_not_inherited_by_fork() {
    let include = format!("-I{}", Path::new(env!("CARGO_MANIFEST_DIR")).join("include").display());
    runtime();
    let ran = Traced::new(&compiled("ranges/phases.c", "phases", &[&include, RUNTIME]), &[]).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    let mut phases: Vec<(i64, String)> = Vec::new();
    for file in ran.files() {
        let rows = Trace::read(&file).rows;
        phases.extend(rows.into_iter().filter(|row| row.delta > 0).map(|row| (row.delta, row.phase)));
    }
    phases.sort_unstable();
    let expected = [(101, NONE), (102, "optimizer"), (103, NONE)];
    assert_eq!(phases, expected.map(|(bytes, phase)| (bytes, phase.to_owned())));
}

#[test]
fn nvtx_ranges_alone_leave_no_trace_in_a_child_without_the_preload() {
    let ranges = program("ranges/ranges");
    let command = format!("unset LD_PRELOAD; {}", ranges.display());
    let ran = Traced::new(Path::new("/bin/sh"), &["-c", &command]).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert!(ran.files().is_empty(), "{:?}", ran.files());
}

#[test]
fn nvtx_tool_loaded_first_gets_every_call_and_its_return_values_are_kept() {
    let ranges = program("ranges/ranges");
    let tool = compiled("other_tools/tool.c", "libtool.so", &[]);
    let logs = tempfile::tempdir().unwrap();
    let alone = untraced(&ranges, &[])
        .env("NVTX_INJECTION64_PATH", &tool)
        .env("TOOL_LOG", logs.path().join("alone"))
        .output()
        .unwrap();
    assert!(alone.status.success());
    let ran = Traced::new(&ranges, &[])
        .env("NVTX_INJECTION64_PATH", &tool)
        .env("TOOL_LOG", logs.path().join("traced"))
        .run();
    assert_eq!(ran.stdout(), String::from_utf8(alone.stdout).unwrap());
    let [alone, traced] = ["alone", "traced"].map(|log| fs::read_to_string(logs.path().join(log)).unwrap());
    assert!(alone.contains("end 100"), "{alone}");
    assert_eq!(traced, alone);
    assert_owners_of_ranges(&ran.trace());
}

#[test]
fn nvtx_tool_loaded_first_stays_loaded_in_a_child() {
    let ranges = program("ranges/ranges");
    let tool = compiled("other_tools/tool.c", "libtool.so", &[]);
    let logs = tempfile::tempdir().unwrap();
    let log = logs.path().join("traced");
    let ran = Traced::new(Path::new("/bin/sh"), &["-c", &format!("{}; exit 0", ranges.display())])
        .env("NVTX_INJECTION64_PATH", &tool)
        .env("TOOL_LOG", &log)
        .run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert!(fs::read_to_string(log).unwrap().starts_with("forward 0\n"));
    assert_owners_of_ranges(&ran.trace());
}

#[test]
fn nvtx_0_ignores_ranges() {
    let ran = Traced::new(&program("ranges/ranges"), &[]).env("MEMTRACE_NVTX", "0").run();
    assert_eq!(ran.status(), 0);
    let trace = ran.trace();
    assert_eq!(owner(&trace, 103), (NONE, NONE, NONE, -1));
    assert_eq!(trace.rows.len(), 15);
}

#[test]
fn nvtx_legacy_library_ranges_mean_the_same_and_return_the_same() {
    runtime();
    compiled("fakes/nvtools.c", "libnvToolsExt.so.1", &[]);
    let legacy = compiled("ranges/legacy.c", "legacy", &["libnvToolsExt.so.1", RUNTIME]);
    let alone = untraced(&legacy, &[]).output().unwrap();
    let ran = Traced::new(&legacy, &[]).run();
    assert_eq!(ran.stdout(), String::from_utf8(alone.stdout).unwrap());
    let trace = ran.trace();
    let owner = |bytes| owner(&trace, bytes);
    assert_eq!(owner(201), ("backward", NONE, NONE, -1));
    assert_eq!(owner(202), ("backward", "encoder.layer.0", NONE, -1));
    assert_eq!(owner(203), ("eval", NONE, "fused", 4));
    assert_eq!(owner(204), ("backward", NONE, NONE, 4));
    assert_eq!(owner(205), (NONE, NONE, NONE, 4));
    let marks: Vec<&str> = trace.of(EventName::Mark).iter().map(|row| row.name.as_str()).collect();
    assert_eq!(marks, ["plain", "wide", "layer.0"]);
    assert_ranges_close(&trace, 6);
}

#[test]
fn nvtx_legacy_library_domains_have_their_own_stacks_categories_and_strings() {
    runtime();
    // Built with `-DTOOL`, the stand-in for NVTX returns handles and range ids, as if a tool were loaded.
    // Built with `-DBARE`, it returns neither.
    for (library, define) in [("libnvToolsExt.so.1", "-DTOOL"), ("libnvToolsBare.so.1", "-DBARE")] {
        compiled("fakes/nvtools.c", library, &[define]);
        let program = format!("domains{define}");
        let program = compiled("ranges/legacy_domains.c", &program, &[define, library, RUNTIME]);
        let alone = untraced(&program, &[]).output().unwrap();
        let ran = Traced::new(&program, &[]).run();
        assert_eq!(ran.status(), 0, "{}", ran.stderr());
        match define {
            "-DTOOL" => assert_eq!(ran.stdout(), String::from_utf8(alone.stdout).unwrap()),
            // With `-DBARE`, memtrace returns the handles: the program prints `none` for a missing or
            // repeated handle.
            _ => assert!(!ran.stdout().contains("none"), "{}", ran.stdout()),
        }
        let trace = ran.trace();
        let owner = |bytes| owner(&trace, bytes);
        assert_eq!(owner(301), (NONE, NONE, "fused", -1), "{define}");
        assert_eq!(owner(302), ("forward", "encoder", "fused", -1));
        assert_eq!(owner(303), ("forward", "encoder", NONE, -1));
        assert_eq!(owner(304), ("warm up", "encoder.layer.0", NONE, -1));
        assert_eq!(owner(305), ("forward", "encoder", NONE, -1));
        assert_eq!(owner(306), (NONE, NONE, NONE, -1));
        let marks: Vec<&str> = trace.of(EventName::Mark).iter().map(|row| row.name.as_str()).collect();
        assert_eq!(marks, ["layer.0", "fused"]);
        let names = |event| trace.of(event).iter().map(|row| row.name.clone()).collect::<Vec<_>>();
        let (begun, ended) = (names(EventName::RangeBegin), names(EventName::RangeEnd));
        assert_eq!((begun.len(), begun[0].as_str(), ended.len()), (6, "ncclCommInitRankConfig", 5));
    }
}

#[test]
fn buffer_that_is_too_small_counts_and_reports_lost_events() {
    let traced = Traced::new(&program("threads/flood"), &["8", "40000"]).env("MEMTRACE_BUFFER", "1m");
    let ran = traced.run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    let files = ran.files();
    let trace = Trace::read_lossy(&files[0]);
    let reported: i64 = trace.of(EventName::Lost).iter().map(|row| row.requested).sum();
    let lost = trace.end_count("lost");
    assert_eq!(reported, lost);
    let calls = ran.numbers()[0];
    let seen = (trace.rows.len() - trace.of(EventName::Lost).len()) as i64;
    // If the free of a block was lost, it gets a row when its address is allocated again. `missed_frees` is
    // the number of these additional rows.
    assert_eq!(seen - trace.end_count("missed_frees") + lost, calls, "{}", trace.end);
}

#[test]
fn names_beyond_the_limit_share_one_and_are_counted() {
    runtime();
    compiled("fakes/nvtools.c", "libnvToolsExt.so.1", &[]);
    let program = compiled("ranges/many_names.c", "many_names", &["libnvToolsExt.so.1", RUNTIME]);
    // The limits on names follow from the size of the buffer, and are the same for all sizes up to 8 MiB.
    let ran = Traced::new(&program, &["20000", "900"]).env("MEMTRACE_BUFFER", "4m").run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert_eq!(ran.stderr().matches("too many names").count(), 1 + 1, "{}", ran.stderr());
    let [_, shared] = ran.numbers()[..] else { panic!("{}", ran.stdout()) };
    assert!(shared < (4 << 20) + (64 << 10) + (10 << 20), "{shared} bytes in /dev/shm");
    let trace = ran.trace();
    assert!(trace.end_count("too_many_names") > 10_000, "{}", trace.end);
    let modules: std::collections::HashSet<&str> =
        trace.rows.iter().filter(|row| row.delta == 200).map(|row| row.module.as_str()).collect();
    assert!(
        modules.contains("(too many names)") && (2000..6000).contains(&modules.len()),
        "{}",
        modules.len()
    );
    // Allocations beyond the limit of names keep their phase.
    assert_eq!(owner(&trace, 300).0, "eval");
}

#[test]
fn out_file_is_private_and_never_follows_a_link() {
    let threads = program("threads/threads");
    let traced = Traced::new(&threads, &["1", "10"]);
    let ran = traced.run();
    let metadata = fs::symlink_metadata(&ran.files()[0]).unwrap();
    assert!(metadata.is_file());
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);

    // The file name of a trace contains the process id. The shell plants a link of that name, then execs the
    // program.
    let victim = tempfile::NamedTempFile::new().unwrap();
    fs::write(victim.path(), "precious").unwrap();
    let name = ran.files()[0].file_name().unwrap().to_str().unwrap().to_owned();
    let host = name.split(".r0.").next().unwrap().to_owned();
    let script = "mkdir -p \"$MEMTRACE_OUT\"; ln -s \"$2\" \"$MEMTRACE_OUT/$3.r0.$$.csv\"; exec \"$1\" 1 10";
    let arguments = ["-c", script, "sh", threads.to_str().unwrap(), victim.path().to_str().unwrap(), &host];
    let ran = Traced::new(Path::new("/bin/sh"), &arguments).run();
    assert_eq!(ran.status(), 0, "{}", ran.stderr());
    assert_eq!(fs::read_to_string(victim.path()).unwrap(), "precious");
    let files = ran.files();
    assert_eq!(files.len(), 2, "{files:?}");
    let own = files.iter().find(|file| !file.is_symlink()).unwrap();
    assert!(own.to_str().unwrap().ends_with("-2.csv"), "{}", own.display());
    Trace::read(own);
}

#[test]
fn out_folder_that_cannot_be_made_costs_the_trace_and_prints_one_line() {
    let blocked = tempfile::NamedTempFile::new().unwrap();
    let out = blocked.path().join("out");
    let ran = Traced::new(&program("threads/threads"), &["8", "500"]).env("MEMTRACE_OUT", &out).run();
    assert_eq!(ran.status(), 0);
    let messages = ran.stderr();
    assert_eq!(messages.lines().count(), 1, "{messages}");
    assert!(
        messages.starts_with("memtrace: not tracing: ") && messages.contains("set MEMTRACE_OUT"),
        "{messages}"
    );

    let aside = tempfile::tempdir().unwrap();
    symlink("/no/such/folder", aside.path().join("link")).unwrap();
    let out = aside.path().join("link/out");
    let ran = Traced::new(&program("threads/threads"), &["1", "10"]).env("MEMTRACE_OUT", out).run();
    assert_eq!((ran.status(), ran.stderr().lines().count()), (0, 1));
}

#[test]
fn file_size_limit_costs_the_trace_and_not_the_program() {
    let flood = program("threads/flood");
    let script = "ulimit -f 64; exec \"$1\" 2 5000";
    let ran = Traced::new(Path::new("/bin/sh"), &["-c", script, "sh", flood.to_str().unwrap()]).run();
    assert_eq!((ran.status(), ran.stdout().as_str()), (0, "20000\n"), "{}", ran.stderr());
    let messages = ran.stderr();
    assert_eq!(messages.lines().count(), 1, "{messages}");
    assert!(messages.contains("the trace ends early"), "{messages}");
}

#[test]
fn bad_setting_is_reported_with_the_default_used_unless_log_is_off() {
    let ran = Traced::new(&program("processes/nothing"), &[]).env("MEMTRACE_BUFFER", "lots").run();
    assert_eq!(ran.status(), 0);
    let messages = ran.stderr();
    assert!(
        messages.starts_with("memtrace: MEMTRACE_BUFFER=\"lots\"") && messages.contains("using the default"),
        "{messages}"
    );
    let quiet = Traced::new(&program("processes/nothing"), &[])
        .env("MEMTRACE_BUFFER", "lots")
        .env("MEMTRACE_LOG", "off");
    assert_eq!(quiet.run().stderr(), "");
}

#[test]
fn stacks_and_modules_are_recorded_in_every_python_version() {
    torch_program("threads/trains");
    let torch = compiled("fakes/c10_cuda.c", "libc10_cuda.so", &["libc10.so", RUNTIME]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/owners/any_python.py");
    let pythons = pythons();
    let mut last = None;
    eprintln!("{:?}", pythons.keys());
    for (version, python) in &pythons {
        for how in ["hooks", "calls"] {
            let ran = Traced::new(python, &[script.to_str().unwrap(), torch.to_str().unwrap(), how])
                .env("MEMTRACE_STACKS", "python")
                .run();
            assert_eq!(ran.status(), 0, "{version:?} {how}: {}", ran.stderr());
            let [trace, stacks] = &ran.files()[..] else { panic!("{version:?} {how}: {:?}", ran.files()) };
            let lines = lines_of_blocks(trace, &lines_of_stacks(stacks));
            // Skips the first block, because the script allocates it before the hooks exist.
            let expected: Vec<String> = ran.stdout().lines().map(str::to_owned).collect();
            assert_eq!(lines[1..], expected, "{version:?} {how}");
            last = Some((ran, python, expected));
        }
    }
    let (ran, python, expected) = last.unwrap();
    exports_have_lines(python, &ran.files()[0], &expected);
}

#[test]
fn profilers_and_debuggers_of_every_python_version_see_the_same_events_as_without_memtrace() {
    torch_program("threads/trains");
    let torch = compiled("fakes/c10_cuda.c", "libc10_cuda.so", &["libc10.so", RUNTIME]);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/observers/observers.py");
    for (version, python) in pythons() {
        let mut arguments = vec![script.to_str().unwrap(), "without_torch"];
        arguments.extend(["profile", "trace", "cprofile", "coverage", "debugger"]);
        if version >= (3, 12) {
            arguments.push("monitoring");
        }
        // Fixes the hash seed, so that sets have the same order in all runs.
        let variables = [("PYTHONHASHSEED", "0"), ("LIBC10_CUDA", torch.to_str().unwrap())];
        let expected = untraced(&python, &arguments).envs(variables).output().unwrap();
        assert!(expected.status.success(), "{version:?}: {}", String::from_utf8_lossy(&expected.stderr));
        let expected = String::from_utf8(expected.stdout).unwrap();
        assert!(expected.matches("without_torch.py").count() > 100, "{version:?}: {expected}");
        for stacks in ["off", "python"] {
            let traced = Traced::new(&python, &arguments).env("MEMTRACE_STACKS", stacks);
            let ran = variables.iter().fold(traced, |traced, (name, value)| traced.env(name, value)).run();
            assert_eq!(ran.status(), 0, "{version:?}: {}", ran.stderr());
            let ours = ran.stdout();
            let difference = ours.lines().zip(expected.lines()).find(|(ours, expected)| ours != expected);
            assert_eq!(difference, None, "{version:?} {stacks}: the first event that differs");
            assert_eq!(ours.lines().count(), expected.lines().count(), "{version:?} {stacks}");
            let traces: Vec<_> =
                ran.files().into_iter().filter(|file| file.extension().unwrap() == "csv").collect();
            assert_eq!(traces.len(), arguments.len() - 2, "each tool has a trace: {}", ran.stderr());
            for trace in traces {
                let blocks = lines_of_blocks(&trace, &BTreeMap::from([(0, Vec::new())]));
                assert!(
                    blocks.iter().any(|module| module.starts_with("Net.inner")),
                    "{version:?}: {blocks:?}"
                );
            }
        }
    }
}

#[test]
fn preload_of_a_tool_that_reads_each_write_harms_no_python_program() {
    torch_program("threads/trains");
    let torch = compiled("fakes/c10_cuda.c", "libc10_cuda.so", &["libc10.so", RUNTIME]);
    let tool = compiled("other_tools/reads_writes.c", "libreads_writes.so", &[]);
    let preload = format!("{}:{}", tool.display(), common::library("libmemtrace.so").display());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/scripts/owners/any_python.py");
    for (version, python) in pythons() {
        let traced = Traced::new(&python, &[script.to_str().unwrap(), torch.to_str().unwrap(), "calls"]);
        let ran = traced.env("MEMTRACE_STACKS", "python").env("LD_PRELOAD", &preload).run();
        assert_eq!(ran.status(), 0, "{version:?}: {}", ran.stderr());
        assert!(!lines_of_stacks(&ran.files()[1]).is_empty(), "{version:?}");
    }
}

/// Checks that the entries of memory_viz and the flame graphs have the lines that `any_python.py` printed.
fn exports_have_lines(python: &Path, trace: &Path, expected: &[String]) {
    let folder = tempfile::TempDir::new().unwrap();
    let [pickle, flames] = ["snapshot", "collapsed"].map(|export| {
        let to = folder.path().join(export);
        let mut command = untraced(Path::new(env!("CARGO_BIN_EXE_memtrace")), &["export", "--to", export]);
        let output = command.arg("-o").arg(&to).arg(trace).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        to
    });
    let output = Command::new(python).args(["-c", ENTRIES]).arg(pickle).output().unwrap();
    let entries = String::from_utf8(output.stdout).unwrap();
    assert_eq!(entries.lines().collect::<Vec<_>>(), expected, "{}", String::from_utf8_lossy(&output.stderr));
    let flames = fs::read_to_string(flames).unwrap();
    // The last word of a line is the number of bytes.
    let stacks = flames.lines().map(|line| line.rsplit_once(' ').unwrap().0.split(';'));
    let stacks: Vec<String> = stacks.map(|frames| lines_in(frames).join("|")).collect();
    for line in expected {
        let (module, lines) = line.split_once('|').unwrap();
        let path = module.replace("(none)", "forward").replace('.', ";");
        let is_it = |(flame, found): (&str, &String)| found == lines && flame.contains(&path);
        assert!(flames.lines().zip(&stacks).any(is_it), "{line}: {flames}");
    }
}

/// Prints, for each entry with lines of `any_python.py`, the module and these lines, outermost first.
const ENTRIES: &str = r#"
import pickle, sys
(entries,) = pickle.load(open(sys.argv[1], "rb"))["device_traces"]
for entry in entries:
    frames = entry["frames"]
    lines = ["%d %s" % (f["line"], f["name"]) for f in frames if f["filename"].endswith("any_python.py")]
    module = next((f["name"] for f in frames if f["filename"] == "module"), "(none)")
    if lines and entry["action"] == "alloc":
        print(module, *reversed(lines[1:]), lines[0].split()[1], sep="|")
"#;

/// Returns, for each block, its module and the lines of `any_python.py` that allocated it, outermost first.
fn lines_of_blocks(trace: &Path, stacks: &BTreeMap<i64, Vec<String>>) -> Vec<String> {
    let mut reader = memtrace_trace::csv::RowReader::open(trace).unwrap();
    let mut blocks = Vec::new();
    while let Some(row) = reader.next_row().unwrap() {
        if row.event == EventName::Alloc {
            let lines = stacks.get(&row.stack_id).cloned().unwrap_or_default();
            blocks.push([vec![row.module.to_owned()], lines].concat().join("|"));
        }
    }
    blocks
}

/// Maps each stack id to its lines of `any_python.py`: `file:line function` without the file. A frame of
/// `block`, the function that makes all allocations, has no line number.
fn lines_of_stacks(stacks: &Path) -> BTreeMap<i64, Vec<String>> {
    let mut found: BTreeMap<i64, Vec<String>> = BTreeMap::from([(0, Vec::new())]);
    for row in csv::Reader::from_path(stacks).unwrap().records().map(Result::unwrap) {
        let [id, parent] = [0, 1].map(|column| row[column].parse::<i64>().unwrap());
        // A parent has a smaller id than its children, so its lines are already known.
        let lines = [found[&parent].clone(), lines_in([&row[3]].into_iter())].concat();
        found.insert(id, lines);
    }
    found
}

/// Returns the lines of `any_python.py` among frames.
fn lines_in<'a>(frames: impl Iterator<Item = &'a str>) -> Vec<String> {
    let line_of = |frame: &'a str| {
        let (_, line) = frame.split_once("any_python.py:")?;
        let (_, function) = line.split_once(' ')?;
        Some(if function == "block" { function } else { line }.to_owned())
    };
    frames.filter_map(line_of).collect()
}

#[test]
fn writes_into_a_live_journal_by_others_neither_stop_the_program_nor_the_writer() {
    use std::io::{Seek, SeekFrom, Write};
    let folder = tempfile::TempDir::new().unwrap();
    let mut command = untraced(&program("threads/flood"), &["4", "150000"]);
    command.env("LD_PRELOAD", common::library("libmemtrace.so")).env("MEMTRACE_OUT", folder.path());
    command.env("MEMTRACE_BUFFER", "1m");
    let piped = std::process::Stdio::piped;
    let mut child = command.stdout(piped()).stderr(piped()).spawn().unwrap();
    let name = format!("memtrace-{}-", child.id());
    let mut random = 1u64;
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut writes = 0;
    while child.try_wait().unwrap().is_none() {
        let journals = fs::read_dir("/dev/shm").unwrap().flatten().map(|entry| entry.path());
        let journal = journals.into_iter().find(|path| {
            let file = path.file_name().unwrap().to_string_lossy();
            file.starts_with(&name) && file.ends_with(".journal")
        });
        let Some(mut file) = journal.and_then(|path| fs::File::options().write(true).open(path).ok()) else {
            continue;
        };
        let length = file.metadata().unwrap().len();
        for _ in 0..1000 {
            // Write only inside the journal, so that it never grows. While it is shorter than 64 bytes,
            // `checked_rem` returns `None`.
            let Some(place) = next().checked_rem(length / 64) else { break };
            file.seek(SeekFrom::Start(place * 64)).unwrap();
            let values = [next(), next(), next() % 256, next() % 1024];
            file.write_all(&values.map(u64::to_le_bytes).concat()).unwrap();
            writes += 1;
        }
    }
    let output = child.wait_with_output().unwrap();
    assert!(writes > 1000, "the journal was found");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert_eq!(String::from_utf8_lossy(&output.stdout), format!("{}\n", 4 * 150_000 * 2));
    assert!(!stderr.contains("bug in memtrace"), "{stderr}");
}

#[test]
fn threads_that_run_on_while_the_trace_is_finished_have_rows_or_are_counted() {
    for buffer in ["16m", "64m"] {
        let ran = Traced::new(&program("threads/runs_on"), &["3"]).env("MEMTRACE_BUFFER", buffer).run();
        assert_eq!(ran.status(), 0, "{}", ran.stderr());
        let trace = Trace::read_lossy(&ran.files()[0]);
        let lost = trace.end_count("lost");
        let calls = ran.numbers()[0];
        // The end row is written a moment before the process ends, so a few calls come after it.
        let missing = calls - trace.rows.len() as i64 - lost;
        eprintln!("{buffer}: {calls} calls, {} rows, {lost} lost, {missing} missing", trace.rows.len());
        assert!(lost > 0 && missing < calls / 20, "{buffer}: {calls} {} {lost}", trace.rows.len());
    }
}
