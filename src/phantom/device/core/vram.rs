//! The memory of one device: address space that costs nothing until it is touched, and the
//! bytes charged to the device.
//!
//! NVIDIA does not document how the driver allocates memory. [`DriverRegions`] has the order of addresses.
//! Assumed here:
//! - the driver takes memory from the card in pages of 2 MiB, so `cudaMemGetInfo` changes in such steps;
//! - a `cudaMalloc` below 2 MiB shares a page with others, at a multiple of 512 bytes;
//! - a larger allocation begins at a multiple of 2 MiB and is charged up to the next multiple.
//!
//! PyTorch's caching allocator only asks for multiples of 2 MiB, so these assumptions do not affect it. With
//! `PYTORCH_NO_CUDA_MEMORY_CACHING=1` they do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use memtrace_cards::ADDRESSES;

use crate::core::driver_regions::DriverRegions;
use crate::core::faults;
use crate::core::machine::Share;
use crate::core::past_oom::{self, Caller};
use crate::core::range_allocator::RangeAllocator;

/// The unit in which the driver takes memory from the card.
pub(crate) const PAGE: usize = 2 << 20;

/// Returns the size of a page of host memory: 4 KiB on x86-64; 4, 16 or 64 KiB on aarch64, where the kernel
/// decides.
pub(crate) fn host_page() -> usize {
    // SAFETY: the call has no preconditions. Every Linux knows the value.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

/// The lowest device address. Nothing else uses this range on x86-64 Linux: the heap of a program is above
/// 0x5555_0000_0000, libraries and stacks above 0x7000_0000_0000. On aarch64 with addresses of 48 bits, both
/// are above 0xAAAA_0000_0000.
const FIRST: usize = 0x1000_0000_0000;
/// The number of address bits of each device (`Spec::address_bits`). A device has at least twice as many
/// addresses as memory, so that an allocation rarely fails because its addresses are fragmented.
static ADDRESS_BITS: AtomicU32 = AtomicU32::new(40);
/// The end of the devices' addresses.
const LAST: usize = FIRST + ADDRESSES as usize;
const _: () = assert!(LAST == RESERVED.start);
/// The ranges that the driver's virtual memory calls reserve. They follow the devices' ranges.
pub(crate) const RESERVED: std::ops::Range<usize> = 0x3000_0000_0000..0x4800_0000_0000;
/// The range of pinned host memory, which follows the reserved ranges.
pub(crate) const PINNED: std::ops::Range<usize> = 0x4800_0000_0000..0x5000_0000_0000;

/// The range from the first device address to the last address of pinned memory.
pub(crate) const FIRST_TO_PINNED: std::ops::Range<usize> = FIRST..PINNED.end;
const _: () = assert!(RESERVED.end == PINNED.start);

/// Returns true if an address is in the range of any device, or in a reserved range. It need not be
/// allocated.
pub(crate) fn is_device(address: usize) -> bool {
    (FIRST..RESERVED.end).contains(&address)
}

/// Returns the index of the device that owns an address, or `None` for host
/// addresses and for reserved ranges.
pub(crate) fn device_index_of(address: usize) -> Option<usize> {
    (FIRST..LAST).contains(&address).then(|| (address - FIRST) >> ADDRESS_BITS.load(Ordering::Relaxed))
}

/// Sets the number of address bits of each device. Called before the first device is created.
pub(crate) fn set_address_bits(bits: u32) {
    ADDRESS_BITS.store(bits, Ordering::Relaxed);
}

/// The purpose of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockPurpose {
    /// Memory that was allocated with `cudaMalloc` or a similar call.
    Plain,
    /// A chunk of a memory pool, which only the pool frees.
    Pool,
    /// Managed memory. It is on the host until a kernel touches it, and there may be
    /// more of it than the card has.
    Managed,
    /// A kernel's global variable, which is part of the context's memory.
    Global,
    /// The address of a graph's memory node, whose memory is charged when the graph is launched.
    Graph,
    /// Memory of another process, which is charged there.
    Imported,
}

impl BlockPurpose {
    /// Returns true if the device is charged for the block when it is allocated.
    fn is_charged(self) -> bool {
        matches!(self, Self::Plain | Self::Pool)
    }

    /// Returns true if the program may free the block with `cudaFree` or a similar call.
    fn is_for_program(self) -> bool {
        matches!(self, Self::Plain | Self::Managed)
    }
}

/// A live block, which begins at its key in the table of blocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    /// The length of the block in bytes.
    pub(crate) size: usize,
    pub(crate) purpose: BlockPurpose,
    /// The start of the page that the block shares with other small blocks, or `None` if the block has its
    /// own pages.
    slab: Option<usize>,
}

/// The memory of one device.
#[derive(Debug)]
pub(crate) struct Vram {
    ranges: DriverRegions,
    blocks: BTreeMap<usize, Block>,
    /// The free ranges of each shared page, by the start of the page.
    slabs: BTreeMap<usize, RangeAllocator>,
    /// The bytes that this process has charged to the device.
    used: u64,
    /// The maximum of the bytes that this process and the machine's other processes charge together.
    limit: u64,
    /// This process's share of the card, or `None` for a memory that no other process shares.
    share: Option<Arc<Share>>,
}

