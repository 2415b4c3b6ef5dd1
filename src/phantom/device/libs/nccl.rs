//! NCCL: communicators that know their size and rank, and collectives that take the
//! memory that NCCL would take.
//!
//! Small data of known content is exchanged with the other ranks
//! ([`rank_mailbox`](crate::libs::rank_mailbox)). Other data is not moved, and no rank waits for it. Where
//! the other ranks cannot be reached (other hosts, or several ranks in one process), a rank uses its own data
//! in place of theirs. A communicator takes the memory that NCCL's source shows
//! ([`nccl_memory`](crate::libs::nccl_memory)). In a simulated cluster all other ranks are stand-ins
//! ([`stand_ins`]).

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};

use cudarc::nccl::sys::{ncclResult_t, ncclUniqueId};
use rustc_hash::FxHashMap;

use crate::core::call_table::{answers, by_contract};
use crate::core::ffi::{Handle, In, OK, Out, Status, Word, opaque_handle};
use crate::core::host_state::{current, device};
use crate::core::lock::lock;
use crate::core::past_oom::Caller;
use crate::core::values::SMALL;
use crate::core::vram::BlockPurpose;
use crate::cuda::captures;
use crate::cuda::copy::{read_prefix, write_known};
use crate::cuda::memory;
use crate::cuda::streams::StreamHandle;
use crate::kernels::reduce::{self, DataType, reduce, width};
use crate::libs::nccl_buffers::CommunicatorMemory;
use crate::libs::nccl_groups::{self, RankPlace};
use crate::libs::rank_mailbox::{Contribution, RankMailbox};
use crate::libs::stand_ins;

/// A communicator, as seen by the rank that created it.
struct Communicator {
    ranks: usize,
    rank: usize,
    place: RankPlace,
    /// The index of the communicator's device.
    device: usize,
    /// The number in the name of the shared memory of the ranks, or `None` if the ranks cannot be reached.
    name: Option<u64>,
    mailbox: OnceLock<Option<RankMailbox>>,
    /// The number of communicators that a split or a shrink derived from this one.
    children: AtomicU64,
    memory: Mutex<CommunicatorMemory>,
}

const INVALID_ARGUMENT: Status = ncclResult_t::ncclInvalidArgument as Status;
const UNHANDLED_CUDA_ERROR: Status = ncclResult_t::ncclUnhandledCudaError as Status;
/// The color `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;

/// The content of an `ncclUniqueId`, which some calls take by value.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u64; 16]);

const _: () = assert!(size_of::<UniqueId>() == size_of::<ncclUniqueId>());

/// Creates a communicator on a device. `near` is the number of its ranks on this machine, if known.
fn new_communicator(
    device: usize,
    (ranks, rank): (usize, usize),
    near: Option<usize>,
    name: Option<u64>,
) -> Result<Handle<Communicator>, Status> {
    if ranks < 1 || rank >= ranks {
        return Err(INVALID_ARGUMENT);
    }
    let place = RankPlace::new(ranks, rank, near);
    let memory = CommunicatorMemory::new(device, &place).map_err(nccl_status)?;
    Ok(Handle::new(Communicator {
        ranks,
        rank,
        place,
        device,
        name,
        mailbox: OnceLock::new(),
        children: AtomicU64::new(0),
        memory: Mutex::new(memory),
    }))
}

/// Same as [`new_communicator`], and writes the handle.
fn create(
    out: Out<Handle<Communicator>>,
    device: usize,
    rank_of: (usize, usize),
    near: Option<usize>,
    name: Option<u64>,
) -> Status {
    if out.is_null() {
        return INVALID_ARGUMENT;
    }
    new_communicator(device, rank_of, near, name).map_or_else(|status| status, |comm| out.give(comm))
}

fn create_with_id(out: Out<Handle<Communicator>>, ranks: c_int, rank: c_int, id: UniqueId) -> Status {
    let (Ok(ranks), Ok(rank)) = (usize::try_from(ranks), usize::try_from(rank)) else {
        return INVALID_ARGUMENT;
    };
    // The id of another machine names memory that does not exist here, and stand-ins have no memory.
    let name = (id.0[3] == machine_hash() && !stand_ins::exist()).then(|| hash(id.0));
    let bytes: Vec<u8> = id.0.iter().flat_map(|word| word.to_le_bytes()).collect();
    create(out, current().index, (ranks, rank), nccl_groups::near_of_id(&bytes), name)
}

