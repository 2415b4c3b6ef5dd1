//! `memtrace oom`: the reason why a request ran out of memory, the evidence, and the remedies.
//!
//! [`whole_trace`] reads a trace and finds its last OOM, [`trace_to_oom`] reads it up to there, [`gather`] turns it into [`evidence`] by topic, and the
//! [`findings`] judge the evidence. [`findings`] says how to add one. [`case`] prints the result.

mod advised_changes;
mod attention;
mod case;
mod cycles;
mod earlier_graph;
mod eval_mode;
mod evidence;
mod finding;
mod findings;
mod forwards;
mod found_at_oom;
mod gather;
mod grown_model;
mod kept_memory;
mod kept_reasons;
mod layers_left;
mod limits;
mod module_calls;
mod optimizer_step;
mod retained_holders;
mod rows_before;
mod server_limit;
mod step_groups;
#[cfg(test)]
mod test_evidence;
#[cfg(test)]
mod test_trace;
mod trace_to_oom;
mod whole_trace;

use serde_json::{Value, json};

use super::advise::predictions::FirstAdvice;
use super::device_users::{self, OthersAt};
use super::group_table::print_groups;
use super::growth::growth_lines;
use super::killed::{Killed, RunVictims};
use super::leaks::holders::print_retained;
use super::report::{Answer, Report, next};
use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::printer::Printer;
use crate::render::process_names::rank_or_name;
use crate::state::group::{Key, sorted};
use crate::state::replay::Block;
use crate::state::replay_trace::Replayed;
use crate::state::retained::RetainedSearch;
use crate::state::step_inputs::LargestInput;
use finding::OomCase;
pub(super) use kept_memory::KeptMemory;
use server_limit::Refused;
use trace_to_oom::TraceToOom;
use whole_trace::WholeTrace;

/// The maximum number of remedies on the page.
const MOST_ON_PAGE: usize = 3;
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
        let mut footer = Footer::of([input]);
        let mut cases = Vec::new();
        let mut wholes = Vec::new();
        for trace in &input.traces {
            let (whole, replayed) = WholeTrace::read(trace, options)?;
            footer.add_reading(trace, &replayed);
            wholes.push(whole);
        }
        let mut users = None;
        for (trace, whole) in input.traces.iter().zip(&wholes) {
            let Some(at) = TraceToOom::read(trace, whole, options)? else { continue };
            let (row, replayed) = (&at.row, &at.replayed);
            let mut case = OomCase::new(&at);
            let others = case.evidence.device.others;
            if others > 0 {
                let users = match &mut users {
                    Some(users) => users,
                    unread => unread.insert(device_users::read_users(input, options)?),
                };
                let here = OthersAt { device: row.device, ts_ns: row.ts_ns, bytes: others };
                case.neighbours = device_users::neighbours(users, trace, &here, options);
            }
            let search = at.search();
            if cases.is_empty() {
                heading(&mut printer, input, &trace.meta);
            }
            printer.gap();
            let (advised, why_not) = helps(&case);
            case.print(&mut printer, &rank_or_name(trace, input), &advised, options);
            let grown = growth_lines(&at.levels, options.units);
            for line in &grown {
                printer.plain(line);
            }
            let largest = at.levels.largest_input(&replayed.symbols);
            if let Some(line) = largest.as_ref().and_then(LargestInput::line) {
                printer.plain(line);
            }
            if let Some(why) = &why_not {
                printer.plain(format!("memtrace advise finds nothing for this peak: {why}"));
            }
            if let Some(text) = whole.detail.about(row.step, &trace.meta) {
                printer.plain(text);
            }
            print_live_blocks(&mut printer, replayed, row.device, options);
            print_retained(&mut printer, search, options);
            footer.note_inference(replayed);
            footer.note_detail(trace, &whole.detail);
            footer.add_share(replayed, row.device);
            let advised: Vec<String> =
                advised.iter().map(|advice| case.advised_line(advice, options.units)).collect();
            let mut value = case.json();
            value["retained"] = search.map(RetainedSearch::json).into();
            value["growth"] = grown.into();
            value["largest_input"] = largest.as_ref().map(LargestInput::json).into();
            value["advised"] = advised.into();
            value["not_advised_because"] = why_not.into();
            cases.push(value);
        }
        let killed = print_killed(&mut printer, input, &wholes, !cases.is_empty(), options)?;
        let refused = match cases.as_slice() {
            [] => print_refused(&mut printer, input, &wholes, !killed.is_empty(), options)?,
            _ => Vec::new(),
        };
        if cases.is_empty() && refused.is_empty() {
            if let Some(trace) = input.traces.first().filter(|_| killed.is_empty()) {
                heading(&mut printer, input, &trace.meta);
            }
            printer.gap();
            printer.plain("No request ran out of memory.");
        }
        let hints = hints(input, &cases, &killed, &refused);
        let json = json!({ "ooms": cases, "killed": killed, "refused": refused });
        Ok(Answer { next: hints, ..Answer::new(printer, json, footer) })
    }
}

