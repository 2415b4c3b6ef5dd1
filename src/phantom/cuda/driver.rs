//! The driver: initialization, devices, contexts, and handing out its functions by name.

use std::ffi::{c_char, c_int};
use std::sync::Mutex;

use crate::core::ffi::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_FOUND, OK, Out, Status, Text, Word};
use crate::core::host_state::{current_index, device, lock, machine, set_current};
use crate::cuda::device_properties::{attribute, bus_id, driver_version, limit_of};
use crate::table::call_table::{self, Kind, answers};

/// The handle of a device's primary context: it stands for nothing and only has to tell the device.
pub(crate) fn context(device: usize) -> usize {
    0x10_0000 + device * 0x1000
}

fn device_of_context(context: usize) -> c_int {
    (context.wrapping_sub(0x10_0000) / 0x1000) as c_int
}

fn make_current(context: usize) -> Status {
    // Null unbinds; the device that the thread then falls back to stays what it was.
    if context == 0 { OK } else { set_current(device_of_context(context)) }
}

fn known(index: c_int) -> Status {
    if device(index).is_some() { OK } else { INVALID_DEVICE }
}

/// The function that the driver would hand out for a base name: the newest of its versions that
/// the phantom answers. Callers that want an older one ask for it by its full name.
fn entry_point(name: &str) -> Option<*const ()> {
    if name.is_empty() {
        return None;
    }
    // These take other arguments than the plain name did when CUDA 12 came; both are answered.
    let newest = if name == "cuStreamGetCaptureInfo" && driver_version() >= 13000 { "_v3" } else { "_v2" };
    let versioned = call_table::find(&format!("{name}{newest}"));
    let call = versioned
        .filter(|call| call.kind != Kind::Unsupported)
        .or_else(|| call_table::find(name))
        .or(versioned)?;
    Some(call.function)
}

fn hand_out(name: &str, function: Out<usize>, found: Out<c_int>) -> Status {
    match entry_point(name) {
        Some(address) => {
            found.put(0);
            function.give(address as usize)
        }
        None => {
            // CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND and cudaDriverEntryPointSymbolNotFound are both 1.
            found.put(1);
            function.put(0);
            NOT_FOUND
        }
    }
}

/// The runtime's way of asking: a name that is not there is told through `found`, not as a failure.
fn hand_out_runtime(name: &str, function: Out<usize>, found: Out<c_int>) -> Status {
    match hand_out(name, function, found) {
        NOT_FOUND if found.address() != 0 => OK,
        status => status,
    }
}

fn error_text(status: Status) -> &'static std::ffi::CStr {
    match status {
        0 => c"no error",
        1 => c"invalid argument",
        2 => c"out of memory",
        100 => c"no CUDA-capable device is detected",
        101 => c"invalid device ordinal",
        400 => c"invalid resource handle",
        500 => c"named symbol not found",
        600 => c"device not ready",
        702 => c"the launch timed out and was terminated",
        801 => c"operation not supported",
        _ => c"unknown error",
    }
}

fn error_name(status: Status) -> &'static std::ffi::CStr {
    match status {
        0 => c"CUDA_SUCCESS",
        1 => c"CUDA_ERROR_INVALID_VALUE",
        2 => c"CUDA_ERROR_OUT_OF_MEMORY",
        100 => c"CUDA_ERROR_NO_DEVICE",
        101 => c"CUDA_ERROR_INVALID_DEVICE",
        400 => c"CUDA_ERROR_INVALID_HANDLE",
        500 => c"CUDA_ERROR_NOT_FOUND",
        600 => c"CUDA_ERROR_NOT_READY",
        702 => c"CUDA_ERROR_LAUNCH_TIMEOUT",
        801 => c"CUDA_ERROR_NOT_SUPPORTED",
        _ => c"CUDA_ERROR_UNKNOWN",
    }
}

