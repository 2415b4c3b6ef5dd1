//! `memtrace modules`: PyTorch's `MemTracker` states, one entry for each call of a module.
//!
//! A module call is a range whose name is a level of the module path. A forward call inside backward
//! is a recomputation (activation checkpointing). Backward has no ranges: a module is in backward
//! from the first row in the backward phase that belongs to it or to one below it, up to the next
//! that does not; an op outside of all modules that took no memory (the accumulation of a gradient) is not asked. Peaks follow `MemTracker`'s strict rule; where the trace has `op` rows,
//! `--op-boundary` looks only where an op ended, as `MemTracker` does, which misses what an op takes
//! and gives back inside.

use std::collections::BTreeMap;

use memtrace_trace::ranges::{Meaning, meaning};
use memtrace_trace::units::Unit;
use memtrace_trace::{Api, EventName};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::report::{Answer, Report, next};
use super::snapshot::{ROUNDED, TYPES, Types, rounds_to_nothing, type_of, value};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::symbols::Symbol;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::rst;
use crate::render::text::{Cell, Page, Side, Style, Table, count};
use crate::state::group;
use crate::state::replay::{HOST, Metric, Replay};
use crate::state::replay_trace::replay_trace;

mod memory;

use memory::{CallMemory, Memories};

/// See the module.
pub(super) struct Modules;

impl Report for Modules {
    fn name(&self) -> &'static str {
        "modules"
    }

    fn about(&self) -> &'static str {
        "Memory before, at the peak of and after each module call, as MemTracker has it"
    }

    fn flags(&self) -> &'static [Flag] {
        &[
            Flag { default: "2", help: "Modules down to the N-th level of their path", ..group::DEPTH },
            Flag {
                name: "calls",
                value: Some("N"),
                default: "100",
                choices: &[],
                help: "How many calls of a module are kept one by one",
            },
            Flag {
                name: "full",
                value: None,
                default: "",
                choices: &[],
                help: "Every state of every call, by category, as MemTracker prints them",
            },
            Flag {
                name: "table",
                value: None,
                default: "",
                choices: &[],
                help: "The same as reStructuredText tables",
            },
            ROUNDED,
            Flag {
                name: "op-boundary",
                value: None,
                default: "",
                choices: &[],
                help: "Peaks at the ends of ops only: MemTracker's own numbers",
            },
        ]
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut page = Page::new(options.paint, options.width);
        let mut footer = Footer::new(input);
        let mut json = Vec::new();
        let depth = options.number(group::DEPTH.name)?.unwrap_or(2);
        let calls = options.number("calls")?.unwrap_or(100);
        for (index, trace) in input.traces.iter().enumerate() {
            let mut tracker = Tracker::new(depth, calls, options);
            let columns = Columns::of(&[
                "name",
                "tid",
                "device",
                "api",
                "module",
                "category",
                "ts_ns",
                "rounded_bytes",
            ]);
            let replayed = replay_trace(
                trace,
                columns,
                options,
                Metric::Allocated,
                flow_categories(trace, options)?,
                |row, replay| tracker.feed(row, replay),
            )?;
            footer.add(trace, &replayed, replayed.fullest(Metric::Allocated, options).map(|d| d.ordinal));
            if tracker.open_calls() > 0 {
                footer.notes.push(format!("{} module ranges were never closed", tracker.open_calls()));
            }
            if tracker.unmatched > 0 {
                footer.notes.push(format!("{} ends of ranges that were not open", tracker.unmatched));
            }
            if index == 0 {
                heading(&mut page, input, &trace.meta);
            }
            page.gap();
            if input.traces.len() > 1 {
                page.plain(format!("rank {}", trace.meta.rank));
            }
            tracker.print(&mut page, options);
            json.push(json!({
                "file": trace.path.display().to_string(),
                "rank": trace.meta.rank,
                "modules": tracker.json(),
            }));
        }
        let hints = vec![next("peak", input, "--by module"), next("snapshot", input, "")];
        Ok(Answer { page, json: json!({ "processes": json }), footer, next: hints, ..Answer::default() })
    }
}

