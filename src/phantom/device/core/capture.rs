//! Stream captures in progress: their rules, their streams, and the work that they recorded.
//!
//! A capture lives from `cudaStreamBeginCapture` to `cudaStreamEndCapture`. A stream holds only the number of
//! its capture, so streams do not depend on graphs.
//!
//! The rules come from the CUDA C++ Programming Guide (Stream Capture: Prohibited and Unhandled
//! Operations, Invalidation) and from `cudaThreadExchangeStreamCaptureMode` in `cuda_runtime_api.h`. "When an
//! invalid operation is attempted during stream capture, any associated capture graphs are invalidated", and
//! further use of their streams and events fails until the capture is ended, which fails, too.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap};
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::thread::ThreadId;

use cudarc::runtime::sys::{cudaError, cudaStreamCaptureMode, cudaStreamCaptureStatus};

use crate::core::ffi::{Status, codes};
use crate::core::lock::lock;

codes!(pub(crate) cudaError {
    cudaErrorIllegalState,
    cudaErrorStreamCaptureUnsupported,
    cudaErrorStreamCaptureInvalidated,
    cudaErrorStreamCaptureMerge,
    cudaErrorStreamCaptureUnmatched,
    cudaErrorStreamCaptureUnjoined,
    cudaErrorStreamCaptureIsolation,
    cudaErrorStreamCaptureImplicit,
    cudaErrorCapturedEvent,
    cudaErrorStreamCaptureWrongThread,
});

codes!(cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeRelaxed });

codes!(cudaStreamCaptureStatus {
    cudaStreamCaptureStatusNone,
    cudaStreamCaptureStatusActive,
    cudaStreamCaptureStatusInvalidated,
});

/// The size of a graph's work: the number of nodes, and their device time.
#[derive(Debug, Default)]
pub(crate) struct RecordedWork {
    nodes: AtomicU64,
    cost_ns: AtomicU64,
}

impl RecordedWork {
    /// Adds a node that takes `cost_ns` nanoseconds of device time when it is launched.
    pub(crate) fn add_node(&self, cost_ns: u64) {
        self.nodes.fetch_add(1, Ordering::Relaxed);
        self.cost_ns.fetch_add(cost_ns, Ordering::Relaxed);
    }

    /// Returns the number of nodes so far. A capture in progress may still add nodes.
    pub(crate) fn nodes(&self) -> u64 {
        self.nodes.load(Ordering::Relaxed)
    }

    /// Returns the device time of one launch, in nanoseconds.
    pub(crate) fn cost_ns(&self) -> u64 {
        self.cost_ns.load(Ordering::Relaxed)
    }

    /// Returns a copy of the work. Nodes that are added to the original later are not in the copy.
    pub(crate) fn snapshot(&self) -> Self {
        Self { nodes: AtomicU64::new(self.nodes()), cost_ns: AtomicU64::new(self.cost_ns()) }
    }
}

/// The relation of a stream to captures.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum CaptureStatus {
    /// The stream takes part in no capture.
    None,
    /// The stream takes part in the capture with this number.
    Active(u64),
    /// The stream takes part in the capture with this number, which an invalid operation has invalidated.
    Invalidated(u64),
}

impl CaptureStatus {
    /// Returns the status as a code of `cudaStreamCaptureStatus`.
    pub(crate) fn code(self) -> c_int {
        match self {
            Self::None => cudaStreamCaptureStatusNone,
            Self::Active(_) => cudaStreamCaptureStatusActive,
            Self::Invalidated(_) => cudaStreamCaptureStatusInvalidated,
        }
    }
}

/// The properties of a stream that captures use.
#[derive(Clone, Copy)]
pub(crate) struct CapturedStream {
    /// The id of the stream, which is unique in the process.
    pub(crate) id: u64,
    /// The index of the stream's device.
    pub(crate) device: usize,
    /// True if the stream was created without `cudaStreamNonBlocking`.
    pub(crate) blocking: bool,
}

