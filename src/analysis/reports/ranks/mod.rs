//! `memtrace ranks`: a line for each rank, the skew, and the first module where ranks differ.

mod owners;

use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use memtrace_trace::{Category, EventName};

use super::device_users::other_processes::{self, OtherProcess};
use super::device_users::{self, DeviceUse, RunUsers};
use super::report::{Answer, Report, next};
use crate::error::Result;
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::read::symbols::{NO_MODULE, NO_PHASE, Symbol, SymbolTable};
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, count, percent, share};
use crate::render::numbers::{counted, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::{parent, rank_or_name};
use crate::state::host_memory::{HostMemory, SAMPLE};
use crate::state::replay::{self, Metric};
use crate::state::replay_trace::{Replayed, replay_rows_knowing, used_name};
use owners::{OwnerDifference, PeakOwners};

/// `memtrace ranks`.
pub(super) struct Ranks;

impl Report for Ranks {
    fn name(&self) -> &'static str {
        "ranks"
    }

    fn about(&self) -> &'static str {
        "Compare all ranks: a table, the skew, and the first module where they differ"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[("ranks out", "every rank's peak, and where they differ")]
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut ranks = Vec::<Rank>::new();
        // The first process, and the number of processes without those that another one started, such as workers.
        let (mut first, mut compared) = (None::<RankWork>, 0);
        let mut part = None;
        let mut all = RunUsers::default();
        let mut owners: Vec<PeakOwners> = Vec::new();
        // True if an allocation was compared, and if one was not, because it was recorded without detail.
        let (mut is_compared, mut is_partial) = (false, false);
        let traced: Vec<i64> = input.traces.iter().filter_map(|trace| trace.pid().parse().ok()).collect();
        for trace in &input.traces {
            let mut work = Work::default();
            let mut device_use = DeviceUse::new(options);
            let mut host: Option<HostMemory> = None;
            let replayed = replay_rows_knowing(
                trace,
                replay::COLUMNS.and(DeviceUse::COLUMNS).plus(EventName::Sample, SAMPLE),
                options,
                Metric::Allocated,
                flow_categories(trace, options)?,
                |row, replay| {
                    host.get_or_insert_with(|| HostMemory::new(&replay.symbols)).feed(row);
                    device_use.feed(row, replay);
                    let is_wanted = options.device.is_none_or(|only| only == row.device);
                    if !is_wanted || !replay.in_window() {
                        return;
                    }
                    match row.event {
                        // Ranks set their peaks in different steps, so without detail they may have the rows
                        // of different steps.
                        EventName::Alloc if row.module == Symbol::WITHOUT_DETAIL => is_partial = true,
                        EventName::Alloc => work.add(row.module, row.phase, row.delta_bytes),
                        EventName::Tag if row.category == Category::Input && row.delta_bytes > 0 => {
                            work.tag_input(row, &replay.symbols);
                        }
                        _ => {}
                    }
                },
            )?;
            footer.add(trace, &replayed, options);
            is_compared |= !work.order.is_empty();
            let mut rank = Rank::new((trace, input), &replayed, options);
            let host = host.unwrap_or_default();
            (rank.host_rss, rank.host) = (host.peak_rss(), host.peak_with_children(&traced));
            if parent(trace, input).is_none() {
                compared += 1;
                let work = RankWork::new((trace, input), &replayed, &work);
                match &first {
                    Some(first) => part = part.or_else(|| first_difference(first, &work)),
                    None => first = Some(work),
                }
                PeakOwners::add(&mut owners, (trace, input), &replayed, options);
            }
            ranks.push(rank);
            device_use.add_to(&mut all, trace, input, &replayed);
        }
        let owners = OwnerDifference::between(&owners);
        device_users::find_homes(&mut all.users);
        let unnamed = device_users::unnamed(&all);
        let RunUsers { users, others } = all;
        let users = device_users::crowded(users);
        let others = other_processes::without_repeats(others);
        if let Some(trace) = input.traces.first() {
            heading(&mut printer, input, &trace.meta);
            printer.gap();
        }
        table(&mut printer, &ranks, options);
        printer.gap();
        let peaks = ranks.iter().map(|rank| rank.allocated);
        let (low, high) = (peaks.clone().min().unwrap_or(0), peaks.max().unwrap_or(0));
        printer.plain(format!(
            "skew: {} between the highest and the lowest peak ({} of the highest)",
            options.units.show(high - low),
            percent(share(high - low, high))
        ));
        let host_peaks = || ranks.iter().map(|rank| rank.host).filter(|bytes| *bytes >= 0);
        let (host_low, host_high) = (host_peaks().min().unwrap_or(0), host_peaks().max().unwrap_or(0));
        if host_peaks().count() > 1 {
            printer.plain(format!(
                "host memory: {} between the highest and the lowest peak ({} of the highest); memtrace ledger --host \
                 shows what holds it",
                options.units.show(host_high - host_low),
                percent(share(host_high - host_low, host_high))
            ));
        }
        match &part {
            Some(part) => part.print(&mut printer, options),
            None if compared > 1 && is_partial => printer.plain(format!(
                "{}; steps without detail (MEMTRACE_DETAIL) have no modules to compare",
                match is_compared {
                    true => "in the detailed steps, every module allocates the same amount on all ranks",
                    false => "the modules cannot be compared",
                }
            )),
            None if compared > 1 => printer.plain("every module allocates the same amount on all ranks"),
            None => printer.plain(
                "this trace has one rank; to compare ranks, name the folder with all traces of the run",
            ),
        }
        if let Some(owners) = &owners {
            owners.print(&mut printer, options);
        }
        if !users.is_empty() {
            printer.gap();
            device_users::print(&users, &mut printer, options);
        }
        other_processes::print(&others, &mut printer, options);
        device_users::print_unnamed(&unnamed, &mut printer, options);
        let json = json!({
            "unnamed_others": device_users::unnamed_json(&unnamed),
            "other_processes": others.iter().map(OtherProcess::json).collect::<Vec<Value>>(),
            "shared_devices": device_users::to_json(&users),
            "ranks": ranks.iter().map(Rank::json).collect::<Vec<Value>>(),
            "skew_bytes": high - low,
            "host_skew_bytes": host_high - host_low,
            "first_difference": part.as_ref().map(Difference::json),
            "owner_difference": owners.as_ref().map(OwnerDifference::json),
        });
        let fullest = ranks.iter().max_by_key(|rank| (rank.allocated, -rank.rank));
        let hints =
            fullest.map(|rank| next("peak", input, &format!("--rank {}", rank.rank))).into_iter().collect();
        Ok(Answer { next: hints, ..Answer::new(printer, json, footer) })
    }
}

