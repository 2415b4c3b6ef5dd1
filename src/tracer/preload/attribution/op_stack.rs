//! The torch ops that a thread enters and leaves, as torch's callbacks report them.
//!
//! An op that allocates nothing and gets no row costs only a push and a pop.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_record::Recorder;
use memtrace_record::clock::now_ns;
use memtrace_record::intern::{Context, TextId};
use memtrace_record::recorder::context_id;
use memtrace_trace::event::OpEnd;
use memtrace_trace::{Api, Header, Payload};

use crate::attribution::{
    autograd_seq, backward_passes, context, detail, fsdp, op_context, phases, range_rows, steps, updates,
};
use crate::runtime::pause;
use crate::runtime::thread::running_ops::{FsdpScope, NameOf, RunningOp, RunningOps, Scope};
use crate::runtime::thread::{self, ThreadState};

/// The maximum depth of an op stack. A deeper stack means that ops have ended on another thread, so the whole
/// stack is discarded.
const MAX_DEPTH: usize = 1024;

/// True if every outermost op gets a row. Set once, from `MEMTRACE_OPS`.
static OUTERMOST_ROWS: AtomicBool = AtomicBool::new(false);
/// True if every op gets a row.
static ALL_ROWS: AtomicBool = AtomicBool::new(false);

/// Sets which ops get a row.
pub(crate) fn set_rows(outermost: bool, all: bool) {
    OUTERMOST_ROWS.store(outermost || all, Ordering::Relaxed);
    ALL_ROWS.store(all, Ordering::Relaxed);
}

/// Pushes an op that begins on this thread.
///
/// # Safety
/// `record` is torch's `RecordFunction`, alive until [`leave`] is called for it, and `name_of` is torch's
/// method `RecordFunction::name`.
#[inline]
pub(crate) unsafe fn enter(scope: Scope, record: *const c_void, name_of: NameOf) {
    thread::with(|state| {
        let Ok(mut ops) = state.ops.try_borrow_mut() else { return };
        if ops.running.len() >= MAX_DEPTH {
            ops.running.clear();
            state.ranges.in_backward.set(false);
        }
        // SAFETY: by the contract; the op leaves the list with `leave`.
        let mut op = unsafe { RunningOp::new(scope, record, name_of, ops.running.last()) };
        if !op.inside {
            ops.python_key = None;
        }
        match scope {
            Scope::Backward => {
                state.ranges.in_backward.set(true);
                backward_begins(&mut ops, &mut op);
            }
            Scope::User => scope_begins(&mut ops, &mut op),
            Scope::Function => function_begins(state, &mut ops, &op),
        }
        if op.outermost && op.phase == 0 && state.ranges.is_autograd() {
            // The op is `autograd::engine::evaluate_function: ...`, the only outermost op on autograd's
            // threads.
            op.phase = phases::BACKWARD.id();
            steps::training_began();
        }
        if (op.outermost || ALL_ROWS.load(Ordering::Relaxed))
            && OUTERMOST_ROWS.load(Ordering::Relaxed)
            && !pause::is_paused()
            && detail::is_on()
            && Recorder::active().is_some()
            && !state.is_own_python.get()
        {
            op.start_ns = now_ns();
            op.bytes = context::reported(state).0;
        }
        ops.running.push(op);
    });
}

/// Records a mark, because the backward of another call of the module at `path` begins.
#[cold]
fn another_call_begins(path: TextId) {
    let Some(recorder) = Recorder::active().filter(|_| !pause::is_paused()) else { return };
    let context = Context {
        module: path,
        phase: phases::BACKWARD.id(),
        flags: Context::INFERRED_PHASE,
        ..Context::default()
    };
    range_rows::record(Api::Backward, recorder, || Payload::Mark { name: path }, context_id(context));
}

#[inline]
fn backward_begins(ops: &mut RunningOps, op: &mut RunningOp) {
    // SAFETY: the record of a running op is alive, here and below.
    match unsafe { autograd_seq::origin_of(op.record()) } {
        Some(origin) => {
            (op.origin, ops.near) = (origin, origin.module);
            if let Some(path) = ops.calls.function_begins(origin.call) {
                another_call_begins(path);
            }
        }
        // SAFETY: as above.
        None if unsafe { autograd_seq::has_number(op.record()) } => ops.near = 0,
        // The op adds to a gradient. `near` stays unchanged, because the op belongs to the same model as the
        // functions before it.
        None => {}
    }
    op.phase = if op.phase == 0 { phases::BACKWARD.id() } else { op.phase };
    steps::training_began();
    phases::forward_is_over();
    updates::backward_begins();
    // SAFETY: as above.
    backward_passes::function_begins(unsafe { autograd_seq::is_of_main(op.record()) });
}

#[inline]
fn scope_begins(ops: &mut RunningOps, op: &mut RunningOp) {
    op.name = op_context::name(&mut ops.names, op);
    if let Some(scope) = fsdp::scope(op.name, ops.near, ops.sharded) {
        let module = if scope.module == 0 { op.fsdp.map_or(0, |outer| outer.module) } else { scope.module };
        op.fsdp = Some(FsdpScope { module, ..scope });
    }
    if let Some(phase) = phases::of_scope(op.name) {
        op.phase = phase;
        phases::forward_is_over();
        backward_passes::gradients_are_due();
    }
}

