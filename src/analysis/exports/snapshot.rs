//! `snapshot`: what `torch.cuda.memory._dump_snapshot()` would have written, for PyTorch's memory_viz.
//!
//! The segments and blocks are those at the end of the window, the entries those that led there. Op,
//! module, phase and step stand where PyTorch has the frames of a call stack. An entry has PyTorch's name
//! and size: of blocks the requested size, of an OOM the rounded one.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use memtrace_trace::meta::Meta;
use memtrace_trace::rounding::SMALL_SIZE;
use memtrace_trace::{Category, EventName};
use rustc_hash::FxHashMap;

use super::export::{Export, Job, Leaves, MAX_EVENTS, max_events};
use super::out::Out;
use super::pickle::{Memo, Pickle};
use crate::error::Result;
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::record::{Columns, Record};
use crate::read::stream::TraceFile;
use crate::read::symbols::{Symbol, Texts};
use crate::render::text::count;
use crate::state::layout::{Layout, Range};
use crate::state::replay::{Block, HOST, Kind, Metric, Replay, Totals};
use crate::state::replay_trace::replay_until;
use crate::state::stacks::Stacks;

/// See the module.
pub(super) struct Snapshot;

/// Beside what the replay needs.
const COLUMNS: Columns = Columns::of(&[
    "ts_ns",
    "addr",
    "stream",
    "pool",
    "requested_bytes",
    "rounded_bytes",
    "device_free_bytes",
    "op",
    "module",
    "phase",
    "category",
    "step",
    "api",
]);

impl Export for Snapshot {
    fn name(&self) -> &'static str {
        "snapshot"
    }

    fn about(&self) -> &'static str {
        "The pickle that PyTorch's memory_viz opens, with op, module and phase as frames"
    }

    fn flags(&self) -> &'static [Flag] {
        &[MAX_EVENTS]
    }

    fn leaves(&self, _: &Options) -> Leaves {
        Leaves::FileEach(".snapshot.pickle")
    }

    fn open_with(&self) -> &'static str {
        "drop the file on https://pytorch.org/memory_viz, or: python -m torch.cuda._memory_viz trace_plot FILE"
    }

    fn write(&self, job: &mut Job<'_>) -> Result<()> {
        let trace = job.trace()?;
        let mut state = State::new(max_events(job.options)?, job.options.device, &trace.meta);
        let stacks = Stacks::read(trace);
        let columns = if stacks.has_lines() { COLUMNS.and(Columns::of(&["stack_id"])) } else { COLUMNS };
        let window = job.options.window;
        // The snapshot is that of the window's end.
        let stop = |row: &Record| {
            row.ts_ns > window.to_ns || row.event != EventName::End && row.step > window.to_step
        };
        let replayed = replay_until(
            trace,
            columns,
            job.options,
            Metric::Allocated,
            flow_categories(trace, job.options)?,
            stop,
            |row, replay| state.feed(row, replay),
        )?;
        job.learn(trace, &replayed);
        if window.to_ns < i64::MAX || window.to_step < i64::MAX {
            job.footer.notes.retain(|note| !note.contains("has no end row"));
        }
        let segments = state.segments(&replayed.replay);
        let entries: usize = state.entries.len();
        if state.dropped > 0 {
            job.footer.notes.push(format!(
                "the last {} of {} entries; --max-events 0 takes all",
                count(entries as u64),
                count(entries as u64 + state.dropped)
            ));
        }
        if state.strays.values().any(|strays| !strays.is_empty()) {
            job.footer
                .notes
                .push("blocks whose segment was not seen lie in segments made up around them".to_owned());
        }
        let what = format!("{} entries, {} segments", count(entries as u64), count(segments.len() as u64));
        let mut out = Out::create(job.place)?;
        let mut categories: FxHashMap<i64, Category> = FxHashMap::default();
        // Later rows of a block know more of it.
        categories.extend(state.entries.iter().filter_map(|entry| entry.block));
        categories.extend(replayed.replay.live.values().map(|block| (block.id, block.owner.category)));
        let mut writer = Writer {
            pickle: Pickle::new(&mut out).map_err(io_error)?,
            texts: &replayed.texts,
            stacks: &stacks,
            categories,
            frames: FxHashMap::default(),
            lines: FxHashMap::default(),
        };
        writer.snapshot(&state, &segments, trace).map_err(io_error)?;
        writer.pickle.finish().map_err(io_error)?;
        job.done(out, what)
    }
}

