//! The temporary results of an optimizer's step, which a fused optimizer does not have.

use memtrace_trace::units::Unit;

use super::super::finding::{OomCase, UNSURE};

/// The optimizers of torch that have a fused step.
const FUSED: [&str; 4] = ["Adam", "AdamW", "SGD", "Adagrad"];
/// The other optimizers of torch whose step works on all parameters at once, except with `foreach=False`.
const FOREACH: [&str; 7] = ["ASGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"];

/// Returns the argument with which a step makes no temporary results for all parameters, and the optimizers that take
/// it. `classes` has the optimizers that were found, with their options. Returns `None` if they take no such argument.
pub(super) fn argument(classes: &[&str]) -> Option<(&'static str, String)> {
    let name = |class: &str| class.split(',').next().unwrap_or(class).to_owned();
    let may_fuse = |class: &&str| FUSED.contains(&&*name(class)) && !class.contains(",fused");
    if classes.is_empty() || classes.iter().any(may_fuse) {
        return Some(("fused=True", "torch's Adam, AdamW, SGD or Adagrad".to_owned()));
    }
    let class = classes.iter().map(|class| name(class)).find(|name| FOREACH.contains(&&**name))?;
    Some(("foreach=False", format!("torch's {class}")))
}

pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let to_come = &case.evidence.to_come;
    // Other optimizers, such as Muon, have no fused step. While Adam still allocates state, its temporary
    // results are to come.
    let is_allocating = to_come.bytes + to_come.requested_state > 0;
    let is_to_come = is_allocating && case.oom_state.whole.found.has_foreach_adam();
    if !case.is_in_foreach && !is_to_come {
        return None;
    }
    let temporaries = Some(to_come.step_temporaries).filter(|bytes| case.evidence.is_material(*bytes))?;
    // While the optimizer still allocates state, the temporary results are still to come, so add them
    // to the need.
    let whole = case.evidence.needs_at_least() + to_come.bytes + temporaries;
    let is_short = is_allocating && temporaries < (whole - case.evidence.device.capacity) / 4 * 5;
    let (argument, optimizers) = argument(&case.oom_state.whole.found.optimizers())?;
    Some(format!(
        "{argument} for {optimizers}, whose step then needs no temporary results for all parameters: about {}{}",
        units.show(temporaries),
        if is_short { UNSURE } else { "" }
    ))
}

#[cfg(test)]
mod tests {
    use memtrace_trace::{Category, Row};

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// A step of an optimizer with gradients of 3 GiB fails. `facts` are found after it.
    fn trace(op: &'static str, frame: &str, facts: &[&str]) -> OomTrace {
        let mut trace = OomTrace::new(13 * GIB);
        let stack_id = trace.stack("op", frame);
        for _ in 0..2 {
            trace.parameter(1536 * MIB, "Net");
            trace.tagged(1536 * MIB, Category::Gradient, owner("Net", "backward", 0));
        }
        for _ in 0..4 {
            trace.tagged(1536 * MIB, Category::OptimizerState, owner("(script)", "optimizer", 0));
        }
        trace.fails(1536 * MIB, Row { op, stack_id, ..owner("(script)", "optimizer", 0) });
        for fact in facts {
            trace.fact(fact, 0);
        }
        trace
    }

    #[test]
    fn oom_advises_an_optimizer_without_temporary_results() {
        let fused = "try: fused=True for torch's Adam, AdamW, SGD or Adagrad, whose step then needs no temporary results for all \
                     parameters: about 3.00 GiB";
        trace("aten::_foreach_sqrt", "aten::_foreach_sqrt", &[]).prints(&[fused]);
        trace("aten::empty_strided", "aten::_foreach_sqrt", &["optimizer=AdamW Net"]).prints(&[fused]);
        trace("aten::_foreach_sqrt", "aten::_foreach_sqrt", &["optimizer=RMSprop,momentum Net"]).prints(&[
            "try: foreach=False for torch's RMSprop, whose step then needs no temporary results for all parameters: about 3.00 GiB",
        ]);
        // A step that works on one parameter at a time, and optimizers that have no such argument or are fused already.
        trace("aten::sqrt", "aten::sqrt", &["optimizer=AdamW Net"]).never_prints("temporary results for all");
        for class in ["optimizer=Muon Net", "optimizer=AdamW,fused Net"] {
            trace("aten::_foreach_sqrt", "aten::_foreach_sqrt", &[class])
                .never_prints("temporary results for all");
        }
    }

    #[test]
    fn oom_advises_a_fused_adam_before_the_results_are_allocated() {
        let adam = |left: i64, class: &str| {
            let mut trace = OomTrace::new(13 * GIB);
            for bytes in [3 * GIB, left] {
                trace.parameter(bytes, "Net");
                trace.tagged(bytes, Category::Gradient, owner("Net", "backward", 0));
            }
            // The second state of the second parameter is to come.
            for bytes in [3 * GIB, 3 * GIB, left] {
                trace.tagged(bytes, Category::OptimizerState, owner("(script)", "optimizer", 0));
            }
            trace.fill(0, owner("(script)", "init", -1));
            trace.fails(left, Row { op: "aten::zeros_like", ..owner("(script)", "optimizer", 0) });
            trace.fact(class, 0);
            trace
        };
        adam(64 * MIB, "optimizer=AdamW Net").prints(&[
            "try: fused=True for torch's Adam, AdamW, SGD or Adagrad, whose step then needs no temporary results for all parameters: about \
             3.06 GiB, may not be enough alone",
        ]);
        adam(64 * MIB, "optimizer=Adamax Net").never_prints("temporary results for all");
    }
}
