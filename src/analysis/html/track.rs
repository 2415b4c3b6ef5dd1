//! One device of one process in the page, collected in the second reading of its trace.

use memtrace_trace::memory::Effect;
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;
use serde_json::{Value, json};

use super::blocks::BlockSelection;
use super::modules::ModuleCut;
use super::pack::Pack;
use super::strings::Strings;
use crate::read::record::{Record, is_counted};
use crate::read::symbols::{NO_MODULE, NO_OP, NO_PHASE, Symbol};
use crate::reports::GrowthCurve;
use crate::state::block::is_unknown_form;
use crate::state::group::{NO_DTYPE, NO_SHAPE, category};
use crate::state::layout::is_segment;
use crate::state::levels::Levels;
use crate::state::progress::Progress;
use crate::state::replay::{CPU, MemoryKind, Metric, Replay, is_gpu};
use crate::state::replay_trace::Replayed;
use crate::state::series::{Series, TimeGrid};
use crate::state::stacked_series::StackedSeries;
use crate::state::step_inputs::LargestInput;

/// One bucket of the stacked curve covers this many time buckets of the lines.
const STACK: usize = 8;
/// The number of rows kept on each side of the peak and of the OOM.
const AROUND: i64 = 8192;
/// The maximum number of segment changes that are kept.
const MOST_MARKS: usize = 20_000;
/// The maximum number of OOMs, and of failed calls, that are kept: the first ones, and the last OOM. The page shows
/// each as a pin.
const MOST_PINS: usize = 500;

/// The results of the first reading that a track needs.
pub(super) struct TrackPlan {
    pub(super) ordinal: i32,
    pub(super) metric: Metric,
    pub(super) grid: TimeGrid,
    /// The `seq` of the rows of the peak and of the last OOM.
    pub(super) moments: Vec<i64>,
    /// The time of the peak.
    pub(super) peak_ns: i64,
    pub(super) module_cut: ModuleCut,
    pub(super) selection: BlockSelection,
}

/// The totals after every row near the peak and near the OOM.
#[derive(Default)]
struct DetailRows {
    ts_ns: Vec<i64>,
    allocated: Vec<i64>,
    reserved: Vec<i64>,
    /// Only if the track is about memory in use.
    used: Vec<i64>,
}

/// One device of one process.
pub(super) struct Track {
    plan: TrackPlan,
    allocated: Series,
    reserved: Series,
    used: Series,
    progress: Progress,
    stacked: StackedSeries,
    levels: Levels,
    detail: DetailRows,
    /// The number and bytes of the blocks that are freed in the window, by power of two of their lifetime in ns.
    lifetimes: Vec<(u64, i64)>,
    /// The number and bytes of the blocks that are allocated in the window, by power of two of their size in bytes.
    sizes: Vec<(u64, i64)>,
    ooms: Vec<Record>,
    /// The number of OOMs. `ooms` has at most [`MOST_PINS`] of them.
    oom_count: u64,
    /// True if the device has blocks without rows of their own.
    is_brief: bool,
    failed: Vec<Record>,
    segments: Vec<(i64, i64, i64, bool)>,
    segments_left_out: u64,
}

impl Track {
    pub(super) fn new(plan: TrackPlan) -> Track {
        let grid = plan.grid;
        let stacked = TimeGrid {
            width_ns: grid.width_ns * STACK as i64,
            buckets: grid.buckets.div_ceil(STACK),
            ..grid
        };
        let owners = Category::ALL.len() + plan.module_cut.names.len();
        Track {
            allocated: Series::new(grid),
            reserved: Series::new(grid),
            used: Series::new(grid),
            progress: Progress::new(grid),
            stacked: StackedSeries::new(stacked, owners),
            levels: Levels::new(Some(plan.ordinal)),
            detail: DetailRows::default(),
            lifetimes: vec![(0, 0); 64],
            sizes: vec![(0, 0); 64],
            ooms: Vec::new(),
            oom_count: 0,
            is_brief: false,
            failed: Vec::new(),
            segments: Vec::new(),
            segments_left_out: 0,
            plan,
        }
    }

    pub(super) fn ordinal(&self) -> i32 {
        self.plan.ordinal
    }

    /// Returns the end of the last time bucket.
    fn end_ns(&self) -> i64 {
        let grid = self.plan.grid;
        grid.start_ns + grid.width_ns * grid.buckets as i64
    }

    /// Returns the time buckets of the track's lines.
    pub(super) fn grid(&self) -> TimeGrid {
        self.plan.grid
    }

