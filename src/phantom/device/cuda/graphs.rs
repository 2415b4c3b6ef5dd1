//! CUDA graphs: the amount of work that was captured, and the memory that its nodes allocate.
//!
//! Of a graph's work, the size ([`RecordedWork`]), the effects of its nodes and the steps of its memory nodes
//! ([`GraphMemory`]) are kept. The memory that the driver takes for an instantiated graph is estimated ([`GraphInstance`]).

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{Arc, LazyLock, Mutex};

use cudarc::driver::sys::CUDA_MEM_ALLOC_NODE_PARAMS;
use cudarc::runtime::sys::cudaMemAllocNodeParams;

use crate::core::call_table::{answers, by_contract};
use crate::core::capture::RecordedWork;
use crate::core::device::Device;
use crate::core::driver_version::driver_version;
use crate::core::ffi::{
    Handle, INVALID_HANDLE, INVALID_VALUE, InOut, OK, OUT_OF_MEMORY, Out, Status, Word, opaque_handle,
};
use crate::core::host_state::{current, device, fail};
use crate::core::lock::lock;
use crate::core::stream::Stream;
use crate::cuda::graph_instances::GraphInstance;
use crate::cuda::graph_memory::{self, GraphMemory};
use crate::cuda::reach::forget_everything;
use crate::cuda::streams::StreamHandle;

/// A node that has an effect here when the graph is launched.
#[derive(Clone)]
struct NodeEffect {
    /// The number of nodes before this node.
    position: u64,
    run: Arc<Effect>,
}

/// The effect of a node, as a function of the stream of the launch.
type Effect = dyn Fn(&'static Stream) -> Status + Send + Sync;

/// A graph, or an executable graph.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) work: RecordedWork,
    /// The effects of the nodes for which one is recorded, such as copies, kernels, host functions, events and
    /// child graphs, in the order of the nodes.
    effects: Mutex<Vec<NodeEffect>>,
    /// The memory nodes. An empty value replaces them when the graph is destroyed,
    /// because its handle stays valid.
    memory: Mutex<Arc<GraphMemory>>,
    /// The driver's memory for an executable graph. It is `None` for other graphs and
    /// after the graph is destroyed.
    instance: Mutex<Option<GraphInstance>>,
}

/// The graph that each capture in progress fills, by the capture's number.
pub(crate) static CAPTURING: LazyLock<Mutex<HashMap<u64, Handle<Graph>>>> = LazyLock::new(Mutex::default);

/// Returns the graph that a capture fills, or null if the capture is not in progress.
pub(crate) fn graph_of(capture: u64) -> Handle<Graph> {
    lock(&CAPTURING).get(&capture).copied().unwrap_or(Handle::null())
}

impl Graph {
    /// Gives the next node an effect.
    pub(crate) fn add_effect(&self, effect: Box<Effect>) {
        lock(&self.effects).push(NodeEffect { position: self.work.nodes(), run: Arc::from(effect) });
    }

    /// Returns the effect of a launch: the effects of the current nodes, in order. A node without a recorded
    /// effect counts as writing anything, so all memory becomes unknown at its position.
    fn effect(&self) -> Box<Effect> {
        let (effects, nodes) = (lock(&self.effects).clone(), self.work.nodes());
        Box::new(move |stream| {
            let mut next = 0;
            for effect in &effects {
                if effect.position > next {
                    forget_everything();
                }
                (effect.run)(stream);
                next = effect.position + 1;
            }
            // Any nodes after the last effect have no recorded effect. A graph without any effect may have
            // been built without a capture, so its nodes are unknown.
            if nodes > next || next == 0 {
                forget_everything();
            }
            OK
        })
    }

    /// Adds an allocation node and returns its address. No memory is taken before the launch.
    pub(crate) fn add_alloc(&self, device: &'static Device, size: usize) -> Option<usize> {
        self.work.add_node(0);
        lock(&self.memory).add_alloc(device, size)
    }

