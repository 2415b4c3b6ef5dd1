//! The rows of `MEMTRACE_OPS=io`: the storages that ops use, and the memory of modules.

use memtrace_trace::memory::MemoryKind;
use memtrace_trace::{Api, EventName, Header, Row};

use crate::emitter::{LIBRARY, RowSink};
use crate::encoder::Encoder;
use crate::keys::CPU_TENSOR;

impl Encoder {
    /// Writes the row of a storage that an op uses, or of a module's memory. Changes neither totals nor
    /// owners.
    pub(crate) fn io<S: RowSink>(
        &mut self,
        tid: u32,
        header: &Header,
        address: u64,
        bytes: i64,
        rounded: i64,
        sink: &mut S,
    ) -> Result<(), S::Error> {
        let rounded_bytes = match header.api {
            Some(Api::Read | Api::Write | Api::ReadWrite | Api::Given) => {
                let on_device = header.device >= 0;
                if on_device { self.rounding.round(bytes.max(0) as u64) as i64 } else { bytes }
            }
            _ => rounded,
        };
        self.emit(
            &Row {
                event: EventName::Io,
                source: LIBRARY,
                alloc_id: self.live_at(header.device, address),
                addr: address as i64,
                requested_bytes: bytes,
                rounded_bytes,
                ..self.base(tid, header)
            },
            sink,
        )
    }

    /// Returns the id of the live allocation at an address, or 0 for memory without a row.
    fn live_at(&self, device: i8, addr: u64) -> i64 {
        let live = &self.memory.live;
        let found = if device < 0 { live.region(addr | CPU_TENSOR) } else { live.block(addr) };
        let found = found.or_else(|| live.region(addr));
        found.filter(|live| live.kind != MemoryKind::Segment).map_or(0, |live| live.alloc_id)
    }
}
