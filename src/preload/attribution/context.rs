//! Who owns what is allocated now: the range stack of each thread, and the phase and the step of the
//! process.

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use memtrace_record::fork_lock::ForkLock;
use memtrace_record::intern::{Context, ContextId, TextId, with_tables};
use memtrace_record::recorder::{Recorder, STEP, context_id, text_id};
use memtrace_trace::ranges::{Meaning, meaning};
use memtrace_trace::{Api, Event, Kind};

use crate::attribution::autograd_seq;
use crate::attribution::fsdp;
use crate::attribution::op_stack;
use crate::attribution::python_frames;
use crate::ffi::symbols::find_in_loaded;
use crate::runtime::cache::Cache;
use crate::runtime::session;
use crate::runtime::thread;
use crate::runtime::thread::Own;

/// What an open range means, its text numbered.
#[derive(Clone, Copy)]
enum Role {
    Phase(TextId),
    ModulePath(TextId),
    Level(TextId),
    Op(TextId),
    Step,
    /// The forward of the module object at `key`.
    Module {
        path: TextId,
        key: usize,
    },
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
    /// Of a start/end range: is the thread that started it gone?
    is_left: bool,
    /// Is there a `range_begin` row? Ranges that opened before the trace did get theirs late.
    told: bool,
    /// Of a module: what held around it, to return to.
    around: Around,
}

/// What a thread knew at some moment.
#[derive(Clone, Copy, Default)]
struct Around {
    base: Context,
    context: ContextId,
    version: u64,
}

impl Open {
    fn api(&self) -> Api {
        match self.domain {
            C_DOMAIN => Api::Memtrace,
            MODULES => Api::Module,
            _ => Api::Nvtx,
        }
    }
}

/// A thread's ranges and the context that follows from them.
pub(crate) struct Thread {
    open: RefCell<Vec<Open>>,
    /// What follows from the ranges and the phase, before any op, and its number.
    base: Cell<Context>,
    context: Cell<ContextId>,
    /// Counts the bases of this thread.
    epoch: Cell<u64>,
    /// The version of everything that `base` was made from; 0 makes it anew.
    version: Cell<u64>,
    /// 0 not asked yet, 1 no, 2 yes.
    autograd: Cell<u8>,
    /// Bytes that this thread's reports added.
    bytes: Cell<i64>,
    /// The device of the last report.
    device: Cell<i8>,
    /// Numbers of contexts and of joined paths: modules are entered again and again.
    known: RefCell<Cache<Context, ContextId>>,
    joined: RefCell<Cache<(TextId, TextId), TextId>>,
}

/// Works with the calling thread's ranges; `None` when the thread is ending.
#[inline(always)]
fn on_thread<R>(work: impl FnOnce(&Thread) -> R) -> Option<R> {
    thread::with(|own| work(&own.context))
}

impl Drop for Thread {
    /// A thread that ends inside its ranges: nobody can pop them any more. Those that have a number may still be
    /// ended, by another thread, to which it is all the same whether this one is there.
    fn drop(&mut self) {
        for range in self.open.get_mut().drain(..) {
            if range.id == 0 && range.phase != 0 {
                change_phases(|phases| phases.retain(|(id, _)| *id != range.phase));
            } else if range.id != 0 {
                ENDED.with(|ended| ended.retain(|id| *id != range.id));
                STARTED.with(|started| {
                    started.iter_mut().filter(|s| s.id == range.id).for_each(|s| s.is_left = true);
                });
            }
        }
    }
}

/// The phases that are open in the process, the last on top.
static PHASES: ForkLock<Vec<(u64, TextId)>> = ForkLock::new(Vec::new());
/// The phase on top.
static PHASE: AtomicU32 = AtomicU32::new(0);
/// Grows with every change of what a thread's context depends on beyond the thread: the phase, the
/// start of the recorder, the end of a range by another thread.
static VERSION: AtomicU64 = AtomicU64::new(1);
/// Numbers start/end ranges and phases. A tool that was there first numbers from 1 on, and the program has its
/// numbers: none may be one of ours.
static NEXT_ID: AtomicU64 = AtomicU64::new(1 << 62);
/// Start/end ranges that are open, whoever started them: any thread may end one.
static STARTED: ForkLock<Vec<Open>> = ForkLock::new(Vec::new());
/// Start/end ranges that a thread other than their own ended, which still has them on its stack.
static ENDED: ForkLock<Vec<u64>> = ForkLock::new(Vec::new());