/// MemTracker's states, by their names there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    PeakForward,
    PreForward,
    PostForward,
    PreForwardAc,
    PostForwardAc,
    PeakBackward,
    PreBackward,
    PostBackward,
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            State::PeakForward => "Peak-Forward",
            State::PreForward => "Pre-Forward",
            State::PostForward => "Post-Forward",
            State::PreForwardAc => "Pre-Forward-AC",
            State::PostForwardAc => "Post-Forward-AC",
            State::PeakBackward => "Peak-Backward",
            State::PreBackward => "Pre-Backward",
            State::PostBackward => "Post-Backward",
        }
    }
}

/// The change that a row would make if every block had what was asked for, rounded up.
fn rounded(row: &Record) -> i64 {
    if row.rounded_bytes > 0 { row.rounded_bytes * row.delta_bytes.signum() } else { row.delta_bytes }
}

/// What each device holds, by category.
type Snapshot = BTreeMap<i32, Types>;

fn total(types: &Types) -> i64 {
    types.iter().sum()
}

/// Of one state of a module.
#[derive(Clone, Debug)]
struct Series {
    state: State,
    calls: u64,
    /// The first calls, one by one.
    kept: Vec<Snapshot>,
    /// The last call's.
    last: Snapshot,
    /// The highest total of a device over all calls.
    highest: i64,
}

/// One module.
#[derive(Clone, Debug, Default)]
struct Stats {
    /// In the order in which they first came, as in MemTracker.
    states: Vec<Series>,
    /// Bytes that stayed from before a forward call to behind it, at most.
    retained: i64,
}

impl Stats {
    fn add(&mut self, state: State, snapshot: Snapshot, keep: usize) {
        let at = match self.states.iter().position(|series| series.state == state) {
            Some(at) => at,
            None => {
                let series = Series { state, calls: 0, kept: Vec::new(), last: Snapshot::new(), highest: 0 };
                self.states.push(series);
                self.states.len() - 1
            }
        };
        let series = &mut self.states[at];
        series.calls += 1;
        series.highest = series.highest.max(highest(&snapshot));
        if series.kept.len() < keep {
            series.kept.push(snapshot.clone());
        }
        series.last = snapshot;
    }

    /// The last call's snapshot was not the peak after all.
    fn raise(&mut self, state: State, snapshot: &Snapshot, keep: usize) {
        if let Some(series) = self.states.iter_mut().find(|series| series.state == state) {
            series.highest = series.highest.max(highest(snapshot));
            if series.calls as usize <= keep
                && let Some(last) = series.kept.last_mut()
            {
                last.clone_from(snapshot);
            }
            series.last.clone_from(snapshot);
        }
    }

    fn of(&self, state: State) -> Option<&Series> {
        self.states.iter().find(|series| series.state == state)
    }
}

fn highest(snapshot: &Snapshot) -> i64 {
    snapshot.iter().filter(|(device, _)| **device != HOST).map(|(_, types)| total(types)).max().unwrap_or(0)
}

/// A call that has not ended.
struct Call {
    path: String,
    /// The state that its end has.
    after: State,
    /// The state that its peak has; none in a recomputation.
    peak: Option<State>,
    local_peak: BTreeMap<i32, i64>,
    at_peak: Snapshot,
    before: i64,
    memory: CallMemory,
}

struct Tracker {
    depth: usize,
    keep: usize,
    op_boundary: bool,
    rounded: bool,
    device: Option<i32>,
    now: Snapshot,
    /// Open ranges of each thread; `None` for one that is no module, or too deep.
    ranges: FxHashMap<i32, Vec<(Symbol, Option<Call>)>>,
    backward: Vec<Call>,
    modules: FxHashMap<String, Stats>,
    memories: Memories,
    unmatched: u64,
}

impl Tracker {
    fn new(depth: usize, keep: usize, options: &Options) -> Tracker {
        Tracker {
            depth,
            keep,
            op_boundary: options.is_set("op-boundary"),
            rounded: options.is_set(ROUNDED.name),
            device: options.device,
            now: Snapshot::new(),
            ranges: FxHashMap::default(),
            backward: Vec::new(),
            modules: FxHashMap::default(),
            memories: Memories::default(),
            unmatched: 0,
        }
    }

    /// Ranges that the trace left open, the module calls among them.
    fn open_calls(&self) -> usize {
        self.ranges.values().flatten().filter(|(_, call)| call.is_some()).count()
    }

