//! The actions on blocks, in the profiler's order, which is by time and then by action.

use super::passes::Categories;
use super::read::BlocksAndFlow;
use super::types::{Action, Change};

/// Returns every action on every block of `reading`, in the profiler's order.
pub(super) fn changes(reading: &BlocksAndFlow, categories: &Categories) -> Vec<Change> {
    let BlocksAndFlow { blocks, nodes, versions, .. } = reading;
    let mut changes = Vec::with_capacity(blocks.len() * 2);
    let mut add = |time_ns: i64, action: Action, place: u32, version: u32| {
        let block = &blocks[place as usize];
        let (category, inferred) = categories.category(place, version, block);
        let (after, too) = match action {
            Action::IncrementVersion => categories.category(place, version + 1, block),
            _ => (category, inferred),
        };
        changes.push(Change {
            time_ns,
            action,
            block: place,
            version,
            category,
            after,
            inferred: inferred || too,
        });
    };
    for (place, block) in (0..).zip(blocks) {
        match block.born_ns {
            Some(born_ns) => add(born_ns, Action::Create, place, 0),
            None => add(-1, Action::Preexisting, place, 0),
        }
        if let Some(died_ns) = block.died_ns {
            add(died_ns, Action::Destroy, place, versions[place as usize]);
        }
    }
    for node in nodes {
        for (place, edge) in &node.edges {
            if let (Some(version), Some(_)) = (edge.input, edge.output()) {
                add(node.start_ns, Action::IncrementVersion, *place, version);
            }
        }
    }
    changes.sort_by_key(|change| (change.time_ns, change.action));
    changes
}
