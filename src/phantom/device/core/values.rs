//! The known content of device memory.
//!
//! Kernels do nothing, so most content is unknown. Unknown device memory reads as zero. Known are small
//! ranges that a copy, a collective or a fill wrote, until a launch may have written there. A kernel that the
//! driver launches, such as Triton's, leaves the old values as answers. Another kernel of unknown effect may
//! write the memory that its arguments reach ([`reach`](crate::cuda::reach)); for kernels of known effect,
//! see [`kernel_effects`](crate::kernels::kernel_effects). A freed block loses its values, because stale
//! bytes of recycled blocks would reappear as sizes.
//!
//! A value that nothing computed or wrote is *invented*. Reads of invented values are counted and reported,
//! and a program that loops on one is stopped ([`loop_guard`]). The answer about a flag or a single number is
//! remembered: it is the value until something is written there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::core::address_ranges::AddressRanges;
use crate::core::address_tables::{AddressTables, Targets};
use crate::core::flag_links::FlagLinks;
use crate::core::loop_guard::{self, Verdict};
use crate::core::running_ops;

/// The largest size of a copy, fill or message that really moves its bytes.
pub(crate) const SMALL: usize = 64 << 10;

/// The number of reads of invented values so far. [`INVENTED_BYTES`] counts their bytes.
static INVENTED_READS: AtomicU64 = AtomicU64::new(0);
static INVENTED_BYTES: AtomicU64 = AtomicU64::new(0);

/// The number of reads of invented values so far in ops that act on them: flags that decide a branch or a
/// loop, sizes, and single integers.
static ACTED_READS: AtomicU64 = AtomicU64::new(0);

/// Returns [`ACTED_READS`]. The tracer notes the line of the program when the number grows during an op.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_acted_reads() -> u64 {
    ACTED_READS.load(Ordering::Relaxed)
}

/// Returns the number of reads of invented values so far, and the number of their bytes.
pub(crate) fn invented() -> (u64, u64) {
    (INVENTED_READS.load(Ordering::Relaxed), INVENTED_BYTES.load(Ordering::Relaxed))
}

/// The result of a read by the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HostRead {
    /// The host reads the bytes in memory.
    Bytes,
    /// The host reads the known parts of the range. The rest of the range reads as zero, which is an invented
    /// value.
    Invented,
    /// The host reads a mask of one byte for each flag. The assumption about dynamic sizes
    /// decides how many flags are true.
    Mask,
    /// The host reads this number, in as many bytes as it asked for.
    Number(u64),
    /// The read fails, because the program loops on invented values.
    Stop,
}

/// The known content of one device's memory.
#[derive(Debug, Default)]
pub(crate) struct KnownValues {
    /// The known ranges, whose bytes in memory are the real content.
    known: AddressRanges,
    /// The parts of `known` that hold an answer: a value that no kernel computed, a copy of such a value, or
    /// a kernel's result from one.
    answered: AddressRanges,
    /// Ranges of unknown flags of one byte each, which a kernel of known type wrote.
    masks: AddressRanges,
    /// The links between unknown flags that are copies or opposites of each other.
    links: FlagLinks,
    /// Ranges of unknown flags that are expected to be false, and ranges of those
    /// that are expected to be true.
    expected: [AddressRanges; 2],
    /// The assumed results of kernels of known effect, by the address of the result.
    results: BTreeMap<usize, u64>,
    /// The addresses of the results that follow from known values.
    computed: BTreeSet<usize>,
    /// The fraction of nonzero elements in unknown flags or numbers: the end of each range and the fraction, by
    /// its start.
    nonzero_fractions: BTreeMap<usize, (usize, f64)>,
    /// Memory that another process may write, too. Its content stays unknown.
    shared: AddressRanges,
    /// Memory that may hold addresses.
    pub(crate) tables: AddressTables,
}

impl KnownValues {
    /// Marks a range as known: it holds real bytes.
    pub(crate) fn mark_known(&mut self, address: usize, size: usize) {
        let end = address + size;
        self.overwrite(address, size);
        self.known.add(address, end);
        for (start, stop) in self.shared.parts(address, end) {
            self.known.remove(start, stop);
        }
    }

    /// Marks a range as known again after a launch that did not write there.
    pub(crate) fn keep_known(&mut self, address: usize, size: usize, is_answer: bool) {
        self.known.add(address, address + size);
        if is_answer {
            self.answered.add(address, address + size);
        }
    }

