//! Predicts how the memory in use continues to grow.

use memtrace_trace::rounding::LARGE_SEGMENT;

use super::limits::{FEWEST_SLICES, flat_below};
use super::measured::MeasuredGrowth;
use super::needs::needs_of;
use super::part::GrowthPart;
use crate::state::fitted_line::fit;
use crate::state::levels::Level;

/// If a single rise has at least this share of the growth, the growth is a jump.
const JUMP: f64 = 0.8;
/// Memory has settled if the last quarter of the steps has at most this share of the growth. If memory grows
/// evenly, the last quarter has a share of 0.25.
const SETTLED: f64 = 0.04;
/// The growth slows down if the last quarter of the steps has less than this share of it.
const SLOWING: f64 = 0.15;
/// A still larger step is likely if the largest step needs at least this multiple of the need that nine of
/// ten steps do not exceed. The multiple is about 1.1 for evenly spread needs and about 2 for exponentially
/// distributed ones.
const LONG_TAIL: f64 = 1.5;
const FEWEST_TO_COMPARE: usize = 20;
/// Memory rises and falls if it fell at least this many times, and by more than it grew.
const FEWEST_FALLS: usize = 3;
/// The growth gets faster if the last quarter of the steps grows at this multiple of the rate of the quarter before.
/// Quadratic growth has 1.4.
const FASTER: f64 = 1.25;

/// How the growth continues.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Forecast {
    /// Nearly all of the growth came in one jump, at the level with this index.
    Jumped { at: usize },
    /// The last quarter of the steps hardly grew.
    Settled,
    /// The last quarter of the steps hardly grew, but growth may go on: the current pause, of `now` levels,
    /// is shorter than the longest one before, of `longest` levels.
    Paused { now: usize, longest: usize },
    /// Memory has hardly grown for `now` levels, but may grow with a still larger step: the largest step
    /// needs `times` as much as nine of ten steps need at most.
    Varies { now: usize, times: f64 },
    /// The growth slows down in the last quarter of the steps. `level` is the level in bytes at which memory
    /// settles if the growth continues to slow down as in the last half; `None` if the last quarter did not
    /// grow less than the quarter before it.
    Slowing { level: Option<i64> },
    /// Kept memory grows by `rate` bytes per step, but still fits into cached memory. nvidia-smi shows the
    /// growth starting at step `until`.
    WithinCache { rate: f64, until: i64 },
    /// Memory grows by `rate` bytes per step (or per second). The GPU is full at step (or second) `full_at`,
    /// which is `None` if the GPU's capacity is unknown. `is_faster` is true if the rate rises.
    Grows { rate: f64, full_at: Option<i64>, is_faster: bool },
    /// Memory rises and falls without a trend, because cached memory is freed. `low` and `high` are the bounds in
    /// the last half; `is_rising` is true if `high` is more than in the first half.
    Swings { low: i64, high: i64, is_rising: bool },
}

/// Returns true if so many steps are missing before the level at index `at` that the rise there is not the
/// growth of one step: more than a quarter of the steps. Fewer than [`FEWEST_SLICES`] levels have no gaps.
fn is_after_gap(levels: &[Level], from: usize, at: usize) -> bool {
    let steps = levels[levels.len() - 1].step - levels[from].step;
    levels.len() - from >= FEWEST_SLICES && 4 * (levels[at].step - levels[at - 1].step) > steps
}

/// Returns the index of the first level after the last gap (removed parts, or steps numbered by the program),
/// or `from` if no gap is followed by enough levels for a forecast.
fn last_stretch(levels: &[Level], from: usize) -> usize {
    let gap = (from + 1..levels.len()).rev().find(|at| is_after_gap(levels, from, *at));
    gap.filter(|at| levels.len() - at > FEWEST_SLICES).unwrap_or(from)
}

impl Forecast {
    /// Returns the forecast for a card of `capacity` bytes (0 if unknown).
    pub(super) fn new(measured: &MeasuredGrowth, capacity: i64) -> Forecast {
        let (levels, from, by_time) = (measured.levels(), measured.from(), measured.is_by_time());
        let latest = if by_time { from } else { last_stretch(levels, from) };
        Forecast::of_hidden(levels, measured.parts(), latest, capacity, by_time)
            .unwrap_or_else(|| Forecast::of_used(levels, latest, capacity, by_time))
    }

