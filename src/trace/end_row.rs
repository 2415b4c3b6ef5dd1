//! The text of the `end` row, the last row of a complete trace.
//!
//! The first word is the [`Ending`] of the trace. `key=value` words follow: first the words in
//! [`EndText::more`], such as the phantom device's, then the counts of lost events, anomalies and
//! formulas.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::key_values::value_of;
use crate::text_enum::text_enum;

text_enum! {
    /// The way a trace ended.
    Ending {
        /// The process ended.
        Exit = "exit",
        /// The process replaced its program.
        Exec = "exec",
        /// The trace continues in another file.
        Rotated = "rotated",
        /// The process was killed; the trace was completed from its journal.
        Killed = "killed",
        /// The process could not write the trace any further (a full disk); it was completed from its journal.
        Stopped = "stopped",
    }
}

impl Ending {
    /// Returns the ending in the text of an `end` row, or `None` for any other text.
    #[must_use]
    pub fn from_text(text: &str) -> Option<Ending> {
        Ending::parse(text.split(' ').next()?)
    }
}

/// The text of an `end` row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EndText<'a> {
    /// The ending of the trace.
    pub ending: Ending,
    /// Further `key=value` words; may be empty.
    pub more: &'a str,
    /// The number of lost events.
    pub lost: u64,
    /// The number of contradictions between events, by kind.
    pub anomalies: Anomalies,
    /// The number of texts with an added quote, because a spreadsheet would read them as formulas. `None` if
    /// unknown, because a command completed the trace from its journal.
    pub formulas: Option<u64>,
}

/// The number of contradictions between the events of a process, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anomalies {
    /// The number of frees of an address that was not live.
    pub unmatched_frees: u64,
    /// The number of allocations at an address that was live, so that the free in between was missed.
    pub missed_frees: u64,
    /// The number of times that the allocator's total of segments differed from the recorded calls.
    pub corrections: u64,
    /// The number of times that the allocator's total of blocks differed from the sum of its reports.
    pub gaps: u64,
}

impl fmt::Display for EndText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let EndText { ending, more, lost, anomalies, formulas } = self;
        let Anomalies { unmatched_frees, missed_frees, corrections, gaps } = anomalies;
        let space = if more.is_empty() { "" } else { " " };
        write!(
            f,
            "{ending}{space}{more} lost={lost} unmatched_frees={unmatched_frees} missed_frees={missed_frees} corrections={corrections} gaps={gaps}"
        )?;
        formulas.map_or(Ok(()), |formulas| write!(f, " {FORMULAS}={formulas}"))
    }
}

/// The key for the number of completed training steps.
pub const STEPS: &str = "steps";

/// The key for the signal that ended a killed process, as its parent observed it.
pub const SIGNAL: &str = "signal";

/// The key for the signal with which `memtrace run` was asked to end the program, before the kill.
pub const ASKED: &str = "asked";

/// The key for the number of processes that the kernel has killed in the container for lack of memory. A
/// command reads this number when it completes the trace.
pub const KILLS: &str = "kills";

/// The key for the number of processes on the whole machine that the kernel has killed for lack of memory
/// since boot. It is read at the same time as the number for [`KILLS`].
pub const MACHINE_KILLS: &str = "machine_kills";

/// The key that marks a process with unknown modules, categories and steps, because torch's hooks were never
/// installed.
pub const WITHOUT_MODULES: &str = "without_modules";

/// The key for [`EndText::formulas`].
const FORMULAS: &str = "formulas";

/// Returns [`EndText::formulas`] from the text of an `end` row.
#[must_use]
pub fn formulas(text: &str) -> Option<u64> {
    number(text, FORMULAS)
}

/// The name among the guesses of a simulated run whose cuDNN cannot choose plans without a device (before 9.8).
/// Its convolutions take no workspace there.
pub const OLD_CUDNN: &str = "cudnnWorkspaces";

/// The key for the number of bytes that the fullest card needed, including its CUDA context (`--past-oom`).
pub const NEEDED_BYTES: &str = "needed_bytes";

/// Returns the value of [`NEEDED_BYTES`] in the text of an `end` row, or `None` without `--past-oom`.
#[must_use]
pub fn needed_bytes(text: &str) -> Option<i64> {
    number(text, NEEDED_BYTES)
}

/// Returns the word of an `end` row that counts the names replaced by `(too many names)`, followed by a
/// space. Empty for 0.
#[must_use]
pub fn refused_names_word(times: u64) -> String {
    if times == 0 { String::new() } else { format!("too_many_names={times} ") }
}

/// Returns the number after `key` in the text of an `end` row, or `None` if the text has no such key.
///
/// ```
/// use memtrace_trace::end_row::{Ending, SIGNAL, number};
///
/// let text = "killed signal=9 lost=0";
/// assert_eq!(Ending::from_text(text), Some(Ending::Killed));
/// assert_eq!(number(text, SIGNAL), Some(9));
/// ```
#[must_use]
pub fn number<T: FromStr>(text: &str, key: &str) -> Option<T> {
    value_of(text, key)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key_values::key_values;

    #[test]
    fn the_text_of_an_end_row_comes_back() {
        let mut text = EndText {
            ending: Ending::Exit,
            more: "invented_reads=3",
            lost: 1,
            anomalies: Anomalies { unmatched_frees: 2, missed_frees: 3, corrections: 4, gaps: 5 },
            formulas: None,
        };
        let written = text.to_string();
        assert_eq!(
            written,
            "exit invented_reads=3 lost=1 unmatched_frees=2 missed_frees=3 corrections=4 gaps=5"
        );
        assert_eq!(Ending::from_text(&written), Some(Ending::Exit));
        assert_eq!(key_values(&written).nth(1), Some(("lost", "1")));
        assert_eq!(formulas(&written), None);
        text.formulas = Some(6);
        assert_eq!(text.to_string(), format!("{written} formulas=6"));
        assert_eq!(formulas(&text.to_string()), Some(6));
        assert_eq!(needed_bytes(&text.to_string()), None);
        text.more = "needed_bytes=7";
        assert_eq!(needed_bytes(&text.to_string()), Some(7));
        text.more = "";
        assert!(text.to_string().starts_with("exit lost=1 "));
        assert_eq!(Ending::from_text("(none)"), None);
    }
}
