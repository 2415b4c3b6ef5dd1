//! Holders of memory that a search at the OOM found.

use crate::state::retained::Holder;

/// The minimum number of tensors that count as gathered. A container with fewer tensors is a group of
/// ordinary variables.
pub(super) const FEWEST_GATHERED: i64 = 3;

/// Returns true if a holder belongs to a running forward: a local variable of a forward function, or tensors
/// that torch itself keeps for the backward.
pub(super) fn is_of_forward(holder: &Holder) -> bool {
    let is_variable =
        holder.text("kind") == "local" && holder.text("owner").to_lowercase().contains("forward");
    is_variable || is_of_torch(holder)
}

/// Returns true if the code of torch itself holds the memory. A user's folder may be called `torch`, so only
/// an installed torch counts.
pub(super) fn is_of_torch(holder: &Holder) -> bool {
    let is_inside = |folder: &str| holder.text("file").contains(folder);
    ["/site-packages/torch/", "/dist-packages/torch/"].into_iter().any(is_inside)
}

/// Returns true if one of torch's `state_dict` functions holds the memory.
pub(super) fn is_of_state_dict(holder: &Holder) -> bool {
    let file = holder.text("file");
    file.contains("torch/distributed/") && file.contains("state_dict")
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
    use serde_json::json;

    use super::super::test_evidence::{GIB, holder};
    use super::*;

    #[test]
    fn oom_takes_no_folder_of_the_user_for_torch() {
        let is_torch = |file: &str| is_of_torch(&holder(json!({ "file": file })));
        assert!(is_torch("/usr/lib/python3.12/site-packages/torch/utils/checkpoint.py"));
        assert!(is_torch("/usr/local/lib/python3.12/dist-packages/torch/_tensor.py"));
        assert!(!is_torch("/home/me/torch/train.py"));
        assert!(!is_torch("/usr/lib/python3.12/site-packages/transformers/cache_utils.py"));
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
}
