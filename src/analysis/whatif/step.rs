//! The blocks, ops and module calls of one step on one device.
//!
//! Time is counted in allocations: a block lives from the allocation `birth` up to the allocation before
//! `death`. Memory can only rise at an allocation, so the peak is at one. The memory that a [`StepRecorder`]
//! needs grows with the live blocks and with [`StepRecorder::rows`], which its caller limits.

use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;

use super::claims::Claims;
use super::sizes::FLOAT;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::{Owner, is_unknown_form};
use crate::state::categories::Phases;

/// Returns the columns of `wanted`, and the columns that a [`StepRecorder`] and [`super::Contents`] read in
/// addition to the replay's columns.
pub(crate) fn with_columns(wanted: Wanted) -> Wanted {
    const BLOCK: Columns = Columns::of(&["requested_bytes", "stream", "pool", "dtype", "shape"]);
    const CALL: Columns = Columns::of(&["tid", "api", "name", "module"]);
    wanted
        .plus(EventName::Alloc, BLOCK)
        .plus(EventName::Live, BLOCK)
        .plus(EventName::Oom, BLOCK)
        .plus(EventName::Free, Columns::of(&["ts_ns"]))
        .plus(EventName::Op, Columns::of(&["ts_ns", "latency_ns", "op", "module"]))
        .plus(EventName::RangeBegin, CALL)
        .plus(EventName::RangeEnd, CALL)
        .plus(EventName::Mark, crate::state::model_facts::COLUMNS)
}

/// The value of [`Life::call`] if no op allocated the block, and of [`Life::freed_by`] if no op freed it.
pub(super) const NO_CALL: u32 = u32::MAX;
/// The id of a request that ran out of memory, which made no block.
pub(super) const FAILED: i64 = -1;
/// The death of a block that is live at the end of the step.
pub(super) const ALIVE: u32 = u32::MAX;

/// The work for a step also grows with its live blocks. So a step with fewer than one row for this many live
/// blocks is recorded together with the next step.
const BLOCKS_PER_ROW: usize = 16;

/// The type of a tensor, as far as predictions distinguish types.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum DType {
    /// The trace does not have the type.
    #[default]
    Unknown,
    Float32,
    /// `bfloat16` or `float16`.
    Half,
    /// Another type: integers, flags, packed values.
    Other,
}

/// The symbols of the names of types.
#[derive(Clone, Copy, Debug)]
pub(super) struct TypeSymbols {
    float32: Symbol,
    half: [Symbol; 2],
}

impl TypeSymbols {
    pub(super) fn new(symbols: &SymbolTable) -> TypeSymbols {
        let [float32, bfloat16, float16] =
            ["float32", "bfloat16", "float16"].map(|name| symbols.intern(name));
        TypeSymbols { float32, half: [bfloat16, float16] }
    }

    fn dtype(self, dtype: Symbol) -> DType {
        match dtype {
            _ if is_unknown_form(dtype) => DType::Unknown,
            _ if dtype == self.float32 => DType::Float32,
            _ if self.half.contains(&dtype) => DType::Half,
            _ => DType::Other,
        }
    }
}

/// A block in the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Life {
    /// The `alloc_id`.
    pub(super) id: i64,
    /// The index of the allocation or opening row that made the block; 0 for a block from an earlier step.
    pub(super) birth: u32,
    /// The index of the first allocation after the block was freed; [`ALIVE`] if it is not freed in the step.
    pub(super) death: u32,
    /// True if an earlier step, or an earlier part of the trace, allocated the block.
    pub(super) is_older: bool,
    /// The size in bytes.
    pub(super) bytes: i64,
    /// The requested size in bytes.
    pub(super) requested: i64,
    /// The owner according to the rows so far.
    pub(super) owner: Owner,
    /// The module in which the block was allocated. A tag does not change it.
    pub(super) born_in: Symbol,
    /// The type of its tensor.
    pub(super) dtype: DType,
    /// The shape of its tensor; unknown if [`is_unknown_form`] says so.
    pub(super) shape: Symbol,
    /// The outermost op that allocated the block: an index of [`RecordedStep::ops`], or [`NO_CALL`].
    pub(super) call: u32,
    /// The outermost op that freed the block, or [`NO_CALL`].
    pub(super) freed_by: u32,
    pub(super) stream: i64,
    /// The private pool; 0 if the block is not in one.
    pub(super) pool: i64,
}

