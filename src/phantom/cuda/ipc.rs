//! Memory and events that processes of one machine share by handle, as `torch.multiprocessing` sends tensors.
//!
//! A handle tells how large the block is, and the process that opens it gets addresses of that size: what is
//! behind them is not shared, since device memory has no values here but small ones. The bytes are charged to
//! the process that allocated them, as on a card.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex};

use crate::core::ffi::{INVALID_HANDLE, INVALID_VALUE, OK, OUT_OF_MEMORY, Out, Status, Word};
use crate::core::host_state::{current, device, fail, lock};
use crate::core::vram::{self, Use};
use crate::cuda::event;
use crate::cuda::memory::{Pointer, pointer};
use crate::table::call_table::answers;

/// `cudaIpcMemHandle_t` and its kin: 64 bytes, some by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Handle([u64; 8]);

const MEMORY: u64 = u64::from_le_bytes(*b"ph memor");
const EVENT: u64 = u64::from_le_bytes(*b"ph event");
/// `cudaErrorDeviceUninitialized`: what a process gets that opens its own handle.
const OWN: Status = 201;

/// By the process, the address there and the size: the address here, and how often it was opened.
type Opened = HashMap<[u64; 3], (usize, u32)>;

static OPEN: LazyLock<Mutex<Opened>> = LazyLock::new(Mutex::default);

fn own_process() -> u64 {
    u64::from(std::process::id())
}

fn share(handle: Out<Handle>, address: usize) -> Status {
    // Addresses reserved and mapped are shared in another way, and managed memory is not at all.
    match pointer(address) {
        Pointer::Device { start, size, managed: false, .. } if vram::share_of(address).is_some() => {
            handle.give(Handle([MEMORY, own_process(), start as u64, size as u64, 0, 0, 0, 0]))
        }
        _ => fail(INVALID_VALUE),
    }
}

fn open(out: Out<usize>, handle: Handle) -> Status {
    let [kind, process, start, size, ..] = handle.0;
    if kind != MEMORY || out.address() == 0 {
        return fail(INVALID_VALUE);
    }
    if process == own_process() {
        return fail(OWN);
    }
    let mut open = lock(&OPEN);
    if let Some((address, times)) = open.get_mut(&[process, start, size]) {
        *times += 1;
        return out.give(*address);
    }
    let taken = current().vram().allocate(size as usize, Use::Imported);
    let Some(address) = taken else { return fail(OUT_OF_MEMORY) };
    open.insert([process, start, size], (address, 1));
    out.give(address)
}

fn close(address: usize) -> Status {
    let mut open = lock(&OPEN);
    let Some((key, times)) =
        open.iter_mut().find_map(|(key, (at, times))| (*at == address).then_some((*key, times)))
    else {
        return fail(INVALID_VALUE);
    };
    *times -= 1;
    if *times == 0 {
        open.remove(&key);
        if let Some(device) = vram::share_of(address).and_then(|index| device(index as c_int)) {
            let freed = device.vram().free(address);
            if let Some(block) = freed {
                device.values().forget(address, block.size);
            }
        }
    }
    OK
}

fn share_event(handle: Out<Handle>, event: usize) -> Status {
    if event == 0 {
        return fail(INVALID_HANDLE);
    }
    handle.give(Handle([EVENT, own_process(), event as u64, 0, 0, 0, 0, 0]))
}

/// An event of another process counts as reached: its device is a busy card's, behind by nothing that this one
/// could wait for.
fn open_event(out: Out<usize>, handle: Handle) -> Status {
    if handle.0[0] == EVENT { event::create(out, event::NO_TIMING) } else { fail(INVALID_VALUE) }
}

answers! {
    Real fn cudaIpcGetMemHandle(handle: Out<Handle>, address: Word) { share(handle, address) }
    Real fn cudaIpcOpenMemHandle(out: Out<usize>, handle: Handle, _flags: u32) { open(out, handle) }
    Real fn cudaIpcCloseMemHandle(address: Word) { close(address) }
    Real fn cudaIpcGetEventHandle(handle: Out<Handle>, event: Word) { share_event(handle, event) }
    Real fn cudaIpcOpenEventHandle(out: Out<usize>, handle: Handle) { open_event(out, handle) }
    Real fn cuIpcGetMemHandle(handle: Out<Handle>, address: Word) { share(handle, address) }
    Real fn cuIpcOpenMemHandle(out: Out<usize>, handle: Handle, _flags: u32) { open(out, handle) }
    Real fn cuIpcOpenMemHandle_v2(out: Out<usize>, handle: Handle, _flags: u32) { open(out, handle) }
    Real fn cuIpcCloseMemHandle(address: Word) { close(address) }
    Real fn cuIpcGetEventHandle(handle: Out<Handle>, event: Word) { share_event(handle, event) }
    Real fn cuIpcOpenEventHandle(out: Out<usize>, handle: Handle) { open_event(out, handle) }
}
