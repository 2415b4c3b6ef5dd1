//! Hooks of the calls that add allocation and free nodes to CUDA graphs. Such an allocation has an address,
//! but no memory until the graph is launched.

use std::ffi::c_void;

use crate::ffi::cuda_types::AllocNodeParams;
use crate::hooks::cuda::alloc_call::{Out, alloc_hooks, allocated_node, free_hooks, node_bytes};
use crate::hooks::cuda::stand_in::caller_hooks;

caller_hooks! {
    cudaGraphAddMemAllocNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, node: *mut AllocNodeParams) caller "r9" => alloc_node, CUDA_ALLOC_NODE;
    cudaGraphAddMemFreeNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, ptr: *mut c_void) caller "r9" => free_node, CUDA_FREE_NODE;
}

alloc_hooks! { runtime
    alloc_node = CUDA_ALLOC_NODE, DeviceAlloc, CudaGraphAddMemAllocNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, node: *mut AllocNodeParams) requests node_bytes(node) => |bytes| allocated_node(node);
}

free_hooks! { runtime
    free_node = CUDA_FREE_NODE, DeviceFree, CudaGraphAddMemFreeNode(out: Out, graph: *mut c_void, after: *const c_void, count: usize, ptr: *mut c_void) frees ptr, 0;
}
