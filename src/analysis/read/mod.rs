//! Reads the files of a run: finds them, parses their rows into records in order, and interns their texts.

mod blocks;
mod foreign;
pub mod input;
mod ordered_pool;
pub(crate) mod packed_file;
mod profiler;
pub mod record;
mod removed_parts;
pub(crate) mod scan;
pub(crate) mod snapshot;
pub(crate) mod source;
pub mod stream;
pub mod symbols;
pub(crate) mod tail;
pub mod together;
