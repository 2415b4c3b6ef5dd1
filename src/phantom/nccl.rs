//! NCCL: communicators that know their size and rank, and collectives that never wait.
//!
//! A rank hears nothing from the others: a collective copies what the rank itself would contribute,
//! small data really and large data not at all. So ranks cannot hang and memory is right, and what
//! is asked of the others' values (shapes to compare) is what this rank has.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::answer::answers;
use crate::copy::copy;
use crate::ffi::{OK, Out, Status, Word, leak, opaque_handle};
use crate::machine::current;
use crate::memory;
use crate::vram::Use;

/// A communicator.
#[derive(Debug, Clone, Copy)]
struct Comm {
    ranks: usize,
    rank: usize,
    device: usize,
}

/// `ncclInvalidArgument`, `ncclUnhandledCudaError`.
const INVALID: Status = 4;
const CUDA_ERROR: Status = 1;

/// `ncclUniqueId`: 128 bytes, by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([u64; 16]);

fn comm(handle: usize) -> Option<Comm> {
    // SAFETY: by the C contract a handle is null or came from a call below; those are leaked.
    unsafe { (handle as *const Comm).as_ref() }.copied()
}

fn create(out: Out<usize>, ranks: c_int, rank: c_int) -> Status {
    if ranks < 1 || rank < 0 || rank >= ranks {
        return INVALID;
    }
    out.give(leak(Comm { ranks: ranks as usize, rank: rank as usize, device: current().index }))
}

/// Bytes of one element of an `ncclDataType_t`.
fn width(data_type: c_int) -> usize {
    match data_type {
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        6 | 9 => 2,
        _ => 1,
    }
}

/// Moves what this rank knows. No device time passes: what a collective wrote can be read back.
fn moved(handle: usize, _stream: usize, moves: impl Fn(Comm) -> Status) -> Status {
    let Some(comm) = comm(handle) else { return INVALID };
    if moves(comm) == OK { OK } else { CUDA_ERROR }
}

fn whole(from: usize, to: usize, count: usize, data_type: c_int) -> Status {
    if from == to || to == 0 || from == 0 {
        OK
    } else {
        copy(to, from, count.saturating_mul(width(data_type)))
    }
}

fn unique_id(out: Out<UniqueId>) -> Status {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; 16];
    id[0] = u64::from_le_bytes(*b"phantom!");
    id[1] = u64::from(std::process::id());
    id[2] = NEXT.fetch_add(1, Ordering::Relaxed);
    out.give(UniqueId(id))
}

