//! The memory that a program keeps without need, for the reports `leaks` and `advise`.

use memtrace_trace::Verdict;
use serde_json::{Value, json};

use super::finding::{GROWS, KEPT, OomCase};
use super::kept_reasons::{Kept, Words, words};
use super::trace_to_oom::TraceToOom;
use super::whole_trace::WholeTrace;
use crate::error::Result;
use crate::options::Options;
use crate::read::stream::TraceFile;
use crate::render::numbers::upper_first;
use crate::render::printer::{Cell, Printer, Style};
use crate::state::retained::{RetainedSearch, RetainedSearches};

/// Kept memory is listed above the changes that `memtrace advise` proposes if it is at least one part in
/// `LEAST_KEPT` of the peak.
const LEAST_KEPT: i64 = 10;

/// Memory that a program keeps without need. Freeing it comes before any other change.
pub(in crate::reports) struct KeptMemory {
    /// The verdict of `memtrace oom`.
    verdict: &'static str,
    /// The holder that keeps it, as a sentence without a full stop.
    because: String,
    tries: Vec<String>,
}

impl KeptMemory {
    /// Finds memory that is kept without need: from the verdict on the OOM or, in a run without an OOM, from
    /// the last search for kept memory.
    ///
    /// # Errors
    /// If the trace cannot be read.
    pub(in crate::reports) fn find(
        trace: &TraceFile,
        ended_in_oom: bool,
        peak: i64,
        options: &Options,
    ) -> Result<Option<KeptMemory>> {
        if ended_in_oom {
            let (whole, _) = WholeTrace::read(trace, options)?;
            let Some(at) = TraceToOom::read(trace, &whole, options)? else { return Ok(None) };
            let case = OomCase::new(&at);
            return Ok(case.is_kept().then(|| KeptMemory {
                verdict: case.verdict(),
                because: case.because(options.units),
                tries: case.tries(options.units),
            }));
        }
        let searches = RetainedSearches::read(trace, options)?;
        let holders = searches.to_report().into_iter().flat_map(RetainedSearch::retained);
        let material = holders.filter(|holder| holder.bytes >= peak / LEAST_KEPT).max_by_key(|one| one.bytes);
        Ok(material.map(|holder| {
            let why = match (holder.text("kind"), holder.verdict) {
                ("unused", _) => Kept::Unused,
                (_, Some(Verdict::Grows)) => Kept::Grows,
                _ => Kept::Traceback,
            };
            let Words { because, tries } = words(why);
            KeptMemory {
                verdict: if why == Kept::Grows { GROWS } else { KEPT },
                because: format!("{}: {because}", holder.line(options.units)),
                tries: tries.iter().map(|text| (*text).to_owned()).collect(),
            }
        }))
    }

    /// Returns the sentence about the holder, without the verdict.
    pub(in crate::reports) fn line(&self) -> &str {
        &self.because
    }

    pub(in crate::reports) fn print(&self, printer: &mut Printer) {
        printer.line([
            Cell::new(upper_first(self.verdict), Style::Alarm),
            format!(". {}.", upper_first(&self.because)).into(),
        ]);
        for advice in &self.tries {
            printer.plain(format!("  try: {advice}"));
        }
        printer.plain(
            "Fix this first. Otherwise, the changes below lower the peak, but it comes back or \
             keeps growing.",
        );
        printer.gap();
    }

    pub(in crate::reports) fn json(&self) -> Value {
        json!({ "verdict": self.verdict, "because": self.because, "try": self.tries })
    }
}