/// Creates communicators for all ranks in this process, each on its device of `devices` or, if that is null, on the
/// device with the number of the rank. If one fails, creates none. Several ranks in one thread cannot wait for each
/// other, so each uses its own data.
///
/// # Safety
/// `out` and `devices` are null or have `ranks` elements.
unsafe fn create_all(out: Out<Handle<Communicator>>, ranks: usize, devices: In<c_int>) -> Status {
    if out.is_null() {
        return INVALID_ARGUMENT;
    }
    let mut all = Vec::new();
    for rank in 0..ranks {
        // SAFETY: rank < ranks.
        let wanted = unsafe { devices.at(rank).get() }.unwrap_or(rank as c_int);
        let made = device(wanted)
            .ok_or(INVALID_ARGUMENT)
            .and_then(|device| new_communicator(device.index, (ranks, rank), Some(ranks), None));
        match made {
            Ok(comm) => all.push(comm),
            Err(status) => {
                all.into_iter().for_each(|comm| {
                    destroy(comm);
                });
                return status;
            }
        }
    }
    for (rank, comm) in all.into_iter().enumerate() {
        // SAFETY: rank < ranks.
        unsafe { out.at(rank) }.put(comm);
    }
    OK
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

/// Returns a number that identifies the machine and its current boot.
fn machine_hash() -> u64 {
    hash(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default())
}

fn unique_id(out: Out<UniqueId>) -> Status {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; 16];
    id[0] = u64::from_le_bytes(*b"phantom!");
    id[1] = u64::from(std::process::id()) << 32 | NEXT.fetch_add(1, Ordering::Relaxed);
    // Process ids are reused, so the id contains the time, too.
    id[2] = std::time::UNIX_EPOCH.elapsed().map_or(0, |time| time.as_nanos() as u64);
    id[3] = machine_hash();
    out.give(UniqueId(id))
}

impl Communicator {
    /// Allocates the buffers that this operation needs, unless an earlier operation allocated them.
    fn alloc_memory(&self, action: Action) -> Status {
        let mut memory = lock(&self.memory);
        let mut peer = |peer, sends| memory.connect_peer(self.device, &self.place, (peer, sends));
        let connected = match action {
            Action::Send(to) => peer(to, true),
            Action::Receive(from) => peer(from, false),
            Action::AllToAll => {
                (0..self.ranks).try_for_each(|other| peer(other, true).and_then(|()| peer(other, false)))
            }
            _ => memory.connect(self.device, &self.place),
        };
        connected.err().unwrap_or(OK)
    }

    /// Returns the mailbox of the ranks, if they can be reached.
    fn mailbox(&self) -> Option<&RankMailbox> {
        let attach = || {
            let name = self.name.filter(|_| self.ranks > 1)?;
            RankMailbox::attach(&memtrace_machine::files::path_of_mailbox(name), self.ranks, self.rank)
        };
        self.mailbox.get_or_init(attach).as_ref()
    }

    /// Returns the contributions of all ranks to an operation. If the exchange is not possible or times out,
    /// this rank's contribution is used for every rank.
    fn exchange(&self, mine: Contribution) -> Vec<Contribution> {
        let all = self.mailbox().and_then(|mailbox| mailbox.exchange(mine.as_deref()));
        all.unwrap_or_else(|| vec![mine; self.ranks])
    }

