//! Vtables of C++ objects. memtrace replaces them with copies that have its own functions in some slots.
//!
//! Itanium C++ ABI, 2.5: two words precede the first function of a vtable, and an object with virtual
//! functions begins with the address of that first function.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The number of words before the first function of a vtable: the offset of the object's start, and the
/// address of the type information.
pub(crate) const HEADER: usize = 2;

/// A copy of a vtable in which functions can be replaced.
pub(crate) struct VtableCopy {
    words: Box<[*mut c_void]>,
    /// The number of words copied from the original, including its header; the rest is null.
    known: usize,
    original: *const c_void,
}

impl VtableCopy {
    /// Copies the vtable of `object`, up to `most` functions. Returns `None` if the vtable has fewer than
    /// `least`.
    ///
    /// # Safety
    /// `object` is a live C++ object with virtual functions.
    pub(crate) unsafe fn from_object(object: *mut c_void, least: usize, most: usize) -> Option<VtableCopy> {
        // SAFETY: the object begins with the address of its vtable's first function, by the contract.
        let functions = unsafe { *object.cast::<*const *mut c_void>() };
        // SAFETY: the header precedes the first function.
        let begin = unsafe { functions.sub(HEADER) };
        let known = readable_words(begin).min(HEADER + most);
        if known < HEADER + least {
            return None;
        }
        let mut words = vec![std::ptr::null_mut(); HEADER + most].into_boxed_slice();
        for (index, word) in words.iter_mut().take(known).enumerate() {
            // SAFETY: `readable_words` found this many readable words.
            *word = unsafe { *begin.add(index) };
        }
        Some(VtableCopy { words, known, original: functions.cast() })
    }

    /// Returns the address of the first function in the original vtable.
    pub(crate) fn original(&self) -> *const c_void {
        self.original
    }

    /// Returns the functions of the copy, indexed by slot.
    pub(crate) fn functions(&mut self) -> &mut [*mut c_void] {
        &mut self.words[HEADER..self.known]
    }

    /// Installs the copy in `object` for the life of the process. The original stays valid for a thread that
    /// has already read its address.
    ///
    /// # Safety
    /// `object` is the object that was copied from, and every replaced function has the type of its slot.
    pub(crate) unsafe fn install(self, object: *mut c_void) {
        let words = Box::leak(self.words);
        // SAFETY: the word is the object's own first word. It is stored atomically, so a concurrent virtual
        // call sees either the old or the new vtable.
        unsafe { object.cast::<AtomicPtr<*mut c_void>>().as_ref() }
            .inspect(|first| first.store(words[HEADER..].as_mut_ptr(), Ordering::Release));
    }
}

/// Returns the function that ours replaced in a vtable. It was stored before [`VtableCopy::install`], but C++
/// reads the address of a vtable without a barrier. So on aarch64, a call on another thread may read the place
/// before the function is visible there, and waits here for some nanoseconds.
#[inline]
pub(crate) fn replaced(place: &AtomicPtr<c_void>) -> *mut c_void {
    loop {
        let function = place.load(Ordering::Acquire);
        if !function.is_null() {
            return function;
        }
        std::hint::spin_loop();
    }
}

/// Returns at most `most` functions of the vtable at the symbol `table`, which points to the header. The last
/// of these words may be past the end of the vtable.
pub(crate) fn functions_of_table(table: *const *mut c_void, most: usize) -> Vec<*mut c_void> {
    let words = readable_words(table).min(HEADER + most);
    // SAFETY: `readable_words` found this many readable words, and the mapping stays.
    (HEADER..words).map(|index| unsafe { *table.add(index) }).collect()
}

/// Returns at most `most` functions of a vtable, starting at `first`. Some of these words may be past the end
/// of the vtable.
pub(crate) fn functions_from(first: *const *mut c_void, most: usize) -> Vec<*mut c_void> {
    let words = readable_words(first).min(most);
    // SAFETY: `readable_words` found this many readable words, and the mapping stays.
    (0..words).map(|index| unsafe { *first.add(index) }).collect()
}

/// Returns the number of readable words from `address` to the end of the loaded segment that contains it, or
/// 0 outside every segment.
fn readable_words(address: *const *mut c_void) -> usize {
    struct SegmentSearch {
        address: usize,
        words: usize,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
        // SAFETY: `data` is the search below, and `info` is valid during the call.
        let (search, info) = unsafe { (&mut *data.cast::<SegmentSearch>(), &*info) };
        for index in 0..usize::from(info.dlpi_phnum) {
            // SAFETY: the object has `dlpi_phnum` program headers.
            let header = unsafe { &*info.dlpi_phdr.add(index) };
            let start = info.dlpi_addr as usize + header.p_vaddr as usize;
            let end = start + header.p_memsz as usize;
            if header.p_type == libc::PT_LOAD && (start..end).contains(&search.address) {
                search.words = (end - search.address) / size_of::<usize>();
                return 1;
            }
        }
        0
    }
    let mut search = SegmentSearch { address: address as usize, words: 0 };
    // SAFETY: `visit` has the expected type, and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_waits_until_the_function_that_ours_replaced_is_visible() {
        static PLACE: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
        let original = replaced as *mut c_void;
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| replaced(&PLACE) as usize);
            std::thread::sleep(std::time::Duration::from_millis(20));
            PLACE.store(original, Ordering::Release);
            assert_eq!(caller.join().unwrap(), original as usize);
        });
    }
}
