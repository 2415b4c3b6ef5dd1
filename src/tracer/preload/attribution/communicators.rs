//! Tracks NCCL's communicators, and the communicator for which NCCL currently allocates memory.
//!
//! A communicator has a number and a text, such as `communicator 2: rank 0 of 8`. The text is the value of
//! the column `name` in the rows of the communicator's memory. NCCL allocates in the calling thread and in
//! threads of its own. Memory that NCCL's own threads allocate belongs to the communicator of the open call,
//! or to no communicator if several calls are open.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;

use crate::runtime::thread;

/// The maximum number of communicators known at once. The memory of further communicators has no name.
const MOST: usize = 256;
/// The value that replaces a text id if the operations of a group belong to several communicators.
const SEVERAL: TextId = TextId::MAX;

/// A live communicator.
struct KnownCommunicator {
    /// The handle; 0 if the entry is free.
    handle: AtomicUsize,
    number: AtomicU32,
    text: AtomicU32,
    /// True once an operation on the communicator has succeeded.
    used: AtomicBool,
    /// True once memtrace has recorded the name of the communicator's process group.
    named: AtomicBool,
}

static KNOWN: [KnownCommunicator; MOST] = [const {
    KnownCommunicator {
        handle: AtomicUsize::new(0),
        number: AtomicU32::new(0),
        text: AtomicU32::new(0),
        used: AtomicBool::new(false),
        named: AtomicBool::new(false),
    }
}; MOST];
/// The number of the newest communicator; 0 before the first one.
static LAST_NUMBER: AtomicU32 = AtomicU32::new(0);
/// The number of communicators that have had an operation.
static USED: AtomicU32 = AtomicU32::new(0);
/// True once a call has returned before its work was done. This means that at least one communicator is
/// non-blocking.
static IN_PROGRESS: AtomicBool = AtomicBool::new(false);
/// The number of open calls of NCCL in all threads. [`LAST_OPENED`] is the text id of the communicator of the
/// call that began last.
static OPEN: AtomicU32 = AtomicU32::new(0);
static LAST_OPENED: AtomicU32 = AtomicU32::new(0);

/// A communicator that a call is creating: it has a number and a text, but no handle yet.
#[derive(Clone, Copy)]
pub(crate) struct Created {
    number: u32,
    pub(crate) text: TextId,
}

/// Assigns the next number to a communicator that is being created. `what` gets this number and returns the
/// text of the communicator. The text names this rank and the number of ranks, or the communicator from which
/// it is split.
pub(crate) fn create(what: impl FnOnce(u32) -> String) -> Created {
    let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed).saturating_add(1);
    Created { number, text: text_id(&what(number)) }
}

/// Stores the handle of a communicator that was created. Ignores a null handle, and any further communicator
/// once [`MOST`] are known.
pub(crate) fn created(new: Created, handle: usize) {
    if handle == 0 {
        return;
    }
    // NCCL reuses handles. If an older communicator had this handle, it no longer exists, although memtrace
    // did not see its destruction.
    destroyed(handle);
    let is_mine = |known: &&KnownCommunicator| {
        known.handle.compare_exchange(0, handle, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    };
    if let Some(known) = KNOWN.iter().find(is_mine) {
        known.number.store(new.number, Ordering::Relaxed);
        known.used.store(false, Ordering::Relaxed);
        known.named.store(false, Ordering::Relaxed);
        known.text.store(new.text, Ordering::Release);
    }
}

fn find(handle: usize) -> Option<&'static KnownCommunicator> {
    KNOWN.iter().find(|known| handle != 0 && known.handle.load(Ordering::Relaxed) == handle)
}

/// Returns the text of a communicator; 0 if the communicator is unknown.
pub(crate) fn text_of(handle: usize) -> TextId {
    find(handle).map_or(0, |known| known.text.load(Ordering::Acquire))
}

/// Returns the number of a communicator; 0 if the communicator is unknown.
pub(crate) fn number_of(handle: usize) -> u32 {
    find(handle).map_or(0, |known| known.number.load(Ordering::Relaxed))
}

/// Forgets a communicator that is about to be destroyed. NCCL may reuse its handle.
pub(crate) fn destroyed(handle: usize) {
    if let Some(known) = find(handle) {
        known.text.store(0, Ordering::Relaxed);
        known.handle.store(0, Ordering::Release);
    }
}

/// Records that an operation on a communicator succeeded, so the communicator is complete and PyTorch knows
/// it.
pub(crate) fn used(handle: usize) {
    if let Some(known) = find(handle)
        && !known.used.swap(true, Ordering::Relaxed)
    {
        USED.fetch_add(1, Ordering::Relaxed);
    }
}

/// Records that a call returned before its work was done, which means that a communicator is non-blocking.
pub(crate) fn is_in_progress() {
    IN_PROGRESS.store(true, Ordering::Relaxed);
}

/// Returns the number of communicators that have had an operation; 0 if a communicator is non-blocking. To
/// name the group of a non-blocking communicator, PyTorch would wait until the communicator is ready, while
/// other ranks may wait for this rank.
pub(crate) fn nameable() -> u32 {
    if IN_PROGRESS.load(Ordering::Relaxed) { 0 } else { USED.load(Ordering::Relaxed) }
}

/// Marks the communicator's process group as named and returns the communicator's number. Returns `None` if
/// the group has a name already or the communicator is unknown.
pub(crate) fn name(handle: usize) -> Option<u32> {
    let known = find(handle)?;
    (!known.named.swap(true, Ordering::Relaxed)).then(|| known.number.load(Ordering::Relaxed))
}

/// Resets the state in the child of a fork, where only the calls of the forking thread are open.
pub(crate) fn reset_in_child() {
    OPEN.store(thread::with(|state| state.open_nccl_calls.get()).unwrap_or(0), Ordering::Relaxed);
}

