//! `memtrace ledger --host`: the memory of the process on the host, by owner, as the kernel counts it.

use serde_json::{Value, json};

use super::super::killed::{Killed, WORKERS};
use super::LedgerLine;
use crate::error::Result;
use crate::options::Options;
use crate::read::input::Input;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, counted, duration, percent, share, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::reports::report::{Answer, next};
use crate::state::host_memory::{ChildrenSample, FullSample, HostMemory, QuickSample, When};
use crate::state::moment::NamedMoment;

/// The prefix of the names of the parts that are CPU tensors.
pub(in crate::reports) const CPU_TENSORS: &str = "CPU tensors";
/// The name of a DataLoader worker, which torch sets.
const LOADER: &str = "pt_data_worker";
/// The name of the part that malloc allocates with `brk`.
const HEAP: &str = "heap";
/// Advice about the heap if CPU tensors have no rows of their own. The heap may then contain tensors: after
/// glibc has freed an mmapped block, it allocates blocks of up to that size (at most 32 MiB) from the heap.
const HEAP_WITH_TENSORS: &str = "CPU tensors of up to 32 MiB, objects of Python and C, and what glibc keeps: MEMTRACE_HOST_TENSORS=1 separates them";
/// The name of the part that contains all remaining memory.
const ANONYMOUS: &str = "anonymous";
/// Advice about the remaining memory if CPU tensors have rows of their own.
const NO_TENSORS: &str = "not CPU tensors, which have their own rows: NumPy arrays, Python's objects, \
                          buffers of libraries (memray names their lines)";

/// For each prefix of a part's name: its group, and the advice.
const PARTS: &[(&str, &str, &str)] = &[
    (
        "CPU tensors parameter",
        "tensors",
        "weights on the host: delete a model that can be loaded again instead of offloading it; \
         memtrace peak --device cpu --by module names them",
    ),
    (
        "CPU tensors optimizer_state",
        "tensors",
        "the optimizer's state on the host: adapters (LoRA) or an 8-bit optimizer need less; \
         memtrace peak --device cpu --by module names it",
    ),
    (
        CPU_TENSORS,
        "tensors",
        "models offloaded with .cpu(), copies of a state, kept batches: memtrace peak --device cpu --by op, or \
         --by module, names them",
    ),
    ("pinned: rounding", "pinned", PINNED_ROUNDING),
    ("pinned: cached", "pinned", "torch keeps it for later requests: torch._C._host_emptyCache() returns it"),
    ("pinned", "pinned", "memtrace peak --device -1 --by op shows who asked for it"),
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

/// Returns the group of a part, and the advice about it. `has_tensors` is true if the trace lists CPU tensors
/// as parts.
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
        let Some(state) = moment.and_then(|moment| HostState::new(&memory, &moment)) else {
            has_quick |= !memory.quick.is_empty();
            continue;
        };
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

/// The memory of one process on the host, by owner.
pub(in crate::reports) struct HostState<'a> {
    pub(in crate::reports) when: When,
    /// The proportional set size (PSS) of the process, in bytes. `rss` is its resident set size.
    pub(in crate::reports) pss: i64,
    pub(in crate::reports) rss: i64,
    pub(in crate::reports) lines: Vec<LedgerLine>,
    /// Resident bytes of each line.
    resident: Vec<i64>,
    full: &'a FullSample,
    quick: Option<&'a QuickSample>,
    children: Option<&'a ChildrenSample>,
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
            lines: Vec::new(),
            resident: Vec::new(),
            full,
            quick,
            children: memory.children_near(when.ts_ns),
        };
        let mut parts: Vec<_> = full.parts.iter().collect();
        parts.sort_by(|a, b| (-a.pss, &a.name).cmp(&(-b.pss, &b.name)));
        let has_tensors = parts.iter().any(|part| part.name.starts_with(CPU_TENSORS));
        for part in parts {
            let (group, advice) = part_about(&part.name, has_tensors);
            state.line(group, part.name.clone(), part.pss, part.rss, advice);
        }
        if full.when != when {
            // The full sample is older or newer than this moment. The difference between the quick samples at
            // both times is added as a separate line.
            let then = memory.quick_with(full)?;
            let now = quick?;
            let names = ["anonymous", "files", "shared memory"];
            for (name, (now, then)) in names.iter().zip(now.kinds.iter().zip(then.kinds)) {
                if *now >= 0 && then >= 0 && *now != then {
                    let what = format!("{name}: change since {}", duration(full.when.ts_ns));
                    state.line(
                        "change",
                        what,
                        now - then,
                        now - then,
                        "no full sample was taken at this moment",
                    );
                }
            }
        }
        state.pss = state.lines.iter().map(|line| line.bytes).sum();
        state.rss = state.resident.iter().sum();
        Some(state)
    }

    fn line(&mut self, group: &'static str, what: String, pss: i64, rss: i64, advice: &str) {
        self.lines.push(LedgerLine { group, what, bytes: pss, blocks: 0, advice: advice.to_owned() });
        self.resident.push(rss);
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
        for (line, resident) in self.lines.iter().zip(&self.resident) {
            table.row([
                Cell::new(show(line.bytes), Style::Strong),
                percent(share(line.bytes, self.pss)).into(),
                bar(share(line.bytes, self.pss), 12).into(),
                show(*resident).into(),
                line.what.as_str().into(),
                Cell::new(line.advice.as_str(), Style::Faint),
            ]);
        }
        printer.table(&table);
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
            .lines
            .iter()
            .zip(&self.resident)
            .map(|(line, rss)| {
                json!({
                    "group": line.group, "held_by": line.what, "pss_bytes": line.bytes, "rss_bytes": rss,
                    "advice": line.advice,
                })
            })
            .collect();
        let children = self.children.map(|children| {
            let each: Vec<Value> = children
                .largest
                .iter()
                .map(|child| json!({ "name": child.name, "pid": child.pid, "pss_bytes": child.pss, "rss_bytes": child.rss }))
                .collect();
            json!({
                "ts_ns": children.when.ts_ns, "processes": children.processes, "pss_bytes": children.pss,
                "rss_bytes": children.rss, "largest": each,
            })
        });
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
            "children": children,
            "container": container,
            "machine": machine,
        })
    }
}