/// The program numbers its steps itself.
static USER_STEPS: AtomicBool = AtomicBool::new(false);

/// Ops and ranges get no rows for now; memory always does.
static PAUSED: AtomicBool = AtomicBool::new(false);

/// The domain of ranges that the C functions open: their pops close no range of NVTX.
pub(crate) const C_DOMAIN: usize = usize::MAX - 1;

/// The words of `MEMTRACE_PHASES`.
static MORE_PHASES: OnceLock<Vec<String>> = OnceLock::new();

/// Sets the words that are phases beside those of [`memtrace_trace::ranges`].
pub(crate) fn set_phases(words: Vec<String>) {
    let _ = MORE_PHASES.set(words);
}

/// The context and the step for an event that this thread records now.
#[inline]
pub(crate) fn current() -> (ContextId, i32) {
    thread::with(of_op).unwrap_or_else(|| with_step(None))
}

/// As [`current`], with `stream` as the current stream.
#[inline]
pub(crate) fn current_on(stream: i64) -> (ContextId, i32) {
    with_step(thread::with(|own| context_on(own, stream)))
}

/// As [`current_on`], for the report of a block on the thread that `own` is of: counts its bytes as the thread's.
/// A block that is given back has the owner that it was given to, so the op that does it is not looked up.
#[inline]
pub(crate) fn of_report(own: &Own, stream: i64, bytes: i64, device: i8) -> (ContextId, i32) {
    let thread = &own.context;
    thread.bytes.set(thread.bytes.get() + bytes);
    thread.device.set(device);
    if bytes < 0 {
        up_to_date(thread, stream);
        return with_step(Some(thread.context.get()));
    }
    let mut context = context_on(own, stream);
    if python_frames::are_known() && bytes > 0 && context == thread.context.get() {
        context = op_stack::context_outside(thread.base.get()).unwrap_or(context);
    }
    with_step(Some(context))
}

/// As [`current`], for the op that ends on the thread that `own` is of.
#[inline]
pub(crate) fn of_op(own: &Own) -> (ContextId, i32) {
    with_step(Some(context_on(own, own.context.base.get().stream)))
}

/// The bytes that the thread's reports added, and the device of the last one.
#[inline]
pub(crate) fn counted(own: &Own) -> (i64, i8) {
    (own.context.bytes.get(), own.context.device.get())
}

#[inline]
fn with_step(context: Option<ContextId>) -> (ContextId, i32) {
    (context.unwrap_or(0), STEP.load(Ordering::Relaxed))
}

/// What holds on the thread that `own` is of, before any op.
#[inline]
pub(crate) fn base(own: &Own) -> Context {
    up_to_date(&own.context, own.context.base.get().stream);
    own.context.base.get()
}

#[inline]
fn up_to_date(thread: &Thread, stream: i64) {
    let version = VERSION.load(Ordering::Acquire);
    if thread.version.get() != version || thread.base.get().stream != stream {
        refresh(thread, version, stream);
    }
}

#[inline]
fn context_on(own: &Own, stream: i64) -> ContextId {
    let thread = &own.context;
    up_to_date(thread, stream);
    op_stack::context(&own.ops, &thread.base, thread.epoch.get()).unwrap_or(thread.context.get())
}

/// The recorder has started: threads tell of the ranges that they opened before.
pub(crate) fn recorder_started() {
    VERSION.fetch_add(1, Ordering::AcqRel);
}

/// Are rows of ops and ranges left out?
#[inline]
pub(crate) fn is_paused() -> bool {
    PAUSED.load(Ordering::Relaxed)
}

