//! A program that needs more than the card has.

use memtrace_trace::units::Unit;

use super::super::evidence::{Evidence, StateToCome};
use super::super::finding::{Blame, Cause, Help, OomCase};
use super::super::layers_left::LayersLeft;
use super::fused_optimizer;
use crate::render::numbers::nth;

pub(super) static CAUSE: Cause = Cause {
    verdict: "too big",
    find: |_| Some(Blame::of(&CAUSE)),
    missing,
    because,
    outlook,
    help: Help::LowerNeed,
    ..Cause::DEFAULT
};

/// Returns the layers that were not reached if they raise the need above what the earlier steps took.
fn estimate_by_layers(evidence: &Evidence) -> Option<&LayersLeft> {
    let estimate = evidence.needs_at_least() + evidence.to_come.bytes;
    let layers = evidence.to_come.layers.as_ref();
    layers.filter(|left| left.bytes > 0 && estimate > evidence.needs_by_earlier_steps())
}

fn missing(case: &OomCase<'_>, units: Unit) -> String {
    let evidence = &case.evidence;
    let (bytes, of) = match evidence.short() {
        // Without a larger bound, the missing bytes of the request are the only figure.
        1 => (evidence.lacking(), " for this request"),
        short => (short, ""),
    };
    if evidence.device.capacity == 0 || bytes <= 0 {
        return String::new();
    }
    if evidence.device.needed_too_much().is_some() {
        return format!(": {} missing{of}", units.show(bytes));
    }
    // The layers that were not reached may take less than the earlier ones, so their estimate is no bound.
    let is_estimate = estimate_by_layers(evidence).is_some();
    let least = if is_estimate { "about" } else { "at least" };
    let whole = evidence.short_of_whole_step();
    let in_step = if whole > bytes {
        let until = match &evidence.to_come.of_optimizer {
            StateToCome { gradients: 0, .. } => "until this step ends".to_owned(),
            StateToCome { class: Some(class), .. } => format!("in a whole step with {class}"),
            StateToCome { .. } => "in a whole step if the optimizer is Adam".to_owned(),
        };
        // What the forward and the backward still need is unknown, unless layers or the optimizer's step
        // give an estimate.
        let is_bound = evidence.to_come.of_optimizer.gradients > 0 && !is_estimate;
        let about = if is_bound { "at least" } else { "about" };
        format!(", {about} {} {until}", units.show(whole))
    } else {
        String::new()
    };
    format!(": {least} {} missing{of}{in_step}", units.show(bytes))
}

fn because(case: &OomCase<'_>, units: Unit) -> String {
    let Evidence { request, device, torch, live, to_come, .. } = &case.evidence;
    let show = |bytes: i64| units.show(bytes).to_string();
    let card = show(device.capacity);
    if device.capacity == 0 {
        let (request, blocks) = (show(request.bytes), show(torch.allocated));
        return format!("{request} does not fit in addition to {blocks} of live blocks");
    }
    if let Some(needed) = device.needed_too_much() {
        let short = show(needed - device.capacity);
        return format!("the run needs {}, and the card has {card}: {short} too little", show(needed));
    }
    let at_least = needs_at_least(&case.evidence, units);
    let whole = case.evidence.needs_at_least() + to_come.bytes;
    if let Some(left) = estimate_by_layers(&case.evidence) {
        return format!(
            "{at_least}. The request was in the {} of {} layers ({}): about {} in all if each \
             layer takes as much, plus what runs after the layers",
            nth(left.number + 1),
            left.of,
            left.at,
            show(whole)
        );
    }
    if let Some((root, _)) = case.oom_state.being_moved() {
        return format!(
            "{} of {root}'s parameters are still on the CPU, so at least {} is needed, and the card has {card}. Training \
             adds gradients (as much as the {} of parameters) and the optimizer's state (with Adam twice as much)",
            show(to_come.parameters + request.bytes),
            show(whole),
            show(live.parameters + request.bytes + to_come.parameters)
        );
    }
    if to_come.bytes + to_come.temporaries > 0 && whole > case.evidence.needs_by_earlier_steps() {
        let of_step = if to_come.temporaries > 0 {
            let avoided = fused_optimizer::argument(&case.oom_state.whole.found.optimizers());
            let avoided = avoided.map(|(argument, _)| format!(" (none with {argument})")).unwrap_or_default();
            let with_results = show(whole + to_come.temporaries);
            format!(", about {with_results} with the temporary results of the optimizer's step{avoided}")
        } else {
            String::new()
        };
        return format!(
            "with the optimizer state that is not allocated yet, at least {} is needed{of_step}, \
             and the card has {card}",
            show(whole)
        );
    }
    let has_autograd = case.evidence.forwards.has_autograd;
    match to_come.layers.as_ref().filter(|left| left.bytes == 0 && has_autograd) {
        Some(left) => format!(
            "{at_least}. The request was in the {} of {} layers ({}), and the layers after it need memory, too",
            nth(left.number + 1),
            left.of,
            left.at
        ),
        None => at_least,
    }
}

