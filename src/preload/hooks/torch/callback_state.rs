//! The callbacks of a thread's own, which torch's autograd sets before and behind each backward function.
//!
//! `at::set_record_function_tls_` makes the thread's lists of callbacks anew, one for each scope: that takes longer
//! than many an op, and with our callbacks in the lists half as long again. Nearly always a thread gets what it has,
//! and then there is nothing to do: the lists follow the global callbacks by themselves (`LocalCallbackManager` in
//! ATen/record_function.cpp, 2.1 to 2.15). So the program gets back what our callbacks cost here, and more.

use std::ffi::c_void;

use super::op_callbacks;
use crate::ffi::symbols::RealFn;

/// `at::RecordFunctionTLS` in ATen/record_function.h, 2.1 to 2.15: a `std::vector` of callbacks, and a flag.
#[repr(C)]
struct State {
    first: *const c_void,
    end: *const c_void,
    room: *const c_void,
    enabled: bool,
}

impl State {
    /// Are both without callbacks, and else the same?
    fn is_as(&self, other: &State) -> bool {
        self.first == self.end && other.first == other.end && self.enabled == other.enabled
    }
}

// SAFETY: the signature is the one in ATen/record_function.h; a reference is passed as an address.
static SET: RealFn<unsafe extern "C-unwind" fn(*const State)> =
    unsafe { RealFn::new(c"_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE", "libtorch") };

// SAFETY: as above; it gives a reference to what the thread has.
static GET: RealFn<unsafe extern "C-unwind" fn() -> *const State> =
    unsafe { RealFn::new(c"_ZN2at24get_record_function_tls_Ev", "libtorch") };

/// Finds both; at torch's first call to CUDA, as what reports need.
pub(super) fn install() {
    let _ = (SET.get(), GET.get());
}

#[unsafe(export_name = "_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE")]
unsafe extern "C-unwind" fn set_state(state: *const State) {
    if op_callbacks::are_installed()
        && let Some(get) = GET.get()
    {
        // SAFETY: torch's own argument, and the thread's own state, which only this thread changes.
        let (wanted, has) = unsafe { (&*state, &*get()) };
        if wanted.is_as(has) {
            return;
        }
    }
    if let Some(real) = SET.get() {
        // SAFETY: the caller's own argument, passed on unchanged.
        unsafe { real(state) }
    }
}
