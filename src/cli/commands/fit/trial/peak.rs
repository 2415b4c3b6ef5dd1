//! The peak of a trial, read from its traces.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use memtrace_analysis::options::Options;
use memtrace_analysis::read::input::Input;
use memtrace_analysis::reports;
use memtrace_trace::meta::Meta;
use memtrace_trace::units::Unit;
use serde_json::Value;

use crate::recovery;

/// The peaks, in bytes, of the device with the most memory in use, over all processes.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeakUse {
    pub(crate) allocated: i64,
    pub(crate) reserved: i64,
    pub(crate) used: i64,
    /// The memory of the device, in bytes; 0 if unknown.
    pub(crate) capacity: i64,
    /// The name of the device; empty if unknown.
    pub(crate) device: String,
    /// True if the device is simulated.
    pub(crate) phantom: bool,
    /// The number of allocations that failed at first. They succeeded after the allocator had emptied its
    /// cache.
    pub(crate) retries: i64,
    /// True if the outcome may differ on a real card, because the context of a real card may be larger or
    /// smaller.
    pub(crate) inside_range: bool,
    /// True if the device shares the machine's memory, and device and host together used all of it.
    pub(crate) fills_machine: bool,
    /// The number of processes with a trace.
    pub(crate) processes: usize,
    /// The number of ranks that ran.
    pub(crate) ranks: usize,
    /// The sum of the processes' peaks of host memory in bytes; 0 if unknown. A rank of the node that did not
    /// run is counted like the smallest rank that ran.
    pub(crate) host: i64,
    /// Bytes of pinned memory that `host` lacks, because they did not become resident.
    pub(crate) pinned_absent: i64,
    /// The lines at which the program acted on values that the simulated GPU made up.
    pub(crate) acted_at: BTreeSet<String>,
    /// The number of ranks of one node that did not run.
    pub(crate) absent_ranks: i64,
    /// Bytes by category at the peak of allocated memory, largest first.
    pub(crate) by_category: Vec<(String, i64)>,
}

/// Returns the name of a trial's card: as the user gave it, or else the name of the machine's own `device`.
pub(crate) fn card_name<'a>(card: &'a str, device: &'a str) -> &'a str {
    [card, device].into_iter().find(|name| !name.is_empty()).unwrap_or("this GPU")
}

/// What the traces of a trial show.
#[derive(Default)]
pub(crate) struct Measured {
    pub(crate) peak: PeakUse,
    /// The request that ran out of memory, if there was one.
    pub(crate) request: Option<String>,
    /// True if the kernel killed a process because the host's memory ran out.
    pub(crate) was_killed_for_memory: bool,
}

/// Reads the traces of a trial.
pub(crate) fn measure(folder: &Path) -> Result<Measured> {
    recovery::begin(folder);
    // The folder is new, so a failure to open it means that the trial left no trace.
    if Input::open(folder).is_err() {
        return Ok(Measured::default());
    }
    let inputs = [recovery::complete_quietly(|| Ok(Input::open(folder)?))?];
    let ask = |name: &str| -> Result<Value> {
        let report = reports::find(name).with_context(|| format!("there is no report {name}"))?;
        Ok(report.run(&inputs, &Options::default())?.to_json(name))
    };
    let summary = ask("summary")?;
    let processes = summary["processes"].as_array().map_or(&[][..], Vec::as_slice);
    let mut peak = PeakUse::default();
    for (process, trace) in processes.iter().zip(&inputs[0].traces) {
        peak.add(process, &trace.meta);
    }
    let lines = summary["phantom"]["acted_at"].as_array().into_iter().flatten();
    peak.acted_at = lines.filter_map(|line| line.as_str().map(str::to_owned)).collect();
    peak.pinned_absent = number(&summary["phantom"]["pinned_not_resident_bytes"]);
    if let Some(last) = inputs[0].traces.last() {
        // With `--ranks`, only some ranks run. A node has one rank for each of its cards.
        let about = &last.meta.phantom;
        peak.add_absent_ranks(processes, number(&about["ranks_of"]).min(number(&about["count"]).max(1)));
    }
    let is_killed =
        |process: &Value| ["container_oom", "machine_oom"].iter().any(|by| process["killed"]["by"] == **by);
    let was_killed_for_memory = processes.iter().any(is_killed);
    let mut request = None;
    if processes.iter().any(|process| number(&process["events"]["oom"]) > 0) {
        let oom = &ask("oom")?["ooms"][0];
        peak.inside_range = oom["inside_range"] == true;
        request = Some(request_of(oom));
    }
    Ok(Measured { peak, request, was_killed_for_memory })
}

