//! What every report does: replay a trace, say which run it is, and end with what was lost.

use std::ops::ControlFlow;

use memtrace_trace::config::Ops;
use memtrace_trace::meta::Meta;
use serde_json::{Value, json};

use crate::error::Result;
use crate::options::Options;
use crate::profile::{self, Profile};
use crate::read::input::Input;
use crate::read::record::{Columns, Record, Wanted};
use crate::read::stream::{Told, TraceFile};
use crate::read::symbols::{Symbol, Texts};
use crate::render::phantom_run::PhantomRun;
use crate::render::text::{Cell, Page, Style, count, percent, share};
use crate::state::categories;
use crate::state::replay::{self, Device, HOST, Metric, Moment, Replay, Window};

/// A trace, replayed to its end.
pub struct Played {
    /// The state at the end, and the peaks.
    pub replay: Replay,
    /// The texts of its symbols.
    pub texts: Texts,
    /// What reading it told.
    pub told: Told,
}

/// Replays `trace`; `visit` sees each row after the replay took it, with `columns` beside those that
/// the replay needs.
///
/// # Errors
/// When the trace cannot be read.
pub fn play(
    trace: &TraceFile,
    columns: Columns,
    options: &Options,
    tracked: Metric,
    visit: impl FnMut(&Record, &Replay),
) -> Result<Played> {
    play_until(trace, columns, options, tracked, |_| false, visit)
}

/// As [`play`], up to the first row for which `stop` holds; that row is not taken.
///
/// # Errors
/// When the trace cannot be read.
pub fn play_until(
    trace: &TraceFile,
    columns: Columns,
    options: &Options,
    tracked: Metric,
    stop: impl FnMut(&Record) -> bool,
    visit: impl FnMut(&Record, &Replay),
) -> Result<Played> {
    let texts = Texts::default();
    let mut replay = Replay::new(&texts, options.window, tracked);
    if trace.meta.ops == Ops::Io.name() && !trace.meta.modules {
        // No tags: the whole trace tells what its blocks are for, whatever part of it is looked at.
        let whole = Options { window: Window::default(), ..options.clone() };
        replay.flow = Profile::of(trace, &whole)?.told();
    }
    run(trace, replay::COLUMNS.and(columns), options, replay, texts, stop, visit)
}

/// As [`play`], with the columns that `wanted` has for each event, and the categories of the rows alone.
///
/// # Errors
/// When the trace cannot be read.
pub fn play_rows(
    trace: &TraceFile,
    wanted: Wanted,
    options: &Options,
    tracked: Metric,
    visit: impl FnMut(&Record, &Replay),
) -> Result<Played> {
    let texts = Texts::default();
    let replay = Replay::new(&texts, options.window, tracked);
    run(trace, wanted, options, replay, texts, |_| false, visit)
}

/// Replays every column of `trace` and holds each row against the sum of the deltas.
///
/// # Errors
/// When the trace cannot be read.
pub fn check(trace: &TraceFile, options: &Options) -> Result<Played> {
    let texts = Texts::default();
    let replay = Replay::new(&texts, options.window, Metric::Allocated).checking();
    run(trace, Wanted::all_events(Columns::ALL), options, replay, texts, |_| false, |_, _| {})
}

fn run(
    trace: &TraceFile,
    wanted: Wanted,
    options: &Options,
    mut replay: Replay,
    texts: Texts,
    mut stop: impl FnMut(&Record) -> bool,
    mut visit: impl FnMut(&Record, &Replay),
) -> Result<Played> {
    let told = trace.read(wanted, options.lenient, &texts, |row| {
        if stop(row) {
            return ControlFlow::Break(());
        }
        replay.feed(row);
        visit(row, &replay);
        ControlFlow::Continue(())
    })?;
    Ok(Played { replay, texts, told })
}

impl Played {
    /// The GPUs that the options ask for, or all.
    pub fn gpus<'a>(&'a self, options: &Options) -> impl Iterator<Item = &'a Device> + use<'a> {
        let only = options.device;
        let wanted =
            move |device: &&Device| device.ordinal != HOST && only.is_none_or(|only| only == device.ordinal);
        self.replay.devices.iter().filter(wanted)
    }

    /// The GPU with the highest peak of `metric`.
    #[must_use]
    pub fn fullest(&self, metric: Metric, options: &Options) -> Option<&Device> {
        self.gpus(options).max_by_key(|device| (device.peak(metric).bytes, -device.ordinal))
    }

    /// The bytes at a device's peak that nothing says the owner of, and all of them.
    #[must_use]
    pub fn unattributed(&self, ordinal: i32) -> (i64, i64) {
        let blocks = self.replay.at_peak(ordinal, false);
        let nobody = blocks.iter().filter(|block| block.owner.is_nobody()).map(|block| block.bytes).sum();
        (nobody, blocks.iter().map(|block| block.bytes).sum())
    }

    /// A moment as JSON.
    #[must_use]
    pub fn moment(&self, moment: &Moment) -> Value {
        let owner = &moment.owner;
        json!({
            "bytes": moment.bytes,
            "seq": moment.seq,
            "ts_ns": moment.ts_ns,
            "step": owner.step,
            "phase": &*self.texts.get(owner.phase),
            "module": &*self.texts.get(owner.module),
            "op": &*self.texts.get(owner.op),
        })
    }
}

/// The text of an owner as reports show it: `(unattributed)` for nobody.
#[must_use]
pub fn shown(texts: &Texts, symbol: Symbol) -> String {
    if symbol == Symbol::NONE { "(unattributed)".to_owned() } else { texts.get(symbol).to_string() }
}

