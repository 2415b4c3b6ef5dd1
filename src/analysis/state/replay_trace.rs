//! Replays a trace from its file.
//!
//! Each function here reads the file once. In a trace with io records and no tags, the categories of blocks
//! come from the flow of data between ops, which needs a separate reading. The caller makes this reading with
//! [`crate::profile::flow_categories`] and passes the result to each replay, or passes
//! [`KnownCategories::default()`] if it uses no category.

use std::ops::ControlFlow;

use serde_json::{Value, json};

use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::{ReadSummary, TraceFile};
use crate::read::symbols::SymbolTable;
use crate::read::together::RowReader;
use crate::state::categories::KnownCategories;
use crate::state::replay::{self, Device, Metric, Peak, Replay, is_gpu};

/// A replayed trace.
pub struct Replayed {
    /// The state after the last row read, and the peaks.
    pub replay: Replay,
    /// The symbols of the rows.
    pub symbols: SymbolTable,
    /// The number of skipped lines, and whether the last line was cut off.
    pub summary: ReadSummary,
}

/// Returns the reading by allocated memory, or by memory in use if `has_memory` says that the first one has none: all
/// memory of a program without torch is outside torch's allocator.
///
/// # Errors
/// Returns the error of `read`.
pub(crate) fn read_by_metric<T>(
    read: impl Fn(Metric) -> Result<T>,
    has_memory: impl Fn(&T) -> bool,
) -> Result<T> {
    let by_allocated = read(Metric::Allocated)?;
    if has_memory(&by_allocated) { Ok(by_allocated) } else { read(Metric::Used) }
}

/// Replays `trace`. `visit` gets each row after the replay processed it, with `columns` in addition to the
/// columns of the replay. [`Replay::at_peak`] then returns the blocks that were live at the peak of
/// `tracked`.
///
/// ```
/// use memtrace_analysis::options::Options;
/// use memtrace_analysis::read::input::Input;
/// use memtrace_analysis::read::record::Columns;
/// use memtrace_analysis::state::categories::KnownCategories;
/// use memtrace_analysis::state::replay::Metric;
/// use memtrace_analysis::state::replay_trace::replay_trace;
///
/// # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt");
/// let trace = &Input::open(&folder)?.traces[0];
/// let (none, options) = (Columns::of(&[]), Options::default());
/// let mut highest = 0;
/// let after = replay_trace(trace, none, &options, Metric::Allocated, KnownCategories::default(), |_, state| {
///     highest = highest.max(state.devices().iter().map(|device| device.live_blocks).max().unwrap_or(0));
/// })?;
/// assert_eq!(highest, 146);
/// assert_eq!(after.replay.find(0).expect("the GPU").peak(Metric::Allocated).bytes, 124_781_568);
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
///
/// # Errors
/// When the trace cannot be read.
pub fn replay_trace(
    trace: &TraceFile,
    columns: Columns,
    options: &Options,
    tracked: Metric,
    known: KnownCategories,
    visit: impl FnMut(&Record, &Replay),
) -> Result<Replayed> {
    replay_until(trace, replay::COLUMNS.and(columns), options, tracked, known, |_, _| false, visit)
}

/// Same as [`replay_trace`], but with exactly the columns of `wanted`, and stops before the first row for which `stop`
/// returns true. `stop` gets the row and the state before it.
///
/// # Errors
/// When the trace cannot be read.
pub fn replay_until(
    trace: &TraceFile,
    wanted: Wanted,
    options: &Options,
    tracked: Metric,
    known: KnownCategories,
    mut stop: impl FnMut(&Record, &Replay) -> bool,
    mut visit: impl FnMut(&Record, &Replay),
) -> Result<Replayed> {
    let symbols = SymbolTable::default();
    let mut replay = Replay::new(&symbols, options.window, tracked);
    replay.known = known;
    run(trace, wanted, options, replay, symbols, Some(&mut stop), &mut visit)
}

/// Same as [`replay_trace`], but with exactly the columns of `wanted`, and without categories that an
/// earlier reading inferred.
///
/// # Errors
/// When the trace cannot be read.
pub fn replay_rows(
    trace: &TraceFile,
    wanted: Wanted,
    options: &Options,
    tracked: Metric,
    visit: impl FnMut(&Record, &Replay),
) -> Result<Replayed> {
    replay_rows_knowing(trace, wanted, options, tracked, KnownCategories::default(), visit)
}

/// Same as [`replay_rows`], but with categories that an earlier reading inferred.
///
/// # Errors
/// When the trace cannot be read.
pub fn replay_rows_knowing(
    trace: &TraceFile,
    wanted: Wanted,
    options: &Options,
    tracked: Metric,
    known: KnownCategories,
    mut visit: impl FnMut(&Record, &Replay),
) -> Result<Replayed> {
    let symbols = SymbolTable::default();
    let mut replay = Replay::new(&symbols, options.window, tracked);
    replay.known = known;
    run(trace, wanted, options, replay, symbols, None, &mut visit)
}

