//! The memory of each device from step to step, or from slice to slice of time.
//!
//! A level describes a step: the memory at the end of the step, and the highest total within the step. A
//! trace without steps has slices of equal time instead, fewer than twice [`MOST_SLICES`]. The lowest total
//! within a slice counts as the memory at its end.

use std::sync::Arc;

use memtrace_trace::memory::{Effect, MemoryKind};
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::device::Peak;
use crate::state::replay::{HOST, Metric, Replay, is_gpu};
use crate::state::step_inputs::{InputSizes, LargestInput, StepInputs};

/// When there would be twice this many slices, adjacent slices are joined in pairs.
const MOST_SLICES: usize = 128;
/// The width of a slice before any slices are joined, in ns.
const FIRST_WIDTH: i64 = 1_000_000;
/// The minimum size of blocks whose sizes are counted.
const LARGE: i64 = 1 << 20;
/// The maximum number of different sizes that are counted.
const MOST_SIZES: usize = 1 << 16;

/// A step, or a slice of time, of one device. Sizes are in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Level {
    /// The number of the step; -1 for a slice of time.
    pub step: i64,
    /// The end, in ns since the start of the trace.
    pub ts_ns: i64,
    /// The bytes allocated at the end of the step, or the lowest total within the slice.
    pub allocated: i64,
    /// The most bytes allocated within the step or slice.
    pub peak: i64,
    /// The owner of the row that reached `peak`.
    pub peak_owner: Owner,
    /// The bytes reserved by torch's allocator at the end.
    pub reserved: i64,
    /// The bytes outside torch's allocator at the end: the allocations of traced calls, the memory of other
    /// processes, and `context`.
    pub outside: i64,
    /// The part of `outside` that belongs to other processes.
    pub others: i64,
    /// Of `outside`, the bytes without a traced call that do not belong to other processes: the context,
    /// loaded kernels, workspaces.
    pub context: i64,
    /// The most bytes of live inputs that were allocated in this step or the step before.
    pub inputs: i64,
}

impl Default for Level {
    fn default() -> Self {
        let owner = Peak::default().owner;
        Level {
            step: -1,
            ts_ns: 0,
            allocated: 0,
            peak: 0,
            peak_owner: owner,
            reserved: 0,
            outside: 0,
            others: 0,
            context: 0,
            inputs: 0,
        }
    }
}

impl Level {
    /// Returns the memory in use on the device, as nvidia-smi shows it.
    #[must_use]
    pub fn used(&self) -> i64 {
        self.reserved.saturating_add(self.outside)
    }

    /// Joins two adjacent slices. The result has the end of `later`, the lower `allocated`, and the higher
    /// `peak` and `inputs`.
    fn join(self, later: Level) -> Level {
        let higher = if later.peak > self.peak { later } else { self };
        Level {
            step: self.step,
            allocated: self.allocated.min(later.allocated),
            peak: higher.peak,
            peak_owner: higher.peak_owner,
            inputs: self.inputs.max(later.inputs),
            ..later
        }
    }
}

/// The levels of one device.
#[derive(Clone, Debug)]
pub struct DeviceLevels {
    /// The CUDA ordinal.
    pub ordinal: i32,
    /// The finished steps.
    pub steps: Vec<Level>,
    /// The moment when this process used the most memory on the device, not counting other processes.
    pub highest: Level,
    /// The last, unfinished step at the moment of its highest use.
    pub unfinished: Level,
    slices: Vec<Level>,
    width_ns: i64,
    now: Level,
    /// The live bytes of inputs that were allocated in this step and in the step before. The step before
    /// counts because a data loader prefetches.
    inputs: [i64; 2],
    /// True once a sample has shown the memory of other processes.
    knows_others: bool,
    /// True once a sample has shown memory without a traced call.
    is_sampled: bool,
    /// For each large block size: its first and last step, and the op that first allocated it.
    sizes: FxHashMap<i64, (i64, i64, Symbol)>,
}

impl DeviceLevels {
    fn new(ordinal: i32) -> DeviceLevels {
        DeviceLevels {
            ordinal,
            steps: Vec::new(),
            highest: Level::default(),
            unfinished: Level::default(),
            slices: Vec::new(),
            width_ns: FIRST_WIDTH,
            now: Level::default(),
            inputs: [0; 2],
            knows_others: false,
            is_sampled: false,
            sizes: FxHashMap::default(),
        }
    }

    /// Returns the slices of time, which are empty once a step has begun.
    #[must_use]
    pub fn slices(&self) -> &[Level] {
        &self.slices
    }

