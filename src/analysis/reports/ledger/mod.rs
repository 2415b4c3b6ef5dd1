//! `memtrace ledger`: the memory in use on a device, by owner, with advice for each.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use memtrace_trace::units::Unit;
use memtrace_trace::{Category, EventName, ledger};
use rustc_hash::{FxHashMap, FxHashSet};
use serde_json::{Value, json};

use super::device_users::{self, OthersAt};
use super::report::{Answer, Report, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::Symbol;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, count, duration, percent, share};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::rank_or_name;
use crate::state::group::block_category;
use crate::state::layout::{self, Layout};
use crate::state::moment::{self, NamedMoment, replay_to_moment};
use crate::state::replay::{Block, MemoryKind, Replay};
use crate::state::replay_trace::Replayed;

mod advice;
pub(super) use advice::{CUBLAS, NCCL, library};
mod communicators;
pub(super) mod host;
mod samples;

use samples::{DeviceSample, DeviceSamples, is_managed};

/// `memtrace ledger`.
pub(super) struct Ledger;

/// The option that shows the memory of the host instead of a device.
const HOST: Flag =
    Flag::switch("host", "Show the process's host memory by owner; peaks are of resident memory");

/// The note about a device that shares its memory with the host.
const ONE_MEMORY: &str =
    "device and host share one memory: these rows and the free memory add up to its total";

const COLUMNS: Columns = layout::COLUMNS.and(Columns::of(&["api", "source", "name"]));

impl Report for Ledger {
    fn name(&self) -> &'static str {
        "ledger"
    }

    fn about(&self) -> &'static str {
        "Explain the memory that nvidia-smi shows: torch, its cache, libraries, context, others"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[("ledger out", "every part of the memory that nvidia-smi shows")]
    }

    fn flags(&self) -> &'static [Flag] {
        const { &[Flag { default: "used-peak", ..moment::FLAG }, HOST] }
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let at: NamedMoment = options.text(moment::FLAG.name).parse()?;
        if options.is_set(HOST.name) {
            return host::answer(input, &at, options);
        }
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut json = Vec::new();
        let mut held = Vec::new();
        for trace in &input.traces {
            let Some((replayed, states)) = states_at(trace, &at, options, &Later::default())? else {
                footer.read(trace, options)?;
                continue;
            };
            footer.add_reading(trace, &replayed);
            footer.note_inference(&replayed);
            for state in &states {
                footer.add_share(&replayed, state.ordinal);
            }
            held.push((trace, states));
        }
        name_neighbours(&mut held, input, options)?;
        for (trace, states) in held {
            for state in states {
                if json.is_empty() {
                    heading(&mut printer, input, &trace.meta);
                }
                printer.gap();
                state.print(&mut printer, &rank_or_name(trace, input), options);
                json.push(state.json(trace));
                for note in &state.notes {
                    if !footer.notes.contains(note) {
                        footer.notes.push(note.clone());
                    }
                }
            }
        }
        if json.is_empty() {
            printer.plain("No memory tracked.");
        }
        let hints =
            vec![next("peak", input, "--of used"), next("frag", input, ""), next("ledger", input, "--host")];
        Ok(Answer { next: hints, ..Answer::new(printer, json!({ "devices": json }), footer) })
    }
}

/// Names the other processes on a GPU in their line. A process of this run has its rank and pid, and any other
/// process its user and command.
fn name_neighbours(
    held: &mut [(&TraceFile, Vec<LedgerState>)],
    input: &Input,
    options: &Options,
) -> Result<()> {
    let mut lines = held.iter().flat_map(|(_, states)| states).flat_map(|state| &state.lines);
    if !lines.any(|line| line.kind == LedgerKind::OtherProcesses) {
        return Ok(());
    }
    let users = device_users::read_users(input, options)?;
    for (trace, states) in held.iter_mut() {
        for state in states.iter_mut() {
            for line in state.lines.iter_mut().filter(|line| line.kind == LedgerKind::OtherProcesses) {
                let here = OthersAt { device: state.ordinal, ts_ns: state.ts_ns, bytes: line.bytes };
                if let Some(others) = device_users::neighbours(&users, trace, &here, options) {
                    line.what = format!("other processes: {}", others.text);
                    others.remedy.clone_into(&mut line.advice);
                }
            }
        }
    }
    Ok(())
}

