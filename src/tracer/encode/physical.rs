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
    /// For each address: the bytes, and the handle.
    pub(crate) mapped: BTreeMap<u64, (u64, u64)>,
    asleep: Asleep,
}

/// Segments of torch's allocator that something else unmapped, by address: vLLM's do while it sleeps. Torch goes
/// on counting them as reserved.
#[derive(Default)]
pub(crate) struct Asleep(BTreeMap<u64, Live>);

impl Asleep {
    /// The bytes on a device.
    #[inline]
    pub(crate) fn bytes(&self, device: i8) -> i64 {
        self.0.values().filter(|live| live.device == device).map(|live| live.bytes).sum()
    }

    pub(crate) fn add(&mut self, address: u64, live: Live) {
        self.0.insert(address, live);
    }

    /// Removes and returns the sleeping segment of `bytes` bytes at `address`, which a mapping there wakes.
    pub(crate) fn wake(&mut self, address: u64, bytes: i64) -> Option<Live> {
        self.0.get(&address).filter(|live| live.bytes == bytes)?;
        self.0.remove(&address)
    }

    /// Torch's allocator gives up the segments of a range.
    pub(crate) fn forget(&mut self, start: u64, end: u64) {
        self.0.retain(|address, _| !(start..end).contains(address));
    }
}

/// A handle of physical memory.
pub(crate) struct Held {
    /// The holders of the handle, and the addresses.
    pub(crate) references: u32,
    pub(crate) device: i8,
    /// True if torch's allocator created it. Its segments have rows by address, not by handle.
    pub(crate) is_torchs: bool,
}

impl Physical {
    /// Restores memory that a row of a resumed trace records as live.
    pub(crate) fn restore(&mut self, key: u64, live: &Live) {
        if live.kind == MemoryKind::Mapped {
            self.mapped.insert(key, (live.bytes as u64, 0));
        } else if key & PHYSICAL != 0 {
            let held = Held { references: 1, device: live.device, is_torchs: false };
            self.held.insert(address(key), held);
        }
    }

    /// The segments that are unmapped and not free.
    #[inline]
    pub(crate) fn asleep(&mut self) -> &mut Asleep {
        &mut self.asleep
    }

    /// Removes memory that a row of a resumed trace frees.
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
