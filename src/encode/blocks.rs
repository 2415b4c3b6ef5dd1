//! The caching allocator's reports: blocks, their owners, and what the allocator holds.

use memtrace_trace::{Api, Category, Event, EventName, Row};

use crate::encoder::{Encoder, LIBRARY, RowSink, TORCH_ALLOCATOR};
use crate::live::{Live, MemoryKind, OutOfMemory};

impl Encoder {
    pub(crate) fn block<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.caching = true;
        self.reconcile(tid, event, sink)?;
        // An address that is handed out again was freed, and that report was lost.
        if event.size >= 0
            && let Some(missed) = self.blocks.remove(&event.addr)
        {
            self.anomalies.missed_frees += 1;
            let totals = self.device(missed.device);
            totals.allocated -= missed.bytes;
            totals.active -= missed.bytes;
            self.freed(tid, event, &missed, sink)?;
        }
        let totals = self.device(event.device);
        // What other reports that were lost did to the total.
        let gap = (event.allocated as i64).wrapping_sub(totals.allocated).wrapping_sub(event.size);
        let deferred = event.flags & Event::DEFERRED != 0;
        totals.active = totals.active.wrapping_add(gap).wrapping_add(if deferred { 0 } else { event.size });
        totals.allocated = event.allocated as i64;
        self.anomalies.gaps += u64::from(gap != 0);
        self.statistics.peak(event.device, event.allocated as i64, event.reserved as i64);
        let unknown = Live {
            alloc_id: 0,
            device: event.device,
            requested: event.extra,
            rounded: match event.extra {
                requested @ 0.. => self.rounding.round(requested as u64) as i64,
                _ => event.size.abs(),
            },
            bytes: event.size.abs(),
            context: event.context,
            category: Category::None,
            step: event.step,
            what: MemoryKind::Block,
            api: event.api,
            source: 0,
            pool: event.source,
        };
        if event.size >= 0 {
            self.statistics.block(event.size);
            let category = self.category_at_birth(event.context);
            let live = Live { alloc_id: self.next_seq(), category, ..unknown };
            // An address that is handed out again is in use by no stream.
            if let Some(deferred) = self.deferred.remove(&event.addr) {
                self.device(event.device).active -= deferred.bytes;
            }
            self.blocks.insert(event.addr, live);
            self.allocated(tid, event, &live, sink)
        } else {
            let live = self.blocks.remove(&event.addr);
            self.anomalies.unmatched_frees += u64::from(live.is_none());
            // The report's size is the truth; what was remembered only names the owner.
            let live = Live { bytes: unknown.bytes, ..live.unwrap_or(unknown) };
            if deferred {
                self.deferred.insert(event.addr, live);
            }
            self.freed(tid, event, &live, sink)
        }
    }

    /// The last stream that used a freed block is done with it: now it can be handed out again.
    pub(crate) fn free_completed<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let Some(live) = self.deferred.remove(&event.addr) else {
            self.anomalies.unmatched_frees += 1;
            return Ok(());
        };
        self.device(live.device).active -= live.bytes;
        self.emit(
            &Row {
                event: EventName::FreeCompleted,
                api: Api::CachingAllocator.name(),
                source: TORCH_ALLOCATOR,
                alloc_id: live.alloc_id,
                delta_bytes: -live.bytes,
                latency_ns: 0,
                ..self.of_live(tid, event, &live)
            },
            sink,
        )
    }

    /// A block's bytes leave one owner and enter another, in two rows; totals stay.
    pub(crate) fn tag<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        let category = u64::try_from(event.size).ok().and_then(Category::from_id).unwrap_or_default();
        let map = if self.blocks.contains_key(&event.addr) { &self.blocks } else { &self.regions };
        let Some(before) = map.get(&event.addr).copied().filter(|live| live.what == MemoryKind::Block) else {
            return Ok(());
        };
        let mut context = self.context(before.context);
        if event.extra > 0 {
            context.module = event.extra as u32;
        }
        // What was given to the model may be something that is known better already.
        let weaker = category == Category::Input && before.category != Category::None;
        let same =
            before.category == category && self.text(context.module) == self.owner(before.context).module;
        if weaker || same {
            return Ok(());
        }
        if category == Category::Input && context.phase == 0 {
            // The script made or moved it, outside of everything that has a phase.
            context.phase = self.own_names.number("dataloader");
        }
        let context = self.own_names.id(context);
        let after = Live { category, context, ..before };
        for (live, bytes) in [(before, -before.bytes), (after, before.bytes)] {
            self.emit(
                &Row {
                    event: EventName::Tag,
                    delta_bytes: bytes,
                    source: LIBRARY,
                    latency_ns: 0,
                    name: self.text(event.reserved as u32),
                    ..self.of_live(tid, event, &live)
                },
                sink,
            )?;
        }
        let map = if self.blocks.contains_key(&event.addr) { &mut self.blocks } else { &mut self.regions };
        map.insert(event.addr, after);
        Ok(())
    }

    pub(crate) fn op<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        self.emit(
            &Row {
                event: EventName::Op,
                source: LIBRARY,
                delta_bytes: event.size,
                latency_ns: event.extra,
                name: self.text(event.reserved as u32),
                ..self.base(tid, event, event.device, event.context)
            },
            sink,
        )
    }

    /// A report carries the allocator's own total of segments. Where calls went unseen (expandable
    /// segments, a pool with an allocator of its own) a row makes up the difference.
    pub(crate) fn reconcile<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let totals = self.device(event.device);
        let delta = event.reserved as i64 - totals.reserved;
        if delta == 0 {
            return Ok(());
        }
        totals.reserved = event.reserved as i64;
        self.anomalies.corrections += 1;
        let what = if delta > 0 { EventName::SegmentMap } else { EventName::SegmentUnmap };
        self.emit(
            &Row {
                event: what,
                status: 0,
                api: Api::Reconciled.name(),
                source: TORCH_ALLOCATOR,
                delta_bytes: delta,
                ..self.base(tid, event, event.device, event.context)
            },
            sink,
        )
    }

    pub(crate) fn out_of_memory<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.reconcile(tid, event, sink)?;
        self.oom = Some(OutOfMemory { device: event.device, bytes: event.size, context: event.context });
        self.statistics.ooms += 1;
        self.emit(
            &Row {
                event: EventName::Oom,
                // cudaErrorMemoryAllocation: what torch would have returned, had it a status.
                status: 2,
                source: TORCH_ALLOCATOR,
                requested_bytes: event.extra,
                rounded_bytes: event.size,
                ..self.base(tid, event, event.device, event.context)
            },
            sink,
        )
    }
}
