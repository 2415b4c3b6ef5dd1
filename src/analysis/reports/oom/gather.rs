//! Gathers the evidence about an OOM from its trace.

use std::collections::BTreeMap;

use memtrace_trace::memory::Totals;
use memtrace_trace::rounding::{SMALL_SIZE, segment_size};
use memtrace_trace::{Api, Category};
use rustc_hash::FxHashSet;

use super::earlier_graph::continued_steps;
use super::eval_mode::{EvaluationGraph, is_by_mode};
use super::evidence::{
    Copies, DeviceUse, Evaluation, Evidence, FailedRequest, ForwardHistory, LiveMemory, StateToCome,
    StepHistory, ToCome, TorchMemory,
};
use super::grown_model::GrownModel;
use super::layers_left::LayersLeft;
use super::limits::{FEWEST_CYCLES, FEWEST_STEPS, MOST_OF_CONTEXT};
use super::optimizer_step::OptimizerStep;
use super::retained_holders::with_inputs_of_checkpoints;
use super::trace_to_oom::TraceToOom;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::{Block, Owner};
use crate::state::layout::Segment;
use crate::state::model_facts::{is_module, root_of};
use crate::state::retained::with_whole_variables;

impl Evidence {
    /// Gathers the evidence. `live` has the live blocks of the request's device.
    pub(super) fn gather(at: &TraceToOom<'_>, live: &[Block]) -> Evidence {
        let totals = at.replayed.replay.find(at.row.device).map(|device| device.totals).unwrap_or_default();
        let forwards = ForwardHistory::gather(at, live);
        let mut evidence = Evidence {
            request: FailedRequest::gather(at),
            device: DeviceUse::gather(at, &totals),
            torch: TorchMemory::gather(at, &totals),
            live: LiveMemory::gather(at, live, forwards.has_autograd),
            steps: StepHistory::gather(at, live),
            forwards,
            evaluation: Evaluation::default(),
            to_come: ToCome::default(),
            holders: at
                .search()
                .map(|search| with_whole_variables(&with_inputs_of_checkpoints(&search.holders)))
                .unwrap_or_default(),
        };
        evidence.evaluation = Evaluation::gather(at, live, &evidence);
        evidence.to_come = ToCome::gather(at, live, &evidence);
        evidence
    }
}

impl FailedRequest {
    fn gather(at: &TraceToOom<'_>) -> FailedRequest {
        let row = &at.row;
        let bytes = row.rounded_bytes.max(row.requested_bytes);
        FailedRequest {
            is_injected: &*at.symbols().get(row.api) == Api::InjectedFault.as_str(),
            bytes,
            segment: segment_size(bytes.max(0).cast_unsigned()) as i64,
            failed_calls: at.seen.failed_of_oom,
            step: row.step,
            is_join: at.op() == "aten::cat" && at.is_outside_modules(),
            is_in_update: row.phase == at.replayed.replay.phases.optimizer,
            is_in_forward: at.is_in_forward() && !at.is_outside_modules(),
        }
    }
}

impl DeviceUse {
    fn gather(at: &TraceToOom<'_>, totals: &Totals) -> DeviceUse {
        let capacity = at.trace.meta.total_bytes(at.row.device);
        let left = (capacity - totals.reserved - totals.outside).max(0);
        // The sample is older than the request. Its free bytes are out of date, but its bytes of other
        // processes are still used.
        let sampled = at.seen.untraced.iter().find(|untraced| untraced.device == at.row.device);
        // If the program allocates while the sample is taken, the sample is too small. A simulated context
        // has a known size, so use that as the minimum.
        let context_bytes = at.trace.meta.phantom["context_bytes"].as_i64().unwrap_or(0);
        let untraced = sampled.map_or(0, |untraced| untraced.bytes).max(context_bytes).min(left);
        // If the driver reports nothing about other processes, memory beyond the largest possible context
        // belongs to them.
        let most_of_context = if context_bytes > 0 { context_bytes } else { MOST_OF_CONTEXT };
        let host = sampled.and_then(|untraced| untraced.host).map(|host| host.min(untraced));
        let seen = sampled.and_then(|untraced| untraced.others);
        let others =
            seen.unwrap_or_else(|| (untraced - host.unwrap_or(0) - most_of_context).max(0)).min(untraced);
        DeviceUse {
            capacity,
            outside: totals.outside,
            others,
            are_others_guessed: seen.is_none(),
            host,
            unknown: (untraced - others - host.unwrap_or(0)).max(context_bytes.min(left)),
            room: left - untraced,
            is_sampled: sampled.is_some(),
            needed: at.trace.needed_bytes(),
        }
    }
}

