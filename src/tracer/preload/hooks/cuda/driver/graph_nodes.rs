//! Hooks of the calls that add allocation and free nodes to CUDA graphs. Such an allocation has an address,
//! but no memory until the graph is launched.

use std::ffi::{c_int, c_void};

use memtrace_trace::Api;

use super::call::{Word, call, record_alloc, record_free};
use crate::ffi::cuda_types::{AllocNodeParams, NOT_INITIALIZED};
use crate::hooks::cuda::alloc_call::{CallKind, Out, allocated_node, node_bytes};
use crate::hooks::cuda::driver_fn::{DriverFn, driver_hooks};

driver_hooks! {
    cuGraphAddMemAllocNode as b"cuGraphAddMemAllocNode" from 11040 (out: Out, graph: Word, after: *const c_void, count: usize, node: *mut AllocNodeParams) caller "r9" => alloc_node, ALLOC_NODE;
    cuGraphAddMemFreeNode as b"cuGraphAddMemFreeNode" from 11040 (out: Out, graph: Word, after: *const c_void, count: usize, ptr: Word) caller "r9" => free_node, FREE_NODE;
}

unsafe extern "C" fn alloc_node<const WAY: usize>(
    out: Out,
    graph: Word,
    after: *const c_void,
    count: usize,
    node: *mut AllocNodeParams,
    caller: *const c_void,
) -> c_int {
    let Some(real) = ALLOC_NODE.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuGraphAddMemAllocNode, caller),
        // SAFETY: this is the caller's own pointer.
        unsafe { node_bytes(node) },
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(out, graph, after, count, node) },
        // SAFETY: this runs only after the call succeeded.
        || unsafe { allocated_node(node) },
    )
}

unsafe extern "C" fn free_node<const WAY: usize>(
    out: Out,
    graph: Word,
    after: *const c_void,
    count: usize,
    ptr: Word,
    caller: *const c_void,
) -> c_int {
    let Some(real) = FREE_NODE.get(WAY) else { return NOT_INITIALIZED };
    // SAFETY: the caller's arguments are passed on unchanged.
    let run = || unsafe { real(out, graph, after, count, ptr) };
    record_free(call(CallKind::DeviceFree, Api::CuGraphAddMemFreeNode, caller), ptr as u64, 0, run)
}
