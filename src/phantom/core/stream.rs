//! One stream: the work queued on it, the work that is done, and its capture.
//!
//! The device runs behind the program, as a busy card does: queued work is done when the program waits for
//! it, or when the device has worked [`LAG_NS`] longer. Time is device time ([`DeviceClock`]), so it is the
//! same in every run.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::core::capture;
use crate::core::clock::DeviceClock;
use crate::core::lock::lock;

/// The delay of the device behind the program: the time of a few hundred kernels.
pub(crate) const LAG_NS: u64 = 500_000;

/// The number of polls without other work after which everything queued is done: a loop that polls must end.
pub(crate) const MAX_POLLS: u64 = 64;

/// A stream.
pub(crate) struct Stream {
    /// The index of its device.
    pub(crate) device: usize,
    pub(crate) priority: c_int,
    pub(crate) flags: u32,
    /// Unique in the process.
    pub(crate) id: u64,
    clock: Arc<DeviceClock>,
    /// Work queued up to this device time is done.
    done_ns: AtomicU64,
    /// Device time of the last work queued here.
    queued_ns: AtomicU64,
    /// The capture that this stream takes part in, or 0.
    capture: AtomicU64,
    /// Other streams that this one waits for, by their id, with the device time to wait for.
    waits: Mutex<HashMap<u64, (&'static Stream, u64)>>,
    polls: AtomicU64,
}

thread_local! {
    static QUEUED_WORK: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if the calling thread never queued work. Such a thread only observes, as NCCL's watchdog does
/// ten times a second: the work that it asks about would be done on a card.
pub(crate) fn thread_only_observes() -> bool {
    !QUEUED_WORK.try_with(Cell::get).unwrap_or(false)
}

impl Stream {
    /// A stream of the device with this index and clock.
    pub(crate) fn new(device: usize, clock: Arc<DeviceClock>, priority: c_int, flags: u32) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        Self {
            device,
            priority,
            flags,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            clock,
            done_ns: AtomicU64::new(0),
            queued_ns: AtomicU64::new(0),
            capture: AtomicU64::new(0),
            waits: Mutex::default(),
            polls: AtomicU64::new(0),
        }
    }

    /// The clock of its device.
    pub(crate) fn clock(&self) -> &DeviceClock {
        &self.clock
    }

    /// The capture that this stream takes part in, while it is in progress.
    pub(crate) fn capturing(&self) -> Option<u64> {
        match self.capture.load(Ordering::Relaxed) {
            0 => None,
            id if capture::is_open(id) => Some(id),
            _ => {
                self.capture.store(0, Ordering::Relaxed);
                None
            }
        }
    }

    /// Makes this stream part of a capture.
    pub(crate) fn join(&self, capture: u64) {
        self.capture.store(capture, Ordering::Relaxed);
    }

    /// Queues work that takes `cost_ns` nanoseconds. While the stream is captured, the work becomes a graph
    /// node.
    pub(crate) fn launch(&self, cost_ns: u64) {
        let _ = QUEUED_WORK.try_with(|queued| queued.set(true));
        if let Some(capture) = self.capturing() {
            capture::add_node(capture, cost_ns);
            return;
        }
        self.clock.advance(cost_ns);
        self.queued_ns.store(self.clock.now(), Ordering::Relaxed);
    }

    /// Returns true if work queued up to `time_ns` is done.
    pub(crate) fn reached(&self, time_ns: u64) -> bool {
        time_ns <= self.done_ns.load(Ordering::Relaxed) || time_ns + LAG_NS <= self.clock.now()
    }

    /// Marks the work up to `time_ns` as done, because the program waited for it.
    pub(crate) fn wait_until(&self, time_ns: u64) {
        let before = self.done_ns.fetch_max(time_ns, Ordering::Relaxed);
        if before >= time_ns {
            return;
        }
        // The work that this stream waited for is done too. Taken out first: two streams may wait for each
        // other.
        let waits = std::mem::take(&mut *lock(&self.waits));
        for (other, time_ns) in waits.into_values() {
            other.wait_until(time_ns);
        }
    }

    /// Makes later work here wait for the work of another stream up to `time_ns`.
    pub(crate) fn wait_for(&self, other: &'static Stream, time_ns: u64) {
        if other.reached(time_ns) || self.id == other.id {
            return;
        }
        let mut waits = lock(&self.waits);
        let (_, until) = waits.entry(other.id).or_insert((other, 0));
        *until = (*until).max(time_ns);
    }

    /// Returns true if all queued work is done. After [`MAX_POLLS`] unsuccessful polls, the next one
    /// succeeds.
    pub(crate) fn poll(&self) -> bool {
        let queued = self.queued_ns.load(Ordering::Relaxed);
        if self.reached(queued) {
            self.polls.store(0, Ordering::Relaxed);
            return true;
        }
        if self.polls.fetch_add(1, Ordering::Relaxed) >= MAX_POLLS {
            self.wait_until(queued);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_work_is_done_after_the_lag_or_a_wait() {
        let stream = Stream::new(0, Arc::default(), 0, 0);
        stream.launch(1000);
        let queued = stream.clock().now();
        assert!(!stream.reached(queued));
        stream.launch(LAG_NS);
        assert!(stream.reached(queued));
        let queued = stream.clock().now();
        stream.wait_until(queued);
        assert!(stream.poll());
    }

    #[test]
    fn a_wait_completes_the_streams_that_a_stream_waits_for() {
        let clock = Arc::<DeviceClock>::default();
        let [first, second]: [&'static Stream; 2] =
            [0, 1].map(|_| &*Box::leak(Box::new(Stream::new(0, Arc::clone(&clock), 0, 0))));
        first.launch(1000);
        let queued = clock.now();
        second.wait_for(first, queued);
        second.launch(1000);
        assert!(!first.reached(queued));
        second.wait_until(clock.now());
        assert!(first.reached(queued));
    }

    #[test]
    fn a_loop_that_polls_a_stream_ends() {
        let stream = Stream::new(0, Arc::default(), 0, 0);
        stream.launch(1000);
        let polls = (0..1000).take_while(|_| !stream.poll()).count() as u64;
        assert_eq!(polls, MAX_POLLS + 1);
    }
}
