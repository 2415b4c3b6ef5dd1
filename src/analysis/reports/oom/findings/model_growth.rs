//! A model whose trained parameters grow in some steps, as in Gaussian splatting.

use memtrace_trace::units::Unit;

use super::super::evidence::Evidence;
use super::super::finding::{Blame, Cause, GROWS, Help};
use super::super::grown_model::GrownModel;
use super::growth::has_growing_holder;
use crate::render::numbers::counted;

/// A step that makes larger parameters needs more memory than its share of them: it holds old and new ones.
const HIGHER: f64 = 1.5;

pub(super) static CAUSE: Cause = Cause {
    verdict: GROWS,
    find: |evidence| (has_model_grown(evidence) && !has_growing_holder(evidence)).then(|| Blame::of(&CAUSE)),
    because: |case, units| {
        case.evidence.steps.grown_model.map(|grown| line(grown, units)).unwrap_or_default()
    },
    tries: |_| {
        vec![
            "a limit for what the program adds to its parameters: stop adding earlier, add only where the loss needs it, and remove more \
             (for Gaussian splatting: a smaller densify_until_iter, a higher densify_grad_threshold, a maximum number of Gaussians)",
        ]
    },
    help: Help::FreeKept,
    ..Cause::DEFAULT
};

/// Returns a sentence without a full stop.
fn line(grown: GrownModel, units: Unit) -> String {
    format!(
        "the trained parameters grow: from {} to {}, in {}. Their gradients, the optimizer's state and the results \
             of a step grow with them",
        units.show(grown.from),
        units.show(grown.to),
        counted(grown.times as u64, "step")
    )
}

/// Returns true if the growth of the trained parameters is the cause: steps with fewer parameters did fit, and
/// this step needs no more than its share of the growth.
fn has_model_grown(evidence: &Evidence) -> bool {
    evidence.steps.grown_model.is_some_and(|grown| {
        let factor = grown.to as f64 / grown.from as f64;
        evidence.taken_by_step() as f64 <= HIGHER * factor * grown.usual as f64
    })
}

#[cfg(test)]
mod tests {
    use memtrace_trace::{Category, Row};

    use super::super::super::test_evidence::{GIB, MIB, full};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;
    use crate::reports::oom::evidence::{Copies, StepTotals};

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
        let grown = GrownModel::find(&steps, 3 * GIB, late(3 * GIB, 1));
        let expected = GrownModel { from: GIB, to: 3 * GIB, times: 2, usual: 4 * GIB };
        assert_eq!(grown, Some(expected));
        assert_eq!(
            line(expected, Unit::default()),
            "the trained parameters grow: from 1.00 GiB to 3.00 GiB, in 2 steps. Their gradients, the optimizer's state \
             and the results of a step grow with them"
        );
        let facts = full().with(|e| {
            e.steps.grown_model = grown;
            e.steps.began = 12 * GIB;
            e.steps.finished = steps;
        });
        assert_eq!((facts.verdict(), facts.judge().kept), ("memory grows", None));
        // This step needs far more than its share.
        assert_ne!(facts.with(|e| e.steps.began = 0).verdict(), "memory grows");
        // Copies of the model in a list; parameters from before training; too few steps; no growth.
        let of = |steps: &[StepTotals], late| GrownModel::find(steps, 3 * GIB, late);
        assert_eq!(of(&facts.steps.finished, late(3 * GIB, 2)), None);
        assert_eq!(of(&facts.steps.finished, late(GIB, 1)), None);
        assert_eq!(of(&facts.steps.finished[..2], late(3 * GIB, 1)), None);
        assert_eq!(of(&facts.steps.finished[6..], late(3 * GIB, 1)), None);
    }

    /// Steps whose parameters have these sizes, in GiB, and are made anew when they grow, and then one that fails.
    fn trace(sizes: [i64; 6]) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        let mut before: Option<(i64, i64, Row<'_>)> = None;
        for (step, size) in (0..).zip(sizes) {
            let row = owner("(script)", "(none)", step);
            if before.is_none_or(|(_, bytes, _)| bytes != size * GIB) {
                let id = trace.tagged(size * GIB, Category::Parameter, row);
                let now = (id, size * GIB, Row { category: Category::Parameter, ..row });
                if let Some((id, bytes, row)) = before.replace(now) {
                    trace.free(id, bytes, row);
                }
            }
            let id = trace.block(3 * size * GIB, owner("(script)", "forward", step));
            trace.free(id, 3 * size * GIB, owner("(script)", "forward", step));
        }
        trace.fill(512 * MIB, owner("(script)", "init", -1));
        trace.fails(GIB, owner("(script)", "forward", 6));
        trace
    }

    #[test]
    fn oom_says_that_the_parameters_grow() {
        trace([1, 1, 1, 2, 2, 3]).prints(&[
            "verdict: memory grows: 512.00 MiB missing for this request. The trained parameters grow: from 1.00 GiB to 3.00 GiB, in 2 \
             steps. Their gradients, the optimizer's state and the results of a step grow with them.",
            "try: a limit for what the program adds to its parameters: stop adding earlier, add only where the loss needs it, and remove \
             more (for Gaussian splatting: a smaller densify_until_iter, a higher densify_grad_threshold, a maximum number of Gaussians)",
        ]);
        trace([1; 6]).never_prints("parameters grow");
    }
}
