//! Replays a trace to a moment that the user names: a peak, the end, an OOM, a time, a step or a mark.

use std::str::FromStr;

use memtrace_trace::{Api, EventName};

use crate::error::{Error, Result};
use crate::options::{Flag, Options, parse_window};
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::TraceFile;
use crate::read::symbols::SymbolTable;
use crate::read::together::RowReader;
use crate::state::block::{Block, is_unknown_form};
use crate::state::categories::KnownCategories;
use crate::state::last_oom::LastOom;
use crate::state::marks::{self, MarkName};
use crate::state::replay::{self, Metric, Replay, has_current_step, is_gpu};
use crate::state::replay_trace::{Replayed, replay_together, replay_trace, replay_until};

/// A moment of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NamedMoment {
    /// The moment with the highest value of this total.
    Peak(Metric),
    /// The end of the script, before Python frees the objects that it holds, or the end of the window if that
    /// is earlier.
    End,
    /// The last row of the window or, without a window, of the trace.
    Exit,
    /// The last request that torch's allocator could not serve.
    Oom,
    /// This time after the start of the trace, in ns.
    Time(i64),
    /// The end of this step.
    Step(i64),
    /// A mark of the program, or the end of one of its ranges.
    Mark(MarkName),
}

/// The moments, as a user writes them.
pub const MOMENTS: &str = "peak, reserved-peak, used-peak, oom, end (of the script), exit (after Python has freed \
                           its objects), step:N (its end), mark:NAME (the last) or mark:NAME#3, or a time such as 1.5s";

/// The option `--at`.
pub const FLAG: Flag = Flag { name: "at", value: Some("MOMENT"), default: "", choices: &[], help: MOMENTS };

impl FromStr for NamedMoment {
    type Err = Error;

    fn from_str(text: &str) -> Result<NamedMoment> {
        match text {
            "peak" => return Ok(NamedMoment::Peak(Metric::Allocated)),
            "used-peak" => return Ok(NamedMoment::Peak(Metric::Used)),
            "reserved-peak" => return Ok(NamedMoment::Peak(Metric::Reserved)),
            "end" => return Ok(NamedMoment::End),
            "exit" => return Ok(NamedMoment::Exit),
            "oom" => return Ok(NamedMoment::Oom),
            _ => {}
        }
        let bad = || Error::usage(format!("--at {text}: expected {MOMENTS}"));
        if let Some(step) = text.strip_prefix("step:") {
            return step.parse().map(NamedMoment::Step).map_err(|_| bad());
        }
        if let Some(name) = text.strip_prefix("mark:") {
            let is_name = !name.is_empty();
            return if is_name { Ok(NamedMoment::Mark(MarkName(name.to_owned()))) } else { Err(bad()) };
        }
        match parse_window(&format!("{text}:")) {
            Ok((from, _)) if from > i64::MIN => Ok(NamedMoment::Time(from)),
            _ => Err(bad()),
        }
    }
}

impl NamedMoment {
    /// Returns the moment itself or, for a mark, the time of the mark. Returns `None` if the trace has no
    /// such mark.
    ///
    /// # Errors
    /// When the trace cannot be read.
    pub fn without_mark(&self, trace: &TraceFile, options: &Options) -> Result<Option<NamedMoment>> {
        match self {
            NamedMoment::Mark(mark) => {
                Ok(marks::find(trace, mark, options)?.map(|row| NamedMoment::Time(row.ts_ns)))
            }
            other => Ok(Some(other.clone())),
        }
    }
}

/// Returns true if a row marks the end of the script.
pub(crate) fn ends_script(row: &Record, replay: &Replay) -> bool {
    row.event == EventName::Mark && *replay.symbols.get(row.api) == *Api::Script.as_str()
}

