//! `memtrace live`: shows a running trace and refreshes it: memory in use, its owners, and the remaining free
//! memory.

mod detail;
mod openmetrics;
mod screen;
mod view;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, ArgMatches, Command, ValueHint, value_parser};
use crossterm::event::{Event, KeyCode, KeyEventKind, KeyModifiers};
use memtrace_analysis::selection;
use memtrace_analysis::state::live_run::{LiveProcess, LiveRun};
use memtrace_trace::units::Unit;

use super::nvidia_smi;
use super::process_request::Request;
use crate::args::{self, DEFAULT_FOLDER};
use crate::{signals, terminal};
use screen::Screen;
use view::{SORTS, View, ViewSettings};

/// The number of detailed steps that the key `d` requests.
const DETAIL_STEPS: u32 = 5;

/// The maximum time until a signal that asks this command to end is noticed.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// The ways to group live blocks, in the order in which the key `b` selects them, each with its own key.
const GROUPINGS: [(char, &str); 5] =
    [('m', "module"), ('c', "category"), ('o', "op"), ('p', "phase"), ('t', "step")];

/// Returns the definition of the command `memtrace live`.
pub(crate) fn command() -> Command {
    let mut command = Command::new("live")
        .about("Watch a running trace, or ask its process for the detail of its next steps")
        .after_help(args::examples(&[
            ("live out", "memory by owner, the step and the free memory left, refreshed"),
            ("live --once out", "one refresh, for scripts"),
            ("live --detail 4711 --steps 5", "record five steps of process 4711 in full"),
            ("live --nvidia-smi -L", "the simulated GPUs of running programs"),
        ]))
        .arg(
            Arg::new("trace")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::AnyPath)
                .help(format!(
                    "The folder of the run, which may not exist yet [default: the newest run in \
                     {DEFAULT_FOLDER}]"
                )),
        )
        .arg(
            Arg::new("by")
                .long("by")
                .value_name("KEY")
                .default_value("module")
                .value_parser(PossibleValuesParser::new(GROUPINGS.map(|(_, name)| name)))
                .help("Group the live blocks by this key; press b to change it"),
        )
        .arg(
            Arg::new("interval")
                .long("interval")
                .value_name("SECONDS")
                .default_value("1")
                .value_parser(interval)
                .allow_negative_numbers(true)
                .help("Seconds between refreshes"),
        )
        .arg(
            Arg::new("once")
                .long("once")
                .action(ArgAction::SetTrue)
                .help("Print once and exit, for scripts and pipes"),
        )
        .arg(
            Arg::new("openmetrics")
                .long("openmetrics")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .value_hint(ValueHint::FilePath)
                .conflicts_with_all(["by", "units", "color"])
                .help(
                    "Write the state as OpenMetrics text into this file at each --interval, and draw no screen; \
                     for Prometheus and node_exporter. With --once write it once; - is stdout",
                ),
        );
    command = command.args(detail::args()).arg(nvidia_smi::arg());
    for arg in args::shared_args() {
        if matches!(arg.get_id().as_str(), "rank" | "units" | "color") {
            command = command.arg(arg);
        }
    }
    command
}

/// Parses the value of `--interval`, in seconds.
fn interval(text: &str) -> std::result::Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| (0.1..=3600.0).contains(seconds));
    let seconds = seconds.ok_or("expected a number of seconds, from 0.1 to 3600")?;
    Ok(Duration::from_secs_f64(seconds))
}

