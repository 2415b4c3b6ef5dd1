//! A thread's way to the writer: its current chunk, and what the writer may rely on.

use std::cell::{Cell, UnsafeCell};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use memtrace_trace::{Api, Event, Header, Payload};

use super::chunk_pool::{ChunkPool, ChunkWriter};
use super::event_queue::{EventQueue, IDLE, LaneShared, NO_CHUNK};
use super::overflow::OverflowEvent;
use crate::clock;
use crate::fast_tls::words;

/// How long a hook waits for a free chunk before it leaves its event to the recorder, or drops it.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);

/// The filling end of a lane; belongs to one thread.
struct Lane {
    queue: &'static EventQueue,
    shared: Arc<LaneShared>,
    tid: u32,
    chunk: Option<ChunkWriter>,
    chunks: u32,
    /// The clock of the last event.
    last: u64,
    /// Dropped events that no `Lost` event tells of yet.
    untold: u64,
    /// Ops left out on purpose that no `Lost` event tells of yet: the next chunk does, since a row for
    /// each would be no less than the op's own.
    left_out: u64,
    /// The last wait for a free chunk was in vain.
    waited: bool,
}

/// A thread's lane; the thread's word points at it.
struct Own {
    queue: &'static EventQueue,
    /// Is the thread in the middle of it? A signal handler that comes then must not touch it.
    busy: Cell<bool>,
    /// Does it end with the event that it was made for?
    for_one_event: bool,
    lane: UnsafeCell<Lane>,
}

/// Frees the thread's lane when the thread ends.
struct Owner;

thread_local! {
    static OWNER: Owner = const { Owner };
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: the thread's own words.
        let own = unsafe { (*words()).lane.replace(null_mut()) };
        if !own.is_null() {
            // SAFETY: `other_lane` made it with `Box::into_raw`, and the word that led to it is null now.
            drop(unsafe { Box::from_raw(own.cast::<Own>()) });
        }
    }
}

impl EventQueue {
    /// Records one event. `make` gets the clock, which is read here; it must neither record nor intern.
    #[inline(always)]
    pub(crate) fn record(&'static self, make: impl FnOnce(u64) -> Event) {
        if !self.is_closed() {
            with_lane(self, |lane| lane.record(make));
        }
    }

    /// Announces an event of this thread and returns its clock; [`EventQueue::commit`] records it.
    pub(crate) fn begin(&'static self) -> u64 {
        with_lane(self, Lane::begin)
    }

    /// Records the event that [`EventQueue::begin`] announced.
    pub(crate) fn commit(&'static self, event: Event) {
        with_lane(self, |lane| lane.commit(event));
    }

    /// Counts an op of this thread that has no row because the pool was short.
    pub(crate) fn drop_op(&'static self) {
        with_lane(self, Lane::drop_op);
    }

    /// Adds a definition and the slots behind it.
    pub(crate) fn define(&'static self, events: &[Event]) {
        // A closed queue has no reader, so a full chunk would never be recycled.
        if !self.is_closed() {
            with_lane(self, |lane| lane.define(events));
        }
    }
}

/// Runs `work` on the calling thread's lane of `queue`, made when there is none. A thread whose
/// locals are gone (its other destructors may still free memory) gets a lane for this one event.
#[inline(always)]
fn with_lane<T>(queue: &'static EventQueue, work: impl FnOnce(&mut Lane) -> T) -> T {
    // SAFETY: the thread's own words; what the word points at lives until the thread's `Owner` is dropped.
    let own = unsafe { (*words()).lane.get().cast::<Own>().as_ref() };
    let own: *const Own = match own {
        Some(own) if std::ptr::eq(own.queue, queue) && !own.busy.get() => own,
        _ => other_lane(queue),
    };
    // SAFETY: what the word points at, or what was made just now.
    let (result, ends) = unsafe { ((*own).run(work), (*own).for_one_event) };
    if ends {
        // SAFETY: `other_lane` made it with `Box::into_raw` for this event alone.
        drop(unsafe { Box::from_raw(own.cast_mut()) });
    }
    result
}

/// A lane for a thread that has none of this recorder: its own from now on, or one for one event when the
/// thread is in the middle of its own, or its locals are gone.
#[cold]
#[inline(never)]
fn other_lane(queue: &'static EventQueue) -> *const Own {
    // SAFETY: the thread's own words.
    let word = unsafe { &(*words()).lane };
    // SAFETY: as in `with_lane`.
    let before = unsafe { word.get().cast::<Own>().as_ref() };
    let is_busy = before.is_some_and(|own| std::ptr::eq(own.queue, queue));
    let for_one_event = is_busy || OWNER.try_with(|_| ()).is_err();
    let lane = UnsafeCell::new(Lane::new(queue));
    let own = Box::into_raw(Box::new(Own { queue, busy: Cell::new(false), for_one_event, lane }));
    if !for_one_event {
        // A lane from before a fork is not dropped: its chunks belong to the parent.
        word.set(own.cast());
    }
    own
}

