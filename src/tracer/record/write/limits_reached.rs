//! Messages on stderr about limits that were reached: lost events, and too many names.

use memtrace_encode::lost::why_lost;
use memtrace_trace::config::Level;
use memtrace_trace::counts::counted;
use memtrace_trace::units::Unit;

use crate::intern;
use crate::queue::chunk_pool::ChunkPool;
use crate::session::Session;

/// Reports each limit once, as soon as it is reached, because a program that is killed later could not report
/// it.
pub(crate) struct LimitsReached {
    session: &'static Session,
    said_lost: bool,
    said_names: bool,
}

impl LimitsReached {
    pub(crate) fn new(session: &'static Session) -> LimitsReached {
        LimitsReached { session, said_lost: false, said_names: false }
    }

    /// Reports limits that were reached since the last call. Called at each checkpoint.
    pub(crate) fn report_new(&mut self, pool: &ChunkPool) {
        if !self.said_lost && pool.dropped() > 0 {
            self.said_lost = true;
            let size = Unit::Auto.show(self.session.settings.buffer_bytes as i64);
            self.say(&format!(
                "events are being lost: they come faster than they are written, and the buffer of {size} is full; \
                 a larger MEMTRACE_BUFFER holds more"
            ));
        }
        let refused = intern::refused();
        if !self.said_names && refused > 0 {
            self.said_names = true;
            self.say(&format!(
                "the program uses too many names of ranges, modules or ops: new ones are recorded as {}; use fewer \
                 different names, or set MEMTRACE_BUFFER to a larger size",
                intern::TOO_MANY
            ));
        }
    }

    /// Reports the number of lost events, at the end of the trace.
    pub(crate) fn conclude(&self, lost: u64) {
        if lost > 0 {
            let why = why_lost(self.session.settings.buffer_bytes as u64, lost);
            let were = if lost == 1 { "was" } else { "were" };
            self.say(&format!("{} {were} lost: {why}", counted(lost, "event")));
        }
    }

    fn say(&self, line: &str) {
        if self.session.settings.log >= Level::Warn {
            (self.session.say)(line);
        }
    }
}
