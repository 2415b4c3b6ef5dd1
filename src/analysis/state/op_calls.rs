//! The calls of ops, as PyTorch's `MemoryTracker` counts and names them: an op's number among all, its
//! number among those of its name, and the totals behind it. `top-ops` lists them, the exports draw them.

use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::replay::{Device, HOST, Replay, Totals};

/// What torch calls the frame in which a dispatch mode, such as `MemoryTracker`'s, sees an op. Of nested
/// ops (`aten::linear`, `aten::addmm`) the one right inside it is the one that the mode was asked for.
const DISPATCH_MODE: &str = "PythonDispatchMode";

/// `MemoryTracker` says "MB" for 1024² bytes.
pub const MB: f64 = 1_048_576.0;

/// The columns that [`OpCalls`] needs beside the replay's.
pub const COLUMNS: Columns = Columns::of(&["ts_ns", "device", "op", "module", "api", "name", "latency_ns"]);

/// One op that ended.
#[derive(Clone, Copy, Debug)]
pub struct OpCall {
    /// Its number among all; one with number 0 begins the count anew.
    pub index: usize,
    /// The op.
    pub op: Symbol,
    /// As it is numbered: the op, or without its namespace and with its overload when that is known.
    pub called: Symbol,
    /// The module that was entered last.
    pub entered: Symbol,
    /// The module that it belongs to.
    pub module: Symbol,
    /// The phase that ran.
    pub phase: Symbol,
    /// The step that ran.
    pub step: i64,
    /// Its number among those of its name.
    pub number: u64,
    /// What it added to `allocated`, in bytes; the first has nothing to be compared with.
    pub delta: Option<i64>,
    /// The totals of its device when it ended.
    pub totals: Totals,
}

impl OpCall {
    /// The name that `MemoryTracker` gives: `{module}.forward.{op}_{n}`, with the module that was entered last,
    /// also behind it and in backward. The op is `mm.default` when the trace has the overloads of
    /// `MEMTRACE_OPS=io`, else `aten::mm` stands for each of them.
    #[must_use]
    pub fn name(&self, symbols: &SymbolTable) -> String {
        let module =
            if self.entered == Symbol::NONE { String::new() } else { symbols.get(self.entered).to_string() };
        // Paths start at the root's class, which `MemoryTracker` calls "".
        let module = module.split_once('.').map_or("", |(_, path)| path);
        format!("{module}.forward.{}_{}", symbols.get(self.called), self.number)
    }
}

/// The op row before.
struct Child {
    op: Symbol,
    overload: Symbol,
    module: Symbol,
    start_ns: i64,
}

/// Counts the calls of ops over the rows of a trace.
pub struct OpCalls {
    device: Option<i32>,
    /// How many calls there were.
    pub count: usize,
    /// The number of the op that came next when the root module's forward began, each time.
    pub fw_start: Vec<usize>,
    /// The same when it ended.
    pub fw_bw_boundary: Vec<usize>,
    numbers: FxHashMap<Symbol, u64>,
    /// How an op and its overload are called.
    called: FxHashMap<(Symbol, Symbol), Symbol>,
    /// The module that was entered last.
    entered: Symbol,
    before: Option<i64>,
    /// The op row before: in a program under a dispatch mode, what the mode was asked for.
    child: Child,
    /// Only what a dispatch mode sees counts, since one was seen.
    dispatched: bool,
    /// Failed calls for a segment on a GPU, and requests given up on.
    failed: u64,
    ooms: u64,
}

impl OpCalls {
    /// Counts the ops of `device`, or of each op's own.
    #[must_use]
    pub fn new(device: Option<i32>) -> OpCalls {
        OpCalls {
            device,
            count: 0,
            fw_start: Vec::new(),
            fw_bw_boundary: Vec::new(),
            numbers: FxHashMap::default(),
            called: FxHashMap::default(),
            entered: Symbol::NONE,
            before: None,
            child: Child {
                op: Symbol::NONE,
                overload: Symbol::NONE,
                module: Symbol::NONE,
                start_ns: i64::MIN,
            },
            dispatched: false,
            failed: 0,
            ooms: 0,
        }
    }

