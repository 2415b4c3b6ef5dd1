//! The rows of ranges and marks.

use memtrace_record::Recorder;
use memtrace_record::intern::{ContextId, TextId};
use memtrace_trace::{Api, Event, Kind};

use crate::attribution::steps;

/// Records a row of a range or a mark.
pub(crate) fn record(api: Api, recorder: &'static Recorder, kind: Kind, name: TextId, context: ContextId) {
    let step = steps::current();
    recorder.record(|clock_ns| Event {
        clock_ns,
        kind: kind as u8,
        api: api as u8,
        device: Event::HOST,
        context,
        step,
        extra: i64::from(name),
        ..Event::default()
    });
}
