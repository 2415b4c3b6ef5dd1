//! `memtrace leaks --holders`: the objects that hold memory of earlier steps, according to the searches that
//! the traced process made.

use serde_json::json;

use super::super::ranks::MOST_RANKS;
use super::super::report::{Answer, Needs, Report, SearchRequest, for_each_process, next};
use super::{Findings, Reading, findings};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::symbols::SymbolTable;
use crate::render::heading::process_heading;
use crate::render::numbers::counted;
use crate::render::printer::{Cell, Printer, Style};
use crate::state::retained::{RetainedSearch, RetainedSearches};

/// `memtrace leaks --holders`.
pub(super) struct LeaksHolders;

/// The option that selects this report.
pub(super) const HOLDERS: Flag = Flag::switch(
    "holders",
    "List the Python objects that keep memory of earlier steps instead: lists, closures, caches, graphs, \
     tracebacks",
);

impl Report for LeaksHolders {
    fn name(&self) -> &'static str {
        "leaks --holders"
    }

    fn about(&self) -> &'static str {
        "List the Python objects that keep memory of earlier steps: lists, closures, caches, graphs, \
         tracebacks"
    }

    fn flags(&self) -> &'static [Flag] {
        const {
            &[
                Flag::switch(
                    "all",
                    "Show every search, and also holders that are no leaks: bounded buffers, tables filled once, recent tensors",
                ),
                Flag {
                    name: "pid",
                    value: Some("PID"),
                    default: "",
                    choices: &[],
                    help: "Ask this running process to search when its next step begins, then read its trace",
                },
                Flag {
                    name: "wait",
                    value: Some("SECS"),
                    default: "60",
                    choices: &[],
                    help: "With --pid: give up when no step begins for this long; the request stays pending",
                },
            ]
        }
    }

    fn needs(&self, options: &Options) -> Result<Needs> {
        let bad = |name: &str, expected: &str| {
            Error::usage(format!("--{name} {}: expected {expected}", options.text(name)))
        };
        let pid = match options.text("pid") {
            "" => return Ok(Needs::default()),
            text => {
                text.parse().ok().filter(|pid| *pid > 0).ok_or_else(|| bad("pid", "the id of a process"))?
            }
        };
        let seconds = options.text("wait").parse().ok().filter(|seconds| *seconds <= 86_400);
        let patience_s = seconds.ok_or_else(|| bad("wait", "seconds, up to 86400"))?;
        Ok(Needs { search: Some(SearchRequest { pid, patience_s }), ..Needs::default() })
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let most = options.top.unwrap_or(MOST_RANKS);
        let mut answer = for_each_process(input, options, |index, trace, printer, footer| {
            let mut searches = RetainedSearches::default();
            let (known, symbols) = (flow_categories(trace, options)?, SymbolTable::default());
            let Reading { whole, found, .. } =
                findings(trace, options, known, &symbols, &mut [&mut searches], |_, _| {})?;
            let to_report =
                if options.text("pid").is_empty() { searches.to_report() } else { searches.asked_for() };
            let unnamed = Unnamed::new(&found, to_report);
            footer.add_reading(trace, &whole);
            footer.note_degraded(trace);
            if index < most {
                process_heading(printer, input, index);
                print(printer, &searches, to_report, &unnamed, options);
            }
            Ok(json!({
                "file": trace.path.display().to_string(),
                "rank": trace.meta.rank,
                "growth_bytes_per_step": unnamed.growth,
                "unnamed_bytes_per_step": unnamed.bytes,
                "unnamed_because": unnamed.reason(),
                "searches": searches.all.iter().map(RetainedSearch::json).collect::<Vec<_>>(),
            }))
        })?;
        if input.traces.len() > most {
            answer.body.gap();
            answer.body.plain(format!(
                "{}; --top N shows them",
                counted((input.traces.len() - most) as u64, "more process")
            ));
        }
        Ok(Answer { next: vec![next("leaks", input, "")], ..answer })
    }
}

/// The growth from step to step that the holders of a search do not explain.
struct Unnamed {
    /// The measured growth in bytes per step; `None` if the trace has too few steps.
    growth: Option<i64>,
    /// The part of the growth that no holder explains, in bytes per step; 0 if it is small.
    bytes: i64,
    /// The category that grows fastest; empty if nothing grows.
    category: &'static str,
}

/// The categories that a search for holders leaves out, because memory of these categories lives for the
/// whole run.
const NOT_SEARCHED: [&str; 4] = ["parameter", "buffer", "gradient", "optimizer_state"];