/// Leaves rows of ops and ranges out, or writes them again. Who owns what is followed all the same. A
/// range whose begin is in the trace gets its end at once; one that is still open when rows are written
/// again gets its begin then.
pub(crate) fn pause(paused: bool) {
    PAUSED.store(paused, Ordering::Relaxed);
    VERSION.fetch_add(1, Ordering::AcqRel);
}

#[cold]
#[inline(never)]
fn refresh(thread: &Thread, version: u64, stream: i64) {
    let base = thread.open.try_borrow_mut().map(|mut open| {
        drop_ended(&mut open);
        if let Some(recorder) = Recorder::active().filter(|_| !is_paused()) {
            for range in open.iter_mut().filter(|range| !range.told) {
                range.told = true;
                tell_as(range.api(), recorder, Kind::RangeBegin, range.name, 0);
                if range.id != 0 {
                    STARTED.with(|started| {
                        started.iter_mut().filter(|s| s.id == range.id).for_each(|s| s.told = true);
                    });
                }
            }
        }
        Context { stream, ..base_of(&open, inherited_phase(thread), thread) }
    });
    let base = base.unwrap_or_default();
    thread.base.set(base);
    let known = thread.known.try_borrow_mut();
    let context = known.map(|mut known| known.get(&base, || context_id(base)));
    thread.context.set(context.unwrap_or_else(|_| context_id(base)));
    thread.epoch.set(thread.epoch.get() + 1);
    thread.version.set(version);
}

/// What follows from a stack of ranges. A module's path replaces that of the module around it; the
/// user's own levels stay, before it and behind it, and a whole path that the user gave stands alone.
fn base_of(open: &[Open], inherited: TextId, thread: &Thread) -> Context {
    let on_autograd_thread = thread.is_autograd();
    let join = |path: TextId, level: TextId| {
        if path == 0 || level == 0 {
            return path | level;
        }
        let joined = thread.joined.try_borrow_mut();
        joined
            .map_or_else(|_| join(path, level), |mut joined| joined.get(&(path, level), || join(path, level)))
    };
    let mut context = Context { phase: inherited, ..Context::default() };
    let mut whole = false;
    // The user's levels around the outermost module.
    let mut prefix = None;
    for range in open {
        match range.role {
            Role::Phase(text) => context.phase = text,
            Role::Op(text) => context.op = text,
            Role::ModulePath(text) => (context.module, whole) = (text, true),
            Role::Level(text) => context.module = join(context.module, text),
            Role::Module { path, .. } => {
                context.flags |= Context::IN_MODULE;
                if !whole {
                    let prefix = *prefix.get_or_insert(context.module);
                    context.module = join(prefix, path);
                }
            }
            Role::Step => {}
        }
    }
    let in_module = context.flags & Context::IN_MODULE != 0;
    if context.phase == 0 {
        context.phase = if in_module && on_autograd_thread {
            op_stack::backward()
        } else if in_module || (!on_autograd_thread && LOSS.load(Ordering::Relaxed) == thread_id()) {
            forward()
        } else if !user_counts_steps() && STEP.load(Ordering::Relaxed) < 0 && autograd_seq::outside() != 0 {
            init_phase()
        } else {
            0
        };
        context.flags |= Context::INFERRED_PHASE;
    }
    if in_module && on_autograd_thread {
        // A forward that runs inside backward: activation checkpointing.
        context.flags |= Context::RECOMPUTED;
    }
    context
}

/// `path.level`.
fn join(path: TextId, level: TextId) -> TextId {
    text_id(&with_tables(|tables| format!("{}.{}", tables.text_of(path), tables.text_of(level))))
}

/// The number of the phase `forward`.
pub(crate) fn forward() -> TextId {
    static ID: AtomicU32 = AtomicU32::new(0);
    op_stack::numbered(&ID, "forward")
}

/// What runs before the first forward: the model is made, the weights are loaded.
fn init_phase() -> TextId {
    static ID: AtomicU32 = AtomicU32::new(0);
    op_stack::numbered(&ID, "init")
}

