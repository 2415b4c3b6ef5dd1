//! The requested size of a block: the bytes that the program asked torch's allocator for, before rounding.
//!
//! The allocator's reports do not contain this size; it is the argument of `allocate(size)`, slot 2 of the
//! vtable of the allocator's C++ object in every version from 2.1 on (`c10/core/Allocator.h`: two
//! destructors, then `allocate`). The object gets a copy of its vtable with our function in that slot. A call
//! of `raw_alloc` bypasses the slot, and the requested size of its block is -1.
//!
//! A program may replace the allocator (`change_current_allocator`) with one that reports nothing. Then the
//! CUDA memory that the new allocator allocates during `allocate` is the block itself.

use std::ffi::{CStr, c_void};
use std::os::unix::ffi::OsStrExt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use crate::attribution::private_pools;
use crate::ffi::loaded_libraries;
use crate::ffi::symbols::find_in_loaded;
use crate::ffi::vtables::{VtableCopy, replaced};
use crate::runtime::thread::{self, ThreadState};

/// `std::atomic<CUDAAllocator*> c10::cuda::CUDACachingAllocator::allocator`.
pub(crate) const ALLOCATOR: &CStr = c"_ZN3c104cuda20CUDACachingAllocator9allocatorE";
/// The slot of `c10::Allocator::allocate`.
const ALLOCATE: usize = 2;
/// The maximum number of functions to copy from the vtable. It is enough for every version of torch.
const FUNCTIONS: usize = 126;

/// `c10::DataPtr`: an address, what owns it, how it is freed, and a device. The caller passes the place of
/// such a result. Its words may be moved.
#[repr(C)]
struct DataPtr([usize; 4]);

/// `DataPtr allocate(size_t)`.
type Allocate = unsafe extern "C-unwind" fn(*mut c_void, usize) -> DataPtr;

/// The maximum number of allocators that are hooked in a process: the first allocator and its replacements.
const MAX_OBJECTS: usize = 4;

/// The function that ours replaced in the vtable of each object.
static REAL_ALLOCATE: [AtomicPtr<c_void>; MAX_OBJECTS] = [const { AtomicPtr::new(null_mut()) }; MAX_OBJECTS];
/// The allocators whose vtables were replaced with ours.
static HOOKED: [AtomicPtr<c_void>; MAX_OBJECTS] = [const { AtomicPtr::new(null_mut()) }; MAX_OBJECTS];
/// Our function for each hooked allocator, by its index in [`HOOKED`].
const OURS: [Allocate; MAX_OBJECTS] = [allocate::<0>, allocate::<1>, allocate::<2>, allocate::<3>];
/// For each allocator, true if it reports no blocks. Only torch's own allocators report blocks.
static REPORTS_NOTHING: [AtomicBool; MAX_OBJECTS] = [const { AtomicBool::new(false) }; MAX_OBJECTS];
/// True if [`install`] has run.
static TRIED: AtomicBool = AtomicBool::new(false);
/// True if a request was larger than its block, which means that slot 2 is not `allocate`.
static WRONG: AtomicBool = AtomicBool::new(false);

/// Returns the requested size of the block of `block` bytes that is reported now; -1 if unknown.
#[inline]
pub(crate) fn of_block(state: &ThreadState, block: i64) -> i64 {
    let requested = state.requested.get();
    if requested > block {
        WRONG.store(true, Ordering::Relaxed);
        return -1;
    }
    if WRONG.load(Ordering::Relaxed) { -1 } else { requested }
}

/// Returns the requested size of the thread's allocation in progress; -1 outside the allocator.
pub(crate) fn in_progress() -> i64 {
    thread::with(|state| state.requested.get()).unwrap_or(-1)
}

/// Forgets the thread's allocation in progress, which has failed.
pub(crate) fn forget() {
    thread::with(|state| state.requested.set(-1));
}

/// Returns true if `allocator` is an allocator of CUDA memory that torch uses or has used.
#[inline]
pub(crate) fn is_hooked(allocator: *const c_void) -> bool {
    !allocator.is_null() && HOOKED.iter().any(|known| known.load(Ordering::Relaxed).cast_const() == allocator)
}

