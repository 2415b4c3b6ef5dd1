//! `memtrace live --detail`: asks a running process for the detail of its next steps.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::{Arg, ArgMatches, value_parser};

use crate::commands::process_request::Request;
use crate::terminal;

/// Returns the option that asks a process for detail, and the options that go with it.
pub(super) fn args() -> [Arg; 3] {
    [
        Arg::new("detail")
            .long("detail")
            .value_name("PID")
            .value_parser(value_parser!(u32).range(1..))
            .conflicts_with_all(["trace", "by", "interval", "once", "openmetrics", "rank", "units", "color"])
            .help("Record the next steps of this traced process in full, where MEMTRACE_DETAIL leaves them out, and exit"),
        Arg::new("steps")
            .long("steps")
            .value_name("N")
            .default_value("5")
            .requires("detail")
            .value_parser(value_parser!(u32).range(1..=1_000_000))
            .help("With --detail: the number of steps"),
        Arg::new("wait")
            .long("wait")
            .value_name("SECS")
            .default_value("60")
            .requires("detail")
            .value_parser(value_parser!(u64).range(..=86_400))
            .help("With --detail: give up when no step begins for this long; the request stays pending"),
    ]
}

/// Asks process `pid`, and waits for its answer.
///
/// # Errors
/// When the process cannot be asked, ends before it answers, or does not answer in time.
pub(super) fn ask(pid: u32, matches: &ArgMatches) -> Result<ExitCode> {
    let steps = matches.get_one("steps").copied().unwrap_or_default();
    let patience = Duration::from_secs(matches.get_one("wait").copied().unwrap_or_default());
    let request = Request::to_process(pid, steps)?;
    if request.replaces {
        terminal::say("an earlier request is still pending; this one replaces it");
    }
    let since = Instant::now();
    let answer = loop {
        if let Some(answer) = request.answer()? {
            break answer;
        }
        if since.elapsed() >= patience {
            bail!(
                "process {pid} has not begun a step for {} s; it reads the request when its next step begins",
                patience.as_secs()
            );
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    writeln!(io::stdout().lock(), "{answer}")?;
    Ok(ExitCode::SUCCESS)
}
