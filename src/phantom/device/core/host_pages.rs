//! Host memory whose content is not kept (`--no-host-values`): many address ranges that share few pages.
//!
//! A plan for a model that is larger than the host needs the addresses and sizes of its CPU tensors, not
//! their values. So each range maps the same [`PAGES`] bytes of memory. A range that is larger than these
//! bytes maps them repeatedly.
//!
//! The kernel limits the number of mappings of a process (65,530 by default). So the address of a range
//! determines its offset in the shared bytes. The kernel then merges adjacent ranges into one mapping,
//! however many tensors there are.
//!
//! No file descriptor is involved: a program that closes or reuses descriptors could otherwise map a file of
//! its own here. A shared anonymous mapping is duplicated with `mremap`.

use std::cell::UnsafeCell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_cards::HOST_VALUES_VARIABLE;

use crate::core::range_allocator::RangeAllocator;
use crate::core::vram::{PINNED, host_page};

/// The addresses of the ranges. Nothing else uses these addresses on x86-64 Linux; see `vram::FIRST`.
const RANGE: Range<usize> = 0x5000_0000_0000..0x5400_0000_0000;
const _: () = assert!(PINNED.end <= RANGE.start);

/// The memory that all ranges share, in bytes. It is at the start of [`RANGE`].
const PAGES: usize = 128 << 20;

/// The minimum size, in bytes, of a tensor whose values are not kept.
pub(crate) const LEAST: usize = 1 << 20;

static IS_ON: AtomicBool = AtomicBool::new(false);

/// Turns on the ranges without values. Called before the program starts. They stay off if the fork handlers
/// cannot be installed.
pub(crate) fn turn_on() {
    // A child of a fork must not inherit a lock that another thread held.
    // SAFETY: the functions live as long as the process, because a preloaded library is never unloaded.
    let status = unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    IS_ON.store(status == 0, Ordering::Relaxed);
}

/// Returns true if large CPU tensors get ranges without values.
#[inline]
pub(crate) fn is_on() -> bool {
    IS_ON.load(Ordering::Relaxed)
}

/// Returns true if an address is in a range without values.
#[inline]
pub(crate) fn contains(address: usize) -> bool {
    RANGE.contains(&address)
}

/// The ranges in use.
struct Ranges {
    free: RangeAllocator,
    /// The size of each range by its start.
    sizes: BTreeMap<usize, usize>,
    /// True once the addresses are reserved.
    is_reserved: bool,
}

/// The ranges, with a lock that a fork handler can hold and release.
struct Locked {
    lock: UnsafeCell<libc::pthread_mutex_t>,
    ranges: UnsafeCell<Ranges>,
}

// SAFETY: the ranges are accessed only through a `Guard`, which holds the lock.
unsafe impl Sync for Locked {}

static RANGES: Locked = Locked {
    lock: UnsafeCell::new(libc::PTHREAD_MUTEX_INITIALIZER),
    ranges: UnsafeCell::new(Ranges {
        free: RangeAllocator::new(RANGE.start + PAGES, RANGE.end),
        sizes: BTreeMap::new(),
        is_reserved: false,
    }),
};

struct Guard;

impl Guard {
    fn new() -> Self {
        // SAFETY: a static mutex, which is never destroyed.
        unsafe { libc::pthread_mutex_lock(RANGES.lock.get()) };
        Self
    }
}

impl Deref for Guard {
    type Target = Ranges;

    fn deref(&self) -> &Ranges {
        // SAFETY: this guard holds the lock, so no other guard exists.
        unsafe { &*RANGES.ranges.get() }
    }
}

impl DerefMut for Guard {
    fn deref_mut(&mut self) -> &mut Ranges {
        // SAFETY: as above.
        unsafe { &mut *RANGES.ranges.get() }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // SAFETY: the guard locked it.
        unsafe { libc::pthread_mutex_unlock(RANGES.lock.get()) };
    }
}

extern "C" fn before_fork() {
    std::mem::forget(Guard::new());
}

extern "C" fn after_fork() {
    drop(Guard);
}

/// Reserves address space without memory.
///
/// # Safety
/// No live range is there. With `MAP_FIXED` in `how`, the addresses are this module's own.
unsafe fn reserve(start: usize, size: usize, how: i32) -> bool {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | how;
    // SAFETY: by the contract.
    let got = unsafe { libc::mmap(start as *mut _, size, libc::PROT_NONE, flags, -1, 0) };
    if got != libc::MAP_FAILED && got as usize != start {
        // A kernel older than 4.17 treats the address as a hint.
        // SAFETY: the mapping is new and nothing refers to it.
        unsafe { libc::munmap(got, size) };
        return false;
    }
    got != libc::MAP_FAILED
}

