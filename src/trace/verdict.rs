//! The verdicts of a search for the holders of memory.

use serde::{Deserialize, Serialize};

use crate::text_enum::text_enum;

text_enum! {
    /// What a search for holders says about the memory that a holder keeps: the field `verdict` of its row.
    Verdict {
        /// It keeps blocks from more and more steps.
        Grows = "grows",
        /// A traceback keeps blocks of old steps.
        Traceback = "traceback",
        /// Only an optimizer has these parameters.
        Unused = "unused",
        /// It keeps blocks of the last steps only.
        Window = "window",
        /// It keeps blocks of early steps only.
        Old = "old",
        /// It keeps blocks of the current step or of the step before.
        Recent = "recent",
    }
}

impl Verdict {
    /// Returns true if the memory is kept without need.
    #[must_use]
    pub const fn is_retained(self) -> bool {
        matches!(self, Verdict::Grows | Verdict::Traceback | Verdict::Unused)
    }
}
