//! `memtrace top-ops`: the ops that added most memory, as PyTorch's `MemoryTracker` lists them.
//!
//! With `op` rows (`MEMTRACE_OPS=all`), an op's delta is the difference of `allocated` between its
//! end and the end of the op before, as in `MemoryTracker`; the first op has none. Without them, the
//! allocations themselves are added up by the op that made them, and the page says so.
//!
//! Held against `MemoryTracker` in the same process: the series is the same to the byte. Names differ
//! in two ways: it knows the overload (`mm.default`), and it names the module that was entered last,
//! also in backward, where we name the one that the op belongs to.

use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::{Answer, Report, next};
use crate::error::Result;
use crate::input::Input;
use crate::options::{Flag, Options};
use crate::page::{Cell, Page, Side, Style, Table, count};
use crate::play::{Footer, Played, heading, play, shown, step};
use crate::record::{Columns, Record};
use crate::replay::{Device, HOST, Metric, Replay, Totals};
use crate::stream::TraceFile;
use crate::texts::{Symbol, Texts};

/// See the module.
pub(super) struct TopOps;

/// What torch calls the frame in which a dispatch mode, such as `MemoryTracker`'s, sees an op. Of nested
/// ops (`aten::linear`, `aten::addmm`) the one right inside it is the one that the mode was asked for.
const DISPATCH_MODE: &str = "PythonDispatchMode";

/// `MemoryTracker` prints "MB" for 1024² bytes.
const MB: f64 = 1_048_576.0;

impl Report for TopOps {
    fn name(&self) -> &'static str {
        "top-ops"
    }

    fn about(&self) -> &'static str {
        "The ops that added most memory, and the allocation retries (MemoryTracker's list)"
    }

    fn flags(&self) -> &'static [Flag] {
        &[
            Flag {
                name: "legacy",
                value: None,
                default: "",
                choices: &[],
                help: "MemoryTracker's own text, and names as it numbers them",
            },
            Flag {
                name: "series",
                value: None,
                default: "",
                choices: &[],
                help: "With --json: allocated, active and reserved after every op, and the markers",
            },
        ]
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut page = Page::new(options.paint, options.width);
        let mut footer = Footer::new(input);
        let mut json = Vec::new();
        for (index, trace) in input.traces.iter().enumerate() {
            let mut ops = Ops::new(options);
            let played = play(
                trace,
                Columns::of(&["ts_ns", "device", "op", "module", "api", "name", "latency_ns"]),
                options,
                Metric::Allocated,
                |row, replay| {
                    if replay.in_window() {
                        ops.feed(row, replay);
                    }
                },
            )?;
            footer.add(trace, &played, played.fullest(Metric::Allocated, options).map(|d| d.ordinal));
            if index == 0 {
                heading(&mut page, input, &trace.meta);
            }
            page.gap();
            if input.traces.len() > 1 {
                page.plain(format!("rank {}", trace.meta.rank));
            }
            ops.print(&mut page, &played, options);
            json.push(ops.json(trace, &played, options));
        }
        let hints = vec![next("peak", input, "--by op")];
        Ok(Answer { page, json: json!({ "processes": json }), footer, next: hints, ..Answer::default() })
    }
}

/// One op that ended.
struct Op {
    index: usize,
    op: Symbol,
    module: Symbol,
    phase: Symbol,
    step: i64,
    /// The how-manieth of its name.
    number: u64,
    delta: i64,
}

/// What one op allocated, without op rows.
#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: i64,
    blocks: u64,
}

/// The op row before.
struct Child {
    op: Symbol,
    module: Symbol,
    start_ns: i64,
}

struct Ops {
    device: Option<i32>,
    legacy: bool,
    keep_series: bool,
    top: usize,
    /// The largest deltas so far.
    largest: Vec<Op>,
    numbers: FxHashMap<Symbol, u64>,
    before: Option<i64>,
    count: usize,
    series: Vec<Totals>,
    /// The index of the op that came next when the root module's forward began, each time.
    fw_start: Vec<usize>,
    /// The same when it ended.
    fw_bw_boundary: Vec<usize>,
    sums: FxHashMap<(Symbol, Symbol), Sum>,
    /// The op row before: in a program under a dispatch mode, what the mode was asked for.
    child: Child,
    /// Only what a dispatch mode sees counts, since one was seen.
    dispatched: bool,
    /// Failed calls for a segment on a GPU, and requests given up on.
    failed: u64,
    ooms: u64,
}

