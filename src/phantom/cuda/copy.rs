//! Copies and sets. What they leave behind is decided in [`crate::core::values`]; a large one
//! touches nothing, since nobody could read back what it would have moved.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::core::ffi::{INVALID_VALUE, LAUNCH_TIMEOUT, OK, Status, Word};
use crate::core::host_state::{Device, current, fail, machine};
use crate::core::values::{self, Reading, SMALL};
use crate::core::vram;
use crate::cuda::stream;
use crate::cuda::vmm;
use crate::table::call_table::answers;

/// The device whose memory holds a range, with the range known to be mapped; `Err` when an address
/// is a device's but nothing lives there.
fn place(address: usize, size: usize) -> Result<Option<&'static Device>, Status> {
    if !vram::is_device(address) {
        return Ok(None);
    }
    let index = match vram::share_of(address) {
        Some(index) => {
            let device = machine().devices.get(index).ok_or(INVALID_VALUE)?;
            let vram = device.vram();
            let (start, block) = vram.find(address).ok_or(INVALID_VALUE)?;
            if address + size > start + block.size {
                return Err(INVALID_VALUE);
            }
            index
        }
        None => vmm::device_of(address, size).ok_or(INVALID_VALUE)?,
    };
    machine().devices.get(index).map(Some).ok_or(INVALID_VALUE)
}

/// The device in whose memory an address is.
pub(crate) fn device_of(address: usize) -> Option<&'static Device> {
    place(address, 1).ok().flatten()
}

/// Moves bytes that both ends really hold.
fn really(to: usize, from: usize, size: usize) {
    // SAFETY: a device's range was checked to be mapped, and the C contract of the copy makes the
    // host's range good for `size` bytes.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, size) }
}

/// Fills bytes of the host or of a device's mapped range.
fn really_set(to: usize, value: u8, size: usize) {
    // SAFETY: as above.
    unsafe { std::ptr::write_bytes(to as *mut u8, value, size) }
}

/// Copies `size` bytes between any two places.
pub(crate) fn copy(to: usize, from: usize, size: usize) -> Status {
    if size == 0 {
        return OK;
    }
    let (target, source) = match (place(to, size), place(from, size)) {
        (Ok(target), Ok(source)) => (target, source),
        (Err(status), _) | (_, Err(status)) => return fail(status),
    };
    match (target, source) {
        (None, None) => really(to, from, size),
        (Some(device), None) => {
            values::input(size);
            if size <= SMALL {
                really(to, from, size);
                device.values().wrote(device.epoch(), to, size);
            } else {
                device.values().forget(to, size);
            }
        }
        (Some(target), Some(source)) => {
            let parts =
                if size <= SMALL { source.values().parts(source.epoch(), from, size) } else { Vec::new() };
            target.values().forget(to, size);
            for (start, end) in parts {
                let place = to + (start - from);
                really(place, start, end - start);
                target.values().wrote(target.epoch(), place, end - start);
            }
        }
        (None, Some(device)) => {
            let reading = device.values().read(device.epoch(), from, size);
            match reading {
                Reading::Bytes => really(to, from, size),
                Reading::Zeros => {
                    really_set(to, 0, size);
                    for (start, end) in device.values().parts(device.epoch(), from, size) {
                        really(to + (start - from), start, end - start);
                    }
                }
                Reading::Number(value) => really(to, value.to_le_bytes().as_ptr() as usize, size.min(8)),
                Reading::Stop => return fail(stopped(size)),
            }
        }
    }
    OK
}

/// The bytes of a small range as far as they are known from its beginning on.
pub(crate) fn read_prefix(from: usize, size: usize) -> Option<Vec<u8>> {
    let known = match place(from, size).ok()? {
        None => size,
        Some(device) => {
            let parts = device.values().parts(device.epoch(), from, size);
            let mut end = from;
            for (start, stop) in parts {
                if start == end {
                    end = stop;
                }
            }
            end - from
        }
    };
    let mut bytes = vec![0; known];
    really(bytes.as_mut_ptr() as usize, from, known);
    (known > 0).then_some(bytes)
}

/// The bytes of a small range, when all are known.
pub(crate) fn read_known(from: usize, size: usize) -> Option<Vec<u8>> {
    read_prefix(from, size).filter(|bytes| bytes.len() == size)
}

/// Writes what is known of a range's new content, from its beginning on; of the rest nothing is known.
pub(crate) fn write_known(to: usize, bytes: Option<&[u8]>, size: usize) -> Status {
    let device = match place(to, size) {
        Ok(device) => device,
        Err(status) => return fail(status),
    };
    if let Some(device) = device {
        device.values().forget(to, size);
    }
    if let Some(bytes) = bytes {
        let known = bytes.len().min(size);
        really(to, bytes.as_ptr() as usize, known);
        if let Some(device) = device {
            device.values().wrote(device.epoch(), to, known);
        }
    }
    OK
}

/// Says, once, why a read fails.
fn stopped(size: usize) -> Status {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        use std::io::Write;
        let _ = writeln!(
            std::io::stderr(),
            "memtrace: the phantom device stopped a loop: the program read {} values that no kernel ever computed \
             (the last of {size} bytes) without any new input; it may wait for one that never comes. \
             The traceback of the CUDA error (launch timed out) names the read.",
            values::invented().0
        );
    }
    LAUNCH_TIMEOUT
}

/// Notes that nothing is known of a range any more, if it is a device's.
pub(crate) fn forget(to: usize, size: usize) {
    if let Some(device) = vram::share_of(to).and_then(|index| machine().devices.get(index)) {
        device.values().forget(to, size);
    } else if vram::is_device(to) {
        // A reserved range's device is known by its mapping; what is known of it lies with that.
        for device in &machine().devices {
            device.values().forget(to, size);
        }
    }
}

