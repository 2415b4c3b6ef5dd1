//! The profiler's categories and actions, and the blocks that they apply to.

use memtrace_trace::Category;

/// The categories of `torch.profiler`, in the order of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum ProfilerCategory {
    /// A parameter.
    Parameter = 0,
    /// The state of an optimizer.
    OptimizerState = 1,
    /// An input of the model: the batch, or a buffer.
    Input = 2,
    /// Memory that was allocated and freed inside one op.
    Temporary = 3,
    /// Memory that was allocated in the forward pass.
    Activation = 4,
    /// A gradient.
    Gradient = 5,
    /// Memory that is internal to autograd.
    AutogradDetail = 6,
    /// No category. The profiler's plot calls it "Unknown".
    Unknown = 7,
}

impl ProfilerCategory {
    /// Every category, in the order of its number in the export.
    pub const ALL: [ProfilerCategory; 8] = [
        ProfilerCategory::Parameter,
        ProfilerCategory::OptimizerState,
        ProfilerCategory::Input,
        ProfilerCategory::Temporary,
        ProfilerCategory::Activation,
        ProfilerCategory::Gradient,
        ProfilerCategory::AutogradDetail,
        ProfilerCategory::Unknown,
    ];

    /// Returns the profiler's name of the category.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            ProfilerCategory::Parameter => "PARAMETER",
            ProfilerCategory::OptimizerState => "OPTIMIZER_STATE",
            ProfilerCategory::Input => "INPUT",
            ProfilerCategory::Temporary => "TEMPORARY",
            ProfilerCategory::Activation => "ACTIVATION",
            ProfilerCategory::Gradient => "GRADIENT",
            ProfilerCategory::AutogradDetail => "AUTOGRAD_DETAIL",
            ProfilerCategory::Unknown => "Unknown",
        }
    }

    /// Returns the color in the profiler's plot, as a name that matplotlib and CSS know.
    #[must_use]
    pub const fn color(self) -> &'static str {
        match self {
            ProfilerCategory::Parameter => "darkgreen",
            ProfilerCategory::OptimizerState => "goldenrod",
            ProfilerCategory::Input => "black",
            ProfilerCategory::Temporary => "mediumpurple",
            ProfilerCategory::Activation => "red",
            ProfilerCategory::Gradient => "mediumblue",
            ProfilerCategory::AutogradDetail => "royalblue",
            ProfilerCategory::Unknown => "grey",
        }
    }

    /// Returns the profiler's category for a category of the trace. A module's buffer becomes an input,
    /// because its data flow is the same, and a buffer of FSDP what it is a part of. A category without an
    /// equivalent in the profiler, such as
    /// `kv_cache`, becomes [`ProfilerCategory::Unknown`].
    #[must_use]
    pub const fn from_category(category: Category) -> ProfilerCategory {
        match category {
            Category::Parameter | Category::UnshardedParameter | Category::AllGather => {
                ProfilerCategory::Parameter
            }
            Category::OptimizerState => ProfilerCategory::OptimizerState,
            Category::Input | Category::Buffer => ProfilerCategory::Input,
            Category::Temporary | Category::ReduceScatter => ProfilerCategory::Temporary,
            Category::Activation => ProfilerCategory::Activation,
            Category::Gradient | Category::UnshardedGradient => ProfilerCategory::Gradient,
            Category::AutogradDetail => ProfilerCategory::AutogradDetail,
            Category::CudaGraph => ProfilerCategory::Activation,
            Category::Other
            | Category::None
            | Category::Script
            | Category::Loaded
            | Category::KvCache
            | Category::Workspace => ProfilerCategory::Unknown,
        }
    }

    /// Returns the trace's category for a category of the profiler.
    #[must_use]
    pub const fn to_trace(self) -> Category {
        match self {
            ProfilerCategory::Parameter => Category::Parameter,
            ProfilerCategory::OptimizerState => Category::OptimizerState,
            ProfilerCategory::Input => Category::Input,
            ProfilerCategory::Temporary => Category::Temporary,
            ProfilerCategory::Activation => Category::Activation,
            ProfilerCategory::Gradient => Category::Gradient,
            ProfilerCategory::AutogradDetail => Category::AutogradDetail,
            ProfilerCategory::Unknown => Category::None,
        }
    }
}

/// An action on a block, with its number in the profiler's export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Action {
    /// The block was allocated before the trace or the window.
    Preexisting = 1,
    /// The block was allocated.
    Create = 2,
    /// The block was changed in place by an op. This action requires io records.
    IncrementVersion = 3,
    /// The block was freed.
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
    /// The version before the action or, for an allocation, the new version.
    pub version: u32,
    /// The category of `version`.
    pub category: ProfilerCategory,
    /// The category after the action. If the action makes a new version, this is the category of that
    /// version.
    pub after: ProfilerCategory,
    /// True if one of the two categories was inferred from the flow of data.
    pub inferred: bool,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProfiledBlock {
    /// The `alloc_id`, or 0 if the trace has only the block's free.
    pub id: i64,
    /// The CUDA ordinal, or -2 (`Event::CPU`) for a CPU tensor.
    pub device: i32,
    /// The address of the block.
    pub addr: i64,
    /// The size in bytes that the allocator assigned.
    pub bytes: i64,
    /// The time of the allocation in ns, or `None` for a preexisting block.
    pub born_ns: Option<i64>,
    /// The time of the free in ns, or `None` if the block was not freed.
    pub died_ns: Option<i64>,
    /// The category that the trace recorded last.
    pub recorded: Category,
    /// True if `recorded` is from a `tag` row. Otherwise, the category was known at the allocation.
    pub tagged: bool,
}
