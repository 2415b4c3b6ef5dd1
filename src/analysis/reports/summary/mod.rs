//! `memtrace summary`: the peaks, their time and owner, and counts of the recorded events.

mod stats;
mod wide_types;

use std::fmt::Write as _;

use memtrace_trace::EventName;
use serde_json::{Value, json};

use super::growth::growth_lines;
use super::killed::{Killed, RunVictims};
use super::late_buckets::late_buckets;
use super::ranks::{highest, more_ranks};
use super::report::{Answer, Report, View, next};
use crate::error::Result;
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, count, duration, percent, share};
use crate::render::numbers::{counted, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::rank_or_name;
use crate::state::block::Owner;
use crate::state::group::{block_category, without_mark};
use crate::state::host_memory::{HostMemory, SAMPLE};
use crate::state::levels::Levels;
use crate::state::replay::{self, Block, CPU, Device, HOST, Metric, device_title, is_gpu};
use crate::state::replay_trace::{Replayed, replay_rows_knowing, used_name};
use crate::state::step_inputs::LargestInput;
use stats::{STATS, Stats};
use wide_types::{not_quantized, wide_types};

/// `memtrace summary`.
pub(super) struct Summary;

impl Report for Summary {
    fn name(&self) -> &'static str {
        "summary"
    }

    fn about(&self) -> &'static str {
        "Show the peaks, their time and owner, and counts of events, steps and ranks"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("summary", "the newest run in memtrace-out"),
            ("summary out", "the runs in a folder"),
            ("summary --stats out", "distributions of sizes, lifetimes and latencies"),
        ]
    }

    fn views(&self) -> &'static [View] {
        const { &[View { asked_by: &[STATS], report: &Stats }] }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let (mut lines, mut processes) = (Vec::new(), Vec::<Value>::new());
        let mut hosts = Vec::new();
        let mut is_killed = false;
        // Of several processes, only the replay of the process with the highest peak is kept.
        let mut fullest: Option<(&TraceFile, Replayed, Seen)> = None;
        let mut highest_peak = (i64::MIN, 0, 0);
        let traced: Vec<i64> = input.traces.iter().filter_map(|trace| trace.pid().parse().ok()).collect();
        for trace in &input.traces {
            let mut past_oom = None;
            let mut host: Option<HostMemory> = None;
            let mut levels = Levels::new(options.device);
            let replayed = replay_rows_knowing(
                trace,
                // Read `ts_ns` of every row: for a killed process, the time of the last row is the end of the
                // run.
                replay::COLUMNS.and(Columns::of(&["ts_ns"])).plus(EventName::Sample, SAMPLE),
                options,
                Metric::Allocated,
                flow_categories(trace, options)?,
                |row, replay| {
                    host.get_or_insert_with(|| HostMemory::new(&replay.symbols)).feed(row);
                    levels.feed(row, replay);
                    if row.event == EventName::Oom && past_oom.is_none() {
                        past_oom = Some(Owner::from_row(row));
                    }
                },
            )?;
            footer.add(trace, &replayed, options);
            footer.note_inference(&replayed);
            let need = trace.needed_bytes().map(|bytes| Need { bytes, died: past_oom });
            let host = host.unwrap_or_default();
            let grown = growth_lines(&levels, options.units);
            let largest = levels.largest_input(&replayed.symbols);
            let mut value = process(trace, &replayed, need.as_ref(), options);
            value["largest_input"] = largest.as_ref().map(LargestInput::json).into();
            value["host_peak_rss_bytes"] = host.peak_rss().into();
            value["host_peak_bytes"] = host.peak_with_children(&traced).into();
            value["growth"] = grown.clone().into();
            processes.push(value);
            hosts.push(host);
            lines.push(Line::new(trace, &replayed, options));
            let device = replayed.fullest(Metric::Used, options);
            let peak = |metric| device.map_or(0, |device| device.peak(metric).bytes);
            let peak = (peak(Metric::Used), peak(Metric::Allocated), -trace.meta.rank);
            if peak >= highest_peak {
                let seen = Seen { need, grown, input: largest };
                (highest_peak, fullest) = (peak, Some((trace, replayed, seen)));
            }
        }
        let victims = RunVictims::new(&input.traces, options);
        let killed = input.traces.iter().zip(&hosts);
        let killed = killed.map(|(trace, memory)| Killed::find(trace, memory, &victims, options));
        let killed: Vec<Option<Killed<'_>>> = killed.collect::<Result<_>>()?;
        for (value, killed) in processes.iter_mut().zip(&killed) {
            value["killed"] = killed.as_ref().map(|killed| killed.json(options)).into();
        }
        let json = json!({ "processes": processes });
        // The text fits on one screen: one line for each process, and the details of the process with the
        // highest peak.
        let mut hints = Vec::new();
        if let Some((trace, replayed, seen)) = &fullest {
            heading(&mut printer, input, &trace.meta);
            printer.gap();
            if lines.len() > 1 {
                ranks(&mut printer, &lines, options);
                printer.gap();
                printer.plain(format!("{} has the highest peak:", rank_or_name(trace, input)));
            }
            detail(&mut printer, trace, replayed, options);
            let at = input.traces.iter().position(|other| std::ptr::eq(other, *trace)).unwrap_or(0);
            let peak_rss = hosts[at].peak_rss();
            if peak_rss >= 0 {
                let all: Vec<i64> =
                    hosts.iter().map(HostMemory::peak_rss).filter(|peak| *peak >= 0).collect();
                let of_all = match all.len() {
                    1 => String::new(),
                    number => format!(
                        "; the peaks of {number} processes sum to {} (shared pages count once per process)",
                        options.units.show(all.iter().sum::<i64>())
                    ),
                };
                printer.plain(format!("host memory: peak {} resident{of_all}", options.units.show(peak_rss)));
            }
            for (trace, killed) in input.traces.iter().zip(&killed) {
                if let Some(killed) = killed {
                    if lines.len() > 1 {
                        printer.plain(format!("{}:", rank_or_name(trace, input)));
                    }
                    killed.print(&mut printer, options);
                    is_killed = true;
                }
            }
            for line in &seen.grown {
                printer.plain(line);
            }
            if !seen.grown.is_empty() {
                hints.push(next("leaks", input, ""));
            }
            if let Some(line) = seen.input.as_ref().and_then(LargestInput::line) {
                printer.plain(line);
            }
            if is_killed {
                hints.push(next("ledger", input, "--host --at end"));
            }
            if let Some(need) = &seen.need {
                printer.plain(need.text(trace, replayed, options));
            }
            if replayed.replay.counts.of(EventName::Oom) > 0 {
                hints.push(next("oom", input, ""));
            }
            hints.push(next("peak", input, "--by module"));
        }
        Ok(Answer { next: hints, ..Answer::new(printer, json, footer) })
    }
}

