//! The profiler's categories and actions, and the blocks that they apply to.

use memtrace_trace::Category as TraceCategory;

/// The categories of `torch.profiler`, in the order of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Category {
    /// A parameter.
    Parameter = 0,
    /// Held by an optimizer.
    OptimizerState = 1,
    /// An input of the model: the batch, or a buffer.
    Input = 2,
    /// Allocated and freed inside one op.
    Temporary = 3,
    /// Allocated in the forward pass.
    Activation = 4,
    /// A gradient.
    Gradient = 5,
    /// Internal to autograd.
    AutogradDetail = 6,
    /// No category; the profiler's plot calls it "Unknown".
    Unknown = 7,
}

impl Category {
    /// Every category, in the order of its number in the export.
    pub const ALL: [Category; 8] = [
        Category::Parameter,
        Category::OptimizerState,
        Category::Input,
        Category::Temporary,
        Category::Activation,
        Category::Gradient,
        Category::AutogradDetail,
        Category::Unknown,
    ];

    /// Returns the profiler's name of the category.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameter => "PARAMETER",
            Category::OptimizerState => "OPTIMIZER_STATE",
            Category::Input => "INPUT",
            Category::Temporary => "TEMPORARY",
            Category::Activation => "ACTIVATION",
            Category::Gradient => "GRADIENT",
            Category::AutogradDetail => "AUTOGRAD_DETAIL",
            Category::Unknown => "Unknown",
        }
    }

    /// Returns the color in the profiler's plot, by a name that matplotlib and CSS know.
    #[must_use]
    pub const fn color(self) -> &'static str {
        match self {
            Category::Parameter => "darkgreen",
            Category::OptimizerState => "goldenrod",
            Category::Input => "black",
            Category::Temporary => "mediumpurple",
            Category::Activation => "red",
            Category::Gradient => "mediumblue",
            Category::AutogradDetail => "royalblue",
            Category::Unknown => "grey",
        }
    }

    /// Returns the profiler's category for a category of the trace. A module's buffer becomes an input,
    /// because its data flow is the same. Memory that a user registers has no category.
    #[must_use]
    pub const fn of(told: TraceCategory) -> Category {
        match told {
            TraceCategory::Parameter => Category::Parameter,
            TraceCategory::OptimizerState => Category::OptimizerState,
            TraceCategory::Input | TraceCategory::Buffer => Category::Input,
            TraceCategory::Temporary => Category::Temporary,
            TraceCategory::Activation => Category::Activation,
            TraceCategory::Gradient => Category::Gradient,
            TraceCategory::AutogradDetail => Category::AutogradDetail,
            TraceCategory::CudaGraph => Category::Activation,
            TraceCategory::Other
            | TraceCategory::None
            | TraceCategory::Script
            | TraceCategory::Loaded
            | TraceCategory::KvCache
            | TraceCategory::Workspace => Category::Unknown,
        }
    }

    /// Returns the trace's category for a category of the profiler.
    #[must_use]
    pub const fn to_trace(self) -> TraceCategory {
        match self {
            Category::Parameter => TraceCategory::Parameter,
            Category::OptimizerState => TraceCategory::OptimizerState,
            Category::Input => TraceCategory::Input,
            Category::Temporary => TraceCategory::Temporary,
            Category::Activation => TraceCategory::Activation,
            Category::Gradient => TraceCategory::Gradient,
            Category::AutogradDetail => TraceCategory::AutogradDetail,
            Category::Unknown => TraceCategory::None,
        }
    }
}

/// An action on a block, with its number in the profiler's export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Action {
    /// Allocated before the trace, or before the window.
    Preexisting = 1,
    /// Allocated.
    Create = 2,
    /// Changed in place by an op. Needs io records.
    IncrementVersion = 3,
    /// Freed.
    Destroy = 4,
}

impl Action {
    /// Every action, in the order of its number.
    pub const ALL: [Action; 4] =
        [Action::Preexisting, Action::Create, Action::IncrementVersion, Action::Destroy];

    /// Returns the profiler's name of the action.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Action::Preexisting => "PREEXISTING",
            Action::Create => "CREATE",
            Action::IncrementVersion => "INCREMENT_VERSION",
            Action::Destroy => "DESTROY",
        }
    }
}

/// One action on one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The time in ns since the start of the trace; -1 for a preexisting block.
    pub time_ns: i64,
    /// The action.
    pub action: Action,
    /// The index of the block in [`Profile::blocks`](super::Profile::blocks).
    pub block: u32,
    /// The version before the action; for an allocation, the new version.
    pub version: u32,
    /// The category of `version`.
    pub category: Category,
    /// The category after the action. If the action makes a new version, the category of that version.
    pub after: Category,
    /// True if one of the two categories was inferred from the flow of data.
    pub inferred: bool,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The `alloc_id`; 0 if the trace has only its free.
    pub id: i64,
    /// The CUDA ordinal; -1 for a CPU tensor.
    pub device: i32,
    /// The address of the block.
    pub addr: i64,
    /// The size in bytes, as the allocator gave it.
    pub bytes: i64,
    /// The time of its allocation in ns; `None` for a preexisting block.
    pub born_ns: Option<i64>,
    /// The time of its free in ns; `None` if it was not freed.
    pub died_ns: Option<i64>,
    /// The category in its last row.
    pub recorded: TraceCategory,
    /// True if that row is a `tag` row; otherwise the category is the one known at the allocation.
    pub tagged: bool,
}
