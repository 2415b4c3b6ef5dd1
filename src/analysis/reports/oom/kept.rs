//! Which holder keeps memory that the program does not need, and why.

use super::cause::{Facts, MATERIAL};
use crate::state::retained::Holder;

/// The maximum number of ordinary forwards of the root module without a backward: two are common (an
/// adversarial or contrastive loss), three are a loop.
const MOST_FORWARDS: u64 = 2;
/// The minimum number of tensors that count as gathered. A container with fewer tensors is a group of
/// ordinary variables.
pub(super) const FEWEST_GATHERED: i64 = 3;
/// The names under which IPython keeps the results of cells, without `_`, which scripts use, too.
const SHELL_NAMES: [&str; 4] = ["__", "___", "Out", "_oh"];

/// The reason why a holder keeps memory that is not needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// The holder grows in each step.
    Grows,
    /// Copies of the model, made in several steps.
    Copies,
    /// An exception's traceback holds the variables of an attempt that failed.
    Traceback,
    /// The graph of an earlier step, in addition to the graph of this step.
    EarlierGraph,
    /// The graphs of several forwards without a backward.
    Graphs,
    /// Results that a holder gathers on the GPU.
    Gathered,
    /// The results so far, to which each new result is joined.
    Joined,
    /// The full state of a sharded model, gathered to be saved.
    FullState,
    /// A checkpoint that `torch.load` is loading while the model is already in memory.
    Loading,
    /// Tensors from before training, about the size of the parameters.
    Loaded,
    /// The result of an earlier step.
    EarlierResult,
    /// Parameters that only an optimizer has, with their gradients and state.
    Unused,
    /// The results of a notebook's latest cells, which the shell keeps under names of its own.
    ShellHistory,
}

impl Facts {
    /// Returns the largest holder of memory that the program does not need now, and the reason. A traceback
    /// comes before all others.
    pub(super) fn kept(&self) -> Option<(&Holder, Kept)> {
        let live = self.allocated.max(1);
        let material = self.holders.iter().filter(|holder| holder.bytes as f64 >= MATERIAL * live as f64);
        let found = material.filter_map(|holder| Some((holder, self.why_kept(holder)?)));
        // A traceback comes first: it holds the memory of a failed attempt, and the retry can succeed only
        // once this memory is freed.
        found.max_by_key(|(holder, why)| (*why == Kept::Traceback, holder.bytes))
    }

    pub(super) fn why_kept(&self, holder: &Holder) -> Option<Kept> {
        let text = |name: &str| holder.text(name);
        if text("kind") == "traceback" || holder.verdict == "traceback" {
            return Some(Kept::Traceback);
        }
        if text("kind") == "unused" {
            return Some(Kept::Unused);
        }
        if ["_weights_only_unpickler.py", "torch/serialization.py"]
            .iter()
            .any(|file| text("file").ends_with(file))
        {
            return (self.step < 0).then_some(Kept::Loading);
        }
        // A search for holders leaves out the parameters themselves. So tensors that a function of
        // `state_dict` holds are the gathered state of a sharded model, which torch makes to save it.
        let is_state = text("file").contains("state_dict") && holder.graphs == 0;
        if is_state && holder.tensors >= FEWEST_GATHERED {
            return Some(Kept::FullState);
        }
        if is_of_forward(holder) || !text("needed_by").is_empty() {
            return None;
        }
        if is_of_shell(holder) {
            return Some(Kept::ShellHistory);
        }
        if holder.verdict == "grows" {
            return Some(Kept::Grows);
        }
        let (first, last) = (holder.first_step?, holder.last_step?);
        if holder.graphs > 0 {
            // In a script without modules, the first step begins after its forward. So the graph of its
            // forward has step -1, and is needed in step 0.
            if self.step > last && (last >= 0 || self.step > 0) {
                return (!self.continued_steps.contains(&last)).then_some(Kept::EarlierGraph);
            }
            // The backward of the last forward needs one graph. So there must be more forwards than usual,
            // and the earlier forwards must have left memory.
            let is_of_several =
                self.forwards > self.most_forwards() && 3 * self.left_by_forwards >= holder.bytes;
            let most = 2 * holder.bytes > self.activations;
            return (holder.graphs >= FEWEST_GATHERED || is_of_several && most).then_some(Kept::Graphs);
        }
        if last < 0 && self.step >= 0 {
            // A data set on the GPU has one or two tensors, but a second copy of the weights has many. A name
            // with a dot belongs to an attribute of an object, such as averaged weights that each step uses.
            let is_copy =
                holder.tensors >= 8 && self.parameters > 0 && 4 * holder.bytes >= 3 * self.parameters;
            return (is_copy && !text("name").contains('.')).then_some(Kept::Loaded);
        }
        if 2 * self.kv_cache.max(self.inputs) >= holder.bytes {
            return None;
        }
        // Results to join come from several forwards since the last backward.
        let are_several = self.forwards > 1 || !self.has_backward;
        if self.is_join && are_several && 3 * holder.bytes >= 2 * self.request && holder.bytes <= self.request
        {
            return Some(Kept::Joined);
        }
        if self.is_of_running_forward(holder) {
            return None;
        }
        if holder.tensors >= FEWEST_GATHERED {
            if self.holders.iter().any(|holder| holder.text("file").contains("state_dict")) {
                return Some(Kept::FullState);
            }
            // A running call of a library may hold memory that no variable refers to, such as the backward of
            // a checkpoint.
            let is_of_call = text("kind") == "unnamed" && last >= self.step;
            return (!is_of_call).then_some(Kept::Gathered);
        }
        let is_enough = holder.bytes >= self.lacking() && self.larger_step().is_none();
        (first >= 0 && last < self.step && is_enough).then_some(Kept::EarlierResult)
    }