    /// Creates a communicator of the ranks with the same color, in the order of their keys.
    fn split(&self, color: c_int, key: c_int, out: Out<Handle<Communicator>>) -> Status {
        let child = self.children.fetch_add(1, Ordering::Relaxed);
        if color != NO_COLOR && stand_ins::exist() {
            // Stand-ins have no colors. But PyTorch has announced the size of the group that it is making.
            let (ranks, rank, near) = match stand_ins::announced_size() {
                Some(ranks) => (ranks, unsigned(key), stand_ins::announced_near()),
                None => (self.ranks, self.rank, Some(self.place.near)),
            };
            return create(out, self.device, (ranks, rank.min(ranks.saturating_sub(1))), near, None);
        }
        let mine = [color.to_le_bytes(), key.to_le_bytes()].concat();
        let all = self.exchange(Some(mine));
        let color_and_key = |rank: usize| -> Option<(c_int, c_int)> {
            let bytes = all.get(rank)?.as_ref()?;
            let number = |at: usize| Some(c_int::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
            Some((number(0)?, number(4)?))
        };
        if color == NO_COLOR {
            return out.give(Handle::null());
        }
        let mut members: Vec<_> = (0..self.ranks)
            .filter_map(|rank| color_and_key(rank).map(|(color, key)| (color, key, rank)))
            .filter(|&(other, ..)| other == color)
            .map(|(_, key, rank)| (key, rank))
            .collect();
        members.sort_unstable();
        let Some(rank) = members.iter().position(|&(_, rank)| rank == self.rank) else {
            return INVALID_ARGUMENT;
        };
        create(
            out,
            self.device,
            (members.len(), rank),
            None,
            self.name.map(|name| hash((name, child, color))),
        )
    }

    /// Creates a communicator without some ranks.
    ///
    /// # Safety
    /// `excluded` is null or has `count` elements.
    unsafe fn shrink(&self, excluded: In<c_int>, count: usize, out: Out<Handle<Communicator>>) -> Status {
        let child = self.children.fetch_add(1, Ordering::Relaxed);
        // SAFETY: index < count.
        let gone: Vec<_> = (0..count).filter_map(|index| unsafe { excluded.at(index) }.get()).collect();
        let left: Vec<_> = (0..self.ranks).filter(|&rank| !gone.contains(&(rank as c_int))).collect();
        let Some(rank) = left.iter().position(|&rank| rank == self.rank) else { return INVALID_ARGUMENT };
        create(
            out,
            self.device,
            (left.len(), rank),
            None,
            self.name.map(|name| hash((name, child, "shrunk"))),
        )
    }
}

/// The kind of an operation, with the reduction or the rank that it names.
#[derive(Debug, Clone, Copy)]
enum Action {
    AllReduce(reduce::Operation),
    Reduce(reduce::Operation, usize),
    Broadcast(usize),
    AllGather,
    ReduceScatter(reduce::Operation),
    AllToAll,
    Send(usize),
    Receive(usize),
}

/// A call of an operation, with the communicator and the pointers that the program passed.
#[derive(Clone, Copy)]
struct Operation {
    action: Action,
    comm: Handle<Communicator>,
    from: usize,
    to: usize,
    /// The count as NCCL's header defines it: the number of elements that each rank contributes to each
    /// result.
    count: usize,
    data_type: DataType,
    stream: StreamHandle,
}

impl Operation {
    /// Runs the operation. Its communicator has the memory for it.
    ///
    /// # Safety
    /// `from` and `to` are good for the data of the operation, as NCCL's header defines it.
    unsafe fn run(&self) -> Status {
        let Some(comm) = self.comm.get() else { return INVALID_ARGUMENT };
        let part = self.count.saturating_mul(width(self.data_type));
        let (input, output) = match self.action {
            Action::AllGather => (part, part.saturating_mul(comm.ranks)),
            Action::ReduceScatter(_) => (part.saturating_mul(comm.ranks), part),
            Action::AllToAll => (part.saturating_mul(comm.ranks), part.saturating_mul(comm.ranks)),
            Action::Send(_) => (part, 0),
            _ => (part, part),
        };
        if input == 0 && output == 0 {
            return OK;
        }
        if comm.ranks > 1 && stand_ins::exist() {
            // SAFETY: the caller's promise.
            return unsafe { self.run_among_stand_ins(comm, part, (input, output)) };
        }
        if input > SMALL {
            // The data is too large to be exchanged, so the content of the output becomes unknown.
            // SAFETY: the caller's promise.
            return if output == 0 { OK } else { unsafe { write_known(self.to, None, output) } };
        }
        let mine = match self.action {
            Action::Receive(_) => None,
            // Only the root's input is read. The inputs of the other ranks may not exist.
            Action::Broadcast(root) if root != comm.rank => None,
            // SAFETY: the caller's promise.
            _ => unsafe { read_prefix(self.from, input) },
        };
        match self.action {
            Action::Send(rank) => {
                if let Some(mailbox) = comm.mailbox() {
                    mailbox.send(rank.min(comm.ranks - 1), mine.as_deref());
                }
                OK
            }
            Action::Receive(rank) => {
                let received = comm.mailbox().and_then(|mailbox| mailbox.receive(rank.min(comm.ranks - 1)));
                // SAFETY: the caller's promise.
                unsafe { write_known(self.to, received.flatten().as_deref(), output) }
            }
            // SAFETY: the caller's promise.
            _ => unsafe { self.write_result(comm, &comm.exchange(mine), part) },
        }
    }

