//! The state of memory before, at the peak of and after each call of a module.

use std::collections::BTreeMap;

use memtrace_trace::ranges::{Meaning, meaning};
use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use super::super::mem_tracker::{ROUNDED, Types, type_of};
use super::memory::{CallMemory, Memories};
use crate::options::Options;
use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::replay::{HOST, Replay};

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

/// The change of a row, in bytes, with every block counted at its requested size, rounded up.
fn rounded(row: &Record) -> i64 {
    if row.rounded_bytes > 0 { row.rounded_bytes * row.delta_bytes.signum() } else { row.delta_bytes }
}

/// The bytes of each device, by reference type.
pub(super) type DeviceTypes = BTreeMap<i32, Types>;

pub(super) fn total(types: &Types) -> i64 {
    types.iter().sum()
}

/// All occurrences of one state of a module.
#[derive(Clone, Debug)]
pub(super) struct StateHistory {
    pub(super) state: CallState,
    pub(super) calls: u64,
    /// The memory in the first calls.
    pub(super) kept: Vec<DeviceTypes>,
    /// The memory in the last call.
    pub(super) last: DeviceTypes,
    /// The highest total of a device over all calls.
    pub(super) highest: i64,
}

/// The states of one module.
#[derive(Clone, Debug, Default)]
pub(super) struct ModuleStats {
    /// In the order of their first occurrence, as in MemTracker.
    pub(super) states: Vec<StateHistory>,
    /// The maximum growth of a forward call, in bytes: after minus before.
    pub(super) retained: i64,
}

impl ModuleStats {
    fn add(&mut self, state: CallState, snapshot: DeviceTypes, keep: usize) {
        let at = match self.states.iter().position(|series| series.state == state) {
            Some(at) => at,
            None => {
                let series =
                    StateHistory { state, calls: 0, kept: Vec::new(), last: DeviceTypes::new(), highest: 0 };
                self.states.push(series);
                self.states.len() - 1
            }
        };
        let series = &mut self.states[at];
        series.calls += 1;
        series.highest = series.highest.max(highest(&snapshot));
        if series.kept.len() < keep {
            series.kept.push(snapshot.clone());
        }
        series.last = snapshot;
    }

    /// Replaces the snapshot of the last call by a higher one.
    fn raise(&mut self, state: CallState, snapshot: &DeviceTypes, keep: usize) {
        if let Some(series) = self.states.iter_mut().find(|series| series.state == state) {
            series.highest = series.highest.max(highest(snapshot));
            if series.calls as usize <= keep
                && let Some(last) = series.kept.last_mut()
            {
                last.clone_from(snapshot);
            }
            series.last.clone_from(snapshot);
        }
    }

    pub(super) fn of(&self, state: CallState) -> Option<&StateHistory> {
        self.states.iter().find(|series| series.state == state)
    }
}

fn highest(snapshot: &DeviceTypes) -> i64 {
    snapshot.iter().filter(|(device, _)| **device != HOST).map(|(_, types)| total(types)).max().unwrap_or(0)
}

/// A call in progress.
struct OpenCall {
    path: String,
    /// The state to record at its end.
    after: CallState,
    /// The state to record at its peak; none in a recomputation.
    peak: Option<CallState>,
    local_peak: BTreeMap<i32, i64>,
    at_peak: DeviceTypes,
    before: i64,
    memory: CallMemory,
}

pub(super) struct Tracker {
    depth: usize,
    keep: usize,
    op_boundary: bool,
    rounded: bool,
    device: Option<i32>,
    now: DeviceTypes,
    /// The open ranges of each thread; the call is `None` for a range that is not a module, or is too deep.
    ranges: FxHashMap<i32, Vec<(Symbol, Option<OpenCall>)>>,
    backward: Vec<OpenCall>,
    pub(super) modules: FxHashMap<String, ModuleStats>,
    pub(super) memories: Memories,
    pub(super) unmatched: u64,
}

impl Tracker {
    pub(super) fn new(depth: usize, keep: usize, options: &Options) -> Tracker {
        Tracker {
            depth,
            keep,
            op_boundary: options.is_set("op-boundary"),
            rounded: options.is_set(ROUNDED.name),
            device: options.device,
            now: DeviceTypes::new(),
            ranges: FxHashMap::default(),
            backward: Vec::new(),
            modules: FxHashMap::default(),
            memories: Memories::default(),
            unmatched: 0,
        }
    }

