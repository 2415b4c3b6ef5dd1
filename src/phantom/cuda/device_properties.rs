//! Devices: how many, what they are, and which is the thread's.

use std::ffi::{c_char, c_int};

use crate::core::ffi::{INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, OK, Out, Status, Text, Word};
use crate::core::host_state::{current_index, device, fail, last_error, machine, set_current};
use crate::table::call_table::answers;

/// What depends on the compute capability alone (CUDA C++ Programming Guide, "Technical
/// Specifications per Compute Capability").
pub(crate) struct Limits {
    pub(crate) shared_per_sm: usize,
    pub(crate) shared_per_block_optin: usize,
    pub(crate) threads_per_sm: u32,
    pub(crate) blocks_per_sm: u32,
}

/// The limits of the pretended capability; of one that came later, those of the newest known.
pub(crate) fn limits() -> Limits {
    let (shared, threads_per_sm, blocks_per_sm) = match machine().spec.cc {
        (..=6, _) | (7, ..=4) => (96, 2048, 32),
        (7, _) => (64, 1024, 16),
        (8, 0) => (164, 2048, 32),
        (8, 9) => (100, 1536, 24),
        (8, _) => (100, 1536, 16),
        (9..=11, _) => (228, 2048, 32),
        _ => (100, 1536, 24),
    };
    let reserved = reserved_shared();
    Limits {
        shared_per_sm: shared << 10,
        shared_per_block_optin: (shared << 10) - reserved,
        threads_per_sm,
        blocks_per_sm,
    }
}

/// Shared memory that the system keeps of each block's, since Ampere.
fn reserved_shared() -> usize {
    if machine().spec.cc.0 >= 8 { 1024 } else { 0 }
}

/// Identifies a device; the last byte is its index.
pub(crate) fn uuid(index: usize) -> [u8; 16] {
    let mut bytes = *b"PHANTOM-DEVICE-0";
    bytes[15] = index as u8;
    bytes
}

