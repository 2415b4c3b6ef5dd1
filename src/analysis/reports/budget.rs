//! `memtrace budget`: checks limits from a file, with an exit status for CI.
//!
//! ```toml
//! [total]               # peaks of the device
//! allocated = "10g"
//! reserved = "12g"
//! used = "14g"
//! [modules]             # the peak of what a module and its submodules own
//! "GPT.h" = "6g"
//! [categories]          # the peak of a category
//! activation = "4g"
//! [phases]              # the peak of allocated memory while the phase runs
//! backward = "9g"
//! ```

use memtrace_trace::EventName;
use memtrace_trace::units::parse_bytes;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::report::{Answer, Report, Verdict, next};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::symbols::{Symbol, SymbolTable};
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::step_or_dash;
use crate::render::numbers::{percent, share};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::group::category;
use crate::state::replay::{HOST, Metric, Replay};
use crate::state::replay_trace::{Replayed, replay_trace};

/// `memtrace budget`.
pub(super) struct Budget;

impl Report for Budget {
    fn name(&self) -> &'static str {
        "budget"
    }

    fn about(&self) -> &'static str {
        "Check limits per module, category, phase or in total; exit 3 if one is exceeded"
    }

    fn flags(&self) -> &'static [Flag] {
        &[Flag {
            name: "limits",
            value: Some("FILE"),
            default: "",
            choices: &[],
            help: "A TOML file of limits, name = \"2g\", in [total], [modules], [categories], [phases]",
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
        let mut printer = Printer::new(options.paint, options.width);
        let mut footer = Footer::new(input);
        let mut json = Vec::new();
        let mut broken = 0;
        for (index, trace) in input.traces.iter().enumerate() {
            let mut meter = Meter::new(&limits, options);
            let replayed = replay_trace(
                trace,
                Columns::of(&["module", "category"]),
                options,
                Metric::Allocated,
                flow_categories(trace, options)?,
                |row, replay| {
                    meter.feed(row, replay);
                },
            )?;
            footer.add(trace, &replayed, replayed.fullest(Metric::Allocated, options).map(|d| d.ordinal));
            if index == 0 {
                heading(&mut printer, input, &trace.meta);
            }
            printer.gap();
            if input.traces.len() > 1 {
                printer.plain(format!("rank {}", trace.meta.rank));
            }
            let results = meter.results(&replayed, options);
            broken += results.iter().filter(|result| result.is_broken()).count();
            print(&mut printer, &results, options);
            json.extend(results.iter().map(|result| result.json(trace.meta.rank)));
        }
        printer.gap();
        printer.line([match broken {
            0 => Cell::new("all limits hold", Style::Strong),
            n => Cell::new(format!("{n} of {} limits exceeded", json.len()), Style::Alarm),
        }]);
        let verdict = if broken > 0 { Verdict::OverLimit } else { Verdict::Fine };
        let json = json!({ "broken": broken, "limits": json });
        let hints = vec![next("peak", input, "--by module")];
        Ok(Answer { body: printer, json, footer, next: hints, verdict })
    }
}

/// The kind of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitSubject {
    Total(Metric),
    Module,
    Category,
    Phase,
}

impl LimitSubject {
    const fn name(self) -> &'static str {
        match self {
            LimitSubject::Total(_) => "total",
            LimitSubject::Module => "module",
            LimitSubject::Category => "category",
            LimitSubject::Phase => "phase",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit {
    subject: LimitSubject,
    name: String,
    bytes: i64,
}

fn parse(text: &str) -> std::result::Result<Vec<Limit>, String> {
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let mut limits = Vec::new();
    for (section, entries) in &table {
        let entries = entries.as_table().ok_or_else(|| format!("{section}: expected a section of limits"))?;
        for (name, value) in entries {
            let subject = match (section.as_str(), name.as_str()) {
                ("total", "allocated") => LimitSubject::Total(Metric::Allocated),
                ("total", "active") => LimitSubject::Total(Metric::Active),
                ("total", "reserved") => LimitSubject::Total(Metric::Reserved),
                ("total", "used") => LimitSubject::Total(Metric::Used),
                ("total", name) => {
                    return Err(format!("[total] {name}: expected allocated, active, reserved or used"));
                }
                ("modules", _) => LimitSubject::Module,
                ("categories", _) => LimitSubject::Category,
                ("phases", _) => LimitSubject::Phase,
                (section, _) => {
                    return Err(format!("[{section}]: expected total, modules, categories or phases"));
                }
            };
            let bytes = match value {
                toml::Value::Integer(bytes) => *bytes,
                toml::Value::String(size) => {
                    parse_bytes(size).map_err(|why| format!("[{section}] {name}: {why}"))?
                }
                other => {
                    return Err(format!("[{section}] {name}: expected a size such as \"2g\", got {other}"));
                }
            };
            limits.push(Limit { subject, name: name.clone(), bytes });
        }
    }
    if limits.is_empty() {
        return Err("the file has no limits".to_owned());
    }
    Ok(limits)
}

/// The level and peak of the memory under one limit.
struct Gauge<'a> {
    limit: &'a Limit,
    /// Live bytes of the owner, by device.
    now: FxHashMap<i32, i64>,
    highest: i64,
    /// The row of the peak.
    at: Option<Record>,
    /// Caches whether the limit applies to a symbol.
    known: FxHashMap<Symbol, bool>,
}

impl Gauge<'_> {
    /// Returns true if the limit applies to `symbol`: the phase itself, or the module or a submodule.
    fn applies_to(&mut self, symbol: Symbol, symbols: &SymbolTable) -> bool {
        let limit = self.limit;
        *self.known.entry(symbol).or_insert_with(|| {
            let text = symbols.get(symbol);
            match text.strip_prefix(limit.name.as_str()) {
                Some("") => true,
                Some(below) => limit.subject == LimitSubject::Module && below.starts_with('.'),
                None => false,
            }
        })
    }

