//! The private pool that a block lies in: those of CUDA graphs and of `torch.cuda.MemPool`.
//!
//! Whoever wants a pool gives the allocator a filter, a `std::function` that says of a stream whether
//! its allocations belong to the pool; the allocator asks it at each allocation, on the allocating thread,
//! just before it reports the block. We stand before the function that takes the filter
//! (`beginAllocateToPool`, a slot of the allocator's vtable), put a filter of ours around it, and
//! remember which one said yes last.
//!
//! The slot is known by torch's version only; for others `pool` stays 0 and the meta row says so.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, Ordering};

use memtrace_record::forklock::ForkLock;

use crate::guard::shielded;
use crate::thread;

/// The slot of `beginAllocateToPool` in each minor version of torch 2 whose header was read
/// (`c10/cuda/CUDACachingAllocator.h`).
const SLOTS: &[(u32, usize)] = &[(6, 23), (11, 26), (15, 26)];

/// The slot in torch `version`.
pub(crate) fn slot(version: (u32, u32)) -> Option<usize> {
    let (major, minor) = version;
    SLOTS.iter().find(|(of, _)| major == 2 && *of == minor).map(|(_, slot)| *slot)
}

/// `void beginAllocateToPool(DeviceIndex, MempoolId_t, std::function<bool(cudaStream_t)>)`: the id is two
/// words in registers, the function is passed by its address.
type Begin = unsafe extern "C-unwind" fn(*mut c_void, usize, u64, u64, *mut Function);

/// libstdc++'s `std::function`, the same since GCC 4.9.
#[repr(C)]
struct Function {
    data: [usize; 2],
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

type Manager = unsafe extern "C-unwind" fn(*mut [usize; 2], *const [usize; 2], u32) -> bool;
/// The argument is a reference to the stream; only handed on.
type Invoker = unsafe extern "C-unwind" fn(*const [usize; 2], usize) -> bool;

/// A filter of torch's, and the pool that it is for.
struct Filter {
    inner: Function,
    pool: u16,
}

static REAL: AtomicPtr<c_void> = AtomicPtr::new(null_mut());
/// The ids of pools; their numbers are their places, from 1 on.
static POOLS: ForkLock<Vec<(u64, u64)>> = ForkLock::new(Vec::new());

/// The pool of the allocation that this thread is in; 0 for the default.
#[inline]
pub(crate) fn current() -> u16 {
    thread::with(|own| own.pool.get()).unwrap_or(0)
}

/// As [`current`], for the last word about an allocation.
#[inline]
pub(crate) fn take() -> u16 {
    thread::with(|own| own.pool.replace(0)).unwrap_or(0)
}

/// Our function for the slot, which has `real` in it.
pub(crate) fn hook(real: *mut c_void) -> *mut c_void {
    REAL.store(real, Ordering::Release);
    begin as *mut c_void
}

unsafe extern "C-unwind" fn begin(
    this: *mut c_void,
    device: usize,
    high: u64,
    low: u64,
    filter: *mut Function,
) {
    shielded(|| {
        // SAFETY: the caller's own function object, alive during the call; the address is checked.
        let Some(filter) = (unsafe { filter.as_mut() }) else { return };
        if filter.manager.is_none() || filter.invoker.is_none() {
            return;
        }
        let own = Function { data: [0; 2], manager: Some(manage), invoker: Some(invoke) };
        let inner = std::mem::replace(filter, own);
        filter.data[0] = Box::into_raw(Box::new(Filter { inner, pool: number(high, low) })) as usize;
    });
    let real = REAL.load(Ordering::Acquire);
    // SAFETY: the slot's own function, stored before ours was put there.
    let real = unsafe { std::mem::transmute::<*mut c_void, Begin>(real) };
    // SAFETY: the caller's own arguments; the filter answers as before.
    unsafe { real(this, device, high, low, filter) }
}

/// The number of a pool; 0 when there are more than a row can tell apart.
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

/// What `std::function` does with what it holds: `std::_Manager_operation`.
unsafe extern "C-unwind" fn manage(to: *mut [usize; 2], from: *const [usize; 2], operation: u32) -> bool {
    const GET_POINTER: u32 = 1;
    const CLONE: u32 = 2;
    const DESTROY: u32 = 3;
    match operation {
        // SAFETY: both places are a function object's, and `from` holds what `begin` or a clone put there.
        GET_POINTER => unsafe { (*to)[0] = (*from)[0] },
        CLONE => {
            // SAFETY: as above; the filter lives until it is destroyed.
            let old = unsafe { &*((*from)[0] as *const Filter) };
            let mut inner = Function { data: old.inner.data, ..old.inner };
            if let Some(manager) = old.inner.manager {
                // SAFETY: the same operation on what torch's own function holds.
                unsafe { manager(&raw mut inner.data, &raw const old.inner.data, operation) };
            }
            // SAFETY: as above.
            unsafe { (*to)[0] = Box::into_raw(Box::new(Filter { inner, pool: old.pool })) as usize };
        }
        DESTROY => {
            // SAFETY: as above; a function object destroys what it holds once.
            let mut filter = unsafe { Box::from_raw((*to)[0] as *mut Filter) };
            let data = &raw mut filter.inner.data;
            if let Some(manager) = filter.inner.manager {
                // SAFETY: the same operation on what torch's own function holds.
                unsafe { manager(data, data, operation) };
            }
        }
        // The type of what it holds: none that anybody could ask for.
        // SAFETY: as above.
        _ => unsafe { (*to)[0] = 0 },
    }
    false
}

unsafe extern "C-unwind" fn invoke(data: *const [usize; 2], stream: usize) -> bool {
    // SAFETY: the function object holds what `begin` or a clone put there.
    let filter = unsafe { &*((*data)[0] as *const Filter) };
    let Some(invoker) = filter.inner.invoker else { return false };
    // SAFETY: the caller's own argument, passed on to torch's own function.
    let yes = unsafe { invoker(&raw const filter.inner.data, stream) };
    if yes {
        thread::with(|own| own.pool.set(filter.pool));
    }
    yes
}

/// Before a fork; see [`ForkLock`].
pub(crate) fn lock_for_fork() {
    POOLS.lock_for_fork();
}

/// After a fork, on both sides.
pub(crate) fn unlock_after_fork() {
    POOLS.unlock_after_fork();
}
