//! Judges the trace of the step of training.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use memtrace_trace::csv::RowReader;
use memtrace_trace::{EventName, Meta};
use serde_json::Value;

use super::findings::{Findings, State};
use super::torch::nvtx_flavour;

/// What the trace of the step of training has.
#[derive(Default)]
pub(super) struct Seen {
    events: BTreeMap<&'static str, u64>,
    requested: u64,
    pub(super) with_op: u64,
    pub(super) with_module: u64,
    pub(super) with_stream: u64,
    pub(super) backward: u64,
    pub(super) nvtx: bool,
    pub(super) meta: Meta,
}

impl Seen {
    pub(super) fn read(path: &Path) -> Result<Seen> {
        let mut reader = RowReader::open(path)?;
        let mut seen = Seen { meta: reader.meta().clone(), ..Seen::default() };
        while let Some(row) = reader.next_row()? {
            *seen.events.entry(row.event.as_str()).or_default() += 1;
            seen.nvtx |= row.event == EventName::RangeBegin && row.api == "nvtx";
            if row.event == EventName::Alloc {
                seen.requested += u64::from(row.requested_bytes >= 0);
                seen.with_op += u64::from(row.op.starts_with("aten::"));
                seen.with_module += u64::from(row.module.starts_with("Linear"));
                seen.with_stream += u64::from(row.stream != 0);
                seen.backward += u64::from(row.phase == "backward");
            }
        }
        Ok(seen)
    }

    pub(super) fn of(&self, event: EventName) -> u64 {
        self.events.get(event.as_str()).copied().unwrap_or(0)
    }
}

/// Judges the trace of the step of training.
pub(super) fn captured(found: &mut Findings, seen: &Seen, answer: &Value) {
    let allocs = seen.of(EventName::Alloc);
    let show = |count: u64, what: &str| format!("{count} of {allocs} blocks {what}");
    let reported = seen.meta.allocator.caching && seen.meta.allocator.backend == "native";
    found.check(
        "blocks",
        allocs > 0,
        format!("{allocs} allocations, {} frees of the caching allocator", seen.of(EventName::Free)),
        (
            State::Missing,
            "no block was reported",
            "PYTORCH_CUDA_ALLOC_CONF with another backend, or caching off?",
        ),
    );
    let segments = seen.of(EventName::SegmentAlloc) + seen.of(EventName::SegmentMap);
    found.check(
        "segments",
        segments > 0 || !reported,
        format!("{segments} taken from CUDA"),
        (State::Degraded, "no segment was seen", "reserved memory is not in the trace"),
    );
    let fine = |count: u64| count > 0;
    found.check(
        "requested",
        fine(seen.requested),
        show(seen.requested, "have the size that was asked for"),
        (
            State::Degraded,
            "the size that was asked for is not seen",
            "requested_bytes is -1; please report this version",
        ),
    );
    found.check(
        "ops",
        fine(seen.with_op) && seen.of(EventName::Op) > 0,
        show(seen.with_op, "have an op"),
        (State::Degraded, "ops are not seen", "see MEMTRACE_OPS; please report this version"),
    );
    if seen.meta.ops == "io" {
        found.check(
            "io",
            seen.of(EventName::Io) > 0,
            format!("{} reads, writes and module calls", seen.of(EventName::Io)),
            (
                State::Degraded,
                "what ops read and write is not seen",
                "ops have the rows of MEMTRACE_OPS=all; please report this version",
            ),
        );
    }
    found.check(
        "modules",
        fine(seen.with_module),
        show(seen.with_module, "have a module"),
        (State::Degraded, "modules are not seen", "see MEMTRACE_MODULES; please report this version"),
    );
    found.check(
        "phases",
        fine(seen.backward),
        show(seen.backward, "are of the backward pass"),
        (State::Degraded, "the backward pass is not told apart", "name phases by NVTX ranges"),
    );
    found.check(
        "tags",
        seen.of(EventName::Tag) > 0,
        format!("{} for parameters, gradients and optimizer state", seen.of(EventName::Tag) / 2),
        (State::Degraded, "parameters are not told from activations", "reports infer categories instead"),
    );
    found.check(
        "streams",
        fine(seen.with_stream) && seen.of(EventName::FreeCompleted) > 0,
        "the stream of a block, and the end of its use by others",
        (State::Degraded, "streams are not seen in full", "active_bytes may be early"),
    );
    found.check(
        "pinned",
        seen.of(EventName::HostAlloc) > 0,
        format!("{} allocations of pinned memory", seen.of(EventName::HostAlloc)),
        (State::Degraded, "pinned memory is not seen", ""),
    );
    nvtx_flavour(found, answer, Some(seen.nvtx));
    let journal = &seen.meta.journal;
    found.check(
        "journal",
        !journal.is_empty(),
        format!("was {journal}"),
        (State::Degraded, "there was no place for it", "a killed process loses its last events"),
    );
    for what in &seen.meta.degraded {
        found.add("trace", State::Degraded, what.clone(), "");
    }
    let lost = seen.of(EventName::Lost);
    found.check(
        "trace",
        lost == 0 && seen.of(EventName::End) == 1,
        "complete, and nothing was lost",
        (State::Degraded, "it is incomplete", ""),
    );
}