/// An open call of NCCL on this thread. Dropped when the call returns.
pub(crate) struct OpenCall {
    before: TextId,
}

impl OpenCall {
    /// Opens a call for the communicator with this text; 0 if the communicator is unknown.
    pub(crate) fn open(text: TextId) -> OpenCall {
        let enter = |state: &thread::ThreadState| {
            state.open_nccl_calls.set(state.open_nccl_calls.get() + 1);
            state.communicator.replace(text)
        };
        let before = thread::with(enter).unwrap_or(0);
        LAST_OPENED.store(text, Ordering::Relaxed);
        OPEN.fetch_add(1, Ordering::Release);
        OpenCall { before }
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        thread::with(|state| {
            state.open_nccl_calls.set(state.open_nccl_calls.get().saturating_sub(1));
            state.communicator.set(self.before);
        });
    }
}

/// Records that an operation of this communicator is queued in the thread's group. Outside a group, the
/// record has no effect, because the next group resets it.
pub(crate) fn joins_group(text: TextId) {
    thread::with(|state| {
        let others = state.group_communicator.get();
        state.group_communicator.set(if others == 0 || others == text { text } else { SEVERAL });
    });
}

/// Begins a group on this thread. Groups can be nested; nested groups share one communicator.
pub(crate) fn group_begins() {
    thread::with(|state| {
        let depth = state.group_depth.get();
        state.group_depth.set(depth.saturating_add(1));
        if depth == 0 {
            state.group_communicator.set(0);
        }
    });
}

/// Ends a group on this thread. Returns the text id of the communicator of the group's operations, or 0 if
/// the group had no operations or operations of several communicators.
pub(crate) fn group_ends() -> TextId {
    let text = thread::with(|state| {
        state.group_depth.set(state.group_depth.get().saturating_sub(1));
        state.group_communicator.get()
    });
    text.filter(|text| *text != SEVERAL).unwrap_or(0)
}

/// Returns the text id of the communicator for which NCCL allocates now; 0 if unknown.
pub(crate) fn current() -> TextId {
    let own = thread::with(|state| state.communicator.get()).unwrap_or(0);
    if own != 0 {
        return own;
    }
    if OPEN.load(Ordering::Acquire) == 1 { LAST_OPENED.load(Ordering::Relaxed) } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_nccl_belongs_to_the_communicator_of_its_call() {
        let one = create(|number| format!("communicator {number}: rank 0 of 8"));
        created(one, 0x1000);
        let two = create(|number| format!("communicator {number}: rank 0 of 2"));
        created(two, 0x2000);
        assert_eq!((text_of(0x1000), text_of(0x2000), text_of(0x3000)), (one.text, two.text, 0));
        assert_eq!(current(), 0);
        {
            let _call = OpenCall::open(one.text);
            // A new thread, which has no open call itself, takes the role of one of NCCL's own threads -> the
            // communicator of the only open call.
            assert_eq!(std::thread::spawn(current).join().unwrap(), one.text);
            let _inner = OpenCall::open(two.text);
            assert_eq!(current(), two.text);
            assert_eq!(std::thread::spawn(current).join().unwrap(), 0, "two calls are open");
        }
        assert_eq!(current(), 0);
        // Setup: nested groups with operations of one communicator -> this communicator. Then a group with
        // operations of two -> 0.
        group_begins();
        joins_group(one.text);
        group_begins();
        joins_group(one.text);
        assert_eq!((group_ends(), group_ends()), (one.text, one.text));
        group_begins();
        joins_group(one.text);
        joins_group(two.text);
        assert_eq!(group_ends(), 0);
        // Setup: two operations on a communicator, and one on an unknown handle -> one communicator can be
        // named, and only once.
        assert_eq!(nameable(), 0);
        used(0x1000);
        used(0x1000);
        used(0x9000);
        assert_eq!(nameable(), 1);
        assert_eq!((name(0x1000), name(0x1000), name(0x9000)), (Some(one.number), None, None));
        destroyed(0x1000);
        assert_eq!((text_of(0x1000), number_of(0x1000)), (0, 0));
        // Setup: the handle 0x1000 is reused after its communicator was destroyed, and 0x2000 without a
        // destruction that memtrace saw -> each is a new communicator.
        for handle in [0x1000, 0x2000] {
            let again = create(|number| format!("communicator {number}: rank 0 of 4"));
            created(again, handle);
            assert_eq!((text_of(handle), number_of(handle)), (again.text, again.number));
            assert_eq!(name(handle), Some(again.number));
            let known = nameable();
            used(handle);
            assert_eq!(nameable(), known + 1);
            destroyed(handle);
            destroyed(handle);
            assert_eq!((text_of(handle), number_of(handle), name(handle)), (0, 0, None));
        }
        // Setup: one communicator is non-blocking -> no group can be named, because PyTorch would wait for
        // the communicator.
        is_in_progress();
        assert_eq!(nameable(), 0);
        // Setup: a fork while this thread and another thread are each in a call -> in the child, only the
        // call of this thread is open.
        let call = OpenCall::open(one.text);
        let (began, may_end) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _call = OpenCall::open(two.text);
                began.wait();
                may_end.wait();
                // The reset in the main thread no longer counts this call, but the end of the call lowers the
                // count. So it is counted again here.
                OPEN.fetch_add(1, Ordering::Relaxed);
            });
            began.wait();
            assert_eq!(OPEN.load(Ordering::Relaxed), 2);
            reset_in_child();
            assert_eq!(OPEN.load(Ordering::Relaxed), 1);
            may_end.wait();
        });
        drop(call);
        assert_eq!((OPEN.load(Ordering::Relaxed), current()), (0, 0));
    }
}
