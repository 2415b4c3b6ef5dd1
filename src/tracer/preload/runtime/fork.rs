//! The registry of the locks that are taken before a fork.
//!
//! A child must not inherit data that another thread was changing, nor a lock whose holder does not exist in
//! the child. So before a fork, this module takes every registered lock; after the fork, both processes
//! release the locks. A lock registers itself at its first use, which is early enough, because a lock that
//! was never used is not held.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use memtrace_record::fork_lock::ForkLock;
use memtrace_record::intern;

/// A lock that [`lock_all`] can take, whatever the type of the data that it protects.
trait Registered: Sync {
    fn lock(&self);
    /// # Safety
    /// The thread that forks called [`Registered::lock`].
    unsafe fn unlock(&self);
}

/// Data protected by a lock that a fork takes first.
///
/// A thread that holds one of these locks must not take a second one, because a fork takes them in an
/// arbitrary order. The intern tables may be used under any of these locks, because a fork takes the locks of
/// the intern tables last.
pub(crate) struct ForkSafe<T> {
    lock: ForkLock<T>,
    is_registered: AtomicBool,
}

/// An entry of the registry. It is never freed.
struct Entry {
    lock: &'static dyn Registered,
    next: Option<&'static Entry>,
}

/// The newest entry of the registry, a linked list. It changes only under [`REGISTERING`].
static NEWEST: AtomicPtr<Entry> = AtomicPtr::new(null_mut());
/// Held while a thread registers a lock, and during a fork, so that no lock is registered between
/// [`lock_all`] and [`unlock_all`].
static REGISTERING: ForkLock<()> = ForkLock::new(());

/// Returns the registered locks, the newest first.
fn entries() -> impl Iterator<Item = &'static Entry> {
    // SAFETY: the pointer is null or to an entry, which is never freed and never changes.
    let newest = unsafe { NEWEST.load(Ordering::Acquire).as_ref() };
    std::iter::successors(newest, |entry| entry.next)
}

/// Takes every lock. Called before the child exists.
pub(crate) fn lock_all() {
    REGISTERING.lock_for_fork();
    entries().for_each(|entry| entry.lock.lock());
    intern::lock_for_fork();
}

/// Releases every lock. Called after the fork, in the parent and in the child.
///
/// # Safety
/// The thread that forks called [`lock_all`], and the calling thread is the same one, or its copy in the
/// child.
pub(crate) unsafe fn unlock_all() {
    // SAFETY: by the contract.
    unsafe { intern::unlock_after_fork() };
    // SAFETY: as above; no lock registered since, because `REGISTERING` is held.
    entries().for_each(|entry| unsafe { entry.lock.unlock() });
    // SAFETY: as above.
    unsafe { REGISTERING.unlock_after_fork() };
}

impl<T: Default + Send> ForkSafe<T> {
    /// Wraps `data` in a lock. The lock registers itself for forks at its first use.
    pub(crate) const fn new(data: T) -> Self {
        ForkSafe { lock: ForkLock::new(data), is_registered: AtomicBool::new(false) }
    }

    /// Runs `work` on the data with the lock held.
    pub(crate) fn with<R>(&'static self, work: impl FnOnce(&mut T) -> R) -> R {
        if !self.is_registered.load(Ordering::Acquire) {
            self.register();
        }
        self.lock.with(work)
    }

    #[cold]
    fn register(&'static self) {
        REGISTERING.with(|()| {
            if self.is_registered.load(Ordering::Relaxed) {
                return;
            }
            let next = entries().next();
            NEWEST.store(Box::into_raw(Box::new(Entry { lock: self, next })), Ordering::Release);
            self.is_registered.store(true, Ordering::Release);
        });
    }
}

impl<T: Default + Send> Registered for ForkSafe<T> {
    fn lock(&self) {
        self.lock.lock_for_fork();
    }

    unsafe fn unlock(&self) {
        // SAFETY: by the contract.
        unsafe { self.lock.unlock_after_fork() };
    }
}