/// Returns true if the thread is inside a call of the allocator's `allocate`.
pub(crate) fn is_inside() -> bool {
    in_progress() >= 0
}

/// Returns true if the thread is inside an allocator that reports no blocks. The memory of the allocator's
/// CUDA calls then counts as blocks.
pub(crate) fn is_inside_unreported() -> bool {
    thread::with(|state| state.unreported.get()).unwrap_or(false)
}

/// Returns true if requested sizes are certainly unavailable. Returns false before torch's first CUDA call,
/// because torch's allocator is hooked only at that call, and a trace may begin earlier.
pub(crate) fn is_missing() -> bool {
    let tried = TRIED.load(Ordering::Relaxed) && HOOKED[0].load(Ordering::Acquire).is_null();
    tried || WRONG.load(Ordering::Relaxed) || find_in_loaded("libc10_cuda.so", ALLOCATOR).is_null()
}

/// Gives torch's current allocator a vtable with our functions, unless the allocator has one already. Does
/// nothing if [`MAX_OBJECTS`] other allocators have one.
pub(crate) fn install() {
    TRIED.store(true, Ordering::Relaxed);
    let place = find_in_loaded("libc10_cuda.so", ALLOCATOR).cast::<*mut c_void>();
    if place.is_null() {
        return;
    }
    // SAFETY: `place` is the exported atomic pointer of libc10_cuda, which stays loaded.
    let object = unsafe { *place };
    if object.is_null() {
        return;
    }
    // An allocator that was replaced may still be called, so it keeps its entry.
    let mut hooked = HOOKED.iter().map(|place| place.load(Ordering::Acquire));
    let Some(index) = hooked.position(|known| known.is_null() || known == object) else { return };
    if HOOKED[index].load(Ordering::Acquire) == object {
        return;
    }
    // SAFETY: `object` has virtual functions, and is alive as long as it is torch's allocator.
    let Some(mut vtable) = (unsafe { VtableCopy::from_object(object, ALLOCATE + 1, FUNCTIONS) }) else {
        return;
    };
    if HOOKED[index].compare_exchange(null_mut(), object, Ordering::AcqRel, Ordering::Acquire).is_err() {
        return;
    }
    let library = loaded_libraries::path_of(vtable.original());
    let is_torchs = library.is_some_and(|path| {
        path.file_name().is_some_and(|name| name.as_bytes().starts_with(b"libc10_cuda.so"))
    });
    REPORTS_NOTHING[index].store(!is_torchs, Ordering::Relaxed);
    let functions = vtable.functions();
    REAL_ALLOCATE[index].store(functions[ALLOCATE], Ordering::Release);
    functions[ALLOCATE] = OURS[index] as *mut c_void;
    if is_torchs {
        private_pools::hook(functions);
    }
    // SAFETY: the copy was made from this object, and our functions have the types of their slots.
    unsafe { vtable.install(object) };
}

unsafe extern "C-unwind" fn allocate<const INDEX: usize>(this: *mut c_void, size: usize) -> DataPtr {
    /// Restores the thread's state, also if an OOM throws an exception.
    struct Restore((i64, bool));
    impl Drop for Restore {
        fn drop(&mut self) {
            thread::with(|state| {
                state.requested.set(self.0.0);
                state.unreported.set(self.0.1);
                state.form.set(0);
            });
        }
    }
    // The function is stored last, so its load comes first.
    let real = replaced(&REAL_ALLOCATE[INDEX]);
    let reports_nothing = REPORTS_NOTHING[INDEX].load(Ordering::Relaxed);
    let outer = thread::with(|state| {
        (state.requested.replace(size as i64), state.unreported.replace(reports_nothing))
    });
    let _restore = Restore(outer.unwrap_or((-1, false)));
    // SAFETY: `real` is the slot's original function, which was stored before ours replaced it.
    let real = unsafe { std::mem::transmute::<*mut c_void, Allocate>(real) };
    // SAFETY: the call passes on the caller's own arguments unchanged.
    unsafe { real(this, size) }
}
