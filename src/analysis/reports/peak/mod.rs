//! `memtrace peak`: the live blocks at the peak, by owner.

mod as_mem_tracker;
mod at;
mod each;

use memtrace_trace::text::WITHOUT_DETAIL;
use serde_json::{Value, json};

use super::group_table::print_groups;
use super::report::{Answer, Report, View, next};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{duration, share};
use crate::render::printer::{Cell, Style};
use crate::render::process_names::chosen_of;
use crate::state::group::{self, Group, Key, KeyKind, sorted, without_mark};
use crate::state::moment;
use crate::state::replay::{CPU, Device, HOST, Metric};
use crate::state::replay_trace::{Replayed, replay_trace};
use as_mem_tracker::{MEM_TRACKER, PeakMemTracker};
use at::PeakAt;
use each::{EACH, PeakEach};

/// `memtrace peak`.
pub(super) struct Peak;

/// The option that shows owners as they were recorded at the moment, without what later rows add.
pub(super) const AS_OF: Flag =
    Flag::switch("as-of", "Use the owners known at that moment, and ignore owners that later rows add");

impl Report for Peak {
    fn name(&self) -> &'static str {
        "peak"
    }

    fn about(&self) -> &'static str {
        "List the live blocks at the peak, by owner"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("peak --by module out", "who held the memory at the peak"),
            ("peak --by module --depth 2 --apart out", "each layer separately, down to the second level"),
            ("peak --each step out", "the peak of every step"),
            ("peak --at mark:loaded out", "the live blocks at a mark of the script"),
            ("peak --at end --by category out", "the live blocks at the end"),
            ("peak --mem-tracker --at step:3 out", "PyTorch's MemTracker table at the end of step 3"),
        ]
    }

    fn flags(&self) -> &'static [Flag] {
        const {
            &[
                group::BY,
                group::DEPTH,
                group::APART,
                Flag {
                    name: "of",
                    value: Some("TOTAL"),
                    default: "allocated",
                    choices: &["allocated", "used"],
                    help: "The total whose peak is shown: torch's blocks (allocated), or all memory in use \
                           on the device (used)",
                },
                AS_OF,
            ]
        }
    }

    fn views(&self) -> &'static [View] {
        const {
            &[
                View { asked_by: &[MEM_TRACKER], report: &PeakMemTracker },
                View { asked_by: &[EACH], report: &PeakEach },
                View { asked_by: &[moment::FLAG], report: &PeakAt },
            ]
        }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut metric = if options.text("of") == "used" { Metric::Used } else { Metric::Allocated };
        let by = Key::from_options(options)?;
        let mut best = fullest(input, options, metric, &by)?;
        if best.0.peak == 0 && metric == Metric::Allocated {
            // All memory of a program without torch is outside torch's allocator.
            metric = Metric::Used;
            best = fullest(input, options, metric, &by)?;
        }
        if best.0.peak == 0 && options.device.is_none() {
            // If the program used no GPU, show its CPU tensors, provided that the trace has them.
            let host = Options { device: Some(HOST), ..options.clone() };
            let on_host = fullest(input, &host, Metric::Allocated, &by)?;
            if on_host.0.peak > 0 {
                return answer(input, &host, Metric::Allocated, &by, on_host);
            }
        }
        answer(input, options, metric, &by, best)
    }
}

/// The process with the highest peak.
struct Best<'a> {
    trace: &'a TraceFile,
    replayed: Replayed,
    ordinal: i32,
    peak: i64,
}

/// Returns the process with the highest peak, and the footer of all processes.
fn fullest<'a>(input: &'a Input, options: &Options, metric: Metric, by: &Key) -> Result<(Best<'a>, Footer)> {
    let mut best: Option<Best<'a>> = None;
    let mut footer = Footer::of([input]);
    for trace in &input.traces {
        let replayed =
            replay_trace(trace, by.columns(), options, metric, flow_categories(trace, options)?, |_, _| {})?;
        let device = replayed.fullest(metric, options);
        let (ordinal, peak) = device.map_or((0, 0), |device| (device.ordinal, device.peak(metric).bytes));
        footer.add_with_device(trace, &replayed, Some(ordinal));
        if best.as_ref().is_none_or(|best| peak > best.peak) {
            best = Some(Best { trace, replayed, ordinal, peak });
        }
    }
    let best = best.ok_or_else(|| Error::usage(format!("{}: no trace", input.path.display())))?;
    Ok((best, footer))
}