impl Life {
    /// Returns the bytes of one value. An unknown type counts as float32, and a type that is neither float32
    /// nor 16-bit as one byte, as in 8-bit state.
    pub(super) fn item(&self) -> i64 {
        match self.dtype {
            DType::Unknown | DType::Float32 => FLOAT,
            DType::Half => FLOAT / 2,
            DType::Other => 1,
        }
    }

    /// Returns true if both blocks are the same for a prediction: they may differ in their ids, and in the numbers of
    /// the steps that allocated them.
    fn is_like(&self, other: &Life) -> bool {
        let without_names = |life: &Life| Life { id: 0, owner: comparable(life.owner), ..*life };
        without_names(self) == without_names(other)
    }

    /// Returns the block for which a failed request asked, as if it had been allocated. `at` is the number of
    /// allocations before the request.
    pub(super) fn of_failed(request: &Allocation, at: u32) -> Life {
        Life {
            id: FAILED,
            birth: at,
            death: at + 1,
            is_older: false,
            bytes: request.requested,
            requested: request.requested,
            owner: request.owner,
            born_in: request.owner.module,
            dtype: request.dtype,
            shape: request.shape,
            call: NO_CALL,
            freed_by: NO_CALL,
            stream: 0,
            pool: 0,
        }
    }
}

/// Returns the owner that `row` names. The predictions do not distinguish the buffers of FSDP.
fn without_sharding(row: &Record) -> Owner {
    Owner { category: row.category.without_sharding(), ..Owner::from_row(row) }
}

/// Returns the owner with 0 in place of its step or, for a block from before the first step, -1.
fn comparable(owner: Owner) -> Owner {
    Owner { step: owner.step.clamp(-1, 0), ..owner }
}

/// An allocation, a request that ran out of memory, or the opening row of a block that was live when a part
/// of the trace began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Allocation {
    /// The total after the allocation, in bytes.
    pub(super) allocated: i64,
    pub(super) seq: i64,
    pub(super) ts_ns: i64,
    /// The time of the last free before the allocation; `i64::MIN` if there was no free.
    pub(super) freed_ns: i64,
    pub(super) owner: Owner,
    /// The requested size in bytes.
    pub(super) requested: i64,
    /// The type of the tensor.
    pub(super) dtype: DType,
    /// The shape of the tensor; unknown if [`is_unknown_form`] says so.
    pub(super) shape: Symbol,
    /// The block: an index of [`RecordedStep::lives`]. `None` for a request that ran out of memory.
    pub(super) life: Option<u32>,
    /// True if the allocation is in the window of the options.
    pub(super) in_window: bool,
}

impl Allocation {
    /// Returns true if both are the same for a prediction: they may differ in their rows, times and steps.
    fn is_like(&self, other: &Allocation) -> bool {
        let without_place = |each: &Allocation| Allocation {
            seq: 0,
            ts_ns: 0,
            freed_ns: 0,
            owner: comparable(each.owner),
            ..*each
        };
        without_place(self) == without_place(other)
    }
}

/// A call of an outermost op, or of a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StepCall {
    /// The op, or the module.
    pub(super) name: Symbol,
    /// The enclosing module.
    pub(super) module: Symbol,
    pub(super) phase: Symbol,
    /// The first allocation of the call. `to` is the allocation after its last one.
    pub(super) from: u32,
    pub(super) to: u32,
}

/// One step.
#[derive(Debug, Default)]
pub(super) struct RecordedStep {
    pub(super) lives: Vec<Life>,
    pub(super) allocations: Vec<Allocation>,
    pub(super) ops: Vec<StepCall>,
    /// For each op: the range of the allocations that belong to it and not to an enclosing op.
    own: Vec<(u32, u32)>,
    pub(super) modules: Vec<StepCall>,
    /// The blocks that were freed, in order: indices of `lives`.
    pub(super) frees: Vec<u32>,
    /// The allocation before which the optimizer's step begins; `None` if no optimizer runs.
    pub(super) optimizer_at: Option<u32>,
    /// The total at the end, in bytes.
    pub(super) end_allocated: i64,
    /// The time of the last free; `i64::MIN` if there was no free.
    pub(super) freed_ns: i64,
    is_wanted: bool,
}

