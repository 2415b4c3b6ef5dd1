//! `memtrace ops --actions`: the memory profile of `torch.profiler`. Counts the blocks that existed before,
//! were created, were changed in place or were destroyed, by the profiler's categories.

use serde_json::{Value, json};

use super::super::report::{Answer, Report, for_each_process, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::{Action, Profile, ProfilerCategory, profile_and_flow};
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::render::heading::heading;
use crate::render::numbers::count;
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::rank_or_name;
use crate::state::replay::{Metric, device_title};
use crate::state::replay_trace::replay_trace;

/// `memtrace ops --actions`.
pub(super) struct Actions;

/// The option that selects this report.
pub(super) const ACTIONS: Flag = Flag::switch(
    "actions",
    "Instead, count the blocks created, changed in place and destroyed, by torch.profiler's categories",
);

impl Report for Actions {
    fn name(&self) -> &'static str {
        "ops --actions"
    }

    fn about(&self) -> &'static str {
        "Count blocks created, changed in place and destroyed, by torch.profiler's categories"
    }

    fn flags(&self) -> &'static [Flag] {
        const { &[Flag::switch("each", "With --json: list every action, in the profiler's order")] }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let answer = for_each_process(input, options, |index, trace, printer, footer| {
            let (profile, flow) = profile_and_flow(trace, options)?;
            let replayed =
                replay_trace(trace, Columns::of(&[]), options, Metric::Allocated, flow, |_, _| {})?;
            footer.add(trace, &replayed, options);
            for note in profile.notes() {
                if !footer.notes.contains(&note) {
                    footer.notes.push(note);
                }
            }
            if index == 0 {
                heading(printer, input, &trace.meta);
            }
            let mut devices = Vec::new();
            for device in profile.devices() {
                if options.device.is_some_and(|only| only != device) {
                    continue;
                }
                printer.gap();
                let rank = if input.traces.len() > 1 {
                    format!("{}, ", rank_or_name(trace, input))
                } else {
                    String::new()
                };
                printer.plain(format!("{rank}{}", device_title(device)));
                let sums = Sums::from_profile(&profile, device);
                sums.print(printer, options);
                let mut value = sums.json(device);
                if options.is_set("each") {
                    value["actions"] = each(&profile, device);
                }
                devices.push(value);
            }
            Ok(json!({
                "file": trace.path.display().to_string(),
                "rank": trace.meta.rank,
                "has_io": profile.has_io,
                "devices": devices,
            }))
        })?;
        let hints = vec![next("peak", input, "--by category"), next("ops", input, "")];
        Ok(Answer { next: hints, ..answer })
    }
}

/// The number of actions, and the sum of the bytes of their blocks.
type Sum = (u64, i64);

/// The sums of one device.
#[derive(Default)]
struct Sums {
    /// The number and bytes of actions, by category and then by action.
    actions: [[Sum; 4]; 8],
    /// The peak of each category, in bytes.
    highest: [i64; 8],
    /// For each category: true if it is inferred for at least one block.
    inferred: [bool; 8],
}

impl Sums {
    fn from_profile(profile: &Profile, device: i32) -> Sums {
        let mut sums = Sums::default();
        for change in profile.actions(device) {
            let category = change.category as usize;
            let (times, bytes) = &mut sums.actions[category][change.action as usize - 1];
            *times += 1;
            *bytes = bytes.wrapping_add(profile.block(change).bytes);
            sums.inferred[category] |= change.inferred;
        }
        for (_, sizes) in profile.timeline(device) {
            for (highest, bytes) in sums.highest.iter_mut().zip(&sizes[1..]) {
                *highest = (*highest).max(*bytes);
            }
        }
        sums
    }

    fn print(&self, printer: &mut Printer, options: &Options) {
        let mut table = Table::new(&[
            ("peak", Side::Right),
            ("preexisting", Side::Right),
            ("created", Side::Right),
            ("changed in place", Side::Right),
            ("destroyed", Side::Right),
            ("category", Side::Left),
        ]);
        for category in ProfilerCategory::ALL {
            let at = category as usize;
            if self.actions[at].iter().all(|(times, _)| *times == 0) && self.highest[at] == 0 {
                continue;
            }
            let show = |action: Action| match self.actions[at][action as usize - 1] {
                (0, _) => "-".to_owned(),
                (times, bytes) => format!("{} ({})", count(times), options.units.show(bytes)),
            };
            table.row([
                Cell::new(options.units.show(self.highest[at]).to_string(), Style::Strong),
                show(Action::Preexisting).into(),
                show(Action::Create).into(),
                show(Action::IncrementVersion).into(),
                show(Action::Destroy).into(),
                format!("{}{}", category.name(), if self.inferred[at] { " *" } else { "" }).into(),
            ]);
        }
        printer.table(&table);
    }

    fn json(&self, device: i32) -> Value {
        let categories: serde_json::Map<String, Value> = ProfilerCategory::ALL
            .into_iter()
            .map(|category| {
                let at = category as usize;
                let mut value = json!({ "highest_bytes": self.highest[at], "inferred": self.inferred[at] });
                for action in Action::ALL {
                    let (times, bytes) = self.actions[at][action as usize - 1];
                    value[action.name()] = json!({ "count": times, "bytes": bytes });
                }
                (category.name().to_owned(), value)
            })
            .collect();
        json!({ "device": device, "categories": categories })
    }
}

fn each(profile: &Profile, device: i32) -> Value {
    let all: Vec<Value> = profile
        .actions(device)
        .map(|change| {
            let block = profile.block(change);
            json!({
                "ts_ns": change.time_ns,
                "action": change.action.name(),
                "alloc_id": block.id,
                "addr": block.addr,
                "bytes": block.bytes,
                "version": change.version,
                "category": change.category.name(),
                "category_after": change.after.name(),
                "inferred": change.inferred,
            })
        })
        .collect();
    all.into()
}
