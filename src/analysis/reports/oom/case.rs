//! One request that ran out of memory: the cause, the verdict and the advice.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use memtrace_trace::form::Form;
use memtrace_trace::rounding::{SMALL_SIZE, segment_size};
use memtrace_trace::text::UNKNOWN;
use memtrace_trace::units::{GIB, Unit};
use memtrace_trace::{Api, Category};
use serde_json::{Value, json};

use super::super::advised::FirstAdvice;
use super::super::device_users::Neighbours;
use super::super::late_buckets::late_buckets;
use super::cause::{Cause, Copies, Facts, StateToCome};
use super::earlier_graph::continued_steps;
use super::eval_mode::{EvaluationGraph, is_by_mode};
use super::fsdp::{modules_of, unreduced};
use super::idle::UntrainedModel;
use super::kept::{Kept, with_inputs_of_checkpoints};
use super::kept_remedies::remedy;
use super::kv_cache::KeyValueCache;
use super::layers_left::LayersLeft;
use super::model_growth::GrownModel;
use super::optimizer_step::OptimizerStep;
use super::recomputed::recomputed;
use super::rows_before::RowsBefore;
use super::server_limit::ServerPart;
use super::step_groups::Difference;
use super::step_growth::FEWEST_STEPS;
use super::unoptimized::UnoptimizedGraph;
use super::unused_gradients::UnusedGradients;

use crate::options::Options;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::numbers::duration;
use crate::render::numbers::{counted, step_or_dash, upper_first};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::block::{Block, Owner};
use crate::state::layout::{Layout, Segment};
use crate::state::model_facts::{is_module, root_of};
use crate::state::replay_trace::Replayed;
use crate::state::retained::{Holder, RetainedSearch, with_whole_variables};
use crate::state::stacks::Stacks;

/// The ops that copy a tensor from the CPU to the GPU.
pub(super) const COPIES: [&str; 2] = ["aten::empty_strided", "aten::_to_copy"];

/// The maximum number of the request's Python lines that are shown.
const LINES: usize = 5;

/// An upper bound, in bytes, of the memory that a CUDA context and the code and workspaces of libraries take
/// without a traced call. Unaccounted memory beyond it belongs to another process.
const CONTEXT: i64 = GIB;

/// The minimum number of forwards with a backward that predict the next one.
const FEWEST_CYCLES: u64 = 2;

/// The tolerance, in bytes, when the sizes of two blocks are compared, because the allocator rounds sizes.
const ROUNDING: i64 = 1024;

/// Returns true if a row is outside of all modules.
fn is_script(row: &Record, replayed: &Replayed) -> bool {
    !is_module(&replayed.symbols.or_dash(row.module))
}

/// The bytes that the context takes on a simulated GPU, and the range that it may take on a real card.
#[derive(Clone, Copy, Debug)]
pub(super) struct ContextRange {
    here: i64,
    least: i64,
    most: i64,
}

