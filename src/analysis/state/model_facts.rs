//! What the marks of a trace say about its models: their types, their batches and their modes.

use std::collections::BTreeMap;
use std::sync::Arc;

use memtrace_trace::model_fact::ModelFact;
use memtrace_trace::{Api, EventName};

use crate::read::record::{Columns, Record};
use crate::read::symbols::SymbolTable;

/// The columns that [`ModelFacts::feed`] needs.
pub(crate) const COLUMNS: Columns = Columns::of(&["api", "name"]);
/// The maximum number of models whose facts are kept.
const MOST: usize = 1000;
/// The types of 16 bits or fewer that parameters may have.
const SMALL_TYPES: [&str; 6] = ["bfloat16", "float16", "half", "uint8", "int8", "float8"];

/// The facts about one called model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FactsOfModel {
    /// True if most of its parameters have 16 bits or fewer.
    pub(crate) is_half: bool,
    /// The bytes of the trained parameters; `None` if all are trained.
    pub(crate) trained: Option<i64>,
    /// True if its latest batch has one sample.
    pub(crate) is_batch_of_one: bool,
    /// True if its latest call was in evaluation mode.
    pub(crate) evaluates: bool,
}

/// Returns the name of a mark with a fact about a model, or `None` for any other row.
pub(crate) fn name_of_fact(row: &Record, symbols: &SymbolTable) -> Option<Arc<str>> {
    let is_fact = row.event == EventName::Mark && *symbols.get(row.api) == *Api::ModelFact.as_str();
    is_fact.then(|| symbols.get(row.name))
}

/// The facts about each called model.
#[derive(Clone, Debug, Default)]
pub(crate) struct ModelFacts {
    of_root: BTreeMap<String, FactsOfModel>,
}

impl ModelFacts {
    /// Processes a row. Returns true if it changed a fact.
    pub(crate) fn feed(&mut self, row: &Record, symbols: &SymbolTable) -> bool {
        let Some(name) = name_of_fact(row, symbols) else { return false };
        let Some((fact, path)) = ModelFact::parse(&name) else { return false };
        // A program may call a part of a model, such as `vae.encoder(x)`. The mark then has the part's path.
        let root = root_of(path);
        if !self.of_root.contains_key(root) && self.of_root.len() >= MOST {
            return false;
        }
        let facts = self.of_root.entry(root.to_owned()).or_default();
        match fact {
            ModelFact::Type(name) => facts.is_half = SMALL_TYPES.iter().any(|small| name.starts_with(small)),
            ModelFact::Trained(bytes) => facts.trained = bytes,
            ModelFact::BatchOfOne(is_one) => facts.is_batch_of_one = is_one,
            ModelFact::Evaluates(evaluates) => facts.evaluates = evaluates,
            ModelFact::Optimizer(_)
            | ModelFact::OnCpu(_)
            | ModelFact::NoOptimizer(_)
            | ModelFact::Input(_) => return false,
        }
        true
    }

    /// Returns true if a model has 16 bits or fewer.
    pub(crate) fn has_half(&self) -> bool {
        self.of_root.values().any(|facts| facts.is_half)
    }

    /// Returns the facts about the model to which a module path belongs.
    pub(crate) fn facts_at(&self, path: &str) -> FactsOfModel {
        self.of_root.get(root_of(path)).copied().unwrap_or_default()
    }
}

/// Returns the root of a module path: the part before the first dot.
pub(crate) fn root_of(path: &str) -> &str {
    path.split('.').next().unwrap_or(path)
}

/// Returns true if a module is the module at `path`, or is inside it.
pub(crate) fn is_inside(module: &str, path: &str) -> bool {
    module.strip_prefix(path).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns true for the path of a module. Other names, such as `(script)`, are of no module.
pub(crate) fn is_module(path: &str) -> bool {
    !path.starts_with(['(', '-'])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_of_models_follow_the_latest_marks() {
        let symbols = SymbolTable::default();
        let mut facts = ModelFacts::default();
        let mut mark = |api: &str, name: &str| {
            let row = Record {
                event: EventName::Mark,
                api: symbols.intern(api),
                name: symbols.intern(name),
                ..Record::default()
            };
            facts.feed(&row, &symbols)
        };
        assert!(mark("model_fact", "type=bfloat16 GPT"));
        assert!(mark("model_fact", "batch=one GPT"));
        assert!(mark("model_fact", "batch=several GPT"));
        assert!(mark("model_fact", "trained=0 Teacher"));
        assert!(mark("model_fact", "mode=eval Teacher"));
        assert!(mark("model_fact", "mode=eval AutoencoderKL.encoder"));
        assert!(!mark("retained", "type=bfloat16 Net") && !mark("model_fact", "size=1 Net"));
        let half = FactsOfModel { is_half: true, ..FactsOfModel::default() };
        assert_eq!(facts.facts_at("GPT.h.0"), half);
        let idle = FactsOfModel { trained: Some(0), evaluates: true, ..FactsOfModel::default() };
        assert_eq!(facts.facts_at("Teacher"), idle);
        assert!(
            facts.facts_at("AutoencoderKL").evaluates
                && facts.facts_at("AutoencoderKL.encoder.conv_in").evaluates
        );
        assert_eq!(facts.facts_at("Net.fc"), FactsOfModel::default());
    }
}
