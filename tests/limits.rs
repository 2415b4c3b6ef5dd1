//! `memtrace budget` and `memtrace diff --fail-over` refuse traces on which a check would pass without
//! evidence.

use std::path::Path;

use memtrace_analysis::error::Result;
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports::{self, Answer, Verdict};
use memtrace_analysis::testing::TraceBuilder;
use memtrace_trace::meta::Meta;
use memtrace_trace::{Category, EventName, Row};
use serde_json::json;

const MIB: i64 = 1 << 20;

/// A process of one run: when it started and ended, its rank and its peak in MiB.
struct Process {
    start_ns: i64,
    end_ns: i64,
    rank: i32,
    mib: i64,
}

fn process(start_ns: i64, end_ns: i64, rank: i32, mib: i64) -> Process {
    Process { start_ns, end_ns, rank, mib }
}

impl Process {
    fn trace(&self) -> Vec<u8> {
        let meta = Meta {
            rank: self.rank,
            run_id: "a".to_owned(),
            start_unix_ns: 1_000_000 + self.start_ns,
            ..Meta::default()
        };
        let mut trace = TraceBuilder::new(meta);
        trace.segment(self.mib * MIB);
        trace.alloc(self.mib * MIB, Row::default());
        let ts_ns = self.end_ns - self.start_ns;
        trace.raw(Row { event: EventName::Mark, ts_ns, name: "last", ..Row::default() });
        trace.raw(Row { event: EventName::End, api: "memtrace", ts_ns, ..Row::default() });
        trace.unfinished()
    }
}

fn write(folder: &Path, processes: &[Process]) {
    for (index, process) in processes.iter().enumerate() {
        let name = format!("vm.r{}.{}.csv", process.rank, index + 1);
        std::fs::write(folder.join(name), process.trace()).unwrap();
    }
}

fn options(values: &[(&'static str, &str)]) -> Options {
    Options {
        values: values.iter().map(|(name, value)| (*name, (*value).to_owned())).collect(),
        ..Options::default()
    }
}

/// Returns the answer of `memtrace budget` with these limits.
fn budget(path: &Path, limits: &str) -> Result<Answer> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("limits.toml");
    std::fs::write(&file, limits).unwrap();
    let options = options(&[("limits", file.to_str().unwrap())]);
    reports::find("budget").unwrap().run(&[Input::open(path).unwrap()], &options)
}

/// Returns the answer of `memtrace diff --fail-over` on two runs.
fn diff(limit: &str, before: &[Process], after: &[Process]) -> Result<Answer> {
    let inputs = [before, after].map(|processes| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), processes);
        (Input::open(folder.path()).unwrap(), folder)
    });
    let [(before, _kept), (after, _kept_too)] = inputs;
    reports::find("diff").unwrap().run(&[before, after], &options(&[("by", "module"), ("fail-over", limit)]))
}

