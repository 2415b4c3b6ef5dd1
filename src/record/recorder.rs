//! The process's recorder: what hooks call.
//!
//! It starts at the first event that is worth a trace (device memory, or an explicit mark), so that a
//! process which never uses the GPU leaves nothing and pays nothing. A fork forgets it: the child
//! starts one of its own when it comes to that.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use memtrace_trace::config::{Settings, fill};
use memtrace_trace::event_bytes::text_events;
use memtrace_trace::journal::{Run, process_start};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::sample::Sample;
use memtrace_trace::{Api, Event, Kind, Meta};

use crate::clock;
use crate::intern::{Context, ContextId, Frame, StackId, TextId, with_tables};
use crate::queue::chunk_pool::Pool;
use crate::queue::lane::{IDLE, Lane, LaneShared, NO_CHUNK, with_lane};
use crate::queue::overflow::LooseEvents;
use crate::write::{output, writer};

/// What is known of each of some devices now, and who told it.
pub type Look = fn(&[i8]) -> Vec<(i8, Api, Sample)>;

/// What the recorder must know of the process; made once, at load.
pub struct Session {
    /// The settings.
    pub settings: Settings,
    /// The folder of the trace, absolute: the program may change its own.
    pub out: PathBuf,
    /// The host's name, as it may stand in a file name.
    pub host: String,
    /// The distributed rank.
    pub rank: i32,
    /// The allocator's rule.
    pub rounding: Rounding,
    /// Is the native caching allocator the one that reports? Else the runtime's calls are all there is.
    pub caching: bool,
    /// Fills in what only a running CUDA can tell; called on the writer thread.
    pub describe: fn(&mut Meta),
    /// What the last row says beside our own counts, in words; called on the writer thread at the end.
    pub conclude: fn() -> String,
    /// Looks at devices, CUDA ordinals; called on the writer thread.
    pub sample: Look,
    /// Says a line on stderr, `memtrace: ` before it.
    pub say: fn(&str),
}

impl Session {
    /// A name of the settings with its places filled.
    #[must_use]
    pub fn named(&self, pattern: &str) -> String {
        // What stands for a run may come from anywhere.
        let run: String = self
            .settings
            .run_id
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' })
            .collect();
        fill(pattern, &self.host, self.rank, std::process::id(), &run)
    }
}

/// What the writer thread is asked to do.
pub(crate) enum Command {
    /// Bring the trace up to date now, and say whether it is.
    Flush(Sender<bool>),
    /// Look at the events now: an OOM wants its lines on stderr.
    Nudge,
    /// The process is about to become another program: end the trace, answer, and wait.
    Suspend(Sender<()>),
    /// It did not: go on.
    Resume,
    /// Write everything and end.
    Finish,
}

/// The recorder of a process.
pub struct Recorder {
    pub(crate) session: &'static Session,
    pool: Pool,
    pub(crate) start_ns: u64,
    pid: u32,
    /// Lanes that the writer thread has not seen yet.
    lanes: Mutex<Vec<Arc<LaneShared>>>,
    next_lane: AtomicU32,
    /// Definitions that found no chunk, each with the slots behind it.
    kept: Mutex<Vec<Vec<Event>>>,
    pub(crate) loose: LooseEvents,
    commands: (Sender<Command>, Receiver<Command>),
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The writer thread says here that the trace exists, or that it cannot.
    ready: (Sender<()>, Receiver<()>),
    /// Grows while the writer thread gets on.
    progress: AtomicU64,
    /// How many times what models hold is about to be tagged, after an OOM.
    tags_due: AtomicU32,
    /// No more events: the trace is finished, or cannot be written.
    closed: AtomicBool,
}

/// How long the first event waits for the trace to exist: some ms, more on a slow disk, and no longer
/// than this when the writer thread waits for a lock of the loader that the first event's thread holds.
const START: Duration = Duration::from_millis(250);

/// How long the end of the process waits for a writer thread that does not get on.
const STALLED: Duration = Duration::from_secs(5);

