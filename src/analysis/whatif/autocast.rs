//! Autocast to 16 bits: the blocks of a float32 run that shrink to half their size, and the copies that casts
//! make.
//!
//! The inputs of ops are not recorded, so their types are inferred. Matrix products, convolutions and
//! attention run in 16 bits and cast their inputs and weights. Norms, losses and sums run in float32. Every
//! other op has the type of its inputs. The latest live block of the right size is taken to be the input of
//! an op. The backward has the types of the forward.

use std::collections::BTreeSet;

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use super::curve::Curve;
use super::sizes::SizeRules;
use super::step::{Allocation, Life, NO_CALL, RecordedStep, StepCall};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::categories::Phases;

/// An op runs in 16 bits if its name contains one of these texts.
const HALF: [&str; 11] =
    ["linear", "matmul", "mm", "bmm", "einsum", "conv", "attention", "lstm", "gru", "rnn_", "prelu"];
/// An op whose name contains one of these texts does not run in 16 bits, though its name also contains one of
/// [`HALF`]: for example `lgamma` contains `mm`.
const NOT_HALF: [&str; 4] = ["comm", "gamma", "bilinear", "upsample"];
/// Parts of the names of backward functions of matrix products, which save their inputs.
const PRODUCTS: [&str; 5] =
    ["AddmmBackward", "MmBackward", "BmmBackward", "ConvolutionBackward", "LinearBackward"];
const HALF_BACKWARD: [&str; 4] = ["Attention", "AttentionBackward", "Rnn", "Addmv"];
/// Parts of the names of ops that run in float32, of their backward functions, and of ops that make new
/// tensors.
const FLOAT: [&str; 27] = [
    "layer_norm",
    "group_norm",
    "rms_norm",
    "softmax",
    "loss",
    "cross_entropy",
    "::sum",
    "::mean",
    "pow",
    "::norm",
    "exp",
    "log",
    "cumsum",
    "cumprod",
    "prod",
    "rsqrt",
    "embedding",
    "rand",
    "zeros",
    "ones",
    "arange",
    "cdist",
    "LayerNorm",
    "GroupNorm",
    "RmsNorm",
    "Softmax",
    "Loss",
];
/// Endings of the names of ops with several tensors as input, whose result has the widest type among them.
const OF_SEVERAL: [&str; 9] =
    ["::add", "::add_", "::sub", "::mul", "::div", "::cat", "::stack", "::where", "::addcmul"];

/// The minimum size of a block that counts as cast. Smaller blocks may be indices, which are also cast to
/// twice their size.
const LEAST_CAST: i64 = 64 << 10;
/// The minimum number of modules with a cast. Fewer may be a coincidence.
const FEWEST_CASTS: usize = 2;

/// The op that computes a loss over tokens. Autocast does not cast the input of the softmax inside it, so the
/// softmax has the type of the logits.
const CROSS_ENTROPY: &str = "aten::cross_entropy_loss";

/// How an op chooses the type of its result: 16 bits, float32, or the type of its input.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ResultType {
    Half,
    Float,
    /// The type of the input. The field is true if the op has several inputs.
    Follows(bool),
}

/// Returns true if autocast casts inputs of an op, or if the op casts a gradient back. Fused attention allocates its
/// results as casts do, and its inputs are seldom cast, so it does not count.
pub(super) fn casts_inputs(name: &str) -> bool {
    !name.contains("ttention") && matches!(result_type(name), ResultType::Half | ResultType::Float)
        || name.contains("ToCopyBackward")
}

fn result_type(name: &str) -> ResultType {
    // Unlike the other norms, batch norm is not cast to float32: its result has the type of its input.
    if name.contains("batch_norm") || name.contains("BatchNorm") {
        return ResultType::Follows(false);
    }
    let is_product = PRODUCTS.iter().chain(&HALF_BACKWARD).any(|part| name.contains(part));
    let has_any = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let is_half = name.starts_with("aten::") && has_any(&HALF) && !has_any(&NOT_HALF);
    if is_product || is_half {
        return ResultType::Half;
    }
    if FLOAT.iter().any(|part| name.contains(part)) {
        return ResultType::Float;
    }
    ResultType::Follows(OF_SEVERAL.iter().any(|end| name.ends_with(end)))
}

