//! The side of the tracer that runs inside Python: injection, calls of modules, gradients, and what ops read and write.

pub(crate) mod gradients;
pub(crate) mod injection;
pub(crate) mod module_calls;
pub(crate) mod op_io;
