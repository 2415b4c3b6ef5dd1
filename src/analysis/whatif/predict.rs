//! The reading of a trace for predictions.

use std::cell::Cell;
use std::ops::ControlFlow;

use memtrace_trace::rounding::Rounding;
use memtrace_trace::{Api, Category, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use super::changes::{Change, takes_module};
use super::checkpoint::MOST_LEVELS;
use super::curve::Curve;
use super::sizes::SizeRules;
use super::step::{COLUMNS, Life, Step, StepRecorder};
use super::{checkpoint, chunk_loss, in_backward, optimizer};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::numbers::count;
use crate::selection::nearest_names;
use crate::state::categories::{KnownCategories, Phases};
use crate::state::device::Moment;
use crate::state::replay::{HOST, Metric, has_current_step};
use crate::state::replay_trace::{Replayed, replay_until};

/// The most rows of one step, over all devices, that are kept at once: some 400 MB. Outside the window it is half of it, so that
/// a window of this half always has room.
pub const MOST_ROWS: usize = 2_000_000;

/// The result of one list of changes on one device.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The new peak.
    pub peak: Moment,
    /// What each change found, in the order of the changes: calls of modules, gradients, losses or blocks.
    pub found: Vec<u64>,
    /// The op calls that checkpointed modules run again in a step, and all op calls of that step: those of the step with the
    /// most.
    pub again: (u64, u64),
}

/// The peaks of one device without and with changes.
#[derive(Clone, Debug)]
pub struct Prediction {
    /// The CUDA ordinal.
    pub device: i32,
    /// The peak of the run.
    pub before: Moment,
    /// By list of changes.
    pub outcomes: Vec<Outcome>,
    /// A step with a part in the window of which rows outside the window were not kept: what they say of its blocks is unknown.
    pub cut_step: Option<i64>,
}

impl Prediction {
    /// The note about [`Prediction::cut_step`].
    #[must_use]
    pub fn cut_note(&self) -> Option<String> {
        let most = count(MOST_ROWS as u64 / 2);
        self.cut_step.map(|step| {
            format!(
                "step {step} has more than {most} rows outside the chosen part, and they were not kept: --checkpoint, \
                 --chunk-loss and --optimizer in-backward find less of it"
            )
        })
    }
}

/// The state of one device while its rows are read.
struct DevicePrediction {
    recorder: StepRecorder,
    before: Moment,
    outcomes: Vec<Outcome>,
    /// True if rows of the step are not kept.
    is_cut: bool,
    cut_step: Option<i64>,
}

/// What a step is judged by, beside its rows.
struct Judge<'a> {
    lists: &'a [Vec<Change>],
    rounding: Rounding,
    phases: Phases,
}

/// Predicts the peak of allocated memory of each device of `trace` under each list of changes.
///
/// # Errors
/// When the trace cannot be read, lacks what a change needs, has nothing that a change would change, or has a step with more than
/// [`MOST_ROWS`] rows in the window.
pub fn predict(
    trace: &TraceFile,
    lists: &[Vec<Change>],
    options: &Options,
) -> Result<(Replayed, Vec<Prediction>)> {
    predict_within(trace, lists, options, MOST_ROWS)
}

