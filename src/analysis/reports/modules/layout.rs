//! The layouts of the report: the table of modules, MemTracker's two layouts, and JSON.

use std::collections::BTreeMap;

use memtrace_trace::units::Unit;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::super::mem_tracker::{names, rounds_to_nothing, value};
use super::memory::{self, Memory};
use super::natural_order::natural;
use super::snapshots::{DeviceTypes, Snapshots};
use super::tracker::{CallState, ModuleStats, Tracker, total};
use crate::options::Options;
use crate::read::symbols::SymbolTable;
use crate::render::formats::Form;
use crate::render::numbers::{count, counted, percent, share};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::rst;
use crate::state::group::APART;
use crate::state::module_layers::Layers;
use crate::state::replay::{Replay, device_name};

/// A row of the table: a module, or repeated layers. Sizes are in bytes; `modules`, `calls` and `recomputed`
/// are counts.
#[derive(Default)]
struct ModuleRow {
    path: String,
    modules: u64,
    calls: u64,
    before: Option<i64>,
    peak_forward: Option<i64>,
    /// The memory that the modules retain, summed over the modules. `largest` is the maximum of one module.
    retained: i64,
    largest: i64,
    peak_backward: Option<i64>,
    recomputed: u64,
    own_parameters: i64,
    /// Parameters and buffers (sums over the modules), inputs and outputs (maxima); `None` if unknown.
    memory: [Option<i64>; 4],
    /// The bytes of the parameters of each known type.
    types: BTreeMap<String, i64>,
}

impl ModuleRow {
    fn add(&mut self, stats: &ModuleStats, memory: &Memory, symbols: &SymbolTable) {
        let highest = |state| stats.history(state).map(|series| series.highest);
        let calls = |state| stats.history(state).map_or(0, |series| series.calls);
        self.modules += 1;
        self.calls += calls(CallState::PreForward);
        self.before = self.before.max(highest(CallState::PreForward));
        self.peak_forward = self.peak_forward.max(highest(CallState::PeakForward));
        self.retained += stats.retained;
        self.largest = self.largest.max(stats.retained);
        self.peak_backward = self.peak_backward.max(highest(CallState::PeakBackward));
        self.recomputed += calls(CallState::PreForwardAc);
        self.own_parameters += memory.own_parameters();
        let [parameters, buffers, inputs, outputs] = memory.columns();
        let sum = |all: Option<i64>, one: Option<i64>| one.map(|one| all.unwrap_or(0) + one).or(all);
        let [all_parameters, all_buffers, most_inputs, most_outputs] = self.memory;
        self.memory = [
            sum(all_parameters, parameters),
            sum(all_buffers, buffers),
            most_inputs.max(inputs),
            most_outputs.max(outputs),
        ];
        for (dtype, bytes) in memory.types(symbols) {
            *self.types.entry(dtype).or_default() += bytes;
        }
    }

    /// Returns the types of the parameters, the one with the most bytes first: `bfloat16 98 %, float32 2 %`.
    fn shown_types(&self) -> String {
        let all: i64 = self.types.values().sum();
        let mut types: Vec<(&str, i64)> =
            self.types.iter().map(|(dtype, bytes)| (dtype.as_str(), *bytes)).collect();
        types.sort_by_key(|(_, bytes)| -bytes);
        match types.as_slice() {
            [] => String::new(),
            [(only, _)] => (*only).to_owned(),
            _ => {
                let shown =
                    types.iter().map(|(dtype, bytes)| format!("{dtype} {}", percent(share(*bytes, all))));
                shown.collect::<Vec<_>>().join(", ")
            }
        }
    }
}

impl Tracker {
    /// Returns the modules in MemTracker's natural order.
    fn sorted(&self) -> Vec<(&String, &ModuleStats)> {
        let mut all: Vec<_> = self.modules.iter().collect();
        all.sort_by_cached_key(|(path, _)| natural(path));
        all
    }

    /// Returns the repeated layers among these modules; empty with `--apart`.
    pub(super) fn layers(&self, replay: &Replay, options: &Options) -> Layers {
        if options.is_set(APART.name) {
            return Layers::default();
        }
        let paths = self.modules.keys().map(|path| replay.symbols.intern(path));
        replay.classes.layers(paths, &replay.symbols)
    }

