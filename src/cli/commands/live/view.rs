//! Renders the state of a running trace as lines of text.

use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use memtrace_analysis::options::Options;
use memtrace_analysis::render::curve::{Curve, CurveLine};
use memtrace_analysis::render::numbers::{bar, count, counted, duration, percent, share};
use memtrace_analysis::render::printer::{Cell, NO_BREAK, Printer, Side, Style, Table};
use memtrace_analysis::reports::growth_lines;
use memtrace_analysis::state::group::{Group, Key};
use memtrace_analysis::state::live_run::{LiveProcess, LiveRun};
use memtrace_analysis::state::replay::{HOST, Metric};
use memtrace_trace::files::process_name;
use memtrace_trace::text::{NONE, shell_word};
use memtrace_trace::units::Unit;

use super::{DETAIL_STEPS, GROUPINGS};

/// [`NO_BREAK`] as a text.
const NO_BREAK_TEXT: &str = "\u{a0}";

/// The keys by which owners can be sorted.
pub(super) const SORTS: [&str; 4] = ["bytes", "growth", "blocks", "name"];

/// The settings that keys change.
pub(super) struct ViewSettings {
    /// An index into [`GROUPINGS`].
    pub(super) by: usize,
    /// An index into [`SORTS`].
    pub(super) sort: usize,
    /// The rank that `--rank` names.
    pub(super) rank: Option<i32>,
    /// The name of the chosen process's trace. Without it, the process of `rank` is shown or, without that, the process
    /// with the most memory in use.
    pub(super) chosen: Option<String>,
    pub(super) paused: bool,
    pub(super) help: bool,
    /// A line above the keys, about the last request for detail; empty if there was no request.
    pub(super) notice: String,
    pub(super) interval: Duration,
}

/// The screen: the settings, and the previous refresh for comparison.
pub(super) struct View<'a> {
    pub(super) path: &'a Path,
    pub(super) units: Unit,
    pub(super) paint: bool,
    pub(super) settings: ViewSettings,
    pub(super) previous: Option<Previous>,
}

/// The owners at the previous refresh, to compute their growth.
pub(super) struct Previous {
    at: Instant,
    by: usize,
    process: String,
    rows: u64,
    groups: Vec<(String, Group)>,
    /// For each owner, the growth in bytes between this refresh and the one before it.
    growth: Vec<(String, i64)>,
    rows_per_second: f64,
}

