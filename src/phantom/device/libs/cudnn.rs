//! cuDNN's graph API, through which PyTorch runs convolutions and attention.
//!
//! From 9.8 on, cuDNN chooses engines and workspaces without a device if its descriptors contain the
//! description of one. So the phantom calls the real library: it sets the description of the simulated card
//! on the heuristics, the engine and the plan, and passes no handle. A stand-in with one plan that needs no
//! workspace replaces an older cuDNN, and its answers are reported as guesses.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};

use cudarc::cudnn::sys::{
    cudnnBackendAttributeName_t, cudnnBackendAttributeType_t, cudnnBackendDescriptorType_t, cudnnStatus_t,
};

use crate::core::call_table::{answers, by_contract};
use crate::core::driver_version::driver_version;
use crate::core::ffi::{Handle, In, OK, Out, Status, Word, codes};
use crate::core::host_state::{current, host_state};
use crate::core::lock::lock;
use crate::cuda::device_attributes::{
    CU_DEVICE_ATTRIBUTE_CLOCK_RATE, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
    CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X,
    CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
    CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, attribute,
};
use crate::cuda::streams::StreamHandle;
use crate::kernels::kernel::launch_library;
use crate::libs::cudnn_products::workspace_of_product;
use crate::libs::descriptor_addresses::DescriptorAddresses;
use crate::libs::handle_memory;
use crate::libs::library_calls::{launch_of, set_stream, stream_of};
use crate::libs::nvrtc;

const BAD_PARAM: Status = cudnnStatus_t::CUDNN_STATUS_BAD_PARAM as Status;

/// The first version that can choose plans without a device.
const FIRST_DEVICELESS: usize = 90_800;

codes!(cudnnBackendDescriptorType_t {
    CUDNN_BACKEND_ENGINE_DESCRIPTOR,
    CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR,
    CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR,
    CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR,
});

codes!(cudnnBackendAttributeName_t {
    CUDNN_ATTR_ENGINEHEUR_RESULTS,
    CUDNN_ATTR_ENGINEHEUR_DEVICEPROP,
    CUDNN_ATTR_ENGINECFG_ENGINE,
    CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE,
    CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED,
    CUDNN_ATTR_EXECUTION_PLAN_HANDLE,
    CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG,
    CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE,
    CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP,
    CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION,
    CUDNN_ATTR_OPERATIONGRAPH_HANDLE,
    CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT,
    CUDNN_ATTR_ENGINE_GLOBAL_INDEX,
    CUDNN_ATTR_ENGINE_DEVICEPROP,
    CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
});

codes!(cudnnBackendAttributeType_t { CUDNN_TYPE_BACKEND_DESCRIPTOR, CUDNN_TYPE_CHAR, CUDNN_TYPE_VOID_PTR });

/// Returns the attribute that gives a descriptor of this type the description of a device.
fn description_attribute(descriptor_type: c_int) -> Option<c_int> {
    match descriptor_type {
        CUDNN_BACKEND_ENGINE_DESCRIPTOR => Some(CUDNN_ATTR_ENGINE_DEVICEPROP),
        CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR => Some(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP),
        CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR => Some(CUDNN_ATTR_EXECUTION_PLAN_DEVICEPROP),
        _ => None,
    }
}

type Create = unsafe extern "C" fn(c_int, Out<usize>) -> Status;
type OnDescriptor = unsafe extern "C" fn(Word) -> Status;
type Set = unsafe extern "C" fn(Word, c_int, c_int, i64, Word) -> Status;
type Get = unsafe extern "C" fn(Word, c_int, c_int, i64, Out<i64>, Word) -> Status;

/// The functions of the real library, and its descriptors.
struct RealCudnn {
    create: Create,
    destroy: OnDescriptor,
    finalize: OnDescriptor,
    set: Set,
    get: Get,
    /// A finalized descriptor with the description of the simulated card.
    card: usize,
    /// The types of the live descriptors.
    types: Mutex<HashMap<usize, c_int>>,
    /// The configuration that the heuristics name first for each graph, and the plans made from one.
    first: Mutex<HashSet<usize>>,
}

/// Looks up a function in the loaded libcudnn. Returns `None` if the library does not have the function.
fn symbol(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: the handle came from dlopen and is never closed.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!found.is_null()).then_some(found)
}

