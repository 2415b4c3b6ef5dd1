//! The attributes and limits of the simulated card, and the identity of a device.

use std::ffi::c_int;

use cudarc::driver::sys::{CUdevice_attribute, CUlimit_enum};

use crate::core::ffi::{Out, Status, codes};
use crate::core::host_state::host_state;

/// Limits that depend on the compute capability alone (CUDA C++ Programming Guide, "Technical Specifications
/// per Compute Capability"). Shared memory is in bytes.
pub(crate) struct CapabilityLimits {
    pub(crate) shared_per_sm: usize,
    pub(crate) shared_per_block_optin: usize,
    pub(crate) threads_per_sm: u32,
    pub(crate) blocks_per_sm: u32,
}

/// The limits of the simulated card. A capability newer than the table has the limits of the newest one in
/// it.
pub(crate) fn capability_limits() -> CapabilityLimits {
    let (shared_kib, threads_per_sm, blocks_per_sm) = match host_state().spec.cc {
        (..=6, _) | (7, ..=4) => (96, 2048, 32),
        (7, _) => (64, 1024, 16),
        (8, 0) => (164, 2048, 32),
        (8, 9) => (100, 1536, 24),
        (8, _) => (100, 1536, 16),
        (9..=11, _) => (228, 2048, 32),
        _ => (100, 1536, 24),
    };
    CapabilityLimits {
        shared_per_sm: shared_kib << 10,
        shared_per_block_optin: (shared_kib << 10) - reserved_shared(),
        threads_per_sm,
        blocks_per_sm,
    }
}

/// The bytes of shared memory that the system reserves in each block, since Ampere.
fn reserved_shared() -> usize {
    if host_state().spec.cc.0 >= 8 { 1024 } else { 0 }
}

/// The UUID of a device. Its last byte is the index.
pub(crate) fn uuid(index: usize) -> [u8; 16] {
    let mut bytes = *b"PHANTOM-DEVICE-0";
    bytes[15] = index as u8;
    bytes
}

