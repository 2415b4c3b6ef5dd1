//! The memory of the host: its ledger and growth, and who killed a process.

use super::*;

#[test]
fn peak_of_a_program_without_a_gpu_is_that_of_its_cpu_tensors() {
    const MIB: i64 = 1 << 20;
    let mut trace = host_trace(true);
    let row =
        Row { event: EventName::HostAlloc, device: -2, api: "cpu_allocator", alloc_id: 9, ..Row::default() };
    let row = Row { module: "Net.fc", delta_bytes: 5 * MIB, requested_bytes: 5 * MIB, ..row };
    trace.change(row, [5 * MIB, 5 * MIB, 0]);
    let by_itself = answer_on(trace.finish(), "peak", &[]);
    assert_eq!((&by_itself.json["device"], &by_itself.json["peak"]["bytes"]), (&json!(-2), &json!(5 * MIB)));
    assert!(by_itself.text().contains("Net.fc"), "{}", by_itself.text());
    // Without rows of CPU tensors, `peak` has nothing to list for the host.
    let nothing = answer_on(host_trace(true).finish(), "peak", &[]).text();
    assert!(nothing.contains("No memory tracked."), "{nothing}");
}

#[test]
fn ledger_of_the_host_sums_to_the_process_and_says_what_is_unknown() {
    const MIB: i64 = 1 << 20;
    let trace = host_trace(true).finish();
    let at = |at: &str| answer_on(trace.clone(), "ledger", &[("host", ""), ("at", at)]);
    let first = at("1.5s");
    let host = &first.json["host"][0];
    assert_eq!((&host["pss_bytes"], &host["rss_bytes"]), (&json!(95 * MIB), &json!(100 * MIB)));
    // At the peak there is no full sample. The rows come from the last full sample, and an additional row
    // `change` must hold the difference.
    let peak = at("used-peak");
    let host = &peak.json["host"][0];
    assert_eq!((&host["pss_bytes"], &host["rss_bytes"]), (&json!(275 * MIB), &json!(280 * MIB)));
    let rows = host["rows"].as_array().unwrap();
    assert_eq!(rows.iter().map(|row| row["pss_bytes"].as_i64().unwrap()).sum::<i64>(), 275 * MIB);
    assert!(rows.iter().any(|row| row["group"] == "change" && row["rss_bytes"] == 180 * MIB), "{rows:?}");
    assert_eq!(host["children"]["largest"][0]["pid"], 77);
    assert_eq!(host["container"]["limit_bytes"], 320 * MIB);
    let text = peak.text();
    for part in
        ["anonymous", "pt_data_worker (pid 77)", "limit 320.00 MiB, 10.00 MiB left", "machine: 4.88 GiB"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Without `/proc/self/smaps` the ledger must say that it has no rows, and without `/proc` that it has no
    // sample.
    let hidden = answer_on(host_trace(false).finish(), "ledger", &[("host", "")]);
    assert!(hidden.text().contains("No full sample of the host"), "{}", hidden.text());
    let none = answer_on(TraceBuilder::default().finish(), "ledger", &[("host", "")]);
    assert!(none.text().contains("No sample of the host"), "{}", none.text());
}

/// A trace with CPU tensors: 40 MiB in the full sample at 2 s, 100 MiB from 5 s on, and, if `is_replaced`, as many
/// that are freed. Anonymous memory rises by 150 MiB after the full sample.
fn trace_of_cpu_tensors(is_replaced: bool) -> Vec<u8> {
    const MIB: i64 = 1 << 20;
    let second = 1_000_000_000;
    let mut trace = TraceBuilder::default();
    let tensor = |trace: &mut TraceBuilder, mib: i64, op: &'static str, ts_ns: i64| {
        let row = Row {
            event: EventName::HostAlloc,
            device: -2,
            api: "cpu_allocator",
            op,
            ts_ns,
            ..Row::default()
        };
        let bytes = mib * MIB;
        trace.change(
            Row { alloc_id: ts_ns, delta_bytes: bytes, requested_bytes: bytes, ..row },
            [bytes, bytes, 0],
        );
    };
    let sample = |trace: &mut TraceBuilder, api: &'static str, ts_ns: i64, name: &str| {
        trace.raw(host_sample(api, ts_ns, name));
    };
    let quick = |trace: &mut TraceBuilder, ts_ns: i64, anon: i64| {
        sample(trace, "proc_status", ts_ns, &format!("rss={0} anon={0} file=0 shmem=0 swap=0", anon * MIB));
        sample(trace, "cgroup", ts_ns, &format!("current={} limit={} file=0 kills=1", anon * MIB, 300 * MIB));
    };
    tensor(&mut trace, 40, "aten::empty", second);
    quick(&mut trace, 2 * second, 100);
    for (name, mib) in [("(total)", 100), ("CPU tensors", 40), ("anonymous", 60)] {
        let text = format!("pss={0} rss={0} dirty=0 swap=0 what={name}", mib * MIB);
        sample(&mut trace, "smaps", 2 * second, &text);
    }
    tensor(&mut trace, 100, "aten::randn", 5 * second);
    if is_replaced {
        let (event, api, bytes) = (EventName::HostFree, "cpu_allocator", 100 * MIB);
        let row = Row { event, device: -2, api, ts_ns: 6 * second, alloc_id: 5 * second, ..Row::default() };
        trace.change(Row { delta_bytes: -bytes, ..row }, [-bytes, -bytes, 0]);
    }
    quick(&mut trace, 9 * second, 250);
    let name = "killed signal=9 kills=2 lost=0";
    trace.raw(Row { event: EventName::End, ts_ns: 10 * second, name, ..Row::default() });
    trace.unfinished()
}

