//! The hook of the function with which torch's autograd sets a thread's own callbacks, before and after each
//! backward function.
//!
//! `at::set_record_function_tls_` rebuilds the thread's lists of callbacks, one for each scope. This call
//! takes longer than many ops do, and our callbacks make it 50% slower. In almost every call, the thread
//! already has the requested state, so the call can be skipped. The lists still follow changes of the global
//! callbacks (`LocalCallbackManager` in ATen/record_function.cpp, 2.1 to 2.15). Skipping saves the program
//! more time than our callbacks cost.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::ffi::torch_callbacks::{CallbackState, GET, SET};

/// True if our callbacks are installed. Without our callbacks, no call is skipped.
static INSTALLED: AtomicBool = AtomicBool::new(false);

/// Looks up the real functions and enables the skipping of calls. Called when our callbacks are installed, at
/// torch's first call to CUDA.
pub(super) fn install() {
    let _ = (SET.get(), GET.get());
    INSTALLED.store(true, Ordering::Relaxed);
}

#[unsafe(export_name = "_ZN2at24set_record_function_tls_ERKNS_17RecordFunctionTLSE")]
unsafe extern "C-unwind" fn set_state(state: *const CallbackState) {
    if INSTALLED.load(Ordering::Relaxed)
        && let Some(get) = GET.get()
    {
        // SAFETY: `state` is torch's own argument, and `get` returns the thread's own state, which only this
        // thread changes.
        let (wanted, current) = unsafe { (&*state, &*get()) };
        if wanted.is_as(current) {
            return;
        }
    }
    if let Some(real) = SET.get() {
        // SAFETY: the caller's argument is passed on unchanged.
        unsafe { real(state) }
    }
}
