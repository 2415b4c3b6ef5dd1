//! The Python side: the tracer that runs inside the program's interpreter, and the functions that it calls.
//!
//! [`injection`] stands above the others; all of them call Python through [`crate::ffi::cpython`].

pub(crate) mod callbacks;
pub(crate) mod errors;
pub(crate) mod gradients;
pub(crate) mod injection;
pub(crate) mod module_calls;
mod native;
pub(crate) mod op_io;
pub(crate) mod tags;
