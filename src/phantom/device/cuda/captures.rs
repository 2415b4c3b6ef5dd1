//! Stream capture: the calls that begin, end and query a capture, and the effects that wait
//! for the launch of the graph.

use std::ffi::c_int;

use crate::core::call_table::answers;
use crate::core::capture::{
    self, CaptureStatus, End, cudaErrorIllegalState, cudaErrorStreamCaptureInvalidated,
    cudaErrorStreamCaptureUnsupported,
};
use crate::core::ffi::{Handle, INVALID_VALUE, InOut, OK, Out, Status, Word};
use crate::core::host_state::fail;
use crate::core::lock::lock;
use crate::core::stream::Stream;
use crate::cuda::graphs::{CAPTURING, Graph, graph_of};
use crate::cuda::streams::StreamHandle;

/// Runs an operation that a program queues. The operation runs at once, or, if the stream is captured,
/// when the graph is launched.
pub(crate) fn queue_effect(
    stream: StreamHandle,
    effect: impl Fn(&'static Stream) -> Status + Send + Sync + 'static,
) -> Status {
    let stream = match stream.for_work() {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    match stream.capturing() {
        None => effect(stream),
        Some(capture) => {
            if let Some(graph) = graph_of(capture).get() {
                graph.add_effect(Box::new(effect));
            }
            stream.launch(0);
            OK
        }
    }
}

/// Begins a capture. "Capture may not be initiated if stream is cudaStreamLegacy", and "only if the stream is
/// not already in capture mode" (`cuda_runtime_api.h`). The work goes to the end of `graph`, or to a new one.
fn begin(handle: StreamHandle, graph: Option<&'static Graph>, mode: c_int) -> Status {
    let stream = handle.stream();
    if handle.is_legacy() {
        return fail(cudaErrorStreamCaptureUnsupported);
    }
    if !capture::is_mode(mode) {
        return fail(INVALID_VALUE);
    }
    if stream.capture_status() != CaptureStatus::None {
        return fail(cudaErrorIllegalState);
    }
    let graph = graph.unwrap_or_else(|| Box::leak(Box::default()));
    let capture = capture::begin(&graph.work, mode, stream.as_captured());
    lock(&CAPTURING).insert(capture, Handle::to(graph));
    stream.join(capture);
    OK
}

fn begin_to_graph(handle: StreamHandle, graph: Handle<Graph>, mode: c_int) -> Status {
    match graph.get() {
        Some(graph) => begin(handle, Some(graph), mode),
        None => fail(INVALID_VALUE),
    }
}

fn end(handle: StreamHandle, out: Out<Handle<Graph>>) -> Status {
    if out.is_null() {
        return fail(INVALID_VALUE);
    }
    let stream = handle.stream();
    let (CaptureStatus::Active(capture) | CaptureStatus::Invalidated(capture)) = stream.capture_status()
    else {
        return fail(cudaErrorIllegalState);
    };
    let result = capture::end(capture, stream.id);
    if let End::Refused(status) = result {
        return fail(status);
    }
    let graph = lock(&CAPTURING).remove(&capture).unwrap_or(Handle::null());
    match result {
        End::Whole => out.give(graph),
        End::Refused(status) | End::Failed(status) => {
            // "If capture was invalidated, [...] then a NULL graph will be returned."
            out.put(Handle::null());
            fail(status)
        }
    }
}

/// The out-parameters of `cudaStreamGetCaptureInfo` that CUDA 12 and CUDA 13 both have.
#[derive(Clone, Copy)]
struct CaptureInfo<'call> {
    status: Out<'call, c_int>,
    id: Out<'call, u64>,
    graph: Out<'call, Handle<Graph>>,
    dependencies: Out<'call, usize>,
    count: Out<'call, usize>,
}

/// Returns the stream's relation to captures. Fails for the legacy stream while a
/// blocking stream is captured.
fn status_of(handle: StreamHandle) -> Result<CaptureStatus, Status> {
    let stream = handle.stream();
    match capture::refuse_legacy_status(stream.device).filter(|_| handle.is_legacy()) {
        Some(status) => Err(fail(status)),
        None => Ok(stream.capture_status()),
    }
}

fn info(handle: StreamHandle, out: CaptureInfo) -> Status {
    let status = match status_of(handle) {
        Ok(status) => status,
        Err(status) => return status,
    };
    out.status.put(status.code());
    if let CaptureStatus::Active(capture) = status {
        out.id.put(capture);
        out.graph.put(graph_of(capture));
    }
    out.dependencies.put(0);
    out.count.put(0);
    OK
}

fn is_capturing(handle: StreamHandle, out: Out<c_int>) -> Status {
    match status_of(handle) {
        Ok(status) => out.give(status.code()),
        Err(status) => status,
    }
}

/// Refuses a change of dependencies outside a capture: it "returns cudaErrorIllegalState if the stream is not
/// capturing" (`cuda_runtime_api.h`).
fn check_active(handle: StreamHandle) -> Status {
    match handle.stream().capture_status() {
        CaptureStatus::None => fail(cudaErrorIllegalState),
        CaptureStatus::Invalidated(_) => fail(cudaErrorStreamCaptureInvalidated),
        CaptureStatus::Active(_) => OK,
    }
}

/// Exchanges the thread's capture mode, which decides which calls a capture forbids.
fn exchange_mode(mode: InOut<c_int>) -> Status {
    match mode.input().get() {
        Some(wanted) if capture::is_mode(wanted) => mode.output().give(capture::exchange_mode(wanted)),
        _ => fail(INVALID_VALUE),
    }
}

answers! {
    Real fn {cudaStreamIsCapturing, cuStreamIsCapturing}(handle: StreamHandle, out: Out<c_int>) {
        is_capturing(handle, out)
    }
    /// The arguments since CUDA 13; the driver's v3 has them since CUDA 12.3.
    Real fn {cudaStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3}(
        handle: StreamHandle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>,
        dependencies: Out<usize>, edges: Out<usize>, count: Out<usize>,
    ) {
        edges.put(0);
        info(handle, CaptureInfo { status, id, graph, dependencies, count })
    }
    /// The arguments of CUDA 12.
    Real fn {cudaStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2}(
        handle: StreamHandle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>,
        dependencies: Out<usize>, count: Out<usize>,
    ) {
        info(handle, CaptureInfo { status, id, graph, dependencies, count })
    }
    Success fn cudaStreamUpdateCaptureDependencies(
        handle: StreamHandle, _nodes: Word, _count: usize, _flags: Word,
    ) {
        check_active(handle)
    }
    Real fn {cudaStreamBeginCapture, cuStreamBeginCapture_v2}(handle: StreamHandle, mode: c_int) {
        begin(handle, None, mode)
    }
    Real fn {cudaStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph}(
        handle: StreamHandle, graph: Handle<Graph>, _nodes: Word, _edges: Word, _count: usize, mode: c_int,
    ) {
        begin_to_graph(handle, graph, mode)
    }
    Real fn {cudaStreamEndCapture, cuStreamEndCapture}(handle: StreamHandle, out: Out<Handle<Graph>>) {
        end(handle, out)
    }
    Real fn {cudaThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode}(mode: InOut<c_int>) {
        exchange_mode(mode)
    }
}
