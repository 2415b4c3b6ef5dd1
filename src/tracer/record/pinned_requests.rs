//! The requested bytes of the blocks of torch's allocator of pinned memory.
//!
//! The table is small and lock-free, because threads of the program write it and the writer thread reads it.
//! If too many blocks map to one set, the first entry is overwritten, and the request of the overwritten block
//! becomes unknown. Whether a block is in use or cached is in torch's own description of the block
//! (`HostBlock` in `ATen/core/CachingHostAllocator.h`).

use std::sync::atomic::{AtomicU64, Ordering};

/// The number of entries in a set. A block can be in any entry of its set.
const WAYS: usize = 8;
const SETS: usize = 1 << 10;
/// The number of low bits that are 0 in the address of every description, because malloc aligns to 16 bytes.
const ALIGNED_BITS: u32 = 4;

/// Marks an entry that a thread fills. No description is at this address.
const RESERVED: u64 = 1;

/// An entry: the address of torch's description of a block (0 if empty, or [`RESERVED`]), the address of the
/// block's memory, and the bytes of the last request that got the block.
struct Entry {
    block: AtomicU64,
    address: AtomicU64,
    requested: AtomicU64,
}

#[expect(clippy::declare_interior_mutable_const, reason = "a pattern for the entries of the table")]
const EMPTY: Entry =
    Entry { block: AtomicU64::new(0), address: AtomicU64::new(0), requested: AtomicU64::new(0) };
static TABLE: [Entry; WAYS * SETS] = [const { EMPTY }; WAYS * SETS];

fn set_of(block: u64) -> &'static [Entry] {
    let set = ((block >> ALIGNED_BITS).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as usize % SETS;
    &TABLE[set * WAYS..][..WAYS]
}

/// Notes that torch's allocator returned a block at `address` for a request of `requested` bytes. `block` is
/// the address of torch's description of the block, which identifies it.
pub fn allocated(block: u64, address: u64, requested: u64) {
    store(set_of(block), block, address, requested);
}

/// Stores a block in its entry of a set, in an empty one, or in the first one.
fn store(set: &[Entry], block: u64, address: u64, requested: u64) {
    let known = set.iter().find(|entry| entry.block.load(Ordering::Acquire) == block);
    let entry = known.or_else(|| set.iter().find(|entry| reserve(entry))).unwrap_or(&set[0]);
    entry.address.store(address, Ordering::Relaxed);
    entry.requested.store(requested, Ordering::Relaxed);
    entry.block.store(block, Ordering::Release);
}

