//! Reports that compare: ranks, processes, runs and steps.

use memtrace_trace::text::WITHOUT_DETAIL;

use super::*;

#[test]
fn ranks_finds_the_rank_with_the_larger_batch() {
    let found = answer("ranks", &["sharded"], &options(&[])).json;
    let expected = &expected()["sharded"]["ranks"];
    let peaks: Vec<Value> =
        found["ranks"].as_array().unwrap().iter().map(|rank| rank["peak_allocated_bytes"].clone()).collect();
    assert_eq!(Value::from(peaks), expected["peaks"]);
    assert_eq!(found["first_difference"]["ranks"], expected["ranks"]);
    let at = |key: &str| {
        found["first_difference"][key].as_str().unwrap().replace(&format!("(no {key})"), "(none)")
    };
    assert_eq!(json!([at("phase"), at("module")]), expected["at"]);
}

#[test]
fn ranks_and_ledger_name_the_processes_that_fill_another_ranks_gpu() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    // Rank 1 works on GPU 1; with `foreign`, it has also loaded a checkpoint to GPU 0.
    let run = |foreign: bool, extra: i64| {
        let trace = |rank: i32| {
            let device =
                |ordinal| memtrace_trace::meta::Device { ordinal, total_bytes: TOTAL, ..Default::default() };
            let mut trace = TraceBuilder::new(Meta {
                rank,
                world_size: 2,
                host: "host".to_owned(),
                devices: vec![device(0), device(1)],
                ..Meta::default()
            });
            let used: [&[(i32, i64)]; 2] = [&[(0, 300)], &[(0, 100), (1, 300)]];
            for (device, mib) in used[rank as usize] {
                if rank == 1 && *device == 0 && !foreign {
                    continue;
                }
                let row = Row { device: *device, op: "aten::copy_", phase: "init", ..Row::default() };
                let segment =
                    Row { event: EventName::SegmentAlloc, api: "cudaMalloc", delta_bytes: mib * MIB, ..row };
                trace.change(segment, [0, 0, mib * MIB]);
                trace.alloc(mib * MIB, row);
                let others = if *device == 0 && foreign { 600 - mib } else { extra } * MIB;
                let own = (mib + 100) * MIB;
                let name =
                    format!("total={TOTAL} free={} process={own} others={others}", TOTAL - own - others);
                trace.raw(Row {
                    event: EventName::Sample,
                    api: "nvml",
                    name: &name,
                    device: *device,
                    ..Row::default()
                });
            }
            trace.finish()
        };
        [trace(0), trace(1)]
    };
    let answer = answer_on_ranks(&run(true, 0), "ranks", &[]);
    let shared = answer.json["shared_devices"].as_array().unwrap();
    let found: Vec<_> =
        shared.iter().map(|user| (&user["rank"], &user["works_here"], &user["bytes"])).collect();
    let (own, other) = (json!(400 * MIB), json!(200 * MIB));
    assert_eq!(found, [(&json!(0), &json!(true), &own), (&json!(1), &json!(false), &other)]);
    assert_eq!(
        (&shared[1]["context_bytes"], &shared[1]["first_op"]),
        (&json!(100 * MIB), &json!("aten::copy_"))
    );
    let text = answer.text();
    assert!(text.contains("200.00 MiB on GPUs that their processes do not work on"), "{text}");
    assert!(text.contains("map_location"), "{text}");
    let ledger = answer_on_ranks(&run(true, 0), "ledger", &[]).text();
    assert!(
        ledger.contains("other processes: rank 1 of this run (pid 2), 200.00 MiB by aten::copy_"),
        "{ledger}"
    );
    // Rank 0 sees 300 MiB in other processes, and rank 1 has 200 MiB of it. The remaining 100 MiB are not
    // reported, because they are less than a context.
    assert_eq!(answer.json["unnamed_others"], json!([]), "less than a context");
    let alone = answer_on_ranks(&run(false, 0), "ranks", &[]);
    assert_eq!(alone.json["shared_devices"], json!([]));
    assert!(!alone.text().contains("do not work"), "{}", alone.text());
    let contexts = answer_on_ranks(&run(false, 600), "ranks", &[]);
    assert_eq!(
        contexts.json["unnamed_others"][0],
        json!({ "host": "host", "device": 0, "bytes": 600 * MIB })
    );
}