/// Returns the lower bound of the need as a sentence.
fn needs_at_least(evidence: &Evidence, units: Unit) -> String {
    let show = |bytes: i64| units.show(bytes).to_string();
    let card = show(evidence.device.capacity);
    let (needs, by_steps) = (evidence.needs_at_least(), evidence.needs_by_earlier_steps());
    let began = evidence.steps.began + evidence.device.beside();
    if by_steps > needs.max(evidence.device.capacity) {
        format!(
            "at least {} is needed, and the card has {card}: this step began with {} in use, and each earlier \
             step took at least {} on top of that",
            show(by_steps),
            show(began),
            show(by_steps - began)
        )
    } else if needs > evidence.device.capacity {
        format!("at least {} is needed, and the card has {card}", show(needs))
    } else {
        let others = match &evidence.device {
            device if device.host.is_some() => "the system and other programs",
            device if device.are_others_guessed => "memory that other processes probably hold",
            _ => "other processes",
        };
        let rest = [
            (evidence.device.others, others),
            (evidence.torch.cached() - evidence.torch.private, "free pieces that are too small"),
            (evidence.torch.private, "free memory in private pools"),
        ];
        let rest: Vec<String> = rest
            .into_iter()
            .filter(|(bytes, _)| *bytes > 0)
            .map(|(bytes, what)| format!("{} of {what}", show(bytes)))
            .collect();
        let beside = if rest.is_empty() { String::new() } else { format!(", beside {}", rest.join(" and ")) };
        format!(
            "{} more did not fit: with it, blocks, context and libraries would take {} of {card}{beside}, and more may follow",
            show(evidence.request.bytes),
            show(needs)
        )
    }
}

/// Returns a sentence about the state that the optimizer will allocate if the request is in the first step.
fn outlook(case: &OomCase<'_>, units: Unit) -> String {
    let evidence = &case.evidence;
    let StateToCome { root, bytes, gradients, temporaries, class } = &evidence.to_come.of_optimizer;
    if *bytes == 0 || evidence.device.needed_too_much().is_some() {
        return String::new();
    }
    let state = units.show(*bytes);
    let whole = evidence.device.capacity + evidence.short_of_whole_step();
    let is_update = whole == evidence.needs_by_update();
    let whole = units.show(whole);
    // Without an estimate of the rest of the forward, the sum is a lower bound.
    let about = if estimate_by_layers(evidence).is_some() { "about" } else { "at least" };
    if is_update {
        let gradients = units.show(*gradients);
        let of_class = match class {
            Some(class) => format!("the state of {class}, {state}"),
            None => format!("the state of the optimizer (Adam: {state})"),
        };
        let of_class = if *temporaries == 0 {
            of_class
        } else {
            format!(
                "{of_class}, and the temporary results of its step, {} (none with fused=True)",
                units.show(*temporaries)
            )
        };
        return format!(
            " The gradients of {root}, {gradients}, and {of_class}, are still to come, so about {whole} in all."
        );
    }
    match class {
        Some(class) => {
            format!(" The state of {class} is still to come: {state} for {root}, so {about} {whole} in all.")
        }
        None => format!(
            " The state of the optimizer is still to come, and the optimizer is unknown: Adam needs {state} for \
             {root}, so {about} {whole} in all, and plain SGD needs none."
        ),
    }
}