    /// Runs the operation with stand-ins, which hold the same data as this rank.
    ///
    /// # Safety
    /// As for [`run`](Self::run). `input` and `output` are the sizes of the data in bytes.
    unsafe fn run_among_stand_ins(
        &self,
        comm: &Communicator,
        part: usize,
        (input, output): (usize, usize),
    ) -> Status {
        stand_ins::count_answer();
        let is_root = |root: usize| root == comm.rank;
        if let Action::Broadcast(root) = self.action
            && !is_root(root)
        {
            if self.from == self.to {
                stand_ins::mark_answered(self.to, output);
                return OK;
            }
            // SAFETY: the caller's promise: `to` is good for the output.
            let held = unsafe { read_prefix(self.to, output.min(SMALL)) };
            // SAFETY: as above.
            return unsafe { stand_ins::write(self.to, held.as_deref(), output) };
        }
        let is_message = matches!(self.action, Action::Send(_) | Action::Receive(_));
        // SAFETY: the caller's promise; a message has no input here.
        let mine =
            (input <= SMALL && !is_message).then(|| unsafe { read_prefix(self.from, input) }).flatten();
        let whole = |bytes: &Contribution, index: usize| {
            slice(bytes, index, part).filter(|bytes| bytes.len() == part)
        };
        let reduced = |operation, index: usize| {
            whole(&mine, index).map(|bytes| reduce::of_equals(self.data_type, operation, &bytes, comm.ranks))
        };
        // SAFETY: the caller's promise, for each.
        unsafe {
            match self.action {
                Action::AllReduce(operation) => {
                    stand_ins::write(self.to, reduced(operation, 0).as_deref(), part)
                }
                Action::Reduce(operation, root) if is_root(root) => {
                    stand_ins::write(self.to, reduced(operation, 0).as_deref(), part)
                }
                Action::ReduceScatter(operation) => {
                    stand_ins::write(self.to, reduced(operation, comm.rank).as_deref(), part)
                }
                Action::Broadcast(_) => write_known(self.to, mine.as_deref(), part),
                Action::AllGather => {
                    stand_ins::write_parts(self.to, whole(&mine, 0), part, comm.ranks, comm.rank)
                }
                Action::AllToAll => {
                    stand_ins::write_parts(self.to, whole(&mine, comm.rank), part, comm.ranks, comm.rank)
                }
                Action::Receive(_) => write_known(self.to, None, output),
                Action::Send(_) | Action::Reduce(..) => OK,
            }
        }
    }

    /// Receives a message from a stand-in, which is the message that this rank sends to itself in the same
    /// group. PyTorch implements an all-to-all exchange as such a group, and a stand-in holds the same data
    /// as this rank. Returns `None` if there is no such message.
    ///
    /// # Safety
    /// The pointers of both operations are good for their data.
    unsafe fn receive_own(&self, group: &[Operation]) -> Option<Status> {
        let Action::Receive(from) = self.action else { return None };
        let comm = self.comm.get().filter(|comm| comm.ranks > 1 && stand_ins::exist())?;
        let sends_to_itself = |operation: &&Operation| {
            matches!(operation.action, Action::Send(to) if to == comm.rank)
                && operation.comm.get().is_some_and(|other| std::ptr::eq(other, comm))
        };
        let own = group.iter().find(sends_to_itself)?;
        let size = self.count.saturating_mul(width(self.data_type));
        if own.count.saturating_mul(width(own.data_type)) != size || size > SMALL {
            return None;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let bytes = read_prefix(own.from, size);
            if from == comm.rank {
                return Some(write_known(self.to, bytes.as_deref(), size));
            }
            stand_ins::count_answer();
            Some(stand_ins::write(self.to, bytes.as_deref(), size))
        }
    }

