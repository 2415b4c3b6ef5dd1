//! The driver's virtual memory calls, on which `expandable_segments:True` stands: physical memory
//! is charged when it is created, addresses are reserved apart from it, and mapping joins the two.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Mutex;

use crate::core::ffi::{INVALID_VALUE, NOT_SUPPORTED, OK, OUT_OF_MEMORY, Out, Status, Word};
use crate::core::host_state::{current_index, device, lock};
use crate::core::range_allocator::Space;
use crate::core::vram::{self, PAGE, RESERVED};
use crate::table::call_table::answers;

/// Physical memory.
struct Physical {
    size: u64,
    device: usize,
    /// Its handle, and each place where it is mapped.
    references: u32,
}

struct Mapping {
    size: usize,
    handle: u64,
    accessible: bool,
}

struct Tables {
    space: Space,
    reservations: BTreeMap<usize, usize>,
    physical: BTreeMap<u64, Physical>,
    mappings: BTreeMap<usize, Mapping>,
    next: u64,
}

static TABLES: Mutex<Tables> = Mutex::new(Tables {
    space: Space::new(RESERVED.start, RESERVED.end),
    reservations: BTreeMap::new(),
    physical: BTreeMap::new(),
    mappings: BTreeMap::new(),
    // Not a small number: a handle must not be taken for an index or for null.
    next: 0x5000_0000,
});

impl Tables {
    fn mapping(&self, address: usize) -> Option<(usize, &Mapping)> {
        let (&start, mapping) = self.mappings.range(..=address).next_back()?;
        (address < start + mapping.size).then_some((start, mapping))
    }

    fn drop_reference(&mut self, handle: u64) -> Status {
        let Some(physical) = self.physical.get_mut(&handle) else { return INVALID_VALUE };
        physical.references -= 1;
        if physical.references == 0 {
            let (size, index) = (physical.size, physical.device);
            self.physical.remove(&handle);
            if let Some(device) = device(index as c_int) {
                device.vram().discharge(size);
            }
        }
        OK
    }
}

/// The device behind a mapped range.
pub(crate) fn device_of(address: usize, size: usize) -> Option<usize> {
    let tables = lock(&TABLES);
    let (mut at, mut found) = (address, None);
    while at < address + size {
        let (start, mapping) = tables.mapping(at).filter(|(_, mapping)| mapping.accessible)?;
        found = tables.physical.get(&mapping.handle).map(|physical| physical.device);
        at = start + mapping.size;
    }
    found
}

/// The mapping that an address lies in: where it begins, its length, its device.
pub(crate) fn find(address: usize) -> Option<(usize, usize, usize)> {
    let tables = lock(&TABLES);
    let (start, mapping) = tables.mapping(address)?;
    let device = tables.physical.get(&mapping.handle)?.device;
    Some((start, mapping.size, device))
}

/// `CUmemAllocationProp`, as far as needed.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Properties {
    kind: c_int,
    handles: c_int,
    location: Location,
}

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const ON_DEVICE: c_int = 1;

fn reserve(out: Out<usize>, size: usize, align: usize, wanted: usize) -> Status {
    if size == 0 || !size.is_multiple_of(PAGE) {
        return INVALID_VALUE;
    }
    let mut tables = lock(&TABLES);
    let align = align.max(PAGE).next_power_of_two();
    let hinted = wanted.is_multiple_of(PAGE) && tables.space.take_at(wanted, size);
    let taken = if hinted { Some(wanted) } else { tables.space.take(size, align) };
    let Some(address) = taken else { return OUT_OF_MEMORY };
    tables.reservations.insert(address, size);
    out.give(address)
}

fn release_addresses(address: usize, size: usize) -> Status {
    let mut tables = lock(&TABLES);
    if tables.reservations.get(&address) != Some(&size) {
        return INVALID_VALUE;
    }
    tables.reservations.remove(&address);
    tables.space.give(address, size);
    OK
}

fn create(out: Out<u64>, size: usize, properties: Out<Properties>) -> Status {
    let Some(properties) = properties.get() else { return INVALID_VALUE };
    if size == 0 || !size.is_multiple_of(PAGE) {
        return INVALID_VALUE;
    }
    // Host memory made this way is not charged to a device.
    let on_device = properties.location.kind == ON_DEVICE;
    let index = if on_device { properties.location.id } else { current_index() };
    let Some(device) = device(index) else { return crate::core::ffi::INVALID_DEVICE };
    let charged = if on_device { size as u64 } else { 0 };
    if !device.vram().charge(charged) {
        return OUT_OF_MEMORY;
    }
    let mut tables = lock(&TABLES);
    let handle = tables.next;
    tables.next += 16;
    tables.physical.insert(handle, Physical { size: charged, device: device.index, references: 1 });
    out.give(handle)
}

