//! Detects updates of parameters by code other than torch's optimizers: a library's own optimizer, or a loop
//! over the parameters.
//!
//! Such programs have in common that ops outside every module write in place between a backward and the next
//! forward. In a process in which no optimizer of torch has stepped, the phase `optimizer` therefore begins
//! at the first op in that interval that writes in place or runs without autograd. The phase lasts until the
//! program creates the next batch. If an op has written in place, the step ends when the next forward or
//! backward begins.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

use memtrace_record::per_thread::thread_id;

use crate::attribution::{backward_passes, detail, phases, steps};
use crate::ffi::torch;
use crate::runtime::state_version;

/// The events since the last forward, as bits.
static SEEN: AtomicU8 = AtomicU8::new(0);
/// A backward function has run.
const BACKWARD: u8 = 1;
/// An op has begun the phase `optimizer`.
const PHASE: u8 = 2;
/// An op has written in place.
const WRITTEN: u8 = 4;
/// An op has created the next batch.
const BATCH: u8 = 8;
/// The kernel's id of the thread that updates parameters.
static THREAD: AtomicU32 = AtomicU32::new(0);

/// The ops that create a batch.
const BATCHES: [&[u8]; 9] = [
    b"aten::to",
    b"aten::_to_copy",
    b"aten::rand",
    b"aten::randn",
    b"aten::randint",
    b"aten::randperm",
    b"aten::arange",
    b"aten::lift_fresh",
    b"aten::pin_memory",
];
/// Ops that are named like in-place ops but do not change the elements of a parameter.
const HARMLESS: [&[u8]; 4] = [b"aten::detach_", b"aten::requires_grad_", b"aten::resize_", b"aten::set_"];

/// Handles the beginning of a backward function, on any thread: a pending update ends.
#[inline]
pub(crate) fn backward_begins() {
    if SEEN.load(Ordering::Relaxed) != BACKWARD && !steps::have_optimizer() {
        next(BACKWARD);
    }
}

/// Handles the beginning of the outermost module's forward, on a thread that is not autograd's: a pending
/// update ends.
#[inline]
pub(crate) fn forward_begins() {
    if SEEN.load(Ordering::Relaxed) != 0 {
        next(0);
    }
}

/// Ends the update, if there was one, because a forward or a backward begins. `seen` is the new value of
/// [`SEEN`].
#[cold]
fn next(seen: u8) {
    let before = SEEN.swap(seen, Ordering::Relaxed);
    backward_passes::gradients_are_due();
    // Outside the detailed steps no op is seen, so a forward after a backward implies an update.
    let is_update = before & WRITTEN != 0 || before & BACKWARD != 0 && seen == 0 && !detail::is_on();
    if is_update {
        steps::update_ended();
    }
    if before & PHASE != 0 {
        state_version::advance();
    }
}

/// Returns true if a backward has run since the last forward. An op that begins outside every module and op
/// may then belong to an update.
#[inline]
pub(crate) fn are_possible() -> bool {
    SEEN.load(Ordering::Relaxed) & BACKWARD != 0
}

/// Handles an op that begins after a backward, outside every module and op, on a thread that is not
/// autograd's. The op may begin the phase `optimizer`, or end it if it creates the next batch.
#[cold]
pub(crate) fn op_begins(name: &[u8]) {
    if steps::have_optimizer() {
        return SEEN.store(0, Ordering::Relaxed);
    }
    let before = SEEN.load(Ordering::Relaxed);
    let in_place = name.ends_with(b"_") && !HARMLESS.contains(&name);
    let new = if BATCHES.contains(&name) {
        BATCH
    } else if in_place {
        WRITTEN | PHASE
    } else if torch::is_grad_enabled() {
        0
    } else {
        PHASE
    };
    let mut after = before | new;
    if after & BATCH != 0 {
        after &= !PHASE;
    }
    if after != before {
        THREAD.store(thread_id(), Ordering::Relaxed);
        // `Release`: `are_running` reads the thread after it has seen the phase.
        SEEN.store(after, Ordering::Release);
        phases::forward_is_over();
        state_version::advance();
    }
}

/// Returns true if the calling thread updates parameters.
pub(crate) fn are_running() -> bool {
    SEEN.load(Ordering::Acquire) & PHASE != 0 && THREAD.load(Ordering::Relaxed) == thread_id()
}

/// Returns true if an update is not counted yet, because no forward or backward has begun since.
pub(crate) fn is_pending() -> bool {
    SEEN.load(Ordering::Relaxed) & WRITTEN != 0
}
