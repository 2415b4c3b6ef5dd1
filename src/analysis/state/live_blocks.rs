//! The blocks that are live.
//!
//! They lie in places of which the one that was left last is taken first: what an op takes and gives back
//! at once stays in the processor's cache. A block that is taken out stays in its place until another one
//! needs it: blocks are too large to be moved about.

use rustc_hash::FxHashMap;

use crate::state::categories::Death;
use crate::state::replay::Block;

/// How many places are kept by the last bits of an id: a power of two.
const RECENT: usize = 1 << 14;
/// Where no block lies.
const NOWHERE: u32 = u32::MAX;

/// Blocks by their id.
pub struct LiveBlocks {
    /// Where those lie that were added lately, by the last bits of their id: ids are numbers of rows, and most
    /// blocks do not live for long.
    recent: Vec<u32>,
    /// Where the others lie, which a younger one has taken the place of in `recent`.
    older: FxHashMap<i64, u32>,
    /// No block had a higher id.
    highest: i64,
    /// Those that have not died are live.
    blocks: Vec<Block>,
    free: Vec<u32>,
}

impl Default for LiveBlocks {
    fn default() -> Self {
        LiveBlocks {
            recent: vec![NOWHERE; RECENT],
            older: FxHashMap::default(),
            highest: i64::MIN,
            blocks: Vec::new(),
            free: Vec::new(),
        }
    }
}

/// Where a block lies that was taken out, until the next one is added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreedSlot(u32);

impl LiveBlocks {
    /// Is that block live?
    #[must_use]
    pub fn contains(&self, id: i64) -> bool {
        self.place(id).is_some()
    }

    /// Where that block lies.
    #[inline]
    fn place(&self, id: i64) -> Option<u32> {
        let place = self.recent[recent(id)];
        match self.blocks.get(place as usize) {
            Some(block) if block.id == id => Some(place),
            _ => self.older.get(&id).copied(),
        }
    }

    /// All of them, in no order.
    pub fn values(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.died.is_none())
    }

    /// The block of that id.
    #[must_use]
    pub fn get_mut(&mut self, id: i64) -> Option<&mut Block> {
        let place = self.place(id)?;
        self.blocks.get_mut(place as usize)
    }

    /// Adds a block. One that had its id is gone; was there one?
    #[inline]
    pub(crate) fn insert(&mut self, block: Block) -> bool {
        let id = block.id;
        if id <= self.highest
            && let Some(place) = self.place(id)
        {
            self.blocks[place as usize] = block;
            return true;
        }
        self.highest = self.highest.max(id);
        let place = self.free.pop().unwrap_or(self.blocks.len() as u32);
        let before = std::mem::replace(&mut self.recent[recent(id)], place);
        if let Some(before_it) = self.blocks.get(before as usize) {
            self.older.insert(before_it.id, before);
        }
        match self.blocks.get_mut(place as usize) {
            Some(old) => *old = block,
            None => self.blocks.push(block),
        }
        false
    }

    /// Takes the block of that id out, which ended so.
    #[inline]
    pub(crate) fn remove(&mut self, id: i64, death: Death) -> Option<FreedSlot> {
        let place = self.place(id)?;
        // It is there or among the older ones.
        if self.recent[recent(id)] == place {
            self.recent[recent(id)] = NOWHERE;
        } else {
            self.older.remove(&id);
        }
        self.free.push(place);
        self.blocks.get_mut(place as usize)?.died = Some(death);
        Some(FreedSlot(place))
    }

    /// The block that was taken out.
    pub(crate) fn left(&self, left: FreedSlot) -> Option<&Block> {
        self.blocks.get(left.0 as usize)
    }
}

/// Where the place of a block is kept in [`LiveBlocks::recent`].
fn recent(id: i64) -> usize {
    id as usize % RECENT
}
