//! The processes on a GPU that have no trace in the run, from the marks that name them.

use std::collections::BTreeMap;
use std::ops::ControlFlow;

use memtrace_trace::gpu_process::GpuProcess;
use memtrace_trace::{Api, EventName};
use serde_json::{Value, json};

use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::render::printer::Printer;

/// The remedy if only processes without a trace in the run share the GPU.
pub(in crate::reports) const END_THEM: &str =
    "end them if they are yours, or choose another GPU with CUDA_VISIBLE_DEVICES";

/// The maximum number of processes that are listed without `--top`.
const MOST_LINES: usize = 16;

/// The other processes that one process of the run saw on its GPUs, by device and process id.
#[derive(Default)]
pub(in crate::reports) struct SeenProcesses {
    seen: BTreeMap<(i32, u32), Seen>,
}

struct Seen {
    process: GpuProcess,
    /// The time and the bytes of each mark.
    changes: Vec<(i64, Option<i64>)>,
}

impl SeenProcesses {
    /// The columns of a `mark` row that [`Self::feed`] needs.
    const COLUMNS: Columns = Columns::of(&["ts_ns", "api", "name"]);

    /// Reads the marks of a trace, without a replay.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(in crate::reports) fn read(trace: &TraceFile, options: &Options) -> Result<SeenProcesses> {
        let symbols = SymbolTable::default();
        let mut seen = SeenProcesses::default();
        let wanted = Wanted::all_events(Columns::of(&["seq"])).plus(EventName::Mark, SeenProcesses::COLUMNS);
        trace.read(wanted, options.lenient, &symbols, |row| {
            seen.feed(row, &symbols);
            ControlFlow::Continue(())
        })?;
        Ok(seen)
    }

    /// Processes a row, in the order of the trace.
    pub(in crate::reports) fn feed(&mut self, row: &Record, symbols: &SymbolTable) {
        if row.event != EventName::Mark || *symbols.get(row.api) != *Api::GpuProcess.as_str() {
            return;
        }
        let Some(process) = GpuProcess::parse(&symbols.get(row.name)) else { return };
        let key = (process.device, process.pid);
        let seen =
            self.seen.entry(key).or_insert_with(|| Seen { process: process.clone(), changes: Vec::new() });
        seen.changes.push((row.ts_ns, process.bytes));
        // The id may belong to another process by now. The last one that is on the GPU counts.
        if process.bytes != Some(0) {
            seen.process = process;
        }
    }

    /// Returns the processes that have no trace in `input`. `trace` is the one whose rows were processed.
    pub(in crate::reports) fn others(self, trace: &TraceFile, input: &Input) -> Vec<OtherProcess> {
        let is_of_run = |pid: u32| {
            let pid = pid.to_string();
            input.traces.iter().any(|other| other.meta.host == trace.meta.host && other.pid() == pid)
        };
        let all = self.seen.into_values().filter(|seen| !is_of_run(seen.process.pid));
        all.map(|Seen { process, changes }| OtherProcess {
            host: trace.meta.host.clone(),
            seen_by: trace.pid(),
            process,
            changes,
        })
        .collect()
    }
}

/// A process on a GPU without a trace in the run.
pub(in crate::reports) struct OtherProcess {
    pub(in crate::reports) host: String,
    /// The id of the process of the run that saw it.
    pub(in crate::reports) seen_by: String,
    process: GpuProcess,
    /// The time in the trace of `seen_by`, and the bytes from then on; `None` is unknown.
    changes: Vec<(i64, Option<i64>)>,
}

impl OtherProcess {
    pub(in crate::reports) fn device(&self) -> i32 {
        self.process.device
    }

    /// Returns the most bytes that the process had; `None` if unknown.
    pub(in crate::reports) fn highest(&self) -> Option<i64> {
        self.changes.iter().filter_map(|(_, bytes)| *bytes).max()
    }

    /// Returns true if the process was on the GPU at a moment of the trace of `seen_by`.
    pub(in crate::reports) fn is_there_at(&self, ts_ns: i64) -> bool {
        self.bytes_at(ts_ns) != Some(0)
    }

    /// Returns the bytes at a moment of the trace of `seen_by`; `None` if unknown. Samples are late, so before
    /// the first mark of the process the bytes of this mark count.
    pub(in crate::reports) fn bytes_at(&self, ts_ns: i64) -> Option<i64> {
        let before = self.changes.iter().rev().find(|(at, _)| *at <= ts_ns);
        before.or_else(|| self.changes.first()).and_then(|(_, bytes)| *bytes)
    }

    /// Returns the name: `process 4711 (user alice, serve.py, container 0123456789ab)`.
    pub(in crate::reports) fn name(&self) -> String {
        let GpuProcess { pid, user, container, command, .. } = &self.process;
        if user.is_none() && command.is_none() {
            return format!("process {pid} (user and command unknown: /proc does not show it here)");
        }
        let mut known = vec![user.as_ref().map_or("user unknown".to_owned(), |user| format!("user {user}"))];
        known.push(command.clone().unwrap_or("command unknown".to_owned()));
        known.extend(container.as_ref().map(|name| match name.strip_prefix("job ") {
            Some(job) => format!("Slurm job {job}"),
            None => format!("container {name}"),
        }));
        format!("process {pid} ({})", known.join(", "))
    }

    /// Returns the name and the bytes.
    pub(in crate::reports) fn text(&self, bytes: Option<i64>, options: &Options) -> String {
        match bytes {
            Some(bytes) => format!("{}, {}", self.name(), options.units.show(bytes)),
            None => format!("{}, size unknown", self.name()),
        }
    }

    pub(in crate::reports) fn json(&self) -> Value {
        let GpuProcess { device, pid, user, container, command, .. } = &self.process;
        json!({
            "host": self.host, "device": device, "pid": pid, "user": user, "container": container,
            "command": command, "bytes": self.highest(),
        })
    }
}

/// Prints the processes on GPUs that have no trace in the run.
pub(in crate::reports) fn print(all: &[OtherProcess], printer: &mut Printer, options: &Options) {
    for other in all.iter().take(options.top.unwrap_or(MOST_LINES)) {
        printer.plain(format!(
            "GPU {} of {}: {} at most, has no trace in this run",
            other.device(),
            other.host,
            other.text(other.highest(), options)
        ));
    }
    let more = all.len().saturating_sub(options.top.unwrap_or(MOST_LINES));
    printer.more(more, " without a trace in this run");
}

/// Leaves one entry for each process. Several ranks see the same process.
pub(in crate::reports) fn without_repeats(mut all: Vec<OtherProcess>) -> Vec<OtherProcess> {
    let key = |it: &OtherProcess| (it.host.clone(), it.process.device, it.process.pid);
    all.sort_by_key(|it| (key(it), std::cmp::Reverse(it.highest())));
    all.dedup_by_key(|it| key(it));
    all
}
