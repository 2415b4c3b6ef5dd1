//! The remedies after an OOM, one line each: remedies for the cause, and for other findings in the figures.

use memtrace_trace::units::Unit;

use super::super::advised::FirstAdvice;
use super::attention::names_attention;
use super::case::{COPIES, OomCase};
use super::cause::Cause;
use super::eval_mode::EvaluationGraph;
use super::idle::UntrainedModel;
use super::kept::{Kept, is_of_forward};
use super::kept_remedies::{FAILED_ATTEMPT, remedy};
use super::model_growth::SMALLER_MODEL;
use super::unoptimized::UnoptimizedGraph;
use crate::render::numbers::counted;
use crate::state::retained::Holder;

/// Attention that writes its scores to memory runs ops with these texts in their names.
const SCORES: [&str; 6] = ["softmax", "bmm", "matmul", "masked_fill", "::where", "dropout"];
/// The size in bytes of the pages by which expandable segments of large blocks grow and shrink.
const PAGE: i64 = 20 << 20;
/// If a step moves at least this many tensors to the GPU, they are assumed to be a model.
const FEWEST_OF_MODEL: usize = 8;
/// The maximum number of models without training that remedies name.
const MOST_MODELS: usize = 2;
/// The text after a saving that may be less than the missing memory.
const UNSURE: &str = ", may not be enough alone";
/// The setting that lets the allocator return parts of its segments to the device.
const EXPANDABLE: &str = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True";
/// The remedy for an evaluation that keeps graphs, if it is unknown whether the program evaluates.
const EVALUATES: &str = "if this is an evaluation: torch.no_grad() or torch.inference_mode()";

