//! Hooks of CUDA graphs. Memory that torch's allocator hands out during a capture belongs to the graph. The
//! first graph of a process makes the driver take memory for all graphs.

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicBool, Ordering};

use memtrace_record::Recorder;
use memtrace_record::device_calls::{self, DeviceCall};

use super::stand_in::caller_hooks;
use crate::attribution::graph_captures;
use crate::ffi::cuda::is_captured;
use crate::ffi::cuda_types::{NOT_INITIALIZED, SUCCESS};
use crate::guard::shielded;
use crate::runtime::session;

caller_hooks! {
    cudaStreamBeginCapture(stream: *mut c_void, mode: c_uint) caller "rdx" => begin, CUDA_BEGIN_CAPTURE;
    // The six arguments use every argument register. The body ignores the caller, so any other register will
    // do.
    cudaStreamBeginCaptureToGraph(
        stream: *mut c_void,
        graph: *mut c_void,
        dependencies: *const c_void,
        edges: *const c_void,
        count: usize,
        mode: c_uint
    ) caller "rax" => begin_to_graph, CUDA_BEGIN_CAPTURE_TO_GRAPH;
    // PyTorch calls this function. `cudaGraphInstantiate` has other arguments in CUDA 11.
    cudaGraphInstantiateWithFlags(
        out: *mut *mut c_void,
        graph: *mut c_void,
        flags: c_ulonglong
    ) caller "rcx" => instantiate, CUDA_INSTANTIATE;
    cudaStreamEndCapture(stream: *mut c_void, graph: *mut c_void) caller "rdx" => end, CUDA_END_CAPTURE;
}

unsafe extern "C" fn begin(stream: *mut c_void, mode: c_uint, _: *const c_void) -> c_int {
    let Some(real) = CUDA_BEGIN_CAPTURE.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's arguments are passed on unchanged.
    let status = unsafe { real(stream, mode) };
    if status == SUCCESS {
        shielded(graph_captures::begin);
    }
    status
}

unsafe extern "C" fn begin_to_graph(
    stream: *mut c_void,
    graph: *mut c_void,
    dependencies: *const c_void,
    edges: *const c_void,
    count: usize,
    mode: c_uint,
) -> c_int {
    let Some(real) = CUDA_BEGIN_CAPTURE_TO_GRAPH.get() else { return NOT_INITIALIZED };
    // SAFETY: the caller's arguments are passed on unchanged.
    let status = unsafe { real(stream, graph, dependencies, edges, count, mode) };
    if status == SUCCESS {
        shielded(graph_captures::begin);
    }
    status
}

/// Makes a graph executable. Requests a sample after the first graph of the process.
unsafe extern "C" fn instantiate(
    out: *mut *mut c_void,
    graph: *mut c_void,
    flags: c_ulonglong,
    _: *const c_void,
) -> c_int {
    static IS_FIRST: AtomicBool = AtomicBool::new(true);
    let Some(real) = CUDA_INSTANTIATE.get() else { return NOT_INITIALIZED };
    let call = DeviceCall::begin();
    // SAFETY: the caller's arguments are passed on unchanged.
    let status = unsafe { real(out, graph, flags) };
    drop(call);
    if status == SUCCESS && IS_FIRST.swap(false, Ordering::Relaxed) {
        shielded(|| {
            device_calls::request_sample();
            session::recorder().map(Recorder::nudge)
        });
    }
    status
}

unsafe extern "C" fn end(stream: *mut c_void, graph: *mut c_void, _: *const c_void) -> c_int {
    let Some(real) = CUDA_END_CAPTURE.get() else { return NOT_INITIALIZED };
    // SAFETY: the stream is the caller's own.
    let captured = || unsafe { is_captured(stream) };
    let before = captured();
    // SAFETY: the caller's arguments are passed on unchanged.
    let status = unsafe { real(stream, graph) };
    // A capture that was invalidated ends with an error. A call from another thread or on another stream fails,
    // but the capture stays in progress.
    if status == SUCCESS || before && !captured() {
        shielded(graph_captures::end);
    }
    status
}
