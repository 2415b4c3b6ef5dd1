//! One stream: the work queued on it, the work that is done, and its capture.
//!
//! The device lags behind the program, as a busy card does: queued work is done when the program waits for
//! it, or when the device has worked [`LAG_NS`] longer. Time is device time ([`DeviceClock`]), so it is the
//! same in every run.
//!
//! An event, a wait and a synchronization each cover an exact amount of work ([`Work`]): for some streams,
//! all launches up to a position. A stream that waits for an event also waits for this work. An event that is
//! recorded later in that stream includes the work, even if it belongs to a stream of another device.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use crate::core::capture::{self, CaptureStatus, CapturedStream};
use crate::core::clock::DeviceClock;
use crate::core::lock::lock;

/// The lag of the device behind the program: the time of a few hundred kernels.
pub(crate) const LAG_NS: u64 = 500_000;

/// The number of unsuccessful polls after which the next poll marks all queued work as done, so that polling
/// loops end.
pub(crate) const MAX_POLLS: u64 = 64;

/// `cudaStreamNonBlocking`, with which the stream and the legacy default stream do not wait for each other.
const NON_BLOCKING: u32 = 1;

/// A stream of the program, or a default stream.
pub(crate) struct Stream {
    /// The index of the stream's device.
    pub(crate) device: usize,
    pub(crate) priority: c_int,
    pub(crate) flags: u32,
    /// The id of the stream, which is unique in the process.
    pub(crate) id: u64,
    clock: Arc<DeviceClock>,
    /// The number of launches so far.
    queued: AtomicU64,
    /// The device time of the last launch.
    queued_ns: AtomicU64,
    /// The number of the last launch that is known to be done.
    done: AtomicU64,
    /// The work of other streams that the next launch in this stream waits for.
    waits: Mutex<Work>,
    /// The number of the capture that this stream takes part in, or 0.
    capture: AtomicU64,
    polls: AtomicU64,
}

/// A position in a stream: all launches up to one of them.
#[derive(Clone, Copy)]
struct Position {
    stream: &'static Stream,
    launches: u64,
    /// The device time of the last of these launches.
    time_ns: u64,
}

impl Position {
    fn reached(&self) -> bool {
        self.launches <= self.stream.done.load(Ordering::Relaxed)
            || self.time_ns + LAG_NS <= self.stream.clock.now()
    }
}

/// Work in some streams, as at most one position in each. It includes the work that this work waited for.
#[derive(Clone, Default)]
pub(crate) struct Work(Vec<Position>);

impl Work {
    /// Returns true if all of the work is done.
    pub(crate) fn reached(&self) -> bool {
        self.0.iter().all(Position::reached)
    }

    /// Marks all of the work as done, because the program waited for it.
    pub(crate) fn complete(&self) {
        for position in &self.0 {
            position.stream.done.fetch_max(position.launches, Ordering::Relaxed);
        }
    }

    /// Adds other work. Work that is done is removed or omitted.
    fn add(&mut self, other: &Self) {
        self.0.retain(|position| !position.reached());
        for &position in other.0.iter().filter(|position| !position.reached()) {
            match self.0.iter_mut().find(|known| known.stream.id == position.stream.id) {
                Some(known) if known.launches < position.launches => *known = position,
                Some(_) => {}
                None => self.0.push(position),
            }
        }
    }
}

thread_local! {
    static QUEUED_WORK: Cell<bool> = const { Cell::new(false) };
}

/// Returns true if the calling thread has never queued work. Such a thread only polls for work of other
/// threads, as NCCL's watchdog does ten times a second. On a real card, that work would be done by then.
pub(crate) fn thread_only_observes() -> bool {
    !QUEUED_WORK.try_with(Cell::get).unwrap_or(false)
}

