//! Fills in the fields of rows, and numbers the rows.

use std::borrow::Cow;

use memtrace_trace::columns::TextKeys;
use memtrace_trace::context::{Context, TextId};
use memtrace_trace::form::Form;
use memtrace_trace::host::{self, HostValues};
use memtrace_trace::memory::{Effect, Totals};
use memtrace_trace::ranges::STEP;
use memtrace_trace::sample::Sample;
use memtrace_trace::text::{NONE, TORCH_ALLOCATOR};
use memtrace_trace::{Api, Event, EventName, Header, Row};

use super::calls::CallEvent;
use crate::definitions::RangeName;
use crate::emitter::{LIBRARY, RowSink, call_key};
use crate::encoder::Encoder;
use crate::live::{Live, Owner};

/// A position between two rows, for [`Encoder::take_back`].
#[derive(Clone, Copy)]
pub struct RowPosition {
    seq: i64,
    reported_lost: u64,
}

impl Encoder {
    /// Writes a row; see [`Emitter::emit`](crate::emitter::Emitter::emit).
    pub(crate) fn emit<S: RowSink>(&self, row: &Row<'_>, sink: &mut S) -> Result<(), S::Error> {
        self.emitter.emit(row, sink)
    }

    /// Returns the `seq` of the next row.
    pub(crate) fn next_seq(&self) -> i64 {
        self.emitter.last_seq() + 1
    }

    /// Returns the position after the last row, for [`Encoder::take_back`].
    #[must_use]
    pub fn place(&self) -> RowPosition {
        RowPosition { seq: self.emitter.last_seq(), reported_lost: self.reported_lost() }
    }

    /// Resets the row number and the number of reported losses to `place`. The caller has removed the later
    /// rows from the file, such as the end row of a trace that continues.
    pub fn take_back(&mut self, place: RowPosition) {
        self.emitter.set_last_seq(place.seq);
        self.set_reported_lost(place.reported_lost);
    }

    /// Writes the meta row, the first row of a file.
    ///
    /// # Errors
    /// Returns the sink's error.
    pub fn meta<S: RowSink>(&mut self, json: &str, sink: &mut S) -> Result<(), S::Error> {
        self.emit(&Row { event: EventName::Meta, name: json, ..self.blank(self.emitter.start_ns()) }, sink)
    }

    /// Writes the row of a block that torch's allocator allocated, or freed with any other effect.
    #[inline(always)]
    pub(crate) fn write_block_row<S: RowSink>(
        &self,
        tid: u32,
        header: &Header,
        address: u64,
        live: &Live,
        effect: Effect,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let (event, delta_bytes) = match effect {
            Effect::Alloc => (live.kind.alloc_event(), live.bytes),
            _ => (live.kind.free_event(), -live.bytes),
        };
        let row = self.live_numbers(tid, header, address, live);
        let keys = TextKeys { call: call_key(event, header.api, true), ..row.keys };
        // By value: a reference would keep the whole block in memory.
        let (api, context, form) = (header.api, live.context, live.form);
        let with_texts = move |row| self.with_live_texts(row, api, context, form);
        self.emitter.emit_keyed(Row { event, delta_bytes, keys, ..row }, with_texts, sink)
    }

    /// Writes the row of a call that allocated memory.
    pub(crate) fn write_call_row<S: RowSink>(
        &mut self,
        event: &CallEvent,
        live: &Live,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let row = self.call_row(event, live);
        let name = self.definitions.text(event.call.user);
        self.emit(&Row { event: live.kind.alloc_event(), delta_bytes: live.bytes, name, ..row }, sink)
    }

    /// Writes the row of a call that freed memory.
    pub(crate) fn write_call_free_row<S: RowSink>(
        &mut self,
        event: &CallEvent,
        live: &Live,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let row = self.call_row(event, live);
        self.emit(&Row { event: live.kind.free_event(), delta_bytes: -live.bytes, ..row }, sink)
    }

