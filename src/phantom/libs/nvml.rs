//! The part of NVML that PyTorch calls for the text of an out-of-memory error: the processes on a device and
//! their memory. [`dlopen`](crate::core::dlopen) loads this library as `libnvidia-ml.so.1`.
//!
//! cudarc has no NVML, so its structs and codes are declared here, as in `nvml.h`.

use std::ffi::{c_char, c_int};

use crate::core::call_table::{answers, by_contract};
use crate::core::device::Device;
use crate::core::ffi::{InOut, OK, Out, Status, Text, Word};
use crate::core::host_state::host_state;
use crate::cuda::device_attributes::{bus_id, driver_version, uuid_text};

/// `NVML_ERROR_INVALID_ARGUMENT`.
const INVALID_ARGUMENT: Status = 2;
/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Status = 3;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const INSUFFICIENT_SIZE: Status = 7;

/// An NVML device handle: the index of the device plus 1, so that none is null. NVML lists the devices that
/// `CUDA_VISIBLE_DEVICES` hides, too; the visible ones come first.
fn index_of(handle: usize) -> Option<usize> {
    handle.checked_sub(1).filter(|&index| index < host_state().spec.count as usize)
}

/// The device of a handle, if it is visible.
fn visible_device(handle: usize) -> Option<&'static Device> {
    host_state().devices.get(index_of(handle)?)
}

