//! Device memory and pinned host memory.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::Mutex;

use cudarc::runtime::sys::{cudaExtent, cudaPitchedPtr};

use crate::core::call_table::answers;
use crate::core::device::Device;
use crate::core::ffi::{
    ALREADY_REGISTERED, INVALID_DEVICE, INVALID_VALUE, NOT_FOUND, NOT_REGISTERED, OK, OUT_OF_MEMORY, Out,
    Status, Word,
};
use crate::core::host_state::{current, device, fail, host_state};
use crate::core::lock::lock;
use crate::core::past_oom::Caller;
use crate::core::pinned_pages;
use crate::core::range_allocator::RangeAllocator;
use crate::core::torch_blocks;
use crate::core::unified;
use crate::core::vram::{self, BlockPurpose, PINNED, host_page};
use crate::cuda::{graph_memory, streams, vmm};

/// Allocates a block of the current device and writes its address.
pub(crate) fn alloc(out: Out<usize>, size: usize, purpose: BlockPurpose, caller: Caller) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    if size == 0 {
        out.put(0);
        return OK;
    }
    let address = current().vram().alloc(size, purpose, caller);
    match address {
        Some(address) => out.give(address),
        None => fail(OUT_OF_MEMORY),
    }
}

/// Same as [`alloc`], for a call that refuses 0 bytes: CUDA documents this for managed memory and for the driver, while
/// `cudaMalloc` succeeds.
fn alloc_some(out: Out<usize>, size: usize, purpose: BlockPurpose) -> Status {
    if size == 0 { fail(INVALID_VALUE) } else { alloc(out, size, purpose, Caller::GivesUp) }
}

/// Frees a block of any device: a plain one, one from a memory pool, or one that a graph left allocated.
pub(crate) fn free(address: usize) -> Status {
    if address == 0 {
        // Programs create the context with `cudaFree(0)`.
        current().share().enter();
        return OK;
    }
    let Some(device) = vram::device_index_of(address).and_then(|index| host_state().devices.get(index))
    else {
        return fail(INVALID_VALUE);
    };
    let pooled = device.pool().free(address);
    if let Some(size) = pooled {
        device.values().free(address, size);
        return OK;
    }
    if graph_memory::owns(address) {
        return graph_memory::free(address);
    }
    // `cudaFree` waits for the device, so every event recorded on it has been reached.
    streams::synchronize_device(device);
    let block = device.vram().free_for_program(address);
    match block {
        Some(block) => {
            device.values().free(address, block.size);
            torch_blocks::forget(address, block.size);
            OK
        }
        None => fail(INVALID_VALUE),
    }
}

/// Frees the memory that the program allocated on a device, as the end of its context does. The context itself, the
/// memory of graphs, kernels and libraries, and the handles stay.
fn reset(device: &'static Device) -> Status {
    streams::synchronize_device(device);
    let (pooled, own) = (device.pool().blocks(), device.vram().program_blocks());
    for address in pooled.into_iter().chain(own) {
        free(address);
    }
    device.trim_pool(0);
    OK
}

/// A range of host memory that the device may access.
#[derive(Clone, Copy)]
struct HostRange {
    size: usize,
    /// True if a call of this library allocated the range, false if the program registered its own memory.
    pinned: bool,
    /// The bytes that [`pinned_pages`] did not make resident.
    absent: usize,
}

struct HostRanges {
    free: RangeAllocator,
    /// The ranges, by start address.
    ranges: BTreeMap<usize, HostRange>,
}

static HOST_RANGES: Mutex<HostRanges> =
    Mutex::new(HostRanges { free: RangeAllocator::new(PINNED.start, PINNED.end), ranges: BTreeMap::new() });

/// Allocates pinned memory. It is ordinary memory in its own address range, so that two
/// runs get the same addresses.
fn alloc_host(out: Out<usize>, size: usize) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    if size == 0 {
        return out.give(0);
    }
    let Some(size) = size.checked_next_multiple_of(host_page()) else { return fail(OUT_OF_MEMORY) };
    let mut host = lock(&HOST_RANGES);
    let Some(address) = host.free.alloc(size, host_page()) else { return fail(OUT_OF_MEMORY) };
    if !vram::map(address, size) {
        host.free.free(address, size);
        return fail(OUT_OF_MEMORY);
    }
    host.ranges.insert(address, HostRange { size, pinned: true, absent: 0 });
    drop(host);
    // SAFETY: the range is new, and nobody else knows its address yet.
    unsafe { fill_host(address, size) };
    out.give(address)
}

