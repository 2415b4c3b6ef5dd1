//! What device memory reads as.
//!
//! Kernels do nothing, so nobody knows. The rule that real programs were found to live with: it
//! reads as zero, except a small range written by a copy, a collective or a fill on a device that
//! has since launched nothing of unknown effect ([`meaning`](crate::kernels::kernel_effects)). Copying everything instead would let stale bytes of recycled blocks come
//! back as sizes; zero everywhere would break programs that read back what they just wrote.
//!
//! A value read that nobody wrote is invented; such reads are counted and told, and a program that
//! spins on one is stopped ([`Values::read`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// A copy up to this size is really made.
pub(crate) const SMALL: usize = 64 << 10;
/// An input of at least this size from the host means that the program goes forward.
const INPUT: usize = 1 << 10;
/// So many invented flags without input from the host, and the next one reads true: a loop that
/// waits for "finished" ends as it would at its length limit.
const FLAGS: u64 = 4096;
/// So many invented values without input from the host, and the read fails.
const READS: u64 = 100_000;

/// The variable that holds the assumption below.
pub(crate) const DYNAMIC_VARIABLE: &str = "MEMTRACE_PHANTOM_DYNAMIC";

/// The assumption about results whose size depends on values that don't exist: `nonzero`, `unique`,
/// boolean masks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dynamic {
    /// Every element is nonzero, unique, selected: the most that there can be, so the default.
    Full,
    /// Every second one.
    Half,
    /// None.
    Empty,
}

impl Dynamic {
    /// Reads what the user typed; `None` when it is none of the three.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.trim() {
            "" | "full" => Some(Self::Full),
            "half" => Some(Self::Half),
            "empty" => Some(Self::Empty),
            _ => None,
        }
    }

    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Half => "half",
            Self::Empty => "empty",
        }
    }

    /// How many of `all` there are.
    pub(crate) fn of(self, all: u64) -> u64 {
        match self {
            Self::Full => all,
            Self::Half => all / 2,
            Self::Empty => 0,
        }
    }
}

/// Reads of invented values so far, and their bytes.
static INVENTED: AtomicU64 = AtomicU64::new(0);
static INVENTED_BYTES: AtomicU64 = AtomicU64::new(0);
/// The same, and those of single bytes, since the last input from the host.
static IDLE_READS: AtomicU64 = AtomicU64::new(0);
static IDLE_FLAGS: AtomicU64 = AtomicU64::new(0);

/// Reads of invented values so far, and their bytes.
pub(crate) fn invented() -> (u64, u64) {
    (INVENTED.load(Ordering::Relaxed), INVENTED_BYTES.load(Ordering::Relaxed))
}

/// What a read gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// The bytes that lie there.
    Bytes,
    /// Zeros.
    Zeros,
    /// A one of that width, in a reading otherwise zero.
    Number(u64),
    /// Nothing: the program has been spinning on invented values.
    Stop,
}

/// What is known about one device's memory.
#[derive(Debug, Default)]
pub(crate) struct Values {
    /// The device's epoch in which the ranges below were written; a later one makes them unknown.
    stamp: u64,
    /// Ranges whose bytes are real: start and end, never overlapping.
    known: BTreeMap<usize, usize>,
    /// Results that a kernel of known meaning left, and their value under the assumption.
    results: BTreeMap<usize, u64>,
}

impl Values {
    fn at(&mut self, epoch: u64) {
        if self.stamp != epoch {
            self.known.clear();
            self.results.clear();
            self.stamp = epoch;
        }
    }

    /// Notes that a small range now holds real bytes.
    pub(crate) fn wrote(&mut self, epoch: u64, address: usize, size: usize) {
        self.forget(address, size);
        self.at(epoch);
        self.known.insert(address, address + size);
    }

    /// Notes that a range holds nothing known any more.
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

    /// Whether every byte of a range is real.
    pub(crate) fn knows(&mut self, epoch: u64, address: usize, size: usize) -> bool {
        self.at(epoch);
        let (mut at, end) = (address, address + size);
        while at < end {
            match self.known.range(..=at).next_back() {
                Some((_, &stop)) if stop > at => at = stop,
                _ => return false,
            }
        }
        true
    }

    /// The parts of a range that are real: start and end of each.
    pub(crate) fn parts(&mut self, epoch: u64, address: usize, size: usize) -> Vec<(usize, usize)> {
        self.at(epoch);
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

    /// Notes the result that a kernel will leave there, under the assumption.
    pub(crate) fn result(&mut self, epoch: u64, address: usize, value: u64) {
        self.at(epoch);
        self.results.insert(address, value);
    }

    /// What the host gets when it reads a range, counted.
    pub(crate) fn read(&mut self, epoch: u64, address: usize, size: usize) -> Reading {
        if self.knows(epoch, address, size) {
            return Reading::Bytes;
        }
        INVENTED.fetch_add(1, Ordering::Relaxed);
        INVENTED_BYTES.fetch_add(size as u64, Ordering::Relaxed);
        if size > 8 {
            return Reading::Zeros;
        }
        if IDLE_READS.fetch_add(1, Ordering::Relaxed) + 1 >= READS {
            return Reading::Stop;
        }
        let value = self.results.get(&address).copied().unwrap_or(0);
        if value != 0 {
            return Reading::Number(value);
        }
        if size == 1 && (IDLE_FLAGS.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(FLAGS) {
            return Reading::Number(1);
        }
        Reading::Zeros
    }
}

/// Notes an input from the host: the program is not waiting for a value that doesn't exist.
pub(crate) fn input(size: usize) {
    if size >= INPUT {
        IDLE_READS.store(0, Ordering::Relaxed);
        IDLE_FLAGS.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_is_known_until_the_device_works() {
        let mut values = Values::default();
        values.wrote(5, 100, 50);
        values.wrote(5, 150, 10);
        assert!(values.knows(5, 110, 45));
        assert!(!values.knows(5, 110, 51));
        assert!(!values.knows(6, 110, 1));
        assert!(!values.knows(5, 110, 1));
    }

    #[test]
    fn forgetting_the_middle_leaves_both_ends() {
        let mut values = Values::default();
        values.wrote(1, 0, 100);
        values.forget(40, 20);
        assert!(values.knows(1, 0, 40) && values.knows(1, 60, 40));
        assert!(!values.knows(1, 39, 2));
        values.wrote(1, 30, 40);
        assert!(values.knows(1, 0, 100));
    }

    #[test]
    fn the_real_parts_of_a_range_are_told_apart() {
        let mut values = Values::default();
        values.wrote(1, 10, 10);
        values.wrote(1, 30, 10);
        assert_eq!(values.parts(1, 0, 100), [(10, 20), (30, 40)]);
        assert_eq!(values.parts(1, 15, 20), [(15, 20), (30, 35)]);
        assert_eq!(values.parts(1, 10, 5), [(10, 15)]);
        assert_eq!(values.parts(1, 20, 10), []);
        assert_eq!(values.parts(2, 0, 100), []);
    }

    #[test]
    fn a_kernels_result_is_given_until_it_is_overwritten() {
        let mut values = Values::default();
        values.result(9, 64, 7);
        assert_eq!(values.read(9, 64, 8), Reading::Number(7));
        assert_eq!(values.read(10, 64, 8), Reading::Zeros);
        values.result(10, 64, 7);
        values.forget(64, 4);
        assert_eq!(values.read(10, 64, 8), Reading::Zeros);
    }
}
