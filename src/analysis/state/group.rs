//! Groups blocks by module, op, category or another key.

use std::sync::Arc;

use memtrace_trace::Category;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::read::symbols::{NO_CATEGORY, NO_LINE, NO_MODULE, NO_OP, NO_PHASE, NO_STACK, Symbol, SymbolTable};
use crate::state::block::is_unknown_form;
use crate::state::module_layers::{Layers, ModuleClasses};
use crate::state::replay::{Block, Owner, Replay};
use crate::state::stacks::Stacks;

/// What blocks are grouped by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyKind {
    /// The path of the module.
    Module,
    /// The class of the module.
    Type,
    /// The op.
    Op,
    /// The category.
    Category,
    /// The phase.
    Phase,
    /// The step.
    Step,
    /// The size of the block.
    Size,
    /// The type of the tensor.
    DType,
    /// The type and the shape of the tensor.
    Shape,
    /// The innermost Python line in the program's own files.
    Line,
    /// The whole stack.
    Stack,
}

impl KeyKind {
    const ALL: [(&'static str, KeyKind); 11] = [
        ("module", KeyKind::Module),
        ("type", KeyKind::Type),
        ("op", KeyKind::Op),
        ("category", KeyKind::Category),
        ("phase", KeyKind::Phase),
        ("step", KeyKind::Step),
        ("size", KeyKind::Size),
        ("dtype", KeyKind::DType),
        ("shape", KeyKind::Shape),
        ("line", KeyKind::Line),
        ("stack", KeyKind::Stack),
    ];
}

/// The names of the keys by which blocks can be grouped.
pub const KEYS: &[&str] = &{
    let mut names = [""; KeyKind::ALL.len()];
    let mut at = 0;
    while at < names.len() {
        names[at] = KeyKind::ALL[at].0;
        at += 1;
    }
    names
};

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

/// The switch that shows repeated layers one by one.
pub const APART: Flag =
    Flag::switch("apart", "List repeated layers separately: GPT.h.0, GPT.h.1, ... instead of GPT.h.*");

/// The group name for the blocks of modules whose class is unknown.
pub const NO_TYPE: &str = "(unknown type)";
/// The group name for the blocks whose tensor's type is unknown.
pub const NO_DTYPE: &str = "(unknown dtype)";
/// The group name for the blocks whose tensor's shape is unknown.
pub const NO_SHAPE: &str = "(unknown shape)";

/// A key by which blocks are grouped.
#[derive(Clone, Debug)]
pub struct Key {
    /// What the key groups by.
    pub kind: KeyKind,
    depth: Option<usize>,
    /// True if repeated layers are not joined.
    apart: bool,
    /// The stacks of the trace, if the key needs them.
    stacks: Option<Arc<Stacks>>,
    /// The repeated layers to join, or `None` to join nothing.
    layers: Option<Arc<Layers>>,
    /// The classes of modules, if the key needs them.
    classes: Option<Arc<ModuleClasses>>,
}

/// The sums over the blocks of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Group {
    /// The sum of the sizes of the blocks, in bytes.
    pub bytes: i64,
    /// The number of blocks.
    pub blocks: u64,
    /// For a group of modules: the bytes of the group and of all modules below it.
    pub total: i64,
    /// For a group of modules: the number of joined modules that have blocks.
    pub modules: u64,
    /// For a group of modules: the bytes of the largest of the joined modules.
    pub largest: i64,
}

impl Key {
    /// Groups by module, with whole paths. [`Key::joining`] adds the repeated layers.
    pub const MODULE: Key = Key::by(KeyKind::Module);
    /// Groups by category.
    pub const CATEGORY: Key = Key::by(KeyKind::Category);
    /// Groups by the types of tensors.
    pub const DTYPE: Key = Key::by(KeyKind::DType);
    /// Groups by the type and shape of the tensor.
    pub const SHAPE: Key = Key::by(KeyKind::Shape);

    /// Groups by the innermost Python line in the program's own files.
    pub const LINE: Key = Key::by(KeyKind::Line);
    /// Groups by op.
    pub const OP: Key = Key::by(KeyKind::Op);

    const fn by(kind: KeyKind) -> Key {
        Key { kind, depth: None, apart: false, stacks: None, layers: None, classes: None }
    }

