//! `memtrace ledger --host`: the memory of the process on the host, by owner, as the kernel counts it.

use serde_json::{Value, json};

use super::super::host_owners::HostOwners;
use super::super::killed::{Killed, WORKERS};
use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, counted, duration, percent, share, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::reports::report::{Answer, next};
use crate::state::host_memory::{FullSample, HostMemory, ProcessesSample, QuickSample, When};
use crate::state::moment::NamedMoment;

/// The prefix of the names of the parts that are CPU tensors.
pub(in crate::reports) const CPU_TENSORS: &str = "CPU tensors";
/// The prefix of the names of the parts that are pinned memory.
pub(in crate::reports) const PINNED: &str = "pinned";
/// The name of a DataLoader worker, which torch sets.
const LOADER: &str = "pt_data_worker";
/// The name of the part that malloc allocates with `brk`.
const HEAP: &str = "heap";
/// Advice about the heap if CPU tensors have no rows of their own. The heap may then contain tensors: after
/// glibc has freed an mmapped block, it allocates blocks of up to that size (at most 32 MiB) from the heap.
const HEAP_WITH_TENSORS: &str = "CPU tensors of up to 32 MiB, objects of Python and C, and what glibc keeps: MEMTRACE_HOST_TENSORS=1 separates them";
/// The name of the part that contains all remaining memory.
const ANONYMOUS: &str = "anonymous";
/// The group of the changes between the full sample and the wanted moment.
pub(in crate::reports) const CHANGE: &str = "change";
/// Advice about the remaining memory if CPU tensors have rows of their own.
const NO_TENSORS: &str = "not CPU tensors, which have their own rows: NumPy arrays, Python's objects, \
                          buffers of libraries (memray names their lines)";

