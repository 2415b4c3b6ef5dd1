//! The samples of host memory in a trace.

use memtrace_trace::host::parts::CPU_TENSORS;
use memtrace_trace::host::{self, HostValues, TOTAL, left_in_group};
use memtrace_trace::{Api, EventName};

use crate::error::Result;
use crate::options::Options;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, SymbolTable};
use crate::read::together::{RowReader, read_together};
use crate::state::marks;
use crate::state::moment::NamedMoment;
use crate::state::replay::{CPU, HOST, has_current_step};

/// A moment of the program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct When {
    /// The time, in ns since the start of the trace.
    pub ts_ns: i64,
    /// The training step; -1 before the first.
    pub step: i64,
    /// The phase.
    pub phase: Symbol,
    /// The running test, if the pytest plugin names it.
    pub test: Symbol,
}

/// A sample of the memory of the process, its container and the machine, in bytes; -1 if unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuickSample {
    /// The moment.
    pub when: When,
    /// The resident memory (RSS).
    pub rss: i64,
    /// Resident memory by kind: anonymous, mapped from files, and shared.
    pub kinds: [i64; 3],
    /// The memory of the process in swap.
    pub swap: i64,
    /// The container.
    pub container: Container,
    /// The machine.
    pub machine: Machine,
}

/// The name of memory without a file: the heap, tensors and the like.
pub const WITHOUT_FILE: &str = "memory without a file";
/// The names of the [`kinds`](QuickSample::kinds) of resident memory.
pub const KINDS: [&str; 3] = [WITHOUT_FILE, "files", "shared memory"];

impl QuickSample {
    /// Returns the resident bytes that have no file.
    #[must_use]
    pub fn held(&self) -> i64 {
        self.kinds[0].max(0) + self.kinds[2].max(0)
    }
}

/// The memory of a control group, in bytes, and its kills; -1 if unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Container {
    /// The memory that the group uses.
    pub current: i64,
    /// The limit; -1 if there is no limit or it is unknown.
    pub limit: i64,
    /// The page cache in `current`, which the kernel reclaims before it kills a process.
    pub file: i64,
    /// The memory of the group in swap.
    pub swap: i64,
    /// The number of processes in the group that the kernel killed.
    pub kills: i64,
}

/// The memory of a machine, in bytes, and its kills; -1 if unknown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Machine {
    /// The total memory.
    pub total: i64,
    /// Bytes that programs can still allocate.
    pub available: i64,
    /// The unused memory, not including page cache.
    pub free: i64,
    /// The unused swap space.
    pub swap_free: i64,
    /// The number of processes that the kernel killed since the machine booted.
    pub kills: i64,
}

impl Container {
    const UNKNOWN: Container = Container { current: -1, limit: -1, file: -1, swap: -1, kills: -1 };

    /// Returns the number of bytes left before the kernel kills a process, or `None` if there is no limit.
    #[must_use]
    pub fn left(&self) -> Option<i64> {
        (self.limit >= 0).then(|| left_in_group(self.current, self.limit, self.file.max(0)))
    }
}

impl Machine {
    const UNKNOWN: Machine = Machine { total: -1, available: -1, free: -1, swap_free: -1, kills: -1 };
}

/// A part of a process's memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The name of the part, such as `heap`.
    pub name: String,
    /// The proportional share (PSS) of the process.
    pub pss: i64,
    /// The resident memory.
    pub rss: i64,
    /// Bytes that the kernel cannot reload from a file.
    pub dirty: i64,
    /// The memory in swap.
    pub swap: i64,
}

/// A sample of all mappings of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FullSample {
    /// The moment.
    pub when: When,
    /// The sum of the parts.
    pub total: Part,
    /// The parts.
    pub parts: Vec<Part>,
}

impl FullSample {
    /// Returns true if no part is missing. Parts are missing if the process was killed while it wrote the
    /// rows.
    fn is_whole(&self) -> bool {
        self.parts.iter().map(|part| part.rss).sum::<i64>() == self.total.rss
    }
}

/// The memory of a process in a [`ProcessesSample`], in bytes; -1 if unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedProcess {
    /// The name of the process, such as `pt_data_worker`.
    pub name: String,
    /// The process id.
    pub pid: i64,
    /// The proportional share (PSS).
    pub pss: i64,
    /// The resident bytes.
    pub rss: i64,
}

/// A sample of the child processes, or of the other processes that share the memory limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessesSample {
    /// The moment.
    pub when: When,
    /// The number of processes.
    pub processes: i64,
    /// The sum of their shares; -1 if any share is unknown.
    pub pss: i64,
    /// The sum of their resident bytes. Memory that several of them share counts several times.
    pub rss: i64,
    /// Those with the most memory.
    pub largest: Vec<ListedProcess>,
}