/// The changes that autocast makes in a step. Blocks are indices of [`RecordedStep::lives`], except in `halved`,
/// which has their ids. Births and deaths are indices of allocations.
#[derive(Default)]
pub(super) struct Autocast {
    /// The ids of the blocks that shrink to half their size.
    pub(super) halved: FxHashSet<i64>,
    /// True if the run has autocast already.
    pub(super) is_on: bool,
    copies: Vec<CastCopy>,
    spikes: Vec<Spike>,
    /// Blocks that a cast copy replaces, each with its earlier death.
    shortened: FxHashMap<u32, u32>,
}

/// A copy that a cast makes.
struct CastCopy {
    birth: u32,
    death: u32,
    bytes: i64,
}

/// A temporary copy inside one op, made before the allocation `before`.
struct Spike {
    before: u32,
    bytes: i64,
    owner: Owner,
}

/// The calls of a module, in order of their ends.
#[derive(Default)]
struct CallsOfModule {
    calls: Vec<(u32, u32)>,
    /// For each call: the lowest start among this call and the later ones.
    lowest_from: Vec<u32>,
}

impl CallsOfModule {
    /// Returns the start of the last call that has all allocations from `from` to `to`.
    fn start_around(&self, from: u32, to: u32) -> Option<u32> {
        let begun = self.lowest_from.partition_point(|lowest| *lowest <= from);
        let (start, end) = self.calls[begun.checked_sub(1)?];
        (to <= end).then_some(start)
    }
}

/// Returns the calls of each module. `modules` has the module calls of a step, in order of their ends.
fn module_calls(modules: &[StepCall]) -> FxHashMap<Symbol, CallsOfModule> {
    let mut all: FxHashMap<Symbol, CallsOfModule> = FxHashMap::default();
    for call in modules {
        all.entry(call.name).or_default().calls.push((call.from, call.to));
    }
    for CallsOfModule { calls, lowest_from } in all.values_mut() {
        let mut lowest = u32::MAX;
        lowest_from.extend(calls.iter().rev().map(|(from, _)| {
            lowest = lowest.min(*from);
            lowest
        }));
        lowest_from.reverse();
    }
    all
}

/// Returns, for each allocation of a step, the lowest start of an op among the ops that allocate then or later.
fn lowest_starts(step: &RecordedStep) -> Vec<u32> {
    let mut lowest = u32::MAX;
    let start = |place: &Allocation| {
        let op = place.life.and_then(|life| step.op(step.lives[life as usize].call));
        lowest = op.map_or(lowest, |op| lowest.min(op.from));
        lowest
    };
    let mut starts: Vec<u32> = step.allocations.iter().rev().map(start).collect();
    starts.reverse();
    starts
}

/// The state while the types of one step's blocks are inferred.
struct Types<'a> {
    step: &'a RecordedStep,
    rules: &'a SizeRules<'a>,
    symbols: &'a SymbolTable,
    phases: &'a Phases,
    result_types: FxHashMap<Symbol, ResultType>,
    /// For each requested size: the live blocks of the step, in order of birth. With true: only the blocks that a
    /// product saves for its backward.
    by_size: FxHashMap<(i64, bool), BTreeSet<u32>>,
    /// The blocks that are freed in the step, in order of death.
    deaths: Vec<u32>,
    /// The number of blocks of `deaths` that were removed from `by_size`.
    dead: usize,
    module_calls: FxHashMap<Symbol, CallsOfModule>,
    /// The end of the last op of the forward.
    forward_end: Option<u32>,
    /// The types of blocks: true for 16 bits.
    is_half: FxHashMap<u32, bool>,
    /// For each module and requested size: the type of the latest such block that the module allocated in the
    /// forward.
    of_module: FxHashMap<(Symbol, i64), bool>,
    /// For each module: the requested size of the gradient of its input.
    input_of: FxHashMap<Symbol, i64>,
    /// For each module: the end of its last backward op that computes in 16 bits.
    backward_end: FxHashMap<Symbol, u32>,
    /// For each called module: the bytes of the parameters and buffers that it casts. They include the
    /// weights of uncalled modules below it.
    weights: FxHashMap<Symbol, i64>,
    parameter_sizes: FxHashSet<i64>,
    /// Modules whose input is cast.
    casts_input: FxHashSet<Symbol>,
    has_cast_weights: FxHashSet<Symbol>,
    last: Option<u32>,
    found: Autocast,
}

