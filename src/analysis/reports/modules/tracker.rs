//! Tracks the memory before, at the peak of and after each call of a module.

use std::collections::BTreeMap;

use memtrace_trace::columns::MAX_BYTES;
use memtrace_trace::ranges::{Meaning, meaning};
use memtrace_trace::{Api, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use super::super::mem_tracker::{ROUNDED, Types, type_of};
use super::memory::{CallMemory, Memories};
use super::snapshots::{DeviceTypes, Snapshot, Snapshots};
use crate::options::Options;
use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::categories::KnownCategories;
use crate::state::group::module_levels;
use crate::state::replay::{CPU, Replay, has_current_step, is_gpu};

/// The states of `MemTracker`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallState {
    PeakForward,
    PreForward,
    PostForward,
    PreForwardAc,
    PostForwardAc,
    PeakBackward,
    PreBackward,
    PostBackward,
}

impl CallState {
    pub(super) const fn name(self) -> &'static str {
        match self {
            CallState::PeakForward => "Peak-Forward",
            CallState::PreForward => "Pre-Forward",
            CallState::PostForward => "Post-Forward",
            CallState::PreForwardAc => "Pre-Forward-AC",
            CallState::PostForwardAc => "Post-Forward-AC",
            CallState::PeakBackward => "Peak-Backward",
            CallState::PreBackward => "Pre-Backward",
            CallState::PostBackward => "Post-Backward",
        }
    }
}

/// Returns the change of a row, in bytes. The block counts at its requested size, rounded up, if that is
/// known.
fn rounded(row: &Record) -> i64 {
    let rounded = row.rounded_bytes.min(MAX_BYTES.cast_signed());
    if rounded > 0 { rounded * row.delta_bytes.signum() } else { row.delta_bytes }
}

pub(super) fn total(types: &Types) -> i64 {
    types.iter().sum()
}

/// All occurrences of one state of a module.
#[derive(Clone, Debug)]
pub(super) struct StateHistory {
    pub(super) state: CallState,
    pub(super) calls: u64,
    /// The memory in each of the first calls. The option `--calls` sets the number of calls.
    pub(super) kept: Vec<Snapshot>,
    /// The highest total of a device over all calls.
    pub(super) highest: i64,
}

/// The states of one module.
#[derive(Clone, Debug, Default)]
pub(super) struct ModuleStats {
    /// In the order of their first occurrence, as in MemTracker.
    pub(super) states: Vec<StateHistory>,
    /// The maximum growth over a forward call, in bytes: the memory after the call minus the memory before.
    pub(super) retained: i64,
}

impl ModuleStats {
    fn series(&mut self, state: CallState) -> &mut StateHistory {
        let at = match self.states.iter().position(|series| series.state == state) {
            Some(at) => at,
            None => {
                self.states.push(StateHistory { state, calls: 0, kept: Vec::new(), highest: 0 });
                self.states.len() - 1
            }
        };
        &mut self.states[at]
    }

    pub(super) fn history(&self, state: CallState) -> Option<&StateHistory> {
        self.states.iter().find(|series| series.state == state)
    }

    fn calls(&self, state: CallState) -> u64 {
        self.history(state).map_or(0, |series| series.calls)
    }
}

/// Returns the level of a module in its path, starting at 1.
fn level(path: &str) -> usize {
    path.matches('.').count() + 1
}

fn highest(now: &DeviceTypes) -> i64 {
    now.iter().filter(|(device, _)| counts(**device, now)).map(|(_, types)| total(types)).max().unwrap_or(0)
}

/// Returns true if the memory of a device counts for the highest totals of a call: of a GPU or, in a program
/// that uses no GPU, of the CPU tensors.
fn counts(device: i32, now: &DeviceTypes) -> bool {
    is_gpu(device) || (device == CPU && !now.keys().any(|device| is_gpu(*device)))
}

/// A call in progress.
struct OpenCall {
    path: String,
    /// The state to record when the call ends.
    after: CallState,
    /// The state to record at the peak of the call; `None` in a recomputation.
    peak: Option<CallState>,
    local_peak: BTreeMap<i32, i64>,
    /// The index of this call's peak among the kept peaks; `None` if the peak is not kept.
    kept_peak: Option<usize>,
    /// True for a backward that goes on after rows of another owner. The state that was recorded at the
    /// interruption is replaced when this call ends.
    resumed: bool,
    before: i64,
    memory: CallMemory,
}

