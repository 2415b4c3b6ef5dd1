//! What a device holds, as nvidia-smi has it: asked on the writer thread, now and then.
//!
//! NVML is loaded when it is first asked, and is never needed: without it the driver tells what is free,
//! once the process has a context (asking must make none). Nothing here runs in a hook.
//!
//! Whose memory it is NVML tells by process ids of the host. In a PID namespace (most containers) a process
//! does not know its own: then it is taken for the only one on the device, or what it has stays unknown.
//! Clients of MPS are told by a list of their own. A MIG instance is found by its identifier, as any device is,
//! so `CUDA_VISIBLE_DEVICES` needs no thought: the driver says which device an ordinal is.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::Api;
use memtrace_trace::sample::Sample;

use crate::ffi::phantom;
use crate::ffi::symbols::{find_anywhere, find_global, find_in, function};

/// `nvmlProcessInfo_t`, of `_v2` and `_v3`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Process {
    pid: c_uint,
    used: u64,
    instances: [c_uint; 2],
}

/// `NVML_VALUE_NOT_AVAILABLE`, and its negation, which some drivers give.
const NOT_AVAILABLE: [u64; 2] = [u64::MAX, u64::MAX - 1];
/// More processes than share a device.
const MOST_PROCESSES: usize = 512;
/// `PROC_PID_INIT_INO`: the PID namespace of the host.
const HOST_NAMESPACE: &str = "pid:[4026531836]";

type Init = unsafe extern "C" fn() -> c_int;
type ByText = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
/// Bytes: total, free, used.
type Memory = unsafe extern "C" fn(*mut c_void, *mut [u64; 3]) -> c_int;
type Processes = unsafe extern "C" fn(*mut c_void, *mut c_uint, *mut Process) -> c_int;
type Uuid = unsafe extern "C" fn(*mut [u8; 16], c_int) -> c_int;
type BusId = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type State = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type OfDevice = unsafe extern "C" fn(c_int) -> c_int;
type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type Info = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
type Exchange = unsafe extern "C" fn(*mut c_int) -> c_int;
type PoolOf = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type PoolAttribute = unsafe extern "C" fn(*mut c_void, c_int, *mut u64) -> c_int;
type GraphAttribute = unsafe extern "C" fn(c_int, c_int, *mut u64) -> c_int;

/// What was found of NVML; it stays loaded.
#[derive(Clone, Copy)]
struct Nvml {
    by_uuid: ByText,
    by_bus: Option<ByText>,
    memory: Memory,
    processes: Option<Processes>,
    mps_processes: Option<Processes>,
    bar1: Option<Memory>,
}

/// The process that loaded it: a fork starts afresh.
struct Loaded {
    pid: u32,
    nvml: Option<Nvml>,
}

static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);
/// The process is ending: the libraries are being taken down.
static OVER: AtomicBool = AtomicBool::new(false);

/// What is known of each of `devices` now, CUDA ordinals, and who told it.
pub(crate) fn sample(devices: &[i8]) -> Vec<(i8, Api, Sample)> {
    // Held by a thread that a fork left behind, or by the end of the process.
    let Ok(mut loaded) = LOADED.try_lock() else { return Vec::new() };
    let pid = std::process::id();
    if loaded.as_ref().is_none_or(|loaded| loaded.pid != pid) {
        *loaded = Some(Loaded { pid, nvml: load() });
        // NVML's own handlers of the end run after this one, which was registered later.
        // SAFETY: the handler takes nothing and does not unwind.
        unsafe { libc::atexit(stop) };
    }
    if OVER.load(Ordering::Acquire) {
        return Vec::new();
    }
    let nvml = loaded.as_ref().and_then(|loaded| loaded.nvml);
    let of = |&device: &i8| {
        let mut sample = Sample::default();
        let ordinal = c_int::from(device);
        let told = nvml.is_some_and(|nvml| nvml.look(ordinal, &mut sample).is_some());
        // SAFETY: the device is one that the process uses.
        unsafe { ask_driver(ordinal, !told, &mut sample) };
        let api = if told { Api::Nvml } else { Api::CuMemGetInfo };
        (sample.total.is_some()).then_some((device, api, sample))
    };
    devices.iter().filter_map(of).collect()
}

