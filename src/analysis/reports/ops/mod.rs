//! `memtrace ops`: the ops that allocated the most memory, by op and module and by call.
//!
//! With `--legacy`, the list follows PyTorch's `MemoryTracker`: the delta of an op is the difference between
//! `allocated` at its end and `allocated` at the end of the previous op. So memory that is freed before the
//! end does not count, and the first op has no delta.
//!
//! In a comparison with `MemoryTracker` in the same process, the series of totals was identical to the byte.
//! The names were identical, too, with the overloads of `MEMTRACE_OPS=io` ([`OpCall::name`]).

mod actions;
mod allocated;

use memtrace_trace::EventName;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::report::{Answer, Report, View, for_each_process, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::read::symbols::{NO_MODULE, NO_OP, Symbol, SymbolTable};
use crate::render::heading::process_heading;
use crate::render::numbers::counted;
use crate::render::printer::Printer;
use crate::state::group::APART;
use crate::state::op_allocations::{self, OpAllocations};
use crate::state::op_calls::{self, MB, OpCall, OpCalls};
use crate::state::replay::{Metric, Replay, Totals};
use crate::state::replay_trace::{Replayed, replay_trace};
use actions::{ACTIONS, Actions};
use allocated::{allocated_json, print_allocated};

/// `memtrace ops`.
pub(super) struct OpsReport;

impl Report for OpsReport {
    fn name(&self) -> &'static str {
        "ops"
    }

    fn about(&self) -> &'static str {
        "List the ops and the single calls that allocated the most memory, and the allocator's retries"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("ops out", "the ops that allocated the most"),
            ("ops --nested out", "by the innermost op"),
            ("ops --legacy out", "the list as MemoryTracker prints it"),
            ("ops --actions out", "blocks created, changed and destroyed, as torch.profiler counts them"),
        ]
    }

    fn flags(&self) -> &'static [Flag] {
        const {
            &[
                Flag::switch(
                    "nested",
                    "Count each block under its innermost op instead of the op that was \
                                        called",
                ),
                APART,
                Flag::switch(
                    "legacy",
                    "Print MemoryTracker's text with its numbered names: growth from the end of one op to \
                     the end of the next",
                ),
                Flag::switch(
                    "series",
                    "With --json: add allocated, active and reserved after every op, and the markers",
                ),
            ]
        }
    }

    fn views(&self) -> &'static [View] {
        const { &[View { asked_by: &[ACTIONS], report: &Actions }] }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let answer = for_each_process(input, options, |index, trace, printer, footer| {
            let mut ops = Ops::new(options);
            let replayed = replay_trace(
                trace,
                op_calls::COLUMNS.and(op_allocations::COLUMNS),
                options,
                Metric::Allocated,
                flow_categories(trace, options)?,
                |row, replay| {
                    if replay.in_window() {
                        ops.feed(row, replay);
                    }
                },
            )?;
            footer.add(trace, &replayed, options);
            ops.allocations.end();
            if ops.calls.count == 0
                && !ops.sums.is_empty()
                && !footer.notes.iter().any(|note| note == WITHOUT_ROWS)
            {
                footer.notes.push(WITHOUT_ROWS.to_owned());
            }
            process_heading(printer, input, index);
            ops.print(printer, &replayed, options);
            Ok(ops.json(trace, &replayed, options))
        })?;
        let hints = vec![next("peak", input, "--by op")];
        Ok(Answer { next: hints, ..answer })
    }
}

/// The note for a trace that has blocks but no rows of ops.
const WITHOUT_ROWS: &str = "no rows of ops in this trace, so each block counts as a call of its op: MEMTRACE_OPS=top, the default, records them";

/// The maximum number of ops in MemoryTracker's list without `--top`, the same as MemoryTracker prints.
const TOP: usize = 20;
/// The maximum number of lines of each table without `--top`: both tables fit one screen.
const EACH_TOP: usize = 15;

/// The allocations of one op.
#[derive(Clone, Copy, Default)]
struct Sum {
    bytes: i64,
    blocks: u64,
}

struct Ops {
    calls: OpCalls,
    device: Option<i32>,
    legacy: bool,
    keep_series: bool,
    top: usize,
    /// The largest deltas so far.
    largest: Vec<(i64, OpCall)>,
    series: Vec<Totals>,
    /// The allocations by innermost op and by module. Unlike the rest of the report, these sums do not depend
    /// on the options.
    sums: FxHashMap<(Symbol, Symbol), Sum>,
    allocations: OpAllocations,
}

