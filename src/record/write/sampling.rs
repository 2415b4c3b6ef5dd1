//! When devices are looked at, and what a look becomes.
//!
//! A look is recorded like everything else, on the writer thread's own lane, so that it stands in the file in
//! the order of its time.

use std::time::{Duration, Instant};

use memtrace_encode::Encoder;
use memtrace_encode::samples::events;
use memtrace_trace::Event;

use crate::recorder::Recorder;

/// However fast memory grows, looks are this far apart.
const SHORTEST: Duration = Duration::from_millis(100);

/// What the writer thread remembers between two looks.
pub(crate) struct Sampler {
    every: Duration,
    last: Option<Instant>,
    /// The most that was held at a look, in bytes.
    highest: i64,
}

impl Sampler {
    /// Looks every `ms`; 0 is never.
    pub(crate) fn new(ms: u64) -> Sampler {
        Sampler { every: Duration::from_millis(ms), last: None, highest: 0 }
    }

    /// Looks when it is time: now and then, and soon when more is held than ever at a look.
    pub(crate) fn look_when_due(&mut self, recorder: &'static Recorder, encoder: &Encoder) {
        let held = held(encoder);
        let has_grown = held > self.highest + self.highest / 16;
        let due = match self.last.map(|last| last.elapsed()) {
            None => true,
            Some(passed) => passed >= self.every || has_grown && passed >= SHORTEST.min(self.every),
        };
        if due {
            self.look(recorder, encoder);
        }
    }

    /// Looks at the devices that the process uses.
    pub(crate) fn look(&mut self, recorder: &'static Recorder, encoder: &Encoder) {
        let devices: Vec<i8> = encoder.devices().map(|(device, _)| device as i8).collect();
        // A look at a device that nobody uses would cost, and tell nothing.
        if self.every.is_zero() || devices.is_empty() || recorder.is_short() {
            return;
        }
        self.last = Some(Instant::now());
        self.highest = self.highest.max(held(encoder));
        for (device, api, sample) in (recorder.session.sample)(&devices) {
            for event in events(device, api, &sample) {
                recorder.record(|clock_ns| Event { clock_ns, ..event });
            }
        }
    }
}

/// What the process holds on all devices, as far as calls tell.
fn held(encoder: &Encoder) -> i64 {
    encoder.devices().map(|(_, totals)| totals.reserved + totals.external).sum()
}