/// A set of nodes of a capture. For each stream, by its id, the value is a number of nodes: the set contains
/// that many of the stream's first nodes.
#[derive(Clone, Default)]
pub(crate) struct Nodes(HashMap<u64, u64>);

impl Nodes {
    fn add(&mut self, other: &Self) {
        for (&stream, &count) in &other.0 {
            let known = self.0.entry(stream).or_default();
            *known = count.max(*known);
        }
    }
}

struct Member {
    stream: CapturedStream,
    /// The nodes that the next node in this stream depends on, including the stream's own nodes.
    before: Nodes,
}

/// A capture that has begun and not ended. It may have been invalidated.
struct Capture {
    work: &'static RecordedWork,
    mode: c_int,
    thread: ThreadId,
    /// The id of the stream in which the capture began.
    origin: u64,
    members: Vec<Member>,
    invalid: bool,
}

impl Capture {
    fn before(&mut self, stream: u64) -> Option<&mut Nodes> {
        self.members.iter_mut().find(|member| member.stream.id == stream).map(|member| &mut member.before)
    }

    /// Returns true if the origin stream waits for the nodes of every other stream.
    fn is_joined(&self) -> bool {
        let mut members = self.members.iter();
        let Some(origin) = members.find(|member| member.stream.id == self.origin) else { return true };
        self.members.iter().all(|member| {
            let own = member.before.0.get(&member.stream.id).copied().unwrap_or(0);
            own <= origin.before.0.get(&member.stream.id).copied().unwrap_or(0)
        })
    }
}

/// The captures in progress, by number.
static OPEN: Mutex<BTreeMap<u64, Capture>> = Mutex::new(BTreeMap::new());
/// The number of captures in progress, which calls read without the lock.
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn open() -> Option<MutexGuard<'static, BTreeMap<u64, Capture>>> {
    (COUNT.load(Ordering::Acquire) > 0).then(|| lock(&OPEN))
}

/// Returns true if any capture is in progress. Calls check this first, because most programs capture nothing.
pub(crate) fn is_any() -> bool {
    COUNT.load(Ordering::Acquire) > 0
}

thread_local! {
    /// The mode of the calling thread; the default is global.
    static MODE: Cell<c_int> = const { Cell::new(cudaStreamCaptureModeGlobal) };
}

/// Returns true if a number is a capture mode.
pub(crate) fn is_mode(mode: c_int) -> bool {
    (cudaStreamCaptureModeGlobal..=cudaStreamCaptureModeRelaxed).contains(&mode)
}

/// Replaces the calling thread's mode and returns the previous one.
pub(crate) fn exchange_mode(mode: c_int) -> c_int {
    MODE.try_with(|cell| cell.replace(mode)).unwrap_or(cudaStreamCaptureModeGlobal)
}

/// Begins a capture into `work` and returns its number, which is never 0.
pub(crate) fn begin(work: &'static RecordedWork, mode: c_int, stream: CapturedStream) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let members = vec![Member { stream, before: Nodes::default() }];
    let thread = std::thread::current().id();
    let mut open = lock(&OPEN);
    open.insert(number, Capture { work, mode, thread, origin: stream.id, members, invalid: false });
    COUNT.store(open.len(), Ordering::Release);
    number
}

/// The result of an attempt to end a capture.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The call did not end the capture, for example because it came from the wrong stream or thread,
    /// which invalidates the capture.
    Refused(Status),
    /// The capture has ended without a graph.
    Failed(Status),
    /// The capture has ended with a complete graph.
    Whole,
}

