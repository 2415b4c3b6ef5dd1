//! The casts between float32 and 16 bits that a run makes, and that a model in 16 bits does not: autocast's
//! copies of weights and inputs, the policy of FSDP, and the gradients that go back to float32.

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use super::autocast::casts_inputs;
use super::curve::Curve;
use super::sizes::SizeRules;
use super::step::{ALIVE, DType, Life, Step};
use crate::read::symbols::{Symbol, SymbolTable};

/// The op that allocates the result of a cast. Only the outermost op is recorded around it, such as `aten::linear`.
const COPY: &str = "aten::empty_strided";

/// Two blocks with the same values: a tensor, and its copy in the other type. Both are indices of
/// [`Step::lives`].
#[derive(Clone, Copy)]
struct Cast {
    from: u32,
    to: u32,
}

/// Replaces each tensor and its copy by one block, in a step whose sizes are those in 16 bits already.
pub(super) fn apply(curve: &mut Curve<'_>, step: &Step, rules: &SizeRules<'_>, symbols: &SymbolTable) {
    for Cast { from, to } in casts(step, rules, symbols) {
        let (source, copy) = (&step.lives[from as usize], &step.lives[to as usize]);
        // The one block lives as long as the tensor or its copy. A gradient stays, whatever it was copied from.
        if source.death >= copy.death && copy.owner.category != Category::Gradient {
            curve.set_lives(to, &[]);
        } else {
            curve.set_lives(from, &[(source.birth, copy.birth)]);
        }
    }
}

/// Returns the casts of a step, in order.
fn casts(step: &Step, rules: &SizeRules<'_>, symbols: &SymbolTable) -> Vec<Cast> {
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
    let mut found = Vec::new();
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
                let death = step.lives[**from as usize].death;
                death == ALIVE || death >= life.birth
            });
            if let Some(from) = source.or_else(|| parameters.get(&(other, key.1))) {
                found.push(Cast { from: *from, to: index });
            }
        }
        latest.insert(key, index);
    }
    found
}