    /// Returns the number of different sizes of at least 1 MiB that were allocated after `step`, and the
    /// number of these sizes that occur in a single step.
    #[must_use]
    pub fn sizes_after(&self, step: i64) -> (usize, usize) {
        let after = || self.sizes.values().filter(|(_, last, _)| *last > step);
        (after().count(), after().filter(|(first, last, _)| first == last).count())
    }

    /// Returns the `most` ops that allocated the most sizes that occur in only one step after `step`. Ops with
    /// equal counts are in the order of their names. Each op has the number of these sizes. Only blocks of at least 1 MiB count.
    #[must_use]
    pub fn ops_of_single_sizes(
        &self,
        step: i64,
        most: usize,
        symbols: &SymbolTable,
    ) -> Vec<(Arc<str>, usize)> {
        let mut ops: FxHashMap<Symbol, usize> = FxHashMap::default();
        for (first, last, op) in self.sizes.values() {
            if first == last && *last > step && *op != Symbol::NONE {
                *ops.entry(*op).or_default() += 1;
            }
        }
        let mut ops: Vec<_> = ops.into_iter().map(|(op, sizes)| (symbols.get(op), sizes)).collect();
        ops.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
        ops.truncate(most);
        ops
    }

    fn end_step(&mut self, step: i64) {
        self.steps.push(Level { step, ..self.now });
        self.now.peak = self.now.allocated;
        self.inputs = [0, self.inputs[0]];
        self.now.inputs = self.inputs[1];
        self.unfinished = self.now;
    }

    /// Continues the step that ended last.
    fn resume_step(&mut self) {
        if let Some(Level { peak, peak_owner, .. }) = self.steps.pop()
            && peak > self.now.peak
        {
            (self.now.peak, self.now.peak_owner) = (peak, peak_owner);
        }
    }

    fn feed(&mut self, row: &Record, replay: &Replay, step: i64) {
        let Some(device) = replay.find(self.ordinal) else { return };
        let totals = &device.totals;
        let now = &mut self.now;
        now.ts_ns = replay.ts_ns;
        now.step = step;
        now.allocated = totals.allocated;
        now.reserved = totals.reserved;
        now.outside = totals.get(Metric::Used).saturating_sub(totals.reserved);
        if row.event == EventName::Sample {
            // Before the first sample that has the memory of other processes, that memory was counted as
            // `context`. So discard `highest` and find it anew.
            if !self.knows_others && device.others().is_some() {
                (self.knows_others, self.highest) = (true, Level::default());
            }
            now.others = device.others().unwrap_or(0);
        }
        now.context = totals.untraced.saturating_sub(now.others).max(0);
        if !self.is_sampled && totals.untraced != 0 {
            self.is_sampled = true;
            self.fill_before_sample(totals.untraced);
        }
        let now = &mut self.now;
        match MemoryKind::changed_by(row.event) {
            Some((MemoryKind::Block, Effect::Alloc)) => {
                if row.category == Category::Input {
                    count_input(&mut self.inputs, step, step, row.delta_bytes, 1);
                }
                let known = self.sizes.len() < MOST_SIZES || self.sizes.contains_key(&row.delta_bytes);
                if row.delta_bytes >= LARGE && known {
                    self.sizes.entry(row.delta_bytes).or_insert((step, step, row.op)).1 = step;
                }
            }
            Some((MemoryKind::Block, Effect::Tag)) if row.category == Category::Input => {
                count_input(&mut self.inputs, step, step, row.delta_bytes, 1);
            }
            Some((MemoryKind::Block, Effect::Free)) => {
                if let Some(input) = replay.freed().filter(|block| block.owner.category == Category::Input) {
                    count_input(&mut self.inputs, input.owner.step, step, input.bytes, -1);
                }
            }
            _ => {}
        }
        now.inputs = now.inputs.max(self.inputs[0] + self.inputs[1]);
        if now.allocated > now.peak {
            now.peak = now.allocated;
            now.peak_owner = Owner::from_row(row);
        }
        if now.used() > self.unfinished.used() {
            self.unfinished = *now;
        } else {
            let Level { peak, peak_owner, inputs, .. } = *now;
            self.unfinished = Level { peak, peak_owner, inputs, ..self.unfinished };
        }
        if now.used() - now.others > self.highest.used() - self.highest.others {
            self.highest = *now;
        }
        if step < 0 {
            self.slice();
        } else if !self.slices.is_empty() {
            self.slices = Vec::new();
        }
    }

