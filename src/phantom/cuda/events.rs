//! Events: a point in the work of a stream, and its device time.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};

use crate::core::call_table::answers;
use crate::core::capture;
use crate::core::ffi::{Handle, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OK, Out, Status, Word};
use crate::core::host_state::fail;
use crate::core::stream::{MAX_POLLS, Stream, thread_only_observes};
use crate::cuda::streams::StreamHandle;

/// An event. One that was never recorded counts as reached.
pub(crate) struct Event {
    /// The stream in which it was recorded last, or null. Only written from a `&'static Stream`.
    stream: AtomicPtr<Stream>,
    /// The device time of that recording.
    time_ns: AtomicU64,
    /// The capture during which it was recorded, or 0.
    capture: AtomicU64,
    /// Unsuccessful polls since then while the device did no work.
    polls: AtomicU64,
    /// The device time of the last poll.
    polled_at_ns: AtomicU64,
    /// True if the event records time.
    timed: bool,
}

/// `cudaEventDisableTiming`.
pub(crate) const DISABLE_TIMING: u32 = 2;

/// Creates an event.
pub(crate) fn create(out: Out<Handle<Event>>, flags: u32) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    out.give(Handle::new(Event {
        stream: AtomicPtr::new(null_mut()),
        time_ns: AtomicU64::new(0),
        capture: AtomicU64::new(0),
        polls: AtomicU64::new(0),
        polled_at_ns: AtomicU64::new(0),
        timed: flags & DISABLE_TIMING == 0,
    }))
}

impl Event {
    fn record(&self, stream: &'static Stream) {
        self.capture.store(stream.capturing().unwrap_or(0), Ordering::Relaxed);
        self.time_ns.store(stream.clock().now(), Ordering::Relaxed);
        self.polls.store(0, Ordering::Relaxed);
        self.stream.store(std::ptr::from_ref(stream).cast_mut(), Ordering::Release);
    }

    /// The stream in which it was recorded last.
    fn stream(&self) -> Option<&'static Stream> {
        // SAFETY: null or from a `&'static Stream`, which `record` stored.
        unsafe { self.stream.load(Ordering::Acquire).as_ref() }
    }

    fn time_ns(&self) -> u64 {
        self.time_ns.load(Ordering::Relaxed)
    }

    fn reached(&self) -> bool {
        self.stream().is_none_or(|stream| stream.reached(self.time_ns()))
    }
}

fn record(event: Handle<Event>, stream: StreamHandle) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    event.record(stream.stream());
    OK
}

fn query(event: Handle<Event>) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    if event.reached() || thread_only_observes() {
        return OK;
    }
    let Some(stream) = event.stream() else { return OK };
    let now = stream.clock().now();
    if event.polled_at_ns.swap(now, Ordering::Relaxed) != now {
        event.polls.store(0, Ordering::Relaxed);
    }
    if event.polls.fetch_add(1, Ordering::Relaxed) >= MAX_POLLS {
        stream.wait_until(event.time_ns());
        return OK;
    }
    NOT_READY
}

fn synchronize(event: Handle<Event>) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    if let Some(stream) = event.stream() {
        stream.wait_until(event.time_ns());
    }
    OK
}

fn wait(waiting: StreamHandle, event: Handle<Event>) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    let waiting = waiting.stream();
    match event.capture.load(Ordering::Relaxed) {
        0 => {
            if let Some(other) = event.stream() {
                waiting.wait_for(other, event.time_ns());
            }
        }
        // Waiting for captured work makes a stream part of the capture.
        capture if capture::is_open(capture) => waiting.join(capture),
        _ => {}
    }
    OK
}

/// Milliseconds of device time between two events: the assumed cost of the work between them.
fn elapsed(out: Out<f32>, from: Handle<Event>, to: Handle<Event>) -> Status {
    let (Some(from), Some(to)) = (from.get(), to.get()) else { return fail(INVALID_HANDLE) };
    if !from.timed || !to.timed || from.stream().is_none() || to.stream().is_none() {
        return fail(INVALID_HANDLE);
    }
    if !from.reached() || !to.reached() {
        return NOT_READY;
    }
    let (start, end) = (from.time_ns(), to.time_ns());
    // On a card two events are half a microsecond apart even with no work between them, and a script may
    // divide by this.
    let nanoseconds = if end >= start { (end - start).max(500) as f64 } else { -((start - end) as f64) };
    out.give((nanoseconds / 1e6) as f32)
}

answers! {
    Real fn cudaEventCreate(out: Out<Handle<Event>>) { create(out, 0) }
    Real fn cudaEventCreateWithFlags(out: Out<Handle<Event>>, flags: u32) { create(out, flags) }
    Real fn cudaEventDestroy(_event: Word) { OK }
    Real fn cudaEventRecord(event: Handle<Event>, stream: StreamHandle) { record(event, stream) }
    Real fn cudaEventRecordWithFlags(event: Handle<Event>, stream: StreamHandle, _flags: u32) {
        record(event, stream)
    }
    Real fn cudaEventQuery(event: Handle<Event>) { query(event) }
    Real fn cudaEventSynchronize(event: Handle<Event>) { synchronize(event) }
    Real fn cudaStreamWaitEvent(stream: StreamHandle, event: Handle<Event>, _flags: u32) {
        wait(stream, event)
    }
    Guess fn cudaEventElapsedTime(out: Out<f32>, from: Handle<Event>, to: Handle<Event>) {
        elapsed(out, from, to)
    }
    Guess fn cudaEventElapsedTime_v2(out: Out<f32>, from: Handle<Event>, to: Handle<Event>) {
        elapsed(out, from, to)
    }
    Real fn cuEventCreate(out: Out<Handle<Event>>, flags: u32) { create(out, flags) }
    Real fn cuEventDestroy_v2(_event: Word) { OK }
    Real fn cuEventRecord(event: Handle<Event>, stream: StreamHandle) { record(event, stream) }
    Real fn cuEventRecordWithFlags(event: Handle<Event>, stream: StreamHandle, _flags: u32) {
        record(event, stream)
    }
    Real fn cuEventQuery(event: Handle<Event>) { query(event) }
    Real fn cuEventSynchronize(event: Handle<Event>) { synchronize(event) }
    Real fn cuStreamWaitEvent(stream: StreamHandle, event: Handle<Event>, _flags: c_int) {
        wait(stream, event)
    }
    Guess fn cuEventElapsedTime_v2(out: Out<f32>, from: Handle<Event>, to: Handle<Event>) {
        elapsed(out, from, to)
    }
    Guess fn cuEventElapsedTime(out: Out<f32>, from: Handle<Event>, to: Handle<Event>) {
        elapsed(out, from, to)
    }
}
