//! `memtrace oom`: why a request ran out of memory, the evidence, and what to try.

mod case;
mod cause;
mod recomputed;
mod remedies;
mod step_groups;

use serde_json::json;

use super::advise::{Advised, FirstAdvice};
use super::group_table::print_groups;
use super::growth::growth_lines;
use super::killed::Killed;
use super::leaks_holders::print_retained;
use super::report::{Answer, Report, next};
use crate::error::Result;
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::printer::Printer;
use crate::state::detail::DetailedSteps;
use crate::state::group::{Key, sorted};
use crate::state::host_memory::HostMemory;
use crate::state::layout::{self, Layout};
use crate::state::levels::Levels;
use crate::state::moment::{NamedMoment, replay_to_moment};
use crate::state::replay::Block;
use crate::state::replay_trace::Replayed;
use crate::state::retained::{RetainedSearch, RetainedSearches};

use case::{OomCase, RowsBefore};

/// The changes of `memtrace advise` that are shown.
const MOST_ADVISED: usize = 5;

/// `memtrace oom`.
pub(super) struct Oom;

impl Report for Oom {
    fn name(&self) -> &'static str {
        "oom"
    }

    fn about(&self) -> &'static str {
        "Explain an out-of-memory error: the request, the free memory, the cause, what to try"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[("oom out", "why it ran out of memory, and what to try")]
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut printer = options.printer();
        let mut footer = Footer::new(input);
        let mut cases = Vec::new();
        for trace in &input.traces {
            let mut layout = Layout::default();
            let mut seen = RowsBefore::default();
            let mut levels = Levels::new(options.device);
            let columns = layout::COLUMNS.and(step_groups::COLUMNS).and(Columns::of(&[
                "api",
                "device_free_bytes",
                "name",
                "stack_id",
            ]));
            let replayed = replay_to_moment(
                trace,
                &NamedMoment::Oom,
                columns,
                options,
                flow_categories(trace, options)?,
                |row, replay| {
                    layout.feed(row);
                    levels.feed(row, replay);
                    seen.feed(row, replay, trace);
                },
            )?;
            let (Some(replayed), Some(row)) = (replayed, seen.oom) else { continue };
            let searches = RetainedSearches::read(trace, options)?;
            let search = searches.at_oom();
            let case = OomCase::new(trace, &replayed, &layout, &row, &seen, search);
            if cases.is_empty() {
                heading(&mut printer, input, &trace.meta);
            }
            printer.gap();
            let (advised, why_not) = if case.is_need() { helps(trace, options) } else { (Vec::new(), None) };
            case.print(&mut printer, &advised, options);
            let grown = growth_lines(&levels, &trace.meta, options.units);
            for line in &grown {
                printer.plain(line);
            }
            if let Some(why) = &why_not {
                printer.plain(format!("memtrace advise finds nothing for this peak: {why}"));
            }
            let detail = DetailedSteps::read(trace, options)?;
            if let Some(text) = detail.about(row.step, &trace.meta) {
                printer.plain(text);
            }
            holders(&mut printer, &replayed, row.device, options);
            print_retained(&mut printer, search, options);
            footer.note_inference(&replayed);
            footer.add_reading(trace, &replayed);
            footer.note_detail(trace, &detail);
            footer.add_share(&replayed, row.device);
            let advised: Vec<String> =
                advised.iter().map(|advice| case.advised_line(advice, options.units)).collect();
            let mut value = case.json(&replayed);
            value["retained"] = search.map(RetainedSearch::json).into();
            value["growth"] = grown.into();
            value["advised"] = advised.into();
            value["not_advised_because"] = why_not.into();
            cases.push(value);
        }
        // Memory of the host has no request that fails: the kernel kills.
        let mut killed = Vec::new();
        for trace in &input.traces {
            let memory = HostMemory::read(trace, options)?;
            let Some(verdict) = Killed::of(trace, &memory) else { continue };
            if cases.is_empty() && killed.is_empty() {
                heading(&mut printer, input, &trace.meta);
            }
            printer.gap();
            if input.traces.len() > 1 {
                printer.plain(format!("rank {}:", trace.meta.rank));
            }
            verdict.print(&mut printer, options);
            let mut value = verdict.json(options);
            value["file"] = trace.path.display().to_string().into();
            value["rank"] = trace.meta.rank.into();
            killed.push(value);
        }
        if cases.is_empty() {
            printer.gap();
            printer.plain("No request ran out of memory.");
        }
        let hints = if cases.is_empty() && !killed.is_empty() {
            vec![next("ledger", input, "--host --at end"), next("leaks", input, "")]
        } else if cases.is_empty() {
            vec![next("summary", input, "")]
        } else {
            vec![next("frag", input, "--at oom"), next("peak", input, "--by category")]
        };
        let json = json!({ "ooms": cases, "killed": killed });
        Ok(Answer { body: printer, json, footer, next: hints, ..Answer::default() })
    }
}

/// The first lines of `memtrace advise`, or why it has none.
fn helps(trace: &TraceFile, options: &Options) -> (Vec<FirstAdvice>, Option<String>) {
    match Advised::new(trace, options, false) {
        Ok(advised) => (advised.first(MOST_ADVISED), None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    }
}

/// Prints the live blocks at the OOM: by category, and by module for the ten largest.
fn holders(printer: &mut Printer, replayed: &Replayed, ordinal: i32, options: &Options) {
    let live: Vec<Block> = replayed.replay.live_on(ordinal, false);
    let total: i64 = live.iter().map(|block| block.bytes).sum();
    let kinds = sorted(Key::CATEGORY.groups(&live, &replayed.symbols));
    let by_module = Key::MODULE.on_modules(&replayed.replay, &live);
    let modules = sorted(by_module.groups(&live, &replayed.symbols));
    for (by, groups, most) in [(&Key::CATEGORY, kinds, 9), (&by_module, modules, options.top.unwrap_or(10))] {
        printer.gap();
        print_groups(printer, &groups, by, ("held", total), most, options);
    }
}
