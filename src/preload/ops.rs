//! The ops that a thread is in, as torch's callbacks tell: innermost last.
//!
//! An op that allocates nothing costs a push and a pop. Names, stacks and contexts are made only when a
//! report asks, and then from small caches of the thread: a training loop runs the same ops again and
//! again.

use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use memtrace_record::Recorder;
use memtrace_record::clock::now_ns;
use memtrace_record::intern::{Context, ContextId, Frame, StackId, TextId};
use memtrace_record::recorder::{STEP, context_id, stack_id, text_id};
use memtrace_trace::{Api, Event, Kind};

use crate::{context, python, sequence, thread};

/// Where a callback comes from: `at::RecordScope`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scope {
    /// An operator, or autograd's evaluation of one.
    Function,
    /// A backward function.
    Backward,
    /// `torch.profiler.record_function`, `Optimizer.step#...`.
    User,
}

/// `at::RecordFunction::name`.
pub(crate) type NameOf = unsafe extern "C" fn(*const c_void) -> *const c_char;

/// An op that is running.
struct Running {
    record: *const c_void,
    name_of: NameOf,
    scope: Scope,
    /// The phase that this op or one around it implies; 0 for none.
    phase: TextId,
    /// The module whose forward made the backward function that runs; 0 for none.
    module: TextId,
    /// 0 until a report asks.
    name: TextId,
    stack: StackId,
    context: ContextId,
    /// The thread's epoch that `context` belongs to.
    epoch: u64,
    /// Is it inside an op that is more than a user scope?
    inside: bool,
    /// Will it get a row at its end?
    outermost: bool,
    start_ns: u64,
    /// The thread's count of bytes when it began.
    bytes: i64,
}

/// Remembers what was numbered; a power of two of entries, each overwritten by the next of its place.
pub(crate) struct Cache<K, V> {
    entries: Vec<(K, V)>,
}

const CACHE: usize = 512;

impl<K: PartialEq + Clone + Default, V: Copy + Default> Cache<K, V> {
    pub(crate) const fn new() -> Self {
        Cache { entries: Vec::new() }
    }

    /// What was numbered for `key`, which belongs at `place`, or what `make` numbers now.
    pub(crate) fn get(&mut self, place: usize, key: &K, make: impl FnOnce() -> V) -> V {
        if self.entries.is_empty() {
            self.entries.resize(CACHE, Default::default());
        }
        let entry = &mut self.entries[place % CACHE];
        if entry.0 != *key {
            *entry = (key.clone(), make());
        }
        entry.1
    }
}

/// A name by the address of its characters: an op's name has one for ever, others are compared.
#[derive(Clone, Default)]
struct Name {
    address: usize,
    text: Box<[u8]>,
    id: TextId,
}

pub(crate) struct Ops {
    running: Vec<Running>,
    names: Vec<Name>,
    stacks: Cache<(StackId, TextId), StackId>,
    contexts: Cache<Context, ContextId>,
}

/// More than this deep something is wrong (an op that ended on another thread): start again.
const DEEPEST: usize = 1024;

/// Does every outermost op get a row? Set once, from `MEMTRACE_OPS`.
static ROWS: AtomicBool = AtomicBool::new(false);
/// Does every op get a row?
static ALL_ROWS: AtomicBool = AtomicBool::new(false);
/// The optimizer that stepped first: its steps count.
static FIRST_OPTIMIZER: AtomicU32 = AtomicU32::new(0);

/// Which ops get a row.
pub(crate) fn set_rows(outermost: bool, all: bool) {
    ROWS.store(outermost || all, Ordering::Relaxed);
    ALL_ROWS.store(all, Ordering::Relaxed);
}

/// Runs Python of ours: what ops it runs get no rows.
pub(crate) fn unseen<R>(work: impl FnOnce() -> R) -> R {
    thread::with(|own| own.ours.set(true));
    let result = work();
    thread::with(|own| own.ours.set(false));
    result
}

