//! Counts the calls of CUDA that allocate or free device memory, so that a device sample can avoid them.
//!
//! While such a call is in progress, the driver may already count its bytes although the trace does not. A
//! report would then count these bytes twice: as memory that no traced call explains, and as memory of the
//! call.

use std::sync::atomic::Ordering::SeqCst;

use crate::own_page::OWN;

/// A call in progress, until it is dropped. It is dropped after the call's event has been recorded.
pub struct DeviceCall(());

impl DeviceCall {
    /// Counts a call that begins.
    #[must_use]
    pub fn begin() -> DeviceCall {
        OWN.device_calls_begun.fetch_add(1, SeqCst);
        DeviceCall(())
    }
}

impl Drop for DeviceCall {
    fn drop(&mut self) {
        OWN.device_calls_ended.fetch_add(1, SeqCst);
    }
}

/// Requests a sample of the devices at the writer's next look, because the driver has taken memory that no call shows.
pub fn request_sample() {
    OWN.is_unsampled.store(true, SeqCst);
}

/// Returns true if a sample was requested since the last call of [`sampled`].
pub(crate) fn is_sample_requested() -> bool {
    OWN.is_unsampled.load(SeqCst)
}

/// Notes that the devices are about to be sampled.
pub(crate) fn sampled() {
    OWN.is_unsampled.store(false, SeqCst);
}

/// Returns the number of calls so far, or `None` if a call is in progress. If two results are equal, no call
/// was in progress in between.
pub(crate) fn finished() -> Option<u64> {
    // The ended calls are read first: if the numbers are equal, every call that had begun by the second read
    // had ended.
    let ended = OWN.device_calls_ended.load(SeqCst);
    (OWN.device_calls_begun.load(SeqCst) == ended).then_some(ended)
}
