//! Hooks of the calls that add allocation and free nodes to CUDA graphs. Such an allocation has an address,
//! but no memory until the graph is launched.

use std::ffi::c_void;

use crate::ffi::cuda_types::AllocNodeParams;
use crate::hooks::cuda::alloc_call::{Out, alloc_hooks, allocated_node, free_hooks, node_bytes};
use crate::hooks::cuda::driver_fn::{Word, driver_hooks};

driver_hooks! {
    cuGraphAddMemAllocNode as b"cuGraphAddMemAllocNode" from 11040 (out: Out, graph: Word, after: *const c_void, count: usize, node: *mut AllocNodeParams) caller "r9" => alloc_node, ALLOC_NODE;
    cuGraphAddMemFreeNode as b"cuGraphAddMemFreeNode" from 11040 (out: Out, graph: Word, after: *const c_void, count: usize, ptr: Word) caller "r9" => free_node, FREE_NODE;
}

alloc_hooks! { driver
    alloc_node = ALLOC_NODE, DeviceAlloc, CuGraphAddMemAllocNode(out: Out, graph: Word, after: *const c_void, count: usize, node: *mut AllocNodeParams) requests node_bytes(node) => |bytes| allocated_node(node);
}

free_hooks! { driver
    free_node = FREE_NODE, DeviceFree, CuGraphAddMemFreeNode(out: Out, graph: Word, after: *const c_void, count: usize, ptr: Word) frees ptr, 0;
}
