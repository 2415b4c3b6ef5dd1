//! The casts between float32 and 16 bits that a run makes, and that a model in 16 bits does not: autocast's
//! copies of weights and inputs, the policy of FSDP, and the gradients that go back to float32.

use std::collections::BTreeMap;

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use super::autocast::casts_inputs;
use super::curve::Curve;
use super::sizes::SizeRules;
use super::step::{ALIVE, DType, Life, RecordedStep};
use crate::read::symbols::{Symbol, SymbolTable};

/// The op that allocates the result of a cast. Only the outermost op is recorded around it, such as
/// `aten::linear`.
const COPY: &str = "aten::empty_strided";

/// Replaces each tensor and its copies by one block, in a step whose sizes are those in 16 bits already.
pub(super) fn apply(curve: &mut Curve, step: &RecordedStep, rules: &SizeRules<'_>, symbols: &SymbolTable) {
    let life = |index: u32| &step.lives[index as usize];
    let is_gradient = |index: &u32| life(*index).owner.category == Category::Gradient;
    for (from, copies) in casts(step, rules, symbols) {
        let (source, first) = (life(from), life(copies[0]).birth);
        let last = copies.iter().copied().max_by_key(|copy| life(*copy).death).unwrap_or(from);
        // The one block lives as long as the tensor and all its copies. A gradient stays, whatever it was
        // copied from.
        let stays = life(last).death > source.death || is_gradient(&last);
        for copy in copies.iter().filter(|copy| !(is_gradient(copy) || stays && **copy == last)) {
            curve.set_lives(*copy, &[]);
        }
        if stays && source.owner.category != Category::Parameter {
            curve.set_lives(from, &[(source.birth, first)]);
            curve.set_lives(last, &[(first, life(last).death)]);
        }
    }
}

/// Returns the tensors of a step that have copies in the other type, each with its copies in order. All are
/// indices of [`RecordedStep::lives`].
fn casts(step: &RecordedStep, rules: &SizeRules<'_>, symbols: &SymbolTable) -> Vec<(u32, Vec<u32>)> {
    let made_by = symbols.intern(COPY);
    let mut casting: FxHashMap<Symbol, bool> = FxHashMap::default();
    let mut is_cast = |life: &Life| {
        let op = step.op(life.call).map(|op| op.name);
        let of_op = op.filter(|_| life.owner.op == made_by);
        let is_casting =
            of_op.is_some_and(|op| *casting.entry(op).or_insert_with(|| casts_inputs(&symbols.get(op))));
        is_casting || rules.is_cast(step, life)
    };
    // The latest block of each type and number of values.
    let mut latest: FxHashMap<(DType, i64), u32> = FxHashMap::default();
    // The parameters are older than the step, or were made in no particular order.
    let mut parameters: FxHashMap<(DType, i64), u32> = FxHashMap::default();
    let mut first_of: FxHashMap<u32, u32> = FxHashMap::default();
    let mut found: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    let elements = |life: &Life| life.requested / life.item();
    for (index, life) in (0..).zip(&step.lives) {
        if !matches!(life.dtype, DType::Float32 | DType::Half) {
            continue;
        }
        let key = (life.dtype, elements(life));
        if life.owner.category == Category::Parameter {
            parameters.insert(key, index);
            continue;
        }
        let other = if life.dtype == DType::Half { DType::Float32 } else { DType::Half };
        if !life.is_older && is_cast(life) {
            let source = latest.get(&(other, key.1)).filter(|from| {
                let source = &step.lives[**from as usize];
                // What the program itself casts to float32, and back, stays in both types.
                let is_own = rules.is_cast_up(source) || rules.is_cast_up(life);
                !is_own && (source.death == ALIVE || source.death >= life.birth)
            });
            let is_gradient = life.owner.category == Category::Gradient;
            let weight = || parameters.get(&(other, key.1)).filter(|_| !is_gradient);
            if let Some(from) = source.or_else(weight) {
                // The copy of a copy belongs to the first tensor.
                let first = *first_of.get(from).unwrap_or(from);
                first_of.insert(index, first);
                found.entry(first).or_default().push(index);
            }
        }
        latest.insert(key, index);
    }
    found.into_iter().collect()
}
