//! The allocated bytes of a step under a change of its blocks, and their peak.

use rustc_hash::FxHashMap;

use super::step::{Allocation, RecordedStep};
use crate::state::block::Owner;
use crate::state::device::Peak;

/// Bytes that are allocated and freed again between two allocations of the trace, so that only a peak can
/// show them.
#[derive(Clone, Copy, Debug)]
struct Spike {
    /// The index of the allocation before which the bytes are allocated and freed.
    at: u32,
    /// The bytes by which the total is higher for this moment.
    bytes: i64,
    owner: Owner,
}

/// The changed blocks of a step. The functions that take a [`RecordedStep`] need that step, or one that is like it
/// ([`RecordedStep::is_like`]).
#[derive(Debug)]
pub(super) struct Curve {
    /// For each block: the new size in bytes.
    pub(super) sizes: Vec<i64>,
    /// For each block whose lifetime changed: the one or two spans in which it lives, each from its birth to
    /// its death.
    moved: FxHashMap<u32, [(u32, u32); 2]>,
    spikes: Vec<Spike>,
    /// The bytes that the change adds to each request that ran out of memory. The key is the number of
    /// allocations before the request.
    failed: FxHashMap<u32, i64>,
    /// Blocks that the run did not have: birth, death, bytes.
    more: Vec<(u32, u32, i64)>,
}

impl Curve {
    /// Creates the curve of a step whose blocks have these sizes.
    pub(super) fn new(sizes: Vec<i64>) -> Curve {
        Curve {
            sizes,
            moved: FxHashMap::default(),
            failed: FxHashMap::default(),
            spikes: Vec::new(),
            more: Vec::new(),
        }
    }

    /// Replaces the lifetime of block `life` by at most two spans. A span that ends before it begins is
    /// empty.
    pub(super) fn set_lives(&mut self, life: u32, spans: &[(u32, u32)]) {
        let mut both = [(0, 0); 2];
        for (place, span) in both.iter_mut().zip(spans.iter().filter(|span| span.0 < span.1)) {
            *place = *span;
        }
        self.moved.insert(life, both);
    }

    /// Grows the request of the allocation `at`, which ran out of memory, by `bytes`.
    pub(super) fn resize_failed(&mut self, at: u32, bytes: i64) {
        self.failed.insert(at, bytes);
    }

    /// Adds a block of `bytes` that lives from the allocation `birth` up to `death`.
    pub(super) fn add_block(&mut self, birth: u32, death: u32, bytes: i64) {
        if birth < death && bytes != 0 {
            self.more.push((birth, death, bytes));
        }
    }

    /// Returns the new spans of a block whose lifetime changed; `None` if the block lives as it did in the
    /// run.
    pub(super) fn spans(&self, life: u32) -> Option<[(u32, u32); 2]> {
        self.moved.get(&life).copied()
    }

    /// Returns the blocks that the run did not have: birth, death, bytes.
    pub(super) fn more(&self) -> impl Iterator<Item = (u32, u32, i64)> {
        self.more.iter().copied()
    }

    /// Returns the memory that is allocated and freed just before an allocation: the index of the allocation,
    /// and the bytes.
    pub(super) fn spikes(&self) -> impl Iterator<Item = (u32, i64)> {
        self.spikes.iter().map(|spike| (spike.at, spike.bytes))
    }

    /// Adds a moment before the allocation `at` at which `bytes` of `owner` are allocated in addition to the
    /// total.
    pub(super) fn add_spike(&mut self, at: u32, bytes: i64, owner: Owner) {
        self.spikes.push(Spike { at, bytes, owner });
    }

    /// Returns the bytes that the change adds to the run's total: one value for each allocation, and one for
    /// the end of the step.
    pub(super) fn differences(&self, step: &RecordedStep) -> Vec<i64> {
        let end = step.end();
        let mut changes = vec![0i64; end as usize + 2];
        let mut add = |from: u32, to: u32, bytes: i64| {
            let (from, to) = (from.min(end + 1) as usize, to.min(end + 1) as usize);
            changes[from] = changes[from].wrapping_add(bytes);
            changes[to] = changes[to].wrapping_sub(bytes);
        };
        for (index, life) in step.lives.iter().enumerate() {
            let moved = if self.moved.is_empty() { None } else { self.moved.get(&(index as u32)) };
            if let Some(spans) = moved {
                add(life.birth, life.death, life.bytes.wrapping_neg());
                spans.iter().for_each(|span| add(span.0, span.1, self.sizes[index]));
            } else if self.sizes[index] != life.bytes {
                add(life.birth, life.death, self.sizes[index].wrapping_sub(life.bytes));
            }
        }
        for (birth, death, bytes) in &self.more {
            add(*birth, *death, *bytes);
        }
        let mut sum = 0;
        for change in &mut changes {
            sum = change.wrapping_add(sum);
            *change = sum;
        }
        changes
    }

