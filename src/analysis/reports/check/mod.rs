//! `memtrace check`: checks that a trace is consistent: its schema, `seq`, and the totals of every row
//! against the replay of the deltas.

mod files;

use serde_json::{Value, json};

use super::report::{Answer, Needs, Report, Verdict, View, next};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::stream::{ReadSummary, TraceFile};
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{count, counted};
use crate::render::printer::{Cell, Printer, Style};
use crate::state::replay_trace::{Replayed, replay_checked};
use files::{CheckFiles, FILES};

/// `memtrace check`.
pub(super) struct Check;

impl Report for Check {
    fn name(&self) -> &'static str {
        "check"
    }

    fn about(&self) -> &'static str {
        "Check schema, sequence and totals of every row against a replay; exit 1 if they differ"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("check out", "whether the trace is consistent"),
            ("check --repair out", "after completing the trace of a killed process"),
            ("check --files out", "the files, for a program that reads the rows itself"),
        ]
    }

    fn flags(&self) -> &'static [Flag] {
        // The command repairs the trace before this report runs, because repair needs the encoder.
        const { &[Flag::switch("repair", "First complete the trace of a killed process from its journal")] }
    }

    fn views(&self) -> &'static [View] {
        const { &[View { asked_by: &[FILES], report: &CheckFiles }] }
    }

    fn needs(&self, options: &Options) -> Result<Needs> {
        Ok(Needs { as_it_is: !options.is_set("repair"), ..Needs::default() })
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut verdict = Verdict::Fine;
        let mut files: Vec<Value> = Vec::new();
        // The check counts an invalid line like any other problem, so the line must not stop the reading.
        let options = &Options { lenient: true, ..options.clone() };
        for (index, trace) in input.traces.iter().enumerate() {
            let replayed = match replay_checked(trace, options) {
                Ok(replayed) => replayed,
                Err(error) => {
                    verdict = Verdict::Problem;
                    files.push(unreadable(&mut printer, trace, &error));
                    continue;
                }
            };
            footer.add(trace, &replayed, options);
            if index == 0 {
                heading(&mut printer, input, &trace.meta);
                printer.gap();
            }
            let problems = problems(trace, &replayed);
            let bad: u64 = problems.iter().fold(0, |sum, problem| sum.saturating_add(problem.count));
            let name = trace.path.display().to_string();
            let rows = counted(replayed.replay.counts.rows, "row");
            if bad == 0 {
                printer.line([Cell::new("ok   ", Style::Strong), format!("{name}: {rows}").into()]);
            } else {
                verdict = Verdict::Problem;
                printer.line([Cell::new("bad  ", Style::Alarm), format!("{name}: {rows}").into()]);
                for problem in problems.iter().filter(|problem| problem.count > 0) {
                    printer.plain(format!("     {}: {}", problem.label, count(problem.count)));
                }
                for example in examples(&replayed) {
                    printer.line([Cell::new(format!("       {example}"), Style::Faint)]);
                }
            }
            let found: serde_json::Map<String, Value> =
                problems.iter().map(|problem| (problem.key.to_owned(), problem.count.into())).collect();
            files.push(json!({
                "file": name,
                "rows": replayed.replay.counts.rows,
                "ok": bad == 0,
                "found": found,
                "examples": examples(&replayed).collect::<Vec<_>>(),
            }));
        }
        // The body of the answer already lists the damage, so do not print it in the footer again.
        footer.damage.clear();
        let json = json!({ "ok": verdict == Verdict::Fine, "files": files });
        let next = vec![next("summary", input, "")];
        Ok(Answer { next, verdict, ..Answer::new(printer, json, footer) })
    }
}

/// Returns examples of the problems found: read errors, then invalid lines, then parts with wrong opening rows,
/// then contradictions between rows.
fn examples(replayed: &Replayed) -> impl Iterator<Item = &String> {
    let ReadSummary { read_errors, skipped_lines, wrong_openings, .. } = &replayed.summary;
    read_errors.iter().chain(skipped_lines).chain(wrong_openings).chain(&replayed.replay.problems.examples)
}

/// Prints a file that cannot be read to its end, and returns its entry for `--json`.
fn unreadable(printer: &mut Printer, trace: &TraceFile, error: &Error) -> Value {
    let name = trace.path.display().to_string();
    printer.line([Cell::new("bad  ", Style::Alarm), format!("{name}: cannot be read to its end").into()]);
    printer.line([Cell::new(format!("       {error}"), Style::Faint)]);
    json!({ "file": name, "rows": 0, "ok": false, "found": {}, "examples": [error.to_string()] })
}

/// One kind of problem, and how often it occurs.
struct Problem {
    /// The name for `--json`.
    key: &'static str,
    /// The name for the text.
    label: &'static str,
    count: u64,
}

fn problems(trace: &TraceFile, replayed: &Replayed) -> [Problem; 13] {
    let (found, summary) = (&replayed.replay.problems, &replayed.summary);
    let missing = summary.removed.iter().map(|(first, last)| u64::from(last - first) + 1).sum();
    // With MEMTRACE_KEEP, the recorder removes parts itself and a note lists them, so they are not counted as
    // missing.
    let missing = if trace.meta.keep.is_empty() { missing } else { 0 };
    let problem = |key, label, count| Problem { key, label, count };
    [
        problem("missing_parts", "parts missing", missing),
        problem(
            "parts_with_other_opening_rows",
            "parts with missing or too many opening rows",
            summary.wrong_openings.len() as u64,
        ),
        problem("gaps_in_seq", "gaps in seq", found.seq_gaps),
        problem("missing_rows", "rows missing in the gaps of seq", found.missing_rows),
        problem("totals_that_the_deltas_do_not_give", "totals that differ from the replay", found.totals),
        problem("frees_of_what_was_not_live", "frees of blocks that are not live", found.unmatched_frees),
        problem(
            "allocations_under_a_live_id",
            "allocations with the id of a live block",
            found.double_allocs,
        ),
        problem("blocks_at_a_live_address", "blocks at the address of a live block", found.overlaps),
        problem(
            "allocated_above_reserved",
            "rows where allocated memory rises above reserved memory",
            found.above_reserved,
        ),
        problem("frees_of_another_size", "frees whose size differs from the allocation's", found.wrong_sizes),
        problem(
            "no_end_row",
            "no end row: killed, still running, or an incomplete copy",
            u64::from(found.unfinished),
        ),
        problem(
            "last_line_cut_off",
            "last line cut off, or the rest of the file cannot be read",
            u64::from(summary.cut || summary.shortened || !summary.read_errors.is_empty()),
        ),
        problem("lines_that_are_not_rows", "invalid lines", summary.skipped),
    ]
}
