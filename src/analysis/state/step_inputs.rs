//! The shape of the largest input of each step, and the step with the largest input of the run.

use memtrace_trace::counts::count;
use memtrace_trace::form::Form;
use memtrace_trace::model_fact::ModelFact;
use rustc_hash::{FxHashMap, FxHashSet};
use serde_json::{Value, json};

use crate::read::record::Record;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::model_facts::name_of_fact;

/// The maximum number of changes kept, so that memory does not grow with the trace.
const MOST: usize = 1 << 20;
/// After this many different inputs, a trace has only those that are clearly larger (docs/trace-format.md).
const MOST_NAMES: usize = 1000;
/// How many times as large as the median the largest input must be to be worth a line.
const NOTABLE: f64 = 1.5;
/// The minimum number of steps with an input for a line.
const LEAST_STEPS: i64 = 3;

/// An input that differs from the previous input of its model.
#[derive(Clone, Copy, Debug)]
struct Change {
    step: i64,
    elements: i64,
    /// The name of the mark, which has the form and the model's path.
    name: Symbol,
}

/// The inputs of a step.
#[derive(Clone, Copy, Debug)]
struct StepChange {
    largest: Change,
    last: Change,
}

/// The inputs of each model. A trace has a mark for each change of an input's shape.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// By the path of the model: its changes, in order.
    changes: FxHashMap<String, Vec<Change>>,
    kept: usize,
}

/// The largest input of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LargestInput {
    /// The first step that has it.
    pub step: i64,
    /// Its type, such as `int64`.
    pub dtype: String,
    /// Its shape, such as `[1x8192]`.
    pub shape: String,
    /// The path of the model that got it.
    pub model: String,
    /// The largest size of each dimension among the inputs of this model with as many dimensions.
    pub largest_sizes: Vec<i64>,
    /// The shape of the median step's input.
    pub median_shape: String,
    /// True if it is so much larger than the median that reports mention it.
    pub is_notable: bool,
}

impl StepInputs {
    /// Processes a row.
    pub fn feed(&mut self, row: &Record, symbols: &SymbolTable) {
        let Some(name) = name_of_fact(row, symbols) else { return };
        let Some((ModelFact::Input(form), path)) = ModelFact::parse(&name) else { return };
        let Some(elements) = Form::of_input(form).elements() else { return };
        if self.kept < MOST {
            self.kept += 1;
            let change = Change { step: row.step, elements, name: row.name };
            match self.changes.get_mut(path) {
                Some(changes) => changes.push(change),
                None => drop(self.changes.insert(path.to_owned(), vec![change])),
            }
        }
    }

    /// Returns the changes of the model that got the largest input.
    fn of_largest(&self) -> Option<&[Change]> {
        let most_of = |changes: &[Change]| changes.iter().map(|change| change.elements).max();
        let all = self.changes.iter();
        let most = all.max_by_key(|(path, changes)| (most_of(changes), changes.len(), path.as_str()));
        most.map(|(_, changes)| changes.as_slice())
    }

    /// Returns the sizes of the inputs of the model that got the largest one.
    #[must_use]
    pub fn sizes(&self) -> InputSizes {
        let changes = self.of_largest().unwrap_or_default();
        let mut names = FxHashSet::default();
        let last_known = changes.iter().find(|change| {
            names.insert(change.name);
            names.len() >= MOST_NAMES
        });
        InputSizes { steps: steps_of(changes), last_known: last_known.map_or(i64::MAX, |change| change.step) }
    }

