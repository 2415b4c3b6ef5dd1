//! The one clock of a trace.

/// `CLOCK_MONOTONIC`, ns: the same for every process of the host, and what Python calls
/// `time.monotonic_ns()`. About 24 ns a read, through the vDSO.
#[inline]
#[must_use]
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the answer, and this clock exists on every Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
