//! The ops that a thread is in, as torch's callbacks tell: innermost last.
//!
//! An op that allocates nothing costs a push and a pop. Names, stacks and contexts are made only when a
//! report asks, and then from small caches of the thread: a training loop runs the same ops again and
//! again.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use memtrace_record::Recorder;
use memtrace_record::clock::now_ns;
use memtrace_record::intern::{Context, ContextId, Frame, StackId, TextId};
use memtrace_record::recorder::{STEP, context_id, stack_id, text_id};
use memtrace_trace::stacks::FrameKind;
use memtrace_trace::{Api, Event, Kind};

use crate::attribution::autograd_seq;
use crate::attribution::autograd_seq::Origin;
use crate::attribution::context;
use crate::attribution::fsdp;
use crate::attribution::python_frames;
use crate::python::injection;
use crate::runtime::cache::Cache;
use crate::runtime::thread;
use crate::runtime::thread::Own;

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
    /// Who made the backward function that runs.
    origin: Origin,
    /// It, or one around it, gathers parameters that FSDP holds in shards: whose, 0 where that is not known.
    gathers: Option<TextId>,
    /// 0 until a report asks.
    name: TextId,
    stack: StackId,
    /// What `stack` stands in: the module, and lines of Python.
    root: StackId,
    context: ContextId,
    /// The thread's epoch that `context` belongs to, and its lines of Python.
    epoch: u64,
    python: StackId,
    /// Is it inside an op that is more than a user scope?
    inside: bool,
    /// Will it get a row at its end?
    outermost: bool,
    start_ns: u64,
    /// The thread's count of bytes when it began.
    bytes: i64,
}

pub(crate) struct Ops {
    running: Vec<Running>,
    /// The module that made the last backward function of this thread; 0 where that is not known.
    near: TextId,
    names: Cache<Vec<u8>, TextId>,
    stacks: Cache<Frame, StackId>,
    /// The lines of Python around the ops that run, and what they were read from: the innermost frame, and what
    /// they stand in.
    lines: StackId,
    walked: Option<((usize, usize), StackId)>,
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
            origin: around.map_or(Origin::default(), |op| op.origin),
            gathers: around.and_then(|op| op.gathers),
            name: 0,
            stack: 0,
            root: 0,
            context: 0,
            epoch: 0,
            python: 0,
            inside,
            outermost: !inside && scope != Scope::User,
            start_ns: 0,
            bytes: 0,
        };
        if !inside {
            ops.walked = None;
        }
        match scope {
            Scope::Backward => {
                match autograd_seq::origin_of(record) {
                    Some(origin) => (op.origin, ops.near) = (origin, origin.module),
                    None if autograd_seq::is_numbered(record) => ops.near = 0,
                    // It adds to a gradient, of the model of those around it.
                    None => {}
                }
                op.phase = if op.phase == 0 { backward() } else { op.phase };
                context::training_began();
                context::forward_is_over();
                injection::backward_runs(autograd_seq::is_of_main(record));
            }
            Scope::User => {
                op.name = name(&mut ops.names, &op);
                op.gathers = match fsdp::gathered_in(op.name, ops.near) {
                    Some(0) | None if op.gathers.is_some() => op.gathers,
                    found => found,
                };
                if let Some(phase) = user_phase(op.name) {
                    op.phase = phase;
                    context::forward_is_over();
                    injection::another_backward_follows();
                }
            }
            Scope::Function => {
                if let Some(number) = autograd_seq::number_of(own, record) {
                    let base = context::base(own);
                    // Inside a backward function too: a recomputation, or a double backward's graph. And in the
                    // step of an optimizer that calls a closure.
                    if op.phase == 0 || op.origin.module != 0 || base.flags & Context::IN_MODULE != 0 {
                        let python = || ops.python(op.origin.python);
                        autograd_seq::remember(own, number, base.module, python);
                    }
                }
            }
        }
        if op.outermost && op.phase == 0 && own.context.is_autograd() {
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
            op.bytes = context::counted(own).0;
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
        let Running { start_ns, bytes, .. } = ops.running[index];
        if start_ns != 0 {
            // A row of an op is made while the op is still the innermost.
            ops.running.truncate(index + 1);
            drop(ops);
            tell(own, start_ns, bytes, ending);
            let Ok(mut ops) = own.ops.try_borrow_mut() else { return };
            ops.end_from(index);
            return;
        }
        ops.end_from(index);
    });
}

