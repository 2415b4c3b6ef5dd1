//! The flow of data between ops: the versions of blocks that each op reads, writes, allocates and frees.
//!
//! A node is an op with a schema that is not nested in another such op, a backward function, or an allocation
//! or free outside of both (`DataFlowGraph._extract_leaf_events` in `torch/profiler/_memory_profiler.py`).

use rustc_hash::FxHashMap;

/// The effect of a node on a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edge {
    /// The version before the node; `None` if the node allocated the block.
    pub input: Option<u32>,
    /// True if the node changed the block in place.
    pub mutated: bool,
    /// True if the node freed the block.
    pub deleted: bool,
}

impl Edge {
    /// Returns the version after the node, or `None` if the node made no new version.
    #[must_use]
    pub fn output(&self) -> Option<u32> {
        match self.input {
            None if self.deleted => None,
            None => Some(0),
            Some(version) if self.mutated && !self.deleted => Some(version + 1),
            Some(_) => None,
        }
    }

    /// Returns true if the block was allocated and freed inside the node.
    #[must_use]
    pub fn is_intermediate(&self) -> bool {
        self.input.is_none() && self.deleted
    }
}

/// A node of the flow.
#[derive(Clone, Debug, Default)]
pub struct Node {
    /// The start, in ns since the start of the trace.
    pub start_ns: i64,
    /// True if the node is a backward function.
    pub backward: bool,
    /// True if the node accumulates a gradient.
    pub accumulates: bool,
    /// The blocks that the node uses, by index; each occurs once.
    pub edges: Vec<(u32, Edge)>,
}

impl Node {
    /// Returns the blocks that existed before the node, with their versions at that time.
    pub fn inputs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.edges.iter().filter_map(|(block, edge)| Some((*block, edge.input?)))
    }

    /// Returns the blocks and versions that the node created.
    pub fn outputs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.edges.iter().filter_map(|(block, edge)| Some((*block, edge.output()?)))
    }
}

/// One access to a block, by a node or outside every node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// The op's schema says that the op reads the block.
    Read,
    /// The op's schema says that the op changes the block in place.
    Write,
    /// The block was passed to a function without a schema.
    Passed,
    /// The block was allocated.
    Alloc,
    /// The block was freed.
    Free,
}

/// An access to a block at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessEvent {
    pub(super) ts_ns: i64,
    pub(super) block: u32,
    pub(super) access: Access,
}

/// Builds nodes from accesses in the order of the rows. In this order, the accesses of an op come before the
/// row of the op, which marks its end.
#[derive(Debug, Default)]
pub(super) struct FlowBuilder {
    /// For each thread, the accesses that do not belong to an op so far.
    open: FxHashMap<i32, Vec<AccessEvent>>,
    nodes: Vec<Node>,
}

impl FlowBuilder {
    /// Adds an access by thread `tid`.
    pub(super) fn record(&mut self, tid: i32, event: AccessEvent) {
        self.open.entry(tid).or_default().push(event);
    }

    /// Ends an op of thread `tid` that is a node. The thread's accesses since `start_ns` belong to this node,
    /// and its earlier open accesses are outside every op.
    pub(super) fn end_node(&mut self, tid: i32, start_ns: i64, backward: bool, accumulates: bool) {
        let open = self.open.entry(tid).or_default();
        let first = open.partition_point(|event| event.ts_ns < start_ns);
        let own: Vec<AccessEvent> = open.drain(first..).collect();
        let outside = std::mem::take(open);
        outside.into_iter().for_each(|event| self.add_outside(event));
        let edges = edges_of(&own);
        self.nodes.push(Node { start_ns, backward, accumulates, edges });
    }

    /// Adds an access outside every op. Only an allocation or a free becomes a separate node.
    fn add_outside(&mut self, event: AccessEvent) {
        if matches!(event.access, Access::Alloc | Access::Free) {
            self.nodes.push(Node { start_ns: event.ts_ns, edges: edges_of(&[event]), ..Node::default() });
        }
    }

    /// Returns the nodes in order of their start, with the version before each edge, and the last version of
    /// each of the `blocks` blocks.
    pub(super) fn finish(mut self, blocks: usize) -> (Vec<Node>, Vec<u32>) {
        let open = std::mem::take(&mut self.open);
        open.into_values().flatten().for_each(|event| self.add_outside(event));
        self.nodes.sort_by_key(|node| node.start_ns);
        let mut versions = vec![0; blocks];
        for node in &mut self.nodes {
            for (block, edge) in &mut node.edges {
                let version = &mut versions[*block as usize];
                if edge.input.is_some() {
                    edge.input = Some(*version);
                    if edge.output().is_some() {
                        *version += 1;
                    }
                }
            }
        }
        (self.nodes, versions)
    }
}

/// Returns the effect of a node on each of its blocks. A block that was only passed to a function without a
/// schema counts as changed, as in the profiler (`DataFlowNode._determine_edges`).
fn edges_of(events: &[AccessEvent]) -> Vec<(u32, Edge)> {
    #[derive(Default)]
    struct Sum {
        edge: Edge,
        has_schema: bool,
        wrote: bool,
        passed: bool,
        allocated: bool,
    }
    let mut sums: Vec<(u32, Sum)> = Vec::new();
    let mut places: FxHashMap<u32, usize> = FxHashMap::default();
    for event in events {
        let place = *places.entry(event.block).or_insert_with(|| {
            sums.push((event.block, Sum::default()));
            sums.len() - 1
        });
        let sum = &mut sums[place].1;
        match event.access {
            Access::Read => sum.has_schema = true,
            Access::Write => (sum.has_schema, sum.wrote) = (true, true),
            Access::Passed => sum.passed = true,
            Access::Alloc => sum.allocated = true,
            Access::Free => sum.edge.deleted = true,
        }
    }
    let edge = |sum: Sum| Edge {
        input: (!sum.allocated).then_some(0),
        mutated: !sum.edge.deleted && (sum.wrote || (sum.passed && !sum.has_schema)),
        deleted: sum.edge.deleted,
    };
    sums.into_iter().map(|(block, sum)| (block, edge(sum))).collect()
}
