//! The initialization of the driver: the calls that need it, and the calls that bring it about.
//!
//! "If cuInit() has not been called, any function from the driver API will return
//! CUDA_ERROR_NOT_INITIALIZED" (CUDA Driver API, Initialization). The runtime initializes the driver by
//! itself (CUDA C++ Programming Guide, Initialization). The name of a call decides: the macros that define
//! the exported functions ask [`Initialization::of`] while the library is compiled.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::core::ffi::{NO_DEVICE, OK, Status};
use crate::core::host_state::host_state;

/// What a call has to do with the initialization of the driver.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Initialization {
    /// It fails before the driver is initialized.
    Needed,
    /// It initializes the driver.
    Implied,
    /// Neither.
    Unrelated,
}

/// Driver calls that work without `cuInit`: those of the version, of errors and of entry points, which
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

/// Runtime calls that work on no device.
const WITHOUT_DEVICE: [&str; 5] = [
    "cudaDriverGetVersion",
    "cudaGetLastError",
    "cudaPeekAtLastError",
    "cudaGetDriverEntryPoint",
    "cudaGetDriverEntryPointByVersion",
];

impl Initialization {
    /// The rule for the call with this name. A math library creates its handles through the runtime.
    pub(crate) const fn of(name: &str) -> Self {
        let bytes = name.as_bytes();
        let is_driver = starts_with(name, "cu") && bytes.len() > 2 && bytes[2].is_ascii_uppercase();
        if is_driver {
            return if is_in(name, &WITHOUT_INIT) { Self::Unrelated } else { Self::Needed };
        }
        let is_runtime = starts_with(name, "cuda") && !is_in(name, &WITHOUT_DEVICE);
        let is_library = !starts_with(name, "nvml") && !starts_with(name, "__cuda");
        if is_runtime || is_library && contains(name, "Create") {
            return Self::Implied;
        }
        Self::Unrelated
    }

    /// Applies the rule to a call: the status with which it must fail.
    #[inline]
    pub(crate) fn refusal(self) -> Option<Status> {
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

/// `CUDA_ERROR_NOT_INITIALIZED`.
const NOT_INITIALIZED: Status = cudarc::driver::sys::cudaError_enum::CUDA_ERROR_NOT_INITIALIZED as Status;

static INITIALIZED: AtomicBool = AtomicBool::new(false);

/// Initializes the driver, which needs a device.
pub(crate) fn initialize() -> Status {
    if host_state().devices.is_empty() {
        return NO_DEVICE;
    }
    INITIALIZED.store(true, Ordering::Relaxed);
    OK
}

/// Whether a text begins with another.
const fn starts_with(text: &str, start: &str) -> bool {
    matches_at(text.as_bytes(), start.as_bytes(), 0)
}

const fn contains(text: &str, part: &str) -> bool {
    let mut at = 0;
    while at < text.len() {
        if matches_at(text.as_bytes(), part.as_bytes(), at) {
            return true;
        }
        at += 1;
    }
    false
}

const fn matches_at(text: &[u8], part: &[u8], at: usize) -> bool {
    if text.len() < at + part.len() {
        return false;
    }
    let mut index = 0;
    while index < part.len() {
        if text[at + index] != part[index] {
            return false;
        }
        index += 1;
    }
    true
}

/// Whether a name is in a list.
pub(crate) const fn is_in(name: &str, list: &[&str]) -> bool {
    let mut index = 0;
    while index < list.len() {
        if name.len() == list[index].len() && starts_with(name, list[index]) {
            return true;
        }
        index += 1;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_a_call_tells_its_part_in_the_initialization() {
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
            assert!(Initialization::of(name) == rule, "{name}");
        }
    }
}
