//! The host memory whose addresses the trace knows, and the parts of pinned memory.

use std::ops::Range;

use memtrace_encode::Encoder;
use memtrace_trace::Api;
use memtrace_trace::host::parts::{MANAGED, PINNED, PINNED_CACHED, PINNED_ROUNDING, SIMULATED, of_tensors};
use memtrace_trace::memory::MemoryKind;

use super::smaps::KnownMemory;
use crate::pinned_requests::{self, PinnedBlock};

/// Returns the memory whose addresses the trace knows: pinned and managed memory, CPU tensors, and the memory
/// of simulated devices.
pub(super) fn known_memory(encoder: &Encoder, is_simulated: bool) -> Vec<KnownMemory> {
    let pinned = pinned_requests::blocks();
    let mut known = Vec::new();
    for (start, live) in encoder.regions() {
        let range = start..start.saturating_add(live.bytes.max(0).cast_unsigned());
        let part = match (live.kind, live.api) {
            (MemoryKind::Host, Some(Api::CpuAllocator)) => of_tensors(live.category),
            (MemoryKind::Host, _) => {
                known.extend(pinned_parts(range, &pinned));
                continue;
            }
            (_, Some(api)) if api.is_managed() => MANAGED,
            _ if is_simulated => SIMULATED,
            _ => continue,
        };
        known.push(KnownMemory { range, part });
    }
    known
}

/// Divides a region of pinned memory into its parts. `blocks` are torch's blocks in order of their addresses.
/// They do not overlap. A region may have several blocks, or none if the program pinned the memory itself.
fn pinned_parts(region: Range<u64>, blocks: &[PinnedBlock]) -> Vec<KnownMemory> {
    let mut parts = Vec::new();
    let mut at = region.start;
    let mut until = |end: u64, part| {
        let end = end.min(region.end);
        if end > at {
            parts.push(KnownMemory { range: at..end, part });
            at = end;
        }
    };
    let first = blocks.partition_point(|block| block.address.saturating_add(block.bytes) <= region.start);
    for block in blocks[first..].iter().take_while(|block| block.address < region.end) {
        let end = block.address.saturating_add(block.bytes);
        until(block.address, PINNED);
        match block.requested {
            0 => until(end, PINNED_CACHED),
            requested => {
                until(block.address.saturating_add(requested).min(end), PINNED);
                until(end, PINNED_ROUNDING);
            }
        }
    }
    until(region.end, PINNED);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_memory_of_the_host_is_asked_for_or_rounding_or_cached() {
        let block = |address, bytes, requested| PinnedBlock { address, bytes, requested };
        let blocks = [block(100, 16, 9), block(120, 8, 0), block(128, 8, 8), block(300, 64, 33)];
        let parts = |region| {
            let named = pinned_parts(region, &blocks).into_iter();
            named.map(|memory| (memory.range.start, memory.range.end, memory.part)).collect::<Vec<_>>()
        };
        assert_eq!(parts(100..116), [(100, 109, PINNED), (109, 116, PINNED_ROUNDING)]);
        assert_eq!(
            parts(116..140),
            [(116, 120, PINNED), (120, 128, PINNED_CACHED), (128, 136, PINNED), (136, 140, PINNED)]
        );
        // torch may register a block in several pieces.
        assert_eq!(parts(300..332), [(300, 332, PINNED)]);
        assert_eq!(parts(332..364), [(332, 333, PINNED), (333, 364, PINNED_ROUNDING)]);
        assert_eq!((parts(0..50), parts(7..7)), (vec![(0, 50, PINNED)], vec![]));
    }
}
