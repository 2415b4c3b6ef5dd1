//! Definitions: the events that say which text, stack or context a number stands for.

use memtrace_trace::context::{Context, ContextId, Frame, StackId, TextId};
use memtrace_trace::event_bytes::text_events;
use memtrace_trace::{Event, Kind};

/// The definition of a text: the event and the slots behind it.
pub(crate) fn text(id: TextId, text: &str) -> Vec<Event> {
    text_events(id, text)
}

/// The definition of a stack.
pub(crate) fn stack(id: StackId, frame: Frame) -> Event {
    Event {
        kind: Kind::DefineStack as u8,
        addr: u64::from(id),
        size: i64::from(frame.parent),
        extra: i64::from(frame.text),
        flags: frame.kind as u8,
        ..Event::default()
    }
}

/// The definition of a context.
pub(crate) fn context(id: ContextId, context: Context) -> Event {
    Event {
        kind: Kind::DefineContext as u8,
        flags: context.flags,
        addr: u64::from(id),
        size: i64::from(context.op),
        allocated: u64::from(context.module),
        reserved: u64::from(context.phase),
        extra: i64::from(context.stack),
        clock_ns: context.stream as u64,
        ..Event::default()
    }
}
