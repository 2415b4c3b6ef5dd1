use memtrace_trace::units::Unit;
use memtrace_trace::{Category, EventName, Row};
use serde_json::{Value, json};

use super::super::report::Report;
use super::Modules;
use crate::options::Options;
use crate::read::input::Input;
use crate::testing::TraceBuilder;

const KIB: i64 = 1024;

fn range(trace: &mut TraceBuilder, event: EventName, row: Row<'_>) {
    trace.raw(Row { event, api: "nvtx", ..row });
}

fn answer(trace: TraceBuilder, flags: &[&'static str]) -> (Value, String) {
    let folder = std::env::temp_dir().join(format!("memtrace-modules-{:?}", std::thread::current().id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("a.csv"), trace.finish()).unwrap();
    let mut options = Options { units: Unit::KiB, ..Options::default() };
    options.values.insert("depth", "2".to_owned());
    options.values.extend(flags.iter().map(|flag| (*flag, String::new())));
    let answer = Modules.run(&[Input::open(&folder).unwrap()], &options).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
    (answer.json["processes"][0]["modules"].clone(), answer.text())
}

/// Builds a trace with two calls of a layer and one recomputation of it inside backward.
fn training() -> TraceBuilder {
    use EventName::{Op, RangeBegin, RangeEnd};
    let mut trace = TraceBuilder::default();
    let root =
        Row { module: "Net", phase: "forward", category: Category::Activation, step: 0, ..Row::default() };
    let layer = Row { module: "Net.fc", ..root };
    let parameter = Row { category: Category::Parameter, ..Row::default() };
    trace.alloc(8 * KIB, parameter);
    range(&mut trace, RangeBegin, Row { module: "(none)", name: "Net", ..root });
    for _ in 0..2 {
        range(&mut trace, RangeBegin, Row { name: "fc", ..root });
        trace.alloc(2 * KIB, layer);
        // This block is allocated and freed inside an op.
        let scratch = trace.alloc(5 * KIB, layer);
        trace.free(scratch, 5 * KIB, layer);
        trace.change(Row { event: Op, device: 0, ..layer }, [0; 3]);
        range(&mut trace, RangeEnd, Row { name: "fc", ..root });
    }
    range(&mut trace, RangeEnd, Row { module: "(none)", name: "Net", ..root });
    let backward = Row { phase: "backward", category: Category::Temporary, ..layer };
    // The ranges above come from the program. This range comes from a module that memtrace hooks.
    let hooked = Row { module: "Net", name: "Net.fc", api: "module", phase: "backward", ..root };
    trace.raw(Row { event: RangeBegin, ..hooked });
    trace.alloc(KIB, Row { category: Category::Activation, ..backward });
    trace.raw(Row { event: RangeEnd, ..hooked });
    trace.alloc(4 * KIB, backward);
    trace.change(Row { event: Op, device: 0, ..backward }, [0; 3]);
    range(&mut trace, EventName::Mark, Row { step: 0, phase: "optimizer", ..Row::default() });
    trace
}

fn totals(modules: &Value, at: usize, state: &str) -> Vec<i64> {
    let calls = modules[at]["states"][state].as_array().unwrap();
    calls.iter().map(|call| call["cuda:0"]["Total"].as_i64().unwrap() / KIB).collect()
}

#[test]
fn modules_have_an_entry_for_each_state_of_each_call() {
    let (modules, _) = answer(training(), &[]);
    assert_eq!((&modules[0]["module"], &modules[1]["module"]), (&json!("Net"), &json!("Net.fc")));
    assert_eq!(totals(&modules, 1, "Pre-Forward"), [8, 10]);
    assert_eq!(totals(&modules, 1, "Post-Forward"), [10, 12]);
    assert_eq!(totals(&modules, 1, "Peak-Forward"), [15, 17]);
    assert_eq!(totals(&modules, 1, "Pre-Forward-AC"), [12]);
    assert_eq!(totals(&modules, 1, "Post-Forward-AC"), [13]);
    // Pre-Backward excludes the row that begins the backward, so it equals the total after the forward.
    assert_eq!(totals(&modules, 1, "Pre-Backward"), [13]);
    assert_eq!(totals(&modules, 1, "Peak-Backward"), [17]);
    assert_eq!(totals(&modules, 1, "Post-Backward"), [17]);
    assert_eq!(totals(&modules, 0, "Pre-Forward"), [8]);
    assert_eq!(totals(&modules, 0, "Peak-Forward"), [17]);
    assert_eq!(modules[1]["retained_bytes"], 2 * KIB);
    let peak = &modules[1]["states"]["Peak-Forward"][1]["cuda:0"];
    assert_eq!((&peak["Parameter"], &peak["Activation"]), (&json!(8 * KIB), &json!(9 * KIB)));
}

#[test]
fn modules_stay_in_backward_while_a_gradient_is_accumulated() {
    let mut trace = TraceBuilder::default();
    trace.alloc(8 * KIB, Row::default());
    let forward = Row { module: "Net.fc", phase: "forward", step: 0, ..Row::default() };
    // Two forwards, then a backward in two parts: each part counts as the backward of one forward.
    for _ in 0..2 {
        forward_of_net(&mut trace, forward);
    }
    let backward = Row { phase: "backward", ..forward };
    let outside = Row { module: "(script)", ..backward };
    let op = |row| Row { event: EventName::Op, device: 0, ..row };
    trace.alloc(KIB, backward);
    trace.change(op(outside), [0; 3]);
    trace.change(op(backward), [0; 3]);
    // An allocation by the script ends the backward of `Net.fc`.
    trace.alloc(2 * KIB, outside);
    trace.change(op(outside), [0; 3]);
    trace.alloc(4 * KIB, backward);
    let (modules, _) = answer(trace, &[]);
    assert_eq!(totals(&modules, 1, "Pre-Backward"), [8, 11]);
    assert_eq!(totals(&modules, 1, "Post-Backward"), [9, 15]);
}

/// A forward of `Net` with its layer `Net.fc`, as memtrace hooks it.
fn forward_of_net(trace: &mut TraceBuilder, row: Row<'_>) {
    for (event, names) in
        [(EventName::RangeBegin, ["Net", "Net.fc"]), (EventName::RangeEnd, ["Net.fc", "Net"])]
    {
        for name in names {
            trace.raw(Row { event, name, api: "module", ..row });
        }
    }
}

#[test]
fn modules_have_one_backward_for_each_forward_whatever_comes_between_its_rows() {
    let mut trace = TraceBuilder::default();
    trace.alloc(8 * KIB, Row::default());
    let forward = Row { module: "Net.fc", phase: "forward", step: 0, ..Row::default() };
    let backward = Row { phase: "backward", ..forward };
    for step in 0..2 {
        let (forward, backward) = (Row { step, ..forward }, Row { step, ..backward });
        forward_of_net(&mut trace, forward);
        trace.alloc(KIB, backward);
        // None of these rows ends the backward: a sample of the device, pinned memory that a loader's thread
        // allocates, and the copy of the batch on the device.
        trace.raw(Row { event: EventName::Sample, device: 0, name: "total=9 free=9", ..Row::default() });
        let loader = Row { tid: 9, phase: "dataloader", step, ..Row::default() };
        trace.change(
            Row { event: EventName::HostAlloc, device: -1, delta_bytes: 512, ..loader },
            [512, 512, 512],
        );
        trace.alloc(KIB, loader);
        trace.alloc(KIB, backward);
        // The script allocates in the middle of the backward: the rest of the backward belongs to the same
        // call.
        trace.alloc(2 * KIB, Row { module: "(script)", ..backward });
        trace.alloc(4 * KIB, backward);
        trace.raw(Row { event: EventName::Op, phase: "optimizer", step, device: 0, ..Row::default() });
    }
    let (modules, _) = answer(trace, &[]);
    for module in [0, 1] {
        assert_eq!(totals(&modules, module, "Pre-Forward").len(), 2);
        assert_eq!(totals(&modules, module, "Pre-Backward"), [8, 17], "{module}");
        assert_eq!(totals(&modules, module, "Post-Backward"), [17, 26], "{module}");
        assert_eq!(totals(&modules, module, "Peak-Backward"), [17, 26], "{module}");
    }
}

#[test]
fn modules_count_a_block_by_its_eventual_category_from_its_birth_on() {
    let mut trace = TraceBuilder::default();
    let weight = trace.alloc(8 * KIB, Row { step: -1, ..Row::default() });
    let forward = Row { module: "Net.fc", phase: "forward", step: 0, ..Row::default() };
    forward_of_net(&mut trace, forward);
    // The weight is tagged only after the first forward, as when memtrace finds the model late: the forward's
    // states nevertheless count the weight as a parameter.
    let parameter = Row { module: "Net.fc", category: Category::Parameter, ..Row::default() };
    trace.tag(weight, 8 * KIB, Row::default(), parameter);
    let (modules, _) = answer(trace, &[]);
    for state in ["Pre-Forward", "Post-Forward", "Peak-Forward"] {
        let first = &modules[1]["states"][state][0]["cuda:0"];
        assert_eq!((&first["Parameter"], &first["Other"]), (&json!(8 * KIB), &json!(0)), "{state}");
    }
}

#[test]
fn modules_at_op_boundaries_note_that_outermost_ops_are_not_all_ops() {
    let (_, text) = answer(training(), &["op-boundary"]);
    assert!(text.contains("may differ from MemTracker's: MEMTRACE_OPS=all"), "{text}");
    assert!(!answer(training(), &[]).1.contains("MEMTRACE_OPS=all"));
}

#[test]
fn modules_at_op_boundaries_miss_memory_freed_inside_an_op() {
    let (modules, _) = answer(training(), &["op-boundary"]);
    assert_eq!(totals(&modules, 1, "Peak-Forward"), [10, 12]);
    assert_eq!(totals(&modules, 1, "Peak-Backward"), [17]);
}

#[test]
fn modules_are_printed_in_the_layouts_of_mem_tracker() {
    let (_, full) = answer(training(), &["full"]);
    let plain =
        "Module:  Net.fc\nPeak-Forward\n# 1:\nDevice: cuda:0\n\tParameter: 8.0 KiB\n\tBuffer: 0.0 KiB\n";
    assert!(full.contains(plain), "{full}");
    let (_, table) = answer(training(), &["table"]);
    assert!(table.contains("State & Call         Device    Parameter    Buffer"), "{table}");
    assert!(
        table.contains("\nPeak-Forward # 2     cuda:0    8.0 KiB      0.0 KiB   0.0 KiB     9.0 KiB"),
        "{table}"
    );
}
