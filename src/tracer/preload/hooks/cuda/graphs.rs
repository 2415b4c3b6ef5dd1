//! Hooks of the capture of CUDA graphs. Memory that torch's allocator hands out during a capture belongs to
//! the graph.

use std::ffi::{c_int, c_uint, c_void};

use super::stand_in::caller_hooks;
use crate::attribution::graph_captures;
use crate::ffi::cuda_types::{NOT_INITIALIZED, SUCCESS};
use crate::runtime::guard::shielded;

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

unsafe extern "C" fn end(stream: *mut c_void, graph: *mut c_void, _: *const c_void) -> c_int {
    let Some(real) = CUDA_END_CAPTURE.get() else { return NOT_INITIALIZED };
    // The status of the call does not matter, because a capture that fails ends, too.
    shielded(graph_captures::end);
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { real(stream, graph) }
}