    /// Returns the highest total of the allocations in the window, or `None` for an empty window. `differences`
    /// must come from this curve.
    pub(super) fn peak(&self, step: &RecordedStep, differences: &[i64]) -> Option<Peak> {
        let mut peak: Option<Peak> = None;
        let mut raise = |bytes: i64, at: &Allocation, owner: Owner| {
            if at.in_window && peak.is_none_or(|peak| bytes > peak.bytes) {
                peak = Some(Peak { bytes, seq: at.seq, ts_ns: at.ts_ns, owner, untraced: 0 });
            }
        };
        for (at, allocation) in step.allocations.iter().enumerate() {
            let own = if allocation.life.is_some() { None } else { self.failed.get(&(at as u32)) };
            let change = differences[at].wrapping_add(own.copied().unwrap_or(0));
            raise(allocation.allocated.wrapping_add(change), allocation, allocation.owner);
        }
        let Some(last) = step.allocations.last() else { return peak };
        for spike in &self.spikes {
            let before = self.before(step, spike.at, differences);
            let place = step.allocations.get(spike.at as usize).unwrap_or(last);
            let owner = Owner { step: place.owner.step, ..spike.owner };
            raise(before.wrapping_add(spike.bytes), place, owner);
        }
        peak
    }

    /// Returns the total before the allocation `at`, with the change. If there is no such allocation, returns
    /// the total at the end of the step.
    fn before(&self, step: &RecordedStep, at: u32, differences: &[i64]) -> i64 {
        let place = step.allocations.get(at as usize);
        let total = place.map_or(step.end_allocated, |place| place.allocated);
        let own = place.map_or(0, |place| self.own_bytes(at, place));
        total.wrapping_add(differences[at.min(step.end()) as usize]).wrapping_sub(own)
    }

    /// Passes the times and totals of the step to `set`, in order. `differences` must come from this curve.
    pub(super) fn follow(&self, step: &RecordedStep, differences: &[i64], mut set: impl FnMut(i64, i64)) {
        let mut spikes: Vec<(u32, i64)> = self.spikes.iter().map(|spike| (spike.at, spike.bytes)).collect();
        spikes.sort_unstable();
        let mut spikes = spikes.into_iter().peekable();
        let mut last_ns = i64::MIN;
        let places = step.allocations.iter().map(|place| (place.freed_ns, place.ts_ns, Some(place)));
        let end_ns = step.allocations.last().map_or(step.freed_ns, |last| last.ts_ns);
        let end = (step.freed_ns, end_ns.max(step.freed_ns), None);
        for (at, (freed_ns, ts_ns, place)) in (0..).zip(places.chain([end])) {
            let before = self.before(step, at, differences);
            // At `freed_ns`, all frees since the previous allocation are done.
            set(if freed_ns >= last_ns { freed_ns } else { ts_ns }, before);
            while let Some((_, bytes)) = spikes.next_if(|(spike, _)| *spike <= at || place.is_none()) {
                set(ts_ns, before.wrapping_add(bytes));
            }
            set(ts_ns, place.map_or(before, |place| place.allocated.wrapping_add(differences[at as usize])));
            last_ns = ts_ns;
        }
    }

    /// Returns the bytes of the block that the allocation `at` makes, with the change; 0 if the block does
    /// not live there.
    fn own_bytes(&self, at: u32, place: &Allocation) -> i64 {
        let Some(life) = place.life else { return 0 };
        let spans = self.moved.get(&life);
        let is_there = spans.is_none_or(|spans| spans.iter().any(|span| (span.0..span.1).contains(&at)));
        if is_there { self.sizes[life as usize] } else { 0 }
    }
}

/// Returns the highest total of blocks, each given by birth, death and bytes.
pub(super) fn highest(blocks: impl IntoIterator<Item = (u32, u32, i64)>) -> i64 {
    let mut events: Vec<(u32, i64)> = Vec::new();
    for (birth, death, bytes) in blocks {
        events.extend([(birth, bytes), (death, bytes.wrapping_neg())]);
    }
    // At the same allocation, the sort puts frees first, because their bytes are negative.
    events.sort_unstable();
    let (mut now, mut highest) = (0i64, 0i64);
    for (_, bytes) in events {
        now = i64::wrapping_add(now, bytes);
        highest = highest.max(now);
    }
    highest
}
