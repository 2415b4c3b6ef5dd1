//! Detail by schedule (`MEMTRACE_DETAIL`) with torch, on the simulated GPU.
//!
//! If `scripts/env torch` has not installed a version of torch, the tests on it are skipped with a message;
//! with `CI=true` they fail.

use std::collections::BTreeMap;

use crate::common::torch::{self, Case, Run, Torch, TorchRow, memtrace, on_every_torch, text};

const SCRIPT: &str = "detail/steps.py";
const WITHOUT: &str = "(without detail)";
const STEPS: i64 = 8;

on_every_torch![
    detail_by_schedule_replays_as_torch_and_is_off_between_its_steps: "the lists of torch's callbacks",
    brief_steps_have_the_peaks_and_the_totals_of_all_rows,
    brief_steps_and_a_sigkill_leave_a_trace_that_replays_as_torch,
];

/// The newest PyTorch.
mod torch_2_15_0 {
    use super::{Torch, torch::NEWEST};

    macro_rules! on_newest {
        ($($name:ident),* $(,)?) => { $(#[test] fn $name() { Torch::run(NEWEST, super::$name); })* };
    }
    on_newest![
        detail_by_schedule_replays_as_torch_and_is_off_between_its_steps,
        brief_steps_have_the_peaks_and_the_totals_of_all_rows,
        brief_steps_and_a_sigkill_leave_a_trace_that_replays_as_torch,
    ];
}

/// Returns a line for each step: `1` or `0` for whether torch has callbacks for ops, for backward functions,
/// and for user scopes.
fn callbacks(run: &Run) -> Vec<String> {
    let text = std::fs::read_to_string(run.folder().join("callbacks")).unwrap();
    text.lines().map(str::to_owned).collect()
}

fn detail_by_schedule_replays_as_torch_and_is_off_between_its_steps(torch: &Torch) {
    let run = torch.trace_with(SCRIPT, &[], &[("MEMTRACE_DETAIL", "steps:1-2,every:5")]).expect_success();
    torch.verify_file(&run.file(), &run.checkpoints);
    torch.check(memtrace().arg("check").arg(run.file()));
    let is_detailed = |step: i64| [0, 1, 2, 5].contains(&step.max(0));

    // Outside of detailed steps, the callbacks for user scopes (the third number) stay, because they detect
    // the end of a step. The callbacks for ops (the first number) belong to the simulated GPU, and always
    // exist.
    let expected: Vec<_> = (0..STEPS).map(|step| if is_detailed(step) { "1 1 1" } else { "1 0 1" }).collect();
    assert_eq!(callbacks(&run), expected);

    for row in run.rows().iter().filter(|row| !is_detailed(row.step)) {
        assert!(!["op", "range_begin", "range_end"].contains(&row.event.as_str()), "{row:?}");
        if row.event == "alloc" {
            assert_eq!((row.op.as_str(), row.module.as_str()), (WITHOUT, WITHOUT), "{row:?}");
        }
    }
    let marks: Vec<(i64, String)> =
        run.rows().into_iter().filter(|row| row.api == "detail").map(|row| (row.step, row.name)).collect();
    let on = |step| (step, "detail on: schedule".to_owned());
    let off = |step| (step, "detail off".to_owned());
    assert_eq!(marks, [on(0), on(1), on(2), off(3), on(5), off(6)]);
}

/// Returns the rows of allocations, ops, ranges and tags in each step, without times and addresses.
fn by_step(run: &Run) -> BTreeMap<i64, Vec<String>> {
    let mut steps: BTreeMap<i64, Vec<String>> = BTreeMap::new();
    for row in run.rows() {
        let TorchRow { event, api, op, module, phase, delta_bytes, requested_bytes, name, .. } = &row;
        if ["alloc", "op", "range_begin", "range_end", "tag"].contains(&event.as_str()) {
            let text = format!("{event} {api} {op} {module} {phase} {delta_bytes} {requested_bytes} {name}");
            steps.entry(row.step).or_default().push(text);
        }
    }
    steps
}

#[test]
fn detail_gives_a_step_the_rows_of_a_full_trace_and_the_program_its_own_output() {
    Torch::run("2.11.0", |torch| {
        let untraced = torch.untraced(SCRIPT, &[]);
        let full = torch.trace(SCRIPT, &[]).expect_success();
        let variables = [("MEMTRACE_DETAIL", "every:3"), ("MEMTRACE_BRIEF", "0")];
        let some = torch.trace_with(SCRIPT, &[], &variables).expect_success();
        for run in [&full, &some] {
            assert_eq!((run.stdout(), run.stderr()), (text(&untraced.stdout), text(&untraced.stderr)));
        }
        let (full, some) = (by_step(&full), by_step(&some));
        // Steps 0, 3 and 6 are detailed, so their rows are the same in both traces; -1 is before the first
        // step.
        for step in [-1, 0, 3, 6] {
            assert_eq!(full[&step], some[&step], "step {step}");
        }
        for step in [1, 2, 4, 5, 7] {
            let allocations = |rows: &[String]| rows.iter().filter(|row| row.starts_with("alloc ")).count();
            assert_eq!(allocations(&full[&step]), allocations(&some[&step]), "step {step}");
            assert!(some[&step].len() < full[&step].len() / 2, "step {step}");
        }
    });
}

#[test]
fn host_tensors_of_the_cpu_keep_sizes_and_steps_between_detailed_steps() {
    Torch::run("2.11.0", |torch| {
        let trace = |more: &[(&str, &str)]| {
            let variables = [&[("MEMTRACE_HOST_TENSORS", "1")], more].concat();
            torch.trace_with("detail/cpu_steps.py", &[], &variables).expect_success()
        };
        let (full, some) = (trace(&[]), trace(&[("MEMTRACE_DETAIL", "steps:1-2,every:5")]));
        torch.check(memtrace().arg("check").arg(some.file()));
        // The peak of each step, and the step, phase, op and module of each peak.
        let peaks = |run: &Run| {
            let found = run.json("peak", &["--each", "step"]);
            let process = found["processes"][0].clone();
            assert_eq!(process["device"], -2);
            let peaks = process["peaks"].as_array().unwrap().iter();
            peaks.map(|of_step| of_step["peak"].clone()).collect::<Vec<_>>()
        };
        let (full, some) = (peaks(&full), peaks(&some));
        assert_eq!((full.len(), some.len()), (9, 9));
        for (whole, mut short) in full.into_iter().zip(some) {
            let step = short["step"].as_i64().unwrap();
            if ![-1, 0, 1, 2, 5].contains(&step) {
                assert_eq!((&short["op"], &short["module"]), (&WITHOUT.into(), &WITHOUT.into()), "{step}");
                (short["op"], short["module"]) = (whole["op"].clone(), whole["module"].clone());
            }
            for field in ["step", "bytes", "phase", "op", "module"] {
                assert_eq!(short[field], whole[field], "step {step}: {field}");
            }
        }
    });
}

/// Runs a program with a new peak, an OOM, several parts, and a forked child that is traced, too.
#[test]
fn detail_follows_a_new_peak_and_an_oom_in_parts_and_in_a_forked_child() {
    Torch::run("2.11.0", |torch| {
        let variables = [("MEMTRACE_DETAIL", "steps:0"), ("MEMTRACE_ROTATE", "64k")];
        let run = torch.trace_with(SCRIPT, &["rough"], &variables).expect_success();
        torch.check(memtrace().arg("check").arg(run.dir()));
        // The first part of a process is `NAME.csv`, the others are `NAME.partN.csv`: join them in order.
        let mut rows: BTreeMap<String, Vec<(usize, TorchRow)>> = BTreeMap::new();
        for file in run.files() {
            let name = file.file_name().unwrap().to_str().unwrap().trim_end_matches(".csv").to_owned();
            let (process, part) = name.split_once(".part").unwrap_or((&name, "1"));
            let part = part.parse().unwrap();
            let more = torch::read(&file).into_iter().map(|row| (part, row));
            rows.entry(process.to_owned()).or_default().extend(more);
        }
        assert_eq!(rows.len(), 2, "the process and its child: {:?}", rows.keys());
        let mut checked = 0;
        for rows in rows.values_mut() {
            rows.sort_by_key(|(part, _)| *part);
            let marks = rows.iter().filter(|(_, row)| row.api == "detail");
            let marks: Vec<(i64, &str)> = marks.map(|(_, row)| (row.step, row.name.as_str())).collect();
            if marks.len() < 4 {
                // Fewer marks: the forked child, which trains only two steps. The second one is not detailed.
                assert_eq!(marks, [(0, "detail on: schedule"), (1, "detail off")]);
                checked += 1;
                continue;
            }
            let expected = [
                (0, "detail on: schedule"),
                (1, "detail off"),
                (4, "detail on: new peak"),
                (5, "detail off"),
                (5, "detail on: out of memory"),
                (6, "detail on: out of memory"),
                (7, "detail off"),
            ];
            assert_eq!(marks, expected);
            assert!(rows.last().unwrap().0 > 1, "more than one part");
            checked += 10;
        }
        assert_eq!(checked, 11);

        let peak = run.report("peak", &["--by", "module"]);
        assert!(peak.contains("step 3 was recorded without detail; the next step, 4 (new peak)"), "{peak}");
        assert!(peak.contains(WITHOUT) && peak.contains("only for steps 0, 4, 6"), "{peak}");
        let detailed = run.report("peak", &["--by", "module", "--apart", "--step", "4:4"]);
        assert!(
            detailed.contains("Sequential.1.inner") && !detailed.contains("step 4 was recorded without"),
            "{detailed}"
        );
        let oom = run.report("oom", &[]);
        let about = "the start of step 5 was recorded without detail; the next step, 6 (out of memory)";
        assert!(oom.contains(about), "{oom}");
        for report in ["summary", "leaks", "modules", "ops"] {
            assert!(run.report(report, &[]).contains("only for steps 0, 4, 6"), "{report}");
        }
        let answer = run.json("peak", &[]);
        assert_eq!(answer["detailed_steps"], serde_json::json!([[0, 0], [4, 4], [6, 6]]));
    });
}

const LOOPS: &str = "detail/loops.py";

/// Returns the highest allocated and reserved bytes of the rows of each of the first 44 steps, by the step of
/// the rows.
fn peaks(rows: &[TorchRow]) -> BTreeMap<i64, [i64; 2]> {
    let mut steps: BTreeMap<i64, [i64; 2]> = BTreeMap::new();
    for row in rows.iter().filter(|row| row.device == 0 && (0..44).contains(&row.step)) {
        // The step of a free is the step of its block.
        if ["alloc", "brief", "segment_alloc"].contains(&row.event.as_str()) {
            let peak = steps.entry(row.step).or_default();
            *peak = [peak[0].max(row.allocated_bytes), peak[1].max(row.reserved_bytes)];
        }
    }
    steps
}

fn brief_steps_have_the_peaks_and_the_totals_of_all_rows(torch: &Torch) {
    const MODES: [&str; 5] = ["plain", "print", "amp", "varying", "loader"];
    let trace = |brief| {
        let variables = [("MEMTRACE_DETAIL", "steps:0-1,every:20"), ("MEMTRACE_BRIEF", brief)];
        let run = torch.trace_with(LOOPS, &[&MODES.join(","), "45"], &variables).expect_success();
        let cases = run.cases();
        for case in &cases {
            torch.check(memtrace().arg("check").arg(&case.trace));
            torch.verify_file(&case.trace, &case.checkpoints);
        }
        (run, cases)
    };
    let ((_some, short), (_all, long)) = (trace("1"), trace("0"));
    let names = |cases: &[Case]| cases.iter().map(|case| case.name.clone()).collect::<Vec<_>>();
    assert_eq!(
        (names(&short), names(&long)),
        (MODES.map(str::to_owned).into(), MODES.map(str::to_owned).into())
    );
    for (short, long) in short.iter().zip(&long) {
        let mode = &short.name;
        let [some, all] = [short, long].map(|case| torch::read(&case.trace));
        let [short, long] = [short, long].map(|case| std::fs::read_to_string(&case.trace).unwrap());
        assert_eq!(peaks(&some), peaks(&all), "{mode}");
        assert!(short.contains(",brief,") && !long.contains(",brief,"), "{mode}");
        // The sum rule holds by phase, too: no phase has freed more than it allocated.
        let mut by_phase: BTreeMap<String, i64> = BTreeMap::new();
        let sums = ["alloc", "free", "tag", "live", "brief"];
        for row in some.iter().filter(|row| row.device == 0 && sums.contains(&row.event.as_str())) {
            let sum = by_phase.entry(row.phase.clone()).or_default();
            *sum += row.delta_bytes;
            assert!(*sum >= 0, "{mode}: {row:?}");
        }
        let brief: std::collections::BTreeSet<i64> =
            some.iter().filter(|row| row.event == "brief").map(|row| row.step).collect();
        assert!(brief.len() > 30, "{mode}: {} brief steps", brief.len());
        // Few blocks of a brief step have rows of their own.
        let rows = |rows: &[TorchRow], step| rows.iter().filter(|row| row.step == step).count();
        let mut counts: Vec<[usize; 2]> =
            brief.iter().map(|step| [rows(&some, *step), rows(&all, *step)]).collect();
        counts.sort_unstable();
        let [few, many] = counts[counts.len() / 2];
        assert!(few <= 6 && many > 200, "{mode}: {few} of {many} rows");
    }
}

fn brief_steps_and_a_sigkill_leave_a_trace_that_replays_as_torch(torch: &Torch) {
    for flush in ["1", "60000"] {
        let variables = [("MEMTRACE_DETAIL", "steps:0"), ("MEMTRACE_FLUSH_MS", flush)];
        let run = torch.trace_with(LOOPS, &["kill", "30"], &variables);
        assert_eq!(torch::exit_of(&run.output), 128 + 9, "{}", run.stderr());
        // `check` finishes the trace of the killed process, and finds no gap and no wrong total.
        torch.check(memtrace().arg("check").arg(run.file()));
        torch.verify_file(&run.file(), &run.checkpoints);
        assert!(std::fs::read_to_string(run.file()).unwrap().contains("killed"));
        // The step of the kill has the rows of its blocks.
        let last = run.rows().iter().map(|row| row.step).max().unwrap();
        let rows = run.rows().into_iter().filter(|row| row.step == last && row.event == "alloc").count();
        assert!(rows > 20, "{rows} allocations in step {last}");
    }
}

/// First a run with two threads, whose rows come in any order; then a run in several parts, each of which can
/// be read alone.
#[test]
fn brief_steps_of_two_threads_and_in_parts_replay_as_torch() {
    Torch::run("2.11.0", |torch| {
        let variables = [("MEMTRACE_DETAIL", "off")];
        let run = torch.trace_with(LOOPS, &["threads", "60"], &variables).expect_success();
        torch.check(memtrace().arg("check").arg(run.file()));
        torch.verify_file(&run.file(), &run.checkpoints);

        let variables = [("MEMTRACE_DETAIL", "off"), ("MEMTRACE_ROTATE", "64k"), ("MEMTRACE_FLUSH_MS", "1")];
        let run = torch.trace_with(LOOPS, &["plain", "120"], &variables).expect_success();
        assert!(run.files().len() > 1, "{:?}", run.files());
        torch.check(memtrace().arg("check").arg(run.dir()));
        for file in run.files() {
            torch.check(memtrace().arg("check").arg(&file));
            // The events that the writer holds during a switch of parts are not older than the new part.
            assert!(torch::read(&file).is_sorted_by_key(|row| row.ts_ns), "{file:?}");
        }
        assert!(run.report("summary", &[]).contains("120 steps"), "{}", run.report("summary", &[]));
    });
}

/// With polars and with pyarrow, the package returns `brief` rows, and the totals of all rows are the sums of
/// their deltas.
#[test]
fn brief_rows_are_rows_in_the_frames_of_the_package() {
    Torch::run("2.11.0", |torch| {
        let variables = [("MEMTRACE_DETAIL", "off")];
        let run = torch.trace_with(LOOPS, &["plain", "20"], &variables).expect_success();
        let package = torch::scripts().join("../../python");
        let code = "import sys, memtrace\nfor backend in ('polars', 'pyarrow'):\n rows = memtrace.read(sys.argv[1], backend=backend)\n rows = rows.to_pylist() if backend == 'pyarrow' else rows.to_dicts()\n rows = [row for row in rows if row['device'] == 0 and row['event'] in ('alloc', 'free', 'tag', 'live', 'brief')]\n print('brief' in {row['event'] for row in rows}, sum(row['delta_bytes'] for row in rows) == rows[-1]['allocated_bytes'])";
        let output =
            torch.command().args(["-c", code]).arg(run.dir()).env("PYTHONPATH", package).output().unwrap();
        assert_eq!(text(&output.stdout), "True True\nTrue True\n", "{}", text(&output.stderr));
    });
}