/// [`Out`] keeps its failures to itself until it is closed.
fn io_error(source: io::Error) -> crate::Error {
    memtrace_trace::Error::Io { path: "snapshot".into(), source }.into()
}

/// Whose an entry or block is: op, module, phase, step, and the lines of Python where the trace has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Owner {
    op: Symbol,
    module: Symbol,
    phase: Symbol,
    step: i64,
    stack: i64,
}

impl Owner {
    fn of(row: &Record) -> Owner {
        Owner { op: row.op, module: row.module, phase: row.phase, step: row.step, stack: row.stack_id }
    }
}

/// One entry of the trace.
struct Entry {
    action: &'static str,
    device: i32,
    /// The address; of an OOM, what was free on the device.
    addr: i64,
    size: i64,
    stream: i64,
    ts_ns: i64,
    owner: Owner,
    /// Of blocks: the `alloc_id`, and the category that the row has.
    block: Option<(i64, Category)>,
}

/// A block that is in use.
#[derive(Clone, Copy)]
struct Active {
    addr: i64,
    bytes: i64,
    requested: i64,
    stream: i64,
    pool: i64,
    /// Freed, and still in use by another stream.
    pending: bool,
    owner: Owner,
}

impl Active {
    fn of(block: &Block) -> Active {
        let owner = block.owner;
        Active {
            addr: block.addr,
            bytes: block.bytes,
            requested: block.requested,
            stream: block.stream,
            pool: block.pool,
            pending: false,
            owner: Owner {
                op: owner.op,
                module: owner.module,
                phase: owner.phase,
                step: owner.step,
                stack: block.stack,
            },
        }
    }
}

/// Whose a segment is.
#[derive(Clone, Copy)]
struct Taker {
    owner: Owner,
    stream: i64,
}

/// One segment of the snapshot.
struct Segment {
    device: i32,
    addr: i64,
    range: Range,
    taker: Option<Taker>,
    blocks: Vec<Active>,
}

/// What the rows leave for the snapshot.
struct State {
    layout: Layout,
    /// The most entries.
    most: usize,
    only: Option<i32>,
    meta: Meta,
    entries: VecDeque<Entry>,
    dropped: u64,
    /// Blocks that were freed and are still in use, by device and address.
    pending: BTreeMap<(i32, i64), Active>,
    /// What each device's totals were before the row.
    before: FxHashMap<i32, Totals>,
    /// Each segment, or piece of an expandable one, by device and address: who took it, and the stream
    /// whose blocks lie in it.
    takers: FxHashMap<(i32, i64), Taker>,
    /// Segments without a block so far, and their ends. Their rows do not have the stream: the call for a
    /// segment comes before the report of the block that it is for.
    fresh: Vec<(i32, i64, i64)>,
    /// Where blocks were that lie in no segment known, from and to, by device.
    strays: BTreeMap<i32, BTreeMap<i64, i64>>,
}

impl State {
    fn new(most: usize, only: Option<i32>, meta: &Meta) -> State {
        State {
            layout: Layout::default(),
            most,
            only,
            meta: meta.clone(),
            entries: VecDeque::new(),
            dropped: 0,
            pending: BTreeMap::new(),
            before: FxHashMap::default(),
            takers: FxHashMap::default(),
            fresh: Vec::new(),
            strays: BTreeMap::new(),
        }
    }

