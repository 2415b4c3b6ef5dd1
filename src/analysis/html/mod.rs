//! `memtrace report`: the report page, one file that opens from disk and asks nothing of any network.
//!
//! A trace is read twice. The first reading finds the peaks, the time that the page covers and which
//! sizes are among the largest; the second fills what the page draws: minimum and maximum of each total
//! in 131,072 pieces of time, whose bytes they were, the largest allocations, the rows around the peak
//! and the OOM. All of that is bounded, whatever the trace's length.

mod blocks;
mod groups;
mod modules;
mod pack;
mod strings;
mod track;

use std::io::{self, Write};

use memtrace_trace::EventName;
use serde_json::{Value, json};

use crate::error::Result;
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Columns;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::state::categories::FlowCategories;
use crate::state::group::Key;
use crate::state::replay::{self, HOST, Metric};
use crate::state::replay_trace::{Replayed, replay_rows, replay_trace};
use crate::state::series::Grid;
use blocks::{Keeper, Sizes};
use modules::Cut;
use pack::Pack;
use strings::Strings;
use track::{Plan, Track};

/// Pieces of time of the fullest device; the others share as many.
const BUCKETS: usize = 131_072;
/// The fewest that a device gets, however many there are.
const FEWEST_BUCKETS: usize = 2048;

const HTML: &str = include_str!("page.html");
const CSS: &str = include_str!("page.css");
/// The page's program, in the order in which the parts are put together.
const SCRIPTS: &[&str] = &[
    include_str!("js/data.js"),
    include_str!("js/format.js"),
    include_str!("js/colours.js"),
    include_str!("js/state.js"),
    include_str!("js/headline.js"),
    include_str!("js/timeline.js"),
    include_str!("js/input.js"),
    include_str!("js/live.js"),
    include_str!("js/segments.js"),
    include_str!("js/charts.js"),
    include_str!("js/steps.js"),
    include_str!("js/histograms.js"),
    include_str!("js/ranks.js"),
    include_str!("js/compare.js"),
    include_str!("js/main.js"),
];

/// The page of one run, or of two that are compared.
pub struct Report {
    about: Value,
    pack: Pack,
    title: String,
    headline: String,
}

impl Report {
    /// Reads the traces of `runs`.
    ///
    /// # Errors
    /// When a trace cannot be read.
    pub fn of(runs: &[Input], options: &Options) -> Result<Report> {
        let (mut pack, mut strings) = (Pack::default(), Strings::default());
        let mut firsts = Vec::new();
        for run in runs {
            let mut footer = Footer::new(run);
            let mut processes = Vec::new();
            for trace in &run.traces {
                let first = First::read(trace, options)?;
                footer.add(
                    trace,
                    &first.replayed,
                    first.devices(options).first().map(|(ordinal, _)| *ordinal),
                );
                footer.note_inference(&first.replayed);
                processes.push((trace, first));
            }
            firsts.push((run, footer, processes));
        }
        let tracks: usize =
            firsts.iter().flat_map(|(_, _, all)| all).map(|(_, first)| first.devices(options).len()).sum();
        let fullest = fullest(&firsts, options);
        let mut all = Vec::new();
        let mut headline = String::new();
        for (number, (run, footer, processes)) in firsts.into_iter().enumerate() {
            let mut json = Vec::new();
            for (trace, first) in processes {
                let whole = fullest.as_ref().is_some_and(|(path, _)| *path == trace.path);
                if whole && number == 0 || headline.is_empty() {
                    headline = first.headline(trace, options);
                }
                let others = (BUCKETS / tracks.max(1)).clamp(FEWEST_BUCKETS, BUCKETS / 4);
                let kept = (blocks::MOST / tracks.max(1)).max(500);
                let size = |ordinal| {
                    let whole =
                        fullest.as_ref().is_some_and(|(path, o)| *path == trace.path && *o == ordinal);
                    if whole { (BUCKETS, blocks::MOST) } else { (others, kept) }
                };
                json.extend(first.read_again(trace, options, size, &mut pack, &mut strings)?);
            }
            all.push(json!({
                "path": run.path.display().to_string(),
                "lost": footer.lost,
                "unattributed_share": footer.unattributed_share(),
                "unattributed_share_ever": footer.unattributed_share_ever(),
                "notes": footer.notes,
                "tracks": json,
            }));
        }
        let about = json!({
            "memtrace": env!("CARGO_PKG_VERSION"),
            "strings": strings.names,
            "categories": memtrace_trace::Category::ALL.iter().map(|c| crate::state::group::category(*c)).collect::<Vec<_>>(),
            "runs": all,
        });
        let title = runs.first().map_or(String::new(), |run| run.path.display().to_string());
        Ok(Report { about, pack, title, headline })
    }