impl Ops {
    fn new(options: &Options) -> Ops {
        Ops {
            calls: OpCalls::new(options.device),
            device: options.device,
            legacy: options.is_set("legacy"),
            keep_series: options.is_set("series"),
            top: options.top.unwrap_or(TOP),
            largest: Vec::new(),
            series: Vec::new(),
            sums: FxHashMap::default(),
            allocations: OpAllocations::new(
                options.device,
                options.is_set("nested"),
                options.top.unwrap_or(EACH_TOP),
            ),
        }
    }

    fn feed(&mut self, row: &Record, replay: &Replay) {
        let is_wanted = self.device.is_none_or(|only| only == row.device);
        if row.event == EventName::Alloc && is_wanted {
            let sum = self.sums.entry((row.op, row.module)).or_default();
            sum.bytes += row.delta_bytes;
            sum.blocks += 1;
        }
        self.allocations.feed(row, replay);
        let Some(call) = self.calls.feed(row, replay) else { return };
        if call.index == 0 {
            self.largest.clear();
            self.series.clear();
        }
        if let Some(delta) = call.delta {
            // Of equal deltas, the earlier op comes first. MemoryTracker has the same order, because Python's
            // sort is stable.
            let place = self.largest.partition_point(|(other, _)| *other >= delta);
            if place < self.top {
                self.largest.insert(place, (delta, call));
                self.largest.truncate(self.top);
            }
        }
        if self.keep_series {
            self.series.push(call.totals);
        }
    }

    fn print(&self, printer: &mut Printer, replayed: &Replayed, options: &Options) {
        if self.legacy {
            self.print_legacy(printer, &replayed.symbols);
            return;
        }
        print_allocated(printer, &self.allocations, replayed, options);
        printer.plain(format!(
            "{}, {} (inferred)",
            counted(self.calls.count as u64, "op call"),
            counted(self.calls.retries.count(), "allocation retry")
        ));
    }

    fn print_legacy(&self, printer: &mut Printer, symbols: &SymbolTable) {
        let rule = "-".repeat(48);
        printer.plain(rule.clone());
        printer.plain(format!("The number of alloc retries are: {}", self.calls.retries.count()));
        printer.plain(format!("Top {} ops that generates memory are:", self.top));
        for (delta, op) in &self.largest {
            printer.plain(format!("{}: {:?}MB", op.name(symbols), *delta as f64 / MB));
        }
        printer.plain(rule);
    }

    fn sorted_sums(&self, symbols: &SymbolTable) -> Vec<(String, String, Sum)> {
        let mut sums: Vec<_> = self
            .sums
            .iter()
            .map(|((op, module), sum)| (symbols.or(*op, NO_OP), symbols.or(*module, NO_MODULE), *sum))
            .collect();
        sums.sort_by(|a, b| b.2.bytes.cmp(&a.2.bytes).then_with(|| (&a.0, &a.1).cmp(&(&b.0, &b.1))));
        sums
    }

    fn json(&self, trace: &TraceFile, replayed: &Replayed, options: &Options) -> Value {
        let symbols = &replayed.symbols;
        let top: Vec<Value> = self
            .largest
            .iter()
            .map(|(delta, op)| {
                json!({
                    "index": op.index,
                    "name": op.name(symbols),
                    "op": &*symbols.get(op.op),
                    "module": &*symbols.get(op.module),
                    "phase": &*symbols.get(op.phase),
                    "step": op.step,
                    "delta_bytes": delta,
                })
            })
            .collect();
        let sums: Vec<Value> = self
            .sorted_sums(symbols)
            .into_iter()
            .take(self.top)
            .map(|(op, module, sum)| {
                json!({ "op": op, "module": module, "allocated_bytes": sum.bytes, "blocks": sum.blocks })
            })
            .collect();
        let mut value = json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "op_calls": self.calls.count,
            "num_alloc_retries": self.calls.retries.count(),
            "top": top,
            "allocated_by_op": sums,
        });
        allocated_json(&mut value, &self.allocations, replayed, options);
        if options.is_set("series") {
            let column = |get: fn(&Totals) -> i64| self.series.iter().map(get).collect::<Vec<_>>();
            value["series"] = json!({
                "allocated_bytes": column(|totals| totals.allocated),
                "active_bytes": column(|totals| totals.active),
                "reserved_bytes": column(|totals| totals.reserved),
                "fw_start": self.calls.fw_start,
                "fw_bw_boundary": self.calls.fw_bw_boundary,
            });
        }
        value
    }
}
