//! The attributes of a pointer: the kind of memory, its device and its range.

use std::ffi::c_int;
use std::ptr::null_mut;

use cudarc::driver::sys::{CUmemorytype, CUpointer_attribute_enum};
use cudarc::runtime::sys::{cudaMemoryType, cudaPointerAttributes};

use crate::core::call_table::{answers, by_contract};
use crate::core::device::context_handle;
use crate::core::ffi::{INVALID_VALUE, In, NOT_SUPPORTED, OK, Out, Status, Word, codes};
use crate::core::host_state::{current, current_index};
use crate::cuda::memory::{PointerKind, pointer_kind};

// This is CUDA 12's layout. CUDA 13's has reserved fields after it. They must not be written, because the
// struct of a program for CUDA 12 ends here.
const _: () = assert!(size_of::<cudaPointerAttributes>() == 24 && align_of::<cudaPointerAttributes>() == 8);

fn pointer_attributes(address: usize) -> cudaPointerAttributes {
    let pointer = address as *mut _;
    match pointer_kind(address) {
        PointerKind::Unknown => cudaPointerAttributes {
            type_: cudaMemoryType::cudaMemoryTypeUnregistered,
            device: -1,
            devicePointer: null_mut(),
            hostPointer: null_mut(),
        },
        PointerKind::Host { .. } => cudaPointerAttributes {
            type_: cudaMemoryType::cudaMemoryTypeHost,
            device: current_index(),
            devicePointer: pointer,
            hostPointer: pointer,
        },
        PointerKind::Device { device, managed, .. } => cudaPointerAttributes {
            type_: if managed {
                cudaMemoryType::cudaMemoryTypeManaged
            } else {
                cudaMemoryType::cudaMemoryTypeDevice
            },
            device: device as c_int,
            devicePointer: pointer,
            hostPointer: if managed { pointer } else { null_mut() },
        },
    }
}

codes!(CUpointer_attribute_enum {
    CU_POINTER_ATTRIBUTE_CONTEXT,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
    CU_POINTER_ATTRIBUTE_HOST_POINTER,
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS,
    CU_POINTER_ATTRIBUTE_BUFFER_ID,
    CU_POINTER_ATTRIBUTE_IS_MANAGED,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE,
    CU_POINTER_ATTRIBUTE_MAPPED,
    CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE,
});

/// Writes the value of a `CUpointer_attribute`.
///
/// # Safety
/// `out` is null or good for a write of the attribute's type.
unsafe fn pointer_attribute(out: Out<u64>, attribute: c_int, address: usize) -> Status {
    let kind = pointer_kind(address);
    let (device, start, size, managed) = match kind {
        PointerKind::Unknown => return INVALID_VALUE,
        PointerKind::Host { start, size } => (current().index, start, size, false),
        PointerKind::Device { device, start, size, managed } => (device, start, size, managed),
    };
    let host = matches!(kind, PointerKind::Host { .. });
    // SAFETY: `out_u32` is written only for attributes whose value has 32 bits.
    let out_u32 = unsafe { out.cast::<u32>() };
    match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT => out.give(context_handle(device) as u64),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
            let memory =
                if host { CUmemorytype::CU_MEMORYTYPE_HOST } else { CUmemorytype::CU_MEMORYTYPE_DEVICE };
            out_u32.give(memory as u32)
        }
        CU_POINTER_ATTRIBUTE_DEVICE_POINTER => out.give(address as u64),
        CU_POINTER_ATTRIBUTE_HOST_POINTER if host || managed => out.give(address as u64),
        CU_POINTER_ATTRIBUTE_HOST_POINTER => INVALID_VALUE,
        CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => out_u32.give(0),
        CU_POINTER_ATTRIBUTE_BUFFER_ID | CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => out.give(start as u64),
        CU_POINTER_ATTRIBUTE_IS_MANAGED => out_u32.give(u32::from(managed)),
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => out_u32.give(device as u32),
        CU_POINTER_ATTRIBUTE_RANGE_SIZE => out.give(size as u64),
        CU_POINTER_ATTRIBUTE_MAPPED => out_u32.give(1),
        _ => NOT_SUPPORTED,
    }
}

/// Writes the values of several attributes, each to its own address.
///
/// # Safety
/// Both arrays are null or have `count` elements, and each address is null or good for a write of its
/// attribute's type.
unsafe fn several_pointer_attributes(
    count: u32,
    attributes: In<c_int>,
    outs: In<Out<u64>>,
    address: usize,
) -> Status {
    for index in 0..count as usize {
        // SAFETY: index < count.
        let (attribute, out) = unsafe { (attributes.at(index).get(), outs.at(index).get()) };
        if let (Some(attribute), Some(out)) = (attribute, out) {
            // SAFETY: the caller's promise.
            if unsafe { pointer_attribute(out, attribute, address) } != OK {
                // SAFETY: as above.
                unsafe { null_attribute(out, attribute) };
            }
        }
    }
    OK
}

/// Writes the null value of an attribute, which `cuPointerGetAttributes` gives for a pointer that CUDA does not know.
///
/// # Safety
/// `out` is null or good for a write of the attribute's type.
unsafe fn null_attribute(out: Out<u64>, attribute: c_int) {
    match attribute {
        CU_POINTER_ATTRIBUTE_CONTEXT
        | CU_POINTER_ATTRIBUTE_DEVICE_POINTER
        | CU_POINTER_ATTRIBUTE_HOST_POINTER
        | CU_POINTER_ATTRIBUTE_BUFFER_ID
        | CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
        | CU_POINTER_ATTRIBUTE_RANGE_SIZE => out.put(0),
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        | CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        | CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
        | CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE
        | CU_POINTER_ATTRIBUTE_IS_MANAGED
        | CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        | CU_POINTER_ATTRIBUTE_MAPPED => {
            // SAFETY: the value of these attributes has 32 bits.
            unsafe { out.cast::<u32>() }.put(0);
        }
        _ => {}
    }
}

answers! {
    Real fn cudaPointerGetAttributes(out: Out<cudaPointerAttributes>, address: Word) {
        out.give(pointer_attributes(address))
    }
    Real fn cuPointerGetAttribute(out: Out<u64>, attribute: c_int, address: Word) {
        by_contract!(pointer_attribute(out, attribute, address))
    }
    Real fn cuPointerGetAttributes(count: u32, attributes: In<c_int>, outs: In<Out<u64>>, address: Word) {
        by_contract!(several_pointer_attributes(count, attributes, outs, address))
    }
}
