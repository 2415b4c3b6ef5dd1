//! Encodes events as rows.
//!
//! The same [`Encoder`] serves the writer thread of the traced process and the recovery of a killed process,
//! which passes it the events of the journal. The state of the encoder lives as long as the trace.
#![forbid(unsafe_code)]

mod definitions;
mod emitter;
mod encoder;
mod keys;
mod live;
mod losses;
mod memory;
mod own_names;
mod physical;
mod samples;
pub mod stacks;
pub mod statistics;
mod text;
mod unlisted;

pub use emitter::RowSink;
pub use encoder::{BriefPlan, Encoder, RowPosition, lost};
pub use live::{Live, OutOfMemory, Owner};
