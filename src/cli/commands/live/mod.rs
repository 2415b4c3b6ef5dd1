//! `memtrace live`: shows a running trace, refreshed: memory in use, its owners, and the free memory left.

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
use memtrace_analysis::state::live_run::LiveRun;
use memtrace_trace::units::Unit;

use crate::args::{self, DEFAULT_FOLDER};
use crate::terminal;
use screen::Screen;
use view::{Choice, SORTS, View};

/// The ways to group live blocks.
const GROUPINGS: &[&str] = &["module", "category", "op", "phase", "step"];

/// The arguments of `memtrace live`.
pub(crate) fn command() -> Command {
    let mut command = Command::new("live")
        .about("Watch a running trace: memory by owner, the step, and the free memory left")
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
                .value_parser(PossibleValuesParser::new(["module", "category", "op", "phase", "step"]))
                .help("Group the live blocks by this; the key b changes it"),
        )
        .arg(
            Arg::new("interval")
                .long("interval")
                .value_name("SECONDS")
                .default_value("1")
                .value_parser(value_parser!(f64))
                .help("Seconds between two refreshes"),
        )
        .arg(
            Arg::new("once")
                .long("once")
                .action(ArgAction::SetTrue)
                .help("Print once and exit, for scripts and pipes"),
        );
    for arg in args::shared_args() {
        if matches!(arg.get_id().as_str(), "rank" | "units" | "color") {
            command = command.arg(arg);
        }
    }
    command
}

/// Shows a run until `q` is pressed, or once.
///
/// # Errors
/// When the request is invalid, there is no trace to show once, or the terminal fails.
pub(crate) fn run(matches: &ArgMatches) -> Result<ExitCode> {
    let path = matches.get_one::<PathBuf>("trace").map_or(Path::new(DEFAULT_FOLDER), PathBuf::as_path);
    let text = |name: &str| matches.get_one::<String>(name).map_or("", String::as_str);
    let units: Unit = text("units").parse().map_err(|why: String| anyhow!(why))?;
    let seconds: f64 = matches.get_one("interval").copied().unwrap_or(1.0);
    let stdout = std::io::stdout();
    let interactive = !matches.get_flag("once") && terminal::width(&stdout).is_some();
    let choice = Choice {
        by: GROUPINGS.iter().position(|key| *key == text("by")).unwrap_or(0),
        sort: 0,
        rank: matches.get_one::<i32>("rank").copied(),
        paused: false,
        help: false,
        interval: Duration::from_secs_f64(seconds.clamp(0.1, 3600.0)),
    };
    let mut view =
        View { path, units, paint: terminal::use_colour(text("color"), &stdout), choice, previous: None };
    let mut follower = LiveRun::new(path);
    if interactive {
        return watch(&mut follower, &mut view);
    }
    follower.update();
    if follower.processes.is_empty() {
        bail!(
            "{}: no trace yet; write one with: memtrace run -o {} -- python train.py",
            path.display(),
            path.display()
        );
    }
    let width = terminal::width(&stdout).unwrap_or(100);
    let lines = view.lines(&follower, width, 40);
    let mut stdout = stdout.lock();
    for line in lines {
        writeln!(stdout, "{line}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Refreshes the screen until the user leaves it.
fn watch(follower: &mut LiveRun, view: &mut View<'_>) -> Result<ExitCode> {
    let screen = Screen::enter()?;
    let mut next = Instant::now();
    let mut fresh = true;
    loop {
        if Instant::now() >= next {
            if !view.choice.paused {
                follower.update();
                view.remember(follower);
                fresh = true;
            }
            next = Instant::now() + view.choice.interval;
        }
        if std::mem::take(&mut fresh) {
            let (width, height) = screen.size();
            screen.show(&view.lines(follower, width, height))?;
        }
        let rest = next.saturating_duration_since(Instant::now());
        if !crossterm::event::poll(rest)? {
            continue;
        }
        fresh = true;
        let Event::Key(key) = crossterm::event::read()? else { continue };
        if key.kind == KeyEventKind::Release {
            continue;
        }
        let choice = &mut view.choice;
        match key.code {
            _ if choice.help => choice.help = false,
            KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => break,
            KeyCode::Char('q') | KeyCode::Esc => break,
            KeyCode::Char(' ') => choice.paused = !choice.paused,
            KeyCode::Char('h' | '?') => choice.help = true,
            KeyCode::Char('b') => choice.by = (choice.by + 1) % GROUPINGS.len(),
            KeyCode::Char(c @ ('m' | 'c' | 'o' | 'p' | 't')) => {
                choice.by = ['m', 'c', 'o', 'p', 't'].iter().position(|key| *key == c).unwrap_or(0);
            }
            KeyCode::Char('s' | '>') => choice.sort = (choice.sort + 1) % SORTS.len(),
            KeyCode::Char('<') => choice.sort = (choice.sort + SORTS.len() - 1) % SORTS.len(),
            KeyCode::Char('r') => view.next_rank(follower),
            KeyCode::Char('+') => choice.interval = (choice.interval / 2).max(Duration::from_millis(100)),
            KeyCode::Char('-') => choice.interval = (choice.interval * 2).min(Duration::from_secs(60)),
            _ => {}
        }
    }
    Ok(ExitCode::SUCCESS)
}
