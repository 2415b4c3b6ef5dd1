//! The tables of `memtrace ops`: the memory that each op allocated, by op and module and by call.

use serde_json::{Value, json};

use crate::options::Options;
use crate::read::symbols::{NO_MODULE, NO_OP, NO_PHASE, Symbol};
use crate::render::numbers::{count, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::group::APART;
use crate::state::op_allocations::{OpAllocations, OpSum, name_of};
use crate::state::replay_trace::Replayed;

/// Returns the sums by op and module, the largest first. Repeated layers are joined, except with `--apart`.
fn sums(
    allocations: &OpAllocations,
    replayed: &Replayed,
    options: &Options,
) -> Vec<((String, String), OpSum)> {
    let symbols = &replayed.symbols;
    let modules = allocations.sums.keys().map(|(_, module)| *module);
    let layers = (!options.is_set(APART.name)).then(|| replayed.replay.classes.layers(modules, symbols));
    let module_name = |module: Symbol| {
        let name = symbols.or(module, NO_MODULE);
        layers.as_ref().map_or_else(|| name.clone(), |layers| layers.joined(&name))
    };
    allocations.sorted_sums(|op, module| (name_of(&symbols.or(op, NO_OP)).to_owned(), module_name(module)))
}

/// Prints the table by op and module, and the table of the largest calls.
pub(super) fn print_allocated(
    printer: &mut Printer,
    allocations: &OpAllocations,
    replayed: &Replayed,
    options: &Options,
) {
    let sums = sums(allocations, replayed, options);
    if sums.is_empty() {
        printer.plain("No memory tracked.");
        return;
    }
    let (units, symbols) = (options.units, &replayed.symbols);
    let mut table = Table::new(&[
        ("allocated", Side::Right),
        ("calls", Side::Right),
        ("largest call", Side::Right),
        ("blocks", Side::Right),
        ("op", Side::Left),
        ("module", Side::Left),
    ]);
    let top = allocations.top;
    for ((op, module), sum) in sums.iter().take(top) {
        table.row([
            Cell::new(units.show(sum.bytes).to_string(), Style::Strong),
            count(sum.calls).into(),
            units.show(sum.largest).to_string().into(),
            count(sum.blocks).into(),
            op.clone().into(),
            module.clone().into(),
        ]);
    }
    printer.table(&table);
    printer.more(sums.len().saturating_sub(top), "");
    printer.gap();
    let mut table = Table::new(&[
        ("allocated", Side::Right),
        ("blocks", Side::Right),
        ("step", Side::Right),
        ("phase", Side::Left),
        ("op", Side::Left),
        ("module", Side::Left),
    ]);
    for call in &allocations.largest {
        table.row([
            Cell::new(units.show(call.bytes).to_string(), Style::Strong),
            count(call.blocks).into(),
            step_or_dash(call.step).into(),
            symbols.or(call.phase, NO_PHASE).into(),
            name_of(&symbols.or(call.op, NO_OP)).to_owned().into(),
            symbols.or(call.module, NO_MODULE).into(),
        ]);
    }
    printer.table(&table);
}

/// Adds the sums by op and module and the largest calls to `value`.
pub(super) fn allocated_json(
    value: &mut Value,
    allocations: &OpAllocations,
    replayed: &Replayed,
    options: &Options,
) {
    let symbols = &replayed.symbols;
    let text = |symbol: Symbol| symbols.get(symbol).to_string();
    value["sums"] = sums(allocations, replayed, options)
        .into_iter()
        .take(allocations.top)
        .map(|((op, module), sum)| {
            json!({
                "op": op,
                "module": module,
                "allocated_bytes": sum.bytes,
                "calls": sum.calls,
                "largest_bytes": sum.largest,
                "blocks": sum.blocks,
            })
        })
        .collect();
    value["calls"] = allocations
        .largest
        .iter()
        .map(|call| {
            json!({
                "seq": call.seq,
                "ts_ns": call.ts_ns,
                "op": name_of(&text(call.op)),
                "module": text(call.module),
                "phase": text(call.phase),
                "step": call.step,
                "allocated_bytes": call.bytes,
                "blocks": call.blocks,
            })
        })
        .collect();
}
