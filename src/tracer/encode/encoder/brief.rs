//! Brief steps: short-lived blocks have no rows of their own.
//!
//! The writer thread passes the events of a step without detail as a whole, a *window*. If the window set no
//! new peak ([`Encoder::plan_brief`]), its blocks stay *unlisted*: a `brief` row at the moment of the
//! window's peak adds the bytes of all unlisted blocks at once, and a row at the end of the window
//! subtracts what was freed. So both rows have the totals of torch's allocator. A block that outlives
//! [`LISTED_AFTER`] windows gets its own row. The contract is in docs/trace-format.md.

use std::fmt::Write;

use memtrace_trace::context::Context;
use memtrace_trace::detail::DetailMark;
use memtrace_trace::event::Block;
use memtrace_trace::memory::{Effect, Extent, MemoryKind};
use memtrace_trace::{Api, Category, Event, EventName, Header, Payload, Row};

use super::opening::LIVE;
use crate::emitter::RowSink;
use crate::encoder::Encoder;
use crate::live::{BlockSize, Live};
use crate::memory::Key;
use crate::unlisted::Unlisted;

/// An unlisted block gets its row when this number of windows have ended since the window that allocated it.
/// Gradients and batches often live from one step to the next.
const LISTED_AFTER: u64 = 2;
/// After this number of windows that were written in full because of a new peak, a new peak must exceed the
/// last one by 1/`LEAST_GROWTH`. Otherwise every step of a program that leaks would be written in full.
const STRICT_PEAKS: u32 = 1000;
const LEAST_GROWTH: i64 = 1024;

/// Where the totals of a window are highest: for each device, the index of the event.
pub struct BriefPlan {
    peaks: Vec<Option<(usize, i64)>>,
}

impl Encoder {
    /// Returns whether an event switches detail on (`Some(true)`) or off.
    #[must_use]
    pub fn switches_detail(&self, event: &Event) -> Option<bool> {
        // Fast path, because most events are reports and ops.
        if event.unpack_block().is_some() || event.unpack_op().is_some() {
            return None;
        }
        let (Header { api: Some(Api::Detail), .. }, Payload::Mark { name }) = event.unpack()? else {
            return None;
        };
        Some(self.definitions.text(name) != DetailMark::Off.as_str())
    }

    /// Decides how the events of a window are written. Returns `None` if all their blocks need rows, because
    /// memory ran out, or because a device has more allocated or reserved bytes than ever before.
    pub fn plan_brief(&mut self, events: &[(u32, Event)]) -> Option<BriefPlan> {
        let mut peaks: Vec<Option<(usize, i64)>> = Vec::new();
        let mut is_new = false;
        for (index, (_, event)) in events.iter().enumerate() {
            let Some((header, block)) = event.unpack_block() else {
                if matches!(event.unpack(), Some((_, Payload::OutOfMemory { .. }))) {
                    return None;
                }
                continue;
            };
            let device = header.device.max(0) as usize;
            if peaks.len() <= device {
                peaks.resize(device + 1, None);
            }
            let (allocated, reserved) = (block.allocated as i64, block.reserved as i64);
            if peaks[device].is_none_or(|(_, highest)| allocated > highest) {
                peaks[device] = Some((index, allocated));
            }
            let slack = i64::from(self.unlisted.full_windows() >= STRICT_PEAKS);
            let listed = self.unlisted.listed_peaks(header.device);
            let most = listed.map(|most| most + slack * (most / LEAST_GROWTH));
            is_new |= allocated > most[0] || reserved > most[1];
        }
        if is_new {
            self.unlisted.count_full_window();
            return None;
        }
        Some(BriefPlan { peaks })
    }

    /// Notes the peaks so far, which are in the file with all their blocks. Called before the first window
    /// after detailed steps, and after a window that was written in full.
    pub fn note_listed_peaks(&mut self) {
        for (device, peaks) in self.statistics.peaks().enumerate() {
            self.unlisted.note_listed_peaks(device as i8, peaks);
        }
    }

