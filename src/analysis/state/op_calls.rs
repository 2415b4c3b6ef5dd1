//! Op calls, counted and named as PyTorch's `MemoryTracker` does.
//!
//! Each call has its index among all calls, its number among the calls of the same name, and the device's
//! totals after the call. The report `ops` lists the calls, and the exports draw them.

use memtrace_trace::detail::DetailMark;
use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::problems::Retries;
use crate::state::replay::{Device, Replay, Totals, is_gpu};

/// Torch's name of the frame in which a dispatch mode, such as the mode of `MemoryTracker`, handles an op. Of
/// nested ops (`aten::linear`, `aten::addmm`), the mode was called for the op directly inside this frame.
const DISPATCH_MODE: &str = "PythonDispatchMode";

/// The unit that `MemoryTracker` calls "MB": 1024² bytes.
pub const MB: f64 = 1_048_576.0;

/// The columns that [`OpCalls`] needs in addition to the replay's.
pub const COLUMNS: Columns = Columns::of(&["ts_ns", "device", "op", "module", "api", "name", "latency_ns"]);

/// One call of an op, at its end.
#[derive(Clone, Copy, Debug)]
pub struct OpCall {
    /// The index among all calls. If a later call has index 0 again, the numbering restarted, and the earlier
    /// calls do not count.
    pub index: usize,
    /// The op.
    pub op: Symbol,
    /// The name by which the calls are numbered. This is the op or, if the overload is known, the op without
    /// its namespace and with the overload, such as `mm.default`.
    pub called: Symbol,
    /// The module whose forward began last.
    pub entered: Symbol,
    /// The module that the op belongs to.
    pub module: Symbol,
    /// The phase of the call.
    pub phase: Symbol,
    /// The training step in which the op was called.
    pub step: i64,
    /// The number among the calls of the same name, from 0.
    pub number: u64,
    /// The change of `allocated` since the previous call, in bytes; `None` for the first call.
    pub delta: Option<i64>,
    /// The totals of the op's device at the end of the call.
    pub totals: Totals,
}

impl OpCall {
    /// Returns the call's name in `MemoryTracker`: `{module}.forward.{op}_{n}`. The module is the one whose
    /// forward began last, also after it ended and in backward. The op is `mm.default` if the trace has
    /// overloads (`MEMTRACE_OPS=io`), and otherwise `aten::mm` for all overloads.
    #[must_use]
    pub fn name(&self, symbols: &SymbolTable) -> String {
        let (op, number) = (symbols.get(self.called), self.number);
        // No module was called yet.
        if self.entered == Symbol::NONE {
            return format!(".{op}_{number}");
        }
        // A path begins with the class of the root module, which `MemoryTracker` calls "".
        let module = symbols.get(self.entered);
        let module = module.split_once('.').map_or("", |(_, path)| path);
        format!("{module}.forward.{op}_{number}")
    }
}

/// The op of the previous row. It ended before the current op, and may be nested in it.
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
    /// The index of the first call after each start of the root module's forward.
    pub fw_start: Vec<usize>,
    /// The index of the first call after each end of the root module's forward.
    pub fw_bw_boundary: Vec<usize>,
    numbers: FxHashMap<Symbol, u64>,
    /// The name by which calls are numbered ([`OpCall::called`]), for each op and overload.
    called: FxHashMap<(Symbol, Symbol), Symbol>,
    /// The module whose forward began last.
    entered: Symbol,
    before: Option<i64>,
    /// The op of the previous row. If the current row is a dispatch mode, that mode handled this op.
    child: Child,
    /// True once a dispatch mode was seen. From then on, only the ops that a dispatch mode handles are
    /// counted.
    dispatched: bool,
    /// The retries of PyTorch's allocator.
    pub retries: Retries,
}

impl OpCalls {
    /// Creates a counter. Each call gets the memory totals of `device`, or of the op's own device if `device`
    /// is `None`.
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
            retries: Retries::default(),
        }
    }

    /// Processes the next row, after the replay processed it. Returns the call that this row ends, if any.
    pub fn feed(&mut self, row: &Record, replay: &Replay) -> Option<OpCall> {
        self.retries.feed(row);
        match row.event {
            EventName::Op => return self.op(row, replay),
            EventName::RangeBegin | EventName::RangeEnd => self.module(row, replay),
            // The trace omits the next ops. So the next op in the trace gets no delta, because its
            // predecessor is unknown.
            EventName::Mark if is_end_of_detail(row, replay) => self.before = None,
            _ => {}
        }
        None
    }

    /// Restarts the count at the first op of a dispatch mode, because `MemoryTracker` counts from its own
    /// start.
    fn start_again(&mut self) {
        self.dispatched = true;
        self.numbers.clear();
        self.before = None;
        // If a forward is already running, its start is the first op of the new numbering.
        let running = self.fw_start.len() > self.fw_bw_boundary.len();
        self.fw_start = if running { vec![0] } else { Vec::new() };
        if !running {
            self.entered = Symbol::NONE;
        }
        self.fw_bw_boundary.clear();
        self.count = 0;
    }

    /// Processes the begin or end of a module's forward. For the root module, stores the index of the next
    /// call, as `MemoryTracker` does in its markers.
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
        let start_ns = row.ts_ns.wrapping_sub(row.latency_ns);
        let child = std::mem::replace(
            &mut self.child,
            Child { op: row.op, overload: row.name, module: row.module, start_ns },
        );
        // Ops are written at their ends, so the previous op is nested in this one if it did not start
        // earlier. In a trace of only outermost ops, no op is nested.
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
        // `MemoryTracker` also skips `aten::detach`, which is frequent and allocates nothing.
        if is_mode && replay.symbols.get(op).as_ref() == "aten::detach" {
            return None;
        }
        // Use the totals of the device on which the op ran; `MemoryTracker` reads only the current device.
        let wanted = self.device.or((is_gpu(row.device)).then_some(row.device));
        let totals = match wanted {
            Some(ordinal) => replay.find(ordinal).map(|device| device.totals),
            None => replay
                .devices()
                .iter()
                .find(|device| is_gpu(device.ordinal))
                .map(|device: &Device| device.totals),
        }
        .unwrap_or_default();
        let called = *self.called.entry((op, overload)).or_insert_with(|| {
            if overload == Symbol::NONE {
                return op;
            }
            // The same format as `OpOverload.__name__` in torch/_ops.py: the op without its namespace, then
            // the overload.
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