impl Unnamed {
    fn new(found: &Findings, search: Option<&RetainedSearch>) -> Unnamed {
        let growth = found.rate();
        let named: i64 = search
            .into_iter()
            .flat_map(RetainedSearch::retained)
            .filter_map(|holder| holder.bytes_per_step())
            .fold(0, i64::saturating_add);
        let bytes = growth.unwrap_or(0).saturating_sub(named);
        // Both rates are estimates, so a small difference is ignored. `growth` is the slope of a fitted line,
        // and `named` is the sum of the holders' mean growth per step.
        let is_much = bytes >= 1024 && bytes > growth.unwrap_or(0) / 10;
        Unnamed { growth, bytes: if is_much { bytes } else { 0 }, category: found.growing_category() }
    }

    /// Returns the likely reason for the unexplained growth; empty if there is no such growth.
    fn reason(&self) -> &'static str {
        match self.bytes {
            0 => "",
            _ if NOT_SEARCHED.contains(&self.category) => {
                "most of it belongs to parameters, buffers, gradients or optimizer state, which are not \
                 searched: does the program keep a copy of the model, or an optimizer, of each step?"
            }
            _ => {
                "the search cannot find storages, DLPack capsules, elements of object \
                 arrays, objects of C++, lists made before gc.freeze(), or chains of more than ten \
                 references; or the growth began after the search"
            }
        }
    }
}

/// Prints the most informative search; with `--all`, every search.
fn print(
    printer: &mut Printer,
    searches: &RetainedSearches,
    to_report: Option<&RetainedSearch>,
    unnamed: &Unnamed,
    options: &Options,
) {
    let all = options.is_set("all");
    let shown: Vec<&RetainedSearch> =
        if all { searches.all.iter().collect() } else { to_report.into_iter().collect() };
    if shown.is_empty() {
        printer.plain(
            "No search has run: the process searches at an OOM, when memory grows from step to step, when \
             the program calls memtrace.retained(), and when memtrace leaks --holders --pid PID asks it.",
        );
    }
    for search in shown {
        // Only the most informative search is compared with the growth.
        let unnamed = Some(unnamed).filter(|_| to_report == Some(search));
        print_search(printer, search, unnamed, options, all);
    }
}

/// Prints the holders that a search found; with `all`, also the holders that are not leaks.
fn print_search(
    printer: &mut Printer,
    search: &RetainedSearch,
    unnamed: Option<&Unnamed>,
    options: &Options,
    all: bool,
) {
    let most = options.top.unwrap_or(10);
    printer.plain(search.moment());
    let mut holders = search.holders.iter().filter(|holder| all || holder.is_retained()).peekable();
    if holders.peek().is_none() {
        let has_grounds = search.is_whole && unnamed.is_some_and(|unnamed| unnamed.growth.is_some());
        printer.plain(if has_grounds && unnamed.is_some_and(|unnamed| unnamed.bytes == 0) {
            "  nothing is retained"
        } else {
            "  nothing was found to be retained"
        });
    }
    let least = if search.is_whole { "" } else { "at least " };
    for holder in holders.take(most) {
        let style = if holder.is_retained() { Style::Alarm } else { Style::Plain };
        let kind = if all { format!("  [{}] {least}", holder.text("verdict")) } else { format!("  {least}") };
        printer.line([kind.into(), Cell::new(holder.line(options.units), style)]);
    }
    if let Some(unnamed) = unnamed.filter(|unnamed| unnamed.bytes > 0) {
        printer.line([
            Cell::new(format!("  {} a step", options.units.show(unnamed.bytes)), Style::Alarm),
            format!(" of growth has no known holder (memtrace leaks shows its ops): {}", unnamed.reason())
                .into(),
        ]);
    }
    if let Some(gap) = search.gap() {
        printer.plain(format!("  {gap}"));
    }
}

/// Prints the holders of retained memory with a heading of their own, for other reports. Prints nothing if no
/// memory is retained.
pub(in crate::reports) fn print_retained(
    printer: &mut Printer,
    search: Option<&RetainedSearch>,
    options: &Options,
) {
    let Some(search) = search.filter(|search| search.retained().next().is_some()) else { return };
    let holders: Vec<_> = search.retained().collect();
    printer.gap();
    printer.plain(format!(
        "{} of memory (memtrace leaks --holders, {}):",
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
