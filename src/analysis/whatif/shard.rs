//! Parameters, gradients and optimizer state divided over ranks, as PyTorch's FSDP2 does it.
//!
//! The sizes of the shards are in [`super::sizes`]. This module adds the whole parameters and gradients that
//! a rank has for a moment, in the order of `torch/distributed/fsdp/_fully_shard` (`FSDPParamGroup`,
//! `foreach_reduce`). Each unit is gathered into one buffer and copied from there into its parameters. In the
//! forward pass, the buffer lives until the next unit; in the backward pass, the next unit's buffer exists
//! from the start of the current unit. At the end of a unit's backward, its gradients are copied into a
//! second buffer, which lives until the end of the next unit. Their sum over the ranks is in one block.

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use super::calls::{ModulesAbove, outer_calls};
use super::changes::Change;
use super::curve::Curve;
use super::sizes::{SizeRules, shard};
use super::step::{RecordedStep, StepCall};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::categories::Phases;

/// One call of an FSDP unit (a module that is gathered as a whole), or the rest of the model. Times are
/// indices of allocations.
#[derive(Clone, Debug, Default)]
struct Unit {
    /// The first allocation of its forward, and the allocation after the last one.
    forward: (u32, u32),
    /// The same two allocations for its backward; `None` if no op of its backward was recorded.
    backward: Option<(u32, u32)>,
    /// The bytes of the unit's gathered parameters as one block per parameter, each rounded up.
    whole: i64,
    /// The bytes of the same parameters in one buffer, not rounded.
    buffer: i64,
    /// The gradients: indices of [`RecordedStep::lives`].
    gradients: Vec<u32>,
}

/// The inputs from which the gathered blocks of a step are computed.
pub(super) struct Sharding<'a> {
    pub(super) ranks: i64,
    /// All changes of the list.
    pub(super) changes: &'a [Change],
    pub(super) rules: &'a SizeRules<'a>,
    pub(super) symbols: &'a SymbolTable,
    pub(super) phases: &'a Phases,
}

impl Sharding<'_> {
    /// Adds the parameters and gradients that a rank has as a whole for a moment. Each module of `modules` is
    /// one unit. Returns the number of parameters in the step.
    pub(super) fn apply(&self, curve: &mut Curve, step: &RecordedStep, modules: &FxHashSet<Symbol>) -> u64 {
        let Sharding { rules, symbols, phases, .. } = self;
        let others: Vec<Change> = self.changes.iter().filter(|change| !is_shard(change)).cloned().collect();
        let calls = outer_calls(step, modules, phases);
        let mut above = ModulesAbove::new(&calls, symbols);
        let mut unit_of = |module: Symbol| above.around(module).first().copied();
        let mut sizes: FxHashMap<Option<Symbol>, (i64, i64)> = FxHashMap::default();
        let mut parameters = 0;
        for life in &step.lives {
            if life.owner.category == Category::Parameter {
                parameters += 1;
                let unit = sizes.entry(unit_of(life.owner.module)).or_default();
                let requested = rules.requested(step, life, &others, symbols, 1.0);
                unit.0 = unit.0.wrapping_add(rules.resized(life, requested));
                unit.1 = unit.1.wrapping_add(requested);
            }
        }
        let Some(mut root) = rest(step, phases) else { return parameters };
        (root.whole, root.buffer) = sizes.get(&None).copied().unwrap_or_default();
        let mut units = Units::new(&calls, &sizes);
        for op in step.ops.iter().filter(|op| op.phase == phases.backward) {
            if let Some(unit) = units.before(unit_of(op.module), op.from) {
                let (from, to) = unit.backward.unwrap_or((op.from, op.to));
                unit.backward = Some((from.min(op.from), to.max(op.to)));
            }
        }
        for (index, life) in step.lives.iter().enumerate() {
            if life.owner.category == Category::Gradient && !life.is_older {
                let unit = units.before(unit_of(life.owner.module), life.birth);
                unit.unwrap_or(&mut root).gradients.push(index as u32);
            }
        }
        let Some(last) = step.allocations.last() else { return parameters };
        let gather =
            Gather { step, rules, ranks: self.ranks, owner: Owner { phase: phases.backward, ..last.owner } };
        gather.forward(curve, &units.all, &root);
        gather.backward(curve, &units.all, &root);
        parameters
    }
}

fn is_shard(change: &Change) -> bool {
    matches!(change, Change::Shard { .. })
}

/// Returns the times of the whole model, from its first forward to the end of its last backward. Returns
/// `None` if there is no forward.
fn rest(step: &RecordedStep, phases: &Phases) -> Option<Unit> {
    let span = |is_in: &dyn Fn(&StepCall) -> bool| {
        let calls = || step.ops.iter().chain(&step.modules).filter(|call| is_in(call));
        Some((calls().map(|call| call.from).min()?, calls().map(|call| call.to).max()?))
    };
    let forward = span(&|call| call.phase == phases.forward)?;
    let backward = span(&|call| call.phase == phases.backward);
    Some(Unit { forward, backward, ..Unit::default() })
}