#[test]
fn host_memory_of_tensors_has_the_code_that_allocated_it() {
    let killed = answer_on(trace_of_cpu_tensors(false), "oom", &[]).text();
    for part in [
        "anonymous: change since 2.00 s: up to 100.00 MiB are CPU tensors, allocated at aten::randn (100.00 MiB)",
        "CPU tensors: allocated at aten::empty (40.00 MiB)",
        "try: CPU tensors: ",
    ] {
        assert!(killed.contains(part), "{part}: {killed}");
    }
    let ledger = answer_on(trace_of_cpu_tensors(false), "ledger", &[("host", ""), ("at", "2s")]);
    let rows = ledger.json["host"][0]["rows"].as_array().unwrap();
    let of = |name: &str| &rows.iter().find(|row| row["held_by"] == name).unwrap()["allocated_at"];
    assert_eq!(
        (of("CPU tensors"), of("anonymous")),
        (&json!([{ "at": "aten::empty", "bytes": 40 << 20 }]), &json!([]))
    );
    // Tensors that were freed again are not what grew.
    let replaced = answer_on(trace_of_cpu_tensors(true), "oom", &[]).text();
    assert!(!replaced.contains("aten::randn") && replaced.contains("try: anonymous: "), "{replaced}");
}

#[test]
fn budget_limits_the_memory_of_the_host_and_refuses_a_trace_without_samples() {
    let folder = tempfile::tempdir().unwrap();
    let limits = folder.path().join("limits.toml");
    let check = |rss: &str, trace: Vec<u8>| {
        std::fs::write(&limits, format!("[host]\nrss = \"{rss}\"\n")).unwrap();
        let file = folder.path().join("vm.r0.1.csv");
        std::fs::write(&file, trace).unwrap();
        let input = Input::open(&file).unwrap();
        let values = [("limits", limits.to_str().unwrap())];
        reports::find("budget").unwrap().run(&[input], &options(&values))
    };
    let verdict = |rss: &str| check(rss, host_trace(true).finish()).unwrap();
    assert_eq!(verdict("280 MiB").verdict, Verdict::Fine);
    let over = verdict("279 MiB");
    assert_eq!((over.verdict, &over.json["limits"][0]["on"]), (Verdict::OverLimit, &json!("host")));
    assert_eq!(over.json["limits"][0]["highest_bytes"], 280_i64 << 20);
    let why = check("1g", TraceBuilder::default().finish()).unwrap_err().to_string();
    assert!(why.contains("no samples of the host"), "{why}");
}

