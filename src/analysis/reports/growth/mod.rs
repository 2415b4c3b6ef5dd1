//! The growth of the memory in use, as nvidia-smi shows it, split into four parts that sum to it.
//!
//! Memory in use is the memory that torch's allocator reserves, and the memory outside of it. The reserved
//! memory has three parts. *Kept* is live at the end of a step. *Larger steps* is the memory that the largest
//! step so far needed in addition. *Cached* is the rest, which no single step has needed. After `empty_cache`
//! has freed memory, *larger steps* is at most what is still reserved. The growth of a part is the difference
//! between two levels; see [`crate::state::levels`].

mod cache_holders;
mod forecast;
mod series;
mod text;

use std::collections::BTreeMap;

use memtrace_trace::Category;
use memtrace_trace::meta::Meta;
use memtrace_trace::units::Unit;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use self::cache_holders::FreePlaces;
pub(crate) use self::cache_holders::Holders;
use self::forecast::Forecast;
pub(crate) use self::series::DeviceParts;
pub use self::series::GrowthCurve;
use crate::error::Result;
use crate::options::{Options, Window};
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::numbers::duration;
use crate::state::block::Block;
use crate::state::categories::KnownCategories;
use crate::state::fitted_line::fit;
use crate::state::group::category;
use crate::state::levels::{DeviceLevels, Level, Levels};
use crate::state::module_layers::Layers;
use crate::state::replay::{MemoryKind, Metric};
use crate::state::replay_trace::{Replayed, replay_trace};

/// Growth is computed only from at least this many finished steps or, without steps, from at least
/// [`FEWEST_SLICES`] slices of time.
pub(super) const FEWEST_STEPS: usize = 3;
const FEWEST_SLICES: usize = 8;
/// Growth counts as flat if it is less than this many bytes (the first number), or less than one part in this
/// many of the memory in use (the second number).
const FLAT: (i64, i64) = (2 << 20, 100);
/// `summary` reports growth only if its largest part is at least this fraction of the memory in use: one part
/// in 20.
const WORTH_A_LINE: i64 = 20;
/// The maximum number of levels in the JSON of a device, in addition to the last level.
const MOST_POINTS: usize = 200;
/// The number of groups that are listed for a part.
const SHOWN: usize = 3;

/// A part of the growth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GrowthPart {
    /// Live at the ends of steps.
    Kept,
    /// Needed only within a step, by the largest step so far.
    LargerSteps,
    /// Reserved, and needed by no step.
    Cached,
    /// Outside torch's allocator.
    Outside,
}

impl GrowthPart {
    pub(super) const ALL: [GrowthPart; 4] =
        [GrowthPart::Kept, GrowthPart::LargerSteps, GrowthPart::Cached, GrowthPart::Outside];

    pub(super) fn name(self) -> &'static str {
        match self {
            GrowthPart::Kept => "kept",
            GrowthPart::LargerSteps => "larger steps",
            GrowthPart::Cached => "cached",
            GrowthPart::Outside => "outside PyTorch",
        }
    }

    fn key(self) -> &'static str {
        match self {
            GrowthPart::Kept => "kept",
            GrowthPart::LargerSteps => "larger_steps",
            GrowthPart::Cached => "cached",
            GrowthPart::Outside => "outside",
        }
    }

    fn about(self) -> &'static str {
        match self {
            GrowthPart::Kept => "live when a step ends",
            GrowthPart::LargerSteps => "what the largest step so far needed beyond the kept memory",
            GrowthPart::Cached => "reserved by PyTorch's allocator, and needed by no step",
            GrowthPart::Outside => "context, kernels, libraries, other processes",
        }
    }
}

/// Returns the parts of the memory in use at each level, in the order of [`GrowthPart::ALL`].
fn parts_of(levels: &[Level]) -> Vec<[i64; 4]> {
    let mut highest = 0;
    levels
        .iter()
        .map(|level| {
            highest = level.peak.max(highest).min(level.reserved).max(level.allocated);
            [level.allocated, highest - level.allocated, level.reserved - highest, level.outside]
        })
        .collect()
}

