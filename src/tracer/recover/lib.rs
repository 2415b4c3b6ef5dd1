//! Recovery of traces of killed processes, from their journals.
//!
//! A killed process leaves its journal. The last checkpoint in the journal records how much of the trace is
//! valid, and which events are in the trace. Recovery encodes the other events with the same
//! [`memtrace_encode::Encoder`] that the process used, resumed from the rows of the trace. Recovery reads the
//! journal instead of mapping it, because the file may be truncated or not be a journal at all.
#![forbid(unsafe_code)]

mod begin;
mod fate;
mod journal;
mod named;
mod orphans;
mod repair;
#[doc(hidden)]
pub mod testing;

pub use begin::{Begun, begin};
pub use fate::Fate;
pub use orphans::{Leftover, Swept, sweep};
pub use repair::{Repaired, Rest, repair, repair_beside, whole_lines};

#[cfg(test)]
mod tests;