/// Returns the real library, if it is loaded and new enough.
fn real() -> Option<&'static RealCudnn> {
    static REAL: OnceLock<Option<RealCudnn>> = OnceLock::new();
    REAL.get_or_init(open).as_ref()
}

/// The version of the loaded library, such as 91900; 0 before the first descriptor.
static VERSION: AtomicUsize = AtomicUsize::new(0);

/// Returns the version of the loaded library, such as 91900, or 0 before the program's first descriptor.
pub(crate) fn version() -> usize {
    VERSION.load(Ordering::Relaxed)
}

fn open() -> Option<RealCudnn> {
    // PyTorch loads the library privately, so the default search does not find it. A search by name finds a
    // loaded library and loads none.
    // SAFETY: a look-up without side effects.
    let library = unsafe { libc::dlopen(c"libcudnn.so.9".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD) };
    if library.is_null() {
        return None;
    }
    // SAFETY: the header gives the function of that name this signature.
    let version = unsafe {
        transmute::<*mut c_void, unsafe extern "C" fn() -> usize>(symbol(library, c"cudnnGetVersion")?)
    };
    // SAFETY: takes no arguments.
    let version = unsafe { version() };
    VERSION.store(version, Ordering::Relaxed);
    if version < FIRST_DEVICELESS {
        return None;
    }
    // SAFETY: as above, for each. A `void*` of the header has the size of a `Word`.
    let mut real = unsafe {
        RealCudnn {
            create: transmute::<*mut c_void, Create>(symbol(library, c"cudnnBackendCreateDescriptor")?),
            destroy: transmute::<*mut c_void, OnDescriptor>(symbol(
                library,
                c"cudnnBackendDestroyDescriptor",
            )?),
            finalize: transmute::<*mut c_void, OnDescriptor>(symbol(library, c"cudnnBackendFinalize")?),
            set: transmute::<*mut c_void, Set>(symbol(library, c"cudnnBackendSetAttribute")?),
            get: transmute::<*mut c_void, Get>(symbol(library, c"cudnnBackendGetAttribute")?),
            card: 0,
            types: Mutex::default(),
            first: Mutex::default(),
        }
    };
    let mut card = 0usize;
    let text = card_description();
    let length = text.as_bytes_with_nul().len() as i64;
    // SAFETY: the place and the text are good for the calls, with the length and the type that the header
    // asks for.
    let status = unsafe {
        [
            (real.create)(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, Out::to(&mut card)),
            (real.set)(
                card,
                CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION,
                CUDNN_TYPE_CHAR,
                length,
                text.as_ptr() as usize,
            ),
            (real.finalize)(card),
        ]
    };
    real.card = card;
    (status == [OK; 3]).then_some(real)
}

/// Returns the description of the card in the form in which cuDNN serializes the properties of a device.
fn card_description() -> CString {
    let spec = &host_state().spec;
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
        driver = driver_version(),
        x = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X),
        y = get(CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y),
        sms = spec.sms,
        shared = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK),
        optin = get(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
        reserved = get(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK),
        blocks = get(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR),
        threads = get(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR),
        memory = spec.memory,
        clock = get(CU_DEVICE_ATTRIBUTE_CLOCK_RATE),
        memory_clock = get(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE),
        l2 = get(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE),
    );
    CString::new(text).unwrap_or_default()
}

/// The size of the largest workspace that the real library requested, in bytes.
static LARGEST_WORKSPACE: AtomicUsize = AtomicUsize::new(0);

/// Returns two values. The first is true if the real library chose the plans, and `None` if the program
/// created no descriptor. The second is the size in bytes of the largest workspace that the library
/// requested.
pub(crate) fn plans() -> (Option<bool>, usize) {
    let used = entries::cudnnBackendCreateDescriptor.calls() > 0;
    (used.then(|| real().is_some()), LARGEST_WORKSPACE.load(Ordering::Relaxed))
}