/// Facts that are recorded in rows after the moment of the ledger.
#[derive(Default)]
pub(super) struct Later {
    /// By `alloc_id`: the last category that a tag gave a block.
    categories: FxHashMap<i64, Category>,
    /// The private pools into which a graph was captured. Other private pools belong to the program
    /// (`torch.cuda.MemPool`).
    graph_pools: FxHashSet<i64>,
}

impl Later {
    /// Processes a row of the trace. The row must include its `pool`.
    pub(super) fn feed(&mut self, row: &Record) {
        match row.event {
            EventName::Tag if row.delta_bytes > 0 => {
                self.categories.insert(row.alloc_id, row.category);
            }
            EventName::Alloc if row.category == Category::CudaGraph => {
                self.graph_pools.insert(row.pool);
            }
            _ => {}
        }
    }

    /// Returns a copy of the block with the category of its last `tag` row, if there is one.
    fn applied_to(&self, block: &Block) -> Block {
        let mut block = *block;
        if let Some(category) = self.categories.get(&block.id) {
            block.owner.category = *category;
        }
        block
    }
}

/// Returns the ledgers of a process at a moment, one for each device in use, and the replay that they are
/// computed from. Returns `None` if the trace does not reach the moment. The categories in `later` replace
/// the categories at that moment.
pub(super) fn states_at(
    trace: &TraceFile,
    at: &NamedMoment,
    options: &Options,
    later: &Later,
) -> Result<Option<(Replayed, Vec<LedgerState>)>> {
    let samples = DeviceSamples::read(trace, options)?;
    let mut layout = Layout::default();
    let mut callers = FxHashMap::default();
    let flow = flow_categories(trace, options)?;
    let replayed = replay_to_moment(trace, at, COLUMNS, options, flow, |row, replay| {
        layout.feed(row);
        remember_caller(&mut callers, row, replay);
    })?;
    Ok(replayed.map(|replayed| {
        let devices: Vec<i32> = replayed.gpus(options).map(|device| device.ordinal).collect();
        let of = |ordinal| {
            LedgerState::new(trace, &replayed, (&layout, later), &callers, &samples, ordinal, options.units)
        };
        let states = devices.into_iter().map(of).filter(|state| !state.lines.is_empty()).collect();
        (replayed, states)
    }))
}

/// Returns the host memory of the process, which shares the memory of its device, by the sample that applies
/// at `row`.
pub(super) fn host_at(trace: &TraceFile, options: &Options, row: &Record) -> Result<Option<i64>> {
    let sample = DeviceSamples::read(trace, options)?.at(row.device, row.seq);
    Ok(sample.and_then(|sample| sample.sample.host))
}

/// For each block outside torch's allocator, by `alloc_id`: the calling library, the call, and the purpose of
/// the memory.
type Callers = FxHashMap<i64, (Symbol, Symbol, Symbol)>;

fn remember_caller(callers: &mut Callers, row: &Record, replay: &Replay) {
    match row.event {
        EventName::ExtAlloc if row.alloc_id != 0 => {
            callers.insert(row.alloc_id, (row.source, row.api, row.name));
        }
        EventName::ExtFree if !replay.live().contains(row.alloc_id) => {
            callers.remove(&row.alloc_id);
        }
        _ => {}
    }
}

/// The use of the memory in a line of the ledger.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum LedgerKind {
    /// Torch's blocks of a category.
    Blocks(Category),
    /// The part of torch's blocks that no tensor uses, and freed blocks that a stream still uses.
    BlockOverhead,
    /// Free memory in the cache of torch's allocator or in a pool of the driver.
    Cache,
    /// The memory of a library, with the name that [`library`] gives it.
    Library(String),
    /// The own memory of CUDA graphs.
    Graphs,
    /// The CUDA context and the modules.
    Context,
    /// Other processes on the device.
    OtherProcesses,
    /// Memory that may belong to other processes.
    PerhapsOthers,
    /// The host memory of the process, on a device that shares its memory with the host.
    Host,
    /// The page cache, on a device that shares its memory with the host.
    PageCache,
    /// Memory without a known owner.
    Unexplained,
}

