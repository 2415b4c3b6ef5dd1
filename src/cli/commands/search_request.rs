//! `memtrace leaks --holders --pid`: asks a running process to search for the holders of memory, and waits
//! for its answer.
//!
//! The request works like `memtrace live --detail`: it is a word in the journal that the process reads when a
//! step begins.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use memtrace_analysis::options::Options;
use memtrace_analysis::reports::SearchRequest;
use memtrace_analysis::state::retained::RetainedSearches;

use super::process_request::Request;
use crate::terminal;
use crate::trace_input;

/// The time between two checks for the answer.
const PAUSE: Duration = Duration::from_millis(200);
/// The maximum time from the moment when the process takes the request until the rows of the search are in
/// the file.
const WRITTEN: Duration = Duration::from_secs(20);

/// Asks the process, waits for its next step to begin and for the answer, and returns the path of the trace
/// with the answer. If the answer is not written within [`WRITTEN`], prints a message and returns the path.
///
/// # Errors
/// When the process cannot be asked, ends before its next step, or begins no step within `patience_s`
/// seconds.
pub(super) fn ask(SearchRequest { pid, patience_s }: SearchRequest) -> Result<PathBuf> {
    let mut before = 0;
    let request = Request::to_search(pid, |trace| before = last_search(trace))?;
    let trace = request.trace()?;
    let since = Instant::now();
    while !request.is_taken()? {
        if since.elapsed() >= Duration::from_secs(patience_s) {
            bail!(
                "process {pid} has not begun a step for {patience_s} s; it searches when its next step \
                 begins, and memtrace leaks --holders {} then shows the answer",
                trace.display()
            );
        }
        std::thread::sleep(PAUSE);
    }
    let taken = Instant::now();
    loop {
        let look = Instant::now();
        if last_search(&trace) > before {
            break;
        }
        if taken.elapsed() >= WRITTEN {
            terminal::say(&format!(
                "process {pid} has not searched: it does not use torch or is inside a long call, \
                 MEMTRACE_RETAINED is off, or the search takes longer"
            ));
            break;
        }
        // Each check reads the whole trace. If that takes long, wait longer between two checks.
        std::thread::sleep(PAUSE.max(look.elapsed() * 4));
    }
    Ok(trace)
}

/// Returns the number of the last search in the trace that a command asked for; 0 if no command asked or the
/// trace cannot be read.
fn last_search(trace: &Path) -> i64 {
    let read = || -> Result<i64> {
        let input = trace_input::open_plain(trace)?;
        let mut last = 0;
        for trace in &input.traces {
            let searches = RetainedSearches::read(trace, &Options { lenient: true, ..Options::default() })?;
            // Ignore other searches, which memtrace starts when memory grows or runs out.
            let asked = searches.all.iter().rev().find(|search| search.why == "command");
            last = last.max(asked.map_or(0, |search| search.number));
        }
        Ok(last)
    };
    read().unwrap_or(0)
}
