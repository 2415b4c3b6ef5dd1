//! Reconstructs the memory of a device at the beginning of its history. A history has at most `max_entries`
//! events, and the file lists the segments and blocks at its end. From there, the events are undone in
//! reverse order.

use std::collections::BTreeMap;

use memtrace_trace::rounding::{Rounding, SMALL_SIZE};
use rustc_hash::{FxHashMap, FxHashSet};

use super::model::{Action, BlockState, Event, Model};
use super::owners::{Phase, StackId, StackTable};

/// Reserved memory, which is a segment or a mapped range of an expandable segment.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reserved {
    pub(super) end: i64,
    pub(super) stream: i64,
    pub(super) pool: i64,
    pub(super) expandable: bool,
    pub(super) stack: StackId,
}

/// A block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Held {
    pub(super) bytes: i64,
    pub(super) requested: i64,
    pub(super) stream: i64,
    pub(super) stack: StackId,
    /// True if the program freed the block and a stream still uses it.
    pub(super) pending: bool,
}

/// The memory of one device at one time, by address.
#[derive(Clone, Debug, Default)]
pub(super) struct Memory {
    pub(super) reserved: BTreeMap<i64, Reserved>,
    pub(super) blocks: BTreeMap<i64, Held>,
}

/// The memory of a device when its history begins, and facts that are known only from the end of the history.
#[derive(Clone, Debug, Default)]
pub(super) struct Beginning {
    pub(super) memory: Memory,
    /// The blocks that exist at the end, by the index of the event that allocated the block.
    pub(super) at_end: FxHashMap<u32, Held>,
    /// The pools of the segments that exist at the end, by the index of the event that allocated the segment.
    pub(super) pools: FxHashMap<u32, i64>,
    /// The indices of the events in a backward pass or an optimizer whose block outlives the step.
    pub(super) outlasting: FxHashSet<u32>,
    /// The indices of the events whose block is a parameter or a buffer: allocated before the first forward,
    /// and freed later than the next step.
    pub(super) parameters: FxHashSet<u32>,
    /// The requested sizes of these blocks.
    pub(super) parameter_sizes: FxHashSet<i64>,
    /// The number of blocks whose size is uncertain: a block may be up to 1 MiB larger than its request.
    pub(super) uncertain: u64,
}

/// The life of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// The block is freed in the step of its allocation, or it belongs to no step.
    Short,
    /// A block of a backward or an optimizer outlives its step.
    Long,
    /// Like `Long`, and a parameter has the same size.
    LongLikeParameter,
    /// The block is a parameter or a buffer.
    Parameter,
}

impl Beginning {
    /// Returns the life of the block that an event allocates. `requested` is its requested size in bytes.
    pub(super) fn life(&self, event: u32, requested: i64) -> Life {
        if self.parameters.contains(&event) {
            Life::Parameter
        } else if !self.outlasting.contains(&event) {
            Life::Short
        } else if self.parameter_sizes.contains(&requested) {
            Life::LongLikeParameter
        } else {
            Life::Long
        }
    }
}

impl Memory {
    /// Returns the memory at the end, as the file lists it.
    pub(super) fn at_end(model: &Model, device: i32) -> Memory {
        let mut memory = Memory::default();
        for segment in model.segments(device) {
            let reserved = Reserved {
                end: segment.end(),
                stream: segment.stream,
                pool: segment.pool,
                expandable: segment.expandable,
                stack: segment.stack,
            };
            memory.reserved.insert(segment.addr, reserved);
            for block in segment.blocks.iter().filter(|block| block.state != BlockState::Free) {
                let held = Held {
                    bytes: block.bytes,
                    requested: block.requested,
                    stream: segment.stream,
                    stack: block.stack,
                    pending: block.state == BlockState::Pending,
                };
                memory.blocks.insert(block.addr, held);
            }
        }
        memory
    }

    /// Returns the segment or mapped range that contains an address, or `None` if the address is not
    /// reserved.
    pub(super) fn around(&self, addr: i64) -> Option<&Reserved> {
        self.reserved
            .range(..=addr)
            .next_back()
            .map(|(_, reserved)| reserved)
            .filter(|found| found.end > addr)
    }

    /// Returns the number of bytes from an address up to the next block or, without a next block, to the end
    /// of the segment.
    fn room(&self, addr: i64, segment: &Reserved) -> i64 {
        let next = self.blocks.range(addr..).next().map_or(segment.end, |(next, _)| *next);
        next.min(segment.end) - addr
    }

    /// Returns the size of a new block. The block takes a whole free block if the rest would be too small to
    /// be useful. `rounded` is the rounded request.
    pub(super) fn block_size(&self, addr: i64, rounded: i64, max_split: i64) -> i64 {
        let Some(segment) = self.around(addr).filter(|_| keeps_rest(rounded)) else { return rounded };
        let room = self.room(addr, segment);
        let is_split = segment.expandable
            || room - rounded > SMALL_SIZE as i64 && (max_split == 0 || rounded < max_split);
        if is_split || room < rounded { rounded } else { room }
    }
}

