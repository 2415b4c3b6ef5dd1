//! The private pool of a block: a pool of a CUDA graph or of `torch.cuda.MemPool`.
//!
//! The user of a pool gives the allocator a filter, a `std::function` that returns whether the allocations of
//! a stream belong to the pool. The allocator calls this filter at each allocation, on the allocating thread,
//! just before it reports the block. We hook the function that takes the filter (`beginAllocateToPool`, a
//! slot of the allocator's vtable), wrap the filter, and store the pool of the last filter that returned
//! true.
//!
//! Up to torch 2.1 there is no filter. A stream belongs to a pool from `beginAllocateStreamToPool` to
//! `endAllocateStreamToPool`, and so does every allocation by a thread whose current stream it is.
//!
//! The slot differs between versions. torch's pluggable allocator derives from the same class, and exports
//! both its vtable and these functions. So the position of a function in that vtable is the slot. If no
//! function is found, `pool` stays 0, and the meta row reports that pools are unknown.

use std::ffi::{CStr, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};

use crate::ffi::symbols::find_in_loaded;
use crate::ffi::torch::current_stream;
use crate::ffi::vtables;
use crate::guard::shielded;
use crate::runtime::fork::ForkSafe;
use crate::runtime::thread::{self, ThreadState};

/// The vtable of torch's pluggable allocator. It is in one of [`LIBRARIES`], depending on the version.
const TABLE: &CStr = c"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";
const LIBRARIES: [&str; 2] = ["libtorch_cuda.so", "libtorch_python.so"];
/// The maximum number of words to search in the vtable of the class. The class has fewer virtual functions.
const FUNCTIONS: usize = 96;

/// A virtual function that we hook.
struct Hook {
    /// The symbol of the same function in the pluggable allocator. Its position in that allocator's vtable is
    /// the slot.
    name: &'static CStr,
    real: &'static AtomicPtr<c_void>,
    ours: fn() -> *mut c_void,
}

static REAL_BEGIN: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static REAL_BEGIN_STREAM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
static REAL_END_STREAM: AtomicPtr<c_void> = AtomicPtr::new(null_mut());

static HOOKS: &[Hook] = &[
    // Newer versions pass the device as one byte (`a` in the symbol) instead of an `int` (`i`), in the same
    // register.
    Hook {
        name: c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator19beginAllocateToPoolEaSt4pairIyyESt8functionIFbP11CUstream_stEE",
        real: &REAL_BEGIN,
        ours: || begin as *mut c_void,
    },
    Hook {
        name: c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator19beginAllocateToPoolEiSt4pairIyyESt8functionIFbP11CUstream_stEE",
        real: &REAL_BEGIN,
        ours: || begin as *mut c_void,
    },
    Hook {
        name: c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator25beginAllocateStreamToPoolEiP11CUstream_stSt4pairIyyE",
        real: &REAL_BEGIN_STREAM,
        ours: || begin_stream as *mut c_void,
    },
    Hook {
        name: c"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator23endAllocateStreamToPoolEiP11CUstream_st",
        real: &REAL_END_STREAM,
        ours: || end_stream as *mut c_void,
    },
];

/// Returns the hooks whose functions this torch has, with their slots.
fn hooks_with_slots() -> Vec<(usize, &'static Hook)> {
    let places = LIBRARIES.map(|library| (library, find_in_loaded(library, TABLE).cast::<*mut c_void>()));
    let Some((library, table)) = places.into_iter().find(|(_, table)| !table.is_null()) else {
        return Vec::new();
    };
    let functions = vtables::functions_of_table(table, FUNCTIONS);
    let slot = |hook: &'static Hook| {
        let function = find_in_loaded(library, hook.name);
        let slot = functions.iter().position(|of| *of == function).filter(|_| !function.is_null())?;
        Some((slot, hook))
    };
    HOOKS.iter().filter_map(slot).collect()
}

/// Returns true if the pool of a block can be determined with this torch.
pub(crate) fn are_known() -> bool {
    !hooks_with_slots().is_empty()
}

