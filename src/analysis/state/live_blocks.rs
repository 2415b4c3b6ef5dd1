//! The live blocks, by id.
//!
//! Blocks are stored in slots with a LIFO free list, for locality: the slot of a block that an op allocates
//! and frees immediately stays in the processor's cache. A freed block stays in its slot until another block
//! takes the slot, because blocks are too large to copy out.

use memtrace_trace::memory::LiveMemory;
use rustc_hash::FxHashMap;

use crate::state::block::{Block, Death};

/// The maximum number of entries in `recent`. [`FIRST_RECENT`] is the initial number. Both are powers of two.
const RECENT: usize = 1 << 14;
const FIRST_RECENT: usize = 1 << 6;
/// Marks an entry of `recent` without a block.
const NO_SLOT: u32 = u32::MAX;

/// The live blocks, by id.
#[derive(Clone)]
pub struct LiveBlocks {
    /// The slots of recent blocks, by the low bits of the block's id. Ids are row numbers and most blocks are
    /// short-lived, so this vector finds nearly all blocks without hashing.
    recent: Vec<u32>,
    /// The slots of the blocks that a later id displaced from `recent`.
    older: FxHashMap<i64, u32>,
    /// The highest id so far.
    highest: i64,
    /// The slots. A block without a death is live.
    blocks: Vec<Block>,
    /// The free slots; the last one is taken first.
    free: Vec<u32>,
}

impl Default for LiveBlocks {
    fn default() -> Self {
        LiveBlocks {
            recent: vec![NO_SLOT; FIRST_RECENT],
            older: FxHashMap::default(),
            highest: i64::MIN,
            blocks: Vec::new(),
            free: Vec::new(),
        }
    }
}

/// The slot of a removed block, valid until the next insertion.
#[derive(Clone, Copy, Debug)]
pub struct FreedSlot(u32);

impl LiveBlocks {
    /// Returns true if the block `id` is live.
    #[must_use]
    pub fn contains(&self, id: i64) -> bool {
        self.slot(id).is_some()
    }

    /// Returns the slot of the block `id`, or `None` if the block is not live.
    #[inline]
    fn slot(&self, id: i64) -> Option<u32> {
        let slot = self.recent[self.recent_index(id)];
        match self.blocks.get(slot as usize) {
            Some(block) if block.id == id => Some(slot),
            _ => self.older.get(&id).copied(),
        }
    }

    /// Returns the index of an id in `recent`.
    #[inline]
    fn recent_index(&self, id: i64) -> usize {
        id as usize & (self.recent.len() - 1)
    }

    /// Enlarges `recent`. It starts small because most traces of a large job are small, and each process has
    /// its own index.
    #[cold]
    fn grow(&mut self) {
        let larger = vec![NO_SLOT; self.recent.len() * 4];
        for slot in std::mem::replace(&mut self.recent, larger) {
            if let Some(block) = self.blocks.get(slot as usize) {
                let at = self.recent_index(block.id);
                self.recent[at] = slot;
            }
        }
    }

    /// Returns the live blocks, in no particular order.
    pub fn values(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.died.is_none())
    }

    /// Returns the block `id` if it is live.
    #[must_use]
    pub fn get_mut(&mut self, id: i64) -> Option<&mut Block> {
        let slot = self.slot(id)?;
        self.blocks.get_mut(slot as usize)
    }

    /// Returns a removed block, which stays in its slot only until the next insertion.
    pub(crate) fn removed(&self, removed: FreedSlot) -> Option<&Block> {
        self.blocks.get(removed.0 as usize)
    }
}

impl LiveMemory for LiveBlocks {
    type Key = i64;
    type Block = Block;
    type Replaced = bool;
    type Cause = Death;
    type Freed = FreedSlot;

    /// Adds a block. Returns whether it replaced a live block of the same id.
    #[inline]
    fn insert(&mut self, id: i64, block: Block) -> bool {
        if id <= self.highest
            && let Some(slot) = self.slot(id)
        {
            self.blocks[slot as usize] = block;
            return true;
        }
        self.highest = self.highest.max(id);
        let slot = self.free.pop().unwrap_or(self.blocks.len() as u32);
        if self.recent.len() < RECENT
            && self.blocks.get(self.recent[self.recent_index(id)] as usize).is_some()
        {
            self.grow();
        }
        let at = self.recent_index(id);
        let before = std::mem::replace(&mut self.recent[at], slot);
        if let Some(displaced) = self.blocks.get(before as usize) {
            self.older.insert(displaced.id, before);
        }
        match self.blocks.get_mut(slot as usize) {
            Some(old) => *old = block,
            None => self.blocks.push(block),
        }
        false
    }

    /// Removes the block `id`, which was freed at `death`.
    #[inline]
    fn remove(&mut self, id: i64, death: Death) -> Option<FreedSlot> {
        let slot = self.slot(id)?;
        // A slot is either in `recent` or in `older`.
        let at = self.recent_index(id);
        if self.recent[at] == slot {
            self.recent[at] = NO_SLOT;
        } else {
            self.older.remove(&id);
        }
        self.free.push(slot);
        self.blocks.get_mut(slot as usize)?.died = Some(death);
        Some(FreedSlot(slot))
    }
}
