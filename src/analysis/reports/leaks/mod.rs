//! `memtrace leaks`: why memory in use grows, and which owners keep more blocks from step to step.
//!
//! A leak is a set of blocks of one owner that are live when the last step begins and were allocated in
//! several earlier steps. Growth is the slope of a least-squares line through the surviving bytes, step by
//! step. Memory that survives from a single step (parameters, optimizer state, caches that fill once) does
//! not count as growth.

pub(super) mod holders;
mod host_growth;

use std::collections::BTreeMap;

use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::growth::{FEWEST_STEPS, Holders, LevelGrowth};
use super::oom::KeptMemory;
use super::report::{Answer, Report, View, for_each_process, next};
use crate::error::Result;
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::{NO_MODULE, NO_OP, NO_PHASE, Symbol, SymbolTable};
use crate::read::together::RowReader;
use crate::render::footer::Footer;
use crate::render::heading::process_heading;
use crate::render::numbers::{count, counted};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::block::Block;
use crate::state::categories::KnownCategories;
use crate::state::fitted_line::{FittedLine, fit};
use crate::state::group::category;
use crate::state::host_memory::HostMemory;
use crate::state::levels::Levels;
use crate::state::moment::ends_script;
use crate::state::replay::{self, MemoryKind, Metric, Replay};
use crate::state::replay_trace::{Replayed, replay_together, replay_until};
use crate::state::retained::{RetainedSearch, RetainedSearches};
use crate::state::stacks::Stacks;
use crate::state::step_inputs::LargestInput;
use holders::{HOLDERS, LeaksHolders, print_retained};
use host_growth::HostGrowth;

/// Blocks kept since one of the first steps up to this one count as kept from the beginning.
const FIRST_STEPS: i64 = 5;

/// `memtrace leaks`.
pub(super) struct Leaks;

impl Report for Leaks {
    fn name(&self) -> &'static str {
        "leaks"
    }

    fn about(&self) -> &'static str {
        "Explain why memory grows: kept, larger steps, cached or outside PyTorch; owners and rates"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("leaks out", "what grows in nvidia-smi, in four parts; the op and line that keep memory"),
            ("leaks --holders out", "the list, closure, graph or traceback that keeps it"),
            ("leaks --holders --pid 4711", "ask a running process now"),
        ]
    }

    fn views(&self) -> &'static [View] {
        const { &[View { asked_by: &[HOLDERS], report: &LeaksHolders }] }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut any = false;
        let answer = for_each_process(input, options, |index, trace, printer, footer| {
            process_heading(printer, input, index);
            let (value, has_leaks) = of_process(trace, printer, footer, options)?;
            any |= has_leaks;
            Ok(value)
        })?;
        let hints = if any {
            vec![next("peak", input, "--by step"), next("peak", input, "--by op")]
        } else {
            vec![next("peak", input, "--by category")]
        };
        Ok(Answer { next: hints, ..answer })
    }
}