/// The units of a step, in the order of their calls.
struct Units {
    all: Vec<Unit>,
    /// For each module: its calls, as indices of `all`.
    by_module: FxHashMap<Symbol, Vec<usize>>,
}

impl Units {
    fn new(calls: &[&StepCall], sizes: &FxHashMap<Option<Symbol>, (i64, i64)>) -> Units {
        let mut by_module: FxHashMap<Symbol, Vec<usize>> = FxHashMap::default();
        let mut all = Vec::new();
        for (index, call) in calls.iter().enumerate() {
            by_module.entry(call.name).or_default().push(index);
            let (whole, buffer) = sizes.get(&Some(call.name)).copied().unwrap_or_default();
            all.push(Unit { forward: (call.from, call.to), whole, buffer, ..Unit::default() });
        }
        Units { all, by_module }
    }

    /// Returns the last call of a module that ended before the allocation `at`.
    fn before(&mut self, module: Option<Symbol>, at: u32) -> Option<&mut Unit> {
        let calls = self.by_module.get(&module?)?;
        let before = calls.partition_point(|call| self.all[*call].forward.1 <= at);
        self.all.get_mut(*calls.get(before.checked_sub(1)?)?)
    }
}

/// Adds the blocks of gathered units to a curve.
struct Gather<'a> {
    step: &'a RecordedStep,
    rules: &'a SizeRules<'a>,
    ranks: i64,
    owner: Owner,
}

impl Gather<'_> {
    fn forward(&self, curve: &mut Curve, units: &[Unit], root: &Unit) {
        // Parameters outside every unit stay gathered for the whole forward and backward.
        let end = root.backward.map_or(root.forward.1, |(_, end)| end);
        curve.add_block(root.forward.0, end, root.whole);
        let first = units.first().map_or(root.forward.1, |unit| unit.forward.0);
        curve.add_block(root.forward.0, first, self.rules.rounded(root.buffer));
        for (unit, next) in units.iter().zip(units.iter().skip(1).map(Some).chain([None])) {
            let (from, to) = unit.forward;
            curve.add_block(from, to, unit.whole);
            let next = next.map_or(root.forward.1, |next| next.forward.0).max(to);
            curve.add_block(from, next, self.rules.rounded(unit.buffer));
        }
    }

    fn backward(&self, curve: &mut Curve, units: &[Unit], root: &Unit) {
        let Some((begin, end)) = root.backward else { return };
        let mut order: Vec<(&Unit, (u32, u32))> =
            units.iter().filter_map(|unit| Some((unit, unit.backward?))).collect();
        order.sort_by_key(|(_, (from, to))| (*from, *to));
        let buffer = |unit: &Unit| self.rules.rounded(unit.buffer);
        for (place, (unit, (from, to))) in order.iter().enumerate() {
            let before = place.checked_sub(1).and_then(|place| order.get(place));
            let (next, after) = (order.get(place + 1), order.get(place + 2));
            // The unit's buffer is gathered when the previous unit begins.
            curve.add_block(before.map_or(begin, |(_, (from, _))| *from), *from, buffer(unit));
            curve.add_block(*from, *to, unit.whole);
            let whole = self.reduce(curve, unit, *to);
            curve.add_block(*to, next.map_or(end, |(_, (_, to))| *to).max(*to), buffer(unit));
            // The whole gradients are live until they are copied, so add a spike at `to`. If the next unit
            // begins at `to`, the total before `to` must be corrected. It lacks the next unit's buffer, which
            // is freed at `to` (`now`). It already has the next unit's parameters and the buffer of the unit
            // after it, which do not exist yet (`then`).
            let (now, then) = match next {
                Some((next, (from, _))) if from == to => {
                    (buffer(next), next.whole.wrapping_add(after.map_or(0, |(unit, _)| buffer(unit))))
                }
                _ => (0, 0),
            };
            curve.add_spike(*to, whole.wrapping_add(now).wrapping_sub(then), self.owner);
        }
        let whole = self.reduce(curve, root, end);
        curve.add_spike(end, whole.wrapping_add(buffer(root)), self.owner);
    }

    /// Changes the gradients of a unit: they are whole until the allocation `at`, and from then on a rank has
    /// its shards of them in one block. Returns the bytes of the whole gradients that are live at `at`.
    fn reduce(&self, curve: &mut Curve, unit: &Unit, at: u32) -> i64 {
        let (mut whole, mut part, mut death) = (0i64, 0i64, 0);
        for index in &unit.gradients {
            let life = &self.step.lives[*index as usize];
            let size = curve.sizes[*index as usize];
            curve.set_lives(*index, &[(life.birth, life.death.min(at))]);
            whole = whole.wrapping_add(if life.death > at { size } else { 0 });
            part = part.wrapping_add(shard(size, self.ranks));
            death = death.max(life.death);
        }
        curve.add_block(at, death, self.rules.rounded(part));
        whole
    }
}
