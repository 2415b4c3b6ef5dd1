//! The requests of a trace to PyTorch's caching allocator, in order. They can be repeated with other settings
//! of the allocator.

mod collector;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::ops::ControlFlow;

use memtrace_trace::EventName;

use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::record::{Columns, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use collector::Collector;

/// The columns of the rows that may make requests.
const COLUMNS: Columns = Columns::of(&[
    "device",
    "event",
    "status",
    "alloc_id",
    "requested_bytes",
    "rounded_bytes",
    "delta_bytes",
    "allocated_bytes",
    "active_bytes",
    "reserved_bytes",
    "device_free_bytes",
    "step",
    "stream",
    "pool",
]);

/// The columns of the rows that make no request.
const NONE: Columns = Columns::of(&["device", "event"]);

/// The kinds of operations. The replaying program reads the value of each variant as the first number of an
/// [`Operation`]. "Numbers" lists the further numbers in order; the remaining ones are 0. A slot is the index
/// under which the program keeps a live allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i64)]
pub enum OperationKind {
    /// A request that succeeded. Numbers: slot, bytes, stream.
    Alloc = 0,
    /// A free of a block. Numbers: slot.
    Free = 1,
    /// A request that ran out of memory. Numbers: 0, bytes, stream.
    Failed = 2,
    /// The freeing of the allocator's empty segments, as by `torch.cuda.empty_cache()`.
    EmptyCache = 3,
    /// An allocation of device memory outside the allocator. Numbers: slot, bytes.
    OutsideAlloc = 4,
    /// A free of device memory outside the allocator. Numbers: slot.
    OutsideFree = 5,
    /// A change of the pool of the following requests. Numbers: the private pool, or 0 for the default pool.
    Pool = 6,
    /// The start of a step. Numbers: the step.
    Step = 7,
    /// A change of the reserved bytes in the trace. Numbers: the bytes that are reserved from here on.
    Reserved = 8,
    /// The release of a private pool, whose memory is freed with the next [`OperationKind::EmptyCache`]. Numbers: the
    /// pool.
    Release = 9,
}

/// One operation: its kind, and up to three numbers. See [`OperationKind`].
pub type Operation = [i64; 4];

/// The requests to the caching allocator of one device.
///
/// ```
/// use memtrace_analysis::options::Options;
/// use memtrace_analysis::read::input::Input;
/// use memtrace_analysis::requests::{OperationKind, Requests};
///
/// # let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/gpt");
/// let requests = Requests::read(&Input::open(&folder)?.traces[0], &Options::default())?;
/// let allocations = requests.operations.iter().filter(|[kind, ..]| *kind == OperationKind::Alloc as i64);
/// assert_eq!(allocations.count() as u64, requests.requests);
/// assert_eq!(requests.peak_allocated, 124_781_568);
/// # Ok::<(), memtrace_analysis::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Requests {
    /// The CUDA ordinal.
    pub device: i32,
    /// The operations in order.
    pub operations: Vec<Operation>,
    /// The number of [`OperationKind::Alloc`] and [`OperationKind::Failed`] operations.
    pub requests: u64,
    /// The number of [`OperationKind::Failed`] operations.
    pub failed: u64,
    /// The number of slots that the operations use.
    pub slots: usize,
    /// The number of streams, including stream 0, the default.
    pub streams: usize,
    /// The index after the operation with the highest allocated bytes.
    pub peak_index: usize,
    /// The highest allocated bytes.
    pub peak_allocated: i64,
    /// The highest reserved bytes.
    pub peak_reserved: i64,
    /// The maximum over all samples of the bytes that belong neither to the allocator nor to a library, such
    /// as the context and other processes. `None` without a sample.
    pub taken: Option<i64>,
    /// For each requested size above 20 MiB: the size, and the sum of the bytes of its requests.
    pub large: Vec<(i64, i64)>,
}

impl Requests {
    /// Returns the requests of `trace` to the device in `options` or, by default, to the device with the
    /// highest reserved bytes.
    ///
    /// # Errors
    /// When the trace cannot be read, has no request, or has steps without the rows of every block.
    pub fn read(trace: &TraceFile, options: &Options) -> Result<Requests> {
        let mut collector = Collector::new(&trace.meta);
        let wanted = Wanted::all_events(COLUMNS)
            .except(EventName::Op, NONE)
            .except(EventName::Io, NONE)
            .except(EventName::Tag, NONE)
            .except(EventName::RangeBegin, NONE)
            .except(EventName::RangeEnd, NONE);
        let mut is_brief = false;
        trace.read(wanted, options.lenient, &SymbolTable::default(), |row| {
            is_brief |= row.event == EventName::Brief;
            collector.feed(row);
            ControlFlow::Continue(())
        })?;
        if is_brief {
            return Err(Error::usage(format!(
                "{}: the steps without detail do not have the rows of every block, so their requests cannot be \
                 made again; trace with MEMTRACE_BRIEF=0",
                trace.path.display()
            )));
        }
        collector.finish(options.device).ok_or_else(|| {
            Error::usage(format!(
                "{}: PyTorch's caching allocator got no request in this trace, so there is nothing to replay",
                trace.path.display()
            ))
        })
    }

    /// Writes each operation as four 64-bit little-endian integers.
    ///
    /// # Errors
    /// When `out` cannot be written.
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        for operation in &self.operations {
            for number in operation {
                out.write_all(&number.to_le_bytes())?;
            }
        }
        out.flush()
    }
}