    fn feed(&mut self, row: &Record, replay: &Replay) {
        if replay.in_window() {
            match row.event {
                EventName::RangeBegin => self.begin(row, replay),
                EventName::RangeEnd => self.end(row),
                // The state before a call is that before its first row.
                EventName::Free | EventName::Tag => {}
                EventName::Io => {
                    let open = self.ranges.entry(row.tid).or_default();
                    if let Some((_, Some(call))) = open.last_mut() {
                        self.memories.in_call(&mut call.memory, row, &replay.texts);
                    }
                }
                _ => self.follow_backward(row, replay),
            }
        }
        let block = row.event.is_block() || matches!(row.event, EventName::HostAlloc | EventName::HostFree);
        if block && self.device.is_none_or(|only| only == row.device) {
            let types = self.now.entry(row.device).or_default();
            let bytes = &mut types[type_of(row.category)];
            let change = if self.rounded { rounded(row) } else { row.delta_bytes };
            *bytes = bytes.wrapping_add(change);
            self.memories.block(row, rounded(row), &replay.texts);
        }
        if !replay.in_window() {
            return;
        }
        let looks = if self.op_boundary { row.event == EventName::Op } else { row.event == EventName::Alloc };
        if looks {
            self.look_for_peaks();
        }
    }

    /// The path of the module whose range opens; `None` when the range is no module's, or too deep.
    fn path_of(&self, row: &Record, replay: &Replay) -> Option<String> {
        let name = replay.texts.get(row.name);
        let path = match meaning(&name, None, &[]) {
            // The forward of a torch.nn.Module: its name is its path.
            _ if replay.texts.get(row.api).as_ref() == Api::Module.name() => name.to_string(),
            Meaning::ModulePath(path) => path.to_owned(),
            Meaning::Level(level) if row.module == Symbol::NONE => level.to_owned(),
            Meaning::Level(level) => format!("{}.{level}", replay.texts.get(row.module)),
            Meaning::Phase(_) | Meaning::Op(_) | Meaning::Step(_) | Meaning::Library => return None,
        };
        // CUDA's own libraries mark their C++ functions; no module is called so.
        (path.matches('.').count() < self.depth && !path.contains("::")).then_some(path)
    }

    fn begin(&mut self, row: &Record, replay: &Replay) {
        let call = self.path_of(row, replay).map(|path| {
            let recomputed = row.phase == replay.phases.backward;
            let (before, after, peak) = if recomputed {
                (State::PreForwardAc, State::PostForwardAc, None)
            } else {
                (State::PreForward, State::PostForward, Some(State::PeakForward))
            };
            self.enter(path, before, after, peak)
        });
        self.ranges.entry(row.tid).or_default().push((row.name, call));
    }

    fn enter(&mut self, path: String, before: State, after: State, peak: Option<State>) -> Call {
        let stats = self.modules.entry(path.clone()).or_default();
        if let Some(peak) = peak {
            stats.add(peak, self.now.clone(), self.keep);
        }
        stats.add(before, self.now.clone(), self.keep);
        Call {
            path,
            after,
            peak,
            local_peak: self.now.iter().map(|(device, types)| (*device, total(types))).collect(),
            at_peak: self.now.clone(),
            before: highest(&self.now),
            memory: CallMemory::default(),
        }
    }

    fn leave(&mut self, call: Call) {
        if call.after == State::PostForward {
            self.memories.called(&call.path, &call.memory, self.keep);
        }
        let stats = self.modules.entry(call.path).or_default();
        if call.after == State::PostForward {
            stats.retained = stats.retained.max(highest(&self.now) - call.before);
        }
        stats.add(call.after, self.now.clone(), self.keep);
    }

    fn end(&mut self, row: &Record) {
        let open = self.ranges.entry(row.tid).or_default();
        // Ranges of different kinds may end in another order than they began.
        let Some(at) = open.iter().rposition(|(name, _)| *name == row.name) else {
            self.unmatched += 1;
            return;
        };
        if let (_, Some(call)) = open.remove(at) {
            self.leave(call);
        }
    }

