//! The allocations of a communicator. They are made through the driver on behalf of NCCL, in the sizes that
//! [`nccl_memory`](crate::libs::nccl_memory) computes.
//!
//! [`handle_memory`](crate::libs::handle_memory) has the memory of the other libraries' handles.

use std::collections::HashSet;
use std::ffi::{CStr, c_int, c_void};
use std::mem::zeroed;
use std::sync::{Mutex, OnceLock};

use cudarc::driver::sys::{CUmemAllocationProp, CUmemAllocationType, CUmemLocationType};

use crate::core::ffi::{OK, OUT_OF_MEMORY, Out, Status};
use crate::core::host_state::{device, host_state};
use crate::core::loaded_library::find_in_program;
use crate::core::lock::lock;
use crate::core::on_behalf::on_behalf_of;
use crate::core::past_oom::Caller;
use crate::core::vram::PAGE;
use crate::libs::nccl_code::KernelCode;
use crate::libs::nccl_groups::RankPlace;
use crate::libs::nccl_memory::NcclMemory;

type MemCreate = unsafe extern "C" fn(*mut u64, usize, *const CUmemAllocationProp, u64) -> Status;
type MemRelease = unsafe extern "C" fn(u64) -> Status;

/// Physical device memory that a library allocated.
#[derive(Debug, Default)]
pub(crate) struct LibraryMemory {
    handles: Vec<u64>,
}

impl LibraryMemory {
    /// Allocates buffers of these sizes on behalf of a library, each in whole pages. If one fails,
    /// no buffer stays allocated.
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

    fn append(&mut self, mut other: Self) {
        self.handles.append(&mut other.handles);
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

/// The library to which the buffers are attributed.
const LIBRARY: &CStr = c"libnccl.so.2";

type GetVersion = unsafe extern "C" fn(Out<c_int>) -> Status;

/// Returns the function `ncclGetVersion` of the program's NCCL, if the program has one.
fn get_version() -> Option<GetVersion> {
    // SAFETY: the signature of nccl.h. This library does not define the name.
    unsafe { find_in_program::<GetVersion>(c"ncclGetVersion") }.or_else(|| {
        // SAFETY: a C string. The library stays open if it is open already.
        let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
        // SAFETY: an open handle and a C string.
        let found = (!library.is_null())
            .then(|| unsafe { libc::dlsym(library, c"ncclGetVersion".as_ptr()) })
            .filter(|found| !found.is_null());
        // SAFETY: the signature of nccl.h.
        found.map(|found| unsafe { std::mem::transmute::<*mut libc::c_void, GetVersion>(found) })
    })
}

/// Returns the version of the program's NCCL, such as 22809. If the program has no NCCL, returns the newest
/// version whose source we read.
fn version() -> u32 {
    static VERSION: OnceLock<u32> = OnceLock::new();
    *VERSION.get_or_init(|| {
        let mut version: c_int = 0;
        if let Some(get_version) = get_version() {
            // SAFETY: the place is good for one write.
            unsafe { get_version(Out::to(&mut version)) };
        }
        u32::try_from(version).ok().filter(|version| *version > 0).unwrap_or(22809)
    })
}

/// A part of the memory that NCCL's kernels take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KernelMemory {
    /// The code, which is loaded with the first communicator.
    Code,
    /// The stack of the first kernel.
    FirstKernel,
    /// The additional stack of the kernel that sends and receives messages.
    Messages,
}

impl KernelMemory {
    /// Returns the size of the part in bytes on a card of compute capability 9.0.
    fn bytes(self) -> u64 {
        let code = KernelCode::of_program(get_version().map(|function| function as *const c_void));
        let multiprocessors = host_state().spec.sms;
        match self {
            Self::Code => code.at_creation(),
            Self::FirstKernel => code.at_first_kernel(multiprocessors),
            Self::Messages => code.at_first_message(multiprocessors),
        }
    }
}

/// The parts that each device has loaded.
static LOADED: Mutex<Vec<(usize, KernelMemory)>> = Mutex::new(Vec::new());

/// Charges parts of the memory of NCCL's kernels to a device, each part once. The memory belongs to the
/// context.
fn load_kernels(index: usize, parts: &[KernelMemory]) -> Result<(), Status> {
    if host_state().spec.cc != (9, 0) {
        return Ok(());
    }
    let mut loaded = lock(&LOADED);
    for &part in parts {
        if loaded.contains(&(index, part)) {
            continue;
        }
        if !device(index as c_int).is_none_or(|device| device.vram().charge(part.bytes(), Caller::GivesUp)) {
            return Err(OUT_OF_MEMORY);
        }
        loaded.push((index, part));
    }
    Ok(())
}

/// The memory that one rank's communicator takes.
#[derive(Debug, Default)]
pub(crate) struct CommunicatorMemory {
    held: LibraryMemory,
    /// True after the first operation among several ranks.
    connected: bool,
    /// True after the first message to other machines, and after the first message from them.
    connected_to_machines: [bool; 2],
    /// The ranks that have exchanged messages with this rank. The flag is true for messages that this rank
    /// sends, and false for messages that it receives.
    peers: HashSet<(usize, bool)>,
}

impl CommunicatorMemory {
    /// Allocates the memory that comes with the communicator.
    pub(crate) fn new(device: usize, place: &RankPlace) -> Result<Self, Status> {
        let mut memory = Self::default();
        if host_state().spec.channels == 0 {
            return Ok(memory);
        }
        memory.take(device, place, |memory| memory.at_creation())?;
        match load_kernels(device, &[KernelMemory::Code]) {
            Ok(()) => Ok(memory),
            Err(status) => {
                memory.free();
                Err(status)
            }
        }
    }

