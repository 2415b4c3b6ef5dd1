//! The contract between the traced process and the command.
//!
//! The preloaded library writes with these types and the command reads with them. Each rule that both sides
//! need is defined once, here: the columns, the names of files and ranges, the allocator's rounding, the
//! settings. The crate has no global state and no unsafe code.
//!
//! Units: names end in `_bytes` or `_ns`; an `addr` is a device or host address. No function in this crate
//! takes two of the three, so they do not need separate types.
#![forbid(unsafe_code)]

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
compile_error!(
    "memtrace builds for x86-64 and, untested on a real machine, for aarch64: no other processor's calling convention is implemented"
);

pub mod api;
pub mod category;
pub mod columns;
pub mod command;
pub mod communicator;
pub mod config;
pub mod context;
pub mod counts;
pub mod csv;
pub mod detail;
pub mod elf;
pub mod end_row;
pub mod error;
pub mod event;
pub mod event_name;
pub mod files;
pub mod first_use;
pub mod form;
pub mod gpu_process;
pub mod hello;
pub mod host;
pub mod journal;
pub mod keep;
pub mod key_values;
pub mod ledger;
pub mod memory;
pub mod meta;
pub mod model_fact;
pub mod private_file;
pub mod ranges;
pub mod rounding;
pub mod sample;
pub mod server_mark;
pub mod stacks;
pub mod text;
mod text_enum;
pub mod units;
pub mod verdict;

pub use api::Api;
pub use category::Category;
pub use columns::{Row, SCHEMA_VERSION};
pub use error::{Error, Result};
pub use event::{Claim, Event, Header, Payload};
pub use event_name::EventName;
pub use meta::Meta;
pub use verdict::Verdict;