/// Creates a descriptor.
///
/// # Safety
/// By the contract of `cudnnBackendCreateDescriptor`.
unsafe fn create_descriptor(descriptor_type: c_int, out: Out<usize>) -> Status {
    let Some(real) = real() else { return out.give(Handle::new([0u64; 32]).address()) };
    let mut descriptor = 0;
    // SAFETY: the caller's promise, with a place of ours.
    let status = unsafe { (real.create)(descriptor_type, Out::to(&mut descriptor)) };
    if status == OK {
        lock(&real.types).insert(descriptor, descriptor_type);
        return out.give(descriptor);
    }
    status
}

/// Destroys a descriptor.
///
/// # Safety
/// By the contract of `cudnnBackendDestroyDescriptor`.
unsafe fn destroy_descriptor(descriptor: usize) -> Status {
    ADDRESSES.remove(descriptor);
    let Some(real) = real() else { return OK };
    lock(&real.types).remove(&descriptor);
    lock(&real.first).remove(&descriptor);
    // SAFETY: the caller's promise.
    unsafe { (real.destroy)(descriptor) }
}

/// Finalizes a descriptor. If its type takes the description of the card, this description is set first.
///
/// # Safety
/// By the contract of `cudnnBackendFinalize`.
unsafe fn finalize(descriptor: usize) -> Status {
    let Some(real) = real() else { return OK };
    let descriptor_type = lock(&real.types).get(&descriptor).copied().unwrap_or(-1);
    // SAFETY: the caller's promise; the attribute takes one descriptor.
    unsafe {
        if let Some(attribute) = description_attribute(descriptor_type) {
            (real.set)(
                descriptor,
                attribute,
                CUDNN_TYPE_BACKEND_DESCRIPTOR,
                1,
                &raw const real.card as usize,
            );
        }
        nvrtc::without_compiling(|| (real.finalize)(descriptor))
    }
}

/// The arguments by which a program reads an attribute.
#[derive(Clone, Copy)]
struct AttributeRequest<'call> {
    name: c_int,
    kind: c_int,
    wanted: i64,
    count: Out<'call, i64>,
    values: usize,
}

/// Reads an attribute from the real library, or from the stand-in if there is no real library.
///
/// # Safety
/// By the contract of `cudnnBackendGetAttribute`.
unsafe fn get_attribute(descriptor: usize, request: AttributeRequest) -> Status {
    let AttributeRequest { name, kind, wanted, count, values } = request;
    // SAFETY: the caller's promise, for each.
    unsafe {
        let Some(real) = real() else { return stand_in(name, count, values) };
        let status = (real.get)(descriptor, name, kind, wanted, count, values);
        if status != OK || values == 0 || wanted < 1 {
            return status;
        }
        if name == CUDNN_ATTR_ENGINEHEUR_RESULTS {
            lock(&real.first).insert((values as *const usize).read_unaligned());
        }
        if name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE {
            let place = values as *mut i64;
            let mut size = place.read_unaligned().max(0) as usize;
            if let Some(product) = product_of(real, descriptor, size) {
                size = product;
                place.write_unaligned(product as i64);
            }
            LARGEST_WORKSPACE.fetch_max(size, Ordering::Relaxed);
        }
        status
    }
}

/// Returns the workspace of the matrix product that a Hopper card takes instead of this plan, if it does.
///
/// # Safety
/// The descriptor is a finalized plan.
unsafe fn product_of(real: &RealCudnn, plan: usize, workspace: usize) -> Option<usize> {
    if host_state().spec.cc != (9, 0) || !lock(&real.first).contains(&plan) {
        return None;
    }
    let mut text = vec![0u8; 1 << 16];
    let mut length = 0i64;
    // SAFETY: the caller's promise, with places of ours.
    let status = unsafe {
        (real.get)(
            plan,
            CUDNN_ATTR_EXECUTION_PLAN_JSON_REPRESENTATION,
            CUDNN_TYPE_CHAR,
            text.len() as i64,
            Out::to(&mut length),
            text.as_mut_ptr() as usize,
        )
    };
    let text = text.get(..usize::try_from(length).ok()?)?;
    (status == OK).then(|| workspace_of_product(std::str::from_utf8(text).ok()?, workspace)).flatten()
}