impl RecordedStep {
    /// Returns true if every change has the same effect in both steps: they differ only in ids, rows, times and the
    /// numbers of steps.
    pub(super) fn is_like(&self, other: &RecordedStep) -> bool {
        let RecordedStep { lives, allocations, ops, own, modules, frees, .. } = self;
        (self.optimizer_at, self.end_allocated, self.is_wanted, self.is_first())
            == (other.optimizer_at, other.end_allocated, other.is_wanted, other.is_first())
            && (ops, own, modules, frees) == (&other.ops, &other.own, &other.modules, &other.frees)
            && lives.len() == other.lives.len()
            && allocations.len() == other.allocations.len()
            && lives.iter().zip(&other.lives).all(|(life, other)| life.is_like(other))
            && allocations.iter().zip(&other.allocations).all(|(each, other)| each.is_like(other))
    }

    /// Returns true for the first step of the program, which also sets things up.
    pub(super) fn is_first(&self) -> bool {
        self.allocations.first().is_none_or(|first| first.owner.step <= 0)
    }

    /// Returns the number of rows.
    pub(super) fn rows(&self) -> usize {
        self.allocations.len() + self.ops.len() + self.modules.len() + self.frees.len()
    }

    /// Returns the number of allocations.
    pub(super) fn end(&self) -> u32 {
        self.allocations.len() as u32
    }

    /// Returns the last request that ran out of memory, as its index among the allocations.
    pub(super) fn oom(&self) -> Option<u32> {
        let at = self.allocations.iter().rposition(|allocation| allocation.life.is_none())?;
        Some(at as u32)
    }

    /// Returns true if the types of most bytes that the step allocates are known.
    pub(super) fn has_types(&self) -> bool {
        let new = self.lives.iter().filter(|life| !life.is_older);
        let bytes =
            |all: &mut dyn Iterator<Item = &Life>| all.map(|life| life.bytes).fold(0, i64::saturating_add);
        let known = bytes(&mut new.clone().filter(|life| life.dtype != DType::Unknown));
        known > bytes(&mut new.clone()) / 2
    }

    /// Returns the op call with this index; `None` for [`NO_CALL`].
    pub(super) fn op(&self, call: u32) -> Option<&StepCall> {
        self.ops.get(call as usize)
    }

    /// Returns the allocations of an outermost op. No two ops share an allocation.
    pub(super) fn allocations_of(&self, call: u32) -> &[Allocation] {
        self.own.get(call as usize).map_or(&[], |(from, to)| &self.allocations[*from as usize..*to as usize])
    }

    /// Returns true if an allocation of the step is in the window of the options.
    pub(super) fn is_wanted(&self) -> bool {
        self.is_wanted
    }
}

/// Records the steps of one device.
pub(super) struct StepRecorder {
    device: i32,
    phases: Phases,
    module_api: Symbol,
    types: TypeSymbols,
    /// The type of the latest buffer that gathered parameters. FSDP resizes the storage of an unsharded
    /// parameter, so that the trace has no type for it.
    gathered: DType,
    step: i64,
    now: RecordedStep,
    /// The live blocks, by id: indices of `now.lives`.
    live: FxHashMap<i64, u32>,
    /// The claims of the outermost ops on the allocations of the step. `freeing` has their claims on its
    /// frees.
    allocating: Claims,
    freeing: Claims,
    /// The module calls that are open, by thread, and their number.
    open: FxHashMap<i32, Vec<StepCall>>,
    open_calls: usize,
}

impl StepRecorder {
    pub(super) fn new(device: i32, phases: Phases, module_api: Symbol, types: TypeSymbols) -> StepRecorder {
        StepRecorder {
            device,
            phases,
            module_api,
            types,
            gathered: DType::Unknown,
            step: i64::MIN,
            now: RecordedStep { freed_ns: i64::MIN, ..RecordedStep::default() },
            live: FxHashMap::default(),
            allocating: Claims::default(),
            freeing: Claims::default(),
            open: FxHashMap::default(),
            open_calls: 0,
        }
    }

    pub(super) fn device(&self) -> i32 {
        self.device
    }

    /// Processes the step of a row. Returns true if the row begins a new recorded step; then the caller must
    /// call [`StepRecorder::next`] before [`StepRecorder::feed`]. Returns false if the step is the same, or
    /// if the rows so far are too few for a recorded step of their own (see [`BLOCKS_PER_ROW`]).
    pub(super) fn begins(&mut self, step: i64) -> bool {
        let is_later = step > self.step;
        self.step = self.step.max(step);
        is_later && self.rows().saturating_mul(BLOCKS_PER_ROW) >= self.live.len()
    }

