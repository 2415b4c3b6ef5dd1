//! The part of a trace that a report is about.

/// The part of a trace in which peaks are searched: a range of time and of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Start, in ns since the start of the trace.
    pub from_ns: i64,
    /// End, in ns; included.
    pub to_ns: i64,
    /// The first step.
    pub from_step: i64,
    /// The last step; included.
    pub to_step: i64,
}

impl Default for Window {
    fn default() -> Self {
        Window { from_ns: i64::MIN, to_ns: i64::MAX, from_step: i64::MIN, to_step: i64::MAX }
    }
}

impl Window {
    /// Whether a row at `ts_ns` in `step` is inside.
    pub(super) fn has(&self, ts_ns: i64, step: i64) -> bool {
        (self.from_ns..=self.to_ns).contains(&ts_ns) && (self.from_step..=self.to_step).contains(&step)
    }
}
