//! The pages of pinned host memory.
//!
//! A driver locks pinned memory, so all of its pages are resident at once, whether or not the program touches
//! them. Here the pages are made resident without a lock, but only if the container and the machine have room
//! for them: a simulation of a large machine must not end because the machine that runs it is small.

use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use memtrace_util::cgroup;

use crate::core::host_pages;
use crate::core::vram::host_page;

/// The room is checked before each piece of this many bytes, because other processes take memory meanwhile.
const PIECE: usize = 16 << 20;
/// The memory that stays free: one part in `SPARE` of the limit, and at least `LEAST_SPARE` bytes.
const SPARE: i64 = 8;
const LEAST_SPARE: i64 = 256 << 20;

/// The bytes of live pinned memory that were not made resident, and their maximum.
static ABSENT: AtomicU64 = AtomicU64::new(0);
static PEAK_ABSENT: AtomicU64 = AtomicU64::new(0);

/// Makes pages of pinned memory resident if there is room for all. Returns the bytes that stay absent. Pass
/// them to [`release`] when the memory is freed.
///
/// # Safety
/// The caller owns the range, and the pages may be written to.
pub(crate) unsafe fn make_resident(start: usize, size: usize) -> usize {
    let end = start + size;
    let mut at = first_page(start, host_page());
    // Without values of CPU tensors, their memory is not resident, either.
    let is_wanted = !host_pages::is_on() && has_room(size);
    while is_wanted && at < end {
        let next = end.min(at + PIECE);
        // SAFETY: by the contract.
        if !has_room(next - at) || !unsafe { populate(at, next - at) } {
            break;
        }
        at = next;
    }
    let absent = end.saturating_sub(at.max(start));
    let now = ABSENT.fetch_add(absent as u64, Ordering::Relaxed) + absent as u64;
    PEAK_ABSENT.fetch_max(now, Ordering::Relaxed);
    absent
}

/// Forgets absent bytes of memory that is freed.
pub(crate) fn release(absent: usize) {
    ABSENT.fetch_sub(absent as u64, Ordering::Relaxed);
}

/// Returns the maximum of the live bytes that were not made resident.
pub(crate) fn peak_absent() -> u64 {
    PEAK_ABSENT.load(Ordering::Relaxed)
}

/// Returns the start of the page that contains an address.
fn first_page(address: usize, page: usize) -> usize {
    address - address % page
}

/// Returns true if the container and the machine have room for `size` more bytes.
fn has_room(size: usize) -> bool {
    let left = cgroup::left(Path::new("/proc"), Path::new("/sys/fs/cgroup"), "self");
    left.is_some_and(|(left, limit)| fits(size, left, limit))
}

/// Returns true if enough of `limit` stays free after `size` of the `left` bytes are taken.
fn fits(size: usize, left: i64, limit: i64) -> bool {
    i64::try_from(size).is_ok_and(|size| left.saturating_sub(size) >= LEAST_SPARE.max(limit / SPARE))
}

/// Makes pages resident, without a change of their content. Returns false if the kernel cannot, or is older
/// than 5.14.
///
/// # Safety
/// The caller owns the range, and the pages may be written to.
unsafe fn populate(start: usize, size: usize) -> bool {
    // SAFETY: by the contract; the advice changes no content.
    unsafe { libc::madvise(start as *mut c_void, size, libc::MADV_POPULATE_WRITE) == 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pinned_pages_leave_room_for_others() {
        // A container of 1 GiB keeps 256 MiB free; one of 8 GiB keeps 1 GiB free.
        assert!(fits(256 << 20, 512 << 20, 1 << 30) && !fits((256 << 20) + 1, 512 << 20, 1 << 30));
        assert!(fits(1 << 30, 2 << 30, 8 << 30) && !fits((1 << 30) + 1, 2 << 30, 8 << 30));
        assert!(!fits(usize::MAX, 2 << 30, 8 << 30) && !fits(1, -5, 1 << 30));
    }

    /// Registered memory may begin in a page that follows inaccessible memory.
    #[test]
    fn pinned_pages_begin_at_a_page_of_the_kernel() {
        const LARGEST: usize = 1 << 16;
        // SAFETY: it has no preconditions.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, of which this test closes a part.
        let (memory, after_hole) = unsafe {
            let pages = libc::mmap(std::ptr::null_mut(), 3 * LARGEST, libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            let hole = (pages as usize).next_multiple_of(LARGEST);
            assert_eq!(libc::mprotect(hole as *mut c_void, page, libc::PROT_NONE), 0);
            (pages, hole + page)
        };
        // SAFETY: memory of this test.
        let (whole, from_hole) = unsafe {
            let is_known = populate(after_hole, page);
            let start = first_page(after_hole + 1, host_page());
            (is_known, populate(start, page) && start == after_hole)
        };
        assert!(from_hole || !whole, "Linux 5.14 or later");
        // SAFETY: the mapping from above.
        unsafe { libc::munmap(memory, 3 * LARGEST) };
    }
}