/// Same as [`predict`], with another limit in place of [`MOST_ROWS`].
fn predict_within(
    trace: &TraceFile,
    lists: &[Vec<Change>],
    options: &Options,
    most_rows: usize,
) -> Result<(Replayed, Vec<Prediction>)> {
    let mut devices: Vec<DevicePrediction> = Vec::new();
    let mut names: FxHashSet<Symbol> = FxHashSet::default();
    let mut module_api = None;
    let mut modules: Vec<FxHashSet<Symbol>> = vec![FxHashSet::default(); lists.len()];
    let mut tags = false;
    let known = KnownCategories::default();
    let too_long: Cell<Option<i64>> = Cell::new(None);
    let stop = |_: &Record| too_long.get().is_some();
    let rounding = trace.meta.allocator.rounding();
    let judge = |phases| Judge { lists, rounding, phases };
    let replayed = replay_until(trace, COLUMNS, options, Metric::Allocated, known, stop, |row, replay| {
        let symbols = &replay.symbols;
        let api = *module_api.get_or_insert_with(|| symbols.intern(Api::Module.as_str()));
        tags |= tells_roles(row);
        if row.event == EventName::RangeBegin && row.api == api && names.insert(row.name) {
            let name = symbols.get(row.name);
            for (list, found) in lists.iter().zip(&mut modules) {
                let is_taken = |change: &Change| matches!(change, Change::Checkpoint(patterns) if takes_module(patterns, &name));
                if list.iter().any(is_taken) {
                    found.insert(row.name);
                }
            }
        }
        if has_current_step(row.event) {
            for device in &mut devices {
                if device.recorder.begins(row.step) {
                    device.end_step(&judge(replay.phases), &modules, symbols, false);
                }
            }
        }
        let is_wanted = row.device != HOST
            && options.device.is_none_or(|only| only == row.device)
            && matches!(row.event, EventName::Alloc | EventName::Live);
        if is_wanted && !devices.iter().any(|device| device.recorder.device() == row.device) {
            devices.push(DevicePrediction::new(row, replay.phases, api, lists));
        }
        for device in &mut devices {
            device.recorder.feed(row, replay.in_window());
        }
        let most = if replay.in_window() { most_rows } else { most_rows / 2 };
        if devices.iter().map(|device| device.recorder.rows()).sum::<usize>() > most {
            if replay.in_window() {
                too_long.set(Some(replay.step));
                return;
            }
            for device in &mut devices {
                device.end_step(&judge(replay.phases), &modules, symbols, true);
            }
        }
    })?;
    if let Some(step) = too_long.get() {
        return Err(Error::usage(format!(
            "step {step} of {} has more than {} rows, the most that a prediction keeps at once: choose a part of it by --window{}",
            trace.path.display(),
            count(most_rows as u64),
            if options.window.from_step == i64::MIN { " or --step" } else { "" },
        )));
    }
    let symbols = &replayed.symbols;
    for device in &mut devices {
        device.end_step(&judge(replayed.replay.phases), &modules, symbols, false);
    }
    let all = || lists.iter().flatten();
    check(trace, &names, all(), tags, symbols)?;
    let predictions = devices
        .into_iter()
        .map(|device| Prediction {
            device: device.recorder.device(),
            before: device.before,
            outcomes: device.outcomes,
            cut_step: device.cut_step,
        })
        .collect();
    Ok((replayed, predictions))
}

/// Returns true for a row that has the role of a block as tags tell it: a tag, or the opening row of a block that has it.
fn tells_roles(row: &Record) -> bool {
    use Category::{Gradient, OptimizerState, Parameter};
    match row.event {
        EventName::Tag => true,
        EventName::Live => matches!(row.category, Gradient | OptimizerState | Parameter),
        _ => false,
    }
}

/// The paths of the modules that `trace` has calls of, and whether it has tags.
///
/// # Errors
/// When the trace cannot be read.
pub fn contents(trace: &TraceFile, options: &Options) -> Result<(Vec<String>, bool)> {
    let symbols = SymbolTable::default();
    let api = symbols.intern(Api::Module.as_str());
    let mut names: FxHashSet<Symbol> = FxHashSet::default();
    let mut tags = false;
    let wanted = Wanted::all_events(Columns::of(&["event"]))
        .plus(EventName::Live, Columns::of(&["category"]))
        .plus(EventName::RangeBegin, Columns::of(&["api", "name"]));
    trace.read(wanted, options.lenient, &symbols, |row| {
        tags |= tells_roles(row);
        if row.event == EventName::RangeBegin && row.api == api {
            names.insert(row.name);
        }
        ControlFlow::Continue(())
    })?;
    Ok((names.into_iter().map(|name| symbols.get(name).to_string()).collect(), tags))
}

