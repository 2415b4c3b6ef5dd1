//! Reads the files of a run: finds them, parses their rows into records in order, and interns their texts.
//!
//! - [`input`]: the files of a run; [`stream`]: the rows of a process, over all parts; [`together`]: one reading for
//!   several readers.
//! - `source`, `packed_file`: a file by its first bytes, decompressed; `snapshot`, `profiler`: PyTorch's files as rows;
//!   `foreign`: the files of other programs, for the error.
//! - `blocks`, `ordered_pool`, `scan`: blocks of lines, read and parsed on all cores, in order.
//! - [`record`], [`symbols`]: a parsed row, and its texts as numbers.
//! - `removed_parts`, `tail`: rows for removed parts, and the end of a file that is still being written.

/// The `name` of the rows that list memory without an event of its own in a file of PyTorch, which is mostly older than
/// the first event.
const LIVE: &str = "live";

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
