//! Events: positions in the work of a stream, and their device times.

use std::sync::Mutex;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use crate::core::call_table::answers;
use crate::core::capture::{
    self, CaptureStatus, Nodes, cudaErrorCapturedEvent, cudaErrorStreamCaptureImplicit,
    cudaErrorStreamCaptureInvalidated, cudaErrorStreamCaptureIsolation, cudaErrorStreamCaptureMerge,
};
use crate::core::ffi::{Destroyed, Handle, INVALID_HANDLE, INVALID_VALUE, NOT_READY, OK, Out, Status};
use crate::core::host_state::{current, fail};
use crate::core::lock::lock;
use crate::core::stream::{MAX_POLLS, Stream, Work, thread_only_observes};
use crate::cuda::captures;
use crate::cuda::streams::StreamHandle;

/// An event. An event that was never recorded counts as reached.
pub(crate) struct Event {
    /// The index of the device that was current when the event was created.
    device: AtomicUsize,
    /// True if the event records time.
    timed: AtomicBool,
    /// True after the event's destruction, until the next creation reuses the event.
    destroyed: AtomicBool,
    recording: Mutex<Recording>,
}

/// The destroyed events, which are reused because a profiler creates some for each op.
static DESTROYED: Destroyed<Event> = Destroyed::none();

/// The last recording of an event.
#[derive(Default)]
struct Recording {
    /// The stream of the recording, or `None` before the first recording.
    stream: Option<&'static Stream>,
    /// The work that was queued before the recording. The event is reached when this work is done.
    work: Work,
    /// The device time at which the event was recorded, in nanoseconds.
    time_ns: u64,
    /// The number of the capture during which the event was recorded, or 0.
    capture: u64,
    /// The nodes of that capture before the recording.
    nodes: Nodes,
    /// The number of unsuccessful polls since the recording while the device did no work.
    polls: u64,
    /// The device time of the last poll.
    polled_at_ns: u64,
}

/// The flag `cudaEventDisableTiming`.
pub(crate) const DISABLE_TIMING: u32 = 2;

/// Creates an event of the current device.
pub(crate) fn create(out: Out<Handle<Event>>, flags: u32) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    let (device, timed) = (current().index, flags & DISABLE_TIMING == 0);
    let Some((handle, event)) = DESTROYED.take() else {
        return out.give(Handle::new(Event {
            device: device.into(),
            timed: timed.into(),
            destroyed: false.into(),
            recording: Mutex::default(),
        }));
    };
    event.device.store(device, Relaxed);
    event.timed.store(timed, Relaxed);
    *lock(&event.recording) = Recording::default();
    event.destroyed.store(false, Relaxed);
    out.give(handle)
}

/// Destroys an event. The work before the event goes on: "the call does not block on
/// completion of the event".
fn destroy(handle: Handle<Event>) -> Status {
    let Some(event) = handle.get() else { return fail(INVALID_HANDLE) };
    if DESTROYED.add(handle, &event.destroyed) { OK } else { fail(INVALID_HANDLE) }
}

impl Event {
    fn device(&self) -> usize {
        self.device.load(Relaxed)
    }

    fn is_timed(&self) -> bool {
        self.timed.load(Relaxed)
    }

    fn record(&self, stream: &'static Stream) {
        let capture = stream.capturing().unwrap_or(0);
        *lock(&self.recording) = Recording {
            stream: Some(stream),
            work: if capture == 0 { stream.work() } else { Work::default() },
            time_ns: stream.clock().now(),
            capture,
            nodes: if capture == 0 { Nodes::default() } else { capture::nodes_before(capture, stream.id) },
            ..Recording::default()
        };
    }
}

/// Records an event, which must belong to the stream's device: "cudaEventRecord() will fail if the
/// input event and input stream are associated to different devices" (CUDA C++ Programming Guide,
/// Stream and Event Behavior).
fn record(event: Handle<Event>, stream: StreamHandle, flags: u32) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    if stream.stream().device != event.device() {
        return fail(INVALID_HANDLE);
    }
    if flags & EXTERNAL != 0 {
        return captures::queue_effect(stream, |stream| {
            event.record(stream);
            OK
        });
    }
    match stream.for_work() {
        Ok(stream) => {
            event.record(stream);
            OK
        }
        Err(status) => status,
    }
}

/// `cudaEventRecordExternal` and `cudaEventWaitExternal`: if the stream is captured, the call becomes a node
/// of the graph.
const EXTERNAL: u32 = 1;

/// Refuses a query of an event's progress. An event of captured work is refused in every mode ("It is invalid
/// to synchronize or query [...] a captured event"). For any other event, the query is a potentially unsafe
/// call: PyTorch met this refusal when a thread queried an event while another thread captured
/// (pytorch/pytorch pull request 104487).
fn refuse_progress(recording: &Recording) -> Option<Status> {
    match recording.capture {
        0 => capture::refuse_unsafe().map(fail),
        capture => {
            capture::invalidate(capture);
            Some(fail(cudaErrorCapturedEvent))
        }
    }
}

