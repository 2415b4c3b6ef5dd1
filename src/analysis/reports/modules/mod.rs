//! `memtrace modules`: PyTorch's `MemTracker` states, one entry for each call of a module.
//!
//! A module call is a range named after a level of the module path. A forward call inside backward is a
//! recomputation (activation checkpointing).
//!
//! Backward has no ranges. The backward of a module begins with the first row in the backward phase that
//! belongs to the module or to a submodule. It ends with the next row that does not. Some rows are ignored:
//! frees, tags, an op outside all modules that allocates nothing (the accumulation of a gradient), and rows
//! of other threads (a sample, pinned memory of a data loader). A mark with the api `backward` also ends it,
//! because the backward of another call of the module follows.
//!
//! A module has at most as many backwards as forwards. If rows of another owner interrupt a backward and all
//! forwards already have one, the rest of the backward is added to the last entry.
//!
//! A block counts in its final category since its allocation. As in `MemTracker`, a later total is a new peak
//! only if it is higher. If the trace has `op` rows, `--op-boundary` looks for peaks only at the end of an
//! op, as `MemTracker` does. This misses memory that an op allocates and frees inside.

mod layout;
mod memory;
mod natural_order;
mod snapshots;
mod tracker;

use serde_json::json;

use super::mem_tracker::ROUNDED;
use super::report::{Answer, Report, for_each_process, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::render::heading::process_heading;
use crate::render::numbers::counted;
use crate::state::categories::KnownCategories;
use crate::state::group;
use crate::state::replay::{Metric, Replay};
use crate::state::replay_trace::replay_trace;
use memtrace_trace::config::Ops;
use tracker::{Depth, Tracker};

/// `memtrace modules`.
pub(super) struct Modules;

/// The note that is printed with `--op-boundary` if only outermost ops have a row.
const OUTER_OPS: &str = "--op-boundary saw only outermost ops, so these peaks may differ from MemTracker's: \
                         MEMTRACE_OPS=all records every op";

impl Report for Modules {
    fn name(&self) -> &'static str {
        "modules"
    }

    fn about(&self) -> &'static str {
        "Show memory before, at the peak of and after each module call, as MemTracker does"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("modules out", "memory around each module call"),
            ("modules --full --depth 2 out", "as MemTracker's display prints it"),
        ]
    }

    fn flags(&self) -> &'static [Flag] {
        const {
            &[
                Flag {
                    help: "Show modules down to the N-th level of their path [default: all levels; 2 with \
                           --full or --table]",
                    ..group::DEPTH
                },
                group::APART,
                Flag {
                    name: "calls",
                    value: Some("N"),
                    default: "100",
                    choices: &[],
                    help: "Keep the first N calls of each module separate",
                },
                Flag::switch("full", "Print every state of every call, by category, as MemTracker does"),
                Flag::switch("table", "Like --full, as reStructuredText tables"),
                ROUNDED,
                Flag::switch(
                    "op-boundary",
                    "Look for peaks at the ends of ops only, as MemTracker does (needs MEMTRACE_OPS=all)",
                ),
            ]
        }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let depth = match options.count(group::DEPTH.name)? {
            Some(depth) => Depth { followed: depth, kept: depth },
            None => Depth { followed: usize::MAX, kept: 2 },
        };
        let calls = options.count("calls")?.unwrap_or(100);
        let answer = for_each_process(input, options, |index, trace, printer, footer| {
            let new_tracker = |inferred: KnownCategories| Tracker::new(depth, calls, inferred, options);
            let columns = Columns::of(&[
                "name",
                "tid",
                "device",
                "api",
                "module",
                "category",
                "phase",
                "ts_ns",
                "rounded_bytes",
            ]);
            let flow = flow_categories(trace, options)?;
            let mut tracker = new_tracker(flow.clone());
            let read = |tracker: &mut Tracker| {
                let feed = |row: &Record, replay: &Replay| tracker.feed(row, replay);
                replay_trace(trace, columns, options, Metric::Allocated, flow.clone(), feed)
            };
            let replayed = read(&mut tracker)?;
            footer.add(trace, &replayed, options);
            if let Some(inferred) = replayed.inferred_at_peaks() {
                tracker = new_tracker(inferred);
                read(&mut tracker)?;
            }
            footer.note_inference(&replayed);
            let all_ops = [Ops::All.name(), Ops::Io.name()].contains(&trace.meta.ops.as_str());
            if options.is_set("op-boundary") && !all_ops && !footer.notes.iter().any(|note| note == OUTER_OPS)
            {
                footer.notes.push(OUTER_OPS.to_owned());
            }
            if tracker.open_calls() > 0 {
                footer
                    .notes
                    .push(format!("{} without an end", counted(tracker.open_calls() as u64, "module range")));
            }
            if tracker.unmatched > 0 {
                footer.notes.push(format!("{} without a begin", counted(tracker.unmatched, "range end")));
            }
            process_heading(printer, input, index);
            let layers = tracker.layers(&replayed.replay, options);
            tracker.print(printer, &layers, &replayed.replay.symbols, options);
            Ok(json!({
                "file": trace.path.display().to_string(),
                "rank": trace.meta.rank,
                "modules": tracker.json(&replayed.replay.symbols),
            }))
        })?;
        let hints = vec![next("peak", input, "--by module"), next("peak", input, "--mem-tracker")];
        Ok(Answer { next: hints, ..answer })
    }
}

#[cfg(test)]
mod tests;