/// Returns the changes of a step under autocast.
pub(super) fn find(
    step: &RecordedStep,
    rules: &SizeRules<'_>,
    symbols: &SymbolTable,
    phases: &Phases,
) -> Autocast {
    let mut deaths = step.frees.clone();
    deaths.sort_by_key(|life| step.lives[*life as usize].death);
    let in_forward = step.ops.iter().filter(|op| op.phase == phases.forward);
    let mut types = Types {
        step,
        rules,
        symbols,
        phases,
        result_types: FxHashMap::default(),
        by_size: FxHashMap::default(),
        deaths,
        dead: 0,
        module_calls: module_calls(&step.modules),
        forward_end: in_forward.map(|op| op.to).max(),
        is_half: FxHashMap::default(),
        of_module: FxHashMap::default(),
        input_of: FxHashMap::default(),
        backward_end: FxHashMap::default(),
        weights: FxHashMap::default(),
        parameter_sizes: FxHashSet::default(),
        casts_input: FxHashSet::default(),
        has_cast_weights: FxHashSet::default(),
        last: None,
        found: Autocast::default(),
    };
    types.find_weights();
    if types.is_on() {
        return Autocast { is_on: true, ..Autocast::default() };
    }
    types.find_inputs();
    let lowest_starts = lowest_starts(step);
    let mut at = 0;
    while let Some(place) = step.allocations.get(at) {
        let call = place.life.map_or(NO_CALL, |life| step.lives[life as usize].call);
        let same = |life: Option<u32>| life.is_some_and(|life| step.lives[life as usize].call == call);
        let many = if call == NO_CALL {
            1
        } else {
            step.allocations[at..].iter().take_while(|place| same(place.life)).count().max(1)
        };
        types.remove_dead(lowest_starts[at]);
        let lives: Vec<u32> = step.allocations[at..at + many].iter().filter_map(|place| place.life).collect();
        types.take(call, &lives);
        at += many;
    }
    types.found
}

/// Returns true if at least [`FEWEST_CASTS`] modules of a step cast the previous large block to twice its
/// size. Such casts show a model in 16 bits whose norms or loss run in float32: in a float32 model, they are
/// no-ops.
pub(super) fn casts_up(step: &RecordedStep, rules: &SizeRules<'_>, phases: &Phases) -> bool {
    let mut made: Option<&Life> = None;
    let mut modules = FxHashSet::default();
    for life in step.allocations.iter().filter_map(|each| each.life).map(|life| &step.lives[life as usize]) {
        if life.owner.phase != phases.forward || life.requested < LEAST_CAST {
            continue;
        }
        if rules.is_cast(step, life) && made.is_some_and(|made| 2 * made.requested == life.requested) {
            modules.insert(life.owner.module);
        }
        made = Some(life);
    }
    modules.len() >= FEWEST_CASTS
}

impl Autocast {
    /// Applies the changed lifetimes and the copies to a curve. Its sizes must already be halved. Returns the
    /// number of halved blocks.
    pub(super) fn apply(&self, curve: &mut Curve, step: &RecordedStep) -> u64 {
        for (index, end) in &self.shortened {
            let birth = step.lives[*index as usize].birth;
            curve.set_lives(*index, &[(birth, (*end).max(birth + 1))]);
        }
        for CastCopy { birth, death, bytes } in &self.copies {
            curve.add_block(*birth, *death, *bytes);
        }
        for Spike { before, bytes, owner } in &self.spikes {
            curve.add_spike(*before, *bytes, *owner);
        }
        self.halved.len() as u64
    }
}

