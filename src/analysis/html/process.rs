//! One process of a page: the first reading of its trace finds the peaks, the second fills its tracks.

use memtrace_trace::EventName;
use serde_json::{Value, json};

use super::advice::{CURVE, TraceAdvice};
use super::blocks::{BlockSelection, SizeHistogram};
use super::groups;
use super::host;
use super::modules::ModuleCut;
use super::pack::Pack;
use super::strings::Strings;
use super::track::{Track, TrackPlan};
use crate::error::Result;
use crate::options::Options;
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::{Columns, is_counted};
use crate::read::stream::TraceFile;
use crate::render::process_names::rank_or_name;
use crate::reports::{RunVictims, oom_for_page};
use crate::state::categories::KnownCategories;
use crate::state::group::{Key, layers_of, sorted};
use crate::state::host_memory::{HostMemory, SAMPLE};
use crate::state::last_oom::LastOom;
use crate::state::module_layers::Layers;
use crate::state::replay::{self, Block, CPU, HOST, Metric, is_gpu};
use crate::state::replay_trace::{Replayed, read_by_metric, replay_rows, replay_rows_knowing};
use crate::state::retained::{self, RetainedSearch, RetainedSearches};
use crate::state::series::TimeGrid;
use crate::whatif::{self, Change, Contents};

/// The results of the first reading of a trace.
pub(super) struct FirstReading {
    pub(super) replayed: Replayed,
    metric: Metric,
    sizes: Vec<(i32, SizeHistogram)>,
    /// The last OOM of each device.
    ooms: Vec<(i32, Option<LastOom>)>,
    /// The time span of the window, in ns since the start of the trace.
    time_ns: (i64, i64),
    /// The number of rows in the window.
    rows: u64,
    /// The changes that could lower a peak.
    changes: Vec<Change>,
    retained: RetainedSearches,
    /// The samples of host memory of the whole trace.
    host: HostMemory,
}

impl FirstReading {
    pub(super) fn read(trace: &TraceFile, options: &Options) -> Result<FirstReading> {
        let flow = flow_categories(trace, options)?;
        let has_peak = |device: &replay::Device| device.peak(Metric::Allocated).bytes != 0;
        read_by_metric(
            |metric| FirstReading::read_for(trace, options, metric, flow.clone()),
            |first| first.replayed.gpus(options).any(has_peak) || first.host_device(options).is_some(),
        )
    }

    fn read_for(
        trace: &TraceFile,
        options: &Options,
        metric: Metric,
        flow: KnownCategories,
    ) -> Result<FirstReading> {
        let mut sizes: Vec<(i32, SizeHistogram)> = Vec::new();
        let mut ooms: Vec<(i32, Option<LastOom>)> = Vec::new();
        let mut time: Option<(i64, i64)> = None;
        let mut rows = 0;
        let mut contents = Contents::new(trace);
        let mut retained = RetainedSearches::default();
        let mut host: Option<HostMemory> = None;
        let wanted = replay::COLUMNS
            .and(Columns::of(&["ts_ns"]))
            .plus(EventName::RangeBegin, Columns::of(&["tid", "api", "name"]))
            .plus(EventName::RangeEnd, Columns::of(&["tid", "api", "name"]))
            .plus(EventName::Mark, retained::MARK_COLUMNS)
            .plus(EventName::Sample, SAMPLE);
        let replayed = replay_rows_knowing(trace, wanted, options, metric, flow, |row, replay| {
            contents.feed(row, &replay.symbols);
            retained.feed_row(row, &replay.symbols);
            host.get_or_insert_with(|| HostMemory::new(&replay.symbols)).feed(row);
            let counts = row.event == EventName::Alloc
                || row.event == EventName::Live
                || row.event == EventName::HostAlloc
                || row.event == EventName::ExtAlloc && metric == Metric::Used;
            if replay.in_window() {
                match time {
                    // The window counts the blocks that are live after its first row, then each block allocated
                    // later in it.
                    None => {
                        let live = replay.live().values();
                        for block in live.filter(|block| is_counted(block.kind, block.device, metric)) {
                            of_device(&mut sizes, block.device).add(block.bytes);
                        }
                    }
                    Some(_) if counts => of_device(&mut sizes, row.device).add(row.delta_bytes),
                    Some(_) => {}
                }
                rows += 1;
                let (start, _) = time.unwrap_or((replay.ts_ns, replay.ts_ns));
                time = Some((start, replay.ts_ns));
            }
            if row.event == EventName::Oom && replay.in_window() {
                *of_device(&mut ooms, row.device) = Some(LastOom::new(row));
            } else if !ooms.is_empty()
                && let Some(freed) = replay.freed()
                && let Some(oom) = of_device(&mut ooms, freed.device)
            {
                oom.feed(replay);
            }
        })?;
        // Without a window, the page starts at time 0, even if the first row is later.
        let whole = options.window == replay::Window::default();
        let (start, end) = time.unwrap_or((0, 0));
        let time_ns = (if whole { start.min(0) } else { start }, end);
        // The changes apply to torch's allocations, so a program without torch gets no advice.
        let changes =
            if metric == Metric::Allocated { contents.candidates(&replayed.symbols) } else { Vec::new() };
        let host = host.unwrap_or_default();
        Ok(FirstReading { replayed, metric, sizes, ooms, time_ns, rows, changes, retained, host })
    }