/// Prints what grows in one process. Returns the JSON, and whether blocks of several steps pile up.
fn of_process(
    trace: &TraceFile,
    printer: &mut Printer,
    footer: &mut Footer,
    options: &Options,
) -> Result<(Value, bool)> {
    let known = flow_categories(trace, options)?;
    let symbols = SymbolTable::default();
    let (mut searches, mut host) = (RetainedSearches::default(), HostMemory::new(&symbols));
    let Reading { whole, before_last, levels, found, holders } =
        findings(trace, options, known.clone(), &symbols, &mut [&mut searches, &mut host], |_, _| {})?;
    footer.add(trace, &whole, options);
    let mut grown: Vec<LevelGrowth> = levels
        .devices
        .iter()
        .filter_map(|device| LevelGrowth::new(device, &whole.symbols, &trace.meta, options))
        .collect();
    let has_oom = whole.replay.counts.of(EventName::Oom) > 0;
    let kept = if has_oom { KeptMemory::find(trace, true, 0, options)? } else { None };
    for growth in &mut grown {
        growth.explain(trace, options, &known, (&before_last, &holders), kept.is_some())?;
        printer.gap();
        growth.print(printer, options);
    }
    let largest_input = levels.largest_input(&whole.symbols);
    if let Some(line) = largest_input.as_ref().and_then(LargestInput::line) {
        printer.gap();
        printer.plain(line);
    }
    let lost = whole.replay.counts.lost;
    if lost > 0 && !grown.is_empty() {
        footer.notes.push(format!(
                    "{} lost: memory in use is exact, because each row has the allocator's totals; kept memory and the \
                     peak of a step may lack the lost events",
                    counted(lost, "event")
                ));
    }
    let is_flat = !grown.is_empty() && !grown.iter().any(LevelGrowth::has_cause);
    let is_replaced = grown.iter().any(LevelGrowth::is_replaced);
    // The objects that hold the memory are printed before the owners that allocated it.
    print_retained(printer, searches.to_report(), options);
    if grown.iter().any(LevelGrowth::keeps_more) {
        print_larger_holder(&searches, is_replaced, printer, options);
    }
    if let Some(kept) = &kept {
        printer.gap();
        printer.plain(format!("when it ran out of memory: {}", kept.line()));
    }
    printer.gap();
    let hidden: Vec<i64> = grown.iter().map(LevelGrowth::hides_kept).collect();
    let cached = if hidden.contains(&0) { 0 } else { hidden.iter().sum() };
    found.print(printer, options, Shown { is_flat, is_replaced, cached });
    let mut host_growth = HostGrowth::new(&host);
    if let Some(growth) = &mut host_growth {
        growth.name_owners(trace, &host, options)?;
        printer.gap();
        growth.print(printer, options);
    }
    let mut value = found.json(trace);
    value["growth"] = grown.iter().map(|growth| growth.json(options.units)).collect();
    value["host"] = host_growth.as_ref().map(HostGrowth::json).into();
    value["largest_input"] = largest_input.as_ref().map(LargestInput::json).into();
    value["retained"] = searches.to_report().map(RetainedSearch::json).into();
    Ok((value, !found.leaks.is_empty()))
}

/// Prints which holder has grown most between two searches.
fn print_larger_holder(
    searches: &RetainedSearches,
    is_replaced: bool,
    printer: &mut Printer,
    options: &Options,
) {
    let Some((before, after)) = searches.larger(is_replaced) else { return };
    printer.gap();
    let needed_by = match after.1.text("needed_by") {
        "" => String::new(),
        needed_by => format!(", which {needed_by} needs,"),
    };
    printer.plain(format!(
        "{}{needed_by} has grown: {} in step {}, {} in step {}",
        after.1.holder,
        options.units.show(before.1.bytes),
        before.0,
        options.units.show(after.1.bytes),
        after.0
    ));
}

/// The result of reading a trace to find growing memory.
pub(crate) struct Reading {
    /// The replay of the whole trace.
    pub(crate) whole: Replayed,
    /// The replay up to the beginning of the last step.
    pub(crate) before_last: Replayed,
    pub(crate) levels: Levels,
    pub(crate) found: Findings,
    /// What holds memory when the last step begins.
    pub(crate) holders: Holders,
}