fn refusal(answer: Result<Answer>) -> String {
    match answer {
        Ok(answer) => panic!("not refused:\n{}", answer.text()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn budget_sums_the_processes_that_share_a_device_at_the_same_time() {
    let verdict = |processes: &[Process]| {
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), processes);
        let answer = budget(folder.path(), "[total]\nallocated = \"100m\"\n").unwrap();
        (answer.verdict, answer.json["broken"].clone(), answer.text())
    };
    let (over, broken, text) = verdict(&[process(0, 90_000, 0, 90), process(10_000, 80_000, 0, 90)]);
    assert_eq!((over, broken), (Verdict::OverLimit, json!(1)), "{text}");
    assert!(text.contains("180.00 MiB") && text.contains("upper bound, 2 processes"), "{text}");
    // The peaks of processes that run one after the other, or on devices of different ranks, are not added
    // up.
    assert_eq!(verdict(&[process(0, 90_000, 0, 90), process(90_001, 180_000, 0, 90)]).0, Verdict::Fine);
    assert_eq!(verdict(&[process(0, 90_000, 0, 90), process(0, 90_000, 1, 90)]).0, Verdict::Fine);
}

#[test]
fn diff_does_not_hide_growth_in_the_sum_of_processes_that_ran_one_after_the_other() {
    let two = [process(0, 90_000, 0, 100), process(90_001, 180_000, 0, 100)];
    let grown = diff("2%", &two, &[process(0, 90_000, 0, 190)]).unwrap();
    assert_eq!(grown.verdict, Verdict::OverLimit, "{}", grown.text());
    assert!(grown.text().contains("100.00 MiB before, 190.00 MiB after"), "{}", grown.text());
    let moved = [process(0, 90_000, 0, 60), process(10, 90_000, 0, 60)];
    assert_eq!(diff("2%", &[process(0, 90_000, 0, 100)], &moved).unwrap().verdict, Verdict::OverLimit);
}

#[test]
fn diff_refuses_a_rank_that_only_one_run_has_and_limits_that_nothing_exceeds() {
    let ranks =
        |ranks: &[i32]| -> Vec<Process> { ranks.iter().map(|rank| process(0, 9, *rank, 50)).collect() };
    let missing = refusal(diff("2%", &ranks(&[0, 1]), &ranks(&[0])));
    assert!(missing.contains("only the first run has rank 1"), "{missing}");
    let added = refusal(diff("2%", &ranks(&[0]), &ranks(&[0, 1])));
    assert!(added.contains("only the second run has rank 1"), "{added}");
    for limit in ["", "inf%", "1e400%", "NaN%"] {
        let why = refusal(diff(limit, &[process(0, 9, 0, 50)], &[process(0, 9, 0, 900)]));
        assert!(why.contains("--fail-over"), "{limit}: {why}");
    }
}

#[test]
fn budget_and_diff_count_a_request_that_failed_before_the_program_went_on() {
    let trace = |wanted: i64, api: &'static str| {
        let folder = tempfile::tempdir().unwrap();
        let mut trace = TraceBuilder::new(Meta { start_unix_ns: 1, ..Meta::default() });
        trace.segment(50 * MIB);
        trace.alloc(50 * MIB, Row::default());
        if wanted > 0 {
            let row =
                Row { requested_bytes: wanted, rounded_bytes: wanted, api, status: 2, ..Row::default() };
            trace.raw(Row { event: EventName::Oom, device: 0, allocated_bytes: 50 * MIB, ..row });
        }
        std::fs::write(folder.path().join("vm.r0.1.csv"), trace.finish()).unwrap();
        folder
    };
    let limit = "[total]\nallocated = \"100m\"\n";
    let (fits, fails) = (trace(0, ""), trace(80 * MIB, "cudaMalloc"));
    assert_eq!(budget(fits.path(), limit).unwrap().verdict, Verdict::Fine);
    let over = budget(fails.path(), limit).unwrap();
    assert_eq!(over.verdict, Verdict::OverLimit, "{}", over.text());
    assert!(over.text().contains("130.00 MiB") && over.text().contains("a request that failed (OOM)"));
    assert_eq!(budget(trace(20 * MIB, "cudaMalloc").path(), limit).unwrap().verdict, Verdict::Fine);
    // The simulated GPU granted this request past the memory of the card (`past_oom`), so it must not count
    // as failed.
    assert_eq!(budget(trace(80 * MIB, "past_oom").path(), limit).unwrap().verdict, Verdict::Fine);
    let compare = |before: &Path, after: &Path| {
        let inputs = [before, after].map(|path| Input::open(path).unwrap());
        let answer = reports::find("diff").unwrap();
        answer.run(&inputs, &options(&[("by", "module"), ("fail-over", "2%")])).unwrap().verdict
    };
    assert_eq!(compare(fits.path(), fails.path()), Verdict::OverLimit);
    assert_eq!(compare(fails.path(), fails.path()), Verdict::Fine);
    assert_eq!(compare(fails.path(), fits.path()), Verdict::Fine);
}

#[test]
fn budget_refuses_used_memory_without_samples_unless_the_limit_is_optional() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), &[process(0, 9, 0, 50)]);
    let why = refusal(budget(folder.path(), "[total]\nused = \"1g\"\n"));
    assert!(why.contains("[total] used cannot be checked: the trace has no samples of the device"), "{why}");
    let optional = "[total]\nused = { limit = \"1g\", optional = true }\n";
    assert_eq!(budget(folder.path(), optional).unwrap().verdict, Verdict::Fine);
}

