//! The export `memory-tracker`: the statistics that `torch.distributed._tools.memory_tracker.MemoryTracker`
//! saves, so that its `load`, `summary` and `show_traces` work on a traced run. Ops have the names and
//! numbers of `MemoryTracker` (see [`crate::state::op_calls`]). Its unit "MB" is 1024² bytes.
//!
//! The names of all ops may not fit in memory, so the rows are read four times: once to find the first op,
//! and then once for each of the three series.

use std::io::{self, Write};

use super::export::{Export, Job, OutputKind};
use super::out::Out;
use super::pickle::Pickle;
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::render::numbers::counted;
use crate::state::op_calls::{self, MB, OpCall, OpCalls};
use crate::state::replay::{Metric, Totals};
use crate::state::replay_trace::{Replayed, replay_trace};

/// The export `--to memory-tracker`.
pub(super) struct MemoryTracker;

const FORMAT: Flag = Flag {
    name: "as",
    value: Some("FORMAT"),
    default: "pickle",
    choices: &["pickle", "json"],
    help: "Write the pickle that MemoryTracker.load reads, or the same data as JSON",
};

/// The name of a series, and the function that returns the series' total.
type TotalSeries = (&'static str, fn(&Totals) -> i64);

const SERIES: [TotalSeries; 3] = [
    ("memories_allocated", |totals| totals.allocated),
    ("memories_active", |totals| totals.active),
    ("memories_reserved", |totals| totals.reserved),
];

impl Export for MemoryTracker {
    fn name(&self) -> &'static str {
        "memory-tracker"
    }

    fn about(&self) -> &'static str {
        "The statistics that PyTorch's MemoryTracker saves and loads, or the same data as JSON"
    }

    fn flags(&self) -> &'static [Flag] {
        &[FORMAT]
    }

    fn output_kind(&self, options: &Options) -> OutputKind {
        OutputKind::FileEach(if options.text(FORMAT.name) == "json" {
            ".memory-tracker.json"
        } else {
            ".memory-tracker.pickle"
        })
    }

    fn open_with(&self) -> &'static str {
        "python -ic \"import sys; from torch.distributed._tools.memory_tracker import MemoryTracker; \
         tracker = MemoryTracker(); tracker.load(sys.argv[1])\" FILE"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let trace = job.trace()?;
        let options = job.options;
        // Each dispatch mode of the program restarts the numbering of ops at 0. `first` becomes the row of
        // the last call with number 0, because only the last numbering is exported.
        let (mut calls, mut first) = (OpCalls::new(options.device), 0);
        let replayed = each(trace, options, &mut calls, |seq, call, _| {
            if call.index == 0 {
                first = seq;
            }
        })?;
        job.add_to_footer(trace, &replayed);
        if calls.count == 0 {
            return Err(Error::usage(format!(
                "{}: this trace has no ops; trace with MEMTRACE_OPS=top or all",
                trace.path.display()
            )));
        }
        let run = OpCallRun { trace, options, first, calls };
        let mut out = job.create()?;
        if options.text(FORMAT.name) == "json" {
            run.json(&mut out)?
        } else {
            run.pickle(&mut out)?
        }
        job.finish_file(out, counted(run.calls.count as u64, "op call"))
    }
}

/// Replays the trace. Calls `visit` with each op call in the window and with the `seq` of the call's row.
fn each(
    trace: &TraceFile,
    options: &Options,
    calls: &mut OpCalls,
    mut visit: impl FnMut(i64, &OpCall, &SymbolTable),
) -> Result<Replayed> {
    replay_trace(
        trace,
        op_calls::COLUMNS,
        options,
        Metric::Allocated,
        flow_categories(trace, options)?,
        |row, replay| {
            if replay.in_window()
                && let Some(call) = calls.feed(row, replay)
            {
                visit(row.seq, &call, &replay.symbols);
            }
        },
    )
}

/// The op calls to write.
struct OpCallRun<'a> {
    trace: &'a TraceFile,
    options: &'a Options,
    /// The `seq` of the row of the first exported call. Earlier calls belong to earlier numberings.
    first: i64,
    calls: OpCalls,
}

impl OpCallRun<'_> {
    /// Calls `visit` with each op call of the last numbering, and with the call's name.
    fn each(&self, mut visit: impl FnMut(&OpCall, &str)) -> Result<()> {
        each(self.trace, self.options, &mut OpCalls::new(self.options.device), |seq, call, symbols| {
            if seq >= self.first {
                visit(call, &call.name(symbols));
            }
        })?;
        Ok(())
    }

    /// Returns the markers. As in `MemoryTracker`, these are only the last marker of each kind.
    fn markers(&self) -> impl Iterator<Item = (&'static str, usize)> {
        [("fw_start", self.calls.fw_start.last()), ("fw_bw_boundary", self.calls.fw_bw_boundary.last())]
            .into_iter()
            .filter_map(|(name, index)| Some((name, *index?)))
    }

    fn pickle(&self, out: &mut Out) -> Result<()> {
        let path = out.path().to_owned();
        let failed = |source: io::Error| memtrace_trace::Error::Io { path: path.clone(), source };
        let mut pickle = Pickle::new(out).map_err(failed)?;
        let mut top = pickle.dict().map_err(failed)?;
        for (name, total) in SERIES {
            pickle.key(&mut top, name).map_err(failed)?;
            let mut series = pickle.dict().map_err(failed)?;
            let mut failure = Ok(());
            self.each(|call, name| {
                let mut add = || {
                    pickle.entry(&mut series)?;
                    pickle.int(call.index as i64)?;
                    pickle.text_once(name)?;
                    pickle.float(total(&call.totals) as f64 / MB)?;
                    pickle.pair()
                };
                if failure.is_ok() {
                    failure = add();
                }
            })?;
            failure.map_err(failed)?;
            pickle.close(series).map_err(failed)?;
        }
        let mut rest = || {
            pickle.key(&mut top, "markers")?;
            let mut markers = pickle.dict()?;
            for (name, index) in self.markers() {
                pickle.key(&mut markers, name)?;
                pickle.int(index as i64)?;
            }
            pickle.close(markers)?;
            pickle.key(&mut top, "num_alloc_retries")?;
            pickle.int(i64::try_from(self.calls.retries.count()).unwrap_or(i64::MAX))
        };
        rest().map_err(failed)?;
        pickle.close(top).map_err(failed)?;
        pickle.finish().map_err(failed)?;
        Ok(())
    }

    /// Writes the JSON. `Out` stores its first failure and returns it when it is closed.
    fn json(&self, out: &mut Out) -> Result<()> {
        out.write_all(b"{").ok();
        for (name, total) in SERIES {
            write!(out, "\"{name}\":{{").ok();
            self.each(|call, name| {
                let comma = if call.index > 0 { "," } else { "" };
                let entry = serde_json::json!([name, total(&call.totals) as f64 / MB]);
                write!(out, "{comma}\n\"{}\":{entry}", call.index).ok();
            })?;
            out.write_all(b"},\n").ok();
        }
        let markers: serde_json::Map<_, _> =
            self.markers().map(|(name, index)| (name.to_owned(), index.into())).collect();
        let markers = serde_json::Value::Object(markers);
        writeln!(out, "\"markers\":{markers},\n\"num_alloc_retries\":{}}}", self.calls.retries.count()).ok();
        Ok(())
    }
}