impl PeakUse {
    /// Adds a process, as `summary --json` shows it, whose trace has this `meta` row.
    fn add(&mut self, process: &Value, meta: &Meta) {
        self.processes += 1;
        self.retries += number(&process["failed_calls"]);
        self.host += host_peak(process);
        self.phantom |= process["phantom"] == true;
        for device in process["devices"].as_array().into_iter().flatten() {
            if number(&device["peak_used"]["bytes"]) >= self.used {
                self.set_device(device, meta);
            }
        }
    }

    /// Adds the ranks of the node that did not run, each with as much host memory as the smallest rank of `processes`.
    /// A rank may have several processes.
    fn add_absent_ranks(&mut self, processes: &[Value], ranks_of_node: i64) {
        let mut by_rank: BTreeMap<i64, i64> = BTreeMap::new();
        for process in processes {
            *by_rank.entry(number(&process["rank"])).or_default() += host_peak(process);
        }
        self.ranks = by_rank.len();
        self.absent_ranks = (ranks_of_node - self.ranks as i64).max(0);
        let smallest = by_rank.into_values().min().unwrap_or(0);
        self.host = self.host.saturating_add(self.absent_ranks.saturating_mul(smallest));
    }

    /// Replaces the device by one with more memory in use.
    fn set_device(&mut self, device: &Value, meta: &Meta) {
        let ordinal = i32::try_from(number(&device["device"])).unwrap_or(-1);
        self.used = number(&device["peak_used"]["bytes"]);
        self.allocated = number(&device["peak_allocated"]["bytes"]);
        self.reserved = number(&device["peak_reserved"]["bytes"]);
        self.capacity = meta.total_bytes(ordinal);
        let is_shared = !device["host_peak_bytes"].is_null();
        self.fills_machine = is_shared && self.capacity > 0 && self.used >= self.capacity;
        let context = |name: &str| meta.phantom[name].as_i64();
        let more = context("context_high_bytes").zip(context("context_bytes"));
        self.inside_range = more.is_some_and(|(most, here)| self.capacity - self.used < most - here);
        self.device = meta.device(ordinal).map_or(String::new(), |card| card.name.clone());
        let by_category = device["at_peak_by_category_bytes"].as_object().into_iter().flatten();
        self.by_category = by_category.map(|(name, bytes)| (name.clone(), number(bytes))).collect();
        self.by_category.sort_by_key(|(_, bytes)| -bytes);
    }
}

fn number(value: &Value) -> i64 {
    value.as_i64().unwrap_or(0)
}

/// Returns the peak of a process's host memory, as `summary --json` shows it; 0 if unknown.
fn host_peak(process: &Value) -> i64 {
    number(&process["host_peak_bytes"]).max(0)
}

/// Describes the request that ran out of memory, as `oom --json` shows it.
fn request_of(oom: &Value) -> String {
    let bytes = number(&oom["requested_bytes"]).max(number(&oom["rounded_bytes"]));
    let mut request = format!("asked for {}", Unit::Auto.show(bytes));
    for (before, name) in [("by", "op"), ("in", "module"), ("in", "phase")] {
        if let Some(text) = oom[name].as_str().filter(|text| !text.is_empty() && *text != "(none)") {
            request.push_str(&format!(" {before} {text}"));
        }
    }
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_that_did_not_run_counts_like_all_processes_of_the_smallest_rank() {
        let process = |rank: i32, bytes: i64| serde_json::json!({ "rank": rank, "host_peak_bytes": bytes });
        for (processes, host, ranks, absent) in [
            (vec![process(0, 60), process(0, 1)], 8 * 61, 1, 7),
            (vec![process(0, 60), process(1, 50), process(1, 5)], 60 + 7 * 55, 2, 6),
            (vec![], 0, 0, 8),
        ] {
            let mut peak = PeakUse { host: processes.iter().map(host_peak).sum(), ..PeakUse::default() };
            peak.add_absent_ranks(&processes, 8);
            assert_eq!((peak.host, peak.ranks, peak.absent_ranks), (host, ranks, absent));
        }
    }
}
