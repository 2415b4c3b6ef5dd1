//! Devices: their number, their properties, and the current device of a thread.

use std::ffi::{c_char, c_int, c_uint};
use std::mem::zeroed;

use cudarc::runtime::sys::{cudaDeviceProp, cudaUUID_t};

use crate::core::call_table::{answers, by_contract};
use crate::core::driver_version::driver_version;
use crate::core::ffi::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, OK, Out, Status, Text, Word};
use crate::core::host_state::{current_index, device, fail, host_state, last_error, set_current};
use crate::cuda::device_attributes::{
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
    CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH,
    CU_DEVICE_ATTRIBUTE_ECC_ENABLED, CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, CU_DEVICE_ATTRIBUTE_GPU_OVERLAP,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, CU_DEVICE_ATTRIBUTE_INTEGRATED,
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, CU_DEVICE_ATTRIBUTE_MAX_PITCH,
    CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT, CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH, CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
    CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO,
    CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT,
    CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT,
    CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
    CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, CU_DEVICE_ATTRIBUTE_WARP_SIZE, HIGHEST_PRIORITY,
    attribute, bus_id, index_of_bus_id, limit_value, uuid,
};
use crate::cuda::driver::give_for_peers;
use crate::ops::record;

/// Returns the properties of a device in CUDA 12's layout. Fields that are not set are
/// 0, as their attributes are.
fn properties_12(index: usize) -> cudaDeviceProp {
    let spec = &host_state().spec;
    let get = |number| attribute(number, index);
    let length = spec.name.len().min(255);
    // SAFETY: a struct of integers, for which zero is a value.
    let mut properties: cudaDeviceProp = unsafe { zeroed() };
    for (to, &from) in properties.name.iter_mut().zip(&spec.name.as_bytes()[..length]) {
        *to = from as c_char;
    }
    cudaDeviceProp {
        uuid: cudaUUID_t { bytes: uuid(index).map(|byte| byte as c_char) },
        totalGlobalMem: spec.memory as usize,
        sharedMemPerBlock: get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK) as usize,
        regsPerBlock: get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK),
        warpSize: get(CU_DEVICE_ATTRIBUTE_WARP_SIZE),
        memPitch: get(CU_DEVICE_ATTRIBUTE_MAX_PITCH) as usize,
        maxThreadsPerBlock: get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK),
        maxThreadsDim: [
            get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X),
            get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y),
            get(CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z),
        ],
        maxGridSize: [
            get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
            get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
            get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z),
        ],
        clockRate: get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        totalConstMem: get(CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY) as usize,
        major: get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR),
        minor: get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR),
        textureAlignment: get(CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT) as usize,
        texturePitchAlignment: get(CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT) as usize,
        deviceOverlap: get(CU_DEVICE_ATTRIBUTE_GPU_OVERLAP),
        multiProcessorCount: get(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT),
        canMapHostMemory: get(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY),
        maxTexture1D: get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH),
        maxTexture1DMipmap: get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_MIPMAPPED_WIDTH),
        maxTexture1DLinear: get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LINEAR_WIDTH),
        maxTexture2D: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT),
        ],
        maxTexture2DMipmap: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_MIPMAPPED_HEIGHT),
        ],
        maxTexture2DLinear: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_HEIGHT),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LINEAR_PITCH),
        ],
        maxTexture2DGather: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_GATHER_HEIGHT),
        ],
        maxTexture3D: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH),
        ],
        maxTexture3DAlt: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH_ALTERNATE),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT_ALTERNATE),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH_ALTERNATE),
        ],
        maxTextureCubemap: get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_WIDTH),
        maxTexture1DLayered: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_LAYERED_LAYERS),
        ],
        maxTexture2DLayered: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS),
        ],
        maxTextureCubemapLayered: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURECUBEMAP_LAYERED_LAYERS),
        ],
        maxSurface1D: get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_WIDTH),
        maxSurface2D: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_HEIGHT),
        ],
        maxSurface3D: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_HEIGHT),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE3D_DEPTH),
        ],
        maxSurface1DLayered: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE1D_LAYERED_LAYERS),
        ],
        maxSurface2DLayered: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_HEIGHT),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACE2D_LAYERED_LAYERS),
        ],
        maxSurfaceCubemap: get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_WIDTH),
        maxSurfaceCubemapLayered: [
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_WIDTH),
            get(CU_DEVICE_ATTRIBUTE_MAXIMUM_SURFACECUBEMAP_LAYERED_LAYERS),
        ],
        surfaceAlignment: get(CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT) as usize,
        concurrentKernels: get(CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS),
        integrated: get(CU_DEVICE_ATTRIBUTE_INTEGRATED),
        ECCEnabled: get(CU_DEVICE_ATTRIBUTE_ECC_ENABLED),
        pciBusID: get(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID),
        asyncEngineCount: get(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT),
        unifiedAddressing: get(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING),
        memoryClockRate: get(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
        memoryBusWidth: get(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH),
        l2CacheSize: get(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
        maxThreadsPerMultiProcessor: get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
        streamPrioritiesSupported: get(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED),
        globalL1CacheSupported: get(CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED),
        localL1CacheSupported: get(CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED),
        sharedMemPerMultiprocessor: get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR) as usize,
        regsPerMultiprocessor: get(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR),
        managedMemory: get(CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY),
        singleToDoublePrecisionPerfRatio: get(CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO),
        concurrentManagedAccess: get(CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS),
        computePreemptionSupported: get(CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED),
        canUseHostPointerForRegisteredMem: get(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
        cooperativeLaunch: get(CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH),
        cooperativeMultiDeviceLaunch: get(CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH),
        sharedMemPerBlockOptin: get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN) as usize,
        maxBlocksPerMultiProcessor: get(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
        reservedSharedMemPerBlock: get(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK) as usize,
        hostRegisterSupported: get(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED),
        memoryPoolsSupported: get(CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED),
        memoryPoolSupportedHandleTypes: get(CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES) as c_uint,
        clusterLaunch: get(CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH),
        unifiedFunctionPointers: get(CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS),
        ..properties
    }
}

