//! Counts the forwards of a program's models before each backward.

use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

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
            for (range, begun) in self.begun.drain() {
                let most = self.before_backward.entry(range).or_default();
                *most = (*most).max(begun.count);
            }
            self.has_backward = true;
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

    /// Returns the forwards of the root module that was called most often since the last backward.
    pub(super) fn since_backward(&self, symbols: &SymbolTable) -> Begun {
        let roots = self.begun.iter().filter(|(range, _)| is_root(range, symbols));
        roots.map(|(_, begun)| *begun).max_by_key(|begun| begun.count).unwrap_or_default()
    }

    /// Returns the maximum number of forwards of a root module before a backward; 0 if no backward ran.
    pub(super) fn usual(&self, symbols: &SymbolTable) -> u64 {
        let roots = self.before_backward.iter().filter(|(range, _)| is_root(range, symbols));
        roots.map(|(_, count)| *count).max().unwrap_or(0)
    }
}

fn is_root((api, name): &Range, symbols: &SymbolTable) -> bool {
    *symbols.get(*api) == *Api::Module.as_str() && !symbols.get(*name).contains('.')
}
