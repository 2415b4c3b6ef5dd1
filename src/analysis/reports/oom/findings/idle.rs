//! Models whose parameters stay on the GPU although this step does not train them.

use std::collections::BTreeMap;

use memtrace_trace::Category;
use memtrace_trace::units::Unit;

use super::super::finding::{OomCase, UNSURE};
use super::super::module_calls::ModuleCalls;
use super::too_big;
use crate::read::symbols::SymbolTable;
use crate::state::block::Owner;
use crate::state::model_facts::{ModelFacts, is_module, root_of};

/// Returns the models that this step does not train, the largest first, if the program is too big.
pub(super) fn models(case: &OomCase<'_>) -> Vec<UntrainedModel> {
    let at = case.oom_state;
    if !case.is_caused_by(&too_big::CAUSE) || at.row.step < 0 {
        return Vec::new();
    }
    let (module, calls, facts) = (at.module(), &at.seen.calls, &at.seen.facts);
    UntrainedModel::find(&case.live, &module, at.row.step, calls, facts, at.symbols(), |bytes| {
        case.evidence.is_material(bytes)
    })
}

/// Returns the remedy for the largest of the [`models`].
pub(super) fn remedy_for_largest(case: &OomCase<'_>, units: Unit) -> Option<String> {
    remedy(case, 0, units)
}

/// Returns the remedy for the second largest of the [`models`].
pub(super) fn remedy_for_next(case: &OomCase<'_>, units: Unit) -> Option<String> {
    remedy(case, 1, units)
}

/// Returns the remedy for one of the [`models`], by its index.
fn remedy(case: &OomCase<'_>, index: usize, units: Unit) -> Option<String> {
    let model = models(case).into_iter().nth(index)?;
    let UntrainedModel { root, bytes, .. } = &model;
    // The size of the parameters is known exactly, so a saving of twice the missing memory is enough.
    // Other changes must save at least `least_saving`.
    let least = 2 * case.evidence.short_of_whole_step();
    let unsure = |saved: i64| if case.is_rest_unknown() || saved < least { UNSURE } else { "" };
    if !model.is_called {
        let last = match model.last_step {
            Some(last) if last >= 0 => {
                format!("was called last in step {last}, and this is step {}", case.oom_state.row.step)
            }
            Some(_) => "was called only before training".to_owned(),
            None => "was not called so far".to_owned(),
        };
        return Some(format!(
            "del {root} if it is done, or keep it on the CPU while it is not called: it {last}, and its parameters take {}{}",
            units.show(*bytes),
            unsure(*bytes)
        ));
    }
    (!model.is_half).then(|| {
        format!(
            "{root}.bfloat16(), because it is not trained: its parameters take {}, and then half of that{}; or del {root}, \
             if it is done",
            units.show(*bytes),
            unsure(bytes / 2)
        )
    })
}

/// A model that this step does not train, and whose parameters are a significant share of the card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UntrainedModel {
    /// The path of the root.
    root: String,
    /// The bytes of its live parameters and buffers.
    bytes: i64,
    /// True if this step has called it.
    is_called: bool,
    /// The step of its last call; `None` if it was never called.
    last_step: Option<i64>,
    /// True if most of its parameters have 16 bits or fewer.
    is_half: bool,
}