    pub(super) fn print(
        &self,
        printer: &mut Printer,
        layers: &Layers,
        symbols: &SymbolTable,
        options: &Options,
    ) {
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
            let (kept, deeper): (Vec<_>, Vec<_>) =
                self.sorted().into_iter().partition(|(path, _)| self.keeps_calls(path));
            for (path, stats) in kept {
                printer.plain(format!("Module:  {path}"));
                // CSV output consists of tables only.
                if options.is_set("table") || options.form == Form::Csv {
                    print_table(printer, path, stats, &self.snapshots, options.units);
                } else {
                    print_states(printer, stats, &self.snapshots, options.units);
                }
                printer.gap();
            }
            self.print_too_deep(printer, deeper.len());
            return;
        }
        let rows = self.rows(layers, symbols);
        let has_types = rows.iter().any(|row| !row.types.is_empty());
        let is_joined = rows.iter().any(|row| row.modules > 1);
        let joined_columns =
            |columns: &[(&'static str, Side)]| if is_joined { columns.to_vec() } else { Vec::new() };
        let mut columns = vec![("calls", Side::Right)];
        columns.extend(joined_columns(&[("modules", Side::Right)]));
        columns.extend([("before", Side::Right), ("peak forward", Side::Right), ("retained", Side::Right)]);
        columns.extend(joined_columns(&[("largest", Side::Right)]));
        columns.extend([
            ("peak backward", Side::Right),
            ("recomputed", Side::Right),
            ("own parameters", Side::Right),
            ("parameters", Side::Right),
            ("buffers", Side::Right),
            ("inputs", Side::Right),
            ("outputs", Side::Right),
        ]);
        if has_types {
            columns.push(("types", Side::Left));
        }
        columns.push(("module", Side::Left));
        let mut table = Table::new(&columns);
        let show = |bytes: i64| options.units.show(bytes).to_string();
        let show_known = |bytes: Option<i64>| bytes.map_or_else(|| "-".to_owned(), show);
        let top = options.top.unwrap_or(40);
        for row in rows.iter().take(top) {
            let mut cells: Vec<Cell> = vec![count(row.calls).into()];
            if is_joined {
                cells.push(count(row.modules).into());
            }
            cells.extend([
                show_known(row.before).into(),
                Cell::new(show_known(row.peak_forward), Style::Strong),
                show(row.retained).into(),
            ]);
            if is_joined {
                let largest = if row.modules > 1 { show(row.largest) } else { String::new() };
                cells.push(largest.into());
            }
            cells.extend([
                show_known(row.peak_backward).into(),
                count(row.recomputed).into(),
                show(row.own_parameters).into(),
            ]);
            cells.extend(row.memory.map(|bytes| Cell::from(show_known(bytes))));
            if has_types {
                cells.push(row.shown_types().into());
            }
            cells.push(row.path.as_str().into());
            table.row(cells);
        }
        printer.table(&table);
        printer.more(rows.len().saturating_sub(top), "");
        self.print_too_deep(printer, 0);
        printer.plain(
            "device memory, the maximum over all calls, in the order of the model; all columns except own \
             parameters include the modules below; --full shows each call by category",
        );
        if is_joined {
            printer.plain(
                "a row with * joins repeated layers; --apart lists each layer. The columns calls, retained, \
                 recomputed, parameters and buffers are sums over the layers, the others are maxima; largest \
                 is the most that one layer retains",
            );
        }
        if !self.memories.has_io {
            printer.plain(memory::NO_IO);
        }
        if self.modules.values().all(|stats| stats.history(CallState::PreBackward).is_none()) {
            printer.plain("no row of the backward pass belongs to a module, so there are no backward states");
        }
    }

    /// Prints how many modules are left out because they are too deep: the modules that were not followed,
    /// and `more` modules that were followed.
    fn print_too_deep(&self, printer: &mut Printer, more: usize) {
        let deeper = self.too_deep() + more;
        if deeper > 0 {
            printer.plain(format!(
                "{} at deeper levels of their path left out; --depth N sets the deepest level",
                counted(deeper as u64, "module")
            ));
        }
    }

    /// Returns the rows of the table: the modules, with repeated layers joined.
    fn rows(&self, layers: &Layers, symbols: &SymbolTable) -> Vec<ModuleRow> {
        let mut rows: Vec<ModuleRow> = Vec::new();
        let mut places: FxHashMap<String, usize> = FxHashMap::default();
        for (path, stats) in self.sorted() {
            let joined = layers.joined(path);
            let place = *places.entry(joined.clone()).or_insert_with(|| {
                rows.push(ModuleRow { path: joined, ..ModuleRow::default() });
                rows.len() - 1
            });
            rows[place].add(stats, &self.memories.memory_at(path), symbols);
        }
        rows
    }

    /// Prints parameters, buffers, inputs and outputs of each module as a table.
    fn print_memories(&self, printer: &mut Printer, units: Unit) {
        let heads = ["Module", "Parameter", "Buffer", "Input", "Output"];
        let row = |path: &String| {
            let columns = self.memories.memory_at(path).columns();
            let cells =
                columns.map(|bytes| bytes.map_or_else(|| "-".to_owned(), |bytes| value(bytes, units)));
            std::iter::once(path.clone()).chain(cells).collect()
        };
        let rows: Vec<Vec<String>> = self.sorted().into_iter().map(|(path, _)| row(path)).collect();
        rst::print(printer, &heads, &rows);
        if !self.memories.has_io {
            printer.plain(memory::NO_IO);
        }
        printer.gap();
    }

    pub(super) fn json(&self, symbols: &SymbolTable) -> Value {
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
                let highest: serde_json::Map<String, Value> = stats
                    .states
                    .iter()
                    .map(|series| (series.state.name().to_owned(), series.highest.into()))
                    .collect();
                let mut module = json!({
                    "module": path,
                    "highest_bytes": highest,
                    "calls": stats.history(CallState::PreForward).map_or(0, |series| series.calls),
                    "retained_bytes": stats.retained,
                    "states": states,
                });
                self.memories.memory_at(path).add_to(&mut module, symbols);
                module
            })
            .collect();
        modules.into()
    }
}

