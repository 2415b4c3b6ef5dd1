//! Reads traces and answers questions about them.
//!
//! The modules; each imports only from those above it:
//!
//! - [`read`]: the files of a run, as a stream of records.
//! - [`state`]: records replayed into live memory over time.
//! - [`requests`]: the requests to the caching allocator, to make them again.
//! - [`profile`]: the roles of blocks, inferred from the flow of data between ops.
//! - [`render`]: text for a terminal.
//! - [`selection`]: the part of a run that the user selects.
//! - [`reports`], [`exports`] and [`html`]: the answers. Each report and each export is one file and one line
//!   of a table ([`reports::REPORTS`], [`exports::EXPORTS`]) that the command, its help and its tests walk.
//!
//! Nothing here prints or parses arguments. The only unsafe code is in `read/scan/cpu.rs`, for instructions
//! that safe Rust has no names for, and in [`allocator`], whose trait is unsafe.
#![deny(unsafe_code)]

pub mod allocator;
pub mod error;
pub mod exports;
pub mod html;
pub mod options;
pub mod profile;
pub mod read;
pub mod render;
pub mod reports;
pub mod requests;
pub mod selection;
pub mod state;
#[doc(hidden)]
pub mod testing;
pub mod whatif;

pub use error::{Error, Result};
