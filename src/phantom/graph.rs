//! Captures and graphs: how many pieces of work were captured, and what replaying them takes.
//!
//! A graph holds no list of its work, only its size. Memory that the driver itself takes for an
//! instantiated graph (some KiB per kernel) is not counted.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{LazyLock, Mutex};

use crate::answer::answers;
use crate::device::driver_version;
use crate::ffi::{INVALID_HANDLE, OK, Out, Status, Word, leak};
use crate::machine::{fail, lock};
use crate::stream::stream;

/// A graph, or one made ready to launch.
#[derive(Default)]
struct Graph {
    nodes: AtomicU64,
    cost: AtomicU64,
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

fn copy_of(handle: usize) -> usize {
    let made = Graph::default();
    if let Some(graph) = graph(handle) {
        made.nodes.store(graph.nodes.load(Ordering::Relaxed), Ordering::Relaxed);
        made.cost.store(graph.cost.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    leak(made)
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
    stream(on).launch(graph.cost.load(Ordering::Relaxed).max(1));
    stream(on).device().disturb();
    OK
}

answers! {
    Real fn cudaGraphCreate(out: Out<usize>, _flags: u32) { out.give(leak(Graph::default())) }
    Real fn cudaGraphDestroy(_graph: Word) { OK }
    Real fn cudaGraphInstantiate(out: Out<usize>, graph: Word, _flags: u64) { out.give(copy_of(graph)) }
    Real fn cudaGraphInstantiateWithFlags(out: Out<usize>, graph: Word, _flags: u64) { out.give(copy_of(graph)) }
    Real fn cudaGraphExecDestroy(_graph: Word) { OK }
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
    Real fn cuGraphDestroy(_graph: Word) { OK }
    Real fn cuGraphInstantiateWithFlags(out: Out<usize>, graph: Word, _flags: u64) { out.give(copy_of(graph)) }
    Real fn cuGraphExecDestroy(_graph: Word) { OK }
    Real fn cuGraphLaunch(graph: Word, on: Word) { launch(graph, on) }
    Real fn cuGraphGetNodes(graph: Word, list: Out<usize>, count: Out<usize>) { nodes(graph, list, count) }
}
