//! NCCL's communicators: the one that NCCL works for now, whose memory it allocates.
//!
//! A communicator has a number and a text, such as `communicator 2: rank 0 of 8`, which stands in the column `name` of its
//! memory's rows. NCCL allocates in the calling thread and in threads of its own. Those get the communicator of
//! the call that is open, and none while calls for several are.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};

use memtrace_record::intern::TextId;
use memtrace_record::recorder::text_id;

use crate::runtime::thread;

/// The most communicators that are known at once. The memory of further ones has no name.
const MOST: usize = 256;
/// In the place of a text: operations of several communicators are in one group.
const SEVERAL: TextId = TextId::MAX;

/// A live communicator.
struct KnownCommunicator {
    /// The handle; 0 for a free place.
    handle: AtomicUsize,
    number: AtomicU32,
    text: AtomicU32,
    /// True when an operation on it succeeded.
    used: AtomicBool,
    /// True when its group's name was recorded.
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
/// The number of the last communicator.
static LAST_NUMBER: AtomicU32 = AtomicU32::new(0);
/// The communicators that have had an operation.
static USED: AtomicU32 = AtomicU32::new(0);
/// True if a call has returned before it was done: a communicator of the process does not block.
static IN_PROGRESS: AtomicBool = AtomicBool::new(false);
/// The calls of NCCL that are open, and the communicator of the last one that began.
static OPEN: AtomicU32 = AtomicU32::new(0);
static LAST_OPENED: AtomicU32 = AtomicU32::new(0);

/// A communicator that a call creates.
#[derive(Clone, Copy)]
pub(crate) struct Created {
    number: u32,
    pub(crate) text: TextId,
}

/// A communicator is being created: this rank and the number of ranks, or the one that it is split from.
pub(crate) fn create(what: impl FnOnce(u32) -> String) -> Created {
    let number = LAST_NUMBER.fetch_add(1, Ordering::Relaxed).saturating_add(1);
    Created { number, text: text_id(&what(number)) }
}

/// The created communicator has this handle.
pub(crate) fn created(new: Created, handle: usize) {
    if handle == 0 {
        return;
    }
    // The one that had this handle is gone, however it was destroyed.
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

/// The text of a communicator; 0 for an unknown one.
pub(crate) fn text_of(handle: usize) -> TextId {
    find(handle).map_or(0, |known| known.text.load(Ordering::Acquire))
}

/// The number of a communicator; 0 for an unknown one.
pub(crate) fn number_of(handle: usize) -> u32 {
    find(handle).map_or(0, |known| known.number.load(Ordering::Relaxed))
}

/// A communicator is about to be destroyed: its handle may come back for another one.
pub(crate) fn destroyed(handle: usize) {
    if let Some(known) = find(handle) {
        known.text.store(0, Ordering::Relaxed);
        known.handle.store(0, Ordering::Release);
    }
}

/// An operation on a communicator succeeded: it is made, and PyTorch knows it.
pub(crate) fn used(handle: usize) {
    if let Some(known) = find(handle)
        && !known.used.swap(true, Ordering::Relaxed)
    {
        USED.fetch_add(1, Ordering::Relaxed);
    }
}

/// A call returned before it was done.
pub(crate) fn is_in_progress() {
    IN_PROGRESS.store(true, Ordering::Relaxed);
}

/// The number of communicators that have had an operation; 0 if the names of their groups must not be asked for:
/// PyTorch waits until a communicator that does not block is ready, and other ranks may wait for this one.
pub(crate) fn nameable() -> u32 {
    if IN_PROGRESS.load(Ordering::Relaxed) { 0 } else { USED.load(Ordering::Relaxed) }
}

/// The number of a communicator whose group gets its name now; `None` when it has one, or is unknown.
pub(crate) fn name(handle: usize) -> Option<u32> {
    let known = find(handle)?;
    (!known.named.swap(true, Ordering::Relaxed)).then(|| known.number.load(Ordering::Relaxed))
}

/// In the child of a fork: only the calls of the thread that forked are open there.
pub(crate) fn reset_in_child() {
    OPEN.store(thread::with(|state| state.open_nccl_calls.get()).unwrap_or(0), Ordering::Relaxed);
}

/// An open call of NCCL on this thread. Dropped when it returns.
pub(crate) struct OpenCall {
    before: TextId,
}

impl OpenCall {
    /// Opens a call for a communicator; 0: it is not known which.
    pub(crate) fn of(text: TextId) -> OpenCall {
        let enter = |state: &thread::ThreadState| {
            state.open_nccl_calls.set(state.open_nccl_calls.get() + 1);
            state.communicator.replace(text)
        };
        let before = thread::with(enter).unwrap_or(0);
        LAST_OPENED.store(text, Ordering::Relaxed);
        OPEN.fetch_add(1, Ordering::Relaxed);
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

/// An operation of a communicator is queued in this thread's group, if one is open.
pub(crate) fn joins_group(text: TextId) {
    thread::with(|state| {
        let others = state.group_communicator.get();
        state.group_communicator.set(if others == 0 || others == text { text } else { SEVERAL });
    });
}

/// A group begins on this thread.
pub(crate) fn group_begins() {
    thread::with(|state| {
        let depth = state.group_depth.get();
        state.group_depth.set(depth.saturating_add(1));
        if depth == 0 {
            state.group_communicator.set(0);
        }
    });
}

/// A group ends on this thread: the communicator of its operations, 0 for several.
pub(crate) fn group_ends() -> TextId {
    let text = thread::with(|state| {
        state.group_depth.set(state.group_depth.get().saturating_sub(1));
        state.group_communicator.get()
    });
    text.filter(|text| *text != SEVERAL).unwrap_or(0)
}

/// The communicator that NCCL allocates for now; 0 when that is not known.
pub(crate) fn current() -> TextId {
    let own = thread::with(|state| state.communicator.get()).unwrap_or(0);
    if own != 0 {
        return own;
    }
    if OPEN.load(Ordering::Relaxed) == 1 { LAST_OPENED.load(Ordering::Relaxed) } else { 0 }
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
            let _call = OpenCall::of(one.text);
            // NCCL's own thread.
            assert_eq!(std::thread::spawn(current).join().unwrap(), one.text);
            let _inner = OpenCall::of(two.text);
            assert_eq!(current(), two.text);
            assert_eq!(std::thread::spawn(current).join().unwrap(), 0, "two calls are open");
        }
        assert_eq!(current(), 0);
        // A group of one communicator, and of two.
        group_begins();
        joins_group(one.text);
        group_begins();
        joins_group(one.text);
        assert_eq!((group_ends(), group_ends()), (one.text, one.text));
        group_begins();
        joins_group(one.text);
        joins_group(two.text);
        assert_eq!(group_ends(), 0);
        // A name is asked for after an operation, and once.
        assert_eq!(nameable(), 0);
        used(0x1000);
        used(0x1000);
        used(0x9000);
        assert_eq!(nameable(), 1);
        assert_eq!((name(0x1000), name(0x1000), name(0x9000)), (Some(one.number), None, None));
        destroyed(0x1000);
        assert_eq!((text_of(0x1000), number_of(0x1000)), (0, 0));
        // Its handle is reused. So is the other communicator's handle, whose end was not seen.
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
        // One that does not block: PyTorch would wait for it.
        is_in_progress();
        assert_eq!(nameable(), 0);
        // A fork during a call, while another thread is in a call, too: the child keeps the call of the
        // thread that forked.
        let call = OpenCall::of(one.text);
        let (began, may_end) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _call = OpenCall::of(two.text);
                began.wait();
                may_end.wait();
                // No longer a call of this process, as it were.
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