    /// Adds the untraced memory of the first sample to all levels before that sample, because the process had
    /// its context then, too. A later part of a rotated trace may begin with steps before its first sample.
    fn fill_before_sample(&mut self, untraced: i64) {
        let Level { others, context, .. } = self.now;
        for level in self.steps.iter_mut().chain(&mut self.slices).chain([&mut self.unfinished]) {
            level.outside = level.outside.saturating_add(untraced);
            (level.others, level.context) = (others, context);
        }
    }

    /// Adds the current state to the slices.
    fn slice(&mut self) {
        let at = |width: i64, ts: i64| usize::try_from(ts.max(0) / width).unwrap_or(usize::MAX);
        while at(self.width_ns, self.now.ts_ns) >= 2 * MOST_SLICES {
            self.width_ns = self.width_ns.saturating_mul(2);
            self.slices = self.slices.chunks(2).map(|two| two[0].join(two[two.len() - 1])).collect();
        }
        let place = at(self.width_ns, self.now.ts_ns);
        // A slice without a row repeats the end of the previous slice.
        let same = Level { peak: self.now.allocated, ..self.now };
        let last = self.slices.last().copied().unwrap_or(same);
        while self.slices.len() < place {
            self.slices.push(Level { peak: last.allocated, ..last });
        }
        match self.slices.get_mut(place) {
            Some(slice) => *slice = slice.join(same),
            None => self.slices.push(same),
        }
    }
}

/// Adds an input that was allocated in step `born` to the sums (`sign` 1), or removes it (-1), during `step`.
/// An input from before the previous step is ignored.
fn count_input(inputs: &mut [i64; 2], born: i64, step: i64, bytes: i64, sign: i64) {
    let age = usize::try_from(step.saturating_sub(born)).ok();
    if let Some(sum) = age.and_then(|age| inputs.get_mut(age)) {
        *sum = sum.saturating_add(sign * bytes).max(0);
    }
}

/// Returns true for an event that shows work of the program. Frees and tags do not, because they also occur
/// between steps and at the exit.
fn is_work(event: EventName) -> bool {
    use EventName::{Alloc, Brief, ExtAlloc, Oom, Op, RangeBegin, SegmentAlloc, SegmentMap};
    matches!(event, Alloc | Brief | ExtAlloc | Oom | Op | RangeBegin | SegmentAlloc | SegmentMap)
}

/// The levels of the devices of a process.
#[derive(Clone, Debug)]
pub struct Levels {
    /// The levels, by order of appearance of the devices.
    pub devices: Vec<DeviceLevels>,
    /// The highest step so far; -1 before the first.
    pub step: i64,
    /// The number of steps that ended because the next step began.
    pub ended: usize,
    /// The inputs of the steps.
    inputs: StepInputs,
    /// The highest step with work.
    worked: i64,
    /// True if removed parts (`MEMTRACE_KEEP`) ended step `worked`, and no work has followed.
    is_cut: bool,
    only: Option<i32>,
}

impl Levels {
    /// Creates the levels of the device `only`, or of all GPUs.
    #[must_use]
    pub fn new(only: Option<i32>) -> Levels {
        let inputs = StepInputs::default();
        Levels { devices: Vec::new(), step: -1, ended: 0, inputs, worked: -1, is_cut: false, only }
    }

    /// Returns the last step with work. A step in which the program only ends does not count: memtrace searches
    /// for holders then, after the variables of all functions are gone.
    #[must_use]
    pub fn last_step(&self) -> i64 {
        if self.worked >= 0 { self.worked } else { self.step }
    }

    /// Returns the largest input of the run, if the trace has inputs.
    #[must_use]
    pub fn largest_input(&self, symbols: &SymbolTable) -> Option<LargestInput> {
        self.inputs.largest(self.last_step(), symbols)
    }

    /// Returns the sizes of the inputs of the model that got the largest one.
    #[must_use]
    pub(crate) fn input_sizes(&self) -> InputSizes {
        self.inputs.sizes()
    }

