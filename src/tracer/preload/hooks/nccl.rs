//! Hooks of NCCL, which determine the communicator for which NCCL allocates memory.
//!
//! Each call is passed on unchanged, to the copy of NCCL that the calling library uses. A program that looks
//! up NCCL's functions with `dlsym` bypasses the hooks; the memory is then attributed to NCCL, without a
//! communicator.

use std::ffi::{c_int, c_void};

use memtrace_record::intern::TextId;
use memtrace_trace::communicator::communicator_text;

use crate::attribution::communicators::{self, Created, OpenCall};
use crate::ffi::by_caller::hooks_by_caller;
use crate::guard::shielded;
use crate::hooks::reduced_buffers;
use crate::runtime::session;

/// `ncclInternalError`: returned by a hook that finds no real function.
const INTERNAL_ERROR: c_int = 3;
/// `ncclSuccess`.
const SUCCESS: c_int = 0;
/// `ncclInProgress`, which a non-blocking communicator returns.
const IN_PROGRESS: c_int = 7;

/// An `ncclComm_t`.
type Comm = *mut c_void;
/// A pointer, or another argument of one word.
type Word = *mut c_void;

/// An `ncclUniqueId`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// Runs `run`, which calls NCCL's own function. Memory that NCCL allocates during the call belongs to the
/// communicator that `text` returns.
fn during(text: impl FnOnce() -> TextId, run: impl FnOnce() -> c_int) -> c_int {
    let open = session::session().and_then(|_| shielded(|| OpenCall::open(text())));
    let status = run();
    drop(open);
    if status == IN_PROGRESS {
        communicators::is_in_progress();
    }
    status
}

/// Calls a function that creates a communicator and writes its handle to `out`. `what` gets the number of the
/// communicator and returns its text.
///
/// # Safety
/// `out` is null or good for a handle, by NCCL's contract.
unsafe fn create(out: *mut Comm, what: impl FnOnce(u32) -> String, run: impl FnOnce() -> c_int) -> c_int {
    let new: Option<Created> = session::session().and_then(|_| shielded(|| communicators::create(what)));
    let Some(new) = new else { return run() };
    // In a group, NCCL creates the communicator at the end of the group.
    let status = during(
        || {
            communicators::joins_group(new.text);
            new.text
        },
        run,
    );
    if matches!(status, SUCCESS | IN_PROGRESS) && !out.is_null() {
        // SAFETY: `out` is not null, and a call with one of these results has written the handle.
        let handle = unsafe { *out } as usize;
        shielded(|| communicators::created(new, handle));
    }
    status
}

fn rank_of(number: u32, rank: c_int, ranks: c_int) -> String {
    communicator_text(number, &format!("rank {rank} of {ranks}"))
}

/// Defines hooks of functions of NCCL. The body calls the real function as `real`.
macro_rules! hooks {
    ($($hooks:tt)*) => { hooks_by_caller! { "libnccl.so", INTERNAL_ERROR; $($hooks)* } };
}

/// Defines hooks of operations of a communicator. Memory that NCCL allocates during an operation belongs to
/// the communicator.
macro_rules! operations {
    ($($name:ident($($arg:ident: $type:ty),*) of $comm:ident;)*) => {
        hooks! { $($name($($arg: $type),*) |real| operate($comm, real);)* }
    };
}

/// Same as [`operations`], for reductions over the ranks. The input of a reduction may be a bucket of
/// gradients, which gets a tag.
macro_rules! reductions {
    ($($name:ident($from:ident: $first:ty, $($arg:ident: $type:ty),*) of $comm:ident;)*) => {
        hooks! { $($name($from: $first, $($arg: $type),*) |real| {
            shielded(|| reduced_buffers::is_reduced($from));
            operate($comm, real)
        };)* }
    };
}