/// The thread whose outermost module returned last and whose backward has not begun: what it does
/// meanwhile (the loss) belongs to the forward. 0 for none.
static LOSS: AtomicU32 = AtomicU32::new(0);

/// Does autograd record what this thread does (`c10::GradMode::is_enabled`)? Without it no backward follows.
fn records_a_graph() -> bool {
    static FOUND: OnceLock<usize> = OnceLock::new();
    let found =
        *FOUND.get_or_init(|| find_in_loaded("libc10.so", c"_ZN3c108GradMode10is_enabledEv") as usize);
    if found == 0 {
        return true;
    }
    // SAFETY: the function's type in c10/core/GradMode.h, 2.1 to 2.15; it reads thread-local state.
    unsafe { std::mem::transmute::<usize, unsafe extern "C" fn() -> bool>(found)() }
}

fn thread_id() -> u32 {
    // SAFETY: takes nothing and cannot fail.
    unsafe { libc::gettid() as u32 }
}

/// A backward, an optimizer's step or the next batch begins: the forward is over.
#[inline]
pub(crate) fn forward_is_over() {
    if LOSS.load(Ordering::Relaxed) != 0 {
        LOSS.store(0, Ordering::Relaxed);
        VERSION.fetch_add(1, Ordering::AcqRel);
    }
}

/// The module path that holds on this thread now.
pub(crate) fn module() -> TextId {
    thread::with(|own| base(own).module).unwrap_or(0)
}

/// The NVTX domain of ranges that are modules: none, so no pop of the program closes one.
const MODULES: usize = usize::MAX;

/// The forward of a module begins on this thread; gives how many were open.
pub(crate) fn enter_module(path: TextId, key: usize) -> usize {
    on_thread(|thread| {
        training_may_begin(thread);
        let around = current().0;
        let mut range = Open {
            role: Role::Module { path, key },
            name: path,
            id: 0,
            phase: 0,
            domain: MODULES,
            is_left: false,
            told: false,
            around: Around {
                base: thread.base.get(),
                context: thread.context.get(),
                version: thread.version.get(),
            },
        };
        if let Some(recorder) = Recorder::active().filter(|_| !is_paused()) {
            range.told = true;
            tell_as(Api::Module, recorder, Kind::RangeBegin, path, around);
        }
        thread.version.set(0);
        let Ok(mut open) = thread.open.try_borrow_mut() else { return 0 };
        open.push(range);
        count_modules(&open) - 1
    })
    .unwrap_or(0)
}

fn count_modules(open: &[Open]) -> usize {
    open.iter().filter(|range| range.domain == MODULES).count()
}

/// How many modules are open on this thread.
pub(crate) fn open_modules() -> usize {
    on_thread(|thread| thread.open.try_borrow().map_or(0, |open| count_modules(&open))).unwrap_or(0)
}

/// The forward of the module at `key` ends, and with it those inside it that an exception left open.
pub(crate) fn leave_module(key: usize) {
    on_thread(|thread| {
        if let Some(range) = leave_innermost(thread, key) {
            return close_as(Api::Module, range);
        }
        let mut closed = Vec::new();
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            let is_it = |range: &Open| matches!(range.role, Role::Module { key: of, .. } if of == key);
            let Some(index) = open.iter().rposition(is_it) else { return };
            while let Some(inner) = open.iter().skip(index).rposition(|range| range.domain == MODULES) {
                closed.push(open.remove(index + inner));
            }
            let is_over = !open.iter().any(|range| range.domain == MODULES);
            if is_over && !thread.is_autograd() && records_a_graph() {
                LOSS.store(thread_id(), Ordering::Relaxed);
            }
        }
        thread.version.set(0);
        for range in closed {
            close_as(Api::Module, range);
        }
    });
}