    /// Returns the number of rows of the step that are kept.
    pub(super) fn rows(&self) -> usize {
        self.now.rows() + self.open_calls
    }

    /// Fills in the ops that allocated and freed the blocks of the step.
    fn fill_in_ops(&mut self) {
        let RecordedStep { lives, allocations, ops, own, frees, .. } = &mut self.now;
        own.resize(ops.len(), (0, 0));
        for claim in self.allocating.all() {
            own[claim.call as usize] = (claim.from, claim.to);
        }
        for (row, call) in self.allocating.rows() {
            if let Some(life) = allocations[row].life {
                lives[life as usize].call = call;
            }
        }
        for (row, call) in self.freeing.rows() {
            lives[frees[row] as usize].freed_by = call;
        }
    }

    /// Begins the next recorded step, with the blocks that are still live. Returns the step that ended.
    pub(super) fn next(&mut self) -> RecordedStep {
        self.fill_in_ops();
        let mut lives: Vec<Life> =
            self.now.lives.iter().filter(|life| life.death == ALIVE).copied().collect();
        self.live.clear();
        for (index, life) in lives.iter_mut().enumerate() {
            *life = Life { birth: 0, is_older: true, call: NO_CALL, ..*life };
            self.live.insert(life.id, index as u32);
        }
        let RecordedStep { end_allocated, freed_ns, .. } = self.now;
        let next = RecordedStep { lives, end_allocated, freed_ns, ..RecordedStep::default() };
        (self.allocating, self.freeing) = (Claims::default(), Claims::default());
        for call in self.open.values_mut().flatten() {
            call.from = 0;
        }
        std::mem::replace(&mut self.now, next)
    }

