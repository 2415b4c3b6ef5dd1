//! The requests that a changed program makes of the allocator. They are used to find out how much memory the
//! allocator would reserve.
//!
//! A block that no change touches is requested and freed where the run did so. A block whose lifetime changed
//! is requested and freed at the allocations with the indices of its new birth and death.

use rustc_hash::FxHashMap;

use super::curve::Curve;
use super::step::{ALIVE, RecordedStep};
use crate::requests::{OperationKind, Requests};

/// The requests so far, over all steps.
#[derive(Clone, Debug, Default)]
pub(super) struct ChangedRequests {
    requests: Requests,
    /// The slot and the bytes of each live block, by `alloc_id`. Blocks that the run did not have get
    /// negative ids.
    slots: FxHashMap<i64, (i64, i64)>,
    free_slots: Vec<i64>,
    streams: FxHashMap<i64, i64>,
    pool: i64,
    allocated: i64,
    next_own: i64,
}

/// An event between two allocations of the run. Events at the same allocation happen in the order of the
/// variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum RequestEvent {
    Death,
    /// The request of a block at a time when the run did not request it: its birth has changed, or the run
    /// did not have the block.
    Birth,
    /// A block that is freed at once, such as the temporary memory of a second forward or of an optimizer's
    /// step.
    Spike,
    /// The request of a block at the time when the run requested it.
    Own,
}

#[derive(Clone, Copy, Debug)]
struct RequestChange {
    at: u32,
    event: RequestEvent,
    id: i64,
    bytes: i64,
    stream: i64,
    pool: i64,
}

impl ChangedRequests {
    /// Adds the requests of a step.
    pub(super) fn add(&mut self, step: &RecordedStep, curve: &Curve) {
        if let Some(first) = step.allocations.first() {
            self.requests.operations.push([OperationKind::Step as i64, first.owner.step, 0, 0]);
        }
        let end = step.end();
        let mut changes = self.changes(step, curve);
        changes.sort_by(|a, b| {
            let frees_last = |change: &RequestChange| change.at.min(end);
            frees_last(a).cmp(&frees_last(b)).then(a.event.cmp(&b.event))
        });
        for change in changes {
            match change.event {
                RequestEvent::Death => self.free(change.id),
                RequestEvent::Birth | RequestEvent::Own => self.alloc(&change),
                RequestEvent::Spike => {
                    self.alloc(&change);
                    self.free(change.id);
                }
            }
        }
    }

    /// Returns the requests of all steps. `device`, `taken` and `large` are copied from `base`.
    pub(super) fn finish(self, base: &Requests) -> Requests {
        Requests {
            device: base.device,
            streams: self.streams.len().max(1),
            taken: base.taken,
            large: base.large.clone(),
            ..self.requests
        }
    }

    fn changes(&mut self, step: &RecordedStep, curve: &Curve) -> Vec<RequestChange> {
        let mut changes = Vec::new();
        for (index, life) in step.lives.iter().enumerate() {
            let size = curve.sizes[index];
            let bytes = if size == life.bytes { life.requested } else { size };
            let change = |at, event| RequestChange {
                at,
                event,
                id: life.id,
                bytes,
                stream: life.stream,
                pool: life.pool,
            };
            let own = [(life.birth, life.death), (0, 0)];
            for (from, to) in
                curve.spans(index as u32).unwrap_or(own).into_iter().filter(|(from, to)| from < to)
            {
                let is_there = life.is_older && from == 0;
                let known = self.slots.get(&life.id).map(|(_, bytes)| *bytes);
                if is_there && known != Some(bytes) {
                    // The block has changed its size since the previous step, or did not exist there. Free
                    // the old block, if any, and request the new one.
                    changes.extend(known.map(|_| change(0, RequestEvent::Death)));
                    changes.push(change(0, RequestEvent::Birth));
                } else if !is_there {
                    let is_own = from == life.birth && !life.is_older;
                    changes.push(change(from, if is_own { RequestEvent::Own } else { RequestEvent::Birth }));
                }
                if to != ALIVE && to <= step.end() {
                    changes.push(change(to, RequestEvent::Death));
                }
            }
            if curve.spans(index as u32).is_some_and(|spans| spans.iter().all(|(from, to)| from >= to))
                && self.slots.contains_key(&life.id)
            {
                changes.push(change(0, RequestEvent::Death));
            }
        }
        for (at, allocation) in step.allocations.iter().enumerate().filter(|(_, at)| at.life.is_none()) {
            // The request ran out of memory in the run. In the changed program, request a block for it and
            // free the block at once.
            let (stream, pool) = (0, 0);
            self.next_own -= 1;
            let (at, id, bytes) = (at as u32, self.next_own, allocation.requested);
            changes.push(RequestChange { at, event: RequestEvent::Spike, id, bytes, stream, pool });
        }
        for (from, to, bytes) in curve.more() {
            self.next_own -= 1;
            let change =
                |at, event| RequestChange { at, event, id: self.next_own, bytes, stream: 0, pool: 0 };
            // If the block outlives the step, free it at the end of the step. The next step requests its
            // memory again, as a block with another id.
            let to = to.min(step.end());
            if from < to {
                changes.extend([change(from, RequestEvent::Birth), change(to, RequestEvent::Death)]);
            } else {
                // The block would be requested and freed at the end of the step, where the sort puts the free
                // first. So request it as a spike, which is freed at once.
                changes.push(change(from, RequestEvent::Spike));
            }
        }
        for (at, bytes) in curve.spikes() {
            self.next_own -= 1;
            changes.push(RequestChange {
                at,
                event: RequestEvent::Spike,
                id: self.next_own,
                bytes,
                stream: 0,
                pool: 0,
            });
        }
        changes
    }

    fn alloc(&mut self, change: &RequestChange) {
        if change.bytes <= 0 || self.slots.contains_key(&change.id) {
            return;
        }
        let requests = &mut self.requests;
        if change.pool != self.pool {
            self.pool = change.pool;
            requests.operations.push([OperationKind::Pool as i64, change.pool, 0, 0]);
        }
        let next = if change.stream == 0 { 0 } else { self.streams.len().max(1) as i64 };
        self.streams.entry(0).or_insert(0);
        let stream = *self.streams.entry(change.stream).or_insert(next);
        let slot = self.free_slots.pop().unwrap_or_else(|| {
            requests.slots += 1;
            requests.slots as i64 - 1
        });
        self.slots.insert(change.id, (slot, change.bytes));
        requests.operations.push([OperationKind::Alloc as i64, slot, change.bytes, stream]);
        requests.requests += 1;
        self.allocated = self.allocated.wrapping_add(change.bytes);
        if self.allocated > requests.peak_allocated {
            requests.peak_allocated = self.allocated;
            requests.peak_index = requests.operations.len();
        }
    }

    fn free(&mut self, id: i64) {
        if let Some((slot, bytes)) = self.slots.remove(&id) {
            self.allocated = self.allocated.wrapping_sub(bytes);
            self.requests.operations.push([OperationKind::Free as i64, slot, 0, 0]);
            self.free_slots.push(slot);
        }
    }
}
