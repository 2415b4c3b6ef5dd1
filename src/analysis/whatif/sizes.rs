//! The sizes of blocks under changes.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use memtrace_trace::Category;
use memtrace_trace::form::Form;
use memtrace_trace::rounding::Rounding;
use memtrace_trace::text::UNKNOWN;
use rustc_hash::{FxHashMap, FxHashSet};

use super::changes::{Change, Condition, ConditionKey, NewOptimizer};
use super::step::{DType, FAILED, Life, RecordedStep};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::categories::Phases;

/// The size of a float32, in bytes.
pub(super) const FLOAT: i64 = 4;
/// For a parameter with fewer elements than this, bitsandbytes keeps the state in 32 bits, and torchao runs
/// the step on the device.
const SMALL_PARAMETER: i64 = 4096;
/// The number of elements that share one scale of 4 bytes in 8-bit state.
const SCALED_TOGETHER: i64 = 256;
/// If the name of an op contains one of these texts, only its largest result has the type of its inputs. Its
/// other results are statistics in float32.
const WITH_STATISTICS: [&str; 3] = ["norm", "attention", "Norm"];
/// The results of an op whose name contains one of these texts have other types: they are masks or indices.
const OTHER_TYPES: [&str; 13] = [
    "aten::eq",
    "aten::ne",
    "aten::lt",
    "aten::gt",
    "aten::le",
    "aten::ge",
    "aten::bernoulli",
    "aten::randint",
    "aten::randperm",
    "aten::arange",
    "aten::argmax",
    "aten::argsort",
    "EmbeddingBackward",
];

/// Parts of the names of ops that gather the parameters of a sharded model.
const GATHERS: [&str; 4] = ["FullyShardedDataParallel", "fsdp::", "all_gather", "allgather"];

/// The minimum size of a tensor that counts as cast to float32 by the program. Of the tensors of this size,
/// all have a type.
const LEAST_CAST_UP: i64 = 1 << 20;

/// The rules that determine the new sizes of the blocks of a step.
pub(super) struct SizeRules<'a> {
    phases: Phases,
    rounding: Rounding,
    /// The sizes of the parameters of each module.
    parameters: FxHashSet<(Symbol, i64)>,
    /// For each op call: the largest request.
    largest: FxHashMap<u32, i64>,
    /// The ids of the blocks that autocast halves.
    pub(super) halved: FxHashSet<i64>,
    /// True if the run computes in 16 bits already. It is then unknown which blocks are float32, so
    /// [`Change::Bfloat16`] changes no sizes.
    pub(super) is_half: bool,
    /// The modules of models with 16 bits or fewer, whose blocks are not float32.
    pub(super) half_modules: Option<&'a FxHashSet<Symbol>>,
    /// True if the run shards its model and gathers parameters in this step.
    has_gathers: bool,
    /// The module and the number of values of each tensor that the program itself casts to float32, such as
    /// the logits of a loss. Results of that size in that module stay float32 in a 16-bit model.
    cast_up: FxHashSet<(Symbol, i64)>,
    /// The highest total of the step, in bytes.
    highest: i64,
    traits: &'a Traits,
}

/// The traits of ops, by name. They are determined once for all steps.
pub(super) type Traits = FxHashMap<Symbol, OpTraits>;

/// The facts about the sizes of an op's blocks that its name reveals.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OpTraits {
    has_statistics: bool,
    is_other_type: bool,
    is_dropout: bool,
    is_sum: bool,
    is_cast: bool,
    is_gather: bool,
}

impl OpTraits {
    fn from_name(name: &str) -> OpTraits {
        OpTraits {
            has_statistics: WITH_STATISTICS.iter().any(|part| name.contains(part)),
            is_other_type: OTHER_TYPES
                .iter()
                .any(|part| name.strip_suffix('_').unwrap_or(name).ends_with(part))
                || name.contains("EmbeddingBackward"),
            is_dropout: name.contains("dropout"),
            is_sum: name == "aten::sum",
            is_cast: matches!(name, "aten::to" | "aten::_to_copy"),
            is_gather: GATHERS.iter().any(|part| name.contains(part)),
        }
    }
}