/// Makes the pages of pinned memory resident. The ranges are not locked meanwhile, because this takes long.
///
/// # Safety
/// Same as for [`pinned_pages::make_resident`].
unsafe fn fill_host(address: usize, size: usize) {
    // SAFETY: by the contract.
    let absent = unsafe { pinned_pages::make_resident(address, size) };
    if absent > 0 {
        match lock(&HOST_RANGES).ranges.get_mut(&address) {
            Some(range) => range.absent = absent,
            // Another thread has already freed the range.
            None => pinned_pages::release(absent),
        }
    }
}

fn free_host(address: usize) -> Status {
    if address == 0 {
        return OK;
    }
    let mut host = lock(&HOST_RANGES);
    match host.ranges.get(&address).copied() {
        Some(HostRange { size, pinned: true, absent }) => {
            host.ranges.remove(&address);
            pinned_pages::release(absent);
            // SAFETY: `alloc_host` mapped the range, and its entry has been removed.
            unsafe { vram::unmap(address, size) };
            host.free.free(address, size);
            OK
        }
        _ => fail(INVALID_VALUE),
    }
}

fn register_host(address: usize, size: usize) -> Status {
    let Some(end) = address.checked_add(size).filter(|_| address != 0 && size != 0) else {
        return fail(INVALID_VALUE);
    };
    let mut host = lock(&HOST_RANGES);
    let before = host.ranges.range(..end).next_back();
    if before.is_some_and(|(&start, range)| start + range.size > address) {
        return fail(ALREADY_REGISTERED);
    }
    host.ranges.insert(address, HostRange { size, pinned: false, absent: 0 });
    drop(host);
    // SAFETY: the program owns the range, and passes it to a call that pins it for reads and writes.
    unsafe { fill_host(address, size) };
    OK
}

fn unregister_host(address: usize) -> Status {
    let mut host = lock(&HOST_RANGES);
    match host.ranges.get(&address).copied() {
        Some(HostRange { pinned: false, absent, .. }) => {
            host.ranges.remove(&address);
            pinned_pages::release(absent);
            OK
        }
        _ => fail(NOT_REGISTERED),
    }
}

/// Returns the start and the end of the pinned or registered range that contains a host address.
pub(crate) fn host_range(address: usize) -> Option<(usize, usize)> {
    let host = lock(&HOST_RANGES);
    let (&start, range) = host.ranges.range(..=address).next_back()?;
    (address < start + range.size).then_some((start, start + range.size))
}

/// The kind of memory to which an address belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum PointerKind {
    /// Memory that CUDA does not know.
    Unknown,
    /// A range of pinned or registered host memory: its start and length.
    Host { start: usize, size: usize },
    /// A block of a device: its device, start and length.
    Device { device: usize, start: usize, size: usize, managed: bool },
}

/// Returns the kind of memory to which an address belongs.
pub(crate) fn pointer_kind(address: usize) -> PointerKind {
    if let Some(index) = vram::device_index_of(address) {
        let found = device(index as c_int).and_then(|device| device.vram().find(address));
        return match found {
            Some((start, block)) => PointerKind::Device {
                device: index,
                start,
                size: block.size,
                managed: block.purpose == BlockPurpose::Managed,
            },
            None => PointerKind::Unknown,
        };
    }
    if vram::is_device(address) {
        return match vmm::find(address) {
            Some((start, size, device)) => PointerKind::Device { device, start, size, managed: false },
            None => PointerKind::Unknown,
        };
    }
    match host_range(address) {
        Some((start, end)) => PointerKind::Host { start, size: end - start },
        None => PointerKind::Unknown,
    }
}

/// Writes the free and the total bytes of the current device.
fn memory_info(free: Out<usize>, total: Out<usize>) -> Status {
    let device = current();
    device.share().enter();
    let left = device.vram().free_bytes();
    let is_unified = host_state().spec.base.unified().is_some();
    free.put(if is_unified { unified::free_of(left) } else { left } as usize);
    total.put(host_state().spec.memory as usize);
    OK
}

/// Allocates an array with rows of `width` bytes. Rows begin at multiples of 512 bytes, as on every card
/// since 2010.
fn alloc_pitched(out: Out<usize>, pitch: Out<usize>, width: usize, height: usize) -> Status {
    let row = width.checked_next_multiple_of(512);
    let Some((row, size)) = row.and_then(|row| Some((row, row.checked_mul(height)?))) else {
        return fail(if out.is_null() { INVALID_VALUE } else { OUT_OF_MEMORY });
    };
    let status = alloc(out, size, BlockPurpose::Plain, Caller::GivesUp);
    if status == OK {
        pitch.put(row);
    }
    status
}

/// Same as [`alloc_pitched`], for an array of several layers.
fn alloc_layers(out: Out<cudaPitchedPtr>, extent: cudaExtent) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    let (mut address, mut pitch) = (0, 0);
    let rows = extent.height.saturating_mul(extent.depth);
    let status = alloc_pitched(Out::to(&mut address), Out::to(&mut pitch), extent.width, rows);
    if status == OK {
        let (xsize, ysize) = (extent.width, extent.height);
        out.put(cudaPitchedPtr { ptr: address as *mut c_void, pitch, xsize, ysize });
    }
    status
}

