//! The layouts of the report: the table of modules, MemTracker's two layouts, and JSON.

use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use super::super::mem_tracker::{TYPES, rounds_to_nothing, value};
use super::memory;
use super::natural_order::natural;
use super::snapshots::{DeviceTypes, Snapshots};
use super::tracker::{CallState, ModuleStats, Tracker, total};
use crate::options::Options;
use crate::render::numbers::count;
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::rst;
use crate::state::replay::HOST;

impl Tracker {
    /// The modules in MemTracker's natural order.
    fn sorted(&self) -> Vec<(&String, &ModuleStats)> {
        let mut all: Vec<_> = self.modules.iter().collect();
        all.sort_by_cached_key(|(path, _)| natural(path));
        all
    }

    pub(super) fn print(&self, printer: &mut Printer, options: &Options) {
        if self.modules.is_empty() {
            printer.plain(
                "This trace has no module calls. Mark them with ranges: \
                torch.cuda.nvtx.range(\"module:Net.layer\").",
            );
            return;
        }
        if options.is_set("table") {
            self.print_memories(printer, options.units);
        }
        if options.is_set("full") || options.is_set("table") {
            for (path, stats) in self.sorted() {
                printer.plain(format!("Module:  {path}"));
                if options.is_set("table") {
                    print_table(printer, stats, &self.snapshots, options.units);
                } else {
                    print_states(printer, stats, &self.snapshots, options.units);
                }
                printer.gap();
            }
            return;
        }
        let mut table = Table::new(&[
            ("calls", Side::Right),
            ("before", Side::Right),
            ("peak forward", Side::Right),
            ("retained", Side::Right),
            ("peak backward", Side::Right),
            ("recomputed", Side::Right),
            ("parameters", Side::Right),
            ("buffers", Side::Right),
            ("inputs", Side::Right),
            ("outputs", Side::Right),
            ("module", Side::Left),
        ]);
        let sorted = self.sorted();
        let top = options.top.unwrap_or(40);
        for (path, stats) in sorted.iter().take(top) {
            let most = |state| {
                stats.of(state).map_or_else(|| "-".to_owned(), |s| options.units.show(s.highest).to_string())
            };
            let calls = |state| stats.of(state).map_or(0, |series| series.calls);
            let [parameters, buffers, inputs, outputs] = self.memories.of(path).columns().map(|bytes| {
                bytes.map_or_else(|| "-".to_owned(), |bytes| options.units.show(bytes).to_string())
            });
            table.row([
                count(calls(CallState::PreForward)).into(),
                most(CallState::PreForward).into(),
                Cell::new(most(CallState::PeakForward), Style::Strong),
                options.units.show(stats.retained).to_string().into(),
                most(CallState::PeakBackward).into(),
                count(calls(CallState::PreForwardAc)).into(),
                parameters.into(),
                buffers.into(),
                inputs.into(),
                outputs.into(),
                path.as_str().into(),
            ]);
        }
        printer.table(&table);
        if sorted.len() > top {
            printer
                .line([Cell::new(format!("{} more; --top N lists them", sorted.len() - top), Style::Faint)]);
        }
        printer.plain("device memory, the maximum over all calls; --full shows each call by category");
        if !self.memories.has_io {
            printer.plain(memory::NO_IO);
        }
        if self.modules.values().all(|stats| stats.of(CallState::PreBackward).is_none()) {
            printer.plain("no row of the backward pass belongs to a module, so there are no backward states");
        }
    }

    /// Prints parameters, buffers, inputs and outputs of each module as a table.
    fn print_memories(&self, printer: &mut Printer, units: Unit) {
        let heads = ["Module", "Parameter", "Buffer", "Input", "Output"];
        let row = |path: &String| {
            let columns = self.memories.of(path).columns();
            let cells =
                columns.map(|bytes| bytes.map_or_else(|| "-".to_owned(), |bytes| value(bytes, units)));
            std::iter::once(path.clone()).chain(cells).collect()
        };
        let rows: Vec<Vec<String>> = self.sorted().into_iter().map(|(path, _)| row(path)).collect();
        for line in rst::table(&heads, &rows) {
            printer.plain(line);
        }
        if !self.memories.has_io {
            printer.plain(memory::NO_IO);
        }
        printer.gap();
    }

    pub(super) fn json(&self) -> Value {
        let modules: Vec<Value> = self
            .sorted()
            .into_iter()
            .map(|(path, stats)| {
                let states: serde_json::Map<String, Value> = stats
                    .states
                    .iter()
                    .map(|series| {
                        let kept: Vec<Value> =
                            series.kept.iter().map(|kept| snapshot_json(&self.snapshots.get(kept))).collect();
                        (series.state.name().to_owned(), kept.into())
                    })
                    .collect();
                let mut module = json!({
                    "module": path,
                    "calls": stats.of(CallState::PreForward).map_or(0, |series| series.calls),
                    "retained_bytes": stats.retained,
                    "states": states,
                });
                self.memories.of(path).add_to(&mut module);
                module
            })
            .collect();
        modules.into()
    }
}

fn device_name(ordinal: i32) -> String {
    if ordinal == HOST { "cpu (pinned)".to_owned() } else { format!("cuda:{ordinal}") }
}

fn snapshot_json(snapshot: &DeviceTypes) -> Value {
    let devices: serde_json::Map<String, Value> = snapshot
        .iter()
        .map(|(device, types)| {
            let mut value = json!({ "Total": total(types) });
            for ((name, _), bytes) in TYPES.iter().zip(types) {
                value[*name] = (*bytes).into();
            }
            (device_name(*device), value)
        })
        .collect();
    devices.into()
}

/// MemTracker's plain layout.
fn print_states(printer: &mut Printer, stats: &ModuleStats, snapshots: &Snapshots, units: Unit) {
    for series in &stats.states {
        printer.plain(series.state.name());
        for (index, snapshot) in series.kept.iter().map(|kept| snapshots.get(kept)).enumerate() {
            printer.plain(format!("# {}:", index + 1));
            if snapshot.is_empty() {
                printer.plain("No memory tracked.");
            }
            for (device, types) in &snapshot {
                if rounds_to_nothing(total(types), units) {
                    continue;
                }
                printer.plain(format!("Device: {}", device_name(*device)));
                for ((name, _), bytes) in TYPES.iter().zip(types) {
                    printer.plain(format!("\t{name}: {}", value(*bytes, units)));
                }
                printer.plain(format!("\tTotal: {}", value(total(types), units)));
            }
        }
    }
}

/// MemTracker's table.
fn print_table(printer: &mut Printer, stats: &ModuleStats, snapshots: &Snapshots, units: Unit) {
    let heads: Vec<&str> = ["State & Call", "Device"]
        .into_iter()
        .chain(TYPES.iter().map(|(name, _)| *name))
        .chain(["Total"])
        .collect();
    let mut rows = Vec::new();
    for series in &stats.states {
        for (index, snapshot) in series.kept.iter().map(|kept| snapshots.get(kept)).enumerate() {
            let mut label = format!("{} # {}", series.state.name(), index + 1);
            for (device, types) in &snapshot {
                if rounds_to_nothing(total(types), units) {
                    continue;
                }
                // Blank when it equals the row above.
                let mut row = vec![std::mem::take(&mut label), device_name(*device)];
                row.extend(types.iter().chain([&total(types)]).map(|bytes| value(*bytes, units)));
                rows.push(row);
            }
        }
    }
    for line in rst::table(&heads, &rows) {
        printer.plain(line);
    }
}