/// The maximum levels of module paths, counted from the root.
#[derive(Clone, Copy)]
pub(super) struct Depth {
    /// Modules deeper than this level are counted, but not followed.
    pub(super) followed: usize,
    /// The calls of modules deeper than this level are not kept one by one.
    pub(super) kept: usize,
}

pub(super) struct Tracker {
    depth: Depth,
    /// The called modules that are deeper than `depth.followed`.
    deeper: FxHashSet<String>,
    keep: usize,
    op_boundary: bool,
    rounded: bool,
    device: Option<i32>,
    /// The inferred categories of blocks.
    inferred: KnownCategories,
    now: DeviceTypes,
    /// The open ranges of each thread; the call is `None` for a range that is not a module, or is too deep.
    ranges: FxHashMap<i32, Vec<(Symbol, Option<OpenCall>)>>,
    backward: Vec<OpenCall>,
    /// The threads that call modules or run backward functions. Rows of other threads, such as one that
    /// prefetches batches, do not end a backward.
    training_threads: FxHashSet<i32>,
    pub(super) snapshots: Snapshots,
    pub(super) modules: FxHashMap<String, ModuleStats>,
    pub(super) memories: Memories,
    pub(super) unmatched: u64,
}

impl Tracker {
    pub(super) fn new(depth: Depth, keep: usize, inferred: KnownCategories, options: &Options) -> Tracker {
        Tracker {
            depth,
            deeper: FxHashSet::default(),
            keep,
            op_boundary: options.is_set("op-boundary"),
            rounded: options.is_set(ROUNDED.name),
            device: options.device,
            inferred,
            now: DeviceTypes::new(),
            ranges: FxHashMap::default(),
            backward: Vec::new(),
            training_threads: FxHashSet::default(),
            snapshots: Snapshots::default(),
            modules: FxHashMap::default(),
            memories: Memories::default(),
            unmatched: 0,
        }
    }

    /// Returns the number of module calls that the trace leaves open.
    pub(super) fn open_calls(&self) -> usize {
        self.ranges.values().flatten().filter(|(_, call)| call.is_some()).count()
    }

    /// Returns the number of called modules that are too deep to be followed.
    pub(super) fn too_deep(&self) -> usize {
        self.deeper.len()
    }

    /// Returns true if the calls of a module are kept one by one.
    pub(super) fn keeps_calls(&self, path: &str) -> bool {
        level(path) <= self.depth.kept
    }