impl Stream {
    /// Creates a stream of the device with this index and clock.
    pub(crate) fn new(device: usize, clock: Arc<DeviceClock>, priority: c_int, flags: u32) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(1);
        Self {
            device,
            priority,
            flags,
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            clock,
            queued: AtomicU64::new(0),
            queued_ns: AtomicU64::new(0),
            done: AtomicU64::new(0),
            waits: Mutex::default(),
            capture: AtomicU64::new(0),
            polls: AtomicU64::new(0),
        }
    }

    /// Returns the clock of the stream's device.
    pub(crate) fn clock(&self) -> &DeviceClock {
        &self.clock
    }

    /// Returns the capture that records the work of this stream, if any.
    pub(crate) fn capturing(&self) -> Option<u64> {
        match self.capture_status() {
            CaptureStatus::Active(capture) => Some(capture),
            CaptureStatus::None | CaptureStatus::Invalidated(_) => None,
        }
    }

    /// Returns the relation of this stream to captures.
    pub(crate) fn capture_status(&self) -> CaptureStatus {
        match self.capture.load(Ordering::Relaxed) {
            0 => CaptureStatus::None,
            number => {
                let status = capture::status(number);
                if status == CaptureStatus::None {
                    self.capture.store(0, Ordering::Relaxed);
                }
                status
            }
        }
    }

    /// Adds this stream to a capture.
    pub(crate) fn join(&self, capture: u64) {
        self.capture.store(capture, Ordering::Relaxed);
    }

    /// Returns the properties of this stream that captures use.
    pub(crate) fn as_captured(&self) -> CapturedStream {
        CapturedStream { id: self.id, device: self.device, blocking: self.flags & NON_BLOCKING == 0 }
    }

    /// Queues work that takes `cost_ns` nanoseconds. While the stream is captured, the work becomes a graph
    /// node.
    pub(crate) fn launch(&self, cost_ns: u64) {
        let _ = QUEUED_WORK.try_with(|queued| queued.set(true));
        match self.capture_status() {
            CaptureStatus::None => {}
            CaptureStatus::Active(capture) => return capture::add_node(capture, self.id, cost_ns),
            CaptureStatus::Invalidated(_) => return,
        }
        self.clock.advance(cost_ns);
        self.queued_ns.store(self.clock.now(), Ordering::Relaxed);
        self.queued.fetch_add(1, Ordering::Release);
    }

    /// Returns the work queued so far, including the work of other streams that it waits for.
    pub(crate) fn work(&'static self) -> Work {
        let mut work = Work::default();
        work.add(&lock(&self.waits));
        // The number is read first, so that a concurrent launch can only make the time later.
        let launches = self.queued.load(Ordering::Acquire);
        let time_ns = self.queued_ns.load(Ordering::Relaxed);
        work.add(&Work(vec![Position { stream: self, launches, time_ns }]));
        work
    }

    /// Makes later work in this stream wait for other work.
    pub(crate) fn wait_for(&self, work: &Work) {
        lock(&self.waits).add(work);
    }

    /// Returns true if all queued work is done. After [`MAX_POLLS`] unsuccessful polls, the next poll marks
    /// the work as done, and the poll after it returns true.
    pub(crate) fn poll(&'static self) -> bool {
        let work = self.work();
        if work.reached() {
            self.polls.store(0, Ordering::Relaxed);
            return true;
        }
        if self.polls.fetch_add(1, Ordering::Relaxed) >= MAX_POLLS {
            work.complete();
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates streams that share a clock, as the streams of one device do.
    fn streams<const N: usize>(clock: &Arc<DeviceClock>) -> [&'static Stream; N] {
        std::array::from_fn(|_| &*Box::leak(Box::new(Stream::new(0, Arc::clone(clock), 0, 0))))
    }

    #[test]
    fn work_is_done_after_the_lag_or_a_wait() {
        let [stream] = streams(&Arc::default());
        stream.launch(1000);
        let work = stream.work();
        assert!(!work.reached());
        stream.launch(LAG_NS);
        assert!(work.reached() && !stream.work().reached());
        stream.work().complete();
        assert!(stream.poll());
    }

    #[test]
    fn a_wait_completes_the_streams_that_a_stream_waits_for() {
        let [first, second] = streams(&Arc::default());
        first.launch(1000);
        second.wait_for(&first.work());
        second.launch(1000);
        assert!(!first.work().reached());
        second.work().complete();
        assert!(first.work().reached());
    }

    #[test]
    fn a_wait_for_another_device_counts_even_when_nothing_follows_it() {
        let [near] = streams(&Arc::default());
        let [far] = streams(&Arc::default());
        far.launch(1000);
        near.wait_for(&far.work());
        // Setup: the near device has worked no time, so its clock does not complete the work -> the work is
        // not done.
        assert!(!near.work().reached());
        near.work().complete();
        assert!(far.work().reached() && near.work().reached());
    }

    #[test]
    fn an_event_does_not_replace_a_wait_that_follows_it() {
        let [first, second, third] = streams(&Arc::default());
        first.launch(1000);
        third.launch(1000);
        second.launch(1000);
        let event = second.work();
        second.wait_for(&first.work());
        event.complete();
        assert!(!first.work().reached() && !third.work().reached());
        // Setup: a wait for `early`, then a launch in the first stream -> completing the wait completes
        // `early`, but not that launch.
        let early = first.work();
        first.launch(1000);
        second.wait_for(&early);
        second.work().complete();
        assert!(early.reached() && !first.work().reached());
    }

    #[test]
    fn a_wait_passes_through_a_stream_in_between() {
        let [first, second, third] = streams(&Arc::default());
        first.launch(1000);
        second.wait_for(&first.work());
        third.wait_for(&second.work());
        third.work().complete();
        assert!(first.work().reached());
    }

    #[test]
    fn two_streams_that_wait_for_each_other_keep_few_positions() {
        let [first, second] = streams(&Arc::default());
        first.launch(1000);
        for _ in 0..10_000 {
            second.wait_for(&first.work());
            first.wait_for(&second.work());
        }
        assert!(first.work().0.len() <= 2 && !second.work().reached());
    }

    #[test]
    fn a_loop_that_polls_a_stream_ends() {
        let [stream] = streams(&Arc::default());
        stream.launch(1000);
        let polls = (0..1000).take_while(|_| !stream.poll()).count() as u64;
        assert_eq!(polls, MAX_POLLS + 1);
    }
}
