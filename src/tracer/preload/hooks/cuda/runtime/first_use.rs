//! Calls that allocate nothing, and yet create the context of a device.

use std::ffi::{c_int, c_void};

use crate::attribution::first_uses;
use crate::ffi::cuda::current_device;
use crate::ffi::cuda_types::{NOT_INITIALIZED, SUCCESS};
use crate::hooks::cuda::stand_in::caller_hooks;
use crate::runtime::guard::{Outermost, shielded};

caller_hooks! {
    cudaSetDevice(device: c_int) caller "rsi" => set_device, CUDA_SET_DEVICE;
    cudaMemGetInfo(free: *mut usize, total: *mut usize) caller "rdx" => mem_get_info, CUDA_MEM_GET_INFO;
}

unsafe extern "C" fn set_device(device: c_int, _caller: *const c_void) -> c_int {
    let Some(real) = CUDA_SET_DEVICE.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's own argument, passed on unchanged.
    let status = unsafe { real(device) };
    if status == SUCCESS {
        note(|| i8::try_from(device).unwrap_or(-1));
    }
    status
}

unsafe extern "C" fn mem_get_info(free: *mut usize, total: *mut usize, _caller: *const c_void) -> c_int {
    let Some(real) = CUDA_MEM_GET_INFO.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's own arguments, passed on unchanged.
    let status = unsafe { real(free, total) };
    if status == SUCCESS {
        note(current_device);
    }
    status
}

/// Notes the device, unless another hook of this thread makes the call.
fn note(device: impl FnOnce() -> i8) {
    if let Some(_outermost) = Outermost::enter() {
        shielded(|| first_uses::note(device()));
    }
}