impl Ops {
    fn new(options: &Options) -> Ops {
        Ops {
            device: options.device,
            legacy: options.is_set("legacy"),
            keep_series: options.is_set("series"),
            top: options.top.unwrap_or(20),
            largest: Vec::new(),
            numbers: FxHashMap::default(),
            before: None,
            count: 0,
            series: Vec::new(),
            fw_start: Vec::new(),
            fw_bw_boundary: Vec::new(),
            sums: FxHashMap::default(),
            child: Child { op: Symbol::NONE, module: Symbol::NONE, start_ns: i64::MIN },
            dispatched: false,
            failed: 0,
            ooms: 0,
        }
    }

    /// From the first op of a dispatch mode on, as `MemoryTracker` counts from where it was started.
    fn start_again(&mut self) {
        self.dispatched = true;
        self.largest.clear();
        self.numbers.clear();
        self.before = None;
        self.series.clear();
        // The forward that is running began with this op.
        let running = self.fw_start.len() > self.fw_bw_boundary.len();
        self.fw_start = if running { vec![0] } else { Vec::new() };
        self.fw_bw_boundary.clear();
        self.count = 0;
    }

    /// The root module's forward begins or ends: `MemoryTracker`'s markers have the index of the next op.
    fn root(&mut self, row: &Record, replay: &Replay) {
        let is_root = replay.texts.get(row.api).as_ref() == Api::Module.name()
            && !replay.texts.get(row.name).contains('.');
        match row.event {
            _ if !is_root => {}
            EventName::RangeBegin => self.fw_start.push(self.count),
            _ => self.fw_bw_boundary.push(self.count),
        }
    }

    fn feed(&mut self, row: &Record, replay: &Replay) {
        match row.event {
            EventName::Op => self.op(row, replay),
            EventName::RangeBegin | EventName::RangeEnd => self.root(row, replay),
            EventName::Alloc => {
                let sum = self.sums.entry((row.op, row.module)).or_default();
                sum.bytes += row.delta_bytes;
                sum.blocks += 1;
            }
            EventName::SegmentAlloc | EventName::SegmentMap if row.status != 0 => self.failed += 1,
            EventName::Oom => self.ooms += 1,
            _ => {}
        }
    }