    /// Returns the forecast for kept memory that grows while the memory in use hides the growth. This is
    /// [`Forecast::WithinCache`] or, if kept memory only fills the newest segment, [`Forecast::Grows`]. Returns `None` if the
    /// memory in use shows the growth.
    fn of_hidden(
        levels: &[Level],
        all: &[[i64; 4]],
        from: usize,
        capacity: i64,
        by_time: bool,
    ) -> Option<Forecast> {
        let (first, last) = (&levels[from], &levels[levels.len() - 1]);
        let end = &all[all.len() - 1];
        let kept = end[GrowthPart::Kept as usize] - all[from][GrowthPart::Kept as usize];
        if by_time || kept < flat_below(last.used()) {
            return None;
        }
        // There are two such cases. In the first, kept memory fills cached memory: kept memory grew at least
        // twice as much as the memory in use. In the second, larger steps have reserved memory that kept
        // memory has filled since: kept memory has the most growth and still grows, while the memory in use
        // did not change in the last quarter.
        let quarter = all.len() - 1 - (all.len() - 1 - from) / 4;
        let latest = end[GrowthPart::Kept as usize] - all[quarter][GrowthPart::Kept as usize];
        let shown = last.used() - first.used();
        let is_most = (1..4).all(|part| end[part] - all[from][part] <= kept);
        let still_grows = latest as f64 > SLOWING * kept as f64;
        let is_shown = 2 * shown > kept;
        if is_shown && !(is_most && still_grows && last.used() == levels[quarter].used()) {
            return None;
        }
        let points: Vec<(f64, f64)> =
            levels[from..].iter().map(|level| (level.step as f64, level.allocated as f64)).collect();
        let line = fit(&points);
        let is_line = line.slope > 0.0 && line.r2 > 0.5;
        let left = end[GrowthPart::Cached as usize].max(0) as f64;
        is_line.then(|| {
            let at = |bytes: f64| last.step.saturating_add((bytes / line.slope) as i64);
            if is_shown && left <= LARGE_SEGMENT as f64 {
                let free = (capacity as f64 - last.used() as f64).max(0.0);
                let full_at = (capacity > 0).then(|| at(left + free));
                return Forecast::Grows { rate: line.slope, full_at, is_faster: false };
            }
            Forecast::WithinCache { rate: line.slope, until: at(left) }
        })
    }

    /// Returns the forecast for the memory in use, from the levels at index `from` and later. `by_time` is
    /// true if the levels are slices of time instead of steps.
    fn of_used(levels: &[Level], from: usize, capacity: i64, by_time: bool) -> Forecast {
        let end = levels.len() - 1;
        let used = |at: usize| levels[at].used() as f64;
        let more = used(end) - used(from);
        if let Some(swings) = Forecast::of_swings(&levels[from..], more as i64) {
            return swings;
        }
        if more <= 0.0 {
            // Memory fell, so only its growth since the lowest level may go on.
            let low = (from..=end).rev().min_by_key(|at| levels[*at].used()).unwrap_or(end);
            let since = levels[end].used() - levels[low].used();
            let is_flat = end - low < FEWEST_SLICES || since < flat_below(levels[end].used());
            return if is_flat {
                Forecast::Settled
            } else {
                Forecast::of_used(levels, low, capacity, by_time)
            };
        }
        let is_gap = |at: &usize| !by_time && is_after_gap(levels, from, *at);
        let has_gap = (from + 1..=end).any(|at| is_gap(&at));
        let rises = (from + 1..=end).filter(|at| !is_gap(at)).map(|at| (at, used(at) - used(at - 1)));
        let jump = rises.max_by(|a, b| a.1.total_cmp(&b.1));
        // Memory that falls again after a larger rise has not grown in one jump.
        let is_most = |rise: f64| (JUMP * more..=more / JUMP).contains(&rise);
        if let Some((at, _)) = jump.filter(|(_, rise)| is_most(*rise) && end - from >= FEWEST_SLICES) {
            return Forecast::Jumped { at };
        }
        let quarter = end - (end - from) / 4;
        let latest = used(end) - used(quarter);
        // The quarters of a curve with a gap have different lengths, so only its mean growth is known.
        if latest <= SETTLED * more && !has_gap {
            return Forecast::of_flat_end(&levels[from..], SETTLED * more);
        }
        let before = used(quarter) - used(2 * quarter - end);
        let slowing = Forecast::Slowing {
            // If the growth shrinks by the same factor in each further quarter, the level converges to this
            // value.
            level: (latest < before).then(|| (used(end) + latest * latest / (before - latest)) as i64),
        };
        if latest < SLOWING * more && !has_gap {
            return slowing;
        }
        let x = |at: usize| if by_time { levels[at].ts_ns as f64 / 1e9 } else { levels[at].step as f64 };
        let half = if has_gap { from } else { (from + end) / 2 };
        let points: Vec<(f64, f64)> = (half..=end).map(|at| (x(at), used(at))).collect();
        let rate = if points.len() > 2 { fit(&points).slope } else { more / (x(end) - x(from)).max(1.0) };
        if rate <= 0.0 {
            return slowing;
        }
        let left = (capacity as f64 - used(end)).max(0.0);
        let full_at = (capacity > 0).then(|| (x(end) + left / rate).ceil() as i64);
        let slope = |from: usize, to: usize| {
            let line = fit(&(from..=to).map(|at| (x(at), used(at))).collect::<Vec<_>>());
            (line.slope > 0.0 && line.r2 > 0.5).then_some(line.slope)
        };
        let is_long = end - from >= FEWEST_TO_COMPARE && !has_gap;
        let slopes = is_long.then(|| slope(2 * quarter - end, quarter).zip(slope(quarter, end))).flatten();
        let is_faster = slopes.is_some_and(|(before, latest)| latest > FASTER * before);
        Forecast::Grows { rate, full_at, is_faster }
    }

