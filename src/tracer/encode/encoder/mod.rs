//! The encoder converts events to rows. The encoder also tracks live memory, totals and owners, and numbers
//! the rows.
//!
//! The encoder receives the events of all threads in the order of their timestamps. Its fields are private to
//! this folder, which has a file for each family of events.

mod blocks;
mod brief;
mod calls;
mod io;
pub mod lost;
mod opening;
mod resume;
mod rows;
mod tags;
mod virtual_memory;

use memtrace_trace::end_row::Anomalies;
use memtrace_trace::event::UNREPORTED_TOTAL;
use memtrace_trace::ledger::{Accounted, Rest};
use memtrace_trace::memory::{MemoryKind, Totals};
use memtrace_trace::rounding::Rounding;
use memtrace_trace::sample::Sample;
use memtrace_trace::{Api, Event, EventName, Payload};

use crate::definitions::{Definitions, RangeName};
use crate::emitter::{Emitter, RowSink};
use crate::keys::{PHYSICAL, address};
use crate::live::{FailedRequest, Live, OutOfMemory};
use crate::losses::Losses;
use crate::memory::Memory;
use crate::physical::Physical;
use crate::samples::Samples;
use crate::statistics::Statistics;
use crate::unlisted::UnlistedBlocks;

pub use self::brief::BriefPlan;
pub use self::rows::RowPosition;

use self::calls::CallEvent;
use self::tags::{Newborn, Use};

/// Converts events to rows.
pub struct Encoder {
    emitter: Emitter,
    losses: Losses,
    rounding: Rounding,
    /// True if torch's allocator reports blocks. If not, each of its calls counts as a block.
    caching: bool,
    /// False if the run records no modules and no tags (`MEMTRACE_MODULES=0`). A block then keeps its first
    /// category.
    tags: bool,
    /// The texts, contexts and stacks of the ids in events.
    definitions: Definitions,
    memory: Memory,
    physical: Physical,
    samples: Samples,
    newborn: Newborn,
    unlisted: UnlistedBlocks,
    oom: Option<OutOfMemory>,
    /// The number of contradictions between events, by kind.
    anomalies: Anomalies,
    /// Counts, sizes and latencies for the exit summary.
    statistics: Statistics,
}

impl Encoder {
    /// Creates an encoder whose row times count from `start_ns`. `caching` is true if torch's allocator
    /// reports blocks.
    #[must_use]
    pub fn new(start_ns: u64, rank: i32, pid: u32, rounding: Rounding, caching: bool) -> Encoder {
        Encoder {
            emitter: Emitter::new(start_ns, rank, pid),
            losses: Losses::default(),
            rounding,
            caching,
            tags: true,
            definitions: Definitions::default(),
            memory: Memory::default(),
            physical: Physical::default(),
            samples: Samples::default(),
            newborn: Newborn::default(),
            unlisted: UnlistedBlocks::default(),
            oom: None,
            anomalies: Anomalies::default(),
            statistics: Statistics::default(),
        }
    }

    /// Sets whether the run records modules and tags, as it does by default. If not (`MEMTRACE_MODULES=0`), a
    /// block keeps its first category.
    pub fn set_tags(&mut self, tags: bool) {
        self.tags = tags;
    }

    /// Sets the size of the event buffer, for the rows of lost events. It is unknown by default.
    pub fn set_buffer_bytes(&mut self, bytes: u64) {
        self.losses.set_buffer_bytes(bytes);
    }

    /// Returns the texts, contexts and stacks of the ids in events.
    #[must_use]
    pub fn definitions(&self) -> &Definitions {
        &self.definitions
    }

    /// Returns the texts, contexts and stacks of the ids in events, to add some.
    pub fn definitions_mut(&mut self) -> &mut Definitions {
        &mut self.definitions
    }

