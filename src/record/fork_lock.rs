//! A lock that a fork can hold.
//!
//! A child must not inherit data that another thread was in the middle of changing, nor a lock that
//! nobody will give back. So the fork itself takes every such lock, and both sides give it back.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Data behind a lock for short work: who waits yields.
pub struct ForkLock<T> {
    locked: AtomicBool,
    data: UnsafeCell<T>,
}

// SAFETY: `data` is only reached in `with`, by the one thread that holds `locked`.
unsafe impl<T: Send> Sync for ForkLock<T> {}

impl<T> ForkLock<T> {
    /// Data behind a lock.
    pub const fn new(data: T) -> Self {
        ForkLock { locked: AtomicBool::new(false), data: UnsafeCell::new(data) }
    }

    /// Runs `work` on the data. `work` must not call `with` of the same lock.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        struct Unlock<'a, T>(&'a ForkLock<T>);
        impl<T> Drop for Unlock<'_, T> {
            fn drop(&mut self) {
                self.0.unlock_after_fork();
            }
        }
        self.lock_for_fork();
        let _unlock = Unlock(self);
        // SAFETY: the lock is ours until `_unlock` drops, so this is the only reference.
        work(unsafe { &mut *self.data.get() })
    }

    /// Takes the lock and keeps it: the part of a fork before the child exists.
    pub fn lock_for_fork(&self) {
        while self.locked.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
    }

    /// Gives the lock back, in the parent and in the child.
    pub fn unlock_after_fork(&self) {
        self.locked.store(false, Ordering::Release);
    }
}