impl<'a> Types<'a> {
    fn life(&self, index: u32) -> &'a Life {
        &self.step.lives[index as usize]
    }

    fn result_type(&mut self, name: Symbol) -> ResultType {
        let symbols = self.symbols;
        *self.result_types.entry(name).or_insert_with(|| result_type(&symbols.get(name)))
    }

    /// Determines the bytes of the weights that each called module casts: its own weights, and the weights of
    /// modules below it that are never called themselves.
    fn find_weights(&mut self) {
        let called: FxHashSet<Symbol> = self.step.modules.iter().map(|call| call.name).collect();
        for life in &self.step.lives {
            let is_weight = matches!(life.owner.category, Category::Parameter | Category::Buffer);
            if !is_weight {
                continue;
            }
            if life.owner.category == Category::Parameter {
                self.parameter_sizes.insert(life.requested);
            }
            let mut module = life.owner.module;
            if !called.contains(&module) {
                let path = self.symbols.get(module);
                let mut ends = path.match_indices('.').map(|(end, _)| end).collect::<Vec<_>>();
                ends.reverse();
                let above = ends.into_iter().map(|end| self.symbols.intern(&path[..end]));
                module = above.into_iter().find(|above| called.contains(above)).unwrap_or(module);
            }
            *self.weights.entry(module).or_default() += life.requested;
        }
    }

    /// Returns true if the run already uses autocast. Then most modules with a product begin it with a 16-bit
    /// copy of a weight: a block of half the size of a parameter.
    fn is_on(&mut self) -> bool {
        let step = self.step;
        let copy = self.symbols.intern("aten::empty_strided");
        let (mut products, mut casts) = (FxHashSet::default(), FxHashSet::default());
        for (index, op) in step.ops.iter().enumerate() {
            let is_product = op.phase == self.phases.forward && self.result_type(op.name) == ResultType::Half;
            if !is_product || !self.weights.contains_key(&op.module) {
                continue;
            }
            products.insert(op.module);
            let own = step.allocations_of(index as u32).iter();
            let is_cast = |place: &&Allocation| {
                place.owner.op == copy && self.parameter_sizes.contains(&place.requested.saturating_mul(2))
            };
            if own.take(2).any(|place| is_cast(&place)) {
                casts.insert(op.module);
            }
        }
        casts.len() * 2 > products.len()
    }

    /// Determines the sizes of the inputs of products, and the ends of their backward functions.
    fn find_inputs(&mut self) {
        let step = self.step;
        for (index, op) in step.ops.iter().enumerate() {
            if op.phase != self.phases.backward || self.result_type(op.name) != ResultType::Half {
                continue;
            }
            self.backward_end.insert(op.module, op.to);
            let own = step.allocations_of(index as u32).iter().filter_map(|place| place.life);
            let input = own.map(|life| self.life(life)).find(|life| {
                life.owner.category != Category::Gradient
                    && life.death > op.to
                    && !self.parameter_sizes.contains(&life.requested)
            });
            if let Some(input) = input {
                self.input_of.entry(op.module).or_insert(input.requested);
            }
        }
    }

    /// Infers the types of the blocks that one op allocates, and the copies that the op makes.
    fn take(&mut self, call: u32, lives: &[u32]) {
        let Some(op) = self.step.op(call) else { return };
        let result_type = self.result_type(op.name);
        let is_backward = op.phase == self.phases.backward;
        if op.phase != self.phases.forward && !is_backward {
            return;
        }
        let largest = lives.iter().map(|index| self.life(*index).requested).max().unwrap_or(0);
        let is_half = match result_type {
            _ if is_backward => false,
            _ if &*self.symbols.get(op.name) == CROSS_ENTROPY => self.cross_entropy(op, lives, largest),
            ResultType::Half => {
                self.cast_weights(op);
                self.cast_input(op);
                true
            }
            ResultType::Float => {
                if self.input(op.from, largest, false).is_some_and(|input| self.is_half(input)) {
                    let (bytes, owner) = (self.rules.rounded(largest), self.owner(op, lives));
                    self.found.spikes.push(Spike { before: op.from, bytes, owner });
                }
                false
            }
            ResultType::Follows(of_several) => self.follows(op, largest, of_several),
        };
        for index in lives {
            let life = self.life(*index);
            let is_half =
                if is_backward { self.is_half_in_backward(op, result_type, *index) } else { is_half };
            self.by_size.entry((life.requested, false)).or_default().insert(*index);
            if self.is_saved_by_product(life) {
                self.by_size.entry((life.requested, true)).or_default().insert(*index);
            }
            self.is_half.insert(*index, is_half);
            if !is_backward {
                self.of_module.insert((life.born_in, life.requested), is_half);
            }
            if is_half && self.rules.is_float(self.step, life) && !self.is_saved_in_float(life, is_backward) {
                self.found.halved.insert(life.id);
            }
        }
        self.last = lives.iter().copied().max_by_key(|index| self.life(*index).requested).or(self.last);
    }

    /// Handles a loss, whose softmax has the type of the logits. The sum over the softmax uses a float32 copy
    /// of it, which lives until the loss's backward function. Returns true if the logits are in 16 bits.
    fn cross_entropy(&mut self, op: &StepCall, lives: &[u32], size: i64) -> bool {
        let is_half = self.input(op.from, size, false).is_some_and(|logits| self.is_half(logits));
        let softmax = lives.iter().map(|index| self.life(*index)).find(|life| life.requested == size);
        if let (true, Some(softmax)) = (is_half, softmax) {
            let is_its = |other: &&StepCall| {
                other.from >= op.to
                    && other.phase == self.phases.backward
                    && self.symbols.get(other.name).contains("NllLoss")
            };
            let end = self.step.ops.iter().find(is_its).map_or(op.to, |other| other.to);
            let (birth, bytes) = (softmax.birth + 1, self.rules.rounded(size));
            self.found.copies.push(CastCopy { birth, death: end, bytes });
        }
        is_half
    }

    fn owner(&self, op: &StepCall, lives: &[u32]) -> Owner {
        let step = lives.first().map_or(-1, |index| self.life(*index).owner.step);
        Owner { op: op.name, module: op.module, phase: op.phase, category: Category::Temporary, step }
    }

    fn is_half(&self, index: u32) -> bool {
        self.is_half.get(&index).copied().unwrap_or(false)
    }

    /// Returns the latest block of this size that is live at the allocation `at`, which is taken to be an
    /// input. With `is_saved`, considers only blocks that a product saves for its backward.
    fn input(&self, at: u32, size: i64, is_saved: bool) -> Option<u32> {
        let live = self.by_size.get(&(size, is_saved))?;
        live.iter().rev().copied().find(|index| self.life(*index).death > at)
    }

    /// Removes the blocks from `by_size` that are dead before the allocation `at`.
    fn remove_dead(&mut self, at: u32) {
        let step = self.step;
        while let Some(index) = self.deaths.get(self.dead) {
            let life = &step.lives[*index as usize];
            if life.death > at {
                return;
            }
            for is_saved in [false, true] {
                if let Some(live) = self.by_size.get_mut(&(life.requested, is_saved)) {
                    live.remove(index);
                }
            }
            self.dead += 1;
        }
    }

    /// Returns true if a backward function of a product frees the block, which shows that the product saved
    /// the block.
    fn is_saved_by_product(&self, life: &Life) -> bool {
        let Some(op) = self.step.op(life.freed_by) else { return false };
        let name = self.symbols.get(op.name);
        op.phase == self.phases.backward && PRODUCTS.iter().any(|part| name.contains(part))
    }

    /// Returns true if an op in float32 saves the block for its backward. Under autocast, the op saves a
    /// float32 copy, so the memory is not halved.
    fn is_saved_in_float(&mut self, life: &Life, is_backward: bool) -> bool {
        let Some(op) = self.step.op(life.freed_by) else { return false };
        let own = self.step.op(life.call).map(|call| self.symbols.get(call.name));
        let is_of_loss = own.is_some_and(|name| *name == *CROSS_ENTROPY);
        !is_backward
            && !is_of_loss
            && op.phase == self.phases.backward
            && self.result_type(op.name) == ResultType::Float
    }

    /// Casts the weights of a product, once per module and step. The copies live until the module's last
    /// product in the backward ends or, without one, until the end of the forward.
    fn cast_weights(&mut self, op: &StepCall) {
        if !self.has_cast_weights.insert(op.module) {
            return;
        }
        let bytes = self.weights.get(&op.module).copied().unwrap_or(0) / 2;
        let end = self.backward_end.get(&op.module).copied().or(self.forward_end).unwrap_or(op.to);
        if bytes > 0 {
            self.found.copies.push(CastCopy { birth: op.from, death: end, bytes: self.rules.rounded(bytes) });
        }
    }

    /// Adds the 16-bit copy of a product's float32 input. If the product saves its input for the backward, it
    /// now saves the copy, so the input itself is freed after the product.
    fn cast_input(&mut self, op: &StepCall) {
        let Some(size) = self.input_of.get(&op.module).copied() else { return };
        let saved = self.input(op.from, size, true);
        let Some(input) = saved.or_else(|| self.input(op.from, size, false)) else { return };
        if self.is_half(input) {
            return;
        }
        self.casts_input.insert(op.module);
        // If the backward frees the input, the product saved it, so the copy takes its place until the
        // backward. If the forward frees the input, the product saved a copy of its own, and the cast copy
        // ends with the op.
        let freed_in = self.step.op(self.life(input).freed_by).map(|freeing| freeing.phase);
        let end = match self.backward_end.get(&op.module) {
            Some(end) if freed_in == Some(self.phases.backward) => *end,
            _ => op.to,
        };
        self.found.copies.push(CastCopy { birth: op.from, death: end, bytes: self.rules.rounded(size / 2) });
        if saved.is_some() {
            self.found.shortened.insert(input, op.to);
        }
    }

    /// Returns true if the result of an op that follows the type of its inputs is in 16 bits.
    fn follows(&self, op: &StepCall, size: i64, of_several: bool) -> bool {
        let Some(input) = self.input(op.from, size, false).or(self.last) else { return false };
        if !of_several || !self.is_half(input) {
            return self.is_half(input);
        }
        if self.weights.contains_key(&op.module) {
            return false;
        }
        // The other operand is assumed to be the latest other live block of this size that this module
        // allocated, or that existed before the call of the module.
        let calls = self.module_calls.get(&op.module);
        let from = calls.and_then(|calls| calls.start_around(op.from, op.to)).unwrap_or(0);
        let live = self.by_size.get(&(size, false)).into_iter().flatten();
        let other = live.rev().copied().find(|index| {
            let life = self.life(*index);
            *index != input && life.death > op.from && (life.birth < from || life.born_in == op.module)
        });
        other.is_none_or(|other| self.is_half(other))
    }

    fn is_half_in_backward(&mut self, op: &StepCall, result_type: ResultType, index: u32) -> bool {
        let life = self.life(index);
        let half = self.rules.rounded(life.requested / 2);
        let spike = Spike { before: life.birth + 1, bytes: half, owner: life.owner };
        if life.owner.category == Category::Gradient {
            if result_type == ResultType::Half {
                self.found.spikes.push(spike);
            }
            return false;
        }
        let of_forward = self.of_module.get(&(op.module, life.requested)).copied();
        match result_type {
            ResultType::Half => {
                let is_cast_input = self.casts_input.contains(&op.module)
                    && self.input_of.get(&op.module) == Some(&life.requested);
                if is_cast_input && life.death > op.to {
                    self.found.spikes.push(spike);
                }
                !is_cast_input
            }
            // The softmax of a loss in 16 bits: its incoming float32 gradient is first cast to 16 bits.
            ResultType::Float => {
                let is_half = of_forward == Some(true) && self.symbols.get(op.name).contains("Softmax");
                if is_half && let Some(gradient) = self.input(op.from, life.requested, false) {
                    self.found.shortened.insert(gradient, op.from);
                    self.found.copies.push(CastCopy { birth: op.from, death: op.to, bytes: half });
                }
                is_half
            }
            ResultType::Follows(_) => of_forward.unwrap_or_else(|| {
                let input = self.input(op.from, life.requested, false).or(self.last);
                input.is_some_and(|input| self.is_half(input))
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatif_autocast_finds_the_last_module_call_around_an_op() {
        let name = Symbol::SCRIPT;
        let call = |(from, to)| StepCall { name, module: name, phase: name, from, to };
        // The second call is inside the third one.
        let ends = [(0, 10), (22, 25), (20, 30), (40, 50)];
        let calls = &module_calls(&ends.map(call))[&name];
        for from in 0..50 {
            for to in from..50 {
                let around = ends.iter().rev().find(|call| call.0 <= from && to <= call.1);
                assert_eq!(calls.start_around(from, to), around.map(|call| call.0), "{from} {to}");
            }
        }
    }

    #[test]
    fn whatif_autocast_knows_the_type_of_each_op_by_its_name() {
        use ResultType::{Float, Follows, Half};
        for (name, expected) in [
            ("aten::linear", Half),
            ("aten::mm", Half),
            ("aten::addmm_", Half),
            ("aten::baddbmm", Half),
            ("aten::convolution", Half),
            ("aten::scaled_dot_product_attention", Half),
            ("aten::_thnn_fused_gru_cell", Half),
            ("AddmmBackward0", Half),
            ("aten::lgamma", Follows(false)),
            ("aten::digamma", Follows(false)),
            ("aten::polygamma", Follows(false)),
            ("aten::bilinear", Follows(false)),
            ("aten::upsample_bilinear2d", Follows(false)),
            ("aten::upsample_linear1d_backward", Follows(false)),
            ("nccl::comm", Follows(false)),
            ("aten::native_batch_norm", Follows(false)),
            ("aten::add", Follows(true)),
            ("aten::native_layer_norm", Float),
            ("aten::_log_softmax", Float),
        ] {
            assert!(result_type(name) == expected, "{name}");
        }
    }
}
