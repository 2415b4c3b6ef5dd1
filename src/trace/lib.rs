//! What the traced process and the command agree on.
//!
//! The preloaded library writes with these types and the command reads with them, so a rule that
//! both sides need (the columns, the names of ranges, the allocator's rounding, the settings) is
//! written once, here. Nothing in this crate keeps state, and nothing in it is unsafe.
#![forbid(unsafe_code)]

pub mod api;
pub mod category;
pub mod columns;
pub mod config;
pub mod context;
pub mod csv;
pub mod end_row;
pub mod error;
pub mod event;
pub mod event_name;
pub mod files;
pub mod journal;
pub mod ledger;
pub mod meta;
pub mod ranges;
pub mod rounding;
pub mod sample;
pub mod stacks;
pub mod text;
mod text_enum;
pub mod units;

pub use api::Api;
pub use category::Category;
pub use columns::{Row, SCHEMA_VERSION};
pub use error::{Error, Result};
pub use event::{Event, Header, Payload};
pub use event_name::EventName;
pub use meta::Meta;