/// The row of the innermost op, which ends now; it began at `start_ns`, when `before` bytes were counted.
fn tell(own: &Own, start_ns: u64, before: i64, ending: Ending) {
    let Some(recorder) = Recorder::active() else { return };
    if recorder.is_short() {
        recorder.drop_op();
        return;
    }
    let (context, step) = context::of_op(own);
    let (bytes, device) = context::counted(own);
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

/// The context of an allocation now: the innermost of `ops` over `base`, which belongs to `epoch` of this
/// thread. `None` outside every op.
#[inline]
pub(crate) fn context(ops: &RefCell<Ops>, base: &Cell<Context>, epoch: u64) -> Option<ContextId> {
    let mut ops = ops.try_borrow_mut().ok()?;
    let top = ops.running.last()?;
    if top.epoch == epoch && top.context != 0 && top.python == 0 && !python_frames::are_known() {
        return Some(top.context);
    }
    Some(ops.looked_up(base.get(), epoch))
}

/// The context of an allocation outside every op: what `base` says, and the lines of Python.
pub(crate) fn context_outside(base: Context) -> Option<ContextId> {
    thread::with(|own| {
        let mut ops = own.ops.try_borrow_mut().ok()?;
        let python = python_frames::current(0);
        Some(context_id(Context { stack: ops.module_in(python, base.module), ..base }))
    })
    .flatten()
}

impl Ops {
    pub(crate) const fn new() -> Ops {
        Ops {
            running: Vec::new(),
            near: 0,
            names: Cache::new(),
            stacks: Cache::new(),
            lines: 0,
            walked: None,
            contexts: Cache::new(),
        }
    }

    /// The op at `index` has ended, and with it what is inside.
    fn end_from(&mut self, index: usize) {
        let Some(op) = self.running.get(index) else { return };
        let (scope, name, origin) = (op.scope, op.name, op.origin);
        self.running.truncate(index);
        match scope {
            Scope::User => count_step(name),
            Scope::Backward => {
                // What the engine then does with the gradients (sums over what was broadcast, casts) belongs to
                // the same forward.
                let around = self.running.last_mut().filter(|around| around.scope == Scope::Function);
                if let Some(around) = around {
                    (around.origin, around.context, around.root) = (origin, 0, 0);
                }
            }
            Scope::Function => {}
        }
    }

    /// The lines of Python that run on this thread, or those that made the backward function that runs.
    fn python(&mut self, origin: StackId) -> StackId {
        if origin != 0 && !context::is_autograd_thread() {
            // Below the op there is the call of `backward()` alone.
            return origin;
        }
        // While one outermost op runs, a frame can only be on top of those that were there.
        let key = (python_frames::innermost(), origin);
        if self.walked != Some(key) {
            (self.walked, self.lines) = (Some(key), python_frames::current(origin));
        }
        self.lines
    }

    /// The number of a frame.
    fn stacked(&mut self, frame: Frame) -> StackId {
        self.stacks.get(&frame, || stack_id(frame))
    }

    /// The context of the innermost op over `base`.
    #[inline(never)]
    fn looked_up(&mut self, base: Context, epoch: u64) -> ContextId {
        let origin = self.running.last().map_or(0, |top| top.origin.python);
        let python = if python_frames::are_known() { self.python(origin) } else { 0 };
        let is_it = |top: &&Running| top.epoch == epoch && top.context != 0 && top.python == python;
        match self.running.last().filter(is_it) {
            Some(top) => top.context,
            None => self.resolve(base, epoch, python),
        }
    }

    fn resolve(&mut self, base: Context, epoch: u64, python: StackId) -> ContextId {
        let Some(top) = self.running.last() else { return 0 };
        let mut context = base;
        if let Some(whose) = top.gathers {
            context.flags |= Context::GATHERED;
            context.module = if whose == 0 { context.module } else { whose };
        }
        if context.module == 0 {
            context.module = if top.origin.module != 0 { top.origin.module } else { autograd_seq::outside() };
        }
        let root = self.module_in(python, context.module);
        let mut stack = root;
        for index in 0..self.running.len() {
            if self.running[index].stack == 0 || self.running[index].root != root {
                let name = name(&mut self.names, &self.running[index]);
                let id = self.stacked(Frame::op(stack, name));
                let op = &mut self.running[index];
                (op.name, op.stack, op.root) = (name, id, root);
            }
            stack = self.running[index].stack;
        }
        let Some(top) = self.running.last_mut() else { return 0 };
        // What the user marked wins.
        if context.op == 0 {
            context.op = top.name;
        }
        // A closure that an optimizer calls runs forwards inside its step, and their loss.
        let in_forward = context.flags & Context::IN_MODULE != 0 || context.phase == context::forward();
        let is_inferred = context.phase == 0 || context.flags & Context::INFERRED_PHASE != 0;
        if top.phase != 0 && is_inferred && (top.phase == backward() || !in_forward) {
            context.phase = top.phase;
        }
        context.stack = stack;
        let id = self.contexts.get(&context, || context_id(context));
        (top.context, top.epoch, top.python) = (id, epoch, python);
        id
    }

    /// The stack of a module that lines of Python called.
    fn module_in(&mut self, python: StackId, module: TextId) -> StackId {
        if module == 0 {
            return python;
        }
        self.stacked(Frame { parent: python, text: module, kind: FrameKind::Module })
    }
}

/// The number of an op's name.
fn name(names: &mut Cache<Vec<u8>, TextId>, op: &Running) -> TextId {
    if op.name != 0 {
        return op.name;
    }
    // SAFETY: the op is running, so its record is alive and has a name.
    let text = unsafe { (op.name_of)(op.record) };
    if text.is_null() {
        return 0;
    }
    // SAFETY: a C string that lives as long as the record. Another may have its place later.
    let text = unsafe { CStr::from_ptr(text) }.to_bytes();
    names.get(text, || text_id(&String::from_utf8_lossy(text)))
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
