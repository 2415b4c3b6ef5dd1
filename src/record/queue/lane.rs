//! A thread's way to the writer: its current chunk, and what the writer may rely on.

use std::cell::{Cell, UnsafeCell};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use memtrace_trace::{Event, Kind};

use crate::clock;
use crate::fast_tls::words;
use crate::queue::chunk_pool::{ChunkWriter, Pool};
use crate::queue::overflow::Loose;
use crate::recorder::Recorder;

/// No event of this lane is under way.
pub(crate) const IDLE: u64 = u64::MAX;
/// No chunk is being filled.
pub(crate) const NO_CHUNK: u32 = u32::MAX;
/// How long a hook waits for a free chunk before it leaves its event to the recorder, or drops it.
pub(crate) const PATIENCE: Duration = Duration::from_millis(10);

/// What the writer thread sees of a lane.
#[repr(align(64))]
pub(crate) struct LaneShared {
    pub(crate) id: u32,
    /// A lower bound for the clock of the event that is being recorded, [`IDLE`] when there is none: the
    /// writer emits nothing later than that.
    pub(crate) pending: AtomicU64,
    /// The same of an event that was announced, whose call may take long.
    pub(crate) announced: AtomicU64,
    /// The chunk being filled.
    pub(crate) chunk: AtomicU32,
    /// How many events the thread counted, dropped ones included.
    pub(crate) counted: AtomicU64,
    /// How many of them were dropped.
    pub(crate) dropped: AtomicU64,
    /// The thread is gone: the lane gets no more events.
    pub(crate) closed: AtomicBool,
}

/// The filling end of a lane; belongs to one thread.
pub(crate) struct Lane {
    recorder: &'static Recorder,
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
    recorder: &'static Recorder,
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

/// Runs `work` on the calling thread's lane of `recorder`, made when there is none. A thread whose
/// locals are gone (its other destructors may still free memory) gets a lane for this one event.
#[inline(always)]
pub(crate) fn with_lane<T>(recorder: &'static Recorder, work: impl FnOnce(&mut Lane) -> T) -> T {
    // SAFETY: the thread's own words; what the word points at lives until the thread's `Owner` is dropped.
    let own = unsafe { (*words()).lane.get().cast::<Own>().as_ref() };
    let own: *const Own = match own {
        Some(own) if std::ptr::eq(own.recorder, recorder) && !own.busy.get() => own,
        _ => other_lane(recorder),
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
fn other_lane(recorder: &'static Recorder) -> *const Own {
    // SAFETY: the thread's own words.
    let word = unsafe { &(*words()).lane };
    // SAFETY: as in `with_lane`.
    let before = unsafe { word.get().cast::<Own>().as_ref() };
    let is_busy = before.is_some_and(|own| std::ptr::eq(own.recorder, recorder));
    let for_one_event = is_busy || OWNER.try_with(|_| ()).is_err();
    let lane = UnsafeCell::new(Lane::new(recorder));
    let own = Box::into_raw(Box::new(Own { recorder, busy: Cell::new(false), for_one_event, lane }));
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
    fn new(recorder: &'static Recorder) -> Lane {
        Lane {
            recorder,
            shared: recorder.register_lane(),
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
    pub(crate) fn record(&mut self, make: impl FnOnce(u64) -> Event) {
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
    pub(crate) fn begin(&mut self) -> u64 {
        self.shared.announced.store(self.last, Ordering::Relaxed);
        let now = clock::now_ns();
        self.shared.announced.store(now, Ordering::Release);
        now
    }

    /// Ends what [`Lane::begin`] announced.
    pub(crate) fn commit(&mut self, event: Event) {
        self.last = self.last.max(event.clock_ns);
        self.push(event);
        self.shared.announced.store(IDLE, Ordering::Release);
    }

    /// Counts an op that is left out on purpose; the next chunk tells of it.
    pub(crate) fn drop_op(&mut self) {
        self.shared.counted.store(self.shared.counted.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.left_out += 1;
        self.count_dropped();
    }

    fn count_dropped(&mut self) {
        self.shared.dropped.store(self.shared.dropped.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Adds events that belong together (a definition and its text) and are not counted.
    pub(crate) fn define(&mut self, events: &[Event]) {
        if self.chunk.as_ref().is_none_or(|chunk| chunk.room() < events.len()) && !self.next_chunk() {
            // What it names would have no name to the end of the trace.
            self.recorder.keep_definition(events);
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
            let loose = Loose { lane: self.shared.id, tid: self.tid, event };
            if !self.recorder.loose.keep(loose) {
                self.untold += 1;
                self.count_dropped();
            }
            return;
        }
        if let Some(chunk) = &mut self.chunk {
            if self.untold + self.left_out > 0 {
                let kind = Kind::Lost as u8;
                let size = (std::mem::take(&mut self.untold) + std::mem::take(&mut self.left_out)) as i64;
                chunk.push(Event { kind, size, clock_ns: event.clock_ns, ..Event::default() });
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
            self.recorder.nudge();
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

    fn pool(&self) -> &'static Pool {
        self.recorder.pool()
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