/// The identifier as NVML and `CUDA_VISIBLE_DEVICES` write it.
pub(crate) fn uuid_text(index: usize) -> String {
    let hex: String = uuid(index).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Each device has a bus of its own.
fn bus(index: usize) -> c_int {
    0x10 + index as c_int
}

pub(crate) fn bus_id(index: usize) -> String {
    format!("0000:{:02X}:00.0", bus(index))
}

/// One `CU_DEVICE_ATTRIBUTE` (`cudaDevAttr` has the same numbers).
pub(crate) fn attribute(attribute: c_int, index: usize) -> c_int {
    let spec = &machine().spec;
    let (sm_mhz, memory_mhz) = spec.base.clocks_mhz;
    let limits = limits();
    let hopper = c_int::from(spec.cc.0 >= 9);
    match attribute {
        1..=3 => 1024,
        4 => 64,
        5 | 11 => c_int::MAX,
        6 | 7 => 65535,
        8 => 48 << 10,
        9 | 12 | 82 => 64 << 10,
        10 => 32,
        13 => sm_mhz as c_int * 1000,
        14 | 30 => 512,
        15 | 18 | 19 | 31 | 32 | 41 | 51 => match attribute {
            18 => 0,
            51 => 32,
            _ => 1,
        },
        16 => spec.sms as c_int,
        17 | 20 | 34 | 35 | 50 => 0,
        21 => 131_072,
        22 => 131_072,
        23 => 65_536,
        24..=26 => 16_384,
        27 | 28 => 32_768,
        29 => 2048,
        33 => bus(index),
        36 => memory_mhz as c_int * 1000,
        37 => spec.base.bus_bits as c_int,
        38 => (spec.base.l2_mib << 20) as c_int,
        39 => limits.threads_per_sm as c_int,
        40 => 3,
        75 => spec.cc.0 as c_int,
        76 => spec.cc.1 as c_int,
        78..=80 | 83 | 89..=94 => 1,
        81 => limits.shared_per_sm as c_int,
        87 => 2,
        95 | 96 | 98 | 99 => 1,
        97 => limits.shared_per_block_optin as c_int,
        102 | 103 | 115 | 122 | 123 => 1,
        106 => limits.blocks_per_sm as c_int,
        108 | 109 => 0,
        111 => reserved_shared() as c_int,
        // Handles that another process could open: a file descriptor.
        119 => 1,
        120 | 127 => hopper,
        126 => {
            if hopper == 1 {
                4
            } else {
                1
            }
        }
        129 => 1,
        131 | 134 => -1,
        _ => 0,
    }
}

/// The one-dimensional fields that both CUDA majors' `cudaDeviceProp` share, in their order; the
/// two differ in the clocks and modes that CUDA 13 left out.
macro_rules! properties {
    ($name:ident, clock: [$($clock:ident)?], overlap: [$($overlap:ident)?], timeout: [$($timeout:ident)?],
     mode: [$($mode:ident)?], textures: $textures:literal, memory_clock: [$($memory_clock:ident)?],
     ratio: [$($ratio:ident)?], multi: [$($multi:ident)?], tail: $tail:literal) => {
        #[repr(C)]
        #[derive(Clone, Copy)]
        pub(crate) struct $name {
            name: [u8; 256],
            uuid: [u8; 16],
            luid: [u8; 8],
            luid_mask: u32,
            total_memory: usize,
            shared_per_block: usize,
            registers_per_block: c_int,
            warp: c_int,
            pitch: usize,
            threads_per_block: c_int,
            threads_dim: [c_int; 3],
            grid: [c_int; 3],
            $($clock: c_int,)?
            constant: usize,
            major: c_int,
            minor: c_int,
            texture_alignment: usize,
            texture_pitch_alignment: usize,
            $($overlap: c_int,)?
            sms: c_int,
            $($timeout: c_int,)?
            integrated: c_int,
            map_host: c_int,
            $($mode: c_int,)?
            textures: [c_int; $textures],
            surface_alignment: usize,
            concurrent: c_int,
            ecc: c_int,
            pci: [c_int; 3],
            tcc: c_int,
            async_engines: c_int,
            unified: c_int,
            $($memory_clock: c_int,)?
            bus_bits: c_int,
            l2: c_int,
            l2_persisting: c_int,
            threads_per_sm: c_int,
            priorities: c_int,
            l1: [c_int; 2],
            shared_per_sm: usize,
            registers_per_sm: c_int,
            managed: c_int,
            board: [c_int; 2],
            host_atomics: c_int,
            $($ratio: c_int,)?
            pageable: c_int,
            concurrent_managed: c_int,
            preemption: c_int,
            registered_pointers: c_int,
            cooperative: c_int,
            $($multi: c_int,)?
            shared_optin: usize,
            host_page_tables: c_int,
            managed_from_host: c_int,
            blocks_per_sm: c_int,
            window: c_int,
            shared_reserved: usize,
            host_register: c_int,
            sparse_arrays: c_int,
            register_read_only: c_int,
            timeline: c_int,
            pools: c_int,
            rdma: [c_int; 3],
            pool_handles: u32,
            deferred_arrays: c_int,
            ipc_events: c_int,
            clusters: c_int,
            unified_functions: c_int,
            tail: [c_int; $tail],
        }

        impl $name {
            fn of(index: usize) -> Self {
                let spec = &machine().spec;
                let get = |number| attribute(number, index);
                let mut name = [0; 256];
                let length = spec.name.len().min(255);
                name[..length].copy_from_slice(&spec.name.as_bytes()[..length]);
                Self {
                    name,
                    uuid: uuid(index),
                    luid: [0; 8],
                    luid_mask: 0,
                    total_memory: spec.memory as usize,
                    shared_per_block: get(8) as usize,
                    registers_per_block: get(12),
                    warp: get(10),
                    pitch: get(11) as usize,
                    threads_per_block: get(1),
                    threads_dim: [get(2), get(3), get(4)],
                    grid: [get(5), get(6), get(7)],
                    $($clock: get(13),)?
                    constant: get(9) as usize,
                    major: get(75),
                    minor: get(76),
                    texture_alignment: get(14) as usize,
                    texture_pitch_alignment: get(51) as usize,
                    $($overlap: get(15),)?
                    sms: get(16),
                    $($timeout: get(17),)?
                    integrated: get(18),
                    map_host: get(19),
                    $($mode: get(20),)?
                    textures: [16_384; $textures],
                    surface_alignment: get(30) as usize,
                    concurrent: get(31),
                    ecc: get(32),
                    pci: [get(33), get(34), get(50)],
                    tcc: get(35),
                    async_engines: get(40),
                    unified: get(41),
                    $($memory_clock: get(36),)?
                    bus_bits: get(37),
                    l2: get(38),
                    l2_persisting: get(108),
                    threads_per_sm: get(39),
                    priorities: get(78),
                    l1: [get(79), get(80)],
                    shared_per_sm: get(81) as usize,
                    registers_per_sm: get(82),
                    managed: get(83),
                    board: [0; 2],
                    host_atomics: get(86),
                    $($ratio: get(87),)?
                    pageable: get(88),
                    concurrent_managed: get(89),
                    preemption: get(90),
                    registered_pointers: get(91),
                    cooperative: get(95),
                    $($multi: get(96),)?
                    shared_optin: get(97) as usize,
                    host_page_tables: get(100),
                    managed_from_host: get(101),
                    blocks_per_sm: get(106),
                    window: get(109),
                    shared_reserved: get(111) as usize,
                    host_register: get(99),
                    sparse_arrays: get(112),
                    register_read_only: get(113),
                    timeline: get(114),
                    pools: get(115),
                    rdma: [get(116), get(117), get(118)],
                    pool_handles: get(119) as u32,
                    deferred_arrays: get(121),
                    ipc_events: get(125),
                    clusters: get(120),
                    unified_functions: get(129),
                    tail: [0; $tail],
                }
            }
        }
    };
}

properties!(Properties13, clock: [], overlap: [], timeout: [], mode: [], textures: 39, memory_clock: [],
    ratio: [], multi: [], tail: 63);
properties!(Properties12, clock: [clock], overlap: [overlap], timeout: [timeout], mode: [mode], textures: 40,
    memory_clock: [memory_clock], ratio: [ratio], multi: [multi], tail: 63);

// The sizes that the two headers give; a field too many would write past the caller's struct.
const _: () = assert!(size_of::<Properties13>() == SIZE_13);
const _: () = assert!(size_of::<Properties12>() == SIZE_12);
const SIZE_13: usize = 1008;
const SIZE_12: usize = 1032;

fn count(out: Out<c_int>) -> Status {
    let devices = machine().devices.len() as c_int;
    out.put(devices);
    if devices == 0 { fail(NO_DEVICE) } else { OK }
}

fn on<T>(index: c_int, answer: impl FnOnce(usize) -> T) -> Result<T, Status> {
    match device(index) {
        Some(device) => Ok(answer(device.index)),
        None => Err(fail(INVALID_DEVICE)),
    }
}

fn give<T: Copy>(out: Out<T>, index: c_int, answer: impl FnOnce(usize) -> T) -> Status {
    match on(index, answer) {
        Ok(value) => out.give(value),
        Err(status) => status,
    }
}

/// The version of the runtime that the program brought, which the pretended driver supports exactly.
pub(crate) fn driver_version() -> c_int {
    type Version = extern "C" fn(Out<c_int>) -> Status;
    let mut version: c_int = 0;
    // SAFETY: looks a name up; the library itself does not define it.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cudaRuntimeGetVersion".as_ptr()) };
    if !found.is_null() {
        // SAFETY: the runtime's header gives the function of that name this signature.
        let ask: Version = unsafe { std::mem::transmute(found) };
        ask(Out::from_address(&raw mut version as usize));
    }
    if version > 0 { version } else { 13000 }
}

fn index_of_bus(text: &str) -> Option<usize> {
    (0..machine().devices.len()).find(|&index| {
        let id = bus_id(index);
        text.eq_ignore_ascii_case(&id) || text.get(text.len().saturating_sub(7)..) == Some(&id[5..])
    })
}

answers! {
    Real fn cudaGetDeviceCount(out: Out<c_int>) { count(out) }
    Real fn cudaGetDevice(out: Out<c_int>) { out.give(current_index()) }
    Real fn cudaSetDevice(index: c_int) { if machine().devices.is_empty() { fail(NO_DEVICE) } else { set_current(index) } }
    Real fn cudaInitDevice(index: c_int, _device_flags: u32, _flags: u32) { on(index, |_| OK).unwrap_or_else(|status| status) }
    Success fn cudaSetDeviceFlags(_flags: u32) { OK }
    Real fn cudaGetDeviceFlags(out: Out<u32>) { out.give(0) }
    Real fn cudaDriverGetVersion(out: Out<c_int>) { out.give(driver_version()) }
    Success fn cudaDeviceReset() { OK }
    Real fn cudaGetLastError() { last_error(true) }
    Real fn cudaPeekAtLastError() { last_error(false) }
    Real fn cudaDeviceGetAttribute(out: Out<c_int>, number: c_int, index: c_int) {
        give(out, index, |index| attribute(number, index))
    }
    /// As CUDA 13 has it.
    Real fn cudaGetDeviceProperties(out: Out<Properties13>, index: c_int) { give(out, index, Properties13::of) }
    /// As CUDA 12 has it.
    Real fn cudaGetDeviceProperties_v2(out: Out<Properties12>, index: c_int) { give(out, index, Properties12::of) }
    Real fn cudaDeviceCanAccessPeer(out: Out<c_int>, from: c_int, to: c_int) { out.give(c_int::from(from != to)) }
    Success fn cudaDeviceEnablePeerAccess(_peer: c_int, _flags: u32) { OK }
    Success fn cudaDeviceDisablePeerAccess(_peer: c_int) { OK }
    Real fn cudaDeviceGetP2PAttribute(out: Out<c_int>, _attribute: c_int, _from: c_int, _to: c_int) { out.give(1) }
    Real fn cudaDeviceGetStreamPriorityRange(lowest: Out<c_int>, highest: Out<c_int>) {
        lowest.put(0);
        highest.put(-5);
        OK
    }
    Real fn cudaDeviceGetPCIBusId(out: Out<c_char>, capacity: c_int, index: c_int) {
        match on(index, bus_id) {
            Ok(text) => { out.text(&text, capacity.max(0) as usize); OK }
            Err(status) => status,
        }
    }
    Real fn cudaDeviceGetByPCIBusId(out: Out<c_int>, id: Text) {
        match index_of_bus(id.str()) {
            Some(index) => out.give(index as c_int),
            None => fail(INVALID_DEVICE),
        }
    }
    Guess fn cudaDeviceGetLimit(out: Out<usize>, limit: c_int) { out.give(limit_of(limit)) }
    Success fn cudaDeviceSetLimit(_limit: c_int, _value: usize) { OK }
    Real fn cudaDeviceGetCacheConfig(out: Out<c_int>) { out.give(0) }
    Success fn cudaDeviceSetCacheConfig(_mode: c_int) { OK }
    Success fn cudaCtxResetPersistingL2Cache() { OK }
    Success fn cudaProfilerStart() { OK }
    Success fn cudaProfilerStop() { OK }
    Real fn cudaChooseDevice(out: Out<c_int>, _properties: Word) { if machine().devices.is_empty() { INVALID_VALUE } else { out.give(0) } }
}

/// One `cudaLimit`: the driver's documented defaults.
pub(crate) fn limit_of(limit: c_int) -> usize {
    match limit {
        0 => 1024,
        1 => 1 << 20,
        2 => 8 << 20,
        3 => 2,
        4 => 2048,
        5 => 128,
        _ => 0,
    }
}
