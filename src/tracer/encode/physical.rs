//! The driver's physical memory: its handles, and the addresses to which it is mapped.

use std::collections::BTreeMap;
use std::ops::Range;

use memtrace_trace::Api;
use memtrace_trace::memory::MemoryKind;
use rustc_hash::FxHashMap;

use crate::keys::{PHYSICAL, address};
use crate::live::Live;

/// The live handles, and the addresses to which they are mapped.
#[derive(Default)]
pub(crate) struct Physical {
    held: FxHashMap<u64, Held>,
    /// The handle of each mapped address.
    mapped: BTreeMap<u64, u64>,
    asleep: Asleep,
}

/// Segments of torch's allocator that another caller has unmapped, by address. Torch still counts these
/// segments as reserved. vLLM unmaps segments while it sleeps.
#[derive(Default)]
pub(crate) struct Asleep(BTreeMap<u64, Live>);

impl Asleep {
    /// Returns the bytes of the sleeping segments on a device.
    #[inline(always)]
    pub(crate) fn bytes(&self, device: i8) -> i64 {
        if self.0.is_empty() {
            return 0;
        }
        self.0.values().filter(|live| live.device == device).map(|live| live.bytes).sum()
    }

    pub(crate) fn add(&mut self, address: u64, live: Live) {
        self.0.insert(address, live);
    }

    /// Removes and returns the sleeping segment of `bytes` bytes at `address`, which has been mapped again.
    pub(crate) fn wake(&mut self, address: u64, bytes: i64) -> Option<Live> {
        self.0.get(&address).filter(|live| live.bytes == bytes)?;
        self.0.remove(&address)
    }

    /// Removes the segments whose addresses are in a range that torch's allocator itself has unmapped.
    pub(crate) fn forget(&mut self, start: u64, end: u64) {
        self.0.retain(|address, _| !(start..end).contains(address));
    }
}

/// A handle of physical memory.
#[derive(Clone, Copy)]
pub(crate) struct Held {
    /// The number of holders of the handle plus the number of mappings.
    references: u32,
    pub(crate) device: i8,
    /// True if torch's allocator created the handle. Such memory gets its rows when it is mapped, by address;
    /// other memory gets its rows when it is created, by handle.
    pub(crate) is_torchs: bool,
}

impl Physical {
    /// Restores memory that is live according to a row of a resumed trace.
    pub(crate) fn restore(&mut self, key: u64, live: &Live) {
        if live.kind == MemoryKind::Mapped {
            self.mapped.insert(key, 0);
        } else if key & PHYSICAL != 0 {
            self.create(address(key), live.device, false);
        }
    }

    /// Adds a handle with one holder.
    pub(crate) fn create(&mut self, handle: u64, device: i8, is_torchs: bool) {
        self.held.insert(handle, Held { references: 1, device, is_torchs });
    }

    /// Returns the memory with a handle, if it is known.
    pub(crate) fn held(&self, handle: u64) -> Option<Held> {
        self.held.get(&handle).copied()
    }

    /// Adds a holder of a handle.
    pub(crate) fn retain(&mut self, handle: u64) {
        if let Some(held) = self.held.get_mut(&handle) {
            held.references += 1;
        }
    }

    /// Adds a mapping of a handle's memory at an address.
    pub(crate) fn map(&mut self, address: u64, handle: u64) {
        self.retain(handle);
        self.mapped.insert(address, handle);
    }

    /// Removes the first mapping in a range of addresses. Returns its address and its handle.
    pub(crate) fn unmap_first(&mut self, addresses: Range<u64>) -> Option<(u64, u64)> {
        let (address, handle) = self.mapped.range(addresses).next().map(|(at, handle)| (*at, *handle))?;
        self.mapped.remove(&address);
        Some((address, handle))
    }

    /// Notes that a handle's memory is part of a segment of torch's allocator now.
    pub(crate) fn give_to_torch(&mut self, handle: u64) {
        if let Some(held) = self.held.get_mut(&handle) {
            held.is_torchs = true;
        }
    }

    /// Drops one reference to a handle. Returns true if it was the last one.
    pub(crate) fn release(&mut self, handle: u64) -> bool {
        let Some(held) = self.held.get_mut(&handle) else { return false };
        held.references = held.references.saturating_sub(1);
        let is_last = held.references == 0;
        if is_last {
            self.held.remove(&handle);
        }
        is_last
    }

    /// Returns the sleeping segments: unmapped, but not freed by torch.
    #[inline]
    pub(crate) fn asleep(&mut self) -> &mut Asleep {
        &mut self.asleep
    }

    /// Removes memory that is freed according to a row of a resumed trace.
    pub(crate) fn forget(&mut self, key: u64) {
        if key & PHYSICAL != 0 {
            self.held.remove(&address(key));
        } else {
            self.mapped.remove(&key);
        }
    }
}

/// Returns true if the call belongs to the driver's virtual memory API.
pub(crate) fn is_virtual_memory(api: Option<Api>) -> bool {
    matches!(
        api,
        Some(
            Api::CuMemCreate
                | Api::CuMemRelease
                | Api::CuMemRetainAllocationHandle
                | Api::CuMemImportFromShareableHandle
                | Api::CuMemMap
                | Api::CuMemUnmap
        )
    )
}
