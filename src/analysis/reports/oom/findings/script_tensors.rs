//! Tensors that the script makes outside of the model, such as its outputs.

use memtrace_trace::Category;
use memtrace_trace::rounding::SMALL_SIZE;
use memtrace_trace::units::Unit;

use super::super::finding::OomCase;
use crate::render::numbers::counted;
use crate::state::block::Owner;

/// Names the tensors that the script has made since the first step, and still holds, if the request is for
/// another one.
pub(super) fn remedy(case: &OomCase<'_>, units: Unit) -> Option<String> {
    let is_made = |(owner, bytes): &&(Owner, i64)| {
        owner.category == Category::Script && owner.step >= 0 && *bytes > SMALL_SIZE as i64
    };
    let made = || case.live.iter().filter(is_made);
    let bytes = made().map(|(_, bytes)| bytes).sum();
    (case.oom_state.is_in_script() && case.evidence.is_material(bytes)).then(|| {
        format!(
            "keep on the CPU what the script makes outside of the model, such as its outputs (torch.zeros(..., device=\"cpu\"), \
             .cpu(); device=\"cpu\" for MONAI's sliding_window_inference), or give it a smaller type: {} in {} now",
            units.show(bytes),
            counted(made().count() as u64, "tensor")
        )
    })
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::super::super::test_evidence::{GIB, MIB};
    use super::super::super::test_trace::{OomTrace, owner};

    /// A script that has made three tensors in `made` fails at another request.
    fn trace(made: Row<'_>, bytes: i64, failed: Row<'_>) -> OomTrace {
        let mut trace = OomTrace::new(24 * GIB);
        for _ in 0..3 {
            trace.block(bytes, made);
        }
        trace.fill(512 * MIB, owner("Net", "forward", 0));
        trace.fails(2 * GIB, failed);
        trace
    }

    #[test]
    fn oom_advises_to_keep_what_the_script_makes_on_the_cpu() {
        let script = owner("(script)", "(none)", 0);
        trace(script, 2 * GIB, script).prints(&[
            "try: keep on the CPU what the script makes outside of the model, such as its outputs (torch.zeros(..., device=\"cpu\"), \
             .cpu(); device=\"cpu\" for MONAI's sliding_window_inference), or give it a smaller type: 6.00 GiB in 3 tensors now",
        ]);
        for (made, bytes, failed) in [
            // Made before the first step; too small; a request of the model.
            (owner("(script)", "(none)", -1), 2 * GIB, script),
            (script, 512 * MIB, script),
            (script, 2 * GIB, owner("Net", "forward", 0)),
        ] {
            trace(made, bytes, failed).never_prints("what the script makes outside of the model");
        }
    }
}