    /// Returns the key that [`BY`], [`DEPTH`] and [`APART`] select.
    ///
    /// # Errors
    /// When the depth is not a number.
    pub fn from_options(options: &Options) -> Result<Key> {
        let wanted = options.text(BY.name);
        let kind =
            KeyKind::ALL.iter().find(|(name, _)| *name == wanted).map_or(KeyKind::Module, |(_, kind)| *kind);
        let (depth, apart) = (options.count(DEPTH.name)?, options.is_set(APART.name));
        Ok(Key { depth, apart, ..Key::by(kind) })
    }

    /// Returns the name of the key, one of [`KEYS`].
    #[must_use]
    pub fn name(&self) -> &'static str {
        KEYS[self.kind as usize]
    }

    /// Returns the columns that the key needs in addition to the columns of the replay.
    #[must_use]
    pub fn columns(&self) -> Columns {
        Columns::of(if self.needs_stacks() { &["stack_id"] } else { &[] })
    }

    /// Returns this key with the stacks of `trace`. Only the keys `line` and `stack` need stacks; for any
    /// other key, nothing is read.
    #[must_use]
    pub fn on(&self, trace: &TraceFile) -> Key {
        let stacks = self.needs_stacks().then(|| Arc::new(Stacks::read(trace)));
        Key { stacks, ..self.clone() }
    }

    /// Returns the key with the data that it needs about modules: the classes of the replay's modules for the
    /// key `type`, and the repeated layers for the key `module`, unless `--apart` is set.
    #[must_use]
    pub fn on_modules(&self, replay: &Replay, blocks: &[Block]) -> Key {
        let classes = (self.kind == KeyKind::Type).then(|| Arc::new(replay.classes.clone()));
        Key { classes, ..self.joining(&layers_of(replay, blocks)) }
    }

    /// Returns the key with these repeated layers to join. Only the key `module` joins layers, and only
    /// without `--apart`.
    #[must_use]
    pub fn joining(&self, layers: &Layers) -> Key {
        let layers = (self.kind == KeyKind::Module && !self.apart).then(|| Arc::new(layers.clone()));
        Key { layers, ..self.clone() }
    }

    /// Returns true if the key has stacks with Python lines. It has no stacks before [`Key::on`] adds them.
    #[must_use]
    pub fn has_lines(&self) -> bool {
        self.stacks.as_deref().is_some_and(Stacks::has_lines)
    }

    /// Returns true if the key joins the modules below a level of their path (`--depth`).
    #[must_use]
    pub fn has_depth(&self) -> bool {
        self.depth.is_some()
    }

    fn needs_stacks(&self) -> bool {
        matches!(self.kind, KeyKind::Line | KeyKind::Stack)
    }

    /// Returns the group name for the blocks that lack this key, such as blocks without an op.
    #[must_use]
    pub fn missing(&self) -> &'static str {
        match self.kind {
            KeyKind::Op => NO_OP,
            KeyKind::Phase => NO_PHASE,
            KeyKind::Category => NO_CATEGORY,
            KeyKind::Line => NO_LINE,
            KeyKind::Stack => NO_STACK,
            KeyKind::Type => NO_TYPE,
            KeyKind::DType => NO_DTYPE,
            KeyKind::Shape => NO_SHAPE,
            // Each block has a size and a step.
            KeyKind::Module | KeyKind::Size | KeyKind::Step => NO_MODULE,
        }
    }

    /// Returns the name of the group to which a block belongs.
    #[must_use]
    pub fn group_of(&self, block: &Block, symbols: &SymbolTable) -> String {
        match self.kind {
            KeyKind::Module => self.module_group(block.owner.module, symbols),
            KeyKind::Type => self.type_group(block.owner.module, symbols),
            KeyKind::Op => symbols.or(block.owner.op, NO_OP),
            KeyKind::Category => block_category(block).to_owned(),
            KeyKind::Phase => symbols.or(block.owner.phase, NO_PHASE),
            KeyKind::Step if block.owner.step < 0 => "before the first".to_owned(),
            KeyKind::Step => block.owner.step.to_string(),
            KeyKind::Size => format!("{} B", block.bytes),
            KeyKind::DType if is_unknown_form(block.dtype) => NO_DTYPE.to_owned(),
            KeyKind::DType => symbols.get(block.dtype).to_string(),
            KeyKind::Shape if is_unknown_form(block.shape) => NO_SHAPE.to_owned(),
            KeyKind::Shape => format!("{} {}", symbols.get(block.dtype), symbols.get(block.shape)),
            KeyKind::Line | KeyKind::Stack => self.stack_group(block.stack),
        }
    }

    fn stack_group(&self, id: i64) -> String {
        let stacks = self.stacks.as_deref();
        let text = match self.kind {
            KeyKind::Line => {
                stacks.and_then(|stacks| stacks.lines(id).first().map(|line| (*line).to_owned()))
            }
            _ => stacks.and_then(|stacks| stacks.show(id)),
        };
        text.unwrap_or_else(|| self.missing().to_owned())
    }

    fn type_group(&self, module: Symbol, symbols: &SymbolTable) -> String {
        if [Symbol::NONE, Symbol::SCRIPT, Symbol::WITHOUT_DETAIL].contains(&module) {
            return symbols.or(module, NO_MODULE);
        }
        let class = self.classes.as_ref().and_then(|classes| classes.class_at(module, symbols));
        class.map_or_else(|| NO_TYPE.to_owned(), |class| class.to_string())
    }

    fn module_group(&self, module: Symbol, symbols: &SymbolTable) -> String {
        let path = symbols.or(module, NO_MODULE);
        let joined = self.layers.as_ref().map_or_else(|| path.clone(), |layers| layers.joined(&path));
        match self.depth {
            Some(depth) => upper_levels(&joined, depth).to_owned(),
            None => joined,
        }
    }

    /// Sums `blocks` by group.
    #[must_use]
    pub fn groups(&self, blocks: &[Block], symbols: &SymbolTable) -> FxHashMap<String, Group> {
        // A trace has far fewer owners than blocks. So group by owner first, which is cheap to hash, and
        // compute the name of a group only once per owner.
        let mut owners: FxHashMap<(Owner, bool, i64), (Block, Group)> = FxHashMap::default();
        for block in blocks {
            let more = match self.kind {
                KeyKind::Size => block.bytes,
                KeyKind::Line | KeyKind::Stack => block.stack,
                KeyKind::DType | KeyKind::Shape => (block.dtype.index() << 32 | block.shape.index()) as i64,
                _ => 0,
            };
            let key = (block.owner, block.inferred, more);
            let (_, group) = owners.entry(key).or_insert((*block, Group::default()));
            group.bytes += block.bytes;
            group.blocks += 1;
        }
        let mut groups: FxHashMap<String, Group> = FxHashMap::default();
        let mut modules: FxHashMap<Symbol, i64> = FxHashMap::default();
        for (block, part) in owners.values() {
            let group = groups.entry(self.group_of(block, symbols)).or_default();
            group.bytes += part.bytes;
            group.blocks += part.blocks;
            *modules.entry(block.owner.module).or_default() += part.bytes;
        }
        if self.kind == KeyKind::Module {
            // For the largest layer, count each layer separately. Modules that `--depth` joins into a layer
            // count for it.
            let apart = Key { layers: None, ..self.clone() };
            let mut layers: FxHashMap<String, (Symbol, i64)> = FxHashMap::default();
            for (module, bytes) in modules {
                layers.entry(apart.module_group(module, symbols)).or_insert((module, 0)).1 += bytes;
            }
            for (module, bytes) in layers.into_values() {
                let group = groups.entry(self.module_group(module, symbols)).or_default();
                group.modules += 1;
                group.largest = group.largest.max(bytes);
            }
            add_totals(&mut groups);
        }
        groups
    }
}

