//! Reads a trace and predicts its peaks under changes.

use std::collections::VecDeque;

use memtrace_trace::EventName;
use memtrace_trace::counts::count;
use memtrace_trace::rounding::Rounding;
use rustc_hash::{FxHashMap, FxHashSet};

use super::autocast::Autocast;
use super::calls::MOST_LEVELS;
use super::changes::{Change, takes_module};
use super::contents::{Contents, check};
use super::curve::Curve;
use super::requests::ChangedRequests;
use super::sizes::{SizeRules, Traits};
use super::step::{Life, RecordedStep, StepRecorder, TypeSymbols, with_columns};
use super::{autocast, casts, checkpoint, chunk_loss, in_backward, optimizer, shard};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::requests::Requests;
use crate::state::categories::Phases;
use crate::state::device::Peak;
use crate::state::replay::{self, Metric, Replay, has_current_step, is_gpu};
use crate::state::replay_trace::{Replayed, replay_rows};
use crate::state::series::{Series, TimeGrid};

/// The maximum number of rows of one step, over all devices, that are kept at once: about 400 MB. Outside the
/// window, the maximum is half of this number, so that the other half is always left for rows in the window.
pub const MOST_ROWS: usize = 2_000_000;

/// The maximum number of evaluated steps that are kept, and of their bytes.
const MOST_EVALUATED: usize = 8;
const MOST_EVALUATED_BYTES: usize = 64 << 20;

/// A change that saves less than this share of the peak is not listed.
const LEAST_SAVED: f64 = 0.001;

/// The result of one list of changes on one device.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The peak with the changes.
    pub peak: Peak,
    /// The number of items that each change found, in the order of the changes: calls of modules, gradients,
    /// losses or blocks.
    pub found: Vec<u64>,
    /// The op calls that checkpointed modules run again.
    pub again: OpsAgain,
}

impl Outcome {
    fn of_list(list: &[Change]) -> Outcome {
        Outcome { found: vec![0; list.len()], ..Outcome::default() }
    }

    /// Adds the outcome of another step.
    fn add(&mut self, step: &Outcome) {
        raise(&mut self.peak, Some(step.peak));
        for (found, more) in self.found.iter_mut().zip(&step.found) {
            *found += more;
        }
        // Keep the counts of the best step or, of equally good steps, of the last one. The first step also sets things
        // up, and a step that ran out of memory has an incomplete backward, so both are worse.
        let rank = |again: &OpsAgain| (again.ops > 0, again.has_backward, again.is_steady);
        if rank(&step.again) >= rank(&self.again) {
            self.again = step.again;
        }
    }
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
    pub before: Peak,
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
                 --checkpoint, --chunk-loss, --optimizer in-backward, --shard and --autocast see only the rest of it"
            )
        })
    }
}

/// Everything but the step itself that decides its outcomes.
#[derive(Default)]
struct Conditions {
    is_half: bool,
    has_autocast: bool,
    half_modules: FxHashSet<Symbol>,
    modules: Vec<ChosenModules>,
}

/// A step under one list of changes.
#[derive(Debug)]
struct EvaluatedList {
    outcome: Outcome,
    curve: Curve,
    /// See [`Curve::differences`].
    differences: Vec<i64>,
}

/// The latest steps that were evaluated. Training repeats its steps, and a step that is like one of these is not evaluated
/// again.
#[derive(Default)]
struct EvaluatedSteps {
    conditions: Conditions,
    steps: VecDeque<(RecordedStep, Vec<EvaluatedList>)>,
}

impl EvaluatedSteps {
    /// Returns the index of a step that is like `step`.
    fn find(&self, step: &RecordedStep) -> Option<usize> {
        self.steps.iter().rposition(|(other, _)| other.is_like(step))
    }

    fn add(&mut self, step: RecordedStep, lists: Vec<EvaluatedList>) {
        self.steps.push_back((step, lists));
        let bytes = |(step, lists): &(RecordedStep, Vec<EvaluatedList>)| evaluated_bytes(step, lists.len());
        while self.steps.len() > MOST_EVALUATED
            || self.steps.iter().map(bytes).sum::<usize>() > MOST_EVALUATED_BYTES
        {
            self.steps.pop_front();
        }
    }
}

/// Returns the approximate size of a step that was evaluated under `lists` lists of changes.
fn evaluated_bytes(step: &RecordedStep, lists: usize) -> usize {
    (step.rows() + step.lives.len()) * (size_of::<Life>() + lists * 2 * size_of::<i64>())
}

/// The results of all steps so far.
struct Results {
    outcomes: Vec<Outcome>,
    /// For each list of changes: the total over time. Empty if no curve is wanted.
    curves: Vec<Series>,
    /// The requests under the first list, if they are wanted.
    requests: Option<ChangedRequests>,
}

impl Results {
    /// Adds `step` under the list at `index`.
    fn add(&mut self, index: usize, step: &RecordedStep, list: &EvaluatedList) {
        let EvaluatedList { outcome, curve, differences } = list;
        self.outcomes[index].add(outcome);
        if let Some(series) = self.curves.get_mut(index) {
            curve.follow(step, differences, |ts_ns, bytes| series.set(ts_ns, bytes));
        }
        if let Some(requests) = self.requests.as_mut().filter(|_| index == 0) {
            requests.add(step, curve);
        }
    }
}

