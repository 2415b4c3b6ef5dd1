//! Reads a trace and predicts its peaks under changes.

use std::ops::ControlFlow;

use memtrace_trace::counts::count;
use memtrace_trace::rounding::Rounding;
use memtrace_trace::{Api, Category, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use super::autocast::Autocast;
use super::calls::MOST_LEVELS;
use super::candidates::{candidates, module_groups};
use super::changes::{Change, takes_module};
use super::curve::Curve;
use super::requests::ChangedRequests;
use super::sizes::{SizeRules, Traits};
use super::step::{Life, Step, StepRecorder, TypeSymbols, with_columns};
use super::{autocast, casts, checkpoint, chunk_loss, in_backward, optimizer, shard};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::requests::Requests;
use crate::selection::nearest_names;
use crate::state::categories::Phases;
use crate::state::device::Moment;
use crate::state::model_facts::{self, FactsOfModel, ModelFacts, root_of};
use crate::state::module_layers::{ModuleClasses, RANGE_COLUMNS};
use crate::state::replay::{self, Metric, Replay, has_current_step, is_gpu};
use crate::state::replay_trace::{Replayed, replay_rows};
use crate::state::series::{Series, TimeGrid};

/// The maximum number of rows of one step, over all devices, that are kept at once: about 400 MB. Outside the
/// window, the maximum is half of this number, so that the other half is always left for rows in the window.
pub const MOST_ROWS: usize = 2_000_000;

/// A change that saves less than this share of the peak is not listed.
const LEAST_SAVED: f64 = 0.001;
/// Modules whose calls leave less than this share of the highest total are not worth a checkpoint.
const LEAST_LEFT: f64 = 0.01;
/// The maximum number of open module calls that are tracked.
const MOST_OPEN_CALLS: usize = 10_000;

/// The result of one list of changes on one device.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The peak with the changes.
    pub peak: Moment,
    /// The number of items that each change found, in the order of the changes: calls of modules, gradients,
    /// losses or blocks.
    pub found: Vec<u64>,
    /// The op calls that checkpointed modules run again.
    pub again: OpsAgain,
}

/// The op calls that checkpointed modules run again in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpsAgain {
    /// The number of op calls in the forward of these modules.
    pub ops: u64,
    /// The number of op calls in the whole forward and backward of that step.
    pub of: u64,
    /// True if the step has a complete backward and is not the first step, in which programs set things up.
    pub is_steady: bool,
    /// True if the step has a backward and did not run out of memory.
    pub has_backward: bool,
    /// True if one of these modules runs a batch norm.
    pub has_batch_norm: bool,
}

/// The peaks of one device without and with changes.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// The CUDA ordinal.
    pub device: i32,
    /// The peak of the run.
    pub before: Moment,
    /// For each list of changes: the outcome.
    pub outcomes: Vec<Outcome>,
    /// For each list of changes: the total over time. Empty unless the caller asked for it.
    pub curves: Vec<Series>,
    /// The requests under the first list, if the caller asked for them.
    requests: Option<ChangedRequests>,
    /// True if the run already computes in 16 bits, so that a change to 16 bits saves nothing.
    is_half: bool,
    /// True if the run uses autocast.
    has_autocast: bool,
    /// A step whose changed blocks are not known completely: the step is partly in the window, and its rows
    /// outside the window were not kept.
    pub cut_step: Option<i64>,
}

impl Prediction {
    /// Returns the lists of changes that save memory, the largest saving first, each as its index, its
    /// outcome and the saved bytes. Savings below [`LEAST_SAVED`] of the peak are left out.
    ///
    /// `changes` yields the only change of each list, in the order of the lists. If it ends early, the
    /// remaining lists are left out. A change to 16 bits is left out, too, if the run already computes in 16
    /// bits.
    pub fn ranked<'c>(&self, changes: impl Iterator<Item = &'c Change>) -> Vec<(usize, &Outcome, i64)> {
        let least = (self.before.bytes as f64 * LEAST_SAVED) as i64;
        let saved = |outcome: &Outcome| self.before.bytes.wrapping_sub(outcome.peak.bytes);
        let all = self.outcomes.iter().zip(changes).enumerate();
        let mut ranked: Vec<(usize, &Outcome, i64)> = all
            .filter(|(_, (_, change))| !self.has_already(change))
            .map(|(index, (outcome, _))| (index, outcome, saved(outcome)))
            .filter(|(_, _, saved)| *saved > least)
            .collect();
        ranked.sort_by_key(|(_, _, saved)| std::cmp::Reverse(*saved));
        ranked
    }

    /// Returns true for a change to 16 bits of a run that computes in 16 bits already.
    #[must_use]
    pub fn has_already(&self, change: &Change) -> bool {
        self.is_half && change.is_type() || self.has_autocast && *change == Change::Autocast
    }

    /// Returns the note about [`Prediction::cut_step`].
    #[must_use]
    pub fn cut_note(&self) -> Option<String> {
        let most = count(MOST_ROWS as u64 / 2);
        self.cut_step.map(|step| {
            format!(
                "step {step} has more than {most} rows outside the chosen part, which were not kept: \
                 --checkpoint, --chunk-loss and --optimizer in-backward change only the rest of it"
            )
        })
    }
}

