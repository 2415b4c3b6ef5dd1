//! Hooks of the runtime's calls that allocate nothing but may create the context of a device.

use std::ffi::{c_int, c_void};

use crate::attribution::first_uses;
use crate::ffi::cuda::current_device;
use crate::ffi::cuda_types::{NOT_INITIALIZED, SUCCESS};
use crate::guard::{Outermost, shielded};
use crate::hooks::cuda::stand_in::caller_hooks;

caller_hooks! {
    cudaSetDevice(device: c_int) caller "rsi" => set_device, CUDA_SET_DEVICE;
    cudaMemGetInfo(free: *mut usize, total: *mut usize) caller "rdx" => mem_get_info, CUDA_MEM_GET_INFO;
}

unsafe extern "C" fn set_device(device: c_int, _caller: *const c_void) -> c_int {
    let Some(real) = CUDA_SET_DEVICE.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's argument is passed on unchanged.
    let status = unsafe { real(device) };
    if status == SUCCESS {
        note(i8::try_from(device).unwrap_or(-1));
    }
    status
}

unsafe extern "C" fn mem_get_info(free: *mut usize, total: *mut usize, _caller: *const c_void) -> c_int {
    let Some(real) = CUDA_MEM_GET_INFO.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's arguments are passed on unchanged.
    let status = unsafe { real(free, total) };
    if status == SUCCESS {
        note(current_device());
    }
    status
}

/// Records that the process uses the device, unless the call comes from inside another hooked call of this
/// thread. PyTorch calls `cudaSetDevice` often, so the cheapest check comes first.
fn note(device: i8) {
    if first_uses::is_new(device)
        && let Some(_outermost) = Outermost::enter()
    {
        shielded(|| first_uses::note(device));
    }
}