/// Returns true if a block of this size may include the rest of a free block. In the small pool, every rest
/// is useful and is split off.
fn keeps_rest(rounded: i64) -> bool {
    rounded > SMALL_SIZE as i64
}

/// Undoes the events of a device from the last to the first. Returns the memory before the first one.
pub(super) fn beginning(model: &Model, device: i32, rounding: Rounding) -> Beginning {
    let mut memory = Memory::at_end(model, device);
    let mut result = Beginning::default();
    // The addresses of the blocks that do not exist at the end, whose sizes are guessed.
    let mut guessed: Vec<i64> = Vec::new();
    let mut from_end: FxHashMap<i64, Held> =
        memory.blocks.iter().map(|(addr, held)| (*addr, *held)).collect();
    let is_forward =
        |event: &Event| event.action == Action::Alloc && model.phase(event.stack) == Some(Phase::Forward);
    let forward = model.events(device).iter().position(is_forward);
    let first_forward = forward.map(|at| (at as u32, model.step_at(model.events(device)[at].time_us)));
    // The time of the next free of each address.
    let mut freed: FxHashMap<i64, i64> = FxHashMap::default();
    for (index, event) in model.events(device).iter().enumerate().rev() {
        let Event { addr, bytes, stream, stack, .. } = *event;
        let end = addr.saturating_add(bytes);
        let index = index as u32;
        match event.action {
            Action::Alloc => {
                let mut stack = stack;
                if memory.blocks.remove(&addr).is_some()
                    && let Some(held) = from_end.remove(&addr)
                {
                    // With context="state", only the blocks at the end have stacks.
                    stack = if StackTable::is_empty(stack) { held.stack } else { stack };
                    result.at_end.insert(index, Held { stack, ..held });
                }
                let died = freed.remove(&addr).map(|time_us| model.step_at(time_us));
                let lasts = died.is_none_or(|step| step > model.step_at(event.time_us));
                let phase = model.phase(stack);
                if lasts && matches!(phase, Some(Phase::Backward | Phase::Optimizer)) {
                    result.outlasting.insert(index);
                }
                let stays = |step| died.is_none_or(|died| died > step + 1);
                if phase.is_none()
                    && !model.owners.owner(stack).is_workspace
                    && first_forward.is_some_and(|(first, step)| index < first && stays(step))
                {
                    result.parameters.insert(index);
                    result.parameter_sizes.insert(bytes);
                }
            }
            Action::FreeRequested | Action::FreeCompleted => {
                let rounded = rounding.round(bytes as u64) as i64;
                let new = Held { bytes: rounded, requested: bytes, stream, stack, pending: true };
                let held = memory.blocks.entry(addr).or_insert(new);
                held.pending = event.action == Action::FreeCompleted;
                freed.insert(addr, event.time_us);
                if !from_end.contains_key(&addr) {
                    guessed.push(addr);
                }
            }
            Action::SegmentAlloc | Action::SegmentMap => {
                if let Some(pool) = memory.around(addr).map(|found| found.pool).filter(|pool| *pool != 0) {
                    result.pools.insert(index, pool);
                }
                cut_out(&mut memory.reserved, addr, end);
            }
            Action::SegmentFree | Action::SegmentUnmap => {
                cut_out(&mut memory.reserved, addr, end);
                let expandable = event.action == Action::SegmentUnmap;
                if bytes > 0 {
                    memory.reserved.insert(addr, Reserved { end, stream, pool: 0, expandable, stack });
                }
            }
            Action::Oom | Action::Snapshot | Action::Unknown => {}
        }
    }
    guessed.retain(|addr| memory.blocks.contains_key(addr));
    guessed.sort_unstable();
    guessed.dedup();
    for addr in guessed {
        let bytes = memory.blocks[&addr].bytes;
        let Some(segment) = memory.around(addr).filter(|found| !found.expandable && keeps_rest(bytes)) else {
            continue;
        };
        // Every block of the large pool is larger than 1 MiB, so a smaller rest belongs to the preceding
        // block.
        let rest = memory.room(addr + bytes, segment);
        if rest > SMALL_SIZE as i64 {
            result.uncertain += 1;
        } else if let Some(held) = memory.blocks.get_mut(&addr) {
            held.bytes += rest.max(0);
        }
    }
    result.memory = memory;
    result
}

/// Removes the memory from `start` to `end`, which may be in the middle of a range.
pub(super) fn cut_out(reserved: &mut BTreeMap<i64, Reserved>, start: i64, end: i64) {
    let over = reserved.range(..end).rev().take_while(|(_, found)| found.end > start);
    let over: Vec<(i64, Reserved)> = over.map(|(addr, found)| (*addr, *found)).collect();
    for (addr, found) in over {
        reserved.remove(&addr);
        if addr < start {
            reserved.insert(addr, Reserved { end: start, ..found });
        }
        if found.end > end {
            reserved.insert(end, found);
        }
    }
}
