//! The context of an event: its owner, which depends on the thread's ranges, the process's phase and the
//! innermost op.
//!
//! Each thread caches its base context, which is the context without ops, until the state that the context
//! depends on changes ([`state_version`]).

use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_record::Recorder;
use memtrace_record::intern::{Context, ContextId, TextId, with_tables};
use memtrace_record::recorder::{context_id, text_id};
use memtrace_trace::{Payload, text};

use crate::attribution::{
    autograd_seq, backward_passes, detail, graph_captures, op_context, phases, python_frames, range_rows,
    shared_ranges, steps, updates,
};
use crate::runtime::fixed_text::FixedText;
use crate::runtime::thread::open_ranges::{OpenRange, OpenRanges, Role};
use crate::runtime::thread::{self, ThreadState};
use crate::runtime::{pause, state_version};

/// The bytes that torch's allocator has handed out in no phase or before the first forward. Freed bytes are
/// not subtracted.
static OUTSIDE_PHASES: AtomicU64 = AtomicU64::new(0);

/// Returns the bytes that torch's allocator has handed out in no phase or before the first forward.
pub(crate) fn bytes_outside_phases() -> u64 {
    OUTSIDE_PHASES.load(Ordering::Relaxed)
}

/// Returns the context and the step of an event that this thread records now.
#[inline]
pub(crate) fn current() -> (ContextId, i32) {
    thread::with(of_op).unwrap_or_else(|| with_step(None))
}

/// Same as [`current`], for an event on `stream`, torch's id of a stream.
#[inline]
pub(crate) fn current_on(stream: i64) -> (ContextId, i32) {
    with_step(thread::with(|state| context_on(state, stream)))
}

/// Same as [`current_on`], for a block report. Also adds `bytes`, which is negative for a free, to the
/// thread's sum of reported bytes.
///
/// A freed block keeps the owner of its allocation, so the op that frees it is not looked up.
#[inline]
pub(crate) fn of_report(state: &ThreadState, stream: i64, bytes: i64, device: i8) -> (ContextId, i32) {
    let ranges = &state.ranges;
    ranges.bytes.set(ranges.bytes.get() + bytes);
    ranges.device.set(device);
    if bytes < 0 {
        update(ranges, stream);
        return with_step(Some(ranges.context.get()));
    }
    if !detail::is_on() && ranges.is_autograd() {
        unseen_backward();
    }
    let mut context = context_on(state, stream);
    let phase = ranges.base.get().phase;
    if phase == 0 || phase == phases::INIT.id() {
        OUTSIDE_PHASES.fetch_add(bytes.cast_unsigned(), Ordering::Relaxed);
    }
    if context == ranges.context.get() {
        let with_lines = python_frames::are_recorded();
        context = op_context::outside_ops(state, &ranges.base.get(), with_lines).unwrap_or(context);
    }
    with_step(Some(context))
}

/// Same as [`current`], for an allocation of pinned memory, with the Python lines: there are few, and their
/// calls are slow.
pub(crate) fn of_pinned() -> (ContextId, i32) {
    with_step(thread::with(|state| on_host(state, detail::is_on())))
}

/// A CPU tensor of at least this many bytes gets the Python lines, whatever `MEMTRACE_STACKS` is.
const LARGE_TENSOR: i64 = 1 << 20;

/// Same as [`current`], for a report about a CPU tensor. A negative `bytes` means that it was freed.
pub(crate) fn of_cpu_tensor(state: &ThreadState, bytes: i64) -> (ContextId, i32) {
    let ranges = &state.ranges;
    let stream = ranges.base.get().stream;
    if bytes < 0 {
        update(ranges, stream);
        return with_step(Some(ranges.context.get()));
    }
    let with_lines = python_frames::are_recorded() || bytes >= LARGE_TENSOR && detail::is_on();
    with_step(Some(on_host(state, with_lines)))
}

/// Returns the context of an allocation on the host.
fn on_host(state: &ThreadState, with_lines: bool) -> ContextId {
    let ranges = &state.ranges;
    let context = context_with(state, ranges.base.get().stream, with_lines);
    if context != ranges.context.get() {
        return context;
    }
    op_context::outside_ops(state, &ranges.base.get(), with_lines).unwrap_or(context)
}

/// Handles an allocation on one of autograd's threads outside the detailed steps: a backward must be running,
/// although torch reports no backward function.
fn unseen_backward() {
    steps::training_began();
    phases::forward_is_over();
    updates::backward_begins();
    backward_passes::runs_unseen();
}

/// Same as [`current`], for the op that ends on the thread of `state`.
#[inline]
pub(crate) fn of_op(state: &ThreadState) -> (ContextId, i32) {
    with_step(Some(context_on(state, state.ranges.base.get().stream)))
}

/// Returns the sum of bytes in the thread's block reports, and the device of the last report.
#[inline]
pub(crate) fn reported(state: &ThreadState) -> (i64, i8) {
    (state.ranges.bytes.get(), state.ranges.device.get())
}

/// Returns the thread's base context, which is the context without ops.
#[inline]
pub(crate) fn base(state: &ThreadState) -> Context {
    update(&state.ranges, state.ranges.base.get().stream);
    state.ranges.base.get()
}

/// Returns the module path of this thread now; 0 if no module is open.
pub(crate) fn module() -> TextId {
    thread::with(|state| base(state).module).unwrap_or(0)
}

#[inline]
fn with_step(context: Option<ContextId>) -> (ContextId, i32) {
    (context.unwrap_or(0), steps::current())
}