/// Returns the memory that each level needed beyond the kept memory: its peak, minus the memory at its beginning
/// or at its end, whichever is more. A step that frees what earlier steps have kept does not need that memory.
fn needs_of(levels: &[Level]) -> Vec<i64> {
    let end = |at: usize, back: usize| at.checked_sub(back).map_or(0, |at| levels[at].allocated);
    let need = |(at, level): (usize, &Level)| {
        // The lowest total within a slice of time may be in the middle of a step, so it says nothing about the
        // beginning of the next slice.
        let before = if level.step < 0 { 0 } else { end(at, 1) };
        // A step that frees what several steps have kept has first kept about as much as the step before.
        let rise = (before - end(at, 2)).max(0);
        let frees_all = at > 1 && before - level.allocated > FEWEST_STEPS as i64 * rise;
        let kept = level.allocated.max(if frees_all { before + rise } else { before });
        (level.peak - kept).max(0)
    };
    levels.iter().enumerate().map(need).collect()
}

/// How the memory that a step needs in addition to the kept memory changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    Rising,
    OneLarge,
    Varying,
}

/// The memory of an owner at two levels, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Change {
    what: String,
    before: i64,
    after: i64,
    /// The number of steps in which the new memory was allocated; 0 if they were not counted.
    steps: usize,
}

impl Change {
    fn line(&self, units: Unit) -> String {
        let Change { what, before, after, .. } = self;
        let more = units.show(after - before);
        if *before == 0 {
            format!("{more} of {what}")
        } else {
            format!("{more} more of {what}: {} before, now {}", units.show(*before), units.show(*after))
        }
    }

    fn json(&self) -> Value {
        json!({ "what": self.what, "before_bytes": self.before, "after_bytes": self.after, "steps": self.steps })
    }
}

/// The growth of the memory in use of one device.
pub(super) struct Growth {
    ordinal: i32,
    /// True if the levels are slices of time instead of steps.
    by_time: bool,
    levels: Vec<Level>,
    all: Vec<[i64; 4]>,
    /// The memory that each level needed beyond the kept memory; see [`needs_of`].
    needs: Vec<i64>,
    /// The index of the first level that counts. Growth before that level only fills caches.
    from: usize,
    /// True if the last level is an unfinished step. Such a step is a level only if it used more memory than
    /// the last finished step.
    is_cut: bool,
    capacity: i64,
    forecast: Forecast,
    is_expandable: bool,
    /// True if the verdict of `memtrace oom` is memory that the program keeps without need when it runs out
    /// of memory.
    pub(super) is_kept_at_oom: bool,
    /// True if the program trains: it has gradients before the last step.
    trains: bool,
    /// The number of different sizes of large blocks, and the number of those that occur in only one step.
    sizes: (usize, usize),
    /// The ops with most of the sizes that occur in only one step, and the number of these sizes per op.
    size_symbols: Vec<(Symbol, usize)>,
    size_ops: Vec<(String, usize)>,
    /// The distribution of the allocator's free memory.
    free: FreePlaces,
    /// For each part, in the order of [`GrowthPart::ALL`]: the owners whose memory changed most. Empty before
    /// [`Growth::explain`].
    changes: [Vec<Change>; 4],
}

impl Growth {
    /// Returns the growth of a device, or `None` if the trace is too short. Growth is measured after the
    /// second step (or the first quarter of the slices), because memory before that fills caches; with
    /// `is_chosen`, after the first step.
    pub(super) fn new(device: &DeviceLevels, meta: &Meta, is_chosen: bool) -> Option<Growth> {
        let by_time = device.steps.is_empty() && device.unfinished.step < 0;
        let (found, fewest) =
            if by_time { (device.slices().len(), FEWEST_SLICES) } else { (device.steps.len(), FEWEST_STEPS) };
        if found < fewest {
            return None;
        }
        let mut levels = if by_time { device.slices().to_vec() } else { device.steps.clone() };
        let last = levels.last()?;
        // If the unfinished step used more memory than the last finished step, it counts as one more level,
        // at its moment of highest use. This happens if the run ran out of memory, or if a validation or a
        // save followed the last step. The blocks that are live at that moment do not count as growth.
        let is_cut = !by_time && device.unfinished.used() > last.used();
        if is_cut {
            let allocated = last.allocated.min(device.unfinished.allocated);
            levels.push(Level { allocated, ..device.unfinished });
        }
        let from = if is_chosen {
            0
        } else if by_time {
            levels.len() / 4
        } else {
            1
        };
        let all = parts_of(&levels);
        let needs = needs_of(&levels);
        let capacity = meta.total_bytes(device.ordinal);
        let is_expandable = meta.allocator.option("expandable_segments") == Some("True");
        let latest = if by_time { from } else { forecast::last_stretch(&levels, from) };
        let forecast = Forecast::of_hidden(&levels, &all, latest, capacity, by_time)
            .unwrap_or_else(|| Forecast::of(&levels, latest, capacity, by_time));
        let sizes = device.sizes_after(levels[from].step);
        let size_symbols = device.ops_of_single_sizes(levels[from].step, SHOWN);
        let changes = Default::default();
        let ordinal = device.ordinal;
        Some(Growth {
            ordinal,
            by_time,
            levels,
            all,
            needs,
            from,
            is_cut,
            capacity,
            forecast,
            is_expandable,
            is_kept_at_oom: false,
            trains: false,
            sizes,
            size_symbols,
            size_ops: Vec::new(),
            free: FreePlaces::default(),
            changes,
        })
    }

