//! A model whose forward keeps a graph although no optimizer has its parameters, such as a frozen encoder that was
//! not set to evaluation mode.

use std::collections::BTreeMap;

use memtrace_trace::Category;
use memtrace_trace::units::Unit;
use rustc_hash::{FxHashMap, FxHashSet};

use super::super::finding::OomCase;
use super::super::found_at_oom::FoundAtOom;
use super::super::module_calls::ModuleCalls;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::state::block::Owner;
use crate::state::model_facts::{ModelFacts, is_inside, is_module, root_of};

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let (at, has_autograd) = (case.oom_state, case.evidence.forwards.has_autograd);
    let (calls, facts) = (&at.seen.calls, &at.seen.facts);
    let UnoptimizedGraph { path, bytes } = UnoptimizedGraph::find(
        &case.live,
        at.row.step,
        calls,
        facts,
        &at.whole.found,
        has_autograd,
        at.symbols(),
    )
    .filter(|graph| case.evidence.is_material(graph.bytes))?;
    Some(format!(
        "torch.no_grad() around the forward of {path}, if nothing trains through it: no optimizer has its parameters, and it keeps \
         a graph for a backward: {} of activations{}",
        units.show(bytes),
        case.unsure(bytes)
    ))
}

/// A module has the results of its parent if it has at least this share of them.
const MOST_RESULTS: f64 = 0.9;

/// A model without an optimizer, whose results are live.
#[derive(Clone, Debug, PartialEq, Eq)]
struct UnoptimizedGraph {
    /// The path of the innermost module that has most of the results.
    path: String,
    /// The bytes of the results.
    bytes: i64,
}

/// The live blocks of a model.
#[derive(Default)]
struct Part {
    parameters: i64,
    has_state: bool,
    /// True if it gathers parameters that are sharded. Its optimizer may then have other tensors than its parameters.
    is_sharded: bool,
    results: FxHashMap<Symbol, i64>,
}

impl UnoptimizedGraph {
    /// Returns the model with the most results among those whose parameters no optimizer has. `live` has the owner
    /// and the size of each live block. `has_autograd` is false if no graph exists.
    ///
    /// All calls of the model in the step must precede the first call of each model that an optimizer has: the
    /// results of a later one, such as a network that computes a loss, carry the gradient of the earlier ones.
    ///
    /// Parts of a model are not judged: whether an optimizer has their parameters is known only by its state, which
    /// a part without a first update, or under an optimizer without state, does not have.
    fn find(
        live: &[(Owner, i64)],
        step: i64,
        calls: &ModuleCalls,
        facts: &ModelFacts,
        found: &FoundAtOom,
        has_autograd: bool,
        symbols: &SymbolTable,
    ) -> Option<UnoptimizedGraph> {
        if !has_autograd {
            return None;
        }
        let mut parts: BTreeMap<String, Part> = BTreeMap::new();
        for (owner, bytes) in live {
            let path = symbols.or_dash(owner.module);
            if !is_module(&path) {
                continue;
            }
            let part = parts.entry(root_of(&path).to_owned()).or_default();
            part.is_sharded |= owner.category == Category::UnshardedParameter;
            match owner.category.without_sharding() {
                Category::Parameter => part.parameters += bytes,
                Category::OptimizerState => part.has_state = true,
                Category::Activation | Category::AutogradDetail if owner.step == step => {
                    *part.results.entry(owner.module).or_default() += bytes;
                }
                _ => {}
            }
        }
        let has_optimizer = |path: &str| parts[path].has_state || found.has_optimizer(path);
        let (trained, others): (Vec<_>, Vec<_>) = parts.keys().partition(|path| has_optimizer(path));
        if trained.is_empty() {
            return None;
        }
        let calls_of = |path: &str| calls.calls_of(path, step, symbols);
        let first_trained = trained.iter().filter_map(|path| Some(calls_of(path)?.0)).min();
        let keeps = |path: &str, part: &Part| {
            let holding: FxHashSet<Symbol> = part.results.keys().copied().collect();
            calls.keep_graph_among(step, &holding, |name| is_inside(&symbols.get(name), path))
        };
        let graphs = others.into_iter().filter_map(|path| {
            let part = &parts[path];
            let may_train =
                part.parameters > 0 && facts.facts_at(path).trained != Some(0) && !part.is_sharded;
            if !may_train {
                return None;
            }
            let (_, last) = calls_of(path)?;
            let is_it = first_trained.is_none_or(|first| last < first) && keeps(path, part);
            let bytes = part.results.values().sum();
            is_it.then(|| UnoptimizedGraph { path: innermost(path, &part.results, symbols), bytes })
        });
        graphs.max_by_key(|graph| graph.bytes)
    }
}

