//! The rules that make a call fail before it does any work: the driver is not initialized, a fault is
//! injected, or a stream is captured. The name of a call determines its rules. The macros that define the
//! exported functions evaluate [`CallRules::from_name`] at compile time.
//!
//! "If cuInit() has not been called, any function from the driver API will return
//! CUDA_ERROR_NOT_INITIALIZED" (CUDA Driver API, Initialization). The runtime initializes the driver by
//! itself (CUDA C++ Programming Guide, Initialization).
//!
//! While a stream is captured, "some actions, such as a call to cudaMalloc, may be unsafe"
//! (`cudaThreadExchangeStreamCaptureMode` in `cuda_runtime_api.h`). NVIDIA does not list the other unsafe
//! calls. This module assumes that a call is unsafe if it allocates or frees at once, or waits for the
//! device. ROCm refuses the same calls, "to match the behavior of CUDA" (its release notes, Stream capture).
//! The functions that take a stream or an event check the capture rules for it themselves.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::core::capture;
use crate::core::const_text::{contains, is_in, starts_with};
use crate::core::faults::{self, CallRole};
use crate::core::ffi::{NO_DEVICE, OK, Status};
use crate::core::host_state::{current, fail, host_state, last_error, set_last_error};
use crate::core::on_behalf::is_on_behalf;

/// The conditions under which one call fails at once: the driver is not initialized, a fault is injected, or
/// a stream is captured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallRules {
    name: &'static str,
    role: CallRole,
    initialization: Initialization,
    capture: CaptureRule,
    /// True for a call of the runtime, which stores the status of a refusal for `cudaGetLastError`.
    is_runtime: bool,
    /// True for a call of the driver, which stores no status there. It shares functions with calls of the runtime.
    is_driver: bool,
}

impl CallRules {
    /// Returns the rules for the call with this name.
    pub(crate) const fn from_name(name: &'static str) -> Self {
        Self {
            name,
            role: role_of(name),
            initialization: Initialization::from_name(name),
            capture: CaptureRule::from_name(name),
            is_runtime: starts_with(name, "cuda"),
            is_driver: is_driver(name),
        }
    }

    /// Returns a value that restores the thread's last error when it is dropped, if this is a call of the driver.
    #[inline]
    pub(crate) fn keeps_last_error(self) -> KeptError {
        KeptError(self.is_driver.then(|| last_error(false)))
    }

    /// Returns the status with which the call must fail, or `None` if it is allowed.
    #[inline]
    pub(crate) fn refusal(self) -> Option<Status> {
        if let Some(status) = self.initialization.refusal() {
            return Some(status);
        }
        if faults::are_armed()
            && let Some(status) = self.fault()
        {
            return Some(status);
        }
        let status = self.capture.refusal()?;
        Some(if self.is_runtime { fail(status) } else { status })
    }
}

/// Returns true if the names of one function, such as `cudaFree` and `cuMemFree_v2`, have the same rule for captures.
/// The macro that defines the functions checks it.
pub(crate) const fn agree_on_captures(names: &[&str]) -> bool {
    let mut index = 1;
    while index < names.len() {
        if CaptureRule::from_name(names[index]) as u8 != CaptureRule::from_name(names[0]) as u8 {
            return false;
        }
        index += 1;
    }
    true
}

/// The last error of the thread before a call of the driver.
pub(crate) struct KeptError(Option<Status>);

impl Drop for KeptError {
    #[inline]
    fn drop(&mut self) {
        if let Some(status) = self.0 {
            set_last_error(status);
        }
    }
}

/// Returns true for the name of a function of the driver, such as `cuMemAlloc_v2`.
const fn is_driver(name: &str) -> bool {
    starts_with(name, "cu") && name.len() > 2 && name.as_bytes()[2].is_ascii_uppercase()
}

impl CallRules {
    /// Returns the status with which an injected fault makes the call fail, or `None` if no fault does.
    #[cold]
    fn fault(self) -> Option<Status> {
        let status = faults::refusal(self.name, self.role, current().card, code_of(self.name))?;
        // `cudaGetLastError` only reports the error of an unusable context. It must not store the error
        // again.
        Some(if self.is_runtime && self.role != CallRole::LastError { fail(status) } else { status })
    }
}