/// Says, once for each, which library brought a runtime of its own that cannot work here. NVIDIA's own
/// libraries have one too, but are answered before they would use it.
fn name_asker() {
    static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut frames = [std::ptr::null_mut(); 16];
    // SAFETY: at most as many addresses as there is room for.
    let found = unsafe { libc::backtrace(frames.as_mut_ptr(), frames.len() as c_int) };
    let own = library_of(name_asker as *mut libc::c_void);
    let callers = frames.iter().take(found.max(0) as usize).filter_map(|&frame| library_of(frame));
    let Some(asker) = callers.into_iter().find(|library| Some(library) != own.as_ref()) else { return };
    let file = asker.rsplit('/').next().unwrap_or(&asker).to_owned();
    if NVIDIA.iter().any(|name| file.starts_with(name)) {
        return;
    }
    let mut said = lock(&SAID);
    if !said.contains(&file) {
        eprintln!(
            "memtrace: {file} has a CUDA runtime linked into it and asks for undocumented tables of the driver, which \
             the phantom device does not have: what it does on the device will fail"
        );
        said.push(file);
    }
}

const NVIDIA: [&str; 9] =
    ["libcu", "libnccl", "libnv", "libtorch", "libc10", "libcaffe2", "libcupti", "libnpp", "libmemtrace"];

/// The file of the library that an address lies in.
fn library_of(address: *mut libc::c_void) -> Option<String> {
    // SAFETY: all zero is a value of this plain struct.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: takes any address, and `info` is a place for the answer.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the loader's name of a loaded library.
    Some(unsafe { std::ffi::CStr::from_ptr(info.dli_fname) }.to_string_lossy().into_owned())
}

