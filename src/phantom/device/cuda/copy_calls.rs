//! The calls that copy and fill memory, at once or in a stream.

use crate::core::addresses;
use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{INVALID_PITCH, INVALID_VALUE, OK, Status, Word};
use crate::core::host_state::{current, fail};
use crate::core::values::SMALL;
use crate::core::vram;
use crate::cuda::copy::{copy, fill, forget, read_prefix};
use crate::cuda::reach::{Holder, hold};
use crate::cuda::streams::StreamHandle;
use crate::cuda::{captures, memory, streams};

/// The source or the destination of a copy of rows.
#[derive(Clone, Copy)]
struct Rows {
    address: usize,
    /// The bytes from the start of one row to the start of the next.
    pitch: usize,
}

/// Copies `height` rows of `width` bytes.
///
/// # Safety
/// As for [`copy`], for each row.
unsafe fn copy_rows(to: Rows, from: Rows, width: usize, height: usize) -> Status {
    if to.pitch == width && from.pitch == width {
        // SAFETY: the caller's promise; the rows are contiguous.
        return unsafe { copy(to.address, from.address, width.saturating_mul(height)) };
    }
    for row in 0..height {
        // SAFETY: the caller's promise.
        let status = unsafe { copy(to.address + row * to.pitch, from.address + row * from.pitch, width) };
        if status != OK {
            return status;
        }
    }
    OK
}

/// Returns success if rows of `width` bytes do not overlap in either pitch.
fn check_pitches(to: Rows, from: Rows, width: usize) -> Status {
    if width <= to.pitch.min(from.pitch) { OK } else { fail(INVALID_PITCH) }
}

/// Queues a copy in a stream, as by [`copy`]. A captured copy runs at the launch of the graph.
/// It then accesses host memory only if that memory is still pinned, because the program may
/// have freed any other memory.
///
/// # Safety
/// As for [`copy`].
unsafe fn queue_copy(to: usize, from: usize, size: usize, stream: StreamHandle) -> Status {
    let captured = stream.stream().capturing().is_some();
    captures::queue_effect(stream, move |_| {
        if captured && !(is_there(to) && is_there(from)) {
            forget(to, size);
            return OK;
        }
        // SAFETY: the caller's promise, and for a captured copy both ranges are known to CUDA.
        unsafe { copy(to, from, size) }
    })
}

/// Returns true if an address is a device address or is in pinned or registered host memory.
fn is_there(address: usize) -> bool {
    vram::is_device(address) || memory::host_range(address).is_some()
}

/// Queues a copy of rows, as by [`queue_copy`].
///
/// # Safety
/// As for [`copy_rows`].
unsafe fn queue_rows(to: Rows, from: Rows, width: usize, height: usize, stream: StreamHandle) -> Status {
    let captured = stream.stream().capturing().is_some();
    captures::queue_effect(stream, move |_| {
        if captured && !(is_there(to.address) && is_there(from.address)) {
            forget(to.address, to.pitch.saturating_mul(height));
            return OK;
        }
        // SAFETY: as in `queue_copy`.
        unsafe { copy_rows(to, from, width, height) }
    })
}

/// Queues a fill of `count` elements in a stream, as by [`fill`].
///
/// # Safety
/// As for [`fill`]; while the stream is captured, also at each launch of the graph.
unsafe fn queue_fill<const N: usize>(
    to: usize,
    pattern: [u8; N],
    count: usize,
    stream: StreamHandle,
) -> Status {
    // SAFETY: the caller's promise.
    captures::queue_effect(stream, move |_| unsafe { fill(to, &pattern, count.saturating_mul(N)) })
}

/// Remembers the device addresses that are copied into a kernel's global variable.
///
/// # Safety
/// `from` is device memory, or host memory good for `size` bytes.
unsafe fn hold_addresses(from: usize, size: usize) -> Status {
    if from == 0 && size > 0 {
        return fail(INVALID_VALUE);
    }
    // SAFETY: the caller's promise.
    let bytes = unsafe { read_prefix(from, size.min(SMALL)) };
    addresses::in_table(&bytes.unwrap_or_default(), |address| hold(Holder::Kernels, address));
    OK
}

/// Synchronizes the legacy default stream of the current device, because the program waits for a synchronous
/// copy. Returns the copy's status.
fn synchronous(status: Status) -> Status {
    streams::synchronize(&current().stream);
    status
}

/// Returns the lowest byte of the value: a fill of 8-bit elements writes only this byte.
fn low_byte(value: u32) -> [u8; 1] {
    [value as u8]
}

