//! The reading of a trace for predictions.

use std::ops::ControlFlow;

use memtrace_trace::{Api, EventName};
use rustc_hash::{FxHashMap, FxHashSet};

use super::changes::{Change, takes_module};
use super::curve::Curve;
use super::sizes::SizeRules;
use super::step::{COLUMNS, Life, Step, StepRecorder};
use super::{checkpoint, chunk_loss, in_backward, optimizer};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::record::{Columns, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::selection::nearest_names;
use crate::state::categories::{KnownCategories, Phases};
use crate::state::device::Moment;
use crate::state::replay::{HOST, Metric, has_current_step};
use crate::state::replay_trace::{Replayed, replay_trace};

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
}

/// The state of one device while its rows are read.
struct DevicePrediction {
    recorder: StepRecorder,
    before: Moment,
    outcomes: Vec<Outcome>,
}

/// Predicts the peak of allocated memory of each device of `trace` under each list of changes.
///
/// # Errors
/// When the trace cannot be read, lacks what a change needs, or has nothing that a change would change.
pub fn predict(
    trace: &TraceFile,
    lists: &[Vec<Change>],
    options: &Options,
) -> Result<(Replayed, Vec<Prediction>)> {
    let mut devices: Vec<DevicePrediction> = Vec::new();
    let mut names: FxHashSet<Symbol> = FxHashSet::default();
    let mut module_api = None;
    let mut modules: Vec<FxHashSet<Symbol>> = vec![FxHashSet::default(); lists.len()];
    let mut tags = false;
    let known = KnownCategories::default();
    let replayed = replay_trace(trace, COLUMNS, options, Metric::Allocated, known, |row, replay| {
        let symbols = &replay.symbols;
        let api = *module_api.get_or_insert_with(|| symbols.intern(Api::Module.as_str()));
        tags |= row.event == EventName::Tag;
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
                if device.recorder.is_next(row.step) {
                    device.judge(lists, &modules, symbols, &replay.phases);
                    device.recorder.next(row.step);
                }
            }
        }
        let is_wanted = row.device != HOST
            && options.device.is_none_or(|only| only == row.device)
            && row.event == EventName::Alloc;
        if is_wanted && !devices.iter().any(|device| device.recorder.device() == row.device) {
            let mut recorder = StepRecorder::new(row.device, replay.phases, api);
            recorder.next(row.step);
            let outcomes = lists
                .iter()
                .map(|list| Outcome { found: vec![0; list.len()], ..Outcome::default() })
                .collect();
            devices.push(DevicePrediction { recorder, before: Moment::default(), outcomes });
        }
        for device in &mut devices {
            device.recorder.feed(row, replay.in_window());
        }
    })?;
    let symbols = &replayed.symbols;
    for device in &mut devices {
        device.judge(lists, &modules, symbols, &replayed.replay.phases);
    }
    let all = || lists.iter().flatten();
    check(trace, &names, all(), tags, symbols)?;
    let predictions = devices
        .into_iter()
        .map(|device| Prediction {
            device: device.recorder.device(),
            before: device.before,
            outcomes: device.outcomes,
        })
        .collect();
    Ok((replayed, predictions))
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
        .plus(EventName::RangeBegin, Columns::of(&["api", "name"]));
    trace.read(wanted, options.lenient, &symbols, |row| {
        tags |= row.event == EventName::Tag;
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
    /// Raises the peaks to those of the step that ended.
    fn judge(
        &mut self,
        lists: &[Vec<Change>],
        modules: &[FxHashSet<Symbol>],
        symbols: &SymbolTable,
        phases: &Phases,
    ) {
        let step = self.recorder.step();
        if step.allocations.is_empty() {
            return;
        }
        let rules = SizeRules::new(step, symbols, *phases);
        let unchanged: Vec<i64> = step.lives.iter().map(|life| life.bytes).collect();
        raise(&mut self.before, Curve::new(step, unchanged).peak());
        for ((changes, modules), outcome) in lists.iter().zip(modules).zip(&mut self.outcomes) {
            let sizes = rules.sizes(step, changes, symbols);
            let mut curve = Curve::new(step, sizes);
            for (change, found) in changes.iter().zip(&mut outcome.found) {
                *found += match change {
                    Change::Checkpoint(_) => checkpoint::apply(&mut curve, step, modules, symbols, phases),
                    Change::StepInBackward => in_backward::apply(&mut curve, step, changes, &rules, phases),
                    Change::ChunkLoss(parts) => chunk_loss::apply(&mut curve, step, *parts, symbols, phases),
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
            let ends = path.match_indices('.').map(|(end, _)| end).chain([path.len()]);
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