/// Replaces functions in an allocator's vtable with our hooks.
pub(crate) fn hook(functions: &mut [*mut c_void]) {
    for (slot, hook) in hooks_with_slots() {
        if let Some(place) = functions.get_mut(slot).filter(|place| !place.is_null()) {
            hook.real.store(*place, Ordering::Release);
            *place = (hook.ours)();
        }
    }
}

/// `void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>)`: the id is two
/// words in registers, the function is passed by its address.
type Begin = unsafe extern "C-unwind" fn(*mut c_void, usize, u64, u64, *mut Function);
/// `void beginAllocateStreamToPool(int, cudaStream_t, MempoolId_t)`.
type BeginStream = unsafe extern "C-unwind" fn(*mut c_void, usize, usize, u64, u64);
/// `void endAllocateStreamToPool(int, cudaStream_t)`.
type EndStream = unsafe extern "C-unwind" fn(*mut c_void, usize, usize);

/// libstdc++'s `std::function`. Its layout has not changed since GCC 4.9.
#[repr(C)]
struct Function {
    data: [usize; 2],
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

type Manager = unsafe extern "C-unwind" fn(*mut [usize; 2], *const [usize; 2], u32) -> bool;
/// The second argument is a reference to the stream, which is only passed on.
type Invoker = unsafe extern "C-unwind" fn(*const [usize; 2], usize) -> bool;

/// A filter that torch passed to the allocator, and the number of its pool.
struct Filter {
    inner: Function,
    pool: u16,
}

/// The ids of the pools seen so far. The number of a pool is its index plus 1.
static POOLS: ForkSafe<Vec<(u64, u64)>> = ForkSafe::new(Vec::new());

/// A stream that belongs to a pool.
struct Stream {
    device: i8,
    /// CUDA's handle of the stream. `id` is torch's id of the same stream.
    handle: usize,
    id: i64,
    pool: u16,
}

static STREAMS: ForkSafe<Vec<Stream>> = ForkSafe::new(Vec::new());
/// The length of [`STREAMS`]. It is always 0 after torch 2.1. Up to torch 2.1, it is 0 except while a stream
/// belongs to a pool.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// Returns the pool of the allocation in progress on this thread, which is on `device` with `stream` as the
/// current stream; 0 for the default pool.
#[inline]
pub(crate) fn current(device: i8, stream: i64) -> u16 {
    of_filter_or_stream(thread::with(|state| state.pool.get()).unwrap_or(0), device, stream)
}

/// Same as [`current`], at the end of an allocation on the thread of `state`. Resets the pool for the next
/// allocation.
#[inline]
pub(crate) fn take(state: &ThreadState, device: i8, stream: i64) -> u16 {
    of_filter_or_stream(state.pool.replace(0), device, stream)
}

#[inline]
fn of_filter_or_stream(filtered: u16, device: i8, stream: i64) -> u16 {
    if filtered == 0 { of_stream(device, stream) } else { filtered }
}

#[inline]
fn of_stream(device: i8, stream: i64) -> u16 {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return 0;
    }
    let is_it = |of: &&Stream| of.device == device && of.id == stream;
    STREAMS.with(|streams| streams.iter().find(is_it).map_or(0, |of| of.pool))
}

unsafe extern "C-unwind" fn begin_stream(
    this: *mut c_void,
    device: usize,
    stream: usize,
    high: u64,
    low: u64,
) {
    shielded(|| {
        // The caller has made `stream` the current stream of this thread.
        let id = current_stream(device as i8);
        let of = Stream { device: device as i8, handle: stream, id, pool: number(high, low) };
        STREAMS.with(|streams| {
            streams.push(of);
            COUNT.store(streams.len(), Ordering::Relaxed);
        });
    });
    let real = vtables::replaced(&REAL_BEGIN_STREAM);
    // SAFETY: `real` is the slot's original function, which was stored before ours replaced it.
    let real = unsafe { std::mem::transmute::<*mut c_void, BeginStream>(real) };
    // SAFETY: the call passes on the caller's own arguments unchanged.
    unsafe { real(this, device, stream, high, low) }
}