/// The UUID as NVML and `CUDA_VISIBLE_DEVICES` write it.
pub(crate) fn uuid_text(index: usize) -> String {
    let hex: String = uuid(index).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// The number of a device's PCI bus. Each device has its own.
fn bus(index: usize) -> c_int {
    0x10 + index as c_int
}

/// The PCI address of a device, as the CUDA runtime writes it.
pub(crate) fn bus_id(index: usize) -> String {
    format!("0000:{:02X}:00.0", bus(index))
}

/// The device with this PCI address, with or without its domain.
pub(crate) fn index_of_bus_id(text: &str) -> Option<usize> {
    (0..host_state().devices.len()).find(|&index| {
        let id = bus_id(index);
        text.eq_ignore_ascii_case(&id) || text.get(text.len().saturating_sub(7)..) == Some(&id[5..])
    })
}

codes!(pub(crate) CUdevice_attribute {
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY,
    CU_DEVICE_ATTRIBUTE_WARP_SIZE,
    CU_DEVICE_ATTRIBUTE_MAX_PITCH,
    CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
    CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT,
    CU_DEVICE_ATTRIBUTE_GPU_OVERLAP,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT,
    CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS,
    CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS,
    CU_DEVICE_ATTRIBUTE_ECC_ENABLED,
    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
    CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
    CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
    CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
    CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
    CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY,
    CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS,
    CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH,
    CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR,
    CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES,
    CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH,
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS,
    CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR,
    CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT,
    CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED,
    CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS,
    CU_DEVICE_ATTRIBUTE_NUMA_ID,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID,
});

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`: the kind of handle by which a memory pool can be shared.
const POSIX_FILE_DESCRIPTOR: c_int = 1;

/// The value of a `CUdevice_attribute`, or of the `cudaDeviceAttr` with the same number. An attribute that is
/// not listed is 0.
pub(crate) fn attribute(attribute: c_int, index: usize) -> c_int {
    let spec = &host_state().spec;
    let (sm_mhz, memory_mhz) = spec.base.clocks_mhz;
    let limits = capability_limits();
    let hopper = spec.cc.0 >= 9;
    match attribute {
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X
        | CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y => 1024,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z => 64,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X | CU_DEVICE_ATTRIBUTE_MAX_PITCH => c_int::MAX,
        CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y | CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z => 65_535,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => 48 << 10,
        CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY
        | CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK
        | CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR => 64 << 10,
        CU_DEVICE_ATTRIBUTE_WARP_SIZE | CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT => 32,
        CU_DEVICE_ATTRIBUTE_CLOCK_RATE => sm_mhz as c_int * 1000,
        CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE => memory_mhz as c_int * 1000,
        CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT | CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT => 512,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT => spec.sms as c_int,
        CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH => 131_072,
        CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT => 65_536,
        CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH
        | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT
        | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH => 16_384,
        CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH
        | CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT => 32_768,
        CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS => 2048,
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => bus(index),
        CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH => spec.base.bus_bits as c_int,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE => (spec.base.l2_kib << 10) as c_int,
        CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR => limits.threads_per_sm as c_int,
        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT => 3,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR => spec.cc.0 as c_int,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR => spec.cc.1 as c_int,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR => limits.shared_per_sm as c_int,
        CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO => 2,
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN => limits.shared_per_block_optin as c_int,
        CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR => limits.blocks_per_sm as c_int,
        CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK => reserved_shared() as c_int,
        CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES => POSIX_FILE_DESCRIPTOR,
        CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH | CU_DEVICE_ATTRIBUTE_TENSOR_MAP_ACCESS_SUPPORTED => {
            c_int::from(hopper)
        }
        CU_DEVICE_ATTRIBUTE_MEM_SYNC_DOMAIN_COUNT => {
            if hopper {
                4
            } else {
                1
            }
        }
        CU_DEVICE_ATTRIBUTE_NUMA_ID | CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => -1,
        CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
        | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
        | CU_DEVICE_ATTRIBUTE_ECC_ENABLED
        | CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING
        | CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS
        | CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_MEM_OPS_V1
        | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS_V1
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR_V1
        | CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH
        | CU_DEVICE_ATTRIBUTE_COOPERATIVE_MULTI_DEVICE_LAUNCH
        | CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        | CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED
        | CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
        | CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR
        | CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS => 1,
        _ => 0,
    }
}

/// The version of the CUDA runtime that the program brought. The simulated driver has the same version.
pub(crate) fn driver_version() -> c_int {
    type Version = unsafe extern "C" fn(Out<c_int>) -> Status;
    let mut version: c_int = 0;
    // SAFETY: looks a name up. This library does not define it.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cudaRuntimeGetVersion".as_ptr()) };
    if !found.is_null() {
        // SAFETY: the header of the runtime gives the function of that name this signature.
        let get_version: Version = unsafe { std::mem::transmute(found) };
        // SAFETY: the place is good for one write.
        unsafe { get_version(Out::of(&mut version)) };
    }
    if version > 0 { version } else { 13000 }
}

codes!(CUlimit_enum {
    CU_LIMIT_STACK_SIZE,
    CU_LIMIT_PRINTF_FIFO_SIZE,
    CU_LIMIT_MALLOC_HEAP_SIZE,
    CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH,
    CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT,
    CU_LIMIT_MAX_L2_FETCH_GRANULARITY,
});

/// The value of a `CUlimit`, or of the `cudaLimit` with the same number: the documented defaults of the
/// driver.
pub(crate) fn limit_value(limit: c_int) -> usize {
    match limit {
        CU_LIMIT_STACK_SIZE => 1024,
        CU_LIMIT_PRINTF_FIFO_SIZE => 1 << 20,
        CU_LIMIT_MALLOC_HEAP_SIZE => 8 << 20,
        CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH => 2,
        CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT => 2048,
        CU_LIMIT_MAX_L2_FETCH_GRANULARITY => 128,
        _ => 0,
    }
}

/// The highest stream priority since Volta. The lowest is 0.
pub(crate) const HIGHEST_PRIORITY: c_int = -5;
