//! Code that the tracer, the phantom device and the command share, for processes, host memory, sizes and
//! names.
#![forbid(unsafe_code)]

pub mod cgroup;
pub mod host_memory;
pub mod names;
pub mod phantom_variables;
pub mod process;
pub mod size;
mod tail_jump;