    /// Marks a range as known, with the answer to a read as its content. `number` is the answer as a number,
    /// or `None` if it is longer than 8 bytes.
    pub(crate) fn mark_answered(&mut self, address: usize, size: usize, number: Option<u64>) {
        let is_mask = self.is_mask(address, size);
        self.mark_known(address, size);
        if is_mask {
            // `mark_known` removed the range from `masks`. The range is added again, because it holds unknown
            // flags again if a later launch overwrites the answer.
            self.masks.add(address, address + size);
        }
        if !self.is_known(address, size) {
            // The range is shared with another process, so its content stays unknown.
            return;
        }
        self.answered.add(address, address + size);
        if let Some(number) = number {
            self.results.insert(address, number);
        }
    }

    /// Marks the range of a kernel's output as unknown. Unlike [`forget_reached`](Self::forget_reached), also
    /// removes marks for flags.
    pub(crate) fn forget(&mut self, address: usize, size: usize) {
        self.masks.remove(address, address.saturating_add(size));
        self.forget_reached(address, size);
    }

    /// Marks a range that a kernel may have written as unknown. A range of unknown flags still holds unknown
    /// flags.
    pub(crate) fn forget_reached(&mut self, address: usize, size: usize) {
        let end = address.saturating_add(size);
        self.known.remove(address, end);
        self.answered.remove(address, end);
        self.links.forget(address, end);
        self.expected.iter_mut().for_each(|ranges| ranges.remove(address, end));
        while let Some((&start, _)) =
            self.nonzero_fractions.range(..end).next_back().filter(|(_, (stop, _))| *stop > address)
        {
            self.nonzero_fractions.remove(&start);
        }
        if !self.results.is_empty() {
            let gone: Vec<_> = self.results.range(address..end).map(|(&at, _)| at).collect();
            for at in gone {
                self.results.remove(&at);
                self.computed.remove(&at);
            }
        }
    }

    /// Marks the known values of a range as answers, because a kernel may have rewritten them. The host reads
    /// them as they were: such a kernel mostly updates what the program wrote there (a count, a length).
    pub(crate) fn mark_rewritten(&mut self, address: usize, size: usize) {
        let known = self.known_parts(address, size);
        self.forget_reached(address, size);
        for (start, end) in known {
            self.keep_known(start, end - start, true);
        }
    }

    /// Marks a range as unknown because it is freed, or because data without addresses overwrites it. Tables
    /// inside the range are removed.
    pub(crate) fn overwrite(&mut self, address: usize, size: usize) {
        self.forget(address, size);
        self.tables.forget(address, address.saturating_add(size));
    }

    /// Marks all memory as unknown. Unknown flags stay flags, and tables of addresses stay tables.
    pub(crate) fn forget_all(&mut self) {
        self.known.clear();
        self.answered.clear();
        self.links.clear();
        self.expected.iter_mut().for_each(|ranges| ranges.clear());
        self.results.clear();
        self.computed.clear();
        self.nonzero_fractions.clear();
    }

    /// Records that other processes may write to a range from now on.
    pub(crate) fn mark_shared(&mut self, address: usize, size: usize) {
        self.forget(address, size);
        self.shared.add(address, address + size);
    }

    /// Forgets everything about a range that is freed.
    pub(crate) fn free(&mut self, address: usize, size: usize) {
        self.overwrite(address, size);
        self.shared.remove(address, address.saturating_add(size));
    }

    /// Marks a range as unknown flags.
    pub(crate) fn set_mask(&mut self, address: usize, size: usize) {
        self.forget(address, size);
        self.masks.add(address, address + size);
    }

    /// Marks the unknown parts of a range as unknown flags.
    pub(crate) fn add_mask(&mut self, address: usize, size: usize) {
        self.masks.add(address, address + size);
    }

    /// Returns true if a range holds unknown flags.
    pub(crate) fn is_mask(&self, address: usize, size: usize) -> bool {
        self.masks.contains(address, address + size)
    }

    /// Marks the flags at `to` as unknown flags that are a copy of the flags at `from`, or their opposite if
    /// `is_opposite` is true.
    pub(crate) fn link_mask(&mut self, from: usize, to: usize, size: usize, is_opposite: bool) {
        self.set_mask(to, size);
        self.links.add(from, to, size, is_opposite);
    }

    /// Returns the addresses of the flags that depend on a range's flags, and whether they are the opposite.
    pub(crate) fn linked(&self, address: usize, size: usize) -> Vec<(usize, bool)> {
        self.links.linked(address, size)
    }

