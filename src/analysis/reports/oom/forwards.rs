//! Counts the forwards of a program's models before each backward.

use memtrace_trace::{Api, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::replay::Replay;

/// The API and the name of a range.
type Range = (Symbol, Symbol);

/// The number of times that each range began since the last backward, and the maximum of this number before
/// earlier backwards.
#[derive(Default)]
pub(super) struct Forwards {
    begun: FxHashMap<Range, Begun>,
    /// The maximum number of times that each range began before a backward.
    before_backward: FxHashMap<Range, u64>,
    /// True if a backward has run.
    pub(super) has_backward: bool,
}

/// The number of times that a range began, and the allocated bytes at its first and last beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Begun {
    pub(super) count: u64,
    first: i64,
    last: i64,
}

impl Begun {
    /// Returns the bytes that the calls of the range have left allocated, not counting the last call.
    pub(super) fn left(&self) -> i64 {
        self.last - self.first
    }
}

impl Forwards {
    /// Processes a row that the replay has already processed.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if replay.phase == replay.phases.backward {
            self.has_backward = true;
            // Most rows of a backward find the table empty. Draining an empty table would still clear it.
            if self.begun.is_empty() {
                return;
            }
            for (range, begun) in self.begun.drain() {
                let most = self.before_backward.entry(range).or_default();
                *most = (*most).max(begun.count);
            }
        } else if row.event == EventName::RangeBegin {
            let last: i64 = replay.devices().iter().map(|device| device.totals.allocated).sum();
            let begun =
                self.begun.entry((row.api, row.name)).or_insert(Begun { count: 0, first: last, last });
            *begun = Begun { count: begun.count + 1, last, ..*begun };
        }
    }

    /// Returns the number of root modules that were called since the last backward.
    pub(super) fn roots(&self, symbols: &SymbolTable) -> usize {
        self.begun.keys().filter(|range| is_root(range, symbols)).count()
    }

    /// Returns the forwards of the outermost module that was called most often since the last backward.
    pub(super) fn since_backward(&self, symbols: &SymbolTable) -> Begun {
        let name = |range: &Range| symbols.get(range.1).to_string();
        let most = outermost(&self.begun, symbols)
            .into_iter()
            .max_by_key(|(range, begun)| (begun.count, begun.left(), name(range)));
        most.map(|(_, begun)| *begun).unwrap_or_default()
    }

    /// Returns the maximum number of forwards of an outermost module before a backward; 0 if no backward ran.
    pub(super) fn usual(&self, symbols: &SymbolTable) -> u64 {
        outermost(&self.before_backward, symbols).into_iter().map(|(_, count)| *count).max().unwrap_or(0)
    }
}

/// Returns what belongs to the roots and, for each root that was not called, its outermost called modules with parts: a
/// script may call methods of a model other than its forward. A module without parts, such as a recurrent cell, runs
/// many times in one forward.
fn outermost<'a, T>(of: &'a FxHashMap<Range, T>, symbols: &SymbolTable) -> Vec<(&'a Range, &'a T)> {
    let is_module = |range: &Range| *symbols.get(range.0) == *Api::Module.as_str();
    let called: FxHashSet<String> =
        of.keys().filter(|range| is_module(range)).map(|range| symbols.get(range.1).to_string()).collect();
    let parents: FxHashSet<&str> = called.iter().filter_map(|path| Some(path.rsplit_once('.')?.0)).collect();
    let is_outermost = |path: &str| {
        let is_inside = path.match_indices('.').any(|(dot, _)| called.contains(&path[..dot]));
        !is_inside && (!path.contains('.') || parents.contains(path))
    };
    of.iter().filter(|(range, _)| is_module(range) && is_outermost(&symbols.get(range.1))).collect()
}

fn is_root((api, name): &Range, symbols: &SymbolTable) -> bool {
    *symbols.get(*api) == *Api::Module.as_str() && !symbols.get(*name).contains('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oom_counts_forwards_of_the_outermost_modules() {
        let symbols = SymbolTable::default();
        let of = |calls: &[(&str, u64)]| {
            let range = |path: &str| (symbols.intern(Api::Module.as_str()), symbols.intern(path));
            let before_backward = calls.iter().map(|(path, count)| (range(path), *count)).collect();
            Forwards { before_backward, ..Forwards::default() }.usual(&symbols)
        };
        // A method of the model calls its parts.
        assert_eq!(of(&[("Agent.network", 64), ("Agent.network.0", 64), ("Agent.critic", 64)]), 64);
        // A recurrent cell; a model with a layer that runs several times.
        assert_eq!(of(&[("Net.cell", 99), ("Net.out", 1)]), 0);
        assert_eq!(of(&[("Net", 1), ("Net.shared", 12), ("Net.shared.0", 12)]), 1);
    }
}
