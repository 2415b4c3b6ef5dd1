//! `memtrace budget`: checks limits from a file, with an exit status for CI.
//!
//! ```toml
//! [total]               # peaks of the device
//! allocated = "10g"
//! reserved = "12g"
//! used = "14g"
//! [host]                # the peak of the process's resident memory, as sampled
//! rss = "40g"
//! [modules]             # the peak of what a module and its submodules own
//! "GPT.h" = "6g"
//! [categories]          # the peak of a category
//! activation = "4g"
//! [phases]              # the peak of allocated memory while the phase runs
//! backward = "9g"
//! ```
//!
//! A name may be a pattern: `"GPT.h.*" = "1g"` limits each layer separately. If a limit matches no name, the
//! report fails, because a renamed module would otherwise silently disable its limit.
//! `{ limit = "1g", optional = true }` permits a limit without a match.

mod limits;
mod names;

use memtrace_trace::host;
use memtrace_trace::{Api, Category, EventName};
use rustc_hash::{FxHashMap, FxHashSet};
use serde_json::{Value, json};

use super::device_peaks::{DevicePeaks, Place};
use super::report::{Answer, Report, Verdict, next, vouch};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::footer::Footer;
use crate::render::heading::process_heading;
use crate::render::numbers::{counted, percent, share, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::categories::KnownCategories;
use crate::state::group::module_levels;
use crate::state::marks;
use crate::state::replay::{HOST, Metric, Replay, is_gpu};
use crate::state::replay_trace::{Replayed, replay_trace};
use limits::{Limit, LimitSubject, parse};
use names::Names;

/// `memtrace budget`.
pub(super) struct Budget;

/// The maximum number of limits that the error about limits without a match lists.
const MOST_FAULTS: usize = 10;

impl Report for Budget {
    fn name(&self) -> &'static str {
        "budget"
    }

    fn about(&self) -> &'static str {
        "Check limits per module, category, phase or in total; exit 3 if one is exceeded"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[("budget --limits limits.toml out", "exit 3 when a limit of the file is exceeded")]
    }

    fn flags(&self) -> &'static [Flag] {
        &[Flag {
            name: "limits",
            value: Some("FILE"),
            default: "",
            choices: &[],
            help: "A TOML file of limits, such as allocated = \"2g\", in [total], [host], [modules], [categories], [phases]",
        }]
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let file = options.text("limits");
        if file.is_empty() {
            return Err(Error::usage(
                "--limits FILE is missing; FILE is a TOML file such as\n  [total]\n  allocated = \"10g\"\n  \
                 [modules]\n  \"GPT.h\" = \"6g\"",
            ));
        }
        let text = std::fs::read_to_string(file).map_err(|error| Error::usage(format!("{file}: {error}")))?;
        let limits = parse(&text).map_err(|why| Error::usage(format!("{file}: {why}")))?;
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut json = Vec::new();
        let (mut broken, mut any) = (0, false);
        let mut names = Names::default();
        let mut devices = DevicePeaks::default();
        let has_host = limits.iter().any(|limit| limit.subject == LimitSubject::Host);
        let has_categories = limits.iter().any(|limit| limit.subject == LimitSubject::Category);
        let columns = Columns::of(&["module", "category"]);
        let columns = if has_host { columns.and(Columns::of(&["api", "name"])) } else { columns };
        for (index, trace) in input.traces.iter().enumerate() {
            let flow = flow_categories(trace, options)?;
            let read = |meter: &mut Meter<'_>| {
                let feed = |row: &Record, replay: &Replay| meter.feed(row, replay);
                replay_trace(trace, columns, options, Metric::Allocated, flow.clone(), feed)
            };
            let mut meter = Meter::new(&limits, flow.clone(), options);
            let replayed = read(&mut meter)?;
            vouch(trace, &replayed)?;
            if has_categories {
                if let Some(inferred) = replayed.inferred_at_peaks() {
                    meter = Meter::new(&limits, inferred, options);
                    read(&mut meter)?;
                }
                footer.note_inference(&replayed);
            }
            any |= replayed.gpus(options).next().is_some();
            if let Some((limit, why)) = meter.unchecked(&replayed, options) {
                let (trace, section) = (trace.path.display(), limit.subject.section());
                return Err(Error::usage(format!(
                    "{trace}: [{section}] {} cannot be checked: {why}",
                    limit.name
                )));
            }
            for device in replayed.gpus(options) {
                let peaks = SUMMED.map(|metric| device.peak_with_failed(metric));
                devices.add(trace, &replayed, device.ordinal, peaks);
            }
            footer.add(trace, &replayed, options);
            process_heading(&mut printer, input, index);
            meter.add_names(&mut names, &replayed.symbols);
            let results = meter.results(&replayed, options);
            broken += results.iter().filter(|result| result.is_broken()).count();
            print(&mut printer, &results, options);
            json.extend(results.iter().map(|result| result.json(trace.meta.rank)));
        }
        for ((rank, ordinal), results) in sums(&limits, &devices) {
            printer.gap();
            printer.plain(format!("rank {rank}, device {ordinal}, sum of the peaks of concurrent processes"));
            broken += results.iter().filter(|result| result.is_broken()).count();
            print(&mut printer, &results, options);
            json.extend(results.iter().map(|result| result.json(rank)));
        }
        let is_host_only = limits.iter().all(|limit| limit.subject == LimitSubject::Host);
        if !any && !is_host_only {
            return Err(Error::usage(format!("{}: no GPU memory in this trace", input.path.display())));
        }
        let mut faults = names.faults(&limits, &input.path);
        if !faults.is_empty() {
            let more = faults.len().saturating_sub(MOST_FAULTS);
            faults.truncate(MOST_FAULTS);
            if more > 0 {
                faults.push(format!(
                    "{} {} nothing",
                    counted(more as u64, "more limit"),
                    if more == 1 { "matches" } else { "match" }
                ));
            }
            let advice = format!(
                "to allow a limit with no match, write NAME = {{ limit = SIZE, optional = true }} in {file}"
            );
            return Err(Error::usage(format!("{}\n{advice}", faults.join("\n"))));
        }
        printer.gap();
        printer.line([match broken {
            0 => Cell::new("all limits hold", Style::Strong),
            n => Cell::new(format!("{n} of {} exceeded", counted(json.len() as u64, "limit")), Style::Alarm),
        }]);
        let verdict = if broken > 0 { Verdict::OverLimit } else { Verdict::Fine };
        let json = json!({ "broken": broken, "limits": json });
        let hints = vec![next("peak", input, "--by module")];
        Ok(Answer { next: hints, verdict, ..Answer::new(printer, json, footer) })
    }
}

