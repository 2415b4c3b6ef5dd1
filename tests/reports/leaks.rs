//! `memtrace leaks`.

use super::*;

#[test]
fn leaks_names_three_mib_per_step_with_op_and_module() {
    for (name, expected) in expected().as_object().unwrap() {
        let found = &json_of("leaks", name, &[])["processes"][0]["leaks"];
        let wanted = expected["leaks"].as_array().unwrap();
        assert_eq!(found.as_array().unwrap().len(), wanted.len(), "{name}");
        for (found, wanted) in found.as_array().unwrap().iter().zip(wanted) {
            assert_eq!((&found["op"], &found["module"]), (&wanted["op"], &wanted["module"]));
            assert_eq!(found["bytes"], wanted["bytes"]);
            let slope = |value: &Value| value.as_f64().unwrap();
            assert!((slope(&found["bytes_per_step"]) / slope(&wanted["slope"]) - 1.0).abs() < 1e-9);
        }
    }
    let leak = &json_of("leaks", "leaks", &[])["processes"][0]["leaks"][0];
    assert_eq!((&leak["module"], &leak["op"]), (&json!("Encoder.cache"), &json!("aten::empty")));
    let slope = leak["bytes_per_step"].as_f64().unwrap();
    assert!((slope / f64::from(3 << 20) - 1.0).abs() < 0.01, "{slope}");
}

#[test]
fn leaks_split_the_growth_of_what_nvidia_smi_shows() {
    const MIB: i64 = 1 << 20;
    // Each step keeps 1 MiB. Step 6 has an input and temporaries that are `large` times as large; nothing
    // else changes.
    let run = |steps: i64, large: i64| {
        let mut trace = TraceBuilder::default();
        trace.segment(40 * MIB);
        for step in 0..steps {
            let row = |op, category| Row {
                step,
                op,
                module: "Net.fc",
                phase: "forward",
                category,
                ..Row::default()
            };
            let times = if step == 6 { large } else { 1 };
            let input = trace.alloc(times * 2 * MIB, row("aten::randn", Category::Input));
            if times > 1 {
                trace.segment(40 * MIB);
            }
            let work = trace.alloc(times * 10 * MIB, row("aten::mm", Category::Activation));
            trace.alloc(MIB, row("aten::clone", Category::Script));
            trace.free(work, times * 10 * MIB, row("aten::mm", Category::Activation));
            trace.free(input, times * 2 * MIB, row("aten::randn", Category::Input));
        }
        trace.finish()
    };
    let summary = answer_on(run(12, 5), "summary", &[]);
    let line = "GPU 0: memory in use grew from 40.00 MiB (step 1) to 80.00 MiB (step 10): larger steps 44.00 MiB, kept 9.00 MiB";
    assert_eq!(summary.json["processes"][0]["growth"], json!([line]));
    assert!(summary.text().contains(line), "{}", summary.text());
    let run = |steps, large| answer_on(run(steps, large), "leaks", &[]);
    let answer = run(12, 5);
    let growth = &answer.json["processes"][0]["growth"][0];
    let parts = &growth["growth_parts_bytes"];
    // Steps 1 and 10 are compared, because the last step has no successor. In between, 9 steps keep 1 MiB
    // each.
    assert_eq!(growth["from"]["step"], 1, "{growth}");
    assert_eq!(growth["to"]["step"], 10, "{growth}");
    assert_eq!(parts["kept"], 9 * MIB, "{growth}");
    assert_eq!(growth["cause"], "larger_steps", "{growth}");
    assert_eq!(growth["growth_bytes"], 40 * MIB, "{growth}");
    assert_eq!(parts.as_object().unwrap().values().filter_map(Value::as_i64).sum::<i64>(), 40 * MIB);
    assert_eq!(growth["forecast"]["kind"], "jumped", "{growth}");
    let text = answer.text();
    for wanted in [
        "GPU 0: 40.00 MiB more in use after step 10 than after step 1: 80.00 MiB, before 40.00 MiB",
        "Its inputs are 5.0 times as large (10.00 MiB, before 2.00 MiB).",
        "aten::mm in Net.fc: 10.00 MiB before, now 50.00 MiB",
        "The growth came in one jump, with step 6",
        "1.00 MiB per step",
    ] {
        assert!(text.contains(wanted), "{wanted}\n{text}");
    }
    // The kept memory fits into segments that exist already: the memory in use must not grow, but the report
    // must still name the cause.
    let answer = run(12, 1);
    let growth = &answer.json["processes"][0]["growth"][0];
    assert_eq!((&growth["growth_bytes"], &growth["cause"]), (&json!(0), &json!("kept")), "{growth}");
    assert_eq!(growth["forecast"]["kind"], "within_cache", "{growth}");
    assert!(
        answer.text().contains("GPU 0: kept memory grew by 9.00 MiB, with 0 B more in use"),
        "{}",
        answer.text()
    );
    // Two steps are too few to compare.
    assert_eq!(run(2, 1).json["processes"][0]["growth"], json!([]));
}

#[test]
fn leaks_count_the_steps_in_which_nothing_grows() {
    const MIB: i64 = 1 << 20;
    // The last step takes a little more memory, and is finished or not.
    let run = |more: i64| {
        let mut trace = TraceBuilder::default();
        trace.segment(1024 * MIB);
        for step in 0..6 {
            let row = Row { step, op: "aten::mm", module: "Net.fc", phase: "forward", ..Row::default() };
            let work = trace.alloc(MIB, row);
            trace.free(work, MIB, row);
        }
        trace.segment(more);
        answer_on(trace.finish(), "leaks", &[]).text()
    };
    for (more, line) in [
        (0, "GPU 0: no growth over 3 steps: 1.00 GiB in use after step 1, 1.00 GiB after step 4"),
        (MIB, "GPU 0: no growth over 4 steps: 1.00 GiB in use after step 1, 1.00 GiB in step 5"),
    ] {
        let text = run(more);
        assert!(text.contains(line), "{line}\n{text}");
        assert_eq!(text.to_lowercase().matches("growth").count(), 1, "{text}");
    }
}
