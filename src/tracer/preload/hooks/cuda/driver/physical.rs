//! Hooks of the calls that create physical memory and map it to address ranges. Expandable segments use them.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

use memtrace_trace::{Api, Event};

use super::call::{Word, call, record_alloc, record_free, simple_free};
use crate::ffi::cuda_types::{AllocationProperties, LocationType, NOT_INITIALIZED};
use crate::hooks::cuda::alloc_call::{Allocated, CallKind, Out, written};
use crate::hooks::cuda::driver_fn::{DriverFn, driver_hooks};

driver_hooks! {
    cuMemCreate as b"cuMemCreate" from 10020 (handle: Out, size: usize, properties: *const AllocationProperties, flags: c_ulonglong) caller "r8" => create, CREATE;
    cuMemRelease as b"cuMemRelease" from 10020 (handle: Word) caller "rsi" => release, RELEASE;
    cuMemRetainAllocationHandle as b"cuMemRetainAllocationHandle" from 11000 (handle: Out, ptr: Word) caller "rdx" => retain, RETAIN;
    cuMemImportFromShareableHandle as b"cuMemImportFromShareableHandle" from 10020 (handle: Out, shared: Word, kind: c_uint) caller "rcx" => import, IMPORT;
    cuMemMap as b"cuMemMap" from 10020 (ptr: Word, size: usize, offset: usize, handle: Word, flags: c_ulonglong) caller "r9" => map, MAP;
    cuMemUnmap as b"cuMemUnmap" from 10020 (ptr: Word, size: usize) caller "rdx" => unmap, UNMAP;
}

simple_free! {
    release = RELEASE, DeviceFree, CuMemRelease() 0;
    unmap = UNMAP, DeviceFree, CuMemUnmap(size: usize) size;
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

/// The hook of `cuMemCreate`, which creates physical memory. The memory counts as in use from here on,
/// although it has no address yet.
unsafe extern "C" fn create<const WAY: usize>(
    handle: Out,
    size: usize,
    properties: *const AllocationProperties,
    flags: c_ulonglong,
    caller: *const c_void,
) -> c_int {
    let Some(real) = CREATE.get(WAY) else { return NOT_INITIALIZED };
    // SAFETY: this is the caller's own pointer.
    let device = unsafe { device_of(properties) };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuMemCreate, caller),
        size,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(handle, size, properties, flags) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated { device, ..Allocated::new(unsafe { written(handle) }, size) },
    )
}

/// The hook of `cuMemRetainAllocationHandle`, which adds a reference to physical memory.
unsafe extern "C" fn retain<const WAY: usize>(handle: Out, ptr: Word, caller: *const c_void) -> c_int {
    let Some(real) = RETAIN.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuMemRetainAllocationHandle, caller),
        0,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(handle, ptr) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(handle) }, 0),
    )
}

/// The hook of `cuMemImportFromShareableHandle`, which imports physical memory of another process. The memory
/// counts as 0 bytes here, because the process that created it counts it.
unsafe extern "C" fn import<const WAY: usize>(
    handle: Out,
    shared: Word,
    kind: c_uint,
    caller: *const c_void,
) -> c_int {
    let Some(real) = IMPORT.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuMemImportFromShareableHandle, caller),
        0,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(handle, shared, kind) },
        // SAFETY: this runs only after the call succeeded.
        || Allocated::new(unsafe { written(handle) }, 0),
    )
}

/// The hook of `cuMemMap`, which maps physical memory to an address.
unsafe extern "C" fn map<const WAY: usize>(
    ptr: Word,
    size: usize,
    offset: usize,
    handle: Word,
    flags: c_ulonglong,
    caller: *const c_void,
) -> c_int {
    let Some(real) = MAP.get(WAY) else { return NOT_INITIALIZED };
    record_alloc(
        call(CallKind::DeviceAlloc, Api::CuMemMap, caller),
        size,
        // SAFETY: the caller's arguments are passed on unchanged.
        || unsafe { real(ptr, size, offset, handle, flags) },
        || Allocated { handle: handle as u64, ..Allocated::new(Some(ptr), size) },
    )
}
