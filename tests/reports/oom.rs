//! `memtrace oom`.

use super::*;

#[test]
fn oom_has_a_verdict_for_each_cause() {
    for (kind, verdict) in [
        ("oom-big", "too big"),
        ("oom-fragments", "fragmentation"),
        ("oom-outside", "outside torch"),
        ("oom-limit", "a limit"),
    ] {
        let found = &json_of("oom", kind, &[])["ooms"][0];
        assert_eq!(found["verdict"], verdict, "{kind}");
        assert_eq!((&found["module"], &found["step"]), (&json!("Net.wide"), &json!(3)));
        let expected = &expected()[kind]["oom"];
        for (ours, theirs) in [
            ("rounded_bytes", "rounded"),
            ("allocated_bytes", "allocated"),
            ("reserved_bytes", "reserved"),
            ("largest_hole_bytes", "largest"),
            ("holes", "pieces"),
            ("outside_bytes", "outside"),
        ] {
            assert_eq!(found[ours], expected[theirs], "{kind} {ours}");
        }
        // The traces of the fixtures lack the free memory of the device, so the report must have null, not 0.
        assert_eq!(found["device_free_bytes"], Value::Null, "{kind}");
        let text = answer("oom", &[kind], &options(&[])).text();
        assert!(text.contains("unknown  free on the device: at most "), "{text}");
    }
    assert_eq!(json_of("oom", "gpt", &[])["ooms"], json!([]));
}

#[test]
fn oom_subtracts_memory_of_other_processes_from_the_free_memory() {
    const MIB: i64 = 1 << 20;
    let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 1000 * MIB }];
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
    trace.segment(500 * MIB);
    // The samples: other processes hold 200 MiB of the first device; the second device is full, but nothing
    // says by which process.
    for (device, device_free_bytes) in [(0, 300 * MIB), (1, 0)] {
        let row = Row { event: EventName::Sample, device, device_free_bytes, ..Row::default() };
        trace.change(row, [0; 3]);
    }
    trace.segment(100 * MIB);
    let asked = 450 * MIB;
    let oom = Row {
        event: EventName::Oom,
        device: 0,
        requested_bytes: asked,
        rounded_bytes: asked,
        ..Row::default()
    };
    trace.change(oom, [0; 3]);
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    let input = Input::open(folder.path()).unwrap();
    let report = reports::find("oom").unwrap();
    let found = &report.run(&[input], &options(&[])).unwrap().json["ooms"][0].clone();
    assert_eq!(found["device_free_bytes"], 200 * MIB);
    assert_eq!(found["unaccounted_bytes"], 200 * MIB);
    assert_eq!(found["reserved_bytes"], 600 * MIB);
}

#[test]
fn oom_has_the_host_memory_that_a_sample_after_it_shows_on_a_shared_memory() {
    const MIB: i64 = 1 << 20;
    let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 1000 * MIB }];
    let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
    trace.segment(500 * MIB);
    let asked = 250 * MIB;
    let oom = Row {
        event: EventName::Oom,
        device: 0,
        requested_bytes: asked,
        rounded_bytes: asked,
        ..Row::default()
    };
    // The program's memory on the host grows from 100 to 180 MiB before the request. The second sample is
    // taken after it.
    for (free, host) in [(300, 100), (220, 180)] {
        let [free, host] = [free, host].map(|mib| mib * MIB);
        let name = format!("total={} free={free} others={} cache=0 host={host}", 1000 * MIB, 100 * MIB);
        let row = Row {
            event: EventName::Sample,
            device: 0,
            device_free_bytes: free,
            name: &name,
            ..Row::default()
        };
        trace.change(row, [0; 3]);
        if host == 100 * MIB {
            trace.change(oom, [0; 3]);
        }
    }
    let folder = tempfile::TempDir::new().unwrap();
    std::fs::write(folder.path().join("host.r0.1.csv"), trace.finish()).unwrap();
    let input = Input::open(folder.path()).unwrap();
    let report = reports::find("oom").unwrap();
    let found = &report.run(&[input], &options(&[])).unwrap().json["ooms"][0].clone();
    let [free, host, others] = ["device_free_bytes", "host_bytes", "others_bytes"].map(|key| &found[key]);
    assert_eq!((free, host, others), (&json!(220 * MIB), &json!(180 * MIB), &json!(100 * MIB)), "{found:#}");
}

