//! Rules that the tracer, the phantom device and the command share: processes, sizes, names.
#![forbid(unsafe_code)]

pub mod host_memory;
pub mod names;
pub mod process;
pub mod size;