fn query(event: Handle<Event>) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    let recording = &mut *lock(&event.recording);
    if let Some(status) = refuse_progress(recording) {
        return status;
    }
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
    let recording = lock(&event.recording);
    if let Some(status) = refuse_progress(&recording) {
        return status;
    }
    recording.work.complete();
    OK
}

/// Makes a stream wait for an event. Waiting for captured work makes a stream part of the capture. "It is
/// invalid to merge two separate capture graphs by waiting on a captured event from a stream which is being
/// captured and is associated with a different capture graph than the event. It is invalid to wait on a
/// non-captured event from a stream which is being captured without specifying the cudaEventWaitExternal
/// flag."
fn wait(handle: StreamHandle, event: Handle<Event>, flags: u32) -> Status {
    let Some(event) = event.get() else { return fail(INVALID_HANDLE) };
    let stream = match handle.for_work() {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    let recording = lock(&event.recording);
    let of_event = match recording.capture {
        0 => CaptureStatus::None,
        capture => capture::status(capture),
    };
    match (stream.capturing(), of_event) {
        (_, CaptureStatus::Invalidated(_)) => fail(cudaErrorStreamCaptureInvalidated),
        (Some(own), CaptureStatus::Active(other)) if own != other => {
            capture::invalidate(own);
            capture::invalidate(other);
            fail(cudaErrorStreamCaptureMerge)
        }
        (None, CaptureStatus::Active(capture)) if handle.is_legacy() => {
            capture::invalidate(capture);
            fail(cudaErrorStreamCaptureImplicit)
        }
        (_, CaptureStatus::Active(capture)) => {
            capture::join(capture, stream.as_captured(), &recording.nodes);
            stream.join(capture);
            OK
        }
        (Some(_), CaptureStatus::None) if flags & EXTERNAL != 0 => {
            stream.launch(0);
            OK
        }
        // An event of a finished capture covers no work, like an event that was never recorded.
        (Some(capture), CaptureStatus::None) if recording.capture == 0 && recording.stream.is_some() => {
            capture::invalidate(capture);
            fail(cudaErrorStreamCaptureIsolation)
        }
        (Some(_), CaptureStatus::None) => OK,
        (None, CaptureStatus::None) => {
            stream.wait_for(&recording.work);
            OK
        }
    }
}

/// Writes the milliseconds of device time between two events, which are the assumed cost of the work between
/// them. Both events must belong to one device: "cudaEventElapsedTime() will fail if the two input events are
/// associated to different devices" (CUDA C++ Programming Guide, Stream and Event Behavior). The codes
/// come from `cuda_runtime_api.h`.
fn elapsed(out: Out<f32>, from: Handle<Event>, to: Handle<Event>) -> Status {
    let (Some(from), Some(to)) = (from.get(), to.get()) else { return fail(INVALID_HANDLE) };
    if !from.is_timed() || !to.is_timed() || from.device() != to.device() {
        return fail(INVALID_HANDLE);
    }
    let times = [from, to].map(|event| {
        let recording = lock(&event.recording);
        match recording.stream {
            None => Err(fail(INVALID_HANDLE)),
            Some(_) if recording.capture != 0 => Err(fail(cudaErrorCapturedEvent)),
            Some(_) if !recording.work.reached() => Err(NOT_READY),
            Some(_) => Ok(recording.time_ns),
        }
    });
    let (start, end) = match times {
        [Ok(start), Ok(end)] => (start, end),
        // An error of the program takes precedence over the status of work that is not done.
        [Err(NOT_READY), Err(status)] | [Err(status), _] | [_, Err(status)] => return status,
    };
    // On a card, two events are at least half a microsecond apart. A script may divide by this time, so it
    // must not be 0.
    let nanoseconds = if end >= start { (end - start).max(500) as f64 } else { -((start - end) as f64) };
    out.give((nanoseconds / 1e6) as f32)
}

answers! {
    Real fn cudaEventCreate(out: Out<Handle<Event>>) { create(out, 0) }
    Real fn {cudaEventCreateWithFlags, cuEventCreate}(out: Out<Handle<Event>>, flags: u32) {
        create(out, flags)
    }
    Real fn {cudaEventDestroy, cuEventDestroy_v2}(event: Handle<Event>) { destroy(event) }
    Real fn {cudaEventRecord, cuEventRecord}(event: Handle<Event>, stream: StreamHandle) {
        record(event, stream, 0)
    }
    Real fn {cudaEventRecordWithFlags, cuEventRecordWithFlags}(
        event: Handle<Event>, stream: StreamHandle, flags: u32,
    ) {
        record(event, stream, flags)
    }
    Real fn {cudaEventQuery, cuEventQuery}(event: Handle<Event>) { query(event) }
    Real fn {cudaEventSynchronize, cuEventSynchronize}(event: Handle<Event>) { synchronize(event) }
    Real fn {cudaStreamWaitEvent, cuStreamWaitEvent}(stream: StreamHandle, event: Handle<Event>, flags: u32) {
        wait(stream, event, flags)
    }
    Guess fn {cudaEventElapsedTime, cudaEventElapsedTime_v2, cuEventElapsedTime_v2, cuEventElapsedTime}(
        out: Out<f32>, from: Handle<Event>, to: Handle<Event>,
    ) {
        elapsed(out, from, to)
    }
}