    /// Processes a row of the step.
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
                    let life = &mut self.now.lives[*index as usize];
                    life.owner = without_sharding(row);
                    life.dtype = self.types.dtype(row.dtype);
                    life.shape = row.shape;
                }
            }
            EventName::Oom if is_here => {
                let allocated = row.allocated_bytes.saturating_add(row.requested_bytes.max(0));
                self.allocating.push(row.ts_ns);
                self.allocation(row, allocated, None, in_window);
            }
            EventName::Op => self.op(row),
            EventName::RangeBegin if row.api == self.module_api => {
                let from = self.now.end();
                let call = StepCall { name: row.name, module: row.module, phase, from, to: from };
                self.open.entry(row.tid).or_default().push(call);
                self.open_calls += 1;
            }
            EventName::RangeEnd if row.api == self.module_api => {
                // A call that raised an exception may have left inner calls open, so close these, too.
                while let Some(call) = self.open.get_mut(&row.tid).and_then(Vec::pop) {
                    self.open_calls -= 1;
                    let is_same = call.name == row.name;
                    self.now.modules.push(StepCall { to: self.now.end(), ..call });
                    if is_same {
                        break;
                    }
                }
                // Threads may come and go in each step.
                if self.open.get(&row.tid).is_some_and(Vec::is_empty) {
                    self.open.remove(&row.tid);
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
        self.now.is_wanted |= in_window;
        let (seq, ts_ns, owner) = (row.seq, row.ts_ns, without_sharding(row));
        let (freed_ns, requested) = (self.now.freed_ns, row.requested_bytes);
        self.now.allocations.push(Allocation {
            allocated,
            seq,
            ts_ns,
            freed_ns,
            owner,
            requested,
            dtype: self.types.dtype(row.dtype),
            shape: row.shape,
            life,
            in_window,
        });
    }

    fn alloc(&mut self, row: &Record, in_window: bool) {
        if self.live.contains_key(&row.alloc_id) {
            return;
        }
        let index = self.now.lives.len() as u32;
        let mut dtype = self.types.dtype(row.dtype);
        match (row.category, dtype) {
            (Category::UnshardedParameter, DType::Unknown) => dtype = self.gathered,
            (Category::AllGather, DType::Float32 | DType::Half) => self.gathered = dtype,
            // Parameters of several types are gathered as bytes.
            (Category::AllGather, DType::Other) => self.gathered = DType::Unknown,
            _ => {}
        }
        let is_older = row.event == EventName::Live;
        self.now.lives.push(Life {
            id: row.alloc_id,
            birth: self.now.end(),
            death: ALIVE,
            is_older,
            bytes: row.delta_bytes,
            requested: if row.requested_bytes >= 0 { row.requested_bytes } else { row.delta_bytes },
            owner: without_sharding(row),
            born_in: row.module,
            dtype,
            shape: row.shape,
            call: NO_CALL,
            freed_by: NO_CALL,
            stream: row.stream,
            pool: row.pool.max(0),
        });
        self.live.insert(row.alloc_id, index);
        // A block that was live at the start of this part has no op in it. With the lowest time, no op claims
        // the block.
        self.allocating.push(if is_older { i64::MIN } else { row.ts_ns });
        self.allocation(row, row.allocated_bytes, Some(index), in_window);
        self.now.end_allocated = row.allocated_bytes;
    }

    fn free(&mut self, row: &Record) {
        self.now.end_allocated = row.allocated_bytes;
        self.now.freed_ns = row.ts_ns;
        let Some(index) = self.live.remove(&row.alloc_id) else { return };
        self.now.lives[index as usize].death = self.now.end();
        self.now.frees.push(index);
        self.freeing.push(row.ts_ns);
    }

    /// Processes the row of an op, which is written at the end of the op. Of nested ops, the outermost one
    /// ends last and takes over the rows of the others.
    fn op(&mut self, row: &Record) {
        let start = row.ts_ns.saturating_sub(row.latency_ns);
        let (call, to) = (self.now.ops.len() as u32, self.now.end());
        let from = self.allocating.claim(start, call);
        self.freeing.claim(start, call);
        self.now.ops.push(StepCall { name: row.op, module: row.module, phase: row.phase, from, to });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change = fn(&mut Record, Symbol);

    /// Returns the rows of a step: an op that allocates a block, a request that runs out of memory, and a free.
    fn rows(step: i64, seq: i64, phases: Phases) -> Vec<Record> {
        let (phase, ts_ns) = (phases.forward, seq * 1000);
        let row = Record { seq, ts_ns, step, phase, device: 0, ..Record::default() };
        let block = Record { alloc_id: seq, delta_bytes: 512, allocated_bytes: 512, ..row };
        vec![
            Record { event: EventName::Alloc, requested_bytes: 500, ..block },
            Record { event: EventName::Op, ts_ns: ts_ns + 100, latency_ns: 200, ..row },
            Record { event: EventName::Oom, requested_bytes: 900, ..block },
            Record { event: EventName::Free, allocated_bytes: 0, ..block },
        ]
    }

    #[test]
    fn steps_are_alike_if_they_differ_only_in_ids_times_and_numbers() {
        let symbols = SymbolTable::default();
        let (phases, types) = (Phases::new(&symbols), TypeSymbols::new(&symbols));
        let other = symbols.intern("other");
        let recorded = |rows: &[Record], in_window: bool| {
            let mut recorder = StepRecorder::new(0, phases, symbols.intern("module"), types);
            rows.iter().for_each(|row| recorder.feed(row, in_window));
            recorder.next()
        };
        let base = recorded(&rows(3, 10, phases), true);
        assert!(base.is_like(&recorded(&rows(7, 99, phases), true)));
        assert!(!base.is_like(&recorded(&rows(0, 10, phases), true)), "the first step");
        assert!(!base.is_like(&recorded(&rows(3, 10, phases), false)), "outside of the window");
        assert!(!base.is_like(&recorded(&rows(3, 10, phases)[..3], true)), "without the free");
        let changes: [(usize, Change); 14] = [
            (0, |row, _| row.delta_bytes = 1024),
            (0, |row, _| row.requested_bytes = 400),
            (0, |row, _| row.allocated_bytes = 1024),
            (0, |row, other| row.op = other),
            (0, |row, other| row.module = other),
            (0, |row, other| row.phase = other),
            (0, |row, other| row.shape = other),
            (0, |row, _| row.category = Category::Parameter),
            (0, |row, _| row.stream = 1),
            (0, |row, _| row.pool = 1),
            (1, |row, other| row.op = other),
            (1, |row, _| row.latency_ns = 50),
            (2, |row, _| row.requested_bytes = 800),
            (3, |row, _| row.allocated_bytes = 256),
        ];
        for (number, (index, change)) in changes.into_iter().enumerate() {
            let mut rows = rows(3, 10, phases);
            change(&mut rows[index], other);
            assert!(!base.is_like(&recorded(&rows, true)), "change {number}");
        }
    }
}