/// Reads a trace to find growing memory. Each row also goes to `readers`, and to `visit` after the replay has
/// processed the row. `symbols` gets the symbols of all rows.
///
/// # Errors
/// If the trace cannot be read.
pub(crate) fn findings(
    trace: &TraceFile,
    options: &Options,
    known: KnownCategories,
    symbols: &SymbolTable,
    readers: &mut [&mut dyn RowReader],
    mut visit: impl FnMut(&Record, &Replay),
) -> Result<Reading> {
    // The first replay covers the whole trace. It finds the last step, and the blocks that are live at the end.
    let mut levels = Levels::new(options.device);
    let mut held = None;
    let tracked = Metric::Allocated;
    let mut replay = Replay::new(symbols, options.window, tracked);
    replay.known = known.clone();
    let whole = replay_together(trace, Columns::of(&[]), options, replay, readers, |row, replay| {
        levels.feed(row, replay);
        if held.is_none() && ends_script(row, replay) {
            held = Some(HeldAtEnd::new(replay, true, options));
        }
        visit(row, replay);
    })?;
    let last = levels.last_step();
    let is_last = |row: &Record, _: &Replay| last > 0 && row.step >= last;
    let wanted = replay::COLUMNS.and(Holders::COLUMNS).and(Columns::of(&["stack_id"]));
    let mut holders = Holders::default();
    let before_last = replay_until(trace, wanted, options, tracked, known, is_last, |row, replay| {
        holders.feed(row, replay);
    })?;
    let held = held.unwrap_or_else(|| HeldAtEnd::new(&whole.replay, false, options));
    let found = Findings::new(&before_last, held, &Stacks::read(trace), &levels, options);
    Ok(Reading { whole, before_last, levels, found, holders })
}

/// Returns the distance between the steps of a leak: 1 if the leak has blocks from at least half of the steps
/// in its range. A server's request takes several steps, so the steps of a leak may also be further apart. If
/// the largest distance is at most twice the smallest one, the largest one is returned. Otherwise the steps
/// are scattered, and the result is `None`.
fn regular_distance(steps: &BTreeMap<i64, (u64, i64)>) -> Option<i64> {
    let numbers: Vec<i64> = steps.keys().copied().collect();
    let span = numbers.last()?.checked_sub(*numbers.first()?)?.checked_add(1)?;
    if numbers.len() as i64 * 2 >= span {
        return Some(1);
    }
    let distances = numbers.windows(2).map(|two| two[1] - two[0]);
    let (least, most) = (distances.clone().min()?, distances.max()?);
    (most <= least.saturating_mul(2)).then_some(most)
}

/// Returns true if a block counts: it is on the selected device or, without a selection, on any GPU.
fn is_selected(block: &Block, options: &Options) -> bool {
    options.device.map_or(block.kind != MemoryKind::Host, |only| only == block.device)
}

/// The blocks of one owner that are live when the last step begins and come from several steps.
pub(crate) struct Leak {
    /// The Python line that allocates the blocks, if known.
    pub(crate) code: Option<String>,
    pub(crate) op: String,
    pub(crate) module: String,
    pub(crate) category: &'static str,
    pub(crate) phase: String,
    pub(crate) blocks: u64,
    pub(crate) bytes: i64,
    /// The number of steps that the blocks come from, and the first and last of these steps.
    pub(crate) steps: usize,
    pub(crate) first: i64,
    pub(crate) last: i64,
    pub(crate) fit: FittedLine,
}

impl Leak {
    /// Returns what distinguishes the leak from all others.
    fn owner(&self) -> (&str, &str, &str, &str, Option<&str>) {
        (&self.op, &self.module, &self.phase, self.category, self.code.as_deref())
    }
}

/// The memory that is live when the script ends, before Python frees its objects.
pub(crate) struct HeldAtEnd {
    pub(crate) blocks: u64,
    pub(crate) bytes: i64,
    /// The bytes by category, the most first.
    by_category: Vec<(&'static str, i64)>,
    /// False if the trace does not show the script's end, as with a killed program or one that is not Python.
    /// The memory is then what is live when the trace ends.
    is_of_script: bool,
}

impl HeldAtEnd {
    fn new(replay: &Replay, is_of_script: bool, options: &Options) -> HeldAtEnd {
        let mut sums: BTreeMap<&'static str, i64> = BTreeMap::new();
        let (mut blocks, mut bytes) = (0, 0);
        for block in replay.live().values().filter(|block| is_selected(block, options)) {
            blocks += 1;
            bytes += block.bytes;
            let is_external = block.kind == MemoryKind::External;
            let name = if is_external { "outside PyTorch" } else { category(block.owner.category) };
            *sums.entry(name).or_default() += block.bytes;
        }
        let mut by_category: Vec<_> = sums.into_iter().collect();
        by_category.sort_by_key(|(name, bytes)| (-bytes, *name));
        HeldAtEnd { blocks, bytes, by_category, is_of_script }
    }