impl UntrainedModel {
    /// Returns the models other than the one of the request (`module`) that are not trained, the largest first.
    /// `live` has the owner and the bytes of each live block, `is_material` says whether a size matters.
    fn find(
        live: &[(Owner, i64)],
        module: &str,
        step: i64,
        calls: &ModuleCalls,
        facts: &ModelFacts,
        symbols: &SymbolTable,
        is_material: impl Fn(i64) -> bool,
    ) -> Vec<UntrainedModel> {
        // For each root: the bytes of its parameters and buffers, and whether it is trained.
        let mut roots: BTreeMap<String, (i64, bool)> = BTreeMap::new();
        for (owner, bytes) in live {
            let path = symbols.get(owner.module);
            let found = roots.entry(root_of(&path).to_owned()).or_default();
            match owner.category.without_sharding() {
                Category::Parameter | Category::Buffer => found.0 += bytes,
                Category::Gradient | Category::OptimizerState => found.1 = true,
                _ => {}
            }
        }
        let other = |(root, (bytes, is_trained)): (String, (i64, bool))| {
            let is_other = !is_trained && root != root_of(module) && is_module(&root);
            (is_other && is_material(bytes)).then_some((root, bytes))
        };
        let model = |(root, bytes): (String, i64)| {
            let last_step = calls.last_step(&root, symbols);
            let of_model = facts.facts_at(&root);
            UntrainedModel {
                bytes,
                is_called: last_step.is_some_and(|last| last >= step),
                last_step,
                is_half: of_model.is_half,
                root,
            }
        };
        let is_sure = |model: &UntrainedModel| {
            let of_model = facts.facts_at(&model.root);
            !model.is_called || of_model.evaluates || of_model.trained == Some(0)
        };
        let mut all: Vec<UntrainedModel> =
            roots.into_iter().filter_map(other).map(model).filter(is_sure).collect();
        all.sort_by_key(|model| std::cmp::Reverse(model.bytes));
        all
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::EventName;
    use memtrace_trace::memory::Metric;

    use super::super::super::test_evidence::{GIB, MIB, call};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;
    use crate::options::Window;
    use crate::read::record::Record;
    use crate::state::replay::Replay;

    #[test]
    fn oom_names_a_model_that_the_step_does_not_train() {
        let symbols = SymbolTable::default();
        let owner = |module: &str, category| Owner {
            module: symbols.intern(module),
            category,
            ..Owner::from_row(&Record::default())
        };
        let mut calls = ModuleCalls::default();
        let mut replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        for (path, step) in [("Teacher.layer", 4), ("Student", 5), ("Reference", 5)] {
            replay.step = step;
            call(&mut calls, &replay, path, 0);
        }
        let live = [
            (owner("Teacher.layer", Category::Parameter), 300),
            (owner("Student.layer", Category::Parameter), 300),
            (owner("Reference", Category::Parameter), 200),
            (owner("Critic", Category::Parameter), 300),
            (owner("Critic", Category::OptimizerState), 300),
            (owner("Small", Category::Parameter), 1),
            (owner("(script)", Category::Parameter), 300),
        ];
        let mut facts = ModelFacts::default();
        let mut find = |mark: &str| {
            let row = Record {
                event: EventName::Mark,
                api: symbols.intern("model_fact"),
                name: symbols.intern(mark),
                ..Record::default()
            };
            facts.feed(&row, &symbols);
            let is_material = |bytes: i64| bytes >= 100;
            UntrainedModel::find(&live, "Student.layer", 5, &calls, &facts, &symbols, is_material)
        };
        let teacher = UntrainedModel {
            root: "Teacher".to_owned(),
            bytes: 300,
            is_called: false,
            last_step: Some(4),
            is_half: false,
        };
        // A model that this step has called may be trained, unless a mark says that it is not.
        assert_eq!(find("type=bfloat16 Other"), std::slice::from_ref(&teacher));
        let found = find("mode=eval Reference");
        assert_eq!(found[0], teacher);
        assert_eq!((&*found[1].root, found[1].is_called), ("Reference", true));
    }

    /// The forward of `Net` fails in step 2, with parameters of `Teacher` and `Vae`. `calls` says in which step a model
    /// was called.
    fn trace(calls: &[(&str, i64)], facts: &[&str]) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        trace.parameter(6 * GIB, "Teacher");
        trace.parameter(4 * GIB, "Vae");
        for (model, step) in calls {
            trace.call(model, model, *step);
        }
        for fact in facts {
            trace.fact(fact, 2);
        }
        trace.fill(512 * MIB, owner("Net", "forward", 2));
        trace.fails(GIB, owner("Net", "forward", 2));
        trace
    }

    #[test]
    fn oom_advises_to_delete_models_that_a_step_does_not_call() {
        trace(&[("Vae", 0)], &[]).prints(&[
            "try: del Teacher if it is done, or keep it on the CPU while it is not called: it was not called so far, and its parameters \
             take 6.00 GiB, may not be enough alone",
            "try: del Vae if it is done, or keep it on the CPU while it is not called: it was called last in step 0, and this is step 2, and \
             its parameters take 4.00 GiB, may not be enough alone",
        ]);
        trace(&[("Teacher", 2), ("Vae", -1)], &["trained=0 Teacher"]).prints(&[
            "try: Teacher.bfloat16(), because it is not trained: its parameters take 6.00 GiB, and then half of that, may not be enough \
             alone; or del Teacher, if it is done",
            "try: del Vae if it is done, or keep it on the CPU while it is not called: it was called only before training, and its \
             parameters take 4.00 GiB, may not be enough alone",
        ]);
        // It may be trained; it has 16 bits already.
        trace(&[("Teacher", 2)], &[]).never_prints("Teacher");
        trace(&[("Teacher", 2)], &["trained=0 Teacher", "type=bfloat16 Teacher"])
            .never_prints("Teacher.bfloat16()");
    }
}
