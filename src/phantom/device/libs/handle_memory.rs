//! The device memory that the handles of cuBLAS, cuDNN, cuFFT and cuSOLVER take outside PyTorch's allocator.
//!
//! NVIDIA documents no sizes. These are from traces and `scripts/calibrate` on an H200 (CUDA 13.0, driver
//! 580, torch 2.11.0, cuDNN 9.19), and they are used for compute capability 9.0 only. Handles on other cards
//! take nothing. They also take nothing if the request sets the context, which then includes them.

use std::collections::{HashMap, HashSet};
use std::ffi::CStr;
use std::sync::{LazyLock, Mutex};

use cudarc::cublaslt::sys::cublasStatus_t;

use crate::core::call_table::answers;
use crate::core::driver_version::driver_version;
use crate::core::ffi::{OK, OUT_OF_MEMORY, Out, Status, Word, opaque_handle};
use crate::core::host_state::{current, host_state};
use crate::core::loaded_library::find_in_program;
use crate::core::lock::lock;
use crate::core::on_behalf::on_behalf_of;
use crate::core::past_oom::Caller;

/// The names of a library for CUDA 12 and for CUDA 13.
type Names = [&'static CStr; 2];

const CUBLAS: Names = [c"libcublas.so.12", c"libcublas.so.13"];
const CUDNN: Names = [c"libcudnn_graph.so.9"; 2];
const CUFFT: Names = [c"libcufft.so.11", c"libcufft.so.12"];
const CUSOLVER: Names = [c"libcusolver.so.11", c"libcusolver.so.12"];

/// The allocations of each handle, in bytes.
const CUBLAS_HANDLE: [usize; 3] = [1 << 10, 128 << 10, 64 << 20];
const CUDNN_HANDLE: [usize; 2] = [25344, 4];
/// A handle of cuSOLVER also makes one of cuBLAS.
const CUSOLVER_HANDLE: [usize; 1] = [32 << 20];
/// cuFFT allocates these bytes with its first plan. Only programs with one plan were measured.
const CUFFT_FIRST_PLAN: [usize; 1] = [6967984];

/// The memory of the kernels that come with the first handle on a device: the measured total without the
/// allocations above.
const CUDNN_KERNELS: u64 = 8 << 20;
const CUSOLVER_KERNELS: u64 = 2 << 20;

const CUBLAS_ALLOC_FAILED: Status = cublasStatus_t::CUBLAS_STATUS_ALLOC_FAILED as Status;
/// `CUSOLVER_STATUS_ALLOC_FAILED` and `CUFFT_ALLOC_FAILED`.
const ALLOC_FAILED: Status = 2;
/// `CUSOLVER_STATUS_INVALID_VALUE`.
const CUSOLVER_INVALID_VALUE: Status = 3;
/// `CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED`.
const CUDNN_ALLOC_FAILED: Status = 4004;

/// The library and the address of an allocation.
type Allocation = (&'static CStr, u64);

/// The allocations of each handle.
static HELD: LazyLock<Mutex<HashMap<usize, Vec<Allocation>>>> = LazyLock::new(Mutex::default);
/// The devices on which a library was used before, by the library's name.
static USED: LazyLock<Mutex<HashSet<(usize, &'static CStr)>>> = LazyLock::new(Mutex::default);

/// Returns true if the memory that libraries and graphs took on the measured card is charged.
pub(crate) fn is_counted() -> bool {
    let spec = &host_state().spec;
    spec.cc == (9, 0) && !spec.has_own_context
}

fn name(names: Names) -> &'static CStr {
    names[usize::from(driver_version() >= 13000)]
}

/// Allocates memory for a handle with calls of the driver, which a tracer sees as calls of the library. Memory
/// without a handle is never freed.
fn allocate(handle: Option<usize>, library: &'static CStr, sizes: &[usize]) -> Status {
    type MemAlloc = unsafe extern "C" fn(*mut u64, usize) -> Status;
    // SAFETY: the signature of cuda.h.
    let Some(alloc) = (unsafe { find_in_program::<MemAlloc>(c"cuMemAlloc_v2") }) else { return OK };
    on_behalf_of(library, || {
        for &size in sizes {
            let mut address = 0;
            // SAFETY: the place is good for one write.
            match unsafe { alloc(&raw mut address, size) } {
                OK => {
                    if let Some(handle) = handle {
                        lock(&HELD).entry(handle).or_default().push((library, address));
                    }
                }
                status => return status,
            }
        }
        OK
    })
}

/// Frees the memory of a handle.
fn free(handle: usize) {
    type MemFree = unsafe extern "C" fn(u64) -> Status;
    let held = lock(&HELD).remove(&handle).unwrap_or_default();
    // SAFETY: the signature of cuda.h.
    let Some(free) = (unsafe { find_in_program::<MemFree>(c"cuMemFree_v2") }) else { return };
    for (library, address) in held {
        // SAFETY: cuMemAlloc wrote the address, and it is freed once.
        on_behalf_of(library, || unsafe { free(address) });
    }
}

/// Calls `take` at the first use of a library on the current device. If it fails, the next use is the first
/// again.
fn on_first_use(library: &'static CStr, take: impl FnOnce() -> Status) -> Status {
    let usage = (current().index, library);
    if !lock(&USED).insert(usage) {
        return OK;
    }
    let status = take();
    if status != OK {
        lock(&USED).remove(&usage);
    }
    status
}

/// Charges the kernels of a library to the context, once for each device.
fn load(library: &'static CStr, bytes: u64) -> Status {
    on_first_use(library, || if current().vram().charge(bytes, Caller::GivesUp) { OK } else { OUT_OF_MEMORY })
}

/// Returns the status of a library for a status of the driver. If an allocation failed, frees the others.
fn finish(handle: usize, status: Status, failure: Status) -> Status {
    if status == OK {
        return OK;
    }
    free(handle);
    failure
}

/// Takes the memory of a new cuBLAS handle.
pub(crate) fn create_cublas(handle: usize) -> Status {
    if !is_counted() {
        return OK;
    }
    finish(handle, allocate(Some(handle), name(CUBLAS), &CUBLAS_HANDLE), CUBLAS_ALLOC_FAILED)
}

/// Takes the memory of a new cuDNN handle.
pub(crate) fn create_cudnn(handle: usize) -> Status {
    if !is_counted() {
        return OK;
    }
    let library = name(CUDNN);
    let status = match load(library, CUDNN_KERNELS) {
        OK => allocate(Some(handle), library, &CUDNN_HANDLE),
        status => status,
    };
    finish(handle, status, CUDNN_ALLOC_FAILED)
}

/// Returns the memory of a handle to the device.
pub(crate) fn destroy(handle: usize) -> Status {
    free(handle);
    OK
}

/// Takes the memory that cuFFT allocates with its first plan on a device, and keeps.
pub(crate) fn plan_fft() -> Status {
    let library = name(CUFFT);
    if !is_counted() {
        return OK;
    }
    let status = on_first_use(library, || allocate(None, library, &CUFFT_FIRST_PLAN));
    if status == OK { OK } else { ALLOC_FAILED }
}

fn create_cusolver(handle: usize) -> Status {
    if !is_counted() {
        return OK;
    }
    let library = name(CUSOLVER);
    let mut status = allocate(Some(handle), name(CUBLAS), &CUBLAS_HANDLE);
    if status == OK {
        status = allocate(Some(handle), library, &CUSOLVER_HANDLE);
    }
    if status == OK {
        status = load(library, CUSOLVER_KERNELS);
    }
    finish(handle, status, ALLOC_FAILED)
}

answers! {
    Success fn cusolverDnCreate(out: Out<usize>) {
        if out.is_null() {
            return CUSOLVER_INVALID_VALUE;
        }
        let handle = opaque_handle();
        match create_cusolver(handle) {
            OK => out.give(handle),
            status => status,
        }
    }
    Success fn cusolverDnDestroy(handle: Word) { destroy(handle) }
}
