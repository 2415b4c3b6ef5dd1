//! `memtrace timeline`: memory over time as a curve in the terminal, with phases and steps below.

use memtrace_trace::memory::Effect;
use memtrace_trace::{Category, EventName};
use serde_json::{Value, json};

use super::peak;
use super::report::{Answer, Report, next};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::read::symbols::Symbol;
use crate::render::curve::{Band, Curve, CurveLine};
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::duration;
use crate::render::printer::{Cell, Printer, Style};
use crate::render::process_names::chosen_of;
use crate::state::categories::KnownCategories;
use crate::state::group::category;
use crate::state::progress::{Progress, StepSpan};
use crate::state::replay::{self, Device, Metric, Window};
use crate::state::replay_trace::{Replayed, read_by_metric, replay_rows, replay_trace};
use crate::state::series::{Series, TimeGrid};
use crate::state::stacked_series::StackedSeries;
use crate::state::step_inputs::{LargestInput, StepInputs};

/// `memtrace timeline`.
pub(super) struct Timeline;

const WIDTH: Flag = Flag {
    name: "width",
    value: Some("COLUMNS"),
    default: "",
    choices: &[],
    help: "Width of the curve [default: the terminal's, or 100]",
};
const HEIGHT: Flag =
    Flag { name: "height", value: Some("LINES"), default: "16", choices: &[], help: "Height of the curve" };
const BY: Flag = Flag {
    name: "by",
    value: Some("WHAT"),
    default: "total",
    choices: &["total", "category"],
    help: "Draw the totals, or stack the categories",
};
const ALL: Flag = Flag::switch("all", "Draw the whole trace, even if the steps are a small part of it");

impl Report for Timeline {
    fn name(&self) -> &'static str {
        "timeline"
    }

    fn about(&self) -> &'static str {
        "Draw memory over time in the terminal, with phases, steps and the peak"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[
            ("timeline out", "the curve of the run in the terminal"),
            ("timeline --step 3:5 out", "steps 3 to 5"),
        ]
    }

    fn flags(&self) -> &'static [Flag] {
        &[BY, WIDTH, HEIGHT, ALL]
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let width = options.count(WIDTH.name)?.or(options.width).unwrap_or(100).clamp(30, 400);
        let height = options.count(HEIGHT.name)?.unwrap_or(16).clamp(3, 200);
        let mut footer = Footer::of([input]);
        let mut best: Option<(i64, &TraceFile, FirstReading)> = None;
        for trace in &input.traces {
            let first = FirstReading::read(trace, options)?;
            footer.add_with_device(trace, &first.replayed, Some(first.ordinal));
            let peak = first.peak();
            if best.as_ref().is_none_or(|(highest, ..)| peak > *highest) {
                best = Some((peak, trace, first));
            }
        }
        let (_, trace, first) =
            best.ok_or_else(|| Error::usage(format!("{}: no trace", input.path.display())))?;
        let mut printer = options.printer();
        heading(&mut printer, input, &trace.meta);
        if first.peak() == 0 {
            printer.plain("No memory tracked.");
            return Ok(Answer::new(printer, json!({ "buckets": 0 }), footer));
        }
        let whole = first.time_ns;
        let shown = if options.is_set(ALL.name) || options.window != Window::default() {
            whole
        } else {
            first.progress.initial_range(whole, first.moment().ts_ns)
        };
        let grid = TimeGrid::new(shown.0, shown.1, (width - Curve::MARGIN) * 2);
        let drawn = SecondReading::read(trace, options, &first, grid)?;
        if let Some(chosen) = chosen_of(trace, input, "highest peak", "") {
            printer.plain(chosen);
        }
        drawn.print(&mut printer, &first, height, options);
        if shown != whole {
            printer.line([Cell::new(
                format!(
                    "drawn: the steps, {} of {}; --all draws the whole trace",
                    duration(shown.1 - shown.0),
                    duration(whole.1 - whole.0)
                ),
                Style::Faint,
            )]);
        }
        let other = if options.text(BY.name) == "category" { "" } else { "--by category" };
        let hints = vec![next("timeline", input, other), next("report", input, "-o report.html")];
        Ok(Answer { next: hints, ..Answer::new(printer, drawn.json(trace, &first), footer) })
    }
}

/// The first reading of a trace, which finds the device and the time span to draw.
struct FirstReading {
    replayed: Replayed,
    metric: Metric,
    ordinal: i32,
    time_ns: (i64, i64),
    progress: Progress,
    inputs: StepInputs,
}

impl FirstReading {
    fn read(trace: &TraceFile, options: &Options) -> Result<FirstReading> {
        let flow = flow_categories(trace, options)?;
        let read = |metric| FirstReading::read_for(trace, options, metric, flow.clone());
        read_by_metric(read, |first| first.peak() != 0)
    }