/// Continues `replay`, which is at its beginning, with the rows of `trace`. Each row goes to the replay, then to each of
/// `readers`, then to `visit`, with the columns of the readers and `columns` in addition to those of the replay.
///
/// # Errors
/// When the trace cannot be read.
pub fn replay_together(
    trace: &TraceFile,
    columns: Columns,
    options: &Options,
    replay: Replay,
    readers: &mut [&mut dyn RowReader],
    mut visit: impl FnMut(&Record, &Replay),
) -> Result<Replayed> {
    let wanted = readers.iter().fold(replay::COLUMNS.and(columns), |all, reader| all.or(&reader.wanted()));
    let symbols = replay.symbols.clone();
    run(trace, wanted, options, replay, symbols, None, &mut |row, replay| {
        for reader in &mut *readers {
            reader.feed(row, &replay.symbols);
        }
        visit(row, replay);
    })
}

/// Replays every column of `trace` and compares the totals of each row with the sum of the deltas.
///
/// # Errors
/// When the trace cannot be read.
pub fn replay_checked(trace: &TraceFile, options: &Options) -> Result<Replayed> {
    let symbols = SymbolTable::default();
    let replay = Replay::new(&symbols, options.window, Metric::Allocated).checking();
    run(trace, Wanted::all_events(Columns::ALL), options, replay, symbols, None, &mut |_, _| {})
}

/// Returns true if a replay stops before this row.
type Stop<'a> = &'a mut dyn FnMut(&Record, &Replay) -> bool;

/// Not generic, so all reports share one compiled copy of the replay.
fn run(
    trace: &TraceFile,
    wanted: Wanted,
    options: &Options,
    replay: Replay,
    symbols: SymbolTable,
    mut stop: Option<Stop<'_>>,
    visit: &mut dyn FnMut(&Record, &Replay),
) -> Result<Replayed> {
    let mut replay = replay.of_snapshot(trace.meta.is_snapshot());
    let summary = trace.read_slices(wanted, options.lenient, &symbols, &mut |rows| {
        for row in rows {
            if stop.as_mut().is_some_and(|stop| stop(row, &replay)) {
                return ControlFlow::Break(());
            }
            replay.feed(row);
            visit(row, &replay);
        }
        ControlFlow::Continue(())
    })?;
    replay.end(&trace.ending().unwrap_or_default());
    Ok(Replayed { replay, symbols, summary })
}

/// Returns the name of [`Metric::Used`] for several processes. Unless every device has samples, the name says
/// that memory in use is incomplete.
#[must_use]
pub fn used_name<'a>(all: impl IntoIterator<Item = &'a Replayed>, options: &Options) -> &'static str {
    let is_sampled = all.into_iter().all(|replayed| replayed.gpus(options).all(Device::is_sampled));
    if is_sampled { Metric::Used.name() } else { Metric::UNSAMPLED }
}

impl Replayed {
    /// Returns the GPUs that the options select: one, or all. `--device` may also select CPU
    /// tensors or pinned host memory.
    pub fn gpus<'a>(&'a self, options: &Options) -> impl Iterator<Item = &'a Device> + use<'a> {
        let only = options.device;
        let wanted =
            move |device: &&Device| only.map_or(is_gpu(device.ordinal), |only| only == device.ordinal);
        self.replay.devices().iter().filter(wanted)
    }

    /// Returns the GPU with the highest peak of `metric`.
    #[must_use]
    pub fn fullest(&self, metric: Metric, options: &Options) -> Option<&Device> {
        self.gpus(options).max_by_key(|device| (device.peak(metric).bytes, -device.ordinal))
    }

    /// Returns the bytes without an owner at the peak of a device, and all bytes at that peak.
    #[must_use]
    pub fn unattributed(&self, ordinal: i32) -> (i64, i64) {
        let blocks = self.replay.at_peak(ordinal, false);
        let nobody = blocks.iter().filter(|block| block.owner.is_nobody()).map(|block| block.bytes).sum();
        (nobody, blocks.iter().map(|block| block.bytes).sum())
    }

    /// Returns the categories of the blocks that were live at the peak of each device, if the replay has inferred them.
    /// For a report that follows the rows of a category, because the rows have the category before the inference.
    #[must_use]
    pub fn inferred_at_peaks(&self) -> Option<KnownCategories> {
        if !self.replay.infers() || !self.replay.known.is_none() {
            return None;
        }
        let ordinals = self.replay.devices().iter().map(|device| device.ordinal);
        let blocks: Vec<_> = ordinals.flat_map(|ordinal| self.replay.at_peak(ordinal, false)).collect();
        Some(KnownCategories::of_blocks(&blocks, self.replay.rule()))
    }

    /// Returns a moment for `--json`.
    #[must_use]
    pub fn moment(&self, moment: &Peak) -> Value {
        let owner = &moment.owner;
        json!({
            "bytes": moment.bytes,
            "seq": moment.seq,
            "ts_ns": moment.ts_ns,
            "step": owner.step,
            "phase": &*self.symbols.get(owner.phase),
            "module": &*self.symbols.get(owner.module),
            "op": &*self.symbols.get(owner.op),
        })
    }
}
