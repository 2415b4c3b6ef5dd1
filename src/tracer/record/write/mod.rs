//! The writer thread: it drains the event queue, encodes events to rows and writes the files of the trace.

mod compress;
mod definitions_file;
mod exit_summary;
mod gpu_processes;
pub(crate) mod host;
mod known_memory;
mod limits_reached;
pub(crate) mod meta_row;
mod oom_message;
pub(crate) mod output;
mod part;
mod retention;
mod sampling;
mod smaps;
mod thread;
mod window;
pub(crate) mod writer;