impl View<'_> {
    /// Returns the position of the chosen process, or `None` if none is chosen.
    fn place(&self, live_run: &LiveRun) -> Option<usize> {
        let mut processes = live_run.processes.iter();
        match (&self.settings.chosen, self.settings.rank) {
            (Some(name), _) => processes.position(|process| process_name(&process.path) == *name),
            (None, Some(rank)) => processes.position(|process| process.meta.rank == rank),
            (None, None) => None,
        }
    }

    /// Returns the process to show: the chosen process, or else the process with the most memory in use. Returns `None`
    /// if the run has no processes yet.
    pub(super) fn process<'f>(&self, live_run: &'f LiveRun) -> Option<&'f LiveProcess> {
        self.place(live_run).map(|place| &live_run.processes[place]).or_else(|| {
            let used = |p: &LiveProcess| p.device().map_or(0, |device| device.totals.get(Metric::Used));
            live_run.processes.iter().max_by_key(|p| (used(p), -p.meta.rank))
        })
    }

    /// Chooses the next process. After the last one, chooses the process with the most memory in use.
    pub(super) fn next_process(&mut self, live_run: &LiveRun) {
        let next = self.place(live_run).map_or(0, |place| place + 1);
        self.settings.rank = None;
        self.settings.chosen = live_run.processes.get(next).map(|process| process_name(&process.path));
    }

    /// Computes the growth of each owner since the previous refresh, and stores the owners for the next
    /// refresh.
    pub(super) fn remember(&mut self, live_run: &LiveRun) {
        let Some(process) = self.process(live_run) else { return };
        let (by, rows) = (self.settings.by, process.replay.counts.rows);
        let process_name = process_name(&process.path);
        let groups = groups(process, by);
        let now = Instant::now();
        let mut growth = Vec::new();
        let mut rows_per_second = 0.0;
        if let Some(previous) =
            self.previous.as_ref().filter(|previous| previous.by == by && previous.process == process_name)
        {
            let seconds = now.duration_since(previous.at).as_secs_f64().max(1e-3);
            rows_per_second = rows.saturating_sub(previous.rows) as f64 / seconds;
            for (name, group) in &groups {
                let old = previous.groups.iter().find(|(known, _)| known == name).map_or(0, |(_, g)| g.bytes);
                growth.push((name.clone(), group.bytes - old));
            }
        }
        let process = process_name;
        self.previous = Some(Previous { at: now, by, process, rows, groups, growth, rows_per_second });
    }

    /// Returns the whole screen, in at most `height` lines of `width` columns.
    pub(super) fn lines(&self, live_run: &LiveRun, width: usize, height: usize) -> Vec<String> {
        let mut page = Printer::new(self.paint, Some(width));
        if self.settings.help {
            help(&mut page);
            return cut(&page, height);
        }
        let Some(process) = self.process(live_run) else {
            page.line([
                Cell::new("memtrace live", Style::Strong),
                format!("  waiting for a trace in {}", self.path.display()).into(),
            ]);
            page.gap();
            page.line([
                "write one with  ".into(),
                Cell::new(
                    format!("memtrace run -o {} -- python train.py", self.path.display()),
                    Style::Command,
                ),
            ]);
            return with_keys(&page, &self.keys(width), height);
        };
        self.heading(&mut page, process);
        if live_run.processes.len() > 1 {
            self.ranks(&mut page, live_run, process, height / 4);
        }
        self.totals(&mut page, process);
        let used = page.text().lines().count();
        // The curve gets a third of the remaining lines, but at most 14. If that is less than 6, there is no
        // curve. The owners get the rest.
        let curve = (height.saturating_sub(used) / 3).clamp(0, 14);
        if curve >= 6 {
            self.curve(&mut page, process, width, curve - 4);
        }
        if curve >= 6 {
            page.gap();
        }
        let used = page.text().lines().count();
        let keys = self.keys(width);
        self.owners(&mut page, process, height.saturating_sub(used + keys.len() + 1).max(1), width);
        with_keys(&page, &keys, height)
    }

    fn heading(&self, page: &mut Printer, process: &LiveProcess) {
        let meta = &process.meta;
        let words: Vec<&str> =
            meta.argv.iter().take(8).map(|word| word.rsplit('/').next().unwrap_or(word)).collect();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_nanos() as i64);
        let mut state = if process.ended {
            format!("ended after {}", duration(process.replay.ts_ns))
        } else {
            format!("running for {}", duration((now - meta.start_unix_ns).max(process.replay.ts_ns)))
        };
        let silent = now - meta.start_unix_ns - process.replay.ts_ns;
        if !process.ended && silent > 10_000_000_000 {
            state = format!("no new row for {}: idle or killed", duration(silent));
        }
        let mut cells = vec![
            Cell::new(words.join(" "), Style::Strong),
            Cell::new(format!("  {state}"), if process.ended { Style::Alarm } else { Style::Plain }),
        ];
        if self.settings.paused {
            cells.push(Cell::new("  PAUSED", Style::Alarm));
        }
        page.line(cells);
        // The card whose memory is shown below; before the first row of a card, the first of the process.
        let card = match process.device() {
            Some(device) => meta.device(device.ordinal),
            None => meta.devices.first(),
        };
        let gpu = card.map_or("", |card| card.name.as_str());
        let mut about = format!("{gpu}  {}", counted(process.replay.counts.rows, "event"));
        if let Some(previous) = self.previous.as_ref().filter(|previous| previous.rows_per_second > 0.0) {
            about.push_str(&format!(", {} per second", count(previous.rows_per_second as u64)));
        }
        let mut cells = vec![Cell::new(about, Style::Faint)];
        if !meta.phantom.is_null() {
            cells.push(Cell::new("  simulated GPU", Style::Alarm));
        }
        if process.replay.counts.lost > 0 {
            cells.push(Cell::new(
                format!("  {} lost", counted(process.replay.counts.lost, "event")),
                Style::Alarm,
            ));
        }
        page.line(cells);
    }

    fn ranks(&self, page: &mut Printer, live_run: &LiveRun, shown: &LiveProcess, most: usize) {
        let mut table = Table::new(&[
            ("rank", Side::Right),
            ("allocated", Side::Right),
            ("reserved", Side::Right),
            ("peak", Side::Right),
            ("step", Side::Right),
            ("", Side::Left),
        ]);
        for process in live_run.processes.iter().take(most.max(2)) {
            let device = process.device();
            let bytes = |value: Option<i64>| self.units.show(value.unwrap_or(0)).to_string();
            let own = std::ptr::eq(process, shown);
            table.row([
                Cell::new(process.meta.rank.to_string(), if own { Style::Strong } else { Style::Plain }),
                bytes(device.map(|device| device.totals.allocated)).into(),
                bytes(device.map(|device| device.totals.reserved)).into(),
                bytes(device.map(|device| device.peak(Metric::Allocated).bytes)).into(),
                process.replay.last_step().to_string().into(),
                if own {
                    "◂ shown below"
                } else if process.ended {
                    "ended"
                } else {
                    ""
                }
                .into(),
            ]);
        }
        page.gap();
        page.table(&table);
        let rest = live_run.processes.len().saturating_sub(most.max(2));
        if rest > 0 {
            page.line([Cell::new(format!("{} more", counted(rest as u64, "rank")), Style::Faint)]);
        }
        page.gap();
    }

    fn totals(&self, page: &mut Printer, process: &LiveProcess) {
        let Some(device) = process.device() else {
            page.plain("no GPU memory yet");
            return;
        };
        let replay = &process.replay;
        let phase = process.symbols.get(replay.phase);
        // The last rows of a process may have no step. In that case, show the last step.
        let step = match (replay.step, replay.last_step()) {
            (step, _) if step >= 0 => format!("step {step}"),
            (_, last) if last >= 0 => format!("last step {last}"),
            _ => "before the first step".to_owned(),
        };
        page.line([
            format!("rank {}, GPU {}: ", process.meta.rank, device.ordinal).into(),
            Cell::new(step, Style::Strong),
            if phase.as_ref() == NONE { String::new() } else { format!(", {phase}") }.into(),
        ]);
        let capacity = process.meta.total_bytes(device.ordinal);
        let used = device.totals.get(Metric::Used);
        let whole = if capacity > 0 { capacity } else { device.peak(Metric::Used).bytes.max(1) };
        let mut table = Table::new(&[
            ("", Side::Left),
            ("", Side::Right),
            ("", Side::Left),
            ("", Side::Right),
            ("", Side::Left),
        ]);
        for (name, value, metric, hue) in [
            ("allocated", device.totals.allocated, Metric::Allocated, 0),
            ("reserved", device.totals.reserved, Metric::Reserved, 5),
            (device.name_of(Metric::Used), used, Metric::Used, 3),
        ] {
            if metric == Metric::Used && used == device.totals.reserved {
                continue;
            }
            let peak = device.peak(metric);
            let mut when = format!("peak {}", self.units.show(peak.bytes));
            if peak.owner.step >= 0 {
                when.push_str(&format!(", step {}", peak.owner.step));
            }
            let part = share(value, whole);
            table.row([
                name.into(),
                Cell::new(self.units.show(value).to_string(), Style::Strong),
                Cell::new(format!("{:<24}", bar(part, 24)), Style::Hue(hue)),
                percent(part).into(),
                Cell::new(when, Style::Faint),
            ]);
        }
        page.table(&table);
        if capacity > 0 {
            let left = capacity - used;
            let near = left < capacity / 10;
            page.line([
                Cell::new(self.units.show(left).to_string(), if near { Style::Alarm } else { Style::Strong }),
                format!(" of {} free", self.units.show(capacity)).into(),
            ]);
        }
        for line in growth_lines(&process.levels, self.units) {
            page.plain(line);
        }
        let ooms = replay.counts.of(memtrace_trace::EventName::Oom);
        if ooms > 0 {
            let path = shell_word(&self.path.display().to_string());
            let text = format!("{}: memtrace oom {path}", counted(ooms, "OOM"));
            page.line([Cell::new(text, Style::Alarm)]);
        }
        if let Some(host) = replay.find(HOST).filter(|host| host.totals.allocated > 0) {
            page.line([Cell::new(
                format!("pinned host memory {}", self.units.show(host.totals.allocated)),
                Style::Faint,
            )]);
        }
    }

    fn curve(&self, page: &mut Printer, process: &LiveProcess, width: usize, height: usize) {
        let Some(device) = process.device() else { return };
        let Some((_, allocated, used)) = process.history.iter().find(|known| known.0 == device.ordinal)
        else {
            return;
        };
        let pieces = (width.clamp(40, 200) - Curve::MARGIN - 2) * 2;
        let end = process.replay.ts_ns;
        let ((grid, high), (_, used)) = (allocated.resampled(end, pieces), used.resampled(end, pieces));
        Curve {
            grid,
            high: &high,
            line: Some(CurveLine { name: device.name_of(Metric::Used), high: &used }),
            total_name: "allocated",
            bands: Vec::new(),
            phases: Vec::new(),
            steps: Vec::new(),
            inputs: Vec::new(),
            peak_ns: Some(device.peak(Metric::Allocated).ts_ns),
            ooms: Vec::new(),
            units: self.units,
        }
        .print(page, height);
    }

    fn owners(&self, page: &mut Printer, process: &LiveProcess, room: usize, width: usize) {
        let by = self.settings.by;
        let mut groups = groups(process, by);
        let total: i64 = groups.iter().map(|(_, group)| group.bytes).sum();
        let name = process_name(&process.path);
        let known = self.previous.as_ref().filter(|before| before.by == by && before.process == name);
        let growth = |name: &str| {
            known
                .and_then(|previous| previous.growth.iter().find(|(n, _)| n == name))
                .map_or(0, |(_, by)| *by)
        };
        match SORTS[self.settings.sort] {
            "growth" => groups.sort_by_key(|(name, group)| (-growth(name), -group.bytes, name.clone())),
            "blocks" => groups.sort_by_key(|(name, group)| (u64::MAX - group.blocks, name.clone())),
            "name" => groups.sort_by(|a, b| a.0.cmp(&b.0)),
            _ => {}
        }
        // A name that is too long for the terminal takes several lines, so drop owners until the table fits.
        let mut shown = groups.len().min(room.saturating_sub(1).max(1));
        let table = loop {
            let table = self.owners_table(&groups[..shown], total, &growth);
            let mut trial = Printer::new(false, Some(width));
            trial.table(&table);
            let rest = usize::from(shown < groups.len());
            let over = (trial.text().lines().count() + rest).saturating_sub(room);
            if over == 0 || shown <= 1 {
                break table;
            }
            shown -= over.div_ceil(4).min(shown - 1);
        };
        page.table(&table);
        if groups.len() > shown {
            let bytes = groups[shown..].iter().map(|(_, group)| group.bytes).sum();
            page.line([Cell::new(
                format!("{} more, {}", groups.len() - shown, self.units.show(bytes)),
                Style::Faint,
            )]);
        }
    }

    fn owners_table(&self, groups: &[(String, Group)], total: i64, growth: &impl Fn(&str) -> i64) -> Table {
        let mut table = Table::new(&[
            ("bytes", Side::Right),
            ("share", Side::Right),
            ("", Side::Left),
            ("change", Side::Right),
            ("blocks", Side::Right),
            (GROUPINGS[self.settings.by].1, Side::Left),
        ]);
        for (name, group) in groups {
            let change = match growth(name) {
                0 => String::new(),
                grown if grown > 0 => format!("+{}", self.units.show(grown)),
                grown => format!("-{}", self.units.show(-grown)),
            };
            table.row([
                Cell::new(self.units.show(group.bytes).to_string(), Style::Strong),
                percent(share(group.bytes, total)).into(),
                Cell::new(format!("{:<12}", bar(share(group.bytes, total), 12)), Style::Hue(0)),
                Cell::new(change, Style::Faint),
                count(group.blocks).into(),
                name.as_str().into(),
            ]);
        }
        table
    }

    /// Returns the lines below the page: the notice, and the keys, which need several lines on a narrow
    /// terminal.
    fn keys(&self, width: usize) -> Vec<String> {
        let mut page = Printer::new(self.paint, Some(width));
        if !self.settings.notice.is_empty() {
            page.line([Cell::new(self.settings.notice.as_str(), Style::Strong)]);
        }
        keys(&mut page, &self.settings);
        page.text().lines().map(str::to_owned).collect()
    }
}

