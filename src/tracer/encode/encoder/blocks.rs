//! Encodes the caching allocator's reports of blocks and OOMs, and the rows of ops.

use memtrace_trace::columns::TextKeys;
use memtrace_trace::event::{Block, OpEnd};
use memtrace_trace::form::Form;
use memtrace_trace::memory::Effect;
use memtrace_trace::text::TORCH_ALLOCATOR;
use memtrace_trace::{Api, EventName, Header, Row};

use crate::emitter::{LIBRARY, RowSink, call_key};
use crate::encoder::Encoder;
use crate::live::{BlockSize, FailedRequest, Live, OutOfMemory};
use crate::memory::Key;

impl Encoder {
    #[inline(always)]
    pub(crate) fn block<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        block: &Block,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let Block { address, bytes, allocated, reserved, requested, pool, deferred, form } = *block;
        self.caching = true;
        self.reconcile(tid, header, reserved, pool, sink)?;
        let size = BlockSize { bytes, requested, rounded: self.rounded(requested, bytes) };
        let unknown = Live::reported(header, size, pool);
        // Each branch writes its row itself: the compiler then knows the event, and copies no block.
        if bytes >= 0 {
            let born = self.prepare_allocation(tid, header, address, &unknown, sink)?;
            let live = Live { alloc_id: self.next_seq(), form: form.into(), ..born };
            let alloc_id = match self.memory.alloc(&live.extent(), Key::Block(address), live) {
                None => live.alloc_id,
                Some(missed) => self.alloc_after_missed(tid, header, address, &missed, &live, sink)?,
            };
            let live = Live { alloc_id, ..live };
            self.add_newborn(Key::Block(address), &live);
            self.correct(header.device, allocated, reserved);
            return self.write_block_row(tid, header, address, &live, Effect::Alloc, sink);
        }
        // The size comes from the report, because the encoder may not know the block. The other values
        // come from the allocation, if it is known.
        let extent = unknown.extent();
        let live = if deferred {
            self.memory.free_deferred(Key::Block(address), (), &extent)
        } else {
            self.memory.free(Key::Block(address), (), |_| extent)
        };
        if live.is_none() && !deferred && self.unlisted.take_restored(header.device, extent.bytes) {
            self.memory.count(&extent);
            return self.brief_row(header, -extent.bytes, "", sink);
        }
        self.anomalies.unmatched_frees += u64::from(live.is_none());
        let live = Live { bytes: unknown.bytes, ..live.unwrap_or(unknown) };
        if deferred {
            self.memory.live.defer(address, live);
        }
        self.correct(header.device, allocated, reserved);
        self.write_block_row(tid, header, address, &live, Effect::Free, sink)
    }

    /// Processes what the allocation of a block ends: the use of a deferred block at its address, and the wait of the
    /// blocks that an optimizer step left. Returns the block with its category and private pool.
    #[inline(always)]
    pub(crate) fn prepare_allocation<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        address: u64,
        block: &Live,
        sink: &mut S,
    ) -> Result<Live, S::Error> {
        self.statistics.block(block.bytes);
        self.keep_survivors(tid, header, sink)?;
        // An address is handed out again only after the last stream has finished with its old block. If the
        // report of that was lost, the old block is completed here.
        self.complete(address);
        // When the device is full, torch takes a block from a pool with `use_on_oom` without asking whether the
        // allocation belongs to it.
        let pool = if block.pool == 0 { self.memory.live.pool_at(address) } else { block.pool };
        Ok(Live { category: self.category_at_allocation(block.context, pool), pool, ..*block })
    }

    /// Returns the requested bytes after rounding; the size of the block if the request is unknown.
    #[inline(always)]
    pub(crate) fn rounded(&self, requested: i64, bytes: i64) -> i64 {
        match requested {
            requested @ 0.. => self.rounding.round(requested as u64) as i64,
            _ => bytes.abs(),
        }
    }

    /// Frees the block that `live` has just replaced, and adds `live` again. Returns its new id, because the row of the
    /// free comes first.
    #[cold]
    fn alloc_after_missed<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        address: u64,
        missed: &Live,
        live: &Live,
        sink: &mut S,
    ) -> Result<i64, S::Error> {
        let (key, extent) = (Key::Block(address), live.extent());
        self.memory.free(key, (), |_| extent);
        self.free_missed(tid, header, address, missed, sink)?;
        let alloc_id = self.next_seq();
        self.memory.alloc(&extent, key, Live { alloc_id, ..*live });
        Ok(alloc_id)
    }

    /// Frees the block at an address that the allocator has handed out again. The report of its free was
    /// lost.
    #[cold]
    pub(crate) fn free_missed<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        address: u64,
        missed: &Live,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.anomalies.missed_frees += 1;
        self.memory.free(Key::Block(address), (), |_| missed.extent());
        self.write_block_row(tid, header, address, missed, Effect::Free, sink)
    }

    /// Sets the allocated bytes of a device to the total that torch's allocator reports, less the blocks
    /// that no row contains yet, and raises the device's peaks.
    #[inline(always)]
    pub(crate) fn correct(&mut self, device: i8, allocated: usize, reserved: usize) {
        // A difference means that other reports were lost.
        let written = (allocated as i64).wrapping_sub(self.unlisted.hidden(device));
        let gap = self.memory.correct_allocated(device.max(0).into(), written);
        if gap != 0 {
            self.anomalies.gaps += 1;
        }
        self.statistics.peak(device, allocated as i64, reserved as i64);
    }

    /// Removes the deferred block at `address`, which no stream uses any more, and subtracts it from the
    /// active bytes. Returns the block, or `None` if no deferred block has this address.
    #[inline]
    pub(crate) fn complete(&mut self, address: u64) -> Option<Live> {
        let live = self.memory.live.take_deferred(address)?;
        self.memory.complete(live.extent().device, live.bytes);
        Some(live)
    }

    /// Writes the row that completes a deferred free: the last stream has finished with the block, so the
    /// allocator can reuse it.
    pub(crate) fn free_completed<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        address: u64,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let Some(live) = self.complete(address) else {
            self.anomalies.unmatched_frees += 1;
            return Ok(());
        };
        self.emit(
            &Row {
                event: EventName::FreeCompleted,
                api: Api::CachingAllocator.as_str(),
                source: TORCH_ALLOCATOR,
                delta_bytes: -live.bytes,
                ..self.live_row(tid, header, address, &live)
            },
            sink,
        )
    }

    /// Writes the row of an op that ended.
    pub(crate) fn op<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        op: &OpEnd,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let base = self.numbers(tid, header);
        let call = call_key(EventName::Op, header.api, false);
        // An op has no tensor, so the form is unknown.
        let keys = TextKeys { call, form: self.definitions.key(0), ..base.keys };
        let row = Row {
            event: EventName::Op,
            source: LIBRARY,
            delta_bytes: op.bytes,
            latency_ns: op.duration_ns as i64,
            name: self.definitions.text(op.overload),
            keys,
            ..base
        };
        self.emitter.emit_keyed(row, |row| self.with_owner(row, header.api, header.context), sink)
    }

    /// Compares the encoder's total of segments with the allocator's own total, which each report contains
    /// and which includes sleeping segments. If the totals differ because calls were missed (expandable
    /// segments, a pool with its own allocator), a row adds the difference.
    #[inline(always)]
    pub(crate) fn reconcile<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        reserved: usize,
        pool: u16,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let device = header.device.max(0);
        let mapped = (reserved as i64).saturating_sub(self.physical.asleep().bytes(device)).max(0);
        match self.memory.correct_reserved(device.into(), mapped) {
            0 => Ok(()),
            delta => self.reconciled(tid, header, delta, pool, sink),
        }
    }

    #[cold]
    fn reconciled<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        delta: i64,
        pool: u16,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.anomalies.corrections += 1;
        let event = if delta > 0 { EventName::SegmentMap } else { EventName::SegmentUnmap };
        self.emit(
            &Row {
                event,
                api: Api::Reconciled.as_str(),
                source: TORCH_ALLOCATOR,
                delta_bytes: delta,
                pool: i64::from(pool),
                ..self.base(tid, header)
            },
            sink,
        )
    }

    /// Writes the row of a request for which torch's allocator found no memory.
    pub(crate) fn out_of_memory<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        request: &FailedRequest,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let FailedRequest { bytes, requested, pool, form } = *request;
        self.oom = Some(OutOfMemory {
            device: header.device,
            bytes,
            context: header.context,
            form,
            is_granted: header.api == Some(Api::PastOom),
        });
        self.statistics.ooms += 1;
        let Form { dtype, shape } = self.definitions.form(form);
        self.emit(
            &Row {
                event: EventName::Oom,
                // cudaErrorMemoryAllocation, the status of the failed call, which the report does not
                // contain.
                status: 2,
                source: TORCH_ALLOCATOR,
                requested_bytes: requested,
                rounded_bytes: bytes,
                pool: i64::from(pool),
                dtype,
                shape,
                ..self.base(tid, header)
            },
            sink,
        )
    }
}