impl LedgerKind {
    /// Returns the group in the JSON.
    fn group(&self) -> &'static str {
        match self {
            LedgerKind::Blocks(_) | LedgerKind::BlockOverhead => "torch",
            LedgerKind::Cache => "cache",
            LedgerKind::Library(_) | LedgerKind::Graphs => "library",
            LedgerKind::Context => "context",
            LedgerKind::OtherProcesses | LedgerKind::PerhapsOthers => "others",
            LedgerKind::Host => "host",
            LedgerKind::PageCache => "page_cache",
            LedgerKind::Unexplained => "unexplained",
        }
    }
}

/// One line of the ledger.
pub(super) struct LedgerLine {
    pub(super) kind: LedgerKind,
    pub(super) what: String,
    pub(super) bytes: i64,
    /// The number of blocks; 0 if blocks are not counted.
    pub(super) blocks: u64,
    pub(super) advice: String,
}

impl LedgerLine {
    fn json(&self) -> Value {
        json!({
            "group": self.kind.group(),
            "held_by": self.what,
            "bytes": self.bytes,
            "blocks": self.blocks,
            "advice": self.advice,
        })
    }
}

/// Returns a line for each category of torch's blocks, the largest first, with advice about each category.
fn lines_by_category(blocks: &[Block], advice: impl Fn(Category) -> &'static str) -> Vec<LedgerLine> {
    // Keyed by name, because one category has two names if some of its blocks are inferred.
    let mut lines: BTreeMap<&'static str, LedgerLine> = BTreeMap::new();
    for block in blocks {
        let (name, category) = (block_category(block), block.owner.category);
        let line = lines.entry(name).or_insert_with(|| LedgerLine {
            kind: LedgerKind::Blocks(category),
            what: format!("torch: {name}"),
            bytes: 0,
            blocks: 0,
            advice: advice(category).to_owned(),
        });
        line.bytes += block.bytes;
        line.blocks += 1;
    }
    let mut lines: Vec<LedgerLine> = lines.into_values().filter(|line| line.bytes > 0).collect();
    lines.sort_by_key(|line| Reverse(line.bytes));
    lines
}

/// Prints torch's memory that is asleep (unmapped), if there is any. `held` has the name and the bytes of
/// each use.
pub(super) fn print_asleep(held: &[(&str, i64)], printer: &mut Printer, options: &Options) {
    let bytes: i64 = held.iter().map(|(_, bytes)| bytes).sum();
    if bytes == 0 {
        return;
    }
    let parts: Vec<String> =
        held.iter().map(|(what, bytes)| format!("{what} {}", options.units.show(*bytes))).collect();
    printer.plain(format!(
        "asleep: {} more of torch's memory is unmapped until the program maps it again ({})",
        options.units.show(bytes),
        parts.join(", ")
    ));
}

/// The memory of one device, by owner.
pub(super) struct LedgerState {
    pub(super) ordinal: i32,
    pub(super) ts_ns: i64,
    /// The memory of the device, in bytes; 0 if unknown.
    pub(super) total: i64,
    /// The sum of the lines.
    pub(super) used: i64,
    pub(super) lines: Vec<LedgerLine>,
    /// The free memory in segments of graphs' pools, in bytes. The lines of the group `cache` include this
    /// memory.
    pub(super) graphs_free: i64,
    /// Torch's blocks whose memory the program has unmapped, as vLLM does while it sleeps. They are not part
    /// of the lines' sum.
    pub(super) asleep: Vec<LedgerLine>,
    sample: Option<DeviceSample>,
    pub(super) notes: Vec<String>,
}

