//! The Python side: the tracer that runs inside the program's interpreter, and the functions that it calls.
//!
//! [`injection`] loads the tracer, whose files are in `tracer/`; `native` has the functions that the tracer
//! calls, and [`callbacks`] has the functions that the tracer returns. [`module_calls`],
//! [`optimizer_steps`] and `sharding_calls` intercept calls of the program through [`vectorcall`]. [`gradients`]
//! and [`tags`] record the use of blocks, and [`op_io`] records the storages of ops. [`errors`] counts the
//! tracer's exceptions. [`live_objects`] searches the heap; `referrers`, `frame_values` and `saved_tensors` find the
//! objects, variables and autograd nodes that hold a tensor.
//!
//! C calls the tracer only through [`hidden`], so that the profilers and debuggers of the program do not see
//! the tracer.
//!
//! All these modules call Python through [`crate::ffi::cpython`].

pub(crate) mod callbacks;
pub(crate) mod errors;
mod frame_values;
pub(crate) mod gradients;
pub(crate) mod hidden;
pub(crate) mod injection;
pub(crate) mod live_objects;
pub(crate) mod module_calls;
mod native;
pub(crate) mod op_io;
pub(crate) mod optimizer_steps;
pub(crate) mod own_threads;
mod referrers;
mod saved_tensors;
mod sharding_calls;
pub(crate) mod tags;
mod vectorcall;
