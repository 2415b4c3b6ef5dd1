//! The device memory that NCCL takes for its buffers.
//!
//! A connection of NCCL has a buffer for its three protocols on the receiving side and a small one on the
//! sending side, each in whole pages of 2 MiB (`computeBuffSizes` in NCCL's `init.cc`, the setup of the
//! transports in `transport/p2p.cc`): 10 MiB and 2 MiB, as a run on H100 cards logged it (NVIDIA/nccl issue
//! 1685). A ring has one of each per channel. On a card, trees, other machines and pairs that send to each
//! other add to it; here they do not, so this is a lower bound. The number of channels depends on the
//! machine's links ([`Card::nccl_channels`](memtrace_cards::Card::nccl_channels)) and can be set.
//!
//! cuBLAS, cuDNN, cuFFT, cuSOLVER and cuSPARSE take nothing here: we found no source that says how much their
//! handles take.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::mem::zeroed;
use std::ptr::null;

use cudarc::driver::sys::{CUmemAllocationProp, CUmemAllocationType, CUmemLocationType};

use crate::core::ffi::{OK, Status};
use crate::core::host_state::host_state;
use crate::core::vram::PAGE;

thread_local! {
    static STANDS_FOR: Cell<Option<&'static CStr>> = const { Cell::new(None) };
}

/// The library for which the calling thread calls the driver now, or null. The tracer attributes the memory
/// to it.
// SAFETY: only this library defines the name.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_stands_for() -> *const c_char {
    STANDS_FOR.try_with(Cell::get).ok().flatten().map_or(null(), CStr::as_ptr)
}

/// Runs driver calls on behalf of a library.
fn on_behalf_of<T>(library: &'static CStr, calls: impl FnOnce() -> T) -> T {
    let _ = STANDS_FOR.try_with(|cell| cell.set(Some(library)));
    let result = calls();
    let _ = STANDS_FOR.try_with(|cell| cell.set(None));
    result
}

/// Finds a function of the driver as any other library finds it, so that a tracer which was loaded before
/// this library sees the call. (This library is linked to bind its own names first, so `RTLD_DEFAULT` would
/// find itself.)
///
/// # Safety
/// `F` is the type of a function pointer, with the signature that `cuda.h` gives the function of this name.
unsafe fn find_in_program<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) };
    // SAFETY: a null name is the program itself, which stays open.
    let program = unsafe { libc::dlopen(null(), libc::RTLD_LAZY) };
    // SAFETY: an open handle and a C string.
    let found = unsafe { libc::dlsym(program, name.as_ptr()) };
    // SAFETY: the caller's promise.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut libc::c_void, F>(&found) })
}

type MemCreate = unsafe extern "C" fn(*mut u64, usize, *const CUmemAllocationProp, u64) -> Status;
type MemRelease = unsafe extern "C" fn(u64) -> Status;

/// Physical device memory that a library took.
#[derive(Debug, Default)]
pub(crate) struct LibraryMemory {
    handles: Vec<u64>,
}

impl LibraryMemory {
    /// Allocates buffers of these sizes on behalf of a library, each in whole pages. On an error nothing stays
    /// allocated.
    pub(crate) fn alloc(library: &'static CStr, device: usize, sizes: &[usize]) -> Result<Self, Status> {
        // SAFETY: the signature of cuda.h.
        let create = unsafe { find_in_program::<MemCreate>(c"cuMemCreate") };
        let Some(create) = create else { return Ok(Self::default()) };
        // SAFETY: zero is a value of each field: no handle type, null, no flags.
        let mut properties: CUmemAllocationProp = unsafe { zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        properties.location.id = device as c_int;
        let mut memory = Self::default();
        on_behalf_of(library, || {
            for &size in sizes {
                let mut handle = 0;
                // SAFETY: both places are good for the call.
                let status =
                    unsafe { create(&raw mut handle, size.next_multiple_of(PAGE), &raw const properties, 0) };
                if status != OK {
                    memory.release();
                    return Err(status);
                }
                memory.handles.push(handle);
            }
            Ok(())
        })
        .map(|()| memory)
    }

    /// Frees the buffers on behalf of the library.
    pub(crate) fn free(mut self, library: &'static CStr) {
        on_behalf_of(library, || self.release());
    }

    fn release(&mut self) {
        // SAFETY: the signature of cuda.h.
        let release = unsafe { find_in_program::<MemRelease>(c"cuMemRelease") };
        let Some(release) = release else { return };
        for handle in self.handles.drain(..) {
            // SAFETY: a handle that cuMemCreate wrote, released once.
            unsafe { release(handle) };
        }
    }
}

/// The value of one of NCCL's variables. A value that is not a number counts as the default, as in NCCL.
fn variable(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.trim().parse().ok()).unwrap_or(default)
}

/// `MAXCHANNELS`, and a bound above any buffer size.
const MAX_CHANNELS: usize = 64;
const MAX_BUFFER: usize = 1 << 32;

/// The bytes of a buffer's control structures on either side.
const CONTROL: usize = 4096;

/// The sizes in bytes of the buffers of one ring: for each channel the receiving and the sending side.
pub(crate) fn ring_buffers() -> Vec<usize> {
    let protocols =
        [("NCCL_LL_BUFFSIZE", 512 << 10), ("NCCL_LL128_BUFFSIZE", 4800 << 10), ("NCCL_BUFFSIZE", 4 << 20)];
    let receiving = protocols.iter().map(|&(name, default)| variable(name, default)).sum::<usize>() + CONTROL;
    let channels = host_state().spec.channels as usize;
    let channels =
        channels.max(variable("NCCL_MIN_NCHANNELS", 0)).min(variable("NCCL_MAX_NCHANNELS", channels));
    (0..channels.min(MAX_CHANNELS)).flat_map(|_| [receiving.min(MAX_BUFFER), CONTROL]).collect()
}