/// The metrics that count the memory of one process only and can therefore be summed over processes. Samples
/// of used memory already include other processes.
const SUMMED: [Metric; 3] = [Metric::Allocated, Metric::Active, Metric::Reserved];

/// Applies the limits of `[total]` to the sum over the processes of a device, for each device that several
/// processes use.
fn sums(limits: &[Limit], devices: &DevicePeaks<3>) -> Vec<(Place, Vec<LimitResult>)> {
    let mut all = Vec::new();
    for (place, (sums, processes)) in devices.sums() {
        let of_limit = |limit: &Limit| {
            let metric = SUMMED.iter().position(|metric| limit.subject == LimitSubject::Total(*metric))?;
            Some(LimitResult {
                limit: limit.clone(),
                highest: sums[metric],
                highest_name: limit.name.clone(),
                matched: 0,
                at: format!("upper bound, {processes} processes"),
            })
        };
        let results: Vec<_> = limits.iter().filter_map(of_limit).collect();
        if processes > 1 && !results.is_empty() {
            all.push((place, results));
        }
    }
    all
}

/// The state of one limit while the rows are read: the live memory of the names that it applies to, and the
/// peak so far.
struct Gauge<'a> {
    limit: &'a Limit,
    /// The names found so far that the limit applies to.
    names: Vec<String>,
    /// The live bytes by index in `names` and by device.
    now: FxHashMap<(usize, i32), i64>,
    highest: i64,
    /// For a phase: true if a brief step went above the limit in another phase. Such a step has no row at the peaks of
    /// its other phases, so it may have exceeded the limit in this phase, too.
    may_exceed: bool,
    /// The row of the peak, and the index in `names` of the name with this peak.
    at: Option<(Record, usize)>,
    /// For each symbol already seen: the indices in `names` of the names to which its memory is added.
    known: FxHashMap<Symbol, Vec<usize>>,
}

