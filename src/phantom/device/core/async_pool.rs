//! The stream-ordered memory pool of one device (`cudaMallocAsync`), suballocated from chunks.
//!
//! NVIDIA does not document how the driver manages a pool. Assumed here: a pool takes chunks that are
//! multiples of 32 MiB and gives blocks at multiples of 512 bytes. At a synchronization the pool returns
//! chunks that are entirely free while it holds more than its release threshold. PyTorch sets that
//! threshold to its maximum.

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::core::lock::lock;
use crate::core::past_oom::Caller;
use crate::core::range_allocator::RangeAllocator;
use crate::core::vram::{BlockPurpose, Vram};

/// The unit of a chunk's size.
const CHUNK: usize = 32 << 20;

/// One chunk, which begins at its key in [`AsyncPool::chunks`].
#[derive(Debug)]
struct Chunk {
    size: usize,
    ranges: RangeAllocator,
}

/// The default pool of one device. All sizes are in bytes.
#[derive(Debug)]
pub(crate) struct AsyncPool {
    chunks: BTreeMap<usize, Chunk>,
    /// The length of each live block, by its start.
    blocks: BTreeMap<usize, usize>,
    /// The sum of the chunks' sizes.
    pub(crate) reserved: u64,
    /// The sum of the live blocks' sizes.
    pub(crate) used: u64,
    pub(crate) reserved_high: u64,
    pub(crate) used_high: u64,
    /// The reserved bytes to which a synchronization trims the pool.
    pub(crate) release_threshold: u64,
    /// The three reuse policies, all enabled at first.
    pub(crate) reuse: [u32; 3],
}

impl Default for AsyncPool {
    fn default() -> Self {
        Self {
            chunks: BTreeMap::new(),
            blocks: BTreeMap::new(),
            reserved: 0,
            used: 0,
            reserved_high: 0,
            used_high: 0,
            release_threshold: 0,
            reuse: [1; 3],
        }
    }
}

impl AsyncPool {
    /// Allocates a block. If no chunk has room, takes a new chunk from `vram`. Returns `None` if the device
    /// is full.
    pub(crate) fn alloc(&mut self, vram: &Mutex<Vram>, size: usize) -> Option<usize> {
        let size = size.checked_add(511)? & !511;
        // Older chunks have higher addresses, and are filled first.
        let found = self.chunks.values_mut().rev().find_map(|chunk| chunk.ranges.alloc(size, 512));
        let address = match found {
            Some(address) => address,
            None => self.grow(vram, size)?,
        };
        self.blocks.insert(address, size);
        self.used += size as u64;
        self.used_high = self.used_high.max(self.used);
        Some(address)
    }

    /// Returns the addresses of the live blocks.
    pub(crate) fn blocks(&self) -> Vec<usize> {
        self.blocks.keys().copied().collect()
    }

    /// Returns the start and the length of the live block that contains an address.
    pub(crate) fn find(&self, address: usize) -> Option<(usize, usize)> {
        let (&start, &size) = self.blocks.range(..=address).next_back()?;
        (address < start + size).then_some((start, size))
    }

    fn grow(&mut self, vram: &Mutex<Vram>, size: usize) -> Option<usize> {
        let whole = size.checked_next_multiple_of(CHUNK)?;
        let new_chunk = || lock(vram).alloc(whole, BlockPurpose::Pool, Caller::AsksAgain);
        let start = new_chunk().or_else(|| {
            self.trim(vram, 0);
            new_chunk()
        })?;
        let mut ranges = RangeAllocator::new(start, start + whole);
        let address = ranges.alloc(size, 512);
        self.chunks.insert(start, Chunk { size: whole, ranges });
        self.reserved += whole as u64;
        self.reserved_high = self.reserved_high.max(self.reserved);
        address
    }

    /// Returns entirely free chunks to `vram` until at most `keep` bytes are reserved.
    pub(crate) fn trim(&mut self, vram: &Mutex<Vram>, keep: u64) {
        let free: Vec<_> = self
            .chunks
            .iter()
            .filter(|(_, chunk)| chunk.ranges.is_empty())
            .map(|(&start, chunk)| (start, chunk.size))
            .collect();
        for (start, size) in free {
            if self.reserved <= keep {
                break;
            }
            self.chunks.remove(&start);
            self.reserved -= size as u64;
            lock(vram).free(start);
        }
    }

    /// Trims the pool to its release threshold.
    pub(crate) fn synchronize(&mut self, vram: &Mutex<Vram>) {
        let threshold = self.release_threshold;
        if self.reserved > threshold {
            self.trim(vram, threshold);
        }
    }

    /// Frees a block and returns its length in bytes, or `None` if the pool has no block at this address.
    pub(crate) fn free(&mut self, address: usize) -> Option<usize> {
        let size = self.blocks.remove(&address)?;
        self.used -= size as u64;
        if let Some((_, chunk)) = self.chunks.range_mut(..=address).next_back() {
            chunk.ranges.free(address, size);
        }
        Some(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_synchronization_returns_free_chunks_above_the_release_threshold() {
        let vram = Mutex::new(Vram::new(29, 1 << 30, None));
        let mut pool = AsyncPool::default();
        let small = pool.alloc(&vram, 700).unwrap();
        let large = pool.alloc(&vram, CHUNK).unwrap();
        assert_eq!((pool.used, pool.reserved), (1024 + CHUNK as u64, 2 * CHUNK as u64));
        assert_eq!(pool.free(large), Some(CHUNK));
        assert_eq!(pool.free(large), None);
        pool.release_threshold = u64::MAX;
        pool.synchronize(&vram);
        assert_eq!(pool.reserved, 2 * CHUNK as u64);
        pool.release_threshold = 0;
        pool.synchronize(&vram);
        assert_eq!((pool.reserved, lock(&vram).used()), (CHUNK as u64, CHUNK as u64));
        assert_eq!(pool.free(small), Some(1024));
    }
}