/// Reads a kernel's argument.
pub(crate) fn read_host(from: usize, into: &mut [u8]) {
    really(into.as_mut_ptr() as usize, from, into.len());
}

/// Sets `size` bytes to a repeated pattern.
pub(crate) fn set(to: usize, pattern: &[u8], size: usize) -> Status {
    if size == 0 {
        return OK;
    }
    match place(to, size) {
        Err(status) => return fail(status),
        Ok(None) => set_pattern(to, pattern, size),
        Ok(Some(device)) if size <= SMALL => {
            set_pattern(to, pattern, size);
            device.values().wrote(device.epoch(), to, size);
        }
        Ok(Some(device)) => device.values().forget(to, size),
    }
    OK
}

fn set_pattern(to: usize, pattern: &[u8], size: usize) {
    if let [byte] = pattern {
        really_set(to, *byte, size);
        return;
    }
    for at in (0..size).step_by(pattern.len()) {
        really(to + at, pattern.as_ptr() as usize, pattern.len().min(size - at));
    }
}

/// Copies `rows` rows.
fn rows(to: (usize, usize), from: (usize, usize), width: usize, rows: usize) -> Status {
    if to.1 == width && from.1 == width {
        return copy(to.0, from.0, width.saturating_mul(rows));
    }
    for row in 0..rows {
        let status = copy(to.0 + row * to.1, from.0 + row * from.1, width);
        if status != OK {
            return status;
        }
    }
    OK
}

/// A copy that the caller waits for.
fn waited(status: Status) -> Status {
    stream::synchronize(&current().stream);
    status
}

answers! {
    Real fn cudaMemcpy(to: Word, from: Word, size: usize, _kind: Word) { waited(copy(to, from, size)) }
    Real fn cudaMemcpyAsync(to: Word, from: Word, size: usize, _kind: Word, _stream: Word) { copy(to, from, size) }
    Real fn cudaMemcpyPeer(to: Word, _to_device: Word, from: Word, _from_device: Word, size: usize) {
        waited(copy(to, from, size))
    }
    Real fn cudaMemcpyPeerAsync(to: Word, _to_device: Word, from: Word, _from_device: Word, size: usize, _stream: Word) {
        copy(to, from, size)
    }
    Real fn cudaMemcpy2D(to: Word, to_pitch: usize, from: Word, pitch: usize, width: usize, height: usize, _kind: Word) {
        waited(rows((to, to_pitch), (from, pitch), width, height))
    }
    Real fn cudaMemcpy2DAsync(
        to: Word, to_pitch: usize, from: Word, pitch: usize, width: usize, height: usize, _kind: Word, _stream: Word,
    ) {
        rows((to, to_pitch), (from, pitch), width, height)
    }
    /// A symbol's place is only known to kernels.
    Success fn cudaMemcpyToSymbol(_symbol: Word, _from: Word, _size: usize, _offset: usize, _kind: Word) { OK }
    Success fn cudaMemcpyToSymbolAsync(_symbol: Word, _from: Word, _size: usize, _offset: usize, _kind: Word, _stream: Word) { OK }
    Real fn cudaMemset(to: Word, value: u32, size: usize) { set(to, &value.to_le_bytes()[..1], size) }
    Real fn cudaMemsetAsync(to: Word, value: u32, size: usize, _stream: Word) { set(to, &value.to_le_bytes()[..1], size) }
    Real fn cuMemcpy(to: Word, from: Word, size: usize) { waited(copy(to, from, size)) }
    Real fn cuMemcpyAsync(to: Word, from: Word, size: usize, _stream: Word) { copy(to, from, size) }
    Real fn cuMemcpyHtoD_v2(to: Word, from: Word, size: usize) { waited(copy(to, from, size)) }
    Real fn cuMemcpyDtoH_v2(to: Word, from: Word, size: usize) { waited(copy(to, from, size)) }
    Real fn cuMemcpyDtoD_v2(to: Word, from: Word, size: usize) { copy(to, from, size) }
    Real fn cuMemcpyHtoDAsync_v2(to: Word, from: Word, size: usize, _stream: Word) { copy(to, from, size) }
    Real fn cuMemcpyDtoHAsync_v2(to: Word, from: Word, size: usize, _stream: Word) { copy(to, from, size) }
    Real fn cuMemcpyDtoDAsync_v2(to: Word, from: Word, size: usize, _stream: Word) { copy(to, from, size) }
    Real fn cuMemsetD8_v2(to: Word, value: u32, size: usize) { set(to, &value.to_le_bytes()[..1], size) }
    Real fn cuMemsetD16_v2(to: Word, value: u32, count: usize) { set(to, &value.to_le_bytes()[..2], count * 2) }
    Real fn cuMemsetD32_v2(to: Word, value: u32, count: usize) { set(to, &value.to_le_bytes(), count * 4) }
    Real fn cuMemsetD8Async(to: Word, value: u32, size: usize, _stream: Word) { set(to, &value.to_le_bytes()[..1], size) }
    Real fn cuMemsetD16Async(to: Word, value: u32, count: usize, _stream: Word) { set(to, &value.to_le_bytes()[..2], count * 2) }
    Real fn cuMemsetD32Async(to: Word, value: u32, count: usize, _stream: Word) { set(to, &value.to_le_bytes(), count * 4) }
    Real fn cuStreamWriteValue32(_stream: Word, to: Word, value: u32, _flags: Word) { set(to, &value.to_le_bytes(), 4) }
    Real fn cuStreamWriteValue32_v2(_stream: Word, to: Word, value: u32, _flags: Word) { set(to, &value.to_le_bytes(), 4) }
}
