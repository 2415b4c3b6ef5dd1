//! The CUDA functions that memtrace calls but does not hook.

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use memtrace_trace::Meta;
use memtrace_trace::meta::Device;

use crate::ffi::cuda_types::{DeviceAttribute, SUCCESS};
use crate::ffi::symbols::{Home, RealFn, Symbol};

// SAFETY: the signature is the one in cuda_runtime_api.h.
static CUDA_GET_DEVICE: RealFn<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { RealFn::new(c"cudaGetDevice", "libcudart.so") };

/// Returns the calling thread's current device in the runtime, or 0 if it is unknown. The call only reads
/// thread-local state. Called right after a runtime call on the same thread, which has initialized the
/// runtime.
pub(crate) fn current_device() -> i8 {
    ordinal_from(&CUDA_GET_DEVICE)
}

// SAFETY: the signature is the one in cuda.h.
static CU_CTX_GET_DEVICE: RealFn<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { RealFn::new(c"cuCtxGetDevice", "libcuda.so") };

/// Returns the device of the calling thread's context, or 0 if it is unknown. The call only reads
/// thread-local state. Used for calls of the driver, because such a process may not have the runtime.
pub(crate) fn current_driver_device() -> i8 {
    ordinal_from(&CU_CTX_GET_DEVICE)
}

fn ordinal_from(get_device: &RealFn<unsafe extern "C" fn(*mut c_int) -> c_int>) -> i8 {
    let Some(get_device) = get_device.get() else { return 0 };
    let mut device = 0;
    // SAFETY: `device` is valid for writes.
    let status = unsafe { get_device(&raw mut device) };
    if status == SUCCESS { i8::try_from(device).unwrap_or(0) } else { 0 }
}

// SAFETY: the signature is the one in cuda.h.
static IS_CAPTURING: RealFn<unsafe extern "C" fn(*mut c_void, *mut c_int) -> c_int> =
    unsafe { RealFn::new(c"cuStreamIsCapturing", "libcuda.so") };

/// Returns true if the work on `stream` is being captured into a CUDA graph. This function asks the driver,
/// not the runtime, because a failed driver call does not show up in the runtime's `cudaGetLastError`.
///
/// # Safety
/// `stream` is null or a live stream.
pub(crate) unsafe fn is_captured(stream: *mut c_void) -> bool {
    // The default stream cannot be captured.
    if stream.is_null() {
        return false;
    }
    let mut captured = 0;
    // SAFETY: the stream is alive by the contract, and the out-parameter is valid for writes.
    IS_CAPTURING
        .get()
        .is_some_and(|ask| unsafe { ask(stream, &raw mut captured) } == SUCCESS && captured != 0)
}

const DRIVER: Home = Home::Anywhere("libcuda.so");
const RUNTIME: Home = Home::Anywhere("libcudart.so");

// SAFETY: here and below, the signatures are the ones in cuda.h.
static GET_COUNT: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { Symbol::new(c"cuDeviceGetCount", DRIVER) };
// SAFETY: as above.
static GET: Symbol<unsafe extern "C" fn(*mut c_int, c_int) -> c_int> =
    unsafe { Symbol::new(c"cuDeviceGet", DRIVER) };
// SAFETY: as above.
static GET_NAME: Symbol<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
    unsafe { Symbol::new(c"cuDeviceGetName", DRIVER) };
// SAFETY: as above.
static TOTAL_MEM: Symbol<unsafe extern "C" fn(*mut usize, c_int) -> c_int> =
    unsafe { Symbol::new(c"cuDeviceTotalMem_v2", DRIVER) };
// SAFETY: as above.
static DRIVER_VERSION: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { Symbol::new(c"cuDriverGetVersion", DRIVER) };
// SAFETY: the signature is the one in cuda_runtime_api.h. The function returns a constant.
static RUNTIME_VERSION: Symbol<unsafe extern "C" fn(*mut c_int) -> c_int> =
    unsafe { Symbol::new(c"cudaRuntimeGetVersion", RUNTIME) };

type GetUuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int;
// SAFETY: as above; `CUuuid` is 16 bytes.
static GET_UUIDS: [Symbol<GetUuid>; 2] =
    unsafe { [Symbol::new(c"cuDeviceGetUuid_v2", DRIVER), Symbol::new(c"cuDeviceGetUuid", DRIVER)] };
// SAFETY: as above.
static GET_BUS_ID: Symbol<unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int> =
    unsafe { Symbol::new(c"cuDeviceGetPCIBusId", DRIVER) };

/// Returns the UUID of a device or of a MIG instance, or `None` if the driver does not know it.
pub(crate) fn device_uuid(ordinal: c_int) -> Option<[u8; 16]> {
    let get = GET_UUIDS.iter().find_map(Symbol::get)?;
    let mut uuid = [0u8; 16];
    // SAFETY: `uuid` is valid for writes.
    (unsafe { get(&raw mut uuid, ordinal) } == SUCCESS).then_some(uuid)
}

// SAFETY: as above; an attribute is an integer.
static GET_ATTRIBUTE: Symbol<unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int> =
    unsafe { Symbol::new(c"cuDeviceGetAttribute", DRIVER) };

/// Returns true if the device has no memory of its own and uses the host's memory.
pub(crate) fn is_integrated(ordinal: c_int) -> bool {
    const INTEGRATED: c_int = DeviceAttribute::CU_DEVICE_ATTRIBUTE_INTEGRATED as c_int;
    let mut value = 0;
    // SAFETY: the out-parameter is valid for writes.
    let ask = |get: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int| unsafe {
        get(&raw mut value, INTEGRATED, ordinal)
    };
    GET_ATTRIBUTE.get().map(ask) == Some(SUCCESS) && value != 0
}

/// Returns the PCI bus id of a device, or `None` if the driver does not know it.
pub(crate) fn device_bus_id(ordinal: c_int) -> Option<CString> {
    let mut id = [0u8; 32];
    // SAFETY: the passed length is one less than the buffer's, so the last byte stays 0.
    if unsafe { GET_BUS_ID.get()?(id.as_mut_ptr().cast(), 31, ordinal) } != SUCCESS {
        return None;
    }
    Some(CStr::from_bytes_until_nul(&id).ok()?.to_owned())
}

/// Adds the devices and the CUDA versions to `meta`. Runs on the writer thread, never in a hook. Creates no
/// context, because none of the calls needs one.
pub(crate) fn describe(meta: &mut Meta) {
    let (Some(count), Some(get), Some(name_of), Some(total_of)) =
        (GET_COUNT.get(), GET.get(), GET_NAME.get(), TOTAL_MEM.get())
    else {
        return;
    };
    let mut devices = 0;
    // SAFETY: here and below, every out-parameter is valid for writes.
    unsafe { count(&raw mut devices) };
    for ordinal in 0..devices {
        let (mut device, mut total, mut name) = (0, 0usize, [0 as c_char; 256]);
        // SAFETY: as above; the passed length is one less than the buffer's, so the last byte stays 0.
        unsafe {
            if get(&raw mut device, ordinal) != SUCCESS {
                continue;
            }
            total_of(&raw mut total, device);
            name_of(name.as_mut_ptr(), 255, device);
        }
        // SAFETY: the last byte of the buffer was never written, so it is 0.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
        meta.devices.push(Device { ordinal, name, total_bytes: total as i64 });
    }
    for (name, version) in [("cuda_driver", &DRIVER_VERSION), ("cuda_runtime", &RUNTIME_VERSION)] {
        if let Some(version) = version.get() {
            let mut number = 0;
            // SAFETY: `number` is valid for writes.
            unsafe { version(&raw mut number) };
            meta.versions.insert(name.to_owned(), version_text(number));
        }
    }
}

/// Formats a CUDA version: `12.4` for 12040.
fn version_text(number: c_int) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}
