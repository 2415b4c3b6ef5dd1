//! A lock that a fork takes.
//!
//! A child must not inherit data that another thread was changing, nor a lock whose holder it does not have. So a
//! fork takes every such lock first, and both sides release it.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

/// Data behind a lock for short work: a waiting thread yields.
pub struct ForkLock<T> {
    locked: AtomicBool,
    data: UnsafeCell<T>,
}

// SAFETY: only the one thread that holds `locked` reaches `data`, in `with`. The contract of `unlock_after_fork`
// keeps every other thread from releasing it.
unsafe impl<T: Send> Sync for ForkLock<T> {}

impl<T> ForkLock<T> {
    /// Data behind a lock.
    pub const fn new(data: T) -> Self {
        ForkLock { locked: AtomicBool::new(false), data: UnsafeCell::new(data) }
    }

    /// Runs `work` on the data with the lock held. `work` must not call `with` of the same lock: it would wait for
    /// ever.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        struct Unlock<'a>(&'a AtomicBool);
        impl Drop for Unlock<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Release);
            }
        }
        self.lock_for_fork();
        let _unlock = Unlock(&self.locked);
        // SAFETY: this thread holds the lock until `_unlock` drops, so this is the only reference.
        work(unsafe { &mut *self.data.get() })
    }

    /// Takes the lock and keeps it: the part of a fork before the child exists.
    pub fn lock_for_fork(&self) {
        while self.locked.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            std::thread::yield_now();
        }
    }

    /// Releases the lock after a fork, in the parent and in the child.
    ///
    /// # Safety
    /// The calling thread holds the lock by [`ForkLock::lock_for_fork`]; in the child, the thread that forked did.
    /// Otherwise a second thread could reach the data while one is in [`ForkLock::with`].
    pub unsafe fn unlock_after_fork(&self) {
        self.locked.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_lock_keeps_other_threads_out_until_the_fork_is_over() {
        let lock = ForkLock::new(0);
        lock.lock_for_fork();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| lock.with(|value| *value += 1));
            std::thread::sleep(std::time::Duration::from_millis(20));
            assert!(!other.is_finished());
            // SAFETY: this thread took the lock above.
            unsafe { lock.unlock_after_fork() };
        });
        assert_eq!(lock.with(|value| *value), 1);
    }
}
