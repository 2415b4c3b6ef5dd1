//! The growth of the memory in use, as nvidia-smi shows it, split into four parts that sum to it.
//!
//! Memory in use is the memory that torch's allocator reserves, and the memory outside of it. The reserved
//! memory has three parts. *Kept* is live at the end of a step. *Larger steps* is the memory that the largest
//! step so far needed in addition. *Cached* is the rest, which no single step has needed. After `empty_cache`
//! has freed memory, *larger steps* is at most what is still reserved. The growth of a part is the difference
//! between two levels; see [`crate::state::levels`].
//!
//! `part`, `needs` and `measured` measure the growth from the levels alone; `forecast` continues it. `owners` and
//! `cache_holders` find whose memory grew, and `changes` keeps the largest. `reasons`, `print` and `json` answer;
//! `series` is for charts and digests.

mod cache_holders;
mod changes;
mod forecast;
mod json;
mod limits;
mod measured;
mod needs;
mod owners;
mod part;
mod print;
mod reasons;
mod series;

use memtrace_trace::Category;
use memtrace_trace::meta::Meta;
use memtrace_trace::units::Unit;

use self::cache_holders::FreePlaces;
pub(crate) use self::cache_holders::Holders;
use self::changes::{Change, Changes};
use self::forecast::Forecast;
pub(super) use self::limits::FEWEST_STEPS;
use self::measured::MeasuredGrowth;
pub(crate) use self::owners::owner_name;
use self::owners::{changes_between_peaks, new_owners};
use self::part::GrowthPart;
pub(crate) use self::series::DeviceParts;
pub use self::series::GrowthCurve;
use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::state::block::Block;
use crate::state::categories::KnownCategories;
use crate::state::levels::{DeviceLevels, Levels};
use crate::state::replay_trace::Replayed;

/// The maximum number of ops that are named as the reason why sizes vary.
const MOST_OPS: usize = 3;

/// The growth of the memory in use of one device, and its causes.
pub(super) struct LevelGrowth {
    measured: MeasuredGrowth,
    capacity: i64,
    forecast: Forecast,
    is_expandable: bool,
    /// True if the verdict of `memtrace oom` is memory that the program keeps without need when it runs out
    /// of memory.
    is_kept_at_oom: bool,
    /// True if the program trains: it has gradients before the last step.
    trains: bool,
    /// The number of different sizes of large blocks, and the number of those that occur in only one step.
    sizes: (usize, usize),
    /// The ops with most of the sizes that occur in only one step, and the number of these sizes per op.
    size_ops: Vec<(String, usize)>,
    /// The distribution of the allocator's free memory.
    free: FreePlaces,
    changes: Changes,
}

impl LevelGrowth {
    /// Returns the growth of a device, or `None` if the trace is too short. `symbols` must be from the reading
    /// that produced the levels. The owners of the memory are unknown before [`LevelGrowth::explain`].
    pub(super) fn new(
        device: &DeviceLevels,
        symbols: &SymbolTable,
        meta: &Meta,
        options: &Options,
    ) -> Option<LevelGrowth> {
        let measured = MeasuredGrowth::new(device, is_chosen(options))?;
        let capacity = meta.total_bytes(device.ordinal);
        let first = measured.first().step;
        let size_ops = device.ops_of_single_sizes(first, MOST_OPS, symbols).into_iter();
        let size_ops = size_ops.map(|(op, sizes)| (op.to_string(), sizes));
        Some(LevelGrowth {
            forecast: Forecast::new(&measured, capacity),
            capacity,
            is_expandable: meta.allocator.option("expandable_segments") == Some("True"),
            is_kept_at_oom: false,
            trains: false,
            sizes: device.sizes_after(first),
            size_ops: size_ops.filter(|(op, _)| !op.starts_with('(')).collect(),
            free: FreePlaces::default(),
            changes: Changes::default(),
            measured,
        })
    }

    /// Finds the owners of the memory that grew in each part. For larger steps, this reads the trace again.
    /// `is_kept_at_oom` is true if `memtrace oom` finds memory that the program keeps without need.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn explain(
        &mut self,
        trace: &TraceFile,
        options: &Options,
        known: &KnownCategories,
        (before_last, holders): (&Replayed, &Holders),
        is_kept_at_oom: bool,
    ) -> Result<()> {
        let measured = &self.measured;
        self.is_kept_at_oom = is_kept_at_oom;
        self.free = holders.free_places(before_last, measured.ordinal());
        let is_gradient = |block: &Block| block.owner.category == Category::Gradient;
        self.trains = before_last.replay.live().values().any(is_gradient);
        for part in measured.growing() {
            let changes = match part {
                GrowthPart::LargerSteps => changes_between_peaks(measured, trace, options, known)?,
                GrowthPart::Kept if !measured.is_by_time() => new_owners(measured, before_last),
                GrowthPart::Outside if !measured.is_by_time() => {
                    holders.new_libraries(&before_last.symbols, measured.ordinal(), measured.first().step)
                }
                _ => continue,
            };
            self.changes.set(part, changes);
        }
        Ok(())
    }

    /// Returns true if a part grew.
    pub(super) fn has_cause(&self) -> bool {
        self.measured.cause().is_some()
    }

    /// Returns true if the kept memory was allocated in at most two steps. Returns false if no change was
    /// found.
    fn is_once(&self) -> bool {
        let kept = self.changes.in_part(GrowthPart::Kept);
        !kept.is_empty() && kept.iter().all(Change::is_of_few_steps) && !self.measured.is_rising()
    }

    /// Returns the cached memory in bytes that kept memory can still fill, if kept memory is not part of the growth
    /// that is shown; otherwise 0.
    pub(super) fn hides_kept(&self) -> i64 {
        let is_shown = self.measured.growing().contains(&GrowthPart::Kept)
            || matches!(self.forecast, Forecast::WithinCache { .. });
        if is_shown { 0 } else { self.measured.now(GrowthPart::Cached).max(0) }
    }

    /// Returns true if kept memory has grown, and not only once.
    pub(super) fn keeps_more(&self) -> bool {
        self.measured.growing().contains(&GrowthPart::Kept) && !self.is_once()
    }

    /// Returns true if kept memory rises from step to step, although most of it is from one or two steps: each
    /// step replaces it with more.
    pub(super) fn is_replaced(&self) -> bool {
        let most = self.changes.in_part(GrowthPart::Kept).first();
        most.is_some_and(Change::is_of_few_steps) && self.measured.is_rising()
    }

    /// Returns true if at least three quarters of the growth of larger steps are results that an op outside the
    /// model joins.
    fn is_joined(&self) -> bool {
        let most = self.changes.in_part(GrowthPart::LargerSteps).first();
        most.is_some_and(|most| {
            ["aten::cat in (script)", "aten::stack in (script)"].contains(&most.what())
                && 4 * most.growth() >= 3 * self.measured.bytes_of(GrowthPart::LargerSteps)
        })
    }
}

/// Returns a sentence for each GPU on which a part grew by at least 5% of the memory in use.
#[must_use]
pub fn growth_lines(levels: &Levels, units: Unit) -> Vec<String> {
    let all = levels.devices.iter().filter_map(|device| MeasuredGrowth::new(device, false));
    all.filter_map(|measured| measured.line(units)).collect()
}

/// Returns true if the user chose where the growth begins.
fn is_chosen(options: &Options) -> bool {
    options.window.from_step > i64::MIN || options.window.from_ns > i64::MIN
}
