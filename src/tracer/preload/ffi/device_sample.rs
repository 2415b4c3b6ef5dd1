//! Device samples: the memory of a device as nvidia-smi shows it, taken periodically on the writer thread.
//!
//! NVML reports the whole device and every process on it. Without NVML, the driver reports the free memory,
//! but only once the process has a context, because a sample must not create a context.

use std::ffi::c_int;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_record::SampledDevice;
use memtrace_record::fork_lock::ForkLock;
use memtrace_trace::Api;
use memtrace_trace::host::HostFiles;
use memtrace_trace::sample::Sample;

use crate::ffi::nvml::{Nvml, ProcessMemory, bytes};
use crate::ffi::own_process;
use crate::ffi::phantom;
use crate::ffi::{cuda, cuda_memory};

/// The maximum number of child processes whose memory is read.
const MOST_CHILDREN: usize = 64;

/// NVML, with the id of the process that loaded it, because the child of a fork must load NVML again.
struct Loaded {
    pid: u32,
    nvml: Option<Nvml>,
}

/// Held while a sample is taken. A fork does not wait for it, because NVML may take long. A child that
/// inherits the held lock loads NVML again.
static LOADED: ForkLock<Option<Loaded>> = ForkLock::new(None);
/// True if the process is ending. The libraries of an ending process shut down, so no new sample may begin.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// Samples each of `devices` (CUDA ordinals). Returns the samples of the devices whose memory is known.
/// Returns an empty list if the process is ending.
pub(crate) fn sample(devices: &[i8]) -> Vec<SampledDevice> {
    LOADED.with(|loaded| {
        let pid = std::process::id();
        if loaded.as_ref().is_none_or(|loaded| loaded.pid != pid) {
            *loaded = Some(Loaded { pid, nvml: Nvml::load() });
            // Exit handlers run in reverse order: this handler is registered after NVML's handlers, so it runs
            // before them.
            // SAFETY: the handler takes no arguments and does not unwind.
            unsafe { libc::atexit(stop) };
        }
        if IS_ENDING.load(Ordering::Acquire) {
            return Vec::new();
        }
        let nvml = loaded.as_ref().and_then(|loaded| loaded.nvml);
        devices.iter().filter_map(|&device| sample_one(device, nvml)).collect()
    })
}

/// Samples one device. Returns `None` if its memory is unknown.
fn sample_one(device: i8, nvml: Option<Nvml>) -> Option<SampledDevice> {
    let mut sample = Sample::default();
    let ordinal = c_int::from(device);
    let others = nvml.and_then(|nvml| fill_from_nvml(nvml, ordinal, &mut sample));
    let has_nvml = others.is_some() && sample.total.is_some();
    // SAFETY: the process uses the device, so the driver knows it.
    unsafe { cuda_memory::fill(ordinal, !has_nvml, &mut sample) };
    if !has_nvml && cuda::is_integrated(ordinal) {
        fill_from_host(&mut sample);
    }
    let api = if has_nvml { Api::Nvml } else { Api::CuMemGetInfo };
    // A simulated GPU past its capacity always reports 0 free bytes, so its samples are dropped.
    let is_known = sample.total.is_some() && !(sample.free == Some(0) && phantom::goes_past_oom());
    let others = others.unwrap_or_default();
    let has_names = !others.is_empty() && own_process::has_listed_ids();
    is_known.then_some(SampledDevice { device, api, sample, others, has_names })
}

/// Fills in how much of the memory that an integrated device shares with the host is used by the host: the
/// page cache, and the memory of this process and its children.
fn fill_from_host(sample: &mut Sample) {
    let files = HostFiles::default();
    let cache = phantom::page_cache().or_else(|| files.page_cache());
    sample.cache = cache.map(|cache| cache.min(sample.used().unwrap_or(cache)).max(0));
    sample.host = files.held("self", MOST_CHILDREN);
}

/// An exit handler: waits for a sample in progress, and prevents new ones.
extern "C" fn stop() {
    IS_ENDING.store(true, Ordering::Release);
    LOADED.with(|_| ());
}

/// Fills in the part of a sample that NVML reports. Returns the other processes on the device with their
/// bytes, or `None` if NVML does not know the device or its processes.
fn fill_from_nvml(nvml: Nvml, ordinal: c_int, sample: &mut Sample) -> Option<Vec<(u32, Option<i64>)>> {
    let memory = nvml.memory(ordinal)?;
    (sample.total, sample.free, sample.bar1) = (memory.total, memory.free, memory.bar1);
    let processes = memory.processes?;
    let own = own_process::index_in(&processes);
    sample.process = own.and_then(|own| bytes(processes[own].used));
    if own.is_none() && !processes.is_empty() {
        return Some(Vec::new());
    }
    let is_other = |(index, _): &(usize, &ProcessMemory)| Some(*index) != own;
    let others = processes.iter().enumerate().filter(is_other);
    let others: Vec<_> = others.map(|(_, other)| (other.pid, bytes(other.used))).collect();
    sample.others = others.iter().map(|(_, bytes)| *bytes).sum();
    Some(others)
}