    /// Returns the maximum number of calls of a module that are kept.
    fn kept_calls(&self, path: &str) -> usize {
        if self.keeps_calls(path) { self.keep } else { 0 }
    }

    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if replay.in_window() {
            match row.event {
                EventName::RangeBegin => self.begin(row, replay),
                EventName::RangeEnd => self.end(row),
                EventName::Mark if *replay.symbols.get(row.api) == *Api::Backward.as_str() => {
                    self.end_backward_of(&replay.symbols.get(row.name), row.seq);
                }
                // Free and tag rows neither begin nor end a backward. The row itself is counted only below,
                // so that the state before a call excludes the call's first row.
                EventName::Free | EventName::Tag => {}
                EventName::Io => {
                    let open = self.ranges.entry(row.tid).or_default();
                    if let Some((_, Some(call))) = open.last_mut() {
                        self.memories.add_io(&mut call.memory, row, &replay.symbols);
                    }
                }
                _ if has_current_step(row.event) => self.follow_backward(row, replay),
                _ => {}
            }
        }
        let block = row.event.is_block() || matches!(row.event, EventName::HostAlloc | EventName::HostFree);
        if block && self.device.is_none_or(|only| only == row.device) {
            let types = self.now.entry(row.device).or_default();
            let category = self.inferred.category_of(row.alloc_id).unwrap_or(row.category);
            let kind = type_of(category, row.phase, &replay.phases);
            let bytes = &mut types[kind];
            let change = if self.rounded { rounded(row) } else { row.delta_bytes };
            *bytes = bytes.wrapping_add(change);
            if row.event == EventName::Tag {
                self.snapshots.correct(row.device, row.alloc_id, kind, change);
            }
            self.memories.add_block(row, rounded(row), &replay.symbols);
        }
        if !replay.in_window() {
            return;
        }
        let is_boundary = if self.op_boundary { row.event == EventName::Op } else { row.allocates_tensor() };
        if is_boundary {
            self.look_for_peaks(row.seq);
        }
    }

    /// Records `state` of the module at `path` with the memory before row `seq`.
    fn add(&mut self, path: &str, state: CallState, seq: i64) {
        let keep = self.kept_calls(path);
        let stats = self.modules.entry(path.to_owned()).or_default();
        let series = stats.series(state);
        series.calls += 1;
        series.highest = series.highest.max(highest(&self.now));
        if series.kept.len() < keep {
            series.kept.push(self.snapshots.take(&self.now, seq - 1));
        }
    }

    /// Returns the path of the module whose range begins; `None` if the range is not a module or is too deep.
    fn path_of(&mut self, row: &Record, replay: &Replay) -> Option<String> {
        let name = replay.symbols.get(row.name);
        let path = match meaning(&name, None, &[]) {
            // This range is the forward of a torch.nn.Module, so its name is the path.
            _ if replay.symbols.get(row.api).as_ref() == Api::Module.as_str() => name.to_string(),
            Meaning::ModulePath(path) => path.to_owned(),
            Meaning::Level(level) if row.module == Symbol::NONE => level.to_owned(),
            Meaning::Level(level) => format!("{}.{level}", replay.symbols.get(row.module)),
            Meaning::Phase(_)
            | Meaning::Op(_)
            | Meaning::Step(_)
            | Meaning::Library
            | Meaning::Sharding(_) => return None,
        };
        // CUDA's libraries open ranges for their C++ functions, which are not modules.
        if path.contains("::") {
            return None;
        }
        if level(&path) > self.depth.followed {
            self.deeper.insert(path);
            return None;
        }
        Some(path)
    }

    fn begin(&mut self, row: &Record, replay: &Replay) {
        let call = self.path_of(row, replay).map(|path| {
            let recomputed = row.phase == replay.phases.backward;
            let (before, after, peak) = if recomputed {
                (CallState::PreForwardAc, CallState::PostForwardAc, None)
            } else {
                (CallState::PreForward, CallState::PostForward, Some(CallState::PeakForward))
            };
            self.enter(path, before, after, peak, row.seq)
        });
        self.training_threads.insert(row.tid);
        self.ranges.entry(row.tid).or_default().push((row.name, call));
    }

    fn enter(
        &mut self,
        path: String,
        before: CallState,
        after: CallState,
        peak: Option<CallState>,
        seq: i64,
    ) -> OpenCall {
        let keep = self.kept_calls(&path);
        let stats = self.modules.entry(path.clone()).or_default();
        // A module has at most as many backwards as forwards. If all forwards have one, this backward is the
        // rest of the last one, which rows of another owner interrupted.
        let resumed = before == CallState::PreBackward
            && stats.calls(before) > 0
            && stats.calls(before) >= stats.calls(CallState::PreForward);
        if !resumed {
            if let Some(peak) = peak {
                self.add(&path, peak, seq);
            }
            self.add(&path, before, seq);
        }
        let mut local_peak: BTreeMap<i32, i64> =
            self.now.iter().map(|(device, types)| (*device, total(types))).collect();
        let mut kept_peak = None;
        if let Some(series) = peak.and_then(|peak| self.modules.get(&path)?.history(peak)) {
            kept_peak = series.kept.len().checked_sub(1).filter(|_| series.calls as usize <= keep);
            if let Some(kept) = kept_peak.filter(|_| resumed) {
                let so_far = self.snapshots.get(&series.kept[kept]);
                local_peak = so_far.iter().map(|(device, types)| (*device, total(types))).collect();
            }
        }
        OpenCall {
            path,
            after,
            peak,
            local_peak,
            kept_peak,
            resumed,
            before: highest(&self.now),
            memory: CallMemory::default(),
        }
    }

    fn leave(&mut self, call: OpenCall, seq: i64) {
        let keep = self.kept_calls(&call.path);
        if call.after == CallState::PostForward {
            self.memories.end_call(&call.path, &call.memory, keep);
        }
        let stats = self.modules.entry(call.path.clone()).or_default();
        if call.after == CallState::PostForward {
            stats.retained = stats.retained.max(highest(&self.now) - call.before);
        }
        if call.resumed {
            let series = stats.series(call.after);
            series.calls = series.calls.saturating_sub(1);
            // If the end of the first part was kept, remove it, because the end of this part is recorded
            // below instead.
            if (series.calls as usize) < keep
                && let Some(first_part) = series.kept.pop()
            {
                self.snapshots.remove(&first_part);
            }
        }
        self.add(&call.path, call.after, seq);
    }

    fn end(&mut self, row: &Record) {
        let open = self.ranges.entry(row.tid).or_default();
        // Search below the innermost range, too: ranges of different kinds need not close in the reverse
        // order of their opening.
        let Some(at) = open.iter().rposition(|(name, _)| *name == row.name) else {
            self.unmatched += 1;
            return;
        };
        if let (_, Some(call)) = open.remove(at) {
            self.leave(call, row.seq);
        }
    }

    /// Ends the backward of the last call of the module at `path`, and the backwards of the calls inside it,
    /// because the backward of another call of this module begins.
    fn end_backward_of(&mut self, path: &str, seq: i64) {
        let Some(at) = self.backward.iter().position(|call| call.path == path) else { return };
        for call in self.backward.split_off(at).into_iter().rev() {
            self.leave(call, seq);
        }
    }

    fn follow_backward(&mut self, row: &Record, replay: &Replay) {
        let in_backward = row.phase == replay.phases.backward;
        if in_backward {
            self.training_threads.insert(row.tid);
        } else if !self.training_threads.contains(&row.tid) {
            return;
        }
        if !in_backward && self.backward.is_empty() || in_backward && row.module == Symbol::NONE {
            return;
        }
        // The accumulation of a gradient is an op outside all modules that comes between the rows of a
        // module, so it does not end the module's backward. If it allocated memory, that allocation would
        // have its own row.
        if in_backward && row.event == EventName::Op && row.module == Symbol::SCRIPT {
            return;
        }
        // A recomputed forward has its own ranges, so its rows neither begin nor end a backward.
        let recomputes = self.ranges.get(&row.tid).is_some_and(|open| {
            open.iter().flat_map(|(_, call)| call).any(|call| call.after == CallState::PostForwardAc)
        });
        if recomputes {
            return;
        }
        let module = if in_backward { replay.symbols.get(row.module).to_string() } else { String::new() };
        let is_on = |path: &str| {
            module.strip_prefix(path).is_some_and(|below| below.is_empty() || below.starts_with('.'))
        };
        while let Some(call) = self.backward.pop_if(|call| !is_on(&call.path)) {
            self.leave(call, row.seq);
        }
        for path in module_levels(&module).take(self.depth.followed) {
            // A container (`GPT.h`) is never called, so it has no states.
            let was_called = self.modules.contains_key(path);
            if was_called && !self.backward.iter().any(|call| call.path == path) {
                let call = self.enter(
                    path.to_owned(),
                    CallState::PreBackward,
                    CallState::PostBackward,
                    Some(CallState::PeakBackward),
                    row.seq,
                );
                self.backward.push(call);
            }
        }
    }

    fn look_for_peaks(&mut self, seq: i64) {
        let calls = self.ranges.values_mut().flatten().filter_map(|(_, call)| call.as_mut());
        for call in calls.chain(&mut self.backward) {
            let Some(state) = call.peak else { continue };
            for (device, types) in &self.now {
                let local = call.local_peak.entry(*device).or_default();
                if total(types) <= *local {
                    continue;
                }
                *local = total(types);
                let Some(stats) = self.modules.get_mut(&call.path) else { continue };
                let series = stats.series(state);
                if counts(*device, &self.now) {
                    series.highest = series.highest.max(*local);
                }
                if let Some(snapshot) = call.kept_peak.and_then(|kept| series.kept.get_mut(kept)) {
                    self.snapshots.replace(snapshot, *device, types, seq);
                }
            }
        }
    }
}
