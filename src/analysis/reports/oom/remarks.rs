//! Further findings from the figures, in addition to the verdict.

use memtrace_trace::units::Unit;

use super::cause::{Cause, Facts};
use super::step_growth::growth;
use crate::render::numbers::counted;

impl Facts {
    /// Returns sentences (without a full stop) about memory that could be freed, in addition to the memory
    /// that the cause names.
    pub(super) fn remarks(&self, cause: Cause, units: Unit) -> Vec<String> {
        let mut found = Vec::new();
        let shown = |bytes: i64| units.show(bytes).to_string();
        if cause != Cause::OtherProcess && 20 * self.others >= self.capacity.max(1) {
            let who = if self.host.is_some() { "the system and other programs" } else { "other processes" };
            found.push(format!("{who} hold {} of this card", shown(self.others)));
        }
        if let Some(host) = self.host.filter(|host| 20 * host >= self.capacity.max(1))
            && cause != Cause::HostMemory
        {
            found.push(format!("this process holds {} on the host, in the same memory", shown(host)));
        }
        if cause != Cause::OutsideTorch && 20 * self.outside >= self.capacity.max(1) {
            found.push(format!("this process holds {} outside torch's allocator", shown(self.outside)));
        }
        if !matches!(cause, Cause::Fragmentation | Cause::Injected | Cause::Limit)
            && 50 * (self.cached() - self.private) >= self.capacity.max(1)
        {
            let is_enough = self.cached() - self.private + self.room >= self.request;
            found.push(format!(
                "{} is free in torch's cache, in pieces of at most {}: closing these holes would {}",
                shown(self.cached() - self.private),
                shown(self.largest_hole),
                match is_enough {
                    true if cause == Cause::TooBig && self.is_rest_open() => {
                        "make room for this request, and what the step needs after it is unknown"
                    }
                    true => "make room for this request, but the cause would remain",
                    false => "not be enough",
                }
            ));
        }
        if cause != Cause::Fragmentation && 20 * self.private >= self.capacity.max(1) {
            found.push(format!(
                "{} is free in private pools (CUDA graphs, torch.cuda.MemPool), where this request may not use it",
                shown(self.private)
            ));
        }
        if !matches!(cause, Cause::Grows)
            && let Some(growth) =
                growth(&self.steps).filter(|growth| 50 * growth.total >= self.capacity.max(1))
        {
            found.push(format!(
                "memory also grew by {} per step, {} in all; run memtrace leaks to see what grew",
                shown(growth.per_step),
                shown(growth.total)
            ));
        }
        if let Some((began, usual)) = self.larger_step().filter(|_| cause == Cause::TooBig) {
            found.push(format!(
                "this step took {} so far, and {} before it took at most {}: its inputs are larger, or it runs other code",
                shown(self.allocated + self.request - began),
                counted(self.steps.len() as u64, "step"),
                shown(usual)
            ));
        }
        found
    }
}
