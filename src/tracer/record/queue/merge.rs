//! Merges the lanes: the events of all threads in the order of their clocks, up to a watermark.
//!
//! The events of a lane are in order. A lane can only add events after the watermark, which is the earliest
//! of these times: 1 ms ago, the clocks of events that are being recorded, and the clocks of announced
//! events. Events are read in place. A chunk is recycled only after its events are in the file
//! ([`Merge::release`]), so a killed process loses no event that is in a chunk.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_trace::Event;
use memtrace_trace::event::bytes::{bytes_of, text_slots};
use memtrace_trace::event::tied::first_of_tied;
use memtrace_trace::journal::Written;
use rustc_hash::FxHashMap;

use super::chunk_pool::{ChunkPool, ChunkReader};
use super::event_queue::{EventQueue, IDLE, LaneShared, NO_CHUNK};
use super::overflow::{MAX_OVERFLOW, OverflowEvent};
use crate::clock;

/// Within this time, a store becomes visible to the other cores. So if a lane appears idle, all its events
/// that are older than this are visible. (The lane needs no fence: its store precedes its read of the clock, and
/// processors drain a store buffer in well under 1 us.)
const SLACK_NS: u64 = 1_000_000;
/// An announced event no longer delays the other events if the queue is nearly full. This means that fewer
/// than this percentage of the chunks are free, and that at least this percentage of the chunks are full or
/// the overflow list is more than half full.
const HELD_UP_PERCENT: usize = 10;

/// A chunk that its thread has filled or is filling.
struct QueuedChunk {
    chunk: ChunkReader,
    /// The number of slots that were complete when the queue was last read. The definitions in these slots
    /// were passed on.
    seen: usize,
    full: bool,
}

/// The writer thread's view of a lane.
struct Source {
    shared: Arc<LaneShared>,
    tid: u32,
    chunks: VecDeque<QueuedChunk>,
    /// The index, in the lane, of the chunk after the last full chunk.
    next_index: u32,
    /// The index of the next slot to read in the first chunk.
    slot: usize,
    /// Events from the overflow list, in the order of the lane.
    overflow: VecDeque<Event>,
    /// The oldest event that was not emitted yet, if `has_head`.
    head: Event,
    has_head: bool,
    head_is_overflow: bool,
    /// The place of the first held event; see [`Merge::hold`].
    held: Option<LanePosition>,
    /// The clock of the last event; the clocks of a lane never decrease.
    last_ns: u64,
    /// Chunks that were read to the end, to be recycled.
    done: Vec<ChunkReader>,
}

/// A place in a lane.
#[derive(Clone, Copy)]
struct LanePosition {
    /// The number of chunks in [`Source::done`] before the place.
    done: usize,
    /// The chunk with the place, and the index of the slot.
    next: Option<(ChunkReader, usize)>,
}

/// What [`Merge::drain`] does with an event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Taken {
    /// The event was taken.
    Yes,
    /// The event was not taken, and the drain stops before it.
    No,
}

/// Why [`Merge::drain`] stopped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Drained {
    /// No event up to the watermark is left.
    All,
    /// The requested number of events was taken.
    Most,
    /// An event was not taken.
    Stopped,
}

/// Merges the lanes of a process.
#[derive(Default)]
pub(crate) struct Merge {
    sources: FxHashMap<u32, Source>,
    /// The number of events of the overflow list that were emitted.
    overflow_emitted: u64,
    /// `overflow_emitted` at the first held event, while events are held.
    held: Option<u64>,
}

