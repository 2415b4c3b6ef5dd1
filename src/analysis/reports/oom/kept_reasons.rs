//! The reasons why a holder keeps memory that is not needed, and what to write instead.

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

/// What is said about a reason.
pub(super) struct Words {
    /// Why the holder keeps memory, as a sentence without a full stop.
    pub(super) because: &'static str,
    /// What to do, one line each.
    pub(super) tries: &'static [&'static str],
}

/// The advice for results that stay on the GPU.
const MOVE_TO_CPU: &[&str] = &[
    "move each to the CPU: .cpu(), or eval_accumulation_steps=1 with a Trainer; keep only the numbers that you need",
];

/// Returns what is said about a reason.
pub(super) fn words(why: Kept) -> Words {
    match why {
        Kept::Grows => Words {
            because: "it keeps something of each step",
            tries: &["keep numbers, not tensors: .item(), or .detach().cpu(); drop old entries"],
        },
        Kept::Copies => Words {
            because: "copies of the model are kept",
            tries: &[
                "keep copies on the CPU (copy.deepcopy(model).cpu(), or its state_dict() moved there), or one that is updated in place",
            ],
        },
        Kept::Unused => Words {
            because: "their model is gone or has other parameters now, and only the optimizer keeps them",
            tries: &[
                "del the optimizer together with its model, and make it after a change that replaces parameters; if it stays, \
                 remove the group from param_groups and its parameters from state",
            ],
        },
        Kept::Traceback => Words {
            because: "the exception still refers to the variables of the failed attempt",
            tries: &[
                "retry after the except block, not inside it: set a flag in the block; if a variable still holds the exception after the block, del it",
            ],
        },
        Kept::EarlierGraph => Words {
            because: "the graph of an earlier step is alive together with the graph of this one",
            tries: &[
                "del the variable at the end of the step, or keep what .item() or .detach() gives; a state that goes into the next step needs .detach(), too",
                "if no backward trains through it (an evaluation, the rollout of a reinforcement learning agent): torch.no_grad() or \
                 torch.inference_mode() around its forward",
                "after backward(create_graph=True), gradients keep the graph, too: zero_grad(set_to_none=True) before the next forward, or torch.autograd.grad",
            ],
        },
        Kept::Graphs => Words {
            because: "no backward has freed the graphs of these forwards",
            tries: &[
                "call backward for each part and let gradients add up, instead of summing the losses",
                "if no backward trains through them (an evaluation, the rollout of a reinforcement learning agent): torch.no_grad() or \
                 torch.inference_mode()",
                "a state that goes into the next forward: .detach() it every few steps",
            ],
        },
        Kept::Gathered => Words { because: "results are gathered on the GPU", tries: MOVE_TO_CPU },
        Kept::Joined => Words {
            because: "each new result is concatenated with the earlier ones on the GPU, which needs room for two copies",
            tries: MOVE_TO_CPU,
        },
        Kept::FullState => Words {
            because: "the full state of a sharded model is gathered on this GPU",
            tries: &[
                "StateDictOptions(full_state_dict=True, cpu_offload=True), with FullyShardedDataParallel FullStateDictConfig(offload_to_cpu=True, rank0_only=True), or torch.distributed.checkpoint (DCP), with which each rank saves its own shards",
            ],
        },
        Kept::Loading => Words {
            because: "torch.load puts the checkpoint on the GPU, beside the model",
            tries: &["torch.load(..., map_location=\"cpu\"), then load_state_dict()"],
        },
        Kept::Loaded => Words {
            because: "it was loaded before training",
            tries: &[
                "load it to the CPU (torch.load(..., map_location=\"cpu\")), and del it once it is copied",
            ],
        },
        Kept::EarlierResult => Words {
            because: "the result of an earlier step lives until the variable gets its next value",
            tries: &["del the variable at the end of the step"],
        },
        Kept::ShellHistory => Words {
            because: "the shell keeps the result of a cell whose last line is an expression",
            tries: &[
                "in a notebook: end such a line with ; or assign the result; %reset -f out forgets the results so far (_, __, Out)",
            ],
        },
    }
}