/// Returns the repeated layers among the modules of a replay and of `blocks`.
#[must_use]
pub fn layers_of(replay: &Replay, blocks: &[Block]) -> Layers {
    let modules: FxHashSet<Symbol> = blocks.iter().map(|block| block.owner.module).collect();
    replay.classes.layers(modules, &replay.symbols)
}

/// Returns the levels of a module path. For `GPT.h.0`, they are `GPT`, `GPT.h` and `GPT.h.0`.
pub fn module_levels(path: &str) -> impl Iterator<Item = &str> {
    path.match_indices('.').map(|(end, _)| end).chain([path.len()]).map(|end| &path[..end])
}

/// Sets `total` of each group of modules: its own bytes and the bytes of the groups below it.
fn add_totals(groups: &mut FxHashMap<String, Group>) {
    let own: Vec<(String, i64)> = groups.iter().map(|(name, group)| (name.clone(), group.bytes)).collect();
    for (path, bytes) in own {
        for level in module_levels(&path) {
            if let Some(group) = groups.get_mut(level) {
                group.total += bytes;
            }
        }
    }
}

/// Sorts the groups by size, the largest first, and groups of equal size by name.
#[must_use]
pub fn sorted(groups: FxHashMap<String, Group>) -> Vec<(String, Group)> {
    let mut groups: Vec<(String, Group)> = groups.into_iter().collect();
    groups.sort_by(|a, b| b.1.bytes.cmp(&a.1.bytes).then_with(|| a.0.cmp(&b.0)));
    groups
}