/// The number and bytes of the allocations of each module in each phase. `order` has the keys in the order of
/// their first allocation.
#[derive(Default)]
struct Work {
    order: Vec<(Symbol, Symbol)>,
    sums: FxHashMap<(Symbol, Symbol), (u64, i64)>,
}

impl Work {
    fn add(&mut self, module: Symbol, phase: Symbol, bytes: i64) {
        let key = (phase, module);
        let (blocks, sum) = self.sums.entry(key).or_insert_with(|| {
            self.order.push(key);
            (0, 0)
        });
        *blocks += 1;
        *sum += bytes;
    }
}

/// The phase in which a script makes the model. [`LOADER`] is the phase in which it loads a batch.
const INIT: &str = "init";
const LOADER: &str = "dataloader";

impl Work {
    /// Moves a block that was tagged as a batch from the phase [`INIT`] to [`LOADER`]. The first batch is
    /// loaded before the first forward, so its row has the phase `init`.
    fn tag_input(&mut self, row: &Record, symbols: &SymbolTable) {
        if *symbols.get(row.phase) != *INIT {
            return;
        }
        let Some((blocks, sum)) = self.sums.get_mut(&(row.phase, row.module)) else { return };
        *blocks = blocks.saturating_sub(1);
        *sum -= row.delta_bytes;
        self.add(row.module, symbols.intern(LOADER), row.delta_bytes);
    }
}

struct Rank {
    rank: i32,
    /// The rank, or the name of the process if the rank has several.
    shown: String,
    allocated: i64,
    reserved: i64,
    used: i64,
    step: i64,
    ooms: u64,
    retries: u64,
    rows: u64,
    /// The highest resident memory of the process, and together with its children; -1 without a sample.
    host_rss: i64,
    host: i64,
    used_name: &'static str,
}

