//! Who owns what is allocated now: the range stack of each thread, and the phase and the step of the
//! process.

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use memtrace_record::forklock::ForkLock;
use memtrace_record::intern::{Context, ContextId, TextId, with_tables};
use memtrace_record::recorder::{Recorder, STEP, context_id, text_id};
use memtrace_trace::ranges::{Meaning, meaning};
use memtrace_trace::{Api, Event, Kind};

use crate::init;

/// What an open range means, its text numbered.
#[derive(Clone, Copy)]
enum Role {
    Phase(TextId),
    ModulePath(TextId),
    Level(TextId),
    Op(TextId),
    Step,
}

/// An open range.
#[derive(Clone, Copy)]
struct Open {
    role: Role,
    /// The whole name, for the rows.
    name: TextId,
    /// The number of a start/end range; 0 for push/pop.
    id: u64,
    /// The number by which the process knows the phase.
    phase: u64,
    /// The NVTX domain: a pop closes the last range of its own.
    domain: usize,
    /// Is there a `range_begin` row? Ranges that opened before the trace did get theirs late.
    told: bool,
}

/// A thread's ranges and the context that follows from them.
struct Thread {
    open: RefCell<Vec<Open>>,
    context: Cell<ContextId>,
    /// The version of everything that `context` was made from; 0 makes it anew.
    version: Cell<u64>,
    /// 0 not asked yet, 1 no, 2 yes.
    autograd: Cell<u8>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread { open: RefCell::new(Vec::new()), context: Cell::new(0), version: Cell::new(0), autograd: Cell::new(0) }
    };
}

/// The phases that are open in the process, the last on top.
static PHASES: ForkLock<Vec<(u64, TextId)>> = ForkLock::new(Vec::new());
/// The phase on top.
static PHASE: AtomicU32 = AtomicU32::new(0);
/// Grows with every change of what a thread's context depends on beyond the thread: the phase, the
/// start of the recorder, the end of a range by another thread.
static VERSION: AtomicU64 = AtomicU64::new(1);
/// Numbers start/end ranges and phases.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);
/// Start/end ranges that a thread other than their own ended.
static ENDED: ForkLock<Vec<u64>> = ForkLock::new(Vec::new());

/// The words of `MEMTRACE_PHASES`.
static MORE_PHASES: OnceLock<Vec<String>> = OnceLock::new();

/// Sets the words that are phases beside those of [`memtrace_trace::ranges`].
pub(crate) fn set_phases(words: Vec<String>) {
    let _ = MORE_PHASES.set(words);
}

/// The context and the step for an event that this thread records now.
#[inline]
pub(crate) fn current() -> (ContextId, i32) {
    let version = VERSION.load(Ordering::Acquire);
    let context = THREAD.try_with(|thread| {
        if thread.version.get() == version { thread.context.get() } else { refresh(thread, version) }
    });
    (context.unwrap_or(0), STEP.load(Ordering::Relaxed))
}

/// The recorder has started: threads tell of the ranges that they opened before.
pub(crate) fn recorder_started() {
    VERSION.fetch_add(1, Ordering::AcqRel);
}

#[cold]
fn refresh(thread: &Thread, version: u64) -> ContextId {
    let context = thread.open.try_borrow_mut().map_or(0, |mut open| {
        drop_ended(&mut open);
        if let Some(recorder) = Recorder::active() {
            for range in open.iter_mut().filter(|range| !range.told) {
                range.told = true;
                tell(recorder, Kind::RangeBegin, range.name, 0);
            }
        }
        context_of(&open, inherited_phase(thread))
    });
    thread.context.set(context);
    thread.version.set(version);
    context
}

/// The context that follows from a stack of ranges.
fn context_of(open: &[Open], inherited: TextId) -> ContextId {
    let mut context = Context { phase: inherited, ..Context::default() };
    let mut levels = 0;
    for range in open {
        match range.role {
            Role::Phase(text) => context.phase = text,
            Role::Op(text) => context.op = text,
            Role::ModulePath(text) => {
                context.module = text;
                levels = 0;
            }
            Role::Level(text) if levels == 0 && context.module == 0 => {
                context.module = text;
                levels = 1;
            }
            Role::Level(text) => {
                levels += 1;
                let path = with_tables(|tables| {
                    format!("{}.{}", tables.text_of(context.module), tables.text_of(text))
                });
                context.module = text_id(&path);
            }
            Role::Step => {}
        }
    }
    context_id(context)
}

/// Autograd's threads work on behalf of whoever called backward, so they have the process's phase;
/// other threads (pinning, prefetch) do not.
fn inherited_phase(thread: &Thread) -> TextId {
    if thread.autograd.get() == 0 {
        thread.autograd.set(if thread_name_starts_with(b"pt_autograd") { 2 } else { 1 });
    }
    if thread.autograd.get() == 2 { PHASE.load(Ordering::Acquire) } else { 0 }
}

/// torch names its autograd threads `pt_autograd_<device>` before they do anything.
fn thread_name_starts_with(prefix: &[u8]) -> bool {
    let mut name = [0u8; 16];
    // SAFETY: PR_GET_NAME writes at most 16 bytes, and there is room for them.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    name.starts_with(prefix)
}