impl ProcessesSample {
    /// Returns the memory of all processes in bytes: the sum of their proportional shares or, if the shares
    /// are unknown, the sum of their resident memory.
    #[must_use]
    pub fn bytes(&self) -> i64 {
        if self.pss >= 0 { self.pss } else { self.rss.max(0) }
    }
}

/// The end of a program to which the system refused memory. Sizes are in bytes; -1 if unknown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The moment.
    pub when: When,
    /// The error.
    pub error: String,
    /// The limit of the address space; -1 if there is no limit or it is unknown.
    pub limit: i64,
    /// The size of the address space at that moment.
    pub size: i64,
    /// The largest size of the address space so far.
    pub peak: i64,
}

/// The samples of host memory of a process, in order of time.
#[derive(Clone, Default)]
pub struct HostMemory {
    /// The samples of the process, its container and the machine.
    pub quick: Vec<QuickSample>,
    /// The samples of all mappings of the process.
    full: Vec<FullSample>,
    /// The samples of the process's children.
    pub children: Vec<ProcessesSample>,
    /// The samples of the other processes that share the memory limit with this process. Their resident bytes
    /// are without files and shared memory.
    pub others: Vec<ProcessesSample>,
    /// True if CPU tensors were recorded.
    pub has_tensors: bool,
    /// True if any allocation on the host was recorded.
    pub has_allocations: bool,
    /// The end of the program, if the system refused it memory.
    pub refusal: Option<Refusal>,
    /// The time, step and phase of the last row that shows work of the program. Samples are not work.
    pub last: When,
    /// The time of the last OOM on a device.
    oom_ns: Option<i64>,
    /// The symbol table of the rows, with the names of the phases.
    pub symbols: SymbolTable,
}

/// The symbols of the rows must be those that [`HostMemory::new`] got.
impl RowReader for HostMemory {
    fn wanted(&self) -> Wanted {
        Wanted::all_events(Columns::of(&["seq", "ts_ns", "step", "phase"]))
            .plus(EventName::Sample, SAMPLE)
            .plus(EventName::HostAlloc, Columns::of(&["device"]))
            .plus(EventName::Mark, marks::TEST_COLUMNS)
    }

    fn feed(&mut self, row: &Record, _: &SymbolTable) {
        HostMemory::feed(self, row);
    }
}

/// The columns of a `sample` row that [`HostMemory::feed`] needs.
pub const SAMPLE: Columns = Columns::of(&["ts_ns", "device", "api", "name"]);

/// Adds a row to its list, or begins a list. The values are the proportional and the resident bytes, the process
/// id and the number of processes.
fn list_process(list: &mut Vec<ProcessesSample>, when: When, what: &str, values: [i64; 4]) {
    let [pss, rss, pid, processes] = values;
    if what == TOTAL {
        list.push(ProcessesSample { when, processes, pss, rss, largest: Vec::new() });
    } else if let Some(last) = list.last_mut() {
        last.largest.push(ListedProcess { name: what.to_owned(), pid, pss, rss });
    }
}

