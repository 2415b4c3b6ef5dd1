//! The columns of a digest, in one table for all kinds of rows.

/// The type of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColumnType {
    /// A 64-bit integer.
    Int,
    /// A double.
    Float,
    /// UTF-8 text.
    Text,
}

/// The subject of a row of the digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    /// The process, which has one row.
    Process,
    /// A device of the process.
    Device,
    /// A step on a device.
    Step,
    /// A group of blocks that were live at the peak of a device.
    Owner,
    /// A group of blocks that grows from step to step.
    Leak,
}

impl RowKind {
    /// Returns the text in the column `kind`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            RowKind::Process => "process",
            RowKind::Device => "device",
            RowKind::Step => "step",
            RowKind::Owner => "owner",
            RowKind::Leak => "leak",
        }
    }
}

macro_rules! columns {
    ($($(#[doc = $doc:literal])+ $name:ident $text:literal $type:ident;)+) => {
        /// A column of the digest.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum DigestColumn {
            $($(#[doc = $doc])+ $name,)+
        }

        impl DigestColumn {
            /// Every column, in order, with its name, its type and its meaning.
            pub const ALL: &'static [(DigestColumn, &'static str, ColumnType, &'static str)] =
                &[$((DigestColumn::$name, $text, ColumnType::$type, concat!($($doc),+)),)+];
        }
    };
}

columns! {
    /// `process`, `device`, `step`, `owner` or `leak`
    Kind "kind" Text;
    /// the rank; -1 without one
    Rank "rank" Int;
    /// the number of ranks; 0 when unknown
    WorldSize "world_size" Int;
    /// the name of the machine
    Host "host" Text;
    /// the id of the run, which all ranks share
    RunId "run_id" Text;
    /// the name of the trace
    File "file" Text;
    /// the ordinal of the device; null in rows of a process and of leaks
    Device "device" Int;
    /// the step; -1 before the first; of an owner, the step of the peak
    Step "step" Int;
    /// the time of the first row of the step, in ns since the start of the trace
    FromNs "from_ns" Int;
    /// the time of the last row: of the step, or of the trace
    ToNs "to_ns" Int;
    /// the highest allocated bytes
    PeakAllocated "peak_allocated_bytes" Int;
    /// the highest reserved bytes
    PeakReserved "peak_reserved_bytes" Int;
    /// the highest bytes in use on the device, for a step the highest of its rows; without samples, the bytes of torch and
    /// libraries
    PeakUsed "peak_used_bytes" Int;
    /// the time of the highest allocated bytes
    PeakNs "peak_ns" Int;
    /// the allocated bytes at the end
    EndAllocated "end_allocated_bytes" Int;
    /// the reserved bytes at the end
    EndReserved "end_reserved_bytes" Int;
    /// the memory of the device; 0 when unknown
    Capacity "capacity_bytes" Int;
    /// blocks allocated
    Allocations "allocations" Int;
    /// the bytes of all allocated blocks
    AllocatedSum "allocated_sum_bytes" Int;
    /// requests that ran out of memory
    Ooms "ooms" Int;
    /// failed calls that were retried
    Retries "retries" Int;
    /// the phase of the row that made the peak, or of a leak
    Phase "phase" Text;
    /// the op, of the same row or leak as `phase`
    Op "op" Text;
    /// the module, of the same row or leak as `phase`; for an owner, its module
    Module "module" Text;
    /// the category of an owner or a leak; `*` marks an inferred one
    Category "category" Text;
    /// the line of Python that allocates a leak, where the trace has stacks
    Line "line" Text;
    /// the bytes of an owner or a leak; for a process, the bytes live when the script ended
    Bytes "bytes" Int;
    /// the number of blocks that hold `bytes`
    Blocks "blocks" Int;
    /// the growth of a leak; for a process, the growth of its total memory from step end to step end
    BytesPerStep "bytes_per_step" Float;
    /// how well a line fits that growth: 1 for points on a line
    R2 "r2" Float;
    /// the first step of a leak
    FirstStep "first_step" Int;
    /// the last step of a leak
    LastStep "last_step" Int;
    /// the steps of a process or of a leak
    Steps "steps" Int;
    /// the reserved bytes at their peak in the process, the moment that `memtrace frag` examines
    FragReserved "frag_reserved_bytes" Int;
    /// the part of `frag_reserved_bytes` that the program requested
    FragRequested "frag_requested_bytes" Int;
    /// the part of `frag_reserved_bytes` in blocks beyond the requests
    FragRounding "frag_rounding_bytes" Int;
    /// the part of `frag_reserved_bytes` that is freed and still used by a stream
    FragPending "frag_pending_bytes" Int;
    /// the part of `frag_reserved_bytes` in holes of segments with live blocks
    FragHoles "frag_hole_bytes" Int;
    /// the part of `frag_reserved_bytes` in segments without a block
    FragEmpty "frag_empty_segment_bytes" Int;
    /// the largest free piece
    FragLargest "frag_largest_free_bytes" Int;
    /// the rows of the trace
    Rows "rows" Int;
    /// events that the trace lost
    Lost "lost_events" Int;
    /// 1 when the trace has its end row
    Complete "complete" Int;
    /// 1 when the ops and modules of the step are known (`MEMTRACE_DETAIL`), else 0; for a device, of the step of its peak
    Detailed "detailed" Int;
    /// the highest resident memory of a process on the host; null without a sample of it
    HostPeak "host_peak_rss_bytes" Int;
    /// the step of `host_peak_rss_bytes`
    HostPeakStep "host_peak_step" Int;
    /// the memory limit of the container; null when it is unknown or there is no limit
    HostLimit "host_limit_bytes" Int;
    /// the bytes live after the last work of a finished step; for a device, their growth as `memtrace leaks` shows it
    Kept "kept_bytes" Int;
    /// the bytes that the largest step so far needed beyond `kept_bytes`; for a device, their growth
    LargerSteps "larger_steps_bytes" Int;
    /// the bytes that torch's allocator reserved and no step needed; for a device, their growth
    Cached "cached_bytes" Int;
    /// the bytes outside torch's allocator; for a device, their growth
    Outside "outside_bytes" Int;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_columns_are_in_the_order_of_their_numbers_and_have_unique_names() {
        for (place, (column, name, ..)) in DigestColumn::ALL.iter().enumerate() {
            assert_eq!(*column as usize, place);
            assert_eq!(DigestColumn::ALL.iter().filter(|other| other.1 == *name).count(), 1, "{name}");
        }
    }
}