/// Returns the name of a category in reports.
#[must_use]
pub fn category(category: Category) -> &'static str {
    if category == Category::None { NO_CATEGORY } else { category.as_str() }
}

/// Returns the name of a block's category in reports, with `*` if the category was inferred.
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
        Category::Workspace if block.inferred => "workspace *",
        Category::CudaGraph if block.inferred => "cuda_graph *",
        other => category(other),
    }
}

/// Returns a name from [`block_category`] without the `*` of an inferred category, and whether it had the
/// `*`.
#[must_use]
pub fn without_mark(name: &str) -> (&str, bool) {
    match name.strip_suffix(" *") {
        Some(name) => (name, true),
        None => (name, false),
    }
}

/// Returns the first `depth` levels of a module path.
fn upper_levels(path: &str, depth: usize) -> &str {
    match path.match_indices('.').nth(depth.max(1) - 1) {
        Some((end, _)) => &path[..end],
        None => path,
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::memory::MemoryKind;

    use super::*;

    #[test]
    fn groups_have_the_name_of_their_key() {
        for (name, kind) in KeyKind::ALL {
            assert_eq!(Key::by(kind).name(), name);
        }
    }

    #[test]
    fn groups_cut_a_module_path_to_a_depth() {
        assert_eq!(upper_levels("GPT.h.0.mlp", 2), "GPT.h");
        assert_eq!(upper_levels("GPT", 2), "GPT");
        assert_eq!(upper_levels("GPT.h", 1), "GPT");
    }

    #[test]
    fn groups_join_repeated_layers_with_their_number_sum_and_largest() {
        let symbols = SymbolTable::default();
        let block = |path: &str, bytes| {
            let (category, step) = (Category::None, 0);
            let [op, phase] = [Symbol::NONE; 2];
            let owner = Owner { op, module: symbols.intern(path), phase, category, step };
            let (kind, device, id, born_ns, requested, rounded) = (MemoryKind::Block, 0, 1, 0, bytes, bytes);
            let (addr, stream, pool, stack, then, pass, died) = (0, 0, 0, 0, None, 0, None);
            let [dtype, shape] = [Symbol::UNKNOWN; 2];
            let (managed, inferred, predates, in_window) = (false, false, false, true);
            Block {
                kind,
                device,
                id,
                born_ns,
                bytes,
                requested,
                rounded,
                addr,
                stream,
                pool,
                stack,
                dtype,
                shape,
                owner,
                then,
                pass,
                died,
                managed,
                inferred,
                predates,
                in_window,
            }
        };
        let blocks =
            [block("N", 1), block("N.h.0", 2), block("N.h.1", 3), block("N.h.1", 4), block("N.h.1.a", 5)];
        let layers = Layers::find(&[("N.h.0", Some("B")), ("N.h.1", Some("B"))]);
        let groups = sorted(Key::MODULE.joining(&layers).groups(&blocks, &symbols));
        let joined = Group { bytes: 9, blocks: 3, total: 14, modules: 2, largest: 7 };
        assert_eq!(groups[0], ("N.h.*".to_owned(), joined));
        assert_eq!(
            groups[2],
            ("N".to_owned(), Group { bytes: 1, blocks: 1, total: 15, modules: 1, largest: 1 })
        );
        assert_eq!(groups.iter().map(|(_, group)| group.bytes).sum::<i64>(), 15);
        let apart = Key { apart: true, ..Key::MODULE }.joining(&layers);
        assert_eq!(apart.groups(&blocks, &symbols).len(), 4);
    }
}