impl<'a> Gauge<'a> {
    fn new(limit: &'a Limit) -> Gauge<'a> {
        Gauge {
            limit,
            names: Vec::new(),
            now: FxHashMap::default(),
            highest: 0,
            may_exceed: false,
            at: None,
            known: FxHashMap::default(),
        }
    }

    /// Returns the indices in `names` of the names to which the memory of `symbol` is added: the phase or
    /// category itself or, for a module, the module and its enclosing modules. Names that the limit does not
    /// apply to are left out.
    fn names_of(&mut self, symbol: Symbol, symbols: &SymbolTable) -> Vec<usize> {
        if let Some(known) = self.known.get(&symbol) {
            return known.clone();
        }
        let text = symbols.get(symbol);
        let whole = self.limit.subject != LimitSubject::Module;
        let found: Vec<usize> = module_levels(&text)
            .filter(|path| (!whole || path.len() == text.len()) && self.limit.takes(path))
            .map(|path| match self.names.iter().position(|known| known == path) {
                Some(at) => at,
                None => {
                    self.names.push(path.to_owned());
                    self.names.len() - 1
                }
            })
            .collect();
        self.known.insert(symbol, found.clone());
        found
    }

    fn raise(&mut self, level: i64, row: &Record, name: usize) {
        if level > self.highest {
            self.highest = level;
            self.at = Some((*row, name));
        }
    }

    /// Starts the search for the peak at `row`, the first row of the window. The memory that is live before
    /// the row is the first candidate.
    fn enter_window(&mut self, row: &Record) {
        let levels: Vec<_> = self.now.iter().map(|((name, _), level)| (*name, *level)).collect();
        for (name, level) in levels {
            self.raise(level, row, name);
        }
    }

    /// Processes a row, whose block has this category.
    fn feed(&mut self, row: &Record, category: Category, replay: &Replay) {
        let owner = match self.limit.subject {
            LimitSubject::Total(_) | LimitSubject::Host => return,
            LimitSubject::Phase => {
                if matches!(row.event, EventName::Alloc | EventName::Brief) && replay.in_window() {
                    match self.names_of(row.phase, &replay.symbols).first() {
                        Some(name) => self.raise(row.allocated_bytes, row, *name),
                        None => {
                            let is_above = row.allocated_bytes > self.limit.bytes;
                            self.may_exceed |= is_above && row.event == EventName::Brief;
                        }
                    }
                }
                return;
            }
            LimitSubject::Module => row.module,
            LimitSubject::Category => replay.symbols.intern(category.as_str()),
        };
        if !row.event.is_block() {
            return;
        }
        for name in self.names_of(owner, &replay.symbols) {
            // The schema guarantees that the deltas of an owner sum up to the live memory of the owner.
            let now = self.now.entry((name, row.device)).or_default();
            *now += row.delta_bytes;
            let level = *now;
            if replay.in_window() {
                self.raise(level, row, name);
            }
        }
    }
}

struct Meter<'a> {
    gauges: Vec<Gauge<'a>>,
    device: Option<i32>,
    /// The inferred categories of blocks.
    inferred: KnownCategories,
    modules: FxHashSet<Symbol>,
    phases: FxHashSet<Symbol>,
    categories: FxHashSet<Category>,
    /// True if the previous row was in the window. Initially true, so that the first row does not start the
    /// window.
    was_inside: bool,
    /// True if blocks were allocated in a step without detail, so that their modules are unknown.
    /// `without_category` is true if such blocks also have no category.
    without_module: bool,
    without_category: bool,
    /// The running test, if the pytest plugin names it.
    test: Symbol,
}

