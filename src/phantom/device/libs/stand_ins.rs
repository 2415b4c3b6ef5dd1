//! Stand-ins: the ranks of a simulated cluster that do not run.
//!
//! `memtrace run --ranks` starts a few ranks of a job. Each of these ranks runs alone, and treats all
//! other ranks as stand-ins. A stand-in holds the same data as the rank that asks. So a gather repeats
//! that data, a sum multiplies it, and a maximum equals it; the content of a message from a stand-in is
//! unknown. A value that a stand-in contributed counts as an answer, so a read of it by the host is a
//! read of an invented value.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use memtrace_machine::RANKS_VARIABLE;

use crate::core::ffi::{OK, Status};
use crate::core::host_state::host_state;
use crate::cuda::copy::write_known;
use crate::kernels::kernel::launches;

/// The maximum size in bytes of a gathered result that is written. A larger result is unknown, because
/// writing takes real memory.
const MAX_GATHERED: usize = 16 << 20;

/// The number of operations that were answered for stand-ins.
static ANSWERS: AtomicU64 = AtomicU64::new(0);
/// The size of the group that PyTorch is making, or 0.
static ANNOUNCED: AtomicUsize = AtomicUsize::new(0);
/// The number of ranks on this machine in the group that PyTorch is making, or 0 if it is not known.
static ANNOUNCED_NEAR: AtomicUsize = AtomicUsize::new(0);

/// Returns the ranks that run, and the number of all ranks. Returns `None` if all ranks run.
pub(crate) fn ranks() -> Option<&'static (String, u64)> {
    static RANKS: OnceLock<Option<(String, u64)>> = OnceLock::new();
    RANKS.get_or_init(|| parse(&std::env::var(RANKS_VARIABLE).ok()?)).as_ref()
}

fn parse(text: &str) -> Option<(String, u64)> {
    let (ranks, world) = text.split_once('/')?;
    let is_list = !ranks.is_empty() && ranks.bytes().all(|b| b.is_ascii_digit() || matches!(b, b',' | b'-'));
    Some((ranks.to_owned(), world.parse().ok()?)).filter(|_| is_list)
}

/// Returns true if the other ranks are stand-ins.
pub(crate) fn exist() -> bool {
    ranks().is_some()
}

/// Counts an operation that was answered for stand-ins.
pub(crate) fn count_answer() {
    ANSWERS.fetch_add(1, Ordering::Relaxed);
}

/// Returns the number of operations that were answered for stand-ins so far.
pub(crate) fn answers() -> u64 {
    ANSWERS.load(Ordering::Relaxed)
}

/// Returns the size of the group that PyTorch is making, if it is known.
pub(crate) fn announced_size() -> Option<usize> {
    Some(ANNOUNCED.load(Ordering::Relaxed)).filter(|size| *size > 0)
}

/// Returns how many ranks are on this machine in the group that PyTorch is making, if known.
pub(crate) fn announced_near() -> Option<usize> {
    Some(ANNOUNCED_NEAR.load(Ordering::Relaxed)).filter(|near| *near > 0)
}

/// Announces that PyTorch makes a group of this size now, with `near` ranks on this machine (0 if not known).
/// A size of 0 means that the group is finished. The announcement is needed because the split of a
/// communicator states a color and not the number of ranks with that color.
// SAFETY: only this library defines the name; here and below.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_announce_group(size: usize, near: usize) {
    ANNOUNCED.store(size, Ordering::Relaxed);
    ANNOUNCED_NEAR.store(near, Ordering::Relaxed);
}

/// Counts an operation on the host that was answered for stand-ins.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_stand_in_answer() {
    count_answer();
}

/// Returns the number of kernels launched so far. While it does not change, the program gives the GPU no
/// work.
#[unsafe(no_mangle)]
extern "C" fn memtrace_phantom_launches() -> u64 {
    launches()
}

/// Marks the known parts of a range as answers of stand-ins.
pub(crate) fn mark_answered(address: usize, size: usize) {
    for device in &host_state().devices {
        let parts = device.values().known_parts(address, size);
        for (start, end) in parts {
            device.values().mark_answered(start, end - start, None);
        }
    }
}

/// Writes a result to which stand-ins contributed.
///
/// # Safety
/// As for [`write_known`].
pub(crate) unsafe fn write(to: usize, bytes: Option<&[u8]>, size: usize) -> Status {
    // SAFETY: the caller's promise.
    let status = unsafe { write_known(to, bytes, size) };
    if status == OK && bytes.is_some() {
        mark_answered(to, size);
    }
    status
}

/// Writes the same part for each rank. `mine` is the rank whose part is its own. If the bytes are not known
/// or the whole result is large, every part except this rank's own becomes unknown.
///
/// # Safety
/// `to` is good for `part * ranks` bytes, as for [`write_known`].
pub(crate) unsafe fn write_parts(
    to: usize,
    bytes: Option<Vec<u8>>,
    part: usize,
    ranks: usize,
    mine: usize,
) -> Status {
    let size = part.saturating_mul(ranks);
    let repeated = bytes.as_ref().filter(|_| size <= MAX_GATHERED).map(|bytes| bytes.repeat(ranks));
    // SAFETY: the caller's promise.
    let status = unsafe { write(to, repeated.as_deref(), size) };
    if status != OK || bytes.is_none() {
        return status;
    }
    // SAFETY: the part of one rank.
    unsafe { write_known(to + mine * part, bytes.as_deref(), part) }
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn the_ranks_that_run_are_read_from_memtrace_phantom_ranks() {
        assert_eq!(parse("0,7,511/512"), Some(("0,7,511".to_owned(), 512)));
        assert_eq!(parse("0-3/8"), Some(("0-3".to_owned(), 8)));
        for text in ["", "0", "/8", "0/x", "a/8"] {
            assert_eq!(parse(text), None, "{text}");
        }
    }
}
