//! The growth of a model's parameters from step to step.

use super::evidence::{Copies, StepTotals};
use super::limits::FEWEST_STEPS;

/// The number of parameter bytes must have grown by this factor.
const GROWN: f64 = 1.1;

/// Parameters that were replaced with larger ones; sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GrownModel {
    /// The bytes of the parameters after the first step.
    pub(super) from: i64,
    /// Their bytes now.
    pub(super) to: i64,
    /// The number of steps in which they grew.
    pub(super) times: usize,
    /// The largest memory of a step above its beginning, among the steps with the fewest parameters.
    pub(super) usual: i64,
}

impl GrownModel {
    /// Returns the growth of the parameters, if all of them were made anew in one step after the first, and are
    /// larger than after the first step. `steps` has the finished steps, `parameters` the bytes now, and `late` the
    /// parameters that were allocated after training began.
    pub(super) fn find(steps: &[StepTotals], parameters: i64, late: Copies) -> Option<GrownModel> {
        let known: Vec<&StepTotals> = steps.iter().filter(|step| step.parameters > 0).collect();
        let from = known.first()?.parameters;
        let sizes: Vec<i64> = known.iter().map(|step| step.parameters).chain([parameters]).collect();
        let times = sizes.windows(2).filter(|two| two[1] as f64 >= GROWN * two[0] as f64).count();
        let is_grown = parameters as f64 >= GROWN * from as f64 && times > 0;
        let is_replaced = late.steps == 1 && 10 * late.bytes >= 9 * parameters;
        let smallest = known.iter().filter(|step| step.parameters == from);
        let usual = smallest.map(|step| step.peak - step.began).max()?;
        let is_it = known.len() >= FEWEST_STEPS && is_grown && is_replaced;
        is_it.then_some(GrownModel { from, to: parameters, times, usual })
    }
}
