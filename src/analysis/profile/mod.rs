//! What `torch.profiler`'s memory profile says of a run, from its trace: the eight categories, the actions
//! on each block, and the timeline that its exports hold (`torch/profiler/_memory_profiler.py`).
//!
//! [`Profile::of`] reads a trace; [`Profile::actions`] are the profiler's raw rows, [`Profile::timeline`]
//! the coalesced ones. With the `io` records of `MEMTRACE_OPS=io` the categories come from the flow of data
//! between ops, in the profiler's own passes ([`flow`]), and a block that an op changes gets a new version.
//! Without them a block has the category that its rows give it, and no version.
//!
//! Where the two differ: the trace knows every block, also those that no op touched while it was recorded;
//! and what the flow leaves without a category has the one of the rows, where the profiler says nothing.

pub mod flow;
mod passes;
mod read;
pub mod timeline;

pub use timeline::{Raw, Row};

use memtrace_trace::Category as Told;
use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;

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
    pub const fn of(told: Told) -> Category {
        match told {
            Told::Parameter => Category::Parameter,
            Told::OptimizerState => Category::OptimizerState,
            Told::Input | Told::Buffer => Category::Input,
            Told::Temporary => Category::Temporary,
            Told::Activation => Category::Activation,
            Told::Gradient => Category::Gradient,
            Told::AutogradDetail => Category::AutogradDetail,
            Told::Other | Told::None => Category::Unknown,
        }
    }

    /// The trace's category of one of the profiler's.
    #[must_use]
    pub const fn told(self) -> Told {
        match self {
            Category::Parameter => Told::Parameter,
            Category::OptimizerState => Told::OptimizerState,
            Category::Input => Told::Input,
            Category::Temporary => Told::Temporary,
            Category::Activation => Told::Activation,
            Category::Gradient => Told::Gradient,
            Category::AutogradDetail => Told::AutogradDetail,
            Category::Unknown => Told::None,
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
    pub told: Told,
    /// Is that from a `tag` row? Else it is what was known at its birth.
    pub tagged: bool,
}

/// The memory profile of one process.
#[derive(Debug, Default)]
pub struct Profile {
    /// Every block, in the order in which the trace first has it.
    pub blocks: Vec<Block>,
    /// Has the trace io records? Else there are no versions, and nothing is inferred from data flow.
    pub has_io: bool,
    /// Has the trace tags?
    pub has_tags: bool,
    /// Wall-clock ns since 1970 at the trace's start: `time_ns` plus this is the profiler's own clock.
    pub start_unix_ns: i64,
    changes: Vec<Change>,
}

impl Profile {
    /// Reads a trace and classifies its blocks. A window or a range of steps in `options` limits it: what
    /// was live when it opens is [`Action::Preexisting`]. Its memory grows with the trace, by some 60 bytes a row.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub fn of(trace: &TraceFile, options: &Options) -> Result<Profile> {
        let reading = read::read(trace, options)?;
        let categories = passes::classify(&reading);
        Ok(timeline::profile(trace, reading, &categories))
    }

    /// The actions on a device, in the profiler's order: by time, then by action.
    pub fn actions(&self, device: i32) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(move |change| self.block(change).device == device)
    }

    /// The block of an action.
    #[must_use]
    pub fn block(&self, change: &Change) -> &Block {
        &self.blocks[change.block as usize]
    }

    /// The devices that have blocks, in order; -1 for CPU tensors.
    #[must_use]
    pub fn devices(&self) -> Vec<i32> {
        let all: std::collections::BTreeSet<i32> = self.blocks.iter().map(|block| block.device).collect();
        all.into_iter().collect()
    }

    /// What each block is for in the end, by `alloc_id`, where that is known.
    #[must_use]
    pub fn told(&self) -> FxHashMap<i64, Told> {
        let mut told = FxHashMap::default();
        // By time, so the last word on a block stays; its end may be outside of what was read.
        for change in &self.changes {
            if change.after != Category::Unknown {
                told.insert(self.block(change).id, change.after.told());
            }
        }
        told
    }

    /// What a reader should know: what is missing, and what was inferred.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.has_io {
            notes.push(NO_IO.to_owned());
        } else {
            notes.push(RULE.to_owned());
        }
        if !self.has_tags {
            notes.push("no tags in the trace: parameters, gradients and optimizer state are told apart as far as the above goes".to_owned());
        }
        notes
    }
}

/// Said of a trace without io records.
pub const NO_IO: &str = "no io records in the trace (MEMTRACE_OPS=io makes them): no INCREMENT_VERSION, and categories are those of the rows";
/// Said of a trace with them.
pub const RULE: &str =
    "* inferred from the flow of data between ops, by torch.profiler's passes (MEMTRACE_OPS=io)";

#[cfg(test)]
mod tests;
