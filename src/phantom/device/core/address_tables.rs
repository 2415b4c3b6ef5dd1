//! Memory of one device that may hold device addresses.
//!
//! A kernel writes to the addresses in its parameters, or to addresses that it loads from memory. In the
//! second case the address is in memory because the host copied it there or a kernel stored it. A range that
//! holds addresses is a *table*, and a kernel that reaches the table reaches its targets.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The number of tables of all devices. It is 0 in most programs, and then [`exist`] spares all work for
/// tables.
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The maximum number of targets. If there are more, every address counts as a target.
const MAX_TARGETS: usize = 1024;

/// Returns true if any device has a table.
pub(crate) fn exist() -> bool {
    COUNT.load(Ordering::Relaxed) != 0
}

/// The addresses that a range may hold.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Targets {
    /// The addresses, sorted and without duplicates.
    addresses: Vec<usize>,
    /// True if the range may hold any address, because there are too many to list.
    any: bool,
}

impl Targets {
    /// Returns an empty set of targets.
    pub(crate) const fn new() -> Self {
        Self { addresses: Vec::new(), any: false }
    }

    /// Adds an address. With more than [`MAX_TARGETS`] addresses, any address counts as possible.
    pub(crate) fn add(&mut self, address: usize) {
        if let Err(place) = self.addresses.binary_search(&address) {
            self.addresses.insert(place, address);
            self.limit();
        }
    }

    /// Records that any address is possible.
    pub(crate) fn add_any(&mut self) {
        self.any = true;
        self.limit();
    }

    /// Adds the targets of another set.
    pub(crate) fn add_all(&mut self, other: &Self) {
        if other.is_empty() {
            return;
        }
        self.any |= other.any;
        self.addresses.extend_from_slice(&other.addresses);
        self.addresses.sort_unstable();
        self.addresses.dedup();
        self.limit();
    }

    fn limit(&mut self) {
        self.any |= self.addresses.len() > MAX_TARGETS;
        if self.any {
            self.addresses = Vec::new();
        }
    }

    /// Returns true if there are no targets.
    pub(crate) fn is_empty(&self) -> bool {
        self.addresses.is_empty() && !self.any
    }

    /// Returns the addresses, or `None` if any address is possible.
    pub(crate) fn addresses(&self) -> Option<&[usize]> {
        (!self.any).then_some(&self.addresses)
    }
}

/// The tables of one device: the end and the targets of each table, by its start. Tables never overlap.
#[derive(Debug, Default)]
pub(crate) struct AddressTables(BTreeMap<usize, (usize, Targets)>);

impl AddressTables {
    /// Makes a range a table. If the range overlaps other tables, all of them become one table with the
    /// targets of all.
    pub(crate) fn add(&mut self, start: usize, end: usize, targets: &Targets) {
        let (mut start, mut end, mut all) = (start, end, targets.clone());
        while let Some((&first, (stop, old))) = self.0.range(..end).next_back()
            && *stop > start
        {
            all.add_all(old);
            (start, end) = (start.min(first), end.max(*stop));
            self.remove(first);
        }
        self.0.insert(start, (end, all));
        COUNT.fetch_add(1, Ordering::Relaxed);
    }

    fn remove(&mut self, start: usize) {
        if self.0.remove(&start).is_some() {
            COUNT.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Removes the tables inside a range that was overwritten or freed. A table that extends beyond the range
    /// stays.
    pub(crate) fn forget(&mut self, start: usize, end: usize) {
        let gone: Vec<_> =
            self.0.range(start..end).filter(|(_, (stop, _))| *stop <= end).map(|(&first, _)| first).collect();
        for first in gone {
            self.remove(first);
        }
    }

    /// Adds the targets of the tables that overlap a range.
    pub(crate) fn collect(&self, start: usize, end: usize, targets: &mut Targets) {
        for (_, (stop, found)) in self.0.range(..end).rev() {
            if *stop <= start {
                break;
            }
            targets.add_all(found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn targets(addresses: &[usize]) -> Targets {
        let mut all = Targets::default();
        addresses.iter().for_each(|&address| all.add(address));
        all
    }

    #[test]
    fn overlapping_tables_join_and_a_part_that_is_overwritten_keeps_the_rest() {
        let mut tables = AddressTables::default();
        tables.add(100, 200, &targets(&[7]));
        tables.add(300, 400, &targets(&[9]));
        let collected = |tables: &AddressTables, start, end| {
            let mut all = Targets::default();
            tables.collect(start, end, &mut all);
            all
        };
        assert_eq!(collected(&tables, 150, 160), targets(&[7]));
        assert!(collected(&tables, 200, 300).is_empty());
        tables.add(150, 350, &targets(&[8]));
        assert_eq!(collected(&tables, 390, 391), targets(&[7, 8, 9]));
        tables.forget(100, 300);
        assert_eq!(collected(&tables, 100, 101), targets(&[7, 8, 9]));
        tables.forget(100, 400);
        assert!(collected(&tables, 0, 1000).is_empty());
    }

    #[test]
    fn a_table_with_very_many_targets_may_reach_any_address() {
        let all = targets(&(0..MAX_TARGETS).map(|index| index * 8).collect::<Vec<_>>());
        assert!(all.addresses().is_some());
        let mut more = all.clone();
        more.add(1);
        assert!(more.addresses().is_none() && !more.is_empty());
        let mut joined = Targets::default();
        joined.add_all(&more);
        assert!(joined.addresses().is_none());
    }
}