/// Returns the role that the call with this name has for injected faults.
const fn role_of(name: &str) -> CallRole {
    let is_runtime = starts_with(name, "cuda");
    let is_driver = is_driver(name);
    if is_in(name, &["cudaGetLastError", "cudaPeekAtLastError"]) {
        CallRole::LastError
    } else if is_in(name, &memtrace_cards::ALLOCATIONS) {
        CallRole::Allocation
    } else if is_in(name, &["cudaMemGetInfo", "cuMemGetInfo_v2"]) || contains(name, "Launch") {
        CallRole::Other
    } else if starts_with(name, "nvml") || starts_with(name, "__cuda") {
        CallRole::None
    } else if is_runtime || is_driver {
        // Calls with these names query the driver, its devices or its errors, so they need no context.
        let without = contains(name, "DeviceGet")
            || contains(name, "GetDevice")
            || contains(name, "SetDevice")
            || contains(name, "Version")
            || contains(name, "EntryPoint")
            || contains(name, "GetError")
            || contains(name, "GetProcAddress")
            || contains(name, "Occupancy")
            || contains(name, "PrimaryCtx")
            || contains(name, "PeerAccess")
            || contains(name, "FuncGet")
            || starts_with(name, "cuInit")
            || starts_with(name, "cuCtx") && !contains(name, "Synchronize");
        if without { CallRole::None } else { CallRole::Context }
    } else if contains(name, "Destroy") || contains(name, "Set") || contains(name, "Get") {
        CallRole::None
    } else {
        CallRole::Context
    }
}

/// Returns a function that converts a runtime status of an injected fault to the status that the library of
/// this call would return. Math libraries and NCCL have one status for every CUDA error.
fn code_of(name: &str) -> fn(Status) -> Status {
    match name {
        _ if name.starts_with("cublas") => |_| 13, // CUBLAS_STATUS_EXECUTION_FAILED
        _ if name.starts_with("cudnn") => |_| 5000, // CUDNN_STATUS_EXECUTION_FAILED since cuDNN 9
        _ if name.starts_with("cufft") => |_| 6,   // CUFFT_EXEC_FAILED
        _ if name.starts_with("cusparse") || name.starts_with("cusolver") => |_| 6, // ..._EXECUTION_FAILED
        _ if name.starts_with("curand") => |_| 201, // CURAND_STATUS_LAUNCH_FAILURE
        _ if name.starts_with("nccl") => |_| 1,    // ncclUnhandledCudaError
        _ => |status| status,
    }
}

/// The rule for a call while a stream is captured.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CaptureRule {
    /// The name alone implies no rule.
    Free,
    /// The call is potentially unsafe: the modes of the thread and of the captures decide.
    Unsafe,
    /// The call waits for the device.
    Device,
    /// The call queues work in the legacy default stream and waits for it: "It is therefore also invalid to
    /// call synchronous APIs in this case" (CUDA C++ Programming Guide, Prohibited and Unhandled Operations).
    Synchronous,
}

const UNSAFE: [&str; 21] = [
    "cudaMalloc",
    "cudaMallocManaged",
    "cudaMallocPitch",
    "cudaMalloc3D",
    "cudaFree",
    "cudaMallocHost",
    "cudaHostAlloc",
    "cudaFreeHost",
    "cudaDeviceSetMemPool",
    "cudaMemPoolCreate",
    "cudaMemPoolDestroy",
    "cuDeviceSetMemPool",
    "cuMemPoolCreate",
    "cuMemPoolDestroy",
    "cuMemAlloc_v2",
    "cuMemAllocManaged",
    "cuMemAllocPitch_v2",
    "cuMemFree_v2",
    "cuMemAllocHost_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
];

const DEVICE: [&str; 3] = ["cudaDeviceSynchronize", "cudaDeviceReset", "cuCtxSynchronize"];

const SYNCHRONOUS: [&str; 12] = [
    "cudaMemcpy",
    "cudaMemcpyPeer",
    "cudaMemcpy2D",
    "cudaMemcpyToSymbol",
    "cudaMemset",
    "cuMemcpy",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyDtoD_v2",
    "cuMemsetD8_v2",
    "cuMemsetD16_v2",
    "cuMemsetD32_v2",
];

impl CaptureRule {
    const fn from_name(name: &str) -> Self {
        if is_in(name, &UNSAFE) {
            Self::Unsafe
        } else if is_in(name, &DEVICE) {
            Self::Device
        } else if is_in(name, &SYNCHRONOUS) {
            Self::Synchronous
        } else {
            Self::Free
        }
    }