    /// Adds a row, after the replay processed it.
    pub fn feed(&mut self, row: &Record, replay: &Replay) {
        if !replay.in_window() {
            return;
        }
        self.inputs.feed(row, &replay.symbols);
        if row.step > self.step {
            self.ended += usize::from(self.step >= 0);
            self.step = row.step;
        }
        // A step begins with its first work, not with its first row. Other rows come between two steps: the
        // program frees what it no longer needs, and memtrace writes tags and searches for holders. At the
        // exit, Python frees everything.
        // The change of memory while parts were removed belongs to no step. So the step before them ends here.
        if row.follows_removed_parts && self.worked >= 0 && !self.is_cut {
            self.is_cut = true;
            self.devices.iter_mut().for_each(|device| device.end_step(self.worked));
        }
        if row.step >= self.worked && is_work(row.event) {
            if row.step == self.worked {
                if self.is_cut {
                    self.devices.iter_mut().for_each(DeviceLevels::resume_step);
                }
            } else if self.worked >= 0 && !self.is_cut {
                self.devices.iter_mut().for_each(|device| device.end_step(self.worked));
            }
            (self.worked, self.is_cut) = (row.step, false);
        }
        // The memory of a free belongs to the device of the freed block.
        let ordinal = match MemoryKind::changed_by(row.event) {
            None if !matches!(row.event, EventName::Sample | EventName::Oom | EventName::Brief) => return,
            Some((MemoryKind::Block, Effect::Free)) => replay.freed().map_or(HOST, |block| block.device),
            _ => row.device,
        };
        if self.only.map_or(!is_gpu(ordinal), |only| only != ordinal) {
            return;
        }
        let step = self.worked;
        let at = self.devices.iter().position(|device| device.ordinal == ordinal).unwrap_or_else(|| {
            self.devices.push(DeviceLevels::new(ordinal));
            self.devices.len() - 1
        });
        self.devices[at].feed(row, replay, step);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Window;

    /// Returns each finished step with its allocated bytes. Each row is an event, a step and allocated bytes;
    /// a meta row follows removed parts.
    fn ends(rows: &[(EventName, i64, i64)]) -> Vec<(i64, i64)> {
        let mut replay = Replay::new(&SymbolTable::default(), Window::default(), Metric::Allocated);
        let mut levels = Levels::new(None);
        let mut allocated = 0;
        for (seq, (event, step, bytes)) in (1..).zip(rows) {
            allocated += bytes;
            let is_meta = *event == EventName::Meta;
            let row = Record {
                event: *event,
                seq,
                step: *step,
                device: if is_meta { HOST } else { 0 },
                delta_bytes: *bytes,
                allocated_bytes: allocated,
                alloc_id: if is_meta { 0 } else { seq },
                follows_removed_parts: is_meta && seq > 1,
                ..Record::default()
            };
            replay.feed(&row);
            levels.feed(&row, &replay);
        }
        levels.devices[0].steps.iter().map(|level| (level.step, level.allocated)).collect()
    }

    /// A step without detail may have only `brief` rows: one at its peak and one at its end.
    #[test]
    fn steps_with_brief_rows_alone_end_at_their_last_row() {
        use EventName::{Alloc, Brief, Meta};
        let brief = |step: i64, kept: i64| [(Brief, step, 100), (Brief, step, kept - 100)];
        let rows = [&[(Meta, -1, 0), (Alloc, 0, 10)][..], &brief(1, 5), &brief(2, 7), &brief(3, 0)].concat();
        assert_eq!(ends(&rows), [(0, 10), (1, 15), (2, 22)]);
    }

    #[test]
    fn ops_with_equally_many_single_sizes_are_in_the_order_of_their_names() {
        let symbols = SymbolTable::default();
        let names: Vec<String> = (0..20).map(|op| format!("op{op:02}")).collect();
        let ops: Vec<Symbol> = names.iter().rev().map(|name| symbols.intern(name)).collect();
        let mut device = DeviceLevels::new(0);
        device.sizes = (0..).zip(&ops).map(|(size, op)| (size, (3, 3, *op))).collect();
        let found = device.ops_of_single_sizes(1, 5, &symbols);
        let found: Vec<&str> = found.iter().map(|(op, _)| &**op).collect();
        assert_eq!(found, names[..5]);
    }

    #[test]
    fn memory_of_removed_parts_is_not_that_of_the_step_before_them() {
        use EventName::{Alloc, Live, Meta};
        let before = [(Meta, -1, 0), (Alloc, 0, 10), (Alloc, 1, 10), (Meta, -1, 0), (Live, 1, 500)];
        let with = |after: &[_]| ends(&[&before[..], after].concat());
        assert_eq!(with(&[(Alloc, 9, 10), (Alloc, 10, 10)]), [(0, 10), (1, 20), (9, 530)]);
        // The removed parts began and ended in the same step.
        assert_eq!(with(&[(Alloc, 1, 10), (Alloc, 2, 10)]), [(0, 10), (1, 530)]);
    }
}