impl Merge {
    /// Reads the lanes, passes definitions with the slots after them to `define`, and returns the watermark.
    pub(crate) fn collect(
        &mut self,
        queue: &'static EventQueue,
        define: &mut impl FnMut(&Event, &[u8]),
    ) -> u64 {
        let now = clock::now_ns().saturating_sub(SLACK_NS);
        let (mut watermark, mut announced) = (now, now);
        for shared in queue.take_new_lanes() {
            self.sources.insert(shared.id, Source::new(shared));
        }
        // Chunks that are being filled are read before full chunks, so that no chunk is missed. A chunk that
        // becomes full in between is in the channel of full chunks when that channel is read.
        let mut filling = Vec::new();
        for source in self.sources.values() {
            watermark = watermark.min(source.shared.pending.load(Ordering::Acquire));
            announced = announced.min(source.shared.announced.load(Ordering::Acquire));
            let chunk = source.shared.chunk.load(Ordering::Acquire);
            if chunk != NO_CHUNK {
                filling.push((source.shared.id, queue.pool().reader(chunk)));
            }
        }
        let mut full: Vec<_> =
            queue.pool().full().try_iter().map(|chunk| queue.pool().reader(chunk)).collect();
        full.sort_by_key(|chunk| chunk.place());
        for chunk in full {
            // A lane that registered after `take_new_lanes` above is still in the list of new lanes, where
            // `source` finds it.
            self.source(chunk.place().0, queue).add(chunk, true);
        }
        for OverflowEvent { lane, tid, event } in queue.overflow.take() {
            let source = self.source(lane, queue);
            source.tid = tid;
            source.overflow.push_back(event);
        }
        for (lane, chunk) in filling {
            if let Some(source) = self.sources.get_mut(&lane)
                && chunk.place() == (lane, source.next_index)
            {
                source.add(chunk, false);
            }
        }
        for kept in queue.take_definitions() {
            if let Some((definition, slots)) = kept.split_first() {
                define(definition, &slots.iter().flat_map(bytes_of).collect::<Vec<u8>>());
            }
        }
        for source in self.sources.values_mut() {
            source.read_definitions(define);
        }
        if self.is_held_up(queue.pool()) { watermark } else { watermark.min(announced) }
    }

    fn source(&mut self, lane: u32, queue: &'static EventQueue) -> &mut Source {
        self.sources.entry(lane).or_insert_with(|| {
            let shared = queue.take_new_lane(lane);
            Source::new(shared.expect("a lane is registered before it has events"))
        })
    }

    /// Passes the events up to `watermark` to `emit`, oldest first, each with its thread. Stops after `most`
    /// events, or at an event that `emit` does not take.
    pub(crate) fn drain<E>(
        &mut self,
        watermark: u64,
        most: usize,
        emit: &mut impl FnMut(u32, &Event) -> Result<Taken, E>,
    ) -> Result<Drained, E> {
        let mut given = 0;
        let Merge { sources, overflow_emitted, .. } = self;
        let mut sources: Vec<&mut Source> = sources.values_mut().collect();
        sources.retain_mut(|source| source.peek().is_some());
        sources.sort_unstable_by_key(|source| source.shared.id);
        loop {
            // Find the two oldest heads. Events are taken from the first lane until its clock reaches the
            // clock of the second head.
            let mut first: Option<(u64, usize)> = None;
            let mut second = u64::MAX;
            for (index, source) in sources.iter_mut().enumerate() {
                let Some(head) = source.peek() else { continue };
                match first {
                    Some((clock, _)) if head.clock_ns >= clock => second = second.min(head.clock_ns),
                    _ => {
                        second = first.map_or(u64::MAX, |(clock, _)| clock);
                        first = Some((head.clock_ns, index));
                    }
                }
            }
            let Some((clock, index)) = first.filter(|(clock, _)| *clock <= watermark) else {
                return Ok(Drained::All);
            };
            if given >= most {
                return Ok(Drained::Most);
            }
            let tied = || {
                let heads = sources
                    .iter()
                    .enumerate()
                    .filter(|(_, source)| source.has_head)
                    .map(|(index, source)| (index, &source.head));
                first_of_tied(heads.filter(|(_, head)| head.clock_ns == clock))
            };
            let index = if clock == second { tied().unwrap_or(index) } else { index };
            let source = &mut sources[index];
            let tid = source.tid;
            // If the clocks are equal, only one event is emitted at a time, because `first_of_tied` decides which event
            // is next.
            let last = watermark.min(second.saturating_sub(1));
            // The lane has a head: the one that was just found.
            loop {
                if emit(tid, &source.head)? == Taken::No {
                    return Ok(Drained::Stopped);
                }
                if source.head_is_overflow {
                    *overflow_emitted += 1;
                }
                source.next();
                given += 1;
                if given >= most || !source.has_head || source.head.clock_ns > last {
                    break;
                }
            }
        }
    }

