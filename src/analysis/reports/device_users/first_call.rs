//! The call that put a process on a GPU, and the remedy where the process works on another one.

use crate::state::stacks::Stacks;

/// The call with which a process first used a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FirstCall {
    /// The call of PyTorch, such as `torch.load`; empty for a direct use of the device.
    pub(super) what: &'static str,
    /// The line of the program that makes the call, as file, line and function.
    pub(super) line: String,
    /// The remedy, if the process works on another GPU.
    pub(super) remedy: &'static str,
}

/// The remedy for every call that [`CALLS`] does not list.
pub(super) const SET_DEVICE: &str = "torch.cuda.set_device(local_rank) before the first call of CUDA";

/// The remedy if the call is unknown, because the trace has no Python lines of it.
pub(super) const UNKNOWN_CALL: &str = "torch.cuda.set_device(local_rank) before the first call of CUDA; \
                                       torch.load(..., map_location=\"cpu\"), because a checkpoint goes back to the \
                                       GPU that it was saved on; CPU tensors for the backend gloo";

/// For each call: a part of the path of its file, its function (`None` for any), its name, and the remedy.
/// The first entry that matches a frame of the stack applies.
const CALLS: &[(&str, Option<&str>, &str, &str)] = &[
    (
        "torch/serialization.py",
        None,
        "torch.load",
        "torch.load(..., map_location=\"cpu\"): without it, a checkpoint goes back to the GPU that it was saved on",
    ),
    (
        "torch/cuda/memory.py",
        Some("mem_get_info"),
        "torch.cuda.mem_get_info",
        "torch.cuda.mem_get_info() of the process's own GPU, after torch.cuda.set_device(local_rank)",
    ),
    (
        "torch/cuda/memory.py",
        Some("empty_cache"),
        "torch.cuda.empty_cache",
        "torch.cuda.set_device(local_rank) before torch.cuda.empty_cache()",
    ),
    (
        "torch/distributed/distributed_c10d.py",
        None,
        "torch.distributed",
        "torch.cuda.set_device(local_rank) before init_process_group; with the backend gloo, CPU tensors, \
         because gloo copies the tensors of every GPU in a thread that uses GPU 0",
    ),
    (
        "torch/utils/data/_utils/worker.py",
        None,
        "a DataLoader worker",
        "CPU tensors in the data set, moved by the training loop: each worker that uses CUDA has its own \
         context",
    ),
    (
        "torch/cuda/__init__.py",
        Some("synchronize"),
        "torch.cuda.synchronize",
        "torch.cuda.synchronize() of the process's own GPU, after torch.cuda.set_device(local_rank)",
    ),
    (
        "torch/cuda/__init__.py",
        Some("set_device"),
        "torch.cuda.set_device",
        "torch.cuda.set_device(local_rank), once and with the process's own GPU",
    ),
    (
        "torch/nn/modules/module.py",
        Some("cuda"),
        "Module.cuda",
        "torch.cuda.set_device(local_rank) before .cuda(), or .to(f\"cuda:{local_rank}\")",
    ),
    (
        "torch/nn/modules/module.py",
        Some("to"),
        "Module.to",
        "torch.cuda.set_device(local_rank) before .to(\"cuda\"), or .to(f\"cuda:{local_rank}\")",
    ),
    (
        "torch/cuda/__init__.py",
        Some("__enter__"),
        "torch.cuda.device",
        "no torch.cuda.device(0) in other ranks: entering it creates a context there",
    ),
    (
        "multiprocessing/process.py",
        Some("_bootstrap"),
        "a worker process",
        "torch.cuda.set_device in each worker process; or no CUDA there: return CPU tensors to the parent",
    ),
];

impl FirstCall {
    /// Reads the call from the Python lines of a stack. Returns `None` for a stack without a Python line.
    pub(super) fn read(stacks: &Stacks, stack: i64) -> Option<FirstCall> {
        let line = (*stacks.lines(stack).first()?).to_owned();
        let known = CALLS.iter().find(|(path, name, ..)| {
            let is_call = |(file, _, function): (&str, i64, &str)| {
                file.contains(path) && name.is_none_or(|name| name == function)
            };
            stacks.calls(stack).any(is_call)
        });
        let (what, remedy) = known.map_or(("", SET_DEVICE), |(_, _, what, remedy)| (*what, *remedy));
        Some(FirstCall { what, line, remedy })
    }

    /// The call and the line as a text.
    pub(super) fn text(&self) -> String {
        if self.what.is_empty() { self.line.clone() } else { format!("{}, {}", self.what, self.line) }
    }
}
