//! The driver: initialization, devices, contexts and errors.

use std::cell::RefCell;
use std::ffi::{CStr, c_char, c_int};
use std::sync::Mutex;

use cudarc::driver::sys::cudaError_enum;

use crate::core::call_rules::initialize;
use crate::core::call_table::{answers, by_contract};
use crate::core::device::{context_handle, device_of_context};
use crate::core::driver_version::driver_version;
use crate::core::ffi::{INVALID_DEVICE, INVALID_VALUE, In, OK, Out, Status, Word, opaque_handle};
use crate::core::host_state::{current_index, device, host_state, set_current};
use crate::core::loaded_library::calling_library;
use crate::core::lock::lock;
use crate::cuda::device_attributes::{HIGHEST_PRIORITY, attribute, bus_id, limit_value, uuid};
use crate::cuda::streams::synchronize_current_device;

fn make_current(context: usize) -> Status {
    // A null context leaves the thread without a context. The device that a runtime call on this thread would
    // use does not change.
    if context == 0 { OK } else { set_current(device_of_context(context) as c_int) }
}

thread_local! {
    /// The devices that were current before each context that this thread has pushed, the latest last.
    static PUSHED: RefCell<Vec<c_int>> = const { RefCell::new(Vec::new()) };
}

fn push_current(context: usize) -> Status {
    let before = current_index();
    let status = make_current(context);
    if status == OK {
        let _ = PUSHED.try_with(|pushed| pushed.borrow_mut().push(before));
    }
    status
}

/// Writes the current context, and makes the device current that was so before the latest push.
fn pop_current(out: Out<usize>) -> Status {
    out.put(context_handle(current_index() as usize));
    match PUSHED.try_with(|pushed| pushed.borrow_mut().pop()).ok().flatten() {
        Some(before) => set_current(before),
        None => OK,
    }
}

/// Creates a context. "If a context is already current to the thread, it is supplanted by the newly created
/// context and may be restored by a subsequent call to cuCtxPopCurrent()" (`cuda.h`).
fn create_context(out: Out<usize>, index: c_int) -> Status {
    match give(out, index, context_handle) {
        OK => push_current(context_handle(index as usize)),
        status => status,
    }
}

/// Destroys a context. "If ctx is current to the calling thread then ctx will also be popped from the current
/// thread's context stack (as though cuCtxPopCurrent() were called)" (`cuda.h`). A created context has the handle
/// of the device's primary context. So if the program has popped the created context, and made the primary
/// context of the same device current by a push, the destruction pops that one.
fn destroy_context(context: usize) -> Status {
    if context == context_handle(current_index() as usize) { pop_current(Out::null()) } else { OK }
}

/// Returns success if a visible device has this index, or the error for an invalid device.
fn check_index(index: c_int) -> Status {
    if device(index).is_some() { OK } else { INVALID_DEVICE }
}

/// Writes a value for the device with this index.
fn give<T>(out: Out<T>, index: c_int, value: impl FnOnce(usize) -> T) -> Status {
    match check_index(index) {
        OK => out.give(value(index as usize)),
        status => status,
    }
}

/// Writes a value about the access from one device to another.
pub(crate) fn give_for_peers(out: Out<c_int>, from: c_int, to: c_int, value: c_int) -> Status {
    if check_index(from) == OK { give(out, to, |_| value) } else { INVALID_DEVICE }
}

/// Defines the table of errors: the code, the name and the text of each.
macro_rules! errors {
    ($($name:ident => $text:literal,)*) => {
        /// The errors that the simulated driver returns. Any other code has the last name and text.
        const ERRORS: &[(Status, &CStr, &CStr)] = &[$((
            cudaError_enum::$name as Status,
            match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => c"",
            },
            $text,
        )),*];
    };
}

errors! {
    CUDA_SUCCESS => c"no error",
    CUDA_ERROR_INVALID_VALUE => c"invalid argument",
    CUDA_ERROR_OUT_OF_MEMORY => c"out of memory",
    CUDA_ERROR_NOT_INITIALIZED => c"initialization error",
    CUDA_ERROR_NO_DEVICE => c"no CUDA-capable device is detected",
    CUDA_ERROR_INVALID_DEVICE => c"invalid device ordinal",
    CUDA_ERROR_INVALID_HANDLE => c"invalid resource handle",
    CUDA_ERROR_NOT_FOUND => c"named symbol not found",
    CUDA_ERROR_NOT_READY => c"device not ready",
    CUDA_ERROR_LAUNCH_TIMEOUT => c"the launch timed out and was terminated",
    CUDA_ERROR_NOT_SUPPORTED => c"operation not supported",
    CUDA_ERROR_ILLEGAL_STATE => c"the operation cannot be performed in the present state",
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED => c"operation not permitted when stream is capturing",
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => c"operation failed due to a previous error during capture",
    CUDA_ERROR_STREAM_CAPTURE_MERGE => c"operation would result in a merge of separate capture sequences",
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED => c"capture was not ended in the same stream as it began",
    CUDA_ERROR_STREAM_CAPTURE_UNJOINED => c"capturing stream has unjoined work",
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION => c"dependency created on uncaptured work in another stream",
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT =>
        c"operation would make the legacy stream depend on a capturing blocking stream",
    CUDA_ERROR_CAPTURED_EVENT => c"operation not permitted on an event last recorded in a capturing stream",
    CUDA_ERROR_ECC_UNCORRECTABLE => c"uncorrectable ECC error encountered",
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD =>
        c"attempt to terminate a thread-local capture sequence from another thread",
    CUDA_ERROR_INVALID_IMAGE => c"device kernel image is invalid",
    CUDA_ERROR_INVALID_CONTEXT => c"invalid device context",
    CUDA_ERROR_FILE_NOT_FOUND => c"file not found",
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED =>
        c"part or all of the requested memory range is already mapped",
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED => c"pointer does not correspond to a registered memory region",
    CUDA_ERROR_UNKNOWN => c"unknown error",
}

