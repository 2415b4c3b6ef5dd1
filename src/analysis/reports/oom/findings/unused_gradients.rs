//! Parameters that require a gradient although no optimizer has them.

use memtrace_trace::Category;
use memtrace_trace::units::Unit;

use super::super::finding::OomCase;
use super::super::found_at_oom::FoundAtOom;
use crate::read::symbols::SymbolTable;
use crate::state::block::Owner;
use crate::state::model_facts::{is_inside, root_of};

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let (at, evidence) = (case.oom_state, &case.evidence);
    let unused = UnusedGradients::find(&case.live, at.row.step, &at.whole.found, at.symbols())
        .filter(|unused| evidence.forwards.has_autograd && evidence.is_material(unused.cost()))?;
    Some(unused.line(units, case.unsure(unused.bytes)))
}

/// Parameters without an optimizer, and what they make the step keep; sizes are in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UnusedGradients {
    /// The path of the innermost module with all these parameters.
    path: String,
    /// The bytes of the parameters. Their gradients take as many.
    bytes: i64,
    /// True if an optimizer has other parameters of this model, such as adapters.
    is_partial: bool,
    /// The live results of the module in this step, if no optimizer has any part of the model.
    results: i64,
}

impl UnusedGradients {
    /// Returns the module whose parameters without an optimizer cost most. `live` has the owner and the size of each
    /// live block.
    fn find(
        live: &[(Owner, i64)],
        step: i64,
        found: &FoundAtOom,
        symbols: &SymbolTable,
    ) -> Option<UnusedGradients> {
        let unused = found.without_optimizer().map(|(path, bytes)| {
            let is_partial = found.has_optimizer(root_of(path));
            let sum = |counts: &dyn Fn(&Owner) -> bool| {
                let is_of_path = |owner: &Owner| is_inside(&symbols.or_dash(owner.module), path);
                let counted = live.iter().filter(|(owner, _)| counts(owner) && is_of_path(owner));
                counted.fold(0_i64, |sum, (_, bytes)| sum.saturating_add(*bytes))
            };
            let is_result = |owner: &Owner| {
                owner.step == step
                    && matches!(owner.category, Category::Activation | Category::AutogradDetail)
            };
            let gradients = sum(&|owner| owner.category == Category::Gradient);
            let results = if is_partial { 0 } else { sum(&is_result) };
            (UnusedGradients { path: path.to_owned(), bytes, is_partial, results }, gradients)
        });
        // A model that is called only under `torch.no_grad()`, such as a teacher or an average of the weights, has
        // such parameters, too, but neither gradients nor results that wait for a backward.
        let costs = |(unused, gradients): &(UnusedGradients, i64)| {
            2 * (*gradients).min(unused.bytes) >= unused.bytes || 2 * unused.results >= unused.bytes
        };
        unused.filter(costs).map(|(unused, _)| unused).max_by_key(UnusedGradients::cost)
    }

    /// Returns an upper bound of the bytes that freezing the parameters saves.
    fn cost(&self) -> i64 {
        self.bytes.saturating_add(self.results)
    }

    /// Returns the remedy. `unsure` is the text after a saving that may not be enough.
    fn line(&self, units: Unit, unsure: &str) -> String {
        let UnusedGradients { path, bytes, is_partial, results } = self;
        let (gradients, results) = (units.show(*bytes), units.show(*results));
        if *is_partial {
            return format!(
                "requires_grad_(False) for the parameters of {path} that no optimizer has: their gradients take {gradients} \
                 after a backward, no optimizer uses them, and its zero_grad() does not free them{unsure}"
            );
        }
        format!(
            "{path}.requires_grad_(False), because no optimizer has its parameters: their gradients take {gradients}, and a call \
             on an input without a gradient, such as the target of a loss, then keeps no graph (its results take {results} now, \
             in all calls){unsure}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;
    use crate::read::record::Record;

    #[test]
    fn oom_names_parameters_that_no_optimizer_has() {
        let symbols = SymbolTable::default();
        let mut found = FoundAtOom::default();
        let block = |path: &str, category: Category, bytes: i64| {
            let row = Record { module: symbols.intern(path), category, ..Record::default() };
            (Owner { step: 3, ..Owner::from_row(&row) }, bytes)
        };
        let mut live: Vec<(Owner, i64)> = ["GPT.blocks.0", "Loss.vgg.0", "Loss.vgg2", "Generator.up"]
            .map(|path| block(path, Category::Activation, 5 << 30))
            .to_vec();
        // A teacher under `torch.no_grad()` has neither gradients nor a graph.
        let mut teacher = FoundAtOom::default();
        teacher.note("no_optimizer=1073741824 Teacher");
        assert_eq!(UnusedGradients::find(&live, 3, &teacher, &symbols), None);
        live.push(block("GPT.blocks.0", Category::Gradient, 1 << 30));
        let find = |found: &FoundAtOom| UnusedGradients::find(&live, 3, found, &symbols);
        assert_eq!(find(&found), None);
        found.note("no_optimizer=1073741824 GPT");
        found.note("optimizer=AdamW GPT");
        assert_eq!(
            find(&found).unwrap().line(Unit::default(), ""),
            "requires_grad_(False) for the parameters of GPT that no optimizer has: their gradients take 1.00 GiB after a backward, \
             no optimizer uses them, and its zero_grad() does not free them"
        );
        found.note("no_optimizer=1048576 Loss.vgg");
        let vgg = find(&found).unwrap();
        assert_eq!(vgg.cost(), (5 << 30) + (1 << 20));
        assert_eq!(
            vgg.line(Unit::default(), ", may not be enough alone"),
            "Loss.vgg.requires_grad_(False), because no optimizer has its parameters: their gradients take 1.00 MiB, and a call on an \
             input without a gradient, such as the target of a loss, then keeps no graph (its results take 5.00 GiB now, in all \
             calls), may not be enough alone"
        );
        // Only parameters in an optimizer get state.
        let state = found.state_of("GPT", 3 << 30);
        assert_eq!((state.bytes, state.gradients, state.temporaries), (4 << 30, 3 << 30, 2 << 30));
        let none = found.state_of("Loss", 1 << 20);
        assert_eq!((none.bytes, none.gradients), (0, 0));
    }

    #[test]
    fn oom_advises_to_freeze_parameters_that_no_optimizer_has() {
        let gradients = |bytes: i64| {
            let mut trace = OomTrace::new(24 * GIB);
            trace.parameter(4 * GIB, "Net.base");
            trace.tagged(bytes, Category::Gradient, owner("Net.base", "backward", 0));
            trace.fill(512 * MIB, owner("Net", "forward", 1));
            trace.fails(GIB, owner("Net", "forward", 1));
            trace.fact(&format!("no_optimizer={} Net.base", 4 * GIB), 1);
            trace.fact("optimizer=AdamW Net", 1);
            trace
        };
        gradients(4 * GIB).prints(&[
            "try: requires_grad_(False) for the parameters of Net.base that no optimizer has: their gradients take 4.00 GiB after a \
             backward, no optimizer uses them, and its zero_grad() does not free them, may not be enough alone",
        ]);
        gradients(GIB).never_prints("requires_grad_(False)");
    }
}
