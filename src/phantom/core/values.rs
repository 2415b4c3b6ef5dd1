//! The known content of device memory.
//!
//! Kernels do nothing, so most content is unknown. Device memory reads as zero, except a small range that a
//! copy, a collective or a fill wrote, as long as the device has launched nothing of unknown effect since
//! ([`kernel_effects`](crate::kernels::kernel_effects)). Real programs run with this rule. Copying everything
//! instead would bring stale bytes of recycled blocks back as sizes. Zero everywhere would break programs
//! that read back their own writes.
//!
//! A value that nothing computed or wrote is *invented*. Reads of invented values are counted and reported,
//! and a program that loops on one is stopped ([`KnownValues::read`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The largest copy, fill or message that really moves its bytes, in bytes.
pub(crate) const SMALL: usize = 64 << 10;
/// An input of at least this many bytes from the host means that the program makes progress.
const PROGRESS_INPUT: usize = 1 << 10;
/// After this many invented flags without input from the host, one reads true: a loop that waits for
/// "finished" ends as it would at its length limit.
const MAX_IDLE_FLAGS: u64 = 4096;
/// After this many invented values without input from the host, reads fail.
const MAX_IDLE_READS: u64 = 100_000;

/// The variable that holds a [`DynamicSizes`].
pub(crate) const DYNAMIC_VARIABLE: &str = "MEMTRACE_PHANTOM_DYNAMIC";

/// The assumption about results with a size that depends on unknown values: `nonzero`, `unique`, boolean
/// masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DynamicSizes {
    /// Every element is nonzero, unique or selected. The largest possible result, and the default.
    Full,
    /// Every second element.
    Half,
    /// No element.
    Empty,
}

impl DynamicSizes {
    /// Parses the value of [`DYNAMIC_VARIABLE`]. `None` when it is invalid.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "" | "full" => Some(Self::Full),
            "half" => Some(Self::Half),
            "empty" => Some(Self::Empty),
            _ => None,
        }
    }

    /// The text that [`parse`](Self::parse) reads.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Half => "half",
            Self::Empty => "empty",
        }
    }

    /// The assumed number of elements out of `all`.
    pub(crate) fn count_of(self, all: u64) -> u64 {
        match self {
            Self::Full => all,
            Self::Half => all / 2,
            Self::Empty => 0,
        }
    }
}

/// Reads of invented values so far, and their bytes.
static INVENTED_READS: AtomicU64 = AtomicU64::new(0);
static INVENTED_BYTES: AtomicU64 = AtomicU64::new(0);
/// Reads of invented values since the last input from the host, and those of a single byte.
static IDLE_READS: AtomicU64 = AtomicU64::new(0);
static IDLE_FLAGS: AtomicU64 = AtomicU64::new(0);

/// Reads of invented values so far, and their bytes.
pub(crate) fn invented() -> (u64, u64) {
    (INVENTED_READS.load(Ordering::Relaxed), INVENTED_BYTES.load(Ordering::Relaxed))
}

/// The result of a read by the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostRead {
    /// The bytes in memory.
    Bytes,
    /// Zeros, except for the known parts.
    Zeros,
    /// This number, in as many bytes as are read.
    Number(u64),
    /// An error: the program loops on invented values.
    Stop,
}

/// The known content of one device's memory.
#[derive(Debug, Default)]
pub(crate) struct KnownValues {
    /// The epoch in which the ranges below were written. They are unknown in every later one.
    epoch: u64,
    /// Ranges with real bytes: start and end, never overlapping.
    known: BTreeMap<usize, usize>,
    /// Addresses at which a kernel of known effect left a result, and its assumed value.
    results: BTreeMap<usize, u64>,
}

impl KnownValues {
    /// Drops everything when the epoch changed.
    fn enter(&mut self, epoch: u64) {
        if self.epoch != epoch {
            self.known.clear();
            self.results.clear();
            self.epoch = epoch;
        }
    }

    /// Marks a range as known: it holds real bytes.
    pub(crate) fn mark_known(&mut self, epoch: u64, address: usize, size: usize) {
        self.forget(address, size);
        self.enter(epoch);
        self.known.insert(address, address + size);
    }

    /// Marks a range as unknown.
    pub(crate) fn forget(&mut self, address: usize, size: usize) {
        let end = address + size;
        while let Some((&start, &stop)) = self.known.range(..end).next_back() {
            if stop <= address {
                break;
            }
            self.known.remove(&start);
            if start < address {
                self.known.insert(start, address);
            }
            if end < stop {
                self.known.insert(end, stop);
            }
        }
        if !self.results.is_empty() {
            let gone: Vec<_> = self.results.range(address..end).map(|(&at, _)| at).collect();
            for at in gone {
                self.results.remove(&at);
            }
        }
    }

