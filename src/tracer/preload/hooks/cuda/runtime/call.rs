//! Code that the hooks of the runtime share: the description of a call, and the macro for calls that free
//! memory.

use std::ffi::c_void;

use memtrace_trace::Api;

use crate::ffi::cuda::current_device;
use crate::hooks::cuda::alloc_call::{Call, CallKind};

/// Describes a call of the runtime. Its device is the runtime's current device.
pub(super) fn call(kind: CallKind, api: Api, caller: *const c_void) -> Call {
    Call { kind, api, caller, device: current_device }
}

/// Defines hooks of the form `f(ptr, rest...)`, which free `ptr`.
macro_rules! simple_free {
    ($($body:ident = $real:ident, $kind:ident, $api:ident ($($arg:ident: $type:ty),*);)*) => { $(
        unsafe extern "C" fn $body(ptr: *mut c_void, $($arg: $type,)* caller: *const c_void) -> c_int {
            let Some(real) = $real.get() else { return NOT_INITIALIZED };
            // SAFETY: the caller's arguments are passed on unchanged.
            record_free(call(CallKind::$kind, Api::$api, caller), ptr as u64, 0, || unsafe { real(ptr, $($arg),*) })
        }
    )* };
}

pub(super) use simple_free;
