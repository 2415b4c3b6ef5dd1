//! From file to replayed state to answers.
//!
//! A trace is read as a stream of records ([`stream`]), which one engine turns into live memory over
//! time ([`replay`]); each report is a small file on top of that, in one table ([`reports::REPORTS`])
//! that the command, its help and its tests walk. Nothing here prints or parses arguments. What is unsafe is
//! in one file, `scan/cpu.rs`, which asks the processor for what safe Rust has no words for.
#![deny(unsafe_code)]

pub mod at;
mod belt;
pub mod categories;
pub mod curve;
pub mod error;
pub mod exports;
pub mod follow;
pub mod group;
pub mod html;
pub mod input;
pub mod layout;
pub mod live;
pub mod op_calls;
pub mod options;
pub mod page;
pub mod phantom;
pub mod play;
pub mod profile;
pub mod record;
pub mod replay;
pub mod reports;
mod rst;
mod scan;
pub mod series;
mod stack;
pub mod stacks;
pub mod stream;
#[doc(hidden)]
pub mod testing;
pub mod texts;

pub use error::{Error, Result};
