//! cuDNN's graph API, in which PyTorch asks for convolutions and attention.
//!
//! From 9.8 on, cuDNN chooses engines and workspaces with no device when its descriptors carry a
//! description of one. So the real library is asked, with the phantom card's description put on
//! the heuristics, the engine and the plan, and with the handle left out. An older
//! cuDNN gets a stand-in: one plan that needs no workspace, told as a guess.

use std::collections::HashMap;
use std::ffi::{CStr, c_int};
use std::mem::transmute;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{LazyLock, Mutex, OnceLock};

use crate::core::ffi::{OK, Out, Status, Word, leak};
use crate::core::host_state::{current, device, lock, machine};
use crate::cuda::device_properties::attribute;
use crate::kernels::kernel::launch_library;
use crate::table::call_table::answers;

/// The first version that can be asked without a device.
const DEVICELESS: usize = 90_800;

// Numbers from cudnn_graph.h.
const DEVICE_PROPERTIES: c_int = 38;
const DEVICE_PROPERTIES_JSON: c_int = 2702;
const TYPE_CHAR: c_int = 24;
const TYPE_DESCRIPTOR: c_int = 15;
const OPERATION_GRAPH_HANDLE: c_int = 800;
const PLAN_HANDLE: c_int = 400;
const PLAN_WORKSPACE: c_int = 402;

/// The attribute under which a descriptor of that type takes the device's description.
fn description_attribute(descriptor_type: c_int) -> Option<c_int> {
    match descriptor_type {
        // CUDNN_BACKEND_ENGINE_DESCRIPTOR: CUDNN_ATTR_ENGINE_DEVICEPROP.
        2 => Some(1307),
        // CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR: CUDNN_ATTR_ENGINEHEUR_DEVICEPROP.
        4 => Some(204),
        // CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR: CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP.
        5 => Some(407),
        _ => None,
    }
}

type Create = extern "C" fn(c_int, Out<usize>) -> Status;
type OnDescriptor = extern "C" fn(Word) -> Status;
type Set = extern "C" fn(Word, c_int, c_int, i64, Word) -> Status;
type Get = extern "C" fn(Word, c_int, c_int, i64, Out<i64>, Word) -> Status;

/// The real library.
struct Real {
    create: Create,
    destroy: OnDescriptor,
    finalize: OnDescriptor,
    set: Set,
    get: Get,
    /// The description of the phantom card, a finalized descriptor.
    card: usize,
    /// Types of the live descriptors.
    types: Mutex<HashMap<usize, c_int>>,
}

type Found = *mut libc::c_void;

/// Looks a function up in the loaded libcudnn.
fn symbol(library: Found, name: &CStr) -> Option<Found> {
    // SAFETY: the handle came from dlopen and is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// The real library, when it is loaded and new enough.
fn real() -> Option<&'static Real> {
    static REAL: OnceLock<Option<Real>> = OnceLock::new();
    REAL.get_or_init(open).as_ref()
}