    fn print(&self, printer: &mut Printer, options: &Options) {
        printer.plain(format!(
            "{}: {} in {}",
            if self.is_of_script { "live when the script ended" } else { "live when the trace ends" },
            options.units.show(self.bytes),
            counted(self.blocks, "block")
        ));
        for (name, bytes) in &self.by_category {
            printer.plain(format!("  {} {name}", options.units.show(*bytes)));
        }
    }
}

/// What the answer says above the findings: how the memory in use grew.
#[derive(Clone, Copy)]
struct Shown {
    /// True if the answer already reports for each GPU that nothing grows.
    is_flat: bool,
    /// True if each step replaces kept memory with more.
    is_replaced: bool,
    /// The cached memory in bytes that kept memory can still fill; 0 if a GPU's growth shows kept memory.
    cached: i64,
}

/// The leaks of a trace, and the memory that is live at its end.
pub(crate) struct Findings {
    /// The leaks, the fastest growth first.
    pub(crate) leaks: Vec<Leak>,
    /// The line fitted to all allocated memory at the ends of the steps.
    pub(crate) growth: FittedLine,
    /// The number of finished steps.
    pub(crate) steps: usize,
    pub(crate) held: HeldAtEnd,
}

impl Findings {
    fn new(
        before_last: &Replayed,
        held: HeldAtEnd,
        stacks: &Stacks,
        levels: &Levels,
        options: &Options,
    ) -> Findings {
        let last = levels.last_step();
        type LeakOwner<'a> = (Symbol, Symbol, Symbol, Category, Option<&'a str>);
        let mut owners: FxHashMap<LeakOwner<'_>, BTreeMap<i64, (u64, i64)>> = FxHashMap::default();
        let mut lines: FxHashMap<i64, Option<&str>> = FxHashMap::default();
        let window = options.window;
        for block in before_last.replay.live().values() {
            let step = block.owner.step;
            let in_time = (window.from_ns..=window.to_ns).contains(&block.born_ns);
            let in_steps = (window.from_step.max(0)..=window.to_step).contains(&step);
            if !is_selected(block, options) || !in_time || !in_steps {
                continue;
            }
            let line =
                *lines.entry(block.stack).or_insert_with(|| stacks.lines(block.stack).first().copied());
            let owner = (block.owner.op, block.owner.module, block.owner.phase, block.owner.category, line);
            let (blocks, bytes) = owners.entry(owner).or_default().entry(step).or_default();
            *blocks += 1;
            *bytes += block.bytes;
        }
        let symbols = &before_last.symbols;
        // The memory at the ends of the steps, on all devices.
        let mut ends: BTreeMap<i64, i64> = BTreeMap::new();
        for level in levels.devices.iter().flat_map(|device| &device.steps) {
            *ends.entry(level.step).or_default() += level.allocated;
        }
        // Blocks that began to pile up only in the last half may be those of a buffer that drops its oldest
        // blocks. They count if the memory at the ends of steps has grown since by at least half of their bytes.
        let is_window = |first: i64, bytes: i64| {
            let grown = || {
                // The step itself may have freed what steps before it had kept.
                let before = *ends.range(..first).next_back()?.1;
                let before = ends.get(&first).map_or(before, |end| before.min(*end));
                Some(*ends.range(..last).next_back()?.1 - before)
            };
            first > FIRST_STEPS.max(last / 2) && grown().is_some_and(|grown| 2 * grown < bytes)
        };
        let mut leaks: Vec<Leak> = owners
            .into_iter()
            .filter_map(|((op, module, phase, kind, line), steps)| {
                let (first, newest) = (*steps.keys().next()?, *steps.keys().next_back()?);
                // Blocks do not count as growth if they are from too few steps, from scattered steps, or from
                // no recent step.
                let distance = regular_distance(&steps)?;
                let expected = newest.saturating_add(distance.saturating_mul(2));
                let bytes = steps.values().map(|(_, bytes)| bytes).sum();
                if steps.len() < FEWEST_STEPS || expected < last || is_window(first, bytes) {
                    return None;
                }
                // With distance 1, the leak has blocks from at least half of the steps in its range, so all
                // steps of the range count as points of the line. Otherwise only the leak's own steps count,
                // because a program may number its steps far apart.
                let numbers: Vec<i64> =
                    if distance == 1 { (first..=newest).collect() } else { steps.keys().copied().collect() };
                let mut sum = 0.0;
                let points: Vec<(f64, f64)> = numbers
                    .into_iter()
                    .map(|step| {
                        sum += steps.get(&step).map_or(0, |(_, bytes)| *bytes) as f64;
                        (step as f64, sum)
                    })
                    .collect();
                Some(Leak {
                    code: line.map(str::to_owned),
                    op: symbols.or(op, NO_OP),
                    module: symbols.or(module, NO_MODULE),
                    category: category(kind),
                    phase: symbols.or(phase, NO_PHASE),
                    blocks: steps.values().map(|(blocks, _)| blocks).sum(),
                    bytes,
                    steps: steps.len(),
                    first,
                    last: newest,
                    fit: fit(&points),
                })
            })
            .collect();
        leaks.sort_by(|a, b| {
            let by_growth = b.fit.slope.total_cmp(&a.fit.slope).then(b.bytes.cmp(&a.bytes));
            by_growth.then_with(|| a.owner().cmp(&b.owner()))
        });
        // The first step is left out because it fills caches that later steps reuse.
        let points: Vec<(f64, f64)> =
            ends.iter().skip(1).map(|(step, bytes)| (*step as f64, *bytes as f64)).collect();
        Findings { leaks, growth: fit(&points), steps: levels.ended, held }
    }

