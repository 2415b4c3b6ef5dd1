//! Writes the rows of lost events, and the end row, which contains the number of lost events.

use memtrace_trace::config::LARGEST_BUFFER;
use memtrace_trace::counts::counted;
use memtrace_trace::end_row::{EndText, Ending};
use memtrace_trace::units::Unit;
use memtrace_trace::{Event, EventName, Row};

use crate::emitter::RowSink;
use crate::encoder::Encoder;
use crate::losses::MOST_LOST;

/// Returns a value of `MEMTRACE_BUFFER` that would have held the `lost` events, too. `bytes` is the current
/// size of the buffer. Returns `None` if no allowed value is large enough.
#[must_use]
pub fn sufficient_buffer(bytes: u64, lost: u64) -> Option<String> {
    // Adds a third, because ops get no rows while the buffer is more than three quarters full.
    let events = lost.saturating_mul(size_of::<Event>() as u64);
    let needed = bytes.saturating_add(events.saturating_add(events / 3)).checked_next_power_of_two()?;
    let needed = needed.max(1 << 20);
    (needed <= LARGEST_BUFFER).then(|| match needed >> 30 {
        0 => format!("{}m", needed >> 20),
        gigabytes => format!("{gigabytes}g"),
    })
}

/// Returns a text that says why `lost` events were lost and what the user can do. `bytes` is the size of the
/// event buffer, or 0 if unknown.
#[must_use]
pub fn why_lost(bytes: u64, lost: u64) -> String {
    if bytes == 0 {
        return "the buffer was full; MEMTRACE_BUFFER makes it larger".to_owned();
    }
    let size = Unit::Auto.show(bytes as i64);
    match sufficient_buffer(bytes, lost) {
        Some(enough) => {
            format!("the buffer of {size} was full; MEMTRACE_BUFFER={enough} would have held them")
        }
        None => {
            format!(
                "the buffer of {size} was full, and the largest one would be, too; MEMTRACE_OPS=off \
                     records less"
            )
        }
    }
}

impl Encoder {
    /// Writes the end row, the last row of a complete file. `dropped` is the number of lost events so far,
    /// `ending` is the way the trace ended. `more` has further `key=value` words, separated by spaces, or is
    /// empty.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn end<S: RowSink>(
        &mut self,
        clock_ns: u64,
        dropped: u64,
        ending: Ending,
        more: &str,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let dropped = dropped.min(MOST_LOST);
        let unreported = dropped.saturating_sub(self.losses.reported());
        if unreported > 0 {
            self.lost(clock_ns, 0, unreported, sink)?;
        }
        let lost = dropped.max(self.losses.reported());
        let (anomalies, formulas) = (self.anomalies, self.definitions.formulas());
        let name = EndText { ending, more, lost, anomalies, formulas }.to_string();
        self.emit(&Row { event: EventName::End, name: &name, ..self.blank(clock_ns) }, sink)
    }

    pub(crate) fn lost<S: RowSink>(
        &mut self,
        clock_ns: u64,
        tid: u32,
        events: u64,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let events = events.min(MOST_LOST);
        self.losses.add(events);
        let why = why_lost(self.losses.buffer_bytes(), self.losses.reported());
        let name = format!("{} dropped: {why}", counted(events, "event"));
        let (event, requested_bytes) = (EventName::Lost, events as i64);
        self.emit(&Row { event, tid: tid as i32, requested_bytes, name: &name, ..self.blank(clock_ns) }, sink)
    }

    /// Returns the number of lost events that `lost` rows have reported so far.
    #[must_use]
    pub fn reported_lost(&self) -> u64 {
        self.losses.reported()
    }

    /// Sets the number of lost events that `lost` rows have reported so far, including earlier parts.
    pub fn set_reported_lost(&mut self, events: u64) {
        self.losses.set_reported(events);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sufficient_buffer_holds_the_lost_events_too() {
        assert_eq!(sufficient_buffer(16 << 20, 1).as_deref(), Some("32m"));
        assert_eq!(sufficient_buffer(1 << 20, 2_312_339).as_deref(), Some("256m"));
        assert_eq!(sufficient_buffer(16 << 20, 20_000_000).as_deref(), Some("2g"));
        assert_eq!(sufficient_buffer(16 << 20, 60_000_000), None);
        assert_eq!(sufficient_buffer(16 << 20, u64::MAX), None);
    }

    #[test]
    fn the_reason_of_a_loss_says_what_to_do() {
        assert!(
            why_lost(1 << 20, 5).contains("1.00 MiB was full; MEMTRACE_BUFFER=2m"),
            "{}",
            why_lost(1 << 20, 5)
        );
        assert!(why_lost(1 << 20, u64::MAX).contains("MEMTRACE_OPS=off"));
        assert!(why_lost(0, 5).contains("MEMTRACE_BUFFER makes it larger"));
    }
}
