//! `memtrace peak --mem-tracker`: memory per device and type, in the format of PyTorch's `MemTracker`.

use memtrace_trace::units::Unit;
use serde_json::{Value, json};

use super::super::mem_tracker::{ROUNDED, Types, names, rounds_to_nothing, type_of, value};
use super::super::report::{Answer, Report, next};
use super::AS_OF;
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::formats::Form;
use crate::render::heading::heading;
use crate::render::printer::Printer;
use crate::render::process_names::rank_or_name;
use crate::render::rst;
use crate::state::categories::Phases;
use crate::state::moment::{self, replay_to_moment};
use crate::state::replay::{Block, Metric, device_name};
use crate::state::replay_trace::{Replayed, replay_trace};

/// `memtrace peak --mem-tracker`.
pub(super) struct PeakMemTracker;

/// The option that selects this report.
pub(super) const MEM_TRACKER: Flag = Flag::switch(
    "mem-tracker",
    "Print the table of PyTorch's MemTracker, memory by type: of each device at its own peak, or of all at \
     the moment of --at",
);

impl Report for PeakMemTracker {
    fn name(&self) -> &'static str {
        "peak --mem-tracker"
    }

    fn about(&self) -> &'static str {
        "Show memory per device and type, at the peak or another moment, as MemTracker prints it"
    }

    fn flags(&self) -> &'static [Flag] {
        const { &[moment::FLAG, Flag::switch("table", "Print a reStructuredText table"), ROUNDED, AS_OF] }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let at = options.text(moment::FLAG.name);
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut devices = Vec::new();
        for (index, trace) in input.traces.iter().enumerate() {
            if index == 0 {
                heading(&mut printer, input, &trace.meta);
                printer.gap();
            }
            let found = if at.is_empty() {
                at_peaks(
                    trace,
                    &replay_trace(
                        trace,
                        Columns::of(&["rounded_bytes"]),
                        options,
                        Metric::Allocated,
                        flow_categories(trace, options)?,
                        |_, _| {},
                    )?,
                    options,
                    &mut footer,
                )
            } else {
                let Some(replayed) = replay_to_moment(
                    trace,
                    &at.parse()?,
                    Columns::of(&["rounded_bytes"]),
                    options,
                    flow_categories(trace, options)?,
                    |_, _| {},
                )?
                else {
                    footer.read(trace, options)?;
                    continue;
                };
                current(trace, &replayed, options, &mut footer)
            };
            devices.extend(found.into_iter().map(|(ordinal, types)| (trace, ordinal, types)));
        }
        let many = input.traces.len() > 1;
        let named: Vec<(String, Types)> = devices
            .iter()
            .map(|(trace, ordinal, types)| {
                let device = device_name(*ordinal);
                (if many { format!("{} {device}", rank_or_name(trace, input)) } else { device }, *types)
            })
            .collect();
        print(&mut printer, &named, options.units, options.is_set("table"));
        let devices: Vec<Value> = devices
            .iter()
            .map(|(trace, ordinal, types)| {
                let mut value = json!({ "rank": trace.meta.rank, "device": ordinal });
                for (name, bytes) in names([types]).zip(types) {
                    value[name] = (*bytes).into();
                }
                value["Total"] = types.iter().sum::<i64>().into();
                value
            })
            .collect();
        let json = json!({ "at": if at.is_empty() { "peak" } else { at }, "devices": devices });
        Ok(Answer { next: vec![next("modules", input, "")], ..Answer::new(printer, json, footer) })
    }
}

fn sum(blocks: impl IntoIterator<Item = Block>, phases: &Phases, options: &Options) -> Types {
    let mut types = Types::default();
    for block in blocks {
        let asked = options.is_set(ROUNDED.name) && block.rounded > 0;
        types[type_of(block.owner.category, block.owner.phase, phases)] +=
            if asked { block.rounded } else { block.bytes };
    }
    types
}

fn wanted(ordinal: i32, options: &Options) -> bool {
    options.device.is_none_or(|only| only == ordinal)
}

/// Returns the memory of each device at its own peak.
fn at_peaks(
    trace: &TraceFile,
    replayed: &Replayed,
    options: &Options,
    footer: &mut Footer,
) -> Vec<(i32, Types)> {
    let as_of = options.is_set(AS_OF.name);
    each_device(trace, replayed, options, footer, |ordinal| {
        sum(replayed.replay.at_peak(ordinal, as_of), &replayed.replay.phases, options)
    })
}

/// Returns the live memory of each device.
fn current(
    trace: &TraceFile,
    replayed: &Replayed,
    options: &Options,
    footer: &mut Footer,
) -> Vec<(i32, Types)> {
    let as_of = options.is_set(AS_OF.name);
    each_device(trace, replayed, options, footer, |ordinal| {
        sum(replayed.replay.live_on(ordinal, as_of), &replayed.replay.phases, options)
    })
}

/// Returns the memory of each wanted device, which `types` computes. Adds the device's share to the footer.
fn each_device(
    trace: &TraceFile,
    replayed: &Replayed,
    options: &Options,
    footer: &mut Footer,
    types: impl Fn(i32) -> Types,
) -> Vec<(i32, Types)> {
    footer.add_reading(trace, replayed);
    footer.note_inference(replayed);
    let ordinals = replayed.replay.devices().iter().map(|device| device.ordinal);
    ordinals
        .filter(|ordinal| wanted(*ordinal, options))
        .map(|ordinal| {
            footer.add_share(replayed, ordinal);
            (ordinal, types(ordinal))
        })
        .collect()
}

fn print(printer: &mut Printer, devices: &[(String, Types)], units: Unit, table: bool) {
    let shown: Vec<&(String, Types)> =
        devices.iter().filter(|(_, types)| !rounds_to_nothing(types.iter().sum(), units)).collect();
    if devices.iter().all(|(_, types)| types.iter().all(|bytes| *bytes == 0)) {
        printer.plain("No memory tracked.");
        return;
    }
    let mut names: Vec<&str> = names(devices.iter().map(|(_, types)| types)).collect();
    let kinds = names.len();
    names.push("Total");
    let cells = |types: &Types| {
        let total = types.iter().sum();
        types[..kinds].iter().chain([&total]).map(|bytes| value(*bytes, units)).collect::<Vec<_>>()
    };
    if table || printer.form() == Form::Csv {
        let heads: Vec<&str> = ["Device"].into_iter().chain(names).collect();
        let rows: Vec<Vec<String>> = shown
            .iter()
            .map(|(device, types)| [device.clone()].into_iter().chain(cells(types)).collect())
            .collect();
        rst::print(printer, &heads, &rows);
        return;
    }
    for (device, types) in shown {
        printer.plain(format!("Device: {device}"));
        for (name, cell) in names.iter().zip(cells(types)) {
            printer.plain(format!("\t{name}: {cell}"));
        }
    }
}
