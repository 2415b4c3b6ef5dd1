//! The export `plots`: figures as SVG and PNG. These are the four figures of PyTorch's `MemoryTracker`, with
//! its marker lines, and the stacked timeline of `torch.profiler`, with its eight colors and its title.

use std::io::Write;

use super::downsample::{DownsampledCurve, Point};
use super::export::{Export, Job, OutputKind, trace_stem};
use super::picture::{Axis, COLUMNS, Figure, png};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::{Profile, ProfilerCategory, flow_categories, profile_and_flow};
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::state::op_calls::{self, MB, OpCalls};
use crate::state::replay::{Metric, Totals};
use crate::state::replay_trace::{Replayed, replay_trace};

/// The export `--to plots`.
pub(super) struct Plots;

const IMAGE: Flag = Flag {
    name: "image",
    value: Some("FORMAT"),
    default: "both",
    choices: &["svg", "png", "both"],
    help: "Write the pictures in this format",
};

const GIB: f64 = 1_073_741_824.0;

/// If a figure has more markers of one kind than this, only the last of them is drawn, as in `MemoryTracker`.
const MOST_MARKERS: usize = 24;

/// A line of a figure: its name and color in `MemoryTracker`, the name of the file that shows only this line,
/// and the function that returns the total.
type FigureLine = (&'static str, &'static str, &'static str, fn(&Totals) -> i64);
const LINES: [FigureLine; 3] = [
    ("allocated_memory", "#1f77b4", "allocated", |totals| totals.allocated),
    ("active_memory", "#ff7f0e", "active", |totals| totals.active),
    ("reserved_memory", "#2ca02c", "reserved", |totals| totals.reserved),
];

impl Export for Plots {
    fn name(&self) -> &'static str {
        "plots"
    }

    fn about(&self) -> &'static str {
        "Pictures: MemoryTracker's four figures, and memory by the profiler's categories, as SVG and PNG"
    }

    fn flags(&self) -> &'static [Flag] {
        &[IMAGE]
    }

    fn takes_host(&self) -> bool {
        true
    }

    fn output_kind(&self, _: &Options) -> OutputKind {
        OutputKind::Folder(".plots")
    }

    fn open_with(&self) -> &'static str {
        "any picture viewer: FOLDER"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        for trace in &job.input.traces {
            let prefix = match job.input.traces.len() {
                1 => String::new(),
                _ => format!("{}.", trace_stem(&trace.path)),
            };
            self.op_calls(job, trace, &prefix)?;
            self.categories(job, trace, &prefix)?;
        }
        Ok(())
    }
}

impl Plots {
    /// Writes `MemoryTracker`'s figures: one with all three totals over the op calls, and one for each total.
    fn op_calls(&self, job: &mut Job<'_>, trace: &TraceFile, prefix: &str) -> Result<()> {
        let mut calls = OpCalls::new(job.options.device);
        let curve = || DownsampledCurve::new(COLUMNS);
        let mut curves = [curve(), curve(), curve()];
        let replayed = replay_trace(
            trace,
            op_calls::COLUMNS,
            job.options,
            Metric::Allocated,
            flow_categories(trace, job.options)?,
            |row, replay| {
                if !replay.in_window() {
                    return;
                }
                let Some(call) = calls.feed(row, replay) else { return };
                for (curve, (.., total)) in curves.iter_mut().zip(LINES) {
                    if call.index == 0 {
                        *curve = DownsampledCurve::new(COLUMNS);
                    }
                    let value = total(&call.totals);
                    curve.add(Point { at: call.index as i64, low: value, high: value });
                }
            },
        )?;
        job.add_to_footer(trace, &replayed);
        if calls.count == 0 {
            job.footer.notes.push(
                "no op in the trace, so no figure over op calls: trace with MEMTRACE_OPS=top or all"
                    .to_owned(),
            );
            return Ok(());
        }
        let lines: Vec<Vec<(f64, f64)>> = curves
            .iter()
            .map(|curve| {
                curve.points().iter().map(|point| (point.at as f64, point.low as f64 / MB)).collect()
            })
            .collect();
        let title = title(trace);
        let all = [0, 1, 2];
        for (name, shown) in
            [("memory", &all[..]), (LINES[0].2, &all[..1]), (LINES[1].2, &all[1..2]), (LINES[2].2, &all[2..])]
        {
            let values = || shown.iter().flat_map(|line| &lines[*line]).map(|point| point.1);
            let (low, high) = (values().fold(f64::MAX, f64::min), values().fold(f64::MIN, f64::max));
            let x = Axis { label: "# Operator Calls".to_owned(), range: (0.0, calls.count as f64) };
            let room = (high - low) * 0.04;
            let range = ((low - room).max(0.0), high + room);
            let y = Axis { label: "Memory (MiB)".to_owned(), range };
            let mut figure = Figure::new(std::slice::from_ref(&title), x, y);
            // The allocated and the active total differ only while a stream still uses freed memory. The
            // active line is dashed, so that both lines are visible where they coincide.
            for line in shown {
                let (label, color, ..) = LINES[*line];
                figure.line(&lines[*line], color, shown.len() > 1 && *line == 1, label);
            }
            for (label, color, at) in
                [("fw_start", "black", &calls.fw_start), ("fw_bw_boundary", "red", &calls.fw_bw_boundary)]
            {
                let from = if at.len() > MOST_MARKERS { at.len() - 1 } else { 0 };
                let at: Vec<f64> = at[from..].iter().map(|index| *index as f64).collect();
                figure.markers(&at, color, label);
            }
            save(job, &format!("{prefix}{name}"), &figure)?;
        }
        Ok(())
    }