impl LedgerState {
    fn new(
        trace: &TraceFile,
        replayed: &Replayed,
        (layout, later): (&Layout, &Later),
        callers: &Callers,
        samples: &DeviceSamples,
        ordinal: i32,
        units: Unit,
    ) -> LedgerState {
        let ts_ns = replayed.replay.ts_ns;
        let sample = samples.at(ordinal, replayed.replay.seq);
        let mut state = LedgerState {
            ordinal,
            ts_ns,
            total: sample
                .and_then(|sample| sample.sample.total)
                .unwrap_or_else(|| trace.meta.total_bytes(ordinal)),
            used: 0,
            lines: Vec::new(),
            graphs_free: 0,
            asleep: Vec::new(),
            sample,
            notes: Vec::new(),
        };
        state.torch(trace, replayed, layout, later);
        state.libraries(replayed, callers, samples, units);
        if !state.lines.is_empty() {
            state.rest(trace);
        }
        state.used = state.lines.iter().map(|line| line.bytes).sum();
        state
    }

    fn line(&mut self, kind: LedgerKind, what: impl Into<String>, bytes: i64, blocks: u64, advice: &str) {
        if bytes > 0 {
            self.lines.push(LedgerLine { kind, what: what.into(), bytes, blocks, advice: advice.to_owned() });
        }
    }

    /// Adds the memory of torch's allocator: its blocks by category, and the memory of its segments that is
    /// outside blocks.
    fn torch(&mut self, trace: &TraceFile, replayed: &Replayed, layout: &Layout, later: &Later) {
        let totals = replayed.replay.find(self.ordinal).map(|device| device.totals).unwrap_or_default();
        let live = replayed.replay.live_on(self.ordinal, false);
        let (mut rounding, mut asleep) = (0, Vec::new());
        let asked: Vec<_> = live
            .iter()
            .filter_map(|block| {
                if layout.is_asleep(block) {
                    asleep.push(later.applied_to(block));
                    return None;
                }
                let asked = if block.requested < 0 { block.bytes } else { block.requested.min(block.bytes) };
                rounding += block.bytes - asked;
                let mut block = later.applied_to(block);
                block.bytes = asked;
                Some(block)
            })
            .collect();
        let asleep_bytes: i64 = asleep.iter().map(|block| block.bytes).sum();
        self.asleep = lines_by_category(&asleep, |_| "");
        self.lines.extend(lines_by_category(&asked, advice::for_category));
        let overhead = LedgerKind::BlockOverhead;
        self.line(overhead.clone(), "torch: rounding and splitting", rounding, 0, advice::ROUNDING);
        let pending = (totals.active - totals.allocated).max(0);
        self.line(overhead, "torch: freed, still in use by a stream", pending, 0, advice::PENDING);
        let (mut holes, mut empty, mut pinned) = (0, 0, 0);
        for segment in layout.segments(&replayed.replay, self.ordinal) {
            self.graphs_free += if later.graph_pools.contains(&segment.pool) { segment.free() } else { 0 };
            if segment.is_empty() {
                empty += segment.bytes;
            } else {
                holes += segment.free();
                pinned += u64::from(!segment.holes.is_empty());
            }
        }
        let cached = (totals.reserved - (totals.allocated - asleep_bytes) - pending).max(0);
        let holes = holes.min(cached);
        let empty = empty.min(cached - holes);
        let cache = |state: &mut Self, what: &str, bytes, blocks, advice| {
            state.line(LedgerKind::Cache, format!("torch: {what}"), bytes, blocks, advice);
        };
        cache(self, "fragmentation, holes beside live blocks", holes, pinned, advice::HOLES);
        cache(self, "cached and free", empty, 0, advice::CACHED);
        cache(self, "cached, at an unknown address", cached - holes - empty, 0, advice::CACHED);
        let backend = &trace.meta.allocator.backend;
        if backend != "native" {
            self.notes.push(format!(
                "allocator backend {backend}: the memory of its pool is from the nearest sample"
            ));
        }
    }