fn round_up(size: usize, to: usize) -> Option<usize> {
    Some(size.checked_add(to - 1)? & !(to - 1))
}

impl Vram {
    /// Creates an empty memory of `limit` bytes.
    pub(crate) fn new(device: usize, limit: u64, share: Option<Arc<Share>>) -> Self {
        let bits = ADDRESS_BITS.load(Ordering::Relaxed);
        let start = FIRST + (device << bits);
        let ranges = DriverRegions::new(start, start + (1 << bits));
        Self { ranges, blocks: BTreeMap::new(), slabs: BTreeMap::new(), used: 0, limit, share }
    }

    /// Returns the bytes that this process has charged to the device.
    pub(crate) fn used(&self) -> u64 {
        self.used
    }

    /// Returns the bytes that can be charged now.
    pub(crate) fn free_bytes(&self) -> u64 {
        let others = self.share.as_ref().map_or(0, |share| share.others());
        self.limit.saturating_sub(self.used).saturating_sub(others)
    }

    /// Charges bytes to the device, without allocating an address. Returns false if they do not fit and
    /// `--past-oom` does not grant them, or if an injected fault refuses them.
    pub(crate) fn charge(&mut self, size: u64, caller: Caller) -> bool {
        if size == 0 {
            if let Some(share) = &self.share {
                share.enter();
            }
            return true;
        }
        let Some(used) = self.used.checked_add(size) else { return false };
        if used > self.limit && !past_oom::is_on() {
            return false;
        }
        if faults::are_armed()
            && self.share.as_ref().is_some_and(|share| faults::fails_at(used, share.card()))
        {
            return false;
        }
        let fits =
            |limit| used <= limit && self.share.as_ref().is_none_or(|share| share.try_set(used, limit));
        if !(fits(self.limit) || past_oom::grants(caller) && fits(u64::MAX)) {
            return false;
        }
        self.used = used;
        if past_oom::is_on() {
            past_oom::note_use(used + self.share.as_ref().map_or(0, |share| share.others()));
        }
        true
    }

    /// Returns bytes to the device that [`charge`](Self::charge) took.
    pub(crate) fn discharge(&mut self, size: u64) {
        self.used = self.used.saturating_sub(size);
        if let Some(share) = &self.share {
            share.set(self.used);
        }
    }

    /// Allocates a block. Returns `None` if it does not fit.
    pub(crate) fn alloc(&mut self, size: usize, purpose: BlockPurpose, caller: Caller) -> Option<usize> {
        let (address, block) = if size < PAGE && purpose == BlockPurpose::Plain {
            let size = round_up(size, 512)?;
            let (address, slab) = self.alloc_in_slab(size, caller)?;
            (address, Block { size, purpose, slab: Some(slab) })
        } else {
            let whole = round_up(size, PAGE)?;
            (self.alloc_pages(whole, purpose, caller)?, Block { size: whole, purpose, slab: None })
        };
        self.blocks.insert(address, block);
        Some(address)
    }

    fn alloc_in_slab(&mut self, size: usize, caller: Caller) -> Option<(usize, usize)> {
        for (&slab, ranges) in &mut self.slabs {
            if let Some(address) = ranges.alloc(size, 512) {
                return Some((address, slab));
            }
        }
        let slab = self.alloc_pages(PAGE, BlockPurpose::Plain, caller)?;
        let mut ranges = RangeAllocator::new(slab, slab + PAGE);
        let address = ranges.alloc(size, 512)?;
        self.slabs.insert(slab, ranges);
        Some((address, slab))
    }

    fn alloc_pages(&mut self, size: usize, purpose: BlockPurpose, caller: Caller) -> Option<usize> {
        let charged = if purpose.is_charged() { size as u64 } else { 0 };
        if !self.charge(charged, caller) {
            return None;
        }
        let address = self.ranges.alloc(size, PAGE);
        match address {
            Some(address) if map(address, size) => Some(address),
            _ => {
                if let Some(address) = address {
                    self.ranges.free(address, size);
                }
                self.discharge(charged);
                None
            }
        }
    }

    /// Frees the program's block that begins at an address and returns it. Returns `None` for any other block,
    /// such as a chunk of a pool, which begins at the address of the chunk's first block.
    pub(crate) fn free_for_program(&mut self, address: usize) -> Option<Block> {
        let is_its = self.blocks.get(&address)?.purpose.is_for_program();
        is_its.then(|| self.free(address)).flatten()
    }

    /// Returns the addresses of the program's blocks.
    pub(crate) fn program_blocks(&self) -> Vec<usize> {
        let blocks = self.blocks.iter().filter(|(_, block)| block.purpose.is_for_program());
        blocks.map(|(&address, _)| address).collect()
    }

    /// Frees the block that begins at an address and returns it.
    pub(crate) fn free(&mut self, address: usize) -> Option<Block> {
        let block = self.blocks.remove(&address)?;
        match block.slab {
            None => self.free_pages(address, block.size, block.purpose),
            Some(slab) => {
                if let Some(ranges) = self.slabs.get_mut(&slab) {
                    ranges.free(address, block.size);
                    if ranges.is_empty() {
                        self.slabs.remove(&slab);
                        self.free_pages(slab, PAGE, BlockPurpose::Plain);
                    }
                }
            }
        }
        Some(block)
    }

