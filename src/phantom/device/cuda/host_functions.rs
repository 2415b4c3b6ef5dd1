//! Calls functions of the program that are queued in a stream.

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{INVALID_VALUE, OK, Status, Word};
use crate::core::host_state::fail;
use crate::cuda::captures;
use crate::cuda::streams::StreamHandle;

type HostFunction = unsafe extern "C" fn(usize);
type StreamCallback = unsafe extern "C" fn(usize, Status, usize);

/// Queues a host function. Outside of a capture it is called at once, because the work
/// before it is as good as done.
///
/// # Safety
/// The function may be called with the argument, also at each launch of a graph into which the stream is
/// captured.
unsafe fn queue_host_function(
    stream: StreamHandle,
    function: Option<HostFunction>,
    argument: usize,
) -> Status {
    let Some(function) = function else { return fail(INVALID_VALUE) };
    captures::queue_effect(stream, move |_| {
        // SAFETY: the caller's promise.
        unsafe { function(argument) };
        OK
    })
}

/// Calls a callback of a stream, which must not be captured: `cudaStreamAddCallback` "is not supported with
/// cudaStreamBeginCapture and cudaStreamEndCapture" (`cuda_runtime_api.h`).
///
/// # Safety
/// The callback may be called with the argument.
unsafe fn call_back(stream: StreamHandle, callback: Option<StreamCallback>, argument: usize) -> Status {
    let Some(callback) = callback else { return fail(INVALID_VALUE) };
    match stream.for_progress() {
        Ok(_) => {
            // SAFETY: the caller's promise.
            unsafe { callback(stream.address(), OK, argument) };
            OK
        }
        Err(status) => status,
    }
}

/// Refuses a captured stream, because this call is one of the "APIs that enqueue asynchronous operations
/// into streams" that "are not currently supported in graphs" (CUDA C++ Programming Guide, Prohibited
/// and Unhandled Operations).
fn attach(stream: StreamHandle) -> Status {
    stream.for_progress().map_or_else(|status| status, |_| OK)
}

answers! {
    Real fn {cudaLaunchHostFunc, cuLaunchHostFunc}(
        stream: StreamHandle, function: Option<HostFunction>, argument: Word,
    ) {
        by_contract!(queue_host_function(stream, function, argument))
    }
    Real fn cudaStreamAddCallback(
        stream: StreamHandle, callback: Option<StreamCallback>, argument: Word, _flags: Word,
    ) {
        by_contract!(call_back(stream, callback, argument))
    }
    Success fn {cudaStreamAttachMemAsync, cuStreamAttachMemAsync}(
        stream: StreamHandle, _address: Word, _size: usize, _flags: Word,
    ) {
        attach(stream)
    }
}
