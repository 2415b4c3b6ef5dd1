//! The recorder of a process: the interface that hooks call.
//!
//! The recorder starts at the first event that is worth a trace: device memory, or an explicit mark. A
//! process that never uses the GPU writes nothing, and no time is spent on it. A child, however it was
//! created, has no recorder ([`own_page`]) and starts its own recorder at its first such event.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memtrace_trace::context::{Context, ContextId, Frame, StackId, TextId};
use memtrace_trace::event::bytes::text_events;
use memtrace_trace::host::HostFiles;
use memtrace_trace::journal::{DetailAnswer, Run, journal_name, process_start};
use memtrace_trace::{Api, Event, Payload};

use crate::clock;
use crate::control::Control;
use crate::intern::{self, with_tables};
use crate::own_page::{self, OWN};
use crate::queue::chunk_pool::ChunkPool;
use crate::queue::event_queue::EventQueue;
use crate::session::Session;
use crate::write::{host, meta_row, output, writer};

/// Queues the events of one process for the writer thread.
pub struct Recorder {
    queue: EventQueue,
    control: &'static Control,
    pid: u32,
}

/// The state of a process that started no recorder, and of every new child.
const NOT_STARTED: u8 = 0;
const STARTING: u8 = 1;
const STARTED: u8 = 2;

/// The size of the event buffer that [`no_memory`] advises.
const SMALL_BUFFER: usize = 4 << 20;

pub use crate::step::STEP;

impl Recorder {
    /// Returns the recorder if it has started.
    #[inline]
    #[must_use]
    pub fn active() -> Option<&'static Recorder> {
        let recorder = OWN.recorder.load(Ordering::Acquire).cast::<Recorder>();
        // SAFETY: the pointer is null or points to the `Recorder` that `start` leaked, which is never freed.
        unsafe { recorder.as_ref() }
    }

    /// Returns the recorder, after starting it if necessary. Returns `None` if it cannot start.
    #[inline]
    pub fn get(session: &'static Session) -> Option<&'static Recorder> {
        Recorder::active().or_else(|| Recorder::start(session))
    }

    #[cold]
    fn start(session: &'static Session) -> Option<&'static Recorder> {
        loop {
            match OWN.state.compare_exchange(NOT_STARTED, STARTING, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                // Another thread starts the recorder, which takes some ms.
                Err(STARTING) => std::thread::yield_now(),
                Err(_) => return Recorder::active(),
            }
        }
        if own_page::is_unclaimed_child() {
            (session.start_anew)();
        }
        let start_ns = clock::now_ns();
        let recorder: &'static Recorder = match Recorder::new(session, start_ns) {
            Ok(recorder) => &*Box::leak(Box::new(recorder)),
            Err(error) => {
                (session.say)(&no_memory(session.settings.buffer_bytes, &error));
                OWN.state.store(STARTED, Ordering::Release);
                return None;
            }
        };
        with_tables(|tables| {
            for (id, text) in tables.texts() {
                recorder.queue.define(&text_events(id, text));
            }
            for (id, frame) in tables.stacks() {
                recorder.queue.define(&[Payload::DefineStack { id, frame }.define()]);
            }
            for (id, context) in tables.contexts() {
                recorder.queue.define(&[Payload::DefineContext { id, context }.define()]);
            }
            // The tables are still locked, so every text, stack or context interned later is defined by the
            // thread that interns it.
            OWN.recorder.store(std::ptr::from_ref(recorder).cast_mut().cast(), Ordering::Release);
        });
        match writer::spawn(session, &recorder.queue, recorder.control, start_ns) {
            // Only the thread that starts the recorder waits until the trace exists.
            Ok(thread) => recorder.control.attach(thread),
            Err(error) => {
                (session.fail)(&format!("not tracing: cannot start a thread ({error})"));
                recorder.queue.close();
                // No thread will write the trace. A journal that stays would look as if the process had been
                // killed.
                recorder.queue.pool().remove_file();
            }
        }
        OWN.state.store(STARTED, Ordering::Release);
        Some(recorder)
    }

    fn new(session: &'static Session, start_ns: u64) -> std::io::Result<Recorder> {
        let pid = std::process::id();
        let name = journal_name(pid, start_ns);
        let folders = output::journal_folders(session.settings.buffer_bytes);
        let folders: Vec<_> = folders.iter().map(PathBuf::as_path).collect();
        let run = Run {
            pid,
            rank: session.rank as u32,
            start_ns,
            process_start: process_start(pid).unwrap_or(0),
            power2_divisions: session.rounding.power2_divisions,
            rules: u64::from(session.rounding.caching) | u64::from(session.caching) << 1,
        };
        let pool = ChunkPool::new(session.settings.buffer_bytes, &folders, &name, run)?;
        meta_row::announce(session, &pool, start_ns);
        let control: &'static Control = Box::leak(Box::new(Control::new()));
        Ok(Recorder { queue: EventQueue::new(pool, control), control, pid })
    }

    /// Called in the child of a fork whose handlers run, before [`Recorder::start_anew`]. Forgets the
    /// parent's recorder, for a kernel that does not wipe the page of [`own_page`].
    pub fn forget_after_fork() {
        OWN.recorder.store(std::ptr::null_mut(), Ordering::Release);
        OWN.state.store(NOT_STARTED, Ordering::Release);
    }

    /// Called in every child before its first event. Resets the clock and marks the process's own page.
    pub fn start_anew() {
        clock::forget_after_fork();
        own_page::claim();
    }

    /// Records one event. `make` gets the current clock, and must neither record nor intern.
    #[inline(always)]
    pub fn record(&'static self, make: impl FnOnce(u64) -> Event) {
        self.queue.record(make);
    }

    /// Records that the program ends with the error `what` because the system refused it memory.
    pub fn record_refusal(&'static self, what: &str) {
        host::record(&self.queue, Api::Refused, HostFiles::default().address_space(), what);
    }

    /// Announces an event whose clock is the time before a call, as for a call that frees memory. Returns
    /// that clock. The same thread must end the event with [`Recorder::commit`].
    #[must_use]
    pub fn begin(&'static self) -> u64 {
        self.queue.begin()
    }

    /// Records the event that [`Recorder::begin`] announced.
    pub fn commit(&'static self, event: Event) {
        self.queue.commit(event);
    }

    /// Makes the writer thread read the queue now.
    pub fn nudge(&self) {
        self.control.nudge();
    }

    /// Waits until the file has every event recorded so far. Returns false if that takes longer than
    /// `patience`, and at once if the trace has ended or no writer thread could start. A thread that is inside a
    /// freeing call delays all events whose clocks are later than the beginning of that call.
    pub fn flush(&self, patience: Duration) -> bool {
        !self.queue.is_closed() && self.control.flush(patience)
    }

    /// Writes everything and ends the trace, at the end of the process. Does nothing in the child of a
    /// `vfork`, which shares the memory of its parent.
    pub fn finish(&self) {
        if self.is_of_this_process() {
            self.control.finish();
        }
    }

    /// Returns true if this process started the recorder. Returns false in the child of a `vfork`, which
    /// shares the memory of its parent.
    #[must_use]
    pub fn is_of_this_process(&self) -> bool {
        std::process::id() == self.pid
    }

    /// Ends the trace before an `exec`, unless the writer thread makes no progress. Returns true if
    /// [`Recorder::resume`] must be called when the `exec` fails, and false if there is no trace or if the
    /// writer thread takes no requests.
    pub fn suspend(&self) -> bool {
        self.is_of_this_process() && !self.queue.is_closed() && self.control.suspend()
    }

    /// Continues the trace after an `exec` that failed.
    pub fn resume(&self) {
        self.control.resume();
    }

    /// Counts an op that has no row because the pool was short.
    pub fn drop_op(&'static self) {
        self.queue.drop_op();
    }

    /// Returns true if few chunks are free, so that events of low value should be skipped.
    #[inline]
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.queue.is_short()
    }

    /// Takes the pending request of a command, if any, and answers it. Returns the number of steps that
    /// `memtrace live --detail` wants in detail, or `DetailRequest::SEARCH` for `memtrace leaks --holders`.
    #[must_use]
    pub fn take_detail_request(&'static self, answer: DetailAnswer) -> Option<u32> {
        self.queue.pool().take_detail_request(answer)
    }

    /// Announces that tags will follow an OOM, so that the lines about the OOM wait for these tags. Must be
    /// called before the OOM is recorded.
    pub fn tags_follow(&self) {
        self.control.expect_tags();
    }

    /// Reports that the tags announced by [`Recorder::tags_follow`] are recorded, or that they will not be.
    pub fn tags_came(&self) {
        self.control.tags_recorded();
    }
}