    fn feed(&mut self, row: &Record, replay: &Replay) {
        if row.device == HOST || self.only.is_some_and(|only| only != row.device) {
            return;
        }
        self.layout.feed(row);
        if row.event == EventName::Alloc {
            self.name_streams(row);
            self.complete(row, replay.in_window());
        }
        let now = replay.find(row.device).map(|device| device.totals).unwrap_or_default();
        let before = self.before.insert(row.device, now).unwrap_or_default();
        let inside = replay.in_window();
        let size = if row.requested_bytes < 0 { row.delta_bytes.abs() } else { row.requested_bytes };
        let key = (row.device, row.addr);
        // Its row has what the segment's has.
        let stream = match row.event {
            EventName::SegmentFree | EventName::SegmentUnmap => {
                self.takers.get(&key).map_or(row.stream, |taker| taker.stream)
            }
            _ => row.stream,
        };
        let (device, ts_ns, owner) = (row.device, row.ts_ns, Owner::of(row));
        let new =
            |action, addr, size, block| Entry { action, device, addr, size, stream, ts_ns, owner, block };
        let block = Some((row.alloc_id, row.category));
        match row.event {
            EventName::Alloc | EventName::Live => {
                self.push(inside, new("alloc", row.addr, size, block));
                self.place(row);
            }
            EventName::Free => {
                self.push(inside, new("free_requested", row.addr, size, block));
                // A block that no stream holds leaves `active` with its free.
                if row.delta_bytes != 0 && before.active == row.active_bytes {
                    let active = Active {
                        addr: row.addr,
                        bytes: -row.delta_bytes,
                        requested: row.requested_bytes,
                        stream: row.stream,
                        pool: row.pool,
                        pending: true,
                        owner: Owner::of(row),
                    };
                    self.pending.insert(key, active);
                } else {
                    self.push(inside, new("free_completed", row.addr, size, block));
                }
            }
            EventName::FreeCompleted => {
                let pending = self.pending.remove(&key);
                if pending.is_some() {
                    self.push(inside, new("free_completed", row.addr, size, block));
                }
            }
            EventName::Oom => {
                // The viewer wants a number: where no row told it, what none accounts for.
                let most = (self.meta.total_bytes(row.device) - now.reserved - now.outside).max(0);
                let free = if row.device_free_bytes >= 0 { row.device_free_bytes } else { most };
                self.push(inside, new("oom", free, row.rounded_bytes, None));
            }
            _ if row.status != 0 || row.addr == 0 => {}
            EventName::SegmentAlloc | EventName::SegmentMap => {
                let action = if row.event == EventName::SegmentMap { "segment_map" } else { "segment_alloc" };
                self.push(inside, new(action, row.addr, row.delta_bytes, None));
                self.takers.insert(key, Taker { owner: Owner::of(row), stream });
                if self.fresh.len() == MOST_FRESH {
                    self.fresh.remove(0);
                }
                self.fresh.push((row.device, row.addr, row.addr.saturating_add(row.delta_bytes)));
            }
            EventName::SegmentFree | EventName::SegmentUnmap => {
                let action =
                    if row.event == EventName::SegmentUnmap { "segment_unmap" } else { "segment_free" };
                self.push(inside, new(action, row.addr, -row.delta_bytes, None));
                self.takers.remove(&key);
            }
            _ => {}
        }
    }

    /// Takes the next entry, when it is in the window.
    fn push(&mut self, inside: bool, entry: Entry) {
        if !inside {
            return;
        }
        if self.entries.len() == self.most {
            self.entries.pop_front();
            self.dropped += 1;
        }
        self.entries.push_back(entry);
    }

    /// What is handed out again is in use by no stream, whether or not a row said so.
    fn complete(&mut self, row: &Record, inside: bool) {
        let end = row.addr.saturating_add(row.delta_bytes.max(1));
        let over = self.pending.range((row.device, i64::MIN)..(row.device, end)).rev();
        let over = over.take_while(|(_, block)| block.addr.saturating_add(block.bytes) > row.addr);
        let over: Vec<(i32, i64)> = over.map(|(key, _)| *key).collect();
        for key in over.into_iter().rev() {
            let Some(block) = self.pending.remove(&key) else { continue };
            let Active { addr, stream, owner, .. } = block;
            let (action, device, size) = ("free_completed", row.device, block.wanted());
            // Its own rows say what it was for.
            let block = None;
            self.push(inside, Entry { action, device, addr, size, stream, ts_ns: row.ts_ns, owner, block });
        }
    }

    /// The segments that a block is the first in are of its stream.
    fn name_streams(&mut self, row: &Record) {
        let end = row.addr.saturating_add(row.delta_bytes);
        let (takers, entries) = (&mut self.takers, &mut self.entries);
        self.fresh.retain(|(device, from, to)| {
            if *device != row.device || *to <= row.addr || end <= *from {
                return true;
            }
            if let Some(taker) = takers.get_mut(&(*device, *from)) {
                taker.stream = row.stream;
            }
            let just = entries.iter_mut().rev().take_while(|entry| entry.action.starts_with("segment"));
            for entry in just.filter(|entry| entry.device == *device && entry.addr == *from) {
                entry.stream = row.stream;
            }
            false
        });
    }

    /// Notes where a block lies that is in no segment known.
    fn place(&mut self, row: &Record) {
        let end = row.addr.saturating_add(row.delta_bytes.max(0));
        if self.layout.holds(row.device, row.addr, end) {
            return;
        }
        let strays = self.strays.entry(row.device).or_default();
        let (mut from, mut to) = (row.addr, end);
        // Together with those that it touches.
        while let Some((start, stop)) = strays
            .range(..=to)
            .next_back()
            .map(|(start, stop)| (*start, *stop))
            .filter(|(_, stop)| *stop >= from)
        {
            strays.remove(&start);
            (from, to) = (from.min(start), to.max(stop));
        }
        strays.insert(from, to);
    }

