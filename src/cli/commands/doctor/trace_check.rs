//! Checks the trace of the training step.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Result;
use memtrace_trace::counts::counted;
use memtrace_trace::csv::RowReader;
use memtrace_trace::{EventName, Meta};
use serde_json::Value;

use super::findings::{Findings, State};
use super::torch::check_nvtx;

/// The rows in the trace of the training step: the number of each event, and the number of allocations with
/// each property.
#[derive(Default)]
pub(super) struct TraceCounts {
    events: BTreeMap<&'static str, u64>,
    requested: u64,
    pub(super) with_op: u64,
    pub(super) with_module: u64,
    pub(super) with_stream: u64,
    pub(super) backward: u64,
    pub(super) nvtx: bool,
    pub(super) meta: Meta,
}

impl TraceCounts {
    /// Reads the trace at `path`.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub(super) fn read(path: &Path) -> Result<TraceCounts> {
        let mut reader = RowReader::open(path)?;
        let mut counts = TraceCounts { meta: reader.meta().clone(), ..TraceCounts::default() };
        while let Some(row) = reader.next_row()? {
            *counts.events.entry(row.event.as_str()).or_default() += 1;
            counts.nvtx |= row.event == EventName::RangeBegin && row.api == "nvtx";
            if row.event == EventName::Alloc {
                counts.requested += u64::from(row.requested_bytes >= 0);
                counts.with_op += u64::from(row.op.starts_with("aten::"));
                counts.with_module += u64::from(row.module.starts_with("Linear"));
                counts.with_stream += u64::from(row.stream != 0);
                counts.backward += u64::from(row.phase == "backward");
            }
        }
        Ok(counts)
    }

    pub(super) fn rows(&self, event: EventName) -> u64 {
        self.events.get(event.as_str()).copied().unwrap_or(0)
    }
}

/// Checks the trace of the training step, feature by feature.
pub(super) fn check_trace(findings: &mut Findings, counts: &TraceCounts, probe: &Value) {
    let allocs = counts.rows(EventName::Alloc);
    let show = |count: u64, have: &str| format!("{count} of {} with {have}", counted(allocs, "block"));
    let reported = counts.meta.allocator.caching && counts.meta.allocator.backend == "native";
    findings.check(
        "blocks",
        allocs > 0,
        format!(
            "the caching allocator reported {} and {}",
            counted(allocs, "allocation"),
            counted(counts.rows(EventName::Free), "free")
        ),
        (
            State::Missing,
            "the caching allocator reported no block",
            "does PYTORCH_CUDA_ALLOC_CONF choose another backend, or is caching switched off?",
        ),
    );
    let segments = counts.rows(EventName::SegmentAlloc) + counts.rows(EventName::SegmentMap);
    findings.check(
        "segments",
        segments > 0 || !reported,
        format!("{} allocated from CUDA", counted(segments, "segment")),
        (State::Degraded, "no segment was traced", "the trace has no reserved memory"),
    );
    let fine = |count: u64| count > 0;
    findings.check(
        "requested",
        fine(counts.requested),
        show(counts.requested, "a requested size"),
        (
            State::Degraded,
            "blocks have no requested size",
            "requested_bytes is -1; please report this version of torch",
        ),
    );
    findings.check(
        "ops",
        fine(counts.with_op) && counts.rows(EventName::Op) > 0,
        show(counts.with_op, "an op"),
        (
            State::Degraded,
            "ops are not traced",
            "is MEMTRACE_OPS set? if not, please report this version of torch",
        ),
    );
    if counts.meta.ops == "io" {
        findings.check(
            "io",
            counts.rows(EventName::Io) > 0,
            format!("{} of reads, writes and module calls", counted(counts.rows(EventName::Io), "row")),
            (
                State::Degraded,
                "the tensors that ops read and write are not traced",
                "MEMTRACE_OPS=io acts as MEMTRACE_OPS=all; please report this version of torch",
            ),
        );
    }
    findings.check(
        "modules",
        fine(counts.with_module),
        show(counts.with_module, "a module"),
        (
            State::Degraded,
            "modules are not traced",
            "is MEMTRACE_MODULES=0 set? if not, please report this version of torch",
        ),
    );
    findings.check(
        "phases",
        fine(counts.backward),
        format!("{} in the backward pass", counted(counts.backward, "block")),
        (State::Degraded, "the backward pass is not recognized", "mark the phases with NVTX ranges"),
    );
    findings.check(
        "tags",
        counts.rows(EventName::Tag) > 0,
        format!(
            "{} of parameters, gradients and optimizer state",
            counted(counts.rows(EventName::Tag) / 2, "tag")
        ),
        (
            State::Degraded,
            "parameters, gradients and optimizer state are not tagged",
            "reports infer the categories",
        ),
    );
    findings.check(
        "streams",
        fine(counts.with_stream) && counts.rows(EventName::FreeCompleted) > 0,
        "each block has its stream, and a freed block stays active while other streams use it",
        (State::Degraded, "streams are only partly traced", "active_bytes may fall too early"),
    );
    findings.check(
        "pinned",
        counts.rows(EventName::HostAlloc) > 0,
        format!("{} of pinned memory", counted(counts.rows(EventName::HostAlloc), "allocation")),
        (State::Degraded, "pinned memory is not traced", ""),
    );
    check_nvtx(findings, probe, Some(counts.nvtx));
    let journal = &counts.meta.journal;
    findings.check(
        "journal",
        !journal.is_empty(),
        format!("kept in {journal}"),
        (State::Degraded, "there was no space for the journal", "a killed process loses its last events"),
    );
    for problem in &counts.meta.degraded {
        findings.add("trace", State::Degraded, problem.clone(), "");
    }
    let lost = counts.rows(EventName::Lost);
    findings.check(
        "trace",
        lost == 0 && counts.rows(EventName::End) == 1,
        "complete, no event lost",
        (State::Degraded, "the trace is incomplete", ""),
    );
}
