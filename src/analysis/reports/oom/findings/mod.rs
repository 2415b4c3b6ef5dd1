//! The findings about an OOM, one file each.
//!
//! A finding may be the *cause* of the OOM, a *remark* in addition to the cause, a *remedy* for a program
//! that needs too much, or several of these. Its file has all that concerns it: the rule that finds it, its
//! sentences, and what to try. The tables below name each finding and fix the order,
//! except `unoptimized`, which `evaluation` tries, and `kept::tries_beside`.
//!
//! # Add a finding
//!
//! 1. Write its file. A cause is a `static CAUSE: Cause`, whose rule judges the [`Evidence`]. A remark or a
//!    remedy is a function that returns its sentence, or `None` where the finding does not apply. A cause
//!    sees only `Evidence`: add a field there and fill it in `gather.rs`. A remark or a remedy may also use
//!    `OomCase::oom_state`. A rule that follows the rows before the OOM needs a collector in `rows_before.rs`. List
//!    a new cause also in docs/json.md (verdicts) and tests/oom/README.md.
//! 2. Add `mod` and a row in a table: [`CAUSES`], [`REMARKS`], [`REMEDIES`] or [`REMEDIES_IF`].
//! 3. Test it at the end of its file: an `OomTrace` that causes it, each line as `memtrace oom` prints it, and
//!    near misses that do not cause it. Until then, a test below fails.
//! 4. Add a program to `tests/oom` with its row in `cases.csv`.
//!
//! A new reason why memory is kept is no finding of its own: its rule is in `kept.rs`, its sentences are in
//! `kept_reasons.rs`.

mod attention;
mod copies;
mod data;
mod evaluation;
mod failed_attempt;
mod fragmentation;
mod fsdp;
mod fused_optimizer;
mod growth;
mod host_memory;
mod idle;
mod injected;
mod kept;
mod kv_cache;
pub(super) mod larger_step;
mod limit;
mod loading;
mod logits;
mod model_growth;
mod other_graph;
mod other_process;
mod outside_torch;
mod recomputed;
mod request_too_large;
pub(super) mod running_forward;
mod script_tensors;
mod server;
mod too_big;
mod unoptimized;
mod unused_gradients;

use memtrace_trace::units::Unit;

use super::super::late_buckets::late_buckets;
use super::evidence::Evidence;
use super::finding::{Blame, Cause, OomCase, Sentence};

/// The causes, in the order in which they are tried. The first one that applies is the verdict.
static CAUSES: &[&Cause] = &[
    &injected::CAUSE,
    &request_too_large::CAUSE,
    &limit::CAUSE,
    &kept::UNUSED,
    &model_growth::CAUSE,
    &growth::CAUSE,
    &copies::CAUSE,
    &other_process::CAUSE,
    &kept::CAUSE,
    &failed_attempt::CAUSE,
    &fragmentation::CAUSE,
    &host_memory::CAUSE,
    &outside_torch::CAUSE,
    &too_big::CAUSE,
];

/// The remarks, in the order of the page.
const REMARKS: &[Sentence] = &[
    other_process::remark,
    host_memory::remark,
    outside_torch::remark,
    fragmentation::remark,
    fragmentation::remark_on_private_pools,
    growth::remark,
    larger_step::remark,
    too_big::remark,
    kept::remark,
    |case, units| late_buckets(&case.oom_state.trace.meta, &case.live, case.oom_state.symbols(), units),
];

/// The remedies for a program that needs more than the card has, in the order of the page.
const REMEDIES: &[Sentence] = &[
    evaluation::remedy,
    unused_gradients::remedy,
    kv_cache::remedy,
    idle::remedy_for_largest,
    idle::remedy_for_next,
    running_forward::remedy,
    attention::remedy,
    recomputed::remedy,
    fsdp::remedy_for_whole_gather,
    fsdp::remedy_for_gathered_modules,
    fsdp::remedy_for_whole_gradients,
    other_graph::remedy,
    logits::remedy,
    fused_optimizer::remedy,
    server::remedy,
    data::remedy,
    script_tensors::remedy,
    larger_step::remedy,
];

/// The remedies whose use the trace cannot decide, in the order of the page. They follow the changes of
/// `memtrace advise`.
const REMEDIES_IF: &[Sentence] =
    &[evaluation::remedy_if, loading::remedy_if, fragmentation::remedy_if, too_big::remedy_if];

impl Evidence {
    /// Returns the first cause that applies.
    ///
    /// Each rule sets its own threshold: most require a tenth of the card (`is_material`). Other processes,
    /// memory outside torch and host memory must also cover the missing bytes (`is_enough`).
    pub(super) fn judge(&self) -> Blame {
        CAUSES.iter().find_map(|cause| (cause.find)(self)).unwrap_or(Blame::of(&too_big::CAUSE))
    }
}