    /// The segments with the blocks in them. A block lies in one, whatever the rows say.
    fn segments(&mut self, replay: &Replay) -> Vec<Segment> {
        let mut active: BTreeMap<i32, Vec<Active>> = BTreeMap::new();
        for block in replay.live.values().filter(|block| block.kind == Kind::Torch && block.device != HOST) {
            active.entry(block.device).or_default().push(Active::of(block));
        }
        for ((device, _), block) in &self.pending {
            active.entry(*device).or_default().push(*block);
        }
        let devices: Vec<i32> = replay.devices.iter().map(|device| device.ordinal).collect();
        let mut segments = Vec::new();
        for device in devices.into_iter().filter(|device| *device != HOST) {
            if self.only.is_some_and(|only| only != device) {
                continue;
            }
            let mut ranges: BTreeMap<i64, Range> = self.layout.ranges(device).collect();
            for (from, to) in self.strays.get(&device).into_iter().flatten() {
                // What was there once may be under a segment of today.
                if !self.layout.touches(device, *from, *to) {
                    ranges.insert(*from, Range { bytes: to.saturating_sub(*from), ..Range::default() });
                }
            }
            let mut blocks = active.remove(&device).unwrap_or_default();
            blocks.sort_by_key(|block| block.addr);
            let mut blocks = blocks.into_iter().peekable();
            for (addr, range) in ranges {
                let end = addr.saturating_add(range.bytes);
                let mut inside: Vec<Active> = Vec::new();
                while let Some(block) = blocks.next_if(|block| block.addr < end) {
                    let from = inside.last().map_or(addr, |last: &Active| last.addr + last.bytes);
                    // A trace that contradicts itself may have blocks one over the other.
                    if block.addr >= from && block.bytes > 0 && block.addr.saturating_add(block.bytes) <= end
                    {
                        inside.push(block);
                    }
                }
                let taker = self.takers.get(&(device, addr)).copied();
                segments.push(Segment { device, addr, range, taker, blocks: inside });
            }
        }
        segments
    }
}

/// Writes it all.
struct Writer<'a> {
    pickle: Pickle<&'a mut Out>,
    texts: &'a Texts,
    stacks: &'a Stacks,
    /// What each block turned out to be for: a parameter is known as one only when it is there.
    categories: FxHashMap<i64, Category>,
    /// The list of frames of each owner.
    frames: FxHashMap<Owner, Memo>,
    /// Each line of Python, which many stacks share.
    lines: FxHashMap<(&'a str, i64, &'a str), Memo>,
}