    fn follow_backward(&mut self, row: &Record, replay: &Replay) {
        let in_backward = row.phase == replay.phases.backward;
        if !in_backward && self.backward.is_empty() || in_backward && row.module == Symbol::NONE {
            return;
        }
        // A parameter's accumulation is of no module and comes between a module's own. Were there memory, blocks told.
        if in_backward && row.event == EventName::Op && row.module == Symbol::SCRIPT {
            return;
        }
        // A recomputed forward has ranges of its own.
        let recomputes = self.ranges.get(&row.tid).is_some_and(|open| {
            open.iter().flat_map(|(_, call)| call).any(|call| call.after == State::PostForwardAc)
        });
        if recomputes {
            return;
        }
        let module = if in_backward { replay.texts.get(row.module).to_string() } else { String::new() };
        let is_on = |path: &str| {
            module.strip_prefix(path).is_some_and(|below| below.is_empty() || below.starts_with('.'))
        };
        while let Some(call) = self.backward.pop_if(|call| !is_on(&call.path)) {
            self.leave(call);
        }
        let ends = module.match_indices('.').map(|(end, _)| end).chain([module.len()]);
        for path in ends.take(self.depth).map(|end| &module[..end]) {
            // A container (`GPT.h`) is never called, and has no states.
            let was_called = self.modules.contains_key(path);
            if was_called && !self.backward.iter().any(|call| call.path == path) {
                let call = self.enter(
                    path.to_owned(),
                    State::PreBackward,
                    State::PostBackward,
                    Some(State::PeakBackward),
                );
                self.backward.push(call);
            }
        }
    }

    fn look_for_peaks(&mut self) {
        let calls = self.ranges.values_mut().flatten().filter_map(|(_, call)| call.as_mut());
        for call in calls.chain(&mut self.backward) {
            let Some(state) = call.peak else { continue };
            let mut raised = false;
            for (device, types) in &self.now {
                let local = call.local_peak.entry(*device).or_default();
                if total(types) > *local {
                    *local = total(types);
                    call.at_peak.insert(*device, *types);
                    raised = true;
                }
            }
            if raised && let Some(stats) = self.modules.get_mut(&call.path) {
                stats.raise(state, &call.at_peak, self.keep);
            }
        }
    }

    /// Modules by MemTracker's natural order.
    fn sorted(&self) -> Vec<(&String, &Stats)> {
        let mut all: Vec<_> = self.modules.iter().collect();
        all.sort_by_cached_key(|(path, _)| natural(path));
        all
    }

    fn print(&self, page: &mut Page, options: &Options) {
        if self.modules.is_empty() {
            page.plain("No module calls in this trace: mark them with ranges, such as torch.cuda.nvtx.range(\"module:Net.layer\").");
            return;
        }
        if options.is_set("table") {
            self.print_memories(page, options.units);
        }
        if options.is_set("full") || options.is_set("table") {
            for (path, stats) in self.sorted() {
                page.plain(format!("Module:  {path}"));
                if options.is_set("table") {
                    print_table(page, stats, options.units);
                } else {
                    print_states(page, stats, options.units);
                }
                page.gap();
            }
            return;
        }
        let mut table = Table::new(&[
            ("calls", Side::Right),
            ("before", Side::Right),
            ("peak forward", Side::Right),
            ("retained", Side::Right),
            ("peak backward", Side::Right),
            ("recomputed", Side::Right),
            ("parameters", Side::Right),
            ("buffers", Side::Right),
            ("inputs", Side::Right),
            ("outputs", Side::Right),
            ("module", Side::Left),
        ]);
        let sorted = self.sorted();
        let top = options.top.unwrap_or(40);
        for (path, stats) in sorted.iter().take(top) {
            let most = |state| {
                stats.of(state).map_or_else(|| "-".to_owned(), |s| options.units.show(s.highest).to_string())
            };
            let calls = |state| stats.of(state).map_or(0, |series| series.calls);
            let [parameters, buffers, inputs, outputs] = self.memories.of(path).columns().map(|bytes| {
                bytes.map_or_else(|| "-".to_owned(), |bytes| options.units.show(bytes).to_string())
            });
            table.row([
                count(calls(State::PreForward)).into(),
                most(State::PreForward).into(),
                Cell::new(most(State::PeakForward), Style::Strong),
                options.units.show(stats.retained).to_string().into(),
                most(State::PeakBackward).into(),
                count(calls(State::PreForwardAc)).into(),
                parameters.into(),
                buffers.into(),
                inputs.into(),
                outputs.into(),
                path.as_str().into(),
            ]);
        }
        page.table(&table);
        if sorted.len() > top {
            page.line([Cell::new(format!("{} more; --top N", sorted.len() - top), Style::Faint)]);
        }
        page.plain("the device's memory, the highest over all calls; --full shows each call by category");
        if !self.memories.has_io {
            page.plain(memory::NO_IO);
        }
        if self.modules.values().all(|stats| stats.of(State::PreBackward).is_none()) {
            page.plain("no row in backward belongs to a module in this trace, so backward has no states");
        }
    }

