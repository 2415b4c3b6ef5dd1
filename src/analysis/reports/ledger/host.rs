//! `memtrace ledger --host`: the memory of the process on the host, by owner, as the kernel counts it.

use memtrace_trace::Category;
use memtrace_trace::host::parts::{
    ANONYMOUS, ARENAS, CPU_TENSORS, DRIVER, FILE, HEAP, LIBRARIES, MANAGED, OWN, PINNED, PINNED_CACHED,
    PINNED_ROUNDING, SHARED, SIMULATED, STACKS, of_tensors,
};
use serde_json::{Value, json};

use super::super::host_owners::{Allocated, HostOwners, allocated_at, allocated_json};
use super::super::killed::{Killed, RunVictims, WORKERS};
use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::read::together::RowReader;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, counted, duration, percent, share, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::rank_or_name;
use crate::reports::report::{Answer, next};
use crate::state::host_memory::{FullSample, HostMemory, ProcessesSample, QuickSample, When};
use crate::state::moment::NamedMoment;
use crate::state::replay::{Metric, Replay};
use crate::state::replay_trace::replay_together;

/// The name of a DataLoader worker, which torch sets.
const LOADER: &str = "pt_data_worker";
/// Advice about the heap if CPU tensors have no rows of their own. The heap may then contain tensors: after
/// glibc has freed an mmapped block, it allocates blocks of up to that size (at most 32 MiB) from the heap.
const HEAP_WITH_TENSORS: &str = "CPU tensors of up to 32 MiB, objects of Python and C, and what glibc keeps: MEMTRACE_HOST_TENSORS=1 separates them";
/// The group of the changes between the full sample and the wanted moment.
pub(in crate::reports) const CHANGE: &str = "change";
/// Advice about the remaining memory if CPU tensors have rows of their own.
const NO_TENSORS: &str = "not CPU tensors, which have their own rows: NumPy arrays, Python's objects, \
                          buffers of libraries (memray names their lines)";

/// For each prefix of a part's name: its group, and the advice.
const PARTS: &[(&str, &str, &str)] = &[
    (
        of_tensors(Category::Parameter),
        "tensors",
        "weights on the host: delete a model that can be loaded again instead of offloading it",
    ),
    (
        of_tensors(Category::OptimizerState),
        "tensors",
        "the optimizer's state on the host: adapters (LoRA) or an 8-bit optimizer need less",
    ),
    (CPU_TENSORS, "tensors", "models offloaded with .cpu(), copies of a state, kept batches"),
    (PINNED_ROUNDING, "pinned", ROUNDING),
    (PINNED_CACHED, "pinned", "torch keeps it for later requests: torch._C._host_emptyCache() returns it"),
    (PINNED, "pinned", "buffers that the GPU reads directly (pin_memory, offloading): fewer or smaller ones"),
    (
        MANAGED,
        "managed",
        "cudaMallocManaged, whose pages move between host and GPU: the state of a paged optimizer, for example",
    ),
    (SHARED, "shared", "batches of DataLoader workers: fewer workers, a smaller prefetch_factor"),
    (FILE, "file", "page cache: the kernel drops clean pages when memory runs short"),
    (LIBRARIES, "libraries", "code of torch and CUDA: import less"),
    (
        ARENAS,
        "malloc",
        "MALLOC_MMAP_THRESHOLD_=32768 returns larger blocks at once; with many threads also MALLOC_ARENA_MAX=2",
    ),
    (
        HEAP,
        "malloc",
        "objects of Python and C, NumPy arrays of up to 32 MiB, and what glibc keeps: \
         MALLOC_TRIM_THRESHOLD_=65536 returns what glibc keeps, and memray run --native names who allocated the \
         rest",
    ),
    (
        ANONYMOUS,
        "other",
        "large mallocs: NumPy, Python, CPU tensors (MEMTRACE_HOST_TENSORS=1 separates them)",
    ),
    (STACKS, "stacks", "fewer threads: OMP_NUM_THREADS"),
    (DRIVER, "driver", ""),
    (SIMULATED, "simulated", "values that the program copied to the simulated GPU; absent with a real GPU"),
    (OWN, "memtrace", "the buffer of events; MEMTRACE_BUFFER sets its size"),
];