/// Returns the lower two bytes of the value: a fill of 16-bit elements writes only these.
fn low_half(value: u32) -> [u8; 2] {
    (value as u16).to_le_bytes()
}

answers! {
    Real fn cudaMemcpy(to: Word, from: Word, size: usize, _kind: Word) {
        synchronous(by_contract!(copy(to, from, size)))
    }
    Real fn cudaMemcpyAsync(to: Word, from: Word, size: usize, _kind: Word, stream: StreamHandle) {
        by_contract!(queue_copy(to, from, size, stream))
    }
    Real fn cudaMemcpyPeer(to: Word, _to_device: Word, from: Word, _from_device: Word, size: usize) {
        synchronous(by_contract!(copy(to, from, size)))
    }
    Real fn cudaMemcpyPeerAsync(
        to: Word, _to_device: Word, from: Word, _from_device: Word, size: usize, stream: StreamHandle,
    ) {
        by_contract!(queue_copy(to, from, size, stream))
    }
    Real fn cudaMemcpy2D(
        to: Word, to_pitch: usize, from: Word, pitch: usize, width: usize, height: usize, _kind: Word,
    ) {
        let (to, from) = (Rows { address: to, pitch: to_pitch }, Rows { address: from, pitch });
        match check_pitches(to, from, width) {
            OK => synchronous(by_contract!(copy_rows(to, from, width, height))),
            status => status,
        }
    }
    Real fn cudaMemcpy2DAsync(
        to: Word, to_pitch: usize, from: Word, pitch: usize, width: usize, height: usize, _kind: Word,
        stream: StreamHandle,
    ) {
        let (to, from) = (Rows { address: to, pitch: to_pitch }, Rows { address: from, pitch });
        match check_pitches(to, from, width) {
            OK => by_contract!(queue_rows(to, from, width, height, stream)),
            status => status,
        }
    }
    /// Does not copy the data, because the kernels that read a symbol do not run. Remembers the device
    /// addresses in the copied bytes, because a later kernel may write to them.
    Success fn cudaMemcpyToSymbol(_symbol: Word, from: Word, size: usize, _offset: usize, _kind: Word) {
        by_contract!(hold_addresses(from, size))
    }
    Success fn cudaMemcpyToSymbolAsync(
        _symbol: Word, from: Word, size: usize, _offset: usize, _kind: Word, stream: StreamHandle,
    ) {
        match by_contract!(hold_addresses(from, size)) {
            OK => captures::queue_effect(stream, |_| OK),
            status => status,
        }
    }
    Real fn {cudaMemset, cuMemsetD8_v2}(to: Word, value: u32, size: usize) {
        by_contract!(fill(to, &low_byte(value), size))
    }
    Real fn {cudaMemsetAsync, cuMemsetD8Async}(to: Word, value: u32, size: usize, stream: StreamHandle) {
        by_contract!(queue_fill(to, low_byte(value), size, stream))
    }
    Real fn {cuMemcpy, cuMemcpyHtoD_v2, cuMemcpyDtoH_v2}(to: Word, from: Word, size: usize) {
        synchronous(by_contract!(copy(to, from, size)))
    }
    Real fn {cuMemcpyAsync, cuMemcpyHtoDAsync_v2, cuMemcpyDtoHAsync_v2, cuMemcpyDtoDAsync_v2}(
        to: Word, from: Word, size: usize, stream: StreamHandle,
    ) {
        by_contract!(queue_copy(to, from, size, stream))
    }
    Real fn cuMemcpyDtoD_v2(to: Word, from: Word, size: usize) { by_contract!(copy(to, from, size)) }
    Real fn cuMemsetD16_v2(to: Word, value: u32, count: usize) {
        by_contract!(fill(to, &low_half(value), count.saturating_mul(2)))
    }
    Real fn cuMemsetD32_v2(to: Word, value: u32, count: usize) {
        by_contract!(fill(to, &value.to_le_bytes(), count.saturating_mul(4)))
    }
    Real fn cuMemsetD16Async(to: Word, value: u32, count: usize, stream: StreamHandle) {
        by_contract!(queue_fill(to, low_half(value), count, stream))
    }
    Real fn cuMemsetD32Async(to: Word, value: u32, count: usize, stream: StreamHandle) {
        by_contract!(queue_fill(to, value.to_le_bytes(), count, stream))
    }
    Real fn {cuStreamWriteValue32, cuStreamWriteValue32_v2}(
        stream: StreamHandle, to: Word, value: u32, _flags: Word,
    ) {
        by_contract!(queue_fill(to, value.to_le_bytes(), 1, stream))
    }
}