    /// Processes the step and phase of a row of any device.
    pub(super) fn progress(&mut self, row: &Record, replay: &Replay) {
        let total = replay.find(self.plan.ordinal).map_or(0, |d| d.totals.get(self.plan.metric));
        self.progress.feed(row, replay, total);
        self.levels.feed(row, replay);
    }

    /// Adds a row of this device, after the replay has processed it.
    pub(super) fn feed(&mut self, row: &Record, replay: &Replay) {
        let ts = replay.ts_ns;
        match row.counted_effect(self.plan.metric) {
            Some(Effect::Alloc) => self.alloc(row, replay),
            Some(Effect::Free) => self.free(row, replay),
            _ => {}
        }
        match row.event {
            EventName::Tag => self.tag(row, replay),
            EventName::Brief => {
                self.is_brief |= ts < self.end_ns();
                self.add(row, replay, row.category, Symbol::WITHOUT_DETAIL, row.delta_bytes);
            }
            EventName::Oom if self.plan.grid.has(ts) => {
                self.oom_count += 1;
                // The last OOM is always kept, because the page opens there.
                self.ooms.truncate(MOST_PINS - 1);
                self.ooms.push(Record { ts_ns: ts, ..*row });
            }
            _ => {}
        }
        if is_segment(row.event) && row.status == 0 && row.delta_bytes != 0 {
            if self.segments.len() < MOST_MARKS {
                let expandable = matches!(row.event, EventName::SegmentMap | EventName::SegmentUnmap);
                self.segments.push((ts, row.addr, row.delta_bytes, expandable));
            } else {
                self.segments_left_out += 1;
            }
        }
        if row.status != 0
            && row.event != EventName::Oom
            && self.plan.grid.has(ts)
            && self.failed.len() < MOST_PINS
        {
            self.failed.push(Record { ts_ns: ts, ..*row });
        }
        let Some(device) = replay.find(self.plan.ordinal) else { return };
        let totals = device.totals;
        self.allocated.set(ts, totals.allocated);
        self.reserved.set(ts, totals.reserved);
        self.used.set(ts, totals.get(Metric::Used));
        let near = |moment: &i64| *moment > 0 && (row.seq - moment).abs() <= AROUND;
        if self.plan.moments.iter().any(near) && self.plan.grid.has(ts) {
            self.detail.ts_ns.push(ts);
            self.detail.allocated.push(totals.allocated);
            self.detail.reserved.push(totals.reserved);
            if self.plan.metric == Metric::Used {
                self.detail.used.push(totals.get(Metric::Used));
            }
        }
    }

    fn counts(&self, kind: MemoryKind) -> bool {
        is_counted(kind, self.plan.ordinal, self.plan.metric)
    }

    fn alloc(&mut self, row: &Record, replay: &Replay) {
        if row.alloc_id == 0 {
            return;
        }
        if replay.in_window() {
            let at = row.delta_bytes.max(1).ilog2() as usize;
            self.sizes[at].0 += 1;
            self.sizes[at].1 += row.delta_bytes;
        }
        let category = self.plan.selection.inferred(row.alloc_id).unwrap_or(row.category);
        self.add(row, replay, category, row.module, row.delta_bytes);
    }

    fn free(&mut self, row: &Record, replay: &Replay) {
        let Some(block) = replay.freed().filter(|block| self.counts(block.kind)) else { return };
        if replay.in_window() {
            let age = (replay.ts_ns - block.born_ns).max(1).ilog2() as usize;
            self.lifetimes[age].0 += 1;
            self.lifetimes[age].1 += block.bytes;
        }
        let category = self.plan.selection.inferred(block.id).unwrap_or(block.owner.category);
        self.add(row, replay, category, block.owner.module, -block.bytes);
        // The page never shows a block that was freed before its time or allocated after it.
        if replay.ts_ns >= self.plan.grid.start_ns && block.born_ns < self.end_ns() {
            self.plan.selection.add(block, Some(replay.ts_ns));
        }
    }

    fn owners(&mut self, replay: &Replay, category: Category, module: Symbol) -> [usize; 2] {
        [category as usize, Category::ALL.len() + self.plan.module_cut.index_of(module, &replay.symbols)]
    }

    fn add(&mut self, row: &Record, replay: &Replay, category: Category, module: Symbol, delta: i64) {
        let owners = self.owners(replay, category, module);
        let total = replay.find(row.device).map_or(0, |device| device.totals.get(self.plan.metric));
        self.stacked.add(replay.ts_ns, row.seq, &owners, delta, total);
    }

