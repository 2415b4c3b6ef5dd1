//! Finds the owners of the memory that grew.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;

use super::changes::Change;
use super::measured::MeasuredGrowth;
use crate::error::Result;
use crate::options::{Options, Window};
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::state::block::Block;
use crate::state::categories::KnownCategories;
use crate::state::group::category;
use crate::state::module_layers::Layers;
use crate::state::replay::{MemoryKind, Metric};
use crate::state::replay_trace::{Replayed, replay_trace};

/// Returns the memory that is live at the highest peak, by owner, compared with the highest peak up to
/// the first level that counts. Blocks of earlier steps are kept memory, so they do not count. Reads the trace
/// twice.
///
/// # Errors
/// When the trace cannot be read.
pub(super) fn changes_between_peaks(
    measured: &MeasuredGrowth,
    trace: &TraceFile,
    options: &Options,
    known: &KnownCategories,
) -> Result<Vec<Change>> {
    let sums = |window: Window| -> Result<FxHashMap<String, i64>> {
        let first = if measured.is_by_time() { i64::MIN } else { window.from_step };
        let options = Options { window, ..options.clone() };
        let columns = Columns::of(&[]);
        let at = replay_trace(trace, columns, &options, Metric::Allocated, known.clone(), |_, _| {})?;
        let layers = at.replay.classes.layers([], &at.symbols);
        let mut sums = FxHashMap::default();
        for block in at.replay.at_peak(measured.ordinal(), false) {
            if block.owner.step < first {
                continue;
            }
            *sums.entry(owner_name(&at.symbols, &layers, &block)).or_default() += block.bytes;
        }
        Ok(sums)
    };
    let (before, after) = measured.two_peaks();
    let (before, after) = (sums(before)?, sums(after)?);
    let change = |(what, after): (String, i64)| {
        let before = before.get(&what).copied().unwrap_or(0);
        Change::between(what, before, after)
    };
    Ok(after.into_iter().map(change).collect())
}

/// Returns the live memory that was allocated after the first level that counts, by owner.
pub(super) fn new_owners(measured: &MeasuredGrowth, before_last: &Replayed) -> Vec<Change> {
    let layers = before_last.replay.classes.layers([], &before_last.symbols);
    let mut owners: BTreeMap<String, (i64, Vec<i64>)> = BTreeMap::new();
    let since = measured.first().step;
    let live = before_last.replay.live().values();
    for block in live.filter(|block| block.kind == MemoryKind::Block && block.device == measured.ordinal()) {
        if block.owner.step > since {
            let name = owner_name(&before_last.symbols, &layers, block);
            let (bytes, steps) = owners.entry(name).or_default();
            *bytes += block.bytes;
            steps.push(block.owner.step);
        }
    }
    owners.into_iter().map(|(what, (after, steps))| Change::new(what, after, steps)).collect()
}

/// Returns the op and module of a block, or its category if it has neither. Repeated layers are joined.
pub(crate) fn owner_name(symbols: &SymbolTable, layers: &Layers, block: &Block) -> String {
    let owner = &block.owner;
    let op = symbols.or_dash(owner.op);
    let module = layers.joined(&symbols.or_dash(owner.module));
    match (&*op, module.as_str()) {
        ("-", "-") => category(owner.category).to_owned(),
        ("-", module) => format!("{} in {module}", category(owner.category)),
        (op, "-") => format!("{op} ({})", category(owner.category)),
        (op, module) => format!("{op} in {module}"),
    }
}
