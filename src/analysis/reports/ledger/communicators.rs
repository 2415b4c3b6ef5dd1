//! Reads the names of NCCL's communicators from the texts of a trace.

use memtrace_trace::communicator::parse_communicator;
use rustc_hash::FxHashMap;

/// The group of each communicator, by number.
#[derive(Default)]
pub(super) struct Communicators(FxHashMap<u32, String>);

impl Communicators {
    /// Stores the group of a communicator if the mark names one.
    pub(super) fn feed(&mut self, mark: &str) {
        if let Some((number, group)) = parse_communicator(mark) {
            self.0.insert(number, group.to_owned());
        }
    }

    /// Returns the name of the communicator that holds `library`'s memory in a row with this text. Returns
    /// `None` if the text names no communicator.
    pub(super) fn holder(&self, library: &str, text: &str) -> Option<String> {
        let (number, rank) = parse_communicator(text)?;
        let what = self.0.get(&number).map_or(rank, String::as_str);
        Some(format!("{library} {number}: {what}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ledger_names_a_communicator_by_its_group_or_else_by_its_rank() {
        let mut known = Communicators::default();
        for mark in ["communicator 2: mesh_tp, 8 ranks, 8 on this node", "communicator x: y", "epoch 2", ""] {
            known.feed(mark);
        }
        let of = |text| known.holder("NCCL", text);
        assert_eq!(of("communicator 2: rank 0 of 8").unwrap(), "NCCL 2: mesh_tp, 8 ranks, 8 on this node");
        assert_eq!(of("communicator 1: rank 0 of 64").unwrap(), "NCCL 1: rank 0 of 64");
        assert_eq!([of(""), of("(none)"), of("communicator 4294967296: a")], [None, None, None]);
    }
}