/// Shows a run once, or until `q` is pressed. With `--openmetrics`, writes the metrics at each interval
/// instead, until a signal ends this command. Also handles `--detail` and `--nvidia-smi`.
///
/// # Errors
/// When the request is invalid, there is no trace to show once, or the terminal fails.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    if matches.contains_id("nvidia-smi") {
        return nvidia_smi::run(matches);
    }
    if let Some(pid) = matches.get_one::<u32>("detail") {
        return detail::ask(*pid, matches);
    }
    let path = matches.get_one::<PathBuf>("trace").map_or(Path::new(DEFAULT_FOLDER), PathBuf::as_path);
    let text = |name: &str| matches.get_one::<String>(name).map_or("", String::as_str);
    let units: Unit = text("units").parse().map_err(|why: String| anyhow!(why))?;
    let stdout = std::io::stdout();
    let metrics = matches.get_one::<PathBuf>("openmetrics");
    let interactive = metrics.is_none() && !matches.get_flag("once") && terminal::width(&stdout).is_some();
    let settings = ViewSettings {
        by: GROUPINGS.iter().position(|(_, name)| *name == text("by")).unwrap_or(0),
        sort: 0,
        rank: matches.get_one::<i32>("rank").copied(),
        chosen: None,
        paused: false,
        help: false,
        notice: String::new(),
        interval: matches.get_one("interval").copied().unwrap_or(Duration::from_secs(1)),
    };
    let mut view =
        View { path, units, paint: terminal::use_colour(text("color"), &stdout), settings, previous: None };
    let mut live_run = LiveRun::new(path);
    if interactive {
        return watch(&mut live_run, &mut view);
    }
    live_run.update();
    let once = matches.get_flag("once");
    if let Some(file) = metrics
        && !once
    {
        loop {
            match check_rank(&live_run, path, view.settings.rank) {
                Ok(()) => openmetrics::write(&live_run, file, view.settings.rank)?,
                // The wanted rank may begin later than others.
                Err(_) if view.settings.rank.is_some_and(|rank| is_of_job(&live_run, rank)) => {}
                Err(error) => return Err(error),
            }
            std::thread::sleep(view.settings.interval);
            live_run.update();
        }
    }
    if live_run.processes.is_empty() {
        bail!(
            "{}: no trace yet; write one with: memtrace run -o {} -- python train.py",
            path.display(),
            path.display()
        );
    }
    check_rank(&live_run, path, view.settings.rank)?;
    if let Some(file) = metrics {
        openmetrics::write(&live_run, file, view.settings.rank)?;
        return Ok(ExitCode::SUCCESS);
    }
    let width = terminal::width(&stdout).unwrap_or(100);
    let lines = view.lines(&live_run, width, 40);
    let mut stdout = stdout.lock();
    for line in lines {
        writeln!(stdout, "{line}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns true if the job has so many ranks that a process of `rank` may still begin.
fn is_of_job(run: &LiveRun, rank: i32) -> bool {
    run.processes.iter().any(|process| (0..process.meta.world_size).contains(&rank))
}

/// Checks that the run has a process of `rank`. Succeeds if the run has no processes yet.
///
/// # Errors
/// When there is no such process; the message lists the ranks.
fn check_rank(run: &LiveRun, path: &Path, rank: Option<i32>) -> Result<()> {
    let ranks = || run.processes.iter().map(|process| process.meta.rank);
    match rank {
        Some(rank) if !run.processes.is_empty() && !ranks().any(|known| known == rank) => {
            Err(selection::no_rank(path, rank, ranks().map(i64::from)).into())
        }
        _ => Ok(()),
    }
}

/// Refreshes the screen until the user quits, or a signal asks this command to end.
fn watch(live_run: &mut LiveRun, view: &mut View<'_>) -> Result<ExitCode> {
    // There is no child: signals are caught so that they do not end this process before the terminal is restored.
    let forwarder = signals::Forwarder::start()?;
    forwarder.no_child();
    let screen = Screen::enter()?;
    let mut next = Instant::now();
    let mut fresh = true;
    let mut request = None;
    while forwarder.asked_to_end().is_none() {
        if Instant::now() >= next {
            if !view.settings.paused {
                live_run.update();
                view.remember(live_run);
                fresh = true;
            }
            if let Some(notice) = answer(&mut request) {
                view.settings.notice = notice;
                fresh = true;
            }
            next = Instant::now() + view.settings.interval;
        }
        if std::mem::take(&mut fresh) {
            let (width, height) = screen.size();
            screen.show(&view.lines(live_run, width, height))?;
        }
        let rest = next.saturating_duration_since(Instant::now());
        // A signal does not end the wait.
        if !crossterm::event::poll(rest.min(SIGNAL_INTERVAL))? {
            continue;
        }
        fresh = true;
        let Event::Key(key) = crossterm::event::read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        let settings = &mut view.settings;
        match key.code {
            _ if settings.help => settings.help = false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => break,
            KeyCode::Char('q') | KeyCode::Esc => break,
            KeyCode::Char(' ') => settings.paused = !settings.paused,
            KeyCode::Char('h' | '?') => settings.help = true,
            KeyCode::Char('b') => settings.by = (settings.by + 1) % GROUPINGS.len(),
            KeyCode::Char('s' | '>') => settings.sort = (settings.sort + 1) % SORTS.len(),
            KeyCode::Char('<') => settings.sort = (settings.sort + SORTS.len() - 1) % SORTS.len(),
            KeyCode::Char('r') => view.next_process(live_run),
            KeyCode::Char('d') => view.settings.notice = ask(&mut request, view.process(live_run)),
            KeyCode::Char('+') => settings.interval = (settings.interval / 2).max(Duration::from_millis(100)),
            KeyCode::Char('-') => settings.interval = (settings.interval * 2).min(Duration::from_secs(60)),
            KeyCode::Char(typed) => {
                if let Some(by) = GROUPINGS.iter().position(|(key, _)| *key == typed) {
                    settings.by = by;
                }
            }
            _ => {}
        }
    }
    drop(screen);
    Ok(match forwarder.asked_to_end() {
        Some(signal) => signals::end_by(signal),
        None => ExitCode::SUCCESS,
    })
}

/// Asks a process for the detail of its next steps. Returns a line for the screen: a confirmation, or the
/// reason why the process cannot be asked.
fn ask(request: &mut Option<Request>, process: Option<&LiveProcess>) -> String {
    let Some(process) = process.filter(|process| !process.ended) else {
        return "detail: no process of this run is running".to_owned();
    };
    // Drop an earlier request first, because its lock would make this request fail.
    *request = None;
    match Request::to_writer(&process.meta.journal, DETAIL_STEPS) {
        Ok(sent) => {
            let pid = sent.pid;
            *request = Some(sent);
            format!(
                "detail: requested {DETAIL_STEPS} steps of process {pid}; recording starts when its next \
                 step begins"
            )
        }
        Err(error) => format!("detail: {error:#}"),
    }
}

/// Returns a line with the answer to the request, or with the reason why it failed, and drops the request.
/// Returns `None` without a request, or while there is no answer.
fn answer(request: &mut Option<Request>) -> Option<String> {
    let answer = match request.as_ref()?.answer() {
        Ok(None) => return None,
        Ok(Some(answer)) => format!("detail: {answer}"),
        Err(error) => format!("detail: {error:#}"),
    };
    *request = None;
    Some(answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interval_is_a_number_of_seconds_within_its_range() {
        assert_eq!(interval("0.1"), Ok(Duration::from_millis(100)));
        assert_eq!(interval("3600"), Ok(Duration::from_secs(3600)));
        for text in ["nan", "NaN", "inf", "-1", "0", "0.09", "3601", "1e999", "", "1s"] {
            let error = command().try_get_matches_from(["live", "--interval", text]).expect_err(text);
            assert!(error.to_string().contains("from 0.1 to 3600"), "{text}: {error}");
        }
    }
}
