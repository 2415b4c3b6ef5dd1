//! The size rules of PyTorch's caching allocator (`c10/cuda/CUDACachingAllocator.cpp`), from version 2.1 on.

/// The minimum size of a block in bytes. Every block size is a multiple of it (`kMinBlockSize`).
pub const MIN_BLOCK: u64 = 512;
/// The maximum size of a rounded request that is served from the small pool (`kSmallSize`).
pub const SMALL_SIZE: u64 = 1 << 20;
/// The size of a segment in the small pool (`kSmallBuffer`).
pub const SMALL_SEGMENT: u64 = 2 << 20;
/// Rounded requests below this size, but above [`SMALL_SIZE`], use a [`LARGE_SEGMENT`] (`kMinLargeAlloc`).
pub const MIN_LARGE_ALLOC: u64 = 10 << 20;
/// The segment size for requests between the small pool and [`MIN_LARGE_ALLOC`] (`kLargeBuffer`).
pub const LARGE_SEGMENT: u64 = 20 << 20;
/// The sizes of larger segments are multiples of this (`kRoundLarge`).
pub const ROUND_LARGE: u64 = 2 << 20;

/// Returns true if PyTorch's caching allocator is on, given the value of `PYTORCH_NO_CUDA_MEMORY_CACHING`.
///
/// MemTracker reads the variable as an integer, and PyTorch 2.3 and later as a flag, so `0` enables caching.
/// Older versions of PyTorch disable caching whenever the variable is set.
#[must_use]
pub fn caching_enabled(no_caching: Option<&str>) -> bool {
    matches!(no_caching, None | Some("" | "0"))
}

/// The rounding of requests by the caching allocator.
///
/// ```
/// use memtrace_trace::rounding::{Rounding, segment_size};
///
/// // torch.empty(1000, dtype=torch.uint8, device="cuda") takes a block of 1024 bytes ...
/// let block = Rounding::default().round(1000);
/// assert_eq!(block, 1024);
/// // ... out of a segment of 2 MiB, if no earlier segment has room.
/// assert_eq!(segment_size(block), 2 << 20);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// False disables rounding: under `PYTORCH_NO_CUDA_MEMORY_CACHING`, and for memory that is not on a CUDA
    /// device.
    pub caching: bool,
    /// The allocator's setting `roundup_power2_divisions`; 0 and 1 disable it.
    pub power2_divisions: u64,
}

impl Default for Rounding {
    fn default() -> Self {
        Rounding { caching: true, power2_divisions: 0 }
    }
}

impl Rounding {
    /// Returns the block size in bytes for a request of `size` bytes.
    #[inline]
    #[must_use]
    pub fn round(self, size: u64) -> u64 {
        if !self.caching || size == 0 {
            return size;
        }
        let divisions = self.power2_divisions;
        if divisions > 1 && size > MIN_BLOCK.saturating_mul(divisions) {
            return round_power2(size, divisions);
        }
        size.checked_next_multiple_of(MIN_BLOCK).unwrap_or(size)
    }
}

/// Rounds up to the next multiple of a step: `divisions` equal steps divide the range between two powers of
/// two.
fn round_power2(size: u64, divisions: u64) -> u64 {
    if size.is_power_of_two() {
        return size;
    }
    let floor = 1u64 << size.ilog2();
    let step = (floor / divisions.next_power_of_two()).max(1);
    size.checked_next_multiple_of(step).unwrap_or(size)
}

/// Returns the size of the segment that the allocator requests from CUDA for a request of `rounded` bytes
/// (already rounded), with default settings.
#[must_use]
pub fn segment_size(rounded: u64) -> u64 {
    if rounded <= SMALL_SIZE {
        SMALL_SEGMENT
    } else if rounded < MIN_LARGE_ALLOC {
        LARGE_SEGMENT
    } else {
        rounded.checked_next_multiple_of(ROUND_LARGE).unwrap_or(rounded)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_rounded_as_the_allocator_rounds_them() {
        let r = Rounding::default();
        for (asked, got) in [(0, 0), (1, 512), (512, 512), (513, 1024), (1 << 20, 1 << 20)] {
            assert_eq!(r.round(asked), got, "{asked}");
        }
        assert_eq!(r.round((1 << 20) + 1), (1 << 20) + 512);
    }

    #[test]
    fn requests_are_not_rounded_when_caching_is_off() {
        let r = Rounding { caching: false, ..Rounding::default() };
        assert_eq!(r.round(513), 513);
        assert!(!caching_enabled(Some("1")));
        assert!(caching_enabled(Some("0")) && caching_enabled(None));
    }

    #[test]
    fn requests_are_rounded_to_divisions_of_a_power_of_two() {
        let r = Rounding { power2_divisions: 8, ..Rounding::default() };
        assert_eq!(r.round(4097), 4608);
        assert_eq!(r.round(100_000), 106_496);
        assert_eq!(r.round(65_536), 65_536);
        assert_eq!(r.round(4096), 4096);
    }

    #[test]
    fn segments_follow_the_rounded_size() {
        assert_eq!(segment_size(1 << 20), SMALL_SEGMENT);
        assert_eq!(segment_size(Rounding::default().round(1_048_577)), 20_971_520);
        assert_eq!(segment_size(Rounding::default().round(10_485_759)), 10_485_760);
        assert_eq!(segment_size(Rounding::default().round(10_485_761)), 12_582_912);
    }
}