/// What the summary says of the process with the highest peak, in addition to its replay.
struct Seen {
    need: Option<Need>,
    /// Sentences about memory that grew.
    grown: Vec<String>,
    input: Option<LargestInput>,
}

/// The memory that a process needed (`--past-oom`).
struct Need {
    /// The bytes that the fullest card needed, including its context.
    bytes: i64,
    /// The owner of the first request that ran out of memory.
    died: Option<Owner>,
}

impl Need {
    /// Returns the capacity of the card; 0 if unknown.
    fn capacity(trace: &TraceFile) -> i64 {
        trace.meta.phantom["capacity_bytes"].as_i64().unwrap_or(0)
    }

    fn text(&self, trace: &TraceFile, replayed: &Replayed, options: &Options) -> String {
        let show = |bytes| options.units.show(bytes);
        let capacity = Need::capacity(trace);
        let mut text = format!("needs {}; this card has {}", show(self.bytes), show(capacity));
        if self.bytes > capacity {
            let _ = write!(text, ": {} too little", show(self.bytes - capacity));
        }
        if let Some(died) = self.died {
            let [module, phase] = [died.module, died.phase].map(|name| replayed.symbols.or_dash(name));
            let _ =
                write!(text, "; would have died in {module} of {phase}, step {}", step_or_dash(died.step));
        }
        text
    }
}

/// The line of a process in the table of ranks.
struct Line {
    rank: i32,
    pid: String,
    allocated: i64,
    reserved: i64,
    used: i64,
    is_sampled: bool,
    steps: u64,
    rows: u64,
}

impl Line {
    fn new(trace: &TraceFile, replayed: &Replayed, options: &Options) -> Line {
        let peak = |metric| replayed.fullest(metric, options).map_or(0, |device| device.peak(metric).bytes);
        Line {
            rank: trace.meta.rank,
            pid: trace.pid(),
            allocated: peak(Metric::Allocated),
            reserved: peak(Metric::Reserved),
            used: peak(Metric::Used),
            is_sampled: used_name([replayed], options) == Metric::Used.name(),
            steps: steps(replayed),
            rows: replayed.replay.counts.rows,
        }
    }
}

