//! The optimizer's step during the backward pass: each gradient is freed as soon as its parameter has been
//! stepped.

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use super::changes::{Change, NewOptimizer};
use super::curve::{Curve, highest};
use super::sizes::SizeRules;
use super::step::RecordedStep;
use crate::state::block::Owner;
use crate::state::categories::Phases;

/// Frees each gradient of a step as soon as its parameter has been stepped. Returns the number of gradients.
pub(super) fn apply(
    curve: &mut Curve,
    step: &RecordedStep,
    changes: &[Change],
    rules: &SizeRules<'_>,
    phases: &Phases,
) -> u64 {
    let share = temporaries(step, changes, rules);
    let is_gradient = |index: &usize| step.lives[*index].owner.category == Category::Gradient;
    let gradients: Vec<usize> = (0..step.lives.len()).filter(is_gradient).collect();
    // For each op: the bytes of its gradients, which are all live when the first of them is stepped.
    let mut by_op: FxHashMap<u32, i64> = FxHashMap::default();
    for index in &gradients {
        let sum = by_op.entry(step.lives[*index].call).or_default();
        *sum = sum.wrapping_add(curve.sizes[*index]);
    }
    for index in &gradients {
        let life = &step.lives[*index];
        if life.is_older || life.owner.phase != phases.backward {
            // Every gradient is freed in the backward that made it, so gradients from earlier steps do not
            // exist. Gradients from outside the backward do not exist, either.
            curve.set_lives(*index as u32, &[]);
            continue;
        }
        let end = step.op(life.call).map_or(life.birth + 1, |op| op.to);
        curve.set_lives(*index as u32, &[(life.birth, end)]);
        let siblings = by_op.get(&life.call).copied().unwrap_or(0);
        let own = curve.sizes[*index] as f64;
        let owner = Owner { phase: phases.optimizer, ..life.owner };
        curve.add_spike(end, siblings.wrapping_add((own * share) as i64), owner);
    }
    gradients.len() as u64
}

/// Returns how many temporary bytes the optimizer's step needs for each byte of a gradient.
fn temporaries(step: &RecordedStep, changes: &[Change], rules: &SizeRules<'_>) -> f64 {
    for change in changes {
        match change {
            Change::Optimizer(NewOptimizer::EightBit | NewOptimizer::Sgd) => return 0.0,
            Change::Optimizer(NewOptimizer::Adafactor) => return 1.0,
            _ => {}
        }
    }
    let gradients: i64 = step
        .lives
        .iter()
        .filter(|life| life.owner.category == Category::Gradient)
        .map(|life| life.bytes)
        .fold(0, i64::wrapping_add);
    let own = step.lives.iter().filter(|life| rules.is_of_step(life));
    let highest = highest(own.map(|life| (life.birth, life.death, life.bytes)));
    if gradients > 0 { highest as f64 / gradients as f64 } else { 0.0 }
}