fn operate(comm: Comm, run: impl FnOnce() -> c_int) -> c_int {
    let text = || {
        let text = communicators::text_of(comm as usize);
        communicators::joins_group(text);
        text
    };
    let status = during(text, run);
    if status == SUCCESS {
        communicators::used(comm as usize);
    }
    status
}

fn destroy(comm: Comm, run: impl FnOnce() -> c_int) -> c_int {
    let text = || {
        let text = communicators::text_of(comm as usize);
        communicators::destroyed(comm as usize);
        text
    };
    during(text, run)
}

hooks! {
    ncclCommInitRank(out: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int)
        // SAFETY: `out` is the caller's own pointer, in all calls here.
        |real| unsafe { create(out, |number| rank_of(number, rank, ranks), real) };
    ncclCommInitRankConfig(out: *mut Comm, ranks: c_int, id: UniqueId, rank: c_int, config: Word)
        // SAFETY: as above.
        |real| unsafe { create(out, |number| rank_of(number, rank, ranks), real) };
    ncclCommInitRankScalable(out: *mut Comm, ranks: c_int, rank: c_int, count: c_int, ids: Word, config: Word)
        // SAFETY: as above.
        |real| unsafe { create(out, |number| rank_of(number, rank, ranks), real) };
    ncclCommSplit(comm: Comm, color: c_int, key: c_int, out: *mut Comm, config: Word)
        |real| {
            let from = communicators::number_of(comm as usize);
            // SAFETY: as above.
            unsafe { create(out, |number| communicator_text(number, &format!("split from {from}")), real) }
        };
    ncclCommShrink(
        comm: Comm, excluded: Word, count: c_int, out: *mut Comm, config: Word, flags: c_int
    ) |real| {
        let from = communicators::number_of(comm as usize);
        // SAFETY: as above.
        unsafe { create(out, |number| communicator_text(number, &format!("shrunk from {from}")), real) }
    };
    ncclCommDestroy(comm: Comm) |real| destroy(comm, real);
    ncclCommAbort(comm: Comm) |real| destroy(comm, real);
    ncclGroupStart() |real| {
        if session::session().is_some() {
            shielded(communicators::group_begins);
        }
        real()
    };
    ncclGroupEnd() |real| during(communicators::group_ends, real);
}

reductions! {
    ncclAllReduce(from: Word, to: Word, count: usize, data_type: c_int, operation: c_int, comm: Comm, stream: Word)
        of comm;
    ncclReduce(
        from: Word, to: Word, count: usize, data_type: c_int, operation: c_int, root: c_int, comm: Comm, stream: Word
    ) of comm;
    ncclReduceScatter(
        from: Word, to: Word, count: usize, data_type: c_int, operation: c_int, comm: Comm, stream: Word
    ) of comm;
}

operations! {
    ncclBroadcast(from: Word, to: Word, count: usize, data_type: c_int, root: c_int, comm: Comm, stream: Word)
        of comm;
    ncclBcast(at: Word, count: usize, data_type: c_int, root: c_int, comm: Comm, stream: Word) of comm;
    ncclAllGather(from: Word, to: Word, count: usize, data_type: c_int, comm: Comm, stream: Word) of comm;
    ncclAlltoAll(from: Word, to: Word, count: usize, data_type: c_int, comm: Comm, stream: Word) of comm;
    ncclGather(from: Word, to: Word, count: usize, data_type: c_int, root: c_int, comm: Comm, stream: Word) of comm;
    ncclScatter(from: Word, to: Word, count: usize, data_type: c_int, root: c_int, comm: Comm, stream: Word) of comm;
    ncclSend(from: Word, count: usize, data_type: c_int, peer: c_int, comm: Comm, stream: Word) of comm;
    ncclRecv(to: Word, count: usize, data_type: c_int, peer: c_int, comm: Comm, stream: Word) of comm;
    ncclCommRegister(comm: Comm, address: Word, size: usize, handle: Word) of comm;
    ncclCommWindowRegister(comm: Comm, address: Word, size: usize, window: Word, flags: c_int) of comm;
}