#[test]
fn ledger_oom_and_ranks_name_processes_without_a_trace_by_user_and_command() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    let run = |marks: &[&str]| {
        let device = memtrace_trace::meta::Device { ordinal: 0, total_bytes: TOTAL, ..Default::default() };
        let mut trace =
            TraceBuilder::new(Meta { host: "host".to_owned(), devices: vec![device], ..Meta::default() });
        for name in marks {
            trace.raw(Row { event: EventName::Mark, api: "gpu_process", name, device: -1, ..Row::default() });
        }
        let segment = Row {
            event: EventName::SegmentAlloc,
            api: "cudaMalloc",
            delta_bytes: MIB,
            device: 0,
            ..Row::default()
        };
        trace.change(segment, [0, 0, MIB]);
        trace.alloc(MIB, Row { op: "aten::empty", device: 0, ..Row::default() });
        let others = 7000 * MIB;
        let free = TOTAL - others - 501 * MIB;
        let name = format!("total={TOTAL} free={free} process={} others={others}", 501 * MIB);
        let sample = Row { event: EventName::Sample, api: "nvml", name: &name, device: 0, ..Row::default() };
        trace.raw(Row { device_free_bytes: free, ..sample });
        let oom = Row { event: EventName::Oom, rounded_bytes: 2000 * MIB, device: 0, ..Row::default() };
        trace.change(oom, [0; 3]);
        trace.finish()
    };
    let known =
        format!("device=0 pid=4711 bytes={} user=alice container=0123456789ab command=serve.py", 4000 * MIB);
    let hidden = format!("device=0 pid=12 bytes={}", 2000 * MIB);
    // Process 9 has left the GPU, process 10 is on another one, and process 1 is this program.
    let (gone, left) = ("device=0 pid=9 bytes=77 command=old.py", "device=0 pid=9 bytes=0 command=old.py");
    let (elsewhere, own) =
        ("device=1 pid=10 bytes=5 command=far.py", "device=0 pid=1 bytes=5 command=self.py");
    let run = run(&[&known, gone, left, elsewhere, own, "device=x pid=3 bytes=4", &hidden]);
    let alice = "process 4711 (user alice, serve.py, container 0123456789ab), 3.91 GiB";
    let nobody = "process 12 (user and command unknown: /proc does not show it here), 1.95 GiB";
    let rest = "1000.00 MiB of processes without a trace in this run";
    let wanted = format!("{alice}; {nobody}; {rest}");
    let ledger = answer_on_ranks(std::slice::from_ref(&run), "ledger", &[("at", "end")]).text();
    assert!(ledger.contains(&format!("other processes: {wanted}")), "{ledger}");
    assert!(ledger.contains("end them if they are yours"), "{ledger}");
    let oom = answer_on_ranks(std::slice::from_ref(&run), "oom", &[]).text();
    assert!(oom.contains(&wanted) && oom.contains("end them if they are yours"), "{oom}");
    let ranks = answer_on_ranks(&[run], "ranks", &[]);
    assert!(ranks.text().contains(&format!("GPU 0 of host: {alice} at most")), "{}", ranks.text());
    assert!(!ranks.text().contains("self.py"), "{}", ranks.text());
    let pids: Vec<_> =
        ranks.json["other_processes"].as_array().unwrap().iter().map(|it| it["pid"].as_i64()).collect();
    assert_eq!(pids, [Some(9), Some(12), Some(4711), Some(10)]);
    let [_, hidden, alice, _] = &ranks.json["other_processes"].as_array().unwrap()[..] else { panic!() };
    assert_eq!((&hidden["user"], &alice["user"]), (&Value::Null, &json!("alice")));
    assert_eq!((&alice["bytes"], &alice["command"]), (&json!(4000 * MIB), &json!("serve.py")));
}

#[test]
fn ranks_says_how_many_processes_without_a_trace_it_leaves_out() {
    let mut trace = TraceBuilder::default();
    for pid in 100..124 {
        let name = format!("device=0 pid={pid} bytes=4096 command=serve.py");
        let row = Row { event: EventName::Mark, api: "gpu_process", device: -1, ..Row::default() };
        trace.raw(Row { name: &name, ..row });
    }
    trace.alloc(4096, Row { op: "aten::empty", device: 0, ..Row::default() });
    // The options of these tests have `--top 20`.
    let text = answer_on_ranks(&[trace.finish()], "ranks", &[]).text();
    assert_eq!(text.matches("has no trace in this run").count(), 20, "{text}");
    assert!(text.contains("4 more without a trace in this run; --top N lists them"), "{text}");
}