    /// Returns [`Forecast::Swings`] if memory falls again and again, by more than `more`, its growth or fall as a whole.
    fn of_swings(levels: &[Level], more: i64) -> Option<Forecast> {
        let least = flat_below(levels[levels.len() - 1].used());
        let falls = levels.windows(2).map(|two| two[0].used() - two[1].used());
        let falls: Vec<i64> = falls.filter(|fall| *fall >= least).collect();
        if falls.len() < FEWEST_FALLS || falls.iter().sum::<i64>() <= more.abs() {
            return None;
        }
        let points: Vec<(f64, f64)> =
            levels.iter().enumerate().map(|(at, level)| (at as f64, level.used() as f64)).collect();
        let line = fit(&points);
        if line.slope > 0.0 && line.r2 > 0.5 {
            return None;
        }
        let (first, last) = levels.split_at(levels.len() / 2);
        let high = |levels: &[Level]| levels.iter().map(Level::used).max();
        let low = last.iter().map(Level::used).min()?;
        Some(Forecast::Swings { low, high: high(last)?, is_rising: high(last)? > high(first)? + least })
    }

    /// Returns the forecast for growth whose last quarter is flat. Rises of less than `least` bytes do not count.
    fn of_flat_end(levels: &[Level], least: f64) -> Forecast {
        let mut highest = levels[0].used();
        let mut rises = Vec::new();
        for (at, level) in levels.iter().enumerate() {
            if (level.used() - highest) as f64 > least {
                rises.push(at);
            }
            highest = highest.max(level.used());
        }
        let longest = rises.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let now = levels.len() - 1 - rises.last().copied().unwrap_or(0);
        if now < longest {
            return Forecast::Paused { now, longest };
        }
        match largest_need(levels).filter(|times| *times >= LONG_TAIL) {
            Some(times) => Forecast::Varies { now, times },
            None => Forecast::Settled,
        }
    }
}

/// Returns the need of the largest step as a multiple of the need that nine of ten steps do not exceed.
/// Returns `None` for fewer than [`FEWEST_TO_COMPARE`] levels, or if nine of ten steps need nothing beyond
/// the memory that they keep.
fn largest_need(levels: &[Level]) -> Option<f64> {
    let mut needs = needs_of(levels);
    needs.sort_unstable();
    let usual = needs[(levels.len() * 9 / 10).saturating_sub(1)];
    (levels.len() >= FEWEST_TO_COMPARE && usual > 0).then(|| needs[needs.len() - 1] as f64 / usual as f64)
}

#[cfg(test)]
mod tests {
    use super::super::part::parts_of;
    use super::*;

    const MIB: i64 = 1 << 20;