    /// Returns true if every byte of a range is known.
    pub(crate) fn is_known(&mut self, epoch: u64, address: usize, size: usize) -> bool {
        self.enter(epoch);
        let (mut at, end) = (address, address + size);
        while at < end {
            match self.known.range(..=at).next_back() {
                Some((_, &stop)) if stop > at => at = stop,
                _ => return false,
            }
        }
        true
    }

    /// The known parts of a range: start and end of each.
    pub(crate) fn known_parts(&mut self, epoch: u64, address: usize, size: usize) -> Vec<(usize, usize)> {
        self.enter(epoch);
        let (mut at, end, mut parts) = (address, address + size, Vec::new());
        if let Some((_, &stop)) = self.known.range(..=at).next_back()
            && stop > at
        {
            parts.push((at, stop.min(end)));
            at = stop;
        }
        if at < end {
            parts.extend(self.known.range(at + 1..end).map(|(&start, &stop)| (start, stop.min(end))));
        }
        parts
    }

    /// Stores the assumed result of a kernel.
    pub(crate) fn set_result(&mut self, epoch: u64, address: usize, value: u64) {
        self.enter(epoch);
        self.results.insert(address, value);
    }

    /// The result of a read by the host. Counts it when the value is invented.
    pub(crate) fn read(&mut self, epoch: u64, address: usize, size: usize) -> HostRead {
        if self.is_known(epoch, address, size) {
            return HostRead::Bytes;
        }
        INVENTED_READS.fetch_add(1, Ordering::Relaxed);
        INVENTED_BYTES.fetch_add(size as u64, Ordering::Relaxed);
        if size > 8 {
            return HostRead::Zeros;
        }
        if IDLE_READS.fetch_add(1, Ordering::Relaxed) + 1 >= MAX_IDLE_READS {
            return HostRead::Stop;
        }
        let value = self.results.get(&address).copied().unwrap_or(0);
        if value != 0 {
            return HostRead::Number(value);
        }
        if size == 1 && (IDLE_FLAGS.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(MAX_IDLE_FLAGS) {
            return HostRead::Number(1);
        }
        HostRead::Zeros
    }
}

/// Counts an input from the host. A large one shows that the program does not wait for an invented value.
pub(crate) fn count_input(size: usize) {
    if size >= PROGRESS_INPUT {
        IDLE_READS.store(0, Ordering::Relaxed);
        IDLE_FLAGS.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_range_is_known_until_the_epoch_changes() {
        let mut values = KnownValues::default();
        values.mark_known(5, 100, 50);
        values.mark_known(5, 150, 10);
        assert!(values.is_known(5, 110, 45));
        assert!(!values.is_known(5, 110, 51));
        assert!(!values.is_known(6, 110, 1));
        assert!(!values.is_known(5, 110, 1));
    }

    #[test]
    fn forgetting_the_middle_of_a_known_range_keeps_both_ends() {
        let mut values = KnownValues::default();
        values.mark_known(1, 0, 100);
        values.forget(40, 20);
        assert!(values.is_known(1, 0, 40) && values.is_known(1, 60, 40));
        assert!(!values.is_known(1, 39, 2));
        values.mark_known(1, 30, 40);
        assert!(values.is_known(1, 0, 100));
    }

    #[test]
    fn the_known_parts_of_a_range_are_listed() {
        let mut values = KnownValues::default();
        values.mark_known(1, 10, 10);
        values.mark_known(1, 30, 10);
        assert_eq!(values.known_parts(1, 0, 100), [(10, 20), (30, 40)]);
        assert_eq!(values.known_parts(1, 15, 20), [(15, 20), (30, 35)]);
        assert_eq!(values.known_parts(1, 10, 5), [(10, 15)]);
        assert_eq!(values.known_parts(1, 20, 10), []);
        assert_eq!(values.known_parts(2, 0, 100), []);
    }

    #[test]
    fn a_kernel_result_is_read_until_it_is_overwritten() {
        let mut values = KnownValues::default();
        values.set_result(9, 64, 7);
        assert_eq!(values.read(9, 64, 8), HostRead::Number(7));
        assert_eq!(values.read(10, 64, 8), HostRead::Zeros);
        values.set_result(10, 64, 7);
        values.forget(64, 4);
        assert_eq!(values.read(10, 64, 8), HostRead::Zeros);
    }
}