    /// Returns true if a holder has results that the running forward gathers for its output, such as the maps
    /// of its attention: no other forward has run since the last backward.
    fn is_of_running_forward(&self, holder: &Holder) -> bool {
        let is_of_step = holder.first_step == Some(self.step) && holder.last_step == Some(self.step);
        let is_alone = self.is_in_forward && self.forwards == 1;
        is_alone && is_of_step && holder.graphs == 0 && holder.tensors >= FEWEST_GATHERED
    }

    /// Returns the largest holder with results that the running forward gathers, if these take a significant
    /// share of the card.
    pub(super) fn gathered_by_forward(&self) -> Option<&Holder> {
        let all = self.holders.iter().filter(|holder| self.is_of_running_forward(holder));
        let is_variable = |holder: &&Holder| {
            // What torch itself gathers, such as FSDP's parameters, is no output.
            let is_of_script = !holder.text("file").contains("/torch/");
            is_of_script && ["local", "attribute", "global"].contains(&holder.text("kind"))
        };
        all.filter(is_variable)
            .max_by_key(|holder| holder.bytes)
            .filter(|one| self.is_material(one.bytes) && 2 * self.kv_cache < one.bytes)
    }

    /// Returns the maximum number of forwards of a root module without a backward that is ordinary. More
    /// forwards are a loop over a data set.
    fn most_forwards(&self) -> u64 {
        // If the program so far had one forward per backward, it needs no second graph.
        if self.usual_forwards == 1 { 1 } else { MOST_FORWARDS }
    }
}