    /// Holds the events that are emitted from now on: [`Merge::release`] leaves them in the journal, as if they
    /// were not emitted yet, until [`Merge::let_go`].
    pub(crate) fn hold(&mut self) {
        self.held = Some(self.overflow_emitted);
        for source in self.sources.values_mut() {
            source.held = Some(source.place());
        }
    }

    /// Ends the hold: the files have all events that were emitted so far, or will have them with the next
    /// flush.
    pub(crate) fn let_go(&mut self) {
        self.held = None;
        for source in self.sources.values_mut() {
            source.held = None;
        }
    }

    /// Stores in the journal that the events emitted so far are in the files, except held events, and
    /// recycles the chunks of these events. Called after a flush.
    pub(crate) fn release(&mut self, queue: &'static EventQueue, written: Written, part: u32) {
        let is_holding = self.held.is_some();
        let consumed = self.sources.values().flat_map(|source| {
            let LanePosition { done, next } = source.written(is_holding);
            source.done[..done].iter().map(|chunk| (*chunk, chunk.committed())).chain(next)
        });
        queue.pool().checkpoint(written, part, self.held.unwrap_or(self.overflow_emitted), consumed);
        for source in self.sources.values_mut() {
            let LanePosition { done, .. } = source.written(is_holding);
            for chunk in source.done.drain(..done) {
                queue.pool().recycle(chunk);
            }
            if let Some(held) = &mut source.held {
                held.done = 0;
            }
        }
        queue.pool().note_shortness();
        self.sources.retain(|_, source| {
            let closed = source.shared.closed.load(Ordering::Acquire);
            let is_empty = source.chunks.is_empty() && source.overflow.is_empty() && source.done.is_empty();
            !(closed && is_empty && queue.pool().full().is_empty() && queue.overflow.is_empty())
        });
    }

    /// Returns the number of events that the trace would lack if no more events were emitted: the dropped
    /// events, and the events on the overflow list.
    pub(crate) fn lost(&self, queue: &'static EventQueue) -> u64 {
        // The subtraction saturates, because other processes may write any value into the file of the counts.
        let overflowed = queue.pool().overflowed().saturating_sub(self.overflow_emitted);
        queue.pool().dropped().saturating_add(overflowed)
    }

    /// Returns true if a thread is recording an event, or has announced one.
    pub(crate) fn is_busy(&self) -> bool {
        let is_idle = |of: &AtomicU64| of.load(Ordering::Acquire) == IDLE;
        self.sources
            .values()
            .any(|Source { shared, .. }| !is_idle(&shared.pending) || !is_idle(&shared.announced))
    }

    /// Returns true if the pool is short because full chunks wait for an announced event, and not because
    /// many threads have a chunk each.
    fn is_held_up(&self, pool: &ChunkPool) -> bool {
        let full =
            || self.sources.values().flat_map(|source| &source.chunks).filter(|queued| queued.full).count();
        let overflow = || self.sources.values().map(|source| source.overflow.len()).sum::<usize>();
        pool.percent_free() < HELD_UP_PERCENT
            && (full() * 100 >= HELD_UP_PERCENT * pool.chunks() || overflow() * 2 > MAX_OVERFLOW)
    }
}

impl Source {
    fn new(shared: Arc<LaneShared>) -> Source {
        Source {
            shared,
            tid: 0,
            chunks: VecDeque::new(),
            next_index: 0,
            slot: 0,
            overflow: VecDeque::new(),
            head: Event::default(),
            has_head: false,
            head_is_overflow: false,
            held: None,
            last_ns: 0,
            done: Vec::new(),
        }
    }