/// Advice about the rounding of pinned memory.
const ROUNDING: &str = "torch rounds each request up to a power of two: PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1 if it is not refused (torch 2.15 has it, 2.11 not), or pin one buffer of such a size and slice it";

/// Returns the group of a part, and the advice about it. `has_tensors` is true if the trace has CPU
/// tensors.
pub(in crate::reports) fn part_about(name: &str, has_tensors: bool) -> (&'static str, &'static str) {
    match name {
        ANONYMOUS if has_tensors => return ("other", NO_TENSORS),
        HEAP if !has_tensors => return ("malloc", HEAP_WITH_TENSORS),
        _ => {}
    }
    let known = PARTS.iter().find(|(start, _, _)| name.starts_with(start));
    known.map_or(("other", ""), |(_, group, advice)| (*group, *advice))
}

/// Builds the answer to `memtrace ledger --host`.
pub(super) fn answer(input: &Input, at: &NamedMoment, options: &Options) -> Result<Answer> {
    let mut printer = options.printer();
    let mut footer = Footer::of([input]);
    let mut json = Vec::new();
    let mut has_quick = false;
    let victims = RunVictims::new(&input.traces, options);
    for trace in &input.traces {
        let symbols = SymbolTable::default();
        let mut memory = HostMemory::new(&symbols);
        let replay = Replay::new(&symbols, options.window, Metric::Allocated);
        let readers: &mut [&mut dyn RowReader] = &mut [&mut memory];
        let replayed = replay_together(trace, Columns::of(&[]), options, replay, readers, |_, _| {})?;
        footer.add_reading(trace, &replayed);
        let moment = at.without_mark(trace, options)?;
        let Some(mut state) = moment.and_then(|moment| HostState::new(&memory, &moment)) else {
            has_quick |= !memory.quick.is_empty();
            continue;
        };
        state.name_owners(trace, &memory, None, options)?;
        if json.is_empty() {
            heading(&mut printer, input, &trace.meta);
        }
        printer.gap();
        state.print(&mut printer, &rank_or_name(trace, input), &memory, options);
        let killed = Killed::find(trace, &memory, &victims, options)?;
        let mut value = state.json(trace, &memory);
        value["killed"] = killed.as_ref().map(|killed| killed.json(options)).into();
        json.push(value);
    }
    if json.is_empty() {
        printer.plain(match (at, has_quick) {
            (NamedMoment::Oom, true) => "No request ran out of memory.",
            (_, true) => "No full sample of the host: /proc/self/smaps could not be read.",
            _ => "No sample of the host: MEMTRACE_SAMPLE_MS=0, an older trace, or /proc could not be read.",
        });
    }
    let hints = vec![next("leaks", input, ""), next("ledger", input, "")];
    Ok(Answer { next: hints, ..Answer::new(printer, json!({ "host": json }), footer) })
}

/// A part of the memory of a process.
pub(in crate::reports) struct HostPart {
    pub(in crate::reports) group: &'static str,
    pub(in crate::reports) what: String,
    /// The proportional bytes (PSS) of the part, and its resident bytes.
    pub(in crate::reports) pss: i64,
    pub(in crate::reports) rss: i64,
    /// The code that allocated the part, if this is known. For a change, the code of the CPU tensors in it.
    pub(in crate::reports) owners: Vec<Allocated>,
    pub(in crate::reports) advice: &'static str,
}

impl HostPart {
    /// Returns true for a rise of anonymous memory since the full sample, which may be CPU tensors.
    fn is_of_tensors(&self) -> bool {
        self.group == CHANGE && self.what.starts_with(ANONYMOUS) && self.rss > 0
    }
}

