//! Op calls, counted and named as PyTorch's `MemoryTracker` does.
//!
//! Each call has its number among all calls, its number among the calls of the same name, and the device's totals
//! after it. The report `ops` lists them; the exports draw them.

use memtrace_trace::detail::DetailMark;
use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::replay::{Device, HOST, Replay, Totals};

/// Torch's name of the frame in which a dispatch mode, such as that of `MemoryTracker`, handles an op. Of
/// nested ops (`aten::linear`, `aten::addmm`), the mode was called for the one directly inside this frame.
const DISPATCH_MODE: &str = "PythonDispatchMode";

/// The unit that `MemoryTracker` calls "MB": 1024² bytes.
pub const MB: f64 = 1_048_576.0;

/// The columns that [`OpCalls`] needs in addition to the replay's.
pub const COLUMNS: Columns = Columns::of(&["ts_ns", "device", "op", "module", "api", "name", "latency_ns"]);

/// One call of an op, at its end.
#[derive(Clone, Copy, Debug)]
pub struct OpCall {
    /// The number among all calls. Number 0 restarts the count.
    pub index: usize,
    /// The op.
    pub op: Symbol,
    /// The name that is numbered: the op, or `mm.default` (no namespace, with overload) where the overload is
    /// known.
    pub called: Symbol,
    /// The module whose forward began last.
    pub entered: Symbol,
    /// The module that it belongs to.
    pub module: Symbol,
    /// The phase of the call.
    pub phase: Symbol,
    /// The step of the call.
    pub step: i64,
    /// The number among the calls of the same name.
    pub number: u64,
    /// The change of `allocated` since the call before it, in bytes; `None` for the first.
    pub delta: Option<i64>,
    /// The totals of its device at its end.
    pub totals: Totals,
}

impl OpCall {
    /// The name in `MemoryTracker`: `{module}.forward.{op}_{n}`. The module is the one whose forward began
    /// last, also after it ended and in backward. The op is `mm.default` where the trace has overloads
    /// (`MEMTRACE_OPS=io`), else `aten::mm`, for all its overloads.
    #[must_use]
    pub fn name(&self, symbols: &SymbolTable) -> String {
        let (op, number) = (symbols.get(self.called), self.number);
        // Before the first call of a module.
        if self.entered == Symbol::NONE {
            return format!(".{op}_{number}");
        }
        // Paths begin with the class of the root module, which `MemoryTracker` calls "".
        let module = symbols.get(self.entered);
        let module = module.split_once('.').map_or("", |(_, path)| path);
        format!("{module}.forward.{op}_{number}")
    }
}

/// The op of the previous row.
struct Child {
    op: Symbol,
    overload: Symbol,
    module: Symbol,
    start_ns: i64,
}

fn is_end_of_detail(row: &Record, replay: &Replay) -> bool {
    *replay.symbols.get(row.api) == *Api::Detail.as_str()
        && DetailMark::parse(&replay.symbols.get(row.name)) == Some(DetailMark::Off)
}

/// Counts the calls of ops over the rows of a trace.
pub struct OpCalls {
    device: Option<i32>,
    /// The number of calls.
    pub count: usize,
    /// The number of the next call at each start of the root module's forward.
    pub fw_start: Vec<usize>,
    /// The number of the next call at each end of the root module's forward.
    pub fw_bw_boundary: Vec<usize>,
    numbers: FxHashMap<Symbol, u64>,
    /// The numbered name of each op and overload.
    called: FxHashMap<(Symbol, Symbol), Symbol>,
    /// The module whose forward began last.
    entered: Symbol,
    before: Option<i64>,
    /// The op of the previous row: under a dispatch mode, the op for which the mode was called.
    child: Child,
    /// A dispatch mode was seen: from then on only the ops that it handles count.
    dispatched: bool,
    /// Failed allocations of segments on a GPU.
    failed: u64,
    /// Requests that ended with an out-of-memory error.
    ooms: u64,
}

impl OpCalls {
    /// Counts calls with the totals of `device`, or of each op's own device.
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

    /// Failed allocations of segments that were tried again. A request that ended with an out-of-memory error
    /// failed twice, so it counts as one retry.
    #[must_use]
    pub fn retries(&self) -> u64 {
        self.failed.saturating_sub(self.ooms)
    }

    /// Takes the next row, after the replay took it. Returns the call that ended with it.
    pub fn feed(&mut self, row: &Record, replay: &Replay) -> Option<OpCall> {
        match row.event {
            EventName::Op => return self.op(row, replay),
            EventName::RangeBegin | EventName::RangeEnd => self.module(row, replay),
            EventName::SegmentAlloc | EventName::SegmentMap if row.status != 0 => self.failed += 1,
            EventName::Oom => self.ooms += 1,
            // The next ops are not in the trace, so the next one that is has no predecessor.
            EventName::Mark if is_end_of_detail(row, replay) => self.before = None,
            _ => {}
        }
        None
    }

    /// Restarts the count at the first op of a dispatch mode, as `MemoryTracker` counts from its own start.
    fn start_again(&mut self) {
        self.dispatched = true;
        self.numbers.clear();
        self.before = None;
        // A forward that is running counts from this op.
        let running = self.fw_start.len() > self.fw_bw_boundary.len();
        self.fw_start = if running { vec![0] } else { Vec::new() };
        if !running {
            self.entered = Symbol::NONE;
        }
        self.fw_bw_boundary.clear();
        self.count = 0;
    }

    /// A module's forward begins or ends. The markers of `MemoryTracker` for the root module hold the number
    /// of the next call.
    fn module(&mut self, row: &Record, replay: &Replay) {
        if replay.symbols.get(row.api).as_ref() != Api::Module.as_str() {
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
        // In a trace with outermost ops only, the op of the row before is not nested in this one.
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
        // `MemoryTracker` skips it, too: it is frequent and allocates nothing.
        if is_mode && replay.symbols.get(op).as_ref() == "aten::detach" {
            return None;
        }
        // The device on which the op ran; `MemoryTracker` reads the current device only.
        let wanted = self.device.or((row.device != HOST).then_some(row.device));
        let totals = match wanted {
            Some(ordinal) => replay.find(ordinal).map(|device| device.totals),
            None => replay
                .devices()
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
