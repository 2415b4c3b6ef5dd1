//! A server (vLLM) that limits itself to a share of the card.

use memtrace_trace::units::Unit;

use super::super::finding::OomCase;

pub(super) fn remedy(case: &OomCase<'_>, _units: Unit) -> Option<String> {
    let (server, evidence) = (case.at.whole.server?, &case.evidence);
    server.smaller_trial().or_else(|| server.less_cache(evidence.lacking(), evidence.device.capacity))
}
