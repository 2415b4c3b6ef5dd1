//! NVML: the devices of the machine, their memory, and the processes on them. PyTorch uses NVML for the text
//! of an out-of-memory error, monitors and scripts use it through `pynvml`. [`dlopen`](crate::core::dlopen)
//! loads this library as `libnvidia-ml.so.1`.
//!
//! NVML lists every card of the machine, even if `CUDA_VISIBLE_DEVICES` hides it, and the processes of the
//! whole machine ([`machine_state`]).
//!
//! cudarc does not cover NVML, so its structs and codes are declared here as in `nvml.h`.

use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_machine::files::Machine;
use memtrace_machine::{DRIVER_VERSION, identity, process};

use crate::core::call_table::{answers, by_contract};
use crate::core::driver_version::driver_version;
use crate::core::ffi::{InOut, OK, Out, Status, Text, Word};
use crate::core::host_state::host_state;
use crate::core::{machine, machine_state};

/// `NVML_ERROR_UNINITIALIZED`: `nvmlInit` was not called, or as many calls of `nvmlShutdown` followed.
pub(super) const UNINITIALIZED: Status = 1;
/// `NVML_ERROR_INVALID_ARGUMENT`: an out-parameter is null, or no card has this handle or index.
pub(super) const INVALID_ARGUMENT: Status = 2;
/// `NVML_ERROR_NOT_SUPPORTED`: the simulated card does not report this value.
pub(super) const NOT_SUPPORTED: Status = 3;
/// `NVML_ERROR_NOT_FOUND`: no card has this PCI address or UUID, or no process has this id.
const NOT_FOUND: Status = 6;
/// `NVML_ERROR_INSUFFICIENT_SIZE`: the caller's buffer is too small.
const INSUFFICIENT_SIZE: Status = 7;
/// `NVML_ERROR_GPU_IS_LOST`: an injected fault made the card fall off the bus.
const GPU_IS_LOST: Status = 15;
/// `NVML_ERROR_ARGUMENT_VERSION_MISMATCH`: the caller's struct has a version that is not supported.
const VERSION_MISMATCH: Status = 25;

/// The number of calls of `nvmlInit` minus the number of calls of `nvmlShutdown`.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

fn initialize() -> Status {
    INITIALIZED.fetch_add(1, Ordering::Relaxed);
    OK
}

fn shut_down() -> Status {
    let less = INITIALIZED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| count.checked_sub(1));
    if less.is_ok() { OK } else { UNINITIALIZED }
}

/// Returns success if NVML is initialized.
fn check_initialized() -> Status {
    if INITIALIZED.load(Ordering::Relaxed) > 0 { OK } else { UNINITIALIZED }
}

/// Returns the card of an NVML device handle. A handle is the position of the card plus 1, so that none is
/// null.
pub(super) fn card_of(handle: usize) -> Result<usize, Status> {
    if check_initialized() != OK {
        return Err(UNINITIALIZED);
    }
    let card = handle.checked_sub(1).filter(|&card| card < host_state().spec.count as usize);
    let card = card.ok_or(INVALID_ARGUMENT)?;
    if machine::table().is_some_and(|table| table.is_lost(card)) { Err(GPU_IS_LOST) } else { Ok(card) }
}

/// Writes a value for the card of a handle. Fails if the handle is not a card, the card is lost, or `out` is
/// null.
pub(super) fn give<T>(handle: usize, out: Out<T>, value: impl FnOnce(usize) -> T) -> Status {
    match card_of(handle) {
        Ok(_) if out.is_null() => INVALID_ARGUMENT,
        Ok(card) => {
            out.put(value(card));
            OK
        }
        Err(status) => status,
    }
}

/// Writes a text about the card of a handle. Fails if the handle is not a card or the text does not fit.
unsafe fn give_text(
    handle: usize,
    out: Out<c_char>,
    capacity: u32,
    text: impl FnOnce(usize) -> String,
) -> Status {
    match card_of(handle) {
        // SAFETY: the caller's promise.
        Ok(card) => unsafe { write_text(&text(card), out, capacity) },
        Err(status) => status,
    }
}

/// Writes a text. Fails if it does not fit with its terminating zero.
///
/// # Safety
/// `out` is null or has as many elements as `capacity`.
unsafe fn write_text(text: &str, out: Out<c_char>, capacity: u32) -> Status {
    if out.is_null() {
        return INVALID_ARGUMENT;
    }
    if text.len() >= capacity as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller's promise.
    unsafe { out.text(text, capacity as usize) };
    OK
}