    /// Writes the result of a collective from the contributions of all ranks, in parts of `part` bytes.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn write_result(&self, comm: &Communicator, all: &[Contribution], part: usize) -> Status {
        let reduced = |operation, index: usize| {
            let whole = |bytes| slice(bytes, index, part).filter(|bytes| bytes.len() == part);
            let parts: Option<Vec<_>> = all.iter().map(whole).collect();
            parts.map(|parts| reduce(self.data_type, operation, &parts))
        };
        // SAFETY: the caller's promise, for each.
        unsafe {
            match self.action {
                Action::AllReduce(operation) => write_known(self.to, reduced(operation, 0).as_deref(), part),
                Action::Reduce(operation, root) if root == comm.rank => {
                    write_known(self.to, reduced(operation, 0).as_deref(), part)
                }
                Action::Reduce(..) => OK,
                Action::Broadcast(root) => {
                    // The root's contribution is unknown if the ranks cannot be reached. The output then
                    // becomes unknown.
                    let bytes = all.get(root).and_then(|bytes| slice(bytes, 0, part));
                    write_known(self.to, bytes.as_deref(), part)
                }
                Action::ReduceScatter(operation) => {
                    write_known(self.to, reduced(operation, comm.rank).as_deref(), part)
                }
                Action::AllGather => self.write_parts(part, all.iter().map(|bytes| slice(bytes, 0, part))),
                Action::AllToAll => {
                    self.write_parts(part, all.iter().map(|bytes| slice(bytes, comm.rank, part)))
                }
                Action::Send(_) | Action::Receive(_) => OK,
            }
        }
    }

    /// Writes one part for each rank. Returns the first failure after all parts are written.
    ///
    /// # Safety
    /// As for [`run`](Self::run).
    unsafe fn write_parts(&self, part: usize, parts: impl Iterator<Item = Contribution>) -> Status {
        let statuses: Vec<_> = parts
            .enumerate()
            // SAFETY: the caller's promise.
            .map(|(rank, bytes)| unsafe { write_known(self.to + rank * part, bytes.as_deref(), part) })
            .collect();
        statuses.into_iter().find(|&status| status != OK).unwrap_or(OK)
    }
}

/// Returns the part of a contribution with this index, or as many of its bytes as are known.
fn slice(bytes: &Contribution, index: usize, part: usize) -> Contribution {
    let bytes = bytes.as_ref()?;
    Some(bytes.get(index * part..bytes.len().min((index + 1) * part))?.to_vec())
}

thread_local! {
    /// The number of open groups. [`GROUP`] holds the operations in them.
    static GROUP_DEPTH: Cell<u32> = const { Cell::new(0) };
    static GROUP: RefCell<Vec<Operation>> = const { RefCell::new(Vec::new()) };
}

/// Queues an operation on its stream now, or at the end of the open group.
///
/// # Safety
/// The pointers of the operation are good for its data until it has run: at the end of the group, and if the stream is
/// captured, at each launch of the graph.
unsafe fn submit(operation: Operation) -> Status {
    if operation.comm.get().is_none() {
        return INVALID_ARGUMENT;
    }
    let is_grouped = GROUP_DEPTH.try_with(Cell::get).unwrap_or(0) > 0
        && GROUP.try_with(|group| group.borrow_mut().push(operation)).is_ok();
    // SAFETY: the caller's promise.
    if is_grouped { OK } else { unsafe { queue(vec![operation]) } }
}

/// Allocates the buffers of operations, and queues the operations on the stream of the first one. NCCL requires that
/// either all streams of a group are captured by one graph, or none is.
///
/// # Safety
/// As for [`submit`].
unsafe fn queue(operations: Vec<Operation>) -> Status {
    let Some(&Operation { stream, .. }) = operations.first() else { return OK };
    for operation in &operations {
        let status = with(operation.comm, |comm| comm.alloc_memory(operation.action));
        if status != OK {
            return nccl_status(status);
        }
    }
    // SAFETY: the caller's promise.
    nccl_status(captures::queue_effect(stream, move |_| unsafe { run_all(&operations) }))
}

/// Returns NCCL's status for the status of a CUDA operation.
fn nccl_status(status: Status) -> Status {
    if status == OK || status == INVALID_ARGUMENT { status } else { UNHANDLED_CUDA_ERROR }
}

fn group_end() -> Status {
    let depth = GROUP_DEPTH.try_with(|depth| depth.replace(depth.get().saturating_sub(1))).unwrap_or(1);
    if depth > 1 {
        return OK;
    }
    // SAFETY: `submit` put the operations into the group, and its callers promised this.
    unsafe { queue(GROUP.try_with(RefCell::take).unwrap_or_default()) }
}

