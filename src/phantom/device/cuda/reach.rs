//! The memory that a launch may write.
//!
//! A kernel of unknown effect may write each block to which an argument points, each block whose address it
//! can load from there ([`address_tables`]), and nothing else. So only these blocks become unknown. If the
//! arguments are not known, all memory becomes unknown.
//!
//! Two assumptions are made. A kernel stays inside the blocks whose addresses it has, as C++ demands. And it
//! stores no address from its parameters in memory, unless its name shows that it does
//! ([`Launch::stores_addresses`]).

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::core::address_tables::{self, Targets};
use crate::core::addresses;
use crate::core::host_state::{device, host_state};
use crate::core::lock::lock;
use crate::core::running_ops;
use crate::core::torch_blocks;
use crate::core::vram::{self, BlockPurpose};
use crate::cuda::{memory, vmm};

/// The maximum number of bytes of a host range that are searched for addresses if a kernel gets a pointer
/// into the range.
const HOST_TABLE: usize = 64 << 10;

/// The memory at an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Extent {
    /// The block that contains a device address. It is PyTorch's block, or else the driver's.
    Device { start: usize, end: usize },
    /// Memory that the host and kernels read and write: pinned, registered or managed. The host may have put
    /// addresses there at any time.
    Host { start: usize, end: usize },
}

impl Extent {
    /// Returns the allocation that contains an address, if any.
    pub(crate) fn containing(address: usize) -> Option<Self> {
        if let Some((start, end)) = torch_blocks::find(address) {
            return Some(Self::Device { start, end });
        }
        let Some(index) = vram::device_index_of(address) else {
            if vram::is_device(address) {
                let (start, end) = vmm::reservation(address)?;
                let (start, end) = torch_blocks::gap(address, start, end);
                return Some(Self::Device { start, end });
            }
            return memory::host_range(address).map(|(start, end)| Self::Host { start, end });
        };
        let device = device(index as i32)?;
        if let Some((start, size)) = device.pool().find(address) {
            return Some(Self::Device { start, end: start + size });
        }
        let (start, block) = device.vram().find(address)?;
        let end = start + block.size;
        Some(match block.purpose {
            BlockPurpose::Managed => Self::Host { start, end },
            // Parameters may hold stale addresses of blocks that were freed.
            _ => {
                let (start, end) = torch_blocks::gap(address, start, end);
                Self::Device { start, end }
            }
        })
    }

    /// Marks the memory as unknown, or its known values as answers if the launch `leaves_values`. Leaves
    /// memory where the running op cannot write.
    fn forget(self, leaves_values: bool) {
        let (Self::Device { start, end } | Self::Host { start, end }) = self;
        if is_protected(start, end) {
            return;
        }
        for device in devices_of(start) {
            match leaves_values {
                true => device.values().mark_rewritten(start, end - start),
                false => device.values().forget_reached(start, end - start),
            }
        }
    }

    /// Adds the addresses that the memory may hold.
    fn targets(self, targets: &mut Targets) {
        match self {
            Self::Device { start, end } if address_tables::exist() => {
                for device in devices_of(start) {
                    device.values().targets(start, end, targets);
                }
            }
            Self::Device { .. } => {}
            Self::Host { start, end } => match read_host(start, (end - start).min(HOST_TABLE)) {
                Some(bytes) => addresses::in_table(&bytes, |address| targets.add(address)),
                None => targets.add_any(),
            },
        }
    }

    /// Makes device memory a table. Host memory needs no table, because each launch searches its bytes.
    fn add_table(self, targets: &Targets) {
        if let Self::Device { start, end } = self {
            for device in devices_of(start) {
                device.values().tables.add(start, end, targets);
            }
        }
    }
}

/// Returns the end of the block that contains an address.
pub(crate) fn block_end(address: usize) -> Option<usize> {
    match Extent::containing(address)? {
        Extent::Device { end, .. } | Extent::Host { end, .. } => Some(end),
    }
}

