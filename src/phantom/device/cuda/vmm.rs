//! The driver's virtual memory calls, which `expandable_segments:True` uses.
//!
//! Physical memory is charged when it is created. Address ranges are reserved separately, and a mapping
//! connects the two.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::mem::zeroed;
use std::ops::Range;
use std::sync::Mutex;

use cudarc::driver::sys::{CUmemAccess_flags, CUmemAllocationProp, CUmemAllocationType, CUmemLocationType};

use crate::core::call_table::answers;
use crate::core::ffi::{
    INVALID_DEVICE, INVALID_VALUE, In, NOT_SUPPORTED, OK, OUT_OF_MEMORY, Out, Status, Word,
};
use crate::core::host_state::{current_index, device, host_state};
use crate::core::lock::lock;
use crate::core::on_behalf::is_on_behalf;
use crate::core::past_oom::{self, Caller};
use crate::core::range_allocator::RangeAllocator;
use crate::core::vram::{self, PAGE, RESERVED};

/// Physical memory, which `cuMemCreate` allocates and which has no address until it is mapped.
struct PhysicalMemory {
    size: usize,
    /// The bytes charged to the device: none for host memory.
    charged: u64,
    device: usize,
    /// The number of calls that gave the program the handle and that it has not released.
    handles: u32,
    mappings: u32,
}

/// A mapped range, which begins at its key in [`VmmTables::mappings`].
struct Mapping {
    size: usize,
    handle: u64,
    accessible: bool,
}

struct VmmTables {
    free: RangeAllocator,
    /// The length of each reserved range, by its start.
    reservations: BTreeMap<usize, usize>,
    /// The physical memory, by handle.
    physical: BTreeMap<u64, PhysicalMemory>,
    mappings: BTreeMap<usize, Mapping>,
    next_handle: u64,
}

static TABLES: Mutex<VmmTables> = Mutex::new(VmmTables {
    free: RangeAllocator::new(RESERVED.start, RESERVED.end),
    reservations: BTreeMap::new(),
    physical: BTreeMap::new(),
    mappings: BTreeMap::new(),
    // The first handle is a large number, because a handle must not look like an index or like null.
    next_handle: 0x5000_0000,
});

impl VmmTables {
    /// Returns the start of the mapping that contains an address, and the mapping.
    fn mapping(&self, address: usize) -> Option<(usize, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.size).then_some((start, mapping))
    }

    /// Returns true if a part of the range is mapped.
    fn has_mapping(&self, range: Range<usize>) -> bool {
        let last = self.mappings.range(..range.end).next_back();
        last.is_some_and(|(&start, mapping)| start + mapping.size > range.start)
    }

    /// Returns the starts of the mappings that make up exactly this range, or `None` if a part of the range is not
    /// mapped or belongs to a mapping that crosses a bound.
    fn mappings_of(&self, address: usize, size: usize) -> Option<Vec<usize>> {
        let end = address.checked_add(size).filter(|_| size > 0)?;
        let (mut at, mut starts) = (address, Vec::new());
        while at < end {
            starts.push(at);
            at += self.mappings.get(&at)?.size;
        }
        (at == end).then_some(starts)
    }

    /// Frees physical memory that has neither a handle nor a mapping.
    fn free_if_unused(&mut self, handle: u64) {
        let is_unused = |physical: &&PhysicalMemory| physical.handles == 0 && physical.mappings == 0;
        let Some(&PhysicalMemory { charged, device: index, .. }) =
            self.physical.get(&handle).filter(is_unused)
        else {
            return;
        };
        self.physical.remove(&handle);
        if let Some(device) = device(index as c_int) {
            device.vram().discharge(charged);
        }
    }
}

/// Returns the device of an accessible range, or `None` if a part of the range is not accessible.
pub(crate) fn device_of(address: usize, size: usize) -> Option<usize> {
    let end = address.checked_add(size)?;
    let tables = lock(&TABLES);
    let (mut at, mut found) = (address, None);
    while at < end {
        let (start, mapping) = tables.mapping(at).filter(|(_, mapping)| mapping.accessible)?;
        found = tables.physical.get(&mapping.handle).map(|physical| physical.device);
        at = start + mapping.size;
    }
    found
}

/// Returns the start, the length and the device of the mapping that contains an address.
pub(crate) fn find(address: usize) -> Option<(usize, usize, usize)> {
    let tables = lock(&TABLES);
    let (start, mapping) = tables.mapping(address)?;
    let device = tables.physical.get(&mapping.handle)?.device;
    Some((start, mapping.size, device))
}

