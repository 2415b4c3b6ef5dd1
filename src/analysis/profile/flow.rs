//! The flow of data between ops: which versions of which blocks each op read, wrote, made and dropped.
//!
//! A node is an op with a schema that is in no other such op, a backward function, or an allocation or a
//! free that happened outside of both (`DataFlowGraph._extract_leaf_events`).

use rustc_hash::FxHashMap;

/// What a node did to a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edge {
    /// The version that it met; `None` when it allocated the block.
    pub input: Option<u32>,
    /// It changed the block in place.
    pub mutated: bool,
    /// It gave the block back.
    pub deleted: bool,
}

impl Edge {
    /// The version that the block has behind the node, when the node made it.
    #[must_use]
    pub fn output(&self) -> Option<u32> {
        match self.input {
            None if self.deleted => None,
            None => Some(0),
            Some(version) if self.mutated && !self.deleted => Some(version + 1),
            Some(_) => None,
        }
    }

    /// Did the block live inside the node alone?
    #[must_use]
    pub fn is_intermediate(&self) -> bool {
        self.input.is_none() && self.deleted
    }
}

/// One node.
#[derive(Clone, Debug, Default)]
pub struct Node {
    /// When it began, ns.
    pub start_ns: i64,
    /// Is it a backward function?
    pub backward: bool,
    /// Does it accumulate a gradient?
    pub accumulates: bool,
    /// Its blocks, each once, by their place.
    pub edges: Vec<(u32, Edge)>,
}

impl Node {
    /// The blocks and versions that it met.
    pub fn inputs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.edges.iter().filter_map(|(block, edge)| Some((*block, edge.input?)))
    }

    /// The blocks and versions that it made.
    pub fn outputs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.edges.iter().filter_map(|(block, edge)| Some((*block, edge.output()?)))
    }
}

/// One thing that a node, or nobody, did to a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// Read it, by a schema.
    Read,
    /// Changed it, by a schema.
    Wrote,
    /// Got it where no schema says what for.
    Got,
    /// Allocated it.
    Made,
    /// Gave it back.
    Dropped,
}

/// A deed, by a thread, at a time.
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessEvent {
    pub(super) ts_ns: i64,
    pub(super) block: u32,
    pub(super) did: Access,
}

/// Makes nodes of deeds as rows tell them: what an op did stands before the row of its end.
#[derive(Debug, Default)]
pub(super) struct FlowBuilder {
    /// By thread, what belongs to no op yet.
    open: FxHashMap<i32, Vec<AccessEvent>>,
    nodes: Vec<Node>,
}

impl FlowBuilder {
    pub(super) fn did(&mut self, tid: i32, deed: AccessEvent) {
        self.open.entry(tid).or_default().push(deed);
    }

    /// An op of this thread that is a node ended: what the thread did since `start_ns` is its.
    pub(super) fn ended(&mut self, tid: i32, start_ns: i64, backward: bool, accumulates: bool) {
        let open = self.open.entry(tid).or_default();
        let first = open.partition_point(|deed| deed.ts_ns < start_ns);
        let own: Vec<AccessEvent> = open.drain(first..).collect();
        let loose = std::mem::take(open);
        loose.into_iter().for_each(|deed| self.alone(deed));
        let edges = edges_of(&own);
        self.nodes.push(Node { start_ns, backward, accumulates, edges });
    }

    /// A deed outside every op. Only allocations and frees are nodes by themselves.
    fn alone(&mut self, deed: AccessEvent) {
        if matches!(deed.did, Access::Made | Access::Dropped) {
            self.nodes.push(Node { start_ns: deed.ts_ns, edges: edges_of(&[deed]), ..Node::default() });
        }
    }

    /// The nodes in the order in which they began, each edge with the version that it met; and the last
    /// version of each of `blocks` blocks.
    pub(super) fn finish(mut self, blocks: usize) -> (Vec<Node>, Vec<u32>) {
        let open = std::mem::take(&mut self.open);
        open.into_values().flatten().for_each(|deed| self.alone(deed));
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

/// What a node did to each block in all. One that only got a block where no schema says what for is taken
/// to have changed it, as the profiler does (`DataFlowNode._determine_edges`).
fn edges_of(deeds: &[AccessEvent]) -> Vec<(u32, Edge)> {
    #[derive(Default)]
    struct Sum {
        edge: Edge,
        has_schema: bool,
        wrote: bool,
        got: bool,
        made: bool,
    }
    let mut sums: Vec<(u32, Sum)> = Vec::new();
    let mut places: FxHashMap<u32, usize> = FxHashMap::default();
    for deed in deeds {
        let place = *places.entry(deed.block).or_insert_with(|| {
            sums.push((deed.block, Sum::default()));
            sums.len() - 1
        });
        let sum = &mut sums[place].1;
        match deed.did {
            Access::Read => sum.has_schema = true,
            Access::Wrote => (sum.has_schema, sum.wrote) = (true, true),
            Access::Got => sum.got = true,
            Access::Made => sum.made = true,
            Access::Dropped => sum.edge.deleted = true,
        }
    }
    let edge = |sum: Sum| Edge {
        input: (!sum.made).then_some(0),
        mutated: !sum.edge.deleted && (sum.wrote || (sum.got && !sum.has_schema)),
        deleted: sum.edge.deleted,
    };
    sums.into_iter().map(|(block, sum)| (block, edge(sum))).collect()
}
