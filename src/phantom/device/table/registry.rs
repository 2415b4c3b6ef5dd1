//! The registry of all exported functions, and the calls with which a program looks up functions by name.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::OnceLock;

use memtrace_cards::{FAULT_VARIABLE, Moment};

use crate::core::call_table::{AnswerKind, CallEntry, answers};
use crate::core::driver_version::driver_version;
use crate::core::faults;
use crate::core::ffi::{NOT_FOUND, OK, Out, Status, Text};
use crate::{cuda, kernels, libs, table};

/// The tables of entries, in the order in which `memtrace_phantom_describe` lists guesses and refusals.
static TABLES: &[&[&CallEntry]] = &[
    cuda::device_properties::TABLE,
    cuda::memory::TABLE,
    cuda::pointer_attributes::TABLE,
    cuda::ipc::TABLE,
    cuda::copy_calls::TABLE,
    cuda::pools::TABLE,
    cuda::streams::TABLE,
    cuda::host_functions::TABLE,
    cuda::events::TABLE,
    kernels::kernel::TABLE,
    cuda::captures::TABLE,
    cuda::graphs::TABLE,
    cuda::driver::TABLE,
    TABLE,
    kernels::modules::TABLE,
    cuda::vmm::TABLE,
    libs::library_calls::TABLE,
    libs::workspaces::TABLE,
    libs::handle_memory::TABLE,
    libs::cublas::TABLE,
    libs::cudnn::TABLE,
    libs::cudnn_conv::TABLE,
    libs::cudnn_norms::TABLE,
    libs::rnn::TABLE,
    libs::nccl::TABLE,
    libs::nvml::TABLE,
    libs::nvml_device::TABLE,
    libs::nvrtc::TABLE,
    table::generated::SUCCESS,
    table::generated::WORK,
    table::generated::FILLS,
    table::generated::UNSUPPORTED,
];

/// Returns all entries, in the order of the tables.
pub(crate) fn entries() -> impl Iterator<Item = &'static CallEntry> {
    TABLES.iter().flat_map(|table| table.iter().copied())
}

/// Ends the process with status 2 if a requested fault names a call that the phantom library does not answer.
#[ctor::ctor(unsafe)]
fn check_faults() {
    for fault in faults::requested().unwrap_or_default() {
        if let Moment::Call(call, _) = &fault.moment
            && find(call).is_none()
        {
            eprintln!(
                "memtrace: {FAULT_VARIABLE}: `{}`: no call is named {call} (memtrace doctor --phantom --json lists \
                 them)",
                fault.text
            );
            // SAFETY: the process ends before any code of the program has run, so no handler is skipped.
            unsafe { libc::_exit(2) }
        }
    }
}

/// Returns the entry of the exported function with this name, or `None` if the library exports no such
/// function.
fn find(name: &str) -> Option<&'static CallEntry> {
    static INDEX: OnceLock<HashMap<&'static str, &'static CallEntry>> = OnceLock::new();
    INDEX.get_or_init(|| entries().map(|entry| (entry.name, entry)).collect()).get(name).copied()
}

/// Returns the function that the driver would return for a base name: the newest answered version. Callers
/// that want an older version ask for its full name. `cuda` is the CUDA version that the caller requests.
fn entry_point(name: &str, cuda: c_int) -> Option<*const ()> {
    if name.is_empty() {
        return None;
    }
    // CUDA 12 added the fifth argument (cudaTypedefs.h: `PFN_cuGetProcAddress_v11030` and `_v12000`).
    if name == "cuGetProcAddress" && cuda < 12000 {
        return find(name).map(|entry| entry.function);
    }
    // CUDA 13 changed the arguments of this call; both versions are answered.
    let newest = if name == "cuStreamGetCaptureInfo" && driver_version() >= 13000 { "_v3" } else { "_v2" };
    let versioned = find(&format!("{name}{newest}"));
    let entry = versioned
        .filter(|entry| entry.kind != AnswerKind::Unsupported)
        .or_else(|| find(name))
        .or(versioned)?;
    Some(entry.function)
}

/// Implements `cuGetProcAddress`. For an unknown name, the call fails.
fn look_up(name: &str, cuda: c_int, function: Out<usize>, found: Out<c_int>) -> Status {
    match entry_point(name, cuda) {
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

/// Implements `cudaGetDriverEntryPoint`. For an unknown name, the call succeeds and reports the result
/// through `found`. It fails only if the program passes no `found`.
fn look_up_for_runtime(name: &str, cuda: c_int, function: Out<usize>, found: Out<c_int>) -> Status {
    match look_up(name, cuda, function, found) {
        NOT_FOUND if !found.is_null() => OK,
        status => status,
    }
}

answers! {
    Real fn cuGetProcAddress(name: Text, function: Out<usize>, version: c_int, _flags: u64) {
        look_up(name.str(), version, function, Out::null())
    }
    Real fn cuGetProcAddress_v2(
        name: Text, function: Out<usize>, version: c_int, _flags: u64, found: Out<c_int>,
    ) {
        look_up(name.str(), version, function, found)
    }
    Real fn cudaGetDriverEntryPoint(name: Text, function: Out<usize>, _flags: u64, found: Out<c_int>) {
        look_up_for_runtime(name.str(), driver_version(), function, found)
    }
    Real fn cudaGetDriverEntryPointByVersion(
        name: Text, function: Out<usize>, version: u32, _flags: u64, found: Out<c_int>,
    ) {
        look_up_for_runtime(name.str(), version as c_int, function, found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_that_a_fault_may_name_as_an_allocation_is_answered() {
        for name in memtrace_cards::ALLOCATIONS {
            assert!(find(name).is_some_and(|entry| entry.kind != AnswerKind::Unsupported), "{name}");
        }
    }
}