    /// Returns the place after the last emitted event.
    fn place(&self) -> LanePosition {
        let next = self.chunks.front().map(|queued| (queued.chunk, self.slot));
        LanePosition { done: self.done.len(), next }
    }

    /// Returns the place up to which the files have the events. A lane that is newer than the hold has none.
    fn written(&self, is_holding: bool) -> LanePosition {
        match self.held {
            Some(held) => held,
            None if is_holding => LanePosition { done: 0, next: None },
            None => self.place(),
        }
    }

    /// Adds a chunk, or marks the chunk that was being filled as full.
    fn add(&mut self, chunk: ChunkReader, full: bool) {
        self.tid = chunk.tid();
        if full {
            self.next_index = chunk.place().1 + 1;
        }
        match self.chunks.back_mut() {
            Some(last) if last.chunk.number() == chunk.number() && !last.full => last.full = full,
            _ => self.chunks.push_back(QueuedChunk { chunk, seen: 0, full }),
        }
    }

    /// Reads the definitions in the slots that became complete since the last call.
    fn read_definitions(&mut self, define: &mut impl FnMut(&Event, &[u8])) {
        for queued in &mut self.chunks {
            let committed = queued.chunk.committed();
            while let Some(index) = queued.chunk.find_definition(queued.seen..committed) {
                let event = queued.chunk.event(index);
                queued.seen = index + 1;
                // Another process can write to the mapping, so the number of slots that the event claims is limited.
                let slots = text_slots(&event).min(committed - queued.seen);
                let mut bytes = Vec::with_capacity(slots * size_of::<Event>());
                for slot in queued.seen..queued.seen + slots {
                    bytes.extend(bytes_of(&queued.chunk.event(slot)));
                }
                queued.seen += slots;
                define(&event, &bytes);
            }
            queued.seen = committed;
        }
    }

    /// Returns the oldest event of the lane that was not emitted yet, from a chunk or from the overflow list.
    #[inline]
    fn peek(&mut self) -> Option<&Event> {
        if !self.has_head {
            self.find_head();
        }
        self.has_head.then_some(&self.head)
    }

    /// Looks for the head, which is in a chunk or in the overflow list.
    #[inline(always)]
    fn find_head(&mut self) {
        self.has_head = self.read_placed();
        if !self.overflow.is_empty() {
            self.prefer_older_overflow();
        }
        if self.has_head {
            // An announced event has the clock at which its call began, but events that the thread recorded
            // during the call precede it in the lane. So its clock is raised to the clock of the last of
            // these events.
            self.head.clock_ns = self.head.clock_ns.max(self.last_ns);
            self.last_ns = self.head.clock_ns;
        }
    }

    #[cold]
    fn prefer_older_overflow(&mut self) {
        if let Some(overflow) = self.overflow.front()
            && (!self.has_head || overflow.clock_ns < self.head.clock_ns)
        {
            self.head = *overflow;
            self.has_head = true;
            self.head_is_overflow = true;
        }
    }

    /// Reads the oldest event in the chunks that was not emitted yet into `head`, and skips definitions. Moves
    /// chunks that were read to the end to `done`. Returns false if the chunks have no such event.
    #[inline(always)]
    fn read_placed(&mut self) -> bool {
        loop {
            let Some(queued) = self.chunks.front() else { return false };
            if self.slot >= queued.seen {
                if !queued.full {
                    return false;
                }
                self.done.extend(self.chunks.pop_front().map(|queued| queued.chunk));
                self.slot = 0;
                continue;
            }
            self.head = queued.chunk.event(self.slot);
            if self.head.has_content() {
                return true;
            }
            self.slot += 1 + text_slots(&self.head);
        }
    }

    /// Goes to the next event, which becomes the head.
    #[inline(always)]
    fn next(&mut self) {
        if self.head_is_overflow {
            self.overflow.pop_front();
            self.head_is_overflow = false;
        } else {
            self.slot += 1;
        }
        self.find_head();
    }
}
