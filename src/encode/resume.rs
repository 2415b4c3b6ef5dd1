//! A trace that is continued: what its rows say, taken in by an encoder that did not write them.

use memtrace_trace::context::Context;
use memtrace_trace::{Api, EventName, Row};

use crate::encoder::Encoder;
use crate::keys::{PHYSICAL, key_bit};
use crate::live::{Live, MemoryKind};

impl Encoder {
    /// Takes a row that is in the file already: what it did to the memory, and its number.
    pub fn restore_row(&mut self, row: &Row<'_>) {
        self.seq.set(row.seq);
        let Ok(device) = i8::try_from(row.device) else { return };
        let api = Api::parse(row.api);
        if device >= 0 {
            let totals = self.device(device);
            (totals.allocated, totals.active) = (row.allocated_bytes, row.active_bytes);
            totals.reserved = row.reserved_bytes;
            self.statistics.peak(device, row.allocated_bytes, row.reserved_bytes);
        } else {
            self.pinned = row.allocated_bytes;
        }
        let what = match row.event {
            EventName::Tag if row.delta_bytes < 0 => return,
            EventName::Alloc
            | EventName::Free
            | EventName::Live
            | EventName::FreeCompleted
            | EventName::Tag => MemoryKind::Block,
            EventName::SegmentAlloc | EventName::SegmentFree => MemoryKind::Segment,
            // What made up a difference has no address.
            EventName::SegmentMap | EventName::SegmentUnmap if row.alloc_id != 0 => MemoryKind::Mapped,
            EventName::ExtAlloc | EventName::ExtFree => MemoryKind::External,
            EventName::HostAlloc | EventName::HostFree => MemoryKind::Host,
            EventName::Lost => {
                self.told_lost += row.requested_bytes.max(0) as u64;
                return;
            }
            _ => return,
        };
        if what == MemoryKind::External {
            self.device(device).external += row.delta_bytes;
        }
        let mut addr = row.addr as u64 | key_bit(api);
        // The last holder of physical memory may have let go of it by any of these calls.
        let is_free = matches!(row.event, EventName::ExtFree | EventName::HostFree);
        if is_free && matches!(api, Some(Api::CuMemRelease | Api::CuMemUnmap)) {
            addr |= PHYSICAL;
        }
        let is_report = row.api == Api::CachingAllocator.name()
            || (row.event == EventName::Tag && self.blocks.contains_key(&addr));
        self.caching |= is_report;
        match row.event {
            EventName::FreeCompleted => {
                self.deferred.remove(&addr);
            }
            EventName::Free if is_report => {
                let live = self.blocks.remove(&addr);
                // By the file alone: had the block been given up by its streams, active would have fallen.
                if let Some(live) = live.filter(|_| row.active_bytes > row.allocated_bytes) {
                    self.deferred.insert(addr, live);
                }
            }
            EventName::Free
            | EventName::SegmentFree
            | EventName::SegmentUnmap
            | EventName::ExtFree
            | EventName::HostFree => {
                self.regions.remove(&addr);
                self.physical.forget(addr);
            }
            _ if row.alloc_id == 0 => {}
            _ => {
                let context = self.restored_context(row);
                let live = Live {
                    alloc_id: row.alloc_id,
                    device,
                    requested: row.requested_bytes,
                    rounded: row.rounded_bytes,
                    bytes: row.delta_bytes,
                    context,
                    category: row.category,
                    step: row.step as i32,
                    what,
                    api,
                    library: if is_report { 0 } else { self.own_names.text(row.source) },
                    pool: row.pool as u16,
                };
                self.physical.restore(addr, &live);
                let map = if is_report { &mut self.blocks } else { &mut self.regions };
                map.insert(addr, live);
            }
        }
    }

    /// A context of the file's own texts, numbered apart from those of the process.
    fn restored_context(&mut self, row: &Row<'_>) -> u32 {
        let context = Context {
            op: self.own_names.text(row.op),
            module: self.own_names.text(row.module),
            phase: self.own_names.text(row.phase),
            stack: row.stack_id as u32,
            stream: row.stream,
            flags: 0,
        };
        self.own_names.id(context)
    }
}