/// Returns the start and the end of the reserved range that contains an address.
pub(crate) fn reservation(address: usize) -> Option<(usize, usize)> {
    let tables = lock(&TABLES);
    let (&start, &size) = tables.reservations.range(..=address).next_back()?;
    (address < start + size).then_some((start, start + size))
}

fn reserve(out: Out<usize>, size: usize, align: usize, hint: usize) -> Status {
    if out.is_null() || size == 0 || !size.is_multiple_of(PAGE) {
        return INVALID_VALUE;
    }
    let Some(align) = align.max(PAGE).checked_next_power_of_two() else { return INVALID_VALUE };
    let mut tables = lock(&TABLES);
    let at_hint = hint.is_multiple_of(PAGE) && tables.free.alloc_at(hint, size);
    let address = if at_hint { Some(hint) } else { tables.free.alloc(size, align) };
    let Some(address) = address else { return OUT_OF_MEMORY };
    tables.reservations.insert(address, size);
    out.give(address)
}

fn free_reservation(address: usize, size: usize) -> Status {
    let mut tables = lock(&TABLES);
    if tables.reservations.get(&address) != Some(&size) || tables.has_mapping(address..address + size) {
        return INVALID_VALUE;
    }
    tables.reservations.remove(&address);
    tables.free.free(address, size);
    OK
}

/// The struct has the same layout in CUDA 12 and 13.
const _: () = assert!(size_of::<CUmemAllocationProp>() == 32 && align_of::<CUmemAllocationProp>() == 8);

/// Returns the type and the id of the location that allocation properties request.
fn location(properties: In<CUmemAllocationProp>) -> Option<(c_int, c_int)> {
    let properties = properties.as_ptr();
    if properties.is_null() {
        return None;
    }
    // SAFETY: not null, so by the invariant of `In` good for reads of its fields. The type is read as an
    // integer, because it may be a code that the enum does not list.
    unsafe {
        let location = &raw const (*properties).location;
        let kind = (&raw const (*location).type_).cast::<c_int>().read_unaligned();
        Some((kind, (&raw const (*location).id).read_unaligned()))
    }
}

fn create(out: Out<u64>, size: usize, properties: In<CUmemAllocationProp>) -> Status {
    let Some((kind, id)) = location(properties) else { return INVALID_VALUE };
    if out.is_null() || size == 0 || !size.is_multiple_of(PAGE) {
        return INVALID_VALUE;
    }
    // Host memory is not charged to a device.
    let on_device = kind == CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_int;
    let index = if on_device { id } else { current_index() };
    let Some(device) = device(index) else { return INVALID_DEVICE };
    let charged = if on_device { size as u64 } else { 0 };
    let caller = if is_on_behalf() { Caller::GivesUp } else { Caller::AsksAgainByPage };
    if !device.vram().charge(charged, caller) {
        return OUT_OF_MEMORY;
    }
    let mut tables = lock(&TABLES);
    let handle = tables.next_handle;
    tables.next_handle += 16;
    let physical = PhysicalMemory { size, charged, device: device.index, handles: 1, mappings: 0 };
    tables.physical.insert(handle, physical);
    out.give(handle)
}

fn release(handle: u64) -> Status {
    let mut tables = lock(&TABLES);
    let Some(physical) = tables.physical.get_mut(&handle).filter(|physical| physical.handles > 0) else {
        return INVALID_VALUE;
    };
    physical.handles -= 1;
    tables.free_if_unused(handle);
    OK
}

/// Maps physical memory from its start, because the offset "must be zero" (`cuMemMap`).
fn map(address: usize, size: usize, offset: usize, handle: u64) -> Status {
    let is_whole_pages = size > 0 && (address | size).is_multiple_of(PAGE);
    let Some(end) = address.checked_add(size).filter(|_| is_whole_pages && offset == 0) else {
        return INVALID_VALUE;
    };
    let mut tables = lock(&TABLES);
    let reserved = tables.reservations.range(..=address).next_back();
    if reserved.is_none_or(|(&start, &len)| end > start + len) || tables.has_mapping(address..end) {
        return INVALID_VALUE;
    }
    let Some(physical) = tables.physical.get_mut(&handle).filter(|physical| size <= physical.size) else {
        return INVALID_VALUE;
    };
    physical.mappings += 1;
    tables.mappings.insert(address, Mapping { size, handle, accessible: false });
    OK
}