    /// Writes the row of a mark. The mark that begins a step gets the number of the step.
    pub(crate) fn mark<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        name: TextId,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let base = self.base(tid, &Header { device: Event::HOST, ..*header });
        let name = match self.definitions.text(name) {
            STEP => Cow::Owned(format!("{STEP}{}", header.step)),
            name => Cow::Borrowed(name),
        };
        self.emit(&Row { event: EventName::Mark, source: LIBRARY, name: &name, ..base }, sink)
    }

    /// Writes the row of a range.
    pub(crate) fn named<S: RowSink>(
        &mut self,
        event: EventName,
        tid: u32,
        header: &Header,
        range: RangeName,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let base = self.base(tid, &Header { device: Event::HOST, ..*header });
        let source = if range.class == 0 { LIBRARY } else { self.definitions.text(range.class) };
        self.emit(&Row { event, source, name: self.definitions.text(range.name), ..base }, sink)
    }

    /// Writes the row of a device sample.
    pub(crate) fn sample<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        sample: Sample,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let device = header.device;
        let (accounted, _) = self.ledger(device);
        self.samples.add(device, sample, accounted);
        let base = self.base(tid, &Header { context: 0, ..*header });
        // Page cache counts as free memory, because an allocation can reclaim it.
        let device_free_bytes = sample.free.map_or(-1, |free| free + sample.cache.unwrap_or(0));
        let name = sample.to_string();
        let row = Row { event: EventName::Sample, source: LIBRARY, device_free_bytes, name: &name, ..base };
        self.emit(&row, sink)
    }

    /// Writes the row of a host memory sample.
    pub(crate) fn host_sample<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        values: HostValues,
        what: u32,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let base = self.base(tid, &Header { context: 0, device: Event::HOST, ..*header });
        let what = if what == 0 { "" } else { self.definitions.text(what) };
        let name = header.api.map_or_else(String::new, |source| host::text_of(source, values, what));
        self.emit(&Row { event: EventName::Sample, source: LIBRARY, name: &name, ..base }, sink)
    }

    /// Returns the fields of a row about live memory, whose owner comes from the allocation.
    #[inline(always)]
    pub(crate) fn live_row<'a>(&'a self, tid: u32, header: &Header, address: u64, live: &Live) -> Row<'a> {
        let row = self.live_numbers(tid, header, address, live);
        self.with_live_texts(row, header.api, live.context, live.form)
    }

    /// Returns [`Encoder::live_row`] without its texts.
    #[inline(always)]
    fn live_numbers<'a>(&self, tid: u32, header: &Header, address: u64, live: &Live) -> Row<'a> {
        let Live { device, context, form, .. } = *live;
        let base = self.numbers(tid, &Header { device, context, ..*header });
        Row {
            keys: TextKeys { form: self.definitions.key(form), ..base.keys },
            alloc_id: live.alloc_id,
            addr: address as i64,
            requested_bytes: live.requested,
            rounded_bytes: live.rounded,
            category: live.category,
            step: i64::from(live.step),
            pool: i64::from(live.pool),
            source: TORCH_ALLOCATOR,
            ..base
        }
    }

    /// Adds the texts of [`Encoder::live_row`].
    #[inline(always)]
    fn with_live_texts<'a>(&'a self, row: Row<'a>, api: Option<Api>, context: u32, form: u32) -> Row<'a> {
        let Form { dtype, shape } = self.definitions.form(form);
        Row { dtype, shape, ..self.with_owner(row, api, context) }
    }

    /// Returns the fields of a row about live memory that a call allocated or freed.
    #[inline(always)]
    fn call_row<'a>(&'a self, event: &CallEvent, live: &Live) -> Row<'a> {
        let CallEvent { tid, header, call, .. } = event;
        Row {
            source: self.definitions.text(call.library),
            status: i32::from(call.status),
            latency_ns: call.latency_ns as i64,
            ..self.live_row(*tid, header, call.address, live)
        }
    }

    /// Returns the fields that the rows of all events have.
    #[inline(always)]
    pub(crate) fn base(&self, tid: u32, header: &Header) -> Row<'_> {
        self.with_owner(self.numbers(tid, header), header.api, header.context)
    }

    /// Adds the texts of the call and of the context to a row.
    #[inline(always)]
    pub(super) fn with_owner<'a>(&'a self, row: Row<'a>, api: Option<Api>, context: u32) -> Row<'a> {
        let Owner { op, module, phase } = self.definitions.owner(context);
        Row { api: api.map_or(NONE, Api::as_str), op, module, phase, ..row }
    }

    /// Returns [`Encoder::base`] without its texts.
    #[inline(always)]
    pub(super) fn numbers<'a>(&self, tid: u32, header: &Header) -> Row<'a> {
        let Header { clock_ns, device, context, step, .. } = *header;
        let key = self.definitions.key(context);
        let Context { stack, stream, .. } = self.definitions.context(context);
        let Totals { allocated, active, reserved, .. } = self.totals(device);
        Row {
            stack_id: i64::from(stack),
            stream,
            tid: tid as i32,
            device: i32::from(device),
            allocated_bytes: allocated,
            active_bytes: active,
            reserved_bytes: reserved,
            keys: TextKeys { owner: key, ..TextKeys::default() },
            step: i64::from(step),
            ..self.blank(clock_ns)
        }
    }

    /// Returns the fields of a row that belongs to no particular thread and to no device. Its totals are the
    /// totals of the host.
    #[inline(always)]
    pub(crate) fn blank(&self, clock_ns: u64) -> Row<'static> {
        self.emitter.blank(clock_ns, self.memory.devices.host())
    }
}
