//! The blocks that are live.
//!
//! They lie in places of which the one that was left last is taken first: what an op takes and gives back
//! at once stays in the processor's cache, and so does the table of where each block lies. A block that is
//! taken out stays in its place until another one needs it: blocks are too large to be moved about.

use std::collections::hash_map::Entry;

use rustc_hash::FxHashMap;

use crate::categories::Death;
use crate::replay::Block;

/// Blocks by their id.
#[derive(Default)]
pub struct Live {
    places: FxHashMap<i64, u32>,
    /// Those that have not died are live.
    blocks: Vec<Block>,
    free: Vec<u32>,
}

/// Where a block lies that was taken out, until the next one is added.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Left(u32);

impl Live {
    /// Is that block live?
    #[must_use]
    pub fn contains(&self, id: i64) -> bool {
        self.places.contains_key(&id)
    }

    /// All of them, in no order.
    pub fn values(&self) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(|block| block.died.is_none())
    }

    /// The block of that id.
    #[must_use]
    pub fn get_mut(&mut self, id: i64) -> Option<&mut Block> {
        let place = self.places.get(&id)?;
        self.blocks.get_mut(*place as usize)
    }

    /// Adds a block. One that had its id is gone; was there one?
    #[inline]
    pub(crate) fn insert(&mut self, block: Block) -> bool {
        let new = self.blocks.len() as u32;
        let (place, known) = match self.places.entry(block.id) {
            Entry::Occupied(place) => (*place.get(), true),
            Entry::Vacant(place) => (*place.insert(self.free.pop().unwrap_or(new)), false),
        };
        match self.blocks.get_mut(place as usize) {
            Some(old) => *old = block,
            None => self.blocks.push(block),
        }
        known
    }

    /// Takes the block of that id out, which ended so.
    pub(crate) fn remove(&mut self, id: i64, death: Death) -> Option<Left> {
        let place = self.places.remove(&id)?;
        self.free.push(place);
        self.blocks.get_mut(place as usize)?.died = Some(death);
        Some(Left(place))
    }

    /// The block that was taken out.
    pub(crate) fn left(&self, left: Left) -> Option<&Block> {
        self.blocks.get(left.0 as usize)
    }
}