/// The state of one device while its rows are read.
struct DevicePrediction {
    recorder: StepRecorder,
    traits: Traits,
    /// For each list of changes: whether a module is inside a checkpointed module, for the modules looked up
    /// so far.
    inside: Vec<FxHashMap<Symbol, bool>>,
    before: Moment,
    outcomes: Vec<Outcome>,
    /// For each list of changes: the total over time. Empty if no curve is wanted.
    curves: Vec<Series>,
    /// The requests under the first list, if they are wanted.
    requests: Option<ChangedRequests>,
    is_half: bool,
    has_autocast: bool,
    /// True if earlier rows of the current step were not kept.
    is_cut: bool,
    cut_step: Option<i64>,
}

/// The inputs of a prediction that are the same for every step.
struct Judge<'a> {
    lists: &'a [Vec<Change>],
    rounding: Rounding,
    phases: Phases,
    /// True if the types of the parameters show that the run computes in 16 bits.
    is_half: bool,
    /// The modules of models with 16 bits or fewer.
    half_modules: &'a FxHashSet<Symbol>,
}

impl<'a> Judge<'a> {
    fn new(lists: &'a [Vec<Change>], rounding: Rounding, phases: Phases, contents: &'a Contents) -> Self {
        Judge { lists, rounding, phases, is_half: contents.is_half, half_modules: &contents.half_modules }
    }
}

/// The modules that the changes of a list apply to.
#[derive(Clone, Debug, Default)]
struct ChosenModules {
    checkpointed: FxHashSet<Symbol>,
    /// The modules that [`Change::Shard`] gathers as one unit each.
    units: FxHashSet<Symbol>,
}

impl ChosenModules {
    fn add(&mut self, list: &[Change], module: Symbol, path: &str) {
        for change in list {
            let (patterns, chosen) = match change {
                Change::Checkpoint(patterns) => (patterns, &mut self.checkpointed),
                Change::Shard { units, .. } => (units, &mut self.units),
                _ => continue,
            };
            if takes_module(patterns, path) {
                chosen.insert(module);
            }
        }
    }
}

/// Processes the rows of a replay, and predicts the peak of allocated memory of each device under each list
/// of changes.
pub(crate) struct Predictor<'a> {
    lists: &'a [Vec<Change>],
    rounding: Rounding,
    /// The device that the options select; `None` for all devices.
    only: Option<i32>,
    most_rows: usize,
    /// For each device: the time grid on which the curve under each list is wanted.
    grids: Vec<(i32, TimeGrid)>,
    /// True if the requests of the first list are wanted.
    makes_requests: bool,
    devices: Vec<DevicePrediction>,
    contents: Contents,
    /// For each list: the modules to which its changes apply.
    modules: Vec<ChosenModules>,
    /// A step in the window that has too many rows to keep. If there is such a step, nothing is predicted.
    too_long: Option<i64>,
}