fn snapshot_json(snapshot: &DeviceTypes) -> Value {
    let devices: serde_json::Map<String, Value> = snapshot
        .iter()
        .map(|(device, types)| {
            let mut value = json!({ "Total": total(types) });
            for (name, bytes) in names([types]).zip(types) {
                value[name] = (*bytes).into();
            }
            (device_name(*device), value)
        })
        .collect();
    devices.into()
}

/// Prints the states of a module in MemTracker's plain layout.
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
                for (name, bytes) in names([types]).zip(types) {
                    printer.plain(format!("\t{name}: {}", value(*bytes, units)));
                }
                printer.plain(format!("\tTotal: {}", value(total(types), units)));
            }
        }
    }
}

/// Prints the states of a module as MemTracker's table.
fn print_table(printer: &mut Printer, path: &str, stats: &ModuleStats, snapshots: &Snapshots, units: Unit) {
    // A CSV table has no title, so each row names the module.
    let is_csv = printer.form() == Form::Csv;
    let module = is_csv.then_some("Module");
    let all: Vec<DeviceTypes> =
        stats.states.iter().flat_map(|series| &series.kept).map(|kept| snapshots.get(kept)).collect();
    let types = names(all.iter().flatten().map(|(_, types)| types));
    let kinds = types.clone().count();
    let heads: Vec<&str> =
        module.into_iter().chain(["State & Call", "Device"]).chain(types).chain(["Total"]).collect();
    let mut rows = Vec::new();
    for series in &stats.states {
        for (index, snapshot) in series.kept.iter().map(|kept| snapshots.get(kept)).enumerate() {
            let mut label = format!("{} # {}", series.state.name(), index + 1);
            for (device, types) in &snapshot {
                if rounds_to_nothing(total(types), units) {
                    continue;
                }
                // Except in CSV, only the first row of a snapshot shows the label.
                let label = if is_csv { label.clone() } else { std::mem::take(&mut label) };
                let mut row: Vec<String> = module.map(|_| path.to_owned()).into_iter().collect();
                row.extend([label, device_name(*device)]);
                row.extend(types[..kinds].iter().chain([&total(types)]).map(|bytes| value(*bytes, units)));
                rows.push(row);
            }
        }
    }
    rst::print(printer, &heads, &rows);
}