    /// Returns the growth of all leaks together, in bytes per step; `None` if the trace has too few steps.
    pub(super) fn rate(&self) -> Option<i64> {
        let sum: f64 = self.leaks.iter().map(|leak| leak.fit.slope).sum();
        (self.steps >= FEWEST_STEPS).then_some(sum as i64)
    }

    /// Returns the category that grows fastest; empty if nothing grows.
    pub(super) fn growing_category(&self) -> &'static str {
        let mut sums: BTreeMap<&'static str, f64> = BTreeMap::new();
        for leak in &self.leaks {
            *sums.entry(leak.category).or_default() += leak.fit.slope;
        }
        let fastest = sums.into_iter().max_by(|a, b| a.1.total_cmp(&b.1));
        fastest.map_or("", |(category, _)| category)
    }

    /// Prints the findings.
    fn print(&self, printer: &mut Printer, options: &Options, shown: Shown) {
        let units = options.units;
        if self.steps < FEWEST_STEPS {
            printer.plain(format!(
                "growth needs {FEWEST_STEPS} finished steps, and the trace has {}; mark the steps with ranges \
                 such as step:12",
                self.steps
            ));
        } else if self.leaks.is_empty() && !shown.is_flat {
            let over = counted(self.steps as u64, "step");
            printer.plain(if shown.is_replaced {
                format!("No memory of earlier steps piles up over {over}.")
            } else {
                format!("Nothing that is kept grows over {over}.")
            });
        } else if !self.leaks.is_empty() {
            let sum: f64 = self.leaks.iter().map(|leak| leak.fit.slope).sum();
            printer.line([
                Cell::new(format!("{} per step", units.show(sum as i64)), Style::Alarm),
                format!(
                    " of growth over {}, in blocks that outlive the step that allocated them",
                    counted(self.steps as u64, "step")
                )
                .into(),
            ]);
            if sum >= 1.0 && shown.cached > 0 {
                printer.plain(format!(
                    "It can fill cached memory ({}) first, for at most {}, in which nvidia-smi does not show it.",
                    units.show(shown.cached),
                    counted((shown.cached as f64 / sum) as u64, "step")
                ));
            }
            printer.gap();
            let mut table = Table::new(&[
                ("per step", Side::Right),
                ("fit", Side::Right),
                ("bytes", Side::Right),
                ("blocks", Side::Right),
                ("steps", Side::Right),
                ("category", Side::Left),
                ("phase", Side::Left),
                ("op", Side::Left),
                ("module", Side::Left),
            ]);
            let with_lines = self.leaks.iter().any(|leak| leak.code.is_some());
            for leak in self.leaks.iter().take(options.top.unwrap_or(10)) {
                table.row([
                    Cell::new(units.show(leak.fit.slope.round() as i64).to_string(), Style::Strong),
                    format!("{:.2}", leak.fit.r2).into(),
                    units.show(leak.bytes).to_string().into(),
                    count(leak.blocks).into(),
                    format!("{}-{}", leak.first, leak.last).into(),
                    leak.category.into(),
                    leak.phase.as_str().into(),
                    leak.op.as_str().into(),
                    leak.module.as_str().into(),
                ]);
            }
            printer.table(&table);
            if with_lines {
                printer.gap();
            }
            for leak in self.leaks.iter().take(options.top.unwrap_or(10)) {
                if let Some(line) = &leak.code {
                    printer
                        .plain(format!("  {} per step: {line}", units.show(leak.fit.slope.round() as i64)));
                }
            }
        }
        if options.window.is_open() {
            printer.gap();
            self.held.print(printer, options);
        }
    }

    fn json(&self, trace: &TraceFile) -> Value {
        let leaks: Vec<Value> = self
            .leaks
            .iter()
            .map(|leak| {
                json!({
                    "line": leak.code, "op": leak.op, "module": leak.module, "category": leak.category,
                    "phase": leak.phase, "bytes_per_step": leak.fit.slope, "r2": leak.fit.r2,
                    "bytes": leak.bytes, "blocks": leak.blocks, "steps": leak.steps,
                    "first_step": leak.first, "last_step": leak.last,
                })
            })
            .collect();
        json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "finished_steps": self.steps,
            "growth_bytes_per_step": self.growth.slope,
            "growth_r2": self.growth.r2,
            "leaks": leaks,
            "held_at_end_blocks": self.held.blocks,
            "held_at_end_bytes": self.held.bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn leaks_of_equal_size_are_in_the_order_of_their_owners() {
        let modules: Vec<String> = (0..9).map(|layer| format!("Net.{layer}")).collect();
        let mut trace = TraceBuilder::default();
        for step in 0..8 {
            for module in modules.iter().rev() {
                trace.alloc(4096, Row { step, op: "aten::mm", module, phase: "forward", ..Row::default() });
            }
        }
        let file = std::env::temp_dir().join(format!("memtrace-equal-leaks-{}.csv", std::process::id()));
        std::fs::write(&file, trace.finish()).unwrap();
        let answer = Leaks.run(&[Input::open(&file).unwrap()], &Options::default());
        std::fs::remove_file(&file).unwrap();
        let leaks = answer.unwrap().json["processes"][0]["leaks"].clone();
        let found: Vec<&str> =
            leaks.as_array().unwrap().iter().map(|leak| leak["module"].as_str().unwrap()).collect();
        assert_eq!(found, modules);
    }

    #[test]
    fn leaks_know_the_distance_of_steps_that_a_program_numbers_far_apart() {
        let distance = |steps: &[i64]| regular_distance(&steps.iter().map(|step| (*step, (1, 1))).collect());
        assert_eq!(distance(&[1, 2, 4, 5]), Some(1));
        assert_eq!(distance(&[0, 4_000_000, 8_000_000, 12_000_000]), Some(4_000_000));
        assert_eq!(distance(&[0, 10, 1_000_000]), None);
        assert_eq!(distance(&[i64::MIN, 0, i64::MAX]), None);
    }
}
