//! A lane is the producer end of the event queue for one thread.

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
use crate::fast_tls::fast_tls;
use crate::per_thread::{PerThread, thread_id};

/// The time limit for a hook's wait for a free chunk. After that, the event goes to the overflow list or is
/// dropped.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);

/// The part of a lane that only its thread uses.
struct Lane {
    queue: &'static EventQueue,
    shared: Arc<LaneShared>,
    tid: u32,
    chunk: Option<ChunkWriter>,
    chunks: u32,
    /// The clock of the last event.
    last: u64,
    /// The number of dropped events that no `Lost` event reports yet.
    unreported: u64,
    /// The number of skipped ops that no `Lost` event reports yet. The next chunk begins with one event that
    /// reports all of them, because one row for each skipped op would take as much room as the row of the op.
    left_out: u64,
    /// True if the last wait for a free chunk failed.
    waited: bool,
}

/// The lane of a thread, to which [`crate::fast_tls`] points.
struct ThreadLane {
    queue: &'static EventQueue,
    /// True while the lane is in use. A signal handler that interrupts this use must not touch the lane.
    busy: Cell<bool>,
    /// True if the lane exists for one event only.
    for_one_event: bool,
    lane: UnsafeCell<Lane>,
}

/// Frees the lane of a thread that ends.
struct LaneOwner;

static OWNER: PerThread<LaneOwner> = PerThread::new(|| LaneOwner);

impl Drop for LaneOwner {
    fn drop(&mut self) {
        // SAFETY: `fast_tls` returns the words of the calling thread.
        let own = unsafe { (*fast_tls()).lane.replace(null_mut()) };
        if !own.is_null() {
            // SAFETY: `other_lane` created it with `Box::into_raw`, and the word is null now.
            drop(unsafe { Box::from_raw(own.cast::<ThreadLane>()) });
        }
    }
}

impl EventQueue {
    /// Records one event. `make` gets the current clock, and must neither record nor intern.
    #[inline(always)]
    pub(crate) fn record(&'static self, make: impl FnOnce(u64) -> Event) {
        if self.is_closed() {
            self.drop_event();
        } else {
            with_lane(self, |lane| lane.record(make));
        }
    }

    /// Counts an event that came after the end of the trace.
    #[cold]
    #[inline(never)]
    fn drop_event(&'static self) {
        with_lane(self, Lane::drop_event);
    }

    /// Announces an event of this thread and returns its clock. [`EventQueue::commit`] must record the event.
    pub(crate) fn begin(&'static self) -> u64 {
        with_lane(self, Lane::begin)
    }

    /// Records the event that [`EventQueue::begin`] announced.
    pub(crate) fn commit(&'static self, event: Event) {
        with_lane(self, |lane| if self.is_closed() { lane.abandon() } else { lane.commit(event) });
    }

    /// Counts an op of this thread that has no row because the pool was short.
    pub(crate) fn drop_op(&'static self) {
        with_lane(self, Lane::drop_op);
    }

    /// Adds a definition and the slots that follow it.
    pub(crate) fn define(&'static self, events: &[Event]) {
        // Nobody reads a closed queue, so its full chunks would not be recycled and the pool would run out.
        if !self.is_closed() {
            with_lane(self, |lane| lane.define(events));
        }
    }
}

/// Runs `work` on the lane of the calling thread. The lane is created at its first use. A thread that is
/// ending and has lost its lane gets a new lane for this event only, because its other destructors may still
/// free memory.
#[inline(always)]
fn with_lane<T>(queue: &'static EventQueue, work: impl FnOnce(&mut Lane) -> T) -> T {
    // SAFETY: `fast_tls` returns the words of the calling thread, whose lane lives until the thread's
    // `LaneOwner` is dropped.
    let own = unsafe { (*fast_tls()).lane.get().cast::<ThreadLane>().as_ref() };
    let own: *const ThreadLane = match own {
        Some(own) if std::ptr::eq(own.queue, queue) && !own.busy.get() => own,
        _ => other_lane(queue),
    };
    // SAFETY: `own` is the lane of the thread, or the lane that `other_lane` has just created.
    let (result, ends) = unsafe { ((*own).run(work), (*own).for_one_event) };
    if ends {
        // SAFETY: `other_lane` created it with `Box::into_raw` for this event alone.
        drop(unsafe { Box::from_raw(own.cast_mut()) });
    }
    result
}

/// Creates a lane for a thread that has no usable lane in this queue. The lane is for one event only if the
/// thread's own lane is in use, or if the thread is ending and has lost its own lane.
#[cold]
#[inline(never)]
fn other_lane(queue: &'static EventQueue) -> *const ThreadLane {
    // SAFETY: `fast_tls` returns the words of the calling thread.
    let word = unsafe { &(*fast_tls()).lane };
    // SAFETY: as in `with_lane`.
    let before = unsafe { word.get().cast::<ThreadLane>().as_ref() };
    let is_busy = before.is_some_and(|own| std::ptr::eq(own.queue, queue));
    let for_one_event = is_busy || OWNER.with(|_| ()).is_none();
    let lane = UnsafeCell::new(Lane::new(queue));
    let own = Box::into_raw(Box::new(ThreadLane { queue, busy: Cell::new(false), for_one_event, lane }));
    if !for_one_event {
        // A lane from before a fork is leaked, because its chunks belong to the parent.
        word.set(own.cast());
    }
    own
}