impl TorchMemory {
    fn gather(at: &TraceToOom<'_>, totals: &Totals) -> TorchMemory {
        let segments = at.layout.segments(&at.replayed.replay, at.row.device);
        let is_small = at.row.rounded_bytes.max(at.row.requested_bytes) <= SMALL_SIZE as i64;
        let (usable, private): (Vec<&Segment>, Vec<&Segment>) =
            segments.iter().partition(|segment| segment.pool == at.row.pool);
        let pieces = usable.iter().filter(|segment| segment.is_small() == is_small);
        let mut holes: Vec<i64> = pieces.flat_map(|segment| segment.holes.clone()).collect();
        holes.sort_unstable_by_key(|hole| -hole);
        TorchMemory {
            allocated: totals.allocated,
            reserved: totals.reserved,
            holes,
            private: private.into_iter().map(Segment::free).sum(),
        }
    }
}

/// Returns the bytes of the live blocks of a category, sharded or not.
fn sum_of(live: &[Block], category: Category) -> i64 {
    let is_of = |block: &&Block| block.owner.category.without_sharding() == category;
    live.iter().filter(is_of).map(|block| block.bytes).sum()
}

impl LiveMemory {
    fn gather(at: &TraceToOom<'_>, live: &[Block], has_autograd: bool) -> LiveMemory {
        let is_result = |block: &&Block| block.owner.category == Category::Activation;
        let is_lasting = |block: &&Block| block.owner.category.is_unclaimed() && block.owner.step < 0;
        LiveMemory {
            activations: sum_of(live, Category::Activation) + sum_of(live, Category::Temporary),
            largest_result: live.iter().filter(is_result).map(|block| block.bytes).max().unwrap_or(0),
            parameters: sum_of(live, Category::Parameter),
            copies: Copies::count(live, Category::Parameter),
            states: Some(Copies::count(live, Category::OptimizerState))
                .filter(|states| states.steps >= FEWEST_STEPS),
            other_lasting: live.iter().filter(is_lasting).map(|block| block.bytes).sum(),
            inputs: sum_of(live, Category::Input),
            kv_cache: sum_of(live, Category::KvCache),
            // Without a graph, these are results that a loop over inputs gathers, such as the features of images.
            of_failed_attempt: if has_autograd {
                at.seen.left_by_attempt(live, &at.row, at.symbols())
            } else {
                0
            },
        }
    }
}

impl StepHistory {
    fn gather(at: &TraceToOom<'_>, live: &[Block]) -> StepHistory {
        let steps = at.seen.steps.iter().find(|steps| steps.device == at.row.device);
        let (began, finished) =
            steps.map_or((0, Vec::new()), |steps| (steps.totals.began, steps.finished.clone()));
        let owners: Vec<(Owner, i64)> = live.iter().map(|block| (block.owner, block.bytes)).collect();
        StepHistory {
            began,
            continued: continued_steps(&owners, at.row.step, &at.seen.calls, at.symbols()),
            grown_model: GrownModel::find(
                &finished,
                sum_of(live, Category::Parameter),
                Copies::count(live, Category::Parameter),
            ),
            finished,
        }
    }
}

impl ForwardHistory {
    fn gather(at: &TraceToOom<'_>, live: &[Block]) -> ForwardHistory {
        let forwards = at.seen.forwards.since_backward(at.symbols());
        let is_result = |block: &&Block| {
            let is_of_step = block.owner.step == at.row.step && block.owner.module != at.row.module;
            is_of_step && matches!(block.owner.category, Category::Activation | Category::AutogradDetail)
        };
        let holding: FxHashSet<Symbol> =
            live.iter().filter(is_result).map(|block| block.owner.module).collect();
        // If the search was incomplete, it may have missed the graphs, so assume that there are some.
        // It may also miss a graph that only variables of running functions hold.
        let may_have_graphs = at
            .search()
            .is_none_or(|search| !search.is_whole || search.holders.iter().any(|holder| holder.graphs > 0));
        ForwardHistory {
            count: forwards.count,
            left: forwards.left(),
            usual: at.seen.forwards.usual(at.symbols()),
            has_backward: at.seen.forwards.has_backward,
            has_autograd: may_have_graphs
                || at.is_in_forward() && at.seen.calls.keep_graph(at.row.step, &holding),
        }
    }
}

impl Evaluation {
    fn gather(at: &TraceToOom<'_>, live: &[Block], evidence: &Evidence) -> Evaluation {
        let owners: Vec<(Owner, i64)> = live.iter().map(|block| (block.owner, block.bytes)).collect();
        let (seen, symbols) = (&at.seen, at.symbols());
        let is_trained = || seen.forwards.has_backward && seen.evaluated.contains(root_of(&at.module()));
        let depends_on_mode = |module| {
            let class = at.replayed.replay.classes.class_at(module, symbols);
            class.is_some_and(|class| is_by_mode(&class))
        };
        let is_less = || seen.modes.is_evaluation(at.row.module, symbols, depends_on_mode);
        let has_autograd = evidence.forwards.has_autograd;
        let graph =
            EvaluationGraph::find(&owners, at.row.step, &seen.calls, &seen.facts, has_autograd, symbols);
        Evaluation {
            is_now: at.is_in_forward() && (is_trained() || is_less()),
            graph: graph.filter(|graph| evidence.is_material(graph.bytes)),
        }
    }
}

