//! Writes a snapshot as a pickle.

use std::io;

use memtrace_trace::Category;
use memtrace_trace::rounding::SMALL_SIZE;
use rustc_hash::FxHashMap;

use super::super::out::Out;
use super::super::pickle::{Memo, Pickle};
use super::collector::{ActiveBlock, Collector, FrameOwner, SnapshotSegment, TraceEntry};
use crate::read::stream::TraceFile;
use crate::read::symbols::{NO_OWNER, Symbol, SymbolTable};
use crate::state::stacks::Stacks;

/// Writes the segments, blocks and entries of a snapshot.
pub(super) struct Writer<'a> {
    pub(super) pickle: Pickle<&'a mut Out>,
    pub(super) symbols: &'a SymbolTable,
    pub(super) stacks: &'a Stacks,
    /// The last known category of each block. A later category is better, because a parameter is recognized
    /// only after its allocation.
    pub(super) categories: FxHashMap<i64, Category>,
    /// The memoized frames of each owner.
    pub(super) frames: FxHashMap<FrameOwner, Memo>,
    /// The memoized Python lines, which many stacks share.
    pub(super) lines: FxHashMap<(&'a str, i64, &'a str), Memo>,
}

impl Writer<'_> {
    pub(super) fn snapshot(
        &mut self,
        collected: &Collector,
        segments: &[SnapshotSegment],
        trace: &TraceFile,
    ) -> io::Result<()> {
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
        let last = last.chain(collected.entries.iter().map(|entry| entry.device)).max().unwrap_or(-1);
        // An invalid ordinal must not create a list of two billion entries.
        let last = last.min(trace.meta.devices.len().max(256) as i32);
        let mut list = self.pickle.list()?;
        for device in 0..=last {
            self.pickle.entry(&mut list)?;
            let mut entries = self.pickle.list()?;
            let mut end_ns = None;
            for entry in collected.entries.iter().filter(|entry| entry.device == device) {
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
        self.pickle.bool(trace.meta.allocator.option("expandable_segments") == Some("True"))?;
        self.pickle.close(settings)?;

        self.pickle.key(&mut top, "external_annotations")?;
        let none = self.pickle.list()?;
        self.pickle.close(none)?;
        self.pickle.close(top)
    }

    fn segment(&mut self, segment: &SnapshotSegment) -> io::Result<()> {
        let sum = |of: fn(&ActiveBlock) -> i64| segment.blocks.iter().map(of).sum::<i64>();
        let pool = segment.blocks.iter().map(|block| block.pool).find(|pool| *pool != 0);
        let taken = segment.segment_owner.map_or(segment.range.stream, |segment_owner| segment_owner.stream);
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
            ("requested_size", sum(ActiveBlock::requested_or_size)),
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
        match segment.segment_owner {
            Some(segment_owner) => self.frames(segment_owner.owner)?,
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
            self.block(block.addr, block.bytes, block.requested_or_size(), state, Some(block.owner))?;
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
        owner: Option<FrameOwner>,
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

    fn entry(&mut self, entry: &TraceEntry, start_ns: i64) -> io::Result<()> {
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

    /// Writes the final entry `snapshot`, as PyTorch does. The entry has a category, because the viewer fails
    /// if only some entries have one.
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

    /// Writes the owner as frames, the innermost first: op, Python lines, levels of the module, phase, step.
    fn frames(&mut self, owner: FrameOwner) -> io::Result<()> {
        if let Some(memo) = self.frames.get(&owner) {
            return self.pickle.recall(*memo);
        }
        let mut list = self.pickle.list()?;
        let symbols = self.symbols;
        let text = |symbol| if symbol == Symbol::NONE { None } else { Some(symbols.get(symbol)) };
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
            frames.push(("memtrace", 0, NO_OWNER));
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

/// The maximum number of levels of a module path that become frames.
const MOST_FRAMES: usize = 100;

/// The category in memory_viz for blocks without a category.
const UNKNOWN: &str = "unknown";