impl<'a> Predictor<'a> {
    /// Creates a predictor for `trace`, which keeps at most `most_rows` rows of a step.
    pub(crate) fn new(
        trace: &TraceFile,
        lists: &'a [Vec<Change>],
        options: &Options,
        most_rows: usize,
    ) -> Predictor<'a> {
        Predictor {
            lists,
            rounding: trace.meta.allocator.rounding(),
            only: options.device,
            most_rows,
            grids: Vec::new(),
            makes_requests: false,
            devices: Vec::new(),
            contents: Contents::new(trace),
            modules: vec![ChosenModules::default(); lists.len()],
            too_long: None,
        }
    }

    /// Also computes [`Prediction::curves`] of a device, on `grid`.
    pub(crate) fn with_curves(mut self, device: i32, grid: TimeGrid) -> Predictor<'a> {
        self.grids.push((device, grid));
        self
    }

    /// Also collects the requests under the first list, for [`Prediction::requests`].
    fn with_requests(mut self) -> Predictor<'a> {
        self.makes_requests = true;
        self
    }

    /// Processes a row with the columns of [`with_columns`], after `replay` has processed it.
    pub(crate) fn feed(&mut self, row: &Record, replay: &Replay) {
        if self.too_long.is_some() {
            return;
        }
        let symbols = &replay.symbols;
        if self.contents.feed(row, symbols) {
            let name = symbols.get(row.name);
            for (list, found) in self.lists.iter().zip(&mut self.modules) {
                found.add(list, row.name, &name);
            }
        }
        let api = self.contents.module_api(symbols);
        let judge = Judge::new(self.lists, self.rounding, replay.phases, &self.contents);
        if has_current_step(row.event) {
            for device in &mut self.devices {
                if device.recorder.begins(row.step) {
                    device.end_step(&judge, &self.modules, symbols, false);
                }
            }
        }
        let is_wanted = is_gpu(row.device)
            && self.only.is_none_or(|only| only == row.device)
            && matches!(row.event, EventName::Alloc | EventName::Live);
        if is_wanted && !self.devices.iter().any(|device| device.recorder.device() == row.device) {
            let grid = self.grids.iter().find(|(device, _)| *device == row.device).map(|(_, grid)| *grid);
            let known = (api, TypeSymbols::new(symbols));
            let mut device = DevicePrediction::new(row, replay.phases, known, self.lists, grid);
            device.requests = self.makes_requests.then(ChangedRequests::default);
            self.devices.push(device);
        }
        for device in &mut self.devices {
            device.recorder.feed(row, replay.in_window());
        }
        let most = if replay.in_window() { self.most_rows } else { self.most_rows / 2 };
        if self.devices.iter().map(|device| device.recorder.rows()).sum::<usize>() > most {
            if replay.in_window() {
                self.too_long = Some(replay.step);
                self.devices.clear();
                return;
            }
            for device in &mut self.devices {
                device.end_step(&judge, &self.modules, symbols, true);
            }
        }
    }

    /// Returns the predictions after the last row.
    ///
    /// # Errors
    /// If the trace lacks the data for a change, or has a step with too many rows in the window.
    pub(crate) fn finish(
        mut self,
        trace: &TraceFile,
        replayed: &Replayed,
        options: &Options,
    ) -> Result<Vec<Prediction>> {
        if let Some(step) = self.too_long {
            return Err(Error::usage(format!(
                "step {step} of {} has more than {} rows, the most that a prediction keeps at once: choose a part of it by --window{}",
                trace.path.display(),
                count(self.most_rows as u64),
                if options.window.from_step == i64::MIN { " or --step" } else { "" },
            )));
        }
        let symbols = &replayed.symbols;
        let judge = Judge::new(self.lists, self.rounding, replayed.replay.phases, &self.contents);
        for device in &mut self.devices {
            device.end_step(&judge, &self.modules, symbols, false);
        }
        check(trace, &self.contents, self.lists.iter().flatten(), symbols)?;
        let prediction = |device: DevicePrediction| Prediction {
            device: device.recorder.device(),
            before: device.before,
            outcomes: device.outcomes,
            curves: device.curves.into_iter().map(Series::finish).collect(),
            requests: device.requests,
            is_half: device.is_half,
            has_autocast: device.has_autocast,
            cut_step: device.cut_step,
        };
        Ok(self.devices.into_iter().map(prediction).collect())
    }
}

/// Predicts the peak of allocated memory of each device of `trace` under each list of changes.
///
/// # Errors
/// If the trace cannot be read, lacks the data for a change, has nothing that a change applies to, or has a
/// step with more than [`MOST_ROWS`] rows in the window.
pub fn predict(
    trace: &TraceFile,
    lists: &[Vec<Change>],
    options: &Options,
) -> Result<(Replayed, Vec<Prediction>)> {
    let mut predictor = Predictor::new(trace, lists, options, MOST_ROWS);
    let wanted = with_columns(replay::COLUMNS);
    let replayed = replay_rows(trace, wanted, options, Metric::Allocated, |row, replay| {
        predictor.feed(row, replay);
    })?;
    let predictions = predictor.finish(trace, &replayed, options)?;
    Ok((replayed, predictions))
}

