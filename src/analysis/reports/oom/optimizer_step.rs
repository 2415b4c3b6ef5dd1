//! The memory that an optimizer's step has yet to allocate at an OOM.

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::SymbolTable;
use crate::state::block::Block;

/// The minimum number of pairs of equal blocks that show an optimizer with two blocks of state per parameter.
const FEWEST_PAIRS: usize = 3;

/// The memory of an optimizer's step at a request within this step; sizes are in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct OptimizerStep {
    /// State that the optimizer's first step has yet to allocate after the request. Each remaining parameter gets as
    /// many blocks of its size as the earlier ones.
    pub(super) to_come: i64,
    /// The bytes of the request, if it is for state.
    pub(super) requested: i64,
    /// The temporary results of a step for all parameters at once: one per parameter, as large as its
    /// gradient.
    pub(super) temporaries: i64,
    /// True if the rest of the step probably allocates `temporaries`: the state is Adam's, and its step counts
    /// are on the CPU, so the optimizer is not fused.
    pub(super) is_foreach: bool,
}

impl OptimizerStep {
    pub(super) fn find(live: &[Block], symbols: &SymbolTable, row: &Record) -> OptimizerStep {
        if *symbols.get(row.phase) != *"optimizer" {
            return OptimizerStep::default();
        }
        // For each size: the number of gradients, which is the number of trained parameters, and the number
        // of blocks of optimizer state. Until the first step has ended, state has the category temporary.
        let mut sizes: FxHashMap<i64, (i64, i64)> = FxHashMap::default();
        // The step counts of a fused optimizer, one number per parameter.
        let is_number = |block: &&Block| {
            let is_state = matches!(block.owner.category, Category::OptimizerState | Category::Temporary);
            is_state && block.owner.phase == row.phase && (1..=8).contains(&block.requested)
        };
        let numbers = live.iter().filter(is_number).count();
        for block in live {
            match block.owner.category {
                Category::Gradient => sizes.entry(block.bytes).or_default().0 += 1,
                Category::OptimizerState => sizes.entry(block.bytes).or_default().1 += 1,
                Category::Temporary if block.owner.phase == row.phase => {
                    sizes.entry(block.bytes).or_default().1 += 1;
                }
                _ => {}
            }
        }
        let parameters = || sizes.iter().filter(|(_, (parameters, _))| *parameters > 0);
        // Adam allocates two blocks for each parameter, one after the other.
        let mut own: Vec<(i64, i64)> = live
            .iter()
            .filter(|block| {
                let is_state = matches!(block.owner.category, Category::OptimizerState | Category::Temporary);
                is_state && block.owner.phase == row.phase && block.requested > 8
            })
            .map(|block| (block.id, block.bytes))
            .collect();
        own.sort_unstable();
        let are_pairs =
            own.len() >= 2 * FEWEST_PAIRS && own.chunks_exact(2).all(|pair| pair[0].1 == pair[1].1);
        let least = if are_pairs { 2 } else { 0 };
        let each = parameters()
            .map(|(_, (parameters, state))| (state + parameters - 1) / parameters)
            .max()
            .unwrap_or(0)
            .max(least)
            .min(2);
        let left =
            |(size, (parameters, state)): (&i64, &(i64, i64))| size * (each * parameters - state).max(0);
        // The request is no live block, but its bytes are in the need already.
        let to_come: i64 = parameters().map(left).sum();
        let request = row.rounded_bytes.max(row.requested_bytes);
        let is_for_state = parameters().any(|size| *size.0 == request && left(size) > 0);
        let requested = if is_for_state { request } else { 0 };
        OptimizerStep {
            to_come: to_come - requested,
            requested,
            temporaries: parameters().map(|(size, (parameters, _))| size * parameters).sum(),
            is_foreach: each == 2 && numbers < 2,
        }
    }
}
