//! NCCL: communicators that know their size and rank, and collectives whose memory is right.
//!
//! Small data of known value is really exchanged with the other ranks ([`peers`](crate::libs::rank_mailbox));
//! of anything else only the bookkeeping is done, and nobody waits. Where the others cannot be
//! reached (other hosts, or several ranks in one process) a rank goes by its own data. The buffers of
//! a communicator's ring are taken at its first operation ([`libraries`](crate::libs::nccl_buffers)).

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_int};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use crate::core::ffi::{OK, Out, Status, Word, leak, opaque_handle};
use crate::core::host_state::{current, lock};
use crate::core::values::SMALL;
use crate::core::vram::Use;
use crate::cuda::copy::{read_prefix, write_known};
use crate::cuda::memory;
use crate::kernels::reduce::{reduce, width};
use crate::libs::nccl_buffers::{Taken, ring_of_nccl};
use crate::libs::rank_mailbox::{Contribution, Peers};
use crate::table::call_table::answers;

/// A communicator.
struct Comm {
    ranks: usize,
    rank: usize,
    device: usize,
    /// What its ranks' shared memory is called; `None` when they are not to be reached.
    name: Option<u64>,
    peers: OnceLock<Option<Peers>>,
    /// How many communicators were made from it.
    children: AtomicU64,
    /// Its own memory; `None` before the first operation.
    buffers: Mutex<Option<Taken>>,
}

const LIBRARY: &CStr = c"libnccl.so.2";

/// `ncclInvalidArgument`, `ncclUnhandledCudaError`.
const INVALID: Status = 4;
const CUDA_ERROR: Status = 1;
/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;

/// `ncclUniqueId`: 128 bytes, by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId([u64; 16]);

fn comm(handle: usize) -> Option<&'static Comm> {
    // SAFETY: by the C contract a handle is null or came from a call below; those are leaked.
    unsafe { (handle as *const Comm).as_ref() }
}

fn create(out: Out<usize>, ranks: usize, rank: usize, name: Option<u64>) -> Status {
    if ranks < 1 || rank >= ranks {
        return INVALID;
    }
    let (peers, children, buffers) = (OnceLock::new(), AtomicU64::new(0), Mutex::new(None));
    out.give(leak(Comm { ranks, rank, device: current().index, name, peers, children, buffers }))
}

fn create_by_id(out: Out<usize>, ranks: c_int, rank: c_int, id: UniqueId) -> Status {
    let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else { return INVALID };
    // An id from another machine names memory that is not here.
    let name = (id.0[3] == machine_hash()).then(|| hash(id.0));
    create(out, ranks, rank, name)
}

fn hash(what: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// Tells machines apart, and their boots.
fn machine_hash() -> u64 {
    hash(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default())
}

fn unique_id(out: Out<UniqueId>) -> Status {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; 16];
    id[0] = u64::from_le_bytes(*b"phantom!");
    id[1] = u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed);
    // Two programs may have had the same process id: the time tells them apart.
    id[2] = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64);
    id[3] = machine_hash();
    out.give(UniqueId(id))
}

impl Comm {
    /// Takes the buffers of its ring, once. Alone it needs none.
    fn connect(&self) -> Status {
        let mut buffers = lock(&self.buffers);
        if self.ranks > 1 && buffers.is_none() {
            match Taken::new(LIBRARY, self.device, &ring_of_nccl()) {
                Ok(taken) => *buffers = Some(taken),
                Err(status) => return status,
            }
        }
        OK
    }

    /// Gives them back.
    fn disconnect(&self) {
        let buffers = lock(&self.buffers).take();
        if let Some(buffers) = buffers {
            buffers.give(LIBRARY);
        }
    }

    fn peers(&self) -> Option<&Peers> {
        let attach = || {
            let name = self.name.filter(|_| self.ranks > 1)?;
            Peers::attach(&format!("/memtrace-phantom-{name:016x}"), self.ranks, self.rank)
        };
        self.peers.get_or_init(attach).as_ref()
    }

    /// Everyone's contribution to an operation; one's own for everyone's where they are out of reach.
    fn everyone(&self, mine: Contribution) -> Vec<Contribution> {
        let heard = self.peers().and_then(|peers| peers.exchange(mine.as_deref()));
        heard.unwrap_or_else(|| vec![mine; self.ranks])
    }

