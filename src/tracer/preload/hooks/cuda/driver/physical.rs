//! Hooks of the calls that create physical memory and map it to address ranges. Expandable segments use them.

use std::ffi::{c_uint, c_ulonglong};

use memtrace_trace::Event;

use crate::ffi::cuda_types::{AllocationProperties, LocationType};
use crate::hooks::cuda::alloc_call::{Allocated, Out, alloc_hooks, free_hooks};
use crate::hooks::cuda::driver_fn::{Word, driver_hooks};

driver_hooks! {
    cuMemCreate as b"cuMemCreate" from 10020 (handle: Out, size: usize, properties: *const AllocationProperties, flags: c_ulonglong) caller "r8" => create, CREATE;
    cuMemRelease as b"cuMemRelease" from 10020 (handle: Word) caller "rsi" => release, RELEASE;
    cuMemRetainAllocationHandle as b"cuMemRetainAllocationHandle" from 11000 (handle: Out, ptr: Word) caller "rdx" => retain, RETAIN;
    cuMemImportFromShareableHandle as b"cuMemImportFromShareableHandle" from 10020 (handle: Out, shared: Word, kind: c_uint) caller "rcx" => import, IMPORT;
    cuMemMap as b"cuMemMap" from 10020 (ptr: Word, size: usize, offset: usize, handle: Word, flags: c_ulonglong) caller "r9" => map, MAP;
    cuMemUnmap as b"cuMemUnmap" from 10020 (ptr: Word, size: usize) caller "rdx" => unmap, UNMAP;
}

alloc_hooks! { driver
    // Creates physical memory. The memory counts as in use from here on, although it has no address yet.
    create = CREATE, DeviceAlloc, CuMemCreate(handle: Out, size: usize, properties: *const AllocationProperties, flags: c_ulonglong) requests size => |bytes| Allocated { device: device_of(properties), ..Allocated::at(handle, bytes) };
    // Adds a reference to physical memory.
    retain = RETAIN, DeviceAlloc, CuMemRetainAllocationHandle(handle: Out, ptr: Word) requests 0 => |bytes| Allocated::at(handle, bytes);
    // Imports physical memory of another process. The memory counts as 0 bytes here, because the process that
    // created it counts it.
    import = IMPORT, DeviceAlloc, CuMemImportFromShareableHandle(handle: Out, shared: Word, kind: c_uint) requests 0 => |bytes| Allocated::at(handle, bytes);
    // Maps physical memory to an address.
    map = MAP, DeviceAlloc, CuMemMap(ptr: Word, size: usize, offset: usize, handle: Word, flags: c_ulonglong) requests size => |bytes| Allocated { handle: handle as u64, ..Allocated::new(Some(ptr), bytes) };
}

free_hooks! { driver
    release = RELEASE, DeviceFree, CuMemRelease(handle: Word) frees handle, 0;
    unmap = UNMAP, DeviceFree, CuMemUnmap(ptr: Word, size: usize) frees ptr, size;
}

/// Returns the device of the memory, [`Event::HOST`] for memory of the host, or `None` without properties.
///
/// # Safety
/// `properties` is null or the caller's own, valid by CUDA's contract.
unsafe fn device_of(properties: *const AllocationProperties) -> Option<i8> {
    if properties.is_null() {
        return None;
    }
    // SAFETY: by the contract; the type of the location is read as a number.
    let (location, id) = unsafe {
        let location = (&raw const (*properties).location.type_).cast::<c_uint>().read();
        (location, (*properties).location.id)
    };
    let is_device = location == LocationType::CU_MEM_LOCATION_TYPE_DEVICE as c_uint;
    Some(if is_device { i8::try_from(id).unwrap_or(0) } else { Event::HOST })
}
