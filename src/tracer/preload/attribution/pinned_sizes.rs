//! The requested size of pinned memory: the bytes that the program asked torch's allocator of pinned memory
//! for, before it rounds them up to a power of two. `cudaHostAlloc` gets the rounded size.
//!
//! From 2.6 on, the allocator's C++ object holds a pointer to its implementation, whose virtual function
//! `allocate(size)` sees every request (`ATen/core/CachingHostAllocator.h`: two destructors, then `allocate`).
//! The implementation gets a copy of its vtable with our function in this slot. An implementation whose type
//! has another name is left alone, and its sizes are unknown.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use memtrace_record::pinned_requests;

use crate::attribution::requested_sizes::ALLOCATOR;
use crate::ffi::symbols::find_in_loaded;
use crate::ffi::vtables::{VtableCopy, replaced};
use crate::guard::shielded;
use crate::runtime::thread;

/// `at::HostAllocator* at::getHostAllocator(c10::DeviceType)`, in newer versions.
const OF_DEVICE: &CStr = c"_ZN2at16getHostAllocatorEN3c1010DeviceTypeE";
/// `c10::Allocator* at::cuda::getCachingHostAllocator()`, in older versions.
const OF_CUDA: &CStr = c"_ZN2at4cuda23getCachingHostAllocatorEv";
/// The value of `c10::DeviceType::CUDA`.
const CUDA: i8 = 1;

/// The name of the implementation's type. The compiler marks the name of a type in an unnamed namespace with
/// an asterisk.
const TYPE: &CStr = c"*N2at4cuda12_GLOBAL__N_128CUDACachingHostAllocatorImplE";

/// The slot of the implementation's `allocate`.
const ALLOCATE: usize = 2;
/// An upper bound on the functions in the vtable, in any version.
const FUNCTIONS: usize = 62;

/// `std::pair<void*, void*>` in registers: the address of the memory, and torch's description of the block.
#[repr(C)]
struct Given {
    address: *mut c_void,
    block: *mut c_void,
}

type Allocate = unsafe extern "C-unwind" fn(*mut c_void, usize) -> Given;

/// The function that ours replaced.
static REAL_ALLOCATE: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// True if [`install`] has run.
static TRIED: AtomicBool = AtomicBool::new(false);

/// Gives torch's allocator of pinned memory a vtable with our function, once.
pub(crate) fn install() {
    // torch without CUDA has no such allocator, and asking for it would throw.
    if find_in_loaded("libc10_cuda.so", ALLOCATOR).is_null() || TRIED.swap(true, Ordering::Relaxed) {
        return;
    }
    let of_cuda = find_in_loaded("libtorch_cuda.so", OF_CUDA);
    let of_device = find_in_loaded("libtorch_cpu.so", OF_DEVICE);
    let object = if !of_cuda.is_null() {
        // SAFETY: the signature is the one in ATen/cuda/CachingHostAllocator.h, 2.1 to 2.8.
        let get =
            unsafe { std::mem::transmute::<*mut c_void, extern "C-unwind" fn() -> *mut c_void>(of_cuda) };
        get()
    } else if !of_device.is_null() {
        // SAFETY: the signature is the one in ATen/core/CachingHostAllocator.h, 2.8 to 2.15.
        let get =
            unsafe { std::mem::transmute::<*mut c_void, extern "C-unwind" fn(i8) -> *mut c_void>(of_device) };
        get(CUDA)
    } else {
        null_mut()
    };
    let Some(implementation) = implementation_of(object) else { return };
    // SAFETY: the type of the object is known, so it has virtual functions. It lives as long as the process.
    let Some(mut vtable) = (unsafe { VtableCopy::from_object(implementation, ALLOCATE + 1, FUNCTIONS) })
    else {
        return;
    };
    let functions = vtable.functions();
    REAL_ALLOCATE.store(functions[ALLOCATE], Ordering::Release);
    functions[ALLOCATE] = allocate as *mut c_void;
    // SAFETY: the copy was made from this object, and our function has the type of its slot.
    unsafe { vtable.install(implementation) };
}

/// Returns the implementation of an allocator, if its type is [`TYPE`].
fn implementation_of(allocator: *mut c_void) -> Option<*mut c_void> {
    let words = (!allocator.is_null()).then_some(allocator.cast::<*mut c_void>())?;
    // Only the allocator's own vtable says whether a second word exists, so its type is checked first.
    // SAFETY: the allocator is a live C++ object with virtual functions.
    let name = unsafe { type_name(allocator) }?;
    let is_known = name.to_bytes().windows(TYPE_IN_NAME.len()).any(|part| part == TYPE_IN_NAME);
    if !is_known {
        return None;
    }
    // SAFETY: an allocator of this type has the pointer to its implementation after its vtable.
    let implementation = unsafe { *words.add(1) };
    // SAFETY: the implementation is a live C++ object with virtual functions.
    let is_its = !implementation.is_null() && unsafe { type_name(implementation) } == Some(TYPE);
    is_its.then_some(implementation)
}

/// The part that the name of the allocator's type has: it is derived from the template
/// `CachingHostAllocatorInterface`, or has a name of its own.
const TYPE_IN_NAME: &[u8] = b"CUDACachingHostAllocator";

/// Returns the mangled name of the type of an object.
///
/// # Safety
/// `object` is a live C++ object with virtual functions, compiled with type information.
unsafe fn type_name(object: *mut c_void) -> Option<&'static CStr> {
    // SAFETY: by the contract, the object begins with the address of its vtable's first function, which the
    // address of its type information precedes. The second word of the latter is the name.
    unsafe {
        let functions = *object.cast::<*const *const *const c_char>();
        let information = *functions.sub(1);
        let name = (!information.is_null()).then(|| *information.add(1))?;
        (!name.is_null()).then(|| CStr::from_ptr(name))
    }
}

/// Returns the requested bytes of a call that allocates `bytes` bytes of pinned memory now.
pub(crate) fn of_call(bytes: i64) -> i64 {
    let requested = thread::with(|state| state.requested_pinned.get()).unwrap_or(-1);
    if (0..=bytes).contains(&requested) { requested } else { bytes }
}

unsafe extern "C-unwind" fn allocate(this: *mut c_void, size: usize) -> Given {
    /// Restores the thread's state, also if the allocator throws an exception.
    struct Restore(i64);
    impl Drop for Restore {
        fn drop(&mut self) {
            thread::with(|state| state.requested_pinned.set(self.0));
        }
    }
    let outer = thread::with(|state| state.requested_pinned.replace(size as i64));
    let _restore = Restore(outer.unwrap_or(-1));
    let real = replaced(&REAL_ALLOCATE);
    // SAFETY: `real` is the slot's original function, which was stored before ours replaced it.
    let real = unsafe { std::mem::transmute::<*mut c_void, Allocate>(real) };
    // SAFETY: the call passes on the caller's own arguments unchanged.
    let given = unsafe { real(this, size) };
    if !given.block.is_null() && size > 0 {
        shielded(|| pinned_requests::allocated(given.block as u64, given.address as u64, size as u64));
    }
    given
}