    fn raise(&mut self, level: i64, row: &Record) {
        if level > self.highest {
            self.highest = level;
            self.at = Some(*row);
        }
    }

    fn feed(&mut self, row: &Record, replay: &Replay) {
        let owned = match self.limit.subject {
            LimitSubject::Total(_) => return,
            LimitSubject::Phase => {
                let raises = row.event == EventName::Alloc && replay.in_window();
                if raises && self.applies_to(row.phase, &replay.symbols) {
                    self.raise(row.allocated_bytes, row);
                }
                return;
            }
            LimitSubject::Module => row.event.is_block() && self.applies_to(row.module, &replay.symbols),
            LimitSubject::Category => row.event.is_block() && category(row.category) == self.limit.name,
        };
        if owned {
            // The schema guarantees that the deltas of an owner sum to its live memory.
            let now = self.now.entry(row.device).or_default();
            *now += row.delta_bytes;
            let level = *now;
            if replay.in_window() {
                self.raise(level, row);
            }
        }
    }
}

struct Meter<'a> {
    gauges: Vec<Gauge<'a>>,
    device: Option<i32>,
}

impl<'a> Meter<'a> {
    fn new(limits: &'a [Limit], options: &Options) -> Meter<'a> {
        let gauge = |limit| Gauge {
            limit,
            now: FxHashMap::default(),
            highest: 0,
            at: None,
            known: FxHashMap::default(),
        };
        Meter { gauges: limits.iter().map(gauge).collect(), device: options.device }
    }

    fn feed(&mut self, row: &Record, replay: &Replay) {
        if row.device != HOST && self.device.is_none_or(|only| only == row.device) {
            for gauge in &mut self.gauges {
                gauge.feed(row, replay);
            }
        }
    }

    fn results(&self, replayed: &Replayed, options: &Options) -> Vec<Outcome> {
        let outcome = |gauge: &Gauge<'_>| {
            let symbols = &replayed.symbols;
            let (highest, at) = match gauge.limit.subject {
                LimitSubject::Total(metric) => match replayed.fullest(metric, options) {
                    Some(device) => {
                        let peak = device.peak(metric);
                        (peak.bytes, Some((peak.owner.step, peak.owner.phase, peak.owner.op)))
                    }
                    None => (0, None),
                },
                _ => (gauge.highest, gauge.at.map(|row| (row.step, row.phase, row.op))),
            };
            let at = at.map_or_else(String::new, |(at, phase, op)| {
                format!("step {}, {}, {}", step_or_dash(at), symbols.or_dash(phase), symbols.or_dash(op))
            });
            Outcome { limit: gauge.limit.clone(), highest, at }
        };
        self.gauges.iter().map(outcome).collect()
    }
}

struct Outcome {
    limit: Limit,
    highest: i64,
    at: String,
}

impl Outcome {
    fn is_broken(&self) -> bool {
        self.highest > self.limit.bytes
    }

    fn json(&self, rank: i32) -> Value {
        json!({
            "rank": rank,
            "on": self.limit.subject.name(),
            "name": self.limit.name,
            "limit_bytes": self.limit.bytes,
            "highest_bytes": self.highest,
            "broken": self.is_broken(),
            "at": self.at,
        })
    }
}

fn print(printer: &mut Printer, results: &[Outcome], options: &Options) {
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
            result.limit.name.as_str().into(),
            result.at.as_str().into(),
        ]);
    }
    printer.table(&table);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_reads_limits_and_names_what_is_wrong() {
        let limits = parse("[total]\nallocated = \"1g\"\n[modules]\n\"GPT.h\" = 512\n").unwrap();
        assert_eq!(limits.len(), 2);
        let layers = Limit { subject: LimitSubject::Module, name: "GPT.h".to_owned(), bytes: 512 };
        assert!(limits.contains(&layers));
        for (text, part) in [
            ("", "no limits"),
            ("[total]\nmost = 1", "allocated"),
            ("[layers]\na = 1", "modules"),
            ("[modules]\na = true", "expected a size"),
            ("[modules]\na = \"big\"", "expected a size"),
            ("[modules", "TOML"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(part), "{text}: {why}");
        }
    }
}