/// Declares the properties in CUDA 13's layout, which is CUDA 12's without the clocks and modes that CUDA 13
/// removed. A build of cudarc has the layout of one CUDA version.
macro_rules! properties_13 {
    ($($field:ident: $type:ty,)*) => {
        #[expect(non_snake_case, reason = "named as in the header")]
        #[repr(C)]
        #[derive(Clone, Copy)]
        struct DeviceProp13 {
            $($field: $type,)*
            /// Fields that are new in CUDA 13, and reserved fields. All are 0.
            tail: [c_int; 63],
        }

        impl From<cudaDeviceProp> for DeviceProp13 {
            fn from(properties: cudaDeviceProp) -> Self {
                Self { $($field: properties.$field,)* tail: [0; 63] }
            }
        }
    };
}

properties_13! {
    name: [c_char; 256],
    uuid: cudaUUID_t,
    luid: [c_char; 8],
    luidDeviceNodeMask: c_uint,
    totalGlobalMem: usize,
    sharedMemPerBlock: usize,
    regsPerBlock: c_int,
    warpSize: c_int,
    memPitch: usize,
    maxThreadsPerBlock: c_int,
    maxThreadsDim: [c_int; 3],
    maxGridSize: [c_int; 3],
    totalConstMem: usize,
    major: c_int,
    minor: c_int,
    textureAlignment: usize,
    texturePitchAlignment: usize,
    multiProcessorCount: c_int,
    integrated: c_int,
    canMapHostMemory: c_int,
    maxTexture1D: c_int,
    maxTexture1DMipmap: c_int,
    maxTexture2D: [c_int; 2],
    maxTexture2DMipmap: [c_int; 2],
    maxTexture2DLinear: [c_int; 3],
    maxTexture2DGather: [c_int; 2],
    maxTexture3D: [c_int; 3],
    maxTexture3DAlt: [c_int; 3],
    maxTextureCubemap: c_int,
    maxTexture1DLayered: [c_int; 2],
    maxTexture2DLayered: [c_int; 3],
    maxTextureCubemapLayered: [c_int; 2],
    maxSurface1D: c_int,
    maxSurface2D: [c_int; 2],
    maxSurface3D: [c_int; 3],
    maxSurface1DLayered: [c_int; 2],
    maxSurface2DLayered: [c_int; 3],
    maxSurfaceCubemap: c_int,
    maxSurfaceCubemapLayered: [c_int; 2],
    surfaceAlignment: usize,
    concurrentKernels: c_int,
    ECCEnabled: c_int,
    pciBusID: c_int,
    pciDeviceID: c_int,
    pciDomainID: c_int,
    tccDriver: c_int,
    asyncEngineCount: c_int,
    unifiedAddressing: c_int,
    memoryBusWidth: c_int,
    l2CacheSize: c_int,
    persistingL2CacheMaxSize: c_int,
    maxThreadsPerMultiProcessor: c_int,
    streamPrioritiesSupported: c_int,
    globalL1CacheSupported: c_int,
    localL1CacheSupported: c_int,
    sharedMemPerMultiprocessor: usize,
    regsPerMultiprocessor: c_int,
    managedMemory: c_int,
    isMultiGpuBoard: c_int,
    multiGpuBoardGroupID: c_int,
    hostNativeAtomicSupported: c_int,
    pageableMemoryAccess: c_int,
    concurrentManagedAccess: c_int,
    computePreemptionSupported: c_int,
    canUseHostPointerForRegisteredMem: c_int,
    cooperativeLaunch: c_int,
    sharedMemPerBlockOptin: usize,
    pageableMemoryAccessUsesHostPageTables: c_int,
    directManagedMemAccessFromHost: c_int,
    maxBlocksPerMultiProcessor: c_int,
    accessPolicyMaxWindowSize: c_int,
    reservedSharedMemPerBlock: usize,
    hostRegisterSupported: c_int,
    sparseCudaArraySupported: c_int,
    hostRegisterReadOnlySupported: c_int,
    timelineSemaphoreInteropSupported: c_int,
    memoryPoolsSupported: c_int,
    gpuDirectRDMASupported: c_int,
    gpuDirectRDMAFlushWritesOptions: c_uint,
    gpuDirectRDMAWritesOrdering: c_int,
    memoryPoolSupportedHandleTypes: c_uint,
    deferredMappingCudaArraySupported: c_int,
    ipcEventSupported: c_int,
    clusterLaunch: c_int,
    unifiedFunctionPointers: c_int,
}

