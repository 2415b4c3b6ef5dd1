//! The blocks, ops and module calls of one step on one device.
//!
//! Time is counted in allocations: a block lives from the allocation `birth` up to the one before `death`. Memory can
//! only rise at an allocation, so the peak is at one. The memory of a [`StepRecorder`] grows with the live blocks and
//! with one step.

use memtrace_trace::EventName;
use rustc_hash::FxHashMap;

use crate::read::record::{Columns, Record};
use crate::read::symbols::Symbol;
use crate::state::block::Owner;
use crate::state::categories::Phases;

/// The columns that a [`StepRecorder`] reads beside those of the replay.
pub(super) const COLUMNS: Columns = Columns::of(&[
    "ts_ns",
    "status",
    "device",
    "alloc_id",
    "requested_bytes",
    "delta_bytes",
    "allocated_bytes",
    "op",
    "module",
    "phase",
    "category",
    "latency_ns",
    "api",
    "name",
]);

/// No op call: a block outside all ops, or one that no op freed.
pub(super) const NO_CALL: u32 = u32::MAX;
/// The death of a block that is live at the end of the step.
pub(super) const ALIVE: u32 = u32::MAX;

/// A block in the step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Life {
    /// Its `alloc_id`.
    pub(super) id: i64,
    /// The allocation that made it; 0 also for a block from an earlier step.
    pub(super) birth: u32,
    /// The first allocation at which it is gone.
    pub(super) death: u32,
    /// True if an earlier step allocated it.
    pub(super) is_older: bool,
    /// The size in bytes.
    pub(super) bytes: i64,
    /// The requested size in bytes.
    pub(super) requested: i64,
    /// Its owner, by the rows so far.
    pub(super) owner: Owner,
    /// The module at its allocation, which a tag does not change.
    pub(super) born_in: Symbol,
    /// The outermost op that allocated it: an index of [`Step::ops`].
    pub(super) call: u32,
    /// The outermost op that freed it.
    pub(super) freed_by: u32,
}

/// An allocation.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    /// The total behind it, in bytes.
    pub(super) allocated: i64,
    pub(super) seq: i64,
    pub(super) ts_ns: i64,
    pub(super) owner: Owner,
    /// The block: an index of [`Step::lives`]. `None` for a request that ran out of memory.
    pub(super) life: Option<u32>,
    /// True if it is in the window of the options.
    pub(super) in_window: bool,
}

/// The call of an outermost op, or of a module.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    /// The op, or the module.
    pub(super) name: Symbol,
    /// The module around it.
    pub(super) module: Symbol,
    pub(super) phase: Symbol,
    /// Its allocations: from the first to the one behind the last.
    pub(super) from: u32,
    pub(super) to: u32,
}

/// One step.
#[derive(Debug, Default)]
pub(super) struct Step {
    pub(super) lives: Vec<Life>,
    pub(super) allocations: Vec<Allocation>,
    pub(super) ops: Vec<Call>,
    pub(super) modules: Vec<Call>,
    /// The allocation before which the optimizer's step begins.
    pub(super) optimizer_at: Option<u32>,
    /// The total at the end, in bytes.
    pub(super) end_allocated: i64,
}

impl Step {
    /// The number of allocations.
    pub(super) fn end(&self) -> u32 {
        self.allocations.len() as u32
    }

    /// The last request that ran out of memory, as the number of allocations before it.
    pub(super) fn oom(&self) -> Option<u32> {
        let at = self.allocations.iter().rposition(|allocation| allocation.life.is_none())?;
        Some(at as u32)
    }

    /// The op call of an index.
    pub(super) fn op(&self, call: u32) -> Option<&Call> {
        self.ops.get(call as usize)
    }
}

/// Records the steps of one device.
pub(super) struct StepRecorder {
    device: i32,
    phases: Phases,
    module_api: Symbol,
    step: i64,
    now: Step,
    /// The live blocks, by id: indices of `now.lives`.
    live: FxHashMap<i64, u32>,
    /// The frees of the step: time and block.
    frees: Vec<(i64, u32)>,
    /// The modules whose calls are open.
    open: Vec<Call>,
}

impl StepRecorder {
    pub(super) fn new(device: i32, phases: Phases, module_api: Symbol) -> StepRecorder {
        StepRecorder {
            device,
            phases,
            module_api,
            step: i64::MIN,
            now: Step::default(),
            live: FxHashMap::default(),
            frees: Vec::new(),
            open: Vec::new(),
        }
    }

    pub(super) fn device(&self) -> i32 {
        self.device
    }

    /// Returns true if a row with the current step `step` begins another one: [`StepRecorder::next`] comes before
    /// [`StepRecorder::feed`].
    pub(super) fn is_next(&self, step: i64) -> bool {
        step > self.step
    }

