//! Hooks of the calls that record, query and wait for CUDA events. [`deferred_frees`] follows the events of
//! torch's allocator.

use std::ffi::{c_int, c_uint, c_void};

use super::stand_in::caller_hooks;
use crate::attribution::deferred_frees;
use crate::ffi::cuda_types::{NOT_INITIALIZED, SUCCESS};
use crate::guard::shielded;

caller_hooks! {
    cudaEventRecord(event: *mut c_void, stream: *mut c_void) caller "rdx" => record, CUDA_EVENT_RECORD;
    cudaEventRecordWithFlags(event: *mut c_void, stream: *mut c_void, flags: c_uint) caller "rcx" => record_with_flags, CUDA_EVENT_RECORD_WITH_FLAGS;
    cudaEventQuery(event: *mut c_void) caller "rsi" => query, CUDA_EVENT_QUERY;
    cudaEventSynchronize(event: *mut c_void) caller "rsi" => synchronize, CUDA_EVENT_SYNCHRONIZE;
}

unsafe extern "C" fn record(event: *mut c_void, stream: *mut c_void, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_EVENT_RECORD.get() else { return NOT_INITIALIZED };
    shielded(|| deferred_frees::event_recorded(event, caller));
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { real(event, stream) }
}

unsafe extern "C" fn record_with_flags(
    event: *mut c_void,
    stream: *mut c_void,
    flags: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_EVENT_RECORD_WITH_FLAGS.get() else { return NOT_INITIALIZED };
    shielded(|| deferred_frees::event_recorded(event, caller));
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { real(event, stream, flags) }
}

unsafe extern "C" fn query(event: *mut c_void, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_EVENT_QUERY.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's argument is passed on unchanged.
    let status = unsafe { real(event) };
    if status == SUCCESS {
        shielded(|| deferred_frees::event_completed(event, caller));
    }
    status
}

unsafe extern "C" fn synchronize(event: *mut c_void, caller: *const c_void) -> c_int {
    let Some(real) = CUDA_EVENT_SYNCHRONIZE.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's argument is passed on unchanged.
    let status = unsafe { real(event) };
    if status == SUCCESS {
        shielded(|| deferred_frees::event_completed(event, caller));
    }
    status
}
