//! What NVIDIA's libraries take of the device for themselves, as far as it is known: the buffers of NCCL.
//!
//! A connection of NCCL has a buffer on the receiver's side for its three protocols and a small one on the
//! sender's, each in whole pages of 2 MiB (`computeBuffSizes` in NCCL's `init.cc`, the setup of the transports
//! in `transport/p2p.cc`): 10 MiB and 2 MiB, which is what a run on H100 cards logged (NVIDIA/nccl issue 1685).
//! A ring has one of either in each channel. Trees, other machines and pairs that send to each other add to it on a
//! card and not here: what is taken here is the least. How many channels there are hangs on the machine's links
//! ([`Card::nccl_channels`](memtrace_cards::Card::nccl_channels)) and is settable.
//!
//! cuBLAS, cuDNN, cuFFT, cuSOLVER and cuSPARSE take nothing here: we found no source that says what their handles do.

use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int};
use std::ptr::null;

use crate::core::ffi::{OK, Status};
use crate::core::host_state::machine;
use crate::core::vram::PAGE;

thread_local! {
    static STANDS_FOR: Cell<Option<&'static CStr>> = const { Cell::new(None) };
}

/// The library that this one stands for in a call that the thread makes; null when it is none. The tracer asks, to
/// name it.
// SAFETY: the name is ours alone.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn memtrace_phantom_stands_for() -> *const c_char {
    STANDS_FOR.try_with(Cell::get).ok().flatten().map_or(null(), CStr::as_ptr)
}

/// Finds a function of the driver as every other library does: a tracer may stand before ours. (For this library,
/// which is linked to find itself first, `RTLD_DEFAULT` is itself.)
fn outside<F: Copy>(name: &CStr) -> Option<F> {
    const { assert!(size_of::<F>() == size_of::<usize>()) };
    // SAFETY: no name is the program itself, which stays open.
    let program = unsafe { libc::dlopen(null(), libc::RTLD_LAZY) };
    // SAFETY: an open handle and a C string.
    let found = unsafe { libc::dlsym(program, name.as_ptr()) };
    // SAFETY: the callers below name the function's type, as cuda.h declares it.
    (!found.is_null()).then(|| unsafe { std::mem::transmute_copy::<*mut libc::c_void, F>(&found) })
}

/// Physical memory that a library took.
#[derive(Debug, Default)]
pub(crate) struct Taken {
    handles: Vec<u64>,
}

type Create = unsafe extern "C" fn(*mut u64, usize, *const [c_int; 8], u64) -> Status;
type Release = unsafe extern "C" fn(u64) -> Status;

impl Taken {
    /// Takes memory of so many bytes each, in whole pages, in the name of a library. All or nothing.
    pub(crate) fn new(library: &'static CStr, device: usize, sizes: &[usize]) -> Result<Taken, Status> {
        let Some(create) = outside::<Create>(c"cuMemCreate") else { return Ok(Taken::default()) };
        // Pinned, on that device.
        let properties = [1, 0, 1, device as c_int, 0, 0, 0, 0];
        let mut taken = Taken::default();
        let _ = STANDS_FOR.try_with(|cell| cell.set(Some(library)));
        let mut status = OK;
        for &size in sizes {
            let mut handle = 0;
            // SAFETY: the places are valid for the call.
            status =
                unsafe { create(&raw mut handle, size.next_multiple_of(PAGE), &raw const properties, 0) };
            if status != OK {
                break;
            }
            taken.handles.push(handle);
        }
        if status != OK {
            taken.release();
        }
        let _ = STANDS_FOR.try_with(|cell| cell.set(None));
        if status == OK { Ok(taken) } else { Err(status) }
    }

    /// Gives it back.
    pub(crate) fn give(mut self, library: &'static CStr) {
        let _ = STANDS_FOR.try_with(|cell| cell.set(Some(library)));
        self.release();
        let _ = STANDS_FOR.try_with(|cell| cell.set(None));
    }

    fn release(&mut self) {
        let Some(release) = outside::<Release>(c"cuMemRelease") else { return };
        for handle in self.handles.drain(..) {
            // SAFETY: a handle that the driver gave, released once.
            unsafe { release(handle) };
        }
    }
}

/// NCCL's own variables; what it does not understand is its default.
fn variable(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.trim().parse().ok()).unwrap_or(default)
}

/// The buffers of a ring: for each channel the receiver's and the sender's.
pub(crate) fn ring_of_nccl() -> Vec<usize> {
    let protocols =
        [("NCCL_LL_BUFFSIZE", 512 << 10), ("NCCL_LL128_BUFFSIZE", 4800 << 10), ("NCCL_BUFFSIZE", 4 << 20)];
    // What either side notes down beside it lies in a page.
    let notes = 4096;
    let receives = protocols.iter().map(|&(name, default)| variable(name, default)).sum::<usize>() + notes;
    let channels = machine().spec.channels as usize;
    let channels =
        channels.max(variable("NCCL_MIN_NCHANNELS", 0)).min(variable("NCCL_MAX_NCHANNELS", channels));
    (0..channels.min(MOST_CHANNELS)).flat_map(|_| [receives.min(MOST_BYTES), notes]).collect()
}

/// `MAXCHANNELS`, and more than any buffer.
const MOST_CHANNELS: usize = 64;
const MOST_BYTES: usize = 1 << 32;
