//! The writer thread.

mod oom_message;
pub(crate) mod output;
mod sampling;
pub(crate) mod writer;
