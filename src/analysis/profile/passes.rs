//! The passes by which `torch.profiler` assigns categories to blocks, in its order
//! (`MemoryProfile.__init__`):
//!
//! 1. GRADIENT by evidence, and TEMPORARY for blocks that live inside one node;
//! 2. PARAMETER by evidence;
//! 3. INPUT: contributes to a gradient or parameter, is not made by backward, and never depends on either;
//! 4. PARAMETER by flow: used in the forward together with data that depends on an input, contributes to a
//!    gradient and depends on one;
//! 5. ACTIVATION: made in the forward from at least one input or activation, and otherwise only from
//!    parameters and temporaries;
//! 6. OPTIMIZER_STATE by evidence;
//! 7. AUTOGRAD_DETAIL: made in backward, where the block is new or has no category;
//! 8. no category, by evidence: a workspace of a library. This pass is not one of the profiler's.
//!
//! Evidence is a `tag` row or an `AccumulateGrad` node. The category of a block takes precedence over the
//! category of one of its versions. If several passes match a block, the last one decides. If several match a
//! version, the first one decides.

use std::collections::VecDeque;

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use super::flow::Node;
use super::read::BlocksAndFlow;
use super::types::{ProfiledBlock, ProfilerCategory};

/// The result of the passes; see [`Categories::category`].
#[derive(Debug, Default)]
pub(super) struct Categories {
    of_block: Vec<Option<ProfilerCategory>>,
    /// For each block: true if its category is inferred instead of from a tag.
    inferred: Vec<bool>,
    temporary: Vec<bool>,
    of_version: FxHashMap<(u32, u32), ProfilerCategory>,
}

impl Categories {
    fn get(&self, block: u32, version: u32) -> Option<ProfilerCategory> {
        self.of_block[block as usize]
            .or_else(|| self.temporary[block as usize].then_some(ProfilerCategory::Temporary))
            .or_else(|| self.of_version.get(&(block, version)).copied())
    }

    /// Returns the category of a version, and whether it was inferred from the flow of data. If the flow
    /// gives no category, returns the category of the block's rows.
    pub(super) fn category(
        &self,
        place: u32,
        version: u32,
        block: &ProfiledBlock,
    ) -> (ProfilerCategory, bool) {
        match self.get(place, version) {
            Some(category) => {
                let tagged = self.of_block[place as usize].is_some() && !self.inferred[place as usize];
                (category, !tagged)
            }
            None => (ProfilerCategory::from_category(block.recorded), false),
        }
    }

    fn is_any(&self, (block, version): (u32, u32), of: [ProfilerCategory; 2]) -> bool {
        self.get(block, version).is_some_and(|category| of.contains(&category))
    }

    fn set_default(&mut self, at: (u32, u32), category: ProfilerCategory) {
        self.of_version.entry(at).or_insert(category);
    }
}

const GRADIENT_OR_PARAMETER: [ProfilerCategory; 2] =
    [ProfilerCategory::Gradient, ProfilerCategory::Parameter];

/// Runs the passes. Without io records, they find nothing, and every block keeps the category of its rows.
pub(super) fn classify(reading: &BlocksAndFlow) -> Categories {
    let count = reading.blocks.len();
    let mut found = Categories {
        of_block: vec![None; count],
        inferred: vec![false; count],
        temporary: vec![false; count],
        of_version: FxHashMap::default(),
    };
    if !reading.has_io {
        return found;
    }
    let nodes = &reading.nodes;
    apply_tags(&mut found, reading, Category::Gradient, ProfilerCategory::Gradient);
    accumulated(&mut found, reading);
    for (block, edge) in nodes.iter().flat_map(|node| &node.edges) {
        found.temporary[*block as usize] |= edge.is_intermediate();
    }
    apply_tags(&mut found, reading, Category::Parameter, ProfilerCategory::Parameter);
    inputs(&mut found, reading);
    parameters(&mut found, reading);
    activations(&mut found, nodes);
    apply_tags(&mut found, reading, Category::OptimizerState, ProfilerCategory::OptimizerState);
    autograd_detail(&mut found, nodes);
    // The profiler does not see a library's workspace. The flow would attribute the workspace to the op that
    // allocated it.
    apply_tags(&mut found, reading, Category::Workspace, ProfilerCategory::Unknown);
    found
}

/// Sets the category of the blocks whose `tag` row has the category `recorded`. Replaces an inferred
/// category.
fn apply_tags(
    found: &mut Categories,
    reading: &BlocksAndFlow,
    recorded: Category,
    category: ProfilerCategory,
) {
    for (place, block) in reading.blocks.iter().enumerate() {
        if block.tagged && block.recorded == recorded {
            (found.of_block[place], found.inferred[place]) = (Some(category), false);
        }
    }
}

/// Marks the gradient of each `AccumulateGrad` node: a block that the node changed in place. If it changed no
/// block, a block that it allocated; if it allocated no block, a block passed in.
fn accumulated(found: &mut Categories, reading: &BlocksAndFlow) {
    for node in reading.nodes.iter().filter(|node| node.accumulates) {
        let place = |is: fn(&super::flow::Edge) -> bool| {
            node.edges.iter().find(|(_, edge)| is(edge)).map(|(block, _)| *block)
        };
        let gradient = place(|edge| edge.input.is_some() && edge.mutated)
            .or_else(|| place(|edge| edge.output() == Some(0)))
            .or_else(|| place(|edge| edge.input.is_some() && !edge.deleted));
        if let Some(gradient) = gradient {
            let at = gradient as usize;
            if found.of_block[at].is_none() {
                (found.of_block[at], found.inferred[at]) = (Some(ProfilerCategory::Gradient), true);
            }
        }
    }
}

