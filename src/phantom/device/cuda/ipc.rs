//! CUDA IPC: memory and events that processes of one machine share by handle. `torch.multiprocessing`
//! sends tensors in this way.
//!
//! A handle holds the length of the block, and the process that opens the handle gets a range of addresses of
//! that length. The content is not shared: apart from small writes, device memory has no content here. The
//! bytes are charged to the process that allocated them, as on a card.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex};

use cudarc::driver::sys::{CUipcEventHandle, CUipcMemHandle};
use cudarc::runtime::sys::{cudaIpcEventHandle_t, cudaIpcMemHandle_t};

use crate::core::call_table::answers;
use crate::core::ffi::{
    DEVICE_UNINITIALIZED, Handle, INVALID_HANDLE, INVALID_VALUE, OK, OUT_OF_MEMORY, Out, Status, Word,
};
use crate::core::host_state::{current, device, fail};
use crate::core::lock::lock;
use crate::core::past_oom::Caller;
use crate::core::vram::{self, BlockPurpose};
use crate::cuda::events::{self, Event};
use crate::cuda::memory::{PointerKind, pointer_kind};

/// The content of an IPC handle of any of the four header types: 64 bytes, which some calls take by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct IpcHandle([u64; 8]);

const _: () = assert!(size_of::<IpcHandle>() == size_of::<cudaIpcMemHandle_t>());
const _: () = assert!(size_of::<IpcHandle>() == size_of::<cudaIpcEventHandle_t>());
const _: () = assert!(size_of::<IpcHandle>() == size_of::<CUipcMemHandle>());
const _: () = assert!(size_of::<IpcHandle>() == size_of::<CUipcEventHandle>());

/// The first word of a memory handle. [`EVENT`] is the first word of an event handle.
const MEMORY: u64 = u64::from_le_bytes(*b"ph memor");
const EVENT: u64 = u64::from_le_bytes(*b"ph event");

/// A block that this process opened.
struct OpenedBlock {
    address: usize,
    /// The number of times that the block was opened and not closed.
    references: u32,
}

/// The opened blocks, by the exporting process, the block's address in that process, and its length.
static OPENED: LazyLock<Mutex<HashMap<[u64; 3], OpenedBlock>>> = LazyLock::new(Mutex::default);

fn this_process() -> u64 {
    u64::from(std::process::id())
}

/// Marks memory that several processes use: its values stay unknown.
fn mark_shared(address: usize, size: usize) {
    if let Some(device) = vram::device_index_of(address).and_then(|index| device(index as c_int)) {
        device.values().mark_shared(address, size);
    }
}

fn export_memory(handle: Out<IpcHandle>, address: usize) -> Status {
    // Ranges of the virtual memory calls are shared in another way, and managed memory cannot be shared.
    match pointer_kind(address) {
        PointerKind::Device { start, size, managed: false, .. }
            if vram::device_index_of(address).is_some() =>
        {
            // Processes that open the handle may write this memory at any time.
            mark_shared(start, size);
            handle.give(IpcHandle([MEMORY, this_process(), start as u64, size as u64, 0, 0, 0, 0]))
        }
        _ => fail(INVALID_VALUE),
    }
}

fn open_memory(out: Out<usize>, handle: IpcHandle) -> Status {
    let [kind, process, start, size, ..] = handle.0;
    if kind != MEMORY || out.is_null() {
        return fail(INVALID_VALUE);
    }
    if process == this_process() {
        return fail(DEVICE_UNINITIALIZED);
    }
    let mut opened = lock(&OPENED);
    if let Some(block) = opened.get_mut(&[process, start, size]) {
        block.references += 1;
        return out.give(block.address);
    }
    let address = current().vram().alloc(size as usize, BlockPurpose::Imported, Caller::GivesUp);
    let Some(address) = address else { return fail(OUT_OF_MEMORY) };
    opened.insert([process, start, size], OpenedBlock { address, references: 1 });
    mark_shared(address, size as usize);
    out.give(address)
}

fn close_memory(address: usize) -> Status {
    let mut opened = lock(&OPENED);
    let Some((&key, block)) = opened.iter_mut().find(|(_, block)| block.address == address) else {
        return fail(INVALID_VALUE);
    };
    block.references -= 1;
    if block.references == 0 {
        opened.remove(&key);
        if let Some(device) = vram::device_index_of(address).and_then(|index| device(index as c_int)) {
            let freed = device.vram().free(address);
            if let Some(block) = freed {
                device.values().free(address, block.size);
            }
        }
    }
    OK
}

fn export_event(handle: Out<IpcHandle>, event: Word) -> Status {
    if event == 0 {
        return fail(INVALID_HANDLE);
    }
    handle.give(IpcHandle([EVENT, this_process(), event as u64, 0, 0, 0, 0, 0]))
}

/// Opens an event of another process. The event counts as reached, because device time is not
/// shared between processes.
fn open_event(out: Out<Handle<Event>>, handle: IpcHandle) -> Status {
    if handle.0[0] == EVENT { events::create(out, events::DISABLE_TIMING) } else { fail(INVALID_VALUE) }
}

answers! {
    Real fn {cudaIpcGetMemHandle, cuIpcGetMemHandle}(handle: Out<IpcHandle>, address: Word) {
        export_memory(handle, address)
    }
    Real fn {cudaIpcOpenMemHandle, cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2}(
        out: Out<usize>, handle: IpcHandle, _flags: u32,
    ) {
        open_memory(out, handle)
    }
    Real fn {cudaIpcCloseMemHandle, cuIpcCloseMemHandle}(address: Word) { close_memory(address) }
    Real fn {cudaIpcGetEventHandle, cuIpcGetEventHandle}(handle: Out<IpcHandle>, event: Word) {
        export_event(handle, event)
    }
    Real fn {cudaIpcOpenEventHandle, cuIpcOpenEventHandle}(out: Out<Handle<Event>>, handle: IpcHandle) {
        open_event(out, handle)
    }
}
