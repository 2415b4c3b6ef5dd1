//! Events: a point in a stream's work, and the time there.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::core::ffi::{INVALID_HANDLE, INVALID_VALUE, NOT_READY, OK, Out, Status, Word, leak};
use crate::core::host_state::fail;
use crate::cuda::graph;
use crate::cuda::stream::{POLLS, Stream, only_watches, stream};
use crate::table::call_table::answers;

/// An event. Without a recording it counts as reached.
struct Event {
    /// The stream it was recorded in last; 0 for never.
    stream: AtomicUsize,
    /// Device time of that.
    time: AtomicU64,
    /// The capture in which that was; 0 for none.
    capture: AtomicU64,
    /// How often it was asked for since, in vain, with the device not working on.
    polls: AtomicU64,
    polled_at: AtomicU64,
    timed: bool,
}

/// `cudaEventDisableTiming`.
pub(crate) const NO_TIMING: u32 = 2;

fn event(handle: usize) -> Option<&'static Event> {
    // SAFETY: by the C contract a handle is null or came from `create` below, and those are leaked.
    unsafe { (handle as *const Event).as_ref() }
}

/// Makes an event.
pub(crate) fn create(out: Out<usize>, flags: u32) -> Status {
    if out.address() == 0 {
        return fail(INVALID_VALUE);
    }
    out.give(leak(Event {
        stream: AtomicUsize::new(0),
        time: AtomicU64::new(0),
        capture: AtomicU64::new(0),
        polls: AtomicU64::new(0),
        polled_at: AtomicU64::new(0),
        timed: flags & NO_TIMING == 0,
    }))
}

fn record(handle: usize, on: usize) -> Status {
    let Some(event) = event(handle) else { return fail(INVALID_HANDLE) };
    let stream = stream(on);
    event.capture.store(stream.capturing().unwrap_or(0), Ordering::Relaxed);
    event.time.store(stream.device().now(), Ordering::Relaxed);
    event.polls.store(0, Ordering::Relaxed);
    event.stream.store(std::ptr::from_ref(stream) as usize, Ordering::Relaxed);
    OK
}

impl Event {
    fn recorded_in(&self) -> Option<&'static Stream> {
        match self.stream.load(Ordering::Relaxed) {
            0 => None,
            handle => Some(stream(handle)),
        }
    }

    fn reached(&self) -> bool {
        let time = self.time.load(Ordering::Relaxed);
        self.recorded_in().is_none_or(|stream| stream.reached(time))
    }
}

fn query(handle: usize) -> Status {
    let Some(event) = event(handle) else { return fail(INVALID_HANDLE) };
    if event.reached() || only_watches() {
        return OK;
    }
    let Some(stream) = event.recorded_in() else { return OK };
    let now = stream.device().now();
    if event.polled_at.swap(now, Ordering::Relaxed) != now {
        event.polls.store(0, Ordering::Relaxed);
    }
    if event.polls.fetch_add(1, Ordering::Relaxed) >= POLLS {
        stream.wait_until(event.time.load(Ordering::Relaxed));
        return OK;
    }
    // Not kept for cudaGetLastError by the real runtime either: it is no failure.
    NOT_READY
}

fn synchronize(handle: usize) -> Status {
    let Some(event) = event(handle) else { return fail(INVALID_HANDLE) };
    if let Some(stream) = event.recorded_in() {
        stream.wait_until(event.time.load(Ordering::Relaxed));
    }
    OK
}

fn wait(on: usize, handle: usize) -> Status {
    let Some(event) = event(handle) else { return fail(INVALID_HANDLE) };
    let waiting = stream(on);
    match event.capture.load(Ordering::Relaxed) {
        0 => {
            if let Some(other) = event.recorded_in() {
                waiting.wait_for(other, event.time.load(Ordering::Relaxed));
            }
        }
        // Waiting for captured work makes a stream part of the capture.
        capture if graph::is_open(capture) => waiting.join(capture),
        _ => {}
    }
    OK
}

/// Device time between two events: the sum of what the work between was taken to cost.
fn elapsed(out: Out<f32>, from: usize, to: usize) -> Status {
    let (Some(from), Some(to)) = (event(from), event(to)) else { return fail(INVALID_HANDLE) };
    if !from.timed || !to.timed || from.recorded_in().is_none() || to.recorded_in().is_none() {
        return fail(INVALID_HANDLE);
    }
    if !from.reached() || !to.reached() {
        return NOT_READY;
    }
    let (start, end) = (from.time.load(Ordering::Relaxed), to.time.load(Ordering::Relaxed));
    // Two events with nothing between are still half a microsecond apart on a card, and a script
    // may divide by this.
    let nanoseconds = if end >= start { (end - start).max(500) as f64 } else { -((start - end) as f64) };
    out.give((nanoseconds / 1e6) as f32)
}

answers! {
    Real fn cudaEventCreate(out: Out<usize>) { create(out, 0) }
    Real fn cudaEventCreateWithFlags(out: Out<usize>, flags: u32) { create(out, flags) }
    Real fn cudaEventDestroy(_handle: Word) { OK }
    Real fn cudaEventRecord(handle: Word, on: Word) { record(handle, on) }
    Real fn cudaEventRecordWithFlags(handle: Word, on: Word, _flags: u32) { record(handle, on) }
    Real fn cudaEventQuery(handle: Word) { query(handle) }
    Real fn cudaEventSynchronize(handle: Word) { synchronize(handle) }
    Real fn cudaStreamWaitEvent(on: Word, handle: Word, _flags: u32) { wait(on, handle) }
    Guess fn cudaEventElapsedTime(out: Out<f32>, from: Word, to: Word) { elapsed(out, from, to) }
    Guess fn cudaEventElapsedTime_v2(out: Out<f32>, from: Word, to: Word) { elapsed(out, from, to) }
    Real fn cuEventCreate(out: Out<usize>, flags: u32) { create(out, flags) }
    Real fn cuEventDestroy_v2(_handle: Word) { OK }
    Real fn cuEventRecord(handle: Word, on: Word) { record(handle, on) }
    Real fn cuEventRecordWithFlags(handle: Word, on: Word, _flags: u32) { record(handle, on) }
    Real fn cuEventQuery(handle: Word) { query(handle) }
    Real fn cuEventSynchronize(handle: Word) { synchronize(handle) }
    Real fn cuStreamWaitEvent(on: Word, handle: Word, _flags: c_int) { wait(on, handle) }
    Guess fn cuEventElapsedTime_v2(out: Out<f32>, from: Word, to: Word) { elapsed(out, from, to) }
    Guess fn cuEventElapsedTime(out: Out<f32>, from: Word, to: Word) { elapsed(out, from, to) }
}