pub(super) fn remark(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let needed = case.evidence.device.needed_too_much().filter(|_| !case.is_caused_by(&CAUSE))?;
    Some(format!("the run needs {}, more than the card has", units.show(needed)))
}

/// Returns a way to measure the whole need.
pub(super) fn remedy_if(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    (case.is_caused_by(&CAUSE) && case.evidence.device.needed.is_none()).then(|| {
        "if none of these is enough: memtrace run --past-oom --phantom CARD measures what the whole run needs; \
         memtrace advise --fit SIZE then combines changes"
            .to_owned()
    })
}

#[cfg(test)]
mod tests {
    use memtrace_trace::{Category, Meta, Row};

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// The forward of `Net` fails on a full card, at a request for 1 GiB.
    fn trace(mut trace: OomTrace, step: i64) -> OomTrace {
        trace.fill(512 * MIB, owner("Net", "forward", step));
        trace.fails(GIB, owner("Net", "forward", step));
        trace
    }

    /// Makes the optimizer one without state.
    fn with_sgd(mut trace: OomTrace) -> OomTrace {
        trace.fact("optimizer=SGD Net", 0);
        trace
    }

    #[test]
    fn oom_says_that_the_program_needs_more_than_the_card_has() {
        let first = || with_sgd(trace(OomTrace::new(24 * GIB), 0));
        let measure = "try: if none of these is enough: memtrace run --past-oom --phantom CARD measures what the whole run needs; memtrace \
                       advise --fit SIZE then combines changes";
        first().prints(&[
            "verdict: too big: at least 512.00 MiB missing. At least 24.50 GiB is needed, and the card has 24.00 GiB.",
            measure,
        ]);
        let measured = |bytes: i64| {
            let mut trace = first();
            trace.needed(bytes);
            trace
        };
        measured(40 * GIB).prints(&[
            "verdict: too big: 16.00 GiB missing. The run needs 40.00 GiB, and the card has 24.00 GiB: 16.00 GiB too little.",
        ]);
        measured(40 * GIB).never_prints("if none of these is enough");
        // The card is unknown.
        let mut unknown = OomTrace::without_sample(0, Meta::default());
        unknown.block(22 * GIB, owner("Net", "forward", 0));
        unknown.fails(GIB, owner("Net", "forward", 0));
        with_sgd(unknown)
            .prints(&["verdict: too big. 1.00 GiB does not fit in addition to 22.00 GiB of live blocks."]);
    }

    #[test]
    fn oom_remarks_that_the_program_needs_too_much_beside_another_cause() {
        let beside = |needed: i64| {
            let mut others = OomTrace::new(24 * GIB);
            others.sample(512 * MIB + 4 * GIB, &format!("others={}", 4 * GIB));
            let mut others = trace(others, 0);
            others.needed(needed);
            others
        };
        beside(30 * GIB).prints(&["also: the run needs 30.00 GiB, more than the card has"]);
        beside(23 * GIB).never_prints("the run needs");
    }

    #[test]
    fn oom_says_which_small_parts_of_the_card_are_free() {
        for (pool, what) in [(0, "free pieces that are too small"), (7, "free memory in private pools")] {
            let mut holes = OomTrace::new(24 * GIB);
            holes.hole(768 * MIB, pool);
            with_sgd(trace(holes, 0)).prints(&[&format!(
                "verdict: too big: at least 512.00 MiB missing for this request. 1.00 GiB more did not fit: with it, blocks, context and \
                 libraries would take 23.75 GiB of 24.00 GiB, beside 768.00 MiB of {what}, and more may follow."
            )]);
        }
        let others = |listed: &str, needs: &str, what: &str| {
            let mut others = OomTrace::new(24 * GIB);
            others.sample(512 * MIB + 2 * GIB, listed);
            with_sgd(trace(others, 0)).prints(&[&format!(
                "verdict: too big: at least 512.00 MiB missing. 1.00 GiB more did not fit: with it, blocks, context and libraries would \
                 take {needs} of 24.00 GiB, beside {what}, and more may follow."
            )]);
        };
        others(&format!("others={}", 2 * GIB), "22.50 GiB", "2.00 GiB of other processes");
        others("", "23.00 GiB", "1.50 GiB of memory that other processes probably hold");
        let shared = format!("others={} cache=0 host=0", 2 * GIB);
        others(&shared, "22.50 GiB", "2.00 GiB of the system and other programs");
    }