fn give_handle(card: Option<usize>, out: Out<usize>, missing: Status) -> Status {
    match card {
        Some(card) => give(card + 1, out, |card| card + 1),
        None if check_initialized() != OK => UNINITIALIZED,
        None => missing,
    }
}

/// The struct `nvmlProcessInfo_t` of `_v2` and `_v3`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessInfo {
    pid: u32,
    used_bytes: u64,
    gpu_instance: u32,
    compute_instance: u32,
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
struct ProcessInfo1 {
    pid: u32,
    used_bytes: u64,
}

/// The structs `nvmlMemory_t` and `nvmlBAR1Memory_t`, which have one layout. All sizes are in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryInfo {
    total: u64,
    free: u64,
    used: u64,
}

/// The struct `nvmlMemory_v2_t`. All sizes are in bytes.
#[repr(C)]
#[derive(Clone, Copy)]
struct MemoryInfo2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

const _: () = assert!(size_of::<ProcessInfo>() == 24 && size_of::<ProcessInfo1>() == 16);
const _: () = assert!(size_of::<MemoryInfo>() == 24 && size_of::<MemoryInfo2>() == 40);

/// The version word of `nvmlMemory_v2_t`: the size of the struct and its version number.
const MEMORY_2: u32 = size_of::<MemoryInfo2>() as u32 | 2 << 24;

/// Writes a value about the card's own memory, which NVML does not support on a card with unified memory.
fn give_memory<T>(handle: usize, out: Out<T>, value: impl FnOnce(usize) -> T) -> Status {
    match card_of(handle) {
        Ok(_) if host_state().spec.base.unified().is_some() => NOT_SUPPORTED,
        _ => give(handle, out, value),
    }
}

fn memory_info(machine: &Machine, card: usize) -> MemoryInfo {
    let (total, used) = (machine.spec.memory, machine.used(card));
    MemoryInfo { total, free: total - used, used }
}

fn memory_info_2(handle: usize, place: InOut<MemoryInfo2>) -> Status {
    if place.input().get().is_none_or(|asked| asked.version != MEMORY_2) {
        return VERSION_MISMATCH;
    }
    give_memory(handle, place.output(), |card| {
        let MemoryInfo { total, free, used } = memory_info(&machine_state::state(), card);
        MemoryInfo2 { version: MEMORY_2, total, reserved: 0, free, used }
    })
}

/// The process id of the entry that stands for the simulated other processes (`others=`). It is 1, the id of
/// a host's first process, which uses no device.
pub(crate) const OTHER_PID: u32 = 1;

/// Lists the processes with a context on a card.
///
/// # Safety
/// `list` is null or has as many elements as `count` holds.
unsafe fn processes<T>(
    handle: usize,
    count: InOut<u32>,
    list: Out<T>,
    info: impl Fn(u32, u64) -> T,
) -> Status {
    let card = match card_of(handle) {
        Ok(card) => card,
        Err(status) => return status,
    };
    let unified = host_state().spec.base.unified();
    if unified.is_some_and(|unified| !unified.lists_processes) {
        return NOT_SUPPORTED;
    }
    let machine = machine_state::state();
    let mut all: Vec<T> = machine.processes_on(card).map(|(pid, bytes)| info(pid, bytes)).collect();
    // On a card with unified memory, these bytes belong to the system and not to a process.
    if machine.spec.others > 0 && unified.is_none() {
        all.push(info(OTHER_PID, machine.spec.others));
    }
    let Some(capacity) = count.input().get() else { return INVALID_ARGUMENT };
    count.output().put(all.len() as u32);
    if (capacity as usize) < all.len() {
        return INSUFFICIENT_SIZE;
    }
    for (index, process) in all.into_iter().enumerate() {
        // SAFETY: index < capacity.
        unsafe { list.at(index) }.put(process);
    }
    OK
}

fn info(pid: u32, used_bytes: u64) -> ProcessInfo {
    ProcessInfo { pid, used_bytes, gpu_instance: u32::MAX, compute_instance: u32::MAX }
}

/// Writes a count of 0, for kinds of processes that never run on a simulated card.
fn no_processes(handle: usize, count: InOut<u32>) -> Status {
    match card_of(handle) {
        Ok(_) => count.output().give(0),
        Err(status) => status,
    }
}

fn cards() -> usize {
    host_state().spec.count as usize
}

