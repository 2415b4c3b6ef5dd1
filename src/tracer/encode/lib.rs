//! Encodes events as rows.
//!
//! The same [`Encoder`] serves the writer thread of the traced process and the recovery of a killed process,
//! which passes it the events of the journal. The state of the encoder lives as long as the trace.
#![forbid(unsafe_code)]

mod blocks;
mod brief;
mod calls;
mod definitions;
mod encoder;
mod io;
mod keys;
mod live;
pub mod lost;
mod memory;
mod opening;
mod own_names;
mod physical;
mod resume;
mod rows;
mod samples;
pub mod stacks;
pub mod statistics;
mod tags;
mod unlisted;
mod virtual_memory;

pub use brief::BriefPlan;
pub use encoder::{Encoder, RowSink};
pub use live::{Live, OutOfMemory, Owner};
pub use rows::RowPosition;