impl Rank {
    fn new((trace, input): (&TraceFile, &Input), replayed: &Replayed, options: &Options) -> Rank {
        let peak =
            |metric| replayed.fullest(metric, options).map(|device| *device.peak(metric)).unwrap_or_default();
        let counts = &replayed.replay.counts;
        let allocated = peak(Metric::Allocated);
        Rank {
            rank: trace.meta.rank,
            shown: rank_or_name(trace, input).trim_start_matches("rank ").to_owned(),
            allocated: allocated.bytes,
            reserved: peak(Metric::Reserved).bytes,
            used: peak(Metric::Used).bytes,
            step: allocated.owner.step,
            ooms: counts.of(EventName::Oom),
            retries: counts.retries.count(),
            rows: counts.rows,
            host_rss: -1,
            host: -1,
            used_name: used_name([replayed], options),
        }
    }

    fn json(&self) -> Value {
        json!({
            "rank": self.rank,
            "peak_allocated_bytes": self.allocated,
            "peak_reserved_bytes": self.reserved,
            "peak_used_bytes": self.used,
            "peak_step": self.step,
            "host_peak_rss_bytes": self.host_rss,
            "host_peak_bytes": self.host,
            "ooms": self.ooms,
            "rows": self.rows,
        })
    }
}

/// What a rank allocates, for the comparison of ranks.
struct RankWork {
    rank: i32,
    /// `rank 1`, or the name of the process if the rank has several.
    name: String,
    /// Phase, module, blocks and bytes, in the order of the first allocation.
    work: Vec<(String, String, u64, i64)>,
}

impl RankWork {
    fn new((trace, input): (&TraceFile, &Input), replayed: &Replayed, work: &Work) -> RankWork {
        let named = |(phase, module): &(Symbol, Symbol)| {
            let (blocks, bytes) = work.sums[&(*phase, *module)];
            (replayed.symbols.or(*phase, NO_PHASE), replayed.symbols.or(*module, NO_MODULE), blocks, bytes)
        };
        RankWork {
            rank: trace.meta.rank,
            name: rank_or_name(trace, input),
            work: work.order.iter().map(named).collect(),
        }
    }
}

/// The first difference between two ranks.
struct Difference {
    ranks: (i32, i32),
    names: (String, String),
    phase: String,
    module: String,
    blocks: (u64, u64),
    bytes: (i64, i64),
}

/// Returns the first module, in the order of rank `a`, with different allocations on rank `b`. If there is no
/// such module, returns the first module that only rank `b` has.
fn first_difference(a: &RankWork, b: &RankWork) -> Option<Difference> {
    let others: FxHashMap<(&str, &str), (u64, i64)> = b
        .work
        .iter()
        .map(|(phase, module, blocks, bytes)| ((phase.as_str(), module.as_str()), (*blocks, *bytes)))
        .collect();
    let difference = |phase: &str, module: &str, old: (u64, i64), new: (u64, i64)| Difference {
        ranks: (a.rank, b.rank),
        names: (a.name.clone(), b.name.clone()),
        phase: phase.to_owned(),
        module: module.to_owned(),
        blocks: (old.0, new.0),
        bytes: (old.1, new.1),
    };
    let differs = a.work.iter().find_map(|(phase, module, blocks, bytes)| {
        let other = others.get(&(phase.as_str(), module.as_str())).copied().unwrap_or_default();
        (other != (*blocks, *bytes)).then(|| difference(phase, module, (*blocks, *bytes), other))
    });
    differs.or_else(|| {
        let (phase, module, blocks, bytes) =
            b.work.iter().find(|new| !a.work.iter().any(|old| (&old.0, &old.1) == (&new.0, &new.1)))?;
        Some(difference(phase, module, (0, 0), (*blocks, *bytes)))
    })
}

impl Difference {
    fn print(&self, printer: &mut Printer, options: &Options) {
        printer.line([
            "first difference: ".into(),
            Cell::new(self.module.clone(), Style::Strong),
            format!(
                ", {}: {} allocates {} in {}, {} allocates {} in {}",
                self.phase,
                self.names.0,
                options.units.show(self.bytes.0),
                counted(self.blocks.0, "block"),
                self.names.1,
                options.units.show(self.bytes.1),
                counted(self.blocks.1, "block")
            )
            .into(),
        ]);
    }

    fn json(&self) -> Value {
        json!({
            "ranks": [self.ranks.0, self.ranks.1],
            "phase": self.phase,
            "module": self.module,
            "allocated_bytes": [self.bytes.0, self.bytes.1],
            "blocks": [self.blocks.0, self.blocks.1],
        })
    }
}