answers! {
    Real fn {nvmlInit, nvmlInit_v2}() { initialize() }
    Real fn nvmlInitWithFlags(_flags: u32) { initialize() }
    Real fn nvmlShutdown() { shut_down() }
    Real fn nvmlErrorString(status: Status) -> *const c_char {
        match status {
            OK => c"Success",
            UNINITIALIZED => c"Uninitialized",
            INVALID_ARGUMENT => c"Invalid Argument",
            NOT_SUPPORTED => c"Not Supported",
            NOT_FOUND => c"Not Found",
            INSUFFICIENT_SIZE => c"Insufficient Size",
            GPU_IS_LOST => c"GPU is lost",
            VERSION_MISMATCH => c"Argument version mismatch",
            _ => c"Unknown Error",
        }
        .as_ptr()
    }
    Real fn {nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2}(out: Out<c_int>) {
        out.give(driver_version())
    }
    Real fn nvmlSystemGetDriverVersion(out: Out<c_char>, capacity: u32) {
        by_contract!(write_text(DRIVER_VERSION, out, capacity))
    }
    Real fn nvmlSystemGetNVMLVersion(out: Out<c_char>, capacity: u32) {
        let version = format!("{}.{DRIVER_VERSION}", driver_version() / 1000);
        by_contract!(write_text(&version, out, capacity))
    }
    Real fn nvmlSystemGetProcessName(pid: u32, out: Out<c_char>, capacity: u32) {
        let Some(name) = process::name_of(pid) else { return NOT_FOUND };
        by_contract!(write_text(&name, out, capacity))
    }
    Real fn {nvmlDeviceGetCount, nvmlDeviceGetCount_v2}(out: Out<u32>) {
        if check_initialized() == OK { out.give(host_state().spec.count) } else { UNINITIALIZED }
    }
    Real fn {nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2}(index: u32, out: Out<usize>) {
        give_handle(Some(index as usize), out, INVALID_ARGUMENT)
    }
    Real fn {nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2}(id: Text, out: Out<usize>) {
        give_handle(identity::index_of_bus_id(id.str(), cards()), out, NOT_FOUND)
    }
    Real fn nvmlDeviceGetHandleByUUID(uuid: Text, out: Out<usize>) {
        give_handle(identity::index_of_uuid(uuid.str(), cards()), out, NOT_FOUND)
    }
    Real fn nvmlDeviceGetName(handle: Word, out: Out<c_char>, capacity: u32) {
        by_contract!(give_text(handle, out, capacity, |_| host_state().spec.name.clone()))
    }
    Real fn nvmlDeviceGetUUID(handle: Word, out: Out<c_char>, capacity: u32) {
        by_contract!(give_text(handle, out, capacity, identity::uuid_text))
    }
    Real fn {nvmlDeviceGetIndex, nvmlDeviceGetMinorNumber}(handle: Word, out: Out<u32>) {
        give(handle, out, |card| card as u32)
    }
    Real fn nvmlDeviceGetMemoryInfo(handle: Word, out: Out<MemoryInfo>) {
        give_memory(handle, out, |card| memory_info(&machine_state::state(), card))
    }
    Real fn nvmlDeviceGetMemoryInfo_v2(handle: Word, place: InOut<MemoryInfo2>) {
        memory_info_2(handle, place)
    }
    /// Reports a BAR1 window as large as the memory, as on data center cards, and the small part of it that a
    /// process maps. The answer is not counted as a guess, because no amount of memory follows from it. The
    /// tracer's own samples make this call in every run.
    Real fn nvmlDeviceGetBAR1MemoryInfo(handle: Word, out: Out<MemoryInfo>) {
        let (total, used) = (host_state().spec.memory.next_power_of_two(), 2 << 20);
        give_memory(handle, out, |_| MemoryInfo { total, free: total - used, used })
    }
    Real fn nvmlDeviceGetComputeRunningProcesses(handle: Word, count: InOut<u32>, list: Out<ProcessInfo1>) {
        by_contract!(processes(handle, count, list, |pid, used_bytes| ProcessInfo1 { pid, used_bytes }))
    }
    Real fn {nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3}(
        handle: Word, count: InOut<u32>, list: Out<ProcessInfo>,
    ) {
        by_contract!(processes(handle, count, list, info))
    }
    Real fn {
        nvmlDeviceGetGraphicsRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses_v2,
        nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlDeviceGetMPSComputeRunningProcesses_v3,
    }(handle: Word, count: InOut<u32>, _list: Word) {
        no_processes(handle, count)
    }
}