    /// What each module has, and what its calls are given and return, as a table.
    fn print_memories(&self, page: &mut Page, units: Unit) {
        let heads = ["Module", "Parameter", "Buffer", "Input", "Output"];
        let row = |path: &String| {
            let columns = self.memories.of(path).columns();
            let cells =
                columns.map(|bytes| bytes.map_or_else(|| "-".to_owned(), |bytes| value(bytes, units)));
            std::iter::once(path.clone()).chain(cells).collect()
        };
        let rows: Vec<Vec<String>> = self.sorted().into_iter().map(|(path, _)| row(path)).collect();
        for line in rst::table(&heads, &rows) {
            page.plain(line);
        }
        if !self.memories.has_io {
            page.plain(memory::NO_IO);
        }
        page.gap();
    }

    fn json(&self) -> Value {
        let modules: Vec<Value> = self
            .sorted()
            .into_iter()
            .map(|(path, stats)| {
                let states: serde_json::Map<String, Value> = stats
                    .states
                    .iter()
                    .map(|series| {
                        let kept: Vec<Value> = series.kept.iter().map(snapshot_json).collect();
                        (series.state.name().to_owned(), kept.into())
                    })
                    .collect();
                let mut module = json!({
                    "module": path,
                    "calls": stats.of(State::PreForward).map_or(0, |series| series.calls),
                    "retained_bytes": stats.retained,
                    "states": states,
                });
                self.memories.of(path).add_to(&mut module);
                module
            })
            .collect();
        modules.into()
    }
}

fn device_name(ordinal: i32) -> String {
    if ordinal == HOST { "cpu (pinned)".to_owned() } else { format!("cuda:{ordinal}") }
}

fn snapshot_json(snapshot: &Snapshot) -> Value {
    let devices: serde_json::Map<String, Value> = snapshot
        .iter()
        .map(|(device, types)| {
            let mut value = json!({ "Total": total(types) });
            for ((name, _), bytes) in TYPES.iter().zip(types) {
                value[*name] = (*bytes).into();
            }
            (device_name(*device), value)
        })
        .collect();
    devices.into()
}

/// MemTracker's plain layout.
fn print_states(page: &mut Page, stats: &Stats, units: Unit) {
    for series in &stats.states {
        page.plain(series.state.name());
        for (index, snapshot) in series.kept.iter().enumerate() {
            page.plain(format!("# {}:", index + 1));
            if snapshot.is_empty() {
                page.plain("No memory tracked.");
            }
            for (device, types) in snapshot {
                if rounds_to_nothing(total(types), units) {
                    continue;
                }
                page.plain(format!("Device: {}", device_name(*device)));
                for ((name, _), bytes) in TYPES.iter().zip(types) {
                    page.plain(format!("\t{name}: {}", value(*bytes, units)));
                }
                page.plain(format!("\tTotal: {}", value(total(types), units)));
            }
        }
    }
}

/// MemTracker's table.
fn print_table(page: &mut Page, stats: &Stats, units: Unit) {
    let heads: Vec<&str> = ["State & Call", "Device"]
        .into_iter()
        .chain(TYPES.iter().map(|(name, _)| *name))
        .chain(["Total"])
        .collect();
    let mut rows = Vec::new();
    for series in &stats.states {
        for (index, snapshot) in series.kept.iter().enumerate() {
            let mut label = format!("{} # {}", series.state.name(), index + 1);
            for (device, types) in snapshot {
                if rounds_to_nothing(total(types), units) {
                    continue;
                }
                // Blank when the row above has the same.
                let mut row = vec![std::mem::take(&mut label), device_name(*device)];
                row.extend(types.iter().chain([&total(types)]).map(|bytes| value(*bytes, units)));
                rows.push(row);
            }
        }
    }
    for line in rst::table(&heads, &rows) {
        page.plain(line);
    }
}

