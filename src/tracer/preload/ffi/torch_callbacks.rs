//! The op callbacks that a profiler of the program has installed on one thread.

use std::ffi::c_void;

use crate::ffi::symbols::RealFn;

/// `at::RecordFunctionTLS` in ATen/record_function.h, 2.1 to 2.15: a `std::vector` of callbacks and a flag.
#[repr(C)]
pub(crate) struct CallbackState {
    first: *const c_void,
    end: *const c_void,
    room: *const c_void,
    enabled: bool,
}

impl CallbackState {
    /// Returns true if setting one state in place of the other has no effect: neither has callbacks, and the
    /// flags are equal.
    pub(crate) fn is_as(&self, other: &CallbackState) -> bool {
        self.first == self.end && other.first == other.end && self.enabled == other.enabled
    }
}

// SAFETY: the signature is the one in ATen/record_function.h; a reference is passed as an address.
pub(crate) static SET: RealFn<unsafe extern "C-unwind" fn(*const CallbackState)> =
    unsafe { RealFn::new(c"_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE", "libtorch") };

// SAFETY: as above; the function returns a reference to the thread's state.
pub(crate) static GET: RealFn<unsafe extern "C-unwind" fn() -> *const CallbackState> =
    unsafe { RealFn::new(c"_ZN2at24get_record_function_tls_Ev", "libtorch") };

/// Removes the thread's own callbacks while `work` runs and enables op callbacks, so that torch reports its
/// ops only to the process-wide callbacks: memtrace's and, rarely, a process-wide profiler's.
pub(crate) fn without_callbacks_of_thread<R>(work: impl FnOnce() -> R) -> R {
    let (Some(get), Some(set)) = (GET.get(), SET.get()) else { return work() };
    // SAFETY: `get` returns the thread's own state, which only this thread changes.
    let (first, size, enabled) = unsafe {
        let state = &*get();
        (state.first, state.end as usize - state.first as usize, state.enabled)
    };
    // The callbacks are plain data. `set` copies its argument and frees the previous state.
    let mut kept = vec![0_u64; size.div_ceil(8)];
    // SAFETY: `first` points to `size` bytes of callbacks, and `kept` has room for them.
    unsafe { std::ptr::copy_nonoverlapping(first.cast::<u8>(), kept.as_mut_ptr().cast(), size) };
    let state_of = |bytes: usize, enabled| {
        let first = kept.as_ptr().cast::<c_void>();
        let end = first.wrapping_byte_add(bytes);
        CallbackState { first, end, room: end, enabled }
    };
    // SAFETY: the argument is a state without callbacks, which lives during the call.
    unsafe { set(std::ptr::from_ref(&state_of(0, true))) };
    let result = work();
    // SAFETY: the argument refers to the saved callbacks, which live during the call.
    unsafe { set(std::ptr::from_ref(&state_of(size, enabled))) };
    result
}