fn answer(
    input: &Input,
    options: &Options,
    metric: Metric,
    by: &Key,
    (best, mut footer): (Best<'_>, Footer),
) -> Result<Answer> {
    let Best { trace, replayed, ordinal, .. } = best;
    let by = by.on(trace);
    let mut printer = options.printer();
    heading(&mut printer, input, &trace.meta);
    let Some(device) = replayed.replay.find(ordinal) else {
        printer.plain("No memory tracked.");
        return Ok(Answer::new(printer, json!({ "groups": [] }), footer));
    };
    let peak = device.peak(metric);
    let blocks = replayed.replay.at_peak(ordinal, options.is_set("as-of"));
    if by.kind == KeyKind::Category && !options.is_set("as-of") {
        footer.note_inference(&replayed);
    }
    let by = by.on_modules(&replayed.replay, &blocks);
    let mut groups = by.groups(&blocks, &replayed.symbols);
    // The device also counts memory in use that belongs to no block: the cache of torch's allocator, and
    // memory that no call explains. Add a group for each.
    let listed: i64 = groups.values().map(|group| group.bytes).sum();
    if metric == Metric::Used {
        let untraced = peak.untraced.clamp(0, (peak.bytes - listed).max(0));
        let rest = [
            ("(cached by torch)", peak.bytes - listed - untraced),
            ("(not traced: context, others)", untraced),
        ];
        for (name, bytes) in rest.into_iter().filter(|(_, bytes)| *bytes > 0) {
            groups.insert(name.to_owned(), Group { bytes, ..Group::default() });
        }
    }
    let groups = sorted(groups);
    note_missing(&mut footer, &by, &groups, peak.bytes, &replayed);

    let place = peak.owner.place(&[peak.owner.phase, peak.owner.module, peak.owner.op], &replayed.symbols);
    printer.line([
        format!("{} ", title(device, metric)).into(),
        Cell::new(options.units.show(peak.bytes).to_string(), Style::Strong),
        format!(" at {}{place}", duration(peak.ts_ns)).into(),
    ]);
    if let Some(chosen) = chosen_of(trace, input, "highest peak", "") {
        printer.plain(chosen);
    }
    let detail = &replayed.replay.detail;
    if let Some(text) = detail.about(peak.owner.step, &trace.meta) {
        printer.plain(text);
    }
    printer.gap();
    let top = options.top.unwrap_or(20);
    print_groups(&mut printer, &groups, &by, ("bytes", peak.bytes), top, options);
    let json = json!({
        "file": trace.path.display().to_string(),
        "rank": trace.meta.rank,
        "device": ordinal,
        "of": device.name_of(metric),
        "by": by.name(),
        "peak": replayed.moment(peak),
        "detailed_steps": detail.json(&trace.meta),
        "live_bytes": blocks.iter().map(|block| block.bytes).sum::<i64>(),
        "groups": groups_json(&groups, &by, peak.bytes),
    });
    let other = group::KEYS
        .iter()
        .find(|key| **key != by.name() && matches!(**key, "category" | "op"))
        .unwrap_or(&"module");
    let hints = vec![next("peak", input, &format!("--by {other}"))];
    Ok(Answer { next: hints, ..Answer::new(printer, json, footer) })
}

/// Adds notes to the footer about data that the grouping `by` needs and the trace lacks. Also stores the
/// share of `total` whose blocks lack the key.
pub(super) fn note_missing(
    footer: &mut Footer,
    by: &Key,
    groups: &[(String, Group)],
    total: i64,
    replayed: &Replayed,
) {
    if matches!(by.kind, KeyKind::Line | KeyKind::Stack) && !by.has_lines() {
        footer.notes.push("no lines of Python in this trace: MEMTRACE_STACKS=python records them".to_owned());
    }
    if by.kind == KeyKind::Type && !replayed.replay.classes.has_classes(&replayed.symbols) {
        footer.notes.push(
            "no classes of modules in this trace: an older version wrote it, or no module was called"
                .to_owned(),
        );
    }
    if !matches!(by.kind, KeyKind::Size | KeyKind::Step) {
        let missing =
            groups.iter().filter(|(name, _)| [by.missing(), WITHOUT_DETAIL].contains(&name.as_str()));
        let missing = missing.map(|(_, group)| group.bytes).sum();
        footer.without_key = Some((by.name(), share(missing, total)));
    }
}

/// Returns the field `groups` of the answer. The shares are relative to `total`, in bytes.
pub(super) fn groups_json(groups: &[(String, Group)], by: &Key, total: i64) -> Vec<Value> {
    let json = |(name, group): &(String, Group)| {
        let (key, is_inferred) = without_mark(name);
        let mut value = json!({
            "key": key,
            "inferred": is_inferred,
            "bytes": group.bytes,
            "blocks": group.blocks,
            "share": share(group.bytes, total),
        });
        if by.kind == KeyKind::Module {
            value["total_bytes"] = group.total.into();
            value["modules"] = group.modules.into();
            value["largest_bytes"] = group.largest.into();
        }
        value
    };
    groups.iter().map(json).collect()
}

/// Returns what the peak of a metric is a peak of, such as `device 0: peak of reserved memory`.
pub(super) fn title(device: &Device, metric: Metric) -> String {
    let (place, memory) = place_and_memory(device, metric);
    format!("{place}: peak of {memory}")
}

/// Returns the place of a device's memory and the name of what `metric` counts there, such as `device 0` and
/// `reserved memory`.
fn place_and_memory(device: &Device, metric: Metric) -> (String, String) {
    match device.ordinal {
        CPU => ("cpu".to_owned(), "CPU tensors".to_owned()),
        HOST => ("host".to_owned(), "pinned memory".to_owned()),
        ordinal => (format!("device {ordinal}"), memory_name(device, metric)),
    }
}

/// Returns the name of the memory that `metric` counts, such as `allocated memory` or `device memory in use`.
fn memory_name(device: &Device, metric: Metric) -> String {
    match metric {
        Metric::Used if device.is_sampled() => "device memory in use".to_owned(),
        Metric::Used => format!("memory of {}", Metric::UNSAMPLED),
        metric => format!("{} memory", metric.name()),
    }
}