    fn tag(&mut self, row: &Record, replay: &Replay) {
        if replay.live().contains(row.alloc_id) {
            let owners = self.owners(replay, row.category, row.module);
            self.stacked.correct(replay.ts_ns, row.seq, row.alloc_id, &owners, row.delta_bytes);
        }
    }

    /// Returns the JSON of this track, with its columns in `pack`.
    pub(super) fn finish(mut self, replayed: &Replayed, pack: &mut Pack, strings: &mut Strings) -> Value {
        let end_ns = self.end_ns();
        for block in replayed.replay.live().values() {
            let is_here = block.device == self.plan.ordinal && self.counts(block.kind);
            if is_here && block.born_ns < end_ns {
                self.plan.selection.add(block, None);
            }
        }
        let allocated = self.allocated.finish();
        let reserved = self.reserved.finish();
        let used = self.used.finish();
        let is_host = !is_gpu(self.plan.ordinal);
        let mut series = match is_host {
            true if self.plan.ordinal == CPU => vec![line("CPU tensors", &allocated, pack)],
            true => vec![line("pinned memory", &allocated, pack)],
            false => vec![line("allocated", &allocated, pack), line("reserved", &reserved, pack)],
        };
        if !is_host && used.high != reserved.high {
            let device = replayed.replay.find(self.plan.ordinal);
            let name = device.map_or(Metric::Used.name(), |device| device.name_of(Metric::Used));
            series.push(line(name, &used, pack));
        }
        self.progress.steps.end_with(replayed.replay.last_step());
        let steps = &self.progress.steps.steps;
        let (sizes, largest) = (self.levels.input_sizes(), self.levels.largest_input(&replayed.symbols));
        let text =
            |phase: Symbol, strings: &mut Strings| strings.index_of(phase, NO_PHASE, &replayed.symbols);
        let phases: Vec<(i64, i64)> =
            self.progress.phases.starts.iter().map(|(ts, phase)| (*ts, text(*phase, strings))).collect();
        let grid = self.plan.grid;
        let whole = (grid.start_ns, end_ns);
        let home = self.progress.initial_range(whole, self.plan.peak_ns);
        let blocks = blocks(&mut self.plan.selection, replayed, pack, strings);
        let owners = self.stacked.finish();
        let (categories, modules) = owners.split_at(Category::ALL.len());
        let names = Category::ALL.iter().map(|name| category(*name).to_owned());
        json!({
            "device": self.plan.ordinal,
            "metric": self.plan.metric.name(),
            "start_ns": self.plan.grid.start_ns,
            "width_ns": self.plan.grid.width_ns,
            "buckets": self.plan.grid.buckets,
            "stack_each": STACK,
            "home_ns": home,
            "series": series,
            "by_category": stacked(names, categories, pack),
            "by_module": stacked(self.plan.module_cut.names.iter().cloned(), modules, pack),
            "phases": {
                "ts": pack.column(phases.iter().map(|phase| phase.0)),
                "name": pack.column(phases.iter().map(|phase| phase.1)),
            },
            "steps": {
                "first": pack.column(steps.iter().map(|step| step.numbers.0)),
                "last": pack.column(steps.iter().map(|step| step.numbers.1)),
                "from": pack.column(steps.iter().map(|step| step.time_ns.0)),
                "to": pack.column(steps.iter().map(|step| step.time_ns.1)),
                "high": pack.column(steps.iter().map(|step| step.high)),
                "high_ts": pack.column(steps.iter().map(|step| step.high_ns)),
                "input": pack.column(steps.iter().map(|step| sizes.most(step.numbers.0, step.numbers.1))),
            },
            "largest_input": largest.as_ref().and_then(LargestInput::line),
            "growth": GrowthCurve::new(&self.levels).map(|curve| json!({
                "step": pack.column(curve.steps.iter().copied()),
                "parts": curve.parts.map(|(name, bytes)| json!({ "name": name, "bytes": pack.column(bytes.iter().copied()) })),
            })),
            "detail": {
                "ts": pack.column(self.detail.ts_ns.iter().copied()),
                "allocated": pack.column(self.detail.allocated.iter().copied()),
                "reserved": pack.column(self.detail.reserved.iter().copied()),
                "used": (self.plan.metric == Metric::Used)
                    .then(|| pack.column(self.detail.used.iter().copied())),
            },
            "segments": {
                "ts": pack.column(self.segments.iter().map(|segment| segment.0)),
                "addr": pack.column(self.segments.iter().map(|segment| segment.1)),
                "bytes": pack.column(self.segments.iter().map(|segment| segment.2)),
                "expandable": pack.column(self.segments.iter().map(|segment| i64::from(segment.3))),
                "left_out": self.segments_left_out,
            },
            "blocks": blocks,
            "lifetimes": spread(&self.lifetimes),
            "sizes": spread(&self.sizes),
            "oom_count": self.oom_count,
            "brief": self.is_brief,
            "ooms": self.ooms.iter().map(|row| pin(row, replayed)).collect::<Vec<_>>(),
            "failed": self.failed.iter().map(|row| pin(row, replayed)).collect::<Vec<_>>(),
        })
    }
}

