//! The requested size of a block: what the program asked torch's allocator for, before rounding.
//!
//! The allocator's reports do not say it. Its C++ object does, at the call of `allocate(size)`: slot 2 of
//! the vtable in every version from 2.1 on (`c10/core/Allocator.h`: two destructors, then `allocate`).
//! The object gets a copy of its vtable in which that slot is ours. Whoever calls `raw_alloc` goes past
//! it, so those blocks have -1.
//!
//! A program may put another allocator in its place (`change_current_allocator`), which reports nothing: what
//! it takes while it allocates is then the block itself.

use std::ffi::{CStr, c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::attribution::private_pools;
use crate::ffi::symbols::find_in_loaded;
use crate::runtime::thread;
use crate::runtime::thread::Own;

/// `std::atomic<CUDAAllocator*> c10::cuda::CUDACachingAllocator::allocator`.
const ALLOCATOR: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
/// `c10::Allocator::allocate`.
const ALLOCATE: usize = 2;
/// Words of a vtable that are copied: two before the first function, and more functions than any
/// version has.
const WORDS: usize = 2 + 126;

/// `DataPtr allocate(size_t)`: the result goes through a pointer that is returned.
type Allocate = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, usize) -> *mut c_void;

/// More allocators than one process has: the first one, and those that were put in its place.
const MOST_OBJECTS: usize = 4;

/// What is behind our function in the vtable of each object.
static REAL_ALLOCATE: [AtomicPtr<c_void>; MOST_OBJECTS] =
    [const { AtomicPtr::new(null_mut()) }; MOST_OBJECTS];
/// The objects whose vtable is ours.
static HOOKED: [AtomicPtr<c_void>; MOST_OBJECTS] = [const { AtomicPtr::new(null_mut()) }; MOST_OBJECTS];
/// Our function for each.
const OURS: [Allocate; MOST_OBJECTS] = [allocate::<0>, allocate::<1>, allocate::<2>, allocate::<3>];
/// Of each: is it not one of torch's own, which report their blocks?
static REPORTS_NOTHING: [AtomicBool; MOST_OBJECTS] = [const { AtomicBool::new(false) }; MOST_OBJECTS];
/// Was it tried?
static TRIED: AtomicBool = AtomicBool::new(false);
/// A request was larger than its block: this is not the function that it was taken for.
static WRONG: AtomicBool = AtomicBool::new(false);

/// What the thread asked for, for the block of `block` bytes that is being reported; -1 when unknown.
#[inline]
pub(crate) fn of_block(own: &Own, block: i64) -> i64 {
    let requested = own.requested.get();
    if requested > block {
        WRONG.store(true, Ordering::Relaxed);
        return -1;
    }
    if WRONG.load(Ordering::Relaxed) { -1 } else { requested }
}

/// Is the thread inside the allocator?
pub(crate) fn is_inside() -> bool {
    thread::with(|own| own.requested.get()).unwrap_or(-1) >= 0
}

/// Is it inside one that reports nothing, so that its calls are the blocks?
pub(crate) fn is_inside_unreported() -> bool {
    thread::with(|own| own.unreported.get()).unwrap_or(false)
}

/// Can it be said that this torch's allocator is not hooked, or not as it was taken for? A trace may begin
/// before torch calls CUDA, which is when it is hooked.
pub(crate) fn is_missing() -> bool {
    let tried = TRIED.load(Ordering::Relaxed) && HOOKED[0].load(Ordering::Acquire).is_null();
    tried || WRONG.load(Ordering::Relaxed) || find_in_loaded("libc10_cuda.so", ALLOCATOR).is_null()
}