impl<'a> SizeRules<'a> {
    pub(super) fn new(
        step: &RecordedStep,
        symbols: &SymbolTable,
        phases: Phases,
        rounding: Rounding,
        traits: &'a mut Traits,
    ) -> SizeRules<'a> {
        let mut add = |symbol: Symbol| {
            traits.entry(symbol).or_insert_with(|| OpTraits::from_name(&symbols.get(symbol)));
        };
        step.ops.iter().for_each(|op| add(op.name));
        step.lives.iter().for_each(|life| add(life.owner.op));
        let (parameters, largest) = (FxHashSet::default(), FxHashMap::default());
        let halved = FxHashSet::default();
        let highest = step.allocations.iter().map(|each| each.allocated).max().unwrap_or(0);
        let mut rules = SizeRules {
            phases,
            rounding,
            parameters,
            largest,
            halved,
            is_half: false,
            half_modules: None,
            has_gathers: false,
            cast_up: FxHashSet::default(),
            highest,
            traits,
        };
        rules.has_gathers = step.lives.iter().any(|life| rules.is_gathered(step, life));
        rules.cast_up = rules.find_cast_up(step);
        for life in &step.lives {
            if life.owner.category == Category::Parameter {
                rules.parameters.insert((life.owner.module, life.requested));
            }
            let largest = rules.largest.entry(life.call).or_default();
            *largest = (*largest).max(life.requested);
        }
        rules
    }

    fn traits_of(&self, symbol: Symbol) -> OpTraits {
        self.traits.get(&symbol).copied().unwrap_or_default()
    }

    /// Returns the traits of the outermost op that allocated a block or, without such an op, of the block's
    /// own op.
    fn call_traits(&self, step: &RecordedStep, life: &Life) -> OpTraits {
        step.op(life.call).map_or_else(|| self.traits_of(life.owner.op), |call| self.traits_of(call.name))
    }

    /// Returns true if the block is the result of a cast.
    pub(super) fn is_cast(&self, step: &RecordedStep, life: &Life) -> bool {
        self.call_traits(step, life).is_cast || self.traits_of(life.owner.op).is_cast
    }

    /// Returns the keys of [`SizeRules::cast_up`]. A cast that autocast makes has the op that asked for it
    /// around it, such as `aten::linear`; the program's own cast has none.
    fn find_cast_up(&self, step: &RecordedStep) -> FxHashSet<(Symbol, i64)> {
        let mut halves = FxHashMap::default();
        let mut found = FxHashSet::default();
        for life in step.lives.iter().filter(|life| life.requested >= LEAST_CAST_UP) {
            let values = life.requested / life.item();
            let is_cast = || life.owner.phase == self.phases.forward && self.call_traits(step, life).is_cast;
            match life.dtype {
                DType::Half => _ = halves.insert(values, life.death),
                DType::Float32
                    if halves.get(&values).is_some_and(|death| *death >= life.birth) && is_cast() =>
                {
                    found.insert((life.born_in, values));
                }
                _ => {}
            }
        }
        found
    }

    /// Returns true if the program itself asks for float32 here: see [`SizeRules::cast_up`].
    pub(super) fn is_cast_up(&self, life: &Life) -> bool {
        life.dtype == DType::Float32
            && life.owner.category != Category::Parameter
            && self.cast_up.contains(&(life.born_in, life.requested / FLOAT))
    }

    /// Returns true if the block is temporary memory of the optimizer's step.
    pub(super) fn is_of_step(&self, life: &Life) -> bool {
        life.owner.phase == self.phases.optimizer
            && !matches!(
                life.owner.category,
                Category::OptimizerState | Category::Gradient | Category::Parameter
            )
    }

    /// Returns true if the block has the size of a parameter of the module that allocated it. Gradients and
    /// contributions to them have such sizes.
    fn is_like_parameter(&self, life: &Life) -> bool {
        self.parameters.contains(&(life.born_in, life.requested))
    }

    /// Returns true for a large block that the script allocated before training. Such a block is assumed to
    /// be a data set on the GPU and not a batch.
    fn is_data(&self, life: &Life) -> bool {
        matches!(life.owner.category, Category::Input | Category::Script)
            && life.owner.step < 0
            && life.bytes > self.highest / 4
    }

    /// Returns true for the gathered parameters of a sharded model.
    fn is_gathered(&self, step: &RecordedStep, life: &Life) -> bool {
        self.call_traits(step, life).is_gather || self.traits_of(life.owner.op).is_gather
    }

    /// Returns true if the size of the block grows with the batch.
    fn grows_with_batch(&self, step: &RecordedStep, life: &Life) -> bool {
        use Category::{Buffer, CudaGraph, Gradient, OptimizerState, Parameter, Workspace};
        let fixed = [Buffer, CudaGraph, Gradient, OptimizerState, Parameter, Workspace];
        if fixed.contains(&life.owner.category) || life.owner.phase == self.phases.optimizer {
            return false;
        }
        // The gradients of gathered parameters are larger than each parameter of their module, so they are
        // not recognized by their size. In a step with gathered parameters, no temporary of the backward is
        // assumed to grow with the batch.
        let is_gradient =
            life.owner.phase == self.phases.backward && life.owner.category == Category::Temporary;
        if self.has_gathers && (is_gradient || self.is_gathered(step, life)) {
            return false;
        }
        let call = self.call_traits(step, life);
        // The copy of a weight in another type, which autocast makes, does not grow with the batch.
        let is_cast_weight = self.is_cast(step, life)
            && (self.parameters.contains(&(life.born_in, life.requested.saturating_mul(2)))
                || self.is_like_parameter(life));
        let is_part =
            (life.owner.phase == self.phases.backward || call.has_statistics) && self.is_like_parameter(life);
        !(is_cast_weight || is_part)
    }

    /// Returns true if the block is float32, so that it would have half its bytes in bfloat16.
    pub(super) fn is_float(&self, step: &RecordedStep, life: &Life) -> bool {
        // A checkpoint has the type with which it was saved, and its state of the optimizer may stay alive
        // beside a copy in the parameters' type.
        let is_loaded = life.owner.category == Category::Loaded
            || life.owner.category == Category::OptimizerState && life.owner.step < 0;
        let is_of_half = self.half_modules.is_some_and(|half| half.contains(&life.owner.module));
        let is_other = matches!(life.dtype, DType::Half | DType::Other) || self.is_cast_up(life);
        if life.owner.category == Category::Workspace || is_loaded || is_of_half || is_other {
            return false;
        }
        if matches!(
            life.owner.category,
            Category::Parameter | Category::Buffer | Category::Gradient | Category::OptimizerState
        ) {
            return true;
        }
        let call = self.call_traits(step, life);
        let largest = self.largest.get(&life.call).copied().unwrap_or(0);
        if call.is_other_type || self.traits_of(life.owner.op).is_other_type {
            return false;
        }
        if call.is_dropout && largest == life.requested.saturating_mul(FLOAT) {
            return false;
        }
        if call.has_statistics && life.requested < largest {
            return false;
        }
        // To sum many rows, an op accumulates in float32, also in a 16-bit model, in a block that it frees
        // itself. The size of such a block stays the same.
        let is_staging = self.traits_of(life.owner.op).is_sum && life.call == life.freed_by;
        !is_staging
    }

    /// Returns the new sizes of the blocks of a step, in bytes.
    pub(super) fn sizes(&self, step: &RecordedStep, changes: &[Change], symbols: &SymbolTable) -> Vec<i64> {
        let ranks = changes.iter().find_map(|change| match change {
            Change::ShardOptimizer(ranks) => Some(*ranks),
            _ => None,
        });
        let share = ranks.map_or(1.0, |ranks| largest_share(step, ranks));
        let all = step.lives.iter();
        all.map(|life| self.resized(life, self.requested(step, life, changes, symbols, share))).collect()
    }

    /// Returns the bytes that the changes add to each request that ran out of memory. The first number of
    /// each pair is the number of allocations before the request.
    pub(super) fn failed(
        &self,
        step: &RecordedStep,
        changes: &[Change],
        symbols: &SymbolTable,
    ) -> Vec<(u32, i64)> {
        let all = step.allocations.iter().enumerate().filter(|(_, each)| each.life.is_none());
        all.map(|(at, each)| {
            let at = at as u32;
            let life = Life::of_failed(each, at);
            (at, self.requested(step, &life, changes, symbols, 1.0) - life.requested)
        })
        .collect()
    }

    /// Returns the requested bytes of a block with the changes. `optimizer_share` is the share of the
    /// optimizer's blocks that one rank has under [`Change::ShardOptimizer`].
    pub(super) fn requested(
        &self,
        step: &RecordedStep,
        life: &Life,
        changes: &[Change],
        symbols: &SymbolTable,
        optimizer_share: f64,
    ) -> i64 {
        // 8-bit state has the same size for parameters of any type, so [`Change::Bfloat16`] does not change
        // it.
        let is_packed = changes.contains(&Change::Optimizer(NewOptimizer::EightBit));
        changes.iter().fold(life.requested, |size, change| match change {
            Change::Without(conditions) if is_without(conditions, life, symbols) => 0,
            Change::Optimizer(optimizer) => self.with_optimizer(*optimizer, life, size, symbols),
            Change::OffloadOptimizer => self.offloaded(life, size),
            Change::StepInBackward if self.is_of_step(life) => 0,
            Change::Bfloat16 if self.is_half => size,
            Change::Bfloat16 if is_packed && life.owner.category == Category::OptimizerState => size,
            Change::Bfloat16 if is_of_script(life) => size,
            Change::Batch(1, _) if has_one_row(life, symbols) => size,
            // It is unknown whether a data set on the GPU shrinks with the change, so assume that it keeps
            // its size. For a larger batch, assume that it grows, to be safe.
            Change::Bfloat16 | Change::Batch(1, _) if self.is_data(life) => size,
            Change::Bfloat16 if self.is_float(step, life) => size / 2,
            Change::Autocast if self.halved.contains(&life.id) => size / 2,
            Change::Batch(times, parts) if self.grows_with_batch(step, life) => {
                size.saturating_mul(*times) / parts
            }
            Change::Shard { ranks, .. } if self.is_sharded(life) => shard(size, *ranks),
            Change::ShardOptimizer(_) if self.is_of_optimizer(life) => {
                (size as f64 * optimizer_share).ceil() as i64
            }
            _ => size,
        })
    }

    /// Returns the size of the block for the new request `requested`, in bytes. If the request did not
    /// change, the block keeps its size.
    pub(super) fn resized(&self, life: &Life, requested: i64) -> i64 {
        if requested == life.requested {
            return life.bytes;
        }
        self.rounded(requested)
    }

    /// Returns the size of a block for a request, in bytes.
    pub(super) fn rounded(&self, requested: i64) -> i64 {
        self.rounding.round(requested.max(0).cast_unsigned()).cast_signed()
    }

    /// Returns true if the block is state of the optimizer or a temporary of its step.
    fn is_of_optimizer(&self, life: &Life) -> bool {
        life.owner.category == Category::OptimizerState || self.is_of_step(life)
    }

    /// Returns true if a rank has only its part of the block. A gradient of this step does not count, because
    /// it is whole until the ranks have summed it.
    fn is_sharded(&self, life: &Life) -> bool {
        life.owner.category == Category::Parameter
            || life.owner.category == Category::Gradient && life.is_older
            || self.is_of_optimizer(life)
    }

    fn with_optimizer(&self, optimizer: NewOptimizer, life: &Life, size: i64, symbols: &SymbolTable) -> i64 {
        if self.is_of_step(life) {
            return 0;
        }
        if life.owner.category != Category::OptimizerState {
            return size;
        }
        let item = life.item();
        let elements = life.requested / item;
        match optimizer {
            NewOptimizer::Sgd => 0,
            // The state replaces two blocks of Adam, so each of them becomes half of it.
            NewOptimizer::Adafactor => factored(&symbols.get(life.shape), elements) * item / 2,
            NewOptimizer::EightBit if elements < SMALL_PARAMETER || life.dtype == DType::Other => size,
            NewOptimizer::EightBit => elements.saturating_add((elements / SCALED_TOGETHER + 1) * FLOAT),
        }
    }

    fn offloaded(&self, life: &Life, size: i64) -> i64 {
        if self.is_of_optimizer(life) && life.requested / life.item() >= SMALL_PARAMETER { 0 } else { size }
    }
}