/// The memory of one process on the host, by owner.
pub(in crate::reports) struct HostState<'a> {
    pub(in crate::reports) when: When,
    /// The proportional set size (PSS) of the process, in bytes. `rss` is its resident set size.
    pub(in crate::reports) pss: i64,
    pub(in crate::reports) rss: i64,
    pub(in crate::reports) parts: Vec<HostPart>,
    /// At most the bytes of CPU tensors in the change of anonymous memory since the full sample: not all of what
    /// is allocated need be resident.
    pub(in crate::reports) tensors_in_change: i64,
    /// The full sample that the parts are from.
    full: &'a FullSample,
    quick: Option<&'a QuickSample>,
    children: Option<&'a ProcessesSample>,
    others: Option<&'a ProcessesSample>,
}

/// If the largest full sample reaches at least this share of the peak, it is shown as the peak, because its
/// parts are exact.
const NEAR_PEAK: f64 = 0.97;

impl<'a> HostState<'a> {
    /// Returns the state at a moment; `None` if there are no samples or there is no such moment.
    pub(in crate::reports) fn new(memory: &'a HostMemory, at: &NamedMoment) -> Option<HostState<'a>> {
        let highest = memory.whole().rev().max_by_key(|full| full.total.rss)?;
        let quick = memory.quick_at(at);
        if matches!(at, NamedMoment::Oom) && quick.is_none() {
            return None;
        }
        let is_peak = matches!(at, NamedMoment::Peak(_))
            && highest.total.rss as f64 >= memory.peak_rss() as f64 * NEAR_PEAK;
        let (full, quick, when) = match quick {
            Some(quick) if !is_peak => (memory.full_with(quick)?, Some(quick), quick.when),
            _ => (highest, memory.quick_near(highest.when.ts_ns), highest.when),
        };
        let mut state = HostState {
            when,
            pss: 0,
            rss: 0,
            parts: Vec::new(),
            tensors_in_change: 0,
            full,
            quick,
            children: memory.children_near(when.ts_ns),
            others: memory.others_at(when.ts_ns),
        };
        let mut parts: Vec<_> = full.parts.iter().collect();
        parts.sort_by(|a, b| (-a.pss, &a.name).cmp(&(-b.pss, &b.name)));
        for part in parts {
            let (group, advice) = part_about(&part.name, memory.has_tensors);
            state.part(group, part.name.clone(), part.pss, part.rss, advice);
        }
        if full.when != when {
            // The full sample is older or newer than this moment. The difference between the quick samples at
            // both times is added as a separate line.
            let then = memory.quick_with(full)?;
            let now = quick?;
            let names = [ANONYMOUS, "files", "shared memory"];
            for (name, (now, then)) in names.iter().zip(now.kinds.iter().zip(then.kinds)) {
                if *now >= 0 && then >= 0 && *now != then {
                    let what = format!("{name}: change since {}", duration(full.when.ts_ns));
                    let change = now - then;
                    state.part(CHANGE, what, change, change, "no full sample was taken at this moment");
                }
            }
        }
        state.pss = state.parts.iter().map(|part| part.pss).sum();
        state.rss = state.parts.iter().map(|part| part.rss).sum();
        Some(state)
    }

    /// Names the code that allocated each part, if the trace shows it. Returns the code of the CPU tensors that
    /// have been allocated since `before_ns`.
    pub(in crate::reports) fn name_owners(
        &mut self,
        trace: &TraceFile,
        memory: &HostMemory,
        before_ns: Option<i64>,
        options: &Options,
    ) -> Result<Vec<Allocated>> {
        let (full_ns, now_ns) = (self.full.when.ts_ns.min(self.when.ts_ns), self.when.ts_ns);
        let times = [before_ns.unwrap_or(full_ns).min(full_ns), full_ns, now_ns];
        let owners = HostOwners::read(trace, memory, &times, options)?;
        let [before, then, now] = &owners[..] else { return Ok(Vec::new()) };
        let (tensors, of_change) = now.tensors_since(then);
        for part in self.parts.iter_mut().filter(|part| part.group != CHANGE) {
            part.owners = then.largest_in(&part.what);
        }
        if let Some(change) = self.parts.iter_mut().find(|part| part.is_of_tensors())
            && tensors > 0
        {
            self.tensors_in_change = tensors.min(change.rss);
            change.owners = of_change;
        }
        Ok(now.tensors_since(before).1)
    }

    fn part(&mut self, group: &'static str, what: String, pss: i64, rss: i64, advice: &'static str) {
        self.parts.push(HostPart { group, what, pss, rss, owners: Vec::new(), advice });
    }

    /// Returns a sentence that names the code that allocated a part, if this is known.
    pub(in crate::reports) fn owners_of(&self, part: &HostPart, options: &Options) -> Option<String> {
        let owners = allocated_at(&part.owners, options)?;
        Some(match part.is_of_tensors() {
            true => {
                let most = options.units.show(self.tensors_in_change);
                format!("{}: up to {most} are CPU tensors, {owners}", part.what)
            }
            false => format!("{}: {owners}", part.what),
        })
    }

    /// Prints the memory of `process`.
    fn print(&self, printer: &mut Printer, process: &str, memory: &HostMemory, options: &Options) {
        let show = |bytes: i64| options.units.show(bytes).to_string();
        let phase = memory.symbols.or_dash(self.when.phase);
        printer.line([
            format!(
                "{process}, at {}, step {}, {phase}: ",
                duration(self.when.ts_ns),
                step_or_dash(self.when.step)
            )
            .into(),
            Cell::new(show(self.pss), Style::Strong),
            format!(" of host memory are the process's share (PSS), {} resident (RSS)", show(self.rss))
                .into(),
        ]);
        let mut table = Table::new(&[
            ("bytes", Side::Right),
            ("share", Side::Right),
            ("", Side::Left),
            ("resident", Side::Right),
            ("held by", Side::Left),
            ("advice", Side::Left),
        ]);
        for part in &self.parts {
            table.row([
                Cell::new(show(part.pss), Style::Strong),
                percent(share(part.pss, self.pss)).into(),
                bar(share(part.pss, self.pss), 12).into(),
                show(part.rss).into(),
                part.what.as_str().into(),
                Cell::new(part.advice, Style::Faint),
            ]);
        }
        printer.table(&table);
        for sentence in self.parts.iter().filter_map(|part| self.owners_of(part, options)) {
            printer.plain(sentence);
        }
        printer.gap();
        if self.full.total.swap > 0 {
            printer.plain(format!("in swap: {}", show(self.full.total.swap)));
        }
        if let Some(children) = self.children.filter(|children| children.processes > 0) {
            let amount = match children.pss {
                -1 => format!("{} resident; shared pages count for each process", show(children.rss)),
                pss => format!("{} (PSS), {} resident", show(pss), show(children.rss)),
            };
            printer.plain(format!(
                "{} at {}: {amount}",
                counted(children.processes.cast_unsigned(), "child process"),
                duration(children.when.ts_ns)
            ));
            for child in &children.largest {
                let bytes = if child.pss >= 0 { child.pss } else { child.rss };
                printer.plain(format!("  {} {} (pid {})", show(bytes), child.name, child.pid));
            }
            if children.largest.iter().any(|child| child.name.starts_with(LOADER)) {
                printer.plain(format!("  try: {WORKERS}"));
            }
        }
        if let Some(others) = self.others {
            printer.plain(format!("{}:", others_of(others, self.quick, options)));
            for other in &others.largest {
                printer.plain(format!("  {} {} (pid {})", show(other.rss), other.name, other.pid));
            }
        }
        let Some(quick) = self.quick else { return };
        let (container, machine) = (quick.container, quick.machine);
        if container.current >= 0 {
            let mut text = format!("container: {} in use", show(container.current));
            if container.file >= 0 {
                text += &format!(
                    ", {} of it page cache, which the kernel frees when memory runs short",
                    show(container.file)
                );
            }
            text += &match container.left() {
                Some(left) => format!("; limit {}, {} left", show(container.limit), show(left.max(0))),
                None => "; no limit".to_owned(),
            };
            printer.plain(text);
        } else {
            printer
                .plain("container: unknown (no control group counts this process's memory, or it is hidden)");
        }
        if machine.total >= 0 {
            let known = |bytes: i64| if bytes < 0 { "unknown".to_owned() } else { show(bytes) };
            printer.plain(format!(
                "machine: {} available of {}; free without page cache {}, free swap {}",
                known(machine.available),
                show(machine.total),
                known(machine.free),
                known(machine.swap_free)
            ));
        } else {
            printer.plain("machine: unknown (/proc/meminfo cannot be read)");
        }
    }

    fn json(&self, trace: &TraceFile, memory: &HostMemory) -> Value {
        let rows: Vec<Value> = self
            .parts
            .iter()
            .map(|part| {
                json!({
                    "group": part.group, "held_by": part.what, "pss_bytes": part.pss, "rss_bytes": part.rss,
                    "allocated_at": allocated_json(&part.owners), "advice": part.advice,
                })
            })
            .collect();
        let container = self.quick.map(|quick| quick.container).map(|container| {
            json!({
                "current_bytes": container.current, "limit_bytes": container.limit,
                "page_cache_bytes": container.file, "swap_bytes": container.swap, "kills": container.kills,
            })
        });
        let machine = self.quick.map(|quick| quick.machine).map(|machine| {
            json!({
                "total_bytes": machine.total, "available_bytes": machine.available, "free_bytes": machine.free,
                "swap_free_bytes": machine.swap_free, "kills": machine.kills,
            })
        });
        json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "ts_ns": self.when.ts_ns,
            "step": self.when.step,
            "phase": memory.symbols.or_dash(self.when.phase),
            "pss_bytes": self.pss,
            "rss_bytes": self.rss,
            "swap_bytes": self.full.total.swap,
            "peak_rss_bytes": memory.peak_rss(),
            "full_ts_ns": self.full.when.ts_ns,
            "rows": rows,
            "children": self.children.map(|children| processes_json(children, true)),
            "others": self.others.map(|others| processes_json(others, false)),
            "container": container,
            "machine": machine,
        })
    }
}

