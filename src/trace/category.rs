//! The column `category`.

use serde::{Deserialize, Serialize};

use crate::text_enum::text_enum;

text_enum! {
    /// The purpose of memory.
    #[derive(Default)]
    Category {
        /// A parameter of a module.
        Parameter = "parameter",
        /// A buffer of a module.
        Buffer = "buffer",
        /// A parameter's gradient.
        Gradient = "gradient",
        /// Allocated in a forward pass.
        Activation = "activation",
        /// Allocated in a backward pass or in an optimizer's step.
        Temporary = "temporary",
        /// Held by an optimizer.
        OptimizerState = "optimizer_state",
        /// An input of the model.
        Input = "input",
        /// Allocated by autograd for its own use.
        AutogradDetail = "autograd_detail",
        /// The type "Other" of PyTorch's MemTracker. memtrace gives no block this category.
        Other = "other",
        /// Unknown.
        [default]
        None = "(none)",
        /// Keys and values of earlier tokens, which a model or an engine keeps.
        KvCache = "kv_cache",
        /// Allocated while a CUDA graph was captured, in the graph's private pool.
        CudaGraph = "cuda_graph",
        /// Scratch memory that a library or an engine keeps between calls.
        Workspace = "workspace",
        /// Allocated by the script or by a library that it called, outside every module, forward, backward and
        /// optimizer's step.
        Script = "script",
        /// Reached the GPU outside every op, module, forward, backward and optimizer's step: read from a file, or
        /// copied as a storage.
        Loaded = "loaded",
        /// A whole parameter that FSDP gathers for a forward or a backward. The rank's own part is a
        /// `parameter`.
        UnshardedParameter = "unsharded_param",
        /// The gradient of a whole parameter, before FSDP reduces it. The rank's own part is a `gradient`.
        UnshardedGradient = "unsharded_grad",
        /// The buffer into which FSDP gathers the parts of parameters from all ranks.
        AllGather = "all_gather",
        /// The buffer from which FSDP sums the gradients of all ranks.
        ReduceScatter = "reduce_scatter",
    }
}

impl Category {
    /// Returns true if the use of the memory is unknown, even if the code that allocated it is known.
    #[must_use]
    pub fn is_unclaimed(self) -> bool {
        matches!(self, Category::None | Category::Script | Category::Loaded)
    }

    /// Returns the category of the same memory for an analysis that does not distinguish the buffers of FSDP:
    /// what FSDP gathers is a parameter, and what it reduces is temporary.
    #[must_use]
    pub fn without_sharding(self) -> Category {
        match self {
            Category::UnshardedParameter | Category::AllGather => Category::Parameter,
            Category::UnshardedGradient | Category::ReduceScatter => Category::Temporary,
            other => other,
        }
    }
}