/// Reads host memory through a system call, because a program may unmap memory that it registered. Returns
/// `None` if the system call fails.
fn read_host(start: usize, length: usize) -> Option<Vec<u8>> {
    let mut bytes = vec![0u8; length];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: length };
    let remote = libc::iovec { iov_base: start as *mut _, iov_len: length };
    // SAFETY: writes at most `length` bytes into the vector, and checks the other range itself.
    let read = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    bytes.truncate(usize::try_from(read).ok()?);
    Some(bytes)
}

/// Returns the devices that may keep the values of an address: the device that owns it, or all devices for a
/// reserved range, whose values are stored with the device of its mapping.
pub(crate) fn devices_of(address: usize) -> impl Iterator<Item = &'static crate::core::device::Device> {
    let all = &host_state().devices;
    let range = match vram::device_index_of(address) {
        Some(index) => index.min(all.len())..(index + 1).min(all.len()),
        None if vram::is_device(address) => 0..all.len(),
        None => 0..0,
    };
    all[range].iter()
}

/// The kinds of holders of device addresses that a launch can use although they are not among its arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Global variables of kernels hold the address.
    Kernels,
    /// A handle or a descriptor of a math library holds the address.
    Libraries,
}

static HELD: [Mutex<Targets>; 2] = [const { Mutex::new(Targets::new()) }; 2];
/// For each [`Holder`], true if an address is remembered for it. In most programs, both are false.
static IS_HELD: [AtomicBool; 2] = [const { AtomicBool::new(false) }; 2];

/// Remembers a device address that later launches may write to although it is not among their arguments.
pub(crate) fn hold(holder: Holder, address: usize) {
    if vram::is_device(address) {
        lock(&HELD[holder as usize]).add(address);
        IS_HELD[holder as usize].store(true, Ordering::Release);
    }
}

/// Returns the addresses that were remembered for this holder.
fn held(holder: Holder) -> Targets {
    if IS_HELD[holder as usize].load(Ordering::Acquire) {
        lock(&HELD[holder as usize]).clone()
    } else {
        Targets::new()
    }
}

/// A launch: the memory that its arguments reach.
#[derive(Debug, Clone, Default)]
pub(crate) struct Launch {
    /// The memory to which its arguments point and which it may write.
    written: Vec<Extent>,
    /// The memory to which its arguments point and which it only reads.
    read: Vec<Extent>,
    /// True if the launch may store the addresses of its arguments in memory, for a later kernel.
    pub(crate) stores_addresses: bool,
    /// True if the launch only writes through the addresses that it loads, and copies no address.
    pub(crate) only_dereferences: bool,
    /// True if the launch belongs to a math library.
    is_library: bool,
    /// True for a kernel that was launched through the driver, as Triton's are. Known values that it may
    /// rewrite stay as answers.
    leaves_values: bool,
}

/// The number of recent extents that are searched for duplicates. An older extent may be added again, which
/// is harmless; a list of tensors has hundreds of extents.
const SEARCHED: usize = 8;

fn add_extent(list: &mut Vec<Extent>, address: usize) {
    if let Some(extent) = Extent::containing(address)
        && !list.iter().rev().take(SEARCHED).any(|&known| known == extent)
    {
        list.push(extent);
    }
}

impl Launch {
    /// Returns the launch, marked as the work of a math library.
    pub(crate) fn of_library(mut self) -> Self {
        self.is_library = true;
        self
    }

    /// Returns the launch, marked as one through the driver.
    pub(crate) fn of_driver(mut self) -> Self {
        self.leaves_values = true;
        self
    }

    /// Adds an address that the launch may write to.
    pub(crate) fn writes(&mut self, address: usize) {
        add_extent(&mut self.written, address);
    }

    /// Adds an address that the launch only reads. The memory there may hold further addresses.
    pub(crate) fn reads(&mut self, address: usize) {
        if self.stores_addresses || address_tables::exist() || !vram::is_device(address) {
            add_extent(&mut self.read, address);
        }
    }