/// Returns the name and the text of an error.
fn error(status: Status) -> (&'static CStr, &'static CStr) {
    let place = ERRORS.iter().position(|&(code, ..)| code == status).unwrap_or(ERRORS.len() - 1);
    (ERRORS[place].1, ERRORS[place].2)
}

/// The table in which CUPTI 13.2 looks for a driver's own version of each of its functions. It uses its own for
/// those that the table is too short for. Without the table it asks for the text of the error, which is
/// again one of these functions, until the stack is full.
const CUPTI_FUNCTIONS: [u8; 16] = 0x7cb6_3f9b_9ca4_8e42_a484_beb6_6e6a_ed7f_u128.to_be_bytes();

/// Returns true if CUPTI 13 is loaded. CUPTI 12 takes functions from the table without looking at its size.
fn is_cupti_13_loaded() -> bool {
    let name = c"libcupti.so.13";
    // SAFETY: the name ends in 0; RTLD_NOLOAD loads and runs nothing.
    let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    if handle.is_null() {
        return false;
    }
    // SAFETY: the handle is open, and the library stays loaded, because it was loaded before.
    unsafe { libc::dlclose(handle) };
    true
}

/// A table without functions: its first word is its size in bytes.
static EMPTY_TABLE: usize = size_of::<usize>();

/// Prefixes of the names of libraries that need no warning. They have a static runtime, too, but this library
/// answers their functions before they use it.
const KNOWN_LIBRARIES: [&str; 9] =
    ["libcu", "libnccl", "libnv", "libtorch", "libc10", "libcaffe2", "libcupti", "libnpp", "libmemtrace"];

/// The runtime of CUTLASS' CuTe DSL, with which FlashInfer compiles kernels. It
/// contains its own static runtime.
const CUTE_DSL: &str = "libcute_dsl_runtime";

/// Returns true if a library's static runtime is not used, because this library answers its functions.
fn is_known(file: &str) -> bool {
    !file.starts_with(CUTE_DSL) && KNOWN_LIBRARIES.iter().any(|name| file.starts_with(name))
}

/// Warns once for each library that calls the driver through a statically linked CUDA runtime, which cannot
/// work here.
fn warn_about_static_runtime() {
    static WARNED: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let Some(file) = calling_library() else { return };
    if is_known(&file) {
        return;
    }
    let mut warned = lock(&WARNED);
    if !warned.contains(&file) {
        eprintln!(
            "memtrace: {file} has a CUDA runtime linked into it and asks for undocumented tables of the driver, \
             which the phantom device does not have: its work on the device will fail"
        );
        entries::cuGetExportTable.add_caller(&file);
        warned.push(file);
    }
}