unsafe extern "C-unwind" fn end_stream(this: *mut c_void, device: usize, stream: usize) {
    shielded(|| {
        STREAMS.with(|streams| {
            streams.retain(|of| of.device != device as i8 || of.handle != stream);
            COUNT.store(streams.len(), Ordering::Relaxed);
        });
    });
    let real = vtables::replaced(&REAL_END_STREAM);
    // SAFETY: `real` is the slot's original function, which was stored before ours replaced it.
    let real = unsafe { std::mem::transmute::<*mut c_void, EndStream>(real) };
    // SAFETY: the call passes on the caller's own arguments unchanged.
    unsafe { real(this, device, stream) }
}

unsafe extern "C-unwind" fn begin(
    this: *mut c_void,
    device: usize,
    high: u64,
    low: u64,
    filter: *mut Function,
) {
    shielded(|| {
        // SAFETY: `filter` is null or the caller's own function object, which is alive during the call.
        let Some(filter) = (unsafe { filter.as_mut() }) else { return };
        if filter.manager.is_none() || filter.invoker.is_none() {
            return;
        }
        let own = Function { data: [0; 2], manager: Some(manage), invoker: Some(invoke) };
        let inner = std::mem::replace(filter, own);
        filter.data[0] = Box::into_raw(Box::new(Filter { inner, pool: number(high, low) })) as usize;
    });
    let real = vtables::replaced(&REAL_BEGIN);
    // SAFETY: `real` is the slot's original function, which was stored before ours replaced it.
    let real = unsafe { std::mem::transmute::<*mut c_void, Begin>(real) };
    // SAFETY: the call passes on the caller's own arguments. The wrapped filter returns what the original
    // filter returns.
    unsafe { real(this, device, high, low, filter) }
}

/// Returns the number of a pool; 0 if the number does not fit into a row.
fn number(high: u64, low: u64) -> u16 {
    POOLS.with(|pools| {
        let known = pools.iter().position(|id| *id == (high, low));
        let place = known.unwrap_or_else(|| {
            pools.push((high, low));
            pools.len() - 1
        });
        u16::try_from(place + 1).unwrap_or(0)
    })
}

/// Implements the operations of a `std::function` on its content (`std::_Manager_operation`).
unsafe extern "C-unwind" fn manage(to: *mut [usize; 2], from: *const [usize; 2], operation: u32) -> bool {
    const GET_POINTER: u32 = 1;
    const CLONE: u32 = 2;
    const DESTROY: u32 = 3;
    match operation {
        // SAFETY: `to` and `from` point to the contents of function objects, and `from` holds the filter of
        // `begin` or of a clone.
        GET_POINTER => unsafe { (*to)[0] = (*from)[0] },
        CLONE => {
            // SAFETY: as above; the filter lives until it is destroyed.
            let old = unsafe { &*((*from)[0] as *const Filter) };
            let mut inner = Function { data: old.inner.data, ..old.inner };
            if let Some(manager) = old.inner.manager {
                // SAFETY: the call applies the same operation to the content of torch's own function.
                unsafe { manager(&raw mut inner.data, &raw const old.inner.data, operation) };
            }
            // SAFETY: as above.
            unsafe { (*to)[0] = Box::into_raw(Box::new(Filter { inner, pool: old.pool })) as usize };
        }
        DESTROY => {
            // SAFETY: as above; a function object destroys its content once.
            let mut filter = unsafe { Box::from_raw((*to)[0] as *mut Filter) };
            let data = &raw mut filter.inner.data;
            if let Some(manager) = filter.inner.manager {
                // SAFETY: the call applies the same operation to the content of torch's own function.
                unsafe { manager(data, data, operation) };
            }
        }
        // The remaining operation asks for the C++ type of the content. Return null, because a filter has no
        // such type.
        // SAFETY: as above.
        _ => unsafe { (*to)[0] = 0 },
    }
    false
}

unsafe extern "C-unwind" fn invoke(data: *const [usize; 2], stream: usize) -> bool {
    // SAFETY: the function object holds the filter of `begin` or of a clone.
    let filter = unsafe { &*((*data)[0] as *const Filter) };
    let Some(invoker) = filter.inner.invoker else { return false };
    // SAFETY: the call passes the caller's own argument to torch's own function.
    let yes = unsafe { invoker(&raw const filter.inner.data, stream) };
    if yes {
        thread::with(|state| state.pool.set(filter.pool));
    }
    yes
}
