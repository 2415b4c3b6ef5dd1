//! `memtrace peak --at`: the live blocks at a moment other than the peak, by owner.

use serde_json::json;

use super::super::group_table::print_groups;
use super::super::report::{Answer, Report, next};
use super::{groups_json, note_missing, place_and_memory};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::duration;
use crate::render::printer::{Cell, Style};
use crate::render::process_names::chosen_of;
use crate::state::group::{self, Key, KeyKind, sorted};
use crate::state::moment::{self, NamedMoment, replay_to_moment};
use crate::state::replay::{Device, Metric};
use crate::state::replay_trace::Replayed;

/// `memtrace peak --at`.
pub(super) struct PeakAt;

impl Report for PeakAt {
    fn name(&self) -> &'static str {
        "peak --at end"
    }

    fn about(&self) -> &'static str {
        "List the live blocks at a moment, by owner"
    }

    fn flags(&self) -> &'static [Flag] {
        const { &[group::BY, group::DEPTH, group::APART, super::AS_OF] }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let text = match options.text(moment::FLAG.name) {
            "" => "end",
            text => text,
        };
        let at: NamedMoment = text.parse()?;
        let by = Key::from_options(options)?;
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut best: Option<(&TraceFile, Replayed, Device)> = None;
        for trace in &input.traces {
            let known = flow_categories(trace, options)?;
            let Some(replayed) = replay_to_moment(trace, &at, by.columns(), options, known, |_, _| {})?
            else {
                footer.read(trace, options)?;
                continue;
            };
            footer.add_reading(trace, &replayed);
            let height = |device: &&Device| (device.totals.allocated, -device.ordinal);
            let Some(device) = replayed.gpus(options).max_by_key(height).cloned() else { continue };
            footer.add_share(&replayed, device.ordinal);
            if best.as_ref().is_none_or(|(.., other)| device.totals.allocated > other.totals.allocated) {
                best = Some((trace, replayed, device));
            }
        }
        let hints = vec![next("peak", input, "--by category"), next("frag", input, &format!("--at {text}"))];
        let Some((trace, replayed, device)) = best else {
            if let Some(trace) = input.traces.first() {
                heading(&mut printer, input, &trace.meta);
            }
            printer.plain("No memory tracked.");
            let json = json!({ "at": text, "groups": [] });
            return Ok(Answer { next: hints, ..Answer::new(printer, json, footer) });
        };
        heading(&mut printer, input, &trace.meta);
        let as_of = options.is_set(super::AS_OF.name);
        let blocks = replayed.replay.live_on(device.ordinal, as_of);
        if by.kind == KeyKind::Category && !as_of {
            footer.note_inference(&replayed);
        }
        let by = by.on(trace).on_modules(&replayed.replay, &blocks);
        let groups = sorted(by.groups(&blocks, &replayed.symbols));
        let total = device.totals.allocated;
        note_missing(&mut footer, &by, &groups, total, &replayed);
        let (place, memory) = place_and_memory(&device, Metric::Allocated);
        printer.line([
            format!("{place}: {memory} ").into(),
            Cell::new(options.units.show(total).to_string(), Style::Strong),
            format!(" at {}", duration(replayed.replay.ts_ns)).into(),
        ]);
        if let Some(chosen) = chosen_of(trace, input, "most", " then") {
            printer.plain(chosen);
        }
        printer.gap();
        let top = options.top.unwrap_or(20);
        print_groups(&mut printer, &groups, &by, ("bytes", total), top, options);
        let json = json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "device": device.ordinal,
            "at": text,
            "ts_ns": replayed.replay.ts_ns,
            "by": by.name(),
            "allocated_bytes": total,
            "groups": groups_json(&groups, &by, total),
        });
        Ok(Answer { next: hints, ..Answer::new(printer, json, footer) })
    }
}