/// Waits for a look that is under way, and lets none begin any more.
extern "C" fn stop() {
    OVER.store(true, Ordering::Release);
    drop(LOADED.lock());
}

/// Loads NVML and starts it.
fn load() -> Option<Nvml> {
    // The phantom device stands in the global scope; else the library is loaded when nobody did.
    let mut loaded = std::ptr::null_mut();
    let probe = c"nvmlDeviceGetMemoryInfo";
    if find_global(probe).is_null() {
        // SAFETY: a name that ends in 0; loading it runs NVIDIA's constructors, on this thread of ours.
        loaded = unsafe { libc::dlopen(c"libnvidia-ml.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if loaded.is_null() {
            return None;
        }
    }
    let handle = if loaded.is_null() { libc::RTLD_DEFAULT } else { loaded };
    // SAFETY: the handle is open and stays so.
    let find = |name: &CStr| unsafe { find_in(handle, name) };
    // SAFETY: the types of nvml.h, here and below.
    let init: Init = unsafe { function(find(c"nvmlInit_v2")) }?;
    // SAFETY: it takes nothing, and counts its callers.
    if unsafe { init() } != 0 {
        return None;
    }
    // The lists of `_v2` and `_v3` have the same entries; the oldest has shorter ones.
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
        memory: unsafe { function(find(probe)) }?,
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

/// A function of the driver.
///
/// # Safety
/// As of [`function`].
unsafe fn driver<F: Copy>(name: &CStr) -> Option<F> {
    // SAFETY: by the contract.
    unsafe { function(find_anywhere("libcuda.so", name)) }
}

impl Nvml {
    /// Fills in what NVML tells; `None` when it does not know the device.
    fn look(&self, ordinal: c_int, sample: &mut Sample) -> Option<()> {
        let device = self.device(ordinal)?;
        let mut memory = [0; 3];
        // SAFETY: the device is NVML's own, and the place is valid for the answer.
        if unsafe { (self.memory)(device, &raw mut memory) } != 0 {
            return None;
        }
        sample.total = bytes(memory[0]);
        sample.free = bytes(memory[1]);
        // SAFETY: as above.
        if self.bar1.is_some_and(|bar1| unsafe { bar1(device, &raw mut memory) } == 0) {
            sample.bar1 = bytes(memory[2]);
        }
        let mut all = list(self.processes, device)?;
        for client in list(self.mps_processes, device).unwrap_or_default() {
            if all.iter().all(|process| process.pid != client.pid) {
                all.push(client);
            }
        }
        let own = own_of(&all, &own_pids(), in_namespace());
        let sum = |of: &[&Process]| of.iter().map(|process| bytes(process.used)).sum::<Option<i64>>();
        sample.process = own.and_then(|own| bytes(all[own].used));
        if own.is_some() || all.is_empty() {
            let others: Vec<&Process> = all
                .iter()
                .enumerate()
                .filter(|(index, _)| Some(*index) != own)
                .map(|(_, other)| other)
                .collect();
            sample.others = sum(&others);
        }
        Some(())
    }

    /// The device that the driver calls `ordinal`.
    fn device(&self, ordinal: c_int) -> Option<*mut c_void> {
        let mut device = std::ptr::null_mut();
        // SAFETY: the types of cuda.h.
        let names: [Option<Uuid>; 2] = unsafe { [driver(c"cuDeviceGetUuid_v2"), driver(c"cuDeviceGetUuid")] };
        let mut uuid = [0u8; 16];
        // SAFETY: the place is valid for the answer.
        if names.into_iter().flatten().next().is_some_and(|get| unsafe { get(&raw mut uuid, ordinal) } == 0) {
            for prefix in ["GPU", "MIG"] {
                let text = CString::new(format!("{prefix}-{}", uuid_text(&uuid))).ok()?;
                // SAFETY: a C string and a place for the answer.
                if unsafe { (self.by_uuid)(text.as_ptr(), &raw mut device) } == 0 {
                    return Some(device);
                }
            }
        }
        let mut bus = [0 as c_char; 32];
        // SAFETY: the type of cuda.h.
        let bus_id: BusId = unsafe { driver(c"cuDeviceGetPCIBusId") }?;
        // SAFETY: the length is the buffer's, less a 0 that stays; then a C string and a place.
        let found = unsafe {
            bus_id(bus.as_mut_ptr(), 31, ordinal) == 0
                && self.by_bus.is_some_and(|by_bus| by_bus(bus.as_ptr(), &raw mut device) == 0)
        };
        found.then_some(device)
    }
}

/// The processes of a list; `None` when the device has no such list.
fn list(get: Option<Processes>, device: *mut c_void) -> Option<Vec<Process>> {
    let mut processes = vec![Process::default(); MOST_PROCESSES];
    let mut count = MOST_PROCESSES as c_uint;
    // SAFETY: the device is NVML's own, and there is room for `count` entries.
    if unsafe { get?(device, &raw mut count, processes.as_mut_ptr()) } != 0 {
        return None;
    }
    processes.truncate(count as usize);
    Some(processes)
}

/// Which of the list this process is.
fn own_of(all: &[Process], pids: &[u32], in_namespace: bool) -> Option<usize> {
    // In a namespace our numbers are others' on the host, but for those that the host told us.
    let known: &[u32] = if in_namespace && pids.len() < 2 { &[] } else { &pids[..1.min(pids.len())] };
    match all.iter().position(|process| known.contains(&process.pid)) {
        None if in_namespace && all.len() == 1 => Some(0),
        found => found,
    }
}

/// The numbers of this process, outermost namespace first, as far as /proc tells.
fn own_pids() -> Vec<u32> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    let pids: Vec<u32> =
        line.unwrap_or_default().split_whitespace().filter_map(|word| word.parse().ok()).collect();
    if pids.is_empty() { vec![std::process::id()] } else { pids }
}

/// The phantom device numbers processes as they number themselves.
fn in_namespace() -> bool {
    !phantom::is_present()
        && std::fs::read_link("/proc/self/ns/pid").is_ok_and(|link| link.as_os_str() != HOST_NAMESPACE)
}

fn bytes(value: u64) -> Option<i64> {
    (!NOT_AVAILABLE.contains(&value)).then(|| i64::try_from(value).ok()).flatten()
}

/// `00112233-4455-...`
fn uuid_text(uuid: &[u8; 16]) -> String {
    let hex: String = uuid.iter().map(|byte| format!("{byte:02x}")).collect();
    let parts = [0..8, 8..12, 12..16, 16..20, 20..32];
    parts.map(|part| &hex[part]).join("-")
}

/// Fills in what the driver tells of pools and graphs, and `with_memory` what is free.
///
/// # Safety
/// `ordinal` is a device of the driver.
unsafe fn ask_driver(ordinal: c_int, with_memory: bool, sample: &mut Sample) -> Option<()> {
    // SAFETY: the types of cuda.h, here and below.
    let state: State = unsafe { driver(c"cuDevicePrimaryCtxGetState") }?;
    let (mut flags, mut active) = (0, 0);
    // SAFETY: the places are valid for the answer. The device's context is not made by this.
    if unsafe { state(ordinal, &raw mut flags, &raw mut active) } != 0 || active == 0 {
        return None;
    }
    // A look of ours must not break another thread's capture of a graph.
    // SAFETY: the type of cuda.h.
    if let Some(exchange) = unsafe { driver::<Exchange>(c"cuThreadExchangeStreamCaptureMode") } {
        let mut relaxed = 2;
        // SAFETY: the place is valid; the mode is this thread's alone.
        unsafe { exchange(&raw mut relaxed) };
    }
    // SAFETY: the context is there.
    unsafe {
        if with_memory {
            ask_memory(ordinal, sample);
        }
        ask_pools(ordinal, sample);
    }
    Some(())
}

/// # Safety
/// The device has its context.
unsafe fn ask_memory(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    // SAFETY: the types of cuda.h.
    let (retain, release, push, pop, info) = unsafe {
        (
            driver::<Retain>(c"cuDevicePrimaryCtxRetain")?,
            driver::<OfDevice>(c"cuDevicePrimaryCtxRelease_v2")?,
            driver::<Push>(c"cuCtxPushCurrent_v2")?,
            driver::<Pop>(c"cuCtxPopCurrent_v2")?,
            driver::<Info>(c"cuMemGetInfo_v2")?,
        )
    };
    let (mut context, mut free, mut total) = (std::ptr::null_mut(), 0, 0);
    // SAFETY: every place is valid for its answer, and what is retained and pushed is taken back.
    unsafe {
        if retain(&raw mut context, ordinal) != 0 {
            return None;
        }
        if push(context) == 0 {
            if info(&raw mut free, &raw mut total) == 0 {
                (sample.total, sample.free) = (bytes(total as u64), bytes(free as u64));
            }
            pop(&raw mut context);
        }
        release(ordinal);
    }
    Some(())
}

static GRAPHS_HELD: AtomicBool = AtomicBool::new(false);
static POOL_HELD: AtomicBool = AtomicBool::new(false);

/// What is held, when something was ever: most programs have no pool and no such graph, and a look that tells of none
/// costs no row. Once there was some, nothing left is news.
fn once_held(held: &AtomicBool, value: u64) -> Option<i64> {
    if value > 0 {
        held.store(true, Ordering::Relaxed);
    }
    bytes(value).filter(|_| held.load(Ordering::Relaxed))
}

/// # Safety
/// The device has its context.
unsafe fn ask_pools(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    // CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, _USED_MEM_CURRENT; CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT.
    const RESERVED: c_int = 5;
    const USED: c_int = 7;
    const GRAPHS: c_int = 2;
    let mut value = 0;
    // SAFETY: the type of cuda.h.
    let graphs = unsafe { driver::<GraphAttribute>(c"cuDeviceGetGraphMemAttribute") };
    // SAFETY: the driver's own function, and the place is valid for the answer.
    if graphs.is_some_and(|graphs| unsafe { graphs(ordinal, GRAPHS, &raw mut value) } == 0) {
        sample.graphs = once_held(&GRAPHS_HELD, value);
    }
    // SAFETY: the types of cuda.h.
    let (pool_of, attribute) = unsafe {
        (driver::<PoolOf>(c"cuDeviceGetMemPool")?, driver::<PoolAttribute>(c"cuMemPoolGetAttribute")?)
    };
    let mut pool = std::ptr::null_mut();
    // SAFETY: as above; the pool is the driver's own.
    unsafe {
        if pool_of(&raw mut pool, ordinal) != 0 {
            return None;
        }
        if attribute(pool, RESERVED, &raw mut value) == 0 {
            sample.pool_reserved = once_held(&POOL_HELD, value);
            if sample.pool_reserved.is_some() && attribute(pool, USED, &raw mut value) == 0 {
                sample.pool_used = bytes(value);
            }
        }
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn processes(pids: &[u32]) -> Vec<Process> {
        pids.iter().map(|&pid| Process { pid, used: 1, instances: [0; 2] }).collect()
    }

    #[test]
    fn a_process_knows_itself_by_the_number_that_the_host_gave_it() {
        assert_eq!(own_of(&processes(&[5, 7]), &[7], false), Some(1));
        assert_eq!(own_of(&processes(&[5, 7]), &[8], false), None);
        // In a namespace with a /proc of the host's: the outermost number counts.
        assert_eq!(own_of(&processes(&[5, 7]), &[7, 5], true), Some(1));
        // In a container 7 may be anybody.
        assert_eq!(own_of(&processes(&[5, 7]), &[7], true), None);
        assert_eq!(own_of(&processes(&[5]), &[7], true), Some(0));
        assert_eq!(own_of(&[], &[7], true), None);
    }

    #[test]
    fn an_identifier_is_written_as_nvml_reads_it() {
        let uuid = std::array::from_fn(|index| index as u8);
        assert_eq!(uuid_text(&uuid), "00010203-0405-0607-0809-0a0b0c0d0e0f");
        assert_eq!((bytes(u64::MAX), bytes(7)), (None, Some(7)));
    }
}
