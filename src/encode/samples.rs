//! A look at a device as events, and back.

use memtrace_trace::sample::Sample;
use memtrace_trace::{Api, Event, Kind};

/// The events of a look: one, and another when there are pools or graphs.
#[must_use]
pub fn events(device: i8, api: Api, sample: &Sample) -> Vec<Event> {
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
#[must_use]
pub fn sample_of(event: &Event) -> Sample {
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