    /// The number of module calls that the trace leaves open.
    pub(super) fn open_calls(&self) -> usize {
        self.ranges.values().flatten().filter(|(_, call)| call.is_some()).count()
    }

    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if replay.in_window() {
            match row.event {
                EventName::RangeBegin => self.begin(row, replay),
                EventName::RangeEnd => self.end(row),
                // The state before a call excludes its first row.
                EventName::Free | EventName::Tag => {}
                EventName::Io => {
                    let open = self.ranges.entry(row.tid).or_default();
                    if let Some((_, Some(call))) = open.last_mut() {
                        self.memories.add_io(&mut call.memory, row, &replay.symbols);
                    }
                }
                _ => self.follow_backward(row, replay),
            }
        }
        let block = row.event.is_block() || matches!(row.event, EventName::HostAlloc | EventName::HostFree);
        if block && self.device.is_none_or(|only| only == row.device) {
            let types = self.now.entry(row.device).or_default();
            let bytes = &mut types[type_of(row.category)];
            let change = if self.rounded { rounded(row) } else { row.delta_bytes };
            *bytes = bytes.wrapping_add(change);
            self.memories.add_block(row, rounded(row), &replay.symbols);
        }
        if !replay.in_window() {
            return;
        }
        let is_boundary =
            if self.op_boundary { row.event == EventName::Op } else { row.event == EventName::Alloc };
        if is_boundary {
            self.look_for_peaks();
        }
    }

    /// The path of the module whose range opens; `None` when the range is not a module, or is too deep.
    fn path_of(&self, row: &Record, replay: &Replay) -> Option<String> {
        let name = replay.symbols.get(row.name);
        let path = match meaning(&name, None, &[]) {
            // The forward of a torch.nn.Module: its name is its path.
            _ if replay.symbols.get(row.api).as_ref() == Api::Module.as_str() => name.to_string(),
            Meaning::ModulePath(path) => path.to_owned(),
            Meaning::Level(level) if row.module == Symbol::NONE => level.to_owned(),
            Meaning::Level(level) => format!("{}.{level}", replay.symbols.get(row.module)),
            Meaning::Phase(_) | Meaning::Op(_) | Meaning::Step(_) | Meaning::Library => return None,
        };
        // CUDA's libraries open ranges for their C++ functions, which are not modules.
        (path.matches('.').count() < self.depth && !path.contains("::")).then_some(path)
    }

    fn begin(&mut self, row: &Record, replay: &Replay) {
        let call = self.path_of(row, replay).map(|path| {
            let recomputed = row.phase == replay.phases.backward;
            let (before, after, peak) = if recomputed {
                (CallState::PreForwardAc, CallState::PostForwardAc, None)
            } else {
                (CallState::PreForward, CallState::PostForward, Some(CallState::PeakForward))
            };
            self.enter(path, before, after, peak)
        });
        self.ranges.entry(row.tid).or_default().push((row.name, call));
    }

    fn enter(
        &mut self,
        path: String,
        before: CallState,
        after: CallState,
        peak: Option<CallState>,
    ) -> OpenCall {
        let stats = self.modules.entry(path.clone()).or_default();
        if let Some(peak) = peak {
            stats.add(peak, self.now.clone(), self.keep);
        }
        stats.add(before, self.now.clone(), self.keep);
        OpenCall {
            path,
            after,
            peak,
            local_peak: self.now.iter().map(|(device, types)| (*device, total(types))).collect(),
            at_peak: self.now.clone(),
            before: highest(&self.now),
            memory: CallMemory::default(),
        }
    }

    fn leave(&mut self, call: OpenCall) {
        if call.after == CallState::PostForward {
            self.memories.end_call(&call.path, &call.memory, self.keep);
        }
        let stats = self.modules.entry(call.path).or_default();
        if call.after == CallState::PostForward {
            stats.retained = stats.retained.max(highest(&self.now) - call.before);
        }
        stats.add(call.after, self.now.clone(), self.keep);
    }

    fn end(&mut self, row: &Record) {
        let open = self.ranges.entry(row.tid).or_default();
        // Ranges of different kinds may close in another order than they opened.
        let Some(at) = open.iter().rposition(|(name, _)| *name == row.name) else {
            self.unmatched += 1;
            return;
        };
        if let (_, Some(call)) = open.remove(at) {
            self.leave(call);
        }
    }

    fn follow_backward(&mut self, row: &Record, replay: &Replay) {
        let in_backward = row.phase == replay.phases.backward;
        if !in_backward && self.backward.is_empty() || in_backward && row.module == Symbol::NONE {
            return;
        }
        // The accumulation of a gradient belongs to no module and comes between the rows of a module. An
        // allocation would have its own row.
        if in_backward && row.event == EventName::Op && row.module == Symbol::SCRIPT {
            return;
        }
        // A recomputed forward has its own ranges.
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
            self.leave(call);
        }
        let ends = module.match_indices('.').map(|(end, _)| end).chain([module.len()]);
        for path in ends.take(self.depth).map(|end| &module[..end]) {
            // A container (`GPT.h`) is never called, so it has no states.
            let was_called = self.modules.contains_key(path);
            if was_called && !self.backward.iter().any(|call| call.path == path) {
                let call = self.enter(
                    path.to_owned(),
                    CallState::PreBackward,
                    CallState::PostBackward,
                    Some(CallState::PeakBackward),
                );
                self.backward.push(call);
            }
        }
    }

    fn look_for_peaks(&mut self) {
        let calls = self.ranges.values_mut().flatten().filter_map(|(_, call)| call.as_mut());
        for call in calls.chain(&mut self.backward) {
            let Some(state) = call.peak else { continue };
            let mut raised = false;
            for (device, types) in &self.now {
                let local = call.local_peak.entry(*device).or_default();
                if total(types) > *local {
                    *local = total(types);
                    call.at_peak.insert(*device, *types);
                    raised = true;
                }
            }
            if raised && let Some(stats) = self.modules.get_mut(&call.path) {
                stats.raise(state, &call.at_peak, self.keep);
            }
        }
    }
}
