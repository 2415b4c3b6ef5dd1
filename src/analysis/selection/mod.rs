//! The part of a run that the selectors of a command choose: `--device`, `--step`, `--window`, `--at` and
//! `--rank`.
//!
//! A selector that matches nothing is an error that lists the possible values, because otherwise the answer
//! would be zeros or the figures of another part. Reports, exports and the HTML page all check their
//! selectors here. Unknown names in a file of limits cause the same message ([`no_match`]).

mod default_device;
mod nearest;
mod pattern;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;

use memtrace_trace::EventName;
use memtrace_trace::counts::count;
use memtrace_trace::memory::{MemoryKind, Metric};

use crate::error::{Error, Result};
use crate::options::{Options, Window};
use crate::read::input::Input;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::render::numbers::duration;
use crate::state::marks::{self, MarkFinder, MarkName, is_mark};
use crate::state::moment::{self, MOMENTS, NamedMoment};
use crate::state::replay::{CPU, has_current_step, is_gpu};
pub use default_device::with_default_device;
use nearest::Ranges;
pub use nearest::{nearest_names, nearest_numbers};
pub use pattern::matches;

/// Keeps the processes of `input` that match the selectors in `options`, and adds a note with the number of
/// other processes. `takes_host` is true for answers that include host memory, which `--device cpu` and
/// `--device -1` select.
///
/// # Errors
/// When a selector matches nothing in any process, and when a trace cannot be read.
pub fn select(input: &Input, options: &Options, takes_host: bool) -> Result<Input> {
    let selectors = Selectors::from_options(options, takes_host)?;
    let mut chosen = input.clone();
    if !selectors.is_any() {
        return Ok(chosen);
    }
    let mut all = Content::default();
    let mut kept = Vec::new();
    for trace in &input.traces {
        let content = Content::read(trace, &selectors)?;
        if content.has(&selectors) {
            kept.push(trace.clone());
        }
        all.add(content);
    }
    if kept.is_empty() {
        return Err(Error::usage(selectors.faults(&all, &input.path).join("\n")));
    }
    let others = input.traces.len() - kept.len();
    if others > 0 {
        let processes = if others == 1 { "process has" } else { "processes have" };
        chosen.notes.push(format!(
            "{} other {processes} nothing that {} selects",
            count(others as u64),
            selectors.given().join(" ")
        ));
    }
    chosen.traces = kept;
    Ok(chosen)
}

/// Keeps the processes of `input` with the rank that `--rank` requests.
///
/// # Errors
/// When no process has this rank.
pub fn only_rank(input: &mut Input, rank: i32) -> Result<()> {
    let ranks: Vec<i64> = input.traces.iter().map(|trace| i64::from(trace.meta.rank)).collect();
    input.only_rank(rank);
    if input.traces.is_empty() {
        return Err(no_rank(&input.path, rank, ranks));
    }
    Ok(())
}

/// Returns the error for a `--rank` that is not one of `ranks`.
#[must_use]
pub fn no_rank(path: &Path, rank: i32, ranks: impl IntoIterator<Item = i64>) -> Error {
    let list = nearest_numbers(ranks, i64::from(rank));
    Error::usage(no_match(&format!("--rank {rank}"), path, "ranks", &list))
}

/// Returns the message for a selector that matches nothing in `path`. `list` has the possible values, and
/// `kind` is a word for them, such as `ranks`.
#[must_use]
pub fn no_match(selector: &str, path: &Path, kind: &str, list: &str) -> String {
    let list = if list.is_empty() { "none" } else { list };
    format!("{selector}: no match in {}; its {kind}: {list}", path.display())
}

/// The selectors that a command was given.
struct Selectors {
    device: Option<i32>,
    takes_host: bool,
    window: Window,
    at: Option<NamedMoment>,
}

impl Selectors {
    fn from_options(options: &Options, takes_host: bool) -> Result<Selectors> {
        let at = match options.text(moment::FLAG.name) {
            "" => None,
            text => Some(text.parse()?),
        };
        // Drop moments that exist in every trace with memory: a peak and the end.
        let is_in_any =
            |at: &NamedMoment| matches!(at, NamedMoment::Peak(_) | NamedMoment::End | NamedMoment::Exit);
        let at = at.filter(|at| !is_in_any(at));
        Ok(Selectors { device: options.device, takes_host, window: options.window, at })
    }

    fn is_any(&self) -> bool {
        self.device.is_some() || self.at.is_some() || self.window != Window::default()
    }

    /// Returns true if the answer can show this device. Not every answer includes host memory.
    fn takes_device_of_trace(&self, ordinal: i32) -> bool {
        is_gpu(ordinal) || self.takes_host
    }