    /// Allocates the memory for the first operation among several ranks.
    pub(crate) fn connect(&mut self, device: usize, place: &RankPlace) -> Result<(), Status> {
        if self.connected || place.ranks < 2 || host_state().spec.channels == 0 {
            return Ok(());
        }
        load_kernels(device, &[KernelMemory::FirstKernel])?;
        self.take(device, place, |memory| memory.at_first_operation())?;
        self.connected = true;
        Ok(())
    }

    /// Allocates the memory for the first message to another rank if `sends` is true, or from it. If that
    /// rank is on another machine, also allocates the memory for the first message to or from any other
    /// machine.
    pub(crate) fn connect_peer(
        &mut self,
        device: usize,
        place: &RankPlace,
        (peer, sends): (usize, bool),
    ) -> Result<(), Status> {
        let is_near = place.is_near(peer);
        let connected = match is_near {
            true => peer == place.rank || self.peers.contains(&(peer, sends)),
            false => self.connected_to_machines[usize::from(sends)],
        };
        if connected || place.ranks < 2 || host_state().spec.channels == 0 {
            return Ok(());
        }
        let sizes =
            |memory: &NcclMemory<'_>| if is_near { memory.for_peer(sends) } else { memory.for_machines() };
        load_kernels(device, &[KernelMemory::FirstKernel, KernelMemory::Messages])?;
        self.take(device, place, sizes)?;
        if is_near {
            self.peers.insert((peer, sends));
        } else {
            self.connected_to_machines[usize::from(sends)] = true;
        }
        Ok(())
    }

    /// Frees all memory of the communicator.
    pub(crate) fn free(&mut self) {
        std::mem::take(self).held.free(LIBRARY);
    }

    fn take(
        &mut self,
        device: usize,
        place: &RankPlace,
        sizes: impl FnOnce(&NcclMemory<'_>) -> Vec<usize>,
    ) -> Result<(), Status> {
        let spec = &host_state().spec;
        let memory = NcclMemory {
            version: version(),
            ranks: place.near,
            rank: place.rank % place.near.max(1),
            has_others: place.near < place.ranks,
            channels: spec.channels as usize,
            links: spec.base.links(),
            cc: spec.cc,
            rdma: spec.base.has_rdma(),
            variable: &|name| std::env::var(name).ok(),
        };
        self.held.append(LibraryMemory::alloc(LIBRARY, device, &sizes(&memory))?);
        Ok(())
    }
}
