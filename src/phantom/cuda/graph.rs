//! Captures and graphs: how many pieces of work were captured, and what replaying them takes.
//!
//! A graph holds no list of its work, only its size, and what memory it takes ([`Memory`]). What the driver
//! itself takes for an instantiated graph (some KiB per kernel) is not counted.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use crate::core::ffi::{INVALID_HANDLE, INVALID_VALUE, OK, OUT_OF_MEMORY, Out, Status, Word, leak};
use crate::core::host_state::{Device, device, fail, lock};
use crate::cuda::device_properties::driver_version;
use crate::cuda::graph_memory::{self, Memory};
use crate::cuda::stream::stream;
use crate::table::call_table::answers;

/// A graph, or one made ready to launch.
#[derive(Default)]
struct Graph {
    nodes: AtomicU64,
    cost: AtomicU64,
    /// Gone with the graph, though its handle stays good.
    memory: Mutex<Arc<Memory>>,
}

fn graph(handle: usize) -> Option<&'static Graph> {
    // SAFETY: by the C contract a handle is null or came from a call below; those are leaked.
    unsafe { (handle as *const Graph).as_ref() }
}

/// Captures going on: their number and their graph.
static OPEN: LazyLock<Mutex<HashMap<u64, usize>>> = LazyLock::new(Mutex::default);

/// Begins a capture.
pub(crate) fn open() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let capture = NEXT.fetch_add(1, Ordering::Relaxed);
    lock(&OPEN).insert(capture, leak(Graph::default()));
    capture
}

/// Whether a capture goes on.
pub(crate) fn is_open(capture: u64) -> bool {
    lock(&OPEN).contains_key(&capture)
}

/// The graph that a capture fills.
pub(crate) fn of_capture(capture: u64) -> usize {
    lock(&OPEN).get(&capture).copied().unwrap_or(0)
}

/// Ends a capture and gives its graph.
pub(crate) fn close(capture: u64) -> usize {
    lock(&OPEN).remove(&capture).unwrap_or(0)
}

/// Adds work to a capture.
pub(crate) fn add_node(capture: u64, cost: u64) {
    if let Some(graph) = graph(of_capture(capture)) {
        graph.nodes.fetch_add(1, Ordering::Relaxed);
        graph.cost.fetch_add(cost, Ordering::Relaxed);
    }
}

/// An allocation becomes a node of the graph that a capture fills; nothing is taken yet.
pub(crate) fn capture_allocation(
    capture: u64,
    device: &'static Device,
    out: Out<usize>,
    size: usize,
) -> Status {
    add_allocation(of_capture(capture), device, size)
        .map_or_else(|| fail(OUT_OF_MEMORY), |address| out.give(address))
}

/// So does a free. It must be of memory of a graph.
pub(crate) fn capture_free(capture: u64, address: usize) -> Status {
    add_free(of_capture(capture), address)
}

fn add_allocation(handle: usize, device: &'static Device, size: usize) -> Option<usize> {
    let graph = graph(handle)?;
    graph.nodes.fetch_add(1, Ordering::Relaxed);
    lock(&graph.memory).take(device, size)
}