impl Writer<'_> {
    fn snapshot(&mut self, state: &State, segments: &[Segment], trace: &TraceFile) -> io::Result<()> {
        let start_ns = trace.meta.start_unix_ns;
        let mut top = self.pickle.dict()?;
        self.pickle.key(&mut top, "segments")?;
        let mut list = self.pickle.list()?;
        for segment in segments {
            self.pickle.entry(&mut list)?;
            self.segment(segment)?;
        }
        self.pickle.close(list)?;

        self.pickle.key(&mut top, "device_traces")?;
        let last = segments.iter().map(|segment| segment.device);
        let last = last.chain(state.entries.iter().map(|entry| entry.device)).max().unwrap_or(-1);
        // A hostile ordinal must not make a list of two billion.
        let last = last.min(trace.meta.devices.len().max(256) as i32);
        let mut list = self.pickle.list()?;
        for device in 0..=last {
            self.pickle.entry(&mut list)?;
            let mut entries = self.pickle.list()?;
            let mut end_ns = None;
            for entry in state.entries.iter().filter(|entry| entry.device == device) {
                self.pickle.entry(&mut entries)?;
                self.entry(entry, start_ns)?;
                end_ns = Some(entry.ts_ns);
            }
            if let Some(end_ns) = end_ns {
                self.pickle.entry(&mut entries)?;
                self.last_entry(start_ns.saturating_add(end_ns) / 1000)?;
            }
            self.pickle.close(entries)?;
        }
        self.pickle.close(list)?;

        self.pickle.key(&mut top, "allocator_settings")?;
        let conf = &trace.meta.allocator.conf;
        let mut settings = self.pickle.dict()?;
        self.pickle.key(&mut settings, "PYTORCH_CUDA_ALLOC_CONF")?;
        self.pickle.text(conf)?;
        self.pickle.key(&mut settings, "expandable_segments")?;
        self.pickle.bool(conf.contains("expandable_segments:True"))?;
        self.pickle.close(settings)?;

        self.pickle.key(&mut top, "external_annotations")?;
        let none = self.pickle.list()?;
        self.pickle.close(none)?;
        self.pickle.close(top)
    }

    fn segment(&mut self, segment: &Segment) -> io::Result<()> {
        let sum = |of: fn(&Active) -> i64| segment.blocks.iter().map(of).sum::<i64>();
        let pool = segment.blocks.iter().map(|block| block.pool).find(|pool| *pool != 0);
        let taken = segment.taker.map_or(segment.range.stream, |taker| taker.stream);
        let stream = segment.blocks.first().map_or(taken, |block| block.stream);
        let small = match segment.range.expandable {
            true => segment.blocks.iter().all(|block| block.bytes <= SMALL_SIZE as i64),
            false => segment.range.is_small(),
        };
        let mut dict = self.pickle.dict()?;
        for (key, value) in [
            ("device", i64::from(segment.device)),
            ("address", segment.addr),
            ("total_size", segment.range.bytes),
            ("allocated_size", sum(|block| if block.pending { 0 } else { block.bytes })),
            ("active_size", sum(|block| block.bytes)),
            ("requested_size", sum(Active::wanted)),
            ("stream", stream),
        ] {
            self.pickle.key(&mut dict, key)?;
            self.pickle.int(value)?;
        }
        self.pickle.key(&mut dict, "segment_type")?;
        self.pickle.text(if small { "small" } else { "large" })?;
        self.pickle.key(&mut dict, "segment_pool_id")?;
        self.pickle.int(0)?;
        self.pickle.int(pool.unwrap_or(segment.range.pool))?;
        self.pickle.pair()?;
        self.pickle.key(&mut dict, "is_expandable")?;
        self.pickle.bool(segment.range.expandable)?;
        self.pickle.key(&mut dict, "frames")?;
        match segment.taker {
            Some(taker) => self.frames(taker.owner)?,
            None => {
                let none = self.pickle.list()?;
                self.pickle.close(none)?;
            }
        }
        self.pickle.key(&mut dict, "blocks")?;
        let mut list = self.pickle.list()?;
        let mut from = segment.addr;
        for block in &segment.blocks {
            if block.addr > from {
                self.pickle.entry(&mut list)?;
                self.hole(from, block.addr - from)?;
            }
            self.pickle.entry(&mut list)?;
            let state = if block.pending { "active_pending_free" } else { "active_allocated" };
            self.block(block.addr, block.bytes, block.wanted(), state, Some(block.owner))?;
            from = block.addr + block.bytes;
        }
        let end = segment.addr.saturating_add(segment.range.bytes);
        if end > from {
            self.pickle.entry(&mut list)?;
            self.hole(from, end - from)?;
        }
        self.pickle.close(list)?;
        self.pickle.close(dict)
    }

    fn hole(&mut self, addr: i64, bytes: i64) -> io::Result<()> {
        self.block(addr, bytes, 0, "inactive", None)
    }

    fn block(
        &mut self,
        addr: i64,
        bytes: i64,
        requested: i64,
        state: &str,
        owner: Option<Owner>,
    ) -> io::Result<()> {
        let mut dict = self.pickle.dict()?;
        for (key, value) in [("address", addr), ("size", bytes), ("requested_size", requested)] {
            self.pickle.key(&mut dict, key)?;
            self.pickle.int(value)?;
        }
        self.pickle.key(&mut dict, "state")?;
        self.pickle.text(state)?;
        self.pickle.key(&mut dict, "frames")?;
        match owner {
            Some(owner) => self.frames(owner)?,
            None => {
                let none = self.pickle.list()?;
                self.pickle.close(none)?;
            }
        }
        self.pickle.close(dict)
    }

    fn entry(&mut self, entry: &Entry, start_ns: i64) -> io::Result<()> {
        let mut dict = self.pickle.dict()?;
        self.pickle.key(&mut dict, "action")?;
        self.pickle.text(entry.action)?;
        self.pickle.key(&mut dict, if entry.action == "oom" { "device_free" } else { "addr" })?;
        self.pickle.int(entry.addr)?;
        for (key, value) in [
            ("size", entry.size),
            ("stream", entry.stream),
            ("time_us", start_ns.saturating_add(entry.ts_ns) / 1000),
        ] {
            self.pickle.key(&mut dict, key)?;
            self.pickle.int(value)?;
        }
        self.pickle.key(&mut dict, "frames")?;
        self.frames(entry.owner)?;
        if let Some((id, category)) = entry.block {
            let category = self.categories.get(&id).copied().unwrap_or(category);
            self.pickle.key(&mut dict, "category")?;
            self.pickle.text(if category == Category::None { UNKNOWN } else { category.as_str() })?;
        }
        self.pickle.close(dict)
    }

    /// PyTorch closes its traces with the snapshot itself. Ours has the category that the viewer fails
    /// without, when there are others.
    fn last_entry(&mut self, time_us: i64) -> io::Result<()> {
        let mut dict = self.pickle.dict()?;
        self.pickle.key(&mut dict, "action")?;
        self.pickle.text("snapshot")?;
        for (key, value) in [("addr", 0), ("size", 0), ("stream", 0), ("time_us", time_us)] {
            self.pickle.key(&mut dict, key)?;
            self.pickle.int(value)?;
        }
        self.pickle.key(&mut dict, "frames")?;
        let none = self.pickle.list()?;
        self.pickle.close(none)?;
        self.pickle.key(&mut dict, "category")?;
        self.pickle.text(UNKNOWN)?;
        self.pickle.close(dict)
    }

    /// The owner as frames, the innermost first: the op, the lines of Python, each level of the module, the phase,
    /// the step.
    fn frames(&mut self, owner: Owner) -> io::Result<()> {
        if let Some(memo) = self.frames.get(&owner) {
            return self.pickle.recall(*memo);
        }
        let mut list = self.pickle.list()?;
        let texts = self.texts;
        let text = |symbol| if symbol == Symbol::NONE { None } else { Some(texts.get(symbol)) };
        let (op, module, phase) = (text(owner.op), text(owner.module), text(owner.phase));
        let mut frames: Vec<(&str, i64, &str)> = Vec::new();
        if let Some(op) = op.as_deref() {
            self.pickle.entry(&mut list)?;
            self.frame("op", 0, op)?;
        }
        let mut is_empty = op.is_none();
        for line in self.stacks.calls(owner.stack) {
            is_empty = false;
            self.pickle.entry(&mut list)?;
            if let Some(memo) = self.lines.get(&line) {
                self.pickle.recall(*memo)?;
            } else {
                self.frame(line.0, line.1, line.2)?;
                let memo = self.pickle.remember()?;
                self.lines.insert(line, memo);
            }
        }
        let mut rest = module.as_deref();
        while let Some(path) = rest.filter(|_| frames.len() < MOST_FRAMES) {
            frames.push(("module", 0, path));
            rest = path.rsplit_once('.').map(|(upper, _)| upper).filter(|upper| !upper.is_empty());
        }
        frames.extend(phase.as_deref().map(|phase| ("phase", 0, phase)));
        if owner.step >= 0 {
            frames.push(("step", owner.step, "step"));
        }
        if is_empty && frames.is_empty() {
            frames.push(("memtrace", 0, "(unattributed)"));
        }
        for (filename, line, name) in frames {
            self.pickle.entry(&mut list)?;
            self.frame(filename, line, name)?;
        }
        self.pickle.close(list)?;
        let memo = self.pickle.remember()?;
        self.frames.insert(owner, memo);
        Ok(())
    }

    fn frame(&mut self, filename: &str, line: i64, name: &str) -> io::Result<()> {
        let mut frame = self.pickle.dict()?;
        self.pickle.key(&mut frame, "name")?;
        self.pickle.text(name)?;
        self.pickle.key(&mut frame, "filename")?;
        self.pickle.text(filename)?;
        self.pickle.key(&mut frame, "line")?;
        self.pickle.int(line)?;
        self.pickle.close(frame)
    }
}

impl Active {
    /// What was asked for; the block where that is not known.
    fn wanted(&self) -> i64 {
        if self.requested < 0 { self.bytes } else { self.requested.min(self.bytes) }
    }
}

/// So many segments wait for their first block at most: a block takes its segment just before.
const MOST_FRESH: usize = 256;

/// No module lies deeper than this; what only looks like a path does.
const MOST_FRAMES: usize = 100;

/// What memory_viz calls a category that is none.
const UNKNOWN: &str = "unknown";
