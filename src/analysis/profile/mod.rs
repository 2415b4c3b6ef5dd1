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

mod changes;
pub mod flow;
mod passes;
mod read;
pub mod timeline;
mod types;

pub use timeline::{Raw, Row};
pub use types::{Action, Block, Category, Change};

use memtrace_trace::config::Ops;
use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::state::categories::FlowCategories;
use crate::state::replay::Window;
use read::BlocksAndFlow;

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
        let changes = changes::changes(&reading, &categories);
        let BlocksAndFlow { blocks, has_io, has_tags, .. } = reading;
        Ok(Profile { blocks, has_io, has_tags, start_unix_ns: trace.meta.start_unix_ns, changes })
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

    /// The category of each block in the end, by `alloc_id`, where it is known.
    #[must_use]
    pub fn final_categories(&self) -> FlowCategories {
        let mut categories = FxHashMap::default();
        // By time, so a block's last category stays; its end may lie outside the part that was read.
        for change in &self.changes {
            if change.after != Category::Unknown {
                categories.insert(self.block(change).id, change.after.to_trace());
            }
        }
        FlowCategories::new(categories)
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

/// The categories that a replay of `trace` takes from the flow of data between ops: empty when the trace has tags, or
/// no io records. Otherwise this reads the whole trace, whatever window `options` has, as only the whole shows the
/// role of a block.
///
/// # Errors
/// When the trace cannot be read.
pub fn flow_categories(trace: &TraceFile, options: &Options) -> Result<FlowCategories> {
    if !needs_flow(trace) {
        return Ok(FlowCategories::default());
    }
    let whole = Options { window: Window::default(), ..options.clone() };
    Ok(Profile::of(trace, &whole)?.final_categories())
}

/// As [`flow_categories`], and the profile of the part of `trace` that `options` asks for: where that part is the
/// whole trace, one reading serves both.
///
/// # Errors
/// When the trace cannot be read.
pub fn profile_and_flow(trace: &TraceFile, options: &Options) -> Result<(Profile, FlowCategories)> {
    let profile = Profile::of(trace, options)?;
    let flow = if needs_flow(trace) && options.window == Window::default() {
        profile.final_categories()
    } else {
        flow_categories(trace, options)?
    };
    Ok((profile, flow))
}

/// Whether the roles of blocks are known from the flow of data alone: the trace has io records, and no Python part
/// that tags parameters.
fn needs_flow(trace: &TraceFile) -> bool {
    trace.meta.ops == Ops::Io.name() && !trace.meta.modules
}

/// Said of a trace without io records.
pub const NO_IO: &str = "no io records in the trace (MEMTRACE_OPS=io makes them): no INCREMENT_VERSION, and categories are those of the rows";
/// Said of a trace with them.
pub const RULE: &str =
    "* inferred from the flow of data between ops, by torch.profiler's passes (MEMTRACE_OPS=io)";

#[cfg(test)]
mod tests;