/// Reserves [`RANGE`] and maps the pages at its start.
fn reserve_all() -> bool {
    // SAFETY: a new mapping that replaces none.
    if !unsafe { reserve(RANGE.start, RANGE.end - RANGE.start, libc::MAP_FIXED_NOREPLACE) } {
        return false;
    }
    let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    let access = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: it replaces a part of the reservation.
    let pages = unsafe { libc::mmap(RANGE.start as *mut _, PAGES, access, flags, -1, 0) };
    if pages == libc::MAP_FAILED {
        return false;
    }
    // SAFETY: advice about the mapping made above. A failure changes nothing.
    unsafe { libc::madvise(pages, PAGES, libc::MADV_DONTDUMP) };
    true
}

/// Maps the shared pages at an address, repeatedly if `size` is larger. Returns false if the kernel refuses a
/// mapping.
///
/// # Safety
/// The range is reserved and not in use.
unsafe fn map_pages(start: usize, size: usize) -> bool {
    let (mut at, end) = (start, start + size);
    while at < end {
        let place = (at - RANGE.start) % PAGES;
        let size = (PAGES - place).min(end - at);
        let (from, to) = ((RANGE.start + place) as *mut c_void, at as *mut c_void);
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: an old size of 0 duplicates a shared mapping. It replaces a part of the reservation.
        if unsafe { libc::mremap(from, 0, size, flags, to) } != to {
            return false;
        }
        at += size;
    }
    true
}

/// Allocates a range of at least `size` bytes. Returns `None` if the addresses or the kernel's mappings are
/// used up: the caller then takes ordinary memory.
pub(crate) fn alloc(size: usize) -> Option<usize> {
    let size = size.checked_next_multiple_of(host_page())?;
    let mut ranges = Guard::new();
    if !ranges.is_reserved {
        if !reserve_all() {
            IS_ON.store(false, Ordering::Relaxed);
            eprintln!(
                "memtrace: no address space is left for CPU tensors without values \
                 ({HOST_VALUES_VARIABLE}=0), so values are kept (is there a limit such as ulimit -v?)"
            );
            return None;
        }
        ranges.is_reserved = true;
    }
    let start = ranges.free.alloc(size, host_page())?;
    // SAFETY: the allocator gave the range, so nobody uses it.
    if !unsafe { map_pages(start, size) } {
        ranges.release(start, size);
        return None;
    }
    ranges.sizes.insert(start, size);
    Some(start)
}

/// Frees the range that starts at an address, if there is one.
pub(crate) fn free(start: usize) {
    let mut ranges = Guard::new();
    if let Some(size) = ranges.sizes.remove(&start) {
        ranges.release(start, size);
    }
}

impl Ranges {
    /// Returns a range to the reservation.
    fn release(&mut self, start: usize, size: usize) {
        // SAFETY: a range of this module that nobody uses any more.
        if unsafe { reserve(start, size, libc::MAP_FIXED) } {
            self.free.free(start, size);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn write(at: usize) {
        // SAFETY: the test's own range.
        unsafe { (at as *mut u8).write_volatile(7) }
    }

    fn read(at: usize) -> u8 {
        // SAFETY: the test's own range.
        unsafe { (at as *const u8).read_volatile() }
    }

    /// Returns the number of readable mappings in [`RANGE`]. Another process reads the list, because qemu lists the
    /// neighbours of its own process apart.
    fn mappings() -> usize {
        let list = format!("/proc/{}/maps", std::process::id());
        let maps = String::from_utf8(Command::new("cat").arg(list).output().unwrap().stdout).unwrap();
        let is_own = |line: &&str| {
            let start = line.split('-').next().and_then(|start| usize::from_str_radix(start, 16).ok());
            start.is_some_and(|start| RANGE.contains(&start)) && line.contains(" rw-s ")
        };
        maps.lines().filter(is_own).count()
    }

    #[test]
    fn ranges_share_pages_and_mappings_and_their_addresses_are_reused() {
        let (first, second) = (alloc(3 * PAGES + 5).unwrap(), alloc(LEAST).unwrap());
        assert!(contains(first) && contains(second) && first.is_multiple_of(64));
        assert_eq!(second, first + 3 * PAGES + host_page());
        write(first + 2 * PAGES + 9000);
        assert_eq!((read(first + 9000), read(second + 9000 - host_page()), read(second)), (7, 7, 0));

        let before = mappings();
        let many: Vec<_> = (0..40).map(|_| alloc(LEAST).unwrap()).collect();
        assert_eq!(mappings(), before, "neighbours are one mapping");
        many.into_iter().for_each(free);

        // Setup: a range is freed twice, and an address without a range is freed -> no effect.
        free(first);
        free(first);
        free(RANGE.start);
        assert_eq!(alloc(LEAST), Some(first));
        assert_eq!((alloc(usize::MAX), alloc(RANGE.end - RANGE.start)), (None, None));
        free(first);
        free(second);
        assert!(Guard::new().free.is_empty());
    }
}