    /// One line: the peak and who holds it.
    #[must_use]
    pub fn headline(&self) -> &str {
        &self.headline
    }

    /// Writes the file.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        // The page is cut at its places: what a trace says is never looked at for places.
        let mut rest = HTML;
        while let Some((before, after)) = rest.split_once("<!--{") {
            out.write_all(before.as_bytes())?;
            let (place, after) = after.split_once("}-->").unwrap_or((after, ""));
            match place {
                "title" => out.write_all(escaped(&self.title).as_bytes())?,
                "headline" => out.write_all(escaped(&self.headline).as_bytes())?,
                "style" => out.write_all(CSS.as_bytes())?,
                "data" => self.pack.write(&self.about, out)?,
                "script" => {
                    for script in SCRIPTS {
                        out.write_all(script.as_bytes())?;
                    }
                }
                other => unreachable!("page.html has a place {other:?} that nobody fills"),
            }
            rest = after;
        }
        out.write_all(rest.as_bytes())
    }
}

/// Text for HTML.
fn escaped(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

type Processes<'a> = Vec<(&'a Input, Footer, Vec<(&'a TraceFile, First)>)>;

/// The file and the device with the highest peak of the first run.
fn fullest(firsts: &Processes<'_>, options: &Options) -> Option<(std::path::PathBuf, i32)> {
    let (_, _, processes) = firsts.first()?;
    let mut best: Option<(i64, &TraceFile, i32)> = None;
    for (trace, first) in processes {
        for (ordinal, metric) in first.devices(options) {
            let peak = first.replayed.replay.find(ordinal).map_or(0, |device| device.peak(metric).bytes);
            if best.is_none_or(|(highest, ..)| peak > highest) {
                best = Some((peak, trace, ordinal));
            }
        }
    }
    best.map(|(_, trace, ordinal)| (trace.path.clone(), ordinal))
}

/// What the first reading of a process tells.
struct First {
    replayed: Replayed,
    metric: Metric,
    sizes: Vec<(i32, Sizes)>,
    /// The last OOM of each device, by `seq`.
    ooms: Vec<(i32, i64)>,
    /// The time that the window covers.
    time_ns: (i64, i64),
}

impl First {
    fn read(trace: &TraceFile, options: &Options) -> Result<First> {
        let flow = flow_categories(trace, options)?;
        let first = First::read_for(trace, options, Metric::Allocated, flow.clone())?;
        // A program without torch: everything that it holds is outside torch's allocator.
        let none = |device: &replay::Device| device.peak(Metric::Allocated).bytes == 0;
        if first.replayed.gpus(options).all(none) {
            return First::read_for(trace, options, Metric::Used, flow);
        }
        Ok(first)
    }

    fn read_for(trace: &TraceFile, options: &Options, metric: Metric, flow: FlowCategories) -> Result<First> {
        let mut sizes: Vec<(i32, Sizes)> = Vec::new();
        let mut ooms: Vec<(i32, i64)> = Vec::new();
        let mut time: Option<(i64, i64)> = None;
        let replayed = replay_trace(trace, Columns::of(&[]), options, metric, flow, |row, replay| {
            if replay.in_window() {
                let (start, _) = *time.get_or_insert((replay.ts_ns, replay.ts_ns));
                time = Some((start, replay.ts_ns));
            }
            let counts = row.event == EventName::Alloc
                || row.event == EventName::Live
                || row.event == EventName::ExtAlloc && metric == Metric::Used;
            if counts {
                of_device(&mut sizes, row.device).add(row.delta_bytes);
            } else if row.event == EventName::Oom && replay.in_window() {
                *of_device(&mut ooms, row.device) = row.seq;
            }
        })?;
        // A whole trace begins with its clock.
        let whole = options.window == replay::Window::default();
        let (start, end) = time.unwrap_or((0, 0));
        let time_ns = (if whole { start.min(0) } else { start }, end);
        Ok(First { replayed, metric, sizes, ooms, time_ns })
    }

    /// The GPUs that were used, the fullest first.
    fn devices(&self, options: &Options) -> Vec<(i32, Metric)> {
        let mut used: Vec<&replay::Device> = self
            .replayed
            .gpus(options)
            .filter(|device| device.peak(Metric::Used).bytes > 0 || device.peak(self.metric).bytes > 0)
            .collect();
        used.sort_by_key(|device| (-device.peak(self.metric).bytes, device.ordinal));
        used.into_iter().map(|device| (device.ordinal, self.metric)).collect()
    }

    /// The peak and who holds it, in one line.
    fn headline(&self, trace: &TraceFile, options: &Options) -> String {
        let Some((ordinal, metric)) = self.devices(options).first().copied() else {
            return "No GPU memory was used.".to_owned();
        };
        let Some(device) = self.replayed.replay.find(ordinal) else { return String::new() };
        let peak = device.peak(metric);
        let mut line = format!("Peak {}", options.units.show(peak.bytes));
        let capacity = trace.meta.total_bytes(ordinal);
        if capacity > 0 {
            line.push_str(&format!(" of {}", options.units.show(capacity)));
        }
        if peak.owner.step >= 0 {
            line.push_str(&format!(", step {}", peak.owner.step));
        }
        for symbol in [peak.owner.phase, peak.owner.module] {
            if symbol != crate::read::symbols::Symbol::NONE {
                line.push_str(&format!(", {}", self.replayed.texts.get(symbol)));
            }
        }
        let blocks = self.replayed.replay.at_peak(ordinal, false);
        let groups = crate::state::group::sorted(Key::CATEGORY.groups(&blocks, &self.replayed.texts));
        let holders: Vec<String> = groups
            .iter()
            .take(3)
            .map(|(name, group)| format!("{name} {}", options.units.show(group.bytes)))
            .collect();
        if !holders.is_empty() {
            line.push_str(&format!(": {}", holders.join(", ")));
        }
        line
    }

    /// The second reading: a track for each device that was used. `size` says how many pieces of time and
    /// how many allocations a device gets.
    fn read_again(
        self,
        trace: &TraceFile,
        options: &Options,
        size: impl Fn(i32) -> (usize, usize),
        pack: &mut Pack,
        strings: &mut Strings,
    ) -> Result<Vec<Value>> {
        let mut tracks = Vec::new();
        let mut about = Vec::new();
        for (ordinal, metric) in self.devices(options) {
            let Some(device) = self.replayed.replay.find(ordinal) else { continue };
            let at_peak = self.replayed.replay.at_peak(ordinal, false);
            let (buckets, most) = size(ordinal);
            let modules = crate::state::group::sorted(Key::MODULE.groups(&at_peak, &self.replayed.texts));
            let modules: Vec<_> = modules.into_iter().map(|(name, group)| (name, group.bytes)).collect();
            let none = Sizes::default();
            let sizes = self.sizes.iter().find(|sizes| sizes.0 == ordinal).map_or(&none, |(_, sizes)| sizes);
            let oom = self.ooms.iter().find(|oom| oom.0 == ordinal).map_or(0, |(_, seq)| *seq);
            about.push(json!({
                "rank": trace.meta.rank,
                "world_size": trace.meta.world_size,
                "host": trace.meta.host,
                "file": trace.path.display().to_string(),
                "argv": trace.meta.argv,
                "versions": trace.meta.versions,
                "start_unix_ns": trace.meta.start_unix_ns,
                "allocator": trace.meta.allocator.conf,
                "phantom": !trace.meta.phantom.is_null(),
                "gpu": trace.meta.device(ordinal).map_or("", |card| card.name.as_str()),
                "capacity": trace.meta.total_bytes(ordinal),
                "peak_allocated": self.replayed.moment(device.peak(Metric::Allocated)),
                "peak_reserved": self.replayed.moment(device.peak(Metric::Reserved)),
                "peak_used": self.replayed.moment(device.peak(Metric::Used)),
                "at_peak": groups::json(&at_peak, &self.replayed.texts),
                "allocations": sizes.count,
                "rows": self.replayed.replay.counts.rows,
                "frees": self.replayed.replay.counts.of(EventName::Free),
                "segments_taken": self.replayed.replay.counts.of(EventName::SegmentAlloc)
                    + self.replayed.replay.counts.of(EventName::SegmentMap),
                "oom_count": self.replayed.replay.counts.of(EventName::Oom),
                "failed_count": self.replayed.replay.counts.failed,
                "duration_ns": self.replayed.replay.ts_ns,
                "finished": !self.replayed.replay.problems.unfinished,
                "lost": self.replayed.replay.counts.lost,
                "pinned_peak": self.replayed.replay.find(HOST).map_or(0, |host| host.peak(Metric::Allocated).bytes),
            }));
            tracks.push(Track::new(Plan {
                ordinal,
                metric,
                grid: Grid::new(self.time_ns.0, self.time_ns.1, buckets),
                capacity: trace.meta.total_bytes(ordinal),
                moments: vec![device.peak(metric).seq, oom],
                last_oom: oom,
                peak_ns: device.peak(metric).ts_ns,
                cut: Cut::new(&modules),
                keeper: Keeper::new(sizes, &at_peak, most),
            }));
        }
        // Only what is live is needed from here on.
        drop(self.replayed);
        let wanted = replay::COLUMNS
            .and(Columns::of(&["ts_ns"]))
            .plus(EventName::Alloc, BLOCK)
            .plus(EventName::Live, BLOCK)
            .plus(EventName::ExtAlloc, BLOCK)
            .plus(EventName::Oom, BLOCK)
            .plus(EventName::SegmentAlloc, SEGMENT)
            .plus(EventName::SegmentFree, SEGMENT)
            .plus(EventName::SegmentMap, SEGMENT)
            .plus(EventName::SegmentUnmap, SEGMENT)
            .plus(EventName::Sample, SEGMENT.and(Columns::of(&["device"])));
        let replayed = replay_rows(trace, wanted, options, self.metric, |row, replay| {
            for track in &mut tracks {
                if track.ordinal() == row.device {
                    track.feed(row, replay);
                }
                track.course(row, replay);
            }
        })?;
        let finished = tracks.into_iter().zip(about).map(|(track, mut about)| {
            if let (Value::Object(about), Value::Object(drawn)) =
                (&mut about, track.finish(&replayed, pack, strings))
            {
                about.extend(drawn);
            }
            about
        });
        Ok(finished.collect())
    }
}

const BLOCK: Columns = Columns::of(&["addr", "requested_bytes", "rounded_bytes", "stream", "pool"]);
const SEGMENT: Columns = Columns::of(&["addr", "requested_bytes", "device_free_bytes"]);

fn of_device<T: Default>(all: &mut Vec<(i32, T)>, ordinal: i32) -> &mut T {
    let at = match all.iter().position(|(device, _)| *device == ordinal) {
        Some(at) => at,
        None => {
            all.push((ordinal, T::default()));
            all.len() - 1
        }
    };
    &mut all[at].1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_in_a_text_can_leave_it() {
        assert_eq!(escaped("</script>\"'&"), "&lt;/script&gt;&quot;&#39;&amp;");
    }
}