/// Returns the requests that the program of `trace` would make under `changes`. `base` has its requests
/// without changes.
///
/// # Errors
/// As for [`predict`].
pub fn changed_requests(
    trace: &TraceFile,
    changes: &[Change],
    base: &Requests,
    options: &Options,
) -> Result<Requests> {
    let lists = [changes.to_vec()];
    let mut predictor = Predictor::new(trace, &lists, options, MOST_ROWS).with_requests();
    let wanted = with_columns(replay::COLUMNS);
    let replayed = replay_rows(trace, wanted, options, Metric::Allocated, |row, replay| {
        predictor.feed(row, replay);
    })?;
    let predictions = predictor.finish(trace, &replayed, options)?;
    let made = predictions.into_iter().find(|each| each.device == base.device).and_then(|each| each.requests);
    Ok(made.unwrap_or_default().finish(base))
}

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
    now: FxHashMap<i32, i64>,
    /// The highest sum of `now` so far.
    highest: i64,
    /// The open calls of modules, each with the bytes that were allocated when it began.
    open: Vec<(Symbol, i64)>,
    /// For each module: the maximum number of bytes that one of its calls left allocated.
    left: FxHashMap<Symbol, i64>,
    classes: ModuleClasses,
    facts: ModelFacts,
    /// True if a model that is trained has 16 bits or fewer in most of its parameters. If no called model is
    /// trained, any model counts.
    is_half: bool,
    /// The called modules of models with 16 bits or fewer.
    half_modules: FxHashSet<Symbol>,
    /// True for a PyTorch snapshot.
    is_snapshot: bool,
}

impl Contents {
    pub(crate) fn new(trace: &TraceFile) -> Contents {
        Contents { is_snapshot: trace.meta.is_snapshot(), ..Contents::default() }
    }

