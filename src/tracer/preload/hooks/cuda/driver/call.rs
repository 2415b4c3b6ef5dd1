//! Code that the hooks of the driver share: the setting that turns them off, and the macro for calls that
//! free memory.

use std::ffi::{c_int, c_void};

use memtrace_trace::Api;

use crate::ffi::cuda::current_driver_device;
use crate::hooks::cuda::alloc_call::{self, Allocated, Call, CallKind};
use crate::runtime::session;

/// An address or a handle of the driver. cuda.h declares some of these as integers and others as pointers,
/// but all are one word long.
pub(super) type Word = *mut c_void;

/// Returns true if calls of the driver are recorded.
fn is_on() -> bool {
    session::session().is_some_and(|session| session.settings.driver)
}

/// Describes a call of the driver. Its device is the device of the thread's context.
pub(super) fn call(kind: CallKind, api: Api, caller: *const c_void) -> Call {
    Call { kind, api, caller, device: current_driver_device }
}

/// Same as [`alloc_call::record_alloc`] if calls of the driver are recorded; otherwise only makes the call.
pub(super) fn record_alloc(
    call: Call,
    asked: usize,
    run: impl FnOnce() -> c_int,
    allocated: impl FnOnce() -> Allocated,
) -> c_int {
    if is_on() { alloc_call::record_alloc(call, asked, run, allocated) } else { run() }
}

/// Same as [`alloc_call::record_free`] if calls of the driver are recorded; otherwise only makes the call.
pub(super) fn record_free(call: Call, addr: u64, bytes: usize, run: impl FnOnce() -> c_int) -> c_int {
    if is_on() { alloc_call::record_free(call, addr, bytes, run) } else { run() }
}

/// Defines hooks of the form `f(ptr, rest...)`, which free `ptr`. The expression after the arguments is the
/// number of freed bytes; 0 means the whole allocation.
macro_rules! simple_free {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*) $bytes:expr;)*) => { $(
        unsafe extern "C" fn $body<const WAY: usize>(ptr: Word, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get(WAY) else { return NOT_INITIALIZED };
            // SAFETY: the caller's arguments are passed on unchanged.
            let run = || unsafe { real(ptr, $($arg),*) };
            record_free(call(CallKind::$kind, Api::$api, caller), ptr as u64, $bytes, run)
        }
    )* };
}

pub(super) use simple_free;