#[test]
fn budget_refuses_modules_and_categories_of_steps_without_detail() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("vm.r0.1.csv");
    let write = |module: &str, category: Category| {
        let mut trace = TraceBuilder::default();
        trace.segment(900 * MIB);
        let detailed =
            Row { module: "GPT", phase: "forward", category: Category::Activation, ..Row::default() };
        trace.alloc(10 * MIB, detailed);
        trace.alloc(800 * MIB, Row { module, phase: "forward", category, ..Row::default() });
        std::fs::write(&file, trace.finish()).unwrap();
    };
    write("(without detail)", Category::None);
    let why = refusal(budget(&file, "[modules]\nGPT = \"100m\"\n"));
    assert!(why.contains("[modules] GPT cannot be checked: some steps have no modules"), "{why}");
    let why = refusal(budget(&file, "[categories]\nactivation = \"100m\"\n"));
    assert!(why.contains("some steps have no categories"), "{why}");
    // Phases and totals are known in every step, so their limits can be checked.
    let over = budget(&file, "[phases]\nforward = \"100m\"\n[total]\nallocated = \"100m\"\n").unwrap();
    assert_eq!((over.verdict, &over.json["broken"]), (Verdict::OverLimit, &json!(2)));
    write("(without detail)", Category::Activation);
    let over = budget(&file, "[categories]\nactivation = \"100m\"\n").unwrap();
    assert_eq!(over.verdict, Verdict::OverLimit);
    write("GPT", Category::Activation);
    assert_eq!(budget(&file, "[modules]\nGPT = \"100m\"\n").unwrap().verdict, Verdict::OverLimit);
    // The row of a brief step is about many blocks and names neither modules nor categories.
    let mut trace = TraceBuilder::default();
    let detailed = Row { module: "GPT", phase: "forward", category: Category::Activation, ..Row::default() };
    trace.alloc(10 * MIB, Row { step: 0, ..detailed });
    let brief = Row { device: 0, event: EventName::Brief, step: 1, phase: "backward", ..Row::default() };
    let brief = Row { delta_bytes: 800 * MIB, ..brief };
    trace.change(brief, [800 * MIB, 800 * MIB, 0]);
    std::fs::write(&file, trace.finish()).unwrap();
    let why = refusal(budget(&file, "[modules]\nGPT = \"100m\"\n"));
    assert!(why.contains("[modules] GPT cannot be checked: some steps have no modules"), "{why}");
    let why = refusal(budget(&file, "[categories]\nactivation = \"100m\"\n"));
    assert!(why.contains("some steps have no categories"), "{why}");
    // The row has the phase of the step's peak. Another phase may be above 100 MiB, but not above the peak.
    let why = refusal(budget(&file, "[phases]\nforward = \"100m\"\n"));
    assert!(why.contains("[phases] forward cannot be checked: some steps have only"), "{why}");
    let within = budget(&file, "[phases]\nforward = \"1g\"\nbackward = \"1g\"\n").unwrap();
    assert_eq!(within.verdict, Verdict::Fine);
    let over = budget(&file, "[phases]\nbackward = \"100m\"\n").unwrap();
    assert_eq!(over.verdict, Verdict::OverLimit);
}

#[test]
fn budget_refuses_limits_that_removed_parts_could_have_exceeded() {
    let folder = tempfile::tempdir().unwrap();
    for (part, opening_rows) in [(1_u32, 0), (5, 6)] {
        let meta = Meta { part, opening_rows, keep: "1m".to_owned(), ..Meta::default() };
        let mut trace = TraceBuilder::new(meta);
        trace.alloc(MIB, Row { module: "GPT", ..Row::default() });
        for _ in 0..opening_rows {
            trace.raw(Row { event: EventName::Mark, name: "a", ..Row::default() });
        }
        std::fs::write(folder.path().join(format!("vm.r0.1.part{part}.csv")), trace.finish()).unwrap();
    }
    // MEMTRACE_KEEP never removes the part with the highest allocated memory, so a limit on the total can be
    // checked.
    let total = budget(folder.path(), "[total]\nallocated = \"100m\"\n");
    assert_eq!(total.unwrap().verdict, Verdict::Fine);
    let why = refusal(budget(folder.path(), "[modules]\nGPT = \"100m\"\n"));
    assert!(why.contains("[modules] GPT cannot be checked: parts of the trace were removed"), "{why}");
}
