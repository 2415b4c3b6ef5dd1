//! Encodes the calls of the CUDA runtime and driver: segments, memory outside torch's allocator, and host
//! memory. If torch's allocator reports no blocks, each of its calls counts as a block instead of a segment.

use memtrace_trace::event::{AllocCall, Call};
use memtrace_trace::memory::{LiveMemory, MemoryKind};
use memtrace_trace::{Api, Category, Event, Header};

use crate::emitter::RowSink;
use crate::encoder::Encoder;
use crate::keys::key_bit;
use crate::live::Live;
use crate::memory::Key;
use crate::physical::is_virtual_memory;

/// A call and the thread that made it.
#[derive(Clone, Copy)]
pub(crate) struct CallEvent {
    pub(crate) tid: u32,
    pub(crate) header: Header,
    pub(crate) call: Call,
    /// True if the memory is on the host: pinned memory or a CPU tensor.
    pub(crate) on_host: bool,
}

impl CallEvent {
    pub(crate) fn has_failed(&self) -> bool {
        self.call.status != 0
    }

    /// Returns the key of the region. A CPU tensor may be registered as pinned memory at its own address, so
    /// the two have different keys.
    fn key(&self) -> u64 {
        self.call.address | key_bit(self.header.api)
    }
}

impl Encoder {
    /// Encodes an allocation of device memory, or of pinned host memory if `event.on_host` is true.
    pub(crate) fn dispatch_alloc_call<S: RowSink>(
        &mut self,
        event: &CallEvent,
        alloc: &AllocCall,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        match is_virtual_memory(event.header.api) {
            true => self.encode_virtual_alloc(event, alloc, sink),
            false => self.encode_alloc_call(event, alloc, sink),
        }
    }

    /// Encodes a free of device memory.
    pub(crate) fn dispatch_free_call<S: RowSink>(
        &mut self,
        event: &CallEvent,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        match is_virtual_memory(event.header.api) {
            true => self.encode_virtual_free(event, sink),
            false => self.encode_free_call(event, sink),
        }
    }

    /// Encodes an allocation on a device or on the host.
    pub(crate) fn encode_alloc_call<S: RowSink>(
        &mut self,
        event: &CallEvent,
        alloc: &AllocCall,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.count_call(event);
        let CallEvent { header, call, .. } = *event;
        let kind = self.kind_of_call(event);
        let given = call.status == 0 && call.address != 0;
        let live = Live {
            alloc_id: 0,
            device: header.device,
            requested: alloc.requested,
            rounded: call.bytes,
            bytes: if given { call.bytes } else { 0 },
            context: header.context,
            category: if kind == MemoryKind::Block || header.device == Event::CPU {
                self.category_at_allocation(header.context, 0)
            } else {
                Category::None
            },
            step: header.step,
            kind,
            api: header.api,
            library: call.library,
            pool: call.pool,
            form: 0,
        };
        if !given {
            return self.write_call_row(event, &live, sink);
        }
        if kind == MemoryKind::Block {
            self.statistics.block(live.bytes);
        }
        // The address of a live region was allocated again, so its free was missed. Regions of 0 bytes are not
        // counted as an anomaly: memory of another process or of a graph may be freed without a call for its
        // own address.
        if let Some(missed) = self.memory.live.region(event.key()).copied() {
            self.anomalies.missed_frees += u64::from(missed.bytes > 0);
            self.memory.free(Key::Region(event.key()), (), |_| missed.extent());
            self.note_peak(missed.device);
            self.write_call_free_row(event, &missed, sink)?;
        }
        if live.is_cpu_tensor() {
            self.keep_survivors(event.tid, &header, sink)?;
        }
        // The number of the row of this allocation, after the rows above.
        let live = Live { alloc_id: self.next_seq(), ..live };
        self.memory.alloc(&live.extent(), Key::Region(event.key()), live);
        if live.is_cpu_tensor() {
            self.add_newborn(Key::Region(event.key()), &live);
        }
        self.note_peak(live.device);
        self.write_call_row(event, &live, sink)
    }

    /// Encodes a free on a device or on the host.
    pub(crate) fn encode_free_call<S: RowSink>(
        &mut self,
        event: &CallEvent,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        // A CPU tensor may be older than the trace, so the free of an unknown tensor is ignored.
        if event.header.api == Some(Api::CpuAllocator)
            && (event.has_failed() || self.memory.live.region(event.key()).is_none())
        {
            return Ok(());
        }
        self.count_call(event);
        self.free_region(event.key(), event, sink)
    }

    /// Frees the region with this key. Does not count the call, which may free several regions or none.
    pub(crate) fn free_region<S: RowSink>(
        &mut self,
        key: u64,
        event: &CallEvent,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let CallEvent { header, call, .. } = *event;
        let live = if call.status == 0 { self.memory.live.remove(Key::Region(key), ()) } else { None };
        self.anomalies.unmatched_frees += u64::from(call.status == 0 && live.is_none());
        let live = live.unwrap_or(Live {
            alloc_id: 0,
            device: if event.on_host { header.device } else { header.device.max(0) },
            requested: -1,
            rounded: 0,
            bytes: 0,
            context: header.context,
            category: Category::None,
            step: header.step,
            kind: self.kind_of_call(event),
            api: header.api,
            library: call.library,
            pool: call.pool,
            form: 0,
        });
        self.memory.count(&live.extent().freed());
        self.note_peak(live.device);
        self.write_call_free_row(event, &live, sink)
    }

    /// Adds the latency and the outcome of a call to the statistics of its API, for the exit summary.
    pub(crate) fn count_call(&mut self, event: &CallEvent) {
        self.statistics.call(event.header.api, event.call.latency_ns, event.has_failed());
    }

    /// Returns the kind of memory of a call. The kind depends on the function, on its caller, and on whether
    /// torch's allocator reports blocks.
    fn kind_of_call(&self, event: &CallEvent) -> MemoryKind {
        let api = event.header.api;
        if event.on_host {
            MemoryKind::Host
        } else if !event.call.from_torch_allocator {
            MemoryKind::External
        } else if event.call.unreported {
            MemoryKind::Block
        } else if api.is_some_and(Api::is_import) {
            // Memory that torch's allocator imports from another process is not part of its own segments.
            MemoryKind::External
        } else if is_virtual_memory(api) {
            MemoryKind::Mapped
        } else if self.caching {
            MemoryKind::Segment
        } else {
            MemoryKind::Block
        }
    }
}