#[inline]
fn context_on(state: &ThreadState, stream: i64) -> ContextId {
    context_with(state, stream, python_frames::are_recorded())
}

#[inline]
fn context_with(state: &ThreadState, stream: i64, with_lines: bool) -> ContextId {
    let ranges = &state.ranges;
    update(ranges, stream);
    let context = op_context::innermost(&state.ops, &ranges.base, ranges.epoch.get(), with_lines);
    context.unwrap_or(ranges.context.get())
}

#[inline]
fn update(ranges: &OpenRanges, stream: i64) {
    let version = state_version::current();
    if ranges.version.get() != version || ranges.base.get().stream != stream {
        recompute(ranges, version, stream);
    }
}

#[cold]
#[inline(never)]
fn recompute(ranges: &OpenRanges, version: u64, stream: i64) {
    let base = ranges.open.try_borrow_mut().map(|mut open| {
        shared_ranges::drop_ended(&mut open);
        if let Some(recorder) = Recorder::active().filter(|_| !pause::is_paused()) {
            for range in open.iter_mut().filter(|range| !range.has_row) {
                range.has_row = true;
                range_rows::record(
                    range.api(),
                    recorder,
                    || Payload::RangeBegin { name: range.name, class: range.class },
                    0,
                );
                if range.id != 0 {
                    shared_ranges::set_has_row(range.id);
                }
            }
        }
        Context { stream, ..base_of(&open, inherited_phase(ranges), ranges) }
    });
    let base = base.unwrap_or_default();
    ranges.base.set(base);
    let ids = ranges.context_ids.try_borrow_mut();
    let context = ids.map(|mut ids| ids.get(&base, || context_id(base)));
    ranges.context.set(context.unwrap_or_else(|_| context_id(base)));
    ranges.epoch.set(ranges.epoch.get() + 1);
    ranges.version.set(version);
}

/// Returns the base context for the ranges that are open on a thread.
///
/// A module's path replaces the path of the module that contains it. Levels that the user added outside the
/// outermost module or inside the innermost module are kept. If the user set a whole path, the paths of
/// modules inside it are ignored.
fn base_of(open: &[OpenRange], inherited: TextId, thread: &OpenRanges) -> Context {
    let on_autograd_thread = thread.runs_backward();
    let join = |path: TextId, level: TextId| {
        if path == 0 || level == 0 {
            return path | level;
        }
        let joined = thread.joined_paths.try_borrow_mut();
        joined
            .map_or_else(|_| join(path, level), |mut joined| joined.get(&(path, level), || join(path, level)))
    };
    let mut context = Context { phase: inherited, ..Context::default() };
    let mut is_whole = false;
    // The path of the user's levels outside the outermost module; `None` before that module.
    let mut prefix = None;
    for range in open {
        match range.role {
            Role::Phase(text) => context.phase = text,
            Role::Op(text) => context.op = text,
            Role::ModulePath(text) => (context.module, is_whole) = (text, true),
            Role::Level(text) => context.module = join(context.module, text),
            Role::Module { path, .. } => {
                context.flags |= Context::IN_MODULE;
                if !is_whole {
                    let prefix = *prefix.get_or_insert(context.module);
                    context.module = join(prefix, path);
                }
            }
            Role::Sharding(category) => context.category = category,
            Role::Unowned => {}
        }
    }
    let is_unseen = !detail::is_on();
    if thread.in_unseen_forward.get() {
        context.flags |= Context::IN_MODULE;
    }
    let in_module = context.flags & Context::IN_MODULE != 0;
    if context.phase == 0 {
        context.phase = if (in_module || is_unseen) && on_autograd_thread {
            phases::BACKWARD.id()
        } else if in_module || (!on_autograd_thread && phases::is_in_loss()) {
            phases::FORWARD.id()
        } else if !on_autograd_thread && updates::are_running() {
            phases::OPTIMIZER.id()
        } else if !steps::are_set_by_program() && steps::current() < 0 && autograd_seq::script_module() != 0 {
            phases::INIT.id()
        } else {
            0
        };
        context.flags |= Context::INFERRED_PHASE;
    }
    if graph_captures::is_any_open() {
        context.flags |= Context::CAPTURED;
    }
    if is_unseen {
        hide_owner(&mut context);
    }
    if in_module && on_autograd_thread {
        // The forward runs inside a backward, as it does with activation checkpointing.
        context.flags |= Context::RECOMPUTED;
    }
    context
}

/// Marks the op and the module as not recorded, unless the program's own ranges name them. Called only
/// outside the detailed steps.
fn hide_owner(context: &mut Context) {
    static WITHOUT_DETAIL: FixedText = FixedText::new(text::WITHOUT_DETAIL);
    context.flags |= Context::WITHOUT_DETAIL;
    if context.op == 0 && detail::has_ops() {
        context.op = WITHOUT_DETAIL.id();
    }
    if context.module == 0 && autograd_seq::script_module() != 0 {
        context.module = WITHOUT_DETAIL.id();
    }
}

/// Returns the id of the text `path.level`.
fn join(path: TextId, level: TextId) -> TextId {
    text_id(&with_tables(|tables| format!("{}.{}", tables.text_of(path), tables.text_of(level))))
}

/// Returns the phase that a thread inherits from the process. Only autograd's threads inherit the phase,
/// because they work for the thread that called backward. Other threads (pinning, prefetch) do not.
fn inherited_phase(thread: &OpenRanges) -> TextId {
    if thread.is_autograd() { phases::top() } else { 0 }
}