answers! {
    /// "Currently, the Flags parameter must be 0" (`cuda.h`).
    Real fn cuInit(flags: u32) { if flags == 0 { initialize() } else { INVALID_VALUE } }
    Real fn cuDriverGetVersion(out: Out<c_int>) { out.give(driver_version()) }
    Real fn cuGetErrorString(status: Status, out: Out<*const c_char>) {
        out.give(error(status).1.as_ptr())
    }
    Real fn cuGetErrorName(status: Status, out: Out<*const c_char>) { out.give(error(status).0.as_ptr()) }
    Real fn cuDeviceGet(out: Out<c_int>, index: c_int) { give(out, index, |_| index) }
    Real fn cuDeviceGetCount(out: Out<c_int>) { out.give(host_state().devices.len() as c_int) }
    Real fn cuDeviceGetName(out: Out<c_char>, capacity: c_int, index: c_int) {
        by_contract!(out.text(&host_state().spec.name, capacity.max(0) as usize));
        check_index(index)
    }
    Real fn cuDeviceGetAttribute(out: Out<c_int>, number: c_int, index: c_int) {
        give(out, index, |index| attribute(number, index))
    }
    Real fn cuDeviceTotalMem_v2(out: Out<usize>, index: c_int) {
        give(out, index, |_| host_state().spec.memory as usize)
    }
    Real fn {cuDeviceGetUuid, cuDeviceGetUuid_v2}(out: Out<[u8; 16]>, index: c_int) { give(out, index, uuid) }
    Real fn cuDeviceGetPCIBusId(out: Out<c_char>, capacity: c_int, index: c_int) {
        by_contract!(out.text(&bus_id(index.max(0) as usize), capacity.max(0) as usize));
        check_index(index)
    }
    Real fn cuDeviceCanAccessPeer(out: Out<c_int>, from: c_int, to: c_int) {
        give_for_peers(out, from, to, c_int::from(from != to))
    }
    Real fn cuDeviceGetP2PAttribute(out: Out<c_int>, _attribute: c_int, from: c_int, to: c_int) {
        give_for_peers(out, from, to, 1)
    }
    Success fn cuCtxEnablePeerAccess(_peer: Word, _flags: u32) { OK }
    Success fn cuCtxDisablePeerAccess(_peer: Word) { OK }
    /// PyTorch calls this function before it makes a device current again, because that
    /// would create a context there.
    Real fn cuDevicePrimaryCtxGetState(index: c_int, flags: Out<u32>, active: Out<c_int>) {
        flags.put(0);
        active.put(c_int::from(device(index).is_some_and(|device| device.share().is_entered())));
        check_index(index)
    }
    Real fn cuDevicePrimaryCtxRetain(out: Out<usize>, index: c_int) {
        if let Some(device) = device(index) {
            device.share().enter();
        }
        give(out, index, context_handle)
    }
    Success fn cuDevicePrimaryCtxRelease_v2(_index: c_int) { OK }
    Success fn cuDevicePrimaryCtxSetFlags_v2(_index: c_int, _flags: u32) { OK }
    Real fn cuCtxCreate_v2(out: Out<usize>, _flags: u32, index: c_int) {
        create_context(out, index)
    }
    /// Frees nothing: a context that the program creates is the device's primary context here.
    Real fn cuCtxDestroy_v2(context: Word) { destroy_context(context) }
    Real fn cuCtxGetCurrent(out: Out<usize>) { out.give(context_handle(current_index() as usize)) }
    Real fn cuCtxSetCurrent(context: Word) { make_current(context) }
    Real fn {cuCtxPushCurrent_v2, cuCtxPushCurrent}(context: Word) { push_current(context) }
    Real fn {cuCtxPopCurrent_v2, cuCtxPopCurrent}(out: Out<usize>) { pop_current(out) }
    Real fn cuCtxGetDevice(out: Out<c_int>) { out.give(current_index()) }
    Real fn cuCtxGetFlags(out: Out<u32>) { out.give(0) }
    Real fn cuCtxGetId(context: Word, out: Out<u64>) { out.give(context as u64) }
    Real fn cuCtxGetApiVersion(_context: Word, out: Out<u32>) { out.give(3020) }
    Real fn cuCtxGetStreamPriorityRange(lowest: Out<c_int>, highest: Out<c_int>) {
        lowest.put(0);
        highest.put(HIGHEST_PRIORITY);
        OK
    }
    Real fn cuCtxSynchronize() { synchronize_current_device() }
    Guess fn cuCtxGetLimit(out: Out<usize>, limit: c_int) { out.give(limit_value(limit)) }
    Success fn cuCtxSetLimit(_limit: c_int, _value: usize) { OK }
    Real fn cuCtxGetCacheConfig(out: Out<c_int>) { out.give(0) }
    Success fn cuCtxSetCacheConfig(_mode: c_int) { OK }
    Success fn {cuCtxResetPersistingL2Cache, cuProfilerStart, cuProfilerStop}() { OK }
    /// The driver calls the callback with each of its errors. The simulated driver logs none.
    Success fn cuLogsRegisterCallback(_callback: Word, _user: Word, handle: Out<usize>) {
        handle.put(opaque_handle());
        OK
    }
    Success fn cuLogsUnregisterCallback(_handle: Word) { OK }
    /// The undocumented tables through which a static CUDA runtime accesses the driver are missing. Without
    /// them every call of that runtime fails.
    Unsupported fn cuGetExportTable(out: Out<usize>, id: In<[u8; 16]>) {
        if id.get() == Some(CUPTI_FUNCTIONS) && is_cupti_13_loaded() {
            out.put((&raw const EMPTY_TABLE) as usize);
            return OK;
        }
        out.put(0);
        warn_about_static_runtime();
        INVALID_VALUE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_with_a_runtime_of_their_own_are_distinguished_from_nvidias() {
        for file in ["libcublas.so.13", "libcudnn_graph.so.9", "libnccl.so.2", "libtorch_cuda.so"] {
            assert!(is_known(file), "{file}");
        }
        for file in ["libcute_dsl_runtime.so", "runtime.cpython-311-x86_64-linux-gnu.so", ""] {
            assert!(!is_known(file), "{file}");
        }
    }
}