/// Ends a capture. `stream` is the id of the stream from which the program ends it. "Capture must be ended on
/// the same stream in which it was initiated", "from the same thread" unless its mode is relaxed. All other
/// streams of the capture must be joined to that stream.
pub(crate) fn end(number: u64, stream: u64) -> End {
    let mut open = lock(&OPEN);
    let Some(capture) = open.get_mut(&number) else { return End::Refused(cudaErrorIllegalState) };
    let refusal = if capture.origin != stream {
        Some(cudaErrorStreamCaptureUnmatched)
    } else if capture.mode != cudaStreamCaptureModeRelaxed && capture.thread != std::thread::current().id() {
        Some(cudaErrorStreamCaptureWrongThread)
    } else {
        None
    };
    if let Some(status) = refusal {
        capture.invalid = true;
        return End::Refused(status);
    }
    let result = match (capture.invalid, capture.is_joined()) {
        (true, _) => End::Failed(cudaErrorStreamCaptureInvalidated),
        (false, false) => End::Failed(cudaErrorStreamCaptureUnjoined),
        (false, true) => End::Whole,
    };
    open.remove(&number);
    COUNT.store(open.len(), Ordering::Release);
    result
}

/// Returns the status of the capture for the streams that joined it. After the capture has ended, the status
/// is `CaptureStatus::None`.
pub(crate) fn status(number: u64) -> CaptureStatus {
    match open().as_ref().and_then(|open| open.get(&number)) {
        None => CaptureStatus::None,
        Some(capture) if capture.invalid => CaptureStatus::Invalidated(number),
        Some(_) => CaptureStatus::Active(number),
    }
}

/// Adds a node of a stream to the graph of a capture.
pub(crate) fn add_node(number: u64, stream: u64, cost_ns: u64) {
    if let Some(capture) = open().as_mut().and_then(|open| open.get_mut(&number)) {
        capture.work.add_node(cost_ns);
        if let Some(before) = capture.before(stream) {
            *before.0.entry(stream).or_default() += 1;
        }
    }
}

/// Returns the nodes that the next node of a stream depends on. An event that is recorded in the stream now
/// covers these nodes.
pub(crate) fn nodes_before(number: u64, stream: u64) -> Nodes {
    let mut open = open();
    let capture = open.as_mut().and_then(|open| open.get_mut(&number));
    capture.and_then(|capture| capture.before(stream).cloned()).unwrap_or_default()
}

/// Makes a stream wait for nodes of a capture, and thereby adds the stream to the capture.
pub(crate) fn join(number: u64, stream: CapturedStream, nodes: &Nodes) {
    if let Some(capture) = open().as_mut().and_then(|open| open.get_mut(&number)) {
        match capture.before(stream.id) {
            Some(before) => before.add(nodes),
            None => capture.members.push(Member { stream, before: nodes.clone() }),
        }
    }
}

/// Invalidates the capture with this number, so that it ends without a graph.
pub(crate) fn invalidate(number: u64) {
    if let Some(capture) = open().as_mut().and_then(|open| open.get_mut(&number)) {
        capture.invalid = true;
    }
}

/// Invalidates the captures for which `rule` returns true. Returns true if there was one.
fn invalidate_where(rule: impl Fn(&Capture) -> bool) -> bool {
    let Some(mut open) = open() else { return false };
    let mut found = false;
    for capture in open.values_mut().filter(|capture| rule(capture)) {
        capture.invalid = true;
        found = true;
    }
    found
}

/// Refuses a potentially unsafe call if the mode of the calling thread forbids it.
pub(crate) fn refuse_unsafe() -> Option<Status> {
    if COUNT.load(Ordering::Acquire) == 0 {
        return None;
    }
    let mode = MODE.try_with(Cell::get).unwrap_or(cudaStreamCaptureModeGlobal);
    let thread = std::thread::current().id();
    if mode == cudaStreamCaptureModeRelaxed {
        return None;
    }
    let prohibited = invalidate_where(|capture| {
        let is_local = capture.thread == thread && capture.mode != cudaStreamCaptureModeRelaxed;
        let of_another = capture.thread != thread && capture.mode == cudaStreamCaptureModeGlobal;
        is_local || of_another && mode == cudaStreamCaptureModeGlobal
    });
    prohibited.then_some(cudaErrorStreamCaptureUnsupported)
}