    /// A communicator of those ranks that said the same colour, in the order of their keys.
    fn split(&self, color: c_int, key: c_int, out: Out<usize>) -> Status {
        let child = self.children.fetch_add(1, Ordering::Relaxed);
        let mine = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let everyone = self.everyone(Some(mine));
        let said = |rank: usize| -> Option<(c_int, c_int)> {
            let bytes = everyone.get(rank)?.as_ref()?;
            let number = |at: usize| Some(c_int::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
            Some((number(0)?, number(4)?))
        };
        if color == NO_COLOR {
            return out.give(0);
        }
        let mut members: Vec<_> = (0..self.ranks)
            .filter_map(|rank| said(rank).map(|(color, key)| (color, key, rank)))
            .filter(|&(other, ..)| other == color)
            .map(|(_, key, rank)| (key, rank))
            .collect();
        members.sort_unstable();
        let Some(rank) = members.iter().position(|&(_, rank)| rank == self.rank) else { return INVALID };
        create(out, members.len(), rank, self.name.map(|name| hash((name, child, color))))
    }

    fn shrink(&self, excluded: Out<c_int>, count: usize, out: Out<usize>) -> Status {
        let child = self.children.fetch_add(1, Ordering::Relaxed);
        let gone: Vec<_> = (0..count).filter_map(|index| excluded.at(index).get()).collect();
        let left: Vec<_> = (0..self.ranks).filter(|&rank| !gone.contains(&(rank as c_int))).collect();
        let Some(rank) = left.iter().position(|&rank| rank == self.rank) else { return INVALID };
        create(out, left.len(), rank, self.name.map(|name| hash((name, child, "shrunk"))))
    }
}

/// What an operation does with the data.
#[derive(Debug, Clone, Copy)]
enum Action {
    AllReduce(c_int),
    Reduce(c_int, usize),
    Broadcast(usize),
    AllGather,
    ReduceScatter(c_int),
    AllToAll,
    Send(usize),
    Receive(usize),
}

/// An operation, as the program asked for it.
#[derive(Debug, Clone, Copy)]
struct Operation {
    action: Action,
    handle: usize,
    from: usize,
    to: usize,
    /// Elements that each rank gives to each place: the header's count.
    count: usize,
    data_type: c_int,
}

impl Operation {
    fn run(&self) -> Status {
        let Some(comm) = comm(self.handle) else { return INVALID };
        let connected = comm.connect();
        if connected != OK {
            return connected;
        }
        let one = self.count.saturating_mul(width(self.data_type));
        let (gives, gets) = match self.action {
            Action::AllGather => (one, one.saturating_mul(comm.ranks)),
            Action::ReduceScatter(_) => (one.saturating_mul(comm.ranks), one),
            Action::AllToAll => (one.saturating_mul(comm.ranks), one.saturating_mul(comm.ranks)),
            Action::Send(_) => (one, 0),
            _ => (one, one),
        };
        if gives == 0 && gets == 0 {
            return OK;
        }
        if gives > SMALL {
            // Too large to be of known value; in place, nothing changed that anybody could tell.
            return if gets == 0 { OK } else { write_known(self.to, None, gets) };
        }
        let mine = match self.action {
            Action::Receive(_) => None,
            // Only the root's buffer counts; the others' may not even be there.
            Action::Broadcast(root) if root != comm.rank => None,
            _ => read_prefix(self.from, gives),
        };
        match self.action {
            Action::Send(peer) => {
                if let Some(peers) = comm.peers() {
                    peers.send(peer.min(comm.ranks - 1), mine.as_deref());
                }
                OK
            }
            Action::Receive(peer) => {
                let heard = comm.peers().and_then(|peers| peers.receive(peer.min(comm.ranks - 1)));
                write_known(self.to, heard.flatten().as_deref(), gets)
            }
            _ => self.finish(comm, &comm.everyone(mine), one),
        }
    }