/// Replays `trace` up to the moment `at`. For `known` and `visit`, see [`replay_trace`]. Returns `None` if
/// the moment does not exist, for example without an OOM or without a device in use.
///
/// For a peak and for an OOM, this reads the trace twice: first to find the row, then up to that row. The
/// blocks at an OOM have the categories that their whole lives show, as on the HTML page, because a program
/// that catches the OOM continues. The summary is of the first reading: it names damage after the moment, where a
/// higher peak or a later OOM may be missing.
///
/// # Errors
/// When the trace cannot be read.
pub fn replay_to_moment(
    trace: &TraceFile,
    at: &NamedMoment,
    columns: Columns,
    options: &Options,
    known: KnownCategories,
    visit: impl FnMut(&Record, &Replay),
) -> Result<Option<Replayed>> {
    let tracked = Metric::Allocated;
    let wanted = replay::COLUMNS.and(columns);
    let mut whole = None;
    let last = match at {
        NamedMoment::End | NamedMoment::Exit => {
            let window = &options.window;
            let wanted = if window.is_open() { wanted } else { wanted.and(Columns::of(&["ts_ns"])) };
            let is_end = |row: &Record, replay: &Replay| {
                *at == NamedMoment::End && ends_script(row, replay)
                    || row.ts_ns > window.to_ns
                    || has_current_step(row.event) && row.step > window.to_step
            };
            return replay_until(trace, wanted, options, tracked, known, is_end, visit).map(Some);
        }
        NamedMoment::Time(ns) => {
            // `is_past` needs the time of every row. The replay itself reads no time of frees and ops.
            let wanted = wanted.and(Columns::of(&["ts_ns"]));
            let is_past = |row: &Record, _: &Replay| row.ts_ns > *ns;
            return replay_until(trace, wanted, options, tracked, known, is_past, visit).map(Some);
        }
        NamedMoment::Step(step) => {
            let is_past = |row: &Record, replay: &Replay| row.step > *step || ends_script(row, replay);
            return replay_until(trace, wanted, options, tracked, known, is_past, visit).map(Some);
        }
        NamedMoment::Peak(metric) => {
            let replayed = replay_trace(
                trace,
                Columns::of(&[]),
                options,
                *metric,
                KnownCategories::default(),
                |_, _| {},
            )?;
            let last = replayed.fullest(*metric, options).map_or(0, |device| device.peak(*metric).seq);
            whole = Some(replayed.summary);
            last
        }
        NamedMoment::Oom => {
            let (whole, found) = find_oom(trace, options, &known, &SymbolTable::default(), &mut [])?;
            let Some(oom) = found else { return Ok(None) };
            let replayed = replay_to_oom(trace, &oom, wanted, options, visit, None)?;
            return Ok(Some(Replayed { summary: whole.summary, ..replayed }));
        }
        NamedMoment::Mark(mark) => marks::find(trace, mark, options)?.map_or(0, |row| row.seq),
    };
    if last == 0 {
        return Ok(None);
    }
    // The row of a segment raises the total before the row of the block that needs the segment. So at such a
    // peak, continue until the block's row or, in a step without detail, the next `brief` row.
    let waits = matches!(at, NamedMoment::Peak(Metric::Reserved | Metric::Used));
    let mut found = !waits;
    let stop = |row: &Record, _: &Replay| {
        // If the row of the peak is not the row of a segment (but, for example, of memory outside torch's
        // allocator), do not wait for a block.
        found |= row.seq == last && !matches!(row.event, EventName::SegmentAlloc | EventName::SegmentMap);
        let past = row.seq > last;
        let stop = past && found;
        found |= past && matches!(row.event, EventName::Alloc | EventName::Brief | EventName::Oom);
        stop
    };
    let replayed = replay_until(trace, wanted, options, tracked, known, stop, visit)?;
    Ok(Some(match whole {
        Some(summary) => Replayed { summary, ..replayed },
        None => replayed,
    }))
}

/// The last OOM of a trace, found in a reading of the whole trace.
pub(crate) struct FoundOom {
    seq: i64,
    /// The categories for a replay up to the OOM: those of an earlier reading, if there was one, or those that the
    /// rules infer for the blocks that were live at the OOM. In a trace with tags, no categories.
    known: KnownCategories,
    /// In a trace with tags: the blocks that were live at the OOM, with their last tags.
    tagged: Vec<Block>,
    /// The symbols of `tagged`.
    symbols: SymbolTable,
}

/// Replays the whole trace and finds its last OOM. Each row also goes to `readers`; `symbols` gets the symbols of all
/// rows.
///
/// # Errors
/// When the trace cannot be read.
pub(crate) fn find_oom(
    trace: &TraceFile,
    options: &Options,
    known: &KnownCategories,
    symbols: &SymbolTable,
    readers: &mut [&mut dyn RowReader],
) -> Result<(Replayed, Option<FoundOom>)> {
    let mut last: Option<LastOom> = None;
    let mut replay = Replay::new(symbols, options.window, Metric::Allocated);
    replay.known = known.clone();
    let replayed = replay_together(trace, Columns::of(&[]), options, replay, readers, |row, replay| {
        let wanted = is_gpu(row.device) && options.device.is_none_or(|only| only == row.device);
        if row.event == EventName::Oom && wanted && replay.in_window() {
            last = Some(LastOom::new(row));
        } else if let Some(oom) = &mut last {
            oom.feed(replay);
        }
    })?;
    let Some(oom) = last else { return Ok((replayed, None)) };
    let (replay, symbols) = (&replayed.replay, symbols.clone());
    let mut found = FoundOom { seq: oom.seq, known: known.clone(), tagged: Vec::new(), symbols };
    if known.is_none() {
        let devices = replay.devices().iter().map(|device| device.ordinal);
        let blocks: Vec<Block> = devices.flat_map(|ordinal| oom.blocks(replay, ordinal)).collect();
        if replay.infers() {
            found.known = KnownCategories::of_blocks(&blocks, replay.rule());
        } else {
            // The trace has tags, but perhaps only after the OOM, where the replay up to the OOM does not see
            // them. The empty map disables the rules of inference in that replay.
            (found.known, found.tagged) = (KnownCategories::of_blocks(&[], ""), blocks);
        }
    }
    Ok((replayed, Some(found)))
}