/// Prints which processes were killed, and returns the JSON of each. When the host's memory runs out, no request fails,
/// but the kernel kills a process.
fn print_killed(
    printer: &mut Printer,
    input: &Input,
    wholes: &[WholeTrace],
    has_oom: bool,
    options: &Options,
) -> Result<Vec<Value>> {
    let mut killed = Vec::new();
    let victims = RunVictims::new(&input.traces, options);
    for (trace, whole) in input.traces.iter().zip(wholes) {
        let Some(verdict) = Killed::find(trace, &whole.host, &victims, options)? else { continue };
        if !has_oom && killed.is_empty() {
            heading(printer, input, &trace.meta);
        }
        // The kill of a child is derived from a counter that may also count other processes. So after an
        // OOM, a killed child is not printed as a second verdict.
        if !has_oom || verdict.is_of_process() {
            printer.gap();
            if input.traces.len() > 1 {
                printer.plain(format!("{}:", rank_or_name(trace, input)));
            }
            verdict.print(printer, options);
        }
        let mut value = verdict.json(options);
        value["file"] = trace.path.display().to_string().into();
        value["rank"] = trace.meta.rank.into();
        killed.push(value);
    }
    Ok(killed)
}

/// Prints which servers refused to start, and returns the JSON of each.
fn print_refused(
    printer: &mut Printer,
    input: &Input,
    wholes: &[WholeTrace],
    has_heading: bool,
    options: &Options,
) -> Result<Vec<Value>> {
    let mut refused = Vec::new();
    for (trace, whole) in input.traces.iter().zip(wholes) {
        let Some(server) = Refused::find(trace, whole.server, options)? else { continue };
        if !has_heading && refused.is_empty() {
            heading(printer, input, &trace.meta);
        }
        printer.gap();
        server.print(printer, options);
        refused.push(server.json(trace));
    }
    Ok(refused)
}

/// Returns the commands that show more.
fn hints(input: &Input, cases: &[Value], killed: &[Value], refused: &[Value]) -> Vec<String> {
    if !refused.is_empty() {
        return vec![next("serving", input, ""), next("ledger", input, "")];
    }
    if cases.is_empty() && !killed.is_empty() {
        return vec![next("ledger", input, "--host --at end"), next("leaks", input, "")];
    }
    if cases.is_empty() {
        return vec![next("summary", input, "")];
    }
    let is_advised = cases.iter().any(|case| case["advised"].as_array().is_some_and(|all| !all.is_empty()));
    let mut hints = vec![next("frag", input, "--at oom"), next("peak", input, "--by category")];
    if is_advised {
        hints.insert(0, next("advise", input, ""));
    }
    hints
}

/// Returns the verdict and the first remedies for the page: `device`, `verdict`, `because` and `try`. Null
/// without an OOM.
///
/// # Errors
/// When the trace cannot be read.
pub fn oom_for_page(trace: &TraceFile, options: &Options) -> Result<Value> {
    let (whole, _) = WholeTrace::read(trace, options)?;
    let Some(at) = TraceToOom::read(trace, &whole, options)? else { return Ok(Value::Null) };
    let case = OomCase::new(&at);
    let advised = helps(&case).0;
    let mut tries = case.all_tries(&advised, options.units);
    tries.truncate(MOST_ON_PAGE);
    Ok(json!({
        "device": at.row.device,
        "verdict": case.verdict(),
        "because": case.after_verdict(options.units),
        "try": tries,
    }))
}

/// Returns the changes of `memtrace advise` that save most and suit the case, or the reason why `memtrace advise` fails.
fn helps(case: &OomCase<'_>) -> (Vec<FirstAdvice>, Option<String>) {
    if !case.is_need() {
        return (Vec::new(), None);
    }
    match &case.oom_state.advice {
        Ok(advice) => (advice.iter().filter_map(|advice| case.suited(advice.clone())).collect(), None),
        Err(why) => (Vec::new(), Some(why.to_string())),
    }
}

/// Prints the live blocks at the OOM, by category and by module. `--top` sets the number of modules (default
/// 10).
fn print_live_blocks(printer: &mut Printer, replayed: &Replayed, ordinal: i32, options: &Options) {
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