/// Reads a later part of a rotated trace. Its first sample comes after some steps, but the context is as old
/// as the process.
#[test]
fn leaks_see_no_growth_where_the_first_sample_comes_late() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    let mut trace = TraceBuilder::default();
    trace.segment(40 * MIB);
    for step in 0..10 {
        let row = Row { step, op: "aten::mm", ..Row::default() };
        let block = trace.alloc(10 * MIB, row);
        if step >= 4 {
            let name = format!("total={TOTAL} free={} process={} others=0", TOTAL - 640 * MIB, 640 * MIB);
            trace.raw(Row {
                event: EventName::Sample,
                api: "nvml",
                name: &name,
                device: 0,
                ..Row::default()
            });
        }
        trace.free(block, 10 * MIB, row);
    }
    let answer = answer_on(trace.finish(), "leaks", &[]);
    let growth = &answer.json["processes"][0]["growth"][0];
    assert_eq!((&growth["cause"], &growth["growth_bytes"]), (&Value::Null, &json!(0)), "{growth}");
    assert_eq!(growth["from"]["parts_bytes"]["outside"], 600 * MIB, "{growth}");
}

#[test]
fn leaks_show_growth_of_the_host_by_part() {
    const MIB: i64 = 1 << 20;
    let mut trace = TraceBuilder::default();
    for second in 1..=12_i64 {
        let heap = (50 + 10 * second) * MIB;
        for (api, name) in [
            ("proc_status", format!("rss={} anon={heap} file={MIB} shmem=0 swap=0", heap + MIB)),
            ("cgroup", format!("current={} file={} kills=0", heap + 900 * MIB, second * 64 * MIB)),
            ("smaps", format!("pss={} rss={} dirty=0 swap=0 what=(total)", heap + MIB, heap + MIB)),
            ("smaps", format!("pss={heap} rss={heap} dirty=0 swap=0 what=heap")),
            ("smaps", format!("pss={MIB} rss={MIB} dirty=0 swap=0 what=libraries")),
        ] {
            trace.raw(host_sample(api, second * 1_000_000_000, &name));
        }
    }
    // The last two samples: the program ends, and gives its memory back.
    for (second, rss) in [(13, 40), (14, 20)] {
        let name = format!("rss={} anon={} file=0 shmem=0 swap=0", rss * MIB, rss * MIB);
        trace.raw(host_sample("proc_status", second * 1_000_000_000, &name));
    }
    let answer = answer_on(trace.finish(), "leaks", &[]);
    let host = &answer.json["processes"][0]["host"];
    assert_eq!(host["growth"].as_array().unwrap().len(), 1, "{host}");
    assert_eq!(host["growth"][0]["held_by"], "heap");
    assert_eq!(host["growth"][0]["bytes_per_second"].as_f64().unwrap() as i64, 10 * MIB);
    assert!(answer.text().contains("page cache grew by"), "{}", answer.text());
}

