//! Hooks of the calls that add allocation and free nodes to CUDA graphs. Such an allocation has an address,
//! but no memory until the graph is launched.

use std::ffi::{c_int, c_void};

use memtrace_trace::Api;

use super::call::call;
use crate::ffi::cuda_types::{AllocNodeParams, NOT_INITIALIZED};
use crate::hooks::cuda::alloc_call::{CallKind, Out, allocated_node, node_bytes, record_alloc, record_free};
use crate::hooks::cuda::stand_in::caller_hooks;

caller_hooks! {
    cudaGraphAddMemAllocNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, node: *mut AllocNodeParams) caller "r9" => alloc_node, CUDA_ALLOC_NODE;
    cudaGraphAddMemFreeNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, ptr: *mut c_void) caller "r9" => free_node, CUDA_FREE_NODE;
}

unsafe extern "C" fn alloc_node(
    out: Out,
    graph: *mut c_void,
    after: *const c_void,
    count: usize,
    node: *mut AllocNodeParams,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_ALLOC_NODE.get() else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CudaGraphAddMemAllocNode, caller),
        // SAFETY: this is the caller's own pointer.
        unsafe { node_bytes(node) },
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(out, graph, after, count, node) },
        // SAFETY: this runs only after the call succeeded.
        || unsafe { allocated_node(node) },
    )
}

unsafe extern "C" fn free_node(
    out: Out,
    graph: *mut c_void,
    after: *const c_void,
    count: usize,
    ptr: *mut c_void,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CUDA_FREE_NODE.get() else { return NOT_INITIALIZED };
    let call = call(CallKind::DeviceFree, Api::CudaGraphAddMemFreeNode, caller);
    // SAFETY: the caller's arguments are passed on unchanged.
    record_free(call, ptr as u64, 0, || unsafe { real(out, graph, after, count, ptr) })
}
