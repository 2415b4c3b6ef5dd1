//! Resumes a trace: the encoder reads back the rows that another encoder wrote.

use memtrace_trace::context::Context;
use memtrace_trace::memory::{DeviceTotals, Effect, Extent, LiveMemory, MemoryKind};
use memtrace_trace::text::UNKNOWN;
use memtrace_trace::{Api, Event, EventName, Row};

use crate::encoder::Encoder;
use crate::keys::{PHYSICAL, key_bit};
use crate::live::Live;
use crate::memory::Key;

impl Encoder {
    /// Restores the state after a row that is already in the file, from the row's number, totals and effect
    /// on memory.
    pub fn restore_row(&mut self, row: &Row<'_>) {
        self.emitter.set_last_seq(row.seq);
        self.definitions.forget_formulas();
        let Ok(device) = i8::try_from(row.device) else { return };
        if row.event == EventName::Lost {
            self.losses.add(row.requested_bytes.max(0) as u64);
        }
        let before = *self.memory.devices.totals_mut(device.max(Event::CPU).into());
        // A row does not say whether a free is deferred, but the totals do: a deferred block leaves the
        // allocated bytes and stays in the active bytes, so the difference of the two grows.
        let is_deferred =
            row.active_bytes.wrapping_sub(row.allocated_bytes) > before.active.wrapping_sub(before.allocated);
        if row.event == EventName::Brief {
            let phase = self.definitions.own_text(row.phase);
            self.unlisted.restore(device, row.delta_bytes, phase);
        } else if let Some((kind, effect)) = MemoryKind::changed_by(row.event) {
            self.restore_memory(device, kind, effect, is_deferred, row);
        }
        let totals = self.memory.devices.totals_mut(device.max(Event::CPU).into());
        totals.adopt(row.allocated_bytes, row.active_bytes, row.reserved_bytes);
        self.statistics.peak(device, row.allocated_bytes, row.reserved_bytes);
    }

    fn restore_memory(
        &mut self,
        device: i8,
        kind: MemoryKind,
        effect: Effect,
        is_deferred: bool,
        row: &Row<'_>,
    ) {
        let is_correction = kind == MemoryKind::Mapped && row.alloc_id == 0;
        let leaves_owner = effect == Effect::Tag && row.delta_bytes < 0;
        if is_correction || leaves_owner {
            return;
        }
        // A tag row has neither the call of the allocation nor its kind of memory.
        let is_cpu_tensor = device == Event::CPU;
        let kind = if is_cpu_tensor { MemoryKind::Host } else { kind };
        let api = if is_cpu_tensor { Some(Api::CpuAllocator) } else { Api::parse(row.api) };
        let mut address = row.addr as u64 | key_bit(api);
        // Each of these calls may have dropped the last reference to physical memory, or turned it into a
        // segment of torch.
        let is_free = matches!(row.event, EventName::ExtFree | EventName::HostFree);
        if is_free && matches!(api, Some(Api::CuMemRelease | Api::CuMemUnmap | Api::CuMemMap)) {
            address |= PHYSICAL;
        }
        let is_reported = api == Some(Api::CachingAllocator)
            || (effect == Effect::Tag && self.memory.live.block(address).is_some());
        self.caching |= is_reported;
        let key = if is_reported { Key::Block(address) } else { Key::Region(address) };
        let bytes = if effect == Effect::Free { row.delta_bytes.wrapping_neg() } else { row.delta_bytes };
        let extent = Extent { device: device.max(Event::CPU).into(), kind, in_segment: is_reported, bytes };
        match effect {
            Effect::Complete => drop(self.complete(address)),
            Effect::Free if is_reported && is_deferred => {
                if let Some(live) = self.memory.free_deferred(key, (), &extent) {
                    self.memory.live.defer(address, live);
                }
            }
            Effect::Free => {
                // Torch never unmaps a segment that contains blocks. A block at the segment's address shows
                // that another caller unmapped it.
                if kind == MemoryKind::Mapped
                    && self.memory.live.block(address).is_some()
                    && let Some(segment) = self.memory.live.region(address).copied()
                {
                    self.physical.asleep().add(address, segment);
                }
                self.memory.free(key, (), |_| extent);
                if !is_reported {
                    self.physical.forget(address);
                }
            }
            Effect::Alloc | Effect::Tag if row.alloc_id == 0 => self.memory.count(&extent),
            Effect::Alloc | Effect::Tag => {
                if kind == MemoryKind::Mapped {
                    self.physical.asleep().forget(address, address.saturating_add(1));
                }
                let live = Live {
                    alloc_id: row.alloc_id,
                    device,
                    requested: row.requested_bytes,
                    rounded: row.rounded_bytes,
                    bytes: row.delta_bytes,
                    context: self.restored_context(row),
                    category: row.category,
                    step: row.step as i32,
                    kind,
                    api: if is_reported { Some(Api::CachingAllocator) } else { api },
                    library: match self.memory.live.get(key) {
                        _ if is_reported => 0,
                        Some(before) if effect == Effect::Tag => before.library,
                        _ => self.definitions.own_text(row.source),
                    },
                    pool: row.pool as u16,
                    form: match row.dtype {
                        UNKNOWN => 0,
                        dtype => self.definitions.own_text(&format!("{dtype} {}", row.shape)),
                    },
                };
                self.physical.restore(address, &live);
                if effect == Effect::Alloc {
                    if is_reported {
                        // As in the encoder that wrote the row: its old block was complete by then.
                        self.complete(address);
                    }
                    self.memory.alloc(&extent, key, live);
                } else {
                    self.memory.live.insert(key, live);
                }
                self.add_newborn(key, &live);
            }
        }
    }

    /// Returns the id of the context of a row. The encoder assigns this id itself, because rows do not
    /// contain the ids of the process.
    fn restored_context(&mut self, row: &Row<'_>) -> u32 {
        let context = Context {
            op: self.definitions.own_text(row.op),
            module: self.definitions.own_text(row.module),
            phase: self.definitions.own_text(row.phase),
            stack: row.stack_id as u32,
            stream: row.stream,
            ..Context::default()
        };
        self.definitions.own_context(context)
    }
}
