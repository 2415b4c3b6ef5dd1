//! The memory that steps leave allocated, from step to step.

/// The minimum number of finished steps that show growth. The first step does not count, because it allocates
/// optimizer state.
pub(super) const FEWEST_STEPS: usize = 3;

/// The allocated bytes of a finished step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StepTotals {
    /// The allocated bytes when the step began.
    pub(super) began: i64,
    /// The allocated bytes when the step ended.
    pub(super) ended: i64,
    /// The maximum within the step.
    pub(super) peak: i64,
    /// The maximum outside of the optimizer's step, whose first run allocates its state.
    pub(super) peak_before_update: i64,
    /// The bytes of the parameters when the step ended.
    pub(super) parameters: i64,
}

/// The memory that each step leaves allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Growth {
    /// The mean of the bytes per step.
    pub(super) per_step: i64,
    /// The growth in bytes from the end of the second finished step to the end of the last one.
    pub(super) total: i64,
    /// The number of steps over which `total` was measured.
    pub(super) steps: usize,
    /// The bytes by which this step is higher than the peak of the second finished step, if each step had a
    /// higher peak than the step before; otherwise 0. What a step computes from memory that grows
    /// grows, too.
    pub(super) risen: i64,
}

/// Returns the growth of the memory left at the ends of steps, without the first step. Returns `None` if too
/// few steps add to it, or if later steps free much of it again.
pub(super) fn growth(steps: &[StepTotals]) -> Option<Growth> {
    let steps = steps.get(1..)?;
    if steps.len() < FEWEST_STEPS {
        return None;
    }
    let more: Vec<i64> = steps.windows(2).map(|two| two[1].ended - two[0].ended).collect();
    let grown = more.iter().filter(|bytes| **bytes > 0).count();
    let total = steps.last()?.ended - steps.first()?.ended;
    let per_step = total / i64::try_from(more.len()).ok()?;
    // A leak may occur only in every third step, so at least a third of the steps must grow. Memory for a
    // longer input is freed again, so the total must be more than twice what the steps freed.
    let falls: i64 = more.iter().filter(|bytes| **bytes < 0).sum();
    (total > 0 && 3 * grown >= more.len() && -2 * falls < total).then_some(Growth {
        per_step,
        total,
        steps: more.len(),
        risen: 0,
    })
}