/// Runs the operations of a group. Returns the first failure after all have run.
///
/// # Safety
/// As for [`Operation::run`].
unsafe fn run_all(group: &[Operation]) -> Status {
    let is_send = |operation: &Operation| matches!(operation.action, Action::Send(_));
    let sends: Vec<Operation> = group.iter().copied().filter(is_send).collect();
    // A send waits until its peer has received the message before. So the operations run in rounds: the first
    // message to and from each peer, then the second one, and so on. In a round, sends run first.
    let mut so_far: FxHashMap<(bool, usize, usize), usize> = FxHashMap::default();
    let mut rounds: Vec<(usize, Operation)> = Vec::with_capacity(group.len());
    for &operation in group {
        let comm = operation.comm.get().map_or(0, |comm| std::ptr::from_ref(comm).addr());
        let round = match operation.action {
            Action::Send(peer) | Action::Receive(peer) => {
                let count = so_far.entry((is_send(&operation), comm, peer)).or_default();
                *count += 1;
                *count
            }
            _ => 1,
        };
        rounds.push((round, operation));
    }
    rounds.sort_by_key(|(round, operation)| (*round, !is_send(operation)));
    let statuses: Vec<_> = rounds
        .iter()
        // SAFETY: the caller's promise.
        .map(|(_, operation)| unsafe { operation.receive_own(&sends).unwrap_or_else(|| operation.run()) })
        .collect();
    statuses.into_iter().find(|&status| status != OK).unwrap_or(OK)
}

fn destroy(comm: Handle<Communicator>) -> Status {
    if let Some(comm) = comm.get() {
        lock(&comm.memory).free();
    }
    OK
}

/// Converts a rank or a count that arrives as an `int`. A negative number counts as 0.
fn unsigned(number: c_int) -> usize {
    usize::try_from(number).unwrap_or(0)
}

/// Calls a function with a communicator.
fn with(comm: Handle<Communicator>, answer: impl FnOnce(&Communicator) -> Status) -> Status {
    comm.get().map_or(INVALID_ARGUMENT, answer)
}

