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
    (case.at.is_in_script() && case.evidence.is_material(bytes)).then(|| {
        format!(
            "keep on the CPU what the script makes outside of the model, such as its outputs (torch.zeros(..., device=\"cpu\"), \
             .cpu(); device=\"cpu\" for MONAI's sliding_window_inference), or give it a smaller type: {} in {} now",
            units.show(bytes),
            counted(made().count() as u64, "tensor")
        )
    })
}