#[test]
fn summary_and_oom_name_the_rank_that_the_kernel_killed_and_no_other() {
    let killed = |ranks: &[(i64, &str, &str)], report: &str| -> Vec<String> {
        let trace = |at: usize| {
            let (anon, boot, end) = ranks[at];
            let meta = Meta { rank: at as i32, boot: boot.to_owned(), cgroup_id: 5, ..Meta::default() };
            let mut trace = host_trace_of(meta, true, anon);
            trace.raw(Row { event: EventName::End, ts_ns: 10_000_000_000, name: end, ..Row::default() });
            trace.unfinished()
        };
        let traces: Vec<_> = (0..ranks.len()).map(trace).collect();
        let json = answer_on_ranks(&traces, report, &[]).json;
        let verdicts = match report {
            "oom" => json["killed"].as_array().unwrap().iter().collect::<Vec<_>>(),
            _ => json["processes"].as_array().unwrap().iter().map(|process| &process["killed"]).collect(),
        };
        verdicts.iter().map(|one| one["by"].as_str().unwrap_or("-").to_owned()).collect()
    };
    // The count of kills (`kills=`) rose by one, so only the largest of the killed ranks is the kernel's
    // victim. If it rose by two, both are.
    let (once, twice) = ("killed kills=2 machine_kills=5 lost=0", "killed kills=3 machine_kills=6 lost=0");
    for report in ["summary", "oom"] {
        let of = |ranks: &[(i64, &str, &str)]| killed(ranks, report);
        assert_eq!(of(&[(200, "a", once), (260, "a", once)]), ["after_rank", "container_oom"]);
        assert_eq!(of(&[(200, "a", twice), (260, "a", twice)]), ["container_oom", "container_oom"]);
        // On different machines (`a`, `b`) the counts are separate, so both ranks are victims.
        assert_eq!(of(&[(200, "a", once), (260, "b", once)]), ["container_oom", "container_oom"]);
        assert_eq!(
            of(&[(200, "a", once), (260, "a", "killed signal=15 kills=2 lost=0")]),
            ["container_oom", "signal"]
        );
        let machine = "killed machine_kills=5 lost=0";
        assert_eq!(of(&[(260, "a", machine), (200, "a", machine)]), ["machine_oom", "after_rank"]);
        // The last sample of the larger rank already had the final count, so this rank lived after the kill.
        let alive = "killed kills=1 lost=0";
        assert_eq!(of(&[(200, "a", once), (260, "a", alive)]), ["container_oom", "after_rank"]);
        assert_eq!(of(&[(260, "a", alive), (200, "a", alive)]), ["unknown", "unknown"]);
    }
    assert_eq!(killed(&[(200, "a", once), (260, "a", "exit lost=0")], "summary"), ["container_oom", "-"]);
}