    /// Returns the counts, sizes and latencies for the exit summary.
    #[must_use]
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// Encodes an event of thread `tid` as rows.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn encode<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        // Fast path, because most events are reports and ops.
        if let Some((header, block)) = event.unpack_block() {
            return self.block(tid, &header, &block, sink);
        }
        if let Some((header, op)) = event.unpack_op() {
            return self.op(tid, &header, &op, sink);
        }
        let Some((header, payload)) = event.unpack() else { return Ok(()) };
        let call = |call, on_host| CallEvent { tid, header, call, on_host };
        let header = &header;
        match payload {
            Payload::OutOfMemory { bytes, requested, reserved, pool, form, .. } => {
                if reserved != UNREPORTED_TOTAL {
                    self.reconcile(tid, header, reserved, pool, sink)?;
                }
                let request = FailedRequest { bytes, requested, pool, form: form.into() };
                self.out_of_memory(tid, header, &request, sink)
            }
            Payload::DeviceAlloc(alloc) => self.dispatch_alloc_call(&call(alloc.call, false), &alloc, sink),
            Payload::DeviceFree(free) => self.dispatch_free_call(&call(free, false), sink),
            Payload::HostAlloc(alloc) => self.dispatch_alloc_call(&call(alloc.call, true), &alloc, sink),
            Payload::HostFree(free) => self.encode_free_call(&call(free, true), sink),
            Payload::FreeCompleted { address } => self.free_completed(tid, header, address, sink),
            Payload::RangeBegin { name, class } => {
                self.named(EventName::RangeBegin, tid, header, RangeName { name, class }, sink)
            }
            Payload::RangeEnd { name } => {
                self.named(EventName::RangeEnd, tid, header, RangeName { name, class: 0 }, sink)
            }
            Payload::Mark { name } => self.mark(tid, header, name, sink),
            Payload::Tag { address, category, module, name, form, claim } => {
                self.tag(tid, header, address, Use { category, module, name, form, claim }, sink)
            }
            Payload::Io { address, bytes, rounded } => self.io(tid, header, address, bytes, rounded, sink),
            Payload::Sample { .. } | Payload::SampleUnified { .. } | Payload::SamplePools { .. } => {
                match payload.sample() {
                    Some(sample) => self.sample(tid, header, sample, sink),
                    None => Ok(()),
                }
            }
            Payload::HostSample { values, what } => self.host_sample(tid, header, values, what, sink),
            Payload::Lost { events } => self.lost(header.clock_ns, tid, events, sink),
            // Encoded above.
            Payload::Block(_) | Payload::Op(_) => Ok(()),
            Payload::Pad
            | Payload::DefineText { .. }
            | Payload::DefineContext { .. }
            | Payload::DefineStack { .. } => Ok(()),
        }
    }

    /// Returns the last OOM that was encoded since the previous call, if any.
    pub fn take_oom(&mut self) -> Option<OutOfMemory> {
        self.oom.take()
    }

    /// Returns the live memory, without deferred blocks.
    pub fn live(&self) -> impl Iterator<Item = &Live> {
        self.memory.live.blocks().chain(self.memory.live.regions()).map(|(_, live)| live)
    }

    /// Returns the memory that traced calls allocated, each region with its start address. Excludes blocks
    /// inside segments, and physical memory, which has no address.
    pub fn regions(&self) -> impl Iterator<Item = (u64, &Live)> {
        let regions = self.memory.live.regions();
        regions.filter(|(key, _)| key & PHYSICAL == 0).map(|(key, live)| (address(key), live))
    }

    /// Returns the totals of a device; all zero if it was never used.
    #[inline(always)]
    #[must_use]
    pub fn totals(&self, device: i8) -> Totals {
        self.memory.devices.totals(device)
    }

    /// Returns the last known value of each field of a sample of a device. All values are unknown before the
    /// first sample.
    #[must_use]
    pub fn sampled(&self, device: i8) -> Sample {
        self.samples.known(device)
    }

    /// Returns the memory on a device that calls and reports account for, and the unexplained rest at the
    /// last sample.
    #[must_use]
    pub fn ledger(&self, device: i8) -> (Accounted, Rest) {
        let totals = self.totals(device);
        let is_managed = |api: Option<Api>| api.is_some_and(Api::is_managed);
        let managed: i64 = self
            .memory
            .live
            .regions()
            .map(|(_, live)| live)
            .filter(|live| live.device == device && live.kind == MemoryKind::External && is_managed(live.api))
            .map(|live| live.bytes)
            .sum();
        let accounted = Accounted { reserved: totals.reserved, outside: totals.outside - managed };
        (accounted, self.samples.rest(device))
    }

    /// Returns every device up to the highest one used, with its totals.
    pub fn devices(&self) -> impl Iterator<Item = (usize, Totals)> {
        self.memory.devices.gpus().iter().copied().enumerate()
    }

    /// Returns the number of rows so far, which is also the `seq` of the last row.
    #[must_use]
    pub fn rows(&self) -> i64 {
        self.emitter.last_seq()
    }

    /// Updates the peaks of a device from its totals after a call.
    pub(crate) fn note_peak(&mut self, device: i8) {
        let Totals { allocated, reserved, .. } = self.totals(device);
        self.statistics.peak(device, allocated, reserved);
    }
}

#[cfg(test)]
mod tests;