    /// Returns the largest input of the steps up to `last`, with the median of the same model. Returns `None` if the
    /// trace has no inputs.
    #[must_use]
    pub fn largest(&self, last: i64, symbols: &SymbolTable) -> Option<LargestInput> {
        let changes = self.of_largest()?;
        let steps = steps_of(changes);
        let first_of_largest = |step: &&StepChange| (step.largest.elements, -step.largest.step);
        let largest = steps.iter().max_by_key(first_of_largest)?.largest;
        // Inputs with the number of steps that have them as their largest.
        let mut inputs: Vec<(Change, i64)> = Vec::new();
        for (at, step) in steps.iter().enumerate() {
            let next = steps.get(at + 1).map_or(last.saturating_add(1), |next| next.largest.step);
            let lasts = next.saturating_sub(step.largest.step).saturating_sub(1);
            inputs.extend([(step.largest, 1), (step.last, lasts.max(0))]);
        }
        let all = inputs.iter().fold(0_i64, |all, (_, lasts)| all.saturating_add(*lasts));
        inputs.sort_by_key(|(change, _)| change.elements);
        let mut before = 0_i64;
        let median = inputs.iter().find(|(_, lasts)| {
            before = lasts.saturating_add(before);
            before >= all - before
        })?;
        let form_of = |change: &Change| {
            let name = symbols.get(change.name);
            let (ModelFact::Input(form), path) = ModelFact::parse(&name)? else { return None };
            let form = Form::of_input(form);
            Some((form.dtype.to_owned(), form.shape.to_owned(), path.to_owned()))
        };
        let (dtype, shape, model) = form_of(&largest)?;
        let median_shape = form_of(&median.0)?.1;
        let is_notable = all >= LEAST_STEPS && largest.elements as f64 >= NOTABLE * median.0.elements as f64;
        let dims = Form { dtype: &dtype, shape: &shape }.dims().unwrap_or_default();
        let names: FxHashSet<Symbol> = changes.iter().map(|change| change.name).collect();
        let largest_sizes = names.into_iter().fold(dims, |sizes, name| {
            let name = symbols.get(name);
            let Some((ModelFact::Input(form), _)) = ModelFact::parse(&name) else { return sizes };
            match Form::of_input(form).dims() {
                Some(dims) if dims.len() == sizes.len() => {
                    sizes.into_iter().zip(dims).map(|(size, other)| size.max(other)).collect()
                }
                _ => sizes,
            }
        });
        Some(LargestInput {
            step: largest.step,
            dtype,
            shape,
            model,
            largest_sizes,
            median_shape,
            is_notable,
        })
    }
}

/// Returns each step's largest input. The last input of a step lasts until the next change.
fn steps_of(changes: &[Change]) -> Vec<StepChange> {
    let mut steps: Vec<StepChange> = Vec::new();
    for change in changes {
        match steps.last_mut() {
            Some(step) if step.largest.step == change.step => {
                step.last = *change;
                if change.elements > step.largest.elements {
                    step.largest = *change;
                }
            }
            _ => steps.push(StepChange { largest: *change, last: *change }),
        }
    }
    steps
}

/// The sizes of the inputs of one model.
#[derive(Clone, Debug, Default)]
pub struct InputSizes {
    /// The steps with a change, in order.
    steps: Vec<StepChange>,
    /// The step from which on a step without a change may have had another input.
    last_known: i64,
}

impl InputSizes {
    /// Returns the number of elements of the largest input in the steps `first` to `last`; 0 if it is unknown.
    #[must_use]
    pub fn most(&self, first: i64, last: i64) -> i64 {
        let from = self.steps.partition_point(|step| step.largest.step < first);
        let within = self.steps[from..].iter().take_while(|step| step.largest.step <= last);
        let most = within.map(|step| step.largest.elements).max().unwrap_or(0);
        let is_changed = self.steps.get(from).is_some_and(|step| step.largest.step == first);
        let lasts = !is_changed && first <= self.last_known;
        let before = from.checked_sub(1).filter(|_| lasts).map_or(0, |at| self.steps[at].last.elements);
        most.max(before)
    }

    /// Returns true if the sizes differ enough for a picture.
    #[must_use]
    pub fn vary(&self) -> bool {
        let sizes = || self.steps.iter().map(|step| step.largest.elements);
        sizes().max() > sizes().min()
    }
}

impl LargestInput {
    /// Returns the sentence about an input that is much larger than the median.
    #[must_use]
    pub fn line(&self) -> Option<String> {
        let LargestInput { step, dtype, shape, model, median_shape, is_notable, .. } = self;
        let when = match u64::try_from(*step) {
            Ok(step) => format!("step {} has", count(step)),
            Err(_) => "before the first step came".to_owned(),
        };
        is_notable.then(|| {
            format!("{when} the largest input of the run: {dtype} {shape} of {model}; median {median_shape}")
        })
    }

