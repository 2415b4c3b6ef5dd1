//! Events: a point in the work of a stream, and its device time.

use std::ffi::c_int;
use std::sync::Mutex;

use crate::core::call_table::answers;
use crate::core::capture;
use crate::core::ffi::{Handle, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OK, Out, Status, Word};
use crate::core::host_state::{current, fail};
use crate::core::lock::lock;
use crate::core::stream::{MAX_POLLS, Stream, Work, thread_only_observes};
use crate::cuda::streams::StreamHandle;

/// An event. One that was never recorded counts as reached.
pub(crate) struct Event {
    /// The index of the device that was current when it was created.
    device: usize,
    /// Whether the event records time.
    timed: bool,
    recording: Mutex<Recording>,
}

/// The last recording of an event.
#[derive(Default)]
struct Recording {
    /// The stream, `None` before the first recording.
    stream: Option<&'static Stream>,
    /// The work before it.
    work: Work,
    /// Its device time.
    time_ns: u64,
    /// The capture during which it was recorded, or 0.
    capture: u64,
    /// Unsuccessful polls since then while the device did no work.
    polls: u64,
    /// The device time of the last poll.
    polled_at_ns: u64,
}

/// `cudaEventDisableTiming`.
pub(crate) const DISABLE_TIMING: u32 = 2;

/// Creates an event of the current device.
pub(crate) fn create(out: Out<Handle<Event>>, flags: u32) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    out.give(Handle::new(Event {
        device: current().index,
        timed: flags & DISABLE_TIMING == 0,
        recording: Mutex::default(),
    }))
}

impl Event {
    fn record(&self, stream: &'static Stream) {
        let capture = stream.capturing().unwrap_or(0);
        *lock(&self.recording) = Recording {
            stream: Some(stream),
            work: stream.work(),
            time_ns: stream.clock().now(),
            capture,
            ..Recording::default()
        };
    }
}

/// Records an event, which must be of the stream's device: "cudaEventRecord() will fail if the input event
/// and input stream are associated to different devices" (CUDA C++ Programming Guide, Stream and Event
/// Behavior).
fn record(event: Handle<Event>, stream: StreamHandle) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    let stream = stream.stream();
    if stream.device != event.device {
        return fail(INVALID_HANDLE);
    }
    event.record(stream);
    OK
}

fn query(event: Handle<Event>) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    let recording = &mut *lock(&event.recording);
    let Some(stream) = recording.stream else { return OK };
    if recording.work.reached() || thread_only_observes() {
        return OK;
    }
    let now = stream.clock().now();
    if recording.polled_at_ns != now {
        recording.polls = 0;
    }
    recording.polled_at_ns = now;
    recording.polls += 1;
    if recording.polls > MAX_POLLS {
        recording.work.complete();
        return OK;
    }
    NOT_READY
}

fn synchronize(event: Handle<Event>) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    lock(&event.recording).work.complete();
    OK
}

fn wait(waiting: StreamHandle, event: Handle<Event>) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    let waiting = waiting.stream();
    let recording = lock(&event.recording);
    match recording.capture {
        0 => waiting.wait_for(&recording.work),
        // Waiting for captured work makes a stream part of the capture.
        capture if capture::is_open(capture) => waiting.join(capture),
        _ => {}
    }
    OK
}

/// Milliseconds of device time between two events: the assumed cost of the work between them. Both must be
/// of one device: "cudaEventElapsedTime() will fail if the two input events are associated to different
/// devices" (CUDA C++ Programming Guide, Stream and Event Behavior). The codes are those of
/// `cuda_runtime_api.h`.
fn elapsed(out: Out<f32>, from: Handle<Event>, to: Handle<Event>) -> Status {
    let (Some(from), Some(to)) = (from.get(), to.get()) else { return fail(INVALID_HANDLE) };
    if !from.timed || !to.timed || from.device != to.device {
        return fail(INVALID_HANDLE);
    }
    let times = [from, to].map(|event| {
        let recording = lock(&event.recording);
        match recording.stream {
            None => Err(fail(INVALID_HANDLE)),
            Some(_) if !recording.work.reached() => Err(NOT_READY),
            Some(_) => Ok(recording.time_ns),
        }
    });
    let (start, end) = match times {
        [Ok(start), Ok(end)] => (start, end),
        [Err(INVALID_HANDLE), _] | [_, Err(INVALID_HANDLE)] => return INVALID_HANDLE,
        _ => return NOT_READY,
    };
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
