//! What a finding is: a cause, with its rule, its sentences and its remedies, or a sentence about an OOM.

use memtrace_trace::units::Unit;

use super::super::device_users::Neighbours;
use super::evidence::Evidence;
use super::kept_reasons::Kept;
use super::trace_to_oom::TraceToOom;
use crate::state::block::Owner;
use crate::state::retained::Holder;

/// The text after a saving that may be less than the missing memory.
pub(super) const UNSURE: &str = ", may not be enough alone";

/// A remark or a remedy: returns a sentence without a full stop, or `None` if the finding does not apply.
pub(super) type Sentence = fn(&OomCase<'_>, Unit) -> Option<String>;

/// A possible cause of an OOM.
pub(super) struct Cause {
    pub(super) verdict: &'static str,
    /// Finds the cause. The causes before it in the table do not apply.
    pub(super) find: fn(&Evidence) -> Option<Blame>,
    /// Returns the missing bytes for the line of the verdict; empty if the card had them or its size is
    /// unknown.
    pub(super) missing: fn(&OomCase<'_>, Unit) -> String,
    /// Returns the reason, with the figures that prove it, as a sentence without a full stop.
    pub(super) because: fn(&OomCase<'_>, Unit) -> String,
    /// Returns a sentence that follows the reason, or an empty text.
    pub(super) outlook: fn(&OomCase<'_>, Unit) -> String,
    /// Returns the remedies.
    pub(super) tries: fn(&OomCase<'_>) -> Vec<&'static str>,
    pub(super) help: Help,
}

impl Cause {
    pub(super) const DEFAULT: Cause = Cause {
        verdict: "",
        find: |_| None,
        missing: |case, units| match case.evidence.lacking() {
            bytes if case.evidence.device.capacity > 0 && bytes > 0 => {
                format!(": {} missing for this request", units.show(bytes))
            }
            _ => String::new(),
        },
        because: |_, _| String::new(),
        outlook: |_, _| String::new(),
        tries: |_| Vec::new(),
        help: Help::Own,
    };
}

/// What helps against a cause.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Help {
    /// Only the remedies of the cause.
    Own,
    /// Freeing the memory that the program keeps without need. It comes before any other change.
    FreeKept,
    /// A lower peak, so that the changes of `memtrace advise` apply, too.
    LowerPeak,
    /// A lower peak, because the program itself needs too much, so that the remedies for that apply, too.
    LowerNeed,
}

/// The cause that was found.
#[derive(Clone)]
pub(super) struct Blame {
    pub(super) cause: &'static Cause,
    /// The holder that is responsible, if there is one.
    pub(super) kept: Option<(Holder, Kept)>,
}

impl Blame {
    pub(super) fn of(cause: &'static Cause) -> Blame {
        Blame { cause, kept: None }
    }

    pub(super) fn on(cause: &'static Cause, (holder, why): (&Holder, Kept)) -> Blame {
        Blame { cause, kept: Some((holder.clone(), why)) }
    }
}

/// The verdict on memory that grows from step to step.
pub(super) const GROWS: &str = "memory grows";
/// The verdict on memory that the program keeps without need.
pub(super) const KEPT: &str = "memory is kept";

/// One request that ran out of memory.
pub(super) struct OomCase<'a> {
    pub(super) oom_state: &'a TraceToOom<'a>,
    /// The owner and the bytes of each live block of this device.
    pub(super) live: Vec<(Owner, i64)>,
    pub(super) evidence: Evidence,
    pub(super) blame: Blame,
    /// The other processes of the run on this GPU, if they were looked for.
    pub(super) neighbours: Option<Neighbours>,
    /// The program's own lines of Python that made the request, innermost first.
    pub(super) lines: Vec<String>,
    /// True if a `_foreach_` op, which works on all parameters at once, made the request.
    pub(super) is_in_foreach: bool,
}

impl OomCase<'_> {
    /// Returns the free memory of the device as text. Without a sample of the device it is an upper bound,
    /// and the text says so.
    pub(super) fn room_text(&self, units: Unit) -> String {
        let most = if self.evidence.device.is_sampled { "" } else { "at most " };
        format!("{most}{}", units.show(self.evidence.device.room))
    }

    /// Returns true if the program itself needs too much.
    pub(super) fn needs_less(&self) -> bool {
        self.blame.cause.help == Help::LowerNeed
    }

    /// Whether the verdict has the same name as this cause's (several causes share `memory grows`).
    pub(super) fn is_caused_by(&self, cause: &Cause) -> bool {
        self.blame.cause.verdict == cause.verdict
    }
}

/// Returns the command that shows the code of a change, for the line of the change.
pub(super) fn code_of(option: &str) -> String {
    format!("code: memtrace advise {option} TRACE")
}