fn ranks(printer: &mut Printer, lines: &[Line], options: &Options) {
    let is_sampled = lines.iter().all(|line| line.is_sampled);
    let mut table = Table::new(&[
        ("rank", Side::Right),
        ("pid", Side::Right),
        ("peak allocated", Side::Right),
        ("reserved", Side::Right),
        (if is_sampled { Metric::Used.name() } else { Metric::UNSAMPLED }, Side::Right),
        ("steps", Side::Right),
        ("events", Side::Right),
    ]);
    let (shown, more) = highest(lines, options, |line| line.allocated);
    for line in shown {
        let bytes = |bytes| options.units.show(bytes).to_string();
        table.row([
            line.rank.to_string().into(),
            line.pid.clone().into(),
            Cell::new(bytes(line.allocated), Style::Strong),
            bytes(line.reserved).into(),
            bytes(line.used).into(),
            count(line.steps).into(),
            count(line.rows).into(),
        ]);
    }
    printer.table(&table);
    more_ranks(printer, more);
}

/// Returns the number of steps, computed from the numbers of the first and the last step. The numbers need
/// not start at 0.
fn steps(replayed: &Replayed) -> u64 {
    let replay = &replayed.replay;
    replay.first_step.map_or(0, |first| (replay.last_step() - first + 1).max(0).cast_unsigned())
}

fn detail(printer: &mut Printer, trace: &TraceFile, replayed: &Replayed, options: &Options) {
    let many = replayed.gpus(options).count() > 1;
    for device in replayed.gpus(options) {
        if many || !is_gpu(device.ordinal) {
            printer.line([Cell::new(device_title(device.ordinal), Style::Strong)]);
        }
        peaks(printer, replayed, device, options);
        capacity(printer, trace, device, options);
        categories(printer, trace, replayed, device, options);
        printer.gap();
    }
    for ordinal in [CPU, HOST].into_iter().filter(|ordinal| options.device != Some(*ordinal)) {
        if let Some(device) = replayed.replay.find(ordinal) {
            let peak = options.units.show(device.peak(Metric::Allocated).bytes);
            printer.plain(format!("{}: peak {peak}", device_title(ordinal)));
        }
    }
    let counts = &replayed.replay.counts;
    printer.plain(format!(
        "{} in {}: {}, {}, {}, {}",
        counted(counts.rows, "event"),
        duration(replayed.replay.ts_ns),
        counted(counts.of(EventName::Alloc), "allocation"),
        counted(counts.of(EventName::Free), "free"),
        counted(counts.of(EventName::SegmentAlloc) + counts.of(EventName::SegmentMap), "segment"),
        counted(steps(replayed), "step"),
    ));
    let ooms = counts.of(EventName::Oom);
    if ooms + counts.failed > 0 {
        let (ooms, failed) = (counted(ooms, "request"), counted(counts.failed, "call"));
        let ran = if trace.meta.goes_past_oom() { "would have run" } else { "ran" };
        let text = format!("{ooms} {ran} out of memory, {failed} failed");
        printer.line([Cell::new(text, Style::Alarm)]);
    }
}

fn peaks(printer: &mut Printer, replayed: &Replayed, device: &Device, options: &Options) {
    let mut table = Table::new(&[
        ("", Side::Left),
        ("peak", Side::Right),
        ("at", Side::Right),
        ("step", Side::Right),
        ("phase", Side::Left),
        ("op", Side::Left),
        ("module", Side::Left),
    ]);
    let metrics = [Metric::Allocated, Metric::Reserved, Metric::Used];
    // Host memory has only allocated bytes.
    for metric in metrics.into_iter().take(if is_gpu(device.ordinal) { 3 } else { 1 }) {
        let peak = device.peak(metric);
        table.row([
            device.name_of(metric).into(),
            Cell::new(options.units.show(peak.bytes).to_string(), Style::Strong),
            Cell::duration(peak.ts_ns),
            step_or_dash(peak.owner.step).into(),
            replayed.symbols.or_dash(peak.owner.phase).into(),
            replayed.symbols.or_dash(peak.owner.op).into(),
            replayed.symbols.or_dash(peak.owner.module).into(),
        ]);
    }
    printer.table(&table);
}