    /// Adds the memory that another launch reaches.
    pub(crate) fn add(&mut self, other: &Self) {
        for (mine, others) in [(&mut self.written, &other.written), (&mut self.read, &other.read)] {
            for &extent in others {
                if !mine.contains(&extent) {
                    mine.push(extent);
                }
            }
        }
    }

    /// Marks the memory that the launch reaches as unknown. For a captured launch, this happens when its
    /// graph is launched. The launch then reaches the blocks that it had at the capture, and the addresses in
    /// these blocks are looked up anew.
    pub(crate) fn apply(&self) {
        let mut targets = Targets::default();
        for extent in &self.written {
            extent.forget(self.leaves_values);
        }
        for extent in self.written.iter().chain(&self.read) {
            extent.targets(&mut targets);
        }
        let held_by_kernels = held(Holder::Kernels);
        targets.add_all(&held_by_kernels);
        if self.is_library {
            targets.add_all(&held(Holder::Libraries));
        }
        // Most launches reach no addresses except their arguments, so they are done here.
        if targets.is_empty() && !self.stores_addresses {
            return;
        }
        let found_addresses = targets != held_by_kernels;
        if !forget_targets(&mut targets, &self.written, self.leaves_values) {
            return forget_everything();
        }
        // A kernel such as `arange` stores addresses only if its range starts at an address. For a range of
        // numbers, the only address among its arguments is the output's.
        let stores_addresses = self.stores_addresses && self.written.len() + self.read.len() > 1;
        if stores_addresses {
            for extent in self.written.iter().chain(&self.read) {
                let (Extent::Device { start, .. } | Extent::Host { start, .. }) = *extent;
                targets.add(start);
            }
        }
        if stores_addresses || found_addresses && !self.only_dereferences && !self.is_library {
            for extent in &self.written {
                extent.add_table(&targets);
            }
        }
    }
}

/// Marks the blocks that contain the targets as unknown, then the blocks whose addresses these blocks hold,
/// and so on. `done` lists blocks that are already marked. Adds the addresses that are found to `targets`.
/// Returns false if any address is possible.
fn forget_targets(targets: &mut Targets, done: &[Extent], leaves_values: bool) -> bool {
    let mut done = done.to_vec();
    loop {
        let Some(addresses) = targets.addresses() else { return false };
        let mut found = Targets::default();
        for extent in addresses.iter().filter_map(|&address| Extent::containing(address)) {
            if !done.contains(&extent) {
                done.push(extent);
                extent.forget(leaves_values);
                extent.targets(&mut found);
            }
        }
        if found.is_empty() {
            return true;
        }
        let before = targets.clone();
        targets.add_all(&found);
        if *targets == before {
            return true;
        }
    }
}

/// Returns true if the kernels of the running op cannot write the block from `start` to `end`.
fn is_protected(start: usize, end: usize) -> bool {
    running_ops::is_trusted()
        && torch_blocks::number(start).is_some_and(|number| running_ops::protects(start, end, number))
}

/// Marks all memory of all devices as unknown, because a launch may have written any of it. Blocks that the
/// running op cannot write keep their values.
pub(crate) fn forget_everything() {
    let is_trusted = running_ops::is_trusted();
    for device in &host_state().devices {
        let mut values = device.values();
        let kept = if is_trusted { values.known_parts(0, usize::MAX) } else { Vec::new() };
        let kept: Vec<_> = kept
            .into_iter()
            .filter(|&(start, _)| {
                torch_blocks::find(start).is_some_and(|(start, end)| is_protected(start, end))
            })
            .map(|(start, end)| (start, end, !values.answered_parts(start, end - start).is_empty()))
            .collect();
        values.forget_all();
        for (start, end, is_answer) in kept {
            values.keep_known(start, end - start, is_answer);
        }
    }
}