    fn read_for(
        trace: &TraceFile,
        options: &Options,
        metric: Metric,
        flow: KnownCategories,
    ) -> Result<FirstReading> {
        let mut progress = Progress::new(TimeGrid::new(0, i64::MAX / 4, 1));
        let mut time: Option<(i64, i64)> = None;
        let mut inputs = StepInputs::default();
        // The visitor also sees op rows, so the time span begins with the first op and not with the first
        // allocation.
        let columns = Columns::of(&["ts_ns", "name"]);
        let replayed = replay_trace(trace, columns, options, metric, flow, |row, replay| {
            inputs.feed(row, &replay.symbols);
            if replay.in_window() {
                time = Some((time.map_or(replay.ts_ns, |time| time.0), replay.ts_ns));
                progress.feed(row, replay, 0);
            }
        })?;
        progress.steps.end_with(replayed.replay.last_step());
        let ordinal = replayed.fullest(metric, options).map_or(0, |device| device.ordinal);
        Ok(FirstReading { replayed, metric, ordinal, time_ns: time.unwrap_or((0, 0)), progress, inputs })
    }

    /// Returns the name of the metric.
    fn name(&self) -> &'static str {
        self.device().map_or(self.metric.name(), |device| device.name_of(self.metric))
    }

    fn device(&self) -> Option<&Device> {
        self.replayed.replay.find(self.ordinal)
    }

    fn moment(&self) -> replay::Peak {
        self.device().map(|device| *device.peak(self.metric)).unwrap_or_default()
    }

    fn peak(&self) -> i64 {
        self.moment().bytes
    }
}

/// The second reading of a trace, which collects the curve.
struct SecondReading {
    grid: TimeGrid,
    total: Series,
    reserved: Series,
    progress: Progress,
    by_category: Vec<Vec<i64>>,
    ooms: Vec<i64>,
    replayed: Replayed,
}

impl SecondReading {
    fn read(
        trace: &TraceFile,
        options: &Options,
        first: &FirstReading,
        grid: TimeGrid,
    ) -> Result<SecondReading> {
        let (mut total, mut reserved) = (Series::new(grid), Series::new(grid));
        let mut progress = Progress::new(grid);
        let mut stacked = StackedSeries::new(grid, Category::ALL.len());
        let mut ooms = Vec::new();
        let inferred: rustc_hash::FxHashMap<i64, Category> = first
            .replayed
            .replay
            .at_peak(first.ordinal, false)
            .into_iter()
            .filter(|block| block.inferred)
            .map(|block| (block.id, block.owner.category))
            .collect();
        let wanted = replay::COLUMNS.and(Columns::of(&["ts_ns"]));
        let replayed = replay_rows(trace, wanted, options, first.metric, |row, replay| {
            let Some(device) = replay.find(first.ordinal) else { return };
            let value = device.totals.get(first.metric);
            progress.feed(row, replay, value);
            if row.device != first.ordinal {
                return;
            }
            let ts = replay.ts_ns;
            total.set(ts, value);
            reserved.set(ts, device.totals.reserved);
            let known = |id| inferred.get(&id).copied();
            match row.counted_effect(first.metric) {
                Some(Effect::Alloc) => {
                    let category = known(row.alloc_id).unwrap_or(row.category);
                    stacked.add(ts, row.seq, &[category as usize], row.delta_bytes, value);
                }
                Some(Effect::Free) => {
                    if let Some(block) = replay.freed() {
                        let category = known(block.id).unwrap_or(block.owner.category);
                        stacked.add(ts, row.seq, &[category as usize], -block.bytes, value);
                    }
                }
                _ => {}
            }
            match row.event {
                EventName::Brief => {
                    stacked.add(ts, row.seq, &[row.category as usize], row.delta_bytes, value);
                }
                EventName::Tag if replay.live().contains(row.alloc_id) => {
                    stacked.correct(ts, row.seq, row.alloc_id, &[row.category as usize], row.delta_bytes);
                }
                EventName::Oom if grid.has(ts) => ooms.push(ts),
                _ => {}
            }
        })?;
        progress.steps.end_with(replayed.replay.last_step());
        let (total, reserved) = (total.finish(), reserved.finish());
        Ok(SecondReading { grid, total, reserved, progress, by_category: stacked.finish(), ooms, replayed })
    }

    fn name(&self, phase: Symbol) -> String {
        if phase == Symbol::NONE { String::new() } else { self.replayed.symbols.get(phase).to_string() }
    }