/// A block is `temporary` when it is allocated and tagged as optimizer state after the OOM. The report must
/// show it as optimizer state.
#[test]
fn oom_has_the_categories_that_later_rows_give_the_blocks() {
    const MIB: i64 = 1 << 20;
    let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
    let mut trace = TraceBuilder::new(Meta { devices, ..Meta::default() });
    trace.segment(20 * MIB);
    let row = Row { module: "(script)", phase: "optimizer", op: "aten::zeros", step: 0, ..Row::default() };
    let temporary = Row { category: Category::Temporary, ..row };
    let state = trace.alloc(8 * MIB, temporary);
    trace.alloc(4 * MIB, temporary);
    trace.change(
        Row { event: EventName::Oom, device: 0, requested_bytes: 90 * MIB, rounded_bytes: 90 * MIB, ..row },
        [0; 3],
    );
    trace.tag(state, 8 * MIB, temporary, Row { category: Category::OptimizerState, ..row });
    let trace = trace.finish();
    let text = answer_on(trace.clone(), "oom", &[]).text();
    assert!(text.contains("8.00 MiB  66.7 %") && text.contains("optimizer_state"), "{text}");
    let summary = answer_on(trace, "summary", &[]).text();
    let of = |text: &str| {
        text.lines().find(|line| line.contains("optimizer_state")).map(|line| line.contains("8.00 MiB"))
    };
    assert_eq!((of(&text), of(&summary)), (Some(true), Some(true)), "{summary}");
}

/// If vLLM finds no room for its KV cache in its share of the card, no request fails. The report must
/// recognize this from the mark that records the share.
#[test]
fn oom_explains_a_server_that_found_no_room_in_its_part_of_the_card() {
    const MIB: i64 = 1 << 20;
    let asked = |mark: &str, free: i64| {
        let devices = vec![Device { ordinal: 0, name: "Test GPU".to_owned(), total_bytes: 8000 * MIB }];
        let mut trace = TraceBuilder::new(Meta { world_size: 1, devices, ..Meta::default() });
        let sample =
            Row { event: EventName::Sample, device: 0, device_free_bytes: free * MIB, ..Row::default() };
        trace.change(sample, [0; 3]);
        trace.segment(1600 * MIB);
        trace.alloc(1500 * MIB, Row { category: Category::Parameter, ..Row::default() });
        trace.change(Row { event: EventName::Mark, api: "script", name: mark, ..Row::default() }, [0; 3]);
        answer_on(trace.finish(), "oom", &[])
    };
    let small = asked("vllm: gpu_memory_utilization=0.15 blocks=0 ended", 7800);
    let found = &small.json["refused"][0];
    assert_eq!((&found["verdict"], &found["needed_bytes"]), (&json!("a limit"), &json!(1500 * MIB)));
    let text = small.text();
    for part in [
        "verdict: a limit: 300.00 MiB missing. vLLM's gpu_memory_utilization=0.15 is 1.17 GiB of 7.81 GiB; weights",
        "  try: gpu_memory_utilization above 0.19, at most 0.97 here: each 0.01 more is 80.00 MiB of KV cache",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Marks of a server that is still running, or that has a cache: the report must not find a problem.
    for mark in [
        "vllm: gpu_memory_utilization=0.5 blocks=0",
        "vllm: gpu_memory_utilization=0.15 blocks=7 ended",
        "kv_cache: blocks=7 tokens=112",
    ] {
        let fine = asked(mark, 7800);
        assert_eq!((fine.json["refused"].as_array().unwrap().len(), mark), (0, mark));
        assert!(fine.text().contains("No request ran out of memory."), "{}", fine.text());
    }
    let large = asked("vllm: gpu_memory_utilization=0.9 blocks=0 ended", 5000).text();
    assert!(large.contains("  try: gpu_memory_utilization=0.62 or less"), "{large}");
}

#[test]
fn oom_of_a_process_says_nothing_of_a_killed_child() {
    const MIB: i64 = 1 << 20;
    let answer = |has_oom: bool| {
        let mut trace = host_trace(true);
        if has_oom {
            trace.segment(100 * MIB);
            let (requested_bytes, rounded_bytes) = (450 * MIB, 450 * MIB);
            let oom =
                Row { event: EventName::Oom, device: 0, requested_bytes, rounded_bytes, ..Row::default() };
            trace.change(oom, [0; 3]);
        }
        let name = format!("current={} limit={} file=0 swap=0 kills=2", 300 * MIB, 320 * MIB);
        trace.raw(host_sample("cgroup", 9_500_000_000, &name));
        let name = format!("rss={} anon={} file=0 shmem=0 swap=0", 280 * MIB, 240 * MIB);
        trace.raw(host_sample("proc_status", 9_500_000_000, &name));
        answer_on(trace.finish(), "oom", &[])
    };
    let (with, without) = (answer(true), answer(false));
    assert_eq!(without.json["killed"].as_array().unwrap().len(), 1, "{:#}", without.json);
    assert!(without.text().contains("the kernel killed"), "{}", without.text());
    assert_eq!(with.json["killed"].as_array().unwrap().len(), 1);
    assert!(
        with.text().contains("verdict: ") && !with.text().contains("the kernel killed"),
        "{}",
        with.text()
    );
}