/// Almost every module that ends is the innermost range of its thread and lies in another module: what
/// held around it holds again, unless something changed that threads have in common.
fn leave_innermost(thread: &Thread, key: usize) -> Option<Open> {
    let mut open = thread.open.try_borrow_mut().ok()?;
    let range = *open.last()?;
    let around = range.around;
    let is_it = matches!(range.role, Role::Module { key: of, .. } if of == key);
    if !is_it
        || around.base.flags & Context::IN_MODULE == 0
        || around.version != VERSION.load(Ordering::Acquire)
        || around.base.stream != thread.base.get().stream
    {
        return None;
    }
    open.pop();
    thread.base.set(around.base);
    thread.context.set(around.context);
    thread.epoch.set(thread.epoch.get() + 1);
    thread.version.set(around.version);
    Some(range)
}

/// The module object whose forward is the innermost on this thread; 0 for none.
pub(crate) fn innermost_module() -> usize {
    let innermost = |open: &Vec<Open>| {
        open.iter().rev().find_map(|range| match range.role {
            Role::Module { key, .. } => Some(key),
            _ => None,
        })
    };
    on_thread(|thread| thread.open.try_borrow().ok().and_then(|open| innermost(&open))).flatten().unwrap_or(0)
}

fn training_may_begin(thread: &Thread) {
    if !thread.is_autograd() {
        training_began();
    }
}

/// Autograd's threads work on behalf of whoever called backward, so they have the process's phase;
/// other threads (pinning, prefetch) do not.
fn inherited_phase(thread: &Thread) -> TextId {
    if thread.is_autograd() { PHASE.load(Ordering::Acquire) } else { 0 }
}

impl Thread {
    pub(crate) const fn new() -> Thread {
        Thread {
            open: RefCell::new(Vec::new()),
            base: Cell::new(Context { op: 0, module: 0, phase: 0, stack: 0, stream: 0, flags: 0 }),
            context: Cell::new(0),
            epoch: Cell::new(0),
            version: Cell::new(0),
            autograd: Cell::new(0),
            bytes: Cell::new(0),
            device: Cell::new(0),
            known: RefCell::new(Cache::new()),
            joined: RefCell::new(Cache::new()),
        }
    }

    #[inline]
    pub(crate) fn is_autograd(&self) -> bool {
        if self.autograd.get() == 0 {
            self.autograd.set(if thread_name_starts_with(b"pt_autograd") { 2 } else { 1 });
        }
        self.autograd.get() == 2
    }
}

/// Is this one of autograd's threads?
pub(crate) fn is_autograd_thread() -> bool {
    on_thread(Thread::is_autograd).unwrap_or(false)
}

/// Something happened that only training does: what came before it was step -1.
pub(crate) fn training_began() {
    if STEP.load(Ordering::Relaxed) < 0 && !user_counts_steps() {
        STEP.store(0, Ordering::Relaxed);
        VERSION.fetch_add(1, Ordering::AcqRel);
    }
}

/// Did the program say a step's number? Then nobody else counts.
pub(crate) fn user_counts_steps() -> bool {
    USER_STEPS.load(Ordering::Relaxed)
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
    on_thread(|thread| {
        let role = role_of(name, category);
        let mut range = Open {
            role,
            name: text_id(name),
            id,
            phase: 0,
            domain,
            is_left: false,
            told: false,
            around: Around::default(),
        };
        if let Role::Phase(text) = role {
            range.phase = NEXT_ID.fetch_add(1, Ordering::Relaxed);
            change_phases(|phases| phases.push((range.phase, text)));
        }
        let context = current().0;
        if let Some(recorder) = Recorder::active().filter(|_| !is_paused()) {
            range.told = true;
            tell_as(range.api(), recorder, Kind::RangeBegin, range.name, context);
        }
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            open.push(range);
        }
        if id != 0 {
            STARTED.with(|started| started.push(range));
        }
        thread.version.set(0);
    });
}

/// How many push/pop ranges of `domain` are open on this thread.
pub(crate) fn depth(domain: usize) -> i32 {
    let of_domain = |range: &&Open| range.id == 0 && range.domain == domain;
    let count = |open: &Vec<Open>| open.iter().filter(of_domain).count() as i32;
    on_thread(|thread| thread.open.try_borrow().map_or(0, |open| count(&open))).unwrap_or(0)
}

