//! The functions that stand before the real ones, a folder for each library that has them.

pub(crate) mod c_api;
mod cuda;
pub(crate) mod libc;
mod nccl;
pub(crate) mod nvtx;
mod reduced_buffers;
mod torch;
