//! Stream-ordered memory calls (`cudaMallocAsync`), on the one pool of each device ([`AsyncPool`]).
//!
//! [`AsyncPool`]: crate::core::async_pool::AsyncPool

use std::ffi::c_int;

use cudarc::driver::sys::CUmemPool_attribute_enum;

use crate::core::call_table::{answers, by_contract};
use crate::core::device::Device;
use crate::core::ffi::{
    INVALID_DEVICE, INVALID_VALUE, In, OK, OUT_OF_MEMORY, Out, Status, Word, codes, opaque_handle,
};
use crate::core::host_state::{current, device, fail};
use crate::cuda::graphs::graph_of;
use crate::cuda::memory;
use crate::cuda::streams::StreamHandle;

/// The lowest handle of a default pool. [`POOL_STEP`] is the distance between two handles. A
/// handle encodes only the device.
const POOL_BASE: usize = 0x7000;
const POOL_STEP: usize = 16;

/// Returns the device whose pool has this handle. A pool that the program created
/// counts as the current device's.
fn device_of_pool(handle: usize) -> &'static Device {
    let index = handle.wrapping_sub(POOL_BASE) / POOL_STEP;
    device(index as c_int).unwrap_or_else(current)
}

fn default_pool(out: Out<usize>, index: c_int) -> Status {
    match device(index) {
        Some(device) => out.give(POOL_BASE + device.index * POOL_STEP),
        None => fail(INVALID_DEVICE),
    }
}

/// Allocates from a device's pool. While the stream is captured, the allocation becomes a node of the graph.
fn alloc_async(out: Out<usize>, size: usize, device: &'static Device, stream: StreamHandle) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    if size == 0 {
        return out.give(0);
    }
    let stream = match stream.for_work() {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    let address = match stream.capturing() {
        Some(capture) => graph_of(capture).get().and_then(|graph| graph.add_alloc(device, size)),
        None => device.alloc_from_pool(size),
    };
    address.map_or_else(|| fail(OUT_OF_MEMORY), |address| out.give(address))
}

fn free_async(address: usize, stream: StreamHandle) -> Status {
    let stream = match stream.for_work() {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    match stream.capturing() {
        Some(capture) if address != 0 => match graph_of(capture).get() {
            Some(graph) => graph.add_free(address),
            None => fail(INVALID_VALUE),
        },
        // The program may also pass an address from `cudaMalloc` to this call.
        _ => memory::free(address),
    }
}

codes!(CUmemPool_attribute_enum {
    CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
    CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
    CU_MEMPOOL_ATTR_USED_MEM_CURRENT,
    CU_MEMPOOL_ATTR_USED_MEM_HIGH,
});

/// Returns the position of a reuse policy in [`AsyncPool::reuse`](crate::core::async_pool::AsyncPool::reuse).
fn reuse_policy(attribute: c_int) -> Option<usize> {
    match attribute {
        CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES => Some(0),
        CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC => Some(1),
        CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES => Some(2),
        _ => None,
    }
}

/// Writes the value of a `CUmemPool_attribute`.
///
/// # Safety
/// `out` is null or good for a write of the attribute's type: an `int` for a reuse policy, else a
/// `cuuint64_t`.
unsafe fn get_attribute(handle: usize, attribute: c_int, out: Out<u64>) -> Status {
    let pool = device_of_pool(handle).pool();
    if let Some(policy) = reuse_policy(attribute) {
        // SAFETY: the caller's promise.
        return unsafe { out.cast() }.give(pool.reuse[policy]);
    }
    match attribute {
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => out.give(pool.release_threshold),
        CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT => out.give(pool.reserved),
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => out.give(pool.reserved_high),
        CU_MEMPOOL_ATTR_USED_MEM_CURRENT => out.give(pool.used),
        CU_MEMPOOL_ATTR_USED_MEM_HIGH => out.give(pool.used_high),
        _ => INVALID_VALUE,
    }
}

/// Sets a `CUmemPool_attribute`.
///
/// # Safety
/// `value` is null or good for a read of the attribute's type, as above.
unsafe fn set_attribute(handle: usize, attribute: c_int, value: In<u64>) -> Status {
    let mut pool = device_of_pool(handle).pool();
    if let Some(policy) = reuse_policy(attribute) {
        // SAFETY: the caller's promise.
        let Some(enabled) = unsafe { value.cast::<u32>() }.get() else { return INVALID_VALUE };
        pool.reuse[policy] = enabled;
        return OK;
    }
    match attribute {
        CU_MEMPOOL_ATTR_RELEASE_THRESHOLD => {
            let Some(threshold) = value.get() else { return INVALID_VALUE };
            pool.release_threshold = threshold;
        }
        // A program may only write zero, which resets a high-water mark to the current value.
        CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH => pool.reserved_high = pool.reserved,
        CU_MEMPOOL_ATTR_USED_MEM_HIGH => pool.used_high = pool.used,
        _ => return INVALID_VALUE,
    }
    OK
}

fn trim(handle: usize, keep: usize) -> Status {
    device_of_pool(handle).trim_pool(keep as u64);
    OK
}

answers! {
    Guess fn {cudaMallocAsync, cuMemAllocAsync}(out: Out<usize>, size: usize, stream: StreamHandle) {
        alloc_async(out, size, current(), stream)
    }
    Guess fn {cudaMallocFromPoolAsync, cuMemAllocFromPoolAsync}(
        out: Out<usize>, size: usize, pool: Word, stream: StreamHandle,
    ) {
        alloc_async(out, size, device_of_pool(pool), stream)
    }
    Guess fn {cudaFreeAsync, cuMemFreeAsync}(address: Word, stream: StreamHandle) {
        free_async(address, stream)
    }
    Real fn {
        cudaDeviceGetDefaultMemPool, cudaDeviceGetMemPool, cuDeviceGetDefaultMemPool, cuDeviceGetMemPool,
    }(out: Out<usize>, index: c_int) { default_pool(out, index) }
    Success fn {cudaDeviceSetMemPool, cuDeviceSetMemPool}(_index: c_int, _pool: Word) { OK }
    /// Allocations from a pool that the program created are counted in the default pool.
    Guess fn {cudaMemPoolCreate, cuMemPoolCreate}(out: Out<usize>, _properties: Word) {
        out.give(opaque_handle())
    }
    Success fn {cudaMemPoolDestroy, cuMemPoolDestroy}(_pool: Word) { OK }
    Real fn {cudaMemPoolGetAttribute, cuMemPoolGetAttribute}(pool: Word, attribute: c_int, out: Out<u64>) {
        by_contract!(get_attribute(pool, attribute, out))
    }
    Real fn {cudaMemPoolSetAttribute, cuMemPoolSetAttribute}(pool: Word, attribute: c_int, value: In<u64>) {
        by_contract!(set_attribute(pool, attribute, value))
    }
    Real fn {cudaMemPoolTrimTo, cuMemPoolTrimTo}(pool: Word, keep: usize) { trim(pool, keep) }
    Success fn {cudaMemPoolSetAccess, cuMemPoolSetAccess}(_pool: Word, _list: Word, _count: usize) { OK }
}