impl ContextRange {
    /// Returns the range that the simulated GPU recorded in a trace, or `None` if it recorded no range or an
    /// empty one.
    fn of(trace: &TraceFile) -> Option<ContextRange> {
        let bytes = |name: &str| trace.meta.phantom[name].as_i64();
        let range = ContextRange {
            here: bytes("context_bytes")?,
            least: bytes("context_low_bytes")?,
            most: bytes("context_high_bytes")?,
        };
        (range.least < range.most).then_some(range)
    }
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

/// Returns the bytes of a log-softmax request, plus the bytes of this step's live blocks of the same size or
/// half the size: the logits and their 16-bit originals. Returns 0 for a request of another op.
fn logits(live: &[Block], row: &Record, op: &str) -> i64 {
    if op != "aten::_log_softmax" {
        return 0;
    }
    let request = row.rounded_bytes.max(row.requested_bytes);
    let is_like = |bytes: i64| (bytes - request).abs() <= ROUNDING || (2 * bytes - request).abs() <= ROUNDING;
    let same = live.iter().filter(|block| block.owner.step == row.step && is_like(block.bytes));
    request + same.map(|block| block.bytes).sum::<i64>()
}

pub(super) struct OomCase<'a> {
    pub(super) row: Record,
    pub(super) trace: &'a TraceFile,
    /// The share of the card to which a server (vLLM) limits itself, if the trace records it.
    pub(super) server: Option<ServerPart>,
    pub(super) cause: Cause,
    pub(super) kept: Option<(Holder, Kept)>,
    pub(super) facts: Facts,
    /// The other processes of the run on this GPU, if they were looked for.
    pub(super) neighbours: Option<Neighbours>,
    pub(super) ooms: u64,
    /// The context of a simulated GPU; `None` on a real GPU, and if the request for a simulated GPU set the
    /// size of the context.
    pub(super) context: Option<ContextRange>,
    /// The free memory of the device; `None` if the trace has no sample of it.
    pub(super) device_free: Option<i64>,
    /// The sizes in bytes of the free pieces in torch's segments for requests of this kind, the largest
    /// first. All of them may be too small.
    pub(super) holes: Vec<i64>,
    /// The repeated layers that the forward had not reached.
    pub(super) layers: Option<LayersLeft>,
    /// Memory that is much larger than in earlier steps, if the program needs too much and this step is
    /// larger than earlier ones.
    pub(super) differences: Vec<Difference>,
    /// True if the request is in a forward and no backward has run so far.
    pub(super) is_untrained: bool,
    /// The bytes of the logits and their copies, including the request; 0 if the request is not for a loss.
    pub(super) logits: i64,
    /// The bytes of attention's scores, including the request, and true if the module of the request has run
    /// fused attention.
    pub(super) scores: i64,
    pub(super) has_fused_attention: bool,
    /// True if the request is in a forward in evaluation mode of a model that was trained before.
    pub(super) is_evaluation: bool,
    /// The model whose parameters the program moves to the GPU.
    pub(super) being_moved: Option<String>,
    /// The root that the first step trains; empty if it is unknown.
    pub(super) trained_root: String,
    /// A model that keeps a graph in evaluation mode, if its memory is a significant share of the card.
    pub(super) evaluation_graph: Option<EvaluationGraph>,
    /// A model without an optimizer that keeps a graph, if its memory is a significant share of the card.
    pub(super) unoptimized_graph: Option<UnoptimizedGraph>,
    /// Parameters without an optimizer, if they cost a significant share of the card.
    pub(super) unused_gradients: Option<UnusedGradients>,
    pub(super) key_value_cache: KeyValueCache,
    /// True if the latest call of the request's model was in evaluation mode.
    pub(super) evaluates: bool,
    /// Other models that this step does not train, if the program is too big.
    pub(super) untrained: Vec<UntrainedModel>,
    /// The blocks of this device.
    pub(super) live: Vec<(Owner, i64)>,
    pub(super) symbols: SymbolTable,
    /// True if the request was made outside of all modules after the first step had begun.
    pub(super) in_script: bool,
    pub(super) owner: String,
    /// The phase of the request.
    pub(super) phase: String,
    /// The op of the request.
    pub(super) op: String,
    /// The module of the request.
    pub(super) module: String,
    /// The program's own lines of Python that made the request, innermost first.
    pub(super) lines: Vec<String>,
}