/// The text of a symbol, or `-` for none, for cells of a table.
#[must_use]
pub fn dash(texts: &Texts, symbol: Symbol) -> String {
    if symbol == Symbol::NONE { "-".to_owned() } else { texts.get(symbol).to_string() }
}

/// A step, or `-` before the first.
#[must_use]
pub fn step(step: i64) -> String {
    if step < 0 { "-".to_owned() } else { step.to_string() }
}

/// The first line of every report: the command that was traced, where, and on what.
pub fn heading(page: &mut Page, input: &Input, meta: &Meta) {
    // Where python and the script are says nothing new to the one who started them.
    let base = |word: &String| word.rsplit('/').next().unwrap_or(word).to_owned();
    let words: Vec<String> = meta
        .argv
        .iter()
        .enumerate()
        .map(|(index, word)| if index < 2 { base(word) } else { word.clone() })
        .collect();
    let command = match words.join(" ") {
        command if command.is_empty() => input.path.display().to_string(),
        command if command.chars().count() > 60 => {
            format!("{}…", command.chars().take(59).collect::<String>())
        }
        command => command,
    };
    let mut about = String::new();
    match meta.devices.as_slice() {
        [] => {}
        [device] => about.push_str(&format!("  {}", device.name)),
        [device, more @ ..] => about.push_str(&format!("  {} and {} more", device.name, more.len())),
    }
    if let Some(torch) = meta.versions.get("torch") {
        about.push_str(&format!("  torch {torch}"));
    }
    if meta.world_size > 1 {
        about.push_str(&format!("  {} ranks", meta.world_size));
    }
    let mut cells = vec![Cell::new(command, Style::Strong), Cell::new(about, Style::Faint)];
    if !meta.phantom.is_null() {
        cells.push(Cell::new("  (phantom: a device that is not there)", Style::Alarm));
    }
    page.line(cells);
}

/// What ends every report: how far it can be trusted.
#[derive(Clone, Debug, Default)]
pub struct Footer {
    /// Events that the traced processes dropped.
    pub lost: u64,
    /// Bytes at the peaks that nothing says the owner of, and all of them.
    pub unattributed: (i64, i64),
    /// The same of all bytes that blocks were given in the part that was looked at, whenever.
    pub unattributed_ever: (i64, i64),
    /// The runs on a device that is not there.
    pub phantom: PhantomRun,
    /// What else the reader should know.
    pub notes: Vec<String>,
}

impl Footer {
    /// The footer of a report on `input`.
    #[must_use]
    pub fn new(input: &Input) -> Footer {
        let mut footer = Footer { notes: input.notes.clone(), ..Footer::default() };
        footer.phantom.add(input);
        footer
    }

    /// Takes in what was learned of one trace. `ordinal` is the device that the report is about.
    pub fn add(&mut self, trace: &TraceFile, played: &Played, ordinal: Option<i32>) {
        self.lost += played.replay.counts.lost;
        if let Some(ordinal) = ordinal {
            self.add_share(played, ordinal);
        }
        let name = trace.path.file_name().unwrap_or(trace.path.as_os_str()).display();
        if played.replay.problems.unfinished {
            self.notes.push(format!("{name} has no end row: the process was killed, or still runs"));
        }
        if let Some(first) = &played.told.first_skipped {
            let skipped = count(played.told.skipped);
            self.notes.push(format!("{skipped} lines are not rows and were passed over; the first: {first}"));
        }
        self.notes.extend(trace.meta.degraded.iter().cloned());
    }

    /// Takes in whose a device's peak was: all of a report that does not read to the end.
    pub fn add_share(&mut self, played: &Played, ordinal: i32) {
        let (peak, ever) = (played.unattributed(ordinal), played.replay.given(ordinal));
        self.add_bytes(peak, ever);
    }

    /// Takes in bytes that nobody owns, and all of them: at a peak, and ever.
    pub fn add_bytes(&mut self, peak: (i64, i64), ever: (i64, i64)) {
        for (sum, more) in [(&mut self.unattributed, peak), (&mut self.unattributed_ever, ever)] {
            *sum = (sum.0.saturating_add(more.0), sum.1.saturating_add(more.1));
        }
    }

    /// Says how categories were inferred, where they were: for reports that show them.
    pub fn note_inference(&mut self, played: &Played) {
        let by_flow = !played.replay.flow.is_empty();
        let rule = if by_flow { profile::RULE } else { categories::RULE }.to_owned();
        if played.replay.infers() && !self.notes.contains(&rule) {
            self.notes.push(rule);
        }
    }

    /// The share of the peak that has no owner, from 0 to 1.
    #[must_use]
    pub fn unattributed_share(&self) -> f64 {
        share(self.unattributed.0, self.unattributed.1)
    }

    /// The share of all bytes ever handed out that has no owner, from 0 to 1.
    #[must_use]
    pub fn unattributed_share_ever(&self) -> f64 {
        share(self.unattributed_ever.0, self.unattributed_ever.1)
    }

    /// Adds the footer's lines to a page.
    pub fn print(&self, page: &mut Page) {
        let lost = format!("{} events lost", count(self.lost));
        page.line([
            Cell::new(lost, if self.lost > 0 { Style::Alarm } else { Style::Faint }),
            Cell::new(
                format!(
                    ", {} of the peak unattributed, {} of all bytes allocated",
                    percent(self.unattributed_share()),
                    percent(self.unattributed_share_ever())
                ),
                Style::Faint,
            ),
        ]);
        if self.phantom.is_any() {
            page.line([Cell::new(format!("note: {}", self.phantom.note()), Style::Faint)]);
        }
        for note in &self.notes {
            page.line([Cell::new(format!("note: {note}"), Style::Faint)]);
        }
    }
}
