//! Queries the driver for the memory of a device: free memory, memory pools and graphs. Runs on the writer
//! thread.

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
// SAFETY: here and below, the types are the ones in cuda.h.
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

/// Fills in the memory of pools and graphs, and with `with_memory` also total and free memory. Does nothing
/// if the process has no context on the device.
///
/// # Safety
/// `ordinal` is a device that the driver knows.
pub(crate) unsafe fn fill(ordinal: c_int, with_memory: bool, sample: &mut Sample) -> Option<()> {
    let (mut flags, mut is_active) = (0, 0);
    // SAFETY: the out-parameters are valid for writes. The query creates no context.
    if unsafe { GET_STATE.get()?(ordinal, &raw mut flags, &raw mut is_active) } != SUCCESS || is_active == 0 {
        return None;
    }
    // The relaxed mode keeps memtrace's queries from invalidating a graph capture on another thread.
    if let Some(exchange) = EXCHANGE_MODE.get() {
        let mut mode = CaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED as c_int;
        // SAFETY: `mode` is valid, and the mode is per thread.
        unsafe { exchange(&raw mut mode) };
    }
    // SAFETY: the process has a context on the device.
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
/// The process has a context on the device.
unsafe fn fill_memory(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    let (retain, release, push, pop, info) =
        (RETAIN.get()?, RELEASE.get()?, PUSH.get()?, POP.get()?, GET_INFO.get()?);
    let (mut context, mut free, mut total) = (null_mut(), 0, 0);
    // SAFETY: every out-parameter is valid for writes. The context is popped and released again.
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

/// Returns the bytes of pools or graphs, or `None` until the first nonzero value. Most programs use neither,
/// and a sample without them costs no row. After the first nonzero value, 0 is returned as 0, because it is a
/// change.
fn once_held(held: &AtomicBool, value: u64) -> Option<i64> {
    if value > 0 {
        held.store(true, Ordering::Relaxed);
    }
    bytes(value).filter(|_| held.load(Ordering::Relaxed))
}

/// # Safety
/// The process has a context on the device.
unsafe fn fill_graphs(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    const RESERVED: c_int = GraphAttribute::CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT as c_int;
    let mut value = 0;
    // SAFETY: the call passes an out-parameter that is valid for writes.
    if unsafe { GET_GRAPH_ATTRIBUTE.get()?(ordinal, RESERVED, &raw mut value) } == SUCCESS {
        sample.graphs = once_held(&GRAPHS_HELD, value);
    }
    Some(())
}

/// # Safety
/// The process has a context on the device.
unsafe fn fill_pools(ordinal: c_int, sample: &mut Sample) -> Option<()> {
    const RESERVED: c_int = PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT as c_int;
    const USED: c_int = PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT as c_int;
    let (get_pool, attribute) = (GET_POOL.get()?, GET_POOL_ATTRIBUTE.get()?);
    let (mut pool, mut value) = (null_mut(), 0);
    // SAFETY: the out-parameters are valid for writes, and the driver returned the pool.
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
