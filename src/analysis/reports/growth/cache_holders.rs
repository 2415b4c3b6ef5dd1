//! Finds what holds cached memory and memory outside PyTorch when the last step begins.

use std::collections::BTreeMap;

use memtrace_trace::{Category, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use super::changes::Change;
use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::reports::ledger::library;
use crate::state::layout::{self, Layout};
use crate::state::replay::Replay;
use crate::state::replay_trace::Replayed;

/// The distribution of the free memory in the allocator's segments, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FreePlaces {
    /// All free memory.
    pub(super) all: i64,
    /// The free memory in the private pools of CUDA graphs, and the number of these pools.
    pub(super) graphs: (i64, usize),
    /// The free memory in other private pools, and the number of these pools.
    pub(super) pools: (i64, usize),
    /// The free memory outside private pools on all streams except the stream with the most reserved bytes,
    /// and the number of these streams.
    pub(super) streams: (i64, usize),
}

/// Tracks the allocator's segments and the memory outside PyTorch until the last step begins.
#[derive(Default)]
pub(crate) struct Holders {
    layout: Layout,
    graph_pools: FxHashSet<i64>,
    /// The live memory outside PyTorch.
    libraries: Libraries,
    /// A copy of `libraries` from its highest total so far, or from a total at most a twentieth lower. It is
    /// made when memory is freed, because a program that ends well destroys its communicators before the
    /// trace ends.
    most_libraries: Libraries,
}

/// Live memory that libraries allocated with CUDA directly, by `alloc_id`.
#[derive(Clone, Default)]
struct Libraries {
    bytes: i64,
    taken: FxHashMap<i64, Taken>,
}

/// The memory that one call allocated.
#[derive(Clone, Copy)]
struct Taken {
    device: i32,
    step: i64,
    bytes: i64,
    library: Symbol,
    /// The purpose of the memory, such as a communicator; [`Symbol::NONE`] if unknown.
    user: Symbol,
}

impl Holders {
    /// The columns that [`Holders::feed`] needs.
    pub(crate) const COLUMNS: Columns = layout::COLUMNS.and(Columns::of(&["source", "name"]));

    /// Processes a row that the replay has already processed.
    pub(crate) fn feed(&mut self, row: &Record, replay: &Replay) {
        self.layout.feed(row);
        match row.event {
            EventName::Alloc if row.category == Category::CudaGraph && row.pool != 0 => {
                self.graph_pools.insert(row.pool);
            }
            EventName::ExtAlloc if row.alloc_id != 0 => {
                let bytes = row.delta_bytes;
                let Record { device, step, source: library, name: user, .. } = *row;
                self.libraries.bytes += bytes;
                self.libraries.taken.insert(row.alloc_id, Taken { device, step, bytes, library, user });
            }
            EventName::ExtFree if !replay.live().contains(row.alloc_id) => {
                if self.libraries.bytes > self.most_libraries.bytes + self.most_libraries.bytes / 20 {
                    self.most_libraries = self.libraries.clone();
                }
                if let Some(taken) = self.libraries.taken.remove(&row.alloc_id) {
                    self.libraries.bytes -= taken.bytes;
                }
            }
            _ => {}
        }
    }

    /// Returns the distribution of the free memory of a device.
    pub(super) fn free_places(&self, replayed: &Replayed, ordinal: i32) -> FreePlaces {
        let mut places = FreePlaces::default();
        let mut by_stream: BTreeMap<i64, (i64, i64)> = BTreeMap::new();
        let (mut graphs, mut pools) = (FxHashSet::default(), FxHashSet::default());
        for segment in self.layout.segments(&replayed.replay, ordinal) {
            let free = segment.free();
            places.all += free;
            if self.graph_pools.contains(&segment.pool) {
                places.graphs.0 += free;
                graphs.insert(segment.pool);
            } else if segment.pool != 0 {
                places.pools.0 += free;
                pools.insert(segment.pool);
            } else {
                let (bytes, free_bytes) = by_stream.entry(segment.stream).or_default();
                *bytes += segment.bytes;
                *free_bytes += free;
            }
        }
        (places.graphs.1, places.pools.1) = (graphs.len(), pools.len());
        let main = by_stream.iter().max_by_key(|(_, (bytes, _))| *bytes).map(|(stream, _)| *stream);
        let side = by_stream.iter().filter(|(stream, (_, free))| Some(**stream) != main && *free > 0);
        places.streams = side.fold((0, 0), |(sum, count), (_, (_, free))| (sum + free, count + 1));
        places
    }

    /// Returns the live memory outside PyTorch that was allocated after step `since`, by library.
    pub(super) fn new_libraries(&self, symbols: &SymbolTable, ordinal: i32, since: i64) -> Vec<Change> {
        // For each library: the bytes, the steps of the allocations, and the purposes.
        let mut found: BTreeMap<String, (i64, Vec<i64>, FxHashSet<Symbol>)> = BTreeMap::new();
        let Holders { libraries, most_libraries, .. } = self;
        let most = if libraries.bytes < most_libraries.bytes { most_libraries } else { libraries };
        let here = most.taken.values().filter(|taken| taken.device == ordinal && taken.step > since);
        for taken in here {
            let (bytes, steps, users) = found.entry(library(&symbols.get(taken.library))).or_default();
            *bytes += taken.bytes;
            steps.push(taken.step);
            if taken.user != Symbol::NONE {
                users.insert(taken.user);
            }
        }
        let change = |(name, (after, steps, users)): (String, (i64, Vec<i64>, FxHashSet<Symbol>))| {
            let what = match users.len() {
                0 | 1 => name,
                many => format!("{name}, {many} communicators"),
            };
            Change::new(what, after, steps)
        };
        found.into_iter().map(change).collect()
    }
}
