//! Names the code that allocated the CPU tensors and the pinned memory of a process.

use std::collections::BTreeMap;

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use super::ledger::host::{CPU_TENSORS, PINNED};
use crate::error::Result;
use crate::options::{Options, Window};
use crate::read::stream::TraceFile;
use crate::read::symbols::NO_OWNER;
use crate::state::categories::KnownCategories;
use crate::state::group::Key;
use crate::state::moment::{NamedMoment, replay_to_moment};
use crate::state::replay::{Block, CPU, HOST};

/// The maximum number of owners that are named, and the least share of a part that each has.
const MOST_OWNERS: usize = 2;
const LEAST_SHARE: f64 = 0.1;

/// The owners of the host's known memory at a moment: for each part, the bytes of each owner. An owner is a
/// Python line; without lines, an op and the ops that called it, or the op alone.
#[derive(Default)]
pub(super) struct HostOwners {
    parts: BTreeMap<String, BTreeMap<String, i64>>,
}

impl HostOwners {
    /// Reads the owners at `ts_ns`.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn read(trace: &TraceFile, ts_ns: i64, options: &Options) -> Result<HostOwners> {
        let whole = Options { window: Window::default(), ..options.clone() };
        let by_line = Key::LINE.on(trace);
        let by_stack = Key::STACK.with_stacks_of(&by_line);
        let keys = [by_line, by_stack, Key::OP];
        let at = NamedMoment::Time(ts_ns);
        let known = KnownCategories::default();
        let replayed = replay_to_moment(trace, &at, Key::LINE.columns(), &whole, known, |_, _| {})?;
        let mut owners = HostOwners::default();
        let Some(replayed) = replayed else { return Ok(owners) };
        // There are far fewer stacks than blocks, so sum by stack first.
        let mut sums: FxHashMap<(String, i64), (Block, i64)> = FxHashMap::default();
        for ordinal in [CPU, HOST] {
            for block in replayed.replay.live_on(ordinal, true) {
                sums.entry((part_of(&block), block.stack)).or_insert((block, 0)).1 += block.bytes;
            }
        }
        for ((part, _), (block, bytes)) in sums {
            let mut names = keys.iter().map(|key| (key.of(&block, &replayed.symbols), key.missing()));
            let known = names.find(|(name, missing)| name != missing);
            let owner = known.map_or_else(|| NO_OWNER.to_owned(), |(name, _)| name);
            *owners.parts.entry(part).or_default().entry(owner).or_default() += bytes;
        }
        Ok(owners)
    }

    /// Returns what these owners hold in addition to those of an earlier moment.
    pub(super) fn since(&self, earlier: &HostOwners) -> HostOwners {
        let mut grown = HostOwners::default();
        for (part, owners) in &self.parts {
            let before = earlier.parts.get(part);
            let of_part = owners.iter().filter_map(|(owner, bytes)| {
                let then = before.and_then(|owners| owners.get(owner)).copied().unwrap_or(0);
                (*bytes > then).then(|| (owner.clone(), bytes - then))
            });
            grown.parts.insert(part.clone(), of_part.collect());
        }
        grown
    }

    /// Returns the sum of each part that is not zero.
    pub(super) fn sums(&self) -> impl Iterator<Item = (&str, i64)> {
        let sums = self.parts.iter().map(|(part, owners)| (part.as_str(), owners.values().sum::<i64>()));
        sums.filter(|(_, bytes)| *bytes != 0)
    }

    /// Names the largest owners of a part, with their bytes: `load.py:12 read (1.05 GiB)`. Returns `None` for
    /// a part whose owners are unknown. Torch's allocator shares pinned memory between requests, so its owners
    /// have no bytes.
    pub(super) fn of(&self, part: &str, options: &Options) -> Option<String> {
        let part = if part.starts_with(PINNED) { PINNED } else { part };
        let owners = self.parts.get(part)?;
        let total: i64 = owners.values().sum();
        let mut largest: Vec<(&String, i64)> = owners.iter().map(|(owner, bytes)| (owner, *bytes)).collect();
        largest.retain(|(_, bytes)| *bytes > 0 && *bytes as f64 >= total as f64 * LEAST_SHARE);
        largest.sort_by_key(|(owner, bytes)| (-bytes, *owner));
        let named: Vec<String> = largest
            .iter()
            .take(MOST_OWNERS)
            .map(|(owner, bytes)| match part {
                PINNED => (*owner).clone(),
                _ => format!("{owner} ({})", options.units.show(*bytes)),
            })
            .collect();
        (!named.is_empty()).then(|| named.join(", "))
    }
}

/// Returns the part of the host's memory to which a block belongs, as the tracer's full samples name it.
fn part_of(block: &Block) -> String {
    match block.owner.category {
        _ if block.device == HOST => PINNED.to_owned(),
        category @ (Category::Parameter
        | Category::Buffer
        | Category::Gradient
        | Category::Activation
        | Category::OptimizerState
        | Category::Input) => format!("{CPU_TENSORS} {}", category.as_str()),
        _ => CPU_TENSORS.to_owned(),
    }
}
