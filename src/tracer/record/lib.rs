//! The hot path: from a hook to the writer thread.
//!
//! ```text
//! hook -> Recorder (a thread's lane) -> chunk -> channel -> writer thread -> Encoder -> CSV
//! ```
//!
//! Hooks run on the threads of the program, often under the mutex of the caching allocator. They only store
//! one [`memtrace_trace::Event`] in a chunk of their thread. The writer thread does the rest: it merges the
//! threads by clock, encodes events to rows and writes them.
//!
//! The state of this crate lives as long as the process, or until a fork, because a child starts with new
//! state.

pub mod clock;
mod control;
pub mod device_calls;
pub mod fast_tls;
pub mod fork_lock;
pub mod intern;
pub mod own_page;
pub mod per_thread;
pub mod pinned_requests;
mod queue;
pub mod recorder;
mod session;
mod step;
mod write;

pub use recorder::Recorder;
pub use session::{SampleDevices, SampledDevice, Session};
