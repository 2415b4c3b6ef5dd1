//! From event to row.
//!
//! ```text
//! hook -> Recorder (a thread's lane) -> chunk -> channel -> writer thread -> Encoder -> CSV
//! ```
//!
//! Hooks run on the program's threads, often under the caching allocator's mutex. They store one
//! [`memtrace_trace::Event`] in a chunk of their own and are gone. The writer thread alone does the
//! rest: it merges the threads by clock, turns events into rows and writes them.
//!
//! The state of this crate lives as long as the process, or until a fork: the child starts afresh.

pub mod clock;
pub mod encoder;
pub mod forklock;
pub mod holders;
pub mod intern;
pub mod journal;
mod lane;
pub mod leftover;
mod loose;
mod merge;
mod output;
pub mod recorder;
mod sampling;
mod slots;
pub mod summary;
#[doc(hidden)]
pub mod testing;
pub mod words;
mod writer_thread;

pub use recorder::{Recorder, Session};