/// Refuses changes that the trace cannot answer.
fn check<'a>(
    trace: &TraceFile,
    names: &FxHashSet<Symbol>,
    changes: impl Iterator<Item = &'a Change>,
    tags: bool,
    symbols: &SymbolTable,
) -> Result<()> {
    let file = trace.path.display();
    for change in changes {
        if change.needs_tags() && !tags {
            return Err(Error::usage(format!(
                "{}: {file} has no tags, so parameters, gradients and optimizer state are not known in it; trace the \
                 program with its modules (MEMTRACE_MODULES=1, the default, in a Python with PyTorch)",
                change.option()
            )));
        }
        let Change::Checkpoint(patterns) = change else { continue };
        if names.is_empty() {
            return Err(Error::usage(format!(
                "{}: {file} has no calls of modules; trace the program with MEMTRACE_MODULES=1, the default",
                change.option()
            )));
        }
        let paths: Vec<_> = names.iter().map(|name| symbols.get(*name)).collect();
        for pattern in patterns.split(',') {
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
    /// The state before the first row of a device.
    fn new(row: &Record, phases: Phases, module_api: Symbol, lists: &[Vec<Change>]) -> DevicePrediction {
        let mut recorder = StepRecorder::new(row.device, phases, module_api);
        recorder.begins(row.step);
        let outcome = |list: &Vec<Change>| Outcome { found: vec![0; list.len()], ..Outcome::default() };
        let outcomes = lists.iter().map(outcome).collect();
        DevicePrediction { recorder, before: Moment::default(), outcomes, is_cut: false, cut_step: None }
    }

    /// Ends the recorded step. `is_cut` is true in the middle of one.
    fn end_step(
        &mut self,
        judge: &Judge<'_>,
        modules: &[FxHashSet<Symbol>],
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

    /// Raises the peaks to those of the step that ended.
    fn judge(&mut self, judge: &Judge<'_>, modules: &[FxHashSet<Symbol>], symbols: &SymbolTable) {
        let Judge { lists, rounding, phases } = judge;
        let step = self.recorder.step();
        if !step.is_wanted() {
            return;
        }
        let rules = SizeRules::new(step, symbols, *phases, *rounding);
        let unchanged: Vec<i64> = step.lives.iter().map(|life| life.bytes).collect();
        raise(&mut self.before, Curve::new(step, unchanged).peak());
        for ((changes, modules), outcome) in lists.iter().zip(modules).zip(&mut self.outcomes) {
            let sizes = rules.sizes(step, changes, symbols);
            let mut curve = Curve::new(step, sizes);
            for (change, found) in changes.iter().zip(&mut outcome.found) {
                *found += match change {
                    Change::Checkpoint(_) => checkpoint::apply(&mut curve, step, modules, symbols, phases),
                    Change::StepInBackward => in_backward::apply(&mut curve, step, changes, &rules, phases),
                    Change::ChunkLoss(parts) => {
                        chunk_loss::apply(&mut curve, step, *parts, &rules, symbols, phases)
                    }
                    Change::Optimizer(optimizer) => {
                        optimizer::apply(&mut curve, step, *optimizer, changes, phases)
                    }
                    Change::OffloadOptimizer => optimizer::states(step),
                    Change::Bfloat16 | Change::Batch(..) | Change::Without(_) => {
                        let changed = |(life, size): (&Life, &i64)| life.bytes != *size;
                        step.lives.iter().zip(&curve.sizes).map(changed).filter(|is| *is).count() as u64
                    }
                };
            }
            raise(&mut outcome.peak, curve.peak());
            if let [Change::Checkpoint(patterns)] = &changes[..] {
                outcome.again = outcome.again.max(ops_again(step, patterns, symbols, phases));
            }
        }
    }
}

/// The op calls of a step in the forward of these modules, and all op calls of the step.
fn ops_again(step: &Step, patterns: &str, symbols: &SymbolTable, phases: &Phases) -> (u64, u64) {
    let mut inside: FxHashMap<Symbol, bool> = FxHashMap::default();
    let mut is_inside = |module: Symbol| {
        *inside.entry(module).or_insert_with(|| {
            let path = symbols.get(module);
            let ends = path.match_indices('.').map(|(end, _)| end).take(MOST_LEVELS).chain([path.len()]);
            ends.into_iter().any(|end| takes_module(patterns, &path[..end]))
        })
    };
    let forward = step.ops.iter().filter(|op| op.phase == phases.forward && is_inside(op.module)).count();
    (forward as u64, step.ops.len() as u64)
}

fn raise(peak: &mut Moment, found: Option<Moment>) {
    if let Some(found) = found
        && found.bytes > peak.bytes
    {
        *peak = found;
    }
}
