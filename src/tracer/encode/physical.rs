//! The driver's physical memory: its handles, and the addresses to which it is mapped.

use std::collections::BTreeMap;

use memtrace_trace::Api;
use memtrace_trace::memory::MemoryKind;
use rustc_hash::FxHashMap;

use crate::keys::{PHYSICAL, address};
use crate::live::Live;

/// The live handles, and the addresses to which they are mapped.
#[derive(Default)]
pub(crate) struct Physical {
    pub(crate) held: FxHashMap<u64, Held>,
    /// The size in bytes and the handle of each mapped address.
    pub(crate) mapped: BTreeMap<u64, (u64, u64)>,
    asleep: Asleep,
}

/// Segments of torch's allocator that another caller has unmapped, by address. Torch still counts these
/// segments as reserved. vLLM unmaps segments while it sleeps.
#[derive(Default)]
pub(crate) struct Asleep(BTreeMap<u64, Live>);

impl Asleep {
    /// Returns the bytes of the sleeping segments on a device.
    #[inline]
    pub(crate) fn bytes(&self, device: i8) -> i64 {
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
pub(crate) struct Held {
    /// The number of holders of the handle plus the number of mappings.
    pub(crate) references: u32,
    pub(crate) device: i8,
    /// True if torch's allocator created the handle. Such memory gets its rows when it is mapped, by address;
    /// other memory gets its rows when it is created, by handle.
    pub(crate) is_torchs: bool,
}

impl Physical {
    /// Restores memory that is live according to a row of a resumed trace.
    pub(crate) fn restore(&mut self, key: u64, live: &Live) {
        if live.kind == MemoryKind::Mapped {
            self.mapped.insert(key, (live.bytes as u64, 0));
        } else if key & PHYSICAL != 0 {
            let held = Held { references: 1, device: live.device, is_torchs: false };
            self.held.insert(address(key), held);
        }
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
