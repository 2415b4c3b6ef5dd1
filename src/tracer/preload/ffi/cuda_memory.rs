//! The driver's own numbers of a device: free memory, memory pools and graphs. Asked on the writer thread.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_trace::sample::Sample;

use crate::ffi::cuda_types::{CaptureMode, GraphAttribute, PoolAttribute, SUCCESS};
use crate::ffi::nvml::bytes;
use crate::ffi::symbols::{Home, Symbol};

type GetState = unsafe extern "C" fn(c_int, *mut c_uint, *mut c_int) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type Release = unsafe extern "C" fn(c_int) -> c_int;
type Push = unsafe extern "C" fn(*mut c_void) -> c_int;
type Pop = unsafe extern "C" fn(*mut *mut c_void) -> c_int;
type GetInfo = unsafe extern "C" fn(*mut usize, *mut usize) -> c_int;
type Exchange = unsafe extern "C" fn(*mut c_int) -> c_int;
type GetPool = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type GetPoolAttribute = unsafe extern "C" fn(*mut c_void, c_int, *mut u64) -> c_int;
type GetGraphAttribute = unsafe extern "C" fn(c_int, c_int, *mut u64) -> c_int;

const DRIVER: Home = Home::Anywhere("libcuda.so");
// SAFETY: the types are those in cuda.h, here and below.
static GET_STATE: Symbol<GetState> = unsafe { Symbol::new(c"cuDevicePrimaryCtxGetState", DRIVER) };
// SAFETY: as above.
static RETAIN: Symbol<Retain> = unsafe { Symbol::new(c"cuDevicePrimaryCtxRetain", DRIVER) };
// SAFETY: as above.
static RELEASE: Symbol<Release> = unsafe { Symbol::new(c"cuDevicePrimaryCtxRelease_v2", DRIVER) };
// SAFETY: as above.
static PUSH: Symbol<Push> = unsafe { Symbol::new(c"cuCtxPushCurrent_v2", DRIVER) };
// SAFETY: as above.
static POP: Symbol<Pop> = unsafe { Symbol::new(c"cuCtxPopCurrent_v2", DRIVER) };
// SAFETY: as above.
static GET_INFO: Symbol<GetInfo> = unsafe { Symbol::new(c"cuMemGetInfo_v2", DRIVER) };
// SAFETY: as above.
static EXCHANGE_MODE: Symbol<Exchange> = unsafe { Symbol::new(c"cuThreadExchangeStreamCaptureMode", DRIVER) };
// SAFETY: as above.
static GET_POOL: Symbol<GetPool> = unsafe { Symbol::new(c"cuDeviceGetMemPool", DRIVER) };
// SAFETY: as above.
static GET_POOL_ATTRIBUTE: Symbol<GetPoolAttribute> =
    unsafe { Symbol::new(c"cuMemPoolGetAttribute", DRIVER) };
// SAFETY: as above.
static GET_GRAPH_ATTRIBUTE: Symbol<GetGraphAttribute> =
    unsafe { Symbol::new(c"cuDeviceGetGraphMemAttribute", DRIVER) };

/// Fills in pools and graphs, and total and free memory if `with_memory`. Does nothing for a device without a
/// context of the process.
///
/// # Safety
/// `ordinal` is a device of the driver.
pub(crate) unsafe fn fill(ordinal: c_int, with_memory: bool, sample: &mut Sample) -> Option<()> {
    let (mut flags, mut is_active) = (0, 0);
    // SAFETY: the places are valid for the answer. The query creates no context.
    if unsafe { GET_STATE.get()?(ordinal, &raw mut flags, &raw mut is_active) } != SUCCESS || is_active == 0 {
        return None;
    }
    // A query of ours must not break another thread's capture of a graph.
    if let Some(exchange) = EXCHANGE_MODE.get() {
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: the place is valid; the mode is this thread's alone.
        unsafe { exchange(&raw mut mode) };
    }
    // SAFETY: the device has its context.
    unsafe {
        if with_memory {
            fill_memory(ordinal, sample);
        }
        fill_graphs(ordinal, sample);
        fill_pools(ordinal, sample);
    }
    Some(())
}

/// # Safety
/// The device has its context.
unsafe fn fill_memory(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    let (retain, release, push, pop, info) =
        (RETAIN.get()?, RELEASE.get()?, PUSH.get()?, POP.get()?, GET_INFO.get()?);
    let (mut context, mut free, mut total) = (null_mut(), 0, 0);
    // SAFETY: every place is valid for its answer. The context is released and popped again.
    unsafe {
        if retain(&raw mut context, ordinal) != SUCCESS {
            return None;
        }
        if push(context) == SUCCESS {
            if info(&raw mut free, &raw mut total) == SUCCESS {
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

/// The bytes of pools or graphs; `None` until the first sample with some. Most programs have neither, and a
/// sample without them costs no row; after the first, 0 bytes are a change.
fn once_held(held: &AtomicBool, value: u64) -> Option<i64> {
    if value > 0 {
        held.store(true, Ordering::Relaxed);
    }
    bytes(value).filter(|_| held.load(Ordering::Relaxed))
}

/// # Safety
/// The device has its context.
unsafe fn fill_graphs(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    const RESERVED: c_int = GraphAttribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT as c_int;
    let mut value = 0;
    // SAFETY: the driver's own function, and the place is valid for the answer.
    if unsafe { GET_GRAPH_ATTRIBUTE.get()?(ordinal, RESERVED, &raw mut value) } == SUCCESS {
        sample.graphs = once_held(&GRAPHS_HELD, value);
    }
    Some(())
}

/// # Safety
/// The device has its context.
unsafe fn fill_pools(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    const RESERVED: c_int = PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as c_int;
    const USED: c_int = PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as c_int;
    let (get_pool, attribute) = (GET_POOL.get()?, GET_POOL_ATTRIBUTE.get()?);
    let (mut pool, mut value) = (null_mut(), 0);
    // SAFETY: the places are valid for the answers, and the pool is the driver's own.
    unsafe {
        if get_pool(&raw mut pool, ordinal) != SUCCESS {
            return None;
        }
        if attribute(pool, RESERVED, &raw mut value) == SUCCESS {
            sample.pool_reserved = once_held(&POOL_HELD, value);
            if sample.pool_reserved.is_some() && attribute(pool, USED, &raw mut value) == SUCCESS {
                sample.pool_used = bytes(value);
            }
        }
    }
    Some(())
}
