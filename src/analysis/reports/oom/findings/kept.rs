//! A holder that keeps memory that the program does not need at this moment, and why.

use memtrace_trace::Verdict;
use memtrace_trace::units::Unit;

use super::super::evidence::Evidence;
use super::super::finding::{Blame, Cause, Help, KEPT, OomCase};
use super::super::kept_reasons::{Kept, words};
use super::super::limits::MATERIAL;
use super::super::retained_holders::{FEWEST_GATHERED, is_of_forward, is_of_state_dict};
use super::copies::FEWEST_OF_STATE;
use super::fragmentation::is_fragmented;
use super::running_forward::is_of_running_forward;
use super::{growth, other_process};
use crate::state::retained::Holder;

/// If the free memory in the allocator's cache is at least this share of the card, fragmentation is preferred
/// to a doubtful holder as the cause.
const LARGE: f64 = 0.15;

/// The maximum number of ordinary forwards of the root module without a backward: two are common (an
/// adversarial or contrastive loss), three are a loop.
const MOST_FORWARDS: u64 = 2;
/// The ends of the files in which `torch.load` holds tensors while it reads a checkpoint.
const UNPICKLERS: [&str; 2] = ["_weights_only_unpickler.py", "torch/serialization.py"];
/// The names under which IPython keeps the results of cells, without `_`, which scripts use, too.
const SHELL_NAMES: [&str; 4] = ["__", "___", "Out", "_oh"];

/// An optimizer that keeps the parameters of a model that is gone.
pub(super) static UNUSED: Cause = Cause {
    find: |evidence| {
        let found = evidence.kept().filter(|(holder, _)| holder.bytes >= evidence.lacking())?;
        let cause = if found.0.verdict == Some(Verdict::Grows) { &growth::CAUSE } else { &CAUSE };
        (found.1 == Kept::Unused).then(|| Blame::on(cause, found))
    },
    ..Cause::DEFAULT
};

pub(super) static CAUSE: Cause = Cause {
    verdict: KEPT,
    find: |evidence| {
        // A list may gather the results that the program exists to produce, so such a holder is doubtful.
        // Large holes are useless without doubt, but with a holder of more memory they are not the main cause.
        let holes = evidence.torch.cached();
        let is_doubtful = |(holder, why): (&Holder, Kept)| {
            matches!(why, Kept::Gathered | Kept::EarlierResult) && holder.bytes <= holes
        };
        let are_holes_large =
            is_fragmented(evidence) && holes as f64 >= LARGE * evidence.device.capacity as f64;
        let kept = evidence.kept().filter(|found| !(are_holes_large && is_doubtful(*found)));
        kept.map(|found| Blame::on(&CAUSE, found))
    },
    because: |case, units| {
        let Some((holder, why)) = &case.blame.kept else { return String::new() };
        let beside = if *why == Kept::Loaded {
            let parameters = units.show(case.evidence.live.parameters);
            format!(", and the parameters themselves take {parameters}")
        } else {
            String::new()
        };
        format!("{}: {}{beside}", holder.line(units), words(*why).because)
    },
    tries: |case| match case.blame.kept.as_ref().map(|(_, why)| *why) {
        Some(Kept::Graphs) if case.oom_state.evaluates() && !case.evidence.forwards.has_backward => vec![
            "torch.no_grad() or torch.inference_mode() around this loop: the model runs in evaluation mode (model.eval()), and no \
             backward has run",
        ],
        why => why.map(|why| words(why).tries.to_vec()).unwrap_or_default(),
    },
    help: Help::FreeKept,
    ..Cause::DEFAULT
};

/// Returns a holder of memory that is not needed, if the memory of another process is the cause. Letting go of
/// it helps as much as the other process's end.
fn beside<'a>(case: &'a OomCase<'_>) -> Option<(&'a Holder, Kept)> {
    let is_enough = |(holder, _): &(&Holder, Kept)| holder.bytes >= case.evidence.lacking();
    case.evidence.kept().filter(|_| case.is_caused_by(&other_process::CAUSE)).filter(is_enough)
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    beside(case).map(|(holder, why)| format!("{}: {}", holder.kept(units), words(why).because))
}