    /// Writes the result of a collective, from everyone's contributions.
    fn finish(&self, comm: &Comm, everyone: &[Contribution], one: usize) -> Status {
        let reduced = |operation, part: usize| {
            let whole = |bytes| slice(bytes, part, one).filter(|bytes| bytes.len() == one);
            let all: Option<Vec<_>> = everyone.iter().map(whole).collect();
            all.map(|all| reduce(self.data_type, operation, &all))
        };
        match self.action {
            Action::AllReduce(operation) => write_known(self.to, reduced(operation, 0).as_deref(), one),
            Action::Reduce(operation, root) if root == comm.rank => {
                write_known(self.to, reduced(operation, 0).as_deref(), one)
            }
            Action::Reduce(..) => OK,
            Action::Broadcast(root) => {
                let said = everyone.get(root).and_then(|bytes| slice(bytes, 0, one));
                // Where the root is out of reach there is nothing to say, unless this is the root.
                write_known(self.to, said.as_deref(), one)
            }
            Action::ReduceScatter(operation) => {
                write_known(self.to, reduced(operation, comm.rank).as_deref(), one)
            }
            Action::AllGather => self.parts(one, everyone.iter().map(|bytes| slice(bytes, 0, one))),
            Action::AllToAll => self.parts(one, everyone.iter().map(|bytes| slice(bytes, comm.rank, one))),
            Action::Send(_) | Action::Receive(_) => OK,
        }
    }

