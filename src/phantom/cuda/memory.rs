//! Device memory, pinned host memory, and what a pointer is.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Mutex;

use crate::core::ffi::{INVALID_VALUE, NOT_SUPPORTED, OK, OUT_OF_MEMORY, Out, Status, Word};
use crate::core::host_state::{current, current_index, device, fail, lock, machine};
use crate::core::range_allocator::Space;
use crate::core::vram::{self, PINNED, Use};
use crate::cuda::graph_memory;
use crate::cuda::pool;
use crate::cuda::stream;
use crate::table::call_table::answers;

/// `cudaErrorHostMemoryAlreadyRegistered` and its opposite.
const REGISTERED: Status = 712;
const NOT_REGISTERED: Status = 713;

/// Gives out a block of the current device.
pub(crate) fn allocate(out: Out<usize>, size: usize, purpose: Use) -> Status {
    if out.address() == 0 {
        return fail(INVALID_VALUE);
    }
    if size == 0 {
        out.put(0);
        return OK;
    }
    let taken = current().vram().allocate(size, purpose);
    match taken {
        Some(address) => out.give(address),
        None => fail(OUT_OF_MEMORY),
    }
}

/// Takes a block back, from whichever device has it.
pub(crate) fn free(address: usize) -> Status {
    if address == 0 {
        return OK;
    }
    let Some(device) = vram::share_of(address).and_then(|index| machine().devices.get(index)) else {
        return fail(INVALID_VALUE);
    };
    if pool::owns(device, address) {
        return pool::free(device, address);
    }
    if graph_memory::owns(address) {
        return graph_memory::free(address);
    }
    // Freeing waits for the device, so every event recorded on it has passed.
    stream::synchronize_device(device);
    let freed = device.vram().free(address);
    match freed {
        Some(block) => {
            device.values().forget(address, block.size);
            OK
        }
        None => fail(INVALID_VALUE),
    }
}

/// A range of host memory that the device may read.
#[derive(Clone, Copy)]
struct Host {
    size: usize,
    /// Ours to unmap; else the program registered what it already had.
    pinned: bool,
}

struct Hosts {
    space: Space,
    ranges: BTreeMap<usize, Host>,
}

static HOSTS: Mutex<Hosts> =
    Mutex::new(Hosts { space: Space::new(PINNED.start, PINNED.end), ranges: BTreeMap::new() });

/// Pinned memory is ordinary memory here, from a range of its own so that runs are alike.
fn allocate_host(out: Out<usize>, size: usize) -> Status {
    if out.address() == 0 {
        return fail(INVALID_VALUE);
    }
    if size == 0 {
        return out.give(0);
    }
    let Some(size) = size.checked_add(4095).map(|size| size & !4095) else { return fail(OUT_OF_MEMORY) };
    let mut hosts = lock(&HOSTS);
    let Some(address) = hosts.space.take(size, 4096) else { return fail(OUT_OF_MEMORY) };
    if !vram::map(address, size) {
        hosts.space.give(address, size);
        return fail(OUT_OF_MEMORY);
    }
    hosts.ranges.insert(address, Host { size, pinned: true });
    out.give(address)
}

fn free_host(address: usize) -> Status {
    if address == 0 {
        return OK;
    }
    let mut hosts = lock(&HOSTS);
    match hosts.ranges.get(&address).copied() {
        Some(Host { size, pinned: true }) => {
            hosts.ranges.remove(&address);
            vram::unmap(address, size);
            hosts.space.give(address, size);
            OK
        }
        _ => fail(INVALID_VALUE),
    }
}

fn register(address: usize, size: usize) -> Status {
    if address == 0 || size == 0 {
        return fail(INVALID_VALUE);
    }
    let mut hosts = lock(&HOSTS);
    let before = hosts.ranges.range(..address + size).next_back();
    if before.is_some_and(|(&start, host)| start + host.size > address) {
        return fail(REGISTERED);
    }
    hosts.ranges.insert(address, Host { size, pinned: false });
    OK
}

fn unregister(address: usize) -> Status {
    let mut hosts = lock(&HOSTS);
    match hosts.ranges.get(&address) {
        Some(Host { pinned: false, .. }) => {
            hosts.ranges.remove(&address);
            OK
        }
        _ => fail(NOT_REGISTERED),
    }
}

/// What an address is to the device.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pointer {
    Unknown,
    Host,
    Device { device: usize, start: usize, size: usize, managed: bool },
}

/// Looks an address up.
pub(crate) fn pointer(address: usize) -> Pointer {
    if let Some(index) = vram::share_of(address) {
        let found = device(index as c_int).and_then(|device| device.vram().find(address));
        return match found {
            Some((start, block)) => Pointer::Device {
                device: index,
                start,
                size: block.size,
                managed: block.purpose == Use::Managed,
            },
            None => Pointer::Unknown,
        };
    }
    if vram::is_device(address) {
        return match crate::cuda::vmm::find(address) {
            Some((start, size, device)) => Pointer::Device { device, start, size, managed: false },
            None => Pointer::Unknown,
        };
    }
    let hosts = lock(&HOSTS);
    match hosts.ranges.range(..=address).next_back() {
        Some((&start, host)) if address < start + host.size => Pointer::Host,
        _ => Pointer::Unknown,
    }
}

/// The part of `cudaPointerAttributes` that both CUDA majors share.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct PointerAttributes {
    kind: c_int,
    device: c_int,
    on_device: usize,
    on_host: usize,
}