/// An op begins on this thread.
#[inline]
pub(crate) fn enter(scope: Scope, record: *const c_void, name_of: NameOf) {
    thread::with(|own| {
        let Ok(mut ops) = own.ops.try_borrow_mut() else { return };
        if ops.running.len() >= DEEPEST {
            ops.running.clear();
        }
        let around = ops.running.last();
        let inside = around.is_some_and(|op| op.inside || op.scope != Scope::User);
        let mut op = Running {
            record,
            name_of,
            scope,
            phase: around.map_or(0, |op| op.phase),
            module: around.map_or(0, |op| op.module),
            name: 0,
            stack: 0,
            context: 0,
            epoch: 0,
            inside,
            outermost: !inside && scope != Scope::User,
            start_ns: 0,
            bytes: 0,
        };
        match scope {
            Scope::Backward => {
                op.module = sequence::module_of(record).unwrap_or(op.module);
                op.phase = if op.phase == 0 { backward() } else { op.phase };
                context::training_began();
                context::forward_is_over();
                python::backward_runs();
            }
            Scope::User => {
                op.name = name(&mut ops.names, &op);
                if let Some(phase) = user_phase(op.name) {
                    op.phase = phase;
                    context::forward_is_over();
                    python::another_backward_follows();
                }
            }
            Scope::Function if op.phase == 0 || op.module != 0 => {
                // Inside a backward function too: a recomputation, or a double backward's graph.
                sequence::remember(record);
            }
            Scope::Function => {}
        }
        if op.outermost && context::is_autograd_thread() && op.phase == 0 {
            // `autograd::engine::evaluate_function: ...`: the thread does nothing else.
            op.phase = backward();
            context::training_began();
        }
        if (op.outermost || ALL_ROWS.load(Ordering::Relaxed))
            && ROWS.load(Ordering::Relaxed)
            && !context::is_paused()
            && Recorder::active().is_some()
            && !own.ours.get()
        {
            op.start_ns = now_ns();
            op.bytes = context::counted().0;
        }
        ops.running.push(op);
    });
}

/// What only `MEMTRACE_OPS=io` knows of an op that ends.
#[derive(Clone, Copy)]
pub(crate) struct Ending {
    /// What the op is.
    pub(crate) api: Api,
    /// Its overload; 0 for none.
    pub(crate) overload: TextId,
}

impl Default for Ending {
    fn default() -> Self {
        Ending { api: Api::RecordFunction, overload: 0 }
    }
}

/// How many ops this thread is in, and whether the innermost gets a row; `None` outside every op.
pub(crate) fn innermost() -> Option<(usize, bool)> {
    thread::with(|own| {
        let ops = own.ops.try_borrow().ok()?;
        Some((ops.running.len(), ops.running.last()?.start_ns != 0))
    })
    .flatten()
}

/// The op that `enter` announced ends.
#[inline]
pub(crate) fn leave(record: *const c_void, ending: Ending) {
    thread::with(|own| {
        let Ok(mut ops) = own.ops.try_borrow_mut() else { return };
        let Some(index) = ops.running.iter().rposition(|op| op.record == record) else { return };
        if ops.running[index].start_ns != 0 {
            // A row of an op is made while the op is still the innermost.
            ops.running.truncate(index + 1);
            drop(ops);
            tell(ending);
            let Ok(mut ops) = own.ops.try_borrow_mut() else { return };
            ops.running.truncate(index);
            return;
        }
        if ops.running[index].scope == Scope::User {
            count_step(ops.running[index].name);
        }
        ops.running.truncate(index);
    });
}

/// The row of the innermost op, which ends now.
fn tell(ending: Ending) {
    let Some(recorder) = Recorder::active() else { return };
    if recorder.is_short() {
        recorder.drop_op();
        return;
    }
    let (context, step) = context::current();
    let (bytes, device) = context::counted();
    let innermost =
        |own: &thread::Own| own.ops.try_borrow().ok()?.running.last().map(|op| (op.start_ns, op.bytes));
    let Some((start_ns, before)) = thread::with(innermost).flatten() else { return };
    recorder.record(|clock_ns| Event {
        clock_ns,
        kind: Kind::Op as u8,
        api: ending.api as u8,
        device,
        size: bytes - before,
        reserved: u64::from(ending.overload),
        context,
        step,
        extra: clock_ns.saturating_sub(start_ns) as i64,
        ..Event::default()
    });
}

/// The context of an allocation now: the innermost op over `base`, which belongs to `epoch` of this
/// thread. `None` outside every op.
#[inline]
pub(crate) fn context(base: Context, epoch: u64) -> Option<ContextId> {
    thread::with(|own| {
        let mut ops = own.ops.try_borrow_mut().ok()?;
        let top = ops.running.last()?;
        if top.epoch == epoch && top.context != 0 {
            return Some(top.context);
        }
        Some(ops.resolve(base, epoch))
    })
    .flatten()
}