    /// Returns the device whose memory on the host the page shows: the one that `--device` selects or, if the
    /// program used no GPU, the CPU tensors or the pinned memory. Returns `None` if the page shows GPUs.
    fn host_device(&self, options: &Options) -> Option<i32> {
        let has_peak = |device: &replay::Device, metric| device.peak(metric).bytes > 0;
        let is_used =
            |device: &replay::Device| has_peak(device, Metric::Used) || has_peak(device, Metric::Allocated);
        let known = |ordinal| self.replayed.replay.find(ordinal).is_some();
        match options.device {
            Some(only) if is_gpu(only) => None,
            None if self.replayed.gpus(options).any(is_used) => None,
            Some(CPU) | None if known(CPU) => Some(CPU),
            _ => (known(HOST) || !self.host.quick.is_empty()).then_some(HOST),
        }
    }

    /// Returns the GPUs that were used, the highest peak first. If the page shows host memory, returns only
    /// the host.
    pub(super) fn devices(&self, options: &Options) -> Vec<(i32, Metric)> {
        if let Some(ordinal) = self.host_device(options) {
            return vec![(ordinal, Metric::Allocated)];
        }
        let mut used: Vec<&replay::Device> = self
            .replayed
            .gpus(options)
            .filter(|device| device.peak(Metric::Used).bytes > 0 || device.peak(self.metric).bytes > 0)
            .collect();
        used.sort_by_key(|device| (-device.peak(self.metric).bytes, device.ordinal));
        used.into_iter().map(|device| (device.ordinal, self.metric)).collect()
    }

    fn last_oom(&self, ordinal: i32) -> Option<&LastOom> {
        self.ooms.iter().find(|oom| oom.0 == ordinal)?.1.as_ref()
    }