    /// Returns true if every byte of a range is known.
    pub(crate) fn is_known(&self, address: usize, size: usize) -> bool {
        self.known.contains(address, address + size)
    }

    /// Returns the start and the end of each known part of a range.
    pub(crate) fn known_parts(&self, address: usize, size: usize) -> Vec<(usize, usize)> {
        self.known.parts(address, address + size)
    }

    /// Returns the start and the end of each part of a range that holds an answer.
    pub(crate) fn answered_parts(&self, address: usize, size: usize) -> Vec<(usize, usize)> {
        self.answered.parts(address, address + size)
    }

    /// Marks a range of unknown flags as expected to be all false, or all true.
    pub(crate) fn expect(&mut self, address: usize, size: usize, flag: bool) {
        self.expected.iter_mut().for_each(|ranges| ranges.remove(address, address + size));
        self.expected[usize::from(flag)].add(address, address + size);
    }

    /// Returns the value that all flags of a range are expected to have, if it is one value.
    pub(crate) fn expected(&self, address: usize, size: usize) -> Option<bool> {
        let contains = |flag: bool| self.expected[usize::from(flag)].contains(address, address + size);
        [false, true].into_iter().find(|&flag| contains(flag))
    }

    /// Sets the fraction of nonzero elements in a range.
    pub(crate) fn set_nonzero_fraction(&mut self, address: usize, size: usize, fraction: f64) {
        self.forget(address, size);
        self.nonzero_fractions.insert(address, (address + size, fraction));
    }

    /// Returns the fraction of nonzero elements in a range, or in a range that contains it.
    pub(crate) fn nonzero_fraction(&self, address: usize, size: usize) -> Option<f64> {
        let (_, &(end, fraction)) = self.nonzero_fractions.range(..=address).next_back()?;
        (address + size <= end).then_some(fraction)
    }

    /// Stores the assumed result of a kernel.
    pub(crate) fn set_result(&mut self, address: usize, value: u64) {
        self.set_count(address, value, false);
    }

    /// Stores the result of a kernel that counts. `is_computed` is true if it follows from known values.
    pub(crate) fn set_count(&mut self, address: usize, value: u64, is_computed: bool) {
        self.results.insert(address, value);
        if is_computed {
            self.computed.insert(address);
        } else {
            self.computed.remove(&address);
        }
    }

    /// Returns the assumed result that a kernel left at an address.
    pub(crate) fn result(&self, address: usize) -> Option<u64> {
        self.results.get(&address).copied()
    }

    /// Adds the targets of the tables that overlap a range.
    pub(crate) fn targets(&self, start: usize, end: usize, targets: &mut Targets) {
        self.tables.collect(start, end, targets);
    }

