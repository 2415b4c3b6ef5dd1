//! Ranges: the code that the injection and the hooks of the legacy library share.

use std::ffi::c_int;

use super::names::{Attributes, message_of};
use crate::attribution::ranges;
use crate::guard::shielded;
use crate::runtime::fork::ForkSafe;

/// The domain of calls without a domain argument. Calls with a domain argument refer to this domain by a null
/// handle.
pub(super) const DEFAULT_DOMAIN: usize = 0;

/// The result of NVTX's push and pop without a tool that tracks ranges. The program must get the same result
/// with memtrace.
pub(super) const NO_TRACKING: c_int = -2;

/// For each open start/end range whose id comes from an earlier tool: the tool's id, which the program knows,
/// and our id. Pairs of equal ids are not stored.
static IDS: ForkSafe<Vec<(u64, u64)>> = ForkSafe::new(Vec::new());

/// Opens a start/end range and returns its id for the program: the earlier tool's id, or our own.
pub(super) fn start(name: &str, domain: usize, category: Option<&str>, theirs: Option<u64>) -> u64 {
    let ours = shielded(|| ranges::start(name, domain, category)).unwrap_or(0);
    match theirs {
        Some(theirs) if theirs != ours => {
            IDS.with(|ids| ids.push((theirs, ours)));
            theirs
        }
        _ => ours,
    }
}

/// Closes the start/end range that the program knows as `id`.
pub(super) fn end(id: u64) {
    let ours = IDS.with(|ids| {
        let index = ids.iter().position(|(theirs, _)| *theirs == id)?;
        Some(ids.swap_remove(index).1)
    });
    shielded(|| ranges::end(ours.unwrap_or(id)));
}

/// Opens a push/pop range of a domain.
///
/// # Safety
/// `attributes` is null or the program's own, as it passed them to NVTX.
pub(super) unsafe fn push_in_domain(domain: usize, attributes: *const Attributes) {
    shielded(|| {
        // SAFETY: by the contract.
        let (name, category) = unsafe { message_of(domain, attributes) };
        ranges::push(&name, domain, category.as_deref());
    });
}

/// Same as [`start`], with the name and the category of `attributes`.
///
/// # Safety
/// `attributes` is null or the program's own, as it passed them to NVTX.
pub(super) unsafe fn start_in_domain(
    domain: usize,
    attributes: *const Attributes,
    theirs: Option<u64>,
) -> u64 {
    // SAFETY: by the contract.
    let (name, category) = shielded(|| unsafe { message_of(domain, attributes) }).unwrap_or_default();
    start(&name, domain, category.as_deref(), theirs)
}
