//! The four parts of the memory in use after each step, for the page's chart and for digests.

use rustc_hash::FxHashMap;

use super::is_chosen;
use super::limits::FEWEST_STEPS;
use super::measured::MeasuredGrowth;
use super::part::{GrowthPart, parts_of};
use crate::options::Options;
use crate::state::levels::{DeviceLevels, Levels};

/// The maximum number of evenly spaced steps in the page's chart. The last step is shown in addition.
const MOST_DRAWN: usize = 1000;

/// The bytes of each of the four parts of a device's memory in use after each finished step, for a chart.
pub struct GrowthCurve {
    /// The numbers of the steps that are shown: at most [`MOST_DRAWN`], evenly spaced, and the last step.
    pub steps: Vec<i64>,
    /// The name of each part, and its bytes after these steps.
    pub parts: [(&'static str, Vec<i64>); 4],
}

impl GrowthCurve {
    /// Returns the curve of the first device, or `None` if the device has fewer than [`FEWEST_STEPS`]
    /// finished steps.
    #[must_use]
    pub fn new(levels: &Levels) -> Option<GrowthCurve> {
        let steps = &levels.devices.first().filter(|device| device.steps.len() >= FEWEST_STEPS)?.steps;
        let all = parts_of(steps);
        let every = steps.len().div_ceil(MOST_DRAWN);
        let shown: Vec<usize> =
            (0..steps.len()).filter(|at| at % every == 0 || *at + 1 == steps.len()).collect();
        let part = |part: GrowthPart| (part.name(), shown.iter().map(|at| all[*at][part as usize]).collect());
        Some(GrowthCurve {
            steps: shown.iter().map(|at| steps[*at].step).collect(),
            parts: GrowthPart::ALL.map(part),
        })
    }
}

/// The four parts of the memory in use of a device, in the order kept, larger steps, cached, outside.
#[derive(Default)]
pub(crate) struct DeviceParts {
    /// The growth of each part from the first level that counts (see [`MeasuredGrowth::new`]) to the last; `None` if
    /// the trace is too short.
    pub(crate) growth: Option<[i64; 4]>,
    /// The parts after each finished step, by step.
    pub(crate) by_step: FxHashMap<i64, [i64; 4]>,
}

impl DeviceParts {
    /// Returns the parts of each device, by CUDA ordinal.
    pub(crate) fn all(levels: &Levels, options: &Options) -> FxHashMap<i32, DeviceParts> {
        let of = |device: &DeviceLevels| {
            let growth = MeasuredGrowth::new(device, is_chosen(options));
            let growth = growth.map(|growth| GrowthPart::ALL.map(|part| growth.bytes_of(part)));
            let steps = device.steps.iter().map(|level| level.step);
            (device.ordinal, DeviceParts { growth, by_step: steps.zip(parts_of(&device.steps)).collect() })
        };
        levels.devices.iter().map(of).collect()
    }
}
