//! A model whose trained parameters grow in some steps, as in Gaussian splatting.

use memtrace_trace::units::Unit;

use super::cause::{Copies, Facts};
use super::step_growth::{FEWEST_STEPS, StepTotals};
use crate::render::numbers::counted;

/// The number of parameter bytes must have grown by this factor.
const GROWN: f64 = 1.1;
/// A step that makes larger parameters needs more memory than its share of them: it holds old and new ones.
const HIGHER: f64 = 1.5;

/// Parameters that were replaced with larger ones; sizes are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GrownModel {
    /// The bytes of the parameters after the first step.
    from: i64,
    /// Their bytes now.
    to: i64,
    /// The number of steps in which they grew.
    times: usize,
    /// The largest memory of a step above its beginning, among the steps with the fewest parameters.
    usual: i64,
}

impl GrownModel {
    /// Returns the growth of the parameters, if all of them were made anew in one step after the first, and are
    /// larger than after the first step. `steps` has the finished steps, `parameters` the bytes now, and `late` the
    /// parameters that were allocated after training began.
    pub(super) fn of(steps: &[StepTotals], parameters: i64, late: Copies) -> Option<GrownModel> {
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

    /// Returns a sentence without a full stop.
    pub(super) fn line(&self, units: Unit) -> String {
        format!(
            "the trained parameters grow: from {} to {}, in {}. Their gradients, the optimizer's state and the results \
             of a step grow with them",
            units.show(self.from),
            units.show(self.to),
            counted(self.times as u64, "step")
        )
    }
}

impl Facts {
    /// Returns true if the growth of the trained parameters is the cause: steps with fewer parameters did fit, and
    /// this step needs no more than its share of the growth.
    pub(super) fn has_model_grown(&self) -> bool {
        self.grown_model.is_some_and(|grown| {
            let factor = grown.to as f64 / grown.from as f64;
            let height = self.allocated + self.request - self.step_began;
            height as f64 <= HIGHER * factor * grown.usual as f64
        })
    }
}

/// The remedy for parameters that grow.
pub(super) const SMALLER_MODEL: &str = "a limit for what the program adds to its parameters: stop adding earlier, add only where the loss needs it, and remove more \
     (for Gaussian splatting: a smaller densify_until_iter, a higher densify_grad_threshold, a maximum number of Gaussians)";

#[cfg(test)]
mod tests {
    use super::super::cause::Cause;
    use super::super::test_facts::{GIB, full};
    use super::*;

    #[test]
    fn oom_names_parameters_that_grow_in_jumps() {
        let step = |parameters: i64| StepTotals {
            began: 4 * parameters,
            ended: 4 * parameters,
            peak: 8 * parameters,
            peak_before_update: 8 * parameters,
            parameters,
        };
        let steps: Vec<StepTotals> = [1, 1, 1, 2, 2, 2, 3].map(|parameters| step(parameters * GIB)).to_vec();
        let late = |bytes: i64, steps: usize| Copies { bytes, steps };
        let grown = GrownModel::of(&steps, 3 * GIB, late(3 * GIB, 1));
        let expected = GrownModel { from: GIB, to: 3 * GIB, times: 2, usual: 4 * GIB };
        assert_eq!(grown, Some(expected));
        assert_eq!(
            expected.line(Unit::default()),
            "the trained parameters grow: from 1.00 GiB to 3.00 GiB, in 2 steps. Their gradients, the optimizer's state \
             and the results of a step grow with them"
        );
        let facts = Facts { grown_model: grown, step_began: 12 * GIB, steps, ..full() };
        assert_eq!(facts.judge(), (Cause::Grows, None));
        // This step needs far more than its share.
        assert_ne!(Facts { step_began: 0, ..facts.clone() }.judge().0, Cause::Grows);
        // Copies of the model in a list; parameters from before training; too few steps; no growth.
        let of = |steps: &[StepTotals], late| GrownModel::of(steps, 3 * GIB, late);
        assert_eq!(of(&facts.steps, late(3 * GIB, 2)), None);
        assert_eq!(of(&facts.steps, late(GIB, 1)), None);
        assert_eq!(of(&facts.steps[..2], late(3 * GIB, 1)), None);
        assert_eq!(of(&facts.steps[6..], late(3 * GIB, 1)), None);
    }
}