impl Own {
    #[inline(always)]
    fn run<T>(&self, work: impl FnOnce(&mut Lane) -> T) -> T {
        /// A panic leaves the lane usable.
        struct Free<'a>(&'a Cell<bool>);
        impl Drop for Free<'_> {
            #[inline(always)]
            fn drop(&mut self) {
                self.0.set(false);
            }
        }
        self.busy.set(true);
        let _free = Free(&self.busy);
        // SAFETY: only this thread has the lane, and `busy` says that nobody else is at it.
        work(unsafe { &mut *self.lane.get() })
    }
}

impl Lane {
    fn new(queue: &'static EventQueue) -> Lane {
        Lane {
            queue,
            shared: queue.register_lane(),
            // SAFETY: takes nothing and cannot fail.
            tid: unsafe { libc::gettid() } as u32,
            chunk: None,
            chunks: 0,
            last: 0,
            untold: 0,
            left_out: 0,
            waited: false,
        }
    }

    /// Records one event with the clock read here; `make` gets it.
    #[inline(always)]
    fn record(&mut self, make: impl FnOnce(u64) -> Event) {
        self.shared.pending.store(self.last, Ordering::Relaxed);
        let now = clock::now_ns();
        self.last = now;
        self.count();
        match &mut self.chunk {
            // Made in its slot: a copy of it on the stack costs as much as the clock.
            Some(chunk) if chunk.room() > 0 && self.untold == 0 => chunk.push(make(now)),
            _ => self.push_slowly(make(now)),
        }
        self.shared.pending.store(IDLE, Ordering::Release);
    }

    /// Announces an event whose clock is now and whose outcome is not known yet; [`Lane::commit`]
    /// ends it. Gives the clock.
    fn begin(&mut self) -> u64 {
        self.shared.announced.store(self.last, Ordering::Relaxed);
        let now = clock::now_ns();
        self.shared.announced.store(now, Ordering::Release);
        now
    }

    /// Ends what [`Lane::begin`] announced.
    fn commit(&mut self, event: Event) {
        self.last = self.last.max(event.clock_ns);
        self.push(event);
        self.shared.announced.store(IDLE, Ordering::Release);
    }

    /// Counts an op that is left out on purpose; the next chunk tells of it.
    fn drop_op(&mut self) {
        self.shared.counted.store(self.shared.counted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.left_out += 1;
        self.count_dropped();
    }

    fn count_dropped(&mut self) {
        self.shared.dropped.store(self.shared.dropped.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Adds events that belong together (a definition and its text) and are not counted.
    fn define(&mut self, events: &[Event]) {
        if self.chunk.as_ref().is_none_or(|chunk| chunk.room() < events.len()) && !self.next_chunk() {
            // What it names would have no name to the end of the trace.
            self.queue.keep_definition(events);
            return;
        }
        if let Some(chunk) = &mut self.chunk {
            chunk.push_all(events);
        }
    }

    #[inline]
    fn count(&self) {
        self.shared.counted.store(self.shared.counted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    fn push(&mut self, event: Event) {
        self.count();
        match &mut self.chunk {
            Some(chunk) if chunk.room() > 0 && self.untold == 0 => chunk.push(event),
            _ => self.push_slowly(event),
        }
    }

    #[cold]
    fn push_slowly(&mut self, event: Event) {
        if self.chunk.as_ref().is_none_or(|chunk| chunk.room() < 2) && !self.next_chunk() {
            let event = OverflowEvent { lane: self.shared.id, tid: self.tid, event };
            if !self.queue.overflow.keep(event) {
                self.untold += 1;
                self.count_dropped();
            }
            return;
        }
        if let Some(chunk) = &mut self.chunk {
            if self.untold + self.left_out > 0 {
                let events = std::mem::take(&mut self.untold) + std::mem::take(&mut self.left_out);
                let header = Header::new(event.clock_ns, Api::Memtrace, 0);
                chunk.push(Payload::Lost { events }.pack(header));
            }
            chunk.push(event);
        }
    }

    /// Gives the chunk to the writer thread and takes a free one.
    fn next_chunk(&mut self) -> bool {
        if let Some(full) = self.chunk.take() {
            full.finish();
        }
        // Once a wait was in vain, for an event or for a definition, the next ones do not wait: the program
        // has waited enough.
        let patience = if self.waited { Duration::ZERO } else { PATIENCE };
        if !patience.is_zero() && self.pool().is_empty() {
            // The writer thread looks less often than this thread waits.
            self.queue.control.nudge();
        }
        self.chunk = self.pool().take(self.tid, self.shared.id, self.chunks, patience);
        self.waited = self.chunk.is_none();
        match &self.chunk {
            Some(chunk) => {
                self.chunks += 1;
                self.shared.chunk.store(chunk.number(), Ordering::Release);
                true
            }
            None => {
                self.shared.chunk.store(NO_CHUNK, Ordering::Release);
                false
            }
        }
    }

    fn pool(&self) -> &'static ChunkPool {
        self.queue.pool()
    }
}

impl Drop for Lane {
    /// The thread ends: what it recorded goes to the writer thread now.
    fn drop(&mut self) {
        self.shared.chunk.store(NO_CHUNK, Ordering::Release);
        if let Some(chunk) = self.chunk.take() {
            chunk.finish();
        }
        self.shared.pending.store(IDLE, Ordering::Release);
        self.shared.announced.store(IDLE, Ordering::Release);
        self.shared.closed.store(true, Ordering::Release);
    }
}
