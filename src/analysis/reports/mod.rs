//! The reports, a folder each. Its `mod.rs` is the report, beside it are its other answers and its parts.
//!
//! Several reports share the folders `device_users` (the processes with memory on a GPU), `growth` (memory from step to
//! step) and `killed` (why a process ended), and the files here.
//!
//! To add a report, add a folder here and a line in [`REPORTS`]. The command line, its help and the tests read
//! that table.

mod advise;
mod budget;
mod check;
mod device_peaks;
mod device_users;
mod diff;
pub(crate) mod frag;
mod group_table;
pub(crate) mod growth;
mod host_owners;
mod killed;
mod late_buckets;
pub(crate) mod leaks;
mod ledger;
mod mem_tracker;
mod modules;
mod oom;
mod ops;
mod peak;
mod ranks;
mod report;
mod serving;
mod summary;
mod timeline;

use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::selection::{select, with_default_device};
pub use growth::{GrowthCurve, growth_lines};
pub(crate) use killed::{RunVictims, killed_sentences};
pub use oom::oom_for_page;
pub use report::{Answer, Needs, Report, SearchRequest, Verdict, View};

/// Every report, in the order of the help.
pub const REPORTS: &[&dyn Report] = &[
    &summary::Summary,
    &peak::Peak,
    &oom::Oom,
    &advise::Advise,
    &ledger::Ledger,
    &serving::Serving,
    &modules::Modules,
    &ops::OpsReport,
    &frag::Frag,
    &leaks::Leaks,
    &diff::Diff,
    &budget::Budget,
    &ranks::Ranks,
    &timeline::Timeline,
    &check::Check,
];

/// Returns every report of [`REPORTS`], each followed by its views.
pub fn with_views() -> impl Iterator<Item = &'static dyn Report> {
    REPORTS
        .iter()
        .flat_map(|report| std::iter::once(*report).chain(report.views().iter().map(|view| view.report)))
}

/// Returns the report or the view called `name`.
#[must_use]
pub fn find(name: &str) -> Option<&'static dyn Report> {
    with_views().find(|report| report.name() == name)
}

/// Returns all options of a command: the options of its default report, and the options of its views. If
/// several of them have an option of the same name, the first one is returned.
#[must_use]
pub fn all_flags(report: &dyn Report) -> Vec<Flag> {
    let of_views = report.views().iter().flat_map(|view| view.asked_by.iter().chain(view.report.flags()));
    let mut flags: Vec<Flag> = Vec::new();
    for flag in report.flags().iter().chain(of_views) {
        if flags.iter().all(|known| known.name != flag.name) {
            flags.push(*flag);
        }
    }
    flags
}

/// Returns the view of `report` that `options` ask for, or else `report` itself.
#[must_use]
pub fn asked(report: &'static dyn Report, options: &Options) -> &'static dyn Report {
    report.views().iter().find(|view| view.is_asked(options)).map_or(report, |view| view.report)
}

/// Runs `report`, or the view of it that `options` ask for, on the part of `inputs` that `options` select.
///
/// # Errors
/// As for [`Report::run`], and if a selector matches nothing.
pub fn answer(report: &'static dyn Report, inputs: &[Input], options: &Options) -> Result<Answer> {
    let report = asked(report, options);
    let options = &match inputs {
        [input] if report.takes_host() => with_default_device(input, options)?,
        _ => options.clone(),
    };
    let selected: Result<Vec<Input>> =
        inputs.iter().map(|input| select(input, options, report.takes_host())).collect();
    report.run(&selected?, options)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use memtrace_trace::meta::Meta;
    use memtrace_trace::{EventName, Row};

    use super::*;
    use crate::testing::TraceBuilder;

    /// Calls `check` with the answer of each report on a run of two ranks, and with the number of runs that the report
    /// reads. `file` writes the trace of a rank to a path.
    fn for_each_report(
        lenient: bool,
        file: impl Fn(Vec<u8>, PathBuf),
        check: impl Fn(&dyn Report, &Answer, u64),
    ) {
        let folder = std::env::temp_dir().join(format!("memtrace-reports-{}-{lenient}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for rank in 0..2 {
            let mut trace = TraceBuilder::new(Meta { rank, world_size: 2, ..Meta::default() });
            trace.raw(Row { event: EventName::Lost, requested_bytes: 30, ..Row::default() });
            trace.segment(8 << 20);
            let owner = Row { step: 0, phase: "forward", ..Row::default() };
            let block = trace.alloc(2 << 20, owner);
            // Some reports stop reading after the peak.
            trace.free(block, 2 << 20, owner);
            trace.alloc(1 << 20, owner);
            file(trace.finish(), folder.join(format!("a.r{rank}.csv")));
        }
        let run = Input::open(&folder).unwrap();
        type Asked = Vec<(&'static str, String)>;
        let moment = |at: &str| ("at", at.to_owned());
        let mut cases: Vec<(&dyn Report, Asked)> = Vec::new();
        for report in with_views() {
            match report.name() {
                // These limits cannot be checked, because events were lost.
                "budget" => {}
                "advise --batch x2" => cases.push((report, vec![("without", "op=aten::mm".to_owned())])),
                "frag" | "serving" | "peak --at end" => {
                    cases.extend([(report, Vec::new()), (report, vec![moment("oom")])]);
                }
                "diff" => {
                    let steps = ("steps", "0:0".to_owned());
                    cases.extend([(report, Vec::new()), (report, vec![steps])]);
                }
                "ledger" => {
                    let host = ("host", String::new());
                    cases.extend([(report, Vec::new()), (report, vec![moment("oom")]), (report, vec![host])]);
                }
                _ => cases.push((report, Vec::new())),
            }
        }
        for (report, asked) in cases {
            let mut options = Options { lenient, ..Options::default() };
            for flag in report.flags().iter().filter(|flag| flag.value.is_some() && !flag.default.is_empty())
            {
                options.values.insert(flag.name, flag.default.to_owned());
            }
            let is_alone = asked.iter().any(|(name, _)| *name == "steps");
            options.values.extend(asked);
            let inputs = vec![run.clone(); if is_alone { 1 } else { report.inputs().len() }];
            let answer = report.run(&inputs, &options).unwrap();
            if !answer.is_list {
                check(report, &answer, inputs.len() as u64);
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn every_report_counts_the_lost_events_of_every_process() {
        let file = |trace, path| std::fs::write(path, trace).unwrap();
        for_each_report(false, file, |report, answer, runs| {
            assert_eq!(answer.footer.lost, 2 * 30 * runs, "{}: {}", report.name(), answer.text());
        });
    }

    #[test]
    fn every_report_says_that_the_rest_of_a_file_cannot_be_read() {
        let file = |trace: Vec<u8>, path: PathBuf| {
            let end = trace.iter().rposition(|byte| *byte == b',').unwrap();
            let mut packed = zstd::encode_all(&trace[..end], 1).unwrap();
            packed.extend_from_slice(b"damaged");
            std::fs::write(path.with_extension("csv.zst"), packed).unwrap();
        };
        for_each_report(true, file, |report, answer, runs| {
            let text = answer.text();
            let said = text.matches("a.r0.csv.zst: ").count() as u64;
            assert!(
                said >= runs && text.contains("damaged: ") || report.name() == "check",
                "{}: {text}",
                report.name()
            );
        });
    }
}
