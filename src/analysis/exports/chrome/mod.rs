//! `chrome`: trace-event JSON, for Perfetto and chrome://tracing.
//!
//! Each process has counters of its GPUs and of its resident host memory, the tracks of steps and phases, and
//! its threads. A thread has its ranges and ops as slices, and its allocations as the `[memory]` instants
//! that `torch.profiler` writes. Times are in µs since the start of the first process.

mod collector;
mod events;

use super::export::{Export, Job, MAX_EVENTS, OutputKind, max_events};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::record::Columns;
use crate::render::numbers::{count, counted};
use crate::state::replay::{HOST, Metric};
use crate::state::replay_trace::replay_trace;
use collector::SliceCollector;
use events::{EventList, ProcessWriter};

/// The export `--to chrome`.
pub(super) struct Chrome;

const COLUMNS: Columns = Columns::of(&[
    "ts_ns",
    "pid",
    "tid",
    "device",
    "api",
    "addr",
    "op",
    "module",
    "phase",
    "category",
    "step",
    "latency_ns",
    "delta_bytes",
    "rounded_bytes",
    "name",
    "dtype",
    "shape",
]);

impl Export for Chrome {
    fn name(&self) -> &'static str {
        "chrome"
    }

    fn about(&self) -> &'static str {
        "Trace-event JSON for Perfetto and chrome://tracing: counters, ranges and ops, [memory] instants"
    }

    fn flags(&self) -> &'static [Flag] {
        &[MAX_EVENTS]
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::OneFile(".trace.json")
    }

    fn open_with(&self) -> &'static str {
        "https://ui.perfetto.dev, Open trace file"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let most = max_events(job.options)?;
        let base_ns = job.input.traces.iter().map(|trace| trace.meta.start_unix_ns).min().unwrap_or(0);
        let mut out = job.create()?;
        let mut list = EventList { out: &mut out, events: 0 };
        list.begin(base_ns);
        let mut dropped = 0;
        for (number, trace) in job.input.traces.iter().enumerate() {
            let mut tracks = SliceCollector::new(most);
            // The time of the last row in the window.
            let mut last_ns = 0;
            let replayed = replay_trace(
                trace,
                COLUMNS,
                job.options,
                Metric::Allocated,
                flow_categories(trace, job.options)?,
                |row, replay| {
                    if !replay.in_window() {
                        return;
                    }
                    last_ns = replay.ts_ns;
                    if job.options.device.is_none_or(|only| only == row.device || row.device == HOST) {
                        tracks.feed(row, replay);
                    }
                },
            )?;
            job.add_to_footer(trace, &replayed);
            tracks.close(last_ns);
            dropped += tracks.slices.dropped + tracks.instants.dropped;
            let process = ProcessWriter {
                // Use an index as the process id, because processes on two hosts may have the same process
                // id.
                pid: number as i64,
                offset_ns: trace.meta.start_unix_ns.saturating_sub(base_ns),
                symbols: &replayed.symbols,
            };
            process.write(tracks, trace, &mut list);
        }
        list.end();
        let events = list.events;
        if dropped > 0 {
            job.footer.notes.push(format!(
                "{} of the shortest slices and smallest allocations were left out; --max-events 0 writes all",
                count(dropped)
            ));
        }
        job.finish_file(out, counted(events, "event"))
    }
}