impl OomCase<'_> {
    /// Returns the remedies, without the changes of `memtrace advise`.
    pub(super) fn tries(&self, units: Unit) -> Vec<String> {
        let facts = &self.facts;
        let mut all: Vec<String> = Vec::new();
        let mut add = |texts: &[&str]| all.extend(texts.iter().map(|text| (*text).to_owned()));
        match (self.cause, &self.kept) {
            (Cause::Injected, _) => add(&["nothing: the fault tests how the program recovers"]),
            (Cause::RequestTooLarge, _) if self.is_attention() => {}
            (Cause::RequestTooLarge, _) => {
                add(&["make the inputs of this op smaller, or split the work into parts"]);
            }
            (Cause::Limit, _) => {
                add(&["raise or remove the limit: torch.cuda.set_per_process_memory_fraction"])
            }
            (Cause::Grows | Cause::Kept, Some((holder, why))) => {
                if holder.graphs > 0 && !facts.has_backward && *why == Kept::Grows {
                    add(&[
                        "torch.no_grad() or torch.inference_mode() around this loop: it keeps graphs for a backward, but no backward has run",
                    ]);
                }
                if *why == Kept::Graphs && self.evaluates && !facts.has_backward {
                    add(&[
                        "torch.no_grad() or torch.inference_mode() around this loop: the model runs in evaluation mode (model.eval()), and no \
                         backward has run",
                    ]);
                } else {
                    add(remedy(*why).1);
                }
            }
            (Cause::Grows, None) if facts.has_model_grown() => add(&[SMALLER_MODEL]),
            (Cause::Grows, None) if facts.growth().is_none() => add(remedy(Kept::Copies).1),
            (Cause::Grows, None) => {
                if facts.states.is_some() {
                    add(&[
                        "create the optimizer once, or del the old one with all that refers to it (a list, a scheduler, a closure) before \
                         the next",
                    ]);
                }
                if self.grown_buffer().is_some() {
                    add(&[
                        "a fixed size for the buffer, whose oldest rows each step overwrites (or self.bank[-4096:] after torch.cat): \
                         joining new rows to all old ones copies them in each step, and both copies are live meanwhile",
                    ]);
                }
                add(&[
                    "memtrace leaks shows the ops and lines whose memory grows; memtrace leaks --holders \
                     shows the objects that keep it",
                ]);
            }
            (Cause::HostMemory, _) => add(&[
                "avoid copies on the host, which shares the memory: load weights straight to the device, use fewer workers (offloading frees nothing); memtrace ledger --host names the holders",
            ]),
            (Cause::OtherProcess, _) if facts.host.is_some() => {
                add(&["end other programs: each takes memory that the device shares"])
            }
            (Cause::OtherProcess, _) => add(&[self.neighbours.as_ref().map_or(
                "end the other process (nvidia-smi lists them), or choose another GPU: CUDA_VISIBLE_DEVICES",
                |others| others.remedy,
            )]),
            (Cause::Fragmentation, _) => add(self.against_holes()),
            (Cause::OutsideTorch, _) => add(&[
                "look for libraries beside torch (NCCL, a second framework, plain cudaMalloc): memtrace peak --of used",
            ]),
            (Cause::Kept, None) => add(&FAILED_ATTEMPT),
            (Cause::TooBig, _) => {}
        }
        if let Some((_, why)) = self.kept_beside() {
            all.extend(remedy(why).1.iter().map(|text| (*text).to_owned()));
        }
        if matches!(self.cause, Cause::TooBig | Cause::RequestTooLarge) {
            all.extend(self.against_need(units));
        }
        all
    }

    /// Returns the remedies that close holes or prevent them.
    fn against_holes(&self) -> &'static [&'static str] {
        if self.facts.is_private() {
            &[
                "let graphs share one pool: torch.cuda.graph(g, pool=first.pool()); del a graph or a pool that is no longer used",
            ]
        } else if self.has_expandable() {
            &[
                "free the blocks that pin segments: memtrace frag names them",
                "pad inputs to a few lengths, so that sizes repeat",
            ]
        } else if self.can_expand() {
            &[EXPANDABLE, "free the blocks that pin segments: memtrace frag names them"]
        } else {
            &[
                "free the blocks that pin segments (memtrace frag names them), or allocate them first, as one tensor",
                "expandable_segments:True may not help, because nearly every 20 MiB holds a live block: memtrace tune replays it",
            ]
        }
    }

    /// Returns true if expandable segments are on.
    fn has_expandable(&self) -> bool {
        self.trace.meta.allocator.option("expandable_segments") == Some("True")
    }

    /// Returns true if expandable segments would make room for the request. They can return each whole page of
    /// a hole to the device, but not a page with a live block.
    fn can_expand(&self) -> bool {
        let pages: i64 = self.holes.iter().map(|hole| hole / PAGE * PAGE).sum();
        pages + self.facts.room >= self.facts.request
    }

    /// Returns the remedies for a program that is too big, depending on its figures.
    fn against_need(&self, units: Unit) -> Vec<String> {
        let facts = &self.facts;
        let show = |bytes: i64| units.show(bytes).to_string();
        let mut all = Vec::new();
        if self.is_evaluation && facts.has_autograd && facts.is_material(facts.activations) {
            all.push(format!(
                "torch.no_grad() around this forward: it runs in evaluation mode (model.eval()), in which nothing is trained, and keeps a \
                 graph for a backward: {} of activations",
                show(facts.activations)
            ));
        } else if let Some(EvaluationGraph { root, bytes }) = &self.evaluation_graph {
            all.push(format!(
                "torch.no_grad() around the forward of {root}, if nothing trains through it: it runs in evaluation mode (model.eval()) and \
                 keeps a graph for a backward: {} of activations",
                show(*bytes)
            ));
        } else if let Some(UnoptimizedGraph { path, bytes }) = &self.unoptimized_graph {
            all.push(format!(
                "torch.no_grad() around the forward of {path}, if nothing trains through it: no optimizer has its parameters, and it keeps \
                 a graph for a backward: {} of activations{}",
                show(*bytes),
                if self.is_too_little(*bytes) { UNSURE } else { "" }
            ));
        } else if self.may_evaluate() && facts.is_larger_than_before() && self.evaluates {
            all.push(EVALUATES.to_owned());
        }
        if let Some(unused) = &self.unused_gradients {
            let unsure = if self.is_too_little(unused.bytes) { UNSURE } else { "" };
            all.push(unused.line(units, unsure));
        }
        // A server sets its pool aside, and a forward in training keeps its keys and values for the backward.
        if facts.is_material(self.key_value_cache.bytes) && self.server.is_none() && !facts.has_autograd {
            all.push(self.key_value_cache.line(units));
        }
        all.extend(self.untrained.iter().take(MOST_MODELS).filter_map(|model| self.without(model, units)));
        if let Some(gathered) = facts.gathered_by_forward() {
            all.push(format!(
                "do without the results that this forward gathers, if they are not used (output_attentions=False, output_hidden_states=False \
                 in transformers): {}; checkpoints do not free them, and a variable that keeps them during the next forward doubles them",
                gathered.line(units)
            ));
        }
        if self.is_attention() {
            let takes = if self.scores > 0 {
                format!(": they take {} now", show(self.scores))
            } else {
                String::new()
            };
            let unsure = if self.is_too_little(self.scores) { UNSURE } else { "" };
            all.push(format!(
                "torch.nn.functional.scaled_dot_product_attention (attn_implementation=\"sdpa\" in transformers, need_weights=False for nn.MultiheadAttention), which never \
                 holds all scores at once{takes}{unsure}"
            ));
        }
        if 4 * facts.recomputed >= facts.allocated.max(1) {
            all.push(
                "checkpoint each layer by itself: a checkpoint around several recomputes all of them at once"
                    .to_owned(),
            );
        }
        if let Some(gathered) = facts.whole_gather(self.trace.meta.world_size) {
            all.push(format!(
                "fully_shard(layer) for each layer before fully_shard(model), or FullyShardedDataParallel's auto_wrap_policy: all \
                 parameters are gathered at once now, {}",
                show(gathered)
            ));
        }
        if let Some((gathered, modules)) = facts.gathered_together() {
            all.push(format!(
                "reshard_after_forward=True for fully_shard(layer) (FullyShardedDataParallel: ShardingStrategy.FULL_SHARD): the whole \
                 parameters of {modules} modules are live at once now, {}{}",
                show(gathered),
                if self.is_too_little(gathered / modules as i64 * (modules as i64 - 2)) { UNSURE } else { "" }
            ));
        }
        // If the root alone is sharded, all gradients are whole until its backward ends.
        let is_by_design =
            facts.whole_gather(self.trace.meta.world_size).is_some() && self.phase != "forward";
        if let Some((bytes, modules)) = facts.unreduced_together().filter(|_| !is_by_design) {
            all.push(format!(
                "reduce the gradients in each backward, without no_sync() (fully_shard: set_requires_gradient_sync(True); accelerate: \
                 GradientAccumulationPlugin(sync_each_batch=True)): the whole gradients of {modules} modules are live at once now, {}",
                show(bytes)
            ));
        }
        if let Some(held) = self.graph_of_other().filter(|_| self.evaluation_graph.is_none()) {
            all.push(format!(
                "torch.no_grad() around the model of {}, if nothing trains through it: its graph takes {}",
                held.holder,
                show(held.bytes)
            ));
        }
        if facts.is_material(self.logits) {
            all.push(format!(
                "head and loss on 1/8 of the tokens at a time, checkpointed ({}): the logits and their \
                 copies take {} now",
                code_of("--chunk-loss 8"),
                show(self.logits)
            ));
        }
        if facts.is_material(facts.step_temporaries) {
            // While the optimizer still allocates state, the temporary results are still to come, so add them
            // to the need.
            let whole = facts.needs_at_least() + facts.to_come + facts.step_temporaries;
            let is_short = facts.to_come > 0 && facts.step_temporaries < (whole - facts.capacity) / 4 * 5;
            all.push(format!(
                "fused=True for torch's Adam, AdamW, SGD or Adagrad, whose step then needs no temporary results for all \
                 parameters: about {}{}",
                show(facts.step_temporaries),
                if is_short { UNSURE } else { "" }
            ));
        }
        if let Some(server) = self.server {
            all.extend(server.smaller_trial());
            all.extend(server.less_cache(facts.lacking(), facts.capacity));
        }
        if let Some(data) = self.data() {
            all.push(format!(
                "keep it on the CPU if it is data, and copy one batch at a time (.cuda() in the loop; a queue of batches needs a maxsize): {}",
                data.line(units)
            ));
        }
        if let Some((bytes, count)) = self.made_by_script() {
            all.push(format!(
                "keep on the CPU what the script makes outside of the model, such as its outputs (torch.zeros(..., device=\"cpu\"), \
                 .cpu(); device=\"cpu\" for MONAI's sliding_window_inference), or give it a smaller type: {} in {} now",
                units.show(bytes),
                counted(count, "tensor")
            ));
        }
        if facts.larger_step().is_some() && !self.is_loading() {
            all.push("a limit for the inputs of such a step: crop, split or skip them".to_owned());
        }
        all
    }

    /// Returns the remedy for a model that this step does not train.
    fn without(&self, model: &UntrainedModel, units: Unit) -> Option<String> {
        let UntrainedModel { root, bytes, .. } = model;
        // The size of the parameters is known exactly, so a saving of twice the missing memory is enough.
        // Other changes must save at least `least_saving`.
        let least = 2 * self.facts.short_of_whole_step();
        let unsure = |saved: i64| if self.is_rest_unknown() || saved < least { UNSURE } else { "" };
        if !model.is_called {
            let last = match model.last_step {
                Some(last) if last >= 0 => {
                    format!("was called last in step {last}, and this is step {}", self.row.step)
                }
                Some(_) => "was called only before training".to_owned(),
                None => "was not called so far".to_owned(),
            };
            return Some(format!(
                "del {root} if it is done, or keep it on the CPU while it is not called: it {last}, and its parameters take {}{}",
                units.show(*bytes),
                unsure(*bytes)
            ));
        }
        (!model.is_half).then(|| {
            format!(
                "{root}.bfloat16(), because it is not trained: its parameters take {}, and then half of that{}; or del {root}, \
                 if it is done",
                units.show(*bytes),
                unsure(bytes / 2)
            )
        })
    }

    /// Returns the remedies whose use the trace cannot decide: for a program that only evaluates, for a model
    /// that is no longer needed, and a way to measure the whole need.
    pub(super) fn tries_if(&self) -> Vec<String> {
        let mut all = Vec::new();
        let is_named = self.is_evaluation || self.evaluation_graph.is_some();
        // A model in training mode may be evaluated, too, but a long input is more common.
        if self.may_evaluate() && !is_named && !(self.facts.is_larger_than_before() && self.evaluates) {
            all.push(EVALUATES.to_owned());
        }
        if self.is_loading() && self.untrained.is_empty() {
            all.push(
                "if a model that ran before is no longer needed: del it, with all that refers to it, before the next one is \
                 moved to the GPU"
                    .to_owned(),
            );
        }
        let are_holes_large = self.facts.is_rest_open() && self.facts.is_material(self.facts.cached());
        if self.cause == Cause::TooBig && are_holes_large && !self.has_expandable() && self.can_expand() {
            all.push(format!("{EXPANDABLE} makes room for this request{UNSURE}"));
        }
        if self.cause == Cause::TooBig && self.facts.needed.is_none() {
            all.push(
                "if none of these is enough: memtrace run --past-oom --phantom CARD measures what the whole run needs; \
                 memtrace advise --fit SIZE then combines changes"
                    .to_owned(),
            );
        }
        all
    }

    /// Returns true if the request may be of an evaluation: no backward has run yet, or the step is larger
    /// than earlier ones, so that it may do another kind of work.
    fn may_evaluate(&self) -> bool {
        let is_need = matches!(self.cause, Cause::TooBig | Cause::RequestTooLarge);
        // An optimizer that waits for its first step shows that the program trains.
        let is_training = self.facts.of_optimizer.class.is_some() && !self.evaluates;
        let may = self.is_untrained && !is_training
            || self.phase == "forward" && self.facts.is_larger_than_before();
        is_need && may && self.facts.has_autograd && self.graph_of_other().is_none()
    }

    /// Returns true if a program that has already run steps moves as many tensors to the GPU as a model has,
    /// outside of modules.
    fn is_loading(&self) -> bool {
        self.cause == Cause::TooBig
            && COPIES.contains(&&*self.op)
            && self.in_script
            && self.phase != "optimizer"
            && self.facts.copied >= FEWEST_OF_MODEL
    }

    /// Returns true if scores of attention take a significant share of the card, or the request is for them.
    fn is_attention(&self) -> bool {
        let is_named =
            || names_attention(&self.module) || self.lines.iter().any(|line| names_attention(line));
        let is_request =
            SCORES.iter().any(|part| self.op.contains(part)) && !self.has_fused_attention && is_named();
        self.facts.is_material(self.scores) || is_request
    }

    /// Returns a variable of the script that holds a large graph, if no backward has run yet, the request is
    /// in a forward, and more than one root module was called. The graph probably belongs to another model.
    fn graph_of_other(&self) -> Option<&Holder> {
        let is_it = |holder: &&Holder| {
            holder.graphs > 0
                && self.facts.is_material(holder.bytes)
                && !is_of_forward(holder)
                && ["local", "global"].contains(&holder.text("kind"))
        };
        self.facts.holders.iter().find(is_it).filter(|_| self.is_untrained && self.facts.roots > 1)
    }

    /// Returns a variable with one or a few large tensors from before training that are not a copy of the
    /// parameters, or with many tensors that are far larger than a copy.
    fn data(&self) -> Option<&Holder> {
        let is_it = |holder: &&Holder| {
            let least = if holder.tensors < 8 { self.facts.parameters } else { 2 * self.facts.parameters };
            holder.graphs == 0
                && holder.last_step.is_some_and(|last| last < 0)
                && holder.tensors > 0
                && self.facts.is_material(holder.bytes)
                && holder.bytes > least
                && !is_of_forward(holder)
        };
        self.facts.holders.iter().find(is_it)
    }

    /// Returns true if the memory of the rest of this forward cannot be estimated, because no step has ended
    /// and no repeated layers are left.
    fn is_rest_unknown(&self) -> bool {
        let facts = &self.facts;
        // Without a graph, a layer keeps nothing, so it cannot predict the next layer.
        let is_estimated = facts.to_come > 0 && facts.has_autograd;
        facts.steps.is_empty() && !is_estimated && !["backward", "optimizer"].contains(&&*self.phase)
    }

    /// Returns the bytes that a change must save so that the rest of the step certainly fits. In a step
    /// larger than earlier ones this is half of the held memory, in the optimizer's step (which comes last) a
    /// quarter, and in any other step two fifths. These shares were chosen with the programs of `tests/oom`.
    fn least_saving(&self) -> i64 {
        let facts = &self.facts;
        if facts.is_larger_than_before() {
            (facts.allocated + facts.request) / 2
        } else if self.phase == "optimizer" {
            facts.allocated / 4
        } else {
            facts.allocated / 5 * 2
        }
    }

    /// Returns true if a change that saves this many bytes may be too little.
    fn is_too_little(&self, saved: i64) -> bool {
        self.is_too_little_with(saved, saved)
    }

    /// Returns true if a change may be too little that saves `saved` bytes of the held memory, and `in_all`
    /// bytes with the memory that was not yet allocated.
    fn is_too_little_with(&self, saved: i64, in_all: i64) -> bool {
        let short = self.facts.short_of_whole_step();
        self.is_rest_unknown() || in_all < short / 4 * 5 || saved < self.least_saving()
    }

    /// Returns the change as it applies to this case, or `None` if it saves nothing here: a checkpoint of a
    /// forward without a graph, which keeps no results. A checkpoint does not free what the forward gathers
    /// for its output.
    pub(super) fn suited(&self, mut advice: FirstAdvice) -> Option<FirstAdvice> {
        if !advice.option.starts_with("--checkpoint") {
            return Some(advice);
        }
        let is_without_graph = self.phase == "forward" && !self.facts.has_autograd;
        advice.saved -= self.facts.gathered_by_forward().map_or(0, |holder| holder.bytes);
        (!is_without_graph && advice.saved > 0).then_some(advice)
    }

    /// Returns the line for a change of `memtrace advise`, with the bytes that it saves here.
    pub(super) fn advised_line(&self, advice: &FirstAdvice, units: Unit) -> String {
        let facts = &self.facts;
        let least = if advice.is_least { "at least " } else { "" };
        let saved = advice.saved.saturating_add(self.saved_of_rest(advice));
        let is_of_batch = !advice.option.starts_with("--batch") || facts.larger_step().is_none();
        // What such a step allocates outside of the model does not follow the model's types.
        let is_of_types = ["--dtype", "--autocast"].iter().any(|one| advice.option.starts_with(one));
        let is_outside = is_of_types && self.in_script && facts.larger_step().is_some();
        let enough = match facts.needed.filter(|needed| *needed > facts.capacity) {
            Some(_) if saved < facts.short() => ", not enough alone",
            None if !is_of_batch => {
                ", may not be enough alone: this step's extra memory may not depend on the batch"
            }
            None if is_outside => {
                ", may not be enough alone: this step's extra memory is outside of the model"
            }
            None if self.is_too_little_with(advice.saved, saved - self.to_come_with_checkpoints(advice)) => {
                UNSURE
            }
            None if facts.needs_by_update() > facts.capacity && is_without_update(&advice.option) => UNSURE,
            Some(_) => ", enough",
            None => ", likely enough",
        };
        // A measured need says how much a whole run saves, so nothing is added.
        let bytes = if saved - advice.saved >= advice.saved / 10 && facts.needed.is_none() {
            format!(
                "about {} of a whole step ({least}{} of what is allocated now)",
                units.show(saved),
                units.show(advice.saved)
            )
        } else {
            format!("{least}{}", units.show(advice.saved))
        };
        let costs = if advice.option.starts_with("--batch") && !facts.has_autograd && !facts.has_backward {
            "more calls"
        } else {
            &advice.costs
        };
        format!("{} ({}): saves {bytes}{enough}; costs: {costs}", advice.phrase, code_of(&advice.option))
    }

    /// Returns the bytes that the backward needs beside the second forward of a checkpointed module, if the trace
    /// has no backward: at least the gradient of the largest result.
    fn to_come_with_checkpoints(&self, advice: &FirstAdvice) -> i64 {
        let is_unknown = advice.option.starts_with("--checkpoint") && !self.facts.has_backward;
        if is_unknown { self.facts.largest_result } else { 0 }
    }

    /// Returns an estimate of the bytes that a change of `memtrace advise` saves of the memory that the step
    /// has yet to allocate.
    fn saved_of_rest(&self, advice: &FirstAdvice) -> i64 {
        let facts = &self.facts;
        let state = facts.state_to_come + facts.of_optimizer.bytes;
        let (of_state, of_temporaries) = match &*advice.option {
            // The optimizer has as much state as before, but steps one parameter at a time.
            "--optimizer in-backward" => (0, facts.temporaries_to_come),
            "--optimizer 8bit" => (state / 4 * 3, facts.temporaries_to_come),
            option if option.starts_with("--optimizer") || option.starts_with("--offload") => {
                (state, facts.temporaries_to_come)
            }
            option if option.starts_with("--dtype") => {
                ((state + facts.parameters_to_come) / 2, facts.temporaries_to_come / 2)
            }
            _ => (0, 0),
        };
        // The layers that were not reached are assumed to shrink by the same factor as the activations so far.
        let is_of_layers = ["--checkpoint", "--batch", "--dtype", "--autocast"]
            .iter()
            .any(|one| advice.option.starts_with(one));
        let rest = facts.to_come - facts.state_to_come - facts.parameters_to_come;
        let layers = if is_of_layers { rest } else { 0 };
        let now = facts.activations.max(1);
        let of_layers = (i128::from(layers) * i128::from(advice.saved.min(now)) / i128::from(now)) as i64;
        of_layers + of_state + of_temporaries
    }
}

/// Returns true for a change that leaves the memory of the optimizer's step as it is.
fn is_without_update(option: &str) -> bool {
    ["--checkpoint", "--batch", "--autocast", "--chunk-loss"].iter().any(|one| option.starts_with(one))
}

/// Returns the command that shows the code of a change, for the line of the change.
fn code_of(option: &str) -> String {
    format!("code: memtrace advise {option} TRACE")
}