answers! {
    Real fn cuInit(_flags: u32) { if machine().devices.is_empty() { NO_DEVICE } else { OK } }
    Real fn cuDriverGetVersion(out: Out<c_int>) { out.give(driver_version()) }
    Real fn cuGetErrorString(status: Status, out: Out<usize>) { out.give(error_text(status).as_ptr() as usize) }
    Real fn cuGetErrorName(status: Status, out: Out<usize>) { out.give(error_name(status).as_ptr() as usize) }
    Real fn cuGetProcAddress(name: Text, function: Out<usize>, _version: c_int, _flags: u64) {
        hand_out(name.str(), function, Out::from_address(0))
    }
    Real fn cuGetProcAddress_v2(name: Text, function: Out<usize>, _version: c_int, _flags: u64, found: Out<c_int>) {
        hand_out(name.str(), function, found)
    }
    Real fn cudaGetDriverEntryPoint(name: Text, function: Out<usize>, _flags: u64, found: Out<c_int>) {
        hand_out_runtime(name.str(), function, found)
    }
    Real fn cudaGetDriverEntryPointByVersion(name: Text, function: Out<usize>, _version: u32, _flags: u64, found: Out<c_int>) {
        hand_out_runtime(name.str(), function, found)
    }
    Real fn cuDeviceGet(out: Out<c_int>, index: c_int) {
        match known(index) { OK => out.give(index), status => status }
    }
    Real fn cuDeviceGetCount(out: Out<c_int>) { out.give(machine().devices.len() as c_int) }
    Real fn cuDeviceGetName(out: Out<c_char>, capacity: c_int, index: c_int) {
        out.text(&machine().spec.name, capacity.max(0) as usize);
        known(index)
    }
    Real fn cuDeviceGetAttribute(out: Out<c_int>, number: c_int, index: c_int) {
        match known(index) { OK => out.give(attribute(number, index as usize)), status => status }
    }
    Real fn cuDeviceTotalMem_v2(out: Out<usize>, _index: c_int) { out.give(machine().spec.memory as usize) }
    Real fn cuDeviceGetUuid(out: Out<[u8; 16]>, index: c_int) { out.give(uuid(index)) }
    Real fn cuDeviceGetUuid_v2(out: Out<[u8; 16]>, index: c_int) { out.give(uuid(index)) }
    Real fn cuDeviceGetPCIBusId(out: Out<c_char>, capacity: c_int, index: c_int) {
        out.text(&bus_id(index.max(0) as usize), capacity.max(0) as usize);
        known(index)
    }
    Real fn cuDeviceCanAccessPeer(out: Out<c_int>, from: c_int, to: c_int) { out.give(c_int::from(from != to)) }
    Real fn cuDeviceGetP2PAttribute(out: Out<c_int>, _attribute: c_int, _from: c_int, _to: c_int) { out.give(1) }
    Success fn cuCtxEnablePeerAccess(_peer: Word, _flags: u32) { OK }
    Success fn cuCtxDisablePeerAccess(_peer: Word) { OK }
    Real fn cuDevicePrimaryCtxGetState(_index: c_int, flags: Out<u32>, active: Out<c_int>) {
        flags.put(0);
        active.put(1);
        OK
    }
    Real fn cuDevicePrimaryCtxRetain(out: Out<usize>, index: c_int) {
        match known(index) { OK => out.give(context(index as usize)), status => status }
    }
    Success fn cuDevicePrimaryCtxRelease_v2(_index: c_int) { OK }
    Success fn cuDevicePrimaryCtxReset_v2(_index: c_int) { OK }
    Success fn cuDevicePrimaryCtxSetFlags_v2(_index: c_int, _flags: u32) { OK }
    Real fn cuCtxCreate_v2(out: Out<usize>, _flags: u32, index: c_int) {
        match set_current(index) { OK => out.give(context(index as usize)), status => status }
    }
    Success fn cuCtxDestroy_v2(_context: Word) { OK }
    Real fn cuCtxGetCurrent(out: Out<usize>) { out.give(context(current_index() as usize)) }
    Real fn cuCtxSetCurrent(context: Word) { make_current(context) }
    Real fn cuCtxPushCurrent_v2(context: Word) { make_current(context) }
    Real fn cuCtxPopCurrent_v2(out: Out<usize>) { out.put(context(current_index() as usize)); OK }
    Real fn cuCtxPushCurrent(context: Word) { make_current(context) }
    Real fn cuCtxPopCurrent(out: Out<usize>) { out.put(context(current_index() as usize)); OK }
    Real fn cuCtxGetDevice(out: Out<c_int>) { out.give(current_index()) }
    Real fn cuCtxGetFlags(out: Out<u32>) { out.give(0) }
    Real fn cuCtxGetId(context: Word, out: Out<u64>) { out.give(context as u64) }
    Real fn cuCtxGetApiVersion(_context: Word, out: Out<u32>) { out.give(3020) }
    Real fn cuCtxGetStreamPriorityRange(lowest: Out<c_int>, highest: Out<c_int>) {
        lowest.put(0);
        highest.put(-5);
        OK
    }
    Real fn cuCtxSynchronize() { crate::cuda::stream::cudaDeviceSynchronize() }
    Guess fn cuCtxGetLimit(out: Out<usize>, limit: c_int) { out.give(limit_of(limit)) }
    Success fn cuCtxSetLimit(_limit: c_int, _value: usize) { OK }
    Real fn cuCtxGetCacheConfig(out: Out<c_int>) { out.give(0) }
    Success fn cuCtxSetCacheConfig(_mode: c_int) { OK }
    Success fn cuCtxResetPersistingL2Cache() { OK }
    Success fn cuProfilerStart() { OK }
    Success fn cuProfilerStop() { OK }
    /// Undocumented tables through which a static runtime reaches into the driver; without them it
    /// says that the driver is too old, which is a plain refusal.
    Unsupported fn cuGetExportTable(out: Out<usize>, _id: Word) {
        out.put(0);
        name_asker();
        INVALID_VALUE
    }
}

fn uuid(index: c_int) -> [u8; 16] {
    crate::cuda::device_properties::uuid(index.max(0) as usize)
}
