//! One device's memory: addresses that cost nothing until touched, and the count of what is taken.
//!
//! What is assumed about the real driver, none of it documented by NVIDIA:
//! - it takes memory from the card in pages of 2 MiB, so that `cudaMemGetInfo` moves in such steps;
//! - a `cudaMalloc` below 2 MiB shares a page with others of its kind, at a multiple of 512 bytes;
//! - a larger one starts at a multiple of 2 MiB and is charged up to the next one;
//! - freed addresses are used again, the lowest that fits first.
//!
//! PyTorch's caching allocator only asks for multiples of 2 MiB, so for it nothing hangs on these.

use std::collections::BTreeMap;

use crate::core::range_allocator::Space;

/// The page in which the driver takes memory from the card.
pub(crate) const PAGE: usize = 2 << 20;
/// Where device addresses begin: a range that nothing else uses on x86-64 Linux (the heap of a
/// program lies above 0x5555_0000_0000, libraries and stacks above 0x7000_0000_0000).
const FIRST: usize = 0x1000_0000_0000;
/// Each device's share, one TiB: more than its memory, so that holes never make it fail.
const SHARE_BITS: usize = 40;
const MOST_DEVICES: usize = 32;
/// Behind the devices' shares: address ranges reserved through the driver's virtual memory calls.
pub(crate) const RESERVED: std::ops::Range<usize> = 0x3000_0000_0000..0x4800_0000_0000;
/// Then pinned host memory.
pub(crate) const PINNED: std::ops::Range<usize> = 0x4800_0000_0000..0x5000_0000_0000;

/// Whether an address is one of a device's.
pub(crate) fn is_device(address: usize) -> bool {
    (FIRST..RESERVED.end).contains(&address)
}

/// The device in whose share an address lies; `None` for host and for reserved ranges.
pub(crate) fn share_of(address: usize) -> Option<usize> {
    (FIRST..FIRST + (MOST_DEVICES << SHARE_BITS)).contains(&address).then(|| (address - FIRST) >> SHARE_BITS)
}

/// What a block is, which says what it is charged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// Asked for with `cudaMalloc` and its kind.
    Plain,
    /// Managed memory lives on the host until a kernel touches it and can be more than the card
    /// has: not charged.
    Managed,
    /// A kernel's global variable, part of what the context takes.
    Global,
    /// What a graph takes when it is launched: an address alone, charged apart.
    Graph,
    /// Another process's: an address alone, charged there.
    Imported,
}

/// A live block.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// Its length as given out.
    pub(crate) size: usize,
    /// What it is.
    pub(crate) purpose: Use,
    /// The shared page that it lies in.
    slab: Option<usize>,
}

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct Vram {
    space: Space,
    blocks: BTreeMap<usize, Block>,
    /// Shared pages and what is free in each.
    slabs: BTreeMap<usize, Space>,
    used: u64,
    limit: u64,
}

fn round_up(size: usize, to: usize) -> Option<usize> {
    Some(size.checked_add(to - 1)? & !(to - 1))
}

impl Vram {
    /// An empty memory of `limit` bytes.
    pub(crate) fn new(device: usize, limit: u64) -> Self {
        let start = FIRST + (device << SHARE_BITS);
        // The first page is left out, so that no block begins where a device's share does.
        let space = Space::new(start + PAGE, start + (1 << SHARE_BITS));
        Self { space, blocks: BTreeMap::new(), slabs: BTreeMap::new(), used: 0, limit }
    }

    /// Bytes taken and bytes that there are.
    pub(crate) fn usage(&self) -> (u64, u64) {
        (self.used, self.limit)
    }

    /// Charges memory that has no address of its own yet. False when it does not fit.
    pub(crate) fn charge(&mut self, size: u64) -> bool {
        match self.used.checked_add(size).filter(|&used| used <= self.limit) {
            Some(used) => {
                self.used = used;
                true
            }
            None => false,
        }
    }

    /// Takes a charge back.
    pub(crate) fn discharge(&mut self, size: u64) {
        self.used = self.used.saturating_sub(size);
    }

    /// A new block, or `None` when it does not fit.
    pub(crate) fn allocate(&mut self, size: usize, purpose: Use) -> Option<usize> {
        let (address, block) = if size < PAGE && purpose == Use::Plain {
            let size = round_up(size, 512)?;
            let (address, slab) = self.small(size)?;
            (address, Block { size, purpose, slab: Some(slab) })
        } else {
            let whole = round_up(size, PAGE)?;
            (self.pages(whole, purpose)?, Block { size: whole, purpose, slab: None })
        };
        self.blocks.insert(address, block);
        Some(address)
    }