    fn module_api(&mut self, symbols: &SymbolTable) -> Symbol {
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
                self.now.insert(row.device, row.allocated_bytes);
                self.highest = self.highest.max(self.allocated());
                false
            }
            EventName::RangeBegin if row.api == self.module_api(symbols) => {
                // Limit the number of open calls, because a hostile trace may never close them.
                if self.open.len() < MOST_OPEN_CALLS {
                    self.open.push((row.name, self.allocated()));
                }
                self.classes.feed(row, symbols);
                let is_new = self.names.insert(row.name);
                if is_new && self.facts.has_half() {
                    self.find_half_modules(symbols);
                }
                is_new
            }
            EventName::RangeEnd if row.api == self.module_api(symbols) => {
                if let Some(at) = self.open.iter().rposition(|(name, _)| *name == row.name) {
                    let left = self.allocated() - self.open[at].1;
                    self.open.truncate(at);
                    let most = self.left.entry(row.name).or_default();
                    *most = left.max(*most);
                }
                false
            }
            _ => false,
        }
    }

    fn allocated(&self) -> i64 {
        self.now.values().fold(0, |sum: i64, bytes| sum.saturating_add(*bytes))
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
        let is_half = |path: &str| self.facts.of(path).is_half;
        self.half_modules = self.names.iter().filter(|name| is_half(&symbols.get(**name))).copied().collect();
        let roots: Vec<_> = self.roots(symbols).map(|root| self.facts.of(&root)).collect();
        let is_trained = |facts: &FactsOfModel| !facts.evaluates && facts.trained != Some(0);
        let has_trained = roots.iter().any(is_trained);
        // A model that runs out of memory while it is moved to the GPU was never called.
        self.is_half = if roots.is_empty() { self.facts.has_half() } else { false };
        self.is_half |= roots.iter().any(|facts| facts.is_half && (!has_trained || is_trained(facts)));
    }

    /// Returns true if a batch has one sample: the batch of a root's open call, or else the last batch of each
    /// root.
    fn is_batch_of_one(&self, symbols: &SymbolTable) -> bool {
        let is_one = |path: &str| self.facts.of(path).is_batch_of_one;
        if let Some((name, _)) = self.open.first() {
            return is_one(root_of(&symbols.get(*name)));
        }
        let mut roots = self.roots(symbols).peekable();
        roots.peek().is_some() && roots.all(|root| is_one(&root))
    }

    /// Returns the groups of modules for which a checkpoint is worthwhile, the group with the most memory
    /// first: their calls leave at least [`LEAST_LEFT`] of the highest total allocated.
    fn worth_checkpoints(&self, groups: &[String], symbols: &SymbolTable) -> Vec<String> {
        let left: Vec<_> = self.left.iter().map(|(name, bytes)| (symbols.get(*name), *bytes)).collect();
        let is_open = |root: &str| self.open.iter().any(|(name, _)| *symbols.get(*name) == *root);
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
                let Some(class) = self.classes.of(*name, symbols) else { return false };
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
const CALL: Columns = RANGE_COLUMNS;

fn contents(trace: &TraceFile, options: &Options) -> Result<(Contents, SymbolTable)> {
    let symbols = SymbolTable::default();
    let mut contents = Contents::new(trace);
    let wanted = Wanted::all_events(Columns::of(&["event"]))
        .plus(EventName::Alloc, TOTAL.and(Columns::of(&["category"])))
        .plus(EventName::Free, TOTAL)
        .plus(EventName::Live, TOTAL.and(Columns::of(&["category"])))
        .plus(EventName::RangeBegin, CALL)
        .plus(EventName::RangeEnd, CALL)
        .plus(EventName::Mark, model_facts::COLUMNS);
    trace.read(wanted, options.lenient, &symbols, |row| {
        contents.feed(row, &symbols);
        ControlFlow::Continue(())
    })?;
    Ok((contents, symbols))
}

/// Returns an error if the trace lacks the data for a change or has nothing that the change applies to.
fn check<'a>(
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

impl DevicePrediction {
    /// Creates the state for the device of `row`, the device's first row.
    fn new(
        row: &Record,
        phases: Phases,
        (module_api, types): (Symbol, TypeSymbols),
        lists: &[Vec<Change>],
        grid: Option<TimeGrid>,
    ) -> DevicePrediction {
        let mut recorder = StepRecorder::new(row.device, phases, module_api, types);
        recorder.begins(row.step);
        let outcome = |list: &Vec<Change>| Outcome { found: vec![0; list.len()], ..Outcome::default() };
        let outcomes = lists.iter().map(outcome).collect();
        let curves = grid.map_or(Vec::new(), |grid| vec![Series::new(grid); lists.len()]);
        DevicePrediction {
            recorder,
            traits: Traits::default(),
            inside: vec![FxHashMap::default(); lists.len()],
            before: Moment::default(),
            outcomes,
            curves,
            requests: None,
            is_half: false,
            has_autocast: false,
            is_cut: false,
            cut_step: None,
        }
    }

    /// Ends the recorded step and predicts its peaks. `is_cut` is true if the step goes on, but its rows so
    /// far are dropped.
    fn end_step(
        &mut self,
        judge: &Judge<'_>,
        modules: &[ChosenModules],
        symbols: &SymbolTable,
        is_cut: bool,
    ) {
        let step = self.recorder.step();
        if let (true, Some(last)) = (step.is_wanted() && (is_cut || self.is_cut), step.allocations.last()) {
            self.cut_step = self.cut_step.or(Some(last.owner.step));
        }
        self.is_cut = is_cut;
        self.judge(judge, modules, symbols);
        self.recorder.next();
    }

    /// Predicts the peaks of the step that ended, and raises the peaks so far to them.
    fn judge(&mut self, judge: &Judge<'_>, modules: &[ChosenModules], symbols: &SymbolTable) {
        let Judge { lists, rounding, phases, is_half, half_modules } = judge;
        let step = self.recorder.step();
        if !step.is_wanted() {
            return;
        }
        let mut rules = SizeRules::new(step, symbols, *phases, *rounding, &mut self.traits);
        rules.half_modules = Some(*half_modules);
        let has_types = lists.iter().flatten().any(Change::is_type);
        let mut autocast =
            if has_types { autocast::find(step, &rules, symbols, phases) } else { Autocast::default() };
        // Where the trace has the types, they say which blocks are float32 under autocast.
        let casts = has_types && (autocast.is_on || autocast::casts_up(step, &rules, phases));
        self.has_autocast |= casts;
        self.is_half |= has_types && *is_half;
        if self.is_half || self.has_autocast {
            autocast = Autocast::default();
        }
        rules.is_half = self.is_half || casts && !step.has_types();
        rules.halved.clone_from(&autocast.halved);
        let unchanged: Vec<i64> = step.lives.iter().map(|life| life.bytes).collect();
        let unchanged = Curve::new(step, unchanged);
        raise(&mut self.before, unchanged.peak(&unchanged.differences()));
        let mut series = self.curves.iter_mut();
        let mut made = None;
        let places = modules.iter().zip(&mut self.inside);
        for ((changes, (modules, inside)), outcome) in lists.iter().zip(places).zip(&mut self.outcomes) {
            let sizes = rules.sizes(step, changes, symbols);
            let mut curve = Curve::new(step, sizes);
            for (at, bytes) in rules.failed(step, changes, symbols) {
                curve.resize_failed(at, bytes);
            }
            for (change, found) in changes.iter().zip(&mut outcome.found) {
                *found += match change {
                    Change::Checkpoint(_) => {
                        checkpoint::apply(&mut curve, step, &modules.checkpointed, symbols, phases)
                    }
                    Change::StepInBackward => in_backward::apply(&mut curve, step, changes, &rules, phases),
                    Change::ChunkLoss(parts) => {
                        chunk_loss::apply(&mut curve, step, *parts, &rules, symbols, phases)
                    }
                    Change::Optimizer(optimizer) => {
                        optimizer::apply(&mut curve, step, *optimizer, changes, phases)
                    }
                    Change::Autocast => autocast.apply(&mut curve),
                    Change::OffloadOptimizer | Change::ShardOptimizer(_) => optimizer::states(step),
                    Change::Shard { ranks, .. } => {
                        let sharding =
                            shard::Sharding { ranks: *ranks, changes, rules: &rules, symbols, phases };
                        sharding.apply(&mut curve, step, &modules.units)
                    }
                    Change::Bfloat16 | Change::Batch(..) | Change::Without(_) => {
                        if *change == Change::Bfloat16 && !rules.is_half {
                            casts::apply(&mut curve, step, &rules, symbols);
                        }
                        let changed = |(life, size): (&Life, &i64)| life.bytes != *size;
                        step.lives.iter().zip(&curve.sizes).map(changed).filter(|is| *is).count() as u64
                    }
                };
            }
            let differences = curve.differences();
            raise(&mut outcome.peak, curve.peak(&differences));
            if let Some(mut requests) = self.requests.take() {
                requests.add(step, &curve);
                made = Some(requests);
            }
            if let Some(series) = series.next() {
                curve.follow(&differences, |ts_ns, bytes| series.set(ts_ns, bytes));
            }
            if let [Change::Checkpoint(patterns)] = &changes[..] {
                let found = ops_again(step, patterns, inside, symbols, phases);
                // Keep the counts of the best step or, of equally good steps, of the last one. The first step
                // also sets things up, and a step that ran out of memory has an incomplete backward, so both
                // are worse.
                let rank = |again: &OpsAgain| (again.ops > 0, again.has_backward, again.is_steady);
                if rank(&found) >= rank(&outcome.again) {
                    outcome.again = found;
                }
            }
        }
        self.requests = made;
    }
}

/// Counts the op calls of a step: those in the forward of the modules that match `patterns`, and all in the
/// forward and backward. `inside` caches whether a module is inside one of these modules.
fn ops_again(
    step: &Step,
    patterns: &str,
    inside: &mut FxHashMap<Symbol, bool>,
    symbols: &SymbolTable,
    phases: &Phases,
) -> OpsAgain {
    let mut is_inside = |module: Symbol| {
        *inside.entry(module).or_insert_with(|| {
            let path = symbols.get(module);
            let ends = path.match_indices('.').map(|(end, _)| end).take(MOST_LEVELS).chain([path.len()]);
            ends.into_iter().any(|end| takes_module(patterns, &path[..end]))
        })
    };
    let batch_norm = |name: Symbol| symbols.get(name).contains("batch_norm");
    let of = |phase| step.ops.iter().filter(move |op| op.phase == phase);
    let (mut ops, mut has_batch_norm) = (0, false);
    for op in of(phases.forward).filter(|op| is_inside(op.module)) {
        ops += 1;
        has_batch_norm |= batch_norm(op.name);
    }
    let backward = of(phases.backward).count();
    let has_backward = backward > 0 && step.oom().is_none();
    let is_first = step.allocations.first().is_none_or(|first| first.owner.step <= 0);
    OpsAgain {
        ops,
        of: (of(phases.forward).count() + backward) as u64,
        is_steady: has_backward && !is_first,
        has_backward,
        has_batch_norm,
    }
}

fn raise(peak: &mut Moment, found: Option<Moment>) {
    if let Some(found) = found
        && found.bytes > peak.bytes
    {
        *peak = found;
    }
}