impl Ops {
    pub(crate) const fn new() -> Ops {
        Ops { running: Vec::new(), names: Vec::new(), stacks: Cache::new(), contexts: Cache::new() }
    }

    fn resolve(&mut self, base: Context, epoch: u64) -> ContextId {
        let mut stack = 0;
        for index in 0..self.running.len() {
            if self.running[index].stack == 0 {
                let name = name(&mut self.names, &self.running[index]);
                let key = (stack, name);
                let place = stack as usize * 31 + name as usize;
                let id = self.stacks.get(place, &key, || stack_id(Frame { parent: stack, op: name }));
                let op = &mut self.running[index];
                (op.name, op.stack) = (name, id);
            }
            stack = self.running[index].stack;
        }
        let Some(top) = self.running.last_mut() else { return 0 };
        let mut context = base;
        // What the user marked wins.
        if context.op == 0 {
            context.op = top.name;
        }
        if top.phase != 0 && (context.phase == 0 || context.flags & Context::INFERRED_PHASE != 0) {
            context.phase = top.phase;
        }
        if context.module == 0 {
            context.module = if top.module != 0 { top.module } else { sequence::outside() };
        }
        context.stack = stack;
        let place =
            (stack as usize) * 31 + base.module as usize * 7 + context.phase as usize + base.stream as usize;
        let id = self.contexts.get(place, &context, || context_id(context));
        (top.context, top.epoch) = (id, epoch);
        id
    }
}

/// The number of an op's name.
fn name(names: &mut Vec<Name>, op: &Running) -> TextId {
    if op.name != 0 {
        return op.name;
    }
    // SAFETY: the op is running, so its record is alive and has a name.
    let text = unsafe { (op.name_of)(op.record) };
    if text.is_null() {
        return 0;
    }
    // SAFETY: a C string that lives as long as the record.
    let text = unsafe { CStr::from_ptr(text) }.to_bytes();
    if names.is_empty() {
        names.resize(CACHE, Name::default());
    }
    let address = text.as_ptr() as usize;
    let entry = &mut names[(address >> 4) % CACHE];
    if entry.address != address || *entry.text != *text {
        *entry = Name { address, text: text.into(), id: text_id(&String::from_utf8_lossy(text)) };
    }
    entry.id
}

/// The number of the phase `backward`.
pub(crate) fn backward() -> TextId {
    static ID: AtomicU32 = AtomicU32::new(0);
    numbered(&ID, "backward")
}

/// The number of a fixed text.
pub(crate) fn numbered(id: &AtomicU32, text: &str) -> TextId {
    match id.load(Ordering::Relaxed) {
        0 => {
            let number = text_id(text);
            id.store(number, Ordering::Relaxed);
            number
        }
        number => number,
    }
}

/// The phase that torch's own user scopes mean.
fn user_phase(name: TextId) -> Option<TextId> {
    static OPTIMIZER: AtomicU32 = AtomicU32::new(0);
    static ZERO_GRAD: AtomicU32 = AtomicU32::new(0);
    static DATALOADER: AtomicU32 = AtomicU32::new(0);
    with_text(name, |text| {
        [
            ("Optimizer.step#", &OPTIMIZER, "optimizer"),
            ("Optimizer.zero_grad#", &ZERO_GRAD, "zero_grad"),
            ("enumerate(DataLoader)#", &DATALOADER, "dataloader"),
        ]
        .into_iter()
        .find(|(prefix, _, _)| text.starts_with(prefix))
    })
    .map(|(_, id, phase)| numbered(id, phase))
}

fn with_text<R>(id: TextId, work: impl FnOnce(&str) -> R) -> R {
    memtrace_record::intern::with_tables(|tables| work(tables.text_of(id)))
}

/// The optimizer that stepped first ends a step when it has stepped.
fn count_step(name: TextId) {
    if !with_text(name, |text| text.starts_with("Optimizer.step#")) || context::user_counts_steps() {
        return;
    }
    let first = FIRST_OPTIMIZER.compare_exchange(0, name, Ordering::Relaxed, Ordering::Relaxed);
    if first.is_ok() || first == Err(name) {
        STEP.store(STEP.load(Ordering::Relaxed).max(0) + 1, Ordering::Relaxed);
    }
}
