//! The registry of locks that a fork takes.
//!
//! A child must not inherit data that another thread was changing, nor a lock whose holder it does not have.
//! So a fork takes every lock of this library first, and both sides release them. A lock registers itself at
//! its first use: one that was never used is held by nobody.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use memtrace_record::fork_lock::ForkLock;
use memtrace_record::intern;

/// A lock in the registry, whatever data it protects.
trait Registered: Sync {
    fn lock(&self);
    /// # Safety
    /// The thread that forks called [`Registered::lock`].
    unsafe fn unlock(&self);
}

/// Data behind a lock that a fork takes.
///
/// No thread may take a second lock of this kind while it holds one: the fork takes them in the order of
/// their first use. The intern tables may be used under any of these locks, because the fork takes those
/// last.
pub(crate) struct ForkSafe<T> {
    lock: ForkLock<T>,
    is_registered: AtomicBool,
}

/// An entry of the registry, never freed.
struct Entry {
    lock: &'static dyn Registered,
    next: Option<&'static Entry>,
}

/// The registry: a list, the newest entry first. It changes only under [`REGISTERING`].
static NEWEST: AtomicPtr<Entry> = AtomicPtr::new(null_mut());
/// Held by the thread that registers a lock, and by a fork.
static REGISTERING: ForkLock<()> = ForkLock::new(());

/// The registered locks, the newest first.
fn entries() -> impl Iterator<Item = &'static Entry> {
    // SAFETY: null or an entry, which is never freed and never changes.
    let newest = unsafe { NEWEST.load(Ordering::Acquire).as_ref() };
    std::iter::successors(newest, |entry| entry.next)
}

/// Takes every lock: the part of a fork before the child exists.
pub(crate) fn lock_all() {
    REGISTERING.lock_for_fork();
    entries().for_each(|entry| entry.lock.lock());
    intern::lock_for_fork();
}

/// Releases every lock: the part of a fork after it, in the parent and in the child.
///
/// # Safety
/// The thread that forks called [`lock_all`], and this is the same thread or its copy in the child.
pub(crate) unsafe fn unlock_all() {
    // SAFETY: by the contract, as for the locks below.
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

    /// Runs `work` on the data, with the lock held.
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