impl OomCase<'_> {
    /// Returns further findings from the figures, in addition to the verdict.
    pub(super) fn remarks(&self, units: Unit) -> Vec<String> {
        REMARKS.iter().filter_map(|remark| remark(self, units)).collect()
    }

    /// Returns the remedies, without the changes of `memtrace advise`.
    pub(super) fn tries(&self, units: Unit) -> Vec<String> {
        let mut all = (self.blame.cause.tries)(self);
        all.extend(kept::tries_beside(self));
        let mut all: Vec<String> = all.into_iter().map(str::to_owned).collect();
        if self.needs_less() {
            all.extend(REMEDIES.iter().filter_map(|remedy| remedy(self, units)));
        }
        all
    }

    /// Returns the remedies whose use the trace cannot decide.
    pub(super) fn tries_if(&self, units: Unit) -> Vec<String> {
        REMEDIES_IF.iter().filter_map(|remedy| remedy(self, units)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::test_evidence::{GIB, full};
    use super::*;

    #[test]
    fn oom_distinguishes_other_processes_a_limit_and_one_large_request() {
        let others = full().with(|e| {
            e.device.others = 4 * GIB;
            e.torch.reserved = 19 * GIB;
            e.torch.allocated = 19 * GIB;
        });
        assert_eq!(others.verdict(), "another process");
        assert_eq!(others.with(|e| e.device.others = GIB).verdict(), "too big");
        let outside = full().with(|e| {
            e.device.outside = 4 * GIB;
            e.torch.reserved = 19 * GIB;
            e.torch.allocated = 19 * GIB;
        });
        assert_eq!(outside.verdict(), "outside torch");
        // Device and host share one memory. The host is the cause if its memory is at least half as large as
        // torch's blocks, and otherwise it is not.
        let host = full().with(|e| {
            e.device.host = Some(10 * GIB);
            e.torch.reserved = 13 * GIB;
            e.torch.allocated = 13 * GIB;
        });
        assert_eq!(host.verdict(), "host memory");
        let host = full().with(|e| {
            e.device.host = Some(4 * GIB);
            e.torch.reserved = 19 * GIB;
            e.torch.allocated = 19 * GIB;
        });
        assert_eq!(host.verdict(), "too big");
        // A context of 4 GiB is the cause, because it is far larger than usual; one of half a GiB is not.
        let context = full().with(|e| {
            e.device.unknown = 4 * GIB;
            e.torch.reserved = 19 * GIB;
            e.torch.allocated = 19 * GIB;
        });
        assert_eq!(context.verdict(), "outside torch");
        let usual = Evidence::default().with(|e| {
            e.device.capacity = 4 * GIB;
            e.device.unknown = GIB / 2;
            e.request.bytes = GIB;
            e.device.room = 0;
        });
        assert_eq!(
            usual
                .with(|e| {
                    e.request.segment = GIB;
                    e.torch.allocated = 3 * GIB;
                    e.torch.reserved = 3 * GIB;
                    e.request.failed_calls = 1;
                })
                .verdict(),
            "too big"
        );
        assert_eq!(
            full()
                .with(|e| {
                    e.request.failed_calls = 0;
                    e.device.room = 2 * GIB;
                })
                .verdict(),
            "a limit"
        );
        assert_eq!(full().with(|e| e.request.bytes = 25 * GIB).verdict(), "request too large");
        assert_eq!(
            full()
                .with(|e| {
                    e.request.is_injected = true;
                    e.request.bytes = 25 * GIB;
                })
                .verdict(),
            "injected"
        );
        // The capacity of the card is unknown.
        assert_eq!(full().with(|e| e.device.capacity = 0).verdict(), "too big");
    }

    /// The tables: the name of each, how the lines of its findings begin, and its number of findings in this folder.
    const TABLES: [(&str, &str, usize); 4] = [
        ("CAUSES", "verdict: ", CAUSES.len()),
        // The last remark has its own file beside the reports.
        ("REMARKS", "also: ", REMARKS.len() - 1),
        ("REMEDIES", "try: ", REMEDIES.len()),
        ("REMEDIES_IF", "try: ", REMEDIES_IF.len()),
    ];

    /// Returns the file of each finding of a table: `kept` for the row `kept::remark`.
    fn files_of(table: &str) -> Vec<&'static str> {
        let (_, rows) = include_str!("mod.rs").split_once(&format!("{table}: &[")).unwrap();
        let (rows, _) = rows.split_once("];").unwrap();
        let words = rows.split(|c: char| !c.is_alphanumeric() && !"_:".contains(c));
        words.filter_map(|word| Some(word.split_once("::")?.0)).collect()
    }

    /// Each finding has tests in its own file: of a line that `memtrace oom` prints, and of a trace without that line.
    #[test]
    fn oom_has_a_test_of_each_finding_in_the_file_of_the_finding() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/oom/findings");
        let mut findings: BTreeMap<(&str, &str), usize> = BTreeMap::new();
        for (table, start, count) in TABLES {
            let files = files_of(table);
            assert_eq!(files.len(), count, "{table}: {files:?}");
            for file in files {
                *findings.entry((file, start)).or_default() += 1;
            }
        }
        for ((file, start), count) in findings {
            let source = std::fs::read_to_string(folder.join(format!("{file}.rs"))).unwrap();
            let (_, tests) = source.split_once("mod tests {").unwrap_or_default();
            let lines = tests.matches(&format!("\"{start}")).count();
            assert!(lines >= count, "{file}.rs: {lines} tested lines `{start}...` for {count} findings");
            assert!(tests.contains(".never_prints("), "{file}.rs: no test of a trace without the finding");
        }
    }
}
