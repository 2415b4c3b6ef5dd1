//! NVML: the memory of a device and of the processes on it, as nvidia-smi shows them.
//!
//! The library is loaded on first use, and may be missing. Nothing here runs in a hook. The types are from
//! nvml.h, which `cudarc` does not cover.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::null_mut;

use crate::ffi::cuda;
use crate::ffi::symbols::{find_global, find_in, function};

/// `nvmlDevice_t`.
type Device = *mut c_void;

/// `nvmlProcessInfo_t`, versions `_v2` and `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct ProcessMemory {
    /// The process id on the host.
    pub(crate) pid: c_uint,
    /// The bytes used on the device, or a value that [`bytes`] recognizes as unavailable.
    pub(crate) used: u64,
    pub(crate) instances: [c_uint; 2],
}

const _: () = assert!(size_of::<ProcessMemory>() == 24 && align_of::<ProcessMemory>() == 8);

/// The values that mean "not available": `NVML_VALUE_NOT_AVAILABLE`, and `u64::MAX - 1`, which some drivers
/// return.
const NOT_AVAILABLE: [u64; 2] = [u64::MAX, u64::MAX - 1];
/// The maximum number of processes that are read from a list. A longer list counts as missing.
const MAX_PROCESSES: usize = 512;
/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;

type Init = unsafe extern "C" fn() -> c_int;
type ByText = unsafe extern "C" fn(*const c_char, *mut Device) -> c_int;
/// `nvmlMemory_t` and `nvmlBAR1Memory_t`, in bytes: total, free, used.
type Memory = unsafe extern "C" fn(Device, *mut [u64; 3]) -> c_int;
type Memory2 = unsafe extern "C" fn(Device, *mut MemoryWithReserve) -> c_int;
type Processes = unsafe extern "C" fn(Device, *mut c_uint, *mut ProcessMemory) -> c_int;

/// `nvmlMemory_v2_t`, in bytes. Unlike `nvmlMemory_t`, it does not count the driver's reserve as used.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct MemoryWithReserve {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const _: () = assert!(size_of::<MemoryWithReserve>() == 40);

/// `nvmlMemory_v2`: the size of the struct and its version.
const MEMORY_2: c_uint = size_of::<MemoryWithReserve>() as c_uint | 2 << 24;

/// The functions of NVML, which stays loaded.
#[derive(Clone, Copy)]
pub(crate) struct Nvml {
    by_uuid: ByText,
    by_bus: Option<ByText>,
    memory: Memory,
    memory_2: Option<Memory2>,
    processes: Option<Processes>,
    mps_processes: Option<Processes>,
    bar1: Option<Memory>,
}

/// The memory of a device, in bytes. A field is `None` if the device does not report it.
pub(crate) struct DeviceMemory {
    /// The total without the driver's reserve, as `cudaMemGetInfo` reports it. Drivers before 510 do not
    /// report the reserve, and count it as used.
    pub(crate) total: Option<i64>,
    pub(crate) free: Option<i64>,
    pub(crate) bar1: Option<i64>,
    /// The processes on the device; `None` if the device has no such list.
    pub(crate) processes: Option<Vec<ProcessMemory>>,
}

impl Nvml {
    /// Loads and initializes NVML. Returns `None` if NVML is missing or cannot be initialized.
    pub(crate) fn load() -> Option<Nvml> {
        // A preloaded phantom device is in the global scope. Otherwise `dlopen` loads the library, or returns
        // the library that is already loaded.
        let mut handle = libc::RTLD_DEFAULT;
        let memory = c"nvmlDeviceGetMemoryInfo";
        if find_global(memory).is_null() {
            // SAFETY: the name ends in 0. Loading the library runs NVIDIA's constructors, on memtrace's own
            // thread.
            handle =
                unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
            if handle.is_null() {
                return None;
            }
        }
        // SAFETY: the handle is open and stays open.
        let find = |name: &CStr| unsafe { find_in(handle, name) };
        // SAFETY: here and below, the types are the ones in nvml.h.
        let init: Init = unsafe { function(find(c"nvmlInit_v2")) }?;
        // SAFETY: the function takes no arguments and may be called more than once.
        if unsafe { init() } != SUCCESS {
            return None;
        }
        // The lists of `_v2` and `_v3` have entries of the same layout; the entries of the first version are
        // shorter.
        let list = |names: [&CStr; 2]| {
            // SAFETY: as above.
            names.into_iter().find_map(|name| unsafe { function::<Processes>(find(name)) })
        };
        Some(Nvml {
            // SAFETY: as above.
            by_uuid: unsafe { function(find(c"nvmlDeviceGetHandleByUUID")) }?,
            // SAFETY: as above.
            by_bus: unsafe { function(find(c"nvmlDeviceGetHandleByPciBusId_v2")) },
            // SAFETY: as above.
            memory: unsafe { function(find(memory)) }?,
            // SAFETY: as above.
            memory_2: unsafe { function(find(c"nvmlDeviceGetMemoryInfo_v2")) },
            processes: list([
                c"nvmlDeviceGetComputeRunningProcesses_v3",
                c"nvmlDeviceGetComputeRunningProcesses_v2",
            ]),
            mps_processes: list([
                c"nvmlDeviceGetMPSComputeRunningProcesses_v3",
                c"nvmlDeviceGetMPSComputeRunningProcesses_v2",
            ]),
            // SAFETY: as above; nvmlBAR1Memory_t has the same three numbers in the same order.
            bar1: unsafe { function(find(c"nvmlDeviceGetBAR1MemoryInfo")) },
        })
    }

