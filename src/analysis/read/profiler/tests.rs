//! Tests with small Chrome traces.

use serde_json::{Value, json};

use super::rows_of;

const GIB: i64 = 1 << 30;

fn memory(ts: f64, addr: i64, bytes: i64, totals: [i64; 2]) -> Value {
    json!({
        "ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1, "ts": ts,
        "args": {
            "Addr": addr, "Bytes": bytes, "Device Type": 1, "Device Id": 0,
            "Total Allocated": totals[0], "Total Reserved": totals[1],
        },
    })
}

fn range(cat: &str, name: &str, ts: f64, dur: f64) -> Value {
    json!({"ph": "X", "cat": cat, "name": name, "tid": 1, "ts": ts, "dur": dur, "args": {"any": [1]}})
}

fn file(events: &[Value]) -> String {
    json!({"schemaVersion": 1, "deviceProperties": [], "baseTimeNanoseconds": 7, "traceEvents": events})
        .to_string()
}

/// Returns these columns of each row between the first and the last one.
fn columns(text: &str, wanted: &[&str]) -> Vec<String> {
    let csv = rows_of(text.as_bytes()).unwrap();
    let mut reader = ::csv::Reader::from_reader(csv.as_slice());
    let header = reader.headers().unwrap().clone();
    let at = |name: &&str| header.iter().position(|column| column == *name).unwrap();
    let at: Vec<usize> = wanted.iter().map(at).collect();
    let rows: Vec<String> = reader
        .records()
        .map(|row| at.iter().map(|at| row.as_ref().unwrap()[*at].to_owned()).collect::<Vec<_>>().join(" "))
        .collect();
    rows[1..rows.len() - 1].to_vec()
}

#[test]
fn a_profile_opens_with_the_memory_that_was_there_and_follows_the_totals() {
    let events = [
        memory(3.0, 100, -512, [GIB - 512, 2 * GIB]),
        memory(2.0, 200, 1024, [GIB, 2 * GIB]),
        memory(4.0, 300, 2048, [GIB + 1536, 3 * GIB]),
        memory(5.0, 200, -1024, [GIB + 512, GIB + (GIB >> 1)]),
    ];
    let got = columns(&file(&events), &["event", "delta_bytes", "allocated_bytes", "reserved_bytes"]);
    let rest = GIB - 1024 - 512;
    let expected = [
        format!("segment_alloc {} 0 {}", 2 * GIB, 2 * GIB),
        format!("live 512 512 {}", 2 * GIB),
        format!("live {rest} {} {}", GIB - 1024, 2 * GIB),
        format!("alloc 1024 {GIB} {}", 2 * GIB),
        format!("free -512 {} {}", GIB - 512, 2 * GIB),
        format!("segment_alloc {GIB} {} {}", GIB - 512, 3 * GIB),
        format!("alloc 2048 {} {}", GIB + 1536, 3 * GIB),
        format!("segment_free {} {} {}", -GIB, GIB + 1536, 2 * GIB),
        format!("segment_free {} {} 0", -2 * GIB, GIB + 1536),
        format!("segment_alloc {0} {1} {0}", GIB + (GIB >> 1), GIB + 1536),
        format!("free -1024 {} {}", GIB + 512, GIB + (GIB >> 1)),
    ];
    assert_eq!(got, expected);
}

#[test]
fn the_open_ranges_of_the_thread_name_the_owner_and_the_step() {
    let events = [
        range("python_function", "nn.Module: Net_0", 10.0, 20.0),
        range("python_function", "nn.Module: Linear_0", 11.0, 9.0),
        range("cpu_op", "aten::linear", 12.0, 7.0),
        range("cpu_op", "aten::addmm", 13.0, 1.0),
        memory(13.5, 1, 512, [512, GIB]),
        memory(15.0, 2, 512, [1024, GIB]),
        memory(25.0, 3, 512, [1536, GIB]),
        range("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 40.0, 5.0),
        range("cpu_op", "aten::mm", 41.0, 1.0),
        memory(41.0, 4, 512, [2048, GIB]),
        range("user_annotation", "Optimizer.step#SGD.step", 50.0, 5.0),
        memory(52.0, 5, 512, [2560, GIB]),
        memory(60.0, 6, 512, [3072, GIB]),
    ];
    let rows = columns(&file(&events), &["event", "phase", "module", "op", "step"]);
    let got: Vec<&str> = rows.iter().filter_map(|row| row.strip_prefix("alloc ")).collect();
    let expected = [
        "forward Net_0.Linear_0 aten::addmm 0",
        "forward Net_0.Linear_0 aten::linear 0",
        "forward Net_0 (none) 0",
        "backward (none) aten::mm 0",
        "optimizer (none) (none) 0",
        "(none) (none) (none) 1",
    ];
    assert_eq!(got, expected);
}

#[test]
fn the_steps_of_the_profiler_keep_their_numbers() {
    let events = [
        memory(1.0, 1, 512, [512, GIB]),
        range("user_annotation", "ProfilerStep#10", 2.0, 3.0),
        memory(3.0, 2, 512, [1024, GIB]),
        range("user_annotation", "ProfilerStep#11", 5.0, 3.0),
        memory(6.0, 3, 512, [1536, GIB]),
    ];
    let rows = columns(&file(&events), &["event", "step"]);
    let steps: Vec<&str> = rows.iter().filter_map(|row| row.strip_prefix("alloc ")).collect();
    assert_eq!(steps, ["-1", "10", "11"]);
}

#[test]
fn times_since_1970_and_null_names_are_read() {
    let now_us = 1_700_000_000_000_000.0;
    let events = [
        json!({"ph": "M", "name": null, "cat": null}),
        memory(now_us + 0.5, 1, 512, [512, GIB]),
        memory(now_us + 2.0, 2, 512, [1024, GIB]),
    ];
    let rows = columns(&file(&events), &["event", "ts_ns"]);
    assert_eq!(rows, ["segment_alloc 0", "alloc 0", "alloc 1500"]);
}

#[test]
fn memory_events_that_contradict_each_other_are_counted_as_lost() {
    let event = memory(1.0, 1, 512, [512, GIB]);
    let missed = [event.clone(), memory(2.0, 1, 512, [1024, GIB])];
    let wrong = [event.clone(), memory(2.0, 2, i64::MAX, [1024, GIB])];
    let never = [event.clone(), memory(1e300, 2, 512, [1024, GIB])];
    for events in [missed, wrong, never] {
        let rows = columns(&file(&events), &["event", "name"]);
        assert_eq!(rows.last().unwrap(), "lost the memory events contradict their totals");
    }
    assert!(!columns(&file(&[event]), &["event"]).contains(&"lost".to_owned()));
}

#[test]
fn a_json_that_is_no_profile_of_memory_is_refused() {
    let whole = file(&[memory(1.0, 1, 512, [512, GIB])]);
    assert!(rows_of(whole.as_bytes()).is_ok());
    let deep = format!("{{\"traceEvents\": {}", "[".repeat(100_000));
    let host = whole.replace("\"Device Type\":1", "\"Device Type\":0");
    for text in ["{", "{}", "{\"traceEvents\": 1}", &deep, &host, &whole[..whole.len() - 1], &file(&[])] {
        let error = rows_of(text.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("not a Chrome trace of torch.profiler"), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
    }
    let wrong = file(&[memory(1e300, 1, 512, [512, GIB])]);
    assert!(rows_of(wrong.as_bytes()).unwrap_err().to_string().contains("invalid value"));
}