    /// Looks up the names of the ops of `size_symbols`. `symbols` must be from the reading that produced the
    /// levels.
    pub(super) fn name_ops(&mut self, symbols: &SymbolTable) {
        let named = std::mem::take(&mut self.size_symbols).into_iter();
        let named = named.map(|(op, sizes)| (symbols.or_dash(op), sizes));
        self.size_ops = named.filter(|(op, _)| !op.starts_with(['-', '('])).collect();
    }

    fn first(&self) -> &Level {
        &self.levels[self.from]
    }

    fn last(&self) -> &Level {
        &self.levels[self.levels.len() - 1]
    }

    /// Returns the growth of a part, in bytes.
    pub(super) fn bytes_of(&self, part: GrowthPart) -> i64 {
        let at = part as usize;
        self.all[self.all.len() - 1][at] - self.all[self.from][at]
    }

    fn flat(&self) -> i64 {
        FLAT.0.max(self.last().used() / FLAT.1)
    }

    /// Returns the parts that grew, with the largest growth first. If the memory in use is flat, larger steps
    /// and the cache only took memory that was already in use, so these two parts do not count.
    pub(super) fn growing(&self) -> Vec<GrowthPart> {
        let grew = self.last().used() - self.first().used() >= self.flat();
        let counts = |part: &GrowthPart| {
            self.bytes_of(*part) >= self.flat()
                && (grew || matches!(part, GrowthPart::Kept | GrowthPart::Outside))
        };
        let mut all: Vec<GrowthPart> = GrowthPart::ALL.into_iter().filter(counts).collect();
        all.sort_by_key(|part| -self.bytes_of(*part));
        all
    }

    /// Returns the part that grew most, which explains the growth of the memory in use; `None` if no part
    /// grew.
    pub(super) fn cause(&self) -> Option<GrowthPart> {
        self.growing().first().copied()
    }

    fn point(&self, level: &Level) -> String {
        if self.by_time { duration(level.ts_ns) } else { format!("step {}", level.step) }
    }

    /// Returns one line for `summary`, or `None` if no part grew by at least 5% of the memory in use.
    fn short(&self, units: Unit) -> Option<String> {
        let part = self.cause()?;
        if self.bytes_of(part).saturating_mul(WORTH_A_LINE) < self.last().used() {
            return None;
        }
        let (first, last) = (self.first(), self.last());
        let parts: Vec<String> = self
            .growing()
            .into_iter()
            .map(|part| format!("{} {}", part.name(), units.show(self.bytes_of(part))))
            .collect();
        Some(format!(
            "GPU {}: memory in use grew from {} ({}) to {} ({}): {}",
            self.ordinal,
            units.show(first.used()),
            self.point(first),
            units.show(last.used()),
            self.point(last),
            parts.join(", "),
        ))
    }

