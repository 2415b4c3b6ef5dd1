//! The functions that intercept functions of other libraries, with a folder per library.

pub(crate) mod c_api;
mod cuda;
pub(crate) mod libc;
mod nccl;
pub(crate) mod nvtx;
mod reduced_buffers;
mod torch;
