//! Names the code that allocated the CPU tensors and the pinned memory of a process.

use std::collections::BTreeMap;

use memtrace_trace::host::parts::{CPU_TENSORS, PINNED, of_tensors};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use crate::error::Result;
use crate::options::{Options, Window};
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::Symbol;
use crate::state::categories::KnownCategories;
use crate::state::group::Key;
use crate::state::host_memory::HostMemory;
use crate::state::replay::{self, Block, CPU, HOST, Metric, Replay};
use crate::state::replay_trace::replay_until;

/// The maximum number of lines that are named, and the least share of the bytes that each has.
const MOST_LINES: usize = 2;
const LEAST_SHARE: f64 = 0.1;

/// Code that allocated memory.
pub(super) struct Allocated {
    /// A line of Python and its function; without a line, the op.
    at: String,
    /// The bytes of this code; `None` for pinned memory, which torch's allocator shares between requests.
    bytes: Option<i64>,
}

/// The bytes of each part of the host's memory that the trace has rows for, by the code that allocated it. The
/// code is an empty text where it is unknown.
#[derive(Default)]
pub(super) struct HostOwners {
    parts: BTreeMap<&'static str, BTreeMap<String, i64>>,
}

impl HostOwners {
    /// Returns the owners at each of `times`, which must be in order.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn read(
        trace: &TraceFile,
        memory: &HostMemory,
        times: &[i64],
        options: &Options,
    ) -> Result<Vec<HostOwners>> {
        if !memory.has_allocations {
            return Ok(times.iter().map(|_| HostOwners::default()).collect());
        }
        let whole = Options { window: Window::default(), ..options.clone() };
        let by_line = Key::LINE.on(trace);
        let mut found = Vec::with_capacity(times.len());
        let stop = |row: &Record, replay: &Replay| {
            while times.get(found.len()).is_some_and(|ns| row.ts_ns > *ns) {
                found.push(HostOwners::of_live(replay, &by_line));
            }
            found.len() == times.len()
        };
        let wanted = replay::COLUMNS.and(by_line.columns()).and(Columns::of(&["ts_ns"]));
        let known = KnownCategories::default();
        let replayed = replay_until(trace, wanted, &whole, Metric::Allocated, known, stop, |_, _| {})?;
        while found.len() < times.len() {
            found.push(HostOwners::of_live(&replayed.replay, &by_line));
        }
        Ok(found)
    }

    fn of_live(replay: &Replay, by_line: &Key) -> HostOwners {
        // There are far fewer stacks than blocks, so sum by stack and op first.
        let mut sums: FxHashMap<(&'static str, i64, Symbol), (Block, i64)> = FxHashMap::default();
        for block in [CPU, HOST].into_iter().flat_map(|ordinal| replay.live_on(ordinal, true)) {
            let part = if block.device == HOST { PINNED } else { of_tensors(block.owner.category) };
            sums.entry((part, block.stack, block.owner.op)).or_insert((block, 0)).1 += block.bytes;
        }
        let mut owners = HostOwners::default();
        for ((part, ..), (block, bytes)) in sums {
            let mut names = [by_line, &Key::OP].map(|key| key.group_of(&block, &replay.symbols)).into_iter();
            // Names in parentheses stand for what is unknown.
            let code = names.find(|name| !name.starts_with('(')).unwrap_or_default();
            *owners.parts.entry(part).or_default().entry(code).or_default() += bytes;
        }
        owners
    }

    /// Returns the code that allocated most of a part; empty for a part whose code is unknown.
    pub(super) fn largest_in(&self, part: &str) -> Vec<Allocated> {
        self.parts.get(part).map_or_else(Vec::new, |owners| largest(owners, part != PINNED))
    }

    /// Returns the bytes of CPU tensors by code, of all categories.
    fn tensors(&self) -> BTreeMap<String, i64> {
        let mut all: BTreeMap<String, i64> = BTreeMap::new();
        let parts = self.parts.iter().filter(|(part, _)| part.starts_with(CPU_TENSORS));
        for (code, bytes) in parts.flat_map(|(_, owners)| owners) {
            *all.entry(code.clone()).or_default() += bytes;
        }
        all
    }

    /// Returns the growth of all CPU tensors since an earlier moment in bytes, and the code whose tensors grew.
    pub(super) fn tensors_since(&self, earlier: &HostOwners) -> (i64, Vec<Allocated>) {
        let (mut grown, before) = (self.tensors(), earlier.tensors());
        for (code, bytes) in before {
            *grown.entry(code).or_default() -= bytes;
        }
        let growth = grown.values().sum();
        grown.retain(|_, bytes| *bytes > 0);
        (growth, largest(&grown, true))
    }
}

fn largest(owners: &BTreeMap<String, i64>, with_bytes: bool) -> Vec<Allocated> {
    let total: i64 = owners.values().sum();
    let is_large = |bytes: i64| bytes > 0 && bytes as f64 >= total as f64 * LEAST_SHARE;
    let mut largest: Vec<(&String, i64)> = owners
        .iter()
        .map(|(code, bytes)| (code, *bytes))
        .filter(|(code, bytes)| !code.is_empty() && is_large(*bytes))
        .collect();
    largest.sort_by_key(|(code, bytes)| (-bytes, *code));
    let named =
        |(code, bytes): (&String, i64)| Allocated { at: code.clone(), bytes: with_bytes.then_some(bytes) };
    largest.into_iter().take(MOST_LINES).map(named).collect()
}

/// Describes code that allocated memory: `allocated at load.py:12 read (1.05 GiB)`. Returns `None` without any.
pub(super) fn allocated_at(owners: &[Allocated], options: &Options) -> Option<String> {
    let show = |owner: &Allocated| match owner.bytes {
        Some(bytes) => format!("{} ({})", owner.at, options.units.show(bytes)),
        None => owner.at.clone(),
    };
    let named: Vec<String> = owners.iter().map(show).collect();
    (!named.is_empty()).then(|| format!("allocated at {}", named.join(", ")))
}

pub(super) fn allocated_json(owners: &[Allocated]) -> Value {
    owners.iter().map(|owner| json!({ "at": owner.at, "bytes": owner.bytes })).collect()
}
