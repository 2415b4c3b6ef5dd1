//! `memtrace retained`: what holds memory that earlier steps have left behind, as the traced process found it.

use serde_json::json;

use super::report::{Answer, Report, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::render::footer::Footer;
use crate::render::heading::process_heading;
use crate::render::numbers::counted;
use crate::render::printer::{Cell, Printer, Style};
use crate::state::retained::{RetainedSearch, RetainedSearches};

/// `memtrace retained`.
pub(super) struct Retained;

impl Report for Retained {
    fn name(&self) -> &'static str {
        "retained"
    }

    fn about(&self) -> &'static str {
        "Name what holds memory of earlier steps (list, closure, cache, graph, traceback); TRACE or a PID to ask"
    }

    fn flags(&self) -> &'static [Flag] {
        const {
            &[
                Flag::switch(
                    "all",
                    "Every search, and what it found to be held for one step or since the last step",
                ),
                Flag {
                    name: "wait",
                    value: Some("SECS"),
                    default: "60",
                    choices: &[],
                    help: "With the id of a running process for TRACE: wait so long for its next step, which searches",
                },
            ]
        }
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut printer = options.printer();
        let mut processes = Vec::new();
        for (index, trace) in input.traces.iter().enumerate() {
            let searches = RetainedSearches::read(trace, options)?;
            process_heading(&mut printer, input, index);
            print(&mut printer, &searches, options);
            processes.push(json!({
                "file": trace.path.display().to_string(),
                "rank": trace.meta.rank,
                "searches": searches.all.iter().map(RetainedSearch::json).collect::<Vec<_>>(),
            }));
        }
        Ok(Answer {
            body: printer,
            json: json!({ "processes": processes }),
            footer: Footer::new(input),
            next: vec![next("leaks", input, "")],
            ..Answer::default()
        })
    }
}

fn print(printer: &mut Printer, searches: &RetainedSearches, options: &Options) {
    let all = options.is_set("all");
    let shown: Vec<&RetainedSearch> =
        if all { searches.all.iter().collect() } else { searches.telling().into_iter().collect() };
    if shown.is_empty() {
        printer.plain(
            "Nobody has searched: the process searches at an OOM, when memory grows from step to step, when the program \
             calls memtrace.retained(), and when memtrace retained PID asks it.",
        );
    }
    for search in shown {
        print_search(printer, search, options, all);
    }
}

/// Prints what a search found; with `all` what is no leak too.
fn print_search(printer: &mut Printer, search: &RetainedSearch, options: &Options, all: bool) {
    let most = options.top.unwrap_or(10);
    printer.plain(search.moment());
    let mut holders = search.holders.iter().filter(|holder| all || holder.is_retained()).peekable();
    if holders.peek().is_none() {
        printer.plain(if search.is_whole {
            "  nothing is retained"
        } else {
            "  nothing was found to be retained"
        });
    }
    let least = if search.is_whole { "" } else { "at least " };
    for holder in holders.take(most) {
        let style = if holder.is_retained() { Style::Alarm } else { Style::Plain };
        let kind = if all { format!("  [{}] {least}", holder.verdict) } else { format!("  {least}") };
        printer.line([kind.into(), Cell::new(holder.line(options.units), style)]);
    }
    if let Some(gap) = search.gap() {
        printer.plain(format!("  {gap}"));
    }
}

/// The lines of the holders of what is retained, for other reports, below a title of their own.
pub(super) fn print_retained(printer: &mut Printer, search: Option<&RetainedSearch>, options: &Options) {
    let Some(search) = search.filter(|search| search.retained().next().is_some()) else { return };
    let holders: Vec<_> = search.retained().collect();
    printer.gap();
    printer.plain(format!(
        "{} of memory (memtrace retained, {}):",
        counted(holders.len() as u64, "holder"),
        search.moment()
    ));
    for holder in holders.into_iter().take(options.top.unwrap_or(5)) {
        let least = if search.is_whole { "  " } else { "  at least " };
        printer.line([least.into(), Cell::new(holder.line(options.units), Style::Strong)]);
    }
    if let Some(gap) = search.gap() {
        printer.plain(format!("  {gap}"));
    }
}