    /// Returns the memory of the device with the driver's number `ordinal`, or `None` if NVML does not know
    /// the device.
    pub(crate) fn memory(&self, ordinal: c_int) -> Option<DeviceMemory> {
        let device = self.device(ordinal)?;
        let mut sizes = [0; 3];
        let (total, free) = self.total_and_free(device);
        // SAFETY: as above.
        let has_bar1 = self.bar1.is_some_and(|bar1| unsafe { bar1(device, &raw mut sizes) } == SUCCESS);
        let bar1 = bytes(sizes[2]).filter(|_| has_bar1);
        Some(DeviceMemory { total, free, bar1, processes: self.processes_on(device) })
    }

    /// Returns the total without the driver's reserve and the free bytes of a device. A device without its own
    /// memory has no such figures, but may have a list of processes.
    fn total_and_free(&self, device: Device) -> (Option<i64>, Option<i64>) {
        let mut memory = MemoryWithReserve { version: MEMORY_2, ..MemoryWithReserve::default() };
        // SAFETY: NVML returned the device, and `memory` is valid for writes and has its version.
        if self.memory_2.is_some_and(|ask| unsafe { ask(device, &raw mut memory) } == SUCCESS) {
            let reserved = bytes(memory.reserved).unwrap_or(0);
            return (bytes(memory.total).map(|total| total - reserved.min(total)), bytes(memory.free));
        }
        let mut sizes = [0; 3];
        // SAFETY: NVML returned the device, and `sizes` is valid for writes.
        let has_memory = unsafe { (self.memory)(device, &raw mut sizes) } == SUCCESS;
        let known = |size| bytes(size).filter(|_| has_memory);
        (known(sizes[0]), known(sizes[1]))
    }

    /// Returns the processes on a device, or `None` if NVML has no list for the device. Adds the MPS clients,
    /// which are in a separate list.
    fn processes_on(&self, device: Device) -> Option<Vec<ProcessMemory>> {
        let mut all = list(self.processes, device)?;
        for client in list(self.mps_processes, device).unwrap_or_default() {
            if all.iter().all(|process| process.pid != client.pid) {
                all.push(client);
            }
        }
        Some(all)
    }

    /// Returns the device with the driver's number `ordinal`, by its UUID or its PCI bus id. A MIG instance
    /// has a UUID like any device. The driver has already applied `CUDA_VISIBLE_DEVICES`.
    fn device(&self, ordinal: c_int) -> Option<Device> {
        let mut device = null_mut();
        if let Some(uuid) = cuda::device_uuid(ordinal) {
            for prefix in ["GPU", "MIG"] {
                let text = CString::new(format!("{prefix}-{}", uuid_text(&uuid))).ok()?;
                // SAFETY: a C string, and `device` is valid for writes.
                if unsafe { (self.by_uuid)(text.as_ptr(), &raw mut device) } == SUCCESS {
                    return Some(device);
                }
            }
        }
        let (by_bus, bus) = (self.by_bus?, cuda::device_bus_id(ordinal)?);
        // SAFETY: a C string, and `device` is valid for writes.
        (unsafe { by_bus(bus.as_ptr(), &raw mut device) } == SUCCESS).then_some(device)
    }
}

/// Returns the processes in a list, or `None` if the device does not have the list.
fn list(get: Option<Processes>, device: Device) -> Option<Vec<ProcessMemory>> {
    let mut processes = vec![ProcessMemory::default(); MAX_PROCESSES];
    let mut count = MAX_PROCESSES as c_uint;
    // SAFETY: NVML returned the device, and there is room for `count` entries.
    if unsafe { get?(device, &raw mut count, processes.as_mut_ptr()) } != SUCCESS {
        return None;
    }
    processes.truncate(count as usize);
    Some(processes)
}

/// Converts a number of bytes from NVML or the driver. Returns `None` if the value is marked as unavailable.
pub(crate) fn bytes(value: u64) -> Option<i64> {
    (!NOT_AVAILABLE.contains(&value)).then(|| i64::try_from(value).ok()).flatten()
}

/// Formats a UUID as `00112233-4455-...`.
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    parts.map(|part| &hex[part]).join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_written_as_nvml_reads_it() {
        let uuid = std::array::from_fn(|index| index as u8);
        assert_eq!(uuid_text(&uuid), "00010203-0405-0607-0809-0a0b0c0d0e0f");
    }

    #[test]
    fn an_unavailable_number_of_bytes_is_unknown() {
        assert_eq!((bytes(u64::MAX), bytes(u64::MAX - 1), bytes(7)), (None, None, Some(7)));
    }
}