fn line(name: &str, series: &Series, pack: &mut Pack) -> Value {
    // Heights compress better than low values, because they are small while memory changes little.
    let heights = series.high.iter().zip(&series.low).map(|(high, low)| high - low);
    json!({ "name": name, "high": pack.column(series.high.iter().copied()), "height": pack.column(heights) })
}

fn stacked(names: impl Iterator<Item = String>, owners: &[Vec<i64>], pack: &mut Pack) -> Value {
    let bands = names.zip(owners).filter(|(_, bytes)| bytes.iter().any(|bytes| *bytes != 0));
    let bands: Vec<Value> = bands
        .map(|(name, bytes)| json!({ "name": name, "bytes": pack.column(bytes.iter().copied()) }))
        .collect();
    Value::Array(bands)
}

/// Returns the nonempty bins: power of two, number and bytes.
fn spread(bins: &[(u64, i64)]) -> Vec<(usize, u64, i64)> {
    let bins = bins.iter().enumerate().filter(|(_, bin)| bin.0 > 0);
    bins.map(|(power, (count, bytes))| (power, *count, *bytes)).collect()
}

fn pin(row: &Record, replayed: &Replayed) -> Value {
    let text = |symbol| replayed.symbols.get(symbol).to_string();
    json!({
        "ts_ns": row.ts_ns, "seq": row.seq, "event": row.event.as_str(), "status": row.status,
        "requested_bytes": row.requested_bytes, "bytes": row.delta_bytes,
        "step": row.step, "phase": text(row.phase), "module": text(row.module), "op": text(row.op),
    })
}

fn blocks(
    selection: &mut BlockSelection,
    replayed: &Replayed,
    pack: &mut Pack,
    strings: &mut Strings,
) -> Value {
    selection.kept.sort_by_key(|kept| kept.block.id);
    let kept = &selection.kept;
    let mut symbol = FxHashMap::default();
    let mut text = |of: Symbol, missing: &'static str| {
        *symbol.entry((of, missing)).or_insert_with(|| strings.index_of(of, missing, &replayed.symbols))
    };
    let form = |form: Symbol| if is_unknown_form(form) { Symbol::NONE } else { form };
    let names: Vec<[i64; 5]> = kept
        .iter()
        .map(|kept| {
            let owner = &kept.block.owner;
            [
                text(owner.module, NO_MODULE),
                text(owner.op, NO_OP),
                text(owner.phase, NO_PHASE),
                text(form(kept.block.dtype), NO_DTYPE),
                text(form(kept.block.shape), NO_SHAPE),
            ]
        })
        .collect();
    let mut column = |get: &dyn Fn(&super::blocks::KeptBlock) -> i64| pack.column(kept.iter().map(get));
    let mut all = json!({
        "id": column(&|kept| kept.block.id),
        "born": column(&|kept| kept.block.born_ns),
        "age": column(&|kept| kept.died_ns.map_or(-1, |died| died - kept.block.born_ns)),
        "bytes": column(&|kept| kept.block.bytes),
        "requested": column(&|kept| kept.block.requested),
        "addr": column(&|kept| kept.block.addr),
        "stream": column(&|kept| kept.block.stream),
        "pool": column(&|kept| kept.block.pool),
        "step": column(&|kept| kept.block.owner.step),
        "category": column(&|kept| kept.block.owner.category as i64),
        "inferred": column(&|kept| i64::from(kept.block.inferred)),
    });
    for (place, name) in ["module", "op", "phase", "dtype", "shape"].into_iter().enumerate() {
        all[name] = pack.column(names.iter().map(|names| names[place]));
    }
    all
}
