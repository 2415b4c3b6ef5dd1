//! The sentences after the name of the cause: the missing bytes, and the figures that prove it.

use memtrace_trace::units::Unit;

use super::case::OomCase;
use super::cause::{Cause, StateToCome};
use super::kept::Kept;
use super::kept_remedies::remedy;
use super::layers_left::LayersLeft;
use crate::render::numbers::{counted, nth, upper_first};
use crate::state::model_facts::is_module;

impl OomCase<'_> {
    /// Returns the missing bytes for the line of the verdict; empty if the card had them or its size is
    /// unknown.
    pub(super) fn missing(&self, units: Unit) -> String {
        let facts = &self.facts;
        let (bytes, of) = match self.cause {
            // Without a larger bound, the missing bytes of the request are the only figure.
            Cause::TooBig if facts.short() == 1 => (facts.lacking(), " for this request"),
            Cause::TooBig => (facts.short(), ""),
            Cause::RequestTooLarge => (facts.request - (facts.capacity - facts.unknown), ""),
            Cause::Injected | Cause::Limit => (0, ""),
            _ => (facts.lacking(), " for this request"),
        };
        let is_measured = facts.needed.is_some_and(|needed| needed > facts.capacity)
            || !of.is_empty() && self.cause != Cause::TooBig;
        // The layers that were not reached may take less than the earlier ones, so their estimate is no bound.
        let is_estimate = self.cause == Cause::TooBig && self.estimate_by_layers().is_some();
        let least = match (is_measured, is_estimate) {
            (true, _) => "",
            (false, true) => "about ",
            (false, false) => "at least ",
        };
        if facts.capacity == 0 || bytes <= 0 {
            return String::new();
        }
        let whole = facts.short_of_whole_step();
        let in_step = if whole > bytes && !is_measured && self.cause == Cause::TooBig {
            let until = match &facts.of_optimizer {
                StateToCome { gradients: 0, .. } => "until this step ends".to_owned(),
                StateToCome { class: Some(class), .. } => format!("in a whole step with {class}"),
                StateToCome { .. } => "in a whole step if the optimizer is Adam".to_owned(),
            };
            // What the forward and the backward still need is unknown, unless layers or the optimizer's step
            // give an estimate.
            let is_bound = facts.of_optimizer.gradients > 0 && !is_estimate;
            let about = if is_bound { "at least" } else { "about" };
            format!(", {about} {} {until}", units.show(whole))
        } else {
            String::new()
        };
        format!(": {least}{} missing{of}{in_step}", units.show(bytes))
    }

    /// Returns the layers that were not reached if they raise the need above what the earlier steps took.
    pub(super) fn estimate_by_layers(&self) -> Option<&LayersLeft> {
        let facts = &self.facts;
        let estimate = facts.needs_at_least() + facts.to_come;
        self.layers.as_ref().filter(|left| left.bytes > 0 && estimate > facts.needs_by_earlier_steps())
    }

    /// Returns the reason, with the figures that prove it, as a sentence without a full stop.
    pub(super) fn because(&self, units: Unit) -> String {
        let facts = &self.facts;
        let show = |bytes: i64| units.show(bytes).to_string();
        let request = show(facts.request);
        let card = show(facts.capacity);
        let needs = facts.needs_at_least();
        let by_steps = facts.needs_by_earlier_steps();
        let at_least = if by_steps > needs.max(facts.capacity) {
            format!(
                "at least {} is needed, and the card has {card}: this step began with {}, and each earlier \
                 step took at least the rest on top of that",
                show(by_steps),
                show(facts.step_began)
            )
        } else if needs > facts.capacity {
            format!("at least {} is needed, and the card has {card}", show(needs))
        } else {
            format!(
                "{request} more did not fit: with it, blocks, context and libraries would take {} of {card}, beside {} \
                 of free pieces that are too small, and more may follow",
                show(needs),
                show(facts.cached())
            )
        };
        let kept_holder = self.kept.as_ref().map(|(holder, _)| holder);
        match (self.cause, &self.kept) {
            (Cause::Injected, _) => {
                format!("--phantom-fault made the request for {request} fail; the device had room")
            }
            (Cause::RequestTooLarge, _) => {
                format!("{request} was asked for at once, and the card has {card} in all")
            }
            (Cause::Limit, _) => {
                format!(
                    "{} is free on the device, but a limit of torch forbids its use",
                    self.room_text(units)
                )
            }
            (Cause::Grows, None) if facts.has_model_grown() => {
                facts.grown_model.map(|grown| grown.line(units)).unwrap_or_default()
            }
            (Cause::Grows, None | Some((_, Kept::Copies)))
                if facts.growth().is_none() && facts.are_copies_kept() =>
            {
                let holder = kept_holder.map(|holder| format!(". {}", upper_first(&holder.kept(units))));
                format!(
                    "parameters of {} were allocated in {}: copies of the model are kept{}",
                    show(facts.copies.bytes),
                    counted(facts.copies.steps as u64, "step"),
                    holder.unwrap_or_default()
                )
            }
            (Cause::Grows, kept) => {
                let growth = facts.growth();
                let grown = growth.map(|growth| {
                    format!(
                        "each step leaves {} behind, {} over the last {}{}; without it {request} would fit",
                        show(growth.per_step),
                        show(growth.total),
                        counted(growth.steps as u64, "step"),
                        if growth.total < facts.lacking() {
                            format!(
                                ", and needs more to work with it: {} more than step 1",
                                show(growth.risen)
                            )
                        } else {
                            String::new()
                        }
                    )
                });
                let held = kept.as_ref().map(|(holder, _)| match growth {
                    // The holder grows more slowly than all memory together, so its line says that its rate
                    // is only a part of the growth.
                    Some(growth) if holder.bytes_per_step() < Some(growth.per_step) => {
                        holder.line_with(units, "of it a step")
                    }
                    Some(_) => upper_first(&holder.kept(units)),
                    None => holder.line(units),
                });
                let state = facts.states.filter(|_| kept.is_none()).map(|states| {
                    format!(
                        "Optimizer state of {} was allocated in {}: old optimizers are kept",
                        show(states.bytes),
                        counted(states.steps as u64, "step")
                    )
                });
                let buffer = self.grown_buffer().filter(|_| kept.is_none()).map(|(owner, bytes)| {
                    let module = self.symbols.or_dash(owner.module);
                    let of = if is_module(&module) { format!(" of {module}") } else { String::new() };
                    format!("A buffer{of} has {} now, and was made anew in step {}", show(*bytes), owner.step)
                });
                [grown, held, state, buffer].into_iter().flatten().collect::<Vec<_>>().join(". ")
            }
            (Cause::Kept, Some((holder, why))) => {
                let beside = if *why == Kept::Loaded {
                    format!(", and the parameters themselves take {}", show(facts.parameters))
                } else {
                    String::new()
                };
                format!("{}: {}{beside}", holder.line(units), remedy(*why).0)
            }
            (Cause::HostMemory, _) => format!(
                "device and host share one memory, and this process holds {} of it on the host; without that, {request} \
                 would fit",
                show(facts.host.unwrap_or(0))
            ),
            (Cause::OtherProcess, _) if facts.host.is_some() => format!(
                "the system and other programs hold {} of the memory that the device shares; without them, {request} would \
                 fit",
                show(facts.others)
            ),
            (Cause::OtherProcess, _) => {
                let names = self.neighbours.as_ref().map(|others| format!(" ({})", others.text));
                format!(
                    "other processes hold {} of this card's {card}{}; without them, {request} would fit",
                    show(facts.others),
                    names.unwrap_or_default()
                )
            }
            (Cause::Fragmentation, _) if facts.is_private() => format!(
                "{} is free in private pools (CUDA graphs, torch.cuda.MemPool), where a request of another pool may not use it",
                show(facts.private)
            ),
            (Cause::Fragmentation, _) => format!(
                "{} is free in torch's cache and {} on the device, but the largest piece has {}, and {request} is needed",
                show(facts.cached()),
                self.room_text(units),
                show(facts.largest_hole)
            ),
            (Cause::OutsideTorch, _) if facts.outside < facts.large_context() => format!(
                "the CUDA context and untraced memory take {} instead of the usual 0.3 to 0.6 GiB; \
                 at the usual size, {request} would fit",
                show(facts.unknown)
            ),
            (Cause::OutsideTorch, _) => format!(
                "this process holds {} outside torch's allocator; without it, {request} would fit",
                show(facts.outside)
            ),
            (Cause::Kept, None) => format!(
                "{} of an earlier attempt, which ran out of memory, are still live: something refers to its variables, such as \
                 the traceback of its error; without them, {request} would fit",
                show(facts.of_failed_attempt)
            ),
            (Cause::TooBig, _) if facts.capacity > 0 => match facts.needed {
                Some(needed) if needed > facts.capacity => format!(
                    "the run needs {}, and the card has {card}: {} too little",
                    show(needed),
                    show(needed - facts.capacity)
                ),
                _ => match self.estimate_by_layers() {
                    Some(left) => format!(
                        "{at_least}. The request was in the {} of {} layers ({}): about {} in all if each \
                         layer takes as much, plus what runs after the layers",
                        nth(left.number + 1),
                        left.of,
                        left.at,
                        show(needs + facts.to_come)
                    ),
                    None if self.being_moved.is_some() => {
                        let root = self.being_moved.as_deref().unwrap_or_default();
                        let whole = facts.parameters + facts.request + facts.parameters_to_come;
                        format!(
                            "{} of {root}'s parameters are still on the CPU, so at least {} is needed, and the card has {card}. Training \
                             adds gradients (as much as the {} of parameters) and the optimizer's state (with Adam twice as much)",
                            show(facts.parameters_to_come + facts.request),
                            show(needs + facts.to_come),
                            show(whole)
                        )
                    }
                    None if facts.to_come > 0 && needs + facts.to_come > by_steps => {
                        let state = show(needs + facts.to_come);
                        let temporaries = facts.temporaries_to_come;
                        let of_step = format!(
                            ", about {} with the temporary results of the optimizer's step (none with \
                             fused=True)",
                            show(needs + facts.to_come + temporaries)
                        );
                        format!(
                            "with the optimizer state that is not allocated yet, at least {state} is needed{}, \
                             and the card has {card}",
                            if temporaries > 0 { of_step } else { String::new() }
                        )
                    }
                    None => match self.layers.as_ref().filter(|left| left.bytes == 0 && facts.has_autograd) {
                        Some(left) => {
                            format!(
                                "{at_least}. It was the {} of {} layers ({}), and the others need memory, too",
                                nth(left.number + 1),
                                left.of,
                                left.at
                            )
                        }
                        None => at_least,
                    },
                },
            },
            (Cause::TooBig, _) => {
                format!("{request} does not fit in addition to {} of live blocks", show(facts.allocated))
            }
        }
    }

    /// Returns a sentence about the state that the optimizer will allocate if the request is in the first
    /// step, or an empty text.
    pub(super) fn state_to_come(&self, units: Unit) -> String {
        let facts = &self.facts;
        let StateToCome { bytes, gradients, temporaries, class } = &facts.of_optimizer;
        let is_known = facts.needed.is_some_and(|needed| needed > facts.capacity);
        if self.cause != Cause::TooBig || *bytes == 0 || is_known {
            return String::new();
        }
        let (state, root) = (units.show(*bytes), &self.trained_root);
        let whole = facts.capacity + facts.short_of_whole_step();
        let is_update = whole == facts.needs_by_update();
        let whole = units.show(whole);
        // Without an estimate of the rest of the forward, the sum is a lower bound.
        let about = if self.estimate_by_layers().is_some() { "about" } else { "at least" };
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
                format!(
                    " The state of {class} is still to come: {state} for {root}, so {about} {whole} in all."
                )
            }
            None => format!(
                " The state of the optimizer is still to come, and the optimizer is unknown: Adam needs {state} for \
                 {root}, so {about} {whole} in all, and plain SGD needs none."
            ),
        }
    }
}
