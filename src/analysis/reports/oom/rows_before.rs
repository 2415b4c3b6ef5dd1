//! The facts that the rows before an OOM show.

use std::collections::BTreeSet;

use memtrace_trace::model_fact::ModelFact;
use memtrace_trace::{Category, EventName};

use super::attention::AttentionFinder;
use super::cycles::Cycles;
use super::eval_mode::ForwardModes;
use super::evidence::StepTotals;
use super::forwards::Forwards;
use super::module_calls::ModuleCalls;
use super::step_groups::StepGroups;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::state::block::Block;
use crate::state::device::Device;
use crate::state::model_facts::{ModelFacts, is_module, root_of};
use crate::state::replay::Replay;

/// The bytes of a device in use at its last sample for which no row accounts.
pub(super) struct Untraced {
    pub(super) device: i32,
    pub(super) bytes: i64,
    /// The bytes of other processes, and of this process's memory on the host, if they are known.
    pub(super) others: Option<i64>,
    pub(super) host: Option<i64>,
}

/// The steps of a device.
pub(super) struct DeviceSteps {
    pub(super) device: i32,
    /// The current step, and its totals so far.
    step: i64,
    pub(super) totals: StepTotals,
    pub(super) finished: Vec<StepTotals>,
}

/// Facts from the rows before the OOM.
#[derive(Default)]
pub(super) struct RowsBefore {
    pub(super) oom: Option<Record>,
    /// The last OOM of an earlier attempt, before a root was called again, and the `seq` of the root's call that ran
    /// out of memory.
    pub(super) earlier: Option<(Record, i64)>,
    /// The `seq` of the last call of a root before the last OOM.
    root_of_oom: i64,
    pub(super) ooms: u64,
    /// The number of failed calls since the last successful one, which are the failed calls of this request.
    pub(super) failed: u64,
    pub(super) failed_of_oom: u64,
    pub(super) untraced: Vec<Untraced>,
    pub(super) steps: Vec<DeviceSteps>,
    /// For each device: the memory of each op and module in the latest steps.
    pub(super) groups: Vec<(i32, StepGroups)>,
    pub(super) forwards: Forwards,
    pub(super) cycles: Cycles,
    pub(super) modes: ForwardModes,
    pub(super) attention: AttentionFinder,
    pub(super) calls: ModuleCalls,
    pub(super) facts: ModelFacts,
    /// The roots that were called in evaluation mode after calls in training mode.
    pub(super) evaluated: BTreeSet<String>,
}

impl RowsBefore {
    /// Returns true if the last sample of the device has the process's memory on the host, which is in the
    /// device's memory, too.
    pub(super) fn shares_host(&self, device: i32) -> bool {
        self.untraced.iter().any(|untraced| untraced.device == device && untraced.host.is_some())
    }

    /// Takes over the host memory of a later sample if it is more: the host's memory grew before the request.
    pub(super) fn host_grew(&mut self, device: i32, later: i64) {
        for untraced in self.untraced.iter_mut().filter(|untraced| untraced.device == device) {
            if let Some(host) = &mut untraced.host {
                let more = later.saturating_sub(*host).max(0);
                untraced.bytes = untraced.bytes.saturating_add(more);
                *host = host.saturating_add(more);
            }
        }
    }