/// Returns the live blocks grouped by `GROUPINGS[by].1`, largest first.
fn groups(process: &LiveProcess, by: usize) -> Vec<(String, Group)> {
    let Some(device) = process.device() else { return Vec::new() };
    let blocks = process.replay.live_on(device.ordinal, false);
    let mut options = Options::default();
    options.values.insert("by", GROUPINGS[by].1.to_owned());
    // Only an invalid `--depth` would be an error, but it is not set here.
    let Ok(key) = Key::from_options(&options) else { return Vec::new() };
    memtrace_analysis::state::group::sorted(
        key.on_modules(&process.replay, &blocks).groups(&blocks, &process.symbols),
    )
}

fn keys(page: &mut Printer, settings: &ViewSettings) {
    let mut cells = Vec::new();
    let is_chosen = settings.chosen.is_some() || settings.rank.is_some();
    for (key, action) in [
        ("q", "quit".to_owned()),
        ("space", if settings.paused { "resume" } else { "pause" }.to_owned()),
        ("b", format!("by {}", GROUPINGS[settings.by].1)),
        ("s", format!("sort: {}", SORTS[settings.sort])),
        ("r", if is_chosen { "next process" } else { "process: most used" }.to_owned()),
        ("d", "detail".to_owned()),
        ("+ -", format!("every {:.1} s", settings.interval.as_secs_f64())),
        ("h", "help".to_owned()),
    ] {
        cells.push(Cell::new(key.replace(' ', NO_BREAK_TEXT), Style::Strong));
        let action = action.replace(' ', NO_BREAK_TEXT);
        cells.push(Cell::new(format!("{NO_BREAK}{action}   "), Style::Faint));
    }
    page.line(cells);
}