/// Returns the message about an event buffer of `bytes` that could not be allocated.
fn no_memory(bytes: usize, error: &std::io::Error) -> String {
    let advice = if bytes > SMALL_BUFFER { "; try MEMTRACE_BUFFER=4m" } else { "" };
    format!("not tracing: no memory for the event buffer ({error}){advice}")
}

/// Returns the id of `text`. Defines a new id in the queue if the recorder has started.
#[must_use]
pub fn text_id(text: &str) -> TextId {
    intern::text_id(text, |id, text| {
        if let Some(recorder) = Recorder::active() {
            recorder.queue.define(&text_events(id, text));
        }
    })
}

/// Returns the id of the stack with the innermost `frame`. Defines a new id in the queue if the recorder has
/// started.
#[must_use]
pub fn stack_id(frame: Frame) -> StackId {
    with_tables(|tables| {
        let (id, new) = tables.stack(frame);
        if new && let Some(recorder) = Recorder::active() {
            recorder.queue.define(&[Payload::DefineStack { id, frame }.define()]);
        }
        id
    })
}

/// Returns the id of `context`. Defines a new id in the queue if the recorder has started.
#[must_use]
pub fn context_id(context: Context) -> ContextId {
    with_tables(|tables| {
        let (id, new) = tables.context(context);
        if new && let Some(recorder) = Recorder::active() {
            recorder.queue.define(&[Payload::DefineContext { id, context }.define()]);
        }
        id
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_smaller_buffer_is_advised_only_if_it_is_smaller() {
        let error = std::io::Error::from(std::io::ErrorKind::OutOfMemory);
        assert!(no_memory(16 << 20, &error).ends_with("; try MEMTRACE_BUFFER=4m"));
        for bytes in [1 << 20, 4 << 20] {
            assert!(!no_memory(bytes, &error).contains("MEMTRACE_BUFFER"), "{bytes}");
        }
    }
}