/// Puts our function into the allocator's vtable, when there is an allocator that has not got it.
pub(crate) fn install() {
    TRIED.store(true, Ordering::Relaxed);
    let place = find_in_loaded("libc10_cuda.so", ALLOCATOR).cast::<*mut c_void>();
    if place.is_null() {
        return;
    }
    // SAFETY: the exported atomic pointer of libc10_cuda, which stays loaded.
    let object = unsafe { *place };
    if object.is_null() {
        return;
    }
    // The first one may still be called when another has its place.
    let mut hooked = HOOKED.iter().map(|place| place.load(Ordering::Acquire));
    let Some(index) = hooked.position(|known| known.is_null() || known == object) else { return };
    if HOOKED[index].load(Ordering::Acquire) == object {
        return;
    }
    // SAFETY: a C++ object with virtual functions begins with the address of its vtable.
    let vtable = unsafe { *object.cast::<*const *mut c_void>() };
    // SAFETY: two words before its first function a vtable has its offset and type.
    let begin = unsafe { vtable.sub(2) };
    let words = readable_words(begin).min(WORDS);
    let is_first =
        || HOOKED[index].compare_exchange(null_mut(), object, Ordering::AcqRel, Ordering::Acquire).is_ok();
    if words < 2 + ALLOCATE + 1 || !is_first() {
        return;
    }
    let is_torchs = library_of(vtable.cast()).is_some_and(|library| library.starts_with("libc10_cuda.so"));
    REPORTS_NOTHING[index].store(!is_torchs, Ordering::Release);
    let mut copy = vec![null_mut(); WORDS].into_boxed_slice();
    for (index, word) in copy.iter_mut().take(words).enumerate() {
        // SAFETY: `readable_words` found this many in the mapping.
        *word = unsafe { *begin.add(index) };
    }
    REAL_ALLOCATE[index].store(copy[2 + ALLOCATE], Ordering::Release);
    copy[2 + ALLOCATE] = OURS[index] as *mut c_void;
    if is_torchs {
        private_pools::hook(&mut copy[2..words]);
    }
    let copy = Box::leak(copy);
    // SAFETY: the object's own first word. No one is in the middle of a call through it that could see
    // half a pointer, and the old table stays valid for whoever read it before.
    unsafe { object.cast::<AtomicPtr<*mut c_void>>().as_ref() }
        .inspect(|first| first.store(copy[2..].as_mut_ptr(), Ordering::Release));
}

/// The file name of the library that `address` lies in.
fn library_of(address: *const c_void) -> Option<String> {
    // SAFETY: all zero is a value of this plain struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: it takes any address, and `info` is a place for the answer.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of a loaded library.
    let path = unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned();
    path.rsplit('/').next().map(str::to_owned)
}

/// How many words are readable from `address` on: to the end of the loaded segment that holds it.
pub(crate) fn readable_words(address: *const *mut c_void) -> usize {
    struct Search {
        address: usize,
        words: usize,
    }
    unsafe extern "C" fn visit(info: *mut libc::dl_phdr_info, _: usize, data: *mut c_void) -> c_int {
        // SAFETY: `data` is the search below, and `info` is valid during the call.
        let (search, info) = unsafe { (&mut *data.cast::<Search>(), &*info) };
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
    let mut search = Search { address: address as usize, words: 0 };
    // SAFETY: `visit` has the type that is asked for and `search` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut search).cast()) };
    search.words
}

unsafe extern "C-unwind" fn allocate<const INDEX: usize>(
    result: *mut c_void,
    this: *mut c_void,
    size: usize,
) -> *mut c_void {
    /// An OOM leaves by an exception.
    struct Clear((i64, bool));
    impl Drop for Clear {
        fn drop(&mut self) {
            thread::with(|own| (own.requested.set(self.0.0), own.unreported.set(self.0.1)));
        }
    }
    let reports_nothing = REPORTS_NOTHING[INDEX].load(Ordering::Relaxed);
    let outer =
        thread::with(|own| (own.requested.replace(size as i64), own.unreported.replace(reports_nothing)));
    let _clear = Clear(outer.unwrap_or((-1, false)));
    let real = REAL_ALLOCATE[INDEX].load(Ordering::Acquire);
    // SAFETY: the slot's own function, stored before ours was put there.
    let real = unsafe { std::mem::transmute::<*mut c_void, Allocate>(real) };
    // SAFETY: the caller's own arguments, passed on unchanged.
    unsafe { real(result, this, size) }
}