#[test]
fn ranks_shows_gpus_that_differ_and_names_what_the_fullest_rank_holds() {
    const MIB: i64 = 1 << 20;
    let run = |gathered: i64| {
        let trace = |rank: i32| {
            let device = |ordinal| memtrace_trace::meta::Device {
                ordinal,
                total_bytes: 8000 * MIB,
                ..Default::default()
            };
            let devices = vec![device(0), device(1)];
            let mut trace = TraceBuilder::new(Meta {
                rank,
                world_size: 2,
                host: "host".to_owned(),
                devices,
                ..Meta::default()
            });
            let row =
                Row { device: rank, op: "aten::mm", module: "Net.layer", phase: "forward", ..Row::default() };
            let nccl = Row { event: EventName::ExtAlloc, api: "cudaMalloc", source: "libnccl.so.2", ..row };
            trace.raw(Row { delta_bytes: 50 * MIB, alloc_id: 1, addr: 1 << 40, ..nccl });
            let segment = |mib: i64| Row {
                event: EventName::SegmentAlloc,
                api: "cudaMalloc",
                delta_bytes: mib * MIB,
                ..row
            };
            trace.change(segment(1000), [0, 0, 1000 * MIB]);
            trace.alloc(900 * MIB, row);
            if rank == 0 && gathered > 0 {
                trace.change(segment(gathered), [0, 0, gathered * MIB]);
                let gather = Row { op: "aten::cat", module: "(script)", phase: "save", ..row };
                trace.alloc(gathered * MIB, gather);
            }
            trace.finish()
        };
        [trace(0), trace(1)]
    };
    let answer = answer_on_ranks(&run(300), "ranks", &[]);
    let text = answer.text();
    for wanted in [
        "rank 0 has 300.00 MiB more than rank 1",
        "300.00 MiB more of aten::cat in (script): 300.00 MiB, rank 1 has nothing",
        "the fullest GPU has 300.00 MiB more of this run than the emptiest (22.2 % of the fullest)",
    ] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
    assert!(!text.contains("do not work") && !text.contains("works elsewhere"), "{text}");
    let users: Vec<_> = answer.json["shared_devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|user| json!([user["device"], user["nccl_bytes"], user["bytes"], user["works_here"]]))
        .collect();
    assert_eq!(users, [json!([0, 50 * MIB, 1350 * MIB, true]), json!([1, 50 * MIB, 1050 * MIB, true])]);
    assert_eq!(
        answer.json["owner_difference"],
        json!({ "ranks": [0, 1], "peak_bytes": [1200 * MIB, 900 * MIB],
                "owners": [{ "what": "aten::cat in (script)", "bytes": [300 * MIB, 0] }] })
    );
    // 40 MiB are less than 5 % of 1090 MiB.
    let even = answer_on_ranks(&run(40), "ranks", &[]);
    assert_eq!((&even.json["shared_devices"], &even.json["owner_difference"]), (&json!([]), &Value::Null));
    assert!(!even.text().contains("the fullest GPU"), "{}", even.text());
}

/// Rank 1 has asked GPU 0 for its free memory: a context without memory, which only the samples show. A worker
/// process of rank 1 has memory on GPU 0.
#[test]
fn ranks_and_oom_name_contexts_and_worker_processes_on_another_ranks_gpu() {
    const MIB: i64 = 1 << 20;
    const TOTAL: i64 = 8000 * MIB;
    let trace = |(rank, pid): (i32, i32),
                 ancestors: &[u32],
                 used: &[(i32, i64)],
                 others: i64,
                 fails: bool| {
        let device =
            |ordinal| memtrace_trace::meta::Device { ordinal, total_bytes: TOTAL, ..Default::default() };
        let about = Meta {
            rank,
            world_size: 2,
            host: "host".to_owned(),
            argv: ["python", "-u", "jobs/train.py", "--lr", "1"].map(str::to_owned).to_vec(),
            devices: vec![device(0), device(1)],
            ancestors: ancestors.to_vec(),
            ..Meta::default()
        };
        let mut trace = TraceBuilder::of_process(pid, about);
        for &(device, mib) in used {
            let row = Row { device, op: "aten::copy_", ..Row::default() };
            if mib > 0 {
                let segment =
                    Row { event: EventName::SegmentAlloc, api: "cudaMalloc", delta_bytes: mib * MIB, ..row };
                trace.change(segment, [0, 0, mib * MIB]);
                trace.alloc(mib * MIB, row);
            }
            let (own, others) = ((mib + 500) * MIB, if device == 0 { others * MIB } else { 0 });
            let free = TOTAL - own - others;
            let name = format!("total={TOTAL} free={free} process={own} others={others}");
            let sample = Row { event: EventName::Sample, api: "nvml", name: &name, device, ..Row::default() };
            trace.raw(Row { device_free_bytes: free, ..sample });
            if fails {
                let mark = Row { event: EventName::Oom, rounded_bytes: 1000 * MIB, device, ..Row::default() };
                trace.change(mark, [0; 3]);
            }
        }
        trace.finish()
    };
    // Rank 0 uses 6000 MiB of GPU 0. Others hold 1200 MiB there: the context of rank 1 (500), and the context
    // and memory of its worker (500 + 200).
    let run = [
        trace((0, 1), &[7], &[(0, 6000)], 1200, true),
        trace((1, 2), &[7], &[(0, 0), (1, 300)], 7200, false),
        trace((1, 3), &[2, 7], &[(0, 200)], 7000, false),
    ];
    let answer = answer_on_ranks(&run, "ranks", &[]);
    let found: Vec<_> = answer.json["shared_devices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|user| json!([user["process"], user["works_here"], user["context_bytes"], user["bytes"]]))
        .collect();
    let context = 500 * MIB;
    assert_eq!(
        found,
        [
            json!(["rank 0 of this run (pid 1)", true, context, 6500 * MIB]),
            json!(["rank 1 of this run (pid 2)", false, context, context]),
            json!(["worker process of rank 1, train.py (pid 3)", false, context, 700 * MIB]),
        ]
    );
    assert_eq!(answer.json["unnamed_others"], json!([]));
    let oom = answer_on_ranks(&run, "oom", &[]);
    assert_eq!(oom.json["ooms"][0]["verdict"], "another process", "{}", oom.text());
    for wanted in
        ["rank 1 of this run (pid 2), 500.00 MiB", "worker process of rank 1, train.py (pid 3), 700.00 MiB"]
    {
        assert!(oom.text().contains(wanted), "{wanted}\n{}", oom.text());
    }
    assert!(oom.text().contains("torch.cuda.set_device(local_rank)"), "{}", oom.text());
}

#[test]
fn diff_compares_owners_and_its_gate_can_fail() {
    let gate = |limit: &str, traces: &[&str]| answer("diff", traces, &options(&[("fail-over", limit)]));
    assert_eq!(gate("0%", &["gpt", "gpt"]).verdict, Verdict::Fine);
    let worse = gate("2%", &["leaks", "gpt"]);
    assert_eq!(worse.verdict, Verdict::OverLimit);
    let sum = |side: &str| -> i64 {
        worse.json["changes"].as_array().unwrap().iter().filter_map(|change| change[side].as_i64()).sum()
    };
    let (before, after) = (&expected()["leaks"], &expected()["gpt"]);
    assert_eq!(sum("before_bytes"), before["peak_allocated"]["bytes"]);
    assert_eq!(sum("after_bytes"), after["peak_allocated"]["bytes"]);
}

#[test]
fn serving_adds_the_processes_of_each_host_and_says_when_they_exceed_a_card() {
    const MIB: i64 = 1 << 20;
    let process = |host: &str, rank: i32, cache: i64| {
        let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
        let meta = Meta {
            host: host.to_owned(),
            rank,
            world_size: 4,
            devices,
            run_id: "one".to_owned(),
            ..Meta::default()
        };
        let mut trace = TraceBuilder::new(meta);
        trace.segment((10 + cache) * MIB);
        trace.alloc(10 * MIB, Row { category: Category::Parameter, ..Row::default() });
        trace.alloc(cache * MIB, Row { category: Category::KvCache, ..Row::default() });
        let own = 15 + cache;
        let name = format!(
            "total={} free={} process={} others={}",
            100 * MIB,
            (100 - own).max(0) * MIB,
            own * MIB,
            0
        );
        trace.raw(Row { event: EventName::Sample, device: 0, name: &name, ..Row::default() });
        trace.finish()
    };
    let folder = tempfile::TempDir::new().unwrap();
    // The two processes of the first host fit on its card together; the two of the second host do not.
    let processes = [("alpha", 0, 20), ("alpha", 1, 25), ("be\x1bta", 2, 60), ("be\x1bta", 3, 50)];
    for (host, rank, cache) in processes {
        std::fs::write(
            folder.path().join(format!("host.r{rank}.{}.csv", rank + 1)),
            process(host, rank, cache),
        )
        .unwrap();
    }
    let serving = |path: &Path| {
        let input = Input::open(path).unwrap();
        let options = options(&[("at", "peak"), ("tokens", "1024")]);
        reports::find("serving").unwrap().run(&[input], &options).unwrap()
    };
    let answer = serving(folder.path());
    let devices = answer.json["devices"].as_array().unwrap();
    let about = |device: &Value| {
        let held = |name: &str| {
            let row = device["rows"].as_array().unwrap().iter().find(|row| row["held_by"] == name).unwrap();
            row["bytes"].as_i64().unwrap() / MIB
        };
        let sum: i64 =
            device["rows"].as_array().unwrap().iter().map(|row| row["bytes"].as_i64().unwrap()).sum();
        assert_eq!(Some(sum), device["used_bytes"].as_i64(), "{device:#}");
        (
            device["host"].as_str().unwrap().to_owned(),
            device["processes"].as_i64(),
            held("weights"),
            held("KV cache"),
        )
    };
    let found: Vec<_> = devices.iter().map(about).collect();
    let expected =
        [("alpha", 45), ("be\x1bta", 110)].map(|(host, cache)| (host.to_owned(), Some(2), 20, cache));
    assert_eq!(found, expected, "{}", answer.text());
    let text = answer.text();
    assert!(text.contains("device 0 of alpha") && text.contains("by 2 processes"), "{text}");
    // The host's name is printed on a terminal, so its control character must go.
    assert!(!text.contains('\x1b'), "{text}");
    let warning = "This is more than the device has";
    assert_eq!(text.matches(warning).count(), 1, "{text}");
    assert!(text.find("of alpha").unwrap() < text.find(warning).unwrap());
    // For one process alone, the report must omit the name of the host, and must not warn, because the
    // process fits on its card.
    let one = serving(&folder.path().join("host.r2.3.csv"));
    assert!(!one.text().contains(" of be") && !one.text().contains(warning), "{}", one.text());
    assert_eq!(one.json["devices"][0]["processes"], 1);
}

#[test]
fn ranks_that_ran_among_stand_ins_are_in_one_list() {
    let folder = tempfile::TempDir::new().unwrap();
    // Ranks from separate starts: each trace names only the ranks of its own start.
    for (rank, ran) in [(0, "0"), (10, "10"), (2, "2,4-6")] {
        let phantom = json!({ "card": "t4", "ranks": ran, "ranks_of": 512 });
        let trace = TraceBuilder::new(Meta { rank, run_id: "a".to_owned(), phantom, ..Meta::default() });
        std::fs::write(folder.path().join(format!("host.r{rank}.1.csv")), trace.finish()).unwrap();
    }
    let input = Input::open(folder.path()).unwrap();
    let answer = reports::find("summary").unwrap().run(&[input], &options(&[])).unwrap();
    let text = answer.text();
    assert!(text.contains("ranks 0,2,4-6,10 of 512 ran, each with stand-ins"), "{text}");
    assert_eq!(answer.to_json("summary")["phantom"]["ranks"], json!([{ "ran": "0,2,4-6,10", "of": 512 }]));
}

#[test]
fn diff_names_the_ranks_that_it_compares_and_signs_each_change() {
    let text = answer("diff", &["sharded", "gpt"], &options(&[])).text();
    assert!(text.contains("compared: rank 2 before, rank 0 after"), "{text}");
    let same = answer("diff", &["gpt", "gpt"], &options(&[])).text();
    assert!(!same.contains("compared:"), "{same}");
    assert!(same.contains("0 B  0.0 %") && !same.contains("+0.0 %") && !same.contains("-0.0 %"), "{same}");
}

#[test]
fn ranks_call_another_first_batch_no_part_of_the_init() {
    const MIB: i64 = 1 << 20;
    let rank = |rank: i32, batch: i64| {
        let devices = vec![Device { ordinal: 0, name: "a card".to_owned(), total_bytes: 100 * MIB }];
        let mut trace = TraceBuilder::new(Meta { rank, world_size: 2, devices, ..Meta::default() });
        trace.segment(40 * MIB);
        let row = Row { rank, module: "(script)", phase: "init", step: -1, ..Row::default() };
        trace.alloc(8 * MIB, Row { category: Category::Parameter, ..row });
        let made = Row { category: Category::Script, ..row };
        let id = trace.alloc(batch, made);
        trace.tag(id, batch, made, Row { category: Category::Input, ..row });
        trace.finish()
    };
    let text = answer_on_ranks(&[rank(0, MIB), rank(1, 2 * MIB)], "ranks", &[]).text();
    let line = "first difference: (script), dataloader: rank 0 allocates 1.00 MiB in 1 block, rank 1 allocates 2.00 MiB in 1 block";
    assert!(text.contains(line), "{text}");
}

#[test]
fn ranks_say_that_steps_without_detail_are_not_compared() {
    const MIB: i64 = 1 << 20;
    let rank = |rank: i32, is_partly_detailed: bool| {
        let mut trace = TraceBuilder::new(Meta { rank, world_size: 2, ..Meta::default() });
        trace.segment(40 * MIB);
        let row =
            Row { rank, module: WITHOUT_DETAIL, op: WITHOUT_DETAIL, phase: "forward", ..Row::default() };
        trace.alloc((rank + 1).into(), row);
        if is_partly_detailed {
            trace.alloc(MIB, Row { module: "GPT", op: "aten::mm", ..row });
        }
        trace.finish()
    };
    for (is_partly_detailed, expected) in [
        (
            false,
            "\nthe modules cannot be compared; steps without detail (MEMTRACE_DETAIL) have no modules to compare",
        ),
        (
            true,
            "\nin the detailed steps, every module allocates the same amount on all ranks; steps without detail",
        ),
    ] {
        let traces = [0, 1].map(|number| rank(number, is_partly_detailed));
        let text = answer_on_ranks(&traces, "ranks", &[]).text();
        assert!(text.contains(expected), "{text}");
    }
}

/// PyTorch's allocator counts one retry for a request that fails twice and then runs out of memory. A failed call of
/// a library is no retry.
#[test]
fn every_report_counts_the_same_retries() {
    let mut trace = TraceBuilder::new(Meta { world_size: 1, ..Meta::default() });
    let failed =
        Row { event: EventName::SegmentAlloc, status: 2, device: 0, api: "cudaMalloc", ..Row::default() };
    trace.segment(1 << 20);
    trace.alloc(512, Row::default());
    for _ in 0..2 {
        trace.raw(failed);
    }
    trace.raw(Row { event: EventName::Oom, api: "caching_allocator", requested_bytes: 1 << 40, ..failed });
    trace.raw(Row { event: EventName::HostAlloc, device: -1, api: "cudaHostAlloc", ..failed });
    let traces = [trace.finish()];
    let json = |report: &str, values: &[(&'static str, &str)]| answer_on_ranks(&traces, report, values).json;
    assert_eq!(json("ops", &[])["processes"][0]["num_alloc_retries"], 1);
    assert_eq!(json("summary", &[("stats", "true")])["processes"][0]["num_alloc_retries"], 1);
    let text = answer_on_ranks(&traces, "summary", &[]).text();
    assert!(text.contains("1 request ran out of memory, 3 calls failed"), "{text}");
}

#[test]
fn diff_compares_two_steps_of_one_run() {
    let peaks =
        answer("diff", &["leaks", "leaks"], &options(&[])).json["before"]["peak_allocated_bytes_by_step"]
            .clone();
    let found = answer("diff", &["leaks"], &options(&[("steps", "1:3")]));
    let (before, after) = (&found.json["before"]["peak_allocated"], &found.json["after"]["peak_allocated"]);
    assert_eq!((&before["bytes"], &after["bytes"]), (&peaks["1"], &peaks["3"]));
    assert_eq!((&before["step"], &after["step"]), (&json!(1), &json!(3)));
    assert!(peaks["3"].as_i64() > peaks["1"].as_i64(), "{peaks}");
    let changes = found.json["changes"].as_array().unwrap();
    let grown: i64 = changes.iter().map(|change| change["delta_bytes"].as_i64().unwrap()).sum();
    assert_eq!(grown, peaks["3"].as_i64().unwrap() - peaks["1"].as_i64().unwrap());
    assert!(found.text().contains("compared: step 1 before, step 3 after"), "{}", found.text());
    let input = [Input::open(&fixtures().join("leaks")).unwrap()];
    let why = |steps: &str| {
        let report = reports::find("diff").unwrap();
        let mut options = options(&[("steps", steps)]);
        for flag in report.flags().iter().filter(|flag| !flag.default.is_empty()) {
            options.values.entry(flag.name).or_insert_with(|| flag.default.to_owned());
        }
        reports::answer(report, &input, &options).unwrap_err().to_string()
    };
    assert!(why("1:99").contains("--step 99"), "{}", why("1:99"));
    assert!(why("1").contains("expected two steps"), "{}", why("1"));
}