impl ThreadLane {
    #[inline(always)]
    fn run<T>(&self, work: impl FnOnce(&mut Lane) -> T) -> T {
        /// Sets `busy` back to false when it is dropped, so that a panic also does so.
        struct Free<'a>(&'a Cell<bool>);
        impl Drop for Free<'_> {
            #[inline(always)]
            fn drop(&mut self) {
                self.0.set(false);
            }
        }
        self.busy.set(true);
        let _free = Free(&self.busy);
        // SAFETY: only this thread has the lane, and `busy` excludes a second use on it.
        work(unsafe { &mut *self.lane.get() })
    }
}

impl Lane {
    fn new(queue: &'static EventQueue) -> Lane {
        Lane {
            queue,
            shared: queue.register_lane(),
            tid: thread_id(),
            chunk: None,
            chunks: 0,
            last: 0,
            unreported: 0,
            left_out: 0,
            waited: false,
        }
    }

    /// Records one event. `make` gets the current clock.
    #[inline(always)]
    fn record(&mut self, make: impl FnOnce(u64) -> Event) {
        self.shared.pending.store(self.last, Ordering::Relaxed);
        let now = clock::now_ns();
        self.last = now;
        match &mut self.chunk {
            // The event is created directly in its slot, because a copy from the stack would take as long as
            // reading the clock.
            Some(chunk) if chunk.room() > 0 && self.unreported == 0 => chunk.push(make(now)),
            _ => self.push_slowly(make(now)),
        }
        self.shared.pending.store(IDLE, Ordering::Release);
    }

    /// Announces an event whose call has not returned yet, and returns its clock. [`Lane::commit`] must
    /// record the event.
    fn begin(&mut self) -> u64 {
        self.shared.announced.store(self.last, Ordering::Relaxed);
        let now = clock::now_ns();
        self.shared.announced.store(now, Ordering::Release);
        now
    }

    /// Records the event that [`Lane::begin`] announced.
    fn commit(&mut self, event: Event) {
        self.last = self.last.max(event.clock_ns);
        self.push(event);
        self.shared.announced.store(IDLE, Ordering::Release);
    }

    /// Counts the event that [`Lane::begin`] announced as dropped, because the trace has ended.
    fn abandon(&mut self) {
        self.drop_event();
        self.shared.announced.store(IDLE, Ordering::Release);
    }

    /// Counts an event as dropped.
    fn drop_event(&mut self) {
        self.pool().losses(self.shared.id).dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a skipped op as dropped. The next chunk reports the skipped ops.
    fn drop_op(&mut self) {
        self.left_out += 1;
        self.pool().losses(self.shared.id).dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Adds a definition and the slots that follow it.
    fn define(&mut self, events: &[Event]) {
        if self.chunk.as_ref().is_none_or(|chunk| chunk.room() < events.len()) && !self.next_chunk() {
            // The definition must not be dropped, because its id would then have no meaning until the end of
            // the trace.
            self.queue.keep_definition(events);
            return;
        }
        if let Some(chunk) = &mut self.chunk {
            chunk.push_all(events);
        }
    }

    fn push(&mut self, event: Event) {
        match &mut self.chunk {
            Some(chunk) if chunk.room() > 0 && self.unreported == 0 => chunk.push(event),
            _ => self.push_slowly(event),
        }
    }

    #[cold]
    fn push_slowly(&mut self, event: Event) {
        if self.chunk.as_ref().is_none_or(|chunk| chunk.room() < 2) && !self.next_chunk() {
            let event = OverflowEvent { lane: self.shared.id, tid: self.tid, event };
            if !self.queue.overflow(event) {
                self.unreported += 1;
            }
            return;
        }
        if let Some(chunk) = &mut self.chunk {
            if self.unreported + self.left_out > 0 {
                let events = std::mem::take(&mut self.unreported) + std::mem::take(&mut self.left_out);
                let header = Header::new(event.clock_ns, Api::Memtrace, 0);
                chunk.push(Payload::Lost { events }.pack(header));
            }
            chunk.push(event);
        }
    }

    /// Hands the chunk to the writer thread and takes a free chunk. Returns false if no chunk is free.
    fn next_chunk(&mut self) -> bool {
        if let Some(full) = self.chunk.take() {
            full.finish();
        }
        // After a failed wait, the thread does not wait again until it has got a chunk, because the program
        // has waited long enough.
        let patience = if self.waited { Duration::ZERO } else { PATIENCE };
        if !patience.is_zero() && self.pool().is_empty() {
            // The writer thread must be woken, because it reads the queue at longer intervals than this
            // thread waits.
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
    /// Hands the last chunk of a thread that ends to the writer thread, and marks the lane as closed.
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            chunk.finish();
        }
        // After `finish`, so that the writer thread finds the chunk in one of the two places at any time.
        self.shared.chunk.store(NO_CHUNK, Ordering::Release);
        self.shared.pending.store(IDLE, Ordering::Release);
        self.shared.announced.store(IDLE, Ordering::Release);
        self.shared.closed.store(true, Ordering::Release);
    }
}