/// Gets a row after the replay processed it.
pub(crate) type Visit<'a> = &'a mut dyn FnMut(&Record, &Replay);

/// Replays `trace` up to an OOM, with exactly the columns of `wanted`. For `visit`, see [`replay_trace`]. `visit_all`
/// also gets the rows after the OOM; without it, the reading ends there.
///
/// # Errors
/// When the trace cannot be read.
pub(crate) fn replay_to_oom(
    trace: &TraceFile,
    oom: &FoundOom,
    wanted: Wanted,
    options: &Options,
    mut visit: impl FnMut(&Record, &Replay),
    mut visit_all: Option<Visit<'_>>,
) -> Result<Replayed> {
    let ends_there = visit_all.is_none();
    let stop = |row: &Record, _: &Replay| ends_there && row.seq > oom.seq;
    let known = oom.known.clone();
    let (mut at_oom, mut is_past) = (None, false);
    let read = |row: &Record, replay: &Replay| {
        is_past |= row.seq > oom.seq;
        if !is_past {
            visit(row, replay);
        }
        if let Some(visit_all) = &mut visit_all {
            visit_all(row, replay);
            if row.seq == oom.seq && !is_past {
                at_oom = Some(replay.clone());
            }
        }
    };
    let mut replayed = replay_until(trace, wanted, options, Metric::Allocated, known, stop, read)?;
    if let Some(mut replay) = at_oom {
        replay.end(&trace.ending().unwrap_or_default());
        replayed.replay = replay;
    }
    let mut tagged = oom.tagged.clone();
    for block in tagged.iter_mut().filter(|block| !is_unknown_form(block.shape)) {
        for form in [&mut block.dtype, &mut block.shape] {
            *form = replayed.symbols.intern(&oom.symbols.get(*form));
        }
    }
    replayed.replay.copy_tags(&tagged);
    Ok(replayed)
}

#[cfg(test)]
mod tests {
    use memtrace_trace::Row;

    use super::*;
    use crate::testing::TraceBuilder;

    #[test]
    fn the_wait_for_the_block_of_a_segment_ends_at_a_brief_row() {
        let mut trace = TraceBuilder::default();
        trace.segment(20);
        let block = trace.alloc(10, Row::default());
        trace.segment(100);
        let brief = |bytes| Row { device: 0, event: EventName::Brief, delta_bytes: bytes, ..Row::default() };
        let at = trace.change(brief(90), [90, 90, 0]);
        trace.change(brief(-90), [-90, -90, 0]);
        trace.free(block, 10, Row::default());
        trace.segment(-100);
        trace.alloc(5, Row::default());
        let path = std::env::temp_dir().join(format!("memtrace-brief-peak-{}.csv", std::process::id()));
        std::fs::write(&path, trace.finish()).unwrap();
        let file = TraceFile::open(&path).unwrap();
        let mut last = 0;
        let none = KnownCategories::default();
        let peak = NamedMoment::Peak(Metric::Reserved);
        replay_to_moment(&file, &peak, Columns::of(&[]), &Options::default(), none, |row, _| last = row.seq)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(last, at);
    }

    #[test]
    fn moments_are_parsed_or_refused() {
        assert_eq!("peak".parse::<NamedMoment>().unwrap(), NamedMoment::Peak(Metric::Allocated));
        assert_eq!("exit".parse::<NamedMoment>().unwrap(), NamedMoment::Exit);
        assert_eq!("step:3".parse::<NamedMoment>().unwrap(), NamedMoment::Step(3));
        assert_eq!("1.5s".parse::<NamedMoment>().unwrap(), NamedMoment::Time(1_500_000_000));
        let mark = NamedMoment::Mark(MarkName("after forward#3".to_owned()));
        assert_eq!("mark:after forward#3".parse::<NamedMoment>().unwrap(), mark);
        assert!("mark:".parse::<NamedMoment>().unwrap_err().to_string().contains("mark:NAME"));
        assert!("".parse::<NamedMoment>().is_err() && " ".parse::<NamedMoment>().is_err());
        assert!("noon".parse::<NamedMoment>().unwrap_err().to_string().contains("step:N"));
    }
}
