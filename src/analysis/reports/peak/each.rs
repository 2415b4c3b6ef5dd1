//! `memtrace peak --each`: the peak of each phase, step or module, with its owner and op, or the memory at
//! each mark.

use std::collections::BTreeMap;

use memtrace_trace::EventName;
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::super::report::{Answer, Report, next};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::read::input::Input;
use crate::read::record::{Columns, Record};
use crate::read::symbols::{NO_MODULE, NO_PHASE, Symbol, SymbolTable};
use crate::render::footer::Footer;
use crate::render::heading::process_heading;
use crate::render::numbers::step_or_dash;
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::state::block::Owner;
use crate::state::categories::KnownCategories;
use crate::state::device::Peak;
use crate::state::group::{APART, DEPTH, module_levels};
use crate::state::marks::{self, is_mark};
use crate::state::module_layers::Layers;
use crate::state::replay::{Metric, Replay};
use crate::state::replay_trace::{Replayed, replay_trace};

/// The option that selects this report.
pub(super) const EACH: Flag = Flag {
    name: "each",
    value: Some("KIND"),
    default: "",
    choices: &["phase", "step", "module", "mark"],
    help: "List the peak of each phase, step or module (with the modules below it), with its owner and op; or \
           allocated memory at each mark",
};

/// The part of a run to which a peak belongs; the option `--each` selects its kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    /// A phase or a module.
    Named(Symbol),
    Step(i64),
    /// A mark, and its number among the marks of the same name.
    Mark(Symbol, u64),
}

/// The peaks of one device.
type Peaks = FxHashMap<Part, Peak>;

/// `memtrace peak --each`.
pub(super) struct PeakEach;

impl Report for PeakEach {
    fn name(&self) -> &'static str {
        "peak --each phase"
    }

    fn about(&self) -> &'static str {
        "List the peak of each phase, step or module, or the memory at each mark"
    }

    fn flags(&self) -> &'static [Flag] {
        const { &[DEPTH, APART] }
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        answer(&inputs[0], options)
    }
}

fn answer(input: &Input, options: &Options) -> Result<Answer> {
    let kind = match options.text(EACH.name) {
        "" => "phase",
        kind => kind,
    };
    let depth = options.count(DEPTH.name)?;
    let mut printer = options.printer();
    let mut footer = Footer::of([input]);
    let mut processes = Vec::new();
    let columns = if kind == "mark" { marks::COLUMNS.and(Columns::of(&["ts_ns"])) } else { Columns::of(&[]) };
    for (index, trace) in input.traces.iter().enumerate() {
        let mut devices: BTreeMap<i32, Peaks> = BTreeMap::new();
        let mut marks = FxHashMap::default();
        let known = KnownCategories::default();
        let replayed =
            replay_trace(trace, columns, options, Metric::Allocated, known, |row, replay| match kind {
                "mark" => feed_mark(&mut devices, &mut marks, row, replay),
                _ => feed(&mut devices, kind, row, replay),
            })?;
        let ordinal = replayed.fullest(Metric::Allocated, options).map(|device| device.ordinal);
        footer.add_with_device(trace, &replayed, ordinal);
        process_heading(&mut printer, input, index);
        let gpus = replayed.gpus(options).count();
        if let Some(ordinal) = ordinal.filter(|_| gpus > 1) {
            printer.plain(format!("device {ordinal} has the highest peak of {gpus}; --device shows another"));
        }
        let peaks = ordinal.and_then(|ordinal| devices.remove(&ordinal)).unwrap_or_default();
        let rows = sorted(named(&peaks, kind, depth, options, &replayed), kind);
        print(&mut printer, kind, &rows, &replayed, options);
        processes.push(json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "device": ordinal,
            "each": kind,
            "peaks": rows.iter()
                .map(|(key, moment)| json!({ "key": key.text(), "peak": replayed.moment(moment) }))
                .collect::<Vec<Value>>(),
        }));
    }
    let next = vec![next("peak", input, "--by module")];
    Ok(Answer { next, ..Answer::new(printer, json!({ "processes": processes }), footer) })
}

fn feed(devices: &mut BTreeMap<i32, Peaks>, kind: &str, row: &Record, replay: &Replay) {
    let is_brief = row.event == EventName::Brief;
    if !(row.allocates_tensor() || is_brief) || !replay.in_window() {
        return;
    }
    let row = &match is_brief {
        true => Record { op: Symbol::WITHOUT_DETAIL, module: Symbol::WITHOUT_DETAIL, ..*row },
        false => *row,
    };
    let part = match kind {
        "phase" => Part::Named(row.phase),
        "step" => Part::Step(row.step),
        _ => Part::Named(row.module),
    };
    let peak = devices.entry(row.device).or_default().entry(part).or_default();
    if row.allocated_bytes > peak.bytes {
        let owner = Owner::from_row(row);
        *peak = Peak { bytes: row.allocated_bytes, seq: row.seq, ts_ns: row.ts_ns, owner, untraced: 0 };
    }
}