/// Returns true for a tensor that the script makes outside of the model and of autograd, such as
/// `torch.zeros` for the outputs of many windows. Its type is the script's choice: `model.bfloat16()` does
/// not change it.
fn is_of_script(life: &Life) -> bool {
    // A request that ran out of memory has no category.
    let is_outside = life.owner.phase == Symbol::NONE && life.owner.module == Symbol::SCRIPT;
    match life.owner.category {
        Category::Script => true,
        Category::None => life.id == FAILED && is_outside,
        _ => false,
    }
}

/// Returns true for a tensor of the script with one row, so that a smaller batch cannot divide it.
fn has_one_row(life: &Life, symbols: &SymbolTable) -> bool {
    let shape = symbols.get(life.shape);
    let dims = Form { dtype: UNKNOWN, shape: &shape }.dims();
    is_of_script(life) && dims.is_some_and(|dims| dims.len() > 1 && dims[0] == 1)
}

/// Returns the largest share of the parameters that one of `ranks` ranks has to step.
/// `ZeroRedundancyOptimizer` gives each parameter, the largest first, to the rank with the smallest sum so
/// far (`_partition_parameters`).
fn largest_share(step: &RecordedStep, ranks: i64) -> f64 {
    let parameters = step.lives.iter().filter(|life| life.owner.category == Category::Parameter);
    let mut sizes: Vec<i64> = parameters.map(|life| life.requested.max(0)).collect();
    sizes.sort_unstable_by_key(|size| Reverse(*size));
    let ranks = usize::try_from(ranks).unwrap_or(usize::MAX).clamp(1, sizes.len().max(1));
    let mut loads: BinaryHeap<Reverse<i64>> = vec![Reverse(0); ranks].into();
    for size in &sizes {
        if let Some(mut least) = loads.peek_mut() {
            least.0 = least.0.saturating_add(*size);
        }
    }
    let all: f64 = sizes.iter().map(|size| *size as f64).sum();
    let most = loads.into_iter().map(|Reverse(load)| load).max().unwrap_or(0);
    if all > 0.0 { most as f64 / all } else { 1.0 / ranks as f64 }
}

