//! The version of the simulated driver.

use std::ffi::c_int;

use memtrace_machine::DEFAULT_CUDA_VERSION;

use crate::core::ffi::{Out, Status};

/// Returns the version of the simulated driver: the version of the CUDA runtime in the program's process, or
/// [`DEFAULT_CUDA_VERSION`] if the process has no runtime.
pub(crate) fn driver_version() -> c_int {
    type Version = unsafe extern "C" fn(Out<c_int>) -> Status;
    let mut version: c_int = 0;
    // SAFETY: looks a name up. This library does not define it.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cudaRuntimeGetVersion".as_ptr()) };
    if !found.is_null() {
        // SAFETY: the header of the runtime gives the function of that name this signature.
        let get_version: Version = unsafe { std::mem::transmute(found) };
        // SAFETY: `version` is valid for one write.
        unsafe { get_version(Out::to(&mut version)) };
    }
    if version > 0 { version } else { DEFAULT_CUDA_VERSION as c_int }
}
