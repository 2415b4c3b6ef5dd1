//! The torch functions that memtrace calls but does not hook, and the version of torch.

use std::path::{Path, PathBuf};

use crate::ffi::loaded_libraries::loaded_libraries;
use crate::ffi::symbols::{Home, Symbol};

/// Returns the folder of the Python package `torch`, which has a folder with torch's libraries. Returns `None` if
/// torch is not loaded.
pub(crate) fn folder() -> Option<PathBuf> {
    let c10 = loaded_libraries("libc10.so").into_iter().next()?;
    Some(Path::new(c10.to_str().ok()?).parent()?.parent()?.to_owned())
}

/// Returns torch's version from `torch/version.py`: `2.11.0+cu130`. Returns `None` if torch is not loaded or the
/// file cannot be read.
pub(crate) fn version() -> Option<String> {
    let text = std::fs::read_to_string(folder()?.join("version.py")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("__version__ = "))?;
    Some(line.trim().trim_matches(['\'', '"']).to_owned())
}

/// Returns the major and the minor version in a version text, or `None` if the text does not begin with two
/// numbers.
pub(crate) fn major_minor(version: &str) -> Option<(u32, u32)> {
    let mut parts = version.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// `c10::cuda::CUDAStream`: a device, and the id of the stream.
#[repr(C)]
struct Stream {
    device: u64,
    id: i64,
}

// SAFETY: the type is `CUDAStream c10::cuda::getCurrentCUDAStream(DeviceIndex)` in c10/cuda/CUDAStream.h, 2.1
// to 2.15. The function returns two words in registers.
static CURRENT_STREAM: Symbol<unsafe extern "C" fn(i8) -> Stream> =
    unsafe { Symbol::new(c"_ZN3c104cuda20getCurrentCUDAStreamEa", Home::Loaded("libc10_cuda.so")) };

/// Looks up the functions that a block report needs. A report runs under the allocator's mutex, where a
/// lookup could deadlock: a lookup takes the loader's lock, and the thread that holds this lock may run a
/// constructor that waits for the mutex.
pub(crate) fn prepare_reports() {
    let _ = CURRENT_STREAM.get();
}

/// Returns the id of the thread's current stream on `device`. Returns 0 for the default stream and if the
/// stream is unknown. The call reads thread-local state and takes no lock. torch's streams must be set up.
/// This is true while torch's allocator reports a block or requests a segment, because the allocator has just
/// asked for the stream itself.
#[inline]
pub(crate) fn current_stream(device: i8) -> i64 {
    // SAFETY: the allocator uses this device, and the streams are set up, see above.
    CURRENT_STREAM.cached().map_or(0, |current| unsafe { current(device) }.id)
}

// SAFETY: the type is `bool c10::GradMode::is_enabled()` in c10/core/GradMode.h, 2.1 to 2.15.
static IS_GRAD_ENABLED: Symbol<unsafe extern "C" fn() -> bool> =
    unsafe { Symbol::new(c"_ZN3c108GradMode10is_enabledEv", Home::Loaded("libc10.so")) };

/// Returns true if autograd records this thread's ops, or if this torch lacks the function that reports the
/// setting.
pub(crate) fn is_grad_enabled() -> bool {
    // SAFETY: the function takes no arguments and reads thread-local state.
    IS_GRAD_ENABLED.get().is_none_or(|is_enabled| unsafe { is_enabled() })
}

// SAFETY: the type is `bool at::isRecordFunctionEnabled()` in ATen/record_function.h, 2.1 to 2.15.
static ARE_OPS_OBSERVED: Symbol<unsafe extern "C" fn() -> bool> =
    unsafe { Symbol::new(c"_ZN2at23isRecordFunctionEnabledEv", Home::Loaded("libtorch_cpu.so")) };
// SAFETY: the type is `void at::enableRecordFunction(bool)`, as above.
static OBSERVE_OPS: Symbol<unsafe extern "C" fn(bool)> =
    unsafe { Symbol::new(c"_ZN2at20enableRecordFunctionEb", Home::Loaded("libtorch_cpu.so")) };

/// Enables or disables all op callbacks on this thread: the profilers' and memtrace's. Returns the previous
/// setting, or `None`, without a change, if torch lacks the functions.
pub(crate) fn observe_ops(observe: bool) -> Option<bool> {
    let (get, set) = (ARE_OPS_OBSERVED.get()?, OBSERVE_OPS.get()?);
    // SAFETY: both functions access a flag of the thread.
    unsafe {
        let before = get();
        set(observe);
        Some(before)
    }
}