    /// Writes the profiler's stacked timeline of each GPU.
    fn categories(&self, job: &mut Job<'_>, trace: &TraceFile, prefix: &str) -> Result<()> {
        let (profile, flow) = profile_and_flow(trace, job.options)?;
        let replayed =
            replay_trace(trace, Columns::of(&[]), job.options, Metric::Allocated, flow, |_, _| {})?;
        let devices: Vec<i32> = replayed.gpus(job.options).map(|device| device.ordinal).collect();
        for device in &devices {
            if profile.actions(*device).next().is_none() {
                continue;
            }
            let name = match devices.len() {
                1 => format!("{prefix}categories"),
                _ => format!("{prefix}categories-gpu{device}"),
            };
            let figure = categories(&profile, *device, &maxima(&replayed, *device));
            save(job, &name, &figure)?;
        }
        Ok(())
    }
}

/// Returns the title of a figure, which names the program and, in a job of several ranks, the rank.
fn title(trace: &TraceFile) -> String {
    let base = |word: &String| word.rsplit('/').next().unwrap_or(word).to_owned();
    let words: Vec<String> = trace.meta.argv.iter().map(base).collect();
    let words = words.join(" ");
    let mut title: String = words.chars().take(80).collect();
    if title.len() < words.len() {
        title.push('…');
    }
    if trace.meta.world_size > 1 {
        title.push_str(&format!("  rank {}", trace.meta.rank));
    }
    title
}

/// Returns the two lines of the profiler's title: the peaks of allocated and of reserved memory on `device`.
pub(super) fn maxima(replayed: &Replayed, device: i32) -> Vec<String> {
    let peak =
        |metric| replayed.replay.find(device).map_or(0, |device| device.peak(metric).bytes) as f64 / GIB;
    vec![
        format!("Max memory allocated: {:.2} GiB", peak(Metric::Allocated)),
        format!("Max memory reserved: {:.2} GiB", peak(Metric::Reserved)),
    ]
}

/// Draws the stacked timeline. Each pixel column shows the moment with the most allocated memory in the
/// column's range of time.
pub(super) fn categories(profile: &Profile, device: i32, title: &[String]) -> Figure {
    let times = || profile.timeline(device).map(|(time, _)| time);
    let first = times().next().unwrap_or(0);
    let span = times().last().map_or(1, |last| last.saturating_sub(first)).max(1);
    let total = |column: &[i64; 8]| column.iter().map(|bytes| *bytes as f64 / GIB).sum::<f64>();
    let mut columns: Vec<[i64; 8]> = vec![[0; 8]; COLUMNS];
    let mut filled = 0;
    let mut now = [0; 8];
    for (time, row) in profile.timeline(device) {
        let place = time.saturating_sub(first) as f64 / span as f64 * (COLUMNS - 1) as f64;
        let place = (place as usize).min(COLUMNS - 1);
        while filled <= place {
            // Fill the columns since the previous change, because memory is constant between two changes.
            columns[filled] = now;
            filled += 1;
        }
        now.copy_from_slice(&row[1..]);
        if total(&now) > total(&columns[place]) {
            columns[place] = now;
        }
    }
    columns[filled..].fill(now);
    let highest = columns.iter().map(total).fold(0.0, f64::max);
    let milliseconds = span as f64 / 1e3;
    let x = Axis { label: "Time (ms)".to_owned(), range: (0.0, milliseconds) };
    let y = Axis { label: "Memory (GiB)".to_owned(), range: (0.0, highest * 1.03) };
    let mut figure = Figure::new(title, x, y);
    // Memory is constant between two changes, so two points per change draw the steps.
    let at = |index: usize| index as f64 / COLUMNS as f64 * milliseconds;
    let steps = |heights: &[f64]| -> Vec<(f64, f64)> {
        let mut points = Vec::new();
        let mut index = 0;
        for same in heights.chunk_by(|a, b| a == b) {
            points.push((at(index), same[0]));
            index += same.len();
            points.push((at(index), same[0]));
        }
        points
    };
    let mut base = vec![0.0; COLUMNS];
    for category in ProfilerCategory::ALL {
        let lower = steps(&base);
        for (height, column) in base.iter_mut().zip(&columns) {
            *height += column[category as usize] as f64 / GIB;
        }
        figure.area(&lower, &steps(&base), category.color(), category.name());
    }
    figure
}

/// Writes a figure in the requested formats.
fn save(job: &mut Job<'_>, name: &str, figure: &Figure) -> Result<()> {
    let svg = figure.svg();
    let image = job.options.text(IMAGE.name);
    if image != "png" {
        let mut out = job.create_at(&job.place.join(format!("{name}.svg")))?;
        out.write_all(svg.as_bytes()).ok();
        job.finish_file(out, "a figure")?;
    }
    if image != "svg" {
        let path = job.place.join(format!("{name}.png"));
        let bytes = png(&svg).map_err(|why| {
            let source = std::io::Error::other(why);
            memtrace_trace::Error::Io { path: path.clone(), source }
        })?;
        let mut out = job.create_at(&path)?;
        out.write_all(&bytes).ok();
        job.finish_file(out, "a figure")?;
    }
    Ok(())
}
