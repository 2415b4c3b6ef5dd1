//! The memory that steps need beyond the kept memory.

use super::limits::FEWEST_STEPS;
use crate::state::fitted_line::fit;
use crate::state::levels::Level;

/// How the memory that a step needs in addition to the kept memory changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Rising,
    OneLarge,
    Varying,
}

/// Returns the memory that each level needed beyond the kept memory: its peak, minus the memory at its beginning
/// or at its end, whichever is more. A step that frees what earlier steps have kept does not need that memory.
pub(super) fn needs_of(levels: &[Level]) -> Vec<i64> {
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

impl Shape {
    /// Returns how `needs` changes from level to level.
    pub(super) fn from_needs(needs: &[i64]) -> Shape {
        let needs: Vec<f64> = needs.iter().map(|need| *need as f64).collect();
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
}