#[inline]
fn function_begins(state: &ThreadState, ops: &mut RunningOps, op: &RunningOp) {
    if updates::are_possible() && op.outermost && op.phase == 0 && !state.ranges.is_autograd() {
        let is_outside = context::base(state).flags & Context::IN_MODULE == 0 && !state.is_own_python.get();
        if is_outside && let Some(name) = op.name_text() {
            updates::op_begins(name.to_bytes());
        }
    }
    // SAFETY: the record of a running op is alive.
    let Some(number) = (unsafe { autograd_seq::number_of(state, op.record()) }) else { return };
    let base = context::base(state);
    // Origins are stored for the ops of forwards. Such ops may also run inside a backward function (a
    // recomputation, or the graph of a double backward), or inside the step of an optimizer that calls a
    // closure.
    if op.phase == 0 || op.origin.module != 0 || base.flags & Context::IN_MODULE != 0 {
        let python = || ops.python_stack(state.ranges.is_autograd(), op.origin.python);
        autograd_seq::remember(state, number, base.module, python);
    }
}

/// Sets the module that FSDP1's next scopes on this thread belong to, and the module that they prefetch.
pub(crate) fn set_sharded_modules(modules: [TextId; 2]) {
    thread::with(|state| {
        if let Ok(mut ops) = state.ops.try_borrow_mut() {
            ops.sharded = modules;
        }
    });
}

/// The fields of an op's row that have other than default values only with `MEMTRACE_OPS=io`.
#[derive(Clone, Copy)]
pub(crate) struct Ending {
    /// The API in the row, which shows the kind of op.
    pub(crate) api: Api,
    /// The name of the overload; 0 if unknown.
    pub(crate) overload: TextId,
}

impl Default for Ending {
    fn default() -> Self {
        Ending { api: Api::RecordFunction, overload: 0 }
    }
}

/// Returns the module of the backward function that this thread runs or ran last; 0 if unknown.
pub(crate) fn backward_module() -> TextId {
    thread::with(|state| Some(state.ops.try_borrow().ok()?.near)).flatten().unwrap_or(0)
}

/// Returns the number of ops running on this thread, and whether the innermost gets a row; `None` outside
/// every op.
pub(crate) fn innermost() -> Option<(usize, bool)> {
    thread::with(|state| {
        let ops = state.ops.try_borrow().ok()?;
        Some((ops.running.len(), ops.running.last()?.start_ns != 0))
    })
    .flatten()
}

/// Ends the op of this record.
#[inline]
pub(crate) fn leave(record: *const c_void, ending: Ending) {
    thread::with(|state| {
        let Ok(mut ops) = state.ops.try_borrow_mut() else { return };
        let Some(index) = ops.running.iter().rposition(|op| op.record() == record) else { return };
        let RunningOp { start_ns, bytes, .. } = ops.running[index];
        if start_ns != 0 {
            // The row gets the context of the innermost op, so the ops inside this op are removed first.
            ops.running.truncate(index + 1);
            drop(ops);
            record_row(state, start_ns, bytes, ending);
            let Ok(mut ops) = state.ops.try_borrow_mut() else { return };
            end_from(state, &mut ops, index);
            return;
        }
        end_from(state, &mut ops, index);
    });
}

/// Ends the op at `index` and the ops inside it.
fn end_from(state: &ThreadState, ops: &mut RunningOps, index: usize) {
    let Some(op) = ops.running.get(index) else { return };
    let (scope, name, origin) = (op.scope, op.name, op.origin);
    ops.running.truncate(index);
    match scope {
        Scope::User => steps::scope_ended(name),
        Scope::Backward => {
            let is_inside = ops.running.iter().any(|op| op.scope == Scope::Backward);
            state.ranges.in_backward.set(is_inside);
            // The engine's own work on the gradients afterwards (sums over broadcast dimensions, casts) runs
            // in the enclosing op. The work belongs to the same forward, so the enclosing op gets the same
            // origin, and the phase, which it lacks on a thread that is not autograd's.
            let around = ops.running.last_mut().filter(|around| around.scope == Scope::Function);
            if let Some(around) = around {
                (around.origin, around.context, around.root) = (origin, 0, 0);
                if around.phase == 0 {
                    around.phase = phases::BACKWARD.id();
                }
            }
        }
        Scope::Function => {}
    }
}

/// Records the row of the innermost op, which ends now. The op began at `start_ns`. `bytes_before` is the
/// thread's sum of reported bytes at that time.
fn record_row(state: &ThreadState, start_ns: u64, bytes_before: i64, ending: Ending) {
    let Some(recorder) = Recorder::active() else { return };
    if recorder.is_short() {
        recorder.drop_op();
        return;
    }
    let (context, step) = context::of_op(state);
    let (bytes, device) = context::reported(state);
    recorder.record(|clock_ns| {
        let op = OpEnd {
            bytes: bytes - bytes_before,
            duration_ns: clock_ns.saturating_sub(start_ns),
            overload: ending.overload,
        };
        Payload::Op(op).pack(Header { clock_ns, api: Some(ending.api), device, context, step })
    });
}