fn give_handle(index: Option<usize>, out: Out<usize>) -> Status {
    match index {
        Some(index) => out.give(index + 1),
        None => INVALID_ARGUMENT,
    }
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessInfo {
    pid: u32,
    used_bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

const _: () = assert!(size_of::<ProcessInfo>() == 24);

/// `nvmlMemory_t` and `nvmlBAR1Memory_t`, which have one layout. In bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// The bytes that this process has on a device, with its context.
fn own_bytes(device: &Device) -> u64 {
    device.vram().usage().0 + host_state().spec.context
}

fn memory_info(device: &Device) -> MemoryInfo {
    let spec = &host_state().spec;
    let used = own_bytes(device) + spec.others;
    MemoryInfo { total: spec.memory, free: spec.memory - used, used }
}

/// The process id that stands for all other processes: the first process of a machine, which uses no device.
const OTHER_PID: u32 = 1;

/// Lists the processes on a device.
///
/// # Safety
/// `list` is null or has as many elements as `count` holds.
unsafe fn processes(handle: usize, count: InOut<u32>, list: Out<ProcessInfo>) -> Status {
    let Some(device) = visible_device(handle) else { return INVALID_ARGUMENT };
    let info =
        |pid, used_bytes| ProcessInfo { pid, used_bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX };
    let mut all = vec![info(std::process::id(), own_bytes(device))];
    let others = host_state().spec.others;
    if others > 0 {
        all.push(info(OTHER_PID, others));
    }
    let capacity = count.input().get().unwrap_or(0) as usize;
    count.output().put(all.len() as u32);
    if capacity < all.len() {
        return INSUFFICIENT_SIZE;
    }
    for (index, process) in all.into_iter().enumerate() {
        // SAFETY: index < capacity.
        unsafe { list.at(index) }.put(process);
    }
    OK
}

/// The visible device with this PCI address. NVML writes the domain with eight digits, the runtime with four.
fn index_of_bus_id(id: &str) -> Option<usize> {
    let without_domain =
        |text: &str| text.rsplit(':').take(2).map(str::to_ascii_uppercase).collect::<Vec<_>>();
    (0..host_state().devices.len()).find(|&index| without_domain(&bus_id(index)) == without_domain(id))
}

fn index_of_uuid(uuid: &str) -> Option<usize> {
    (0..host_state().devices.len()).find(|&index| uuid_text(index) == uuid)
}

/// Success for the handle of a device.
fn check_handle(handle: usize) -> Status {
    if index_of(handle).is_some() { OK } else { INVALID_ARGUMENT }
}

answers! {
    Real fn nvmlInit() { OK }
    Real fn nvmlInit_v2() { OK }
    Real fn nvmlInitWithFlags(_flags: u32) { OK }
    Real fn nvmlShutdown() { OK }
    Real fn nvmlErrorString(_status: Status) -> *const c_char { c"phantom NVML error".as_ptr() }
    Real fn nvmlSystemGetCudaDriverVersion(out: Out<c_int>) { out.give(driver_version()) }
    Real fn nvmlSystemGetCudaDriverVersion_v2(out: Out<c_int>) { out.give(driver_version()) }
    Real fn nvmlSystemGetDriverVersion(out: Out<c_char>, capacity: u32) {
        by_contract!(out.text("580.00", capacity as usize));
        OK
    }
    Real fn nvmlDeviceGetCount_v2(out: Out<u32>) { out.give(host_state().spec.count) }
    Real fn nvmlDeviceGetHandleByIndex_v2(index: u32, out: Out<usize>) {
        give_handle(index_of(index as usize + 1), out)
    }
    Real fn nvmlDeviceGetHandleByPciBusId_v2(id: Text, out: Out<usize>) {
        give_handle(index_of_bus_id(id.str()), out)
    }
    Real fn nvmlDeviceGetHandleByUUID(uuid: Text, out: Out<usize>) {
        give_handle(index_of_uuid(uuid.str()), out)
    }
    Real fn nvmlDeviceGetName(handle: Word, out: Out<c_char>, capacity: u32) {
        by_contract!(out.text(&host_state().spec.name, capacity as usize));
        check_handle(handle)
    }
    Real fn nvmlDeviceGetUUID(handle: Word, out: Out<c_char>, capacity: u32) {
        let Some(index) = index_of(handle) else { return INVALID_ARGUMENT };
        by_contract!(out.text(&uuid_text(index), capacity as usize));
        OK
    }
    Real fn nvmlDeviceGetIndex(handle: Word, out: Out<u32>) {
        index_of(handle).map_or(INVALID_ARGUMENT, |index| out.give(index as u32))
    }
    Real fn nvmlDeviceGetMemoryInfo(handle: Word, out: Out<MemoryInfo>) {
        visible_device(handle).map_or(INVALID_ARGUMENT, |device| out.give(memory_info(device)))
    }
    /// A window as large as the memory, as on data-centre cards, and the little of it that a process maps.
    /// Not a guess: no amount of memory follows from it, and the tracer's own samples call it in every run.
    Real fn nvmlDeviceGetBAR1MemoryInfo(handle: Word, out: Out<MemoryInfo>) {
        if visible_device(handle).is_none() {
            return INVALID_ARGUMENT;
        }
        let (total, used) = (host_state().spec.memory.next_power_of_two(), 2 << 20);
        out.give(MemoryInfo { total, free: total - used, used })
    }
    Real fn nvmlDeviceGetComputeRunningProcesses(handle: Word, count: InOut<u32>, list: Out<ProcessInfo>) {
        by_contract!(processes(handle, count, list))
    }
    Real fn nvmlDeviceGetComputeRunningProcesses_v2(handle: Word, count: InOut<u32>, list: Out<ProcessInfo>) {
        by_contract!(processes(handle, count, list))
    }
    Real fn nvmlDeviceGetComputeRunningProcesses_v3(handle: Word, count: InOut<u32>, list: Out<ProcessInfo>) {
        by_contract!(processes(handle, count, list))
    }
    Real fn nvmlDeviceGetCudaComputeCapability(handle: Word, major: Out<c_int>, minor: Out<c_int>) {
        let (a, b) = host_state().spec.cc;
        major.put(a as c_int);
        minor.put(b as c_int);
        check_handle(handle)
    }
    Real fn nvmlDeviceGetP2PStatus(_from: Word, _to: Word, _kind: c_int, out: Out<c_int>) { out.give(0) }
    Unsupported fn nvmlDeviceGetNvLinkRemoteDeviceType(_handle: Word, _link: u32, _out: Word) {
        NOT_SUPPORTED
    }
    Unsupported fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_handle: Word, _link: u32, _out: Word) {
        NOT_SUPPORTED
    }
    Unsupported fn nvmlDeviceGetGpuFabricInfoV(_handle: Word, _out: Word) { NOT_SUPPORTED }
    Unsupported fn nvmlDeviceGetUtilizationRates(_handle: Word, _out: Word) { NOT_SUPPORTED }
    Unsupported fn nvmlDeviceGetTemperature(_handle: Word, _sensor: c_int, _out: Word) { NOT_SUPPORTED }
    Unsupported fn nvmlDeviceGetPowerUsage(_handle: Word, _out: Word) { NOT_SUPPORTED }
    Unsupported fn nvmlDeviceGetClockInfo(_handle: Word, _kind: c_int, _out: Word) { NOT_SUPPORTED }
}