fn open() -> Option<Real> {
    // PyTorch loads it privately, so the default search does not see it; asked for by name, an
    // already loaded library is found and none is loaded.
    // SAFETY: a plain look-up.
    let library = unsafe { libc::dlopen(c"libcudnn.so.9".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the header gives the function of that name this signature.
    let version =
        unsafe { transmute::<Found, extern "C" fn() -> usize>(symbol(library, c"cudnnGetVersion")?) };
    if version() < DEVICELESS {
        return None;
    }
    // SAFETY: as above, for each; an address of ours where a `void*` stands has the same size.
    let mut real = unsafe {
        Real {
            create: transmute::<Found, Create>(symbol(library, c"cudnnBackendCreateDescriptor")?),
            destroy: transmute::<Found, OnDescriptor>(symbol(library, c"cudnnBackendDestroyDescriptor")?),
            finalize: transmute::<Found, OnDescriptor>(symbol(library, c"cudnnBackendFinalize")?),
            set: transmute::<Found, Set>(symbol(library, c"cudnnBackendSetAttribute")?),
            get: transmute::<Found, Get>(symbol(library, c"cudnnBackendGetAttribute")?),
            card: 0,
            types: Mutex::default(),
        }
    };
    let mut card = 0usize;
    let text = description();
    let status = [
        (real.create)(DEVICE_PROPERTIES, Out::from_address(&raw mut card as usize)),
        (real.set)(
            card,
            DEVICE_PROPERTIES_JSON,
            TYPE_CHAR,
            text.as_bytes_with_nul().len() as i64,
            text.as_ptr() as usize,
        ),
        (real.finalize)(card),
    ];
    real.card = card;
    (status == [OK; 3]).then_some(real)
}

/// The card as cuDNN serializes a device's properties.
fn description() -> std::ffi::CString {
    let spec = &machine().spec;
    let get = |number| attribute(number, 0);
    let name: String = spec.name.chars().filter(|c| c.is_ascii() && !matches!(c, '"' | '\\')).collect();
    let text = format!(
        "{{\"deviceName\":\"{name}\",\"cudaDeviceId\":0,\"deviceVer\":{version},\"driverVer\":{driver},\
         \"maxGridSize\":[{x},{y},{y}],\"maxBlockSize\":[1024,1024,64],\"regsPerBlock\":65536,\
         \"multiProcessorCount\":{sms},\"warpSize\":32,\"maxSharedMemoryPerBlock\":{shared},\
         \"maxSharedMemoryPerBlockOptin\":{optin},\"reservedSharedMemoryPerBlock\":{reserved},\
         \"maxRegistersPerSM\":65536,\"maxCtasPerSM\":{blocks},\"maxThreadsPerBlock\":1024,\
         \"maxThreadsPerSM\":{threads},\"pciDeviceId\":0,\"isTccDriver\":0,\"supportCoopLaunch\":1,\
         \"totalGlobalMem\":{memory},\"smClockRateKHz\":{clock},\"memClockRateKHz\":{memory_clock},\
         \"l2CacheSize\":{l2}}}",
        version = spec.cc.0 * 100 + spec.cc.1 * 10,
        driver = crate::cuda::device_properties::driver_version(),
        x = get(5),
        y = get(6),
        sms = spec.sms,
        shared = get(8),
        optin = get(97),
        reserved = get(111),
        blocks = get(106),
        threads = get(39),
        memory = spec.memory,
        clock = get(13),
        memory_clock = get(36),
        l2 = get(38),
    );
    std::ffi::CString::new(text).unwrap_or_default()
}

/// The largest workspace that a plan asked for.
static WORKSPACE: AtomicUsize = AtomicUsize::new(0);

/// Whether the real library chooses, and the largest workspace that it asked for.
pub(crate) fn chosen_by_real() -> (Option<bool>, usize) {
    let asked = calls::cudnnBackendCreateDescriptor.hits() > 0;
    (asked.then(|| real().is_some()), WORKSPACE.load(Ordering::Relaxed))
}

fn finalize(real: &Real, descriptor: usize) -> Status {
    let kind = lock(&real.types).get(&descriptor).copied().unwrap_or(-1);
    if let Some(attribute) = description_attribute(kind) {
        (real.set)(descriptor, attribute, TYPE_DESCRIPTOR, 1, &raw const real.card as usize);
    }
    (real.finalize)(descriptor)
}

fn get(descriptor: usize, name: c_int, kind: c_int, wanted: i64, count: Out<i64>, values: usize) -> Status {
    let Some(real) = real() else { return stand_in(name, count, values) };
    let status = (real.get)(descriptor, name, kind, wanted, count, values);
    if status == OK
        && name == PLAN_WORKSPACE
        && let Some(size) = Out::<i64>::from_address(values).get()
    {
        WORKSPACE.fetch_max(size.max(0) as usize, Ordering::Relaxed);
    }
    status
}

/// What an older cuDNN's stand-in says: one engine, one configuration, no workspace.
fn stand_in(name: c_int, count: Out<i64>, values: usize) -> Status {
    let number = Out::<i64>::from_address(values);
    let found = match name {
        202 | 300 | 401 => 1,
        303 | 402 | 1301 => {
            number.put(0);
            1
        }
        304 => {
            number.cast::<c_int>().put(0);
            1
        }
        802 => {
            number.put(1);
            1
        }
        _ => 0,
    };
    count.put(found);
    OK
}

/// Streams that the program set on its handles.
static STREAMS: LazyLock<Mutex<HashMap<usize, usize>>> = LazyLock::new(Mutex::default);

fn stream_of(handle: usize) -> usize {
    lock(&STREAMS).get(&handle).copied().unwrap_or(0)
}

answers! {
    Real fn cudnnCreate(out: Out<usize>) {
        // Which device it was made on is all that a handle could be asked for.
        let made = device(current().index as c_int).map_or(0, |device| device.index);
        out.give(leak([made; 8]))
    }
    Success fn cudnnDestroy(_handle: Word) { OK }
    Real fn cudnnSetStream(handle: Word, stream: Word) { lock(&STREAMS).insert(handle, stream); OK }
    Real fn cudnnGetStream(handle: Word, out: Out<usize>) { out.give(stream_of(handle)) }
    Real fn cudnnBackendCreateDescriptor(kind: c_int, out: Out<usize>) {
        let Some(real) = real() else { return out.give(leak([0u64; 32])) };
        let status = (real.create)(kind, out);
        if let (OK, Some(descriptor)) = (status, out.get()) {
            lock(&real.types).insert(descriptor, kind);
        }
        status
    }
    Real fn cudnnBackendDestroyDescriptor(descriptor: Word) {
        let Some(real) = real() else { return OK };
        lock(&real.types).remove(&descriptor);
        (real.destroy)(descriptor)
    }
    Real fn cudnnBackendSetAttribute(descriptor: Word, name: c_int, kind: c_int, count: i64, values: Word) {
        match real() {
            Some(real) if !matches!(name, OPERATION_GRAPH_HANDLE | PLAN_HANDLE) => {
                (real.set)(descriptor, name, kind, count, values)
            }
            // The handle is ours: the real library could not make anything of it.
            _ => OK,
        }
    }
    Real fn cudnnBackendFinalize(descriptor: Word) { real().map_or(OK, |real| finalize(real, descriptor)) }
    Real fn cudnnBackendGetAttribute(descriptor: Word, name: c_int, kind: c_int, wanted: i64, count: Out<i64>, values: Word) {
        get(descriptor, name, kind, wanted, count, values)
    }
    Success fn cudnnBackendExecute(handle: Word, _plan: Word, _values: Word) { launch_library(stream_of(handle)) }
}