    fn takes_device(&self, ordinal: i32) -> bool {
        self.device.is_none_or(|only| only == ordinal) && self.takes_device_of_trace(ordinal)
    }

    fn steps(&self) -> (i64, i64) {
        (self.window.from_step, self.window.to_step)
    }

    fn has_steps(&self) -> bool {
        self.steps() != (i64::MIN, i64::MAX)
    }

    fn has_time(&self) -> bool {
        (self.window.from_ns, self.window.to_ns) != (i64::MIN, i64::MAX)
    }

    /// Returns the selectors as the user would type them.
    fn given(&self) -> Vec<String> {
        let mut given = Vec::new();
        given.extend(self.device.map(|device| format!("--device {}", device_text(device))));
        if self.has_steps() {
            given.push(format!("--step {}", range_text(self.steps(), |step| step.to_string())));
        }
        if self.has_time() {
            let times = (self.window.from_ns, self.window.to_ns);
            given.push(format!("--window {}", range_text(times, time)));
        }
        given.extend(self.at.as_ref().map(|at| format!("--at {}", at_text(at))));
        given
    }

    /// Returns one line for each selector that matches nothing. If each one matches something, but no moment
    /// matches all of them, returns one line about all selectors.
    fn faults(&self, content: &Content, path: &Path) -> Vec<String> {
        let mut faults = Vec::new();
        let mut fault = |selector: String, kind: &str, list: String| {
            faults.push(no_match(&selector, path, kind, &list));
        };
        if let Some(device) = self.device.filter(|device| !content.has_device(self, *device)) {
            let mut devices = content.devices.clone();
            devices.retain(|device| self.takes_device_of_trace(*device));
            let cpu = devices.remove(&CPU).then(|| device_text(CPU));
            let list = nearest_numbers(devices.into_iter().map(i64::from), i64::from(device));
            let list =
                cpu.into_iter().chain((!list.is_empty()).then_some(list)).collect::<Vec<_>>().join(", ");
            fault(format!("--device {}", device_text(device)), "devices", list);
        }
        let steps = self.steps();
        if self.has_steps() && !content.steps.has_any(steps) {
            let near = if steps.0 > i64::MIN { steps.0 } else { steps.1 };
            let list = content.steps.list(near);
            fault(format!("--step {}", range_text(steps, |step| step.to_string())), "steps", list);
        }
        let times = (self.window.from_ns, self.window.to_ns);
        if self.has_time() && !content.in_time {
            let selector = format!("--window {}", range_text(times, time));
            match (content.before_ns, content.after_ns) {
                (Some(before), Some(after)) => {
                    fault(selector, "nearest rows are at", format!("{} and {}", time(before), time(after)));
                }
                _ => fault(selector, "time", content.time()),
            }
        }
        match &self.at {
            Some(at @ NamedMoment::Step(step)) if !content.steps.has_any((*step, *step)) => {
                fault(format!("--at {}", at_text(at)), "steps", content.steps.list(*step));
            }
            Some(at @ NamedMoment::Mark(mark)) if !content.at_mark => {
                fault(format!("--at {}", at_text(at)), "marks and ranges", content.marks_near(mark));
            }
            Some(at @ NamedMoment::Time(ns)) if !content.has_time(*ns) => {
                fault(format!("--at {}", at_text(at)), "time", content.time());
            }
            Some(NamedMoment::Oom) if !content.oom => {
                let others = MOMENTS.replace("oom, ", "");
                let why = content.other_oom.map_or_else(
                    || "it has no out-of-memory error".to_owned(),
                    |(device, step)| {
                        let device = device_text(device);
                        let step = if step < 0 { String::new() } else { format!(", step {step}") };
                        format!("its first out-of-memory error is on device {device}{step}")
                    },
                );
                fault("--at oom".to_owned(), "moments", format!("{others} ({why})"));
            }
            _ => {}
        }
        if faults.is_empty() {
            let selector = self.given().join(" ");
            faults.push(no_match(
                &selector,
                path,
                "steps in that time",
                &content.steps_in_time.list(steps.0),
            ));
        }
        faults
    }
}

/// Returns a device as the user would type it.
fn device_text(ordinal: i32) -> String {
    if ordinal == CPU { "cpu".to_owned() } else { ordinal.to_string() }
}

/// Returns a range as the user would type it: `3:5`, `3:`, `:5` or `3`.
fn range_text((from, to): (i64, i64), show: impl Fn(i64) -> String) -> String {
    match (from, to) {
        (from, to) if from == to => show(from),
        (i64::MIN, to) => format!(":{}", show(to)),
        (from, i64::MAX) => format!("{}:", show(from)),
        (from, to) => format!("{}:{}", show(from), show(to)),
    }
}