    fn small(&mut self, size: usize) -> Option<(usize, usize)> {
        for (&slab, space) in &mut self.slabs {
            if let Some(address) = space.take(size, 512) {
                return Some((address, slab));
            }
        }
        let slab = self.pages(PAGE, Use::Plain)?;
        let mut space = Space::new(slab, slab + PAGE);
        let address = space.take(size, 512)?;
        self.slabs.insert(slab, space);
        Some((address, slab))
    }

    fn pages(&mut self, size: usize, purpose: Use) -> Option<usize> {
        let charged = if purpose == Use::Plain { size as u64 } else { 0 };
        if !self.charge(charged) {
            return None;
        }
        let address = self.space.take(size, PAGE);
        match address {
            Some(address) if map(address, size) => Some(address),
            _ => {
                if let Some(address) = address {
                    self.space.give(address, size);
                }
                self.discharge(charged);
                None
            }
        }
    }

    /// Frees the block that begins there.
    pub(crate) fn free(&mut self, address: usize) -> Option<Block> {
        let block = self.blocks.remove(&address)?;
        match block.slab {
            None => self.release(address, block.size, block.purpose),
            Some(slab) => {
                if let Some(space) = self.slabs.get_mut(&slab) {
                    space.give(address, block.size);
                    if space.is_empty() {
                        self.slabs.remove(&slab);
                        self.release(slab, PAGE, Use::Plain);
                    }
                }
            }
        }
        Some(block)
    }

    fn release(&mut self, address: usize, size: usize, purpose: Use) {
        unmap(address, size);
        self.space.give(address, size);
        if purpose == Use::Plain {
            self.discharge(size as u64);
        }
    }

    /// The block that an address lies in, and where it begins.
    pub(crate) fn find(&self, address: usize) -> Option<(usize, Block)> {
        let (&start, &block) = self.blocks.range(..=address).next_back()?;
        (address < start + block.size).then_some((start, block))
    }
}

/// Puts readable and writable address space there, with no memory behind it until it is touched.
/// False when the host refuses or the place is not free.
pub(crate) fn map(address: usize, size: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping that replaces none (NOREPLACE), in a range that only this library uses.
    let got =
        unsafe { libc::mmap(address as *mut _, size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return false;
    }
    if got as usize != address {
        // A kernel older than 4.17 takes the flag for a hint.
        // SAFETY: the mapping was made a moment ago and nobody knows of it.
        unsafe { libc::munmap(got, size) };
        return false;
    }
    // A small copy must not cost a huge page, and a core dump must not hold 80 GB of nothing.
    for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP] {
        // SAFETY: advice about the mapping made above; refusal changes nothing.
        unsafe { libc::madvise(got, size, advice) };
    }
    true
}

/// Takes the address space back.
pub(crate) fn unmap(address: usize, size: usize) {
    // SAFETY: the range was mapped by `map` and its block has just been taken out of the books.
    unsafe { libc::munmap(address as *mut _, size) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_share_a_page_and_large_ones_take_whole_pages() {
        let mut vram = Vram::new(30, 64 << 20);
        let a = vram.allocate(1, Use::Plain).unwrap();
        let b = vram.allocate(513, Use::Plain).unwrap();
        assert_eq!((b - a, vram.usage().0), (512, PAGE as u64));
        let c = vram.allocate(PAGE + 1, Use::Plain).unwrap();
        assert_eq!((c % PAGE, vram.usage().0), (0, 3 * PAGE as u64));
        assert_eq!(vram.find(b + 1023).map(|(start, _)| start), Some(b));
        assert!(vram.find(b + 1024).is_none());
        for address in [a, b, c] {
            assert!(vram.free(address).is_some());
        }
        assert!(vram.free(a).is_none());
        assert_eq!(vram.usage().0, 0);
        assert_eq!(vram.allocate(PAGE, Use::Plain), Some(a));
        vram.free(a);
    }

    #[test]
    fn the_limit_holds_to_the_page() {
        let mut vram = Vram::new(31, 4 * PAGE as u64);
        let a = vram.allocate(4 * PAGE, Use::Plain).unwrap();
        assert_eq!(vram.allocate(1, Use::Plain), None);
        assert!(vram.allocate(PAGE, Use::Managed).is_some());
        vram.free(a);
        assert_eq!(vram.allocate(4 * PAGE + 1, Use::Plain), None);
        assert_eq!(vram.allocate(usize::MAX, Use::Plain), None);
        assert!(vram.allocate(4 * PAGE, Use::Plain).is_some());
    }
}