fn attributes(address: usize) -> PointerAttributes {
    match pointer(address) {
        Pointer::Unknown => PointerAttributes { kind: 0, device: -1, on_device: 0, on_host: 0 },
        Pointer::Host => {
            PointerAttributes { kind: 1, device: current_index(), on_device: address, on_host: address }
        }
        Pointer::Device { device, managed, .. } => PointerAttributes {
            kind: if managed { 3 } else { 2 },
            device: device as c_int,
            on_device: address,
            on_host: if managed { address } else { 0 },
        },
    }
}

/// What `cudaMemGetInfo` says of the current device: free, total.
pub(crate) fn info() -> (usize, usize) {
    let (used, limit) = current().vram().usage();
    ((limit - used) as usize, machine().spec.memory as usize)
}

/// Rows of an array of so many bytes are placed at a multiple of 512, as on every card since 2010.
fn pitched(out: Out<usize>, pitch: Out<usize>, width: usize, height: usize) -> Status {
    let row = width.div_ceil(512) * 512;
    let status = allocate(out, row.saturating_mul(height), Use::Plain);
    if status == OK {
        pitch.put(row);
    }
    status
}

answers! {
    Real fn cudaMalloc(out: Out<usize>, size: usize) { allocate(out, size, Use::Plain) }
    Real fn cudaFree(address: Word) { free(address) }
    Guess fn cudaMallocManaged(out: Out<usize>, size: usize, _flags: Word) { allocate(out, size, Use::Managed) }
    Real fn cudaMallocPitch(out: Out<usize>, pitch: Out<usize>, width: usize, height: usize) {
        pitched(out, pitch, width, height)
    }
    Real fn cudaMallocHost(out: Out<usize>, size: usize) { allocate_host(out, size) }
    Real fn cudaHostAlloc(out: Out<usize>, size: usize, _flags: Word) { allocate_host(out, size) }
    Real fn cudaFreeHost(address: Word) { free_host(address) }
    Real fn cudaHostRegister(address: Word, size: usize, _flags: Word) { register(address, size) }
    Real fn cudaHostUnregister(address: Word) { unregister(address) }
    Real fn cudaHostGetDevicePointer(out: Out<usize>, address: Word, _flags: Word) { out.give(address) }
    Real fn cudaHostGetFlags(out: Out<u32>, _address: Word) { out.give(0) }
    Real fn cudaMemGetInfo(free: Out<usize>, total: Out<usize>) {
        let (left, all) = info();
        free.put(left);
        total.put(all);
        OK
    }
    Real fn cudaPointerGetAttributes(out: Out<PointerAttributes>, address: Word) { out.give(attributes(address)) }
    Real fn cuMemAlloc_v2(out: Out<usize>, size: usize) { allocate(out, size, Use::Plain) }
    Real fn cuMemFree_v2(address: Word) { free(address) }
    Guess fn cuMemAllocManaged(out: Out<usize>, size: usize, _flags: Word) { allocate(out, size, Use::Managed) }
    Real fn cuMemAllocPitch_v2(out: Out<usize>, pitch: Out<usize>, width: usize, height: usize, _element: Word) {
        pitched(out, pitch, width, height)
    }
    Real fn cuMemAllocHost_v2(out: Out<usize>, size: usize) { allocate_host(out, size) }
    Real fn cuMemHostAlloc(out: Out<usize>, size: usize, _flags: Word) { allocate_host(out, size) }
    Real fn cuMemFreeHost(address: Word) { free_host(address) }
    Real fn cuMemHostRegister_v2(address: Word, size: usize, _flags: Word) { register(address, size) }
    Real fn cuMemHostUnregister(address: Word) { unregister(address) }
    Real fn cuMemHostGetDevicePointer_v2(out: Out<usize>, address: Word, _flags: Word) { out.give(address) }
    Real fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        let (left, all) = info();
        free.put(left);
        total.put(all);
        OK
    }
    Real fn cuMemGetAddressRange_v2(base: Out<usize>, length: Out<usize>, address: Word) {
        match pointer(address) {
            Pointer::Device { start, size, .. } => {
                base.put(start);
                length.put(size);
                OK
            }
            _ => crate::core::ffi::NOT_FOUND,
        }
    }
    Real fn cuPointerGetAttribute(out: Out<u64>, attribute: c_int, address: Word) { attribute_of(out, attribute, address) }
    Real fn cuPointerGetAttributes(count: u32, attributes: Out<c_int>, out: Out<Out<u64>>, address: Word) {
        for index in 0..count as usize {
            if let (Some(attribute), Some(place)) = (attributes.at(index).get(), out.at(index).get()) {
                attribute_of(place, attribute, address);
            }
        }
        OK
    }
}

/// One `CU_POINTER_ATTRIBUTE`.
fn attribute_of(out: Out<u64>, attribute: c_int, address: usize) -> Status {
    let found = pointer(address);
    if found == Pointer::Unknown {
        return INVALID_VALUE;
    }
    let (device, start, size, managed) = match found {
        Pointer::Device { device, start, size, managed } => (device, start, size, managed),
        _ => (current().index, address, 0, false),
    };
    let host = found == Pointer::Host;
    match attribute {
        1 => out.give(crate::cuda::driver::context(device) as u64),
        2 => out.cast().give(if host { 1u32 } else { 2 }),
        3 => out.give(address as u64),
        4 if host || managed => out.give(address as u64),
        4 => INVALID_VALUE,
        6 | 10 | 15 => out.cast().give(0u32),
        7 => out.give(start as u64),
        8 => out.cast().give(u32::from(managed)),
        9 => out.cast().give(device as c_int),
        11 => out.give(start as u64),
        12 => out.give(size as u64),
        13 => out.cast().give(1u32),
        _ => NOT_SUPPORTED,
    }
}