fn feed_mark(
    devices: &mut BTreeMap<i32, Peaks>,
    counts: &mut FxHashMap<Symbol, u64>,
    row: &Record,
    replay: &Replay,
) {
    if !is_mark(row, &replay.symbols) {
        return;
    }
    let count = counts.entry(row.name).or_default();
    *count += 1;
    if !replay.in_window() {
        return;
    }
    for device in replay.devices() {
        let (bytes, owner) = (device.totals.allocated, Owner::from_row(row));
        let moment = Peak { bytes, seq: row.seq, ts_ns: replay.ts_ns, owner, untraced: 0 };
        devices.entry(device.ordinal).or_default().insert(Part::Mark(row.name, *count), moment);
    }
}

/// The name of a part. The derived order sorts steps by their numbers instead of as texts.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Name {
    Step(i64),
    Text(String),
}

impl Name {
    fn text(&self) -> String {
        match self {
            Name::Step(step) if *step < 0 => "before the first".to_owned(),
            Name::Step(step) => step.to_string(),
            Name::Text(text) => text.clone(),
        }
    }
}

/// Returns the peaks by name. A module's peak includes the modules below it.
fn named(
    peaks: &Peaks,
    kind: &str,
    depth: Option<usize>,
    options: &Options,
    replayed: &Replayed,
) -> BTreeMap<Name, Peak> {
    let symbols = &replayed.symbols;
    let modules = peaks.keys().filter_map(|part| match part {
        Part::Named(module) => Some(*module),
        Part::Step(_) | Part::Mark(..) => None,
    });
    let layers = if options.is_set(APART.name) {
        Layers::default()
    } else {
        replayed.replay.classes.layers(modules, symbols)
    };
    let mut all: BTreeMap<Name, Peak> = BTreeMap::new();
    for (part, moment) in peaks {
        for name in names(*part, kind, depth, &layers, symbols) {
            let peak = all.entry(name).or_default();
            // Of equal peaks, the earlier one counts.
            if (moment.bytes, -moment.seq) > (peak.bytes, -peak.seq) {
                *peak = *moment;
            }
        }
    }
    all
}

fn names(part: Part, kind: &str, depth: Option<usize>, layers: &Layers, symbols: &SymbolTable) -> Vec<Name> {
    match part {
        Part::Step(step) => vec![Name::Step(step)],
        Part::Mark(name, count) => vec![Name::Text(format!("{}#{count}", symbols.get(name)))],
        Part::Named(phase) if kind == "phase" => vec![Name::Text(symbols.or(phase, NO_PHASE))],
        Part::Named(module) => {
            let path = layers.joined(&symbols.or(module, NO_MODULE));
            let levels = module_levels(&path).take(depth.unwrap_or(usize::MAX));
            levels.map(|level| Name::Text(level.to_owned())).collect()
        }
    }
}

/// Sorts steps by number, marks by time, and phases and modules by peak.
fn sorted(peaks: BTreeMap<Name, Peak>, kind: &str) -> Vec<(Name, Peak)> {
    let mut rows: Vec<(Name, Peak)> = peaks.into_iter().collect();
    if kind == "mark" {
        rows.sort_by_key(|(_, moment)| moment.seq);
    } else if !matches!(rows.first(), Some((Name::Step(_), _))) {
        rows.sort_by_key(|(_, moment)| std::cmp::Reverse(moment.bytes));
    }
    rows
}

fn print(printer: &mut Printer, kind: &str, rows: &[(Name, Peak)], replayed: &Replayed, options: &Options) {
    if rows.is_empty() {
        printer.plain(if kind == "mark" {
            "no mark with memory on a GPU; memtrace.mark and torch.cuda.nvtx.mark write one"
        } else {
            "No memory tracked."
        });
        return;
    }
    // Leave out the column that would repeat the name of each row. A mark is outside every op, so its table
    // has no ops.
    let is_mark = kind == "mark";
    let others: Vec<&str> = ["step", "phase", "op", "module"]
        .into_iter()
        .filter(|name| *name != kind && !(is_mark && *name == "op"))
        .collect();
    let figure = if is_mark { "allocated" } else { "peak" };
    let mut columns = vec![(kind, Side::Left), (figure, Side::Right), ("at", Side::Right)];
    let side = |name: &str| if name == "step" { Side::Right } else { Side::Left };
    columns.extend(others.iter().map(|name| (*name, side(name))));
    // The peak of a module may be in a module below it, so a column names the owner.
    let is_by_module = kind == "module";
    if is_by_module {
        columns.push(("owner", Side::Left));
    }
    let mut table = Table::new(&columns);
    let symbols = &replayed.symbols;
    let top = options.top.unwrap_or(40);
    for (name, moment) in rows.iter().take(top) {
        let owner = &moment.owner;
        let mut cells: Vec<Cell> = vec![
            name.text().into(),
            Cell::new(options.units.show(moment.bytes).to_string(), Style::Strong),
            Cell::duration(moment.ts_ns),
        ];
        cells.extend(others.iter().map(|other| match *other {
            "step" => Cell::from(step_or_dash(owner.step)),
            "phase" => symbols.or_dash(owner.phase).into(),
            "op" => symbols.or_dash(owner.op).into(),
            _ => symbols.or_dash(owner.module).into(),
        }));
        if is_by_module {
            cells.push(symbols.or_dash(owner.module).into());
        }
        table.row(cells);
    }
    printer.table(&table);
    printer.more(rows.len().saturating_sub(top), "");
}