/// Returns, for each block, whether any of its versions depends on a gradient or parameter
/// (`_any_version_depends_on_gradient`). A node with such an input makes all its outputs dependent.
fn depends_on_gradient(found: &Categories, reading: &BlocksAndFlow) -> Vec<bool> {
    let nodes = &reading.nodes;
    let mut depends = vec![false; reading.blocks.len()];
    // The nodes that use each block.
    let mut users: Vec<Vec<u32>> = vec![Vec::new(); reading.blocks.len()];
    let mut todo = VecDeque::new();
    for (index, node) in nodes.iter().enumerate() {
        for (block, version) in node.inputs() {
            users[block as usize].push(index as u32);
            if found.is_any((block, version), GRADIENT_OR_PARAMETER) && !depends[block as usize] {
                depends[block as usize] = true;
                todo.push_back(block);
            }
        }
    }
    let mut done = vec![false; nodes.len()];
    while let Some(block) = todo.pop_front() {
        for index in std::mem::take(&mut users[block as usize]) {
            if std::mem::replace(&mut done[index as usize], true) {
                continue;
            }
            for (output, _) in nodes[index as usize].outputs() {
                if !std::mem::replace(&mut depends[output as usize], true) {
                    todo.push_back(output);
                }
            }
        }
    }
    depends
}

fn inputs(found: &mut Categories, reading: &BlocksAndFlow) {
    let depends = depends_on_gradient(found, reading);
    let mut produces: FxHashSet<(u32, u32)> = FxHashSet::default();
    for node in reading.nodes.iter().rev() {
        let counts = |at: (u32, u32)| found.is_any(at, GRADIENT_OR_PARAMETER) || produces.contains(&at);
        if node.inputs().chain(node.outputs()).any(counts) {
            produces.extend(node.inputs().chain(node.outputs()));
        }
    }
    for node in reading.nodes.iter().filter(|node| node.backward) {
        for output in node.outputs() {
            produces.remove(&output);
        }
    }
    for at in produces {
        if !depends[at.0 as usize] {
            found.set_default(at, ProfilerCategory::Input);
        }
    }
}

fn parameters(found: &mut Categories, reading: &BlocksAndFlow) {
    let is_gradient = |at: (u32, u32)| found.get(at.0, at.1) == Some(ProfilerCategory::Gradient);
    let mut forward: FxHashSet<(u32, u32)> = FxHashSet::default();
    for (place, last) in reading.versions.iter().enumerate() {
        let versions = (0..=*last).map(|version| (place as u32, version));
        forward.extend(versions.filter(|at| found.get(at.0, at.1) == Some(ProfilerCategory::Input)));
    }
    let mut candidates: FxHashSet<(u32, u32)> = FxHashSet::default();
    for node in reading.nodes.iter().filter(|node| !node.backward) {
        let touches_gradient = node.inputs().chain(node.outputs()).any(is_gradient);
        if !touches_gradient && node.inputs().any(|at| forward.contains(&at)) {
            forward.extend(node.outputs());
            candidates.extend(node.inputs().filter(|at| !forward.contains(at)));
        }
    }
    let mut used: FxHashSet<(u32, u32)> = FxHashSet::default();
    for node in reading.nodes.iter().rev() {
        if node.outputs().any(|at| is_gradient(at) || used.contains(&at)) {
            used.extend(node.inputs());
        }
    }
    let depends = depends_on_gradient(found, reading);
    for (block, _) in candidates.into_iter().filter(|at| used.contains(at)) {
        let at = block as usize;
        if depends[at] && found.of_block[at] != Some(ProfilerCategory::Parameter) {
            (found.of_block[at], found.inferred[at]) = (Some(ProfilerCategory::Parameter), true);
        }
    }
}

fn activations(found: &mut Categories, nodes: &[Node]) {
    for node in nodes.iter().filter(|node| !node.backward) {
        let (mut required, mut others) = (false, false);
        for (block, version) in node.inputs() {
            match found.get(block, version) {
                Some(ProfilerCategory::Input | ProfilerCategory::Activation) => required = true,
                Some(ProfilerCategory::Parameter | ProfilerCategory::Temporary) => {}
                _ => others = true,
            }
        }
        if required && !others {
            for output in node.outputs() {
                found.set_default(output, ProfilerCategory::Activation);
            }
        }
    }
}

fn autograd_detail(found: &mut Categories, nodes: &[Node]) {
    for node in nodes.iter().filter(|node| node.backward) {
        for (block, version) in node.outputs() {
            let before = version.checked_sub(1).and_then(|before| found.get(block, before));
            if version == 0 || matches!(before, None | Some(ProfilerCategory::AutogradDetail)) {
                found.set_default((block, version), ProfilerCategory::AutogradDetail);
            }
        }
    }
}
