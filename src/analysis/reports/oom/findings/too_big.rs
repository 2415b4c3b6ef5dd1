//! A program that needs more than the card has.

use memtrace_trace::units::Unit;

use super::super::evidence::{Evidence, StateToCome};
use super::super::finding::{Blame, Cause, Help, OomCase};
use super::super::layers_left::LayersLeft;
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
    if let Some((root, _)) = case.at.being_moved() {
        return format!(
            "{} of {root}'s parameters are still on the CPU, so at least {} is needed, and the card has {card}. Training \
             adds gradients (as much as the {} of parameters) and the optimizer's state (with Adam twice as much)",
            show(to_come.parameters + request.bytes),
            show(whole),
            show(live.parameters + request.bytes + to_come.parameters)
        );
    }
    if to_come.bytes > 0 && whole > case.evidence.needs_by_earlier_steps() {
        let of_step = if to_come.temporaries > 0 {
            format!(
                ", about {} with the temporary results of the optimizer's step (none with \
                 fused=True)",
                show(whole + to_come.temporaries)
            )
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
            "{at_least}. It was the {} of {} layers ({}), and the others need memory, too",
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
    if by_steps > needs.max(evidence.device.capacity) {
        format!(
            "at least {} is needed, and the card has {card}: this step began with {}, and each earlier \
             step took at least the rest on top of that",
            show(by_steps),
            show(evidence.steps.began)
        )
    } else if needs > evidence.device.capacity {
        format!("at least {} is needed, and the card has {card}", show(needs))
    } else {
        format!(
            "{} more did not fit: with it, blocks, context and libraries would take {} of {card}, beside {} \
             of free pieces that are too small, and more may follow",
            show(evidence.request.bytes),
            show(needs),
            show(evidence.torch.cached())
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
