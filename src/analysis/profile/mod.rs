//! The memory profile of `torch.profiler`, computed from a trace: its eight categories, its actions on each
//! block, and the timelines of its exports (`torch/profiler/_memory_profiler.py`).
//!
//! [`Profile::read`] reads a trace. [`Profile::actions`] returns the profiler's raw rows, and
//! [`Profile::timeline`] the coalesced rows. With io records (`MEMTRACE_OPS=io`), the profiler's own passes
//! derive the categories from the flow of data between ops ([`flow`]), and a block that an op changes in
//! place gets a new version. Without io records, a block has the category of its rows and no versions.
//!
//! Differences from the profiler: a trace has every block, even if no op used it during the recording. A
//! block to which the flow gives no category has the category of its rows here, and no category in the
//! profiler.

mod changes;
pub mod flow;
mod passes;
mod read;
pub mod timeline;
mod types;

pub use timeline::{Raw, Row};
pub use types::{Action, Change, ProfiledBlock, ProfilerCategory};

use memtrace_trace::config::Ops;
use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::state::categories::KnownCategories;
use crate::state::replay::Window;
use read::BlocksAndFlow;

/// The memory profile of one process.
#[derive(Debug, Default)]
pub struct Profile {
    /// Every block, in the order of its first row.
    pub blocks: Vec<ProfiledBlock>,
    /// True if the trace has io records. Without io records, there are no versions and no inferred
    /// categories.
    pub has_io: bool,
    /// True if the trace has tags.
    pub has_tags: bool,
    /// The Unix time of the start of the trace, in ns. The sum of this and `time_ns` is the time on the
    /// profiler's clock.
    pub start_unix_ns: i64,
    changes: Vec<Change>,
}

impl Profile {
    /// Reads the part of a trace that the window in `options` selects, and classifies its blocks. Blocks that
    /// are live when the window begins are [`Action::Preexisting`]. Uses about 60 bytes of memory per row.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub fn read(trace: &TraceFile, options: &Options) -> Result<Profile> {
        let reading = read::read(trace, options)?;
        let categories = passes::classify(&reading);
        let changes = changes::changes(&reading, &categories);
        let BlocksAndFlow { blocks, has_io, has_tags, .. } = reading;
        Ok(Profile { blocks, has_io, has_tags, start_unix_ns: trace.meta.start_unix_ns, changes })
    }

    /// Returns the actions on blocks of a device, in the profiler's order, which is by time and then by
    /// action.
    pub fn actions(&self, device: i32) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(move |change| self.block(change).device == device)
    }

    /// Returns the block of an action.
    #[must_use]
    pub fn block(&self, change: &Change) -> &ProfiledBlock {
        &self.blocks[change.block as usize]
    }

    /// Returns the devices with blocks, in order; negative for CPU tensors.
    #[must_use]
    pub fn devices(&self) -> Vec<i32> {
        let all: std::collections::BTreeSet<i32> = self.blocks.iter().map(|block| block.device).collect();
        all.into_iter().collect()
    }

    /// Returns the final category, if known, of each block, by `alloc_id`.
    #[must_use]
    pub fn final_categories(&self) -> KnownCategories {
        let mut categories = FxHashMap::default();
        // The changes are in order of time, so the last category of each block remains. This does not rely on
        // the free of the block, which may be outside the part that was read.
        for change in &self.changes {
            if change.after != ProfilerCategory::Unknown {
                categories.insert(self.block(change).id, change.after.to_trace());
            }
        }
        if categories.is_empty() {
            KnownCategories::default()
        } else {
            KnownCategories::new(categories, RULE)
        }
    }

    /// Returns notes on missing data and on inferred categories.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.has_io {
            notes.push(NO_IO.to_owned());
        } else {
            notes.push(RULE.to_owned());
        }
        if !self.has_tags {
            notes.push(
                "no tags in the trace: the note above also applies to parameters, gradients and optimizer \
                 state"
                    .to_owned(),
            );
        }
        notes
    }
}

/// Returns the categories that a replay of `trace` takes from the flow of data between ops. They are empty
/// unless the trace has io records and no tags. The flow is read from the whole trace, regardless of the
/// window in `options`, because only the whole trace shows the role of a block.
///
/// # Errors
/// When the trace cannot be read.
pub fn flow_categories(trace: &TraceFile, options: &Options) -> Result<KnownCategories> {
    if !needs_flow(trace) {
        return Ok(KnownCategories::default());
    }
    let whole = Options { window: Window::default(), ..options.clone() };
    Ok(Profile::read(trace, &whole)?.final_categories())
}

/// Returns the profile of the part of `trace` that `options` selects, and [`flow_categories`]. If this part
/// is the whole trace, one reading serves both.
///
/// # Errors
/// When the trace cannot be read.
pub fn profile_and_flow(trace: &TraceFile, options: &Options) -> Result<(Profile, KnownCategories)> {
    let profile = Profile::read(trace, options)?;
    let flow = if needs_flow(trace) && options.window == Window::default() {
        profile.final_categories()
    } else {
        flow_categories(trace, options)?
    };
    Ok((profile, flow))
}

/// Returns true if the roles of blocks are known only from the flow of data. In this case, the trace has io
/// records, but the Python part that tags parameters did not run.
fn needs_flow(trace: &TraceFile) -> bool {
    trace.meta.ops == Ops::Io.name() && !trace.meta.modules
}

/// The note on a trace without io records.
pub const NO_IO: &str = "without MEMTRACE_OPS=io, changes in place (INCREMENT_VERSION) are missing, and \
                         categories are copied from the rows";
/// The note on a trace with io records.
pub const RULE: &str =
    "* inferred from the flow of data between ops, by torch.profiler's passes (MEMTRACE_OPS=io)";

#[cfg(test)]
mod tests;