/// Returns a time as the user would type it, in the largest unit that is exact.
fn time(ns: i64) -> String {
    match ns {
        0 => "0s".to_owned(),
        ns if ns % 1_000_000_000 == 0 => format!("{}s", ns / 1_000_000_000),
        ns if ns % 1_000_000 == 0 => format!("{}ms", ns / 1_000_000),
        ns if ns % 1000 == 0 => format!("{}us", ns / 1000),
        ns => format!("{ns}ns"),
    }
}

fn at_text(at: &NamedMoment) -> String {
    match at {
        NamedMoment::Step(step) => format!("step:{step}"),
        NamedMoment::Mark(mark) => format!("mark:{}", mark.0),
        NamedMoment::Time(ns) => time(*ns),
        NamedMoment::Oom => "oom".to_owned(),
        NamedMoment::End => "end".to_owned(),
        NamedMoment::Exit => "exit".to_owned(),
        NamedMoment::Peak(Metric::Used) => "used-peak".to_owned(),
        NamedMoment::Peak(Metric::Reserved) => "reserved-peak".to_owned(),
        NamedMoment::Peak(_) => "peak".to_owned(),
    }
}

/// The maximum number of mark names that are kept for an error message.
const MOST_MARKS: usize = 4096;

/// The content of a trace that the selectors refer to.
#[derive(Default)]
struct Content {
    /// The devices with memory.
    devices: BTreeSet<i32>,
    steps: Ranges,
    /// The steps within the time range of the window.
    steps_in_time: Ranges,
    /// The times of the first and the last row.
    span: Option<(i64, i64)>,
    /// True if a row is within the time range of the window.
    in_time: bool,
    /// True if a row is within both the time range and the steps of the window.
    in_window: bool,
    /// The time of the last row before the window.
    before_ns: Option<i64>,
    /// The time of the first row after the window.
    after_ns: Option<i64>,
    /// True if a request ran out of memory in the window, on a selected device.
    oom: bool,
    /// The device and the step of the first out-of-memory error outside the window or the selected devices.
    other_oom: Option<(i32, i64)>,
    /// True if the step of `--at` occurs in the window.
    at_step: bool,
    /// True if the mark of `--at` occurs in the window.
    at_mark: bool,
    /// The number of marks of each name, if `--at` names a mark.
    marks: BTreeMap<String, u64>,
}

