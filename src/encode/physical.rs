//! Physical memory of the driver: its handles, and the addresses that it is mapped at.

use std::collections::BTreeMap;

use memtrace_trace::Api;
use memtrace_trace::memory::MemoryKind;
use rustc_hash::FxHashMap;

use crate::keys::{PHYSICAL, address};
use crate::live::Live;

/// The handles that are held and the addresses that they are mapped at.
#[derive(Default)]
pub(crate) struct Physical {
    pub(crate) held: FxHashMap<u64, Held>,
    /// By address: the bytes, and the handle.
    pub(crate) mapped: BTreeMap<u64, (u64, u64)>,
}

/// A handle of physical memory.
pub(crate) struct Held {
    /// The holders of the handle, and the addresses.
    pub(crate) references: u32,
    pub(crate) device: i8,
    /// Whether torch's allocator made it: its segments have rows by address.
    pub(crate) is_torchs: bool,
}

impl Physical {
    /// Restores memory that a row of a resumed trace says to be live.
    pub(crate) fn restore(&mut self, key: u64, live: &Live) {
        if live.kind == MemoryKind::Mapped {
            self.mapped.insert(key, (live.bytes as u64, 0));
        } else if key & PHYSICAL != 0 {
            let held = Held { references: 1, device: live.device, is_torchs: false };
            self.held.insert(address(key), held);
        }
    }

    /// Forgets memory that such a row says to be freed.
    pub(crate) fn forget(&mut self, key: u64) {
        if key & PHYSICAL != 0 {
            self.held.remove(&address(key));
        } else {
            self.mapped.remove(&key);
        }
    }
}

/// Whether the call is one of those of virtual memory.
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