/// The state of one device while its rows are read.
struct DevicePrediction {
    recorder: StepRecorder,
    evaluated: EvaluatedSteps,
    traits: Traits,
    /// For each list of changes: whether a module is inside a checkpointed module, for the modules looked up
    /// so far.
    inside: Vec<FxHashMap<Symbol, bool>>,
    before: Peak,
    results: Results,
    is_half: bool,
    has_autocast: bool,
    /// True if earlier rows of the current step were not kept.
    is_cut: bool,
    cut_step: Option<i64>,
}

/// What the prediction of each step needs beside the step.
struct StepInputs<'a> {
    lists: &'a [Vec<Change>],
    rounding: Rounding,
    phases: Phases,
    /// True if the types of the parameters show that the run computes in 16 bits.
    is_half: bool,
    /// The modules of models with 16 bits or fewer.
    half_modules: &'a FxHashSet<Symbol>,
}

impl<'a> StepInputs<'a> {
    fn new(lists: &'a [Vec<Change>], rounding: Rounding, phases: Phases, contents: &'a Contents) -> Self {
        StepInputs {
            lists,
            rounding,
            phases,
            is_half: contents.is_half,
            half_modules: &contents.half_modules,
        }
    }
}

/// The modules that the changes of a list apply to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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
        let inputs = StepInputs::new(self.lists, self.rounding, replay.phases, &self.contents);
        if has_current_step(row.event) {
            for device in &mut self.devices {
                if device.recorder.begins(row.step) {
                    device.end_step(&inputs, &self.modules, symbols, false);
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
            device.results.requests = self.makes_requests.then(ChangedRequests::default);
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
                device.end_step(&inputs, &self.modules, symbols, true);
            }
        }
    }

    /// Reads the trace, and returns its replay and the predictions.
    fn read(mut self, trace: &TraceFile, options: &Options) -> Result<(Replayed, Vec<Prediction>)> {
        let wanted = with_columns(replay::COLUMNS);
        let replayed = replay_rows(trace, wanted, options, Metric::Allocated, |row, replay| {
            self.feed(row, replay);
        })?;
        let predictions = self.finish(trace, &replayed, options)?;
        Ok((replayed, predictions))
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
        let inputs = StepInputs::new(self.lists, self.rounding, replayed.replay.phases, &self.contents);
        for device in &mut self.devices {
            device.end_step(&inputs, &self.modules, symbols, false);
        }
        check(trace, &self.contents, self.lists.iter().flatten(), symbols)?;
        let prediction = |device: DevicePrediction| Prediction {
            device: device.recorder.device(),
            before: device.before,
            outcomes: device.results.outcomes,
            curves: device.results.curves.into_iter().map(Series::finish).collect(),
            requests: device.results.requests,
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
    Predictor::new(trace, lists, options, MOST_ROWS).read(trace, options)
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
    let predictor = Predictor::new(trace, &lists, options, MOST_ROWS).with_requests();
    let (_, predictions) = predictor.read(trace, options)?;
    let made = predictions.into_iter().find(|each| each.device == base.device).and_then(|each| each.requests);
    Ok(made.unwrap_or_default().finish(base))
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
        let outcomes = lists.iter().map(|list| Outcome::of_list(list)).collect();
        let curves = grid.map_or(Vec::new(), |grid| vec![Series::new(grid); lists.len()]);
        DevicePrediction {
            recorder,
            evaluated: EvaluatedSteps::default(),
            traits: Traits::default(),
            inside: vec![FxHashMap::default(); lists.len()],
            before: Peak::default(),
            results: Results { outcomes, curves, requests: None },
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
        inputs: &StepInputs<'_>,
        modules: &[ChosenModules],
        symbols: &SymbolTable,
        is_cut: bool,
    ) {
        let step = self.recorder.next();
        if let (true, Some(last)) = (step.is_wanted() && (is_cut || self.is_cut), step.allocations.last()) {
            self.cut_step = self.cut_step.or(Some(last.owner.step));
        }
        self.is_cut = is_cut;
        if !step.is_wanted() {
            return;
        }
        self.is_half |= inputs.is_half && inputs.lists.iter().flatten().any(Change::is_type);
        let Conditions { is_half, has_autocast, half_modules, modules: known } = &self.evaluated.conditions;
        let is_same = (self.is_half, self.has_autocast) == (*is_half, *has_autocast)
            && *inputs.half_modules == *half_modules
            && *modules == known[..];
        if !is_same {
            self.evaluated = EvaluatedSteps {
                conditions: Conditions {
                    is_half: self.is_half,
                    has_autocast: self.has_autocast,
                    half_modules: inputs.half_modules.clone(),
                    modules: modules.to_vec(),
                },
                steps: VecDeque::new(),
            };
        }
        if let Some(known) = self.evaluated.find(&step) {
            for (index, list) in self.evaluated.steps[known].1.iter().enumerate() {
                self.results.add(index, &step, list);
            }
            return;
        }
        let evaluated = self.predict_step(&step, inputs, modules, symbols);
        if !evaluated.is_empty() {
            self.evaluated.add(step, evaluated);
        }
    }

    /// Evaluates a step under each list of changes, adds it to the results, and raises the run's own peak. Returns the
    /// evaluations, unless they are too large to keep.
    fn predict_step(
        &mut self,
        step: &RecordedStep,
        inputs: &StepInputs<'_>,
        modules: &[ChosenModules],
        symbols: &SymbolTable,
    ) -> Vec<EvaluatedList> {
        let StepInputs { lists, rounding, phases, half_modules, .. } = inputs;
        let mut rules = SizeRules::new(step, symbols, *phases, *rounding, &mut self.traits);
        rules.half_modules = Some(*half_modules);
        let has_types = lists.iter().flatten().any(Change::is_type);
        let mut autocast =
            if has_types { autocast::find(step, &rules, symbols, phases) } else { Autocast::default() };
        // Where the trace has the types, they say which blocks are float32 under autocast.
        let casts = has_types && (autocast.is_on || autocast::casts_up(step, &rules, phases));
        self.has_autocast |= casts;
        if self.is_half || self.has_autocast {
            autocast = Autocast::default();
        }
        rules.is_half = self.is_half || casts && !step.has_types();
        rules.halved.clone_from(&autocast.halved);
        let unchanged: Vec<i64> = step.lives.iter().map(|life| life.bytes).collect();
        let unchanged = Curve::new(unchanged);
        raise(&mut self.before, unchanged.peak(step, &unchanged.differences(step)));
        let is_kept = evaluated_bytes(step, lists.len()) <= MOST_EVALUATED_BYTES;
        let mut evaluated = Vec::new();
        let places = modules.iter().zip(&mut self.inside);
        for (index, (changes, (modules, inside))) in lists.iter().zip(places).enumerate() {
            let mut outcome = Outcome::of_list(changes);
            let sizes = rules.sizes(step, changes, symbols);
            let mut curve = Curve::new(sizes);
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
                    Change::Autocast => autocast.apply(&mut curve, step),
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
            let differences = curve.differences(step);
            raise(&mut outcome.peak, curve.peak(step, &differences));
            if let [Change::Checkpoint(patterns)] = &changes[..] {
                outcome.again = ops_again(step, patterns, inside, symbols, phases);
            }
            let list = EvaluatedList { outcome, curve, differences };
            self.results.add(index, step, &list);
            if is_kept {
                evaluated.push(list);
            }
        }
        evaluated
    }
}

/// Counts the op calls of a step: those in the forward of the modules that match `patterns`, and all in the
/// forward and backward. `inside` caches whether a module is inside one of these modules.
fn ops_again(
    step: &RecordedStep,
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
    OpsAgain {
        ops,
        of: (of(phases.forward).count() + backward) as u64,
        is_steady: has_backward && !step.is_first(),
        has_backward,
        has_batch_norm,
    }
}

fn raise(peak: &mut Peak, found: Option<Peak>) {
    if let Some(found) = found
        && found.bytes > peak.bytes
    {
        *peak = found;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::read::input::Input;
    use crate::whatif::candidates_for;

    /// Returns what `predictor` finds, and the number of steps that it did not evaluate. With `forgets`, it evaluates
    /// each step.
    fn predicted(mut predictor: Predictor<'_>, trace: &TraceFile, forgets: bool) -> (String, usize) {
        let (wanted, options) = (with_columns(replay::COLUMNS), Options::default());
        let mut begun = FxHashSet::default();
        let visit = |row: &Record, replay: &Replay| {
            predictor.feed(row, replay);
            begun.insert(replay.step);
            if forgets {
                predictor.devices.iter_mut().for_each(|device| device.evaluated.steps.clear());
            }
        };
        let replayed = replay_rows(trace, wanted, &options, Metric::Allocated, visit).unwrap();
        let evaluated: usize = predictor.devices.iter().map(|device| device.evaluated.steps.len()).sum();
        let found = predictor.finish(trace, &replayed, &options).unwrap();
        (format!("{found:?}"), (begun.len() - 1).saturating_sub(evaluated))
    }

    #[test]
    fn a_step_that_is_like_an_earlier_one_has_its_outcome() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures");
        let options = Options::default();
        for name in ["conv", "gpt", "leaks", "mem-tracker", "oom-big", "sharded"] {
            for trace in &Input::open(&fixtures.join(name)).unwrap().traces {
                let (changes, _) = candidates_for(trace, &options).unwrap();
                let lists: Vec<Vec<Change>> = changes.into_iter().map(|change| vec![change]).collect();
                let grid = TimeGrid { start_ns: 0, width_ns: 1_000_000, buckets: 1000 };
                let predictor = || {
                    Predictor::new(trace, &lists, &options, MOST_ROWS).with_curves(0, grid).with_requests()
                };
                let (found, reused) = predicted(predictor(), trace, false);
                assert_eq!(found, predicted(predictor(), trace, true).0, "{name}");
                assert!(reused > 0 || name != "gpt");
            }
        }
    }
}