// These are the sizes in the headers of CUDA 12 and 13. A struct with too many fields would be written past
// the caller's struct, so cudarc must be built for CUDA 12. CUDA 13's runtime has another function for its
// layout.
const _: () = assert!(size_of::<cudaDeviceProp>() == 1032 && align_of::<cudaDeviceProp>() == 8);
const _: () = assert!(size_of::<DeviceProp13>() == 1008 && align_of::<DeviceProp13>() == 8);

fn device_count(out: Out<c_int>) -> Status {
    let devices = host_state().devices.len() as c_int;
    out.put(devices);
    if devices == 0 { fail(NO_DEVICE) } else { OK }
}

/// Computes a value for the device with this index, or fails if no such device exists.
fn on_device<T>(index: c_int, value: impl FnOnce(usize) -> T) -> Result<T, Status> {
    match device(index) {
        Some(device) => Ok(value(device.index)),
        None => Err(fail(INVALID_DEVICE)),
    }
}

fn give<T: Copy>(out: Out<T>, index: c_int, value: impl FnOnce(usize) -> T) -> Status {
    match on_device(index, value) {
        Ok(value) => out.give(value),
        Err(status) => status,
    }
}

answers! {
    Real fn cudaGetDeviceCount(out: Out<c_int>) {
        // PyTorch calls this function first, so its libraries are loaded now and the observation of ops can
        // start.
        record::install();
        device_count(out)
    }
    Real fn cudaGetDevice(out: Out<c_int>) { out.give(current_index()) }
    Real fn cudaSetDevice(index: c_int) {
        if host_state().devices.is_empty() { fail(NO_DEVICE) } else { set_current(index) }
    }
    Real fn cudaInitDevice(index: c_int, _device_flags: u32, _flags: u32) {
        let Some(device) = device(index) else { return fail(INVALID_DEVICE) };
        device.share().enter();
        OK
    }
    Success fn cudaSetDeviceFlags(_flags: u32) { OK }
    Real fn cudaGetDeviceFlags(out: Out<u32>) { out.give(0) }
    Real fn cudaDriverGetVersion(out: Out<c_int>) { out.give(driver_version()) }
    Success fn {cudaCtxResetPersistingL2Cache, cudaProfilerStart, cudaProfilerStop}() { OK }
    Real fn cudaGetLastError() { last_error(true) }
    Real fn cudaPeekAtLastError() { last_error(false) }
    Real fn cudaDeviceGetAttribute(out: Out<c_int>, number: c_int, index: c_int) {
        give(out, index, |index| attribute(number, index))
    }
    /// Programs for CUDA 13 call this name and expect the layout of CUDA 13.
    Real fn cudaGetDeviceProperties(out: Out<DeviceProp13>, index: c_int) {
        give(out, index, |index| properties_12(index).into())
    }
    /// Programs for CUDA 12 call this name and expect the layout of CUDA 12.
    Real fn cudaGetDeviceProperties_v2(out: Out<cudaDeviceProp>, index: c_int) {
        give(out, index, properties_12)
    }
    Real fn cudaDeviceCanAccessPeer(out: Out<c_int>, from: c_int, to: c_int) {
        fail(give_for_peers(out, from, to, c_int::from(from != to)))
    }
    Success fn cudaDeviceEnablePeerAccess(_peer: c_int, _flags: u32) { OK }
    Success fn cudaDeviceDisablePeerAccess(_peer: c_int) { OK }
    Real fn cudaDeviceGetP2PAttribute(out: Out<c_int>, _attribute: c_int, from: c_int, to: c_int) {
        fail(give_for_peers(out, from, to, 1))
    }
    Real fn cudaDeviceGetStreamPriorityRange(lowest: Out<c_int>, highest: Out<c_int>) {
        lowest.put(0);
        highest.put(HIGHEST_PRIORITY);
        OK
    }
    Real fn cudaDeviceGetPCIBusId(out: Out<c_char>, capacity: c_int, index: c_int) {
        match on_device(index, bus_id) {
            Ok(text) => {
                by_contract!(out.text(&text, capacity.max(0) as usize));
                OK
            }
            Err(status) => status,
        }
    }
    Real fn cudaDeviceGetByPCIBusId(out: Out<c_int>, id: Text) {
        match index_of_bus_id(id.str()) {
            Some(index) => out.give(index as c_int),
            None => fail(INVALID_DEVICE),
        }
    }
    Guess fn cudaDeviceGetLimit(out: Out<usize>, limit: c_int) { out.give(limit_value(limit)) }
    Success fn cudaDeviceSetLimit(_limit: c_int, _value: usize) { OK }
    Real fn cudaDeviceGetCacheConfig(out: Out<c_int>) { out.give(0) }
    Success fn cudaDeviceSetCacheConfig(_mode: c_int) { OK }
    Real fn cudaChooseDevice(out: Out<c_int>, _properties: Word) {
        if host_state().devices.is_empty() { INVALID_VALUE } else { out.give(0) }
    }
}