impl ToCome {
    fn gather(at: &TraceToOom<'_>, live: &[Block], evidence: &Evidence) -> ToCome {
        let layers = layers_left(at, live);
        let optimizer = OptimizerStep::find(live, at.symbols(), &at.row);
        let (mut bytes, state) =
            layers.as_ref().map_or((optimizer.to_come, optimizer.to_come), |left| (left.bytes, 0));
        // The temporary results are allocated after all state. If the rest of the state does not fit, they
        // are not the missing memory, so leave them out.
        let with_request = bytes + optimizer.requested;
        let is_state_missing = 20 * with_request >= optimizer.temporaries
            && evidence.needs_at_least() + bytes > evidence.device.capacity;
        let is_foreach = optimizer.is_foreach && with_request > 0;
        // The request copies one of the parameters that are still on the CPU.
        let parameters = at.being_moved().map_or(0, |(_, on_cpu)| (on_cpu - evidence.request.bytes).max(0));
        bytes += parameters;
        ToCome {
            bytes,
            state,
            requested_state: optimizer.requested,
            parameters,
            layers,
            step_temporaries: if is_state_missing { 0 } else { optimizer.temporaries },
            temporaries: if is_foreach { optimizer.temporaries } else { 0 },
            rise: at
                .seen
                .cycles
                .rise_after(&at.row, evidence.with_request())
                .filter(|_| at.seen.cycles.ended >= FEWEST_CYCLES),
            of_optimizer: state_to_come(at, live, evidence).unwrap_or_default(),
        }
    }
}

/// Returns the repeated layers that the forward of the request had not reached.
fn layers_left(at: &TraceToOom<'_>, live: &[Block]) -> Option<LayersLeft> {
    if !at.is_in_forward() {
        return None;
    }
    let (symbols, classes, module) = (at.symbols(), &at.replayed.replay.classes, at.module());
    let by_module =
        |block: &Block| (symbols.get(block.owner.module).to_string(), block.owner.category, block.bytes);
    let blocks = live.iter().map(by_module).collect::<Vec<_>>();
    // The layers are found among the called modules, because the class of a layer that was not called is
    // unknown. In the first layer, no other layer was called, so there only the number of layers with
    // parameters counts.
    LayersLeft::find(&module, &classes.layers([], symbols), &blocks).or_else(|| {
        let paths = live.iter().map(|block| block.owner.module);
        let all = LayersLeft::find(&module, &classes.layers(paths, symbols), &blocks);
        all.filter(|layers| layers.number == 0)
    })
}

/// Returns the state of the optimizer that is to come, if the request is in the first step of a training.
fn state_to_come(at: &TraceToOom<'_>, live: &[Block], evidence: &Evidence) -> Option<StateToCome> {
    let is_training = evidence.forwards.has_autograd && sum_of(live, Category::OptimizerState) == 0;
    if !is_training || !evidence.steps.finished.is_empty() || at.row.step > 0 {
        return None;
    }
    let root = if at.is_outside_modules() {
        root_of_results(live, at.row.step, at.symbols())?
    } else {
        root_of(&at.module()).to_owned()
    };
    let of_model = at.seen.facts.facts_at(&root);
    if of_model.evaluates {
        return None;
    }
    // FSDP's gathered parameters are not trained; only its shards are.
    let is_own = |block: &&Block| {
        block.owner.category == Category::Parameter && root_of(&at.symbols().get(block.owner.module)) == root
    };
    let parameters: i64 = live.iter().filter(is_own).map(|block| block.bytes).sum();
    let trained = of_model.trained.unwrap_or(parameters).min(parameters);
    // After several backwards without any optimizer, the program probably has none.
    Some(at.whole.found.state_of(&root, trained))
        .filter(|found| found.class.is_some() || at.seen.cycles.ended < FEWEST_CYCLES)
}

/// Returns the root with the most results of a step, to which a request outside of modules probably belongs,
/// such as a loss.
fn root_of_results(live: &[Block], step: i64, symbols: &SymbolTable) -> Option<String> {
    let mut roots: BTreeMap<String, i64> = BTreeMap::new();
    for block in live {
        let path = symbols.or_dash(block.owner.module);
        let is_result = block.owner.category == Category::Activation && block.owner.step == step;
        if is_result && is_module(&path) {
            *roots.entry(root_of(&path).to_owned()).or_default() += block.bytes;
        }
    }
    roots.into_iter().max_by_key(|(_, bytes)| *bytes).map(|(root, _)| root)
}