    /// The step so far.
    pub(super) fn step(&self) -> &Step {
        &self.now
    }

    /// Begins the next step, in which the live blocks go on.
    pub(super) fn next(&mut self, step: i64) {
        self.step = step;
        let mut lives: Vec<Life> =
            self.now.lives.iter().filter(|life| life.death == ALIVE).copied().collect();
        self.live.clear();
        for (index, life) in lives.iter_mut().enumerate() {
            *life = Life { birth: 0, is_older: true, call: NO_CALL, ..*life };
            self.live.insert(life.id, index as u32);
        }
        let end_allocated = self.now.end_allocated;
        self.now = Step { lives, end_allocated, ..Step::default() };
        self.frees.clear();
        for call in &mut self.open {
            call.from = 0;
        }
    }

    /// Takes a row of the step.
    pub(super) fn feed(&mut self, row: &Record, in_window: bool) {
        let phase = row.phase;
        let is_here = row.device == self.device;
        if phase == self.phases.optimizer && row.event == EventName::Op {
            let at = self.now.end();
            self.now.optimizer_at.get_or_insert(at);
        }
        match row.event {
            EventName::Alloc | EventName::Live if is_here && row.status == 0 => self.alloc(row, in_window),
            EventName::Free if is_here => self.free(row),
            EventName::Tag if is_here && row.delta_bytes > 0 => {
                if let Some(index) = self.live.get(&row.alloc_id) {
                    self.now.lives[*index as usize].owner = Owner::of(row);
                }
            }
            EventName::Oom if is_here => {
                let allocated = row.allocated_bytes.saturating_add(row.requested_bytes.max(0));
                self.allocation(row, allocated, None, in_window);
            }
            EventName::Op => self.op(row),
            EventName::RangeBegin if row.api == self.module_api => {
                let from = self.now.end();
                self.open.push(Call { name: row.name, module: row.module, phase, from, to: from });
            }
            EventName::RangeEnd if row.api == self.module_api => {
                // A call that raised an exception may leave open ones above it.
                while let Some(call) = self.open.pop() {
                    let is_same = call.name == row.name;
                    self.now.modules.push(Call { to: self.now.end(), ..call });
                    if is_same {
                        break;
                    }
                }
            }
            _ => {}
        }
    }

    fn allocation(&mut self, row: &Record, allocated: i64, life: Option<u32>, in_window: bool) {
        if row.phase == self.phases.optimizer {
            let at = self.now.end();
            self.now.optimizer_at.get_or_insert(at);
        }
        let (seq, ts_ns, owner) = (row.seq, row.ts_ns, Owner::of(row));
        self.now.allocations.push(Allocation { allocated, seq, ts_ns, owner, life, in_window });
    }

    fn alloc(&mut self, row: &Record, in_window: bool) {
        if self.live.contains_key(&row.alloc_id) {
            return;
        }
        let index = self.now.lives.len() as u32;
        let is_older = row.event == EventName::Live;
        self.now.lives.push(Life {
            id: row.alloc_id,
            birth: if is_older { 0 } else { self.now.end() },
            death: ALIVE,
            is_older,
            bytes: row.delta_bytes,
            requested: if row.requested_bytes >= 0 { row.requested_bytes } else { row.delta_bytes },
            owner: Owner::of(row),
            born_in: row.module,
            call: NO_CALL,
            freed_by: NO_CALL,
        });
        self.live.insert(row.alloc_id, index);
        if !is_older {
            self.allocation(row, row.allocated_bytes, Some(index), in_window);
        }
        self.now.end_allocated = row.allocated_bytes;
    }

    fn free(&mut self, row: &Record) {
        self.now.end_allocated = row.allocated_bytes;
        let Some(index) = self.live.remove(&row.alloc_id) else { return };
        self.now.lives[index as usize].death = self.now.end();
        self.frees.push((row.ts_ns, index));
    }

    /// An op ended. Of nested ones the outermost ends last.
    fn op(&mut self, row: &Record) {
        let start = row.ts_ns.saturating_sub(row.latency_ns);
        let (index, to) = (self.now.ops.len() as u32, self.now.end());
        let mut from = to;
        while from > 0 && self.now.allocations[from as usize - 1].ts_ns >= start {
            from -= 1;
            if let Some(life) = self.now.allocations[from as usize].life {
                self.now.lives[life as usize].call = index;
            }
        }
        for (at, life) in self.frees.iter().rev() {
            if *at < start {
                break;
            }
            self.now.lives[*life as usize].freed_by = index;
        }
        self.now.ops.push(Call { name: row.op, module: row.module, phase: row.phase, from, to });
    }
}