    /// Adds a free node for an address that a node of a graph allocates.
    pub(crate) fn add_free(&self, address: usize) -> Status {
        if !graph_memory::owns(address) {
            return fail(INVALID_VALUE);
        }
        self.work.add_node(0);
        lock(&self.memory).add_free(address);
        OK
    }
}

// The two headers declare one layout, which is the same in CUDA 12 and 13.
const _: () =
    assert!(size_of::<cudaMemAllocNodeParams>() == 120 && align_of::<cudaMemAllocNodeParams>() == 8);
const _: () = assert!(size_of::<CUDA_MEM_ALLOC_NODE_PARAMS>() == size_of::<cudaMemAllocNodeParams>());

/// Adds an allocation node with the size and the device that `params` hold, and writes its address into them.
fn add_alloc_node(out: Out<usize>, graph: Handle<Graph>, params: InOut<cudaMemAllocNodeParams>) -> Status {
    let params = params.as_ptr();
    if params.is_null() || out.is_null() {
        return fail(INVALID_VALUE);
    }
    // SAFETY: not null, so by the invariant of `InOut` good for reads of its fields.
    let (index, size) = unsafe {
        (
            (&raw const (*params).poolProps.location.id).read_unaligned(),
            (&raw const (*params).bytesize).read_unaligned(),
        )
    };
    let Some(device) = device(index).filter(|_| size > 0) else { return fail(INVALID_VALUE) };
    let address = graph.get().and_then(|graph| graph.add_alloc(device, size));
    let Some(address) = address else { return fail(OUT_OF_MEMORY) };
    // SAFETY: as above, and good for a write.
    unsafe { (&raw mut (*params).dptr).write_unaligned(address as *mut _) };
    out.give(opaque_handle())
}

fn add_free_node(out: Out<usize>, graph: Handle<Graph>, address: usize) -> Status {
    let graph = graph.get().filter(|_| !out.is_null());
    match graph.map_or_else(|| fail(INVALID_VALUE), |graph| graph.add_free(address)) {
        OK => out.give(opaque_handle()),
        status => status,
    }
}

/// The flag `cudaGraphInstantiateFlagAutoFreeOnLaunch`.
const AUTO_FREE_ON_LAUNCH: u64 = 1;

fn instantiate(out: Out<Handle<Graph>>, graph: Handle<Graph>, flags: u64) -> Status {
    let Some(graph) = graph.get().filter(|_| !out.is_null()) else { return fail(INVALID_VALUE) };
    let instance = GraphInstance::new(current(), graph.work.nodes());
    if instance.is_none() {
        return fail(OUT_OF_MEMORY);
    }
    let instance = Mutex::new(instance);
    let memory = Mutex::new(lock(&graph.memory).instantiate(flags & AUTO_FREE_ON_LAUNCH != 0));
    let effects = Mutex::new(lock(&graph.effects).clone());
    out.give(Handle::new(Graph { work: graph.work.snapshot(), effects, memory, instance }))
}

fn destroy(graph: Handle<Graph>) -> Status {
    if let Some(graph) = graph.get() {
        drop(std::mem::take(&mut *lock(&graph.memory)));
        // A kernel node keeps its parameters.
        drop(std::mem::take(&mut *lock(&graph.effects)));
        drop(lock(&graph.instance).take());
    }
    OK
}

/// Lists the nodes of a graph. Each is a distinct number, which is never dereferenced.
///
/// # Safety
/// `list` is null or has as many elements as `count` holds.
unsafe fn nodes(handle: Handle<Graph>, list: Out<usize>, count: InOut<usize>) -> Status {
    let Some(graph) = handle.get() else { return fail(INVALID_HANDLE) };
    let all = graph.work.nodes() as usize;
    let capacity = if list.is_null() { 0 } else { count.input().get().unwrap_or(0) };
    for index in 0..capacity {
        // SAFETY: index < capacity.
        unsafe { list.at(index) }.put(if index < all { handle.address() + 1 + index } else { 0 });
    }
    count.output().give(all)
}

