//! What the traced process and the command agree on.
//!
//! The preloaded library writes with these types and the command reads with them, so a rule that
//! both sides need (the columns, the names of ranges, the allocator's rounding, the settings) is
//! written once, here. Nothing in this crate keeps state, and nothing in it is unsafe.
#![forbid(unsafe_code)]

pub mod api;
pub mod config;
pub mod error;
pub mod event;
pub mod ledger;
pub mod meta;
pub mod ranges;
pub mod reader;
pub mod rounding;
pub mod sample;
pub mod schema;
pub mod units;
pub mod writer;

pub use api::Api;
pub use error::{Error, Result};
pub use event::{Event, Kind};
pub use meta::Meta;
pub use schema::{Category, EventName, Row, SCHEMA_VERSION};