/// Returns true if a holder belongs to a running forward: a local variable of a forward function, or tensors
/// that torch itself keeps for the backward.
pub(super) fn is_of_forward(holder: &Holder) -> bool {
    let is_variable =
        holder.text("kind") == "local" && holder.text("owner").to_lowercase().contains("forward");
    is_variable || holder.text("file").contains("/torch/")
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

/// Returns the holders, but without the holders of the inputs that torch's checkpoints keep for their
/// backward. The bytes of these inputs are added to the largest graph of the script, whose backward needs
/// them.
pub(super) fn with_inputs_of_checkpoints(holders: &[Holder]) -> Vec<Holder> {
    let is_of_checkpoint =
        |holder: &Holder| holder.graphs > 0 && holder.text("file").ends_with("torch/utils/checkpoint.py");
    let is_of_script =
        |holder: &&Holder| holder.graphs > 0 && !is_of_forward(holder) && !is_of_checkpoint(holder);
    let Some(graph) = holders.iter().filter(is_of_script).max_by_key(|holder| holder.bytes) else {
        return holders.to_vec();
    };
    let is_joined = |holder: &Holder| is_of_checkpoint(holder) && holder.last_step == graph.last_step;
    let inputs: i64 = holders.iter().filter(|holder| is_joined(holder)).map(|holder| holder.bytes).sum();
    let more = |holder: &Holder| if holder == graph { inputs } else { 0 };
    let with_inputs = |holder: &Holder| {
        let mut whole = holder.clone();
        whole.bytes += more(holder);
        whole
    };
    holders.iter().filter(|holder| !is_joined(holder)).map(with_inputs).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::super::cause::Cause;
    use super::super::test_facts::{GIB, full, holder};
    use super::*;

    #[test]
    fn oom_blames_no_variable_that_the_program_needs() {
        let why = |facts: &Facts, fields: serde_json::Value| facts.why_kept(&holder(fields));
        let facts = Facts { step: 3, ..full() };
        // Needed, so not kept: the activations of the running forward, a batch, the cache of a decoder, a
        // data set, and averaged weights.
        let forward = json!({ "owner": "Net.forward", "graphs": 1, "first_step": 3, "last_step": 3 });
        assert_eq!(why(&facts, forward), None);
        let now = |tensors: i64| json!({ "tensors": tensors, "first_step": 3, "last_step": 3 });
        assert_eq!(why(&Facts { inputs: 6 * GIB, ..facts.clone() }, now(4)), None);
        assert_eq!(why(&Facts { kv_cache: 6 * GIB, ..facts.clone() }, now(64)), None);
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
        let before = Facts { step: -1, ..full() };
        assert_eq!(why(&before, loads("torch/_weights_only_unpickler.py")), Some(Kept::Loading));
        assert_eq!(why(&facts, loads("torch/_weights_only_unpickler.py")), None);
        let saves = holder(json!({ "file": "torch/distributed/checkpoint/state_dict.py" }));
        assert_eq!(why(&Facts { holders: vec![saves], ..facts.clone() }, now(24)), Some(Kept::FullState));
        let hook = json!({ "tensors": 88, "file": "/lib/torch/distributed/fsdp/_state_dict_utils.py" });
        assert_eq!(why(&facts, hook), Some(Kept::FullState));
        // Two forwards before a backward are common: their graph is needed. After eight forwards, it is a
        // loop that keeps graphs.
        let graph = || json!({ "graphs": 1, "bytes": 12 * GIB, "first_step": 3, "last_step": 3 });
        assert_eq!(why(&Facts { forwards: 2, ..facts.clone() }, graph()), None);
        let eight = Facts { forwards: 8, left_by_forwards: 11 * GIB, ..facts.clone() };
        assert_eq!(why(&eight, graph()), Some(Kept::Graphs));
        // The earlier forwards left no memory, so they were evaluations: the graph is needed.
        assert_eq!(why(&Facts { left_by_forwards: 0, ..eight }, graph()), None);
        // If earlier steps had one forward per backward, the second graph is not needed. If they had two, it
        // is needed.
        let second = Facts { forwards: 2, usual_forwards: 1, left_by_forwards: 12 * GIB, ..facts.clone() };
        assert_eq!(why(&second, graph()), Some(Kept::Graphs));
        assert_eq!(why(&Facts { usual_forwards: 2, ..second }, graph()), None);
        let earlier = || json!({ "graphs": 1, "first_step": 2, "last_step": 2 });
        assert_eq!(why(&facts, earlier()), Some(Kept::EarlierGraph));
        // Another optimizer's step came between the forward of a generator and its backward.
        let continued = Facts { continued_steps: BTreeSet::from([2]), ..facts.clone() };
        assert_eq!(why(&continued, earlier()), None);
        // The graph of a forward before the first step is needed in step 0. In step 1, it is kept without
        // need.
        let first = || json!({ "graphs": 1, "first_step": -1, "last_step": -1 });
        assert_eq!(why(&Facts { step: 0, ..facts.clone() }, first()), None);
        assert_eq!(why(&Facts { step: 1, ..facts.clone() }, first()), Some(Kept::EarlierGraph));
        assert_eq!(why(&facts, json!({ "kind": "traceback" })), Some(Kept::Traceback));
    }

    #[test]
    fn oom_blames_an_optimizer_that_keeps_a_deleted_model() {
        let facts = full();
        let judged = |verdict: &str| {
            let holders = vec![holder(json!({ "kind": "unused", "verdict": verdict, "tensors": 48 }))];
            let facts = Facts { holders, ..facts.clone() };
            let (cause, kept) = facts.judge();
            (cause, kept.map(|(_, why)| why))
        };
        assert_eq!(judged("unused"), (Cause::Kept, Some(Kept::Unused)));
        assert_eq!(judged("grows"), (Cause::Grows, Some(Kept::Unused)));
    }

    #[test]
    fn oom_blames_the_results_that_a_notebook_keeps() {
        let cell = |name: &str, file: &str, kind: &str| {
            holder(json!({ "graphs": 1, "name": name, "file": file, "kind": kind }))
        };
        let facts = Facts { step: 0, ..full() };
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
    fn oom_blames_no_results_that_the_running_forward_gathers() {
        // The maps of attention that a model collects for its output.
        let maps = holder(
            json!({ "tensors": 5, "first_step": 0, "last_step": 0, "bytes": 4 * GIB, "kind": "local" }),
        );
        let first =
            Facts { is_in_forward: true, forwards: 1, step: 0, holders: vec![maps.clone()], ..full() };
        assert_eq!(first.judge().0, Cause::TooBig);
        assert_eq!(first.gathered_by_forward(), Some(&maps));
        // Results of earlier forwards; a request outside of the forward; too few bytes.
        for other in [
            Facts { forwards: 2, ..first.clone() },
            Facts { step: 1, ..first.clone() },
            Facts { is_in_forward: false, ..first.clone() },
        ] {
            assert_eq!((other.judge().0, other.gathered_by_forward()), (Cause::Kept, None));
        }
        let mut few = maps;
        few.bytes = GIB;
        assert_eq!(Facts { holders: vec![few], ..first }.gathered_by_forward(), None);
    }

    #[test]
    fn oom_counts_inputs_of_checkpoints_to_the_graph_that_waits_for_them() {
        let graph = holder(json!({ "name": "total", "holder": "variable `total`", "graphs": 1 }));
        let of_checkpoint = |step: i64| {
            holder(json!({
                "graphs": 169, "bytes": 10 * GIB, "first_step": step, "last_step": step, "file": "torch/utils/checkpoint.py",
            }))
        };
        let joined = with_inputs_of_checkpoints(&[of_checkpoint(0), graph.clone()]);
        assert_eq!(joined.len(), 1);
        assert_eq!((joined[0].text("name"), joined[0].bytes), ("total", 16 * GIB));
        // The inputs stay a holder of their own if no graph waits for them, or only a graph of another step.
        assert_eq!(with_inputs_of_checkpoints(&[of_checkpoint(0)]).len(), 1);
        assert_eq!(with_inputs_of_checkpoints(&[of_checkpoint(1), graph]).len(), 2);
    }

    #[test]
    fn oom_names_the_results_that_a_request_joins_to_the_next_ones() {
        let results = json!({ "bytes": 12 * GIB, "first_step": 3, "last_step": 3, "name": "tensor1" });
        let joins = Facts { step: 3, is_join: true, forwards: 2, request: 16 * GIB, ..full() };
        assert_eq!(joins.why_kept(&holder(results.clone())), Some(Kept::Joined));
        assert_eq!(Facts { is_join: false, ..joins.clone() }.why_kept(&holder(results.clone())), None);
        // A training step that joins two of its tensors.
        let trains = Facts { forwards: 1, has_backward: true, ..joins.clone() };
        assert_eq!(trains.why_kept(&holder(results.clone())), None);
        // Needed, so not kept: a holder that is small compared with the request, and a holder with a graph,
        // which a backward needs.
        assert_eq!(Facts { request: 24 * GIB, ..joins.clone() }.why_kept(&holder(results.clone())), None);
        let mut graph = results;
        graph["graphs"] = 1.into();
        assert_eq!(joins.why_kept(&holder(graph)), None);
    }
}