impl Content {
    /// Reads `trace` until all selectors have matched, or to its end.
    fn read(trace: &TraceFile, selectors: &Selectors) -> Result<Content> {
        const COLUMNS: Columns = Columns::of(&["step", "device", "ts_ns"]);
        let mut content = Content::default();
        let mut step = -1;
        let symbols = SymbolTable::default();
        let mut finder = match &selectors.at {
            Some(NamedMoment::Mark(mark)) => Some(MarkFinder::new(mark)),
            _ => None,
        };
        let wanted = match finder {
            Some(_) => COLUMNS.and(marks::COLUMNS),
            None => COLUMNS,
        };
        // Read leniently: the report itself reports damaged lines.
        trace.read(Wanted::all_events(wanted), true, &symbols, |row| {
            if has_current_step(row.event) {
                step = row.step;
            }
            content.feed(row, step, selectors);
            if let Some(finder) = &mut finder {
                content.mark(finder, row, &symbols, selectors.window.has(row.ts_ns, step));
            }
            if content.has(selectors) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        Ok(content)
    }

    fn feed(&mut self, row: &Record, step: i64, selectors: &Selectors) {
        let (first, last) = self.span.unwrap_or((row.ts_ns, row.ts_ns));
        let now = last.max(row.ts_ns);
        self.span = Some((first.min(row.ts_ns), now));
        if MemoryKind::changed_by(row.event).is_some() || row.event == EventName::Oom {
            self.devices.insert(row.device);
        }
        self.steps.add(step);
        let window = selectors.window;
        if now < window.from_ns {
            self.before_ns = Some(now);
        } else if now > window.to_ns {
            self.after_ns.get_or_insert(now);
        } else {
            self.in_time = true;
            self.steps_in_time.add(step);
        }
        let is_in_window = window.has(now, step);
        if row.event == EventName::Oom {
            if is_in_window && selectors.takes_device(row.device) {
                self.oom = true;
            } else {
                self.other_oom.get_or_insert((row.device, step));
            }
        }
        if is_in_window {
            self.in_window = true;
            self.at_step |= selectors.at == Some(NamedMoment::Step(step));
        }
    }

    fn mark(&mut self, finder: &mut MarkFinder<'_>, row: &Record, symbols: &SymbolTable, is_in_window: bool) {
        self.at_mark |= finder.feed(row, symbols) && is_in_window;
        if is_mark(row, symbols) {
            let name = symbols.get(row.name);
            if self.marks.len() < MOST_MARKS || self.marks.contains_key(&*name) {
                *self.marks.entry(name.to_string()).or_default() += 1;
            }
        }
    }

    /// Returns the names of the marks that are nearest to `wanted`, best match first. If `wanted` is itself a
    /// name, returns the range of its numbers.
    fn marks_near(&self, wanted: &MarkName) -> String {
        let (name, _) = wanted.split();
        match self.marks.get(name) {
            Some(1) => name.to_owned(),
            Some(count) => format!("{name}#1 to {name}#{count}"),
            None => nearest_names(self.marks.keys().map(String::as_str), name),
        }
    }

    fn has(&self, selectors: &Selectors) -> bool {
        let at = match &selectors.at {
            Some(NamedMoment::Step(_)) => self.at_step,
            Some(NamedMoment::Mark(_)) => self.at_mark,
            Some(NamedMoment::Time(ns)) => {
                self.has_time(*ns) && (selectors.window.from_ns..=selectors.window.to_ns).contains(ns)
            }
            Some(NamedMoment::Oom) => self.oom,
            Some(NamedMoment::Peak(_) | NamedMoment::End | NamedMoment::Exit) | None => true,
        };
        at && (self.in_window || selectors.window == Window::default())
            && selectors.device.is_none_or(|device| self.has_device(selectors, device))
    }

    fn has_device(&self, selectors: &Selectors, device: i32) -> bool {
        selectors.takes_device(device) && self.devices.contains(&device)
    }

    fn has_time(&self, ns: i64) -> bool {
        self.span.is_some_and(|(first, last)| (first.min(0)..=last).contains(&ns))
    }

    fn time(&self) -> String {
        self.span.map_or_else(String::new, |(first, last)| {
            format!("{} to {}", duration(first.min(0)), duration(last))
        })
    }

    /// Adds the content of another process.
    fn add(&mut self, other: Content) {
        self.devices.extend(other.devices);
        for (all, new) in [(&mut self.steps, other.steps), (&mut self.steps_in_time, other.steps_in_time)] {
            all.join(new);
        }
        self.span = match (self.span, other.span) {
            (Some(a), Some(b)) => Some((a.0.min(b.0), a.1.max(b.1))),
            (a, b) => a.or(b),
        };
        self.in_time |= other.in_time;
        self.in_window |= other.in_window;
        self.before_ns = self.before_ns.max(other.before_ns);
        self.after_ns = [self.after_ns, other.after_ns].into_iter().flatten().min();
        self.oom |= other.oom;
        self.other_oom = self.other_oom.or(other.other_oom);
        self.at_step |= other.at_step;
        self.at_mark |= other.at_mark;
        for (name, count) in other.marks {
            *self.marks.entry(name).or_default() += count;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn selectors_are_shown_as_they_are_typed() {
        let window = Window { from_ns: 1_500_000_000, to_ns: i64::MAX, from_step: 3, to_step: 5 };
        let at = Some(NamedMoment::Time(2_000_000_000));
        let selectors = Selectors { device: Some(1), takes_host: false, window, at };
        assert_eq!(selectors.given().join(" "), "--device 1 --step 3:5 --window 1500ms: --at 2s");
    }

    #[test]
    fn an_oom_outside_the_selection_is_named() {
        let message = |ooms: &[(i32, i64)], device: i32| {
            let at = Some(NamedMoment::Oom);
            let window = Window::default();
            let selectors = Selectors { device: Some(device), takes_host: false, window, at };
            let mut content = Content::default();
            for (device, step) in [(0, 0), (1, 0)] {
                content.feed(
                    &Record { event: EventName::Alloc, device, step, ..Record::default() },
                    step,
                    &selectors,
                );
            }
            for (device, step) in ooms.iter().copied() {
                content.feed(
                    &Record { event: EventName::Oom, device, step, ..Record::default() },
                    step,
                    &selectors,
                );
            }
            (!content.has(&selectors)).then(|| selectors.faults(&content, Path::new("out")).join("\n"))
        };
        assert!(message(&[], 1).unwrap().contains("(it has no out-of-memory error)"));
        let other = message(&[(0, 3), (0, 4)], 1).unwrap();
        assert!(other.ends_with("(its first out-of-memory error is on device 0, step 3)"), "{other}");
        let other = message(&[(0, -1)], 1).unwrap();
        assert!(other.ends_with("(its first out-of-memory error is on device 0)"), "{other}");
        assert_eq!(message(&[(0, 3), (1, 4)], 1), None);
    }
}
