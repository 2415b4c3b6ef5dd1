//! The part of NVML that PyTorch asks, when `libnvidia-ml.so.1` is found to be this library: the
//! processes on a device and their memory, for the text of an out-of-memory error.

use std::ffi::{c_char, c_int};

use crate::core::ffi::{OK, Out, Status, Text, Word};
use crate::core::host_state::{Device, machine};
use crate::cuda::device_properties::{bus_id, driver_version, uuid_text};
use crate::table::call_table::answers;

/// `NVML_ERROR_INVALID_ARGUMENT`, `NVML_ERROR_NOT_SUPPORTED`.
const INVALID: Status = 2;
const UNSUPPORTED: Status = 3;
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
const TOO_SMALL: Status = 7;

/// The index of a handle: one less, so that none is null. NVML knows the devices that
/// `CUDA_VISIBLE_DEVICES` hides as well; the visible ones come first.
fn index(handle: usize) -> Option<usize> {
    handle.checked_sub(1).filter(|&index| index < machine().spec.count as usize)
}

/// The device of a handle, when it is a visible one.
fn device(handle: usize) -> Option<&'static Device> {
    machine().devices.get(index(handle)?)
}

fn by(found: Option<usize>, out: Out<usize>) -> Status {
    match found {
        Some(index) => out.give(index + 1),
        None => INVALID,
    }
}

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process {
    pid: u32,
    used: u64,
    instances: [u32; 2],
}

/// What this process has, its context too.
fn own(device: &Device) -> u64 {
    device.vram().usage().0 + machine().spec.context
}

/// Total, free and used bytes.
fn memory(device: &Device) -> [u64; 3] {
    let spec = &machine().spec;
    let taken = own(device) + spec.others;
    [spec.memory, spec.memory - taken, taken]
}

/// Another process's number: that of the first process of a machine, which uses no device.
const OTHER: u32 = 1;

fn processes(handle: usize, count: Out<u32>, list: Out<Process>) -> Status {
    let Some(device) = device(handle) else { return INVALID };
    let entry = |pid, used| Process { pid, used, instances: [u32::MAX; 2] };
    let mut all = vec![entry(std::process::id(), own(device))];
    let others = machine().spec.others;
    if others > 0 {
        all.push(entry(OTHER, others));
    }
    let room = count.get().unwrap_or(0) as usize;
    count.put(all.len() as u32);
    if room < all.len() {
        return TOO_SMALL;
    }
    for (index, process) in all.into_iter().enumerate() {
        list.at(index).put(process);
    }
    OK
}

fn at_bus(id: &str) -> Option<usize> {
    // NVML writes the domain with eight digits, the runtime with four.
    let tail = |text: &str| text.rsplit(':').take(2).map(str::to_ascii_uppercase).collect::<Vec<_>>();
    (0..machine().devices.len()).find(|&index| tail(&bus_id(index)) == tail(id))
}

answers! {
    Real fn nvmlInit() { OK }
    Real fn nvmlInit_v2() { OK }
    Real fn nvmlInitWithFlags(_flags: u32) { OK }
    Real fn nvmlShutdown() { OK }
    Real fn nvmlErrorString(_status: Status) -> usize { c"phantom NVML error".as_ptr() as usize }
    Real fn nvmlSystemGetCudaDriverVersion(out: Out<c_int>) { out.give(driver_version()) }
    Real fn nvmlSystemGetCudaDriverVersion_v2(out: Out<c_int>) { out.give(driver_version()) }
    Real fn nvmlSystemGetDriverVersion(out: Out<c_char>, capacity: u32) { out.text("580.00", capacity as usize); OK }
    Real fn nvmlDeviceGetCount_v2(out: Out<u32>) { out.give(machine().spec.count) }
    Real fn nvmlDeviceGetHandleByIndex_v2(number: u32, out: Out<usize>) {
        by(index(number as usize + 1), out)
    }
    Real fn nvmlDeviceGetHandleByPciBusId_v2(id: Text, out: Out<usize>) { by(at_bus(id.str()), out) }
    Real fn nvmlDeviceGetHandleByUUID(uuid: Text, out: Out<usize>) {
        by((0..machine().devices.len()).find(|&index| uuid_text(index) == uuid.str()), out)
    }
    Real fn nvmlDeviceGetName(handle: Word, out: Out<c_char>, capacity: u32) {
        out.text(&machine().spec.name, capacity as usize);
        if index(handle).is_some() { OK } else { INVALID }
    }
    Real fn nvmlDeviceGetUUID(handle: Word, out: Out<c_char>, capacity: u32) {
        let Some(index) = index(handle) else { return INVALID };
        out.text(&uuid_text(index), capacity as usize);
        OK
    }
    Real fn nvmlDeviceGetIndex(handle: Word, out: Out<u32>) {
        index(handle).map_or(INVALID, |index| out.give(index as u32))
    }
    Real fn nvmlDeviceGetMemoryInfo(handle: Word, out: Out<[u64; 3]>) {
        device(handle).map_or(INVALID, |device| out.give(memory(device)))
    }
    /// A window as large as the memory, as on data-centre cards, and the little that a process maps of it. No
    /// amount of memory follows from it, and the tracer's own samples ask it in every run: not told as a guess.
    Real fn nvmlDeviceGetBAR1MemoryInfo(handle: Word, out: Out<[u64; 3]>) {
        let Some(_) = device(handle) else { return INVALID };
        let (total, used) = (machine().spec.memory.next_power_of_two(), 2 << 20);
        out.give([total, total - used, used])
    }
    Real fn nvmlDeviceGetComputeRunningProcesses(handle: Word, count: Out<u32>, list: Out<Process>) {
        processes(handle, count, list)
    }
    Real fn nvmlDeviceGetComputeRunningProcesses_v2(handle: Word, count: Out<u32>, list: Out<Process>) {
        processes(handle, count, list)
    }
    Real fn nvmlDeviceGetComputeRunningProcesses_v3(handle: Word, count: Out<u32>, list: Out<Process>) {
        processes(handle, count, list)
    }
    Real fn nvmlDeviceGetCudaComputeCapability(handle: Word, major: Out<c_int>, minor: Out<c_int>) {
        let (a, b) = machine().spec.cc;
        major.put(a as c_int);
        minor.put(b as c_int);
        if index(handle).is_some() { OK } else { INVALID }
    }
    Real fn nvmlDeviceGetP2PStatus(_from: Word, _to: Word, _kind: c_int, out: Out<c_int>) { out.give(0) }
    Unsupported fn nvmlDeviceGetNvLinkRemoteDeviceType(_handle: Word, _link: u32, _out: Word) { UNSUPPORTED }
    Unsupported fn nvmlDeviceGetNvLinkRemotePciInfo_v2(_handle: Word, _link: u32, _out: Word) { UNSUPPORTED }
    Unsupported fn nvmlDeviceGetGpuFabricInfoV(_handle: Word, _out: Word) { UNSUPPORTED }
    Unsupported fn nvmlDeviceGetUtilizationRates(_handle: Word, _out: Word) { UNSUPPORTED }
    Unsupported fn nvmlDeviceGetTemperature(_handle: Word, _sensor: c_int, _out: Word) { UNSUPPORTED }
    Unsupported fn nvmlDeviceGetPowerUsage(_handle: Word, _out: Word) { UNSUPPORTED }
    Unsupported fn nvmlDeviceGetClockInfo(_handle: Word, _kind: c_int, _out: Word) { UNSUPPORTED }
}