    pub(super) fn feed(&mut self, row: &Record, replay: &Replay, trace: &TraceFile) {
        let capacity = trace.meta.total_bytes(row.device);
        let device = replay.find(row.device);
        let totals = device.map(|device| device.totals).unwrap_or_default();
        if row.device_free_bytes >= 0 && capacity > 0 {
            let cache = device.and_then(Device::page_cache).unwrap_or(0);
            let used = capacity - row.device_free_bytes - cache;
            let bytes = (used - totals.reserved - totals.outside).max(0);
            self.untraced.retain(|untraced| untraced.device != row.device);
            let (others, host) = (device.and_then(Device::others), device.and_then(Device::host));
            self.untraced.push(Untraced { device: row.device, bytes, others, host });
        }
        self.forwards.feed(row, replay);
        self.cycles.feed(row, replay);
        self.modes.feed(row, replay);
        self.attention.feed(row, replay.step, &replay.symbols);
        self.calls.feed(row, replay);
        if self.facts.feed(row, &replay.symbols) {
            self.note_mode(row, &replay.symbols);
        }
        match row.event {
            EventName::Oom => {
                self.ooms += 1;
                // A new attempt calls a model again. PyTorch itself catches OOMs while it looks for an algorithm of
                // cuDNN.
                let before = self.oom.replace(*row);
                let began = std::mem::replace(&mut self.root_of_oom, self.calls.last_root);
                let before = before.filter(|before| before.seq < self.calls.last_root);
                self.earlier = before.map(|before| (before, began)).or(self.earlier);
                self.failed_of_oom = std::mem::take(&mut self.failed);
            }
            EventName::SegmentAlloc | EventName::SegmentMap if row.status != 0 => self.failed += 1,
            EventName::Alloc | EventName::SegmentAlloc | EventName::SegmentMap => self.failed = 0,
            _ => {}
        }
        if device.is_some() {
            let in_update = replay.phase == replay.phases.optimizer;
            let is_parameter = row.category == Category::Parameter && row.status == 0;
            let is_counted =
                matches!(row.event, EventName::Alloc | EventName::Free | EventName::Tag | EventName::Live);
            let more = if is_parameter && is_counted { row.delta_bytes } else { 0 };
            self.count_step(row.device, replay.step, totals.allocated, more, in_update);
            let at =
                self.groups.iter().position(|(ordinal, _)| *ordinal == row.device).unwrap_or_else(|| {
                    self.groups.push((row.device, StepGroups::default()));
                    self.groups.len() - 1
                });
            self.groups[at].1.feed(row, replay.step);
        }
    }

    /// Returns the bytes of modules' results that were live when an earlier request ran out of memory, in the
    /// same step, and are still live at `row`. Only results since the last call of a root before that request count.
    /// Earlier forwards, such as those of another model, do not belong to the attempt: their graph may be needed.
    pub(super) fn left_by_attempt(&self, live: &[Block], row: &Record, symbols: &SymbolTable) -> i64 {
        let is_same = |earlier: &Record| earlier.device == row.device && earlier.step == row.step;
        let Some((earlier, began)) = self.earlier.as_ref().filter(|(earlier, _)| is_same(earlier)) else {
            return 0;
        };
        let is_left = |block: &&Block| {
            (*began..earlier.seq).contains(&block.id)
                && block.owner.step == earlier.step
                && matches!(block.owner.category, Category::Activation | Category::AutogradDetail)
                && is_module(&symbols.or_dash(block.owner.module))
        };
        live.iter().filter(is_left).map(|block| block.bytes).sum()
    }

    /// Processes a mark with a fact about a model: keeps whether the model evaluates after it was trained.
    fn note_mode(&mut self, row: &Record, symbols: &SymbolTable) {
        let name = symbols.get(row.name);
        let Some((ModelFact::Evaluates(evaluates), path)) = ModelFact::parse(&name) else { return };
        // The mark may come before or after the row of its own call.
        if !evaluates {
            self.evaluated.remove(root_of(path));
        } else if self.calls.of_module(path, symbols) > 1 {
            self.evaluated.insert(root_of(path).to_owned());
        }
    }

    fn count_step(&mut self, device: i32, step: i64, allocated: i64, more_parameters: i64, in_update: bool) {
        let at = self.steps.iter().position(|steps| steps.device == device).unwrap_or_else(|| {
            let totals = StepTotals::default();
            self.steps.push(DeviceSteps { device, step, totals, finished: Vec::new() });
            self.steps.len() - 1
        });
        let DeviceSteps { step: current, totals, finished, .. } = &mut self.steps[at];
        if step > *current {
            if *current >= 0 {
                finished.push(*totals);
            }
            *current = step;
            let StepTotals { ended: began, parameters, .. } = *totals;
            *totals =
                StepTotals { began, ended: allocated, peak: began, peak_before_update: began, parameters };
        }
        totals.ended = allocated;
        totals.parameters = totals.parameters.saturating_add(more_parameters);
        totals.peak = totals.peak.max(allocated);
        if !in_update {
            totals.peak_before_update = totals.peak_before_update.max(allocated);
        }
    }
}