    /// Each request that failed and then worked is a retry; one that was given up on failed twice.
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.failed.saturating_sub(self.ooms)
    }

    /// Takes the next row, behind the replay; the call that ended with it.
    pub fn feed(&mut self, row: &Record, replay: &Replay) -> Option<OpCall> {
        match row.event {
            EventName::Op => return self.op(row, replay),
            EventName::RangeBegin | EventName::RangeEnd => self.module(row, replay),
            EventName::SegmentAlloc | EventName::SegmentMap if row.status != 0 => self.failed += 1,
            EventName::Oom => self.ooms += 1,
            _ => {}
        }
        None
    }

    /// From the first op of a dispatch mode on, as `MemoryTracker` counts from where it was started.
    fn start_again(&mut self) {
        self.dispatched = true;
        self.numbers.clear();
        self.before = None;
        // The forward that is running began with this op.
        let running = self.fw_start.len() > self.fw_bw_boundary.len();
        self.fw_start = if running { vec![0] } else { Vec::new() };
        if !running {
            self.entered = Symbol::NONE;
        }
        self.fw_bw_boundary.clear();
        self.count = 0;
    }

    /// A module's forward begins or ends. Of the root module, `MemoryTracker`'s markers have the index of the
    /// next op.
    fn module(&mut self, row: &Record, replay: &Replay) {
        if replay.symbols.get(row.api).as_ref() != Api::Module.name() {
            return;
        }
        let is_root = !replay.symbols.get(row.name).contains('.');
        if row.event == EventName::RangeBegin {
            self.entered = row.name;
            if is_root {
                self.fw_start.push(self.count);
            }
        } else if is_root {
            self.fw_bw_boundary.push(self.count);
        }
    }

    fn op(&mut self, row: &Record, replay: &Replay) -> Option<OpCall> {
        let start_ns = row.ts_ns - row.latency_ns;
        let child = std::mem::replace(
            &mut self.child,
            Child { op: row.op, overload: row.name, module: row.module, start_ns },
        );
        // With a row for each outermost op only, the row before is no child of this one.
        let has_child = child.start_ns >= start_ns;
        let is_mode = (has_child || self.dispatched) && replay.symbols.get(row.op).as_ref() == DISPATCH_MODE;
        if is_mode && !self.dispatched {
            self.start_again();
        }
        if self.dispatched && !is_mode {
            return None;
        }
        let (op, overload, module) = if is_mode && has_child {
            (child.op, child.overload, child.module)
        } else {
            (row.op, row.name, row.module)
        };
        // As `MemoryTracker`: it is everywhere and allocates nothing.
        if is_mode && replay.symbols.get(op).as_ref() == "aten::detach" {
            return None;
        }
        // The op's device is the one it ran on; `MemoryTracker` looks at the current device only.
        let wanted = self.device.or((row.device != HOST).then_some(row.device));
        let totals = match wanted {
            Some(ordinal) => replay.find(ordinal).map(|device| device.totals),
            None => replay
                .devices
                .iter()
                .find(|device| device.ordinal != HOST)
                .map(|device: &Device| device.totals),
        }
        .unwrap_or_default();
        let called = *self.called.entry((op, overload)).or_insert_with(|| {
            if overload == Symbol::NONE {
                return op;
            }
            // `OpOverload.__name__` in torch/_ops.py.
            let name = replay.symbols.get(op);
            let name = name.rsplit_once("::").map_or(&*name, |(_, name)| name);
            replay.symbols.intern(&format!("{name}.{}", replay.symbols.get(overload)))
        });
        let number = self.numbers.entry(called).or_default();
        let delta = self.before.replace(totals.allocated).map(|before| totals.allocated - before);
        let call = OpCall {
            index: self.count,
            op,
            called,
            entered: self.entered,
            module,
            phase: row.phase,
            step: row.step,
            number: *number,
            delta,
            totals,
        };
        *number += 1;
        self.count += 1;
        Some(call)
    }
}