    /// Converts rows of MiB: allocated at the end of a step, peak within the step, reserved, outside.
    fn levels(all: &[[i64; 4]]) -> Vec<Level> {
        let level = |(step, [allocated, peak, reserved, outside]): (usize, &[i64; 4])| Level {
            step: step as i64,
            allocated: allocated * MIB,
            peak: peak * MIB,
            reserved: reserved * MIB,
            outside: outside * MIB,
            ..Level::default()
        };
        all.iter().enumerate().map(level).collect()
    }

    #[test]
    fn growth_has_parts_that_sum_to_what_is_in_use() {
        let levels = levels(&[
            [100, 150, 160, 600],
            [110, 140, 160, 600], // smaller than the step before
            [110, 400, 420, 600], // one large step
            [110, 160, 420, 600],
            [110, 160, 200, 600], // empty_cache
            [110, 160, 300, 900],
            [130, 120, 100, 900], // a damaged trace: more allocated than reserved
        ]);
        let all = parts_of(&levels);
        let mib: Vec<[i64; 4]> = all.iter().map(|parts| parts.map(|bytes| bytes / MIB)).collect();
        assert_eq!(
            mib,
            [
                [100, 50, 10, 600],
                [110, 40, 10, 600],
                [110, 290, 20, 600],
                [110, 290, 20, 600],
                [110, 90, 0, 600],
                [110, 90, 100, 900],
                [130, 0, -30, 900],
            ]
        );
        for (parts, level) in all.iter().zip(&levels) {
            assert_eq!(parts.iter().sum::<i64>(), level.used());
        }
    }

    #[test]
    fn a_step_does_not_need_what_it_frees_of_earlier_steps() {
        // Each step keeps 10 MiB and needs 40 MiB in addition; step 5 frees all of it before it ends.
        let kept = |step: i64| if step < 5 { 100 + 10 * step } else { 10 * (step - 5) };
        let row = |step: i64| {
            let before = if step == 0 { 90 } else { kept(step - 1) };
            [kept(step), before + 50, 1000, 0]
        };
        let levels = levels(&(0..10).map(row).collect::<Vec<_>>());
        assert_eq!(needs_of(&levels)[1..], [40 * MIB; 9]);
        // Slices of time begin in the middle of steps.
        let slices: Vec<Level> = levels.iter().map(|level| Level { step: -1, ..*level }).collect();
        assert_eq!(needs_of(&slices)[5], 190 * MIB);
    }

    #[test]
    fn growth_across_removed_parts_is_no_jump() {
        // 10 MiB a step; steps 12 to 81 are missing.
        let of = |after: usize| {
            let steps: Vec<usize> = (0..12).chain(82..82 + after).collect();
            let row = |step: &usize| [10, 20, 100 + 10 * *step as i64, 0];
            let mut levels = levels(&steps.iter().map(row).collect::<Vec<_>>());
            levels.iter_mut().zip(&steps).for_each(|(level, step)| level.step = *step as i64);
            let from = last_stretch(&levels, 1);
            let Forecast::Grows { rate, .. } = Forecast::of_used(&levels, from, 0, false) else {
                panic!("{after}")
            };
            (from, (rate / MIB as f64).round())
        };
        assert_eq!(of(12), (12, 10.0));
        // Too few levels follow the gap: the forecast uses the mean growth.
        assert_eq!(of(4), (1, 10.0));
    }

