//! The hot path: from a hook to the writer thread.
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
mod control;
pub mod fast_tls;
pub mod fork_lock;
pub mod intern;
mod queue;
pub mod recorder;
mod session;
mod write;

pub use recorder::Recorder;
pub use session::{SampleDevices, Session};