    #[inline]
    fn refusal(self) -> Option<Status> {
        match self {
            Self::Free => None,
            // A library relaxes the mode of its thread before it allocates for itself.
            Self::Unsafe if is_on_behalf() => None,
            Self::Unsafe => capture::refuse_unsafe(),
            Self::Device => capture::refuse_device(current().index),
            Self::Synchronous => capture::refuse_legacy(current().index).or_else(capture::refuse_unsafe),
        }
    }
}

/// The dependence of a call on the initialization of the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Initialization {
    /// The call fails before the driver is initialized.
    Needed,
    /// The call initializes the driver.
    Implied,
    /// The call neither needs nor initializes the driver.
    Unrelated,
}

/// Driver calls that work without `cuInit`: calls for the version, for errors and for entry points, which
/// `cuda.h` documents without CUDA_ERROR_NOT_INITIALIZED. `cuGetExportTable` is undocumented.
const WITHOUT_INIT: [&str; 7] = [
    "cuInit",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuGetErrorName",
    "cuGetProcAddress",
    "cuGetProcAddress_v2",
    "cuGetExportTable",
];

/// Runtime calls that work without a device.
const WITHOUT_DEVICE: [&str; 5] = [
    "cudaDriverGetVersion",
    "cudaGetLastError",
    "cudaPeekAtLastError",
    "cudaGetDriverEntryPoint",
    "cudaGetDriverEntryPointByVersion",
];

impl Initialization {
    /// Returns the rule for the call with this name. A call that creates a handle of a math library uses the
    /// runtime, which initializes the driver.
    const fn from_name(name: &str) -> Self {
        if is_driver(name) {
            return if is_in(name, &WITHOUT_INIT) { Self::Unrelated } else { Self::Needed };
        }
        let is_runtime = starts_with(name, "cuda") && !is_in(name, &WITHOUT_DEVICE);
        let is_library = !starts_with(name, "nvml") && !starts_with(name, "__cuda");
        if is_runtime || is_library && contains(name, "Create") {
            return Self::Implied;
        }
        Self::Unrelated
    }

    /// Applies the rule to a call. Returns the status with which the call must fail,
    /// or `None` if it is allowed.
    #[inline]
    fn refusal(self) -> Option<Status> {
        match self {
            Self::Needed if !INITIALIZED.load(Ordering::Relaxed) => Some(NOT_INITIALIZED),
            Self::Implied if !INITIALIZED.load(Ordering::Relaxed) => {
                initialize();
                None
            }
            _ => None,
        }
    }
}

/// The status of a driver call before `cuInit` (`CUDA_ERROR_NOT_INITIALIZED`).
const NOT_INITIALIZED: Status = cudarc::driver::sys::cudaError_enum::CUDA_ERROR_NOT_INITIALIZED as Status;

static INITIALIZED: AtomicBool = AtomicBool::new(false);

/// Initializes the driver. Fails without a visible device.
pub(crate) fn initialize() -> Status {
    if host_state().devices.is_empty() {
        return NO_DEVICE;
    }
    INITIALIZED.store(true, Ordering::Relaxed);
    OK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_a_function_that_captures_forbid_in_part_do_not_agree() {
        assert!(agree_on_captures(&["cudaMemPoolCreate", "cuMemPoolCreate"]));
        assert!(!agree_on_captures(&["cudaProfilerStart", "cudaMemPoolCreate"]));
    }

    #[test]
    fn the_name_of_a_call_gives_its_part_in_the_initialization() {
        for (name, rule) in [
            ("cuDeviceGetCount", Initialization::Needed),
            ("cuGetProcAddress_v2", Initialization::Unrelated),
            ("cuMemAlloc_v2", Initialization::Needed),
            ("cudaMalloc", Initialization::Implied),
            ("cudaGetLastError", Initialization::Unrelated),
            ("__cudaRegisterFunction", Initialization::Unrelated),
            ("cublasCreate_v2", Initialization::Implied),
            ("cublasGetVersion_v2", Initialization::Unrelated),
            ("nvmlInit_v2", Initialization::Unrelated),
        ] {
            assert!(Initialization::from_name(name) == rule, "{name}");
        }
    }
}