fn drop_ended(open: &mut Vec<Open>) {
    if open.iter().any(|range| range.id != 0) {
        ENDED.with(|ended| {
            open.retain(|range| {
                let index = ended.iter().position(|id| *id == range.id && *id != 0);
                if let Some(index) = index {
                    ended.swap_remove(index);
                }
                index.is_none()
            });
        });
    }
}

/// A range opens on this thread. `category` names the NVTX category of the domain `memtrace`.
pub(crate) fn push(name: &str, domain: usize, category: Option<&str>) {
    open(name, domain, category, 0);
}

/// A start/end range opens on this thread; gives its number.
pub(crate) fn start(name: &str, domain: usize, category: Option<&str>) -> u64 {
    let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
    open(name, domain, category, id);
    id
}

fn open(name: &str, domain: usize, category: Option<&str>, id: u64) {
    let _ = THREAD.try_with(|thread| {
        let role = role_of(name, category);
        let mut range = Open { role, name: text_id(name), id, phase: 0, domain, told: false };
        if let Role::Phase(text) = role {
            range.phase = NEXT_ID.fetch_add(1, Ordering::Relaxed);
            change_phases(|phases| phases.push((range.phase, text)));
        }
        let context = current().0;
        if let Some(recorder) = Recorder::active() {
            range.told = true;
            tell(recorder, Kind::RangeBegin, range.name, context);
        }
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            open.push(range);
        }
        thread.version.set(0);
    });
}

/// The last push/pop range of `domain` closes.
pub(crate) fn pop(domain: usize) {
    let _ = THREAD.try_with(|thread| {
        let closed = thread.open.try_borrow_mut().ok().and_then(|mut open| {
            let index = open.iter().rposition(|range| range.id == 0 && range.domain == domain)?;
            Some(open.remove(index))
        });
        thread.version.set(0);
        if let Some(range) = closed {
            close(range);
        }
    });
}

/// The start/end range `id` closes, whoever started it.
pub(crate) fn end(id: u64) {
    let _ = THREAD.try_with(|thread| {
        let mine = thread.open.try_borrow_mut().ok().and_then(|mut open| {
            let index = open.iter().rposition(|range| range.id == id)?;
            Some(open.remove(index))
        });
        match mine {
            Some(range) => {
                thread.version.set(0);
                close(range);
            }
            None => {
                ENDED.with(|ended| ended.push(id));
                VERSION.fetch_add(1, Ordering::AcqRel);
            }
        }
    });
}

fn close(range: Open) {
    if range.phase != 0 {
        change_phases(|phases| phases.retain(|(id, _)| *id != range.phase));
    }
    let context = current().0;
    if range.told
        && let Some(recorder) = Recorder::active()
    {
        tell(recorder, Kind::RangeEnd, range.name, context);
    }
}

/// A mark. It starts the trace when it has not begun: who marks wants to see it.
pub(crate) fn mark(name: &str) {
    role_of_step(meaning(name, None, more_phases()));
    let Some(recorder) = init::recorder() else { return };
    let (text, (context, _)) = (text_id(name), current());
    tell(recorder, Kind::Mark, text, context);
}

fn tell(recorder: &'static Recorder, kind: Kind, name: TextId, context: ContextId) {
    let step = STEP.load(Ordering::Relaxed);
    recorder.record(|clock_ns| Event {
        clock_ns,
        kind: kind as u8,
        api: Api::Nvtx as u8,
        device: Event::HOST,
        context,
        step,
        extra: i64::from(name),
        ..Event::default()
    });
}

fn change_phases(change: impl FnOnce(&mut Vec<(u64, TextId)>)) {
    PHASES.with(|phases| {
        change(phases);
        PHASE.store(phases.last().map_or(0, |(_, text)| *text), Ordering::Release);
    });
    VERSION.fetch_add(1, Ordering::AcqRel);
}

fn more_phases() -> &'static [String] {
    MORE_PHASES.get().map_or(&[], Vec::as_slice)
}

fn role_of(name: &str, category: Option<&str>) -> Role {
    let meaning = meaning(name, category, more_phases());
    role_of_step(meaning);
    match meaning {
        Meaning::Phase(text) => Role::Phase(text_id(text)),
        Meaning::ModulePath(text) => Role::ModulePath(text_id(text)),
        Meaning::Level(text) => Role::Level(text_id(text)),
        Meaning::Op(text) => Role::Op(text_id(text)),
        Meaning::Step(_) => Role::Step,
    }
}

/// A step begins with its range or mark and lasts until the next: what runs between two step ranges
/// belongs to the one before.
fn role_of_step(meaning: Meaning<'_>) {
    if let Meaning::Step(step) = meaning {
        STEP.store(i32::try_from(step).unwrap_or(i32::MAX), Ordering::Relaxed);
    }
}

/// Before a fork: no lock may be held by a thread that the child does not have.
pub(crate) fn lock_for_fork() {
    PHASES.lock_for_fork();
    ENDED.lock_for_fork();
    memtrace_record::intern::lock_for_fork();
}

/// After a fork, on both sides.
pub(crate) fn unlock_after_fork() {
    memtrace_record::intern::unlock_after_fork();
    ENDED.unlock_after_fork();
    PHASES.unlock_after_fork();
}

/// The child of a fork has the ranges of the thread that forked, and none of them in its own trace.
pub(crate) fn untell_after_fork() {
    let _ = THREAD.try_with(|thread| {
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            open.iter_mut().for_each(|range| range.told = false);
        }
        thread.version.set(0);
    });
}
