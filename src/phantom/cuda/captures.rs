//! Stream capture: the calls that begin, end and query it.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex};

use crate::core::call_table::answers;
use crate::core::capture;
use crate::core::ffi::{Handle, INVALID_VALUE, InOut, OK, Out, Status, Word};
use crate::core::host_state::fail;
use crate::core::lock::lock;
use crate::cuda::graphs::Graph;
use crate::cuda::streams::StreamHandle;

/// The captures in progress: their number and the graph that they fill.
static GRAPHS: LazyLock<Mutex<HashMap<u64, Handle<Graph>>>> = LazyLock::new(Mutex::default);

/// The graph that a capture fills, or null when the capture is not in progress.
pub(crate) fn graph_of(capture: u64) -> Handle<Graph> {
    lock(&GRAPHS).get(&capture).copied().unwrap_or(Handle::null())
}

fn begin(handle: StreamHandle) -> Status {
    let stream = handle.stream();
    if stream.capturing().is_some() {
        return fail(INVALID_VALUE);
    }
    let graph: &'static Graph = Box::leak(Box::default());
    let capture = capture::begin(&graph.work);
    lock(&GRAPHS).insert(capture, Handle::of(graph));
    stream.join(capture);
    OK
}

fn end(handle: StreamHandle, out: Out<Handle<Graph>>) -> Status {
    let Some(capture) = handle.stream().capturing() else { return fail(INVALID_VALUE) };
    capture::end(capture);
    out.give(lock(&GRAPHS).remove(&capture).unwrap_or(Handle::null()))
}

/// The out-parameters of `cudaStreamGetCaptureInfo` that both CUDA versions have.
#[derive(Clone, Copy)]
struct CaptureInfo<'call> {
    status: Out<'call, c_int>,
    id: Out<'call, u64>,
    graph: Out<'call, Handle<Graph>>,
    dependencies: Out<'call, usize>,
    count: Out<'call, usize>,
}

fn info(stream: StreamHandle, out: CaptureInfo) -> Status {
    let capture = stream.stream().capturing();
    out.status.put(c_int::from(capture.is_some()));
    if let Some(capture) = capture {
        out.id.put(capture);
        out.graph.put(graph_of(capture));
    }
    out.dependencies.put(0);
    out.count.put(0);
    OK
}

fn is_capturing(handle: StreamHandle, out: Out<c_int>) -> Status {
    out.give(c_int::from(handle.stream().capturing().is_some()))
}

/// Exchanges the thread's capture mode, which says which calls a capture forbids. Nothing is forbidden here,
/// so the mode is only stored.
fn exchange_mode(mode: InOut<c_int>) -> Status {
    thread_local!(static MODE: Cell<c_int> = const { Cell::new(0) });
    let Some(wanted) = mode.input().get() else { return fail(INVALID_VALUE) };
    mode.output().give(MODE.try_with(|cell| cell.replace(wanted)).unwrap_or(0))
}

answers! {
    Real fn cudaStreamIsCapturing(handle: StreamHandle, out: Out<c_int>) { is_capturing(handle, out) }
    /// With the arguments of CUDA 13.
    Real fn cudaStreamGetCaptureInfo(
        handle: StreamHandle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>,
        dependencies: Out<usize>, edges: Out<usize>, count: Out<usize>,
    ) {
        edges.put(0);
        info(handle, CaptureInfo { status, id, graph, dependencies, count })
    }
    /// With the arguments of CUDA 12.
    Real fn cudaStreamGetCaptureInfo_v2(
        handle: StreamHandle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>,
        dependencies: Out<usize>, count: Out<usize>,
    ) {
        info(handle, CaptureInfo { status, id, graph, dependencies, count })
    }
    Success fn cudaStreamUpdateCaptureDependencies(_handle: Word, _nodes: Word, _count: usize, _flags: Word) {
        OK
    }
    Real fn cudaStreamBeginCapture(handle: StreamHandle, _mode: c_int) { begin(handle) }
    Real fn cudaStreamEndCapture(handle: StreamHandle, out: Out<Handle<Graph>>) { end(handle, out) }
    Real fn cudaThreadExchangeStreamCaptureMode(mode: InOut<c_int>) { exchange_mode(mode) }
    Real fn cuStreamIsCapturing(handle: StreamHandle, out: Out<c_int>) { is_capturing(handle, out) }
    Real fn cuStreamGetCaptureInfo_v2(
        handle: StreamHandle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>,
        dependencies: Out<usize>, count: Out<usize>,
    ) {
        info(handle, CaptureInfo { status, id, graph, dependencies, count })
    }
    Real fn cuStreamGetCaptureInfo_v3(
        handle: StreamHandle, status: Out<c_int>, id: Out<u64>, graph: Out<Handle<Graph>>,
        dependencies: Out<usize>, edges: Out<usize>, count: Out<usize>,
    ) {
        edges.put(0);
        info(handle, CaptureInfo { status, id, graph, dependencies, count })
    }
    Real fn cuStreamBeginCapture_v2(handle: StreamHandle, _mode: c_int) { begin(handle) }
    Real fn cuStreamEndCapture(handle: StreamHandle, out: Out<Handle<Graph>>) { end(handle, out) }
    Real fn cuThreadExchangeStreamCaptureMode(mode: InOut<c_int>) { exchange_mode(mode) }
}
