//! Stream-ordered memory (`cudaMallocAsync`): one pool per device, suballocated from chunks.
//!
//! What is assumed of the real driver: a pool takes chunks that are multiples of 32 MiB, gives
//! blocks at multiples of 512 bytes, and at a synchronization returns chunks that are wholly free
//! when it holds more than its release threshold. PyTorch sets that threshold to "never".

use std::collections::BTreeMap;

use crate::core::ffi::{INVALID_VALUE, OK, OUT_OF_MEMORY, Out, Status, Word, opaque_handle};
use crate::core::host_state::{Device, current, device, fail};
use crate::core::range_allocator::Space;
use crate::core::vram::Use;
use crate::cuda::graph;
use crate::cuda::stream::stream;
use crate::table::call_table::answers;

/// The step in which a pool grows.
const CHUNK: usize = 32 << 20;

/// The default pool of one device.
#[derive(Debug)]
pub(crate) struct Pool {
    chunks: BTreeMap<usize, (usize, Space)>,
    blocks: BTreeMap<usize, usize>,
    reserved: u64,
    used: u64,
    reserved_high: u64,
    used_high: u64,
    threshold: u64,
    /// Reuse policies 1 to 3, all on from the start.
    reuse: [u32; 3],
    handle: usize,
}

impl Pool {
    pub(crate) fn new(device: usize) -> Self {
        Self {
            chunks: BTreeMap::new(),
            blocks: BTreeMap::new(),
            reserved: 0,
            used: 0,
            reserved_high: 0,
            used_high: 0,
            threshold: 0,
            reuse: [1; 3],
            handle: 0x7000 + device * 16,
        }
    }

    fn allocate(&mut self, device: &Device, size: usize) -> Option<usize> {
        let size = size.checked_add(511)? & !511;
        let found = self.chunks.values_mut().find_map(|(_, space)| space.take(size, 512));
        let address = match found {
            Some(address) => address,
            None => self.grow(device, size)?,
        };
        self.blocks.insert(address, size);
        self.used += size as u64;
        self.used_high = self.used_high.max(self.used);
        Some(address)
    }

    fn grow(&mut self, device: &Device, size: usize) -> Option<usize> {
        let whole = size.div_ceil(CHUNK) * CHUNK;
        let take = || device.vram().allocate(whole, Use::Plain);
        let start = take().or_else(|| {
            self.trim(device, 0);
            take()
        })?;
        let mut space = Space::new(start, start + whole);
        let address = space.take(size, 512);
        self.chunks.insert(start, (whole, space));
        self.reserved += whole as u64;
        self.reserved_high = self.reserved_high.max(self.reserved);
        address
    }

    /// Gives wholly free chunks back until no more than `keep` bytes are held.
    fn trim(&mut self, device: &Device, keep: u64) {
        let free: Vec<_> = self
            .chunks
            .iter()
            .filter(|(_, (_, space))| space.is_empty())
            .map(|(&start, &(size, _))| (start, size))
            .collect();
        for (start, size) in free {
            if self.reserved <= keep {
                break;
            }
            self.chunks.remove(&start);
            self.reserved -= size as u64;
            device.vram().free(start);
        }
    }

    fn free(&mut self, address: usize) -> Option<usize> {
        let size = self.blocks.remove(&address)?;
        self.used -= size as u64;
        if let Some((_, (_, space))) = self.chunks.range_mut(..=address).next_back() {
            space.give(address, size);
        }
        Some(size)
    }
}

/// Whether an address is a block of the device's pool.
pub(crate) fn owns(device: &Device, address: usize) -> bool {
    device.pool().blocks.contains_key(&address)
}

/// Gives a block back to the device's pool.
pub(crate) fn free(device: &Device, address: usize) -> Status {
    let freed = device.pool().free(address);
    match freed {
        Some(size) => {
            device.values().forget(address, size);
            OK
        }
        None => fail(INVALID_VALUE),
    }
}

/// At a synchronization the pool shrinks to its threshold.
pub(crate) fn synchronized(device: &Device) {
    let mut pool = device.pool();
    let threshold = pool.threshold;
    if pool.reserved > threshold {
        pool.trim(device, threshold);
    }
}

fn allocate(out: Out<usize>, size: usize, device: &Device) -> Status {
    if out.address() == 0 {
        return fail(INVALID_VALUE);
    }
    if size == 0 {
        return out.give(0);
    }
    let taken = device.pool().allocate(device, size);
    match taken {
        Some(address) => out.give(address),
        None => fail(OUT_OF_MEMORY),
    }
}

/// On a stream: while it is captured, the allocation becomes a node of the graph.
fn allocate_on(out: Out<usize>, size: usize, device: &'static Device, on: usize) -> Status {
    match stream(on).capturing() {
        Some(capture) if size > 0 && out.address() != 0 => {
            graph::capture_allocation(capture, device, out, size)
        }
        _ => allocate(out, size, device),
    }
}