/// Reads an attribute of the stand-in, which has one engine and one configuration, and needs no workspace.
///
/// # Safety
/// `values` is null or good for a write of the attribute's type.
unsafe fn stand_in(name: c_int, count: Out<i64>, values: usize) -> Status {
    // SAFETY: the caller's promise.
    let (number, number_32) =
        unsafe { (Out::<i64>::from_address(values), Out::<c_int>::from_address(values)) };
    let found = match name {
        CUDNN_ATTR_ENGINEHEUR_RESULTS
        | CUDNN_ATTR_ENGINECFG_ENGINE
        | CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG => 1,
        CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE
        | CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE
        | CUDNN_ATTR_ENGINE_GLOBAL_INDEX => {
            number.put(0);
            1
        }
        CUDNN_ATTR_ENGINECFG_SHARED_MEMORY_USED => {
            number_32.put(0);
            1
        }
        CUDNN_ATTR_OPERATIONGRAPH_ENGINE_GLOBAL_COUNT => {
            number.put(1);
            1
        }
        _ => 0,
    };
    count.put(found);
    OK
}

/// The addresses in the variant packs.
static ADDRESSES: DescriptorAddresses = DescriptorAddresses::new();

/// Stores the addresses that the program gives an attribute of a descriptor.
///
/// # Safety
/// `values` is null or has `count` elements.
unsafe fn keep_addresses(descriptor: usize, attribute: c_int, count: i64, values: In<usize>) {
    let count = usize::try_from(count).unwrap_or(0);
    // SAFETY: index < count.
    let all = (0..count).filter_map(|index| unsafe { values.at(index) }.get());
    ADDRESSES.set(descriptor, attribute, all.collect());
}

answers! {
    /// A handle holds the index of the device on which it was created.
    Real fn cudnnCreate(out: Out<Handle<[usize; 8]>>) {
        if out.is_null() {
            return BAD_PARAM;
        }
        let handle = Handle::new([current().index; 8]);
        match handle_memory::create_cudnn(handle.address()) {
            OK => out.give(handle),
            status => status,
        }
    }
    Success fn cudnnDestroy(handle: Word) { handle_memory::destroy(handle) }
    Real fn cudnnSetStream(handle: Word, stream: StreamHandle) {
        set_stream(handle, stream);
        OK
    }
    Real fn cudnnGetStream(handle: Word, out: Out<StreamHandle>) { out.give(stream_of(handle)) }
    Real fn cudnnBackendCreateDescriptor(descriptor_type: c_int, out: Out<usize>) {
        by_contract!(create_descriptor(descriptor_type, out))
    }
    Real fn cudnnBackendDestroyDescriptor(descriptor: Word) { by_contract!(destroy_descriptor(descriptor)) }
    Real fn cudnnBackendSetAttribute(descriptor: Word, name: c_int, kind: c_int, count: i64, values: Word) {
        // The phantom's cuDNN handle is not valid for the real library, so it is not passed on.
        let is_handle = matches!(name, CUDNN_ATTR_OPERATIONGRAPH_HANDLE | CUDNN_ATTR_EXECUTION_PLAN_HANDLE);
        if kind == CUDNN_TYPE_VOID_PTR {
            by_contract!(keep_addresses(descriptor, name, count, In::from_address(values)));
        }
        match real() {
            Some(real) if !is_handle => {
                if name == CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG {
                    let configuration = by_contract!(In::<usize>::from_address(values)).get();
                    let mut first = lock(&real.first);
                    if configuration.is_some_and(|configuration| first.contains(&configuration)) {
                        first.insert(descriptor);
                    }
                }
                by_contract!((real.set)(descriptor, name, kind, count, values))
            }
            _ => OK,
        }
    }
    Real fn cudnnBackendFinalize(descriptor: Word) { by_contract!(finalize(descriptor)) }
    Real fn cudnnBackendGetAttribute(
        descriptor: Word, name: c_int, kind: c_int, wanted: i64, count: Out<i64>, values: Word,
    ) {
        by_contract!(get_attribute(descriptor, AttributeRequest { name, kind, wanted, count, values }))
    }
    Success fn cudnnBackendExecute(handle: Word, _plan: Word, values: Word) {
        let addresses = ADDRESSES.of_descriptor(values);
        // The addresses of another descriptor are never found here: destroying a descriptor removes its
        // addresses, and the stand-in gives every descriptor a new address.
        launch_library(stream_of(handle), addresses.map(|addresses| launch_of(&addresses)))
    }
}
