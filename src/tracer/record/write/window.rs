//! Holds the events of a step without detail until the step ends.
//!
//! Only then is it known which blocks were short-lived, and whether the step set a new peak
//! ([`Encoder::plan_brief`](memtrace_encode::Encoder::plan_brief)). Until then, the events are in the journal, as
//! all events that are not in the file yet.

use std::time::{Duration, Instant};

use memtrace_trace::journal::SLOTS;
use memtrace_trace::{Event, Payload};

/// A window ends after this time even within a step, so that the file has a long step before it ends.
const LONGEST: Duration = Duration::from_secs(10);
/// A window ends when it holds this share of the events that the journal can hold, so that threads do not wait
/// for a free chunk. Held events also need this much memory outside the journal.
const SHARE: usize = 4;

/// The treatment of an event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// The event is encoded now.
    Encode,
    /// The window holds the event.
    Hold,
    /// The window must end, or begin, before the event.
    Turn,
}

/// The events of a step without detail, or of a part of a long one.
pub(crate) struct Window {
    is_open: bool,
    is_detailed: bool,
    /// The held events, each with its thread.
    events: Vec<(u32, Event)>,
    /// The number of events at which the window ends.
    most: usize,
    /// The step of the window; `None` before its first block.
    step: Option<i32>,
    opened: Instant,
    /// True if the window ends with its last event, because memory ran out.
    is_urgent: bool,
}

impl Window {
    /// Creates a closed window for a journal of this many chunks. `is_detailed` is true if the trace begins
    /// with detail.
    pub(crate) fn new(chunks: usize, is_detailed: bool) -> Window {
        Window {
            is_open: false,
            is_detailed,
            events: Vec::new(),
            most: chunks * SLOTS / SHARE,
            step: None,
            opened: Instant::now(),
            is_urgent: false,
        }
    }

    /// Decides about the next event. `switch` is the event's effect on detail, if it has one.
    pub(crate) fn next(&mut self, tid: u32, event: &Event, switch: Option<bool>) -> Next {
        if !self.is_open {
            if let Some(on) = switch {
                self.is_detailed = on;
                return Next::Encode;
            }
            return if self.is_detailed { Next::Encode } else { Next::Turn };
        }
        let block = event.unpack_block();
        let step = block.map(|(header, _)| header.step);
        // A step begins with its first allocation, as in the reports: what the program frees before it, such
        // as gradients, was the memory of the step before.
        let allocates = block.is_some_and(|(_, block)| block.bytes >= 0);
        let is_next_step = allocates && self.step.is_some_and(|current| step != Some(current));
        if switch.is_some() || is_next_step || self.is_urgent || self.events.len() >= self.most {
            return Next::Turn;
        }
        self.step = self.step.or(step);
        self.is_urgent = step.is_none() && matches!(event.unpack(), Some((_, Payload::OutOfMemory { .. })));
        self.events.push((tid, *event));
        Next::Hold
    }

    pub(crate) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Returns the clock of the first held event.
    pub(crate) fn first_ns(&self) -> Option<u64> {
        self.events.first().map(|(_, event)| event.clock_ns)
    }

    /// Returns true if the window must end now, although its step may go on.
    pub(crate) fn is_overdue(&self) -> bool {
        self.is_open && (self.is_urgent || self.opened.elapsed() >= LONGEST)
    }

    pub(crate) fn open(&mut self) {
        (self.is_open, self.step, self.opened) = (true, None, Instant::now());
    }

    /// Closes the window and returns its events; [`Window::keep`] takes the list back.
    pub(crate) fn close(&mut self) -> Vec<(u32, Event)> {
        (self.is_open, self.is_urgent) = (false, false);
        std::mem::take(&mut self.events)
    }

    /// Keeps an empty list for the next window.
    pub(crate) fn keep(&mut self, mut events: Vec<(u32, Event)>) {
        events.clear();
        self.events = events;
    }
}