/// Describes the sum of other processes: `1.42 GiB in 2 other processes of the container at 5.01 s`.
pub(in crate::reports) fn others_of(
    others: &ProcessesSample,
    quick: Option<&QuickSample>,
    options: &Options,
) -> String {
    let number = counted(others.processes.cast_unsigned(), "other process");
    let is_limited = quick.is_some_and(|quick| quick.container.limit >= 0);
    let scope = if is_limited { "container" } else { "machine" };
    let at = duration(others.when.ts_ns);
    format!("{} in {number} of the {scope} at {at}", options.units.show(others.rss))
}

/// Returns the bytes of each process of a list. `with_shares` is true for the children.
fn processes_json(sample: &ProcessesSample, with_shares: bool) -> Value {
    let bytes = |pss: i64, rss: i64| match with_shares {
        true => json!({ "pss_bytes": pss, "rss_bytes": rss }),
        false => json!({ "held_bytes": rss }),
    };
    let each: Vec<Value> = sample
        .largest
        .iter()
        .map(|process| {
            let mut value = bytes(process.pss, process.rss);
            (value["name"], value["pid"]) = (process.name.as_str().into(), process.pid.into());
            value
        })
        .collect();
    let mut value = bytes(sample.pss, sample.rss);
    value["ts_ns"] = sample.when.ts_ns.into();
    value["processes"] = sample.processes.into();
    value["largest"] = each.into();
    value
}