    /// Finds the owners of the memory that grew in each part, and stores them in `changes`. For larger steps,
    /// this reads the trace again.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn explain(
        &mut self,
        trace: &TraceFile,
        options: &Options,
        known: &KnownCategories,
        (before_last, holders): (&Replayed, &Holders),
    ) -> Result<()> {
        self.free = holders.free_places(before_last, self.ordinal);
        let is_gradient = |block: &Block| block.owner.category == Category::Gradient;
        self.trains = before_last.replay.live().values().any(is_gradient);
        for part in self.growing() {
            let mut changes = match part {
                GrowthPart::LargerSteps => self.between_peaks(trace, options, known)?,
                GrowthPart::Kept if !self.by_time => self.new_owners(before_last),
                GrowthPart::Outside if !self.by_time => {
                    holders.new_libraries(&before_last.symbols, self.ordinal, self.first().step)
                }
                _ => continue,
            };
            changes.retain(|change| change.after > change.before);
            changes.sort_by(|a, b| (b.after - b.before, &a.what).cmp(&(a.after - a.before, &b.what)));
            changes.truncate(SHOWN);
            self.changes[part as usize] = changes;
        }
        Ok(())
    }

    /// Returns the memory that is live at the highest peak, by owner, compared with the highest peak up to
    /// the first level that counts. Blocks of earlier steps are kept memory, so they do not count.
    fn between_peaks(
        &self,
        trace: &TraceFile,
        options: &Options,
        known: &KnownCategories,
    ) -> Result<Vec<Change>> {
        let sums = |window: Window| -> Result<FxHashMap<String, i64>> {
            let first = if self.by_time { i64::MIN } else { window.from_step };
            let options = Options { window, ..options.clone() };
            let columns = Columns::of(&[]);
            let at = replay_trace(trace, columns, &options, Metric::Allocated, known.clone(), |_, _| {})?;
            let layers = at.replay.classes.layers([], &at.symbols);
            let mut sums = FxHashMap::default();
            for block in at.replay.at_peak(self.ordinal, false) {
                if block.owner.step < first {
                    continue;
                }
                *sums.entry(owner_name(&at.symbols, &layers, &block)).or_default() += block.bytes;
            }
            Ok(sums)
        };
        let (before, after) = self.two_peaks();
        let (before, after) = (sums(before)?, sums(after)?);
        let change = |(what, after): (String, i64)| {
            let before = before.get(&what).copied().unwrap_or(0);
            Change { what, before, after, steps: 0 }
        };
        Ok(after.into_iter().map(change).collect())
    }

    /// Returns two windows, each with one step (or slice of time): the one with the highest peak up to the
    /// first level that counts, and the one with the highest peak after this level.
    fn two_peaks(&self) -> (Window, Window) {
        let highest =
            |levels: &[Level]| levels.iter().copied().max_by_key(|level| level.peak).unwrap_or_default();
        let before = highest(&self.levels[..=self.from]);
        let after = highest(&self.levels[self.from + 1..]);
        let window = |level: Level| {
            if self.by_time {
                let width = self.levels.get(1).map_or(0, |second| second.ts_ns - self.levels[0].ts_ns);
                Window { from_ns: level.ts_ns - width, to_ns: level.ts_ns, ..Window::default() }
            } else {
                Window { from_step: level.step, to_step: level.step, ..Window::default() }
            }
        };
        (window(before), window(after))
    }

    /// Returns the live memory that was allocated after the first level that counts, by owner.
    fn new_owners(&self, before_last: &Replayed) -> Vec<Change> {
        let layers = before_last.replay.classes.layers([], &before_last.symbols);
        let mut owners: BTreeMap<String, (i64, Vec<i64>)> = BTreeMap::new();
        let since = self.first().step;
        let live = before_last.replay.live().values();
        for block in live.filter(|block| block.kind == MemoryKind::Block && block.device == self.ordinal) {
            if block.owner.step > since {
                let name = owner_name(&before_last.symbols, &layers, block);
                let (bytes, steps) = owners.entry(name).or_default();
                *bytes += block.bytes;
                steps.push(block.owner.step);
            }
        }
        let change = |(what, (after, mut steps)): (String, (i64, Vec<i64>))| {
            steps.sort_unstable();
            steps.dedup();
            Change { what, before: 0, after, steps: steps.len() }
        };
        owners.into_iter().map(change).collect()
    }

    /// Returns how the memory that the steps need changes.
    fn shape(&self) -> Shape {
        let needs: Vec<f64> = self.needs[self.from..].iter().map(|need| *need as f64).collect();
        let most = needs.iter().copied().fold(0.0, f64::max);
        let mut sorted = needs.clone();
        sorted.sort_by(f64::total_cmp);
        let median = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        let near = needs.iter().filter(|need| **need > (median + most) / 2.0).count();
        let points: Vec<(f64, f64)> = needs.iter().enumerate().map(|(at, need)| (at as f64, *need)).collect();
        let line = fit(&points);
        if line.slope > 0.0 && line.r2 > 0.5 {
            Shape::Rising
        } else if near <= 1.max(needs.len() / 20) {
            Shape::OneLarge
        } else {
            Shape::Varying
        }
    }

    /// Returns true if the kept memory was allocated in at most two steps. Returns false if no change was
    /// found.
    fn is_once(&self) -> bool {
        let kept = &self.changes[GrowthPart::Kept as usize];
        let is_of_few = |change: &Change| (1..FEWEST_STEPS).contains(&change.steps);
        !kept.is_empty() && kept.iter().all(is_of_few) && !self.is_rising()
    }

    /// Returns the cached memory in bytes that kept memory can still fill, if kept memory is not part of the growth
    /// that is shown; otherwise 0.
    pub(super) fn hides_kept(&self) -> i64 {
        let is_shown = self.growing().contains(&GrowthPart::Kept)
            || matches!(self.forecast, Forecast::WithinCache { .. });
        if is_shown { 0 } else { self.all[self.all.len() - 1][GrowthPart::Cached as usize].max(0) }
    }

    /// Returns true if kept memory has grown, and not only once.
    pub(super) fn keeps_more(&self) -> bool {
        self.growing().contains(&GrowthPart::Kept) && !self.is_once()
    }

    /// Returns true if kept memory rises from step to step, although most of it is from one or two steps: each
    /// step replaces it with more.
    pub(super) fn is_replaced(&self) -> bool {
        let most = self.changes[GrowthPart::Kept as usize].first();
        most.is_some_and(|most| (1..FEWEST_STEPS).contains(&most.steps)) && self.is_rising()
    }

    /// Returns true if kept memory still rises: in the last half, at least every second step ends with more than
    /// the step before, and these steps together have at least an eighth of the growth.
    fn is_rising(&self) -> bool {
        let ends = &self.levels[self.from..self.levels.len() - usize::from(self.is_cut)];
        let half = &ends[ends.len() / 2..];
        let rises = half.windows(2).filter(|two| two[1].allocated > two[0].allocated).count();
        let (Some(first), Some(last)) = (half.first(), half.last()) else { return false };
        let growth = last.allocated - first.allocated;
        half.len() > FEWEST_STEPS
            && 2 * rises >= half.len() - 1
            && 8 * growth >= self.bytes_of(GrowthPart::Kept)
    }

    /// Returns true if kept memory has grown, but hardly in the last quarter of the steps.
    fn has_stopped(&self) -> bool {
        let (end, kept) = (self.levels.len() - 1, GrowthPart::Kept as usize);
        let quarter = end - (end - self.from) / 4;
        let latest = self.all[end][kept] - self.all[quarter][kept];
        end - quarter >= FEWEST_STEPS && 25 * latest.abs() <= self.bytes_of(GrowthPart::Kept)
    }

    /// Returns the number of steps that freed at least half of the growth of kept memory, and the last of them.
    fn falls(&self) -> Option<(usize, &Level)> {
        let counted = &self.levels[self.from..];
        let is_fall =
            |two: &&[Level]| 2 * (two[0].allocated - two[1].allocated) >= self.bytes_of(GrowthPart::Kept);
        let falls: Vec<&Level> = counted.windows(2).filter(is_fall).map(|two| &two[1]).collect();
        falls.last().map(|last| (falls.len(), *last))
    }

    /// Returns the level with the highest peak, and its need.
    fn largest(&self) -> (&Level, i64) {
        let at = (self.from..self.levels.len()).max_by_key(|at| self.levels[*at].peak).unwrap_or(self.from);
        (&self.levels[at], self.needs[at])
    }

    /// Returns true if kept memory, which was higher before, explains most of the growth of larger steps.
    fn is_of_kept(&self) -> bool {
        2 * (self.largest().1 - self.needs[self.from]) < self.bytes_of(GrowthPart::LargerSteps)
    }

    /// Returns true if at least three quarters of the growth of larger steps are results that an op outside the
    /// model joins.
    fn is_joined(&self) -> bool {
        let most = self.changes[GrowthPart::LargerSteps as usize].first();
        most.is_some_and(|most| {
            ["aten::cat in (script)", "aten::stack in (script)"].contains(&most.what.as_str())
                && 4 * (most.after - most.before) >= 3 * self.bytes_of(GrowthPart::LargerSteps)
        })
    }

    pub(super) fn json(&self, units: Unit) -> Value {
        let named = |parts: &[i64; 4]| -> Value {
            GrowthPart::ALL
                .into_iter()
                .map(|part| (part.key().to_owned(), Value::from(parts[part as usize])))
                .collect()
        };
        let level = |at: usize| {
            let Level { step, ts_ns, inputs, peak, .. } = self.levels[at];
            let step = if self.by_time { Value::Null } else { step.into() };
            let used = self.levels[at].used();
            json!({
                "step": step, "ts_ns": ts_ns, "used_bytes": used, "peak_allocated_bytes": peak,
                "input_bytes": inputs, "parts_bytes": named(&self.all[at]),
            })
        };
        let end = self.levels.len() - 1;
        let every = self.levels.len().div_ceil(MOST_POINTS).max(1);
        let points: Vec<Value> = (0..=end).filter(|at| at % every == 0 || *at == end).map(level).collect();
        let growth = GrowthPart::ALL.map(|part| self.bytes_of(part));
        let used = self.last().used();
        let (kind, rate, full_at, stays_at) = match self.forecast {
            Forecast::Jumped { .. } => ("jumped", None, None, Some(used)),
            Forecast::Settled => ("settled", None, None, Some(used)),
            Forecast::Paused { .. } => ("paused", None, None, None),
            Forecast::Varies { .. } => ("varies", None, None, None),
            Forecast::Swings { high, is_rising, .. } => ("swings", None, None, (!is_rising).then_some(high)),
            Forecast::Slowing { level } => ("slowing", None, None, level),
            Forecast::WithinCache { rate, until } => ("within_cache", Some(rate), Some(until), None),
            Forecast::Grows { rate, full_at, .. } => ("grows", Some(rate), full_at, None),
        };
        let forecast = self.cause().map(|_| {
            let unit = if self.by_time { "second" } else { "step" };
            json!({ "kind": kind, "bytes_per_unit": rate, "unit": unit, "full_at": full_at, "level_bytes": stays_at })
        });
        json!({
            "device": self.ordinal,
            "from": level(self.from),
            "to": level(end),
            "to_is_inside_a_step": self.is_cut,
            "growth_bytes": self.last().used() - self.first().used(),
            "growth_parts_bytes": named(&growth),
            "cause": self.cause().map(GrowthPart::key),
            "why": self.cause().map(|part| self.why(part, units)),
            "remedy": self.cause().map(|part| self.remedy(part)),
            "changes": GrowthPart::ALL
                .into_iter()
                .map(|part| (part.key().to_owned(), self.changes[part as usize].iter().map(Change::json).collect()))
                .collect::<serde_json::Map<String, Value>>(),
            "forecast": forecast,
            "levels": points,
        })
    }
}

/// Returns a sentence for each GPU on which a part grew by at least 5% of the memory in use.
#[must_use]
pub fn growth_lines(levels: &Levels, meta: &Meta, units: Unit) -> Vec<String> {
    let all = levels.devices.iter().filter_map(|device| Growth::new(device, meta, false));
    all.filter_map(|growth| growth.short(units)).collect()
}

/// Returns true if the user chose where the growth begins.
pub(super) fn is_chosen(options: &Options) -> bool {
    options.window.from_step > i64::MIN || options.window.from_ns > i64::MIN
}

/// Returns the op and module of a block, or its category if it has neither. Repeated layers are joined.
pub(super) fn owner_name(symbols: &SymbolTable, layers: &Layers, block: &Block) -> String {
    let owner = &block.owner;
    let op = symbols.or_dash(owner.op);
    let module = layers.joined(&symbols.or_dash(owner.module));
    match (&*op, module.as_str()) {
        ("-", "-") => category(owner.category).to_owned(),
        ("-", module) => format!("{} in {module}", category(owner.category)),
        (op, "-") => format!("{op} ({})", category(owner.category)),
        (op, module) => format!("{op} in {module}"),
    }
}