    #[test]
    fn growth_has_an_outlook() {
        let of = |reserved: &[i64]| {
            let all: Vec<[i64; 4]> = reserved.iter().map(|reserved| [10, 20, *reserved, 0]).collect();
            Forecast::of_used(&levels(&all), 1, 1000 * MIB, false)
        };
        let line: Vec<i64> = (0..20).map(|step| 100 + 10 * step).collect();
        let Forecast::Grows { rate, full_at, .. } = of(&line) else { panic!("{:?}", of(&line)) };
        assert_eq!((rate as i64, full_at), (10 * MIB, Some(90)));
        let jump: Vec<i64> = (0..20).map(|step| if step < 12 { 100 } else { 500 }).collect();
        assert_eq!(of(&jump), Forecast::Jumped { at: 12 });
        let settled: Vec<i64> = (0..20).map(|step| 100 + 20 * step.min(8)).collect();
        assert_eq!(of(&settled), Forecast::Settled);
        let slower: Vec<i64> = (0..20).map(|step| 100 + 20 * step.min(10) + 5 * (step - 10).max(0)).collect();
        // The last quarter adds as much as the quarter before: the growth slows down, but has no level to
        // converge to.
        assert!(matches!(of(&slower), Forecast::Slowing { .. }), "{:?}", of(&slower));
        // Each step adds 85 % of what the step before added: the forecast finds the limit of 900 MiB.
        let converges: Vec<i64> = (0..=16).map(|step| 900 - (800.0 * 0.85_f64.powi(step)) as i64).collect();
        let Forecast::Slowing { level } = of(&converges) else { panic!("{:?}", of(&converges)) };
        assert!((890..=910).contains(&(level.unwrap() / MIB)), "{level:?}");
        assert_eq!(of(&[100; 20]), Forecast::Settled);
        // Memory rises at steps 5, 20 and 25, so the longest pause is 15 steps. After 34 steps, the current
        // pause is shorter: growth may go on. After 45 steps, it is longer: memory has settled.
        let rises = |step: i64| 100 + [5, 20, 25].iter().filter(|at| **at <= step).count() as i64 * 100;
        let jumps: Vec<i64> = (0..34).map(rises).collect();
        assert_eq!(of(&jumps), Forecast::Paused { now: 8, longest: 15 });
        let longer: Vec<i64> = (0..45).map(rises).collect();
        assert_eq!(of(&longer), Forecast::Settled);
        // Steps 5 and 12 need 400 and 700 MiB, all others 100 MiB: the forecast expects a larger step.
        let needs =
            |step: i64| [(5, 400), (12, 700)].iter().find(|(at, _)| *at == step).map_or(100, |need| need.1);
        let tail: Vec<[i64; 4]> = (0..40)
            .map(|step| {
                [
                    0,
                    needs(step),
                    if step < 5 {
                        100
                    } else if step < 12 {
                        400
                    } else {
                        700
                    },
                    0,
                ]
            })
            .collect();
        let forecast = Forecast::of_used(&levels(&tail), 1, 1000 * MIB, false);
        assert_eq!(forecast, Forecast::Varies { now: 27, times: 7.0 });
        // Each fourth step frees 300 MiB, which the next step reserves again.
        let swings = |rise: i64| -> Vec<i64> {
            (0..40).map(|step| 100 + 100 * (step % 4) + rise * i64::from(step > 20)).collect()
        };
        let swing = |high, is_rising| Forecast::Swings { low: high - 300 * MIB, high, is_rising };
        assert_eq!(of(&swings(0)), swing(400 * MIB, false));
        let Forecast::Swings { high, is_rising: true, .. } = of(&swings(60)) else {
            panic!("{:?}", of(&swings(60)))
        };
        assert_eq!(high, 460 * MIB);
        // Each step adds 1 MiB more than the step before.
        let faster: Vec<i64> = (0..60).map(|step| 100 + step * step).collect();
        assert!(matches!(of(&faster), Forecast::Grows { is_faster: true, .. }), "{:?}", of(&faster));
        let even: Vec<i64> = (0..60).map(|step| 100 + 10 * step).collect();
        assert!(matches!(of(&even), Forecast::Grows { is_faster: false, .. }));
        let shrinks: Vec<i64> = line.iter().rev().copied().collect();
        assert_eq!(of(&shrinks), Forecast::Settled);
        // A rise before memory falls below its first level is no growth, and neither is a step that all later
        // ones undo.
        let falls = |step: i64| [500, 510, 100][usize::from(step > 3) + usize::from(step > 5)];
        assert_eq!(of(&(0..20).map(falls).collect::<Vec<_>>()), Forecast::Settled);
        let undone = |step: i64| [100, 600, 150][usize::from(step > 7) + usize::from(step > 8)];
        assert_eq!(of(&(0..20).map(undone).collect::<Vec<_>>()), Forecast::Settled);
        // Memory that grows since it fell does not settle.
        let after: Vec<i64> = (0..20).map(|step| if step < 5 { 900 } else { 100 + 10 * step }).collect();
        let Forecast::Grows { rate, .. } = of(&after) else { panic!("{:?}", of(&after)) };
        assert_eq!(rate as i64, 10 * MIB);
    }
}