    fn free_pages(&mut self, address: usize, size: usize, purpose: BlockPurpose) {
        // SAFETY: `alloc_pages` mapped the range, and its block has been removed.
        unsafe { unmap(address, size) };
        self.ranges.free(address, size);
        if purpose.is_charged() {
            self.discharge(size as u64);
        }
    }

    /// Returns the start of the block that contains an address, and the block.
    pub(crate) fn find(&self, address: usize) -> Option<(usize, Block)> {
        let (&start, &block) = self.blocks.range(..=address).next_back()?;
        (address < start + block.size).then_some((start, block))
    }
}

/// Maps readable and writable address space, which takes host memory only once it is touched. Returns false
/// if the host refuses or if the range is in use.
pub(crate) fn map(address: usize, size: usize) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
    // SAFETY: a new mapping that replaces none (NOREPLACE).
    let got =
        unsafe { libc::mmap(address as *mut _, size, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return false;
    }
    if got as usize != address {
        // A kernel older than 4.17 treats the address as a hint.
        // SAFETY: the mapping is new and nothing refers to it.
        unsafe { libc::munmap(got, size) };
        return false;
    }
    // Without huge pages, a small copy takes only small pages of host memory. Without a dump, a core dump
    // does not contain 80 GB of zeros.
    for advice in [libc::MADV_NOHUGEPAGE, libc::MADV_DONTDUMP] {
        // SAFETY: advice about the mapping made above. A failure changes nothing.
        unsafe { libc::madvise(got, size, advice) };
    }
    true
}

/// Unmaps a range of address space.
///
/// # Safety
/// [`map`] mapped the range, and nothing uses it any more.
pub(crate) unsafe fn unmap(address: usize, size: usize) {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(address as *mut _, size) };
}

#[cfg(test)]
mod tests {
    use super::*;
    use Caller::GivesUp;

    #[test]
    fn small_blocks_share_a_page_and_large_blocks_take_entire_pages() {
        let mut vram = Vram::new(30, 64 << 20, None);
        let a = vram.alloc(1, BlockPurpose::Plain, GivesUp).unwrap();
        let b = vram.alloc(513, BlockPurpose::Plain, GivesUp).unwrap();
        assert_eq!((b - a, vram.used()), (512, PAGE as u64));
        let c = vram.alloc(PAGE + 1, BlockPurpose::Plain, GivesUp).unwrap();
        assert_eq!((c % PAGE, vram.used()), (0, 3 * PAGE as u64));
        assert_eq!(vram.find(b + 1023).map(|(start, _)| start), Some(b));
        assert!(vram.find(b + 1024).is_none());
        for address in [a, b, c] {
            assert!(vram.free(address).is_some());
        }
        assert!(vram.free(a).is_none());
        assert_eq!(vram.used(), 0);
        assert_eq!(vram.alloc(PAGE, BlockPurpose::Plain, GivesUp), Some(a));
        vram.free(a);
    }

    #[test]
    fn a_program_frees_only_its_own_blocks() {
        use BlockPurpose::{Global, Graph, Imported, Managed, Plain, Pool};
        let mut vram = Vram::new(28, 1 << 30, None);
        for (purpose, is_its) in [
            (Plain, true),
            (Managed, true),
            (Pool, false),
            (Global, false),
            (Graph, false),
            (Imported, false),
        ] {
            let address = vram.alloc(PAGE, purpose, GivesUp).unwrap();
            let charged = vram.used();
            assert_eq!(charged > 0, matches!(purpose, Plain | Pool), "{purpose:?}");
            assert_eq!(vram.program_blocks(), if is_its { vec![address] } else { Vec::new() }, "{purpose:?}");
            assert_eq!(vram.free_for_program(address).is_some(), is_its, "{purpose:?}");
            assert_eq!(vram.used(), if is_its { 0 } else { charged }, "{purpose:?}");
            assert_eq!(vram.free(address).is_some(), !is_its, "{purpose:?}");
            assert_eq!(vram.used(), 0, "{purpose:?}");
        }
    }

    #[test]
    fn the_memory_limit_is_exact_to_the_page() {
        let mut vram = Vram::new(31, 4 * PAGE as u64, None);
        let a = vram.alloc(4 * PAGE, BlockPurpose::Plain, GivesUp).unwrap();
        assert_eq!(vram.alloc(1, BlockPurpose::Plain, GivesUp), None);
        assert!(vram.alloc(PAGE, BlockPurpose::Managed, GivesUp).is_some());
        vram.free(a);
        assert_eq!(vram.alloc(4 * PAGE + 1, BlockPurpose::Plain, GivesUp), None);
        assert_eq!(vram.alloc(usize::MAX, BlockPurpose::Plain, GivesUp), None);
        assert!(vram.alloc(4 * PAGE, BlockPurpose::Plain, GivesUp).is_some());
    }
}