fn help(page: &mut Printer) {
    page.line([Cell::new("memtrace live", Style::Strong), "  keys".into()]);
    page.gap();
    let mut table = Table::new(&[("", Side::Left), ("", Side::Left)]);
    let groupings = GROUPINGS.map(|(_, name)| name).join(", ");
    for (key, action) in [
        ("q, Esc", "quit; the traced program continues"),
        ("space", "pause or resume"),
        ("b", &format!("next grouping: {groupings}")),
        (&GROUPINGS.map(|(key, _)| key.to_string()).join(" "), &format!("group by {groupings}")),
        ("s  < >", "next or previous order: bytes, growth, blocks, name"),
        ("r", "next process; after the last, the one with the most memory in use"),
        (
            "d",
            &format!("record the next {DETAIL_STEPS} steps of the shown process in full, as --detail does"),
        ),
        ("+ -", "refresh more often, less often"),
        ("h ?", "this help; any key closes it"),
    ] {
        table.row([Cell::new(key, Style::Strong), action.into()]);
    }
    page.table(&table);
}

fn cut(page: &Printer, height: usize) -> Vec<String> {
    page.text().lines().take(height).map(str::to_owned).collect()
}

/// Returns the lines of the page, then an empty line and the lines of keys, in at most `height` lines. The
/// page is cut if necessary.
fn with_keys(page: &Printer, keys: &[String], height: usize) -> Vec<String> {
    let mut lines = cut(page, height.saturating_sub(keys.len() + 1).max(1));
    lines.push(String::new());
    lines.extend(keys.iter().cloned());
    lines.truncate(height);
    lines
}