/// Returns the ranks that a table shows, in their order, and the number of ranks that are left out. The table
/// shows the ranks with the highest `peak`; `--top` sets their number.
pub(super) fn highest<'a, T>(
    ranks: &'a [T],
    options: &Options,
    peak: impl Fn(&T) -> i64,
) -> (Vec<&'a T>, usize) {
    let most = options.top.unwrap_or(MOST_RANKS);
    let mut order: Vec<usize> = (0..ranks.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(peak(&ranks[*at])));
    order.truncate(most);
    order.sort_unstable();
    (order.iter().map(|at| &ranks[*at]).collect(), ranks.len() - order.len())
}

/// The maximum number of ranks that a table shows without `--top`.
pub(super) const MOST_RANKS: usize = 64;

/// Prints how many ranks [`highest`] left out.
pub(super) fn more_ranks(printer: &mut Printer, more: usize) {
    printer.more(more, " with lower peaks");
}

fn table(printer: &mut Printer, ranks: &[Rank], options: &Options) {
    let most = ranks.iter().map(|rank| rank.allocated).max().unwrap_or(0);
    let is_sampled = ranks.iter().all(|rank| rank.used_name == Metric::Used.name());
    let used_name = if is_sampled { Metric::Used.name() } else { Metric::UNSAMPLED };
    let mut table = Table::new(&[
        ("rank", Side::Right),
        ("peak allocated", Side::Right),
        ("", Side::Left),
        ("reserved", Side::Right),
        (used_name, Side::Right),
        ("at step", Side::Right),
        ("host peak", Side::Right),
        ("ooms", Side::Right),
        ("retries", Side::Right),
        ("events", Side::Right),
    ]);
    let (shown, more) = self::highest(ranks, options, |rank| rank.allocated);
    for rank in shown {
        let bytes = |bytes| options.units.show(bytes).to_string();
        table.row([
            rank.shown.as_str().into(),
            Cell::new(bytes(rank.allocated), Style::Strong),
            bar(share(rank.allocated, most), 12).into(),
            bytes(rank.reserved).into(),
            bytes(rank.used).into(),
            step_or_dash(rank.step).into(),
            if rank.host < 0 { "-".into() } else { bytes(rank.host).into() },
            Cell::new(count(rank.ooms), if rank.ooms > 0 { Style::Alarm } else { Style::Plain }),
            count(rank.retries).into(),
            count(rank.rows).into(),
        ]);
    }
    printer.table(&table);
    more_ranks(printer, more);
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;
    use memtrace_trace::meta::Meta;

    use super::*;
    use crate::reports::peak::Peak;
    use crate::testing::TraceBuilder;

    #[test]
    fn processes_of_one_rank_have_names_and_workers_are_not_compared() {
        let folder = std::env::temp_dir().join(format!("memtrace-ranks-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let answers = |ancestors: Vec<u32>| {
            for (pid, ancestors) in [(1, Vec::new()), (2, ancestors)] {
                let argv = vec![format!("{pid}.py")];
                let meta =
                    Meta { world_size: 1, start_unix_ns: pid.into(), argv, ancestors, ..Meta::default() };
                let mut trace = TraceBuilder::of_process(pid, meta);
                let module = if pid == 1 { "A" } else { "B" };
                trace
                    .alloc(i64::from(pid) << 20, Row { module, phase: "forward", step: 0, ..Row::default() });
                std::fs::write(folder.join(format!("a.r0.{pid}.csv")), trace.finish()).unwrap();
            }
            let run = [Input::open(&folder).unwrap()];
            let by_module = Options { values: [("by", "module".to_owned())].into(), ..Options::default() };
            (Ranks.run(&run, &Options::default()).unwrap(), Peak.run(&run, &by_module).unwrap().text())
        };
        let (worker, _) = answers(vec![1]);
        assert!(worker.json["first_difference"].is_null(), "{}", worker.text());
        let (two, peak) = answers(Vec::new());
        std::fs::remove_dir_all(&folder).unwrap();
        let text = two.text();
        let line = text.lines().find(|line| line.starts_with("first difference")).unwrap();
        assert!(line.contains("1.py (pid 1) allocates") && line.contains("2.py (pid 2) allocates"), "{line}");
        assert!(
            peak.contains("2.py (pid 2) has the highest peak of 2; name a file to see another"),
            "{peak}"
        );
    }
}