/// The last push/pop range of `domain` closes.
pub(crate) fn pop(domain: usize) {
    on_thread(|thread| {
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
    let found = STARTED.with(|started| {
        let index = started.iter().rposition(|range| range.id == id)?;
        Some(started.swap_remove(index))
    });
    let Some(range) = found else { return };
    on_thread(|thread| {
        let mine = thread.open.try_borrow_mut().ok().and_then(|mut open| {
            let index = open.iter().rposition(|range| range.id == id)?;
            Some(open.remove(index))
        });
        if mine.is_some() {
            thread.version.set(0);
        } else if !range.is_left {
            ENDED.with(|ended| ended.push(id));
            VERSION.fetch_add(1, Ordering::AcqRel);
        }
        close(range);
    });
}

fn close(range: Open) {
    close_as(range.api(), range);
}

fn close_as(api: Api, range: Open) {
    if range.phase != 0 {
        change_phases(|phases| phases.retain(|(id, _)| *id != range.phase));
    }
    let context = current().0;
    if range.told
        && let Some(recorder) = Recorder::active()
    {
        tell_as(api, recorder, Kind::RangeEnd, range.name, context);
    }
}

/// A mark. It starts the trace when it has not begun: who marks wants to see it.
pub(crate) fn mark(name: &str) {
    mark_as(Api::Nvtx, name);
}

/// As [`mark`], by another way than NVTX.
pub(crate) fn mark_as(api: Api, name: &str) {
    role_of_step(meaning(name, None, more_phases()));
    let Some(recorder) = session::recorder() else { return };
    let (text, (context, _)) = (text_id(name), current());
    tell_as(api, recorder, Kind::Mark, text, context);
}

/// The step `number` begins; a mark says so when there is a trace already.
pub(crate) fn begin_step(number: i64) {
    role_of_step(Meaning::Step(number));
    if let Some(recorder) = Recorder::active().filter(|_| !is_paused()) {
        let (text, (context, _)) = (text_id(&format!("step:{number}")), current());
        tell_as(Api::Memtrace, recorder, Kind::Mark, text, context);
    }
}

fn tell_as(api: Api, recorder: &'static Recorder, kind: Kind, name: TextId, context: ContextId) {
    let step = STEP.load(Ordering::Relaxed);
    recorder.record(|clock_ns| Event {
        clock_ns,
        kind: kind as u8,
        api: api as u8,
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
        Meaning::Step(_) | Meaning::Library => Role::Step,
    }
}

/// A step begins with its range or mark and lasts until the next: what runs between two step ranges
/// belongs to the one before.
fn role_of_step(meaning: Meaning<'_>) {
    if let Meaning::Step(step) = meaning {
        USER_STEPS.store(true, Ordering::Relaxed);
        let before = STEP.swap(i32::try_from(step).unwrap_or(i32::MAX), Ordering::Relaxed);
        if before < 0 {
            // What came before the first step is `init`.
            VERSION.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Before a fork: no lock may be held by a thread that the child does not have.
pub(crate) fn lock_for_fork() {
    fsdp::lock_for_fork();
    PHASES.lock_for_fork();
    ENDED.lock_for_fork();
    STARTED.lock_for_fork();
    memtrace_record::intern::lock_for_fork();
}

/// After a fork, on both sides.
pub(crate) fn unlock_after_fork() {
    memtrace_record::intern::unlock_after_fork();
    STARTED.unlock_after_fork();
    ENDED.unlock_after_fork();
    PHASES.unlock_after_fork();
    fsdp::unlock_after_fork();
}

/// The child of a fork has the ranges of the thread that forked, and none of them in its own trace.
pub(crate) fn untell_after_fork() {
    on_thread(|thread| {
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            open.iter_mut().for_each(|range| range.told = false);
            STARTED.with(|started| started.clone_from(&open.iter().filter(|r| r.id != 0).copied().collect()));
            ENDED.with(Vec::clear);
            // The other threads' phases are nobody's here.
            change_phases(|phases| phases.retain(|(id, _)| open.iter().any(|range| range.phase == *id)));
        }
        thread.version.set(0);
    });
}
