//! The few questions that are put to CUDA itself.

use std::ffi::{CStr, c_char, c_int, c_uint};

use memtrace_trace::Meta;
use memtrace_trace::meta::Device;

use crate::ffi::symbols::{RealFn, find_anywhere};

// SAFETY: the signature is the one in cuda_runtime_api.h.
static CUDA_GET_DEVICE: RealFn<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { RealFn::new(c"cudaGetDevice", "libcudart.so") };

/// The calling thread's device. A read of the runtime's thread-local state: it is asked only right
/// after a call of the same thread that has initialized the runtime.
pub(crate) fn current_device() -> i8 {
    let Some(real) = CUDA_GET_DEVICE.get() else { return 0 };
    let mut device = 0;
    // SAFETY: the place is valid for the answer.
    let status = unsafe { real(&raw mut device) };
    if status == 0 { i8::try_from(device).unwrap_or(0) } else { 0 }
}

// SAFETY: the signature is the one in cuda.h.
static CU_CTX_GET_DEVICE: RealFn<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { RealFn::new(c"cuCtxGetDevice", "libcuda.so") };

/// The device of the calling thread's context: for calls of the driver, in a process that may have no
/// runtime. A read of thread-local state, too.
pub(crate) fn current_driver_device() -> i8 {
    let Some(real) = CU_CTX_GET_DEVICE.get() else { return 0 };
    let mut device = 0;
    // SAFETY: the place is valid for the answer.
    let status = unsafe { real(&raw mut device) };
    if status == 0 { i8::try_from(device).unwrap_or(0) } else { 0 }
}

/// Fills in what only a running CUDA can tell. On the writer thread: never in a hook, and through
/// driver calls that need no context, so none is made.
pub(crate) fn describe(meta: &mut Meta) {
    crate::lifecycle::describe(meta);
    let driver = |name: &CStr| find_anywhere("libcuda.so", name);
    let (count, get) = (driver(c"cuDeviceGetCount"), driver(c"cuDeviceGet"));
    let (name_of, total_of) = (driver(c"cuDeviceGetName"), driver(c"cuDeviceTotalMem_v2"));
    if count.is_null() || get.is_null() || name_of.is_null() || total_of.is_null() {
        return;
    }
    // SAFETY: the types of cuda.h: CUresult f(int *).
    let count: unsafe extern "C" fn(*mut c_int) -> c_uint = unsafe { std::mem::transmute(count) };
    // SAFETY: CUresult f(CUdevice *, int).
    let get: unsafe extern "C" fn(*mut c_int, c_int) -> c_uint = unsafe { std::mem::transmute(get) };
    // SAFETY: CUresult f(char *, int, CUdevice).
    let name_of: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_uint =
        unsafe { std::mem::transmute(name_of) };
    // SAFETY: CUresult f(size_t *, CUdevice).
    let total_of: unsafe extern "C" fn(*mut usize, c_int) -> c_uint =
        unsafe { std::mem::transmute(total_of) };
    let mut devices = 0;
    // SAFETY: every place below is valid for its answer.
    unsafe { count(&raw mut devices) };
    for ordinal in 0..devices {
        let (mut device, mut total, mut name) = (0, 0usize, [0 as c_char; 256]);
        // SAFETY: as above; the length that is passed is the buffer's.
        unsafe {
            if get(&raw mut device, ordinal) != 0 {
                continue;
            }
            total_of(&raw mut total, device);
            name_of(name.as_mut_ptr(), 255, device);
        }
        // SAFETY: the last byte of the buffer was never written: it is 0.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        meta.devices.push(Device { ordinal, name, total_bytes: total as i64 });
    }
    let version = driver(c"cuDriverGetVersion");
    if !version.is_null() {
        // SAFETY: CUresult f(int *).
        let version: unsafe extern "C" fn(*mut c_int) -> c_uint = unsafe { std::mem::transmute(version) };
        let mut number = 0;
        // SAFETY: the place is valid for the answer.
        unsafe { version(&raw mut number) };
        meta.versions.insert("cuda_driver".to_owned(), cuda_version(number));
    }
    let runtime = find_anywhere("libcudart.so", c"cudaRuntimeGetVersion");
    if !runtime.is_null() {
        // SAFETY: cudaError_t f(int *), which reads a constant.
        let runtime: unsafe extern "C" fn(*mut c_int) -> c_int = unsafe { std::mem::transmute(runtime) };
        let mut number = 0;
        // SAFETY: the place is valid for the answer.
        unsafe { runtime(&raw mut number) };
        meta.versions.insert("cuda_runtime".to_owned(), cuda_version(number));
    }
}

fn cuda_version(number: c_int) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}