/// Returns the remedies for the holder that [`remark`] names.
pub(super) fn tries_beside(case: &OomCase<'_>) -> &'static [&'static str] {
    beside(case).map_or(&[], |(_, why)| words(why).tries)
}

impl Evidence {
    /// Returns the largest holder of memory that the program does not need now, and the reason. A traceback
    /// comes before all others.
    pub(super) fn kept(&self) -> Option<(&Holder, Kept)> {
        let live = self.torch.allocated.max(1);
        let material = self.holders.iter().filter(|holder| holder.bytes as f64 >= MATERIAL * live as f64);
        let found = material.filter_map(|holder| Some((holder, self.why_kept(holder)?)));
        // A traceback comes first: it holds the memory of a failed attempt, and the retry can succeed only
        // once this memory is freed.
        found.max_by_key(|(holder, why)| (*why == Kept::Traceback, holder.bytes))
    }

    /// Returns the reason why a holder keeps memory that the program does not need now, or `None` if it needs it.
    pub(super) fn why_kept(&self, holder: &Holder) -> Option<Kept> {
        let text = |name: &str| holder.text(name);
        if text("kind") == "traceback" || holder.verdict == Some(Verdict::Traceback) {
            return Some(Kept::Traceback);
        }
        if text("kind") == "unused" {
            return Some(Kept::Unused);
        }
        if UNPICKLERS.iter().any(|file| text("file").ends_with(file)) {
            return (self.request.step < 0).then_some(Kept::Loading);
        }
        // A search for holders leaves out the parameters themselves. So tensors that torch's `state_dict`
        // functions hold are the gathered state of a sharded model, which torch makes to save it.
        if is_of_state_dict(holder) && holder.graphs == 0 && holder.tensors >= FEWEST_GATHERED {
            return Some(Kept::FullState);
        }
        if is_of_forward(holder) || !text("needed_by").is_empty() {
            return None;
        }
        if is_of_shell(holder) {
            return Some(Kept::ShellHistory);
        }
        if holder.verdict == Some(Verdict::Grows) {
            return Some(Kept::Grows);
        }
        let steps = (holder.first_step?, holder.last_step?);
        if holder.graphs > 0 {
            self.why_graph_is_kept(holder, steps.1)
        } else if steps.1 < 0 && self.request.step >= 0 {
            self.is_second_copy(holder).then_some(Kept::Loaded)
        } else {
            self.why_result_is_kept(holder, steps)
        }
    }

    /// Returns the reason why the graph of a forward in the step `last` is kept, or `None` if a backward needs it.
    fn why_graph_is_kept(&self, holder: &Holder, last: i64) -> Option<Kept> {
        // In a script without modules, the first step begins after its forward. So the graph of its
        // forward has step -1, and is needed in step 0.
        if self.request.step > last && (last >= 0 || self.request.step > 0) {
            return (!self.steps.continued.contains(&last)).then_some(Kept::EarlierGraph);
        }
        // The backward of the last forward needs one graph. So there must be more forwards than usual,
        // and the earlier forwards must have left memory.
        let is_of_several =
            self.forwards.count > self.most_forwards() && 3 * self.forwards.left >= holder.bytes;
        let most = 2 * holder.bytes > self.live.activations;
        (holder.graphs >= FEWEST_GATHERED || is_of_several && most).then_some(Kept::Graphs)
    }

    /// Returns true if tensors from before training are a second copy of the weights. A data set on the GPU has one
    /// or two tensors, but a copy has many. A name with a dot belongs to an attribute of an object, such as averaged
    /// weights that each step uses.
    fn is_second_copy(&self, holder: &Holder) -> bool {
        holder.tensors >= FEWEST_OF_STATE
            && self.live.parameters > 0
            && 4 * holder.bytes >= 3 * self.live.parameters
            && !holder.text("name").contains('.')
    }

    /// Returns the reason why results of the steps `first` to `last` are kept, or `None` if they are needed.
    fn why_result_is_kept(&self, holder: &Holder, (first, last): (i64, i64)) -> Option<Kept> {
        if 2 * self.live.kv_cache.max(self.live.inputs) >= holder.bytes {
            return None;
        }
        // Results to join come from several forwards since the last backward.
        let are_several = self.forwards.count > 1 || !self.forwards.has_backward;
        if self.request.is_join
            && are_several
            && 3 * holder.bytes >= 2 * self.request.bytes
            && holder.bytes <= self.request.bytes
        {
            return Some(Kept::Joined);
        }
        if is_of_running_forward(self, holder) {
            return None;
        }
        if holder.tensors >= FEWEST_GATHERED {
            if self.holders.iter().any(is_of_state_dict) {
                return Some(Kept::FullState);
            }
            // A running call of a library may hold memory that no variable refers to, such as the backward of
            // a checkpoint.
            let is_of_call = holder.text("kind") == "unnamed" && last >= self.request.step;
            return (!is_of_call).then_some(Kept::Gathered);
        }
        let is_enough = holder.bytes >= self.lacking() && self.larger_step().is_none();
        (first >= 0 && last < self.request.step && is_enough).then_some(Kept::EarlierResult)
    }

    /// Returns the maximum number of forwards of a root module without a backward that is ordinary. More
    /// forwards are a loop over a data set.
    fn most_forwards(&self) -> u64 {
        // If the program so far had one forward per backward, it needs no second graph.
        if self.forwards.usual == 1 { 1 } else { MOST_FORWARDS }
    }
}

/// Returns true if a holder is the shell's own name for the result of an earlier cell: `_`, `__`, `___`, `_7`, `Out`.
fn is_of_shell(holder: &Holder) -> bool {
    let name = holder.text("name");
    let name = name.trim_start_matches("['").split(['\'', '[', '.']).next().unwrap_or_default();
    let is_global = ["global", "namespace"].contains(&holder.text("kind"));
    let is_number = |rest: &str| rest.bytes().all(|byte| byte.is_ascii_digit());
    let is_of_cell = ["<ipython", "ipykernel"].iter().any(|part| holder.text("file").contains(part));
    let is_short = name.strip_prefix('_').is_some_and(is_number) && is_of_cell;
    is_global && (is_short || SHELL_NAMES.contains(&name))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::super::super::test_evidence::{GIB, MIB, full, holder};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;

    #[test]
    fn oom_blames_no_variable_that_the_program_needs() {
        let why = |facts: &Evidence, fields: serde_json::Value| facts.why_kept(&holder(fields));
        let facts = full().with(|e| e.request.step = 3);
        // Needed, so not kept: the activations of the running forward, a batch, the cache of a decoder, a
        // data set, and averaged weights.
        let forward = json!({ "owner": "Net.forward", "graphs": 1, "first_step": 3, "last_step": 3 });
        assert_eq!(why(&facts, forward), None);
        let now = |tensors: i64| json!({ "tensors": tensors, "first_step": 3, "last_step": 3 });
        assert_eq!(why(&facts.with(|e| e.live.inputs = 6 * GIB), now(4)), None);
        assert_eq!(why(&facts.with(|e| e.live.kv_cache = 6 * GIB), now(64)), None);
        let before = |name: &str, tensors: i64| json!({ "name": name, "tensors": tensors, "first_step": -1, "last_step": -1, "kind": "global" });
        assert_eq!(why(&facts, before("data", 2)), None);
        assert_eq!(why(&facts, before("ema.shadow", 100)), None);
        assert_eq!(why(&facts, before("checkpoint['model']", 100)), Some(Kept::Loaded));
        assert_eq!(why(&facts, now(4)), Some(Kept::Gathered));
        // The buffers of captured graphs, in a list beside the graphs.
        let graphs = json!({ "tensors": 4, "first_step": 3, "last_step": 3, "needed_by": "a CUDA graph" });
        assert_eq!(why(&facts, graphs), None);
        // Kept without need: a checkpoint that torch.load has read before training, and the full state of a
        // sharded model.
        let loads = |file: &str| json!({ "tensors": 24, "first_step": -1, "last_step": -1, "file": file, "owner": "Unpickler.load" });
        let before = full().with(|e| e.request.step = -1);
        assert_eq!(why(&before, loads("torch/_weights_only_unpickler.py")), Some(Kept::Loading));
        assert_eq!(why(&facts, loads("torch/_weights_only_unpickler.py")), None);
        let saves = holder(json!({ "file": "torch/distributed/checkpoint/state_dict.py" }));
        assert_eq!(why(&facts.with(|e| e.holders = vec![saves]), now(24)), Some(Kept::FullState));
        let hook = json!({ "tensors": 88, "file": "/lib/torch/distributed/fsdp/_state_dict_utils.py" });
        assert_eq!(why(&facts, hook), Some(Kept::FullState));
        let script = json!({ "tensors": 88, "file": "/home/me/convert_state_dict.py" });
        assert_ne!(why(&facts, script), Some(Kept::FullState));
        // Two forwards before a backward are common: their graph is needed. After eight forwards, it is a
        // loop that keeps graphs.
        let graph = || json!({ "graphs": 1, "bytes": 12 * GIB, "first_step": 3, "last_step": 3 });
        assert_eq!(why(&facts.with(|e| e.forwards.count = 2), graph()), None);
        let eight = facts.with(|e| {
            e.forwards.count = 8;
            e.forwards.left = 11 * GIB;
        });
        assert_eq!(why(&eight, graph()), Some(Kept::Graphs));
        // The earlier forwards left no memory, so they were evaluations: the graph is needed.
        assert_eq!(why(&eight.with(|e| e.forwards.left = 0), graph()), None);
        // If earlier steps had one forward per backward, the second graph is not needed. If they had two, it
        // is needed.
        let second = facts.with(|e| {
            e.forwards.count = 2;
            e.forwards.usual = 1;
            e.forwards.left = 12 * GIB;
        });
        assert_eq!(why(&second, graph()), Some(Kept::Graphs));
        assert_eq!(why(&second.with(|e| e.forwards.usual = 2), graph()), None);
        let earlier = || json!({ "graphs": 1, "first_step": 2, "last_step": 2 });
        assert_eq!(why(&facts, earlier()), Some(Kept::EarlierGraph));
        // Another optimizer's step came between the forward of a generator and its backward.
        let continued = facts.with(|e| e.steps.continued = BTreeSet::from([2]));
        assert_eq!(why(&continued, earlier()), None);
        // The graph of a forward before the first step is needed in step 0. In step 1, it is kept without
        // need.
        let first = || json!({ "graphs": 1, "first_step": -1, "last_step": -1 });
        assert_eq!(why(&facts.with(|e| e.request.step = 0), first()), None);
        assert_eq!(why(&facts.with(|e| e.request.step = 1), first()), Some(Kept::EarlierGraph));
        assert_eq!(why(&facts, json!({ "kind": "traceback" })), Some(Kept::Traceback));
    }

    #[test]
    fn oom_blames_an_optimizer_that_keeps_a_deleted_model() {
        let facts = full();
        let judged = |verdict: &str| {
            let holders = vec![holder(json!({ "kind": "unused", "verdict": verdict, "tensors": 48 }))];
            let facts = facts.with(|e| e.holders = holders);
            (facts.verdict(), facts.judge().kept.map(|(_, why)| why))
        };
        assert_eq!(judged("unused"), ("memory is kept", Some(Kept::Unused)));
        assert_eq!(judged("grows"), ("memory grows", Some(Kept::Unused)));
    }

    #[test]
    fn oom_blames_the_results_that_a_notebook_keeps() {
        let cell = |name: &str, file: &str, kind: &str| {
            holder(json!({ "graphs": 1, "name": name, "file": file, "kind": kind }))
        };
        let facts = full().with(|e| e.request.step = 0);
        let why = |holder: &Holder| facts.why_kept(holder);
        for (name, file) in [
            ("['_']", "<ipython-input-5>"),
            ("_", "/tmp/ipykernel_7/1.py"),
            ("_12", "<ipython-input-5>"),
            ("['__']", "cell.py"),
            ("Out[3]", "cell.py"),
        ] {
            assert_eq!(why(&cell(name, file, "namespace")), Some(Kept::ShellHistory), "{name}");
        }
        // A script's own names, and `_` of a script, which is a value that it does not use.
        for (name, file, kind) in [
            ("_", "train.py", "global"),
            ("__", "train.py", "local"),
            ("_cache", "<ipython-input-5>", "global"),
            ("Outputs", "<ipython-input-5>", "global"),
        ] {
            assert_eq!(why(&cell(name, file, kind)), None, "{name}");
        }
    }

    #[test]
    fn oom_names_the_results_that_a_request_joins_to_the_next_ones() {
        let results = json!({ "bytes": 12 * GIB, "first_step": 3, "last_step": 3, "name": "tensor1" });
        let joins = full().with(|e| {
            e.request.step = 3;
            e.request.is_join = true;
            e.forwards.count = 2;
            e.request.bytes = 16 * GIB;
        });
        assert_eq!(joins.why_kept(&holder(results.clone())), Some(Kept::Joined));
        assert_eq!(joins.with(|e| e.request.is_join = false).why_kept(&holder(results.clone())), None);
        // A training step that joins two of its tensors.
        let trains = joins.with(|e| {
            e.forwards.count = 1;
            e.forwards.has_backward = true;
        });
        assert_eq!(trains.why_kept(&holder(results.clone())), None);
        // Needed, so not kept: a holder that is small compared with the request, and a holder with a graph,
        // which a backward needs.
        assert_eq!(joins.with(|e| e.request.bytes = 24 * GIB).why_kept(&holder(results.clone())), None);
        let mut graph = results;
        graph["graphs"] = 1.into();
        assert_eq!(joins.why_kept(&holder(graph)), None);
    }

    /// Step 3 fails beside `others` bytes of other processes, and the search finds a holder.
    fn trace(others: i64, fields: serde_json::Value) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.sample(512 * MIB + others, &format!("others={others}"));
        trace.parameter(GIB, "Net");
        trace.fill(512 * MIB, owner("Net", "forward", 3));
        trace.fails(GIB, owner("Net", "forward", 3));
        trace.found(&[fields]);
        trace
    }

    #[test]
    fn oom_says_what_keeps_memory() {
        let gathered =
            |tensors: i64| json!({ "tensors": tensors, "bytes": GIB * tensors, "last_step": 2, "steps": 3 });
        let remedy = "try: move each to the CPU: .cpu(), or eval_accumulation_steps=1 with a Trainer; keep only the numbers that you need";
        trace(0, gathered(6)).prints(&[
            "verdict: memory is kept: 512.00 MiB missing for this request. Variable `x` (train.py:7) keeps 6 tensors, 6.00 GiB of steps \
             0-2: results are gathered on the GPU.",
            remedy,
        ]);
        trace(4 * GIB, gathered(6)).prints(&[
            "also: variable `x` (train.py:7) keeps 6 tensors, 6.00 GiB of steps 0-2: results are gathered on the GPU",
            remedy,
        ]);
        // Two tensors, of a small share of the live memory.
        trace(0, gathered(2)).never_prints("variable `x`");
        trace(4 * GIB, gathered(1)).never_prints("also: variable `x`");
        let loaded = |name: &str| json!({ "tensors": 100, "first_step": -1, "last_step": -1, "name": name, "bytes": 3 * GIB });
        trace(0, loaded("checkpoint")).prints(&[
            "verdict: memory is kept: 512.00 MiB missing for this request. Variable `x` (train.py:7) keeps 100 tensors, 3.00 GiB from \
             before training: it was loaded before training, and the parameters themselves take 1.00 GiB.",
            "try: load it to the CPU (torch.load(..., map_location=\"cpu\")), and del it once it is copied",
        ]);
        trace(0, loaded("ema.shadow")).never_prints("it was loaded before training");
    }

    #[test]
    fn oom_says_that_an_optimizer_keeps_parameters_without_a_model() {
        let of = |kind: &str| json!({ "tensors": 50, "kind": kind, "holder": "optimizer `opt` (train.py:7)", "last_step": 3 });
        trace(0, of("unused")).prints(&[
            "verdict: memory is kept: 512.00 MiB missing for this request. Optimizer `opt` (train.py:7) keeps parameters that no model \
             has, and their state: 50 tensors, 6.00 GiB of steps 0-3: their model is gone or has other parameters now, and only the \
             optimizer keeps them.",
            "try: del the optimizer together with its model, and make it after a change that replaces parameters; if it stays, remove the \
             group from param_groups and its parameters from state",
        ]);
        trace(0, of("local")).never_prints("that no model has");
    }
}