/// A piece of a path as MemTracker sorts it: digits as numbers, the rest in lower case.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Piece {
    Text(String),
    Number(u128),
}

/// `split([0-9]+)`: texts and numbers in turn, a text first.
fn natural(path: &str) -> Vec<Piece> {
    let mut pieces = vec![Piece::Text(String::new())];
    for c in path.chars() {
        let digit = c.to_digit(10).filter(|_| c.is_ascii_digit());
        match (pieces.last_mut(), digit) {
            (Some(Piece::Number(number)), Some(digit)) => {
                *number = number.saturating_mul(10).saturating_add(u128::from(digit));
            }
            (_, Some(digit)) => pieces.push(Piece::Number(u128::from(digit))),
            (Some(Piece::Text(text)), None) => text.extend(c.to_lowercase()),
            (_, None) => pieces.push(Piece::Text(c.to_lowercase().collect())),
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::testing::TraceBuilder;
    use memtrace_trace::Category;
    use memtrace_trace::Row;

    const KIB: i64 = 1024;

    fn range(trace: &mut TraceBuilder, event: EventName, row: Row<'_>) {
        trace.raw(Row { event, api: "nvtx", ..row });
    }

    fn answer(trace: TraceBuilder, flags: &[&'static str]) -> (Value, String) {
        let folder = std::env::temp_dir().join(format!("memtrace-modules-{:?}", std::thread::current().id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.csv"), trace.finish()).unwrap();
        let mut options = Options { units: Unit::KiB, ..Options::default() };
        options.values.insert("depth", "2".to_owned());
        options.values.extend(flags.iter().map(|flag| (*flag, String::new())));
        let answer = Modules.run(&[Input::open(&folder).unwrap()], &options).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        (answer.json["processes"][0]["modules"].clone(), answer.text())
    }

    /// Two calls of a layer, the second of which is recomputed inside backward.
    fn training() -> TraceBuilder {
        use EventName::{Op, RangeBegin, RangeEnd};
        let mut trace = TraceBuilder::default();
        let root = Row {
            module: "Net",
            phase: "forward",
            category: Category::Activation,
            step: 0,
            ..Row::default()
        };
        let layer = Row { module: "Net.fc", ..root };
        let parameter = Row { category: Category::Parameter, ..Row::default() };
        trace.alloc(8 * KIB, parameter);
        range(&mut trace, RangeBegin, Row { module: "(none)", name: "Net", ..root });
        for _ in 0..2 {
            range(&mut trace, RangeBegin, Row { name: "fc", ..root });
            trace.alloc(2 * KIB, layer);
            // Inside an op: taken and given back before it ends.
            let scratch = trace.alloc(5 * KIB, layer);
            trace.free(scratch, 5 * KIB, layer);
            trace.change(Row { event: Op, device: 0, ..layer }, [0; 3]);
            range(&mut trace, RangeEnd, Row { name: "fc", ..root });
        }
        range(&mut trace, RangeEnd, Row { module: "(none)", name: "Net", ..root });
        let backward = Row { phase: "backward", category: Category::Temporary, ..layer };
        // Those above are ranges of the program's, this one a module that memtrace hooked.
        let hooked = Row { module: "Net", name: "Net.fc", api: "module", phase: "backward", ..root };
        trace.raw(Row { event: RangeBegin, ..hooked });
        trace.alloc(KIB, Row { category: Category::Activation, ..backward });
        trace.raw(Row { event: RangeEnd, ..hooked });
        trace.alloc(4 * KIB, backward);
        trace.change(Row { event: Op, device: 0, ..backward }, [0; 3]);
        range(&mut trace, EventName::Mark, Row { step: 0, phase: "optimizer", ..Row::default() });
        trace
    }

    fn totals(modules: &Value, at: usize, state: &str) -> Vec<i64> {
        let calls = modules[at]["states"][state].as_array().unwrap();
        calls.iter().map(|call| call["cuda:0"]["Total"].as_i64().unwrap() / KIB).collect()
    }

    #[test]
    fn each_call_has_an_entry_in_each_of_its_states() {
        let (modules, _) = answer(training(), &[]);
        assert_eq!((&modules[0]["module"], &modules[1]["module"]), (&json!("Net"), &json!("Net.fc")));
        assert_eq!(totals(&modules, 1, "Pre-Forward"), [8, 10]);
        assert_eq!(totals(&modules, 1, "Post-Forward"), [10, 12]);
        assert_eq!(totals(&modules, 1, "Peak-Forward"), [15, 17]);
        assert_eq!(totals(&modules, 1, "Pre-Forward-AC"), [12]);
        assert_eq!(totals(&modules, 1, "Post-Forward-AC"), [13]);
        // The row that opens a module's backward is inside it.
        assert_eq!(totals(&modules, 1, "Pre-Backward"), [13]);
        assert_eq!(totals(&modules, 1, "Peak-Backward"), [17]);
        assert_eq!(totals(&modules, 1, "Post-Backward"), [17]);
        assert_eq!(totals(&modules, 0, "Pre-Forward"), [8]);
        assert_eq!(totals(&modules, 0, "Peak-Forward"), [17]);
        assert_eq!(modules[1]["retained_bytes"], 2 * KIB);
        let peak = &modules[1]["states"]["Peak-Forward"][1]["cuda:0"];
        assert_eq!((&peak["Parameter"], &peak["Activation"]), (&json!(8 * KIB), &json!(9 * KIB)));
    }

    #[test]
    fn what_accumulates_a_gradient_does_not_end_the_backward_of_its_module() {
        let mut trace = TraceBuilder::default();
        trace.alloc(8 * KIB, Row::default());
        let forward = Row { module: "Net.fc", phase: "forward", step: 0, ..Row::default() };
        for name in ["Net", "Net.fc"] {
            trace.raw(Row { event: EventName::RangeBegin, name, api: "module", ..forward });
        }
        for name in ["Net.fc", "Net"] {
            trace.raw(Row { event: EventName::RangeEnd, name, api: "module", ..forward });
        }
        let backward = Row { phase: "backward", ..forward };
        let outside = Row { module: "(script)", ..backward };
        let op = |row| Row { event: EventName::Op, device: 0, ..row };
        trace.alloc(KIB, backward);
        trace.change(op(outside), [0; 3]);
        trace.change(op(backward), [0; 3]);
        // What the script took ends it.
        trace.alloc(2 * KIB, outside);
        trace.change(op(outside), [0; 3]);
        trace.alloc(4 * KIB, backward);
        let (modules, _) = answer(trace, &[]);
        assert_eq!(totals(&modules, 1, "Pre-Backward"), [8, 11]);
        assert_eq!(totals(&modules, 1, "Post-Backward"), [9, 15]);
    }

    #[test]
    fn between_ops_a_peak_misses_what_an_op_gives_back() {
        let (modules, _) = answer(training(), &["op-boundary"]);
        assert_eq!(totals(&modules, 1, "Peak-Forward"), [10, 12]);
        assert_eq!(totals(&modules, 1, "Peak-Backward"), [17]);
    }

    #[test]
    fn the_layouts_are_mem_trackers() {
        let (_, full) = answer(training(), &["full"]);
        let plain =
            "Module:  Net.fc\nPeak-Forward\n# 1:\nDevice: cuda:0\n\tParameter: 8.0 KiB\n\tBuffer: 0.0 KiB\n";
        assert!(full.contains(plain), "{full}");
        let (_, table) = answer(training(), &["table"]);
        assert!(table.contains("State & Call         Device    Parameter    Buffer"), "{table}");
        assert!(
            table.contains("\nPeak-Forward # 2     cuda:0    8.0 KiB      0.0 KiB   0.0 KiB     9.0 KiB"),
            "{table}"
        );
    }

    #[test]
    fn layers_sort_by_their_number() {
        let mut paths = ["GPT.h.10", "GPT.h.9", "GPT", "gpt.A", "GPT.h.9.mlp"];
        paths.sort_by_key(|path| natural(path));
        assert_eq!(paths, ["GPT", "gpt.A", "GPT.h.9", "GPT.h.9.mlp", "GPT.h.10"]);
    }
}
