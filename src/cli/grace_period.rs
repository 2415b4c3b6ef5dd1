//! The time that processes have to end after they were asked to. Those that take longer are killed.

use std::time::{Duration, Instant};

/// As long as in PyTorch's `PContext.close`.
const LENGTH: Duration = Duration::from_secs(30);

/// The time since processes were asked to end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GracePeriod {
    asked: Instant,
}

impl GracePeriod {
    /// Begins the period: call this when the processes are asked to end.
    pub(crate) fn begin() -> GracePeriod {
        GracePeriod { asked: Instant::now() }
    }

    /// Returns true if the processes that have not ended are to be killed.
    pub(crate) fn is_over(self) -> bool {
        self.asked.elapsed() > LENGTH
    }

    /// Returns true if the processes had as much time again to end after they were killed. Those that remain belong to
    /// other users or wait for a device, so there is nothing to wait for.
    pub(crate) fn is_hopeless(self) -> bool {
        self.asked.elapsed() > 2 * LENGTH
    }
}