    fn print(&self, printer: &mut Printer, first: &FirstReading, height: usize, options: &Options) {
        let peak = first.moment();
        let place = peak.owner.place(&[peak.owner.phase], &first.replayed.symbols);
        let title =
            first.device().map_or_else(|| "peak".to_owned(), |device| peak::title(device, first.metric));
        printer.line([
            format!("{title} ").into(),
            Cell::new(options.units.show(peak.bytes).to_string(), Style::Strong),
            format!(" at {}{place}", duration(peak.ts_ns)).into(),
        ]);
        let mut bands = Vec::new();
        if options.text(BY.name) == "category" {
            for (index, bytes) in self.by_category.iter().enumerate() {
                if bytes.iter().any(|bytes| *bytes > 0) {
                    let name = category(Category::ALL[index]);
                    bands.push(Band { name: name.to_owned(), hue: index as u8, bytes: bytes.clone() });
                }
            }
        }
        let phases = self.progress.phases.starts.iter().map(|(ts, phase)| (*ts, self.name(*phase))).collect();
        let sizes = first.inputs.sizes();
        let size_of = |step: &StepSpan| (step.time_ns.0, sizes.most(step.numbers.0, step.numbers.1));
        let curve = Curve {
            grid: self.grid,
            high: &self.total.high,
            line: Some(CurveLine { name: "reserved", high: &self.reserved.high }),
            total_name: first.name(),
            bands,
            phases,
            steps: self.progress.steps.steps.iter().map(|step| (step.time_ns.0, step.numbers.0)).collect(),
            inputs: if sizes.vary() {
                self.progress.steps.steps.iter().map(size_of).collect()
            } else {
                Vec::new()
            },
            peak_ns: Some(peak.ts_ns),
            ooms: self.ooms.clone(),
            units: options.units,
        };
        curve.print(printer, height);
        let last = first.replayed.replay.last_step();
        let largest = first.inputs.largest(last, &first.replayed.symbols);
        if let Some(line) = largest.as_ref().and_then(LargestInput::line) {
            printer.plain(line);
        }
    }

    fn json(&self, trace: &TraceFile, first: &FirstReading) -> Value {
        let categories: serde_json::Map<String, Value> = Category::ALL
            .iter()
            .zip(&self.by_category)
            .filter(|(_, bytes)| bytes.iter().any(|bytes| *bytes != 0))
            .map(|(name, bytes)| (category(*name).to_owned(), json!(bytes)))
            .collect();
        let phases: Vec<Value> = self
            .progress
            .phases
            .starts
            .iter()
            .map(|(ts, phase)| json!({ "ts_ns": ts, "phase": &*self.replayed.symbols.get(*phase) }))
            .collect();
        let sizes = first.inputs.sizes();
        let steps: Vec<Value> = self
            .progress
            .steps
            .steps
            .iter()
            .map(|step| {
                json!({ "step": step.numbers.0, "last_step": step.numbers.1, "from_ns": step.time_ns.0,
                        "to_ns": step.time_ns.1, "peak_bytes": step.high, "peak_ts_ns": step.high_ns,
                        "input_elements": sizes.most(step.numbers.0, step.numbers.1) })
            })
            .collect();
        json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "device": first.ordinal,
            "of": first.name(),
            "peak": first.replayed.moment(&first.moment()),
            "start_ns": self.grid.start_ns,
            "width_ns": self.grid.width_ns,
            "buckets": self.grid.buckets,
            "low_bytes": self.total.low,
            "high_bytes": self.total.high,
            "reserved_high_bytes": self.reserved.high,
            "by_category_bytes": categories,
            "phases": phases,
            "steps": steps,
            "ooms_ns": self.ooms,
        })
    }
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::*;
    use crate::reports::{answer, find};
    use crate::state::replay::CPU;
    use crate::testing::TraceBuilder;

    #[test]
    fn the_bands_of_a_trace_without_a_gpu_are_its_cpu_tensors() {
        let mut trace = TraceBuilder::default();
        let row = Row { device: CPU, category: Category::Gradient, ..Row::default() };
        let alloc = Row { event: EventName::HostAlloc, alloc_id: 2, delta_bytes: 4096, ..row };
        trace.change(alloc, [4096; 3]);
        trace.change(Row { alloc_id: 3, delta_bytes: 512, ..alloc }, [512; 3]);
        trace.change(Row { event: EventName::HostFree, delta_bytes: -4096, ..alloc }, [-4096; 3]);
        let folder =
            std::env::temp_dir().join(format!("memtrace-timeline-{:?}", std::thread::current().id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("a.csv"), trace.finish()).unwrap();
        let input = Input::open(&folder).unwrap();
        let mut options = Options::default();
        options.values.insert(BY.name, "category".to_owned());
        let json = answer(find("timeline").unwrap(), &[input], &options).unwrap().json;
        std::fs::remove_dir_all(&folder).unwrap();
        let bands = json["by_category_bytes"].as_object().unwrap();
        assert_eq!(bands.len(), 1, "{bands:?}");
        let bytes: Vec<i64> =
            bands["gradient"].as_array().unwrap().iter().map(|bytes| bytes.as_i64().unwrap()).collect();
        assert_eq!(bytes.iter().max(), Some(&4608), "{bytes:?}");
        assert_eq!(bytes.last(), Some(&512), "{bytes:?}");
    }
}