    /// Adds the traced memory outside torch's allocator, by library.
    fn libraries(&mut self, replayed: &Replayed, callers: &Callers, samples: &DeviceSamples, units: Unit) {
        // For each holder, by name: its library, bytes and number of blocks.
        let mut holders: FxHashMap<String, (String, i64, u64)> = FxHashMap::default();
        let mut managed = 0;
        let here = |block: &&Block| block.kind == MemoryKind::External && block.device == self.ordinal;
        for block in replayed.replay.live().values().filter(here) {
            let (source, api, user) = callers.get(&block.id).copied().unwrap_or_default();
            if is_managed(&replayed.symbols.get(api)) {
                managed += block.bytes;
                continue;
            }
            let library = advice::library(&replayed.symbols.get(source));
            let name = samples.communicators.holder(&library, &replayed.symbols.get(user));
            let holder = holders.entry(name.unwrap_or_else(|| library.clone())).or_default();
            holder.0 = library;
            holder.1 += block.bytes;
            holder.2 += 1;
        }
        let mut holders: Vec<_> = holders.into_iter().collect();
        holders.sort_by(|a, b| (b.1.1, &a.0).cmp(&(a.1.1, &b.0)));
        for (name, (library, bytes, blocks)) in holders {
            let advice = advice::for_library(&library);
            self.line(LedgerKind::Library(library), name, bytes, blocks, advice);
        }
        if managed > 0 {
            self.notes.push(format!(
                "{} of managed memory moves between host and device; the part on the device counts as context \
                 and modules",
                units.show(managed)
            ));
        }
    }

    /// Adds the memory in the sample that no traced call explains. Without a sample, adds the assumed size of
    /// the context.
    fn rest(&mut self, trace: &TraceFile) {
        let Some(sample) = self.sample else {
            let context = trace.meta.phantom["context_bytes"].as_i64().unwrap_or(0);
            self.line(LedgerKind::Context, "context and modules (assumed)", context, 0, advice::CONTEXT);
            self.notes.push(
                "no sample of the device (MEMTRACE_SAMPLE_MS=0, or neither NVML nor a driver): the CUDA context \
                 and other processes are unknown"
                    .to_owned(),
            );
            return;
        };
        let rest = sample.rest;
        let pool =
            if trace.meta.allocator.backend == "native" { "the driver's pool" } else { "torch's pool" };
        self.line(LedgerKind::Cache, format!("{pool}: cached and free"), rest.pool, 0, advice::POOL);
        self.line(LedgerKind::Graphs, "CUDA graphs' own memory", rest.graphs, 0, advice::GRAPHS);
        self.line(LedgerKind::Context, "context and modules", rest.context.unwrap_or(0), 0, advice::CONTEXT);
        let others = rest.others.unwrap_or(0);
        self.line(LedgerKind::OtherProcesses, "other processes", others, 0, advice::OTHERS);
        if let Some(cache) = sample.sample.cache {
            self.line(LedgerKind::Host, ledger::HOST, rest.host.unwrap_or(0), 0, advice::HOST);
            self.line(
                LedgerKind::PerhapsOthers,
                rest.unexplained_name(),
                rest.unexplained.unwrap_or(0),
                0,
                advice::OTHER_PROGRAMS,
            );
            self.line(LedgerKind::PageCache, "page cache", cache, 0, advice::PAGE_CACHE);
            self.notes.push(ONE_MEMORY.to_owned());
            return;
        }
        let (kind, advice) = if rest.context.is_some() && rest.others.is_some() {
            let name = trace.meta.device(self.ordinal).map_or("", |device| &device.name);
            (LedgerKind::Unexplained, advice::unexplained(name))
        } else {
            (LedgerKind::PerhapsOthers, advice::UNKNOWN_PROCESS)
        };
        self.line(kind, rest.unexplained_name(), rest.unexplained.unwrap_or(0), 0, advice);
        if rest.context.is_none() {
            self.notes.push(
                "NVML does not identify this process (a PID namespace, or no NVML): the last row includes its \
                 context"
                    .to_owned(),
            );
        }
    }

