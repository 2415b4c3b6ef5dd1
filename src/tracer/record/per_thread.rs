//! Data of each thread, which is dropped when the thread ends.
//!
//! Rust's `thread_local!` registers its destructors with the loader, under the lock that `dlopen` holds while
//! constructors run. So the first hook on a thread would wait for a constructor of the program, and if that
//! constructor waits for this thread, both deadlock. The destructor of a pthread key is registered without a
//! lock.
//!
//! The destructors of the program's own thread-locals run before the destructors of keys. At the end of the
//! process, no destructor runs for the thread that calls `exit`.

use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

/// Returns the kernel's id of the calling thread.
#[must_use]
pub fn thread_id() -> u32 {
    // SAFETY: the call has no arguments and cannot fail. glibc has `gettid` since 2.30.
    unsafe { libc::syscall(libc::SYS_gettid) as u32 }
}

/// Data of each thread. Processes do not share this data, but the child of a fork has a copy of the forking
/// thread's data.
pub struct PerThread<T: 'static> {
    make: fn() -> T,
    /// The pthread key; null until the first use, then never freed.
    key: AtomicPtr<Key<T>>,
}

struct Key<T: 'static> {
    key: libc::pthread_key_t,
    /// The value of the key for a thread whose data has been dropped.
    ended: Held<T>,
}

/// The value of the key for one thread.
struct Held<T: 'static> {
    of: &'static PerThread<T>,
    data: Option<T>,
}

impl<T: 'static> PerThread<T> {
    /// Creates storage without any data. `make` creates a thread's data at its first use.
    #[must_use]
    pub const fn new(make: fn() -> T) -> Self {
        PerThread { make, key: AtomicPtr::new(null_mut()) }
    }

    /// Runs `work` on the data of the calling thread. Returns `None` if the thread is ending and its data was
    /// dropped, or if the program has used up the keys. The address of the data stays the same until the
    /// thread ends.
    pub fn with<R>(&'static self, work: impl FnOnce(&T) -> R) -> Option<R> {
        let key = self.key()?;
        // SAFETY: the key is never deleted, and its values are null or point to a `Held<T>`.
        let held = unsafe { libc::pthread_getspecific(key.key).cast::<Held<T>>().as_ref() };
        match held {
            Some(held) => held.data.as_ref().map(work),
            None => {
                let held = Box::into_raw(Box::new(Held { of: self, data: Some((self.make)()) }));
                // SAFETY: as above.
                if unsafe { libc::pthread_setspecific(key.key, held.cast()) } == 0 {
                    // SAFETY: `held` was created above, and is dropped when the thread ends.
                    return unsafe { (*held).data.as_ref() }.map(work);
                }
                // SAFETY: `held` was created above, and nothing else refers to it.
                drop(unsafe { Box::from_raw(held) });
                None
            }
        }
    }

    fn key(&'static self) -> Option<&'static Key<T>> {
        // SAFETY: here and below, the pointer is null or points to a key, which is never freed.
        if let Some(key) = unsafe { self.key.load(Ordering::Acquire).as_ref() } {
            return Some(key);
        }
        let mut key = 0;
        // SAFETY: `key` is valid for writes, and `end` is the destructor for values of this type.
        if unsafe { libc::pthread_key_create(&raw mut key, Some(end::<T>)) } != 0 {
            return None;
        }
        let fresh = Box::into_raw(Box::new(Key { key, ended: Held { of: self, data: None } }));
        match self.key.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as above.
            Ok(_) => unsafe { fresh.as_ref() },
            Err(other) => {
                // SAFETY: another thread was first, and nothing else refers to this key.
                unsafe {
                    libc::pthread_key_delete(key);
                    drop(Box::from_raw(fresh));
                    other.as_ref()
                }
            }
        }
    }
}

/// Drops the value of a thread that ends, and replaces it with a mark, so that later destructors of the
/// thread find that the data is gone. Sets the mark again each time that pthreads calls this destructor.
///
/// # Safety
/// `value` was the thread's value of the key of a [`PerThread`]. pthreads has reset that key to null.
unsafe extern "C" fn end<T: 'static>(value: *mut c_void) {
    let value = value.cast::<Held<T>>();
    // SAFETY: by the contract.
    let held = unsafe { &*value };
    // glibc and musl call a destructor at most four times. Miri calls it until the value is null, which POSIX allows.
    if cfg!(miri) && held.data.is_none() {
        return;
    }
    let Some(key) = held.of.key() else { return };
    // SAFETY: `key` is the key of the value, and the mark is never freed.
    unsafe { libc::pthread_setspecific(key.key, from_ref(&key.ended).cast()) };
    if held.data.is_some() {
        // SAFETY: `with` created it with `Box::into_raw`, and the key refers to the mark now.
        drop(unsafe { Box::from_raw(value) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::atomic::AtomicU32;

    static DROPPED: AtomicU32 = AtomicU32::new(0);
    static COUNT: PerThread<Counted> = PerThread::new(|| Counted(Cell::new(0)));
    static LATER: PerThread<Later> = PerThread::new(|| Later);
    static AFTER: AtomicU32 = AtomicU32::new(0);

    struct Counted(Cell<u32>);
    impl Drop for Counted {
        fn drop(&mut self) {
            assert!(COUNT.with(|_| ()).is_none(), "gone while it is dropped");
            DROPPED.fetch_add(self.0.get(), Ordering::SeqCst);
        }
    }

    /// Data of a key of the program. The key is created later, so its destructor may run after the data of
    /// `PerThread` was dropped. The destructor uses a hook.
    struct Later;
    impl Drop for Later {
        fn drop(&mut self) {
            AFTER.fetch_add(u32::from(COUNT.with(|_| ()).is_none()), Ordering::SeqCst);
        }
    }

    #[test]
    fn each_thread_has_its_own_data_until_it_ends() {
        let count = || COUNT.with(|count| count.0.replace(count.0.get() + 1));
        let work = move || {
            assert_eq!((count(), count()), (Some(0), Some(1)));
            LATER.with(|_| ()).unwrap();
        };
        for _ in 0..3 {
            std::thread::spawn(work).join().unwrap();
        }
        assert_eq!(DROPPED.load(Ordering::SeqCst), 6);
        assert_eq!(AFTER.load(Ordering::SeqCst), 3);
    }
}