    /// Writes the rows of a window without its short-lived blocks. `ages` is true if unlisted blocks become
    /// older by this window.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn encode_brief<S: RowSink>(
        &mut self,
        events: &[(u32, Event)],
        plan: &BriefPlan,
        ages: bool,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        // A tag has no step. Its rows get the step of the window's first report, because the last reports may already
        // belong to the next step.
        let step = events.iter().find_map(|(_, event)| event.unpack_block()).map(|(header, _)| header.step);
        for (index, (tid, event)) in events.iter().enumerate() {
            if let Some((header, block)) = event.unpack_block() {
                self.brief_block(*tid, &header, &block, sink)?;
                let peak = plan.peaks.get(header.device.max(0) as usize).copied().flatten();
                if peak.is_some_and(|(at, _)| at == index) && self.unlisted.hidden(header.device) != 0 {
                    let name = self.unlisted_categories(header.device);
                    self.set_phase(&header, sink)?;
                    self.write_hidden(&header, 0, &name, sink)?;
                    self.list_deferred(&header, sink)?;
                }
                continue;
            }
            match event.unpack() {
                Some((_, Payload::FreeCompleted { address })) if self.unlisted.complete(address) => {}
                Some((header, Payload::Tag { address, category, .. }))
                    if self.unlisted.get_mut(address).is_some() =>
                {
                    match self.unlisted.get_mut(address) {
                        // The workspace of one op (cuBLASLt in torch 2.6) is freed soon.
                        Some(unlisted) if category == Category::Workspace => {
                            unlisted.live.category = category;
                        }
                        unlisted => {
                            let born = unlisted.map_or(-1, |unlisted| unlisted.live.step);
                            let header = Header { step: step.unwrap_or(born), ..header };
                            self.list_unlisted(&header, &|at, _| at == address, false, sink)?;
                            self.encode(*tid, event, sink)?;
                        }
                    }
                }
                Some((Header { api: Some(Api::ModelFact), .. }, Payload::Mark { .. })) => {
                    self.encode(*tid, event, sink)?;
                }
                Some((
                    header,
                    Payload::Mark { .. } | Payload::RangeBegin { .. } | Payload::RangeEnd { .. },
                )) => {
                    // The program measures here, so the totals must be the allocator's.
                    self.write_all_hidden(&header, sink)?;
                    self.list_deferred(&header, sink)?;
                    self.encode(*tid, event, sink)?;
                }
                _ => self.encode(*tid, event, sink)?,
            }
        }
        let Some((_, last)) = events.last() else { return Ok(()) };
        // The last reports may have the number of the next step; see the writer's window.
        let Some((header, _)) = events.iter().find_map(|(_, event)| event.unpack_block()) else {
            return Ok(());
        };
        let header = Header { clock_ns: last.clock_ns, ..header };
        let now = self.unlisted.end_window(ages);
        self.list_unlisted(&header, &|_, unlisted| ages && unlisted.window + LISTED_AFTER < now, true, sink)
    }

    /// Writes the rows of all unlisted blocks, so that the following rows can refer to them.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn list_blocks<S: RowSink>(&mut self, clock_ns: u64, sink: &mut S) -> Result<(), S::Error> {
        let step = self.unlisted.blocks().map(|unlisted| unlisted.live.step).max().unwrap_or(-1);
        let header = Header { step, ..Header::new(clock_ns, Api::CachingAllocator, 0) };
        self.list_unlisted(&header, &|_, _| true, false, sink)
    }

    /// Encodes the report of a block in a brief step.
    fn brief_block<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        block: &Block,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let Block { address, bytes, allocated, reserved, requested, pool, deferred, form } = *block;
        if bytes < 0 {
            let Some(freed) = self.unlisted.remove(address) else {
                return self.block(tid, header, block, sink);
            };
            if deferred {
                self.unlisted.defer(address, freed);
            }
            self.reconcile(tid, header, reserved, pool, sink)?;
            self.correct(header.device, allocated, reserved);
            return Ok(());
        }
        self.reconcile(tid, header, reserved, pool, sink)?;
        let size = BlockSize { bytes, requested, rounded: self.rounded(requested, bytes) };
        let reported = Live::reported(header, size, pool);
        if let Some(missed) = self.memory.live.block(address).copied() {
            self.free_missed(tid, header, address, &missed, sink)?;
        }
        let born = self.prepare_allocation(tid, header, address, &reported, sink)?;
        let is_replaced = self.unlisted.add(address, tid, Live { form: form.into(), ..born });
        // The report of the free of an unlisted block at this address was lost.
        self.anomalies.missed_frees += u64::from(is_replaced);
        self.correct(header.device, allocated, reserved);
        Ok(())
    }

    /// Gives rows to the unlisted blocks that `is_listed` selects, and to all deferred blocks. Before them, a
    /// row subtracts their bytes, so that no total is higher than the allocator's was. With `ends`, the row
    /// also states what the window has allocated.
    fn list_unlisted<S: RowSink>(
        &mut self,
        header: &Header,
        is_listed: &dyn Fn(u64, &Unlisted) -> bool,
        ends: bool,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let listed = self.unlisted.take(is_listed);
        for device in self.unlisted.devices() {
            let header = Header { device, ..*header };
            let of_device = listed.iter().filter(|(_, unlisted, deferred)| {
                *deferred && unlisted.live.extent().device == i32::from(device)
            });
            let deferred: i64 = of_device.map(|(_, unlisted, _)| unlisted.live.bytes).sum();
            // Their rows add the bytes and subtract them again. No total is negative.
            let total = self.totals(device).allocated.wrapping_add(self.unlisted.hidden(device));
            let deferred = deferred.min(total.max(0));
            let mut name = String::new();
            if ends && let (allocations @ 1.., bytes) = self.unlisted.take_allocations(device) {
                let _ = write!(name, "allocations={allocations} bytes={bytes}");
            }
            self.write_hidden(&header, deferred, &name, sink)?;
        }
        for (address, Unlisted { live, tid, .. }, deferred) in listed {
            let live = Live { alloc_id: self.next_seq(), ..live };
            let header = Header { api: Some(Api::CachingAllocator), device: live.device, ..*header };
            self.memory.alloc(&live.extent(), Key::Block(address), live);
            self.add_newborn(Key::Block(address), &live);
            // A row `live`, not `alloc`: it has the step and the owner of the allocation, which was earlier.
            let row = self.live_row(tid, &header, address, &live);
            self.emit(&Row { event: EventName::Live, delta_bytes: live.bytes, name: LIVE, ..row }, sink)?;
            if deferred {
                self.memory.free_deferred(Key::Block(address), (), &live.extent());
                self.memory.live.defer(address, live);
                self.write_block_row(tid, &header, address, &live, Effect::Free, sink)?;
            }
        }
        // The deferred blocks are no longer allocated.
        self.write_all_hidden(header, sink)
    }

    /// Gives rows to the blocks that only a stream still uses, because the totals of active bytes count them.
    fn list_deferred<S: RowSink>(&mut self, header: &Header, sink: &mut S) -> Result<(), S::Error> {
        if !self.unlisted.has_deferred() {
            return Ok(());
        }
        self.list_unlisted(header, &|_, _| false, false, sink)
    }

    /// Brings the total of each device to the allocator's.
    fn write_all_hidden<S: RowSink>(&mut self, header: &Header, sink: &mut S) -> Result<(), S::Error> {
        for device in self.unlisted.devices() {
            self.write_hidden(&Header { device, ..*header }, 0, "", sink)?;
        }
        Ok(())
    }

    /// Writes the row that brings the device's total to the allocator's, less `bytes`. Writes nothing if the
    /// total is right and the row has no text.
    fn write_hidden<S: RowSink>(
        &mut self,
        header: &Header,
        bytes: i64,
        name: &str,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let delta = self.unlisted.hidden(header.device).wrapping_sub(bytes);
        if delta == 0 && name.is_empty() { Ok(()) } else { self.brief_row(header, delta, name, sink) }
    }

    /// Moves the bytes of the device's `brief` rows to the phase of an event. All later rows of the window get
    /// this phase, so the sums by phase stay right.
    fn set_phase<S: RowSink>(&mut self, header: &Header, sink: &mut S) -> Result<(), S::Error> {
        let phase = self.definitions.context(header.context).phase;
        let (before, written) = self.unlisted.phase(header.device);
        if self.definitions.text(before) == self.definitions.text(phase) {
            return Ok(());
        }
        if written != 0 {
            self.brief_row(header, -written, "", sink)?;
        }
        self.unlisted.set_phase(header.device, phase);
        Ok(())
    }

    /// Writes a `brief` row.
    pub(crate) fn brief_row<S: RowSink>(
        &mut self,
        header: &Header,
        delta: i64,
        name: &str,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        self.unlisted.count_row(header.device, delta);
        let device = header.device.max(0);
        self.memory.count(&Extent {
            device: device.into(),
            kind: MemoryKind::Block,
            in_segment: true,
            bytes: delta,
        });
        // No op and no module: the row is short, and many ops have allocated these blocks.
        let (phase, _) = self.unlisted.phase(device);
        let context = self.definitions.own_context(Context { phase, ..Context::default() });
        let base = self.base(0, &Header { device, context, api: Some(Api::Memtrace), ..*header });
        let name = if name.is_empty() { base.name } else { name };
        let row = Row { event: EventName::Brief, tid: self.emitter.pid(), delta_bytes: delta, name, ..base };
        self.emit(&row, sink)
    }

    /// Returns the bytes of the unlisted blocks of a device by category, as `key=value` words.
    fn unlisted_categories(&self, device: i8) -> String {
        let mut by_category = [0_i64; Category::ALL.len()];
        for unlisted in self.unlisted.blocks().filter(|unlisted| unlisted.live.device == device) {
            by_category[usize::from(unlisted.live.category.id())] += unlisted.live.bytes;
        }
        let mut words = String::new();
        for (category, bytes) in Category::ALL.iter().zip(by_category) {
            if bytes != 0 && *category != Category::None {
                let space = if words.is_empty() { "" } else { " " };
                let _ = write!(words, "{space}{}={bytes}", category.as_str());
            }
        }
        words
    }
}

#[cfg(test)]
#[path = "brief_tests.rs"]
mod tests;