impl<'a> OomCase<'a> {
    pub(super) fn new(
        trace: &'a TraceFile,
        replayed: &Replayed,
        layout: &Layout,
        row: &Record,
        seen: &RowsBefore,
        search: Option<&RetainedSearch>,
        server: Option<ServerPart>,
    ) -> Self {
        let totals = replayed.replay.find(row.device).map(|device| device.totals).unwrap_or_default();
        let capacity = trace.meta.total_bytes(row.device);
        let request = row.rounded_bytes.max(row.requested_bytes);
        let segments = layout.segments(&replayed.replay, row.device);
        let small = request <= SMALL_SIZE as i64;
        let usable = |pool: i64| pool == row.pool;
        let pieces = segments.iter().filter(|s| s.is_small() == small && usable(s.pool));
        let mut holes: Vec<i64> = pieces.flat_map(|s| s.holes.clone()).collect();
        holes.sort_unstable_by_key(|hole| -hole);
        let left = (capacity - totals.reserved - totals.outside).max(0);
        // The sample is older than the request. Its free bytes are out of date, but its bytes of other
        // processes are still used.
        let foreign = seen.foreign.iter().find(|(device, ..)| *device == row.device);
        // If the program allocates while the sample is taken, the sample is too small. A simulated context
        // has a known size, so use that as the minimum.
        let context_bytes = trace.meta.phantom["context_bytes"].as_i64().unwrap_or(0);
        let untraced = foreign.map_or(0, |(_, bytes, ..)| *bytes).max(context_bytes).min(left);
        let device_free = foreign.map(|_| left - untraced);
        let context = ContextRange::of(trace);
        // If the driver reports nothing about other processes, memory beyond the largest possible context
        // belongs to them.
        let most_of_context = if context_bytes > 0 { context_bytes } else { CONTEXT };
        let host = foreign.and_then(|(.., host)| *host).map(|host| host.min(untraced));
        let others = foreign
            .and_then(|(_, _, others, _)| *others)
            .unwrap_or_else(|| (untraced - host.unwrap_or(0) - most_of_context).max(0))
            .min(untraced);
        let live = replayed.replay.live_on(row.device, false);
        let blocks: Vec<(Owner, i64)> = live.iter().map(|block| (block.owner, block.bytes)).collect();
        let sum = |category: Category| -> i64 {
            let is_of = |block: &&Block| block.owner.category.without_sharding() == category;
            live.iter().filter(is_of).map(|block| block.bytes).sum()
        };
        let exactly = |categories: &'static [Category]| {
            live.iter().filter(|block| categories.contains(&block.owner.category)).map(|block| block.bytes)
        };
        let steps = seen.steps.iter().find(|(device, ..)| *device == row.device);
        let module = replayed.symbols.get(row.module);
        let in_forward = *replayed.symbols.get(row.phase) == *"forward";
        let by_module = |block: &Block| {
            (replayed.symbols.get(block.owner.module).to_string(), block.owner.category, block.bytes)
        };
        let layers = in_forward
            .then(|| {
                let blocks = live.iter().map(by_module).collect::<Vec<_>>();
                let classes = &replayed.replay.classes;
                // The layers are found among the called modules, because the class of a layer that was not
                // called is unknown. In the first layer, no other layer was called, so there only the number
                // of layers with parameters counts.
                let called = LayersLeft::find(&module, &classes.layers([], &replayed.symbols), &blocks);
                called.or_else(|| {
                    let paths = live.iter().map(|block| block.owner.module);
                    let all = LayersLeft::find(&module, &classes.layers(paths, &replayed.symbols), &blocks);
                    all.filter(|layers| layers.number == 0)
                })
            })
            .flatten();
        let is_result = |block: &&Block| {
            let is_of_step = block.owner.step == row.step && block.owner.module != row.module;
            is_of_step && matches!(block.owner.category, Category::Activation | Category::AutogradDetail)
        };
        let holding: BTreeSet<Symbol> =
            live.iter().filter(is_result).map(|block| block.owner.module).collect();
        let is_sharded = exactly(&[Category::UnshardedParameter, Category::AllGather]).next().is_some();
        let optimizer = OptimizerStep::of(&live, &replayed.symbols, row);
        let forwards = seen.forwards.since_backward(&replayed.symbols);
        let facts = Facts {
            is_injected: &*replayed.symbols.get(row.api) == Api::InjectedFault.as_str(),
            capacity,
            request,
            segment: segment_size(request.max(0).cast_unsigned()) as i64,
            allocated: totals.allocated,
            reserved: totals.reserved,
            outside: totals.outside,
            others,
            host,
            unknown: (untraced - others - host.unwrap_or(0)).max(context_bytes.min(left)),
            room: left - untraced,
            largest_hole: holes.first().copied().unwrap_or(0),
            continued_steps: continued_steps(&blocks, row.step, &seen.calls, &replayed.symbols),
            grown_model: GrownModel::of(
                steps.map_or(&[], |(.., finished)| finished.as_slice()),
                sum(Category::Parameter),
                Copies::of(&live, Category::Parameter),
            ),
            failed_calls: seen.failed_of_oom,
            step: row.step,
            steps: steps.map(|(.., finished)| finished.clone()).unwrap_or_default(),
            step_began: steps.map_or(0, |(_, _, totals, _)| totals.began),
            forwards: forwards.count,
            left_by_forwards: forwards.left(),
            usual_forwards: seen.forwards.usual(&replayed.symbols),
            activations: sum(Category::Activation) + sum(Category::Temporary),
            parameters: sum(Category::Parameter),
            shards: exactly(&[Category::Parameter]).sum(),
            largest_gather: exactly(&[Category::UnshardedParameter, Category::AllGather]).max().unwrap_or(0),
            gathered_modules: modules_of(&live, Category::UnshardedParameter, &replayed.symbols),
            unreduced_modules: unreduced(
                &blocks,
                (in_forward && is_sharded).then_some(replayed.replay.phases.backward),
                &replayed.symbols,
            ),
            of_failed_attempt: seen.left_by_attempt(&live, row, &replayed.symbols),
            largest_result: exactly(&[Category::Activation]).max().unwrap_or(0),
            other_lasting: live
                .iter()
                .filter(|b| b.owner.category.is_unclaimed() && b.owner.step < 0)
                .map(|b| b.bytes)
                .sum(),
            inputs: sum(Category::Input),
            kv_cache: sum(Category::KvCache),
            to_come: layers.as_ref().map_or(optimizer.to_come, |left| left.bytes),
            copied: live
                .iter()
                .filter(|b| b.owner.op == row.op && b.owner.module == row.module && b.owner.step == row.step)
                .count(),
            recomputed: recomputed(
                live.iter().map(|block| (block.owner, block.bytes)),
                replayed.replay.phases.backward,
                &replayed.symbols,
                &replayed.replay.classes.layers([], &replayed.symbols),
            ),
            holders: search
                .map(|search| with_whole_variables(&with_inputs_of_checkpoints(&search.holders)))
                .unwrap_or_default(),
            is_join: *replayed.symbols.get(row.op) == *"aten::cat" && is_script(row, replayed),
            private: segments.iter().filter(|s| !usable(s.pool)).map(Segment::free).sum(),
            copies: Copies::of(&live, Category::Parameter),
            states: Some(Copies::of(&live, Category::OptimizerState))
                .filter(|states| states.steps >= FEWEST_STEPS),
            // If the search was incomplete, it may have missed the graphs, so assume that there are some.
            // It may also miss a graph that only variables of running functions hold.
            has_autograd: search.is_none_or(|search| {
                !search.is_whole || search.holders.iter().any(|holder| holder.graphs > 0)
            }) || in_forward && seen.calls.keep_graph(row.step, &holding),
            has_backward: seen.forwards.has_backward,
            roots: seen.forwards.roots(&replayed.symbols),
            step_temporaries: optimizer.temporaries,
            temporaries_to_come: 0,
            state_to_come: if layers.is_some() { 0 } else { optimizer.to_come },
            is_in_update: row.phase == replayed.replay.phases.optimizer,
            is_in_forward: in_forward && !is_script(row, replayed),
            of_optimizer: StateToCome::default(),
            parameters_to_come: 0,
            rise_to_come: seen
                .cycles
                .rise_after(row, totals.allocated + request)
                .filter(|_| seen.cycles.ended >= FEWEST_CYCLES),
            needed: trace.needed_bytes(),
        };
        let mut facts = facts;
        // The temporary results are allocated after all state. If the rest of the state does not fit, they
        // are not the missing memory, so leave them out.
        if 20 * facts.to_come >= facts.step_temporaries && facts.needs_at_least() + facts.to_come > capacity {
            facts.step_temporaries = 0;
        }
        if optimizer.is_foreach && optimizer.to_come > 0 {
            facts.temporaries_to_come = optimizer.temporaries;
        }
        let op = replayed.symbols.get(row.op);
        let is_moved = COPIES.contains(&&*op) && is_script(row, replayed) && row.step < 0;
        let being_moved = seen.found.being_moved().filter(|_| is_moved);
        if let Some((_, bytes)) = being_moved {
            // The request copies one of these parameters.
            facts.parameters_to_come = (bytes - request).max(0);
            facts.to_come += facts.parameters_to_come;
        }
        let of_model = seen.facts.of(&module);
        let root = root_of(&module);
        let trained_root = if is_script(row, replayed) {
            root_of_results(&live, row.step, &replayed.symbols)
        } else {
            Some(root.to_owned())
        };
        let is_training = facts.has_autograd && sum(Category::OptimizerState) == 0;
        let may_train = |root: &&String| is_training && !seen.facts.of(root).evaluates;
        if facts.steps.is_empty()
            && row.step <= 0
            && let Some(root) = trained_root.as_ref().filter(may_train)
        {
            // FSDP's gathered parameters are not trained; only its shards are.
            let is_own = |block: &&Block| {
                block.owner.category == Category::Parameter
                    && root_of(&replayed.symbols.get(block.owner.module)) == root
            };
            let parameters: i64 = live.iter().filter(is_own).map(|block| block.bytes).sum();
            let trained = seen.facts.of(root).trained.unwrap_or(parameters).min(parameters);
            let found = seen.found.state_of(root, trained);
            // After several backwards without any optimizer, the program probably has none.
            if found.class.is_some() || seen.cycles.ended < FEWEST_CYCLES {
                facts.of_optimizer = found;
            }
        }
        // Without a graph, these are results that a loop over inputs gathers, such as the features of images.
        if !facts.has_autograd {
            facts.of_failed_attempt = 0;
        }
        let (cause, kept) = facts.judge();
        let groups = seen.groups.iter().find(|(device, _)| *device == row.device);
        let differences = groups
            .filter(|_| cause == Cause::TooBig && facts.larger_step().is_some())
            .map_or_else(Vec::new, |(_, groups)| {
                let layers = replayed.replay.classes.layers([], &replayed.symbols);
                groups.differences(row, request, &replayed.symbols, &layers, facts.capacity)
            });
        OomCase {
            row: *row,
            trace,
            server,
            cause,
            kept: kept.map(|(holder, why)| (holder.clone(), why)),
            neighbours: None,
            ooms: seen.ooms,
            context,
            device_free,
            holes,
            layers,
            differences,
            is_untrained: in_forward && !seen.forwards.has_backward,
            logits: logits(&live, row, &replayed.symbols.get(row.op)),
            scores: seen.attention.scores(
                live.iter().map(|block| (block.owner, block.bytes)),
                (row.module, request),
                &replayed.symbols,
            ),
            has_fused_attention: seen.attention.is_fused(row.module, &replayed.symbols),
            is_evaluation: in_forward
                && (seen.forwards.has_backward && seen.evaluated.contains(root)
                    || seen.modes.is_evaluation(row.module, &replayed.symbols, |module| {
                        let class = replayed.replay.classes.of(module, &replayed.symbols);
                        class.is_some_and(|class| is_by_mode(&class))
                    })),
            evaluation_graph: EvaluationGraph::find(
                &blocks,
                row.step,
                &seen.calls,
                &seen.facts,
                facts.has_autograd,
                &replayed.symbols,
            )
            .filter(|graph| facts.is_material(graph.bytes)),
            unoptimized_graph: UnoptimizedGraph::find(
                &blocks,
                row.step,
                &seen.calls,
                &seen.facts,
                &seen.found,
                facts.has_autograd,
                &replayed.symbols,
            )
            .filter(|graph| facts.is_material(graph.bytes)),
            unused_gradients: UnusedGradients::find(&blocks, row.step, &seen.found, &replayed.symbols)
                .filter(|unused| facts.has_autograd && facts.is_material(unused.cost())),
            key_value_cache: KeyValueCache::of(
                live.iter().map(|block| (block.owner.category, block.bytes, block.dtype, block.shape)),
                &replayed.symbols,
            ),
            evaluates: of_model.evaluates,
            trained_root: trained_root.unwrap_or_default(),
            being_moved: being_moved.map(|(root, _)| root.to_owned()),
            untrained: if cause == Cause::TooBig && row.step >= 0 {
                let (calls, models) = (&seen.calls, &seen.facts);
                let symbols = &replayed.symbols;
                UntrainedModel::find(&blocks, &module, row.step, calls, models, symbols, |bytes| {
                    facts.is_material(bytes)
                })
            } else {
                Vec::new()
            },
            live: blocks,
            symbols: replayed.symbols.clone(),
            in_script: is_script(row, replayed) && row.step >= 0,
            phase: replayed.symbols.get(row.phase).to_string(),
            op: replayed.symbols.get(row.op).to_string(),
            module: module.to_string(),
            owner: format!(
                "{} in {}, {}, step {}",
                replayed.symbols.or_dash(row.op),
                replayed.symbols.or_dash(row.module),
                replayed.symbols.or_dash(row.phase),
                step_or_dash(row.step)
            ),
            lines: Stacks::read(trace).lines(row.stack_id).into_iter().map(str::to_owned).collect(),
            facts,
        }
    }

    /// Returns true if a lower peak would help.
    pub(super) fn is_need(&self) -> bool {
        self.cause.is_need()
    }

    /// Returns true if the program keeps memory that it does not need.
    pub(super) fn is_kept(&self) -> bool {
        matches!(self.cause, Cause::Grows | Cause::Kept)
    }

    /// Returns [`Facts::room`] as text. Without a sample of the device it is an upper bound, and the text
    /// says so.
    pub(super) fn room_text(&self, units: Unit) -> String {
        let most = if self.device_free.is_none() { "at most " } else { "" };
        format!("{most}{}", units.show(self.facts.room))
    }

    /// Returns the missing bytes if a real card might have had them. Its context may be smaller than the
    /// simulated one, and no fact shows that the rest of the step would not fit there. Otherwise returns
    /// `None`.
    fn lacking_inside_range(&self) -> Option<i64> {
        let (context, facts) = (self.context?, &self.facts);
        let lacking = facts.segment - facts.room;
        let range = context.here - context.least;
        let whole = facts.capacity + facts.short_of_whole_step();
        let is_inside = lacking > 0 && lacking <= range && whole <= facts.capacity + range;
        // Memory that grows or is kept would fill the larger card, too.
        let is_cause = !matches!(self.cause, Cause::Limit | Cause::Grows | Cause::Kept);
        (is_cause && is_inside).then_some(lacking)
    }

    /// Returns the bytes and the number of the tensors that the script has made outside of the model, since the first step, and
    /// still holds, if the request is for another one and they are a significant share of the card.
    pub(super) fn made_by_script(&self) -> Option<(i64, u64)> {
        let is_made = |(owner, _): &&(Owner, i64)| owner.category == Category::Script && owner.step >= 0;
        let made = || self.live.iter().filter(is_made).filter(|(_, bytes)| *bytes > SMALL_SIZE as i64);
        let bytes = made().map(|(_, bytes)| bytes).sum();
        (self.in_script && self.facts.is_material(bytes)).then_some((bytes, made().count() as u64))
    }

    /// Returns the largest buffer of a module, if it was made after the first step and is at least as large as
    /// all that the steps left behind.
    pub(super) fn grown_buffer(&self) -> Option<&(Owner, i64)> {
        let growth = self.facts.growth()?;
        let is_it = |(owner, bytes): &&(Owner, i64)| {
            owner.category == Category::Buffer && owner.step > 0 && *bytes >= growth.total
        };
        self.live.iter().filter(is_it).max_by_key(|(_, bytes)| *bytes)
    }

    /// Returns a holder of memory that is not needed, if the memory of another process is the cause. Letting go of
    /// it helps as much as the other process's end.
    pub(super) fn kept_beside(&self) -> Option<(&Holder, Kept)> {
        let is_enough = |(holder, _): &(&Holder, Kept)| holder.bytes >= self.facts.lacking();
        self.facts.kept().filter(|_| self.cause == Cause::OtherProcess).filter(is_enough)
    }

    /// Returns further findings from the figures, in addition to the verdict.
    fn remarks(&self, units: Unit) -> Vec<String> {
        let mut remarks = self.facts.remarks(self.cause, units);
        if self.cause != Cause::TooBig
            && let Some(needed) = self.facts.needed.filter(|needed| *needed > self.facts.capacity)
        {
            remarks.push(format!("the run needs {}, more than the card has", units.show(needed)));
        }
        if let Some((holder, why)) = self.kept_beside() {
            remarks.push(format!("{}: {}", holder.kept(units), remedy(why).0));
        }
        remarks.extend(late_buckets(&self.trace.meta, &self.live, &self.symbols, units));
        remarks
    }

    /// Returns the text after the name of the cause: the missing bytes, and the reason.
    pub(super) fn after_verdict(&self, units: Unit) -> String {
        let because = upper_first(&self.because(units));
        format!("{}. {because}.{}", self.missing(units), self.state_to_come(units))
    }

    /// Returns all remedies: those for the cause, then the changes of `memtrace advise`, then those whose use
    /// the trace cannot decide.
    pub(super) fn all_tries(&self, advised: &[FirstAdvice], units: Unit) -> Vec<String> {
        let mut all = self.tries(units);
        all.extend(advised.iter().map(|change| self.advised_line(change, units)));
        all.extend(self.tries_if());
        all
    }

    /// Prints the verdict, the remedies (`advised` has the changes of `memtrace advise`), and the figures.
    pub(super) fn print(&self, printer: &mut Printer, advised: &[FirstAdvice], options: &Options) {
        let units = options.units;
        let mut first = format!(" at {}", duration(self.row.ts_ns));
        let _ = write!(first, ", rank {}, device {}: {}", self.trace.meta.rank, self.row.device, self.owner);
        printer.line([Cell::new("out of memory", Style::Alarm), first.into()]);
        for line in self.lines.iter().take(LINES) {
            printer.plain(format!("  {line}"));
        }
        if self.ooms > 1 {
            printer.plain(format!("the last of {}", counted(self.ooms, "OOM")));
        }
        printer.gap();
        printer.line([
            "verdict: ".into(),
            Cell::new(self.cause.name(), Style::Strong),
            self.after_verdict(units).into(),
        ]);
        for remark in self.remarks(units) {
            printer.plain(format!("  also: {remark}"));
        }
        for difference in &self.differences {
            printer.plain(format!("        {}", difference.line(units)));
        }
        for advice in self.all_tries(advised, units) {
            printer.plain(format!("  try: {advice}"));
        }
        if let (Some(lacking), Some(context)) = (self.lacking_inside_range(), self.context) {
            printer.plain(format!(
                "uncertain: only {} were missing, and a real card's CUDA context takes {} to {} \
                 (simulated: {}), so the request may fit there",
                units.show(lacking),
                units.show(context.least),
                units.show(context.most),
                units.show(context.here)
            ));
        }
        printer.gap();
        let mut table = Table::new(&[("", Side::Right), ("", Side::Left)]);
        let mut line = |bytes: i64, what: String| {
            table.row([Cell::new(units.show(bytes).to_string(), Style::Strong), what.into()]);
        };
        let facts = &self.facts;
        let form =
            Form { dtype: &self.symbols.get(self.row.dtype), shape: &self.symbols.get(self.row.shape) };
        let for_form = match form.shape {
            UNKNOWN => String::new(),
            shape => format!(" for {} {shape}", form.dtype),
        };
        line(facts.request, format!("requested{for_form}; needs a segment of {}", units.show(facts.segment)));
        line(facts.allocated, "in blocks of torch's allocator".to_owned());
        let holes = self.holes.len();
        let largest = units.show(facts.largest_hole);
        line(
            facts.cached(),
            match holes {
                0 => "free in its cache, but in no piece that this request may use".to_owned(),
                1 => format!("free in its cache; the one piece that this request may use has {largest}"),
                _ => format!(
                    "free in its cache; of {holes} pieces that this request may use, the largest has {largest}"
                ),
            },
        );
        line(facts.outside, "outside torch's allocator, in traced calls".to_owned());
        if let Some(host) = facts.host {
            line(host, "of this process on the host, in the same memory".to_owned());
        }
        if facts.others > 0 {
            let who =
                if facts.host.is_some() { "of the system and other programs" } else { "of other processes" };
            line(facts.others, who.to_owned());
        }
        if facts.unknown > 0 {
            line(facts.unknown, "not traced: the CUDA context, code of libraries".to_owned());
        }
        match self.device_free {
            Some(free) => line(free, format!("free on the device, of {}", units.show(facts.capacity))),
            None if facts.capacity > 0 => {
                let most = format!(
                    "free on the device: {} of {}, not sampled",
                    self.room_text(units),
                    units.show(facts.capacity)
                );
                table.row([Cell::new("unknown", Style::Strong), most.into()]);
            }
            None => {}
        }
        printer.table(&table);
    }

    pub(super) fn json(&self, replayed: &Replayed) -> Value {
        let facts = &self.facts;
        let mut value = json!({
            "file": self.trace.path.display().to_string(),
            "rank": self.trace.meta.rank,
            "device": self.row.device,
            "seq": self.row.seq,
            "ts_ns": self.row.ts_ns,
            "ooms": self.ooms,
            "verdict": self.cause.name(),
            "injected": self.cause == Cause::Injected,
            "because": self.because(Unit::B),
            "remarks": self.remarks(Unit::B),
            "try": Value::from([self.tries(Unit::B), self.tries_if()].concat()),
            "differences": self.differences.iter().map(Difference::json).collect::<Vec<_>>(),
            "inside_range": self.lacking_inside_range().is_some(),
            "context_range_bytes": self.context.map(|context| [context.least, context.most]),
            "requested_bytes": self.row.requested_bytes,
            "rounded_bytes": self.row.rounded_bytes,
            "segment_bytes": facts.segment,
            "op": &*replayed.symbols.get(self.row.op),
            "module": &*replayed.symbols.get(self.row.module),
            "phase": &*replayed.symbols.get(self.row.phase),
            "step": self.row.step,
            "lines": self.lines,
            "allocated_bytes": facts.allocated,
            "reserved_bytes": facts.reserved,
            "cached_bytes": facts.cached(),
            "largest_hole_bytes": facts.largest_hole,
            "holes": self.holes.len(),
            "outside_bytes": facts.outside,
            "others_bytes": facts.others,
            "unaccounted_bytes": facts.unknown + facts.others,
            "device_free_bytes": self.device_free,
            "capacity_bytes": facts.capacity,
            "needed_bytes": facts.needed,
            "needs_at_least_bytes": facts.needs_at_least(),
            "estimated_bytes": (facts.to_come > 0).then(|| facts.needs_at_least() + facts.to_come),
            "growth_bytes_per_step": facts.growth().map(|growth| growth.per_step),
            "kept": self.kept.as_ref().map(|(holder, why)| json!({ "holder": holder.holder, "bytes": holder.bytes, "why": remedy(*why).0 })),
        });
        value["host_bytes"] = facts.host.into();
        value["dtype"] = replayed.symbols.get(self.row.dtype).as_ref().into();
        value["shape"] = replayed.symbols.get(self.row.shape).as_ref().into();
        value
    }
}