/// Makes a range accessible, which "must be a fully mapped address range containing all allocations"
/// (`cuMemSetAccess`).
fn make_accessible(address: usize, size: usize) -> Status {
    past_oom::request_ends();
    let mut tables = lock(&TABLES);
    let Some(starts) = tables.mappings_of(address, size) else { return INVALID_VALUE };
    for start in starts {
        let Some(mapping) = tables.mappings.get_mut(&start).filter(|mapping| !mapping.accessible) else {
            continue;
        };
        if !vram::map(start, mapping.size) {
            return OUT_OF_MEMORY;
        }
        mapping.accessible = true;
    }
    OK
}

/// Unmaps whole mappings: `cuMemUnmap` "cannot unmap a sub-range" of one.
fn unmap(address: usize, size: usize) -> Status {
    let mut tables = lock(&TABLES);
    let Some(starts) = tables.mappings_of(address, size) else { return INVALID_VALUE };
    for start in starts {
        let Some(mapping) = tables.mappings.remove(&start) else { continue };
        if mapping.accessible {
            // SAFETY: `make_accessible` mapped the range, and its entry has been removed.
            unsafe { vram::unmap(start, mapping.size) };
            // A later mapping of this range reads as zero, so the known content is dropped.
            for device in &host_state().devices {
                device.values().free(start, mapping.size);
            }
        }
        if let Some(physical) = tables.physical.get_mut(&mapping.handle) {
            physical.mappings -= 1;
        }
        tables.free_if_unused(mapping.handle);
    }
    OK
}

fn retain_handle(out: Out<u64>, address: usize) -> Status {
    if out.is_null() {
        return INVALID_VALUE;
    }
    let mut tables = lock(&TABLES);
    let Some(handle) = tables.mapping(address).map(|(_, mapping)| mapping.handle) else {
        return INVALID_VALUE;
    };
    if let Some(physical) = tables.physical.get_mut(&handle) {
        physical.handles += 1;
    }
    out.give(handle)
}

/// Writes the type and the location of an allocation.
fn write_properties(out: Out<CUmemAllocationProp>, handle: u64) -> Status {
    let tables = lock(&TABLES);
    let Some(physical) = tables.physical.get(&handle) else { return INVALID_VALUE };
    // SAFETY: zero is a value of each field: no handle type, no location, null.
    let mut properties: CUmemAllocationProp = unsafe { zeroed() };
    properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    properties.location.id = physical.device as c_int;
    out.give(properties)
}

/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: u64 = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE as u64;

answers! {
    Real fn cuMemGetAllocationGranularity(out: Out<usize>, _properties: Word, _option: c_int) {
        out.give(PAGE)
    }
    Real fn cuMemAddressReserve(out: Out<usize>, size: usize, align: usize, hint: Word, _flags: u64) {
        reserve(out, size, align, hint)
    }
    Real fn cuMemAddressFree(address: Word, size: usize) { free_reservation(address, size) }
    Real fn cuMemCreate(out: Out<u64>, size: usize, properties: In<CUmemAllocationProp>, _flags: u64) {
        create(out, size, properties)
    }
    Real fn cuMemRelease(handle: u64) { release(handle) }
    Real fn cuMemMap(address: Word, size: usize, offset: usize, handle: u64, _flags: u64) {
        map(address, size, offset, handle)
    }
    Real fn cuMemSetAccess(address: Word, size: usize, list: Word, count: usize) {
        if list == 0 || count == 0 { INVALID_VALUE } else { make_accessible(address, size) }
    }
    Real fn cuMemUnmap(address: Word, size: usize) { unmap(address, size) }
    Real fn cuMemRetainAllocationHandle(out: Out<u64>, address: Word) { retain_handle(out, address) }
    Real fn cuMemGetAllocationPropertiesFromHandle(out: Out<CUmemAllocationProp>, handle: u64) {
        write_properties(out, handle)
    }
    Real fn cuMemGetAccess(out: Out<u64>, _location: Word, _address: Word) { out.give(READ_WRITE) }
    Unsupported fn cuMemExportToShareableHandle(_out: Word, _handle: u64, _kind: c_int, _flags: u64) {
        NOT_SUPPORTED
    }
    Unsupported fn cuMemImportFromShareableHandle(_out: Word, _from: Word, _kind: c_int) { NOT_SUPPORTED }
}
