//! The export `snapshot`: the file of `torch.cuda.memory._dump_snapshot()`, for PyTorch's memory_viz.
//!
//! The segments and blocks show the state at the end of the window. The trace entries show the events before
//! it. The frames of an entry are its op, its Python lines if the trace has them, its module, phase and step.
//! Entries have PyTorch's names and sizes, which are the requested size for blocks and the rounded size for
//! an OOM.

mod collector;
mod writer;

use std::io;

use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;

use super::export::{Export, Job, MAX_EVENTS, OutputKind, max_events};
use super::pickle::Pickle;
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::record::{Columns, Record};
use crate::render::numbers::{count, counted};
use crate::state::replay::{self, Metric, Replay};
use crate::state::replay_trace::replay_until;
use crate::state::stacks::Stacks;
use collector::Collector;
use writer::Writer;

/// The export `--to snapshot`.
pub(super) struct Snapshot;

/// The columns that the snapshot needs in addition to the columns of the replay.
const COLUMNS: Columns = Columns::of(&[
    "ts_ns",
    "addr",
    "stream",
    "pool",
    "requested_bytes",
    "rounded_bytes",
    "device_free_bytes",
    "op",
    "module",
    "phase",
    "category",
    "step",
    "api",
]);

impl Export for Snapshot {
    fn name(&self) -> &'static str {
        "snapshot"
    }

    fn about(&self) -> &'static str {
        "The pickle that PyTorch's memory_viz opens, with op, module and phase as frames"
    }

    fn flags(&self) -> &'static [Flag] {
        &[MAX_EVENTS]
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::FileEach(".snapshot.pickle")
    }

    fn open_with(&self) -> &'static str {
        "drop the file on https://pytorch.org/memory_viz, or: python -m torch.cuda._memory_viz trace_plot \
         FILE"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let trace = job.trace()?;
        let mut collected = Collector::new(max_events(job.options)?, job.options.device, &trace.meta);
        let stacks = Stacks::read(trace);
        let columns = if stacks.has_lines() { COLUMNS.and(Columns::of(&["stack_id"])) } else { COLUMNS };
        let window = job.options.window;
        // Stop the replay at the end of the window, because the snapshot shows the memory at that time.
        let stop = |row: &Record, _: &Replay| {
            row.ts_ns > window.to_ns || row.event != EventName::End && row.step > window.to_step
        };
        let mut replayed = replay_until(
            trace,
            replay::COLUMNS.and(columns),
            job.options,
            Metric::Allocated,
            flow_categories(trace, job.options)?,
            stop,
            |row, replay| collected.feed(row, replay),
        )?;
        if window.to_ns < i64::MAX || window.to_step < i64::MAX {
            // The replay ends before the end row.
            replayed.replay.problems.unfinished = false;
        }
        job.add_to_footer(trace, &replayed);
        let segments = collected.segments(&replayed.replay);
        let entries: usize = collected.entries.len();
        if collected.dropped > 0 {
            job.footer.notes.push(format!(
                "the last {} of {} entries; --max-events 0 writes all",
                count(entries as u64),
                count(entries as u64 + collected.dropped)
            ));
        }
        if collected.stray_ranges.values().any(|stray_ranges| !stray_ranges.is_empty()) {
            job.footer
                .notes
                .push("blocks without a traced segment are shown in artificial segments".to_owned());
        }
        let what =
            format!("{}, {}", counted(entries as u64, "entry"), counted(segments.len() as u64, "segment"));
        let mut out = job.create()?;
        let mut categories: FxHashMap<i64, Category> = FxHashMap::default();
        // The last known category of a block overrides earlier ones.
        categories.extend(collected.entries.iter().filter_map(|entry| entry.block));
        categories.extend(replayed.replay.live().values().map(|block| (block.id, block.owner.category)));
        let mut writer = Writer {
            pickle: Pickle::new(&mut out).map_err(io_error)?,
            symbols: &replayed.symbols,
            stacks: &stacks,
            categories,
            frames: FxHashMap::default(),
            lines: FxHashMap::default(),
        };
        writer.snapshot(&collected, &segments, trace).map_err(io_error)?;
        writer.pickle.finish().map_err(io_error)?;
        job.finish_file(out, what)
    }
}

/// Converts an error of a [`Pickle`]. The error is not a failed write, because `Out` returns failed writes
/// only when it is closed.
fn io_error(source: io::Error) -> crate::Error {
    memtrace_trace::Error::Io { path: "snapshot".into(), source }.into()
}
