//! The rows of ranges and marks.

use memtrace_record::Recorder;
use memtrace_record::intern::ContextId;
use memtrace_trace::{Api, Event, Header, Payload};

use crate::attribution::steps;

/// Records a row of a range or a mark. `payload` returns the content of the row. `payload` is a closure, so
/// that the compiler sees which kind of payload is packed and reduces the packing to a few stores.
#[inline]
pub(crate) fn record(
    api: Api,
    recorder: &'static Recorder,
    payload: impl FnOnce() -> Payload,
    context: ContextId,
) {
    let step = steps::current();
    recorder.record(|clock_ns| {
        payload().pack(Header { clock_ns, api: Some(api), device: Event::HOST, context, step })
    });
}