/// Returns the path of the innermost module, at or below `path`, that has most of `results`.
fn innermost(path: &str, results: &FxHashMap<Symbol, i64>, symbols: &SymbolTable) -> String {
    let whole: i64 = results.values().sum();
    let mut path = path.to_owned();
    loop {
        let mut below: BTreeMap<String, i64> = BTreeMap::new();
        for (module, bytes) in results {
            let module = symbols.get(*module);
            let rest = module.strip_prefix(&*path).and_then(|rest| rest.strip_prefix('.'));
            if let Some(name) = rest.and_then(|rest| rest.split('.').next()) {
                *below.entry(format!("{path}.{name}")).or_default() += bytes;
            }
        }
        match below.into_iter().find(|(_, bytes)| *bytes as f64 >= MOST_RESULTS * whole as f64) {
            Some((inner, _)) => path = inner,
            None => return path,
        }
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::memory::Metric;

    use super::super::super::test_evidence::{GIB, MIB, call};
    use super::super::super::test_trace::{OomTrace, owner};
    use super::*;
    use crate::options::Window;
    use crate::read::record::Record;
    use crate::state::replay::Replay;

    /// Calls modules below these parents in this order, each of which keeps a result and a parameter. Returns the
    /// graph without an optimizer that is found if `Unet` and the models in `optimized` have state.
    fn found(parents: &[&str], optimized: &[&str], has_autograd: bool) -> Option<UnoptimizedGraph> {
        let symbols = SymbolTable::default();
        let replay = Replay::new(&symbols, Window::default(), Metric::Allocated);
        let (mut calls, mut live) = (ModuleCalls::default(), Vec::new());
        for (at, parent) in parents.iter().enumerate() {
            for index in 0..9 {
                let path = format!("{parent}.{index}");
                call(&mut calls, &replay, &path, (10 * at + index) as i64);
                let mut block = |category, bytes| {
                    let row = Record { module: symbols.intern(&path), category, ..Record::default() };
                    live.push((Owner { step: replay.step, ..Owner::from_row(&row) }, bytes));
                };
                block(Category::Activation, 100);
                block(Category::Parameter, 10);
                if *parent == "Unet" || optimized.contains(parent) {
                    block(Category::OptimizerState, 20);
                }
            }
        }
        let (facts, marks) = (ModelFacts::default(), FoundAtOom::default());
        UnoptimizedGraph::find(&live, replay.step, &calls, &facts, &marks, has_autograd, &symbols)
    }

    #[test]
    fn oom_names_an_encoder_that_no_optimizer_has() {
        let graph = |path: &str| Some(UnoptimizedGraph { path: path.to_owned(), bytes: 900 });
        assert_eq!(found(&["Vae.encoder", "Unet"], &[], true), graph("Vae.encoder"));
        // A part of a model: its optimizer may have no state.
        assert_eq!(found(&["Net.vae", "Net.unet"], &["Net.unet"], true), None);
        // No graph; an optimizer for it; no optimizer at all.
        assert_eq!(found(&["Vae.encoder", "Unet"], &[], false), None);
        assert_eq!(found(&["Vae.encoder", "Unet"], &["Vae.encoder"], true), None);
        assert_eq!(found(&["Vae.encoder", "Net"], &[], true), None);
        // The gradient of a network that computes a loss flows back into the model before it.
        assert_eq!(found(&["Unet", "Vgg.features"], &[], true), None);
        // It has already computed the features of the target.
        assert_eq!(found(&["Vgg.features", "Unet", "Vgg.features"], &[], true), None);
    }

    #[test]
    fn oom_advises_no_grad_for_a_model_that_no_optimizer_has() {
        let trains = |root: &str| {
            let mut trace = OomTrace::new(24 * GIB);
            for root in ["Vae", "Unet"] {
                trace.parameter(512, root);
                for index in 0..9 {
                    let path = format!("{root}.{index}");
                    trace.call(&path, "Block", 0);
                    trace.block(GIB, owner(&path, "forward", 0));
                }
            }
            trace.tagged(512, Category::OptimizerState, owner(root, "init", -1));
            trace.fill(512 * MIB, owner("Unet", "forward", 0));
            trace.fails(GIB, owner("Unet", "forward", 0));
            trace
        };
        trains("Unet").prints(&[
            "try: torch.no_grad() around the forward of Vae, if nothing trains through it: no optimizer has its parameters, and it keeps a \
             graph for a backward: 9.00 GiB of activations, may not be enough alone",
        ]);
        trains("Vae").never_prints("no optimizer has its parameters");
    }
}