fn add_free(handle: usize, address: usize) -> Status {
    let Some(graph) = graph(handle).filter(|_| graph_memory::owns(address)) else {
        return fail(INVALID_VALUE);
    };
    graph.nodes.fetch_add(1, Ordering::Relaxed);
    lock(&graph.memory).give(address);
    OK
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS` and `cudaMemAllocNodeParams`, which are the same.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct AllocationNode {
    kind: c_int,
    handles: c_int,
    location: c_int,
    device: c_int,
    rest: [u64; 9],
    access: [usize; 2],
    size: usize,
    address: usize,
}

fn allocation_node(out: Out<usize>, handle: usize, place: Out<AllocationNode>) -> Status {
    let Some(mut node) = place.get() else { return fail(INVALID_VALUE) };
    let Some(device) = device(node.device).filter(|_| node.size > 0) else { return fail(INVALID_VALUE) };
    let Some(address) = add_allocation(handle, device, node.size) else { return fail(OUT_OF_MEMORY) };
    node.address = address;
    place.put(node);
    out.give(leak(0u64))
}

fn free_node(out: Out<usize>, handle: usize, address: usize) -> Status {
    match add_free(handle, address) {
        OK => out.give(leak(0u64)),
        status => status,
    }
}

/// `cudaGraphInstantiateFlagAutoFreeOnLaunch`.
const FREES_ITSELF: u64 = 1;

fn instantiate(out: Out<usize>, handle: usize, flags: u64) -> Status {
    let made = Graph::default();
    if let Some(graph) = graph(handle) {
        made.nodes.store(graph.nodes.load(Ordering::Relaxed), Ordering::Relaxed);
        made.cost.store(graph.cost.load(Ordering::Relaxed), Ordering::Relaxed);
        *lock(&made.memory) = lock(&graph.memory).instantiated(flags & FREES_ITSELF != 0);
    }
    out.give(leak(made))
}

fn destroy(handle: usize) -> Status {
    if let Some(graph) = graph(handle) {
        drop(std::mem::take(&mut *lock(&graph.memory)));
    }
    OK
}

fn nodes(handle: usize, list: Out<usize>, count: Out<usize>) -> Status {
    let Some(graph) = graph(handle) else { return fail(INVALID_HANDLE) };
    let all = graph.nodes.load(Ordering::Relaxed) as usize;
    let room = if list.address() == 0 { 0 } else { count.get().unwrap_or(0) };
    for index in 0..room {
        // Nodes are told apart and never looked into.
        list.at(index).put(if index < all { handle + 1 + index } else { 0 });
    }
    count.give(all)
}

fn launch(handle: usize, on: usize) -> Status {
    let Some(graph) = graph(handle) else { return fail(INVALID_HANDLE) };
    let memory = lock(&graph.memory).launch();
    if memory != OK {
        return fail(memory);
    }
    stream(on).launch(graph.cost.load(Ordering::Relaxed).max(1));
    stream(on).device().disturb();
    OK
}

answers! {
    Real fn cudaGraphCreate(out: Out<usize>, _flags: u32) { out.give(leak(Graph::default())) }
    Real fn cudaGraphDestroy(graph: Word) { destroy(graph) }
    Real fn cudaGraphInstantiate(out: Out<usize>, graph: Word, flags: u64) { instantiate(out, graph, flags) }
    Real fn cudaGraphInstantiateWithFlags(out: Out<usize>, graph: Word, flags: u64) { instantiate(out, graph, flags) }
    Real fn cudaGraphExecDestroy(graph: Word) { destroy(graph) }
    Real fn cudaGraphLaunch(graph: Word, on: Word) { launch(graph, on) }
    Success fn cudaGraphUpload(_graph: Word, _on: Word) { OK }
    Real fn cudaGraphGetNodes(graph: Word, list: Out<usize>, count: Out<usize>) { nodes(graph, list, count) }
    Real fn cudaGraphGetRootNodes(graph: Word, list: Out<usize>, count: Out<usize>) { nodes(graph, list, count) }
    /// As CUDA 13 has it; the older call has its count where this has its edges, and nothing after.
    Guess fn cudaGraphNodeGetDependencies(_node: Word, _list: Word, edges: Out<usize>, count: Out<usize>) {
        edges.put(0);
        if driver_version() >= 13000 {
            count.put(0);
        }
        OK
    }
    Success fn cudaGraphDebugDotPrint(_graph: Word, _path: Word, _flags: u32) { OK }
    Real fn cuGraphCreate(out: Out<usize>, _flags: u32) { out.give(leak(Graph::default())) }
    Real fn cuGraphDestroy(graph: Word) { destroy(graph) }
    Real fn cuGraphInstantiateWithFlags(out: Out<usize>, graph: Word, flags: u64) { instantiate(out, graph, flags) }
    Real fn cuGraphExecDestroy(graph: Word) { destroy(graph) }
    Real fn cuGraphLaunch(graph: Word, on: Word) { launch(graph, on) }
    Real fn cuGraphGetNodes(graph: Word, list: Out<usize>, count: Out<usize>) { nodes(graph, list, count) }
    Guess fn cudaGraphAddMemAllocNode(out: Out<usize>, graph: Word, _after: Word, _count: usize, node: Out<AllocationNode>) {
        allocation_node(out, graph, node)
    }
    Guess fn cuGraphAddMemAllocNode(out: Out<usize>, graph: Word, _after: Word, _count: usize, node: Out<AllocationNode>) {
        allocation_node(out, graph, node)
    }
    Guess fn cudaGraphAddMemFreeNode(out: Out<usize>, graph: Word, _after: Word, _count: usize, address: Word) {
        free_node(out, graph, address)
    }
    Guess fn cuGraphAddMemFreeNode(out: Out<usize>, graph: Word, _after: Word, _count: usize, address: Word) {
        free_node(out, graph, address)
    }
    /// What the launches took, which is the guess: the tracer's own looks ask it in every run.
    Real fn cudaDeviceGetGraphMemAttribute(index: c_int, attribute: c_int, out: Out<u64>) {
        graph_memory::attribute(index, attribute, out)
    }
    Real fn cuDeviceGetGraphMemAttribute(index: c_int, attribute: c_int, out: Out<u64>) {
        graph_memory::attribute(index, attribute, out)
    }
    Real fn cudaDeviceSetGraphMemAttribute(index: c_int, attribute: c_int, _value: Word) {
        graph_memory::restart(index, attribute)
    }
    Real fn cuDeviceSetGraphMemAttribute(index: c_int, attribute: c_int, _value: Word) {
        graph_memory::restart(index, attribute)
    }
    Real fn cudaDeviceGraphMemTrim(index: c_int) { graph_memory::trim(index) }
    Real fn cuDeviceGraphMemTrim(index: c_int) { graph_memory::trim(index) }
}