/// Checks the range of a prefetch or of an advice about managed memory. These calls have no other effect,
/// because managed memory is not charged to a device and so nothing moves.
fn managed_range(address: usize, size: usize) -> Status {
    let is_inside = |start: usize, length: usize| size > 0 && size <= start + length - address;
    match pointer_kind(address) {
        PointerKind::Device { start, size: length, managed: true, .. } if is_inside(start, length) => OK,
        _ => fail(INVALID_VALUE),
    }
}

/// Writes the address by which a device accesses pinned or registered memory: the address itself.
fn host_pointer(out: Out<usize>, address: usize) -> Status {
    if host_range(address).is_some() { out.give(address) } else { fail(INVALID_VALUE) }
}

/// Writes the flags of pinned or registered memory, which the simulated GPU does not keep: 0.
fn host_flags(out: Out<u32>, address: usize) -> Status {
    if host_range(address).is_some() { out.give(0) } else { fail(INVALID_VALUE) }
}

fn address_range(base: Out<usize>, length: Out<usize>, address: usize) -> Status {
    match pointer_kind(address) {
        PointerKind::Device { start, size, .. } => {
            base.put(start);
            length.put(size);
            OK
        }
        _ => NOT_FOUND,
    }
}

answers! {
    Real fn cudaMalloc(out: Out<usize>, size: usize) {
        alloc(out, size, BlockPurpose::Plain, Caller::of_malloc())
    }
    Real fn {cudaFree, cuMemFree_v2}(address: Word) { free(address) }
    /// The answer is a guess, because only the program's memory is freed.
    Guess fn cudaDeviceReset() { reset(current()) }
    Guess fn cuDevicePrimaryCtxReset_v2(index: c_int) { device(index).map_or(INVALID_DEVICE, reset) }
    Guess fn {cudaMallocManaged, cuMemAllocManaged}(out: Out<usize>, size: usize, _flags: Word) {
        alloc_some(out, size, BlockPurpose::Managed)
    }
    // `_place` is a device before CUDA 13 and a `cudaMemLocation` since. Both occupy one register, which this
    // call ignores.
    Real fn {cudaMemPrefetchAsync, cudaMemPrefetchAsync_v2, cuMemPrefetchAsync, cuMemPrefetchAsync_v2}(
        address: Word, size: usize, _place: Word,
    ) {
        managed_range(address, size)
    }
    Real fn {cudaMemAdvise, cudaMemAdvise_v2, cuMemAdvise, cuMemAdvise_v2}(
        address: Word, size: usize, _advice: Word,
    ) {
        managed_range(address, size)
    }
    Real fn cudaMallocPitch(out: Out<usize>, pitch: Out<usize>, width: usize, height: usize) {
        alloc_pitched(out, pitch, width, height)
    }
    Real fn cudaMalloc3D(out: Out<cudaPitchedPtr>, extent: cudaExtent) { alloc_layers(out, extent) }
    Real fn {cudaMallocHost, cuMemAllocHost_v2}(out: Out<usize>, size: usize) { alloc_host(out, size) }
    Real fn {cudaHostAlloc, cuMemHostAlloc}(out: Out<usize>, size: usize, _flags: Word) {
        alloc_host(out, size)
    }
    Real fn {cudaFreeHost, cuMemFreeHost}(address: Word) { free_host(address) }
    Real fn {cudaHostRegister, cuMemHostRegister_v2}(address: Word, size: usize, _flags: Word) {
        register_host(address, size)
    }
    Real fn {cudaHostUnregister, cuMemHostUnregister}(address: Word) { unregister_host(address) }
    Real fn {cudaHostGetDevicePointer, cuMemHostGetDevicePointer_v2}(
        out: Out<usize>, address: Word, _flags: Word,
    ) {
        host_pointer(out, address)
    }
    Real fn cudaHostGetFlags(out: Out<u32>, address: Word) { host_flags(out, address) }
    Real fn {cudaMemGetInfo, cuMemGetInfo_v2}(free: Out<usize>, total: Out<usize>) {
        memory_info(free, total)
    }
    Real fn cuMemAlloc_v2(out: Out<usize>, size: usize) { alloc_some(out, size, BlockPurpose::Plain) }
    Real fn cuMemAllocPitch_v2(
        out: Out<usize>, pitch: Out<usize>, width: usize, height: usize, _element: Word,
    ) {
        alloc_pitched(out, pitch, width, height)
    }
    Real fn cuMemGetAddressRange_v2(base: Out<usize>, length: Out<usize>, address: Word) {
        address_range(base, length, address)
    }
}