fn map(address: usize, size: usize, handle: u64) -> Status {
    let mut tables = lock(&TABLES);
    let reserved = tables.reservations.range(..=address).next_back();
    if reserved.is_none_or(|(&start, &len)| address + size > start + len) || tables.mapping(address).is_some()
    {
        return INVALID_VALUE;
    }
    let Some(physical) = tables.physical.get_mut(&handle) else { return INVALID_VALUE };
    physical.references += 1;
    tables.mappings.insert(address, Mapping { size, handle, accessible: false });
    OK
}

fn allow(address: usize, size: usize) -> Status {
    let mut tables = lock(&TABLES);
    let starts: Vec<_> = tables.mappings.range(address..address + size).map(|(&start, _)| start).collect();
    for start in starts {
        let Some(mapping) = tables.mappings.get_mut(&start) else { continue };
        if !mapping.accessible {
            if !vram::map(start, mapping.size) {
                return OUT_OF_MEMORY;
            }
            mapping.accessible = true;
        }
    }
    OK
}

fn unmap(address: usize, size: usize) -> Status {
    let mut tables = lock(&TABLES);
    let starts: Vec<_> = tables.mappings.range(address..address + size).map(|(&start, _)| start).collect();
    if starts.is_empty() {
        return INVALID_VALUE;
    }
    for start in starts {
        let Some(mapping) = tables.mappings.remove(&start) else { continue };
        if mapping.accessible {
            vram::unmap(start, mapping.size);
        }
        tables.drop_reference(mapping.handle);
    }
    OK
}

fn retain(out: Out<u64>, address: usize) -> Status {
    let mut tables = lock(&TABLES);
    let Some(handle) = tables.mapping(address).map(|(_, mapping)| mapping.handle) else {
        return INVALID_VALUE;
    };
    if let Some(physical) = tables.physical.get_mut(&handle) {
        physical.references += 1;
    }
    out.give(handle)
}

fn properties_of(out: Out<Properties>, handle: u64) -> Status {
    let tables = lock(&TABLES);
    let Some(physical) = tables.physical.get(&handle) else { return INVALID_VALUE };
    out.give(Properties {
        kind: 1,
        handles: 0,
        location: Location { kind: ON_DEVICE, id: physical.device as c_int },
    })
}

answers! {
    Real fn cuMemGetAllocationGranularity(out: Out<usize>, _properties: Word, _option: c_int) { out.give(PAGE) }
    Real fn cuMemAddressReserve(out: Out<usize>, size: usize, align: usize, wanted: Word, _flags: u64) {
        reserve(out, size, align, wanted)
    }
    Real fn cuMemAddressFree(address: Word, size: usize) { release_addresses(address, size) }
    Real fn cuMemCreate(out: Out<u64>, size: usize, properties: Out<Properties>, _flags: u64) { create(out, size, properties) }
    Real fn cuMemRelease(handle: u64) { lock(&TABLES).drop_reference(handle) }
    Real fn cuMemMap(address: Word, size: usize, _offset: usize, handle: u64, _flags: u64) { map(address, size, handle) }
    Real fn cuMemSetAccess(address: Word, size: usize, _list: Word, _count: usize) { allow(address, size) }
    Real fn cuMemUnmap(address: Word, size: usize) { unmap(address, size) }
    Real fn cuMemRetainAllocationHandle(out: Out<u64>, address: Word) { retain(out, address) }
    Real fn cuMemGetAllocationPropertiesFromHandle(out: Out<Properties>, handle: u64) { properties_of(out, handle) }
    Real fn cuMemGetAccess(out: Out<u64>, _location: Word, _address: Word) { out.give(3) }
    Unsupported fn cuMemExportToShareableHandle(_out: Word, _handle: u64, _kind: c_int, _flags: u64) { NOT_SUPPORTED }
    Unsupported fn cuMemImportFromShareableHandle(_out: Word, _from: Word, _kind: c_int) { NOT_SUPPORTED }
}