    /// Returns the free memory if device and host share one memory; `None` if the device has its own memory.
    fn free(&self) -> Option<i64> {
        let is_unified = self.sample.is_some_and(|sample| sample.sample.is_unified());
        is_unified.then(|| (self.total - self.used).max(0))
    }

    fn print(&self, printer: &mut Printer, process: &str, options: &Options) {
        let units = options.units;
        let mut first = format!(" used on device {}", self.ordinal);
        if self.total > 0 {
            first += &format!(" of {} ({})", units.show(self.total), percent(share(self.used, self.total)));
        }
        if let Some(free) = self.free() {
            first += &format!(", with page cache; {} free", units.show(free));
        }
        printer.line([
            format!("{process}, at {}: ", duration(self.ts_ns)).into(),
            Cell::new(units.show(self.used).to_string(), Style::Strong),
            first.into(),
        ]);
        let mut table = Table::new(&[
            ("bytes", Side::Right),
            ("share", Side::Right),
            ("", Side::Left),
            ("blocks", Side::Right),
            ("held by", Side::Left),
            ("advice", Side::Left),
        ]);
        for line in &self.lines {
            table.row([
                Cell::new(units.show(line.bytes).to_string(), Style::Strong),
                percent(share(line.bytes, self.used)).into(),
                bar(share(line.bytes, self.used), 12).into(),
                if line.blocks > 0 { count(line.blocks).into() } else { "".into() },
                line.what.as_str().into(),
                Cell::new(line.advice.as_str(), Style::Faint),
            ]);
        }
        printer.table(&table);
        let asleep: Vec<_> = self.asleep.iter().map(|line| (line.what.as_str(), line.bytes)).collect();
        print_asleep(&asleep, printer, options);
        if let Some(sample) = self.sample {
            let away = sample.ts_ns - self.ts_ns;
            let when = match away {
                0 => "at the same moment".to_owned(),
                away if away > 0 => format!("{} later", duration(away)),
                away => format!("{} earlier", duration(-away)),
            };
            printer.line([Cell::new(
                format!("memory that no traced call explains: from the sample of the device {when}"),
                Style::Faint,
            )]);
        }
    }

    fn json(&self, trace: &TraceFile) -> Value {
        let rows = |lines: &[LedgerLine]| -> Vec<Value> { lines.iter().map(LedgerLine::json).collect() };
        json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "device": self.ordinal,
            "ts_ns": self.ts_ns,
            "total_bytes": self.total,
            "used_bytes": self.used,
            "free_bytes": self.free(),
            "looked_ts_ns": self.sample.map_or(-1, |sample| sample.ts_ns),
            "looked_used_bytes": self.sample.and_then(|sample| sample.sample.used()).unwrap_or(-1),
            "looked_process_bytes": self.sample.and_then(|sample| sample.sample.process).unwrap_or(-1),
            "looked_bar1_bytes": self.sample.and_then(|sample| sample.sample.bar1).unwrap_or(-1),
            "rows": rows(&self.lines),
            "asleep": rows(&self.asleep),
        })
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn the_ledger_shows_managed_memory_in_the_chosen_unit() {
        let mut trace = TraceBuilder::default();
        trace.segment(2 << 20);
        trace.alloc(1 << 20, Row::default());
        let managed = Row {
            event: EventName::ExtAlloc,
            api: "cudaMallocManaged",
            device: 0,
            alloc_id: 9,
            delta_bytes: 3 << 30,
            ..Row::default()
        };
        trace.change(managed, [0; 3]);
        let file = std::env::temp_dir().join(format!("memtrace-managed-{}.csv", std::process::id()));
        std::fs::write(&file, trace.finish()).unwrap();
        let values = [("at", "end".to_owned())].into();
        let options = Options { units: Unit::MiB, values, ..Options::default() };
        let answer = Ledger.run(&[Input::open(&file).unwrap()], &options);
        std::fs::remove_file(&file).unwrap();
        let text = answer.unwrap().text();
        assert!(text.contains("3072.00 MiB of managed memory"), "{text}");
    }
}
