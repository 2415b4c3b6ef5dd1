//! Groups blocks by module, op, category or another key.

use std::sync::Arc;

use memtrace_trace::Category;
use rustc_hash::FxHashMap;

use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::read::symbols::{NO_CATEGORY, NO_LINE, NO_MODULE, NO_OP, NO_PHASE, NO_STACK, SymbolTable};
use crate::state::replay::{Block, Owner};
use crate::state::stacks::Stacks;

/// The keys by which blocks can be grouped.
pub const KEYS: &[&str] = &["module", "op", "category", "phase", "step", "size", "line", "stack"];

/// The option that selects one of [`KEYS`].
pub const BY: Flag = Flag {
    name: "by",
    value: Some("KEY"),
    default: "module",
    choices: KEYS,
    help: "Group the live blocks by this key",
};

/// The option that limits the depth of module paths.
pub const DEPTH: Flag = Flag {
    name: "depth",
    value: Some("N"),
    default: "",
    choices: &[],
    help: "Join modules below the N-th level of their path",
};

/// A key by which blocks are grouped.
#[derive(Clone, Debug)]
pub struct Key {
    /// One of [`KEYS`].
    pub name: &'static str,
    depth: Option<usize>,
    /// The stacks of the trace, where the key needs them.
    stacks: Option<Arc<Stacks>>,
}

/// The blocks of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// Their sum, in bytes.
    pub bytes: i64,
    /// The number of blocks.
    pub blocks: u64,
}

impl Key {
    /// By module, with whole paths.
    pub const MODULE: Key = Key { name: "module", depth: None, stacks: None };
    /// By category.
    pub const CATEGORY: Key = Key { name: "category", depth: None, stacks: None };

    /// The key that [`BY`] and [`DEPTH`] select.
    ///
    /// # Errors
    /// When the depth is not a number.
    pub fn from_options(options: &Options) -> Result<Key> {
        let wanted = options.text(BY.name);
        let name = KEYS.iter().find(|key| **key == wanted).unwrap_or(&KEYS[0]);
        Ok(Key { name, depth: options.count(DEPTH.name)?, stacks: None })
    }

    /// The columns that the key needs in addition to those of a replay.
    #[must_use]
    pub fn columns(&self) -> Columns {
        Columns::of(if self.needs_stacks() { &["stack_id"] } else { &[] })
    }

    /// The same key with the stacks of `trace`, where it needs them.
    #[must_use]
    pub fn on(&self, trace: &TraceFile) -> Key {
        let stacks = self.needs_stacks().then(|| Arc::new(Stacks::read(trace)));
        Key { stacks, ..self.clone() }
    }

    /// Returns true if the trace has lines of Python.
    #[must_use]
    pub fn has_lines(&self) -> bool {
        self.stacks.as_deref().is_some_and(Stacks::has_lines)
    }

    fn needs_stacks(&self) -> bool {
        matches!(self.name, "line" | "stack")
    }

    /// The name of the group of the blocks without such a key.
    #[must_use]
    pub fn missing(&self) -> &'static str {
        match self.name {
            "op" => NO_OP,
            "phase" => NO_PHASE,
            "category" => NO_CATEGORY,
            "line" => NO_LINE,
            "stack" => NO_STACK,
            _ => NO_MODULE,
        }
    }

    /// The name of the group of a block.
    #[must_use]
    pub fn of(&self, block: &Block, symbols: &SymbolTable) -> String {
        match self.name {
            "size" => format!("{} B", block.bytes),
            "line" | "stack" => self.of_stack(block.stack),
            "category" => block_category(block).to_owned(),
            _ => self.of_owner(&block.owner, symbols),
        }
    }

    fn of_stack(&self, id: i64) -> String {
        let stacks = self.stacks.as_deref();
        let text = match self.name {
            "line" => stacks.and_then(|stacks| stacks.lines(id).first().map(|line| (*line).to_owned())),
            _ => stacks.and_then(|stacks| stacks.show(id)),
        };
        text.unwrap_or_else(|| self.missing().to_owned())
    }

    /// The name of the group of an owner, for keys that depend on the owner alone.
    #[must_use]
    pub fn of_owner(&self, owner: &Owner, symbols: &SymbolTable) -> String {
        match self.name {
            "op" => symbols.or(owner.op, NO_OP),
            "phase" => symbols.or(owner.phase, NO_PHASE),
            "category" => category(owner.category).to_owned(),
            "step" if owner.step < 0 => "before the first".to_owned(),
            "step" => owner.step.to_string(),
            _ => {
                let module = symbols.or(owner.module, NO_MODULE);
                match self.depth {
                    Some(depth) => upper_levels(&module, depth).to_owned(),
                    None => module,
                }
            }
        }
    }

    /// Sums `blocks` by group.
    #[must_use]
    pub fn groups(&self, blocks: &[Block], symbols: &SymbolTable) -> FxHashMap<String, Group> {
        // First by owner, which is cheap to hash, then by name: a trace has far fewer owners than blocks.
        let mut owners: FxHashMap<(Owner, bool, i64), (Block, Group)> = FxHashMap::default();
        for block in blocks {
            let more = match self.name {
                "size" => block.bytes,
                "line" | "stack" => block.stack,
                _ => 0,
            };
            let key = (block.owner, block.inferred, more);
            let (_, group) = owners.entry(key).or_insert((*block, Group::default()));
            group.bytes += block.bytes;
            group.blocks += 1;
        }
        let mut groups: FxHashMap<String, Group> = FxHashMap::default();
        for (block, part) in owners.values() {
            let group = groups.entry(self.of(block, symbols)).or_default();
            group.bytes += part.bytes;
            group.blocks += part.blocks;
        }
        groups
    }
}

/// The groups in order of size, the largest first; equal sizes by name.
#[must_use]
pub fn sorted(groups: FxHashMap<String, Group>) -> Vec<(String, Group)> {
    let mut groups: Vec<(String, Group)> = groups.into_iter().collect();
    groups.sort_by(|a, b| b.1.bytes.cmp(&a.1.bytes).then_with(|| a.0.cmp(&b.0)));
    groups
}

/// The name of a category in reports.
#[must_use]
pub fn category(category: Category) -> &'static str {
    if category == Category::None { NO_CATEGORY } else { category.as_str() }
}

/// The name of a block's category in reports, with `*` where it was inferred.
#[must_use]
pub fn block_category(block: &Block) -> &'static str {
    match block.owner.category {
        Category::Parameter if block.inferred => "parameter *",
        Category::Gradient if block.inferred => "gradient *",
        Category::OptimizerState if block.inferred => "optimizer_state *",
        Category::Input if block.inferred => "input *",
        Category::Activation if block.inferred => "activation *",
        Category::Temporary if block.inferred => "temporary *",
        Category::AutogradDetail if block.inferred => "autograd_detail *",
        other => category(other),
    }
}

/// A category's name from [`block_category`] without the mark of an inferred one, and whether it has the mark.
#[must_use]
pub fn without_mark(name: &str) -> (&str, bool) {
    match name.strip_suffix(" *") {
        Some(name) => (name, true),
        None => (name, false),
    }
}

/// The first `depth` levels of a module path.
fn upper_levels(path: &str, depth: usize) -> &str {
    match path.match_indices('.').nth(depth.max(1) - 1) {
        Some((end, _)) => &path[..end],
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_cut_a_module_path_to_a_depth() {
        assert_eq!(upper_levels("GPT.h.0.mlp", 2), "GPT.h");
        assert_eq!(upper_levels("GPT", 2), "GPT");
        assert_eq!(upper_levels("GPT.h", 1), "GPT");
    }
}
