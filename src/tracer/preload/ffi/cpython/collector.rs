//! The garbage collector while the tracer runs.
//!
//! A collection in the tracer would run the program's finalizers hidden from its tools, and the containers
//! that the tracer makes would bring the program's next collection forward. `gc.disable()` is no way out: it
//! is a switch of the whole process, which another thread of the program may set meanwhile. So the count of new
//! containers, by which the collector decides, is kept far below its threshold during a call of the tracer and
//! gets its old value afterwards.
//!
//! The count has no function in the C API. It is found in the interpreter's state (`gc_generation` in
//! Include/internal/pycore_gc.h or pycore_interp_structs.h, 3.9 to 3.15) by the values that the module `gc`
//! reports. An interpreter without it (a free-threaded build) collects as it likes.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU32, Ordering};

use super::{Arguments, Gil};
use crate::ffi::guarded_memory::GuardedMemory;

/// The count of the youngest generation; null while it is unknown.
static COUNT: AtomicPtr<c_int> = AtomicPtr::new(std::ptr::null_mut());
/// The threads that are in the tracer now. Changed with the GIL, like all that follows.
static ACTIVE: AtomicU32 = AtomicU32::new(0);
/// The count before the first of them came.
static BEFORE: AtomicI32 = AtomicI32::new(0);
/// True if more than one has been there since then: the program may have run meanwhile.
static ARE_MORE: AtomicBool = AtomicBool::new(false);
/// No program creates this many containers between two collections.
const FAR: c_int = 1 << 28;
/// The words of a generation: the two ends of its list, and the threshold with the count.
const GENERATION: usize = 3;
/// The words of the interpreter's state that are searched.
const WORDS: usize = 1 << 16;
/// The words of one read.
const READ: usize = 256;

impl Gil {
    /// Keeps the collector from running because of what the tracer makes, until
    /// [`resume_collector`](Gil::resume_collector). Calls of one thread do not nest. Returns false where the
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

    /// Ends a [`suspend_collector`](Gil::suspend_collector) that returned true.
    pub(crate) fn resume_collector(self) {
        if ACTIVE.fetch_sub(1, Ordering::Relaxed) == 1 {
            restore(ARE_MORE.load(Ordering::Relaxed));
        }
    }
}

/// Gives the count its old value; `has_program_run` keeps what the program has added meanwhile.
fn restore(has_program_run: bool) {
    // SAFETY: as above.
    let Some(count) = (unsafe { COUNT.load(Ordering::Relaxed).as_mut() }) else { return };
    if *count > -(FAR / 2) {
        // The program has collected by itself meanwhile, on another thread.
    } else if has_program_run {
        *count += FAR;
    } else {
        *count = BEFORE.load(Ordering::Relaxed);
    }
}

/// The child of a fork has no thread in the tracer.
pub(crate) fn reset_in_child() {
    if ACTIVE.swap(0, Ordering::Relaxed) > 0 {
        restore(true);
    }
}

/// `learn_collector(count0, count1, count2, threshold0, threshold1, threshold2) -> bool`: finds the count, by what
/// `gc.get_count` and `gc.get_threshold` have returned, and sets it to `count0`.
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
        // SAFETY: the field was found; the GIL is held.
        unsafe { *place = count0.cast_signed() };
        COUNT.store(place, Ordering::Relaxed);
    }
    place.is_some()
}

/// The address of the count of the youngest generation, in the words from `start` on, if exactly one place there
/// looks like it.
fn find(start: usize, [count1, count2, first, second, third]: [u32; 5]) -> Option<usize> {
    let memory = GuardedMemory::open()?;
    let mut words: Vec<usize> = Vec::with_capacity(WORDS);
    while words.len() < WORDS
        && let Some(read) = memory.words::<READ>(start + words.len() * 8)
    {
        words.extend(read);
    }
    let is_address = |word: usize| word > 4096 && word.is_multiple_of(8);
    let is = |word: usize, threshold: u32, count: u32| word == threshold as usize | (count as usize) << 32;
    let is_first = |word: usize| word as u32 == first && (word >> 32) < FAR as usize;
    let mut found = words.windows(3 * GENERATION).enumerate().filter(|(_, generations)| {
        let [a, b, c] = [0, 1, 2].map(|index| &generations[index * GENERATION..][..GENERATION]);
        [a, b, c].iter().all(|generation| is_address(generation[0]) && is_address(generation[1]))
            && is_first(a[2])
            && is(b[2], second, count1)
            && is(c[2], third, count2)
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