fn launch(graph: Handle<Graph>, stream: StreamHandle) -> Status {
    let Some(graph) = graph.get() else { return fail(INVALID_HANDLE) };
    let stream = match stream.for_work() {
        Ok(stream) => stream,
        Err(status) => return status,
    };
    let cost_ns = graph.work.cost_ns().max(1);
    if let Some(capture) = stream.capturing() {
        // A copy of the graph becomes a node. Its nodes run when the graph into which the stream is captured
        // is launched.
        if let Some(parent) = graph_of(capture).get() {
            parent.add_effect(graph.effect());
        }
        stream.launch(cost_ns);
        return OK;
    }
    let status = lock(&graph.memory).launch();
    if status != OK {
        return fail(status);
    }
    stream.launch(cost_ns);
    graph.effect()(stream)
}

answers! {
    Real fn {cudaGraphCreate, cuGraphCreate}(out: Out<Handle<Graph>>, _flags: u32) {
        out.give(Handle::new(Graph::default()))
    }
    Real fn {cudaGraphDestroy, cudaGraphExecDestroy, cuGraphDestroy, cuGraphExecDestroy}(
        graph: Handle<Graph>,
    ) {
        destroy(graph)
    }
    Guess fn {cudaGraphInstantiate, cudaGraphInstantiateWithFlags, cuGraphInstantiateWithFlags}(
        out: Out<Handle<Graph>>, graph: Handle<Graph>, flags: u64,
    ) {
        instantiate(out, graph, flags)
    }
    Real fn {cudaGraphLaunch, cuGraphLaunch}(graph: Handle<Graph>, stream: StreamHandle) {
        launch(graph, stream)
    }
    Success fn cudaGraphUpload(_graph: Word, _stream: Word) { OK }
    Real fn {cudaGraphGetNodes, cudaGraphGetRootNodes, cuGraphGetNodes}(
        graph: Handle<Graph>, list: Out<usize>, count: InOut<usize>,
    ) {
        by_contract!(nodes(graph, list, count))
    }
    /// These are the arguments of CUDA 13. In CUDA 12, there is no `edges`, and `count` is the third and last
    /// argument.
    Guess fn cudaGraphNodeGetDependencies(_node: Word, _list: Word, edges: Out<usize>, count: Out<usize>) {
        edges.put(0);
        if driver_version() >= 13000 {
            count.put(0);
        }
        OK
    }
    Success fn cudaGraphDebugDotPrint(_graph: Word, _path: Word, _flags: u32) { OK }
    Guess fn {cudaGraphAddMemAllocNode, cuGraphAddMemAllocNode}(
        out: Out<usize>, graph: Handle<Graph>, _after: Word, _count: usize,
        params: InOut<cudaMemAllocNodeParams>,
    ) {
        add_alloc_node(out, graph, params)
    }
    Guess fn {cudaGraphAddMemFreeNode, cuGraphAddMemFreeNode}(
        out: Out<usize>, graph: Handle<Graph>, _after: Word, _count: usize, address: Word,
    ) {
        add_free_node(out, graph, address)
    }
    /// The answer is not a guess, because it reports the bytes that launches took; only the bytes of each
    /// launch are guessed. The tracer's own samples call this function in every run.
    Real fn {cudaDeviceGetGraphMemAttribute, cuDeviceGetGraphMemAttribute}(
        index: c_int, attribute: c_int, out: Out<u64>,
    ) {
        graph_memory::attribute(index, attribute, out)
    }
    Real fn {cudaDeviceSetGraphMemAttribute, cuDeviceSetGraphMemAttribute}(
        index: c_int, attribute: c_int, _value: Word,
    ) {
        graph_memory::reset_high_water_mark(index, attribute)
    }
    Real fn {cudaDeviceGraphMemTrim, cuDeviceGraphMemTrim}(index: c_int) { graph_memory::trim(index) }
}
