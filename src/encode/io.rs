//! The rows of `MEMTRACE_OPS=io`: storages that ops use, and the memory of modules.

use memtrace_trace::{Api, Event, EventName, Row};

use crate::encoder::{CPU_TENSOR, Encoder, LIBRARY, RowSink};
use crate::live::MemoryKind;

impl Encoder {
    /// A storage that an op reads or writes, or the memory of a module's call. It changes nothing: totals
    /// and owners stay.
    pub(crate) fn io<S: RowSink>(&mut self, tid: u32, event: &Event, sink: &mut S) -> Result<(), S::Error> {
        let rounded_bytes = match Api::from_code(event.api) {
            Some(Api::Read | Api::Write | Api::ReadWrite | Api::Given) => {
                let on_device = event.device != Event::HOST;
                if on_device { self.rounding.round(event.size.max(0) as u64) as i64 } else { event.size }
            }
            _ => event.reserved as i64,
        };
        self.emit(
            &Row {
                event: EventName::Io,
                source: LIBRARY,
                alloc_id: self.live_at(event.device, event.addr),
                addr: event.addr as i64,
                requested_bytes: event.size,
                rounded_bytes,
                ..self.base(tid, event, event.device, event.context)
            },
            sink,
        )
    }

    /// The allocation that is live at an address; 0 for memory that came another way.
    fn live_at(&self, device: i8, addr: u64) -> i64 {
        let found = if device == Event::HOST {
            self.regions.get(&(addr | CPU_TENSOR)).or_else(|| self.regions.get(&addr))
        } else {
            self.blocks.get(&addr).or_else(|| self.regions.get(&addr))
        };
        found.filter(|live| live.what != MemoryKind::Segment).map_or(0, |live| live.alloc_id)
    }
}