fn capacity(printer: &mut Printer, trace: &TraceFile, device: &Device, options: &Options) {
    let capacity = trace.meta.total_bytes(device.ordinal);
    if capacity > 0 {
        let used = device.peak(Metric::Used).bytes;
        let by = if device.is_sampled() { "" } else { " by torch and libraries" };
        let share = percent(share(used, capacity));
        printer.plain(format!("{share} of {} used{by}", options.units.show(capacity)));
        if let Some(host) = device.host_peak() {
            printer.plain(format!(
                "device and host share this memory: this process had at most {} of it on the host",
                options.units.show(host)
            ));
        }
    }
}

fn categories(
    printer: &mut Printer,
    trace: &TraceFile,
    replayed: &Replayed,
    device: &Device,
    options: &Options,
) {
    let blocks = replayed.replay.at_peak(device.ordinal, false);
    let total: i64 = blocks.iter().map(|block| block.bytes).sum();
    let owned: Vec<_> = blocks.iter().map(|block| (block.owner, block.bytes)).collect();
    if let Some(late) = late_buckets(&trace.meta, &owned, &replayed.symbols, options.units) {
        printer.plain(format!("of this peak, {late}"));
    }
    let mut table = Table::new(&[("", Side::Right), ("", Side::Right), ("", Side::Left), ("", Side::Left)]);
    for (name, bytes) in by_category(&blocks) {
        table.row([
            options.units.show(bytes).to_string().into(),
            percent(share(bytes, total)).into(),
            name.into(),
            bar(share(bytes, total), 24).into(),
        ]);
    }
    if !table.is_empty() {
        printer.gap();
        printer.plain("in live blocks at the peak of allocated memory:");
        printer.table(&table);
    }
    for line in
        [wide_types, not_quantized].iter().filter_map(|of| of(&blocks, &replayed.replay, options.units))
    {
        printer.plain(line);
    }
}

/// Returns the bytes of each category, the largest first.
fn by_category(blocks: &[Block]) -> Vec<(&'static str, i64)> {
    let mut sums: Vec<(&'static str, i64)> = Vec::new();
    for block in blocks {
        let name = block_category(block);
        match sums.iter_mut().find(|(known, _)| *known == name) {
            Some((_, sum)) => *sum += block.bytes,
            None => sums.push((name, block.bytes)),
        }
    }
    sums.sort_by_key(|(name, bytes)| (-bytes, *name));
    sums
}

fn process(trace: &TraceFile, replayed: &Replayed, need: Option<&Need>, options: &Options) -> Value {
    let counts = &replayed.replay.counts;
    let devices: Vec<Value> = replayed
        .gpus(options)
        .map(|device| {
            let mut categories = serde_json::Map::new();
            for (name, bytes) in by_category(&replayed.replay.at_peak(device.ordinal, false)) {
                // A category occurs twice if only some of its blocks are inferred. The sum joins both.
                let sum = categories.entry(without_mark(name).0).or_insert(0.into());
                *sum = (sum.as_i64().unwrap_or(0) + bytes).into();
            }
            json!({
                "device": device.ordinal,
                "peak_allocated": replayed.moment(device.peak(Metric::Allocated)),
                "peak_active": replayed.moment(device.peak(Metric::Active)),
                "peak_reserved": replayed.moment(device.peak(Metric::Reserved)),
                "peak_used": replayed.moment(device.peak(Metric::Used)),
                "at_peak_by_category_bytes": categories,
                "categories_inferred": replayed.replay.infers(),
                "at_end_allocated_bytes": device.totals.allocated,
                "at_end_reserved_bytes": device.totals.reserved,
                "host_peak_bytes": device.host_peak(),
            })
        })
        .collect();
    let mut events = serde_json::Map::new();
    for event in EventName::ALL {
        if counts.of(*event) > 0 {
            events.insert(event.as_str().to_owned(), counts.of(*event).into());
        }
    }
    json!({
        "file": trace.path.display().to_string(),
        "rank": trace.meta.rank,
        "phantom": !trace.meta.phantom.is_null(),
        "devices": devices,
        "needed_bytes": need.map(|need| need.bytes),
        "pinned_peak_bytes": replayed.replay.find(HOST).map_or(0, |host| host.peak(Metric::Allocated).bytes),
        "rows": counts.rows,
        "events": events,
        "failed_calls": counts.failed,
        "lost_events": counts.lost,
        "steps": steps(replayed),
        "duration_ns": replayed.replay.ts_ns,
        "complete": !replayed.replay.problems.unfinished,
    })
}
