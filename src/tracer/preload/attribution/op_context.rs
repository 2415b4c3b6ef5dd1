//! The context of an allocation inside torch ops.
//!
//! The name, the stack and the context of an op are computed when its first allocation needs them. They are
//! kept in small per-thread caches, because a training loop runs the same ops again and again.

use std::cell::{Cell, RefCell};
use std::ffi::CStr;

use memtrace_record::intern::{Context, ContextId, Frame, StackId, TextId};
use memtrace_record::recorder::{context_id, stack_id, text_id};
use memtrace_trace::stacks::FrameKind;

use crate::attribution::{autograd_seq, detail, phases, python_frames};
use crate::runtime::cache::Cache;
use crate::runtime::thread::running_ops::{RunningOp, RunningOps, Scope};
use crate::runtime::thread::{self, ThreadState};

/// Returns the context of the innermost op on top of `base`, the base context of this thread at `epoch`.
/// If `with_lines` is true, the context has the Python lines. Returns `None` outside every op.
#[inline]
pub(crate) fn innermost(
    ops: &RefCell<RunningOps>,
    base: &Cell<Context>,
    epoch: u64,
    with_lines: bool,
) -> Option<ContextId> {
    let mut ops = ops.try_borrow_mut().ok()?;
    let top = ops.running.last()?;
    if top.epoch == epoch && top.context != 0 && top.python == 0 && !with_lines {
        return Some(top.context);
    }
    Some(ops.looked_up(base.get(), epoch, with_lines))
}

/// Returns the context of an allocation outside every op: `base` with the Python stack, if `with_lines` is true
/// or if the memory is loaded. Returns `None` if neither applies.
pub(crate) fn outside_ops(state: &ThreadState, base: &Context, with_lines: bool) -> Option<ContextId> {
    let loading = may_load(state, base).then(python_frames::outside_compiled_code).flatten();
    let python = match loading {
        Some(python) => python,
        None if python_frames::are_recorded() => python_frames::current(0),
        None if with_lines => Some(python_frames::current(0)).filter(|python| *python != 0)?,
        None => return None,
    };
    let mut context = *base;
    if loading.is_some() {
        context.phase = phases::LOAD.id();
        context.flags |= Context::INFERRED_PHASE;
        context.module = if base.module == 0 { autograd_seq::script_module() } else { base.module };
    }
    let mut ops = state.ops.try_borrow_mut().ok()?;
    context.stack = ops.module_on(python, context.module);
    Some(context_id(context))
}

/// Returns true if an allocation outside every op may load data, as when a checkpoint is read or a storage is
/// copied. This is possible only in a detailed step with ops, outside modules and graph captures, while the
/// thread is in no phase or in the inferred phase before the first forward.
fn may_load(state: &ThreadState, base: &Context) -> bool {
    const NOT: u8 = Context::IN_MODULE | Context::CAPTURED | Context::WITHOUT_DETAIL;
    let is_before_forward = base.phase == phases::INIT.id() && base.flags & Context::INFERRED_PHASE != 0;
    (base.phase == 0 || is_before_forward)
        && base.op == 0
        && base.flags & NOT == 0
        && detail::has_ops()
        && autograd_seq::script_module() != 0
        && !state.ranges.is_autograd()
        && !state.is_own_python.get()
}

impl RunningOps {
    /// Returns the Python stack of this thread. Inside a backward function, `origin` is the stack of its
    /// forward op (0 if unknown). The result is then `origin` itself or, on autograd's threads, `origin` with
    /// this thread's own Python frames on top.
    pub(crate) fn python_stack(&mut self, is_autograd_thread: bool, origin: StackId) -> StackId {
        if origin != 0 && !is_autograd_thread {
            // Leave out the thread's own frames, because they only show the call of `backward()`.
            return origin;
        }
        // While one outermost op runs, new frames can appear only on top of the existing frames, so an
        // unchanged innermost frame means an unchanged stack.
        let key = (python_frames::innermost(), origin);
        if self.python_key != Some(key) {
            (self.python_key, self.python) = (Some(key), python_frames::current(origin));
        }
        self.python
    }

    fn stack_id(&mut self, frame: Frame) -> StackId {
        self.stacks.get(&frame, || stack_id(frame))
    }

    #[inline(never)]
    fn looked_up(&mut self, base: Context, epoch: u64, with_lines: bool) -> ContextId {
        let origin = self.running.last().map_or(0, |top| top.origin.python);
        let python = if with_lines { self.python_stack(thread::is_autograd(), origin) } else { 0 };
        let is_valid = |top: &&RunningOp| top.epoch == epoch && top.context != 0 && top.python == python;
        match self.running.last().filter(is_valid) {
            Some(top) => top.context,
            None => self.resolve(base, epoch, python),
        }
    }

    fn resolve(&mut self, base: Context, epoch: u64, python: StackId) -> ContextId {
        let Some(top) = self.running.last() else { return 0 };
        let mut context = base;
        if let Some(scope) = top.fsdp
            && (!scope.is_outside_ops || top.scope == Scope::User)
        {
            context.category = scope.category;
            context.module = if scope.module == 0 { context.module } else { scope.module };
        }
        if context.module == 0 {
            context.module =
                if top.origin.module != 0 { top.origin.module } else { autograd_seq::script_module() };
        }
        let root = self.module_on(python, context.module);
        let mut stack = root;
        for index in 0..self.running.len() {
            if self.running[index].stack == 0 || self.running[index].root != root {
                let name = name(&mut self.names, &self.running[index]);
                let id = self.stack_id(Frame::op(stack, name));
                let op = &mut self.running[index];
                (op.name, op.stack, op.root) = (name, id, root);
            }
            stack = self.running[index].stack;
        }
        let Some(top) = self.running.last_mut() else { return 0 };
        // An op range of the user takes precedence over torch's op.
        if context.op == 0 {
            context.op = top.name;
        }
        // In a forward, only `backward` replaces the phase. A closure that an optimizer calls runs forwards
        // inside the optimizer's step, and these must not get the phase `optimizer`.
        let in_forward = context.flags & Context::IN_MODULE != 0 || context.phase == phases::FORWARD.id();
        let is_inferred = context.phase == 0 || context.flags & Context::INFERRED_PHASE != 0;
        if top.phase != 0 && is_inferred && (top.phase == phases::BACKWARD.id() || !in_forward) {
            context.phase = top.phase;
        }
        context.stack = stack;
        let id = self.contexts.get(&context, || context_id(context));
        (top.context, top.epoch, top.python) = (id, epoch, python);
        id
    }

    /// Returns the Python stack with a frame for the module on top.
    fn module_on(&mut self, python: StackId, module: TextId) -> StackId {
        if module == 0 {
            return python;
        }
        self.stack_id(Frame { parent: python, text: module, kind: FrameKind::Module })
    }
}

/// Returns the text id of an op's name; 0 if the op has no name or an empty one.
pub(crate) fn name(names: &mut Cache<Vec<u8>, TextId>, op: &RunningOp) -> TextId {
    if op.name != 0 {
        return op.name;
    }
    // The cache is keyed by the bytes of the name, not by an address, because another record may have the
    // same address later.
    let text = op.name_text().map_or(&b""[..], CStr::to_bytes);
    if text.is_empty() { 0 } else { names.get(text, || text_id(&String::from_utf8_lossy(text))) }
}