    #[test]
    fn oom_says_what_earlier_steps_took() {
        let step = |earlier: i64| {
            let mut trace = OomTrace::new(24 * GIB);
            for at in 0..2 {
                let id = trace.block(earlier, owner("Net", "forward", at));
                trace.free(id, earlier, owner("Net", "forward", at));
            }
            trace.block(8 * GIB, owner("(script)", "(none)", 1));
            trace.block(14 * GIB, owner("Net", "forward", 2));
            trace.fails(2 * GIB, owner("Net", "forward", 2));
            trace
        };
        step(20 * GIB).prints(&[
            "verdict: too big: at least 4.50 GiB missing. At least 28.50 GiB is needed, and the card has 24.00 GiB: this step began with \
             8.50 GiB in use, and each earlier step took at least 20.00 GiB on top of that.",
        ]);
        step(14 * GIB).prints(&[
            "verdict: too big: at least 512.00 MiB missing. At least 24.50 GiB is needed, and the card has 24.00 GiB.",
        ]);
    }

    #[test]
    fn oom_says_what_an_optimizer_is_still_to_allocate() {
        let adam = |parameters: i64, fact: &str| {
            let mut first = OomTrace::new(24 * GIB);
            first.parameter(parameters, "Net");
            if fact.starts_with("mode") {
                first.fact(fact, 0);
            }
            let mut first = trace(first, 0);
            first.fact(fact, 0);
            first
        };
        let is_needed = "At least 24.50 GiB is needed, and the card has 24.00 GiB.";
        // The next forward needs most.
        adam(4 * GIB, "optimizer=AdamW Net").prints(&[&format!(
            "verdict: too big: at least 512.00 MiB missing, at least 8.50 GiB in a whole step with AdamW. {is_needed} The state of AdamW is \
             still to come: 8.00 GiB for Net, so at least 32.50 GiB in all."
        )]);
        adam(4 * GIB, "type=float32 Net").prints(&[&format!(
            "verdict: too big: at least 512.00 MiB missing, at least 8.50 GiB in a whole step if the optimizer is Adam. {is_needed} The \
             state of the optimizer is still to come, and the optimizer is unknown: Adam needs 8.00 GiB for Net, so at least 32.50 GiB \
             in all, and plain SGD needs none."
        )]);
        // The update needs most.
        adam(20 * GIB, "optimizer=AdamW Net").prints(&[&format!(
            "verdict: too big: at least 512.00 MiB missing, at least 76.50 GiB in a whole step with AdamW. {is_needed} The gradients of \
             Net, 20.00 GiB, and the state of AdamW, 40.00 GiB, and the temporary results of its step, 20.00 GiB (none with fused=True), \
             are still to come, so about 100.50 GiB in all."
        )]);
        adam(20 * GIB, "type=float32 Net").prints(&[&format!(
            "verdict: too big: at least 512.00 MiB missing, at least 56.50 GiB in a whole step if the optimizer is Adam. {is_needed} The \
             gradients of Net, 20.00 GiB, and the state of the optimizer (Adam: 40.00 GiB), are still to come, so about 80.50 GiB in all."
        )]);
        adam(4 * GIB, "optimizer=SGD Net").never_prints("still to come");
        adam(4 * GIB, "mode=eval Net").never_prints("still to come");
    }

