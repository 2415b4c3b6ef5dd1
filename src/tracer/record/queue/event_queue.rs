//! The event queue of a process: the chunks, the lanes of its threads, and the events that found no chunk.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memtrace_trace::Event;

use super::chunk_pool::ChunkPool;
use super::overflow::{Overflow, OverflowEvent};
use crate::control::Control;

/// The value of [`LaneShared::pending`] and [`LaneShared::announced`] when the lane records no event.
pub(crate) const IDLE: u64 = u64::MAX;
/// The value of [`LaneShared::chunk`] when the lane fills no chunk.
pub(crate) const NO_CHUNK: u32 = u32::MAX;

/// The part of a lane that the writer thread reads.
#[repr(align(64))]
pub(crate) struct LaneShared {
    pub(crate) id: u32,
    /// A lower bound for the clock of the event that the thread is recording, or [`IDLE`]. The writer thread
    /// emits no event with a later clock until then.
    pub(crate) pending: AtomicU64,
    /// Same as `pending`, for an event that [`EventQueue::begin`] has announced. The call that the event
    /// records may take long.
    pub(crate) announced: AtomicU64,
    /// The chunk that the thread fills, or [`NO_CHUNK`].
    pub(crate) chunk: AtomicU32,
    /// True if the thread has ended, so that the lane gets no more events.
    pub(crate) closed: AtomicBool,
}

/// The event queue. Threads of the program fill it through their lanes, and the writer thread drains it.
pub(crate) struct EventQueue {
    /// True if the queue takes no more events, because the trace is finished or cannot be written.
    closed: AtomicBool,
    pool: ChunkPool,
    /// Lanes that were registered since the writer thread last took this list.
    new_lanes: Mutex<Vec<Arc<LaneShared>>>,
    next_lane: AtomicU32,
    /// Definitions that found no chunk, each with the slots after it.
    definitions: Mutex<Vec<Vec<Event>>>,
    pub(crate) overflow: Overflow,
    pub(crate) control: &'static Control,
}

impl EventQueue {
    pub(crate) fn new(pool: ChunkPool, control: &'static Control) -> EventQueue {
        EventQueue {
            closed: AtomicBool::new(false),
            pool,
            new_lanes: Mutex::new(Vec::new()),
            next_lane: AtomicU32::new(0),
            definitions: Mutex::new(Vec::new()),
            overflow: Overflow::new(),
            control,
        }
    }

    pub(crate) fn pool(&'static self) -> &'static ChunkPool {
        &self.pool
    }

    /// Returns true if few chunks are free, so that events of low value should be skipped.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        self.pool.is_short()
    }

    /// Returns true if the queue takes no more events.
    #[inline(always)]
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Closes the queue. Later events are only counted.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Keeps a definition that found no chunk, with the slots after it, in memory. The definition is lost if
    /// the process is killed.
    pub(crate) fn keep_definition(&self, events: &[Event]) {
        lock(&self.definitions).push(events.to_vec());
    }

    /// Takes the definitions that [`EventQueue::keep_definition`] kept.
    pub(crate) fn take_definitions(&self) -> Vec<Vec<Event>> {
        std::mem::take(&mut *lock(&self.definitions))
    }

    /// Puts an event that found no chunk on the overflow list. If the list is full, counts the event as
    /// dropped and returns false. The event is counted first, so that recovery counts it as lost if the
    /// process is killed before the trace has it.
    pub(crate) fn overflow(&self, kept: OverflowEvent) -> bool {
        let losses = self.pool.losses(kept.lane);
        if self.overflow.reserve() {
            losses.overflowed.fetch_add(1, Ordering::Relaxed);
            self.overflow.keep(kept);
            true
        } else {
            losses.dropped.fetch_add(1, Ordering::Relaxed);
            false
        }
    }

    /// Creates the shared part of a new lane, and adds it to the list of new lanes.
    pub(crate) fn register_lane(&self) -> Arc<LaneShared> {
        let lane = Arc::new(LaneShared {
            id: self.next_lane.fetch_add(1, Ordering::Relaxed),
            pending: AtomicU64::new(IDLE),
            announced: AtomicU64::new(IDLE),
            chunk: AtomicU32::new(NO_CHUNK),
            closed: AtomicBool::new(false),
        });
        lock(&self.new_lanes).push(Arc::clone(&lane));
        lane
    }

    /// Takes the lanes that registered since the last call.
    pub(crate) fn take_new_lanes(&self) -> Vec<Arc<LaneShared>> {
        std::mem::take(&mut *lock(&self.new_lanes))
    }

    /// Takes the new lane with this id. Returns `None` if no lane in the list has it.
    pub(crate) fn take_new_lane(&self, id: u32) -> Option<Arc<LaneShared>> {
        let mut lanes = lock(&self.new_lanes);
        let index = lanes.iter().position(|lane| lane.id == id)?;
        Some(lanes.swap_remove(index))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
