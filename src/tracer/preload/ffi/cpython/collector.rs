//! Keeps Python's garbage collector from running inside the tracer.
//!
//! A collection inside the tracer would run the program's finalizers, hidden from the program's tools. In
//! addition, the containers that the tracer creates would trigger the program's next collection earlier.
//! `gc.disable()` is not an option, because it is process-wide, and another thread of the program may call it
//! at the same time. Instead, the tracer changes the count of new containers, which the collector compares
//! with its threshold. The count is far below the threshold during a call of the tracer, and is restored
//! afterwards.
//!
//! The C API has no function for this count. The count is found in the interpreter's state (`gc_generation`
//! in Include/internal/pycore_gc.h or pycore_interp_structs.h, 3.9 to 3.15) by searching for the values that
//! the module `gc` reports. An interpreter without the count (a free-threaded build) collects as usual.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};

use super::{Arguments, Gil};
use crate::ffi::guarded_memory::GuardedMemory;

/// The address of the count of the youngest generation; null while unknown.
static COUNT: AtomicPtr<c_int> = AtomicPtr::new(std::ptr::null_mut());
/// The number of threads inside the tracer. This and the following statics are changed only with the GIL
/// held.
static ACTIVE: AtomicU32 = AtomicU32::new(0);
/// The count when the first of these threads entered the tracer.
static BEFORE: AtomicI32 = AtomicI32::new(0);
/// True if another thread has entered the tracer while the first was inside, so the program may have run in
/// the meantime.
static ARE_MORE: AtomicBool = AtomicBool::new(false);
/// The value that is subtracted from the count. It is larger than the number of containers that any program
/// creates between two collections.
const FAR: c_int = 1 << 28;
/// The number of words in a `gc_generation`: the two ends of its list, and one word with the threshold and
/// the count.
const GENERATION: usize = 3;
/// The number of words of the interpreter's state that are searched.
const WORDS: usize = 1 << 16;
/// The number of words per read.
const READ: usize = 256;

impl Gil {
    /// Keeps the tracer's objects from triggering a collection until
    /// [`resume_collector`](Gil::resume_collector). Calls on one thread do not nest. Returns false if the
    /// count is unknown.
    pub(crate) fn suspend_collector(self) -> bool {
        let place = COUNT.load(Ordering::Relaxed);
        if place.is_null() {
            return false;
        }
        if ACTIVE.fetch_add(1, Ordering::Relaxed) > 0 {
            ARE_MORE.store(true, Ordering::Relaxed);
            return true;
        }
        // SAFETY: a field of the interpreter, which lives as long as the process; the GIL is held.
        let count = unsafe { &mut *place };
        BEFORE.store(*count, Ordering::Relaxed);
        ARE_MORE.store(false, Ordering::Relaxed);
        *count -= FAR;
        true
    }

    /// Ends a [`suspend_collector`](Gil::suspend_collector) call that returned true.
    pub(crate) fn resume_collector(self) {
        if ACTIVE.fetch_sub(1, Ordering::Relaxed) == 1 {
            restore(ARE_MORE.load(Ordering::Relaxed));
        }
    }
}

/// Restores the count. If `has_program_run` is true, the restored count includes the containers that were
/// created in the meantime, by the program and the tracer.
fn restore(has_program_run: bool) {
    // SAFETY: `COUNT` is null or a field of the interpreter, which lives as long as the process. The GIL is
    // held.
    let Some(count) = (unsafe { COUNT.load(Ordering::Relaxed).as_mut() }) else { return };
    if *count > -(FAR / 2) {
        // A collection on another thread has reset the count in the meantime, so there is nothing to restore.
    } else if has_program_run {
        *count += FAR;
    } else {
        *count = BEFORE.load(Ordering::Relaxed);
    }
}

/// Restores the count in the child of a fork, because the threads that were in the tracer do not exist in the
/// child.
pub(crate) fn reset_in_child() {
    if ACTIVE.swap(0, Ordering::Relaxed) > 0 {
        restore(true);
    }
}

/// `learn_collector(count0, count1, count2, threshold0, threshold1, threshold2) -> bool`: finds the count
/// from the results of `gc.get_count` and `gc.get_threshold`. Then sets it to `count0`, so that the
/// containers that this call has created do not count. Returns false if the count is not found.
pub(crate) fn learn_collector(arguments: Arguments<'_>) -> bool {
    if !COUNT.load(Ordering::Relaxed).is_null() {
        return true;
    }
    let [count0, numbers @ ..] = [0, 1, 2, 3, 4, 5].map(|index| arguments.size(index) as u32);
    let place = arguments.gil.functions().interpreter.and_then(|interpreter| {
        // SAFETY: the GIL is held, so the thread has an interpreter.
        find(unsafe { interpreter() } as usize, numbers)
    });
    if let Some(place) = place {
        let place = place as *mut c_int;
        // SAFETY: `find` has identified this field, and the GIL is held.
        unsafe { *place = count0.cast_signed() };
        COUNT.store(place, Ordering::Relaxed);
    }
    place.is_some()
}

/// Searches the [`WORDS`] words from `start` for three consecutive generations with these counts and
/// thresholds. Returns the address of the youngest generation's count if exactly one position matches.
fn find(start: usize, [count1, count2, first, second, third]: [u32; 5]) -> Option<usize> {
    let memory = GuardedMemory::open()?;
    let mut words: Vec<usize> = Vec::with_capacity(WORDS);
    while words.len() < WORDS
        && let Some(read) = memory.words::<READ>(start + words.len() * 8)
    {
        words.extend(read);
    }
    // The copy itself may be among the words, because an allocator may place it after the interpreter's state.
    let copy = words.as_ptr() as usize..words.as_ptr() as usize + words.capacity() * 8;
    let is_address = |word: usize| word > 4096 && word.is_multiple_of(8);
    let is = |word: usize, threshold: u32, count: u32| word == threshold as usize | (count as usize) << 32;
    let is_first = |word: usize| word as u32 == first && (word >> 32) < FAR as usize;
    let mut found = words.windows(3 * GENERATION).enumerate().filter(|(index, generations)| {
        let [a, b, c] = [0, 1, 2].map(|index| &generations[index * GENERATION..][..GENERATION]);
        [a, b, c].iter().all(|generation| is_address(generation[0]) && is_address(generation[1]))
            && is_first(a[2])
            && is(b[2], second, count1)
            && is(c[2], third, count2)
            && !copy.contains(&(start + index * 8))
    });
    let (index, _) = found.next()?;
    found.next().is_none().then_some(start + (index + GENERATION - 1) * 8 + 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_is_found_only_where_one_place_looks_like_the_generations() {
        let mut words = vec![0usize; READ * 2];
        let start = words.as_ptr() as usize;
        let generations =
            [start, start, 700 | 12 << 32, start, start, 10 | 3 << 32, start, start, 10 | 1 << 32];
        words[20..29].copy_from_slice(&generations);
        let numbers = [3, 1, 700, 10, 10];
        assert_eq!(find(start, numbers), Some(start + 22 * 8 + 4));
        assert_eq!(find(start, [3, 2, 700, 10, 10]), None, "another count");
        words[120..129].copy_from_slice(&generations);
        assert_eq!(find(start, numbers), None, "two places");
        assert_eq!(find(8, numbers), None, "no memory");
    }
}