    #[test]
    fn oom_counts_the_state_that_an_optimizer_is_allocating_once() {
        let state = |allocated: i64, fact: &str| {
            let mut trace = OomTrace::new(13 * GIB);
            for _ in 0..2 {
                trace.parameter(1536 * MIB, "Net");
                trace.tagged(1536 * MIB, Category::Gradient, owner("Net", "backward", 0));
            }
            for _ in 0..allocated {
                trace.tagged(1536 * MIB, Category::OptimizerState, owner("(script)", "optimizer", 0));
            }
            trace.fill(512 * MIB, owner("(script)", "init", -1));
            trace.fails(1536 * MIB, Row { op: "aten::zeros_like", ..owner("(script)", "optimizer", 0) });
            trace.fact(fact, 0);
            trace
        };
        // The last state, after which the step has 3 GiB of temporary results.
        let adam = |avoided: &str| {
            format!(
                "verdict: too big: at least 1.00 GiB missing, about 4.00 GiB until this step ends. With the optimizer state that is not \
                 allocated yet, at least 14.00 GiB is needed, about 17.00 GiB with the temporary results of the optimizer's step (none with \
                 {avoided}), and the card has 13.00 GiB."
            )
        };
        state(3, "optimizer=AdamW Net").prints(&[&adam("fused=True")]);
        state(3, "optimizer=NAdam Net").prints(&[&adam("foreach=False")]);
        // All state is allocated, so the request is for a temporary result.
        state(4, "optimizer=AdamW Net").never_prints("optimizer state that is not allocated yet");
    }

    #[test]
    fn oom_says_how_many_layers_a_forward_has_not_reached() {
        let layers = |first: i64, second: i64| {
            let mut trace = OomTrace::new(24 * GIB);
            let layers = ["Net.h.0", "Net.h.1", "Net.h.2", "Net.h.3"];
            for layer in layers {
                trace.parameter(512, layer);
            }
            for (layer, bytes) in layers.into_iter().zip([first, second]) {
                trace.call(layer, "Block", 0);
                trace.block(bytes, owner(layer, "forward", 0));
            }
            trace.call(layers[2], "Block", 0);
            trace.fill(512 * MIB, owner("(script)", "init", -1));
            trace.fails(GIB, owner(layers[2], "forward", 0));
            trace
        };
        with_sgd(layers(4 * GIB, 4 * GIB)).prints(&[
            "verdict: too big: about 8.50 GiB missing. At least 24.50 GiB is needed, and the card has 24.00 GiB. The request was in the \
             3rd of 4 layers (Net.h.2): about 32.50 GiB in all if each layer takes as much, plus what runs after the layers.",
        ]);
        // Layers of unlike sizes predict nothing.
        let unlike = || with_sgd(layers(GIB, 4 * GIB));
        unlike().prints(&[
            "verdict: too big: at least 512.00 MiB missing. At least 24.50 GiB is needed, and the card has 24.00 GiB. The request was in \
             the 3rd of 4 layers (Net.h.2), and the layers after it need memory, too.",
        ]);
        // Without a graph, a layer keeps nothing.
        let mut evaluated = unlike();
        evaluated.found(&[]);
        evaluated.never_prints("layers after it");
    }

    #[test]
    fn oom_says_which_parameters_are_still_on_the_cpu() {
        let moved = |step: i64| {
            let mut trace = OomTrace::new(24 * GIB);
            trace.parameter(20 * GIB, "Unet");
            trace.fill(512 * MIB, owner("(script)", "init", -1));
            trace.fails(GIB, Row { op: "aten::_to_copy", ..owner("(script)", "init", step) });
            trace.fact(&format!("on_cpu={} Unet", 6 * GIB), step);
            trace
        };
        moved(-1).prints(&[
            "verdict: too big: at least 5.50 GiB missing. 6.00 GiB of Unet's parameters are still on the CPU, so at least 29.50 GiB is \
             needed, and the card has 24.00 GiB. Training adds gradients (as much as the 26.00 GiB of parameters) and the optimizer's state \
             (with Adam twice as much).",
        ]);
        moved(0).never_prints("still on the CPU");
    }
}
