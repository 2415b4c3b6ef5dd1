//! Counts the lost events that rows report.

/// The maximum number of lost events in a row. No process loses more events, but a damaged journal may
/// contain a larger number.
pub(crate) const MOST_LOST: u64 = 1 << 40;

/// The lost events that rows report.
#[derive(Default)]
pub(crate) struct Losses {
    /// The number of lost events in the `lost` rows so far.
    reported: u64,
    /// The size of the event buffer in bytes; 0 if unknown.
    buffer_bytes: u64,
}

impl Losses {
    /// Returns the number of lost events in the `lost` rows so far.
    pub(crate) fn reported(&self) -> u64 {
        self.reported
    }

    pub(crate) fn set_reported(&mut self, events: u64) {
        self.reported = events.min(MOST_LOST);
    }

    /// Returns the size of the event buffer in bytes; 0 if unknown.
    pub(crate) fn buffer_bytes(&self) -> u64 {
        self.buffer_bytes
    }

    pub(crate) fn set_buffer_bytes(&mut self, bytes: u64) {
        self.buffer_bytes = bytes;
    }

    /// Counts the events of a `lost` row.
    pub(crate) fn add(&mut self, events: u64) {
        self.reported = self.reported.saturating_add(events).min(MOST_LOST);
    }
}
