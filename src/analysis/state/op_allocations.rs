//! The bytes that each call of an op allocated itself, including bytes that were freed again.
//!
//! The row of an op follows the rows of the blocks that it allocated. A block belongs to the outermost op
//! with a row that was running on the block's thread, which is the op that the program or autograd called.

use memtrace_trace::EventName;
use rustc_hash::FxHashMap;

use crate::read::record::{Columns, Record};
use crate::read::symbols::Symbol;
use crate::state::replay::{Replay, is_gpu};

/// The columns that [`OpAllocations`] needs in addition to the replay's.
pub const COLUMNS: Columns =
    Columns::of(&["ts_ns", "tid", "device", "op", "module", "phase", "step", "delta_bytes", "latency_ns"]);

/// The prefix in torch's name of an op in which autograd runs a backward function.
const AUTOGRAD: &str = "autograd::engine::evaluate_function: ";

/// Returns the name of an op without torch's prefix for backward functions.
#[must_use]
pub fn name_of(op: &str) -> &str {
    op.strip_prefix(AUTOGRAD).unwrap_or(op)
}

/// The allocations of one call of an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallAllocations {
    /// The op of the call or, if no row of an op encloses the block, the op of the block.
    pub op: Symbol,
    /// The module of the first block.
    pub module: Symbol,
    /// The phase of the first block.
    pub phase: Symbol,
    /// The step of the first block.
    pub step: i64,
    /// The time of the first allocation, in ns.
    pub ts_ns: i64,
    /// The `seq` of the row of the first allocation.
    pub seq: i64,
    /// The sum of the sizes of all blocks.
    pub bytes: i64,
    /// The number of blocks.
    pub blocks: u64,
}

impl CallAllocations {
    fn from_row(row: &Record) -> CallAllocations {
        CallAllocations {
            op: row.op,
            module: row.module,
            phase: row.phase,
            step: row.step,
            ts_ns: row.ts_ns,
            seq: row.seq,
            bytes: row.delta_bytes,
            blocks: 1,
        }
    }

    /// Returns one call with the bytes and the number of all `blocks`, and with the owner and the time of the
    /// first.
    fn sum_of(blocks: &[CallAllocations]) -> CallAllocations {
        let mut sum = blocks[0];
        for block in &blocks[1..] {
            sum.bytes += block.bytes;
            sum.blocks += block.blocks;
        }
        sum
    }

    fn is_same_owner(&self, other: &CallAllocations) -> bool {
        (self.op, self.module) == (other.op, other.module)
    }
}

/// The sums over the calls of an op in a module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpSum {
    /// The sum of the sizes of all blocks.
    pub bytes: i64,
    /// The number of blocks.
    pub blocks: u64,
    /// The number of calls that allocated.
    pub calls: u64,
    /// The bytes of the call that allocated the most.
    pub largest: i64,
}

impl OpSum {
    fn add(&mut self, call: &CallAllocations) {
        self.bytes += call.bytes;
        self.blocks += call.blocks;
        self.calls += 1;
        self.largest = self.largest.max(call.bytes);
    }

    /// Adds the sums of another op or module that a report shows under the same name.
    pub fn join(&mut self, other: OpSum) {
        self.bytes += other.bytes;
        self.blocks += other.blocks;
        self.calls += other.calls;
        self.largest = self.largest.max(other.largest);
    }
}

/// Sums the allocations of ops over the rows of a trace.
pub struct OpAllocations {
    device: Option<i32>,
    nested: bool,
    /// The maximum number of calls in `largest`.
    pub top: usize,
    /// For each thread, in order of time: calls whose outermost op has not ended, and blocks that have no op
    /// row so far.
    open: FxHashMap<i32, Vec<CallAllocations>>,
    /// The calls that allocated the most, the largest first.
    pub largest: Vec<CallAllocations>,
    /// The sums, by op and module.
    pub sums: FxHashMap<(Symbol, Symbol), OpSum>,
}

impl OpAllocations {
    /// Creates sums for the blocks of `device`, or of all GPUs, that also keep the `top` largest calls. With
    /// `nested`, a block counts for the innermost op around it.
    #[must_use]
    pub fn new(device: Option<i32>, nested: bool, top: usize) -> OpAllocations {
        OpAllocations {
            device,
            nested,
            top,
            open: FxHashMap::default(),
            largest: Vec::new(),
            sums: FxHashMap::default(),
        }
    }

