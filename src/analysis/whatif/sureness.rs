//! The assumptions of a change, and how sure its prediction is.

use super::changes::{Change, NewOptimizer};
use crate::state::replay::Replay;

/// The note that every prediction from a run that ended out of memory must include.
pub const ENDED_IN_OOM: &str = "the run ended out of memory, so this is a lower bound: the trace lacks all \
                                later allocations";

/// The word of the surest predictions.
const HIGH: &str = "high";

/// How sure the prediction of a change is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sureness {
    /// The assumptions that the prediction makes about the change.
    pub assumes: &'static str,
    /// `high`, `medium` or `low`.
    pub word: &'static str,
    /// The reason.
    pub because: &'static str,
}

impl Sureness {
    /// Returns the sureness for a trace whose categories are inferred from call stacks if `is_snapshot` is true.
    #[must_use]
    fn of_snapshot(self, is_snapshot: bool) -> Sureness {
        if is_snapshot && self.word == HIGH {
            let because = "the categories of a PyTorch snapshot are inferred from call stacks";
            return Sureness { word: "medium", because, ..self };
        }
        self
    }

    /// Returns the rank of the word, from 0 for `high` to 2 for `low`, to sort the surest first.
    #[must_use]
    pub fn doubt(&self) -> usize {
        [HIGH, "medium", "low"].iter().position(|word| *word == self.word).unwrap_or(0)
    }
}

/// Returns the assumptions of a change, and how sure its prediction is for the run of `replay`.
#[must_use]
pub fn sureness_in(change: &Change, replay: &Replay) -> Sureness {
    sureness(change, replay.ended_in_oom()).of_snapshot(replay.is_snapshot())
}

/// Returns the assumptions of a change, and how sure its prediction is. If `ended_in_oom` is true, the run
/// ended inside a step, so each prediction is a lower bound.
#[must_use]
pub fn sureness(change: &Change, ended_in_oom: bool) -> Sureness {
    let of = |assumes, word, because| match ended_in_oom {
        true => Sureness { assumes, word: "low", because: ENDED_IN_OOM },
        false => Sureness { assumes, word, because },
    };
    match change {
        Change::Checkpoint(_) => of(
            "torch.utils.checkpoint with use_reentrant=False around each call; all that a call keeps for \
             its backward is freed when its forward ends, and allocated again when its backward begins",
            HIGH,
            "the blocks, their sizes and the op that frees them are in the trace",
        ),
        Change::Optimizer(NewOptimizer::EightBit) => of(
            "bitsandbytes: 1 byte of state per element and 4 per 256 elements; parameters below 4,096 \
             elements keep their state; no temporary memory",
            HIGH,
            "the size of the state follows from the size of the parameters",
        ),
        Change::Optimizer(NewOptimizer::Adafactor) => of(
            "torch.optim.Adafactor, one parameter at a time; a parameter whose shape the trace does not have is treated as a \
             square matrix",
            "medium",
            "the order of the steps is taken from the allocation of the parameters",
        ),
        Change::Optimizer(NewOptimizer::Sgd) => of(
            "torch.optim.SGD without momentum or weight decay: no state, no temporary memory",
            HIGH,
            "the change only removes blocks of the optimizer",
        ),
        Change::StepInBackward => of(
            "one optimizer per parameter, in register_post_accumulate_grad_hook; one backward pass per \
             step; as much temporary memory per byte of parameter as now",
            "medium",
            "if a parameter is used several times (tied weights), its gradient is taken to be complete at the first use",
        ),
        Change::OffloadOptimizer => of(
            "the host holds the state and computes the step; gradients stay on the device until the step \
             ends; parameters below 4,096 elements are not offloaded",
            HIGH,
            "the change only removes blocks of the optimizer",
        ),
        Change::Bfloat16 => of(
            "model, inputs and optimizer are 16-bit (model.bfloat16()), without autocast; blocks whose type the trace does not have \
             are float32 now, but for integers, masks and statistics",
            "low",
            "16-bit ops use other kernels, with other workspaces, and a program may still compute its loss in float32; before \
             compute capability 8.0 attention in bfloat16 has no fused kernel",
        ),
        Change::Autocast => of(
            "torch.autocast around the forward and the loss; all blocks are float32 now; products, convolutions and attention run in 16 \
             bits on cast inputs and weights, norms and losses in float32; parameters, gradients and state stay float32",
            "medium",
            "the trace has no inputs of ops: what each op casts is inferred from order \
             and sizes; 16-bit kernels have other workspaces",
        ),
        Change::ChunkLoss(_) => of(
            "the head and F.cross_entropy run under torch.utils.checkpoint, on one part of the tokens at a time",
            "medium",
            "the blocks of the logits are found by their size; where their shape is unknown, the parts count as equal",
        ),
        Change::Batch(..) => of(
            "inputs, activations and the temporary blocks of the backward grow with the batch; blocks as \
             large as a parameter of their module do not",
            "medium",
            "sizes and categories decide which blocks are taken to grow; workspaces do not grow in proportion",
        ),
        Change::Shard { .. } => of(
            "FSDP2: fully_shard around each of the outermost numbered modules (GPT.h.0, GPT.h.1, ...) and \
             around the model, with its defaults; a whole unit is gathered at a time, and the next one in \
             advance; the model is on the host until it is sharded; each rank has the batch of this run",
            "medium",
            "which units overlap follows the order of FSDP2's calls; uneven shards are treated as even",
        ),
        Change::ShardOptimizer(_) => of(
            "ZeroRedundancyOptimizer: parameters, largest first, go to the rank with the least so far, and \
             this is the fullest rank; parameters, gradients and the buckets of DistributedDataParallel \
             stay as they are",
            "medium",
            "the temporary memory of the step is assumed to shrink with the state",
        ),
        Change::Without(_) => {
            of("the program can do without these blocks", HIGH, "the change only removes blocks")
        }
    }
}