fn free_async(address: usize, on: usize) -> Status {
    match stream(on).capturing() {
        Some(capture) if address != 0 => graph::capture_free(capture, address),
        // Also what `cudaMalloc` gave may be freed this way.
        _ => crate::cuda::memory::free(address),
    }
}

/// The device whose pool has that handle.
fn of_handle(handle: usize) -> &'static Device {
    let index = handle.wrapping_sub(0x7000) / 16;
    device(index as i32).unwrap_or_else(current)
}

fn get(handle: usize, attribute: i32, out: Out<u64>) -> Status {
    let pool = of_handle(handle).pool();
    match attribute {
        1..=3 => out.cast().give(pool.reuse[attribute as usize - 1]),
        4 => out.give(pool.threshold),
        5 => out.give(pool.reserved),
        6 => out.give(pool.reserved_high),
        7 => out.give(pool.used),
        8 => out.give(pool.used_high),
        _ => INVALID_VALUE,
    }
}

fn set(handle: usize, attribute: i32, value: Out<u64>) -> Status {
    let mut pool = of_handle(handle).pool();
    match attribute {
        1..=3 => {
            let Some(on) = value.cast::<u32>().get() else { return INVALID_VALUE };
            pool.reuse[attribute as usize - 1] = on;
        }
        4 => {
            let Some(threshold) = value.get() else { return INVALID_VALUE };
            pool.threshold = threshold;
        }
        // The only value that may be written is zero, which restarts a high-water mark.
        6 => pool.reserved_high = pool.reserved,
        8 => pool.used_high = pool.used,
        _ => return INVALID_VALUE,
    }
    OK
}

fn default_of(out: Out<usize>, index: i32) -> Status {
    match device(index) {
        Some(device) => out.give(device.pool().handle),
        None => fail(crate::core::ffi::INVALID_DEVICE),
    }
}

fn trim_to(handle: usize, keep: usize) -> Status {
    let device = of_handle(handle);
    device.pool().trim(device, keep as u64);
    OK
}

answers! {
    Guess fn cudaMallocAsync(out: Out<usize>, size: usize, on: Word) { allocate_on(out, size, current(), on) }
    Guess fn cudaMallocFromPoolAsync(out: Out<usize>, size: usize, pool: Word, on: Word) {
        allocate_on(out, size, of_handle(pool), on)
    }
    Guess fn cudaFreeAsync(address: Word, on: Word) { free_async(address, on) }
    Guess fn cuMemAllocAsync(out: Out<usize>, size: usize, on: Word) { allocate_on(out, size, current(), on) }
    Guess fn cuMemAllocFromPoolAsync(out: Out<usize>, size: usize, pool: Word, on: Word) {
        allocate_on(out, size, of_handle(pool), on)
    }
    Guess fn cuMemFreeAsync(address: Word, on: Word) { free_async(address, on) }
    Real fn cudaDeviceGetDefaultMemPool(out: Out<usize>, index: i32) { default_of(out, index) }
    Real fn cudaDeviceGetMemPool(out: Out<usize>, index: i32) { default_of(out, index) }
    Success fn cudaDeviceSetMemPool(_index: i32, _pool: Word) { OK }
    Real fn cuDeviceGetDefaultMemPool(out: Out<usize>, index: i32) { default_of(out, index) }
    Real fn cuDeviceGetMemPool(out: Out<usize>, index: i32) { default_of(out, index) }
    Success fn cuDeviceSetMemPool(_index: i32, _pool: Word) { OK }
    /// A pool of one's own: what it gives is counted with the default one's.
    Guess fn cudaMemPoolCreate(out: Out<usize>, _properties: Word) { out.give(opaque_handle()) }
    Guess fn cuMemPoolCreate(out: Out<usize>, _properties: Word) { out.give(opaque_handle()) }
    Success fn cudaMemPoolDestroy(_pool: Word) { OK }
    Success fn cuMemPoolDestroy(_pool: Word) { OK }
    Real fn cudaMemPoolGetAttribute(pool: Word, attribute: i32, out: Out<u64>) { get(pool, attribute, out) }
    Real fn cuMemPoolGetAttribute(pool: Word, attribute: i32, out: Out<u64>) { get(pool, attribute, out) }
    Real fn cudaMemPoolSetAttribute(pool: Word, attribute: i32, value: Out<u64>) { set(pool, attribute, value) }
    Real fn cuMemPoolSetAttribute(pool: Word, attribute: i32, value: Out<u64>) { set(pool, attribute, value) }
    Real fn cudaMemPoolTrimTo(pool: Word, keep: usize) { trim_to(pool, keep) }
    Real fn cuMemPoolTrimTo(pool: Word, keep: usize) { trim_to(pool, keep) }
    Success fn cudaMemPoolSetAccess(_pool: Word, _list: Word, _count: usize) { OK }
    Success fn cuMemPoolSetAccess(_pool: Word, _list: Word, _count: usize) { OK }
}