answers! {
    Real fn ncclGetUniqueId(out: Out<UniqueId>) { unique_id(out) }
    Real fn ncclCommInitRank(out: Out<usize>, ranks: c_int, _id: UniqueId, rank: c_int) { create(out, ranks, rank) }
    Real fn ncclCommInitRankConfig(out: Out<usize>, ranks: c_int, _id: UniqueId, rank: c_int, _config: Word) {
        create(out, ranks, rank)
    }
    Real fn ncclCommInitRankScalable(
        out: Out<usize>, ranks: c_int, rank: c_int, _count: c_int, _ids: Word, _config: Word,
    ) {
        create(out, ranks, rank)
    }
    Real fn ncclCommInitAll(out: Out<usize>, ranks: c_int, _devices: Word) {
        (0..ranks).map(|rank| create(out.at(rank as usize), ranks, rank)).find(|&status| status != OK).unwrap_or(OK)
    }
    /// Which ranks take the same colour is not known: the new communicator is as large as the old.
    Guess fn ncclCommSplit(handle: Word, _color: c_int, _key: c_int, out: Out<usize>, _config: Word) {
        comm(handle).map_or(INVALID, |comm| out.give(leak(comm)))
    }
    Guess fn ncclCommShrink(
        handle: Word, _excluded: Word, count: c_int, out: Out<usize>, _config: Word, _flags: c_int,
    ) {
        let Some(mut comm) = comm(handle) else { return INVALID };
        comm.ranks = comm.ranks.saturating_sub(count.max(0) as usize).max(1);
        comm.rank = comm.rank.min(comm.ranks - 1);
        out.give(leak(comm))
    }
    Real fn ncclCommCount(handle: Word, out: Out<c_int>) {
        comm(handle).map_or(INVALID, |comm| out.give(comm.ranks as c_int))
    }
    Real fn ncclCommUserRank(handle: Word, out: Out<c_int>) {
        comm(handle).map_or(INVALID, |comm| out.give(comm.rank as c_int))
    }
    Real fn ncclCommCuDevice(handle: Word, out: Out<c_int>) {
        comm(handle).map_or(INVALID, |comm| out.give(comm.device as c_int))
    }
    Real fn ncclCommGetAsyncError(_handle: Word, out: Out<c_int>) { out.give(OK) }
    Success fn ncclCommFinalize(_handle: Word) { OK }
    Success fn ncclCommDestroy(_handle: Word) { OK }
    Success fn ncclCommAbort(_handle: Word) { OK }
    Success fn ncclCommRegister(_handle: Word, _address: Word, _size: usize, out: Out<usize>) { out.give(opaque_handle()) }
    Success fn ncclCommDeregister(_handle: Word, _registration: Word) { OK }
    Success fn ncclCommWindowRegister(_handle: Word, _address: Word, _size: usize, out: Out<usize>, _flags: c_int) {
        out.give(opaque_handle())
    }
    Success fn ncclCommWindowDeregister(_handle: Word, _window: Word) { OK }
    Success fn ncclGroupStart() { OK }
    Success fn ncclGroupEnd() { OK }
    Success fn ncclGroupSimulateEnd(_info: Word) { OK }
    Success fn ncclRedOpCreatePreMulSum(out: Out<c_int>, _scalar: Word, _data_type: c_int, _residence: c_int, _handle: Word) {
        out.give(5)
    }
    Success fn ncclRedOpDestroy(_operation: c_int, _handle: Word) { OK }
    Guess fn ncclAllReduce(from: Word, to: Word, count: usize, data_type: c_int, _operation: c_int, handle: Word, stream: Word) {
        moved(handle, stream, |_| whole(from, to, count, data_type))
    }
    Guess fn ncclReduce(
        from: Word, to: Word, count: usize, data_type: c_int, _operation: c_int, _root: c_int, handle: Word, stream: Word,
    ) {
        moved(handle, stream, |_| whole(from, to, count, data_type))
    }
    Guess fn ncclBroadcast(from: Word, to: Word, count: usize, data_type: c_int, _root: c_int, handle: Word, stream: Word) {
        moved(handle, stream, |_| whole(from, to, count, data_type))
    }
    Guess fn ncclBcast(_at: Word, _count: usize, _data_type: c_int, _root: c_int, handle: Word, stream: Word) {
        moved(handle, stream, |_| OK)
    }
    Guess fn ncclAllGather(from: Word, to: Word, count: usize, data_type: c_int, handle: Word, stream: Word) {
        let size = count * width(data_type);
        moved(handle, stream, |comm| {
            (0..comm.ranks).map(|rank| whole(from, to + rank * size, count, data_type)).max().unwrap_or(OK)
        })
    }
    Guess fn ncclReduceScatter(from: Word, to: Word, count: usize, data_type: c_int, _operation: c_int, handle: Word, stream: Word) {
        let size = count * width(data_type);
        moved(handle, stream, |comm| whole(from + comm.rank * size, to, count, data_type))
    }
    Guess fn ncclAlltoAll(from: Word, to: Word, count: usize, data_type: c_int, handle: Word, stream: Word) {
        moved(handle, stream, |comm| whole(from, to, count * comm.ranks, data_type))
    }
    Guess fn ncclSend(_from: Word, _count: usize, _data_type: c_int, _peer: c_int, handle: Word, stream: Word) {
        moved(handle, stream, |_| OK)
    }
    Guess fn ncclRecv(_to: Word, _count: usize, _data_type: c_int, _peer: c_int, handle: Word, stream: Word) {
        moved(handle, stream, |_| OK)
    }
    Real fn ncclMemAlloc(out: Out<usize>, size: usize) {
        if memory::allocate(out, size, Use::Plain) == OK { OK } else { CUDA_ERROR }
    }
    Real fn ncclMemFree(address: Word) { if memory::free(address) == OK { OK } else { CUDA_ERROR } }
}
