//! The attributes and limits of the simulated card, and the identity of a device.

use std::ffi::c_int;

use cudarc::driver::sys::{CUdevice_attribute, CUlimit_enum};
use memtrace_machine::identity;

use crate::core::ffi::codes;
use crate::core::host_state::{card_of, host_state};

/// Limits that depend on the compute capability alone (CUDA C++ Programming Guide, "Technical Specifications
/// per Compute Capability"). Shared memory is in bytes.
pub(crate) struct CapabilityLimits {
    pub(crate) shared_per_sm: usize,
    pub(crate) shared_per_block_optin: usize,
    pub(crate) threads_per_sm: u32,
    pub(crate) blocks_per_sm: u32,
}

/// Returns the limits of the simulated card. A capability newer than the table has the limits of
/// the newest capability in it.
pub(crate) fn capability_limits() -> CapabilityLimits {
    let (shared_kib, threads_per_sm, blocks_per_sm) = limits_of(host_state().spec.cc);
    let shared_per_sm = shared_kib << 10;
    CapabilityLimits {
        shared_per_sm,
        // Before Volta, a block cannot ask for more than any block gets.
        shared_per_block_optin: match host_state().spec.cc.0 {
            ..=6 => SHARED_PER_BLOCK,
            _ => shared_per_sm - reserved_shared(),
        },
        threads_per_sm,
        blocks_per_sm,
    }
}

/// The shared memory that each block can have without asking for more, in bytes.
const SHARED_PER_BLOCK: usize = 48 << 10;

/// Returns the shared memory of a multiprocessor in KiB, and its maximum numbers of threads and of blocks.
fn limits_of(capability: (u32, u32)) -> (usize, u32, u32) {
    match capability {
        (..=3, 7) => (112, 2048, 16),
        (..=3, _) => (48, 2048, 16),
        (5, 2) | (6, 1) | (7, ..=4) => (96, 2048, 32),
        (..=6, _) => (64, 2048, 32),
        (7, _) => (64, 1024, 16),
        (8, 0) => (164, 2048, 32),
        (8, 7) => (164, 1536, 16),
        (8, 9) => (100, 1536, 24),
        (8, _) => (100, 1536, 16),
        (10, 7) => (328, 2048, 32),
        (9..=10, _) => (228, 2048, 32),
        (11, _) => (228, 1536, 24),
        _ => (100, 1536, 24),
    }
}

/// Returns the bytes of shared memory that CUDA reserves in each block of threads. It is 0 before Ampere.
fn reserved_shared() -> usize {
    if host_state().spec.cc.0 >= 8 { 1024 } else { 0 }
}

/// Returns the UUID of a visible device.
pub(crate) fn uuid(index: usize) -> [u8; 16] {
    identity::uuid(card_of(index))
}

/// Returns the PCI address of a visible device in the format of the CUDA runtime.
pub(crate) fn bus_id(index: usize) -> String {
    identity::bus_id(card_of(index))
}

/// Returns the visible device with this PCI address, which may omit the domain.
pub(crate) fn index_of_bus_id(text: &str) -> Option<usize> {
    let host = host_state();
    let card = identity::index_of_bus_id(text, host.spec.count as usize)?;
    host.devices.iter().position(|device| device.card == card)
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
    CU_DEVICE_ATTRIBUTE_INTEGRATED,
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

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`: the only kind of handle for shared memory pools that the
/// simulated card reports.
const POSIX_FILE_DESCRIPTOR: c_int = 1;

/// Returns the value of a `CUdevice_attribute`, or of the `cudaDeviceAttr` with the same number. The value of
/// an attribute that is not listed is 0.
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
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK => SHARED_PER_BLOCK as c_int,
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
        CU_DEVICE_ATTRIBUTE_PCI_BUS_ID => identity::bus(card_of(index)) as c_int,
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
        CU_DEVICE_ATTRIBUTE_INTEGRATED => c_int::from(spec.base.unified().is_some()),
        CU_DEVICE_ATTRIBUTE_ECC_ENABLED => c_int::from(spec.base.ecc() == Some(true)),
        CU_DEVICE_ATTRIBUTE_NUMA_ID | CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID => -1,
        CU_DEVICE_ATTRIBUTE_GPU_OVERLAP
        | CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY
        | CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS
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

codes!(CUlimit_enum {
    CU_LIMIT_STACK_SIZE,
    CU_LIMIT_PRINTF_FIFO_SIZE,
    CU_LIMIT_MALLOC_HEAP_SIZE,
    CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH,
    CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT,
    CU_LIMIT_MAX_L2_FETCH_GRANULARITY,
});

/// Returns the value of a `CUlimit`, or of the `cudaLimit` with the same number. The values are the
/// documented defaults of the driver.
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

#[cfg(test)]
mod tests {
    use memtrace_cards::CARDS;

    use super::limits_of;

    #[test]
    fn each_capability_has_the_limits_of_the_programming_guide() {
        let expected = [
            ((3, 5), (48, 2048, 16)),
            ((5, 0), (64, 2048, 32)),
            ((5, 2), (96, 2048, 32)),
            ((6, 0), (64, 2048, 32)),
            ((6, 1), (96, 2048, 32)),
            ((6, 2), (64, 2048, 32)),
            ((7, 0), (96, 2048, 32)),
            ((7, 5), (64, 1024, 16)),
            ((8, 0), (164, 2048, 32)),
            ((8, 6), (100, 1536, 16)),
            ((8, 7), (164, 1536, 16)),
            ((8, 9), (100, 1536, 24)),
            ((9, 0), (228, 2048, 32)),
            ((10, 0), (228, 2048, 32)),
            ((10, 3), (228, 2048, 32)),
            ((11, 0), (228, 1536, 24)),
            ((12, 0), (100, 1536, 24)),
            ((12, 1), (100, 1536, 24)),
        ];
        for (capability, limits) in expected {
            assert_eq!(limits_of(capability), limits, "{capability:?}");
        }
        assert!(CARDS.iter().all(|card| expected.iter().any(|(capability, _)| *capability == card.cc)));
    }
}