    /// Returns the input for `--json`.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "step": self.step, "dtype": self.dtype, "shape": self.shape, "model": self.model,
            "median_shape": self.median_shape, "largest_sizes": self.largest_sizes,
        })
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::EventName;

    use super::*;

    /// Feeds inputs of `GPT`, each a step and its form.
    fn inputs(marks: &[(i64, &str)]) -> (StepInputs, SymbolTable) {
        let symbols = SymbolTable::default();
        let mut inputs = StepInputs::default();
        for (step, form) in marks {
            let row = Record {
                event: EventName::Mark,
                api: symbols.intern("model_fact"),
                name: symbols.intern(&format!("input={form} GPT")),
                step: *step,
                ..Record::default()
            };
            inputs.feed(&row, &symbols);
        }
        (inputs, symbols)
    }

    #[test]
    fn one_long_sample_is_the_largest_input() {
        let marks = [(0, "int64[1x1310]"), (7, "int64[1x8192]"), (8, "int64[1x1310]"), (9, "int64[1x900]")];
        let (inputs, symbols) = inputs(&marks);
        let line = inputs.largest(20, &symbols).unwrap().line().unwrap();
        assert_eq!(line, "step 7 has the largest input of the run: int64 [1x8192] of GPT; median [1x900]");
    }

    #[test]
    fn inputs_of_about_one_size_get_no_line() {
        let (inputs, symbols) = inputs(&[(0, "int64[8x1000]"), (1, "int64[8x1024]"), (2, "int64[8x900]")]);
        assert_eq!(inputs.largest(2, &symbols).unwrap().line(), None);
        assert_eq!(StepInputs::default().largest(2, &symbols), None);
    }

    #[test]
    fn the_size_of_an_input_lasts_until_the_next_change() {
        let (inputs, _) = inputs(&[(2, "int64[1x10]"), (5, "int64[1x90]"), (5, "int64[1x20]")]);
        let sizes = inputs.sizes();
        let each: Vec<i64> = (1..8).map(|step| sizes.most(step, step)).collect();
        assert_eq!(each, [0, 10, 10, 10, 90, 20, 20]);
        assert_eq!((sizes.most(3, 9), sizes.vary()), (90, true));
        assert!(!StepInputs::default().sizes().vary());
    }

    #[test]
    fn the_size_of_an_input_is_unknown_after_a_thousand_different_ones() {
        let forms: Vec<String> = (0..1000).map(|step| format!("int64[1x{}]", 10 + step)).collect();
        let marks: Vec<(i64, &str)> =
            forms.iter().enumerate().map(|(step, form)| (step as i64, form.as_str())).collect();
        let (inputs, _) = inputs(&marks);
        let sizes = inputs.sizes();
        assert_eq!((sizes.most(998, 998), sizes.most(999, 999), sizes.most(1000, 1000)), (1008, 1009, 0));
    }

    #[test]
    fn a_step_with_several_inputs_counts_its_largest_and_its_last_one_lasts() {
        let marks = [(0, "int64[1x10]"), (1, "int64[1x10]"), (1, "int64[1x90]"), (1, "int64[1x20]")];
        let (inputs, symbols) = inputs(&marks);
        let largest = inputs.largest(3, &symbols).unwrap();
        assert_eq!((largest.shape.as_str(), largest.median_shape.as_str()), ("[1x90]", "[1x20]"));
    }

    #[test]
    fn the_largest_size_of_each_dimension_may_come_from_different_inputs() {
        let marks =
            [(0, "int64[128x32]"), (1, "int64[1x3500]"), (2, "int64[2x2x9000]"), (3, "int64[200x10]")];
        let (inputs, symbols) = inputs(&marks[..2]);
        assert_eq!(inputs.largest(3, &symbols).unwrap().largest_sizes, [128, 3500]);
        let (inputs, symbols) = self::inputs(&marks);
        assert_eq!(inputs.largest(3, &symbols).unwrap().largest_sizes, [2, 2, 9000]);
    }

    #[test]
    fn a_warm_up_before_training_has_no_step() {
        let (inputs, symbols) = inputs(&[(-1, "int64[1x90]"), (0, "int64[1x10]")]);
        let line = inputs.largest(5, &symbols).unwrap().line().unwrap();
        assert!(
            line.starts_with("before the first step came the largest input of the run: int64 [1x90]"),
            "{line}"
        );
    }

    /// The steps of a damaged trace may be any numbers, in any order.
    #[test]
    fn extreme_steps_overflow_nothing() {
        let most = 1 << 62;
        let marks =
            [(-most, "int64[1x9]"), (most, "int64[1x2]"), (-most, "int64[1x4]"), (most, "int64[1x3]")];
        let (inputs, symbols) = inputs(&marks);
        assert_eq!(inputs.largest(i64::MAX, &symbols).unwrap().shape, "[1x9]");
    }

    #[test]
    fn a_mark_without_a_shape_is_ignored() {
        let (inputs, symbols) = inputs(&[(0, "int64"), (1, "[]["), (2, "int64[axb]")]);
        assert_eq!(inputs.largest(3, &symbols), None);
    }
}
