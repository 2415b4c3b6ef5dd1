//! The reference types of PyTorch's `MemTracker` and its format of bytes, for the reports that imitate
//! `MemTracker`.

use memtrace_trace::Category;
use memtrace_trace::units::Unit;

use crate::options::Flag;
use crate::read::symbols::Symbol;
use crate::state::categories::Phases;

/// MemTracker's reference types in its order, each with the categories of memtrace that belong to it, and then
/// the types of `FSDPMemTracker`.
const TYPES: &[(&str, &[Category])] = &[
    ("Parameter", &[Category::Parameter]),
    ("Buffer", &[Category::Buffer]),
    ("Gradient", &[Category::Gradient]),
    ("Activation", &[Category::Activation]),
    ("Temp", &[Category::Temporary]),
    ("Optstate", &[Category::OptimizerState]),
    (
        "Other",
        &[
            Category::Other,
            Category::Input,
            Category::AutogradDetail,
            Category::None,
            Category::Script,
            Category::Loaded,
            Category::KvCache,
            Category::CudaGraph,
            Category::Workspace,
        ],
    ),
    ("Unsharded Param", &[Category::UnshardedParameter]),
    ("Unsharded Grad", &[Category::UnshardedGradient]),
    ("All Gather", &[Category::AllGather]),
    ("Reduce Scatter", &[Category::ReduceScatter]),
];
/// The index of MemTracker's type "Other", its last.
const OTHER: usize = TYPES.len() - 5;

/// The option that counts bytes as `MemTracker` does.
pub(super) const ROUNDED: Flag =
    Flag::switch("rounded", "Count requested sizes, rounded up, as MemTracker does, instead of block sizes");

/// The bytes of each of [`TYPES`].
pub(super) type Types = [i64; TYPES.len()];

/// Returns the names of the types that a table of these rows shows: MemTracker's, and those of FSDP if one of
/// the rows has memory of FSDP.
pub(super) fn names<'a>(
    rows: impl IntoIterator<Item = &'a Types>,
) -> impl Iterator<Item = &'static str> + Clone {
    let has_fsdp = rows.into_iter().any(|types| types[OTHER + 1..].iter().any(|bytes| *bytes != 0));
    let shown = if has_fsdp { TYPES } else { &TYPES[..=OTHER] };
    shown.iter().map(|(name, _)| *name)
}

/// Returns the index in [`TYPES`] of a block of this category that was allocated in `phase`. As in
/// MemTracker, temporary memory of an optimizer's step counts as optimizer state.
pub(super) fn type_of(category: Category, phase: Symbol, phases: &Phases) -> usize {
    match category {
        Category::Temporary if phase == phases.optimizer => index_of(Category::OptimizerState),
        category => index_of(category),
    }
}

fn index_of(category: Category) -> usize {
    TYPES.iter().position(|(_, categories)| categories.contains(&category)).unwrap_or(OTHER)
}

/// Formats a value as MemTracker prints it, which is Python's `round(value, 2)`. A value in bytes is not
/// rounded.
pub(super) fn value(bytes: i64, units: Unit) -> String {
    if units == Unit::Auto {
        return units.show(bytes).to_string();
    }
    let text = units.show(bytes).to_string();
    match text.split_once('.') {
        // Python prints at least one decimal and drops a second one that is zero: 1.50 is `1.5`, 2.00 is
        // `2.0`.
        Some((whole, rest)) => {
            let (decimals, unit) = rest.split_at(2);
            format!("{whole}.{}{unit}", decimals.strip_suffix('0').unwrap_or(decimals))
        }
        None => text,
    }
}

/// Returns true if the total is zero once rounded to the unit.
pub(super) fn rounds_to_nothing(total: i64, units: Unit) -> bool {
    total <= 0 || (units != Unit::Auto && value(total, units).starts_with("0.0 "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mem_tracker_values_are_rounded_as_in_python() {
        assert_eq!(value(1536, Unit::KiB), "1.5 KiB");
        assert_eq!(value(2048, Unit::KiB), "2.0 KiB");
        assert_eq!(value(1234, Unit::KiB), "1.21 KiB");
        assert_eq!(value(1234, Unit::B), "1234 B");
        assert!(rounds_to_nothing(1, Unit::GiB) && !rounds_to_nothing(1, Unit::B));
    }

    #[test]
    fn every_category_has_a_mem_tracker_type() {
        for category in Category::ALL {
            assert!(TYPES[index_of(*category)].1.contains(category));
        }
    }
}
