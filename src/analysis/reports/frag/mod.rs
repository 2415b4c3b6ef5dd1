//! `memtrace frag`: the reserved memory that is not in use, its pieces, and the blocks that pin them.

use serde_json::{Value, json};

use super::report::{Answer, Report, next};
use crate::error::{Error, Result};
use crate::options::{Flag, Options};
use crate::profile::flow_categories;
use crate::read::input::Input;
use crate::read::record::Record;
use crate::read::stream::TraceFile;
use crate::render::footer::Footer;
use crate::render::heading::heading;
use crate::render::numbers::{bar, duration, percent, share};
use crate::render::numbers::{counted, step_or_dash};
use crate::render::printer::{Cell, Printer, Side, Style, Table};
use crate::render::process_names::rank_or_name;
use crate::state::categories::KnownCategories;
use crate::state::group::category;
use crate::state::layout::{self, Layout, Segment};
use crate::state::moment::{self, NamedMoment, replay_to_moment};
use crate::state::replay::{Block, Metric, Replay};
use crate::state::replay_trace::Replayed;

/// `memtrace frag`.
pub(super) struct Frag;

impl Report for Frag {
    fn name(&self) -> &'static str {
        "frag"
    }

    fn about(&self) -> &'static str {
        "Explain reserved memory not in use: rounding, holes, empty segments, blocks that keep segments"
    }

    fn examples(&self) -> &'static [(&'static str, &'static str)] {
        &[("frag out", "at the peak of reserved memory"), ("frag --at oom out", "when an allocation failed")]
    }

    fn flags(&self) -> &'static [Flag] {
        &[Flag { default: "reserved-peak", ..moment::FLAG }]
    }

    fn run(&self, inputs: &[Input], options: &Options) -> Result<Answer> {
        let input = &inputs[0];
        let at: NamedMoment = options.text(moment::FLAG.name).parse()?;
        let mut printer = options.printer();
        let mut footer = Footer::of([input]);
        let mut json = Vec::new();
        for trace in &input.traces {
            let known = flow_categories(trace, options)?;
            let Some((replayed, held)) = fragmentation(trace, &at, options, known)? else {
                footer.read(trace, options)?;
                continue;
            };
            footer.add_reading(trace, &replayed);
            if replayed.replay.has_brief_blocks() {
                return Err(Error::usage(format!(
                    "{}: at this moment, blocks are live whose place is unknown, because the step was recorded \
                     without detail; choose a step with detail, or trace with MEMTRACE_BRIEF=0",
                    trace.path.display()
                )));
            }
            for state in held {
                if json.is_empty() {
                    heading(&mut printer, input, &trace.meta);
                }
                printer.gap();
                state.print(&mut printer, &rank_or_name(trace, input), &replayed, options);
                json.push(state.json(trace, &replayed));
                footer.add_share(&replayed, state.ordinal);
            }
        }
        if json.is_empty() {
            printer.plain("No memory tracked.");
        }
        let hints = vec![next("peak", input, "--mem-tracker --at end"), next("summary", input, "--stats")];
        Ok(Answer { next: hints, ..Answer::new(printer, json!({ "devices": json }), footer) })
    }
}

/// Replays a trace up to the moment `at`. Returns the replay, and the fragmentation of each GPU that has
/// reserved memory at that moment. Returns `None` if there is no such moment.
///
/// # Errors
/// When the trace cannot be read.
pub(crate) fn fragmentation(
    trace: &TraceFile,
    at: &NamedMoment,
    options: &Options,
    known: KnownCategories,
) -> Result<Option<(Replayed, Vec<Fragmentation>)>> {
    let mut layout = Layout::default();
    let feed = |row: &Record, _: &Replay| layout.feed(row);
    let Some(replayed) = replay_to_moment(trace, at, layout::COLUMNS, options, known, feed)? else {
        return Ok(None);
    };
    let gpus = replayed.gpus(options).map(|device| Fragmentation::new(&replayed, &layout, device.ordinal));
    let held = gpus.filter(|state| state.reserved != 0).collect();
    Ok(Some((replayed, held)))
}

/// The reserved bytes of one device, by use.
pub(crate) struct Fragmentation {
    pub(crate) ordinal: i32,
    ts_ns: i64,
    pub(crate) reserved: i64,
    pub(crate) allocated: i64,
    /// The sum of the requested bytes of the live blocks. If the request of a block is unknown, its size is
    /// added instead.
    pub(crate) requested: i64,
    /// Bytes freed but still in use by a stream.
    pub(crate) pending: i64,
    /// Bytes in segments without a block that is live or that a stream still uses. `empty_cache` returns them
    /// to the device.
    pub(crate) empty: i64,
    empty_segments: u64,
    /// Bytes of holes in segments with live blocks.
    pub(crate) holes: i64,
    hole_count: u64,
    pub(crate) largest: i64,
    /// Segments with live blocks, the most free bytes first.
    pinned: Vec<Segment>,
}