static RECORDER: AtomicPtr<Recorder> = AtomicPtr::new(std::ptr::null_mut());
static STATE: AtomicU8 = AtomicU8::new(IDLE_STATE);
const IDLE_STATE: u8 = 0;
const STARTING: u8 = 1;
const STARTED: u8 = 2;

/// The training step of the process; -1 before the first.
pub static STEP: AtomicI32 = AtomicI32::new(-1);

impl Recorder {
    /// The recorder, when it has started.
    #[inline]
    #[must_use]
    pub fn active() -> Option<&'static Recorder> {
        let recorder = RECORDER.load(Ordering::Acquire);
        // SAFETY: the pointer comes from `Box::leak` in `start` and is never freed.
        unsafe { recorder.as_ref() }
    }

    /// The recorder, started now when it was not; `None` when it cannot be.
    #[inline]
    pub fn get(session: &'static Session) -> Option<&'static Recorder> {
        Recorder::active().or_else(|| Recorder::start(session))
    }

    #[cold]
    fn start(session: &'static Session) -> Option<&'static Recorder> {
        loop {
            match STATE.compare_exchange(IDLE_STATE, STARTING, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => break,
                // Another thread is at it; it takes some ms.
                Err(STARTING) => std::thread::yield_now(),
                Err(_) => return Recorder::active(),
            }
        }
        let recorder: &'static Recorder = match Recorder::new(session) {
            Ok(recorder) => &*Box::leak(Box::new(recorder)),
            Err(error) => {
                (session.say)(&format!(
                    "not tracing: no memory for the event buffer ({error}); try MEMTRACE_BUFFER=4m"
                ));
                STATE.store(STARTED, Ordering::Release);
                return None;
            }
        };
        with_tables(|tables| {
            for (id, text) in tables.texts() {
                recorder.define_text(id, text);
            }
            for (id, frame) in tables.stacks() {
                recorder.define_stack(id, frame);
            }
            for (id, context) in tables.contexts() {
                recorder.define_context(id, context);
            }
            // Under the lock: from here on, who numbers something new defines it too.
            RECORDER.store(std::ptr::from_ref(recorder).cast_mut(), Ordering::Release);
        });
        match writer::spawn(recorder) {
            Ok(thread) => {
                *lock(&recorder.thread) = Some(thread);
                // A kill from here on finds a trace that names its journal. Once in a process's life.
                let _ = recorder.ready.1.recv_timeout(START);
            }
            Err(error) => {
                (session.say)(&format!("not tracing: cannot start a thread ({error})"));
                recorder.closed.store(true, Ordering::Release);
            }
        }
        STATE.store(STARTED, Ordering::Release);
        Some(recorder)
    }

    fn new(session: &'static Session) -> std::io::Result<Recorder> {
        let start_ns = clock::now_ns();
        let name = format!("memtrace-{}-{}.journal", std::process::id(), start_ns);
        let folders = output::journal_folders(session.settings.buffer_bytes);
        let folders: Vec<_> = folders.iter().map(PathBuf::as_path).collect();
        let run = Run {
            pid: std::process::id(),
            rank: session.rank as u32,
            start_ns,
            process_start: process_start(std::process::id()).unwrap_or(0),
            power2_divisions: session.rounding.power2_divisions,
            rules: u64::from(session.rounding.caching) | u64::from(session.caching) << 1,
        };
        Ok(Recorder {
            session,
            pid: std::process::id(),
            pool: Pool::new(session.settings.buffer_bytes, &folders, &name, run)?,
            start_ns,
            lanes: Mutex::new(Vec::new()),
            next_lane: AtomicU32::new(0),
            kept: Mutex::new(Vec::new()),
            loose: LooseEvents::new(),
            commands: bounded(64),
            thread: Mutex::new(None),
            ready: bounded(1),
            progress: AtomicU64::new(0),
            tags_due: AtomicU32::new(0),
            closed: AtomicBool::new(false),
        })
    }

    /// The child of a fork: the parent's recorder, its thread and its chunks are not ours.
    pub fn forget_after_fork() {
        clock::forget_after_fork();
        RECORDER.store(std::ptr::null_mut(), Ordering::Release);
        STATE.store(IDLE_STATE, Ordering::Release);
    }

    /// Records one event: `make` gets the clock, which is read here. It must not record nor intern.
    #[inline(always)]
    pub fn record(&'static self, make: impl FnOnce(u64) -> Event) {
        if !self.closed.load(Ordering::Relaxed) {
            with_lane(self, |lane| lane.record(make));
        }
    }

    /// Announces an event whose outcome is known later (a call that frees: its order is the time
    /// before the call). Every `begin` is followed by a [`Recorder::commit`] on the same thread.
    #[must_use]
    pub fn begin(&'static self) -> u64 {
        with_lane(self, Lane::begin)
    }

    /// Ends what [`Recorder::begin`] announced.
    pub fn commit(&'static self, event: Event) {
        with_lane(self, |lane| lane.commit(event));
    }

    /// Has the writer thread look at the events soon.
    pub fn nudge(&self) {
        let _ = self.commands.0.try_send(Command::Nudge);
    }

    /// Waits until what was recorded so far is in the file, up to `patience`; false when it is not. A thread
    /// that is in the middle of a call that gives memory back holds up what came after the call's beginning.
    pub fn flush(&self, patience: Duration) -> bool {
        let (done, answer) = bounded(1);
        self.commands.0.send_timeout(Command::Flush(done), patience).is_ok()
            && answer.recv_timeout(patience) == Ok(true)
    }

    /// Writes everything and ends the trace; for the end of the process. In the child of a `vfork`,
    /// whose memory is its parent's, it does nothing.
    pub fn finish(&self) {
        if !self.is_of_this_process() {
            return;
        }
        let Some(thread) = lock(&self.thread).take() else { return };
        if self.commands.0.send_timeout(Command::Finish, STALLED).is_err() {
            return;
        }
        self.wait_until(|| thread.is_finished());
    }

    /// Waits as long as the writer thread gets on; false when it does not. A process that leaves from a
    /// signal handler may hold a lock that the writer thread needs: then the journal has the rest.
    fn wait_until(&self, is_done: impl Fn() -> bool) -> bool {
        let (mut progress, mut since) = (0, Instant::now());
        while !is_done() {
            let now = self.progress.load(Ordering::Relaxed);
            if now != progress {
                (progress, since) = (now, Instant::now());
            } else if since.elapsed() > STALLED {
                return false;
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        true
    }

    /// Is this the process that records, and not the child of a `vfork`, which borrows its memory?
    #[must_use]
    pub fn is_of_this_process(&self) -> bool {
        std::process::id() == self.pid
    }

    /// Ends the trace for now: the process is about to become another program. [`Recorder::resume`] takes the
    /// end back. False when the trace is not there, or its thread does not get on.
    pub fn suspend(&self) -> bool {
        if !self.is_of_this_process() || self.closed.load(Ordering::Acquire) {
            return false;
        }
        let (done, answer) = bounded(1);
        self.commands.0.send_timeout(Command::Suspend(done), STALLED).is_ok()
            && self.wait_until(|| !answer.is_empty())
    }

    /// The process did not become another program.
    pub fn resume(&self) {
        let _ = self.commands.0.send_timeout(Command::Resume, STALLED);
    }

    /// Does somebody wait for the writer thread to end?
    pub(crate) fn is_finishing(&self) -> bool {
        lock(&self.thread).is_none()
    }

    /// The writer thread ends by itself, and takes the process with it: nobody is to wait for it.
    pub(crate) fn let_thread_go(&self) {
        drop(lock(&self.thread).take());
    }

    /// Counts an op whose row was left out because the pool was short.
    pub fn drop_op(&'static self) {
        with_lane(self, Lane::drop_op);
    }

    /// Is the chunk pool so full that what can be missed should be?
    #[inline]
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.pool.is_short()
    }

    pub(crate) fn pool(&'static self) -> &'static Pool {
        &self.pool
    }

    pub(crate) fn commands(&self) -> &Receiver<Command> {
        &self.commands.1
    }

    /// Keeps a definition that found no chunk, for the writer thread; a kill loses it.
    pub(crate) fn keep_definition(&self, events: &[Event]) {
        lock(&self.kept).push(events.to_vec());
    }

    pub(crate) fn kept_definitions(&self) -> Vec<Vec<Event>> {
        std::mem::take(&mut *lock(&self.kept))
    }

    pub(crate) fn got_on(&self) {
        self.progress.fetch_add(1, Ordering::Relaxed);
    }

    /// What models hold is tagged soon: the lines of an OOM wait for it. Said before the OOM is recorded.
    pub fn tags_follow(&self) {
        self.tags_due.fetch_add(1, Ordering::AcqRel);
    }

    /// What [`Recorder::tags_follow`] announced is recorded, or does not come.
    pub fn tags_came(&self) {
        let less = |due: u32| due.checked_sub(1);
        let _ = self.tags_due.fetch_update(Ordering::AcqRel, Ordering::Relaxed, less);
        self.nudge();
    }

    pub(crate) fn are_tags_due(&self) -> bool {
        self.tags_due.load(Ordering::Acquire) > 0
    }

    pub(crate) fn say_ready(&self) {
        let _ = self.ready.0.try_send(());
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    pub(crate) fn lanes(&self) -> MutexGuard<'_, Vec<Arc<LaneShared>>> {
        lock(&self.lanes)
    }

    /// Takes the lane with this number out of the list of new ones.
    pub(crate) fn take_lane(&self, id: u32) -> Option<Arc<LaneShared>> {
        let mut lanes = self.lanes();
        let index = lanes.iter().position(|lane| lane.id == id)?;
        Some(lanes.swap_remove(index))
    }

    pub(crate) fn register_lane(&self) -> Arc<LaneShared> {
        let lane = Arc::new(LaneShared {
            id: self.next_lane.fetch_add(1, Ordering::Relaxed),
            pending: AtomicU64::new(IDLE),
            announced: AtomicU64::new(IDLE),
            chunk: AtomicU32::new(NO_CHUNK),
            counted: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        });
        self.lanes().push(Arc::clone(&lane));
        lane
    }

    fn define(&'static self, events: &[Event]) {
        // Nobody reads them any more, and nobody would give a full chunk back.
        if !self.closed.load(Ordering::Relaxed) {
            with_lane(self, |lane| lane.define(events));
        }
    }

    fn define_text(&'static self, id: TextId, text: &str) {
        self.define(&text_events(id, text));
    }

    fn define_stack(&'static self, id: StackId, frame: Frame) {
        let event = Event {
            kind: Kind::DefineStack as u8,
            addr: u64::from(id),
            size: i64::from(frame.parent),
            extra: i64::from(frame.text),
            flags: frame.kind as u8,
            ..Event::default()
        };
        self.define(&[event]);
    }

    fn define_context(&'static self, id: ContextId, context: Context) {
        let event = Event {
            kind: Kind::DefineContext as u8,
            flags: context.flags,
            addr: u64::from(id),
            size: i64::from(context.op),
            allocated: u64::from(context.module),
            reserved: u64::from(context.phase),
            extra: i64::from(context.stack),
            clock_ns: context.stream as u64,
            ..Event::default()
        };
        self.define(&[event]);
    }
}

/// The number of `text`.
#[must_use]
pub fn text_id(text: &str) -> TextId {
    with_tables(|tables| {
        let (id, new) = tables.text(text);
        if new && let Some(recorder) = Recorder::active() {
            recorder.define_text(id, tables.text_of(id));
        }
        id
    })
}

/// The number of the stack `frame`.
#[must_use]
pub fn stack_id(frame: Frame) -> StackId {
    with_tables(|tables| {
        let (id, new) = tables.stack(frame);
        if new && let Some(recorder) = Recorder::active() {
            recorder.define_stack(id, frame);
        }
        id
    })
}

/// The number of `context`.
#[must_use]
pub fn context_id(context: Context) -> ContextId {
    with_tables(|tables| {
        let (id, new) = tables.context(context);
        if new && let Some(recorder) = Recorder::active() {
            recorder.define_context(id, context);
        }
        id
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
