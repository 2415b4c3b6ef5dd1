//! Recovery of killed processes: finishes a trace from the journal of its process.
//!
//! A process that is killed leaves its journal behind. The last checkpoint in it says how much of the trace is
//! whole and which events are in it. Recovery encodes the other events with the same [`memtrace_encode::Encoder`]
//! that the process used, resumed from the rows of the trace. It reads bytes and maps nothing, because the file may
//! be cut off or may be no journal at all.
#![forbid(unsafe_code)]

mod begin;
mod fate;
mod journal;
mod named;
mod orphans;
mod repair;
#[doc(hidden)]
pub mod testing;

pub use begin::begin;
pub use fate::Fate;
pub use orphans::{Leftover, Swept, sweep};
pub use repair::{Repaired, Rest, repair, repair_beside, whole_lines};

#[cfg(test)]
mod tests;
