//! What a trace has that changes may apply to: the called modules, the memory that their calls leave, the types of the
//! models, and tags.

use memtrace_trace::{Api, Category, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use super::calls::MOST_LEVELS;
use super::candidates::{candidates, module_groups};
use super::changes::{Change, takes_module};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::read::together::{RowReader, read_together};
use crate::selection::nearest_names;
use crate::state::model_facts::{self, FactsOfModel, ModelFacts, root_of};
use crate::state::module_layers::{ModuleClasses, RANGE_COLUMNS};
use crate::state::replay::is_gpu;

/// Modules whose calls leave less than this share of the highest total are not worth a checkpoint.
const LEAST_LEFT: f64 = 0.01;
/// The maximum number of open module calls that are tracked.
const MOST_OPEN_CALLS: usize = 10_000;

/// Returns true if a row shows that the trace has tags. Such a row is a tag, or the opening row of a block
/// with a category that only a tag can give. A PyTorch snapshot names parameters at their allocation.
fn tells_roles(row: &Record) -> bool {
    use Category::{Gradient, OptimizerState, Parameter};
    match row.event {
        EventName::Tag => true,
        EventName::Live => matches!(row.category, Gradient | OptimizerState | Parameter),
        EventName::Alloc => row.category == Parameter,
        _ => false,
    }
}

/// The called modules of a trace, the memory that their calls leave, and whether the trace has tags.
#[derive(Clone, Debug, Default)]
pub(crate) struct Contents {
    module_api: Option<Symbol>,
    names: FxHashSet<Symbol>,
    /// True if the trace has tags.
    pub(crate) tags: bool,
    /// For each device: the allocated bytes.
    now: Vec<(i32, i64)>,
    /// The highest sum of `now` so far.
    highest: i64,
    /// The open calls of modules: the thread, the module, and the bytes that were allocated when the call began.
    open: Vec<(i32, Symbol, i64)>,
    /// For each module: the maximum number of bytes that one of its calls left allocated.
    left: FxHashMap<Symbol, i64>,
    classes: ModuleClasses,
    facts: ModelFacts,
    /// True if a model that is trained has 16 bits or fewer in most of its parameters. If no called model is
    /// trained, any model counts.
    pub(super) is_half: bool,
    /// The called modules of models with 16 bits or fewer.
    pub(super) half_modules: FxHashSet<Symbol>,
    /// True for a PyTorch snapshot.
    is_snapshot: bool,
}

impl Contents {
    pub(crate) fn new(trace: &TraceFile) -> Contents {
        Contents { is_snapshot: trace.meta.is_snapshot(), ..Contents::default() }
    }

    pub(super) fn module_api(&mut self, symbols: &SymbolTable) -> Symbol {
        *self.module_api.get_or_insert_with(|| symbols.intern(Api::Module.as_str()))
    }

    /// Processes a row. Returns true if the row begins the first call of a module.
    pub(crate) fn feed(&mut self, row: &Record, symbols: &SymbolTable) -> bool {
        self.tags |= tells_roles(row);
        if self.facts.feed(row, symbols) {
            self.find_half_modules(symbols);
        }
        match row.event {
            EventName::Alloc | EventName::Free | EventName::Live if is_gpu(row.device) => {
                match self.now.iter_mut().find(|(device, _)| *device == row.device) {
                    Some((_, bytes)) => *bytes = row.allocated_bytes,
                    None => self.now.push((row.device, row.allocated_bytes)),
                }
                self.highest = self.highest.max(self.allocated());
                false
            }
            EventName::RangeBegin if row.api == self.module_api(symbols) => {
                // Limit the number of open calls, because a hostile trace may never close them.
                if self.open.len() < MOST_OPEN_CALLS {
                    self.open.push((row.tid, row.name, self.allocated()));
                }
                self.classes.feed(row, symbols);
                let is_new = self.names.insert(row.name);
                if is_new && self.facts.has_half() {
                    self.find_half_modules(symbols);
                }
                is_new
            }
            EventName::RangeEnd if row.api == self.module_api(symbols) => {
                let is_same = |(tid, name, _): &(i32, Symbol, i64)| (*tid, *name) == (row.tid, row.name);
                if let Some(at) = self.open.iter().rposition(is_same) {
                    let left = self.allocated() - self.open[at].2;
                    // A call that raised an exception may have left inner calls open, so close these, too.
                    let inner = self.open.split_off(at);
                    self.open.extend(inner.into_iter().filter(|(tid, ..)| *tid != row.tid));
                    let most = self.left.entry(row.name).or_default();
                    *most = left.max(*most);
                }
                false
            }
            _ => false,
        }
    }

    fn allocated(&self) -> i64 {
        self.now.iter().fold(0, |sum: i64, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// Returns the changes to try for this trace.
    pub(crate) fn candidates(&self, symbols: &SymbolTable) -> Vec<Change> {
        let paths: Vec<_> = self.names.iter().map(|name| symbols.get(*name)).collect();
        let mut changes =
            candidates(&self.worth_checkpoints(&module_groups(paths.iter().map(|path| &**path)), symbols));
        changes.retain(|change| self.tags || !change.needs_tags());
        changes.retain(|change| !self.is_snapshot || !change.needs_calls());
        changes.retain(|change| !matches!(change, Change::Batch(1, _)) || !self.is_batch_of_one(symbols));
        changes
    }

    /// Returns the paths of the called roots.
    fn roots<'s>(&'s self, symbols: &'s SymbolTable) -> impl Iterator<Item = std::sync::Arc<str>> + 's {
        self.names.iter().map(|name| symbols.get(*name)).filter(|path| !path.contains('.'))
    }

    fn find_half_modules(&mut self, symbols: &SymbolTable) {
        let is_half = |path: &str| self.facts.facts_at(path).is_half;
        self.half_modules = self.names.iter().filter(|name| is_half(&symbols.get(**name))).copied().collect();
        let roots: Vec<_> = self.roots(symbols).map(|root| self.facts.facts_at(&root)).collect();
        let is_trained = |facts: &FactsOfModel| !facts.evaluates && facts.trained != Some(0);
        let has_trained = roots.iter().any(is_trained);
        // A model that runs out of memory while it is moved to the GPU was never called.
        self.is_half = if roots.is_empty() { self.facts.has_half() } else { false };
        self.is_half |= roots.iter().any(|facts| facts.is_half && (!has_trained || is_trained(facts)));
    }

    /// Returns true if a batch has one sample: the batch of a root's open call, or else the last batch of each
    /// root.
    fn is_batch_of_one(&self, symbols: &SymbolTable) -> bool {
        let is_one = |path: &str| self.facts.facts_at(path).is_batch_of_one;
        if let Some((_, name, _)) = self.open.first() {
            return is_one(root_of(&symbols.get(*name)));
        }
        let mut roots = self.roots(symbols).peekable();
        roots.peek().is_some() && roots.all(|root| is_one(&root))
    }

    /// Returns the groups of modules for which a checkpoint is worthwhile, the group with the most memory
    /// first: their calls leave at least [`LEAST_LEFT`] of the highest total allocated.
    fn worth_checkpoints(&self, groups: &[String], symbols: &SymbolTable) -> Vec<String> {
        let left: Vec<_> = self.left.iter().map(|(name, bytes)| (symbols.get(*name), *bytes)).collect();
        let is_open = |root: &str| self.open.iter().any(|(_, name, _)| *symbols.get(*name) == *root);
        // A forward without a graph leaves only its results, whatever its modules left until it ended. If a
        // call of the root is open, it may be the first one with a graph.
        let most = |root: &str| {
            let ended = left.iter().find(|(path, _)| **path == *root).filter(|_| !is_open(root));
            ended.map_or(i64::MAX, |(_, bytes)| *bytes)
        };
        let of_group = |group: &String| -> i64 {
            let modules = left.iter().filter(|(path, _)| takes_module(group, path));
            let mut of_root: FxHashMap<&str, i64> = FxHashMap::default();
            for (path, bytes) in modules {
                let sum = of_root.entry(root_of(path)).or_default();
                *sum = sum.saturating_add(*bytes);
            }
            of_root.into_iter().fold(0, |sum: i64, (root, bytes)| sum.saturating_add(bytes.min(most(root))))
        };
        let mut worth: Vec<(i64, &String)> = groups.iter().map(|group| (of_group(group), group)).collect();
        worth.retain(|(bytes, group)| {
            *bytes as f64 >= self.highest as f64 * LEAST_LEFT && !self.is_sequence_of_ops(group, symbols)
        });
        worth.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        worth.into_iter().map(|(_, group)| group.clone()).collect()
    }

    /// Returns true if the modules of a group call no other modules and have several classes, such as a
    /// convolution, a norm and a ReLU. A checkpoint of each would save little: each keeps little besides its
    /// input, and a checkpoint keeps the input, too.
    fn is_sequence_of_ops(&self, group: &str, symbols: &SymbolTable) -> bool {
        let mut classes = FxHashSet::default();
        for name in &self.names {
            let path = symbols.get(*name);
            if takes_module(group, &path) {
                let Some(class) = self.classes.class_at(*name, symbols) else { return false };
                classes.insert(class);
            }
            let ends = path.match_indices('.').map(|(end, _)| end).take(MOST_LEVELS);
            if ends.into_iter().any(|end| takes_module(group, &path[..end])) {
                return false;
            }
        }
        classes.len() > 1
    }

    /// Returns the patterns of the modules that are one unit each when the model is sharded, separated by
    /// commas.
    fn units(&self, symbols: &SymbolTable) -> String {
        let paths: Vec<_> = self.names.iter().map(|name| symbols.get(*name)).collect();
        module_groups(paths.iter().map(|path| &**path)).join(",")
    }
}

/// Returns the changes to try for `trace`, and whether the trace has tags.
///
/// # Errors
/// If the trace cannot be read.
pub fn candidates_for(trace: &TraceFile, options: &Options) -> Result<(Vec<Change>, bool)> {
    let (contents, symbols) = contents(trace, options)?;
    Ok((contents.candidates(&symbols), contents.tags))
}

/// Returns the changes, with the units of [`Change::Shard`] filled in from `trace`.
///
/// # Errors
/// If the trace cannot be read.
pub fn with_units(trace: &TraceFile, changes: &[Change], options: &Options) -> Result<Vec<Change>> {
    if !changes.iter().any(|change| matches!(change, Change::Shard { .. })) {
        return Ok(changes.to_vec());
    }
    let (contents, symbols) = contents(trace, options)?;
    let filled = |change: &Change| match change {
        Change::Shard { ranks, .. } => Change::Shard { ranks: *ranks, units: contents.units(&symbols) },
        other => other.clone(),
    };
    Ok(changes.iter().map(filled).collect())
}

/// The columns that [`Contents::feed`] needs of a block (`TOTAL`) and of a module call (`CALL`).
const TOTAL: Columns = Columns::of(&["device", "allocated_bytes"]);
const CALL: Columns = RANGE_COLUMNS.and(Columns::of(&["tid"]));

fn contents(trace: &TraceFile, options: &Options) -> Result<(Contents, SymbolTable)> {
    let symbols = SymbolTable::default();
    let mut contents = Contents::new(trace);
    read_together(trace, options, &symbols, &mut [&mut contents])?;
    Ok((contents, symbols))
}

impl RowReader for Contents {
    fn wanted(&self) -> Wanted {
        Wanted::all_events(Columns::of(&["event"]))
            .plus(EventName::Alloc, TOTAL.and(Columns::of(&["category"])))
            .plus(EventName::Free, TOTAL)
            .plus(EventName::Live, TOTAL.and(Columns::of(&["category"])))
            .plus(EventName::RangeBegin, CALL)
            .plus(EventName::RangeEnd, CALL)
            .plus(EventName::Mark, model_facts::COLUMNS)
    }

    fn feed(&mut self, row: &Record, symbols: &SymbolTable) {
        Contents::feed(self, row, symbols);
    }
}

/// Returns an error if the trace lacks the data for a change or has nothing that the change applies to.
pub(super) fn check<'a>(
    trace: &TraceFile,
    contents: &Contents,
    changes: impl Iterator<Item = &'a Change>,
    symbols: &SymbolTable,
) -> Result<()> {
    let file = trace.path.display();
    for change in changes {
        if contents.is_snapshot && change.needs_calls() {
            return Err(Error::usage(format!(
                "{}: {file} is a PyTorch snapshot, which has no calls of ops and modules and no types; memtrace run records them",
                change.option()
            )));
        }
        if contents.is_snapshot && change.needs_tags() && !contents.tags {
            return Err(Error::usage(format!(
                "{}: the stacks of {file} show no parameters; record from the start of the program with \
                 context=\"all\", or trace the program with memtrace run",
                change.option()
            )));
        }
        if change.needs_tags() && !contents.tags {
            return Err(Error::usage(format!(
                "{}: {file} has no tags, so parameters, gradients and optimizer state are not known in it; trace the \
                 program with its modules (MEMTRACE_MODULES=1, the default, in a Python with PyTorch)",
                change.option()
            )));
        }
        let (Change::Checkpoint(patterns) | Change::Shard { units: patterns, .. }) = change else { continue };
        if contents.names.is_empty() {
            return Err(Error::usage(format!(
                "{}: {file} has no calls of modules; trace the program with MEMTRACE_MODULES=1, the default",
                change.option()
            )));
        }
        let paths: Vec<_> = contents.names.iter().map(|name| symbols.get(*name)).collect();
        for pattern in patterns.split(',').filter(|_| matches!(change, Change::Checkpoint(_))) {
            if !paths.iter().any(|path| takes_module(pattern, path)) {
                let near = nearest_names(paths.iter().map(|path| &**path), pattern);
                return Err(Error::usage(format!(
                    "{}: no module of {file} matches {pattern}; the nearest are {near}",
                    change.option()
                )));
            }
        }
    }
    Ok(())
}