    fn parts(&self, one: usize, parts: impl Iterator<Item = Contribution>) -> Status {
        // All are written, then the first failure counts.
        let statuses: Vec<_> = parts
            .enumerate()
            .map(|(rank, bytes)| write_known(self.to + rank * one, bytes.as_deref(), one))
            .collect();
        statuses.into_iter().find(|&status| status != OK).unwrap_or(OK)
    }
}

/// The `part`th piece of a contribution, as far as it is known.
fn slice(bytes: &Contribution, part: usize, one: usize) -> Contribution {
    let bytes = bytes.as_ref()?;
    Some(bytes.get(part * one..bytes.len().min((part + 1) * one))?.to_vec())
}

thread_local! {
    /// Groups begun and not ended, and what was asked for in them.
    static DEPTH: Cell<u32> = const { Cell::new(0) };
    static QUEUE: RefCell<Vec<Operation>> = const { RefCell::new(Vec::new()) };
}

fn ask(operation: Operation) -> Status {
    if comm(operation.handle).is_none() {
        return INVALID;
    }
    let queued = DEPTH.try_with(Cell::get).unwrap_or(0) > 0
        && QUEUE.try_with(|queue| queue.borrow_mut().push(operation)).is_ok();
    if queued { OK } else { done(operation.run()) }
}

fn done(status: Status) -> Status {
    if status == OK || status == INVALID { status } else { CUDA_ERROR }
}

fn group_end() -> Status {
    let depth = DEPTH.try_with(|depth| depth.replace(depth.get().saturating_sub(1))).unwrap_or(1);
    if depth > 1 {
        return OK;
    }
    let queue = QUEUE.try_with(RefCell::take).unwrap_or_default();
    // Nothing in a group waits for another of it: what is sent goes first.
    let (sends, others): (Vec<_>, Vec<_>) =
        queue.into_iter().partition(|operation| matches!(operation.action, Action::Send(_)));
    let statuses: Vec<_> = sends.iter().chain(&others).map(Operation::run).collect();
    statuses.into_iter().map(done).find(|&status| status != OK).unwrap_or(OK)
}

fn destroy(handle: usize) -> Status {
    if let Some(comm) = comm(handle) {
        comm.disconnect();
    }
    OK
}

fn peer(rank: c_int) -> usize {
    usize::try_from(rank).unwrap_or(0)
}

answers! {
    Real fn ncclGetUniqueId(out: Out<UniqueId>) { unique_id(out) }
    Real fn ncclCommInitRank(out: Out<usize>, ranks: c_int, id: UniqueId, rank: c_int) {
        create_by_id(out, ranks, rank, id)
    }
    Real fn ncclCommInitRankConfig(out: Out<usize>, ranks: c_int, id: UniqueId, rank: c_int, _config: Word) {
        create_by_id(out, ranks, rank, id)
    }
    Real fn ncclCommInitRankScalable(
        out: Out<usize>, ranks: c_int, rank: c_int, _count: c_int, ids: Out<UniqueId>, _config: Word,
    ) {
        ids.get().map_or(INVALID, |id| create_by_id(out, ranks, rank, id))
    }
    /// Several ranks in one thread cannot wait for each other: each goes by its own data.
    Guess fn ncclCommInitAll(out: Out<usize>, ranks: c_int, _devices: Word) {
        let ranks = peer(ranks);
        (0..ranks).map(|rank| create(out.at(rank), ranks, rank, None)).find(|&status| status != OK).unwrap_or(OK)
    }
    Real fn ncclCommSplit(handle: Word, color: c_int, key: c_int, out: Out<usize>, _config: Word) {
        comm(handle).map_or(INVALID, |comm| comm.split(color, key, out))
    }
    Real fn ncclCommShrink(
        handle: Word, excluded: Out<c_int>, count: c_int, out: Out<usize>, _config: Word, _flags: c_int,
    ) {
        comm(handle).map_or(INVALID, |comm| comm.shrink(excluded, peer(count), out))
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
    Real fn ncclCommDestroy(handle: Word) { destroy(handle) }
    Real fn ncclCommAbort(handle: Word) { destroy(handle) }
    Success fn ncclCommRegister(_handle: Word, _address: Word, _size: usize, out: Out<usize>) { out.give(opaque_handle()) }
    Success fn ncclCommDeregister(_handle: Word, _registration: Word) { OK }
    Success fn ncclCommWindowRegister(_handle: Word, _address: Word, _size: usize, out: Out<usize>, _flags: c_int) {
        out.give(opaque_handle())
    }
    Success fn ncclCommWindowDeregister(_handle: Word, _window: Word) { OK }
    Real fn ncclGroupStart() {
        let _ = DEPTH.try_with(|depth| depth.set(depth.get() + 1));
        OK
    }
    Real fn ncclGroupEnd() { group_end() }
    Success fn ncclGroupSimulateEnd(_info: Word) { OK }
    Guess fn ncclRedOpCreatePreMulSum(out: Out<c_int>, _scalar: Word, _data_type: c_int, _residence: c_int, _handle: Word) {
        out.give(5)
    }
    Success fn ncclRedOpDestroy(_operation: c_int, _handle: Word) { OK }
    Real fn ncclAllReduce(from: Word, to: Word, count: usize, data_type: c_int, operation: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::AllReduce(operation), handle, from, to, count, data_type })
    }
    Real fn ncclReduce(
        from: Word, to: Word, count: usize, data_type: c_int, operation: c_int, root: c_int, handle: Word, _stream: Word,
    ) {
        ask(Operation { action: Action::Reduce(operation, peer(root)), handle, from, to, count, data_type })
    }
    Real fn ncclBroadcast(from: Word, to: Word, count: usize, data_type: c_int, root: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::Broadcast(peer(root)), handle, from, to, count, data_type })
    }
    Real fn ncclBcast(at: Word, count: usize, data_type: c_int, root: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::Broadcast(peer(root)), handle, from: at, to: at, count, data_type })
    }
    Real fn ncclAllGather(from: Word, to: Word, count: usize, data_type: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::AllGather, handle, from, to, count, data_type })
    }
    Real fn ncclReduceScatter(from: Word, to: Word, count: usize, data_type: c_int, operation: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::ReduceScatter(operation), handle, from, to, count, data_type })
    }
    Real fn ncclAlltoAll(from: Word, to: Word, count: usize, data_type: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::AllToAll, handle, from, to, count, data_type })
    }
    Real fn ncclSend(from: Word, count: usize, data_type: c_int, to_rank: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::Send(peer(to_rank)), handle, from, to: 0, count, data_type })
    }
    Real fn ncclRecv(to: Word, count: usize, data_type: c_int, from_rank: c_int, handle: Word, _stream: Word) {
        ask(Operation { action: Action::Receive(peer(from_rank)), handle, from: 0, to, count, data_type })
    }
    Real fn ncclMemAlloc(out: Out<usize>, size: usize) {
        if memory::allocate(out, size, Use::Plain) == OK { OK } else { CUDA_ERROR }
    }
    Real fn ncclMemFree(address: Word) { if memory::free(address) == OK { OK } else { CUDA_ERROR } }
}
