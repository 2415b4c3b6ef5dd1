//! State that belongs to this process only: every child finds zeros instead, however the child was created.
//!
//! `fork` runs handlers (`pthread_atfork`), which start the child anew. `_Fork`, `clone` and the system call
//! itself run none. So the state that must not reach a child is in a page that the kernel wipes in every
//! child (`MADV_WIPEONFORK`, since Linux 4.14). A hook can therefore distinguish its process from a parent at
//! no cost. A child that shares the memory (`vfork`) shares the page too.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

/// The largest size of a page: 4 KiB on x86-64, and 64 KiB on aarch64, where the kernel decides.
const PAGE: usize = if cfg!(target_arch = "aarch64") { 1 << 16 } else { 4096 };

/// The page is all zero at first. The loader therefore maps it as anonymous memory, which is the only kind of
/// memory that the kernel wipes.
#[repr(C)]
#[cfg_attr(target_arch = "aarch64", repr(align(65536)))]
#[cfg_attr(not(target_arch = "aarch64"), repr(align(4096)))]
pub(crate) struct OwnPage {
    /// The `Recorder`, whose type is defined in a higher module; null until the recorder has started.
    pub(crate) recorder: AtomicPtr<c_void>,
    /// The progress of the recorder's start: a constant of `recorder.rs` such as `NOT_STARTED`, which is 0 in
    /// a wiped page.
    pub(crate) state: AtomicU8,
    /// True if this process called [`claim`].
    is_claimed: AtomicBool,
    /// The process id; 0 until the first query.
    pid: AtomicU32,
    /// The numbers of calls that [`device_calls`](crate::device_calls) counts. A child has no call in
    /// progress, because only the thread that forks exists there.
    pub(crate) device_calls_begun: AtomicU64,
    pub(crate) device_calls_ended: AtomicU64,
    /// True if the driver has taken memory that no call shows, and no sample of the devices was taken since.
    pub(crate) is_unsampled: AtomicBool,
    /// Fills up the page, because the kernel wipes whole pages and no other variable may be lost.
    _rest: [u8; PAGE - 33],
}

const _: () = assert!(size_of::<OwnPage>() == PAGE);

pub(crate) static OWN: OwnPage = OwnPage {
    recorder: AtomicPtr::new(null_mut()),
    state: AtomicU8::new(0),
    is_claimed: AtomicBool::new(false),
    pid: AtomicU32::new(0),
    device_calls_begun: AtomicU64::new(0),
    device_calls_ended: AtomicU64::new(0),
    is_unsampled: AtomicBool::new(false),
    _rest: [0; PAGE - 33],
};

/// True if the kernel wipes the page in children. This flag is outside the page because a child must inherit
/// it.
static IS_WIPED: AtomicBool = AtomicBool::new(false);

/// Marks the page as this process's own. Called when the library is loaded, and in a child before its first
/// event.
pub fn claim() {
    if !IS_WIPED.load(Ordering::Relaxed) {
        let page = (&raw const OWN).cast_mut().cast();
        // SAFETY: the page holds `OWN` alone, and the call changes nothing in this process.
        let code = unsafe { libc::madvise(page, PAGE, libc::MADV_WIPEONFORK) };
        IS_WIPED.store(code == 0, Ordering::Relaxed);
    }
    OWN.pid.store(std::process::id(), Ordering::Relaxed);
    OWN.is_claimed.store(true, Ordering::Release);
}

/// Returns true if the kernel wipes the page in every child of this process.
pub(crate) fn is_wiped_in_children() -> bool {
    IS_WIPED.load(Ordering::Relaxed)
}

/// Returns true if this process is the child of a process that claimed the page, and no handler ran in it.
pub(crate) fn is_unclaimed_child() -> bool {
    is_wiped_in_children() && !OWN.is_claimed.load(Ordering::Acquire)
}

/// Returns the id of this process. The page caches it, so only the first call in a process is a system call.
pub(crate) fn pid() -> u32 {
    match OWN.pid.load(Ordering::Relaxed) {
        0 => {
            let pid = std::process::id();
            OWN.pid.store(pid, Ordering::Relaxed);
            pid
        }
        pid => pid,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no fork")]
    fn the_child_of_a_plain_fork_call_finds_its_own_page_empty() {
        claim();
        assert!(is_wiped_in_children(), "Linux 4.14 or later");
        assert!(!is_unclaimed_child());
        // SAFETY: the child calls only functions that are safe after a fork.
        let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) } as libc::pid_t;
        if child == 0 {
            let is_empty = is_unclaimed_child() && OWN.pid.load(Ordering::Relaxed) == 0;
            // SAFETY: ends the child.
            unsafe { libc::_exit(if is_empty && pid() == std::process::id() { 5 } else { 6 }) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the answer.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 5);
        assert_eq!(pid(), std::process::id());
    }
}