    /// Returns the last OOM, the peak and its largest categories, in one line.
    pub(super) fn headline(&self, trace: &TraceFile, options: &Options) -> String {
        let Some((ordinal, metric)) = self.devices(options).first().copied() else {
            return "No GPU memory was used.".to_owned();
        };
        if !is_gpu(ordinal) {
            let peak = self.host.peak_rss();
            return match peak {
                0.. => format!("Host memory: peak {} resident", options.units.show(peak)),
                _ => "Host memory".to_owned(),
            };
        }
        let Some(device) = self.replayed.replay.find(ordinal) else { return String::new() };
        let (peak, symbols) = (device.peak(metric), &self.replayed.symbols);
        let mut line = String::new();
        if let Some(LastOom { owner, .. }) = self.last_oom(ordinal) {
            let place = owner.place(&[owner.phase, owner.module, owner.op], symbols);
            line.push_str(&format!("Out of memory{place}. "));
        }
        line.push_str(&format!("Peak {}", options.units.show(peak.bytes)));
        let capacity = trace.meta.total_bytes(ordinal);
        if capacity > 0 {
            line.push_str(&format!(" of {}", options.units.show(capacity)));
        }
        line.push_str(&peak.owner.place(&[peak.owner.phase, peak.owner.module], symbols));
        let blocks = self.replayed.replay.at_peak(ordinal, false);
        let groups = sorted(Key::CATEGORY.groups(&blocks, symbols));
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

    /// Returns the holders of memory from earlier steps: the moment of the search, a line for each holder,
    /// and the reason if the search was incomplete. Null if there was no search or it found nothing.
    fn retained(&self, options: &Options) -> Value {
        let has_oom = !self.ooms.is_empty();
        let search = if has_oom { self.retained.at_oom() } else { self.retained.to_report() };
        let lines = |search: &RetainedSearch| -> Vec<String> {
            search.retained().map(|holder| holder.line(options.units)).collect()
        };
        let found = search.map(|search| (search, lines(search))).filter(|(_, lines)| !lines.is_empty());
        found.map_or(
            Value::Null,
            |(search, lines)| json!({ "moment": search.moment(), "lines": lines, "gap": search.gap() }),
        )
    }

    /// Returns what the page says about a device: the process, the card, the peaks and counts, and the live memory at
    /// the peak and at the OOM.
    fn about(
        &self,
        trace: &TraceFile,
        device: &replay::Device,
        layers: &Layers,
        at_peak: &[Block],
        at_oom: Option<&[Block]>,
        allocations: u64,
    ) -> Value {
        let host = self.replayed.replay.find(HOST);
        let pinned_peak = host.map_or(0, |host| host.peak(Metric::Allocated).bytes);
        json!({
            "rank": trace.meta.rank,
            "world_size": trace.meta.world_size,
            "host": trace.meta.host,
            "file": trace.path.display().to_string(),
            "argv": trace.meta.argv,
            "versions": trace.meta.versions,
            "start_unix_ns": trace.meta.start_unix_ns,
            "allocator": trace.meta.allocator.conf,
            "phantom": !trace.meta.phantom.is_null(),
            "gpu": trace.meta.device(device.ordinal).map_or("", |card| card.name.as_str()),
            "capacity": trace.meta.total_bytes(device.ordinal),
            "peak_allocated": self.replayed.moment(device.peak(Metric::Allocated)),
            "peak_reserved": self.replayed.moment(device.peak(Metric::Reserved)),
            "used_name": device.name_of(Metric::Used),
            "peak_used": self.replayed.moment(device.peak(Metric::Used)),
            "layers": layers.levels().collect::<Vec<_>>(),
            "at_peak": groups::json(at_peak, &self.replayed.replay),
            "at_oom": at_oom.map(|blocks| groups::json(blocks, &self.replayed.replay)),
            "allocations": allocations,
            "rows": self.rows,
            "duration_ns": self.time_ns.1 - self.time_ns.0,
            "finished": !self.replayed.replay.problems.unfinished,
            "lost": self.replayed.replay.counts.lost,
            "pinned_peak": pinned_peak,
        })
    }

    /// Reads the trace, which is one of `input`, a second time, and fills a track for each device that was used. `size`
    /// returns the number of time buckets and the maximum number of allocations for a device.
    pub(super) fn second_reading(
        self,
        (trace, input): (&TraceFile, &Input),
        victims: &RunVictims<'_>,
        options: &Options,
        size: impl Fn(i32) -> (usize, usize),
        pack: &mut Pack,
        strings: &mut Strings,
    ) -> Result<Vec<Value>> {
        let mut tracks = Vec::new();
        let mut about = Vec::new();
        let retained = self.retained(options);
        let verdict = if self.ooms.is_empty() { Value::Null } else { oom_for_page(trace, options)? };
        let host_memory = host::timeline(&self.host, self.time_ns, pack);
        let killed = host::killed(trace, &self.host, victims, options)?;
        for (ordinal, metric) in self.devices(options) {
            // If the trace has only the kernel's samples of host memory, the replay has no entry for the
            // host.
            let mut without_blocks = replay::Device::default();
            without_blocks.ordinal = ordinal;
            let device = self.replayed.replay.find(ordinal).unwrap_or(&without_blocks);
            let verdict = Some(&verdict).filter(|verdict| verdict["device"] == ordinal);
            let at_peak = self.replayed.replay.at_peak(ordinal, false);
            let (buckets, most) = size(ordinal);
            let layers = layers_of(&self.replayed.replay, &at_peak);
            let modules = sorted(Key::MODULE.joining(&layers).groups(&at_peak, &self.replayed.symbols));
            let modules: Vec<_> = modules.into_iter().map(|(name, group)| (name, group.bytes)).collect();
            let none = SizeHistogram::default();
            let sizes = self.sizes.iter().find(|sizes| sizes.0 == ordinal).map_or(&none, |(_, sizes)| sizes);
            let oom = self.last_oom(ordinal);
            let at_oom = oom.map(|oom| oom.blocks(&self.replayed.replay, ordinal));
            let oom = oom.map_or(0, |oom| oom.seq);
            let mut text = self.about(trace, device, &layers, &at_peak, at_oom.as_deref(), sizes.count);
            text["process"] = rank_or_name(trace, input).into();
            text["retained"] = retained.clone();
            text["verdict"] = verdict.cloned().into();
            text["host_memory"] = host_memory.clone();
            text["killed"] = killed.clone();
            about.push(text);
            tracks.push(Track::new(TrackPlan {
                ordinal,
                metric,
                grid: TimeGrid::new(self.time_ns.0, self.time_ns.1, buckets),
                moments: vec![device.peak(metric).seq, oom],
                peak_ns: device.peak(metric).ts_ns,
                module_cut: ModuleCut::new(&modules, layers),
                selection: BlockSelection::new(sizes, &at_peak, &at_oom.unwrap_or_default(), most),
            }));
        }
        // The first replay is no longer needed. Dropping it frees its memory before the second reading.
        drop(self.replayed);
        // Advice is given for GPUs only.
        let changes =
            if tracks.iter().all(|track| !is_gpu(track.ordinal())) { Vec::new() } else { self.changes };
        let lists: Vec<Vec<Change>> = changes.into_iter().map(|change| vec![change]).collect();
        let grids = tracks.iter().map(|track| (track.ordinal(), track.grid()));
        let mut advice = TraceAdvice::new(trace, options, &lists, grids);
        let wanted = replay::COLUMNS
            .and(Columns::of(&["ts_ns"]))
            .plus(EventName::Alloc, BLOCK)
            .plus(EventName::Live, BLOCK)
            .plus(EventName::ExtAlloc, BLOCK)
            .plus(EventName::HostAlloc, BLOCK)
            .plus(EventName::Oom, BLOCK)
            .plus(EventName::SegmentAlloc, SEGMENT)
            .plus(EventName::SegmentFree, SEGMENT)
            .plus(EventName::SegmentMap, SEGMENT)
            .plus(EventName::SegmentUnmap, SEGMENT)
            .plus(EventName::Sample, SEGMENT.and(Columns::of(&["device"])));
        let wanted = if advice.is_some() { whatif::with_columns(wanted) } else { wanted };
        let replayed = replay_rows(trace, wanted, options, self.metric, |row, replay| {
            if let Some(advice) = &mut advice {
                advice.predictor().feed(row, replay);
            }
            for track in &mut tracks {
                if track.ordinal() == row.device {
                    track.feed(row, replay);
                }
                track.progress(row, replay);
            }
        })?;
        let advice = advice.map(|advice| advice.finish(&replayed)).transpose();
        let finished = tracks.into_iter().zip(about).map(|(track, mut about)| {
            match &advice {
                Ok(Some(found)) => about["advice"] = found.json(track.ordinal(), &replayed, pack).into(),
                Ok(None) => {}
                Err(why) => about["no_advice_because"] = why.to_string().into(),
            }
            about["advice_each"] = CURVE.into();
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
