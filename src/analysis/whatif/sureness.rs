//! The assumptions of a change, and how sure its prediction is.

use super::changes::{Change, NewOptimizer};

/// The note that every prediction from a run that ended out of memory must include.
pub const ENDED_IN_OOM: &str = "the run ended out of memory, and what it would have allocated after that is not in the trace: a lower bound";

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
    /// Returns a number that is higher if the prediction is less sure.
    #[must_use]
    pub fn doubt(&self) -> usize {
        ["high", "medium", "low"].iter().position(|word| *word == self.word).unwrap_or(0)
    }
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
            "torch.utils.checkpoint with use_reentrant=False around each call; all memory that a call keeps \
             is freed at the end of its forward and allocated again at once for its backward",
            "high",
            "the blocks, their sizes and the op that frees them are in the trace",
        ),
        Change::Optimizer(NewOptimizer::EightBit) => of(
            "bitsandbytes: 1 byte of state an element and 4 for each 256, parameters below 4,096 elements unchanged, no \
             temporary memory; the state is float32 now",
            "high",
            "the size of the state follows from the size of the parameters",
        ),
        Change::Optimizer(NewOptimizer::Adafactor) => of(
            "torch.optim.Adafactor, one parameter at a time; every parameter is taken for a square matrix \
             (kernels of convolutions keep more state); the state is float32 now",
            "medium",
            "the trace has no shapes, and the parameters are taken in the order of their allocation",
        ),
        Change::Optimizer(NewOptimizer::Sgd) => of(
            "torch.optim.SGD without momentum or weight decay: no state, no temporary memory",
            "high",
            "blocks of the optimizer only disappear",
        ),
        Change::StepInBackward => of(
            "an optimizer for each parameter, in register_post_accumulate_grad_hook; one backward pass a step, and the same \
             temporary memory for each byte stepped as now",
            "medium",
            "a gradient that several uses add to is complete only later",
        ),
        Change::OffloadOptimizer => of(
            "state and step on the host, gradients on the device to the end of the step; parameters below 4,096 elements \
             stay as they are",
            "high",
            "blocks of the optimizer only disappear",
        ),
        Change::Bfloat16 => of(
            "the whole model in 16 bits (model.bfloat16()), its inputs and its optimizer too; all its blocks are float32 \
             now; integers, masks and statistics stay",
            "low",
            "the trace has no types, and ops take other kernels in 16 bits, with other workspaces; before compute capability 8.0 \
             attention in bfloat16 has no fused kernel",
        ),
        Change::Autocast => of(
            "torch.autocast around the forward and the loss; all blocks are float32 now; products, convolutions and attention run in 16 \
             bits on cast inputs and weights, norms and losses in float32; parameters, gradients and state stay float32",
            "medium",
            "the trace has neither types nor the inputs of ops: which op casts what is inferred from their order and sizes; other \
             kernels have other workspaces",
        ),
        Change::ChunkLoss(_) => of(
            "the head and F.cross_entropy run under torch.utils.checkpoint, on one part of the tokens at a time",
            "medium",
            "the blocks of the logits are found by their size",
        ),
        Change::Batch(..) => of(
            "inputs, activations and the temporary blocks of the backward grow with the batch; those with the size of a \
             parameter of their module do not",
            "medium",
            "the trace has no shapes; workspaces do not grow in proportion",
        ),
        Change::Shard { .. } => of(
            "FSDP2: fully_shard around each of the outermost numbered modules (GPT.h.0, GPT.h.1, ...) and around the model, with \
             its defaults; a unit is gathered whole, and the next one's buffer with it; the model is sharded from the host; the \
             batch of a rank is that of this run",
            "medium",
            "which units overlap follows the order of FSDP2's calls; the trace has no shapes, so uneven shards are taken for even \
             ones",
        ),
        Change::ShardOptimizer(_) => of(
            "ZeroRedundancyOptimizer: each parameter, the largest first, is stepped by the rank that has least so far, and this is \
             the fullest rank; parameters, gradients and the buckets of DistributedDataParallel stay as they are",
            "medium",
            "the temporary memory of the step is taken to shrink with the state",
        ),
        Change::Without(_) => of("the program can do without these blocks", "high", "blocks only disappear"),
    }
}
