//! When devices are looked at, and what a look becomes.
//!
//! A look is recorded like everything else, on the writer thread's own lane, so that it stands in the file in
//! the order of its time.

use std::time::{Duration, Instant};

use memtrace_trace::sample::Sample;
use memtrace_trace::{Api, Event, Kind};

use crate::encoder::Encoder;
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

/// The events of a look: one, and another when there are pools or graphs.
fn events(device: i8, api: Api, sample: &Sample) -> Vec<Event> {
    let value = |value: Option<i64>| value.unwrap_or(-1);
    let blank = Event { device, api: api as u8, step: -1, ..Event::default() };
    let mut events = vec![Event {
        kind: Kind::Sample as u8,
        addr: value(sample.total) as u64,
        size: value(sample.free),
        allocated: value(sample.process) as u64,
        reserved: value(sample.others) as u64,
        extra: value(sample.bar1),
        ..blank
    }];
    let Sample { pool_reserved, pool_used, graphs, .. } = *sample;
    if pool_reserved.is_some() || pool_used.is_some() || graphs.is_some() {
        events.push(Event {
            kind: Kind::SamplePools as u8,
            size: value(pool_reserved),
            allocated: value(pool_used) as u64,
            reserved: value(graphs) as u64,
            ..blank
        });
    }
    events
}

/// What one of these events tells.
pub(crate) fn sample_of(event: &Event) -> Sample {
    let value = |value: i64| (value >= 0).then_some(value);
    let (size, allocated, reserved) =
        (value(event.size), value(event.allocated as i64), value(event.reserved as i64));
    if event.kind() == Some(Kind::SamplePools) {
        return Sample { pool_reserved: size, pool_used: allocated, graphs: reserved, ..Sample::default() };
    }
    Sample {
        total: value(event.addr as i64),
        free: size,
        process: allocated,
        others: reserved,
        bar1: value(event.extra),
        ..Sample::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_comes_back_from_its_events() {
        let sample = Sample { total: Some(9), others: Some(0), pool_used: Some(7), ..Sample::default() };
        let events = events(1, Api::Nvml, &sample);
        let back = events.iter().map(sample_of).fold(Sample::default(), Sample::updated);
        assert_eq!((events.len(), back), (2, sample));
    }
}