impl HostMemory {
    /// Reads the samples of a trace.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub fn read(trace: &TraceFile, options: &Options) -> Result<HostMemory> {
        let symbols = SymbolTable::default();
        let mut memory = HostMemory::new(&symbols);
        read_together(trace, options, &symbols, &mut [&mut memory])?;
        Ok(memory)
    }

    /// Creates an empty `HostMemory`. `symbols` is the symbol table of the rows that [`Self::feed`] will get.
    #[must_use]
    pub fn new(symbols: &SymbolTable) -> HostMemory {
        let last = When { step: -1, ..When::default() };
        HostMemory { symbols: symbols.clone(), last, ..HostMemory::default() }
    }

    /// Adds the next row.
    pub fn feed(&mut self, row: &Record) {
        match row.event {
            EventName::Sample if row.device == HOST => {
                let text = self.symbols.get(row.name);
                if let Some(source) = Api::parse(&self.symbols.get(row.api)) {
                    self.sample(source, &text, row.ts_ns);
                }
            }
            EventName::HostAlloc => {
                self.has_allocations = true;
                self.has_tensors |= row.device == CPU;
            }
            EventName::Oom => self.oom_ns = Some(row.ts_ns),
            EventName::Mark => {
                self.last.test = marks::running_test(row, &self.symbols).unwrap_or(self.last.test);
            }
            _ => {}
        }
        if has_current_step(row.event) && row.event != EventName::End {
            let ts_ns = self.last.ts_ns.max(row.ts_ns);
            self.last = When { ts_ns, step: row.step, phase: row.phase, ..self.last };
        }
    }

    fn sample(&mut self, source: Api, text: &str, ts_ns: i64) {
        let when = When { ts_ns, ..self.last };
        let (values, what) = host::parse(source, text);
        let known: [i64; host::VALUES] = HostValues::map(values, |value| value.unwrap_or(-1));
        let [first, second, third, fourth, fifth] = known;
        match source {
            Api::ProcStatus => self.quick.push(QuickSample {
                when,
                rss: first,
                kinds: [second, third, fourth],
                swap: fifth,
                container: Container::UNKNOWN,
                machine: Machine::UNKNOWN,
            }),
            Api::Cgroup => {
                if let Some(last) = self.quick.last_mut() {
                    last.container =
                        Container { current: first, limit: second, file: third, swap: fourth, kills: fifth };
                }
            }
            Api::Meminfo => {
                if let Some(last) = self.quick.last_mut() {
                    last.machine = Machine {
                        total: first,
                        available: second,
                        free: third,
                        swap_free: fourth,
                        kills: fifth,
                    };
                }
            }
            Api::Smaps => {
                let [pss, rss, dirty, swap] = [first, second, third, fourth].map(|bytes| bytes.max(0));
                // In older traces, CPU tensors have the device of pinned memory.
                self.has_tensors |= what.starts_with(CPU_TENSORS);
                let part = Part { name: what.to_owned(), pss, rss, dirty, swap };
                match self.full.last_mut() {
                    Some(last) if what != TOTAL => last.parts.push(part),
                    _ if what == TOTAL => {
                        self.full.push(FullSample { when, total: part, parts: Vec::new() });
                    }
                    _ => {}
                }
            }
            Api::Refused => {
                self.refusal =
                    Some(Refusal { when, error: what.to_owned(), limit: first, size: second, peak: third });
            }
            Api::Child => list_process(&mut self.children, when, what, [first, second, third, fourth]),
            Api::OtherProcess => list_process(&mut self.others, when, what, [-1, first, second, third]),
            _ => {}
        }
    }

    /// Returns the quick sample at a moment, or `None` if there is no sample or no such moment.
    ///
    /// For a peak of any metric, this is the sample with the highest resident memory. For a mark, the result
    /// is always `None`: pass the time of the mark instead (`NamedMoment::without_mark`).
    #[must_use]
    pub fn quick_at(&self, at: &NamedMoment) -> Option<&QuickSample> {
        let before = |ns: i64| {
            let next = self.quick.partition_point(|sample| sample.when.ts_ns <= ns);
            self.quick.get(next.saturating_sub(1))
        };
        match at {
            // `max_by_key` returns the last of several equal peaks, so reverse the order to get the first.
            NamedMoment::Peak(_) => self.quick.iter().rev().max_by_key(|sample| sample.rss),
            NamedMoment::End | NamedMoment::Exit => self.quick.last(),
            NamedMoment::Oom => before(self.oom_ns?),
            NamedMoment::Time(ns) => before(*ns),
            NamedMoment::Step(step) => self.quick.iter().rfind(|sample| sample.when.step <= *step),
            NamedMoment::Mark(_) => None,
        }
    }

    /// Returns the full samples that miss no part.
    pub fn whole(&self) -> impl DoubleEndedIterator<Item = &FullSample> {
        self.full.iter().filter(|full| full.is_whole())
    }

    /// Returns the full sample that was taken with `quick`, directly after it. Without such a
    /// sample, returns the full sample that is nearest in time.
    #[must_use]
    pub fn full_with(&self, quick: &QuickSample) -> Option<&FullSample> {
        let is_own = |full: &&FullSample| self.quick_with(full).is_some_and(|with| with.when == quick.when);
        let nearest = || self.whole().min_by_key(|full| (full.when.ts_ns - quick.when.ts_ns).abs());
        self.whole().find(is_own).or_else(nearest)
    }

    /// Returns the last moment in the trace: the last work of the program, or the time of a later sample.
    #[must_use]
    pub fn end(&self) -> When {
        let sampled = self.quick.last().map_or(0, |sample| sample.when.ts_ns);
        When { ts_ns: self.last.ts_ns.max(sampled), ..self.last }
    }

    /// Returns the quick sample that was taken with `full`, directly before it.
    #[must_use]
    pub fn quick_with(&self, full: &FullSample) -> Option<&QuickSample> {
        let next = self.quick.partition_point(|sample| sample.when.ts_ns <= full.when.ts_ns);
        self.quick.get(next.saturating_sub(1))
    }

    /// Returns the quick sample that is nearest to a time, and the earlier one of two at the same distance.
    #[must_use]
    pub fn quick_near(&self, ts_ns: i64) -> Option<&QuickSample> {
        // Samples are in order of time: the nearest is the last one before the time, or the first one after it.
        let next = self.quick.partition_point(|sample| sample.when.ts_ns < ts_ns);
        let around = self.quick.iter().skip(next.saturating_sub(1)).take(2);
        around.min_by_key(|sample| (sample.when.ts_ns - ts_ns).abs())
    }

    /// Returns the sample of the children that is nearest to a time. If that sample has no shares, prefers
    /// the nearest sample that has shares, the same number of children, and about the same resident memory.
    #[must_use]
    pub fn children_near(&self, ts_ns: i64) -> Option<&ProcessesSample> {
        let distance = |sample: &&ProcessesSample| (sample.when.ts_ns - ts_ns).abs();
        let nearest = self.children.iter().min_by_key(distance)?;
        let is_same = |sample: &&ProcessesSample| {
            let has_changed = 8 * (sample.rss - nearest.rss).abs() > nearest.rss;
            sample.pss >= 0 && sample.processes == nearest.processes && !has_changed
        };
        self.children.iter().filter(is_same).min_by_key(distance).or(Some(nearest))
    }

    /// Returns the last sample of the other processes at or before a time, if any process is in it.
    #[must_use]
    pub fn others_at(&self, ts_ns: i64) -> Option<&ProcessesSample> {
        self.others.iter().rfind(|sample| sample.when.ts_ns <= ts_ns).filter(|sample| sample.processes > 0)
    }

    /// Returns the samples of the children that have shares. If no sample with at least one child has shares,
    /// returns all samples. A sample without children always has the share 0, so it does not show whether
    /// shares are recorded.
    pub fn children_with_shares(&self) -> impl Iterator<Item = &ProcessesSample> {
        let is_known = self.children.iter().any(|sample| sample.pss >= 0 && sample.processes > 0);
        self.children.iter().filter(move |sample| !is_known || sample.pss >= 0)
    }

    /// Returns the highest sum of the resident memory and the memory of the child processes at the same time,
    /// in bytes, or -1 without a sample. Children whose process id is in `traced` do not count, because they
    /// have their own traces.
    #[must_use]
    pub fn peak_with_children(&self, traced: &[i64]) -> i64 {
        let with_children = self.children_with_shares().filter_map(|children| {
            let bytes = children.bytes();
            let own = children.largest.iter().filter(|child| traced.contains(&child.pid));
            let own: i64 =
                own.map(|child| if children.pss >= 0 { child.pss } else { child.rss }.max(0)).sum();
            Some(self.quick_near(children.when.ts_ns)?.rss + (bytes - own).max(0))
        });
        with_children.max().unwrap_or(-1).max(self.peak_rss())
    }

    /// Returns the highest resident memory, or -1 without a sample.
    #[must_use]
    pub fn peak_rss(&self) -> i64 {
        let full = self.whole().map(|full| full.total.rss);
        self.quick.iter().map(|sample| sample.rss).chain(full).max().unwrap_or(-1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(rows: &[(Api, &str, i64)]) -> HostMemory {
        let mut memory = HostMemory::default();
        for (source, text, ts_ns) in rows {
            memory.sample(*source, text, *ts_ns);
        }
        memory
    }

    #[test]
    fn host_samples_become_moments_and_a_cut_list_of_parts_is_left_out() {
        let memory = memory(&[
            (Api::Cgroup, "current=5", 1),
            (Api::ProcStatus, "rss=100 anon=60 file=40 shmem=0 swap=0", 10),
            (Api::Cgroup, "current=500 limit=600 file=100 kills=2", 11),
            (Api::Smaps, "pss=90 rss=100 dirty=60 swap=0 what=(total)", 12),
            (Api::Smaps, "pss=90 rss=100 dirty=60 swap=0 what=heap", 12),
            (Api::Child, "rss=7 processes=1 what=(total)", 13),
            (Api::Child, "rss=7 pid=3 processes=1 what=pt_data_worker", 13),
            (Api::ProcStatus, "rss=300 anon=260", 20),
            (Api::Smaps, "pss=290 rss=300 dirty=60 swap=0 what=(total)", 21),
            (Api::Smaps, "pss=90 rss=100 dirty=60 swap=0 what=heap", 21),
            (Api::Smaps, "pss=9 rss=10 dirty=6 swap=0 what=(total)", 30),
        ]);
        assert_eq!(memory.quick.len(), 2);
        let [first, second] = &memory.quick[..] else { panic!() };
        assert_eq!((first.container.left(), second.container.left()), (Some(200), None));
        assert_eq!(memory.quick_at(&NamedMoment::End), Some(second));
        assert_eq!(memory.quick_at(&NamedMoment::Time(15)), Some(first));
        assert_eq!(memory.quick_at(&NamedMoment::Time(0)), Some(first));
        assert_eq!(memory.quick_at(&NamedMoment::Oom), None);
        // The second full sample lacks a part, and the third has only its total: both are ignored.
        assert_eq!(memory.full_with(second).map(|full| full.when.ts_ns), Some(12));
        assert_eq!(memory.full[0].parts[0].name, "heap");
        assert_eq!((memory.children[0].processes, memory.children[0].pss), (1, -1));
        assert_eq!(memory.children[0].largest[0].name, "pt_data_worker");
        // The child's 7 bytes are added to the 100 bytes of the process, unless the child has its own trace.
        assert_eq!((memory.children[0].rss, memory.peak_with_children(&[])), (7, 300));
        let early = HostMemory { quick: vec![*first], full: Vec::new(), ..memory.clone() };
        assert_eq!((early.peak_with_children(&[]), early.peak_with_children(&[3])), (107, 100));
        assert_eq!(HostMemory::default().peak_rss(), -1);
    }

    #[test]
    fn host_memory_of_children_is_not_that_of_a_moment_without_them() {
        let memory = memory(&[
            (Api::ProcStatus, "rss=100", 9),
            (Api::Child, "pss=0 rss=0 processes=0 what=(total)", 10),
            (Api::Child, "rss=70 processes=4 what=(total)", 20),
            (Api::Child, "pss=50 rss=70 processes=4 what=(total)", 30),
            (Api::Child, "rss=72 processes=4 what=(total)", 40),
            (Api::Child, "pss=0 rss=0 processes=0 what=(total)", 41),
            (Api::Child, "rss=20 processes=1 what=(total)", 60),
        ]);
        let near = |ts_ns| memory.children_near(ts_ns).map(|sample| (sample.when.ts_ns, sample.bytes()));
        assert_eq!([near(12), near(20), near(40)], [Some((10, 0)), Some((30, 50)), Some((30, 50))]);
        // At 60, one child has no share, and no other sample has exactly one child: its resident bytes count.
        assert_eq!([near(45), near(99)], [Some((41, 0)), Some((60, 20))]);
        assert_eq!(memory.peak_with_children(&[]), 150);
        // No sample with children has shares: the resident bytes of the children count.
        let unknown = memory.children.iter().filter(|sample| sample.pss <= 0).cloned().collect();
        let memory = HostMemory { children: unknown, ..memory };
        assert_eq!(
            (memory.children_near(25).map(ProcessesSample::bytes), memory.peak_with_children(&[])),
            (Some(70), 172)
        );
    }

    #[test]
    fn the_host_sample_nearest_to_a_time_is_the_earlier_of_two_at_the_same_distance() {
        let memory = memory(&[10, 20, 40].map(|ts_ns| (Api::ProcStatus, "rss=1", ts_ns)));
        let near = |ts_ns| memory.quick_near(ts_ns).map(|sample| sample.when.ts_ns);
        let nearest = [0, 10, 15, 16, 20, 30, 31, 40, i64::MAX].map(|ts_ns| near(ts_ns).unwrap());
        assert_eq!(nearest, [10, 10, 10, 20, 20, 20, 40, 40, 40]);
        assert_eq!(HostMemory::default().quick_near(5), None);
    }

    #[test]
    fn a_quick_sample_has_the_full_one_that_follows_it_though_an_earlier_one_is_nearer() {
        let memory = memory(&[
            (Api::ProcStatus, "rss=90 anon=50 file=40 shmem=0", 10),
            (Api::Smaps, "pss=90 rss=90 dirty=50 swap=0 what=(total)", 55),
            (Api::Smaps, "pss=90 rss=90 dirty=50 swap=0 what=heap", 55),
            (Api::ProcStatus, "rss=100 anon=60 file=40 shmem=0", 60),
            (Api::Smaps, "pss=97 rss=97 dirty=57 swap=0 what=(total)", 90),
            (Api::Smaps, "pss=97 rss=97 dirty=57 swap=0 what=heap", 90),
            (Api::ProcStatus, "rss=80 anon=40 file=40 shmem=0", 95),
        ]);
        let of = |quick: usize| memory.full_with(&memory.quick[quick]).map(|full| full.when.ts_ns);
        assert_eq!([of(0), of(1), of(2)], [Some(55), Some(90), Some(90)]);
    }
}
