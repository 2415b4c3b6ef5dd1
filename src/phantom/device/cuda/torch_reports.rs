//! Intercepts the reports of PyTorch's caching allocator, which show the blocks inside its segments
//! ([`torch_blocks`]).
//!
//! The allocator reports under its mutex, so a report does not look up the real function if it was found
//! before. The first lookup is made when a library that contains kernels has been loaded.

use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::core::torch_blocks;

/// `void c10::reportMemoryUsageToProfiler(void*, int64_t, size_t, size_t, c10::Device)`, as
/// `c10/core/Allocator.h` declares it in PyTorch 2.1 to 2.15. The device is two bytes in a register.
type Report = unsafe extern "C-unwind" fn(*mut c_void, i64, usize, usize, u64);

const NAME: &CStr = c"_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE";

static REAL: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Returns PyTorch's own function, or null if it is not found. Searches the libraries loaded after this one,
/// then `libc10.so`.
pub(crate) fn find_report() -> *mut c_void {
    let known = REAL.load(Ordering::Relaxed);
    if !known.is_null() {
        return known;
    }
    // SAFETY: look-ups without side effects; a library that is not loaded stays so.
    let found = unsafe {
        let next = libc::dlsym(libc::RTLD_NEXT, NAME.as_ptr());
        let library = libc::dlopen(c"libc10.so".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        match (next.is_null(), library.is_null()) {
            (true, false) => libc::dlsym(library, NAME.as_ptr()),
            _ => next,
        }
    };
    REAL.store(found, Ordering::Relaxed);
    found
}

// SAFETY: PyTorch's definition has the same type, and is called with the caller's arguments.
#[unsafe(export_name = "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE")]
unsafe extern "C-unwind" fn report_memory_usage(
    address: *mut c_void,
    size: i64,
    allocated: usize,
    reserved: usize,
    location: u64,
) {
    const CUDA: u8 = 1;
    let [kind, ..] = location.to_le_bytes();
    if kind == CUDA {
        let (start, length) = (address as usize, size.unsigned_abs() as usize);
        torch_blocks::report(start, size);
        crate::cuda::copy::free(start, length);
    }
    let real = find_report();
    if !real.is_null() {
        // SAFETY: the function has this type.
        let report: Report = unsafe { std::mem::transmute(real) };
        // SAFETY: the caller's own arguments, passed on unchanged.
        unsafe { report(address, size, allocated, reserved, location) };
    }
}