impl<'a> Meter<'a> {
    fn new(limits: &'a [Limit], inferred: KnownCategories, options: &Options) -> Meter<'a> {
        Meter {
            gauges: limits.iter().map(Gauge::new).collect(),
            device: options.device,
            inferred,
            modules: FxHashSet::default(),
            phases: FxHashSet::default(),
            categories: FxHashSet::default(),
            was_inside: true,
            without_module: false,
            without_category: false,
            test: Symbol::NONE,
        }
    }

    /// Returns the first limit that cannot be checked because the trace lacks data, and the reason.
    fn unchecked(&self, replayed: &Replayed, options: &Options) -> Option<(&Limit, &'static str)> {
        self.gauges.iter().find_map(|gauge| {
            let required = !gauge.limit.optional;
            let why = match gauge.limit.subject {
                LimitSubject::Host if required && gauge.at.is_none() => {
                    "the trace has no samples of the host"
                }
                LimitSubject::Total(Metric::Used)
                    if required && replayed.gpus(options).any(|device| !device.is_sampled()) =>
                {
                    "the trace has no samples of the device"
                }
                LimitSubject::Module if self.without_module => {
                    "some steps have no modules (MEMTRACE_DETAIL); use --step to check the others"
                }
                LimitSubject::Category if self.without_category => {
                    "some steps have no categories (MEMTRACE_DETAIL); use --step to check the others"
                }
                LimitSubject::Phase if gauge.may_exceed => {
                    "some steps have only the phase of their peak (MEMTRACE_DETAIL); use --step to check the others"
                }
                // MEMTRACE_KEEP always keeps the parts with the highest allocated and reserved memory, so
                // these two limits can be checked although other parts were removed.
                LimitSubject::Total(Metric::Allocated | Metric::Reserved) => return None,
                _ if !replayed.summary.removed.is_empty() => {
                    "parts of the trace were removed (MEMTRACE_KEEP)"
                }
                _ => return None,
            };
            Some((gauge.limit, why))
        })
    }

    /// Processes a sample of the process's resident memory.
    fn feed_host(&mut self, row: &Record, replay: &Replay) {
        if *replay.symbols.get(row.api) != *Api::ProcStatus.as_str() || !replay.in_window() {
            return;
        }
        let Some(rss) = host::parse(Api::ProcStatus, &replay.symbols.get(row.name)).0[0] else { return };
        let here = Record { step: replay.step, phase: replay.phase, name: self.test, ..*row };
        for gauge in self.gauges.iter_mut().filter(|gauge| gauge.limit.subject == LimitSubject::Host) {
            if gauge.names.is_empty() {
                gauge.names.push(gauge.limit.name.clone());
            }
            gauge.raise(rss, &here, 0);
        }
    }

    fn feed(&mut self, row: &Record, replay: &Replay) {
        if row.event == EventName::Sample && row.device == HOST {
            self.feed_host(row, replay);
            return;
        }
        self.test = marks::running_test(row, &replay.symbols).unwrap_or(self.test);
        self.modules.insert(row.module);
        self.phases.insert(row.phase);
        let category = self.inferred.category_of(row.alloc_id).unwrap_or(row.category);
        if row.event.is_block() {
            self.categories.insert(category);
        }
        if replay.in_window() && !self.was_inside {
            self.gauges.iter_mut().for_each(|gauge| gauge.enter_window(row));
        }
        self.was_inside = replay.in_window();
        if is_gpu(row.device) && self.device.is_none_or(|only| only == row.device) {
            if replay.in_window() && is_without_module(row) {
                self.without_module = true;
                self.without_category |= row.category == Category::None;
            }
            for gauge in &mut self.gauges {
                gauge.feed(row, category, replay);
            }
        }
    }

    /// Adds the names that occur in the trace to `names`.
    fn add_names(&self, names: &mut Names, symbols: &SymbolTable) {
        let owners = |all: &FxHashSet<Symbol>| -> Vec<String> {
            let named = all.iter().filter(|symbol| **symbol != Symbol::NONE);
            named.map(|symbol| symbols.get(*symbol).to_string()).collect()
        };
        for path in owners(&self.modules) {
            names.modules.extend(module_levels(&path).map(str::to_owned));
        }
        names.phases.extend(owners(&self.phases));
        let categories = self.categories.iter().filter(|category| **category != Category::None);
        names.categories.extend(categories.map(|category| category.as_str().to_owned()));
    }

    fn results(&self, replayed: &Replayed, options: &Options) -> Vec<LimitResult> {
        let outcome = |gauge: &Gauge<'_>| {
            let symbols = &replayed.symbols;
            let mut highest_name = gauge.limit.name.clone();
            let (highest, at, remark) = match gauge.limit.subject {
                LimitSubject::Total(metric) => match replayed.fullest(metric, options) {
                    Some(device) => {
                        let peak = device.peak(metric);
                        let wanted = replayed.gpus(options).map(|device| device.wanted_at_oom).max();
                        let owner = peak.owner;
                        match wanted.filter(|wanted| *wanted > peak.bytes) {
                            Some(wanted) => (wanted, None, "with a request that failed (OOM)"),
                            None => (peak.bytes, Some((owner.step, owner.phase, owner.op)), ""),
                        }
                    }
                    None => (0, None, ""),
                },
                _ => {
                    if let Some((_, name)) = gauge.at {
                        highest_name.clone_from(&gauge.names[name]);
                    }
                    (gauge.highest, gauge.at.map(|(row, _)| (row.step, row.phase, row.op)), "")
                }
            };
            let at = at.map_or_else(
                || remark.to_owned(),
                |(at, phase, op)| {
                    format!("step {}, {}, {}", step_or_dash(at), symbols.or_dash(phase), symbols.or_dash(op))
                },
            );
            let at = match (gauge.limit.subject, gauge.at) {
                (LimitSubject::Host, Some((row, _))) if row.name != Symbol::NONE => {
                    format!("{at}, in the test {}", symbols.get(row.name))
                }
                _ => at,
            };
            let is_total = matches!(gauge.limit.subject, LimitSubject::Total(_));
            let at = if gauge.names.is_empty() && !is_total { "matches nothing here".to_owned() } else { at };
            LimitResult { limit: gauge.limit.clone(), highest, highest_name, matched: gauge.names.len(), at }
        };
        self.gauges.iter().map(outcome).collect()
    }
}

