//! CUDA's types and status codes, from the `sys` modules of `cudarc`.
//!
//! Only types are used. No function of `cudarc` is called, because a hook must call the real function that it
//! found, and `cudarc` would load libraries by its own list of names.
//!
//! A status code is passed as an integer, because a Rust enum with a value that it does not list is undefined
//! behavior, and every CUDA version adds values. For the same reason, a CUDA struct that contains an enum is
//! never read as a whole or through a reference. Its fields are read one by one through a raw pointer, and an
//! enum is read as an integer.
//!
//! `cudarc` has the headers of one CUDA version per build. The assertions below check the layouts, which are
//! the same in every version from 12.0 to 13.x. (In 13.2, the `id` of a location became a union of the same
//! size.)

use std::ffi::c_int;
use std::mem::offset_of;

pub(crate) use cudarc::driver::sys::{
    CUDA_ARRAY_DESCRIPTOR_v2 as ArrayDescriptor, CUDA_ARRAY3D_DESCRIPTOR_v2 as Array3DDescriptor,
    CUDA_MEM_ALLOC_NODE_PARAMS_v1 as AllocNodeParams, CUarray_format as ArrayFormat,
    CUdevice_attribute as DeviceAttribute, CUgraphMem_attribute as GraphAttribute,
    CUipcMemHandle as DriverIpcHandle, CUmemAllocationProp as AllocationProperties,
    CUmemLocationType as LocationType, CUmemPool_attribute as PoolAttribute,
    CUstreamCaptureMode as CaptureMode,
};
use cudarc::driver::sys::{CUmemLocation, CUresult};
pub(crate) use cudarc::runtime::sys::{
    cudaChannelFormatDesc as ChannelFormat, cudaExtent as Extent, cudaIpcMemHandle_t as RuntimeIpcHandle,
    cudaPitchedPtr as PitchedPointer,
};
use cudarc::runtime::sys::{cudaError, cudaMemAllocNodeParams};

/// `CUDA_SUCCESS` and `cudaSuccess`.
pub(crate) const SUCCESS: c_int = CUresult::CUDA_SUCCESS as c_int;
/// `cudaErrorInitializationError` and `CUDA_ERROR_NOT_INITIALIZED`: returned by a hook that finds no real
/// function.
pub(crate) const NOT_INITIALIZED: c_int = cudaError::cudaErrorInitializationError as c_int;

const _: () = {
    assert!(SUCCESS == cudaError::cudaSuccess as c_int);
    assert!(NOT_INITIALIZED == CUresult::CUDA_ERROR_NOT_INITIALIZED as c_int);
    assert!(size_of::<Extent>() == 24 && align_of::<Extent>() == 8);
    assert!(size_of::<PitchedPointer>() == 32 && align_of::<PitchedPointer>() == 8);
    assert!(size_of::<ChannelFormat>() == 20 && align_of::<ChannelFormat>() == 4);
    assert!(size_of::<RuntimeIpcHandle>() == 64 && align_of::<RuntimeIpcHandle>() == 1);
    assert!(size_of::<DriverIpcHandle>() == 64 && align_of::<DriverIpcHandle>() == 1);
    assert!(size_of::<ArrayDescriptor>() == 24 && align_of::<ArrayDescriptor>() == 8);
    assert!(size_of::<Array3DDescriptor>() == 40 && align_of::<Array3DDescriptor>() == 8);
    assert!(size_of::<CUmemLocation>() == 8 && align_of::<CUmemLocation>() == 4);
    assert!(size_of::<AllocationProperties>() == 32 && offset_of!(AllocationProperties, location) == 8);
    // The same code reads the driver's and the runtime's parameters of an allocation node.
    assert!(size_of::<AllocNodeParams>() == 120 && size_of::<cudaMemAllocNodeParams>() == 120);
    assert!(offset_of!(AllocNodeParams, poolProps.location) == 8);
    assert!(offset_of!(cudaMemAllocNodeParams, poolProps.location) == 8);
    assert!(offset_of!(AllocNodeParams, bytesize) == 104 && offset_of!(AllocNodeParams, dptr) == 112);
    assert!(offset_of!(cudaMemAllocNodeParams, bytesize) == 104);
    assert!(offset_of!(cudaMemAllocNodeParams, dptr) == 112);
};
