//! A request that alone is larger than the memory that the card can give this process.

use super::super::finding::{Blame, Cause, Help};
use super::attention::is_attention;

pub(super) static CAUSE: Cause = Cause {
    verdict: "request too large",
    find: |evidence| {
        let most = evidence.device.capacity - evidence.device.unknown;
        (evidence.device.capacity > 0 && evidence.request.bytes > most).then(|| Blame::of(&CAUSE))
    },
    missing: |case, units| {
        let device = &case.evidence.device;
        let least = if device.needed_too_much().is_some() { "" } else { "at least " };
        format!(
            ": {least}{} missing",
            units.show(case.evidence.request.bytes - (device.capacity - device.unknown))
        )
    },
    because: |case, units| {
        let (request, card) = (case.evidence.request.bytes, case.evidence.device.capacity);
        format!("{} was asked for at once, and the card has {} in all", units.show(request), units.show(card))
    },
    tries: |case| match is_attention(case) {
        true => Vec::new(),
        false => vec!["make the inputs of this op smaller, or split the work into parts"],
    },
    help: Help::LowerNeed,
    ..Cause::DEFAULT
};
