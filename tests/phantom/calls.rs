//! Single calls on the simulated GPU (the phantom), from programs in C and through `ctypes`: their status
//! and their effect. No torch is needed.

use crate::common::{compiled, library, untraced};

/// Returns the output of a program of `tests/programs/phantom`, linked with the simulated GPU and without the
/// tracer.
fn told(source: &str, card: &str, arguments: &[&str]) -> String {
    let phantom = library("libmemtrace_phantom.so");
    // The program is linked by the library's soname, so at run time the loader uses the preloaded library,
    // which has the same soname.
    let program = compiled(
        &format!("phantom/{source}.c"),
        &format!("phantom-{source}"),
        &["-Wl,--allow-shlib-undefined", phantom.to_str().unwrap()],
    );
    let output = untraced(&program, arguments)
        .env("LD_PRELOAD", &phantom)
        .env("MEMTRACE_PHANTOM", card)
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{source}: {}\n{stderr}", output.status);
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn phantom_driver_calls_fail_until_the_driver_is_initialized() {
    let before = "before: count 3 get 3 current 3 alloc 3 free 3 unsupported 3 version 0 entry 0\n\
                  3 is CUDA_ERROR_NOT_INITIALIZED\n";
    let after = "after: count 0 get 0 current 0 alloc 0 free 0 unsupported 801 version 0 entry 0\n";
    assert_eq!(told("initialization", "t4", &[]), format!("{before}flags 1 init 0\n{after}"));
    assert_eq!(told("initialization", "t4", &["runtime"]), format!("{before}runtime 0\n{after}"));
}

#[test]
fn phantom_reports_ecc_only_for_cards_that_have_it_and_counts_errors_only_where_it_is_on() {
    // 3 is NVML_ERROR_NOT_SUPPORTED.
    for (card, told_by_card) in [
        ("t4", "cuda 1 mode 0: 1 1 errors 0: 0\n"),
        ("a6000", "cuda 0 mode 0: 0 0 errors 3: 7\n"),
        ("rtx3090", "cuda 0 mode 3: -1 -1 errors 3: 7\n"),
    ] {
        assert_eq!(told("ecc", card, &[]), told_by_card, "{card}");
    }
}

#[test]
fn phantom_gives_a_runtime_of_cuda_11_the_look_up_of_four_arguments() {
    let expected =
        "for 11.3: 0 found 0 own 1\ncalled: 0 1\nunknown: 500 0\nfor 12.0: 0 own 1\ncalled: 0 1 found 0\n";
    assert_eq!(told("entry_points", "t4", &[]), expected);
}

#[test]
fn phantom_events_of_two_devices_wait_exactly_and_have_no_elapsed_time() {
    let expected = "record elsewhere 400 last error 400\n\
                    wait 0 query 600 600 synchronize 0 query 0 0 600\n\
                    elapsed across 400 last error 400 time -1 on one 0\n";
    assert_eq!(told("two_devices", "2xt4", &[]), expected);
}

#[test]
fn phantom_contexts_that_a_program_creates_are_pushed_and_destroyed_ones_are_popped() {
    let expected = "create 0 current 1\n\
                    pop 0 same 1 current 0\n\
                    push 0 current 1\n\
                    destroy another 0 current 1\n\
                    destroy 0 current 0\n\
                    refused 1 101 current 0\n";
    assert_eq!(told("contexts", "2xt4", &[]), expected);
}

#[test]
fn phantom_managed_memory_is_prefetched_with_the_arguments_of_cuda_12_and_13() {
    let expected = "alloc 0\n\
                    before 13: device 0 host 0\n\
                    since 13: device 0 host 0 part 0\n\
                    by name 0 advise 0\n\
                    too long 1 empty 1 not managed 1\n\
                    charged 0, free 0\n";
    assert_eq!(told("managed", "t4", &[]), expected);
}

#[test]
fn phantom_memory_that_a_sleeping_server_unmaps_is_copied_by_the_runtime_of_any_wheel() {
    let runtime = compiled("phantom/own_runtime.c", "libcudart.0a1b2c3d.so.13", &[]);
    let expected = "\
reserve 0
not mapped 1
map 0 0 0
fill 0 plain 0 reads 7
pinned 0 whole 0 beyond 1
awake 12 MiB
sleep 0 0
asleep 0 MiB, copy 1
map 0 0 0
restore 0 awake 12 MiB reads 0 0
end 0 0 0
";
    assert_eq!(told("sleeping", "t4", &[runtime.to_str().unwrap()]), expected);
}

#[test]
fn phantom_is_the_nvml_of_libraries_that_are_linked_against_its_file() {
    let folder = tempfile::TempDir::new().unwrap();
    // Links against this file, and removes it before the library is loaded.
    let stub = compiled("phantom/own_runtime.c", "libnvidia-ml.so.1", &[]);
    let linked = compiled(
        "phantom/linked_nvml.c",
        "liblinked-nvml.so",
        &["-Wl,--no-as-needed", stub.to_str().unwrap(), "-Wl,--allow-shlib-undefined"],
    );
    let alone = folder.path().join("liblinked-nvml.so");
    std::fs::copy(linked, &alone).unwrap();
    std::fs::remove_file(stub).unwrap();
    assert_eq!(told("nvml_file", "2xt4", &[alone.to_str().unwrap()]), "2 devices\n");
}

#[test]
fn phantom_captures_forbid_what_cuda_forbids_and_are_invalidated() {
    let lines = told("captures", "t4", &[]);
    let expected = "\
synchronize: 900 900 901 | state 2 end 901 null then 0
driver synchronize: 900 | state 2 end 901 null then 0
query: 900 | state 2 end 901 null then 0
others: 0 0 | state 1 end 0 then 0
device: 900 | state 2 end 901 null then 0
context: 900 | state 2 end 901 null then 0
callback: 900 | state 2 end 901 null then 0
attach: 900 | state 2 end 901 null then 0
malloc: 900 | state 2 end 901 null then 0
malloc local: 900 | state 2 end 901 null then 0
malloc relaxed: 0 0 | state 1 end 0 then 0
driver malloc: 900 | state 2 end 901 null then 0
free: 900 | state 2 end 901 null then 0
pinned: 900 | state 2 end 901 null then 0
exchanged: 0 0 0 0 2 | state 1 end 0 then 0
mode 7: 1, capture 1
thread: 900 900 | state 2 end 901 null then 0
thread local: 0 0 | state 1 end 0 then 0
local thread: 0 0 | state 1 end 0 then 0
copy: 900 | state 2 end 901 null then 0
copy relaxed: 0 | state 1 end 0 then 0
legacy: 906 906 | state 2 end 901 null then 0
legacy copy: 906 | state 2 end 901 null then 0
legacy query: 906 | state 2 end 901 null then 0
legacy state: 906 | state 1 end 0 then 0
on legacy: begin 900 | state 0 end 401 then 0
per thread: 0 | state 1 end 0 then 0
event: 0 907 | state 2 end 901 null then 0
event later: 907 907 907
event before: 900 | state 2 end 901 null then 0
event relaxed: 0 | state 1 end 0 then 0
isolation: 905 | state 2 end 901 null then 0
external wait: 0 | state 1 end 0 then 0
merge: 0 902 901 | state 2 end 901 null then 0
fork: 0 0 0 | state 1 end 904 null then 0
joined: 0 0 0 0 0 | state 1 end 0 then 0
unmatched: 0 0 903 | state 2 end 901 null then 0
wrong thread: 908 | state 2 end 901 null then 0
twice: 401 | state 1 end 0 then 0
twice ended: | state 1 end 0 then 0
not begun: 401
to a graph: 0 401 1 | state 1 end 0 same then nothing 1
captured: memory 1 host 0 called 0
launched: memory 7 host 7 called 2 event 0
nested: memory 1 host 0 called 2 launched: memory 6 host 7 called 3
";
    for (line, wanted) in lines.lines().zip(expected.lines()) {
        assert_eq!(line, wanted);
    }
    assert_eq!(lines, expected);
}

#[test]
fn phantom_frees_only_what_a_program_allocated_and_has_not_freed() {
    let expected = "\
twice: 0 1 free same 1 live 7
chunk: 1 1 live 7
symbol: 1 1
plain twice: 0 1
layers: 0 pitch 512 sizes 100 3 taken 2 bytes 6144
reset: 0 free same 1 then 1 1 1
driver reset: 0 101 free same 1
graph: 1 0
";
    assert_eq!(told("frees", "t4", &[]), expected);
}

#[test]
fn phantom_operations_of_nccl_run_when_their_graph_is_launched() {
    let expected = "eager 5\ncaptured 0 then 5\nlaunched 7 then 9\ngrouped 9 then 3\nfailed 0\n";
    assert_eq!(told("captured_nccl", "t4", &[]), expected);
}

#[test]
fn phantom_descriptors_that_a_program_makes_for_each_op_take_no_memory() {
    assert_eq!(told("descriptors", "t4", &[]), "failed 0 same 0 grown no\n");
}

#[test]
fn phantom_sizes_that_no_memory_has_and_memory_that_is_not_pinned_are_refused() {
    let expected = "pinned: same 1\nrange: start 1 size 1\nfailures 0\n";
    assert_eq!(told("oversized", "t4", &[]), expected);
}

#[test]
fn phantom_refuses_the_arguments_that_cuda_refuses() {
    let folder = tempfile::TempDir::new().unwrap();
    let file = folder.path().join("module");
    let expected = "active: 0 0 then 1 1\n\
                    712 is CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED: part or all of the requested memory range is \
                    already mapped\n\
                    713 is CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED: pointer does not correspond to a registered \
                    memory region\n";
    for (card, shared) in
        [("2xt4", "64 64"), ("2xp100", "64 48"), ("2xgtx1080", "96 48"), ("2xorin", "164 163")]
    {
        let lines = told("arguments", card, &[file.to_str().unwrap()]);
        assert_eq!(lines, format!("{expected}shared {shared}\nfailures 0\n"), "{card}");
    }
}

#[test]
fn phantom_requests_that_are_refused_take_no_memory_from_other_processes_meanwhile() {
    let lines = told("contention", "t4", &[]);
    let mut lines: Vec<_> = lines.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["large: failed 0 granted 0", "small: failed 0 refused 0"]);
}

#[test]
fn phantom_graphs_and_streams_that_are_destroyed_take_no_memory_and_no_time() {
    let expected = "graphs gone\nstreams gone\npool 32 MiB then 0 MiB\nfailed 0\n";
    assert_eq!(told("destroyed", "t4", &[]), expected);
}