    fn op(&mut self, row: &Record, replay: &Replay) {
        let start_ns = row.ts_ns - row.latency_ns;
        let child = std::mem::replace(&mut self.child, Child { op: row.op, module: row.module, start_ns });
        // With a row for each outermost op only, the row before is no child of this one.
        let has_child = child.start_ns >= start_ns;
        let is_mode = (has_child || self.dispatched) && replay.texts.get(row.op).as_ref() == DISPATCH_MODE;
        if is_mode && !self.dispatched {
            self.start_again();
        }
        if self.dispatched && !is_mode {
            return;
        }
        let (op, module) = if is_mode && has_child { (child.op, child.module) } else { (row.op, row.module) };
        // As `MemoryTracker`: it is everywhere and allocates nothing.
        if is_mode && replay.texts.get(op).as_ref() == "aten::detach" {
            return;
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
        let number = self.numbers.entry(op).or_default();
        if let Some(before) = self.before.replace(totals.allocated) {
            let delta = totals.allocated - before;
            let op = Op {
                index: self.count,
                op,
                module,
                phase: row.phase,
                step: row.step,
                number: *number,
                delta,
            };
            // Python's sort is stable: of equal deltas, the earlier op comes first.
            let place = self.largest.partition_point(|other| other.delta >= delta);
            if place < self.top {
                self.largest.insert(place, op);
                self.largest.truncate(self.top);
            }
        }
        *number += 1;
        self.count += 1;
        if self.keep_series {
            self.series.push(totals);
        }
    }

    /// Each request that failed and then worked is a retry; one that was given up on failed twice.
    fn retries(&self) -> u64 {
        self.failed.saturating_sub(self.ooms)
    }

    /// The name that `MemoryTracker` gives: `{module}.forward.{op}_{n}`.
    fn legacy_name(op: &Op, texts: &Texts) -> String {
        let module = if op.module == Symbol::NONE { String::new() } else { texts.get(op.module).to_string() };
        // Paths start at the root's class, which `MemoryTracker` calls "".
        let module = module.split_once('.').map_or("", |(_, path)| path);
        format!("{module}.forward.{}_{}", texts.get(op.op), op.number)
    }

    fn print(&self, page: &mut Page, played: &Played, options: &Options) {
        if self.legacy {
            self.print_legacy(page, &played.texts);
            return;
        }
        if self.count == 0 {
            self.print_sums(page, played, options);
            return;
        }
        let mut table = Table::new(&[
            ("added", Side::Right),
            ("op call", Side::Right),
            ("step", Side::Right),
            ("phase", Side::Left),
            ("op", Side::Left),
            ("module", Side::Left),
        ]);
        for op in &self.largest {
            table.row([
                Cell::new(options.units.show(op.delta).to_string(), Style::Strong),
                count(op.index as u64).into(),
                step(op.step).into(),
                shown(&played.texts, op.phase).into(),
                shown(&played.texts, op.op).into(),
                shown(&played.texts, op.module).into(),
            ]);
        }
        page.table(&table);
        page.plain(format!(
            "{} op calls, {} allocation retries (inferred)",
            count(self.count as u64),
            count(self.retries())
        ));
    }

    fn print_legacy(&self, page: &mut Page, texts: &Texts) {
        let rule = "-".repeat(48);
        page.plain(rule.clone());
        page.plain(format!("The number of alloc retries are: {}", self.retries()));
        page.plain(format!("Top {} ops that generates memory are:", self.top));
        for op in &self.largest {
            page.plain(format!("{}: {:?}MB", Self::legacy_name(op, texts), op.delta as f64 / MB));
        }
        page.plain(rule);
    }

    fn sorted_sums(&self, texts: &Texts) -> Vec<(String, String, Sum)> {
        let mut sums: Vec<_> = self
            .sums
            .iter()
            .map(|((op, module), sum)| (shown(texts, *op), shown(texts, *module), *sum))
            .collect();
        sums.sort_by(|a, b| b.2.bytes.cmp(&a.2.bytes).then_with(|| (&a.0, &a.1).cmp(&(&b.0, &b.1))));
        sums
    }

    fn print_sums(&self, page: &mut Page, played: &Played, options: &Options) {
        page.plain(
            "no op rows in this trace (MEMTRACE_OPS=all writes them); all allocations of each op, added up:",
        );
        let mut table = Table::new(&[
            ("allocated", Side::Right),
            ("blocks", Side::Right),
            ("op", Side::Left),
            ("module", Side::Left),
        ]);
        for (op, module, sum) in self.sorted_sums(&played.texts).into_iter().take(self.top) {
            table.row([
                Cell::new(options.units.show(sum.bytes).to_string(), Style::Strong),
                count(sum.blocks).into(),
                op.into(),
                module.into(),
            ]);
        }
        page.table(&table);
        page.plain(format!("{} allocation retries (inferred)", count(self.retries())));
    }

    fn json(&self, trace: &TraceFile, played: &Played, options: &Options) -> Value {
        let texts = &played.texts;
        let top: Vec<Value> = self
            .largest
            .iter()
            .map(|op| {
                json!({
                    "index": op.index,
                    "name": Self::legacy_name(op, texts),
                    "op": &*texts.get(op.op),
                    "module": &*texts.get(op.module),
                    "phase": &*texts.get(op.phase),
                    "step": op.step,
                    "delta_bytes": op.delta,
                })
            })
            .collect();
        let sums: Vec<Value> = self
            .sorted_sums(texts)
            .into_iter()
            .take(self.top)
            .map(|(op, module, sum)| {
                json!({ "op": op, "module": module, "allocated_bytes": sum.bytes, "blocks": sum.blocks })
            })
            .collect();
        let mut value = json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "op_calls": self.count,
            "num_alloc_retries": self.retries(),
            "top": top,
            "allocated_by_op": sums,
        });
        if options.is_set("series") {
            let column = |get: fn(&Totals) -> i64| self.series.iter().map(get).collect::<Vec<_>>();
            value["series"] = json!({
                "allocated_bytes": column(|totals| totals.allocated),
                "active_bytes": column(|totals| totals.active),
                "reserved_bytes": column(|totals| totals.reserved),
                "fw_start": self.fw_start,
                "fw_bw_boundary": self.fw_bw_boundary,
            });
        }
        value
    }
}
