//! The calls of the runtime and of the driver: segments, memory outside torch's allocator, pinned host memory; and blocks, where
//! torch's allocator makes no reports.

use memtrace_trace::{Api, Category, Event, Kind};

use crate::encoder::{CPU_TENSOR, Encoder, PHYSICAL, RowSink};
use crate::live::{Live, MemoryKind};

/// What a call was asked for: less than it gives, where rows of a picture are padded.
fn asked(event: &Event) -> i64 {
    match event.allocated {
        asked @ 1.. if event.api != Api::CuMemMap as u8 => asked as i64,
        // A mapping has its physical memory there; calls that ask for what they give need not say so.
        _ => event.size,
    }
}

impl Encoder {
    pub(crate) fn call_alloc<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.statistics.call(event.api, event.extra, event.status != 0);
        let what = self.what_a_call_takes(event);
        let given = event.status == 0 && event.addr != 0;
        let live = Live {
            alloc_id: if given { self.next_seq() } else { 0 },
            device: event.device,
            requested: asked(event),
            rounded: event.size,
            bytes: if given { event.size } else { 0 },
            context: event.context,
            category: if what == MemoryKind::Block {
                self.category_at_birth(event.context)
            } else {
                Category::None
            },
            step: event.step,
            what,
            api: event.api,
            source: event.reserved as u32,
            pool: event.source,
        };
        if given {
            if what == MemoryKind::Block {
                self.statistics.block(live.bytes);
            }
            // An address that is given out again was freed in a way that nobody saw; one without memory of its own
            // (another process's, a graph's) may go with what it belongs to.
            if let Some(missed) = self.regions.insert(Encoder::key(event), live) {
                self.anomalies.missed_frees += u64::from(missed.bytes > 0);
                self.change(&missed, -missed.bytes);
                self.freed(tid, event, &missed, sink)?;
                self.regions.insert(Encoder::key(event), Live { alloc_id: self.next_seq(), ..live });
            }
            let live = Live { alloc_id: self.next_seq(), ..live };
            self.change(&live, live.bytes);
            return self.allocated(tid, event, &live, sink);
        }
        self.allocated(tid, event, &live, sink)
    }

    pub(crate) fn call_free<S: RowSink>(
        &mut self,
        tid: u32,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.give_back(tid, Encoder::key(event), event, sink)
    }

    /// The region of a key goes.
    pub(crate) fn give_back<S: RowSink>(
        &mut self,
        tid: u32,
        key: u64,
        event: &Event,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let live = if event.status == 0 { self.regions.remove(&key) } else { None };
        // CPU tensors may be older than the trace.
        if live.is_none() && event.api == Api::CpuAllocator as u8 {
            return Ok(());
        }
        self.statistics.call(event.api, event.extra, event.status != 0);
        self.anomalies.unmatched_frees += u64::from(event.status == 0 && live.is_none());
        let live = live.unwrap_or(Live {
            alloc_id: 0,
            device: event.device.max(if event.device == Event::HOST { Event::HOST } else { 0 }),
            requested: -1,
            rounded: 0,
            bytes: 0,
            context: event.context,
            category: Category::None,
            step: event.step,
            what: self.what_a_call_takes(event),
            api: event.api,
            source: event.reserved as u32,
            pool: event.source,
        });
        self.change(&live, -live.bytes);
        self.freed(tid, event, &live, sink)
    }

    /// The key of a region: a CPU tensor may be registered as pinned memory at its own address.
    pub(crate) fn key(event: &Event) -> u64 {
        event.addr | Api::from_code(event.api).map_or(0, Encoder::key_bit)
    }

    /// What sets a call's keys apart from addresses.
    pub(crate) fn key_bit(api: Api) -> u64 {
        match api {
            Api::CpuAllocator => CPU_TENSOR,
            Api::CuMemCreate | Api::CuMemImportFromShareableHandle => PHYSICAL,
            _ => 0,
        }
    }

    /// The address of a key.
    pub(crate) fn address(key: u64) -> u64 {
        key & !(CPU_TENSOR | PHYSICAL)
    }

    /// What the memory of a runtime call is: by who called, and by whether torch's allocator reports.
    pub(crate) fn what_a_call_takes(&self, event: &Event) -> MemoryKind {
        match event.kind() {
            Some(Kind::HostAlloc | Kind::HostFree) => MemoryKind::Host,
            _ if event.flags & Event::FROM_TORCH_ALLOCATOR == 0 => MemoryKind::External,
            _ if event.flags & Event::UNREPORTED != 0 => MemoryKind::Block,
            // Torch's allocator opens what another process sent: that is in no segment of its own.
            _ if Api::from_code(event.api).is_some_and(Api::is_import) => MemoryKind::External,
            _ if Encoder::is_of_virtual_memory(event) => MemoryKind::Mapped,
            _ if self.caching => MemoryKind::Segment,
            _ => MemoryKind::Block,
        }
    }
}
