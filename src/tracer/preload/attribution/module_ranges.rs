//! The forwards of modules that are open on a thread.

use memtrace_record::Recorder;
use memtrace_record::intern::{Context, TextId};
use memtrace_trace::{Api, Payload};

use crate::attribution::{backward_calls, context, phases, range_rows, ranges, steps, updates};
use crate::runtime::thread::open_ranges::{Around, MODULE_DOMAIN, OpenRange, OpenRanges, Role};
use crate::runtime::{pause, state_version};

/// Opens the forward of the module object at `key`, of class `class`, on this thread. `path` and `class` are
/// text ids. Returns the number of modules that were open before.
pub(crate) fn enter(path: TextId, class: TextId, key: usize) -> usize {
    ranges::on_thread(|thread| {
        if !thread.runs_backward() {
            if depth() == 0 {
                backward_calls::outermost_begins();
                if updates::are_possible() {
                    updates::forward_begins();
                }
            }
            steps::training_began();
        }
        let around = context::current().0;
        let mut range = OpenRange::new(Role::Module { path, key }, path, MODULE_DOMAIN);
        range.class = class;
        range.around = Around {
            base: thread.base.get(),
            context: thread.context.get(),
            version: thread.version.get(),
            call: thread.call.get(),
        };
        range.call = backward_calls::begins(path, thread.call.get());
        thread.call.set(range.call);
        if let Some(recorder) = Recorder::active().filter(|_| !pause::is_paused()) {
            range.has_row = true;
            range_rows::record(Api::Module, recorder, || Payload::RangeBegin { name: path, class }, around);
        }
        thread.invalidate();
        let Ok(mut open) = thread.open.try_borrow_mut() else { return 0 };
        open.push(range);
        count(&open) - 1 + usize::from(thread.in_unseen_forward.get())
    })
    .unwrap_or(0)
}

fn count(open: &[OpenRange]) -> usize {
    open.iter().filter(|range| range.domain == MODULE_DOMAIN).count()
}

/// Returns the number of modules open on this thread. Outside the detailed steps, at most one is counted: the
/// outermost.
pub(crate) fn depth() -> usize {
    let depth = |thread: &OpenRanges| {
        let seen = thread.open.try_borrow().map_or(0, |open| count(&open));
        seen + usize::from(thread.in_unseen_forward.get())
    };
    ranges::on_thread(depth).unwrap_or(0)
}

/// Opens the outermost module's forward on this thread, outside the detailed steps. Only the phase of the
/// forward is recorded.
pub(crate) fn enter_unseen() {
    ranges::on_thread(|thread| {
        updates::forward_begins();
        steps::training_began();
        thread.in_unseen_forward.set(true);
        thread.invalidate();
    });
}

/// Closes the forward that [`enter_unseen`] opened.
pub(crate) fn leave_unseen() {
    ranges::on_thread(|thread| {
        thread.in_unseen_forward.set(false);
        phases::forward_returned();
        thread.invalidate();
    });
}

/// Closes the forward of the module at `key`, and any forwards inside it that an exception left open.
pub(crate) fn leave(key: usize) {
    ranges::on_thread(|thread| {
        if let Some(range) = leave_innermost(thread, key) {
            return ranges::close(range);
        }
        let mut closed = Vec::new();
        if let Ok(mut open) = thread.open.try_borrow_mut() {
            let Some(index) = open.iter().rposition(|range| range.is_module(key)) else { return };
            let is_module = |range: &OpenRange| range.domain == MODULE_DOMAIN;
            while let Some(inner) = open.iter().skip(index).rposition(is_module) {
                closed.push(open.remove(index + inner));
            }
            if !open.iter().any(is_module) && !thread.runs_backward() {
                phases::forward_returned();
            }
        }
        if let Some(outermost) = closed.last() {
            thread.call.set(outermost.around.call);
        }
        thread.invalidate();
        for range in closed {
            ranges::close(range);
        }
    });
}

/// The fast path of [`leave`]: almost every module that ends is the innermost range of its thread and is
/// inside another module. The context of the outer module is then restored. Returns `None` if this path does
/// not apply, for example after a change of process-wide state.
fn leave_innermost(thread: &OpenRanges, key: usize) -> Option<OpenRange> {
    let mut open = thread.open.try_borrow_mut().ok()?;
    let range = *open.last()?;
    let around = range.around;
    if !range.is_module(key)
        || around.base.flags & Context::IN_MODULE == 0
        || around.version != state_version::current()
        || around.base.stream != thread.base.get().stream
    {
        return None;
    }
    open.pop();
    thread.base.set(around.base);
    thread.context.set(around.context);
    thread.epoch.set(thread.epoch.get() + 1);
    thread.version.set(around.version);
    thread.call.set(around.call);
    Some(range)
}

/// Returns the address of the module whose forward is innermost on this thread; 0 if no forward is open.
pub(crate) fn innermost() -> usize {
    let innermost = |open: &Vec<OpenRange>| {
        open.iter().rev().find_map(|range| match range.role {
            Role::Module { key, .. } => Some(key),
            _ => None,
        })
    };
    ranges::on_thread(|thread| thread.open.try_borrow().ok().and_then(|open| innermost(&open)))
        .flatten()
        .unwrap_or(0)
}