    /// Adds the next row, after the replay processed it.
    pub fn feed(&mut self, row: &Record, replay: &Replay) {
        match row.event {
            EventName::Alloc | EventName::HostAlloc
                if row.allocates_tensor() && self.is_wanted(row.device) && replay.in_window() =>
            {
                let block = CallAllocations::from_row(row);
                if row.op == Symbol::NONE {
                    self.finish(block);
                } else {
                    self.open.entry(row.tid).or_default().push(block);
                    self.settle(row.tid);
                }
            }
            EventName::Op => self.op_ended(row),
            _ => {}
        }
    }

    fn is_wanted(&self, device: i32) -> bool {
        self.device.map_or(is_gpu(device), |only| only == device)
    }

    /// Assigns the blocks since the start of an op to that op.
    fn op_ended(&mut self, row: &Record) {
        let Some(open) = self.open.get_mut(&row.tid) else { return };
        let start_ns = row.ts_ns.wrapping_sub(row.latency_ns);
        let first = open.partition_point(|block| block.ts_ns < start_ns);
        let inside = open.split_off(first);
        if inside.is_empty() {
            return;
        }
        if self.nested {
            // The inner ops have no rows of their own. So successive blocks with the same op and module count
            // as one call.
            for blocks in inside.chunk_by(CallAllocations::is_same_owner) {
                self.finish(CallAllocations::sum_of(blocks));
            }
            return;
        }
        // Keep the call open: if the row of an enclosing op comes later, that op takes over these blocks.
        open.push(CallAllocations { op: row.op, ..CallAllocations::sum_of(&inside) });
        self.settle(row.tid);
    }

    /// If a thread has too many open calls, ends the older half, so that memory stays bounded.
    fn settle(&mut self, tid: i32) {
        /// The maximum number of open calls. One op of autograd encloses fewer calls, even if it recomputes a
        /// checkpoint.
        const MOST_OPEN: usize = 65_536;
        if let Some(open) = self.open.get_mut(&tid)
            && open.len() > MOST_OPEN
        {
            let ended: Vec<CallAllocations> = open.drain(..MOST_OPEN / 2).collect();
            ended.into_iter().for_each(|call| self.finish(call));
        }
    }

    fn finish(&mut self, call: CallAllocations) {
        self.sums.entry((call.op, call.module)).or_default().add(&call);
        // Of several equal calls, the earliest comes first.
        let place =
            self.largest.partition_point(|other| (-other.bytes, other.seq) <= (-call.bytes, call.seq));
        if place < self.top {
            self.largest.insert(place, call);
            self.largest.truncate(self.top);
        }
    }

    /// Ends the calls that are open after the last row.
    pub fn end(&mut self) {
        for (_, open) in std::mem::take(&mut self.open) {
            for call in open {
                self.finish(call);
            }
        }
    }

    /// Returns the sums by the names of op and module that `names` returns, the largest first. Sums with the
    /// same names are added.
    #[must_use]
    pub fn sorted_sums(
        &self,
        names: impl Fn(Symbol, Symbol) -> (String, String),
    ) -> Vec<((String, String), OpSum)> {
        let mut joined: FxHashMap<(String, String), OpSum> = FxHashMap::default();
        for ((op, module), sum) in &self.sums {
            joined.entry(names(*op, *module)).or_default().join(*sum);
        }
        let mut sums: Vec<_> = joined.into_iter().collect();
        sums.sort_by(|a, b| (-a.1.bytes, &a.0).cmp(&(-b.1.bytes, &b.0)));
        sums
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Window;
    use crate::read::symbols::SymbolTable;
    use crate::state::replay::Metric;

    #[test]
    fn blocks_without_the_row_of_an_op_take_bounded_memory() {
        let symbols = SymbolTable::default();
        let replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        let mut allocations = OpAllocations::new(None, false, 0);
        let op = symbols.intern("aten::relu");
        let row = Record { event: EventName::Alloc, device: 0, op, delta_bytes: 1, ..Record::default() };
        for _ in 0..200_000 {
            allocations.feed(&row, &replay);
        }
        assert!(allocations.open[&0].len() <= 65_536);
        allocations.end();
        assert_eq!(allocations.sums[&(op, Symbol::NONE)].bytes, 200_000);
    }
}
