//! The ranges and marks that the program opens, through NVTX or through the C API.

use memtrace_record::Recorder;
use memtrace_record::recorder::text_id;
use memtrace_trace::ranges::{Meaning, STEP, meaning};
use memtrace_trace::{Api, Payload};

use crate::attribution::{context, phases, range_rows, shared_ranges, steps};
use crate::runtime::thread::open_ranges::{OpenRange, OpenRanges, Role};
use crate::runtime::{pause, session, thread};

/// Runs `work` on the calling thread's ranges. Returns `None` if the thread is ending.
#[inline(always)]
pub(crate) fn on_thread<R>(work: impl FnOnce(&OpenRanges) -> R) -> Option<R> {
    thread::with(|state| work(&state.ranges))
}

impl Drop for OpenRanges {
    /// Closes the phases of push/pop ranges that are open when their thread ends, because no other thread can
    /// pop them. Keeps start/end ranges open as orphans, because another thread may still end them.
    fn drop(&mut self) {
        for range in self.open.get_mut().drain(..) {
            if range.id == 0 && range.phase != 0 {
                phases::close(range.phase);
            } else if range.id != 0 {
                shared_ranges::orphan(range.id);
            }
        }
    }
}

/// Opens a push/pop range on this thread. `category` names the NVTX category when the range belongs to the
/// domain `memtrace`.
pub(crate) fn push(name: &str, domain: usize, category: Option<&str>) {
    open(name, domain, category, 0);
}

/// Opens a start/end range on this thread and returns its id.
pub(crate) fn start(name: &str, domain: usize, category: Option<&str>) -> u64 {
    let id = shared_ranges::new_id();
    open(name, domain, category, id);
    id
}

fn open(name: &str, domain: usize, category: Option<&str>, id: u64) {
    on_thread(|thread| {
        let mut range = OpenRange { id, ..OpenRange::new(role_of(name, category), text_id(name), domain) };
        if let Role::Phase(text) = range.role {
            range.phase = shared_ranges::new_id();
            phases::open(range.phase, text);
        }
        let context = context::current().0;
        if let Some(recorder) = Recorder::active().filter(|_| !pause::is_paused()) {
            range.has_row = true;
            range_rows::record(
                range.api(),
                recorder,
                || Payload::RangeBegin { name: range.name, class: range.class },
                context,
            );
        }
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            open.push(range);
        }
        if id != 0 {
            shared_ranges::add(range);
        }
        thread.invalidate();
    });
}

/// Returns the number of push/pop ranges of `domain` that are open on this thread.
pub(crate) fn depth(domain: usize) -> i32 {
    let of_domain = |range: &&OpenRange| range.id == 0 && range.domain == domain;
    let count = |open: &Vec<OpenRange>| open.iter().filter(of_domain).count() as i32;
    on_thread(|thread| thread.open.try_borrow().map_or(0, |open| count(&open))).unwrap_or(0)
}

/// Closes the last push/pop range of `domain` on this thread. Has no effect if no such range is open.
pub(crate) fn pop(domain: usize) {
    on_thread(|thread| {
        let closed = thread.open.try_borrow_mut().ok().and_then(|mut open| {
            let index = open.iter().rposition(|range| range.id == 0 && range.domain == domain)?;
            Some(open.remove(index))
        });
        thread.invalidate();
        if let Some(range) = closed {
            close(range);
        }
    });
}

/// Closes the start/end range `id`, whichever thread started it.
pub(crate) fn end(id: u64) {
    let Some(range) = shared_ranges::take(id) else { return };
    on_thread(|thread| {
        let own = thread.open.try_borrow_mut().ok().and_then(|mut open| {
            let index = open.iter().rposition(|range| range.id == id)?;
            Some(open.remove(index))
        });
        if own.is_some() {
            thread.invalidate();
        } else if !range.is_orphan {
            shared_ranges::ended_elsewhere(id);
        }
        close(range);
    });
}

/// Closes the phase of a range that has ended, and records the row of its end.
pub(crate) fn close(range: OpenRange) {
    if range.phase != 0 {
        phases::close(range.phase);
    }
    let context = context::current().0;
    if range.has_row
        && let Some(recorder) = Recorder::active()
    {
        range_rows::record(range.api(), recorder, || Payload::RangeEnd { name: range.name }, context);
    }
}

/// Records a mark by `api`. Starts the trace if necessary, because a program that sets a mark wants to see
/// the mark.
pub(crate) fn mark(api: Api, name: &str) {
    set_step(meaning(name, None, phases::more_words()));
    let Some(recorder) = session::recorder() else { return };
    let (text, (context, _)) = (text_id(name), context::current());
    range_rows::record(api, recorder, || Payload::Mark { name: text }, context);
}

/// Records a mark by `api` that names no module, op or phase, because the mark does not belong to the code
/// that runs now.
pub(crate) fn mark_without_owner(api: Api, name: &str) {
    let Some(recorder) = session::recorder() else { return };
    let text = text_id(name);
    range_rows::record(api, recorder, || Payload::Mark { name: text }, 0);
}

/// Begins the step `number`, and records a mark for it if there is a trace.
pub(crate) fn begin_step(number: i64) {
    steps::set(number);
    if let Some(recorder) = Recorder::active().filter(|_| !pause::is_paused()) {
        let (text, (context, _)) = (text_id(STEP), context::current());
        range_rows::record(Api::Memtrace, recorder, || Payload::Mark { name: text }, context);
    }
}

fn role_of(name: &str, category: Option<&str>) -> Role {
    let meaning = meaning(name, category, phases::more_words());
    set_step(meaning);
    match meaning {
        Meaning::Phase(text) => Role::Phase(text_id(text)),
        Meaning::ModulePath(text) => Role::ModulePath(text_id(text)),
        Meaning::Level(text) => Role::Level(text_id(text)),
        Meaning::Op(text) => Role::Op(text_id(text)),
        Meaning::Step(_) | Meaning::Library => Role::Unowned,
        Meaning::Sharding(category) => Role::Sharding(category),
    }
}

fn set_step(meaning: Meaning<'_>) {
    if let Meaning::Step(step) = meaning {
        steps::set(step);
    }
}

/// Resets the state in the child of a fork: the ranges of the forking thread stay open, but have no rows in
/// the child's trace.
pub(crate) fn reset_in_child() {
    on_thread(|thread| {
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            open.iter_mut().for_each(|range| range.has_row = false);
            shared_ranges::keep_only(&open);
            // The child has only the forking thread, so the phases of all other threads are closed.
            phases::retain(|id| open.iter().any(|range| range.phase == id));
        }
        thread.invalidate();
    });
}