/// Returns true if a row allocates in a step without detail. A `brief` row is about several blocks, of any module and
/// category.
fn is_without_module(row: &Record) -> bool {
    row.event == EventName::Brief || row.event == EventName::Alloc && row.module == Symbol::WITHOUT_DETAIL
}

struct LimitResult {
    limit: Limit,
    highest: i64,
    /// The name with the highest peak among the names that the limit applies to.
    highest_name: String,
    /// The number of names that the limit applies to and that have memory.
    matched: usize,
    at: String,
}

impl LimitResult {
    fn is_broken(&self) -> bool {
        self.highest > self.limit.bytes
    }

    /// Returns the name of the limit, followed by the matching name with the highest peak if that name is
    /// different.
    fn name(&self) -> String {
        if self.highest_name == self.limit.name {
            return self.limit.name.clone();
        }
        let of_all = if self.matched > 1 { format!(", of {}", self.matched) } else { String::new() };
        format!("{}: {}{of_all}", self.limit.name, self.highest_name)
    }

    fn json(&self, rank: i32) -> Value {
        json!({
            "rank": rank,
            "on": self.limit.subject.name(),
            "name": self.limit.name,
            "limit_bytes": self.limit.bytes,
            "highest_bytes": self.highest,
            "highest_name": self.highest_name,
            "broken": self.is_broken(),
            "at": self.at,
        })
    }
}

fn print(printer: &mut Printer, results: &[LimitResult], options: &Options) {
    let mut table = Table::new(&[
        ("", Side::Left),
        ("limit", Side::Right),
        ("peak", Side::Right),
        ("of limit", Side::Right),
        ("on", Side::Left),
        ("name", Side::Left),
        ("at", Side::Left),
    ]);
    for result in results {
        let (mark, style) = if result.is_broken() { ("over", Style::Alarm) } else { ("ok", Style::Plain) };
        table.row([
            Cell::new(mark, style),
            options.units.show(result.limit.bytes).to_string().into(),
            Cell::new(options.units.show(result.highest).to_string(), style),
            percent(share(result.highest, result.limit.bytes)).into(),
            result.limit.subject.name().into(),
            result.name().into(),
            result.at.as_str().into(),
        ]);
    }
    printer.table(&table);
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn a_limit_of_a_category_holds_for_inferred_categories() {
        let folder = std::env::temp_dir().join(format!("memtrace-budget-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let mut trace = TraceBuilder::default();
        // Allocated before the first forward and never freed: a parameter.
        trace.alloc(8192, Row { phase: "init", ..Row::default() });
        let forward = Row {
            phase: "forward",
            step: 0,
            category: Category::Activation,
            module: "Net",
            ..Row::default()
        };
        trace.alloc(4096, forward);
        std::fs::write(folder.join("a.csv"), trace.finish()).unwrap();
        let limits = folder.join("limits.toml");
        std::fs::write(&limits, "[categories]\nparameter = \"4k\"\nactivation = \"4k\"\n").unwrap();
        let values = [("limits", limits.display().to_string())].into();
        let input = Input::open(&folder.join("a.csv")).unwrap();
        let answer = Budget.run(&[input], &Options { values, ..Options::default() }).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        let highest: Vec<(&str, i64)> = answer.json["limits"]
            .as_array()
            .unwrap()
            .iter()
            .map(|limit| (limit["name"].as_str().unwrap(), limit["highest_bytes"].as_i64().unwrap()))
            .collect();
        assert_eq!(highest, [("activation", 4096), ("parameter", 8192)]);
        assert_eq!(answer.verdict, Verdict::OverLimit);
        assert!(answer.text().contains("* inferred"), "{}", answer.text());
    }
}