/// Returns the number of values of Adafactor's state for a parameter of `elements` values: of m rows and n
/// columns, m + n, and of one dimension, as many as the parameter. Without the shape, uses the lower bound of
/// m + n.
fn factored(shape: &str, elements: i64) -> i64 {
    let dims = Form { dtype: UNKNOWN, shape }.dims();
    match dims.as_deref() {
        Some([.., rows, columns]) if *rows > 0 && *columns > 0 => elements / rows + elements / columns,
        Some(_) => elements,
        None => 2 * (elements as f64).sqrt().ceil() as i64,
    }
}

/// Returns the size of one of `ranks` equal parts of a request, rounded up, in bytes.
pub(super) fn shard(requested: i64, ranks: i64) -> i64 {
    let ranks = ranks.max(1);
    requested / ranks + i64::from(requested % ranks > 0)
}

fn is_without(conditions: &[Condition], life: &Life, symbols: &SymbolTable) -> bool {
    conditions.iter().all(|condition| match condition.key {
        ConditionKey::Category => condition.takes(life.owner.category.as_str()),
        ConditionKey::Op => condition.takes(&symbols.get(life.owner.op)),
        ConditionKey::Module => condition.takes(&symbols.get(life.owner.module)),
        ConditionKey::Phase => condition.takes(&symbols.get(life.owner.phase)),
    })
}