/// Reserves an entry if it is empty, so that only one thread fills it.
fn reserve(entry: &Entry) -> bool {
    entry.block.compare_exchange(0, RESERVED, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

/// Removes the block at `address`, because its memory was returned to CUDA.
pub fn released(address: u64) {
    for entry in TABLE.iter().filter(|entry| entry.address.load(Ordering::Relaxed) == address) {
        // The block is last, because it frees the entry for another thread.
        entry.address.store(0, Ordering::Relaxed);
        entry.block.store(0, Ordering::Release);
    }
}

/// A block of pinned memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinnedBlock {
    /// The address.
    pub(crate) address: u64,
    /// The size in bytes.
    pub(crate) bytes: u64,
    /// The requested bytes; 0 if the block is cached.
    pub(crate) requested: u64,
}

/// Returns all blocks whose description can be read, in order of their addresses.
pub(crate) fn blocks() -> Vec<PinnedBlock> {
    let known = TABLE.iter().filter_map(|entry| {
        let block = entry.block.load(Ordering::Acquire);
        let (address, requested) =
            (entry.address.load(Ordering::Relaxed), entry.requested.load(Ordering::Relaxed));
        let (bytes, is_used) = (block > RESERVED).then(|| described(block, address)).flatten()?;
        Some(PinnedBlock { address, bytes, requested: if is_used { requested.min(bytes) } else { 0 } })
    });
    let mut blocks: Vec<PinnedBlock> = known.collect();
    blocks.sort_unstable_by_key(|block| block.address);
    blocks
}

/// Returns the size of a block and whether it is in use, from torch's description of it: a mutex, then the
/// size, the address, and the flag. Returns `None` if the address is not there, because torch has another
/// layout, or has deleted the description. The kernel copies the words, because torch may delete the
/// description meanwhile.
fn described(block: u64, address: u64) -> Option<(u64, bool)> {
    let mut words = [0u64; 3];
    let at = block.checked_add(size_of::<libc::pthread_mutex_t>() as u64)?;
    let to = libc::iovec { iov_base: words.as_mut_ptr().cast(), iov_len: size_of_val(&words) };
    let from = libc::iovec { iov_base: at as *mut libc::c_void, iov_len: size_of_val(&words) };
    // SAFETY: the kernel writes only into `words`, and checks the addresses that it reads.
    let copied = unsafe { libc::process_vm_readv(libc::getpid(), &raw const to, 1, &raw const from, 1, 0) };
    let [bytes, place, flag] = words;
    let is_known = copied == size_of_val(&words) as isize && place == address && flag & 0xff <= 1;
    is_known.then_some((bytes, flag & 0xff == 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The start of torch's description of a block.
    #[repr(C)]
    struct HostBlock {
        mutex: libc::pthread_mutex_t,
        bytes: u64,
        address: u64,
        is_used: u64,
    }

    fn block(bytes: u64, address: u64) -> Box<HostBlock> {
        Box::new(HostBlock { mutex: libc::PTHREAD_MUTEX_INITIALIZER, bytes, address, is_used: 0xff01 })
    }

    /// Returns true if the kernel has the call that [`described`] makes, and prints so if not (qemu).
    fn has_copies() -> bool {
        // SAFETY: the lists of what to copy are empty.
        let copied =
            unsafe { libc::process_vm_readv(libc::getpid(), std::ptr::null(), 0, std::ptr::null(), 0, 0) };
        if copied < 0 {
            eprintln!("skipped: no `process_vm_readv` here");
        }
        copied == 0
    }

    fn among(most_significant: u64) -> Vec<PinnedBlock> {
        blocks().into_iter().filter(|block| block.address >> 32 == most_significant).collect()
    }

    #[test]
    fn a_pinned_block_is_in_use_then_cached_then_in_use_for_another_request_then_gone() {
        if !has_copies() {
            return;
        }
        let (first, mut second) = (block(16, 0xabc_0000_0000), block(64, 0xabc_1000_0000));
        let id = |block: &HostBlock| std::ptr::from_ref(block) as u64;
        allocated(id(&second), second.address, 33);
        allocated(id(&first), first.address, 9);
        let expected = |block: &HostBlock, requested| PinnedBlock {
            address: block.address,
            bytes: block.bytes,
            requested,
        };
        assert_eq!(among(0xabc), [expected(&first, 9), expected(&second, 33)]);
        second.is_used = 0xff00;
        assert_eq!(among(0xabc), [expected(&first, 9), expected(&second, 0)]);
        second.is_used = 0xff01;
        allocated(id(&second), second.address, 40);
        assert_eq!(among(0xabc), [expected(&first, 9), expected(&second, 40)]);
        // Another layout is unknown.
        (second.address, second.bytes) = (7, second.address);
        assert_eq!(among(0xabc), [expected(&first, 9)]);
        released(0xabc_1000_0000);
        released(first.address);
        assert_eq!(among(0xabc), []);
    }

    #[test]
    fn threads_that_add_pinned_blocks_to_one_set_at_once_take_an_entry_each() {
        for round in 0..200 {
            let set: [Entry; WAYS] = std::array::from_fn(|_| EMPTY);
            let ready = std::sync::Barrier::new(WAYS);
            std::thread::scope(|scope| {
                for id in 2..2 + WAYS as u64 {
                    let (ready, set) = (&ready, &set);
                    scope.spawn(move || {
                        ready.wait();
                        store(set, id, id, 1);
                    });
                }
            });
            let mut ids: Vec<u64> = set.iter().map(|entry| entry.block.load(Ordering::Relaxed)).collect();
            ids.sort_unstable();
            assert!(ids.iter().copied().eq(2..2 + WAYS as u64), "round {round}: {ids:?}");
        }
    }

    #[test]
    fn pinned_blocks_beyond_the_table_or_without_a_description_are_unknown() {
        if !has_copies() {
            return;
        }
        let all: Vec<_> = (0..10_000).map(|number| block(64, 0xdef_0000_0000 + (number << 10))).collect();
        all.iter().for_each(|one| allocated(std::ptr::from_ref(&**one) as u64, one.address, 33));
        let known = among(0xdef).len();
        assert!((1..=WAYS * SETS).contains(&known), "{known}");
        // Nothing is mapped at this address.
        allocated(0x1000, 0x123_0000_0000, 33);
        assert_eq!(among(0x123), []);
    }
}