/// Refuses, in every mode, to wait for a device while one of its streams is captured: "It is also invalid to
/// query the execution status of or synchronize a broader handle which encompasses an active stream capture".
pub(crate) fn refuse_device(device: usize) -> Option<Status> {
    let has_member = |capture: &Capture| capture.members.iter().any(|member| member.stream.device == device);
    invalidate_where(has_member).then_some(cudaErrorStreamCaptureUnsupported)
}

fn has_blocking_stream(capture: &Capture, device: usize) -> bool {
    capture.members.iter().any(|member| member.stream.blocking && member.stream.device == device)
}

/// Refuses the legacy default stream of a device while one of its blocking streams is captured: "any
/// attempted use of the legacy stream is invalid", because it would wait for that stream.
pub(crate) fn refuse_legacy(device: usize) -> Option<Status> {
    invalidate_where(|capture| has_blocking_stream(capture, device)).then_some(cudaErrorStreamCaptureImplicit)
}

/// Like [`refuse_legacy`], for a call that asks for the capture status: "The blocking stream capture is not
/// invalidated."
pub(crate) fn refuse_legacy_status(device: usize) -> Option<Status> {
    let open = open()?;
    let captured = open.values().any(|capture| has_blocking_stream(capture, device));
    captured.then_some(cudaErrorStreamCaptureImplicit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: CapturedStream = CapturedStream { id: 1_000_001, device: 901, blocking: false };
    const OTHER: CapturedStream = CapturedStream { id: 1_000_002, device: 902, blocking: true };

    fn begin_relaxed() -> u64 {
        begin(Box::leak(Box::default()), cudaStreamCaptureModeRelaxed, ORIGIN)
    }

    #[test]
    fn a_fork_must_be_joined_when_it_has_nodes() {
        let capture = begin_relaxed();
        add_node(capture, ORIGIN.id, 1);
        join(capture, OTHER, &nodes_before(capture, ORIGIN.id));
        assert_eq!(end(capture, OTHER.id), End::Refused(cudaErrorStreamCaptureUnmatched));
        assert_eq!(end(capture, ORIGIN.id), End::Failed(cudaErrorStreamCaptureInvalidated));

        let capture = begin_relaxed();
        join(capture, OTHER, &nodes_before(capture, ORIGIN.id));
        add_node(capture, OTHER.id, 1);
        assert_eq!(end(capture, ORIGIN.id), End::Failed(cudaErrorStreamCaptureUnjoined));

        let capture = begin_relaxed();
        join(capture, OTHER, &nodes_before(capture, ORIGIN.id));
        add_node(capture, OTHER.id, 1);
        join(capture, ORIGIN, &nodes_before(capture, OTHER.id));
        assert_eq!(end(capture, ORIGIN.id), End::Whole);
        assert!(status(capture) == CaptureStatus::None);
    }

    #[test]
    fn a_device_and_its_legacy_stream_are_refused_while_a_stream_is_captured() {
        let capture = begin_relaxed();
        assert!(refuse_unsafe().is_none() && refuse_legacy(ORIGIN.device).is_none());
        join(capture, OTHER, &Nodes::default());
        assert_eq!(refuse_legacy_status(OTHER.device), Some(cudaErrorStreamCaptureImplicit));
        assert!(status(capture) == CaptureStatus::Active(capture));
        assert_eq!(refuse_legacy(OTHER.device), Some(cudaErrorStreamCaptureImplicit));
        assert!(status(capture) == CaptureStatus::Invalidated(capture));
        assert_eq!(refuse_device(ORIGIN.device), Some(cudaErrorStreamCaptureUnsupported));
        assert_eq!(end(capture, ORIGIN.id), End::Failed(cudaErrorStreamCaptureInvalidated));
        assert!(refuse_device(ORIGIN.device).is_none());
    }
}
