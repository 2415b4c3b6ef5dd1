//! How much the memory in use of a device grew, and how it grew from level to level.

use memtrace_trace::units::Unit;

use super::limits::{FEWEST_SLICES, FEWEST_STEPS, flat_below};
use super::needs::{Shape, needs_of};
use super::part::{GrowthPart, parts_of};
use crate::options::Window;
use crate::render::numbers::duration;
use crate::state::levels::{DeviceLevels, Level};

/// `summary` reports growth only if its largest part is at least this fraction of the memory in use: one part
/// in 20.
const WORTH_A_LINE: i64 = 20;

/// The levels of a device's memory in use, and what follows from them alone.
pub(super) struct MeasuredGrowth {
    ordinal: i32,
    /// True if the levels are slices of time instead of steps.
    by_time: bool,
    levels: Vec<Level>,
    /// The parts of each level, in the order of [`GrowthPart::ALL`].
    parts: Vec<[i64; 4]>,
    /// The memory that each level needed beyond the kept memory; see [`needs_of`].
    needs: Vec<i64>,
    /// The index of the first level that counts. Growth before that level only fills caches.
    from: usize,
    /// True if the last level is an unfinished step. Such a step is a level only if it used more memory than
    /// the last finished step.
    is_cut: bool,
}

impl MeasuredGrowth {
    /// Returns the growth of a device, or `None` if the trace is too short. Growth is measured after the
    /// second step (or the first quarter of the slices), because memory before that fills caches; with
    /// `is_chosen`, after the first step.
    pub(super) fn new(device: &DeviceLevels, is_chosen: bool) -> Option<MeasuredGrowth> {
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
        let (parts, needs) = (parts_of(&levels), needs_of(&levels));
        Some(MeasuredGrowth { ordinal: device.ordinal, by_time, levels, parts, needs, from, is_cut })
    }

    pub(super) fn ordinal(&self) -> i32 {
        self.ordinal
    }

    pub(super) fn is_by_time(&self) -> bool {
        self.by_time
    }

    /// Returns true if the last level is an unfinished step.
    pub(super) fn is_cut(&self) -> bool {
        self.is_cut
    }

    /// Returns all levels, with those before the first that counts.
    pub(super) fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// Returns the parts of each level, in the order of [`GrowthPart::ALL`].
    pub(super) fn parts(&self) -> &[[i64; 4]] {
        &self.parts
    }

    /// Returns the index of the first level that counts.
    pub(super) fn from(&self) -> usize {
        self.from
    }

    /// Returns the first level that counts.
    pub(super) fn first(&self) -> &Level {
        &self.levels[self.from]
    }

    pub(super) fn last(&self) -> &Level {
        &self.levels[self.levels.len() - 1]
    }

    /// Returns the number of steps (or slices of time) after the first level that counts.
    pub(super) fn steps(&self) -> usize {
        self.levels.len() - 1 - self.from
    }

    /// Returns the bytes of a part at the last level.
    pub(super) fn now(&self, part: GrowthPart) -> i64 {
        self.parts[self.parts.len() - 1][part as usize]
    }

    /// Returns the growth of a part, in bytes.
    pub(super) fn bytes_of(&self, part: GrowthPart) -> i64 {
        self.now(part) - self.parts[self.from][part as usize]
    }

    /// Returns the growth of the memory in use, in bytes.
    pub(super) fn bytes(&self) -> i64 {
        self.last().used() - self.first().used()
    }

    /// Returns the parts that grew, with the largest growth first. If the memory in use is flat, larger steps
    /// and the cache only took memory that was already in use, so these two parts do not count.
    pub(super) fn growing(&self) -> Vec<GrowthPart> {
        let flat = flat_below(self.last().used());
        let grew = self.bytes() >= flat;
        let counts = |part: &GrowthPart| {
            self.bytes_of(*part) >= flat && (grew || matches!(part, GrowthPart::Kept | GrowthPart::Outside))
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

    /// Returns the name of a level: its step, or its time.
    pub(super) fn name_of(&self, level: &Level) -> String {
        if self.by_time { duration(level.ts_ns) } else { format!("step {}", level.step) }
    }

    /// Returns one line for `summary`, or `None` if no part grew by at least 5% of the memory in use.
    pub(super) fn line(&self, units: Unit) -> Option<String> {
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
            self.name_of(first),
            units.show(last.used()),
            self.name_of(last),
            parts.join(", "),
        ))
    }

    /// Returns two windows, each with one step (or slice of time): the one with the highest peak up to the
    /// first level that counts, and the one with the highest peak after this level.
    pub(super) fn two_peaks(&self) -> (Window, Window) {
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

    /// Returns how the memory that the steps need changes.
    pub(super) fn shape(&self) -> Shape {
        Shape::from_needs(&self.needs[self.from..])
    }

    /// Returns the need of the first level that counts.
    pub(super) fn first_need(&self) -> i64 {
        self.needs[self.from]
    }

    /// Returns true if kept memory still rises: in the last half, at least every second step ends with more than
    /// the step before, and these steps together have at least an eighth of the growth.
    pub(super) fn is_rising(&self) -> bool {
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
    pub(super) fn has_stopped(&self) -> bool {
        let (end, kept) = (self.levels.len() - 1, GrowthPart::Kept as usize);
        let quarter = end - (end - self.from) / 4;
        let latest = self.parts[end][kept] - self.parts[quarter][kept];
        end - quarter >= FEWEST_STEPS && 25 * latest.abs() <= self.bytes_of(GrowthPart::Kept)
    }

    /// Returns the number of steps that freed at least half of the growth of kept memory, and the last of them.
    pub(super) fn falls(&self) -> Option<(usize, &Level)> {
        let counted = &self.levels[self.from..];
        let is_fall =
            |two: &&[Level]| 2 * (two[0].allocated - two[1].allocated) >= self.bytes_of(GrowthPart::Kept);
        let falls: Vec<&Level> = counted.windows(2).filter(is_fall).map(|two| &two[1]).collect();
        falls.last().map(|last| (falls.len(), *last))
    }

    /// Returns the level with the highest peak, and its need.
    pub(super) fn largest(&self) -> (&Level, i64) {
        let at = (self.from..self.levels.len()).max_by_key(|at| self.levels[*at].peak).unwrap_or(self.from);
        (&self.levels[at], self.needs[at])
    }

    /// Returns true if kept memory, which was higher before, explains most of the growth of larger steps.
    pub(super) fn is_of_kept(&self) -> bool {
        2 * (self.largest().1 - self.first_need()) < self.bytes_of(GrowthPart::LargerSteps)
    }
}