#[test]
fn summary_and_oom_say_who_killed_a_process() {
    let ended = |text: &str| {
        let mut trace = host_trace(true);
        trace.raw(Row { event: EventName::End, ts_ns: 10_000_000_000, name: text, ..Row::default() });
        trace.unfinished()
    };
    for (text, by, part) in [
        ("killed signal=9 kills=2 machine_kills=5 lost=0", "container_oom", "by the kernel"),
        ("killed signal=9 kills=1 machine_kills=5 lost=0", "sent", "Somebody sent it"),
        ("killed signal=9 asked=15 kills=1 lost=0", "sent", "after SIGTERM had asked it to end"),
        ("killed signal=9 machine_kills=5 lost=0", "machine_oom", "the machine's memory"),
        ("killed signal=15 kills=1 lost=0", "signal", "SIGTERM"),
        ("killed lost=0", "probably_oom", "probably by the kernel"),
        ("killed kills=1 lost=0", "unknown", "by whom is unknown"),
    ] {
        let summary = answer_on(ended(text), "summary", &[]);
        let killed = &summary.json["processes"][0]["killed"];
        assert_eq!(killed["by"], by, "{text}: {killed}");
        assert!(summary.text().contains(part), "{text}: {}", summary.text());
        assert_eq!(answer_on(ended(text), "oom", &[]).json["killed"][0]["by"], by);
    }
    let text = answer_on(ended("killed signal=9 kills=2 lost=0"), "oom", &[]).text();
    for part in [
        "limit of the container 320.00 MiB; 10.00 MiB left",
        "180.00 MiB anonymous",
        "without a file by 180.00 MiB",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    // Another process of the container holds less or more than this process and its child. An old list and a
    // refusal by the system are no reason to end it.
    for (held, seconds, refused, is_to_end) in
        [(240, 9, false, false), (250, 9, false, true), (250, -2, false, false), (250, 9, true, false)]
    {
        let mut trace = host_trace(true);
        let row = Row { event: EventName::Sample, device: -1, ..Row::default() };
        for name in [
            format!("held={} processes=2 what=(total)", held << 20),
            format!("held={} pid=5 processes=1 what=a server", held << 20),
        ] {
            trace.raw(Row { api: "other_process", ts_ns: seconds * 1_000_000_000, name: &name, ..row });
        }
        let trace = if refused {
            trace.raw(Row { api: "refused", ts_ns: 9_500_000_000, name: "what=MemoryError", ..row });
            trace.finish()
        } else {
            let name = "killed signal=9 kills=2 lost=0";
            trace.raw(Row { event: EventName::End, ts_ns: 10_000_000_000, name, ..Row::default() });
            trace.unfinished()
        };
        let text = answer_on(trace, "oom", &[]).text();
        let others =
            format!("{held}.00 MiB in 2 other processes of the container at 9.00 s: {held}.00 MiB a server");
        assert_eq!(text.contains(&others), seconds == 9, "{text}");
        assert_eq!(text.contains("end the other processes"), is_to_end, "{text}");
    }
    for text in ["exit lost=0", "exec lost=0", "stopped lost=0"] {
        let summary = answer_on(ended(text), "summary", &[]);
        assert!(summary.json["processes"][0]["killed"].is_null(), "{text}");
    }
    // Ends after a refused request for memory: the answer must not say that the program was killed.
    for (name, part) in [
        (
            "limit=3000000000 size=2900000000 peak=2990000000 what=MemoryError",
            "limited to 2.79 GiB (ulimit -v, RLIMIT_AS), and its size was 2.78 GiB",
        ),
        ("size=2900000000 what=RuntimeError", "no limit of its address space is set"),
        ("what=MemoryError", "has a limit is unknown"),
    ] {
        let mut trace = host_trace(true);
        let (event, ts_ns) = (EventName::Sample, 9_500_000_000);
        trace.raw(Row { event, api: "refused", device: -1, ts_ns, name, ..Row::default() });
        let answer = answer_on(trace.finish(), "oom", &[]);
        assert_eq!(answer.json["killed"][0]["by"], "refused", "{name}");
        assert!(answer.text().contains(part), "{name}: {}", answer.text());
    }
}

#[test]
fn ranks_have_the_peak_of_their_host_memory_and_its_skew() {
    const MIB: i64 = 1 << 20;
    let rank = |rank: i32, samples: &[i64]| {
        let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
        let mut trace = TraceBuilder::new(Meta { rank, world_size: 2, devices, ..Meta::default() });
        trace.segment(40 * MIB);
        trace.alloc(8 * MIB, Row { rank, ..Row::default() });
        let mut sample = |api: &'static str, seconds: i64, name: String| {
            trace.raw(Row { rank, ..host_sample(api, seconds * 1_000_000_000, &name) });
        };
        for (seconds, rss) in (1..).zip(samples) {
            sample("proc_status", seconds, format!("rss={} anon={} file=0 shmem=0", rss * MIB, rss * MIB));
            sample("child", seconds, format!("pss={} rss={} processes=1 what=(total)", 5 * MIB, 7 * MIB));
        }
        trace.finish()
    };
    let answer = answer_on_ranks(&[rank(0, &[100, 400, 300]), rank(1, &[100])], "ranks", &[]);
    let of = |key: &str| [0, 1].map(|rank| answer.json["ranks"][rank][key].as_i64().unwrap() / MIB);
    assert_eq!((of("host_peak_rss_bytes"), of("host_peak_bytes")), ([400, 100], [405, 105]));
    assert_eq!(answer.json["host_skew_bytes"], 300 * MIB);
    let text = answer.text();
    assert!(
        text.contains("host memory: 300.00 MiB between the highest and the lowest peak (74.1 % of"),
        "{text}"
    );
    // A trace without samples has no peak, and a single peak has no skew.
    let answer = answer_on_ranks(&[rank(0, &[400]), rank(1, &[])], "ranks", &[]);
    assert_eq!(
        (&answer.json["ranks"][1]["host_peak_bytes"], &answer.json["host_skew_bytes"]),
        (&json!(-1), &json!(0))
    );
    assert!(!answer.text().contains("host memory:"), "{}", answer.text());
}