    /// Returns the result of a read by the host. Counts the read if its value is invented.
    pub(crate) fn read(&mut self, address: usize, size: usize) -> HostRead {
        let is_known = self.is_known(address, size);
        if is_known && self.answered_parts(address, size).is_empty() {
            return HostRead::Bytes;
        }
        if let Some(value) = self.result(address).filter(|_| size <= 8 && self.computed.contains(&address)) {
            return HostRead::Number(value);
        }
        // An op that counts reads its count, whatever the kernels are that made it.
        let count = running_ops::count().filter(|_| matches!(size, 4 | 8) && !is_known);
        if let Some(count) = count.filter(|count| count.is_computed) {
            return HostRead::Number(count.number);
        }
        if running_ops::acts() {
            ACTED_READS.fetch_add(1, Ordering::Relaxed);
        }
        INVENTED_READS.fetch_add(1, Ordering::Relaxed);
        INVENTED_BYTES.fetch_add(size as u64, Ordering::Relaxed);
        let value = self.result(address).filter(|_| size <= 8);
        let value = value.or(count.map(|count| count.number)).unwrap_or(0);
        match loop_guard::read(address, size, value) {
            Verdict::Stop => HostRead::Stop,
            Verdict::Flag if value == 0 => HostRead::Number(1),
            _ if is_known => HostRead::Bytes,
            Verdict::Flag | Verdict::Continue if value != 0 => HostRead::Number(value),
            _ if size > 1 && self.is_mask(address, size) => HostRead::Mask,
            _ => HostRead::Invented,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_written_range_is_known_until_it_is_overwritten() {
        let mut values = KnownValues::default();
        values.mark_known(100, 50);
        values.mark_known(150, 10);
        assert!(values.is_known(110, 45));
        assert!(!values.is_known(110, 51));
        values.forget(159, 1);
        assert!(values.is_known(110, 45) && !values.is_known(150, 10));
        values.forget_all();
        assert!(!values.is_known(110, 1));
    }

    #[test]
    fn a_mask_whose_answer_was_read_is_still_a_mask() {
        let mut values = KnownValues::default();
        values.set_mask(100, 8);
        values.mark_answered(100, 8, None);
        assert!(values.is_known(100, 8) && values.is_mask(100, 8));
        values.forget_reached(100, 8);
        assert!(!values.is_known(100, 8) && values.is_mask(100, 8));
    }

    #[test]
    fn forgetting_the_middle_of_a_known_range_keeps_both_ends() {
        let mut values = KnownValues::default();
        values.mark_known(0, 100);
        values.forget(40, 20);
        assert!(values.is_known(0, 40) && values.is_known(60, 40));
        assert!(!values.is_known(39, 2));
        values.mark_known(30, 40);
        assert!(values.is_known(0, 100));
    }

    #[test]
    fn known_neighbours_are_one_range() {
        let mut values = KnownValues::default();
        values.mark_known(10, 10);
        values.mark_known(12, 2);
        values.mark_known(20, 5);
        values.mark_known(5, 5);
        assert_eq!(values.known_parts(0, 100), [(5, 25)]);
        assert_eq!(values.known_parts(7, 10), [(7, 17)]);
    }

    #[test]
    fn the_known_parts_of_a_range_are_listed() {
        let mut values = KnownValues::default();
        values.mark_known(10, 10);
        values.mark_known(30, 10);
        assert_eq!(values.known_parts(0, 100), [(10, 20), (30, 40)]);
        assert_eq!(values.known_parts(15, 20), [(15, 20), (30, 35)]);
        assert_eq!(values.known_parts(10, 5), [(10, 15)]);
        assert_eq!(values.known_parts(20, 10), []);
    }

    #[test]
    fn a_kernel_result_is_read_until_it_is_overwritten() {
        let mut values = KnownValues::default();
        values.set_result(64, 7);
        assert_eq!(values.read(64, 8), HostRead::Number(7));
        values.forget(64, 4);
        assert_eq!(values.read(64, 8), HostRead::Invented);
    }

    #[test]
    fn unknown_flags_are_a_mask_until_they_are_overwritten() {
        let mut values = KnownValues::default();
        values.set_mask(1000, 100);
        assert_eq!(values.read(1010, 90), HostRead::Mask);
        assert_eq!(values.read(1010, 91), HostRead::Invented);
        values.mark_known(1000, 100);
        assert_eq!(values.read(1010, 90), HostRead::Bytes);
        values.forget(1000, 1);
        assert_eq!(values.read(1000, 100), HostRead::Invented);
    }

    #[test]
    fn an_answer_is_read_again_until_it_is_overwritten() {
        let mut values = KnownValues::default();
        values.set_mask(1000, 10);
        values.link_mask(1000, 2000, 10, true);
        assert_eq!(values.linked(1000, 10), [(2000, true)]);
        values.mark_answered(1000, 10, None);
        assert_eq!(values.linked(2000, 10), []);
        assert_eq!(values.read(1000, 10), HostRead::Bytes);
        assert!(values.is_known(1000, 10));
        values.mark_answered(3000, 8, Some(5));
        assert_eq!((values.read(3000, 8), values.result(3000)), (HostRead::Bytes, Some(5)));
        values.forget_reached(3000, 1);
        assert_eq!((values.read(3000, 8), values.result(3000)), (HostRead::Invented, None));
    }

    #[test]
    fn a_known_value_that_a_kernel_may_have_rewritten_is_read_as_an_answer() {
        let mut values = KnownValues::default();
        values.mark_known(4000, 8);
        assert_eq!(values.read(4000, 8), HostRead::Bytes);
        values.mark_rewritten(3000, 2000);
        assert_eq!(values.read(4000, 8), HostRead::Bytes);
        assert_eq!(values.answered_parts(3000, 2000), [(4000, 4008)]);
        assert!(!values.is_known(3992, 8));
    }

    #[test]
    fn memory_that_another_process_may_write_stays_unknown_until_it_is_freed() {
        let mut values = KnownValues::default();
        values.mark_known(0, 100);
        values.mark_shared(40, 20);
        assert!(values.is_known(0, 40) && !values.is_known(40, 1));
        values.mark_known(0, 100);
        assert!(values.is_known(60, 40) && !values.is_known(40, 1) && !values.is_known(59, 1));
        values.free(40, 20);
        values.mark_known(0, 100);
        assert!(values.is_known(0, 100));
    }
}
