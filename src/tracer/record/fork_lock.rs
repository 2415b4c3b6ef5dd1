//! A lock that a fork takes.
//!
//! A child must not inherit data that another thread was changing. Nor must it inherit a held lock, because
//! the holder is a thread that the child does not have. So a fork takes every such lock first, and both sides
//! release it. A fork without handlers (`_Fork`, `clone`) takes no lock. The child of such a fork finds that
//! the holder is another process, and replaces the data, which may be half changed.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::own_page;

/// The value of `holder` while the lock is free.
const FREE: u32 = 0;

/// Data that a lock protects. The lock is for short work, because a waiting thread yields instead of
/// sleeping.
pub struct ForkLock<T> {
    /// The id of the process that holds the lock.
    holder: AtomicU32,
    data: UnsafeCell<T>,
}

// SAFETY: only the one thread that holds the lock reaches `data`, in `with` and `lock_for_fork`. The contract
// of `unlock_after_fork` keeps every other thread from releasing the lock.
unsafe impl<T: Send> Sync for ForkLock<T> {}

impl<T: Default> ForkLock<T> {
    /// Creates a free lock that protects `data`.
    pub const fn new(data: T) -> Self {
        ForkLock { holder: AtomicU32::new(FREE), data: UnsafeCell::new(data) }
    }

    /// Runs `work` on the data with the lock held. `work` must not call `with` of the same lock, because that
    /// call would wait forever.
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        struct Unlock<'a>(&'a AtomicU32);
        impl Drop for Unlock<'_> {
            fn drop(&mut self) {
                self.0.store(FREE, Ordering::Release);
            }
        }
        self.lock_for_fork();
        let _unlock = Unlock(&self.holder);
        // SAFETY: this thread holds the lock until `_unlock` drops, so this is the only reference.
        work(unsafe { &mut *self.data.get() })
    }

    /// Takes the lock and keeps it, before a fork.
    pub fn lock_for_fork(&self) {
        let own = own_page::pid();
        loop {
            match self.take_from(FREE, own) {
                Ok(_) => return,
                // The holder is a thread of the parent, which does not exist in this process, so nobody would
                // release the lock.
                Err(holder) if holder != FREE && holder != own => {
                    if self.take_from(holder, own).is_ok() {
                        // SAFETY: this thread holds the lock. The old value may be half changed, so it is
                        // leaked.
                        unsafe { self.data.get().write(T::default()) };
                        return;
                    }
                }
                Err(_) => std::thread::yield_now(),
            }
        }
    }

    fn take_from(&self, holder: u32, own: u32) -> Result<u32, u32> {
        self.holder.compare_exchange(holder, own, Ordering::Acquire, Ordering::Relaxed)
    }

    /// Releases the lock after a fork, in the parent and in the child.
    ///
    /// # Safety
    /// The calling thread took the lock with [`ForkLock::lock_for_fork`]; in the child, the thread that
    /// forked took it. Otherwise a second thread could reach the data while another thread is in
    /// [`ForkLock::with`].
    pub unsafe fn unlock_after_fork(&self) {
        self.holder.store(FREE, Ordering::Release);
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

    #[test]
    fn a_fork_lock_that_another_process_holds_is_taken_with_new_data() {
        let lock = ForkLock::new(7);
        // Setup: another process holds the lock. A child finds this state if it was forked without handlers
        // while a thread of its parent held the lock.
        lock.holder.store(own_page::pid() + 1, Ordering::Relaxed);
        assert_eq!(lock.with(|value| std::mem::replace(value, 3)), 0);
        assert_eq!(lock.with(|value| *value), 3);
    }
}
