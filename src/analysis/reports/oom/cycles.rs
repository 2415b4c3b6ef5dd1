//! How much further memory rose after the same request of the previous forward and backward.
//!
//! A program without an optimizer, or one that accumulates gradients, runs several forwards and backwards in one
//! step. What the previous one took after a request predicts what this one has yet to take.

use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;

use crate::read::record::Record;
use crate::read::symbols::Symbol;
use crate::state::replay::Replay;

/// The maximum number of requests of one cycle. A longer cycle predicts nothing.
const MOST: usize = 500_000;

/// The device, the op, the module and the phase of a request.
type Place = (i32, Symbol, Symbol, Symbol);

/// The allocated bytes after a request, and the maximum from there to the end of its cycle.
#[derive(Clone, Copy, Debug)]
struct Rise {
    after: i64,
    most: i64,
}

/// The requests of the current forward and backward, and the rises of the previous one.
#[derive(Default)]
pub(super) struct Cycles {
    requests: Vec<(Place, i64)>,
    has_backward: bool,
    previous: FxHashMap<Place, Rise>,
    /// The number of cycles that have ended.
    pub(super) ended: u64,
    module_api: Option<Symbol>,
}

impl Cycles {
    /// Processes a row that the replay has already processed.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        if replay.phase == replay.phases.backward {
            self.has_backward = true;
        } else if row.event == EventName::RangeBegin && self.has_backward {
            let module_api =
                *self.module_api.get_or_insert_with(|| replay.symbols.intern(Api::Module.as_str()));
            if row.api == module_api && !replay.symbols.get(row.name).contains('.') {
                self.end();
            }
        }
        if row.event == EventName::Alloc && row.status == 0 && self.requests.len() <= MOST {
            self.requests.push((place_of(row), row.allocated_bytes));
        }
    }

    fn end(&mut self) {
        self.previous.clear();
        let is_whole = self.requests.len() <= MOST;
        let mut most: FxHashMap<i32, i64> = FxHashMap::default();
        for (place, after) in self.requests.drain(..).rev().filter(|_| is_whole) {
            let most = most.entry(place.0).or_default();
            *most = after.max(*most);
            // A place with several requests predicts the largest rise.
            let rise = self.previous.entry(place).or_insert(Rise { after, most: *most });
            if *most - after > rise.most - rise.after {
                *rise = Rise { after, most: *most };
            }
        }
        self.has_backward = false;
        self.ended += 1;
    }

    /// Returns an estimate of the bytes by which memory rises after a failed request that would have left `now`
    /// bytes allocated: in proportion to the same request of the previous cycle. Returns `None` if the previous
    /// cycle had no such request.
    pub(super) fn rise_after(&self, failed: &Record, now: i64) -> Option<i64> {
        let Rise { after, most } = *self.previous.get(&place_of(failed))?;
        let more = i128::from(most - after) * i128::from(now.max(0)) / i128::from(after.max(1));
        i64::try_from(more).ok()
    }
}

fn place_of(row: &Record) -> Place {
    (row.device, row.op, row.module, row.phase)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::memory::Metric;

    use super::*;
    use crate::options::Window;
    use crate::read::symbols::SymbolTable;

    #[test]
    fn oom_predicts_the_rest_of_a_forward_and_backward_from_the_previous_one() {
        let symbols = SymbolTable::default();
        let mut replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        let mut cycles = Cycles::default();
        let forward = symbols.intern("forward");
        let request = |op: &str, bytes: i64| Record {
            event: EventName::Alloc,
            op: symbols.intern(op),
            allocated_bytes: bytes,
            ..Record::default()
        };
        let begins = Record {
            event: EventName::RangeBegin,
            api: symbols.intern(Api::Module.as_str()),
            name: symbols.intern("Net"),
            ..Record::default()
        };
        for _ in 0..2 {
            replay.phase = forward;
            cycles.feed(&begins, &replay);
            cycles.feed(&request("mm", 100), &replay);
            replay.phase = replay.phases.backward;
            for (op, bytes) in [("grad", 150), ("grad", 200), ("last", 120)] {
                cycles.feed(&request(op, bytes), &replay);
            }
        }
        assert_eq!((cycles.ended, cycles.rise_after(&request("mm", 0), 150)), (1, Some(150)));
        // The larger of two rises, no rise, and a request that the previous cycle did not make.
        assert_eq!(cycles.rise_after(&request("grad", 0), 300), Some(100));
        assert_eq!(cycles.rise_after(&request("last", 0), 300), Some(0));
        assert_eq!(cycles.rise_after(&request("other", 0), 300), None);
    }
}
