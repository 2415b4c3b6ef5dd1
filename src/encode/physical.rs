//! The driver's virtual memory calls: physical memory is made, gets addresses, and is gone when nobody
//! holds it any more, be it by its handle or by an address.
//!
//! Of torch's expandable segments the pieces that have an address are told, as `segment_map` and
//! `segment_unmap`: that is what torch counts as reserved. Of others the physical memory itself is told, as
//! `ext_alloc` and `ext_free` with the handle for an address: that is what the device has less of.

use std::collections::BTreeMap;

use memtrace_trace::{Api, Event};
use rustc_hash::FxHashMap;

use crate::encoder::{Encoder, PHYSICAL, RowSink};
use crate::live::{Live, MemoryKind};

/// The handles that are held and the addresses that they have.
#[derive(Default)]
pub(crate) struct Physical {
    held: FxHashMap<u64, Held>,
    /// By address: the bytes, and the handle.
    mapped: BTreeMap<u64, (u64, u64)>,
}

struct Held {
    /// Whoever holds the handle, and each address.
    references: u32,
    device: i8,
    /// Made by torch's allocator, whose segments are told by their addresses.
    is_torchs: bool,
}

impl Physical {
    /// Takes what a row of a file that is continued says to be live.
    pub(crate) fn restore(&mut self, key: u64, live: &Live) {
        if live.what == MemoryKind::Mapped {
            self.mapped.insert(key, (live.bytes as u64, 0));
        } else if key & PHYSICAL != 0 {
            let held = Held { references: 1, device: live.device, is_torchs: false };
            self.held.insert(Encoder::address(key), held);
        }
    }

    /// What such a row says to be gone.
    pub(crate) fn forget(&mut self, key: u64) {
        if key & PHYSICAL != 0 {
            self.held.remove(&Encoder::address(key));
        } else {
            self.mapped.remove(&key);
        }
    }
}

impl Encoder {
    /// Is it one of these calls?
    pub(crate) fn is_of_virtual_memory(event: &Event) -> bool {
        matches!(
            Api::from_code(event.api),
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

    pub(crate) fn virtual_memory<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let is_torchs = event.flags & Event::FROM_TORCH_ALLOCATOR != 0;
        let worked = event.status == 0;
        match Api::from_code(event.api) {
            Some(api @ (Api::CuMemCreate | Api::CuMemImportFromShareableHandle)) => {
                let is_torchs = is_torchs && api == Api::CuMemCreate;
                if worked {
                    let held = Held { references: 1, device: event.device, is_torchs };
                    self.physical.held.insert(event.addr, held);
                }
                if !(worked && is_torchs) {
                    return self.call_alloc(tid, event, sink);
                }
            }
            Some(Api::CuMemMap) => {
                let held = self.physical.held.get_mut(&event.allocated);
                let device = held.as_ref().map_or(event.device, |held| held.device);
                // Torch also maps what another process made and shares: that is not its segment.
                let is_segment = is_torchs && held.as_ref().is_none_or(|held| held.is_torchs);
                if worked {
                    if let Some(held) = held {
                        held.references += 1;
                    }
                    self.physical.mapped.insert(event.addr, (event.size.max(0) as u64, event.allocated));
                }
                if is_segment {
                    return self.call_alloc(tid, &Event { device, ..*event }, sink);
                }
            }
            Some(Api::CuMemRetainAllocationHandle) if worked => {
                if let Some(held) = self.physical.held.get_mut(&event.addr) {
                    held.references += 1;
                }
            }
            Some(Api::CuMemUnmap) if worked => {
                let end = event.addr.saturating_add(event.size.max(0) as u64);
                while let Some((&addr, &(_, handle))) = self.physical.mapped.range(event.addr..end).next() {
                    self.physical.mapped.remove(&addr);
                    if self.regions.get(&addr).is_some_and(|live| live.what == MemoryKind::Mapped) {
                        self.give_back(tid, addr, &Event { addr, ..*event }, sink)?;
                    }
                    self.let_go(tid, handle, event, sink)?;
                }
                return Ok(());
            }
            Some(Api::CuMemRelease) if worked => return self.let_go(tid, event.addr, event, sink),
            _ => {}
        }
        self.statistics.call(event.api, event.extra, !worked);
        Ok(())
    }

    /// One holder less; with the last one the memory is gone.
    fn let_go<S: RowSink>(
        &mut self,
        tid: u32,
        handle: u64,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let Some(held) = self.physical.held.get_mut(&handle) else { return Ok(()) };
        held.references = held.references.saturating_sub(1);
        if held.references > 0 {
            return Ok(());
        }
        self.physical.held.remove(&handle);
        let key = handle | PHYSICAL;
        if !self.regions.contains_key(&key) {
            return Ok(());
        }
        self.give_back(tid, key, &Event { addr: handle, ..*event }, sink)
    }
}