answers! {
    Real fn ncclGetUniqueId(out: Out<UniqueId>) { unique_id(out) }
    Real fn ncclCommInitRank(out: Out<Handle<Communicator>>, ranks: c_int, id: UniqueId, rank: c_int) {
        create_with_id(out, ranks, rank, id)
    }
    Real fn ncclCommInitRankConfig(
        out: Out<Handle<Communicator>>, ranks: c_int, id: UniqueId, rank: c_int, _config: Word,
    ) {
        create_with_id(out, ranks, rank, id)
    }
    Real fn ncclCommInitRankScalable(
        out: Out<Handle<Communicator>>, ranks: c_int, rank: c_int, _count: c_int, ids: In<UniqueId>,
        _config: Word,
    ) {
        ids.get().map_or(INVALID_ARGUMENT, |id| create_with_id(out, ranks, rank, id))
    }
    Guess fn ncclCommInitAll(out: Out<Handle<Communicator>>, ranks: c_int, devices: In<c_int>) {
        by_contract!(create_all(out, unsigned(ranks), devices))
    }
    Real fn ncclCommSplit(
        comm: Handle<Communicator>, color: c_int, key: c_int, out: Out<Handle<Communicator>>, _config: Word,
    ) {
        with(comm, |comm| comm.split(color, key, out))
    }
    Real fn ncclCommShrink(
        comm: Handle<Communicator>, excluded: In<c_int>, count: c_int, out: Out<Handle<Communicator>>,
        _config: Word, _flags: c_int,
    ) {
        with(comm, |comm| by_contract!(comm.shrink(excluded, unsigned(count), out)))
    }
    Real fn ncclCommCount(comm: Handle<Communicator>, out: Out<c_int>) {
        with(comm, |comm| out.give(comm.ranks as c_int))
    }
    Real fn ncclCommUserRank(comm: Handle<Communicator>, out: Out<c_int>) {
        with(comm, |comm| out.give(comm.rank as c_int))
    }
    Real fn ncclCommCuDevice(comm: Handle<Communicator>, out: Out<c_int>) {
        with(comm, |comm| out.give(comm.device as c_int))
    }
    Real fn ncclCommGetAsyncError(_comm: Word, out: Out<c_int>) { out.give(OK) }
    Success fn ncclCommFinalize(_comm: Word) { OK }
    Real fn {ncclCommDestroy, ncclCommAbort}(comm: Handle<Communicator>) { destroy(comm) }
    Success fn ncclCommRegister(_comm: Word, _address: Word, _size: usize, out: Out<usize>) {
        out.give(opaque_handle())
    }
    Success fn ncclCommDeregister(_comm: Word, _registration: Word) { OK }
    Success fn ncclCommWindowRegister(
        _comm: Word, _address: Word, _size: usize, out: Out<usize>, _flags: c_int,
    ) {
        out.give(opaque_handle())
    }
    Success fn ncclCommWindowDeregister(_comm: Word, _window: Word) { OK }
    Real fn ncclGroupStart() {
        let _ = GROUP_DEPTH.try_with(|depth| depth.set(depth.get() + 1));
        OK
    }
    Real fn ncclGroupEnd() { group_end() }
    Success fn ncclGroupSimulateEnd(_info: Word) { OK }
    /// Returns the number of an operation that the program created: `ncclNumOps`, which counts as a sum.
    Guess fn ncclRedOpCreatePreMulSum(
        out: Out<c_int>, _scalar: Word, _data_type: DataType, _residence: c_int, _comm: Word,
    ) {
        out.give(5)
    }
    Success fn ncclRedOpDestroy(_operation: c_int, _comm: Word) { OK }
    Real fn ncclAllReduce(
        from: Word, to: Word, count: usize, data_type: DataType, operation: c_int, comm: Handle<Communicator>,
        stream: StreamHandle,
    ) {
        let action = Action::AllReduce(operation);
        by_contract!(submit(Operation { action, comm, from, to, count, data_type, stream }))
    }
    Real fn ncclReduce(
        from: Word, to: Word, count: usize, data_type: DataType, operation: c_int, root: c_int,
        comm: Handle<Communicator>, stream: StreamHandle,
    ) {
        let action = Action::Reduce(operation, unsigned(root));
        by_contract!(submit(Operation { action, comm, from, to, count, data_type, stream }))
    }
    Real fn ncclBroadcast(
        from: Word, to: Word, count: usize, data_type: DataType, root: c_int, comm: Handle<Communicator>,
        stream: StreamHandle,
    ) {
        let action = Action::Broadcast(unsigned(root));
        by_contract!(submit(Operation { action, comm, from, to, count, data_type, stream }))
    }
    Real fn ncclBcast(
        at: Word, count: usize, data_type: DataType, root: c_int, comm: Handle<Communicator>, stream: StreamHandle,
    ) {
        let action = Action::Broadcast(unsigned(root));
        by_contract!(submit(Operation { action, comm, from: at, to: at, count, data_type, stream }))
    }
    Real fn ncclAllGather(
        from: Word, to: Word, count: usize, data_type: DataType, comm: Handle<Communicator>, stream: StreamHandle,
    ) {
        let action = Action::AllGather;
        by_contract!(submit(Operation { action, comm, from, to, count, data_type, stream }))
    }
    Real fn ncclReduceScatter(
        from: Word, to: Word, count: usize, data_type: DataType, operation: c_int, comm: Handle<Communicator>,
        stream: StreamHandle,
    ) {
        let action = Action::ReduceScatter(operation);
        by_contract!(submit(Operation { action, comm, from, to, count, data_type, stream }))
    }
    Real fn ncclAlltoAll(
        from: Word, to: Word, count: usize, data_type: DataType, comm: Handle<Communicator>, stream: StreamHandle,
    ) {
        let action = Action::AllToAll;
        by_contract!(submit(Operation { action, comm, from, to, count, data_type, stream }))
    }
    Real fn ncclSend(
        from: Word, count: usize, data_type: DataType, to_rank: c_int, comm: Handle<Communicator>,
        stream: StreamHandle,
    ) {
        let action = Action::Send(unsigned(to_rank));
        by_contract!(submit(Operation { action, comm, from, to: 0, count, data_type, stream }))
    }
    Real fn ncclRecv(
        to: Word, count: usize, data_type: DataType, from_rank: c_int, comm: Handle<Communicator>,
        stream: StreamHandle,
    ) {
        let action = Action::Receive(unsigned(from_rank));
        by_contract!(submit(Operation { action, comm, from: 0, to, count, data_type, stream }))
    }
    Real fn ncclMemAlloc(out: Out<usize>, size: usize) {
        if memory::alloc(out, size, BlockPurpose::Plain, Caller::GivesUp) == OK { OK } else { UNHANDLED_CUDA_ERROR }
    }
    Real fn ncclMemFree(address: Word) { if memory::free(address) == OK { OK } else { UNHANDLED_CUDA_ERROR } }
}
