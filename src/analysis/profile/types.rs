//! The profiler's categories and actions, and the blocks that they are about.

use memtrace_trace::Category as TraceCategory;

/// The profiler's categories, in the order of its export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Category {
    /// A parameter.
    Parameter = 0,
    /// Held by an optimizer.
    OptimizerState = 1,
    /// Given to the model: the batch, and buffers.
    Input = 2,
    /// Made and dropped inside one op.
    Temporary = 3,
    /// Made in the forward pass.
    Activation = 4,
    /// A gradient.
    Gradient = 5,
    /// Made by autograd for itself.
    AutogradDetail = 6,
    /// `None`, which the profiler draws as "Unknown".
    Unknown = 7,
}

impl Category {
    /// All, by their number in the export.
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

    /// As the profiler writes it.
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

    /// The colour that the profiler draws it in, a name of matplotlib's and of CSS.
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

    /// The profiler's category of one of the trace's: it has none for a module's buffers, whose data flow
    /// is that of an input, and none for what a user registers.
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
            TraceCategory::Other | TraceCategory::None => Category::Unknown,
        }
    }

    /// The trace's category of one of the profiler's.
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

/// What happened to a block, by its number in the profiler's export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Action {
    /// It was there before the recording, or before the window.
    Preexisting = 1,
    /// It was allocated.
    Create = 2,
    /// An op changed it in place. Only with io records.
    IncrementVersion = 3,
    /// It was given back.
    Destroy = 4,
}

impl Action {
    /// All, by their number.
    pub const ALL: [Action; 4] =
        [Action::Preexisting, Action::Create, Action::IncrementVersion, Action::Destroy];

    /// As the profiler writes it.
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
    /// ns since the trace's start; -1 of a block that was there before.
    pub time_ns: i64,
    /// What happened.
    pub action: Action,
    /// The block, a place in [`Profile::blocks`].
    pub block: u32,
    /// The version that it had; of a creation the one that it gets.
    pub version: u32,
    /// The category of that version.
    pub category: Category,
    /// The category that it has then: of the next version when the action makes one.
    pub after: Category,
    /// Was one of the two inferred from the flow of data?
    pub inferred: bool,
}

/// A block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// The `alloc_id`; 0 when only its free is in the trace.
    pub id: i64,
    /// Its CUDA ordinal; -1 for a CPU tensor.
    pub device: i32,
    /// Its address.
    pub addr: i64,
    /// Its size in bytes, as the allocator gave it.
    pub bytes: i64,
    /// When it was allocated, ns; `None` for one that was there before.
    pub born_ns: Option<i64>,
    /// When it was given back, ns.
    pub died_ns: Option<i64>,
    /// What its rows say that it is for, by the last of them.
    pub recorded: TraceCategory,
    /// Is that from a `tag` row? Else it is what was known at its birth.
    pub tagged: bool,
}