impl Fragmentation {
    fn new(replayed: &Replayed, layout: &Layout, ordinal: i32) -> Fragmentation {
        let totals = replayed.replay.find(ordinal).map(|device| device.totals).unwrap_or_default();
        let mut state = Fragmentation {
            ordinal,
            ts_ns: replayed.replay.ts_ns,
            reserved: totals.reserved,
            allocated: totals.allocated,
            requested: 0,
            pending: (totals.active - totals.allocated).max(0),
            empty: 0,
            empty_segments: 0,
            holes: 0,
            hole_count: 0,
            largest: 0,
            pinned: Vec::new(),
        };
        for segment in layout.segments(&replayed.replay, ordinal) {
            for block in &segment.blocks {
                state.requested += if block.requested < 0 { block.bytes } else { block.requested };
            }
            state.largest = state.largest.max(segment.holes.iter().copied().max().unwrap_or(0));
            if segment.is_empty() {
                state.empty += segment.bytes;
                state.empty_segments += 1;
            } else if !segment.holes.is_empty() {
                state.holes += segment.free();
                state.hole_count += segment.holes.len() as u64;
                state.pinned.push(segment);
            }
        }
        state.pinned.sort_by_key(|segment| (-segment.free(), segment.addr));
        state
    }

    /// Prints the reserved memory of `process` on the device.
    fn print(&self, printer: &mut Printer, process: &str, replayed: &Replayed, options: &Options) {
        let units = options.units;
        printer.line([
            format!("{process}, device {}, at {}: ", self.ordinal, duration(self.ts_ns)).into(),
            Cell::new(units.show(self.reserved).to_string(), Style::Strong),
            " reserved".into(),
        ]);
        let mut table =
            Table::new(&[("", Side::Right), ("", Side::Right), ("", Side::Left), ("", Side::Left)]);
        let mut line = |bytes: i64, what: String| {
            table.row([
                units.show(bytes).to_string().into(),
                percent(share(bytes, self.reserved)).into(),
                bar(share(bytes, self.reserved), 16).into(),
                what.into(),
            ]);
        };
        line(self.requested, "requested".to_owned());
        line(
            self.allocated - self.requested,
            "rounding and splitting: in blocks, but not requested".to_owned(),
        );
        if self.pending > 0 {
            line(self.pending, "freed, still in use by another stream".to_owned());
        }
        line(self.holes, format!("{} in segments that live blocks pin", counted(self.hole_count, "hole")));
        line(
            self.empty,
            format!("{}: torch.cuda.empty_cache() frees this", counted(self.empty_segments, "empty segment")),
        );
        let rest = self.reserved - self.allocated - self.pending - self.holes - self.empty;
        if rest != 0 {
            line(rest, "in segments with an unknown address".to_owned());
        }
        printer.table(&table);
        printer.plain(format!("the largest free piece is {}", units.show(self.largest)));
        if self.pinned.is_empty() {
            return;
        }
        printer.gap();
        let mut table = Table::new(&[
            ("free", Side::Right),
            ("segment", Side::Right),
            ("pinned by", Side::Right),
            ("step", Side::Right),
            ("category", Side::Left),
            ("op", Side::Left),
            ("module", Side::Left),
        ]);
        for segment in self.pinned.iter().take(options.top.unwrap_or(10)) {
            let Some(block) = largest(segment) else { continue };
            let more = segment.blocks.len() - 1;
            let pins = match more {
                0 => units.show(block.bytes).to_string(),
                more => format!("{} and {more} more", units.show(block.bytes)),
            };
            table.row([
                Cell::new(units.show(segment.free()).to_string(), Style::Strong),
                units.show(segment.bytes).to_string().into(),
                pins.into(),
                step_or_dash(block.owner.step).into(),
                category(block.owner.category).into(),
                replayed.symbols.or_dash(block.owner.op).into(),
                replayed.symbols.or_dash(block.owner.module).into(),
            ]);
        }
        printer.table(&table);
        printer.more(self.pinned.len().saturating_sub(options.top.unwrap_or(10)), "");
    }

    fn json(&self, trace: &TraceFile, replayed: &Replayed) -> Value {
        let pinned: Vec<Value> = self
            .pinned
            .iter()
            .map(|segment| {
                let blocks: Vec<Value> = segment
                    .blocks
                    .iter()
                    .map(|block| {
                        json!({
                            "alloc_id": block.id,
                            "addr": block.addr,
                            "bytes": block.bytes,
                            "requested_bytes": block.requested,
                            "step": block.owner.step,
                            "category": block.owner.category.as_str(),
                            "op": &*replayed.symbols.get(block.owner.op),
                            "module": &*replayed.symbols.get(block.owner.module),
                        })
                    })
                    .collect();
                json!({
                    "addr": segment.addr,
                    "bytes": segment.bytes,
                    "free_bytes": segment.free(),
                    "holes": segment.holes,
                    "blocks": blocks,
                })
            })
            .collect();
        let peak = replayed.replay.find(self.ordinal).map_or(0, |d| d.peak(Metric::Reserved).bytes);
        json!({
            "file": trace.path.display().to_string(),
            "rank": trace.meta.rank,
            "device": self.ordinal,
            "ts_ns": self.ts_ns,
            "reserved_bytes": self.reserved,
            "allocated_bytes": self.allocated,
            "requested_bytes": self.requested,
            "rounding_bytes": self.allocated - self.requested,
            "pending_bytes": self.pending,
            "hole_bytes": self.holes,
            "holes": self.hole_count,
            "empty_segment_bytes": self.empty,
            "empty_segments": self.empty_segments,
            "largest_free_bytes": self.largest,
            "peak_reserved_bytes": peak,
            "pinned_segments": pinned,
        })
    }
}

/// Returns the largest block of a segment.
fn largest(segment: &Segment) -> Option<&Block> {
    segment.blocks.iter().max_by_key(|block| (block.bytes, -block.id))
}