/// For each prefix of a part's name: its group, and the advice.
const PARTS: &[(&str, &str, &str)] = &[
    (
        "CPU tensors parameter",
        "tensors",
        "weights on the host: delete a model that can be loaded again instead of offloading it",
    ),
    (
        "CPU tensors optimizer_state",
        "tensors",
        "the optimizer's state on the host: adapters (LoRA) or an 8-bit optimizer need less",
    ),
    (CPU_TENSORS, "tensors", "models offloaded with .cpu(), copies of a state, kept batches"),
    ("pinned: rounding", "pinned", PINNED_ROUNDING),
    ("pinned: cached", "pinned", "torch keeps it for later requests: torch._C._host_emptyCache() returns it"),
    (PINNED, "pinned", "buffers that the GPU reads directly (pin_memory, offloading): fewer or smaller ones"),
    (
        "CUDA managed",
        "managed",
        "cudaMallocManaged, whose pages move between host and GPU: the state of a paged optimizer, for example",
    ),
    ("shared", "shared", "batches of DataLoader workers: fewer workers, a smaller prefetch_factor"),
    ("file", "file", "page cache: the kernel drops clean pages when memory runs short"),
    ("libraries", "libraries", "code of torch and CUDA: import less"),
    (
        "malloc arenas",
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
    ("stacks", "stacks", "fewer threads: OMP_NUM_THREADS"),
    ("CUDA driver", "driver", ""),
    (
        "simulated GPU",
        "simulated",
        "values that the program copied to the simulated GPU; absent with a real GPU",
    ),
    ("memtrace", "memtrace", "the buffer of events; MEMTRACE_BUFFER sets its size"),
];

/// Advice about the rounding of pinned memory.
const PINNED_ROUNDING: &str = "torch rounds each request up to a power of two: PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1 if it is not refused (torch 2.15 has it, 2.11 not), or pin one buffer of such a size and slice it";

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
    let footer = Footer::new(input);
    let mut json = Vec::new();
    let mut has_quick = false;
    for trace in &input.traces {
        let memory = HostMemory::read(trace, options)?;
        let moment = at.without_mark(trace, options)?;
        let Some(mut state) = moment.and_then(|moment| HostState::new(&memory, &moment)) else {
            has_quick |= !memory.quick.is_empty();
            continue;
        };
        state.name_owners(trace, options)?;
        if json.is_empty() {
            heading(&mut printer, input, &trace.meta);
        }
        printer.gap();
        state.print(&mut printer, trace, &memory, options);
        let killed = Killed::of(trace, &memory, &input.traces, options)?;
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
    Ok(Answer { body: printer, json: json!({ "host": json }), footer, next: hints, ..Answer::default() })
}

/// A part of the memory of a process.
pub(in crate::reports) struct HostPart {
    pub(in crate::reports) group: &'static str,
    pub(in crate::reports) what: String,
    /// The proportional bytes (PSS) of the part, and its resident bytes.
    pub(in crate::reports) pss: i64,
    pub(in crate::reports) rss: i64,
    /// The code that allocated the part, if this is known.
    pub(in crate::reports) owners: Option<String>,
    pub(in crate::reports) advice: &'static str,
}

/// The memory of one process on the host, by owner.
pub(in crate::reports) struct HostState<'a> {
    pub(in crate::reports) when: When,
    /// The proportional set size (PSS) of the process, in bytes. `rss` is its resident set size.
    pub(in crate::reports) pss: i64,
    pub(in crate::reports) rss: i64,
    pub(in crate::reports) parts: Vec<HostPart>,
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

    /// Names the code that allocated each part, if the trace shows it. The trace has rows of tensors at any time.
    /// So the memory that tensors have got since the full sample moves from the change of anonymous memory to
    /// their parts.
    pub(in crate::reports) fn name_owners(&mut self, trace: &TraceFile, options: &Options) -> Result<()> {
        let mut owners = HostOwners::read(trace, self.full.when.ts_ns, options)?;
        let is_change = |part: &HostPart| part.group == CHANGE && part.what.starts_with(ANONYMOUS);
        let change = self.parts.iter().position(is_change).filter(|&at| self.parts[at].rss > 0);
        if let Some(change) = change.filter(|_| self.full.when.ts_ns < self.when.ts_ns) {
            let now = HostOwners::read(trace, self.when.ts_ns, options)?;
            for (name, bytes) in now.since(&owners).sums() {
                let moved = bytes.min(self.parts[change].rss);
                self.parts[change].pss -= moved;
                self.parts[change].rss -= moved;
                match self.parts.iter_mut().find(|part| part.what == name) {
                    Some(part) => (part.pss, part.rss) = (part.pss + moved, part.rss + moved),
                    None => {
                        let (group, advice) = part_about(name, true);
                        self.part(group, name.to_owned(), moved, moved, advice);
                    }
                }
            }
            self.parts.retain(|part| part.pss != 0 || part.rss != 0);
            self.parts.sort_by_key(|part| (part.group == CHANGE, -part.pss));
            owners = now;
        }
        for part in &mut self.parts {
            part.owners = owners.of(&part.what, options);
        }
        Ok(())
    }

    fn part(&mut self, group: &'static str, what: String, pss: i64, rss: i64, advice: &'static str) {
        self.parts.push(HostPart { group, what, pss, rss, owners: None, advice });
    }

    fn print(&self, printer: &mut Printer, trace: &TraceFile, memory: &HostMemory, options: &Options) {
        let show = |bytes: i64| options.units.show(bytes).to_string();
        let phase = memory.symbols.or_dash(self.when.phase);
        printer.line([
            format!(
                "rank {}, at {}, step {}, {phase}: ",
                trace.meta.rank,
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
        for part in &self.parts {
            if let Some(owners) = &part.owners {
                printer.plain(format!("{}: allocated at {owners}", part.what));
            }
        }
        printer.gap();
        if self.full.total.swap > 0 {
            printer.plain(format!("in swap: {}", show(self.full.total.swap)));
        }
        if let Some(children) = self.children.filter(|children| children.processes > 0) {
            print_processes(printer, children, "child process", options);
            if children.largest.iter().any(|child| child.name.starts_with(LOADER)) {
                printer.plain(format!("  try: {WORKERS}"));
            }
        }
        if let Some(others) = self.others.filter(|others| others.processes > 0) {
            print_processes(printer, others, "other process", options);
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
                    "allocated_at": part.owners, "advice": part.advice,
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
            "children": self.children.map(processes_json),
            "others": self.others.map(processes_json),
            "container": container,
            "machine": machine,
        })
    }
}

/// Prints a list of processes with their memory. `noun` is the name of one of them.
fn print_processes(printer: &mut Printer, sample: &ProcessesSample, noun: &str, options: &Options) {
    let show = |bytes: i64| options.units.show(bytes).to_string();
    let amount = match sample.pss {
        -1 => format!("{} resident; shared pages count for each process", show(sample.rss)),
        pss => format!("{} (PSS), {} resident", show(pss), show(sample.rss)),
    };
    printer.plain(format!(
        "{} at {}: {amount}",
        counted(sample.processes.cast_unsigned(), noun),
        duration(sample.when.ts_ns)
    ));
    for process in &sample.largest {
        let bytes = if process.pss >= 0 { process.pss } else { process.rss };
        printer.plain(format!("  {} {} (pid {})", show(bytes), process.name, process.pid));
    }
}

fn processes_json(sample: &ProcessesSample) -> Value {
    let each: Vec<Value> = sample
        .largest
        .iter()
        .map(|process| {
            json!({
                "name": process.name, "pid": process.pid, "pss_bytes": process.pss, "rss_bytes": process.rss,
            })
        })
        .collect();
    json!({
        "ts_ns": sample.when.ts_ns, "processes": sample.processes, "pss_bytes": sample.pss,
        "rss_bytes": sample.rss, "largest": each,
    })
}
