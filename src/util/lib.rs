//! What the tracer, the phantom and the command share below the contract: processes, sizes, names.
#![forbid(unsafe_code)]

pub mod names;
pub mod process;
pub mod size;
